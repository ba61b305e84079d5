"""Compares our rendering of chats with transformers', for all chat templates that TRL carries.

    python tests/golden/templates.py TOKENIZER ...

Needs trl. Each TOKENIZER is a folder. The tags that templates write become special tokens of the tokenizer, as for the
models that use them. `chats.py` lists the cases.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import transformers
import trl
from chats import compare
from today import Today
from trl.chat_template_utils import add_response_schema

TAG = re.compile(r"<[|｜][^<>\s{}']+>|<(?:start|end)_of_\w+>|</?s>|<\w+\|>|\[/?INST\]|\[gMASK\]|<sop>")


def templates() -> Iterator[tuple[str, str]]:
    """Yields the name and the text of each template."""
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        yield file.stem, file.read_text()


def load(folder: str) -> Any:
    """Loads a tokenizer, and adds the special tokens that the templates write."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tags = {tag for _, template in templates() for tag in TAG.findall(template)}
    tokenizer.add_special_tokens({"extra_special_tokens": sorted(tags)})
    tokenizer.add_special_tokens({name: getattr(tokenizer, name) or f"<{name}>" for name in ("eos_token", "bos_token")})
    return tokenizer


def main() -> None:
    """Prints counts for each tokenizer, and every difference."""
    with mock.patch.object(transformers.utils.chat_template_utils, "datetime", Today):
        for folder in sys.argv[1:]:
            counts: Counter[tuple[str, str]] = Counter()
            tokenizer = load(folder)
            for name, tokenizer.chat_template in templates():
                tokenizer.response_template = None
                with suppress(ValueError):  # TRL knows how to parse the replies of some templates
                    add_response_schema(tokenizer)
                for kind, result in compare(tokenizer):
                    counts[kind, result.partition(":")[0] if result.startswith("DIFF") else result] += 1
                    if result.startswith("DIFF"):
                        print(f"{name}: {kind}: {result}")
            for (kind, result), count in sorted(counts.items()):
                print(f"{folder}: {kind}: {result}: {count}", flush=True)


if __name__ == "__main__":
    main()
