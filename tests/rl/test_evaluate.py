"""Evaluation: estimates against enumeration, intervals by their coverage, scores that no batch shape changes."""

import tracemalloc
from itertools import combinations, product
from math import comb

import jax
import numpy as np
import pytest
from bigrams import PARAMS, POLICY
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats
from tiny import digit_prompts, digit_task, says_three

from experiments.tasks.arithmetic import arithmetic_task
from grpo_jax import statistics
from grpo_jax.config import recipe
from grpo_jax.data.types import Completion, Component, rng
from grpo_jax.rewards.builtin import formula_vote, number_vote
from grpo_jax.rl.evaluate import Evaluation, evaluate, sample_heldout, summary
from grpo_jax.rl.source import make_sampler
from grpo_jax.statistics import best_of, bootstrap, majority, paired_difference

# ---- best of k, and votes


def test_best_of_is_the_mean_over_all_subsets():
    generator = rng(0)
    integers = generator.integers(-2, 2, (5, 6))  # with ties
    for scores in (generator.normal(size=(5, 6)), integers / 3):
        for k in range(1, 7):
            expected = [np.mean([max(subset) for subset in combinations(row, k)]) for row in scores]
            assert_allclose(best_of(scores, k), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 512, 1000, 1024])
def test_best_of_many_is_pass_at_k(k):
    right = np.array([0, 1, 3, 500, 1023, 1024])
    scores = (np.arange(1024) < right[:, None]).astype(float)
    expected = [1 - comb(1024 - c, k) / comb(1024, k) for c in right.tolist()]  # of exact integers
    assert_allclose(best_of(scores, k), expected, rtol=1e-9, atol=1e-12)


def test_majority_averages_over_the_most_frequent_answers():
    for answers in [*product(["a", "b", None], repeat=4), (1, (2, 3), 1.0, "1")]:
        scores = rng(1).normal(size=(1, 4))
        counts = {answer: answers.count(answer) for answer in set(answers) - {None}}
        elected = [answer for answer, count in counts.items() if count == max(counts.values())]
        means = [np.mean([s for s, a in zip(scores[0], answers, strict=True) if a == chosen]) for chosen in elected]
        assert_allclose(majority(scores, [answers])[0], np.mean(means) if elected else scores.mean())


VOTES = [
    (number_vote, ["so 1,000", "#### 1000", "It is $1000.0."], "1001"),
    (formula_vote, [r"\boxed{\dfrac12}", "The answer is 0.5.", "so $x = 1/2$", r"\boxed{1/2}"], r"\boxed{2}"),
    (formula_vote, [r"\boxed{2\sqrt 3}", r"is $2\sqrt{3}$"], r"\boxed{3\sqrt{2}}"),
    (arithmetic_task(num_prompts=1, seed=0).answer, ["56", Completion("56", (5, 6))], "65"),
]


@pytest.mark.parametrize(("vote", "same", "other"), VOTES)
def test_answers_that_are_the_same_are_one_vote(vote, same, other):
    votes = {vote({}, Completion(text)) for text in same}
    assert len(votes) == 1
    assert vote({}, Completion(other)) not in votes
    assert not votes & {None}
    if vote in (number_vote, formula_vote):
        assert vote({}, Completion("none")) is None
        assert vote({}, Completion("0")) == 0


# ---- intervals


def test_percentiles_are_further_out_for_few_prompts():
    # Means of values of 0 and 1 are binomial, so that the percentiles are known: at tails of .0159 for M = 20, where
    # plain ones would be at .025. Few resamples could hit a neighbour; the seed is fixed.
    values = np.array([1.0] * 6 + [0.0] * 14)
    tail = stats.norm.cdf(-((20 / 19) ** 0.5) * stats.t.ppf(0.975, 19))
    expected = stats.binom.ppf([tail, 1 - tail], 20, 0.3) / 20
    assert_allclose(bootstrap(values), [0.3, *expected])


def test_equal_values_have_exact_binomial_bounds_or_none():
    upper = stats.beta.ppf(0.975, 1, 30)  # of Clopper and Pearson, 0 of 30
    assert_allclose(bootstrap(np.zeros(30)), [0, 0, upper])
    assert_allclose(bootstrap(np.ones(30)), [1, 1 - upper, 1])
    for values in ([1.0], [0.5, 0.5, 0.5]):  # nothing is known
        assert_array_equal(bootstrap(values), [values[0], np.nan, np.nan])


def test_paired_differences_have_narrower_intervals():
    hard = rng(0).random(200)
    before, after = ((hard + shift + 0.02 * rng(i).normal(size=200)) for i, shift in ((1, 0.0), (2, 0.01)))
    change = paired_difference(after, before)
    assert change.low < 0.01 < change.high
    assert change.high - change.low < 0.2 * (bootstrap(after).high - bootstrap(after).low)
    assert_allclose(change.mean, after.mean() - before.mean())
    # Equal scores of 0 are no share of right answers: the change could be of either sign.
    assert_array_equal(paired_difference(hard, hard), [0, np.nan, np.nan])


def test_ten_thousand_prompts_need_no_square_of_memory(monkeypatch):
    monkeypatch.setattr(statistics, "_RESAMPLES", 500)
    for values in (rng(0).normal(size=10_000), rng(0).integers(0, 9, 10_000) / 8):
        tracemalloc.start()
        bootstrap(values)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**25  # all indices of these resamples would be 20 MB, of ten thousand 400


IMPOSSIBLE_ESTIMATES = [
    (lambda: bootstrap([]), "at least one prompt"),
    (lambda: bootstrap(np.zeros((3, 2))), "one value for each"),
    (lambda: paired_difference([0.0, 1.0], [0.0]), "cannot be paired"),
    (lambda: best_of(np.zeros((2, 4)), 0), "k is 0, but there are 4 samples"),
    (lambda: best_of(np.zeros((2, 4)), 5), "k is 5, but there are 4 samples"),
    (lambda: evaluated(metric="x"), "no reward 'x' to evaluate: its rewards are threes, novel"),
    (lambda: evaluated(eval_samples=0), "0 samples of each"),
    (lambda: evaluated(eval_samples=4096), "4096 samples of each"),
    (lambda: evaluated(TASK._replace(heldout=HELDOUT._replace(examples=[]))), "0 held-out prompts"),
]


@pytest.mark.parametrize(("call", "message"), IMPOSSIBLE_ESTIMATES)
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_intervals_cover_what_they_should(monkeypatch):
    """Of 20 prompts that differ, with 8 samples each: their mean over all prompts is 1/3."""
    monkeypatch.setattr(statistics, "_RESAMPLES", 1000)
    generator, covered = rng(5), 0
    for _ in range(2000):
        values = generator.binomial(8, generator.beta(0.5, 1, 20)) / 8
        interval = bootstrap(values)
        covered += interval.low <= 1 / 3 <= interval.high
    assert 0.93 <= covered / 2000 <= 0.97  # three standard errors of 2,000 data sets are 0.015


# ---- held-out completions

HELDOUT = digit_prompts(1, 11)
HELDOUT = HELDOUT._replace(examples=[row | {"number": i} for i, row in enumerate(HELDOUT.examples)])


def novelty(examples, completions):
    """1 where no other completion of the prompt, among those given, says the same."""
    pairs = [(e["prompt"], str(c)) for e, c in zip(examples, completions, strict=True)]
    return [float(pairs.count(pair) == 1) for pair in pairs]


REWARDS = {"threes": Component(says_three), "novel": Component(novelty, 0.5)}
TASK = digit_task(REWARDS, lambda step: HELDOUT)._replace(answer=lambda row, completion: str(completion)[:1] or None)
SAMPLER = make_sampler(POLICY, TASK, recipe(max_tokens=3).sampling)
SHAPE = {"num_prompts": 4, "group_size": 4}


def evaluated(task=TASK, *, metric="", **options) -> Evaluation:
    return evaluate(sample_heldout(SAMPLER, PARAMS, task, recipe(**SHAPE | options)), task, metric=metric)


@pytest.fixture(scope="module")
def plain():
    return evaluated()


def test_samples_depend_on_seed_not_on_batching(plain):
    """Calls of 11 prompts that do not divide them."""
    assert plain.rewards.shape == (11, 3)
    other = evaluated(num_prompts=5, group_size=2, eval_samples=3)
    assert other.texts == plain.texts
    jax.tree.map(assert_array_equal, other, plain)
    more, again = evaluated(eval_samples=6), evaluated(seed=1)
    assert [group[:3] for group in more.texts] == [group[:3] for group in plain.texts]
    for greedy in (more, again):
        assert [group[-1] for group in greedy.texts] == [group[-1] for group in plain.texts]
    assert [group[:-1] for group in again.texts] != [group[:-1] for group in plain.texts]
    assert len({tuple(group) for group in more.texts}) == 11
    assert 0 < np.mean([text.truncated for group in more.texts for text in group]) < 1


def test_filler_completions_do_not_count_and_are_greedy():
    calls = list(sample_heldout(SAMPLER, PARAMS, TASK, recipe(**SHAPE, eval_samples=4)))
    assert sum(int(call.counted.sum()) for call in calls) == 11 * 5
    assert len(calls) == 6  # of 4 groups, where 11 prompts have 2 each
    for call in calls:
        assert call.greedy[~call.counted].all()


def test_scores_are_of_the_metric(plain):
    threes, novel = (evaluated(metric=name) for name in REWARDS)
    assert_allclose(plain.rewards, threes.rewards + 0.5 * novel.rewards, rtol=1e-6)
    expected = np.array([[text.count("3") / 3 for text in group] for group in plain.texts])
    assert_allclose(threes.rewards, expected[:, :-1], rtol=1e-6)
    assert_allclose(threes.greedy, expected[:, -1], rtol=1e-6)
    assert_allclose(plain.components["threes"], expected, rtol=1e-6)


def test_rewards_get_whole_prompts_in_bounded_batches():
    seen = []

    def reward(examples, completions):
        seen.append([example["number"] for example in examples])
        return [0.0] * len(completions)

    evaluated(TASK._replace(reward=reward), eval_samples=99)
    assert [sorted(set(numbers)) for numbers in seen] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert [len(numbers) for numbers in seen] == [200] * 5 + [100]


def test_ungraded_completions_score_zero_and_are_counted():
    def reward(examples, completions):  # the second of four is None, the third NaN
        return [(1.0, None, float("nan"), 1.0)[i % 4] for i in range(len(completions))]

    result = evaluated(TASK._replace(reward=reward))
    assert_array_equal(result.rewards, [[1, 0, 0]] * 11)
    numbers = summary(result)
    assert numbers["not_graded_share"] == 0.5
    assert numbers["avg"] == pytest.approx(1 / 3)
    assert (numbers["greedy"], numbers["greedy_high"]) == (1, 1)


def test_summary_by_hand():
    texts = [[Completion(t) for t in "aabc"], [Completion(t) for t in "abbc"]]
    scores, greedy = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), np.array([0.0, 1.0])
    lengths, truncated = np.array([[1, 2, 3, 9], [4, 4, 4, 9]]), np.array([[True, False, False, True]] * 2)
    graded, answers = np.ones((2, 4), bool), [["a", "a", "b"], ["a", "b", "b"]]
    result = Evaluation(scores, greedy, graded, {"r": scores}, lengths, truncated, texts, answers)
    numbers = summary(result)
    assert set(numbers) == {
        f"{name}{end}" for name in ("avg", "greedy", "pass_at_2", "maj_at_3") for end in ("", "_low", "_high")
    } | {"length", "ended_share", "not_graded_share"}
    assert numbers["avg"] == 0.5
    assert numbers["pass_at_2"] == pytest.approx((1 + 2 / 3) / 2)
    assert numbers["maj_at_3"] == 0.5
    assert (numbers["length"], numbers["ended_share"]) == (3, pytest.approx(2 / 3))
    assert "pass_at_3" in summary(result, [3])
    assert "maj_at_3" not in summary(result._replace(answers=None))
    several = summary(result._replace(components={"r": scores, "none": np.full((2, 4), np.nan)}))
    assert (several["reward_r"], np.isnan(several["reward_none"])) == (0.75, True)
