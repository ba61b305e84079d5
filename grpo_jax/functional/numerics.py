"""Helpers that several modules share: at least 32 bits, totals over devices, shapes of arguments."""

import inspect
from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from numbers import Real
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

# Names of mapped axes (`jax.pmap`, `shard_map`, `vmap`) over which a batch is spread; None: it is not spread.
AxisName = Hashable | None


def upcast(values: jax.Array) -> jax.Array:
    """Converts to at least float32: 16 bits hold neither small differences, nor counts, nor the sums of a batch."""
    # Not jnp.promote_types, which refuses 16 bits under strict promotion.
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def in_float32(function: Callable[..., jax.Array], x: jax.Array, *others: Any) -> jax.Array:
    """Computes function(x, *others) in at least float32, and rounds the result once to the dtype of x, as torch does.

    In bfloat16, JAX rounds each step and each Python number. A factor is then off by up to 0.4%, and gelu(−3.3) is 0.
    """
    return function(upcast(x), *others).astype(x.dtype)


def from_numpy(value: Any) -> Any:
    """Returns a NumPy array as an array of JAX, so that float64 becomes the default dtype without a warning."""
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def is_known(constant: Any) -> bool:
    """Returns whether a constant is a number now, rather than traced."""
    return isinstance(constant, Real)


def is_zero(coefficient: Any) -> bool:
    """Returns whether a coefficient turns its term off, since 0 times an overflow is NaN. A traced one never does."""
    return is_known(coefficient) and coefficient == 0


def check_above(least: float, **constants: Any) -> None:
    """Refuses constants that are not above `least`. A traced number is not checked.

    Raises:
      ValueError: a constant is not above `least`; the sentence names it.
    """
    for name, constant in constants.items():
        if is_known(constant) and not constant > least:
            raise ValueError(f"{name} is {constant}: it must be above {least}")


def check_beta(beta: Any) -> None:
    """Refuses a β outside (0, 1), with which a divergence is 0 for all arguments. A traced number is not checked.

    Raises:
      ValueError: β is outside (0, 1).
    """
    if is_known(beta) and not 0 < beta < 1:
        raise ValueError(f"beta is {beta}: it must be between 0 and 1; for the ends take the forward or the reverse KL")


def maybe_psum(value: jax.Array, axis_name: AxisName) -> jax.Array:
    """Returns the sum over the mapped axes; the value itself if there are none."""
    return value if axis_name is None else jax.lax.psum(value, axis_name)


def maybe_pmax(value: jax.Array, axis_name: AxisName) -> jax.Array:
    """Returns the maximum over the mapped axes; the value itself if there are none."""
    return value if axis_name is None else jax.lax.pmax(value, axis_name)


def maybe_all_gather(values: jax.Array, axis_name: AxisName) -> jax.Array:
    """Joins the values `[n]` of all devices, one after another; without mapped axes returns the values themselves."""
    return values if axis_name is None else jax.lax.all_gather(values, axis_name, tiled=True)


def device_index_and_count(axis_name: AxisName) -> tuple[jax.Array | int, int]:
    """Returns the index of this device in the mapped axes, and the number of devices; (0, 1) without mapped axes."""
    return (0, 1) if axis_name is None else (jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name))


# ---- keywords of functions

T = TypeVar("T")


def constants_of(function: Callable[..., Any]) -> dict[str, float]:
    """Returns the constants of a function: its keywords whose defaults are numbers, and these defaults.

    The values that a `functools.partial` binds are its defaults.
    """
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY and is_known(x.default)}


def call_with(function: Callable[..., T], *args: Any, **context: Any) -> T:
    """Calls a function with those keywords that it takes."""
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in context.items() if name in known})


# ---- shapes of arguments

F = TypeVar("F", bound=Callable[..., Any])
# Other types of masks would select by ~ and sum in ways that differ between functions.
_MASKS = ("mask", "completion_mask", "where", "keep", "desirable")
_Sizes = Mapping[str, tuple[int, ...]]  # axis -> its size, or the sizes of ...


def takes(**forms: str) -> Callable[[F], F]:
    """Makes a function refuse other shapes, lists and numbers in a sentence, at trace time, and take NumPy arrays.

    Args:
      **forms: argument -> its axes, such as "... T". An axis has one size in all arguments of a call, and ... stands
        for the same axes. " | " separates alternatives. The alternative "number" is a number, or an array of shape
        `[]`. An argument that is None is not checked.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:  # let the call raise its own error
                return function(*args, **kwargs)
            check_shapes(function.__name__, forms, bound.arguments)
            bound.arguments |= {name: from_numpy(x) for name, x in bound.arguments.items() if name in forms}
            return function(*bound.args, **bound.kwargs)

        return cast(F, checked)

    return decorate


def check_shapes(function: str, forms: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
    """Refuses arguments of a function that do not have the axes of their forms; see `takes`.

    Raises:
      TypeError: an argument is not an array, or a mask is not bool.
      AssertionError: an argument has another shape.
    """
    known: _Sizes = {}
    before = ""
    for name, form in forms.items():
        value, options = arguments.get(name), form.split(" | ")
        if value is None or ("number" in options and _is_number(value)):
            continue
        options = [option for option in options if option != "number"]
        words = " or ".join(f"[{option.replace(' ', ', ')}]" for option in options)
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(
                f"{function}: {name} must be an array {words}, but is a {type(value).__name__}: give jnp.array({name})"
            )
        if name in _MASKS and value.dtype != bool:
            raise TypeError(f"{function}: {name} must be bool, such as {name} > 0, but is {value.dtype}")
        fitting = [sizes for option in options if (sizes := _sizes(option, value.shape, known)) is not None]
        if not fitting:
            expected = " or ".join(_expected(option, known) for option in options)
            where = f", {words} where {before}" if before else ""
            raise AssertionError(
                f"{function}: {name} must have the shape {expected}{where}, but has {_brackets(value.shape)}"
            )
        known = {**known, **fitting[0]} if len(options) == 1 else known
        before = before or f"{name} has {_brackets(value.shape)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or getattr(value, "shape", None) == ()


def _sizes(form: str, shape: tuple[int, ...], known: _Sizes) -> _Sizes | None:
    """Returns the sizes of a form's axes, or None if the shape does not have this form."""
    before, others, after = (part.split() for part in form.partition("..."))
    end = len(shape) - len(after)
    if end < len(before) or (end > len(before) and not others):
        return None
    sizes = {"...": tuple(shape[len(before) : end])} if others else {}
    named = zip((*before, *after), (*shape[: len(before)], *shape[end:]), strict=True)
    sizes |= {axis: (size,) for axis, size in named}
    return sizes if all(known.get(axis, size) == size for axis, size in sizes.items()) else None


def _expected(form: str, known: _Sizes) -> str:
    """Writes a form with sizes instead of the axes that are known."""
    return _brackets([size for axis in form.split() for size in known.get(axis, (axis,))])


def _brackets(shape: Any) -> str:
    return f"[{', '.join(map(str, shape))}]"


def softcapped(x: jax.Array, softcap: jax.Array | float | None) -> jax.Array:
    """c·tanh(x/c), which is close to x near 0 and stays between −c and c (2408.00118); x where the cap c is None."""
    return x if softcap is None else softcap * jnp.tanh(x / softcap)
