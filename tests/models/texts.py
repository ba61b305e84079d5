"""States of whole texts, for tests."""

import jax.numpy as jnp

from grpo_jax.models.layout import rows_of_texts


def states_of_texts(policy, params, ids, texts):
    """Returns the state at each token `[R, S, D]`: texts get one token more, for states are those before a token."""
    ids, texts = (jnp.pad(jnp.asarray(x), [(0, 0), (0, 1)]) for x in (ids, texts))
    return policy.states(params, rows_of_texts(ids, texts))[0][:, 0, 1:]
