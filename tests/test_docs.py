"""The documentation is run, and held against the code."""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

from grpo_jax import functional as F

ROOT = Path(__file__).parents[1]
EXPORTS = {name for name, value in vars(F).items() if not name.startswith("_") and not inspect.ismodule(value)}
DOCS = ROOT / "docs"
MODEL = ROOT.parent / "shared/data/stories260K-hf"
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="needs the stories260K model")


def blocks(file, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / file).read_text(), re.M | re.S)


def examples(file="examples.md"):
    """Blocks that stand alone, each with those that continue it."""
    programs = []
    for code in blocks(file):
        if code.startswith("# (continued)"):
            programs[-1] += code
        else:
            programs.append(code)
    return programs


# Without a compiler each operation is a program of its own.
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=str(number), marks=() if number == 2 else pytest.mark.slow)
        for number, code in enumerate(examples())
    ],
)
def test_example_runs(code):
    exec(compile(code, "examples.md", "exec"), {})


def test_losses_under_jit_pmap_and_shard_map_agree():
    exec(compile(examples("own_loop.md")[0], "own_loop.md", "exec"), {})


def test_example_of_memory_runs(capsys):
    (code,) = examples("scaling.md")
    exec(code, {})
    assert "'params': 5.8" in capsys.readouterr().out


@needs_model
@pytest.mark.slow
@pytest.mark.parametrize("file", ["rewards.md", "pretrained.md", "own_loop.md"])
def test_page_runs(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for code in examples(file):
        names = {"__name__": "page"}
        exec(compile(code.replace("folder-or-hub/id", str(MODEL)), file, "exec"), names)
    if file == "own_loop.md":
        assert Path("trained-model/model.safetensors").exists()
        assert names["trained"].params.keys() == names["model"].params.keys()


@needs_model
@pytest.mark.slow
def test_commands_run_one_after_another(tmp_path):
    """Rows, training, evaluation and export: each command of a page, made shorter by options."""
    make, train, evaluate = blocks("rewards.md", "bash")
    (export,) = blocks("pretrained.md", "bash")
    short = " --steps 2 --group-size 2 --max-tokens 8 --num-prompts 2\n"
    shown = [make, train.rstrip() + short, evaluate, export]
    program = ".venv/bin/python -c 'from grpo_jax.commands import main; main()'"
    commands = "".join(shown).replace("DIR", str(MODEL)).replace(".venv/bin/grpo-jax", program)
    commands = commands.replace(".venv/bin/python", sys.executable)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-euc", commands], cwd=tmp_path, env=environment, check=True, timeout=900)
    assert (tmp_path / "trained-model/model.safetensors").exists()


def test_what_pages_and_the_notebook_import_is_there():
    cells = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for page in DOCS.glob("*.md"):
        code += blocks(page.name)
    imports = [node for part in code for node in ast.walk(ast.parse(part)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, name.name) for node in imports for name in node.names if node.module.startswith("grpo_jax")]
    assert len(ours) > 50
    for module, name in ours:
        found = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        assert found, f"{module} has no {name}"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    named = re.findall(r'<a id="([^"]+)">', text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings} | set(named)


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            if target.startswith("http"):
                continue
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}#{anchor}"


@pytest.mark.slow
def test_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=300)
    assert "what predicts completion token" in (tmp_path / "api/grpo_jax.models.html").read_text()  # of Policy.hidden


# --- the table of methods ---


def table(heading, file="methods.md"):
    """Rows of the table whose first column is `heading`, as lists of cells."""
    lines = (DOCS / file).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def constants_of(cell):
    """The constants that a cell states, "name=value, …"."""
    stated = dict(part.split("=") for part in cell.split(", ")) if cell else {}
    return {name: float(value) if value == "inf" else literal_eval(value) for name, value in stated.items()}


METHODS = [row for row in table("method") if row[1]]
NOT_METHODS = {"Metrics", "Objective", "PRESETS", "Term", "TokenLogprobs"}  # types and tables
HELPERS = [row[0].strip("`") for row in table("helper")]
EQUATIONS = dict(re.findall(r"^(\w+) {2,}(\S.*)$", blocks("methods.md", "text")[-1], re.M))


def test_every_function_has_one_equation():
    lines = re.findall(r"^(\w+) {2,}\S", blocks("methods.md", "text")[-1], re.M)
    assert sorted(lines) == sorted(set(EXPORTS) - NOT_METHODS - set(HELPERS))


def test_every_function_with_constants_has_one_row():
    def constants(name):
        values = [parameter.default for parameter in inspect.signature(getattr(F, name)).parameters.values()]
        return [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]

    rows = [row[1].strip("`") for row in METHODS]
    assert len(set(rows)) == len(rows)
    assert {name for name in EQUATIONS if constants(name)} <= set(rows)


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row[1].strip("`"))
def test_row_is_complete_and_its_defaults_are_the_functions(row):
    _, function, defaults, origin = row
    parameters = inspect.signature(getattr(F, function.strip("`"))).parameters
    numbers = {
        name: parameter.default for name, parameter in parameters.items() if isinstance(parameter.default, (int, float))
    }
    stated = constants_of(defaults)
    assert {name: value for name, value in stated.items() if value is not None} == numbers
    assert all(parameters[name].default == value for name, value in stated.items())
    assert origin or not numbers or numbers == {"temperature": 1.0}


@pytest.mark.parametrize("name", sorted(set(EXPORTS) - NOT_METHODS - {"clipped_term"}))
def test_docstring_is_complete(name):
    function = getattr(F, name)
    doc = inspect.getdoc(function)
    parameters = inspect.signature(function).parameters
    if name not in HELPERS:
        assert "Args:" in doc
        assert "Returns:" in doc
        assert ">>>" in doc
    for parameter in parameters if "Args:" in doc else ():
        assert re.search(rf"^ +(\*\*)?{parameter}:", doc, re.M), f"{parameter} is not described"


PRESET_ROWS = {row[0].strip("`"): row[1:] for row in table("preset")}


def test_every_preset_has_a_row():
    assert PRESET_ROWS.keys() == F.PRESETS.keys()


@pytest.mark.parametrize("name", F.PRESETS)
def test_row_of_preset_has_its_functions_and_constants(name):
    objective = F.PRESETS[name]
    _, _, _, weights, divergence, kl_coef, constants = PRESET_ROWS[name]
    assert weights == f"`{objective.aggregation.__name__}`"
    assert float(kl_coef) == objective.kl_coef
    assert constants_of(constants) == objective.constants
    if objective.kl_in_reward:
        assert divergence == "k1 in the reward"
    else:
        assert divergence == (f"`{objective.divergence.__name__}`" if objective.kl_coef else "")
