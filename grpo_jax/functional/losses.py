"""Weights of tokens, and complete losses: loss = Σ weights · per_token.

Weights are computed once for a whole optimizer batch, outside the loss. However that batch is then split into
microbatches or over devices, the pieces of the weighted sum add up to the same number. (A mean of microbatch means
does not.)

Masks are bool `[..., T]`: true on every sampled token, including the one that ended the completion. Leading axes are
completions. B is the number of completions in the optimizer batch. By default it counts those that have a token. Pass
`num_completions` if masked completions, such as truncated ones, should still count in the mean. TRL always counts them,
and Dr.GRPO's constant divisor means the same.

`axis_name` names the mapped axes (of `jax.pmap`, `shard_map`, `vmap`) over which the optimizer batch is spread; totals
are then global. `num_completions` is global already.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.divergence import kl_k3
from grpo_jax.functional.numerics import (
    AxisName,
    call_with,
    check_above,
    constants_of,
    is_zero,
    maybe_psum,
    takes,
    upcast,
)
from grpo_jax.functional.policy_gradient import (
    Term,
    clipped_surrogate,
    per_token,
    ratio_term,
    refuse_epsilon,
    token_log_ratio,
)


@takes(mask="... T")
def token_mean_weights(mask: jax.Array, *, num_completions: int | None = None, axis_name: AxisName = None) -> jax.Array:
    """w = m / Σ m, the same for every token. DAPO (2503.14476).

    Args:
      mask: bool `[..., T]`.
      num_completions: not read, since the divisor is the number of tokens. To count the tokens of masked completions,
        compute the weights from the mask that still has them.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to 1 over the optimizer batch (to 0 if it is empty).

    Examples:
      >>> print(token_mean_weights(jnp.array([[True, True, True], [True, False, False]])))
      [[0.25 0.25 0.25]
       [0.25 0.   0.  ]]
    """
    del num_completions
    total = maybe_psum(jnp.sum(mask, dtype=jnp.float32), axis_name)
    return mask.astype(jnp.float32) / jnp.maximum(total, 1)


@takes(mask="... T")
def sequence_mean_weights(
    mask: jax.Array, *, num_completions: int | None = None, axis_name: AxisName = None
) -> jax.Array:
    """w = m / (|oᵢ| · B), the same for every completion, shared by its tokens. DeepSeekMath (2402.03300).

    Args:
      mask: bool `[..., T]`.
      num_completions: B of the whole optimizer batch. None: the number of completions that have a token.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to 1 over the optimizer batch (to 0 if it is empty, to less than 1 if
      `num_completions` counts completions without tokens).

    Examples:
      >>> mask = jnp.array([[True, True], [True, False], [False, False]])
      >>> print(sequence_mean_weights(mask))
      [[0.25 0.25]
       [0.5  0.  ]
       [0.   0.  ]]
      >>> print(sequence_mean_weights(mask, num_completions=3))
      [[0.167 0.167]
       [0.333 0.   ]
       [0.    0.   ]]
    """
    lengths = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
    return mask.astype(jnp.float32) / (jnp.maximum(lengths, 1) * _count(mask, num_completions, axis_name))


@takes(mask="... T")
def sequence_sum_weights(
    mask: jax.Array, *, num_completions: int | None = None, axis_name: AxisName = None
) -> jax.Array:
    """w = m / B, the mean over completions of sums over their tokens. LUSPO (2602.05261).

    Args:
      mask: bool `[..., T]`.
      num_completions: B of the whole optimizer batch. None: the number of completions that have a token.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`, summing to the mean length of a completion.

    Examples:
      >>> print(sequence_sum_weights(jnp.array([[True, True], [True, False]])))
      [[0.5 0.5]
       [0.5 0. ]]
    """
    return mask.astype(jnp.float32) / _count(mask, num_completions, axis_name)


@takes(mask="... T")
def constant_length_weights(
    mask: jax.Array,
    *,
    max_length: int | None = None,
    num_completions: int | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """w = m / (B · L_max), sums over tokens divided by a constant. Dr.GRPO (2503.20783).

    Args:
      mask: bool `[..., T]`.
      max_length: L_max in tokens, the sampler's limit. None: the width T of the mask, which is right only if the
        mask is as wide as that limit.
      num_completions: B of the whole optimizer batch. None: the number of completions that have a token.
      axis_name: mapped axes over which the optimizer batch is spread.

    Returns:
      float32 `[..., T]`.

    Raises:
      ValueError: max_length is not above 0 (a traced value is not checked).

    Examples:
      >>> print(constant_length_weights(jnp.array([[True, True], [True, False]]), max_length=4))
      [[0.125 0.125]
       [0.125 0.   ]]
    """
    check_above(0, max_length=max_length)
    max_length = mask.shape[-1] if max_length is None else max_length
    return mask.astype(jnp.float32) / (max_length * _count(mask, num_completions, axis_name))


def _count(mask: jax.Array, num_completions: int | None, axis_name: AxisName) -> jax.Array:
    """Returns B, at least 1: `num_completions`, or else the number of completions that have a token."""
    if num_completions is not None:
        return jnp.maximum(jnp.asarray(num_completions, jnp.float32), 1)
    return jnp.maximum(maybe_psum(jnp.sum(jnp.any(mask, axis=-1), dtype=jnp.float32), axis_name), 1)


# name -> (weighted sum, weight): the value is their quotient, and both add up over
# microbatches, devices and steps.
Metrics = dict[str, tuple[jax.Array, jax.Array]]

clipped_term = ratio_term(token_log_ratio, clipped_surrogate)


@takes(
    logprobs="... T",
    old_logprobs="... T",
    completion_mask="... T",
    weights="... T",
    ref_logprobs="... T",
    entropy="... T",
    advantages="... | ... T",
)
def grpo_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    completion_mask: jax.Array,
    *,
    term: Term = clipped_term,
    ref_logprobs: jax.Array | None = None,
    kl_coef: float | None = None,
    divergence: Callable[[jax.Array, jax.Array], jax.Array] = kl_k3,
    kl_bias_correction: bool = False,
    entropy: jax.Array | None = None,
    entropy_coef: float = 0.0,
    weights: jax.Array | None = None,
    **constants: Any,
) -> tuple[jax.Array, Metrics]:
    """L = Σ w · [term(π, π_old, A) + β D(π, π_ref) − c H]. DeepSeekMath (2402.03300), equation 3, as a loss.

    Its variants have another term, other weights or another divergence; `presets` has the published variants.

    Args:
      logprobs: `[..., T]` in nats, under the policy, with gradient.
      old_logprobs: `[..., T]` in nats, under the policy in the denominator of the ratio.
      advantages: `[...]`, one per completion, or `[..., T]`, one per token; without gradient.
      completion_mask: bool `[..., T]`, true on sampled tokens including the ending one.
      term: (logprobs, old_logprobs, advantages, mask, **constants) -> `[..., T]`. Default: PPO's clip of token ratios.
        `ratio_term` makes other terms, and functions named `*_term` are other terms.
      ref_logprobs: `[..., T]` in nats, under the reference; without gradient. None: no KL term.
      kl_coef: β. None: 0.04 from DeepSeekMath if there is a reference. A number above 0 needs a reference.
      divergence: (logprobs, ref_logprobs) -> `[..., T]`.
      kl_bias_correction: ρ D instead of D, where ρ is the ratio of the token, with gradient. With k3 it is unbiased in
        value and gradient for samples of the old policy. DeepSeek-V3.2 (2512.02556); off in DeepSeekMath.
      entropy: `[..., T]` in nats, with gradient. None: no bonus.
      entropy_coef: c, used if there is an entropy. Default 0: GRPO has no bonus.
      weights: `[..., T]`, from one of the functions `*_weights`, computed on the whole optimizer batch.
        None: `sequence_mean_weights` of this mask, DeepSeekMath's mean.
      **constants: constants of the term, by name, such as epsilon_low and epsilon_high (0.2 each) of the default.

    Returns:
      The loss, a scalar, and metrics, each a pair (sum over tokens, number of tokens): add pairs up over
      microbatches and devices, and divide at the end. `ratio`: ρ; `clip_low` and `clip_high`: 1 for a token with an
      advantage below (above) 0 but no gradient from it; `kl`, if there is a reference: D, or ρ D.

    Raises:
      AssertionError: shapes disagree (at trace time).
      TypeError: the term has no such constant, or an argument is a list or a number instead of an array.
      ValueError: there is a kl_coef, but no reference, or an entropy_coef, but no entropy.

    Examples:
      >>> logprobs, mask = jnp.log(jnp.array([[0.6, 0.5]])), jnp.array([[True, True]])
      >>> old_logprobs = jnp.log(jnp.array([[0.4, 0.5]]))
      >>> loss, metrics = grpo_loss(logprobs, old_logprobs, jnp.array([2.0]), mask, epsilon_high=0.28)
      >>> print(loss)  # −(1.28 + 1) 2 / 2
      -2.28
    """
    refuse_epsilon(constants)
    if ref_logprobs is None and kl_coef is not None and not is_zero(kl_coef):
        raise ValueError(
            f"kl_coef is {kl_coef}: give ref_logprobs, or for a loss without KL kl_coef=0.0, which with_constants of a "
            "preset takes too"
        )
    if entropy is None and not is_zero(entropy_coef):
        raise ValueError(f"entropy_coef is {entropy_coef}: give entropy too, or leave it out")
    if weights is None:
        weights = sequence_mean_weights(completion_mask)
    # Neither the reference nor a critic that computed the advantages learns from this loss.
    advantages, ref_logprobs = jax.lax.stop_gradient((advantages, ref_logprobs))
    arrays = logprobs, old_logprobs, advantages, completion_mask
    loss = term(*arrays, **constants)
    metrics = policy_metrics(*arrays, term=partial(term, **constants))
    if ref_logprobs is not None:
        kl_coef = 0.04 if kl_coef is None else kl_coef
        # Both sides are replaced where masked, since padding may hold anything.
        kl = divergence(*(jnp.where(completion_mask, upcast(x), 0) for x in (logprobs, ref_logprobs)))
        if kl_bias_correction:
            kl = jnp.exp(token_log_ratio(logprobs, old_logprobs, completion_mask)) * kl
        loss = loss if is_zero(kl_coef) else loss + kl_coef * kl
        metrics["kl"] = masked_sum(kl, completion_mask)
    if entropy is not None and not is_zero(entropy_coef):
        loss = loss - entropy_coef * upcast(entropy)
    return weighted_sum(loss, weights, completion_mask), metrics


# Read-only, since it is shared.
_CLIP: Mapping[str, float] = MappingProxyType({"epsilon_low": 0.2, "epsilon_high": 0.2})


class Objective(NamedTuple):
    """The functions and constants of one published method."""

    advantages: Callable[..., jax.Array]
    """(rewards `[..., G]`, lengths `[..., G]` in tokens, *, where `[..., G]`, axis_name) -> `[..., G]`. With a keyword
    mask `[..., G, T]` it may return `[..., G, T]`. With token_penalty `[..., G, T]`, β k1 of a KL in the reward, the
    rewards are without this penalty."""
    term: Term = clipped_term
    """(logprobs, old_logprobs, advantages, mask, **constants) -> `[..., T]`."""
    constants: Mapping[str, float] = _CLIP
    """Constants of the term, by name. Default: the constants of the clip."""
    aggregation: Callable[..., jax.Array] = sequence_mean_weights
    """(mask, *, num_completions, axis_name) -> weights `[..., T]`. In training a keyword max_length is the limit of
    completions."""
    divergence: Callable[[jax.Array, jax.Array], jax.Array] = kl_k3
    """(logprobs, ref_logprobs) -> `[..., T]`."""
    kl_coef: float = 0.0
    """β; 0: no reference model."""
    kl_in_reward: bool = False
    """−β Σ k1 in the reward of a completion, instead of +β D in the loss."""
    kl_bias_correction: bool = False
    """ρ D in the loss instead of D, as in `grpo_loss`."""
    entropy_coef: float = 0.0
    """c of the entropy bonus −c H."""
    ratio_to_sampler: bool = False
    """The ratio is against the log-probabilities that the sampler reported, not recomputed ones."""
    per_completion: bool = False
    """The term is one number per completion, repeated on its tokens, so that weights must not count the tokens."""
    has_ratio: bool = True
    """The term reads old_logprobs. If not, a rollout can be used for one step only."""
    bounds_log_ratio: bool = False
    """The epsilons bound the logarithm of the ratio, so that they may exceed 1."""
    min_group_size: int = 2
    """Smallest group whose completions the advantages can compare."""
    reads_outcomes: bool = False
    """The advantages depend on the sign of a reward or of a group's mean, which a KL in the reward would change."""
    whole_batch: bool = False
    """The term chooses among all tokens of an optimizer batch, which must then be computed in one piece. Over devices
    it gets axis_name."""

    def __hash__(self) -> int:
        # A mapping has no hash.
        return hash((*(self._asdict() | {"constants": frozenset(self.constants.items())}).values(),))

    @property
    def has_reference(self) -> bool:
        """True if there is a KL term; also true if its coefficient is traced."""
        return not is_zero(self.kl_coef)

    @property
    def functions(self) -> tuple[Callable[..., jax.Array], ...]:
        """The functions that have constants, those of the term bound."""
        return self.advantages, self.aggregation, partial(self.term, **self.constants)

    @property
    def numbers(self) -> dict[str, float]:
        """All constants by name: kl_coef, entropy_coef, and those of the functions."""
        numbers = {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef}
        return numbers | {name: value for function in self.functions for name, value in constants_of(function).items()}

    def with_constants(self, **constants: float) -> "Objective":
        """Returns the same method with other constants.

        Args:
          **constants: the new constants by name, as in `numbers`, such as epsilon_high, ddof or kl_coef.

        Examples:
          >>> from grpo_jax.functional import PRESETS
          >>> dict(PRESETS["grpo"].with_constants(epsilon_high=0.28).constants)
          {'epsilon_low': 0.2, 'epsilon_high': 0.28}
          >>> PRESETS["grpo"].with_constants(kl_coef=0.0).has_reference
          False
        """
        changes: dict[str, Any] = {name: constants.pop(name) for name in {"kl_coef", "entropy_coef"} & constants.keys()}
        for field, function in (("advantages", self.advantages), ("aggregation", self.aggregation)):
            if names := constants_of(function).keys() & constants.keys():
                changes[field] = partial(function, **{name: constants.pop(name) for name in names})
        return self._replace(constants=MappingProxyType({**self.constants, **constants}), **changes)

    def compute_advantages(
        self,
        rewards: jax.Array,
        mask: jax.Array,
        *,
        where: jax.Array | None = None,
        penalty: jax.Array | None = None,
        axis_name: AxisName = None,
    ) -> jax.Array:
        """Calls `advantages` with the keywords that it takes.

        Args:
          rewards: `[..., G]`.
          mask: bool `[..., G, T]`.
          where: bool `[..., G]`, true for completions that count. None: all.
          penalty: `[..., G, T]`, β k1 of a KL in the reward. None: there is none.
          axis_name: mapped axes over which the batch is spread.

        Returns:
          `[..., G]` or `[..., G, T]`.

        Examples:
          >>> from grpo_jax.functional import PRESETS
          >>> print(PRESETS["dr_grpo"].compute_advantages(jnp.array([1.0, 0.0]), jnp.ones((2, 3), bool)))
          [ 0.5 -0.5]
        """
        if penalty is not None and "token_penalty" not in inspect.signature(self.advantages).parameters:
            rewards = rewards - jnp.sum(penalty, axis=-1)
        lengths = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        counted = mask if where is None else mask & where[..., None]
        context: dict[str, Any] = {"where": where, "mask": counted, "token_penalty": penalty, "axis_name": axis_name}
        return call_with(self.advantages, rewards, lengths, **context)

    def loss(
        self,
        logprobs: jax.Array,
        old_logprobs: jax.Array,
        advantages: jax.Array,
        completion_mask: jax.Array,
        *,
        ref_logprobs: jax.Array | None = None,
        entropy: jax.Array | None = None,
        weights: jax.Array | None = None,
        axis_name: AxisName = None,
    ) -> tuple[jax.Array, Metrics]:
        """Computes `grpo_loss` with the functions and constants of this method.

        Args:
          logprobs: `[..., T]` in nats, with gradient.
          old_logprobs: `[..., T]` in nats; with `ratio_to_sampler`, as the sampler reported them.
          advantages: `[...]` or `[..., T]`.
          completion_mask: bool `[..., T]`.
          ref_logprobs: `[..., T]` in nats; needed if the method has a KL term.
          entropy: `[..., T]` in nats, used if there is an `entropy_coef`.
          weights: `[..., T]`; None: the method's `aggregation` of this mask and axis_name.
          axis_name: mapped axes over which the optimizer batch is spread.

        Raises:
          ValueError: ref_logprobs are missing, or the method reads none because its KL is in the reward
            (`kl_penalized_rewards`, before the advantages).

        Examples:
          >>> logprobs, mask = jnp.array([[-1.0, -2.0], [-3.0, -9.0]]), jnp.array([[True, True], [True, False]])
          >>> from grpo_jax.functional import PRESETS
          >>> loss, _ = PRESETS["dr_grpo"].loss(logprobs, logprobs, jnp.array([1.0, -2.0]), mask)
          >>> print(loss)  # (−1 − 1 + 2) / (2 completions · 2 places)
          0.0
        """
        if self.kl_in_reward and ref_logprobs is not None:
            raise ValueError("this method has its KL in the reward: use kl_penalized_rewards, and give no ref_logprobs")
        return grpo_loss(
            logprobs,
            old_logprobs,
            advantages,
            completion_mask,
            term=partial(self.term, axis_name=axis_name) if self.whole_batch and axis_name else self.term,
            ref_logprobs=ref_logprobs,
            kl_coef=0.0 if self.kl_in_reward else self.kl_coef,
            divergence=self.divergence,
            kl_bias_correction=self.kl_bias_correction,
            entropy=entropy,
            entropy_coef=self.entropy_coef,
            weights=self.aggregation(completion_mask, axis_name=axis_name) if weights is None else weights,
            **self.constants,
        )


@takes(values="...", weights="...", mask="...")
def weighted_sum(values: jax.Array, weights: jax.Array, mask: jax.Array) -> jax.Array:
    """Σ w x over the mask: the last line of a loss.

    Args:
      values: `[..., T]`.
      weights: `[..., T]`, from one of the functions `*_weights`.
      mask: bool `[..., T]`.

    Returns:
      A scalar. Masked values may be anything, and get a gradient of 0. If they come from an exp that may overflow, mask
      before it too, as `token_log_ratio` does.

    Examples:
      >>> print(weighted_sum(jnp.array([1.0, jnp.nan]), jnp.array([0.5, 0.0]), jnp.array([True, False])))
      0.5
    """
    # 0 · NaN is NaN, and the advantage of a completion that is masked out may be anything.
    return jnp.sum(weights * jnp.where(mask, values, 0))


@takes(logprobs="... T", old_logprobs="... T", mask="... T", advantages="... | ... T")
def policy_metrics(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    term: Term = clipped_term,
) -> Metrics:
    """Returns the mean ratio of tokens, and the shares of tokens with A ≠ 0 but no gradient from A.

    They mean the same for every term, whether it bounds ratios, probabilities or completions. A gradient that does not
    come from advantages, such as that of DPPO's square, does not count.

    Args:
      logprobs: `[..., T]` in nats.
      old_logprobs: `[..., T]` in nats.
      advantages: `[...]` or `[..., T]`.
      mask: bool `[..., T]`.
      term: (logprobs, old_logprobs, advantages, mask) -> `[..., T]`; bind its constants by `functools.partial`.

    Returns:
      Pairs (sum over tokens, number of tokens) like `masked_sum`: `ratio`; `clip_low`, for A < 0; `clip_high`, for
      A > 0.

    Examples:
      >>> old_logprobs, mask = jnp.log(jnp.array([[0.4, 0.5]])), jnp.array([[True, True]])
      >>> logprobs, advantages = jnp.log(jnp.array([[0.6, 0.5]])), jnp.array([1.0])
      >>> print(policy_metrics(logprobs, old_logprobs, advantages, mask)["clip_high"])  # one of two tokens
      (Array(1., dtype=float32), Array(2., dtype=float32))
    """
    logprobs = jax.lax.stop_gradient(logprobs)
    ratio = jnp.exp(token_log_ratio(logprobs, old_logprobs, mask))
    gradient = jax.grad(lambda logprobs, advantages: jnp.sum(term(logprobs, old_logprobs, advantages, mask)))
    pair = jnp.stack([advantages, jnp.zeros_like(advantages)])
    with_advantages, without = jax.vmap(gradient, (None, 0))(logprobs, pair)
    held_back = with_advantages == without
    advantages = per_token(advantages, logprobs)
    return {
        "ratio": masked_sum(ratio, mask),
        "clip_low": masked_sum(held_back & (advantages < 0), mask),
        "clip_high": masked_sum(held_back & (advantages > 0), mask),
    }


@takes(values="...", mask="...")
def masked_sum(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Σ values over the mask, number of tokens in it): one metric.

    Args:
      values: `[..., T]`, bool or float.
      mask: bool `[..., T]`.

    Returns:
      Two float32 scalars.

    Examples:
      >>> total, count = masked_sum(jnp.array([1.0, 2.0, 9.0]), jnp.array([True, True, False]))
      >>> print(total, count)
      3.0 2.0
    """
    values = jax.lax.stop_gradient(values).astype(jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0)), jnp.sum(mask, dtype=jnp.float32)


Vector = jax.Array | Sequence[float]  # [G]


def grpo_objective(
    rhos: Vector, A: Vector, pi_theta_old: Vector, pi_theta_ref: Vector, epsilon: float = 0.2, beta: float = 0.01
) -> jax.Array:
    """J = mean(min(ρA, clip(ρ, 1 − ε, 1 + ε) A)) − β Σ π_θ log(π_θ/π_ref + 1e-10), to be maximised.

    The objective on probabilities of the completions of one group, as the exercise "GRPO objective" states it:
    π_θ ∝ ρ · π_old, and π_θ and π_ref are normalised over the group. Names and order of the arguments are the
    exercise's.

    Args:
      rhos: `[G]`, likelihood ratios π_θ(oᵢ)/π_old(oᵢ).
      A: `[G]`, advantages.
      pi_theta_old: `[G]`, probabilities under the old policy, in any scale.
      pi_theta_ref: `[G]`, probabilities under the reference, in any scale.
      epsilon: clip range, 0.2.
      beta: KL coefficient, 0.01.

    Returns:
      A scalar.

    Raises:
      ValueError: the lengths differ.

    Examples:
      >>> print(grpo_objective([1.2], [1.0], [0.9], [1.0], beta=0.01))  # π_θ = π_ref = 1: no KL
      1.2
    """
    rhos, A, old, ref = (jnp.asarray(x, dtype=float) for x in (rhos, A, pi_theta_old, pi_theta_ref))
    if not rhos.shape == A.shape == old.shape == ref.shape:
        raise ValueError(f"lengths differ: rhos {rhos.shape}, A {A.shape}, old {old.shape}, ref {ref.shape}")
    policy = rhos * old / jnp.sum(rhos * old)
    ref = ref / jnp.sum(ref)
    kl = jnp.sum(policy * jnp.log(policy / ref + 1e-10))
    surrogate = jnp.minimum(rhos * A, jnp.clip(rhos, 1 - epsilon, 1 + epsilon) * A)
    return jnp.mean(surrogate) - beta * kl
