"""Do annotators agree more on ranks than on scores, and can one kind of annotator explain the published figures?

Source 000: "within a group of responses to the same prompt, relative ordering is more reliable": inter-annotator
agreement is 0.61 for scores and 0.83 for ranks, test-retest reliability 0.54 and 0.79, a reward model's calibration
"Poor" and "N/A". Here 64 annotators score 8 responses of each of 100 prompts: bias + factor · quality + noise.
Quality has deviation 1 within a prompt, and prompts differ by as much. Biases have a deviation "spread", logarithms
of factors half of it; the mood of a session moves both by half as much again. Agreement is Lin's concordance of two
annotators in sessions of their own: of scores over all responses, of ranks within a prompt (there it is Spearman's
correlation), and of scores standardised within a prompt, "advantages". "Again" is one annotator in two sessions.
"fitted" has the spread and the noise that give 0.61 and 0.83; what it says of the other figures is a prediction. The
errors are those of the calibration of P(i better than j) = σ(k · difference of scores), with k fitted on pairs within
a prompt, as for a reward model: within a prompt, and across prompts and annotators. "no training" are annotators
without spread, "coin toss" gives scores of chance alone; seeds are draws of everything. Expect ranks to win where the
spread is large and to lose where there is none, for they throw away what prompts differ by; and an annotator to agree
at least as well with himself as with others, as the published figures do not. Ten seconds for the cpu preset.

  python -m experiments.claims.questions.agreement --preset cpu
"""

import numpy as np

from experiments.claims import annotators as A
from experiments.claims.ablation import COIN, START, Bench
from experiments.claims.columns import merge_seeds, minus
from experiments.claims.findings import Also, Finding, main

SPREADS, NOISE = {"small": 0.25, "medium": 0.5, "large": 1.0}, 0.5
VIEWS = {"scores": A.as_given, "ranks": A.ranks, "advantages": A.standardised}


def measure(bench: Bench) -> Finding:
    found, fitted = zip(*(seed_rows(seed) for seed in bench.seeds), strict=True)
    spread, noise = np.mean(fitted, axis=0)[:2]
    rows = merge_seeds(found)

    def lead(name: str) -> np.ndarray:
        return np.subtract(rows[name]["ranks"], rows[name]["scores"])

    def of_fitted(words: str, column: str) -> Also:
        return Also("000, Noise Robustness", words, f"{column}, fitted", rows["fitted"][column])

    removed = "normalization within groups removes this sensitivity"
    spoilt = minus(rows, "advantages", "large, noise", START)
    again = np.subtract(rows["fitted"]["scores"], rows["fitted"]["scores again"])
    also = [
        Also("000, Noise Robustness", "relative ordering is more reliable", "ranks − scores, no spread", lead(START)),
        Also("000, the table", "ranks 0.83, scores 0.61", "ranks − scores, large spread", lead("large, noise")),
        of_fitted("test-retest reliability of scores 0.54", "scores again"),
        of_fitted("test-retest reliability of ranks 0.79", "ranks again"),
        Also("000, the table", "0.54 again, 0.61 by two annotators", "scores − scores again, fitted", again),
        of_fitted("reward model calibration: poor", "error across"),
        Also("001, Robust to Reward Scale", removed, "agreement of advantages, large − none", spoilt),
    ]
    drawn = ["scores", "ranks", "scores again", "ranks again", "error across"]
    note = f"These are annotators of a model, not people. Fitted: spread {spread:.2f}, noise {noise:.2f}."
    return Finding(rows, {}, also, drawn, note=note)


def seed_rows(seed: int) -> tuple[dict[str, dict[str, float]], A.Kind]:
    """All rows, with the draws of one seed, and the kind of annotators that fits."""
    draws = A.draw(seed)
    kinds = {START: A.Kind(0.0, NOISE), COIN: A.Kind(0.0, 1.0, sees=0.0)}
    kinds["fitted"] = A.fit(draws, scores=0.61, ranks_=0.83)
    kinds |= {f"{name}, noise": A.Kind(spread, NOISE) for name, spread in SPREADS.items()}
    kinds |= {f"{name}, no noise": A.Kind(spread, 0.0) for name, spread in SPREADS.items()}

    def row(kind: A.Kind) -> dict[str, float]:
        scores = A.scored(draws, kind)
        columns = {name: A.agreement(scores, view) for name, view in VIEWS.items()}
        columns |= {f"{name} again": A.agreement(scores, VIEWS[name], again=True) for name in ("scores", "ranks")}
        within, across = A.calibration_errors(draws, kind)
        return columns | {"error within": within, "error across": across}

    return {name: row(kind) for name, kind in kinds.items()}, kinds["fitted"]


if __name__ == "__main__":
    main(measure, __doc__)
