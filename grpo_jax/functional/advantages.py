"""Advantages of completions that answer the same prompt.

Rewards are `[..., G]`: the last axis is the group, the G completions of one prompt. Leading axes are independent
groups, and advantages have the shape of the rewards. Functions of the whole batch take `axis_name`, the mapped axes
(of `jax.pmap`, `shard_map`, `vmap`) over which the batch is spread, for statistics of all devices. A group is on one
device, so functions that look only at groups need no axis.

`where`, bool `[..., G]`, leaves completions out. They are in no baseline and get exactly 0, whatever their reward.
None: all count.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import AxisName, maybe_pmax, maybe_psum, takes, upcast

# bool, true for completions that count; None: all. Inside `_checked_rewards` it is an array.
Where = Any


def _checked_rewards(advantages: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wraps a function of (float rewards, *, where), both arrays, to accept rewards of any dtype, and None for `where`.

    It computes in at least float32 and returns the dtype of the rewards: in 16 bits a mean falls on the rewards' grid.
    """

    @takes(rewards="... G", where="... G")
    @wraps(advantages)
    def advantages_of_rewards(rewards: jax.Array, *arguments: Any, where: Where = None, **options: Any) -> jax.Array:
        where = jnp.ones(rewards.shape, bool) if where is None else where
        return advantages(upcast(rewards), *arguments, where=where, **options).astype(_float(rewards))

    return advantages_of_rewards


@_checked_rewards
def group_advantages(rewards: jax.Array, *, ddof: int = 1, eps: float = 1e-6, where: Where = None) -> jax.Array:
    """Aᵢ = (rᵢ − μ) / (s + ε), standardised rewards.

    DeepSeekMath (2402.03300), section 4.1.2. μ and s are the mean and standard deviation of the group.

    Args:
      rewards: `[..., G]`.
      ddof: the number subtracted from G in the variance. 1, the sample deviation, as in TRL and verl; 0 is the
        population deviation.
      eps: added to s. 1e-6 from verl; TRL takes 1e-4, the post that announced GRPO 1e-8.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.

    Examples:
      >>> print(group_advantages(jnp.array([1.0, 0.0, 0.0, 1.0])))
      [ 0.866 -0.866 -0.866  0.866]
    """
    centered = centered_advantages(rewards, where=where)
    # The deviation of equal rewards is rounding noise rather than 0, and larger than ε: eight times 0.7 in float32
    # would give 0.86. So compare the rewards.
    has_spread = _has_spread(rewards, where)
    # Divided by the largest first: squares of large rewards overflow, and all advantages would be 0.
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(jnp.where(has_spread, centered, 1)), axis=-1, keepdims=True))
    squares = jnp.sum(jnp.square(centered / scale), axis=-1, keepdims=True)
    variance = squares / jnp.maximum(_count(rewards, where) - ddof, 1)
    deviation = scale * jnp.sqrt(jnp.where(has_spread, variance, 1))
    return jnp.where(_differs(rewards, where), centered / (deviation + eps), 0)


@_checked_rewards
def centered_advantages(rewards: jax.Array, *, where: Where = None) -> jax.Array:
    """Aᵢ = rᵢ − μ, centred rewards. Dr.GRPO (2503.20783).

    Args:
      rewards: `[..., G]`.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.

    Examples:
      >>> print(centered_advantages(jnp.array([1.0, 0.0, 0.0, 1.0])))
      [ 0.5 -0.5 -0.5  0.5]
    """
    return _against(rewards, _mean(rewards, where), where)


@_checked_rewards
def leave_one_out_advantages(rewards: jax.Array, *, where: Where = None) -> jax.Array:
    """Aᵢ = rᵢ − Σ_{j≠i} rⱼ / (G − 1) = G/(G − 1) · (rᵢ − μ), the lead over the mean of the others.

    RLOO (2402.14740).

    Args:
      rewards: `[..., G]`.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`; a group of one gets 0.

    Examples:
      >>> print(leave_one_out_advantages(jnp.array([3.0, 0.0, 0.0])))
      [ 3.  -1.5 -1.5]
    """
    count = _count(rewards, where)
    return centered_advantages(rewards, where=where) * (count / jnp.maximum(count - 1, 1))


@takes(rewards="... G")
def group_ranks(rewards: jax.Array) -> jax.Array:
    """rankᵢ = 1 + #{j : rⱼ > rᵢ}, the competition rank.

    The best reward has rank 1; equal rewards share the better rank; NaN comes last.

    Args:
      rewards: `[..., G]`.

    Returns:
      int32 `[..., G]`, from 1 to G.

    Examples:
      >>> print(group_ranks(jnp.array([0.2, 0.9, 0.9, 0.1])))
      [3 1 1 4]
    """
    rewards = jnp.where(jnp.isnan(rewards), -jnp.inf, rewards)
    return 1 + jnp.sum(_larger(rewards), axis=-1, dtype=jnp.int32)


@_checked_rewards
def rank_advantages(rewards: jax.Array, *, ddof: int = 1, eps: float = 1e-6, where: Where = None) -> jax.Array:
    """A = standardise(−rank̄), rank̄ᵢ = ½ (#{j : rⱼ > rᵢ} + #{j : rⱼ ≥ rᵢ} + 1).

    rank̄ gives equal rewards the mean of the ranks they occupy. Only the order of the rewards counts. For 0/1 rewards
    this equals `group_advantages`. The post that announced GRPO proposes ranks; how ties and scale are treated is this
    library's choice.

    Args:
      rewards: `[..., G]`.
      ddof: see `group_advantages`.
      eps: see `group_advantages`.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`, the best positive; exactly 0 where all rewards are equal.

    Examples:
      >>> print(rank_advantages(jnp.array([0.1, 5.0, 1e6])))
      [-1.  0.  1.]
    """
    larger = _larger(rewards) & where[..., None, :] & where[..., :, None]
    better, worse = (jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (larger, jnp.swapaxes(larger, -1, -2)))
    ranks = (better - worse).astype(rewards.dtype) / 2  # rank̄ minus the mean rank
    ranks = jnp.where(jnp.isnan(rewards), jnp.nan, ranks)  # no comparison holds for NaN: its rank would be the middle
    return group_advantages(-ranks, ddof=ddof, eps=eps, where=where)


@_checked_rewards
def batch_std_advantages(
    rewards: jax.Array,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    where: Where = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Aᵢ = (rᵢ − μ_group) / (s_batch + ε), centred in the group and scaled by the batch. Lite PPO (2508.08221).

    Args:
      rewards: `[..., G]`; all axes together are the batch.
      ddof: see `group_advantages`, for the batch.
      eps: see `group_advantages`.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., G]`; exactly 0 in a group whose rewards are all equal.

    Examples:
      >>> print(batch_std_advantages(jnp.array([[1.0, 0.0], [2.0, 2.0]])))
      [[ 0.522 -0.522]
       [ 0.     0.   ]]
    """
    _, deviation = _batch_moments(jnp.where(where, rewards, 0), where, ddof, axis_name)
    centered = centered_advantages(rewards, where=where)
    return jnp.where(_differs(rewards, where), centered / (deviation + eps), 0)


@takes(rewards="... G", lengths="... G")
@_checked_rewards
def opo_advantages(
    rewards: jax.Array, lengths: jax.Array, *, where: Where = None, axis_name: AxisName = None
) -> jax.Array:
    """Aᵢ = rᵢ − Σⱼ |oⱼ| rⱼ / Σⱼ |oⱼ|, the lead over the mean weighted by length. OPO (2505.23585).

    The baseline of least variance if the gradients of tokens are independent and equally distributed.

    Args:
      rewards: `[..., G]`.
      lengths: `[..., G]`, |o| in tokens.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.
      axis_name: not read, since a group is on one device; `Objective.advantages` is called with it.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.

    Examples:
      >>> print(opo_advantages(jnp.array([1.0, 0.0]), jnp.array([30, 10])))
      [ 0.25 -0.75]
    """
    del axis_name
    weights = jnp.where(where, lengths.astype(rewards.dtype), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    baseline = jnp.sum(weights * _fill(rewards, where), axis=-1, keepdims=True) / jnp.maximum(total, 1)
    return _against(rewards, baseline, where)


@takes(rewards="... G", greedy_rewards="...")
def remax_advantages(rewards: jax.Array, greedy_rewards: jax.Array) -> jax.Array:
    """Aᵢ = rᵢ − r(greedy), the lead over the greedy completion of the prompt. ReMax (2310.10505).

    Args:
      rewards: `[..., G]`, the rewards of sampled completions; G may be 1.
      greedy_rewards: `[...]`, one per prompt.

    Returns:
      `[..., G]`.

    Examples:
      >>> print(remax_advantages(jnp.array([[1.0, 0.0]]), jnp.array([0.25])))
      [[ 0.75 -0.25]]
    """
    return (upcast(rewards) - upcast(greedy_rewards)[..., None]).astype(_float(rewards))


@_checked_rewards
def gpg_advantages(rewards: jax.Array, *, where: Where = None, axis_name: AxisName = None) -> jax.Array:
    """Aᵢ = α (rᵢ − μ), α = B / #{completions of groups whose rewards differ}. GPG (2504.02546).

    Groups of equal rewards have no gradient; α makes up for the scale that they take from the mean. Use this with
    `reinforce_term`.

    Args:
      rewards: `[..., G]`; all axes together are the batch.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.
        B is the number of completions that count.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., G]`; all 0 where no group has signal.

    Examples:
      >>> print(gpg_advantages(jnp.array([[1.0, 0.0], [1.0, 1.0]])))  # half of the groups have signal
      [[ 1. -1.]
       [ 0.  0.]]
    """
    with_signal = _differs(rewards, where)
    total, signals = (maybe_psum(jnp.sum(x, dtype=jnp.float32), axis_name) for x in (where, with_signal))
    return centered_advantages(rewards, where=where) * (total / jnp.maximum(signals, 1))


@_checked_rewards
def max_rl_advantages(rewards: jax.Array, *, where: Where = None) -> jax.Array:
    """Aᵢ = (rᵢ − μ) / μ, and 0 where μ ≤ 0. MaxRL (2602.02710).

    Args:
      rewards: `[..., G]`, 0 or 1 in the paper; not negative.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.

    Examples:
      >>> print(max_rl_advantages(jnp.array([1.0, 0.0, 0.0, 0.0])))
      [ 3. -1. -1. -1.]
    """
    mean = _mean(rewards, where)
    # Not "mean > 0": a NaN must stay visible.
    informative = _differs(rewards, where) & ~(mean <= 0)
    return jnp.where(informative, centered_advantages(rewards, where=where) / jnp.where(mean <= 0, 1, mean), 0)


@_checked_rewards
def best_of_group_advantages(rewards: jax.Array, *, where: Where = None) -> jax.Array:
    """A₍₁₎ = r₍₁₎ − r₍₂₎, the lead of the best over the second; all others get 0. 2503.19595.

    The lead is what the group's maximum would lose without its best completion.

    Args:
      rewards: `[..., G]`.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`; all 0 where the best reward is shared, and in a group of one.

    Examples:
      >>> print(best_of_group_advantages(jnp.array([0.2, 0.9, 0.5])))
      [0.  0.4 0. ]
    """
    eligible = jnp.where(where, rewards, -jnp.inf)
    position = jax.lax.broadcasted_iota(jnp.int32, rewards.shape, rewards.ndim - 1)
    is_best = position == jnp.argmax(eligible, axis=-1, keepdims=True)
    best = jnp.max(eligible, axis=-1, keepdims=True)
    second = jnp.max(jnp.where(is_best, -jnp.inf, eligible), axis=-1, keepdims=True)
    has_second = _count(rewards, where) > 1
    informative = has_second | jnp.isnan(best)  # a NaN must stay visible, even in a group of one
    return jnp.where(is_best & informative, best - jnp.where(has_second, second, 0), 0)


@_checked_rewards
def pass_at_k_advantages(rewards: jax.Array, *, k: int, where: Where = None) -> jax.Array:
    """A⁺ = (1 − R̄)/σ, A⁻ = (1 − R̄ − C(q−1, k−1)/C(n−1, k−1))/σ, R̄ = 1 − C(q, k)/C(n, k), σ = √(R̄ (1 − R̄)).

    2508.10751: the standardised reward of a subset of k completions, 1 if one of them is right, averaged over the
    subsets that hold a completion. n completions, q of them wrong. With k = 1 this is `group_advantages` with ddof 0.

    Args:
      rewards: `[..., G]`; above 0 for a right completion.
      k: the k of pass@k, static, at most G.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`; 0 where every subset passes, or none.

    Raises:
      ValueError: k is below 1 or above G.

    Examples:
      >>> print(pass_at_k_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), k=2))
      [ 1.    -0.333 -0.333 -0.333]
    """
    if not 1 <= k <= rewards.shape[-1]:
        raise ValueError(f"k is {k}: it must be between 1 and the group's size, {rewards.shape[-1]}")
    right = where & (rewards > 0)
    n, wrong = (jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.float32) for x in (where, where & ~right))
    all_wrong = _choose_ratio(wrong, n, k)
    others_wrong = _choose_ratio(wrong - 1, n - 1, k - 1)  # of the subsets that hold a particular wrong completion
    variance = all_wrong * (1 - all_wrong)
    above = jnp.where(right, all_wrong, all_wrong - others_wrong)
    informative = (variance > 0) & where & (n >= k)
    advantages = jnp.where(informative, above / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)
    return jnp.where(where & jnp.isnan(rewards), jnp.nan, advantages)


@takes(rewards="K ... G", weights="K")
def gdpo_advantages(
    rewards: jax.Array,
    *,
    weights: jax.Array | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    axis_name: AxisName = None,
) -> jax.Array:
    """A = whiten_batch(Σₖ wₖ standardise_group(rᵏ)), for several rewards. GDPO (2601.05242).

    Each reward is standardised by itself, so that the scale of one does not hide another.

    Args:
      rewards: `[K, ..., G]`; NaN where a reward does not apply to a completion.
      weights: `[K]`; None: 1 each.
      ddof: see `group_advantages`, for group and batch.
      eps: see `group_advantages`, for group and batch.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., G]`; 0 for a completion to which no reward applies.

    Examples:
      >>> accuracy, tokens = jnp.array([1.0, 1.0, 0.0]), jnp.array([10.0, 30.0, 20.0])
      >>> print(gdpo_advantages(jnp.stack([accuracy, -tokens])))
      [ 1.115 -0.299 -0.816]
    """
    applies = ~jnp.isnan(rewards)
    by_reward = group_advantages(rewards, ddof=ddof, eps=eps, where=applies)
    if weights is not None:
        by_reward = by_reward * weights.reshape(-1, *[1] * (rewards.ndim - 1))
    total, size = jnp.sum(by_reward, axis=0), jnp.sum(jnp.abs(by_reward), axis=0)
    # Where rewards cancel, whitening would magnify what rounding leaves.
    total = jnp.where(jnp.abs(total) <= 1e-6 * size, 0, total)
    return whiten(total, jnp.any(applies, axis=0), ddof=ddof, eps=eps, axis_name=axis_name)


@takes(rewards="... G K", where="... G K")
def turn_advantages(rewards: jax.Array, *, ddof: int = 1, eps: float = 1e-6, where: Where = None) -> jax.Array:
    """Aᵢₖ = (Rᵢₖ − μₖ) / (sₖ + ε), Rᵢₖ = Σ_{j≥k} rᵢⱼ, standardised returns to go of the turns of episodes.

    μₖ and sₖ are the mean and standard deviation of the returns to go of the group at turn k. Where fewer than two of
    its episodes have that turn, they are those of all turns of the group. This is this library's choice: with one turn
    it is `group_advantages`.

    Args:
      rewards: `[..., G, K]`, the rewards of K turns.
      ddof: see `group_advantages`.
      eps: see `group_advantages`.
      where: bool `[..., G, K]`, true for turns that happened; others count nowhere and get 0. None: all.

    Returns:
      `[..., G, K]`; 0 at a turn at which all returns to go are equal, up to 1e-6 of the largest of the group.

    Examples:
      >>> rewards, turns = jnp.array([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0]]), jnp.array([[1, 1], [1, 1], [1, 0]])
      >>> print(turn_advantages(rewards, where=turns > 0))
      [[ 0.     0.707]
       [-1.    -0.707]
       [ 1.     0.   ]]
    """
    where = jnp.ones(rewards.shape, bool) if where is None else where
    returns = jnp.flip(jnp.cumsum(jnp.flip(jnp.where(where, upcast(rewards), 0), -1), -1), -1)
    largest = jnp.max(jnp.where(where, jnp.abs(returns), 0), axis=(-2, -1))

    def standardised(returns: jax.Array, where: jax.Array) -> jax.Array:
        advantages, filled = group_advantages(returns, ddof=ddof, eps=eps, where=where), _fill(returns, where)
        spread = jnp.max(filled, axis=-1, keepdims=True) - jnp.min(filled, axis=-1, keepdims=True)
        # Sums of different parts that are equal differ by rounding, which standardising would magnify.
        rounding = 1e-6 * largest.reshape(*largest.shape, *[1] * (returns.ndim - largest.ndim))
        return jnp.where(spread <= rounding, 0, advantages)

    separately = standardised(returns.swapaxes(-1, -2), where.swapaxes(-1, -2)).swapaxes(-1, -2)
    flat = (*returns.shape[:-2], returns.shape[-2] * returns.shape[-1])
    pooled = standardised(returns.reshape(flat), where.reshape(flat)).reshape(returns.shape)
    is_alone = jnp.sum(where, axis=-2, keepdims=True) < 2
    return jnp.where(is_alone, pooled, separately).astype(_float(rewards))


@takes(logprobs="...", teacher_logprobs="...")
def teacher_advantages(logprobs: jax.Array, teacher_logprobs: jax.Array) -> jax.Array:
    """A = log π_T − log π_old of each sampled token, −k1. On-policy distillation (Thinking Machines 2025).

    A token gets only its own credit, not that of later ones (a discount of 0). Its expectation over samples of π_old is
    −KL(π_old ‖ π_T) at each token, and the on-policy policy gradient is that of the reverse KL of tokens.

    Args:
      logprobs: `[..., T]` in nats, under the policy that sampled.
      teacher_logprobs: `[..., T]` in nats.

    Returns:
      `[..., T]`, without gradient; at masked places anything.

    Examples:
      >>> print(teacher_advantages(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -0.5])))
      [-0.5  1.5]
    """
    return jax.lax.stop_gradient(upcast(teacher_logprobs) - upcast(logprobs))


@takes(rewards="... G T", ends="... G T", where="... G")
def span_advantages(
    rewards: jax.Array, ends: jax.Array, *, ddof: int = 1, eps: float = 1e-6, where: Where = None
) -> jax.Array:
    """Aᵢₜ = `turn_advantages` of span k(i, t) = min(1 + Σ_{u<t} endsᵢᵤ, Kᵢ), standardised returns to go of spans.

    A span begins after the end of the span before it, and ends at its own end. Tokens after the last of Kᵢ spans
    belong to the last. So the rewards from the span of a token on are compared with those of the k-th spans of its
    group. This is this library's choice, as for turns.

    Args:
      rewards: `[..., G, T]`, the reward of a span at the token that ends it; others count nowhere.
      ends: bool `[..., G, T]`, true on tokens that end a span.
      ddof: see `group_advantages`.
      eps: see `group_advantages`.
      where: bool `[..., G]`, true for completions that count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G, T]`; 0 in a completion without spans.

    Examples:
      >>> rewards = jnp.array([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
      >>> ends = jnp.array([[False, True, False, True], [False, True, True, False]])
      >>> print(span_advantages(rewards, ends))
      [[ 0.707  0.707  0.707  0.707]
       [-0.707 -0.707 -0.707 -0.707]]
    """
    order = jnp.argsort(~ends, axis=-1, stable=True)  # the tokens that end spans come first
    count = jnp.sum(ends, axis=-1, keepdims=True, dtype=jnp.int32)
    is_span = jax.lax.broadcasted_iota(jnp.int32, ends.shape, ends.ndim - 1) < count
    is_counted = is_span if where is None else is_span & where[..., None]
    by_span = jnp.take_along_axis(rewards, order, axis=-1)
    advantages = turn_advantages(by_span, ddof=ddof, eps=eps, where=is_counted)
    before = jnp.cumsum(ends, axis=-1, dtype=jnp.int32) - ends.astype(jnp.int32)
    span = jnp.maximum(jnp.minimum(before, count - 1), 0)
    return jnp.where(count > 0, jnp.take_along_axis(advantages, span, axis=-1), 0)


@takes(values="...", mask="...")
def whiten(
    values: jax.Array,
    mask: jax.Array | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
    axis_name: AxisName = None,
) -> jax.Array:
    """(x − mean) / (s + ε), over the whole batch.

    Args:
      values: any shape; all axes together are the batch.
      mask: bool, of the same shape, true for values that count. None: all.
      ddof: see `group_advantages`, for the batch. 1 as in published systems.
      eps: added to s. 1e-4: verl has √(s² + 1e-8), the same floor. Less would magnify rounding noise.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      The shape of `values`; 0 where masked, and everywhere if all values are equal.

    Examples:
      >>> print(whiten(jnp.array([[1.0, 2.0], [3.0, 99.0]]), jnp.array([[True, True], [True, False]]), eps=0.0))
      [[-1.  0.]
       [ 1.  0.]]
    """
    mask = jnp.ones_like(values, bool) if mask is None else mask
    masked = jnp.where(mask, upcast(values), 0)
    mean, deviation = _batch_moments(masked, mask, ddof, axis_name)
    # The deviation of equal values is rounding noise; see group_advantages.
    constant = jax.lax.stop_gradient(masked)
    highest = maybe_pmax(jnp.max(jnp.where(mask, constant, -jnp.inf)), axis_name)
    lowest = -maybe_pmax(jnp.max(jnp.where(mask, -constant, -jnp.inf)), axis_name)
    whitened = jnp.where(mask & (lowest != highest), (masked - mean) / (deviation + eps), 0)
    return whitened.astype(_float(values))


def _larger(rewards: jax.Array) -> jax.Array:
    """Compares all pairs of a group: bool `[..., G, G]`, at [i, j] true if j has a larger reward than i."""
    return rewards[..., None, :] > rewards[..., :, None]


def _count(rewards: jax.Array, where: jax.Array) -> jax.Array:
    """Returns how many of a group count, `[..., 1]`."""
    return jnp.sum(where, axis=-1, keepdims=True, dtype=rewards.dtype)


def _fill(rewards: jax.Array, where: jax.Array) -> jax.Array:
    """Replaces rewards that do not count by the group's largest that does, or 0, so that they do not add to its
    spread."""
    largest = jnp.max(jnp.where(where, rewards, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(where, rewards, jnp.where(jnp.any(where, axis=-1, keepdims=True), largest, 0))


def _mean(rewards: jax.Array, where: jax.Array) -> jax.Array:
    total = jnp.sum(jnp.where(where, rewards, 0), axis=-1, keepdims=True)
    return total / jnp.maximum(_count(rewards, where), 1)


def _against(rewards: jax.Array, baseline: jax.Array, where: jax.Array) -> jax.Array:
    """Subtracts a baseline. Completions that do not count get exactly 0, and so do groups of equal rewards."""
    return jnp.where(_differs(rewards, where), _fill(rewards, where) - baseline, 0)


def _differs(rewards: jax.Array, where: jax.Array) -> jax.Array:
    """Marks completions that count, in groups whose rewards are not all equal, bool `[..., G]`. The rest gets 0."""
    return _has_spread(rewards, where) & where


def _has_spread(rewards: jax.Array, where: jax.Array) -> jax.Array:
    rewards = _fill(rewards, where)
    # "!=" rather than ">": a NaN must stay visible, and not pass for "all equal".
    return jnp.max(rewards, axis=-1, keepdims=True) != jnp.min(rewards, axis=-1, keepdims=True)


def _batch_moments(values: jax.Array, mask: jax.Array, ddof: int, axis_name: AxisName) -> tuple[jax.Array, jax.Array]:
    """Returns mean and standard deviation over all axes and `axis_name`; values are 0 where masked."""
    count, total = (maybe_psum(jnp.sum(x, dtype=values.dtype), axis_name) for x in (mask, values))
    mean = total / jnp.maximum(count, 1)
    centered = jnp.where(mask, values - mean, 0)
    # Divided by the largest before squaring, as in group_advantages.
    largest = maybe_pmax(jnp.max(jnp.abs(jax.lax.stop_gradient(centered)), initial=0), axis_name)
    scale = jnp.where(largest > 0, largest, 1)
    squares = maybe_psum(jnp.sum(jnp.square(centered / scale)), axis_name)
    # The gradient of a square root is infinite at 0, where all values are equal.
    variance = squares / jnp.maximum(count - ddof, 1)
    return mean, scale * jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), variance)


def _choose_ratio(q: jax.Array, n: jax.Array, k: int) -> jax.Array:
    """C(q, k) / C(n, k) = Π_{i<k} (q − i)/(n − i), 0 where q < k."""
    i = jnp.arange(k, dtype=q.dtype).reshape(-1, *[1] * q.ndim)
    return jnp.prod(jnp.maximum(q[None] - i, 0) / jnp.maximum(n[None] - i, 1), axis=0)


def _float(rewards: jax.Array) -> Any:
    return rewards.dtype if jnp.issubdtype(rewards.dtype, jnp.floating) else jnp.float32
