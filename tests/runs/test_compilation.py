"""Compiled programs are kept between starts, and counted as what they were: compiled, or read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax.runs.progress import Programs, in_words

# An experiment whose run compiles programs and says how many.
SCRIPT = """
from dataclasses import dataclass
from pathlib import Path
import jax
from grpo_jax.runs import progress, flags

@dataclass(frozen=True)
class Config:
    output: flags.RunConfig = flags.RunConfig(Path("run"))

def run(config):
    jax.jit(lambda x: x * 2)(1.0).block_until_ready()
    print(*progress.programs_so_far())

flags.main(Config, run, None)
"""


def start(folder: Path, *flags: str, **environment: str) -> tuple[Programs, str]:
    """The programs of a new process in this folder, and what it said on stderr."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    given = inherited | {"XDG_CACHE_HOME": str(folder / "cache")} | environment
    command = [sys.executable, "-c", SCRIPT, *flags]
    done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    return Programs(*map(int, done.stdout.split())), done.stderr


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def test_a_second_start_compiles_nothing(tmp_path):
    (first, _), (second, said) = (start(tmp_path) for _ in range(2))
    assert first.compiled > 0
    assert second == Programs(0, sum(first))
    assert "Error" not in said


@pytest.mark.slow
def test_a_program_whose_writer_was_killed_is_no_hindrance(tmp_path):
    """It is deleted, and compiled again."""
    first, _ = start(tmp_path)
    (broken,) = (tmp_path / "cache").rglob("jit__lambda*-atime")
    broken.unlink()
    third, said = start(tmp_path)
    assert third == Programs(1, sum(first) - 1)
    assert "Error" not in said


@pytest.mark.slow
def test_the_cache_can_be_switched_off(tmp_path):
    programs, _ = start(tmp_path, "--no-compilation-cache")
    assert programs.compiled > 0
    assert programs.read == 0
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_stops_no_run(tmp_path):
    (tmp_path / "cache").write_text("a file")
    programs, said = start(tmp_path)
    assert programs.compiled > 0
    assert "compiled programs cannot be kept" in said


@pytest.mark.slow
def test_a_folder_that_jax_was_told_stays(tmp_path):
    programs, _ = start(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert programs.compiled > 0
    assert not (tmp_path / "cache").exists()


def test_words():
    assert in_words(Programs(9, 0)) == "9 programs compiled"
    assert in_words(Programs(0, 9)) == "0 programs compiled, 9 loaded from the cache"
