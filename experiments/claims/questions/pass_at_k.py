"""Does the start pass trained policies at large k?

2504.13837 reports that a base model solves more problems in many samples than the model that was trained on rewards:
training sharpens what the start can do, and adds nothing. Here pass@k of 64 samples of each held-out addition, at the
start of the posts' algorithm and at its end. A tenth of the additions has no right answer, so nothing is above 0.9.
Additions with a carry are right three times in a hundred at the start: 64 samples hold one almost always. Expect the
trained policy to be far above at k = 1, and pass@64 to tell.

  python -m experiments.claims.questions.pass_at_k --preset cpu
"""

from experiments.claims.ablation import COIN, START, Bench, grpo
from experiments.claims.columns import minus, pass_at, table
from experiments.claims.findings import Also, Finding, Measured, main

SAMPLES = 64  # of a held-out prompt
SOURCE = "2504.13837"


def measure(bench: Bench) -> Finding:
    wide = grpo(eval_samples=SAMPLES, eval_every=bench.size.steps)
    runs = bench.runs({COIN: wide.changed(coin=1.0), "trained": wide})
    columns = {"score" if k == 1 else f"pass@{k}": pass_at(k) for k in (1, 4, 16, SAMPLES)}
    rows = table(runs, columns, start="trained")
    primary = {"pass_at_k": Measured(minus(rows, f"pass@{SAMPLES}", "trained", START), runs["trained"].diverged)}
    also = [
        Also(SOURCE, "the start passes at large k", f"{name}, trained − start", minus(rows, name, "trained", START))
        for name in list(columns)[:-1]
    ]
    return Finding(rows, primary, also, list(columns))


if __name__ == "__main__":
    main(measure, __doc__)
