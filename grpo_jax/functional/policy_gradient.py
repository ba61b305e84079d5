"""Log-ratios and surrogates, per token.

A log-ratio is `[..., T]`: d = log π − log π_old, per token or of the row, written
on each of its tokens. A surrogate maps (log_ratio, advantages) to a loss per token,
to be minimised; the caller weighs and sums. All surrogates have one signature, so
that any log-ratio goes with any surrogate.

Shapes: T tokens; advantages are `[...]`, one a row, or `[..., T]`, one a token.
"""

import jax
import jax.numpy as jnp

# Keeps exp and its squares finite in float32; 0 · inf is NaN. Beyond e⁴⁰ a ratio means nothing.
MAX_LOG_RATIO = 40.0


def token_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """dₜ = log π(oₜ) − log π_old(oₜ).

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats, of the policy that the ratio is taken against.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, 0 where masked, whatever stands there.
    """
    # Masked before any exp: what exp makes of rubbish in a padded slot (inf) has a
    # gradient of NaN even when it is multiplied by 0 later.
    difference = _exact(logprobs, mask) - jax.lax.stop_gradient(_exact(old_logprobs, mask))
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _exact(logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """0 where masked, and at least float32: 16 bits hold neither a small difference nor its exp."""
    return jnp.where(mask, logprobs, 0).astype(jnp.promote_types(logprobs.dtype, jnp.float32))


def sequence_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """d = Σₜ mₜ (log π(oₜ) − log π_old(oₜ)) = log π(o)/π_old(o), the ratio of whole responses.

    With a weight per row (`sequence_mean_weights`) the loss is one number a row.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, the row's number on every one of its tokens, 0 where masked.
    """
    total = jnp.sum(token_log_ratio(logprobs, old_logprobs, mask), axis=-1, keepdims=True)
    return jnp.where(mask, jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO), 0)


def gspo_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """log sₜ = sg(mean d) + log π(oₜ) − sg(log π(oₜ)). GSPO-token (2507.18071), equation 14.

    In value the length-normalised ratio of the row, in gradient that of the token.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, 0 where masked.
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    length = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=log_ratio.dtype), 1)
    mean = jnp.sum(log_ratio, axis=-1, keepdims=True) / length
    return jnp.where(mask, jax.lax.stop_gradient(mean - log_ratio) + log_ratio, 0)


def clipped_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, *, epsilon_low: float = 0.2, epsilon_high: float = 0.2
) -> jax.Array:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A), ρ = exp(d). PPO (1707.06347), equation 7.

    Args:
      log_ratio: `[..., T]`.
      advantages: `[...]` or `[..., T]`.
      epsilon_low: 0.2 from PPO. Under sequence ratios GSPO takes 3e-4.
      epsilon_high: 0.2 from PPO; DAPO's clip-higher is 0.28.

    Returns:
      `[..., T]`.
    """
    advantages = per_token(advantages, log_ratio)
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * advantages)


def cispo_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, *, epsilon_low: float = 1.0, epsilon_high: float = 4.0
) -> jax.Array:
    """−sg(clip(ρ, 1 − ε_low, 1 + ε_high)) · A · d. CISPO (2506.13585), equation 4.

    The clip bounds the weight of a token but never its gradient. The paper writes
    log π for d: the gradient is the same, since log π_old is constant.

    Args:
      log_ratio: `[..., T]`, per token.
      advantages: `[...]` or `[..., T]`.
      epsilon_low: 1.0, no lower bound, as in the paper.
      epsilon_high: 4.0, a cap of 5 on ρ, as published systems use. Negative would cap
        below 1, and is an error.

    Returns:
      `[..., T]`.

    Raises:
      ValueError: epsilon_high is a negative number (a traced value is not checked).
    """
    if isinstance(epsilon_high, (int, float)) and epsilon_high < 0:
        raise ValueError(f"epsilon_high is {epsilon_high}: CISPO's cap 1 + epsilon_high must be at least 1")
    weight = jnp.clip(jnp.exp(log_ratio), 1 - epsilon_low, 1 + epsilon_high)
    return -jax.lax.stop_gradient(weight) * per_token(advantages, log_ratio) * log_ratio


def per_token(advantages: jax.Array, like: jax.Array) -> jax.Array:
    """Advantages of rows `[...]` or of tokens `[..., T]`, with the rank of `like` `[..., T]`."""
    return advantages[..., None] if advantages.ndim == like.ndim - 1 else advantages
