"""Example inputs of all functions of arrays, whose shared properties `test_properties.py` checks.

Every array has eight rows, which are groups, completions or pairs. Each completion has three unmasked tokens, with
gaps, except the third completion, which has none. No example is near a kink, so that finite differences are gradients:
no ratio is near a clip, and no two rewards of a group are equal.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import functional as F

ROWS, G, T = 8, 4, 5
KEY = jax.random.key(0)


class Case(NamedTuple):
    """A function with example inputs."""

    function: Callable[..., Any]
    arrays: Mapping[str, np.ndarray]
    differentiable: str = ""
    """The arguments whose gradients equal finite differences."""
    constant: str = ""
    """The arguments without a gradient."""
    numbers: Mapping[str, float] = {}
    """The hyperparameters, which may be traced."""
    counted: tuple[int, ...] = (7, 3)
    """The shape of the unmasked entries."""
    is_zero_where_masked: bool = True
    is_of_batch: bool = False
    """True if rows depend on each other although the function takes no `axis_name`."""

    @property
    def name(self) -> str:
        return getattr(self.function, "func", self.function).__name__

    @property
    def mask(self) -> str:
        """The name of the argument that is the mask."""
        return next((name for name in ("mask", "where", "completion_mask") if name in self.arrays), "")

    @property
    def is_spread(self) -> bool:
        """True if the batch may be spread over devices. OPO takes `axis_name` only to be called as others are."""
        return "axis_name" in inspect.signature(self.function).parameters and self.function is not F.opo_advantages

    @property
    def of_rows(self) -> bool:
        """True if rows do not depend on each other."""
        return not (self.is_spread or self.is_of_batch)


def choose(size: int, count: int, *leading: int) -> np.ndarray:
    """Returns a mask `[*leading, size]` with `count` true places in each row, but none in the third row."""
    chosen = np.argsort(rng.random((*leading, size)), axis=-1) < count
    chosen[2] = False
    return chosen


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def negative(*shape: int) -> np.ndarray:
    return -rng.exponential(size=shape).astype(np.float32)


rng = np.random.default_rng(0)
MASK, WHERE = choose(T, 3, ROWS), choose(G, 3, ROWS)
REWARDS = normal(ROWS, G)
LOGPROBS, REF, ENTROPY = negative(ROWS, T), negative(ROWS, T), -negative(ROWS, T)
# Away from kinks at 0.8, 1.2 and e^±0.4; no probability moves by 0.2.
LOG_RATIO = rng.choice([-0.6, -0.1, 0.1, 0.6], size=(ROWS, T)).astype(np.float32)
ADVANTAGES = np.float32([1.5, -0.7, 3.0, -0.2, 0.4, -1.1, 2.0, -2.5])
TOKENS = {"logprobs": LOGPROBS, "old_logprobs": LOGPROBS - LOG_RATIO, "mask": MASK}
WEIGHTS = np.where(MASK, -negative(ROWS, T), 0)
PAIR = {name: 4 * negative(ROWS) for name in ("chosen", "rejected")}
REFERENCE = {name: 4 * negative(ROWS) for name in ("ref_chosen", "ref_rejected")}
LENGTHS = {name: rng.integers(1, 7, ROWS) for name in ("chosen_length", "rejected_length")}
LOGITS = normal(ROWS, T), normal(ROWS, T)
EPSILONS = {"epsilon_low": 0.2, "epsilon_high": 0.28}


def of_group(function, *, differentiable="rewards", **options) -> Case:
    arrays = {"rewards": REWARDS, "where": WHERE} | options.pop("arrays", {})
    return Case(function, arrays, differentiable, **options)


def of_mask(function, **options) -> Case:
    return Case(function, {"mask": MASK}, **options)


def of_term(function, *, differentiable="logprobs advantages", **options) -> Case:
    arrays = TOKENS | {"advantages": ADVANTAGES}
    return Case(function, arrays, differentiable, constant="old_logprobs", **options)


def of_ratio(log_ratio, surrogate=F.clipped_surrogate, **options) -> Case:
    """Makes the case of a term whose masked values equal the surrogate at a ratio of 1."""
    return of_term(F.ratio_term(log_ratio, surrogate), is_zero_where_masked=False, **options)


def of_surrogate(function, *, differentiable="log_ratio advantages", **options) -> Case:
    return Case(function, {"log_ratio": LOG_RATIO, "advantages": ADVANTAGES}, differentiable, **options)


def of_estimator(function, *, differentiable="logprobs ref_logprobs") -> Case:
    return Case(function, {"logprobs": LOGPROBS, "ref_logprobs": REF}, differentiable)


def of_logits(function, second="ref_logits", **options) -> Case:
    return Case(function, {"logits": LOGITS[0], second: LOGITS[1]}, f"logits {second}", **options)


def of_pair(function, arrays, **options) -> Case:
    references = " ".join(name for name in arrays if name.startswith("ref_"))
    return Case(function, PAIR | arrays, "chosen rejected", references, **options)


def gdpo(rewards, others, axis_name=None):
    """Calls `gdpo_advantages` on two stacked rewards."""
    return F.gdpo_advantages(jnp.stack([rewards, others]), weights=jnp.array([1, 0.5]), eps=1e-4, axis_name=axis_name)


def grpo_loss(**arguments):
    return F.grpo_loss(**arguments)[0]


def loss_metrics(**arguments):
    return F.grpo_loss(**arguments)[1]


PRESENT = np.zeros((ROWS, 3, G), bool)  # two of three episodes, with three of four turns
PRESENT[:, :2, :3] = np.arange(ROWS)[:, None, None] != 2
SPAN_REWARDS, SPAN_ENDS, SPAN_WHERE = normal(ROWS, 3, T), rng.random((ROWS, 3, T)) < 0.4, choose(3, 2, ROWS)
LOSS = {"logprobs": LOGPROBS, "old_logprobs": LOGPROBS - LOG_RATIO, "advantages": ADVANTAGES, "completion_mask": MASK}
LOSS |= {"ref_logprobs": REF, "entropy": ENTROPY, "weights": WEIGHTS}
of_loss = partial(
    Case,
    arrays=LOSS,
    differentiable="logprobs entropy",
    constant="old_logprobs advantages ref_logprobs",
    numbers=EPSILONS | {"kl_coef": 0.3, "entropy_coef": 0.1},
    is_of_batch=True,
)
GAE = {"rewards": normal(ROWS, T), "values": normal(ROWS, T), "mask": MASK, "bootstrap": normal(ROWS)}
of_gae = partial(Case, arrays=GAE, differentiable="rewards values bootstrap", numbers={"gamma": 0.9, "lam": 0.8})

ADVANTAGE_CASES = {
    "group": of_group(F.group_advantages, numbers={"eps": 0.5}),
    "centered": of_group(F.centered_advantages),
    "leave_one_out": of_group(F.leave_one_out_advantages),
    "rank": of_group(F.rank_advantages, differentiable="", numbers={"eps": 0.5}),
    "batch_std": of_group(F.batch_std_advantages, numbers={"eps": 0.5}),
    "opo": of_group(F.opo_advantages, arrays={"lengths": rng.integers(1, 9, (ROWS, G))}),
    "gpg": of_group(F.gpg_advantages),
    "max_rl": of_group(F.max_rl_advantages, arrays={"rewards": np.abs(REWARDS)}),
    "best_of_group": of_group(F.best_of_group_advantages),
    "pass_at_k": of_group(partial(F.pass_at_k_advantages, k=2), differentiable=""),
    "turn": of_group(
        F.turn_advantages,
        arrays={"rewards": normal(ROWS, 3, G), "where": PRESENT},
        numbers={"eps": 0.5},
        counted=(7, 2, 3),
    ),
    "span": of_group(
        F.span_advantages,
        arrays={"rewards": SPAN_REWARDS, "ends": SPAN_ENDS, "where": SPAN_WHERE},
        numbers={"eps": 0.5},
        counted=(7, 2),
    ),
    "gdpo": Case(gdpo, {"rewards": REWARDS, "others": normal(ROWS, G)}, "rewards others"),
    "group_ranks": Case(F.group_ranks, {"rewards": REWARDS}),
    "remax": Case(F.remax_advantages, {"rewards": REWARDS, "greedy_rewards": normal(ROWS)}, "rewards greedy_rewards"),
    "teacher": Case(
        F.teacher_advantages, {"logprobs": LOGPROBS, "teacher_logprobs": REF}, constant="logprobs teacher_logprobs"
    ),
    "whiten": Case(F.whiten, {"values": normal(ROWS, T), "mask": MASK}, "values", numbers={"eps": 0.5}),
}
WEIGHT_CASES = {
    "token_mean": of_mask(F.token_mean_weights),
    "sequence_mean": of_mask(F.sequence_mean_weights),
    "sequence_sum": of_mask(F.sequence_sum_weights),
    "constant_length": of_mask(F.constant_length_weights, numbers={"max_length": 9.0}),
    "truncated": Case(F.truncated_weights, {"log_ratio": LOG_RATIO}, constant="log_ratio", numbers={"cap": 1.5}),
    "masked": Case(F.masked_weights, {"log_ratio": LOG_RATIO}, constant="log_ratio", numbers={"low": 0.7, "high": 1.5}),
    "rejection": Case(
        F.rejection_weights, {"log_ratio": LOG_RATIO}, constant="log_ratio", numbers={"low": 0.7, "high": 1.5}
    ),
    "on_policy": Case(
        F.on_policy_completions,
        {"log_ratio": LOG_RATIO, "advantages": ADVANTAGES, "mask": MASK},
        numbers={"threshold": 0.05},
    ),
    "top_entropy": Case(partial(F.top_entropy_tokens, share=0.4), {"entropy": ENTROPY, "mask": MASK}),
    "keep": Case(F.keep_completions, {"mask": MASK, "keep": ADVANTAGES > 0}),
}
DIVERGENCE_CASES = {
    "kl_k1": of_estimator(F.kl_k1),
    "kl_k2": of_estimator(F.kl_k2),
    "kl_k3": of_estimator(F.kl_k3),
    "kl_abs": of_estimator(F.kl_abs),
    "kl_unbiased": of_estimator(F.kl_unbiased, differentiable=""),
    "kl_full": of_logits(F.kl_full),
    "kl_reverse": of_logits(partial(F.kl_full, reverse=True)),
    "jsd": of_logits(F.jsd_full, "ref_logits", numbers={"beta": 0.3}),
    "entropy": Case(F.entropy, {"logits": LOGITS[0]}, "logits"),
    "adaptive_kl": Case(
        F.adaptive_kl_coef,
        {"kl_coef": -negative(ROWS), "kl": -negative(ROWS)},
        numbers={"target": 1.0, "num_samples": 64.0, "horizon": 128.0},
    ),
    "adaptive_entropy": Case(
        F.adaptive_entropy_coef,
        {"entropy_coef": -negative(ROWS), "entropy": -negative(ROWS)},
        numbers={"target": 1.0, "step": 0.1, "largest": 2.0},
    ),
}
TERM_CASES = {
    "clipped": of_ratio(F.token_log_ratio, numbers=EPSILONS),
    "bounded": of_ratio(F.token_log_ratio, numbers=EPSILONS | {"delta": 1.5}),
    "unclipped": of_ratio(F.token_log_ratio, F.unclipped_surrogate),
    "cispo": of_ratio(F.token_log_ratio, F.cispo_surrogate, differentiable="advantages", numbers=EPSILONS),
    "sapo": of_ratio(F.token_log_ratio, F.sapo_surrogate, numbers={"tau_positive": 2.0, "tau_negative": 3.0}),
    "sequence": of_ratio(F.sequence_log_ratio, numbers=EPSILONS),
    "sequence_mean_ratio": of_ratio(F.sequence_mean_log_ratio, numbers=EPSILONS),
    "gspo": of_ratio(F.gspo_log_ratio, differentiable="advantages", numbers=EPSILONS),
    "reinforce": of_term(F.reinforce_term),
    "gmpo": of_term(F.gmpo_term, numbers={"epsilon_low": 0.3, "epsilon_high": 0.4}),
    "dppo": of_term(F.dppo_term, numbers={"threshold": 0.25, "penalty": 0.1}),
    "vespo": of_term(
        F.vespo_term,
        differentiable="advantages",
        numbers={"k_positive": 0.5, "lambda_positive": 1.5, "k_negative": 1.0, "lambda_negative": 0.5},
    ),
    "clip_cov": of_term(
        partial(F.clip_cov_term, key=KEY, share=1.0),
        differentiable="logprobs",
        numbers=EPSILONS | {"covariance_low": 0.3, "covariance_high": 9.0},
    ),
    "kl_cov": of_term(partial(F.kl_cov_term, share=0.25), differentiable="logprobs", numbers={"penalty": 0.5}),
    "covariance": Case(
        F.token_covariance,
        {"logprobs": LOGPROBS, "advantages": ADVANTAGES, "mask": MASK},
        constant="logprobs advantages",
    ),
}
RATIO_CASES = {
    "token_log_ratio": Case(F.token_log_ratio, TOKENS, "logprobs", "old_logprobs"),
    "sequence_log_ratio": Case(F.sequence_log_ratio, TOKENS, "logprobs", "old_logprobs"),
    "sequence_mean_log_ratio": Case(F.sequence_mean_log_ratio, TOKENS, "logprobs", "old_logprobs"),
    "gspo_log_ratio": Case(F.gspo_log_ratio, TOKENS, constant="old_logprobs"),
    "clipped_surrogate": of_surrogate(F.clipped_surrogate, numbers=EPSILONS),
    "unclipped_surrogate": of_surrogate(F.unclipped_surrogate),
    "cispo_surrogate": of_surrogate(F.cispo_surrogate, differentiable="advantages", numbers=EPSILONS),
    "sapo_surrogate": of_surrogate(F.sapo_surrogate),
}
LOSS_CASES = {
    "grpo_loss": of_loss(grpo_loss),
    "corrected_loss": of_loss(partial(grpo_loss, kl_bias_correction=True)),
    "loss_metrics": of_loss(loss_metrics, differentiable="", constant="logprobs old_logprobs ref_logprobs advantages"),
    "weighted_sum": Case(
        F.weighted_sum, {"values": LOGPROBS, "weights": WEIGHTS, "mask": MASK}, "values", is_of_batch=True
    ),
    "masked_sum": Case(F.masked_sum, {"values": LOGPROBS, "mask": MASK}, constant="values", is_of_batch=True),
    "policy_metrics": Case(
        F.policy_metrics,
        TOKENS | {"advantages": ADVANTAGES},
        constant="logprobs old_logprobs advantages",
        is_of_batch=True,
    ),
}
PAIR_CASES = {
    "bradley_terry": of_pair(F.bradley_terry_loss, {}, numbers={"margin": 0.5, "center_coef": 0.25}),
    "dpo": of_pair(F.dpo_loss, REFERENCE, numbers={"beta": 0.3, "label_smoothing": 0.1}),
    "robust_dpo": of_pair(F.robust_dpo_loss, REFERENCE, numbers={"beta": 0.3, "label_smoothing": 0.2}),
    "length_normalized_dpo": of_pair(F.length_normalized_dpo_loss, REFERENCE | LENGTHS, numbers={"beta": 2.0}),
    "ipo": of_pair(F.ipo_loss, REFERENCE | LENGTHS, numbers={"tau": 0.3}),
    "hinge": of_pair(F.hinge_loss, REFERENCE, numbers={"beta": 0.3}),
    "simpo": of_pair(F.simpo_loss, LENGTHS, numbers={"beta": 1.0, "gamma": 0.5}),
    "orpo": of_pair(F.orpo_loss, LENGTHS, numbers={"odds_coef": 0.3}),
    "cpo": of_pair(F.cpo_loss, {"chosen_length": LENGTHS["chosen_length"]}, numbers={"beta": 0.3, "nll_coef": 0.5}),
    "kto": Case(
        F.kto_loss,
        {"logprobs": PAIR["chosen"], "ref_logprobs": PAIR["rejected"], "desirable": ADVANTAGES > 0},
        "logprobs",
        "ref_logprobs",
        numbers={"kl": 0.5, "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    "kto_kl": Case(
        F.kto_kl, {"logprobs": LOGPROBS, "ref_logprobs": LOGPROBS + 2 * REF, "where": MASK}, "logprobs", "ref_logprobs"
    ),
    "critic": Case(
        F.critic_loss,
        {"values": normal(ROWS, T), "returns": normal(ROWS, T), "old_values": normal(ROWS, T)},
        "values",
        "returns old_values",
        numbers={"clip": 0.5},
    ),
}
RETURN_CASES = {
    "gae": of_gae(F.generalized_advantages),
    "gae_of_two_steps": of_gae(partial(F.generalized_advantages, num_steps=2)),
    "rewards_at_end": Case(F.rewards_at_end, {"rewards": normal(ROWS), "mask": MASK}, "rewards"),
    "overlong": Case(partial(F.overlong_penalty, max_length=9, buffer=4), {"lengths": np.arange(ROWS) + 3}),
    "kl_penalized": Case(
        F.kl_penalized_rewards,
        {"rewards": normal(ROWS), "logprobs": LOGPROBS, "ref_logprobs": REF, "mask": MASK},
        "rewards",
        "logprobs ref_logprobs",
        numbers={"kl_coef": 0.2},
    ),
    "reinforce_pp": Case(
        F.reinforce_pp_advantages,
        {"rewards": normal(ROWS), "mask": MASK, "token_penalty": normal(ROWS, T)},
        "rewards token_penalty",
        numbers={"gamma": 0.9, "eps": 0.5},
    ),
    "reinforce_pp_baseline": Case(
        F.reinforce_pp_baseline_advantages,
        {"rewards": normal(ROWS, 3), "mask": choose(T, 3, ROWS, 3)},
        "rewards",
        numbers={"eps": 0.5},
        counted=(7, 3, 3),
    ),
}
FAMILIES = (
    ADVANTAGE_CASES,
    WEIGHT_CASES,
    DIVERGENCE_CASES,
    TERM_CASES,
    RATIO_CASES,
    LOSS_CASES,
    PAIR_CASES,
    RETURN_CASES,
)
CASES = {name: case for family in FAMILIES for name, case in family.items()}
assert len(CASES) == sum(map(len, FAMILIES))
# These functions compute in the dtype of their inputs, or mix dtypes.
COMPUTE_IN_16_BITS = {"gdpo", "truncated", "masked", "adaptive_kl", "adaptive_entropy", "weighted_sum"}
COMPUTE_IN_16_BITS |= {"bradley_terry", "critic", *(name for name in CASES if name.endswith("surrogate"))}
COMPUTE_IN_16_BITS |= {"kl_k1", "kl_k2", "kl_k3", "kl_abs", "kl_unbiased"}
