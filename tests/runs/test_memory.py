"""The estimate of memory: parameters against real ones, the peak against what the compiler plans, README's table."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import recipe, with_options
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.lora import add_adapters
from grpo_jax.models.policy import decoder_policy
from grpo_jax.runs import memory
from grpo_jax.tasks.task import Task
from grpo_jax.training.grpo import grpo_method
from grpo_jax.training.loop import compile_programs
from grpo_jax.training.parallel import devices_of, shardings, to_devices
from grpo_jax.training.state import Batch, RewardArrays

README = Path(__file__).parents[2] / "README.md"
TINY = ModelConfig(vocab_size=31, hidden_size=8, intermediate_size=12, head_dim=4)


def size(tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_hidden_layers": 3},
        {"qkv_bias": True},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True},
    ],
)
def test_parameters_are_those_of_an_initialised_model(changes):
    config = dataclasses.replace(TINY, **changes)
    params = jax.eval_shape(decoder_policy(config).init, jax.random.key(0))
    assert memory.num_params(config) == size(params)


def test_adapters_are_those_of_an_adapted_model():
    params = decoder_policy(TINY).init(jax.random.key(0))
    adapted = add_adapters(params, jax.random.key(1), rank=3, alpha=6.0)
    assert memory.num_adapter_params(TINY, 3) == size(adapted.adapters)


@pytest.mark.parametrize(
    ("wide", "remat", "microbatches", "devices"),
    [(False, "layer", 1, 1), (False, "none", 2, 1), (True, "layer", 2, 1), (True, "layer", 1, 4)],
)
def test_learn_needs_what_is_estimated_within_a_factor_of_1_4(wide, remat, microbatches, devices):
    """Wide: parameters decide. Otherwise: activations. Of several devices, each of which has a part of them, one."""
    config = ModelConfig(
        vocab_size=4096 if wide else 512,
        hidden_size=256 if wide else 64,
        intermediate_size=1024 if wide else 256,
        num_hidden_layers=8,
        head_dim=64 if wide else 16,
        remat=remat,
    )
    shape = memory.Shape(4, 4, 64, 65 if wide else 257, microbatches, 0, 4, 2**19, 128)
    shape = shape._replace(num_prompts=4 // devices, shards=devices)
    ours = memory.estimate(config, shape)
    estimated = ours.params + ours.optimizer + ours.gradients + ours.activations + ours.logits

    def array(kind, *dimensions):
        return jax.ShapeDtypeStruct(dimensions, kind)

    policy = decoder_policy(config)
    run = recipe("grpo", num_prompts=4, group_size=4, max_tokens=shape.max_tokens, microbatches=microbatches)
    run = with_options(run, devices=devices, fsdp=devices)
    task = Task(None, None, None, None, (0,), 0, config.vocab_size)
    programs = compile_programs(grpo_method(policy, run), policy, task, run)
    state = jax.eval_shape(programs.init_state, jax.eval_shape(policy.init, jax.random.key(0)))
    per_token = array(jnp.float32, 4, 4, shape.max_tokens)
    batch = Batch(
        array(jnp.int32, 4, 64),
        array(bool, 4, 64),
        array(jnp.int32, *per_token.shape),
        array(bool, *per_token.shape),
        array(jnp.float32, 4, 4),
        per_token,
        truncated=array(bool, 4, 4),
        ref_logprobs=per_token,
    )
    rewards = RewardArrays(array(jnp.float32, 4, 4), array(bool, 4, 4))
    clock = array(np.uint32, 2)
    if devices > 1:
        mesh = devices_of(run)
        where = shardings(state, mesh)
        state = jax.tree.map(lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), state, where)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (batch, rewards))
        batch, rewards = to_devices(zeros, mesh)
    planned = programs.learn.lower(state, None, None, batch, rewards, clock).compile().memory_analysis()
    bytes_planned = (
        planned.argument_size_in_bytes
        + planned.temp_size_in_bytes
        + planned.output_size_in_bytes
        - planned.alias_size_in_bytes
    )
    print(f"estimated {estimated / 2**20:.1f} MiB, planned {bytes_planned / 2**20:.1f} MiB")
    assert 1 / 1.4 < estimated / bytes_planned < 1.4


def test_readme_has_the_table():
    assert memory.table() in README.read_text()


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen2.5-0.5B", 0.494), ("Qwen2.5-1.5B", 1.544), ("Qwen2.5-7B", 7.616)]
)
def test_published_models_have_their_published_size(name, billions):
    assert memory.num_params(memory.MODELS[name]) / 1e9 == pytest.approx(billions, abs=5e-4)
