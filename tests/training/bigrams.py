"""A policy that is a table of bigrams: it compiles at once, for tests of what looks at no model."""

import jax
import jax.numpy as jnp

from grpo_jax.models.policy import Policy

V, D = 8, 5  # tokens, width


def states(params, ids):
    """Of the tokens before."""
    return jnp.tanh(params["before"])[ids]


def states_of_rows(params, rows):
    return states(params, rows.predicting(rows.tokens)), None


def prefill(params, prompt_ids, prompt_mask, group_size, max_tokens):
    del prompt_mask, group_size, max_tokens
    return states(params, prompt_ids[:, -1]), lambda cache, ids, step: (states(params, ids), cache), ()


def decoder(params):
    return lambda cache, ids, lengths: (states(params, ids), cache)


POLICY = Policy(None, lambda params: params["after"], states_of_rows, prefill, decoder=decoder)
normal = jax.jit(jax.random.normal, static_argnums=1)
PARAMS = {name: normal(jax.random.key(number), (V, D)) for number, name in enumerate(["before", "after"])}
