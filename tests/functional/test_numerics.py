"""What is said of arguments that have other shapes, or are no arrays: test_properties.py asks every function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import functional as F


def ones(*shape):
    return np.ones(shape, np.float32)


X, MASK, A = ones(2, 3), np.ones((2, 3), bool), ones(2)
HIDDEN, WEIGHT, IDS = ones(2, 3, 4), ones(7, 4), np.zeros((2, 3), np.int32)
COLUMN = A[:, None]  # of which broadcasting would make every completion's number with every other's


@pytest.mark.parametrize(
    ("call", "words"),
    [
        # The function, the argument, the shape that it has to have and why, and the shape that it has.
        (
            lambda: F.grpo_loss(X, ones(2, 4), A, MASK),
            ["grpo_loss", "old_logprobs", "[2, 3]", "[..., T]", "logprobs has [2, 3]", "[2, 4]"],
        ),
        (lambda: F.grpo_loss(X, X, ones(3), MASK), ["advantages", "[2] or [2, 3]", "[...] or [..., T]", "has [3]"]),
        (lambda: F.grpo_loss(ones(), X, A, MASK), ["logprobs", "[..., T], but has []"]),
        (lambda: F.grpo_loss(X, X, COLUMN, MASK), ["grpo_loss", "advantages", "[2, 1]"]),
        (lambda: F.token_logprobs(HIDDEN, ones(4, 7), IDS), ["unembedding", "[V, 4]", "[V, D]", "ids has [2, 3]"]),
        (lambda: F.token_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT[1:]), ["ref_unembedding", "[7, 4]"]),
        (lambda: F.gdpo_advantages(ones(4, 2, 3), weights=ones(1)), ["gdpo_advantages", "weights", "[4]"]),
        (lambda: F.per_token(COLUMN, X), ["per_token", "advantages", "[2] or [2, 3]"]),
        (lambda: F.clipped_surrogate(X, COLUMN), ["clipped_surrogate", "advantages", "log_ratio has [2, 3]", "[2, 1]"]),
        (lambda: F.clip_cov_term(X, X, COLUMN, MASK, key=jax.random.key(0)), ["clip_cov_term", "advantages"]),
        (lambda: F.grpo_loss(X, X, 1.0, MASK), ["advantages", "[...] or [..., T]", "float"]),
        (lambda: F.token_logprobs(0.5, WEIGHT, IDS), ["hidden", "[..., D]", "float"]),
        (lambda: F.token_logprobs(HIDDEN, WEIGHT, [[0] * 3] * 2), ["ids", "[...]", "list", "jnp.array(ids)"]),
        (lambda: F.group_advantages(1.0), ["rewards", "[..., G]", "float"]),
        (lambda: F.sequence_mean_weights([True]), ["mask", "[..., T]", "list", "jnp.array(mask)"]),
        (lambda: F.overlong_penalty((3,), max_length=9, buffer=2), ["lengths", "tuple"]),
    ],
)
def test_a_shape_is_named_with_what_was_expected(call, words):
    with pytest.raises((AssertionError, TypeError)) as caught:
        jax.jit(call)()
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_a_term_that_mixes_up_shapes_is_refused_when_it_is_called():
    wrong = F.PRESETS["grpo"]._replace(
        term=lambda logprobs, old, advantages, mask: F.whiten(advantages, mask), constants={}
    )
    with pytest.raises(AssertionError, match=r"whiten: mask .*\[2\]"):
        wrong.loss(X, X, A, MASK, ref_logprobs=X)


def test_numbers_and_arrays_of_numpy_are_taken_where_they_may_be():
    assert F.group_advantages(np.array([1.0, 1.0], np.float32)).shape == (2,)
    assert F.kl_k3(-1.0, -1.0) == 0
    assert F.clipped_surrogate(X, 1.0).shape == F.clipped_surrogate(X, jnp.array(1.0)).shape == (2, 3)
    assert F.clipped_surrogate(jnp.array(0.0), 1.0).shape == ()
    assert F.ratio_term(F.token_log_ratio, F.unclipped_surrogate)(X, X, 1.0, MASK).shape == (2, 3)


def test_a_missing_argument_is_named_with_the_function():
    with pytest.raises(TypeError, match=r"grpo_loss.*completion_mask"):
        F.grpo_loss(X, X, A)


def test_one_epsilon_is_told_that_there_are_two():
    for term in (F.grpo_loss, F.ratio_term(F.token_log_ratio, F.unclipped_surrogate)):
        with pytest.raises(TypeError, match=r"epsilon_low and epsilon_high"):
            term(X, X, A, MASK, epsilon=0.2)
