"""Summarises a judge's scores, for the tables of `experiments.hh_rlhf`.

Shapes: M prompts, n sampled answers to each prompt, S seeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common import over_seeds
from grpo_jax import report
from grpo_jax.commands.reward_model import answer_lengths
from grpo_jax.data.preferences import EncodedPairs
from grpo_jax.offline.pairs import evaluate_pairs
from grpo_jax.report import explain_control
from grpo_jax.rl.evaluate import Evaluation
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import bootstrap, cell

Answers = dict[str, np.ndarray]  # name -> a number for each sampled answer, [M, n]
SFT, SHORTEST, BEST = "SFT", "SFT, shortest of n", "SFT, best of n"


def sampled_answers(evaluation: Evaluation) -> Answers:
    """Returns the rewards by component, the lengths in tokens, and the ended flags of the sampled answers."""
    numbers = {name: values[:, :-1].astype(float) for name, values in evaluation.components.items()}
    return numbers | {"length": evaluation.lengths[:, :-1], "ended": ~evaluation.truncated[:, :-1]}


def best_answers(answers: Answers, scores: np.ndarray) -> Answers:
    """Selects the answer with the highest score `[M, n]` for each prompt; of equal scores, the first."""
    best = scores.argmax(-1)[:, None]
    return {name: np.take_along_axis(values, best, -1) for name, values in answers.items()}


def prompt_numbers(answers: Answers, start: Answers) -> dict[str, np.ndarray]:
    """Averages over the answers to each prompt, `[M]`; scores are in standard deviations of the start's answers.

    `win_rate` is the rate at which the judge prefers an answer to the start's answers to the same prompt, over all
    n × n pairs; a tie counts half. `by_length` is the change of the judge's score that the length would explain
    linearly, with the slope of the start's answers within their prompts.

    Args:
      answers: The numbers of the answers, with "judge", "learned" and "length".
      start: The numbers of the initial policy's answers to the same prompts.

    Returns:
      The means by name; NaN if no number applies to a prompt.
    """
    numbers = {name: _means(values) for name, values in answers.items()}
    for name in ("judge", "learned"):
        numbers[name] = (numbers[name] - start[name].mean()) / start[name].std()
    ours, others = answers["judge"][:, :, None], start["judge"][:, None, :]
    numbers["win_rate"] = ((ours > others) + 0.5 * (ours == others)).mean((1, 2))
    longer = numbers["length"] - _means(start["length"])
    return numbers | {"by_length": slope(start["length"], start["judge"]) / start["judge"].std() * longer}


def compare_methods(seeds: Sequence[Mapping[str, Evaluation]], control: str) -> dict[str, Any]:
    """Compares all methods over seeds.

    Args:
      seeds: For each of the S seeds, method -> evaluation. One method is the start, SFT.
      control: The method that all others are compared with.

    Returns:
      "rows" from `over_seeds`, with intervals over prompts of the means over seeds (`…_prompts_low`), and "seeds":
      method -> name of a number -> one value for each seed.
    """
    by_seed = []
    for evaluations in seeds:
        answers = {name: sampled_answers(evaluation) for name, evaluation in evaluations.items()}
        start = answers[SFT]
        answers |= {SHORTEST: best_answers(start, -start["length"]), BEST: best_answers(start, start["learned"])}
        by_seed.append({name: prompt_numbers(values, start) for name, values in answers.items()})
    prompts = {
        method: {name: np.stack([numbers[method][name] for numbers in by_seed]) for name in by_seed[0][method]}
        for method in by_seed[0]
    }
    runs = {
        method: {name: [float(value) for value in _means(values)] for name, values in numbers.items()}
        for method, numbers in prompts.items()
    }
    rows = over_seeds(runs, first="judge", control=control)
    for method, numbers in prompts.items():
        for name, values in numbers.items():
            of_prompts = _means(values.T)
            rows[method] |= bootstrap(of_prompts[np.isfinite(of_prompts)], binary=False).named(f"{name}_prompts")
    return {"rows": rows, "seeds": runs}


def pair_numbers(scores: np.ndarray) -> dict[str, Any]:
    """Returns the accuracy, NLL and calibration of a reward model from scores of pairs, `[M, 2]`."""
    evaluation = evaluate_pairs(scores, bins=8)
    curve = {name: np.asarray(value).tolist() for name, value in evaluation.calibration._asdict().items()}
    return {**evaluation.numbers(), "calibration": curve}


def agreement(learned: np.ndarray, judge: np.ndarray, pairs: EncodedPairs, start: Answers) -> dict[str, float]:
    """Measures how far two reward models agree with each other and with the length.

    Args:
      learned, judge: The two models' scores of the chosen and rejected answers, `[M, 2]`.
      pairs: The M pairs.
      start: The numbers of answers that both models have scored.

    Returns:
      The shares of pairs in which two scores prefer the same answer, and the correlations within prompts.
    """

    def same(first: np.ndarray, second: np.ndarray) -> float:
        signs = np.sign(first @ [1, -1]), np.sign(second @ [1, -1])
        differ = signs[1] != 0
        return float((signs[0] == signs[1])[differ].mean()) if differ.any() else float("nan")

    return {
        "pairs_same": same(learned, judge),
        "learned_prefers_shorter": same(learned, -answer_lengths(pairs)),
        "judge_prefers_shorter": same(judge, -answer_lengths(pairs)),
        "answers_correlation": correlation(start["learned"], start["judge"]),
        "learned_length_correlation": correlation(start["length"], start["learned"]),
        "judge_length_correlation": correlation(start["length"], start["judge"]),
    }


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the slope of y over x within prompts, `[M, n]` each; 0 if x does not vary."""
    x, y = (values - values.mean(-1, keepdims=True) for values in (x, y))
    return float((x * y).sum() / (x * x).sum()) if np.any(x) else 0.0


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Pearson's correlation within prompts, `[M, n]` each; NaN if x or y does not vary."""
    x, y = (values - values.mean(-1, keepdims=True) for values in (x, y))
    spread = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / spread) if spread else float("nan")


def samples_text(evaluations: Mapping[str, Evaluation], prompts: Sequence[str], number: int) -> str:
    """Returns the first prompts, with the first answer of each method and its scores, as Markdown."""
    parts = []
    for i, prompt in enumerate(prompts[:number]):
        parts.append(f"## Prompt {i + 1}\n\n```\n{prompt.strip()}\n```\n")
        for name, evaluation in evaluations.items():
            scores = ", ".join(f"{key} {values[i, 0]:.2f}" for key, values in evaluation.components.items())
            parts.append(f"**{name}** ({scores})\n\n```\n{evaluation.texts[i][0].strip()}\n```\n")
    return "\n".join(parts)


def print_tables(run: RunFolder, results: Mapping[str, Any], *, control: str) -> None:
    """Prints the tables of reward models, judge and rules; `control` is the row of the coin toss."""

    def show(title: str, columns: Mapping[str, str], rows: Mapping[str, Mapping[str, float]]) -> None:
        cells = {name: [cell(row, key) for key in columns] for name, row in rows.items()}
        report.print_table(run, title, tuple(columns.values()), cells)

    sizes, rows = results["pairs"], results["rows"]
    names = {"accuracy": "accuracy", "nll": "NLL", "calibration_error": "calibration error"}
    show(f"reward models on {sizes['heldout']} held-out pairs ({sizes})", names, results["reward_models"])
    for name, values in (results["agreement"] | {f"SFT's NLL {key}": x for key, x in results["nll"].items()}).items():
        run.console.print(f"{name}: {' '.join(f'{value:.3f}' for value in values)}", highlight=False)
    title = f"harmlessness, as the judge has it, on {results['prompts']} held-out prompts; 95% intervals over seeds"
    show(title, {"judge": "score, sd of SFT", "difference": "less coin toss", "win_rate": "wins over SFT"}, rows)
    explain_control(run, rows, control=control)
    title = "the same: intervals over prompts; what length explains; the score that was learned from"
    show(title, {"judge_prompts": "score", "by_length": "of it by length", "learned": "reward model's"}, rows)
    show("rules: analogues of helpfulness and honesty", {"taken_up": "taken up", "candid": "candid"}, rows)
    show("answers", {"length": "tokens", "ended": "ended"}, rows)


def _means(values: np.ndarray) -> np.ndarray:
    """Returns the means of the finite values over the last axis; NaN if no value is finite."""
    values = np.where(np.isfinite(values), values, np.nan).astype(float)
    counts = np.isfinite(values).sum(-1)
    return np.where(counts > 0, np.nansum(values, -1) / np.maximum(counts, 1), np.nan)
