"""Checks built-in rewards of answers, formats and lengths."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import refused

from grpo_jax.data.types import Completion, Turn
from grpo_jax.functional import overlong_penalty
from grpo_jax.rewards import builtin
from grpo_jax.rewards.answers import last_number
from grpo_jax.rewards.processes import Grader

BUILTIN = "grpo_jax.rewards.builtin"
has_math_verify = pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="needs math-verify")


def texts(*words):
    return [Completion(word) for word in words]


# ---- answers


def test_exact_answer():
    examples = [{"goal": "1,000"}, {"goal": "Paris"}, {"goal": "Paris"}, {"goal": 7}]
    reward = builtin.exact_answer("goal")
    assert reward(examples, texts("1000.0 ", "\nParis", "paris", "7.0")) == [1.0, 1.0, 0.0, 1.0]
    assert reward(examples, texts("", "", "It is Paris", "It is 7")) == [0.0, 0.0, 0.0, 0.0]
    last = builtin.exact_answer("goal", extract=last_number)
    assert last(examples[-1:] * 2, texts("It is 7.", "None")) == [1.0, 0.0]
    assert last([{"goal": 1000}], texts("It is 1e3.")) == [1.0]
    with refused("compares with the column 'goal', which an example does not have, or without a value"):
        reward([{"goal": None}], texts("None"))


# ---- what can take for ever


@has_math_verify
def test_math_verify_compares_formulas_within_a_deadline():
    pairs = [
        ("x+1", "1+x", 1.0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        (r"\frac{2}{4}", "0.5", 1.0),
        ("x+1", "x-1", 0.0),
        ("not a formula", "7", 0.0),
        (r"__import__('os')._exit(3)", "7", 0.0),
        (r"9^{9^{9^{9}}}", "7", None),
        (r"\{2, 1\}", r"\{1, 2\}", 1.0),
        ("1/2^{55}", "1/2^{56}", 0.0),
        (r"\frac{\sqrt{3}}{2^{55}}", r"\sqrt{3} \cdot 2^{-56}", 0.0),
        (r"\frac{\sqrt{3}}{2^{55}}", r"\sqrt{3} \cdot 2^{-55}", 1.0),
        (r"\sqrt{2} - \sqrt{2}", "0", 1.0),
    ]
    arguments = {"lenient": False}
    with Grader(f"{BUILTIN}:math_answer", arguments=arguments, chunk=1, workers=1, deadline=2.0) as grader:
        boxes = texts(*(rf"\boxed{{{stated}}}" for stated, _, _ in pairs))
        assert grader([{"answer": expected} for _, expected, _ in pairs], boxes) == [reward for _, _, reward in pairs]
        assert {reason: count for reason, count in grader.counts.items() if count} == {"timeout": 1}
    with refused("name it to a Grader"):
        builtin.math_answer()


def test_missing_math_verify_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused(r"grpo_jax\[math\]"):
        builtin.math_answer(sympy=True)
    assert builtin.math_answer()([{"answer": "1/2"}], texts(r"\boxed{\frac12}")) == [1.0]


def test_a_catastrophic_pattern_ends_in_a_process():
    arguments = {"pattern": "(a+)+b"}
    with Grader(f"{BUILTIN}:matches", arguments=arguments, chunk=1, workers=1, deadline=0.5) as grader:
        assert grader([{}] * 3, texts("aab", "a" * 64, "c")) == [1.0, None, 0.0]
        assert grader.counts["timeout"] == 1


# ---- formats and lengths


OPENED = ["<|assistant|><think>\n", "<|im_start|>assistant\n<think>", "[THINK]", "<think>\n\n</think>\n\n"]


@pytest.mark.parametrize("prompt", OPENED)
def test_matches_counts_the_tag_that_a_template_opened(prompt):
    reward = builtin.matches(r"(<think>|\[THINK\]).*</think>.*")
    examples = [{"prompt": f"so <think> {prompt}"}] * 3
    assert reward(examples, texts("1</think>2", "1", "<think>1</think>")) == [1, float("</" in prompt), 1]
    assert reward([{"prompt": "<think> so"}], texts("1</think>2")) == [0]
    turns = [Turn(Completion("1</think>2"), Completion(f"so{prompt}")), Turn(Completion("3</think>"))]
    assert reward([{"prompt": ""}], [Completion("", turns=turns)]) == [1]


def test_matches_covers_whole_texts_across_lines():
    reward = builtin.matches(r"<think>.*</think>\s*\d+")
    written = texts("<think>a\nb</think>\n12", "<think>a</think>", "x<think></think>1", "<think></think>1 x")
    assert reward([{}] * 4, written) == [1.0, 0.0, 0.0, 0.0]


def sampled(length, truncated=False):
    return Completion("", range(length), truncated)


def test_length_counts_the_ending_token():
    lengths = [sampled(0), sampled(9), sampled(10), sampled(10, truncated=True), sampled(14), sampled(40)]
    target = builtin.length(target=10)([{}] * 6, lengths)
    assert target == pytest.approx([0.1, 1.0, 0.9, 1.0, 0.5, 0.0])
    assert builtin.length(maximum=10)([{}] * 6, lengths) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert builtin.length(maximum=10)([{}], [Completion("", range(10), stopped=True)]) == [1.0]  # no EOS comes after it


def test_overlong_penalty_is_the_function_of_arrays():
    completions = [sampled(n, truncated=n == 100) for n in range(101)]
    lengths = [min(n + 1, 100) for n in range(101)]
    expected = overlong_penalty(jnp.array(lengths), max_length=100, buffer=20)
    rewards = builtin.overlong_penalty(max_length=100, buffer=20)([{}] * 101, completions)
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    assert rewards[79] == 0.0  # 80 tokens
    assert rewards[80] == pytest.approx(-0.05)
    assert rewards[100] == -1.0


REPETITIONS = [
    ([1, 2, 3, 4], 3, 0.0),
    ([1, 1, 1, 1, 1], 3, -2 / 3),  # three times the same
    ([1, 2, 1, 2, 1], 2, -0.5),
    ([1, 1], 3, 0.0),
    ([], 3, 0.0),
]


@pytest.mark.parametrize(("ids", "n", "reward"), REPETITIONS)
def test_repetition_by_hand(ids, n, reward):
    assert builtin.repetition(n)([{}], [Completion("", ids)]) == [pytest.approx(reward)]


def test_rewards_read_only_what_the_policy_said():
    call, reply = Completion("<call>", [1, 2, 3]), Completion("#### 3\n3" * 9, [7] * 99)
    final = Completion("18", [4, 5])
    turns = [Turn(call, reply), Turn(final)]
    episode = Completion("".join([call, reply, final]), [*call.ids, *reply.ids, *final.ids], turns=turns)
    rewards = {
        "answer": builtin.exact_answer(),
        "format": builtin.matches(r"\d+"),
        "target": builtin.length(target=7),  # five tokens, and two that end turns
        "overlong": builtin.overlong_penalty(max_length=8, buffer=1),
        "repetition": builtin.repetition(1),
        "lenient": builtin.gsm8k_answer(lenient=True),
    }
    earned = {name: reward([{"answer": "18"}], [episode])[0] for name, reward in rewards.items()}
    assert earned == {"answer": 1, "format": 1, "target": 1, "overlong": 0, "repetition": 0, "lenient": 1}
    assert builtin.gsm8k_answer()([{"answer": "3"}], [episode]) == [0.0]  # the environment wrote it
    cut = Completion(episode, turns=[turns[0], Turn(Completion("18", [4, 5], truncated=True))], truncated=True)
    assert builtin.length(target=6)([{}], [cut]) == [1.0]


BAD_REWARDS = [
    (lambda: builtin.length(), "length"),
    (lambda: builtin.length(target=1, maximum=1), "length"),
    (lambda: builtin.length(target=0), "length"),
    (lambda: builtin.overlong_penalty(max_length=100, buffer=0), "buffer is 0"),
    (lambda: builtin.repetition(0), "n is 0"),
    (lambda: builtin.exact_answer()([{"goal": 7}], texts("7")), "'answer'"),
]


@pytest.mark.parametrize(("make", "words"), BAD_REWARDS)
def test_a_reward_that_cannot_be_is_refused(make, words):
    with refused(words):
        make()
