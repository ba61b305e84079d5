"""The guides to running: their commands run, their options exist, and the reference is that of the code.

A block that begins with `# needs …` cannot run here. Its options are still checked. All other blocks run, made shorter
by options, and those that are `# sized for` an accelerator run with a tiny model.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.planning.models import MODELS
from grpo_jax.commands.train import module_of
from grpo_jax.errors import UsageError
from grpo_jax.options import option_types
from grpo_jax.planning.memory import GB, Shape, choose

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DATA = ROOT.parent / "shared/data"
PAGES = ["training.md", "engines.md", "performance.md", "scaling.md", "gsm8k.md"]
SHORT = " --steps 2 --num-prompts 8 --group-size 2 --max-tokens 8 --num-heldout 8 --eval-samples 1"
EXTENDED = "--steps 3"  # for the 200 of the page
REWARDS = """def mentions(examples, completions):
    return [float(example["word"] in text) for example, text in zip(examples, completions)]
"""


def blocks(page: str) -> list[tuple[str, str]]:
    """Returns (language, code) of every block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def train_commands(page: str) -> list[str]:
    """Returns the arguments of each `grpo-jax train` of a page, also of one that is kept in $RUN."""
    commands = []
    for language, code in blocks(page):
        joined = code.partition("ports:")[0].replace("\n", " ") if language == "yaml" else code.replace("\\\n", " ")
        for line in joined.splitlines():
            commands += re.findall(r"(?:grpo-jax train|^\$RUN)(.*?)(?:  +#|$)", line)
    return commands


def runnable(page: str) -> str:
    """Returns the commands of a page that run here, as one script, made shorter by options."""
    lines = []
    for language, code in blocks(page):
        if language != "bash" or code.startswith("# needs "):
            continue
        for line in code.replace("\\\n", " ").replace("--steps 200", EXTENDED).splitlines():
            command, _, comment = line.partition("  # ")
            is_new = "grpo-jax train" in command and "--resume" not in command
            lines.append(command + SHORT * is_new + f"  # {comment}" * bool(comment))
    return "\n".join(lines) + "\n"


def test_reference_is_current():
    path = DOCS / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    assert spec
    assert spec.loader
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.page() == (DOCS / "reference.md").read_text(), "run python docs/reference.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_or_says_what_it_needs(page):
    for language, code in blocks(page):
        assert language in ("bash", "python", "text") or code.startswith("# needs ")


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page):
    for command in train_commands(page):
        method = (re.findall(r"--method (\S+)", command) or ["grpo"])[-1]
        known = option_types(module_of(method).Config)
        for flag in re.findall(r"--[a-z][a-z-]*", command):
            assert flag.removeprefix("--").replace("-", "_") in known, f"{page}: {flag}"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="needs the stories260K model and GSM8K")
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page).strip()])
def test_commands_run(page, tmp_path):
    animals = ["cat", "dog", "bird", "fish", "bear", "frog", "duck", "fox"]
    texts = [(animal, f"Once there was a {animal} and a {other}.") for animal in animals for other in animals * 2]
    rows = [json.dumps({"prompt": text, "word": animal}) + "\n" for animal, text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "gsm8k").symlink_to(DATA / "gsm8k")
    program = tmp_path / "bin/grpo-jax"
    program.parent.mkdir()
    call = "from grpo_jax.commands import main; main()"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(call)} "$@"\n')
    program.chmod(0o755)
    script = runnable(page).replace(".venv/bin/grpo-jax", "grpo-jax").replace(".venv/bin/python", sys.executable)
    script = re.sub(r"--model (DIR|Qwen/\S+)", f"--model {DATA / 'stories260K-hf'}", script)
    path = f"{program.parent}:{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    subprocess.run(["bash", "-euxc", script], cwd=tmp_path, env=environment, check=True, timeout=900)


H100 = Shape(num_prompts=16, prompt_tokens=272, piece_tokens=0)
V5E = H100._replace(num_prompts=2, fsdp=8)
COLUMNS = [
    (H100, 60 * GB),
    (H100._replace(lora_rank=16), 60 * GB),
    (V5E, 16 * GB),
    (V5E._replace(lora_rank=16), 16 * GB),
]


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"])
def test_memory_for_gsm8k_is_the_planners(name):
    cells = []
    for shape, limit in COLUMNS:
        dtype = "bfloat16" if shape.lora_rank else "float32"
        try:
            plan = choose(replace(MODELS[name], dtype="bfloat16"), shape._replace(param_dtype=dtype), int(limit))
        except UsageError:
            cells.append("does not fit")
        else:
            cells.append(f"{plan.estimate.peak / GB:.2g}" + ", remat" * (plan.model.remat == "layer"))
    assert f"| {name} | {' | '.join(cells)} |" in (DOCS / "gsm8k.md").read_text()
