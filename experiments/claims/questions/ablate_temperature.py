"""Does a schedule of temperatures within a group make it more diverse?

Source 000: "Higher temperature during response generation increases group diversity", and completion i of K is
sampled at 0.7 + 0.3 i / K. Here that schedule beside fixed temperatures of 0.7, of its mean, and of 1, on additions;
all policies are evaluated at temperature 1. Diversity is the share of a group's completions that are different, over
the first five steps, while policies still are near their common start. Expect more diversity at higher temperatures,
and the schedule at its mean.

  python -m experiments.claims.questions.ablate_temperature --preset cpu
"""

from experiments.claims.ablation import COIN, Bench, grpo
from experiments.claims.columns import accuracy, compared, first, last, table
from experiments.claims.findings import Also, Finding, main

SCHEDULE, MEAN = "0.7 + 0.3 i/8", 0.7 + 0.3 * 3.5 / 8
FIXED = {"0.7": 0.7, "0.83": MEAN, "1.0": 1.0}
SOURCE, WORDS = "000, Temperature Schedule", "higher temperature increases group diversity"


def measure(bench: Bench) -> Finding:
    settings = {name: grpo(temperature=temperature) for name, temperature in FIXED.items()}
    settings[SCHEDULE] = grpo(temperature=0.7, temperature_spread=0.3)
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    early = first("distinct_share", 5)
    columns = {"accuracy": accuracy, "different, first steps": early, "different": last("distinct_share", 1.0)}
    rows = table(runs, columns, start="1.0")
    primary = {"temperature": compared(runs, early, SCHEDULE, "0.83")}
    also = [
        Also(SOURCE, WORDS, "share of different completions, 1.0 − 0.7", compared(runs, early, "1.0", "0.7").values),
        Also(
            SOURCE, "a schedule is used", "accuracy, schedule − 1.0", compared(runs, accuracy, SCHEDULE, "1.0").values
        ),
    ]
    return Finding(rows, primary, also, ["different, first steps", "accuracy"])


if __name__ == "__main__":
    main(measure, __doc__)
