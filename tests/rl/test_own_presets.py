"""Presets and constants of the user: by file, by value, by option; refused in a sentence, and sealed in a run."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import own_presets
import pytest
from bigrams import POLICY, TASK, train_grpo
from rl_helpers import RUN, Stop, assert_close, loss_of, near, open_run, ragged_batch, run_programs
from tiny import refused, save_tiny_model

from experiments.tasks import arithmetic
from grpo_jax import GRPOTrainer, functional as F
from grpo_jax.config import recipe, validate, with_options
from grpo_jax.data.types import sources_of
from grpo_jax.options import from_json
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.types import RewardArrays
from grpo_jax.runs.folder import differing_options

FILE = str(Path(own_presets.__file__))
NAMES = ("spo", "reinforce_pp", "kl_cov", "soft")
SHORT = {"steps": 2, "learning_rate": 1e-2, "kl_coef": 0.0}


def test_the_file_of_four_methods_is_short():
    lines = [line for line in Path(FILE).read_text().splitlines() if line.strip()]
    assert len(lines) <= 30


@pytest.mark.parametrize("name", NAMES)
def test_a_file_and_a_value_are_one_loss(name):
    value = getattr(own_presets, name)
    by_file, by_value = recipe(f"{FILE}:{name}"), recipe(value)
    for config in (by_file, by_value):
        validate(config)
        assert config.loss.objective.numbers == value.numbers
    saved = json.loads(json.dumps(dataclasses.asdict(by_file)))
    assert from_json(recipe(), saved) == by_file
    assert by_value.loss.preset.startswith("Objective ")
    assert json.loads(json.dumps(dataclasses.asdict(by_value)))["loss"]["preset"] == by_value.loss.preset
    again = recipe(value._replace())
    assert by_value == again
    saved = json.loads(json.dumps(dataclasses.asdict(by_value)))
    assert not differing_options(saved, dataclasses.asdict(again))
    other = recipe(value.with_constants(kl_coef=0.5))
    assert "preset" in differing_options(saved, dataclasses.asdict(other))


def test_the_gradient_of_spo_is_by_hand():
    batch = near(POLICY, {"before": jnp.zeros((8, 5)), "after": jnp.zeros((8, 5))}, ragged_batch((4, 3, 2, 5), 8))
    advantages = np.random.default_rng(0).normal(size=batch.completion_mask.shape).astype(np.float32)
    old, mask, width = batch.old_logprobs, batch.completion_mask, 0.3
    new = old + np.random.default_rng(1).normal(0, 0.2, old.shape).astype(np.float32)
    objective = recipe(f"{FILE}:spo", width=width).loss.objective
    gradient = jax.grad(lambda new: objective.loss(new, old, advantages, mask)[0])(new)
    ratio = np.exp(new - old)
    slope = ratio * (np.abs(advantages) * (ratio - 1) / width - advantages)
    assert_close(gradient, np.where(mask, slope, 0) / mask.sum(), rtol=1e-4, atol=1e-7)


CORRECTED = [
    ("token", {"cap": 1.0}, F.token_log_ratio, lambda x: F.truncated_weights(x, cap=1.0)),
    ("icepop", {"low": 0.9}, F.token_log_ratio, lambda x: F.masked_weights(x, low=0.9)),
    ("sequence", {"cap": 0.5}, F.sequence_log_ratio, lambda x: F.truncated_weights(x, cap=0.5)),
]


@pytest.mark.parametrize(("correction", "constants", "log_ratio", "weights"), CORRECTED, ids=lambda x: str(x)[:9])
def test_constants_of_corrections_are_used(correction, constants, log_ratio, weights):
    batch = near(POLICY, {"before": jnp.ones((8, 5)), "after": jnp.ones((8, 5))}, ragged_batch((4, 3, 2, 5), 8))
    advantages = np.ones((4, 3), np.float32)
    config = recipe("dapo", correction=correction, **constants)
    validate(config)
    loss = loss_of(grpo_method(POLICY, config))
    params = {"policy": {"before": jnp.ones((8, 5)), "after": jnp.ones((8, 5))}}
    batch = batch._replace(
        advantages=advantages, weights=F.token_mean_weights(batch.completion_mask), ref_logprobs=None
    )
    mean = loss(params, batch)[1].means["correction"]
    expected = F.masked_sum(
        weights(log_ratio(batch.old_logprobs, batch.sampler_logprobs, batch.completion_mask)), batch.completion_mask
    )
    assert_close(mean, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["sum", "components", "spans"])
def test_constants_of_advantages_are_used(kind):
    rng = np.random.default_rng(0)
    rewards, ends = rng.normal(size=(4, 3)).astype(np.float32), np.arange(5) % 2 == 1
    components = rng.normal(size=(4, 3, 2)).astype(np.float32)
    parts = np.where(ends, rng.normal(size=(4, 3, 5)), np.nan).astype(np.float32)
    arrays = RewardArrays(rewards, np.ones((4, 3), bool), components, np.ones(2, np.float32), parts)
    batch = ragged_batch((4, 3, 2, 5), 8)
    config = recipe("dapo", advantages_of=kind, ddof=0, eps=0.1)
    validate(config)
    actual = grpo_method(POLICY, config).advantage(arrays, batch, 0.0)[0].advantages
    expected = {
        "sum": lambda: F.group_advantages(rewards, ddof=0, eps=0.1),
        "components": lambda: F.gdpo_advantages(np.moveaxis(components, -1, 0), weights=np.ones(2), ddof=0, eps=0.1),
        "spans": lambda: F.span_advantages(np.nan_to_num(parts), ~np.isnan(parts), ddof=0, eps=0.1),
    }[kind]()
    assert_close(actual, expected, rtol=1e-5, atol=1e-6)


REFUSED = [
    ({"preset": f"{FILE}:no_preset"}, "of type int: it must be an Objective"),
    ({"preset": f"{FILE}:missing"}, "has no 'missing'"),
    ({"preset": "missing.py:it"}, "there is no file"),
    ({"preset": f"{FILE}:fails"}, "fails cannot be used: TypeError"),
    ({"preset": f"{FILE}:kl_cov", "piece_tokens": 8}, "leave piece_tokens out, and set devices to 1"),
    ({"preset": f"{FILE}:takes_nothing"}, "takes_nothing cannot be used: partial object"),
    ({"preset": own_presets.grpo._replace(term=3)}, "Objective cannot be used: term is 3: it must be a function"),
    ({"preset": own_presets.grpo._replace(constants={"cap": 1.0})}, "cannot be used: partial object"),
    ({"preset": own_presets.grpo._replace(kl_in_reward="no")}, "kl_in_reward is 'no': it must be True or False"),
    ({"preset": "sapo", "constant": ("tau_positive=2", "tau_positive=3")}, "give each name once"),
    ({"preset": "sapo", "constant": ("tau_positive",)}, "write NAME=NUMBER"),
    ({"preset": "sapo", "constant": ("cap=3",)}, "cap is no constant of this run: .*tau_positive"),
    ({"preset": "mine.py"}, "the preset mine.py is a file: name the Objective in it, as mine.py:NAME"),
    ({"preset": "sapo", "tau_positive": -1.0}, "must be at least 0"),
    ({"preset": "sapo", "tau_positive": 0.0}, "must be above 0"),
    ({"preset": "grpo", "constant": ("epsilon_low=0.1",)}, "names epsilon_low, which is an option of its own"),
    ({"preset": "pass_at_k", "k": 9}, "k is 9: it must be between 1 and the group's size, 8"),
    ({"preset": "dapo", "ddof": 0, "critic": "shared"}, "ddof is no constant"),
    ({"preset": "dr_grpo", "ddof": 0}, "ddof is no constant"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_unusable_presets_are_refused_in_a_sentence(options, words):
    with refused(words):
        validate(recipe(**options))


def test_a_preset_drops_former_constants():
    config = recipe("sapo", tau_positive=2.0, tau_negative=3)
    assert config.loss.constant == ("tau_negative=3", "tau_positive=2.0")
    assert with_options(config, tau_positive=4.0).loss.constants == {"tau_negative": 3, "tau_positive": 4}
    assert with_options(config, preset="vespo").loss.constants == {}
    with refused("no option tau_positive"):
        with_options(recipe("dapo"), tau_positive=2.0)


def test_a_run_resumes_only_with_its_file(tmp_path):
    """And its numbers are those of the same preset as a value."""
    file = Path(shutil.copy(FILE, tmp_path / "mine.py"))
    config = with_options(RUN, preset=f"{file}:spo", **SHORT)
    by_value = with_options(RUN, preset=own_presets.spo, **SHORT)
    lines = []
    for folder, options in (("run", config), ("value", by_value)):
        run = open_run(tmp_path / folder, options)
        programs = make_programs(POLICY, TASK, options, sampler=run_programs().sampler)
        train_grpo(TASK, options, run, programs)
        lines.append(run.lines())
    assert lines[0] == lines[1]
    file.write_text(file.read_text().replace("width=0.2", "width=0.3"))
    with refused("source of the preset"):
        train_grpo(TASK, config, open_run(tmp_path / "run", config))


def threes(rows, texts):
    return [text.count("3") for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_takes_a_file_and_a_value(tmp_path, name):
    model = str(save_tiny_model(tmp_path / "tiny", arithmetic.TEXT))
    options = {"steps": 3, "group_size": 4, "max_tokens": 4, "learning_rate": 1e-2, "checkpoint_every": 1}

    def stop(step, line):
        if step == 2:
            raise Stop

    def trained(folder, preset, **hooks):
        trainer = GRPOTrainer(model, threes, preset=preset, run_dir=tmp_path / folder, **options, **hooks)
        trainer.train(["1+1=", "2+2=", "12+3="])
        return json.loads((trainer.run.path / "results.json").read_text())["params_sha256"]

    by_file, by_value = f"{FILE}:{name}", getattr(own_presets, name)
    whole = trained("whole", by_file)
    for folder, preset in (("file", by_file), ("value", by_value)):
        with pytest.raises(Stop):
            trained(folder, preset, on_line=stop)
        assert trained(folder, preset, resume=True) == whole
    with refused("pass it again"):
        GRPOTrainer(model, threes, run_dir=tmp_path / "value", resume=True)


def test_the_trainer_takes_constants_and_refuses_others(tmp_path):
    model = str(save_tiny_model(tmp_path / "tiny", arithmetic.TEXT))
    for options, words in (
        ({"preset": "sapo", "tau_positive": 0.0}, "must be above 0"),
        ({"preset": "sapo", "tau_positive": "x"}, "tau_positive is 'x': it must be a number"),
        ({"preset": "dapo", "tau_positive": 1.0}, "no option tau_positive"),
        ({"preset": 3}, "preset is 3"),
        ({"gae_lambda": 0.5}, "gae_lambda has no effect"),
    ):
        with refused(words):
            GRPOTrainer(model, lambda rows, texts: [0.0 for _ in texts], **options)


def test_the_parts_of_functions_end():
    """Of a function that calls itself, and of a value that has every attribute."""

    def inner(rows, texts):
        return inner

    assert len(sources_of(inner)) == 1
    assert sources_of(MagicMock()) == []


def test_a_file_runs_once_until_it_is_modified(tmp_path, capsys):
    file = tmp_path / "loud.py"
    file.write_text("import optax\nprint('runs')\nmine = optax.sgd(0.1)\n")
    for _ in range(2):
        validate(recipe(optimizer=f"{file}:mine"))
    assert capsys.readouterr().out == "runs\n"
    file.write_text("print('runs again')\nmine = lambda schedule: schedule\n")
    os.utime(file, ns=(1, 1))
    validate(recipe(optimizer=f"{file}:mine"))
    assert capsys.readouterr().out == "runs again\n"
