"""Makes the folders beside this file: one random tiny model per family and option, and what transformers computes.

Each holds what `save_pretrained` of transformers wrote, and golden.npz: ids [B, S] and logits [B, S, V] in float32 by
the installed transformers. `gradients` holds those of its cross entropy. `llama/adapter` is a LoRA adapter as peft wrote it, and its logits; `llama/classifier` has
one label, and logits [B, 1] of texts that are padded on the right. This script needs torch, transformers and peft; the
tests that read the folders do not.

  python tests/golden/make.py
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    set_seed,
)
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
MODELS = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=ROPE, tie_word_embeddings=False),
    "llama_biases": LlamaConfig(**SHAPE, rope_parameters=ROPE, attention_bias=True, mlp_bias=True),
    "llama3_rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3, head_dim=10, tie_word_embeddings=True),
    # SmolLM: an odd number of key heads, tied.
    "smollm": LlamaConfig(
        **SHAPE | {"hidden_size": 18, "num_attention_heads": 9, "num_key_value_heads": 3},
        rope_parameters=ROPE,
        tie_word_embeddings=True,
    ),
    "mistral": MistralConfig(**SHAPE, rope_parameters=ROPE, sliding_window=None),
    "mistral_window": MistralConfig(**SHAPE, rope_parameters=ROPE, sliding_window=7),
    "qwen2": Qwen2Config(**SHAPE, rope_parameters=ROPE, tie_word_embeddings=True),
    "qwen2_mixed": Qwen2Config(
        **SHAPE, rope_parameters=ROPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SHAPE, rope_parameters=ROPE, head_dim=6, tie_word_embeddings=True),
    "qwen3_biases": Qwen3Config(**SHAPE, rope_parameters=ROPE, head_dim=8, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE,
        rope_parameters=ROPE,
        head_dim=6,
        **{"attention_bias": True, "use_sliding_window": True, "sliding_window": 7},
        **{"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "norm_topk_prob": True},
    ),
    "qwen3_moe_plain": Qwen3MoeConfig(
        **SHAPE,
        rope_parameters=ROPE,
        head_dim=6,
        tie_word_embeddings=True,
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    ),
    "mixtral": MixtralConfig(
        **SHAPE | {"intermediate_size": 8},
        rope_parameters=ROPE,
        **{"head_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}

WITH_GRADIENTS = ("qwen3_moe", "mixtral")


def random_ids() -> torch.Tensor:
    """Two sequences, longer than any window and than the context that Llama 3's scaling stretches."""
    return torch.from_numpy(np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 30)))


def save_golden(folder: Path, model: torch.nn.Module) -> None:
    """What the model computes."""
    ids = random_ids()
    with torch.no_grad():
        logits = model.eval()(ids).logits
    np.savez_compressed(folder / "golden.npz", ids=ids.numpy().astype(np.int32), logits=logits.numpy())


def save_gradients(folder: Path, model: torch.nn.Module) -> None:
    """Those of the mean cross entropy of the next token, under the names of the parameters, as model.safetensors."""
    ids = random_ids()
    model.eval()(ids, labels=ids).loss.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder)
    for file in folder.glob("*.json"):
        file.unlink()


def randomise(model: torch.nn.Module) -> None:
    """Every leaf random: initial biases of 0 and norms of 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else 0.4 * noise


def main() -> None:
    """Writes all folders anew."""
    set_seed(0)
    for name, config in MODELS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomise(model)
        model.save_pretrained(folder)
        save_golden(folder, model)
        if name in WITH_GRADIENTS:
            save_gradients(folder / "gradients", model)
    base = AutoModelForCausalLM.from_pretrained(HERE / "llama", attn_implementation="eager")
    lora = LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    adapted = get_peft_model(base, lora)
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(HERE / "llama" / "adapter")
    save_golden(HERE / "llama" / "adapter", adapted)
    file = HERE / "llama" / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "llama"}, indent=2) + "\n")
    (HERE / "llama" / "adapter" / "README.md").unlink(missing_ok=True)
    save_classifier(HERE / "llama" / "classifier")


def save_classifier(folder: Path) -> None:
    """A reward model as transformers has it."""
    config = LlamaConfig(**SHAPE, rope_parameters=ROPE, num_labels=1, pad_token_id=0, tie_word_embeddings=False)
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
