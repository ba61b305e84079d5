"""Divergences of the policy from another distribution, such as the reference's or a teacher's, per token.

k1, k2 and k3 estimate KL(π ‖ π_ref) from the log-probabilities of sampled tokens, x = log π − log π_ref, as means over
samples of π: http://joschu.net/blog/kl-approx.html. If an older policy sampled the tokens, `grpo_loss` corrects them
(`kl_bias_correction`). V is the vocabulary.
"""

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import check_above, check_beta, takes, upcast


@takes(logprobs="number | ...", ref_logprobs="number | ...")
def kl_k1(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k1 = x, x = log π − log π_ref.

    Unbiased in value, for the reward. In the loss its expected on-policy gradient is zero, so that it does not hold the
    policy.

    Args:
      logprobs: `[..., T]` in nats.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, of either sign.

    Examples:
      >>> print(kl_k1(jnp.array([-1.0]), jnp.array([-1.5])))
      [0.5]
    """
    return logprobs - ref_logprobs


@takes(logprobs="number | ...", ref_logprobs="number | ...")
def kl_k2(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k2 = x²/2, x = log π − log π_ref.

    Biased in value, but its on-policy gradient is that of the KL divergence.

    Args:
      logprobs: `[..., T]` in nats.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, never negative.

    Examples:
      >>> print(kl_k2(jnp.array([-1.0]), jnp.array([-1.5])))
      [0.125]
    """
    return jnp.square(logprobs - ref_logprobs) / 2


@takes(logprobs="number | ...", ref_logprobs="number | ...")
def kl_k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """k3 = exp(−x) − 1 + x, x = log π − log π_ref. DeepSeekMath (2402.03300), equation 4.

    Unbiased in value and never negative.

    Args:
      logprobs: `[..., T]` in nats.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, never negative.

    Examples:
      >>> print(kl_k3(jnp.array([-1.0]), jnp.array([-1.5])))  # exp(−½) − 1 + ½
      [0.1065]
    """
    difference = logprobs - ref_logprobs
    # exp(−x) − 1 loses its digits at small x. Where expm1 is a last digit off, the sum would still be below 0.
    return jnp.maximum(jnp.expm1(-difference) + difference, 0)


@takes(logprobs="number | ...", ref_logprobs="number | ...")
def kl_abs(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """|x|, x = log π − log π_ref.

    No estimate of the KL divergence: a distance whose gradient is as large near the reference as far from it.

    Args:
      logprobs: `[..., T]` in nats.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, never negative; its gradient at x = 0 is 0.

    Examples:
      >>> print(kl_abs(jnp.array([-1.0]), jnp.array([-1.5])))
      [0.5]
    """
    difference = logprobs - ref_logprobs
    # jnp.abs has a slope of 1 at 0, which would move a policy that equals the reference.
    return difference * jax.lax.stop_gradient(jnp.sign(difference))


@takes(logprobs="number | ...", ref_logprobs="number | ...")
def kl_unbiased(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """sg(k3) + k2 − sg(k2): the value of k3 and the gradient of k2.

    On samples of the current policy it is unbiased in value and in gradient. No single estimator is: the gradient of k3
    is biased, and so is the value of k2.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      ref_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, never negative.

    Examples:
      >>> print(jax.grad(kl_unbiased)(jnp.array(-1.0), jnp.array(-1.5)))  # x
      0.5
    """
    k2 = kl_k2(logprobs, ref_logprobs)
    # In this order the value is exactly that of k3; k2 + (k3 − k2) would be rounded to the digits of k2.
    return jax.lax.stop_gradient(kl_k3(logprobs, ref_logprobs)) + (k2 - jax.lax.stop_gradient(k2))


@takes(kl_coef="number | ...", kl="number | ...")
def adaptive_kl_coef(
    kl_coef: jax.Array, kl: jax.Array, *, target: float, num_samples: int, horizon: float = 10_000.0
) -> jax.Array:
    """β ← β (1 + clip(KL/target − 1, −0.2, 0.2) · n/horizon). 1909.08593, section 2.2.

    Args:
      kl_coef: β, a scalar.
      kl: measured KL divergence, a scalar, in the unit of `target`.
      target: the desired KL divergence, such as 6 nats per completion; the metric `kl` of `grpo_loss` is per token.
      num_samples: n, the number of completions since the last call.
      horizon: the number of completions over which β changes by at most a fifth, n or more; 10 000 as in TRL and verl.

    Returns:
      The next β, a scalar.

    Raises:
      ValueError: target or horizon is not above 0 (a traced value is not checked).

    Examples:
      >>> print(adaptive_kl_coef(jnp.array(0.1), jnp.array(9.0), target=6.0, num_samples=1000))
      0.102
    """
    check_above(0, target=target, horizon=horizon)
    return kl_coef * (1 + jnp.clip(kl / target - 1, -0.2, 0.2) * (num_samples / horizon))


@takes(entropy_coef="number | ...", entropy="number | ...")
def adaptive_entropy_coef(
    entropy_coef: jax.Array, entropy: jax.Array, *, target: float = 0.2, step: float = 0.005, largest: float = 1.0
) -> jax.Array:
    """c ← c + Δ where H ≤ target, else c − Δ; within [0, largest]. Skywork-OR1 (2505.22312).

    The paper adds the bonus only while H ≤ target: use c · (H ≤ target).

    Args:
      entropy_coef: c, a scalar.
      entropy: mean entropy of a token, a scalar, in nats.
      target: 0.2 nats from the paper.
      step: Δ; 0.005 from the paper.
      largest: bound of c, 1.0 as in TRL.

    Returns:
      The next c, a scalar.

    Examples:
      >>> print(adaptive_entropy_coef(jnp.array(0.01), jnp.array(0.1)))
      0.015
    """
    return jnp.clip(entropy_coef + jnp.where(entropy <= target, step, -step), 0, largest)


@takes(logits="... V", ref_logits="... V")
def kl_full(logits: jax.Array, ref_logits: jax.Array, *, reverse: bool = False) -> jax.Array:
    """KL(π ‖ π_ref) = Σ_v π(v) (log π(v) − log π_ref(v)), or with `reverse` KL(π_ref ‖ π).

    GRPO's objective has KL(π ‖ π_ref); some descriptions of PPO have the reverse.

    Args:
      logits: `[..., V]`, unnormalised, of the policy.
      ref_logits: `[..., V]`, unnormalised, of the reference.
      reverse: take the expectation under the reference instead.

    Returns:
      `[...]` in nats. A token that both give no probability (−inf) contributes 0.

    Examples:
      >>> print(kl_full(jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))))  # ½ log 4/3
      0.1438
    """
    log_p, log_q = jax.nn.log_softmax(upcast(logits)), jax.nn.log_softmax(upcast(ref_logits))
    if reverse:
        log_p, log_q = log_q, log_p
    return jnp.sum(_expectation_terms(log_p, log_q), axis=-1)


@takes(logits="... V", ref_logits="... V", beta="number")
def jsd_full(logits: jax.Array, ref_logits: jax.Array, *, beta: jax.Array | float = 0.5) -> jax.Array:
    """JSD_β = β KL(π_T ‖ M) + (1 − β) KL(π ‖ M), M = β π_T + (1 − β) π. GKD (2306.13649), equation 1.

    The generalised Jensen–Shannon divergence of the policy π and another, such as a teacher π_T. Divided by β it tends
    to the forward KL(π_T ‖ π) as β goes to 0; divided by 1 − β, to the reverse KL(π ‖ π_T) as β goes to 1. `kl_full`
    has these two.

    Args:
      logits: `[..., V]`, unnormalised, of the policy.
      ref_logits: `[..., V]`, unnormalised, of the second distribution.
      beta: β, between 0 and 1; 0.5 is the symmetric divergence, as in TRL.

    Returns:
      `[...]` in nats, from 0 to −β log β − (1 − β) log(1 − β). A token that both give no probability (−inf)
      contributes 0.

    Raises:
      ValueError: beta is not between 0 and 1 (a traced value is not checked).

    Examples:
      >>> print(jsd_full(jnp.array([0.0, -99.0]), jnp.array([-99.0, 0.0])))  # they share no token: log 2
      0.6931
    """
    check_beta(beta)
    log_q, log_p = jax.nn.log_softmax(upcast(logits)), jax.nn.log_softmax(upcast(ref_logits))
    beta = jnp.asarray(beta, log_q.dtype)
    possible = (log_q > -jnp.inf) | (log_p > -jnp.inf)
    log_mixture = jnp.logaddexp(
        jnp.where(possible, log_p, 0) + jnp.log(beta), jnp.where(possible, log_q, 0) + jnp.log1p(-beta)
    )
    ref_terms, policy_terms = _expectation_terms(log_p, log_mixture), _expectation_terms(log_q, log_mixture)
    return jnp.sum(beta * ref_terms + (1 - beta) * policy_terms, axis=-1)


@takes(logits="... V")
def entropy(logits: jax.Array) -> jax.Array:
    """H(π) = −Σ_v π(v) log π(v).

    `token_logprobs` computes the entropy of a language model's tokens without holding their logits.

    Args:
      logits: `[..., V]`, unnormalised; −inf excludes a token.

    Returns:
      `[...]` in nats, from 0 to log V.

    Examples:
      >>> print(entropy(jnp.zeros(4)))  # log 4
      1.386
    """
    log_p = jax.nn.log_softmax(upcast(logits))
    return -jnp.sum(_expectation_terms(log_p, jnp.zeros_like(log_p)), axis=-1)


def _expectation_terms(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """p (log p − log q) with 0 · log 0 = 0, in value and in gradient."""
    possible = log_p > -jnp.inf
    log_p = jnp.where(possible, log_p, 0)
    return jnp.where(possible, jnp.exp(log_p) * (log_p - jnp.where(possible, log_q, 0)), 0)
