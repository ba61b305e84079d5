"""Trained parameters by the shape of their tree: `join` puts together what `split` took apart."""

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.models.heads import Headed
from grpo_jax.models.params import Adapted, join, split

BASE = {"embedding": jnp.arange(6.0).reshape(3, 2), "layers": {"kernel": jnp.ones((2, 2))}}
ADAPTERS = {"layers": {"kernel": {"a": jnp.ones((2, 1)), "b": jnp.zeros((1, 2))}}}
ADAPTED = Adapted(BASE, ADAPTERS, jnp.float32(2))
HEAD = jnp.linspace(-1, 1, 2)
TEACHER = {"embedding": jnp.full((4, 5), 3.0)}

# name -> parameters, and what of them is trained
CASES = {
    "plain": (BASE, BASE),
    "adapted": (ADAPTED, ADAPTERS),
    "headed": (Headed(BASE, HEAD), Headed(BASE, HEAD)),
    "headed and adapted": (Headed(ADAPTED, HEAD), Headed(ADAPTERS, HEAD)),
    "a head on another model's decoder": (Headed(None, HEAD), Headed(None, HEAD)),
    "a policy": ({"policy": BASE}, {"policy": BASE}),
    "with a critic": (
        {"policy": ADAPTED, "critic": Headed(ADAPTED, HEAD)},
        {"policy": ADAPTERS, "critic": Headed(ADAPTERS, HEAD)},
    ),
    "with a head that shares the decoder": (
        {"policy": ADAPTED, "critic": Headed(None, HEAD)},
        {"policy": ADAPTERS, "critic": Headed(None, HEAD)},
    ),
    "with a teacher": ({"policy": ADAPTED, "teacher": TEACHER}, {"policy": ADAPTERS}),
    "with an adapted teacher": ({"policy": BASE, "teacher": ADAPTED}, {"policy": BASE}),
    "with all": (
        {"policy": BASE, "critic": Headed(BASE, HEAD), "teacher": TEACHER},
        {"policy": BASE, "critic": Headed(BASE, HEAD)},
    ),
}


def assert_same_arrays(one, other):
    """The trees have one structure, and their leaves are the same arrays, not copies."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(x is y for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_split_is_joined_again_and_copies_nothing(name):
    params, expected = CASES[name]
    trained, frozen = split(params)
    assert_same_arrays(trained, expected)
    assert_same_arrays(join(trained, frozen), params)


@pytest.mark.parametrize("name", ["plain", "headed", "a policy"])
def test_without_adapters_and_teacher_nothing_is_frozen(name):
    assert not jax.tree.leaves(split(CASES[name][0])[1])
