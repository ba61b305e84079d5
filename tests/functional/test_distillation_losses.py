"""Divergences of a student from its teacher: of logits, from hidden states, and truncated to a few tokens."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from jax.test_util import check_grads
from numpy.testing import assert_allclose, assert_array_equal

from grpo_jax.functional import (
    bucket_logits,
    jsd_full,
    kl_full,
    teacher_advantages,
    token_jsd,
    top_tokens,
)

ROWS, WIDTH, FEATURES = 2, 6, 3
# As in test_logprobs: with and without an overlap.
SLICINGS = [(21, 5), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(5, 128), (8, 4), (11, 4), (7, 1)])]


@pytest.fixture
def slice_width(assume):
    """Sets how many columns of the vocabulary are computed at a time."""

    def set_width(width):
        assume(slice_elements=1, min_slice_width=width)

    return set_width


def random_models(vocabulary, shape=(ROWS, WIDTH), dtype=np.float32):
    """hidden and unembedding of a student, and of a teacher of another width."""
    rng = np.random.default_rng(vocabulary)
    sizes = [(*shape, FEATURES), (vocabulary, FEATURES), (*shape, FEATURES + 1), (vocabulary, FEATURES + 1)]
    return tuple(rng.normal(size=size).astype(dtype) for size in sizes)


def random_ids(vocabulary, k, shape=(ROWS, WIDTH)):
    """k different tokens at each place."""
    rng = np.random.default_rng(k)
    return np.stack([rng.permutation(vocabulary)[:k] for _ in range(int(np.prod(shape)))]).reshape(*shape, k)


def scaled(hidden, unembedding, temperature):
    return hidden @ unembedding.T / jnp.broadcast_to(temperature, hidden.shape[:-1])[..., None]


def dense_jsd(hidden, unembedding, teacher_hidden, teacher_unembedding, *, beta=0.5, temperature=1.0):
    """What `token_jsd` replaces: all logits at once."""
    teacher = jax.lax.stop_gradient((teacher_hidden, teacher_unembedding))
    return jsd_full(scaled(hidden, unembedding, temperature), scaled(*teacher, temperature), beta=beta)


def dense_buckets(hidden, unembedding, ids, *, temperature=1.0):
    """What `bucket_logits` replaces."""
    logits = scaled(hidden, unembedding, temperature)
    is_chosen = jax.nn.one_hot(ids, unembedding.shape[0], dtype=jnp.float32).sum(-2) > 0
    others = jax.nn.logsumexp(jnp.where(is_chosen, -jnp.inf, logits), axis=-1, keepdims=True)
    return jnp.concatenate([jnp.take_along_axis(logits, ids, axis=-1), others], axis=-1)


def weighted(function):
    """A sum in which every number of the result has its own weight; with the result."""

    def loss(*arguments):
        result = function(*arguments)
        return jnp.sum(jnp.linspace(-1, 2, result.size, dtype=result.dtype).reshape(result.shape) * result), result

    return loss


def assert_trees_close(result, expected, **tolerance):
    jax.tree.map(partial(assert_allclose, **tolerance), result, expected)


# --- numbers derived by hand ---


def test_jsd_by_hand():
    # π_T = (1/2, 1/2), π = (1/4, 3/4), β = 1/2: M = (3/8, 5/8). KL(π_T ‖ M) = ½ log 4/3 + ½ log 4/5 = 0.1438 − 0.1116 =
    # 0.0323; KL(π ‖ M) = ¼ log 2/3 + ¾ log 6/5 = −0.1014 + 0.1367 = 0.0354. Their mean is 0.0338.
    student, teacher = np.log(np.float32([0.25, 0.75])), np.log(np.float32([0.5, 0.5]))
    of_logits, of_states = jax.jit(jsd_full), jax.jit(token_jsd)
    assert_allclose(of_logits(student, teacher), 0.0338, atol=5e-5)
    # β = 1/4: M = (5/16, 11/16). ¼ (½ log 8/5 + ½ log 8/11) + ¾ (¼ log 4/5 + ¾ log 12/11) = 0.0190 + 0.0071.
    assert_allclose(of_logits(student, teacher, beta=0.25), 0.0260, atol=5e-5)
    one = np.ones((1, 1), np.float32)
    hidden = one, student[:, None], one, teacher[:, None]
    assert_allclose(of_states(*hidden), [0.0338], atol=5e-5)
    assert_allclose(of_states(*hidden, beta=0.25), [0.0260], atol=5e-5)


def test_buckets_by_hand():
    # Of the weights 5, 2, 3, 6 the second and the fourth are chosen: 2, 6, and 5 + 3.
    one, weights = np.ones((1, 1), np.float32), np.float32([[5], [2], [3], [6]])
    buckets, arguments = jax.jit(bucket_logits), (one, np.log(weights), np.int32([[1, 3]]))
    assert_allclose(np.exp(buckets(*arguments)), [[2, 6, 8]], rtol=1e-5)
    # τ = ½ squares them: 4, 36, and 25 + 9.
    assert_allclose(np.exp(buckets(*arguments, temperature=0.5)), [[4, 36, 34]], rtol=1e-5)
    assert_array_equal(jax.jit(top_tokens, static_argnums=2)(one, weights, 3), [[3, 0, 2]])


def test_teacher_advantages_by_hand():
    # The teacher finds the first token e^½ times less likely than the policy, and the second more.
    found = teacher_advantages(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -0.5]))
    assert_allclose(found, [-0.5, 1.5])
    gradients = jax.grad(lambda *x: jnp.sum(teacher_advantages(*x)), (0, 1))(jnp.ones(3), jnp.zeros(3))
    assert_array_equal(gradients, np.zeros((2, 3)))


# --- a plain loop, and all logits at once ---


def loop_jsd(student, teacher, beta):
    p, q = np.exp(teacher) / np.exp(teacher).sum(), np.exp(student) / np.exp(student).sum()
    total = 0.0
    for v in range(len(p)):
        m = beta * p[v] + (1 - beta) * q[v]
        total += beta * p[v] * np.log(p[v] / m) + (1 - beta) * q[v] * np.log(q[v] / m)
    return total


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_equals_a_plain_loop(slice_width, beta):
    slice_width(4)
    models = random_models(11)
    logits = [np.asarray(scaled(*pair, 0.7), float).reshape(-1, 11) for pair in (models[:2], models[2:])]
    expected = np.reshape([loop_jsd(*pair, beta) for pair in zip(*logits, strict=True)], (ROWS, WIDTH))
    assert_allclose(jax.jit(partial(token_jsd, beta=beta, temperature=0.7))(*models), expected, rtol=1e-4, atol=1e-6)
    assert_allclose(jsd_full(*map(jnp.float32, logits), beta=beta).reshape(ROWS, WIDTH), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
def test_jsd_and_its_gradients_equal_the_dense_ones(slice_width, vocabulary, width):
    slice_width(width)
    arguments = *random_models(vocabulary), np.array([[0.5], [1.5]], np.float32), np.float32(0.3)

    def both(function):
        def loss(*arguments):
            *arrays, temperature, beta = arguments
            return weighted(partial(function, temperature=temperature, beta=beta))(*arrays)

        return jax.jit(jax.value_and_grad(loss, range(6), has_aux=True))(*arguments)

    ((_, result), gradients), ((_, expected), expected_gradients) = both(token_jsd), both(dense_jsd)
    assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert_trees_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)
    assert not any(np.any(gradient) for gradient in gradients[2:4])


@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
@pytest.mark.parametrize("k", [1, 3])
def test_buckets_and_their_gradients_equal_the_dense_ones(slice_width, vocabulary, width, k):
    slice_width(width)
    ids = random_ids(vocabulary, k)
    arguments = *random_models(vocabulary)[:2], np.array([[0.5], [1.5]], np.float32)

    def both(function):
        loss = weighted(lambda hidden, matrix, temperature: function(hidden, matrix, ids, temperature=temperature))
        return jax.jit(jax.value_and_grad(loss, range(3), has_aux=True))(*arguments)

    ((_, result), gradients), ((_, expected), expected_gradients) = both(bucket_logits), both(dense_buckets)
    assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert_trees_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("vocabulary", "width"), SLICINGS)
def test_top_tokens_are_those_of_all_logits(slice_width, vocabulary, width):
    slice_width(width)
    hidden, unembedding, *_ = random_models(vocabulary)
    for k in (1, 3, vocabulary):
        expected = np.argsort(-(hidden @ unembedding.T), axis=-1)[..., :k]
        assert_array_equal(jax.jit(partial(top_tokens, k=k))(hidden, unembedding), expected)


def test_gradients_equal_finite_differences(slice_width):
    slice_width(3)
    hidden, unembedding, *teacher = random_models(7)
    ids, temperature = random_ids(7, 2), np.full((ROWS, 1), 0.8, np.float32)
    check = partial(check_grads, order=1, modes=["rev"], eps=1e-2)
    check(
        jax.jit(lambda h, u, t, b: token_jsd(h, u, *teacher, temperature=t, beta=b)),
        (hidden, unembedding, temperature, np.float32(0.4)),
    )
    check(jax.jit(lambda h, u, t: bucket_logits(h, u, ids, temperature=t)), (hidden, unembedding, temperature))
    logits = scaled(hidden, unembedding, 1.0), scaled(*teacher, 1.0)
    check(jax.jit(lambda *x: jsd_full(*x[:2], beta=x[2])), (*logits, np.float32(0.4)))


# --- relations ---


def test_divided_by_its_weight_the_jsd_tends_to_either_kl():
    models = random_models(11)
    student, teacher = scaled(*models[:2], 5.0), scaled(*models[2:], 5.0)  # not far apart
    with jax.enable_x64(True):
        logits = jnp.asarray(student, jnp.float64), jnp.asarray(teacher, jnp.float64)
        assert_allclose(jsd_full(*logits, beta=1e-6) / 1e-6, kl_full(*logits, reverse=True), rtol=1e-4)
        assert_allclose(jsd_full(*logits, beta=1 - 1e-6) / 1e-6, kl_full(*logits), rtol=1e-4)


@pytest.mark.parametrize(
    "divergence",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in (kl_full, partial(kl_full, reverse=True))), jsd_full],
)
def test_a_truncated_divergence_grows_with_its_tokens_up_to_that_of_all(slice_width, divergence):
    slice_width(4)
    hidden, unembedding, teacher_hidden, teacher_unembedding = random_models(11)

    @jax.jit
    def both(hidden, teacher_hidden):
        pairs = []
        for k in (1, 3, 10, 11):
            ids = top_tokens(teacher_hidden, teacher_unembedding, k)
            pairs.append(
                (bucket_logits(hidden, unembedding, ids), bucket_logits(teacher_hidden, teacher_unembedding, ids))
            )
        whole = scaled(hidden, unembedding, 1.0), scaled(teacher_hidden, teacher_unembedding, 1.0)
        return jnp.stack([divergence(*pair) for pair in pairs]), divergence(*whole)

    found, whole = both(hidden, teacher_hidden)
    assert np.all(np.diff(found, axis=0) >= -1e-6)
    assert np.all(found[0] < whole)
    assert_allclose(found[-2:], [whole, whole], rtol=1e-4, atol=1e-6)


def test_expected_gradient_of_teacher_advantages_is_that_of_the_reverse_kl():
    # By enumeration of a vocabulary: E_π[−A ∇ log π] = ∇ KL(π ‖ π_T).
    rng = np.random.default_rng(0)
    student, teacher = (jnp.asarray(rng.normal(size=7), jnp.float32) for _ in range(2))

    def surrogate(logits):
        log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
        return -jnp.sum(jax.lax.stop_gradient(jnp.exp(log_q)) * teacher_advantages(log_q, log_p) * log_q)

    assert_allclose(jax.grad(surrogate)(student), jax.grad(kl_full)(student, teacher), atol=1e-6)


def test_of_a_student_that_is_its_teacher(slice_width):
    slice_width(4)
    hidden, unembedding, *_ = random_models(11)
    loss = weighted(lambda h, u: token_jsd(h, u, hidden, unembedding))
    (_, result), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, unembedding)
    assert_allclose(result, np.zeros((ROWS, WIDTH)), atol=1e-6)
    assert np.min(result) >= 0
    assert_trees_close(gradients, jax.tree.map(np.zeros_like, gradients), atol=2e-6)


def test_excluded_by_both_is_removed():
    rng = np.random.default_rng(0)
    student, teacher = (rng.normal(size=5).astype(np.float32) for _ in range(2))
    excluded = np.array([False, True, False, False, True])

    def of_all(*logits):
        return jsd_full(*(jnp.where(excluded, -jnp.inf, x) for x in logits))

    value, gradients = jax.jit(jax.value_and_grad(of_all, (0, 1)))(student, teacher)
    kept = student[~excluded], teacher[~excluded]
    expected, expected_gradients = jax.jit(jax.value_and_grad(jsd_full, (0, 1)))(*kept)
    assert_allclose(value, expected, rtol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_allclose(np.asarray(gradient)[~excluded], expected_gradient, atol=1e-6)
        assert_array_equal(np.asarray(gradient)[excluded], np.zeros(2))
    # Excluded by one side alone it is finite, where a KL is not.
    one_side, function = (np.float32([0, 0, -np.inf]), np.zeros(3, np.float32)), jax.jit(jax.value_and_grad(jsd_full))
    assert all(np.isfinite(function(*pair)[0]) for pair in (one_side, one_side[::-1]))
    assert np.all(np.isfinite(function(*one_side)[1]))


def test_masked_tokens_are_physically_removed(slice_width):
    slice_width(4)
    hidden, unembedding, teacher_hidden, teacher_unembedding = random_models(11)
    mask = np.array([[1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]], bool)

    def loss(hidden, unembedding, teacher_hidden, mask):
        ids = top_tokens(teacher_hidden, teacher_unembedding, 3)
        truncated = kl_full(
            bucket_logits(hidden, unembedding, ids), bucket_logits(teacher_hidden, teacher_unembedding, ids)
        )
        total = truncated + token_jsd(hidden, unembedding, teacher_hidden, teacher_unembedding)
        return jnp.sum(jnp.where(mask, total, 0))

    function = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (d_hidden, d_unembedding) = function(hidden, unembedding, teacher_hidden, mask)
    expected, (d_kept, d_expected) = function(hidden[mask], unembedding, teacher_hidden[mask], mask[mask])
    assert_allclose(value, expected, rtol=1e-5)
    assert_allclose(np.asarray(d_hidden)[mask], d_kept, rtol=1e-4, atol=1e-6)
    assert not np.any(np.asarray(d_hidden)[~mask])
    assert_allclose(d_unembedding, d_expected, rtol=1e-4, atol=1e-6)


# --- transformations, dtypes, devices, refusals ---


def test_capped_logits(slice_width):
    """As Gemma 2 has them: c·tanh(z / c), each model its own c, before the temperature."""
    slice_width(4)
    models, ids = random_models(11), random_ids(11, 3)

    def capped(hidden, unembedding, c):
        return c * jnp.tanh(hidden @ unembedding.T / c) / 0.7

    @jax.jit
    def of_the_functions(models):
        buckets = bucket_logits(*models[:2], ids, temperature=0.7, softcap=1.5)
        found = token_jsd(*models, temperature=0.7, softcap=1.5, ref_softcap=2.0)
        return found, buckets[..., :-1], jax.nn.logsumexp(buckets, axis=-1)

    @jax.jit
    def of_all_logits(models):
        logits, of_teacher = capped(*models[:2], 1.5), capped(*models[2:], 2.0)
        chosen = jnp.take_along_axis(logits, ids, axis=-1)
        return jsd_full(logits, of_teacher), chosen, jax.nn.logsumexp(logits, axis=-1)

    (found, buckets, whole), (jsd, chosen, all_logits) = of_the_functions(models), of_all_logits(models)
    assert_allclose(found, jsd, rtol=1e-4, atol=1e-6)
    assert_allclose(buckets, chosen, rtol=1e-4, atol=1e-5)
    assert_allclose(whole, all_logits, rtol=1e-5)


@pytest.mark.slow
def test_under_jit_and_vmap(slice_width):
    slice_width(4)
    models, ids, betas = random_models(11), random_ids(11, 3), np.array([0.2, 0.7], np.float32)
    eager = [token_jsd(*map(jnp.asarray, models), beta=beta) for beta in betas]
    mapped = jax.jit(jax.vmap(lambda beta: token_jsd(*models, beta=beta)))(betas)
    assert_allclose(mapped, eager, rtol=1e-5, atol=1e-6)
    assert_allclose(jax.vmap(jsd_full)(*[scaled(*models[i : i + 2], 1.0) for i in (0, 2)]).shape, (ROWS, WIDTH))
    by_row = jax.jit(jax.vmap(bucket_logits, (0, None, 0)))(*models[:2], ids)
    assert_allclose(by_row, bucket_logits(*map(jnp.asarray, models[:2]), jnp.asarray(ids)), rtol=1e-5, atol=1e-6)
    alone = token_jsd(models[0][1, 2], models[1], models[2][1, 2], models[3], beta=betas[0])
    assert_allclose(alone, eager[0][1, 2], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_bfloat16(slice_width):
    slice_width(4)
    models, ids = random_models(11, dtype=jnp.bfloat16), random_ids(11, 3)
    exact = [x.astype(np.float32) for x in models]
    result, buckets = token_jsd(*models), bucket_logits(*models[:2], ids)
    assert result.dtype == buckets.dtype == jnp.float32
    assert_allclose(result, dense_jsd(*exact), rtol=1e-3, atol=1e-4)
    assert_allclose(buckets, dense_buckets(*exact[:2], ids), rtol=1e-3, atol=1e-4)


def test_large_logits_stay_finite(slice_width):
    slice_width(4)
    hidden, unembedding, teacher_hidden, teacher_unembedding = random_models(11)
    arguments = hidden * np.float32(1e4), unembedding, teacher_hidden * np.float32(1e4), teacher_unembedding
    (_, result), gradients = jax.jit(jax.value_and_grad(weighted(token_jsd), (0, 1), has_aux=True))(*arguments)
    assert np.all(result <= np.log(2) + 2e-3)  # the last digit of such a logit is 1e-3
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@pytest.mark.slow
def test_gradients_inside_shard_map(slice_width):
    slice_width(4)
    hidden, unembedding, teacher_hidden, teacher_unembedding = random_models(11, (16, WIDTH))
    rows, whole = PartitionSpec("data"), PartitionSpec()

    def value_and_gradients(hidden, teacher_hidden, unembedding, teacher_unembedding):
        def loss(hidden, unembedding):
            jsd = token_jsd(hidden, unembedding, teacher_hidden, teacher_unembedding)
            ids = top_tokens(teacher_hidden, teacher_unembedding, 3)
            return jnp.sum(jsd**2) + jnp.sum(bucket_logits(hidden, unembedding, ids) ** 2)

        return jax.value_and_grad(loss, (0, 1))(hidden, unembedding)

    def shard(*arguments):
        value, gradients = value_and_gradients(*arguments)
        return jax.lax.psum(value, "data"), gradients

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(rows, rows, whole, whole), out_specs=(whole, (rows, whole)))
    arguments = hidden, teacher_hidden, unembedding, teacher_unembedding
    assert_trees_close(jax.jit(sharded)(*arguments), jax.jit(value_and_gradients)(*arguments), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, float("nan")])
def test_a_beta_outside_of_0_and_1_is_refused(beta):
    with pytest.raises(ValueError, match="between 0 and 1"):
        jsd_full(jnp.zeros(3), jnp.zeros(3), beta=beta)
    with pytest.raises(ValueError, match="between 0 and 1"):
        token_jsd(*map(jnp.asarray, random_models(5)), beta=beta)


@pytest.mark.parametrize("k", [0, 6])
def test_more_tokens_than_there_are_are_refused(k):
    with pytest.raises(ValueError, match=f"k is {k}"):
        top_tokens(*map(jnp.asarray, random_models(5)[:2]), k)


# --- memory ---


def all_shapes(jaxpr):
    """Shapes of all arrays of a computation, those of loops and calls within it included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in (*equation.invars, *equation.outvars))
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                yield from all_shapes(inner)


def of_jsd(*models):
    return jnp.sum(token_jsd(*models))


def of_buckets(hidden, unembedding, *teacher):
    ids = top_tokens(*teacher, 16)
    return jnp.sum(kl_full(bucket_logits(hidden, unembedding, ids), bucket_logits(*teacher, ids)))


@pytest.mark.parametrize("loss", [of_jsd, of_buckets])
def test_no_array_is_as_large_as_the_logits(loss):
    tokens, vocabulary = (4, 512), 2**15 + 1
    hidden = jax.ShapeDtypeStruct((*tokens, 8), jnp.float32)
    unembedding = jax.ShapeDtypeStruct((vocabulary, 8), jnp.float32)
    shapes = hidden, unembedding, hidden, unembedding
    found = set(all_shapes(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(*shapes).jaxpr))
    assert (2048, 255) in found  # a slice: the walk has reached the inside of the loops
    assert max(np.prod(shape) for shape in found) <= np.prod(tokens) * vocabulary / 8


@pytest.mark.slow
@pytest.mark.parametrize("loss", [of_jsd, of_buckets])
def test_memory_of_a_large_vocabulary(loss):
    # Either matrix of logits would be 8 · 512 · 151,936 · 4 bytes = 2,374 MiB.
    hidden = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32)
    unembedding = jax.ShapeDtypeStruct((151_936, 512), jnp.float32)
    function = jax.jit(jax.value_and_grad(loss, (0, 1)))
    memory = function.lower(hidden, unembedding, hidden, unembedding).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 350 * 2**20


# --- what TRL computes: golden/distillation/make.py says how ---

with np.load(Path(__file__).parents[1] / "golden" / "distillation" / "golden.npz") as file:
    GOLDEN = dict(file)
STUDENT, TEACHER = (GOLDEN.pop(f"input.{name}").astype(np.float64) for name in ("student", "teacher"))
DIVERGENCES = {
    "forward_kl": partial(kl_full, reverse=True),
    "jsd_0.1": partial(jsd_full, beta=0.1),
    "jsd_0.5": jsd_full,
    "jsd_0.9": partial(jsd_full, beta=0.9),
    "reverse_kl": kl_full,
}


@pytest.mark.parametrize("kind", ["full", "top"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_and_gradients_of_trl(kind, name):
    def loss(student, teacher):
        logits = student / 0.7, teacher / 0.7
        if kind == "top":  # with the identity for a matrix the hidden states are the logits
            ids = jax.lax.top_k(teacher, 5)[1]
            logits = tuple(dense_buckets(x, jnp.eye(17), ids) for x in logits)
        result = DIVERGENCES[name](*logits)
        return jnp.sum(result), result

    with jax.enable_x64(True):
        (_, values), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(STUDENT, TEACHER)
    assert_allclose(values, GOLDEN[f"{kind}.{name}.values"], rtol=1e-9)
    assert_allclose(gradient, GOLDEN[f"{kind}.{name}.gradient"], rtol=1e-8, atol=1e-10)


def test_every_divergence_of_trl_is_compared():
    names = {
        f"{kind}.{name}.{part}" for kind in ("full", "top") for name in DIVERGENCES for part in ("values", "gradient")
    }
    assert names == set(GOLDEN)
