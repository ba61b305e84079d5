"""Presets against their formulas written out in NumPy, and what `check` refuses."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from test_loops import by_rank, centered, leave_one_out, max_rl, pass_at, standardised

from grpo_jax import functional as F

every_preset = pytest.mark.parametrize("name", F.PRESETS)
POSTS = ("companion_post", "introduction_post", "introduction_post_rank")

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

        return {name: of(preset) for name, preset in F.PRESETS.items()}

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
    weights = SEQUENCE_SUM if name in ("rloo", *POSTS) else LOSSES[name][1]
    assert_allclose(gradient, -A * weights, rtol=1e-5, atol=1e-7)


# --- advantages, written out ---

REWARDS = np.array([[1, 0, 0, 1, 0, 0, 0, 0.5], [0, 0, 1, 1, 1, 0, 1, 1], [0.5] * 8], np.float32)
REWARD_LENGTHS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]] * 3, np.float32)
R = REWARDS.astype(float)


def of_groups(loop, scale=1.0):
    return scale * np.array([loop(group) for group in R.tolist()])


# The population deviation of eight is √(7/8) of the sample deviation.
POPULATION = (8 / 7) ** 0.5
ADVANTAGES_OF = {
    "dr_grpo": of_groups(centered),
    "rank": of_groups(by_rank),
    "rloo": of_groups(leave_one_out),
    "companion_post": of_groups(standardised, POPULATION),
    "introduction_post": of_groups(standardised, POPULATION),
    "introduction_post_rank": of_groups(by_rank, POPULATION),
    "opo": R - np.sum(REWARD_LENGTHS * R, -1, keepdims=True) / np.sum(REWARD_LENGTHS, -1, keepdims=True),
    "gpg": of_groups(centered, 24 / 16),  # two groups of three have signal
    "max_rl": of_groups(max_rl),
    "lite_ppo": of_groups(centered) / (R.std(ddof=1) + 1e-6),
    "pass_at_k": of_groups(partial(pass_at, 4)),
}


@every_preset
def test_advantages_are_the_formula_written_out(name):
    advantages = jax.jit(F.PRESETS[name].advantages)(REWARDS, REWARD_LENGTHS)
    assert_allclose(advantages, ADVANTAGES_OF.get(name, of_groups(standardised)), rtol=1e-4, atol=1e-6)


OF_BATCH = ("gpg", "lite_ppo")  # those of other presets look only at their group


@pytest.mark.parametrize("name", OF_BATCH)
def test_advantages_of_a_batch_over_devices_are_those_of_the_whole(name, spread):
    rewards = np.arange(8, dtype=np.float32)[:, None, None] * REWARDS
    lengths = np.broadcast_to(REWARD_LENGTHS, rewards.shape)
    result = spread(partial(F.PRESETS[name].advantages, axis_name="data"))(rewards, lengths)
    assert_allclose(result, F.PRESETS[name].advantages(rewards, lengths), rtol=1e-5, atol=1e-6)


@every_preset
def test_which_advantages_look_at_other_groups(name):
    advantages = jax.jit(F.PRESETS[name].advantages)
    alone = advantages(REWARDS[:2], REWARD_LENGTHS[:2])
    assert np.allclose(advantages(REWARDS, REWARD_LENGTHS)[:2], alone) == (name not in OF_BATCH)


def test_where_presets_have_their_kl_and_their_ratio():
    assert {name for name, a in F.PRESETS.items() if a.ratio_to_sampler} == {"dppo"}
    kl_coefs = {name: a.kl_coef for name, a in F.PRESETS.items() if a.kl_coef}
    assert kl_coefs == {"grpo": 0.04, "rank": 0.04, "rloo": 0.05} | dict.fromkeys(POSTS, 0.01)
    assert {name for name, a in F.PRESETS.items() if a.kl_in_reward} == {"rloo"}
    assert not any(a.kl_bias_correction for a in F.PRESETS.values())


def test_ignore_lengths_gives_constants_and_no_lengths():
    rewards, rubbish = jnp.asarray(REWARDS), jnp.full((3, 8), jnp.nan)
    expected = F.group_advantages(rewards, ddof=0, eps=0.5)
    assert_array_equal(F.ignore_lengths(F.group_advantages, ddof=0, eps=0.5)(rewards, rubbish), expected)


# --- constants ---


def test_constants_are_replaced_by_name_and_never_shared():
    grpo = F.PRESETS["grpo"]
    changed = grpo.with_constants(epsilon_high=0.3, delta=4.0)
    assert changed.constants == {"epsilon_low": 0.2, "epsilon_high": 0.3, "delta": 4.0}
    assert grpo.constants == F.Objective(F.group_advantages).constants == {"epsilon_low": 0.2, "epsilon_high": 0.2}
    for objective in (*F.PRESETS.values(), changed):
        with pytest.raises(TypeError):
            objective.constants["epsilon_high"] = 0.5


def test_objectives_are_hashed_by_their_fields():
    changed = F.PRESETS["grpo"].with_constants(epsilon_high=0.3)
    again = F.PRESETS["grpo"]._replace(constants={"epsilon_high": 0.3, "epsilon_low": 0.2})
    assert changed == again
    assert hash(changed) == hash(again)
    assert len({hash(objective) for objective in F.PRESETS.values()}) == len(F.PRESETS)
    # So they may be static arguments.
    loss = jax.jit(lambda x, objective: objective.loss(x, x, ADVANTAGES, MASK)[0], static_argnums=1)
    assert loss(NEW.astype(np.float32), F.PRESETS["dapo"]).shape == ()


def test_options_of_an_objective_are_those_of_the_loss():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    arguments, weights = (logprobs, old_logprobs, ADVANTAGES, MASK), np.asarray(TOKEN_MEAN, np.float32)
    grpo = F.PRESETS["grpo"]
    pairs = [
        (grpo._replace(kl_coef=0.0), {}, {}),
        (grpo._replace(kl_bias_correction=True), {"ref_logprobs": ref_logprobs}, {"kl_bias_correction": True}),
        (grpo, {"ref_logprobs": ref_logprobs, "weights": weights}, {}),
        (grpo._replace(kl_coef=0.0, entropy_coef=0.5), {"entropy": -logprobs}, {"entropy_coef": 0.5}),
    ]
    results = []
    for objective, options, of_loss in pairs:
        results.append(jax.jit(objective.loss)(*arguments, **options))
        expected = jax.jit(partial(F.grpo_loss, **of_loss))(*arguments, **options)
        jax.tree.map(partial(assert_allclose, rtol=1e-6), results[-1], expected)
    assert len({round(float(loss), 4) for loss, _ in results}) == len(pairs)


# --- check ---

GROUP = F.ignore_lengths(F.group_advantages)
OF_COMPLETIONS = F.Objective(GROUP, per_completion=True)


@pytest.mark.parametrize(
    "objective",
    [
        *F.PRESETS.values(),
        *(
            F.Objective(GROUP, aggregation=x)
            for x in (F.token_mean_weights, F.constant_length_weights, F.sequence_sum_weights)
        ),
        OF_COMPLETIONS._replace(aggregation=F.sequence_sum_weights),
        OF_COMPLETIONS._replace(aggregation=partial(F.sequence_mean_weights)),
        F.PRESETS["grpo"]._replace(divergence=F.kl_k1, kl_bias_correction=True),
        F.PRESETS["grpo"]._replace(divergence=F.kl_k1, kl_in_reward=True),
        F.PRESETS["grpo"]._replace(divergence=F.kl_k1, kl_coef=0.0),
        F.PRESETS["dapo"]._replace(term=partial(F.clip_cov_term, key=jax.random.key(0))),
        F.PRESETS["cispo"].with_constants(epsilon_high=0.5),
        F.PRESETS["grpo"].with_constants(delta=1.3),
        F.PRESETS["gmpo"].with_constants(epsilon_low=0.0),
    ],
)
def test_what_makes_sense_is_accepted(objective):
    F.check(objective)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (OF_COMPLETIONS._replace(aggregation=F.token_mean_weights), "sequence_mean_weights"),
        (OF_COMPLETIONS._replace(aggregation=F.constant_length_weights), "sequence_mean_weights"),
        (F.PRESETS["gmpo"]._replace(aggregation=partial(F.token_mean_weights)), "sequence_mean_weights"),
        (F.PRESETS["grpo"]._replace(divergence=F.kl_k1), "kl_k1.*kl_unbiased.*kl_in_reward"),
        (F.PRESETS["grpo"]._replace(kl_coef=-1.0), "kl_coef is -1.0"),
        (F.PRESETS["grpo"]._replace(entropy_coef=float("inf")), "entropy_coef is inf"),
        (F.PRESETS["grpo"]._replace(kl_in_reward=True, kl_bias_correction=True), "kl_bias_correction.*kl_in_reward"),
        (F.PRESETS["grpo"].with_constants(epsilon_low=float("nan")), "epsilon_low is nan"),
        (F.PRESETS["cispo"].with_constants(epsilon_high=-0.5), "epsilon_high is -0.5"),
        (F.PRESETS["grpo"].with_constants(delta=1.0), "delta is 1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(objective, words):
    with pytest.raises(ValueError, match=words) as error:
        F.check(objective)
    assert "\n" not in str(error.value)


@every_preset
def test_what_a_preset_declares(name):
    objective = F.PRESETS[name]
    arrays = -np.ones((1, 2), np.float32), -np.ones((1, 2), np.float32), np.ones(1, np.float32), np.ones((1, 2), bool)

    def first_token(logprobs):
        return objective.term(logprobs, *arrays[1:], **objective.constants)[0, 0]

    # At a ratio of 1 a token of a completion's number depends on the other one.
    assert (jax.grad(first_token)(arrays[0])[0, 1] != 0) == objective.per_completion
    assert objective.per_completion == (name in {"rloo", "gmpo", "luspo", *POSTS})
    if objective.takes_delta:
        objective.term(*arrays, **objective.constants, delta=4.0)
    else:
        with pytest.raises(TypeError, match="delta"):
            objective.term(*arrays, **objective.constants, delta=4.0)


@every_preset
def test_the_smallest_group_is_declared(name):
    least = F.PRESETS[name].min_group_size

    def advantages(size):
        return F.PRESETS[name].advantages(jnp.array([1.0, 0.0, 0.0, 2.0])[:size], jnp.array([3, 1, 2, 5])[:size])

    assert jnp.isfinite(advantages(least)).all()
    if name == "pass_at_k":
        with pytest.raises(ValueError, match="k is 4"):
            advantages(least - 1)
    else:
        assert not advantages(least - 1).any()
    with pytest.raises(ValueError, match=r"group_size is .*at least"):
        F.check(F.PRESETS[name], group_size=least - 1)


def test_a_reference_is_asked_for_and_refused_by_methods_that_read_it_elsewhere():
    logprobs, old_logprobs, ref_logprobs = random_logprobs()
    arguments = logprobs, old_logprobs, ADVANTAGES, MASK
    with pytest.raises(ValueError, match="give ref_logprobs"):
        F.PRESETS["grpo"].loss(*arguments)
    with pytest.raises(ValueError, match="kl_penalized_rewards"):
        F.PRESETS["rloo"].loss(*arguments, ref_logprobs=ref_logprobs)


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
