"""Does a correction make rollouts that are some steps old as good as fresh ones?

NVIDIA's NeMo-RL reports (issue 1098): without a correction learning from stale rollouts collapses in some hundred
steps, with one 8 to 16 steps cost nothing. Here GRPO on additions, with one update per rollout, learns from completions
that the policy of k steps earlier sampled, k from 1 to 16. It does so without a correction and with
`correction="token"`: weights min(w, 2) of tokens, w the trainer's probability over the sampler's. The learning rate is
high and runs are short, so that 8 steps are a large part of a run. In the first k steps it is the start that samples,
which costs something by itself: accuracy at the end decides, not on the way. The mismatch is the mean of
exp |log-probability of the trainer − of the sampler| over tokens, 1 where they are equal.

  python -m experiments.claims.questions.staleness --preset cpu
"""

from experiments.claims.ablation import COIN, Bench, grpo
from experiments.claims.columns import accuracy, compared, last, learning_curve, on_the_way, table
from experiments.claims.findings import Also, Finding, Measured, main

FRESH, AGES = "fresh", (1, 2, 4, 8, 16)
OLD, CORRECTED = "k = {}", "k = {}, corrected"
SOURCE = "NeMo-RL, issue 1098"


def measure(bench: Bench) -> Finding:
    base = grpo(preset="grpo")
    settings = {COIN: base.changed(coin=1.0), FRESH: base}
    for age in AGES:
        settings[OLD.format(age)] = old = base.changed(staleness=min(age, bench.size.steps - 1))
        settings[CORRECTED.format(age)] = old.changed(correction="token")
    runs = bench.runs(settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "KL": last("kl"), "entropy": last("entropy")}
    rows = table(runs, columns | {"mismatch": last("first_sampler_mismatch")}, start=FRESH)

    def cost(age: int, name: str = OLD, other: str = FRESH) -> Measured:
        return compared(runs, accuracy, name.format(age), other.format(age))

    needed = cost(8, CORRECTED, OLD).values
    also = [Also(SOURCE, "a correction is needed", "accuracy, k = 8, corrected − not", needed)]
    also += [Also(SOURCE, "without it collapses", f"accuracy, k = {k} − fresh", cost(k).values) for k in AGES]
    also += [
        Also(SOURCE, "with one no cost", f"accuracy, k = {k} and corrected − fresh", cost(k, CORRECTED).values)
        for k in AGES
        if k != 8
    ]
    curves = {name: learning_curve(runs[name]) for name in (FRESH, OLD.format(8), CORRECTED.format(8))}
    return Finding(rows, {"stale": cost(8, CORRECTED)}, also, ["accuracy", "mismatch"], curves)


if __name__ == "__main__":
    main(measure, __doc__)
