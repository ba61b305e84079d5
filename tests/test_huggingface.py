"""Hugging Face folders: names and layouts of tensors, errors, and a real model's greedy text."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from grpo_jax.models.config import config_from_huggingface
from grpo_jax.models.huggingface import load_pretrained, params_from_tensors
from grpo_jax.models.policy import decoder_policy
from grpo_jax.sampling.sampler import sample_groups

STORIES = Path(__file__).parents[1].parent / "shared/data/stories260K-hf"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="needs the stories260K folder")

TINY = {
    "vocab_size": 19,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,  # not hidden_size / heads: a layout that mixes them up cannot pass
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
LLAMA = TINY | {"model_type": "llama", "tie_word_embeddings": True}
QWEN2 = TINY | {"model_type": "qwen2", "tie_word_embeddings": False}
CONFIGS = pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])


def random_tensors(config):
    """Tensors with the names and shapes that `save_pretrained` gives them."""
    width, inner, features = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{name}self_attn.{letter}_proj.weight"] = (count * features, width)
            if config["model_type"] == "qwen2":
                shapes[f"{name}self_attn.{letter}_proj.bias"] = (count * features,)
        shapes |= {
            f"{name}self_attn.o_proj.weight": (width, heads * features),
            f"{name}mlp.gate_proj.weight": (inner, width),
            f"{name}mlp.up_proj.weight": (inner, width),
            f"{name}mlp.down_proj.weight": (width, inner),
            f"{name}input_layernorm.weight": (width,),
            f"{name}post_attention_layernorm.weight": (width,),
        }
    rng = np.random.default_rng(0)
    return {name: rng.normal(scale=0.5, size=shape).astype(np.float32) for name, shape in shapes.items()}


def huggingface_logits(tensors, config, ids):
    """Logits [S, V] of one sequence, step by step as transformers computes them, in float64."""
    heads, kv_heads, features = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    length = len(ids)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * tensors[name]

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T.astype(np.float64) + tensors.get(f"{name}.bias", 0.0)

    def rotate_half(x):
        return np.concatenate([-x[..., features // 2 :], x[..., : features // 2]], axis=-1)

    frequencies = config["rope_theta"] ** (-np.arange(0, features, 2) / features)
    angles = np.tile(np.arange(length)[:, None] * frequencies, 2)  # [S, E]

    def rope(x):
        return x * np.cos(angles) + rotate_half(x) * np.sin(angles)

    def split_heads(x):
        return x.reshape(length, -1, features).swapaxes(0, 1)

    x = tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        normed = norm(x, f"{name}input_layernorm.weight")
        q, k, v = (split_heads(linear(normed, f"{name}self_attn.{letter}_proj")) for letter in "qkv")
        k, v = (np.repeat(y, heads // kv_heads, axis=0) for y in (rope(k), v))
        scores = rope(q) @ k.swapaxes(1, 2) / np.sqrt(features) + np.triu(np.full((length, length), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + linear(attended.swapaxes(0, 1).reshape(length, -1), f"{name}self_attn.o_proj")
        normed = norm(x, f"{name}post_attention_layernorm.weight")
        gate = linear(normed, f"{name}mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, f"{name}mlp.up_proj"), f"{name}mlp.down_proj")
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm.weight") @ tensors[f"{head}.weight"].T


@CONFIGS
def test_logits_equal_the_forward_pass_of_huggingface(config):
    tensors, parsed = random_tensors(config), config_from_huggingface(config)
    params, policy = params_from_tensors(tensors, parsed), decoder_policy(parsed)
    ids = np.array([3, 18, 0, 7, 7, 2, 11, 5], np.int32)
    prompt, completion = ids[None, :3], ids[None, None, 3:]
    hidden = jax.jit(policy.hidden)(params, prompt, np.ones_like(prompt, bool), completion)
    logits = hidden[0, 0] @ policy.unembedding(params).T
    # From the last prompt token to the one before the last.
    np.testing.assert_allclose(logits, huggingface_logits(tensors, config, ids)[2:-1], atol=2e-5)


def test_a_repeated_tied_matrix_is_ignored():
    tensors, config = random_tensors(LLAMA), config_from_huggingface(LLAMA)
    repeated = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert "unembedding" not in params_from_tensors(repeated, config)


# ---- errors


@CONFIGS
def test_every_tensor_is_needed(config):
    tensors = random_tensors(config)
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"no tensor '{name}'"):
            params_from_tensors(rest, config_from_huggingface(config))


@CONFIGS
def test_every_shape_is_checked(config):
    tensors = random_tensors(config)
    for name, tensor in tensors.items():
        # An axis more, or a transposed matrix, which has the same number of elements.
        wrong = tensor.T if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1] else tensor[None]
        with pytest.raises(ValueError, match=f"'{name}' has shape"):
            params_from_tensors(tensors | {name: wrong}, config_from_huggingface(config))


@pytest.mark.parametrize(
    "name", ["model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight", "lm_head.bias"]
)
def test_tensors_that_nobody_reads(name):
    with pytest.raises(ValueError, match=name):
        params_from_tensors(random_tensors(LLAMA) | {name: np.ones(3)}, config_from_huggingface(LLAMA))


@pytest.mark.parametrize(
    ("files", "message"),
    [([], "holds no config.json"), (["config.json"], "holds no .safetensors"), (["config.json", "tensors"], "lm_head")],
)
def test_folders_that_are_not_complete(tmp_path, files, message):
    if "config.json" in files:
        (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    if "tensors" in files:
        tensors = random_tensors(QWEN2)
        del tensors["lm_head.weight"]
        save_file({name: jnp.asarray(tensor) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(tmp_path)
    assert "\n" not in str(error.value)


# ---- a real model


@pytest.fixture(scope="module")
def stories():
    return load_pretrained(STORIES)


@needs_stories
def test_greedy_ids_and_logprobs_equal_the_reference(stories):
    reference = json.loads((STORIES / "greedy_reference.json").read_text())
    start, *ids = reference["ids"]
    policy = decoder_policy(stories.config)

    @jax.jit
    def generate(params):
        prompt = jnp.full((1, 1), start)
        return sample_groups(
            policy,
            params,
            prompt,
            jnp.ones_like(prompt, bool),
            jnp.zeros((1, 1), jnp.int32),
            jax.random.key(0),
            max_tokens=len(ids),
            eos_ids=stories.eos_ids,
            temperature=0.0,
        )

    out = jax.tree.map(lambda x: x[0, 0], generate(stories.params))
    assert len(ids) == 256
    np.testing.assert_array_equal(out.completion_ids, ids)
    assert out.completion_mask.all()
    assert out.truncated
    np.testing.assert_allclose(out.sampler_logprobs, reference["logprobs_of_next"], atol=1e-4)


@needs_stories
def test_eos_ids_are_those_of_all_files(stories):
    assert stories.eos_ids == (1, 2)  # 1 in config.json and generation_config.json, 2 in the tokenizer's


@needs_stories
def test_tokenizer_round_trip(stories):
    text = "Once upon a time, there was a little girl named Lily."
    assert stories.tokenizer.decode(stories.tokenizer.encode(text), skip_special_tokens=True).strip() == text


@needs_stories
def test_bfloat16_tensors_in_several_files_and_more_eos_ids(stories, tmp_path):
    for file in STORIES.glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    tensors = load_file(STORIES / "model.safetensors")
    names = sorted(tensors)
    for part, chosen in enumerate((names[::2], names[1::2])):
        halves = {name: tensors[name].astype(jnp.bfloat16) for name in chosen}
        save_file(halves, tmp_path / f"model-{part}.safetensors")
    loaded = load_pretrained(tmp_path, dtype="bfloat16", remat=True)
    assert (loaded.config.dtype, loaded.config.remat) == ("bfloat16", True)
    assert loaded.eos_ids == (1, 2, 7)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), stories.params)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)
