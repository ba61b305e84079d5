"""Counts what makes `grpo_jax` hard to hold in mind: containers, modules that know a feature, and names defined twice.

  python tests/counts.py [--show]

A module knows a feature if one of its identifiers has a word of the feature. Identifiers are names, attributes,
arguments, imported modules, and texts that could be names, such as keys. Docstrings, comments and messages do not
count. Words are read from snake_case and CamelCase alike, so `TeacherConfig` and `rl.distillation` count for the
teacher. The teacher counts also by the names of what only it needs: its outputs, their bytes and the divergence from
them.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "grpo_jax"
# feature -> expression for the words of an identifier, which are separated by "_" and begin with one
FEATURES = {
    "staleness": r"_(stale|earlier|lag_)",
    "teacher": r"_(teacher|taught|distil|target_outputs|output_bytes|token_divergence|frozen_models|load_frozen)",
    "stop": r"_stop(s|ping)?_(?!gradient|code)",  # texts that end a completion
    "nf4": r"_nf4_",
    "quantised": r"_quanti[sz]",
    "spans": r"_spans?_",
    "turns": r"_turns?_",
    "environments": r"_(environment|episode)",
    "engine": r"_engine",
    "hosts": r"_(hosts?_|process_index|process_count)",
    "backend": r"_(default_backend|on_cpu|optimization_barrier)",
    "axis_name outside functional": r"_axis_name",
    "prompt widths": r"_(prompt_widths?|sorting)_",
    "packing": r"_pack(s|ed|ing)?_",
    "moving reference": r"_(ref_sync|ref_mixup|sync_reference|moving)",
}
# Modules in which the word means something else: the end of a range, of a process or of a run.
OTHER_MEANINGS = {"stop": {"data/generators.py", "rewards/processes.py", "runs/runner.py"}}


def main(show: bool) -> None:
    """Prints the counts; with `show`, also what is counted."""
    trees = {file.relative_to(PACKAGE): ast.parse(file.read_text("utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}
    containers = [
        f"{file}: {node.name}" for file, tree in trees.items() for node in ast.walk(tree) if is_container(node)
    ]
    print_count("modules", list(map(str, trees)), show=False)
    print_count("NamedTuples and dataclasses", containers, show)
    words = {file: {f"_{snake_case(name)}_" for name in identifiers(tree)} for file, tree in trees.items()}
    for feature, pattern in FEATURES.items():
        leaves_out = "functional" if feature.endswith("outside functional") else ""
        print_count(
            f"modules that know {feature}",
            [
                str(file)
                for file, names in words.items()
                if file.parts[0] != leaves_out
                and str(file) not in OTHER_MEANINGS.get(feature, ())
                and any(re.search(pattern, name) for name in names)
            ],
            show,
        )
    twice = {name: places for name, places in definitions(trees).items() if len(places) > 1}
    print_count("public names in several modules", [f"{n}: {', '.join(map(str, p))}" for n, p in twice.items()], show)


def print_count(what: str, names: list[str], show: bool) -> None:
    """Prints a count, and below it the names if `show`."""
    print(f"{what}: {len(names)}")
    for name in names if show else ():
        print(f"    {name}")


def is_container(node: ast.AST) -> bool:
    """Returns whether a node defines a NamedTuple or a dataclass."""
    if not isinstance(node, ast.ClassDef):
        return False
    decorators = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return bool(
        {"NamedTuple", "dataclass"} & {ast.unparse(each).rpartition(".")[2] for each in (*node.bases, *decorators)}
    )


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yields the identifiers of a module's code, and texts that are identifiers."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def snake_case(identifier: str) -> str:
    """Returns an identifier in lower case, its words separated by "_"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|\W+", "_", identifier).lower()


def definitions(trees: Mapping[Path, ast.Module]) -> dict[str, list[Path]]:
    """Returns the modules in which each public function and class is defined at the top level, by its name."""
    places: dict[str, list[Path]] = {}
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                places.setdefault(node.name, []).append(file)
    return places


if __name__ == "__main__":
    main("--show" in sys.argv)
