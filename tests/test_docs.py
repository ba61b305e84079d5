"""The README, the pages and the notebook: their code runs, and what they state is what the code has.

A block of commands that begins with `# needs …` cannot run here. Its options are still checked. All other blocks run,
made shorter by options, and those that are `# sized for` an accelerator run with a tiny model.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose
from tiny import DATA, STORIES, change_json, needs_data, slow_unless

from experiments.plan import DEVICES, Device, least_seconds, traffic_of
from experiments.planning.models import MODELS
from grpo_jax import functional as F
from grpo_jax.commands.train import module_of
from grpo_jax.errors import UsageError
from grpo_jax.functional.products import Traits, traits_of_gpu
from grpo_jax.options import option_types
from grpo_jax.planning.memory import GB, Plan, Shape, choose

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
GUIDES = ["training.md", "engines.md", "performance.md", "scaling.md", "one_gpu.md"]
CELLS = json.loads((ROOT / "examples/quickstart.ipynb").read_text())["cells"]
NOTEBOOK = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def blocks(page: str, language: str = r"\w*") -> list[str]:
    """Returns the code of every block of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.M | re.S)


def programs(page: str) -> list[str]:
    """Returns the Python of a page, each block together with those that continue it."""
    parts: list[str] = []
    for code in blocks(page, "python"):
        if code.startswith("# (continued)"):
            parts[-1] += code
        else:
            parts.append(code)
    return parts


def execute(*codes: str) -> dict[str, Any]:
    """Runs programs, and returns the names of the last."""
    for code in codes:
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(code, "page", "exec"), names)
    return names


@cache
def executed(page: str, number: int) -> dict[str, Any]:
    """Runs a program of a page once, and returns its names."""
    return execute(programs(page)[number])


# ---- Python


def test_what_pages_and_the_notebook_import_is_there():
    code = NOTEBOOK + [block for page in PAGES for block in blocks(page, "python")]
    imports = [node for part in code for node in ast.walk(ast.parse(part)) if isinstance(node, ast.ImportFrom)]
    ours = {(node.module, name.name) for node in imports for name in node.names if node.module.startswith("grpo_jax")}
    assert len(ours) > 30
    for module, name in ours:
        exists = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        assert exists, f"{module} has no {name}"


# Without a compiler each operation is a program of its own.
EXAMPLES = [
    ("examples.md", 2),
    ("own_loop.md", 0),  # losses under jit, pmap and shard_map
    *(pytest.param("examples.md", i, marks=pytest.mark.slow) for i in range(len(programs("examples.md"))) if i != 2),
]


@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_an_example_runs(page, number):
    executed(page, number)


@pytest.mark.parametrize("function", slow_unless(("add_up_loss",), ("add_up", "add_up_loss")))
def test_sgd_over_devices_updates_as_one_device_does(monkeypatch, function):
    """By pmap, and by shard_map."""
    names = executed("own_loop.md", 0)

    def updates(params, batch, gradient_of):
        """Returns the parameters after a step of SGD by each preset, chosen by its name alone."""
        presets = {}
        for name in F.PRESETS:
            monkeypatch.setitem(names, "method", F.PRESETS[name])
            presets[name] = params - 0.1 * gradient_of(params, batch)
        return presets

    params, batch = names["params"], names["batch"]
    expected = jax.jit(partial(updates, gradient_of=jax.grad(names["loss"])))(params, batch)
    step = partial(updates, gradient_of=lambda *arrays: names[function](*arrays)[1])
    if function == "add_up":
        results = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)(params, names["rows"])
    else:
        data = {"in_specs": (P(), P("data")), "out_specs": P()}
        results = jax.jit(jax.shard_map(step, mesh=names["mesh"], **data))(params, batch)
    for name, update in expected.items():
        assert np.abs(update - params).max() > 1e-4, name
        assert_allclose(results[name], update, atol=1e-6, err_msg=name)


def test_the_example_of_memory_runs(capsys):
    execute(*programs("scaling.md"))
    assert "'params': 5.8" in capsys.readouterr().out


ARRAYS = ("logprobs", "old_logprobs", "advantages", "mask")


def test_readme_losses_print_the_stated_number(capsys):
    _, losses = programs("README.md")
    (stated,) = re.findall(r"^print\(loss\)  # (\S+)$", losses, re.M)
    names = execute(losses)
    assert float(capsys.readouterr().out) == pytest.approx(float(stated), abs=1e-5)
    method = names["method"]
    assert names["weights"].sum() == pytest.approx(1)
    assert method.loss(*(names[name] for name in ARRAYS), weights=None)[0] == names["loss"]  # the preset's own weights


def test_the_readme_counts_presets_claims_and_verdicts():
    text, results = PAGES["README.md"], (ROOT / "RESULTS.md").read_text()
    assert f"[{len(F.PRESETS)} presets of published methods]" in text
    (verdicts,) = re.findall(r"^\*\*Verdicts\.\*\* (Of all .*?)\.", results, re.M)
    assert verdicts in " ".join(text.split())


def test_the_reward_of_the_readme_gives_numbers():
    (code,) = re.findall(r"^cat > my_rewards.py <<'END'\n(.*?)^END", PAGES["README.md"], re.S | re.M)
    rows = [{"answer": "9 * 8 = <<9*8=72>>72\n#### 72"}] * 3
    assert execute(code)["correct"](rows, ["9 * 8 is 72.\n#### 72", "#### 73", "72"]) == [1, 0, 1]


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("page", ["rewards.md", "pretrained.md", "own_loop.md"])
def test_the_programs_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(40)]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = execute(*(code.replace("folder-or-hub/id", str(STORIES)) for code in programs(page)))
    if page == "own_loop.md":
        assert Path("trained-model/model.safetensors").exists()
        assert names["trained"].params.keys() == names["model"].params.keys()


# ---- the notebook


def test_notebook_has_no_output_and_its_losses_run(capsys):
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in CELLS)
    gradient = execute("\n".join(NOTEBOOK[:2]))["gradient"]
    assert gradient[0, 0, 0] < 0 < gradient[0, 1, 0]  # the loss falls where the advantage is positive


def test_notebook_locates_the_clone_from_its_folder(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")  # where Jupyter starts its kernel
    monkeypatch.setattr(sys, "path", [])
    (line,) = [line for line in NOTEBOOK[2].splitlines() if line.startswith("sys.path")]
    exec(line, {"sys": sys})
    assert [Path(folder).resolve() for folder in sys.path] == [ROOT]


@pytest.mark.slow
def test_the_run_of_the_notebook_learns(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    rewards = [line["reward"] for line in execute("\n".join(NOTEBOOK))["lines"]]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1


# ---- commands

SHORT = " --steps 2 --num-prompts 8 --group-size 2 --max-tokens 8 --num-heldout 8 --eval-samples 1"
BRIEF = " --num-heldout 8 --samples 1 --max-tokens 8"
TINY = " --num-prompts 4 --group-size 2 --max-tokens 8"
EXTENDED = "--steps 3"  # for the 200 of a page


def train_commands(page: str) -> list[str]:
    """Returns the arguments of each `grpo-jax train` of a page, also of one that is in $RUN."""
    commands = []
    for code in blocks(page):
        is_yaml = "ports:" in code
        joined = code.partition("ports:")[0].replace("\n", " ") if is_yaml else code.replace("\\\n", " ")
        for line in joined.splitlines():
            commands += re.findall(r"(?:grpo-jax train|^\$RUN)(.*?)(?:  +#|$)", line)
    return commands


def runnable(page: str) -> str:
    """Returns the commands of a page that run here, as one script, made shorter by options."""
    lines = []
    for code in blocks(page, "bash"):
        if code.startswith(("# needs ", "git clone ")):
            continue
        for line in code.replace("\\\n", " ").replace("--steps 200", EXTENDED).splitlines():
            command, _, comment = line.partition("  # ")
            is_new = "grpo-jax train" in command and "--resume" not in command
            is_of_model = "grpo-jax evaluate Qwen" in command
            is_sampled = "grpo-jax sample " in command
            lines.append(
                command + SHORT * is_new + BRIEF * is_of_model + TINY * is_sampled + f"  # {comment}" * bool(comment)
            )
    return "\n".join(lines) + "\n" * bool(lines)


def shell(script: str, folder: Path) -> None:
    """Runs commands with this tree and the tiny model, which has a chat template like Qwen3's for the ids of Qwen."""
    thinker = folder / "thinker"
    shutil.copytree(STORIES, thinker)
    thinks = "{% if enable_thinking is not defined %}<think>{% endif %}"
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}" + thinks
    change_json(thinker / "tokenizer_config.json", chat_template=template)
    program = folder / "bin/grpo-jax"
    program.parent.mkdir()
    call = "from grpo_jax.commands import main; main()"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(call)} "$@"\n')
    program.chmod(0o755)
    script = script.replace(".venv/bin/grpo-jax", "grpo-jax").replace(".venv/bin/python", sys.executable)
    script = re.sub(r"(--model |model=\"|grpo-jax sample )DIR", rf"\g<1>{STORIES}", script)
    script = re.sub(r"(Qwen|HuggingFaceTB)/\S+", str(thinker), script)
    script = re.sub(r"--task gsm8k(?! --data)", "--task gsm8k --data gsm8k", script)  # there is no hub here
    paths = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{folder}"}
    subprocess.run(["bash", "-euxc", script], cwd=folder, env=os.environ | paths, check=True, timeout=900)


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page):
    for command in train_commands(page):
        method = (re.findall(r"--method (\S+)", command) or ["grpo"])[-1]
        known = option_types(module_of(method).Config)
        for flag in re.findall(r"--[a-z][a-z-]*", command):
            assert flag.removeprefix("--").replace("-", "_") in known, f"{page}: {flag}"


@pytest.mark.parametrize("page", GUIDES)
def test_every_block_runs_or_says_what_it_needs(page):
    known = [code for language in ("bash", "python", "text") for code in blocks(page, language)]
    assert all(code in known or code.startswith("# needs ") for code in blocks(page))


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in ["README.md", *GUIDES] if runnable(page)])
def test_commands_run(page, tmp_path):
    animals = ["cat", "dog", "bird", "fish", "bear", "frog", "duck", "fox"]
    texts = [(animal, f"Once there was a {animal} and a {other}.") for animal in animals for other in animals * 2]
    columns = {"question": "What is 1+5?", "answer": "1+5=6\n#### 6"}
    rows = [json.dumps({"prompt": text, "word": animal, **columns, "question": text}) + "\n" for animal, text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    mentions = "[float(example['word'] in text) for example, text in zip(examples, completions)]"
    (tmp_path / "my_rewards.py").write_text(f"def mentions(examples, completions):\n    return {mentions}\n")
    (tmp_path / "gsm8k").symlink_to(DATA / "gsm8k")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = runnable(page)
    if page == "README.md":
        script += f"cat > trainer.py <<'END'\n{programs(page)[0]}END\n.venv/bin/python trainer.py\n"
    shell(script, tmp_path)
    if page == "README.md":
        assert (tmp_path / "my-model/model.safetensors").exists()
        assert (tmp_path / "runs/grpo_trainer/metrics.jsonl").exists()


@needs_data
@pytest.mark.slow
def test_rewards_page_task_trains_evaluates_and_exports(tmp_path):
    make, train, evaluate, *_ = blocks("rewards.md", "bash")
    (export,) = blocks("pretrained.md", "bash")
    shell(make + train + evaluate + export, tmp_path)
    assert (tmp_path / "trained-model/model.safetensors").exists()
    results = json.loads((tmp_path / "runs/train/results.json").read_text())
    assert results["before"]["avg"] < 0.3
    assert results["after"]["avg_low"] > 0.6


# ---- limits, links and the reference


def test_readme_is_short_with_one_install_line():
    text = PAGES["README.md"]
    outside_code = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    assert len(text.splitlines()) <= 145
    assert len(outside_code.split()) <= 1000
    assert max(map(len, text.splitlines())) <= 120
    (line,) = (line for line in text.splitlines() if line.endswith("-m pytest"))
    assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]'")


def test_every_script_is_there():
    scripts = re.findall(r"^\| `([a-z_.]+)[ `].*\|.*\|$", PAGES["scripts.md"], re.M)
    assert len(set(scripts)) >= 20
    paths = [ROOT / "experiments" / name.replace(".", "/") for name in scripts]
    assert not [path for path in paths if not (path.is_dir() or path.with_suffix(".py").exists())]


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    named = re.findall(r'<a id="([^"]+)">', text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings} | set(named)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "BUILD_NOTES.md", "RESULTS.md"])
def test_links_between_pages_lead_somewhere(page):
    folder = ROOT / "docs" if page in PAGES and page != "README.md" else ROOT
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", (folder / page).read_text()):
        file = folder / (target or page)
        assert target.startswith("http") or file.exists(), target
        assert target.startswith("http") or not anchor or anchor in anchors(file.read_text()), f"{target}#{anchor}"


def test_the_reference_is_current():
    page = runpy.run_path(str(ROOT / "docs/reference.py"))["page"]
    assert page() == PAGES["reference.md"], "run python docs/reference.py"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=300)
    assert "what predicts completion token" in (tmp_path / "api/grpo_jax.models.html").read_text()  # of Policy.hidden


def plans(name: str, shape: Shape, limit: float) -> list[Plan | None]:
    """Returns the plans of full training, and of training with LoRA; None where no plan fits."""
    chosen: list[Plan | None] = []
    for rank, dtype in ((0, "float32"), (16, "bfloat16")):
        shape = shape._replace(lora_rank=rank, param_dtype=dtype)
        try:
            chosen.append(choose(replace(MODELS[name], dtype="bfloat16", rounding="stochastic"), shape, int(limit)))
        except UsageError:
            chosen.append(None)
    return chosen


def in_gib(plan: Plan | None) -> str:
    """Returns the cell of a plan's peak."""
    return f"{plan.estimate.peak / 2**30:.2g}" + ", remat" * (plan.model.remat == "layer") if plan else "—"


def minutes_of(plan: Plan | None, device: Device) -> str:
    """Returns the cell of the least minutes of 500 steps."""
    if not plan:
        return "—"
    seconds = sum(each.at_least for each in least_seconds(plan, traffic_of(plan, 1), device).values())
    return f"{500 * seconds / 60:.0f}"


ONE_GPU = Shape(num_prompts=8, prompt_tokens=272, piece_tokens=0)
SMALL_GPU = ONE_GPU._replace(traits=traits_of_gpu("8.9"))
V5E_8 = ONE_GPU._replace(num_prompts=1, fsdp=8, traits=Traits("tpu"))


@pytest.mark.parametrize("name", ["Gemma-3-270M", "Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen2.5-1.5B", "Qwen2.5-7B"])
def test_scaling_page_devices_match_the_planner(name):
    gpus = (SMALL_GPU, 0.9 * 16), (SMALL_GPU, 0.9 * 24), (ONE_GPU, 0.9 * 80)
    cells = [" / ".join(map(in_gib, plans(name, shape, limit * GB))) for shape, limit in (*gpus, (V5E_8, 16))]
    assert f"| {name} | {' | '.join(cells)} |" in PAGES["scaling.md"]


def test_scaling_page_names_every_device_of_plans():
    (names,) = re.findall(r"data sheet of `--device (.*?)\.", " ".join(PAGES["scaling.md"].split()))
    assert re.findall(r"\w+", names.replace(" or ", " ")) == [*DEVICES]


@pytest.mark.parametrize("name", ["Gemma-3-270M", "Qwen3-0.6B", "Qwen2.5-1.5B", "Qwen2.5-7B"])
def test_the_least_minutes_of_runs_are_the_plans(name):
    devices = {"rtx4090": 0.9 * 24, "l4": 0.9 * 24, "h100": 0.9 * 80, "v5e": 16}
    cells = []
    for device, limit in devices.items():
        shape = {"v5e": V5E_8, "h100": ONE_GPU}.get(device, SMALL_GPU)
        chosen = plans(name, shape, limit * GB)
        cells.append(" / ".join(minutes_of(plan, DEVICES[device]) for plan in chosen))
    assert f"| {name} | {' | '.join(cells)} |" in PAGES["one_gpu.md"]


# ---- the tables of methods

EXPORTS = {name for name, value in vars(F).items() if not name.startswith("_") and not inspect.ismodule(value)}


def table(heading: str) -> list[list[str]]:
    """Returns the cells of each row of a table of methods.md."""
    lines = PAGES["methods.md"].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    end = next((i for i, line in enumerate(lines) if i > start and not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[start + 2 : end]]


def constants_of(cell: str) -> dict[str, Any]:
    """Returns the constants that a cell states, "name=value, …"."""
    stated = dict(part.split("=") for part in cell.split(", ")) if cell else {}
    return {name: float(value) if value == "inf" else ast.literal_eval(value) for name, value in stated.items()}


METHODS = [(function.strip("`"), *rest) for function, *rest in table("function") if function]
FUNCTIONS = EXPORTS - {"Metrics", "Objective", "PRESETS", "Term", "TokenLogprobs"}  # no types and tables
HELPERS = {row[0].strip("`") for row in table("helper")}
EQUATIONS = re.findall(r"^(\w+) {2,}\S", blocks("methods.md", "text")[-1], re.M)


def test_every_function_has_one_equation_and_row():
    def constants(name):
        values = [parameter.default for parameter in inspect.signature(getattr(F, name)).parameters.values()]
        return [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]

    assert sorted(EQUATIONS) == sorted(FUNCTIONS - HELPERS)
    rows = [function for function, *_ in METHODS]
    assert len(set(rows)) == len(rows)
    assert {name for name in EQUATIONS if constants(name)} <= set(rows)


@pytest.mark.parametrize(("function", "defaults", "origin"), METHODS, ids=[row[0] for row in METHODS])
def test_table_rows_state_the_functions_defaults(function, defaults, origin):
    parameters = inspect.signature(getattr(F, function)).parameters
    numbers = {name: p.default for name, p in parameters.items() if isinstance(p.default, int | float)}
    stated = constants_of(defaults)
    assert {name: value for name, value in stated.items() if value is not None} == numbers
    assert all(parameters[name].default == value for name, value in stated.items())
    assert origin or not numbers or numbers == {"temperature": 1.0}


@pytest.mark.parametrize("name", sorted(FUNCTIONS - {"clipped_term"}))
def test_a_docstring_is_complete(name):
    doc, parameters = inspect.getdoc(getattr(F, name)), inspect.signature(getattr(F, name)).parameters
    if name not in HELPERS:
        assert all(part in doc for part in ("Args:", "Returns:", ">>>"))
    for parameter in parameters if "Args:" in doc else ():
        assert re.search(rf"^ +(\*\*)?{parameter}:", doc, re.M), f"{parameter} is not described"


def test_preset_rows_state_functions_and_constants():
    rows = {name.strip("`"): cells for name, *cells in table("preset")}
    assert rows.keys() == F.PRESETS.keys()
    for name, objective in F.PRESETS.items():
        *_, weights, divergence, kl_coef, constants = rows[name]
        assert weights == f"`{objective.aggregation.__name__}`", name
        assert float(kl_coef) == objective.kl_coef, name
        assert constants_of(constants) == objective.constants, name
        of_loss = f"`{objective.divergence.__name__}`" if objective.kl_coef else ""
        assert divergence == ("k1 in the reward" if objective.kl_in_reward else of_loss), name
