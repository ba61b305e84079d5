"""The sampler with a fake policy, with a tiny decoder, and its parts against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from markov import markov_policy, random_table
from tiny import ragged_prompts, random_params, row_numbers, sampler_of

from grpo_jax.functional import token_logprobs
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.types import step_key
from grpo_jax.sampling.sampler import Limits, draw_noise, limit_logits, sample_categorical

# ---- one token


@jax.jit
def draw(logits, uniforms):
    """Logits [V], uniforms [M, 2] -> M ids and log-probabilities."""
    return jax.vmap(sample_categorical, (None, 0))(logits, uniforms)


def random_logits(vocab_size, share=1.0, seed=0):
    """Normal logits, of which all but about `share` are −inf."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=vocab_size).astype(np.float32)
    logits[rng.random(vocab_size) > share] = -np.inf
    logits[vocab_size // 2] = 0  # at least one token
    return logits


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab_size", [1, 3, 50, 290])  # mostly no squares
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_frequencies_are_those_of_the_softmax(vocab_size, share):
    logits, count = random_logits(vocab_size, share), 100_000
    uniforms = np.random.default_rng(1).random((count, 2), np.float32)
    ids, logprobs = draw(logits, uniforms)
    expected = log_softmax(logits)
    np.testing.assert_allclose(logprobs, expected[ids], atol=1e-5)
    possible = np.isfinite(expected)
    counts = np.bincount(ids, minlength=vocab_size)
    assert counts[~possible].sum() == 0
    mean = count * np.exp(expected[possible])
    freedom = possible.sum() - 1
    # χ² has mean `freedom` and variance 2 · `freedom`.
    assert ((counts[possible] - mean) ** 2 / mean).sum() <= freedom + 5 * np.sqrt(2 * freedom) + 1e-6


@pytest.mark.parametrize("vocab_size", [1, 7, 50])
def test_extreme_uniforms_choose_first_and_last_possible_tokens(vocab_size):
    logits = random_logits(vocab_size, share=0.4)
    largest = np.float32(1) - np.float32(2**-24)
    ids, _ = draw(logits, np.array([[0, 0], [largest, largest]], np.float32))
    assert ids.tolist() == np.flatnonzero(np.isfinite(logits))[[0, -1]].tolist()


@pytest.mark.parametrize(
    ("vocab_size", "axis"),
    [(100, 0), (100, 1), (1000, 0), (1000, 1), *(pytest.param(151_936, x, marks=pytest.mark.slow) for x in (0, 1))],
)
def test_rounding_never_picks_an_impossible_token(vocab_size, axis):
    """Looks where one token hands over to the next: there a rounding of running sums decides."""
    logits, steps, count = random_logits(vocab_size, share=0.1), 2**23, 1000
    grid = np.random.default_rng(0).integers(0, steps, (count, 2))  # jax.random.uniform returns grid / 2²³

    def ids_at(position):
        uniforms = grid.copy()
        uniforms[:, axis] = position
        return np.asarray(draw(logits, (uniforms / steps).astype(np.float32))[0])

    target = ids_at(np.random.default_rng(1).integers(0, steps, count))
    low, high = np.zeros(count, int), np.full(count, steps)
    while (high - low > 1).any():
        middle = (low + high) // 2
        above = ids_at(middle) > target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    ids = np.concatenate([ids_at(np.clip(low + offset, 0, steps - 1)) for offset in range(-4, 6)])
    assert ids.max() < vocab_size
    impossible = ids[~np.isfinite(logits[ids])]
    assert impossible.size == 0, f"{impossible.size} of {ids.size} are impossible"


@pytest.mark.parametrize("vocab_size", [7, 50])
def test_the_tokens_are_the_same_by_columns(vocab_size):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3, 5, vocab_size)).astype(np.float32)
    uniforms, scale = rng.random((3, 5, 2), np.float32), rng.uniform(0.5, 2, (3, 1)).astype(np.float32)
    greedy = rng.random((3, 5)) < 0.3
    sample = jax.jit(
        partial(sample_categorical, logits, uniforms, scale=scale, greedy=greedy), static_argnames="by_columns"
    )
    (ids, logprobs), by_columns = sample(), sample(by_columns=True)
    np.testing.assert_array_equal(by_columns[0], ids)
    np.testing.assert_allclose(by_columns[1], logprobs, atol=1e-6)


def test_one_pass_draws_the_same_tokens(assume):
    """Counted over a million draws: rounding tips few, to a token whose log-probability is again its own."""
    logits, count = random_logits(1000, share=0.5), 1_000_000
    uniforms = np.random.default_rng(2).random((count, 2), np.float32)
    ids, _ = draw(logits, uniforms)
    assume(sums_at_once=True)
    again, logprobs = jax.jit(lambda *x: draw.__wrapped__(*x))(logits, uniforms)
    assert np.count_nonzero(again != ids) < 1e-5 * count
    np.testing.assert_allclose(logprobs, log_softmax(logits)[again], atol=1e-5)


# ---- truncation

ROWS, V = (2, 3), 12


def allowed(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Sorts one row, and truncates it in the order of Hugging Face: top-k, top-p of what is left, and min-p.

    Returns which tokens stay, and how close top-p and min-p were to deciding otherwise.
    """
    probs = np.exp(log_softmax(logits))
    keep, margin = np.ones(len(probs), bool), np.inf
    if top_k > 0:
        keep &= probs >= np.sort(probs)[::-1][min(top_k, len(probs)) - 1]
    if top_p < 1:
        left = np.where(keep, probs, 0) / probs[keep].sum()
        descending = np.sort(left)[::-1]
        mass = descending.cumsum()
        margin = abs(mass - top_p).min()
        keep &= left >= descending[np.argmax(mass >= top_p)]
    if min_p > 0:
        margin = min(margin, abs(probs / probs.max() - min_p)[probs < probs.max()].min(initial=np.inf))
        keep &= probs >= min(min_p, 1) * probs.max()
    return keep, margin


@jax.jit
def finite_after(logits, truncation):
    return jnp.isfinite(limit_logits(logits, truncation, ROWS))


def per_row(elements, dtype):
    return arrays(dtype, ROWS, elements=elements)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    # Multiples of 1/4, so that ties are common.
    logits=arrays(np.int32, (*ROWS, V), elements=st.integers(-16, 16)).map(lambda x: (x / 4).astype(np.float32)),
    top_k=per_row(st.integers(-1, V + 2), np.int32),
    top_p=per_row(st.floats(1 / 16, 31 / 32, width=32) | st.sampled_from([0.0, 1e-6, 1.0]), np.float32),
    min_p=per_row(st.floats(0.0, 1.0, width=32), np.float32),
)
def test_truncation_equals_sorting(logits, top_k, top_p, min_p):
    keep, margin = zip(
        *(allowed(logits[row], top_k[row], top_p[row], min_p[row]) for row in np.ndindex(ROWS)), strict=True
    )
    assume(min(margin) > 1e-5)  # at a tie between masses, float32 may round either way
    finite = finite_after(logits, Limits(top_k, top_p, min_p))
    np.testing.assert_array_equal(finite, np.reshape(keep, (*ROWS, V)))


# ---- a fake policy: a Markov chain of second order


PROMPTS = PromptTokens(
    np.array([[9, 9, 0], [1, 2, 1], [9, 2, 0]], np.int32),
    np.array([[False, False, True], [True, True, True], [False, True, True]]),
)


def test_sequences_have_their_exact_probabilities():
    vocab_size, eos, tokens, group_size = 3, 2, 3, 30_000
    table = random_table(vocab_size)
    logprobs = log_softmax(table)

    def outcomes(before, last, done=()):
        """Every sequence with its probability."""
        if len(done) == tokens or (done and done[-1] == eos):
            return {done: 1.0}
        return {
            ids: np.exp(logprobs[before, last, token]) * share
            for token in range(vocab_size)
            for ids, share in outcomes(last, token, (*done, token)).items()
        }

    sample = sampler_of(markov_policy(), max_tokens=tokens, eos_ids=(eos,))
    out = sample(table, PROMPTS, row_numbers(3, group_size), jax.random.key(0))
    for prompt, context in enumerate([(0, 0), (2, 1), (2, 0)]):
        expected = outcomes(*context)
        assert sum(expected.values()) == pytest.approx(1)
        lengths = np.asarray(out.completion_mask[prompt]).sum(-1)
        rows = [tuple(ids[:n]) for ids, n in zip(np.asarray(out.completion_ids[prompt]).tolist(), lengths, strict=True)]
        seen = {ids: rows.count(ids) / group_size for ids in set(rows)}
        assert seen.keys() <= expected.keys()
        # 13 outcomes of 30,000 draws: about 0.005 is expected.
        assert sum(abs(expected[ids] - seen.get(ids, 0)) for ids in expected) / 2 < 0.012


def test_completions_hold_what_they_say():
    """Ids, mask, log-probabilities and flags of random rows, each against the definition."""
    vocab_size, tokens, eos_ids, pad_id = 6, 7, (2, 5), 4
    table, policy = random_table(vocab_size), markov_policy()
    sample = sampler_of(policy, max_tokens=tokens, eos_ids=eos_ids, pad_id=pad_id)
    out = sample(table, PROMPTS, row_numbers(3, 40), jax.random.key(0))
    ids, mask = np.asarray(out.completion_ids), np.asarray(out.completion_mask)
    ends = np.isin(ids, eos_ids) & mask
    expected_mask = np.cumsum(ends, axis=-1) - ends == 0  # up to and including the first end
    np.testing.assert_array_equal(mask, expected_mask)
    np.testing.assert_array_equal(out.truncated, ~ends.any(-1))
    assert (ids[~mask] == pad_id).all()
    logits = policy.hidden(table, PROMPTS, ids)
    logprobs = np.take_along_axis(log_softmax(logits), ids[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.sampler_logprobs, np.where(mask, logprobs, 0), atol=1e-5)
    assert out.processed_logprobs is None
    # The draw has rows of every kind: ended by each id, cut, of one token.
    assert {ids[ends].tolist().count(eos) > 0 for eos in eos_ids} == {True}
    assert np.asarray(out.truncated).any()
    assert (mask.sum(-1) == 1).any()


# ---- noise is keyed by key, row and position alone


TABLE, SIX = random_table(10), PROMPTS.take(np.tile(np.arange(3), 2))


@pytest.fixture(scope="module")
def markov_sample():
    """(prompts, rows, key, temperature) -> completions of 12 tokens."""
    sample = sampler_of(markov_policy(), max_tokens=12, eos_ids=())

    def run(prompts, rows, key, temperature=1.0):
        return sample(TABLE, prompts, rows, key, np.broadcast_to(np.float32(temperature), rows.shape))

    return run


def test_noise_folds_row_and_position_into_the_key():
    rows, key = np.array([[3, 0], [7, 2**31 - 1]], np.int32), jax.random.key(3)
    noise = draw_noise(key, jnp.asarray(rows), 4)
    for *row, position in np.ndindex(noise.shape[:-1]):
        folded = jax.random.fold_in(jax.random.fold_in(key, rows[tuple(row)]), position)
        np.testing.assert_array_equal(noise[(*row, position)], jax.random.uniform(folded, (2,)))


@pytest.fixture(scope="module")
def one_prompt_sample(markov_sample):
    """(rows [6, 4], key) -> ids [6, 4, 12], all after the same prompt."""
    prompts = PROMPTS.take(np.zeros(6, int))
    return lambda rows, key: np.asarray(markov_sample(prompts, rows, key).completion_ids)


def test_rows_keys_and_steps_have_separate_noise(one_prompt_sample):
    keys = [jax.random.key(0), jax.random.key(1), step_key(0, 0, 1), step_key(0, 0, 2), step_key(0, 1, 1)]
    ids = np.concatenate([one_prompt_sample(row_numbers(6, 4), key).reshape(24, -1) for key in keys])
    # 120 rows of 12 tokens: two equal ones are a sign of one noise for both.
    assert len(np.unique(ids, axis=0)) == len(ids)


def test_temperature_0_rows_are_greedy_with_unscaled_logprobs(markov_sample):
    temperature = np.resize(np.array([0, 2, 2, 0, 0], np.float32), (6, 4))
    out = markov_sample(SIX, row_numbers(6, 4), jax.random.key(0), temperature)
    ids = np.asarray(out.completion_ids)
    logits = np.asarray(markov_policy().hidden(TABLE, SIX, ids))
    np.testing.assert_array_equal((ids == logits.argmax(-1)).all(-1), temperature == 0)
    scaled = logits / np.where(temperature == 0, 1, temperature)[..., None, None]
    expected = np.take_along_axis(log_softmax(scaled), ids[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.sampler_logprobs, expected, atol=1e-5)


# ---- a tiny decoder

CONFIG = ModelConfig(50, 16, 24, 1, 2, 1, 8)
TOKENS, GROUP = 8, 4
EOS_IDS, PAD_ID = (3, 11), 1
POLICY = decoder_policy(CONFIG)


@pytest.fixture(scope="module")
def params():
    """Weights large enough for distributions that are not flat, and small enough for float32 to compute them well."""
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def prompts():
    """Eight prompts of 1 to 6 tokens."""
    return ragged_prompts(np.random.default_rng(0).integers(1, 7, 8), CONFIG.vocab_size, 6)


@pytest.fixture(scope="module")
def sample():
    return sampler_of(POLICY, max_tokens=TOKENS, eos_ids=EOS_IDS, pad_id=PAD_ID)


@pytest.fixture(scope="module")
def score(params, prompts):
    """(ids, temperature [N, G]) -> what a trainer computes, and the logits after temperature."""

    @jax.jit
    def compute(params, ids, temperature):
        hidden, unembedding = POLICY.hidden(params, prompts, ids), POLICY.unembedding(params)
        logprobs = token_logprobs(hidden, unembedding, ids, temperature=temperature[..., None]).logprobs
        return logprobs, hidden @ unembedding.T / temperature[..., None, None]

    return partial(compute, params)


MIXED = np.linspace(0.4, 1.6, 8 * GROUP, dtype=np.float32).reshape(8, GROUP)
MIXED_K = np.resize(np.array([0, 1, 5, 20], np.int32), (8, GROUP))


SCORED_LIMITS = [
    (0.7, None),
    (MIXED, None),
    (0.7, (5, 1.0, 0.0)),
    (1.3, (0, 0.8, 0.0)),
    (0.9, (0, 1.0, 0.1)),
    (MIXED, (MIXED_K, 0.5 + MIXED / 4, MIXED / 20)),
]


@pytest.mark.parametrize(("temperature", "limits"), SCORED_LIMITS)
def test_scored_logprobs_equal_sampler_logprobs(params, prompts, sample, score, temperature, limits):
    temperature = np.broadcast_to(np.float32(temperature), MIXED.shape)
    if limits is not None:
        dtypes = np.int32, np.float32, np.float32
        limits = [np.broadcast_to(np.asarray(x, dtype), MIXED.shape) for x, dtype in zip(limits, dtypes, strict=True)]
    truncation = None if limits is None else Limits(*limits)
    out = sample(params, prompts, row_numbers(8, GROUP), jax.random.key(1), temperature, truncation)
    ids, mask = np.asarray(out.completion_ids), np.asarray(out.completion_mask)
    logprobs, logits = map(np.asarray, score(ids, temperature))
    deviation = abs(np.expm1(np.where(mask, logprobs - out.sampler_logprobs, 0)))
    # A temperature τ divides logits, so it multiplies their rounding by 1/τ.
    assert (deviation * temperature[..., None]).max() <= 8e-6  # of log-probabilities down to −13
    assert (np.asarray(out.sampler_logprobs)[~mask] == 0).all()
    if limits is None:
        assert out.processed_logprobs is None
        return
    assert (np.asarray(out.processed_logprobs)[~mask] == 0).all()
    for row in np.argwhere(mask):
        n, g, t = row
        keep, _ = allowed(logits[n, g, t], *(x[n, g] for x in limits))
        left = log_softmax(np.where(keep, logits[n, g, t], -np.inf))
        assert out.processed_logprobs[n, g, t] == pytest.approx(left[ids[n, g, t]], abs=1e-4)


@pytest.mark.parametrize(("limits", "size"), [((20, 0.8, 0.1), 20), ((0, 0.8, 0.0), 64), ((0, 0.95, 0.0), 4)])
def test_supports_are_the_tokens_that_truncation_leaves(params, prompts, sample, score, limits, size):
    """With 4 tokens some supports do not fit. They are then their likeliest tokens, and the sampled one."""
    keeping = sampler_of(POLICY, max_tokens=TOKENS, eos_ids=EOS_IDS, pad_id=PAD_ID, support_size=size)
    arguments = params, prompts, row_numbers(8, GROUP), jax.random.key(1), 0.7, Limits(*limits)
    out, plain = keeping(*arguments), sample(*arguments)
    np.testing.assert_array_equal(out.completion_ids, plain.completion_ids)
    mask, support_ids = np.asarray(out.completion_mask), np.asarray(out.support_ids)
    assert (support_ids[~mask] == -1).all()
    logits = np.asarray(score(np.asarray(out.completion_ids), np.broadcast_to(np.float32(0.7), MIXED.shape))[1])
    num_cut = 0
    for n, g, t in np.argwhere(mask):
        keep, margin = allowed(logits[n, g, t], *limits)
        ids, token = support_ids[n, g, t], int(out.completion_ids[n, g, t])
        ids = ids[ids >= 0].tolist()
        assert len(set(ids)) == len(ids)
        assert token in ids
        if margin < 1e-4:
            continue
        expected = np.argsort(np.where(keep, -logits[n, g, t], np.inf))[: min(keep.sum(), size)].tolist()
        num_cut += keep.sum() > size
        assert sorted(ids) == sorted(expected if token in expected else [*expected[:-1], token])
        left = log_softmax(logits[n, g, t][ids])
        assert out.sampler_logprobs[n, g, t] == pytest.approx(left[ids.index(token)], abs=1e-5)
    assert (num_cut > 0) == (size == 4)
    np.testing.assert_allclose(out.processed_logprobs, plain.processed_logprobs, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [96, pytest.param(256, marks=pytest.mark.slow)])
def test_scored_logprobs_equal_sampler_logprobs_of_long_completions(params, prompts, max_tokens):
    """A CPU's cache holds the keys of 96 tokens in three blocks; that of 256 grows."""
    sample = sampler_of(POLICY, max_tokens=max_tokens, eos_ids=(), pad_id=PAD_ID)
    out = sample(params, prompts, row_numbers(8, GROUP), jax.random.key(1))
    hidden = jax.jit(POLICY.hidden)(params, prompts, out.completion_ids)
    scored = token_logprobs(hidden, POLICY.unembedding(params), out.completion_ids, temperature=1.0).logprobs
    np.testing.assert_allclose(scored, out.sampler_logprobs, atol=3e-5)  # rounding of sums, of logits up to 6


def test_batch_group_and_width_change_no_samples(params, prompts, sample):
    rows, key = row_numbers(8, GROUP), jax.random.key(1)
    whole = sample(params, prompts, rows, key, MIXED, None)
    part, members, wide = slice(3, 6), slice(1, 3), ((0, 0), (4, 0))
    others = jax.tree.map(lambda x: np.pad(x[part], wide), prompts)
    other = sample(params, others, rows[part, members], key, MIXED[part, members], None)
    np.testing.assert_array_equal(other.completion_ids, whole.completion_ids[part, members])
    np.testing.assert_allclose(other.sampler_logprobs, whole.sampler_logprobs[part, members], atol=1e-5)
