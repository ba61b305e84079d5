"""Checks the commands of experiments.real, and runs them in small."""

import json

import pytest
from tiny import read_lines, refused, save_tiny_model

from experiments import real
from experiments.tasks.characters import Characters
from grpo_jax.commands import evaluate, export, flags
from grpo_jax.commands.train import method_of, module_of
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.options import options_of
from grpo_jax.tasks.options import open_task


def test_held_out_sums_are_not_trained_on():
    training, heldout = ({row["question"] for row in rows} for rows in real.sums())
    assert len(training | heldout) == len(training) + len(heldout) == 441
    assert all(str(eval(row["question"].rstrip("="))) == row["answer"] for row in real.sums()[0])


GENERATOR = "reasoning_gym:sums?high=4"
SAMPLES = {"sums": 3, "gsm8k": 7}
COMMANDS = [
    ("sums", ["train", "export", "evaluate"]),
    ("gsm8k", ["evaluate", "train", "export", "train", "export", "evaluate"]),
    (GENERATOR, ["train"]),
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("task", "commands"), COMMANDS)
def test_every_command_is_read(tmp_path, task, commands, small):
    config = real.Config(model="DIR", task=task, data="GSM8K", extra="--learning-rate 5e-6")
    stages = real.stages_of(config, tmp_path, 3)
    assert [stage.args[0] for stage in stages] == commands
    for stage in stages:
        name, *args = (real.in_small(stage) if small else stage).args
        if name == "train":
            options = flags.parse(module_of(method_of(args)).Config, None, args)
            assert options_of(options)["seed"] == 3
            assert (options_of(options)["steps"] == 2) == small
            rate = options_of(options)["learning_rate"]
        elif name == "evaluate":
            assert evaluate.parse(args).samples == (1 if small else SAMPLES[task])
        else:
            flags.read_flags(export.Options, args=args)
    assert rate == 5e-6


@pytest.mark.usefixtures("stand_in")
def test_solved_questions_are_never_held_out(tmp_path):
    args = real.generator_options(GENERATOR)
    options = flags.parse(module_of("grpo").Config, None, args).task
    assert options.template.count("\nAnswer: ") == 3
    model = load_pretrained(save_tiny_model(tmp_path / "model", Characters("".join(map(chr, range(32, 127))) + "\n")))
    sizes = {"num_prompts": 2, "group_size": 2, "seed": 0}
    with open_task(options, model, **sizes, stop=("\n",)) as task:
        held, (example, *_) = [row["question"] for row in task.heldout.examples], task.prompts(0).examples
        assert not any(f"{question}\n" in options.template for question in held)
        (component,) = task.reward.values()
        completion = task.read(model.tokenizer(f" {example['solution']}\n").input_ids, truncated=False)
        assert component.reward([example], [completion]) == [1]


def test_other_tasks_are_refused(tmp_path):
    with refused("--task is sum: give sums, gsm8k or reasoning_gym:NAME"):
        real.stages_of(real.Config(model="DIR", task="sum"), tmp_path, 0)


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
