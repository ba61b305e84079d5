"""Is GRPO better than PPO, with fewer samples, faster, steadier, and for less memory and compute?

Source 001: 81.7 against 78.2 with 35K samples against 100K, "2x faster", "loss curves show less variance", "less
sensitive to learning rate choice". Source 000: 8x the compute of SFT against 10x, where PPO has "one response" of
each prompt. Source 003: no critic, "reducing memory and compute overhead by ~50%", and of the mean of a batch as the
baseline: "Same-prompt comparison is much more informative!" Here on additions, each with its tuned settings and as
many completions a step: PPO on the same groups; PPO with one completion of each prompt; and a baseline over the
batch: PPO whose critic stays 0, with λ = 1. A target is 95% of the lower final accuracy of GRPO and PPO; with as many
samples a step, fewer samples and fewer steps are one number. Jitter is the deviation from step to step; that of
GRPO's loss is small by construction: one step a rollout, at ratio 1, leaves of it β KL, of PPO's the critic's loss.
Costs are counted: operations a step as 2 a parameter and token forward and 4 backward, bytes of parameters, optimizer
and reference. Expect about equal accuracy and speed, and costs between a half and two thirds. Four minutes for the
cpu preset on two cores.

  python -m experiments.claims.questions.ppo_vs_grpo --preset cpu
"""

from collections.abc import Callable

import numpy as np

from experiments.claims import columns
from experiments.claims.ablation import COIN, Bench, Setting, grpo, ppo
from experiments.claims.columns import steps_to, table
from experiments.claims.costs import bytes_held, operations
from experiments.claims.findings import Claim, Finding, main

RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
ONE, BATCH = "PPO, one a prompt", "batch baseline"
SAME = "same-prompt comparison is much more informative"
COLUMNS = {
    "accuracy": columns.accuracy,
    "on the way": columns.on_the_way,
    "reward jitter": columns.jitter("reward"),
    "loss jitter": columns.jitter("loss"),
}


def measure(bench: Bench) -> Finding:
    settings = {"GRPO": grpo(), "PPO": ppo(), ONE: ppo(group_size=1, num_prompts=8 * bench.size.num_prompts)}
    settings[BATCH] = ppo(critic_learning_rate=0.0, gae_lambda=1.0)
    swept = {(name, rate): settings[name].changed(learning_rate=rate) for name in ("GRPO", "PPO") for rate in RATES}
    named = {f"{name}, rate {rate:g}": setting for (name, rate), setting in swept.items()}
    runs = bench.runs({COIN: grpo(coin=1.0), f"PPO, {COIN}": ppo(coin=1.0)} | settings | named)
    reached = steps_to(0.95 * np.minimum(runs["GRPO"].final, runs["PPO"].final))
    rows = table(runs, COLUMNS | {"steps to the target": reached}, start="GRPO")

    def ratio(cost: Callable[[Bench, Setting], float], other: str) -> list[float]:
        return [cost(bench, settings["GRPO"]) / cost(bench, settings[other])]

    def spread(name: str) -> np.ndarray:
        return np.ptp([runs[f"{name}, rate {rate:g}"].final for rate in RATES], axis=0)

    def more(column: str, one: str, other: str) -> np.ndarray:
        return columns.minus(rows, column, one, other)

    def sooner(other: str) -> np.ndarray:
        return reached(runs["GRPO"]) / reached(runs[other])

    post, notes, samples = "001, Experimental Results", "003, overview", "35K samples against 100K, 2x faster"
    steadier = more("reward jitter", "PPO", "GRPO")
    claims = [
        Claim(post, "81.7 against PPO's 78.2", "accuracy, GRPO − PPO", more("accuracy", "GRPO", "PPO")),
        Claim(post, "81.7 against PPO's 78.2", f"accuracy, GRPO − {ONE}", more("accuracy", "GRPO", ONE)),
        Claim(post, samples, "samples to the target, GRPO / PPO", sooner("PPO"), high=0.5),
        Claim(post, samples, f"samples to the target, GRPO / {ONE}", sooner(ONE), high=0.5),
        Claim(post, "less variance of the loss", "jitter of it, PPO − GRPO", more("loss jitter", "PPO", "GRPO")),
        Claim(post, "less variance", "jitter of rewards, PPO − GRPO", steadier),
        Claim(post, "less sensitive to the rate", "spread of accuracy, PPO − GRPO", spread("PPO") - spread("GRPO")),
        Claim("000, table", "8x compute against 10x", f"operations, GRPO / {ONE}", ratio(operations, ONE), 0.7, 0.9),
        Claim(notes, "half the compute", "operations, GRPO / PPO", ratio(operations, "PPO"), 0.4, 0.6),
        Claim(notes, "half the memory", "bytes held, GRPO / PPO", ratio(bytes_held, "PPO"), 0.4, 0.6),
        Claim(notes, SAME, f"accuracy on the way, GRPO − {BATCH}", more("on the way", "GRPO", BATCH)),
    ]
    return Finding(rows, claims, drawn=["accuracy", "on the way"])


if __name__ == "__main__":
    main(measure, __doc__)
