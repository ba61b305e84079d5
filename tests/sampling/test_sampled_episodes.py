"""Episodes of several turns: the numbers of one pass over the same tokens, whatever the others of the batch do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import row_numbers, sampler_of

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.source import to_batch
from grpo_jax.sampling.episodes import begin_episodes, continue_episodes
from grpo_jax.scoring import score_completion_tokens, states_of

V, EOS, OWN, OTHERS = 9, (7, 8), 9, 44
N, G = 2, 3
PLAIN = ModelConfig(V, 16, 24, 2, 4, 2, 4, initializer_range=0.4)
WINDOW = dataclasses.replace(PLAIN, sliding_window=3, sliding_layers=(1,))
PROMPTS = PromptTokens(
    np.array([[0, 0, 1, 2], [3, 4, 5, 6]], np.int32), np.array([[False, False, True, True], [True] * 4])
)
NUMBERS = row_numbers(N, G)
# Tokens of the environment after the first and the second turn: none, few, and more than are computed at a time.
COUNTS = np.array([[[1, 0, 40], [2, 3, 1]], [[1, 2, 3], [5, 33, 1]]])


@functools.cache
def params_of(config):
    return jax.jit(decoder_policy(config).init)(jax.random.key(0))


@functools.cache
def programs_of(config):
    policy, params = decoder_policy(config), params_of(config)

    def begin(numbers):
        inputs = (PROMPTS, numbers, jax.random.key(1))
        return begin_episodes(
            policy,
            params,
            *inputs,
            max_tokens=OWN,
            environment_tokens=OTHERS,
            eos_ids=EOS,
            temperature=1.3,
            pad_id=0,
        )

    def go_on(episodes, replies, counts, goes_on):
        inputs = params, episodes, replies, counts, goes_on
        return continue_episodes(policy, *inputs, max_tokens=OWN, eos_ids=EOS)

    return jax.jit(begin), jax.jit(go_on)


def replies(turn):
    """Any tokens, those that end a turn of the policy among them."""
    return np.random.default_rng(turn).integers(0, V, (N, G, OTHERS)).astype(np.int32)


def played(config=WINDOW, counts=COUNTS, waits=()):
    """Episodes after three turns; those of `waits` end after the first."""
    begin, go_on = programs_of(config)
    episodes = begin(NUMBERS)
    for turn, count in enumerate(counts):
        goes_on = np.ones((N, G), bool)
        for place in waits:
            goes_on[place], count = False, np.where(NUMBERS[place] == NUMBERS, 0, count)
        episodes = go_on(episodes, replies(turn), count.astype(np.int32), goes_on)
    return jax.device_get(episodes.running.out)


@pytest.fixture(
    scope="module", params=[pytest.param(PLAIN, id="plain", marks=pytest.mark.slow), pytest.param(WINDOW, id="window")]
)
def config(request):
    return request.param


def test_first_turn_equals_sampling_without_an_environment(config):
    sample = sampler_of(decoder_policy(config), max_tokens=OWN, eos_ids=EOS, pad_id=0)
    alone = sample(params_of(config), PROMPTS, NUMBERS, jax.random.key(1), 1.3)
    first = programs_of(config)[0](NUMBERS).running.out
    np.testing.assert_array_equal(first.completion_ids[..., :OWN], alone.completion_ids)
    np.testing.assert_array_equal(first.completion_mask[..., :OWN], alone.completion_mask)
    np.testing.assert_allclose(first.sampler_logprobs[..., :OWN], alone.sampler_logprobs, atol=1e-6)
    np.testing.assert_array_equal(first.truncated, alone.truncated)
    assert not np.any(first.completion_mask[..., OWN:])


def test_episode_logprobs_equal_those_of_one_pass(config):
    out = played(config)
    batch, policy = to_batch(PROMPTS, np.full((N, G), 1.3, np.float32), out), decoder_policy(config)

    @jax.jit
    def scored(params):
        states = states_of(policy, params, batch)
        logits = jnp.einsum("ngtd,vd->ngtv", states.hidden, policy.unembedding(params)) / 1.3
        return score_completion_tokens(policy, params, batch, states).logprobs, logits

    logprobs, logits = jax.device_get(scored(params_of(config)))
    mask = out.completion_mask
    assert out.turn.max() == 3
    assert len({*mask.sum(-1).ravel()}) > 2  # lengths differ
    # Sums in another order. Of ten models here the worst had 9.4.
    rounding = np.finfo(np.float32).eps * np.abs(logits[mask]).max()
    np.testing.assert_allclose(logprobs[mask], out.sampler_logprobs[mask], atol=16 * rounding, rtol=0)


LONG = 45  # tokens of a first turn: more than the 3 + 32 slots of a layer with a window
ONLY_LAYER = dataclasses.replace(PLAIN, sliding_window=3, num_hidden_layers=1)


@pytest.mark.parametrize(
    "config", [pytest.param(WINDOW, marks=pytest.mark.slow), ONLY_LAYER], ids=["one of two layers", "the only layer"]
)
def test_waiting_completions_keep_tokens_inside_the_window(config):
    policy, params, numbers = decoder_policy(config), params_of(config), row_numbers(N, 8)

    @jax.jit
    def two_turns(params):
        options = {"max_tokens": 2 * LONG, "eos_ids": EOS[:1]}
        first = begin_episodes(
            policy, params, PROMPTS, numbers, jax.random.key(3), environment_tokens=8, temperature=1.3, **options
        )
        # One token, so that the first one of the second turn depends on two of the first turn in a window of 3.
        replies, counts = jnp.full((*numbers.shape, 1), 5, jnp.int32), jnp.ones(numbers.shape, jnp.int32)
        second = continue_episodes(policy, params, first, replies, counts, jnp.ones(numbers.shape, bool), **options)
        batch = to_batch(PROMPTS, np.full(numbers.shape, 1.3, np.float32), second.running.out)
        return first.lengths, second.running.out, score_completion_tokens(policy, params, batch).logprobs

    lengths, out, logprobs = jax.device_get(two_turns(params))
    assert lengths.min() < 8
    assert lengths.max() > LONG
    second = out.completion_mask & (out.turn == 2)
    assert second.any(axis=-1).sum() > 8
    np.testing.assert_allclose(out.sampler_logprobs[second], logprobs[second], atol=2e-5)


def test_tokens_lie_in_order_and_are_told_apart():
    out = played()
    for place in np.ndindex(N, G):
        turn, mask, ids = out.turn[place], out.completion_mask[place], out.completion_ids[place]
        length = (turn > 0).sum()
        assert (turn[:length] > 0).all()  # no gaps
        assert (np.diff(turn[:length]) >= 0).all()
        assert mask.sum() <= OWN
        for number, count in enumerate(COUNTS, 1):
            observation = (turn == number) & ~mask
            if mask[turn > number].any():  # the episode went on
                assert observation.sum() == count[place]
                assert ids[observation].tolist() == replies(number - 1)[place][: count[place]].tolist()
            action = ids[(turn == number) & mask]
            assert not np.isin(action[:-1], EOS).any()
        assert not out.sampler_logprobs[place][~mask].any()


def test_what_others_do_changes_no_token():
    whole, alone = played(), played(waits=[(0, 2), (1, 0), (1, 1)])  # those with the longest replies
    for place in [(0, 0), (0, 1), (1, 2)]:
        np.testing.assert_array_equal(whole.completion_ids[place], alone.completion_ids[place])
        np.testing.assert_allclose(whole.sampler_logprobs[place], alone.sampler_logprobs[place], atol=1e-6)
    assert alone.turn[0, 2].max() == 1
    assert whole.turn[0, 0].max() > 1
