"""Attacks every command and method with bad command lines, and every file of runs, models and rows with damage.

Each attack runs in a process of its own, which is forked from a server that has imported everything. It must end within
a minute, with status 0 or with one sentence. `pytest -m slow -s tests/commands/test_attack.py` prints the counts.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from command_helpers import without_override, write_inputs
from command_runs import USER_CODE
from test_faults import FAULTS

from grpo_jax import commands
from grpo_jax.commands import evaluate, export, flags, sample, train
from grpo_jax.options import option_types

CPU_SECONDS, SECONDS = 60, 240  # after which a process hangs
PRELOADED = ["command_helpers", "grpo_jax.training.trainer", "grpo_jax.offline.phase", "grpo_jax.commands.export"]
PRELOADED += ["grpo_jax.commands.ppo", "grpo_jax.commands.sft", "transformers.models.auto.tokenization_auto"]
SHORT = "--model model --steps 2 --eval-every 0 --checkpoint-every 1 --learning-rate 1e-3"
GRADED = f"{SHORT} --task rows.jsonl --reward rewards.py:low --num-prompts 2 --max-tokens 4 --group-size 2"
GRADED += " --num-heldout 2 --eval-samples 1 --rollouts-every 1"
FIT = f"{SHORT} --warmup-steps 0 --log-every 1"
METHODS = {
    "grpo": GRADED,
    "ppo": f"--method ppo {GRADED}",
    "sft": f"--method sft {FIT} --task rows.jsonl --num-rows 8 --max-tokens 8 --num-heldout 4",
    "reward-model": f"--method reward-model {FIT} --task rows.jsonl --num-pairs 8",
    "dpo": f"--method dpo {FIT} --task rows.jsonl --num-pairs 8",
    "kto": f"--method kto {FIT} --task rows.jsonl --num-completions 8",
    "lora": f"{GRADED} --lora-rank 2",
    "distillation": f"{GRADED} --teacher teacher --distillation reverse_kl",
    "episodes": f"{GRADED} --environment user.py:make --max-turns 2 --environment-tokens 8 --max-tokens 16",
}


def reached(*_: object, **__: object) -> None:
    """Ends a process whose command line has passed every check before anything is compiled."""
    os._exit(0)


def attempt(folder: Path, log: Path, argv: list[str], ends: bool) -> None:
    """Runs a command in this process, in which permissions of files hold also for root.

    Args:
      folder: The working directory.
      log: The file that gets the output.
      argv: The arguments of `grpo-jax`.
      ends: False to end a command before it compiles anything, which saves most of the time.
    """
    os.cpu_count = lambda: 1  # the number of processes of a reward
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    if not ends:
        flags.open_run = evaluate.sample_and_score = sample.sample = reached
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    sys.argv = ["grpo-jax"]
    with without_override():
        commands.main(argv)


@pytest.fixture(scope="module")
def attack(tmp_path_factory):
    """A function that runs a command in a folder, and returns its status and what it wrote."""
    context, log = multiprocessing.get_context("forkserver"), tmp_path_factory.mktemp("attack") / "log"
    context.set_forkserver_preload(PRELOADED)

    def attack(folder: Path, *argv: str, ends: bool = True) -> tuple[int, str]:
        process = context.Process(target=attempt, args=(folder, log, [*map(str, argv)], ends))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return -1, "it hung"
        return process.exitcode or 0, log.read_text(errors="replace")

    return attack


def outcome(status: int, text: str) -> str:
    """Returns "accepted", "refused" or, for all that must not be, "fault"."""
    sentences = [line for line in text.splitlines() if line.startswith(("error: ", "╭─"))]  # or a box of the parser
    if "Traceback (most recent call last)" in text or status not in (0, 2) or (status and not sentences):
        return "fault"
    return "refused" if status else "accepted"


def count(outcomes: Counter[str], faults: list[str], least: int) -> None:
    """Prints the counts, and raises if there are faults or too few attacks."""
    print(f"{sum(outcomes.values())} attacks: {dict(outcomes)}")
    assert sum(outcomes.values()) >= least
    assert not faults, "\n\n".join(faults)


# ---- command lines

NUMBERS = ["-1", "0", "1", "3", "2147483648", "1000000000000000000000", "1.5", "nan", "x"]
FLOATS = ["-1", "0", "1e-300", "0.5", "1", "1e39", "1e308", "inf", "-inf", "nan", "x"]
TEXTS = ["", "nowhere", ".", "rows.jsonl", "é" * 300, "{", "{prompt}", "..", "/dev/null", "a\x01b", "\udc80", "a:b"]
TEXTS += ["/proc/none/a", "~nobody/x", "http://127.0.0.1:9", "rewards.py", "rewards.py:none", " " * 3000, "None", "{}"]
EVALUATE = "evaluate model --task rows.jsonl --reward rewards.py:low --num-heldout 2 --samples 1 --max-tokens 4"
SAMPLE = "sample model --task rows.jsonl --reward rewards.py:low --num-prompts 2 --group-size 2 --max-tokens 4"


def values_of(hint: object) -> list[str]:
    """Returns bad and odd values for an option of this type."""
    text = str(hint)
    literals = re.findall(r"'([^']*)'", text) if "Literal" in text else []
    return (
        [*literals, "nonsense", ""] * bool(literals)
        + NUMBERS * ("int" in text)
        + FLOATS * ("float" in text)
        + TEXTS * ("str" in text or "Path" in text)
    )


def odd_option(name: str, hint: object, dice: random.Random) -> list[str]:
    """Returns the arguments that set an option to an odd value."""
    return [f"--{name.replace('_', '-')}", *dice.sample(values := values_of(hint), min(1, len(values)))]


def command_lines(folder: Path, dice: random.Random) -> Iterable[list[str]]:
    """Yields command lines: one odd value for each option of each method, pairs of options, and bad files."""
    trained = ("grpo", "ppo", "sft", "reward-model", "dpo", "kto")
    starts = {name: f"train {METHODS[name]}" for name in trained}
    starts |= {"evaluate": EVALUATE, "sample": SAMPLE, "export": "export run out/x"}
    options = {name: option_types(train.module_of(name).Config) for name in trained}
    options |= {"evaluate": option_types(evaluate.Options), "export": option_types(export.Options)}
    options |= {"sample": {name: hint for name, hint in option_types(sample.Options).items() if name != "json"}}
    for name, start in starts.items():
        base, hints = start.split(), options[name]
        alone = hints if name in ("grpo", "evaluate", "sample", "export") else dice.sample([*hints], len(hints) // 3)
        for chosen in [*([option] for option in alone), *(dice.sample([*hints], 2) for _ in range(8))]:
            yield base + [word for option in chosen for word in odd_option(option, hints[option], dice)]
        if "--task" in base:
            yield from ([*base, "--task", f"bad/{file.name}"] for file in sorted((folder / "bad").iterdir()))
            for model in (".", "rows.jsonl", "run", "broken", "nowhere"):
                yield [model if word == "model" else word for word in base]


BAD_ROWS = {
    "empty": b"",
    "blank": b"\n \n",
    "words": b"prompt\n",
    "array": b"[1, 2]\n",
    "null": b"null\n" * 9,
    "half": b'{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejec',
    "columns": b'{"text": "1+1="}\n' * 9,
    "numbers": b'{"prompt": 1, "completion": 2, "chosen": 3, "rejected": 4, "answer": NaN}\n' * 9,
    "nulls": b'{"prompt": null, "completion": null, "chosen": null, "rejected": null}\n' * 9,
    "empty_texts": b'{"prompt": "", "completion": "", "chosen": "", "rejected": ""}\n' * 9,
    "same": b'{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "2"}\n' * 64,
    "one": b'{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}\n',
    "latin": b'{"prompt": "\xe9", "completion": "2", "chosen": "2", "rejected": "3"}\n' * 9,
    "surrogate": b'{"prompt": "\\ud800", "completion": "\\ud800", "chosen": "\\ud800", "rejected": "3"}\n' * 9,
    "deep": b'{"prompt": ' + b"[" * 9999 + b"]" * 9999 + b"}\n",
    "long": b'{"prompt": "' + b"1" * 10**7 + b'", "completion": "2", "chosen": "2", "rejected": "3"}\n',
    "twice": b'{"prompt": "1", "prompt": "2", "completion": "2", "chosen": "2", "rejected": "3"}\n' * 64,
    "messages": b'{"prompt": [{"role": "user"}], "completion": [{}], "chosen": [], "rejected": {}}\n' * 9,
    "zeros": bytes(4096),
}


def is_silent(folder: Path) -> bool:
    """Returns whether a run learned from numbers that are none, without a warning."""
    file = folder / "metrics.jsonl"
    is_bad = file.exists() and re.search('"(loss|grad_norm|reward|nll)": null', file.read_text())
    return bool(is_bad) and not (folder / "warnings.jsonl").exists()


@pytest.mark.slow
def test_bad_command_lines_get_one_sentence(attack, tmp_path):
    folder, outcomes, faults = write_inputs(tmp_path), Counter[str](), []
    (folder / "bad").mkdir()
    for name, content in BAD_ROWS.items():
        (folder / f"bad/{name}.jsonl").write_bytes(content)
    shutil.copytree(folder / "model", folder / "broken")
    (folder / "broken/config.json").write_text("{}")
    assert attack(folder, "train", *METHODS["grpo"].split(), "--run-dir", "run")[0] == 0
    for number, line in enumerate(command_lines(folder, random.Random(0))):
        run = f"out/{number}"
        argv = [run if word == "out/x" else word for word in line]
        argv[1:1] = ["--run-dir", run] * (line[0] == "train")
        status, text = attack(folder, *argv, ends=number % 10 == 0)
        kind = "silent" if is_silent(folder / run) and not status else outcome(status, text)
        outcomes[kind] += 1
        if kind in ("fault", "silent"):
            faults.append(f"{argv}: {kind} {status}\n{text[-2000:]}")
        shutil.rmtree(folder / run, ignore_errors=True)
    count(outcomes, faults, 300)


# ---- damage

ACTIONS = {
    "resume": ("train", "--resume", "--run-dir", "run"),
    "export": ("export", "run", "exported"),
    "report": ("report", "run"),
}


def result_of(action: str, folder: Path) -> object:
    """Returns what a command made, which damage must not change without a word; None for a report."""
    if action == "export":
        return [(folder / "exported" / file).read_bytes() for file in ("model.safetensors", "tokenizer.json")]
    return json.loads((folder / "run/results.json").read_text()) if action == "resume" else None


def actions_on(file: Path, dice: random.Random, *, exports: bool) -> list[str]:
    """Returns commands that may read a file; to resume takes longest, and a reward model has no export."""
    reports = ["report"] if file.suffix in (".json", ".jsonl") else []
    return [*reports, "export" if exports and dice.random() < 0.7 else "resume"]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_damage_is_noticed_or_harmless(attack, tmp_path, name):
    folder, dice, outcomes, faults = write_inputs(tmp_path / "inputs"), random.Random(name), Counter[str](), []
    shutil.rmtree(folder / "granite")
    (folder / "user.py").write_text(USER_CODE)
    status, text = attack(folder, "train", *METHODS[name].split(), "--run-dir", "run")
    assert status == 0, text
    (checkpoint,) = (folder / "run/checkpoints").glob("*/1")
    expected = {"resume": result_of("resume", folder), "report": None}
    shutil.rmtree(checkpoint.with_name("2"))
    for file in ("results.json", "report.html"):
        (folder / "run" / file).unlink()
    if exports := name != "reward-model":
        assert attack(folder, *ACTIONS["export"])[0] == 0
        expected["export"] = result_of("export", folder)
        shutil.rmtree(folder / "exported")
    made = [path for part in ("run", "model", "rows.jsonl") for path in (folder / part, *folder.glob(f"{part}/**/*"))]
    files = sorted(filter(Path.is_file, made))
    for file in dice.sample(files, min(len(files), 16)):
        for action in actions_on(file, dice, exports=exports):
            place, fault = file.relative_to(folder), dice.choice([*FAULTS, "swapped"])
            here = shutil.copytree(folder, tmp_path / "here", symlinks=True)
            if fault == "swapped":
                shutil.copy(dice.choice([other for other in files if other != file]), here / place)
            else:
                FAULTS[fault](here / place, dice)
            status, text = attack(here, *ACTIONS[action])
            kind = outcome(status, text)
            if kind == "accepted":
                same = expected[action] == result_of(action, here)
                kind = "noticed" if "warning: " in text else "harmless" if same else "silent"
            shutil.rmtree(here, ignore_errors=True)
            outcomes[kind] += 1
            if kind in ("fault", "silent"):
                faults.append(f"{place} {fault} {action}: {kind} {status}\n{text[-2000:]}")
    count(outcomes, faults, 15)
