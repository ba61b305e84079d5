"""What sampling and training need of a model: four pure functions, and a fifth for packed texts.

Anything that provides them can be trained: the decoder here, an nnx model through
split and merge, a fake in a test. Letters as in `transformer`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import UsageError
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.lora import variables
from grpo_jax.models.transformer import Cache, KeyValues, Params, Prefix, Transformer, unstack_layers


class Policy(NamedTuple):
    """Pure functions over params, which may be `lora.Adapted`. Hidden states are those after the last norm."""

    # key -> params
    init: Callable[[jax.Array], Params]
    # params -> [V, D]
    unembedding: Callable[[Params], jax.Array]
    # (params, prompt_ids [N, P], prompt_mask [N, P], completion_ids [N, G, T]) -> hidden [N, G, T, D]:
    # at t, what predicts completion token t
    hidden: Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]
    # (params, prompt_ids [N, P], prompt_mask [N, P], group_size, max_tokens)
    # -> (hidden [N, D] that predicts the first completion token, decode, cache),
    # decode(cache, ids [N, G], step) -> (hidden [N, G, D], cache)
    prefill: Callable[[Params, jax.Array, jax.Array, int, int], tuple[jax.Array, Callable[..., Any], Any]]
    # (params, ids [N, S], texts [N, S]) -> hidden [N, S, D], of several texts in a row that do not see each other:
    # numbered from 1, each in one piece, 0 for padding. None: the model cannot be trained on packed texts
    packed: Callable[[Params, jax.Array, jax.Array], jax.Array] | None = None


def decoder_policy(config: ModelConfig) -> Policy:
    """The policy of `Transformer`.

    Prompts are padded on the left, so that the last column always holds a prompt's last token.

    Args:
      config: the decoder's shape.

    Returns:
      The functions.

    Raises:
      UsageError: the attention is one that this machine does not have.
    """
    if config.attention == "cudnn" and jax.default_backend() != "gpu":
        raise UsageError('attention "cudnn" needs an NVIDIA GPU: set it to "shared" or "xla"')
    model = Transformer(config)

    def init(key: jax.Array) -> Params:
        token = jnp.zeros((1, 1, 1), jnp.int32)
        return model.init(key, token, token)["params"]

    def run_prompt(params: Params, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, Prefix]:
        positions = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
        hidden, layers = model.apply(variables(params), ids[:, None], positions[:, None], mask[:, None])
        layers = jax.tree.map(lambda x: x.squeeze(2), layers)  # the group axis, after the layer's
        return hidden[:, 0, -1], Prefix(layers, mask, jnp.sum(mask, axis=-1, dtype=jnp.int32))

    def unembedding(params: Params) -> jax.Array:
        matrix = variables(params)["params"]["embedding" if config.tie_word_embeddings else "unembedding"]
        return matrix.astype(config.dtype)

    def hidden(params: Params, prompt_ids: jax.Array, prompt_mask: jax.Array, completion_ids: jax.Array) -> jax.Array:
        last, prefix = run_prompt(params, prompt_ids, prompt_mask)
        # The prompt predicts the first completion token, and the last one predicts nothing.
        first = jnp.broadcast_to(last[:, None, None], (*completion_ids.shape[:2], 1, last.shape[-1]))
        if completion_ids.shape[-1] == 1:
            return first
        given = completion_ids[..., :-1]
        positions = jnp.broadcast_to(prefix.length[:, None, None] + jnp.arange(given.shape[-1]), given.shape)
        rest, _ = model.apply(variables(params), given, positions, prefix=prefix)
        return jnp.concatenate([first, rest], axis=2)

    def prefill(params: Params, prompt_ids: jax.Array, prompt_mask: jax.Array, group_size: int, max_tokens: int):
        last, prefix = run_prompt(params, prompt_ids, prompt_mask)
        # Separate layers, cut out here, once, and not in every turn of the decode loop.
        layers = range(config.num_hidden_layers)
        separate = {name: unstack_layers(tree, config.num_hidden_layers) for name, tree in variables(params).items()}
        prefix = prefix._replace(layers=tuple(jax.tree.map(lambda x, i=i: x[i], prefix.layers) for i in layers))
        shape = (
            prompt_ids.shape[0],
            group_size,
            config.num_key_value_heads,
            max(max_tokens - 1, 1),
            config.head_dim,
        )
        cache = tuple(KeyValues(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in layers)
        decoder = Transformer(config, scan_layers=False)

        def decode(cache: Any, ids: jax.Array, step: jax.Array):
            positions = jnp.broadcast_to(prefix.length[:, None] + step, ids.shape)
            state, cache = decoder.apply(
                separate, ids[..., None], positions[..., None], prefix=prefix, cache=Cache(cache, step)
            )
            return state[:, :, 0], cache

        return last, decode, cache

    def packed(params: Params, ids: jax.Array, texts: jax.Array) -> jax.Array:
        place = jnp.arange(ids.shape[-1])
        begins = jnp.where(texts != jnp.pad(texts, [(0, 0), (1, 0)])[:, :-1], place, 0)
        positions = place - jax.lax.cummax(begins, axis=1)
        state, _ = model.apply(variables(params), ids[:, None], positions[:, None], texts[:, None])
        return state[:, 0]

    return Policy(init, unembedding, hidden, prefill, packed)
