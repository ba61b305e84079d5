"""What the layer of pure functions may load: jax and chex, nothing of the rest of this library."""

import subprocess
import sys
from pathlib import Path


def test_neither_a_framework_nor_the_rest_of_the_library_is_loaded():
    code = "import grpo_jax.functional, sys; print(*sys.modules)"
    root = Path(__file__).parents[2]
    names = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True).stdout
    assert not {"flax", "optax", "orbax", "transformers"} & {name.split(".")[0] for name in names.split()}
    ours = {name for name in names.split() if name.startswith("grpo_jax.")}
    assert "grpo_jax.functional.losses" in ours
    assert all(name.startswith("grpo_jax.functional") for name in ours)
