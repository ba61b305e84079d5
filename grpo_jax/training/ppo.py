"""PPO (1707.06347) with a critic: GRPO's loop, with other advantages and one term more in the loss.

A completion is an episode: the state is what was written so far, the action a token, the reward stands on the last one.
The critic is a decoder of its own with a scalar head, which takes as much memory again as the policy, or only a head on
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
from grpo_jax.functional.numerics import maybe_psum
from grpo_jax.models import heads, lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.heads import Headed
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.training import loop
from grpo_jax.training.grpo import grpo_loss_fn, kl_logs, masked, optimizer_of, packs, schedule_of
from grpo_jax.training.learn import Advantages, AxisName, Method, Scores
from grpo_jax.training.loop import Programs, check_task, compile_programs
from grpo_jax.training.parallel import devices_of, parts
from grpo_jax.training.rollout import Sampler
from grpo_jax.training.scoring import hidden_and_routing, hidden_states, of_completions, score_completion_tokens
from grpo_jax.training.state import Array, Batch, RewardArrays, TrainState
from grpo_jax.training.step import Logs


class ActorCritic(NamedTuple):
    """Parameters of PPO. Either side may have adapters."""

    policy: Params
    critic: Headed  # its decoder is None if the critic shares the policy's


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
      critic: those of the critic's decoder; a shared critic does not use them.
      params: where training starts, of `add_critic` or with a critic of one's own, such as a reward model. The
        policy's are also the reference, when there is one.
      task, run, phase, reward, evaluate: as in `loop.train`.
      config: the run.
      programs: of `make_ppo_programs`; made here if None.

    Returns:
      The final state. The parameters of policy and critic are `join(state.params, split(params)[1])`.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    programs = programs or make_ppo_programs(policy, critic, task, config)
    return loop.train(params, task, config.run, run, programs, phase=phase, reward=reward, evaluate=evaluate)


def make_ppo_programs(
    policy: Policy, critic: Policy, task: Task, config: PPOConfig, *, sampler: Sampler | None = None
) -> Programs:
    """Checks everything that can be checked, and compiles nothing yet.

    Args:
      policy: the model's functions.
      critic: those of the critic's decoder; a shared critic does not use them.
      task: its tokens.
      config: the run.
      sampler: another engine; None: the policy's own.

    Returns:
      The functions of PPO, compiled at their first call.

    Raises:
      UsageError: one sentence that says what to change.
    """
    if task.environment is not None:
        raise UsageError("a critic of PPO reads no episodes of several turns: train with GRPO, or without environment")
    validate_ppo(config, num_devices=parts(devices_of(config.run)))
    check_task(task, config.run)
    if config.critic.bootstrap_truncated and task.open_ended:
        raise UsageError(
            "completions of this task are meant to be cut off, and end there: leave bootstrap_truncated out"
        )
    return compile_programs(ppo_method(policy, critic, config), policy, task, config.run, sampler=sampler)


def ppo_method(policy: Policy, critic: Policy, config: PPOConfig) -> Method:
    """PPO: rewards are compared with the values of a critic, which is trained as well."""
    loss_fn, loss = ppo_loss_fn(policy, critic, config), config.run.loss

    def split_as_told(params: ActorCritic) -> tuple[ActorCritic, ActorCritic]:
        if is_shared(params) != (config.critic.critic == "shared"):
            raise UsageError(
                f"the critic is to be {config.critic.critic}, but the parameters have the other kind: make them with "
                f'add_critic(..., "{config.critic.critic}")'
            )
        return split(params)

    def advantages(rewards: RewardArrays, batch: Batch, kl_coef: Array, axis_name: AxisName) -> Advantages:
        # What no reward applies to teaches neither policy nor critic.
        batch = batch._replace(completion_mask=keep_completions(batch.completion_mask, rewards.applicable))
        by_token, returns = token_advantages(rewards.rewards, batch, kl_coef, config=config, axis_name=axis_name)
        mask, logs = batch.completion_mask, value_logs(batch, returns, axis_name)
        if loss.kl_in_reward and batch.ref_logprobs is not None:
            logs |= kl_logs(batch, kl_coef, axis_name)
            batch = batch._replace(ref_logprobs=None)  # the loss needs none
        batch = masked(batch._replace(advantages=by_token, returns=returns), loss, axis_name)
        return Advantages(batch, masked_mean(by_token, mask, axis=-1), logs)

    has_ends = config.critic.bootstrap_truncated  # the value after the last token is read, which is not packed
    schedule = schedule_of(config.run, config.run.optimizer.learning_rate)
    critic_schedule = schedule_of(config.run, config.critic.critic_learning_rate)
    # One step of both, but each gradient is clipped by its own norm.
    labels: Any = ActorCritic._make(ActorCritic._fields)
    optimizer = optax.multi_transform(
        {"policy": optimizer_of(config.run, schedule), "critic": optimizer_of(config.run, critic_schedule)}, labels
    )
    return Method(
        lambda trained, frozen, batch: score(policy, critic, join(trained, frozen), batch),
        advantages,
        lambda trained, frozen, batch, reference: loss_fn(join(trained, frozen), batch, reference),
        optimizer,
        schedule,
        has_critic=True,
        packs=packs(config.run.loss) and not has_ends,
        split=split_as_told,
        actor=lambda trained, frozen: lora.join(trained.policy, frozen.policy),
        of_policy=lambda trained: trained._replace(critic=None),
    )


def score(policy: Policy, critic: Policy, params: ActorCritic, batch: Batch) -> Scores:
    """Scores of completions, by policy and critic. If they share a decoder, one forward pass serves both.

    Args:
      policy: the model's functions.
      critic: those of the critic's decoder.
      params: of both.
      batch: as sampled.
    """
    if batch.packed is not None:
        hidden = hidden_states(policy, params.policy, batch)
        values = _packed_values(critic, params, hidden, batch)
        scores = score_completion_tokens(policy, params.policy, batch, hidden=hidden)
        return Scores(*scores, jnp.pad(values, [(0, 0), (0, 0), (0, 1)]))  # the value of the end is not read
    if not is_shared(params):
        values = heads.values(critic, params.critic, *batch[:4])
        return Scores(*score_completion_tokens(policy, params.policy, batch), values)
    # Hidden state t predicts token t, and the value of the end is read from one more.
    longer = jnp.pad(batch.completion_ids, [(0, 0), (0, 0), (0, 1)])
    hidden = policy.hidden(params.policy, batch.prompt_ids, batch.prompt_mask, longer)
    scores = score_completion_tokens(policy, params.policy, batch, hidden=hidden[..., :-1, :])
    return Scores(*scores, heads.read(hidden, params.critic.head))


def _packed_values(critic: Policy, params: ActorCritic, hidden: jax.Array, batch: Batch) -> jax.Array:
    """Values of the states in which packed tokens are chosen, `[N, G, T]`; `hidden` of the policy `[N, 1, S, D]`."""
    if not is_shared(params):
        hidden = hidden_states(critic, params.critic.decoder, batch)
    return of_completions(heads.read(hidden, params.critic.head), batch)


def token_advantages(
    rewards: jax.Array, batch: Batch, kl_coef: Array, *, config: PPOConfig, axis_name: AxisName = None
) -> tuple[jax.Array, jax.Array]:
    """GAE of a rollout, of rₜ = 1[last] r − β k1ₜ. The second term is there if the KL is in the reward. 1506.02438.

    Args:
      rewards: `[N, G]`.
      batch: with a mask, old values, which completions were cut off, and with old and reference log-probabilities if
        there is a KL in the reward.
      kl_coef: β of the step.
      config: the run.
      axis_name: the mapped axis over which prompts are spread, or None.

    Returns:
      Advantages, whitened if the run says so, and returns A + V of those before whitening, both `[N, G, T]`.
    """
    critic, loss, mask = config.critic, config.run.loss, batch.completion_mask
    by_token = rewards_at_end(rewards, mask)
    if loss.kl_in_reward and loss.objective.has_reference:
        by_token -= kl_coef * jnp.where(mask, kl_k1(batch.old_logprobs, batch.ref_logprobs), 0)
    length = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)
    after = jnp.take_along_axis(batch.old_values, length, axis=-1)[..., 0]
    values = jnp.where(mask, batch.old_values[..., :-1], 0)
    advantages = generalized_advantages(
        by_token,
        values,
        mask,
        gamma=critic.gamma,
        lam=critic.gae_lambda,
        # After an end-of-text token the value is 0.
        bootstrap=jnp.where(batch.truncated & critic.bootstrap_truncated, after, 0),
        num_steps=critic.gae_steps,
    )
    returns = advantages + values
    if critic.whiten:
        # A reward that is NaN stays visible in its own completion, and spoils no other.
        finite = jnp.isfinite(advantages)
        whitened = whiten(jnp.where(finite, advantages, 0), mask & finite, axis_name=axis_name)
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
    policy_loss_fn, options = grpo_loss_fn(policy, config.run.loss), config.critic

    def loss_fn(params: ActorCritic, batch: Batch, reference: Params | None = None) -> tuple[jax.Array, Logs]:
        (hidden, routing), mask = hidden_and_routing(policy, params.policy, batch), batch.completion_mask
        loss, logs = policy_loss_fn(params.policy, batch, reference, hidden=hidden, routing=routing)
        if batch.packed is not None:
            values = _packed_values(critic, params, hidden, batch)
        elif is_shared(params):
            values = heads.read(hidden, params.critic.head)
        else:
            values = heads.values(critic, params.critic, *batch[:4])[..., :-1]
        returns = jnp.where(mask, batch.returns, 0)  # rubbish there would make the gradient NaN
        error = critic_loss(values, returns)
        if options.value_clip is not None:
            old_values = jnp.where(mask, batch.old_values[..., :-1], 0)
            error = critic_loss(values, returns, old_values=old_values, clip=options.value_clip)
            held_back = jnp.abs(values - old_values) > options.value_clip
            held_back &= error > critic_loss(values, returns)
            logs.means["value_clip"] = masked_sum(held_back, mask)
        logs.means["critic_loss"] = masked_sum(error, mask)
        return loss + options.value_coef * weighted_sum(error, batch.weights, mask), logs

    return loss_fn


def split(params: ActorCritic) -> tuple[ActorCritic, ActorCritic]:
    """The parts of policy and critic that are trained, and the others."""
    policy, critic = lora.split(params.policy), heads.split(params.critic)
    return ActorCritic(policy[0], critic[0]), ActorCritic(policy[1], critic[1])


def join(trained: ActorCritic, frozen: ActorCritic) -> ActorCritic:
    """The parameters that `split` took apart."""
    return ActorCritic(lora.join(trained.policy, frozen.policy), heads.join(trained.critic, frozen.critic))


# ---- what to log of a critic


def value_logs(batch: Batch, returns: jax.Array, axis_name: AxisName = None) -> dict[str, jax.Array]:
    """Means of values and returns over tokens, and how well the values predicted the returns.

    Args:
      batch: with a mask and old values.
      returns: `[N, G, T]`.
      axis_name: the mapped axis over which prompts are spread, or None.
    """
    values, mask = batch.old_values[..., :-1], batch.completion_mask
    return {
        "value_mean": masked_mean(values, mask, axis_name=axis_name),
        "returns_mean": masked_mean(returns, mask, axis_name=axis_name),
        "explained_variance": explained_variance(values, returns, mask, axis_name=axis_name),
    }


def explained_variance(
    values: jax.Array, returns: jax.Array, mask: jax.Array, *, axis_name: AxisName = None
) -> jax.Array:
    """1 − Var(R − V) / Var(R). 1: V predicts R. 0: no better than a constant. Below 0: worse. NaN: R does not vary.

    Args:
      values: `[...]`, of tokens when they were sampled.
      returns: `[...]`.
      mask: bool `[...]`, which count.
      axis_name: mapped axes over which tokens are spread, or None.
    """

    def variance(x: jax.Array) -> jax.Array:
        return masked_mean((x - masked_mean(x, mask, axis_name=axis_name)) ** 2, mask, axis_name=axis_name)

    total = variance(returns)
    return jnp.where(total > 0, 1 - variance(returns - values) / total, jnp.nan)


def masked_mean(
    values: jax.Array, mask: jax.Array, *, axis: int | None = None, axis_name: AxisName = None
) -> jax.Array:
    """The mean over the mask, 0 where it is empty."""
    total = maybe_psum(jnp.sum(jnp.where(mask, values, 0), axis=axis), axis_name)
    return total / jnp.maximum(maybe_psum(jnp.sum(mask, axis=axis), axis_name), 1)
