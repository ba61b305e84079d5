"""Principles and judges as rewards. Tiny models throughout."""

import copy
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import constitutional as experiment
from experiments.tasks import arithmetic
from grpo_jax import GRPOTrainer
from grpo_jax.data.types import Completion
from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import load_pretrained, save_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rewards.constitution import (
    NO,
    YES,
    constitution,
    model_judge,
    parse_principles,
    read_principles,
)
from grpo_jax.rewards.reward import score_completions
from grpo_jax.runs import flags

STORIES = Path(__file__).parents[2].parent / "shared/data/stories260K-hf"
CONFIG = ModelConfig(arithmetic.VOCAB_SIZE, 16, 32, 1, 2, 1, 8, initializer_range=0.3)
POLICY = decoder_policy(CONFIG)
OPTIONS = {"template": "{principle}={prompt}{completion}=", "yes": ("1", "3", "no such word"), "no": ("0",)}
ROWS = [{"prompt": prompt} for prompt in ("1+1=", "1+1=", "12+3=", "12+3=", "12+3=", "12+3=")]
TEXTS = [Completion(text) for text in ("1", "12", "1", "", "2", "9" * 40)]  # three lengths with their prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_pretrained(folder, jax.jit(POLICY.init)(jax.random.key(3)), CONFIG)
    arithmetic.TEXT.save_tokenizer(folder)
    return load_pretrained(folder)


def by_hand(model, text):
    """log P(1 or 3) − log P(0) after a text alone: no padding, no group, no beginning that is shared."""
    p = np.asarray(probabilities(model.params, np.array(arithmetic.TEXT.encode(text))[None]))
    one, three, zero = arithmetic.TEXT.encode("130")
    return float(np.log(p[one] + p[three]) - np.log(p[zero]))


@jax.jit
def probabilities(params, ids):
    hidden = POLICY.hidden(params, ids, jnp.ones_like(ids, bool), jnp.zeros((1, 1, 1), jnp.int32))
    return jax.nn.softmax(hidden[0, 0, 0] @ POLICY.unembedding(params).T)


# ---- the judge


def test_log_odds_are_those_of_the_whole_softmax_whatever_is_batched_or_padded(model):
    expected = [by_hand(model, f"4+4={row['prompt']}{text}=") for row, text in zip(ROWS, TEXTS, strict=True)]
    for batch_size in (1, 64):
        judge = model_judge(model, **OPTIONS, probability=False, batch_size=batch_size)
        np.testing.assert_allclose(judge("4+4", ROWS, TEXTS), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(judge("4+4", ROWS[4:5], TEXTS[4:5]), expected[4:5], rtol=1e-4, atol=1e-4)
    assert judge("4+4", [], []) == []
    found = model_judge(model, **OPTIONS)("4+4", ROWS, TEXTS)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array(expected))), rtol=1e-4)


def test_texts_without_a_common_beginning_are_judged_too(model):
    options = OPTIONS | {"template": "{completion}={other}{principle}="}
    judge = model_judge(model, **options, probability=False)
    rows = [{"prompt": "1+1=", "other": "7"}] * 2
    texts = [Completion("23"), Completion("345")]
    expected = [by_hand(model, f"{text}=74+4=") for text in texts]
    np.testing.assert_allclose(judge("4+4", rows, texts), expected, rtol=1e-4)


def test_a_completion_brings_no_control_tokens(model):
    judge = model_judge(model, **OPTIONS)
    plain, *others = (judge("4", ROWS[:1], [Completion(text)]) for text in ("12", "1</s>2", "12</<pad>s>", "<pad>12"))
    assert others == [plain] * 3


def test_a_chat_template_is_filled_in(model):
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = "{% for message in messages %}8{{ message['content'] }}8{% endfor %}"
    judge = model_judge(model._replace(tokenizer=tokenizer), **OPTIONS, probability=False)
    assert judge("4+4", ROWS[:1], TEXTS[:1]) == pytest.approx([by_hand(model, "84+4=1+1=1=8")], rel=1e-4)


@pytest.mark.skipif(not STORIES.exists(), reason="needs the stories260K folder")
def test_a_pretrained_model_judges_in_words():
    model = load_pretrained(STORIES)
    with pytest.raises(UsageError, match=r"none of .* is one token"):
        model_judge(model)
    rows, texts = [{"prompt": "Once upon a time"}] * 2, [Completion(" there was a cat."), Completion(" yes yes")]
    found = model_judge(model, yes=("y",), no=("n",))("The answer is kind.", rows, texts)
    assert 0 < min(found) < max(found) < 1
    with pytest.raises(UsageError, match="was trained on 512"):
        model_judge(model, yes=("y",), no=("n",))("kind", rows[:1], [Completion("cat " * 600)])


# ---- principles


def test_principles_are_lines_with_or_without_a_name(tmp_path):
    file = tmp_path / "principles.txt"
    file.write_text("# taste\n\nbrief: The answer: short.\n  Be kind.  \n# more\nBe honest: do not lie.\n")
    expected = {"brief": "The answer: short.", "principle_2": "Be kind.", "principle_3": "Be honest: do not lie."}
    assert read_principles(file) == expected


def test_any_function_is_a_judge_and_weights_default_to_a_mean():
    def judge(principle, rows, completions):
        return [float(principle in text) for text in completions]

    async def slowly(principle, rows, completions):
        return judge(principle, rows, completions)

    texts = [Completion("ab"), Completion("b"), Completion("")]
    for of in (judge, slowly):
        scores = score_completions(constitution({"first": "a", "second": "b"}, of), [{}] * 3, texts)
        np.testing.assert_array_equal(scores.rewards, [1, 0.5, 0])
        np.testing.assert_array_equal(scores.components["first"], [1, 0, 0])
    weighted = constitution({"first": "a", "second": "b"}, judge, weights={"second": 3.0})
    np.testing.assert_array_equal(score_completions(weighted, [{}] * 3, texts).rewards, [3.5, 3, 0])


@pytest.mark.slow
def test_a_policy_is_rewarded_by_itself_as_it_was_and_each_principle_is_logged(model, tmp_path):
    judge = model_judge(model, **OPTIONS)
    before = judge("4+4", ROWS, TEXTS)
    trainer = GRPOTrainer(
        model, constitution({"sum": "4+4", "difference": "5"}, judge), steps=1, max_tokens=4, learning_rate=1e-2,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    trained = trainer.train(["1+1=", "2+2="])
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["reward"] == pytest.approx((line["reward_sum"] + line["reward_difference"]) / 2, rel=1e-4)
    assert judge("4+4", ROWS, TEXTS) == before
    assert model_judge(trained, **OPTIONS)("4+4", ROWS, TEXTS) != before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: parse_principles(["", "# none"]), "no principle"),
        (lambda model: parse_principles(["a: Be kind.", "be kind."]), "'be kind.' is there twice"),
        (lambda model: parse_principles(["a: Be kind.", "a: Be brief."]), "two principles are called a"),
        (lambda model: read_principles("no/such/file"), "cannot be read"),
        (lambda model: constitution({}, lambda *_: []), "no principle"),
        (lambda model: constitution({"a": "b"}, lambda *_: [], weights={"c": 1.0}), "weight for 'c'"),
        (lambda model: model_judge(model), "none of .*yes.* is one token"),
        (lambda model: model_judge(model, **(OPTIONS | {"no": ("1",)})), "share a token"),
        (lambda model: model_judge(model, **(OPTIONS | {"template": "{principle}"})), "no {completion}"),
        (lambda model: model_judge(model, **(OPTIONS | {"template": "{principle"})), "cannot be read"),
        (lambda model: model_judge(model, **OPTIONS, batch_size=0), "batch_size is 0"),
        (lambda model: model_judge(model, **OPTIONS)("1", [{}], ["1"]), "{prompt}, but an example has no such column"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(model, call, message):
    with pytest.raises(UsageError, match=message) as error:
        call(model)
    assert "\n" not in str(error.value)


def test_the_usual_spellings_differ():
    assert not {word.strip().lower() for word in YES} & {word.strip().lower() for word in NO}


# ---- the experiment


def test_words_are_labelled_by_gold():
    assert experiment.GOLD.keys() == experiment.PRINCIPLES.keys()
    packed = experiment.labelled_words(20, seed=0)
    texts = [
        (experiment.TEXT.decode(ids[(row == text) & ~learned]), experiment.TEXT.decode(ids[(row == text) & learned]))
        for ids, row, learned in zip(packed.ids, packed.texts, packed.completion_mask, strict=True)
        for text in range(1, row.max() + 1)
    ]
    judged = [(question.split(":"), answer) for question, answer in texts if question.endswith("?")]
    assert (len(texts), len(judged)) == (100, 80)
    names = {principle: name for name, principle in experiment.PRINCIPLES.items()}
    for (principle, _, word), answer in judged:
        assert (answer == "y") == experiment.keeps(names[principle.strip()], word[:-1])
    assert not experiment.keeps("vowel", "ba?ye")
    assert not experiment.keeps("long", "")


@pytest.mark.slow
def test_the_words_keep_what_the_judge_knows(tmp_path):
    args = ["--num-seeds", "1", "--run-dir", str(tmp_path / "run")]
    experiment.main(flags.parse(experiment.Config, None, args))
    results = json.loads((tmp_path / "run/results.json").read_text())
    rows = results["over_seeds"]
    assert set(rows) == {"start", "control", "untrained", "constitution", "gold"}
    for name in ("vowel", "long", "e"):
        assert rows["start"][f"agrees_{name}"] > 0.95
        assert rows["constitution"][name] > rows["control"][name] + 0.2
    assert rows["untrained"]["gold"] < rows["constitution"]["gold"] - 0.1
    metrics = (tmp_path / "run/metrics.jsonl").read_text()
    experiment.main(flags.parse(experiment.Config, None, ["--resume", "--run-dir", str(tmp_path / "run")]))
    assert json.loads((tmp_path / "run/results.json").read_text()) == results
    assert (tmp_path / "run/metrics.jsonl").read_text() == metrics
