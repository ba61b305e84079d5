"""One list of longrope's factors for all texts of a program: how it is chosen, and that it cannot be forgotten.

Dynamic scaling changes longer texts, which are refused.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import load_golden, refused, whole_prompts

from experiments.new_models import config_to_huggingface
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.files.families import config_from_huggingface
from grpo_jax.models.huggingface import Pretrained, for_texts
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import rows_of_texts

CONFIG, PARAMS = load_golden("phi4_mini")  # its original context has 16 tokens
UNKNOWN = replace(CONFIG, longest_text=None)


def pretrained(config):
    return Pretrained(config, None, None, (), Path(), ("first",))


@pytest.mark.parametrize(("before", "longest", "is_long"), [(None, 16, False), (None, 17, True), (20, 5, True)])
def test_the_longest_text_chooses_the_factors(before, longest, is_long):
    chosen = for_texts(pretrained(replace(CONFIG, longest_text=before)), longest)
    assert chosen.config.longest_text == max(longest, before or 0)
    assert {rotation.is_long for rotation in chosen.config.rotations} == {is_long}
    note = f"texts may have {chosen.config.longest_text} tokens, more than the original 16"
    assert [text[: len(note)] for text in chosen.notes[1:]] == [note] * is_long


def test_other_models_stay_as_they_are():
    model = pretrained(load_golden("llama")[0])
    assert for_texts(model, 10**6) is model


def states_of_group(policy, num_completion_tokens, params=PARAMS):
    prompts = whole_prompts(jnp.ones((1, 10), jnp.int32))
    return policy.hidden(params, prompts, jnp.ones((1, 1, num_completion_tokens), jnp.int32))


def states_of_row(policy, width, params=PARAMS):
    ids = np.ones((1, width), np.int32)
    return policy.states(params, rows_of_texts(ids, ids))[0]


def prefill(policy, max_tokens, params=PARAMS):
    return policy.prefill(params, whole_prompts(jnp.ones((1, 10), jnp.int32)), 1, max_tokens)[::2]


def widen(policy, slots, params=PARAMS):
    return policy.widen(prefill(policy, 2, params)[1], slots)


# A function, and the largest size that fits into 16 tokens; a pass leaves out the last token of a completion.
PASSES = [(states_of_group, 7), (states_of_row, 16), (prefill, 6), (widen, 6)]


@pytest.mark.parametrize(("run", "size"), PASSES)
def test_unknown_text_lengths_stop_at_the_original_context(run, size):
    unknown, known = decoder_policy(UNKNOWN), decoder_policy(CONFIG)
    jax.eval_shape(lambda: run(unknown, size))
    jax.eval_shape(lambda: run(known, size + 1))
    with refused("texts of up to 17 tokens .* longest_text"):
        jax.eval_shape(lambda: run(unknown, size + 1))


DYNAMIC = replace(
    load_golden("llama")[0], rope_scaling=RopeScaling("dynamic", 2.0, 16), max_position_embeddings=16, longest_text=None
)


def test_texts_beyond_dynamic_scaling_are_refused():
    assert for_texts(pretrained(DYNAMIC), 16).config == DYNAMIC
    with refused("texts of up to 17 tokens exceed the 16 .* lower max_prompt_tokens"):
        for_texts(pretrained(DYNAMIC), 17)


@pytest.mark.parametrize(("run", "size"), PASSES)
def test_passes_beyond_dynamic_scaling_are_refused(run, size):
    params = load_golden("llama")[1]
    jax.eval_shape(lambda: run(decoder_policy(DYNAMIC), size, params))
    with refused("texts of up to 17 tokens exceed the 16"):
        jax.eval_shape(lambda: run(decoder_policy(DYNAMIC), size + 1, params))


def test_dynamic_scaling_is_saved():
    assert config_from_huggingface(config_to_huggingface(DYNAMIC)) == DYNAMIC
