"""GRPO or PPO, and what of the difference is the critic?

Source 001: "81.7%" for GRPO and "78.2%" for PPO, "35K samples" against "100K", "less variance", and of the update:
"similar to PPO, but the relative advantages provide better signal". Here on additions at equal samples: the posts'
algorithm (introduction_post, ratios of whole responses), GRPO as it is used today (ratios of tokens), and PPO with a
critic on the same groups (KL in the reward, at 0.02). They differ in more than a critic: in where the KL is and how
large, in what is averaged over, in what advantages are divided by. So four arms beside them differ in the critic and
the place of the KL alone: β is 0.01, losses are means over tokens, advantages are divided by their deviation over the
batch, and the baseline is a critic's value or the group's mean. Expect no difference that matters in accuracy, or in
samples.

  python -m experiments.claims.questions.ppo_vs_grpo --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, Bench, grpo, ppo
from experiments.claims.columns import (
    accuracy,
    compared,
    jitter,
    learning_curve,
    log_ratio,
    on_the_way,
    steps_to,
    table,
)
from experiments.claims.findings import Also, Finding, Measured, main

POSTS, GRPO, PPO = "posts", "GRPO", "PPO"
CRITIC, GROUP = "critic, KL in the loss", "group mean, KL in the loss"
CRITIC_REWARD, GROUP_REWARD = "critic, KL in the reward", "group mean, KL in the reward"


def measure(bench: Bench) -> Finding:
    settings = {COIN: grpo(coin=1.0), POSTS: grpo(), GRPO: grpo(preset="grpo"), PPO: ppo()}
    settings |= {CRITIC: ppo(kl_coef=0.01, kl_in_reward=False), CRITIC_REWARD: ppo(kl_coef=0.01)}
    settings[GROUP] = grpo(preset="lite_ppo", kl_coef=0.01)
    settings[GROUP_REWARD] = settings[GROUP].changed(kl_in_reward=True)
    runs = bench.runs(settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "reward jitter": jitter}
    rows = table(runs, columns, start=POSTS)

    def sooner(one: str, other: str) -> Measured:
        reached = steps_to(0.95 * np.minimum(accuracy(runs[one]), accuracy(runs[other])))
        return Measured(log_ratio(reached(runs[one]), reached(runs[other])), runs[one].diverged + runs[other].diverged)

    def of(one: str, other: str, read=accuracy) -> Measured:
        return compared(runs, read, one, other)

    primary = {
        "posts_ppo": of(POSTS, PPO),
        "grpo_ppo": of(GRPO, PPO),
        "samples_to_target": sooner(GRPO, PPO),
        "critic": of(GROUP, CRITIC, on_the_way),
    }
    post, update = "001, Experimental Results", "001, Policy Update"
    steadier, place = of(PPO, GRPO, jitter), of(GROUP, GROUP_REWARD)
    also = [
        Also(post, "35K samples against 100K", "ln(samples to a target, posts / PPO)", sooner(POSTS, PPO).values),
        Also(post, "less variance", "change of the score from step to step, PPO − GRPO", steadier.values),
        Also(update, "better signal", f"accuracy, {GROUP} − {CRITIC}", of(GROUP, CRITIC).values),
        Also(update, "better signal", "the same, the KL in the reward", of(GROUP_REWARD, CRITIC_REWARD).values),
        Also("", "place of the KL", f"accuracy, {GROUP} − in the reward", place.values),
        Also("", "place of the KL", f"accuracy, {CRITIC} − in the reward", of(CRITIC, CRITIC_REWARD).values),
    ]
    curves = {name: learning_curve(runs[name]) for name in (GRPO, PPO, GROUP, CRITIC, COIN)}
    return Finding(rows, primary, also, ["accuracy", "on the way"], curves)


if __name__ == "__main__":
    main(measure, __doc__)
