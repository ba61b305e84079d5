"""Complete objectives: the functions of the other modules, composed.

A loss is Σ weights · per_token, so that it may be computed in pieces and added up.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from grpo_jax.functional.aggregation import token_mean_weights
from grpo_jax.functional.divergence import kl_k3
from grpo_jax.functional.policy_gradient import clipped_surrogate, per_token, token_log_ratio

# name -> (weighted sum, weight): the value is their quotient, and both add up over
# microbatches, devices and steps.
Metrics = dict[str, tuple[jax.Array, jax.Array]]


def grpo_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    completion_mask: jax.Array,
    *,
    ref_logprobs: jax.Array | None = None,
    kl_coef: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    weights: jax.Array | None = None,
    log_ratio: Callable[..., jax.Array] = token_log_ratio,
    surrogate: Callable[..., jax.Array] = clipped_surrogate,
    divergence: Callable[..., jax.Array] = kl_k3,
) -> tuple[jax.Array, Metrics]:
    """L = Σ w · [surrogate(d, A) + β · D(π, π_ref)]. DeepSeekMath (2402.03300), equation 3, as a loss.

    Args:
      logprobs: `[..., T]` in nats, of the completion under the policy, with gradient.
      old_logprobs: `[..., T]` in nats, under the policy that sampled.
      advantages: `[...]`, one a completion, or `[..., T]`, one a token.
      completion_mask: bool `[..., T]`, true on sampled tokens including the ending one.
      ref_logprobs: `[..., T]` in nats, under the reference. None: no KL term.
      kl_coef: β, read where there is a reference. 0.04 from DeepSeekMath.
      epsilon_low: how far below 1 the ratio may go. 0.2 from PPO; other surrogates need their own.
      epsilon_high: how far above 1 the ratio may go. 0.2 from PPO; other surrogates need their own.
      weights: `[..., T]`, one of `aggregation`'s, computed on the whole optimizer batch.
        None: the mean over the tokens given here, `token_mean_weights`; the paper's own are
        `sequence_mean_weights`.
      log_ratio: (logprobs, old_logprobs, mask) -> `[..., T]`.
      surrogate: (log_ratio, advantages, *, epsilon_low, epsilon_high) -> `[..., T]`.
      divergence: (logprobs, ref_logprobs) -> `[..., T]`.

    Returns:
      The loss, a scalar, and metrics over tokens: `ratio`, `clip_low`, `clip_high`
      (shares of tokens on the side where the clip acts), and `kl` if there is a reference.

    Raises:
      AssertionError: shapes disagree (at trace time).
    """
    if weights is None:
        weights = token_mean_weights(completion_mask)
    given = [logprobs, old_logprobs, completion_mask, weights]
    chex.assert_equal_shape(given if ref_logprobs is None else [*given, ref_logprobs])
    chex.assert_type(completion_mask, bool)
    chex.assert_rank(advantages, {logprobs.ndim - 1, logprobs.ndim})
    chex.assert_shape(advantages, logprobs.shape[: advantages.ndim])

    ratio = log_ratio(logprobs, old_logprobs, completion_mask)
    loss = surrogate(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    metrics = ratio_metrics(ratio, advantages, completion_mask, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if ref_logprobs is not None:
        # Both sides are replaced where masked, so that rubbish there stays finite.
        kl = divergence(jnp.where(completion_mask, logprobs, 0), jnp.where(completion_mask, ref_logprobs, 0))
        loss = loss + kl_coef * kl
        metrics["kl"] = masked_sum(kl, completion_mask)
    # A weight of 0 does not silence NaN: advantages of wholly masked rows may hold anything.
    return jnp.sum(weights * jnp.where(completion_mask, loss, 0)), metrics


def ratio_metrics(
    log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, *, epsilon_low: float, epsilon_high: float
) -> Metrics:
    """Mean ratio, and the shares of tokens below and above the clip on the side where it acts.

    Args:
      log_ratio: `[..., T]`.
      advantages: `[...]` or `[..., T]`.
      mask: bool `[..., T]`.
      epsilon_low: as in `grpo_loss`.
      epsilon_high: as in `grpo_loss`.

    Returns:
      `ratio`, `clip_low`, `clip_high`.
    """
    ratio, advantages = jnp.exp(jax.lax.stop_gradient(log_ratio)), per_token(advantages, log_ratio)
    return {
        "ratio": masked_sum(ratio, mask),
        "clip_low": masked_sum((ratio < 1 - epsilon_low) & (advantages < 0), mask),
        "clip_high": masked_sum((ratio > 1 + epsilon_high) & (advantages > 0), mask),
    }


def masked_sum(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Σ values over the mask, number of tokens in it): one metric.

    Args:
      values: `[..., T]`, bool or float.
      mask: bool `[..., T]`.

    Returns:
      Two float32 scalars.
    """
    values = jax.lax.stop_gradient(values).astype(jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0)), jnp.sum(mask, dtype=jnp.float32)


def grpo_objective(rhos, A, pi_theta_old, pi_theta_ref, epsilon=0.2, beta=0.01) -> jax.Array:
    """J = mean(min(ρA, clip(ρ, 1 − ε, 1 + ε) A)) − β Σ π_θ log(π_θ/π_ref + 1e-10), to be maximised.

    The objective on probabilities of the responses of one group, as the exercise
    "GRPO objective" states it: π_θ ∝ ρ · π_old, and π_θ and π_ref are normalised over
    the group. Names and order of the arguments are the exercise's.

    Args:
      rhos: `[G]`, likelihood ratios π_θ(oᵢ)/π_old(oᵢ).
      A: `[G]`, advantages.
      pi_theta_old: `[G]`, probabilities under the old policy, in any scale.
      pi_theta_ref: `[G]`, probabilities under the reference, in any scale.
      epsilon: clip range, 0.2.
      beta: KL coefficient, 0.01.

    Returns:
      A scalar.

    Raises:
      ValueError: the lengths differ.
    """
    rhos, A, old, ref = (jnp.asarray(x, dtype=float) for x in (rhos, A, pi_theta_old, pi_theta_ref))
    if not rhos.shape == A.shape == old.shape == ref.shape:
        raise ValueError(f"lengths differ: rhos {rhos.shape}, A {A.shape}, old {old.shape}, ref {ref.shape}")
    policy = rhos * old / jnp.sum(rhos * old)
    ref = ref / jnp.sum(ref)
    kl = jnp.sum(policy * jnp.log(policy / ref + 1e-10))
    surrogate = jnp.minimum(rhos * A, jnp.clip(rhos, 1 - epsilon, 1 + epsilon) * A)
    return jnp.mean(surrogate) - beta * kl
