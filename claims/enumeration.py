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

from claims.bench import Bench, make_setting
from claims.questions import COIN, START
from claims.testbeds import ARITHMETIC, first_prompts
from experiments.common import collect
from experiments.tasks.arithmetic import EOS_ID, MAX_TOKENS, PAD_ID
from experiments.whole_run import DeviceTask
from grpo_jax.data.prompts import Prompts
from grpo_jax.functional import generalized_advantages, rewards_at_end
from grpo_jax.models.decoder import heads
from grpo_jax.models.decoder.heads import Headed
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.ppo import critic_policy
from grpo_jax.sampling.sampler import Completions


class Tree(NamedTuple):
    """All completions of N prompts."""

    ids: np.ndarray  # int32 [L, T], the last token runs fastest
    mask: np.ndarray  # bool [L, T], true up to and including the EOS
    probabilities: np.ndarray  # float64 [N, V, …, V]: 0 where anything but padding follows an EOS


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
    vocabulary = len(policy.head(params)[0])
    rows = all_token_lists(vocabulary, length)
    # The probabilities of the last token depend on the tokens before it alone.
    asked = all_token_lists(vocabulary, length - 1)
    each = np.asarray(_next_tokens(policy, params, prompts.tokens, asked), np.float64)
    running = np.cumsum(rows == eos_id, axis=1) - (rows == eos_id) == 0
    chosen = each[:, np.arange(len(rows))[:, None] // vocabulary, np.arange(length), rows]
    chosen = np.where(running, chosen, rows == pad_id)
    return Tree(rows, running, chosen.prod(-1).reshape(-1, *[vocabulary] * length))


def rewards_of(task: DeviceTask, tree: Tree, prompts: Prompts) -> jax.Array:
    """Gold scores of all completions, `[N, L]`."""
    ids, mask = (jnp.broadcast_to(x, (len(prompts.examples), *x.shape)) for x in (tree.ids, tree.mask))
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
    values = _values(policy, critic, prompts.tokens, all_token_lists(vocabulary, tree.ids.shape[1] - 1))
    return jnp.repeat(values, vocabulary, axis=1)  # whatever the last token is


def quality(tree: Tree, rewards: jax.Array, estimates: jax.Array) -> dict[str, float]:
    """Returns how far estimates are from A(s, a) = Q(s, a) − V(s) of the tree's policy, without a discount.

    All are means over the tokens that the policy writes, divided by the mean of A²: the estimate 0 for every token has
    a bias and an error of 1. "bias²" is of (E[Â | s, a] − A)²; "tilt²" the same less its mean over the actions of a
    state, which no gradient sees, since it acts as a baseline; "variance" is of Var[Â | s, a]; "error" of
    E[(Â − A)² | s, a], the sum of bias and variance.

    Args:
      tree: all completions.
      rewards: `[N, L]`.
      estimates: Â of tokens, `[N, L, T]`.
    """
    shape, total = tree.probabilities.shape, np.zeros(5)
    rewarded, estimated = np.asarray(rewards, np.float64).reshape(shape), np.asarray(estimates, np.float64)
    for t in range(tree.mask.shape[1]):
        estimate = estimated[..., t].reshape(shape)
        expected = expectation(tree, estimate, t + 1)
        advantage = expectation(tree, rewarded, t + 1) - expectation(tree, rewarded, t)
        bias = expected - advantage
        parts = bias, bias - expectation(tree, bias, t), estimate - expected, estimate - advantage, advantage
        seen = tree.probabilities * tree.mask[:, t].reshape(shape[1:])
        total += [np.sum(seen * part**2) for part in parts]
    bias, tilt, variance, error = (float(x) for x in total[:4] / total[4])
    return {"bias²": bias, "tilt²": tilt, "variance": variance, "error": error, "error, tilt": tilt + variance}


def expectation(tree: Tree, values: np.ndarray, t: int) -> np.ndarray:
    """Returns the expectation of a function of completions, given their first t tokens, with axes of 1 behind those."""
    behind = tuple(range(1 + t, tree.probabilities.ndim))
    mass = tree.probabilities.sum(behind, keepdims=True)
    return (tree.probabilities * values).sum(behind, keepdims=True) / np.where(mass > 0, mass, 1)


@partial(jax.jit, static_argnums=0)
def _next_tokens(policy: Policy, params: Params, prompt: PromptTokens, rows: jax.Array) -> jax.Array:
    """Probabilities of each token of rows and of the one behind, `[N, rows, T, V]`."""
    forced = jnp.broadcast_to(jnp.pad(rows, [(0, 0), (0, 1)]), (len(prompt), len(rows), rows.shape[1] + 1))
    hidden = policy.hidden(params, prompt, forced)
    return jax.nn.softmax(jnp.einsum("ngtd,vd->ngtv", hidden, policy.head(params)[0]))


@partial(jax.jit, static_argnums=0)
def _values(policy: Policy, critic: Headed, prompt: PromptTokens, rows: jax.Array) -> jax.Array:
    forced = jnp.broadcast_to(rows, (len(prompt), *rows.shape))
    return heads.values(policy, critic, prompt, forced, jnp.ones(forced.shape, bool))


# ---- the question `gae_bias_variance`

POLICY, CRITIC = decoder_policy(ARITHMETIC.model), critic_policy(ARITHMETIC.model)
gae = jax.jit(generalized_advantages, static_argnames="num_steps")


def rows(bench: Bench) -> tuple[dict[str, dict[str, list[float]]], str]:
    """Returns the table, for the policy of each seed, and no note."""
    settings = [make_setting(method="ppo", kl_coef=0.0, coin=x, steps=20, eval_every=20) for x in (0.0, 1.0)]
    table = dict[str, dict[str, list[float]]]()
    for trained, tossed in zip(*map(bench.trained, settings), strict=True):
        collect(table, _rows_of_seed(bench.task(settings[0], 0), trained, tossed))
    low, high = table["λ 0"], table["λ 1"]
    table["better of λ 0 and 1"] = {name: np.minimum(low[name], high[name]).tolist() for name in low}
    return table, ""


def _rows_of_seed(task: DeviceTask, trained: Params, tossed: Params) -> dict[str, dict[str, float]]:
    prompts = first_prompts(task.task.heldout, 8)
    tree = all_completions(POLICY, trained["policy"], prompts, length=MAX_TOKENS, eos_id=EOS_ID, pad_id=PAD_ID)
    rewards, mask = rewards_of(task, tree, prompts), jnp.broadcast_to(tree.mask, (8, *tree.mask.shape))

    def row(critic: Headed, lam: float, steps: int | None = None) -> dict[str, float]:
        values = values_of(CRITIC, critic, tree, prompts)
        return quality(tree, rewards, gae(rewards_at_end(rewards, mask), values, mask, lam=lam, num_steps=steps))

    untrained = trained["critic"]._replace(head=jnp.zeros(ARITHMETIC.model.hidden_size))
    table = {START: row(untrained, 0.9), COIN: row(tossed["critic"], 0.9)}
    table |= {f"λ {lam:g}": row(trained["critic"], lam) for lam in (0.0, 0.5, 0.9, 1.0)}
    return table | {f"K {steps}": row(trained["critic"], 0.9, steps) for steps in (2, 3)}
