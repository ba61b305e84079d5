"""How fast are losses composed of functions, compared with the same expressions written by hand?

The benchmark times forward and backward on [64, 16, 1024] tokens (64 prompts, 16 completions). Each side is one jitted
function. The sides take turns, and times are medians. The run takes half a minute on two CPU cores. Expect ratios
between 0.8 and 1.5: our functions guard against overflow and invalid values in masked slots.

  python -m experiments.benchmarks.losses
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from grpo_jax import functional as F

Loss = Callable[..., jax.Array]  # (logprobs, old_logprobs, ref_logprobs, advantages, mask, weights) -> a scalar


@dataclass(frozen=True)
class Options:
    """The sizes of the arrays, and the number of timed calls."""

    prompts: int = 64
    group_size: int = 16
    tokens: int = 1024
    repeats: int = 41


def composed(term: F.Term, **constants) -> Loss:
    """Σ w · term."""

    def loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, weights):
        per_token = term(logprobs, old_logprobs, advantages, mask, **constants)
        return F.weighted_sum(per_token, weights, mask)

    return loss


def by_hand(per_token: Loss) -> Loss:
    """Σ w · loss, for a function (d, ρ, A, log π, log π_old, mask) -> loss of each token."""

    def loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, weights):
        d = jnp.where(mask, logprobs - old_logprobs, 0)
        values = per_token(d, jnp.exp(d), advantages[..., None], logprobs, old_logprobs, mask)
        return jnp.sum(jnp.where(mask, weights * values, 0))

    return loss


def clip(d, rho, a, *_):
    return -jnp.minimum(rho * a, jnp.clip(rho, 0.8, 1.2) * a)


def two_sided(d, rho, a, *_):
    return -jnp.minimum(jnp.minimum(rho, 4.0) * a, jnp.clip(rho, 0.8, 1.2) * a)


def cispo(d, rho, a, logprobs, *_):
    return -jax.lax.stop_gradient(jnp.minimum(rho, 5.0)) * a * logprobs


def sapo(d, rho, a, *_):
    tau = jnp.where(a > 0, 1.0, 1.05)
    return -a * 4 / tau * jax.nn.sigmoid(tau * (rho - 1))


def sequence(d, rho, a, *_, mean=False):
    length = jnp.sum(_[-1], axis=-1, keepdims=True) if mean else 1
    return clip(d, jnp.exp(jnp.clip(jnp.sum(d, axis=-1, keepdims=True) / length, -40, 40)), a)


def gspo(d, rho, a, logprobs, old_logprobs, mask):
    mean = jnp.sum(d, axis=-1, keepdims=True) / jnp.sum(mask, axis=-1, keepdims=True)
    return clip(d, jnp.exp(jax.lax.stop_gradient(mean) + logprobs - jax.lax.stop_gradient(logprobs)), a)


def gmpo(d, rho, a, logprobs, old_logprobs, mask):
    clipped = jnp.where(a > 0, jnp.minimum(d, 0.4), jnp.maximum(d, -0.4))
    mean = jnp.sum(clipped, axis=-1, keepdims=True) / jnp.sum(mask, axis=-1, keepdims=True)
    return -a * jnp.exp(mean)


def dppo(d, rho, a, logprobs, old_logprobs, mask):
    moved = jax.lax.stop_gradient(jnp.exp(logprobs) - jnp.exp(old_logprobs))
    dropped = jnp.where(a > 0, moved > 0.2, moved < -0.2)
    return jnp.where(dropped, 0, -rho * a) + 1e-3 * d * d


def vespo(d, rho, a, logprobs, *_):
    log_weight = jnp.clip(jnp.sum(jnp.clip(d, -20, 20), axis=-1, keepdims=True), jnp.log(1e-8), 20)
    k, lam = jnp.where(a >= 0, 2.0, 3.0), jnp.where(a >= 0, 3.0, 2.0)
    phi = jax.lax.stop_gradient(jnp.exp(lam + k * log_weight - lam * jnp.exp(log_weight)))
    return -phi * a * logprobs


def grpo_by_hand(logprobs, old_logprobs, ref_logprobs, advantages, mask, weights):
    """Computes the default `grpo_loss` with its KL term and its metrics."""
    d, a = jnp.where(mask, logprobs - old_logprobs, 0), advantages[..., None]
    rho, x = jnp.exp(d), jnp.where(mask, logprobs - ref_logprobs, 0)
    kl = jnp.expm1(-x) + x
    loss = jnp.sum(jnp.where(mask, weights * (clip(d, rho, a) + 0.04 * kl), 0))
    low, high = (rho < 0.8) & (a < 0) & mask, (rho > 1.2) & (a > 0) & mask
    return loss, [jnp.sum(jnp.where(mask, rho, 0)), jnp.sum(low), jnp.sum(high), jnp.sum(kl), jnp.sum(mask)]


def grpo(logprobs, old_logprobs, ref_logprobs, advantages, mask, weights):
    return F.grpo_loss(logprobs, old_logprobs, advantages, mask, ref_logprobs=ref_logprobs, weights=weights)


def divergence(function: Loss) -> Loss:
    """Σ w · D(π, π_ref)."""
    return lambda logprobs, old, ref, a, mask, weights: jnp.sum(weights * function(logprobs, ref))


def of_ratio(surrogate: Loss, log_ratio: Loss = F.token_log_ratio) -> Loss:
    return composed(F.ratio_term(log_ratio, surrogate))


PAIRS: dict[str, tuple[Loss, Loss]] = {
    "grpo_loss, KL and metrics": (grpo, grpo_by_hand),
    "clipped_surrogate": (of_ratio(F.clipped_surrogate), by_hand(clip)),
    "clipped_surrogate, δ 4": (of_ratio(partial(F.clipped_surrogate, delta=4.0)), by_hand(two_sided)),
    "unclipped_surrogate": (of_ratio(F.unclipped_surrogate), by_hand(lambda d, rho, a, *_: -rho * a)),
    "cispo_surrogate": (of_ratio(F.cispo_surrogate), by_hand(cispo)),
    "sapo_surrogate": (of_ratio(F.sapo_surrogate), by_hand(sapo)),
    "sequence_log_ratio": (of_ratio(F.clipped_surrogate, F.sequence_log_ratio), by_hand(sequence)),
    "sequence_mean_log_ratio": (
        of_ratio(F.clipped_surrogate, F.sequence_mean_log_ratio),
        by_hand(partial(sequence, mean=True)),
    ),
    "gspo_log_ratio": (of_ratio(F.clipped_surrogate, F.gspo_log_ratio), by_hand(gspo)),
    "reinforce_term": (composed(F.reinforce_term), by_hand(lambda d, rho, a, logprobs, *_: -a * logprobs)),
    "gmpo_term": (composed(F.gmpo_term), by_hand(gmpo)),
    "dppo_term": (composed(F.dppo_term), by_hand(dppo)),
    "vespo_term": (composed(F.vespo_term), by_hand(vespo)),
    "kl_k1": (divergence(F.kl_k1), divergence(lambda p, q: p - q)),
    "kl_abs": (divergence(F.kl_abs), divergence(lambda p, q: jnp.abs(p - q))),
    "kl_k2": (divergence(F.kl_k2), divergence(lambda p, q: (p - q) ** 2 / 2)),
    "kl_k3": (divergence(F.kl_k3), divergence(lambda p, q: jnp.expm1(q - p) + p - q)),
    "kl_unbiased": (
        divergence(F.kl_unbiased),
        divergence(lambda p, q: (p - q) ** 2 / 2 + jax.lax.stop_gradient(jnp.expm1(q - p) + p - q - (p - q) ** 2 / 2)),
    ),
    "critic_loss": (
        lambda v, old, r, a, mask, weights: jnp.sum(F.critic_loss(v, r, old_values=old)),
        lambda v, old, r, a, mask, weights: jnp.sum(
            jnp.maximum((v - r) ** 2, (old + jnp.clip(v - old, -0.2, 0.2) - r) ** 2) / 2
        ),
    ),
    "bradley_terry_loss": (
        lambda c, old, r, a, mask, weights: jnp.sum(F.bradley_terry_loss(c, r)),
        lambda c, old, r, a, mask, weights: jnp.sum(-jax.nn.log_sigmoid(c - r)),
    ),
}


def medians(functions: list[Callable], arguments: tuple, repeats: int) -> list[float]:
    """Returns the median milliseconds of each function, timed in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 3):
        for function, separate in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if repeat >= 3:  # the first calls compile and warm up
                separate.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(separate) for separate in times]


def gradient(loss: Loss) -> Callable:
    """Returns a compiled function of the value and its gradient in the log-probabilities."""

    def with_aux(*arguments):
        out = loss(*arguments)
        return out if isinstance(out, tuple) else (out, None)

    return jax.jit(jax.value_and_grad(with_aux, has_aux=True))


def main(options: Options) -> None:
    """Prints the table."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = options.prompts, options.group_size, options.tokens
    logprobs = -jax.random.exponential(keys[0], shape)
    old_logprobs = logprobs + 0.1 * jax.random.normal(keys[1], shape)
    ref_logprobs = logprobs + 0.1 * jax.random.normal(keys[2], shape)
    advantages = jax.random.normal(keys[3], shape[:-1])
    mask = jnp.arange(options.tokens) < jax.random.randint(keys[4], (*shape[:-1], 1), 1, options.tokens + 1)
    arguments = logprobs, old_logprobs, ref_logprobs, advantages, mask, F.token_mean_weights(mask)

    title = f"forward and backward on {list(shape)}, {jax.devices()[0].device_kind}"
    table = Table("function", "ms", "by hand, ms", "ratio", title=title)
    for name, pair in PAIRS.items():
        composed_ms, by_hand_ms = medians([gradient(loss) for loss in pair], arguments, options.repeats)
        table.add_row(name, f"{composed_ms:.2f}", f"{by_hand_ms:.2f}", f"{composed_ms / by_hand_ms:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
