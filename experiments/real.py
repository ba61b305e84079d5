"""A pretrained model, from its first evaluation to the exported folder, with the commands that a user would type.

Each command is printed before it runs, in a process of its own. `sums` teaches a base model additions of numbers up to
20 from three solved examples in the prompt. It is made for a model of up to half a billion parameters on two CPU cores,
where Gemma 3 270M takes about 20 minutes.

`gsm8k` is made for one GPU, where the same model takes about ten minutes. The model first learns the solutions of
GSM8K's training problems, and then GRPO trains it with the reward for correct answers. `reasoning_gym:NAME?options`
takes a generator of that package, with three solved questions in the prompt, and needs a CPU like `sums`.

The control of each task trains from the same start on a coin toss, and should not learn. At the end the exported folder
of `sums` and `gsm8k` is evaluated like any other model. A command that has ended is not repeated, and one that was
interrupted resumes.

  python -m experiments.real --model DIR
  python -m experiments.real --model DIR --task gsm8k --data DIR
  python -m experiments.real --model DIR --task "reasoning_gym:gcd?max_value=20"
"""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments import timing
from grpo_jax.commands.flags import program, read_flags, refusing
from grpo_jax.data.generators import PREFIX, generate, parse_generators
from grpo_jax.data.rows import hash_of_prompt
from grpo_jax.errors import UsageError, user_path
from grpo_jax.runs.files import read_lines, read_object, write_json
from grpo_jax.statistics import cell
from grpo_jax.tasks.problems import TEMPLATES

EXAMPLES = "3 + 4 = 7\n10 + 5 = 15\n2 + 9 = 11\n"
LARGEST = 20  # the largest number in a sum
NUM_HELDOUT = 200  # of 441 sums


@dataclass(frozen=True)
class Config:
    """Options of the experiment."""

    model: str = ""
    """Folder of a Hugging Face model, or its id on the hub."""
    task: str = "sums"
    """sums: additions, on a CPU. gsm8k: word problems, on a GPU. reasoning_gym:NAME?options: a generator, on a CPU."""
    data: str = ""
    """Folder with GSM8K's train.jsonl and test.jsonl."""
    seeds: tuple[int, ...] = (0,)
    """Random seeds. Each seed has its own runs."""
    control: bool = True
    """Also train on a coin toss, from the same start."""
    out: Path = Path("runs/real")
    """Folder of all runs, of results.json and of curves.png."""
    extra: str = ""
    """Further options of the command that trains with GRPO, such as --extra="--learning-rate 2e-6"."""
    small: bool = False
    """Try all commands with two steps, few rows and short completions."""


# Options for --small, by command. The last value of an option counts.
SMALL: Mapping[str, Mapping[str, int]] = {
    "evaluate": {"num_heldout": 8, "samples": 1, "max_tokens": 8},
    "sft": {"steps": 2, "num_rows": 4},
    "grpo": {"steps": 2, "num_prompts": 2, "num_heldout": 8, "eval_every": 1, "eval_samples": 1, "max_tokens": 8},
    "export": {},
}


class Stage(NamedTuple):
    """One command, and the file that is there when it has ended."""

    args: Sequence[str]  # of grpo-jax
    result: Path
    run: Path | None = None  # the folder of its run, if an interrupted command resumes


def sums() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Returns the rows for training and the held-out rows, in an order that does not depend on the seed."""
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    return [rows[i] for i in order[NUM_HELDOUT:]], [rows[i] for i in order[:NUM_HELDOUT]]


def arguments(**options: Any) -> list[str]:
    """Returns options as flags of a command line."""
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    return [word for pair in pairs for word in pair]


def sums_stages(config: Config, folder: Path, seed: int) -> list[Stage]:
    """Returns the commands of one seed on sums."""
    training, heldout = folder / "train.jsonl", folder / "heldout.jsonl"
    for file, rows in zip((training, heldout), sums(), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prompt = arguments(template=EXAMPLES + "{question}", chat=False)
    task = [*prompt, *arguments(reward="exact_answer", stop="\\n", max_tokens=5)]
    train = arguments(steps=40, num_prompts=8, group_size=8, learning_rate=1e-6, eval_every=20, eval_samples=3)
    return grpo_stages(
        config,
        folder,
        config.model,
        seed,
        train=[*arguments(task=training, heldout=heldout), *task, *train],
        evaluate=[*arguments(task=heldout, samples=3), *task],
    )


def gsm8k_stages(config: Config, folder: Path, seed: int) -> list[Stage]:
    """Returns the commands of one seed on GSM8K: evaluation, supervised training, GRPO."""
    if not config.data:
        raise UsageError("--data is needed for gsm8k: name the folder with train.jsonl and test.jsonl")
    base, run, supervised = folder / "base", folder / "sft", folder / "sft-model"
    lengths = arguments(max_tokens=256, max_prompt_tokens=256, dtype="bfloat16", chat=False)
    task = [*arguments(task="gsm8k", data=config.data, num_heldout=400), *lengths]
    evaluate = [*task, *arguments(samples=7, num_prompts=32)]
    sft = arguments(
        method="sft",
        model=config.model,
        task=Path(config.data) / "train.jsonl",
        template=TEMPLATES["gsm8k"][0],  # the prompt of the task gsm8k
        completion_column="answer",  # the solution, and the number after "####"
        run_dir=run,
        seed=seed,
        steps=300,
        num_rows=32,
        learning_rate=2e-5,
    )
    train = arguments(steps=48, num_prompts=32, learning_rate=3e-6, eval_every=24, checkpoint_every=0)
    return [
        Stage(["evaluate", config.model, *evaluate, *arguments(out=base)], base / "numbers.json"),
        Stage(["train", *sft, *lengths], run / "results.json", run),
        Stage(["export", str(run), str(supervised)], supervised / "README.md"),
        *grpo_stages(config, folder, str(supervised), seed, train=[*task, *train], evaluate=evaluate),
    ]


def solved_questions(generator: str) -> str:
    """Returns the beginning of every prompt: three questions of a generator, which are never held out, with answers."""
    entries = (generate(generator, None, index)[1] for index in range(1000))
    solved = (entry for entry in entries if hash_of_prompt(entry["question"]) > 0.5)  # below are the held-out ones
    text = "".join(f"{x['question'].strip()}\nAnswer: {x['answer']}\n\n" for x in islice(solved, 3))
    return text.replace("{", "{{").replace("}", "}}")  # it is part of a template


def generator_options(text: str) -> list[str]:
    """Returns the options of a task that takes one generator: `reasoning_gym:NAME?options`.

    Raises:
      UsageError: There is no such generator, or there are several.
    """
    generators = parse_generators(text.removeprefix(PREFIX))
    if len(generators) > 1:
        raise UsageError(f"{text} names {len(generators)} generators: give one")
    template = solved_questions(generators[0][0]) + "{question}\nAnswer:"
    return arguments(task=text, template=template, answer_in="stop", stop="\\n", max_tokens=8, chat=False)


def generator_stages(config: Config, folder: Path, seed: int) -> list[Stage]:
    """Returns the command of one seed on a generator of reasoning_gym."""
    train = arguments(steps=20, num_prompts=4, group_size=8, learning_rate=1e-6, dtype="bfloat16")
    evaluate = arguments(num_heldout=100, eval_every=20, eval_samples=2)
    train = [*generator_options(config.task), *train, *evaluate]
    return grpo_stages(config, folder, config.model, seed, train=train, evaluate=[])[:1]


TASKS: Mapping[str, Callable[[Config, Path, int], list[Stage]]] = {
    "sums": sums_stages,
    "gsm8k": gsm8k_stages,
    PREFIX: generator_stages,
}


def stages_of(config: Config, folder: Path, seed: int) -> list[Stage]:
    """Returns the commands of one seed.

    Raises:
      UsageError: There is no such task.
    """
    task = PREFIX if config.task.startswith(PREFIX) else config.task
    if task not in TASKS:
        raise UsageError(f"--task is {task}: give sums, gsm8k or {PREFIX}NAME")
    return TASKS[task](config, folder, seed)


def grpo_stages(
    config: Config, folder: Path, model: str, seed: int, *, train: Sequence[str], evaluate: Sequence[str]
) -> list[Stage]:
    """Returns the commands that train a model with GRPO, export it, and evaluate the exported folder."""
    run, exported, numbers = folder / "grpo", folder / "model", folder / "exported"
    control = ["--control"] * config.control
    grpo = ["train", *arguments(model=model, run_dir=run, seed=seed), *train, *control, *shlex.split(config.extra)]
    return [
        Stage(grpo, run / "results.json", run),
        Stage(["export", str(run), str(exported)], exported / "README.md"),
        Stage(["evaluate", str(exported), *evaluate, *arguments(out=numbers)], numbers / "numbers.json"),
    ]


def in_small(stage: Stage) -> Stage:
    """Returns the command with the options of --small."""
    command = stage.args[0] if stage.args[0] != "train" else "sft" if "sft" in stage.args else "grpo"
    return stage._replace(args=[*stage.args, *arguments(**SMALL[command])])


def run_stage(stage: Stage, folder: Path) -> None:
    """Runs a command unless it has ended, and adds its seconds to the folder's seconds.jsonl.

    Raises:
      UsageError: The command failed; its own message stands above.
    """
    if stage.result.exists():
        return
    resumes = ["--resume"] if stage.run and (stage.run / "config.json").exists() else []
    print("$", shlex.join(["grpo-jax", *stage.args, *resumes]), flush=True)
    command = [sys.executable, "-c", "from grpo_jax.commands import main; main()", *stage.args, *resumes]
    ended = timing.run_timed(f"grpo-jax {stage.args[0]} → {stage.result.parent.name}", folder, command)
    if ended.returncode:
        raise UsageError(f"the last command ended with status {ended.returncode}: mend it and start again")


def results_of(folder: Path) -> dict[str, dict[str, float]]:
    """Returns the held-out numbers of one seed by stage, and the minutes of all its commands."""
    rows: dict[str, Any] = {}
    for name, place in {"base": folder / "base", "exported": folder / "exported"}.items():
        if (place / "numbers.json").exists():
            rows[name] = read_object(place / "numbers.json")
            del rows[name]["options"]
    trained = read_object(folder / "grpo" / "results.json")
    rows |= {name: trained[name] for name in ("before", "after", "control") if name in trained}
    seconds = sum(line["seconds"] for line in read_lines(folder / timing.FILE, {"seconds": float}))
    return {name: rows[name] for name in ("base", "before", "after", "control", "exported") if name in rows} | {
        "minutes": {"all": seconds / 60}
    }


def table_of(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the table of held-out accuracies by seed. Tasks with a lenient score have a column for it."""
    columns = {"avg": "sampled [95% interval]", "greedy": "greedy [95% interval]"}
    if any("reward_lenient" in row for rows in results.values() for row in rows.values()):
        columns["reward_lenient"] = "sampled, lenient"
    table = Table("seed", "", *columns.values(), title="held-out accuracy")
    for seed, rows in results.items():
        for name, row in rows.items():
            if name != "minutes":
                table.add_row(seed, name, *(cell(row, column) for column in columns))
        table.add_row(seed, "minutes", f"{rows['minutes']['all']:.1f}", end_section=True)
    return table


def save_curves(out: Path, seeds: Sequence[int]) -> None:
    """Draws the held-out accuracy over steps, with a line for each seed, of GRPO and of the control."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for number, (phase, label) in enumerate({"grpo": "GRPO", "control": "control (coin toss)"}.items()):
        for seed in seeds:
            lines = read_lines(out / f"seed{seed}" / "grpo" / "metrics.jsonl", {"phase": str, "step": int})
            points = [line for line in lines if line["phase"] == phase and "heldout_avg" in line]
            if not points:
                continue
            low, mean, high = ([line[f"heldout_avg{end}"] for line in points] for end in ("_low", "", "_high"))
            steps = [line["step"] for line in points]
            axis.plot(steps, mean, color=f"C{number}", label=label if seed == seeds[0] else None)
            axis.fill_between(steps, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
    axis.set_xlabel("step")
    axis.set_ylabel("held-out accuracy")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend()
    figure.savefig(out / "curves.png", dpi=120)
    plt.close(figure)


def main(config: Config) -> None:
    """Runs all commands of all seeds; prints a table, and writes results.json and curves.png.

    Raises:
      UsageError: The model is missing, or a command failed.
    """
    if not config.model:
        raise UsageError("--model is needed: name the folder of a model, or its id on the hub")
    out, results = user_path(config.out), {}
    for seed in config.seeds:
        folder = out / f"seed{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for stage in stages_of(config, folder, seed):
            run_stage(in_small(stage) if config.small else stage, folder)
        results[str(seed)] = results_of(folder)
    write_json(out / "results.json", results)
    save_curves(out, config.seeds)
    Console().print(table_of(results))
    print(f"curves: {out / 'curves.png'}")


if __name__ == "__main__":
    with refusing():
        main(read_flags(Config, prog=program(), description=__doc__))
