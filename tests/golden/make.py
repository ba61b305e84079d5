"""Makes the folders beside this file: one random tiny model per family and option, and what transformers computes.

Each holds what `save_pretrained` of transformers wrote, and golden.npz: ids [B, S] and logits [B, S, V] in float32 by
the installed transformers. `llama/adapter` and `phi4_mini/adapter` are LoRA adapters as peft wrote them, and their
logits; `llama/classifier` has one label, and logits [B, 1] of texts that are padded on the right. This script needs
torch, transformers and peft; the tests that read the folders do not.

  python tests/golden/make.py          # all
  python tests/golden/make.py NAME ... # some; "adapter" and "classifier" are those in other folders
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, set_seed
from transformers.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # torch gives the embedding of padding no gradient
}
# Low thetas, so that thirty positions turn far enough to show a mistake.
ROPE = {"rope_type": "default", "rope_theta": 100.0}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = ROPE | {"rope_type": "linear", "factor": 3.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_OPTIONS = {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}
LONGROPE = ROPE | {"rope_type": "longrope"}
# Lists for eight and for six rotated features. Texts of 30 tokens are longer than 16, and not longer than 32.
LONGROPE_8 = LONGROPE | {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.5, 4.0, 6.0]}
LONGROPE_6 = LONGROPE | {"short_factor": [1.1, 1.3, 1.9], "long_factor": [1.5, 3.0, 5.0]}
FOUR = {"num_hidden_layers": 4}
EXPERTS = {"head_dim": 6, "moe_intermediate_size": 8}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
# Low enough to bend many scores.
CAPS = {"query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LOCAL = ROPE | {"rope_theta": 10.0}
PROPORTIONAL = ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5}
KINDS = ["sliding_attention", "full_attention"]
GEMMA4 = {"head_dim": 6, "global_head_dim": 8, "sliding_window": 5, "hidden_size_per_layer_input": 0}
GEMMA4 |= {"vocab_size_per_layer_input": SHAPE["vocab_size"], "num_hidden_layers": 6}
GEMMA4 |= {
    "layer_types": [*KINDS[:1], *KINDS] * 2,
    "rope_parameters": dict(zip(KINDS, (LOCAL, PROPORTIONAL), strict=True)),
}
K_EQ_V = {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
# Name of a folder -> family, and fields that differ from SHAPE and from plain rotations.
MODELS = {
    "llama": ("llama", UNTIED),
    "llama_biases": ("llama", BIASES),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3, "head_dim": 10} | TIED),
    # SmolLM has an odd number of key heads.
    "smollm": ("llama", {"hidden_size": 18, "num_attention_heads": 9, "num_key_value_heads": 3} | TIED),
    "llama_linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", TIED),
    "qwen2_mixed": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2_mscale": ("qwen2", {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}}),
    "qwen3": ("qwen3", {"head_dim": 6} | TIED),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN | YARN_OPTIONS, "head_dim": 16}),
    "qwen3_biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "smollm3": ("smollm3", FOUR | {"no_rope_layers": [1, 0, 1, 1]}),
    "smollm3_window": ("smollm3", FOUR | BIASES | UNTIED | {"use_sliding_window": True, "sliding_window": 5}),
    "olmo2": ("olmo2", {}),
    "olmo2_biases": ("olmo2", {"rope_parameters": YARN, "attention_bias": True} | TIED),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 5, "sliding_window": 5, "attention_bias": True}
        | {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": YARN}},
    ),
    "phi3": ("phi3", {"sliding_window": 7, "num_key_value_heads": 4}),
    "phi3_short": (
        "phi3",
        {"hidden_size": 32, "original_max_position_embeddings": 32, "rope_parameters": LONGROPE_8},
    ),
    "phi3_long": (
        "phi3",
        {"hidden_size": 32, "original_max_position_embeddings": 16, "sliding_window": 9}
        | {"rope_parameters": LONGROPE_8 | {"attention_factor": 1.3}},
    ),
    # Phi-4-mini
    "phi4_mini": (
        "phi3",
        TIED
        | {"hidden_size": 32, "original_max_position_embeddings": 16}
        | {"rope_parameters": LONGROPE_6 | {"partial_rotary_factor": 0.75}},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.7, "logits_scaling": 1.7}
        | BIASES,
    ),
    "glm4": ("glm4", {"head_dim": 8, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}} | UNTIED),
    "gemma": ("gemma", {"head_dim": 6}),
    "gemma2": ("gemma2", {"head_dim": 6, "sliding_window": 5} | CAPS),
    "gemma2_untied": (
        "gemma2",
        UNTIED
        | {
            "num_hidden_layers": 3,
            "head_dim": 6,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 1.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": LINEAR},
            "head_dim": 6,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 9,
        },
    ),
    "gemma3_capped": (
        "gemma3_text",
        UNTIED
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": ROPE},
            "head_dim": 4,
            "sliding_window": 7,
            "attention_bias": True,
            "final_logit_softcapping": 4.0,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS
        | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 7}
        | {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe_plain": ("qwen3_moe", EXPERTS | TIED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe_dense": (
        "qwen3_moe",
        EXPERTS | {"num_hidden_layers": 5, "mlp_only_layers": [0, 3]} | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_hidden_layers": 5, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
        | {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True}
        | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 7}
        | {"max_window_layers": 3},
    ),
    "qwen2_moe_plain": (
        "qwen2_moe",
        TIED
        | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "qkv_bias": False}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        DELTA
        | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
        | {"num_experts": 5, "num_experts_per_tok": 3},
    ),
    "qwen3_next": (
        "qwen3_next",
        DELTA
        | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "mlp_only_layers": [0]}
        | {"num_experts": 5, "num_experts_per_tok": 3},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 3, "head_dim": 6, "intermediate_size": 12, "sliding_window": 7}
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "attention_bias": True}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}},
    ),
    "gemma4": ("gemma4_text", GEMMA4 | K_EQ_V | UNTIED | {"attention_bias": True, "final_logit_softcapping": 4.0}),
    "gemma4_small": (
        "gemma4_text",
        GEMMA4
        | {"num_hidden_layers": 8, "layer_types": KINDS * 4, "num_kv_shared_layers": 4}
        | {"hidden_size_per_layer_input": 10, "use_double_wide_mlp": True},
    ),
    "gemma4_moe": (
        "gemma4_text",
        GEMMA4
        | K_EQ_V
        | {"num_hidden_layers": 3, "layer_types": [*KINDS[:1], *KINDS], "enable_moe_block": True}
        | {"num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 8},
    ),
    "mixtral": (
        "mixtral",
        {"intermediate_size": 8, "head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def make_config(family: str, changes: dict) -> AutoConfig:
    """Returns the configuration of a tiny model."""
    return AutoConfig.for_model(family, **SHAPE | {"rope_parameters": dict(ROPE)} | changes)


PROMPT = 9
# Those without are variants of them, with fewer options.
WITHOUT_GRADIENTS = "llama llama3_rope llama_linear smollm mistral qwen2 qwen2_yarn qwen3 qwen3_yarn smollm3 olmo2"
WITHOUT_GRADIENTS += " gemma2 gemma3 adapter qwen2_mscale phi3_short phi3_long"


def random_ids() -> torch.Tensor:
    """Two sequences, longer than any window and than the context that Llama 3's scaling stretches."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 30)))


def save_golden(folder: Path, model: torch.nn.Module) -> None:
    """Saves logits, and the gradients of the mean −log π of the tokens from number `PROMPT` on."""
    ids = random_ids()
    logits = model.eval()(ids).logits
    np.savez_compressed(folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits.detach().numpy())
    if folder.name in WITHOUT_GRADIENTS.split():
        return
    loss = torch.nn.functional.cross_entropy(logits[:, PROMPT - 1 : -1].flatten(0, 1), ids[:, PROMPT:].flatten())
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    named = {name: torch.zeros_like(x).numpy() for name, x in model.named_buffers() if "layer_scalar" in name}
    named |= {name: x.numpy() for name, x in zip(parameters, gradients, strict=True)}
    np.savez_compressed(folder / "gradients.npz", loss=loss.detach().numpy(), **named)


def randomise(model: torch.nn.Module) -> None:
    """Every leaf random: initial biases of 0 and norms of 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    is_gemma4 = type(model).__name__.startswith("Gemma4")
    has_offsets = type(model).__name__.startswith(("Gemma", "Qwen3_5", "Qwen3Next")) and not is_gemma4
    # Delta nets divide by the lengths of queries, keys and outputs. With larger weights, gradients are 5 times larger,
    # and so is their rounding.
    scale = 0.2 if any("linear_attn" in name for name, _ in model.named_parameters()) else 0.4
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        centre = 0 if has_offsets and "linear_attn" not in name else 1
        centre = 0.5 if is_gemma4 else centre  # with scores q·k, larger norms would make rounding errors grow by layer
        is_scale = "norm" in name or name.endswith("scale")
        parameter.data = centre + 0.3 * noise if is_scale else scale * noise
    for name, buffer in model.named_buffers():
        if "layer_scalar" in name:
            buffer.copy_(0.7 + 0.1 * torch.rand(buffer.shape, generator=generator))


def main() -> None:
    """Writes folders anew."""
    asked = sys.argv[1:] or [*MODELS, "adapter", "classifier"]
    set_seed(0)
    for name, (family, changes) in MODELS.items():
        if name not in asked:
            continue
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(make_config(family, changes), attn_implementation="eager")
        randomise(model)
        model.save_pretrained(folder)
        save_golden(folder, model)
    if "adapter" in asked:
        save_adapter("llama", "q_proj", "v_proj", "o_proj", "down_proj")
        save_adapter("phi4_mini", "qkv_proj", "gate_up_proj", "down_proj")
    if "classifier" in asked:
        save_classifier(HERE / "llama" / "classifier")


def save_adapter(name: str, *targets: str) -> None:
    """LoRA as peft has it."""
    folder = HERE / name / "adapter"
    base = AutoModelForCausalLM.from_pretrained(HERE / name, attn_implementation="eager")
    lora = LoraConfig(r=3, lora_alpha=12, target_modules=list(targets))
    adapted = get_peft_model(base, lora)
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    save_golden(folder, adapted)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": name}, indent=2) + "\n")
    (folder / "README.md").unlink(missing_ok=True)


def save_classifier(folder: Path) -> None:
    """A reward model as transformers has it."""
    config = make_config("llama", {"pad_token_id": 0, "num_labels": 1} | UNTIED)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    randomise(model)
    model.save_pretrained(folder)
    ids = random_ids().clamp(min=1)
    ids[1, 20:] = 0
    with torch.no_grad():
        logits = model.eval()(ids, attention_mask=(ids != 0).long()).logits
    np.savez_compressed(folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy())


if __name__ == "__main__":
    main()
