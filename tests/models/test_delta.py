"""Gated delta nets against a NumPy loop over tokens, and a decoder that has them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tiny import ragged_prompts, random_params, row_numbers

from grpo_jax.models.config import DeltaConfig, ModelConfig
from grpo_jax.models.decoder.delta import Tokens, apply_in_chunks, apply_token, convolve
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import rows_of_groups, rows_of_packed_groups
from grpo_jax.rl.source import to_batch
from grpo_jax.sampling.episodes import begin_episodes, continue_episodes
from grpo_jax.sampling.sampler import sample_groups
from grpo_jax.scoring import score_completion_tokens

R, S, H, A, B = 2, 21, 3, 4, 5


def random_tokens(seed=0):
    rng = np.random.default_rng(seed)
    queries, keys, values = (rng.normal(size=(R, S, H, size)).astype(np.float32) for size in (A, A, B))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    decay, rate = -rng.exponential(0.3, (R, S, H)), rng.uniform(0, 1, (R, S, H))
    return Tokens(queries, keys, values, decay.astype(np.float32), rate.astype(np.float32))


INITIAL = np.random.default_rng(1).normal(size=(R, H, A, B)).astype(np.float32)


def token_by_token(tokens, initial, numbers):
    """S ← eᵍ S + β k (v − eᵍ Sᵀk)ᵀ and o = Sᵀq, from the initial state at the beginning of each text."""
    outputs, state = np.zeros((R, S, H, B)), np.zeros((R, H, A, B))
    for r, h in np.ndindex(R, H):
        s = initial[r, h]
        for t in range(S):
            if t and numbers[r, t] != numbers[r, t - 1]:
                s = initial[r, h]
            query, key, value, decay, rate = (x[r, t, h] for x in tokens)
            s = np.exp(decay) * s
            s = s + rate * np.outer(key, value - s.T @ key)
            outputs[r, t, h] = s.T @ query
        state[r, h] = s
    return outputs, state


ONE_TEXT = np.ones((R, S), np.int32)
TEXTS = np.array([[1] * 3 + [2] * 9 + [3] * 1 + [4] * 4 + [0] * 4, [1] * 16 + [2] * 5], np.int32)


def test_a_token_by_hand():
    """β ½ replaces half of what S holds for the key, after decay by a half."""
    state = jnp.array([[[4.0], [2.0]]])  # [H 1, A 2, B 1]
    token = Tokens(*(jnp.array(x) for x in ([[1.0, 1.0]], [[1.0, 0.0]], [[8.0]], [np.log(0.5)], [0.5])))
    after, output = apply_token(token, state)
    np.testing.assert_allclose(after[0, :, 0], [2 + 0.5 * (8 - 2), 1.0], rtol=1e-6)
    np.testing.assert_allclose(output, [[6.0]], rtol=1e-6)


@pytest.mark.parametrize("numbers", [None, ONE_TEXT, TEXTS], ids=["one text", "one number", "packed"])
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_chunks_equal_a_loop_over_tokens(numbers, chunk):
    outputs, state = jax.jit(lambda *args: apply_in_chunks(*args, chunk=chunk))(random_tokens(), INITIAL, numbers)
    expected = token_by_token(random_tokens(), INITIAL, ONE_TEXT if numbers is None else numbers)
    np.testing.assert_allclose(outputs, expected[0], atol=2e-5)
    np.testing.assert_allclose(state, expected[1], atol=2e-5)


def test_gradients_equal_finite_differences():
    weights = np.random.default_rng(2).normal(size=(R, S, H, B))

    def loss(tokens, initial):
        return jnp.sum(weights * apply_in_chunks(tokens, initial, TEXTS, chunk=8)[0])

    check_grads(jax.jit(loss), (random_tokens(), INITIAL), order=1, modes=["rev"], eps=1e-2, atol=0.02, rtol=0.02)


def test_keys_of_zero_change_only_the_decay():
    tokens = random_tokens()._replace(keys=np.zeros((R, S, H, A), np.float32), decay=np.zeros((R, S, H), np.float32))
    np.testing.assert_allclose(apply_in_chunks(tokens, INITIAL, chunk=8)[1], INITIAL, atol=1e-6)


@pytest.mark.parametrize("numbers", [ONE_TEXT, TEXTS], ids=["one text", "packed"])
def test_convolutions_see_their_text_and_its_prefix(numbers):
    rng = np.random.default_rng(3)
    before, x, taps = rng.normal(size=(R, 3, A)), rng.normal(size=(R, S, A)), rng.normal(size=(A, 4))
    actual = convolve(jnp.asarray(before), jnp.asarray(x), jnp.asarray(taps), numbers)
    for r, t in np.ndindex(R, S):
        own = x[r, : t + 1][numbers[r, : t + 1] == numbers[r, t]]
        window = np.concatenate([before[r], own])[-4:]
        total = np.sum(window * taps.T, axis=0)
        np.testing.assert_allclose(actual[r, t], total / (1 + np.exp(-total)), atol=1e-5)


# ---- a decoder with delta nets

CONFIG = ModelConfig(24, 16, 20, 2, 4, 2, 8, initializer_range=0.4, delta=DeltaConfig(2, 4, 6, 5, 4), delta_layers=(0,))
POLICY, PROMPTS = decoder_policy(CONFIG), ragged_prompts([5, 1, 3], 24)


def scored(params, completions):
    batch = to_batch(PROMPTS, np.full(completions.completion_ids.shape[:2], 1.3, np.float32), completions)
    return score_completion_tokens(POLICY, params, batch).logprobs


TURNS = {"max_tokens": 30, "eos_ids": (7, 8, 9)}
REPLIES = np.random.default_rng(0).integers(0, 24, (3, 4, 40)).astype(np.int32)
continued = jax.jit(partial(continue_episodes, POLICY, **TURNS))


@jax.jit
def first_turn(params):
    numbers = row_numbers(3, 4)
    more = {"environment_tokens": 80, "temperature": 1.3}
    return begin_episodes(POLICY, params, PROMPTS, numbers, jax.random.key(1), **more, **TURNS)


def test_replies_continue_the_state_of_their_completion():
    """Replies of different lengths, of which some are computed in several calls; some completions wait for others."""
    counts = np.array([[0, 1, 2, 40], [3, 5, 0, 1], [33, 32, 31, 2]], np.int32)
    params = random_params(CONFIG, 0.15)
    episodes = first_turn(params)
    for _ in range(2):
        episodes = continued(params, episodes, REPLIES, counts, np.ones((3, 4), bool))
    out = episodes.running.out
    logprobs = jax.device_get(jax.jit(scored)(params, out))
    out = jax.device_get(out)
    assert (out.turn.max(axis=-1) == 3).sum() > 5
    np.testing.assert_allclose(out.sampler_logprobs[out.completion_mask], logprobs[out.completion_mask], atol=2e-5)


def test_an_episode_that_waits_absorbs_no_token():
    params, counts = random_params(CONFIG, 0.15), np.full((3, 4), 3, np.int32)

    def two_turns(waits):
        episodes = first_turn(params)
        for _ in range(waits):
            episodes = continued(params, episodes, REPLIES, 0 * counts, np.zeros((3, 4), bool))
        return jax.device_get(continued(params, episodes, REPLIES, counts, np.ones((3, 4), bool)).running.out)

    at_once, later = (two_turns(waits) for waits in (0, 2))
    np.testing.assert_array_equal(later.completion_ids, at_once.completion_ids)
    np.testing.assert_allclose(later.sampler_logprobs, at_once.sampler_logprobs, atol=1e-6)


def test_states_stay_correct_when_completions_leave(assume):
    numbers, options = row_numbers(3, 16), {"max_tokens": 40, "eos_ids": (7, 8, 9), "temperature": 1.3}
    params, sample = random_params(CONFIG, 0.15), partial(sample_groups, **options)
    inputs = params, PROMPTS, numbers, jax.random.key(0)
    whole = jax.jit(partial(sample, POLICY._replace(select=None)))(*inputs)
    assume(narrows_from=1, grows_from=1, rooms=2)
    narrow = jax.jit(partial(sample, POLICY))(*inputs)
    np.testing.assert_array_equal(narrow.completion_ids, whole.completion_ids)
    np.testing.assert_allclose(narrow.sampler_logprobs, whole.sampler_logprobs, atol=1e-5)
    logprobs = np.where(narrow.completion_mask, jax.jit(scored)(params, narrow), 0)
    np.testing.assert_allclose(narrow.sampler_logprobs, logprobs, atol=2e-5)


def test_packed_completions_continue_from_their_prompt():
    ids = np.random.default_rng(5).integers(0, 24, (3, 4, 6)).astype(np.int32)
    lengths = np.array([[6, 2, 0, 5], [1, 1, 6, 3], [4, 0, 0, 1]])
    is_token = np.arange(6) < lengths[..., None]
    places = np.argsort(~is_token.reshape(3, -1), axis=-1, stable=True)[:, :14]
    places = np.where(np.arange(14) < lengths.sum(-1, keepdims=True), places, 24).astype(np.int32)
    states, params = jax.jit(POLICY.states), random_params(CONFIG, 0.15)
    whole, _ = states(params, rows_of_groups(PROMPTS, ids))
    rows = rows_of_packed_groups(PROMPTS, ids, places)
    packed = rows.unpack(states(params, rows)[0])
    np.testing.assert_allclose(packed[is_token], np.asarray(whole)[is_token], atol=2e-5)
