"""The experiments as a user starts them."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import arithmetic, stories
from grpo_jax import cli

ROOT = Path(__file__).parents[1]
STORIES_MODEL = ROOT.parent / "shared/data/stories260K-hf"
FILES = {"config.json", "metrics.jsonl", "times.jsonl", "rollouts.jsonl", "results.json", "curves.png", "checkpoints"}
SMALL = ["--warm-steps", "4", "--warm-batch", "8", "--steps", "2", "--num-prompts", "8", "--eval-every", "1"]


def parse(*args, config=arithmetic.Config):
    return cli.parse(config, None, [str(arg) for arg in args])


def test_arithmetic_from_start_to_table_and_again_resumed(tmp_path, capsys):
    arithmetic.main(parse(*SMALL, "--run-dir", tmp_path / "run"))
    out = capsys.readouterr().out
    assert {file.name for file in (tmp_path / "run").iterdir()} == FILES
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert set(results) == {"before", "after", "control", "params_sha256"}
    assert results["params_sha256"] in out
    metrics = (tmp_path / "run/metrics.jsonl").read_text()

    config = parse("--resume", "--run-dir", tmp_path / "run")
    assert (config.steps, config.num_prompts) == (2, 8)  # those of the run, not the defaults
    arithmetic.main(config)
    assert json.loads((tmp_path / "run/results.json").read_text()) == results
    assert (tmp_path / "run/metrics.jsonl").read_text() == metrics


def test_a_second_run_gets_a_folder_of_its_own_and_resume_takes_the_newest(tmp_path):
    for name in ("run", "run-2"):
        assert parse("--run-dir", tmp_path / "run").run_dir == tmp_path / name
        cli.open_run(parse("--run-dir", tmp_path / "run"))
    assert parse("--run-dir", tmp_path / "run", "--resume").run_dir == tmp_path / "run-2"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--resume"], "there is no run to resume"),
        (["--no-such-option", "1"], "no-such-option"),
        (["--preset", "nonsense"], "nonsense"),
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
    cli.open_run(parse("--run-dir", tmp_path / "run"))
    cli.open_run(parse("--resume", "--run-dir", tmp_path / "run", "--devices", "2"))
    with pytest.raises(ValueError, match="steps differ from the run"):
        cli.open_run(parse("--resume", "--run-dir", tmp_path / "run", "--steps", "7"))


def test_two_runs_that_start_at_once_do_not_share_a_folder(tmp_path):
    first, second = (parse("--run-dir", tmp_path / "run", "--seed", seed) for seed in (0, 1))
    cli.open_run(first)
    with pytest.raises(ValueError, match="another run has just started"):
        cli.open_run(second)


@pytest.mark.parametrize("content", ["", '{"no_such_option": 1}'])
def test_a_config_that_cannot_be_read_is_refused(tmp_path, content, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(content)
    with pytest.raises(SystemExit):
        parse("--resume", "--run-dir", tmp_path / "run")
    assert "not of this experiment" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit):
        parse("--run-dir", tmp_path)


def test_numbers_of_runs_go_on_after_a_gap(tmp_path):
    for name in ("run", "run-2", "run-3"):
        cli.open_run(parse("--run-dir", tmp_path / "run"))
        assert (tmp_path / name / "config.json").exists()
    shutil.rmtree(tmp_path / "run-2")
    assert parse("--run-dir", tmp_path / "run").run_dir.name == "run-4"
    assert parse("--run-dir", tmp_path / "run", "--resume").run_dir.name == "run-3"


@pytest.mark.parametrize("config", [arithmetic.Config, stories.Config])
def test_help_explains_every_option(config, capsys):
    with pytest.raises(SystemExit):
        parse("--help", config=config)
    lines = capsys.readouterr().out.splitlines()
    options = [i for i, line in enumerate(lines) if line.lstrip("│ ").startswith("--")]
    assert len(options) >= 25
    for start, end in zip(options, [*options[1:], len(lines)], strict=True):
        text = " ".join(line.strip("│ ") for line in lines[start:end]).split("(default")[0].split()
        assert len([word for word in text if not word.startswith(("-", "{"))]) >= 3, lines[start]


@pytest.mark.skipif(not STORIES_MODEL.exists(), reason="needs the stories260K model")
def test_stories_from_start_to_table(tmp_path):
    args = ["--steps", "1", "--max-tokens", "16", "--num-prompts", "64", "--group-size", "2"]
    stories.main(parse("--model", STORIES_MODEL, *args, "--run-dir", tmp_path / "run", config=stories.Config))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["before"]["kl"] == pytest.approx(0, abs=1e-5)
    assert 0.5 < results["before"]["start_nll"] < 2.5
    assert {file.name for file in (tmp_path / "run").iterdir()} == FILES


# ---- killed and resumed. The environment variable asks for the whole main job.

SHORT = [] if os.environ.get("GRPO_JAX_FULL") else ["--warm-steps", "150", "--steps", "40", "--eval-every", "10"]
MOMENTS = ["warm", "grpo", "control", "*/*.orbax-checkpoint-tmp"] * 2 + ["grpo", "*/*.orbax-checkpoint-tmp"]


def start(folder: Path, *args: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.arithmetic", "--run-dir", str(folder), *args]
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
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path):
    args = [*SHORT, "--checkpoint-every", "5"]
    assert start(tmp_path / "whole", *args).wait() == 0
    expected = {name: (tmp_path / "whole" / name).read_bytes() for name in ("metrics.jsonl", "results.json")}
    dice = random.Random(0)
    for number, moment in enumerate(MOMENTS):
        folder = tmp_path / f"killed-{number}"
        where = kill_at(moment, folder, start(folder, *args), dice)
        assert start(folder, "--resume").wait() == 0
        for name, content in expected.items():
            assert (folder / name).read_bytes() == content, (number, where, name)
        print(f"kill {number} in {moment}: {where}; same bits")
