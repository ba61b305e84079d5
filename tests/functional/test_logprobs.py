"""Functions of hidden states: each against the same function of all logits at once, which it never holds."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax import functional as F

ROWS, WIDTH, FEATURES = 2, 6, 3
# Vocabulary and greatest width of a slice. The last slice overlaps the one before it in
# 1 of 4 columns for (11, 4) and in 2 of 5 for (23, 5); the others are disjoint.
SLICINGS = [(11, 4), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(5, 128), (8, 4), (23, 5), (7, 1), (21, 5)])]
KEPT = pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])


@pytest.fixture
def slice_width(assume):
    """Sets how many columns of the vocabulary are computed at a time, and whether logits are kept."""

    def set_width(width, keeps=False):
        assume(kept_logits=2**25 if keeps else 0, slice_elements=1, min_slice_width=width)

    return set_width


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


FUNCTIONS = {
    "logprobs": Function(logprobs_of_hidden, logprobs_of_logits),
    "kl": Function(kl_of_hidden, lambda logits, ref, ids: F.kl_full(logits, ref)),
    "kl_reverse": Function(
        partial(kl_of_hidden, reverse=True), lambda logits, ref, ids: F.kl_full(logits, ref, reverse=True)
    ),
    "jsd": Function(jsd_of_hidden, None),
    "buckets": Function(buckets_of_hidden, buckets_of_logits),
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
    return arrays | {"ids": ids.reshape(*shape, k), "temperature": np.float32(0.7), "beta": np.float32(0.3)}


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


def value_and_gradients(function, name, **options):
    """Compiles the results and the gradients, in all arrays, of a sum in which each number has its own weight."""

    def total(floats, ids):
        result = function(name, floats | {"ids": ids}, **options)
        weights = [jnp.linspace(-1, 2, x.size).reshape(x.shape) ** n for n, x in enumerate(jax.tree.leaves(result), 1)]
        return sum(jnp.sum(w * x) for w, x in zip(weights, jax.tree.leaves(result), strict=True)), tuple(
            jax.tree.leaves(result)
        )

    @jax.jit
    def evaluate(arrays):
        floats = {key: x for key, x in arrays.items() if key != "ids"}
        (_, result), gradients = jax.value_and_grad(total, has_aux=True)(floats, arrays["ids"])
        return result, gradients

    return evaluate


def assert_close(result, expected, rtol=1e-4, atol=2e-5):
    jax.tree.map(partial(assert_allclose, rtol=rtol, atol=atol), result, expected)


# --- numbers derived by hand ---


def test_logprobs_by_hand():
    # Logits (0, log 3): π = (1/4, 3/4). log ¼ = −1.3863, log ¾ = −0.2877, H = ¼ · 1.3863 + ¾ · 0.2877 = 0.5623.
    arguments = jnp.ones((2, 1)), jnp.log(jnp.array([[1.0], [3.0]])), jnp.array([0, 1])
    result = F.token_logprobs(*arguments)
    assert_allclose(result.logprobs, [-1.3863, -0.2877], atol=5e-5)
    assert_allclose(result.entropy, [0.5623, 0.5623], atol=5e-5)
    # τ = ½ squares the odds: logits (0, log 9), π = (1/10, 9/10). log 0.1 = −2.3026, log 0.9 = −0.1054,
    # H = 0.2303 + 0.0948 = 0.3251.
    result = F.token_logprobs(*arguments, temperature=0.5)
    assert_allclose(result.logprobs, [-2.3026, -0.1054], atol=5e-5)
    assert_allclose(result.entropy, [0.3251, 0.3251], atol=5e-5)
    # c·tanh(z/c) of z = (0, 2) with c = 1: (0, tanh 2 = .9640); p = e^.964 / (1 + e^.964) = 2.6222 / 3.6222 = .7239.
    logprobs, _ = F.token_logprobs(jnp.ones((2, 1)), jnp.array([[0.0], [2.0]]), jnp.array([0, 1]), softcap=1.0)
    assert_allclose(np.exp(logprobs), [0.2761, 0.7239], atol=5e-5)
    # A vocabulary of one token is certain.
    assert_array_equal(F.token_logprobs(jnp.ones((1, 1)), jnp.ones((1, 1)), jnp.array([0])), np.zeros((2, 1)))


def test_the_margin_of_20_nats_by_hand():
    # log π = −log(1 + 2 e⁻²⁰) = −4.1223e-9; z − log Σ exp z is 0 in float32.
    hidden, ids = np.float32([[20, 0, 0]]), np.int32([0])
    value, gradient = jax.value_and_grad(
        lambda hidden: F.token_logprobs(hidden, np.eye(3, dtype=np.float32), ids)[0][0]
    )(hidden)
    assert_allclose(value, -4.1223e-9, rtol=1e-4)
    assert_allclose(gradient, [[4.1223e-9, -2.0612e-9, -2.0612e-9]], rtol=1e-4)


def test_divergences_by_hand():
    # The models of the weather and the pair of test_divergence.py; τ = ½ squares the odds: (1/2, 1/2) stays, (1/4, 3/4)
    # becomes (1/10, 9/10). ½ log 5 + ½ log 5/9 = 0.5108.
    one, a, b = np.ones((1, 1), np.float32), *np.log(np.float32([[[0.7], [0.2], [0.1]], [[0.6], [0.3], [0.1]]]))
    assert_allclose(F.token_kl(one, b, one, a), [0.02915], atol=5e-5)
    assert_allclose(F.token_kl(one, a, one, b, reverse=True), [0.02915], atol=5e-5)
    assert_allclose(F.token_kl(one, a, one, b), [0.0268], atol=5e-5)
    even, uneven = np.log(np.float32([[0.5], [0.5]])), np.log(np.float32([[1], [3]]))
    assert_allclose(F.token_kl(one, even, one, uneven, temperature=0.5), [0.5108], atol=5e-5)
    assert_allclose(F.token_jsd(one, uneven, one, even), [0.0338], atol=5e-5)
    assert_allclose(F.token_jsd(one, uneven, one, even, beta=0.25), [0.0260], atol=5e-5)


def test_buckets_by_hand():
    # Of the weights 5, 2, 3, 6 the second and the fourth are chosen: 2, 6, and 5 + 3.
    one, weights = np.ones((1, 1), np.float32), np.float32([[5], [2], [3], [6]])
    buckets, arguments = jax.jit(F.bucket_logits), (one, np.log(weights), np.int32([[1, 3]]))
    assert_allclose(np.exp(buckets(*arguments)), [[2, 6, 8]], rtol=1e-5)
    # τ = ½ squares them: 4, 36, and 25 + 9.
    assert_allclose(np.exp(buckets(*arguments, temperature=0.5)), [[4, 36, 34]], rtol=1e-5)
    assert_array_equal(jax.jit(F.top_tokens, static_argnums=2)(one, weights, 3), [[3, 0, 2]])


# --- all logits at once ---


@every_function
@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
@pytest.mark.parametrize("caps", [{}, {"softcap": 0.5, "ref_softcap": 1.5}], ids=["", "capped"])
def test_values_and_gradients_equal_the_dense_ones(slice_width, name, vocabulary, width, caps):
    slice_width(width)
    arrays = random_arrays(vocabulary) | {"temperature": np.array([[0.5], [1.5]], np.float32)}  # one a completion
    result, gradients = value_and_gradients(sliced, name, **caps)(arrays)
    expected, expected_gradients = value_and_gradients(dense, name, **caps)(arrays)
    assert all(x.dtype == jnp.float32 for x in result)
    assert_close(result, expected)
    assert_close(gradients, expected_gradients)
    # The temperature's gradient is that of both models; the second one has none.
    assert not np.any(gradients["ref_hidden"])
    assert not np.any(gradients["ref_unembedding"])
    if not caps:
        slice_width(width, keeps=True)
        assert_close(value_and_gradients(sliced, name)(arrays), (expected, expected_gradients))


@pytest.mark.parametrize("caps", [{"softcap": 1.0}, {"softcap": 1e4}])
def test_the_gradient_of_a_cap_is_that_of_the_dense_one(slice_width, caps):
    slice_width(4)
    arrays = random_arrays()

    def gradient(function, name):
        def total(cap):
            return sum(jnp.sum(x) for x in jax.tree.leaves(function(name, arrays, softcap=cap)))

        return jax.jit(jax.grad(total))(np.float32(caps["softcap"]))

    for name in ("logprobs", "kl", "buckets"):
        assert_allclose(gradient(sliced, name), gradient(dense, name), rtol=1e-3, atol=1e-4)


@every_function
def test_gradients_equal_finite_differences(slice_width, name):
    slice_width(3)
    arrays = random_arrays(7)
    keys = ("hidden", "unembedding", "temperature")
    function = jax.jit(lambda *x: jax.tree.leaves(sliced(name, arrays | dict(zip(keys, x, strict=True)))))
    check_grads(function, tuple(arrays[key] for key in keys), order=1, modes=["rev"], eps=1e-2)


@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
def test_top_tokens_are_those_of_all_logits(slice_width, vocabulary, width):
    slice_width(width)
    arrays = random_arrays(vocabulary)
    for k in (1, 3, vocabulary):
        expected = np.argsort(-(arrays["hidden"] @ arrays["unembedding"].T), axis=-1)[..., :k]
        assert_array_equal(jax.jit(partial(F.top_tokens, k=k))(arrays["hidden"], arrays["unembedding"]), expected)


# --- digits ---


@pytest.mark.parametrize("margin", [1, 20, 60])
@pytest.mark.parametrize("width", [11, 4])
@KEPT
def test_a_probability_near_one_keeps_its_digits_and_its_gradient(slice_width, margin, width, keeps):
    # The largest logit leads the next by `margin`; the chosen token comes first, in the middle, or is not the largest.
    slice_width(width, keeps)
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
    result = jax.jit(partial(F.token_logprobs))(*arguments)
    # z has an error of half an ulp, which log 1 / (1 − π) does not enlarge: 2e-5 is 5 ulps of a logit of 60.
    assert_allclose(result.logprobs, logprobs, rtol=2e-5, atol=0)
    entropies = -(np.exp(log_p) * log_p).sum(-1)
    assert_allclose(result.entropy[:2], entropies[:2], rtol=2e-5, atol=0)
    assert_allclose(result.entropy[2], entropies[2], atol=1e-5)  # another token than the chosen one is near certain
    gradient = jax.jit(jax.grad(lambda hidden: jnp.sum(F.token_logprobs(hidden, *arguments[1:]).logprobs)))
    assert_allclose(gradient(arguments[0]), slopes, rtol=2e-5, atol=1e-37)


@every_function
def test_bfloat16_inputs(slice_width, name):
    slice_width(4)
    arrays = random_arrays(dtype=jnp.bfloat16)
    result, gradients = value_and_gradients(sliced, name)(arrays)
    exact = {key: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for key, x in arrays.items()}
    expected, expected_gradients = value_and_gradients(dense, name)(exact)
    # Products of bfloat16 are exact in the float32 that they are added up in; gradients are rounded to its 8 bits.
    assert all(x.dtype == jnp.float32 for x in result)
    assert_close(result, expected, rtol=1e-3, atol=1e-4)
    assert {key: x.dtype for key, x in gradients.items()} == {key: arrays[key].dtype for key in gradients}
    assert_close({key: x.astype(np.float32) for key, x in gradients.items()}, expected_gradients, rtol=2e-2, atol=3e-2)


@every_function
def test_large_logits_stay_finite(slice_width, name):
    # exp of such logits is infinite; their largest takes all the probability.
    slice_width(4)
    arrays = random_arrays() | {"temperature": np.float32(1)}
    arrays |= {key: arrays[key] * np.float32(1e4) for key in ("hidden", "ref_hidden")}
    result, gradients = value_and_gradients(sliced, name)(arrays)
    expected = dense(name, {key: jnp.asarray(x) for key, x in arrays.items()})
    assert_close(result, tuple(jax.tree.leaves(expected)), rtol=1e-4, atol=1e-2)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize("name", ["kl", "kl_reverse", "jsd"])
def test_a_model_does_not_diverge_from_itself(slice_width, name):
    slice_width(4)
    arrays = random_arrays()
    arrays |= {f"ref_{key}": arrays[key] for key in ("hidden", "unembedding")}
    (result,), gradients = value_and_gradients(sliced, name)(arrays)
    assert_allclose(result, np.zeros((ROWS, WIDTH)), atol=1e-6)
    assert np.min(result) >= 0
    assert_close(gradients, jax.tree.map(np.zeros_like, gradients), atol=5e-6)


# --- shapes, masked tokens, devices ---


@every_function
def test_of_any_leading_axes_mapped_or_alone(slice_width, name):
    slice_width(4)
    arrays, tokens = random_arrays(), ("hidden", "ref_hidden", "ids")
    expected = jax.tree.leaves(jax.jit(partial(sliced, name))(arrays))
    deep = arrays | {key: arrays[key].reshape(2, 3, 2, -1) for key in tokens}
    for x, y in zip(jax.tree.leaves(jax.jit(partial(sliced, name))(deep)), expected, strict=True):
        assert_allclose(x.reshape(y.shape), y, rtol=1e-5, atol=1e-6)
    axes = {key: 0 if key in tokens else None for key in arrays}
    assert_close(jax.tree.leaves(jax.jit(jax.vmap(partial(sliced, name), (axes,)))(arrays)), expected, 1e-5, 1e-6)
    alone = jax.tree.leaves(jax.jit(partial(sliced, name))(arrays | {key: arrays[key][1, 2] for key in tokens}))
    assert_close(alone, [x[1, 2] for x in expected], 1e-5, 1e-6)
    # A temperature of several tokens, and several temperatures.
    by_token = np.linspace(0.5, 2, WIDTH).astype(np.float32)
    full = arrays | {"temperature": np.broadcast_to(by_token, (ROWS, WIDTH))}
    evaluate = value_and_gradients(sliced, name)
    (result, gradients), (of_full, of_all) = evaluate(arrays | {"temperature": by_token}), evaluate(full)
    assert_close(result, of_full, 1e-5, 1e-6)
    assert_allclose(gradients["temperature"], of_all["temperature"].sum(0), rtol=1e-4, atol=1e-5)
    several = jax.vmap(lambda t: sliced(name, arrays | {"temperature": t}))(np.float32([0.7, 2.0]))
    assert_close([x[0] for x in jax.tree.leaves(several)], expected, 1e-4, 1e-5)


@every_function
def test_masked_tokens_are_physically_removed(slice_width, name):
    slice_width(4)
    arrays, tokens = random_arrays(), ("hidden", "ref_hidden", "ids")
    mask = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]], bool)
    if name == "logprobs":  # no id of the vocabulary: unspecified, but of no effect
        arrays["ids"] = np.where(mask[..., None], arrays["ids"], 11**5)

    def loss(floats, ids, mask):
        parts = jax.tree.leaves(sliced(name, floats | {"ids": ids}))
        return sum(jnp.sum(jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, 0)) for x in parts)

    def evaluate(arrays, mask):
        floats = {key: x for key, x in arrays.items() if key != "ids"}
        return jax.jit(jax.value_and_grad(loss))(floats, arrays["ids"], mask)

    value, gradients = evaluate(arrays, mask)
    expected, expected_gradients = evaluate(arrays | {key: arrays[key][mask] for key in tokens}, mask[mask])
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(gradients["hidden"][mask], expected_gradients["hidden"], rtol=1e-4, atol=1e-6)
    assert not np.any(gradients["hidden"][~mask])
    assert_allclose(gradients["unembedding"], expected_gradients["unembedding"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "logprobs" else pytest.mark.slow) for x in FUNCTIONS]
)
@pytest.mark.parametrize("gradient_of", ["shards", "mesh", "pmap"])
def test_gradients_over_devices_are_those_of_the_whole(slice_width, name, gradient_of):
    # With the default check_vma, autodiff sums the gradient of the replicated matrix.
    slice_width(4)
    arrays = random_arrays(shape=(16, WIDTH)) | {"temperature": np.linspace(0.5, 2, 16, dtype=np.float32)[:, None]}
    names = ("hidden", "unembedding", "temperature")

    def loss(floats, others):
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(sliced(name, floats | others)))

    def shard_gradient(floats, others):
        value, gradients = jax.value_and_grad(loss)(floats, others)
        return jax.lax.psum(value, "data"), gradients

    def with_one_sum(floats, others):
        value, gradients = jax.value_and_grad(loss)(floats, others)
        return jax.lax.psum(value, "data"), gradients | {"unembedding": jax.lax.psum(gradients["unembedding"], "data")}

    floats, others = ({key: x for key, x in arrays.items() if (key in names) == is_float} for is_float in (1, 0))
    expected = jax.jit(jax.value_and_grad(loss))(floats, others)
    rows, whole = PartitionSpec("data"), PartitionSpec()
    is_whole = ("unembedding", "ref_unembedding", "beta")
    specs = [{key: whole if key in is_whole else rows for key in x} for x in (floats, others)]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    if gradient_of == "shards":
        function = jax.shard_map(shard_gradient, mesh=mesh, in_specs=tuple(specs), out_specs=(whole, specs[0]))
        result = jax.jit(function)(floats, others)
    elif gradient_of == "mesh":
        total = jax.shard_map(
            lambda *x: jax.lax.psum(loss(*x), "data"), mesh=mesh, in_specs=tuple(specs), out_specs=whole
        )
        result = jax.jit(jax.value_and_grad(total))(floats, others)
    else:
        axes = [{key: None if key in is_whole else 0 for key in x} for x in (floats, others)]
        shards = [
            {key: x if key in is_whole else x.reshape(8, 2, *x.shape[1:]) for key, x in of.items()}
            for of in (floats, others)
        ]
        value, gradients = jax.pmap(with_one_sum, "data", in_axes=tuple(axes), out_axes=(None, axes[0]))(*shards)
        result = value, {key: x.reshape(floats[key].shape) for key, x in gradients.items()}
    assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("logprobs", {"unembedding": (11, 4)}),  # features differ
        ("logprobs", {"unembedding": (3, 11)}),  # transposed
        ("logprobs", {"unembedding": (11, 3, 1)}),
        ("logprobs", {"ids": (2, 5, 3)}),
        ("logprobs", {"ids": (6, 2, 3)}),
        ("logprobs", {"hidden": (2, 6, 5, 3)}),  # an axis too many before the features
        ("kl", {"unembedding": (11, 4)}),
        ("kl", {"ref_unembedding": (11, 3)}),
        ("kl", {"ref_hidden": (2, 5, 2)}),  # other tokens
        ("jsd", {"ref_unembedding": (12, 2)}),  # another vocabulary
        ("buckets", {"ids": (2, 5, 3)}),
    ],
)
def test_wrong_shapes_are_refused(name, changes):
    arrays = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in random_arrays().items()}
    jax.eval_shape(partial(sliced, name), arrays)
    arrays |= {key: jax.ShapeDtypeStruct(shape, arrays[key].dtype) for key, shape in changes.items()}
    with pytest.raises(AssertionError, match="must have the shape"):
        jax.eval_shape(partial(sliced, name), arrays)


@pytest.mark.parametrize("k", [0, 12])
def test_more_tokens_than_there_are_are_refused(k):
    with pytest.raises(ValueError, match=f"k is {k}"):
        F.top_tokens(random_arrays()["hidden"], random_arrays()["unembedding"], k)


# --- truncated divergences, and advantages of a teacher ---


@pytest.mark.parametrize(
    "divergence", [F.kl_full, pytest.param(partial(F.kl_full, reverse=True), marks=pytest.mark.slow)]
)
def test_a_truncated_divergence_grows_with_its_tokens_up_to_that_of_all(slice_width, divergence):
    slice_width(4)
    arrays = random_arrays()
    models = [(arrays[f"{x}hidden"], arrays[f"{x}unembedding"]) for x in ("", "ref_")]

    @jax.jit
    def of_both():
        ids = [F.top_tokens(*models[1], k) for k in (1, 3, 10, 11)]
        return jnp.stack([divergence(*(F.bucket_logits(*model, x) for model in models)) for x in ids])

    truncated, whole = of_both(), divergence(*(hidden @ matrix.T for hidden, matrix in models))
    assert np.all(np.diff(truncated, axis=0) >= -1e-6)
    assert np.all(truncated[0] < whole)
    assert_allclose(truncated[-2:], [whole, whole], rtol=1e-4, atol=1e-6)


def test_expected_gradient_of_teacher_advantages_is_that_of_the_reverse_kl():
    # By enumeration of a vocabulary: E_π[−A ∇ log π] = ∇ KL(π ‖ π_T).
    rng = np.random.default_rng(0)
    student, teacher = (jnp.asarray(rng.normal(size=7), jnp.float32) for _ in range(2))

    def surrogate(logits):
        log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
        return -jnp.sum(jax.lax.stop_gradient(jnp.exp(log_q)) * F.teacher_advantages(log_q, log_p) * log_q)

    assert_allclose(jax.grad(surrogate)(student), jax.grad(F.kl_full)(student, teacher), atol=1e-6)
    # The teacher thinks the first token e^½ times less likely than the policy does, and the second more likely.
    assert_allclose(F.teacher_advantages(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -0.5])), [-0.5, 1.5])


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


@pytest.mark.parametrize(
    ("name", "mebibytes", "loops"),
    [
        ("logprobs", 200, None),
        ("kl", 300, 2),  # the temperature's gradient, which nobody asked for, would be a third loop
        pytest.param("jsd", 350, None, marks=pytest.mark.slow),
        pytest.param("buckets", 350, None, marks=pytest.mark.slow),
    ],
)
def test_memory_of_a_large_vocabulary(name, mebibytes, loops):
    # The logits alone would be 8 · 512 · 151,936 · 4 bytes = 2,374 MiB.
    arrays = shapes_of((8, 512), 151_936, 512)
    compiled = jax.jit(gradient_of(name)).lower(arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= mebibytes * 2**20
    assert loops in (None, compiled.as_text().count(" while("))
