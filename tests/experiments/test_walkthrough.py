"""Checks the numbers of the walk through the chapter, by hand and with a model."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import STORIES, Characters, needs_data, refused, whole_prompts

from experiments import chapter, walkthrough
from grpo_jax.data.types import Completion
from grpo_jax.functional import kl_k3
from grpo_jax.models.policy import Policy
from grpo_jax.step import Batch

CORRECTIONS = [
    # 10 2 5 5 are no answers to x = 4; of 8 half are right: ½ / √(8 · ¼ / 7).
    (lambda: chapter.about_sampling(Characters(), "y ="), [4 * " +0.0000", "0.9354", "3 tokens", "4 after"]),
    # √(2/7), ½; ½ / √(4 · ¼ / 3) with each ε; 1 − ½ / 0.5774.
    (chapter.about_advantages, ["0.5345", "0.5000", "±0.9354 ", "±0.8660 ", "±1.0000", "0.1340", "0.00.", "(8, 8)"]),
    (chapter.about_advantages, ["+0.8660 -0.8660 -0.8660 +0.8660", "+0.8659 -0.8659 "]),
    (chapter.about_logprobs, ["1.49 instead of 1.80"]),  # e^0.4
    # 1.4 · 1.2 · 0.75 and −1.4 · 0.866; 1.1².
    (chapter.about_clip, ["takes 0.4, ", "slope of 0.4 ", "takes -0.8, ", "takes -1.8, ", "+1.2599", "-1.2124"]),
    (chapter.about_clip, ["slope is 0.0000", "of 1.21,"]),
    # log 1.8 + 1/1.8 − 1; 0.9 log 1.8 + 0.1 log 0.2, ½ log (0.25 / 0.09); (−2 + 1) / 2, (−2 + 3) / 4.
    (chapter.about_kl, ["is 0.0000 ", "0.1433", "0.3681", "0.5108", "rows is -0.50", "tokens +0.25", "2 of 6"]),
]


@pytest.mark.parametrize(("about", "numbers"), CORRECTIONS)
def test_corrections_have_the_numbers_that_a_reader_computes(about, numbers):
    text = " ".join(about())
    assert [number for number in numbers if number not in text] == []


RULE_CASES = [
    ("answer", ["5", " 5.0", "5, since", "50", "5.5", "15", ""], [1, 1, 1, 0, 0, 0, 0]),
    ("vowels", ["is", "A", "J", "5", "", "a b"], [0.5, 1, 0, 0, 0, 0.5]),
    ("even", [Completion("a", [4, 1]), Completion("b", [3]), Completion("", [])], [1, 0, 0]),
]


@pytest.mark.parametrize(("rule", "texts", "rewards"), RULE_CASES)
def test_rules(rule, texts, rewards):
    assert walkthrough.RULES[rule]([{"answer": "5"}] * len(texts), texts) == rewards


BAD_WALKS = [({"answers": ("5",)}, "give one each"), pytest.param({"top_k": -1}, "top_k is -1", marks=needs_data)]


@pytest.mark.parametrize(("options", "message"), BAD_WALKS)
def test_what_cannot_be_walked_through(options, message):
    with refused(message):
        walkthrough.main(walkthrough.Config(model=str(STORIES), **options))


def test_the_exact_kl():
    """Of given distributions: 0.9 log 1.8 + 0.1 log 0.2, and the same probabilities at half the temperature."""
    policy = Policy(*[None] * 4)._replace(
        states=lambda params, rows: (params[None, None, None], None), unembedding=lambda params: jnp.eye(2)
    )
    new, old = jnp.log(jnp.array([0.9, 0.1])), jnp.log(jnp.array([0.5, 0.5]))
    one, none = np.ones((1, 1), np.float32), np.zeros((1, 1, 1), np.int32)
    for temperature, expected in ((1.0, 0.3681), (0.5, 81 / 82 * np.log(162 / 82) + 1 / 82 * np.log(2 / 82))):
        batch = Batch(whole_prompts(none[0]), none, none == 0, temperature * one)
        kl = walkthrough.exact_kl(policy, new, old, batch)
        np.testing.assert_allclose(kl, [[[expected]]], atol=5e-5)


@pytest.mark.slow
@needs_data
def test_a_walk_with_a_real_model(capsys):
    walk = walkthrough.main(walkthrough.Config(model=str(STORIES)))
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80  # as piped
    assert "all advantages are 0.0000" in page  # of a model of stories that is asked for a number
    assert walk.reward == "vowels"
    assert [float(number) for number in re.findall(r"sum (\S+)", page)] == pytest.approx([0, 0], abs=1e-4)
    r = walk.rewards.astype(float)
    expected = (r - r.mean(1, keepdims=True)) / r.std(1, ddof=1, keepdims=True)
    np.testing.assert_allclose(walk.advantages, expected, atol=1e-4)

    # Before: the ratio is 1 to the bit, the slope −A, the loss 0, its gradient not.
    assert (walk.before.ratio == 1).all()
    assert (walk.before.kl == 0).all()
    np.testing.assert_allclose(walk.before.slope[..., 0], -walk.advantages, rtol=1e-6)
    assert walk.before.loss == pytest.approx(0, abs=1e-6)
    assert walk.metrics["loss"] == pytest.approx(float(walk.before.loss), abs=1e-6)
    assert walk.metrics["grad_norm"] > 1
    assert "gradient norm 0.0000, largest change of a weight 0.00e+00" in page  # with equal rewards

    # After: another ratio, and the loss by hand from the log-probabilities.
    ratio = np.exp(walk.after.logprobs - walk.before.logprobs)
    np.testing.assert_allclose(walk.after.ratio, ratio, rtol=1e-5)
    assert (np.abs(ratio - 1) > 1e-3).all()
    advantages = walk.advantages[..., None]
    term = -np.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
    np.testing.assert_allclose(walk.after.term, term, rtol=1e-5)
    kl = kl_k3(walk.after.logprobs, walk.before.logprobs)
    assert walk.after.loss == pytest.approx(float((term + 0.04 * kl).mean()), abs=1e-5)
    assert walk.after.loss < walk.before.loss
    assert (walk.kl > 0).all()
    assert walk.kl.max() < 0.1
    assert (walk.moved == np.sign(walk.advantages.ravel())).mean() > 0.5
