"""Presets against their formulas written out in NumPy, and what they declare."""

from functools import cache, partial

import jax
import numpy as np
import pytest
import test_loops as loops
from numpy.testing import assert_allclose

from grpo_jax import functional as F

every_preset = pytest.mark.parametrize("name", F.PRESETS)
POSTS = ("companion_post", "introduction_post", "introduction_post_rank")

# Completions of 4, 2, 0 and 3 tokens; no ratio is near the kink of a clip.
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], bool)
ADVANTAGES = np.float32([1.5, -0.7, 3.0, -0.2])
rng = np.random.default_rng(3)
NEW = -rng.exponential(size=MASK.shape).astype(np.float32)
OLD, REF = (NEW - rng.choice([-0.6, -0.1, 0.1, 0.6], size=MASK.shape).astype(np.float32) for _ in range(2))

LENGTHS, ROWS = np.maximum(MASK.sum(-1, keepdims=True), 1), 3  # with tokens
TOKEN_MEAN, SEQUENCE_MEAN, SEQUENCE_SUM = MASK / MASK.sum(), MASK / LENGTHS / ROWS, MASK / ROWS
CONSTANT_LENGTH = MASK / (ROWS * 4)


def clip(log_ratio, low, high):
    return loops.of_surrogate(log_ratio, partial(loops.clipped, epsilon_low=low, epsilon_high=high))


# Loss per token, weights, β.
LOSSES = {
    "grpo": (clip(loops.differences, 0.2, 0.2), SEQUENCE_MEAN, 0.04),
    "rank": (clip(loops.differences, 0.2, 0.2), SEQUENCE_MEAN, 0.04),
    "dr_grpo": (clip(loops.differences, 0.2, 0.2), CONSTANT_LENGTH, 0),
    "bnpo": (clip(loops.differences, 0.2, 0.2), TOKEN_MEAN, 0),
    "dapo": (clip(loops.differences, 0.2, 0.28), TOKEN_MEAN, 0),
    "gspo": (clip(loops.sequence_mean, 3e-4, 4e-4), SEQUENCE_MEAN, 0),
    "cispo": (loops.of_surrogate(loops.differences, loops.cispo), TOKEN_MEAN, 0),
    "rloo": (clip(loops.sequence_sum, 0.2, 0.2), SEQUENCE_MEAN, 0),
    "companion_post": (clip(loops.sequence_sum, 0.2, 0.2), SEQUENCE_MEAN, 0.01),
    "introduction_post": (clip(loops.sequence_sum, 0.15, 0.15), SEQUENCE_MEAN, 0.01),
    "introduction_post_rank": (clip(loops.sequence_sum, 0.15, 0.15), SEQUENCE_MEAN, 0.01),
    "gmpo": (loops.gmpo, SEQUENCE_MEAN, 0),
    "sapo": (loops.of_surrogate(loops.differences, loops.sapo), SEQUENCE_MEAN, 0),
    "dppo": (loops.dppo, TOKEN_MEAN, 0),
    "luspo": (clip(loops.sequence_mean, 3e-4, 4e-4), SEQUENCE_SUM, 0),
    "vespo": (loops.vespo, TOKEN_MEAN, 0),
    "opo": (loops.reinforce, TOKEN_MEAN, 0),
    "gpg": (loops.reinforce, TOKEN_MEAN, 0),
    "max_rl": (clip(loops.differences, 0.2, 0.2), TOKEN_MEAN, 0),
    "lite_ppo": (clip(loops.differences, 0.2, 0.2), TOKEN_MEAN, 0),
    "pass_at_k": (clip(loops.differences, 0.2, 0.2), TOKEN_MEAN, 0),
    "best_of_group": (clip(loops.differences, 0.2, 0.2), TOKEN_MEAN, 0),
    "reinforce_pp": (clip(loops.differences, 0.2, 0.2), TOKEN_MEAN, 0),
    "reinforce_pp_baseline": (clip(loops.differences, 0.2, 0.2), TOKEN_MEAN, 0),
    "kl_cov": (loops.of_surrogate(loops.differences, lambda ratio, a: -ratio * a), TOKEN_MEAN, 0),
}
IN_REWARD = ("rloo", "reinforce_pp")


def penalty_of_kl_cov():
    """The penalty |d| on the one token of the batch with the largest covariance."""
    by_token = np.broadcast_to(ADVANTAGES[:, None], MASK.shape)
    covariance = (by_token - by_token[MASK].mean()) * (NEW - NEW[MASK].mean())
    place = np.unravel_index(np.argmax(np.where(MASK, covariance, -np.inf)), MASK.shape)
    return np.sum(TOKEN_MEAN[place] * np.abs(NEW - OLD)[place])


@cache
def losses():
    """Returns (loss, metrics) of every preset: one program."""

    def of(preset):
        return preset.loss(NEW, OLD, ADVANTAGES, MASK, ref_logprobs=None if preset.kl_in_reward else REF)

    return jax.jit(lambda: {name: of(preset) for name, preset in F.PRESETS.items()})()


@every_preset
def test_loss_is_the_formula_written_out(name):
    loss, metrics = losses()[name]
    row, weights, kl_coef = LOSSES[name]
    per_token, x = loops.over_rows(row)(NEW, OLD, ADVANTAGES[:, None], MASK), NEW - REF
    penalty = penalty_of_kl_cov() if name == "kl_cov" else 0
    assert_allclose(loss, np.sum(weights * (per_token + kl_coef * (np.exp(-x) - 1 + x))) + penalty, rtol=1e-5)
    # Its reference, if there is one, may be read in the reward instead.
    assert ("kl" in metrics) == (name not in IN_REWARD)


# --- advantages, written out ---

REWARDS = np.array([[1, 0, 0, 1, 0, 0, 0, 0.5], [0, 0, 1, 1, 1, 0, 1, 1], [0.5] * 8], np.float32)
REWARD_LENGTHS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]] * 3, np.float32)
R = REWARDS.astype(float)
REWARD_MASK = np.arange(9) < REWARD_LENGTHS[..., None]
PENALTY = np.float32(0.1 * rng.normal(size=REWARD_MASK.shape))


def of_groups(loop, scale=1.0):
    return scale * np.array([loop(group) for group in R.tolist()])


def of_tokens(penalty):
    rows = (x.reshape(-1, x.shape[-1]) for x in (penalty, REWARD_MASK))
    return loops.reinforce_pp(REWARDS.ravel(), *rows, gamma=1.0).reshape(REWARD_MASK.shape)


# The population deviation of eight is √(7/8) of the sample deviation.
POPULATION = (8 / 7) ** 0.5
ADVANTAGES_OF = {
    "dr_grpo": of_groups(loops.centered),
    "rank": of_groups(loops.by_rank),
    "rloo": of_groups(loops.leave_one_out),
    "companion_post": of_groups(loops.standardised, POPULATION),
    "introduction_post": of_groups(loops.standardised, POPULATION),
    "introduction_post_rank": of_groups(loops.by_rank, POPULATION),
    "opo": R - np.sum(REWARD_LENGTHS * R, -1, keepdims=True) / np.sum(REWARD_LENGTHS, -1, keepdims=True),
    "gpg": of_groups(loops.centered, 24 / 16),  # two groups of three have signal
    "max_rl": of_groups(loops.max_rl),
    "lite_ppo": of_groups(loops.centered) / (R.std(ddof=1) + 1e-6),
    "pass_at_k": of_groups(partial(loops.pass_at, 4)),
    "best_of_group": of_groups(loops.best_of_group),
    "reinforce_pp": of_tokens(0 * PENALTY),
    "reinforce_pp_baseline": loops.reinforce_pp_baseline(REWARDS, REWARD_MASK),
}


@cache
def advantages():
    presets = F.PRESETS.items()
    return jax.jit(lambda: {name: objective.compute_advantages(REWARDS, REWARD_MASK) for name, objective in presets})()


@every_preset
def test_advantages_are_the_formula_written_out(name):
    assert_allclose(advantages()[name], ADVANTAGES_OF.get(name, of_groups(loops.standardised)), rtol=1e-4, atol=1e-6)


def test_kl_in_rewards_by_token_or_completion():
    """And completions that do not count are in no statistic."""
    by_token, of_sum = (
        F.PRESETS[name].compute_advantages(REWARDS, REWARD_MASK, penalty=PENALTY) for name in ("reinforce_pp", "rloo")
    )
    assert_allclose(by_token, of_tokens(PENALTY), rtol=1e-3, atol=1e-5)
    assert_allclose(of_sum, F.leave_one_out_advantages(REWARDS - PENALTY.sum(-1)), atol=1e-6)
    where = np.arange(8) < 6
    for name in ("reinforce_pp", "reinforce_pp_baseline", "grpo"):
        compute = F.PRESETS[name].compute_advantages
        some = compute(REWARDS, REWARD_MASK, where=np.broadcast_to(where, REWARDS.shape))
        assert_allclose(some[:, :6], compute(REWARDS[:, :6], REWARD_MASK[:, :6]), rtol=1e-4, atol=1e-6)
        assert not np.any(some[:, 6:])


@pytest.mark.parametrize("name", ["gpg", "lite_ppo"])  # those of other presets look only at their group
def test_advantages_over_devices_equal_the_whole_batch(name, spread):
    rewards = np.arange(8, dtype=np.float32)[:, None, None] * REWARDS
    lengths = np.broadcast_to(REWARD_LENGTHS, rewards.shape)
    result = spread(partial(F.PRESETS[name].advantages, axis_name="data"))(rewards, lengths)
    assert_allclose(result, F.PRESETS[name].advantages(rewards, lengths), rtol=1e-5, atol=1e-6)


def test_where_presets_have_their_kl_and_their_ratio():
    assert {name for name, a in F.PRESETS.items() if a.ratio_to_sampler} == {"dppo"}
    kl_coefs = {name: a.kl_coef for name, a in F.PRESETS.items() if a.kl_coef}
    of_posts = dict.fromkeys((*POSTS, "reinforce_pp"), 0.01)
    assert kl_coefs == {"grpo": 0.04, "rank": 0.04, "rloo": 0.05} | of_posts
    assert {name for name, a in F.PRESETS.items() if a.kl_in_reward} == {*IN_REWARD}
    assert not any(a.kl_bias_correction for a in F.PRESETS.values())


# --- constants ---


def test_constants_are_replaced_by_name_and_never_shared():
    grpo = F.PRESETS["grpo"]
    changed = grpo.with_constants(epsilon_high=0.3, delta=4.0)
    assert changed.constants == {"epsilon_low": 0.2, "epsilon_high": 0.3, "delta": 4.0}
    assert grpo.constants == F.Objective(F.group_advantages).constants == {"epsilon_low": 0.2, "epsilon_high": 0.2}
    for objective in (*F.PRESETS.values(), changed):
        with pytest.raises(TypeError):
            objective.constants["epsilon_high"] = 0.5


def test_constants_reach_the_function_that_has_them():
    grpo, sapo = F.PRESETS["grpo"].with_constants(ddof=0, eps=0.5), F.PRESETS["sapo"]
    expected = F.group_advantages(REWARDS, ddof=0, eps=0.5)
    assert_allclose(grpo.advantages(REWARDS, REWARD_LENGTHS), expected)
    assert_allclose(grpo.compute_advantages(REWARDS, REWARD_MASK), expected)
    assert grpo.constants == F.PRESETS["grpo"].constants
    assert sapo.numbers.items() >= {"tau_positive": 1.0, "tau_negative": 1.05, "ddof": 1, "kl_coef": 0.0}.items()
    assert sapo.with_constants(tau_positive=2.0).numbers == sapo.numbers | {"tau_positive": 2.0}
    assert F.PRESETS["pass_at_k"].with_constants(k=2).numbers["k"] == 2


def test_objectives_are_hashed_by_their_fields():
    changed = F.PRESETS["grpo"].with_constants(epsilon_high=0.3)
    again = F.PRESETS["grpo"]._replace(constants={"epsilon_high": 0.3, "epsilon_low": 0.2})
    assert changed == again
    assert hash(changed) == hash(again)
    assert len({hash(objective) for objective in F.PRESETS.values()}) == len(F.PRESETS)
    # So they may be static arguments.
    loss = jax.jit(lambda x, objective: objective.loss(x, x, ADVANTAGES, MASK)[0], static_argnums=1)
    assert loss(NEW, F.PRESETS["dapo"]).shape == ()


def test_objective_fields_act_as_loss_options():
    arguments, grpo = (NEW, OLD, ADVANTAGES, MASK), F.PRESETS["grpo"]._replace(kl_coef=0.0)
    pairs = [
        (grpo, {}, {}),
        (F.PRESETS["grpo"]._replace(kl_bias_correction=True), {"ref_logprobs": REF}, {"kl_bias_correction": True}),
        (grpo, {"weights": np.asarray(TOKEN_MEAN, np.float32)}, {}),
        (grpo._replace(entropy_coef=0.5), {"entropy": -NEW}, {"entropy_coef": 0.5}),
    ]

    @jax.jit
    def of_all():
        return [
            [objective.loss(*arguments, **options)[0], F.grpo_loss(*arguments, **options, **of_loss)[0]]
            for objective, options, of_loss in pairs
        ]

    by_objective, expected = np.array(of_all()).T
    assert_allclose(by_objective, expected, rtol=1e-6)
    assert len(set(expected.round(4))) == len(pairs)


# --- what presets declare ---


@cache
def one_completion():
    """Returns, for every preset, the gradient of the loss of the first of two tokens at a ratio of 1."""
    logprobs = -np.ones((1, 2), np.float32)
    rest = logprobs, np.ones(1, np.float32), np.ones((1, 2), bool)

    def slopes(objective, **constants):
        term = partial(objective.term, **objective.constants, **constants)
        return jax.grad(lambda logprobs: term(logprobs, *rest)[0, 0])(logprobs)[0]

    return slopes, jax.jit(lambda: {name: slopes(objective) for name, objective in F.PRESETS.items()})()


@every_preset
def test_what_a_preset_declares(name):
    objective, (slopes, of_all) = F.PRESETS[name], one_completion()
    # At a ratio of 1 a token of a completion's number depends on the other one.
    assert (of_all[name][1] != 0) == objective.per_completion == (name in {"rloo", "gmpo", "luspo", *POSTS})
    if "delta" in objective.numbers:
        jax.eval_shape(partial(slopes, objective, delta=4.0))
    else:
        with pytest.raises(TypeError, match="delta"):
            slopes(objective, delta=4.0)


@cache
def small_groups():
    """Returns the advantages of groups of the smallest size, and of one less."""

    def of(name, size):
        rewards, mask = np.float32([[1, 0, 0, 0, 0], [0] * 5])[:, :size], np.ones((2, 5, 3), bool)[:, :size]
        return F.PRESETS[name].compute_advantages(rewards, mask)

    sizes = {name: objective.min_group_size for name, objective in F.PRESETS.items()}
    return jax.jit(lambda: {name: [of(name, size), of(name, max(size - 1, 1))] for name, size in sizes.items()})()


@every_preset
def test_the_smallest_group_is_declared(name):
    enough, too_few = small_groups()[name]
    assert np.isfinite(enough).all()
    assert np.any(enough)
    assert name == "reinforce_pp" or not np.any(too_few)  # whose smallest group is of one completion
    with pytest.raises(ValueError, match=r"group_size is .*at least"):
        F.check(F.PRESETS[name], group_size=F.PRESETS[name].min_group_size - 1)


def test_kl_is_computed_only_on_request():
    arguments, grpo = (NEW, OLD, ADVANTAGES, MASK), F.PRESETS["grpo"]
    asks = partial(F.grpo_loss, *arguments, kl_coef=0.04), partial(grpo.loss, *arguments)
    for loss in asks:
        with pytest.raises(ValueError, match=r"give ref_logprobs, .*kl_coef=0\.0, which with_constants"):
            loss()
        assert "kl" in loss(ref_logprobs=REF)[1]
    without = F.grpo_loss(*arguments)[0]
    assert grpo.with_constants(kl_coef=0.0).loss(*arguments)[0] == without
    assert_allclose(F.grpo_loss(*arguments, ref_logprobs=REF)[0], grpo.loss(*arguments, ref_logprobs=REF)[0])


def test_loss_weights_over_devices_cover_the_whole_batch():
    parts = [np.broadcast_to(x, (8, *x.shape)) * np.ones((8, *[1] * x.ndim), x.dtype) for x in (NEW, OLD, ADVANTAGES)]
    mask = (np.arange(8)[:, None, None] % 4 >= np.arange(4)[:, None]) & MASK  # other tokens on each device
    arrays = (*parts, mask)
    losses = [F.PRESETS[name].loss for name in ("dapo", "dr_grpo", "gspo")]

    def of_all(*arrays, **options):
        return [loss(*arrays, **options)[0] for loss in losses]

    over_devices = jax.jit(jax.vmap(partial(of_all, axis_name="data"), axis_name="data"))(*arrays)
    whole = jax.jit(of_all)(*(x.reshape(-1, *x.shape[2:]) for x in arrays))
    assert_allclose([x.sum() for x in over_devices], whole, rtol=1e-5)
