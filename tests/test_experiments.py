"""The experiments as a user starts them."""

import json
import os
import random
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


def test_resuming_with_other_options_is_refused(tmp_path, capsys):
    cli.open_run(parse("--run-dir", tmp_path / "run"))
    with pytest.raises(SystemExit):
        parse("--resume", "--run-dir", tmp_path / "run", "--steps", "7")
    assert "steps differ from the run" in " ".join(capsys.readouterr().err.split())


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

KILLS = 10
SHORT = [] if os.environ.get("GRPO_JAX_FULL") else ["--warm-steps", "150", "--steps", "40", "--eval-every", "10"]


def start(folder: Path, *args: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.arithmetic", "--run-dir", str(folder), *args]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path):
    args = [*SHORT, "--checkpoint-every", "5"]
    begun = time.monotonic()
    assert start(tmp_path / "whole", *args).wait() == 0
    seconds = time.monotonic() - begun
    expected = {name: (tmp_path / "whole" / name).read_bytes() for name in ("metrics.jsonl", "results.json")}
    moments = random.Random(0)
    for kill in range(KILLS):
        folder = tmp_path / f"killed-{kill}"
        process = start(folder, *args)
        time.sleep(moments.uniform(0.15, 0.95) * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        phases = sorted(path.name for path in (folder / "checkpoints").glob("*"))
        process = start(folder, "--resume") if (folder / "config.json").exists() else start(folder, *args)
        assert process.wait() == 0
        for name, content in expected.items():
            assert (folder / name).read_bytes() == content, (kill, name)
        print(f"kill {kill}: phases begun {phases}, same bits")
