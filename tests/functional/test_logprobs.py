from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import TokenLogprobs, entropy, kl_full, token_kl, token_logprobs

ROWS, WIDTH, FEATURES = 2, 6, 3

# Vocabulary and greatest width of a slice. The last slice overlaps the one before it in
# 1 of 4 columns for (11, 4) and in 4 of 5 for (21, 5).
SLICINGS = [(21, 5), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(5, 128), (8, 4), (11, 4), (7, 1)])]


@pytest.fixture
def slice_width(assume):
    """Sets how many columns of the vocabulary are computed at a time, and whether logits are kept."""

    def set_width(width, keeps=False):
        assume(kept_logits=2**25 if keeps else 0, slice_elements=1, min_slice_width=width)

    return set_width


def random_arguments(vocabulary, shape=(ROWS, WIDTH), dtype=np.float32):
    """hidden, unembedding and ids, the first and last of the vocabulary among the ids."""
    rng = np.random.default_rng(vocabulary)
    hidden = rng.normal(size=(*shape, FEATURES)).astype(dtype)
    unembedding = rng.normal(size=(vocabulary, FEATURES)).astype(dtype)
    ids = np.resize([0, vocabulary - 1, *rng.permutation(vocabulary)], shape).astype(np.int32)
    return hidden, unembedding, ids


def dense(hidden, unembedding, ids, *, temperature=1.0):
    """What the function replaces: all logits at once."""
    log_p = jax.nn.log_softmax(hidden @ unembedding.T / jnp.broadcast_to(temperature, ids.shape)[..., None])
    chosen = jnp.take_along_axis(log_p, ids[..., None], axis=-1)[..., 0]
    return TokenLogprobs(chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1))


def mixed(function, hidden, unembedding, ids, temperature):
    """A scalar in which every token's log-probability and entropy has its own weight."""
    outputs = function(hidden, unembedding, ids, temperature=temperature)
    weights = np.linspace(-1, 2, ids.size, dtype=np.float32).reshape(ids.shape)
    return jnp.sum(weights * outputs.logprobs) + jnp.sum(weights**2 * outputs.entropy), outputs


def value_and_gradients(function):
    # A new function each time: what was compiled for another width of the slices is not found again.
    return jax.jit(jax.value_and_grad(partial(mixed, function), (0, 1, 3), has_aux=True))


def assert_trees_close(result, expected, **tolerance):
    jax.tree.map(partial(assert_allclose, **tolerance), result, expected)


# --- numbers derived by hand ---


def test_by_hand():
    # Logits (0, log 3): π = (1/4, 3/4). log ¼ = −1.3863, log ¾ = −0.2877, H = ¼ · 1.3863 + ¾ · 0.2877 = 0.5623.
    arguments = np.ones((2, 1), np.float32), np.log(np.float32([[1], [3]])), np.int32([0, 1])
    compiled = jax.jit(token_logprobs)
    result = compiled(*arguments)
    assert_allclose(result.logprobs, [-1.3863, -0.2877], atol=5e-5)
    assert_allclose(result.entropy, [0.5623, 0.5623], atol=5e-5)
    # τ = ½ squares the odds: logits (0, log 9), π = (1/10, 9/10). log 0.1 = −2.3026, log 0.9 = −0.1054,
    # H = 0.2303 + 0.0948 = 0.3251.
    result = compiled(*arguments, temperature=0.5)
    assert_allclose(result.logprobs, [-2.3026, -0.1054], atol=5e-5)
    assert_allclose(result.entropy, [0.3251, 0.3251], atol=5e-5)


# Logits whose largest leads the next by `margin`; the chosen token comes first, in the middle, or is not the largest.
MARGINS = pytest.mark.parametrize("margin", [1, 8, 16, 20, 25, 60])


def near_certain(margin, vocabulary=11):
    """Returns arguments of `token_logprobs` for three tokens, and what float64 gives for them.

    These are log-probabilities, entropies, and the gradients of log-probabilities in the logits, `[3, V]`.
    """
    spread = np.linspace(0, 1, vocabulary)
    logits = np.stack([np.roll(np.r_[margin + 1, spread[1:]], shift) for shift in (0, 5, 5)])
    ids = np.array([0, 5, 7], np.int32)
    logits = logits.astype(np.float32).astype(float)
    rest = logits.copy()
    rest[np.arange(3), ids] = -np.inf
    chosen = logits[np.arange(3), ids]
    of_rest = np.log(np.exp(rest).sum(-1))
    logprobs = -np.logaddexp(0, of_rest - chosen)
    log_p = logits - (chosen - logprobs)[:, None]
    log_p[np.arange(3), ids] = logprobs
    entropies = -(np.exp(log_p) * log_p).sum(-1)
    of_logprob = -np.exp(log_p)
    of_logprob[np.arange(3), ids] = np.exp(-np.logaddexp(0, chosen - of_rest))  # 1 − π
    arguments = logits.astype(np.float32), np.eye(vocabulary, dtype=np.float32), ids
    return arguments, logprobs, entropies, of_logprob


@MARGINS
@pytest.mark.parametrize("width", [11, 4])
@pytest.mark.parametrize("keeps", [False, True], ids=["computed again", "kept"])
def test_a_probability_near_one_keeps_its_digits_and_its_gradient(slice_width, margin, width, keeps):
    slice_width(width, keeps)
    arguments, logprobs, entropies, of_logprob = near_certain(margin)

    def gradient(output):
        return jax.jit(jax.grad(lambda hidden: jnp.sum(getattr(token_logprobs(hidden, *arguments[1:]), output))))

    result = jax.jit(partial(token_logprobs))(*arguments)
    # z has an error of half an ulp, which log 1 / (1 − π) does not enlarge: 2e-5 is 5 ulps of a logit of 60.
    assert_allclose(result.logprobs, logprobs, rtol=2e-5, atol=0)
    assert_allclose(result.entropy[:2], entropies[:2], rtol=2e-5, atol=0)
    assert_allclose(result.entropy[2], entropies[2], atol=1e-5)  # another token than the chosen one is near certain
    assert_allclose(gradient("logprobs")(arguments[0]), of_logprob, rtol=2e-5, atol=1e-37)


def test_the_margin_of_20_nats_by_hand():
    # log π = −log(1 + 2 e⁻²⁰) = −4.1223e-9; z − log Σ exp z is 0 in float32.
    hidden, ids = np.float32([[20, 0, 0]]), np.int32([0])
    value, gradient = jax.value_and_grad(lambda hidden: token_logprobs(hidden, np.eye(3, dtype=np.float32), ids)[0][0])(
        hidden
    )
    assert_allclose(value, -4.1223e-9, rtol=1e-4)
    assert_allclose(gradient, [[4.1223e-9, -2.0612e-9, -2.0612e-9]], rtol=1e-4)


def test_a_vocabulary_of_one_token_is_certain(slice_width):
    hidden, unembedding, ids = np.float32([[3.0]]), np.float32([[2.0]]), np.int32([0])
    (_, result), gradients = value_and_gradients(token_logprobs)(hidden, unembedding, ids, np.float32(1))
    assert_array_equal(result.logprobs, [0])
    assert_array_equal(result.entropy, [0])
    jax.tree.map(lambda gradient: assert_array_equal(gradient, np.zeros_like(gradient)), gradients)


def test_uniform_by_hand(slice_width):
    # Without features all 11 logits are 0: log π = −log 11, H = log 11.
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11)
    result = jax.jit(partial(token_logprobs))(np.zeros_like(hidden), unembedding, ids)
    assert_allclose(result.logprobs, np.full(ids.shape, -np.log(11)), rtol=1e-6)
    assert_allclose(result.entropy, np.full(ids.shape, np.log(11)), rtol=1e-6)


# --- a plain loop, and all logits at once ---


def loop(hidden, unembedding, ids, temperature):
    chosen, entropies = np.zeros(ids.shape), np.zeros(ids.shape)
    for index in np.ndindex(ids.shape):
        logits = [sum(float(w) * float(h) for w, h in zip(row, hidden[index], strict=True)) for row in unembedding]
        weights = [np.exp(logit / temperature) for logit in logits]
        probabilities = [weight / sum(weights) for weight in weights]
        chosen[index] = np.log(probabilities[ids[index]])
        entropies[index] = -sum(p * np.log(p) for p in probabilities)
    return chosen, entropies


def test_equals_a_plain_loop(slice_width):
    slice_width(4)
    arguments = random_arguments(11)
    result = jax.jit(partial(token_logprobs, temperature=0.7))(*arguments)
    assert_trees_close(tuple(result), loop(*arguments, 0.7), rtol=1e-5, atol=1e-5)


KEPT = pytest.mark.parametrize("keeps", [False, True], ids=["computed again", "kept"])


@KEPT
@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
def test_values_and_gradients_equal_the_dense_ones(slice_width, vocabulary, width, keeps):
    slice_width(width, keeps)
    temperature = np.array([[0.5], [1.5]], np.float32)  # one a completion
    arguments = *random_arguments(vocabulary), temperature
    (_, result), gradients = value_and_gradients(token_logprobs)(*arguments)
    (_, expected), expected_gradients = value_and_gradients(dense)(*arguments)
    assert_trees_close(result, expected, rtol=1e-5, atol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (expected_gradient.shape, jnp.float32)
        assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_gradients_equal_finite_differences(slice_width):
    slice_width(3)
    hidden, unembedding, ids = random_arguments(7)

    @jax.jit
    def function(hidden, unembedding, temperature):
        return token_logprobs(hidden, unembedding, ids, temperature=temperature)

    check_grads(function, (hidden, unembedding, np.full((ROWS, 1), 0.8, np.float32)), order=1, modes=["rev"], eps=1e-2)


def test_entropy_equals_that_of_the_logits(slice_width):
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11)
    result = token_logprobs(hidden, unembedding, ids).entropy
    assert_allclose(result, entropy(jnp.asarray(hidden @ unembedding.T)), rtol=1e-5)


# --- shapes, dtypes, temperatures ---


@pytest.mark.parametrize("shape", [pytest.param((), marks=pytest.mark.slow), (2, 3, 2)])
def test_any_leading_axes(slice_width, shape):
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11, shape)
    function = value_and_gradients(token_logprobs)
    (_, result), gradients = function(hidden, unembedding, ids, np.float32(1.3))
    (_, flat), flat_gradients = function(hidden.reshape(-1, FEATURES), unembedding, ids.reshape(-1), np.float32(1.3))
    assert result.logprobs.shape == result.entropy.shape == shape
    assert gradients[0].shape == hidden.shape
    assert_trees_close(jax.tree.map(jnp.ravel, result), flat, rtol=1e-6)
    assert_trees_close((gradients[0].reshape(-1, FEATURES), *gradients[1:]), flat_gradients, rtol=1e-5, atol=1e-6)


def test_temperature_broadcasts_against_the_tokens(slice_width):
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11)
    function = value_and_gradients(token_logprobs)
    for shape in [(), (WIDTH,), (ROWS, 1), (1, WIDTH)]:
        temperature = np.random.default_rng(0).uniform(0.5, 2, shape).astype(np.float32)
        (_, result), (*_, gradient) = function(hidden, unembedding, ids, temperature)
        full, collect = jax.vjp(lambda t: jnp.broadcast_to(t, ids.shape), temperature)
        (_, expected), (*_, full_gradient) = function(hidden, unembedding, ids, full)
        assert_trees_close(result, expected, rtol=1e-5, atol=1e-6)
        # A temperature of several tokens collects the gradients of all of them.
        assert_allclose(gradient, collect(full_gradient)[0], rtol=1e-4, atol=1e-5)


def test_temperature_may_be_mapped_over(slice_width):
    slice_width(4)
    arguments = random_arguments(11)
    temperatures = np.array([0.5, 1.0, 2.0], np.float32)
    function = value_and_gradients(token_logprobs)
    mapped = jax.vmap(function, (None, None, None, 0))(*arguments, temperatures)
    for i, temperature in enumerate(temperatures):
        of_one = jax.tree.map(lambda x, i=i: x[i], mapped)
        assert_trees_close(of_one, function(*arguments, temperature), rtol=1e-4, atol=1e-5)


def test_completions_may_be_mapped_over(slice_width):
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11)
    expected = jax.jit(token_logprobs)(hidden, unembedding, ids)
    assert_trees_close(jax.jit(jax.vmap(token_logprobs, (0, None, 0)))(hidden, unembedding, ids), expected, rtol=1e-5)


@pytest.mark.slow
def test_jit_equals_eager(slice_width):
    slice_width(4)
    arguments = *random_arguments(11), np.float32(0.7)
    eager = jax.value_and_grad(partial(mixed, token_logprobs), (0, 1, 3), has_aux=True)(*map(jnp.asarray, arguments))
    assert_trees_close(value_and_gradients(token_logprobs)(*arguments), eager, rtol=1e-5, atol=1e-5)


def test_bfloat16_inputs(slice_width):
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11, dtype=jnp.bfloat16)
    (_, result), gradients = value_and_gradients(token_logprobs)(hidden, unembedding, ids, np.float32(0.7))
    exact = hidden.astype(np.float32), unembedding.astype(np.float32), ids, np.float32(0.7)
    (_, expected), expected_gradients = value_and_gradients(dense)(*exact)
    # Products of bfloat16 are exact in the float32 that they are added up in.
    assert result.logprobs.dtype == result.entropy.dtype == jnp.float32
    assert_trees_close(result, expected, rtol=1e-4, atol=1e-4)
    # The gradients of the logits and of the inputs are rounded to the 8 bits of bfloat16.
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_allclose(gradient.astype(jnp.float32), expected_gradient, rtol=2e-2, atol=2e-2)


def test_large_logits_stay_finite(slice_width):
    # exp of such logits is infinite; their largest takes all the probability.
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11)
    hidden = hidden * np.float32(1e4)
    (_, result), gradients = value_and_gradients(token_logprobs)(hidden, unembedding, ids, np.float32(1))
    logits = hidden @ unembedding.T
    chosen = np.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    assert_allclose(result.logprobs, chosen - logits.max(axis=-1), rtol=1e-5, atol=1e-2)
    assert_allclose(result.entropy, np.zeros(ids.shape), atol=1e-2)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@pytest.mark.parametrize(
    ("hidden", "unembedding", "ids"),
    [
        ((2, 6, 3), (11, 4), (2, 6)),  # features differ
        ((2, 6, 3), (3, 11), (2, 6)),  # transposed
        ((2, 6, 3), (11, 3, 1), (2, 6)),
        ((2, 6, 3), (11, 3), (2, 5)),
        ((2, 6, 3), (11, 3), (6, 2)),
        ((2, 6, 3), (11, 3), (2, 6, 3)),
        ((2, 6, 5, 3), (11, 3), (2, 6)),  # an axis too many before the features
    ],
)
def test_wrong_shapes_are_refused(hidden, unembedding, ids):
    with pytest.raises(AssertionError):
        jax.eval_shape(token_logprobs, jnp.zeros(hidden), jnp.zeros(unembedding), jnp.zeros(ids, jnp.int32))


# --- masked tokens ---


def test_masked_tokens_are_physically_removed(slice_width):
    slice_width(4)
    hidden, unembedding, ids = random_arguments(11)
    mask = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]], bool)
    ids = np.where(mask, ids, 11**5)  # no id of the vocabulary: unspecified, but of no effect

    def loss(hidden, unembedding, ids, mask):
        outputs = token_logprobs(hidden, unembedding, ids)
        return jnp.sum(jnp.where(mask, outputs.logprobs - outputs.entropy, 0))

    function = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (d_hidden, d_unembedding) = function(hidden, unembedding, ids, mask)
    expected, (d_kept, d_expected) = function(hidden[mask], unembedding, ids[mask], mask[mask])
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(np.asarray(d_hidden)[mask], d_kept, rtol=1e-5, atol=1e-6)
    assert_array_equal(np.asarray(d_hidden)[~mask], np.zeros((6, FEATURES)))
    assert_allclose(d_unembedding, d_expected, rtol=1e-5, atol=1e-6)


# --- many devices ---


def loss_of_shard(hidden, unembedding, ids, temperature):
    outputs = token_logprobs(hidden, unembedding, ids, temperature=temperature)
    return jnp.sum(outputs.logprobs * outputs.entropy)


def arguments_of_eight():
    hidden, unembedding, ids = random_arguments(11, (16, WIDTH))
    return hidden, unembedding, ids, np.linspace(0.5, 2, 16, dtype=np.float32)[:, None]


@KEPT
def test_gradient_inside_shard_map(slice_width, keeps):
    # With the default check_vma, autodiff has summed the gradient of the replicated matrix already.
    slice_width(4, keeps)
    arguments = arguments_of_eight()
    rows, whole = PartitionSpec("data"), PartitionSpec()
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def value_and_gradients(*arguments):
        value, gradients = jax.value_and_grad(loss_of_shard, (0, 1, 3))(*arguments)
        return jax.lax.psum(value, "data"), gradients

    sharded = jax.shard_map(
        value_and_gradients,
        mesh=mesh,
        in_specs=(rows, whole, rows, rows),
        out_specs=(whole, (rows, whole, rows)),
    )
    expected = jax.jit(jax.value_and_grad(loss_of_shard, (0, 1, 3)))(*arguments)
    assert_trees_close(jax.jit(sharded)(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_gradient_through_shard_map(slice_width):
    slice_width(4)
    arguments = arguments_of_eight()
    rows, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        lambda *shard: jax.lax.psum(loss_of_shard(*shard), "data"),
        mesh=Mesh(np.array(jax.devices()), ("data",)),
        in_specs=(rows, whole, rows, rows),
        out_specs=whole,
    )
    expected = jax.jit(jax.value_and_grad(loss_of_shard, (0, 1, 3)))(*arguments)
    result = jax.jit(jax.value_and_grad(sharded, (0, 1, 3)))(*arguments)
    assert_trees_close(result, expected, rtol=1e-4, atol=1e-5)


def test_gradient_under_pmap_with_one_sum(slice_width):
    slice_width(4)
    hidden, unembedding, ids, temperature = arguments_of_eight()

    def summed(unembedding, hidden, ids, temperature):
        loss, gradient = jax.value_and_grad(loss_of_shard, 1)(hidden, unembedding, ids, temperature)
        return jax.lax.psum((loss, gradient), "data")

    mapped = jax.pmap(summed, axis_name="data", in_axes=(None, 0, 0, 0), out_axes=None)
    shards = (x.reshape(8, 2, *x.shape[1:]) for x in (hidden, ids, temperature))
    expected = jax.jit(jax.value_and_grad(loss_of_shard, 1))(hidden, unembedding, ids, temperature)
    assert_trees_close(mapped(unembedding, *shards), expected, rtol=1e-4, atol=1e-5)


# --- memory ---


def value_and_gradients_of_shapes(tokens, vocabulary, features):
    """The function of a training step, and arguments for it that hold no memory."""

    def loss(hidden, unembedding, ids):
        outputs = token_logprobs(hidden, unembedding, ids)
        return jnp.sum(outputs.logprobs) + jnp.sum(outputs.entropy)

    shapes = (
        jax.ShapeDtypeStruct((*tokens, features), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, features), jnp.float32),
        jax.ShapeDtypeStruct(tokens, jnp.int32),
    )
    return jax.value_and_grad(loss, (0, 1)), shapes


def all_shapes(jaxpr):
    """Shapes of all arrays of a computation, those of loops and calls within it included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in (*equation.invars, *equation.outvars))
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):  # jax.extend has this from 0.10 on alone
                yield from all_shapes(inner)


def test_no_array_is_as_large_as_the_logits():
    tokens, vocabulary = (4, 512), 2**15 + 1
    function, shapes = value_and_gradients_of_shapes(tokens, vocabulary, features=8)
    found = set(all_shapes(jax.make_jaxpr(function)(*shapes).jaxpr))
    assert (2048, 255) in found  # a slice: the walk has reached the inside of the loops
    assert max(np.prod(shape) for shape in found) <= np.prod(tokens) * vocabulary / 8


def test_memory_of_a_large_vocabulary():
    # The logits alone would be 8 · 512 · 151,936 · 4 bytes = 2,374 MiB.
    function, shapes = value_and_gradients_of_shapes((8, 512), 151_936, features=512)
    memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 200 * 2**20


# --- the divergence from a reference, over the whole vocabulary ---

DIRECTIONS = pytest.mark.parametrize("reverse", [False, True])
# Of the second look at both: one direction has the other's terms exchanged.
ONE_DIRECTION = pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])


def kl_arguments(vocabulary, shape=(ROWS, WIDTH), dtype=np.float32):
    """hidden and unembedding of the policy, and of a reference of another width."""
    rng = np.random.default_rng(vocabulary)
    hidden, unembedding, _ = random_arguments(vocabulary, shape, dtype)
    ref_hidden = rng.normal(size=(*shape, FEATURES - 1)).astype(dtype)
    return hidden, unembedding, ref_hidden, rng.normal(size=(vocabulary, FEATURES - 1)).astype(dtype)


def dense_kl(hidden, unembedding, ref_hidden, ref_unembedding, *, temperature=1.0, reverse=False):
    """What the function replaces: all logits at once."""
    scale = jnp.broadcast_to(1 / jnp.asarray(temperature), hidden.shape[:-1])[..., None]
    reference = jax.lax.stop_gradient((ref_hidden, ref_unembedding))
    return kl_full(hidden @ unembedding.T * scale, reference[0] @ reference[1].T * scale, reverse=reverse)


def kl_and_gradients(function, reverse=False):
    """A weighted sum of the divergences of tokens, themselves, and the gradients in all arguments."""

    def weighted(*arguments):
        *arrays, temperature = arguments
        result = function(*arrays, temperature=temperature, reverse=reverse)
        return jnp.sum(jnp.linspace(-1, 2, result.size).reshape(result.shape) * result), result

    return jax.jit(jax.value_and_grad(weighted, range(5), has_aux=True))


def test_kl_by_hand():
    # The seed's two models of the weather, A (0.7, 0.2, 0.1) and B (0.6, 0.3, 0.1). KL(B ‖ A) = 0.6 log 6/7 +
    # 0.3 log 3/2 = −0.09249 + 0.12164 = 0.02915; the seed adds up rounded terms, −0.092 + 0.122 = 0.030.
    # KL(A ‖ B) = 0.7 log 7/6 + 0.2 log 2/3 = 0.1079 − 0.0811 = 0.0268.
    one, a, b = np.ones((1, 1), np.float32), *np.log(np.float32([[[0.7], [0.2], [0.1]], [[0.6], [0.3], [0.1]]]))
    kl = jax.jit(token_kl, static_argnames="reverse")
    assert_allclose(kl(one, b, one, a), [0.02915], atol=5e-5)
    assert_allclose(kl(one, a, one, b, reverse=True), [0.02915], atol=5e-5)
    assert_allclose(kl(one, a, one, b), [0.0268], atol=5e-5)
    # τ = ½ squares the odds: (1/2, 1/2) stays, (1/4, 3/4) becomes (1/10, 9/10). ½ log 5 + ½ log 5/9 = 0.5108.
    even, uneven = np.zeros((2, 1), np.float32), np.log(np.float32([[1], [3]]))
    assert_allclose(kl(one, even, one, uneven, temperature=0.5), [0.5108], atol=5e-5)


@DIRECTIONS
def test_kl_equals_a_plain_loop(slice_width, reverse):
    slice_width(4)
    hidden, unembedding, ref_hidden, ref_unembedding = arguments = kl_arguments(11)
    expected = np.zeros((ROWS, WIDTH))
    for index in np.ndindex(ROWS, WIDTH):
        p = np.exp(unembedding.astype(float) @ hidden[index] / 0.7)
        q = np.exp(ref_unembedding.astype(float) @ ref_hidden[index] / 0.7)
        p, q = (q / q.sum(), p / p.sum()) if reverse else (p / p.sum(), q / q.sum())
        expected[index] = sum(p[v] * (np.log(p[v]) - np.log(q[v])) for v in range(11))
    result = jax.jit(partial(token_kl, temperature=0.7, reverse=reverse))(*arguments)
    assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@DIRECTIONS
@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
def test_kl_and_its_gradients_equal_the_dense_ones(slice_width, vocabulary, width, reverse):
    slice_width(width)
    temperature = np.array([[0.5], [1.5]], np.float32)  # one a completion
    arguments = *kl_arguments(vocabulary), temperature
    (_, result), gradients = kl_and_gradients(token_kl, reverse)(*arguments)
    (_, expected), expected_gradients = kl_and_gradients(dense_kl, reverse)(*arguments)
    assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    # The temperature's is in the logits of both, those of the reference's parameters are 0.
    assert_trees_close(gradients, expected_gradients, rtol=1e-4, atol=2e-5)
    assert not any(np.any(gradient) for gradient in gradients[2:4])


@ONE_DIRECTION
def test_gradients_of_kl_equal_finite_differences(slice_width, reverse):
    slice_width(3)
    hidden, unembedding, *reference = kl_arguments(7)

    @jax.jit
    def function(hidden, unembedding, temperature):
        return token_kl(hidden, unembedding, *reference, temperature=temperature, reverse=reverse)

    check_grads(function, (hidden, unembedding, np.full((ROWS, 1), 0.8, np.float32)), order=1, modes=["rev"], eps=1e-2)


@ONE_DIRECTION
def test_kl_of_a_model_from_itself_is_zero(slice_width, reverse):
    slice_width(4)
    hidden, unembedding, *_ = kl_arguments(11)
    arguments = hidden, unembedding, hidden, unembedding, np.float32(1)
    (_, result), gradients = kl_and_gradients(token_kl, reverse)(*arguments)
    assert_allclose(result, np.zeros((ROWS, WIDTH)), atol=1e-6)
    assert np.min(result) >= 0
    assert_trees_close(gradients, jax.tree.map(np.zeros_like, gradients), atol=2e-6)


@pytest.mark.slow
def test_kl_under_jit_vmap_and_of_one_token(slice_width):
    slice_width(4)
    arguments, temperatures = kl_arguments(11), np.array([0.5, 2.0], np.float32)
    function = kl_and_gradients(token_kl)
    (value, result), gradients = function(*arguments, temperatures[0])
    eager = function.__wrapped__(*map(jnp.asarray, arguments), temperatures[0])
    assert_trees_close(((value, result), gradients), eager, rtol=1e-5, atol=1e-5)
    mapped = jax.vmap(function, (None, None, None, None, 0))(*arguments, temperatures)
    assert_trees_close(jax.tree.map(lambda x: x[0], mapped), eager, rtol=1e-5, atol=1e-5)
    by_row = jax.jit(jax.vmap(partial(token_kl, temperature=0.5), (0, None, 0, None)))(*arguments)
    assert_allclose(by_row, result, rtol=1e-5, atol=1e-6)
    hidden, unembedding, ref_hidden, ref_unembedding = arguments
    alone = token_kl(hidden[1, 2], unembedding, ref_hidden[1, 2], ref_unembedding, temperature=0.5)
    assert_allclose(alone, result[1, 2], rtol=1e-5, atol=1e-6)


def test_kl_of_bfloat16(slice_width):
    slice_width(4)
    arguments = kl_arguments(11, dtype=jnp.bfloat16)
    (_, result), gradients = kl_and_gradients(token_kl)(*arguments, np.float32(0.7))
    exact = (x.astype(np.float32) for x in arguments)
    (_, expected), expected_gradients = kl_and_gradients(dense_kl)(*exact, np.float32(0.7))
    assert result.dtype == jnp.float32
    assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16] * 4 + [jnp.float32]
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_allclose(gradient.astype(jnp.float32), expected_gradient, rtol=2e-2, atol=3e-2)


@ONE_DIRECTION
def test_kl_of_large_logits_stays_finite(slice_width, reverse):
    # One token has all the probability, and another under the reference: the divergence is the gap in the logits.
    slice_width(4)
    hidden, unembedding, ref_hidden, ref_unembedding = kl_arguments(11)
    arguments = hidden * np.float32(1e4), unembedding, ref_hidden * np.float32(1e4), ref_unembedding
    (_, result), gradients = kl_and_gradients(token_kl, reverse)(*arguments, np.float32(1))
    logits, ref_logits = arguments[0] @ unembedding.T, arguments[2] @ ref_unembedding.T
    first, second = (ref_logits, logits) if reverse else (logits, ref_logits)
    chosen = np.take_along_axis(second, first.argmax(-1)[..., None], axis=-1)[..., 0]
    assert_allclose(result, second.max(-1) - chosen, rtol=1e-4, atol=1e-2)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 6, 3), (11, 4), (2, 6, 3), (11, 3)],  # features differ
        [(2, 6, 3), (11, 3), (2, 6, 3), (11, 2)],
        [(2, 6, 3), (11, 3), (2, 5, 3), (11, 3)],  # other tokens
        [(2, 6, 3), (11, 3), (2, 6, 3), (12, 3)],  # another vocabulary
    ],
)
def test_wrong_shapes_of_kl_are_refused(shapes):
    with pytest.raises(AssertionError):
        jax.eval_shape(token_kl, *map(jnp.zeros, shapes))


def test_masked_tokens_of_kl_are_physically_removed(slice_width):
    slice_width(4)
    hidden, unembedding, ref_hidden, ref_unembedding = kl_arguments(11)
    mask = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]], bool)

    def loss(hidden, unembedding, ref_hidden, mask):
        return jnp.sum(jnp.where(mask, token_kl(hidden, unembedding, ref_hidden, ref_unembedding), 0))

    function = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (d_hidden, d_unembedding) = function(hidden, unembedding, ref_hidden, mask)
    expected, (d_kept, d_expected) = function(hidden[mask], unembedding, ref_hidden[mask], mask[mask])
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(np.asarray(d_hidden)[mask], d_kept, rtol=1e-5, atol=1e-6)
    assert not np.any(np.asarray(d_hidden)[~mask])
    assert_allclose(d_unembedding, d_expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, "of rows"])
def test_gradient_of_kl_inside_shard_map(slice_width, temperature):
    # Matrices, and a temperature that is one number, are the same on all devices, hidden states are not.
    slice_width(4)
    hidden, unembedding, ref_hidden, ref_unembedding = kl_arguments(11, (16, WIDTH))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    is_number = temperature == 1.0
    temperature = np.float32(1) if is_number else np.linspace(0.5, 2, 16, dtype=np.float32)[:, None]

    def value_and_gradients(hidden, ref_hidden, unembedding, ref_unembedding, temperature):
        def loss(hidden, unembedding, temperature):
            return jnp.sum(token_kl(hidden, unembedding, ref_hidden, ref_unembedding, temperature=temperature) ** 2)

        return jax.value_and_grad(loss, (0, 1, 2))(hidden, unembedding, temperature)

    def shard(*arguments):
        value, gradients = value_and_gradients(*arguments)
        return jax.lax.psum(value, "data"), gradients

    of_temperature = whole if is_number else rows
    sharded = jax.shard_map(
        shard,
        mesh=Mesh(np.array(jax.devices()), ("data",)),
        in_specs=(rows, rows, whole, whole, of_temperature),
        out_specs=(whole, (rows, whole, of_temperature)),
    )
    arguments = hidden, ref_hidden, unembedding, ref_unembedding, temperature
    expected = jax.jit(value_and_gradients)(*arguments)
    assert_trees_close(jax.jit(sharded)(*arguments), expected, rtol=1e-4, atol=1e-4)


def kl_of_shapes(tokens, vocabulary, features):
    def loss(*arguments):
        return jnp.sum(token_kl(*arguments))

    hidden = jax.ShapeDtypeStruct((*tokens, features), jnp.float32)
    unembedding = jax.ShapeDtypeStruct((vocabulary, features), jnp.float32)
    return jax.value_and_grad(loss, (0, 1)), (hidden, unembedding, hidden, unembedding)


def test_no_array_of_kl_is_as_large_as_the_logits():
    tokens, vocabulary = (4, 512), 2**15 + 1
    function, shapes = kl_of_shapes(tokens, vocabulary, features=8)
    found = set(all_shapes(jax.make_jaxpr(function)(*shapes).jaxpr))
    assert (2048, 255) in found
    assert max(np.prod(shape) for shape in found) <= np.prod(tokens) * vocabulary / 8


def test_kl_of_a_large_vocabulary_takes_no_memory_and_no_needless_pass():
    # Either matrix of logits would be 2,374 MiB.
    function, shapes = kl_of_shapes((8, 512), 151_936, features=512)
    compiled = jax.jit(function).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 300 * 2**20
    # The temperature's gradient, which nobody asked for, would be a third loop.
    assert compiled.as_text().count(" while(") == 2


# ---- capped logits


def dense_logits(hidden, unembedding, temperature, softcap):
    return softcap * jnp.tanh(hidden @ unembedding.T / softcap) / temperature


def of_both(logprobs_of, kl_of):
    """A weighted sum of log-probabilities, entropies and divergences, and its gradients in all arguments."""

    def weighted(hidden, unembedding, temperature, softcap):
        logprobs, entropy = logprobs_of(hidden, unembedding, temperature, softcap)
        both = [kl_of(hidden, unembedding, temperature, softcap, reverse) for reverse in (False, True)]
        weights = jnp.linspace(-1, 2, logprobs.size).reshape(logprobs.shape)
        return jnp.sum(weights * (logprobs - 0.3 * entropy + both[0] - 2 * both[1])), (logprobs, entropy, *both)

    return jax.jit(jax.value_and_grad(weighted, (0, 1, 2, 3), has_aux=True))


@pytest.mark.parametrize(
    ("softcap", "keeps"),
    [
        (0.5, False),
        (1e4, True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(0.5, True), (2.0, False), (2.0, True), (1e4, False)]),
    ],
)
def test_capped_logits_have_the_values_and_gradients_of_the_dense_ones(slice_width, softcap, keeps):
    slice_width(4, keeps)
    hidden, unembedding, ref_hidden, ref_unembedding = kl_arguments(11)
    ids = np.random.default_rng(3).integers(0, 11, hidden.shape[:-1])

    def logprobs_of(hidden, unembedding, temperature, softcap):
        return token_logprobs(hidden, unembedding, ids, temperature=temperature, softcap=softcap)

    def kl_of(hidden, unembedding, temperature, softcap, reverse):
        caps = {"softcap": softcap, "ref_softcap": 1.5}
        return token_kl(
            hidden, unembedding, ref_hidden, ref_unembedding, temperature=temperature, reverse=reverse, **caps
        )

    def dense_logprobs_of(*arguments):
        logprobs = jax.nn.log_softmax(dense_logits(*arguments))
        chosen = jnp.take_along_axis(logprobs, ids[..., None], axis=-1)[..., 0]
        return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)

    def dense_kl_of(hidden, unembedding, temperature, softcap, reverse):
        ref_logits = dense_logits(ref_hidden, ref_unembedding, temperature, 1.5)
        return kl_full(dense_logits(hidden, unembedding, temperature, softcap), ref_logits, reverse=reverse)

    arguments = hidden, unembedding, np.array([[[0.5]], [[1.5]]], np.float32)[..., 0], np.float32(softcap)
    found = of_both(logprobs_of, kl_of)(*arguments)
    dense = arguments[0], arguments[1], arguments[2][..., None], arguments[3]
    expected = of_both(dense_logprobs_of, dense_kl_of)(*dense)
    assert_trees_close(found[0], expected[0], rtol=1e-4, atol=2e-5)
    reshaped = (*expected[1][:2], expected[1][2][..., 0], expected[1][3])
    assert_trees_close(found[1], reshaped, rtol=1e-3, atol=1e-4)


def test_a_cap_by_hand():
    # c·tanh(z/c) of z = (0, 2) with c = 1: (0, tanh 2 = .9640); p = e^.964 / (1 + e^.964) = 2.6222 / 3.6222 = .7239.
    logprobs, _ = token_logprobs(jnp.ones((2, 1)), jnp.array([[0.0], [2.0]]), jnp.array([0, 1]), softcap=1.0)
    assert_allclose(np.exp(logprobs), [0.2761, 0.7239], atol=5e-5)
