"""The decoder against repeated prompts, NumPy loops and itself in other forms."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import ModelConfig, config_from_huggingface
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.transformer import (
    KeyValues,
    RMSNorm,
    Transformer,
    attend,
    rotary_angles,
    rotate,
    unstack_layers,
)

LLAMA = ModelConfig(
    vocab_size=29,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
QWEN2 = dataclasses.replace(LLAMA, qkv_bias=True, tie_word_embeddings=False)
CONFIGS = pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])

PROMPT_LENGTHS, P = (1, 6, 4), 6
N, G, T = len(PROMPT_LENGTHS), 4, 5


@cache
def random_params(config):
    """Every leaf random: the initial biases of 0 and norms of 1 would hide mistakes."""
    rng = np.random.default_rng(0)

    def leaf(path, shape):
        noise = rng.normal(scale=0.1, size=shape.shape).astype(np.float32)
        return jnp.asarray(1 + noise if path[-1].key == "scale" else noise)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(decoder_policy(config).init, jax.random.key(0)))


def ragged_batch():
    """Prompts of different lengths padded on the left, completions, and their ragged mask."""
    rng = np.random.default_rng(0)
    mask = np.arange(P) >= P - np.array(PROMPT_LENGTHS)[:, None]
    ids = np.zeros((N, P), np.int32)
    ids[mask] = rng.integers(0, LLAMA.vocab_size, mask.sum())
    completions = rng.integers(0, LLAMA.vocab_size, (N, G, T), dtype=np.int32)
    completion_mask = np.arange(T) < rng.integers(1, T + 1, (N, G, 1))
    return ids, mask, completions, completion_mask


def repeated_hidden(config, params, prompt_ids, prompt_mask, completion_ids):
    """`Policy.hidden` the plain way: each completion behind its own copy of the prompt."""
    n, g, t = completion_ids.shape
    width = prompt_ids.shape[-1]
    ids = jnp.concatenate([jnp.broadcast_to(prompt_ids[:, None], (n, g, width)), completion_ids], axis=-1)
    mask = jnp.concatenate([jnp.broadcast_to(prompt_mask[:, None], (n, g, width)), jnp.ones((n, g, t), bool)], axis=-1)
    positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)
    hidden, _ = Transformer(config).apply({"params": params}, ids, positions, mask)
    return hidden[:, :, width - 1 : -1]


def shared_hidden(config, params, *batch):
    return decoder_policy(config).hidden(params, *batch)


def relative_differences(tree, reference):
    """‖difference‖ / ‖reference‖ for each leaf, by its path."""
    differences = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), tree, reference)
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(differences)}


@cache
def loss_and_grads(hidden_fn, config):
    """Σ of weighted log-probabilities of the tokens that are not masked, the hidden states, and the gradients."""
    *inputs, mask = ragged_batch()
    weights = np.random.default_rng(1).uniform(0.5, 1.5, mask.shape) * mask

    def loss(params):
        hidden = hidden_fn(config, params, *inputs)
        logprobs = jax.nn.log_softmax(hidden @ decoder_policy(config).unembedding(params).T)
        return jnp.sum(weights * jnp.take_along_axis(logprobs, inputs[2][..., None], axis=-1)[..., 0]), hidden

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(random_params(config))


# ---- the prompt once, or G times


@CONFIGS
def test_shared_prompt_equals_repeated_prompt(config):
    (value, hidden), grads = loss_and_grads(shared_hidden, config)
    (expected_value, expected_hidden), expected_grads = loss_and_grads(repeated_hidden, config)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(hidden, expected_hidden, atol=1e-5)
    differences = relative_differences(grads, expected_grads)
    # Rounding alone: other padding in front of the repeated prompts makes differences of the same size.
    assert max(differences.values()) <= 1e-6, differences


def test_one_completion_token():
    params, (ids, mask, completions, _) = random_params(LLAMA), ragged_batch()
    first = shared_hidden(LLAMA, params, ids, mask, completions[..., :1])
    assert first.shape == (N, G, 1, LLAMA.hidden_size)
    (_, expected), _ = loss_and_grads(repeated_hidden, LLAMA)
    np.testing.assert_allclose(first, expected[:, :, :1], atol=1e-5)


@pytest.fixture(scope="module")
def hidden_fn():
    """ids, mask, completions -> hidden states, compiled once."""
    params = random_params(QWEN2)
    return jax.jit(lambda *batch: shared_hidden(QWEN2, params, *batch))


def test_width_of_padding_does_not_matter(hidden_fn):
    ids, mask, completions, _ = ragged_batch()
    wide = [np.pad(x, ((0, 0), (5, 0))) for x in (ids, mask)]
    np.testing.assert_allclose(hidden_fn(*wide, completions), hidden_fn(ids, mask, completions), atol=1e-5)


def test_ids_of_padding_do_not_matter(hidden_fn):
    ids, mask, completions, _ = ragged_batch()
    other = np.where(mask, ids, 17)
    assert (other != ids).any()
    np.testing.assert_array_equal(hidden_fn(other, mask, completions), hidden_fn(ids, mask, completions))


def test_each_token_reaches_what_follows_it_and_nothing_else(hidden_fn):
    ids, mask, completions, _ = ragged_batch()
    before = np.asarray(hidden_fn(ids, mask, completions))
    changed = completions.copy()
    changed[1, 2, 2] = (changed[1, 2, 2] + 1) % QWEN2.vocab_size
    differs = (np.asarray(hidden_fn(ids, mask, changed)) != before).any(-1)
    expected = np.zeros((N, G, T), bool)
    expected[1, 2, 3:] = True  # at t is what predicts token t, so token 2 is first seen at 3
    np.testing.assert_array_equal(differs, expected)


def test_prompt_tokens_reach_their_own_group_only(hidden_fn):
    ids, mask, completions, _ = ragged_batch()
    before = np.asarray(hidden_fn(ids, mask, completions))
    changed = ids.copy()
    changed[1, 0] = (changed[1, 0] + 1) % QWEN2.vocab_size  # row 1 has no padding
    differs = (np.asarray(hidden_fn(changed, mask, completions)) != before).any(-1)
    expected = np.zeros((N, G, T), bool)
    expected[1] = True
    np.testing.assert_array_equal(differs, expected)


# ---- other forms of the same decoder


@CONFIGS
def test_scanned_layers_equal_separate_layers(config):
    params, (ids, mask, *_) = random_params(config), ragged_batch()
    positions = np.maximum(np.cumsum(mask, -1) - 1, 0)
    inputs = ids[:, None], positions[:, None], mask[:, None]
    scanned, stacked = Transformer(config).apply({"params": params}, *inputs)
    separate = Transformer(config, scan_layers=False)
    hidden, layers = separate.apply({"params": unstack_layers(params, config.num_hidden_layers)}, *inputs)
    np.testing.assert_allclose(hidden, scanned, atol=1e-5)
    for layer, own in enumerate(layers):
        np.testing.assert_allclose(own.keys, stacked.keys[layer], atol=1e-5)
        np.testing.assert_allclose(own.values, stacked.values[layer], atol=1e-5)


def test_remat_changes_neither_values_nor_gradients():
    (value, _), grads = loss_and_grads(shared_hidden, dataclasses.replace(LLAMA, remat=True))
    (expected_value, _), expected_grads = loss_and_grads(shared_hidden, LLAMA)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert max(relative_differences(grads, expected_grads).values()) <= 1e-6


def test_remat_stores_less_for_the_backward_pass():
    *inputs, _ = ragged_batch()

    def stored(config):
        def backward(params):
            return jax.vjp(lambda params: shared_hidden(config, params, *inputs), params)[1]

        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(backward, random_params(LLAMA))))

    assert stored(dataclasses.replace(LLAMA, remat=True)) < stored(LLAMA) / 2


def test_bfloat16_is_close_to_float32():
    *inputs, _ = ragged_batch()
    config = dataclasses.replace(LLAMA, dtype="bfloat16")
    half = jax.jit(lambda params: shared_hidden(config, params, *inputs))(random_params(LLAMA))
    (_, exact), _ = loss_and_grads(shared_hidden, LLAMA)
    assert half.dtype == jnp.bfloat16
    # A rounding to 8 bits is off by up to 2⁻⁹; the sums of two layers stay within a few of the last bit.
    error = np.linalg.norm(np.asarray(half, np.float32) - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.03


def num_equations(jaxpr):
    """Equations of a jaxpr and of those inside it."""
    inner = (sub for eqn in jaxpr.eqns for sub in jax.core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(num_equations(sub) for sub in inner)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_only_separate_layers_grow_the_program(scan_layers):
    def size(layers):
        model = Transformer(dataclasses.replace(LLAMA, num_hidden_layers=layers), scan_layers=scan_layers)
        ids = jnp.zeros((1, 1, 3), jnp.int32)
        params = jax.eval_shape(model.init, jax.random.key(0), ids, ids)
        gradient = jax.grad(lambda params: jnp.sum(model.apply(params, ids, ids)[0]))
        return num_equations(jax.make_jaxpr(gradient)(params).jaxpr)

    if scan_layers:
        assert size(8) == size(2)
    else:
        assert size(8) > 2 * size(2)


# ---- the parts, against loops


def test_rotation_turns_pairs_of_features_by_their_angle():
    theta, features = 100.0, 8
    positions = np.array([[[0, 1, 7]], [[3, 2, 300]]])
    x = np.random.default_rng(0).normal(size=(2, 1, 3, 3, features)).astype(np.float32)
    expected = np.zeros_like(x, dtype=np.float64)
    for n, h, s in np.ndindex(2, 3, 3):
        for i in range(features // 2):
            angle = positions[n, 0, s] * theta ** (-2 * i / features)
            pair = complex(x[n, 0, h, s, i], x[n, 0, h, s, i + features // 2]) * np.exp(1j * angle)
            expected[n, 0, h, s, [i, i + features // 2]] = pair.real, pair.imag
    rotated = rotate(jnp.asarray(x), rotary_angles(jnp.asarray(positions), features, theta))
    np.testing.assert_allclose(rotated, expected, atol=1e-4)  # float32 angles of up to 300


@pytest.mark.parametrize("with_prefix", [True, False])
def test_attention_is_one_softmax_over_prefix_and_own_tokens(with_prefix):
    n, g, k, q, s, e, p = 2, 3, 2, 2, 3, 4, 4
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    queries, keys, values = draw(n, g, k, q, s, e), draw(n, g, k, s, e), draw(n, g, k, s, e)
    prefix_keys, prefix_values = draw(n, k, p, e), draw(n, k, p, e)
    seen = np.array([[False, True, True, True], [True, True, False, True]]) & with_prefix  # [N, P]
    expected = np.zeros(queries.shape)
    for i, j, head, twin, token in np.ndindex(n, g, k, q, s):
        visible_keys = np.concatenate([prefix_keys[i, head][seen[i]], keys[i, j, head, : token + 1]])
        visible_values = np.concatenate([prefix_values[i, head][seen[i]], values[i, j, head, : token + 1]])
        weights = np.exp(visible_keys @ queries[i, j, head, twin, token] / np.sqrt(e))
        expected[i, j, head, twin, token] = weights / weights.sum() @ visible_values
    bias = np.where(np.tril(np.ones((s, s), bool)), 0, -np.inf).astype(np.float32)[None, None, None, None]
    prefix = ()
    if with_prefix:
        prefix_bias = np.where(seen, 0, -np.inf).astype(np.float32)[:, None, None, None, None]
        prefix = KeyValues(jnp.asarray(prefix_keys), jnp.asarray(prefix_values)), jnp.asarray(prefix_bias)
    own = KeyValues(jnp.asarray(keys), jnp.asarray(values))
    np.testing.assert_allclose(attend(jnp.asarray(queries), own, jnp.asarray(bias), *prefix), expected, atol=1e-5)


def test_rms_norm():
    eps = 0.1
    x, scale = np.random.default_rng(0).normal(size=(2, 5, 16)), np.linspace(-1, 2, 16)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale
    params = {"params": {"scale": jnp.asarray(scale, jnp.float32)}}
    np.testing.assert_allclose(RMSNorm(eps).apply(params, jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-6)


# ---- config.json

CONFIG_JSON = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def test_config_of_earlier_transformers():
    assert config_from_huggingface(CONFIG_JSON, remat=True) == ModelConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_theta=5000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        remat=True,
    )


def test_config_of_transformers_5():
    renamed = {name: value for name, value in CONFIG_JSON.items() if not name.startswith("rope_")}
    renamed["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}
    assert config_from_huggingface(renamed) == config_from_huggingface(CONFIG_JSON)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"model_type": "qwen2"}, "qkv_bias", True),
        ({"tie_word_embeddings": False}, "tie_word_embeddings", False),
        ({"num_key_value_heads": None}, "num_key_value_heads", 4),
        ({"head_dim": 16}, "head_dim", 16),
        ({"rope_scaling": {"type": "default"}}, "rope_theta", 5000.0),
    ],
    ids=["qwen2", "untied", "one key head a query head", "explicit head_dim", "named default rope"],
)
def test_config_fields(change, field, value):
    assert getattr(config_from_huggingface(CONFIG_JSON | change), field) == value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "model_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_config_that_is_not_supported(change, named):
    with pytest.raises(ValueError, match=named) as error:
        config_from_huggingface(CONFIG_JSON | change)
    assert "\n" not in str(error.value)
