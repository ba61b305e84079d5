import inspect
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F
from grpo_jax.functional import bradley_terry_loss, critic_loss

few = settings(max_examples=25, deadline=None, derandomize=True)
numbers = hnp.arrays(np.float32, 6, elements=st.floats(-8, 8, width=32))
jitted_pair = jax.jit(bradley_terry_loss)
jitted_critic = jax.jit(critic_loss)


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


@few
@given(numbers, numbers, numbers)
def test_pairs_equal_a_plain_loop(chosen, rejected, margin):
    expected = [
        -np.log(1 / (1 + np.exp(-(float(c) - float(r) - float(m))))) + 0.25 * (float(c) + float(r)) ** 2
        for c, r, m in zip(chosen, rejected, margin, strict=True)
    ]
    assert_allclose(jitted_pair(chosen, rejected, margin=margin, center_coef=0.25), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_pairs_under_jit_and_vmap_equal_eager():
    chosen, rejected, margin = map(jnp.asarray, random_numbers(3))
    expected = bradley_terry_loss(chosen, rejected, margin=margin, center_coef=0.01)
    assert_allclose(jitted_pair(chosen, rejected, margin=margin, center_coef=0.01), expected, rtol=1e-5)
    mapped = jax.vmap(lambda c, r, m: bradley_terry_loss(c, r, margin=m, center_coef=0.01))(chosen, rejected, margin)
    assert_allclose(mapped, expected, rtol=1e-5)
    assert_allclose(bradley_terry_loss(chosen, rejected, margin=0.0), bradley_terry_loss(chosen, rejected))


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


def test_gradient_of_a_pair_equals_finite_differences():
    check_grads(
        jax.jit(lambda *arrays: bradley_terry_loss(*arrays[:2], margin=arrays[2], center_coef=0.25)),
        random_numbers(3),
        order=1,
        modes=["rev"],
        eps=1e-2,
    )


def test_extreme_pairs_stay_finite():
    chosen = np.array([1e4, -1e4, 1e30, -1e30], np.float32)
    assert_allclose(jitted_pair(chosen, -chosen), [0, 2e4, 0, 2e30], rtol=1e-6)
    of_chosen, of_rejected = pair_gradients(chosen, -chosen, 0.0, 0.0)
    assert_array_equal(of_chosen, [0, -1, 0, -1])
    assert_array_equal(of_rejected, [0, 1, 0, 1])


@few
@given(numbers, numbers, st.integers(-8, 8))
def test_without_centering_only_the_difference_counts(chosen, rejected, shift):
    shifted = jitted_pair(chosen + np.float32(shift), rejected + np.float32(shift))
    assert_allclose(shifted, jitted_pair(chosen, rejected), rtol=1e-4, atol=1e-5)
    # log σ(z) − log σ(−z) = z.
    assert_allclose(
        jitted_pair(rejected, chosen) - jitted_pair(chosen, rejected), chosen - rejected, rtol=1e-4, atol=1e-5
    )


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
    with pytest.raises(TypeError, match="ref_chosen is given alone"):
        F.hinge_loss(*of_policy, ref_chosen=arrays["ref_chosen"])
    with pytest.raises(TypeError, match="rejected_length is given alone"):
        F.ipo_loss(**arrays, rejected_length=jnp.array([2]))


def log_sigmoid(z):
    return -np.log1p(np.exp(-z))


def one_pair(name, c, r, ref_c, ref_r, n_c, n_r):
    """The equations of one pair in plain Python, with the constants of their sources."""
    h = (c - ref_c) - (r - ref_r)
    by_length = (c - ref_c) / n_c - (r - ref_r) / n_r
    odds_c, odds_r = (np.exp(x) / (1 - np.exp(x)) for x in (c / n_c, r / n_r))
    return {
        "dpo_loss": -log_sigmoid(0.1 * h),
        "robust_dpo_loss": (-0.9 * log_sigmoid(0.1 * h) + 0.1 * log_sigmoid(-0.1 * h)) / 0.8,
        "length_normalized_dpo_loss": -log_sigmoid(5 * by_length),
        "ipo_loss": (by_length - 5) ** 2,
        "hinge_loss": max(0, 1 - 0.1 * h),
        "simpo_loss": -log_sigmoid(2 * c / n_c - 2 * r / n_r - 1),
        "orpo_loss": -c / n_c - 0.1 * log_sigmoid(np.log(odds_c) - np.log(odds_r)),
        "cpo_loss": -log_sigmoid(0.1 * c - 0.1 * r) - c / n_c,
    }[name]


@every_pair_loss
def test_losses_of_pairs_equal_a_plain_loop_jitted_mapped_or_not(loss):
    arrays = random_pairs()
    rows = zip(*(x.tolist() for x in arrays.values()), strict=True)
    expected = [one_pair(loss.__name__, *row) for row in rows]
    arrays = given_to(loss, {name: jnp.asarray(x) for name, x in arrays.items()})
    for function in (loss, jax.jit(loss), jax.vmap(loss)):
        assert_allclose(function(**arrays), expected, rtol=2e-5, atol=1e-6)
    halves = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    assert loss(**halves).dtype == jnp.float32


@every_pair_loss
def test_gradients_of_pairs_equal_finite_differences_and_the_reference_has_none(loss):
    arrays = given_to(loss, random_pairs())
    others = {name: x for name, x in arrays.items() if name not in ("chosen", "rejected")}

    def of_policy(chosen, rejected):
        return loss(chosen, rejected, **others)

    check_grads(jax.jit(of_policy), (arrays["chosen"], arrays["rejected"]), order=1, modes=["rev"], eps=1e-2, rtol=0.02)
    references = {name: x for name, x in others.items() if name.startswith("ref_")}
    gradients = jax.grad(lambda refs: jnp.sum(loss(**arrays | refs)))(references)
    for gradient in gradients.values():
        assert_array_equal(gradient, np.zeros(6))


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


def test_kto_equals_a_plain_loop_and_finite_differences():
    logprobs, ref, z = (-np.abs(x) for x in random_numbers(3))
    desirable = np.array([True, False] * 3)
    expected = []
    for x, y, is_good in zip(logprobs.tolist(), ref.tolist(), desirable, strict=True):
        value = 1 / (1 + np.exp(-0.5 * (x - y - 1.5) * (1 if is_good else -1)))
        expected.append((1.25 if is_good else 1.0) * (1 - value))
    loss = partial(F.kto_loss, kl=1.5, beta=0.5, desirable_weight=1.25)
    arrays = jnp.asarray(logprobs), jnp.asarray(ref), jnp.asarray(desirable)
    for function in (loss, jax.jit(loss), jax.vmap(loss)):
        assert_allclose(function(*arrays), expected, rtol=1e-5)
    check_grads(jax.jit(lambda x: loss(x, *arrays[1:])), (logprobs,), order=1, modes=["rev"], eps=1e-2, rtol=0.02)
    of_kl = jax.grad(lambda x: jnp.sum(F.kto_loss(*arrays, kl=F.kto_kl(x, arrays[1]))))(-jnp.asarray(z))
    assert_array_equal(of_kl, np.zeros(6))
    far = jnp.array([0.0, -1e4, 0.0, -1e4, 0.0, -1e4])
    value, gradient = jax.value_and_grad(lambda x: jnp.sum(loss(x, far[::-1], arrays[2])))(far)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_the_kl_of_a_batch_does_not_depend_on_how_it_is_spread(spread):
    ref, logprobs = (x.reshape(8, 3) for x in np.random.default_rng(0).normal(size=(2, 24)).astype(np.float32))
    where = np.arange(24).reshape(8, 3) % 5 > 0

    def kl(logprobs, ref, where):
        return jnp.full_like(logprobs, F.kto_kl(logprobs, ref, where=where, axis_name="data"))

    whole = F.kto_kl(jnp.asarray(logprobs), jnp.asarray(ref), where=jnp.asarray(where))
    assert whole > 0
    assert_allclose(spread(kl)(logprobs, ref, where), np.full((8, 3), whole), rtol=1e-6)


# --- what TRL computes: golden/preferences/make.py says how ---

with np.load(Path(__file__).parents[1] / "golden" / "preferences" / "golden.npz") as file:
    GOLDEN = {name: x if x.dtype == bool else x.astype(np.float64) for name, x in file.items()}
D = {name.removeprefix("input."): GOLDEN.pop(name) for name in list(GOLDEN) if name.startswith("input.")}


def mean_over_pairs(loss, logprobs, *, reference=True, **constants):
    """The mean of a loss over TRL's pairs, from log-probabilities of tokens [N, 2, T]."""
    sums = {"chosen": logprobs, "rejected": logprobs, "ref_chosen": D["ref"], "ref_rejected": D["ref"]}
    sides = ("chosen", "rejected")
    arrays = {
        name: jnp.sum(jnp.where(D["mask"], x, 0), axis=-1)[:, sides.index(name.removeprefix("ref_"))]
        for name, x in sums.items()
    }
    if not reference:
        arrays = {name: jnp.zeros_like(x) if name.startswith("ref_") else x for name, x in arrays.items()}
    lengths = {f"{side}_length": D["mask"].sum(-1)[:, i] for i, side in enumerate(sides)}
    return jnp.mean(loss(**given_to(loss, arrays | lengths), **constants))


def kto_of_trl(logprobs, **constants):
    def total(name, mask):
        return jnp.sum(jnp.where(D[mask], D[name], 0), axis=-1)

    kl = F.kto_kl(total("mismatched", "mismatched_mask"), total("mismatched_ref", "mismatched_mask"))
    logprobs = jnp.sum(jnp.where(D["mask"], logprobs, 0), axis=-1)
    return jnp.mean(F.kto_loss(logprobs, total("ref", "mask"), D["desirable"], kl=kl, **constants))


def rated_of_trl(logprobs, estimates_kl=True, **constants):
    """Completions in the first row, mismatched ones in the second."""
    own, other = (jnp.sum(jnp.where(D["rated_mask"], x, 0), axis=-1).T for x in (logprobs, D["rated_ref"]))
    kl = F.kto_kl(own[1], other[1]) if estimates_kl else 0.0
    return jnp.mean(F.kto_loss(own[0], other[0], D["rated_desirable"], kl=kl, **constants))


OF_TRL = {
    "dpo": partial(mean_over_pairs, F.dpo_loss),
    "robust_dpo": partial(mean_over_pairs, F.robust_dpo_loss),
    "length_normalized_dpo": partial(mean_over_pairs, F.length_normalized_dpo_loss),
    "ipo": partial(mean_over_pairs, F.ipo_loss),
    "hinge": partial(mean_over_pairs, F.hinge_loss, beta=0.4),
    "cpo": partial(mean_over_pairs, F.cpo_loss),
    "conservative_without_reference": partial(mean_over_pairs, F.dpo_loss, reference=False, label_smoothing=0.1),
    "hinge_without_reference": partial(mean_over_pairs, F.hinge_loss, reference=False),
    "ipo_without_reference": partial(mean_over_pairs, F.ipo_loss, reference=False, tau=0.5),
    "simpo": partial(mean_over_pairs, F.simpo_loss),
    "orpo": partial(mean_over_pairs, F.orpo_loss),
    "kto": kto_of_trl,
    "kto_weighted": partial(kto_of_trl, beta=0.5, desirable_weight=1.5, undesirable_weight=0.5),
    "kto_rated": partial(rated_of_trl, beta=0.5, desirable_weight=1.25, undesirable_weight=0.75),
    "apo_zero": partial(rated_of_trl, beta=0.5, estimates_kl=False),
}


@pytest.mark.parametrize("name", OF_TRL)
def test_losses_and_gradients_of_trl(name):
    given = D["rated" if name in ("kto_rated", "apo_zero") else "logprobs"]
    with jax.enable_x64(True):
        loss, gradient = jax.jit(jax.value_and_grad(OF_TRL[name]))(jnp.asarray(given, jnp.float64))
    assert_allclose(loss, GOLDEN[f"{name}.loss"], rtol=1e-9)
    assert np.any(GOLDEN[f"{name}.gradient"])
    assert_allclose(gradient, GOLDEN[f"{name}.gradient"], rtol=1e-8, atol=1e-12)


def test_every_loss_of_trl_is_compared():
    of_mismatched = np.sum((D["mismatched"] - D["mismatched_ref"]) * D["mismatched_mask"], axis=-1)
    assert of_mismatched.mean() > 0.5  # a KL that is not cut off at 0
    assert {f"{name}.{part}" for name in OF_TRL for part in ("loss", "gradient")} == set(GOLDEN)


def test_masked_tokens_of_pairs_count_as_removed():
    """Whatever padding holds, the loss and its gradients are those of the tokens alone."""
    width = int(D["mask"][2:].sum(-1).max())
    rubbish = np.where(D["mask"], D["logprobs"], np.float32(np.nan))

    def total(logprobs, mask):
        sums = jnp.sum(jnp.where(mask, logprobs, 0), axis=-1)
        return jnp.sum(F.dpo_loss(sums[:, 0], sums[:, 1], jnp.zeros(3), jnp.zeros(3)))

    padded = jax.value_and_grad(total)(jnp.asarray(rubbish[2:]), D["mask"][2:])
    removed = jax.value_and_grad(total)(jnp.asarray(D["logprobs"][2:, :, :width]), D["mask"][2:, :, :width])
    assert_allclose(padded[0], removed[0], rtol=1e-6)
    assert_allclose(padded[1][..., :width], removed[1], rtol=1e-6)


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


@few
@given(numbers, numbers, numbers)
def test_critic_equals_a_plain_loop(values, returns, old_values):
    expected = []
    for v, r, old in zip(values.tolist(), returns.tolist(), old_values.tolist(), strict=True):
        clipped = min(max(v, old - 0.5), old + 0.5)
        expected.append(max((v - r) ** 2, (clipped - r) ** 2) / 2)
    assert_allclose(jitted_critic(values, returns, old_values=old_values, clip=0.5), expected, rtol=1e-4, atol=1e-5)
    assert_allclose(jitted_critic(values, returns), [(v - r) ** 2 / 2 for v, r in zip(values, returns, strict=True)])


@pytest.mark.slow
def test_critic_under_jit_and_vmap_equals_eager():
    values, returns, old_values = map(jnp.asarray, random_numbers(3))
    expected = critic_loss(values, returns, old_values=old_values)
    assert_allclose(jitted_critic(values, returns, old_values=old_values), expected, rtol=1e-5)
    mapped = jax.vmap(lambda v, r, old: critic_loss(v, r, old_values=old))(values, returns, old_values)
    assert_allclose(mapped, expected, rtol=1e-5)


def critic_gradients(values, returns, old_values=None):
    def total(values, returns, old_values):
        return jnp.sum(critic_loss(values, returns, old_values=old_values))

    arguments = (0, 1) if old_values is None else (0, 1, 2)
    return jax.jit(jax.grad(total, arguments))(values, returns, old_values)


def test_gradient_of_the_critic_is_its_error_and_nothing_moves_the_returns():
    values, returns, _ = random_numbers(3)
    of_values, of_returns = critic_gradients(values, returns)
    assert_allclose(of_values, values - returns, rtol=1e-6)
    assert_array_equal(of_returns, np.zeros(6))


def test_gradient_of_the_critic_is_gone_where_the_clipped_value_is_worse():
    # As by hand above: twice clipped and worse, twice as without a clip. Old values have no gradient either.
    values, old_values = np.array([[v, old] for v, old, *_ in BY_HAND], np.float32).T
    of_values, of_returns, of_old = critic_gradients(values, np.full(4, 3, np.float32), old_values)
    assert_allclose(of_values, [0, 0, 1, 0.1], rtol=1e-4)
    assert_array_equal(of_returns, np.zeros(4))
    assert_array_equal(of_old, np.zeros(4))


@pytest.mark.parametrize("clipped", [False, True])
def test_gradient_of_the_critic_equals_finite_differences(clipped):
    values, returns, old_values = random_numbers(3)
    options = {"old_values": old_values} if clipped else {}
    check_grads(
        jax.jit(lambda v: critic_loss(v, returns, **options)),
        (values,),
        order=1,
        modes=["rev"],
        eps=1e-3,
        rtol=2e-2,
        atol=2e-2,
    )
