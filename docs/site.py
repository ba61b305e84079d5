"""Hooks of mkdocs: pages that stand outside docs/, and one page of the API for each package."""

import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
OUTSIDE = {"index.md": "README.md"}
OUTSIDE |= {name: name for name in ("RESULTS.md", "BUILD_NOTES.md", "CONTRIBUTING.md", "CHANGELOG.md")}
COPIED = ["examples/grpo.py", "examples/quickstart.ipynb"]  # linked, not rendered


def modules() -> dict[str, list[str]]:
    """Public modules of each package, as `grpo_jax.package.module`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "grpo_jax").rglob("*.py")):
        names = path.relative_to(ROOT).with_suffix("").parts
        if any(name.startswith("_") for name in names):
            continue
        found.setdefault(".".join(names[:2]) if len(names) > 2 else "grpo_jax", []).append(".".join(names))
    return found


def on_config(config):
    """Puts the pages of the API into the navigation."""
    (api,) = (part for part in config.nav if "API" in part)
    api["API"] = [{package: f"api/{package}.md"} for package in modules()]
    return config


def on_files(files, config):
    """Adds the pages that are made."""
    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    for name in COPIED:
        content, included = (ROOT / name).read_bytes(), InclusionLevel.INCLUDED  # although exclude_docs names *.py
        files.append(File.generated(config, name, content=content, inclusion=included))
    for package, names in modules().items():
        text = f"# {package}\n\n" + "".join(f"::: {name}\n\n" for name in names)
        files.append(File.generated(config, f"api/{package}.md", content=text))
    return files


def on_page_markdown(markdown, **_):
    """Links out of docs/ lead to the pages made from there."""
    return re.sub(r"\]\(\.\./(\w+\.md|examples/)", r"](\1", markdown)
