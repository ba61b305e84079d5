"""Trains every method for a step on rows of each format of TRL's data sets, or checks that it refuses them."""

import re

import numpy as np
import pytest
from command_helpers import LOW, OF_PAIRS, refusal
from row_formats import FORMATS, KINDS, columns
from tiny import read_lines, save_tiny_model, slow_unless, write_rows

from experiments.tasks.characters import Characters
from grpo_jax.commands import train

# The names of tools, and then turns, of which the assistant's begin with "=" and end with EOS.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}="
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{{ m.content or '' }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
SAMPLED = ("--reward", "rewards.py:low", "--num-prompts", 4, "--group-size", 2, "--max-tokens", 2)
TEACHER = ("--teacher", "model", "--distillation", "forward_kl")
OPTIONS = {
    "grpo": SAMPLED,
    "grpo with a teacher": (*SAMPLED, *TEACHER),
    "ppo": SAMPLED,
    "sft": ("--num-rows", 2),
    "sft with a teacher": ("--num-rows", 2, *TEACHER),
    "dpo": ("--num-pairs", 4, "--heldout-share", 0.3),
    "reward-model": ("--num-pairs", 4, "--heldout-share", 0.3),
    "kto": ("--num-completions", 4, "--heldout-share", 0.3),
}
OF_PROMPTS, OF_COMPLETIONS = [*OPTIONS][:3], [*OPTIONS][3:5]
TAKES = {
    "language modelling": OF_COMPLETIONS,
    "prompt-only": OF_PROMPTS,
    "prompt-completion": [*OF_PROMPTS, *OF_COMPLETIONS],
    "preference": [*OF_PROMPTS, *OF_PAIRS],
    "preference without prompt": OF_PAIRS,
    "unpaired preference": [*OF_PROMPTS, *OF_COMPLETIONS, "kto"],
}
CELLS = [(form, kind, method) for form in FORMATS for kind in KINDS for method in OPTIONS]
TAKEN = [cell for cell in CELLS if cell[2] in TAKES[cell[0]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, a reward and rows of each format, 24 of a kind."""
    folder = tmp_path_factory.mktemp("formats")
    save_tiny_model(folder / "model", Characters("0123456789+= "))
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    (folder / "rewards.py").write_text(LOW)
    for form in FORMATS:
        for kind in KINDS:
            texts = [(f"{i:02} + 1 = ", str(i + 1), str(i + 2)) for i in range(24)]
            rows = [columns(form, kind, row, i % 2 == 0) for i, row in enumerate(texts)]
            write_rows(folder / f"{form}, {kind}.jsonl", rows)
    return folder


def arguments(form, kind, method, out):
    file = ("--task", f"{form}, {kind}.jsonl")
    step = ("--steps", 1, "--eval-every", 0, "--run-dir", out, "--no-compilation-cache")
    words = ("--method", method.split()[0], "--model", "model", *file, *OPTIONS[method], *step)
    return [str(word) for word in words]


QUICK = [("prompt-only", "episodes", "grpo"), ("language modelling", "episodes", "sft")]
ADVICE = {
    "grpo": "has no column prompt: its columns are .*; put the prompt there, or set prompt_column or template",
    "ppo": "has no column prompt: its columns are .*; put the prompt there, or set prompt_column or template",
    "sft": "has no column completion: its columns are .*; set --completion-column",
    "dpo": "has no column chosen: its columns are .*; give rows with chosen and rejected",
    "reward-model": "has no column chosen: its columns are .*; give rows with chosen and rejected",
    "kto": "has no column (chosen: its columns are .*; give rows with chosen and rejected|label: say there, by true)",
}


@pytest.mark.parametrize(("form", "kind", "method"), slow_unless(QUICK, TAKEN))
def test_each_format_is_trained_on(made, tmp_path, monkeypatch, capsys, form, kind, method):
    monkeypatch.chdir(made)
    train.command(arguments(form, kind, method, tmp_path / "run"))
    last = read_lines(tmp_path / "run/metrics.jsonl")[-1]
    assert last["step"] == 1
    assert np.isfinite(last["loss"])
    assert "dropped" not in capsys.readouterr().out


OTHERS = [cell for cell in CELLS if cell not in TAKEN]
QUICKLY_REFUSED = [cell for cell in OTHERS if cell[1] == "messages" and cell[2] in ("grpo", "sft", "dpo", "kto")]


@pytest.mark.parametrize(("form", "kind", "method"), slow_unless(QUICKLY_REFUSED, OTHERS))
def test_other_formats_are_refused_with_advice(made, tmp_path, monkeypatch, capsys, form, kind, method):
    monkeypatch.chdir(made)
    sentence = refusal(capsys, "train", *arguments(form, kind, method, tmp_path / "run"))
    assert re.search(ADVICE[method.split()[0]], sentence)
    assert not (tmp_path / "run").exists()
