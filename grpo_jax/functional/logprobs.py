"""Log-probabilities of tokens, entropies and divergences, from hidden states.

Logits over a vocabulary of 150 thousand are by far the largest array of a training step. Here they exist one slice of
the vocabulary at a time, in the forward and in the backward pass. Only small logits are stored for the backward pass.

Letters: T tokens (with any leading axes), D features, V vocabulary, R tokens of all leading axes in one, C width of a
slice of the vocabulary, K slices.

A model of which only the logits are known has no unembedding: where it is None, hidden states `[..., V]` are logits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import check_above, check_beta, softcapped, takes
from grpo_jax.functional.products import Traits, accumulator_of, einsum, exp_sums, traits_of_backend, transposed

_Reduced = TypeVar("_Reduced")  # arrays of one slice of the vocabulary, or of all slices with a leading axis K


class TokenLogprobs(NamedTuple):
    """Log-probabilities and entropies, both float32 `[..., T]`, in nats."""

    logprobs: jax.Array
    entropy: jax.Array


@takes(ids="...", hidden="... D", unembedding="V D")
def token_logprobs(
    hidden: jax.Array,
    unembedding: jax.Array | None,
    ids: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    softcap: jax.Array | float | None = None,
) -> TokenLogprobs:
    """log π(id) = z[id] − log Σ_v exp z[v] and H = −Σ_v π(v) log π(v), where z = W h / τ.

    With a `softcap` c, z = c·tanh(W h / c) / τ, as in Gemma 2 (2408.00118).

    log π is computed as −log(1 + exp(log Σ_{v ≠ id} exp z[v] − z[id])), so that a probability near 1 and its gradient
    keep their digits: 25 nats above each of 1,000 other tokens log π is −1.4e-8 and not 0. The relative error of such
    a log π is the error of z in nats.

    No array `[..., T, V]` above 128 MiB is held: each slice of the vocabulary is reduced at once, and the backward pass
    computes it again. Smaller arrays are stored for the backward pass. Both results are differentiable in `hidden`,
    `unembedding`, `temperature` and `softcap`. Products are taken in the dtype of the inputs and
    accumulated in float32.

    Args:
      hidden: `[..., T, D]`, the decoder's output after its last norm.
      unembedding: `[V, D]`.
      ids: int `[..., T]`, in [0, V). The result for other ids is unspecified: mask them.
      temperature: τ > 0 of the sampler; broadcasts against `[..., T]`. Default 1.
      softcap: c > 0, a scalar. Default None: logits are not capped.

    Returns:
      `TokenLogprobs(logprobs, entropy)`, both float32 `[..., T]`, of the distribution
      after temperature.

    Raises:
      AssertionError: shapes disagree (at trace time).

    Examples:
      >>> hidden, unembedding = jnp.ones((1, 2, 3)), jnp.zeros((4, 3))  # T = 2, D = 3, V = 4
      >>> result = token_logprobs(hidden, unembedding, jnp.array([[0, 3]]))
      >>> print(result.logprobs, result.entropy)  # −log 4, log 4
      [[-1.386 -1.386]] [[1.386 1.386]]
    """
    (logits,) = _logits_of((hidden, unembedding, softcap), temperature=temperature)
    logprobs, entropy = _token_logprobs(logits, ids.ravel())
    return TokenLogprobs(logprobs.reshape(ids.shape), entropy.reshape(ids.shape))


@takes(hidden="... D", unembedding="V D", ref_hidden="... E", ref_unembedding="V E")
def token_kl(
    hidden: jax.Array,
    unembedding: jax.Array | None,
    ref_hidden: jax.Array,
    ref_unembedding: jax.Array | None,
    *,
    temperature: jax.Array | float = 1.0,
    reverse: bool = False,
    softcap: jax.Array | float | None = None,
    ref_softcap: jax.Array | float | None = None,
) -> jax.Array:
    """KL(π ‖ π_ref) = Σ_v π(v) (log π(v) − log π_ref(v)), or with `reverse` KL(π_ref ‖ π); π ∝ exp(W h / τ), so π_ref.

    This is `kl_full` of the logits without holding `[..., T, V]`: slice by slice, as in `token_logprobs`. It is
    differentiable in `hidden`, `unembedding` and `temperature`; the reference gets no gradient. GRPO's objective has
    KL(π ‖ π_ref); some descriptions of PPO have the reverse.

    Args:
      hidden: `[..., T, D]`, the output of the policy's decoder after its last norm.
      unembedding: `[V, D]`.
      ref_hidden: `[..., T, D']`, the output of the reference's decoder, which may have another width.
      ref_unembedding: `[V, D']`.
      temperature: τ > 0 of the sampler, for both models; broadcasts against `[..., T]`. Default 1.
      reverse: take the expectation under the reference instead.
      softcap: c > 0 of the policy, as in `token_logprobs`. Default None: its logits are not capped.
      ref_softcap: c > 0 of the reference. Default None.

    Returns:
      float32 `[..., T]` in nats, never negative; up to about 1e-6 by rounding where the distributions are equal.

    Raises:
      AssertionError: shapes disagree (at trace time).

    Examples:
      >>> hidden, unembedding = jnp.ones((1, 1)), jnp.zeros((2, 1))  # T = 1, D = 1, V = 2
      >>> print(token_kl(hidden, unembedding, hidden, jnp.log(jnp.array([[1.0], [3.0]]))))  # ½ log 4/3
      [0.1438]
    """
    shape = hidden.shape[:-1]
    reference = jax.lax.stop_gradient((ref_hidden, ref_unembedding, ref_softcap))
    policy, ref = _logits_of((hidden, unembedding, softcap), reference, temperature=temperature)
    return (_kl(ref, policy) if reverse else _kl(policy, ref)).reshape(shape)


@takes(hidden="... D", unembedding="V D", ref_hidden="... E", ref_unembedding="V E", beta="number")
def token_jsd(
    hidden: jax.Array,
    unembedding: jax.Array | None,
    ref_hidden: jax.Array,
    ref_unembedding: jax.Array | None,
    *,
    beta: jax.Array | float = 0.5,
    temperature: jax.Array | float = 1.0,
    softcap: jax.Array | float | None = None,
    ref_softcap: jax.Array | float | None = None,
) -> jax.Array:
    """JSD_β = β KL(π_T ‖ M) + (1 − β) KL(π ‖ M), M = β π_T + (1 − β) π; π ∝ exp(W h / τ), so π_T. GKD (2306.13649).

    This is `jsd_full` of the logits without holding `[..., T, V]`: slice by slice, as in `token_logprobs`. It is
    differentiable in `hidden`, `unembedding`, `beta` and `temperature`; the other model, such as a teacher π_T, gets no
    gradient.

    Args:
      hidden: `[..., T, D]`, the output of the policy's decoder after its last norm.
      unembedding: `[V, D]`.
      ref_hidden: `[..., T, D']`, the output of the other model's decoder, which may have another width.
      ref_unembedding: `[V, D']`.
      beta: β, between 0 and 1. Near 0 the divergence is β times the forward KL, near 1 it is (1 − β) times the reverse
        one. 0.5 as in the paper's symmetric divergence and in TRL.
      temperature: τ > 0 of the sampler, for both models; broadcasts against `[..., T]`. Default 1.
      softcap: c > 0 of the policy, as in `token_logprobs`. Default None: its logits are not capped.
      ref_softcap: c > 0 of the other model. Default None.

    Returns:
      float32 `[..., T]` in nats, never negative; up to about 1e-6 by rounding where the distributions are equal.

    Raises:
      AssertionError: shapes disagree (at trace time).
      ValueError: beta is not between 0 and 1 (a traced value is not checked).

    Examples:
      >>> one, certain = jnp.ones((1, 1)), jnp.array([[0.0], [-99.0]])  # T = 1, D = 1, V = 2
      >>> print(token_jsd(one, certain, one, certain[::-1]))  # they share no token: log 2
      [0.693]
    """
    check_beta(beta)
    shape = hidden.shape[:-1]
    reference = jax.lax.stop_gradient((ref_hidden, ref_unembedding, ref_softcap))
    policy, ref = _logits_of((hidden, unembedding, softcap), reference, temperature=temperature)
    # Under shard_map β must have the type of the logits: see `_logits_of`.
    beta = jnp.asarray(beta, jnp.float32) + 0 * policy.scale
    return _jsd(policy, ref, beta).reshape(shape)


@takes(hidden="... D", unembedding="V D")
def top_tokens(hidden: jax.Array, unembedding: jax.Array | None, k: int) -> jax.Array:
    """argtop_k W h, the k likeliest tokens, without holding `[..., T, V]`.

    Args:
      hidden: `[..., T, D]`, the decoder's output after its last norm.
      unembedding: `[V, D]`.
      k: the number of tokens, at most V.

    Returns:
      int32 `[..., T, k]`, the likeliest first.

    Raises:
      AssertionError: shapes disagree (at trace time).
      ValueError: k is not between 1 and V.

    Examples:
      >>> print(top_tokens(jnp.ones((1, 1)), jnp.array([[0.0], [2.0], [1.0]]), 2))
      [[1 2]]
    """
    # Neither a temperature nor a cap changes their order.
    (logits,) = _logits_of((*jax.lax.stop_gradient((hidden, unembedding)), None), temperature=1.0)
    if not 1 <= k <= logits.vocab_size:
        raise ValueError(f"k is {k}: it must be between 1 and the {logits.vocab_size} tokens of the vocabulary")

    def merge(best: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        values, ids = best
        z, part = _slice_logits(logits, index)
        columns = jnp.broadcast_to(part.start + jnp.arange(z.shape[1], dtype=jnp.int32), z.shape)
        values = jnp.concatenate([values, _only_new(z, part, -jnp.inf)], axis=1)
        values, places = jax.lax.top_k(values, k)
        return (values, jnp.take_along_axis(jnp.concatenate([ids, columns], axis=1), places, axis=1)), None

    rows = jnp.zeros_like(logits.hidden, shape=(logits.hidden.shape[0], k), dtype=jnp.float32)
    nothing = rows - jnp.inf, rows.astype(jnp.int32)
    # int32 even if integers have 64 bits, or the ids of later slices would have another type.
    (_, ids), _ = jax.lax.scan(merge, nothing, jnp.arange(_num_slices(logits), dtype=jnp.int32))
    return ids.reshape(*hidden.shape[:-1], k)


@takes(ids="... K", hidden="... D", unembedding="V D")
def bucket_logits(
    hidden: jax.Array,
    unembedding: jax.Array | None,
    ids: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    softcap: jax.Array | float | None = None,
) -> jax.Array:
    """z[ids], and log Σ exp z[v] over v ∉ ids: logits of K chosen tokens and of all others in one; z = W h / τ.

    Their softmax is π with all tokens but the chosen ones put into one bucket. A divergence of two such distributions,
    `kl_full` or `jsd_full` of the logits, is at most that of the whole vocabulary, and equal to it if K is V − 1. No
    array `[..., T, V]` is held. The result is differentiable in the same arguments as `token_logprobs`.

    Args:
      hidden: `[..., T, D]`, the decoder's output after its last norm.
      unembedding: `[V, D]`.
      ids: int `[..., T, K]`, different ones in [0, V), such as the teacher's `top_tokens`.
      temperature: τ > 0 of the sampler, broadcasts against `[..., T]`. Default 1.
      softcap: c > 0, as in `token_logprobs`. Default None: logits are not capped.

    Returns:
      float32 `[..., T, K + 1]`, the bucket last; −inf there if nothing is left for it.

    Raises:
      AssertionError: shapes disagree (at trace time).

    Examples:
      >>> logits = bucket_logits(jnp.ones((1, 1)), jnp.log(jnp.array([[5.0], [2.0], [3.0]])), jnp.array([[0]]))
      >>> print(jnp.exp(logits))  # 5, and 2 + 3
      [[5. 5.]]
    """
    (logits,) = _logits_of((hidden, unembedding, softcap), temperature=temperature)
    return _bucket_logits(logits, ids.reshape(-1, ids.shape[-1])).reshape(*ids.shape[:-1], ids.shape[-1] + 1)


@takes(ids="...", support_ids="... K", hidden="... D", unembedding="V D")
def support_logprobs(
    hidden: jax.Array,
    unembedding: jax.Array | None,
    ids: jax.Array,
    support_ids: jax.Array,
    *,
    temperature: jax.Array | float = 1.0,
    softcap: jax.Array | float | None = None,
) -> TokenLogprobs:
    """log π(id) = z[id] − log Σ_{v ∈ S} exp z[v] and H = −Σ_{v ∈ S} π(v) log π(v), where z = W h / τ.

    S is the support of a token: the tokens that top-k, top-p or min-p left to the sampler. The ratio of two policies
    with the same support is that of the distributions that sampled, and the logits of other tokens get no gradient. It
    is `token_logprobs` without the other tokens, with the same digits near probability 1, and no array `[..., T, V]` is
    held. The results are differentiable in the same arguments.

    Args:
      hidden: `[..., T, D]`, the decoder's output after its last norm.
      unembedding: `[V, D]`.
      ids: int `[..., T]`, each in its support. Other tokens get log-probabilities without meaning: mask them.
      support_ids: int `[..., T, K]`, different ones. Those outside [0, V), such as −1, are padding.
      temperature: τ > 0 of the sampler; broadcasts against `[..., T]`. Default 1.
      softcap: c > 0, as in `token_logprobs`. Default None: logits are not capped.

    Returns:
      `TokenLogprobs(logprobs, entropy)`, both float32 `[..., T]`, of the distribution over S.

    Raises:
      AssertionError: shapes disagree (at trace time).

    Examples:
      >>> unembedding = jnp.array([[2.0], [1.0], [0.0], [-1.0]])  # the logits, for a hidden state of 1
      >>> result = support_logprobs(jnp.ones((1, 1)), unembedding, jnp.array([1]), jnp.array([[0, 1, -1]]))
      >>> print(result.logprobs)  # 1 − log (e² + e)
      [-1.313]
    """
    logits = bucket_logits(hidden, unembedding, support_ids, temperature=temperature, softcap=softcap)[..., :-1]
    is_member = (support_ids >= 0) & (support_ids < (hidden.shape[-1] if unembedding is None else len(unembedding)))
    is_chosen = is_member & (support_ids == ids[..., None])
    lowest = jnp.finfo(logits.dtype).min  # finite, because a support may be empty, or have no other tokens
    chosen = jnp.sum(jnp.where(is_chosen, logits, 0), axis=-1)
    others = jax.nn.logsumexp(jnp.where(is_member & ~is_chosen, logits, lowest), axis=-1)
    normalizer = jax.nn.logsumexp(jnp.where(is_member, logits, lowest), axis=-1, keepdims=True)
    log_p = jnp.where(is_member, logits - normalizer, 0)
    entropy = -jnp.sum(jnp.where(is_member, jnp.exp(log_p) * log_p, 0), axis=-1)
    return TokenLogprobs(-jax.nn.softplus(others - chosen), entropy)


class _Logits(NamedTuple):
    """z = scale · W h, or scale · c·tanh(W h / c), not yet computed; or the gradients of its fields."""

    hidden: jax.Array  # [R, D]
    unembedding: jax.Array | None  # [V, D]; None: W h is `hidden`
    scale: jax.Array  # float32 [R], 1/τ
    softcap: jax.Array | None  # float32 scalar, c

    @property
    def vocab_size(self) -> int:
        return self.hidden.shape[1] if self.unembedding is None else self.unembedding.shape[0]


class _Slice(NamedTuple):
    """Columns `[start, start + C)` of the vocabulary, the first `num_seen` of which are in the slice before as well."""

    number: jax.Array  # int32 scalar, of the slice
    start: jax.Array  # int32 scalar
    num_seen: jax.Array | int  # the int 0 where no slices overlap


_Moments = tuple[jax.Array, jax.Array, jax.Array]  # maximum, Σ exp(z − maximum) and Σ x exp(z − maximum), of a slice


def _logits_of(*models: tuple[jax.Array, jax.Array | None, Any], temperature: jax.Array | float) -> list[_Logits]:
    """Makes one `_Logits` for each (hidden, unembedding, softcap).

    Under shard_map hidden states vary over devices, while a replicated matrix does not, and a custom gradient must have
    the type of its input. Adding a zero that varies gives all arrays one type, and JAX sums the gradient of the matrix
    over devices. XLA removes the addition.
    """
    for *_, softcap in models:
        check_above(0, temperature=temperature, softcap=softcap)
    scale = 1.0 / jnp.asarray(temperature, jnp.float32)
    arrays = jax.tree.leaves(([model[:2] for model in models], scale))
    zeros = (jnp.zeros_like(x, shape=(), dtype=jnp.float32) for x in arrays)
    zero = sum(zeros, start=jnp.float32(0))

    def logits(hidden: jax.Array, unembedding: jax.Array | None, softcap: Any) -> _Logits:
        flat = hidden.reshape(-1, hidden.shape[-1])
        scales = jnp.broadcast_to(scale, hidden.shape[:-1]).ravel()
        cap = None if softcap is None else jnp.asarray(softcap, jnp.float32)
        varying: _Logits = jax.tree.map(lambda x: x + zero.astype(x.dtype), _Logits(flat, unembedding, scales, cap))
        return varying

    return [logits(*model) for model in models]


# ---- log-probabilities and entropies


_LogprobsResiduals = tuple[_Logits, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]


@jax.custom_vjp
def _token_logprobs(logits: _Logits, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _logprobs_forward(logits, ids)[0]


def _logprobs_forward(logits: _Logits, ids: jax.Array) -> tuple[tuple[jax.Array, jax.Array], _LogprobsResiduals]:
    """Reduces the logits to z[id], and log Σ exp z and the mean of z over all other tokens.

    With x = log Σ_others exp z − z[id], log π(id) is −log(1 + exp x), and log(1 − π(id)) is −log(1 + exp(−x)). A
    probability near 1 then loses no digits, as it does where the sum over all tokens is subtracted from z[id].
    """

    keeps = logits.unembedding is not None and keeps_logits(len(logits.hidden), logits.vocab_size, traits_of_backend())

    def reduce_slice(index: jax.Array) -> tuple[jax.Array, _Moments, jax.Array | None]:
        products, part = _slice_products(logits, index)
        z = _logits_of_products(products, logits.scale, logits.softcap)
        chosen, is_new = _at_ids(z, ids[:, None], part)
        others = jnp.where(_is_chosen(ids, z, part), jnp.finfo(z.dtype).min, z)  # finite, if there is no other
        return jnp.where(is_new, chosen, 0)[:, 0], _moments(others, others, part), products if keeps else None

    # [K, R], three of [K, R], [K, R, C]
    chosen, moments, products = _map_slices(reduce_slice, logits)
    chosen, (log_others, mean_others) = jnp.sum(chosen, axis=0), _combine(*moments)
    logprobs, log_rest = -jax.nn.softplus(log_others - chosen), -jax.nn.softplus(chosen - log_others)
    entropy = jnp.exp(log_rest) * (log_others - mean_others - log_rest) - jnp.exp(logprobs) * logprobs
    return (logprobs, entropy), (logits, ids, chosen - logprobs, logprobs, entropy, products)


def _logprobs_backward(residuals: _LogprobsResiduals, cotangents: tuple[jax.Array, jax.Array]) -> tuple[_Logits, None]:
    """∂L/∂z[v] = g_logp (1[v = id] − π(v)) − g_H π(v) (log π(v) + H)."""
    logits, ids, log_normalizer, logprobs, entropy, products = residuals
    d_logprobs, d_entropy = cotangents
    d_chosen = -d_logprobs * jnp.expm1(logprobs) - d_entropy * jnp.exp(logprobs) * (logprobs + entropy)

    def d_logits(z: jax.Array, part: _Slice) -> jax.Array:
        log_p = z - log_normalizer[:, None]
        slope = d_logprobs[:, None] + d_entropy[:, None] * (log_p + entropy[:, None])
        return jnp.where(_is_chosen(ids, z, part), d_chosen[:, None], -jnp.exp(log_p) * slope)

    return _gradients(logits, d_logits, products), None


_token_logprobs.defvjp(_logprobs_forward, _logprobs_backward)


def _is_chosen(ids: jax.Array, z: jax.Array, part: _Slice) -> jax.Array:
    """Marks the elements of a slice `[R, C]` at the columns `ids` `[R]`."""
    return (part.start + jnp.arange(z.shape[1]))[None, :] == ids[:, None]


# ---- divergences


_KlResiduals = tuple[_Logits, _Logits, jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def _kl(first: _Logits, second: _Logits) -> jax.Array:
    """KL(P ‖ Q), `[R]`."""
    return _kl_forward(first, second)[0]


def _kl_forward(first: _Logits, second: _Logits) -> tuple[jax.Array, _KlResiduals]:
    """KL = the mean of z_P − z_Q under P, − log Σ exp z_P + log Σ exp z_Q."""

    def reduce_slice(index: jax.Array) -> tuple[_Moments, _Moments]:
        z, part = _slice_logits(first, index)
        other, _ = _slice_logits(second, index)
        # The difference is taken before the sum: between close distributions two sums would cancel to rounding noise.
        return _moments(z, z - other, part), _moments(other, other, part)

    reduce_first, reduce_second = _map_slices(reduce_slice, first)  # each [K, R]
    (log_normalizer, mean_difference), (other_normalizer, _) = _combine(*reduce_first), _combine(*reduce_second)
    # Rounding may leave a little less than 0 where the distributions are equal.
    kl = jnp.maximum(mean_difference - (log_normalizer - other_normalizer), 0)
    return kl, (first, second, log_normalizer, other_normalizer, kl)


def _kl_backward(residuals: _KlResiduals, d_kl: jax.Array) -> tuple[_Logits, _Logits]:
    """∂KL/∂z_P[v] = P(v) (log P(v) − log Q(v) − KL), ∂KL/∂z_Q[v] = Q(v) − P(v)."""
    first, second, log_normalizer, other_normalizer, kl = residuals

    def d_first(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        return d_kl[:, None] * jnp.exp(log_p) * (log_p - log_q - kl[:, None])

    def d_second(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
        return d_kl[:, None] * (jnp.exp(log_q) - jnp.exp(log_p))

    return _gradients_of_two(first, second, log_normalizer, other_normalizer, d_first, d_second)


_kl.defvjp(_kl_forward, _kl_backward)


def _gradients_of_two(
    first: _Logits,
    second: _Logits,
    first_normalizer: jax.Array,
    second_normalizer: jax.Array,
    d_first: Callable[[jax.Array, jax.Array], jax.Array],
    d_second: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[_Logits, _Logits]:
    """Computes gradients of the fields of P's and Q's `_Logits`, from (log P, log Q) -> ∂L/∂z_P, and -> ∂L/∂z_Q.

    Each takes one pass: usually only one is needed, and XLA drops the other.
    """

    def reduce_first(z: jax.Array, part: _Slice) -> jax.Array:
        other, _ = _slice_logits(second, part.number)
        return d_first(z - first_normalizer[:, None], other - second_normalizer[:, None])

    def reduce_second(z: jax.Array, part: _Slice) -> jax.Array:
        other, _ = _slice_logits(first, part.number)
        return d_second(other - first_normalizer[:, None], z - second_normalizer[:, None])

    return _gradients(first, reduce_first), _gradients(second, reduce_second)


_JsdResiduals = tuple[_Logits, _Logits, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def _jsd(policy: _Logits, ref: _Logits, beta: jax.Array) -> jax.Array:
    """JSD_β of the reference P and the policy Q, `[R]`, with β `[R]`."""
    return _jsd_forward(policy, ref, beta)[0]


def _to_mixture(log_q: jax.Array, log_p: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log Q − log M and log P − log M of one slice, `[R, C]`."""
    gap = log_q - log_p
    over_ref = jnp.logaddexp(jnp.log(beta)[:, None], jnp.log1p(-beta)[:, None] + gap)  # log M − log P
    return gap - over_ref, -over_ref


def _jsd_forward(policy: _Logits, ref: _Logits, beta: jax.Array) -> tuple[jax.Array, _JsdResiduals]:
    """Takes one pass for the normalisers, and one for KL(Q ‖ M) and KL(P ‖ M)."""

    def normalizers(index: jax.Array) -> tuple[_Moments, _Moments]:
        (z, part), (other, _) = _slice_logits(policy, index), _slice_logits(ref, index)
        return _moments(z, z, part), _moments(other, other, part)

    policy_sums, ref_sums = _map_slices(normalizers, policy)
    normalizer, other_normalizer = _combine(*policy_sums)[0], _combine(*ref_sums)[0]

    def divergences(index: jax.Array) -> tuple[jax.Array, ...]:
        (z, part), (other, _) = _slice_logits(policy, index), _slice_logits(ref, index)
        log_q, log_p = z - normalizer[:, None], other - other_normalizer[:, None]
        to_q, to_p = _to_mixture(log_q, log_p, beta)
        terms = jnp.exp(log_q) * to_q, jnp.exp(log_p) * to_p
        return tuple(jnp.sum(_only_new(x, part, 0), axis=-1) for x in terms)

    # Rounding may leave a little less than 0 where the distributions are equal.
    kl_q, kl_p = (jnp.maximum(jnp.sum(x, axis=0), 0) for x in _map_slices(divergences, policy))
    jsd = beta * kl_p + (1 - beta) * kl_q
    return jsd, (policy, ref, beta, normalizer, other_normalizer, kl_q, kl_p)


def _jsd_backward(residuals: _JsdResiduals, d_jsd: jax.Array) -> tuple[_Logits, _Logits, jax.Array]:
    """∂JSD/∂z_Q[v] = (1 − β) Q(v) (log Q(v)/M(v) − KL(Q ‖ M)), ∂JSD/∂z_P[v] = β P(v) (log P(v)/M(v) − KL(P ‖ M)).

    ∂JSD/∂β = KL(P ‖ M) − KL(Q ‖ M).
    """
    policy, ref, beta, normalizer, other_normalizer, kl_q, kl_p = residuals

    def d_policy(log_q: jax.Array, log_p: jax.Array) -> jax.Array:
        to_q, _ = _to_mixture(log_q, log_p, beta)
        return (d_jsd * (1 - beta))[:, None] * jnp.exp(log_q) * (to_q - kl_q[:, None])

    def d_ref(log_q: jax.Array, log_p: jax.Array) -> jax.Array:
        _, to_p = _to_mixture(log_q, log_p, beta)
        return (d_jsd * beta)[:, None] * jnp.exp(log_p) * (to_p - kl_p[:, None])

    gradients = _gradients_of_two(policy, ref, normalizer, other_normalizer, d_policy, d_ref)
    return *gradients, d_jsd * (kl_p - kl_q)


_jsd.defvjp(_jsd_forward, _jsd_backward)


# ---- chosen tokens, and all other tokens in one bucket


_BucketResiduals = tuple[_Logits, jax.Array, jax.Array]


@jax.custom_vjp
def _bucket_logits(logits: _Logits, ids: jax.Array) -> jax.Array:
    return _bucket_forward(logits, ids)[0]


def _at_columns(values: jax.Array, ids: jax.Array, part: _Slice, width: int) -> jax.Array:
    """Puts `values` `[R, K]` at their columns of a slice, 0 elsewhere: `[R, C]`."""
    place = ids - part.start
    place = jnp.where(place < 0, width, place)  # a negative index would count from the end
    row = jnp.arange(ids.shape[0])[:, None]
    return jnp.zeros_like(values, shape=(ids.shape[0], width)).at[row, place].add(values, mode="drop")


def _bucket_forward(logits: _Logits, ids: jax.Array) -> tuple[jax.Array, _BucketResiduals]:
    def reduce_slice(chosen: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        z, part = _slice_logits(logits, index)
        at_ids, is_new = _at_ids(z, ids, part)
        is_chosen = _at_columns(jnp.ones_like(chosen), ids, part, z.shape[1]) > 0
        others = jnp.where(is_chosen, -jnp.inf, _only_new(z, part, -jnp.inf))
        return jnp.where(is_new, at_ids, chosen), jax.nn.logsumexp(others, axis=1)

    zeros = jnp.zeros_like(logits.scale, shape=ids.shape)
    chosen, others = jax.lax.scan(reduce_slice, zeros, jnp.arange(_num_slices(logits)))  # [R, K], and of slices [R]
    others = jax.nn.logsumexp(others, axis=0)
    return jnp.concatenate([chosen, others[:, None]], axis=1), (logits, ids, others)


def _bucket_backward(residuals: _BucketResiduals, d_buckets: jax.Array) -> tuple[_Logits, None]:
    """∂L/∂z[v] = g[k] where v is ids[k], and g[K] exp(z[v]) / Σ_others exp z elsewhere."""
    logits, ids, others = residuals
    d_chosen, d_others = d_buckets[:, :-1], d_buckets[:, -1:]

    def d_logits(z: jax.Array, part: _Slice) -> jax.Array:
        slope = _at_columns(d_chosen, ids, part, z.shape[1])
        is_chosen = _at_columns(jnp.ones_like(d_chosen), ids, part, z.shape[1]) > 0
        return jnp.where(is_chosen, slope, d_others * jnp.exp(jnp.where(is_chosen, 0, z - others[:, None])))

    return _gradients(logits, d_logits), None


_bucket_logits.defvjp(_bucket_forward, _bucket_backward)


# ---- slices of the vocabulary


def _only_new(x: jax.Array, part: _Slice, other: float) -> jax.Array:
    """Replaces `x` `[R, C]` by `other` in columns that an earlier slice had."""
    if isinstance(part.num_seen, int):
        return x
    return jnp.where(jnp.arange(x.shape[1]) >= part.num_seen, x, other)


def _at_ids(z: jax.Array, ids: jax.Array, part: _Slice) -> tuple[jax.Array, jax.Array]:
    """Returns z `[R, C]` at some columns of the vocabulary, `[R, K]`, and marks columns that no earlier slice had."""
    place = ids - part.start
    is_new = (place >= part.num_seen) & (place < z.shape[1])
    return jnp.take_along_axis(z, jnp.clip(place, 0, z.shape[1] - 1), axis=1), is_new


def _moments(z: jax.Array, values: jax.Array, part: _Slice) -> _Moments:
    """Returns the maximum m of z in a slice, Σ exp(z − m) and Σ x exp(z − m), each `[R]`."""
    maximum, total, moment = exp_sums(_only_new(z, part, -jnp.inf), [_only_new(values, part, 0)])
    return maximum, total, moment


def _combine(maximum: jax.Array, total: jax.Array, moment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log Σ exp z and the mean of x, from the moments `[K, R]` of all slices."""
    overall = jnp.max(maximum, axis=0)
    rescale = jnp.exp(maximum - overall[None, :])
    total = jnp.sum(total * rescale, axis=0)
    return overall + jnp.log(total), jnp.sum(moment * rescale, axis=0) / total


def _gradients(
    logits: _Logits, d_logits: Callable[[jax.Array, _Slice], jax.Array], products: jax.Array | None = None
) -> _Logits:
    """Computes ∂L/∂h, ∂L/∂W, ∂L/∂scale and ∂L/∂c from d_logits(z, slice) -> ∂L/∂z, `[R, C]`.

    W h `[K, R, C]` is computed again unless it is passed as `products`.
    """
    hidden, unembedding, scale, softcap = logits

    def accumulate(carry: Any, slice_: tuple[jax.Array, jax.Array | None]) -> tuple[Any, None]:
        (d_hidden, d_unembedding, d_rest), (index, products_of_slice) = carry, slice_
        weight, part = _slice_weight(logits, index)
        if products_of_slice is None:
            products_of_slice = _products(logits, weight, part)
        z, pull = jax.vjp(_logits_of_products, products_of_slice, scale, softcap)
        slope = _only_new(d_logits(z, part), part, 0)
        if softcap is None:
            slope = slope * scale[:, None]
        else:
            slope, *d_slice = pull(slope)
            d_rest = jax.tree.map(jnp.add, d_rest, tuple(d_slice))
        slope = slope.astype(hidden.dtype)
        if weight is None:
            return (_add_at(d_hidden, slope, part.start, axis=1), None, d_rest), None
        d_hidden += einsum("rc,cd->rd", slope, weight)
        d_weight = einsum("cr,rd->cd", transposed(slope), hidden, dtype=d_unembedding.dtype)
        return (d_hidden, _add_at(d_unembedding, d_weight, part.start, axis=0), d_rest), None

    zeros = jnp.zeros_like(hidden, dtype=jnp.float32), jax.tree.map(accumulator_of, unembedding)
    scalar_grads: tuple[Any, ...] = () if softcap is None else (jnp.zeros_like(scale), jnp.zeros_like(softcap))
    # One slice at a time: of several, XLA on GPUs would write each ∂L/∂h to memory before it adds them up.
    carry, _ = jax.lax.scan(accumulate, (*zeros, scalar_grads), (jnp.arange(_num_slices(logits)), products))
    d_hidden, d_unembedding, d_rest = carry
    if softcap is None:
        # Σ_v ∂L/∂z[v] · (W h)[v] = h · ∂L/∂h / scale, which saves a pass over the logits.
        d_rest = (jnp.sum(d_hidden * hidden.astype(jnp.float32), axis=-1) / scale, None)
    d_inputs = jax.tree.map(lambda d, x: d.astype(x.dtype), (d_hidden, d_unembedding), (hidden, unembedding))
    return _Logits(*d_inputs, *d_rest)


def _add_at(total: jax.Array, x: jax.Array, start: jax.Array, *, axis: int) -> jax.Array:
    """Adds x to a slice of `total` that begins at `start`."""
    previous = jax.lax.dynamic_slice_in_dim(total, start, x.shape[axis], axis)
    return jax.lax.dynamic_update_slice_in_dim(total, previous + x, start, axis)


def _num_slices(logits: _Logits) -> int:
    return slices_of_vocabulary(logits.hidden.shape[0], logits.vocab_size, traits_of_backend())


def _map_slices(reduce_slice: Callable[[jax.Array], _Reduced], logits: _Logits) -> _Reduced:
    """Applies a function of the number of a slice to all slices, and stacks its results."""
    unroll, slices = traits_of_backend().slices_at_once, jnp.arange(_num_slices(logits))
    return jax.lax.scan(lambda _, index: (None, reduce_slice(index)), None, slices, unroll=unroll)[1]


def slices_of_vocabulary(rows: int, size: int, traits: Traits) -> int:
    """Counts slices of at most `Traits.slice_elements`; up to twice as many if they are then equally wide and disjoint.

    Args:
      rows: R, the number of tokens.
      size: V, the size of the vocabulary.
      traits: the traits of the backend.

    Returns:
      K, the number of slices.
    """
    width = max(traits.slice_elements // max(rows, 1), traits.min_slice_width)
    fewest = -(-size // width)
    return next((k for k in range(fewest, 2 * fewest) if size % k == 0), fewest)


def keeps_logits(rows: int, size: int, traits: Traits) -> bool:
    """Returns whether all logits of a piece are stored for its backward pass, instead of being computed again.

    Args:
      rows: R, the number of tokens.
      size: V, the size of the vocabulary.
      traits: the traits of the backend.
    """
    return rows * size <= traits.kept_logits


def _slice_weight(logits: _Logits, index: jax.Array) -> tuple[jax.Array | None, _Slice]:
    """Returns the part of the matrix for slice `index`, `[C, D]`, and its columns of the vocabulary.

    All slices are equally wide. If V is no multiple of C, the last one starts early and overlaps the one before it:
    padding would copy the whole matrix.
    """
    size, width = logits.vocab_size, _slice_width(logits)
    slices = _num_slices(logits)
    is_disjoint = size == slices * width
    start = index * width if is_disjoint else jnp.minimum(index * width, size - width)
    part = _Slice(index, start, 0 if is_disjoint else index * width - start)
    return jax.tree.map(lambda matrix: jax.lax.dynamic_slice_in_dim(matrix, start, width), logits.unembedding), part


def _slice_width(logits: _Logits) -> int:
    return -(-logits.vocab_size // _num_slices(logits))


def _slice_products(logits: _Logits, index: jax.Array) -> tuple[jax.Array, _Slice]:
    """Returns W h `[R, C]` of slice `index`, and the slice."""
    weight, part = _slice_weight(logits, index)
    return _products(logits, weight, part), part


def _products(logits: _Logits, weight: jax.Array | None, part: _Slice) -> jax.Array:
    """Returns W h `[R, C]` of a slice, float32, from the part of the matrix."""
    if weight is None:
        logits_of_slice = jax.lax.dynamic_slice_in_dim(logits.hidden, part.start, _slice_width(logits), axis=1)
        return logits_of_slice.astype(jnp.float32)
    return einsum("rd,cd->rc", logits.hidden, weight)


def _logits_of_products(products: jax.Array, scale: jax.Array, softcap: jax.Array | None) -> jax.Array:
    """z of W h, both `[R, C]`."""
    return softcapped(products, softcap) * scale[:, None]


def _slice_logits(logits: _Logits, index: jax.Array) -> tuple[jax.Array, _Slice]:
    """Returns z `[R, C]` of slice `index`, and the slice."""
    products, part = _slice_products(logits, index)
    return _logits_of_products(products, logits.scale, logits.softcap), part
