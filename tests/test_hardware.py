"""Hardware: programs lower for TPU and CUDA on a machine that has neither, and what devices have and compute."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import pytest
from tiny import task_of_tokens

from grpo_jax import devices
from grpo_jax.config import recipe
from grpo_jax.devices import memory_limit, peak_flops, peak_memory_mb, update_flops
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.decoder.transformer import param_shapes
from grpo_jax.models.params.quantised import quantise_params
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl import interaction, source
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.scorers import score_rollout
from grpo_jax.rl.types import RewardArrays
from grpo_jax.rl.update import learn
from grpo_jax.step import init_state

MODEL = ModelConfig(32, 16, 24, 2, 2, 1, 8, dtype="bfloat16", remat="layer")
N, G, P, T = 4, 2, 5, 6
SIZES = {"num_prompts": N, "group_size": G, "max_tokens": T, "minibatches": 2}
SIZES |= {"piece_tokens": P + G * T - 1}  # a prompt in each piece
LIMITS = {"top_k": 10, "top_p": 0.9, "min_p": 0.01}
CONFIG = recipe(**SIZES, **LIMITS, warmup_steps=2, weight_decay=0.1)
POLICY, TASK = decoder_policy(MODEL), task_of_tokens((3, 4), 0, MODEL.vocab_size)
METHOD = grpo_method(POLICY, CONFIG)


def shape(*axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(axes, dtype)


sample = partial(interaction.sample_completions, POLICY, TASK, CONFIG.sampling)
score = partial(score_rollout, METHOD, CONFIG)
PROGRAMS = {"sample": sample, "score": score, "learn": partial(learn, METHOD, CONFIG)}


@cache
def arguments():
    """The shapes that each program takes. They are traced here, and not while tests are collected."""
    key = jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(POLICY.init, key)
    prompts = PromptTokens(shape(N, P, dtype=jnp.int32), shape(N, P, dtype=jnp.bool_))
    to_sample = params, prompts, shape(N, G, dtype=jnp.int32), shape(N, G), key
    batch = source.to_batch(prompts, shape(N, G), jax.eval_shape(sample, *to_sample))
    to_score = {"policy": params, "reference": params}, batch
    scored = batch._replace(**jax.eval_shape(score, *to_score))
    state = jax.eval_shape(lambda params: init_state(params, METHOD.optimizer), {"policy": params})
    rewards, number = RewardArrays(shape(N, G), shape(N, G, dtype=jnp.bool_)), shape(dtype=jnp.uint32)
    return {
        "sample": to_sample,
        "score": to_score,
        "learn": (state, {"policy": None}, scored, rewards, (number, number)),
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_lowers_for_tpu_and_cuda(name):
    program, args = PROGRAMS[name], arguments()[name]
    exported = jax.export.export(jax.jit(program), platforms=["tpu", "cuda"])(*args)
    assert exported.platforms == ("tpu", "cuda")
    assert exported.mlir_module_serialized
    assert "stablehlo.while" in exported.mlir_module()  # the decode loop; the scan over layers
    out = jax.tree.leaves(jax.eval_shape(program, *args))
    assert [(x.shape, x.dtype) for x in exported.out_avals] == [(x.shape, x.dtype) for x in out]


# ---- memory and operations of devices


PEAKS = [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12)]


@pytest.mark.parametrize(("kind", "peak"), PEAKS)
def test_device_peak_follows_the_most_specific_name(monkeypatch, kind, peak):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert peak_flops(2) == 2 * peak


def test_the_peak_of_other_devices_is_not_known():
    assert peak_flops(1) is None


def test_operations_are_of_the_parameters_that_tokens_use():
    """A quarter of the experts, whole codes of 4 bits, and no embedding that is only looked up."""
    config = ModelConfig(8, experts=ExpertsConfig(8, 2, 32, norm_topk_prob=True))
    layers = param_shapes(config)["layers"]
    experts = layers["experts"]
    share = decoder_policy(config).expert_share
    assert update_flops({"experts": experts}, None, 1, share) == 6 * 2 * (8 * 64 + 2 * 3 * 64 * 32)
    coded = jax.eval_shape(partial(quantise_params, format="nf4"), param_shapes(config))["layers"]["attention"]
    assert update_flops(None, {"layers": {"attention": coded}}, 1) == 4 * 2 * 2 * (64 * 64 + 64 * 32)
    looked_up = {"per_layer": {"embedding": experts["router"]["kernel"]}}
    assert update_flops(looked_up, None, 1) == 0


def test_cpu_memory_is_bounded_by_machine_and_cgroup(monkeypatch):
    ours = sum(x.nbytes for x in jax.live_arrays())
    monkeypatch.setattr(devices, "_available", lambda: 10**9)
    monkeypatch.setattr(devices, "_cgroup_limit", lambda: 4 * 10**8)
    assert memory_limit() == 4 * 10**8
    assert memory_limit(4) == 10**8
    monkeypatch.setattr(devices, "_cgroup_limit", lambda: 2**60)
    assert ours < memory_limit() - 10**9 <= (peak_memory_mb() + 1) * 2**20  # what the process has now


LIMIT_FILES = [
    ("memory.max", "max\n", 2**60),
    ("memory.max", "1024\n", 1024),
    ("memory/memory.limit_in_bytes", "1024\n", 1024),
    ("memory/memory.limit_in_bytes", "9223372036854771712\n", 2**60),  # version 1 has no word for no limit
    ("other", "1", 2**60),
]


@pytest.mark.parametrize(("file", "text", "limit"), LIMIT_FILES)
def test_cgroup_limits_are_read_from_their_files(tmp_path, file, text, limit):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert devices._cgroup_limit(tmp_path) == limit
