"""Does relative comparison stand noisy, distorted and shifted rewards better than absolute scores?

Source 000: "Reward models are noisy … within a group of responses to the same prompt, relative ordering is more
reliable". Source 001: "Absolute reward values vary across prompts … Normalization within groups removes this
sensitivity". Here additions with a graded reward (the share of right tokens), spoilt in four ways: noise without a
variance, a distortion that keeps their order, and for each answer a number added, or a factor, drawn anew for each
seed. The posts' algorithm on standardised rewards and on ranks, and PPO on the same groups. PPO's clip of values, 0.2
in its code, would forbid its critic to follow shifts of 2: here it has none. So PPO
differs from that of `ppo_vs_grpo` in the reward and the clip. What counts is true accuracy, on the way and at the end.
Expect groups to be above PPO where prompts are shifted, and ranks where tails are heavy.

  python -m experiments.claims.questions.reward_noise --preset cpu
"""

from experiments.claims.ablation import COIN, Bench, Setting, grpo, ppo
from experiments.claims.columns import Column, accuracy, compared, on_the_way, table
from experiments.claims.findings import Also, Finding, Measured, main

SPOILT: dict[str, dict[str, float]] = {
    "clean": {},
    "heavy tails": {"heavy": 0.3},
    "distorted": {"sharpness": 6.0},
    "shifted prompts": {"shift": 2.0},
    "scaled prompts": {"scale": 1.0},
}
METHODS: dict[str, Setting] = {
    "GRPO": grpo(graded=1.0),
    "ranks": grpo(preset="introduction_post_rank", graded=1.0),
    "PPO": ppo(graded=1.0, value_clip=1e6),
}


def measure(bench: Bench) -> Finding:
    settings = {f"{way}: {name}": of.changed(**how) for way, how in SPOILT.items() for name, of in METHODS.items()}
    del settings["scaled prompts: ranks"], settings["shifted prompts: ranks"]  # they are those of clean rewards
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    rows = table(runs, {"accuracy": accuracy, "on the way": on_the_way}, start="clean: GRPO")

    def above(way: str, one: str = "GRPO", other: str = "PPO", read: Column = accuracy) -> Measured:
        return compared(runs, read, f"{way}: {one}", f"{way}: {other}")

    order, removed = "relative ordering is more reliable", "normalization removes this sensitivity"
    noise, scale = "000, Noise Robustness", "001, Robust to Reward Scale"
    also = [
        Also(noise, order, "accuracy, ranks − rewards, distorted", above("distorted", "ranks", "GRPO").values),
        Also(scale, removed, "accuracy, GRPO − PPO, shifted prompts", above("shifted prompts").values),
        Also(noise, order, "accuracy, ranks − rewards, clean", above("clean", "ranks", "GRPO").values),
        Also(noise, order, "accuracy, ranks − rewards, heavy tails", above("heavy tails", "ranks", "GRPO").values),
        Also(noise, order, "accuracy, GRPO − PPO, clean", above("clean").values),
        Also(noise, order, "accuracy, GRPO − PPO, heavy tails", above("heavy tails").values),
        Also(noise, order, "accuracy, GRPO − PPO, distorted", above("distorted").values),
        Also(scale, removed, "accuracy, GRPO − PPO, scaled prompts", above("scaled prompts").values),
    ]
    primary = {
        "ranks_distorted": above("distorted", "ranks", "GRPO", on_the_way),
        "shifted_prompts": above("shifted prompts", read=on_the_way),
    }
    return Finding(rows, primary, also, drawn=["accuracy"])


if __name__ == "__main__":
    main(measure, __doc__)
