"""Does a correction make rollouts that are some steps old as good as fresh ones?

NVIDIA's NeMo-RL reports (issue 1098): without a correction learning from stale rollouts collapses in some hundred
steps, with one 8 to 16 steps cost nothing. Here GRPO on additions, with one update a rollout, completions of the policy
of 8 steps before, without a correction and with `correction="token"`: weights min(w, 2) of tokens, w the trainer's
probability over the sampler's. Runs are 100 steps and the learning rate is high for them, so 8 steps are a twelfth of
the run. Staleness alone costs its first 8 steps, in which the start goes on sampling.

  python -m experiments.claims.questions.staleness --preset cpu
"""

from experiments.claims.ablation import COIN, Bench, grpo
from experiments.claims.columns import accuracy, compared, last, learning_curve, on_the_way, table
from experiments.claims.findings import Also, Finding, main

FRESH, OLD, CORRECTED = "fresh", "8 steps old", "8 steps old, corrected"
SOURCE = "NeMo-RL, issue 1098"


def measure(bench: Bench) -> Finding:
    base, age = grpo(preset="grpo"), min(8, bench.size.steps - 1)
    old = base.changed(staleness=age)
    runs = bench.runs({COIN: base.changed(coin=1.0), FRESH: base, OLD: old, CORRECTED: old.changed(correction="token")})
    columns = {"accuracy": accuracy, "on the way": on_the_way, "KL": last("kl"), "entropy": last("entropy")}
    rows = table(runs, columns | {"mismatch": last("first_sampler_mismatch")}, start=FRESH)
    collapse, needed = compared(runs, accuracy, OLD, FRESH), compared(runs, accuracy, CORRECTED, OLD)
    also = [
        Also(SOURCE, "without a correction it collapses", "accuracy, 8 steps old − fresh", collapse.values),
        Also(SOURCE, "a correction is needed", "accuracy, 8 steps old, corrected − not", needed.values),
    ]
    curves = {name: learning_curve(runs[name]) for name in (FRESH, OLD, CORRECTED)}
    return Finding(rows, {"stale": compared(runs, accuracy, CORRECTED, FRESH)}, also, ["accuracy", "mismatch"], curves)


if __name__ == "__main__":
    main(measure, __doc__)
