"""Prompts of several widths: the numbers of one width for all, with less padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import V
from losses import loss_of

from grpo_jax.config import recipe
from grpo_jax.data.types import Prompts, choose_widths, useful_widths
from grpo_jax.devices import Mesh, compiled, size
from grpo_jax.functional import token_mean_weights
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.optimizer import init_state
from grpo_jax.rl.pieces import PromptWidths, by_prompts, choose_pieces, computed_in_pieces, take
from grpo_jax.rl.scorers import score_completion_tokens
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, Batch, noise_of
from grpo_jax.rl.update import accumulate_grads, train_step
from grpo_jax.tasks.task import Task

N, G, P, T = 8, 2, 48, 4
WIDTHS = (16, 24, 48)
LENGTHS = np.array([10, 48, 3, 16, 20, 5, 24, 17])
MODEL = ModelConfig(V, 16, 24, 2, 4, 2, 4, initializer_range=0.1)
POLICY = decoder_policy(MODEL)
PARAMS = jax.jit(POLICY.init)(jax.random.key(0))


def a_batch(full: bool = False) -> Batch:
    """Prompts of 3 to 48 tokens; completions of full length, or of any length."""
    rng = np.random.default_rng(0)
    shape = (N, G, T)
    lengths = np.full(shape[:2], T) if full else rng.integers(0, T + 1, shape[:2])
    mask = np.arange(T) < lengths[..., None]
    batch = Batch(
        prompt_ids=rng.integers(0, V, (N, P)).astype(np.int32),
        prompt_mask=np.arange(P) >= P - LENGTHS[:, None],
        completion_ids=rng.integers(0, V, shape).astype(np.int32),
        completion_mask=mask,
        temperature=np.ones((N, G), np.float32),
        sampler_logprobs=rng.uniform(-3, -1, shape).astype(np.float32),
        old_logprobs=rng.uniform(-3, -1, shape).astype(np.float32),
        ref_logprobs=rng.uniform(-3, -1, shape).astype(np.float32),
        advantages=rng.normal(size=(N, G)).astype(np.float32),
    )
    return jax.tree.map(jnp.asarray, batch)


def test_widths_have_the_least_padding():
    """Three widths leave no padding here. With only 64 it would be 3 · 48 = 144 tokens in the first case."""
    assert choose_widths([16, 16, 64, 16]) == (16, 64)
    assert choose_widths([32, 16, 32, 64, 16]) == (16, 32, 64)
    assert choose_widths([7]) == (7,)
    # 12 is below the narrowest width of 16
    assert choose_widths([12, 12, 20]) == (16, 20)


def test_widths_that_save_little_are_left_out():
    """Beside 100 tokens of completions 48 instead of 64 saves 10%, and 60 saves 2%."""
    assert useful_widths((60, 64), 64, 100) == (64,)
    assert useful_widths((48, 64), 64, 100) == (48, 64)
    assert useful_widths((), 64, 100) == (64,)


def test_pieces_by_hand():
    """Widths 16, 24 and 48 hold 4, 3 and 1 prompts. Pieces of 1, 2 and 4 prompts: the first has the prompt of 48
    tokens; two have those of 20, 24 and 17 and one shorter prompt; and the last has the other three."""
    sorting = PromptWidths(jnp.asarray(LENGTHS), WIDTHS, (4, 2, 1))
    pieces = by_prompts(N, 8, sorting)
    assert [x.prompt_width for x in pieces] == [48, 24, 16]
    assert [int(x.num_used) for x in pieces] == [1, 2, 1]
    assert pieces[0].prompts[0].tolist() == [1]
    assert pieces[1].prompts[:2].tolist() == [[4, 6], [7, 0]]
    assert pieces[2].prompts[0, :3].tolist() == [2, 3, 5]
    assert pieces[2].members[0, :, 0].tolist() == [True, True, True, False]
    assert take(a_batch(), pieces[1], 0).prompt_ids.shape == (2, 24)


@pytest.mark.parametrize("packs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_and_scores_are_those_of_one_width(packs):
    method, batch = grpo_method(POLICY, recipe()), a_batch()._replace(old_logprobs=None)
    config = recipe(piece_tokens=40 if packs else 64)

    @functools.partial(jax.jit, static_argnums=1)
    def both(batch, widths):
        batch = batch._replace(weights=token_mean_weights(batch.completion_mask))
        pieces = choose_pieces(method._replace(packs=packs), config, batch, widths) if widths else ()
        scores = computed_in_pieces(lambda piece: score_completion_tokens(POLICY, PARAMS, piece), batch, pieces)
        return accumulate_grads(loss_of(method), {"policy": PARAMS}, batch, pieces), scores

    (whole, scores), (found, more) = both(batch, ()), both(batch, WIDTHS)
    for a, b in zip(jax.tree.leaves(whole[0]), jax.tree.leaves(found[0]), strict=True):
        assert jnp.linalg.norm(a) > 0
        assert jnp.linalg.norm(a - b) <= 1e-6 * jnp.linalg.norm(a)
    for name, (total, weight) in whole[2].means.items():
        np.testing.assert_allclose(found[2].means[name], (total, weight), rtol=1e-5, atol=1e-6, err_msg=name)
    for a, b in zip(scores[:2], more[:2], strict=True):
        np.testing.assert_allclose(*(np.where(batch.completion_mask, x, 0) for x in (b, a)), atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, Mesh(fsdp=2)])
def test_devices_have_the_gradient_of_one(devices):
    method, batch, config = grpo_method(POLICY, recipe()), a_batch(), recipe(piece_tokens=64)

    def gradient(devices, widths):
        def step(state, batch):
            moved, _ = train_step(
                state,
                None,
                batch,
                loss_fn=lambda trained, others, piece: loss_of(method)(trained, piece),
                weights_of=token_mean_weights,
                optimizer=optax.trace(decay=0.0),
                pieces=lambda rows: choose_pieces(method, config, rows, widths),
                devices=devices,
            )
            return moved.opt_state.trace

        return compiled(step, devices=devices)(init_state({"policy": PARAMS}, optax.trace(decay=0.0)), batch)

    assert size(devices) == 2
    for a, b in zip(*map(jax.tree.leaves, (gradient(1, ()), gradient(devices, WIDTHS))), strict=True):
        assert jnp.linalg.norm(a - b) <= 1e-6 * jnp.linalg.norm(a)


def test_tokens_are_those_of_the_full_width():
    """Three draws, of which the last one has only short prompts and is sampled at a width of 24."""
    sampling = recipe(num_prompts=2, group_size=G, max_tokens=T).sampling
    rng = np.random.default_rng(0)
    task = Task(lambda step: None, lambda *_: [], None, str, (0,), 0, V)  # type: ignore[arg-type]
    narrow = make_sampler(POLICY, task._replace(batch_widths=WIDTHS), sampling)
    for longest in (48, 30, 20):
        mask = np.arange(P) >= P - np.array([[longest], [5]])
        prompts = Prompts(rng.integers(0, V, (2, P)).astype(np.int32), mask, [])
        given = prompts, completion_numbers(sampling), group_temperatures(sampling), noise_of(0, SAMPLING, longest)
        one, other = (sampler.complete(PARAMS, *given) for sampler in (make_sampler(POLICY, task, sampling), narrow))
        assert (one.completion_ids == other.completion_ids).all()
        np.testing.assert_allclose(one.sampler_logprobs, other.sampler_logprobs, atol=1e-5)
    assert narrow.program is not None
    assert narrow.program._cache_size() == 2
