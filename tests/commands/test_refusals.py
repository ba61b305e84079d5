"""Bad input of every kind is one sentence: no traceback, no hang, and nothing accepted that makes no sense."""

import io
import json
import math
import random
import re
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from rich.console import Console

from grpo_jax.commands import evaluate, grpo, train
from grpo_jax.config import PPOConfig, option_types, validate, validate_ppo, with_options
from grpo_jax.data.rows import read_rows
from grpo_jax.errors import UsageError
from grpo_jax.models.families import config_from_huggingface
from grpo_jax.runs import flags
from grpo_jax.runs.card import model_card
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import LoraDescription
from grpo_jax.runs.report import write_report
from grpo_jax.tasks.dataset import text_task

MODEL = Path(__file__).parents[3] / "shared/data/stories260K-hf"
needs_model = pytest.mark.skipif(not MODEL.exists(), reason="needs the stories260K model")
NUMBERS = [math.nan, math.inf, -1, 10**30]


# ---- options


def test_no_option_takes_what_is_no_number():
    """NaN nowhere; infinity where it means no bound; whole numbers that counters can hold."""
    unbounded = {"max_grad_norm", "epsilon_low", "epsilon_high", "value_clip"}
    for name, hint in option_types(PPOConfig).items():
        if not {"float", "int"} & set(str(hint).replace("<class '", "").replace("'>", "").split(" | ")):
            continue
        for value in NUMBERS:
            if "float" not in str(hint) and not isinstance(value, int):
                continue
            try:
                validate_ppo(with_options(PPOConfig(), **{name: value}))
            except UsageError as error:
                assert "\n" not in str(error), (name, value)  # noqa: PT017
                continue
            assert not math.isnan(value), name
            assert math.isfinite(value) or name in unbounded, name
            assert value >= 0 or name in ("temperature_spread", "devices"), (name, value)
            assert "float" in str(hint) or value < 2**32, (name, value)


@pytest.mark.parametrize("samples", ["-1", "0", "99999999999"])
def test_an_evaluation_of_no_samples_is_refused(samples):
    options = evaluate.parse(["somewhere", "--task", "gsm8k", "--samples", samples])
    with pytest.raises(UsageError, match=f"samples is {samples}"):
        evaluate.main(options)


# ---- files, broken at random


def mutated(text: str, dice: random.Random) -> str:
    """JSON with one to three of: a value replaced, a character replaced, a piece cut out or said twice."""
    for _ in range(dice.randrange(1, 4)):
        start, stop = sorted(dice.randrange(len(text) + 1) for _ in range(2))
        stop = min(stop, start + 40)
        other = dice.choice(
            ["", text[start:stop] * 2, dice.choice('{}[]",:0-9eEn\\\x00\ud800é'), *map(json.dumps, VALUES)]
        )
        text = text[:start] + other + text[stop:]
    return text


VALUES = [None, True, -1, 0, 1.5, 10**30, math.nan, math.inf, "", "x", "x" * 5000, [], [1], {}, {"a": {"b": [None]}}]


def changed(contents: dict, dice: random.Random) -> dict:
    """An object with one to three values replaced, taken away or added."""
    contents = dict(contents)
    for _ in range(dice.randrange(1, 4)):
        name = dice.choice([*contents, "surprise"])
        contents[name] = dice.choice(VALUES)
        if dice.random() < 0.2:
            del contents[name]
    return contents


def is_sentence(error: BaseException) -> bool:
    return isinstance(error, UsageError) and "\n" not in str(error) and len(str(error)) < 1000


def survives(call, *args) -> bool:
    """Whether a call is accepted, or refused in a sentence, within ten seconds. Another error is raised again."""
    started = time.monotonic()
    try:
        call(*args)
    except UsageError as error:
        assert is_sentence(error), error  # noqa: PT017
        return False
    finally:
        assert time.monotonic() - started < 10
    return True


LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "attention_bias": False,
}
QWEN = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
SCALED = LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}


def fuzz_config(dice: random.Random) -> bool:
    return survives(config_from_huggingface, changed(dice.choice([LLAMA, QWEN, SCALED]), dice))


class Characters:
    """A tokenizer whose tokens are characters."""

    pad_token_id, bos_token_id, eos_token_id, chat_template = 0, None, 1, None

    def encode(self, text, add_special_tokens=True):
        return [2 + ord(character) % 100 for character in text]


def rows_task(file: Path) -> None:
    text_task(Characters(), (1,), read_rows(file), vocab_size=102, num_prompts=1, seed=0, reward=lambda e, c: [])


def fuzz_rows(dice: random.Random, folder: Path) -> bool:
    file = folder / dice.choice(["rows.jsonl", "rows.json"])
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]
    rows[2] = changed(rows[2], dice)
    text = json.dumps(rows) if file.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    text = mutated(text, dice) if dice.random() < 0.6 else text
    file.write_bytes(text.encode(errors="surrogatepass"))
    return survives(rows_task, file)


def fuzz_options(dice: random.Random, folder: Path) -> bool:
    """A --config file, which the command line refuses by SystemExit."""
    types = option_types(grpo.Config)
    contents = changed({"steps": 3, "learning_rate": 1e-3, "model": "m", "lora_targets": ["q_proj"]}, dice)
    contents |= {dice.choice(list(types)): dice.choice(VALUES)}
    text = json.dumps(contents)
    (folder / "options.json").write_bytes(
        (mutated(text, dice) if dice.random() < 0.3 else text).encode(errors="replace")
    )
    started, said = time.monotonic(), io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            given = ["--config", str(folder / "options.json"), "--run-dir", str(folder / "none")]
            config = flags.parse(grpo.Config, None, given)
    except SystemExit as error:
        assert error.code == 2, said.getvalue()  # noqa: PT017
        assert time.monotonic() - started < 10
        return False
    return survives(validate, config.train)


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.slow)])
def test_configurations_of_models_at_random(count):
    accepted = [fuzz_config(random.Random(seed)) for seed in range(count)]
    assert 0 < sum(accepted) < count


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.slow)])
def test_rows_at_random(tmp_path, count):
    accepted = [fuzz_rows(random.Random(seed), tmp_path) for seed in range(count)]
    assert 0 < sum(accepted) < count


@pytest.mark.parametrize("count", [60, pytest.param(2_000, marks=pytest.mark.slow)])
def test_files_of_options_at_random(tmp_path, count):
    accepted = [fuzz_options(random.Random(seed), tmp_path) for seed in range(count)]
    assert 0 < sum(accepted) < count


# ---- the report of a run whose files are broken


def make_run(folder: Path) -> None:
    folder.mkdir()
    lines = [{"phase": "grpo", "step": step, "reward": 0.5, "kl": 0.1} for step in (1, 2, 3)]
    group = {"prompt": "p", "completions": ["a", "b"], "rewards": [0.0, 1.0], "advantages": [-1.0, 1.0]}
    group |= {"lengths": [1, 1], "truncated": [False, True], "tokens": [["a"], ["b"]], "logprobs": [[-1.0], [-2.0]]}
    group |= {"components": {"x": [0.0, 1.0]}, "columns": {"answer": "b"}}
    for name, of in {
        "metrics.jsonl": lines,
        "times.jsonl": [line | {"rollout_s": 1.0} for line in lines],
        "rollouts.jsonl": [{"phase": "grpo", "step": 1, **group}],
        "warnings.jsonl": [{"message": "look"}],
    }.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in of))
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 3}, "method": "grpo"}))
    results = {"before": {"avg": 0.1, "avg_low": 0.0, "avg_high": 0.2}, "after": {"avg": 0.3}, "params_sha256": "x"}
    (folder / "results.json").write_text(json.dumps(results))


def fuzz_report(dice: random.Random, folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    make_run(folder)
    name = dice.choice(sorted(file.name for file in folder.iterdir()))
    text = (folder / name).read_text()
    if dice.random() < 0.7:
        lines = text.splitlines()
        lines[-1] = json.dumps(changed(json.loads(lines[-1]), dice))
        text = "".join(line + "\n" for line in lines)
    else:
        text = mutated(text, dice)
    (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    return survives(write_report, folder)


@pytest.mark.parametrize("count", [200, pytest.param(5_000, marks=pytest.mark.slow)])
def test_reports_of_broken_runs_at_random(tmp_path, count):
    accepted = [fuzz_report(random.Random(seed), tmp_path / "run") for seed in range(count)]
    assert 0 < sum(accepted) < count


# ---- the files of a run, where commands read them


def fuzz_run(dice: random.Random, folder: Path) -> bool:
    """One of its files is broken; everything that reads it is asked."""
    shutil.rmtree(folder, ignore_errors=True)
    make_run(folder)
    (folder / "checkpoints/grpo").mkdir(parents=True)
    options = {"steps": 3, "task": "rows.jsonl", "temperature": 0.5, "group_size": 4, "num_heldout": None, "data": ""}
    (folder / "config.json").write_text(json.dumps({"train": options, "method": "grpo", "devices": 1}))
    (folder / "inputs.json").write_text(json.dumps({"grpo": {"training rows": "abc"}}))
    lora = LoraDescription("base", "abc", "float32", 2, 4.0, ("q_proj",))
    (folder / "lora.json").write_text(json.dumps(lora._asdict()))
    file = folder / dice.choice(sorted(file.name for file in folder.iterdir() if file.suffix == ".json"))
    text = json.dumps(changed(json.loads(file.read_text()), dice))
    file.write_bytes((mutated(text, dice) if dice.random() < 0.3 else text).encode(errors="surrogatepass"))

    def read() -> None:
        LoraDescription.read(folder)
        evaluate.saved_options(str(folder))
        train.method_of(["--resume", "--run-dir", str(folder)])
        model_card(folder, phase="grpo", step=2, adapter=False)
        run = RunFolder(folder, json.loads((folder / "config.json").read_text()), console=Console(quiet=True))
        run.keep_inputs("grpo", {"training rows": "abc"})

    return survives(read)


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.slow)])
def test_files_of_runs_at_random(tmp_path, count):
    accepted = [fuzz_run(random.Random(seed), tmp_path / "run") for seed in range(count)]
    assert 0 < sum(accepted) < count


# ---- limits before work


ROWS = [{"prompt": f"Once there was a {animal}."} for animal in ("cat", "dog", "bird", "fish", "bear", "frog")]


@needs_model
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_a_prompt_of_a_million_characters_is_bounded_by_the_model_and_counted(tmp_path, overlong):
    rows = [*ROWS, {"prompt": "Once there was a cat. " * 50_000}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", MODEL, "--task", tmp_path / "rows.jsonl", "--reward", "length(maximum=3)", "--max-tokens", 12]
    given += ["--overlong", overlong, "--num-prompts", 2, "--run-dir", tmp_path / "run"]
    config = flags.parse(grpo.Config, None, [str(arg) for arg in given])
    with grpo.opened(config.model, config.task, config.train) as (_, task):
        assert task.prompts(0).ids.shape[1] <= 500  # 512 of the model, less 12
        said = " ".join(task.notes)
        assert ("1 longer than 500 tokens" if overlong == "drop" else "1 of 6 prompts lost their beginning") in said


@needs_model
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--max-tokens", 512], "max_tokens is 512, but the model was trained on texts of up to 512 tokens"),
        (["--group-size", 10**9], "a rollout has less than 2^31 tokens"),
        (["--reward-memory-mb", 0], "memory_mb is 0: it must be at least 1"),
        (["--save-every-minutes", "nan"], "save_every_minutes is nan"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_compiled(tmp_path, more, sentence):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = ["--model", MODEL, "--task", tmp_path / "rows.jsonl", "--reward", "length(maximum=3)", *more]
    config = flags.parse(grpo.Config, None, [str(arg) for arg in [*given, "--run-dir", tmp_path / "run"]])
    with pytest.raises(UsageError, match=re.escape(sentence)):
        grpo.main(config)
    assert not (tmp_path / "run").exists()
