"""The card of an exported model: what its run came to, how it was started, and its options."""

import json
import math
from pathlib import Path

import grpo_jax
from grpo_jax.errors import UsageError
from grpo_jax.options import fits, flattened
from grpo_jax.runs.files import read_object
from grpo_jax.statistics import cell

COMMAND = "command.txt"  # of a run folder: how it was started, a line each time


def model_card(run: Path, *, phase: str, step: int, adapter: bool) -> str:
    """README.md of an exported folder, as the hub shows it.

    Args:
      run: the folder of the run.
      phase: whose checkpoint was exported.
      step: of the checkpoint.
      adapter: whether adapters alone were exported.
    """
    config = read_object(run / "config.json")
    options = flattened(config)
    base = str(options.get("model") or "")
    head = ["library_name: " + ("peft" if adapter else "transformers"), "pipeline_tag: text-generation"]
    if base.count("/") == 1 and not base.startswith((".", "~", "/")) and not Path(base).exists():  # an id on the hub
        head.append(f"base_model: {base}")
    head.append(f"tags: [{options.get('method', 'grpo')}, grpo_jax]")
    started = f"after training from `{base}`" if base else "after training"
    sections = [
        "---\n" + "\n".join(head) + "\n---",
        f"# {run.absolute().name}",
        f"Step {step} of phase `{phase}`, {started} with grpo_jax {grpo_jax.__version__}.",
        "## Results",
        _results(run / "results.json"),
    ]
    if (run / COMMAND).exists():
        sections += ["## Command", f"```\n{(run / COMMAND).read_text(encoding='utf-8', errors='replace').strip()}\n```"]
    sections += ["## Options", f"```json\n{json.dumps(config, indent=2)}\n```"]
    return "\n\n".join(sections) + "\n"


def _results(file: Path) -> str:
    """Returns the rows of results.json as a table. A damaged file is no reason to refuse the model."""
    try:
        results = read_object(file) if file.exists() else {}
    except UsageError:
        return "The run's results.json cannot be read."
    rows = {name: row for name, row in results.items() if fits(row, dict[str, float | None])}
    if not rows:
        return "The run has left no results."
    values = {name: {key: math.nan if x is None else x for key, x in row.items()} for name, row in rows.items()}
    names = dict.fromkeys(key for row in rows.values() for key in row if not key.endswith(("_low", "_high")))
    lines = [["", *values], ["---"] * (1 + len(values))]
    lines += [[f"`{key}`", *(cell(row, key) for row in values.values())] for key in names]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"Of the end of the run; in brackets 95% intervals.\n\n{table}"
