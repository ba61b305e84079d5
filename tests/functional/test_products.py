"""Products that are written for a backend give what the plain formulas give, whichever backend they are written for."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from grpo_jax.functional import products

both_backends = pytest.mark.parametrize("traits", [products.CPU, products.GPU], ids=["cpu", "gpu"])


@pytest.fixture
def normal():
    rng = np.random.default_rng(0)
    return lambda *shape: rng.normal(size=shape).astype(np.float32)


# ---- traits


BACKENDS = [
    ("cpu", "", 0, "float32"),
    ("tpu", "", 0, "bfloat16"),
    ("gpu", "9.0", 256, "bfloat16"),
    ("gpu", "10.0", 256, "bfloat16"),
    ("gpu", "8.9", 128, "bfloat16"),
    ("gpu", "7.5", 0, "float32"),  # a T4
    ("gpu", "gfx90a", 0, "bfloat16"),
]


@pytest.mark.parametrize(("backend", "capability", "flash", "dtype"), BACKENDS)
def test_traits_follow_the_backend(monkeypatch, backend, capability, flash, dtype):
    class Device:
        compute_capability = capability

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    traits = products.traits_of_backend()
    assert (traits.backend, traits.flash_features, traits.default_dtype) == (backend, flash, dtype)


def test_traits_are_assumed_only_inside():
    before = products.traits_of_backend()
    with products.assume_traits(piece_tokens=5), products.assume_traits(rooms=7):
        assert products.traits_of_backend() == before._replace(piece_tokens=5, rooms=7)
    assert products.traits_of_backend() == before


# ---- products


@both_backends
def test_products_and_their_gradients_equal_tensordot(traits, normal):
    shapes = [((5,), (3,)), ((3,), (5,)), ((2, 4), (3,)), ((4,), (2, 3))]
    arrays = [(normal(2, 6, *x), normal(*x, *y), normal(2, 6, *y)) for x, y in shapes]

    @partial(jax.jit, static_argnums=0)
    def evaluate(multiply, arrays):
        def total(x, kernel, weights):
            y = multiply(x, kernel, kernel.ndim - weights.ndim + 2)
            return jnp.sum(y * weights), y

        return [jax.grad(total, (0, 1), has_aux=True)(*x) for x in arrays]

    with products.assume_traits(**traits._asdict()):
        written = evaluate(products.product, arrays)
    expected = evaluate(lambda x, kernel, axes: jnp.tensordot(x, kernel, axes=axes), arrays)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), written, expected)


@both_backends
def test_a_product_in_bfloat16_is_accumulated_in_float32(traits):
    # 256 + 1 + ... + 1: bfloat16 has no 257, so a sum in bfloat16 would stay at 256.
    x = jnp.ones((2, 257), jnp.bfloat16).at[:, 0].set(256)
    kernel = jnp.ones((257, 1), jnp.bfloat16)
    with products.assume_traits(**traits._asdict()):
        result = products.product(x, kernel), products.contract(x, kernel.T, 1, 1, jnp.bfloat16)
    for y in result:
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(y.astype(jnp.float32), [[512], [512]])


@both_backends
@pytest.mark.parametrize("num_keys", [3, 256])
def test_sum_over_queries_equals_a_loop(traits, num_keys, normal):
    weights, queries = normal(2, 1, 2, 4, num_keys), normal(2, 1, 2, 4, 5)
    expected = np.zeros((2, 1, 2, num_keys, 5))
    for query in range(4):
        expected += weights[..., query, :, None] * queries[..., query, None, :]
    with products.assume_traits(**traits._asdict()):
        np.testing.assert_allclose(jax.jit(products.sum_over_queries)(weights, queries), expected, rtol=1e-5, atol=1e-5)


# ---- norm


def test_rms_norm_by_hand():
    # The mean square of (3, 4, 0, 0) is 25 / 4, so that its root is 2.5.
    result = products.rms_norm(jnp.array([3.0, 4.0, 0.0, 0.0]), jnp.array([1.0, 2.0, 1.0, 1.0]), 0.0)
    np.testing.assert_allclose(result, [1.2, 3.2, 0, 0], rtol=1e-6)


@both_backends
def test_gradients_of_rms_norm_are_finite_differences(traits, normal):
    normed = jax.jit(lambda x, scale: products.rms_norm(x, scale, 1e-5))
    with jax.numpy_rank_promotion("allow"), products.assume_traits(**traits._asdict()):
        check_grads(normed, (normal(3, 4, 5), normal(5)), 1, modes=["rev"], atol=1e-2, rtol=1e-2)


# ---- sums of exponentials


@both_backends
@pytest.mark.parametrize("axis", [-1, 0])
def test_sums_of_exponentials_equal_numpy(traits, axis, normal):
    z, value = 30 * normal(3, 7), normal(3, 7)
    z[1], z[0, 4], z[2, 2] = -5e4, -np.inf, -np.inf  # exp(−5e4 − m) is 0 in every dtype, unless m is −5e4 too
    exact, exact_value = np.float64(z), np.float64(value)
    maximum = exact.max(axis)
    weights = np.exp(exact - np.expand_dims(maximum, axis))
    expected = [maximum, weights.sum(axis), (exact_value * weights).sum(axis)]
    with products.assume_traits(**traits._asdict()):
        at_once = products.exp_sums(jnp.asarray(z), [jnp.asarray(value)], axis)
        in_a_program = jax.jit(lambda *x: products.exp_sums(x[0], x[1:], axis))(z, value)
    for result in (at_once, in_a_program):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), tuple(result), tuple(expected))


# ---- writes, and the order of computations


@both_backends
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_slices_are_written_at_clipped_positions(traits, dtype):
    array, part = jnp.zeros((2, 5, 3), dtype), jnp.ones((1, 2, 2), dtype) * 7
    expected = np.zeros((2, 5, 3))
    expected[1, 3:, 1:] = 7  # a slice of 2 that would begin at 4 begins at 3
    with products.assume_traits(**traits._asdict()):
        result = jax.jit(lambda start: products.write_slice(array, part, {0: 1, 1: start, -1: 1}))(4)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result.astype(jnp.float32), expected)


@pytest.mark.parametrize(
    ("traits", "dtype"), [(products.CPU, jnp.float32), (products.GPU, jnp.bfloat16)], ids=["cpu", "gpu"]
)
def test_accumulators_use_a_type_written_in_place(traits, dtype):
    with products.assume_traits(**traits._asdict()):
        total = products.accumulator_of(jnp.ones((2, 3), jnp.bfloat16))
    assert total.dtype == dtype
    assert not total.any()


@pytest.mark.parametrize("x", [1.0, -np.inf, np.nan])
def test_what_is_delayed_is_unchanged(x):
    codes, x = jnp.arange(-3, 3, dtype=jnp.int8), jnp.full((2, 2), x)
    np.testing.assert_array_equal(jax.jit(products.delayed_until)(codes, x), codes)
    np.testing.assert_array_equal(jax.jit(products.delayed_on_mesh)({"codes": codes}, x)["codes"], codes)


# ---- products and writes without copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposed_equals_numpy_swapaxes(dtype):
    arrays = [jnp.arange(np.prod(x), dtype=dtype).reshape(x) for x in [(4, 3), (3, 4), (2, 1, 6, 5)]]
    expected = [jnp.asarray(np.swapaxes(np.asarray(x), -1, -2)) for x in arrays]
    chex.assert_trees_all_equal(jax.jit(partial(jax.tree.map, products.transposed))(arrays), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by_columns", [False, True])
def test_times_transposed_equals_numpy_for_few_rows(by_columns, dtype):
    rng, rows = np.random.default_rng(0), [(1,), (3,), (8,), (2, 3), ()]
    xs, matrix = [rng.integers(-8, 9, (*n, 5)) for n in rows], rng.integers(-8, 9, (40, 5))  # exact in both types
    multiply = partial(products.times_transposed, dtype=jnp.float32, by_columns=by_columns)
    compiled = jax.jit(lambda xs, matrix: [multiply(x, matrix) for x in xs])
    for x, y in zip(xs, compiled([jnp.asarray(x, dtype) for x in xs], jnp.asarray(matrix, dtype)), strict=True):
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(y), x @ matrix.T)


def test_writing_bfloat16_slices_makes_no_float32_copy():
    array, part = jnp.zeros((64, 32), jnp.bfloat16), jnp.ones((1, 32), jnp.bfloat16)
    written = jax.jit(lambda array, part, start: products.write_slice(array, part, {0: start}), donate_argnums=0)
    assert "f32[64,32]" not in written.lower(array, part, 3).compile().as_text()
