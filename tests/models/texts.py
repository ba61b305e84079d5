"""States of whole texts, for tests."""

from grpo_jax.models.layout import rows_of_texts


def states_of_texts(policy, params, ids, texts):
    """Returns the state at each token `[R, S, D]`."""
    return policy.states(params, rows_of_texts(ids, texts))[0][:, 0, 1:]
