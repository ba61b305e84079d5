"""The key-value cache of decoding: its layout, and the products with it.

Heads come before tokens, so that the products with one query read memory in order. On a CPU (`Traits.features_first`)
features of keys come before tokens too, and the keys of completions are split into blocks of B tokens. A product of few
queries with keys `[E, C]` would read one cache line from each of E rows and then the next line of each, at 8 GB/s;
blocks are read in order. With 128 tokens or more, products took .4 to .8 of the time. Other backends have one block.

In the cache of completions, all axes that are not multiplied are one axis: with an axis G of size 1, XLA on CPU copied
the whole cache for each token. Blocks have no axis of their own for the same reason. On a mesh, completions have two
axes, N and K·G, because prompts and heads are spread along different axes of the mesh.

Letters: see `transformer`. A block has B tokens, and W new tokens of each completion are added at a time.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.products import einsum, traits_of_backend, write_slice

_BLOCKS = 64, 32  # sizes of a block; the first that divides the slots of a cache is used


class KeyValues(NamedTuple):
    """Keys and values of one layer, or of all layers with a leading axis L, as a decode step reads them.

    A pass over rows has both as `[N, M, K, E]`: see `group_by_prompt`.
    """

    keys: jax.Array  # [N, K, P, E] of prompts, [N·K·G, C, E] of completions; on a CPU [N, K, E, P], [N·K·G·C/B, E, B]
    values: jax.Array  # [N, K, P, E] of prompts, [N·K·G, C, E] of completions


class DeltaState(NamedTuple):
    """The memory of a delta net after a prompt, `[N, ...]`, or after the tokens of a completion, `[N, G, ...]`."""

    tail: jax.Array  # float32 [..., J − 1, F], the inputs of the convolution for the last tokens
    state: jax.Array  # float32 [..., H, A, B]: see `delta`


Memory = KeyValues | DeltaState | None  # of a layer; None: it reads that of another layer


class Prefix(NamedTuple):
    """The part of the cache that the completions of a prompt share."""

    # The keys and values of the prompts, by layer. The states of delta nets are copied to the completions instead
    layers: tuple[KeyValues | None, ...]
    mask: jax.Array  # bool [N, P], true on tokens of the prompt
    length: jax.Array  # int32 [N], number of tokens of the prompt, which is the position of the first completion token


def group_by_prompt(rows: KeyValues) -> KeyValues:
    """Rearranges keys and values of prompts, `[N, P, K, E]`, for decode steps."""
    keys, values = (x.swapaxes(1, 2) for x in rows)
    return KeyValues(keys.swapaxes(-1, -2) if _features_first() else keys, values)


def cache_keys(keys: jax.Array) -> jax.Array:
    """Rearranges keys of completions, `[..., C, E]`, to the layout of `KeyValues`."""
    if not _features_first():
        return keys
    *rows, slots, features = keys.shape
    size = next((size for size in _BLOCKS if slots % size == 0), slots)
    return keys.reshape(*rows[:-1], -1, size, features).swapaxes(-1, -2)


def _features_first() -> bool:
    return traits_of_backend().features_first


def _num_blocks(cache: KeyValues) -> int:
    """Returns the number of blocks that the keys of a completion have."""
    return math.prod(cache.keys.shape[:-2]) // math.prod(cache.values.shape[:-2]) if _features_first() else 1


# ---- products with it


def match_prompt(queries: jax.Array, prompt: KeyValues) -> jax.Array:
    """Multiplies queries `[N, K, G, Q, E]` by the keys of prompts -> float32 `[N, K, G, Q, P]`."""
    n, k, g, q, e = queries.shape
    axes = "ep" if _features_first() else "pe"
    return einsum(f"nkme,nk{axes}->nkmp", queries.reshape(n, k, g * q, e), prompt.keys).reshape(n, k, g, q, -1)


def match_cache(queries: jax.Array, cache: KeyValues) -> jax.Array:
    """Multiplies queries `[N, K, G, Q, E]` by the keys of completions -> float32 `[N, K, G, C/B, Q, B]`."""
    n, k, g, q, e = queries.shape
    blocks, rows, axes = _num_blocks(cache), cache.values.shape[:-2], "ec" if _features_first() else "ce"
    # Queries are repeated for each block. If only the keys had an axis of blocks, XLA would move it and copy all keys.
    repeated = jnp.broadcast_to(queries.reshape(*rows, 1, q, e), (*rows, blocks, q, e))
    repeated = repeated.reshape(*cache.keys.shape[:-2], q, e)
    return einsum(f"...qe,...{axes}->...qc", repeated, cache.keys).reshape(n, k, g, blocks, q, -1)


def split_blocks(x: jax.Array, cache: KeyValues) -> jax.Array:
    """Splits an array with one value per slot, `[..., Q, C]`, into blocks like `match_cache`: `[..., C/B, Q, B]`."""
    return x.reshape(*x.shape[:-1], _num_blocks(cache), -1).swapaxes(-2, -3)


def sum_prompt(weights: jax.Array, prompt: KeyValues) -> jax.Array:
    """Sums the values of prompts by weights `[N, K, G, Q, P]` -> float32 `[N, K, G, Q, E]`."""
    n, k, g, q, size = weights.shape
    summed = einsum("nkmp,nkpe->nkme", weights.reshape(n, k, g * q, size), prompt.values)
    return summed.reshape(n, k, g, q, -1)


def sum_cache(weights: jax.Array, cache: KeyValues) -> jax.Array:
    """Sums the values of completions by weights `[N, K, G, C/B, Q, B]` -> float32 `[N, K, G, Q, E]`."""
    leading, (q, size) = cache.keys.shape[:-2], weights.shape[-2:]
    values = cache.values.reshape(*leading, size, -1)
    block_sums = einsum("...qc,...ce->...qe", weights.reshape(*leading, q, size), values)
    return jnp.sum(block_sums.reshape(*weights.shape[:-1], -1), axis=3)


# ---- writes


def write_tokens(cache: KeyValues, keys: jax.Array, values: jax.Array, places: jax.Array) -> KeyValues:
    """Writes W tokens of each completion to the cache.

    Args:
      cache: The keys and values of the completions in this layer.
      keys, values: The keys and values of the tokens, `[N, K, G, W, E]`.
      places: The slots of the cache that the tokens are written to, int32: a scalar if W is 1, or `[N, G, W]`. A token
        whose slot the cache does not have is dropped.

    Returns:
      The cache with the tokens.
    """
    rows = cache.values.shape[:-2]
    keys, values = (x.reshape(*rows, *x.shape[-2:]) for x in (keys, values))
    key_rows = cache.keys.reshape(*rows, -1, *cache.keys.shape[-2:]) if _features_first() else cache.keys
    write = _write_slot if not places.ndim else _write_slots
    keys, values = write(key_rows, cache.values, keys, values, places)
    return KeyValues(keys.reshape(cache.keys.shape), values)


def _write_slot(own_keys, own_values, keys, values, place):
    """Writes one token of each completion to the same slot of each: keys `[..., C/B, E, B]`, or `[..., C, E]`."""
    values = write_slice(own_values, values, {-2: place})
    if not _features_first():
        return write_slice(own_keys, keys, {-2: place}), values
    block, place = jnp.divmod(place, own_keys.shape[-1])
    return write_slice(own_keys, keys.swapaxes(-1, -2)[..., None, :, :], {-3: block, -1: place}), values


def _write_slots(own_keys, own_values, keys, values, places):
    """Writes tokens to slots `[N, G, W]`: keys `[..., C/B, E, B]`, or `[..., C, E]`."""
    rows = own_values.shape[:-2]
    heads = math.prod(rows) * places.shape[-1] // places.size
    places = jnp.repeat(places[:, None], heads, axis=1).reshape(*rows, -1)

    def put(old: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
        return old.at[places].set(new, mode="drop")

    def put_keys(old: jax.Array, new: jax.Array, places: jax.Array) -> jax.Array:
        if not _features_first():
            return put(old, new, places)
        block, place = jnp.divmod(places, old.shape[-1])
        return old.at[block, :, place].set(new, mode="drop")

    for _ in rows:
        put, put_keys = jax.vmap(put), jax.vmap(put_keys)
    return put_keys(own_keys, keys, places), put(own_values, values, places)


# ---- sizes and rows


def key_values(layers: Sequence[Memory]) -> list[KeyValues]:
    """Returns the keys and values of the layers with attention."""
    return [layer for layer in layers if isinstance(layer, KeyValues)]


def widen(layers: tuple[Memory, ...], slots: Sequence[int]) -> tuple[Memory, ...]:
    """Extends the cache of each layer to the given number of slots per completion."""

    def pad(x: jax.Array, slots: int) -> jax.Array:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, slots - x.shape[-2]), (0, 0)])

    def wider(layer: Memory, slots: int) -> Memory:
        if not isinstance(layer, KeyValues):
            return layer
        keys = layer.keys.swapaxes(-1, -2).reshape(layer.values.shape) if _features_first() else layer.keys
        return KeyValues(cache_keys(pad(keys, slots)), pad(layer.values, slots))

    return tuple(wider(layer, size) for layer, size in zip(layers, slots, strict=True))


def select_completions(
    prefix: Prefix, layers: tuple[Memory, ...], chosen: jax.Array
) -> tuple[Prefix, tuple[Memory, ...]]:
    """Copies the cache of some of N·G completions, as the cache of R prompts with one completion each.

    Args:
      prefix: The cache of the N prompts.
      layers: The cache of all completions, by layer.
      chosen: The indices of the completions to copy, int `[R]`, from 0 to N·G − 1.

    Returns:
      A prefix with one copy of the prompt for each chosen completion, and the cache of these completions.
    """
    num_prompts = prefix.mask.shape[0]
    prompt_cache, completion_cache = key_values(prefix.layers)[0], key_values(layers)[0]
    group_size = completion_cache.values.shape[0] // math.prod(prompt_cache.values.shape[:2])
    prompt, member = jnp.divmod(chosen, group_size)

    def take_layer(layer: Memory, shared: KeyValues | None) -> Memory:
        if shared is None:
            return jax.tree.map(lambda x: x[prompt, member][:, None], layer)

        def take(x: jax.Array) -> jax.Array:
            heads = shared.values.shape[1]
            taken = x.reshape(num_prompts, heads, group_size, -1, *x.shape[1:])[prompt, :, member]  # [R, K, …]
            return taken.reshape(-1, *x.shape[1:])

        return jax.tree.map(take, layer)

    selected = tuple(map(take_layer, layers, prefix.layers))
    return jax.tree.map(lambda x: x[prompt], prefix), selected
