"""Losses of the reward model and of the critic."""

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import takes


@takes(chosen="number | ...", rejected="number | ...")
def bradley_terry_loss(
    chosen: jax.Array, rejected: jax.Array, *, margin: jax.Array | float = 0.0, center_coef: float = 0.0
) -> jax.Array:
    """−log σ(r_c − r_r − margin) + c (r_c + r_r)², per pair. Bradley & Terry 1952; margin from Llama 2 (2307.09288).

    Args:
      chosen: `[...]`, reward of the preferred completion.
      rejected: `[...]`, reward of the other.
      margin: by how much better the preferred one was said to be; broadcasts. Default 0.
      center_coef: c, holds rewards near 0 (2312.09244 uses 0.01). Default 0.

    Returns:
      `[...]`; take the mean.

    Examples:
      >>> print(bradley_terry_loss(jnp.array(2.0), jnp.array(1.0)))  # log(1 + e⁻¹)
      0.3133
    """
    return jax.nn.softplus(margin - (chosen - rejected)) + center_coef * jnp.square(chosen + rejected)


@takes(values="number | ...", returns="number | ...", old_values="number | ...")
def critic_loss(
    values: jax.Array, returns: jax.Array, *, old_values: jax.Array | None = None, clip: float = 0.2
) -> jax.Array:
    """½ (V − sg R)², or with old values ½ max((V − R)², (clip(V, V_old ± ε) − R)²). PPO (1707.06347), equation 9.

    ½ and the clipping are those of OpenAI's baselines.

    Args:
      values: `[..., T]`, V with gradient.
      returns: `[..., T]`, R: `generalized_advantages` + V at sampling time, or the terminal reward.
      old_values: `[..., T]`, V at sampling time. None: no clipping.
      clip: ε, in units of the reward; 0.2 as in published systems.

    Returns:
      `[..., T]`.

    Examples:
      >>> print(critic_loss(jnp.array(1.0), jnp.array(3.0)))
      2.0
    """
    returns = jax.lax.stop_gradient(returns)
    error = jnp.square(values - returns)
    if old_values is not None:
        old_values = jax.lax.stop_gradient(old_values)
        clipped = old_values + jnp.clip(values - old_values, -clip, clip)
        error = jnp.maximum(error, jnp.square(clipped - returns))
    return error / 2
