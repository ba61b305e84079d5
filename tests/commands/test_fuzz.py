"""Checks with random bad input that a command accepts or refuses it in a sentence: no traceback, and no hang.

Each test has a quick profile and a long one: `pytest -m slow -s tests/commands/test_fuzz.py` takes about ten minutes.
Examples are always the same, except with GRPO_JAX_FUZZ=1: then `--hypothesis-seed` chooses them, or they are new.
"""

import io
import json
import math
import os
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import jax
import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from rich.console import Console
from tiny import GOLDEN, Characters, refused, write_rows

from grpo_jax import hosts
from grpo_jax.commands import evaluate, flags, model_and_task, sample, train
from grpo_jax.commands.export import model_card
from grpo_jax.data.episodes import Reply, environment
from grpo_jax.data.preferences import read_preferences
from grpo_jax.data.rows import read_rows
from grpo_jax.errors import UsageError
from grpo_jax.models.files.families import config_from_huggingface
from grpo_jax.options import option_types
from grpo_jax.report import write_report
from grpo_jax.runs.files import read_object
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import LoraDescription
from grpo_jax.tasks.task import text_task
from grpo_jax.tasks.tools import load_tools, schemas_of

HUGE = 10**400
SECONDS = 10.0  # of the processor, which other programs do not lengthen


def survives(call: Callable[..., Any], *args: Any) -> bool:
    """Whether a call is accepted, or refused in a sentence, within ten seconds. Another error is raised again."""
    started = time.process_time()
    try:
        call(*args)
    except UsageError as error:
        assert "\n" not in str(error), error  # noqa: PT017
        assert len(str(error)) < 1000, error  # noqa: PT017
        return False
    finally:
        assert time.process_time() - started < SECONDS
    return True


def profiles(quick: int, long: int) -> Any:
    """How many examples a test takes by default, and how many when it is slow."""
    return pytest.mark.parametrize("examples", [quick, pytest.param(long, marks=pytest.mark.slow)])


def fuzz(examples: int, strategy: st.SearchStrategy, call: Callable[[Any], bool]) -> None:
    """Calls with so many examples, of which some are accepted and some refused."""
    outcomes: Counter[bool] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=not os.environ.get("GRPO_JAX_FUZZ"),
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        outcomes[call(example)] += 1

    run()
    print(f"{outcomes[True]} examples accepted, {outcomes[False]} refused")
    assert min(outcomes[True], outcomes[False]) > 0


WORDS = st.sampled_from(
    ["", "x", "None", "-1", "nan", "a b", "\x00", "\ud800", "é" * 300, "{prompt}", "{", "..", "/dev/null"]
)
NUMBERS = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 8, 2**31 - 1, 2**31, 2**32, 10**30]) | st.integers(-3, 40)
FLOATS = st.sampled_from([-1.0, 0.0, 1e-300, 0.5, 1.0, 2.0, 1e39, math.inf, -math.inf, math.nan]) | st.floats(0, 2)
TEXTS = WORDS | st.text(max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def replaced(base: dict[str, Any], names: st.SearchStrategy[str] | None = None) -> st.SearchStrategy[dict[str, Any]]:
    """An object with up to three values replaced, added, or taken away."""
    gone, names = object(), st.sampled_from([*base, "surprise"]) if names is None else names
    some = st.dictionaries(names, JSON | st.just(gone), min_size=1, max_size=3)
    return some.map(lambda new: {name: value for name, value in {**base, **new}.items() if value is not gone})


# ---- command lines


class Reached(Exception):
    """A command line that nothing refused before the run was opened."""


@pytest.fixture(scope="module")
def inputs(inputs):
    """The folder of inputs, while functions that compile, meet hosts or end the process are replaced."""

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    def initialize(**_: Any) -> None:
        raise ValueError("there are no hosts")

    def leave(reason: str, code: int) -> None:
        raise SystemExit(code)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs)
        patch.setattr(flags, "open_run", reached)
        patch.setattr(evaluate, "sample_and_score", reached)
        patch.setattr(sample, "sample", reached)
        patch.setattr(jax.distributed, "initialize", initialize)
        patch.setattr(hosts, "leave", leave)
        yield inputs


GRADED = ("--task", "rows.jsonl", "--reward", "length(maximum=3)", "--num-prompts", "8", "--max-tokens", "8")
BASES = {
    "grpo": GRADED,
    "ppo": GRADED,
    "sft": ("--task", "rows.jsonl", "--num-rows", "8"),
    "reward-model": ("--task", "rows.jsonl", "--num-pairs", "8"),
    "dpo": ("--task", "rows.jsonl", "--num-pairs", "8"),
    "kto": ("--task", "rows.jsonl", "--num-completions", "8"),
}
# Where things are, and what the network is asked for.
FIXED = {"run_dir", "config", "resume", "method", "model", "task", "data", "wandb", "engine", "teacher", "out", "json"}
FIXED |= {"environment", "tools", "environment_factory", "agent"}


def words_of(hint: Any) -> st.SearchStrategy[list[str]]:
    """Arguments of an option of this type, and some of none."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(args).map(lambda value: [str(value)]) | st.just(["nonsense"])
    if origin in (Union, UnionType):
        return st.one_of(*map(words_of, args))
    if origin is tuple:
        return st.lists(words_of(args[0]).map(lambda words: words[0]), max_size=3)
    if hint in (int, float):
        return (NUMBERS if hint is int else NUMBERS | FLOATS).map(lambda number: [str(number)])
    return (st.just("None") if hint is type(None) else TEXTS).map(lambda text: [text.replace("\x00", "")])


def flag(name: str, hint: Any) -> st.SearchStrategy[list[str]]:
    named = "--" + name.replace("_", "-")
    if hint is bool:
        return st.sampled_from([[named], ["--no-" + named[2:]]])
    return words_of(hint).map(lambda words: [named, *words])


def flags_of(config_class: type) -> st.SearchStrategy[list[str]]:
    """Up to four options of a command."""
    types = {name: hint for name, hint in option_types(config_class).items() if name not in FIXED}
    some = st.lists(st.sampled_from(sorted(types)), min_size=1, max_size=4, unique=True)
    given = some.flatmap(lambda names: st.tuples(*(flag(name, types[name]) for name in names)))
    return given.map(lambda parts: [word for part in parts for word in part])


def starts(call: Callable[[], Any]) -> bool:
    """Whether a command gets as far as its run, or ends with status 2 and without a traceback."""
    started, said = time.process_time(), io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            call()
    except Reached:
        return True
    except SystemExit as ended:
        assert ended.code == 2, said.getvalue()  # noqa: PT017
        assert "Traceback" not in said.getvalue()
        return False
    finally:
        assert time.process_time() - started < SECONDS
    raise AssertionError("it neither reached its run nor was refused")


@pytest.mark.parametrize("method", BASES)
@profiles(10, 200)
def test_command_lines(inputs, method, examples):
    base = ["--method", method, "--model", "model", *BASES[method], "--run-dir", "run", "--no-compilation-cache"]
    given = flags_of(train.module_of(method).Config)
    fuzz(examples, given, lambda words: starts(lambda: train.command([*base, *words])))


@pytest.mark.parametrize("command", [evaluate, sample])
@profiles(20, 200)
def test_command_lines_of_evaluations_and_samples(inputs, command, examples):
    base = ["model", "--no-compilation-cache", *GRADED]

    def run(words: list[str]) -> None:
        with flags.refusing():
            command.main(command.parse([*base, *words]))

    fuzz(examples, flags_of(command.Options), lambda words: starts(lambda: run(words)))


@profiles(48, 250)
def test_files_of_options(inputs, examples):
    types = option_types(train.module_of("grpo").Config)
    names = st.sampled_from(sorted(types.keys() - FIXED | {"run_dir", "config", "resume"}))
    options = replaced({"steps": 3, "learning_rate": 1e-3, "lora_targets": ["q_proj"], "lora_rank": 2}, names)

    def run(text: str, suffix: str) -> None:
        file = inputs / f"options.{suffix}"
        file.write_bytes(text.encode(errors="surrogatepass"))
        base = ["--config", file.name, "--model", "model", *GRADED, "--run-dir", "run", "--no-compilation-cache"]
        train.command(base)

    as_json = st.tuples(broken(options.map(json.dumps)), st.just("json"))
    as_yaml = st.tuples(broken(options.map(yaml.safe_dump)), st.just("yaml"))
    fuzz(examples, as_json | as_yaml, lambda given: starts(lambda: run(*given)))


# ---- files


@st.composite
def broken(draw: Any, texts: st.SearchStrategy[str]) -> str:
    """A text, of which in half of the cases pieces are replaced."""
    text = draw(texts)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        start = draw(st.integers(0, len(text)))
        stop = draw(st.integers(start, min(start + 40, len(text))))
        piece = draw(TEXTS | JSON.map(json.dumps) | st.just(text[start:stop] * 2) | st.sampled_from('{}[]",:-9eE\n\\'))
        text = text[:start] + piece + text[stop:]
    return text


LLAMA = json.loads((GOLDEN / "llama/config.json").read_text())
QWEN = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
SCALED = LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}


@profiles(150, 10_000)
def test_configurations_of_models(examples):
    types = st.sampled_from(["gemma", "gemma3_text", "qwen3", "mistral", "smollm3", "gpt2", "mixtral", "qwen3_moe"])
    others = types.map(lambda name: LLAMA | {"model_type": name})
    configs = st.one_of(*map(replaced, (LLAMA, QWEN, SCALED)), others.flatmap(replaced))
    fuzz(examples, configs, lambda config: survives(config_from_huggingface, config))


@pytest.mark.parametrize("value", ["x", True, -1.0, math.nan, HUGE])
def test_model_numbers_must_be_finite_and_in_range(value):
    with refused("rms_norm_eps"):
        config_from_huggingface(LLAMA | {"rms_norm_eps": value})


def rows_task(file: Path) -> None:
    text_task(Characters(), (1,), read_rows(file), vocab_size=256, num_prompts=1, seed=0, reward=lambda e, c: [])


def files_of(rows: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[tuple[str, str]]:
    """Name and text of a file with rows."""
    lines = rows.map(lambda rows: "".join(json.dumps(row) + "\n" for row in rows))
    as_lines = st.tuples(st.just("rows.jsonl"), broken(lines))
    return as_lines | st.tuples(st.just("rows.json"), broken(rows.map(json.dumps)))


@profiles(100, 5_000)
def test_rows(tmp_path, examples):
    row, message = {"prompt": "1+1=", "answer": "2"}, {"role": "user", "content": "1+1="}
    chat = st.lists(replaced(message) | st.just(message), max_size=3).map(lambda chat: row | {"prompt": chat})
    sound = [row | {"prompt": f"{i}+{i}="} for i in range(4)]
    rows = st.lists(replaced(row) | chat | st.just(row) | JSON, max_size=2).map(lambda odd: sound + odd)

    def run(given: tuple[str, str]) -> bool:
        (tmp_path / given[0]).write_bytes(given[1].encode(errors="surrogatepass"))
        return survives(rows_task, tmp_path / given[0])

    fuzz(examples, files_of(rows), run)


@profiles(80, 5_000)
def test_preferences(tmp_path, examples):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    talk = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    rows = st.lists(replaced(row) | replaced(talk) | st.sampled_from([row, talk]) | JSON, min_size=1, max_size=4)

    def run(given: tuple[tuple[str, str], bool]) -> bool:
        (name, text), chat = given
        (tmp_path / name).write_bytes(text.encode(errors="surrogatepass"))
        return survives(lambda: read_preferences(tmp_path / name, chat=chat))

    fuzz(examples, st.tuples(files_of(rows), st.booleans()), run)


TYPES = "int str bool float list[int] dict[str,float] int|None object Literal['a'] Nowhere 'str' 3 tuple bytes Any"
HINTS = st.sampled_from(["", *(f": {name}" for name in TYPES.split())])
NAMES = st.sampled_from(["a", "b", "*args", "**kwargs", "self", "x: int = 3", "y=None", "*", "/", "class", "a b"])
DOCS = st.sampled_from(['"""Adds."""', '""', "", "3", '"""Adds.\n\n    Args:\n      a: of it.\n    """', "'''\x00'''"])


@profiles(60, 2_000)
def test_files_of_tools(tmp_path, examples):
    parameters = st.lists(st.tuples(NAMES, HINTS).map("".join), max_size=3).map(", ".join)
    bodies = st.sampled_from(["return 1", "raise ValueError", "yield", "pass", "1 +"])
    heads = st.sampled_from(
        ["def", "async def", "class", "import nowhere\ndef", "raise SystemExit\ndef", "f = 3\ndef g"]
    )
    named = st.sampled_from([":f", ":f,f", ":g", "", ":", ":f,", ":f(1)"])
    counted = iter(range(10**9))

    def run(given: tuple[str, str, str, str, str]) -> bool:
        head, parameters, doc, body, name = given
        file = tmp_path / f"tools_{next(counted)}.py"  # loaded once by its name
        lines = [line for line in (doc, body) if line]
        text = f"from typing import *\n{head} f({parameters}):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"
        file.write_text(text)
        try:
            return survives(lambda: schemas_of(load_tools(f"{file}{name}")))
        finally:
            file.unlink()

    fuzz(examples, st.tuples(heads, parameters, DOCS, bodies, named), run)


@profiles(60, 5_000)
def test_replies_of_environments(examples):
    """What is no reply ends the episode by a failure; what is accepted can be told to the policy and learned from."""
    ids = st.none() | st.lists(st.integers(0, 9), max_size=3) | st.lists(NUMBERS, max_size=3).map(tuple) | JSON
    failures = st.just("") | st.sampled_from(["timeout", "x", 3, []])
    rewards, texts, done = st.floats(0, 1) | FLOATS | JSON, st.text(max_size=9) | TEXTS | JSON, st.booleans()
    sound = st.builds(Reply, texts, reward=rewards, done=done, ids=ids)
    replies = st.builds(Reply, texts, reward=rewards, done=done | JSON, ids=ids, failure=failures, message=JSON)

    def run(value: Any) -> bool:
        (reply,) = environment(lambda example, transcript, key: value, list).ask([{}], [()], [(0, 0)])
        assert isinstance(reply.message, str)
        if reply.failure:
            return False
        assert reply.reward is None or math.isfinite(np.float32(reply.reward))
        assert isinstance(reply.text.encode(), bytes)
        return True

    fuzz(examples, sound | replies | JSON, run)


# ---- files of runs


def objects_of_a_run() -> dict[str, list[dict[str, Any]]]:
    """Returns the objects of a run's files, by name."""
    lines = [{"phase": "grpo", "step": step, "reward": 0.5, "kl": 0.1} for step in (1, 2, 3)]
    group = {"prompt": "p", "completions": ["a", "b"], "rewards": [0.0, 1.0], "advantages": [-1.0, 1.0]}
    group |= {"lengths": [1, 1], "truncated": [False, True], "tokens": [["a"], ["b"]], "logprobs": [[-1.0], [-2.0]]}
    group |= {"components": {"x": [0.0, 1.0]}, "columns": {"answer": "b"}}
    options = {"steps": 3, "task": "rows.jsonl", "temperature": 0.5, "group_size": 4, "num_heldout": None, "data": ""}
    results = {"before": {"avg": 0.1, "avg_low": 0.0, "avg_high": 0.2}, "after": {"avg": 0.3}, "params_sha256": "x"}
    return {
        "metrics.jsonl": lines,
        "times.jsonl": [line | {"rollout_s": 1.0} for line in lines],
        "rollouts.jsonl": [{"phase": "grpo", "step": 1, **group}],
        "warnings.jsonl": [{"message": "look"}],
        "config.json": [{"train": options, "method": "grpo", "devices": 1}],
        "results.json": [results],
        "inputs.json": [{"grpo": {"training rows": "abc"}}],
        "lora.json": [LoraDescription("base", "abc", "float32", 2, 4.0, ("q_proj",))._asdict()],
    }


def resume(folder: Path) -> None:
    train.method_of(["--resume", "--run-dir", str(folder)])
    run = RunFolder(folder, read_object(folder / "config.json"), console=Console(quiet=True))
    run.keep_inputs("grpo", {"training rows": "abc"})


READERS = (
    write_report,
    LoraDescription.read,
    lambda folder: model_and_task.saved_options(str(folder)),
    lambda folder: model_card(folder, phase="grpo", step=2, adapter=False),
    resume,
)


def write_run(folder: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    (folder / "checkpoints/grpo").mkdir(parents=True, exist_ok=True)
    for name, objects in files.items():
        write_rows(folder / name, objects)


@profiles(60, 5_000)
def test_files_of_runs(tmp_path, examples):
    files = objects_of_a_run()

    def changed(name: str) -> st.SearchStrategy[tuple[str, str]]:
        *lines, last = files[name]
        text = replaced(last).map(lambda line: "".join(json.dumps(line) + "\n" for line in [*lines, line]))
        return st.tuples(st.just(name), broken(text))

    def run(given: tuple[str, str]) -> bool:
        write_run(tmp_path, files)
        (tmp_path / given[0]).write_bytes(given[1].encode(errors="surrogatepass"))
        accepted = [survives(read, tmp_path) for read in READERS]
        return all(accepted)

    fuzz(examples, st.sampled_from(sorted(files)).flatmap(changed), run)


ODD_NUMBERS = [
    ("results.json", {"before": {"avg": "x", "avg_low": "y", "avg_high": "z"}}),
    ("results.json", {"before": {"avg": HUGE, "avg_low": HUGE, "avg_high": HUGE}}),
    ("rollouts.jsonl", {"logprobs": [[1e308, -1e308], [0.0]], "turns": [[1, 1], [1]], "tokens": [["a", ""], ["b"]]}),
    ("rollouts.jsonl", {"logprobs": [[HUGE], [0.0]]}),
    ("rollouts.jsonl", {"rewards": [HUGE, 0.0]}),
    ("metrics.jsonl", {"reward": HUGE}),
]


@pytest.mark.parametrize(("file", "change"), ODD_NUMBERS, ids=range(6))
def test_numbers_of_runs_may_be_of_any_size(tmp_path, file, change):
    files = objects_of_a_run()
    write_run(tmp_path, files | {file: [files[file][0] | change]})
    for read in READERS:
        survives(read, tmp_path)
