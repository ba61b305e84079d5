"""Checks online preference learning with tiny models: judges, pairs, rounds, and runs that are cut off."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny import random_params, refused, tiny_config

from experiments.tasks import letters, rounds
from experiments.tasks.rounds import OnlineConfig, ask_judge, bradley_terry_judge, train_online
from grpo_jax.config import recipe
from grpo_jax.data.preferences import Preference, read_preferences
from grpo_jax.data.types import Component
from grpo_jax.models.decoder.heads import add_head
from grpo_jax.models.huggingface import load_tokenizer
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rewards.learned import RewardModel
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.sampling.sampler import Completions

MODEL = tiny_config(letters.TEXT.vocab_size)
POLICY = decoder_policy(MODEL)
PARAMS = random_params(MODEL)
CONFIG = recipe(steps=4, num_prompts=4, group_size=4, max_tokens=6, learning_rate=1e-2, kl_coef=0.0, checkpoint_every=1)
ONLINE = OnlineConfig((8, 16), replay_share=0.5, epochs=2, num_pairs=8, learning_rate=1e-2, warmup_steps=1)
TASK = letters.letters_task({}, num_prompts=4, seed=0)
PROGRAMS = make_programs(POLICY, TASK, CONFIG)


def lengths(rows, words):
    return [float(len(word)) for word in words]


# ---- judges


def test_judgements_become_preferences_and_a_file(tmp_path):
    rows = [{"prompt": prompt, "letters": "abc"} for prompt in ("a:", "b:", "c:")]
    asked = []

    def judge(rows, firsts, seconds):
        asked.append([row["prompt"] for row in rows])
        return [True, None, np.False_]

    actual = ask_judge(rows, ["x", "x", "x"], ["y", "y", "y"], judge)
    assert actual == [Preference("a:", "x", "y"), Preference("c:", "y", "x")]
    assert asked == [["a:", "b:", "c:"]]
    rounds.write_preferences(tmp_path / "new/pairs.jsonl", actual)
    assert read_preferences(tmp_path / "new/pairs.jsonl") == (actual, {})


@pytest.mark.parametrize("answer", [[True], [0.7, 0.2], ["a", "b"]])
def test_a_judge_who_says_anything_else_is_refused(answer):
    with refused("True, False or None for each of 2 pairs"):
        ask_judge([{"prompt": "a"}] * 2, ["x", "y"], ["z", "z"], lambda *pairs: answer)


def test_judge_errs_as_often_as_bradley_terry_predicts():
    rows = [{"prompt": str(i)} for i in range(3000)]
    judge = bradley_terry_judge(lengths, seed=0)
    for difference, probability in ((0, 0.5), (1, 0.7311), (3, 0.9526)):
        first, second = ["a" * (difference + 1)] * 3000, ["b"] * 3000
        forth, back = judge(rows, first, second), judge(rows, second, first)
        for share in (np.mean(forth), 1 - np.mean(back)):
            assert share == pytest.approx(probability, abs=4 * np.sqrt(probability * (1 - probability) / 3000))
    # Of a pair it says the same whatever else it is asked with, and another seed says something else.
    assert judge(rows[7:8], first[7:8], second[7:8]) == forth[7:8]
    assert bradley_terry_judge(lengths, seed=1)(rows, first, second) != forth


# ---- pairs


def test_sampled_pairs_share_a_prompt_and_differ():
    rows, firsts, seconds = pairs = rounds.sample_pairs(PROGRAMS, PARAMS, TASK, CONFIG, 11, first=5)
    assert len(rows) == len(firsts) == len(seconds) == 11
    assert all(first and second and first != second for first, second in zip(firsts, seconds, strict=True))
    prompts = [row["prompt"] for index in (5, 6, 7) for row in TASK.prompts(index).examples]
    assert sorted(rows, key=lambda row: prompts.index(row["prompt"])) == rows  # in their order, two at most of each
    assert max(map(rows.count, rows)) == 2
    assert rounds.sample_pairs(PROGRAMS, PARAMS, TASK, CONFIG, 11, first=5) == pairs
    assert rounds.sample_pairs(PROGRAMS, PARAMS, TASK, CONFIG, 11, first=6)[1] != firsts


def test_constant_policies_give_no_pairs():
    always_a = np.zeros((4, 4, 6), np.int32)
    mask = np.ones_like(always_a, bool)
    completions = Completions(always_a, mask, np.zeros((4, 4, 6)), None, np.ones((4, 4), bool))
    sampler = SimpleNamespace(complete=lambda *args: completions)
    programs = PROGRAMS._replace(sampler=sampler)
    with refused("of 8 pairs .* only 0"):
        rounds.sample_pairs(programs, PARAMS, TASK, CONFIG, 8, first=0)


def test_replay_draws_a_share_of_old_pairs_once():
    old = [Preference(str(i), "a", "b") for i in range(30)]
    again = rounds.draw_replay(old, 0.1, seed=0)
    assert len(again) == len({pair.prompt for pair in again}) == 3
    assert all(pair in old for pair in again)
    assert rounds.draw_replay(old, 0.0, seed=0) == rounds.draw_replay([], 0.1, seed=0) == []
    assert sorted(rounds.draw_replay(old, 1.0, seed=0)) == sorted(old)


# ---- the loop


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    letters.TEXT.save_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return RewardModel(*add_head(MODEL, PARAMS), tokenizer, (letters.TEXT.eos_id,), folder)


def online(model, path, *, stop=None, online=ONLINE, config=CONFIG, task=TASK, judge=None):
    """Trains with a judge who likes long words; `stop` is the call of the watched reward that is cut off."""
    calls = []

    def watched(rows, words):
        calls.append(len(words))
        if len(calls) == stop:
            raise KeyboardInterrupt
        return lengths(rows, words)

    run = RunFolder(path, {})
    task = task._replace(reward={"length": Component(watched, 0.0)}) if task.reward == {} else task
    judge = judge or bradley_terry_judge(lengths, seed=0)
    return *train_online(POLICY, PARAMS, model, task, judge, config, online, run, programs=PROGRAMS), run


class Abstaining:
    """Prefers neither completion of the first `count` pairs that it is asked about in each round."""

    def __init__(self, count):
        self.count, self.asked = count, []

    def __call__(self, rows, firsts, seconds):
        self.asked.append(len(rows))
        answers = bradley_terry_judge(lengths, seed=0)(rows, firsts, seconds)
        return [None] * self.count + answers[self.count :]


def preferences_of(path):
    return [read_preferences(file)[0] for file in sorted((path / "preferences").iterdir())]


def test_undecided_judges_end_runs_and_are_asked_again(untrained, tmp_path):
    options = {"online": ONLINE._replace(labels=(8,))}
    with refused("online_reward_0: the judge preferred neither"):
        online(untrained, tmp_path, judge=Abstaining(8), **options)
    with pytest.raises(KeyboardInterrupt):
        online(untrained, tmp_path, judge=Abstaining(1), stop=1, **options)
    assert [len(pairs) for pairs in preferences_of(tmp_path)] == [7]


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 7])
def test_interrupted_rounds_resume_identically_without_asking_twice(untrained, tmp_path, count):
    state, model, run = online(untrained, tmp_path / "whole", judge=Abstaining(count))
    steps = [(line["phase"], line["step"]) for line in run.lines() if line["phase"] == "online"]
    assert steps == [("online", step) for step in (1, 2, 3, 4)]
    line = run.lines()[-1]
    assert line["reward"] == line["reward_reward_model"] != line["reward_length"]
    first, second = preferences_of(run.path)
    assert (len(first), len(second)) == (8 - count, 16 - count)
    assert first[0] not in second

    judge = Abstaining(count)
    with pytest.raises(KeyboardInterrupt):
        online(untrained, tmp_path / "cut", stop=4, judge=judge)  # in the second round
    resumed, again, rerun = online(untrained, tmp_path / "cut", judge=judge)
    assert judge.asked == [8, 16]
    assert params_sha256(resumed.params) == params_sha256(state.params)
    assert params_sha256(again.params) == params_sha256(model.params)
    assert rerun.lines() == run.lines()
    assert params_sha256(model.params) != params_sha256(untrained.params)


BAD_ROUNDS = [
    ({"online": ONLINE._replace(labels=())}, "labels is"),
    ({"online": ONLINE._replace(labels=(8, 7))}, "each round needs at least the 8 pairs"),
    ({"online": ONLINE._replace(replay_share=1.5)}, "replay_share is 1.5"),
    ({"online": ONLINE._replace(labels=(8,) * 5)}, "steps is 4, but there are 5 rounds"),
    ({"task": TASK._replace(reward=lengths)}, "must be a dict"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ROUNDS)
def test_impossible_rounds_are_refused_before_sampling(untrained, tmp_path, changes, message):
    with refused(message):
        online(untrained, tmp_path, **changes)
    assert not (tmp_path / "preferences").exists()
