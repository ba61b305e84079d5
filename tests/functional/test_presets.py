"""Presets against their formulas written out in NumPy, what `check` refuses, and which methods are the same."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    PRESETS,
    Objective,
    check,
    cispo_surrogate,
    clip_cov_term,
    clipped_surrogate,
    clipped_term,
    constant_length_weights,
    dppo_term,
    gmpo_term,
    group_advantages,
    grpo_loss,
    gspo_log_ratio,
    ignore_lengths,
    kl_cov_term,
    kl_k1,
    ratio_term,
    reinforce_term,
    sapo_surrogate,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    sequence_mean_weights,
    sequence_sum_weights,
    token_log_ratio,
    token_mean_weights,
    vespo_term,
)

every_preset = pytest.mark.parametrize("name", PRESETS)

# Two groups of two completions, of 4, 2, 0 and 3 tokens.
MASK = np.array([[[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 0, 0, 0], [0, 1, 1, 1]]], bool)
ADVANTAGES = np.array([[1.5, -0.7], [3.0, -0.2]], np.float32)
LENGTHS = MASK.sum(-1, keepdims=True)


def random_logprobs():
    """logprobs, old_logprobs, ref_logprobs."""
    rng = np.random.default_rng(3)
    logprobs = -rng.exponential(size=MASK.shape).astype(np.float32)
    near = [logprobs - rng.choice([-0.6, -0.1, 0.1, 0.6], size=MASK.shape).astype(np.float32) for _ in range(2)]
    return logprobs, *near


@cache
def compiled():
    """(logprobs, old_logprobs, advantages, mask, ref_logprobs) -> name: (loss, metrics), gradient; all at once."""

    def of_all(logprobs, old_logprobs, advantages, mask, ref_logprobs):
        def of(preset):
            loss = partial(preset.loss, ref_logprobs=None if preset.kl_in_reward else ref_logprobs)
            return jax.value_and_grad(loss, has_aux=True)(logprobs, old_logprobs, advantages, mask)

        return {name: of(preset) for name, preset in PRESETS.items()}

    return jax.jit(of_all)


# --- losses, written out ---


def clip(d, low, high):
    return -np.minimum(np.exp(d) * A, np.clip(np.exp(d), 1 - low, 1 + high) * A)


def row_sum(x):
    return np.sum(np.where(MASK, x, 0), axis=-1, keepdims=True)


def row_mean(x):
    return row_sum(x) / np.maximum(LENGTHS, 1)


A = ADVANTAGES[..., None].astype(float)
NEW, OLD, REF = (x.astype(float) for x in random_logprobs())
D, ONES = NEW - OLD, np.ones(MASK.shape)
ROWS = 3  # with tokens
TOKEN_MEAN, SEQUENCE_MEAN = MASK / MASK.sum(), MASK / np.maximum(LENGTHS, 1) / ROWS
SEQUENCE_SUM, CONSTANT_LENGTH = MASK / ROWS, MASK / (ROWS * 4)


def gmpo():
    clipped = np.where(A > 0, np.minimum(D, 0.4), np.maximum(D, -0.4))
    return -A * np.exp(row_mean(clipped)) * ONES


def dppo():
    moved = np.exp(NEW) - np.exp(OLD)
    dropped = np.where(A > 0, moved > 0.2, moved < -0.2)
    return np.where(dropped, 0, -np.exp(D) * A) + 0.001 * D**2


def vespo():
    w = np.exp(row_sum(D))
    return -np.where(A >= 0, w**2 * np.exp(3 - 3 * w), w**3 * np.exp(2 - 2 * w)) * A * NEW


def sapo():
    tau = np.where(A > 0, 1.0, 1.05)
    return -A * 4 / tau / (1 + np.exp(-tau * (np.exp(D) - 1)))


# Loss per token, weights, β.
LOSSES = {
    "grpo": (clip(D, 0.2, 0.2), SEQUENCE_MEAN, 0.04),
    "rank": (clip(D, 0.2, 0.2), SEQUENCE_MEAN, 0.04),
    "dr_grpo": (clip(D, 0.2, 0.2), CONSTANT_LENGTH, 0),
    "bnpo": (clip(D, 0.2, 0.2), TOKEN_MEAN, 0),
    "dapo": (clip(D, 0.2, 0.28), TOKEN_MEAN, 0),
    "gspo": (clip(row_mean(D), 3e-4, 4e-4) * ONES, SEQUENCE_MEAN, 0),
    "cispo": (-np.minimum(np.exp(D), 5) * A * D, TOKEN_MEAN, 0),
    "rloo": (clip(row_sum(D), 0.2, 0.2) * ONES, SEQUENCE_MEAN, 0),
    "companion_post": (clip(row_sum(D), 0.2, 0.2) * ONES, SEQUENCE_MEAN, 0.01),
    "introduction_post": (clip(row_sum(D), 0.15, 0.15) * ONES, SEQUENCE_MEAN, 0.01),
    "introduction_post_rank": (clip(row_sum(D), 0.15, 0.15) * ONES, SEQUENCE_MEAN, 0.01),
    "gmpo": (gmpo(), SEQUENCE_MEAN, 0),
    "sapo": (sapo(), SEQUENCE_MEAN, 0),
    "dppo": (dppo(), TOKEN_MEAN, 0),
    "luspo": (clip(row_mean(D), 3e-4, 4e-4) * LENGTHS / np.maximum(LENGTHS, 1) * ONES, SEQUENCE_SUM, 0),
    "vespo": (vespo(), TOKEN_MEAN, 0),
    "opo": (-A * NEW, TOKEN_MEAN, 0),
    "gpg": (-A * NEW, TOKEN_MEAN, 0),
    "max_rl": (clip(D, 0.2, 0.2), TOKEN_MEAN, 0),
    "lite_ppo": (clip(D, 0.2, 0.2), TOKEN_MEAN, 0),
    "pass_at_k": (clip(D, 0.2, 0.2), TOKEN_MEAN, 0),
}


@every_preset
def test_loss_is_the_formula_written_out(name):
    arrays = random_logprobs()
    (loss, metrics), _ = compiled()(*arrays[:2], ADVANTAGES, MASK, arrays[2])[name]
    per_token, weights, kl_coef = LOSSES[name]
    x = NEW - REF
    assert_allclose(loss, np.sum(weights * (per_token + kl_coef * (np.exp(-x) - 1 + x))), rtol=1e-5)
    # Its reference, if there is one, may be read in the reward instead.
    assert ("kl" in metrics) == (name != "rloo")


@every_preset
def test_masked_slots_may_hold_anything(name):
    arrays = random_logprobs()
    expected = compiled()(*arrays[:2], ADVANTAGES, MASK, arrays[2])[name]
    for rubbish in (np.inf, -np.inf, np.nan):
        dirty = [np.where(MASK, x, np.float32(rubbish)) for x in arrays]
        advantages = np.where(MASK.any(-1), ADVANTAGES, np.float32(rubbish))
        result = compiled()(*dirty[:2], advantages, MASK, dirty[2])[name]
        jax.tree.map(assert_array_equal, result, expected)


@every_preset
def test_on_policy_gradient_is_reinforce(name):
    # At ρ = 1, and with the policy as reference, each paper's aggregation gives −A w.
    # A ratio of whole responses, one number a completion, has the gradient of Σ log π: completions weigh 1/B.
    logprobs, *_ = random_logprobs()
    _, gradient = compiled()(logprobs, logprobs, ADVANTAGES, MASK, logprobs)[name]
    weights = (
        SEQUENCE_SUM
        if name in ("rloo", "companion_post", "introduction_post", "introduction_post_rank")
        else LOSSES[name][1]
    )
    assert_allclose(gradient, -A * weights, rtol=1e-5, atol=1e-7)


# --- advantages, written out ---

REWARDS = np.array([[1, 0, 0, 1, 0, 0, 0, 0.5], [0, 0, 1, 1, 1, 0, 1, 1], [0.5] * 8], np.float32)
REWARD_LENGTHS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]] * 3, np.float32)


def centered(r):
    return r - r.mean(-1, keepdims=True)


def standardised(r, ddof=1, eps=1e-6):
    return centered(r) / (r.std(-1, keepdims=True, ddof=ddof) + eps)


def mean_ranks(r):
    """1 for the best; those that are equal share."""
    above, same = (f(r[:, None, :], r[:, :, None]).sum(-1) for f in (np.greater, np.equal))
    return above + (same + 1) / 2


def leave_one_out(r):
    return r - (r.sum(-1, keepdims=True) - r) / 7


def max_rl(r):
    return centered(r) / r.mean(-1, keepdims=True)


def opo(r):
    return r - np.sum(REWARD_LENGTHS * r, -1, keepdims=True) / np.sum(REWARD_LENGTHS, -1, keepdims=True)


def pass_at_4(r):
    """Every subset of 4 passes if one of it is right; a completion's is the mean over those that hold it."""
    result = np.zeros(r.shape)
    subsets = list(itertools.combinations(range(8), 4))
    for i, row in enumerate(r):
        passed = np.array([any(row[list(s)] > 0) for s in subsets], float)
        if passed.std() > 0:
            score = (passed - passed.mean()) / passed.std()
            result[i] = [np.mean([x for s, x in zip(subsets, score, strict=True) if j in s]) for j in range(8)]
    return result


R = REWARDS.astype(float)
ADVANTAGES_OF = {
    "dr_grpo": centered(R),
    "rank": standardised(-mean_ranks(R)),
    "rloo": leave_one_out(R),
    "companion_post": standardised(R, 0, 1e-8),
    "introduction_post": standardised(R, 0, 1e-8),
    "introduction_post_rank": standardised(-mean_ranks(R), 0, 1e-8),
    "opo": opo(R),
    "gpg": centered(R) * 24 / 16,  # two groups of three have signal
    "max_rl": max_rl(R),
    "lite_ppo": centered(R) / (R.std(ddof=1) + 1e-6),
    "pass_at_k": pass_at_4(R),
}


@cache
def compiled_advantages():
    """Of all presets at once."""
    of_all = jax.jit(lambda *given: {name: preset.advantages(*given) for name, preset in PRESETS.items()})
    return of_all(REWARDS, REWARD_LENGTHS)


@every_preset
def test_advantages_are_the_formula_written_out(name):
    expected = ADVANTAGES_OF.get(name, standardised(R))
    assert_allclose(compiled_advantages()[name], expected, rtol=1e-4, atol=1e-6)


def test_where_presets_have_their_kl_and_their_ratio():
    assert {name for name, a in PRESETS.items() if a.ratio_to_sampler} == {"dppo"}
    with_reference = {
        "grpo": 0.04,
        "rank": 0.04,
        "companion_post": 0.01,
        "introduction_post": 0.01,
        "introduction_post_rank": 0.01,
        "rloo": 0.05,
    }
    assert {name: a.kl_coef for name, a in PRESETS.items() if a.kl_coef} == with_reference
    assert {name for name, a in PRESETS.items() if a.kl_in_reward} == {"rloo"}
    assert not any(a.kl_bias_correction for a in PRESETS.values())


def test_ignore_lengths_gives_constants_and_no_lengths():
    rewards, rubbish = jnp.asarray(REWARDS), jnp.full((3, 8), jnp.nan)
    expected = group_advantages(rewards, ddof=0, eps=0.5)
    assert_array_equal(ignore_lengths(group_advantages, ddof=0, eps=0.5)(rewards, rubbish), expected)


@cache
def advantages_over_devices():
    """Of all presets at once: of a batch over eight devices, and of the whole."""
    rng = np.random.default_rng(0)
    rewards = (rng.integers(0, 3, (8, 2, 8)) * np.arange(1, 9)[:, None, None]).astype(np.float32)
    lengths, where = rng.integers(1, 9, (8, 2, 8)), rng.random((8, 2, 8)) < 0.9

    def of_all(rewards, lengths, where, axis_name=None):
        return {
            name: preset.advantages(rewards, lengths, where=where, axis_name=axis_name)
            for name, preset in PRESETS.items()
        }

    over_devices = jax.pmap(partial(of_all, axis_name="data"), axis_name="data")
    return [jax.device_get(f(rewards, lengths, where)) for f in (over_devices, jax.jit(of_all))]


@every_preset
def test_advantages_of_a_batch_over_devices_are_those_of_the_whole(name):
    over_devices, expected = advantages_over_devices()
    assert_allclose(over_devices[name], expected[name], rtol=1e-5, atol=1e-6)


# --- constants ---


def test_constants_are_replaced_by_name_and_never_shared():
    grpo = PRESETS["grpo"]
    changed = grpo.with_constants(epsilon_high=0.3, delta=4.0)
    assert changed.constants == {"epsilon_low": 0.2, "epsilon_high": 0.3, "delta": 4.0}
    assert grpo.constants == Objective(GROUP).constants == {"epsilon_low": 0.2, "epsilon_high": 0.2}
    for objective in (*PRESETS.values(), changed):
        with pytest.raises(TypeError):
            objective.constants["epsilon_high"] = 0.5


def test_objectives_are_hashed_by_their_fields():
    changed = PRESETS["grpo"].with_constants(epsilon_high=0.3)
    again = PRESETS["grpo"]._replace(constants={"epsilon_high": 0.3, "epsilon_low": 0.2})
    assert changed == again
    assert hash(changed) == hash(again)
    assert len({hash(objective) for objective in PRESETS.values()}) == len(PRESETS)
    # So they may be static arguments.
    loss = jax.jit(lambda x, objective: objective.loss(x, x, ADVANTAGES, MASK)[0], static_argnums=1)
    assert loss(NEW.astype(np.float32), PRESETS["dapo"]).shape == ()


def test_the_corrected_divergence_of_an_objective_is_that_of_the_loss():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    arguments = logprobs, old_logprobs, ADVANTAGES, MASK
    objective = PRESETS["grpo"]._replace(kl_bias_correction=True)
    expected = jax.jit(partial(grpo_loss, kl_bias_correction=True))(*arguments, ref_logprobs=ref_logprobs)
    result = jax.jit(objective.loss)(*arguments, ref_logprobs=ref_logprobs)
    jax.tree.map(assert_array_equal, result, expected)


def test_weights_and_reference_given_take_the_place_of_the_presets_own():
    arrays, weights = random_logprobs(), np.asarray(TOKEN_MEAN, np.float32)

    @jax.jit
    def losses(logprobs, old_logprobs, ref_logprobs):
        arguments = logprobs, old_logprobs, ADVANTAGES, MASK
        grpo = PRESETS["grpo"]
        without_kl = grpo._replace(kl_coef=0.0)
        without = without_kl.loss(*arguments)[0], grpo_loss(*arguments)[0]
        both = grpo.loss(*arguments, ref_logprobs=ref_logprobs, weights=weights)[0]
        return *without, both, grpo_loss(*arguments, ref_logprobs=ref_logprobs, weights=weights)[0]

    a, b, c, d = losses(*arrays)
    assert_allclose(a, b, rtol=1e-6)
    assert_allclose(c, d, rtol=1e-6)
    assert abs(a - c) > 1e-3


# --- check ---

SEQUENCE_TERMS = {
    "sequence": ratio_term(sequence_log_ratio, clipped_surrogate),
    "sequence_cispo": ratio_term(sequence_log_ratio, cispo_surrogate),
    "sequence_mean": ratio_term(sequence_mean_log_ratio, clipped_surrogate),
    "gmpo": gmpo_term,
}
TOKEN_TERMS = {
    "clipped": clipped_term,
    "gspo": ratio_term(gspo_log_ratio, clipped_surrogate),
    "bounded": partial(clipped_term, delta=3.0),
    "cispo": ratio_term(token_log_ratio, cispo_surrogate),
    "clip_cov": partial(clip_cov_term, key=jax.random.key(0)),
}
TERMS_WITHOUT_EPSILON = {
    "reinforce": reinforce_term,
    "dppo": dppo_term,
    "vespo": vespo_term,
    "kl_cov": kl_cov_term,
    "sapo": ratio_term(token_log_ratio, sapo_surrogate),
    "sequence_sapo": ratio_term(sequence_log_ratio, sapo_surrogate),
}


GROUP = ignore_lengths(group_advantages)


def refused(objective, words):
    with pytest.raises(ValueError, match=words) as error:
        check(objective)
    assert "\n" not in str(error.value)


@every_preset
def test_presets_make_sense(name):
    check(PRESETS[name])


@pytest.mark.parametrize("name", [*SEQUENCE_TERMS, "sequence_sapo"])
def test_one_number_a_completion_is_not_weighed_by_tokens(name):
    objective = Objective(GROUP, term=(SEQUENCE_TERMS | TERMS_WITHOUT_EPSILON)[name], per_completion=True)
    if name in TERMS_WITHOUT_EPSILON:
        objective = objective._replace(constants={})
    for aggregation in (token_mean_weights, constant_length_weights):
        refused(objective._replace(aggregation=aggregation), "one number a completion.*sequence_mean_weights")
    for aggregation in (sequence_mean_weights, sequence_sum_weights):
        check(objective._replace(aggregation=aggregation))


@pytest.mark.parametrize("name", [*TOKEN_TERMS, *TERMS_WITHOUT_EPSILON])
def test_one_number_a_token_goes_with_any_weights(name):
    objective = Objective(
        GROUP, term=(TOKEN_TERMS | TERMS_WITHOUT_EPSILON)[name], per_completion=name == "sequence_sapo"
    )
    if name in TERMS_WITHOUT_EPSILON:
        objective = objective._replace(constants={})
    aggregations = [sequence_mean_weights, sequence_sum_weights]
    if name != "sequence_sapo":
        aggregations += [token_mean_weights, constant_length_weights]
    for aggregation in aggregations:
        check(objective._replace(aggregation=aggregation))


def test_what_is_one_number_a_completion():
    """Declared of each preset, and found by its gradient: at a ratio of 1 a token then depends on the other one."""

    def is_shared(objective):
        old_logprobs, mask = -jnp.ones((1, 2)), jnp.ones((1, 2), bool)

        def first_token(logprobs):
            return objective.term(logprobs, old_logprobs, jnp.ones(1), mask, **objective.constants)[0, 0]

        return bool(jax.jit(jax.grad(first_token))(-jnp.ones((1, 2)))[0, 1] != 0)

    assert all(is_shared(objective) == objective.per_completion for objective in PRESETS.values())
    of_completions = {"rloo", "companion_post", "introduction_post", "introduction_post_rank", "gmpo", "luspo"}
    assert {name for name, objective in PRESETS.items() if objective.per_completion} == of_completions


def test_k1_in_the_loss_is_refused():
    refused(PRESETS["grpo"]._replace(divergence=kl_k1), "kl_k1.*kl_in_reward")
    check(PRESETS["grpo"]._replace(divergence=kl_k1, kl_bias_correction=True))
    check(PRESETS["grpo"]._replace(divergence=kl_k1, kl_in_reward=True))
    check(PRESETS["grpo"]._replace(divergence=kl_k1, kl_coef=0.0))


@every_preset
def test_delta_is_declared(name):
    objective = PRESETS[name]
    arguments = -jnp.ones((1, 2)), -jnp.ones((1, 2)), jnp.ones(1), jnp.ones((1, 2), bool)
    if objective.takes_delta:
        objective.term(*arguments, **objective.constants, delta=4.0)
    else:
        with pytest.raises(TypeError, match="delta"):
            objective.term(*arguments, **objective.constants, delta=4.0)


@every_preset
def test_the_smallest_group_is_declared(name):
    objective = PRESETS[name]

    def advantages(size):
        return objective.advantages(jnp.array([1.0, 0.0, 0.0, 2.0])[:size], jnp.array([3, 1, 2, 5])[:size])

    assert jnp.isfinite(advantages(objective.min_group_size)).all()
    try:
        assert not advantages(objective.min_group_size - 1).any()
    except ValueError as error:
        assert "must be between 1 and the group's size" in str(error)  # noqa: PT017
    with pytest.raises(ValueError, match=r"group_size is .*at least"):
        check(objective, group_size=objective.min_group_size - 1)


@pytest.mark.parametrize(
    ("name", "constant", "bad", "good"),
    [
        ("cispo", "epsilon_high", -0.5, 0.5),
        ("grpo", "delta", 1.0, 1.3),
        ("gmpo", "epsilon_low", float("nan"), 0.0),
    ],
)
def test_bad_constants_of_a_term_are_refused(name, constant, bad, good):
    refused(PRESETS[name].with_constants(**{constant: bad}), constant)
    check(PRESETS[name].with_constants(**{constant: good}))


# --- methods that are the same somewhere ---


def loss_and_gradient(objective, mask, logprobs, old_logprobs):
    without_kl = objective._replace(kl_coef=0.0)
    function = jax.jit(jax.value_and_grad(lambda x: without_kl.loss(x, old_logprobs, ADVANTAGES, mask)[0]))
    return function(logprobs)


def test_gspo_of_one_token_is_grpo():
    logprobs, old_logprobs, _ = (x[..., :1] for x in random_logprobs())
    one = PRESETS["gspo"].with_constants(epsilon_low=0.2, epsilon_high=0.2), PRESETS["grpo"]
    (loss, gradient), expected = (loss_and_gradient(a, MASK[..., :1], logprobs, old_logprobs) for a in one)
    assert_allclose(loss, expected[0], rtol=1e-6)
    assert_allclose(gradient, expected[1], rtol=1e-6)


def test_of_equal_lengths_all_per_token_weights_are_the_same():
    logprobs, old_logprobs, _ = random_logprobs()
    kinds = (token_mean_weights, constant_length_weights, sequence_mean_weights)
    objectives = [PRESETS["dapo"]._replace(aggregation=kind) for kind in kinds]
    results = [loss_and_gradient(a, np.ones_like(MASK), logprobs, old_logprobs) for a in objectives]
    for loss, gradient in results[1:]:
        assert_allclose(loss, results[0][0], rtol=1e-6)
        assert_allclose(gradient, results[0][1], rtol=1e-6)


def test_luspo_is_the_completion_s_clipped_ratio_times_its_length():
    arrays = random_logprobs()
    (loss, _), _ = compiled()(*arrays[:2], ADVANTAGES, MASK, arrays[2])["luspo"]
    of_row = clip(row_mean(D), 3e-4, 4e-4)
    assert_allclose(loss, np.sum(LENGTHS * of_row) / ROWS, rtol=1e-5)


@pytest.mark.parametrize("name", ["rloo", "gmpo"])
def test_one_number_a_completion_is_averaged_over_completions(name):
    # RLOO: PPO's clip of π(o)/π_old(o); GMPO: −A times a geometric mean.
    arrays = random_logprobs()
    (loss, _), _ = compiled()(*arrays[:2], ADVANTAGES, MASK, arrays[2])[name]
    of_row = clip(row_sum(D), 0.2, 0.2) if name == "rloo" else gmpo()[..., :1]
    assert_allclose(loss, np.sum(of_row * MASK.any(-1, keepdims=True)) / ROWS, rtol=1e-5)


def test_a_reference_is_asked_for_and_refused_by_methods_that_read_it_elsewhere():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    arguments = logprobs, old_logprobs, ADVANTAGES, MASK
    with pytest.raises(ValueError, match="give ref_logprobs"):
        PRESETS["grpo"].loss(*arguments)
    with pytest.raises(ValueError, match="kl_penalized_rewards"):
        PRESETS["rloo"].loss(*arguments, ref_logprobs=ref_logprobs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"divergence": kl_k1}, "kl_unbiased"),
        ({"kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"entropy_coef": float("inf")}, "entropy_coef is inf"),
        ({"constants": {"epsilon_low": float("nan")}}, "epsilon_low is nan"),
        ({"kl_in_reward": True, "kl_bias_correction": True}, "kl_bias_correction is of a KL in the loss"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    refused(PRESETS["grpo"]._replace(**changes), words)


def test_a_key_may_be_bound_and_weights_by_completion_too():
    key = jax.random.key(0)
    check(PRESETS["dapo"]._replace(term=partial(clip_cov_term, key=key)))
    check(PRESETS["gmpo"]._replace(aggregation=partial(sequence_mean_weights)))


def test_values_on_policy():
    # ρ = 1: SAPO is −A (4/τ) σ(0), GMPO and the clip −A, CISPO 0, VESPO REINFORCE, φ = 1.
    logprobs, *_ = random_logprobs()
    results = compiled()(logprobs, logprobs, ADVANTAGES, MASK, logprobs)
    tau = np.where(A > 0, 1.0, 1.05)
    assert_allclose(results["sapo"][0][0], np.sum(SEQUENCE_MEAN * -A * 2 / tau), rtol=1e-5)
    for name in ("gmpo", "gspo", "rloo", "grpo"):
        assert_allclose(results[name][0][0], np.sum(SEQUENCE_MEAN * -A), rtol=1e-5)
    assert results["cispo"][0][0] == 0
    assert_allclose(results["vespo"][0][0], results["opo"][0][0], rtol=1e-5)
    for (_, metrics), _ in results.values():
        assert_allclose(metrics["ratio"], (9, 9))
        assert metrics["clip_low"][0] == metrics["clip_high"][0] == 0


def test_vmap_over_epsilons_of_each_term_that_has_them():
    logprobs, old_logprobs, _ = random_logprobs()
    low, high = np.float32([0.1, 0.2, 0.5]), np.float32([0.5, 0.2, 0.1])

    @jax.jit
    @jax.vmap
    def losses(low, high):
        def of(name):
            objective = PRESETS[name].with_constants(epsilon_low=low, epsilon_high=high)
            return objective._replace(kl_coef=0.0).loss(logprobs, old_logprobs, ADVANTAGES, MASK)[0]

        return {name: of(name) for name in ("dapo", "gspo", "rloo")}

    results = losses(low, high)
    of_row = {"dapo": D, "gspo": row_mean(D), "rloo": row_sum(D)}
    for name, d in of_row.items():
        expected = [np.sum(LOSSES[name][1] * clip(d, a, b)) for a, b in zip(low, high, strict=True)]
        assert_allclose(results[name], expected, rtol=1e-5)
        assert len(set(np.round(expected, 6))) > 1, name
