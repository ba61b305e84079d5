"""A policy that is a Markov chain of second order."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.policy import Policy


def markov_policy(on_decode=lambda step, num_rows: None):
    """Parameters are logits [V, V, V] of the next token after the two before it.

    The cache is the last token but one, so a sampler that loses or shuffles it gets other
    distributions. A prompt of one token follows an imagined token 0.
    """

    def context(prompt):
        return jnp.where(prompt.mask[:, -2], prompt.ids[:, -2], 0), prompt.ids[:, -1]

    def states(table, rows):
        last = rows.predicting(rows.tokens)
        before_prompt = jnp.pad(jnp.where(rows.prompt.mask, rows.prompt.ids, 0), [(0, 0), (1, 0)])[:, :-1]
        before_parts = last[..., : rows.inputs].reshape(len(last), -1)
        return table[rows.predicting(jnp.concatenate([before_prompt, before_parts], axis=-1)), last], None

    def prefill(table, prompt, group_size, max_tokens):
        before, last = context(prompt)

        def decode(cache, ids, step):
            jax.debug.callback(on_decode, step, ids.size)
            return table[cache, ids], ids

        return table[before, last], decode, jnp.broadcast_to(last[:, None], (last.shape[0], group_size))

    def select(cache, chosen):
        return cache.ravel()[chosen][:, None]

    return Policy(lambda key: None, lambda table: jnp.eye(table.shape[-1]), states, prefill, select=select)


def random_table(vocab_size, seed=0):
    return np.random.default_rng(seed).normal(size=(vocab_size,) * 3).astype(np.float32)
