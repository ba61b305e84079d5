"""Do larger groups learn better, and is there a knee at eight?

Source 000: K = 2, 4, 8, 16 gives 71.2, 74.8, 77.3, 77.9% ("marginal gain"), and K = 8 gives C(8, 2) = 28 learning
signals a prompt "versus 1". Source 001: "Group size (k): 8-16 works well", "larger group size … is essential. More
comparisons mean better gradient estimates". Here additions with equally many prompts a step, so that larger groups
cost more samples, and with equally many samples, so that they see fewer prompts; the learning rate was chosen at K =
8. The signal is |mean|² / Tr Cov of the gradient of one prompt's group at the start, with Cov over groups of the same
prompt, so that prompts' differences are not taken for noise: 256 prompts with two groups each, by GRPO's own loss.
Expect a gain with K at equal prompts that shrinks, little difference at equal samples, and a signal that rises in
proportion to K rather than to K²: pairs of a group share their completions. About four minutes for the cpu preset on
two cores, most of it compilation.

  python -m experiments.claims.questions.ablate_group_size --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, START, Bench, grpo
from experiments.claims.columns import accuracy, last, minus, on_the_way, table
from experiments.claims.findings import Claim, Finding, main
from experiments.claims.groups import gradient_signal

SIZES = (2, 4, 8, 16)


def measure(bench: Bench) -> Finding:
    prompts, settings = bench.size.num_prompts, {COIN: grpo(coin=1.0)}
    settings |= {f"K {k}, equal prompts": grpo(group_size=k) for k in SIZES}
    settings |= {f"K {k}, equal samples": grpo(group_size=k, num_prompts=8 * prompts // k) for k in SIZES}
    columns = {"accuracy": accuracy, "on the way": on_the_way, "groups of equal rewards": last("zero_spread_share", 1)}
    rows = table(bench.runs(settings), columns, start="K 8, equal prompts")
    signal = {k: np.array([gradient_signal(bench, seed, k) for seed in bench.seeds]) for k in SIZES}
    coin = [gradient_signal(bench, seed, 8, coin=1.0) for seed in bench.seeds]
    of_row = {f"K {k}, {equal}": signal[k].tolist() for k in SIZES for equal in ("equal prompts", "equal samples")}
    for name, row in rows.items():
        row["signal"] = ({START: signal[8].tolist(), COIN: coin} | of_row)[name]

    def gain(one: int, other: int, equal: str = "prompts") -> np.ndarray:
        return minus(rows, "accuracy", f"K {one}, equal {equal}", f"K {other}, equal {equal}")

    ratio, ratio_of = signal[8] / signal[2], "signal in a prompt's gradient, K 8 / K 2"
    figures, details, pairs = "000, Group Size Selection", "001, Implementation Details", "000, Sample Efficiency"
    claims = [
        Claim(figures, "71.2% at K = 2, 77.3% at 8", "accuracy at equal prompts, 8 − 2", gain(8, 2)),
        Claim(figures, "77.3% at K = 8, 77.9% at 16", "accuracy at equal prompts, 16 − 8", gain(16, 8)),
        Claim(figures, "marginal gain beyond 8", "gain from 4 to 8 − from 8 to 16", gain(8, 4) - gain(16, 8)),
        Claim(details, "8-16 works well", "accuracy at equal samples, 8 − 4", gain(8, 4, "samples"), low=-0.02),
        Claim(details, "larger groups are essential", "accuracy at equal samples, 8 − 2", gain(8, 2, "samples")),
        Claim(details, "more comparisons, better gradients", ratio_of, ratio, low=1),
        Claim(pairs, "28 learning signals in place of 1", f"{ratio_of}, within a factor of 2", ratio, low=14, high=56),
    ]
    return Finding(rows, claims, drawn=["accuracy", "signal"])


if __name__ == "__main__":
    main(measure, __doc__)
