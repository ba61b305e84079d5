"""Arithmetic that depends on the backend: its traits, and products written for them.

`Traits` lists the strengths of a backend. All code reads them from `traits_of_backend`, so that a test or a benchmark
can assume other traits with `assume_traits`. Only this module and `models.decoder.cache` know why an order of sums is
faster.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import upcast

_ALL_LAYERS = 10**9


class Traits(NamedTuple):
    """The fastest ways to compute on a backend. The defaults suit accelerators."""

    backend: str
    # The dtype of products unless a run names another. CPUs with and without units for bfloat16 compute alike.
    default_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # The most features of a head that cuDNN's attention in bfloat16 has; 0: it is not available.
    flash_features: int = 0
    # XLA on CPU has few bfloat16 operations. Elsewhere it makes float32 copies: see `transposed`, `contract` and
    # `write_slice`.
    emulates_bfloat16: bool = False
    # Sums are computed in the orders that are fastest with XLA on CPU. Few float32 rows times a large matrix are
    # computed by columns: see `times_transposed`. Sums with many more rows than columns are computed as their
    # transposes: see `product` and `sum_over_queries`. Sums of elements are computed as products with ones, since XLA
    # on CPU needs nine times as long for sums. On a GPU the factors of a product are in memory, and XLA joined those of
    # all norms of a decoder into one array of 3 GB.
    reorders_sums: bool = False
    # A maximum and the sums of exponentials relative to it are computed in one pass: see `exp_sums`. On a CPU two
    # passes take less time.
    sums_at_once: bool = False
    # The slices of the logits that are computed in one turn of a loop. Each turn launches kernels that are too small to
    # keep a GPU busy.
    slices_at_once: int = 1
    # Keys of the cache have features before tokens. On an H100 the product with such keys took 1.6 times as long.
    features_first: bool = False
    # A product of groups of rows is computed in blocks. JAX makes `ragged_dot` on a CPU a product of all rows with all
    # kernels.
    groups_by_blocks: bool = False
    # Inputs of layers can be kept in the memory of the host.
    offloads: bool = True
    # A decoder of at most this many layers is compiled without a loop. A loop copies the values that the backward pass
    # needs of each layer into one array and out of it again. This took a ninth of an update on a GPU, where compiling
    # 24 layers one by one took 1.5 times as long. On a CPU 2 layers compiled in .8 of the time of a loop and ran in .8
    # of it; 4 layers in 1.0 and .95, with 1.6 times the temporary memory. Many quantised layers are dequantised one at
    # a time.
    unrolled_layers: int = 0
    unrolled_quantised_layers: int = 0
    # The elements of a slice of the logits, and its least width. A backward pass holds about three such arrays. On a
    # CPU they stay in its cache: 2 MiB in float32. Accelerators need larger products: with 16,384 tokens an H100 was
    # fastest at a width of 512 (an update of 0.5 billion parameters took 4% longer at 1,024 and 12% at 2,048), and slow
    # at 256.
    slice_elements: int = 2**23
    min_slice_width: int = 512
    # Up to this many elements, all logits are stored for the backward pass: 128 MiB in float32. With 1,024 tokens and
    # 32,000 words the update of a model with 48 million parameters took 7% less time on a CPU.
    kept_logits: int = 2**25
    # The number of tokens in the fastest piece of an update, with prompts and padding. Small pieces stay in a CPU's
    # cache, and the last piece has fewer empty rows. Too small pieces leave an accelerator idle.
    piece_tokens: int = 16_384
    # Texts of at least `narrows_from` tokens are decoded in fewer rows as they end, at most `narrowings` times. Each
    # time compiles one more loop, like each stage of the cache.
    narrows_from: int = 512
    narrowings: int = 2
    # A decode step takes as long as reading the weights and the cache. On a CPU its time depends on its rows.
    is_bound_by_memory: bool = True
    # The cache of texts of at least `grows_from` tokens grows to its full size in `rooms` stages. Every token reads the
    # whole cache of its stage: on average three quarters of the full size with two stages, five eighths with four. Each
    # stage compiles one more loop: 10 to 20 s on a GPU for 28 layers, 2 to 4 s on a CPU for four. On a CPU decoding
    # took .73 of the time with completions of 256 tokens, but as long as before with 128 tokens of a larger decoder.
    rooms: int = 2
    grows_from: int = 128


GPU = Traits("gpu", flash_features=256, sums_at_once=True, slices_at_once=4, unrolled_layers=_ALL_LAYERS)
CPU = Traits(
    "cpu",
    default_dtype="float32",
    emulates_bfloat16=True,
    reorders_sums=True,
    features_first=True,
    groups_by_blocks=True,
    offloads=False,
    unrolled_layers=2,
    unrolled_quantised_layers=2,
    slice_elements=2**19,
    min_slice_width=128,
    piece_tokens=768,
    narrows_from=64,
    narrowings=8,
    is_bound_by_memory=False,
    rooms=4,
    grows_from=256,
)

_assumed: ContextVar[Traits | None] = ContextVar("traits", default=None)


def traits_of_backend() -> Traits:
    """Returns the traits of JAX's default backend, or the assumed traits."""
    assumed, backend = _assumed.get(), backend_name()
    if assumed is not None:
        return assumed
    if backend == "cpu":
        return CPU
    if backend == "gpu":
        return traits_of_gpu(str(getattr(jax.local_devices()[0], "compute_capability", "")))
    return Traits(backend)


@contextmanager
def assume_traits(**changes: Any) -> Iterator[None]:
    """Changes traits for code that is traced inside the context.

    Args:
      **changes: the new values of fields of `Traits`.
    """
    token = _assumed.set(traits_of_backend()._replace(**changes))
    try:
        yield
    finally:
        _assumed.reset(token)


def backend_name() -> str:
    """Returns the name of JAX's default backend: cpu, gpu or tpu."""
    return jax.default_backend()


def traits_of_gpu(capability: str) -> Traits:
    """Returns the traits of a GPU by NVIDIA's compute capability, such as "9.0". Other vendors' is not a number.

    Units for bfloat16 and cuDNN's gradients for heads of 128 features came with Ampere (8.0), and gradients for 256
    features with Hopper (9.0).
    """
    major, _, _ = capability.partition(".")
    if not major.isdigit():
        return GPU._replace(flash_features=0)
    flash_features = 256 if int(major) >= 9 else 128 if int(major) == 8 else 0
    return GPU._replace(flash_features=flash_features, default_dtype="bfloat16" if flash_features else "float32")


# ---- products


def einsum(subscripts: str, *operands: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Computes an einsum that is accumulated in float32 and returned in `dtype`. See `contract`."""
    accumulator = jnp.float32 if traits_of_backend().emulates_bfloat16 else dtype
    return jnp.einsum(subscripts, *operands, preferred_element_type=accumulator).astype(dtype)


def transposed(x: jax.Array) -> jax.Array:
    """Exchanges the last two axes, for a product.

    XLA on CPU has bfloat16 products, but none that contracts the first axes of both matrices: wherever it sees a
    transpose before a product, it multiplies in float32, which takes three times as long. It does not see this one.

    Args:
      x: `[..., A, B]`.

    Returns:
      `[..., B, A]`.
    """
    *leading, rows, columns = x.shape
    if not traits_of_backend().emulates_bfloat16 or x.dtype != jnp.bfloat16 or rows % 2:
        return x.swapaxes(-1, -2)
    return jnp.moveaxis(x.reshape(*leading, -1, 2, columns), -1, -3).reshape(*leading, columns, rows)


def contract(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int, dtype: Any) -> jax.Array:
    """Multiplies two matrices over one axis of each, accumulated in float32.

    Accelerators always accumulate in float32. XLA on CPU uses a CPU's bfloat16 instructions only if the product is
    requested in float32: with them it took a sixth of the time.

    Args:
      x, y: matrices of one dtype.
      x_axis, y_axis: the axes that are summed over, 0 or 1.
      dtype: the dtype of the result.
    """
    accumulator = jnp.float32 if traits_of_backend().emulates_bfloat16 else dtype
    dimensions = (((x_axis,), (y_axis,)), ((), ()))
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=accumulator).astype(dtype)


def product(x: jax.Array, kernel: jax.Array, in_axes: int = 1) -> jax.Array:
    """Contracts the trailing axes of x with the leading axes of a kernel, in the dtype of x.

    Args:
      x: `[..., *in]`.
      kernel: `[*in, *out]`.
      in_axes: the number of axes in `*in`.

    Returns:
      `[..., *out]`.
    """
    inputs = math.prod(kernel.shape[:in_axes])
    # Under shard_map x varies over devices and a kernel does not, and a custom gradient must have the type of its
    # input. A zero that varies gives both one type, and JAX sums the kernel's gradient over devices.
    matrix = kernel.astype(x.dtype).reshape(inputs, -1) + jnp.zeros_like(x, shape=())
    y = _multiply(x.reshape(-1, inputs), matrix)
    return y.reshape(*x.shape[: x.ndim - in_axes], *kernel.shape[in_axes:])


@jax.custom_vjp
def _multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x W, with ∂L/∂W = xᵀ ∂L/∂y as one product of the untransposed arrays: x `[M, I]`, W `[I, O]` -> `[M, O]`.

    JAX's rule computes the transpose of that, ∂L/∂yᵀ x. XLA on CPU then computes the gradient of y a second time, in
    transposed order, which took more than half of a training step.
    """
    return contract(x, kernel, 1, 0, x.dtype)


def _multiply_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _multiply(x, kernel), (x, kernel)


def _multiply_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    if traits_of_backend().reorders_sums and kernel.shape[0] > kernel.shape[1]:
        # As its transpose a tall gradient took three fifths of the time (512 x 128, 1,088 rows). Without the barrier
        # XLA exchanges the factors again.
        d_kernel = jax.lax.optimization_barrier(contract(transposed(gradient), x, 1, 0, x.dtype)).T
    else:
        d_kernel = contract(transposed(x), gradient, 1, 0, x.dtype)
    return contract(gradient, kernel, 1, 1, x.dtype), d_kernel


_multiply.defvjp(_multiply_forward, _multiply_backward)


# With at least this many keys, `sum_over_queries` is computed as its transpose on a CPU. This took .4 to .8 of the time
# with 256 to 1,040 keys, and 1.1 with 144.
_MANY_KEYS = 256


def sum_over_queries(weights: jax.Array, queries: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Σ_r w[r, c] q[r, e]: `[N, K, G, R, C]`, `[N, K, G, R, E]` -> `[N, K, G, C, E]` in `dtype`."""
    if not traits_of_backend().reorders_sums or weights.shape[-1] < _MANY_KEYS:
        return einsum("nkgcr,nkgre->nkgce", transposed(weights), queries, dtype=dtype)
    # The transpose reads the large factor in order. Without the barrier XLA exchanges the factors again.
    summed: jax.Array = jax.lax.optimization_barrier(einsum("nkger,nkgrc->nkgec", transposed(queries), weights))
    return summed.swapaxes(-1, -2).astype(dtype)


def multiplies_by_columns(dtype: Any) -> bool:
    """Returns whether `times_transposed` computes rows of this type as (W xᵀ)ᵀ. In bfloat16 this order is slower."""
    return traits_of_backend().reorders_sums and dtype == jnp.float32


def times_transposed(x: jax.Array, matrix: jax.Array, dtype: Any, *, by_columns: bool = False) -> jax.Array:
    """Computes x Wᵀ for few rows x and a large W, which is usual in a decode step.

    XLA on CPU computes float32 products of 32 rows as (W xᵀ)ᵀ in two thirds of the time, and products of 8 rows in
    half. It would reorder products, and barriers prevent that.

    Args:
      x: `[..., I]`.
      matrix: W, `[O, I]`.
      dtype: the dtype of the result.
      by_columns: True if the result is read by columns. Then W xᵀ is not transposed in memory.

    Returns:
      `[..., O]`.
    """
    leading, rows = x.shape[:-1], x.reshape(-1, x.shape[-1])
    if not multiplies_by_columns(x.dtype):
        return contract(rows, matrix, 1, 1, dtype).reshape(*leading, -1)
    fixed = jax.lax.optimization_barrier
    columns: jax.Array = fixed(contract(matrix, fixed(rows.T), 1, 0, dtype))
    if by_columns:
        return jnp.moveaxis(columns.reshape(-1, *leading), 0, -1)
    product: jax.Array = fixed(columns.T)
    return product.reshape(*leading, -1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / √(mean x² + ε) · scale, in float32: x `[..., D]`, scale `[D]` -> an array like x."""
    return _rms_norm_forward(x, scale, eps)[0]


def inverse_rms(x: jax.Array, eps: float) -> jax.Array:
    """1 / √(mean x² + ε), in float32: x `[..., D]` -> `[..., 1]`."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + eps)


def _rms_norm_forward(
    x: jax.Array, scale: jax.Array, eps: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    inverse = inverse_rms(x, eps)
    return (x.astype(jnp.float32) * inverse * scale).astype(x.dtype), (x, scale, inverse)


def _rms_norm_backward(
    eps: float, residuals: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """∂L/∂x = (s g − x̂ mean(s g x̂)) / rms and ∂L/∂s = Σ g x̂, with x̂ = x / rms and g = ∂L/∂y."""
    x, scale, inverse = residuals
    normed, gradient = x.astype(jnp.float32) * inverse, gradient.astype(jnp.float32)
    rows = (gradient * normed).reshape(-1, x.shape[-1])
    if traits_of_backend().reorders_sums:
        mean, d_scale = rows @ scale, jnp.ones_like(rows[:, 0]) @ rows
    else:
        mean, d_scale = jnp.sum(rows * scale, axis=1), jnp.sum(rows, axis=0)
    mean = mean.reshape(inverse.shape) / x.shape[-1]
    return ((gradient * scale - normed * mean) * inverse).astype(x.dtype), d_scale


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


# ---- sums of exponentials


def exp_sums(z: jax.Array, values: Sequence[jax.Array] = (), axis: int = -1) -> tuple[jax.Array, ...]:
    """Returns m = max z, Σ exp(z − m), and Σ v exp(z − m) for each of some values v, along one axis.

    On a GPU (`Traits.sums_at_once`) one pass reads z. Partial results (m₁, s₁) and (m₂, s₂) become m = max(m₁, m₂) and
    s₁ exp(m₁ − m) + s₂ exp(m₂ − m). 1805.02867.

    Args:
      z: The exponents, float32. Those that are −∞ count as nothing. If all are −∞, only m has a meaning.
      values: Arrays with the shape of z.
      axis: The axis that is summed over.

    Returns:
      Arrays with the shape of z without this axis.
    """
    if not traits_of_backend().sums_at_once:
        maximum = jnp.max(z, axis)
        weights = jnp.exp(z - jnp.expand_dims(maximum, axis))
        return maximum, jnp.sum(weights, axis), *(jnp.sum(value * weights, axis) for value in values)

    def combine(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        maximum = jnp.maximum(first[0], second[0])
        # The larger one keeps its factor 1, also if both are −∞.
        factors = [jnp.where(part[0] == maximum, 1.0, jnp.exp(part[0] - maximum)) for part in (first, second)]
        return maximum, *(x * factors[0] + y * factors[1] for x, y in zip(first[1:], second[1:], strict=True))

    nothing = jnp.float32(-jnp.inf), *[jnp.float32(0)] * (1 + len(values))
    return tuple(jax.lax.reduce((z, jnp.ones_like(z), *values), nothing, combine, (axis % z.ndim,)))


# ---- writes, and the order of computations


def write_slice(array: jax.Array, part: jax.Array, starts: Mapping[int, jax.Array | int]) -> jax.Array:
    """Replaces a slice of the array, which begins at the given places of some axes, by `part`.

    XLA on CPU writes into a bfloat16 array by making a float32 copy of the whole array. With integers it writes only
    the part.

    Args:
      array: an array of any shape.
      part: the new slice, which has the shape of the array except on these axes.
      starts: axis -> int, clipped so that the whole part is written. The slice begins at 0 of other axes.

    Returns:
      The array with the slice replaced.
    """
    places = [jnp.int32(0)] * array.ndim  # all of one dtype, even if integers have 64 bits
    for axis, start in starts.items():
        places[axis] = jnp.int32(start)
    write = partial(jax.lax.dynamic_update_slice, start_indices=places)
    if not traits_of_backend().emulates_bfloat16 or array.dtype != jnp.bfloat16:
        return write(array, part)
    array, part = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (array, part))
    return jax.lax.bitcast_convert_type(write(array, part), jnp.bfloat16)


def accumulator_of(x: jax.Array) -> jax.Array:
    """Returns zeros like x, to which slices are added. XLA on CPU copies all of a bfloat16 array for each slice."""
    return jnp.zeros_like(upcast(x) if traits_of_backend().emulates_bfloat16 else x)


def delayed_until(codes: jax.Array, x: jax.Array) -> jax.Array:
    """Returns integers that exist only when x does, so that XLA does not compute them before a loop over tokens.

    XLA on CPU removes barriers before it orders operations, but it must keep operations that depend on x after x.
    """
    never = x[(0,) * x.ndim] > jnp.inf
    return codes ^ never.astype(codes.dtype)


def delayed_on_mesh(tree: Any, x: jax.Array) -> Any:
    """Computes `delayed_until` on a mesh by a barrier, since a single number of x is on only one device."""
    return jax.lax.optimization_barrier((tree, x))[0]
