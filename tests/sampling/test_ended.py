"""Completions that have ended are left behind: nothing changes but the work.

A policy without `select` decodes all of them until the last ends.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import markov_policy, random_table, row_numbers, sampler_of

from grpo_jax.config import recipe
from grpo_jax.data.types import Prompts
from grpo_jax.models import geometry
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.lora import add_adapters
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.sampler import make_sampler
from grpo_jax.rl.types import SAMPLING, noise_of
from grpo_jax.sampling import sampler
from grpo_jax.sampling.categorical import Truncation
from grpo_jax.sampling.sampler import sample_groups
from grpo_jax.tasks.task import Task

V, TOKENS, NUM_PROMPTS, GROUP = 30, 64, 16, 8
ROWS = row_numbers(NUM_PROMPTS, GROUP)
TEMPERATURE = np.linspace(0, 1.5, ROWS.size, dtype=np.float32).reshape(ROWS.shape)  # the first is greedy
LIMITS = Truncation(ROWS % 9, 0.7 + TEMPERATURE / 4, TEMPERATURE / 50)


def random_prompts(num_prompts, vocab_size, width=6):
    """Prompts of 2 to `width` tokens, padded on the left."""
    rng = np.random.default_rng(0)
    mask = np.arange(width) >= width - rng.integers(2, width + 1, (num_prompts, 1))
    return rng.integers(0, vocab_size, mask.shape, np.int32), mask


PROMPTS = random_prompts(NUM_PROMPTS, V)


def both(policy, **options):
    """The sampler, and the one that decodes all completions until the last ends."""
    return sampler_of(policy, **options), sampler_of(policy._replace(select=None), **options)


def assert_same(left, right, temperature=1.0, atol=1e-6):
    """Log-probabilities to `atol` of the logits before temperature: a temperature below 1 multiplies their rounding."""
    colder = np.where(np.asarray(temperature) > 0, np.minimum(temperature, 1), 1)[..., None]
    for name, a, b in zip(left._fields, left, right, strict=True):
        if "logprobs" in name and a is not None:
            np.testing.assert_allclose(a * colder, b * colder, atol=atol)
        else:
            jax.tree.map(np.testing.assert_array_equal, a, b)


# ---- a Markov chain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eos_ids", "tokens", "limits", "longest"),
    [
        ((3, 7, 11), TOKENS, LIMITS, None),
        (range(V), TOKENS, None, 1),
        ((), TOKENS, LIMITS, TOKENS),
        ((3,), 1, None, 1),
    ],
    ids=["most end", "all end at the first token", "none ends", "one token"],
)
def test_ended_completions_that_are_left_behind_change_nothing(eos_ids, tokens, limits, longest):
    samples = both(markov_policy(), max_tokens=tokens, eos_ids=tuple(eos_ids), pad_id=29)
    for seed in range(3):
        given = random_table(V), *PROMPTS, ROWS, jax.random.key(seed), TEMPERATURE, limits
        out, whole = (sample(*given) for sample in samples)
        assert_same(out, whole, TEMPERATURE)
        lengths = np.asarray(out.completion_mask).sum(-1)
        assert longest in (None, lengths.max())


def test_the_completions_that_are_left_are_decoded_alone():
    """Counts the completions of each step, for lengths that are geometric with a mean of about a quarter."""
    counts = []
    policy = markov_policy(lambda step, num_rows: counts.append(int(num_rows)))
    table = np.zeros((16,) * 3, np.float32)
    sample = sampler_of(policy, max_tokens=TOKENS, eos_ids=(0,))
    lengths = np.asarray(sample(table, *PROMPTS, ROWS, jax.random.key(0)).completion_mask).sum(-1)
    jax.effects_barrier()
    assert len(counts) == lengths.max() - 1  # the first token comes from the prompt
    # Those that run, and no more than four times as many, or 8.
    running = [(lengths > step).sum() for step in range(1, lengths.max())]
    assert all(
        few <= count <= max(4 * few, 8) for few, count in zip(running, sorted(counts, reverse=True), strict=True)
    )
    assert sum(counts) < 0.5 * ROWS.size * len(counts)


@pytest.mark.slow
def test_several_runs_at_once_give_what_each_gives():
    """Under vmap a loop goes on until all runs are through it."""
    sample = sampler_of(markov_policy(), max_tokens=TOKENS, eos_ids=(3, 7))
    keys = jax.random.split(jax.random.key(0), 3)
    tables = np.stack([random_table(V, seed) for seed in range(3)])
    at_once = jax.vmap(lambda table, key: sample(table, *PROMPTS, ROWS, key))(tables, keys)
    for run in range(3):
        assert_same(jax.tree.map(lambda x, run=run: x[run], at_once), sample(tables[run], *PROMPTS, ROWS, keys[run]))


@pytest.mark.slow
def test_every_device_leaves_its_own_completions_behind():
    """32 completions on each of 8 devices, whose loops take different numbers of turns."""
    task = Task(None, None, None, None, (3, 7), 0, V)
    sampling = recipe(max_tokens=TOKENS, num_prompts=32, group_size=8).sampling
    wide = Prompts(*random_prompts(32, V), [])
    given = random_table(V), wide, row_numbers(32, 8), np.ones((32, 8), np.float32), noise_of(2, SAMPLING, 0)
    one, eight = (make_sampler(markov_policy(), task, sampling, devices=devices).complete(*given) for devices in (1, 8))
    assert_same(one, eight)


# ---- a decoder

CONFIG = ModelConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)
SHAPE = 8, 4  # few enough to compile soon


def random_numbers(shapes, seed):
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        noise = rng.normal(scale=0.3, size=shape.shape).astype(np.float32)
        return jnp.asarray(1 + noise if path[-1].key == "scale" else noise)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        pytest.param(replace(CONFIG, sliding_window=9), 0, marks=pytest.mark.slow),
        (replace(CONFIG, sliding_window=5, sliding_layers=(1,)), 0),
        pytest.param(replace(CONFIG, num_key_value_heads=2), 2, marks=pytest.mark.slow),
    ],
    ids=["window", "window in one layer", "LoRA, and heads of their own"],
)
def test_a_decoder_says_the_same_with_and_without_the_completions_that_have_ended(config, rank):
    policy = decoder_policy(config)
    params = random_numbers(jax.eval_shape(policy.init, jax.random.key(0)), 0)
    if rank:
        params = add_adapters(params, jax.random.key(0), rank=rank, alpha=4)
        params = params._replace(adapters=random_numbers(params.adapters, 1))
    rows = row_numbers(*SHAPE)
    temperature = np.linspace(0, 1.5, rows.size, dtype=np.float32).reshape(rows.shape)
    limits = Truncation(rows % 9 * 3, 0.7 + temperature / 4, temperature / 50)
    samples = both(policy, max_tokens=TOKENS, eos_ids=tuple(range(3, 9)), pad_id=1)
    different, colder = 0, np.where(temperature > 0, np.minimum(temperature, 1), 1)[..., None]
    for seed in range(6):
        given = params, *random_prompts(SHAPE[0], 50), rows, jax.random.key(seed), temperature, limits
        out, whole = (jax.device_get(sample(*given)) for sample in samples)
        equal = (out.completion_ids == whole.completion_ids).all(-1)
        different += (~equal).sum()
        lengths = whole.completion_mask.sum(-1)
        assert np.sort(lengths, axis=None)[-9] < lengths.max()  # at most 8 go on after that
        for name in ("completion_mask", "truncated"):
            np.testing.assert_array_equal(getattr(out, name)[equal], getattr(whole, name)[equal])
        for name in ("sampler_logprobs", "truncated_logprobs"):
            deviation = abs(getattr(out, name) - getattr(whole, name)) * colder  # a temperature divides logits
            assert deviation[equal].max() <= 1e-5
    # A uniform may lie within rounding of the boundary between two tokens, once in some 100,000 tokens.
    assert different <= 1, f"{different} of {6 * rows.size} completions differ"


@pytest.mark.parametrize(
    "widths", [pytest.param((), marks=pytest.mark.slow), (8,)], ids=["all stay", "those that have ended leave"]
)
def test_a_cache_that_grows_changes_nothing(monkeypatch, assume, widths):
    """Room for one token at first, then for a half of them."""
    policy = decoder_policy(replace(CONFIG, num_key_value_heads=2))
    params = random_numbers(jax.eval_shape(policy.init, jax.random.key(0)), 0)
    given = params, *random_prompts(SHAPE[0], 50), row_numbers(*SHAPE), jax.random.key(0)
    options = {"max_tokens": 21, "eos_ids": tuple(range(3, 9)) if widths else (3,), "pad_id": 1}
    expected = sampler_of(policy, **options)(*given)
    assume(narrows_from=1 if widths else None)
    monkeypatch.setattr(sampler, "rooms_of", lambda max_tokens: (1, max_tokens // 2, max_tokens))
    assert_same(sampler_of(policy, **options)(*given), expected, atol=1e-5)  # the sums of a decoder


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, (1,)], ids=["all", "one of two"])
def test_layers_with_a_window_forget_what_it_does_not_see(layers, monkeypatch):
    """A window of 3: 5 slots give what 21 give, also where room is made in between."""
    config = replace(CONFIG, num_key_value_heads=2, sliding_window=3, sliding_layers=layers)
    policy = decoder_policy(config)
    params = random_numbers(jax.eval_shape(policy.init, jax.random.key(0)), 0)
    prompts = random_prompts(SHAPE[0], 50)
    given = params, *prompts, row_numbers(*SHAPE), jax.random.key(0)
    options = {"max_tokens": 21, "eos_ids": (3,), "pad_id": 1}
    expected = sampler_of(policy, **options)(*given)
    monkeypatch.setattr(geometry, "AT_ONCE", 2)

    def slots(params):
        return [layer.values for layer in policy.prefill(params, *prompts, SHAPE[1], 21)[2][1]]

    assert {x.shape[-2] for x in jax.eval_shape(slots, params)} == ({5} if layers is None else {21, 5})
    assert_same(sampler_of(policy, **options)(*given), expected, atol=1e-5)
    monkeypatch.setattr(sampler, "rooms_of", lambda max_tokens: (4, max_tokens // 2, max_tokens))
    assert_same(sampler_of(policy, **options)(*given), expected, atol=1e-5)


@pytest.mark.slow
def test_prompts_may_be_constants_of_a_program():
    """NumPy prompts that a compiled function closes over, with completions that are left behind."""
    policy = decoder_policy(ModelConfig(8, 8, 16, 1, 2, 1, 4))
    params = jax.jit(policy.init)(jax.random.key(0))
    ids, mask = np.ones((4, 3), np.int32), np.ones((4, 3), bool)

    @jax.jit
    def sample(key):
        rows = jnp.arange(32).reshape(4, 8)
        return sample_groups(policy, params, ids, mask, rows, key, max_tokens=64, eos_ids=(1,))

    assert sample(jax.random.key(1)).completion_mask[..., 0].all()
