"""The journal of a run: completions that servers have sampled since the last checkpoints.

A run that was killed repeats its steps from a checkpoint on, and finds in the journal what was sampled for them. Lines
that a checkpoint covers are dropped at the checkpoint after it, since that one may turn out damaged.
"""

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax import hosts
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.rl.beside import Journal
from grpo_jax.runs.files import each_line, write_parts

_LINE = {"version": str, "request": str, "ids": list[int], "logprobs": list[float]}


def open_journal(folder: Path) -> Journal:
    """Reads the journal that an earlier process left, if there is one, and returns its functions.

    Args:
      folder: The folder of the journal. It is made when something is kept.

    Raises:
      UsageError: A line is not as a run writes it.
    """
    file, lock = folder / f"completions{hosts.index() or ''}.jsonl", threading.Lock()
    lines = [line for _, line in each_line(file, _LINE)]
    known = {(line["version"], line["request"]): (line["ids"], line["logprobs"]) for line in lines}
    if file.exists():  # without a last line that a crash cut off
        write_parts(file, (json.dumps(line) + "\n" for line in lines))
    covered, policies = 0, list[Path]()  # the bytes and the files that the next page drops

    def find(version: str, request: str) -> tuple[list[int], list[float]] | None:
        return known.get((version, request))

    def keep(lines: Sequence[dict[str, Any]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with lock, file.open("a", encoding="utf-8") as opened:
            opened.write("".join(json.dumps(line) + "\n" for line in lines))

    def turn_page() -> None:
        nonlocal covered, policies
        for policy in policies:
            policy.unlink(missing_ok=True)
        policies = [*folder.glob("policy_*.npz")]
        if file.exists():
            data = file.read_bytes()[covered:]
            write_parts(file, [data.decode()])
            covered = len(data)

    def policy_file(step: int) -> Path:
        return folder / f"policy_{step:06d}.npz"

    def keep_policy(step: int, params: Params) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # NumPy's files know no bfloat16.
        np.savez(
            policy_file(step), *(np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in jax.tree.leaves(params))
        )

    def policy(step: int, like: Params) -> Params:
        leaves, structure = jax.tree.flatten(like)
        try:
            with np.load(policy_file(step)) as stored:
                arrays = [np.frombuffer(stored[f"arr_{i}"], x.dtype).reshape(x.shape) for i, x in enumerate(leaves)]
        except (OSError, ValueError, LookupError) as error:
            raise UsageError(
                f"{policy_file(step)} cannot be read ({error}), and a rollout of the checkpoint needs it: put it back, "
                "or start a new run"
            ) from None
        return jax.tree.unflatten(
            structure, [jax.device_put(x, y.sharding) for x, y in zip(arrays, leaves, strict=True)]
        )

    def clear() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    return Journal(find, keep, keep_policy, policy, turn_page, clear)
