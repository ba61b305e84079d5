"""Corrections for a sampler that rounds differently or a policy that has moved on, and masks that leave tokens out.

Weights multiply the advantages, `per_token(advantages, mask) * weights`, and so do the masks `on_policy_completions`
and `top_entropy_tokens`, `jnp.where(keep, per_token(advantages, keep), 0)`. So only the policy term is weighted, as in
TRL: KL, entropy bonus, sequence ratios and the loss's weights stay the same. `keep_completions` replaces the completion
mask: completions that it drops have no loss at all. All are constants, without gradient.

Weights are functions of a log-ratio log w = log π_old − log π_s, where π_s is the sampler's distribution. Functions of
`policy_gradient` compute it: `token_log_ratio(old_logprobs, sampler_logprobs, mask)` of tokens, `sequence_log_ratio` of
completions, and `sequence_mean_log_ratio` of completions by length.
"""

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import AxisName, maybe_all_gather, maybe_psum, takes
from grpo_jax.functional.policy_gradient import per_token


@takes(log_ratio="number | ...")
def truncated_weights(log_ratio: jax.Array, *, cap: float = 2.0) -> jax.Array:
    """min(w, C), truncated importance sampling. https://fengyao.notion.site/off-policy-rl

    Args:
      log_ratio: `[..., T]`, log w of tokens, or of completions (C = 3 is then usual).
      cap: C; 2 from the source, for tokens.

    Returns:
      `[..., T]` without gradient; 1 where masked.

    Examples:
      >>> print(truncated_weights(jnp.log(jnp.array([0.5, 4.0]))))
      [0.5 2. ]
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap))


@takes(log_ratio="number | ...")
def masked_weights(log_ratio: jax.Array, *, low: float = 0.5, high: float = 5.0) -> jax.Array:
    """w where low ≤ w ≤ high, else 0. For tokens this is IcePop (2510.18855).

    For completions, with low 0 and high 3, it is TRL's masked importance sampling of sequences.

    Args:
      log_ratio: `[..., T]`, log w of tokens or completions.
      low: 0.5 from IcePop.
      high: 5 from IcePop.

    Returns:
      `[..., T]` without gradient.

    Examples:
      >>> print(masked_weights(jnp.log(jnp.array([0.25, 0.75, 8.0]))))
      [0.   0.75 0.  ]
    """
    weight = jax.lax.stop_gradient(jnp.exp(log_ratio))
    return jnp.where((weight < low) | (weight > high), 0, weight)  # a NaN stays visible


@takes(log_ratio="number | ...")
def rejection_weights(log_ratio: jax.Array, *, low: float = 0.999, high: float = 1.001) -> jax.Array:
    """1 where low ≤ w ≤ high, else 0. With `sequence_mean_log_ratio`, verl's geometric rejection of completions.

    Args:
      log_ratio: `[..., T]`, log w.
      low: 0.999, as in verl's recipes for geometric means.
      high: 1.001, as in verl's recipes for geometric means.

    Returns:
      `[..., T]` without gradient.

    Examples:
      >>> print(rejection_weights(jnp.log(jnp.array([0.9, 1.0]))))
      [0. 1.]
    """
    weight = jax.lax.stop_gradient(jnp.exp(log_ratio))
    return jnp.where((weight < low) | (weight > high), 0, jnp.where(jnp.isnan(weight), weight, 1))


@takes(log_ratio="... T", mask="... T", advantages="number | ... | ... T")
def on_policy_completions(
    log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, *, threshold: float
) -> jax.Array:
    """m without completions of A < 0 and meanₜ(−d) > threshold. Off-policy masking, DeepSeek-V3.2 (2512.02556), eq. 9.

    A completion that the policy has become unlikely to write is not pushed down further. The mask multiplies the
    advantages.

    Args:
      log_ratio: `[..., T]`, `token_log_ratio` against the policy that sampled.
      advantages: `[...]`; or `[..., T]`, which drops only the tokens of A < 0.
      mask: bool `[..., T]`.
      threshold: in nats per token. The paper names none, so there is no default.

    Returns:
      bool `[..., T]`.

    Examples:
      >>> log_ratio, mask = jnp.array([[-2.0, -1.0], [-2.0, -1.0]]), jnp.array([[True, True], [True, True]])
      >>> print(on_policy_completions(log_ratio, jnp.array([1.0, -1.0]), mask, threshold=0.5))
      [[ True  True]
       [False False]]
    """
    length = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=log_ratio.dtype), 1)
    drift = jnp.sum(jnp.where(mask, -jax.lax.stop_gradient(log_ratio), 0), axis=-1, keepdims=True) / length
    return mask & ~((per_token(advantages, log_ratio) < 0) & (drift > threshold))


@takes(entropy="... T", mask="... T")
def top_entropy_tokens(
    entropy: jax.Array, mask: jax.Array, *, share: float = 0.2, axis_name: AxisName = None
) -> jax.Array:
    """m where H ≥ its quantile 1 − share. 2506.01939.

    The quantile is over the tokens of the whole batch: pass all of it in one piece, or spread over devices with
    `axis_name`, which gathers one number per token from all of them. The tokens are sorted. The mask multiplies the
    advantages.

    Args:
      entropy: `[..., T]` in nats.
      mask: bool `[..., T]`.
      share: the share of tokens to keep; 0.2 from the paper.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      bool `[..., T]`; true for the 1 + ⌊share (n − 1)⌋ of n tokens with the largest entropy, and ties with the last.

    Examples:
      >>> entropy, mask = jnp.array([[0.1, 2.0, 0.3, 9.0]]), jnp.array([[True, True, True, False]])
      >>> print(top_entropy_tokens(entropy, mask, share=0.5))
      [[False  True  True False]]
    """
    descending = -jnp.sort(maybe_all_gather(jnp.where(mask, -entropy, jnp.inf).ravel(), axis_name))
    count = maybe_psum(jnp.sum(mask, dtype=jnp.float32), axis_name)
    # A little more than the product: 0.2 · 10 must not be rounded down to 1.
    last = jnp.floor(share * (count - 1) * (1 + 1e-6)).astype(jnp.int32)
    return mask & (entropy >= descending[jnp.maximum(last, 0)])


@takes(mask="... T", keep="...")
def keep_completions(mask: jax.Array, keep: jax.Array) -> jax.Array:
    """m · keep, without the completions that are not kept. DAPO (2503.14476) leaves truncated ones out of the loss.

    The result replaces the completion mask. The rewards of dropped completions may still count in the group's baseline,
    and the completions in the mean over completions: pass `num_completions` to the weights.

    Args:
      mask: bool `[..., T]`.
      keep: bool `[...]`, for instance `~truncated`.

    Returns:
      bool `[..., T]`.

    Examples:
      >>> print(keep_completions(jnp.array([[True, True], [True, False]]), jnp.array([False, True])))
      [[False False]
       [ True False]]
    """
    return mask & keep[..., None]
