"""A character tokenizer, and tasks on characters, which need no download."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from grpo_jax.data.prompts import Prompts, pad_prompts
from grpo_jax.data.rows import check_step_size
from grpo_jax.data.types import Answer, Example, rng
from grpo_jax.errors import missing
from grpo_jax.rewards.reward import RewardLike
from grpo_jax.tasks.task import Task

try:
    import tokenizers
except ModuleNotFoundError as error:
    raise missing(error.name) from None


class Characters(NamedTuple):
    """A tokenizer with an id for each character, then an id for padding and an id for EOS."""

    alphabet: str

    @property
    def pad_id(self) -> int:
        """The id of padding, the first after the characters."""
        return len(self.alphabet)

    @property
    def eos_id(self) -> int:
        """The id of EOS, which is the last id."""
        return len(self.alphabet) + 1

    @property
    def vocab_size(self) -> int:
        """The number of ids: characters, padding and EOS (V)."""
        return len(self.alphabet) + 2

    def encode(self, text: str) -> list[int]:
        """Returns the ids of characters of the alphabet."""
        return [self.alphabet.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the characters of ids, with "?" for padding and EOS."""
        characters = self.alphabet + "??"
        return "".join([characters[i] for i in ids])

    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer in the format of transformers."""
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
    reward: RewardLike,
    num_prompts: int,
    seed: int,
    answer: Answer | None = None,
) -> Task:
    """Returns a task of numbered prompts.

    Args:
      text: The tokenizer.
      examples: Numbers of prompts -> their examples, whose prompts all have the same length.
      split: The numbers of the training prompts, and the numbers of the held-out prompts.
      reward: One reward function, or several with weights.
      num_prompts: The number of different prompts in each step (N).
      seed: The random seed of the order of prompts.
      answer: Extracts the answer that the completions of a prompt vote on; None: no vote.

    Raises:
      UsageError: There are fewer training prompts than `num_prompts`.
    """
    train, heldout = split
    check_step_size("num_prompts", num_prompts, len(train))

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
    """Encodes the prompts of examples, which all have the same length."""
    ids = [text.encode(example["prompt"]) for example in examples]
    return pad_prompts(ids, list(examples), width=len(ids[0]), pad_id=text.pad_id)
