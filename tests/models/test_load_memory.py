"""The most memory that loading and saving take, compared with the weights, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments.new_models import config_to_huggingface
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.files.weights import Tensor, tensor_layout

MEASURE = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from grpo_jax.models.files.families import config_from_huggingface
from grpo_jax.models.huggingface import save_pretrained
from grpo_jax.models.files.weights import load_params, read_json
from grpo_jax.models.files.families import config_from_huggingface
from grpo_jax.models.files.weights import load_params, read_json

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))

folder, kind = Path(sys.argv[1]), sys.argv[2]
jnp.zeros(3).block_until_ready()
before = memory("VmRSS")
config = config_from_huggingface(read_json(folder / "config.json"))
params = load_params(folder, config, quantize=kind)
size = sum(x.nbytes for x in jax.tree.leaves(params))
loaded = memory("VmHWM")
if kind == "none":
    save_new_model(folder / "out", params, config)
print((loaded - before) / size, (memory("VmHWM") - before) / size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_and_saving_hold_the_weights_once(tmp_path):
    """Each expert is a tensor of the files, and the experts of a layer are one array in memory."""
    sizes, experts = (8000, 1024, 2816, 48, 16, 16, 64), ExpertsConfig(8, 2, 352, norm_topk_prob=True)
    config = ModelConfig(*sizes, tie_word_embeddings=False, qk_norm=True, experts=experts)
    rng, weights = np.random.default_rng(0), 0
    weight_map: dict[str, str] = {}
    tensors = jax.tree.leaves(tensor_layout(config), is_leaf=lambda x: isinstance(x, Tensor))
    for layer in range(config.num_hidden_layers):
        shapes = {
            x.name.format(layer, expert): x.shape
            for x in tensors
            if x.stacked or layer == 0
            for expert in range(experts.num_experts if x.stacked == 2 else 1)
        }
        drawn = {name: (0.02 * rng.standard_normal(x, np.float32)).astype(jnp.bfloat16) for name, x in shapes.items()}
        save_file(drawn, tmp_path / f"{layer}.safetensors")
        weight_map |= dict.fromkeys(drawn, f"{layer}.safetensors")
        weights += sum(x.nbytes for x in drawn.values())
    assert weights > 1e9
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for kind in ("none", "int8", "nf4"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), kind]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        peaks = [float(number) for number in output.split()]
        print(kind, peaks)
        assert max(peaks) <= 1.3
