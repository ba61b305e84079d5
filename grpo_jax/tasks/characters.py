"""Texts whose tokens are characters: for tasks that need no download."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers


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
        return "".join(self.alphabet[i] if i < len(self.alphabet) else "?" for i in ids)

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
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
