"""What do easy and hard prompts teach, and are easy ones learned first?

Source 000: "Easy prompts: All responses score high, advantages near zero. Hard prompts: Large variance, clear signal
for improvement." Source 001, "Natural Curriculum": "Hard prompts where all responses score poorly still provide
useful gradients. The best-in-group response gets positive advantage even if absolute rewards are low." On additions,
with a reward that is all or nothing and with the share of tokens that are right ("graded"). First, at the start: of
64 completions of each of 128 prompts, groups of 8 are put together with 0, 1, 4, 7 or 8 right, of the same prompts
for each number. Columns: the mean |A|, the mean of the largest A, the mean norm of a group's gradient, and the cosine
of the mean gradient with that of the solve rate, from 64 other completions. "no training" are groups as they come,
"coin toss" the same with chance for a reward. Second, whole runs: how many sampled held-out completions are right at
the start, half way and at the end, by the carries of an addition, its difficulty; the groups there are those that
come. Expect exactly nothing of groups without a difference, much of those with one wrong response, and something of
near misses where these score. A minute for the cpu preset on two cores.

  python -m experiments.claims.questions.curriculum --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, START, Bench, grpo
from experiments.claims.columns import merge_seeds
from experiments.claims.findings import Also, Finding, main
from experiments.claims.groups import CARRIES, carries, group_rows

RIGHT, REWARDS = (0, 1, 4, 7, 8), {"": 0.0, ", graded": 1.0}


def measure(bench: Bench) -> Finding:
    found = [group_rows(bench, seed, RIGHT, REWARDS) for seed in bench.seeds]
    rows = merge_seeds(found)
    solved = solve_rates(bench)
    unknown = np.full((3, len(found)), np.nan)
    for name, row in rows.items():
        row |= dict(zip(("start", "half", "end"), solved.get(name, unknown).tolist(), strict=True))

    def column(row: str, name: str = "gradient") -> np.ndarray:
        return np.array(rows[row][name])

    def share(row: str, of: str) -> np.ndarray:
        return column(row) / column(of)

    ease, hard = "000, Natural Normalization", "001, Natural Curriculum"
    clear, poor, near = "hard: clear signal", "all score poorly: still useful gradients", "easy: advantages near zero"
    poorly, graded = share("0 of 8 right", "4 of 8 right"), share("0 of 8 right, graded", "4 of 8 right, graded")
    claims = [
        Claim(ease, near, "mean |A|, 8 of 8 right", column("8 of 8 right", "|A|"), -np.inf, 0.1),
        Claim(ease, near, "mean |A|, 7 of 8 right", column("7 of 8 right", "|A|"), -np.inf, 0.1),
        Claim(ease, clear, "gradient, 1 − 7 of 8 right", column("1 of 8 right") - column("7 of 8 right")),
        Claim(hard, poor, "gradient, 0 / 4 of 8 right", poorly, 0.1),
        Claim(hard, poor, "gradient, 0 / 4 of 8 right, graded", graded, 0.1),
        Claim(hard, poor, "cosine with the solve rate's, 0 right, graded", column("0 of 8 right, graded", "cosine")),
        Claim(hard, "the best has a positive advantage", "largest A, 0 right", column("0 of 8 right", "best A")),
        Claim(hard, "… positive advantage", "largest A, 0 right, graded", column("0 of 8 right, graded", "best A")),
    ]
    return Finding(rows, claims, drawn=["|A|", "gradient", "cosine"])


def solve_rates(bench: Bench) -> dict[str, np.ndarray]:
    """Of held-out additions, by row: at the start, half way and at the end, `[3, seeds]`."""
    runs = bench.runs({COIN: grpo(coin=1.0)} | {kind: grpo(graded=value) for kind, value in REWARDS.items()})
    number = carries(bench.task(grpo(), 0).task.heldout.examples)
    rates = dict[str, np.ndarray]()
    for kind, run in runs.items():
        of_prompts = run.scores[..., :-1].mean(-1)[:, [0, run.scores.shape[1] // 2, -1]].swapaxes(0, 1)
        if kind == COIN:
            rates |= {COIN: of_prompts.mean(-1), START: of_prompts[[0, 0, 0]].mean(-1)}
        else:
            rates |= {name + kind: of_prompts[..., number == i].mean(-1) for i, name in enumerate(CARRIES)}
    return rates


if __name__ == "__main__":
    main(measure, __doc__)
