"""The programs of a run lower for TPU and CUDA, on a machine that has neither."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from grpo_jax.functional.presets import PRESETS
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.sampling.sampler import sample_groups
from grpo_jax.sampling.truncation import Truncation
from grpo_jax.training.grpo import grpo_loss_fn
from grpo_jax.training.state import Batch, init_state, learning_rate_schedule, make_optimizer
from grpo_jax.training.step import train_step

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    dtype="bfloat16",
    remat="layer",
)
POLICY = decoder_policy(CONFIG)
OPTIMIZER = make_optimizer(learning_rate_schedule(1e-3, warmup_steps=2), weight_decay=0.1)
N, G, P, T = 4, 2, 5, 6


def sample(params, prompt_ids, prompt_mask, rows, temperature, key):
    return sample_groups(
        POLICY,
        params,
        prompt_ids,
        prompt_mask,
        rows,
        key,
        max_tokens=T,
        eos_ids=(3, 4),
        temperature=temperature,
        truncation=Truncation(top_k=10, top_p=0.9, min_p=0.01),
    )


def step(state, batch):
    algorithm = PRESETS["grpo"]
    return train_step(
        state,
        batch,
        loss_fn=grpo_loss_fn(POLICY, algorithm),
        aggregation=algorithm.aggregation,
        optimizer=OPTIMIZER,
        num_microbatches=2,
    )


def shape(*axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(axes, dtype)


KEY = jax.eval_shape(jax.random.key, 0)
PARAMS = jax.eval_shape(POLICY.init, KEY)
PROMPTS = shape(N, P, dtype=jnp.int32), shape(N, P, dtype=jnp.bool_)
SAMPLE_ARGS = PARAMS, *PROMPTS, shape(N, G, dtype=jnp.int32), shape(N, G), KEY
TOKENS = shape(N, G, T)
STEP_ARGS = (
    jax.eval_shape(lambda params: init_state(params, OPTIMIZER), PARAMS),
    Batch(
        *PROMPTS,
        completion_ids=shape(N, G, T, dtype=jnp.int32),
        completion_mask=shape(N, G, T, dtype=jnp.bool_),
        temperature=shape(N, G),
        advantages=shape(N, G),
        old_logprobs=TOKENS,
        ref_logprobs=TOKENS,
        sampler_logprobs=TOKENS,
    ),
)


@pytest.mark.parametrize(("program", "args"), [(sample, SAMPLE_ARGS), (step, STEP_ARGS)], ids=["sample", "step"])
def test_lowers_for_tpu_and_cuda(program, args):
    exported = jax.export.export(jax.jit(program), platforms=["tpu", "cuda"])(*args)
    assert exported.platforms == ("tpu", "cuda")
    assert exported.mlir_module_serialized
    assert "stablehlo.while" in exported.mlir_module()  # the decode loop; the scan over layers
    out = jax.tree.leaves(jax.eval_shape(program, *args))
    assert [(x.shape, x.dtype) for x in exported.out_avals] == [(x.shape, x.dtype) for x in out]
