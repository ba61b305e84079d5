"""Replies of an environment as tokens: text as nothing but text, between what a chat template puts around a turn."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grpo_jax.errors import UsageError

_SAID, _HEARD = "said-by-the-policy", "heard-by-the-policy"


class Delimiters(NamedTuple):
    """Text that a chat template puts around a reply."""

    before: list[int]  # after the token that ended the policy's turn
    after: list[int]  # up to where the policy's next turn begins


def reply_encoder(
    tokenizer: Any, eos_ids: tuple[int, ...], *, roles: Sequence[str] = ("user",)
) -> Callable[[str], list[int]]:
    """How replies are encoded for a model.

    Args:
      tokenizer: of transformers. Without a chat template nothing is put around a reply.
      eos_ids: any of these has ended the policy's turn.
      roles: of the reply in the chat template: the first that it knows. Where none is given, nothing is put around.

    Returns:
      text -> ids. Special tokens that the text spells are encoded as the characters that they are.

    Raises:
      UsageError: the chat template knows none of the roles.
    """
    around = delimiters(tokenizer, eos_ids, roles) if tokenizer.chat_template and roles else Delimiters([], [])

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []
        return [*around.before, *ids, *around.after]

    return encode


def delimiters(tokenizer: Any, eos_ids: tuple[int, ...], roles: Sequence[str]) -> Delimiters:
    """Asks a chat template once what it writes around a reply.

    Templates render earlier turns anew, and some leave out parts of them. So it is filled in for one short
    conversation, and what was sampled is never rendered.

    Args:
      tokenizer, eos_ids, roles: as in `reply_encoder`.

    Raises:
      UsageError: the chat template knows none of the roles.
    """
    for role in roles:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": _SAID},
            {"role": role, "content": _HEARD},
        ]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:  # whatever the template raises of a role that it does not know
            continue
        behind = text.rpartition(_SAID)[2]
        before, marker, after = behind.partition(_HEARD)
        if marker:
            ids, rest = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
            # The policy has written the end of its turn.
            ends = next((place for place, token in enumerate(ids) if token in eos_ids), -1)
            return Delimiters(ids[ends + 1 :], rest)
    raise UsageError(f"the chat template has no turn of the role {' or '.join(roles)}: take another model or template")
