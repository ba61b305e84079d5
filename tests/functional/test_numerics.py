"""What is said of arguments that have other shapes, or are no arrays."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from grpo_jax.functional import (
    check_logprobs,
    combine_rewards,
    generalized_advantages,
    group_advantages,
    grpo_loss,
    kl_k3,
    kl_penalized_rewards,
    rewards_at_end,
    sequence_mean_weights,
    token_kl,
    token_log_ratio,
    token_logprobs,
    unclipped_surrogate,
)
from grpo_jax.functional.policy_gradient import ratio_term

X, MASK, A = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.zeros(2)
HIDDEN, WEIGHT, IDS = jnp.zeros((2, 3, 4)), jnp.zeros((7, 4)), jnp.zeros((2, 3), jnp.int32)


def ones(*shape):
    return jnp.ones(shape)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: grpo_loss(X, ones(2, 4), A, MASK),
            "old_logprobs must have the shape [2, 3], [..., T] where logprobs has [2, 3], but has [2, 4]",
        ),
        (
            lambda: grpo_loss(X, X, ones(3), MASK),
            "advantages must have the shape [2] or [2, 3], [...] or [..., T] where logprobs has [2, 3], but has [3]",
        ),
        (lambda: grpo_loss(X, X, A, MASK[0]), "completion_mask must have the shape [2, 3]"),
        (lambda: grpo_loss(X, X, A, MASK, ref_logprobs=ones(2)), "ref_logprobs must have the shape [2, 3]"),
        (lambda: grpo_loss(X, X, A, MASK, weights=ones(3)), "weights must have the shape [2, 3]"),
        (lambda: grpo_loss(X, X, A, MASK, entropy=ones(3)), "entropy must have the shape [2, 3]"),
        (lambda: grpo_loss(ones(), X, A, MASK), "logprobs must have the shape [..., T], but has []"),
        (
            lambda: token_logprobs(HIDDEN, ones(4, 7), IDS),
            "unembedding must have the shape [V, 4], [V, D] where ids has [2, 3], but has [4, 7]",
        ),
        (lambda: token_logprobs(HIDDEN[0], WEIGHT, IDS), "hidden must have the shape [2, 3, D]"),
        (lambda: token_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT[1:]), "ref_unembedding must have the shape [7, 4]"),
        (lambda: token_log_ratio(X, X.T, MASK), "old_logprobs must have the shape [2, 3]"),
        (lambda: group_advantages(X, where=MASK[0]), "where must have the shape [2, 3]"),
        (lambda: kl_k3(X, X[0]), "ref_logprobs must have the shape [2, 3]"),
        (lambda: rewards_at_end(ones(3), MASK), "rewards must have the shape [2]"),
        (lambda: generalized_advantages(X, X[:1], MASK), "values must have the shape [2, 3]"),
        (lambda: kl_penalized_rewards(X, X, X, MASK, kl_coef=0.1), "rewards must have the shape [2]"),
        (lambda: combine_rewards(ones(2, 3), weights=ones(3)), "weights must have the shape [2]"),
    ],
)
def test_a_shape_is_named_with_what_was_expected(call, words):
    with pytest.raises(AssertionError) as caught:
        jax.jit(call)()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: grpo_loss([[0.0]], X, A, MASK), "logprobs must be an array [..., T], but is a list"),
        (lambda: grpo_loss(X, X, 1.0, MASK), "advantages must be an array [...] or [..., T], but is a float"),
        (lambda: grpo_loss(X, X, A, [[True] * 3] * 2), "completion_mask must be an array [..., T], but is a list"),
        (lambda: token_logprobs(HIDDEN, WEIGHT, [[0] * 3] * 2), "ids must be an array [...], but is a list"),
        (lambda: token_logprobs(0.5, WEIGHT, IDS), "hidden must be an array [..., D], but is a float"),
        (lambda: group_advantages([1.0, 0.0]), "rewards must be an array [..., G], but is a list"),
        (lambda: group_advantages(1.0), "rewards must be an array [..., G], but is a float"),
        (lambda: sequence_mean_weights([True]), "mask must be an array [..., T], but is a list: give jnp.array(mask)"),
        (lambda: kl_k3([0.0], X), "logprobs must be an array [...], but is a list"),
    ],
)
def test_lists_and_numbers_in_place_of_arrays_are_refused(call, words):
    with pytest.raises(TypeError) as caught:
        call()
    assert words in str(caught.value)


def test_arrays_of_numpy_and_numbers_where_they_may_be_are_taken():
    assert group_advantages(np.array([1.0, 1.0], np.float32)).shape == (2,)
    assert kl_k3(-1.0, -1.0) == 0


def test_a_missing_argument_is_named_with_the_function():
    with pytest.raises(TypeError, match=r"grpo_loss\(\) missing .* 'completion_mask'"):
        grpo_loss(X, X, A)


def test_one_epsilon_is_told_that_there_are_two():
    with pytest.raises(TypeError, match=r"there is no epsilon: .* epsilon_low and epsilon_high, which may be equal"):
        grpo_loss(X, X, A, MASK, epsilon=0.2)
    with pytest.raises(TypeError, match="there is no epsilon"):
        ratio_term(token_log_ratio, unclipped_surrogate)(X, X, A, MASK, epsilon=0.2)


# ---- values, where they are asked for


@jax.jit
def checked_loss(logprobs, old_logprobs, mask):
    check_logprobs(mask, logprobs=logprobs, old_logprobs=old_logprobs)
    return grpo_loss(logprobs, old_logprobs, jnp.ones(logprobs.shape[0]), mask)[0]


GOOD = jnp.array([[-1.0, -2.0, 0.0005]])  # rounding may leave a little above 0


@pytest.mark.parametrize("bad", [jnp.exp(GOOD), -GOOD, GOOD.at[0, 0].set(jnp.nan)], ids=["exp", "negated", "nan"])
def test_what_cannot_be_log_probabilities_is_caught_under_jit(bad):
    mask, words = jnp.ones((1, 3), bool), "old_logprobs must be log-probabilities, at most 0, but the largest is"
    checked = chex.chexify(checked_loss, async_check=False)
    assert checked(GOOD, GOOD, mask) == pytest.approx(-1)
    with pytest.raises(Exception, match=words):
        checked(GOOD, bad, mask)
    error, _ = checkify.checkify(checked_loss)(GOOD, bad, mask)
    assert words in error.get()
    with pytest.raises(Exception, match=words):  # without jit at once
        check_logprobs(mask, old_logprobs=bad)


def test_masked_values_may_be_anything_and_losses_check_nothing_by_themselves():
    mask, bad = jnp.array([[True, True, False]]), GOOD.at[0, 2].set(jnp.nan)
    assert chex.chexify(checked_loss, async_check=False)(bad, bad, mask) == pytest.approx(-1)
    text = str(jax.make_jaxpr(lambda x: grpo_loss(x, x, jnp.ones(1), mask)[0])(GOOD))
    assert "check" not in text
