"""Properties that the functions of `cases.py` share. One program computes all of them at once."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, COMPUTE_IN_16_BITS, ROWS, Case, T
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

HAVE_MASK = [name for name, case in CASES.items() if case.mask]
every_case = pytest.mark.parametrize("name", CASES)


def counts(x, mask):
    """Returns what of an array counts: places as in the mask, or rows with any; None: all of it."""
    if x.shape[: mask.ndim] == mask.shape:
        return mask
    return mask.any(-1) if x.ndim == mask.ndim - 1 and x.shape == mask.shape[:-1] else None


def only_counted(x, mask):
    where = counts(x, mask)
    if where is None:
        return x
    return jnp.where(jnp.reshape(where, (*where.shape, *[1] * (x.ndim - where.ndim))), x, jnp.zeros_like(x))


def evaluate(case: Case, arrays, numbers, weights):
    """Returns the sum of a result in which every number has its own weight, the result, and the sum's gradients."""

    def total(inputs):
        result = case.function(**arrays | inputs, **numbers)
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(result)]
        if case.mask:
            leaves = [only_counted(x, arrays[case.mask]) for x in leaves]
        return sum(jnp.sum(x * weight) for x, weight in zip(leaves, weights, strict=True)), result

    names = (case.differentiable + " " + case.constant).split()
    (value, result), gradients = jax.value_and_grad(total, has_aux=True)({name: arrays[name] for name in names})
    return value, result, gradients


@jax.jit
def evaluate_all(arguments):
    return {name: evaluate(CASES[name], *of_case) for name, of_case in arguments.items()}


@cache
def weights_of_results():
    def of_case(case):
        shapes = jax.tree.leaves(jax.eval_shape(lambda: case.function(**case.arrays, **case.numbers)))
        return [np.linspace(1, 2, int(np.prod(x.shape)), dtype=np.float32).reshape(x.shape) for x in shapes]

    return {name: of_case(case) for name, case in CASES.items()}


def inputs(change=lambda case, key, x: x):
    """Returns the inputs of all cases, whose arrays, and weights of results, `change` makes."""
    return {
        name: (
            {key: change(case, key, x) for key, x in case.arrays.items()},
            dict(case.numbers),
            [change(case, None, x) for x in weights_of_results()[name]],
        )
        for name, case in CASES.items()
    }


@cache
def expected():
    return jax.device_get(evaluate_all(inputs()))


def assert_close(result, expected, rtol=1e-5, atol=1e-6):
    jax.tree.map(partial(assert_allclose, rtol=rtol, atol=atol), result, expected)


def assert_equal_where_counted(case, result, expected):
    """Compares results and gradients with those of other inputs, wherever both are defined."""
    if case.is_zero_where_masked:
        jax.tree.map(assert_array_equal, result, expected)
    mask = case.arrays[case.mask]
    jax.tree.map(lambda a, b: assert_array_equal(only_counted(a, mask), only_counted(b, mask)), result, expected)


# --- gradients ---


@cache
def slopes():
    """Returns the slopes of all sums along one direction of all differentiable arguments, and the directions."""
    rng, step, sums = np.random.default_rng(0), 2.0**-8, []
    directions = {
        name: {key: rng.normal(size=case.arrays[key].shape).astype(np.float32) for key in case.differentiable.split()}
        for name, case in CASES.items()
    }
    for move in (np.float32(step), np.float32(-step)):
        moved = inputs()
        for name, of_case in directions.items():
            moved[name][0].update({key: moved[name][0][key] + move * x for key, x in of_case.items()})
        sums.append({name: float(total) for name, (total, *_) in evaluate_all(moved).items()})
    return {name: (sums[0][name] - sums[1][name]) / (2 * step) for name in CASES}, directions


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.differentiable])
def test_gradients_equal_finite_differences(name):
    (differences, directions), (_, _, gradients) = slopes(), expected()[name]
    size = sum(np.sum(np.abs(gradients[key])) for key in directions[name])
    slope = sum(np.sum(gradients[key] * x) for key, x in directions[name].items())
    assert size > 0
    assert_allclose(slope, differences[name], rtol=5e-3, atol=2e-3 * size)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.constant])
def test_constants_have_no_gradient(name):
    _, _, gradients = expected()[name]
    for key in CASES[name].constant.split():
        assert_array_equal(gradients[key], np.zeros_like(gradients[key]))


# --- masks ---


@cache
def with_rubbish(rubbish):
    def spoil(case, key, x):
        if key in (None, "weights") or not case.mask or x.dtype != np.float32 or x.ndim < case.arrays[case.mask].ndim:
            return x
        mask = case.arrays[case.mask]
        return np.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, np.float32(rubbish))

    return jax.device_get(evaluate_all(inputs(spoil)))


@pytest.mark.parametrize("name", HAVE_MASK)
def test_what_is_masked_may_be_anything(name):
    case, (_, result, gradients) = CASES[name], expected()[name]
    for rubbish in (1e4, -1e4, np.inf, -np.inf, np.nan):
        _, dirty, dirty_gradients = with_rubbish(rubbish)[name]
        assert_equal_where_counted(case, dirty, result)
        jax.tree.map(assert_array_equal, dirty_gradients, gradients)
    mask = case.arrays[case.mask]
    for x in [*gradients.values(), *(jax.tree.leaves(result) if case.is_zero_where_masked else ())]:
        if x.shape[: mask.ndim] == mask.shape:
            assert not np.any(x[~mask])


@cache
def without_masked():
    def remove(case, _, x):
        if not case.mask:
            return x
        mask = case.arrays[case.mask]
        where = counts(x, mask)
        if where is None:
            return x[mask.reshape(ROWS, -1).any(-1)] if x.shape else x
        return x[where].reshape(*case.counted[: where.ndim], *x.shape[where.ndim :])

    return jax.device_get(evaluate_all(inputs(remove)))


@pytest.mark.parametrize("name", HAVE_MASK)
def test_what_is_masked_might_as_well_be_removed(name):
    mask, (_, result, gradients) = CASES[name].arrays[CASES[name].mask], expected()[name]
    _, removed, removed_gradients = without_masked()[name]

    def compare(x, y):
        where = counts(x, mask)
        if where is None and x.shape:
            where = mask.reshape(ROWS, -1).any(-1)
        assert_allclose(np.ravel(x if where is None else x[where]), np.ravel(y), rtol=1e-4, atol=1e-5)

    jax.tree.map(compare, (result, gradients), (removed, removed_gradients))


@cache
def padded():
    """Adds two tokens to the right of completions."""

    def pad(case, _, x):
        if not case.mask or x.shape[-1:] != (T,):
            return x
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 2)], constant_values=x.dtype.type(0))

    return jax.device_get(evaluate_all(inputs(pad)))


@pytest.mark.parametrize("name", HAVE_MASK)
def test_padding_changes_nothing(name):
    wide = jax.tree.map(lambda x: x[..., :T] if x.shape[-1:] == (T + 2,) else x, padded()[name])
    assert_close(wide, expected()[name], rtol=1e-4, atol=1e-5)


# --- transformations ---


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_spread])
def test_a_batch_over_devices_is_the_whole_batch(name, spread):
    case = CASES[name]
    # Another scale on each device, and one without spread: statistics of its own would differ.
    scale = np.arange(1, ROWS + 1, dtype=np.float32)

    def scaled(x):
        if x.dtype != np.float32:
            return x
        x = x * scale.reshape(ROWS, *[1] * (x.ndim - 1))
        x[4] = x[4].mean()
        return x

    arrays = {key: scaled(x) for key, x in case.arrays.items()}
    function = partial(case.function, **case.numbers)
    result = spread(lambda parts: function(**parts, axis_name="data"))({k: x[:, None] for k, x in arrays.items()})
    whole = jax.jit(lambda arrays: function(**arrays))(arrays)
    assert_allclose(result[:, 0], whole, rtol=1e-4, atol=1e-5)
    of_each = jax.jit(jax.vmap(lambda arrays: function(**arrays)))({k: x[:, None] for k, x in arrays.items()})
    assert not np.allclose(of_each[:, 0], whole, rtol=1e-3)


@cache
def one_row_at_a_time():
    def of_case(case):
        return jax.vmap(lambda arrays: case.function(**arrays, **case.numbers))(case.arrays)

    return jax.jit(lambda: {name: of_case(case) for name, case in CASES.items() if case.of_rows})()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.of_rows])
def test_rows_are_independent_under_vmap(name):
    assert_close(one_row_at_a_time()[name], expected()[name][1])


@cache
def with_two_leading_axes():
    def of_case(case):
        arrays = {key: x.reshape(2, ROWS // 2, *x.shape[1:]) for key, x in case.arrays.items()}
        return case.function(**arrays, **case.numbers)

    return jax.jit(lambda: {name: of_case(case) for name, case in CASES.items()})()


@every_case
def test_any_leading_axes(name):
    result = with_two_leading_axes()[name]
    assert_close(jax.tree.map(jnp.ravel, result), jax.tree.map(np.ravel, expected()[name][1]))


@pytest.mark.slow
@every_case
def test_jit_equals_eager(name):
    case = CASES[name]
    eager = case.function(**{key: jnp.asarray(x) for key, x in case.arrays.items()}, **case.numbers)
    assert_close(eager, expected()[name][1])


@cache
def with_numbers():
    """Hyperparameters are constants of this program, and arguments of the others."""
    return jax.jit(lambda: {name: case.function(**case.arrays, **case.numbers) for name, case in CASES.items()})()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.numbers])
def test_hyperparameters_may_be_traced(name):
    assert_close(with_numbers()[name], expected()[name][1])


# --- types and shapes ---


@cache
def in_16_bits():
    """Returns results of bfloat16 inputs, and those of the same numbers in float32."""

    def of_case(case, is_short):
        arrays = {key: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for key, x in case.arrays.items()}
        for key, x in arrays.items():
            if x.dtype == jnp.bfloat16 and (not is_short or key in ("advantages", "weights")):
                arrays[key] = x.astype(np.float32)
        return case.function(**arrays, **case.numbers)

    names = [name for name in CASES if name not in COMPUTE_IN_16_BITS]
    return jax.jit(lambda: {name: [of_case(CASES[name], is_short) for is_short in (True, False)] for name in names})()


@pytest.mark.parametrize("name", [name for name in CASES if name not in COMPUTE_IN_16_BITS])
def test_16_bits_are_computed_in_32(name):
    for short, exact in zip(*map(jax.tree.leaves, in_16_bits()[name]), strict=True):
        rounding = 2.0**-8 if short.dtype == jnp.bfloat16 else 1e-5
        assert_allclose(short.astype(np.float32), exact.astype(np.float32), rtol=rounding, atol=1e-6)
        assert short.dtype in (exact.dtype, jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name, case in CASES.items() for key in case.arrays if hasattr(F, case.name)],
)
def test_other_shapes_and_lists_are_refused_by_name(name, key):
    case = CASES[name]
    with pytest.raises(TypeError, match=f"{case.name}: {key} must be an array .* list"):
        case.function(**case.arrays | {key: [1.0]}, **case.numbers)
    if len(case.arrays) > 1:  # an axis of size 1 would be broadcast
        with pytest.raises(AssertionError, match=f"{case.name}: ({'|'.join(case.arrays)}) must have the shape"):
            case.function(**case.arrays | {key: case.arrays[key][:1]}, **case.numbers)
