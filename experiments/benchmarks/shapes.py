"""Decoders and rollouts for benchmarks, and the least operations and bytes that their programs need."""

from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from experiments.planning.models import MODELS
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import rng
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.rows.geometry import PromptTokens, PromptWidths, choose_widths


class Shape(NamedTuple):
    """A decoder and a rollout."""

    model: ModelConfig
    num_prompts: int
    prompt: int  # tokens
    completion: int
    group_size: int = 8
    median_prompt: int = 0  # median tokens of log-normal prompt lengths up to `prompt`; 0: not log-normal
    usual_prompt: int = 0  # tokens of a prompt, except one in 512, which has `prompt`; 0: all have `prompt`
    mean_length: int = 0  # mean tokens of completions, if uniform tokens end them; 0: all have full length


TINY = ModelConfig(64, 128, 512, 4, 4, 2, 32)
STORIES = ModelConfig(512, 64, 172, 5, 8, 4, 8)
MID = ModelConfig(32_000, 512, 2048, 8, 8, 4, 64)
SHAPES = {
    "tiny": Shape(TINY, 16, 16, 32),
    "stories": Shape(STORIES, 8, 16, 64),
    "tiny256": Shape(TINY, 16, 16, 256),
    "tiny1024": Shape(TINY, 4, 16, 1024),
    "group32": Shape(TINY, 4, 16, 64, group_size=32),
    "one-prompt": Shape(TINY, 1, 256, 128, group_size=64),
    "vocabulary": Shape(replace(TINY, vocab_size=151_936), 4, 16, 32),
    "prompt2048": Shape(TINY, 4, 2048, 32),
    "skewed": Shape(TINY, 16, 1024, 32, median_prompt=100),
    "one-long": Shape(TINY, 16, 1024, 32, usual_prompt=16),
    "mid": Shape(MID, 4, 16, 128),
    "prompt": Shape(MID, 1, 512, 64),
    # With such small weights, all tokens are almost equally likely.
    "long-tail": Shape(replace(MID, initializer_range=0.001), 4, 16, 256, mean_length=64),
    "qwen2.5-0.5b": Shape(MODELS["Qwen2.5-0.5B"], 16, 64, 512),
    "qwen2.5-1.5b": Shape(MODELS["Qwen2.5-1.5B"], 16, 64, 512),
    "qwen3-0.6b": Shape(MODELS["Qwen3-0.6B"], 16, 64, 256),
    "qwen3-0.6b-2048": Shape(MODELS["Qwen3-0.6B"], 256, 64, 128),
}
_Tiny = Literal[
    "tiny", "stories", "tiny256", "tiny1024", "group32", "one-prompt", "vocabulary", "prompt2048", "skewed", "one-long"
]
CpuShape = Literal[_Tiny, "mid", "prompt", "long-tail"]
ShapeName = Literal[CpuShape, "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-0.6b", "qwen3-0.6b-2048"]


_ROWS = 1024  # number of prompts in the data


def prompt_lengths(shape: Shape) -> np.ndarray:
    """Returns the number of tokens in each prompt of the data; the longest prompt is in the first step."""
    if shape.median_prompt:
        lengths = shape.median_prompt * np.exp(rng(1).normal(0, 0.75, _ROWS))
        lengths = np.clip(lengths, 4, shape.prompt).astype(int)
        lengths[0] = shape.prompt
        return lengths
    lengths = np.full(_ROWS, shape.usual_prompt or shape.prompt)
    lengths[::512] = shape.prompt
    return lengths


@cache
def _prompt_widths(shape: Shape) -> PromptWidths:
    lengths = prompt_lengths(shape)
    longest = lengths.reshape(-1, shape.num_prompts).max(axis=-1)
    return PromptWidths(choose_widths(lengths, most=4), choose_widths(longest, most=3))


def end_ids(shape: Shape) -> list[int]:
    """Returns the ids that end a completion; none if all completions have full length."""
    return list(range(shape.model.vocab_size // shape.mean_length)) if shape.mean_length else []


def random_prompts(shape: Shape, step: int, *, seed: int = 0, below: int = 0) -> Prompts:
    """Returns prompts of a step with random ids (below `below`, if above 0), and examples with their text."""
    limit = below or shape.model.vocab_size
    ids = rng(seed, step).integers(0, limit, (shape.num_prompts, shape.prompt)).astype(np.int32)
    rows = (step * shape.num_prompts + np.arange(shape.num_prompts)) % _ROWS
    mask = np.arange(shape.prompt) >= shape.prompt - prompt_lengths(shape)[rows][:, None]
    return Prompts(PromptTokens(ids, mask, widths=_prompt_widths(shape)), [{"prompt": str(row[-16:])} for row in ids])


class Cost(NamedTuple):
    """Operations and bytes of one rollout with completions of full length."""

    forward_flops: float  # for sampling, and again for scoring; an update takes three times as many
    sample_bytes: float  # bytes that decode steps read: weights, and the keys and values so far


def cost_of(shape: Shape, *, element: int) -> Cost:
    """Counts the operations of matrix products and the bytes that decoding reads, without recomputation.

    Args:
      shape: The decoder and the rollout.
      element: The number of bytes of an activation, and of a weight in decoding.
    """
    model, completions = shape.model, shape.num_prompts * shape.group_size
    heads, kv_heads, features = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    projections = model.hidden_size * features * (2 * heads + 2 * kv_heads)
    layers = model.num_hidden_layers * (projections + 3 * model.hidden_size * model.intermediate_size)
    unembedding = model.vocab_size * model.hidden_size
    prompts = shape.num_prompts * shape.prompt
    tokens = completions * shape.completion
    # Each pair of a query and a visible key takes 4E operations in each head: scores, and the weighted sum of values.
    seen_by_prompts = prompts * (shape.prompt + 1) / 2
    seen = tokens * (shape.prompt + (shape.completion + 1) / 2)
    attention = 4 * model.num_hidden_layers * heads * features
    forward = 2 * layers * (prompts + tokens) + attention * (seen_by_prompts + seen) + 2 * unembedding * tokens
    key_values = 2 * model.num_hidden_layers * kv_heads * features
    prefixes = prompts * shape.completion
    separate = completions * shape.completion * (shape.completion + 1) / 2
    read = (layers + unembedding) * shape.completion + key_values * (prefixes + separate)
    return Cost(forward, element * read)
