"""Masks decide what is padding. The padding id, where it is sampled, is a token like any other."""

import jax
import numpy as np
import pytest
from tiny import row_numbers, sampler_of

from experiments.tasks.characters import Characters
from grpo_jax.data.packing import pack
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.grade import decode_groups, grade_completions, readable
from grpo_jax.rl.source import to_batch
from grpo_jax.rl.types import Rollout
from grpo_jax.sampling.sampler import Completions
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.tasks.task import Task

TEXT = Characters("abc")
PAD, EOS = TEXT.pad_id, TEXT.eos_id
POLICY = decoder_policy(ModelConfig(TEXT.vocab_size, 16, 32, 1, 2, 1, 8))
PROMPTS = pad_prompts([TEXT.encode("ab"), TEXT.encode("c")], [{"prompt": "ab"}, {"prompt": "c"}], width=2, pad_id=PAD)
TASK = Task(lambda step: PROMPTS, lambda rows, texts: [0.0] * len(texts), PROMPTS, TEXT.decode, (EOS,), PAD, 5)


@pytest.fixture(scope="module")
def params():
    return jax.jit(POLICY.init)(jax.random.key(0))


def sample(params, pad_id):
    sample = sampler_of(POLICY, max_tokens=6, eos_ids=(EOS,), pad_id=pad_id)
    return jax.device_get(sample(params, PROMPTS.tokens, row_numbers(2, 16), jax.random.key(1), 2.0))


@pytest.fixture(scope="module")
def completions(params) -> Completions:
    return sample(params, PAD)


@pytest.fixture(scope="module")
def inside(completions):
    """Returns places where the padding id was sampled, and another token after it."""
    followed = np.pad(completions.completion_mask[..., 1:], [(0, 0), (0, 0), (0, 1)])
    places = (completions.completion_ids == PAD) & completions.completion_mask & followed
    assert places.any()
    return places


def test_samples_do_not_depend_on_the_padding_id(params, completions, inside):
    other = sample(params, 0)
    np.testing.assert_array_equal(other.completion_mask, completions.completion_mask)
    np.testing.assert_array_equal(
        np.where(other.completion_mask, other.completion_ids, -1),
        np.where(completions.completion_mask, completions.completion_ids, -1),
    )
    np.testing.assert_array_equal(other.sampler_logprobs, completions.sampler_logprobs)


def test_sampled_padding_ids_are_scored_as_sampled(params, completions, inside):
    batch = to_batch(PROMPTS.tokens, np.full((2, 16), 2.0, np.float32), completions)
    scores = jax.jit(lambda params: score_completion_tokens(POLICY, params, batch))(params)
    mask = completions.completion_mask
    np.testing.assert_allclose(np.asarray(scores.logprobs)[mask], completions.sampler_logprobs[mask], atol=1e-5)


def test_sampled_padding_ids_are_part_of_the_text(completions, inside):
    texts = decode_groups(completions, TASK)
    i, j = np.argwhere(inside.any(-1))[0]
    length = int(completions.completion_mask[i, j].sum())
    sampled = completions.completion_ids[i, j, :length].tolist()
    assert list(texts[i][j].ids) == [token for token in sampled if token != EOS]
    assert PAD in texts[i][j].ids
    batch = to_batch(PROMPTS.tokens, np.full((2, 16), 2.0, np.float32), completions)
    rollout = Rollout(PROMPTS, batch, graded=grade_completions(PROMPTS, completions, TASK, TASK.rewards))
    group = readable(rollout, completions, completions.sampler_logprobs, np.zeros((2, 16)), TASK, 1)[i]
    assert group["lengths"][j] == len(group["tokens"][j]) == len(group["logprobs"][j]) == length
    assert "".join(group["tokens"][j]) == texts[i][j]


def test_it_is_learned_from_packed_rows():
    rows = pack([[0], [1]], [[2, PAD, EOS], [PAD, EOS]], width=8)
    assert rows.ids[rows.completion_mask].tolist() == [2, PAD, EOS, PAD, EOS]
    assert (rows.texts > 0).sum() == 7
