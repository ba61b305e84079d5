"""Losses on preferences and the critic's: numbers derived by hand, extremes, and which losses are the same."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F
from grpo_jax.functional import bradley_terry_loss, critic_loss


def random_numbers(count):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=6).astype(np.float32) for _ in range(count))


# --- scores of pairs ---


@pytest.mark.parametrize(
    ("chosen", "rejected", "options", "loss"),
    [
        (0.0, 0.0, {}, 0.6931),  # log 2
        (2.0, 1.0, {}, 0.3133),  # log(1 + e⁻¹)
        (1.0, 2.0, {}, 1.3133),  # log(1 + e) = 1 + log(1 + e⁻¹)
        (2.0, 1.0, {"margin": 1.0}, 0.6931),  # 2 − 1 − 1 = 0
        (2.0, 1.0, {"margin": 2.0}, 1.3133),
        (2.0, 1.0, {"center_coef": 0.5}, 0.3133 + 4.5),  # ½ · 3²
        (2.0, -2.0, {"center_coef": 0.5}, 0.0181),  # centred already; log(1 + e⁻⁴)
    ],
)
def test_pairs_by_hand(chosen, rejected, options, loss):
    assert_allclose(bradley_terry_loss(jnp.array(chosen), jnp.array(rejected), **options), loss, atol=1e-4)


def pair_gradients(chosen, rejected, margin, center_coef):
    def total(chosen, rejected):
        return jnp.sum(bradley_terry_loss(chosen, rejected, margin=margin, center_coef=center_coef))

    return jax.jit(jax.grad(total, (0, 1)))(chosen, rejected)


@pytest.mark.parametrize("center_coef", [0.0, 0.25])
def test_gradient_of_a_pair_is_the_probability_of_the_other_order(center_coef):
    # ∂/∂r_c −log σ(z) = −σ(−z), z = r_c − r_r − margin: what the model still gives to the wrong order.
    chosen, rejected, margin = random_numbers(3)
    wrong = 1 / (1 + np.exp(chosen - rejected - margin))
    centering = 2 * center_coef * (chosen + rejected)
    of_chosen, of_rejected = pair_gradients(chosen, rejected, margin, center_coef)
    assert_allclose(of_chosen, -wrong + centering, rtol=1e-5, atol=1e-6)
    assert_allclose(of_rejected, wrong + centering, rtol=1e-5, atol=1e-6)


def test_extreme_pairs_stay_finite():
    chosen = np.array([1e4, -1e4, 1e30, -1e30], np.float32)
    assert_allclose(bradley_terry_loss(chosen, -chosen), [0, 2e4, 0, 2e30], rtol=1e-6)
    of_chosen, of_rejected = pair_gradients(chosen, -chosen, 0.0, 0.0)
    assert_array_equal(of_chosen, [0, -1, 0, -1])
    assert_array_equal(of_rejected, [0, 1, 0, 1])


# --- policies on pairs ---

# log π(c) = −3 over 2 tokens, log π(r) = −8 over 4; log π_ref(c) = −5, log π_ref(r) = −6:
# h = 2 − (−2) = 4; per token 1 − (−½) = 1.5. p(c) = e^−1.5 = 0.2231, p(r) = e^−2 = 0.1353.
HAND = {"chosen": -3.0, "rejected": -8.0, "ref_chosen": -5.0, "ref_rejected": -6.0}
HAND |= {"chosen_length": 2, "rejected_length": 4}
PAIRS_BY_HAND = [
    ("dpo_loss", {"beta": 0.25}, 0.3133),  # log(1 + e⁻¹)
    ("dpo_loss", {"beta": 0.25, "label_smoothing": 0.1}, 0.4133),  # 0.9 · 0.3133 + 0.1 · 1.3133
    ("robust_dpo_loss", {"beta": 0.25}, 0.1883),  # (0.9 · 0.3133 − 0.1 · 1.3133) / 0.8
    ("length_normalized_dpo_loss", {"beta": 2 / 3}, 0.3133),
    ("length_normalized_dpo_loss", {"beta": 2 / 3, "label_smoothing": 0.1}, 0.4133),
    ("ipo_loss", {"tau": 0.25}, 0.25),  # of means: (1.5 − 2)²
    ("hinge_loss", {}, 0.6),  # 1 − 0.1 · 4
    ("hinge_loss", {"beta": 0.25}, 0.0),
    ("simpo_loss", {"gamma": 0.0}, 0.3133),  # 2 (−1.5 + 2) = 1
    ("simpo_loss", {}, 0.6931),  # less γ = 1
    # log odds −1.5 − log(1 − 0.2231) = −1.2475 and −2 − log(1 − 0.1353) = −1.8546; log(1 + e^−0.6071) = 0.4352.
    ("orpo_loss", {}, 1.5435),  # 1.5 + 0.04352
    ("cpo_loss", {"beta": 0.2}, 1.8133),  # 0.3133 + 3 / 2
    ("cpo_loss", {"beta": 0.2, "nll_coef": 0.0}, 0.3133),
]
PAIR_LOSSES = [F.dpo_loss, F.robust_dpo_loss, F.length_normalized_dpo_loss, F.ipo_loss, F.hinge_loss]
PAIR_LOSSES += [F.simpo_loss, F.orpo_loss, F.cpo_loss]
every_pair_loss = pytest.mark.parametrize("loss", PAIR_LOSSES, ids=lambda loss: loss.__name__)


def given_to(loss, arrays):
    """Those of the arrays that a loss takes."""
    return {name: x for name, x in arrays.items() if name in inspect.signature(loss).parameters}


def random_pairs():
    """Arrays of six pairs."""
    rng = np.random.default_rng(0)
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    arrays = {name: -rng.exponential(4, 6).astype(np.float32) - np.float32(0.1) for name in names}
    return arrays | {name: rng.integers(1, 7, 6) for name in ("chosen_length", "rejected_length")}


@pytest.mark.parametrize(("name", "constants", "expected"), PAIRS_BY_HAND)
def test_losses_of_pairs_by_hand(name, constants, expected):
    loss = getattr(F, name)
    arrays = given_to(loss, {name: jnp.asarray(x)[None] for name, x in HAND.items()})
    assert_allclose(loss(**arrays, **constants), [expected], atol=1e-4)


def test_equations_as_they_stand_are_of_sums():
    arrays = {name: jnp.asarray(HAND[name])[None] for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")}
    assert_allclose(F.ipo_loss(**arrays, tau=0.25), [4.0])  # (4 − 2)²
    of_policy = arrays["chosen"], arrays["rejected"]
    assert_allclose(F.cpo_loss(*of_policy, beta=0.2), [3.3133], atol=1e-4)  # 0.3133 + 3
    assert_allclose(F.hinge_loss(*of_policy), [0.5])  # 1 − 0.1 · 5
    with pytest.raises(TypeError, match=r"ref_chosen.*ref_rejected"):
        F.hinge_loss(*of_policy, ref_chosen=arrays["ref_chosen"])
    with pytest.raises(TypeError, match=r"rejected_length.*chosen_length"):
        F.ipo_loss(**arrays, rejected_length=jnp.array([2]))


@every_pair_loss
def test_extreme_pairs_have_finite_losses_and_gradients(loss):
    # Probability 1, almost 0, an empty completion (which fills up a batch), and the wrong order by far.
    far = np.array([0.0, -1e4, 0.0, -1e4], np.float32)
    arrays = {"chosen": far, "rejected": far[::-1].copy(), "ref_chosen": far[::-1].copy(), "ref_rejected": far}
    arrays |= {"chosen_length": np.array([3, 0, 0, 1]), "rejected_length": np.array([0, 3, 0, 1])}
    arrays = given_to(loss, arrays)
    losses, gradients = jax.jit(jax.value_and_grad(lambda x: jnp.sum(loss(**x)), allow_int=True))(arrays)
    assert np.isfinite(losses)
    assert np.isfinite(gradients["chosen"]).all()
    assert np.isfinite(gradients["rejected"]).all()


def test_dpo_is_bradley_and_terrys_loss_of_the_rewards_that_a_policy_implies():
    arrays = random_pairs()
    rewards = (0.3 * (arrays[side] - arrays[f"ref_{side}"]) for side in ("chosen", "rejected"))
    assert_allclose(F.dpo_loss(**given_to(F.dpo_loss, arrays), beta=0.3), bradley_terry_loss(*rewards), rtol=1e-5)


def test_robust_dpo_of_flipped_pairs_is_dpo_of_the_right_ones_in_expectation():
    arrays = given_to(F.dpo_loss, random_pairs())
    chosen, rejected, ref_chosen, ref_rejected = arrays.values()
    right = F.robust_dpo_loss(**arrays, label_smoothing=0.2)
    flipped = F.robust_dpo_loss(rejected, chosen, ref_rejected, ref_chosen, label_smoothing=0.2)
    assert_allclose(0.8 * right + 0.2 * flipped, F.dpo_loss(**arrays), rtol=1e-5)


# --- completions, desirable or not ---


def test_kto_by_hand():
    # β (x − z₀) = 0.1 (12 − 2) = 1 and 0.1 (−8 − 2) = −1: σ(−1) = 0.2689, so each is as it should be.
    arrays = jnp.array([-4.0, -9.0]), jnp.array([-16.0, -1.0]), jnp.array([True, False])
    assert_allclose(F.kto_loss(*arrays, kl=2.0), [0.2689, 0.2689], atol=1e-4)
    weighted = F.kto_loss(*arrays, kl=jnp.array([2.0, 2.0]), desirable_weight=2.0, undesirable_weight=0.5)
    assert_allclose(weighted, [0.5379, 0.1345], atol=1e-4)
    # Mean of 3, −1 and 4 is 2; without the last 1; of the second alone it would be below 0.
    mismatched = jnp.array([-3.0, -8.0, -1.0]), jnp.array([-6.0, -7.0, -5.0])
    assert_allclose(F.kto_kl(*mismatched), 2.0)
    assert_allclose(F.kto_kl(*mismatched, where=jnp.array([True, True, False])), 1.0)
    assert_allclose(F.kto_kl(*mismatched, where=jnp.array([False, True, False])), 0.0)
    assert_allclose(F.kto_kl(*mismatched, where=jnp.zeros(3, bool)), 0.0)


def test_the_kl_of_a_batch_does_not_depend_on_how_it_is_spread(spread):
    ref, logprobs = (x.reshape(8, 3) for x in np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32))
    where = np.arange(24).reshape(8, 3) % 5 > 0

    def kl(logprobs, ref, where):
        return jnp.full_like(logprobs, F.kto_kl(logprobs, ref, where=where, axis_name="data"))

    whole = F.kto_kl(jnp.asarray(logprobs), jnp.asarray(ref), where=jnp.asarray(where))
    assert whole > 0
    assert_allclose(spread(kl)(logprobs, ref, where), np.full((8, 3), whole), rtol=1e-6)


# --- the critic ---

# R = 3. V = 1: ½ · 4. Clipped to V_old ± 0.2 it is 0.7 where V_old is 0.5: ½ (2.3)² = 2.645 is larger.
# V = 3.5 of V_old = 5: clipped to 4.8, ½ (1.8)² = 1.62 is larger than ½ (0.5)².
# V = 4 of V_old = 3: clipped to 3.2, ½ (0.2)² is smaller than ½ · 1: no clip.
BY_HAND = [(1.0, 0.5, 2.0, 2.645), (3.5, 5.0, 0.125, 1.62), (4.0, 3.0, 0.5, 0.5), (3.1, 3.0, 0.005, 0.005)]


@pytest.mark.parametrize(("value", "old_value", "loss", "clipped_loss"), BY_HAND)
def test_critic_by_hand(value, old_value, loss, clipped_loss):
    value, old_value, returns = jnp.array(value), jnp.array(old_value), jnp.array(3.0)
    assert_allclose(critic_loss(value, returns), loss, rtol=1e-4)
    assert_allclose(critic_loss(value, returns, old_values=old_value), clipped_loss, rtol=1e-4)
    assert_allclose(critic_loss(value, returns, old_values=old_value, clip=10.0), loss, rtol=1e-4)


def test_gradient_of_the_critic_is_gone_where_the_clipped_value_is_worse():
    # As by hand above: twice clipped and worse, twice as without a clip.
    values, old_values = np.array([[v, old] for v, old, *_ in BY_HAND], np.float32).T
    gradient = jax.grad(lambda values: jnp.sum(critic_loss(values, jnp.full(4, 3.0), old_values=old_values)))(values)
    assert_allclose(gradient, [0, 0, 1, 0.1], rtol=1e-4)
