"""Supports that the trainer computes for the completions of a server: compared with those that our sampler keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from server import Server
from test_runs_through_engines import EOS, POLICY, PRETRAINED, TASK, scores

from grpo_jax.config import EngineOptions, recipe, with_options
from grpo_jax.devices import ONE_DEVICE
from grpo_jax.engines.sampler import sampler_of, seed_of
from grpo_jax.engines.supports import make_add_supports, support_of
from grpo_jax.errors import Interruption
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, noise_of

CONFIG = recipe(steps=1, num_prompts=4, group_size=4, max_tokens=6, support="sampler", temperature=0.8)
LIMITS = [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.9, "support_size": 2}]
ROUNDING = 1e-3


@pytest.fixture(scope="module")
def params():
    return jax.jit(POLICY.init)(jax.random.key(0))


def inputs_of(config):
    return TASK.prompts(0), completion_numbers(config.sampling), group_temperatures(config.sampling)


def sample(params, config, prompts, *arrays):
    return make_sampler(POLICY, TASK, config.sampling).complete(params, prompts, *arrays, noise_of(0, SAMPLING, 0))


def reported(out, logprobs):
    """Completions as a server reports them, which names no supports."""
    return out._replace(sampler_logprobs=logprobs, processed_logprobs=None, support_ids=None)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_supports_are_those_of_the_sampler(params, limits):
    config = with_options(CONFIG, **limits)
    prompts, numbers, temperature = inputs_of(config)
    own = sample(params, config, prompts, numbers, temperature)
    add = make_add_supports(POLICY, config.sampling, ONE_DEVICE, ROUNDING)
    out, differences = add(params, prompts.tokens, temperature, reported(own, own.processed_logprobs))
    is_sure = own.completion_mask & ~np.asarray(out.is_border)
    assert is_sure.sum() > 0.9 * own.completion_mask.sum()
    np.testing.assert_array_equal(np.sort(out.support_ids)[is_sure], np.sort(own.support_ids)[is_sure])
    np.testing.assert_allclose(out.sampler_logprobs[is_sure], own.sampler_logprobs[is_sure], atol=1e-5)
    assert np.max(differences[is_sure]) < 1e-5


BORDERS = {
    "two tokens at the edge of top-p": ([0.5, 0.3, 0.2], {"top_p": 0.8}, True),
    "tokens inside and outside of top-p": ([0.5, 0.3, 0.2], {"top_p": 0.7}, False),
    "two close tokens at the edge of top-k": ([0.5, 0.25001, 0.24999], {"top_k": 2}, True),
    "different tokens at the edge of top-k": ([0.5, 0.3, 0.2], {"top_k": 2}, False),
    "a token at the edge of min-p": ([0.5, 0.25, 0.25], {"min_p": 0.5}, True),
    "no token at the edge of min-p": ([0.5, 0.25, 0.25], {"min_p": 0.4}, False),
    "min-p comes first": ([0.6, 0.3, 0.1], {"min_p": 0.2, "top_p": 0.65}, False),
}


@pytest.mark.parametrize("case", BORDERS)
def test_tokens_at_the_border_are_counted(case):
    probs, limits, is_border = BORDERS[case]
    sampling = with_options(CONFIG, **limits).sampling
    *_, computed = support_of(jnp.log(jnp.array(probs)), jnp.array(0), sampling, ROUNDING)
    assert computed == is_border


def test_tokens_outside_supports_have_finite_probabilities():
    sampling = with_options(CONFIG, top_k=2).sampling
    ids, logprob, kept, is_border = support_of(jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.array(2), sampling, ROUNDING)
    assert 2 in ids
    assert np.isfinite([logprob, kept]).all()
    assert is_border


@pytest.mark.parametrize("is_processed", [True, False])
def test_log_probabilities_before_truncation_end_the_run(params, is_processed):
    config = with_options(CONFIG, top_p=0.6)
    prompts, numbers, temperature = inputs_of(config)
    own = sample(params, config, prompts, numbers, temperature)
    whole = sample(params, with_options(config, support="vocabulary"), prompts, numbers, temperature)
    logprobs = own.processed_logprobs if is_processed else whole.sampler_logprobs
    answers = {
        seed_of(noise_of(0, SAMPLING, 0), numbers[place]): tuple(
            x[place][own.completion_mask[place]].tolist() for x in (own.completion_ids, logprobs)
        )
        for place in np.ndindex(4, 4)
    }
    requests = []

    def answer(folder, body):
        requests.append(body)
        return answers[body["seed"]]

    server = Server(answer, TASK.decode, (EOS,), score=scores(POLICY, lambda folder: params, None))
    try:
        sampler = sampler_of(EngineOptions((server.url,)), PRETRAINED, TASK, config, note=print)
        arguments = params, prompts, numbers, temperature, noise_of(0, SAMPLING, 0)
        if is_processed:
            np.testing.assert_array_equal(sampler.complete(*arguments).completion_ids, own.completion_ids)
            assert {(body["top_p"], body["top_k"], body["min_p"]) for body in requests} == {(0.6, -1, 0.0)}
        else:
            with pytest.raises(Interruption, match=r"after truncation differ .* --logprobs-mode processed_logprobs"):
                sampler.complete(*arguments)
    finally:
        server.stop()
