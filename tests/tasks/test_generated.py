"""Tasks of generated rows, with a package in place of reasoning_gym, and with it where it is installed."""

import importlib.util
import json
import re
import signal
import sys
import tracemalloc
from importlib import import_module

import numpy as np
import pytest
from tiny import refused, save_tiny_model

from experiments.tasks import arithmetic
from experiments.tasks.characters import Characters
from grpo_jax import GRPOTrainer
from grpo_jax.data import generators
from grpo_jax.data.generators import generate, highest_level, parse_generators, read_answer
from grpo_jax.data.types import Completion
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import Pretrained, load_pretrained, load_tokenizer
from grpo_jax.rewards.builtin import generator_score
from grpo_jax.tasks.curriculum import add_step, empty_window
from grpo_jax.tasks.options import TaskOptions, check_task_options, open_task

HAS_PACKAGE = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="needs the package reasoning-gym")


@pytest.fixture
def pretrained(tmp_path):
    """A tokenizer of the characters of sums."""
    arithmetic.TEXT.save_tokenizer(tmp_path)
    shape = ModelConfig(arithmetic.TEXT.vocab_size, 8, 16, 1, 2, 1, 4)
    return Pretrained(shape, {}, load_tokenizer(tmp_path), (arithmetic.TEXT.eos_id,), tmp_path)


def opened(pretrained, generators="sums", *, seed=0, num_prompts=4, has_levels=False, **options):
    options = {"template": "{question}", "num_heldout": 20} | options
    options = TaskOptions(task=f"reasoning_gym:{generators}", **options)
    sizes = {"num_prompts": num_prompts, "group_size": 2, "seed": seed}
    return open_task(options, pretrained, **sizes, has_levels=has_levels)


def questions(prompts):
    return [example["question"] for example in prompts.examples]


# ---- rows


@pytest.mark.usefixtures("stand_in")
def test_rows_are_a_function_of_seed_and_step(pretrained):
    seen = []
    for seed in (0, 0, 1):
        with opened(pretrained, "sums?high=99", seed=seed) as task:
            seen.append([questions(task.prompts(step)) for step in (7, 3, 2_000_000)])
            held = questions(task.heldout)
    assert seen[0] == seen[1] != seen[2]
    assert len({question for step in seen[0] for question in step}) == 12
    with opened(pretrained, "sums?high=99", seed=1, num_prompts=2) as task:
        assert questions(task.heldout) == held  # the same for every seed and size of a step


@pytest.mark.usefixtures("stand_in")
def test_held_out_prompts_are_never_trained_on(pretrained):
    with opened(pretrained, "sums?high=4,listed?high=4") as task:  # 25 different prompts
        trained = {question for step in range(60) for question in questions(task.prompts(step))}
        held = questions(task.heldout)
    assert len(set(held)) == len(held) > 5
    assert len(trained) > 5
    assert not trained & set(held)
    assert len(trained | set(held)) == 25


@pytest.mark.usefixtures("stand_in")
def test_steps_take_no_memory(pretrained):
    with opened(pretrained, "sums?high=99", num_prompts=32) as task:
        task.prompts(0)
        tracemalloc.start()
        for step in range(1, 40):
            task.prompts(step * 31_250)  # up to row 39 million
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert kept < 200_000


@pytest.mark.usefixtures("stand_in")
def test_weights_decide_the_shares_of_generators(pretrained):
    with opened(pretrained, "3*sums?high=99,listed?low=10&high=99", num_prompts=50) as task:
        names = [example["generator"] for step in range(20) for example in task.prompts(step).examples]
    assert names.count("sums?high=99") / 1000 == pytest.approx(0.75, abs=0.05)


@pytest.mark.usefixtures("stand_in")
def test_entries_of_a_list_have_no_last_one():
    entries = [generate("listed?high=99", None, index)[1]["question"] for index in (0, 1, 70_000, 2**31 - 1)]
    assert entries == [generate("sums?high=99", None, index)[1]["question"] for index in (0, 1, 70_000, 2**31 - 1)]


REFUSED = [
    ("sum", {}, "no generator sum: is it sums?"),
    ("sums?high=-1", {}, "refuses its options: low must be below high"),
    ("sums?width=2", {}, "refuses its options: .*width"),
    ("0*sums", {}, "cannot be read"),
    ("sums,?", {}, "cannot be read"),
    ("9" * 400 + "*sums", {}, "cannot be read"),
    ("9" * 10_000, {}, "cannot be read"),
    ("codeio", {}, "some of them write files"),
    ("sums?seed=3&size=9", {}, "the run sets seed and size itself"),
    ("sums?high=2.5", {}, "fails: .*: set other options"),
    ("sums?low=0&high=1", {"num_prompts": 9}, "made . different prompts for a step"),
    ("sums", {"answer_in": "stop"}, "needs a text that ends the answer"),
    ("listed", {"has_levels": True}, "listed refuses its options: No curriculum"),
    ("sums", {"heldout": "rows.jsonl"}, "held-out prompts of their own"),
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("text", "options", "sentence"), REFUSED)
def test_generators_that_do_not_work_are_refused(pretrained, text, options, sentence):
    with refused(sentence), opened(pretrained, text, **options) as task:
        task.prompts(0)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["long", "advance"])
def test_an_entry_that_takes_too_long_is_refused(pretrained, monkeypatch, name):
    monkeypatch.setattr(generators, "_LONGEST", 0.2)
    with refused("an entry takes more than 0.2 seconds"), opened(pretrained, f"{name}?high=100000000"):
        pass
    before = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    assert before == ((0.0, 0.0), signal.SIG_DFL)


def test_an_answers_place_without_generators_is_refused():
    with refused("--answer-in is for generators"):
        check_task_options(TaskOptions(task="rows.jsonl", reward=("exact_answer",), answer_in="line"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with refused("needs the package reasoning-gym: pip install"):
        parse_generators("sums")


# ---- answers


ANSWERS = [
    ("tags", "<answer>1</answer> or <answer>\n 2 </answer>.", "2"),
    ("tags", "2", None),
    ("tags", "<answer> </answer>", None),
    ("line", "first\n 2 \n\n", "2"),
    ("line", " \n", None),
    ("text", " a\nb ", "a\nb"),
    ("stop", "", None),
]


@pytest.mark.parametrize(("place", "text", "answer"), ANSWERS)
def test_an_answer_is_read_where_the_prompt_says(place, text, answer):
    assert read_answer(text, place) == answer


@pytest.mark.usefixtures("stand_in")
def test_the_prompt_says_where_the_answer_goes(pretrained):
    tokenizer = pretrained.tokenizer
    tokenizer.unk_token = tokenizer.eos_token
    for place, words in {"tags": "<answer> and </answer>", "line": "last line", "text": "nothing else"}.items():
        with opened(pretrained, template=None, answer_in=place) as task:
            example = task.prompts(0).examples[0]
            assert words in example["answer_format"]
            assert example["prompt"] == f"Question: {example['question']}\n{example['answer_format']}\nAnswer:"
            assert read_answer(example["solution"], place) == str(sum(map(int, re.findall(r"\d+", example["prompt"]))))


@pytest.mark.usefixtures("stand_in")
def test_the_generators_score_is_the_reward_in_processes(pretrained):
    with opened(pretrained) as task:
        example, wrong = task.prompts(0).examples[0], "<answer>99</answer>"
        texts = [example["solution"], wrong, "99", "<answer>words</answer>"]
        (component,) = task.reward.values()
        assert component.reward([example] * 4, [Completion(text) for text in texts]) == [1, 0.1, 0, 0]
        assert [task.answer(example, Completion(text)) for text in (wrong, "99")] == ["99", None]
        other = example | {"question": "1+1=?"}
        assert component.reward([other], [Completion(wrong)]) == [None]
        assert "set PYTHONHASHSEED=0" in component.reward.messages["raised"]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_the_trainer_takes_generators_as_the_command_does(tmp_path):
    folder = save_tiny_model(tmp_path / "model", Characters("".join(map(chr, range(32, 127))) + "\n"))
    options = {"num_prompts": 4, "group_size": 2, "steps": 1, "max_tokens": 2, "run_dir": tmp_path / "run"}
    trainer = GRPOTrainer(folder, generator_score(), **options)
    trainer.train("reasoning_gym:sums")
    with opened(load_pretrained(folder), template=None) as task:
        prompts = {example["prompt"] for example in task.prompts(0).examples}
    assert {line["prompt"] for line in trainer.run.lines("rollouts.jsonl")} <= prompts


# ---- levels


@pytest.mark.usefixtures("stand_in")
def test_levels_rise_and_options_stay(pretrained):
    assert highest_level("sums") == 1  # the third is refused
    with opened(pretrained, "sums?low=20", num_prompts=8, num_heldout=3, has_levels=True) as task:
        window, highest = empty_window(8, 4), []
        for step, reward in enumerate([0.5, 1, 1, 1]):
            prompts, numbers_drawn, metrics = task.curriculum(window, step, 0.75)
            highest.append({example["level"] for example in prompts.examples})
            assert metrics["curriculum_level_1_sums"] == max(highest[-1])
            numbers = [int(x) for example in prompts.examples for x in example["question"][:-1].split("+")]
            assert min(numbers) >= 20
            assert max(numbers) <= (30, 60)[max(highest[-1])]
            window = add_step(window, numbers_drawn, np.full((8, 4), reward))
        assert {example["level"] for example in task.heldout.examples} == {None}
    assert highest == [{0}, {0}, {1}, {1}]


# ---- the package itself

UNSOUND = {
    "boxnet": "has no answer of its own",
    "composite": "mixes others, which it needs",
    "game_of_life_halting": "gives any answer the score 1",
    "rush_hour": "has no answer of its own",
}
OWN_ANSWERS = {  # of entries whose answer is None
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
NAMES = sorted(import_module("reasoning_gym.factory").DATASETS) if HAS_PACKAGE else ["chain_sum"]


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNSOUND])
def test_a_generator_scores_its_own_answer_highest(name):
    indices = [int(x) for x in np.random.default_rng(0).integers(0, 2**31, 3)]
    entries = [generate(name, None, index)[1] for index in indices]
    own = [OWN_ANSWERS[name](x["metadata"]) if x["answer"] is None else str(x["answer"]) for x in entries]
    columns = {"generator": name, "level": None, "answer_in": "text"}
    rows = [{"question": x["question"], "index": i, **columns} for x, i in zip(entries, indices, strict=True)]

    def scores(texts):
        return np.array(generator_score()(rows, [Completion(text) for text in texts]))

    assert (scores(own) == 1).all()
    assert (np.minimum(scores(["a wrong answer"] * 3), scores([*own[1:], own[0]])) < 1).all()


@pytest.mark.slow
@needs_package
def test_the_sound_generators_are_at_least_a_hundred():
    assert set(NAMES) > UNSOUND.keys()
    assert len(NAMES) - len(UNSOUND) >= 100
