"""How far the policy is from the reference, per token.

The k-estimators need the log-probabilities of the sampled tokens only; with
x = log π − log π_ref, their expectation under π is taken by the samples. See
http://joschu.net/blog/kl-approx.html for k1, k2 and k3.
V is the vocabulary.
"""

import jax
import jax.numpy as jnp


def kl_k1(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k1 = x, x = log π − log π_ref.

    Unbiased in value. Used as a penalty in the reward. In the loss it does not
    regularise: its expected on-policy gradient is zero.

    Args:
      logprobs: `[..., T]` in nats.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, of either sign.
    """
    return logprobs - ref_logprobs


def kl_k2(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k2 = x²/2, x = log π − log π_ref.

    Biased in value, but its on-policy gradient is that of the KL divergence.

    Args:
      logprobs: `[..., T]` in nats.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, never negative.
    """
    return jnp.square(logprobs - ref_logprobs) / 2


def kl_k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k3 = exp(−x) − 1 + x, x = log π − log π_ref. DeepSeekMath (2402.03300), equation 4.

    Unbiased in value and never negative.

    Args:
      logprobs: `[..., T]` in nats.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, never negative.
    """
    difference = logprobs - ref_logprobs
    # exp(−x) − 1 loses all digits for small x and then goes negative; and where a backend's
    # expm1 is a unit off, so does the sum.
    return jnp.maximum(jnp.expm1(-difference) + difference, 0)


def kl_full(logits: jax.Array, ref_logits: jax.Array, *, reverse: bool = False) -> jax.Array:
    """KL(π ‖ π_ref) = Σ_v π(v) (log π(v) − log π_ref(v)), or with `reverse` KL(π_ref ‖ π).

    The direction π ‖ π_ref is the one of GRPO's objective; reverse is the penalty
    that some PPO descriptions write.

    Args:
      logits: `[..., V]`, unnormalised, of the policy.
      ref_logits: `[..., V]`, unnormalised, of the reference.
      reverse: take the expectation under the reference instead.

    Returns:
      `[...]` in nats. A token that both give no probability (−inf) contributes 0.
    """
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    if reverse:
        log_p, log_q = log_q, log_p
    return jnp.sum(_expectation_terms(log_p, log_q), axis=-1)


def entropy(logits: jax.Array) -> jax.Array:
    """H(π) = −Σ_v π(v) log π(v).

    For the entropy of a language model's tokens without logits in memory, see
    `token_logprobs`.

    Args:
      logits: `[..., V]`, unnormalised; −inf excludes a token.

    Returns:
      `[...]` in nats, from 0 to log V.
    """
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(_expectation_terms(log_p, jnp.zeros_like(log_p)), axis=-1)


def _expectation_terms(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """p (log p − log q) with 0 · log 0 = 0, in value and in gradient."""
    possible = log_p > -jnp.inf
    log_p = jnp.where(possible, log_p, 0)
    return jnp.where(possible, jnp.exp(log_p) * (log_p - jnp.where(possible, log_q, 0)), 0)
