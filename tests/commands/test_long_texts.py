"""Every method trains Phi on texts longer than the original context of its longrope: a program that forgets to choose
the factors would be refused."""

import shutil

import pytest
from command_helpers import OF_PAIRS, evaluation, run
from tiny import GOLDEN, write_rows

from experiments.tasks.characters import Characters

SMALL = ("--eval-every", 0, "--checkpoint-every", 0, "--steps", 1)
GROUPS = (*SMALL, "--num-prompts", 2, "--group-size", 2, "--max-tokens", 14, "--num-heldout", 2, "--eval-samples", 1)
GROUPS += ("--reward", "exact_answer(column='completion')")
METHODS = {
    "grpo": GROUPS,
    "ppo": GROUPS,
    "sft": (*SMALL, "--num-rows", 4, "--num-heldout", 2),
    "dpo": (*SMALL, "--num-pairs", 4),
    "kto": (*SMALL, "--num-completions", 4),
    "reward-model": (*SMALL, "--num-pairs", 4),
}
TEACHERS = {
    "grpo": ("--distillation", "k1"),
    "sft": ("--distillation", "forward_kl"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi")
    for name in ("model", "teacher"):
        shutil.copytree(GOLDEN / "phi4_mini", folder / name)
        Characters("0123456789+= abcdefg").save_tokenizer(folder / name)
    sums = [(f"{i}+{j}=", str(i + j)) for i in range(6) for j in range(6)]
    rows = [
        {"prompt": prompt, "completion": total + "abcdefgabcdefg", "chosen": total + "abcdefgabcdefg", "rejected": "a"}
        for prompt, total in sums
    ]
    write_rows(folder / "rows.jsonl", rows)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_chooses_the_long_factors(folder, tmp_path, capsys, method):
    run(folder, tmp_path / "run", method, *METHODS[method])
    assert "use the long factors of longrope" in " ".join(capsys.readouterr().out.split())
    if method not in OF_PAIRS:
        numbers = ("--task", folder / "rows.jsonl", "--samples", 1, "--max-tokens", 14)
        evaluation(tmp_path / "run", tmp_path / "out", *numbers, "--reward", "exact_answer(column='completion')")
        assert "use the long factors of longrope" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("method", TEACHERS)
def test_a_teacher_has_the_long_factors_too(folder, tmp_path, method):
    run(folder, tmp_path / "run", method, *METHODS[method], "--teacher", folder / "teacher", *TEACHERS[method])
