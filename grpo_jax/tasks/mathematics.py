r"""MATH and MATH-500: competition problems whose answer is written in \boxed{} (Hendrycks et al., 2103.03874).

Files differ in their columns; whatever they are, the rows here have "question", "answer" and, where the file has one,
"solution".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.data.rows import Row, column, read_rows, text_column
from grpo_jax.errors import UsageError
from grpo_jax.rewards.builtin import formula_vote
from grpo_jax.tasks.task import Task, text_task

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
# A base model continues the first; the second is a user's message. Braces of a template are doubled.
_ESCAPED = INSTRUCTION.replace("{", "{{").replace("}", "}}")
TEMPLATE = "Problem: {question}\n" + _ESCAPED + "\nSolution:"
CHAT_TEMPLATE = "{question}\n" + _ESCAPED
_QUESTIONS = ("question", "problem", "prompt")  # the first of these columns that there is
_MARK = "The answer is:"  # some files put the answer behind it, after the solution


def math_rows(source: str | Path, *, split: str | None = None, subset: str | None = None) -> list[Row]:
    """Rows with "question", "answer", and "solution" where there is one.

    Understood are a question, problem or prompt (its closing instruction is taken off) with an answer, or with an
    answer that is the solution, "The answer is:" and the answer. Other columns stay.

    Args:
      source, split, subset: as in `read_rows`.

    Returns:
      The rows.

    Raises:
      UsageError: there are none, or one has no question or no answer.
    """
    return [_uniform(row) for row in read_rows(source, split=split, subset=subset)]


def math_task(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    rows: Sequence[Mapping[str, Any]],
    *,
    chat: bool = False,
    template: str | None = None,
    **options: Any,
) -> Task:
    """The task from rows of `math_rows`; without heldout_rows a share of them is held out.

    Args:
      tokenizer, eos_ids, rows: as in `text_task`.
      chat: the question is a user's message.
      template: in place of TEMPLATE, or of CHAT_TEMPLATE with `chat`.
      options: of `text_task`: vocab_size, num_prompts, seed and reward, and others such as heldout_rows.

    Returns:
      The task. Completions vote by the formula that they state, unless `options` has another answer.
    """
    return text_task(
        tokenizer,
        eos_ids,
        rows,
        template=template or (CHAT_TEMPLATE if chat else TEMPLATE),
        chat=chat,
        **{"answer": formula_vote} | options,
    )


def _uniform(row: Row) -> Row:
    name = next((name for name in _QUESTIONS if name in row), _QUESTIONS[0])
    question = text_column(row, name).strip().removesuffix(INSTRUCTION).strip()
    whole = column(row, "answer")
    whole = str(whole) if isinstance(whole, int | float) else text_column(row, "answer")
    solution, mark, answer = whole.rpartition(_MARK)
    if not answer.strip():
        raise UsageError(f"{row.where}: its answer is empty")
    columns = {"question": question, "answer": answer.strip()} | ({"solution": solution.strip()} if mark else {})
    return Row(row | columns, row.where)
