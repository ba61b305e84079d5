"""Pieces of a batch: which there are, and that packed completions and narrow prompts change no number."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, V
from rl_helpers import assert_same_gradient, assert_same_means, placed, ragged_batch
from tiny import random_params, recorder, slow_unless, task_of_tokens, tiny_config

from grpo_jax.config import PPO, recipe, with_options
from grpo_jax.data.prompts import Prompts
from grpo_jax.functional.presets import PRESETS
from grpo_jax.functional.products import CPU, assume_traits
from grpo_jax.models.decoder import heads
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows import pieces as cut
from grpo_jax.models.rows.geometry import PromptTokens, PromptWidths, choose_widths, useful_widths
from grpo_jax.rl import ppo
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_method, make_method_programs
from grpo_jax.rl.scorers import with_ends
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, RewardArrays, noise_of
from grpo_jax.rl.update import loss_of
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch, accumulate_grads

N, G, P, T = 8, 2, 48, 4
WIDTHS = (16, 24, 48)
PROMPT_LENGTHS = np.array([10, 48, 3, 16, 20, 5, 24, 17])
LENGTHS = np.array([[4, 1], [0, 3], [4, 4], [0, 0], [2, 2], [1, 1], [3, 2], [4, 0]])
MODEL = tiny_config(V)
TASK = task_of_tokens((0,), 0, V)


@cache
def a_batch() -> Batch:
    """Prompts of 3 to 48 tokens; one of them has only empty completions. One completion has a token that is not learned
    from, and that the tokens behind it see."""
    batch = ragged_batch((N, G, P, T), V, prompt_lengths=PROMPT_LENGTHS, lengths=LENGTHS)
    batch.completion_mask[0, 0, 1] = False
    noise = np.random.default_rng(1)
    prompt = replace(batch.prompt, widths=PromptWidths((24, P)))
    return batch._replace(prompt=prompt, returns=noise.normal(size=(N, G, T)).astype(np.float32))


# ---- which pieces there are


def num_pieces(prompts, tokens):
    """The number of pieces of up to 1,024 tokens, for prompts with one completion each."""
    pieces, rest = divmod(prompts, cut.choose_piece(prompts, 0, 1, tokens, piece_tokens=1_024).rows)
    assert not rest
    return pieces


def test_pieces_divide_minibatches_within_the_token_limit():
    for prompts in (1, 2, 6, 7, 12, 32):
        pieces = [num_pieces(prompts, tokens) for tokens in (1, 50, 100, 300, 1_000, 3_000)]
        assert all(prompts % count == 0 for count in pieces)
        assert pieces == sorted(pieces)  # longer texts, more pieces
        assert (pieces[0], pieces[-1]) == (1, prompts)  # all at once, and one by one
    assert num_pieces(32, 256) == 8
    assert num_pieces(32, 257) == 16
    assert (num_pieces(32, 64), num_pieces(32, 65)) == (1, 4)  # 2,048 tokens stay whole


ROW_SHAPES = [
    ((4, 16, 8, 128), (128, 4)),  # 1,040 tokens each. Rows of one completion are 8 · 144 = 1,152. 4 a piece
    ((4, 32, 8, 128), (256, 2)),  # 1,056. Rows of one are 1,280, those of two 4 · 288 = 1,152. 2 a piece
    ((4, 64, 16, 64), None),  # rows of eight would do, at 2 · 576 tokens for 1,088, but not those of two
    ((4, 512, 8, 64), None),  # prompts that are long compared with their completions are computed once
    ((4, 16, 8, 1_024), (1_024, 1)),  # long completions have a row each: 8 · 1,040 tokens for 8,208
    ((2, 4, 4, 8), None),  # all fits in one piece
    ((4, 250, 8, 256), (1_024, 1)),  # two rows of four long completions are 2,548 tokens for 2,298
]


@pytest.mark.parametrize(("prompts", "expected"), ROW_SHAPES)
def test_the_shape_of_rows_by_hand(prompts, expected):
    """With pieces of about 768 tokens. Without padding, packing may cost 12% more tokens at most."""
    shape = cut.choose_piece(*prompts, piece_tokens=CPU.piece_tokens)
    assert ((shape.width, shape.rows) if shape.is_packed else None) == expected


PIECES = [
    (1_024, cut.PieceShape(8, 1, 128, True)),
    (512, cut.PieceShape(4, 1, 128, True)),
    (5_000, cut.PieceShape(4, 8, 128)),
]


@pytest.mark.parametrize(("piece_tokens", "expected"), PIECES)
def test_batches_of_several_pieces_are_packed(piece_tokens, expected):
    assert cut.choose_piece(4, 16, 8, 128, piece_tokens=piece_tokens) == expected


def test_widths_minimise_padding_and_skip_small_savings():
    choose = partial(choose_widths, most=3)
    assert choose([16, 16, 64, 16]) == (16, 64)  # with only 64 there would be 3 · 48 tokens of padding
    assert choose([32, 16, 32, 64, 16]) == (16, 32, 64)
    assert choose([7]) == (7,)
    assert choose([12, 12, 20]) == (16, 20)  # 16 is the narrowest
    lengths = [16, 32, 32, 48, 64]
    assert [choose_widths(lengths, most=most) for most in (2, 4)] == [(32, 64), (16, 32, 48, 64)]
    # With 100 tokens of completions 48 instead of 64 saves 10%, and 60 saves 2%.
    assert useful_widths((60, 64), 64, 100) == (64,)
    assert useful_widths((48, 64), 64, 100) == (48, 64)
    assert useful_widths((), 64, 100) == (64,)


def test_pieces_of_several_widths_by_hand():
    """Widths 16, 24 and 48 hold 4, 3 and 1 prompts. Pieces of 1, 2 and 4 prompts: the first has the prompt of 48
    tokens; two have those of 20, 24 and 17 and one shorter prompt; and the last has the other three."""
    pieces = cut.by_prompts(N, 8, cut.Sorting(jnp.asarray(PROMPT_LENGTHS), WIDTHS, (4, 2, 1)))
    assert [x.prompt_width for x in pieces] == [48, 24, 16]
    assert [int(x.num_used) for x in pieces] == [1, 2, 1]
    assert pieces[0].prompts[0].tolist() == [1]
    assert pieces[1].prompts[:2].tolist() == [[4, 6], [7, 0]]
    assert pieces[2].prompts[0, :3].tolist() == [2, 3, 5]
    assert pieces[2].members[0, :, 0].tolist() == [True, True, True, False]
    assert cut.take(a_batch(), pieces[1], 0).prompt.ids.shape == (2, 24)


compiled = jax.jit(cut.packed, static_argnums=(1, 2))


def rows_of(lengths, width, rows):
    """`packed`, as one program."""
    return compiled(lengths, width, rows)[0]._replace(width=width)


def test_packed_rows_by_hand():
    """Of widths 5, 3, 2, 4 in rows of 8: first 5, then 4 in a row of its own, 3 next to 5, and 2 next to 4."""
    actual = rows_of(np.array([[5, 3, 2, 4]]), 8, 1)
    assert actual.num_used == 2
    members = np.asarray(actual.members)
    assert members[:2, 0].tolist() == [[True, True, False, False], [False, False, True, True]]
    assert not members[2:].any()
    counts = [int(rows_of(np.full((8, 4), length), 32, 2).num_used) for length in (32, 16, 8, 1, 0)]
    assert counts == [16, 8, 4, 4, 0]


@pytest.mark.parametrize(("rows", "width"), [(1, 9), (3, 6), (3, 24)])
def test_each_completion_fits_into_exactly_one_row(rows, width):
    lengths = np.random.default_rng(rows).integers(0, 7, (7, 4))
    actual = rows_of(lengths, width, rows)
    prompts, members = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (actual.prompts, actual.members))
    counts = np.zeros_like(lengths)
    for prompt, member in zip(prompts, members, strict=True):
        counts[prompt] += member
        assert lengths[prompt][member].sum() <= width
    assert (counts == (lengths > 0)).all()
    used = members.any(-1)
    assert actual.num_used == -(-used.sum() // rows)
    assert not used[int(actual.num_used) * rows :].any()


def test_a_piece_masks_what_it_does_not_compute():
    batch = a_batch()._replace(weights=np.ones((N, G, T), np.float32))
    lengths = cut.lengths_of(batch.completion_mask)
    assert lengths.tolist() == LENGTHS.tolist()  # up to the last token that is learned from
    pieces = rows_of(lengths, 8, 2)
    piece_of = jax.jit(lambda number: cut.take(jax.tree.map(jnp.asarray, batch), pieces, number))
    taken = [jax.device_get(piece_of(number)) for number in range(int(pieces.num_used))]
    assert sum(piece.completion_mask.sum() for piece in taken) == batch.completion_mask.sum()
    piece = taken[0]
    assert not piece.weights[~piece.completion_mask.any(-1)].any()
    assert piece.layout.ids.shape == (2, 1, 8)


# ---- the numbers of the whole


def of_grpo(preset="grpo", policy=None, params=None):
    """(method, models, scores of a batch) of a policy, by default a decoder."""
    policy = decoder_policy(MODEL) if policy is None else policy
    params = random_params(MODEL) if params is None else params
    return grpo_method(policy, recipe(preset)), {"policy": params}, partial(score_completion_tokens, policy, params)


def of_decoder(**changes):
    config = replace(MODEL, **changes)
    return of_grpo(policy=decoder_policy(config), params=random_params(config))


def of_ppo(kind):
    """The KL is in the reward, so that the loss reads no reference."""
    policy, critic = decoder_policy(MODEL), ppo.critic_policy(MODEL)
    models = ppo.add_critic(MODEL, random_params(MODEL), kind)
    models["critic"] = models["critic"]._replace(head=jnp.linspace(-1, 1, MODEL.hidden_size))
    method = make_method({"policy": policy, "critic": critic}, with_options(PPO, critic=kind))
    return method, models, partial(ppo.score, policy, critic, models)


PACKED, NARROW, BOTH = "packed", "widths", "packed widths"
# A preset for each loss; those that differ only in advantages and constants are the same program. A loss sees only
# log-probabilities and entropies, which a table has at once.
LOSSES = sorted({(a.term, a.aggregation): name for name, a in PRESETS.items()}.values())
CASES = {
    "packed": (PACKED, of_grpo),
    "widths": (NARROW, of_grpo),
    "both": (BOTH, of_grpo),
    "gspo": (PACKED, partial(of_grpo, "gspo")),
    "window": (PACKED, partial(of_decoder, sliding_window=3)),
    "some layers": (PACKED, partial(of_decoder, num_hidden_layers=2, sliding_window=3, sliding_layers=(1,))),
    "own critic": (PACKED, partial(of_ppo, "own")),
    "shared critic": (PACKED, partial(of_ppo, "shared")),
    **{f"table {preset}": (PACKED, partial(of_grpo, preset, POLICY, PARAMS)) for preset in LOSSES},
}


def pieces_of(kind, method, batch):
    if kind == PACKED:
        return cut.packed(cut.lengths_of(batch.completion_mask), 8, 2)
    if kind == NARROW:
        return cut.by_prompts(N, N, cut.Sorting(jnp.sum(batch.prompt.mask, axis=-1), (24, P), (1, 1)))
    return cut.choose_pieces(batch, piece_tokens=40)


def whole_vocabulary():
    """The KL over the whole vocabulary, from a reference that is not the policy."""
    policy, params = decoder_policy(MODEL), random_params(MODEL)
    method = grpo_method(policy, recipe(divergence="full", kl_coef=0.3))
    reference = jax.tree.map(lambda x: 1.1 * x, params)
    terms = [lambda models, *rest, term=term: term(models | {"reference": reference}, *rest) for term in method.terms]
    return method._replace(terms=tuple(terms)), {"policy": params}, partial(score_completion_tokens, policy, params)


CASES["whole vocabulary"] = (PACKED, whole_vocabulary)


def summed(method, models, weighted, pieces):
    """The sums (gradients, loss and metrics) and the maxima of a batch in these pieces."""
    return accumulate_grads(partial(loss_of, method), lambda _: pieces, ((None, {}), models), weighted)


@pytest.mark.parametrize("name", slow_unless(("both",), CASES))
def test_pieces_have_scores_and_gradient_of_the_whole(name):
    kind, make = CASES[name]
    method, models, score = make()
    batch = jax.tree.map(jnp.asarray, a_batch())
    if "critic" in models:
        batch = batch._replace(ref_logprobs=None)

    @partial(jax.jit, static_argnums=1)
    def both(batch, in_pieces):
        pieces = pieces_of(kind, method, batch) if in_pieces else ()
        weighted = batch._replace(weights=method.aggregation(batch.completion_mask, num_completions=N * G))
        return cut.computed_in_pieces(score, batch, pieces), summed(method, models, weighted, pieces)

    scores, ((gradient, loss, means), _) = jax.device_get(both(batch, False))
    mask = batch.completion_mask
    spoiled = {
        x: jnp.where(mask, getattr(batch, x), jnp.nan) for x in ("old_logprobs", "sampler_logprobs", "old_entropy")
    }
    for each in (batch, batch._replace(**spoiled)):
        actual, ((other, other_loss, other_means), _) = jax.device_get(both(each, True))
        for x, y in zip(jax.tree.leaves(scores), jax.tree.leaves(actual), strict=True):
            x, y = (np.where(mask, array[..., :T], 0) for array in (x, y))
            assert np.abs(x[mask]).max() > 0
            np.testing.assert_allclose(y, x, atol=1e-5)
        assert_same_gradient(gradient, other, 5e-6)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
        assert_same_means(means, other_means)


def test_fully_masked_batches_log_the_same_in_pieces():
    """As when all completions are cut off and masked."""
    nothing = np.zeros((N, G, T), bool)
    batch = a_batch()._replace(completion_mask=nothing, weights=nothing.astype(np.float32))
    method, models, _ = of_grpo(policy=POLICY, params=PARAMS)

    @jax.jit
    def both(batch):
        kinds = [(), pieces_of(PACKED, method, batch)]
        return [summed(method, models, batch, pieces) for pieces in kinds]

    jax.tree.map(np.testing.assert_array_equal, *both(batch))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"parallel": "mesh", "fsdp": 2}])
def test_pieces_on_two_devices_keep_the_gradient(options):
    gradients, (method, models, _) = [], of_grpo()
    method = method._replace(optimizer=recorder(1))
    for widths, more in ((), {}), (WIDTHS, {"devices": 2} | options):
        config = recipe(num_prompts=N, group_size=G, max_tokens=T, piece_tokens=64, **more)
        programs = make_method_programs(method, decoder_policy(MODEL), TASK, config)
        noise = np.random.default_rng(2).normal(size=(N, G)).astype(np.float32)
        batch = a_batch()._replace(prompt=replace(a_batch().prompt, widths=PromptWidths(widths)))
        start = placed(programs, models, batch, RewardArrays(noise, np.ones((N, G), bool)))
        gradients.append(start.learned(programs)[0].opt_state.gradients)
    assert_same_gradient(*gradients, 2e-6)


def test_tokens_are_those_of_the_full_width():
    """Three draws, of which the last one has only short prompts and is sampled at a width of 24.

    At each width the prompts are computed in pieces of this width and narrower ones.
    """
    sampling = recipe(num_prompts=2, group_size=G, max_tokens=T).sampling
    policy, params, noise = decoder_policy(MODEL), random_params(MODEL), np.random.default_rng(0)
    whole, narrow = (make_sampler(policy, TASK, sampling) for _ in range(2))
    for longest in (48, 30, 20):
        mask = np.arange(P) >= P - np.array([[longest], [5]])
        prompt = PromptTokens(noise.integers(0, V, (2, P)).astype(np.int32), mask)
        narrower = replace(prompt, widths=PromptWidths(WIDTHS, WIDTHS))
        inputs = completion_numbers(sampling), group_temperatures(sampling), noise_of(0, SAMPLING, longest)
        with assume_traits(piece_tokens=16):
            one, other = (
                sampler.complete(params, Prompts(tokens, []), *inputs)
                for sampler, tokens in ((whole, prompt), (narrow, narrower))
            )
        assert (one.completion_ids == other.completion_ids).all()
        np.testing.assert_allclose(one.sampler_logprobs, other.sampler_logprobs, atol=1e-5)
    assert narrow.program._cache_size() == 2


def test_packed_completions_have_the_values_after_their_ends():
    _, models, score = of_ppo("own")

    @jax.jit
    def both(batch):
        batch = with_ends(batch)
        pieces = cut.packed(cut.lengths_of(batch.completion_mask), 10, 2)
        values = heads.values(decoder_policy(MODEL), models["critic"], batch.prompt, *batch[1:3])
        return cut.computed_in_pieces(score, batch, pieces)["end_values"], values

    actual, values = both(jax.tree.map(jnp.asarray, a_batch()))
    expected = np.take_along_axis(np.asarray(values), LENGTHS[..., None], axis=-1)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_models_may_read_prompts_beyond_tokens():
    """A model that only repeats a number, which comes with each prompt, when it samples and when it scores."""

    def states(params, rows):
        return jnp.broadcast_to(repeated(rows.prompt)[:, None, None], (*rows.ids.shape, V)), None

    def repeated(prompt):
        return 50 * jax.nn.one_hot(prompt.extras, V)

    def prefill(params, prompt, group_size, max_tokens):
        def decode(cache, ids, step):
            return jnp.broadcast_to(cache[:, None], (*ids.shape, V)), cache

        return repeated(prompt), decode, repeated(prompt)

    policy, numbers = Policy(None, lambda params: params, states, prefill), np.arange(N, dtype=np.int32) % V
    sampling = recipe(num_prompts=N, group_size=G, max_tokens=T).sampling
    prompt = replace(a_batch().prompt, extras=numbers)
    inputs = completion_numbers(sampling), group_temperatures(sampling), noise_of(0, SAMPLING, 0)
    batch, _ = make_sampler(policy, TASK, sampling).sample(jnp.eye(V), Prompts(prompt, []), *inputs)
    ended = np.asarray(batch.completion_mask)
    assert (np.asarray(batch.completion_ids) == numbers[:, None, None])[ended].all()

    @jax.jit
    def in_pieces(batch):
        pieces = cut.packed(cut.lengths_of(batch.completion_mask), 8, 2)
        return cut.computed_in_pieces(partial(score_completion_tokens, policy, jnp.eye(V)), batch, pieces)

    scores = in_pieces(batch)
    np.testing.assert_allclose(scores.logprobs, 0, atol=1e-5)
