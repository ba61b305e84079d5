"""Exact advantages where all completions can be enumerated, and the errors of estimates of them.

A completion has exactly T tokens: after its EOS there is padding with probability 1. A function of completions is an
array `[N, V, …, V]` with an axis for each token: an expectation given the first t tokens is a sum over the later axes.

Letters: N prompts, P their width, V tokens of the vocabulary, T of a completion, L = Vᵀ completions.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.whole_run import DeviceTask
from grpo_jax.data.types import Prompts
from grpo_jax.models import heads
from grpo_jax.models.heads import Headed
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.sampling.sampler import Completions


class Tree(NamedTuple):
    """All completions of N prompts."""

    ids: np.ndarray  # int32 [L, T], the last token runs fastest
    mask: np.ndarray  # bool [L, T], true up to and including the EOS
    probabilities: np.ndarray  # float64 [N, V, …, V]: 0 where anything but padding follows an EOS


class Quality(NamedTuple):
    """Errors of an estimate of advantages: means over the tokens that the policy writes, divided by the mean of A². The
    estimate 0 for every token has a bias and an error of 1."""

    bias: float  # (E[Â | s, a] − A)²
    tilt: float  # the same less its mean over the actions of a state, which no gradient sees: it acts as a baseline
    variance: float  # Var[Â | s, a]
    error: float  # E[(Â − A)² | s, a], the sum of bias and variance


def all_token_lists(vocabulary: int, length: int) -> np.ndarray:
    """All lists of `length` tokens, int32 `[V^length, length]`; the last token changes fastest."""
    numbers = np.unravel_index(np.arange(vocabulary**length), (vocabulary,) * length)
    return np.stack(numbers, axis=-1).astype(np.int32)


def all_completions(policy: Policy, params: Params, prompts: Prompts, *, length: int, eos_id: int, pad_id: int) -> Tree:
    """All completions of prompts, and how likely a policy writes each at temperature 1.

    Args:
      policy: the model's functions.
      params: its parameters.
      prompts: N.
      length: T.
      eos_id: ends a completion.
      pad_id: fills it up.
    """
    vocabulary = policy.unembedding(params).shape[0]
    rows = all_token_lists(vocabulary, length)
    # The probabilities of the last token depend on the tokens before it alone.
    asked = all_token_lists(vocabulary, length - 1)
    each = np.asarray(_next_tokens(policy, params, prompts.ids, prompts.mask, asked), np.float64)
    running = np.cumsum(rows == eos_id, axis=1) - (rows == eos_id) == 0
    chosen = each[:, np.arange(len(rows))[:, None] // vocabulary, np.arange(length), rows]
    chosen = np.where(running, chosen, rows == pad_id)
    return Tree(rows, running, chosen.prod(-1).reshape(-1, *[vocabulary] * length))


def rewards_of(task: DeviceTask, tree: Tree, prompts: Prompts) -> jax.Array:
    """Gold scores of all completions, `[N, L]`."""
    ids, mask = (jnp.broadcast_to(x, (len(prompts.ids), *x.shape)) for x in (tree.ids, tree.mask))
    unread = jnp.zeros(ids.shape)
    written = Completions(ids, mask, unread, None, jnp.zeros(ids.shape[:2], bool))
    return task.gold(task.targets(prompts.examples), written, jax.random.key(0))


def values_of(policy: Policy, critic: Headed, tree: Tree, prompts: Prompts) -> jax.Array:
    """A critic's values before each token of all completions, `[N, L, T]`.

    Args:
      policy: the functions of its decoder.
      critic: its parameters.
      tree: all completions.
      prompts: N.
    """
    vocabulary = tree.probabilities.shape[1]
    values = _values(policy, critic, prompts.ids, prompts.mask, all_token_lists(vocabulary, tree.ids.shape[1] - 1))
    return jnp.repeat(values, vocabulary, axis=1)  # whatever the last token is


def quality(tree: Tree, rewards: jax.Array, estimates: jax.Array) -> Quality:
    """How far estimates are from A(s, a) = Q(s, a) − V(s) of the policy that the tree is of, without a discount.

    Args:
      tree: all completions.
      rewards: `[N, L]`.
      estimates: Â of tokens, `[N, L, T]`.
    """
    shape, total = tree.probabilities.shape, np.zeros(5)
    rewarded, estimated = np.asarray(rewards, np.float64).reshape(shape), np.asarray(estimates, np.float64)
    for t in range(tree.mask.shape[1]):
        estimate = estimated[..., t].reshape(shape)
        expected = given(tree, estimate, t + 1)
        advantage = given(tree, rewarded, t + 1) - given(tree, rewarded, t)
        bias = expected - advantage
        parts = bias, bias - given(tree, bias, t), estimate - expected, estimate - advantage, advantage
        seen = tree.probabilities * tree.mask[:, t].reshape(shape[1:])
        total += [np.sum(seen * part**2) for part in parts]
    return Quality(*total[:4] / total[4])


def given(tree: Tree, values: np.ndarray, t: int) -> np.ndarray:
    """The expectation of a function of completions given their first t tokens, with axes of 1 behind those."""
    behind = tuple(range(1 + t, tree.probabilities.ndim))
    mass = tree.probabilities.sum(behind, keepdims=True)
    return (tree.probabilities * values).sum(behind, keepdims=True) / np.where(mass > 0, mass, 1)


@partial(jax.jit, static_argnums=0)
def _next_tokens(policy: Policy, params: Params, ids: jax.Array, mask: jax.Array, rows: jax.Array) -> jax.Array:
    """Probabilities of each token of rows and of the one behind, `[N, rows, T, V]`."""
    given = jnp.broadcast_to(jnp.pad(rows, [(0, 0), (0, 1)]), (len(ids), len(rows), rows.shape[1] + 1))
    hidden = policy.hidden(params, ids, mask, given)
    return jax.nn.softmax(jnp.einsum("ngtd,vd->ngtv", hidden, policy.unembedding(params)))


@partial(jax.jit, static_argnums=0)
def _values(policy: Policy, critic: Headed, ids: jax.Array, mask: jax.Array, rows: jax.Array) -> jax.Array:
    given = jnp.broadcast_to(rows, (len(ids), *rows.shape))
    return heads.values(policy, critic, ids, mask, given, jnp.ones(given.shape, bool))
