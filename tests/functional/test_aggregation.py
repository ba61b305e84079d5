from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    constant_length_weights,
    sequence_mean_weights,
    sequence_sum_weights,
    token_mean_weights,
)

WEIGHTS = {
    "token_mean": token_mean_weights,
    "sequence_mean": sequence_mean_weights,
    "sequence_sum": sequence_sum_weights,
    "constant_length": constant_length_weights,
    "constant_length_given": partial(constant_length_weights, max_length=9),
}
every_weight = pytest.mark.parametrize("name", WEIGHTS)
few = settings(max_examples=25, deadline=None, derandomize=True)

# Rows of 3, 0, 5 and 1 tokens. B = 3: the second is not counted. Nine tokens in all.
RAGGED = np.arange(5) < np.array([3, 0, 5, 1])[:, None]


# --- numbers derived by hand ---

BY_HAND = {
    "token_mean": [1 / 9, 0, 1 / 9, 1 / 9],
    "sequence_mean": [1 / (3 * 3), 0, 1 / (5 * 3), 1 / (1 * 3)],  # 1/(|o| · B)
    "sequence_sum": [1 / 3, 0, 1 / 3, 1 / 3],
    "constant_length": [1 / (3 * 5), 0, 1 / (3 * 5), 1 / (3 * 5)],  # as wide as the mask
    "constant_length_given": [1 / (3 * 9), 0, 1 / (3 * 9), 1 / (3 * 9)],
}


@every_weight
def test_by_hand(name):
    expected = np.array(BY_HAND[name])[:, None] * RAGGED
    assert_allclose(WEIGHTS[name](jnp.asarray(RAGGED)), expected, rtol=1e-6)


# --- a plain loop ---


def loop_weights(name, mask):
    weights = np.zeros(mask.shape)
    num_tokens = sum(int(m) for row in mask for m in row)
    num_rows = sum(1 for row in mask if any(row))
    for i, row in enumerate(mask):
        length = sum(int(m) for m in row)
        for t in range(len(row)):
            if row[t]:
                weights[i, t] = {
                    "token_mean": 1 / num_tokens,
                    "sequence_mean": 1 / length / num_rows,
                    "sequence_sum": 1 / num_rows,
                    "constant_length": 1 / len(row) / num_rows,
                    "constant_length_given": 1 / 9 / num_rows,
                }[name]
    return weights


jitted = {name: jax.jit(function) for name, function in WEIGHTS.items()}


@few
@given(hnp.arrays(np.bool_, (4, 5)))
def test_equals_a_plain_loop_for_any_mask(mask):
    for name in WEIGHTS:
        assert_allclose(jitted[name](mask), loop_weights(name, mask), rtol=1e-6, err_msg=name)


@every_weight
def test_leading_axes_are_all_completions(name):
    deep = jnp.asarray(RAGGED.reshape(2, 2, 5))
    assert_array_equal(WEIGHTS[name](deep), WEIGHTS[name](jnp.asarray(RAGGED)).reshape(2, 2, 5))
    assert WEIGHTS[name](deep).dtype == jnp.float32


@every_weight
def test_jit_equals_eager(name):
    assert_allclose(jitted[name](RAGGED), WEIGHTS[name](jnp.asarray(RAGGED)), rtol=1e-6)


# --- sums, empty completions, padding ---


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("token_mean", 1),
        ("sequence_mean", 1),
        ("sequence_sum", 9 / 3),  # the mean length of a completion
        ("constant_length", 9 / 3 / 5),
        ("constant_length_given", 9 / 3 / 9),
    ],
)
def test_what_the_weights_sum_to(name, total):
    assert_allclose(jnp.sum(WEIGHTS[name](jnp.asarray(RAGGED))), total, rtol=1e-6)


@every_weight
def test_wholly_masked_completions_are_not_counted(name):
    kept = WEIGHTS[name](jnp.asarray(RAGGED[[0, 2, 3]]))
    assert_array_equal(WEIGHTS[name](jnp.asarray(RAGGED))[np.array([0, 2, 3])], kept)


@every_weight
@pytest.mark.parametrize("shape", [(4, 5), (0, 5)])
def test_an_empty_batch_gives_zeros(name, shape):
    # Compiled, XLA turns an unguarded 0/0 into 0 here; eagerly it is NaN.
    for function in (WEIGHTS[name], jitted[name]):
        assert_array_equal(function(jnp.zeros(shape, bool)), np.zeros(shape))


@every_weight
def test_padding_changes_no_weight_of_a_token(name):
    padded = np.pad(RAGGED, ((0, 0), (0, 6)))
    weights = WEIGHTS[name](jnp.asarray(padded))
    if name == "constant_length":  # by definition: the width of the mask is its constant
        weights = weights * (11 / 5)
    assert_allclose(weights[:, :5], WEIGHTS[name](jnp.asarray(RAGGED)), rtol=1e-6)
    assert_array_equal(weights[:, 5:], np.zeros((4, 6)))


# --- equivalences ---


def test_without_padding_three_of_them_are_one():
    full = jnp.ones((4, 5), bool)
    expected = np.full((4, 5), 1 / 20)
    for function in (token_mean_weights, sequence_mean_weights, constant_length_weights):
        assert_allclose(function(full), expected, rtol=1e-6)


def test_of_equal_lengths_token_mean_is_constant_length():
    mask = jnp.asarray(np.pad(np.ones((4, 3), bool), ((0, 0), (0, 2))))
    assert_allclose(token_mean_weights(mask), constant_length_weights(mask, max_length=3), rtol=1e-6)


def test_max_length_may_be_traced():
    lengths = jnp.array([5, 9, 100])
    weights = jax.vmap(lambda length: constant_length_weights(jnp.asarray(RAGGED), max_length=length))(
        lengths.astype(jnp.float32)
    )
    expected = [constant_length_weights(jnp.asarray(RAGGED), max_length=int(length)) for length in lengths]
    assert_allclose(weights, jnp.stack(expected), rtol=1e-6)


# --- completions that are masked out, and count ---


@every_weight
def test_num_completions_is_the_divisor(name):
    # Of RAGGED's four completions three have a token.
    weights = WEIGHTS[name](jnp.asarray(RAGGED))
    given = WEIGHTS[name](jnp.asarray(RAGGED), num_completions=4)
    assert_allclose(given, weights if name == "token_mean" else weights * (3 / 4), rtol=1e-6)
    assert_array_equal(WEIGHTS[name](jnp.asarray(RAGGED), num_completions=3), weights)
    assert_array_equal(WEIGHTS[name](jnp.zeros((4, 5), bool), num_completions=0), np.zeros((4, 5)))


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "token_mean"])
def test_a_completion_masked_out_leaves_the_others_what_they_had(name):
    # As in TRL: a truncated completion adds nothing to the sum, and its place in the mean stays.
    mask = RAGGED[[0, 2, 3]]
    dropped = mask & (np.arange(3) != 1)[:, None]
    expected = np.where(dropped, WEIGHTS[name](jnp.asarray(mask)), 0)
    assert_allclose(WEIGHTS[name](jnp.asarray(dropped), num_completions=3), expected, rtol=1e-6)


@every_weight
def test_num_completions_may_be_traced(name):
    result = jax.jit(lambda n: WEIGHTS[name](jnp.asarray(RAGGED), num_completions=n))(4)
    assert_allclose(result, WEIGHTS[name](jnp.asarray(RAGGED), num_completions=4), rtol=1e-6)


# --- split batches ---


@few
@given(hnp.arrays(np.bool_, (6, 4)), hnp.arrays(np.float32, (6, 4), elements=st.floats(-10, 10, width=32)))
def test_microbatches_add_up_to_the_batch(mask, per_token):
    for name in WEIGHTS:
        weights = np.asarray(jitted[name](mask))
        pieces = [np.sum(w * x) for w, x in zip(np.split(weights, 3), np.split(per_token, 3), strict=True)]
        assert_allclose(sum(pieces), np.sum(loop_weights(name, mask) * per_token), rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_mean_of_microbatch_means_is_another_number():
    # Rows of 1 and 3 tokens with losses 4 and 0: the token mean is 4/4 = 1, the mean of means (4 + 0)/2 = 2.
    mask = jnp.asarray(np.arange(3) < np.array([1, 3])[:, None])
    per_token = jnp.array([[4.0, 0, 0], [0, 0, 0]])
    assert_allclose(jnp.sum(token_mean_weights(mask) * per_token), 1)
    of_each = [jnp.sum(token_mean_weights(mask[i : i + 1]) * per_token[i : i + 1]) for i in range(2)]
    assert_allclose(sum(of_each) / 2, 2)


@every_weight
def test_totals_are_global_when_the_batch_is_spread(name, spread):
    mask = np.arange(5) < np.random.default_rng(0).integers(0, 6, (8, 3, 1))
    mask[2] = False  # one device has nothing to do
    weights = spread(partial(WEIGHTS[name], axis_name="data"))(mask)
    assert_allclose(weights, WEIGHTS[name](jnp.asarray(mask)), rtol=1e-6)


@every_weight
def test_num_completions_is_of_all_devices(name, spread):
    mask = np.arange(5) < np.random.default_rng(0).integers(0, 6, (8, 3, 1))
    weights = spread(partial(WEIGHTS[name], num_completions=24, axis_name="data"))(mask)
    assert_allclose(weights, WEIGHTS[name](jnp.asarray(mask), num_completions=24), rtol=1e-6)
