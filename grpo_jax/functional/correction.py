"""Weights for what the trainer's policy and the sampler's disagree on, and masks for tokens better left out.

Both are constants of the loss: a weight multiplies the advantages, a mask takes the place
of the completion mask. Where a term is one number a row (sequence ratios, GSPO, GMPO, VESPO), a mask of
tokens would change that number: weigh tokens, or drop rows.

Weights are of a log-ratio log w = log π_old − log π_s, which the functions of `policy_gradient`
make: `token_log_ratio(old_logprobs, sampler_logprobs, mask)` for tokens, `sequence_log_ratio` for rows,
`sequence_mean_log_ratio` for rows by length.
"""

import jax
import jax.numpy as jnp

from grpo_jax.functional.policy_gradient import per_token


def truncated_weights(log_ratio: jax.Array, *, cap: float = 2.0) -> jax.Array:
    """min(w, C), truncated importance sampling. https://fengyao.notion.site/off-policy-rl

    Args:
      log_ratio: `[..., T]`, log w of tokens, or of rows (C = 3 is then usual).
      cap: C; 2 from the source, for tokens.

    Returns:
      `[..., T]` without gradient; 1 where masked.

    Examples:
      >>> print(truncated_weights(jnp.log(jnp.array([0.5, 4.0]))))
      [0.5 2. ]
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), cap))


def masked_weights(log_ratio: jax.Array, *, low: float = 0.5, high: float = 5.0) -> jax.Array:
    """w where low ≤ w ≤ high, else 0. On tokens IcePop (2510.18855).

    On rows, with low 0 and high 3, masked importance sampling of sequences.

    Args:
      log_ratio: `[..., T]`, log w of tokens or rows.
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


def rejection_weights(log_ratio: jax.Array, *, low: float = 0.999, high: float = 1.001) -> jax.Array:
    """1 where low ≤ w ≤ high, else 0: rejection.

    With `sequence_mean_log_ratio`, by the geometric mean of a row's ratios.

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


def on_policy_rows(log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, *, threshold: float) -> jax.Array:
    """The mask without rows whose A < 0 and meanₜ(−d) > threshold. DeepSeek-V3.2 (2512.02556), equation 9.

    What the policy has moved away from since it was sampled teaches it nothing by being punished.

    Args:
      log_ratio: `[..., T]`, `token_log_ratio` against the policy that sampled.
      advantages: `[...]`; or `[..., T]`, dropping only the tokens with A < 0 of such rows.
      mask: bool `[..., T]`.
      threshold: in nats a token. The paper names none, so there is no default.

    Returns:
      bool `[..., T]`.

    Examples:
      >>> log_ratio, mask = jnp.array([[-2.0, -1.0], [-2.0, -1.0]]), jnp.array([[True, True], [True, True]])
      >>> print(on_policy_rows(log_ratio, jnp.array([1.0, -1.0]), mask, threshold=0.5))
      [[ True  True]
       [False False]]
    """
    length = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=log_ratio.dtype), 1)
    drift = jnp.sum(jnp.where(mask, -jax.lax.stop_gradient(log_ratio), 0), axis=-1, keepdims=True) / length
    return mask & ~((per_token(advantages, log_ratio) < 0) & (drift > threshold))


def top_entropy_tokens(entropy: jax.Array, mask: jax.Array, *, share: float = 0.2) -> jax.Array:
    """The mask of the tokens whose entropy is not below the quantile 1 − share. 2506.01939.

    Quantile over all the tokens given: give it the whole optimizer batch. Sorts.

    Args:
      entropy: `[..., T]` in nats.
      mask: bool `[..., T]`.
      share: of tokens to keep; 0.2 from the paper.

    Returns:
      bool `[..., T]`; of n tokens, 1 + ⌊share (n − 1)⌋ are kept, and ties with the last of them.

    Examples:
      >>> entropy, mask = jnp.array([[0.1, 2.0, 0.3, 9.0]]), jnp.array([[True, True, True, False]])
      >>> print(top_entropy_tokens(entropy, mask, share=0.5))
      [[False  True  True False]]
    """
    descending = -jnp.sort(jnp.where(mask, -entropy, jnp.inf).ravel())
    count = jnp.sum(mask, dtype=jnp.float32)
    # A little more than the product: 0.2 · 10 must not be rounded down to 1.
    last = jnp.floor(share * (count - 1) * (1 + 1e-6)).astype(jnp.int32)
    return mask & (entropy >= descending[jnp.maximum(last, 0)])


def keep_rows(mask: jax.Array, keep: jax.Array) -> jax.Array:
    """The mask without the rows that are not kept. DAPO (2503.14476) leaves truncated rows out of the loss so.

    Rewards of such rows may still count in their group's baseline.

    Args:
      mask: bool `[..., T]`.
      keep: bool `[...]`, for instance `~truncated`.

    Returns:
      bool `[..., T]`.

    Examples:
      >>> print(keep_rows(jnp.array([[True, True], [True, False]]), jnp.array([False, True])))
      [[False False]
       [ True False]]
    """
    return mask & keep[..., None]
