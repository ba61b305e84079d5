"""Completions that have ended are left behind: nothing changes but the work.

A policy without `select` decodes all of them until the last ends.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from markov import markov_policy, random_table
from tiny import ragged_prompts, random_params, randomly_adapted, row_numbers, sampler_of, task_of_tokens

from grpo_jax.config import recipe
from grpo_jax.data.prompts import Prompts
from grpo_jax.devices import first_devices
from grpo_jax.functional.products import GPU
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows import geometry
from grpo_jax.rl.interaction import sample_completions
from grpo_jax.rl.source import make_sampler
from grpo_jax.rl.types import SAMPLING, noise_of
from grpo_jax.sampling.sampler import Limits

V, TOKENS, NUM_PROMPTS, GROUP = 30, 64, 16, 8
ROWS = row_numbers(NUM_PROMPTS, GROUP)
TEMPERATURE = np.linspace(0, 1.5, ROWS.size, dtype=np.float32).reshape(ROWS.shape)  # the first is greedy
LIMITS = Limits(ROWS % 9, 0.7 + TEMPERATURE / 4, TEMPERATURE / 50)


def random_prompts(num_prompts, vocab_size, width=6):
    """Returns prompts of 2 to `width` tokens."""
    return ragged_prompts(np.random.default_rng(0).integers(2, width + 1, num_prompts), vocab_size, width)


PROMPTS = random_prompts(NUM_PROMPTS, V)
ACCELERATOR = GPU._replace(narrows_from=TOKENS, grows_from=TOKENS)._asdict()  # for completions this short


def both(policy, **options):
    """The sampler, and the one that decodes all completions until the last ends."""
    return sampler_of(policy, **options), sampler_of(policy._replace(select=None), **options)


def assert_same(left, right, temperature=1.0, atol=1e-6):
    """Compares log-probabilities to `atol` times what a temperature below 1 multiplies rounding with."""
    colder = np.where(np.asarray(temperature) > 0, np.minimum(temperature, 1), 1)[..., None]
    for name, a, b in zip(left._fields, left, right, strict=True):
        if "logprobs" in name and a is not None:
            np.testing.assert_allclose(a * colder, b * colder, atol=atol)
        else:
            jax.tree.map(np.testing.assert_array_equal, a, b)


# ---- a Markov chain


MARKOV_ON_ACCELERATOR = ACCELERATOR | {"is_bound_by_memory": False}


ENDS = [
    ((3, 7, 11), LIMITS, MARKOV_ON_ACCELERATOR),
    pytest.param(range(V), None, {}, marks=pytest.mark.slow),
    pytest.param((), LIMITS, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("eos_ids", "limits", "traits"), ENDS, ids=["most end", "all end at the first token", "none ends"]
)
def test_ended_completions_that_are_left_behind_change_nothing(eos_ids, limits, traits, assume):
    assume(**traits)
    counts = []
    policy = markov_policy(lambda step, num_rows: counts.append(int(num_rows)))
    samples = both(policy, max_tokens=TOKENS, eos_ids=tuple(eos_ids), pad_id=29)
    for seed in range(3):
        inputs = random_table(V), PROMPTS, ROWS, jax.random.key(seed), TEMPERATURE, limits
        out, whole = (sample(*inputs) for sample in samples)
        assert_same(out, whole, TEMPERATURE)
    jax.effects_barrier()
    assert not traits or set(counts) == {128, 32, 8}


def test_the_completions_that_are_left_are_decoded_alone():
    """Counts the completions of each step, for lengths that are geometric with a mean of about a quarter."""
    counts = []
    policy = markov_policy(lambda step, num_rows: counts.append(int(num_rows)))
    table = np.zeros((16,) * 3, np.float32)
    sample = sampler_of(policy, max_tokens=TOKENS, eos_ids=(0,))
    lengths = np.asarray(sample(table, PROMPTS, ROWS, jax.random.key(0)).completion_mask).sum(-1)
    jax.effects_barrier()
    assert len(counts) == lengths.max() - 1  # the first token comes from the prompt
    # Those that run, and no more than four times as many, or 8.
    running = [(lengths > step).sum() for step in range(1, lengths.max())]
    assert all(
        few <= count <= max(4 * few, 8) for few, count in zip(running, sorted(counts, reverse=True), strict=True)
    )
    assert sum(counts) < 0.5 * ROWS.size * len(counts)


@pytest.mark.slow
@pytest.mark.parametrize("traits", [{}, MARKOV_ON_ACCELERATOR], ids=["cpu", "accelerator"])
def test_every_device_leaves_its_own_completions_behind(traits, assume):
    """32 completions on each of 8 devices, whose loops take different numbers of turns."""
    assume(**traits)
    task, counts = task_of_tokens((3, 7), 0, V), []
    policy = markov_policy(lambda step, num_rows: counts.append(int(num_rows)))
    sampling = recipe(max_tokens=TOKENS, num_prompts=32, group_size=8).sampling
    wide = Prompts(random_prompts(32, V), [])
    inputs = random_table(V), wide, row_numbers(32, 8), np.ones((32, 8), np.float32), noise_of(2, SAMPLING, 0)
    one = make_sampler(markov_policy(), task, sampling).complete(*inputs)
    eight = make_sampler(policy, task, sampling, devices=first_devices(8)).complete(*inputs)
    assert_same(one, eight)
    jax.effects_barrier()
    lengths = eight.completion_mask.sum(-1).reshape(8, -1)
    assert set(counts) == {32, 8}
    assert counts.count(32) == sum(np.sort(row)[-9] - 1 for row in lengths)  # at most 8 go on after that
    assert len(counts) == (lengths.max(-1) - 1).sum()


# ---- a decoder

CONFIG = ModelConfig(50, 16, 24, 2, 2, 1, 8)
SHAPE = 8, 4  # few enough to compile soon
GROWS = {"grows_from": 1, "rooms": 2}


DECODERS = [
    pytest.param(replace(CONFIG, sliding_window=9), 0, SHAPE, GROWS, marks=pytest.mark.slow),
    (replace(CONFIG, sliding_window=5, sliding_layers=(1,)), 0, SHAPE, GROWS),
    pytest.param(replace(CONFIG, num_key_value_heads=2), 2, SHAPE, GROWS, marks=pytest.mark.slow),
    pytest.param(replace(CONFIG, num_hidden_layers=1), 0, ROWS.shape, ACCELERATOR, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("config", "rank", "shape", "traits"),
    DECODERS,
    ids=["window", "window in one layer", "LoRA, and more heads", "accelerator"],
)
def test_leaving_completions_and_growing_caches_change_nothing(config, rank, shape, traits, assume):
    policy, params = decoder_policy(config), random_params(config)
    params = randomly_adapted(params, rank) if rank else params
    rows, options = row_numbers(*shape), {"max_tokens": TOKENS, "eos_ids": tuple(range(3, 9)), "pad_id": 1}
    temperature = np.linspace(0, 1.5, rows.size, dtype=np.float32).reshape(rows.shape)
    batches = [(params, random_prompts(shape[0], 50), rows, jax.random.key(seed), temperature) for seed in range(3)]
    whole_sample = sampler_of(policy._replace(select=None), **options)
    expected = [jax.device_get(whole_sample(*batch)) for batch in batches]
    assume(**traits)
    sample = sampler_of(policy, **options)
    different, colder = 0, np.where(temperature > 0, np.minimum(temperature, 1), 1)[..., None]
    for batch, whole in zip(batches, expected, strict=True):
        out = jax.device_get(sample(*batch))
        equal = (out.completion_ids == whole.completion_ids).all(-1)
        different += (~equal).sum()
        lengths = np.sort(whole.completion_mask.sum(-1), axis=None)
        assert lengths[-9] < lengths[-1]  # at most 8 go on after that
        assert traits is GROWS or lengths[-33] < lengths[-9]  # and at most 32 before
        for name in ("completion_mask", "truncated"):
            np.testing.assert_array_equal(getattr(out, name)[equal], getattr(whole, name)[equal])
        deviation = abs(out.sampler_logprobs - whole.sampler_logprobs) * colder  # a temperature divides logits
        assert deviation[equal].max() <= 1e-5
    # A uniform may lie within rounding of the boundary between two tokens, once in some 100,000 tokens.
    assert different <= 1, f"{different} of {3 * rows.size} completions differ"


WIDTHS = [
    (True, {}, {128, 32, 8}),
    (False, {}, {128}),
    (True, ACCELERATOR, {128}),  # most of what is read is the table
]


@pytest.mark.parametrize(("narrow", "traits", "expected"), WIDTHS)
def test_decoding_narrows_only_when_that_reads_less(narrow, traits, expected, assume):
    assume(**traits)
    counts = []
    policy = markov_policy(lambda step, num_rows: counts.append(int(num_rows)))
    task = task_of_tokens((0,), 0, 16)
    sampling = recipe(max_tokens=TOKENS, narrow_decoding=narrow).sampling
    inputs = np.zeros((16,) * 3, np.float32), PROMPTS, ROWS, np.ones(ROWS.shape, np.float32), jax.random.key(0)
    jax.jit(lambda *inputs: sample_completions(policy, task, sampling, *inputs))(*inputs)
    jax.effects_barrier()
    assert set(counts) == expected


@pytest.mark.slow
@pytest.mark.parametrize("layers", [None, (1,)], ids=["all", "one of two"])
def test_window_layers_store_only_visible_tokens(layers, monkeypatch, assume):
    """A window of 3: 5 slots give what 21 give, also where room is made in between."""
    config = replace(CONFIG, num_key_value_heads=2, sliding_window=3, sliding_layers=layers)
    policy, params = decoder_policy(config), random_params(config)
    prompts = random_prompts(SHAPE[0], 50)
    inputs = params, prompts, row_numbers(*SHAPE), jax.random.key(0)
    options = {"max_tokens": 21, "eos_ids": (3,), "pad_id": 1}
    expected = sampler_of(policy, **options)(*inputs)
    monkeypatch.setattr(geometry, "AT_ONCE", 2)

    def slots(params):
        return [layer.values for layer in policy.prefill(params, prompts, SHAPE[1], 21)[2][1]]

    assert {x.shape[-2] for x in jax.eval_shape(slots, params)} == ({5} if layers is None else {21, 5})
    assert_same(sampler_of(policy, **options)(*inputs), expected, atol=1e-5)
    assume(grows_from=1, rooms=3)
    assert_same(sampler_of(policy, **options)(*inputs), expected, atol=1e-5)
