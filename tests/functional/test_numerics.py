"""What is said of arguments that have other shapes, or are no arrays."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.functional import (
    adaptive_entropy_coef,
    adaptive_kl_coef,
    bradley_terry_loss,
    cispo_surrogate,
    clip_cov_term,
    clipped_surrogate,
    clipped_term,
    critic_loss,
    dppo_term,
    gdpo_advantages,
    generalized_advantages,
    gmpo_term,
    group_advantages,
    group_ranks,
    grpo_loss,
    gspo_log_ratio,
    keep_completions,
    kl_cov_term,
    kl_k3,
    kl_penalized_rewards,
    masked_sum,
    masked_weights,
    on_policy_completions,
    opo_advantages,
    overlong_penalty,
    per_token,
    policy_metrics,
    rank_advantages,
    ratio_term,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    reinforce_term,
    rejection_weights,
    remax_advantages,
    rewards_at_end,
    sapo_surrogate,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    sequence_mean_weights,
    token_covariance,
    token_kl,
    token_log_ratio,
    token_logprobs,
    top_entropy_tokens,
    truncated_weights,
    unclipped_surrogate,
    vespo_term,
    weighted_sum,
    whiten,
)
from grpo_jax.functional.presets import PRESETS
from grpo_jax.functional.products import times_transposed, transposed, write_slice


def zeros(*shape):
    return np.zeros(shape, np.float32)


def ones(*shape):
    return np.ones(shape, np.float32)


X, MASK, A = zeros(2, 3), np.ones((2, 3), bool), zeros(2)
HIDDEN, WEIGHT, IDS = zeros(2, 3, 4), zeros(7, 4), np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: grpo_loss(X, ones(2, 4), A, MASK),
            "grpo_loss: old_logprobs must have the shape [2, 3], [..., T] where logprobs has [2, 3], but has [2, 4]",
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
    ],
)
def test_a_shape_is_named_with_what_was_expected(call, words):
    refuses(call, words)


def refuses(call, words):
    with pytest.raises((AssertionError, TypeError)) as caught:
        jax.jit(call)()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


COLUMN = A[:, None]  # of which broadcasting would make every completion's number with every other's


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: group_ranks(ones()), "group_ranks: rewards must have the shape [..., G], but has []"),
        (lambda: rank_advantages(X, where=MASK[:1]), "rank_advantages: where must have the shape [2, 3]"),
        (lambda: opo_advantages(X, ones(3)), "opo_advantages: lengths must have the shape [2, 3]"),
        (lambda: remax_advantages(X, ones(1)), "remax_advantages: greedy_rewards must have the shape [2]"),
        (lambda: gdpo_advantages(ones(4, 2, 3), weights=ones(1)), "gdpo_advantages: weights must have the shape [4]"),
        (lambda: whiten(X, MASK[:, :1]), "whiten: mask must have the shape [2, 3]"),
        (lambda: reinforce_pp_advantages(ones(3), MASK), "reinforce_pp_advantages: rewards must have the shape [2]"),
        (
            lambda: reinforce_pp_advantages(A, MASK, token_penalty=ones(3)),
            "reinforce_pp_advantages: token_penalty must have the shape [2, 3]",
        ),
        (
            lambda: reinforce_pp_baseline_advantages(X, MASK[None]),
            "reinforce_pp_baseline_advantages: rewards must have the shape [1, 2], [..., G] where mask has [1, 2, 3]",
        ),
        (lambda: truncated_weights([0.0]), "truncated_weights: log_ratio must be an array [...], but is a list"),
        (lambda: masked_weights([0.0]), "masked_weights: log_ratio must be an array [...], but is a list"),
        (lambda: rejection_weights([0.0]), "rejection_weights: log_ratio must be an array [...], but is a list"),
        (
            lambda: on_policy_completions(X, COLUMN, MASK, threshold=1.0),
            "on_policy_completions: advantages must have the shape [2] or [2, 3]",
        ),
        (lambda: top_entropy_tokens(X[0], MASK), "top_entropy_tokens: mask must have the shape [3]"),
        (lambda: keep_completions(MASK, MASK), "keep_completions: keep must have the shape [2]"),
        (lambda: weighted_sum(A, X, MASK), "weighted_sum: weights must have the shape [2]"),
        (lambda: weighted_sum(X, X, MASK[0]), "weighted_sum: mask must have the shape [2, 3]"),
        (lambda: masked_sum(X, MASK[0]), "masked_sum: mask must have the shape [2, 3]"),
        (lambda: policy_metrics(X, X, COLUMN, MASK), "policy_metrics: advantages must have the shape [2] or [2, 3]"),
        (lambda: per_token(COLUMN, X), "per_token: advantages must have the shape [2] or [2, 3]"),
        (lambda: token_covariance(X, COLUMN, MASK), "token_covariance: advantages must have the shape [2] or [2, 3]"),
        (lambda: bradley_terry_loss(A, COLUMN), "bradley_terry_loss: rejected must have the shape [2]"),
        (lambda: critic_loss(X, A), "critic_loss: returns must have the shape [2, 3], [...] where values has [2, 3]"),
        (lambda: critic_loss(X, X, old_values=X[:1]), "critic_loss: old_values must have the shape [2, 3]"),
        (lambda: overlong_penalty([3], max_length=9, buffer=2), "overlong_penalty: lengths must be an array [...]"),
        (
            lambda: adaptive_kl_coef(0.1, (1.0, 2.0), target=1.0, num_samples=1),
            "adaptive_kl_coef: kl must be an array [...], but is a tuple",
        ),
        (lambda: adaptive_entropy_coef(A, X), "adaptive_entropy_coef: entropy must have the shape [2]"),
    ],
)
def test_every_function_of_arrays_says_so_with_its_name(call, words):
    refuses(call, words)


@pytest.mark.parametrize("surrogate", [clipped_surrogate, unclipped_surrogate, cispo_surrogate, sapo_surrogate])
def test_surrogates_refuse_advantages_that_are_not_a_completion_s_or_a_token_s(surrogate):
    words = "advantages must have the shape [2] or [2, 3], [...] or [..., T] where log_ratio has [2, 3], but has [2, 1]"
    refuses(lambda: surrogate(X, COLUMN), f"{surrogate.__name__}: {words}")
    refuses(lambda: surrogate([0.0], A), f"{surrogate.__name__}: log_ratio must be an array [..., T], but is a list")
    assert surrogate(X, 1.0).shape == surrogate(X, jnp.array(1.0)).shape == (2, 3)  # a number is of all completions
    assert surrogate(jnp.array(0.0), 1.0).shape == ()


def with_key(*arrays):
    return clip_cov_term(*arrays, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (clipped_term, "term"),
        (reinforce_term, "reinforce_term"),
        (gmpo_term, "gmpo_term"),
        (dppo_term, "dppo_term"),
        (vespo_term, "vespo_term"),
        (with_key, "clip_cov_term"),
        (kl_cov_term, "kl_cov_term"),
    ],
)
def test_terms_refuse_other_shapes(term, name):
    refuses(lambda: term(X, X[0], A, MASK), f"{name}: old_logprobs must have the shape [2, 3]")
    refuses(lambda: term(X, X, COLUMN, MASK), f"{name}: advantages must have the shape [2] or [2, 3]")
    refuses(lambda: term(X, X, A, MASK[:1]), f"{name}: mask must have the shape [2, 3]")
    assert term(X, X, 1.0, MASK).shape == (2, 3)


@pytest.mark.parametrize("log_ratio", [sequence_log_ratio, sequence_mean_log_ratio, gspo_log_ratio])
def test_log_ratios_refuse_other_shapes_by_their_own_names(log_ratio):
    refuses(lambda: log_ratio(X, X[:1], MASK), f"{log_ratio.__name__}: old_logprobs must have the shape [2, 3]")


def test_a_term_that_mixes_up_shapes_is_refused_in_a_sentence_when_it_is_called():
    wrong = PRESETS["grpo"]._replace(
        term=lambda logprobs, old, advantages, mask: whiten(advantages, mask), constants={}
    )
    with pytest.raises(AssertionError, match=r"whiten: mask must have the shape \[2\]"):
        wrong.loss(X, X, A, MASK, ref_logprobs=X)


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


# ---- what XLA on CPU would otherwise do in float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (2, 1, 6, 5)])
def test_a_transposed_array_has_the_numbers_of_any_other(shape, dtype):
    x = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
    chex.assert_trees_all_equal(jax.jit(transposed)(x), jnp.asarray(np.swapaxes(np.asarray(x), -1, -2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [(1,), (3,), (8,), (2, 3), ()])
@pytest.mark.parametrize("by_columns", [False, True])
def test_few_rows_times_a_transposed_matrix_are_the_product_of_numpy(rows, by_columns, dtype):
    rng = np.random.default_rng(0)
    x, matrix = rng.integers(-8, 9, (*rows, 5)), rng.integers(-8, 9, (40, 5))  # exact in both types
    multiply = jax.jit(partial(times_transposed, dtype=jnp.float32, by_columns=by_columns))
    y = multiply(jnp.asarray(x, dtype), jnp.asarray(matrix, dtype))
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(y), x @ matrix.T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(("start", "begins"), [(0, 0), (3, 3), (4, 3)])
def test_a_slice_is_written_where_it_belongs_and_nowhere_else(start, begins, dtype):
    array, part = jnp.arange(10, dtype=dtype).reshape(2, 5), -jnp.ones((2, 2), dtype)
    expected = np.array(array)
    expected[:, begins : begins + 2] = -1
    chex.assert_trees_all_equal(jax.jit(write_slice)(array, part, {-1: start}), jnp.asarray(expected))


def test_a_slice_is_written_at_a_place_of_two_axes():
    written = jax.jit(write_slice)(jnp.zeros((2, 3, 4)), jnp.ones((1, 3, 2)), {0: 1, -1: 2})
    expected = np.zeros((2, 3, 4))
    expected[1, :, 2:] = 1
    np.testing.assert_array_equal(written, expected)


def test_no_copy_of_a_bfloat16_array_is_made_in_float32_to_write_a_slice_of_it():
    array, part = jnp.zeros((64, 32), jnp.bfloat16), jnp.ones((1, 32), jnp.bfloat16)
    written = jax.jit(lambda array, part, start: write_slice(array, part, {0: start}), donate_argnums=0)
    assert "f32[64,32]" not in written.lower(array, part, 3).compile().as_text()
