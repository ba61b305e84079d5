"""Texts whose tokens are characters: for tasks that need no download."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.data.types import Answer, Example, Prompts, Reward, Rewards, check_num_prompts, pad_prompts, rng
from grpo_jax.errors import missing
from grpo_jax.tasks.task import Task

try:
    import tokenizers
except ModuleNotFoundError as error:
    raise missing(error.name) from None


class Characters(NamedTuple):
    """A tokenizer with an id for each character, then one for padding and one for the end."""

    alphabet: str

    @property
    def pad_id(self) -> int:
        """The first id after the characters."""
        return len(self.alphabet)

    @property
    def eos_id(self) -> int:
        """The last id."""
        return len(self.alphabet) + 1

    @property
    def vocab_size(self) -> int:
        """Characters, padding and end (V)."""
        return len(self.alphabet) + 2

    def encode(self, text: str) -> list[int]:
        """Ids of characters, all of which are in the alphabet."""
        return [self.alphabet.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Characters of ids; "?" for padding and end."""
        characters = self.alphabet + "??"
        return "".join([characters[i] for i in ids])

    def save_tokenizer(self, folder: Path) -> None:
        """Writes `encode` and `decode` as a tokenizer that transformers loads."""
        vocab = {character: i for i, character in enumerate(self.alphabet)}
        vocab |= {"<pad>": self.pad_id, "</s>": self.eos_id}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
        tokenizer.add_special_tokens(["<pad>", "</s>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def characters_task(
    text: Characters,
    examples: Callable[[np.ndarray], list[Example]],
    split: tuple[np.ndarray, np.ndarray],
    *,
    reward: Reward | Rewards,
    num_prompts: int,
    seed: int,
    answer: Answer | None = None,
) -> Task:
    """A task whose prompts are numbered, with `num_prompts` different ones a step.

    Args:
      text: the tokenizer.
      examples: numbers of prompts -> their examples, whose "prompt" all have one length.
      split: numbers of the prompts for training, and of those held out.
      reward: of completions.
      num_prompts: N.
      seed: of the order of prompts.
      answer: what completions of a prompt vote on; None: there is no vote.

    Returns:
      The task.

    Raises:
      UsageError: there are fewer training prompts than `num_prompts`.
    """
    train, heldout = split
    check_num_prompts(num_prompts, len(train))

    def encode(numbers: np.ndarray) -> Prompts:
        return encode_examples(text, examples(numbers))

    return Task(
        prompts=lambda step: encode(rng(seed, 0, step).choice(train, num_prompts, replace=False)),
        reward=reward,
        heldout=encode(heldout),
        decode=text.decode,
        eos_ids=(text.eos_id,),
        pad_id=text.pad_id,
        vocab_size=text.vocab_size,
        answer=answer,
    )


def encode_examples(text: Characters, examples: Sequence[Example]) -> Prompts:
    """The prompts of examples, which all have one length."""
    ids = [text.encode(example["prompt"]) for example in examples]
    return pad_prompts(ids, list(examples), width=len(ids[0]), pad_id=text.pad_id)
