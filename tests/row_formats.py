"""Rows in each format of TRL's data sets: of texts, of chat messages, and of episodes with tools."""

from typing import Any

FORMATS = (
    "language modelling",
    "prompt-only",
    "prompt-completion",
    "preference",
    "preference without prompt",
    "unpaired preference",
)
KINDS = ("texts", "messages", "episodes")
TOOL = {"type": "function", "function": {"name": "7", "description": "8", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "7", "arguments": {"a": 8}}}


def columns(form: str, kind: str, texts: tuple[str, str, str], is_good: bool) -> dict[str, Any]:
    """Returns the columns of a row. Episodes have tools, a call with its result, and a content of two parts.

    Args:
      form: One of FORMATS.
      kind: One of KINDS.
      texts: A question, a good answer and a bad one.
      is_good: The label. In episodes it is 1 or 0.
    """
    prompt, good, bad = texts
    shared: dict[str, Any] = {"tools": [TOOL]} if kind == "episodes" else {}
    if kind == "texts":
        return _columns(form, prompt, good, bad, is_good)
    turns = [[{"role": "assistant", "content": text}] for text in (good, bad)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if kind == "episodes":
        parts = [{"type": "text", "text": text} for text in (prompt[:4], prompt[4:])]
        call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        messages = [{"role": "user", "content": parts}, call, {"role": "tool", "name": "7", "content": "9"}]
    return shared | _columns(form, messages, *turns, int(is_good) if kind == "episodes" else is_good)


def _columns(form: str, prompt: Any, good: Any, bad: Any, label: Any) -> dict[str, Any]:
    return {
        "language modelling": {"text" if isinstance(prompt, str) else "messages": prompt + good},
        "prompt-only": {"prompt": prompt},
        "prompt-completion": {"prompt": prompt, "completion": good},
        "preference": {"prompt": prompt, "chosen": good, "rejected": bad},
        "preference without prompt": {"chosen": prompt + good, "rejected": prompt + bad},
        "unpaired preference": {"prompt": prompt, "completion": good if label else bad, "label": label},
    }[form]
