"""Checks the help of commands: short pages first, every option on demand, and a text for each."""

import re
from pathlib import Path

import own_presets
import pytest

from grpo_jax.commands import evaluate, flags, sample, train
from grpo_jax.options import option_types

COMMANDS = {method: train.module_of(method).Config for method in train.METHODS}
COMMANDS |= {"evaluate": evaluate.Options, "sample": sample.Options}
SOURCES = "\n".join(file.read_text("utf-8") for file in Path(train.__file__).parents[1].rglob("*.py"))


def page(capsys, monkeypatch, *args):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        train.command([*args])
    assert not ended.value.code
    return capsys.readouterr().out


def lines_in_80_columns(text):
    return sum(max(1, -(-len(line) // 80)) for line in text.splitlines())


def names_in(text):
    """Options that have an entry of their own."""
    return {name.replace("-", "_") for name in re.findall(r"^[│ ]*--([a-z][a-z-]*)", text, re.M)} - {"help_all"}


@pytest.mark.parametrize("method", train.METHODS)
def test_short_help_says_how_to_see_all_options(capsys, monkeypatch, method):
    types = option_types(COMMANDS[method])
    first, everything = (page(capsys, monkeypatch, "--method", method, flag) for flag in ("--help", "--help-all"))
    assert lines_in_80_columns(first) <= 140
    assert 15 <= len(names_in(first)) <= 32
    assert all(len(paragraph.split()) < 80 for paragraph in first.partition("--help-all")[0].split("\n\n"))
    assert "--method {grpo,ppo,sft,reward-model,dpo,kto}" in everything
    assert {"model", "steps", "learning_rate", "run_dir"} <= names_in(first) < names_in(everything) == types.keys()
    assert f"\n--help-all shows all {len(types)} options.\n" in first


def test_help_lists_constants_of_a_preset(capsys, monkeypatch):
    words = " ".join(page(capsys, monkeypatch, "--preset", "sapo", "--correction", "icepop", "--help").split())
    assert "tau_positive=1: τ where A > 0, above 0; 1.0 from the paper." in words
    assert "ddof=1: the number subtracted from G in the variance. 1, the sample deviation, as in TRL" in words
    assert "high=5: 5 from IcePop." in words
    page_of_file = page(capsys, monkeypatch, "--preset", f"{own_presets.__file__}:spo", "--help")
    assert "width=0.2: ε, above 0; 0.2 in the paper." in " ".join(page_of_file.split())


def test_help_of_grpo_shows_texts_and_defaults(capsys, monkeypatch):
    text = page(capsys, monkeypatch, "-h", "--steps", "3", "--preset", "companion_post")
    assert {"template", "chat", "system", "num_heldout", "wandb", "stop", "dry_run"} <= names_in(text)
    words = " ".join(text.replace("│", " ").split())
    assert "--num-prompts INT Prompts of a rollout. (default: 32)" in words
    assert "after it. (default: 0.7)" in words  # of the preset
    assert text.startswith("usage: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_used_and_has_short_help(command):
    texts = flags.option_texts(COMMANDS[command])
    assert texts.keys() == option_types(COMMANDS[command]).keys()
    for name, text in texts.items():
        assert text.endswith("."), name
        assert 3 <= len(text.split()) <= 25, name
        assert re.search(rf"\.{name}\b|\"{name}\"", SOURCES), name
