"""Writes models that were not loaded from a folder: makes their config.json, which `families` reads back."""

import tempfile
from pathlib import Path
from typing import Any

from grpo_jax.errors import UsageError
from grpo_jax.models.config import Heads, ModelConfig
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.files.families import (
    FAMILIES,
    NOT_IN_FILES,
    SAME,
    SIZES,
    Fields,
    File,
    config_class,
    config_from_huggingface,
)
from grpo_jax.models.files.weights import write_model_json
from grpo_jax.models.huggingface import save_pretrained


def save_new_model(folder: str | Path, params: Params, config: ModelConfig, **options: Any) -> Path:
    """Writes a folder that transformers and `load_pretrained` can load, without a tokenizer.

    Args:
      folder, params, config: See `save_pretrained`.
      **options: Further arguments of `save_pretrained`.

    Returns:
      The folder.
    """
    with tempfile.TemporaryDirectory() as source:
        describe_new_model(Path(source), config)
        return save_pretrained(folder, params, config, source=source, **options)


def describe_new_model(folder: Path, config: ModelConfig) -> None:
    """Writes config.json into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model_json(folder / "config.json", config_to_huggingface(config))


def config_to_huggingface(config: ModelConfig) -> File:
    """Makes the config.json of a model that was not loaded from one. `config_from_huggingface` reads it back.

    Args:
      config: The configuration of the decoder.

    Returns:
      The contents of config.json, with `rope_parameters` as in transformers 5. The family is `config.model_type`, or
      else the first one that has this configuration.

    Raises:
      UsageError: No supported family has this combination of fields.
    """
    not_in_the_file: Fields = {name: getattr(config, name) for name in (*NOT_IN_FILES, "longest_text")}

    def reads_back(written: File) -> bool:
        try:
            return config_from_huggingface(written, **not_in_the_file) == config
        except UsageError:
            return False

    for model_type in sorted(FAMILIES, key=lambda name: name != config.model_type):
        names = {"architectures": [f"{FAMILIES[model_type].name}ForCausalLM"], "model_type": model_type}
        if reads_back(written := names | _file(model_type, config)):
            return written
    raise UsageError(f"no model of transformers has this combination of options: {config}")


def _file(model_type: str, config: ModelConfig) -> File:
    """Returns the entries of a config.json of this family, by the names of its class in transformers."""
    known = config_class(model_type)().to_dict()
    rope: dict[str, Any] = _rope_parameters(config)
    written = {name: getattr(config, name) for name in (*SIZES, *SAME, "sliding_window")}
    written |= config.experts._asdict() | {"num_local_experts": config.experts.num_experts} if config.experts else {}
    written |= {
        "hidden_activation": config.hidden_act,
        "vocab_size_per_layer_input": config.vocab_size,
        "attention_bias": config.qkv_bias,
        "qkv_bias": config.qkv_bias,
        "use_sliding_window": config.sliding_window is not None,
        "layer_types": [
            "linear_attention" if form.mixer == "delta" else "sliding_attention" if window else "full_attention"
            for form, window in zip(config.forms, config.windows, strict=True)
        ],
        "no_rope_layers": [int(rotation is not None) for rotation in config.rotations],
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_only_layers": list(config.dense_layers),
    }
    if "partial_rotary_factor" in known["rope_parameters"]:
        rope["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope_scaling:  # Phi has it beside `rope_parameters`
        written["original_max_position_embeddings"] = config.rope_scaling.original_max_position_embeddings
    if heads := config.global_heads:
        shape = {name: getattr(heads, name) for name in Heads._fields[:2]}
        written["per_layer_config"] = {str(i): shape for i, window in enumerate(config.windows) if window is None}
        written["attention_k_eq_v"] = heads.keys_are_values
        rope |= {"rope_type": "proportional", "partial_rotary_factor": heads.turning}
    if config.experts and config.experts.has_norms:
        written |= {"enable_moe_block": True, "top_k_experts": config.experts.num_experts_per_tok}
    if config.delta:
        written |= {f"linear_{name}": value for name, value in config.delta._asdict().items()}
    # transformers 4 reads these names, and no `rope_parameters`.
    always: File = {name: written[name] for name in ("head_dim", "num_experts") if name in written}
    always |= {"rope_scaling": rope} if config.rope_scaling else {}
    always |= {name: share for name, share in rope.items() if name == "partial_rotary_factor"}
    written = {name: value for name, value in written.items() if name in known and value is not None}
    if (known.get("pad_token_id") or 0) >= config.vocab_size:
        written["pad_token_id"] = None
    if "full_attention" in known["rope_parameters"]:
        local = config.rope_local_base_freq or config.rope_theta
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
        always |= {"rope_local_base_freq": local} if model_type == "gemma3_text" else {}
    return written | always | {"rope_parameters": rope, "rope_theta": config.rope_theta}


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Inverts `_rope` without the share of features that turn, in the format of transformers 5."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        fields = {x: y for x, y in scaling._asdict().items() if y != scaling._field_defaults.get(x, ...)}
        if scaling.rope_type in ("linear", "dynamic"):
            del fields["original_max_position_embeddings"]  # transformers does not know it for these
        rope |= {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return rope
