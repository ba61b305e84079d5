"""Hugging Face folders: what transformers computes from them, in and out bit by bit, errors, and a real model."""

import json
import math
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from grpo_jax.errors import UsageError
from grpo_jax.functional import token_logprobs
from grpo_jax.functional.numerics import softcapped
from grpo_jax.models import weights
from grpo_jax.models.config import ExpertsConfig, Llama3Scaling, ModelConfig
from grpo_jax.models.families import config_from_huggingface, config_to_huggingface
from grpo_jax.models.huggingface import load_pretrained, load_tokenizer, model_folder, save_pretrained
from grpo_jax.models.lora import add_adapters, merge
from grpo_jax.models.peft import load_adapter, save_adapter
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.weights import load_params, read_json
from grpo_jax.rl.guards import check_tokens
from grpo_jax.sampling.sampler import sample_groups
from grpo_jax.tasks.dataset import text_task

STORIES = Path(__file__).parents[2].parent / "shared/data/stories260K-hf"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="needs the stories260K folder")

# Made by golden/make.py: a folder for every family and option, as transformers wrote it, and the logits it computes.
GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(file.parent.name for file in GOLDEN.glob("*/config.json"))
each_golden = pytest.mark.parametrize("name", NAMES)
bit_for_bit = partial(jax.tree.map, partial(np.testing.assert_array_equal, strict=True))


@cache
def load_golden(name):
    """Configuration and parameters."""
    config = config_from_huggingface(read_json(GOLDEN / name / "config.json"))
    return config, load_params(GOLDEN / name, config)


@cache
def logits_fn(config, group_size=1):
    """(params, ids [B, S], length of the prompt) -> logits [B, S - length, V] of each token behind the prompt."""
    policy = decoder_policy(config)

    @jax.jit
    def logits(params, *batch):
        return softcapped(policy.hidden(params, *batch)[:, -1] @ policy.unembedding(params).T, policy.softcap)

    return lambda params, ids, length: logits(params, *padded(ids, length, group_size))


def padded(ids, length, group_size=1):
    """A prompt of `length` tokens behind three of padding, and the rest as the last of its completions."""
    prompt, rest = np.pad(ids[:, :length], ((0, 0), (3, 0))), ids[:, length:]
    completions = np.stack([rest[:, ::-1]] * (group_size - 1) + [rest], axis=1)
    return prompt, np.broadcast_to(np.arange(length + 3) >= 3, prompt.shape), completions


# ---- what transformers computes


def with_fused_experts(name, tensors):
    """Tensors by names, with one for all experts of a layer: as transformers 5 holds them."""
    config, tensors = load_golden(name)[0], dict(tensors)
    module, *projections = ("mlp", "gate_proj", "up_proj", "down_proj")
    if name == "mixtral":
        module, *projections = ("block_sparse_moe", "w1", "w3", "w2")
    for layer in range(config.num_hidden_layers):
        stem, numbers = f"model.layers.{layer}", range(config.experts.num_experts)
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{module}.experts.{i}.{projection}.weight") for i in numbers])
            for projection in projections
        )
        tensors[f"{stem}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{stem}.mlp.experts.down_proj"] = down
        tensors[f"{stem}.mlp.gate.weight"] = tensors.pop(f"{stem}.{module}.gate.weight")
    return tensors


WITH_GRADIENTS = sorted(file.parent.name for file in GOLDEN.glob("*/gradients.npz"))
QUICK = "gemma3_capped"  # with gradients


# Of the other folders each has something that no quick one has: a rule of frequencies, biases, a mixture.
SLOW = (
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "qwen3_biases",
    "qwen3_moe_plain",
    "smollm",
    "smollm3",
    "gemma2",
    "gemma3",
)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in NAMES if x != QUICK),
        "llama/adapter",
    ],
)
def test_logits_are_those_of_transformers(name):
    """Of the second of two completions that share a prompt."""
    folder, _, adapter = name.partition("/")
    config, params = load_golden(folder)
    params = load_adapter(GOLDEN / name, params) if adapter else params
    golden = np.load(GOLDEN / name / "golden.npz")
    logits = logits_fn(config, 2)(params, golden["ids"], 9)
    np.testing.assert_allclose(logits, golden["logits"][:, 8:-1], atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in WITH_GRADIENTS]
)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path):
    """Of the mean −log π of that completion."""
    config, params = load_golden(name)
    golden, expected = np.load(GOLDEN / name / "golden.npz"), np.load(GOLDEN / name / "gradients.npz")
    policy = decoder_policy(config)

    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, batch):
        hidden, unembedding = policy.hidden(params, *batch)[:, -1], policy.unembedding(params)
        logprobs = token_logprobs(hidden, unembedding, batch[2][:, -1], softcap=policy.softcap).logprobs
        return -jnp.mean(logprobs), softcapped(hidden @ unembedding.T, policy.softcap)

    (value, logits), gradients = jax.jit(loss)(params, padded(golden["ids"], 9, 2))
    np.testing.assert_allclose(logits, golden["logits"][:, 8:-1], atol=1e-4)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    folder = save_pretrained(tmp_path / "gradients", gradients, config, source=GOLDEN / name)
    least = 1e-3 * max(np.linalg.norm(x) for x in expected.values())  # the bias of keys that nobody rotates has none
    made = load_file(folder / "model.safetensors")
    for tensor, found in (with_fused_experts(name, made) if config.experts else made).items():
        norm = max(np.linalg.norm(expected[tensor]), least)
        assert np.linalg.norm(found - expected[tensor]) <= 1e-4 * norm, tensor


DECODED = [
    "llama_biases",
    "mistral_window",
    "qwen2_mixed",
    "qwen3",
    "smollm3_window",
    "olmo2_biases",
    "phi3_window",
    "gemma",
    "gemma2_untied",
    "gemma3",
    "qwen3_moe",
    "mixtral",
]


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in ("qwen2_mixed", "phi3_window", "gemma3") else pytest.mark.slow) for x in DECODED],
)
def test_logits_one_token_after_the_other(name):
    config, params = load_golden(name)
    policy = decoder_policy(config)

    @jax.jit
    def decoded(params, prompt, mask, completion):
        tokens = completion.transpose(2, 0, 1)
        first, decode, cache = policy.prefill(params, prompt, mask, 1, len(tokens) + 1)

        def step(cache, token):
            state, cache = decode(cache, *token)
            return cache, state[:, 0]

        _, states = jax.lax.scan(step, cache, (tokens, jnp.arange(len(tokens))))
        logits = jnp.concatenate([first[None], states]).swapaxes(0, 1) @ policy.unembedding(params).T
        return softcapped(logits, policy.softcap)

    golden = np.load(GOLDEN / name / "golden.npz")
    logits = decoded(params, *padded(golden["ids"], 9))
    np.testing.assert_allclose(logits, golden["logits"][:, 8:], atol=1e-4)


def torch_logits(model, ids):
    """Of a model of transformers."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids.astype(np.int64))).logits.numpy()


@cache
def torch_model(folder):
    """As transformers loads it. Only its eager attention has every kind of mask."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="float32")


@each_golden
def test_transformers_and_its_reading_of_a_saved_folder(name, tmp_path):
    config, params = load_golden(name)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 30))
    expected = torch_logits(torch_model(GOLDEN / name), ids)
    np.testing.assert_allclose(logits_fn(config)(params, ids, 9), expected[:, 8:-1], atol=1e-4)
    # With the original's config.json, and with one made from the configuration.
    for source in (GOLDEN / name, None):
        folder = save_pretrained(tmp_path / str(source is None), params, config, source=source, max_shard_bytes=4000)
        np.testing.assert_array_equal(torch_logits(torch_model(folder), ids), expected)


def test_peft_and_its_reading_of_a_saved_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    config, params = load_golden("llama")
    adapted = load_adapter(GOLDEN / "llama/adapter", params)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 30))
    folder = save_adapter(tmp_path / "out", adapted, base=str(GOLDEN / "llama"))
    expected = torch_logits(peft.AutoPeftModelForCausalLM.from_pretrained(folder), ids)
    np.testing.assert_allclose(logits_fn(config)(adapted, ids, 9), expected[:, 8:-1], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_that_are_one_tensor_a_layer(name, tmp_path):
    """As transformers 5 writes them with save_original_format=False."""
    (config, params), tensors = load_golden(name), with_fused_experts(name, original_tensors(name))
    save_file(tensors, tmp_path / "model.safetensors")
    bit_for_bit(load_params(tmp_path, config), params)
    tensors["model.layers.1.mlp.experts.down_proj"] = tensors["model.layers.1.mlp.experts.down_proj"][:-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"hold no tensor 'model.layers.1.*experts"):
        load_params(tmp_path, config)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_peft_and_its_reading_of_adapted_experts(name, tmp_path):
    """PEFT reads an expert's adapter by the name of transformers 4, and makes one of all experts of it."""
    peft = pytest.importorskip("peft")
    config, params = load_golden(name)
    adapted = random_adapters(add_adapters(params, jax.random.key(0), rank=2, alpha=3.0))
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 30))
    folder = save_adapter(tmp_path / "out", adapted, base=str(GOLDEN / name))
    expected = torch_logits(peft.AutoPeftModelForCausalLM.from_pretrained(folder), ids)
    np.testing.assert_allclose(logits_fn(config)(adapted, ids, 9), expected[:, 8:-1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_adapted_experts_are_merged_saved_and_loaded(name, tmp_path):
    config, params = load_golden(name)
    new = add_adapters(params, jax.random.key(0), rank=2, alpha=3.0)
    golden = np.load(GOLDEN / name / "golden.npz")
    adapted = random_adapters(new)
    given = params, adapted, merge(adapted)
    plain, computed, merged = (logits_fn(config)(x, golden["ids"], 9) for x in given)
    assert np.abs(plain - computed).max() > 0.1
    np.testing.assert_allclose(computed, merged, atol=1e-4)
    np.testing.assert_array_equal(logits_fn(config)(new, golden["ids"], 9), plain)
    folder = save_adapter(tmp_path / "out", adapted, base="somewhere")
    bit_for_bit(load_adapter(folder, params), adapted)
    expert = "mlp.experts.4.up_proj" if name == "qwen3_moe" else "block_sparse_moe.experts.3.w3"
    saved = load_file(folder / "adapter_model.safetensors")
    assert saved[f"base_model.model.model.layers.1.{expert}.lora_A.weight"].shape == (2, 16)


def random_adapters(adapted):
    """A B of 0 would hide mistakes."""
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32), adapted.adapters)
    return adapted._replace(adapters=random)


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
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
WINDOW = {"sliding_window": 5}
QWEN_WINDOW = WINDOW | {"model_type": "qwen2", "use_sliding_window": True}


def test_config_of_earlier_transformers():
    assert config_from_huggingface(CONFIG_JSON, remat="layer") == ModelConfig(
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
        remat="layer",
    )


@pytest.mark.parametrize("scaling", [{}, LLAMA3], ids=["plain", "llama3"])
def test_rotations_of_earlier_and_later_transformers(scaling):
    renamed = {name: value for name, value in CONFIG_JSON.items() if not name.startswith("rope_")}
    renamed["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0} | scaling
    config = config_from_huggingface(renamed)
    assert config == config_from_huggingface(CONFIG_JSON | {"rope_scaling": scaling or None})
    assert config.rope_theta == 5000.0
    assert config.rope_scaling == (Llama3Scaling(8.0, 1.0, 4.0, 8192) if scaling else None)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "mistral"} | WINDOW, (5, None)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral"}, (4096, None)),  # what transformers takes a file to mean that does not say
        (WINDOW, (None, None)),  # Llama has none
        (QWEN_WINDOW | {"use_sliding_window": False}, (None, None)),
        (QWEN_WINDOW | {"max_window_layers": 0}, (5, None)),
        (QWEN_WINDOW | {"max_window_layers": 1}, (5, (1, 2))),
        (QWEN_WINDOW, (None, None)),  # from layer 28 on
        (QWEN_WINDOW | {"model_type": "qwen3", "max_window_layers": 2}, (5, (2,))),
        (QWEN_WINDOW | {"model_type": "qwen3_moe", "max_window_layers": 2}, (5, None)),
        (WINDOW | {"model_type": "mixtral"}, (5, None)),
        ({"model_type": "mixtral"}, (None, None)),
        (QWEN_WINDOW | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (5, (0,))),
    ],
)
def test_sliding_windows(change, expected):
    config = config_from_huggingface(CONFIG_JSON | change)
    assert (config.sliding_window, config.sliding_layers) == expected


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"attention_bias": True}, {"qkv_bias", "o_bias"}),
        ({"mlp_bias": True}, {"mlp_bias"}),
        ({"model_type": "mistral", "attention_bias": True, "mlp_bias": True}, set()),  # it has none
        ({"model_type": "qwen2", "mlp_bias": True}, {"qkv_bias"}),
        ({"model_type": "qwen3"}, {"qk_norm"}),
        ({"model_type": "qwen3", "attention_bias": True}, {"qk_norm", "qkv_bias", "o_bias"}),
    ],
)
def test_biases_and_norms(change, fields):
    config = config_from_huggingface(CONFIG_JSON | change)
    assert {name for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if getattr(config, name)} == fields


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings", False),
        ({"num_key_value_heads": None}, "num_key_value_heads", 4),
        ({"head_dim": 16}, "head_dim", 16),
        ({"model_type": "qwen3"}, "head_dim", 128),
        ({"rope_scaling": {"type": "default"}}, "rope_theta", 5000.0),
    ],
    ids=["untied", "one key head a query head", "explicit head_dim", "head_dim of qwen3", "named default rope"],
)
def test_config_fields(change, field, value):
    assert getattr(config_from_huggingface(CONFIG_JSON | change), field) == value


MOE = {"model_type": "qwen3_moe"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (MOE, ExpertsConfig(128, 8, 768, norm_topk_prob=False)),  # what transformers takes a file to mean
        (MOE | {"num_experts": 4, "num_experts_per_tok": 2}, ExpertsConfig(4, 2, 768, norm_topk_prob=False)),
        (MOE | {"num_local_experts": 16, "norm_topk_prob": True}, ExpertsConfig(16, 8, 768, norm_topk_prob=True)),
        (MOE | {"mlp_only_layers": [], "decoder_sparse_step": 1}, ExpertsConfig(128, 8, 768, norm_topk_prob=False)),
        ({"model_type": "mixtral"}, ExpertsConfig(8, 2, 64, norm_topk_prob=True)),
        ({"model_type": "mixtral", "num_local_experts": 3}, ExpertsConfig(3, 2, 64, norm_topk_prob=True)),
        ({"model_type": "qwen3"}, None),
    ],
)
def test_experts(change, expected):
    assert config_from_huggingface(CONFIG_JSON | change).experts == expected


def test_theta_of_a_mixtral_that_says_none():
    rest = {name: value for name, value in CONFIG_JSON.items() if name != "rope_theta"}
    assert config_from_huggingface(rest | {"model_type": "mixtral"}).rope_theta == 1e6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers and decoder_sparse_step are not supported"),
        (MOE | {"decoder_sparse_step": 2}, "mlp_only_layers and decoder_sparse_step are not supported"),
        (MOE | {"num_experts": 4}, "num_experts_per_tok is 8: it must be at most num_experts, 4"),
        (MOE | {"num_experts": "x"}, "num_experts is 'x'"),
        (MOE | {"norm_topk_prob": 1}, "norm_topk_prob is 1: it must be true or false"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "gemma3", "text_config": {}}, "gemma3' is not supported .a model with towers for images"),
        ({"model_type": "gemma3n"}, "gemma3n' is not supported .a model with towers for images"),
        ({"model_type": "pixtral", "vision_config": {"depth": 2}}, "pixtral' is not supported .a model with towers"),
        ({"model_type": "gpt_oss"}, "gpt_oss' is not supported"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is "),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.4}, "partial_rotary_factor .3. must be even"),
        ({"model_type": "phi3", "partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}
            | {"max_position_embeddings": 64},
            "short_factor of the rope scaling has 1 numbers: it must have 4",
        ),
        ({"model_type": None}, "model_type"),
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "proportional"),
        ({"rope_scaling": {"type": "linear"}}, "linear in config.json lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor of the rope scaling is -2.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic in config.json lacks original_max"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: it must be a whole number from 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"hidden_size": "x"}, "hidden_size is 'x'"),
        ({"hidden_size": 10**30}, "hidden_size is 1000"),
        ({"hidden_size": 63}, "must be a multiple of num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"rope_theta": "x"}, "rope_theta is 'x': it must be a finite number above 0"),
        ({"rope_theta": -5}, "rope_theta is -5"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rms_norm_eps": -1000}, "rms_norm_eps is -1000"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': it must be true or false"),
        ({"rope_scaling": "llama3"}, "the rope scaling is 'llama3'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["sliding_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1.5}, "max_window_layers is 1.5"),
    ],
)
def test_config_that_is_not_supported(change, named):
    with pytest.raises(UsageError, match=named) as error:
        config_from_huggingface(CONFIG_JSON | change)
    assert "\n" not in str(error.value)


def test_config_that_lacks_fields():
    with pytest.raises(UsageError, match="lacks vocab_size, hidden_size"):
        config_from_huggingface({"model_type": "llama", "intermediate_size": 1})


@each_golden
def test_a_made_config_says_what_transformers_wrote(name):
    original, (config, _) = read_json(GOLDEN / name / "config.json"), load_golden(name)
    made = config_to_huggingface(config)
    assert config_from_huggingface(made) == config
    # Mistral without a window is Llama.
    same_family = made["model_type"] == original["model_type"]
    assert same_family or (name, made["model_type"]) == ("mistral", "llama")
    shared = made.keys() & original.keys() - (set() if same_family else {"architectures", "model_type"})
    assert all(says(made[key], original[key]) for key in shared)


def says(made, original):
    """Whether something made says all that the original does, and maybe what transformers finds out by itself."""
    if not isinstance(original, dict):
        return made == original
    return original.keys() <= made.keys() and all(says(made[key], value) for key, value in original.items())


@pytest.mark.parametrize(
    "change", [{"o_bias": True}, {"unrotated_layers": (1,), "qk_norm": True}, {"qk_norm": True, "mlp_bias": True}]
)
def test_configurations_that_no_architecture_has(change):
    with pytest.raises(UsageError, match="combination") as error:
        config_to_huggingface(ModelConfig(vocab_size=24, **change))
    assert "\n" not in str(error.value)


# ---- in and out


@pytest.mark.parametrize("max_shard_bytes", [None, 8192], ids=["one file", "several"])
@each_golden
def test_folders_come_back_bit_by_bit(name, max_shard_bytes, tmp_path):
    config, params = load_golden(name)
    folder = save_pretrained(tmp_path / "out", params, config, source=GOLDEN / name, max_shard_bytes=max_shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    bit_for_bit({x: y for file in files for x, y in load_file(file).items()}, original_tensors(name))
    bit_for_bit(load_params(folder, config), params)
    if max_shard_bytes is None:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        count = len(files)
        assert [file.name for file in files] == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        index = read_json(folder / "model.safetensors.index.json")
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
        assert all(sum(x.nbytes for x in load_file(file).values()) <= max_shard_bytes for file in files)


def original_tensors(name):
    return load_file(GOLDEN / name / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype, tmp_path):
    config, params = load_golden("qwen2")
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)
    folder = save_pretrained(tmp_path / "out", params, config, dtype=dtype)
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {np.dtype(dtype)}
    assert read_json(folder / "config.json")["dtype"] == dtype
    exact = load_params(folder, config)
    bit_for_bit(exact, jax.tree.map(lambda x: x.astype(np.float32), rounded))
    half = load_params(folder, config, dtype=jnp.bfloat16)
    bit_for_bit(half, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), rounded))
    # And out again, in the dtype that the parameters have.
    again = save_pretrained(tmp_path / "again", half, config)
    bit_for_bit(load_params(again, config, dtype=jnp.bfloat16), half)


def shardings(kind):
    """A tree that is a prefix of the parameters', or one for all."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("layer", "feature"))
    if kind == "one device":
        return SingleDeviceSharding(jax.devices()[3])
    if kind == "replicated":
        return NamedSharding(mesh, P())
    return {
        "embedding": NamedSharding(mesh, P(("layer", "feature"))),
        "unembedding": NamedSharding(mesh, P(None, "feature")),
        "final_norm": NamedSharding(mesh, P()),
        "layers": NamedSharding(mesh, P("layer", "feature")),  # of every leaf below
    }


@pytest.mark.parametrize("kind", ["tree", "replicated", "one device"])
def test_tensors_go_where_the_shardings_say_and_come_back(kind, tmp_path):
    config, params = load_golden("llama")
    sharded = load_params(GOLDEN / "llama", config, sharding=shardings(kind))
    bit_for_bit(sharded, params)
    assert jax.tree.map(lambda x: x.sharding, sharded) == jax.tree.broadcast(shardings(kind), params)
    if kind == "tree":
        kernel = sharded["layers"]["mlp"]["down_proj"]["kernel"]  # [2, 20, 16]
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, 5, 16)}
    folder = save_pretrained(tmp_path / "out", sharded, config)
    bit_for_bit(load_file(folder / "model.safetensors"), original_tensors("llama"))


@pytest.mark.parametrize(
    ("name", "repeated"),
    [("smollm", "lm_head.weight"), ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq")],
    ids=["the tied matrix again", "frequencies"],
)
def test_tensors_that_are_not_needed(name, repeated, tmp_path):
    config, params = load_golden(name)
    tensors = original_tensors(name)
    save_file(tensors | {repeated: tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    bit_for_bit(load_params(tmp_path, config), params)


def test_text_files_are_taken_over(tmp_path):
    config, params = load_golden("llama")
    source = save_pretrained(tmp_path / "in", params, config, source=GOLDEN / "llama", max_shard_bytes=4000)
    texts = ("tokenizer.json", "chat_template.jinja", "LICENSE", "tokenizer.model")
    for name in texts:
        (source / name).write_text(f"of {name}")
    (source / "pytorch_model.bin").write_text("a pickle")
    (source / "adapter_config.json").write_text("{}")  # with one, the copy would be taken for an adapter
    folder = save_pretrained(tmp_path / "out", params, config, source=source)
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        *texts,
    }
    for name in texts:
        assert (folder / name).read_text() == f"of {name}"
    assert read_json(folder / "config.json") == read_json(GOLDEN / "llama/config.json")


def test_nothing_is_written_over(tmp_path):
    config, params = load_golden("llama")
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UsageError, match="exists") as error:
            save_pretrained(taken, params, config)
        assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_appears_when_it_is_complete(tmp_path, monkeypatch):
    config, params = load_golden("llama")
    save = partial(save_pretrained, tmp_path / "out", params, config, max_shard_bytes=4000)
    written = []

    def full_disk(tensors, file, metadata):
        if len(written) == 2:
            raise OSError("no space left on device")
        written.append(file)
        save_file(tensors, file, metadata)

    with monkeypatch.context() as patched:
        patched.setattr(weights, "save_file", full_disk)
        with pytest.raises(OSError, match="no space left"):
            save()
    assert len(written) == 2
    assert not (tmp_path / "out").exists()
    bit_for_bit(load_params(save(), config), params)  # what the first try left is not in the way
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


# ---- whole folders, and what can be wrong with them


def write_tokenizer(folder, size):
    """A tokenizer of the words t0, t1 …"""
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t5"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.fixture
def folder(tmp_path):
    """A complete model in several files, whose tokenizer has fewer tokens than its vocabulary of 24."""
    config, params = load_golden("llama")
    folder = save_pretrained(tmp_path / "model", params, config, source=GOLDEN / "llama", max_shard_bytes=8000)
    write_tokenizer(folder, 20)
    return folder


def test_a_vocabulary_may_be_larger_than_the_tokenizers(folder):
    loaded = load_pretrained(folder)
    config, params = load_golden("llama")
    assert (loaded.config, loaded.folder) == (config, folder)
    bit_for_bit(loaded.params, params)
    assert loaded.tokenizer.encode("t3 t1") == [3, 1]
    assert loaded.tokenizer.decode([3, 23, 1]) == "t3 t1"  # 23 is an id that only the model has


def test_a_tokenizer_may_know_more_than_the_model(folder):
    write_tokenizer(folder, 30)
    loaded = load_pretrained(folder)
    assert (loaded.eos_ids, loaded.notes) == ((2, 5), ())
    task = partial(text_task, loaded.tokenizer, loaded.eos_ids, vocab_size=24, num_prompts=1, seed=0)
    task = partial(task, reward=lambda rows, texts: [0.0] * len(texts), heldout_share=0.0)
    check_tokens(task([{"prompt": "t3 t23"}]))
    with pytest.raises(UsageError, match="token 24, but the model has the tokens 0 to 23"):
        task([{"prompt": "t3 t24"}])
    # Padding that the model does not know does not occur: another id takes its place.
    loaded.tokenizer.pad_token = "t29"
    assert task([{"prompt": "t3"}]).pad_id == 0
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 28]}')
    loaded = load_pretrained(folder)
    assert loaded.eos_ids == (2, 5)
    assert loaded.notes == ("EOS 28 is left out, since the model has the tokens 0 to 23",)
    options = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(options | {"eos_token": "t26"}))
    for file in ("config.json", "generation_config.json"):
        (folder / file).write_text(json.dumps(read_json(folder / file) | {"eos_token_id": 28}))
    loaded = load_pretrained(folder)
    with pytest.raises(UsageError, match=r"no EOS among .*26, 28.*, so no completion could end"):
        check_tokens(task([{"prompt": "t3"}])._replace(eos_ids=loaded.eos_ids))


def test_end_tokens_are_those_of_all_files(folder):
    for file, ids in (("config.json", 3), ("generation_config.json", [2, 7])):
        (folder / file).write_text(json.dumps(read_json(folder / file) | {"eos_token_id": ids}))
    assert load_pretrained(folder).eos_ids == (2, 3, 5, 7)  # 5 is the tokenizer's
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | {"eos_token_id": None}))
    assert load_pretrained(folder).eos_ids == (5,)


def test_options_that_are_not_the_models(folder):
    loaded = load_pretrained(folder, param_dtype=jnp.bfloat16, dtype="bfloat16", remat="layer", attention="xla")
    assert (loaded.config.dtype, loaded.config.remat, loaded.config.attention) == ("bfloat16", "layer", "xla")
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}


def change_tensors(folder, change):
    """Rewrites the file that holds the first query projection."""
    name = "model.layers.0.self_attn.q_proj.weight"
    file = folder / read_json(folder / "model.safetensors.index.json")["weight_map"][name]
    tensors = load_file(file)
    change(tensors, name)
    save_file(tensors, file)


def remove(folder, pattern):
    for file in folder.glob(pattern):
        file.unlink()


def only_pickles(folder):
    remove(folder, "*.safetensors*")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def cut(folder):
    file = max(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])


def configure(folder, **changes):
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | changes))


def name_files(folder, name):
    index = folder / "model.safetensors.index.json"
    contents = read_json(index)
    contents["weight_map"] = dict.fromkeys(contents["weight_map"], name)
    index.write_text(json.dumps(contents))


def fill(folder, value):
    def change(tensors, name):
        tensors[name] = tensors[name].copy()
        tensors[name][1, 2] = value

    change_tensors(folder, change)


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda folder: remove(folder, "config.json"), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type":'), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda folder: configure(folder, model_type="gpt2"), "'gpt2' is not supported"),
        (lambda folder: configure(folder, num_hidden_layers=1), "does not know.*layers.1"),
        (lambda folder: configure(folder, num_hidden_layers=3), "hold no tensor 'model.layers.2"),
        (lambda folder: remove(folder, "tokenizer*"), "holds no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "holds no tokenizer"),
        (lambda folder: remove(folder, "*.safetensors*"), "holds no .safetensors file"),
        (only_pickles, "convert the model to safetensors"),
        (lambda folder: remove(folder, "model-00002*"), "lacks model-00002-of-.*download it again"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "index.json is not valid JSON"),
        (lambda folder: name_files(folder, 3), "no weight_map of names of files"),
        (lambda folder: name_files(folder, "../model.safetensors"), "no weight_map of names of files"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
            "eos_token_id in .*generation_config.json is",
        ),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [2, -1]}'),
            r"eos_token_id in .*generation_config.json is \[2, -1\]",
        ),
        (lambda folder: fill(folder, np.nan), "holds nan, which no model has"),
        (lambda folder: fill(folder, np.inf), "holds inf, which no model has"),
        (lambda folder: fill(folder, -1e30), r"'model.layers.0.self_attn.q_proj.weight' in .* holds 1e\+30"),
        (cut, r"model-.* is no complete safetensors file .*download it again"),
        (lambda folder: (folder / "model-00001-of-00003.safetensors").write_text("<html>"), "no complete safetensors"),
    ],
    ids=[
        "no config",
        "half a config",
        "a list for a config",
        "another architecture",
        "too many layers",
        "too few layers",
        "no tokenizer",
        "an empty tokenizer",
        "no weights",
        "only pickles",
        "a file missing",
        "half an index",
        "a number for a file",
        "a file elsewhere",
        "a text for an EOS",
        "a negative EOS",
        "weights that are NaN",
        "weights that are infinite",
        "weights that are absurd",
        "a file cut off",
        "a web page",
    ],
)
def test_broken_folders(folder, break_it, named):
    break_it(folder)
    with pytest.raises(UsageError, match=named) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_code_of_a_folder_is_never_run_nor_asked_about(folder, monkeypatch):
    """Of a tokenizer of its own, by somebody who would say yes to anything."""
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    (folder / "own.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')\nclass Own: pass\n")
    remove(folder, "tokenizer.json")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(UsageError, match="holds no tokenizer that transformers can load"):
        load_pretrained(folder)
    assert not (folder / "was_run").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors, name: tensors.pop(name), "hold no tensor '{}'"),
        # Of another shape, with as many elements.
        (lambda tensors, name: tensors.update({name: tensors[name].reshape(4, 64)}), r"'{}' has shape \(4, 64\)"),
        (lambda tensors, name: tensors.update({name: tensors[name].astype(np.int8)}), "'{}' is of dtype I8"),
        (lambda tensors, name: tensors.update({name.replace("q_", "qkv_"): np.ones(3)}), "does not know.*qkv_proj"),
    ],
    ids=["missing", "other shape", "integers", "unknown"],
)
def test_tensors_that_do_not_fit(folder, change, named):
    change_tensors(folder, change)
    with pytest.raises(UsageError, match=named.format("model.layers.0.self_attn.q_proj.weight")) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_every_tensor_is_needed_and_its_shape_checked(name, tmp_path):
    (config, _), tensors = load_golden(name), original_tensors(name)
    for missing, tensor in tensors.items():
        rest = {other: tensor for other, tensor in tensors.items() if other != missing}
        transposed = np.ascontiguousarray(tensor.T) if len(set(tensor.shape)) == 2 else tensor[None]
        for wrong, named in ((rest, "no tensor '{}'"), (rest | {missing: transposed}, "'{}' has shape")):
            save_file(wrong, tmp_path / "model.safetensors")
            with pytest.raises(UsageError, match=named.format(missing)):
                load_params(tmp_path, config)


# ---- names of the hub


@pytest.mark.parametrize("name", ["no/such/folder", "nowhere", "/nowhere", "runs/model.safetensors"])
def test_names_that_are_no_folder(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("went out"))
    with pytest.raises(UsageError, match=f"no folder {name}") as error:
        load_pretrained(name)
    assert "\n" not in str(error.value)


def test_a_name_of_the_hub_that_cannot_be_fetched(monkeypatch):
    def offline(*_, **__):
        raise OSError("cannot reach the hub\nwith many\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UsageError, match=r"someone/model is no folder here, .*: cannot reach the hub$") as error:
        load_pretrained("someone/model")
    assert "\n" not in str(error.value)


def test_a_name_of_the_hub_is_fetched_without_pickles(folder, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(name=name, **options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert model_folder("someone/model") == folder
    assert asked["name"] == "someone/model"
    wanted = [*(file.name for file in folder.iterdir()), "LICENSE", "chat_template.jinja"]
    offered = [*wanted, "pytorch_model.bin", "model.pt", "modeling.py", "model.gguf"]
    matching = huggingface_hub.utils.filter_repo_objects(offered, allow_patterns=asked["allow_patterns"])
    assert list(matching) == wanted


# ---- a real model


@pytest.fixture(scope="module")
def stories():
    return load_pretrained(STORIES)


@pytest.mark.slow
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
def test_tokenizer_round_trip(stories, tmp_path):
    text = "Once upon a time, there was a little girl named Lily."
    folder = save_pretrained(tmp_path / "out", stories.params, stories.config, source=stories.folder)
    for tokenizer in (stories.tokenizer, load_tokenizer(folder)):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True).strip() == text


# ---- memory

MEASURE = """
import sys
from pathlib import Path

import jax.numpy as jnp

from grpo_jax.models.families import config_from_huggingface
from grpo_jax.models.huggingface import save_pretrained
from grpo_jax.models.weights import load_params, read_json

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))

folder, target = map(Path, sys.argv[1:])
jnp.zeros(3).block_until_ready()
before = memory("VmRSS")
config = config_from_huggingface(read_json(folder / "config.json"))
params = load_params(folder, config)
loaded = memory("VmHWM")
save_pretrained(target, params, config)
print(loaded - before, memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_and_saving_hold_the_weights_once(tmp_path):
    config = ModelConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        tie_word_embeddings=False,
    )
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    width, inner = config.hidden_size, config.intermediate_size
    projections = {f"self_attn.{letter}_proj": (width, width) for letter in "qkvo"}
    projections |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    norms = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    shapes = [("model.embed_tokens", (32000, width)), ("lm_head", (32000, width)), ("model.norm", (width,))]
    for layer in range(config.num_hidden_layers):
        shapes += [(f"model.layers.{layer}.{name}", shape) for name, shape in (projections | norms).items()]
    rng, weight_map, weights = np.random.default_rng(0), {}, 0
    for shard in range(6):
        tensors = {f"{name}.weight": rng.random(shape, np.float32) for name, shape in shapes[shard::6]}
        save_file(tensors, source / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{shard}.safetensors")
        weights += sum(tensor.nbytes for tensor in tensors.values())
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert weights > 1e9

    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "out")
    loading, both = (int(number) / weights for number in output.split())
    print(f"weights {weights / 1e9:.2f} GB; peak over them {loading:.3f} loading, {both:.3f} loading and saving")
    assert loading <= 1.3
    assert both <= 1.3
