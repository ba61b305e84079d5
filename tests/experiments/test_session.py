"""Checks which measurements run in the time that an accelerator is at hand."""

import json

import jax
import pytest

from experiments import real
from experiments.benchmarks import session, settings
from experiments.benchmarks.session import Config, Step
from grpo_jax.commands.flags import read_flags

GOOD = """
import sys; from pathlib import Path; from experiments import timing
out = Path(sys.argv[-1])
out.mkdir(exist_ok=True)
timing.run_timed("counts", out, [sys.executable, "-c", "print('measured'); sum(range(10**6))"])
"""


def test_steps_run_while_time_is_left(tmp_path, monkeypatch):
    steps = [
        Step("good", 0.001, ("-c", GOOD)),
        Step("too long", 2, ("-c", "print('never')")),
        Step("bad", 0.001, ("-c", "raise SystemExit('no accelerator')")),
        Step("slow", 0.001, ("-c", "import time; time.sleep(60)")),
    ]
    monkeypatch.setattr(session, "steps_of", lambda config: steps)
    session.run(steps[0], 9, tmp_path / "good")  # an earlier session, whose commands are not of this one
    session.main(Config(minutes=0.05, out=tmp_path))
    rows = json.loads((tmp_path / "steps.json").read_text())
    assert [row.get("step", row.get("command")) for row in rows] == ["good", "counts", "too long", "bad", "slow"]
    assert rows[0]["cpu_seconds"] >= rows[1]["cpu_seconds"] > 0
    assert rows[0]["seconds"] >= rows[1]["seconds"]
    results = {row["step"]: row["result"] for row in rows if "step" in row}
    assert (results["good"], results["too long"]) == ("ended", "left out")
    assert results["bad"].startswith("failed: see")
    assert results["slow"].startswith("killed: see")
    assert "cpu_seconds" not in rows[-1]  # what it started was not waited for
    assert (tmp_path / "good.log").read_text() == "measured\n"
    assert "no accelerator" in (tmp_path / "bad.log").read_text()


def test_gsm8k_needs_a_model():
    names = [step.name for step in session.steps_of(Config())]
    assert names == ["settings", "accelerator qwen2.5-0.5b", "accelerator qwen3-0.6b", "accelerator qwen2.5-1.5b"]
    gsm8k = list(session.steps_of(Config(model="DIR", data="FOLDER")))[2]
    assert gsm8k.name == "gsm8k"
    assert gsm8k.args[4:8] == ("--model", "DIR", "--data", "FOLDER")


def test_a_rehearsal_runs_the_same_commands_in_small():
    steps = list(session.steps_of(Config(model="DIR", data="FOLDER", rehearse=True)))
    modules = ["settings", "accelerator"]
    assert [step.args[1] for step in steps] == [*(f"experiments.benchmarks.{x}" for x in modules), "experiments.real"]
    assert steps[0].args[2] == "--rehearse"
    assert steps[1].args[2] == "tiny"
    assert read_flags(real.Config, args=steps[2].args[2:]).small


def test_settings_are_written_although_one_fails(tmp_path, monkeypatch):
    lines = settings.Line("one", options={"xla_gpu_autotune_level": "0"}), settings.Line("two", options={"xla_no": 1})
    monkeypatch.setattr(settings, "LINES", lines)
    settings.main(settings.Config(rehearse=True, out=tmp_path))
    one, two = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert one["ms_of_step"] == pytest.approx(1000 * one["s"] / 8)
    assert "No such compile option: 'xla_no'" in two["error"]


@pytest.mark.parametrize("line", settings.LINES)
def test_this_jax_accepts_the_options_of_settings(line):
    jax.jit(lambda x: x, compiler_options=dict(line.options))(1.0)
