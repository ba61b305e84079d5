"""Rewards of completions before they become advantages, and rewards and advantages of tokens: GAE, REINFORCE++.

Rewards of completions are `[...]`, and arrays of tokens are `[..., T]`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.functional.advantages import centered_advantages, whiten
from grpo_jax.functional.numerics import AxisName, takes, upcast


@takes(lengths="...")
def overlong_penalty(lengths: jax.Array, *, max_length: int, buffer: int) -> jax.Array:
    """clip(−(|o| − (L_max − L_c))/L_c, −1, 0), to add to the reward. DAPO (2503.14476), equation 13.

    0 up to L_max − L_c, then falling on a line to −1 at L_max.

    Args:
      lengths: `[...]`, in tokens.
      max_length: L_max in tokens, the sampler's limit.
      buffer: L_c in tokens; DAPO takes 4096 of 20480.

    Returns:
      `[...]`, float32, from −1 to 0.

    Raises:
      ValueError: buffer is not between 1 and max_length.

    Examples:
      >>> print(overlong_penalty(jnp.array([70, 90, 100]), max_length=100, buffer=20))
      [-0.  -0.5 -1. ]
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}: it must be between 1 and max_length, {max_length}")
    excess = lengths.astype(jnp.float32) - (max_length - buffer)
    return -jnp.clip(excess / buffer, 0, 1)


@takes(logprobs="... T", ref_logprobs="... T", mask="... T", rewards="...")
def kl_penalized_rewards(
    rewards: jax.Array, logprobs: jax.Array, ref_logprobs: jax.Array, mask: jax.Array, *, kl_coef: float
) -> jax.Array:
    """r − β Σₜ k1, the KL divergence in the reward. 1909.08593, section 2, as in RLOO (2402.14740) and PPO.

    Args:
      rewards: `[...]`, one per completion.
      logprobs: `[..., T]` in nats, under the policy that sampled.
      ref_logprobs: `[..., T]` in nats.
      mask: bool `[..., T]`.
      kl_coef: β; 0.05 in TRL's RLOO, 0.1 in 1909.08593.

    Returns:
      `[...]`, for an advantage function; without gradient.

    Examples:
      >>> logprobs, ref_logprobs = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -2.5]])
      >>> print(kl_penalized_rewards(jnp.array([1.0]), logprobs, ref_logprobs, jnp.array([[True, True]]), kl_coef=0.1))
      [0.9]
    """
    kl = jnp.where(mask, upcast(logprobs) - upcast(ref_logprobs), 0)
    return upcast(rewards) - kl_coef * jax.lax.stop_gradient(jnp.sum(kl, axis=-1))


@takes(mask="... T", rewards="...", token_penalty="... T")
def reinforce_pp_advantages(
    rewards: jax.Array,
    mask: jax.Array,
    *,
    token_penalty: jax.Array | None = None,
    gamma: float = 1.0,
    eps: float = 1e-4,
    axis_name: AxisName = None,
) -> jax.Array:
    """A = whiten(R), Rₜ = r̂ₜ + γ Rₜ₊₁, r̂ₜ = 1[last] r − βk1ₜ. REINFORCE++ (2501.03262).

    Args:
      rewards: `[...]`, one per completion.
      mask: bool `[..., T]`.
      token_penalty: `[..., T]`, β · `kl_k1`. None: no KL in the reward.
      gamma: discount per token, 1 as in the paper.
      eps: see `whiten`.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> print(reinforce_pp_advantages(jnp.array([1.0, 0.0]), jnp.array([[True, True], [True, True]])))
      [[ 0.866  0.866]
       [-0.866 -0.866]]
    """
    token_rewards = rewards_at_end(rewards, mask)
    if token_penalty is not None:
        token_rewards = token_rewards - jnp.where(mask, token_penalty, 0)
    # Without a critic and with λ = 1 an advantage is the discounted return.
    returns = generalized_advantages(token_rewards, jnp.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask, eps=eps, axis_name=axis_name)


@takes(mask="... G T", rewards="... G", where="... G")
def reinforce_pp_baseline_advantages(
    rewards: jax.Array, mask: jax.Array, *, eps: float = 1e-4, where: Any = None, axis_name: AxisName = None
) -> jax.Array:
    """A = whiten(r − μ), μ of the group, over all tokens of the batch. REINFORCE++ with baseline (2501.03262).

    Args:
      rewards: `[..., G]`.
      mask: bool `[..., G, T]`. A completion counts as many times as it has tokens in the batch's mean and deviation,
        as in verl.
      eps: see `whiten`.
      where: bool `[..., G]`, true for completions that count; others are in no mean and get 0. None: all.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., G, T]`, 0 where masked.

    Examples:
      >>> print(reinforce_pp_baseline_advantages(jnp.array([[3.0, 1.0]]), jnp.array([[[True], [True]]])))
      [[[ 0.707]
        [-0.707]]]
    """
    centered = jnp.broadcast_to(centered_advantages(upcast(rewards), where=where)[..., None], mask.shape)
    mask = mask if where is None else mask & where[..., None]
    return whiten(centered, mask, eps=eps, axis_name=axis_name)


@takes(mask="... T", rewards="...")
def rewards_at_end(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    """Puts a completion's reward on its last token, and 0 elsewhere.

    Args:
      rewards: `[...]`.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`; all 0 in a completion without tokens.

    Examples:
      >>> print(rewards_at_end(jnp.array([5.0]), jnp.array([[True, True, False]])))
      [[0. 5. 0.]]
    """
    position = jax.lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
    last = jnp.max(jnp.where(mask, position, -1), axis=-1, keepdims=True)
    return jnp.where(position == last, rewards[..., None], 0)


@takes(rewards="... T", values="... T", mask="... T", bootstrap="...")
def generalized_advantages(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: jax.Array | None = None,
    num_steps: int | None = None,
) -> jax.Array:
    """Aₜ = Σ (γλ)ˡ δₜ₊ₗ over l = 0 … K − 1, δₜ = rₜ + γVₜ₊₁ − Vₜ. GAE (1506.02438), equation 16.

    K is infinite by default: Aₜ = δₜ + γλ Aₜ₊₁. Masked tokens are skipped: the one after a gap is the next token.
    Returns, the critic's target, are A + V.

    Args:
      rewards: `[..., T]`, one per token; see `rewards_at_end`.
      values: `[..., T]`, V before the token is sampled.
      mask: bool `[..., T]`.
      gamma: discount per token. 1: the length of an answer does not change its value.
      lam: λ; 0.95 from PPO (1707.06347). 1 trusts only the rewards, 0 only the critic.
      bootstrap: `[...]`, V after the last token of a completion that was truncated. None: 0, right after an EOS.
      num_steps: K, static; None: to the end.

    Returns:
      `[..., T]`, at least float32; 0 where masked.

    Raises:
      ValueError: num_steps is below 1.

    Examples:
      >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.5])
      >>> print(generalized_advantages(rewards, values, jnp.ones(3, bool), lam=0.5))  # δ = -0.25, 0.25, 0.5
      [0.  0.5 0.5]
    """
    if num_steps is not None and num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}: it must be at least 1, or None for all")
    # In 16 bits the sum over a long completion stops growing.
    dtype = jnp.promote_types(upcast(rewards).dtype, upcast(values).dtype)
    rewards, values = (jnp.where(mask, x.astype(dtype), 0) for x in (rewards, values))
    end = jnp.zeros_like(values[..., 0]) if bootstrap is None else bootstrap.astype(dtype)

    def backward(
        carry: tuple[jax.Array, jax.Array], token: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        next_value, following = carry  # following: A of the next token, or δ of the next K
        reward, value, is_token = token
        delta = reward + gamma * next_value - value
        if num_steps is None:
            current = advantage = delta + gamma * lam * following
        else:
            current = jnp.concatenate([delta[None], following[:-1]])
            decay = (gamma * lam) ** jnp.arange(num_steps, dtype=delta.dtype)
            advantage = jnp.tensordot(decay, current, axes=1)
        carry = jnp.where(is_token, value, next_value), jnp.where(is_token, current, following)
        return carry, jnp.where(is_token, advantage, 0)

    following = jnp.zeros_like(end) if num_steps is None else jnp.zeros_like(end, shape=(num_steps, *end.shape))
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (rewards, values, mask))
    advantages = jax.lax.scan(backward, (end, following), by_token, reverse=True)[1]
    return jnp.moveaxis(advantages, 0, -1)
