"""The sampler's program run again on completions that there are."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov import markov_policy, random_table, row_numbers

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.lora import add_adapters
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.scorers import score_completion_tokens
from grpo_jax.rl.types import Batch
from grpo_jax.sampling.categorical import Truncation
from grpo_jax.sampling.sampler import sample_groups

PROMPTS = np.array([[9, 9, 0], [1, 2, 1], [9, 2, 0], [5, 1, 2]], np.int32)
PROMPT_MASK = np.array([[False, False, True], [True, True, True], [False, True, True], [True, True, True]])
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    initializer_range=0.4,
)


def test_a_replay_says_what_the_distribution_says():
    """Of a chain, for ids that were never drawn: log softmax(table / τ) of them, up to and with the end."""
    table, ids = random_table(10), np.random.default_rng(0).integers(0, 10, (4, 3, 5), np.int32)
    sample = partial(sample_groups, markov_policy(), max_tokens=5, eos_ids=(7,), temperature=0.5)
    found = jax.jit(sample)(table, PROMPTS, PROMPT_MASK, row_numbers(4, 3), jax.random.key(0), forced_ids=ids)
    for i, j in np.ndindex(4, 3):
        before, last = PROMPTS[i, 1] if PROMPT_MASK[i, 1] else 0, PROMPTS[i, 2]
        for t, token in enumerate(ids[i, j]):
            logits = table[before, last] / 0.5
            expected = logits[token] - np.log(np.exp(logits).sum())
            assert found.sampler_logprobs[i, j, t] == pytest.approx(expected, abs=1e-5)
            before, last = last, token
            if token == 7:
                break
        assert found.completion_mask[i, j].sum() == t + 1
        assert not found.sampler_logprobs[i, j, t + 1 :].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_tokens", "group_size", "truncation", "lora"),
    [
        ("bfloat16", 12, 3, None, False),
        ("float32", 12, 3, None, False),
        ("bfloat16", 12, 3, Truncation(top_k=9), True),
        # On a CPU a draw of 32 completions of 64 tokens goes on with fewer of them as they end.
        ("float32", 64, 8, None, True),
        ("bfloat16", 64, 8, None, False),
    ],
)
def test_a_replay_of_a_draw_has_its_bits(dtype, num_tokens, group_size, truncation, lora):
    policy = decoder_policy(replace(CONFIG, dtype=dtype))
    params = policy.init(jax.random.key(0))
    if lora:
        params = add_adapters(params, jax.random.key(1), rank=2, alpha=4.0)
        params = params._replace(adapters=jax.tree.map(lambda x: x + 0.1, params.adapters))
    temperature = np.linspace(0.5, 1.5, 4 * group_size, dtype=np.float32).reshape(4, group_size)

    @jax.jit
    def sampled(params, key, forced_ids):
        options = {"eos_ids": (3, 11), "temperature": temperature, "truncation": truncation, "pad_id": 1}
        rows = row_numbers(4, group_size)
        return sample_groups(
            policy, params, PROMPTS, PROMPT_MASK, rows, key, max_tokens=num_tokens, forced_ids=forced_ids, **options
        )

    @jax.jit
    def scored(params):
        batch = Batch(PROMPTS, PROMPT_MASK, drawn.completion_ids, drawn.completion_mask, temperature)
        return jnp.where(drawn.completion_mask, score_completion_tokens(policy, params, batch).logprobs, 0)

    drawn = sampled(params, jax.random.key(2), np.full((4, group_size, num_tokens), -1, np.int32))
    assert len(np.unique(drawn.completion_mask.sum(-1))) > 2
    again = sampled(params, jax.random.key(3), drawn.completion_ids)
    jax.tree.map(np.testing.assert_array_equal, again, drawn)
    moved = jax.tree.map(lambda x: 0.9 * x, params)
    of_moved = sampled(moved, jax.random.key(2), drawn.completion_ids).sampler_logprobs
    np.testing.assert_allclose(of_moved, scored(moved), atol={"float32": 2e-5, "bfloat16": 0.5}[dtype])
    assert np.abs(of_moved - drawn.sampler_logprobs).max() > 0.1
    if dtype == "bfloat16":  # where a pass over whole completions rounds otherwise
        assert np.abs(scored(params) - drawn.sampler_logprobs).max() > 1e-3


def test_forced_tokens_leave_the_others_drawn():
    """With some tokens of a draw forced and the same key, the rest is drawn as before."""
    sample = jax.jit(partial(sample_groups, markov_policy(), max_tokens=6, eos_ids=()))
    arguments = random_table(10), PROMPTS, PROMPT_MASK, row_numbers(4, 3), jax.random.key(0)
    drawn = sample(*arguments, forced_ids=np.full((4, 3, 6), -1, np.int32))
    jax.tree.map(np.testing.assert_array_equal, sample(*arguments), drawn)
    some = np.random.default_rng(0).random((4, 3, 6)) < 0.5
    forced_ids = np.where(some, drawn.completion_ids, -1)
    jax.tree.map(np.testing.assert_array_equal, sample(*arguments, forced_ids=forced_ids), drawn)
