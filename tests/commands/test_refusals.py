"""Bad input of every kind is one sentence: no traceback, no hang, and nothing accepted that makes no sense."""

import json
import math
from pathlib import Path

import pytest

from grpo_jax.checks import validate_ppo
from grpo_jax.commands import evaluate, grpo, train
from grpo_jax.config import PPOConfig, with_options
from grpo_jax.errors import UsageError
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.options import option_types
from grpo_jax.runs import flags

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


def test_an_evaluation_of_no_folder_is_refused():
    with pytest.raises(UsageError, match="there is no folder runs/trian: name that of a run"):
        evaluate.main(evaluate.parse(["runs/trian"]))


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_an_evaluation_with_an_impossible_seed_is_refused(seed):
    options = evaluate.parse(["somewhere", "--task", "gsm8k", "--seed", seed])
    with pytest.raises(UsageError, match=f"seed is {seed}: it must be between 0 and"):
        evaluate.main(options)


# ---- limits before work


ROWS = [{"prompt": f"Once there was a {animal}."} for animal in ("cat", "dog", "bird", "fish", "bear", "frog")]


@needs_model
@pytest.mark.parametrize("overlong", ["drop", pytest.param("truncate", marks=pytest.mark.slow)])
def test_a_prompt_of_a_million_characters_is_bounded_by_the_model_and_counted(tmp_path, overlong):
    rows = [*ROWS, {"prompt": "Once there was a cat. " * 50_000}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model", MODEL, "--task", tmp_path / "rows.jsonl", "--reward", "length(maximum=3)", "--max-tokens", 12]
    given += ["--overlong", overlong, "--num-prompts", 2, "--run-dir", tmp_path / "run"]
    config = flags.parse(grpo.Config, None, [str(arg) for arg in given])
    with grpo.task_of(config, load_pretrained(MODEL)) as task:
        assert task.prompts(0).ids.shape[1] <= 500  # 512 of the model, less 12
        said = " ".join(task.notes)
        assert ("1 longer than 500 tokens" if overlong == "drop" else "1 of 6 prompts lost their beginning") in said


@needs_model
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--max-tokens", 512], "max_tokens is 512, but the model was trained on texts of up to 512 tokens"),
        (["--group-size", 10**9], "a rollout has less than 2^31 tokens"),
        (["--lora-rank", 10**30], f"lora_rank is {10**30}: it must be at most 64, the width of the model"),
        (["--reward-memory-mb", 0], "memory_mb is 0: it must be at least 1"),
        (["--weight-decay", "nan"], "weight_decay is nan: it must be at least 0"),
        (["--stop-code", 256], "stop_code is 256: it must be between 0 and 255"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_compiled(tmp_path, capsys, more, sentence):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = ["--model", MODEL, "--task", tmp_path / "rows.jsonl", "--reward", "length(maximum=3)", *more]
    with pytest.raises(SystemExit) as ended:
        train.command([str(arg) for arg in [*given, "--run-dir", tmp_path / "run", "--no-compilation-cache"]])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert sentence in said
    assert not (tmp_path / "run").exists()


def test_a_sentence_is_one_line_whatever_it_quotes():
    error = UsageError("there is no column a\n\nb\u2028c" + "d" * 5000 + ": name another")
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 1000
    assert str(error).startswith("there is no column a  b c")
    assert str(error).endswith("d: name another")
