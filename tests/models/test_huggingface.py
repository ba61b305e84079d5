"""Hugging Face folders: in and out bit by bit, what is refused, names of the hub, and a real model."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from tiny import GOLDEN, change_json, load_golden, refused, row_numbers, sampler_of, write_tokenizer

from experiments.new_models import save_new_model
from grpo_jax.models.decoder.heads import add_head
from grpo_jax.models.files import weights
from grpo_jax.models.files.families import config_from_huggingface, text_config
from grpo_jax.models.files.weights import load_params, read_json, unpack_mxfp4, untie_if_different
from grpo_jax.models.huggingface import files_of, load_pretrained, model_folder, save_pretrained
from grpo_jax.models.params.quantised import dequantised
from grpo_jax.models.params.rounding import round_stochastically
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.guards import check_tokens
from grpo_jax.tasks.task import text_task

STORIES = Path(__file__).parents[2].parent / "shared/data/stories260K-hf"
NAMES = sorted(file.parent.name for file in GOLDEN.glob("*/config.json"))
bit_for_bit = partial(jax.tree.map, partial(np.testing.assert_array_equal, strict=True))


# ---- in and out


@pytest.mark.parametrize(("name", "max_shard_bytes"), [*((name, 8192) for name in NAMES), ("llama", None)])
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
    near = round_stochastically(params) if dtype == "bfloat16" else params
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype), near)
    folder = save_new_model(tmp_path / "out", params, config, dtype=dtype)
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {np.dtype(dtype)}
    assert read_json(folder / "config.json")["dtype"] == dtype
    exact = load_params(folder, config)
    bit_for_bit(exact, jax.tree.map(lambda x: x.astype(np.float32), rounded))
    half = load_params(folder, config, dtype=jnp.bfloat16)
    bit_for_bit(half, jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), rounded))
    # And out again, in the dtype that the parameters have.
    again = save_new_model(tmp_path / "again", half, config)
    bit_for_bit(load_params(again, config, dtype=jnp.bfloat16), half)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_decay_rates_stay_in_float32(name, tmp_path):
    """Folders of Qwen3.5 have these tensors in float32 and all others in bfloat16, and servers compute with them."""
    config, params = load_golden(name)
    folder = save_new_model(tmp_path / "out", params, config, dtype="bfloat16")
    saved = load_file(folder / "model.safetensors")
    exact = {x for x in saved if x.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))}
    assert {x for x, y in saved.items() if y.dtype == np.float32} == exact
    half, delta = load_params(folder, config, dtype=jnp.bfloat16), params["layers"]["delta"]
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("float32"), jnp.dtype("bfloat16")}
    for module, leaf in (("decay", "log_rate"), ("norm", "scale")):
        bit_for_bit(half["layers"]["delta"][module][leaf], delta[module][leaf])
        assert not np.array_equal(delta[module][leaf], delta[module][leaf].astype(jnp.bfloat16))


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
def test_tensors_load_into_shards_and_save_back(kind, tmp_path):
    config, params = load_golden("llama")
    sharded = load_params(GOLDEN / "llama", config, sharding=shardings(kind))
    bit_for_bit(sharded, params)
    assert jax.tree.map(lambda x: x.sharding, sharded) == jax.tree.broadcast(shardings(kind), params)
    if kind == "tree":
        kernel = sharded["layers"]["mlp"]["down_proj"]["kernel"]  # [2, 20, 16]
        assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, 5, 16)}
    folder = save_new_model(tmp_path / "out", sharded, config)
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
    assert untie_if_different(tmp_path, config) == (config, ())


def test_a_head_that_differs_from_the_tied_embedding(folder, tmp_path):
    """transformers unties them: what the files hold counts."""
    configure(folder, tie_word_embeddings=True)
    loaded = load_pretrained(folder)
    bit_for_bit(loaded.params, load_golden("llama")[1])
    assert not loaded.config.tie_word_embeddings
    (note,) = loaded.notes
    assert "lm_head.weight" in note
    saved = save_pretrained(tmp_path / "saved", loaded.params, loaded.config, source=folder)
    bit_for_bit(load_file(saved / "model.safetensors"), original_tensors("llama"))
    again = load_pretrained(write_tokenizer(saved, 20) or saved)
    assert (again.config, again.notes) == (loaded.config, ())
    classifier = save_pretrained(tmp_path / "scores", *reversed(add_head(loaded.config, loaded.params)), source=folder)
    assert load_pretrained(write_tokenizer(classifier, 20) or classifier, head=True).notes == ()


def test_a_tied_matrix_that_only_the_head_names(tmp_path):
    config, params = load_golden("smollm")
    tensors = original_tensors("smollm")
    save_file(tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}, tmp_path / "model.safetensors")
    bit_for_bit(load_params(tmp_path, config), params)


@pytest.mark.parametrize(("outer", "inner", "tied"), [(False, True, False), (True, False, True), (None, True, True)])
def test_the_outer_config_says_whether_matrices_are_tied(outer, inner, tied):
    text = read_json(GOLDEN / "gemma3" / "config.json") | {"tie_word_embeddings": inner}
    whole = {"model_type": "gemma3", "text_config": text} | ({} if outer is None else {"tie_word_embeddings": outer})
    assert config_from_huggingface(text_config(whole)).tie_word_embeddings == tied


def test_the_outer_config_names_the_dtype():
    """Of files that transformers 4 wrote, such as that of Gemma 3 4B."""
    whole = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {"model_type": "gemma3_text"}}
    assert text_config(whole)["torch_dtype"] == "bfloat16"


def test_saved_models_name_no_code_that_is_missing(folder, tmp_path):
    configure(folder, auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    loaded = load_pretrained(folder)
    saved = save_pretrained(tmp_path / "saved", loaded.params, loaded.config, source=folder)
    assert transformers.AutoConfig.from_pretrained(saved, trust_remote_code=True).model_type == "llama"


def test_experts_of_a_layer_may_be_one_tensor(tmp_path):
    """Qwen3.5 on the hub has them as its modules in transformers do."""
    config, params = load_golden("qwen3_5_moe")
    tensors, experts = original_tensors("qwen3_5_moe"), config.experts.num_experts
    for layer in range(config.num_hidden_layers):
        of_layer = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{of_layer}.{i}.{name}_proj.weight") for i in range(experts)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{of_layer}.gate_up_proj": np.concatenate([gate, up], 1), f"{of_layer}.down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    bit_for_bit(load_params(tmp_path, config), params)


def test_a_single_file_overrides_an_old_index(folder):
    """`save_new_model` of transformers leaves older shards where they are."""
    _, params = load_golden("llama")
    new = {name: tensor + 1 for name, tensor in original_tensors("llama").items()}
    save_file(new, folder / "model.safetensors")
    expected = jax.tree.map(lambda x: x + 1, params)
    for _ in range(2):
        loaded = load_pretrained(folder)
        bit_for_bit(loaded.params, expected)
        (note,) = loaded.notes
        assert "model.safetensors.index.json" in note
        remove(folder, "model-*.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    assert load_pretrained(folder).notes == ()


def test_text_files_are_taken_over(tmp_path):
    config, params = load_golden("llama")
    source = save_pretrained(tmp_path / "in", params, config, source=GOLDEN / "llama", max_shard_bytes=4000)
    texts = ("tokenizer.json", "chat_template.jinja", "LICENSE", "tokenizer.model")
    texts += ("additional_chat_templates/tool_use.jinja",)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/notes.md").write_text("no template")
    for name in texts:
        (source / name).write_text(f"of {name}")
    (source / "pytorch_model.bin").write_text("a pickle")
    (source / "adapter_config.json").write_text("{}")  # with one, the copy would be taken for an adapter
    folder = save_pretrained(tmp_path / "out", params, config, source=source)
    assert {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        *texts,
    }
    for name in texts:
        assert (folder / name).read_text() == f"of {name}"
    assert set(texts) - {"LICENSE"} < set(files_of(folder))
    assert read_json(folder / "config.json") == read_json(GOLDEN / "llama/config.json")


def test_nothing_is_written_over(tmp_path):
    config, params = load_golden("llama")
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with refused("exists"):
            save_new_model(taken, params, config)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_appears_when_it_is_complete(tmp_path, monkeypatch):
    config, params = load_golden("llama")
    save = partial(save_new_model, tmp_path / "out", params, config, max_shard_bytes=4000)
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
    with refused("token 24, but the model has the tokens 0 to 23"):
        task([{"prompt": "t3 t24"}])
    # Padding that the model does not know does not occur: another id takes its place.
    loaded.tokenizer.pad_token = "t29"
    assert task([{"prompt": "t3"}]).pad_id == 0
    name_eos(folder, [2, 28])
    loaded = load_pretrained(folder)
    assert loaded.eos_ids == (2, 5)
    assert loaded.notes == ("EOS 28 is left out, since the model has the tokens 0 to 23",)
    change_json(folder / "tokenizer_config.json", eos_token="t26")
    for file in ("config.json", "generation_config.json"):
        change_json(folder / file, eos_token_id=28)
    loaded = load_pretrained(folder)
    with refused(r"no EOS among .*26, 28.*, so no completion could end"):
        check_tokens(task([{"prompt": "t3"}])._replace(eos_ids=loaded.eos_ids))


def test_end_tokens_are_those_of_all_files(folder):
    configure(folder, eos_token_id=3)
    name_eos(folder, [2, 7])
    assert load_pretrained(folder).eos_ids == (2, 3, 5, 7)  # 5 is the tokenizer's
    (folder / "generation_config.json").unlink()
    configure(folder, eos_token_id=None)
    assert load_pretrained(folder).eos_ids == (5,)


def test_saved_models_keep_the_templates_turn_end(folder, tmp_path):
    """The files of base models often name another EOS than the one with which their template ends a turn."""
    name_eos(folder, [2, 7])
    (folder / "chat_template.jinja").write_text("{% for m in messages %}t1 {{ m.content }} t0{% endfor %}")
    loaded = load_pretrained(folder)
    assert {0, 2, 5, 7} <= {*loaded.eos_ids}
    saved = save_pretrained(tmp_path / "saved", loaded.params, loaded.config, source=folder)
    assert read_json(saved / "generation_config.json")["eos_token_id"] == [0, 2, 7]
    assert load_pretrained(saved).eos_ids == loaded.eos_ids


def test_options_that_are_not_the_models(folder):
    loaded = load_pretrained(folder, param_dtype=jnp.bfloat16, dtype="bfloat16", remat="layer", attention="xla")
    assert (loaded.config.dtype, loaded.config.remat, loaded.config.attention) == ("bfloat16", "layer", "xla")
    assert {x.dtype for x in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def change_tensors(folder, change):
    """Rewrites the file that holds the first query projection."""
    file = folder / read_json(folder / "model.safetensors.index.json")["weight_map"][Q_PROJ]
    tensors = load_file(file)
    change(tensors)
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
    change_json(folder / "config.json", **changes)


def name_eos(folder, ids):
    change_json(folder / "generation_config.json", eos_token_id=ids)


def name_files(folder, name):
    index = folder / "model.safetensors.index.json"
    change_json(index, weight_map=dict.fromkeys(read_json(index)["weight_map"], name))


def fill(folder, value):
    def change(tensors):
        tensors[Q_PROJ] = tensors[Q_PROJ].copy()
        tensors[Q_PROJ][1, 2] = value

    change_tensors(folder, change)


# What is wrong -> how to make it so, and what the sentence names.
BROKEN = {
    "no config": (lambda folder: remove(folder, "config.json"), "config.json"),
    "half a config": (lambda folder: (folder / "config.json").write_text('{"model_type":'), "config.json"),
    "a list for a config": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    "another architecture": (lambda folder: configure(folder, model_type="gpt2"), "gpt2"),
    "too many layers": (lambda folder: configure(folder, num_hidden_layers=1), "does not know.*layers.1"),
    "too few layers": (lambda folder: configure(folder, num_hidden_layers=3), "no tensor 'model.layers.2"),
    "no tokenizer": (lambda folder: remove(folder, "tokenizer*"), "no tokenizer"),
    "an empty tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "no tokenizer"),
    "a text for the EOS of the model": (
        lambda folder: configure(folder, eos_token_id="</s>"),
        "no tokenizer .*Field 'eos_token_id' .*'</s>'.*correct its config.json, or copy its tokenizer.json",
    ),
    "no weights": (lambda folder: remove(folder, "*.safetensors*"), "no .safetensors file"),
    "only pickles": (only_pickles, "convert the model to safetensors"),
    "a file missing": (lambda folder: remove(folder, "model-00002*"), "model-00002-of-.*download it again"),
    "half an index": (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "index.json"),
    "a number for a file": (lambda folder: name_files(folder, 3), "weight_map"),
    "a file elsewhere": (lambda folder: name_files(folder, "../model.safetensors"), "weight_map"),
    "a text for an EOS": (lambda folder: name_eos(folder, "</s>"), "eos_token_id in .*generation_config.json"),
    "a negative EOS": (lambda folder: name_eos(folder, [2, -1]), r"eos_token_id in .*generation_config.json"),
    "weights that are NaN": (lambda folder: fill(folder, np.nan), "nan"),
    "weights that are infinite": (lambda folder: fill(folder, np.inf), "inf"),
    "weights that are absurd": (lambda folder: fill(folder, -1e30), rf"{Q_PROJ}.*1e\+30"),
    "a file cut off": (cut, r"model-.*download it again"),
    "a web page": (lambda folder: (folder / "model-00001-of-00003.safetensors").write_text("<html>"), "safetensors"),
    "a tensor missing": (lambda folder: change_tensors(folder, lambda x: x.pop(Q_PROJ)), f"no tensor '{Q_PROJ}'"),
    "another shape with as many elements": (
        lambda folder: change_tensors(folder, lambda x: x.update({Q_PROJ: x[Q_PROJ].reshape(4, 64)})),
        rf"{Q_PROJ}' has shape \(4, 64\)",
    ),
    "integers": (
        lambda folder: change_tensors(folder, lambda x: x.update({Q_PROJ: x[Q_PROJ].astype(np.int8)})),
        f"{Q_PROJ}' is of dtype I8",
    ),
    "an unknown tensor": (
        lambda folder: change_tensors(folder, lambda x: x.update({Q_PROJ.replace("q_", "qkv_"): np.ones(3)})),
        "does not know.*qkv_proj",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused(folder, name):
    break_it, words = BROKEN[name]
    break_it(folder)
    with refused(words):
        load_pretrained(folder)


def test_code_in_a_model_folder_never_runs(folder, monkeypatch):
    """The folder has a tokenizer class, and the user says yes to anything."""
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    (folder / "own.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')\nclass Own: pass\n")
    remove(folder, "tokenizer.json")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused("holds no tokenizer that transformers can load"):
        load_pretrained(folder)
    assert not (folder / "was_run").exists()


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_every_tensor_is_needed_and_its_shape_checked(name, tmp_path):
    (config, _), tensors = load_golden(name), original_tensors(name)
    for missing, tensor in tensors.items():
        rest = {other: tensor for other, tensor in tensors.items() if other != missing}
        transposed = np.ascontiguousarray(tensor.T) if len(set(tensor.shape)) == 2 else tensor[None]
        for wrong, named in ((rest, "no tensor '{}'"), (rest | {missing: transposed}, "'{}' has shape")):
            save_file(wrong, tmp_path / "model.safetensors")
            with refused(named.format(missing)):
                load_params(tmp_path, config)


# ---- names of the hub


@pytest.mark.parametrize("name", ["no/such/folder", "nowhere", "/nowhere", "runs/model.safetensors"])
def test_names_that_are_no_folder(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("went out"))
    with refused(f"no folder {name}"):
        load_pretrained(name)


def test_unreachable_hub_names_are_refused(monkeypatch):
    def offline(*_, **__):
        raise OSError("cannot reach the hub\nwith many\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with refused(r"someone/model is no folder here, .*: cannot reach the hub$"):
        load_pretrained("someone/model")


def test_hub_models_are_fetched_without_pickles(folder, monkeypatch):
    asked = {}

    def snapshot_download(name, **options):
        asked.update(name=name, **options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert model_folder("someone/model") == folder
    assert asked["name"] == "someone/model"
    needed = [*(file.name for file in folder.iterdir()), "LICENSE", "chat_template.jinja"]
    needed += ["additional_chat_templates/tool_use.jinja"]
    offered = [*needed, "pytorch_model.bin", "model.pt", "modeling.py", "model.gguf"]
    offered += ["consolidated.safetensors", "original/model.safetensors"]  # the weights again: Mistral, gpt-oss
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    matching = huggingface_hub.utils.filter_repo_objects(offered, **patterns)
    assert list(matching) == needed


# ---- a real model


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.exists(), reason="needs the stories260K folder")
def test_greedy_ids_and_logprobs_equal_the_reference():
    stories = load_pretrained(STORIES)
    reference = json.loads((STORIES / "greedy_reference.json").read_text())
    start, *ids = reference["ids"]
    sample = sampler_of(decoder_policy(stories.config), max_tokens=len(ids), eos_ids=stories.eos_ids)
    prompt = np.full((1, 1), start), np.ones((1, 1), bool)
    sampled = sample(stories.params, *prompt, row_numbers(1, 1), jax.random.key(0), temperature=0.0)
    out = jax.tree.map(lambda x: x[0, 0], sampled)
    assert len(ids) == 256
    np.testing.assert_array_equal(out.completion_ids, ids)
    assert out.completion_mask.all()
    assert out.truncated
    np.testing.assert_allclose(out.sampler_logprobs, reference["logprobs_of_next"], atol=1e-4)


def test_text_models_load_from_multimodal_files(tmp_path):
    """The names are those of Qwen3.5 on the hub. What is saved holds only the text model."""
    folder, source = tmp_path / "whole", GOLDEN / "qwen3_5"
    folder.mkdir()
    file = json.loads((source / "config.json").read_text())
    whole = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "vision_config": {"depth": 1},
    }
    (folder / "config.json").write_text(json.dumps(whole | {"text_config": file}))
    tensors = load_file(source / "model.safetensors")
    nested = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    nested |= {"model.visual.patch_embed.proj.weight": np.ones((2, 3)), "mtp.fc.weight": np.ones((2, 2))}
    save_file(nested, folder / "model.safetensors")
    config = config_from_huggingface(text_config(whole | {"text_config": file}))
    params = load_params(folder, config)
    saved = save_pretrained(tmp_path / "saved", params, config, source=folder)
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["Qwen3_5ForCausalLM"]
    after = load_file(saved / "model.safetensors")
    assert after.keys() == tensors.keys()
    assert all(np.array_equal(after[name], tensors[name]) for name in tensors)


def test_unused_keys_and_values_are_left_out(tmp_path):
    """Folders of Gemma 4 on the hub hold keys and values also for layers that read those of another layer."""
    config, params = load_golden("gemma4_small")
    unused = {f"model.layers.5.self_attn.{name}.weight": np.ones(3, np.float32) for name in ("k_proj", "v_norm")}
    towers = {f"model.{name}.weight": np.ones(2, np.float32) for name in ("audio_tower.x", "embed_audio.y")}
    save_file(original_tensors("gemma4_small") | unused | towers, tmp_path / "model.safetensors")
    bit_for_bit(load_params(tmp_path, config), params)


def test_mxfp4_weights_of_gpt_oss_are_read():
    """0.5 · 2^(126 − 127) and −6 · 2^(129 − 127), in a block of 32 numbers, the first in the low half of a byte."""
    blocks, scales = np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 126, np.uint8)
    blocks[0, 0, 0, 0], blocks[0, 1, 0, 15], scales[0, 1] = 0x01, 0xF0, 129
    kernels = unpack_mxfp4(blocks, scales).astype(np.float32)
    assert kernels.shape == (1, 32, 2)
    expected = np.zeros((1, 32, 2))
    expected[0, 0, 0], expected[0, 31, 1] = 0.25, -24
    np.testing.assert_array_equal(kernels, expected)


@pytest.fixture
def packed(tmp_path):
    """A gpt-oss with the experts of its layers in MXFP4: the folder, its configuration, and the kernels."""
    config = replace(load_golden("gpt_oss")[0], hidden_size=32, intermediate_size=32)
    config = replace(config, experts=config.experts._replace(moe_intermediate_size=32))
    params = jax.jit(decoder_policy(config).init)(jax.random.key(0))
    folder, rng = save_new_model(tmp_path / "packed", params, config), np.random.default_rng(0)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 128, blocks.shape[:3], dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = unpack_mxfp4(blocks, scales).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder, config, expected


def test_a_folder_in_mxfp4_is_read(packed):
    folder, config, expected = packed
    experts = load_params(folder, config)["layers"]["experts"]
    for layer in range(config.num_hidden_layers):
        joined = expected[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        for name, part in (("gate_proj", joined[..., ::2]), ("up_proj", joined[..., 1::2])):
            np.testing.assert_array_equal(experts[name]["kernel"][layer], part)
        down = expected[f"model.layers.{layer}.mlp.experts.down_proj"]
        np.testing.assert_array_equal(experts["down_proj"]["kernel"][layer], down)
    codes = load_params(folder, config, quantize="int8")["layers"]["experts"]["up_proj"]["kernel"]
    np.testing.assert_allclose(dequantised(codes, jnp.float32), experts["up_proj"]["kernel"], atol=0.05)


def flipped(scales):
    """Returns scales in which one differs."""
    scales = scales.copy()
    scales.flat[0] = 255
    return scales


# A part of a kernel in MXFP4, how it is damaged, and what the sentence names.
BAD_MXFP4 = {
    "transposed blocks": ("blocks", lambda x: x.swapaxes(1, 2), r"down_proj_blocks' has shape \(5, 1, 32, 16\)"),
    "blocks cut off": ("blocks", lambda x: x[:, :-1], "down_proj_blocks' has shape"),
    "blocks of fewer experts": ("blocks", lambda x: x[:-1], "down_proj_blocks' has shape"),
    "blocks of floats": ("blocks", lambda x: x.astype(np.float32), "down_proj_blocks' .* dtype F32"),
    "signed blocks": ("blocks", lambda x: x.astype(np.int8), "down_proj_blocks' .* dtype I8"),
    "flat scales": ("scales", lambda x: x.reshape(-1), "down_proj_scales' has shape"),
    "transposed scales": ("scales", lambda x: x.swapaxes(1, 2), "down_proj_scales' has shape"),
    "scales of floats": ("scales", lambda x: x.astype(np.float32), "down_proj_scales' .* dtype F32"),
    "a flipped bit": ("scales", lambda x: np.full_like(x, 160), "down_proj_blocks' in .* holds"),
    "one scale of 255": ("scales", flipped, "down_proj_blocks' in .* holds"),
}


@pytest.mark.parametrize("name", BAD_MXFP4)
def test_damaged_mxfp4_is_refused(packed, name):
    part, damage, words = BAD_MXFP4[name]
    folder, config, _ = packed
    tensors = load_file(folder / "model.safetensors")
    tensor = f"model.layers.1.mlp.experts.down_proj_{part}"
    save_file(tensors | {tensor: np.ascontiguousarray(damage(tensors[tensor]))}, folder / "model.safetensors")
    with refused(words):
        load_params(folder, config)


def test_mxfp4_needs_32_inputs_a_block(tmp_path):
    config = load_golden("gpt_oss")[0]
    folder = save_new_model(tmp_path / "model", load_golden("gpt_oss")[1], config)
    tensors = load_file(folder / "model.safetensors")
    experts, inputs, outputs = tensors.pop("model.layers.0.mlp.experts.down_proj").shape
    blocks = {"blocks": np.zeros((experts, outputs, inputs // 32, 16), np.uint8)}
    parts = blocks | {"scales": np.zeros((experts, outputs, inputs // 32), np.uint8)}
    tensors |= {f"model.layers.0.mlp.experts.down_proj_{part}": x for part, x in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    with refused("32 inputs a block"):
        load_params(folder, config)
