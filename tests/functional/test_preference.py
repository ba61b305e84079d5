"""Losses on preferences: pairs that are far apart or empty, and a batch over devices."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PAIR_CASES
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

OF_PAIRS = [name for name, case in PAIR_CASES.items() if "rejected" in case.arrays]


@pytest.mark.parametrize("name", OF_PAIRS)
def test_extreme_pairs_have_finite_losses_and_gradients(name):
    # Probability 1, almost 0, an empty completion (which fills up a batch), and the wrong order by far.
    loss, far = PAIR_CASES[name].function, np.array([0.0, -1e4, 0.0, -1e4], np.float32)
    arrays = {"chosen": far, "rejected": far[::-1].copy(), "ref_chosen": far[::-1].copy(), "ref_rejected": far}
    arrays |= {"chosen_length": np.array([3, 0, 0, 1]), "rejected_length": np.array([0, 3, 0, 1])}
    arrays = {name: x for name, x in arrays.items() if name in inspect.signature(loss).parameters}
    losses, gradients = jax.jit(jax.value_and_grad(lambda x: jnp.sum(loss(**x)), allow_int=True))(arrays)
    for x in (losses, gradients["chosen"], gradients["rejected"]):
        assert np.isfinite(x).all()


def test_scores_that_are_far_apart():
    chosen = np.array([1e4, -1e4, 1e30, -1e30], np.float32)
    losses, pull = jax.vjp(F.bradley_terry_loss, chosen, -chosen)
    assert_allclose(losses, [0, 2e4, 0, 2e30], rtol=1e-6)
    for gradient, sign in zip(pull(jnp.ones(4)), (-1, 1), strict=True):
        assert_array_equal(gradient, sign * np.array([0, 1, 0, 1]))
