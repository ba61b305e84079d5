"""What sampling and training need of a model: four pure functions, and five that it can do without.

Anything that provides them can be trained: the decoder here, an nnx model through
split and merge, a fake in a test. Letters as in `transformer`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import UsageError
from grpo_jax.models.attention import (
    KeyValues,
    Prefix,
    cache_keys,
    select_completions,
    widen,
)
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.geometry import (
    Geometry,
    geometry_of_groups,
    geometry_of_packed_groups,
    geometry_of_step,
    geometry_of_texts,
    geometry_of_tokens,
    positions_in_texts,
    prompt_positions,
    slots_of,
)
from grpo_jax.models.lora import variables
from grpo_jax.models.sharding import BATCH, TENSOR, decoding, laid_out, mesh_sizes, spread
from grpo_jax.models.transformer import (
    Params,
    Transformer,
    decoding_layout,
    initial_params,
)


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
    # (params, prompt_ids [N, P], prompt_mask [N, P], ids [N, S], completions [N, S], longest) -> hidden [N, S, D], that
    # predict each token: of several completions of a prompt in a row, numbered as texts are in `packed`, of at most
    # `longest` tokens each. None: completions are computed with their padding
    packed_groups: Callable[..., jax.Array] | None = None
    # (cache, chosen int [R], of the N·G completions in a row) -> cache of R prompts with one completion each.
    # None: completions that have ended are decoded along until the last of the batch ends
    select: Callable[[Any, jax.Array], Any] | None = None
    # (cache, slots) -> cache with room for so many tokens of each completion. None: it has room for all from the start
    widen: Callable[[Any, int], Any] | None = None
    # params -> append, for a program that goes on with the cache of another one:
    # append(cache, ids [N, G, W], lengths [N, G]) -> (hidden [N, G, W, D], cache) takes W tokens of each completion
    # behind its first `lengths`, and drops those that the cache has no room for. None: completions have one turn
    decoder: Callable[[Params], Callable[..., Any]] | None = None
    # c of logits c·tanh(W h / c), with W the unembedding; None: they are W h
    softcap: float | None = None
    # `hidden` and `packed_groups`, which then give (hidden, `experts.Routing` of these states), and the number of
    # experts. None: the model has none
    routed: tuple[Callable[..., Any], Callable[..., Any], int] | None = None


def _has_flash_attention(config: ModelConfig) -> bool:
    """Whether cuDNN's attention can compute this model here: heads of at most 128 features, on GPUs from Ampere on."""
    if config.attn_logit_softcapping is not None:
        return False
    if config.dtype != "bfloat16" or config.head_dim % 8 or config.head_dim > 128:
        return False
    if jax.default_backend() != "gpu":  # asked last, since it starts JAX, whose options could then not be set
        return False
    major, _, _ = str(getattr(jax.local_devices()[0], "compute_capability", "")).partition(".")
    return major.isdigit() and int(major) >= 8  # of other vendors it is no number


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
        raise UsageError('attention "cudnn" needs an NVIDIA GPU: set it to "auto", "shared" or "xla"')
    if config.attention == "auto":
        config = replace(config, attention="cudnn" if _has_flash_attention(config) else "shared")
    model = Transformer(config)

    def init(key: jax.Array) -> Params:
        token = jnp.zeros((1, 1), jnp.int32)
        shapes = jax.eval_shape(lambda: model.init(key, token, geometry_of_texts(config, token, token)))["params"]
        return initial_params(key, shapes, config.initializer_range)

    def unembedding(params: Params) -> jax.Array:
        matrix = variables(params)["params"]["embedding" if config.tie_word_embeddings else "unembedding"]
        return matrix.astype(config.dtype)

    return Policy(
        init=init,
        unembedding=unembedding,
        softcap=config.final_logit_softcapping,
        **_scoring(config, Transformer(config, has_gradient=True)),
        **_decoding(config, model),
    )


def _scoring(config: ModelConfig, model: Transformer) -> dict[str, Any]:
    """The functions of a `Policy` that compute whole completions: hidden, packed, packed_groups, routed."""

    def run(params: Params, ids: jax.Array, seen: Geometry, routed: bool) -> Any:
        """States `[N, M, D]`; with `routed` a pair of these and of `Routing` with the same leading axes."""
        if not routed:
            return model.apply(variables(params), ids, seen)[0]
        (states, _), sown = model.apply(variables(params), ids, seen, mutable=["routing"])
        return states, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), sown["routing"]["layers"]["mlp"]["routing"])

    def hidden(
        params: Params,
        prompt_ids: jax.Array,
        prompt_mask: jax.Array,
        completion_ids: jax.Array,
        *,
        routed: bool = False,
    ) -> Any:
        n, group_size, size = completion_ids.shape
        given = completion_ids[..., :-1].reshape(n, -1)  # the last token predicts nothing
        if size == 1:
            states = run(
                params, prompt_ids, geometry_of_texts(config, prompt_positions(prompt_mask), prompt_mask), routed
            )
            return jax.tree.map(
                lambda x: jnp.broadcast_to(x[:, -1][:, None, None], (n, group_size, 1, *x.shape[2:])), states
            )
        ids = jnp.concatenate([prompt_ids, given], axis=-1)
        if group_size == 1:  # a prompt and its completion are one text
            texts = jnp.concatenate([prompt_mask, jnp.ones(given.shape, bool)], axis=-1)
            seen = geometry_of_texts(config, prompt_positions(texts), texts)
        else:
            seen = geometry_of_groups(config, prompt_mask, group_size, size - 1)

        def by_token(states: jax.Array) -> jax.Array:
            of_prompt, rest = jnp.split(states, [prompt_ids.shape[-1]], axis=1)
            # The prompt predicts the first completion token.
            first = jnp.broadcast_to(of_prompt[:, None, -1:], (n, group_size, 1, *states.shape[2:]))
            return jnp.concatenate([first, rest.reshape(n, group_size, size - 1, *states.shape[2:])], axis=2)

        return jax.tree.map(by_token, run(params, ids, seen, routed))

    def packed(params: Params, ids: jax.Array, texts: jax.Array) -> jax.Array:
        states, _ = model.apply(variables(params), ids, geometry_of_texts(config, positions_in_texts(texts), texts))
        return states

    def packed_groups(
        params: Params,
        prompt_ids: jax.Array,
        prompt_mask: jax.Array,
        ids: jax.Array,
        completions: jax.Array,
        longest: int,
        *,
        routed: bool = False,
    ) -> Any:
        seen = geometry_of_packed_groups(config, prompt_mask, completions, longest)

        def by_token(states: jax.Array) -> jax.Array:
            of_prompt, rest = jnp.split(states, [prompt_ids.shape[-1]], axis=1)
            # The prompt predicts the first token of each completion.
            before = jnp.concatenate([of_prompt[:, -1:], rest[:, :-1]], axis=1)
            is_first = positions_in_texts(completions) == 0
            return jnp.where(is_first.reshape(*is_first.shape, *[1] * (states.ndim - 2)), of_prompt[:, -1:], before)

        return jax.tree.map(by_token, run(params, jnp.concatenate([prompt_ids, ids], axis=-1), seen, routed))

    routed = None
    if config.experts:
        routed = partial(hidden, routed=True), partial(packed_groups, routed=True), config.experts.num_experts
    return {"hidden": hidden, "packed": packed, "packed_groups": packed_groups, "routed": routed}


def _decoding(config: ModelConfig, model: Transformer) -> dict[str, Any]:
    """The functions of a `Policy` that compute completions token by token: prefill, decoder, select, widen."""
    one_by_one = Transformer(config, scan_layers=False)

    def run_prompts(params: Params, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
        hidden, layers = model.apply(variables(params), ids, geometry_of_texts(config, prompt_positions(mask), mask))
        return hidden[:, -1], layers

    def layout(params: Params) -> dict[str, Any]:
        """As decode steps read parameters: laid out once in a program, and not in every turn of its loops."""
        return {name: laid_out(decoding_layout(tree, config), decoding) for name, tree in variables(params).items()}

    def slots_of_layers(room: int) -> list[int]:
        return [slots_of(config, window, room) for window in config.windows]

    def room(own: tuple[KeyValues, ...]) -> int:
        """Slots of a layer without a window; without any such layer the most that there are, which serve as well."""
        return max(layer.values.shape[-2] for layer in own)

    def prefill(params: Params, prompt_ids: jax.Array, prompt_mask: jax.Array, group_size: int, max_tokens: int):
        last, stacked = run_prompts(params, prompt_ids, prompt_mask)
        layers = range(config.num_hidden_layers)
        separate = layout(params)
        prompts = tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in layers)
        prefix = Prefix(prompts, jnp.asarray(prompt_mask), jnp.sum(prompt_mask, axis=-1, dtype=jnp.int32))
        rows = [prompt_ids.shape[0], config.num_key_value_heads * group_size]
        rows = rows if mesh_sizes() else [math.prod(rows)]

        def empty(slots: int) -> KeyValues:
            values = spread(jnp.zeros((*rows, slots, config.head_dim), config.dtype), BATCH, TENSOR)
            return KeyValues(cache_keys(values), values)

        cache = prefix, tuple(empty(slots) for slots in slots_of_layers(max_tokens))

        def decode(cache: Any, ids: jax.Array, step: jax.Array):
            prefix, own = cache
            seen = geometry_of_step(config, prefix, ids.shape[1], room(own), step)
            hidden, own = one_by_one.apply(separate, ids, seen, past=(prefix, own))
            return hidden, (prefix, own)

        return last, decode, cache

    def decoder(params: Params):
        separate = layout(params)

        def append(cache: Any, ids: jax.Array, lengths: jax.Array):
            (prefix, own), (n, group_size, width) = cache, ids.shape
            seen = geometry_of_tokens(config, prefix, lengths, width, room(own))
            hidden, own = one_by_one.apply(separate, ids.reshape(n, -1), seen, past=(prefix, own))
            return hidden.reshape(n, group_size, width, -1), (prefix, own)

        return append

    def select(cache: Any, chosen: jax.Array) -> Any:
        prefix, own = cache
        return select_completions(prefix, own, chosen, config.num_key_value_heads)

    def wider(cache: Any, slots: int) -> Any:
        prefix, own = cache
        return prefix, widen(own, slots_of_layers(slots))

    return {"prefill": prefill, "decoder": decoder, "select": select, "widen": wider}
