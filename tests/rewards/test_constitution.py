"""Checks principles and judges as rewards, with tiny models."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import STORIES, needs_data, refused, save_tiny_model, tiny_config, whole_prompts

from experiments.tasks import arithmetic
from grpo_jax.data.types import Completion, Prompt, Turn
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rewards.constitution import NO, YES, constitution, model_judge, parse_principles, read_principles
from grpo_jax.rewards.reward import to_rewards

CONFIG = tiny_config(arithmetic.VOCAB_SIZE)
POLICY = decoder_policy(CONFIG)
OPTIONS = {"template": "{principle}={prompt}{completion}=", "yes": ("1", "3", "no such word"), "no": ("0",)}
ROWS = [{"prompt": prompt} for prompt in ("1+1=", "1+1=", "12+3=", "12+3=", "12+3=", "12+3=")]
TEXTS = [Completion(text) for text in ("1", "12", "1", "", "2", "9" * 40)]  # three lengths with their prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_pretrained(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", arithmetic.TEXT))


def by_hand(model, text):
    """log P(1 or 3) − log P(0) after a text alone: no padding, no group, no beginning that is shared."""
    p = np.asarray(next_probabilities(model.params, np.array(arithmetic.TEXT.encode(text))[None]))
    one, three, zero = arithmetic.TEXT.encode("130")
    return float(np.log(p[one] + p[three]) - np.log(p[zero]))


@jax.jit
def next_probabilities(params, ids):
    hidden = POLICY.hidden(params, whole_prompts(ids), jnp.zeros((1, 1, 1), jnp.int32))
    return jax.nn.softmax(hidden[0, 0, 0] @ POLICY.unembedding(params).T)


# ---- the judge


def test_judge_log_odds_do_not_depend_on_batching(model):
    expected = [by_hand(model, f"4+4={row['prompt']}{text}=") for row, text in zip(ROWS, TEXTS, strict=True)]
    for batch_size in (1, 64):
        judge = model_judge(model, **OPTIONS, probability=False, batch_size=batch_size)
        np.testing.assert_allclose(judge("4+4", ROWS, TEXTS), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(judge("4+4", ROWS[4:5], TEXTS[4:5]), expected[4:5], rtol=1e-4, atol=1e-4)
    assert judge("4+4", [], []) == []
    probabilities = model_judge(model, **OPTIONS)("4+4", ROWS, TEXTS)
    np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-np.array(expected))), rtol=1e-4)


TEMPLATES = [
    ("{completion}={other}{principle}=", None, "23=74+4="),  # texts without a common beginning
    (
        "{principle}={other}{completion}=",
        "{% for message in messages %}8{{ message['content'] }}8{% endfor %}",
        "84+4=723=8",
    ),
]


@pytest.mark.parametrize(("template", "chat", "text"), TEMPLATES)
def test_templates_are_filled_in(model, template, chat, text):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = chat
    options = OPTIONS | {"template": template}
    judge = model_judge(model._replace(tokenizer=tokenizer), **options, probability=False)
    rows = [{"prompt": "1+1=", "other": "7"}] * 2
    expected = [by_hand(model, text), by_hand(model, text.replace("23", "345"))]
    np.testing.assert_allclose(judge("4+4", rows, [Completion("23"), Completion("345")]), expected, rtol=1e-4)


def test_a_judge_reads_messages_without_the_policys_template(model):
    judge = model_judge(model, **OPTIONS, probability=False)
    row = {"prompt": Prompt("<|user|>1+1<|end|>", [{"role": "user", "content": "1+1="}], template="another")}
    actual = judge("4+4", [row], [Completion("23")])
    np.testing.assert_allclose(actual, [by_hand(model, "4+4=1+1=23=")], rtol=1e-4)
    judge("4+4", [{"prompt": Prompt("1+1=")}], [Completion("23")])  # a policy without a template
    with refused("another chat template"):
        judge("4+4", [{"prompt": Prompt("1+1=", template="another")}], [Completion("23")])


@needs_data
def test_a_judge_reads_an_episode_turn_by_turn():
    judge = model_judge(load_pretrained(STORIES), yes=("y",), no=("n",), template="{principle} {completion}")
    first = Turn(Completion("a cat"), Completion("<s> a dog </s>"), None, {"role": "user", "content": "a dog"})
    episode = Completion("a cat<s> a dog </s>a bird", turns=[first, Turn(Completion("a bird"))])
    plain = Completion("assistant: a cat\nuser: a dog\nassistant: a bird")
    row = {"prompt": "Once"}
    assert judge("kind", [row], [episode]) == pytest.approx(judge("kind", [row], [plain]), rel=1e-4)


def test_a_completion_brings_no_control_tokens(model):
    judge = model_judge(model, **OPTIONS)
    plain, *others = (judge("4", ROWS[:1], [Completion(text)]) for text in ("12", "1</s>2", "12</<pad>s>", "<pad>12"))
    assert others == [plain] * 3


@needs_data
def test_a_pretrained_model_judges_in_words():
    model = load_pretrained(STORIES)
    rows, texts = [{"prompt": "Once upon a time"}] * 2, [Completion(" there was a cat."), Completion(" yes yes")]
    answers = model_judge(model, yes=("y",), no=("n",))("The answer is kind.", rows, texts)
    assert 0 < min(answers) < max(answers) < 1
    with refused("was trained on 512"):
        model_judge(model, yes=("y",), no=("n",))("kind", rows[:1], [Completion("cat " * 600)])


# ---- principles


def test_principles_are_lines_with_or_without_a_name(tmp_path):
    file = tmp_path / "principles.txt"
    file.write_text("# taste\n\nbrief: The answer: short.\n  Be kind.  \n# more\nBe honest: do not lie.\n")
    expected = {"brief": "The answer: short.", "principle_2": "Be kind.", "principle_3": "Be honest: do not lie."}
    assert read_principles(file) == expected


def test_any_function_can_judge_with_equal_default_weights():
    def judge(principle, rows, completions):
        return [float(principle in text) for text in completions]

    async def slowly(principle, rows, completions):
        return judge(principle, rows, completions)

    texts = [Completion("ab"), Completion("b"), Completion("")]
    for asked in (judge, slowly):
        scores = to_rewards(constitution({"first": "a", "second": "b"}, asked)).grade([{}] * 3, texts)
        np.testing.assert_array_equal(scores.rewards, [1, 0.5, 0])
        np.testing.assert_array_equal(scores.components["first"], [1, 0, 0])
    weighted = constitution({"first": "a", "second": "b"}, judge, weights={"second": 3.0})
    np.testing.assert_array_equal(to_rewards(weighted).grade([{}] * 3, texts).rewards, [3.5, 3, 0])


BAD_CALLS = [
    (lambda model: read_principles("nowhere.txt"), "nowhere.txt cannot be read"),
    (lambda model: parse_principles(["", "# none"]), "no principle"),
    (lambda model: parse_principles(["a: Be kind.", "be kind."]), "'be kind.' is there twice"),
    (lambda model: parse_principles(["a: Be kind.", "a: Be brief."]), "two principles are called a"),
    (lambda model: constitution({"a": "b"}, lambda *_: [], weights={"c": 1.0}), "weight for 'c'"),
    (lambda model: model_judge(model), "none of .*yes.* is one token"),
    (lambda model: model_judge(model, **(OPTIONS | {"template": "{principle}"})), "no {completion}"),
    (lambda model: model_judge(model, **OPTIONS)("1", [{}], ["1"]), "{prompt}, but an example has no such column"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_what_cannot_work_is_refused_in_a_sentence(model, call, message):
    with refused(message):
        call(model)


def test_the_usual_spellings_differ():
    assert not {word.strip().lower() for word in YES} & {word.strip().lower() for word in NO}
