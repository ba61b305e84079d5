"""Losses on preferences, for policies and reward models, and the loss of a critic.

A pair is a chosen completion c and a rejected completion r of one prompt. For a completion y, log π(y) = Σₜ log π(yₜ),
and |y| is its number of tokens. π_ref is the reference, and h is the difference of log-ratios:

  h = log π(c)/π_ref(c) − log π(r)/π_ref(r)

Log-probabilities are masked sums over tokens, in nats: Σₜ of `jnp.where(mask, logprobs, 0)`. Losses are elementwise;
take their mean over pairs.
"""

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import AxisName, check_above, is_known, maybe_psum, takes, upcast

# Shapes that losses of pairs take, as in `takes`.
_PAIR = {"chosen": "...", "rejected": "..."}
_REFERENCE = {"ref_chosen": "...", "ref_rejected": "..."}
_LENGTHS = {"chosen_length": "...", "rejected_length": "..."}


@takes(chosen="number | ...", rejected="number | ...")
def bradley_terry_loss(
    chosen: jax.Array, rejected: jax.Array, *, margin: jax.Array | float = 0.0, center_coef: float = 0.0
) -> jax.Array:
    """−log σ(r_c − r_r − margin) + c (r_c + r_r)², per pair. Bradley & Terry 1952; margin from Llama 2 (2307.09288).

    Args:
      chosen: `[...]`, reward of the preferred completion.
      rejected: `[...]`, reward of the rejected completion.
      margin: the difference of the two ratings; broadcasts. Default 0.
      center_coef: c, holds rewards near 0 (2312.09244 uses 0.01). Default 0.

    Returns:
      `[...]`; take the mean.

    Examples:
      >>> print(bradley_terry_loss(jnp.array(2.0), jnp.array(1.0)))  # log(1 + e⁻¹)
      0.3133
    """
    return jax.nn.softplus(margin - (chosen - rejected)) + center_coef * jnp.square(chosen + rejected)


@takes(**_PAIR, **_REFERENCE)
def dpo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """−(1 − ε) log σ(β h) − ε log σ(−β h). DPO (2305.18290), equation 7; with ε > 0 conservative DPO (Mitchell 2023).

    β h is the difference of the rewards that the policy implies: the loss is `bradley_terry_loss` of them.

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      ref_chosen: `[...]` in nats, log π_ref(c).
      ref_rejected: `[...]` in nats, log π_ref(r).
      beta: β, the factor from nats of h to rewards; 0.1 from the paper.
      label_smoothing: ε, the probability that a pair is the wrong way round. Default 0.

    Returns:
      `[...]`.

    Examples:
      >>> log_ratios = jnp.array([5.0]), jnp.array([-5.0])
      >>> print(dpo_loss(*log_ratios, jnp.zeros(1), jnp.zeros(1)))  # log(1 + e⁻¹)
      [0.3133]
    """
    z = beta * _difference(chosen, rejected, ref_chosen, ref_rejected)
    return jax.nn.softplus(-z) + label_smoothing * z  # −log σ(−z) = −log σ(z) + z


@takes(**_PAIR, **_REFERENCE)
def robust_dpo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> jax.Array:
    """[−(1 − ε) log σ(β h) + ε log σ(−β h)] / (1 − 2ε). Robust DPO (2403.00409).

    If each pair is the wrong way round with probability ε, this is DPO's loss of the right pairs in expectation. It may
    be negative, and has no lower bound.

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      ref_chosen: `[...]` in nats, log π_ref(c).
      ref_rejected: `[...]` in nats, log π_ref(r).
      beta: β; 0.1 as in DPO.
      label_smoothing: ε < ½. 0.1, which TRL's documentation attributes to the paper.

    Returns:
      `[...]`.

    Raises:
      ValueError: label_smoothing is not from 0 to below ½ (a traced value is not checked).

    Examples:
      >>> log_ratios = jnp.array([5.0]), jnp.array([-5.0])
      >>> print(robust_dpo_loss(*log_ratios, jnp.zeros(1), jnp.zeros(1)))  # (0.9 · 0.3133 − 0.1 · 1.3133) / 0.8
      [0.1883]
    """
    if is_known(label_smoothing) and not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must be at least 0, and below 0.5")
    z = beta * _difference(chosen, rejected, ref_chosen, ref_rejected)
    right, wrong = jax.nn.softplus(-z), jax.nn.softplus(z)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


@takes(**_PAIR, **_REFERENCE, **_LENGTHS)
def length_normalized_dpo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    chosen_length: jax.Array,
    rejected_length: jax.Array,
    *,
    beta: float = 5.0,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """`dpo_loss` of log-probabilities per token, log π(y)/|y|. Tülu 3 (2411.15124).

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      ref_chosen: `[...]` in nats, log π_ref(c).
      ref_rejected: `[...]` in nats, log π_ref(r).
      chosen_length: `[...]`, |c|; 0 counts as 1.
      rejected_length: `[...]`, |r|; 0 counts as 1.
      beta: β, 5 from the paper: per token, log-ratios are small.
      label_smoothing: ε as in `dpo_loss`. Default 0.

    Returns:
      `[...]`.

    Examples:
      >>> log_ratios, lengths = (jnp.array([5.0]), jnp.array([-5.0])), (jnp.array([50]), jnp.array([50]))
      >>> print(length_normalized_dpo_loss(*log_ratios, jnp.zeros(1), jnp.zeros(1), *lengths))  # log(1 + e⁻¹)
      [0.3133]
    """
    chosen, ref_chosen = (_per_token(x, chosen_length) for x in (chosen, ref_chosen))
    rejected, ref_rejected = (_per_token(x, rejected_length) for x in (rejected, ref_rejected))
    return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=beta, label_smoothing=label_smoothing)


@takes(**_PAIR, **_REFERENCE, **_LENGTHS)
def ipo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array,
    ref_rejected: jax.Array,
    chosen_length: jax.Array | None = None,
    rejected_length: jax.Array | None = None,
    *,
    tau: float = 0.1,
) -> jax.Array:
    """(h − 1/(2τ))². IPO (2310.12036), equation 17: h has a finite target, even if preferences are certain.

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      ref_chosen: `[...]` in nats, log π_ref(c).
      ref_rejected: `[...]` in nats, log π_ref(r).
      chosen_length: `[...]`, |c|, 0 counts as 1: log-probabilities are taken per token. So does TRL, because the
        paper's authors said that they did so. None: the equation as it stands, with sums.
      rejected_length: `[...]`, |r|, or None: as `chosen_length`.
      tau: τ, the weight of the KL. 0.1 from TRL; the paper has several.

    Returns:
      `[...]`.

    Raises:
      ValueError: tau is not above 0 (a traced value is not checked).

    Examples:
      >>> log_ratios = jnp.array([2.0]), jnp.array([-2.0])
      >>> print(ipo_loss(*log_ratios, jnp.zeros(1), jnp.zeros(1)))  # (4 − 5)²
      [1.]
    """
    check_above(0, tau=tau)
    _refuse_one(chosen_length=chosen_length, rejected_length=rejected_length)
    if chosen_length is not None and rejected_length is not None:
        chosen, ref_chosen = (_per_token(x, chosen_length) for x in (chosen, ref_chosen))
        rejected, ref_rejected = (_per_token(x, rejected_length) for x in (rejected, ref_rejected))
    return jnp.square(_difference(chosen, rejected, ref_chosen, ref_rejected) - 1 / (2 * tau))


@takes(**_PAIR, **_REFERENCE)
def hinge_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    ref_chosen: jax.Array | None = None,
    ref_rejected: jax.Array | None = None,
    *,
    beta: float = 0.1,
) -> jax.Array:
    """max(0, 1 − β h). SLiC-HF (2305.10425) without a reference; with one RSO's hinge-norm (2309.06657).

    SLiC-HF writes max(0, δ − log π(c) + log π(r)), which is δ times this loss at β = 1/δ. It also adds −λ log π of a
    supervised target, which this loss does not include.

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      ref_chosen: `[...]` in nats, log π_ref(c). None: no reference.
      ref_rejected: `[...]` in nats, log π_ref(r). None: no reference.
      beta: β = 1/δ. 0.1 from TRL.

    Returns:
      `[...]`.

    Examples:
      >>> print(hinge_loss(jnp.array([-5.0, -5.0]), jnp.array([-9.0, -25.0])))  # 1 − 0.4; 1 − 2 is below 0
      [0.6 0. ]
    """
    _refuse_one(ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    if ref_chosen is None or ref_rejected is None:
        return jax.nn.relu(1 - beta * (upcast(chosen) - upcast(rejected)))
    return jax.nn.relu(1 - beta * _difference(chosen, rejected, ref_chosen, ref_rejected))


@takes(**_PAIR, **_LENGTHS)
def simpo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    chosen_length: jax.Array,
    rejected_length: jax.Array,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> jax.Array:
    """−log σ(β log π(c)/|c| − β log π(r)/|r| − γ). SimPO (2405.14734), equation 6. There is no reference.

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      chosen_length: `[...]`, |c|; 0 counts as 1.
      rejected_length: `[...]`, |r|; 0 counts as 1.
      beta: β, 2 as in the authors' Llama-3-Base.
      gamma: γ, the target margin; 1 as in the authors' Llama-3-Base. TRL has β 0.1 and γ 0.5.

    Returns:
      `[...]`.

    Examples:
      >>> lengths = jnp.array([4]), jnp.array([4])
      >>> print(simpo_loss(jnp.array([-4.0]), jnp.array([-8.0]), *lengths))  # 2 · (−1) − 2 · (−2) − 1 = 1: log(1 + e⁻¹)
      [0.3133]
    """
    margin = _per_token(chosen, chosen_length) - _per_token(rejected, rejected_length)
    return jax.nn.softplus(gamma - beta * margin)


@takes(**_PAIR, **_LENGTHS)
def orpo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    chosen_length: jax.Array,
    rejected_length: jax.Array,
    *,
    odds_coef: float = 0.1,
) -> jax.Array:
    """−log p(c) − λ log σ(log odds(c) − log odds(r)), odds = p/(1 − p), p(y) = exp(log π(y)/|y|). ORPO (2403.07691).

    There is no reference: the first term is that of supervised fine-tuning, on the completion only.

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      chosen_length: `[...]`, |c|; 0 counts as 1.
      rejected_length: `[...]`, |r|; 0 counts as 1.
      odds_coef: λ, 0.1 from the paper's Mistral.

    Returns:
      `[...]`.

    Examples:
      >>> lengths = jnp.array([2]), jnp.array([2])
      >>> print(orpo_loss(2 * jnp.log(jnp.array([0.5])), 2 * jnp.log(jnp.array([0.2])), *lengths))
      [0.7155]

      Odds are 1 and ¼, so it is log 2 + 0.1 · log(1 + ¼).
    """
    chosen, rejected = _per_token(chosen, chosen_length), _per_token(rejected, rejected_length)
    return odds_coef * jax.nn.softplus(_log_odds(rejected) - _log_odds(chosen)) - chosen


@takes(chosen="...", rejected="...", chosen_length="...")
def cpo_loss(
    chosen: jax.Array,
    rejected: jax.Array,
    chosen_length: jax.Array | None = None,
    *,
    beta: float = 0.1,
    nll_coef: float = 1.0,
) -> jax.Array:
    """−log σ(β log π(c) − β log π(r)) − λ log π(c). CPO (2401.08417), DPO with a uniform reference.

    Args:
      chosen: `[...]` in nats, log π(c), with gradient.
      rejected: `[...]` in nats, log π(r), with gradient.
      chosen_length: `[...]`, |c|, 0 counts as 1: the second term is −λ log π(c)/|c|, as in TRL. None: the equation.
      beta: β, 0.1 from the paper.
      nll_coef: λ. The paper has 1.

    Returns:
      `[...]`.

    Examples:
      >>> print(cpo_loss(jnp.array([-10.0]), jnp.array([-20.0])))  # log(1 + e⁻¹) + 10
      [10.3133]
      >>> print(cpo_loss(jnp.array([-10.0]), jnp.array([-20.0]), jnp.array([10])))
      [1.3133]
    """
    learned = upcast(chosen) if chosen_length is None else _per_token(chosen, chosen_length)
    return jax.nn.softplus(-beta * (upcast(chosen) - upcast(rejected))) - nll_coef * learned


@takes(logprobs="...", ref_logprobs="...", desirable="...", kl="number | ...")
def kto_loss(
    logprobs: jax.Array,
    ref_logprobs: jax.Array,
    desirable: jax.Array,
    *,
    kl: jax.Array | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> jax.Array:
    """λ (1 − σ(±β (x − z₀))), x = log π(y)/π_ref(y), + where y is desirable. KTO (2402.01306).

    It takes single completions instead of pairs; the mean over completions is the loss. z₀ is an estimate of
    KL(π ‖ π_ref) without gradient. `kto_kl` is the paper's estimate; 0 assumes that the policy equals its reference.

    Args:
      logprobs: `[...]` in nats, log π(y), with gradient.
      ref_logprobs: `[...]` in nats, log π_ref(y).
      desirable: bool `[...]`.
      kl: z₀ ≥ 0 in nats: a number, or `[...]`.
      beta: β, 0.1 from the paper.
      desirable_weight: λ_D, 1 from the paper; other weights balance unequal numbers of both kinds.
      undesirable_weight: λ_U, 1 from the paper.

    Returns:
      `[...]`.

    Examples:
      >>> arrays = jnp.array([3.0, 3.0]), jnp.array([-7.0, -7.0]), jnp.array([True, False])
      >>> print(jnp.round(kto_loss(*arrays, kl=0.0), 4))  # 1 − σ(1) and 1 − σ(−1)
      [0.2689 0.7311]
    """
    z = beta * (_log_ratio(logprobs, ref_logprobs) - jax.lax.stop_gradient(kl))
    weight = jnp.where(desirable, desirable_weight, undesirable_weight).astype(z.dtype)
    return weight * jax.nn.sigmoid(jnp.where(desirable, -z, z))


@takes(logprobs="...", ref_logprobs="...", where="...")
def kto_kl(
    logprobs: jax.Array, ref_logprobs: jax.Array, *, where: jax.Array | None = None, axis_name: AxisName = None
) -> jax.Array:
    """max(0, mean log π(y′)/π_ref(y′)): z₀ of `kto_loss`, which stops its gradient. KTO (2402.01306).

    y′ are completions of other prompts in the batch: prompt i gets the completion of prompt i + 1. They are not samples
    of π, so the estimate is biased. The paper uses them because samples cost more.

    Args:
      logprobs: `[...]` in nats, log π(y′) of mismatched completions.
      ref_logprobs: `[...]` in nats, log π_ref(y′).
      where: bool `[...]`, true for completions that count. None: all.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      A scalar, 0 if no completion counts.

    Examples:
      >>> print(kto_kl(jnp.array([-3.0, -8.0]), jnp.array([-6.0, -7.0])))  # (3 − 1) / 2
      1.0
    """
    log_ratio = _log_ratio(logprobs, ref_logprobs)
    where = jnp.ones_like(log_ratio, bool) if where is None else where
    total = maybe_psum(jnp.sum(jnp.where(where, log_ratio, 0)), axis_name)
    count = maybe_psum(jnp.sum(where, dtype=log_ratio.dtype), axis_name)
    return jax.nn.relu(total / jnp.maximum(count, 1))


def _log_ratio(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """log π/π_ref, without a gradient in the reference."""
    return upcast(logprobs) - jax.lax.stop_gradient(upcast(ref_logprobs))


def _difference(chosen: jax.Array, rejected: jax.Array, ref_chosen: jax.Array, ref_rejected: jax.Array) -> jax.Array:
    """h = log π(c)/π_ref(c) − log π(r)/π_ref(r)."""
    return _log_ratio(chosen, ref_chosen) - _log_ratio(rejected, ref_rejected)


def _refuse_one(**arrays: jax.Array | None) -> None:
    """Refuses two arrays of which only one is None."""
    names = [name for name, value in arrays.items() if value is not None]
    if len(names) == 1:
        raise TypeError(f"{names[0]} is given without the other: give both of {' and '.join(arrays)}, or neither")


def _per_token(logprobs: jax.Array, length: jax.Array) -> jax.Array:
    """log π(y)/|y|, and 0 for an empty completion, so that padding rows of a batch are not NaN."""
    logprobs = upcast(logprobs)
    return logprobs / jnp.maximum(length, 1).astype(logprobs.dtype)


def _log_odds(logprobs: jax.Array) -> jax.Array:
    """log p/(1 − p). A p that rounds to 1 counts as 1 − ε, so that odds and gradients stay finite."""
    logprobs = jnp.minimum(logprobs, -jnp.finfo(logprobs.dtype).eps)
    return logprobs - jnp.log(-jnp.expm1(logprobs))


@takes(values="number | ...", returns="number | ...", old_values="number | ...")
def critic_loss(
    values: jax.Array, returns: jax.Array, *, old_values: jax.Array | None = None, clip: float = 0.2
) -> jax.Array:
    """½ (V − sg R)², or with old values ½ max((V − R)², (clip(V, V_old ± ε) − R)²). PPO (1707.06347), equation 9.

    ½ and the clipping come from OpenAI's baselines.

    Args:
      values: `[..., T]`, V with gradient.
      returns: `[..., T]`, R: `generalized_advantages` + V at sampling time, or the terminal reward.
      old_values: `[..., T]`, V at sampling time. None: no clipping.
      clip: ε, in units of the reward; 0.2 as in published systems.

    Returns:
      `[..., T]`.

    Examples:
      >>> print(critic_loss(jnp.array(1.0), jnp.array(3.0)))
      2.0
    """
    returns = jax.lax.stop_gradient(returns)
    error = jnp.square(values - returns)
    if old_values is not None:
        old_values = jax.lax.stop_gradient(old_values)
        clipped = old_values + jnp.clip(values - old_values, -clip, clip)
        error = jnp.maximum(error, jnp.square(clipped - returns))
    return error / 2
