"""A policy that is a table of bigrams, and a task for it: they compile at once, for tests of what looks at no model."""

import jax
import jax.numpy as jnp
from tiny import digit_task, says_three

from grpo_jax.models.policy import Policy
from grpo_jax.rl.programs import make_programs
from grpo_jax.training.phases import train

V, D = 8, 5  # tokens, width


def states(params, ids):
    """Returns hidden states that depend only on the token before."""
    return jnp.tanh(params["before"])[ids]


def states_of_rows(params, rows):
    return states(params, rows.predicting(rows.tokens)), None


def prefill(params, prompt, group_size, max_tokens):
    del group_size, max_tokens
    return states(params, prompt.ids[:, -1]), lambda cache, ids, step: (states(params, ids), cache), ()


def decoder(params):
    return lambda cache, ids, lengths, counts: (states(params, ids), cache)


POLICY = Policy(None, lambda params: params["after"], states_of_rows, prefill, decoder=decoder)
normal = jax.jit(jax.random.normal, static_argnums=1)
PARAMS = {name: normal(jax.random.key(number), (V, D)) for number, name in enumerate(["before", "after"])}


TASK = digit_task(says_three)


def train_grpo(task, config, run, programs=None, *, params=PARAMS, policy=POLICY, **options):
    """Trains a policy by GRPO, with programs of its own unless some are given. The arguments are those of `train`."""
    programs = programs or make_programs(policy, task, config)
    return train({"policy": params}, task, config, run, programs, phase="grpo", **options)
