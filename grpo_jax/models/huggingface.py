"""A Hugging Face folder as configuration, parameters and tokenizer. No torch, no pickle."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig, config_from_huggingface
from grpo_jax.models.transformer import Params


class Pretrained(NamedTuple):
    """What a folder holds."""

    config: ModelConfig
    params: Params  # float32
    tokenizer: Any  # of transformers
    eos_ids: tuple[int, ...]  # the union of config.json, generation_config.json and tokenizer


def load_pretrained(folder: str | Path, **overrides: Any) -> Pretrained:
    """Loads config.json, *.safetensors and the tokenizer of a local folder.

    Args:
      folder: as `save_pretrained` of transformers writes it.
      **overrides: fields of ModelConfig, such as dtype and remat.

    Returns:
      The model.

    Raises:
      UsageError: what is missing or not supported, in one sentence.
    """
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} holds no config.json: name a folder of a Hugging Face model")
    raw = json.loads((folder / "config.json").read_text())
    config = config_from_huggingface(raw, **overrides)
    params = params_from_tensors(_read_tensors(folder), config)
    # Importing transformers takes seconds, and only this needs it; that torch is missing is no news.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"{folder} holds no tokenizer that transformers can load: copy tokenizer.json into it"
        ) from error
    generation = folder / "generation_config.json"
    generation_config = json.loads(generation.read_text()) if generation.exists() else {}
    ids = _as_set(raw.get("eos_token_id")) | _as_set(generation_config.get("eos_token_id"))
    eos_ids = tuple(sorted(ids | _as_set(tokenizer.eos_token_id)))
    return Pretrained(config, params, tokenizer, eos_ids)


def params_from_tensors(tensors: dict[str, np.ndarray], config: ModelConfig) -> Params:
    """Tensors with Hugging Face names as the scanned decoder's parameters.

    Args:
      tensors: name -> array; matrices are [out, in].
      config: the decoder's shape.

    Returns:
      Parameters, float32, layers stacked.

    Raises:
      UsageError: names a tensor that is missing, is not known, or has the wrong shape.
    """
    # Older files keep the rotary frequencies, which follow from the configuration.
    left = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    width, features = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in left:
            raise UsageError(f"the model's safetensors files hold no tensor {name!r}")
        tensor = left.pop(name)
        if tensor.shape != shape:
            raise UsageError(f"tensor {name!r} has shape {tensor.shape}, but config.json asks for {shape}")
        return np.asarray(tensor, np.float32)

    def stacked(name: str, shape: tuple[int, ...], arrange: Callable[[np.ndarray], np.ndarray]) -> jnp.ndarray:
        layers = range(config.num_hidden_layers)
        return jnp.asarray(np.stack([arrange(take(f"model.layers.{i}.{name}", shape)) for i in layers]))

    def into_heads(name: str, count: int) -> jnp.ndarray:
        shape = (count * features, width)
        return stacked(f"self_attn.{name}.weight", shape, lambda x: x.T.reshape(width, count, features))

    attention = {
        "q_proj": into_heads("q_proj", heads),
        "k_proj": into_heads("k_proj", kv_heads),
        "v_proj": into_heads("v_proj", kv_heads),
        "o_proj": stacked(
            "self_attn.o_proj.weight", (width, heads * features), lambda x: x.T.reshape(heads, features, width)
        ),
    }
    if config.qkv_bias:
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            bias = stacked(f"self_attn.{name}_proj.bias", (count * features,), np.asarray)
            attention[f"{name}_bias"] = bias.reshape(-1, count, features)
    inner = config.intermediate_size
    params = {
        "embedding": jnp.asarray(take("model.embed_tokens.weight", (config.vocab_size, width))),
        "final_norm": {"scale": jnp.asarray(take("model.norm.weight", (width,)))},
        "layers": {
            "attention": attention,
            "input_norm": {"scale": stacked("input_layernorm.weight", (width,), np.asarray)},
            "post_attention_norm": {"scale": stacked("post_attention_layernorm.weight", (width,), np.asarray)},
            "mlp": {
                "gate_proj": stacked("mlp.gate_proj.weight", (inner, width), np.transpose),
                "up_proj": stacked("mlp.up_proj.weight", (inner, width), np.transpose),
                "down_proj": stacked("mlp.down_proj.weight", (width, inner), np.transpose),
            },
        },
    }
    if config.tie_word_embeddings:
        left.pop("lm_head.weight", None)  # some writers repeat the tied matrix
    else:
        params["unembedding"] = jnp.asarray(take("lm_head.weight", (config.vocab_size, width)))
    if left:
        raise UsageError(f"the model's safetensors files hold tensors that this decoder does not know: {sorted(left)}")
    return params


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no .safetensors file: convert the model to safetensors first")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        with safe_open(file, framework="flax") as opened:  # reads bfloat16 too, which NumPy alone does not
            tensors |= {name: np.asarray(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _as_set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
