"""Packed completions: the numbers of the padded ones, and no padding in between."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, V
from losses import loss_of

from grpo_jax.config import PPOConfig, recipe, with_options
from grpo_jax.functional.presets import PRESETS
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.pieces import computed_in_pieces, lengths_of, packed, take
from grpo_jax.rl.ppo import add_critic, critic_policy, ppo_method, score
from grpo_jax.rl.scorers import score_completion_tokens
from grpo_jax.rl.types import Batch
from grpo_jax.rl.update import accumulate_grads

N, G, P, T = 3, 4, 5, 6
PLAIN = ModelConfig(V, 16, 24, 2, 4, 2, 4, initializer_range=0.4)
WINDOW = dataclasses.replace(PLAIN, sliding_window=3)
SOME_LAYERS = dataclasses.replace(PLAIN, sliding_window=3, sliding_layers=(1,))
LENGTHS = np.array([[6, 1, 0, 3], [2, 2, 2, 2], [0, 0, 0, 0]])


@functools.cache
def a_batch() -> Batch:
    """Lengths from 0 to T, one prompt without any; another policy's log-probabilities."""
    rng = np.random.default_rng(0)
    shape = (N, G, T)
    return Batch(
        prompt_ids=rng.integers(0, V, (N, P)).astype(np.int32),
        prompt_mask=np.arange(P) >= np.array([[0], [3], [1]]),
        completion_ids=rng.integers(0, V, shape).astype(np.int32),
        completion_mask=np.arange(T) < LENGTHS[..., None],
        temperature=rng.uniform(0.7, 1.3, (N, G)).astype(np.float32),
        sampler_logprobs=rng.uniform(-3, -1, shape).astype(np.float32),
        old_logprobs=rng.uniform(-3, -1, shape).astype(np.float32),
        ref_logprobs=rng.uniform(-3, -1, shape).astype(np.float32),
        advantages=rng.normal(size=(N, G)).astype(np.float32),
    )


@functools.cache
def params_of(config):
    return jax.jit(decoder_policy(config).init)(jax.random.key(0))


compiled = jax.jit(packed, static_argnums=(1, 2))


def rows_of(lengths, width, rows):
    """`packed`, as one program."""
    return compiled(lengths, width, rows)[0]._replace(width=width)


def test_rows_by_hand():
    """Of widths 5, 3, 2, 4 in rows of 8: first 5, then 4 in a row of its own, 3 beside 5, and 2 beside 4."""
    found = rows_of(np.array([[5, 3, 2, 4]]), 8, 1)
    assert found.num_used == 2
    members = np.asarray(found.members)
    assert members[:2, 0].tolist() == [[True, True, False, False], [False, False, True, True]]
    assert not members[2:].any()


@pytest.mark.parametrize("rows", [1, 3, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, 5))])
def test_each_completion_is_in_one_row_and_no_row_is_too_long(rows):
    rng = np.random.default_rng(rows)
    for width in (6, 9, 24):
        lengths = rng.integers(0, 7, (7, 4))
        found = rows_of(lengths, width, rows)
        prompts, members = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (found.prompts, found.members))
        counts = np.zeros_like(lengths)
        for prompt, member in zip(prompts, members, strict=True):
            counts[prompt] += member
            assert lengths[prompt][member].sum() <= width
        assert (counts == (lengths > 0)).all()
        used = members.any(-1)
        assert found.num_used == -(-used.sum() // rows)
        assert not used[int(found.num_used) * rows :].any()


def test_shorter_completions_are_fewer_pieces():
    counts = [int(rows_of(np.full((8, 4), length), 32, 2).num_used) for length in (32, 16, 8, 1, 0)]
    assert counts == [16, 8, 4, 4, 0]


def test_a_length_reaches_to_the_last_token_that_is_learned_from():
    mask = jnp.array([[True, False, True, False], [False] * 4])
    assert lengths_of(mask).tolist() == [3, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.slow),
        pytest.param(WINDOW, id="window", marks=pytest.mark.slow),
        pytest.param(SOME_LAYERS, id="some layers"),
    ],
)
@pytest.mark.parametrize(
    ("width", "rows"), [(12, 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(6, 1), (24, 5)])]
)
def test_packed_scores_are_those_of_padded_completions(config, width, rows):
    policy, params, batch = decoder_policy(config), params_of(config), a_batch()

    @jax.jit
    def both(batch):
        def score(batch):
            return score_completion_tokens(policy, params, batch)

        pieces = packed(lengths_of(batch.completion_mask), width, rows)
        return score(batch), computed_in_pieces(score, batch, pieces)

    plain, in_rows = both(jax.tree.map(jnp.asarray, batch))
    for a, b in zip(plain, in_rows, strict=True):
        np.testing.assert_allclose(
            np.where(batch.completion_mask, b, 0), np.where(batch.completion_mask, a, 0), atol=1e-5
        )
    assert np.abs(in_rows.logprobs)[batch.completion_mask].min() > 0
    assert (np.asarray(in_rows.logprobs)[~batch.completion_mask] == 0).all()


# A preset for each loss; those that differ in advantages and constants alone are the same program.
DIFFERENT_LOSSES = sorted({(a.term, a.aggregation): name for name, a in PRESETS.items()}.values())


# A loss sees log-probabilities and entropies alone, which a table has at once. The decoder computes one loss of tokens
# and one of completions.
@pytest.mark.parametrize(
    ("preset", "is_decoder"),
    [
        ("grpo", True),
        pytest.param("gspo", True, marks=pytest.mark.slow),
        *(pytest.param(preset, False, marks=pytest.mark.slow) for preset in DIFFERENT_LOSSES),
    ],
)
def test_packed_completions_have_the_gradient_of_padded_ones(preset, is_decoder):
    """Relative to the norm of each leaf. Rubbish in what is masked changes nothing either."""
    policy, params = (decoder_policy(PLAIN), params_of(PLAIN)) if is_decoder else (POLICY, PARAMS)
    batch = a_batch()
    loss_fn, aggregation = loss_of(grpo_method(policy, recipe(preset))), PRESETS[preset].aggregation
    spoiled = batch._replace(
        **{
            name: np.where(batch.completion_mask, getattr(batch, name), np.float32(np.nan))
            for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
        }
    )

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(batch, in_rows):
        batch = batch._replace(weights=aggregation(batch.completion_mask, num_completions=N * G))
        pieces = packed(lengths_of(batch.completion_mask), 8, 2) if in_rows else ()
        return accumulate_grads(loss_fn, {"policy": params}, batch, pieces)

    whole = gradient(batch, False)
    for given in (batch, spoiled):
        found = gradient(given, True)
        for a, b in zip(*map(jax.tree.leaves, jax.device_get((whole[0], found[0]))), strict=True):
            assert np.linalg.norm(a) > 0
            assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(a)
        np.testing.assert_allclose(found[1], whole[1], rtol=1e-5)
        for name, (total, weight) in whole[2].means.items():
            np.testing.assert_allclose(found[2].means[name], (total, weight), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_packed_completions_have_the_scores_and_the_gradient_of_ppo(kind):
    policy, critic, config = decoder_policy(PLAIN), critic_policy(PLAIN), with_options(PPOConfig(), critic=kind)
    params = add_critic(PLAIN, params_of(PLAIN), kind)
    params["critic"] = params["critic"]._replace(head=jnp.linspace(-1, 1, PLAIN.hidden_size))
    rng = np.random.default_rng(1)
    batch = a_batch()._replace(
        ref_logprobs=None,  # the KL is in the reward
        advantages=rng.normal(size=(N, G, T)).astype(np.float32),
        returns=rng.normal(size=(N, G, T)).astype(np.float32),
        old_values=rng.normal(size=(N, G, T + 1)).astype(np.float32),
    )
    method, aggregation = ppo_method(policy, critic, config), config.run.loss.objective.aggregation
    assert method.packs

    @functools.partial(jax.jit, static_argnums=1)
    def both(batch, in_rows):
        pieces = packed(lengths_of(batch.completion_mask), 8, 2) if in_rows else ()
        scores = computed_in_pieces(lambda batch: score(policy, critic, params, batch), batch, pieces)
        weighted = batch._replace(weights=aggregation(batch.completion_mask, num_completions=N * G))
        return scores, accumulate_grads(loss_of(method), params, weighted, pieces)

    (scores, whole), (packed_scores, found) = (both(batch, in_rows) for in_rows in (False, True))
    for one, other in zip(scores, packed_scores, strict=True):
        other = np.where(batch.completion_mask, other[..., :T], 0)
        np.testing.assert_allclose(other, np.where(batch.completion_mask, one[..., :T], 0), atol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, jax.device_get((whole[0], found[0]))), strict=True):
        assert np.linalg.norm(a) > 0
        assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(a)
    for name, (total, weight) in whole[2].means.items():
        np.testing.assert_allclose(found[2].means[name], (total, weight), rtol=1e-5, atol=1e-6, err_msg=name)


def test_values_after_completions_are_not_packed():
    reading = with_options(PPOConfig(), bootstrap_truncated=True)
    assert not ppo_method(decoder_policy(PLAIN), critic_policy(PLAIN), reading).packs


def test_context_that_is_not_learned_from_stays_in_the_row():
    """A token that is masked before the last one is still seen by those behind it."""
    policy, params, batch = decoder_policy(PLAIN), params_of(PLAIN), a_batch()
    mask = batch.completion_mask.copy()
    mask[0, 0, 2] = False
    batch = batch._replace(completion_mask=mask)

    @jax.jit
    def both(batch):
        def logprobs(batch):
            return score_completion_tokens(policy, params, batch).logprobs

        return logprobs(batch), computed_in_pieces(logprobs, batch, packed(lengths_of(batch.completion_mask), 8, 1))

    plain, in_rows = both(batch)
    np.testing.assert_allclose(in_rows[0, 0], plain[0, 0], atol=1e-5)


def test_a_batch_of_which_nothing_is_learned_has_the_logs_of_padded_completions():
    """As when all completions are cut off and masked."""
    policy, params = (POLICY, PARAMS)
    nothing = np.zeros((N, G, T), bool)
    batch = a_batch()._replace(completion_mask=nothing, weights=nothing.astype(np.float32))
    loss_fn = loss_of(grpo_method(policy, recipe("grpo")))

    @jax.jit
    def both(batch):
        pieces = packed(lengths_of(batch.completion_mask), 8, 2)
        return [accumulate_grads(loss_fn, {"policy": params}, batch, given) for given in (None, pieces)]

    whole, found = both(batch)
    jax.tree.map(np.testing.assert_array_equal, found, whole)


def test_a_piece_masks_what_it_does_not_compute():
    batch = a_batch()._replace(weights=np.ones((N, G, T), np.float32))
    pieces = rows_of(LENGTHS, 8, 2)
    piece_of = jax.jit(lambda number: take(jax.tree.map(jnp.asarray, batch), pieces, number))
    taken = [jax.device_get(piece_of(number)) for number in range(int(pieces.num_used))]
    assert sum(piece.completion_mask.sum() for piece in taken) == LENGTHS.sum()
    piece = taken[0]
    assert not piece.weights[~piece.completion_mask.any(-1)].any()
    assert piece.packed.shape == (2, 8)
