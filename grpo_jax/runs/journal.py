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

from grpo_jax.errors import UsageError
from grpo_jax.models.transformer import Params
from grpo_jax.runs.files import each_line, write_parts

_LINE = {"version": str, "request": str, "ids": list[int], "logprobs": list[float]}


class RunJournal:
    """The journal of a phase, a folder with completions and with policies that must still sample."""

    def __init__(self, folder: Path) -> None:
        """Reads the journal of an earlier process, if there is one. The folder is made when it is needed.

        Args:
          folder: The folder.
        """
        self._folder, self._file, self._lock = folder, folder / "completions.jsonl", threading.Lock()
        lines = [line for _, line in each_line(self._file, _LINE)]
        self._known = {(line["version"], line["request"]): (line["ids"], line["logprobs"]) for line in lines}
        if self._file.exists():  # without a last line that a crash cut off
            write_parts(self._file, (json.dumps(line) + "\n" for line in lines))
        self._covered, self._policies = 0, list[Path]()  # what the next page drops

    def find(self, version: str, request: str) -> tuple[list[int], list[float]] | None:
        """Returns the ids and log-probabilities of a completion that an earlier process kept.

        Args:
          version: The digest of the parameters that sample it.
          request: The digest of the request.
        """
        return self._known.get((version, request))

    def keep(self, lines: Sequence[dict[str, Any]]) -> None:
        """Writes completions, so that they survive the end of the process."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with self._lock:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)

    def keep_policy(self, step: int, params: Params) -> None:
        """Writes the trained parameters that a policy had before a step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        leaves = [np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in jax.tree.leaves(params)]
        np.savez(self._policy_file(step), *leaves)

    def policy(self, step: int, like: Params) -> Params:
        """Reads parameters that `keep_policy` wrote.

        Args:
          step: The step.
          like: Parameters with the same shapes, on the same devices.

        Raises:
          UsageError: They are not there.
        """
        leaves, structure = jax.tree.flatten(like)
        try:
            with np.load(self._policy_file(step)) as file:
                stored = [file[f"arr_{number}"] for number in range(len(leaves))]
            arrays = [np.frombuffer(x, y.dtype).reshape(y.shape) for x, y in zip(stored, leaves, strict=True)]
        except (OSError, ValueError, LookupError) as error:
            raise UsageError(
                f"{self._policy_file(step)} cannot be read ({error}), and the checkpoint needs it: put it back, or "
                "start a new run"
            ) from None
        return jax.tree.unflatten(
            structure, [jax.device_put(x, y.sharding) for x, y in zip(arrays, leaves, strict=True)]
        )

    def turn_page(self) -> None:
        """Drops what the last checkpoint covers, before the next one is written."""
        with self._lock:
            for policy in self._policies:
                policy.unlink(missing_ok=True)
            self._policies = [*self._folder.glob("policy_*.npz")]
            if self._file.exists():
                data = self._file.read_bytes()[self._covered :]
                write_parts(self._file, [data.decode()])
                self._covered = len(data)

    def clear(self) -> None:
        """Deletes the journal, once the last checkpoint has been written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _policy_file(self, step: int) -> Path:
        return self._folder / f"policy_{step:06d}.npz"
