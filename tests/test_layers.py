"""A module imports only from its own layer and from lower layers. Each fault quotes a line that its module has."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from faults import load_faults

ROOT = Path(__file__).parents[1]
# From the bottom layer up. A name is a folder or a module of grpo_jax, or the folder of experiments or claims.
ORDER = (
    *("errors", "functional", "options", "models", "sampling", "statistics", "data", "rewards", "tasks"),
    *(
        "presets",
        "config",
        "hosts",
        "devices",
        "optimizer",
        "step",
        "scoring",
        "offline",
        "rl",
        "planning",
        "engines",
        "runs",
    ),
    *("report", "training", "commands", "__main__", "experiments", "claims"),
)
FILES = sorted(file for folder in ("grpo_jax", "experiments", "claims") for file in (ROOT / folder).rglob("*.py"))


def layer(module: str) -> str:
    """The layer of a module's full name."""
    parts = module.split(".")
    return parts[0] if parts[0] in ("experiments", "claims") else (parts[1] if len(parts) > 1 else "")


def imported(file: Path) -> set[str]:
    """Full names of the modules of ours that a file imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("grpo_jax", "experiments", "claims")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file):
    if file == ROOT / "grpo_jax" / "__init__.py":  # the face of the package: loads the trainer when it is asked for
        return
    own = layer(".".join(file.relative_to(ROOT).with_suffix("").parts))
    wrong = {name for name in imported(file) if layer(name) in ORDER and ORDER.index(layer(name)) > ORDER.index(own)}
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions count too. `from package import module` is an import of the module."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    modules.pop("grpo_jax")  # the face of the package
    graph = {name: imported(file) & modules.keys() - {name} for name, file in modules.items()}
    for names in graph.values():
        names -= {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    tuple(TopologicalSorter(graph).static_order())  # raises an error that names the circle


def test_every_module_has_a_layer():
    found = {layer(".".join(file.relative_to(ROOT).with_suffix("").parts)) for file in FILES} - {"__init__"}
    assert found == set(ORDER)


@pytest.mark.parametrize("fault", load_faults(""), ids=lambda fault: fault["meaning"])
def test_faults_quote_code_once_and_name_existing_tests(fault):
    assert (ROOT / fault["module"]).read_text().count(fault["before"]) == 1
    for test in fault["tests"]:
        file, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}" in (ROOT / file).read_text()
