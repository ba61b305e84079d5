"""The three compiled programs of an iteration: `sample`, `score` and `learn`."""

import atexit
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import GRPOConfig, LoggingConfig, MeshConfig, SamplerConfig, check_models, validate
from grpo_jax.devices import COMPILING, abstract, devices_of, jit_on_devices, num_cores, num_shards, sampling_devices
from grpo_jax.errors import UsageError
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import split
from grpo_jax.models.policy import Policy
from grpo_jax.options import options_of
from grpo_jax.rl.grade import empty_rewards
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.guards import check_task
from grpo_jax.rl.scorers import score_rollout, takes_sampler_logprobs
from grpo_jax.rl.source import Sampler, empty_batch, make_sampler
from grpo_jax.rl.types import REWARD_AXES, Learned, Method
from grpo_jax.rl.update import learn, models_of, with_fixed_reference
from grpo_jax.step import Batch, TrainState, init_state
from grpo_jax.tasks.task import Task

# Options that only the host reads: changing them needs no other programs. The sampler determines the devices.
HOST_ONLY_OPTIONS = {"seed", "max_rollouts", "filter_metric", "max_skipped", "devices"}
HOST_ONLY_OPTIONS |= {"curriculum", "curriculum_bound"}
HOST_ONLY_OPTIONS |= options_of(LoggingConfig()).keys() | options_of(MeshConfig()).keys()
HOST_ONLY_OPTIONS |= options_of(SamplerConfig()).keys()

LEARNED_AXES: Any = Learned(None, 0, None)  # type: ignore[arg-type]  # 0: split over devices; None: the same on all


class Programs(NamedTuple):
    """The programs of a run, compiled at their first call. Phases that differ only in the reward can share them."""

    method: Method
    sampler: Sampler
    # (trained parameters, extras, frozen parameters, sampled batch) -> scored batch
    score: Callable[[Params, Mapping[str, Any], Any, Batch], Batch]
    # (state, frozen parameters, scored batch, rewards, uint32 [2] of seed and step) -> (state, `Learned`). The state is
    # donated
    learn: Any  # a jitted function
    # trained parameters -> the first state, which holds copies of them
    initial_state: Callable[[Params], TrainState]
    config: GRPOConfig  # the configuration that the programs are compiled for
    score_program: Any  # the compiled part of `score`; None without scorers
    compiling: list[Thread]  # the thread of `compile_ahead`, once it has started
    policy: Policy  # the functions of the model


MethodChange = Callable[[Method], Method]


def make_programs(
    policies: Policy | Mapping[str, Policy],
    task: Task,
    config: GRPOConfig,
    *,
    method: MethodChange | Sequence[MethodChange] = (),
    sampler: Sampler | None = None,
) -> Programs:
    """Checks all options and makes the programs of a run, which are compiled at their first call.

    Args:
      policies: The functions of the model, or of all models by role: "policy", "critic" for the decoder of a separate
        critic, and "teacher".
      task: Supplies the widths of prompts and the special tokens.
      config: All options, which are checked first. A critic or a teacher among them changes the method.
      method: One or several functions that change the method of `make_method`, in this order. Default: none.
      sampler: Samples completions on the devices of the run. Default: the policy samples.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    policies = {"policy": policies} if isinstance(policies, Policy) else policies
    validate(config, num_devices=num_shards(devices_of(config)))
    check_models(config, policies)
    if "teacher" in policies and not config.frozen_models:
        raise UsageError("there is a teacher, but distillation is none: choose one, such as reverse_kl")
    if config.critic.critic == "own" and "critic" not in policies:
        raise UsageError("critic is own, but policies has none: add critic_policy of the model's configuration")
    check_task(task, config)
    changed = make_method(policies, config)
    for change in (method,) if callable(method) else method:
        changed = change(changed)
    return make_method_programs(changed, policies["policy"], task, config, sampler=sampler)


def make_method(policies: Mapping[str, Policy], config: GRPOConfig) -> Method:
    """Returns GRPO, with a critic and a teacher if the configuration has them.

    Args:
      policies: The functions of the models by role, as in `make_programs`.
      config: Names the critic and the teacher, if there are any, and supplies their options and those of GRPO.
    """
    method = grpo_method(policies["policy"], config)
    if config.has_critic:
        from grpo_jax.rl.ppo import ppo_method  # loaded only with a critic

        method = ppo_method(method, policies, config)
    if config.frozen_models:
        from grpo_jax.rl.distillation import distillation_method  # loaded only with a teacher

        method = distillation_method(method, policies, config)
    return method


def make_method_programs(
    method: Method, policy: Policy, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None
) -> Programs:
    """Makes the programs of a method, which are compiled at their first call.

    Args:
      method: The method, such as GRPO or PPO.
      policy: The functions of the model.
      task: Supplies the widths of prompts and the special tokens.
      config: Supplies the sampling options, the devices and the size of pieces; already validated.
      sampler: Samples completions on the devices of the run. Default: the policy samples.
    """
    devices = devices_of(config)
    sampler = sampler or make_sampler(policy, task, config.sampling, devices=sampling_devices(config))
    if config.num_sampler_devices and sampler.devices != devices:
        from grpo_jax.rl.own_devices import on_own_devices  # loaded only for such devices

        sampler = on_own_devices(sampler, devices)

    def score(trained: Params, extras: Mapping[str, Any], frozen: Any, batch: Batch) -> dict[str, Any]:
        return score_rollout(method, config, models_of(trained, frozen, extras), batch, devices=devices)

    score_program: Any = jit_on_devices(score, 0, devices=devices) if method.scorers else None

    def score_batch(trained: Params, extras: Mapping[str, Any], frozen: Any, batch: Batch) -> Batch:
        fields = score_program(trained, extras, frozen, batch) if score_program else {}
        if takes_sampler_logprobs(config):
            fields["old_logprobs"] = batch.sampler_logprobs
        return batch._replace(**fields)

    def initial_state(trained: Params) -> TrainState:
        state = init_state(jax.tree.map(jnp.copy, trained), method.optimizer)
        return state._replace(extras=method.initial_extras(trained))

    return Programs(
        method,
        sampler,
        score_batch,
        jit_on_devices(
            partial(learn, method, config, devices=devices),
            (None, LEARNED_AXES),
            devices=devices,
            donate_argnums=(0,),
        ),
        jit_on_devices(initial_state, devices=devices),
        config,
        score_program,
        [],
        policy,
    )


def check_programs(programs: Programs, config: GRPOConfig) -> None:
    """Raises if programs were compiled for other options than those of this run.

    Raises:
      UsageError: An option differs. The message names it.
    """
    free = HOST_ONLY_OPTIONS if config.optimizer.decay != "none" else HOST_ONLY_OPTIONS | {"steps"}
    compiled_for = options_of(programs.config)
    differing = [name for name, value in options_of(config).items() if name not in free and compiled_for[name] != value]
    if differing:
        raise UsageError(
            f"the programs were made for another {', '.join(differing)}: make them of the configuration of this run"
        )


# ---- compiling in advance


def compile_ahead(programs: Programs, params: Params, task: Task, num_rewards: int) -> None:
    """Starts to compile scoring and learning in a thread, which overlaps with sampling the first completions.

    Further calls do nothing, nor does a call on one core. The first call of `iterate` waits for the thread.

    Args:
      programs: The programs of the run.
      params: Initial parameters by role.
      task: Supplies the prompts, which determine shapes.
      num_rewards: The number of rewards, K.
    """
    if programs.compiling or num_cores() == 1:  # on one core it would only take memory
        return
    config, devices = programs.config, devices_of(programs.config)
    sampled = empty_batch(task, config.sampling)  # here, because threads must not share the prompts

    def compile_for_shapes() -> None:
        trained, frozen = (abstract(part, devices) for part in split(with_fixed_reference(params, config)))
        state = abstract(jax.eval_shape(programs.initial_state, trained), devices)
        batch = abstract(sampled, devices, 0)
        if programs.score_program:
            programs.score_program.lower(trained, state.extras, frozen, batch).compile()
        batch = abstract(jax.eval_shape(programs.score, trained, state.extras, frozen, batch), devices, 0)
        rewards = empty_rewards(batch.completion_ids.shape, config.loss.advantages_of, num_rewards)
        rewards, seed_and_step = abstract(rewards, devices, REWARD_AXES), abstract(np.zeros(2, np.uint32), devices)
        programs.learn.lower(state, frozen, batch, rewards, seed_and_step).compile()

    def compile_quietly() -> None:
        with suppress(Exception):  # calling the program raises the error again, where it is handled
            compile_for_shapes()

    thread = Thread(target=compile_quietly, name=COMPILING, daemon=True)
    programs.compiling.append(thread)
    thread.start()
    atexit.register(_wait_at_exit, thread)


def _wait_at_exit(thread: Thread) -> None:
    """Waits for a compilation, which would crash the interpreter as it ends. Ctrl-C ends the process at once."""
    try:
        thread.join()
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
