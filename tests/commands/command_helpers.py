"""A tiny model with rows that serve every method, and commands that run in this process."""

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny import GOLDEN, read_lines, write_rows

from experiments.new_models import save_new_model
from experiments.tasks import arithmetic
from grpo_jax import commands, hosts
from grpo_jax.commands import evaluate, train
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy

CONFIG = ModelConfig(arithmetic.TEXT.vocab_size, 16, 32, 1, 2, 1, 8, max_position_embeddings=64)
LOW = "def low(rows, texts): return [sum(map(text.count, '01234')) for text in texts]\n"
GAME = '''
import json
import time
from urllib.request import Request, urlopen
from grpo_jax.data.episodes import Reply

def make():
    def reply(example, transcript, key):
        if key[3] == 5: time.sleep(1000)
        return Reply(f"={example['digit']}=", reward=sum(map(transcript[-1].action.count, "01234")) / 8)
    return reply

def talk(example, url):
    messages = [{"role": "user", "content": example["prompt"]}]
    for _ in range(3):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        with urlopen(Request(f"{url}/chat/completions", body)) as answer:
            choice = json.load(answer)["choices"][0]
        messages += [choice["message"], {"role": "user", "content": f"={example['digit']}="}]
        if choice["finish_reason"] == "length": break
    return sum(map(choice["message"]["content"].count, "01234"))

class Game:
    def reset(self, **row):
        self.digit = row["digit"]
        return "0"

    def get_reward(self):
        return int(self.digit)

    def add(self, a: int) -> int:
        """Adds.

        Args:
          a: a number.
        """
        return a + 1

add = Game().add
'''
OF_PAIRS = ("reward-model", "dpo", "kto")


def write_inputs(folder: Path) -> Path:
    """Writes model/ and teacher/, rows.jsonl with columns for every method, rewards.py, and game.py: environments."""
    for name, config in (("model", CONFIG), ("teacher", replace(CONFIG, initializer_range=0.3))):
        save_new_model(folder / name, jax.jit(decoder_policy(config).init)(jax.random.key(3)), config)
        arithmetic.TEXT.save_tokenizer(folder / name)
    shutil.copytree(GOLDEN / "granite", folder / "granite")
    arithmetic.TEXT.save_tokenizer(folder / "granite")
    rows = [
        {"prompt": f"{i}+{j}=", "completion": str(i + j), "chosen": str(i + j), "rejected": str(i + j + 1)}
        for i in range(8)
        for j in range(8)
    ]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "numbers.jsonl", [{"prompt": "1+1=", "completion": text} for text in ("2", 2)])
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    write_rows(folder / "talks.jsonl", [{"messages": messages}] * 9)
    write_rows(folder / "texts.jsonl", [{"text": f"{i}+{i}={2 * i}"} for i in range(9)])
    (folder / "rewards.py").write_text(LOW)
    (folder / "rates.py").write_text("import optax\n\nready = optax.adam(1e-3)\n")
    (folder / "numbers.json").write_text('{"run_dir": 3}')
    (folder / "game.py").write_text(GAME)
    return folder


def run(folder: Path, out: Path, method: str, *args: Any) -> tuple[list[dict], dict]:
    """Trains by a method on the rows of a folder, or resumes without one. Returns lines of metrics and the results."""
    named = ["--method", method, "--model", folder / "model", "--task", folder / "rows.jsonl"] if method else []
    train.command([str(arg) for arg in [*named, "--run-dir", out, "--no-compilation-cache", *args]])
    return read_lines(out / "metrics.jsonl"), json.loads((out / "results.json").read_text())


def evaluation(run_dir: Path, out: Path, *args: Any) -> dict:
    """Evaluates a run, and returns the numbers."""
    evaluate.main(evaluate.parse([str(arg) for arg in (run_dir, *args, "--out", out)]))
    return json.loads((out / "numbers.json").read_text())


def with_template(folder: Path, path: Path, template: str, name: str = "model") -> Path:
    """Returns a copy of the model that has a chat template."""
    shutil.copytree(folder / name, path)
    (path / "chat_template.jinja").write_text(template)
    return path


@contextmanager
def without_override() -> Iterator[None]:
    """A block in which permissions of files hold also for root: in this thread, and in those that it starts."""
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if os.geteuid() or libc.capget(header, sets):
        yield
        return
    before = sets[0]
    sets[0] = before & ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of the effective ones
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0


def exit_status(call: Callable[[], None]) -> int:
    """Returns the status with which a call would end its process, in which permissions of files hold."""
    with pytest.MonkeyPatch.context() as patch, without_override():
        patch.setattr(sys, "argv", ["grpo-jax"])
        patch.setattr(hosts, "leave", lambda reason, code: sys.exit(code))  # it would end the tests
        try:
            call()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def refusal(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    """Runs a command of the program that must end with status 2 and one sentence, which it returns."""
    capsys.readouterr()
    status = exit_status(lambda: commands.main([str(arg) for arg in args]))
    return read_refusal(capsys, status)


def read_refusal(capsys: pytest.CaptureFixture[str], status: int) -> str:
    """Returns what a command wrote, which must be one sentence of an error, and its status 2."""
    lines = capsys.readouterr().err.splitlines(keepends=True)
    sentence = "".join(line for line in lines if not line.startswith("note: "))
    assert status == 2, sentence
    assert sentence.startswith("error: ")
    assert sentence.count("\n") == 1
    return sentence
