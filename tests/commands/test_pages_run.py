"""Runs the programs and the commands of the pages about environments and ablations."""

import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from command_helpers import GAME, with_template
from test_docs import ROOT, blocks, execute, programs, runnable, shell
from tiny import DATA, TEMPLATE, needs_data, write_rows

pytestmark = [pytest.mark.slow, needs_data]
SHORT = "max_turns=2, steps=1, num_prompts=2, group_size=2, max_tokens=4"


class TextGame:
    """Ends after one action. The methods are those of gymnasium.Env."""

    def reset(self, *, seed=None, options=None):
        return f"Game {seed}.", {}

    def step(self, action):
        return "over", 1.0, True, False, {}

    def close(self):
        pass


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model that has a chat template, rows, GSM8K, and the files of the page."""
    monkeypatch.chdir(tmp_path)
    with_template(DATA, tmp_path / "DIR", TEMPLATE, name="stories260K-hf")
    game, multiply, *_ = programs("environments.md")
    (tmp_path / "game.py").write_text(game + "\n\ndef make(): return higher_or_lower\n")
    (tmp_path / "tools.py").write_text(multiply)
    (tmp_path / "file.py").write_text(GAME.replace("Game", "IncrementEnv").replace("digit", "number"))
    (tmp_path / "gsm8k").symlink_to(DATA / "gsm8k")
    prompts = [f"Guess a number from 1 to {i}.\n" for i in range(100, 200)]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt, "number": 37} for prompt in prompts])
    return tmp_path


def test_commands_of_environments_run(folder):
    shell(runnable("environments.md").replace("--model DIR", f"--model {folder}/DIR"), folder)


def test_programs_of_environments_run(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "gymnasium", SimpleNamespace(make=lambda name: TextGame()))
    _, _, gymnasium, trl = (code.replace("max_turns=6", SHORT) for code in programs("environments.md"))
    execute(gymnasium.replace("range(1000)", "range(40)"), trl.replace("range(1000)", "range(40)"))
    assert (folder / "runs").exists()


@pytest.mark.parametrize("number", range(3))
def test_commands_of_ablations_run(tmp_path, number):
    command = shlex.split(blocks("ablations.md", "bash")[number].replace("--preset cpu", "--preset smoke"))
    assert command[0] == ".venv/bin/python"
    short = () if "--only" in command or "--numbers" in command else ("--only", "ablate_kl")
    folders = ("--run-dir", str(tmp_path / "runs"), "--out", str(tmp_path))
    subprocess.run([sys.executable, *command[1:], *short, *folders], cwd=ROOT, check=True, timeout=300)
