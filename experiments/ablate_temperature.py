"""Does a schedule of temperatures within a group make it more diverse, and the policy better?

Seed 000: "Higher temperature during response generation increases group diversity", and completion i of K is sampled
at 0.7 + 0.3 i / K. Here that schedule beside fixed temperatures from 0.7 to 1.3, on additions; all policies are
judged on held-out completions at temperature 1, and greedily. Diversity is the share of a group's completions that
are different, over the whole of training. Expect more diversity at higher temperatures, the schedule between its
ends, and little to choose in accuracy. A minute for the cpu preset on two cores.

  python -m experiments.ablate_temperature --preset cpu
"""

from experiments.ablation import COIN, Bench, Runs, accuracy, grpo, last, minus, table
from experiments.findings import Claim, Finding, main

FIXED = (0.7, 0.85, 1.0, 1.3)
SCHEDULE = "0.7 to 1.0"
SOURCE = "000, Temperature Schedule"


def greedy(runs: Runs):
    return runs.scores[:, -1, :, -1].mean(1)


def measure(bench: Bench) -> Finding:
    settings = {f"{temperature:g}": grpo(temperature=temperature) for temperature in FIXED}
    settings[SCHEDULE] = grpo(temperature=0.7, temperature_spread=0.3)
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    columns = {"accuracy": accuracy, "greedy": greedy, "different in a group": last("distinct_share", 1.0)}
    rows = table(runs, columns | {"different, first steps": lambda of: of.metrics["distinct_share"][:, :5].mean(1)})

    def more(column: str, one: str, other: str):
        return minus(rows, column, one, other)

    claims = [
        Claim(
            SOURCE,
            "higher temperature increases group diversity",
            "share of different completions at 1.0 − that at 0.7, first 5 steps",
            more("different, first steps", "1", "0.7"),
        ),
        Claim(
            SOURCE,
            "the schedule from 0.7 to 1.0 increases group diversity",
            "the same of the schedule − that at 0.85, its mean",
            more("different, first steps", SCHEDULE, "0.85"),
        ),
        Claim(SOURCE, "the schedule helps", "accuracy − that at 0.7", more("accuracy", SCHEDULE, "0.7")),
        Claim(SOURCE, "the schedule helps", "accuracy − that at 1.0", more("accuracy", SCHEDULE, "1")),
    ]
    return Finding(rows, claims, drawn=["accuracy", "different in a group"])


if __name__ == "__main__":
    main(measure, __doc__)
