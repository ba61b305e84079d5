import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import bradley_terry_loss, critic_loss

few = settings(max_examples=25, deadline=None, derandomize=True)
numbers = hnp.arrays(np.float32, 6, elements=st.floats(-8, 8, width=32))
jitted_pair = jax.jit(bradley_terry_loss)
jitted_critic = jax.jit(critic_loss)


def random_numbers(count):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=6).astype(np.float32) for _ in range(count))


# --- pairs ---


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
