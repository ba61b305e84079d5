"""Policies of models from elsewhere: Flax NNX modules, `apply` of Linen modules, and plain functions.

Every completion is computed as a sequence of its own, after a copy of its prompt. Only packed completions, which a
model with masks can compute, share a prompt.

Letters: B sequences of L tokens, C slots of a cache, N prompts of P tokens, G completions, V tokens of the vocabulary,
D features.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from grpo_jax.errors import UsageError
from grpo_jax.models.geometry import PromptTokens, Rows, positions_in_texts, prompt_positions
from grpo_jax.models.params import Params
from grpo_jax.models.policy import Policy


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

    def of_params(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *inputs: function(nnx.merge(graph, params, *others), *inputs)

    given = {"cache": cache, "unembedding": unembedding}
    policy = function_policy(of_params(call), **{name: fn and of_params(fn) for name, fn in given.items()})
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
      cache: (params, B, C) -> an empty cache, a tree of arrays. Default: there is none, and for each sampled token the
        whole sequence is computed again.
      unembedding: params -> `[V, D]`, if outputs are hidden states `[B, L, D]`. Default: outputs are logits
        `[B, L, V]`, which a training step holds for all tokens of a piece.

    Returns:
      The policy. It has no `init`. It cannot continue completions after replies of an environment.
    """
    has_cache = cache is not None
    compute = partial(_compute if has_cache else _recompute, call)
    return Policy(
        _no_init,
        unembedding,
        partial(_states, compute, has_cache),
        partial(_prefill, compute, cache or _no_texts),
        select=_Sequences.take,
        widen=_Sequences.widened,
        packs=has_cache,
        notes=() if has_cache else (_RECOMPUTES,),
    )


_RECOMPUTES = (
    "the model has no cache, so each sampled token computes its prompt and completion again, as often as a completion "
    "has tokens: pass cache to sample faster"
)


def _no_init(key: jax.Array) -> Params:
    raise UsageError("a model from elsewhere brings its parameters: pass those")


# ---- models with a cache, and without one. A negative position marks padding


def _compute(
    call: Callable[..., Any], params: Params, tokens: jax.Array, positions: jax.Array, memory: Any, mask: jax.Array
) -> tuple[jax.Array, Any]:
    return call(params, tokens, jnp.maximum(positions, 0), memory, mask)


def _no_texts(params: Params, rows: int, slots: int) -> jax.Array:
    return jnp.zeros((rows, slots), jnp.int32)


def _recompute(
    call: Callable[..., Any], params: Params, tokens: jax.Array, positions: jax.Array, texts: Any, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes whole texts. The cache `[B, C]` is the tokens so far, by their positions, so that padding comes last."""
    texts = jnp.zeros_like(tokens) if texts is None else texts
    places = jnp.where(positions < 0, texts.shape[1], positions)
    texts = texts.at[jnp.arange(len(texts))[:, None], places].set(tokens, mode="drop")
    return jnp.take_along_axis(call(params, texts), jnp.maximum(positions, 0)[..., None], axis=1), texts


# ---- training


def _states(compute: Callable[..., Any], packs: bool, params: Params, rows: Rows) -> tuple[jax.Array, None]:
    """Computes `Policy.states`. Each prompt and one part are a sequence."""
    if rows.numbers is not None and not packs:
        raise UsageError("a model without masks computes one text in a row, and these rows are packed: pass cache")
    flat = (-1, 1, rows.ids.shape[2])
    numbers = None if rows.numbers is None else rows.numbers.reshape(flat)
    row = jnp.repeat(jnp.arange(len(rows.ids)), rows.ids.shape[1])
    rows_of_parts = replace(rows, prompt=rows.prompt.take(row), ids=rows.ids.reshape(flat), numbers=numbers)
    prompt = rows_of_parts.prompt.mask
    texts = jnp.ones((len(prompt), rows.inputs), jnp.int32) if numbers is None else numbers[:, 0]
    places = jnp.sum(prompt, axis=-1, keepdims=True, dtype=jnp.int32) + positions_in_texts(texts)
    positions = jnp.concatenate([_positions(prompt), places], axis=-1)
    mask = _mask(jnp.concatenate([-prompt.astype(jnp.int32), texts], axis=-1))
    outputs, _ = compute(params, rows_of_parts.tokens, positions, None, mask)
    return rows_of_parts.predicting(outputs).reshape(*rows.ids.shape, -1), None


def _positions(prompt_mask: jax.Array) -> jax.Array:
    return jnp.where(prompt_mask, prompt_positions(prompt_mask), -1)


def _mask(texts: jax.Array) -> jax.Array:
    """Returns the mask `[B, L, L]` of sequences in which −1 is the prompt and 0 is padding, which sees only padding."""
    queries, keys = texts[:, :, None], texts[:, None, :]
    causal = jnp.tril(jnp.ones(texts.shape[-1:] * 2, bool))
    return causal & ((queries == keys) | ((keys == -1) & (queries > 0)))


# ---- sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Sequences:
    """The cache of B completions, with room for T tokens of each."""

    memory: list[jax.Array]  # the leaves of the model's cache
    mask: jax.Array  # bool [B, P + T], true on tokens of prompts
    width: int = field(metadata={"static": True})  # P
    # the axes of B and of the slots in each leaf, or None
    axes: tuple[tuple[int | None, int | None], ...] = field(metadata={"static": True})

    def take(self, chosen: jax.Array) -> "_Sequences":
        """Returns the completions with these numbers."""
        pairs = zip(self.memory, self.axes, strict=True)
        memory = [x if axis is None else jnp.take(x, chosen, axis) for x, (axis, _) in pairs]
        return replace(self, memory=memory, mask=self.mask[chosen])

    def widened(self, room: int) -> "_Sequences":
        """Returns the same completions with room for more tokens."""
        more = self.width + room - self.mask.shape[1]

        def pad(x: jax.Array, axis: int | None) -> jax.Array:
            return x if axis is None else jnp.pad(x, [(0, more * (place == axis)) for place in range(x.ndim)])

        memory = [pad(x, axis) for x, (_, axis) in zip(self.memory, self.axes, strict=True)]
        return replace(self, memory=memory, mask=pad(self.mask, 1))


def _cache_axes(cache: Callable[..., Any], params: Params) -> tuple[tuple[int | None, int | None], ...]:
    """Returns the axes of sequences and of slots in each leaf of a cache: those whose sizes follow the arguments."""
    plain, rows, slots = (
        jax.tree.leaves(jax.eval_shape(lambda params, size=size: cache(params, *size), params))
        for size in ((2, 256), (4, 256), (2, 512))
    )

    def axis(x: Any, y: Any) -> int | None:
        return next((axis for axis in range(x.ndim) if x.shape[axis] != y.shape[axis]), None)

    return tuple((axis(x, y), axis(x, z)) for x, y, z in zip(plain, rows, slots, strict=True))


def _prefill(
    compute: Callable[..., Any],
    cache: Callable[..., Any],
    params: Params,
    prompt: PromptTokens,
    group_size: int,
    max_tokens: int,
) -> tuple[jax.Array, Callable[..., Any], _Sequences]:
    """Computes `Policy.prefill`. The cache of a prompt is copied for each of its completions."""
    prompt = jax.tree.map(jnp.asarray, prompt)
    num_prompts, width = prompt.ids.shape
    room = [(0, 0), (0, max_tokens)]
    seen = jnp.pad(_mask(-prompt.mask.astype(jnp.int32)), [(0, 0), *room])
    empty = cache(params, num_prompts, width + max_tokens)
    hidden, memory = compute(params, prompt.ids, _positions(prompt.mask), empty, seen)
    leaves, tree = jax.tree.flatten(memory)

    def decode(sequences: _Sequences, ids: jax.Array, step: jax.Array) -> tuple[jax.Array, _Sequences]:
        places = jnp.arange(sequences.mask.shape[1])
        seen = sequences.mask | ((places >= width) & (places <= width + step))
        position = jnp.sum(sequences.mask, axis=-1, keepdims=True, dtype=jnp.int32) + step
        memory = jax.tree.unflatten(tree, sequences.memory)
        hidden, memory = compute(params, ids.reshape(-1, 1), position, memory, seen[:, None])
        return hidden.reshape(*ids.shape, -1), replace(sequences, memory=jax.tree.leaves(memory))

    sequences = _Sequences(leaves, jnp.pad(prompt.mask, room), width, _cache_axes(cache, params))
    return hidden[:, -1], decode, sequences.take(jnp.repeat(jnp.arange(num_prompts), group_size))
