"""Checks the commands of experiments.real, and runs them in small."""

import json

import pytest
from tiny import read_lines, refused, save_tiny_model

from experiments import real
from experiments.tasks.characters import Characters
from grpo_jax.commands import evaluate
from grpo_jax.commands.train import method_of, module_of
from grpo_jax.options import options_of
from grpo_jax.runs import export, flags


def test_held_out_sums_are_not_trained_on():
    training, heldout = ({row["question"] for row in rows} for rows in real.sums())
    assert len(training | heldout) == len(training) + len(heldout) == 441
    assert all(str(eval(row["question"].rstrip("="))) == row["answer"] for row in real.sums()[0])


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("task", real.TASKS)
def test_every_command_is_read(tmp_path, task, small):
    config = real.Config(model="DIR", task=task, data="GSM8K", extra="--learning-rate 3e-6")
    names = []
    for stage in real.TASKS[task](config, tmp_path, 3):
        name, *args = (real.in_small(stage) if small else stage).args
        names.append(name)
        if name == "train":
            options = flags.parse(module_of(method_of(args)).Config, None, args)
            assert options_of(options)["seed"] == 3
            assert (options_of(options)["steps"] == 2) == small
        elif name == "evaluate":
            assert evaluate.parse(args).samples == (1 if small else 3)
        else:
            flags.read_flags(export.Options, args=args)
    assert names[-3:] == ["train", "export", "evaluate"]
    args = real.TASKS[task](config, tmp_path, 3)[-3].args[1:]
    assert options_of(flags.parse(module_of("grpo").Config, None, args))["learning_rate"] == 3e-6


def test_gsm8k_needs_its_rows(tmp_path):
    with refused("--data is needed for gsm8k"):
        real.gsm8k_stages(real.Config(model="DIR", task="gsm8k"), tmp_path, 0)


@pytest.mark.slow
def test_a_whole_run_in_small_is_not_repeated(tmp_path, capsys):
    save_tiny_model(tmp_path / "model", Characters("0123456789+= \n"))
    small = "--steps 2 --num-prompts 2 --group-size 2 --eval-every 1 --num-heldout 4 --eval-samples 1"
    config = real.Config(model=str(tmp_path / "model"), out=tmp_path / "out", seeds=(0, 1), extra=small)
    real.main(config)
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert {*results["1"]} == {"before", "after", "control", "exported", "minutes"}
    assert (tmp_path / "out/curves.png").stat().st_size > 1000
    times = read_lines(tmp_path / "out/seed1/seconds.jsonl")
    assert len(times) == 3
    real.main(config)
    assert read_lines(tmp_path / "out/seed1/seconds.jsonl") == times
    assert "seed" in capsys.readouterr().out
