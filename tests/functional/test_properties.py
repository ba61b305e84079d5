"""Properties that the functions of `cases.py` share. One program computes all of them at once."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, COMPUTE_IN_16_BITS, ROWS, Case
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


def evaluate(case: Case, arrays, numbers):
    """Returns the sum of a result in which every number has its own weight, the result, and the sum's gradients."""

    def total(inputs):
        result = case.function(**arrays | inputs, **numbers)
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(result)]
        if case.mask:
            leaves = [only_counted(x, arrays[case.mask]) for x in leaves]
        return sum(jnp.sum(x * jnp.linspace(1, 2, x.size).reshape(x.shape)) for x in leaves), result

    names = (case.differentiable + " " + case.constant).split()
    (value, result), gradients = jax.value_and_grad(total, has_aux=True)({name: arrays[name] for name in names})
    return value, result, gradients


@jax.jit
def evaluate_all(arguments):
    return {name: evaluate(CASES[name], *of_case) for name, of_case in arguments.items()}


@jax.jit
def results_of(arrays):
    return {name: CASES[name].function(**x, **CASES[name].numbers) for name, x in arrays.items()}


def inputs(change=lambda case, key, x: x):
    """Returns the inputs of all cases, whose arrays `change` makes."""
    return {
        name: ({key: change(case, key, x) for key, x in case.arrays.items()}, dict(case.numbers))
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
        if key == "weights" or not case.mask or x.dtype != np.float32 or x.ndim < case.arrays[case.mask].ndim:
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


def counted_rows(x, mask):
    """Returns the numbers of an array that count, and how many of its axes they take the place of."""
    where = counts(x, mask)
    if where is None:
        where = mask.reshape(ROWS, -1).any(-1)
    return x[where], where.ndim


@cache
def without_masked():
    def remove(case, x):
        if not x.shape:
            return x
        numbers, axes = counted_rows(x, case.arrays[case.mask])
        return numbers.reshape(*case.counted[:axes], *x.shape[axes:])

    cases = {name: CASES[name] for name in HAVE_MASK}
    return results_of({name: {key: remove(case, x) for key, x in case.arrays.items()} for name, case in cases.items()})


@pytest.mark.parametrize("name", HAVE_MASK)
def test_what_is_masked_might_as_well_be_removed(name):
    """Padding is masked too, so that it changes nothing."""

    def compare(x, y):
        numbers = counted_rows(x, CASES[name].arrays[CASES[name].mask])[0] if x.shape else x
        assert_allclose(np.ravel(numbers), np.ravel(y), rtol=1e-4, atol=1e-5)

    jax.tree.map(compare, expected()[name][1], without_masked()[name])


# --- transformations ---


SPREAD = [name for name, case in CASES.items() if case.is_spread]


def on_devices(name):
    """Returns the inputs of a case, one row for each device."""
    # Another scale on each device, and one without spread: its statistics would differ.
    scale = np.arange(1, ROWS + 1, dtype=np.float32)

    def scaled(x):
        if x.dtype != np.float32:
            return x
        x = x * scale.reshape(ROWS, *[1] * (x.ndim - 1))
        x[4] = x[4].mean()
        return x

    return {key: scaled(x)[:, None] for key, x in CASES[name].arrays.items()}


def test_a_batch_over_devices_is_the_whole_batch(spread):
    arrays = {name: on_devices(name) for name in SPREAD}

    def evaluate(arrays, **options):
        results = {name: CASES[name].function(**x, **CASES[name].numbers, **options) for name, x in arrays.items()}
        return {name: x if x.ndim else x.reshape(1, 1) for name, x in results.items()}  # a number of the whole batch

    result = spread(partial(evaluate, axis_name="data"))(arrays)
    whole, of_each = jax.jit(lambda x: (evaluate(jax.tree.map(lambda y: y[:, 0], x)), jax.vmap(evaluate)(x)))(arrays)
    for name in SPREAD:
        expected = np.squeeze(whole[name])
        assert_allclose(result[name][:, 0], expected, rtol=1e-4, atol=1e-5, err_msg=name)
        assert not np.allclose(of_each[name][:, 0], expected, rtol=1e-3), name


def test_a_loop_over_tokens_runs_on_every_device(spread):
    case = CASES["gae_of_two_steps"]
    result = spread(lambda arrays: case.function(**arrays, **case.numbers))(
        {k: x[:, None] for k, x in case.arrays.items()}
    )
    assert_close(result[:, 0], expected()["gae_of_two_steps"][1])


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
def test_any_leading_axes_and_traced_hyperparameters(name):
    """Hyperparameters are constants of this program, and arguments of the one that it is compared with."""
    result = with_two_leading_axes()[name]
    assert_close(jax.tree.map(jnp.ravel, result), jax.tree.map(np.ravel, expected()[name][1]))


@pytest.mark.slow
@every_case
def test_jit_equals_eager(name):
    case = CASES[name]
    eager = case.function(**{key: jnp.asarray(x) for key, x in case.arrays.items()}, **case.numbers)
    assert_close(eager, expected()[name][1])


# --- types and shapes ---


@cache
def of_16_bits():
    """Returns the results of floats of 16 bits, and those of the same numbers in 32 bits."""

    def rounded(case, key, x):
        is_short = x.dtype == np.float32 and key not in ("advantages", "weights")  # which always have 32 bits
        return x.astype(jnp.bfloat16) if is_short else x

    short = {name: arrays for name, (arrays, _) in inputs(rounded).items() if name not in COMPUTE_IN_16_BITS}
    return results_of(short), evaluate_all(inputs(lambda case, key, x: rounded(case, key, x).astype(x.dtype)))


@pytest.mark.parametrize("name", [name for name in CASES if name not in COMPUTE_IN_16_BITS])
def test_16_bits_are_computed_in_32(name):
    results, (_, expected, _) = (of_all[name] for of_all in of_16_bits())
    for short, exact in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
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
