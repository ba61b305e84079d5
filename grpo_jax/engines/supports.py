"""Supports of tokens that a server sampled, computed from the parameters that it held.

With top-k, top-p or min-p a server reports log-probabilities over the tokens that it could draw, but not which ones
these are. The trainer limits its own logits in the same way. Rounding decides if a token at the border is in.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.config import SamplingConfig
from grpo_jax.devices import Devices, jit_on_devices, map_rows
from grpo_jax.functional.numerics import softcapped
from grpo_jax.functional.products import einsum
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.sampling.sampler import Completions, keep_support, limit_logits, limits_of
from grpo_jax.scoring import states_of
from grpo_jax.step import Batch

_AT_ONCE = 128  # tokens whose logits are held
_SLACK = 0.1  # of the rounding, in the limits that decide if a token is at the border


def make_add_supports(
    policy: Policy, sampling: SamplingConfig, devices: Devices, rounding: float
) -> Callable[[Params, PromptTokens, jax.Array, Completions], tuple[Completions, jax.Array]]:
    """Makes the program that adds supports to completions of a server.

    Args:
      policy: The functions of the model.
      sampling: The sampling options of the run.
      devices: The devices that share the rows.
      rounding: The largest difference in nats between log-probabilities of trainer and server that is rounding.

    Returns:
      The program (params, prompt, temperature, completions) -> completions, and how far the server's log-probabilities
      are from the trainer's over the same support, `[N, G, T]`.
    """

    def add(
        params: Params, prompt: PromptTokens, temperature: jax.Array, out: Completions
    ) -> tuple[Completions, jax.Array]:
        head, softcap = policy.head(params)

        def token_support(token: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            hidden, chosen, temperature = token
            logits = softcapped(einsum("d,vd->v", hidden, head), softcap)
            return support_of(logits / jnp.where(temperature == 0, 1, temperature), chosen, sampling, rounding)

        def supports(hidden: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
            shape = hidden.shape[:-1]
            flat = hidden.reshape(-1, hidden.shape[-1]), *(jnp.broadcast_to(x, shape).ravel() for x in others)
            results = jax.lax.map(token_support, flat, batch_size=_AT_ONCE)
            return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), results)

        batch = Batch(prompt, out.completion_ids, out.completion_mask, temperature)
        states, mask = states_of(policy, params, batch), out.completion_mask
        ids, logprobs, kept_logprobs, is_border = states.map(supports, out.completion_ids, temperature)
        with_supports = out._replace(
            processed_logprobs=out.sampler_logprobs,
            sampler_logprobs=jnp.where(mask, out.sampler_logprobs + kept_logprobs - logprobs, 0),
            support_ids=ids,
            is_border=is_border & mask,
        )
        return with_supports, jnp.abs(out.sampler_logprobs - logprobs)

    return jit_on_devices(map_rows(add, devices), 0, devices=devices)


def support_of(
    logits: jax.Array, chosen: jax.Array, sampling: SamplingConfig, rounding: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes the support of a token.

    Args:
      logits: The logits after temperature, `[V]`.
      chosen: The token, an int, which is always in its support.
      sampling: The sampling options of the run.
      rounding: See `make_add_supports`.

    Returns:
      The ids that are kept of the support, int32 `[K]`; the token's log-probability over the whole support, and over
      the kept ids; and true if rounding of the logits may change the former by more than `rounding`.
    """
    limited = _limit(logits, sampling, 0.0)
    is_missing = limited[chosen] == -jnp.inf
    limited = limited.at[chosen].set(logits[chosen])
    ids, kept_logprob = keep_support(limited, chosen, sampling.kept_tokens)
    slack = _SLACK * rounding
    widest = _limit(logits, sampling, slack)
    lowest = jnp.min(jnp.where(widest > -jnp.inf, widest, jnp.inf))
    widest = jnp.where(logits >= lowest - slack, logits, -jnp.inf)  # tokens that are as likely
    spread = jax.nn.logsumexp(widest) - jax.nn.logsumexp(_limit(logits, sampling, -slack))
    return ids, logits[chosen] - jax.nn.logsumexp(limited), kept_logprob, is_missing | (spread > rounding)


def _limit(logits: jax.Array, sampling: SamplingConfig, slack: float) -> jax.Array:
    """Limits tokens as vLLM does, which applies min-p first, with limits that are wider by `slack`."""
    logits = limit_logits(logits, limits_of(0, 1.0, sampling.min_p * (1 - slack)), ())
    top_p = sampling.top_p + slack if sampling.top_p < 1 else 1.0
    return limit_logits(logits, limits_of(sampling.top_k, top_p, 0.0), ())
