"""How often does a mixture of experts send a token to different experts in training than in sampling?

A random model with the shape of a small Qwen3-MoE samples completions. The decode program and the trainer's forward
pass then process the same tokens, and report the experts of each token in each layer. Both programs have the same
weights and differ by rounding. For float32 and bfloat16, the table shows:

- the share of places (a token in a layer) whose set of experts differs
- the share of tokens with such a place
- the mismatch of log-probabilities over all tokens, and over the tokens without such a place

The run takes a minute on two CPU cores.

  python -m experiments.benchmarks.routes
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from grpo_jax.functional import token_logprobs
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.decoder.cache import KeyValues, cache_keys
from grpo_jax.models.decoder.transformer import Params, compute_next, decoding_layout
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens, geometry_of_next, rows_of_groups
from grpo_jax.sampling.sampler import sample_groups

MODEL = ModelConfig(
    512,
    128,
    256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    qk_norm=True,
    initializer_range=0.1,
    experts=ExpertsConfig(16, 4, 64, norm_topk_prob=True),
)


@dataclass(frozen=True)
class Options:
    """The sizes of the rollout."""

    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 16
    tokens: int = 64


def whole(ids: jax.Array) -> PromptTokens:
    """Returns prompts without padding, `[N, P]`."""
    return PromptTokens(ids, jnp.ones(ids.shape, bool))


def decoded(config: ModelConfig, params: Params, ids: jax.Array, completions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Runs decode steps on all tokens but the last: hidden states `[N, G, T − 1, D]`, experts `[..., L, J]`."""
    policy = decoder_policy(config)
    n, g, size = completions.shape
    _, _, (prefix, _) = policy.prefill(params, whole(ids), g, size)
    separate = {"params": decoding_layout(params, config)}
    values = jnp.zeros((n * config.num_key_value_heads * g, size - 1, config.head_dim), config.dtype)
    cache = tuple(KeyValues(cache_keys(values), values) for _ in range(config.num_hidden_layers))

    def step(cache, token):
        inputs, number = token
        seen = geometry_of_next(config, prefix, g, size - 1, number)
        hidden, cache, routings = compute_next(config, separate, inputs, seen, prefix, cache)
        return cache, (hidden, jnp.stack([routing.experts for routing in routings], axis=2))

    _, (hidden, experts) = jax.lax.scan(step, cache, (completions.transpose(2, 0, 1)[:-1], jnp.arange(size - 1)))
    return hidden.transpose(1, 2, 0, 3), experts.transpose(1, 2, 0, 3, 4)


def compare(config: ModelConfig, options: Options) -> tuple[float, float, float, float, float]:
    """Compares the routes of sampling and training.

    Returns:
      The shares of places and of tokens with different experts; the mean exp |Δ log p| of all tokens, and of tokens
      with the same experts in all layers; and the largest |Δ log p| of the latter.
    """
    policy, rng = decoder_policy(config), np.random.default_rng(0)
    params = jax.jit(policy.init)(jax.random.key(0))
    ids = jnp.asarray(rng.integers(0, config.vocab_size, (options.prompts, options.prompt_tokens)), jnp.int32)
    rows = jnp.arange(options.prompts * options.group_size).reshape(options.prompts, -1)
    sampler = partial(sample_groups, policy, max_tokens=options.tokens, eos_ids=())
    sampled = jax.jit(sampler)(params, whole(ids), rows, jax.random.key(1))
    completions = sampled.completion_ids
    _, by_step = jax.jit(partial(decoded, config))(params, ids, completions)
    hidden, routing = jax.jit(policy.states)(params, rows_of_groups(whole(ids), completions))
    scores = token_logprobs(hidden, policy.head(params)[0], completions, temperature=1.0)
    # State t predicts token t. The first state belongs to the prompt, and no decode step computes it.
    same = np.sort(by_step, axis=-1) == np.sort(routing.experts[:, :, 1:], axis=-1)
    places = ~same.all(-1)
    difference = np.abs(scores.logprobs - sampled.sampler_logprobs)[:, :, 1:]
    selected = difference[~places.any(-1)]
    return places.mean(), places.any(-1).mean(), np.exp(difference).mean(), np.exp(selected).mean(), selected.max()


def main(options: Options) -> None:
    """Prints the table."""
    table = Table("dtype", "places", "tokens", "mean exp |Δ log p|", "of tokens that went one way", "their largest")
    for dtype in ("float32", "bfloat16"):
        places, tokens, *mismatch = compare(replace(MODEL, dtype=dtype), options)
        table.add_row(dtype, f"{places:.3%}", f"{tokens:.3%}", *(f"{x:.6f}" for x in mismatch))
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
