"""PPO (1707.06347) with a critic: the loop of `grpo`, with other advantages and one term more in the loss.

A completion is an episode: the state is what was written so far, the action a token, the reward stands on the last one.
The critic is a decoder of its own with a scalar head, so it takes as much memory again as the policy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config import PPOConfig, validate_ppo
from grpo_jax.errors import UsageError
from grpo_jax.functional import (
    critic_loss,
    generalized_advantages,
    keep_rows,
    kl_k1,
    masked_sum,
    rewards_at_end,
    weighted_sum,
    whiten,
)
from grpo_jax.models import heads, lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.heads import Headed
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.tasks.task import Reward, Rewards, Task
from grpo_jax.training.grpo import (
    Programs,
    check_task,
    compile_rollout,
    compile_update,
    corrected,
    grpo_loss_fn,
    kl_coef_of,
    kl_logs,
    schedule_of,
    train,
)
from grpo_jax.training.parallel import num_devices
from grpo_jax.training.rollout import Rollout, by_pieces
from grpo_jax.training.run import RunFolder
from grpo_jax.training.state import Batch, TrainState, make_optimizer
from grpo_jax.training.step import Logs


class ActorCritic(NamedTuple):
    """Parameters of PPO. Either side may have adapters."""

    policy: Params
    critic: Headed


def critic_policy(config: ModelConfig) -> Policy:
    """The functions of a critic's decoder, for a policy of this shape."""
    return decoder_policy(heads.without_vocabulary(config))


def add_critic(config: ModelConfig, params: Params) -> ActorCritic:
    """A critic that starts from the policy's weights, with a head of zeros: its first values are all 0.

    Args:
      config: the policy's shape.
      params: of the policy.

    Returns:
      The parameters of both. The same arrays are in both; training copies what it trains.
    """
    return ActorCritic(params, heads.add_head(config, params)[1])


def train_ppo(
    policy: Policy,
    critic: Policy,
    params: ActorCritic,
    task: Task,
    config: PPOConfig,
    run: RunFolder,
    *,
    phase: str = "ppo",
    reward: Reward | Rewards | None = None,
    programs: Programs | None = None,
    evaluate: Callable[[Params, int], dict[str, float]] | None = None,
) -> TrainState:
    """Trains a policy by PPO, continuing from the newest checkpoint of this phase in the run.

    Args:
      policy: the model's functions.
      critic: those of the critic's decoder.
      params: where training starts, of `add_critic` or with a critic of one's own, such as a reward model. The
        policy's are also the reference, when there is one.
      task, config, run, phase, reward, evaluate: as in `grpo.train`.
      programs: of `make_ppo_programs`; made here if None.

    Returns:
      The final state; `join(state.params, frozen)` with what `split(params)` calls frozen are policy and critic.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    programs = programs or make_ppo_programs(policy, critic, task, config)
    return train(policy, params, task, config, run, phase=phase, reward=reward, programs=programs, evaluate=evaluate)


def make_ppo_programs(policy: Policy, critic: Policy, task: Task, config: PPOConfig) -> Programs:
    """Checks everything that can be checked, and compiles nothing yet.

    Args:
      policy: the model's functions.
      critic: those of the critic's decoder.
      task: its tokens.
      config: the run.

    Returns:
      The functions of PPO, compiled at their first call.

    Raises:
      UsageError: one sentence that says what to change.
    """
    devices = num_devices(config.devices)
    validate_ppo(config, num_devices=devices)
    check_task(task, config)
    if config.bootstrap_truncated and task.open_ended:
        raise UsageError(
            "completions of this task are meant to be cut off, and end there: leave bootstrap_truncated out"
        )
    values_of = by_pieces(
        lambda params, batch: heads.values(critic, params, *batch[:4]),
        num_microbatches=config.microbatches * config.minibatches,
        devices=devices,
    )
    loss_fn = ppo_loss_fn(policy, critic, config)
    estimate = jax.jit(partial(token_advantages, config=config))

    def advantages(state: TrainState, frozen: ActorCritic, rollout: Rollout, batch: Batch):
        # What no reward applies to teaches neither policy nor critic.
        batch = batch._replace(
            completion_mask=np.asarray(keep_rows(batch.completion_mask, jnp.asarray(rollout.applicable)))
        )
        values, mask = np.asarray(values_of(join(state.params, frozen).critic, batch)), batch.completion_mask
        goes_on, logs = rollout.completions.truncated & config.bootstrap_truncated, dict[str, Any]()
        kl_coef = kl_coef_of(state, config)
        by_token, returns = map(np.asarray, estimate(rollout.rewards, values, goes_on, batch, kl_coef))
        if config.kl_in_reward and batch.ref_logprobs is not None:
            logs |= kl_logs(batch, kl_coef)
            batch = batch._replace(ref_logprobs=None)  # the loss needs none
        logs |= {
            "value_mean": _mean(values[..., :-1], mask),
            "returns_mean": _mean(returns, mask),
            "explained_variance": explained_variance(values[..., :-1][mask], returns[mask]),
        }
        batch = batch._replace(advantages=by_token, old_values=values[..., :-1], returns=returns)
        batch, correction = corrected(batch, rollout, config)
        by_row = np.where(mask, by_token, 0).sum(-1) / np.maximum(mask.sum(-1), 1)
        return batch, by_row, logs | correction

    def optimizer_of(schedule: optax.Schedule) -> optax.GradientTransformation:
        return make_optimizer(schedule, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm)

    schedule, critic_schedule = (schedule_of(config, r) for r in (config.learning_rate, config.critic_learning_rate))
    # One step of both, but each gradient is clipped by its own norm.
    labels: Any = ActorCritic._make(ActorCritic._fields)
    optimizer = optax.multi_transform(
        {"policy": optimizer_of(schedule), "critic": optimizer_of(critic_schedule)}, labels
    )
    return Programs(
        *compile_rollout(policy, task, config),
        advantages,
        *compile_update(
            lambda trained, frozen, batch: loss_fn(join(trained, frozen), batch), optimizer, schedule, config
        ),
        split=split,
        actor=lambda trained, frozen: lora.join(trained.policy, frozen.policy),
        of_policy=lambda trained: trained._replace(critic=None),
    )


def token_advantages(
    rewards: jax.Array, values: jax.Array, goes_on: jax.Array, batch: Batch, kl_coef: jax.Array, *, config: PPOConfig
) -> tuple[jax.Array, jax.Array]:
    """GAE of a rollout: rₜ = 1[last] r − β k1ₜ, the second where the KL is in the reward.

    Args:
      rewards: `[N, G]`.
      values: `[N, G, T + 1]`, of `heads.values` when the completions were sampled.
      goes_on: bool `[N, G]`, whether the value after the last token counts: after an EOS it is 0.
      batch: with a mask, and with old and reference log-probabilities if there is a KL in the reward.
      kl_coef: β of the step.
      config: the run.

    Returns:
      Advantages, whitened if the run says so, and returns A + V of those before whitening, both `[N, G, T]`.
    """
    algorithm, mask = config.algorithm, batch.completion_mask
    by_token = rewards_at_end(rewards, mask)
    if algorithm.kl_in_reward and algorithm.kl_coef > 0:
        by_token -= kl_coef * jnp.where(mask, kl_k1(batch.old_logprobs, batch.ref_logprobs), 0)
    length = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)
    after = jnp.take_along_axis(values, length, axis=-1)[..., 0]
    values = jnp.where(mask, values[..., :-1], 0)
    advantages = generalized_advantages(
        by_token,
        values,
        mask,
        gamma=config.gamma,
        lam=config.gae_lambda,
        bootstrap=jnp.where(goes_on, after, 0),
        num_steps=config.gae_steps,
    )
    return whiten(advantages, mask) if config.whiten else advantages, advantages + values


def ppo_loss_fn(policy: Policy, critic: Policy, config: PPOConfig) -> Callable[[ActorCritic, Batch], Any]:
    """(parameters, batch with weights) -> L_clip − w₁ H + w₂ KL + w₃ L_critic, and what to log of it.

    Args:
      policy: the model's functions.
      critic: those of the critic's decoder.
      config: w₁ is entropy_coef, w₂ kl_coef unless the KL is in the reward, w₃ value_coef.

    Returns:
      The loss function; its batch has advantages, old values and returns.
    """
    policy_loss_fn = grpo_loss_fn(policy, config.algorithm)

    def loss_fn(params: ActorCritic, batch: Batch) -> tuple[jax.Array, Logs]:
        loss, logs = policy_loss_fn(params.policy, batch)
        mask = batch.completion_mask
        values = heads.values(critic, params.critic, *batch[:4])[..., :-1]
        error = critic_loss(values, batch.returns)
        if config.value_clip is not None:
            error = critic_loss(values, batch.returns, old_values=batch.old_values, clip=config.value_clip)
            held_back = jnp.abs(values - batch.old_values) > config.value_clip
            held_back &= error > critic_loss(values, batch.returns)
            logs.means["value_clip"] = masked_sum(held_back, mask)
        logs.means["critic_loss"] = masked_sum(error, mask)
        return loss + config.value_coef * weighted_sum(error, batch.weights, mask), logs

    return loss_fn


def split(params: ActorCritic) -> tuple[ActorCritic, ActorCritic]:
    """What is trained, and what is not, of policy and critic."""
    policy, critic = lora.split(params.policy), heads.split(params.critic)
    return ActorCritic(policy[0], critic[0]), ActorCritic(policy[1], critic[1])


def join(trained: ActorCritic, frozen: ActorCritic) -> ActorCritic:
    """The parameters that `split` took apart."""
    return ActorCritic(lora.join(trained.policy, frozen.policy), heads.join(trained.critic, frozen.critic))


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """1 − Var(R − V) / Var(R): 1 foresees all, 0 as much as a constant; below 0 it misleads. None: nothing varies.

    Args:
      values: `[M]`, of tokens when they were sampled.
      returns: `[M]`.
    """
    variance = float(np.var(returns)) if returns.size else 0.0
    return 1 - float(np.var(returns - values)) / variance if variance > 0 else None


def _mean(values: np.ndarray, mask: np.ndarray) -> float:
    return float(np.where(mask, values, 0).sum() / max(mask.sum(), 1))
