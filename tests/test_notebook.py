"""The notebook runs from top to bottom, and its run learns."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/quickstart.ipynb"


def code_cells() -> list[str]:
    return [
        "".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def test_notebook_holds_no_output():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def test_losses_of_the_notebook(capsys):
    names: dict[str, Any] = {}
    for cell in code_cells()[:2]:
        exec(cell, names)
    assert names["gradient"][0, 0, 0] < 0 < names["gradient"][0, 1, 0]  # the loss falls where the advantage is positive


def test_notebook_finds_the_clone_from_its_own_folder(monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)  # where Jupyter starts its kernel
    # Pytest puts tests/ on the path, whose folder of this name would be found as a namespace.
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder or ".", "experiments").exists()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, name)
    assert find_spec("experiments") is None
    (line,) = [line for line in code_cells()[2].splitlines() if line.startswith("sys.path")]
    exec(line, {"sys": sys})
    assert find_spec("experiments") is not None


@pytest.mark.slow
def test_every_cell_in_order(monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in code_cells():
        exec(cell, names)
    rewards = [line["reward"] for line in names["lines"]]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1
