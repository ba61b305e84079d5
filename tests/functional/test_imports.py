"""What the layer of pure functions may load: jax and chex, nothing of the rest of this library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def loaded():
    """Names of the modules that a fresh interpreter has after importing the functions."""
    code = "import grpo_jax.functional, json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("package", ["flax", "optax", "orbax", "transformers"])
def test_no_framework_is_loaded(loaded, package):
    assert not [name for name in loaded if name.split(".")[0] == package]


def test_nothing_else_of_the_library_is_loaded(loaded):
    ours = [name for name in loaded if name.split(".")[0] == "grpo_jax"]
    assert "grpo_jax.functional.losses" in ours
    assert all(name == "grpo_jax" or name.startswith("grpo_jax.functional") for name in ours)
