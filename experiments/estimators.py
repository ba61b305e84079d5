"""Which estimator of the advantage, and which surrogate, on one task?

The seeds name standardised rewards (000, 001) and ranks (001: "the relative advantages provide better signal"), and
compare neither with what came later. Beside them, with their published constants and one learning rate: Dr. GRPO,
DAPO's loss, GSPO, CISPO, RLOO, pass@4, and seed 001's own loss with ratios of whole responses. Each rollout is used
for eight optimizer steps (two passes of four minibatches), so that clips differ. Expect all to learn, within a few
hundredths of one another, and pass@k to give up some accuracy of single samples. Five minutes for the cpu preset on
two cores, half of it compilation.

  python -m experiments.estimators --preset cpu
"""

from experiments.ablate_clip import REUSED
from experiments.ablation import COIN, Bench, accuracy, grpo, last, minus, on_the_way, table
from experiments.findings import Claim, Finding, main

PRESETS = ("grpo", "rank", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "pass_at_k", "seed_001")
SOURCE = "001, Relative Advantage"


def measure(bench: Bench) -> Finding:
    settings = {name: grpo(preset=name, group_size=8, **REUSED) for name in PRESETS}
    runs = bench.runs({COIN: grpo(coin=1.0, group_size=8, **REUSED)} | settings)
    rows = table(runs, {"accuracy": accuracy, "on the way": on_the_way, "entropy": last("entropy")})
    claims = [
        Claim(
            SOURCE,
            "relative advantages provide better signal",
            f"accuracy of {name} − the coin toss",
            minus(rows, "accuracy", name, COIN),
            low=0.1,
        )
        for name in ("seed_001", "rank")
    ]
    same = minus(rows, "accuracy", "rank", "grpo")
    claims.append(
        Claim(SOURCE, "ranks or rewards: the post has both", "accuracy of rank minus grpo", same, -0.02, 0.02)
    )
    return Finding(rows, claims, drawn=["accuracy", "on the way"])


if __name__ == "__main__":
    main(measure, __doc__)
