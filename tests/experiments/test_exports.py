"""Checks exports of runs with a checkpoint, also of LoRA: merged, or only the adapters. Nothing is trained."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file
from tiny import change_json, random_like, read_lines, refused, save_tiny_model

from experiments import stories
from experiments.common import keep_model
from experiments.tasks import arithmetic
from grpo_jax.commands import flags
from grpo_jax.commands.export import Options, export
from grpo_jax.config import ModelOptions
from grpo_jax.models.files.peft import load_adapter
from grpo_jax.models.huggingface import load_pretrained, load_tokenizer, save_pretrained
from grpo_jax.models.params.lora import merge
from grpo_jax.models.params.tree import Adapted, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import flattened
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.runs.checkpoint import params_sha256, write_seal
from grpo_jax.runs.pretrained import keep_description, load_run
from grpo_jax.step import init_state
from grpo_jax.training.prepare import load_model

LORA = "--lora-rank 2 --lora-alpha 6 --lora-targets q_proj o_proj down_proj"
LORA += " --param-dtype bfloat16 --remat layer --attention xla"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model in "base", and something else that is "full"."""
    folder = tmp_path_factory.mktemp("exports")
    save_tiny_model(folder / "base", arithmetic.TEXT)
    (folder / "full").mkdir()
    (folder / "full/thesis.txt").write_text("mine")
    return folder


def saved_run(folder, name, options="", describe=keep_description, base="base"):
    """Returns a run, its model, and the policy in its checkpoint of step 2."""
    args = f"--model {folder / base} --num-prompts 4 --group-size 2 {options} --run-dir {folder / name}"
    config = flags.parse(stories.Config, None, args.split())
    loaded = load_model(config.model, seed=0)
    run = flags.open_run(config)
    describe(run, {"policy": loaded}, config.model)
    params = loaded.params
    if isinstance(params, Adapted):
        params = params._replace(adapters=random_like(params.adapters))
    state = init_state(split({"policy": params})[0], grpo_method(decoder_policy(loaded.config), config.train).optimizer)
    with run.checkpoints("grpo", keep=1) as checkpoints:
        checkpoints.save(state, 2)
    return run, loaded, params, state


@pytest.fixture(scope="module")
def adapted(folder):
    return saved_run(folder, "lora", LORA)


@pytest.fixture(scope="module")
def whole(folder):
    return saved_run(folder, "run")


def in_float32(params):
    return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def test_lora_runs_store_only_adapters_and_model_options(folder, adapted):
    run, model, params, state = adapted
    assert (model.config.remat, model.config.attention, params.scale) == ("layer", "xla", 3)
    assert {x.dtype for x in jax.tree.leaves(params.base)} == {jnp.dtype("bfloat16")}
    trained, moments = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.params, state.opt_state))
    assert trained == 2 * (2 * (16 + 16) + 32 + 16)  # rank, and in + out of q, o and down
    assert moments == 2 * trained + 2  # and two counts of steps
    on_disk = sum(file.stat().st_size for file in (run.path / "checkpoints").rglob("*") if file.is_file())
    assert on_disk < 4 * 3 * trained + 2**16


def test_adapters_export_merged_or_separately_with_moved_base(folder, adapted, tmp_path):
    _, _, params, _ = adapted
    run = folder / "lora"
    export(Options(run, tmp_path / "merged", dtype="float32"))
    assert not (tmp_path / "merged/lora.json").exists()
    saved = load_pretrained(tmp_path / "merged")
    loaded, step = load_run(run, phase="grpo", dtype="bfloat16")
    assert (step, loaded.config) == (2, replace(saved.config, dtype="bfloat16"))
    assert saved.tokenizer.decode(saved.tokenizer.encode("07+58=")) == "07+58="
    assert params_sha256(loaded.params) == params_sha256(merge(params))
    assert loaded.eos_ids == saved.eos_ids
    # Of the rounded weights that it was trained on: the file holds the exact sums.
    assert params_sha256(saved.params) == params_sha256(in_float32(merge(params, jnp.float32)))
    export(Options(run, tmp_path / "half", dtype="bfloat16"))
    half = load_pretrained(tmp_path / "half", param_dtype=jnp.bfloat16)
    assert params_sha256(half.params) == params_sha256(loaded.params)  # exported as evaluated
    assert load_file(tmp_path / "half/model.safetensors")["model.norm.weight"].dtype == jnp.bfloat16

    moved = (folder / "base").rename(folder / "moved")
    export(Options(run, tmp_path / "adapter", adapter=True))
    adapter = load_adapter(tmp_path / "adapter", loaded.config, params.base)
    assert "library_name: peft" in (tmp_path / "adapter/README.md").read_text()
    assert params_sha256(adapter.adapters) == params_sha256(params.adapters)
    assert adapter.scale == params.scale
    with refused("say where it is with --base"):
        export(Options(run, tmp_path / "out"))
    export(Options(run, tmp_path / "out", base=moved))
    assert params_sha256(load_run(run, base=moved)[0].params) == params_sha256(loaded.params)
    with refused("not those that the adapters were trained on"):
        export(Options(run, tmp_path / "other", base=tmp_path / "merged"))
    with refused("leave out --dtype"):
        export(Options(run, tmp_path / "other", adapter=True, dtype="float32"))
    moved.rename(folder / "base")


HARMS = {"gone": Path.unlink, "edited": lambda file: change_json(file, lora_alpha=7.0)}


@pytest.mark.parametrize("harm", HARMS)
def test_a_description_of_adapters_that_changed_is_refused(adapted, tmp_path, harm):
    copy = shutil.copytree(adapted[0].path, tmp_path / "lora")
    HARMS[harm](copy / "model/lora.json")
    with refused("not what they were when the run in .* began: lora.json of the model"):
        export(Options(copy, tmp_path / "out"))
    (copy / "inputs.json").unlink()
    if harm == "gone":  # a loop of one's own may record no inputs
        with refused("has other parameters than the model"):
            export(Options(copy, tmp_path / "out"))


def test_custom_loops_export_without_model_notes(folder, tmp_path):
    saved_run(
        folder, "own", describe=lambda run, models, options: keep_model(run, models["policy"].config, arithmetic.TEXT)
    )
    assert export(Options(folder / "own", tmp_path / "out")) == 2


@pytest.mark.parametrize("options", ["", LORA], ids=["whole", "lora"])
def test_untied_heads_are_exported_despite_tied_config(folder, options, tmp_path):
    base = save_tiny_model(tmp_path / "untied", arithmetic.TEXT, tie_word_embeddings=False)
    change_json(base / "config.json", tie_word_embeddings=True)
    run, model, params, _ = saved_run(tmp_path, "run", options, base=base)
    assert any("lm_head" in warning["message"] for warning in read_lines(run.path / "warnings.jsonl"))
    keep_description(run, {"policy": model}, ModelOptions(str(base)))  # as a resumed run does
    trained = merge(params) if options else params
    assert params_sha256(load_run(run.path)[0].params) == params_sha256(trained)
    export(Options(run.path, tmp_path / "out", dtype="float32"))
    saved = load_pretrained(tmp_path / "out")
    assert "unembedding" in saved.params
    assert not saved.notes
    exact = merge(params, jnp.float32) if options else params
    assert params_sha256(saved.params) == params_sha256(in_float32(exact))


def test_added_chat_templates_belong_to_the_model(folder, tmp_path):
    base, name = save_tiny_model(tmp_path / "base", arithmetic.TEXT), "additional_chat_templates/tool_use.jinja"
    (base / name).parent.mkdir()
    (base / name).write_text("tools")
    run, model, _, _ = saved_run(tmp_path, "run", base=base)
    export(Options(run.path, tmp_path / "out"))
    for place in (run.path / "model", tmp_path / "out"):
        assert (place / name).read_text() == "tools"
        assert load_tokenizer(place).get_chat_template(tools=[{}]) == "tools"
    for changed in (run.path / "model", base):
        (changed / name).write_text("others")
        with refused(f"not what they were when the run .* began: {name} of the model"):
            if changed == base:
                keep_description(run, {"policy": model}, ModelOptions(str(base)))
            else:
                export(Options(run.path, tmp_path / "again"))


def test_best_checkpoint_is_exported_on_request(whole, tmp_path):
    copy = shutil.copytree(whole[0].path, tmp_path / "run")
    best, checkpoint = Options(copy, tmp_path / "out", step="best"), copy / "checkpoints/grpo/2"
    base = flattened(json.loads((copy / "config.json").read_text()))["model"]
    refusals = [
        ({}, "has no held-out scores"),
        ({0: 0.5, 1: 0.9, 2: 0.8}, "no checkpoint of step 1"),
        ({0: 0.5, 1: 0.1, 2: 0.5}, f"no step of .* a better held-out score than its start: take {base}"),
    ]
    for scores, words in refusals:
        (checkpoint / "digests.json").unlink()
        write_seal(checkpoint, step=2, scores=scores)
        with refused(words):
            export(best)
    (checkpoint / "digests.json").unlink()
    write_seal(checkpoint, step=2, scores={0: 0.5, 1: -math.inf, 2: 0.9})
    assert export(best) == 2


BAD_EXPORTS = [
    ({"run": "nowhere"}, "no model/config.json"),
    ({"phase": "dpo"}, r"no checkpoints of a phase 'dpo': its phases are \['grpo'\]"),
    ({"step": "best"}, "has no held-out scores"),
    ({"step": 3}, r"no checkpoint of step 3 .* only of \[2\]"),
    ({"adapter": True}, "did not train adapters"),
    ({"out": "full"}, "exists"),
]


@pytest.mark.parametrize(("options", "words"), BAD_EXPORTS)
def test_exports_that_cannot_be_are_refused(folder, whole, options, words):
    options = {"run": "run", "out": "out"} | options
    with refused(words):
        export(Options(**options | {name: folder / options[name] for name in ("run", "out")}))
    assert not (folder / "out").exists()


def test_a_run_does_not_continue_with_another_base(whole, tmp_path):
    run, model, params, _ = whole
    other = save_pretrained(
        tmp_path / "other", jax.tree.map(lambda x: x * 0.5, params), model.config, source=model.folder
    )
    with refused(r"not what they were when the run .* began: .*model.safetensors of the model"):
        keep_description(run, {"policy": model._replace(folder=other)}, ModelOptions(str(other)))
