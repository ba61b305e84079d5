"""Does relative comparison stand noisy, drifting and distorted rewards better than absolute scores?

Source 000: "Reward models are noisy … within a group of responses to the same prompt, relative ordering is more
reliable", and "Reward drift: Normalization handles changing baselines". Source 001: "Absolute reward values vary
across prompts … Normalization within groups removes this sensitivity". Here additions with a graded reward (the share
of right tokens), spoilt in seven ways: normal noise on each reward, noise without a variance, a third of the rewards
turned upside down, a distortion that keeps their order, a number added to all rewards of a step (drift), and for each
answer a number added, or a factor. Standardised groups (GRPO), ranks and centred rewards (Dr. GRPO, which has no KL
and weights tokens in its own way) beside PPO on the same groups, which holds absolute rewards against a critic that
may learn what prompts have of their own. What counts is true accuracy at the end. Expect groups to be above PPO where
prompts are shifted, ranks where tails are heavy, and no difference under normal noise. Six minutes for the cpu preset
on two cores.

  python -m experiments.claims.questions.reward_noise --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, Bench, Setting, grpo, ppo
from experiments.claims.columns import accuracy, minus, on_the_way, table
from experiments.claims.findings import Claim, Finding, main

SPOILT: dict[str, dict[str, float]] = {
    "clean": {},
    "normal noise": {"gaussian": 0.5},
    "heavy tails": {"heavy": 0.3},
    "flipped": {"flip": 0.3},
    "distorted": {"sharpness": 6.0},
    "drifting": {"drift": 2.0},
    "shifted prompts": {"shift": 2.0},
    "scaled prompts": {"scale": 1.0},
}
METHODS: dict[str, Setting] = {
    "GRPO": grpo(graded=1.0),
    "ranks": grpo(preset="rank", graded=1.0),
    "centred": grpo(preset="dr_grpo", graded=1.0),
    "PPO": ppo(graded=1.0),
}


def measure(bench: Bench) -> Finding:
    settings = {f"{way}: {name}": of.changed(**how) for way, how in SPOILT.items() for name, of in METHODS.items()}
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    rows = table(runs, {"accuracy": accuracy, "on the way": on_the_way}, start="clean: GRPO")

    def above(way: str, one: str = "GRPO", other: str = "PPO") -> np.ndarray:
        return minus(rows, "accuracy", f"{way}: {one}", f"{way}: {other}")

    def unhurt(way: str) -> np.ndarray:
        return minus(rows, "accuracy", f"{way}: GRPO", "clean: GRPO")

    noise, drift, scale = "000, Noise Robustness", "000, Natural Normalization", "001, Robust to Reward Scale"
    order, removed = "relative ordering is more reliable", "normalization removes this sensitivity"
    claims = [
        Claim(noise, order, "accuracy under normal noise, GRPO − PPO", above("normal noise")),
        Claim(noise, order, "accuracy under heavy tails, GRPO − PPO", above("heavy tails")),
        Claim(noise, order, "accuracy with flipped rewards, GRPO − PPO", above("flipped")),
        Claim(noise, order, "accuracy under heavy tails, ranks − GRPO", above("heavy tails", "ranks", "GRPO")),
        Claim(noise, order, "accuracy with distorted rewards, ranks − GRPO", above("distorted", "ranks", "GRPO")),
        Claim(drift, "handles changing baselines", "accuracy of GRPO, drifting − clean", unhurt("drifting"), -0.02),
        Claim(drift, "handles changing baselines", "accuracy with drift, GRPO − PPO", above("drifting")),
        Claim(scale, removed, "accuracy of GRPO, shifted − clean", unhurt("shifted prompts"), low=-0.02),
        Claim(scale, removed, "accuracy of GRPO, scaled − clean", unhurt("scaled prompts"), low=-0.02),
        Claim(scale, removed, "accuracy with shifted prompts, GRPO − PPO", above("shifted prompts")),
        Claim(scale, removed, "accuracy with scaled prompts, GRPO − PPO", above("scaled prompts")),
    ]
    return Finding(rows, claims, drawn=["accuracy"])


if __name__ == "__main__":
    main(measure, __doc__)
