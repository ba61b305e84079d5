"""Checks preferences of a known worth by enumeration: how pairs are drawn, and how often a policy is right."""

import itertools
from functools import partial

import numpy as np
import pytest

from experiments import preferences


def test_pair_accuracy_equals_enumeration_of_all_pairs():
    generator = np.random.default_rng(0)
    reference = np.log(generator.dirichlet(np.ones(4), 2))
    worth, log_ratio = generator.normal(size=(2, 2, 4))
    log_ratio[0, 1] = log_ratio[0, 2]
    expected = 0.0
    for p, u, r in zip(np.exp(reference), worth, log_ratio, strict=True):
        for i, j in itertools.permutations(range(4), 2):
            drawn, wins = p[i] * p[j] / (1 - p[i]), 1 / (1 + np.exp(u[j] - u[i]))
            expected += drawn * (0.5 if r[i] == r[j] else wins if r[i] > r[j] else 1 - wins) / 2
    accuracy = partial(preferences.pair_accuracy, reference=reference, worth=worth)
    assert accuracy(log_ratio) == pytest.approx(expected)
    assert accuracy(np.zeros_like(worth)) == pytest.approx(0.5)
    assert accuracy(3 * worth + 1) == accuracy(worth) > accuracy(log_ratio)


@pytest.mark.parametrize("shuffled", [False, True])
def test_sampled_pairs_have_the_expected_frequencies(shuffled):
    generator = np.random.default_rng(1)
    shape = preferences.PROMPTS, len(preferences.COMPLETIONS)
    reference = np.log(generator.dirichlet(np.full(shape[1], 0.05), shape[0]) + 1e-9)
    reference -= np.log(np.exp(reference).sum(-1, keepdims=True))
    worth, number = preferences.utilities(0), 20_000
    places = preferences.VOCAB ** np.arange(preferences.TOKENS)[::-1]
    pairs = preferences.sample_pairs(reference, worth, number, 0, shuffled=shuffled)
    prompts, answers = np.array(pairs.prompts)[:, 0], np.array(pairs.answers) @ places
    assert (answers[:, 0] != answers[:, 1]).all()
    chosen, rejected = worth[prompts[:, None], answers].T
    expected = 0.5 if shuffled else preferences.pair_accuracy(worth, reference=reference, worth=worth)
    assert np.mean(chosen > rejected) == pytest.approx(expected, abs=4 * 0.5 / number**0.5)
    for prompt, probabilities in enumerate(np.exp(reference)):
        most = np.argmax(probabilities)
        others = np.delete(probabilities, most)
        expected = probabilities[most] * (1 + (others / (1 - others)).sum())  # first, or behind another
        drawn = (answers[prompts == prompt] == most).any(1)
        assert drawn.mean() == pytest.approx(expected, abs=4 * 0.5 / len(drawn) ** 0.5)
