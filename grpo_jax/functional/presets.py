"""Published methods as compositions: which functions, with which constants.

A preset is data. `PRESETS["dapo"].loss(...)` is its loss on arrays. A variant is `PRESETS["dapo"]._replace(...)`, or
`.with_constants(epsilon_high=0.3)`; `check` refuses compositions that make no sense.
"""

import difflib
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401, read by the examples

from grpo_jax.functional import advantages as A, correction as C, losses as L, policy_gradient as P, returns as R
from grpo_jax.functional.advantages import group_advantages
from grpo_jax.functional.divergence import kl_k1, kl_k2, kl_unbiased
from grpo_jax.functional.losses import Objective, token_mean_weights
from grpo_jax.functional.numerics import call_with, check_above

_NONE: Mapping[str, float] = MappingProxyType({})


def ignore_lengths(advantages: Callable[..., jax.Array], **constants: Any) -> Callable[..., jax.Array]:
    """Adapts a function of only rewards to the arguments of `Objective.advantages`.

    Args:
      advantages: (rewards `[..., G]`, ...) -> `[..., G]` or `[..., G, T]`. It gets those of the keywords of
        `Objective.advantages` that it takes.
      **constants: constants of the function, by name.

    Returns:
      (rewards, lengths, **keywords) -> advantages, which does not read the lengths.

    Examples:
      >>> print(ignore_lengths(group_advantages, ddof=0)(jnp.array([1.0, 0.0]), jnp.array([3, 4])))
      [ 1. -1.]
    """
    function = partial(advantages, **constants)

    def rewards_advantage(rewards: jax.Array, lengths: jax.Array, **context: Any) -> jax.Array:
        return call_with(function, rewards, **context)

    return update_wrapper(rewards_advantage, function, ())  # `inspect.signature` then finds its keywords


_GROUP = ignore_lengths(group_advantages)
_BY_SEQUENCE = Objective(_GROUP)
_BY_TOKEN = Objective(_GROUP, aggregation=token_mean_weights)
_ON_POLICY = _BY_TOKEN._replace(term=P.reinforce_term, constants=_NONE, has_ratio=False)
_GRPO = Objective(_GROUP, kl_coef=0.04)
_SEQUENCE_TERM = P.ratio_term(P.sequence_log_ratio, P.clipped_surrogate)
_POST = Objective(
    ignore_lengths(group_advantages, ddof=0, eps=1e-8), term=_SEQUENCE_TERM, kl_coef=0.01, per_completion=True
)


class _Presets(dict[str, Objective]):
    """Presets by name."""

    def __missing__(self, name: str) -> Objective:
        raise KeyError(f"there is no preset {name}: {difflib.get_close_matches(name, self, 1) or list(self)}")


PRESETS: dict[str, Objective] = {
    # DeepSeekMath (2402.03300)
    "grpo": _GRPO,
    "rank": _GRPO._replace(advantages=ignore_lengths(A.rank_advantages)),
    # 2503.20783
    "dr_grpo": Objective(ignore_lengths(A.centered_advantages), aggregation=L.constant_length_weights),
    # TRL's loss_type "bnpo", with the mean over the whole optimizer batch. TRL's mean is over the local batch, so that
    # its value depends on how the batch is split over devices and gradient accumulation.
    "bnpo": _BY_TOKEN,
    # 2503.14476: clip-higher and the token mean.
    "dapo": _BY_TOKEN.with_constants(epsilon_high=0.28),
    # 2507.18071
    "gspo": _BY_SEQUENCE._replace(term=P.ratio_term(P.gspo_log_ratio, P.clipped_surrogate)).with_constants(
        epsilon_low=3e-4, epsilon_high=4e-4
    ),
    # 2506.13585: a cap of 5 and no lower bound.
    "cispo": _BY_TOKEN._replace(term=P.ratio_term(P.token_log_ratio, P.cispo_surrogate)).with_constants(
        epsilon_low=1.0, epsilon_high=4.0
    ),
    # 2402.14740
    "rloo": Objective(
        ignore_lengths(A.leave_one_out_advantages),
        term=_SEQUENCE_TERM,
        kl_coef=0.05,
        kl_in_reward=True,
        per_completion=True,
    ),
    # The two posts that announced GRPO, with ratios of whole completions.
    "companion_post": _POST,
    "introduction_post": _POST.with_constants(epsilon_low=0.15, epsilon_high=0.15),
    # The second post ranks the completions of a group, and then writes its advantage of rewards. This preset takes the
    # advantage of the ranks.
    "introduction_post_rank": _POST._replace(
        advantages=ignore_lengths(A.rank_advantages, ddof=0, eps=1e-8)
    ).with_constants(epsilon_low=0.15, epsilon_high=0.15),
    # 2507.20673; epsilons bound the log-ratio.
    "gmpo": _BY_SEQUENCE._replace(term=P.gmpo_term, per_completion=True, bounds_log_ratio=True).with_constants(
        epsilon_low=0.4, epsilon_high=0.4
    ),
    # 2511.20347
    "sapo": _BY_SEQUENCE._replace(term=P.ratio_term(P.token_log_ratio, P.sapo_surrogate), constants=_NONE),
    # 2602.04879
    "dppo": _BY_TOKEN._replace(term=P.dppo_term, constants=_NONE, ratio_to_sampler=True),
    # 2602.05261: the sum over |o| tokens weighs a completion by its length; epsilons as in GSPO.
    "luspo": _BY_SEQUENCE._replace(
        term=P.ratio_term(P.sequence_mean_log_ratio, P.clipped_surrogate),
        aggregation=L.sequence_sum_weights,
        per_completion=True,
    ).with_constants(epsilon_low=3e-4, epsilon_high=4e-4),
    # 2602.10693
    "vespo": _BY_TOKEN._replace(term=P.vespo_term, constants=_NONE),
    # 2505.23585: exactly on-policy.
    "opo": _ON_POLICY._replace(advantages=A.opo_advantages),
    # 2504.02546
    "gpg": _ON_POLICY._replace(advantages=ignore_lengths(A.gpg_advantages)),
    # 2602.02710
    "max_rl": _BY_TOKEN._replace(advantages=ignore_lengths(A.max_rl_advantages), reads_outcomes=True),
    # 2508.08221
    "lite_ppo": _BY_TOKEN._replace(advantages=ignore_lengths(A.batch_std_advantages)),
    # 2508.10751, k = 4 of 8. In a group of four there is only one subset of four, so that all advantages would be 0.
    "pass_at_k": _BY_TOKEN._replace(
        advantages=ignore_lengths(A.pass_at_k_advantages, k=4), min_group_size=5, reads_outcomes=True
    ),
    # 2503.19595
    "best_of_group": _BY_TOKEN._replace(advantages=ignore_lengths(A.best_of_group_advantages)),
    # 2501.03262. β is the default of the authors' OpenRLHF. One completion per prompt suffices.
    "reinforce_pp": _BY_TOKEN._replace(
        advantages=ignore_lengths(R.reinforce_pp_advantages), kl_coef=0.01, kl_in_reward=True, min_group_size=1
    ),
    "reinforce_pp_baseline": _BY_TOKEN._replace(advantages=ignore_lengths(R.reinforce_pp_baseline_advantages)),
    # 2505.22617. Clip-Cov is no preset, since its term takes a random key.
    "kl_cov": _BY_TOKEN._replace(term=P.kl_cov_term, constants=_NONE, whole_batch=True),
}
PRESETS = _Presets(PRESETS)


# The log-ratio of each correction for the policy that sampled, and the function from log-ratios to weights.
CORRECTIONS: Mapping[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "token": (P.token_log_ratio, C.truncated_weights),
    "sequence": (P.sequence_log_ratio, partial(C.truncated_weights, cap=3.0)),
    "sequence_mask": (P.sequence_log_ratio, partial(C.masked_weights, low=0.0, high=3.0)),
    "icepop": (P.token_log_ratio, C.masked_weights),
    "glm5": (P.token_log_ratio, partial(C.masked_weights, low=0.8, high=1.2)),
    "geometric": (P.sequence_mean_log_ratio, C.rejection_weights),
}


def check(objective: Objective, *, group_size: int = 8) -> None:
    """Refuses compositions that make no sense, judged by their fields. It calls none of their functions.

    Args:
      objective: the method to check.
      group_size: G, the size of the groups that its advantages will see. Default 8.

    Raises:
      ValueError: the composition makes no sense; the message says what to change.

    Examples:
      >>> check(PRESETS["gmpo"]._replace(aggregation=token_mean_weights))
      Traceback (most recent call last):
      ValueError: the term is one number a completion, but these weights count its tokens: take sequence_mean_weights
    """
    epsilons = {name: value for name, value in objective.constants.items() if name.startswith("epsilon")}
    for name, value in (epsilons | {"kl_coef": objective.kl_coef, "entropy_coef": objective.entropy_coef}).items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}: it must be at least 0, and finite")
    check_above(1, delta=objective.constants.get("delta"))
    if group_size < objective.min_group_size:
        raise ValueError(f"group_size is {group_size}: these advantages need at least {objective.min_group_size}")
    if objective.reads_outcomes and objective.kl_in_reward and objective.kl_coef:
        raise ValueError("these advantages read the signs of rewards, which a KL changes: set kl_in_reward to False")
    if objective.kl_in_reward and objective.kl_bias_correction:
        raise ValueError("kl_bias_correction is of a KL in the loss: set it to False, or kl_in_reward")
    if objective.kl_bias_correction and objective.divergence in (kl_k2, kl_unbiased):
        # On samples of the current policy x is the unbiased gradient. ρ k3 has ρ x, ρ k2 has ρ (x + k2).
        raise ValueError("kl_bias_correction biases gradients of kl_k2 and kl_unbiased: take kl_k3, or set it to False")
    uncorrected = objective.kl_coef and not objective.kl_in_reward and not objective.kl_bias_correction
    if uncorrected and objective.divergence is kl_k1:
        raise ValueError(
            "kl_k1 in the loss has no expected gradient: take kl_unbiased, or set kl_in_reward or kl_bias_correction"
        )
    by_sequence = getattr(objective.aggregation, "func", objective.aggregation) in (
        L.sequence_mean_weights,
        L.sequence_sum_weights,
    )
    if not by_sequence and objective.per_completion:
        raise ValueError(
            "the term is one number a completion, but these weights count its tokens: take sequence_mean_weights"
        )
