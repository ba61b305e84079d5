"""PPO (1707.06347) with a critic: GRPO's loop, with other advantages and one term more in the loss.

A completion is an episode: the state is what was written so far, the action a token, the reward stands on the last one.
The critic is a decoder of its own with a scalar head, which takes as much memory again as the policy, or but a head on
the policy's decoder.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config import PPOConfig, validate_ppo
from grpo_jax.data.types import Reward, Rewards
from grpo_jax.errors import UsageError
from grpo_jax.functional import (
    critic_loss,
    generalized_advantages,
    keep_completions,
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
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.training import loop
from grpo_jax.training.grpo import corrected, grpo_loss_fn, kl_logs, schedule_of
from grpo_jax.training.loop import Method, Programs, check_task, compile_programs
from grpo_jax.training.parallel import num_devices
from grpo_jax.training.rollout import Outcome, hidden_states
from grpo_jax.training.state import Array, Batch, TrainState, make_optimizer
from grpo_jax.training.step import Logs


class ActorCritic(NamedTuple):
    """Parameters of PPO. Either side may have adapters."""

    policy: Params
    critic: Headed  # whose decoder is None where it is the policy's


def critic_policy(config: ModelConfig) -> Policy:
    """The functions of a critic's decoder, for a policy of this shape."""
    return decoder_policy(heads.without_vocabulary(config))


def add_critic(config: ModelConfig, params: Params, critic: Literal["own", "shared"] = "own") -> ActorCritic:
    """A critic that starts from the policy's weights, with a head of zeros: its first values are all 0.

    Args:
      config: the policy's shape.
      params: of the policy.
      critic: "own", or "shared": a head on the policy's decoder.

    Returns:
      The parameters of both. The same arrays are in both; training copies what it trains.
    """
    headed = heads.add_head(config, params)[1]
    return ActorCritic(params, headed._replace(decoder=None) if critic == "shared" else headed)


def is_shared(params: ActorCritic) -> bool:
    """Whether the critic is a head on the policy's decoder."""
    return params.critic.decoder is None


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
      critic: those of the critic's decoder; where it is the policy's they are not read.
      params: where training starts, of `add_critic` or with a critic of one's own, such as a reward model. The
        policy's are also the reference, when there is one.
      task, config, run, phase, reward, evaluate: as in `loop.train`.
      programs: of `make_ppo_programs`; made here if None.

    Returns:
      The final state; `join(state.params, frozen)` with what `split(params)` calls frozen are policy and critic.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    programs = programs or make_ppo_programs(policy, critic, task, config)
    return loop.train(params, task, config, run, programs, phase=phase, reward=reward, evaluate=evaluate)


def make_ppo_programs(policy: Policy, critic: Policy, task: Task, config: PPOConfig) -> Programs:
    """Checks everything that can be checked, and compiles nothing yet.

    Args:
      policy: the model's functions.
      critic: those of the critic's decoder; where it is the policy's they are not read.
      task: its tokens.
      config: the run.

    Returns:
      The functions of PPO, compiled at their first call.

    Raises:
      UsageError: one sentence that says what to change.
    """
    validate_ppo(config, num_devices=num_devices(config.devices))
    check_task(task, config)
    if config.bootstrap_truncated and task.open_ended:
        raise UsageError(
            "completions of this task are meant to be cut off, and end there: leave bootstrap_truncated out"
        )
    return compile_programs(ppo_method(policy, critic, config), policy, task, config)


def ppo_method(policy: Policy, critic: Policy, config: PPOConfig) -> Method:
    """PPO: rewards are held against a critic, which is trained along."""
    loss_fn = ppo_loss_fn(policy, critic, config)

    def values(trained: ActorCritic, frozen: ActorCritic, batch: Batch) -> jax.Array:
        joined = join(trained, frozen)
        if is_shared(joined):
            return heads.values(policy, joined.critic._replace(decoder=joined.policy), *batch[:4])
        return heads.values(critic, joined.critic, *batch[:4])

    def split_as_told(params: ActorCritic) -> tuple[ActorCritic, ActorCritic]:
        if is_shared(params) != (config.critic == "shared"):
            raise UsageError(
                f"the critic is to be {config.critic}, but the parameters have the other kind: make them with "
                f'add_critic(..., "{config.critic}")'
            )
        return split(params)

    def advantages(outcome: Outcome, batch: Batch, kl_coef: Array):
        # What no reward applies to teaches neither policy nor critic.
        mask = keep_completions(batch.completion_mask, outcome.applicable)
        batch, logs = batch._replace(completion_mask=mask), dict[str, jax.Array]()
        goes_on = outcome.truncated & config.bootstrap_truncated
        by_token, returns = token_advantages(outcome.rewards, batch.old_values, goes_on, batch, kl_coef, config=config)
        if config.kl_in_reward and batch.ref_logprobs is not None:
            logs |= kl_logs(batch, kl_coef)
            batch = batch._replace(ref_logprobs=None)  # the loss needs none
        values = batch.old_values[..., :-1]
        logs |= {
            "value_mean": _mean(values, mask),
            "returns_mean": _mean(returns, mask),
            "explained_variance": explained_variance(values, returns, mask),
        }
        batch, correction = corrected(batch._replace(advantages=by_token, returns=returns), outcome, config)
        return batch, _mean(by_token, mask, axis=-1), logs | correction

    def optimizer_of(schedule: optax.Schedule) -> optax.GradientTransformation:
        return make_optimizer(schedule, weight_decay=config.weight_decay, max_grad_norm=config.max_grad_norm)

    schedule, critic_schedule = (schedule_of(config, r) for r in (config.learning_rate, config.critic_learning_rate))
    # One step of both, but each gradient is clipped by its own norm.
    labels: Any = ActorCritic._make(ActorCritic._fields)
    optimizer = optax.multi_transform(
        {"policy": optimizer_of(schedule), "critic": optimizer_of(critic_schedule)}, labels
    )
    return Method(
        advantages,
        lambda trained, frozen, reference, batch: loss_fn(join(trained, frozen), batch, reference),
        optimizer,
        schedule,
        values=values,
        split=split_as_told,
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
    if algorithm.kl_in_reward and algorithm.has_reference:
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
    returns = advantages + values
    if config.whiten:
        # A reward that is NaN stays visible in its own row, and spoils no other.
        finite = jnp.isfinite(advantages)
        whitened = whiten(jnp.where(finite, advantages, 0), mask & finite)
        advantages = jnp.where(finite, whitened, advantages)
    return advantages, returns


def ppo_loss_fn(policy: Policy, critic: Policy, config: PPOConfig) -> Callable[..., tuple[jax.Array, Logs]]:
    """(parameters, batch with weights, the reference's or None) -> L_clip − w₁ H + w₂ KL + w₃ L_critic, and logs.

    Args:
      policy: the model's functions.
      critic: those of the critic's decoder.
      config: w₁ is entropy_coef, w₂ kl_coef unless the KL is in the reward, w₃ value_coef.

    Returns:
      The loss function; its batch has advantages, old values and returns.
    """
    policy_loss_fn = grpo_loss_fn(policy, config.algorithm, config.divergence)

    def loss_fn(params: ActorCritic, batch: Batch, reference: Params | None = None) -> tuple[jax.Array, Logs]:
        hidden, mask = hidden_states(policy, params.policy, batch), batch.completion_mask
        loss, logs = policy_loss_fn(params.policy, batch, reference, hidden=hidden)
        if is_shared(params):
            values = heads.read(hidden, params.critic.head)
        else:
            values = heads.values(critic, params.critic, *batch[:4])[..., :-1]
        returns = jnp.where(mask, batch.returns, 0)  # rubbish there would make the gradient NaN
        error = critic_loss(values, returns)
        if config.value_clip is not None:
            old_values = jnp.where(mask, batch.old_values[..., :-1], 0)
            error = critic_loss(values, returns, old_values=old_values, clip=config.value_clip)
            held_back = jnp.abs(values - old_values) > config.value_clip
            held_back &= error > critic_loss(values, returns)
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


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 − Var(R − V) / Var(R): 1 foresees all, 0 as much as a constant; below 0 it misleads. NaN: nothing varies.

    Args:
      values: `[...]`, of tokens when they were sampled.
      returns: `[...]`.
      mask: bool `[...]`, which count.
    """

    def variance(x: jax.Array) -> jax.Array:
        return _mean((x - _mean(x, mask)) ** 2, mask)

    total = variance(returns)
    return jnp.where(total > 0, 1 - variance(returns - values) / total, jnp.nan)


def _mean(values: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
    return jnp.sum(jnp.where(mask, values, 0), axis=axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)
