"""Every family in every use: the table in docs/pretrained.md, whose columns load, save and reward model are elsewhere.

`test_huggingface` has loading and saving, and `test_reward_model` reward models. Sizes and numbers are those of the
folders in `golden`, of each family the one with the most options.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from grpo_jax.devices import Mesh, first_devices, jit_on_devices, place, to_numpy
from grpo_jax.models.files.families import FAMILIES, config_from_huggingface
from grpo_jax.models.files.peft import adaptable, load_adapter, save_adapter
from grpo_jax.models.files.weights import load_params, read_json, tensor_layout
from grpo_jax.models.params.lora import merge, sites
from grpo_jax.models.params.quantised import dequantise_params, quantise_params
from grpo_jax.models.params.tree import join, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.optimizer import has_weight_decay
from grpo_jax.sampling.sampler import Limits, sample_groups
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch

FULLEST = {
    "llama": "llama_biases",
    "mistral": "mistral_window",
    "qwen2": "qwen2_mixed",
    "qwen3": "qwen3_biases",
    "smollm3": "smollm3_window",
    "olmo2": "olmo2_biases",
    "olmo3": "olmo3",
    "phi3": "phi3",
    "phi3 with longrope": "phi4_mini",
    "granite": "granite",
    "glm4": "glm4",
    "gemma": "gemma",
    "gemma2": "gemma2_untied",
    "gemma3_text": "gemma3_capped",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
    "gpt_oss": "gpt_oss",
    "gemma4_text": "gemma4",
    "gemma4_text with inputs of layers": "gemma4_small",
    "gemma4_text with experts": "gemma4_moe",
}


def each_family(*quick):
    """Returns a mark. Families that are not quick are slow."""
    return pytest.mark.parametrize("family", tiny.slow_unless(quick, FULLEST))


def golden(family):
    return tiny.load_golden(FULLEST[family])


@cache
def adapted(family):
    """Returns parameters with adapters that change something."""
    config, params = golden(family)
    return tiny.randomly_adapted(params, scale=0.1, targets=adaptable(config))


N, G, P, T = 4, 2, 5, 6


def prompts():
    return tiny.ragged_prompts([5, 3, 1, 4], 24)


def a_batch(completion_ids):
    temperature = np.full((N, G), 0.7, np.float32)
    return Batch(prompts(), completion_ids, np.ones((N, G, T), bool), temperature)


def test_all_families_are_here():
    files = (read_json(tiny.GOLDEN / name / "config.json") for name in FULLEST.values())
    assert {file["model_type"] for file in files} == FAMILIES.keys()


@each_family("qwen3_5_text", "gpt_oss", "gemma4_text with experts")
def test_weight_decay_applies_only_to_matrices(family):
    config, params = golden(family)
    tensors = jax.tree_util.tree_leaves_with_path(tensor_layout(config))
    for (path, tensor), decays in zip(tensors, jax.tree.leaves(has_weight_decay(params)), strict=True):
        is_matrix = len(tensor.shape) > 1 and not tensor.name.endswith("bias")  # those of experts are in one tensor
        assert decays == (is_matrix and "router" not in jax.tree_util.keystr(path)), tensor.name


@each_family("llama", "qwen3_moe")
def test_peft_folders_come_back(family, tmp_path):
    params, layers = adapted(family), {}
    for block, name in sites(params.adapters["layers"], ("k_proj", "up_proj", "o_proj")):
        layers.setdefault(block, {})[name] = params.adapters["layers"][block][name]
    params = params._replace(adapters={"layers": layers})
    folder = save_adapter(tmp_path / "out", golden(family)[0], params, base="base")
    again = load_adapter(folder, golden(family)[0], params.base)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), *map(jax.jit(merge), (again, params)))
    modules = set(read_json(folder / "adapter_config.json")["target_modules"])
    assert modules & {"k_proj", "qkv_proj"}
    if family == "qwen3_moe":
        name = "base_model.model.model.layers.1.mlp.experts.4.up_proj.lora_A.weight"
        assert load_file(folder / "adapter_model.safetensors")[name].shape == (2, 16)


@pytest.mark.slow
@each_family()
def test_bfloat16_scoring_is_close_to_the_sampler(family):
    """Completions of 32 tokens that end at random, of a random model: the table in docs/pretrained.md."""
    config, params = golden(family)
    policy = decoder_policy(replace(config, dtype="bfloat16"))
    sample = tiny.sampler_of(policy, max_tokens=32, eos_ids=(5,))
    sampled = jax.device_get(sample(params, prompts(), tiny.row_numbers(N, 16), jax.random.key(0)))
    batch = Batch(prompts(), sampled.completion_ids, sampled.completion_mask, np.ones((N, 16), np.float32))
    logprobs = jax.jit(partial(score_completion_tokens, policy))(params, batch).logprobs
    difference = np.abs(logprobs - sampled.sampler_logprobs)[sampled.completion_mask]
    print(
        f"\n{family}: {difference.size} tokens, mean exp {np.exp(difference).mean():.4f}, most {difference.max():.3f}"
    )
    assert np.exp(difference).mean() < 1.05
    # A token that goes to another expert may differ by any number. So may one with outputs of a delta net close to 0,
    # which are then normalised.
    if config.experts is None and config.delta is None:
        assert difference.max() < 0.5


@pytest.mark.slow
@each_family()
@pytest.mark.parametrize("kind", ["none", "int8", "nf4"])
def test_adapters_sample_score_merge_and_export_alike(family, kind, tmp_path):
    """On codes the model computes with the numbers that they stand for."""
    config, params = golden(family)[0], adapted(family)
    policy, used, plain, other = decoder_policy(config), params, params, params.base
    if kind != "none":
        used = params._replace(base=load_params(tiny.GOLDEN / FULLEST[family], config, quantize=kind))
        plain, other = used._replace(base=dequantise_params(used.base)), params

    sample = tiny.sampler_of(policy, max_tokens=T, eos_ids=(99,))
    score = jax.jit(lambda params, ids: score_completion_tokens(policy, params, a_batch(ids)).logprobs)
    sampled = sample(used, prompts(), tiny.row_numbers(N, G), jax.random.key(0), 0.7, Limits(top_k=9))
    scores = score(used, sampled.completion_ids)
    np.testing.assert_allclose(sampled.sampler_logprobs, scores, atol=1e-4)
    np.testing.assert_allclose(score(merge(plain), sampled.completion_ids), scores, atol=1e-4)
    assert np.abs(score(other, sampled.completion_ids) - scores).max() > 1e-2
    folder = save_adapter(tmp_path / "out", golden(family)[0], used, base="base")
    again = load_adapter(folder, golden(family)[0], params.base)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), merge(again), merge(params))


@pytest.mark.slow
@each_family()
def test_packed_texts_are_as_each_alone(family):
    config, params = golden(family)
    packed = jax.jit(partial(tiny.states_of_texts, decoder_policy(config)))
    ids = np.random.default_rng(4).integers(0, config.vocab_size, (1, 16), dtype=np.int32)
    hidden = packed(params, ids, np.array([[1] * 9 + [2] * 6 + [0]]))
    for start, end in ((0, 9), (9, 15)):
        alone = np.zeros((1, 16), np.int32)
        alone[:, : end - start] = ids[:, start:end]
        states = packed(params, alone, (np.arange(16) < end - start)[None])
        np.testing.assert_allclose(states[0, : end - start], hidden[0, start:end], atol=1e-5)


def a_gradient(policy, batch):
    """params -> gradients of a weighted sum of log-probabilities, and the log-probabilities."""

    def loss(params):
        logprobs = score_completion_tokens(policy, params, batch).logprobs
        return jnp.sum(jnp.linspace(-1, 2, logprobs.size).reshape(logprobs.shape) * logprobs), logprobs

    return jax.grad(loss, has_aux=True)


@each_family()
@pytest.mark.parametrize("kind", ["eight devices", "xla", "tokamax"])
def test_devices_and_attention_do_not_change_gradients(family, kind):
    config, params = golden(family)
    if kind == "tokamax":
        pytest.importorskip("tokamax")
    has_sinks, is_capped = config.attention_sinks, config.attn_logit_softcapping is not None
    if {"xla": has_sinks or is_capped, "tokamax": has_sinks}.get(kind):
        pytest.skip("refused: this attention does not compute it")
    batch = a_batch(np.random.default_rng(5).integers(3, 24, (N, G, T)).astype(np.int32))

    def gradient_with(attention):
        return a_gradient(decoder_policy(replace(config, attention=attention)), batch)

    gradient = gradient_with("shared")
    expected, logprobs = jax.jit(gradient)(params)
    if kind != "eight devices":
        actual, actual_logprobs = jax.jit(gradient_with(kind))(params)
    else:
        devices = first_devices(Mesh(2, 2, 2))
        actual, actual_logprobs = to_numpy(jit_on_devices(gradient, devices=devices)(place(params, devices)))
    largest = max(np.linalg.norm(x) for x in jax.tree.leaves(expected))
    # Between transformers and one device, logits of these random models differ by up to 6e-5.
    np.testing.assert_allclose(np.sum(actual_logprobs), np.sum(logprobs), rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5 * largest), actual, expected)


@pytest.mark.slow
@each_family()
@pytest.mark.parametrize("kind", ["none", "nf4"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_programs_are_made_for_accelerators(family, kind, platform, monkeypatch):
    """Sampling and a gradient in bfloat16 are lowered, as far as that works without the machine."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if platform == "cuda" else platform)
    policy, params = decoder_policy(replace(golden(family)[0], dtype="bfloat16")), golden(family)[1]
    if kind != "none":
        params = adapted(family)._replace(base=quantise_params(params, kind))

    def both(trained, frozen, prompt, batch, key):
        def loss(trained):
            return jnp.sum(score_completion_tokens(policy, join(trained, frozen), batch).logprobs)

        options = {"max_tokens": T, "temperature": 1.0, "eos_ids": (2,), "pad_id": 0}
        sampled = sample_groups(policy, join(trained, frozen), prompt, tiny.row_numbers(N, G), key, **options)
        return jax.grad(loss)(trained), sampled

    arguments = *split(params), prompts(), a_batch(np.zeros((N, G, T), np.int32)), jax.random.key(0)
    program = jax.jit(both).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    assert "while" in program


@pytest.mark.slow
@each_family()
def test_cudnns_attention_is_lowered_forward_and_backward(family, monkeypatch):
    """Heads have sizes that it supports. JAX asks for the library, which is not here, before it lowers."""
    config = replace(golden(family)[0], dtype="bfloat16", head_dim=16, rope_scaling=None)
    if config.attn_logit_softcapping is not None or config.attention_sinks:
        pytest.skip("refused: it has no cap and no sinks")
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{module}.check_compute_capability", lambda capability: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    policy, batch = decoder_policy(replace(config, attention="cudnn")), a_batch(np.zeros((N, G, T), np.int32))
    params = jax.eval_shape(policy.init, jax.random.key(0))
    program = jax.jit(a_gradient(policy, batch)).trace(params).lower(lowering_platforms=("cuda",)).as_text()
    # Of prompts and of completions, there and back, in at least one layer.
    for name in ("__cudnn$fmhaScaleBiasSoftmax(", "__cudnn$fmhaScaleBiasSoftmaxBackward("):
        assert program.count(name) >= 2, name


@pytest.mark.slow
@each_family()
def test_tokamax_lowers_for_tpu_forward_and_backward(family):
    tokamax = pytest.importorskip("tokamax")
    config = replace(golden(family)[0], dtype="bfloat16", head_dim=128, rope_scaling=None)
    config = replace(config, global_heads=config.global_heads and config.global_heads._replace(head_dim=128))
    if config.attention_sinks:
        pytest.skip("refused: it has no sinks")
    policy, batch = decoder_policy(replace(config, attention="tokamax")), a_batch(np.zeros((N, G, T), np.int32))
    params = jax.eval_shape(policy.init, jax.random.key(0))
    with tokamax.config.cross_compile(True):
        program = jax.jit(a_gradient(policy, batch)).trace(params).lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("tpu_custom_call") >= 6  # of prompts and of completions: forward, and two backward


def test_unsupported_attentions_are_refused_by_name():
    file = read_json(tiny.GOLDEN / "gemma2" / "config.json")
    assert config_from_huggingface(file).attention == "auto"
    for kind in ("xla", "cudnn"):
        with tiny.refused(f'"{kind}" does not compute attn_logit_softcapping'):
            config_from_huggingface(file, attention=kind, dtype="bfloat16")
