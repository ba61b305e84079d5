"""Policies of models from elsewhere: Flax NNX modules, `apply` of Linen modules, and plain functions.

Every completion is computed as a sequence of its own, after a copy of its prompt. Only packed completions, which a
model with masks can compute, share a prompt.

Letters: B sequences of L tokens, C slots of a cache, N prompts of P tokens, G completions, V tokens of the vocabulary,
D features.
"""

from grpo_jax.errors import UsageError, need

need("flax")

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from grpo_jax.models.params.tree import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens, Rows, positions_in_texts, prompt_positions


def nnx_policy(
    module: nnx.Module,
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs),
    *,
    cache: Callable[[Any, int, int], Any] | None = None,
    unembedding: Callable[[Any], jax.Array] | None = None,
) -> tuple[Policy, Params]:
    """Makes the policy of a Flax NNX decoder, which is split once, here.

    Call `module.eval()` first: dropout would differ between sampling and training. Only `nnx.Param` is trained, and all
    other state is constant.

    Args:
      module: The decoder. It does not change.
      call: As in `function_policy`, but with the module instead of its parameters. Default: calls the module.
      cache, unembedding: As in `function_policy`, but with the module instead of its parameters.

    Returns:
      The policy, and copies of the parameters, as nested dicts. `nnx.update(module, params)` writes them to the module.
    """
    graph, trained, *others = nnx.split(module, nnx.Param, ...)

    def on_params(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *inputs: function(nnx.merge(graph, params, *others), *inputs)

    policy = function_policy(
        on_params(call), cache=cache and on_params(cache), unembedding=unembedding and on_params(unembedding)
    )
    return policy, jax.tree.map(jnp.copy, nnx.to_pure_dict(trained))


def function_policy(
    call: Callable[..., Any],
    *,
    cache: Callable[[Params, int, int], Any] | None = None,
    unembedding: Callable[[Params], jax.Array] | None = None,
) -> Policy:
    """Makes the policy of a causal decoder that is a pure function, such as `apply` of a Linen module.

    Args:
      call: The decoder. Without a cache, (params, tokens int32 `[B, L]`) -> outputs, in which padding follows the last
        token. With a cache, (params, tokens, positions int32 `[B, L]`, cache, mask bool `[B, L, C]`) -> (outputs, cache
        after these tokens). The tokens take the next L slots in all B sequences, and the mask is true where a token may
        see a slot. In training the cache is None, C is L, and a sequence may hold several completions.
      cache: (params, B, C) -> an empty cache, a tree of arrays `[B, ...]`, and of scalars that all sequences share.
        Default: there is none, and for each sampled token the whole sequence is computed again.
      unembedding: params -> `[V, D]`, if outputs are hidden states `[B, L, D]`. Default: outputs are logits
        `[B, L, V]`, which a training step holds for all tokens of a piece.

    Returns:
      The policy. It has no `init`. It cannot continue completions after replies of an environment.
    """
    model = _without_cache(call) if cache is None else _with_cache(call, cache)
    return Policy(
        _no_init,
        unembedding,
        partial(_states, model),
        partial(_prefill, model),
        select=_take,
        packs=model.packs,
        notes=() if model.packs else (_RECOMPUTES,),
    )


_RECOMPUTES = "without a cache, each sampled token computes all tokens before it again: pass cache to sample faster"


def _no_init(key: jax.Array) -> Params:
    raise UsageError("a model from elsewhere brings its parameters: pass those")


# ---- models with a cache and without


class _Model(NamedTuple):
    # (params, tokens, positions, of which negative ones are padding, cache or None, mask) -> (outputs, cache)
    compute: Callable[..., tuple[jax.Array, Any]]
    cache: Callable[[Params, int, int], Any]
    packs: bool  # true if it uses the mask


def _with_cache(call: Callable[..., Any], cache: Callable[[Params, int, int], Any]) -> _Model:
    return _Model(lambda params, ids, places, *others: call(params, ids, jnp.maximum(places, 0), *others), cache, True)


def _without_cache(call: Callable[..., Any]) -> _Model:
    """Returns a model whose cache `[B, C]` is the tokens so far, by their positions, so that padding comes last."""

    def compute(params: Params, ids: jax.Array, places: jax.Array, texts: Any, mask: jax.Array) -> Any:
        texts = jnp.zeros_like(ids) if texts is None else texts
        used = jnp.where(places < 0, texts.shape[1], places)
        texts = texts.at[jnp.arange(len(ids))[:, None], used].set(ids, mode="drop")
        return jnp.take_along_axis(call(params, texts), jnp.maximum(places, 0)[..., None], axis=1), texts

    return _Model(compute, lambda params, rows, slots: jnp.zeros((rows, slots), jnp.int32), False)


# ---- training


def _states(model: _Model, params: Params, rows: Rows) -> tuple[jax.Array, None]:
    """Computes `Policy.states`. Each prompt and one part are a sequence."""
    if rows.numbers is not None and not model.packs:
        raise UsageError("a model without a cache computes one text in a row, and these rows hold several: pass cache")
    shape = rows.ids.shape
    ids, numbers = jax.tree.map(lambda x: x.reshape(-1, 1, shape[2]), (rows.ids, rows.numbers))
    rows = replace(rows, prompt=rows.prompt.take(jnp.repeat(jnp.arange(shape[0]), shape[1])), ids=ids, numbers=numbers)
    prompt = rows.prompt.mask
    texts = jnp.ones((len(prompt), rows.inputs), jnp.int32) if numbers is None else numbers[:, 0]
    places = jnp.sum(prompt, axis=-1, keepdims=True, dtype=jnp.int32) + positions_in_texts(texts)
    positions = jnp.concatenate([_positions(prompt), places], axis=-1)
    mask = _mask(jnp.concatenate([-prompt.astype(jnp.int32), texts], axis=-1))
    outputs, _ = model.compute(params, rows.tokens, positions, None, mask)
    return rows.predicting(outputs).reshape(*shape, -1), None


def _positions(prompt_mask: jax.Array) -> jax.Array:
    return jnp.where(prompt_mask, prompt_positions(prompt_mask), -1)


def _mask(texts: jax.Array) -> jax.Array:
    """Returns the mask `[B, L, L]` of sequences in which −1 is the prompt and 0 is padding, which sees only padding."""
    queries, keys = texts[:, :, None], texts[:, None, :]
    causal = jnp.tril(jnp.ones(texts.shape[-1:] * 2, bool))
    return causal & ((queries == keys) | ((keys == -1) & (queries > 0)))


# ---- sampling

_Sequences = tuple[Any, jax.Array]  # the model's cache of B completions, and the mask of their prompts, bool [B, P]


def _take(sequences: _Sequences, chosen: jax.Array) -> _Sequences:
    """Computes `Policy.select`."""
    return jax.tree.map(lambda x: x[chosen] if x.ndim else x, sequences)


def _prefill(
    model: _Model, params: Params, prompt: PromptTokens, group_size: int, max_tokens: int
) -> tuple[jax.Array, Callable[..., Any], _Sequences]:
    """Computes `Policy.prefill`. The cache of a prompt is copied for each of its completions."""
    prompt = jax.tree.map(jnp.asarray, prompt)
    mask = jnp.pad(_mask(-prompt.mask.astype(jnp.int32)), [(0, 0), (0, 0), (0, max_tokens)])
    cache = model.cache(params, len(prompt), prompt.width + max_tokens)
    hidden, cache = model.compute(params, prompt.ids, _positions(prompt.mask), cache, mask)

    def decode(sequences: _Sequences, ids: jax.Array, step: jax.Array) -> tuple[jax.Array, _Sequences]:
        cache, prompt_mask = sequences
        is_filled = jnp.broadcast_to(jnp.arange(max_tokens) <= step, (ids.size, max_tokens))
        mask = jnp.concatenate([prompt_mask, is_filled], axis=-1)[:, None]
        position = jnp.sum(prompt_mask, axis=-1, keepdims=True, dtype=jnp.int32) + step
        hidden, cache = model.compute(params, ids.reshape(-1, 1), position, cache, mask)
        return hidden.reshape(*ids.shape, -1), (cache, prompt_mask)

    return hidden[:, -1], decode, _take((cache, prompt.mask), jnp.repeat(jnp.arange(len(prompt)), group_size))
