"""Checks that compiled programs are kept between starts, and counted as compiled or read."""

import os
import subprocess
import sys

import jax

from grpo_jax.runs.progress import use_cache

# Starts an experiment four times, with a second that finds its programs, and one whose writer was killed.
SCRIPT = """
from dataclasses import dataclass
from pathlib import Path
import jax
from jax.experimental.compilation_cache import compilation_cache
from grpo_jax.runs import progress
from grpo_jax.commands import flags

@dataclass(frozen=True)
class Config:
    output: flags.RunConfig = flags.RunConfig(Path("run"))

def start(*args):
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()
    before = progress.programs_so_far()
    flags.main(Config, lambda config: jax.jit(lambda x: x * 2)(1.0).block_until_ready(), None, list(args))
    print(*(now - then for now, then in zip(progress.programs_so_far(), before)))

start()
start()
(broken,) = Path("cache").rglob("jit__lambda*-atime")
broken.unlink()
start()
start("--no-compilation-cache")
"""


def test_second_start_recompiles_only_incomplete_cache_entries(tmp_path):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    paths = {"XDG_CACHE_HOME": "cache", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=inherited | paths, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    first, second, third, without = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert first[0] > 0
    assert second == (0, sum(first))
    assert third == (1, sum(first) - 1)
    assert without[0] > 0
    assert without[1] == 0
    assert "Error" not in done.stderr


def test_unwritable_caches_are_noted_and_configured_ones_stay(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    told = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    try:
        use_cache(tmp_path / "other")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "told")
        assert not (tmp_path / "other").exists()
        jax.config.update("jax_compilation_cache_dir", None)
        use_cache(tmp_path / "file")
        assert "note: compiled programs cannot be kept" in capsys.readouterr().err
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", told)
