"""A reward model as a reward, for any loop that calls reward(examples, completions).

GRPOTrainer(model=..., reward_model=load_reward_model(folder))
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax.data.prompts import pad_prompts
from grpo_jax.data.text import Answers, answer_prompts, check_ids, common_tokens, encode_prompts
from grpo_jax.data.types import Completion, Example, Prompt, Reward, pad_completions
from grpo_jax.errors import UsageError
from grpo_jax.models.chat import Chat, decode, digest_of_template, known_role
from grpo_jax.models.decoder import heads
from grpo_jax.models.decoder.heads import judge_groups
from grpo_jax.models.files.weights import read_json
from grpo_jax.models.huggingface import Pretrained, load_pretrained, save_pretrained

_SHORTEST = 32  # tokens; the smallest width that is chosen automatically


class RewardModel(Pretrained):
    """A pretrained model with a head, which is also a reward with the defaults of `reward_function`."""

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """Returns the reward of each completion."""
        return reward_function(self)(examples, completions)  # type: ignore[arg-type, return-value]


def load_reward_model(name: str | Path, **options: Any) -> RewardModel:
    """Loads a classifier with one label from a folder in Hugging Face format (…ForSequenceClassification).

    Args:
      name: A folder written by `save_reward_model` or transformers, or an id on the hub.
      **options: Options of `load_pretrained`: param_dtype, sharding, dtype, attention.

    Returns:
      The model.

    Raises:
      UsageError: Something is missing or not supported. The message says what.
    """
    return RewardModel(*load_pretrained(name, head=True, **options))


def save_reward_model(folder: str | Path, model: RewardModel, **options: Any) -> Path:
    """Writes a folder that `load_reward_model` and AutoModelForSequenceClassification of transformers can load.

    Args:
      folder: The folder to write, which must not exist or be empty.
      model: The reward model. Adapters are merged. Tokenizer and configuration are copied from `model.folder`.
      **options: Options of `save_pretrained`: dtype and max_shard_bytes.

    Returns:
      The folder.

    Raises:
      UsageError: The folder is not empty.
    """
    return save_pretrained(folder, heads.merge_decoder(model.params), model.config, source=model.folder, **options)


def reward_function(
    model: RewardModel,
    *,
    batch_size: int = 32,
    max_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
) -> Reward:
    """Makes a reward from a reward model.

    The model reads chat messages and the completion in its own chat template. As in transformers, the reward is read at
    the last token that is not padding. A prompt is computed once for consecutive completions, such as those of a group.

    An episode in a chat is read turn by turn. Prompts without messages stay text. If the reward model's tokenizer then
    decodes a completion's token ids to the same text, as when it shares its tokenizer with the policy, these ids are
    used. Otherwise the text is encoded.

    Args:
      model: The reward model.
      batch_size: The number of completions computed at once, or those of one prompt if a prompt has more.
      max_prompt_tokens: The width of prompts. Longer prompts lose their beginning. None: the smallest power of two from
        32 on that fits the longest prompt of a call, so that few programs are compiled, and the computation of a call
        depends on nothing else.
      max_tokens: The width of completions. Longer completions lose their end. None: likewise.

    Returns:
      The reward, one for each completion.

    Raises:
      UsageError: In a call: a prompt is empty, or it is text for a policy with another chat template.
    """
    chat = Chat(model.tokenizer, model.eos_ids)
    pad_id = read_json(model.folder / "config.json").get("pad_token_id")

    def encode(prompts: Sequence[Any], groups: Sequence[Sequence[Completion]]) -> list[Answers]:
        check_template(model.tokenizer, prompts)
        readable = [list(getattr(prompt, "messages", ())) or prompt for prompt in prompts]
        variables = [getattr(prompt, "kwargs", {}) for prompt in prompts]  # "tools" among them
        known = [
            {name: each[name] for name in each if name in str(model.tokenizer.chat_template)} for each in variables
        ]
        encoded = encode_prompts(chat, readable, max_prompt_tokens=max_prompt_tokens, overlong="truncate", kwargs=known)
        if len(encoded.numbers) < len(prompts):
            raise UsageError("a prompt is empty for the tokenizer of the reward model, or does not fit: leave it out")
        rows = answer_prompts(chat, encoded, groups, judged=True, pad_id=pad_id)
        return [
            row if text.messages else as_sampled(ids.tolist(), row, group)
            for text, ids, row, group in zip(encoded.texts, encoded.token_ids, rows, groups, strict=True)
        ]

    def as_sampled(prompt: list[int], row: Answers, group: Sequence[Completion]) -> Answers:
        pairs = zip(group, row.answers, strict=True)
        wholes = [[*prompt, *text.ids] if is_spelled(text) else [*row.prompt, *ids] for text, ids in pairs]
        shared = common_tokens([prompt, *wholes])
        return Answers(shared, tuple(ids[len(shared) :] for ids in wholes))

    def is_spelled(completion: Completion) -> bool:
        ids = list(getattr(completion, "ids", [-1]))
        return all(0 <= i < model.config.vocab_size for i in ids) and decode(chat, ids) == completion

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        if not completions:
            return []
        whole = [example["prompt"] for example in examples]
        pairs = [last_turn(chat, *pair) for pair in zip(whole, completions, strict=True)]
        # Each episode has a history of its own.
        is_shared = all(read is prompt for (read, _), prompt in zip(pairs, whole, strict=True))
        group_size = common_group_size(whole) if is_shared else 1
        starts = range(0, len(pairs), group_size)
        rows = encode(
            [pairs[start][0] for start in starts],
            [[answer for _, answer in pairs[start : start + group_size]] for start in starts],
        )
        prompts, groups = [row.prompt for row in rows], [[ids[:max_tokens] for ids in row.answers] for row in rows]
        check_ids([ids for row in rows for ids in (row.prompt, *row.answers)], model.config.vocab_size)
        judge = partial(judge_groups, model.config, model.params)
        return judge_batches(
            judge, prompts, groups, batch_size=batch_size, max_prompt_tokens=max_prompt_tokens, max_tokens=max_tokens
        )

    return reward


def last_turn(chat: Chat, prompt: Any, completion: Completion) -> tuple[Any, Completion]:
    """Moves all turns but the last of an episode to the end of its prompt, if both are chat messages.

    Args:
      chat: The template that will write the messages. Observations in a role that it lacks become the user's.
      prompt: The prompt.
      completion: The completion, of one turn or several.

    Returns:
      The prompt and the completion, which are unchanged without such turns.
    """
    history = getattr(completion, "messages", [])[:-1]
    if not (history and getattr(prompt, "messages", ())):
        return prompt, completion
    roles = {message["role"] for message in history} - {"assistant"}
    known = {role: known_role(chat, (role, "user")) for role in roles} | {"assistant": "assistant"}
    turns = [{**message, "role": known[message["role"]]} for message in history]
    return Prompt(prompt, [*prompt.messages, *turns], prompt.kwargs, prompt.template), completion.actions[-1]


def check_template(tokenizer: Any, prompts: Sequence[Any], *, quotes: bool = False) -> None:
    """Raises if prompts are text that a policy with another chat template reads: the text may be written in it.

    Args:
      tokenizer: The tokenizer of a reward model or judge.
      prompts: The prompts of examples. Only those that a task made know the policy's template.
      quotes: True if the model's own template quotes the prompts, which may then come from a policy without a template.

    Raises:
      UsageError: The templates differ.
    """
    same = {digest_of_template(tokenizer), *([""] if quotes else [])}
    if any(isinstance(prompt, Prompt) and not prompt.messages and prompt.template not in same for prompt in prompts):
        raise UsageError(
            "prompts are text, and the model that judges has another chat template than the policy: give prompts as "
            "chat messages (--chat), or take a model with the policy's template"
        )


def common_group_size(prompts: Sequence[Any]) -> int:
    """Returns the number of consecutive completions per prompt: the greatest common divisor of all run lengths."""
    return math.gcd(*(len(list(group)) for _, group in groupby(prompts)))


def judge_batches(
    judge: Callable[..., jax.Array],
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Sequence[int]]],
    *,
    batch_size: int,
    max_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
) -> list[float]:
    """Judges groups of texts with a common beginning, in batches of one shape.

    Args:
      judge: (prompts `[N, P]`, ids `[N, G, T]`, mask `[N, G, T]`) -> `[N, G]`. Prompts are padded on the left, the
        texts after them on the right.
      prompts: M lists of at least one id.
      groups: M lists of G lists of ids, which may be empty.
      batch_size: The number of texts computed at once, or those of one prompt if a prompt has more.
      max_prompt_tokens: The width of prompts, P. None: the smallest power of two from 32 on that fits the longest
        prompt, so that few programs are compiled.
      max_tokens: The width of the texts after prompts, T. None: likewise.

    Returns:
      M · G rewards.
    """
    max_prompt_tokens = max_prompt_tokens or _width(prompts)
    max_tokens = max_tokens or _width([ids for group in groups for ids in group])
    count = max(batch_size // len(groups[0]), 1)
    rewards = []
    for start in range(0, len(groups), count):
        # The last piece is filled up with the first group, so that it has the same shape.
        chosen = [i if i < len(groups) else 0 for i in range(start, start + count)]
        padded = pad_prompts([prompts[i] for i in chosen], [{}] * count, width=max_prompt_tokens, pad_id=0)
        arrays = pad_completions([groups[i] for i in chosen], max_tokens)
        rewards.append(np.asarray(judge(padded.tokens, *arrays)).reshape(-1))
    return np.concatenate(rewards)[: len(groups) * len(groups[0])].tolist()


def _width(texts: Sequence[Sequence[int]]) -> int:
    return max(_SHORTEST, 1 << (max(map(len, texts)) - 1).bit_length())
