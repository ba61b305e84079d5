"""Published methods as compositions: which functions, with which constants.

A preset is data. `PRESETS["dapo"].loss(...)` is its loss on arrays; a variant is
`PRESETS["dapo"]._replace(...)`, and `check` refuses compositions that make no sense.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.advantages import (
    batch_std_advantages,
    centered_advantages,
    gpg_advantages,
    group_advantages,
    leave_one_out_advantages,
    max_rl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rank_advantages,
)
from grpo_jax.functional.aggregation import (
    constant_length_weights,
    sequence_mean_weights,
    sequence_sum_weights,
    token_mean_weights,
)
from grpo_jax.functional.divergence import kl_k3
from grpo_jax.functional.losses import Metrics, clipped_term, grpo_loss
from grpo_jax.functional.numerics import is_zero
from grpo_jax.functional.policy_gradient import (
    Term,
    cispo_surrogate,
    clipped_surrogate,
    dppo_term,
    gmpo_term,
    gspo_log_ratio,
    ratio_term,
    reinforce_term,
    sapo_surrogate,
    sequence_log_ratio,
    sequence_mean_log_ratio,
    token_log_ratio,
    vespo_term,
)


def of_rewards(advantages: Callable[..., jax.Array], **constants) -> Callable[..., jax.Array]:
    """An advantage function that looks at rewards alone, as the (rewards, lengths, *, where) of an `Algorithm`.

    Examples:
      >>> print(of_rewards(group_advantages, ddof=0)(jnp.array([1.0, 0.0]), jnp.array([3, 4])))
      [ 1. -1.]
    """
    return lambda rewards, lengths, *, where=None: advantages(rewards, where=where, **constants)


class Algorithm(NamedTuple):
    """One published method: which functions, with which constants."""

    advantages: Callable[..., jax.Array]
    """(rewards `[..., G]`, lengths `[..., G]` in tokens, *, where `[..., G]`) -> `[..., G]`."""
    term: Term = clipped_term
    """(logprobs, old_logprobs, advantages, mask, **constants) -> `[..., T]`."""
    aggregation: Callable[..., jax.Array] = sequence_mean_weights
    """(mask, *, axis_name) -> weights `[..., T]`."""
    divergence: Callable[[jax.Array, jax.Array], jax.Array] = kl_k3
    """(logprobs, ref_logprobs) -> `[..., T]`."""
    kl_coef: float = 0.0
    """β; 0: no reference model."""
    kl_in_reward: bool = False
    """−β Σ k1 in the reward of a row, instead of +β D in the loss."""
    epsilon_low: float | None = 0.2
    """Constant of the term; None: it has none, and neither epsilon_high."""
    epsilon_high: float | None = 0.2
    """Constant of the term."""
    entropy_coef: float = 0.0
    """c of the entropy bonus −c H."""
    ratio_to_sampler: bool = False
    """The term is defined against the sampler's own log-probabilities, not recomputed ones."""
    group_size: int = 8
    """G."""
    temperature: float = 1.0
    """Of sampling."""
    temperature_spread: float = 0.0
    """Completion i of G is sampled at temperature + spread · i/G."""

    @property
    def has_reference(self) -> bool:
        """Whether there is a KL term. One whose coefficient is traced is there."""
        return not is_zero(self.kl_coef)

    @property
    def constants(self) -> dict[str, Any]:
        """Of the term, by name."""
        given = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high}
        return {name: value for name, value in given.items() if value is not None}

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
    ) -> tuple[jax.Array, Metrics]:
        """`grpo_loss` of this method: takes its arrays, while constants are changed by `_replace`.

        Args:
          logprobs: `[..., T]` in nats, with gradient.
          old_logprobs: `[..., T]` in nats; where `ratio_to_sampler`, as the sampler reported them.
          advantages: `[...]` or `[..., T]`.
          completion_mask: bool `[..., T]`.
          ref_logprobs: `[..., T]` in nats; needed where the method has a KL term.
          entropy: `[..., T]` in nats, read where there is an `entropy_coef`.
          weights: `[..., T]`; None: those of the mask given.

        Raises:
          ValueError: ref_logprobs are missing, or given to a method that has its KL in the reward
            (`kl_penalized_rewards`, before the advantages).

        Examples:
          >>> logprobs, mask = jnp.array([[-1.0, -2.0], [-3.0, -9.0]]), jnp.array([[True, True], [True, False]])
          >>> loss, _ = PRESETS["dr_grpo"].loss(logprobs, logprobs, jnp.array([1.0, -2.0]), mask)
          >>> print(loss)  # (−1 − 1 + 2) / (2 rows · 2 places)
          0.0
        """
        if self.has_reference and not self.kl_in_reward and ref_logprobs is None:
            raise ValueError("this method has a KL term: give ref_logprobs, or _replace(kl_coef=0.0)")
        if self.kl_in_reward and ref_logprobs is not None:
            raise ValueError("this method has its KL in the reward: use kl_penalized_rewards, and give no ref_logprobs")
        return grpo_loss(
            logprobs,
            old_logprobs,
            advantages,
            completion_mask,
            term=self.term,
            ref_logprobs=ref_logprobs,
            kl_coef=self.kl_coef,
            divergence=self.divergence,
            entropy=entropy,
            entropy_coef=self.entropy_coef,
            weights=self.aggregation(completion_mask) if weights is None else weights,
            **self.constants,
        )


_GRPO = Algorithm(of_rewards(group_advantages), kl_coef=0.04)
_WITHOUT_KL = Algorithm(of_rewards(group_advantages))
_BY_TOKEN = _WITHOUT_KL._replace(aggregation=token_mean_weights)
_SEQUENCE_TERM = ratio_term(sequence_log_ratio, clipped_surrogate)
_SEED = Algorithm(of_rewards(group_advantages, ddof=0, eps=1e-8), term=_SEQUENCE_TERM, kl_coef=0.01)

PRESETS: dict[str, Algorithm] = {
    # DeepSeekMath (2402.03300); its group of 64 is 8 here.
    "grpo": _GRPO,
    "rank": _GRPO._replace(advantages=of_rewards(rank_advantages)),
    # 2503.20783
    "dr_grpo": Algorithm(of_rewards(centered_advantages), aggregation=constant_length_weights),
    # 2503.14476: clip-higher and the token mean.
    "dapo": _BY_TOKEN._replace(epsilon_high=0.28),
    # 2507.18071
    "gspo": _WITHOUT_KL._replace(
        term=ratio_term(gspo_log_ratio, clipped_surrogate), epsilon_low=3e-4, epsilon_high=4e-4
    ),
    # 2506.13585: a cap of 5 and no lower bound.
    "cispo": _BY_TOKEN._replace(term=ratio_term(token_log_ratio, cispo_surrogate), epsilon_low=1.0, epsilon_high=4.0),
    # 2402.14740
    "rloo": Algorithm(of_rewards(leave_one_out_advantages), term=_SEQUENCE_TERM, kl_coef=0.05, kl_in_reward=True),
    # The two posts that announced GRPO, with ratios of whole responses.
    "seed_000": _SEED._replace(temperature=0.7, temperature_spread=0.3),
    "seed_001": _SEED._replace(epsilon_low=0.15, epsilon_high=0.15, group_size=12),
    # The second post ranks a group, and then writes its advantage of rewards: this one takes the ranks.
    "seed_001_rank": _SEED._replace(
        advantages=of_rewards(rank_advantages, ddof=0, eps=1e-8), epsilon_low=0.15, epsilon_high=0.15, group_size=12
    ),
    # 2507.20673; epsilons are of the log-ratio.
    "gmpo": _WITHOUT_KL._replace(term=gmpo_term, epsilon_low=0.4, epsilon_high=0.4),
    # 2511.20347
    "sapo": _WITHOUT_KL._replace(term=ratio_term(token_log_ratio, sapo_surrogate), epsilon_low=None, epsilon_high=None),
    # 2602.04879
    "dppo": _BY_TOKEN._replace(term=dppo_term, epsilon_low=None, epsilon_high=None, ratio_to_sampler=True),
    # 2602.05261: a row counts |o| times, by sums over the tokens that its number stands on; epsilons as in GSPO.
    "luspo": _WITHOUT_KL._replace(
        term=ratio_term(sequence_mean_log_ratio, clipped_surrogate),
        aggregation=sequence_sum_weights,
        epsilon_low=3e-4,
        epsilon_high=4e-4,
    ),
    # 2602.10693
    "vespo": _BY_TOKEN._replace(term=vespo_term, epsilon_low=None, epsilon_high=None),
    # 2505.23585: exactly on-policy.
    "opo": _BY_TOKEN._replace(advantages=opo_advantages, term=reinforce_term, epsilon_low=None, epsilon_high=None),
    # 2504.02546
    "gpg": _BY_TOKEN._replace(
        advantages=of_rewards(gpg_advantages), term=reinforce_term, epsilon_low=None, epsilon_high=None
    ),
    # 2602.02710
    "max_rl": _BY_TOKEN._replace(advantages=of_rewards(max_rl_advantages)),
    # 2508.08221
    "lite_ppo": _BY_TOKEN._replace(advantages=of_rewards(batch_std_advantages)),
    # 2508.10751, k = 4 of 8.
    "pass_at_k": _BY_TOKEN._replace(advantages=of_rewards(pass_at_k_advantages, k=4)),
}


def check(algorithm: Algorithm) -> None:
    """Refuses compositions that make no sense, by calling their functions on shapes of two completions of two tokens.

    Args:
      algorithm: of any functions and constants.

    Raises:
      ValueError: one sentence that says what to change.

    Examples:
      >>> check(PRESETS["gmpo"]._replace(aggregation=token_mean_weights))
      Traceback (most recent call last):
      ValueError: the term is one number a row, but these weights count it once a token: take sequence_mean_weights
    """
    _check_constants(algorithm)
    _check_functions(algorithm)
    if algorithm.kl_coef and not algorithm.kl_in_reward and _has_constant_gradient(algorithm.divergence):
        raise ValueError("kl_k1 in the loss has no expected gradient: take kl_unbiased, or set kl_in_reward")
    by_row = getattr(algorithm.aggregation, "func", algorithm.aggregation) in (
        sequence_mean_weights,
        sequence_sum_weights,
    )
    if not by_row and is_one_number_a_row(algorithm):
        raise ValueError(
            "the term is one number a row, but these weights count it once a token: take sequence_mean_weights"
        )


def _check_constants(algorithm: Algorithm) -> None:
    if (algorithm.epsilon_low is None) != (algorithm.epsilon_high is None):
        raise ValueError(
            f"epsilon_low is {algorithm.epsilon_low} and epsilon_high {algorithm.epsilon_high}: give both or neither"
        )
    for name in ("epsilon_low", "epsilon_high", "kl_coef", "entropy_coef"):
        value = getattr(algorithm, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}: it must be at least 0, and finite")


def _check_functions(algorithm: Algorithm) -> None:
    group = jax.ShapeDtypeStruct((1, algorithm.group_size), jnp.float32)
    counted = jax.ShapeDtypeStruct(group.shape, bool)
    tokens, mask = jax.ShapeDtypeStruct((1, 2), jnp.float32), jax.ShapeDtypeStruct((1, 2), bool)
    row = jax.ShapeDtypeStruct((1,), jnp.float32)
    term, constants = algorithm.term, algorithm.constants
    _check_call(
        lambda *arrays: algorithm.advantages(*arrays[:2], where=arrays[2]),
        (group, group, counted),
        "advantages must map (rewards, lengths, *, where) to the rewards' shape; of_rewards makes that of a function "
        "of rewards alone",
    )
    _check_call(
        lambda *arrays: term(*arrays, **constants),
        (tokens, tokens, row, mask),
        f"the term must map (logprobs, old_logprobs, advantages, mask{''.join(f', {name}' for name in constants)}) to "
        "a number a token; ratio_term makes that of a surrogate, functools.partial binds a key or a constant, and "
        "epsilons of None are not passed",
    )
    _check_call(
        algorithm.divergence, (tokens, tokens), "divergence must map (logprobs, ref_logprobs) to a number a token"
    )
    _check_call(
        lambda mask: algorithm.aggregation(mask, axis_name=None),
        (mask,),
        "aggregation must map a mask to weights a token",
    )


def _check_call(function: Callable[..., jax.Array], arguments: tuple, expected: str) -> None:
    """Refuses a function that cannot be called so, or whose result has another shape than its first argument."""
    try:
        shape = jax.eval_shape(function, *arguments).shape
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{expected} ({error})") from None
    if shape != arguments[0].shape:
        raise ValueError(f"{expected} (it gives shape {shape} for {arguments[0].shape})")


def _has_constant_gradient(divergence: Callable[[jax.Array, jax.Array], jax.Array]) -> bool:
    """Whether it is k1, by whatever name: a slope of 1 everywhere."""
    slope = jax.grad(lambda logprobs: jnp.sum(divergence(logprobs, -jnp.ones((1, 2)))))
    return bool(jnp.all(slope(jnp.array([[-0.5, -3.0]])) == 1))


def is_one_number_a_row(algorithm: Algorithm) -> bool:
    """Whether the term of one token has a gradient in the log-probability of another, at a ratio of 1."""
    logprobs, mask = -jnp.ones((1, 2)), jnp.ones((1, 2), bool)

    def of_first_token(logprobs):
        return algorithm.term(logprobs, -jnp.ones((1, 2)), jnp.ones(1), mask, **algorithm.constants)[0, 0]

    return bool(jax.grad(of_first_token)(logprobs)[0, 1] != 0)
