"""Gated delta nets: attention whose state has a fixed size, so that its cost is linear in the number of tokens.

Each value head keeps a matrix S `[A, B]`, from a key to a value. A token with query q, key k and value v decays it,
replaces a part β of the value that S holds for k, and reads it (2412.06464):

  S ← eᵍ S;  S ← S + β k (v − Sᵀk)ᵀ;  o = Sᵀq / √A

Queries and keys are normalised to length 1. Before that, a causal convolution over four tokens mixes queries, keys and
values. Prompts and completions are computed in chunks of tokens, where the sums are products of matrices; decoding
computes one token at a time. All of this is in float32. Each completion continues from the state after its prompt, also
where several completions are packed in a row.

Letters: see `transformer`. A features of a key, B features of a value, H value heads, F convolved features, C tokens of
a chunk, J taps of the convolution.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.models.config import DELTA_CHUNK, DeltaConfig, Mixer, ModelConfig
from grpo_jax.models.decoder.cache import DeltaState
from grpo_jax.models.decoder.modules import Linear, RMSNorm, linears, nn
from grpo_jax.models.params.sharding import BATCH, spread
from grpo_jax.models.rows.geometry import Geometry, LayerKind, positions_in_texts

einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)  # of float32 states


def _zeros(key: jax.Array, shapes: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


class Tokens(NamedTuple):
    """The arrays of tokens that the rule reads. Leading axes are those of the tokens, such as [R, S]."""

    queries: jax.Array  # float32 [..., H, A]
    keys: jax.Array  # float32 [..., H, A]
    values: jax.Array  # float32 [..., H, B]
    decay: jax.Array  # float32 [..., H], g, at most 0
    rate: jax.Array  # float32 [..., H], β, from 0 to 1


class DeltaNet(nn.Module):
    """A gated delta net as in Qwen3-Next and Qwen3.5: norm(o) · silu(z), projected to D features."""

    config: ModelConfig
    mixer: Mixer = "delta"

    @nn.compact
    def __call__(self, x, geometry: Geometry, kind: LayerKind, past: tuple[Any, DeltaState] | None = None, read=None):
        """Computes the delta net in the shape of x `[N, M, D]`, and the state after the prompts.

        With `past`, x holds the next tokens of completions, and the second result is the state after them.
        """
        delta, n = self.config.delta, x.shape[0]
        assert delta
        heads, features = delta.num_value_heads, delta.value_head_dim
        sizes = {"in_proj_qkv": delta.convolved, "in_proj_z": heads * features, "in_proj_b": heads, "in_proj_a": heads}
        projected = linears(self, x, {name: (size,) for name, size in sizes.items()}, use_bias=False)
        mixed, gate, rate, decay = (checkpoint_name(spread(y, BATCH), "projected") for y in projected)
        mixed, gate, rate, decay = (y.astype(jnp.float32) for y in (mixed, gate, rate, decay))
        taps = self.param("conv", _zeros, {"taps": (delta.convolved, delta.conv_kernel_dim)})["taps"]
        decay_params = self.param("decay", _zeros, {"log_rate": heads, "bias": heads})
        decay = -jnp.exp(decay_params["log_rate"]) * jax.nn.softplus(decay + decay_params["bias"])
        rate = jax.nn.sigmoid(rate)
        if past is None:
            states, after = _compute_rows(delta, mixed, decay, rate, taps, geometry)
        else:
            shape = past[1].state.shape[:2]
            mixed, decay, rate = (y.reshape(*shape, -1, y.shape[-1]) for y in (mixed, decay, rate))
            states, after = _compute_next(delta, mixed, decay, rate, taps, geometry.is_token, past[1])
        states = states.reshape(n, -1, heads, features)
        normed = RMSNorm(self.config.rms_norm_eps, name="norm")(states)
        gated = (normed * jax.nn.silu(gate.reshape(normed.shape))).astype(x.dtype).reshape(*x.shape[:2], -1)
        return Linear((self.config.hidden_size,), False, name="out_proj")(checkpoint_name(gated, "attended")), after


def _compute_rows(
    delta: DeltaConfig, mixed: jax.Array, decay: jax.Array, rate: jax.Array, taps: jax.Array, geometry: Geometry
) -> tuple[jax.Array, DeltaState]:
    """Computes prompts, and then segments, which continue from the states of their prompts."""
    assert geometry.prompt_mask is not None
    (n, width), (group_size, size), numbers = geometry.prompt_mask.shape, geometry.segments, geometry.numbers
    prompt_mixed = jnp.where(geometry.prompt_mask[..., None], mixed[:, :width], 0)  # padding adds nothing to a state
    num_before = taps.shape[-1] - 1
    before = jnp.zeros_like(mixed, shape=(n, num_before, mixed.shape[-1]))
    state = jnp.zeros_like(mixed, shape=(n, delta.num_value_heads, delta.key_head_dim, delta.value_head_dim))
    tail = jnp.concatenate([before, prompt_mixed], axis=1)[:, -num_before:]
    outputs = []
    if width:
        tokens = _tokens(delta, convolve(before, prompt_mixed, taps), decay[:, :width], rate[:, :width])
        states, state = apply_in_chunks(tokens, state)
        outputs.append(states)
    if size:

        def by_segment(x: jax.Array) -> jax.Array:
            return x.reshape(n * group_size, size, *x.shape[2:])

        tails, initial = (jnp.repeat(x, group_size, axis=0) for x in (tail, state))
        numbers = None if numbers is None else by_segment(numbers.reshape(n, -1))
        convolved = convolve(tails, by_segment(mixed[:, width:]), taps, numbers)
        tokens = _tokens(delta, convolved, by_segment(decay[:, width:]), by_segment(rate[:, width:]))
        states, _ = apply_in_chunks(tokens, initial, numbers)
        outputs.append(states.reshape(n, group_size * size, *states.shape[2:]))
    return jnp.concatenate(outputs, axis=1), DeltaState(tail, state)


def _compute_next(
    delta: DeltaConfig,
    mixed: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    taps: jax.Array,
    is_token: jax.Array | None,
    past: DeltaState,
) -> tuple[jax.Array, DeltaState]:
    """Computes the next W tokens of completions, one by one: inputs `[N, G, W, ...]` -> `[N, G, W, H, B]`."""

    def step(past: DeltaState, token: Any) -> tuple[DeltaState, jax.Array]:
        mixed, decay, rate, is_token = token
        window = jnp.concatenate([past.tail, mixed[..., None, :]], axis=-2)
        convolved = jax.nn.silu(jnp.sum(window * taps.T, axis=-2))
        state, output = apply_token(_tokens(delta, convolved, decay, rate), past.state)
        after = DeltaState(window[..., 1:, :], state)
        if is_token is None:
            return after, output

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(is_token.reshape(*is_token.shape, *[1] * (new.ndim - 2)), new, old)

        return jax.tree.map(keep, after, past), output

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), (mixed, decay, rate, is_token))
    if mixed.shape[2] == 1:  # a loop of one step would be compiled as a loop
        after, output = step(past, jax.tree.map(lambda x: x[0], tokens))
        return output[:, :, None], after
    after, outputs = jax.lax.scan(step, past, tokens)
    return jnp.moveaxis(outputs, 0, 2), after


def convolve(before: jax.Array, x: jax.Array, taps: jax.Array, numbers: jax.Array | None = None) -> jax.Array:
    """silu(Σⱼ taps[:, j] · x[t − J + 1 + j]): a causal convolution of each feature, over the tokens of a text.

    Args:
      before: The inputs before the first token of each text, `[R, J − 1, F]`.
      x: The inputs, `[R, S, F]`.
      taps: The weights of each feature, `[F, J]`, that of the token itself last.
      numbers: The text of each token, int `[R, S]`, each text in one piece. None: one text.

    Returns:
      `[R, S, F]`.
    """
    size, num_taps = x.shape[1], taps.shape[-1]
    padded = jnp.concatenate([before, x], axis=1)
    total = x * taps[:, -1]
    for distance in range(1, num_taps):
        shifted = jax.lax.slice_in_dim(padded, num_taps - 1 - distance, num_taps - 1 - distance + size, axis=1)
        if numbers is not None:
            position = positions_in_texts(numbers)
            for place in range(distance):  # the token lies before the text that begins `place` tokens earlier
                prompt = before[:, num_taps - 1 - distance + place][:, None]
                shifted = jnp.where((position == place)[..., None], prompt, shifted)
        total = total + shifted * taps[:, -1 - distance]
    return jax.nn.silu(total)


def _tokens(delta: DeltaConfig, convolved: jax.Array, decay: jax.Array, rate: jax.Array) -> Tokens:
    """Splits convolved features `[..., F]` into heads, and normalises queries and keys. 1/√A is part of queries."""
    size = delta.num_key_heads * delta.key_head_dim
    queries, keys, values = jnp.split(convolved, [size, 2 * size], axis=-1)
    repeats = delta.num_value_heads // delta.num_key_heads

    def unit(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:-1], delta.num_key_heads, delta.key_head_dim)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, repeats, axis=-2)

    values = values.reshape(*values.shape[:-1], delta.num_value_heads, delta.value_head_dim)
    return Tokens(unit(queries) * delta.key_head_dim**-0.5, unit(keys), values, decay, rate)


def apply_token(token: Tokens, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """S ← eᵍ S + β k (v − eᵍ Sᵀk)ᵀ; o = Sᵀq, for one token of each text. 2412.06464.

    Args:
      token: The token, with leading axes [...].
      state: S, float32 `[..., H, A, B]`.

    Returns:
      The state after the token, and the output `[..., H, B]`.
    """
    state = state * jnp.exp(token.decay)[..., None, None]
    held = jnp.sum(state * token.keys[..., None], axis=-2)
    change = token.rate[..., None] * (token.values - held)
    state = state + token.keys[..., None] * change[..., None, :]
    return state, jnp.sum(state * token.queries[..., None], axis=-2)


def apply_in_chunks(
    tokens: Tokens, state: jax.Array, numbers: jax.Array | None = None, *, chunk: int = DELTA_CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Computes `apply_token` for all tokens of texts, a chunk at a time.

    In a chunk, the changes u of S solve a triangular system (2406.06484), with sums over earlier tokens s:
    uₜ = βₜ (vₜ − eᶜᵗ Sᵀkₜ − Σₛ eᶜᵗ⁻ᶜˢ (kₛ·kₜ) uₛ). Here c are sums of g from the beginning of the chunk, or of a text
    that begins in it.

    Args:
      tokens: The tokens, with leading axes [R, S].
      state: The state before each text, float32 `[R, H, A, B]`.
      numbers: The text of each token, int `[R, S]`, each text in one piece. None: one text.
      chunk: The number of tokens of a chunk, C.

    Returns:
      The outputs, float32 `[R, S, H, B]`, and the state after the last token.
    """
    size, initial = tokens.decay.shape[1], state
    chunk = min(chunk, size)
    padding = -size % chunk

    def in_chunks(x: jax.Array) -> jax.Array:
        """Arranges [R, S, ...] as [chunks, R, C, ...]. Padding has keys and decays of 0, which change nothing."""
        x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)], mode="edge" if x.ndim == 2 else "constant")
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    causal = jnp.tril(jnp.ones((chunk, chunk), bool))

    def step(carry: tuple[jax.Array, jax.Array | None], scanned: tuple[Tokens, jax.Array | None]) -> Any:
        (state, last), (tokens, numbers) = carry, scanned
        # Heads come before tokens, as in other products.
        queries, keys, values, decay, rate = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 1), tokens)
        seen = causal if numbers is None else causal & (numbers[:, None, :, None] == numbers[:, None, None, :])
        sums = einsum("rhts,rhs->rht", jnp.broadcast_to(seen, (*decay.shape, chunk)).astype(decay.dtype), decay)
        between = jnp.exp(jnp.where(seen, sums[..., :, None] - sums[..., None, :], -jnp.inf))

        def read(x: jax.Array) -> jax.Array:
            """xᵀS, where S is the state before the chunk, or before the text if it begins in the chunk."""
            x = x * jnp.exp(sums)[..., None]
            result = einsum("rhta,rhab->rhtb", x, state)
            if numbers is None or last is None:
                return result
            continues = (numbers == last[:, None])[:, None, :, None]
            return jnp.where(continues, result, einsum("rhta,rhab->rhtb", x, initial))

        system = rate[..., None] * between * einsum("rhta,rhsa->rhts", keys, keys)
        changes = jax.scipy.linalg.solve_triangular(
            system, rate[..., None] * (values - read(keys)), lower=True, unit_diagonal=True
        )
        outputs = read(queries) + einsum("rhts,rhsb->rhtb", between * einsum("rhta,rhsa->rhts", queries, keys), changes)
        if numbers is not None and last is not None:
            continues = jnp.equal(numbers[:, -1], last)[:, None, None, None]
            state, last = jnp.where(continues, state, initial), numbers[:, -1]
        state = jnp.exp(sums[..., -1])[..., None, None] * state
        state = state + einsum("rhsa,rhs,rhsb->rhab", keys, between[..., -1, :], changes)
        return (state, last), jnp.moveaxis(outputs, 1, 2)

    first = None if numbers is None else numbers[:, 0]
    scanned = jax.tree.map(in_chunks, (tokens, numbers))
    (state, _), outputs = jax.lax.scan(step, (state, first), scanned)
    return jnp.moveaxis(outputs, 0, 1).reshape(outputs.shape[1], -1, *outputs.shape[3:])[:, :size], state
