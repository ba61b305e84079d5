"""Odd values in config.json, headers and indexes: a folder loads as in transformers, or one sentence names the file.

Also folders with adapters of PEFT and files in GGUF, which are refused with the way out.
"""

import copy
import json
import math
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import transformers
from golden import sweep
from safetensors.numpy import load_file, save_file
from tiny import GOLDEN, change_json, load_golden, refused, slow_unless, states_of_texts, write_tokenizer

from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder.transformer import param_shapes
from grpo_jax.models.files.peft import load_adapter, save_adapter
from grpo_jax.models.files.weights import load_params, read_json, untie_if_different
from grpo_jax.models.huggingface import classifier_padding, load_pretrained, model_folder, read_config, save_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rewards.learned import load_reward_model

# ---- config.json

ODD = [None, True, -1, 0, 1, 0.5, -(2**63), 2**31, 2**63, 10**400, math.inf, -math.inf, math.nan, "", "x"]
ODD += [[], [1], [None], [[]], {}, {"x": {"y": [1]}}]
# Keys that a file may lack. transformers 4 wrote some of them.
MORE_KEYS = ["rope_theta", "rope_scaling", "sliding_window", "quantization_config", "mlp_only_layers", "num_labels"]
MORE_KEYS += ["partial_rotary_factor", "original_max_position_embeddings", "head_dim", "no_rope_layers", "layer_types"]
BASES = ["qwen2_yarn", "gemma3_capped", "phi4_mini", "qwen3_moe", "gpt_oss"]
IDS = np.zeros((1, 30), np.int32)


def keys_of(file: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of each key, at any depth."""
    for name, value in file.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from keys_of(value, (*before, name))


def check_program(config: ModelConfig) -> None:
    """Traces the pass of a model without computing it, as every command does."""
    policy = decoder_policy(config)
    trace = partial(states_of_texts, policy, ids=IDS, texts=np.ones_like(IDS))
    jax.eval_shape(trace, param_shapes(config))


@pytest.mark.parametrize("base", slow_unless(("qwen2_yarn",), BASES))
def test_odd_values_of_keys_are_read_or_refused(base, tmp_path):
    file, traced = read_json(GOLDEN / base / "config.json"), set()
    sentences = []
    paths = [*keys_of(file), *((key,) for key in MORE_KEYS if key not in file)]
    for path, value in ((path, value) for path in paths for value in ODD):
        (tmp_path / "config.json").write_text(json.dumps(sweep.changed(base, path, copy.deepcopy(value))))
        try:
            config = read_config(tmp_path, longest_text=IDS.shape[1])
        except UsageError as error:
            sentences.append(str(error))
            continue
        if config not in traced:
            check_program(config)
            traced.add(config)
    assert traced
    assert [x for x in sentences if not x.startswith(str(tmp_path / "config.json"))] == []


def theirs(file):
    """Returns what transformers reads."""
    return transformers.CONFIG_MAPPING[file["model_type"]].from_dict(copy.deepcopy(file)).to_dict()


LLAMA = read_json(GOLDEN / "llama/config.json")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("theta", [3580165449, 2**31, 10**12, 10000, 2.5e9])
@pytest.mark.parametrize("scaling", [None, YARN, YARN | {"factor": 2**31}, YARN | {"beta_fast": 2**33}])
def test_whole_numbers_may_be_large(theta, scaling, tmp_path):
    """DeepSeek and others have bases of rotations from 2^31, written without a point."""
    rotary = {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | rotary))
    config = read_config(tmp_path)
    assert config.rope_theta == theirs(LLAMA | rotary)["rope_parameters"]["rope_theta"]
    check_program(config)


# Changes of a golden model that transformers does not compute either, and what the sentence names.
IMPOSSIBLE = [
    ("qwen2_yarn", ("rope_parameters", "rope_theta"), None, "rope_theta"),
    ("qwen2_yarn", ("rope_parameters", "rope_theta"), 1, "yarn divides by the logarithm of rope_theta"),
    ("gemma3_capped", ("rope_parameters", "sliding_attention", "rope_theta"), None, "rope_theta of layers"),
    ("gemma3_capped", ("hidden_activation",), "", "cannot be understood"),
    ("gemma3_capped", ("sliding_window",), 0, "sliding_window is 0"),  # no token would see itself
    ("gemma3_capped", ("sliding_window",), 2**31, "sliding_window .* below 2.31"),
    ("phi4_mini", ("original_max_position_embeddings",), 0, "cannot be understood"),
    ("phi4_mini", ("original_max_position_embeddings",), 1, "original_max_position_embeddings above 1"),
    ("qwen3_moe", ("decoder_sparse_step",), 0, "cannot be understood"),
    ("qwen3_moe", ("num_local_experts",), None, "num_experts"),
    ("llama", ("quantization_config",), [1], "quantization_config"),
    ("llama", ("quantization_config",), 3, "quantization_config"),
]


@pytest.mark.parametrize(("base", "path", "value", "words"), IMPOSSIBLE)
def test_what_transformers_does_not_compute_is_refused(base, path, value, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(sweep.changed(base, path, value)))
    with refused(f"config.json.*{words}"):
        read_config(tmp_path)


def test_a_mixture_without_experts_is_a_plain_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(sweep.changed("qwen3_moe", ("decoder_sparse_step",), 100)))
    config = read_config(tmp_path)
    assert config.experts is None
    check_program(config)


def test_labels_of_a_classifier_are_not_counted(tmp_path):
    """transformers makes a name for each."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_labels": 2**31}))
    assert read_config(tmp_path) == load_golden("llama")[0]


def test_a_model_may_have_no_end():
    assert classifier_padding({"eos_token_id": []}) is None


# ---- headers


def with_header(file, change):
    """Changes the header of a safetensors file; the tensors stay. A change may return text instead of an object."""
    data = file.read_bytes()
    size = 8 + struct.unpack("<Q", data[:8])[0]
    changed = change(json.loads(data[8:size]))
    text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[size:])


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ENTRIES = {
    "dtype": ["F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "BOOL", "C64", "X", "", None, 3],
    "shape": [[], [0], [-1], [2**63], [2**64], [1.5], "x", None, [[1]], [10**12, 0], [1] * 70, [24, 16, 1]],
    "data_offsets": [[0, 0], [-4, 0], [4, 0], [0], [0, 1, 2], [0, 2**63], [2**63, 2**64], [0, "x"], None, [0.0, 4.0]],
}
TEXTS = [b"", b"{", b"[]", b"null", b"{}", b"\xff" * 20, b'{"a":' * 5000, b'{"x": 1e400}', b'{"x": null}']


def broken_headers():
    for name in (EMBEDDING, HEAD):
        for key, values in ENTRIES.items():
            for value in values:
                yield lambda header, x=name, k=key, v=value: header | {x: header[x] | {k: v}}
            yield lambda header, x=name, k=key: header | {x: {y: z for y, z in header[x].items() if y != k}}
    for text in TEXTS:
        yield lambda header, text=text: text
    yield lambda header: header | {"model.language_model.embed_tokens.weight": header[EMBEDDING]}
    yield lambda header: header | {EMBEDDING: header[HEAD], HEAD: header[EMBEDDING], "x": header[HEAD]}


def load(folder, config):
    return load_params(folder, untie_if_different(folder, config)[0])


def tied_folder(folder):
    """Writes a tied model whose file repeats the matrix, and returns its file."""
    tensors = load_file(GOLDEN / "smollm/model.safetensors")
    save_file(tensors | {HEAD: tensors[EMBEDDING]}, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_a_broken_header_is_refused(tmp_path):
    config, file = load_golden("smollm")[0], tied_folder(tmp_path)
    load(tmp_path, config)
    whole = file.read_bytes()
    for change in broken_headers():
        file.write_bytes(whole)
        with_header(file, change)
        with refused("."):
            load(tmp_path, config)


@pytest.mark.parametrize("names", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 1), ("F8_E8M0", 1), ("F64", 8), ("I32", 4), ("C64", 8)])
@pytest.mark.parametrize("is_scalar", [False, True])
def test_tied_matrices_of_an_unreadable_kind_are_refused(names, dtype, size, is_scalar, tmp_path):
    config, file = load_golden("smollm")[0], tied_folder(tmp_path)
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header, body = {}, b""
    for name, entry in json.loads(data[8:start]).items():
        part = data[start:][slice(*entry["data_offsets"])]
        if name in names:
            shape = [] if is_scalar else entry["shape"]
            entry, part = {"dtype": dtype, "shape": shape}, bytes(size * math.prod(shape))
        header[name] = entry | {"data_offsets": [len(body), len(body) + len(part)]}
        body += part
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    with refused("weight' (has shape|is of dtype)"):
        load(tmp_path, config)


# ---- tensors that occur twice

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def twice(tmp_path):
    """A folder with two files that hold different values of one tensor, and no index."""
    tensors = load_file(GOLDEN / "llama/model.safetensors")
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    save_file({Q_PROJ: 2 * tensors[Q_PROJ]}, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def write_index(folder, first, **others):
    weight_map = dict.fromkeys(first, "model-00001-of-00002.safetensors") | others
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("number", [1, 2])
def test_the_index_decides_which_file_holds_a_tensor(twice, number):
    """transformers takes the last file, whatever the index says."""
    config, params = load_golden("llama")
    names = load_file(twice / "model-00001-of-00002.safetensors")
    files = {Q_PROJ: f"model-0000{number}-of-00002.safetensors", "of no family": "model-00002-of-00002.safetensors"}
    write_index(twice, names, **files)
    loaded = load_params(twice, config)["layers"]["attention"]["q_proj"]["kernel"][0]
    np.testing.assert_array_equal(loaded, params["layers"]["attention"]["q_proj"]["kernel"][0] * number)


def test_tensors_in_two_files_need_an_index(twice):
    with refused(f"{Q_PROJ} is in .*model-00002.* and in .*model-00001.*: remove one"):
        load_params(twice, load_golden("llama")[0])
    write_index(twice, [EMBEDDING], x="model-00002-of-00002.safetensors")  # does not name this tensor
    with refused(f"{Q_PROJ} is in .*model-00002.* and in .*model-00001"):
        load_params(twice, load_golden("llama")[0])


ODD_INDEXES = [*ODD, {"weight_map": None}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"x": None}}]
ODD_INDEXES += [{"weight_map": {"x": name}} for name in ("../x.safetensors", "/etc/passwd", "", [], {}, 3, 2**63)]


@pytest.mark.parametrize("contents", ODD_INDEXES, ids=repr)
def test_an_odd_index_is_refused(contents, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(contents))
    save_file(load_file(GOLDEN / "llama/model.safetensors"), tmp_path / "model-00001-of-00001.safetensors")
    with refused("model.safetensors.index.json|no .safetensors file"):
        load_params(tmp_path, load_golden("llama")[0])


def test_experts_that_occur_twice_are_refused(tmp_path):
    config, tensors = load_golden("qwen3_5_moe")[0], load_file(GOLDEN / "qwen3_5_moe/model.safetensors")
    experts = config.experts.num_experts
    whole = "model.layers.0.mlp.experts"
    down = np.stack([tensors[f"{whole}.{i}.down_proj.weight"] for i in range(experts)])
    save_file(tensors | {f"{whole}.down_proj": down}, tmp_path / "model.safetensors")
    with refused("experts.0.down_proj.weight is in"):
        load_params(tmp_path, config)


# ---- adapters and GGUF


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer."""
    config, params = load_golden("llama")
    folder = save_pretrained(tmp_path / "model", params, config, source=GOLDEN / "llama")
    write_tokenizer(folder, config.vocab_size)
    return folder


PLACES = [load_pretrained, partial(load_pretrained, head=True), partial(load_pretrained, weights=False)]
PLACES += [load_reward_model, model_folder]


@pytest.mark.parametrize("place", PLACES, ids=["policy", "critic", "plan", "reward model", "base of adapters"])
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_folder_with_an_adapter_is_refused(place, has_weights, folder):
    """transformers with PEFT adds the adapter to the model in such a folder."""
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).write_bytes((GOLDEN / "llama/adapter" / file).read_bytes())
    if not has_weights:
        (folder / "model.safetensors").unlink()
    with refused("holds an adapter, .*PEFT's merge_and_unload, or name a folder without adapter_config.json"):
        place(folder)


@pytest.mark.parametrize("rank", [None, 0, -1, 3.0, True, "x", [3], 10**400, math.nan])
def test_an_odd_rank_of_an_adapter_is_refused(rank, tmp_path):
    config, params = load_golden("llama")
    adapted = load_adapter(GOLDEN / "llama/adapter", config, params)
    adapter = save_adapter(tmp_path / "adapter", config, adapted, base="base")
    change_json(adapter / "adapter_config.json", r=rank)
    with refused("r in .*adapter_config.json|lora_A.weight must be floats"):
        load_adapter(adapter, config, params)


@pytest.mark.parametrize("place", PLACES[:2] + PLACES[3:])
def test_gguf_is_refused_with_a_command(place, folder):
    (folder / "model.safetensors").rename(packed := folder / "model.Q4_1.gguf")
    for name in (packed, folder):
        with refused(r"GGUF .*python -c .*'model\.Q4_1\.gguf'.*from_pretrained\(d, gguf_file=f.*docs/pretrained\.md"):
            place(name)
    with refused("there is no folder"):
        place(folder / "other.gguf")
    with refused("there is no folder"):
        place("models/other.gguf")
