"""GSM8K: grade-school word problems whose answer is a number (Cobbe et al., 2110.14168).

Rows have a question, and an answer that ends with "#### 72". Local files are read, or "openai/gsm8k" from the hub.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.data.rows import Row, read_rows, text_column
from grpo_jax.errors import UsageError
from grpo_jax.rewards.builtin import number_vote
from grpo_jax.tasks.task import Task, text_task

INSTRUCTION = 'Think step by step, and end with a line of "####" and the number, such as "#### 72".'
# A base model continues the first; the second is a user's message.
TEMPLATE = "Question: {question}\n" + INSTRUCTION + "\nAnswer:"
CHAT_TEMPLATE = "{question}\n" + INSTRUCTION
_HUB_ID, _HUB_SUBSET = "openai/gsm8k", "main"


def gsm8k_rows(source: str | Path = _HUB_ID, *, split: str | None = None) -> list[Row]:
    """Rows with "question", "answer" (the number, as written) and "solution" (the steps, with their <<marks>>).

    Args:
      source: as in `read_rows`.
      split: "train" or "test", of a folder or the hub.

    Returns:
      The rows.

    Raises:
      UsageError: there are none, or one has no question or no "####" in its answer.
    """
    subset = _HUB_SUBSET if str(source) == _HUB_ID and not Path(source).exists() else None
    return [_parted(row) for row in read_rows(source, split=split, subset=subset)]


def gsm8k_task(
    tokenizer: Any,
    eos_ids: tuple[int, ...],
    source: str | Path = _HUB_ID,
    *,
    chat: bool = False,
    template: str | None = None,
    heldout_rows: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Task:
    """The task: trained on the split "train", held out is "test".

    Args:
      tokenizer, eos_ids: as in `text_task`.
      source: a folder with train.jsonl and test.jsonl, or an id on the hub.
      chat: the question is a user's message.
      template: in place of TEMPLATE, or of CHAT_TEMPLATE with `chat`.
      heldout_rows: in place of the split "test".
      options: of `text_task`: vocab_size, num_prompts, seed and reward, and others such as num_heldout.

    Returns:
      The task. Completions vote by their last number, unless `options` has another answer.
    """
    return text_task(
        tokenizer,
        eos_ids,
        gsm8k_rows(source, split="train"),
        heldout_rows=gsm8k_rows(source, split="test") if heldout_rows is None else heldout_rows,
        template=template or (CHAT_TEMPLATE if chat else TEMPLATE),
        chat=chat,
        **{"answer": number_vote} | options,
    )


def _parted(row: Row) -> Row:
    question, whole = text_column(row, "question"), text_column(row, "answer")
    solution, mark, answer = whole.rpartition("####")
    if not mark or not answer.strip():
        raise UsageError(f'{row.where}: its answer does not end with "####" and a number')
    return Row(row | {"question": question, "answer": answer.strip(), "solution": solution.strip()}, row.where)
