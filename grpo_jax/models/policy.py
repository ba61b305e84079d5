"""The functions of a model that sampling and training call: four pure functions and optional ones.

Any model that provides them can be trained: the decoder here, a model of yours through `external`, or a fake in a test.
Letters: see `transformer`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.errors import UsageError
from grpo_jax.functional.products import Traits, traits_of_backend
from grpo_jax.models.config import Dtype, ModelConfig
from grpo_jax.models.decoder import cache as caches
from grpo_jax.models.decoder.attention import fuses_decoding
from grpo_jax.models.decoder.cache import KeyValues, Memory, Prefix
from grpo_jax.models.decoder.transformer import (
    Params,
    by_layer,
    compute_next,
    compute_rows,
    decoding_layout,
    initial_params,
    param_shapes,
)
from grpo_jax.models.params.rounding import round_stochastically, round_to_nearest
from grpo_jax.models.params.sharding import BATCH, TENSOR, decoding, laid_out, mesh_sizes, spread
from grpo_jax.models.params.tree import Adapted, variables
from grpo_jax.models.rows.geometry import (
    PromptTokens,
    Rows,
    TokenStates,
    geometry_of_next,
    geometry_of_rows,
    rows_of_groups,
    rows_of_prompts,
    slots_of,
)
from grpo_jax.models.rows.pieces import computed_in_pieces, pieces_of_prompts


class Policy(NamedTuple):
    """Pure functions of params, which may be `lora.Adapted`. Hidden states are taken after the last norm."""

    # key -> params
    init: Callable[[jax.Array], Params]
    # params -> [V, D]. None: the states are logits `[..., V]`, so that D is V
    unembedding: Callable[[Params], jax.Array] | None
    # (params, `geometry.Rows`) -> (hidden [R, G, S, D]: at s, the state that predicts token s of a part; the experts of
    # these states, as `experts.Routing` with axes [R, G, S, L], or None if the model has no experts)
    states: Callable[[Params, Rows], tuple[jax.Array, Any]]
    # (params, `geometry.PromptTokens` [N, P], group_size, max_tokens)
    # -> (hidden [N, D] that predicts the first completion token, decode, cache),
    # decode(cache, ids [N, G], step) -> (hidden [N, G, D], cache)
    prefill: Callable[..., tuple[jax.Array, Callable[..., Any], Any]]
    # (cache, chosen int [R], indices among the N·G completions) -> cache of R prompts with one completion each.
    # None: ended completions are decoded too until the last completion of the batch ends
    select: Callable[[Any, jax.Array], Any] | None = None
    # (cache, slots) -> cache with room for this many tokens of each completion. None: prefill makes room for all
    widen: Callable[[Any, int], Any] | None = None
    # params -> append, for a program that continues with the cache of another program:
    # append(cache, ids [N, G, W], lengths [N, G], counts [N, G]) -> (hidden [N, G, W, D], cache) puts `counts` tokens
    # of each completion after its first `lengths`. The others are padding, which later tokens overwrite; tokens that
    # the cache has no room for are dropped. None: completions have only one turn
    decoder: Callable[[Params], Callable[..., Any]] | None = None
    # true if the cache overwrites earlier tokens, as layers with a window and delta nets do. `decode` then has a fourth
    # argument active, bool [N, G]: inactive completions keep all that their later tokens may see
    forgets: bool = False
    # c in logits c·tanh(W h / c), where W is the unembedding; None: logits are W h
    softcap: float | None = None
    # the number of experts in a mixture; None: the model has no experts
    num_experts: int | None = None
    expert_share: float = 1.0  # the share of them that compute a token
    # params -> the numbers that products use, if these have fewer bits than the parameters; None: they are the same
    rounded: Callable[[Params], Params] | None = None
    packs: bool = True  # false if a row can hold only one completion: see `Rows.numbers`
    notes: tuple[str, ...] = ()  # facts about the model for the user of a run, one sentence each

    def hidden(self, params: Params, prompt: PromptTokens, completion_ids: jax.Array) -> jax.Array:
        """Returns hidden states `[N, G, T, D]` of completions. State t predicts completion token t.

        Args:
          params: The parameters of the model.
          prompt: The prompts, `[N, P]`.
          completion_ids: The tokens of the completions, int `[N, G, T]`.
        """
        return self.states(params, rows_of_groups(prompt, completion_ids))[0]

    def predict(self, params: Params, rows: Rows) -> TokenStates:
        """Returns the states that predict the tokens of completions, and their routing if the model has experts."""
        hidden, routing = self.states(params, rows)
        return TokenStates(rows, hidden, jax.tree.map(rows.unpack, routing))

    @property
    def head(self) -> Callable[[Params], tuple[jax.Array, float | None]]:
        """The function from params to the unembedding `[V, D]` and the softcap, which turn hidden states into logits.

        Raises:
          UsageError: There is no unembedding.
        """
        unembedding = self.unembedding
        if unembedding is None:
            raise UsageError(
                "a divergence over the whole vocabulary needs hidden states, and this model returns logits: pass "
                "unembedding, as in docs/own_model.md"
            )
        return lambda params: (unembedding(params), self.softcap)


def suits_cudnn(config: ModelConfig, traits: Traits) -> bool:
    """Returns whether attention "auto" is cuDNN's: plain products in bfloat16, of heads that the backend has it for."""
    computes = config.dtype == "bfloat16" and all(
        size % 8 == 0 and size <= traits.flash_features for size in config.head_dims
    )
    return computes and config.attn_logit_softcapping is None and not config.attention_sinks


def _attention_of_backend(config: ModelConfig) -> ModelConfig:
    """Resolves attention "auto": "cudnn" if it suits and the backend has it, else "shared"."""
    if config.attention == "cudnn" and traits_of_backend().backend != "gpu":
        raise UsageError('attention "cudnn" needs an NVIDIA GPU: set it to "auto", "shared" or "xla"')
    if config.attention == "tokamax":
        if find_spec("tokamax") is None:
            raise UsageError('attention "tokamax" needs the package tokamax: pip install tokamax')
        if config.attn_logit_softcapping and traits_of_backend().backend == "gpu":
            raise UsageError('attention "tokamax" has no gradient of capped products on a GPU: set it to "auto"')
    if config.attention != "auto":
        return config
    # The backend is queried last, since this initialises JAX, whose options can then no longer be set.
    return replace(config, attention="cudnn" if suits_cudnn(config, traits_of_backend()) else "shared")


def resolve_dtype(dtype: Literal[Dtype, "auto"]) -> Dtype:
    """Returns the dtype of products, for "auto" `Traits.default_dtype`."""
    return traits_of_backend().default_dtype if dtype == "auto" else dtype


def decoder_policy(config: ModelConfig) -> Policy:
    """Makes the policy of a decoder.

    Prompts must be padded on the left, so that the last column always holds a prompt's last token.

    Args:
      config: The configuration of the decoder.

    Returns:
      The functions of the decoder.

    Raises:
      UsageError: This machine does not support the kind of attention.
    """
    config = _attention_of_backend(config)

    def init(key: jax.Array) -> Params:
        return initial_params(key, param_shapes(config), config.initializer_range)

    def unembedding(params: Params) -> jax.Array:
        matrix = _variables(config, params)["params"]["embedding" if config.tie_word_embeddings else "unembedding"]
        return matrix.astype(config.dtype)

    return Policy(
        init=init,
        unembedding=unembedding,
        softcap=config.final_logit_softcapping,
        forgets=config.sliding_window is not None or bool(config.delta_layers),
        states=partial(_states, config),
        num_experts=config.experts and config.experts.num_experts,
        expert_share=config.experts.num_experts_per_tok / config.experts.num_experts if config.experts else 1.0,
        rounded=None if config.dtype == "float32" else _ROUNDING[config.rounding],
        **_decoding(config),
    )


_ROUNDING = {"nearest": round_to_nearest, "stochastic": round_stochastically}


def _variables(config: ModelConfig, params: Params, *, has_gradient: bool = True) -> dict[str, Any]:
    """Returns the collections for `Transformer.apply`, with parameters that products round to the nearest anyway.

    Without a gradient, rounded matrices take half of the bytes. A gradient must be added up in float32 where a token
    occurs more than once.
    """
    is_stochastic = config.rounding == "stochastic" and config.dtype != "float32"
    if not is_stochastic or isinstance(params, Adapted):  # the base of adapters is frozen, so it needs no noise
        return variables(params)
    return variables(round_stochastically(params, jnp.dtype("float32" if has_gradient else config.dtype)))


def _states(config: ModelConfig, params: Params, rows: Rows) -> tuple[jax.Array, Any]:
    """Computes `Policy.states`."""
    seen = geometry_of_rows(config, rows)
    hidden, results = compute_rows(config, _variables(config, params), rows.tokens, seen, has_gradient=True)
    routing = None
    if config.experts:
        routings = [routing for _, routing in by_layer(results) if routing is not None]
        routing = jax.tree.map(lambda *x: jnp.stack(x, axis=2), *routings)
    return jax.tree.map(rows.predicting, (hidden, routing))


def _decoding(config: ModelConfig) -> dict[str, Any]:
    """Makes the functions of a `Policy` that compute completions token by token: prefill, decoder, select, widen."""

    def layout(params: Params) -> dict[str, Any]:
        """Converts parameters to the layout of decode steps, once per program instead of in every step of its loops."""
        trees = _variables(config, params, has_gradient=False).items()
        return {name: laid_out(decoding_layout(tree, config), decoding) for name, tree in trees}

    def slots_of_layers(room: int) -> list[int]:
        return [slots_of(window, room) for window in config.windows]

    def room(completions: tuple[Memory, ...]) -> int:
        """Returns the slots of a layer without a window. If all layers have one, the largest number works as well."""
        return max(layer.values.shape[-2] for layer in caches.key_values(completions))

    def advance(separate: Any, cache: Any, ids: jax.Array, number: jax.Array, is_token: jax.Array | None):
        """Computes the next tokens of completions, `[N, G]` or `[N, G, W]`: see `geometry_of_next`."""
        prefix, completions = cache
        seen = geometry_of_next(config, prefix, ids.shape[1], room(completions), number, is_token)
        rows = ids.reshape(len(ids), -1)
        hidden, completions, _ = compute_next(config, separate, rows, seen, prefix, completions)
        return hidden.reshape(*ids.shape, -1), (prefix, completions)

    def prefill(params: Params, prompt: PromptTokens, group_size: int, max_tokens: int):
        def compute(prompt: PromptTokens) -> tuple[jax.Array, list[Memory]]:
            seen = geometry_of_rows(config, rows_of_prompts(prompt))
            read = _variables(config, params, has_gradient=False)
            hidden, results = compute_rows(config, read, prompt.ids, seen)
            return hidden[:, -1], [memory for memory, _ in by_layer(results)]

        config.check_width(prompt.width + max_tokens)
        prompt = jax.tree.map(jnp.asarray, prompt)
        hidden, memories = computed_in_pieces(compute, prompt, pieces_of_prompts(prompt))
        separate = layout(params)
        layers = tuple(caches.group_by_prompt(memory) if isinstance(memory, KeyValues) else None for memory in memories)
        prefix = Prefix(layers, jnp.asarray(prompt.mask), jnp.sum(prompt.mask, axis=-1, dtype=jnp.int32))

        def begin(memory: Memory, slots: int) -> Memory:
            """Returns the memory of completions before their first token."""
            if not isinstance(memory, KeyValues):
                return jax.tree.map(lambda x: jnp.repeat(x[:, None], group_size, axis=1), memory)
            n, _, heads, features = memory.values.shape
            rows = [n, heads * group_size] if mesh_sizes() else [n * heads * group_size]
            values = spread(jnp.zeros((*rows, slots, features), config.dtype), BATCH, TENSOR)
            return KeyValues(caches.cache_keys(values), values)

        cache = prefix, tuple(map(begin, memories, slots_of_layers(max_tokens)))

        def decode(cache: Any, ids: jax.Array, step: jax.Array, active: jax.Array | None = None):
            return advance(separate, cache, ids, step, None if active is None else active[..., None])

        return hidden, decode, cache

    def decoder(params: Params):
        separate = layout(params)

        def append(cache: Any, ids: jax.Array, lengths: jax.Array, counts: jax.Array):
            places = jnp.arange(ids.shape[-1])
            return advance(separate, cache, ids, lengths[..., None] + places, places < counts[..., None])

        return append

    def select(cache: Any, chosen: jax.Array) -> Any:
        prefix, completions = cache
        return caches.select_completions(prefix, completions, chosen)

    def wider(cache: Any, slots: int) -> Any:
        prefix, completions = cache
        config.check_width(prefix.mask.shape[-1] + slots)
        return prefix, caches.widen(completions, slots_of_layers(slots))

    # cuDNN reads only filled slots, so it needs no narrower cache in the first steps.
    reads_all = config.attention != "cudnn" or not fuses_decoding(config.attention)
    return {"prefill": prefill, "decoder": decoder, "select": select, "widen": wider if reads_all else None}
