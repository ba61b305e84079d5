"""The experiments as a user starts them."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments import (
    arithmetic,
    calculator,
    constitutional,
    distill,
    guess,
    hh_rlhf,
    multi_objective,
    online_preference,
    ppo,
    preferences,
    stories,
)
from experiments.tasks.arithmetic import EOS_ID
from experiments.tasks.stories import stories_task
from grpo_jax.config import ModelOptions
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import load_pretrained, save_pretrained
from grpo_jax.models.lora import merge
from grpo_jax.models.params import join, split
from grpo_jax.models.peft import load_adapter
from grpo_jax.prepare import load_model
from grpo_jax.rl.grpo import make_programs
from grpo_jax.runs import flags
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.export import Options, export
from grpo_jax.runs.pretrained import keep_description, load_run
from grpo_jax.tasks.task import random_reward
from grpo_jax.train import train

pytestmark = pytest.mark.usefixtures("without_curves")
ROOT = Path(__file__).parents[2]
STORIES_MODEL = ROOT.parent / "shared/data/stories260K-hf"
HH = ROOT.parent / "shared/data/hh-rlhf/harmless-base-test.jsonl.gz"
needs_pairs = pytest.mark.skipif(not (STORIES_MODEL.exists() and HH.exists()), reason="needs stories260K and HH-RLHF")
needs_stories = pytest.mark.skipif(not STORIES_MODEL.exists(), reason="needs the stories260K model")
FILES = {"config.json", "metrics.jsonl", "times.jsonl", "rollouts.jsonl", "results.json", "report.html"}
FILES |= {"inputs.json", "lock", "tensorboard", "checkpoints", "model", "command.txt"}
CONFIGS = [
    module.Config
    for module in (
        arithmetic,
        calculator,
        constitutional,
        distill,
        guess,
        hh_rlhf,
        multi_objective,
        online_preference,
        ppo,
        preferences,
        stories,
    )
]
SMALL = ["--warm-steps", "4", "--warm-batch", "8", "--steps", "2", "--num-prompts", "40", "--eval-every", "1"]


def parse(*args, config=arithmetic.Config):
    return flags.parse(config, None, [str(arg) for arg in args])


@pytest.fixture(scope="module", autouse=True)
def model_that_compiles_soon():
    with pytest.MonkeyPatch.context() as patch:
        model = ModelConfig(arithmetic.MODEL.vocab_size, 16, 32, 1, 2, 2, 8, initializer_range=0.1)
        patch.setattr(arithmetic, "MODEL", model)
        yield


@pytest.fixture(scope="module")
def arithmetic_run(tmp_path_factory):
    """A folder that holds a finished "run", and something else that is "full"."""
    folder = tmp_path_factory.mktemp("arithmetic")
    arithmetic.main(parse(*SMALL, "--run-dir", folder / "run"))
    (folder / "full").mkdir()
    (folder / "full/thesis.txt").write_text("mine")
    return folder


@pytest.mark.slow
def test_arithmetic_from_start_to_table_and_again_resumed(arithmetic_run, capsys):
    run = arithmetic_run / "run"
    assert {file.name for file in run.iterdir()} == FILES | {"warnings.jsonl"}  # there is little to learn
    results = json.loads((run / "results.json").read_text())
    assert set(results) == {"before", "after", "control", "params_sha256"}
    assert {"avg", "avg_low", "maj_at_7", "pass_at_4", "greedy_high", "change_low"} <= set(results["after"])
    assert "change" not in results["before"]
    metrics = (run / "metrics.jsonl").read_text()
    logged = [json.loads(line) for line in metrics.splitlines()]
    evaluated = [line for line in logged if line["phase"] == "grpo" and "heldout_avg" in line]
    assert [line["step"] for line in evaluated] == [0, 1, 2]
    assert evaluated[-1]["heldout_avg"] == results["after"]["avg"]  # the same completions

    config = parse("--resume", "--run-dir", run)
    assert (config.train.steps, config.train.sampling.num_prompts) == (2, 40)  # those of the run, not the defaults
    arithmetic.main(config)
    assert json.loads((run / "results.json").read_text()) == results
    assert results["params_sha256"] in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_text() == metrics


@pytest.mark.slow
def test_arithmetic_on_a_mesh_samples_what_one_device_does(arithmetic_run, tmp_path):
    mesh = ["--devices", "8", "--parallel", "mesh", "--fsdp", "4", "--tensor", "2"]
    arithmetic.main(parse(*SMALL, *mesh, "--run-dir", tmp_path / "run"))
    ours, theirs = (
        [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path, arithmetic_run)
    )
    assert [line.get("reward") for line in ours] == [line.get("reward") for line in theirs]
    assert (tmp_path / "run/report.html").exists()


@pytest.mark.slow
def test_ppo_beside_grpo_and_a_coin_over_seeds(tmp_path):
    ppo.main(parse(*SMALL, "--num-seeds", "2", "--run-dir", tmp_path / "run", config=ppo.Config))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert (tmp_path / "run/report.html").exists()
    assert set(results["runs"]) == {"ppo", "grpo", "control"}
    assert results["runs"]["ppo"]["before"] == results["runs"]["grpo"]["before"]
    assert results["runs"]["ppo"]["parameters"][0] > 1.9 * results["runs"]["grpo"]["parameters"][0]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    of_ppo = [line for line in lines if line["phase"] == "ppo_1"]
    assert of_ppo[-1]["heldout_avg"] == results["runs"]["ppo"]["avg"][1]
    assert {"critic_loss", "explained_variance", "value_mean", "returns_mean", "value_clip"} <= set(of_ppo[-1])


def test_a_second_run_gets_a_folder_of_its_own_and_resume_takes_the_newest(tmp_path):
    for name in ("run", "run-2"):
        assert parse("--run-dir", tmp_path / "run").output.run_dir == tmp_path / name
        flags.open_run(parse("--run-dir", tmp_path / "run"))
    assert parse("--run-dir", tmp_path / "run", "--resume").output.run_dir == tmp_path / "run-2"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--resume"], "there is no run to resume"),
        (["--no-such-option", "1"], "no-such-option"),
        (["--preset", "nonsense"], "nonsense"),
        (["--steps", "0"], "steps is 0: it must be at least 1"),
        (["--learning-rate", "nan"], "learning_rate is nan: it must be above 0"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, args, message):
    with pytest.raises(SystemExit) as error:
        parse(*args, "--run-dir", tmp_path / "run")
    assert error.value.code == 2
    captured = capsys.readouterr()
    assert message in " ".join((captured.out + captured.err).split())
    assert not (tmp_path / "run").exists()


def test_resuming_may_change_where_a_run_computes_but_not_what(tmp_path):
    flags.open_run(parse("--run-dir", tmp_path / "run"))
    flags.open_run(parse("--resume", "--run-dir", tmp_path / "run", "--devices", "2"))
    with pytest.raises(ValueError, match=r"other options \(learning_rate\)"):
        flags.open_run(parse("--resume", "--run-dir", tmp_path / "run", "--learning-rate", "0.5"))


def test_two_runs_that_start_at_once_do_not_share_a_folder(tmp_path):
    first, second = (parse("--run-dir", tmp_path / "run", "--seed", seed) for seed in (0, 1))
    flags.open_run(first)
    with pytest.raises(ValueError, match="another run has just started"):
        flags.open_run(second)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "cannot be read"),
        ('{"no_such_option": 1}', "of another experiment or version"),
        ("{}", "it has no options"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, content, said, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(content)
    with pytest.raises(SystemExit):
        parse("--resume", "--run-dir", tmp_path / "run")
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit):
        parse("--run-dir", tmp_path)


def test_numbers_of_runs_go_on_after_a_gap(tmp_path):
    for name in ("run", "run-2", "run-3"):
        flags.open_run(parse("--run-dir", tmp_path / "run"))
        assert (tmp_path / name / "config.json").exists()
    shutil.rmtree(tmp_path / "run-2")
    assert parse("--run-dir", tmp_path / "run").output.run_dir.name == "run-4"
    assert parse("--run-dir", tmp_path / "run", "--resume").output.run_dir.name == "run-3"


@pytest.mark.parametrize("config", CONFIGS)
def test_help_explains_every_option(config, capsys):
    with pytest.raises(SystemExit):
        parse("--help-all", config=config)
    lines = capsys.readouterr().out.splitlines()
    options = [i for i, line in enumerate(lines) if re.match(r"--[a-z]", line.lstrip("│ "))]
    assert len(options) >= 20
    for start, end in zip(options, [*options[1:], len(lines)], strict=True):
        text = " ".join(line.strip("│ ") for line in lines[start:end]).split("(default")[0].split()
        assert len([word for word in text if not word.startswith(("-", "{"))]) >= 3, lines[start]


@pytest.mark.slow
@needs_stories
def test_stories_from_start_to_table_to_a_folder_of_the_same_format(tmp_path):
    args = [
        "--steps",
        "1",
        "--max-tokens",
        "16",
        "--num-prompts",
        "64",
        "--group-size",
        "2",
        "--max-prompt-tokens",
        "40",
    ]
    run = tmp_path / "run"
    stories.main(parse("--model", STORIES_MODEL, *args, "--run-dir", run, config=stories.Config))
    results = json.loads((run / "results.json").read_text())
    assert results["before"]["kl"] == pytest.approx(0, abs=1e-5)
    assert results["after"]["kl"] > 1e-4  # to the start, not to itself
    assert 0.5 < results["before"]["start_nll"] < 2.5
    assert {file.name for file in run.iterdir()} == FILES
    assert export(Options(run, tmp_path / "out")) == 1
    saved = load_pretrained(tmp_path / "out")
    assert params_sha256(saved.params) == results["params_sha256"]
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert (run / "results.json").read_text().strip() in card
    assert (run / "command.txt").read_text().strip() in card
    assert (run / "config.json").read_text().strip() in card
    assert (saved.config, saved.eos_ids) == (load_pretrained(STORIES_MODEL).config, (1, 2))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """The base, the parameters after two steps of LoRA with options that are not the defaults, and the run."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(STORIES_MODEL, folder / "base")
    args = ["--steps", "2", "--max-tokens", "4", "--num-prompts", "4", "--group-size", "2", "--learning-rate", "1e-2"]
    args += ["--lora-rank", "2", "--lora-alpha", "6", "--lora-targets", "q_proj", "o_proj", "down_proj"]
    args += ["--param-dtype", "bfloat16", "--remat", "layer", "--attention", "xla"]
    config = parse("--model", folder / "base", *args, "--run-dir", folder / "run", config=stories.Config)
    loaded = load_model(config.model, seed=0)
    assert (loaded.pretrained.config.remat, loaded.pretrained.config.attention) == ("layer", "xla")
    assert {x.dtype for x in jax.tree.leaves(loaded.params.base)} == {jnp.dtype("bfloat16")}
    assert loaded.params.scale == 3
    model = loaded.pretrained
    task = stories_task(model.tokenizer, model.eos_ids, vocab_size=512, num_prompts=4, seed=0)
    run = flags.open_run(config)
    keep_description(run, model, config.model)
    programs, models = make_programs(loaded.policy, task, config.train), {"policy": loaded.params}
    state = train(models, task, config.train, run, programs, phase="grpo", reward=random_reward(0))
    return folder, state, join(state.params, split(models)[1])["policy"], run


@pytest.mark.slow
@needs_stories
def test_lora_trains_and_saves_adapters_alone(lora_run):
    folder, state, _, run = lora_run
    line = run.lines()[0]
    assert line["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the base, where adapters start
    assert line["grad_norm"] > 0
    assert len({line["compilations"] for line in run.lines("times.jsonl")}) == 1  # none after the first step
    trained, moments = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.params, state.opt_state))
    assert trained == 2 * 5 * (128 + 128 + 236)  # rank, layers, and in + out of q, o and down
    assert moments == 2 * trained + 2  # and two counts of steps
    on_disk = sum(file.stat().st_size for file in (folder / "run/checkpoints").rglob("*") if file.is_file())
    assert on_disk < 4 * 3 * trained + 2**16


@needs_stories
def test_adapters_are_exported_merged_or_alone_also_when_their_base_has_moved(lora_run, tmp_path):
    folder, _, trained, _ = lora_run
    run = folder / "run"
    export(Options(run, tmp_path / "merged", dtype="float32"))
    assert not (tmp_path / "merged/lora.json").exists()
    saved = load_pretrained(tmp_path / "merged")
    loaded, step = load_run(run)
    assert step == 2
    assert params_sha256(loaded.params) == params_sha256(merge(trained))
    assert loaded.eos_ids == saved.eos_ids
    # Of the rounded weights that it was trained on: the file holds their exact values.
    assert params_sha256(saved.params) == params_sha256(jax.tree.map(lambda x: x.astype(jnp.float32), merge(trained)))
    export(Options(run, tmp_path / "half", dtype="bfloat16"))
    assert load_file(tmp_path / "half/model.safetensors")["model.norm.weight"].dtype == jnp.bfloat16

    moved = (folder / "base").rename(folder / "moved")
    export(Options(run, tmp_path / "adapter", adapter=True))
    adapted = load_adapter(tmp_path / "adapter", trained.base)
    card = (tmp_path / "adapter/README.md").read_text()
    assert "library_name: peft" in card
    assert "## Results" not in card
    assert params_sha256(adapted.adapters) == params_sha256(trained.adapters)
    assert adapted.scale == trained.scale
    with pytest.raises(ValueError, match="say where it is with --base"):
        export(Options(run, tmp_path / "out"))
    export(Options(run, tmp_path / "out", base=moved))
    assert params_sha256(load_run(run, base=moved)[0].params) == params_sha256(loaded.params)
    with pytest.raises(ValueError, match="not those that the adapters were trained on"):
        export(Options(run, tmp_path / "other", base=tmp_path / "merged"))
    with pytest.raises(ValueError, match="leave out --dtype"):
        export(Options(run, tmp_path / "other", adapter=True, dtype="float32"))
    moved.rename(folder / "base")


@needs_stories
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"param_dtype": "bfloat16"}, "param_dtype bfloat16 would lose"),
        ({"attention": "cudnn"}, "bfloat16"),
        ({"attention": "cudnn", "dtype": "bfloat16"}, "NVIDIA GPU"),
        ({"lora_rank": 2, "lora_alpha": 0.0}, "alpha"),
    ],
)
def test_models_that_cannot_be_trained_as_asked(options, message):
    with pytest.raises(ValueError, match=message):
        load_model(ModelOptions(str(STORIES_MODEL), **options), seed=0)


@needs_stories
def test_a_run_does_not_go_on_with_another_base(lora_run, tmp_path):
    folder, _, trained, run = lora_run
    config = parse("--resume", "--run-dir", folder / "run", config=stories.Config)
    loaded = load_model(config.model, seed=0).pretrained
    keep_description(run, loaded, config.model)
    params = jax.tree.map(lambda x: x * 0.5, trained.base)
    other = save_pretrained(tmp_path / "other", params, loaded.config, source=loaded.folder)
    with pytest.raises(ValueError, match=r"not what they were when the run .* began: .*model.safetensors of the model"):
        keep_description(run, loaded._replace(folder=other), config.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": "nowhere"}, "no model/config.json"),
        ({"phase": "dpo"}, "no checkpoints of a phase 'dpo'"),
        ({"step": 3}, r"no checkpoint of step 3 .* only of \[2\]"),
        ({"adapter": True}, "did not train adapters"),
        ({"out": "full"}, "exists"),
        ({"phase": ""}, r"its phases are \['control', 'grpo', 'warm'\]"),
    ],
)
def test_exports_that_cannot_be(arithmetic_run, options, message):
    given = {"run": "run", "out": "out"} | options
    given |= {name: arithmetic_run / given[name] for name in ("run", "out")}
    with pytest.raises(ValueError, match=message) as error:
        export(Options(**given))
    assert "\n" not in str(error.value)
    assert not (arithmetic_run / "out").exists()


@pytest.mark.slow
def test_a_model_from_nothing_is_exported_with_its_tokenizer(arithmetic_run):
    export(Options(arithmetic_run / "run", arithmetic_run / "saved", phase="warm"))
    saved = load_pretrained(arithmetic_run / "saved")
    loaded, step = load_run(arithmetic_run / "run", phase="warm", dtype="bfloat16")
    assert step == 4
    assert params_sha256(loaded.params) == params_sha256(saved.params)
    assert loaded.config == dataclasses.replace(saved.config, dtype="bfloat16")
    assert (loaded.eos_ids, len(loaded.tokenizer)) == (saved.eos_ids, len(saved.tokenizer))
    assert dataclasses.replace(saved.config, initializer_range=0.1) == arithmetic.MODEL
    assert saved.eos_ids == (EOS_ID,)
    assert saved.tokenizer.decode(saved.tokenizer.encode("07+58=")) == "07+58="


# ---- killed and resumed. The environment variable asks for the whole main job.

SHORT = [] if os.environ.get("GRPO_JAX_FULL") else ["--warm-steps", "150", "--steps", "40", "--eval-every", "10"]
SAVING = "*/*.orbax-checkpoint-tmp"
PAIRS = ["--method", "reward-model", "--model", str(STORIES_MODEL), "--data", str(HH), "--steps", "40"]
LORA = ["--model", str(STORIES_MODEL), "--lora-rank", "2", "--steps", "10", "--max-tokens", "32"]


def start(script: str, folder: Path, *args: str) -> subprocess.Popen:
    command = [sys.executable, "-m", f"experiments.{script}", "--run-dir", str(folder), *args]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def kill_at(moment: str, folder: Path, process: subprocess.Popen, dice: random.Random) -> str:
    """Kills within a phase (its folder, then a few seconds), or in mid-save (a checkpoint not yet renamed)."""
    saving = moment.endswith("-tmp")
    time.sleep(dice.uniform(8, 20) if saving else 0)
    while not list((folder / "checkpoints").glob(moment)) and process.poll() is None:
        time.sleep(0.002)
    time.sleep(0 if saving else dice.uniform(0, 8))
    process.send_signal(signal.SIGKILL)
    process.wait()
    unfinished = [str(path.relative_to(folder)) for path in (folder / "checkpoints").glob("*/*-tmp")]
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return f"after {lines[-1][:30] if lines else 'no line'}, unfinished {unfinished}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "moments"),
    [
        ("arithmetic", SHORT, ["warm", "grpo", "control", SAVING] * 2 + ["grpo", SAVING]),
        ("ppo", [*SHORT, "--num-seeds", "1"], ["warm_0", "ppo_0", "control_0", SAVING]),
        pytest.param("train", PAIRS, ["reward_model", SAVING], marks=needs_pairs),
        pytest.param("stories", LORA, ["grpo", "control", SAVING, "grpo", SAVING], marks=needs_stories),
    ],
)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path, script, options, moments):
    args = [*options, "--checkpoint-every", "5"]
    assert start(script, tmp_path / "whole", *args).wait() == 0
    expected = {name: (tmp_path / "whole" / name).read_bytes() for name in ("metrics.jsonl", "results.json")}
    dice = random.Random(0)
    for number, moment in enumerate(moments):
        folder = tmp_path / f"killed-{number}"
        where = kill_at(moment, folder, start(script, folder, *args), dice)
        assert start(script, folder, "--resume").wait() == 0
        for name, content in expected.items():
            assert (folder / name).read_bytes() == content, (number, where, name)
        print(f"kill {number} in {moment}: {where}; same bits")


@pytest.mark.slow
def test_a_student_beside_its_teacher_and_again_resumed(tmp_path):
    args = [*SMALL, "--num-seeds", 1, "--grpo-steps", 2, "--grpo-eval-every", 1, "--eval-samples", 1]
    args += ["--kinds", "reverse_kl", "--run-dir", tmp_path / "run"]
    distill.main(parse(*args, config=distill.Config))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert set(results["runs"]) == {"reverse_kl", "grpo", "control", "sft"}
    starts = {row["start"][0] for row in results["runs"].values()}
    assert len(starts) == 1
    assert (tmp_path / "run/samples.png").exists()
    distill.main(parse("--resume", "--run-dir", tmp_path / "run", config=distill.Config))
    assert json.loads((tmp_path / "run/results.json").read_text()) == results


def test_how_often_a_policy_prefers_what_is_chosen_is_counted_over_all_pairs():
    generator = np.random.default_rng(0)
    reference = np.log(generator.dirichlet(np.ones(4), 2))
    worth, log_ratio = generator.normal(size=(2, 2, 4))
    log_ratio[0, 1] = log_ratio[0, 2]
    expected = 0.0
    for p, u, r in zip(np.exp(reference), worth, log_ratio, strict=True):
        for i, j in itertools.permutations(range(4), 2):
            drawn, wins = p[i] * p[j] / (1 - p[i]), 1 / (1 + np.exp(u[j] - u[i]))
            expected += drawn * (0.5 if r[i] == r[j] else wins if r[i] > r[j] else 1 - wins) / 2
    accuracy = partial(preferences.pair_accuracy, reference=reference, worth=worth)
    assert accuracy(log_ratio) == pytest.approx(expected)
    assert accuracy(np.zeros_like(worth)) == pytest.approx(0.5)
    assert accuracy(3 * worth + 1) == accuracy(worth) > accuracy(log_ratio)


def test_pairs_are_of_different_completions_and_chosen_as_often_as_they_should():
    generator = np.random.default_rng(1)
    shape = preferences.PROMPTS, len(preferences.COMPLETIONS)
    reference = np.log(generator.dirichlet(np.full(shape[1], 0.05), shape[0]) + 1e-9)
    reference -= np.log(np.exp(reference).sum(-1, keepdims=True))
    worth, number = preferences.utilities(0), 20_000
    places = preferences.VOCAB ** np.arange(preferences.TOKENS)[::-1]
    for shuffled in (False, True):
        pairs = preferences.sample_pairs(reference, worth, number, 0, shuffled=shuffled)
        prompts, answers = np.array(pairs.prompts)[:, 0], np.array(pairs.answers) @ places
        assert (answers[:, 0] != answers[:, 1]).all()
        chosen, rejected = worth[prompts[:, None], answers].T
        expected = 0.5 if shuffled else preferences.pair_accuracy(worth, reference=reference, worth=worth)
        assert np.mean(chosen > rejected) == pytest.approx(expected, abs=4 * 0.5 / number**0.5)
        for prompt, probabilities in enumerate(np.exp(reference)):
            most = np.argmax(probabilities)
            others = np.delete(probabilities, most)
            expected = probabilities[most] * (1 + (others / (1 - others)).sum())  # first, or behind another
            found = (answers[prompts == prompt] == most).any(1)
            assert found.mean() == pytest.approx(expected, abs=4 * 0.5 / len(found) ** 0.5)


@pytest.mark.parametrize("option", ["--num-pairs", "--steps", "--beta"])
def test_pairs_refuse_impossible_options_before_anything_is_made(tmp_path, capsys, option):
    args = [option, "0", "--run-dir", str(tmp_path / "run"), "--no-compilation-cache"]
    with pytest.raises(SystemExit) as ended:
        flags.main(preferences.Config, preferences.main, None, args)
    assert ended.value.code == 2
    assert f"error: {option[2:].replace('-', '_')} is 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_pairs_of_a_known_worth_against_the_closed_form_and_again_resumed(tmp_path, loss):
    args = ["--loss", loss, "--steps", 8, "--num-pairs", 32, "--num-seeds", 1, "--warmup-steps", 2]
    config = parse(*args, "--eval-every", 4, "--run-dir", tmp_path / "run", config=preferences.Config)
    preferences.main(config)
    results = json.loads((tmp_path / "run/results.json").read_text())
    runs = {method: {name: values[0] for name, values in row.items()} for method, row in results["runs"].items()}
    assert list(runs) == ["start", loss, "control", "closed form"]
    assert (runs["start"]["kl"], runs["start"]["share"]) == (0, 0)
    assert runs["closed form"]["kl_to_best"] == 0
    for row in runs.values():  # J(π*) − J(π) = β KL(π ‖ π*), whatever the policy
        gap = runs["closed form"]["objective"] - row["objective"]
        assert gap == pytest.approx(row["kl_to_best"], abs=1e-4)
        assert row["accuracy"] == pytest.approx(runs["closed form"]["accuracy"] - row["below_best"])
        assert row["below_best"] >= 0
    assert runs["start"]["accuracy"] == pytest.approx(0.5)
    assert runs[loss]["kl"] > 0
    preferences.main(parse("--resume", "--run-dir", tmp_path / "run", config=preferences.Config))
    assert json.loads((tmp_path / "run/results.json").read_text()) == results
