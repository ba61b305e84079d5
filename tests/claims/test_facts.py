"""Checks claims that arithmetic settles on the library's own functions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from claims.questions import FACTS
from claims.testbeds import ARITHMETIC
from grpo_jax import functional as F
from grpo_jax.devices import update_flops
from grpo_jax.models.policy import decoder_policy
from grpo_jax.planning.memory import Shape, estimate
from grpo_jax.rl.ppo import add_critic

REWARDS = jnp.array([0.1, 0.9, 0.4, 0.3, 0.7, 0.2, 0.8, 0.55])
ZERO_ONE = jnp.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])


def right(count):
    return jnp.array([1.0] * count + [0.0] * (8 - count))


def pairs():
    i, j = np.triu_indices(8, 1)
    differences = (np.arange(8) == i[:, None]).astype(int) - (np.arange(8) == j[:, None])
    assert len(differences) == 28
    return np.linalg.matrix_rank(differences) == 28


def all_right():
    return not F.group_advantages(right(8)).any()


def one_wrong():
    # μ = 7/8 and s² = 8 · 7/64 / 7 = 1/8: mean |A| = 2 · 7/64 · √8 = 0.619.
    of_seven, of_one = (float(jnp.abs(F.group_advantages(right(n))).mean()) for n in (7, 1))
    np.testing.assert_allclose([of_seven, of_one], 14 / 64 * np.sqrt(8), rtol=1e-5)
    return of_seven < 0.1


def all_wrong():
    assert F.group_advantages(REWARDS / 10).max() > 0
    return bool(F.group_advantages(right(0)).max() > 0)


def constant():
    return np.allclose(F.group_advantages(REWARDS + 3), F.group_advantages(REWARDS), atol=1e-5)


def scale():
    return np.allclose(F.group_advantages(5 * REWARDS - 2), F.group_advantages(REWARDS), atol=1e-4)


def ranks():
    assert not np.allclose(F.rank_advantages(REWARDS), F.group_advantages(REWARDS), atol=1e-2)
    return np.allclose(F.rank_advantages(ZERO_ONE), F.group_advantages(ZERO_ONE), atol=1e-5)


def clip():
    def slope(advantage, ratio):
        def loss(logprob):
            return F.clipped_surrogate(logprob, jnp.array([advantage]), epsilon_low=0.2, epsilon_high=0.2).sum()

        return float(jax.grad(loss)(jnp.log(jnp.array([ratio]))).sum())

    assert slope(1.0, 1.1) < 0 == slope(1.0, 1.5)  # nothing pulls a ratio of 1.5 back to 1.2
    return slope(-1.0, 1.5) == 0


def leave_one_out():
    return np.allclose(F.leave_one_out_advantages(REWARDS), 8 / 7 * F.centered_advantages(REWARDS), atol=1e-6)


def operations(critic, num_prompts, group_size):
    """Operations of a step of additions: sampling, the reference, a critic's values, and the update."""
    params = jax.eval_shape(decoder_policy(ARITHMETIC.model).init, jax.random.key(0))
    params = jax.eval_shape(partial(add_critic, ARITHMETIC.model), params) if critic else {"policy": params}
    size = {role: sum(leaf.size for leaf in jax.tree.leaves(tree)) for role, tree in params.items()}
    tokens = num_prompts * (6 + group_size * ARITHMETIC.max_tokens)  # a group's prompt of 6 tokens counts once
    scored = 2.0 * tokens * (2 * size["policy"] + size.get("critic", 0))  # two operations a parameter and token
    return scored + update_flops(params, None, tokens)


def compute():
    share = operations(False, 32, 8) / operations(True, 32, 8)
    np.testing.assert_allclose(share, 0.56, atol=0.01)
    return 0.4 < share < 0.6


def compute_of_groups():
    share = operations(False, 32, 8) / operations(True, 8 * 32, 1)
    np.testing.assert_allclose(share, 0.26, atol=0.01)
    return 0.7 < share < 0.9


def memory():
    """Compares the bytes of trained parameters, of the optimizer, and of the reference."""
    grpo, ppo = (estimate(ARITHMETIC.model, Shape(critic=critic)) for critic in ("none", "own"))
    share = grpo.held / (ppo.params + ppo.optimizer + grpo.start)
    np.testing.assert_allclose(share, 0.57, atol=0.01)
    return 0.4 < share < 0.6


def test_facts_hold_or_not_as_the_page_says():
    assert {fact.id: bool(globals()[fact.id]()) for fact in FACTS} == {fact.id: fact.holds for fact in FACTS}
