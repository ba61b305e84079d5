"""Digests: SHA-256 of files and of values, equal exactly when the contents are."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.data.types import Prompts

_THREADS = 4  # hashing leaves Python's lock


def of_file(file: Path) -> str:
    """The digest of a file's contents, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def of_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Digests of files, each read once.

    Args:
      folder: that they are below.
      names: their paths in it.

    Returns:
      name -> digest.
    """
    names = sorted(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(of_file, (folder / name for name in names)), strict=True))


def of_values(*values: Any) -> str:
    """The digest of arrays and of values as JSON has them; of what JSON does not have, the type alone counts."""
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(json.dumps(value, default=lambda x: type(x).__name__).encode())
    return digest.hexdigest()


def of_prompts(prompts: Prompts) -> str:
    """The digest of prompts and their columns."""
    return of_values(prompts.ids, prompts.mask, prompts.examples)
