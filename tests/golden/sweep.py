"""Changes each key of each family's config.json, and records what transformers computes: `sweep.npz` beside this file.

A case is a folder in golden/, the path of a key in its config.json, and another value. The record holds for each case
the tensors of the file that transformers saves with this config.json, and the first logits at the last token. Weights
follow from the names of tensors. `tests/models/test_config_sweep.py` makes the same folders without torch.

It needs torch and transformers, and takes about 15 seconds for a folder.

  python tests/golden/sweep.py          # all
  python tests/golden/sweep.py NAME ... # some; the record of the others stays
"""

import copy
import json
import logging
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
RECORD = HERE / "sweep.npz"
IDS = np.random.default_rng(0).integers(0, 12, (1, 30), np.int32)  # a changed vocabulary has them too
NUM_LOGITS = 8
LARGEST = 2_000_000  # parameters of a case; a missing size may have a default that is much larger
ABSENT = "(absent)"  # instead of a value: the key is removed
# Of each family the folders with the most options.
BASES = [
    "llama_biases",
    "mistral_window",
    "qwen2_mixed",
    "qwen3_biases",
    "smollm3_window",
    "olmo2_biases",
    "olmo3",
    "granite",
    "phi4_mini",
    "glm4",
    "gemma",
    "gemma2_untied",
    "gemma3_capped",
    "mixtral",
    "qwen2_moe_plain",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
    "gemma4",
    "gemma4_small",
    "gemma4_moe",
]

SCALINGS = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.5, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16, "mscale": 1.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False, "beta_slow": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "mscale": 0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [2.0] * 2, "long_factor": [3.0] * 2}
    | {"original_max_position_embeddings": 64},
    {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
)
# Plausible values of the keys of all families, and of some that only other families or programs know. Each family is
# tried with all of them. None is null.
VALUES: dict[str, list[Any]] = {
    "vocab_size": [16, 40],
    "hidden_size": [8, 32],
    "intermediate_size": [12, 36],
    "num_hidden_layers": [1, 3],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4, None],
    "head_dim": [4, 12, None],
    "hidden_act": ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"],
    "hidden_activation": ["gelu", "gelu_pytorch_tanh", "silu", None],
    "rms_norm_eps": [1e-6, 0.1],
    "layer_norm_eps": [0.1],
    "layer_norm_epsilon": [0.1],
    "max_position_embeddings": [16, 256],
    "original_max_position_embeddings": [16],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_bias": [True],
    "qkv_bias": [True],
    "attention_dropout": [0.1],
    "tie_word_embeddings": [True, False],
    "initializer_range": [0.5],
    "use_cache": [False],
    "pretraining_tp": [2],
    "sliding_window": [3, 100, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
    "sliding_window_pattern": [2],
    "_sliding_window_pattern": [2],
    "attention_chunk_size": [4],
    "use_bidirectional_attention": [True, False, "all", "vision"],
    "is_causal": [False, True],
    "is_decoder": [True, False],
    "add_cross_attention": [True],
    "query_pre_attn_scalar": [5, 100],
    "attn_logit_softcapping": [1.5, None],
    "final_logit_softcapping": [1.5, None],
    "logit_softcapping": [1.5],
    "rope_theta": [10.0, 1000.0],
    "global_rope_theta": [10.0],
    "local_rope_theta": [10.0],
    "rope_local_base_freq": [30.0],
    "rotary_pct": [0.5],
    "partial_rotary_factor": [0.5, 1.0],
    "rope_interleaved": [True],
    "rope_scaling": [None, {"type": "linear", "factor": 3.0}, {"type": "default"}, *SCALINGS],
    "no_rope_layers": [[], [0, 1], [1, 0, 1, 0], None],
    "no_rope_layer_interval": [2],
    "no_rope_layer": [1],
    "embedding_multiplier": [1.0, 2.0],
    "residual_multiplier": [1.0, 2.0],
    "attention_multiplier": [1.0, 2.0],
    "logits_scaling": [1.0, 2.0],
    "logit_scale": [2.0],
    "clip_qkv": [0.5],
    "qk_layernorm": [True],
    "use_qk_norm": [True, False],
    "post_norm": [True],
    "num_experts": [4, 8],
    "num_local_experts": [4, 8],
    "num_experts_per_tok": [1, 2],
    "experts_per_token": [1],
    "top_k_experts": [1, 2],
    "moe_intermediate_size": [4, 12],
    "shared_expert_intermediate_size": [4, 0],
    "n_shared_experts": [1],
    "norm_topk_prob": [True, False],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [1]],
    "routed_scaling_factor": [2.0],
    "router_aux_loss_coef": [0.5],
    "output_router_logits": [True],
    "router_jitter_noise": [0.5],
    "swiglu_limit": [0.5, 20.0],
    "swiglu_alpha": [1.0],
    "linear_num_key_heads": [1, 4],
    "linear_num_value_heads": [2, 8],
    "linear_key_head_dim": [6],
    "linear_value_head_dim": [6],
    "linear_conv_kernel_dim": [2],
    "full_attention_interval": [2],
    "attn_output_gate": [False],
    "mtp_num_hidden_layers": [1],
    "num_kv_shared_layers": [0, 1, 2],
    "use_double_wide_mlp": [True, False],
    "hidden_size_per_layer_input": [0, 6],
    "vocab_size_per_layer_input": [24, 12],
    "attention_k_eq_v": [True, False],
    "enable_moe_block": [True, False],
    "global_head_dim": [4],
    "num_global_key_value_heads": [1],
    "per_layer_config": [None, {"0": {"intermediate_size": 12}}, {"0": {"sliding_window": 3}}, {"1": {"head_dim": 12}}],
    "bos_token_id": [None, 3],
    "eos_token_id": [None, [2, 3]],
    "pad_token_id": [None, 3],
    "dtype": ["bfloat16"],
    "torch_dtype": ["bfloat16"],
    "chunk_size_feed_forward": [2],
    "is_encoder_decoder": [True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "return_dict": [False],
    "num_labels": [3],
    "architectures": [None, ["OtherForCausalLM"]],
    "transformers_version": ["4.40.0"],
    "cache_implementation": ["hybrid"],
}


def cases(base: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields changes of a config.json: the path of a key, and another value or ABSENT."""
    file = json.loads((HERE / base / "config.json").read_text())
    layers = file["num_hidden_layers"]
    lists = [["full_attention"] * layers, ["sliding_attention"] * layers, ["chunked_attention"] * layers, None]
    lists += [(["sliding_attention", "full_attention"] * layers)[:layers]]
    lists += [["linear_attention"] * (layers - 1) + ["full_attention"]]
    ropes = [{"rope_type": "default", "rope_theta": 30.0}]
    ropes += [{"rope_theta": 100.0} | scaling for scaling in SCALINGS]
    ropes += [{"rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5}]
    nested = "full_attention" in file["rope_parameters"]
    for name in file.keys() | VALUES.keys() | {"layer_types", "rope_parameters"}:
        values = {"layer_types": lists, "rope_parameters": [*ropes, None]}.get(name, VALUES.get(name, []))
        for value in [*values, *([ABSENT] if name in file and name != "model_type" else [])]:
            if value != file.get(name, ABSENT):
                yield (name,), value
    for kind in ("full_attention", "sliding_attention") if nested else ():
        for value in [*ropes, ABSENT]:
            yield ("rope_parameters", kind), value


def changed(base: str, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns the changed config.json, or the unchanged one if the path is empty."""
    file = json.loads((HERE / base / "config.json").read_text())
    entries = file
    if not path:
        return file
    for name in path[:-1]:
        entries = entries[name]
    entries.pop(path[-1], None)
    if value != ABSENT:
        entries[path[-1]] = value
    return file


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weights of this name and shape, which are random, but always the same."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    centre, scale = (0.5, 0.3) if "norm" in name or name.endswith(("scale", "layer_scalar")) else (0.0, 0.25)
    return centre + np.float32(scale) * noise


def write_folder(folder: Path, file: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes config.json and weights."""
    (folder / "config.json").write_text(json.dumps(file))
    save_file(
        {name: tensor(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def file_parts(model_type: str, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors in files that make up a tensor of the model, in their order.

    transformers joins the experts of some families when it loads them.
    """
    stem, _, kernel = name.partition(".mlp.experts.")
    if model_type == "mixtral":
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        module = f"{stem}.block_sparse_moe.experts"
        name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    else:
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        module = f"{stem}.mlp.experts"
    if kernel not in names or model_type == "gpt_oss":
        return {name: shape}
    experts, rows, columns = shape
    parts = names[kernel]
    return {
        f"{module}.{expert}.{part}.weight": (rows // len(parts), columns) for expert in range(experts) for part in parts
    }


def transformers_result(file: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], np.ndarray] | None:
    """Returns the shapes of the tensors of a folder with this config.json, and logits, or None if it does not load."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    with torch.no_grad(), no_init_weights():
        try:
            config = CONFIG_MAPPING[file["model_type"]].from_dict(copy.deepcopy(file))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
            if sum(x.numel() for x in model.parameters()) > LARGEST:
                return None
            model = AutoModelForCausalLM.from_config(config, **options).eval()
            shapes: dict[str, tuple[int, ...]] = {}
            model.tie_weights()
            state = model.state_dict()
            if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
                del state["lm_head.weight"]
            for name, x in state.items():
                parts = file_parts(file["model_type"], name, tuple(x.shape))
                shapes |= parts
                whole = np.concatenate([tensor(*part) for part in parts.items()])
                x.copy_(torch.from_numpy(whole.reshape(x.shape)))
            logits = model(torch.from_numpy(IDS).long(), return_dict=True).logits[0, -1]
        except Exception:  # each kind of wrong value raises another class
            return None
    return shapes, logits[:NUM_LOGITS].float().numpy()


def main(bases: list[str]) -> None:
    """Records the cases of these folders, and keeps the record of the others."""
    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    layouts: dict[str, int] = {}
    rows: list[list[Any]] = []
    logits: list[np.ndarray] = []

    def add(base: str, path: Any, value: Any, result: tuple[Any, np.ndarray] | None) -> None:
        number = None if result is None else layouts.setdefault(json.dumps(result[0]), len(layouts))
        rows.append([base, path, value, number])
        logits.append(np.full(NUM_LOGITS, np.nan, np.float32) if result is None else result[1])

    if RECORD.exists():
        stored = np.load(RECORD)
        text = json.loads(stored["text"].tobytes())
        for (base, path, value, number), values in zip(text["cases"], stored["logits"], strict=True):
            if base not in bases:
                add(base, path, value, None if number is None else (text["layouts"][number], values))
    for base in bases:
        for path, value in [((), None), *sorted(cases(base), key=str)]:
            add(base, path, value, transformers_result(changed(base, path, value)))
        print(base, len(rows), flush=True)
    encoded = json.dumps({"cases": rows, "layouts": [json.loads(layout) for layout in layouts]}).encode()
    np.savez_compressed(RECORD, text=np.frombuffer(encoded, np.uint8), logits=np.stack(logits))


if __name__ == "__main__":
    main(sys.argv[1:] or BASES)
