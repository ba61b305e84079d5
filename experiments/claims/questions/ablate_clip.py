"""Is a clip needed, and one of 0.1 to 0.2?

Source 001: "Clipping (ε): 0.1-0.2", and "The clipping stabilizes training, similar to PPO". A clip acts only where the
policy has moved since it sampled, so each rollout is used for eight optimizer steps (two passes of four minibatches),
on additions, with the ratios of whole responses that the posts have; beside them ratios of tokens ("GRPO"). "Never
clipped" has bounds at 0 and at a million. Expect ε 0.02 to be slow, and no clip to be no worse where rates are small.

  python -m experiments.claims.questions.ablate_clip --preset cpu
"""

from experiments.claims.ablation import COIN, REUSED, Bench, grpo
from experiments.claims.columns import accuracy, compared, last, learning_curve, on_the_way, table
from experiments.claims.findings import Also, Finding, main

NONE, TOKENS = "never clipped", "GRPO, ε 0.2"
SOURCE = "001, Implementation Details"


def measure(bench: Bench) -> Finding:
    base = grpo(**REUSED)
    settings = {f"ε {e:g}": base.changed(epsilon_low=e, epsilon_high=e) for e in (0.02, 0.15, 0.4)}
    settings[NONE] = base.changed(epsilon_low=1.0, epsilon_high=1e6)
    settings[TOKENS] = grpo(preset="grpo", **REUSED)
    runs = bench.runs({COIN: base.changed(coin=1.0)} | settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "KL": last("kl"), "entropy": last("entropy")}
    rows = table(runs, columns | {"largest |ratio − 1|": last("ratio_deviation", 1)}, start="ε 0.15", reused=True)

    def of(other: str, read=accuracy):
        return compared(runs, read, "ε 0.15", other)

    also = [
        Also("001, Policy Update", "clipping stabilizes", "accuracy, ε 0.15 − never clipped", of(NONE).values),
        Also(SOURCE, "ε of 0.1 to 0.2", "accuracy, ε 0.15 − 0.02", of("ε 0.02").values),
        Also(SOURCE, "ε of 0.1 to 0.2", "accuracy, ε 0.15 − 0.4", of("ε 0.4").values),
        Also("001, Policy Update", "clipping stabilizes", "KL, ε 0.15 − never clipped", of(NONE, last("kl")).values),
        Also("003, Clipped surrogate", "else overconfident", "entropy, the same", of(NONE, last("entropy")).values),
        Also("", "what a ratio is of", "accuracy, responses at ε 0.15 − tokens at 0.2", of(TOKENS).values),
    ]
    curves = {name: learning_curve(runs[name]) for name in settings}
    return Finding(rows, {"clip_none": of(NONE, on_the_way)}, also, ["accuracy", "KL"], curves)


if __name__ == "__main__":
    main(measure, __doc__)
