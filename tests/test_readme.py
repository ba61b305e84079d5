"""The code blocks of the README work as written, and the README stays short."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MODEL = ROOT.parent / "shared/data/stories260K-hf"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="needs the stories260K model")


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def imports():
    """Every import of this library, in the README and in docs/."""
    nodes = (node for page in PAGES for block in blocks("python", page) for node in ast.parse(block).body)
    found = {ast.unparse(node) for node in nodes if isinstance(node, ast.ImportFrom)}
    return sorted(line for line in found if line.startswith("from grpo_jax"))


@pytest.mark.parametrize("line", imports())
def test_import_works(line):
    exec(line, {})


def test_readme_is_short():
    text = README.read_text()
    outside_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(text.splitlines()) <= 145
    assert len(outside_code.split()) <= 1300
    assert max(map(len, text.splitlines())) <= 120


def test_every_script_is_there():
    scripts = re.findall(r"^\| `([a-z_.]+)[ `].*\|.*\|$", (ROOT / "docs/scripts.md").read_text(), re.MULTILINE)
    assert len(set(scripts)) >= 20
    paths = [ROOT / "experiments" / name.replace(".", "/") for name in scripts]
    assert not [path for path in paths if not (path.is_dir() or path.with_suffix(".py").exists())]


def test_one_line_installs_and_tests():
    (line,) = (line for line in README.read_text().splitlines() if line.endswith("-m pytest"))
    assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]'")


def test_losses_print_the_number_in_the_comment():
    _, losses = blocks("python")
    (stated,) = re.findall(r"^print\(loss\)  # (\S+)$", losses, re.MULTILINE)
    names: dict[str, Any] = {}
    exec(losses.partition("print(loss)")[0], names)
    assert names["loss"] == pytest.approx(float(stated), abs=1e-5)
    exec(losses, names)
    assert -1e-3 < names["loss"] < 0  # GSPO clips at 1 + 4e-4


def test_reward_of_readme_gives_numbers():
    (code,) = re.findall(r"^cat > my_rewards.py <<'END'\n(.*?)^END", README.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    rows = [{"answer": "9 * 8 = <<9*8=72>>72\n#### 72"}] * 3
    assert names["correct"](rows, ["9 * 8 is 72.\n#### 72", "#### 73", "72"]) == [1, 0, 1]


def shell(commands: str, folder: Path) -> None:
    program = ".venv/bin/python -c 'from grpo_jax.commands import main; main()'"
    commands = commands.replace("DIR", str(MODEL)).replace(".venv/bin/grpo-jax", program)
    commands = commands.replace(".venv/bin/python", sys.executable)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    subprocess.run(["bash", "-euc", commands], cwd=folder, env=environment, check=True, timeout=900)


@needs_model
@pytest.mark.slow
def test_commands_of_readme_run(tmp_path):
    """The commands run on rows like GSM8K's, made shorter by options, and then the trainer."""
    rows = [{"question": f"What is {n}+5?", "answer": f"{n}+5={n + 5}\n#### {n + 5}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (train,) = (block for block in blocks("bash") if "my_rewards.py" in block)
    assert len(train.splitlines()) <= 8
    template = "  --template '{question} "
    assert template in train
    shell(train.replace(template, "  --steps 2 --num-prompts 4 --group-size 2 --max-tokens 16" + template), tmp_path)
    assert (tmp_path / "my-model/model.safetensors").exists()

    trainer, _ = blocks("python")
    shell(f"cat > trainer.py <<'END'\n{trainer}END\n.venv/bin/python trainer.py", tmp_path)
    assert list((tmp_path / "runs/grpo_trainer").glob("metrics.jsonl"))


@needs_model
@pytest.mark.slow
def test_own_task_learns_as_written(tmp_path):
    """The first two blocks of the page about rewards."""
    make, train, *_ = blocks("bash", ROOT / "docs/rewards.md")
    shell(make + train + ".venv/bin/grpo-jax export runs/train my-model", tmp_path)
    assert (tmp_path / "my-model/model.safetensors").exists()

    results = json.loads((tmp_path / "runs/train/results.json").read_text())
    assert results["before"]["avg"] < 0.3
    assert results["after"]["avg_low"] > 0.6
