"""What an iteration computes after sampling, as pure functions: `score`, then `learn`.

`score` needs no rewards, so a device can run it while graders work. `learn` turns rewards into advantages and takes all
optimizer steps on the rollout. The host loop (`loop`), the whole run as one program (`scan`) and every method call
these two. A `Method` holds what differs between methods.

Letters as in `state`; U optimizer steps on a rollout, epochs × minibatches.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import GRPOConfig
from grpo_jax.functional import adaptive_kl_coef
from grpo_jax.functional.numerics import maybe_psum
from grpo_jax.functional.products import traits_of_backend
from grpo_jax.models.lora import join, split
from grpo_jax.models.sharding import BATCH, batch_parts, spread
from grpo_jax.models.transformer import Params
from grpo_jax.planning.pieces import choose_piece
from grpo_jax.training.microbatches import (
    Microbatches,
    by_prompts,
    computed_in_pieces,
    lengths_of,
    packed,
)
from grpo_jax.training.state import Array, Batch, RewardArrays, TeacherOutputs, TrainState, init_state, steps_taken
from grpo_jax.training.step import Logs, train_step

AxisName = Hashable | None

# Streams of keys: the second number of `step_key`.
SAMPLING, SHUFFLING, EVALUATION, LABELLING, REWARD = range(5)

# Metrics of optimizer steps, not of tokens.
_OF_STEPS = frozenset({"loss", "grad_norm", "skipped", "ratio_deviation", "learning_rate"})


class Scores(NamedTuple):
    """Scores of completion tokens, by one forward pass."""

    logprobs: jax.Array  # [N, G, T], after the sampler's temperature
    entropy: jax.Array  # [N, G, T], in nats
    values: jax.Array | None = None  # [N, G, T + 1], of a critic


class Advantages(NamedTuple):
    """What `Method.advantages` makes of rewards."""

    batch: Batch  # with advantages
    shown: jax.Array  # [N, G] of completions; [N, G, K] of turns; [N, G, T] of the spans of tokens
    logs: dict[str, jax.Array]  # scalars, the same on all devices


class Method(NamedTuple):
    """A method that learns from rollouts, such as GRPO or PPO: what it has of its own."""

    # (trained parameters, frozen ones, batch) -> scores of completions, by the policy and its critic
    score: Callable[[Params, Any, Batch], Scores]
    # (rewards, scored batch, β, axis_name) -> advantages
    advantages: Callable[[RewardArrays, Batch, Array, AxisName], Advantages]
    # (trained parameters, frozen ones, batch with weights, parameters of the reference or None) -> loss, logs
    loss_fn: Callable[[Params, Any, Batch, Params | None], tuple[jax.Array, Logs]]
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule  # of the policy, to log
    has_critic: bool = False
    packs: bool = False  # whether `score` and `loss_fn` take batches whose completions are packed
    # parameters -> those that are trained, and those that are not
    split: Callable[[Params], tuple[Params, Any]] = split
    # (trained parameters, frozen ones) -> all parameters of the policy, to sample with
    actor: Callable[[Params, Any], Params] = join
    # trained parameters -> those that `actor` reads, without a critic; a reference has no others
    of_policy: Callable[[Params], Params] = lambda trained: trained
    # (trained parameters, frozen ones, batch) -> what a teacher says of completions; None: there is no teacher
    teacher_outputs: Callable[[Params, Any, Batch], TeacherOutputs] | None = None
    # frozen parameters -> those that an update computes with, without a teacher
    updated: Callable[[Any], Any] = lambda frozen: frozen


class Learned(NamedTuple):
    """What `learn` returns to log."""

    metrics: dict[str, jax.Array]  # scalars
    advantages: jax.Array  # [N, G]; [N, G, K] of turns; [N, G, T] of the spans of tokens
    order: jax.Array  # int32 [U, n], the prompts of each optimizer step


LEARNED_AXES: Any = Learned(None, 0, None)  # type: ignore[arg-type]  # 0: each device has a part; None: the same on all


class Scored(NamedTuple):
    """Fields of a `Batch` from the scoring pass; None where the update does not need one."""

    old_logprobs: Array = None
    ref_logprobs: Array = None
    old_entropy: Array = None
    old_values: Array = None
    teacher: Any = None  # a `TeacherOutputs`


# ---- score


def needed(method: Method, config: GRPOConfig) -> Scored:
    """Which scores an update needs from the scoring pass, as bools."""
    return Scored(
        old_logprobs=needs_old_logprobs(config),
        ref_logprobs=config.loss.objective.has_reference and config.loss.divergence == "preset",
        old_entropy=config.loss.top_entropy < 1,
        old_values=method.has_critic,
        teacher=method.teacher_outputs is not None,
    )


def needs_old_logprobs(config: GRPOConfig) -> bool:
    """Whether old log-probabilities, those of the policy before the first step on a rollout, need a pass of their own.

    With one optimizer step on a rollout, that policy is the one that is differentiated. Its own numbers without
    gradient then serve. It is the one that sampled, but where `staleness` lets an earlier one do so. Several steps need
    the numbers from before the first, and a KL in the reward needs them too. A method whose ratio is defined against
    the sampler takes the sampler's numbers for both, and so does a run that asks for them (`needs_replay`).
    """
    objective = config.loss.objective
    has_penalty = objective.has_reference and objective.kl_in_reward
    several_steps = config.optimizer.epochs * config.optimizer.minibatches > 1
    return (several_steps or has_penalty) and not objective.ratio_to_sampler and not _of_sampler(config)


def needs_replay(config: GRPOConfig) -> bool:
    """Whether old log-probabilities are those of the sampler's program, and it has to run again for them.

    Without staleness the policy before the update is the one that sampled, and the sampler has said them already.
    """
    return _of_sampler(config) and config.sampling.staleness > 0


def _of_sampler(config: GRPOConfig) -> bool:
    return config.loss.old_logprobs == "sampler"


def score(
    method: Method,
    reference_logprobs: Callable[[Params, Batch], jax.Array],
    config: GRPOConfig,
    trained: Params,
    frozen: Any,
    reference: Params | None,
    batch: Batch,
) -> Scored:
    """The scoring pass over a rollout. It computes what the update needs, and no more.

    Args:
      method: of the run.
      reference_logprobs: (parameters, batch) -> log-probabilities `[N, G, T]` of the policy's model.
      config: the run.
      trained: the trained parameters, before the update on the batch.
      frozen: the other parameters.
      reference: parameters of the reference's policy, or None.
      batch: as sampled.
    """
    wanted = needed(method, config)

    def of_piece(batch: Batch) -> Scored:
        own = None
        if wanted.old_logprobs or wanted.old_entropy or wanted.old_values:
            own = method.score(trained, frozen, batch)
        return Scored(
            old_logprobs=own.logprobs if own and wanted.old_logprobs else None,
            ref_logprobs=reference_logprobs(reference, batch) if wanted.ref_logprobs else None,
            old_entropy=own.entropy if own and wanted.old_entropy else None,
            old_values=own.values if own and wanted.old_values else None,
            teacher=method.teacher_outputs(trained, frozen, batch) if method.teacher_outputs else None,
        )

    return computed_in_pieces(of_piece, batch, choose_pieces(method, config, batch))


def with_scores(batch: Batch, scored: Scored, config: GRPOConfig) -> Batch:
    """The sampled batch with its scores, as `learn` takes it."""
    if config.loss.objective.ratio_to_sampler or (_of_sampler(config) and not needs_replay(config)):
        scored = scored._replace(old_logprobs=batch.sampler_logprobs)
    return batch._replace(**scored._asdict())


def choose_pieces(method: Method, config: GRPOConfig, batch: Batch) -> Microbatches | None:
    """The pieces that a batch is computed in, from what one device has of it."""
    num_prompts, group_size, tokens = batch.completion_ids.shape
    own, optimizer = num_prompts // batch_parts(), config.optimizer
    piece = choose_piece(
        own,
        batch.prompt_ids.shape[-1],
        group_size,
        tokens,
        microbatches=optimizer.microbatches,
        piece_tokens=optimizer.piece_tokens or traits_of_backend().piece_tokens,
        packs=method.packs,
    )
    if piece.is_packed:
        return packed(lengths_of(batch.completion_mask), piece.width, piece.rows)
    return by_prompts(num_prompts, own // piece.rows)


# ---- learn


def begin(method: Method, trained: Params, config: GRPOConfig) -> TrainState:
    """The state before the first iteration of a run, with the reference and kl_coef if they move.

    Args:
      method: of the run.
      trained: parameters.
      config: the run.
    """
    state = init_state(trained, method.optimizer)
    if config.reference.ref_sync_steps:
        # A copy, for `learn` donates its state.
        state = state._replace(reference=jax.tree.map(jnp.copy, method.of_policy(trained)))
    if config.reference.kl_target is not None:
        state = state._replace(kl_coef=jnp.float32(config.loss.kl_coef))
    copies = (jax.tree.map(jnp.copy, method.of_policy(trained)) for _ in range(config.sampling.staleness))
    return state._replace(earlier=tuple(copies))


def sampling_policy(method: Method, state: TrainState, frozen: Any, *, ahead: int = 0) -> Params:
    """All parameters of the policy that samples an iteration.

    Args:
      method: of the run.
      state: before the iteration, or `ahead` iterations earlier.
      frozen: parameters that are not trained.
      ahead: at most the staleness of the run: without, the policy of a later iteration is not known yet.
    """
    return method.actor((*state.earlier, state.params)[ahead], frozen)


def learn(
    method: Method,
    config: GRPOConfig,
    state: TrainState,
    frozen: Any,
    reference: Params | None,
    batch: Batch,
    rewards: RewardArrays,
    clock: tuple[Array, Array],
    *,
    axis_name: AxisName = None,
) -> tuple[TrainState, Learned]:
    """One iteration's learning: advantages, all optimizer steps on the rollout, and what moves besides.

    Args:
      method: of the run.
      config: the run.
      state: donated by callers that compile this.
      frozen: parameters that are not trained.
      reference: parameters of the reference, if the loss runs it and it does not move; else None.
      batch: as sampled and scored, N prompts of this device.
      rewards: of its completions.
      clock: the seed of the run, and the number of the iteration, from 0.
      axis_name: the mapped axis over which prompts are spread, or None.

    Returns:
      The next state, and what to log.
    """
    kl_coef = jnp.float32(config.loss.kl_coef) if state.kl_coef is None else state.kl_coef
    earlier = (*state.earlier, method.of_policy(state.params))[1:] if state.earlier else ()
    advantages = method.advantages(rewards, batch, kl_coef, axis_name)
    state, metrics, order = _update(
        method, config, state._replace(earlier=()), frozen, reference, advantages.batch, clock, axis_name=axis_name
    )
    state = sync_reference(method, state, clock[1], config)
    state = update_kl_coef(state, advantages.logs, config)._replace(earlier=earlier)
    return state, Learned(advantages.logs | metrics, advantages.shown, order)


def _update(method, config, state, frozen, reference, batch, clock, *, axis_name):
    """Epochs of shuffled minibatches: state, metrics over them, and the prompts of each optimizer step `[U, n]`."""
    epochs, minibatches = config.optimizer.epochs, config.optimizer.minibatches
    completions = batch.completion_ids.shape[0] * batch.completion_ids.shape[1] // minibatches
    completions *= 1 if axis_name is None else jax.lax.axis_size(axis_name)
    aggregation = partial(config.loss.objective.aggregation, num_completions=completions)

    def optimizer_step(state: TrainState, minibatch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        rate = method.learning_rate(steps_taken(state))
        # A reference that moves is in the state, whose memory is given away: it cannot be an argument as well.
        moving = None if state.reference is None else method.actor(state.reference, frozen)
        state, metrics = train_step(
            state,
            minibatch,
            loss_fn=lambda trained, piece: method.loss_fn(
                trained, frozen, piece, reference if moving is None else moving
            ),
            aggregation=aggregation,
            optimizer=method.optimizer,
            microbatches=choose_pieces(method, config, minibatch),
            axis_name=axis_name,
        )
        if "expert_share" in metrics:
            from grpo_jax.models.experts import busiest

            metrics["busiest_expert"] = busiest(metrics.pop("expert_share"))
        tokens = maybe_psum(jnp.sum(minibatch.completion_mask), axis_name)
        return state, metrics | {"learning_rate": jnp.asarray(rate), "_tokens": tokens}

    if minibatches == 1:
        everything = gather(jnp.arange(batch.prompt_ids.shape[0], dtype=jnp.int32), axis_name, numbered=True)
        order = jnp.tile(everything, (epochs, 1))
        if epochs == 1:
            state, history = optimizer_step(state, batch)
            history = jax.tree.map(lambda x: x[None], history)
        else:
            state, history = jax.lax.scan(lambda state, _: optimizer_step(state, batch), state, None, length=epochs)
    else:
        # Minibatches are those of one device, so a device needs prompts that others sampled.
        whole = jax.tree.map(partial(gather, axis_name=axis_name), batch)
        seed, step = clock
        order = minibatch_order(seed, step, whole.prompt_ids.shape[0], epochs=epochs, minibatches=minibatches)
        state, history = jax.lax.scan(
            lambda state, prompts: optimizer_step(state, spread(jax.tree.map(lambda x: x[prompts], whole), BATCH)),
            state,
            own_part(order, axis_name),
        )
    tokens = history.pop("_tokens")
    return state, over_updates(history, tokens), order


def minibatch_order(seed: Array, step: Array, num_prompts: int, *, epochs: int, minibatches: int) -> jax.Array:
    """The prompts of each optimizer step, int32 `[epochs · minibatches, N / minibatches]`: every epoch has its own
    permutation of all N, a function of (seed, step)."""

    def of_epoch(epoch: jax.Array) -> jax.Array:
        key = step_key(seed, SHUFFLING, jnp.asarray(step, jnp.uint32) * epochs + epoch)
        return jax.random.permutation(key, num_prompts)

    orders = jax.vmap(of_epoch)(jnp.arange(epochs, dtype=jnp.uint32))
    return orders.reshape(epochs * minibatches, -1).astype(jnp.int32)


def gather(x: jax.Array, axis_name: AxisName, *, numbered: bool = False) -> jax.Array:
    """The parts `[n, ...]` of all devices as one `[N, ...]`, on each device.

    With `numbered`, x are a device's own numbers of its prompts; the result counts over all devices.
    """
    if axis_name is None:
        return x
    if numbered:
        x = x + jax.lax.axis_index(axis_name).astype(x.dtype) * x.shape[0]
    return jax.lax.all_gather(x, axis_name, tiled=True)


def own_part(order: jax.Array, axis_name: AxisName) -> jax.Array:
    """The prompts of each minibatch `[U, n]` that this device computes."""
    if axis_name is None:
        return order
    parts = order.reshape(order.shape[0], jax.lax.axis_size(axis_name), -1)
    return jax.lax.dynamic_index_in_dim(parts, jax.lax.axis_index(axis_name), axis=1, keepdims=False)


def over_updates(metrics: Mapping[str, jax.Array], tokens: jax.Array) -> dict[str, jax.Array]:
    """Metrics of the optimizer steps on one rollout, as those of the iteration.

    They are means over the steps. Metrics of tokens are weighted by the tokens of each step: a plain mean would give
    short minibatches too much weight. `ratio_deviation` is the largest. `first_ratio_deviation` and
    `first_sampler_mismatch` are of the first step, when the policy is still the one that sampled. `skipped` is the
    largest number of steps skipped in a row. `skipped_update` is the first skipped step, counted from 0, or −1.

    Args:
      metrics: name -> `[U]`.
      tokens: `[U]`, that each learned from.
    """
    weights = tokens / (tokens.sum() + (tokens.sum() == 0))
    means = {name: values.mean() if name in _OF_STEPS else (values * weights).sum() for name, values in metrics.items()}
    skipped = metrics["skipped"] > 0
    return means | {
        "ratio_deviation": metrics["ratio_deviation"].max(),
        "first_ratio_deviation": metrics["ratio_deviation"][0],
        "first_sampler_mismatch": metrics["sampler_mismatch"][0],
        "skipped": metrics["skipped"].max(),
        "skipped_update": jnp.where(skipped.any(), jnp.argmax(skipped), -1),
    }


# ---- what moves besides


def sync_reference(method: Method, state: TrainState, step: Array, config: GRPOConfig) -> TrainState:
    """θ_ref ← α θ + (1 − α) θ_ref every `ref_sync_steps` iterations. TR-DPO (2404.09656).

    Args:
      method: of the run.
      state: after the updates of the iteration.
      step: its number, from 0.
      config: the run.
    """
    if not config.reference.ref_sync_steps:
        return state
    due = (step + 1) % config.reference.ref_sync_steps == 0
    alpha = jnp.where(due, config.reference.ref_mixup_alpha, 0.0)
    reference = jax.tree.map(
        lambda new, old: (alpha * new + (1 - alpha) * old).astype(old.dtype),
        method.of_policy(state.params),
        state.reference,
    )
    return state._replace(reference=reference)


def update_kl_coef(state: TrainState, logs: Mapping[str, Array], config: GRPOConfig) -> TrainState:
    """β moved towards `kl_target`. 1909.08593.

    Args:
      state: after the updates of the iteration.
      logs: of its advantages, with "kl_completion".
      config: the run.
    """
    if config.reference.kl_target is None:
        return state
    kl_coef = adaptive_kl_coef(
        state.kl_coef,
        logs["kl_completion"],
        target=config.reference.kl_target,
        num_samples=config.sampling.num_prompts * config.sampling.group_size,
        horizon=config.reference.kl_horizon,
    )
    return state._replace(kl_coef=kl_coef)


# ---- keys


def step_key(seed: Array, stream: Array, index: Array) -> jax.Array:
    """The key of a step: a pure function of (seed, stream, index), each below 2³²."""
    seed, stream, index = (jnp.asarray(number, jnp.uint32) for number in (seed, stream, index))
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), index)
