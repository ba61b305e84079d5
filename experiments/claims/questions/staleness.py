"""Does a correction make rollouts that are some steps old as good as fresh ones?

NVIDIA's NeMo-RL reports (issue 1098): without a correction learning from stale rollouts collapses in some hundred
steps, with one 8 to 16 steps cost nothing. Here on additions, with one update a rollout, completions of the policy of
k = 0 to 16 steps before, each k without a correction and with `correction="token"`: weights min(w, 2) of tokens, w the
trainer's probability over the sampler's. Runs are 100 steps and the learning rate is high for them, so 16 steps are a
sixth of the run. Staleness alone costs its first k steps, in which the start goes on sampling: that is in "on the way".
Ten minutes for the cpu preset on two cores, most of them compilation.

  python -m experiments.claims.questions.staleness --preset cpu
"""

import math

from experiments.claims.ablation import COIN, Bench, grpo
from experiments.claims.columns import accuracy, last, minus, on_the_way, table
from experiments.claims.findings import Claim, Finding, main

STALENESS = (1, 2, 4, 8, 16)
FRESH = "fresh"
SOURCE = "NeMo-RL, issue 1098"


def measure(bench: Bench) -> Finding:
    settings = {FRESH: grpo()}
    for k in STALENESS:
        settings |= {f"{k}": grpo(staleness=k), f"{k}, corrected": grpo(staleness=k, correction="token")}
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "KL": last("kl"), "entropy": last("entropy")}
    columns["mismatch"] = last("first_sampler_mismatch")
    rows = table(runs, columns, start=FRESH)

    def loss(k: int, corrected: str = ", corrected") -> Claim:
        words = "8 to 16 steps cost nothing with a correction" if corrected else "without a correction it collapses"
        what = f"accuracy, {k} steps old{' and corrected' if corrected else ''} − fresh"
        difference = minus(rows, "accuracy", f"{k}{corrected}", FRESH)
        return Claim(SOURCE, words, what, difference, *((-0.02,) if corrected else (-math.inf, -0.02)))

    claims = [loss(8), loss(16), loss(8, ""), loss(16, "")]
    for k in (8, 16):
        difference = minus(rows, "accuracy", f"{k}, corrected", f"{k}")
        claims.append(Claim(SOURCE, "a correction is needed", f"accuracy, {k} steps old, corrected − not", difference))
    return Finding(rows, claims, drawn=["accuracy", "KL", "mismatch"])


if __name__ == "__main__":
    main(measure, __doc__)
