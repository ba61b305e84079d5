"""Does a schedule of temperatures within a group make it more diverse?

Source 000: "Higher temperature during response generation increases group diversity", and completion i of K is
sampled at 0.7 + 0.3 i / K. Here that schedule beside fixed temperatures from 0.7 to 1.3, one of them its mean, on
additions; all policies are evaluated at temperature 1, and greedily, so that none is favoured.
Diversity is the share of a group's completions that are different. The seed does not say that the schedule makes the
policy better: that it does no harm is our reading. Expect more diversity at higher temperatures, the schedule at its
mean, and little to choose in accuracy. A minute for the cpu preset on two cores.

  python -m experiments.claims.questions.ablate_temperature --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, Bench, Runs, grpo
from experiments.claims.columns import accuracy, last, minus, table
from experiments.claims.findings import Claim, Finding, main

SCHEDULE, MEAN = "0.7 + 0.3 i/8", 0.7 + 0.3 * 3.5 / 8
FIXED = {"0.7": 0.7, "0.83": MEAN, "1.0": 1.0, "1.3": 1.3}
SOURCE = "000, Temperature Schedule"


def greedy(runs: Runs) -> np.ndarray:
    return runs.scores[:, -1, :, -1].mean(1)


def measure(bench: Bench) -> Finding:
    settings = {name: grpo(temperature=temperature) for name, temperature in FIXED.items()}
    settings[SCHEDULE] = grpo(temperature=0.7, temperature_spread=0.3)
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    columns = {"accuracy": accuracy, "greedy": greedy, "different in a group": last("distinct_share", 1.0)}
    columns["different, first steps"] = lambda runs: runs.metrics["distinct_share"][:, :5].mean(1)
    rows = table(runs, columns, start="1.0")

    def more(column: str, one: str, other: str) -> np.ndarray:
        return minus(rows, column, one, other)

    words, early = "higher temperature increases group diversity", "different, first steps"
    claims = [
        Claim(SOURCE, words, "share of different completions, first 5 steps, 1.0 − 0.7", more(early, "1.0", "0.7")),
        Claim(SOURCE, words, "the same share, the schedule − 0.7", more(early, SCHEDULE, "0.7")),
        Claim(SOURCE, "a schedule, not one", "the same share, the schedule − its mean", more(early, SCHEDULE, "0.83")),
        Claim(SOURCE, "a schedule is used", "greedy accuracy, schedule − 1.0", more("greedy", SCHEDULE, "1.0"), -0.02),
    ]
    return Finding(rows, claims, drawn=["accuracy", "different in a group"])


if __name__ == "__main__":
    main(measure, __doc__)
