"""The three programs of an iteration from shapes alone: lowered and compiled, with no array made.

Letters as in `rl.types`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.config import GRPOConfig
from grpo_jax.devices import Devices, devices_of, jit_on_devices, num_hosts, sampling_devices, shardings
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.params.lora import add_adapters
from grpo_jax.models.params.quantised import quantise_params
from grpo_jax.models.params.sharding import BATCH
from grpo_jax.models.params.tree import Quantize, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.ppo import add_critic, critic_policy
from grpo_jax.rl.programs import Programs, make_method, make_method_programs
from grpo_jax.rl.scorers import score_rollout
from grpo_jax.rl.source import to_batch
from grpo_jax.rl.types import RewardArrays
from grpo_jax.rl.update import with_fixed_reference
from grpo_jax.tasks.task import Task


def lowered(
    model: ModelConfig,
    config: GRPOConfig,
    prompt: int,
    *,
    lora_rank: int = 0,
    param_dtype: str = "float32",
    quantize: Quantize = "none",
    programs: tuple[str, ...] = ("sample", "score", "learn"),
) -> dict[str, jax.stages.Lowered]:
    """Lowers programs as `training.phases` compiles them, by name; `score` is missing if the update needs none.

    With devices that only sample, `sample` is that of one host.

    Args:
      model: the decoder.
      config: the run, with its devices, which have to be there.
      prompt: P, tokens of a prompt.
      lora_rank: of adapters; 0: all parameters are trained.
      param_dtype: of the decoder's parameters.
      quantize: of its frozen projections.
      programs: which to lower.
    """
    results = dict[str, jax.stages.Lowered]()
    made: Any = programs_of(model, config)
    made_of = params_of(model, config, lora_rank=lora_rank, param_dtype=param_dtype, quantize=quantize)
    params = with_fixed_reference(placed(made_of, devices_of(config)), config)
    trained, frozen = split(params)
    n, g = config.sampling.num_prompts, config.sampling.group_size
    training, sampling = devices_of(config), sampling_devices(config)
    array, seed_and_step = partial(spread, training), jax.ShapeDtypeStruct((2,), jnp.uint32)
    noise = jax.ShapeDtypeStruct((3,), jnp.uint32)
    rows = n // num_hosts(training) if config.num_sampler_devices else n
    inputs = partial(spread, sampling)
    arguments = PromptTokens(inputs((rows, prompt), jnp.int32), inputs((rows, prompt), bool))
    copied = placed(made_of["policy"], sampling)
    to_sample = copied, arguments, inputs((rows, g), jnp.int32), inputs((rows, g), jnp.float32), noise
    if "sample" in programs:
        results["sample"] = made.sampler.program.lower(*to_sample)
    completions = jax.eval_shape(made.sampler.program, *to_sample)
    completions = jax.tree.map(lambda x: array((n, *x.shape[1:]), x.dtype), completions)
    prompts = PromptTokens(array((n, prompt), jnp.int32), array((n, prompt), bool))
    batch = to_batch(prompts, array((n, g), jnp.float32), completions)
    if made.method.scorers:
        scorers = partial(score_rollout, made.method, config, devices=devices_of(config))
        score: Any = jit_on_devices(scorers, 0, devices=devices_of(config))
        if "score" in programs:
            results["score"] = score.lower(params, batch)
        fields = jax.eval_shape(score, params, batch)
        batch = batch._replace(**jax.tree.map(lambda x: array(x.shape, x.dtype), fields))
    if "learn" in programs:
        state = placed(jax.eval_shape(made.initial_state, trained), devices_of(config))
        rewards = RewardArrays(array((n, g), jnp.float32), array((n, g), bool))
        results["learn"] = made.learn.lower(state, frozen, batch, rewards, seed_and_step)
    return results


def programs_of(model: ModelConfig, config: GRPOConfig) -> Programs:
    """The functions of a run, not yet compiled."""
    policies = {"policy": decoder_policy(model), "critic": critic_policy(model)}
    task: Any = Task(None, None, None, None, (-1,), 0, model.vocab_size)  # type: ignore[arg-type]
    return make_method_programs(make_method(policies, config), policies["policy"], task, config)


def params_of(
    model: ModelConfig,
    config: GRPOConfig,
    *,
    lora_rank: int,
    param_dtype: str,
    quantize: Quantize = "none",
) -> Any:
    """Returns the shapes of the models that a run takes, by role."""

    def make() -> Any:
        params = decoder_policy(model).init(jax.random.key(0))
        params = jax.tree.map(lambda x: x.astype(param_dtype), params)
        params = quantise_params(params, quantize)
        if lora_rank:
            params = add_adapters(params, jax.random.key(0), rank=lora_rank, alpha=1.0)
        return add_critic(model, params, config.critic.critic)

    return jax.eval_shape(make)


def placed(tree: Any, devices: Devices) -> Any:
    """Shapes of parameters, with where `parallel.place` puts them."""
    if devices.mesh is None and not devices.is_single:
        return tree
    return jax.tree.map(
        lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree, shardings(tree, devices)
    )


def spread(devices: Devices, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array of a batch, spread over devices."""
    if devices.mesh is None:
        return placed(jax.ShapeDtypeStruct(shape, dtype), devices)
    leaf = jax.tree.leaves(shardings({"x": jax.ShapeDtypeStruct((1,), dtype)}, devices))[0]
    there = NamedSharding(leaf.mesh, PartitionSpec(BATCH))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=there)


def planned_bytes(compiled: jax.stages.Compiled) -> Mapping[str, int]:
    """Returns the bytes that the compiler plans for one device: arguments, other results, and temporary arrays."""
    memory: Any = compiled.memory_analysis()
    out = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {"arguments": memory.argument_size_in_bytes, "results": out, "temporary": memory.temp_size_in_bytes}


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the peak memory of a program for TPUs on one device, arguments included.

    That is the size of its buffers. What the compiler for TPUs calls temporary is more than that: 46.0 GB of `learn` of
    Qwen2.5-7B, whose buffers are 48.4 GB with 11.4 GB of arguments. XLA on a CPU has no such number.
    """
    return int(compiled.memory_analysis().peak_memory_in_bytes)  # type: ignore[union-attr]
