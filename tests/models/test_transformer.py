"""The decoder against repeated prompts, NumPy loops and itself in other forms."""

from dataclasses import replace
from functools import cache, partial
from typing import get_args

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import decoded_states, load_golden, ragged_prompts, random_params, refused, whole_prompts

from grpo_jax.functional.products import assume_traits
from grpo_jax.models.config import Activation, ExpertsConfig, ModelConfig, RopeScaling, Rotation
from grpo_jax.models.decoder.attention import Softmax, attend, attend_past, attend_rows, rotary_angles, rotate
from grpo_jax.models.decoder.cache import KeyValues, Prefix, cache_keys, group_by_prompt, widen
from grpo_jax.models.decoder.modules import ACTIVATIONS, RMSNorm, norm
from grpo_jax.models.decoder.transformer import (
    Block,
    by_layer,
    compute_rows,
    embed,
    find_repetition,
    layer_params,
    param_shapes,
)
from grpo_jax.models.params.sharding import BATCH
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows import geometry
from grpo_jax.models.rows.geometry import PromptTokens, PromptWidths

LLAMA = ModelConfig(29, 32, 48, 2, 4, 2, 8)
# Every option at once, more than any architecture has: one program to compile instead of one for each.
ALL = replace(
    LLAMA,
    rope_scaling=RopeScaling("llama3", 4.0, 16, 1.0, 4.0),
    rope_local_base_freq=20.0,
    unrotated_layers=(2,),
    num_hidden_layers=3,
    norms="around",
    zero_centered_norms=True,
    embedding_multiplier=3.0,
    hidden_act="gelu_pytorch_tanh",
    query_pre_attn_scalar=5.0,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=1.5,
    tie_word_embeddings=False,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm=True,
    sliding_window=3,
    sliding_layers=(1,),
)
MIXTURE = replace(LLAMA, qk_norm=True, experts=ExpertsConfig(5, 2, 12, norm_topk_prob=True))
# Experts in every other layer behind two dense layers, which are not part of a period.
SPARSE = replace(MIXTURE, num_hidden_layers=6, dense_layers=(0, 1, 3, 5))
NAMES = ["llama", "all options", "experts"]
MOST_OPTIONS = pytest.mark.parametrize(
    "config",
    [pytest.param(LLAMA, marks=pytest.mark.slow), ALL, pytest.param(MIXTURE, marks=pytest.mark.slow)],
    ids=NAMES,
)

PROMPT_LENGTHS, P = (1, 6, 4), 6
N, G, T = len(PROMPT_LENGTHS), 4, 5


# One program in place of one for each operation.
angles_of = jax.jit(rotary_angles, static_argnums=(1, 2))
rows_seen = jax.jit(geometry.geometry_of_rows, static_argnums=0)


def geometry_of(config, ids, mask):
    return geometry.geometry_of_rows(config, geometry.rows_of_prompts(PromptTokens(ids, mask)))


def ragged_batch():
    """Returns prompts of different lengths padded on the left, completions, and their ragged mask."""
    rng = np.random.default_rng(0)
    completions = rng.integers(0, LLAMA.vocab_size, (N, G, T), dtype=np.int32)
    return (
        ragged_prompts(PROMPT_LENGTHS, LLAMA.vocab_size),
        completions,
        np.arange(T) < rng.integers(1, T + 1, (N, G, 1)),
    )


def repeated_hidden(config, params, prompt, completion_ids):
    """`Policy.hidden` the plain way: each completion behind its own copy of the prompt."""
    n, g, t = completion_ids.shape
    width = prompt.width
    ids = jnp.concatenate([jnp.repeat(prompt.ids, g, axis=0), completion_ids.reshape(n * g, t)], axis=-1)
    mask = jnp.concatenate([jnp.repeat(prompt.mask, g, axis=0), jnp.ones((n * g, t), bool)], axis=-1)
    hidden = compute_rows(config, {"params": params}, ids, geometry_of(config, ids, mask))[0]
    return hidden[:, width - 1 : -1].reshape(n, g, t, -1)


def shared_hidden(config, params, *batch):
    return decoder_policy(config).hidden(params, *batch)


def relative_differences(tree, reference):
    """‖difference‖ / ‖reference‖ for each leaf, by its path."""
    differences = jax.tree.map(
        lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), *jax.device_get((tree, reference))
    )
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(differences)}


@cache
def loss_and_grads(hidden_fn, config):
    """Σ of weighted log-probabilities of the tokens that are not masked, the hidden states, and the gradients."""
    *inputs, mask = ragged_batch()
    weights = np.random.default_rng(1).uniform(0.5, 1.5, mask.shape) * mask

    def loss(params):
        hidden = hidden_fn(config, params, *inputs)
        logprobs = jax.nn.log_softmax(hidden @ decoder_policy(config).unembedding(params).T)
        return jnp.sum(weights * jnp.take_along_axis(logprobs, inputs[1][..., None], axis=-1)[..., 0]), hidden

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(random_params(config, 0.1))


# ---- the prompt once, or G times


@MOST_OPTIONS
def test_shared_prompt_equals_repeated_prompt(config):
    (value, hidden), grads = loss_and_grads(shared_hidden, config)
    (expected_value, expected_hidden), expected_grads = loss_and_grads(repeated_hidden, config)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(hidden, expected_hidden, atol=1e-5)
    differences = relative_differences(grads, expected_grads)
    # Rounding alone: other padding in front of the repeated prompts makes differences of the same size.
    assert max(differences.values()) <= 2e-6, differences


def test_one_completion_token():
    prompt, completions, _ = ragged_batch()
    first = jax.jit(partial(shared_hidden, ALL))(random_params(ALL, 0.1), prompt, completions[..., :1])
    assert first.shape == (N, G, 1, ALL.hidden_size)
    np.testing.assert_allclose(first, loss_and_grads(shared_hidden, ALL)[0][1][:, :, :1], atol=1e-5)


@pytest.fixture(scope="module")
def hidden_fn():
    """prompts, completions -> hidden states behind wide padding, compiled once."""
    compiled = jax.jit(partial(shared_hidden, ALL))

    def hidden(prompt, completions):
        wide = jax.tree.map(lambda x: np.pad(x, ((0, 0), (5, 0))), prompt)
        return np.asarray(compiled(random_params(ALL, 0.1), wide, completions))

    return hidden


def test_width_and_ids_of_padding_do_not_matter(hidden_fn):
    prompt, completions, _ = ragged_batch()
    hidden = hidden_fn(prompt, completions)
    np.testing.assert_allclose(hidden, loss_and_grads(shared_hidden, ALL)[0][1], atol=1e-5)
    np.testing.assert_array_equal(
        hidden_fn(replace(prompt, ids=np.where(prompt.mask, prompt.ids, 17)), completions), hidden
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "piece_tokens"), [("all options", 4), ("all options", 8), ("delta", 8)])
def test_prompts_may_be_computed_at_several_widths(name, piece_tokens):
    """Prompts of 6, 4 and 1 tokens. Pieces of 4 tokens have one prompt each, and the last has it twice; a piece of 8
    tokens has the prompts of 4 and 1."""
    config = ALL if name == "all options" else load_golden("qwen3_next")[0]
    policy, params, (prompt, completions, _) = decoder_policy(config), random_params(config, 0.1), ragged_batch()
    prompt, completions = replace(prompt, ids=prompt.ids % config.vocab_size), completions % config.vocab_size
    narrow = replace(prompt, widths=PromptWidths((2, 4, 6)))
    with assume_traits(piece_tokens=piece_tokens):
        states = jax.jit(partial(decoded_states, policy))(params, narrow, completions)
    expected = jax.jit(partial(shared_hidden, config))(params, prompt, completions)
    np.testing.assert_allclose(states[:, :, :-1], expected, atol=1e-5)


def test_tokens_influence_only_what_follows_them(hidden_fn):
    prompt, completions, _ = ragged_batch()
    before, reached = hidden_fn(prompt, completions), np.zeros((2, N, G, T), bool)
    of_completion, of_prompt = completions.copy(), prompt.ids.copy()
    of_completion[1, 2, 2] = (of_completion[1, 2, 2] + 1) % ALL.vocab_size
    reached[0, 1, 2, 3:] = True  # at t is what predicts token t, so token 2 is first seen at 3
    of_prompt[1, 0] = (of_prompt[1, 0] + 1) % ALL.vocab_size  # row 1 has no padding
    reached[1, 1] = True
    other = replace(prompt, ids=of_prompt)
    for changed, expected in zip(((prompt, of_completion), (other, completions)), reached, strict=True):
        np.testing.assert_array_equal((hidden_fn(*changed) != before).any(-1), expected)


# ---- other forms of the same decoder


REPETITIONS = [("aaaa", (0, 1)), ("abbb", (1, 1)), ("abab", (0, 2)), ("aabab", (1, 2)), ("aba", (2, 1))]


@pytest.mark.parametrize(("modules", "expected"), REPETITIONS)
def test_layers_that_repeat_are_one_loop(modules, expected):
    assert find_repetition(tuple(modules)) == expected


@pytest.mark.parametrize("config", [ALL, MIXTURE, SPARSE], ids=[*NAMES[1:], "some experts"])
def test_scanned_layers_equal_separate_layers(config):
    params, (prompt, *_) = {"params": random_params(config, 0.1)}, ragged_batch()
    ids, mask = prompt.ids, prompt.mask

    @jax.jit
    def one_by_one(params):
        x, pasts = embed(config, params["params"], ids, BATCH), []
        for number, (form, kind) in enumerate(zip(config.forms, geometry.layer_kinds(config), strict=True)):
            layer = {"params": layer_params(config, params["params"]["layers"], number)}
            x, past, _ = Block(config, form).apply(layer, x, geometry_of(config, ids, mask), kind)
            pasts.append(past)
        return norm(config).apply({"params": params["params"]["final_norm"]}, x), pasts

    @jax.jit
    def scanned(params):
        hidden, results = compute_rows(config, params, ids, geometry_of(config, ids, mask))
        return hidden, [past for past, _ in by_layer(results)]

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), scanned(params), one_by_one(params))


@pytest.mark.parametrize("remat", ["layer", "none", pytest.param("offload", marks=pytest.mark.slow)])
def test_layer_loop_and_remat_change_no_numbers(remat, assume):
    (expected_value, _), expected_grads = loss_and_grads(shared_hidden, ALL)
    assume(unrolled_layers=0)  # without remat they are unrolled on a CPU
    (value, _), grads = loss_and_grads.__wrapped__(shared_hidden, replace(ALL, remat=remat))
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert max(relative_differences(grads, expected_grads).values()) <= 1e-6


def test_remat_stores_less_for_the_backward_pass():
    *inputs, _ = ragged_batch()

    def stored(remat):
        config = replace(LLAMA, remat=remat)

        def backward(params):
            return jax.vjp(lambda params: shared_hidden(config, params, *inputs), params)[1]

        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(backward, random_params(LLAMA, 0.1))))

    assert stored("layer") < stored("none") / 2


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_layer_inputs_are_offloaded_and_return_once(platform):
    """They move once there and once back, in the loops over layers: lowered for a machine that is not here."""
    *inputs, _ = ragged_batch()

    def moves(remat):
        def loss(params):
            return jnp.sum(shared_hidden(replace(LLAMA, remat=remat), params, *inputs))

        program = jax.export.export(jax.jit(jax.grad(loss)), platforms=[platform])(random_params(LLAMA, 0.1))
        return program.mlir_module().count('_xla_buffer_placement = "pinned_host"')

    assert moves("layer") == 0
    assert moves("offload") == 1


def test_bfloat16_is_close_to_float32():
    *inputs, _ = ragged_batch()
    config = replace(ALL, dtype="bfloat16")
    half = jax.jit(lambda params: shared_hidden(config, params, *inputs))(random_params(ALL, 0.1))
    (_, exact), _ = loss_and_grads(shared_hidden, ALL)
    assert half.dtype == jnp.bfloat16
    # A rounding to 8 bits is off by up to 2⁻⁹; the sums of three layers stay within a few of the last bit.
    error = np.linalg.norm(np.asarray(half, np.float32) - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.05


def num_equations(jaxpr):
    """Equations of a jaxpr and of those inside it."""
    inner = (sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(num_equations(sub) for sub in inner)


def test_more_layers_do_not_grow_the_program():
    def size(layers):
        config = replace(LLAMA, num_hidden_layers=layers)
        ids = jnp.zeros((1, 3), jnp.int32)
        inputs = ids, rows_seen(config, geometry.rows_of_prompts(whole_prompts(ids)))
        gradient = jax.grad(lambda params: jnp.sum(compute_rows(config, {"params": params}, *inputs)[0]))
        return num_equations(jax.make_jaxpr(gradient)(param_shapes(config)).jaxpr)

    assert size(8) == size(2)


# ---- the parts, against loops


@pytest.mark.parametrize("window", [None, 1, 3])
def test_who_may_look_where_in_a_group(window):
    g, s, p = 2, 5, 4
    prompt_mask = np.array([[False, True, True, True], [True, True, True, True]])
    n, near = len(prompt_mask), np.inf if window is None else window
    place = np.concatenate(
        [np.maximum(np.cumsum(prompt_mask, -1) - 1, 0), prompt_mask.sum(-1)[:, None] + np.arange(s)], 1
    )
    allowed = np.concatenate([prompt_mask, np.ones((n, s), bool)], axis=1)
    row = np.zeros((n, p + s, p + s), bool)  # of prompt and one completion
    for i, query in np.ndindex(n, p + s):
        for key in range(query + 1):
            row[i, query, key] = (allowed[i, key] and place[i, query] - place[i, key] < near) or key == query

    config = replace(LLAMA, sliding_window=window)
    # The last token of a completion is not computed.
    rows = geometry.rows_of_groups(
        PromptTokens(np.zeros((n, p), np.int32), prompt_mask), np.zeros((n, g, s + 1), np.int32)
    )
    seen_rows = rows_seen(config, rows)
    ((of_prompt, of_completions),) = seen_rows.masks
    np.testing.assert_array_equal(of_prompt[:, 0, 0, 0], row[:, :p, :p])
    np.testing.assert_array_equal(of_completions[:, 0, 0, 0], row[:, p:])
    positions = jnp.asarray(np.concatenate([place[:, :p], np.tile(place[:, p:], (1, g))], axis=1))
    jax.tree.map(np.testing.assert_array_equal, seen_rows.angles[0], angles_of(positions, Rotation(1e4), 8))

    # One token after the other into a cache: each sees what its row says.
    prefix = Prefix(None, jnp.asarray(prompt_mask), jnp.asarray(prompt_mask.sum(-1)))
    of_step = jax.jit(lambda step: geometry.geometry_of_next(config, prefix, g, s, step))
    for step in range(s):
        ((of_prompt, of_cache),) = of_step(np.int32(step)).masks
        np.testing.assert_array_equal(of_prompt[:, 0, 0, 0, 0], row[:, p + step, :p])
        np.testing.assert_array_equal(of_cache[:, 0, 0, 0, 0], row[:, p + step, p:])


@pytest.mark.parametrize("window", [None, 2])
def test_who_may_look_where_in_packed_texts(window):
    texts, positions = np.array([[1, 1, 1, 2, 2, 0, 0]]), np.array([[0, 1, 2, 0, 1, 0, 0]])
    near = np.inf if window is None else window
    expected = np.zeros((7, 7), bool)
    for query in range(7):
        for key in range(query + 1):
            same = texts[0, query] == texts[0, key] > 0 and positions[0, query] - positions[0, key] < near
            expected[query, key] = same or key == query
    config = replace(LLAMA, sliding_window=window)
    seen_rows = rows_seen(config, geometry.rows_of_texts(np.zeros((1, 7), np.int32), texts))
    seen = np.asarray(seen_rows.masks[0][1][0, 0, 0, 0])
    np.testing.assert_array_equal(seen[:5], expected[:5])
    assert seen.diagonal().all()  # nobody reads what padding computes, but it sees something
    assert not seen[5:, :5].any()


N_A, G_A, K_A, Q_A, S_A, E_A, P_A = 2, 3, 2, 2, 3, 4, 4
PREFIX_MASK = np.array([[False, True, True, True], [True, True, False, True]])  # with padding and a hole


def group_inputs():
    """Random queries, keys and values of groups, and the masks."""
    rng = np.random.default_rng(0)
    m = P_A + G_A * S_A
    shapes = (N_A, m, K_A, Q_A, E_A), (N_A, m, K_A, E_A), (N_A, m, K_A, E_A)
    of_prompt = np.tril(np.ones((P_A, P_A), bool)) & PREFIX_MASK[:, None] | np.eye(P_A, dtype=bool)
    causal = np.broadcast_to(np.tril(np.ones((S_A, S_A), bool)), (N_A, S_A, S_A))
    in_a_row = np.concatenate([np.repeat(PREFIX_MASK[:, None], S_A, axis=1), causal], axis=-1)
    masks = tuple(x[:, None, None, None] for x in (of_prompt, in_a_row))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes], masks


CAPPED = Softmax(0.8, 1.5)


def attention_at_once(queries, keys, values, mask, softmax=Softmax()):  # noqa: B008, it is a tuple
    """`attend` with all products in memory."""
    scale = 1 / np.sqrt(queries.shape[-1]) if softmax.scale is None else softmax.scale
    logits = scale * jnp.einsum("nkgqse,nkgce->nkgqsc", queries, keys)
    if softmax.softcap is not None:
        logits = softmax.softcap * jnp.tanh(logits / softmax.softcap)
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))
    return jnp.einsum("nkgqsc,nkgce->nkgqse", weights, values)


def attention_inputs(size, num_keys, heads, features):
    """Returns random queries, keys and values of two rows."""
    rng, (k, q) = np.random.default_rng(0), heads
    shapes = (2, k, 1, q, size, features), (2, k, 1, num_keys, features), (2, k, 1, num_keys, features)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def gradient_program(attention):
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(3 * attention(*x))), (0, 1, 2)))


def ragged_mask(size, num_keys, window=None):
    """The second of two rows is padded on the left; more keys than queries are a prompt before them."""
    place, query = np.arange(num_keys), np.arange(size)[:, None] + num_keys - size
    seen = (place <= query) & (place >= query - (window or num_keys))
    seen = np.stack([seen, seen & ((place >= 30) | (place == query))])
    return jnp.asarray(seen[:, None, None, None])


def mask_of_prefix(size, reach, prefix):
    """All see a ragged prefix, and as many tokens as they reach."""
    places, query = np.arange(size + prefix) - prefix, np.arange(size)[:, None]
    causal = (places <= query) & (query - places < reach) | (places < 0)
    there = np.ones((2, size + prefix), bool)
    there[1, :2] = False
    return jnp.asarray((causal & there[:, None])[:, None, None, None])


# 300 queries are three blocks, the last one short; 2300 are blocks of three parts, the last one with a rest.
BLOCKWISE_CASES = [
    pytest.param(2300, partial(ragged_mask, window=700), CAPPED, {}, marks=pytest.mark.slow),
    (300, ragged_mask, CAPPED, {}),
    # Keys beyond its reach are left out.
    (300, lambda size, _: mask_of_prefix(size, 100, 5), Softmax(), {"prefix": 5, "reach": 100}),
]


@pytest.mark.parametrize(("size", "mask", "softmax", "options"), BLOCKWISE_CASES)
def test_blockwise_attention_equals_attention_at_once(size, mask, softmax, options):
    arguments = *attention_inputs(size, size + 5, (1, 2), 4), mask(size, size + 5)
    value, grads = gradient_program(partial(attend, softmax=softmax, **options))(*arguments)
    expected, expected_grads = gradient_program(partial(attention_at_once, softmax=softmax))(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert np.linalg.norm(grad - expected_grad) <= 1e-5 * np.linalg.norm(expected_grad)


@pytest.mark.slow
def test_long_attention_needs_a_sixteenth_of_memory():
    """At 8,192 tokens, compiled and not run."""
    arguments = *attention_inputs(8192, 8192, (2, 2), 8), ragged_mask(8192, 8192)
    needed, at_once = (
        gradient_program(f).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        for f in (attend, attention_at_once)
    )
    assert needed <= at_once / 16


# Features of keys first as on a CPU, and not as on other devices; and a library's attention, for an odd group size.
CACHED_CASES = [(True, Softmax(), None), (False, CAPPED, None), (False, Softmax(0.8), "xla")]


@pytest.mark.parametrize(("features_first", "softmax", "implementation"), CACHED_CASES)
def test_cached_attention_equals_attention_of_the_group(features_first, softmax, implementation, assume):
    assume(features_first=features_first)
    (queries, keys, values), masks = group_inputs()
    expected = jax.jit(lambda *x: attend_rows(*x, (None, None), "shared", softmax))(queries, keys, values, masks)
    prompt = group_by_prompt(KeyValues(keys[:, :P_A], values[:, :P_A]))
    attend_next = partial(attend_past, softmax=softmax, implementation=implementation)
    in_a_program = jax.jit(attend_next)  # traced anew for each case
    expected = np.asarray(expected)
    empty = jnp.zeros((N_A * G_A * K_A, S_A - 1, E_A))
    (cache,) = widen((KeyValues(cache_keys(empty), empty),), [S_A])
    for step in range(S_A):
        tokens = P_A + step + S_A * np.arange(G_A)
        seen = np.broadcast_to(np.arange(S_A) <= step, (N_A, 1, 1, 1, 1, S_A))
        of_past = PREFIX_MASK[:, None, None, None, None], seen
        next_queries, *written = (np.asarray(x)[:, tokens] for x in (queries, keys, values))
        inputs = next_queries, KeyValues(*written), of_past, prompt, cache, np.int32(step)
        at_once, _ = attend_next(*map(jax.tree.map, [jnp.asarray] * len(inputs), inputs))
        attended, cache = in_a_program(*inputs)
        np.testing.assert_allclose(attended, expected[:, tokens], atol=1e-6)
        np.testing.assert_allclose(at_once, attended, atol=1e-6)


def test_fused_attention_has_the_same_values_and_gradients():
    softmax = Softmax(0.8)
    inputs, masks = group_inputs()
    weights = np.random.default_rng(1).normal(size=inputs[0].shape).astype(np.float32)

    def value_and_grads(kind):
        def total(inputs):
            attended = attend_rows(*inputs, masks, (None, None), kind, softmax)
            return jnp.sum(weights * attended), attended

        return jax.jit(jax.value_and_grad(total, has_aux=True))(inputs)

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), value_and_grads("xla"), value_and_grads("shared"))


# ---- settings that cannot work


IMPOSSIBLE_SETTINGS = [
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"attention": "cudnn"}, "bfloat16"),
    ({"attention": "cudnn", "dtype": "bfloat16", "head_dim": 12}, "256 features, in eights, and head_dim is 12"),
    ({"attention": "xla", "attn_logit_softcapping": 5.0}, '"xla" does not compute attn_logit_softcapping'),
    ({"norms": "between"}, "norms is 'between'"),
    ({"router": "frozen"}, "router"),
]


@pytest.mark.parametrize(("change", "named"), IMPOSSIBLE_SETTINGS)
def test_settings_that_cannot_work(change, named):
    with refused(named):
        replace(LLAMA, **change)


def test_norms_rotations_and_sums_round_only_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3, 64)), jnp.bfloat16)
    exact = x.astype(jnp.float32)
    params = {"params": {"scale": jnp.linspace(0.5, 2, 64)}}
    norm, angles = RMSNorm(1e-5), angles_of(jnp.arange(8).reshape(2, 4) * 50, Rotation(1e4), 64)
    for half, whole in (
        (norm.apply(params, x), norm.apply(params, exact)),
        (rotate(x, angles), rotate(exact, angles)),
    ):
        np.testing.assert_array_equal(half, whole.astype(jnp.bfloat16))
    # 512 keys of equal weight: a sum in bfloat16 would stop growing at 256.
    keys, values = jnp.zeros((1, 1, 1, 512, 2), jnp.bfloat16), jnp.ones((1, 1, 1, 512, 2), jnp.bfloat16)
    queries = jnp.zeros((1, 1, 1, 1, 1, 2), jnp.bfloat16)
    attended = jax.jit(attend)(queries, keys, values, jnp.ones((1, 1, 1, 1, 1, 512), bool))
    np.testing.assert_array_equal(attended, np.ones_like(attended))


@pytest.mark.parametrize("name", get_args(Activation))
def test_activations_round_only_once(name):
    x = jnp.linspace(-6, 6, 999).astype(jnp.bfloat16)
    made, exact = (jax.jit(ACTIVATIONS[name])(y) for y in (x, x.astype(jnp.float32)))
    assert made.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(made), exact, rtol=2**-8)


@pytest.mark.parametrize(
    ("field", "value"), [("residual_multiplier", 0.22), ("attention_multiplier", 1 / 12), ("logits_scaling", 1.1)]
)
def test_numbers_of_a_model_are_not_rounded(field, value):
    """torch computes with them in float32. JAX would take the nearest number of bfloat16."""
    *inputs, _ = ragged_batch()
    config = replace(LLAMA, dtype="bfloat16", num_hidden_layers=1, **{field: value})
    near = replace(config, **{field: float(jnp.bfloat16(value))})
    params = random_params(config, 0.5)
    with jax.disable_jit():
        states = [shared_hidden(x, params, *inputs) for x in (config, near)]
    assert not np.array_equal(*states)


# ---- new parameters


@MOST_OPTIONS
def test_new_parameters_have_the_configured_standard_deviation(config):
    """The mean of n squares has a standard deviation of √(2/n); the bound is five of them."""
    params = jax.jit(decoder_policy(replace(config, initializer_range=0.5)).init)(jax.random.key(0))
    seen = []
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key == "scale":
            assert (x == 1).all()
        elif path[-1].key in ("bias", "offset"):
            assert (x == 0).all()
        else:
            assert abs(np.mean(np.square(x)) / 0.25 - 1) < 5 * np.sqrt(2 / x.size), path
            seen.append(np.asarray(x).ravel())
    drawn = np.concatenate(seen)
    assert len(np.unique(drawn)) > 0.99 * len(drawn)  # no array is a copy of another
