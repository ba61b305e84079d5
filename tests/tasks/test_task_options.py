"""Rewards and tasks as a command line names them."""

import pytest

from grpo_jax.data.types import Completion
from grpo_jax.errors import UsageError
from grpo_jax.rewards.spec import Spec, open_rewards, parse_reward

BUILTIN = "grpo_jax.rewards.builtin:"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gsm8k_answer", Spec("gsm8k_answer", 1.0, f"{BUILTIN}gsm8k_answer", {})),
        (
            "lenient=0*gsm8k_answer(lenient=True)",
            Spec("lenient", 0.0, f"{BUILTIN}gsm8k_answer", {"lenient": True}),
        ),
        ("a.py:solved", Spec("solved", 1.0, "a.py:solved", None)),
        (
            " -0.5 * my/dir-2/a.py:make(n=3, names=['x'])",
            Spec("make", -0.5, "my/dir-2/a.py:make", {"n": 3, "names": ["x"]}),
        ),
        ("x = 1e-3*pkg.mod:f()", Spec("x", 0.001, "pkg.mod:f", {})),
        (r'matches(pattern="(a*b)=\\(\n")', Spec("matches", 1.0, f"{BUILTIN}matches", {"pattern": "(a*b)=\\(\n"})),
    ],
)
def test_a_reward_is_read(text, expected):
    assert parse_reward(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cannot be read"),
        ("0.1*", "cannot be read"),
        ("solved", "no built-in reward 'solved'"),
        ("1.2.3*length(target=2)", "weight"),
        ("length(7)", "plain values"),
        ("length(target=open('x'))", "plain values"),
        ("length(target=1", "cannot be read"),
        ("length(target=1) + 2)", "plain values"),
        ("length(target=1)(target=7)", "plain values"),
        ("length(target=1, target=7)", "plain values"),
        ("a.py:f(x=" + 5000 * "-" + "1)", "plain values"),
        ("1e400*length(target=1)", "no number"),
    ],
)
def test_what_cannot_be_read_is_refused(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse_reward(text)


def test_opened_rewards_are_weighted_and_see_whole_groups(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def rank(rows, texts):\n    return [sorted(texts).index(t) + row['bonus'] for row, t in zip(rows, texts)]\n"
    )
    with open_rewards([f"{tmp_path}/mine.py:rank", "short=0.5*length(maximum=1)"], group_size=2) as rewards:
        assert {name: component.weight for name, component in rewards.items()} == {"rank": 1.0, "short": 0.5}
        first, second = {"bonus": 10}, {"bonus": 10}  # two prompts, and what belongs to one shares its row
        rows = [first, first, second, second]
        completions = [Completion(text, [1] * len(text), True) for text in ("bb", "a", "d", "c")]
        assert rewards["rank"].reward(rows, completions) == [11, 10, 11, 10]
        assert rewards["short"].reward(rows, completions) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["length(maximum=1)", "length(maximum=2)"], "two rewards are called length"),
        (["0*length(maximum=1)"], "nothing to learn from"),
        (["none.py:f"], "there is no file"),
    ],
)
def test_rewards_that_do_not_work_are_refused(texts, sentence):
    with pytest.raises(UsageError, match=sentence), open_rewards(texts, group_size=2):
        pass
