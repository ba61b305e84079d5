"""The loop of methods that learn from rollouts, read from top to bottom."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config import GRPOConfig
from grpo_jax.data.types import Reward, Rewards, fingerprint
from grpo_jax.errors import UsageError
from grpo_jax.functional import (
    adaptive_kl_coef,
)
from grpo_jax.models.lora import join, split
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rewards.reward import new_counts, ungraded_counts
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.throughput import peak_flops, update_flops
from grpo_jax.tasks.task import Task
from grpo_jax.training import guards
from grpo_jax.training.dynamic_sampling import sample_with_spread
from grpo_jax.training.parallel import data_parallel, num_devices, replicate
from grpo_jax.training.readable import readable
from grpo_jax.training.rollout import (
    SAMPLING,
    SHUFFLING,
    Outcome,
    Rollout,
    Sampler,
    Scorer,
    by_pieces,
    group_temperatures,
    make_sampler,
    make_scorer,
    outcome_of,
    roll_out,
    rollout_metrics,
    shuffled_minibatches,
    step_key,
    to_batch,
    zero_spread,
)
from grpo_jax.training.state import (
    Array,
    Batch,
    TrainState,
    init_state,
    steps_taken,
)
from grpo_jax.training.step import Logs, train_step

# Metrics of optimizer steps, not of tokens.
_OF_STEPS = frozenset({"loss", "grad_norm", "skipped", "ratio_deviation", "learning_rate"})


def train(
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: "Programs",
    *,
    phase: str,
    reward: Reward | Rewards | None = None,
    evaluate: Callable[[Params, int], dict[str, float]] | None = None,
    until: int | None = None,
) -> TrainState:
    """Trains by the programs of a method, continuing from the newest checkpoint of this phase in the run.

    Args:
      params: where training starts, as `programs.method` splits them; also the reference, when there is one.
      task: prompts and text.
      config: the run.
      run: where lines and checkpoints go.
      programs: of the method; phases that differ in the reward alone may share them.
      phase: names lines and checkpoints.
      reward: in place of the task's.
      evaluate: (params of the policy, step) -> numbers to log, called at step 0, every `config.eval_every` steps, and
        at the end.
      until: the step to stop at for now, from which a later call goes on, perhaps with another reward; None: the last.

    Returns:
      The final state.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    method = programs.method
    sampling, reward = config.sampling, reward or task.reward
    for note in task.notes:
        run.warn_once(note, note)
    run.keep_prompts(phase, heldout=fingerprint(task.heldout), first_step=fingerprint(task.prompts(0)))
    devices, end = num_devices(config.devices), config.steps if until is None else until
    start, frozen = method.split(replicate(params, devices))
    first = method.actor(start, frozen)
    held_to = first if config.divergence != "preset" else None  # what the loss runs; mostly it has log-probabilities
    temperature = np.asarray(
        group_temperatures(config.num_prompts, sampling.group_size, sampling.temperature, sampling.temperature_spread)
    )
    with run.checkpoints(phase, keep=config.keep_checkpoints) as checkpoints:
        state, done = checkpoints.restore(lambda: begin(programs.init_state, method, start, config))
        state = replicate(state, devices)
        run.rewind(phase, done)
        if evaluate and config.eval_every and done == 0:
            run.log(phase, 0, evaluate(first, 0))
        with run.progress(phase, config.steps, done) as show:
            for step in range(done, end):
                # ---- rollout: a group of completions for each prompt, and their rewards
                with run.timed("rollout"):
                    current = method.actor(state.params, frozen)
                    reference = first if state.reference is None else method.actor(state.reference, frozen)
                    rollout, sampled = sample_step(programs, current, task, reward, temperature, step, config, run)

                # ---- score: log-probabilities under the policy that sampled and under the reference, a critic's values
                with run.timed("score"):
                    batch, sampler_logprobs = to_batch(rollout, temperature), rollout.completions.sampler_logprobs
                    batch = scored(programs.scorer, current, reference, batch, sampler_logprobs, config)
                    if programs.values:
                        batch = batch._replace(old_values=programs.values(state.params, frozen, batch))
                    batch = jax.block_until_ready(batch)  # so that its time is counted here

                # ---- advantages: rewards against those of the same group, or against a critic
                with run.timed("advantages"):
                    found = programs.advantages(outcome_of(rollout), batch, kl_coef_of(state, config))
                    batch, advantages, judged = jax.device_get(found)
                    judged = {name: float(value) for name, value in judged.items()}

                # ---- update: every prompt once an epoch, in shuffled minibatches
                with run.timed("update"):
                    state, metrics = update(programs, state, frozen, held_to, batch, step, config, run, phase)
                    state = after_step(method, state, step, judged, config)

                # ---- log
                evaluated: dict[str, float] = {}
                is_last = step + 1 == end
                if evaluate and config.eval_every and ((step + 1) % config.eval_every == 0 or is_last):
                    with run.timed("evaluate"):
                        evaluated = evaluate(method.actor(state.params, frozen), step + 1)
                run.log(phase, step + 1, sampled | judged | metrics | evaluated)
                if config.rollouts_every and (step % config.rollouts_every == 0 or is_last):
                    run.log_rollout(phase, step + 1, readable(rollout, advantages, task))
                trained = config.epochs * int(batch.prompt_mask.sum() + batch.completion_mask.sum())
                run.log_times(
                    phase,
                    step + 1,
                    tokens={"rollout": sampled["tokens"], "update": trained},
                    update_flops=update_flops(state.params, frozen, trained),
                    peak_flops=peak_flops(devices),
                )
                show(step + 1, "no reward" if sampled["reward"] is None else f"reward {sampled['reward']:.3f}")
                if is_last or (config.checkpoint_every and (step + 1) % config.checkpoint_every == 0):
                    checkpoints.save(state, step + 1)
    return state


class Method(NamedTuple):
    """What tells one method that learns from rollouts from another, as pure functions that any loop may compile."""

    # (outcome, scored batch, β) -> batch with advantages, advantages [N, G] to show, logs
    advantages: Callable[[Outcome, Batch, Array], tuple[Batch, jax.Array, dict[str, jax.Array]]]
    # (trained parameters, frozen ones, those of a policy that the loss compares with or None, batch with weights)
    # -> loss, logs
    loss_fn: Callable[[Params, Any, Params | None, Batch], tuple[jax.Array, Logs]]
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule  # of the policy, to log
    # (trained parameters, frozen ones, batch) -> values [N, G, T + 1] of a critic, if there is one
    values: Callable[[Params, Any, Batch], jax.Array] | None = None
    # parameters -> those that are trained, and those that are not
    split: Callable[[Params], tuple[Params, Any]] = split
    # (trained parameters, frozen ones) -> those of the policy, which samples
    actor: Callable[[Params, Any], Params] = join
    # trained parameters -> what `actor` reads of them, which is all that a reference is
    of_policy: Callable[[Params], Params] = lambda trained: trained


class Programs(NamedTuple):
    """The functions of a method and a run, compiled. Phases that differ in the reward alone share them."""

    method: Method
    sampler: Sampler
    scorer: Scorer
    values: Callable[[Params, Any, Batch], jax.Array] | None
    advantages: Callable[[Outcome, Batch, Array], tuple[Batch, jax.Array, dict[str, jax.Array]]]
    # (state, batch, frozen parameters or None, those that `Method.loss_fn` compares with unless the state has a
    # reference, or None) -> state, metrics
    train_step: Callable[[TrainState, Batch, Any, Params | None], tuple[TrainState, dict[str, jax.Array]]]
    # trained parameters -> state; a copy: the step donates its state, and the start stays
    init_state: Callable[[Params], TrainState]


def compile_programs(method: Method, policy: Policy, task: Task, config: GRPOConfig) -> Programs:
    """The functions of a method, compiled at their first call.

    Args:
      method: of the run.
      policy: the model's functions.
      task: its tokens.
      config: the run, checked.
    """
    devices, pieces = num_devices(config.devices), config.microbatches * config.minibatches

    def step(state: TrainState, batch: Batch, frozen: Any, reference: Params | None, *, axis_name):
        return optimizer_step(method, state, batch, frozen, reference, config, axis_name=axis_name)

    return Programs(
        method,
        make_sampler(policy, task, config, devices=devices),
        make_scorer(policy, num_microbatches=pieces, devices=devices),
        _by_pieces_of_both(method.values, pieces, devices) if method.values else None,
        jax.jit(method.advantages),
        data_parallel(step, (None, 0, None, None), (None, None), devices=devices, donate_argnums=(0,)),
        jax.jit(lambda params: init_state(jax.tree.map(jnp.copy, params), method.optimizer)),
    )


def _by_pieces_of_both(
    values: Callable[[Params, Any, Batch], jax.Array], pieces: int, devices: int
) -> Callable[[Params, Any, Batch], jax.Array]:
    """`by_pieces` of a function that takes trained and frozen parameters."""

    def of_both(both: Any, batch: Batch) -> jax.Array:
        trained, frozen = both
        return values(trained, frozen, batch)

    compiled = by_pieces(of_both, num_microbatches=pieces, devices=devices)
    return lambda trained, frozen, batch: compiled((trained, frozen), batch)


def optimizer_step(
    method: Method,
    state: TrainState,
    batch: Batch,
    frozen: Any,
    reference: Params | None,
    config: GRPOConfig,
    *,
    axis_name: Any = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`step.train_step` of a method, with its learning rate in the logs."""
    rate = method.learning_rate(steps_taken(state))
    # One that moves is in the state, whose memory may be given away: it could not be an argument as well.
    held_to = reference if state.reference is None else method.actor(state.reference, frozen)
    state, metrics = train_step(
        state,
        batch,
        loss_fn=lambda trained, batch: method.loss_fn(trained, frozen, held_to, batch),
        aggregation=config.algorithm.aggregation,
        optimizer=method.optimizer,
        num_microbatches=config.microbatches,
        axis_name=axis_name,
    )
    return state, metrics | {"learning_rate": jnp.asarray(rate)}


def begin(init_state: Callable[[Params], TrainState], method: Method, start: Params, config: GRPOConfig) -> TrainState:
    """The state before the first step of a run, with what moves besides the parameters.

    Args:
      init_state: trained parameters -> state.
      method: of the run.
      start: trained parameters.
      config: the run.
    """
    state = init_state(start)
    if config.ref_sync_steps:
        # A copy, for the step donates its state.
        policy = method.of_policy(start)
        state = state._replace(reference=_mixed(policy, policy, 1.0))
    if config.kl_target is not None:
        state = state._replace(kl_coef=jnp.float32(config.algorithm.kl_coef))
    return state


def after_step(
    method: Method, state: TrainState, step: Array, logs: Mapping[str, Array], config: GRPOConfig
) -> TrainState:
    """The state after a step, with a reference that has moved and a kl_coef that was steered, if they do.

    Args:
      method: of the run.
      state: after the updates of the step.
      step: its number, from 0.
      logs: of the step's advantages, with "kl_completion" where kl_coef is steered.
      config: the run.
    """
    if config.ref_sync_steps:
        due = (step + 1) % config.ref_sync_steps == 0
        if due is not False:  # a traced step may be
            alpha = jnp.where(due, config.ref_mixup_alpha, 0.0)
            state = state._replace(reference=_mixed(method.of_policy(state.params), state.reference, alpha))
    if config.kl_target is not None:
        completions = config.num_prompts * config.sampling.group_size
        kl_coef = adaptive_kl_coef(
            state.kl_coef,
            logs["kl_completion"],
            target=config.kl_target,
            num_samples=completions,
            horizon=config.kl_horizon,
        )
        state = state._replace(kl_coef=kl_coef)
    return state


@jax.jit
def _mixed(params: Params, reference: Params, alpha: float) -> Params:
    """α θ + (1 − α) θ_ref."""
    return jax.tree.map(lambda new, old: (alpha * new + (1 - alpha) * old).astype(old.dtype), params, reference)


def kl_coef_of(state: TrainState, config: GRPOConfig) -> Array:
    """β of a step, for advantages."""
    return jnp.float32(config.algorithm.kl_coef) if state.kl_coef is None else state.kl_coef


def check_task(task: Task, config: GRPOConfig) -> None:
    """Refuses a task that cannot be trained on so.

    Raises:
      UsageError: one sentence that says what to change.
    """
    guards.check_task(task)
    if config.mask_truncated and task.open_ended:
        raise UsageError(
            "completions of this task are meant to be cut off: mask_truncated would leave nothing to learn"
        )
    rewards = task.reward if isinstance(task.reward, Mapping) else {}
    counting = [name for name, component in rewards.items() if component.weight]
    if config.advantages_of == "components" and len(counting) < 2:
        raise UsageError(
            'advantages_of "components" compares several rewards, but fewer than two of this task have a weight: give '
            'more of them, or take "sum"'
        )
    if config.filter_metric and config.filter_metric not in counting:
        raise UsageError(
            f'filter_metric "{config.filter_metric}" is no reward with a weight; such are: '
            f"{', '.join(counting) or 'none, for the reward has no parts'}"
        )


def sample_step(
    programs: Programs,
    params: Params,
    task: Task,
    reward: Reward | Rewards,
    temperature: np.ndarray,
    step: int,
    config: GRPOConfig,
    run: RunFolder,
) -> tuple[Rollout, dict[str, Any]]:
    """The groups that a step learns from, and metrics of all that it sampled for them."""

    def draw(number: int) -> Rollout:
        # The first of each step are those of a run without further ones, so that every epoch has all its prompts. The
        # others are further on in the same order.
        index = step if number == 0 else config.steps + step * (config.max_rollouts - 1) + number - 1
        key = step_key(config.seed, SAMPLING, index)
        return roll_out(programs.sampler, params, task.prompts(index), task, reward, temperature, key)

    # In place of the task's rewards there may be one that is a single number.
    metric = config.filter_metric if isinstance(reward, Mapping) else ""
    ungraded = ungraded_counts(reward)
    rollout, everything, rollouts = sample_with_spread(draw, max_rollouts=config.max_rollouts, metric=metric)
    metrics = rollout_metrics(everything) | new_counts(ungraded, ungraded_counts(reward))
    guards.check_rollout(run, everything, task, step + 1)
    guards.check_graders(run, reward)
    if config.max_rollouts > 1:
        share = float(zero_spread(rollout).mean())
        guards.check_filled(run, rollouts, share)
        metrics |= {"rollouts": rollouts, "update_zero_spread_share": share}
    return rollout, metrics


def scored(
    scorer: Scorer, params: Params, reference: Params, batch: Batch, sampler_logprobs: Array, config: GRPOConfig
) -> Batch:
    """A batch with its old log-probabilities, and those of the reference if the algorithm has one."""
    old_logprobs: Array = sampler_logprobs
    if config.old_logprobs == "recompute":
        old_logprobs = scorer(params, batch).logprobs
    ref_logprobs: Array = None
    if config.algorithm.has_reference and config.divergence == "preset":
        ref_logprobs = scorer(reference, batch).logprobs
    return batch._replace(old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, sampler_logprobs=sampler_logprobs)


def update(
    programs: Programs,
    state: TrainState,
    frozen: Any,
    reference: Params | None,
    batch: Batch,
    step: int,
    config: GRPOConfig,
    run: RunFolder,
    phase: str,
) -> tuple[TrainState, dict[str, float]]:
    """All optimizer steps on one rollout, and the means of their metrics.

    The state is donated. `first_ratio_deviation` is that of the first optimizer step, when the
    policy is still the one that sampled; `ratio_deviation` is the largest.
    """
    history, tokens = [], []
    for epoch in range(config.epochs):
        key = step_key(config.seed, SHUFFLING, step * config.epochs + epoch)
        for minibatch in shuffled_minibatches(batch, key, config.minibatches):
            state, metrics = programs.train_step(state, minibatch, frozen, reference)
            history.append(jax.tree.map(float, jax.device_get(metrics)))
            tokens.append(int(minibatch.completion_mask.sum()))
            name = f"{phase}_{step:06d}_{len(history)}"
            guards.check_gradients(run, name, history[-1], minibatch, config.max_skipped)
    guards.check_first_ratio(run, history[0])
    means = over_updates(
        {name: np.array([metrics[name] for metrics in history]) for name in history[0]}, np.array(tokens)
    )
    return state, {name: float(value) for name, value in means.items()} | {
        "first_ratio_deviation": history[0]["ratio_deviation"],
    }


def over_updates(metrics: Mapping[str, Array], tokens: Array) -> dict[str, Array]:
    """Means over the optimizer steps on one rollout, and the largest ratio_deviation.

    Those of tokens count by the tokens that they are of: a mean of minibatch means would weigh short minibatches up.

    Args:
      metrics: name -> `[U]`, of U optimizer steps.
      tokens: `[U]`, that each learned from.
    """
    weights = tokens / (tokens.sum() + (tokens.sum() == 0))
    means = {name: values.mean() if name in _OF_STEPS else (values * weights).sum() for name, values in metrics.items()}
    return means | {"ratio_deviation": metrics["ratio_deviation"].max()}
