"""Logits and gradients of transformers and PEFT for the models in golden/: see golden/make.py."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import GOLDEN, decoded_states, load_golden, randomly_adapted, slow_unless

from grpo_jax.functional import token_logprobs
from grpo_jax.functional.numerics import softcapped
from grpo_jax.models.decoder.transformer import layers_with
from grpo_jax.models.files.peft import adaptable, load_adapter, save_adapter
from grpo_jax.models.huggingface import save_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.planning.memory import num_params

NAMES = sorted(file.parent.name for file in GOLDEN.glob("*/config.json"))
WITH_GRADIENTS = sorted(file.parent.name for file in GOLDEN.glob("*/gradients.npz"))
# Together the quick ones have every kind of norm, bias, window, cap and rotation.
QUICK_GRADIENTS = ("gemma3_capped",)
QUICK = ("llama/adapter", "llama3_rope", "llama_linear", "qwen3_yarn", "qwen2_mscale", "phi4_mini")
QUICK = (*QUICK, "mixtral", "smollm3_window")
QUICK_DECODED = ("gemma2_untied", "olmo2_biases")
DECODED = (*WITH_GRADIENTS, "gemma3", "qwen3")


@cache
def logits_fn(config, group_size=1):
    """(params, ids [B, S], length of the prompt) -> logits [B, S - length, V] that predict the tokens behind it."""
    policy = decoder_policy(config)

    @jax.jit
    def logits(params, *batch):
        return softcapped(policy.hidden(params, *batch)[:, -1] @ policy.unembedding(params).T, policy.softcap)

    return lambda params, ids, length: logits(params, *padded(ids, length, group_size))


def padded(ids, length, group_size=1):
    """Returns a prompt of `length` tokens behind three of padding, and the rest as the last of its completions."""
    prompt, rest = np.pad(ids[:, :length], ((0, 0), (3, 0))), ids[:, length:]
    completions = np.stack([rest[:, ::-1]] * (group_size - 1) + [rest], axis=1)
    return PromptTokens(prompt, np.broadcast_to(np.arange(length + 3) >= 3, prompt.shape)), completions


def golden_of(name):
    """Returns configuration, parameters, and arrays of transformers."""
    folder, _, adapter = name.partition("/")
    config, params = load_golden(folder)
    return (
        config,
        load_adapter(GOLDEN / name, config, params) if adapter else params,
        np.load(GOLDEN / name / "golden.npz"),
    )


def with_fused_experts(name, tensors):
    """Returns tensors by names, with one for all experts of a layer, which is how transformers 5 holds them."""
    config, tensors = load_golden(name)[0], dict(tensors)
    if config.experts.swiglu_limit or config.experts.has_norms:  # the folders hold them so too
        return tensors
    module, *projections = ("mlp", "gate_proj", "up_proj", "down_proj")
    if name == "mixtral":
        module, *projections = ("block_sparse_moe", "w1", "w3", "w2")
    for layer in layers_with(config, "experts"):
        stem, numbers = f"model.layers.{layer}", range(config.experts.num_experts)
        gate, up, down = (
            np.stack([tensors.pop(f"{stem}.{module}.experts.{i}.{projection}.weight") for i in numbers])
            for projection in projections
        )
        tensors[f"{stem}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{stem}.mlp.experts.down_proj"] = down
        tensors[f"{stem}.mlp.gate.weight"] = tensors.pop(f"{stem}.{module}.gate.weight")
    return tensors


@pytest.mark.parametrize("name", slow_unless(QUICK, [*NAMES, "llama/adapter", "phi4_mini/adapter"]))
def test_logits(name):
    config, params, golden = golden_of(name)
    logits = logits_fn(config, 2)(params, golden["ids"], 9)
    np.testing.assert_allclose(logits, golden["logits"][:, 8:-1], atol=1e-4)


@pytest.mark.parametrize("name", slow_unless(QUICK_GRADIENTS, WITH_GRADIENTS))
def test_logits_and_gradients(name, tmp_path):
    """Gradients are those of the mean −log π of the second of two completions that share a prompt."""
    config, params, golden = golden_of(name)
    expected, policy = np.load(GOLDEN / name / "gradients.npz"), decoder_policy(config)

    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, batch):
        hidden, unembedding = policy.hidden(params, *batch)[:, -1], policy.unembedding(params)
        logprobs = token_logprobs(hidden, unembedding, batch[1][:, -1], softcap=policy.softcap).logprobs
        return -jnp.mean(logprobs), softcapped(hidden @ unembedding.T, policy.softcap)

    (value, logits), gradients = jax.jit(loss)(params, padded(golden["ids"], 9, 2))
    np.testing.assert_allclose(logits, golden["logits"][:, 8:-1], atol=1e-4)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-5)
    folder = save_pretrained(tmp_path / "gradients", gradients, config, source=GOLDEN / name)
    least = 1e-3 * max(np.linalg.norm(x) for x in expected.values())  # the bias of keys that nobody rotates has none
    tensors = load_file(folder / "model.safetensors")
    for tensor, gradient in (with_fused_experts(name, tensors) if config.experts else tensors).items():
        norm = max(np.linalg.norm(expected[tensor]), least)
        assert np.linalg.norm(gradient - expected[tensor]) <= 1e-4 * norm, tensor


@pytest.mark.parametrize("name", slow_unless(QUICK_DECODED, DECODED))
def test_logits_one_token_after_the_other(name):
    config, params, golden = golden_of(name)
    policy = decoder_policy(config)
    states = jax.jit(partial(decoded_states, policy))(params, *padded(golden["ids"], 9))[:, 0]
    logits = softcapped(states @ policy.unembedding(params).T, policy.softcap)
    np.testing.assert_allclose(logits, golden["logits"][:, 8:], atol=1e-4)


@pytest.mark.parametrize("name", slow_unless(("gemma4_small",), [name for name in NAMES if "gemma4" in name]))
def test_reply_logits_are_right_after_another_completion_leaves(name):
    """Five tokens are decoded and eight are appended at once. Then eight are appended to the second text only."""
    config, params, golden = golden_of(name)
    policy, (prompt, completions) = decoder_policy(config), padded(golden["ids"], 9)

    @jax.jit
    def logits(params):
        _, decode, cache = policy.prefill(params, prompt, 1, 13)

        def decoded(step, cache):
            ids = jax.lax.dynamic_index_in_dim(jnp.asarray(completions), step, axis=2, keepdims=False)
            return decode(cache, ids, step)[1]

        cache = jax.lax.fori_loop(0, 5, decoded, cache)
        lengths, append = jnp.full((2, 1), 5), policy.decoder(params)
        first, cache = append(cache, completions[:, :, 5:13], lengths, lengths + 3)
        cache = policy.widen(policy.select(cache, jnp.array([1])), 21)
        rest, _ = append(cache, completions[1:, :, 13:], lengths[1:] + 8, lengths[1:] + 3)
        return softcapped(jnp.concatenate([first[1, 0], rest[0, 0]]) @ policy.unembedding(params).T, policy.softcap)

    np.testing.assert_allclose(logits(params), golden["logits"][1, 14:], atol=1e-4)


@pytest.mark.slow
def test_parameters_are_counted():
    for name in NAMES:
        config, params = load_golden(name)
        assert num_params(config) == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["llama", *WITH_GRADIENTS])
def test_peft_reads_a_saved_adapter(name, tmp_path):
    """PEFT reads an expert's adapter by the name of transformers 4, and makes one of all experts of it."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    config, params = load_golden(name)
    adapted = randomly_adapted(params, alpha=3.0, targets=adaptable(config))
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 30))
    base = str(GOLDEN / name)
    folder = save_adapter(tmp_path / "out", config, adapted, base=base)
    with torch.no_grad():  # only the eager attention has every kind of mask
        options = {"attn_implementation": "eager", "dtype": "float32"}
        model = peft.AutoPeftModelForCausalLM.from_pretrained(folder, **options).eval()
        expected = model(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(logits_fn(config)(adapted, ids, 9), expected[:, 8:-1], atol=1e-4)
