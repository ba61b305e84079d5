"""Do larger groups learn better, and is there a knee at eight?

Source 000: K = 2, 4, 8, 16 gives 71.2, 74.8, 77.3, 77.9% ("marginal gain"). Source 001: "Group size (k): 8-16 works
well", "larger group size … is essential. More comparisons mean better gradient estimates". Here the posts' algorithm
on additions with equally many prompts a step, so that larger groups cost more samples, and with equally many samples,
so that they see fewer prompts; the learning rate is one for all. The signal is |mean|² / Tr Cov of the gradient of one
prompt's group at the start, with Cov over groups of the same prompt, so that prompts' differences are not taken for
noise: 256 prompts with two groups each, by GRPO's own loss. Expect a gain with K at equal prompts, little difference
at equal samples, and a signal that rises in proportion to K rather than to K²: pairs share their completions.

  python -m experiments.claims.questions.ablate_group_size --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, Bench, grpo
from experiments.claims.columns import accuracy, compared, last, learning_curve, log_ratio, on_the_way, table
from experiments.claims.findings import Also, Finding, main
from experiments.claims.groups import gradient_signal

SIZES = (2, 8, 16)


def measure(bench: Bench) -> Finding:
    prompts, settings = bench.size.num_prompts, {COIN: grpo(coin=1.0)}
    settings |= {f"K {k}": grpo(group_size=k) for k in SIZES}
    settings["K 2, equal samples"] = grpo(group_size=2, num_prompts=4 * prompts)
    runs = bench.runs(settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "groups of equal rewards": last("zero_spread_share", 1)}
    rows = table(runs, columns, start="K 8")
    primary = {
        "group_size_2": compared(runs, accuracy, "K 8", "K 2"),
        "group_size_16": compared(runs, accuracy, "K 16", "K 8"),
        "group_size_samples": compared(runs, accuracy, "K 8", "K 2, equal samples"),
    }
    signal = {k: np.array([gradient_signal(bench, seed, k) for seed in bench.seeds]) for k in (2, 8)}
    details, way = "001, Implementation Details", compared(runs, on_the_way, "K 8", "K 2, equal samples")
    also = [
        Also(details, "larger groups are essential", "accuracy on the way at equal samples, K 8 − K 2", way.values),
        Also(
            details,
            "more comparisons, better gradients",
            "ln(signal in a prompt's gradient, K 8 / K 2); 3.3 were 28 signals in place of 1, 1.4 in proportion to K",
            log_ratio(signal[8], signal[2]),
        ),
    ]
    curves = {name: learning_curve(runs[name]) for name in ("K 8", "K 2, equal samples")}
    return Finding(rows, primary, also, ["accuracy"], curves)


if __name__ == "__main__":
    main(measure, __doc__)
