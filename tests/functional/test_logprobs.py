"""Functions of hidden states: each against the same function of all logits at once, which it never holds."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal
from tiny import slow_unless

from grpo_jax import functional as F
from grpo_jax.functional.products import assume_traits

ROWS, WIDTH, FEATURES = 2, 6, 3
# Vocabulary and greatest width of a slice. The last slice overlaps the one before it in
# 1 of 4 columns for (11, 4) and in 2 of 5 for (23, 5); the others are disjoint.
SLICINGS = slow_unless([(11, 4)], [(11, 4), (5, 128), (8, 4), (23, 5), (7, 1), (21, 5)])


def sliced_by(width, keeps=False):
    """Sets how many columns of the vocabulary are computed at a time, and whether logits are kept."""
    return assume_traits(kept_logits=2**25 if keeps else 0, slice_elements=1, min_slice_width=width)


class Function(NamedTuple):
    """A function of hidden states and the same of logits, (arrays, **options) -> what `[..., T, ...]` holds."""

    of_hidden: Callable
    of_logits: Callable


def logprobs_of_hidden(arrays, softcap=None, ref_softcap=None, **options):
    return F.token_logprobs(arrays["hidden"], arrays["unembedding"], arrays["ids"][..., 0], softcap=softcap, **options)


def logprobs_of_logits(logits, ref_logits, ids):
    logprobs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logprobs, ids[..., :1], axis=-1)[..., 0], F.entropy(logits)


def kl_of_hidden(arrays, **options):
    return F.token_kl(*(arrays[x] for x in ("hidden", "unembedding", "ref_hidden", "ref_unembedding")), **options)


def jsd_of_hidden(arrays, ref_softcap=None, **options):
    both = (arrays[x] for x in ("hidden", "unembedding", "ref_hidden", "ref_unembedding"))
    return F.token_jsd(*both, ref_softcap=ref_softcap, beta=arrays["beta"], **options)


def buckets_of_hidden(arrays, ref_softcap=None, **options):
    return F.bucket_logits(arrays["hidden"], arrays["unembedding"], arrays["ids"], **options)


def buckets_of_logits(logits, ref_logits, ids):
    is_chosen = jax.nn.one_hot(ids, logits.shape[-1], dtype=logits.dtype).sum(-2) > 0
    others = jax.nn.logsumexp(jnp.where(is_chosen, -jnp.inf, logits), axis=-1, keepdims=True)
    return jnp.concatenate([jnp.take_along_axis(logits, ids, axis=-1), others], axis=-1)


def support_of_hidden(arrays, ref_softcap=None, **options):
    return F.support_logprobs(
        arrays["hidden"], arrays["unembedding"], arrays["ids"][..., 1], padded_support(arrays["ids"]), **options
    )


def support_of_logits(logits, ref_logits, ids):
    support, ids = padded_support(ids), ids[..., 1:2]
    is_in = jax.nn.one_hot(support, logits.shape[-1]).sum(-2) > 0  # of −1 all zeros
    log_p = jax.nn.log_softmax(jnp.where(is_in, logits, -jnp.inf))
    return jnp.take_along_axis(log_p, ids, axis=-1)[..., 0], F.entropy(jnp.where(is_in, logits, -jnp.inf))


def padded_support(ids):
    """Returns supports of the second id: the first id is replaced by padding if it is even."""
    return jnp.asarray(ids).at[..., 0].set(jnp.where(ids[..., 0] % 2 == 0, -1, ids[..., 0]))


FUNCTIONS = {
    "logprobs": Function(logprobs_of_hidden, logprobs_of_logits),
    "kl": Function(kl_of_hidden, lambda logits, ref, ids: F.kl_full(logits, ref)),
    "kl_reverse": Function(
        partial(kl_of_hidden, reverse=True), lambda logits, ref, ids: F.kl_full(logits, ref, reverse=True)
    ),
    "jsd": Function(jsd_of_hidden, None),
    "buckets": Function(buckets_of_hidden, buckets_of_logits),
    "support": Function(support_of_hidden, support_of_logits),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def random_arrays(vocabulary=11, shape=(ROWS, WIDTH), dtype=np.float32, k=3):
    """Returns two models of different widths, k different ids at each place, the last of the vocabulary among them."""
    rng = np.random.default_rng(vocabulary)
    sizes = {"hidden": (*shape, FEATURES), "unembedding": (vocabulary, FEATURES)}
    sizes |= {"ref_hidden": (*shape, FEATURES - 1), "ref_unembedding": (vocabulary, FEATURES - 1)}
    arrays = {name: rng.normal(size=size).astype(dtype) for name, size in sizes.items()}
    ids = np.stack([rng.permutation(vocabulary)[:k] for _ in range(int(np.prod(shape)))]).astype(np.int32)
    ids[0], ids[-1] = np.arange(k), np.arange(k) + vocabulary - k
    # One temperature for each completion.
    return (
        arrays
        | {"ids": ids.reshape(*shape, k), "temperature": np.array([[0.5], [1.5]], np.float32)}
        | {"beta": np.float32(0.3)}
    )


def dense(name, arrays, softcap=None, ref_softcap=None):
    """Computes all logits, and their function."""

    def logits(hidden, unembedding, cap):
        z = hidden @ unembedding.T
        z = z if cap is None else cap * jnp.tanh(z / cap)
        return z / jnp.broadcast_to(arrays["temperature"], z.shape[:-1])[..., None]

    ref = [jax.lax.stop_gradient(arrays[x]) for x in ("ref_hidden", "ref_unembedding")]
    both = logits(arrays["hidden"], arrays["unembedding"], softcap), logits(*ref, ref_softcap)
    return F.jsd_full(*both, beta=arrays["beta"]) if name == "jsd" else FUNCTIONS[name].of_logits(*both, arrays["ids"])


def sliced(name, arrays, **options):
    return FUNCTIONS[name].of_hidden(arrays, temperature=arrays["temperature"], **options)


@cache
def program(function, width=4, keeps=False, is_capped=False):
    """Compiles one program of all functions.

    It gets arrays, which tokens count `[R, T]`, and the cap of the first model. It returns their results, and the
    gradients in all arrays, and in the cap, of a sum in which each number has another weight.
    """

    def total(floats, ids, is_counted, name):
        caps = {"softcap": floats["softcap"], "ref_softcap": 1.5} if is_capped else {}
        parts = jax.tree.leaves(function(name, floats | {"ids": ids}, **caps))
        value = 0.0
        for n, x in enumerate(parts, 1):
            weights = jnp.linspace(-1, 2, x.size).reshape(x.shape) ** n
            counts = is_counted.reshape(*is_counted.shape, *[1] * (x.ndim - is_counted.ndim))
            value += jnp.sum(jnp.where(counts, weights * x, 0))
        return value, parts

    @jax.jit
    def compiled(floats, ids, is_counted):
        gradients = jax.grad(total, has_aux=True)
        return {name: gradients(floats, ids, is_counted, name)[::-1] for name in FUNCTIONS}

    def evaluate(arrays, is_counted=None, softcap=0.5):
        floats = {key: x for key, x in arrays.items() if key != "ids"} | {"softcap": np.float32(softcap)}
        is_counted = np.ones((ROWS, WIDTH), bool) if is_counted is None else is_counted
        with sliced_by(width, keeps):
            return jax.device_get(compiled(floats, arrays["ids"], is_counted))

    return evaluate


def assert_close(result, expected, rtol=1e-4, atol=2e-5):
    jax.tree.map(partial(assert_allclose, rtol=rtol, atol=atol), result, expected)


# --- all logits at once ---


@pytest.mark.parametrize("kind", ["again", "in memory", "capped"])
@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
def test_values_and_gradients_equal_the_dense_ones(vocabulary, width, kind):
    arrays = random_arrays(vocabulary)
    for softcap in (0.5, 1e4) if kind == "capped" else (0.5,):
        options = {"is_capped": kind == "capped"}
        result = program(sliced, width, kind == "in memory", **options)(arrays, softcap=softcap)
        expected = program(dense, **options)(arrays, softcap=softcap)
        for name, (values, gradients) in result.items():
            assert all(x.dtype == jnp.float32 for x in values)
            assert_close((values, gradients), expected[name])
            # The temperature's gradient is that of both models; the second one has none.
            assert not np.any(gradients["ref_hidden"])
            assert not np.any(gradients["ref_unembedding"])


def of_logits(name, arrays, **options):
    """Passes the logits of the first model, of which no unembedding is known."""
    logits = arrays["hidden"] @ arrays["unembedding"].T
    return sliced(name, arrays | {"hidden": logits, "unembedding": None}, **options)


@pytest.mark.parametrize("is_capped", slow_unless([True], [True, False]))
def test_a_model_may_be_known_by_its_logits(is_capped):
    """The other model of a divergence has an unembedding."""
    arrays = random_arrays()
    result, expected = (program(function, is_capped=is_capped)(arrays) for function in (of_logits, dense))
    assert_close(result, expected)
    logits = arrays["hidden"] @ arrays["unembedding"].T
    with sliced_by(4):
        assert_array_equal(F.top_tokens(logits, None, 11), np.argsort(-logits, axis=-1))


@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
def test_top_tokens_are_those_of_all_logits(vocabulary, width):
    arrays = random_arrays(vocabulary)
    with sliced_by(width):
        tops = jax.jit(lambda *x: {k: F.top_tokens(*x, k) for k in (1, 3, vocabulary)})
        tops = tops(arrays["hidden"], arrays["unembedding"])
    for k, ids in tops.items():
        assert_array_equal(ids, np.argsort(-(arrays["hidden"] @ arrays["unembedding"].T), axis=-1)[..., :k])


def test_top_tokens_are_32_bits_under_x64():
    arrays = random_arrays(7)
    with jax.enable_x64(True):
        tops = jax.eval_shape(partial(F.top_tokens, k=3), arrays["hidden"], arrays["unembedding"])
    assert tops.dtype == jnp.int32


# --- digits ---


@cache
def logprobs_and_slopes(width, keeps):
    def compute(*arguments):
        def total(hidden):
            result = F.token_logprobs(hidden, *arguments[1:])
            return jnp.sum(result.logprobs), result

        return jax.grad(total, has_aux=True)(arguments[0])

    return jax.jit(compute)


@pytest.mark.parametrize("margin", [1, 20, 60])
@pytest.mark.parametrize(("width", "keeps"), [(11, False), (4, False), (4, True)])
def test_probabilities_near_one_keep_digits_and_gradients(margin, width, keeps):
    # The largest logit leads the next by `margin`; the chosen token comes first, in the middle, or is not the largest.
    spread = np.linspace(0, 1, 11)
    logits = np.stack([np.roll(np.r_[margin + 1, spread[1:]], shift) for shift in (0, 5, 5)]).astype(np.float32)
    arguments = logits, np.eye(11, dtype=np.float32), np.array([0, 5, 7], np.int32)
    logits, rows = logits.astype(float), (np.arange(3), arguments[2])
    rest = logits.copy()
    rest[rows] = -np.inf
    of_rest = np.log(np.exp(rest).sum(-1))
    logprobs = -np.logaddexp(0, of_rest - logits[rows])
    log_p = logits - (logits[rows] - logprobs)[:, None]
    log_p[rows] = logprobs
    slopes = -np.exp(log_p)
    slopes[rows] = np.exp(-np.logaddexp(0, logits[rows] - of_rest))  # 1 − π
    with sliced_by(width, keeps):
        gradient, result = logprobs_and_slopes(width, keeps)(*arguments)
    # z has an error of half an ulp, which log 1 / (1 − π) does not enlarge: 2e-5 is 5 ulps of a logit of 60.
    assert_allclose(result.logprobs, logprobs, rtol=2e-5, atol=0)
    entropies = -(np.exp(log_p) * log_p).sum(-1)
    assert_allclose(result.entropy[:2], entropies[:2], rtol=2e-5, atol=0)
    assert_allclose(result.entropy[2], entropies[2], atol=1e-5)  # another token than the chosen one is near certain
    assert_allclose(gradient, slopes, rtol=2e-5, atol=1e-37)


@every_function
def test_bfloat16_inputs(name):
    arrays = random_arrays(dtype=jnp.bfloat16)
    result, gradients = program(sliced)(arrays)[name]
    exact = {key: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for key, x in arrays.items()}
    expected, expected_gradients = program(dense)(exact)[name]
    # Products of bfloat16 are exact in the float32 that they are added up in; gradients are rounded to its 8 bits.
    assert all(x.dtype == jnp.float32 for x in result)
    assert_close(result, expected, rtol=1e-3, atol=1e-4)
    assert all(gradients[key].dtype == arrays[key].dtype for key in gradients.keys() & arrays.keys())
    assert_close(jax.tree.map(np.float32, gradients), expected_gradients, rtol=2e-2, atol=3e-2)


@every_function
def test_large_logits_stay_finite(name):
    # exp of such logits is infinite; their largest takes all the probability.
    arrays = random_arrays() | {"temperature": np.ones((2, 1), np.float32)}
    arrays |= {key: arrays[key] * np.float32(1e4) for key in ("hidden", "ref_hidden")}
    result, gradients = program(sliced)(arrays)[name]
    assert_close(result, program(dense)(arrays)[name][0], rtol=1e-4, atol=1e-2)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize("name", ["kl", "kl_reverse", "jsd"])
def test_a_model_does_not_diverge_from_itself(name):
    arrays = random_arrays()
    # The first model has one feature more, which is 0.
    arrays |= {
        key: np.pad(arrays[f"ref_{key}"], [(0, 0)] * (arrays[key].ndim - 1) + [(0, 1)])
        for key in ("hidden", "unembedding")
    }
    (result,), gradients = program(sliced)(arrays)[name]
    assert_allclose(result, np.zeros((ROWS, WIDTH)), atol=1e-6)
    assert np.min(result) >= 0
    assert_close(gradients, jax.tree.map(np.zeros_like, gradients), atol=5e-6)


# --- shapes, masked tokens, devices ---


@cache
def of_other_shapes():
    """Returns results of two leading axes, and of the same tokens in other shapes: one program."""
    arrays, tokens = random_arrays(), ("hidden", "ref_hidden", "ids")
    inputs = {
        "plain": arrays,
        "deep": {"temperature": np.float32([[[0.5]], [[1.5]]])} | {x: arrays[x].reshape(2, 3, 2, -1) for x in tokens},
        "alone": {"temperature": np.float32(1.5)} | {x: arrays[x][1, 2] for x in tokens},
        "by_token": {"temperature": np.linspace(0.5, 2, WIDTH).astype(np.float32)},
    }
    rows = {key: 0 if key in (*tokens, "temperature") else None for key in arrays}

    @jax.jit
    def compute(inputs):
        def of(name):
            results = {kind: sliced(name, x) for kind, x in inputs.items()}
            mapped = jax.vmap(partial(sliced, name), (rows,))(inputs["plain"])
            return results | {"mapped": mapped, "expected_by_token": dense(name, inputs["by_token"])}

        return {name: of(name) for name in FUNCTIONS}

    with sliced_by(4):
        return jax.device_get(compute({kind: arrays | changes for kind, changes in inputs.items()}))


@every_function
def test_of_any_leading_axes_mapped_or_alone(name):
    results = {kind: jax.tree.leaves(x) for kind, x in of_other_shapes()[name].items()}
    plain = results["plain"]
    assert_close(results["mapped"], plain, 1e-5, 1e-6)
    assert_close([x.reshape(y.shape) for x, y in zip(results["deep"], plain, strict=True)], plain, 1e-5, 1e-6)
    assert_close(results["alone"], [x[1, 2] for x in plain], 1e-5, 1e-6)
    assert_close(results["by_token"], results["expected_by_token"])


@every_function
def test_masked_tokens_may_be_any(name):
    mask = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]], bool)
    arrays = random_arrays()
    others = arrays | {key: np.where(mask[..., None], arrays[key], 3 - arrays[key]) for key in ("hidden", "ref_hidden")}
    if name == "logprobs":  # no id of the vocabulary: unspecified, but of no effect
        others["ids"] = np.where(mask[..., None], arrays["ids"], np.int32(11**5))
    (result, gradients), (expected, expected_gradients) = (program(sliced)(x, mask)[name] for x in (others, arrays))
    assert_close([x[mask] for x in result], [x[mask] for x in expected])
    assert_close(gradients, expected_gradients)
    assert not np.any(gradients["hidden"][~mask])


@pytest.mark.parametrize("name", slow_unless(("logprobs",), FUNCTIONS))
def test_gradients_over_devices_are_those_of_the_whole(name):
    # With the default check_vma, autodiff sums the gradient of the replicated matrix.
    arrays = random_arrays(shape=(16, WIDTH)) | {"temperature": np.linspace(0.5, 2, 16, dtype=np.float32)[:, None]}
    names, is_whole = ("hidden", "unembedding", "temperature"), ("unembedding", "ref_unembedding", "beta")

    def loss(floats, others):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(sliced(name, floats | others)))

    def shard_gradient(floats, others):
        value, gradients = jax.value_and_grad(loss)(floats, others)
        return jax.lax.psum(value, "data"), gradients

    def shard_loss(floats, others):
        return jax.lax.psum(loss(floats, others), "data")

    floats, others = ({key: x for key, x in arrays.items() if (key in names) == is_float} for is_float in (1, 0))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    specs = tuple({key: whole if key in is_whole else rows for key in x} for x in (floats, others))
    on_mesh = partial(jax.shard_map, mesh=Mesh(np.array(jax.devices()), ("data",)), in_specs=specs)
    with sliced_by(4):
        expected = jax.jit(jax.value_and_grad(loss))(floats, others)
        by_shard = jax.jit(on_mesh(shard_gradient, out_specs=(whole, specs[0])))(floats, others)
        of_mesh = jax.jit(jax.value_and_grad(on_mesh(shard_loss, out_specs=whole)))(floats, others)
    for result in (by_shard, of_mesh):
        assert_close(result, expected, rtol=1e-4, atol=1e-4)


# --- memory ---


def shapes_of(tokens, vocabulary, features):
    """Returns arrays that hold no memory."""
    sizes = {"hidden": (*tokens, features), "unembedding": (vocabulary, features)}
    sizes |= {f"ref_{name}": size for name, size in sizes.items()} | {"temperature": (), "beta": ()}
    arrays = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    return arrays | {"ids": jax.ShapeDtypeStruct((*tokens, 16), jnp.int32)}


def gradient_of(name):
    def loss(hidden, unembedding, arrays):
        arrays = arrays | {"hidden": hidden, "unembedding": unembedding}
        return sum(jnp.sum(x) for x in jax.tree.leaves(sliced(name, arrays)))

    return lambda arrays: jax.value_and_grad(loss, (0, 1))(arrays["hidden"], arrays["unembedding"], arrays)


def all_shapes(jaxpr):
    """Yields shapes of all arrays of a computation, those of loops and calls within it included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in (*equation.invars, *equation.outvars))
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):  # jax.extend has this from 0.10 on alone
                yield from all_shapes(inner)


@every_function
def test_no_array_is_as_large_as_the_logits(name):
    tokens, vocabulary = (4, 512), 2**15 + 1
    jaxpr = jax.make_jaxpr(gradient_of(name))(shapes_of(tokens, vocabulary, 8)).jaxpr
    shapes = set(all_shapes(jaxpr))
    assert (2048, 255) in shapes  # a slice: the walk has reached the inside of the loops
    assert max(np.prod(shape) for shape in shapes) <= np.prod(tokens) * vocabulary / 8


MEMORY_LIMITS = [
    ("logprobs", 200, None),
    ("kl", 300, 2),  # the temperature's gradient, which nobody asked for, would be a third loop
]


@pytest.mark.parametrize(("name", "mebibytes", "loops"), MEMORY_LIMITS)
def test_memory_of_a_large_vocabulary(name, mebibytes, loops):
    # The logits alone would be 8 · 512 · 151,936 · 4 bytes = 2,374 MiB.
    arrays = shapes_of((8, 512), 151_936, 512)
    compiled = jax.jit(gradient_of(name)).lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= mebibytes * 2**20
    assert loops in (None, compiled.as_text().count(" while("))
