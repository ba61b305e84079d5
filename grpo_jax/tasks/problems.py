r"""GSM8K and MATH: word problems whose answers can be compared.

A GSM8K answer is a number after "####" (Cobbe et al., 2110.14168). A MATH or MATH-500 answer is a formula, which the
policy writes in \boxed{} (Hendrycks et al., 2103.03874).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.data.rows import Row, column, read_rows, text_column
from grpo_jax.errors import UsageError
from grpo_jax.rewards.builtin import formula_vote, number_vote
from grpo_jax.tasks.task import Task, text_task

GSM8K = "openai/gsm8k"  # on the hub
_NUMBER = 'Think step by step, and end with a line of "####" and the number, such as "#### 72".'
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
_ESCAPED = BOXED.replace("{", "{{").replace("}", "}}")  # braces of a template are doubled
# The first template is a text for a base model to continue; the second is a user's message.
TEMPLATES = {
    "gsm8k": (f"Question: {{question}}\n{_NUMBER}\nAnswer:", f"{{question}}\n{_NUMBER}"),
    "math": (f"Problem: {{question}}\n{_ESCAPED}\nSolution:", f"{{question}}\n{_ESCAPED}"),
}
_VOTES = {"gsm8k": number_vote, "math": formula_vote}
_QUESTIONS = ("question", "problem", "prompt")  # the first of these columns in a row is used
_MARK = "The answer is:"  # in some MATH files this stands between the solution and the answer


def problem_task(
    kind: str,
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    rows: Sequence[Mapping[str, Any]],
    *,
    chat: bool = False,
    template: str | None = None,
    **options: Any,
) -> Task:
    """Makes a GSM8K or MATH task.

    Args:
      kind: "gsm8k" or "math".
      tokenizer, eos_ids, rows: See `text_task`.
      chat: True if the question is sent as a user's message.
      template: Replaces the default template in TEMPLATES.
      options: Further arguments of `text_task`: vocab_size, num_prompts, seed, reward, and others such as heldout_rows.

    Returns:
      The task. Completions vote by their last number or by the formula that they state.
    """
    template = template or TEMPLATES[kind][chat]
    return text_task(tokenizer, eos_ids, rows, template=template, chat=chat, **{"answer": _VOTES[kind]} | options)


def gsm8k_rows(source: str | Path = GSM8K, *, split: str | None = None) -> list[Row]:
    """Reads rows with "question", "answer" (the number, as written) and "solution" (the steps, with their <<marks>>).

    Args:
      source: See `read_rows`.
      split: The split of a folder or hub data set, "train" or "test".

    Returns:
      The rows.

    Raises:
      UsageError: There are no rows, or a row has no question or no "####" in its answer.
    """

    def parted(row: Row) -> Row:
        question, whole = text_column(row, "question"), text_column(row, "answer")
        solution, mark, answer = whole.rpartition("####")
        if not mark or not answer.strip():
            raise UsageError(f'{row.where}: its answer does not end with "####" and a number')
        return Row(row | {"question": question, "answer": answer.strip(), "solution": solution.strip()}, row.where)

    subset = "main" if str(source) == GSM8K and not Path(source).exists() else None
    return [parted(row) for row in read_rows(source, split=split, subset=subset)]


def math_rows(source: str | Path) -> list[Row]:
    """Reads rows with "question", "answer" and, if available, "solution".

    The question may be in a column "question", "problem" or "prompt"; the instruction at its end is removed. The column
    "answer" holds the answer, or the solution, "The answer is:" and the answer. Other columns stay.

    Args:
      source: See `read_rows`.

    Returns:
      The rows.

    Raises:
      UsageError: There are no rows, or a row has no question or no answer.
    """

    def uniform(row: Row) -> Row:
        name = next((name for name in _QUESTIONS if name in row), _QUESTIONS[0])
        question = text_column(row, name).strip().removesuffix(BOXED).strip()
        whole = column(row, "answer")
        whole = str(whole) if isinstance(whole, int | float) else text_column(row, "answer")
        solution, mark, answer = whole.rpartition(_MARK)
        if not answer.strip():
            raise UsageError(f"{row.where}: its answer is empty")
        columns = {"question": question, "answer": answer.strip()} | ({"solution": solution.strip()} if mark else {})
        return Row(row | columns, row.where)

    return [uniform(row) for row in read_rows(source)]
