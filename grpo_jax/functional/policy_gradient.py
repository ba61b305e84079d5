"""Log-ratios, surrogates, and policy-gradient terms for a loss.

A *log-ratio* is `[..., T]`: d = log π − log π_old, of each token, or of the completion and repeated on its tokens.
A *surrogate* maps (log_ratio, advantages) to a loss per token, elementwise.
A *term* maps (logprobs, old_logprobs, advantages, mask) to a loss per token: `grpo_loss` takes one. `ratio_term` makes
a term of a log-ratio and a surrogate; methods that look at more than a ratio are terms themselves.

All are to be minimised, and leave weights and the sum to the caller. Constants are keywords.
T tokens; advantages are `[...]`, one per completion, or `[..., T]`, one per token.
"""

from collections.abc import Callable, Container
from functools import update_wrapper
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import (
    AxisName,
    check_above,
    device_index_and_count,
    is_known,
    maybe_all_gather,
    maybe_psum,
    takes,
    upcast,
)

# (logprobs, old_logprobs, advantages, mask, **constants) -> loss per token
Term = Callable[..., jax.Array]

# Keeps exp and its square finite in float32, since 0 · inf is NaN. Every clip acts long before e⁴⁰.
MAX_LOG_RATIO = 40.0

# Forms of the arguments of log-ratios, surrogates and terms, for `takes`.
_ADVANTAGES = "number | ... | ... T"
_TOKENS = {"logprobs": "... T", "old_logprobs": "... T", "mask": "... T"}
_SURROGATE = {"log_ratio": "number | ... T", "advantages": _ADVANTAGES}
_TERM = _TOKENS | {"advantages": _ADVANTAGES}


@takes(**_TOKENS)
def token_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """dₜ = log π(oₜ) − log π_old(oₜ).

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats, under the policy in the denominator of the ratio.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, 0 where masked, for any inputs there.

    Examples:
      >>> print(token_log_ratio(jnp.array([-1.0, -9.0]), jnp.array([-1.5, 0.0]), jnp.array([True, False])))
      [0.5 0. ]
    """
    # Masked before any exp: padding may hold anything, and an exp that overflows there has a gradient of NaN even if
    # it is multiplied by 0 later.
    difference = upcast(logprobs) - jax.lax.stop_gradient(upcast(old_logprobs))
    return jnp.where(mask, _bounded(difference), 0)


def _bounded(log_ratio: jax.Array) -> jax.Array:
    # Not jnp.clip, whose gradient takes several more arrays.
    bound = jnp.asarray(MAX_LOG_RATIO, log_ratio.dtype)
    return jax.lax.clamp(-bound, log_ratio, bound)


@takes(**_TOKENS)
def sequence_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """d = Σₜ mₜ (log π(oₜ) − log π_old(oₜ)) = log π(o)/π_old(o), of the whole completion.

    With `sequence_mean_weights` the loss is the mean over completions.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, one number per completion, repeated on its tokens; 0 where masked.

    Examples:
      >>> logprobs, old_logprobs = jnp.array([-1.0, -2.0, -9.0]), jnp.array([-1.5, -3.0, -1.0])
      >>> print(sequence_log_ratio(logprobs, old_logprobs, jnp.array([True, True, False])))
      [1.5 1.5 0. ]
    """
    total = jnp.sum(token_log_ratio(logprobs, old_logprobs, mask), axis=-1, keepdims=True)
    return jnp.where(mask, _bounded(total), 0)


@takes(**_TOKENS)
def sequence_mean_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """d = Σₜ mₜ (log π(oₜ) − log π_old(oₜ)) / |o|, the mean over a completion. GSPO (2507.18071), equation 7.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, one number per completion, repeated on its tokens; 0 where masked.

    Examples:
      >>> logprobs, old_logprobs = jnp.array([-1.0, -2.0, -9.0]), jnp.array([-1.5, -3.0, -1.0])
      >>> print(sequence_mean_log_ratio(logprobs, old_logprobs, jnp.array([True, True, False])))
      [0.75 0.75 0.  ]
    """
    mean = _completion_mean(token_log_ratio(logprobs, old_logprobs, mask), mask)
    return jnp.where(mask, mean, 0)


@takes(**_TOKENS)
def gspo_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
    """log sₜ = sg(mean d) + log π(oₜ) − sg(log π(oₜ)). GSPO-token (2507.18071), equation 14.

    Its value is `sequence_mean_log_ratio`, its gradient that of `token_log_ratio`.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> logprobs, old_logprobs = jnp.array([-1.0, -2.0, -9.0]), jnp.array([-1.5, -3.0, -1.0])
      >>> print(gspo_log_ratio(logprobs, old_logprobs, jnp.array([True, True, False])))
      [0.75 0.75 0.  ]
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    return jnp.where(mask, jax.lax.stop_gradient(_completion_mean(log_ratio, mask) - log_ratio) + log_ratio, 0)


@takes(**_SURROGATE)
def clipped_surrogate(
    log_ratio: jax.Array,
    advantages: jax.Array,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float = float("inf"),
) -> jax.Array:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A), at most −δA where A < 0; ρ = exp(d). PPO (1707.06347), equation 7.

    Where A < 0 the clip leaves −ρA without bound as ρ grows; a finite δ is that bound. Dual-clip PPO (1912.09729,
    equation 5) calls it c = 3, INTELLECT-2's two-sided clip (2505.07291) δ = 4.

    Args:
      log_ratio: `[..., T]`.
      advantages: `[...]` or `[..., T]`.
      epsilon_low: 0.2 from PPO. Under sequence ratios GSPO takes 3e-4.
      epsilon_high: 0.2 from PPO; DAPO's clip-higher is 0.28.
      delta: δ, the bound of ρ if A < 0, above 1. Infinite from PPO: no bound.

    Returns:
      `[..., T]`.

    Raises:
      ValueError: delta is not above 1 (a traced value is not checked).

    Examples:
      >>> log_ratio = jnp.log(jnp.array([1.5, 0.5, 9.0]))
      >>> print(clipped_surrogate(log_ratio, jnp.array(1.0)))  # gains no more above 1.2
      [-1.2 -0.5 -1.2]
      >>> print(clipped_surrogate(log_ratio, jnp.array(-1.0), delta=4.0))
      [1.5 0.8 4. ]
    """
    check_above(1, delta=delta)  # else it would bound a policy that has not moved
    # Comparisons rather than minimum and clip: their gradients are halved at ties, so that a ratio at exactly its bound
    # would lose gradient, and they take several more arrays.
    advantages, ratio = per_token(advantages, log_ratio), jnp.exp(log_ratio)
    good = advantages > 0
    bound = jnp.where(good, 1 + epsilon_high, 1 - epsilon_low)
    beyond = jnp.where(good, ratio > bound, ratio < bound)
    bounded = jnp.where(beyond, bound, ratio)
    if not (is_known(delta) and delta == float("inf")):  # one comparison less for the common case
        bounded = jnp.where((ratio > delta) & ~good, delta, bounded)
    return -advantages * bounded


@takes(**_SURROGATE)
def unclipped_surrogate(log_ratio: jax.Array, advantages: jax.Array) -> jax.Array:
    """−ρA, without a clip. Conservative policy iteration; PPO (1707.06347), equation 6.

    Args:
      log_ratio: `[..., T]`.
      advantages: `[...]` or `[..., T]`.

    Returns:
      `[..., T]`.

    Examples:
      >>> print(unclipped_surrogate(jnp.log(jnp.array([1.5, 0.5])), jnp.array(1.0)))
      [-1.5 -0.5]
    """
    return -jnp.exp(log_ratio) * per_token(advantages, log_ratio)


@takes(**_SURROGATE)
def cispo_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, *, epsilon_low: float = 1.0, epsilon_high: float = 4.0
) -> jax.Array:
    """−sg(clip(ρ, 1 − ε_low, 1 + ε_high)) · A · d. CISPO (2506.13585), equation 4.

    The clip bounds the weight of a token and leaves it its gradient. The paper has log π for d, which has the same
    gradient, since log π_old is constant.

    Args:
      log_ratio: `[..., T]`, per token.
      advantages: `[...]` or `[..., T]`.
      epsilon_low: 1.0, no lower bound, as in the paper.
      epsilon_high: 4.0, a cap of 5 on ρ (2510.13786). Below 0 the cap would be below 1, which is refused.

    Returns:
      `[..., T]`.

    Raises:
      ValueError: epsilon_high is a negative number (a traced value is not checked).

    Examples:
      >>> print(cispo_surrogate(jnp.log(jnp.array([10.0])), jnp.array(1.0)))  # −5 log 10
      [-11.513]
    """
    if is_known(epsilon_high) and epsilon_high < 0:
        raise ValueError(f"epsilon_high is {epsilon_high}: CISPO's cap 1 + epsilon_high must be at least 1")
    weight = jnp.clip(jnp.exp(log_ratio), 1 - epsilon_low, 1 + epsilon_high)
    return -jax.lax.stop_gradient(weight) * per_token(advantages, log_ratio) * log_ratio


@takes(**_SURROGATE)
def sapo_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> jax.Array:
    """−A (4/τ) σ(τ (ρ − 1)), a soft clip with one τ for A > 0 and one for A ≤ 0. SAPO (2511.20347).

    Its slope in ρ is −A at ρ = 1, as without a clip, and falls smoothly on both sides.

    Args:
      log_ratio: `[..., T]`, per token.
      advantages: `[...]` or `[..., T]`.
      tau_positive: τ where A > 0, above 0; 1.0 from the paper.
      tau_negative: τ where A ≤ 0, above 0; 1.05 from the paper, a tighter clip.

    Returns:
      `[..., T]`.

    Raises:
      ValueError: a τ is not above 0 (a traced value is not checked).

    Examples:
      >>> print(sapo_surrogate(jnp.zeros(1), jnp.array(1.0)))  # 4 σ(0)
      [-2.]
    """
    check_above(0, tau_positive=tau_positive, tau_negative=tau_negative)
    advantages = per_token(advantages, log_ratio)
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    return -advantages * (4 / tau) * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1))


def ratio_term(log_ratio: Callable[..., jax.Array], surrogate: Callable[..., jax.Array]) -> Term:
    """Makes the term surrogate(log_ratio(logprobs, old_logprobs, mask), advantages).

    Args:
      log_ratio: `token_log_ratio`, `sequence_log_ratio`, `sequence_mean_log_ratio` or `gspo_log_ratio`.
      surrogate: (log_ratio, advantages, **constants) -> `[..., T]`.

    Returns:
      (logprobs, old_logprobs, advantages, mask, **constants) -> `[..., T]`; constants are the surrogate's.

    Examples:
      >>> gspo = ratio_term(gspo_log_ratio, clipped_surrogate)
      >>> logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[True, True]])
      >>> print(gspo(logprobs, logprobs, jnp.array([0.5]), mask, epsilon_low=3e-4, epsilon_high=4e-4))
      [[-0.5 -0.5]]
    """

    @takes(**_TERM)
    def term(
        logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, **constants: Any
    ) -> jax.Array:
        refuse_epsilon(constants)
        return surrogate(log_ratio(logprobs, old_logprobs, mask), advantages, **constants)

    return update_wrapper(term, surrogate, ())  # `inspect.signature` then finds the constants of the surrogate


@takes(**_TERM)
def reinforce_term(logprobs: jax.Array, old_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    """−A log π. REINFORCE (Williams 1992).

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]`, not read: without a ratio, samples must be of the current policy.
      advantages: `[...]` or `[..., T]`.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> logprobs, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[True, False]])
      >>> print(reinforce_term(logprobs, logprobs, jnp.array([0.5]), mask))
      [[ 0.5 -0. ]]
    """
    del old_logprobs
    logprobs = jnp.where(mask, upcast(logprobs), 0)
    return -jnp.where(mask, per_token(advantages, logprobs), 0) * logprobs


@takes(**_TERM)
def gmpo_term(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    epsilon_low: float = 0.4,
    epsilon_high: float = 0.4,
) -> jax.Array:
    """−A exp(meanₜ d′), d′ = σ min(σd, σ clip(d, −ε_low, ε_high)), σ = sign A. GMPO (2507.20673).

    This is the geometric mean of the ratios of a completion, each clipped in log space on the side to which A pushes
    it. It is one number per completion, so use it with `sequence_mean_weights`.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      advantages: `[...]`; or `[..., T]`, of one sign in a completion.
      mask: bool `[..., T]`.
      epsilon_low: the bound of the log-ratio, not of the ratio; 0.4 from the paper.
      epsilon_high: the bound of the log-ratio, not of the ratio; 0.4 from the paper.

    Returns:
      `[..., T]`, one number per completion, repeated on its tokens; 0 where masked.

    Examples:
      >>> logprobs, old_logprobs, mask = jnp.array([-1.0, -1.0]), jnp.array([-2.0, -1.0]), jnp.array([True, True])
      >>> print(gmpo_term(logprobs, old_logprobs, jnp.array(1.0), mask))  # exp((0.4 + 0)/2)
      [-1.221 -1.221]
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    # All tokens share one exp, so that a masked advantage of NaN would reach the gradient of every token.
    advantages = jnp.where(mask, per_token(advantages, log_ratio), 0)
    # The sign of the completion: a token whose advantage a correction has set to 0 is clipped like the others.
    good = jnp.sum(advantages, axis=-1, keepdims=True) > 0
    beyond = jnp.where(good, log_ratio > epsilon_high, log_ratio < -epsilon_low)
    clipped = jnp.where(beyond, jnp.where(good, epsilon_high, -epsilon_low), log_ratio)
    return jnp.where(mask, -advantages * jnp.exp(_completion_mean(jnp.where(mask, clipped, 0), mask)), 0)


@takes(**_TERM)
def dppo_term(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    threshold: float = 0.2,
    penalty: float = 1e-3,
) -> jax.Array:
    """−keep · ρA + c (log ρ)², keep = 0 where A > 0 and π − π_s > th, or A < 0 and π − π_s < −th. DPPO-TV (2602.04879).

    A token is dropped if its probability has moved by more than th, whatever its ratio, so that rare tokens may still
    change. The square stays on every token.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats, **as the sampler reported them** (π_s), not recomputed.
      advantages: `[...]` or `[..., T]`.
      mask: bool `[..., T]`.
      threshold: th, in probability; 0.2 from the paper.
      penalty: c; 1e-3 from published systems, 0 for none.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> logprobs, sampler_logprobs = jnp.log(jnp.array([0.9, 0.02])), jnp.log(jnp.array([0.5, 0.01]))
      >>> print(dppo_term(logprobs, sampler_logprobs, jnp.array(1.0), jnp.array([True, True]), penalty=0.0))
      [ 0. -2.]
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    moved = jax.lax.stop_gradient(jnp.exp(upcast(logprobs)) - jnp.exp(upcast(old_logprobs)))
    sign = jnp.sign(per_token(advantages, log_ratio))
    dropped = ((sign > 0) & (moved > threshold)) | ((sign < 0) & (moved < -threshold))
    loss = jnp.where(dropped, 0, unclipped_surrogate(log_ratio, advantages)) + penalty * jnp.square(log_ratio)
    return jnp.where(mask, loss, 0)


@takes(**_TERM)
def vespo_term(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> jax.Array:
    """−φ A log π, φ = sg exp(λ + k log W − λW), W = Πₜ ρₜ. VESPO (2602.10693).

    φ is a weight of the completion's ratio in the shape of a gamma density, 1 at W = 1. log W is bounded to
    [log 1e-8, 20] and each of its terms to ±20, as in TRL.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      advantages: `[...]`; or `[..., T]`. Signs may differ within a completion: all its tokens share W, and each token
        takes k and λ by the sign of its own A, which is the only factor that its φ multiplies.
      mask: bool `[..., T]`.
      k_positive: k where A ≥ 0; 2 in TRL.
      lambda_positive: λ where A ≥ 0; 3 in TRL.
      k_negative: k where A < 0; 3 in TRL.
      lambda_negative: λ where A < 0; 2 in TRL.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> logprobs, mask = jnp.array([-1.0, -2.0]), jnp.array([True, True])
      >>> print(vespo_term(logprobs, logprobs, jnp.array(1.0), mask))
      [1. 2.]
    """
    log_ratio = jnp.clip(jax.lax.stop_gradient(token_log_ratio(logprobs, old_logprobs, mask)), -20, 20)
    log_weight = jnp.clip(jnp.sum(log_ratio, axis=-1, keepdims=True), jnp.log(1e-8), 20)
    positive = per_token(advantages, log_ratio) >= 0
    k, lam = jnp.where(positive, k_positive, k_negative), jnp.where(positive, lambda_positive, lambda_negative)
    phi = jnp.exp(lam + k * log_weight - lam * jnp.exp(log_weight))
    return phi * reinforce_term(logprobs, old_logprobs, advantages, mask)


@takes(logprobs="... T", mask="... T", advantages=_ADVANTAGES)
def token_covariance(
    logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, *, axis_name: AxisName = None
) -> jax.Array:
    """covₜ = (A − Ā)(log π − mean log π), means over the tokens of the batch. 2505.22617, equation 10.

    An update on tokens of large covariance lowers the entropy.

    Args:
      logprobs: `[..., T]` in nats.
      advantages: `[...]` or `[..., T]`.
      mask: bool `[..., T]`.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., T]` without gradient, 0 where masked.

    Examples:
      >>> logprobs, mask = jnp.array([[-1.0], [-3.0]]), jnp.array([[True], [True]])
      >>> print(token_covariance(logprobs, jnp.array([1.0, -1.0]), mask))
      [[1.]
       [1.]]
    """
    logprobs = jax.lax.stop_gradient(jnp.where(mask, upcast(logprobs), 0))
    advantages = jax.lax.stop_gradient(jnp.where(mask, per_token(advantages, logprobs), 0))
    sums = [jnp.sum(x, dtype=logprobs.dtype) for x in (mask, advantages, logprobs)]
    count, *totals = (maybe_psum(total, axis_name) for total in sums)
    mean_advantage, mean_logprob = (total / jnp.maximum(count, 1) for total in totals)
    return jnp.where(mask, (advantages - mean_advantage) * (logprobs - mean_logprob), 0)


@takes(**_TERM)
def clip_cov_term(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    key: jax.Array,
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    axis_name: AxisName = None,
) -> jax.Array:
    """`clipped_surrogate`, but 0 on a few random tokens among those with low < cov < high. Clip-Cov (2505.22617).

    cov is `token_covariance`.

    Tokens are chosen from the whole batch: pass all of it in one piece, or spread over devices with `axis_name`, which
    gathers one number per token from all of them. Each microbatch would choose its own tokens.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      advantages: `[...]` or `[..., T]`.
      mask: bool `[..., T]`.
      key: consumed; a new one each step, the same on all devices.
      share: the share of all tokens that are chosen, at least one; 2e-4 from the paper. Static.
      covariance_low: 1 from the paper.
      covariance_high: 5 from the paper.
      epsilon_low: 0.2 from PPO; the authors' scripts have 1.
      epsilon_high: 0.2 from PPO; the authors' scripts have 1.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> logprobs, mask = jnp.array([[-1.0, -5.0, -1.0]]), jnp.array([[True, True, True]])
      >>> advantages = jnp.array([[1.0, -1.0, 0.0]])  # covariances 4/3, 8/3, 0
      >>> print(clip_cov_term(logprobs, logprobs, advantages, mask, key=jax.random.key(0), share=1.0))
      [[ 0.  0. -0.]]
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    loss = clipped_surrogate(log_ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    covariance = token_covariance(logprobs, advantages, mask, axis_name=axis_name)
    # Clipped tokens have no gradient to lose.
    free = mask & (loss <= unclipped_surrogate(log_ratio, advantages))
    candidates = free & (covariance > covariance_low) & (covariance < covariance_high)
    # Each device draws for all devices, so that the choice does not depend on their number.
    index, count = device_index_and_count(axis_name)
    numbers = jax.random.uniform(key, (count, *mask.shape))[index]
    chosen = _largest(numbers, candidates, mask, share, axis_name)
    return jnp.where(mask & ~chosen, loss, 0)


@takes(**_TERM)
def kl_cov_term(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    share: float = 2e-4,
    penalty: float = 1.0,
    axis_name: AxisName = None,
) -> jax.Array:
    """−ρA, and + c |d| on the tokens of largest `token_covariance`. KL-Cov (2505.22617).

    Tokens are chosen from the whole batch: pass all of it in one piece, or spread over devices with `axis_name`, which
    gathers one number per token from all of them. Each microbatch would choose its own tokens.

    Args:
      logprobs: `[..., T]` in nats, with gradient.
      old_logprobs: `[..., T]` in nats.
      advantages: `[...]` or `[..., T]`.
      mask: bool `[..., T]`.
      share: the share of all tokens that are chosen, at least one; 2e-4 from the paper. Static.
      penalty: c; 1 from the paper (0.1 in verl's configuration).
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> logprobs, old_logprobs = jnp.array([[-1.0, -5.0]]), jnp.array([[-1.5, -5.0]])
      >>> mask = jnp.array([[True, True]])
      >>> print(kl_cov_term(logprobs, old_logprobs, jnp.array([[1.0, 0.0]]), mask, share=1.0))  # −e^½ + ½
      [[-1.149  0.   ]]
    """
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    covariance = token_covariance(logprobs, advantages, mask, axis_name=axis_name)
    chosen = _largest(covariance, mask, mask, share, axis_name)
    # Not jnp.abs: on policy, at d = 0, its slope is 1.
    distance = log_ratio * jax.lax.stop_gradient(jnp.sign(log_ratio))
    loss = unclipped_surrogate(log_ratio, advantages) + jnp.where(chosen, penalty * distance, 0)
    return jnp.where(mask, loss, 0)


def refuse_epsilon(constants: Container[str]) -> None:
    """Refuses the single ε of many libraries, and names the two constants that replace it."""
    if "epsilon" in constants:
        raise TypeError("there is no epsilon: a term that clips has epsilon_low and epsilon_high, which may be equal")


@takes(like="number | ... T", advantages=_ADVANTAGES)
def per_token(advantages: jax.Array, like: jax.Array) -> jax.Array:
    """Gives advantages of completions `[...]` or of tokens `[..., T]` the rank of `like` `[..., T]`."""
    advantages = jnp.asarray(advantages)  # a plain number has no shape
    return advantages[..., None] if advantages.ndim == jnp.ndim(like) - 1 else advantages


def _completion_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Averages over the tokens of a completion, `[..., 1]`; values are 0 where masked."""
    return jnp.sum(values, axis=-1, keepdims=True) / jnp.maximum(
        jnp.sum(mask, axis=-1, keepdims=True, dtype=values.dtype), 1
    )


def _largest(
    numbers: jax.Array, candidates: jax.Array, mask: jax.Array, share: float, axis_name: AxisName
) -> jax.Array:
    """Chooses the candidates of largest numbers, bool; as many as `share` of the tokens, at least one."""
    numbers = maybe_all_gather(jnp.where(candidates, numbers, -jnp.inf).ravel(), axis_name)
    most = max(int(share * numbers.size), 1)  # static, since the mask cannot have more tokens than this
    num_tokens = maybe_psum(jnp.sum(mask, dtype=jnp.float32), axis_name)
    num_chosen = jnp.maximum((share * num_tokens).astype(jnp.int32), 1)
    values, places = jax.lax.top_k(numbers, most)
    chosen = (jnp.arange(most) < num_chosen) & (values > -jnp.inf)
    all_devices = jnp.zeros(numbers.size, bool).at[places].set(chosen)
    return all_devices.reshape(-1, *mask.shape)[device_index_and_count(axis_name)[0]]
