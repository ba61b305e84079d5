"""Is a clip of 0.1 to 0.2 right?

Source 001: "Clipping (ε): 0.1-0.2", and "The clipping stabilizes training, similar to PPO". Source 003: without it,
"repetitive, overconfident generations"; with it, the "model can only increase probability by max (1+ε) factor per
update". A clip acts only where the policy has moved since it sampled, so each rollout is used for eight optimizer
steps (two passes of four minibatches), on additions, with ε from 0.02 to none at all. Expect no clip to be worse than
0.1 to 0.2 if steps are large, and 0.02 to be slow; how much is the question. Three minutes for the cpu preset on two
cores.

  python -m experiments.claims.questions.ablate_clip --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, REUSED, Bench, grpo
from experiments.claims.columns import accuracy, last, minus, on_the_way, table
from experiments.claims.findings import Claim, Finding, main

EPSILONS = (0.02, 0.1, 0.15, 0.2, 0.4)
NONE = "no clip"


def measure(bench: Bench) -> Finding:
    settings = {f"ε {e:g}": grpo(epsilon_low=e, epsilon_high=e, **REUSED) for e in EPSILONS}
    settings[NONE] = grpo(epsilon_low=1.0, epsilon_high=1e6, **REUSED)
    runs = bench.runs({COIN: grpo(coin=1.0, **REUSED)} | settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "KL": last("kl"), "entropy": last("entropy")}
    rows = table(runs, columns | {"largest change": last("ratio_deviation", 1)}, start="ε 0.2", reused=True)
    recommended = np.mean([rows[f"ε {e:g}"]["accuracy"] for e in (0.1, 0.15, 0.2)], axis=0)
    claims = [
        Claim(
            "001, Implementation Details",
            "ε of 0.1 to 0.2",
            "mean accuracy at ε 0.1, 0.15 and 0.2 − that at 0.02",
            recommended - rows["ε 0.02"]["accuracy"],
        ),
        Claim(
            "001, Implementation Details",
            "ε of 0.1 to 0.2",
            "mean accuracy at ε 0.1, 0.15 and 0.2 − that at 0.4",
            recommended - rows["ε 0.4"]["accuracy"],
        ),
        Claim(
            "001, Policy Update",
            "clipping stabilizes training",
            "mean accuracy at ε 0.1, 0.15 and 0.2 − that without a clip",
            recommended - rows[NONE]["accuracy"],
        ),
        Claim(
            "001, Policy Update",
            "clipping stabilizes training",
            "KL from the start without a clip − that at 0.2",
            minus(rows, "KL", NONE, "ε 0.2"),
        ),
        Claim(
            "003, Clipped surrogate",
            "without: overconfident",
            "entropy at the end, ε 0.2 − no clip",
            minus(rows, "entropy", "ε 0.2", NONE),
        ),
        Claim(
            "003, Clipped surrogate",
            "probability rises by 1 + ε at most",
            "largest |ratio − 1| of a rollout, mean over updates, ε 0.2",
            rows["ε 0.2"]["largest change"],
            high=0.2,
        ),
    ]
    return Finding(rows, claims, drawn=["accuracy", "KL"])


if __name__ == "__main__":
    main(measure, __doc__)
