"""Advantages of completions that answer the same prompt.

Rewards are `[..., G]`: the last axis is the group, the G completions of one
prompt. Functions return advantages of the same shape, treat leading axes as
independent groups, and know no parameters. Those that look at the whole batch say so.

Where a function takes `where`, bool `[..., G]`, it leaves completions out, as `jnp.mean` does:
they do not count in any baseline and get exactly 0, whatever their reward. None: all count.
"""

from collections.abc import Callable, Hashable
from functools import wraps

import jax
import jax.numpy as jnp

from grpo_jax.functional.numerics import exact, over_devices


def _in_float32(advantages: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Computes in at least float32 and returns the rewards' dtype: in 16 bits a mean falls on the rewards' grid."""

    @wraps(advantages)
    def exactly(rewards: jax.Array, *arguments, **options) -> jax.Array:
        return advantages(exact(rewards), *arguments, **options).astype(_float(rewards))

    return exactly


@_in_float32
def group_advantages(
    rewards: jax.Array, *, ddof: int = 1, eps: float = 1e-6, where: jax.Array | None = None
) -> jax.Array:
    """Standardised rewards: Aᵢ = (rᵢ − μ) / (s + ε).

    DeepSeekMath (2402.03300), equation after (3). μ and s are the mean and
    standard deviation of the group.

    Args:
      rewards: `[..., G]`.
      ddof: what is subtracted from G in the variance. 1 (sample deviation) is
        what published systems and the worked example ±0.8660 use; 0 is the
        population deviation.
      eps: added to s. Default from verl (1e-6); TRL takes 1e-4, the original
        listings 1e-8.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.

    Examples:
      >>> print(group_advantages(jnp.array([1.0, 0.0, 0.0, 1.0])))
      [ 0.866 -0.866 -0.866  0.866]
    """
    centered = centered_advantages(rewards, where=where)
    # Equal rewards have a deviation of rounding noise, not of 0, which ε does
    # not drown: eight times 0.7 in float32 would give 0.86. Compare the rewards.
    has_spread = _has_spread(rewards, where)
    # Squares of rewards between 0 and 1: larger ones could overflow, and all advantages be 0 without a word.
    scale = jax.lax.stop_gradient(jnp.max(jnp.abs(jnp.where(has_spread, centered, 1)), axis=-1, keepdims=True))
    variance = jnp.sum(jnp.square(centered / scale), axis=-1, keepdims=True) / _at_least_1(
        _count(rewards, where) - ddof
    )
    deviation = scale * jnp.sqrt(jnp.where(has_spread, variance, 1))
    return jnp.where(_differs(rewards, where), centered / (deviation + eps), 0)


@_in_float32
def centered_advantages(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
    """Centred rewards: Aᵢ = rᵢ − μ. Dr.GRPO (2503.20783).

    Args:
      rewards: `[..., G]`.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.

    Examples:
      >>> print(centered_advantages(jnp.array([1.0, 0.0, 0.0, 1.0])))
      [ 0.5 -0.5 -0.5  0.5]
    """
    return _against(rewards, _mean(rewards, where), where)


@_in_float32
def leave_one_out_advantages(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
    """Reward against the mean of the others: Aᵢ = rᵢ − Σ_{j≠i} rⱼ / (G − 1) = G/(G − 1) · (rᵢ − μ).

    RLOO (2402.14740).

    Args:
      rewards: `[..., G]`.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`; a group of one has nobody to compare with and gets 0.

    Examples:
      >>> print(leave_one_out_advantages(jnp.array([3.0, 0.0, 0.0])))
      [ 3.  -1.5 -1.5]
    """
    count = _count(rewards, where)
    return centered_advantages(rewards, where=where) * (count / _at_least_1(count - 1))


def group_ranks(rewards: jax.Array) -> jax.Array:
    """Competition rank: rankᵢ = 1 + #{j : rⱼ > rᵢ}.

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
    return 1 + jnp.sum(_larger(rewards, None), axis=-1, dtype=jnp.int32)


def rank_advantages(
    rewards: jax.Array, *, ddof: int = 1, eps: float = 1e-6, where: jax.Array | None = None
) -> jax.Array:
    """Standardised ranks: A = standardise(−rank̄), rank̄ᵢ = ½ (#{j : rⱼ > rᵢ} + #{j : rⱼ ≥ rᵢ} + 1).

    rank̄ gives equal rewards the mean of the ranks they occupy. Unchanged by any
    increasing map of the rewards: only their order counts. For 0/1 rewards this
    equals `group_advantages`. The post that announced GRPO proposes ranks; ties and
    scale are this library's choice.

    Args:
      rewards: `[..., G]`.
      ddof: as in `group_advantages`.
      eps: as in `group_advantages`.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`, the best positive; exactly 0 where all rewards are equal.

    Examples:
      >>> print(rank_advantages(jnp.array([0.1, 5.0, 1e6])))
      [-1.  0.  1.]
    """
    return group_advantages(-_mean_ranks(rewards, where), ddof=ddof, eps=eps, where=where)


@_in_float32
def linear_rank_advantages(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
    """Ranks on a line from 1 (best) to −1 (worst): Aᵢ = 2 (G − rank̄ᵢ)/(G − 1) − 1.

    Args:
      rewards: `[..., G]`.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`; a group of one gets 0.

    Examples:
      >>> print(linear_rank_advantages(jnp.array([0.1, 5.0, 1e6])))
      [-1.  0.  1.]
    """
    count = _count(rewards, where)
    advantages = (count + 1 - 2 * _mean_ranks(rewards, where)) / _at_least_1(count - 1)
    return advantages if where is None else jnp.where(where, advantages, 0)


@_in_float32
def batch_std_advantages(
    rewards: jax.Array,
    *,
    ddof: int = 1,
    eps: float = 1e-6,
    where: jax.Array | None = None,
    axis_name: Hashable | None = None,
) -> jax.Array:
    """Centred in the group, scaled by the batch: Aᵢ = (rᵢ − μ_group) / (s_batch + ε). Lite PPO (2508.08221).

    Args:
      rewards: `[..., G]`; all axes together are the batch.
      ddof: as in `group_advantages`, of the batch.
      eps: as in `group_advantages`.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., G]`; exactly 0 in a group whose rewards are all equal.

    Examples:
      >>> print(batch_std_advantages(jnp.array([[1.0, 0.0], [2.0, 2.0]])))
      [[ 0.522 -0.522]
       [ 0.     0.   ]]
    """
    deviation = _batch_moments(rewards, where, ddof, axis_name)[1]
    centered = centered_advantages(rewards, where=where)
    return jnp.where(_differs(rewards, where), centered / (deviation + eps), 0)


@_in_float32
def opo_advantages(rewards: jax.Array, lengths: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
    """Against the mean weighted by length: Aᵢ = rᵢ − Σⱼ |oⱼ| rⱼ / Σⱼ |oⱼ|. OPO (2505.23585).

    The baseline of least variance, if gradients of tokens are independent and alike.

    Args:
      rewards: `[..., G]`.
      lengths: `[..., G]`, |o| in tokens.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`. A group whose rewards are all equal gets exactly 0.

    Examples:
      >>> print(opo_advantages(jnp.array([1.0, 0.0]), jnp.array([30, 10])))
      [ 0.25 -0.75]
    """
    kept, lengths = _fill(rewards, where), lengths.astype(rewards.dtype)
    weights = lengths if where is None else jnp.where(where, lengths, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    baseline = jnp.sum(weights * kept, axis=-1, keepdims=True) / jnp.maximum(total, 1)
    return _against(rewards, baseline, where)


@_in_float32
def remax_advantages(rewards: jax.Array, greedy_rewards: jax.Array) -> jax.Array:
    """Against the greedy completion of the same prompt: Aᵢ = rᵢ − r(greedy). ReMax (2310.10505).

    Args:
      rewards: `[..., G]`, of sampled completions; G may be 1.
      greedy_rewards: `[...]`, one a prompt.

    Returns:
      `[..., G]`.

    Examples:
      >>> print(remax_advantages(jnp.array([[1.0, 0.0]]), jnp.array([0.25])))
      [[ 0.75 -0.25]]
    """
    return rewards - exact(greedy_rewards)[..., None]


@_in_float32
def gpg_advantages(
    rewards: jax.Array, *, where: jax.Array | None = None, axis_name: Hashable | None = None
) -> jax.Array:
    """Aᵢ = α (rᵢ − μ), α = B / #{rows of groups whose rewards differ}. GPG (2504.02546).

    α keeps the gradient's scale when groups without signal shrink it. Goes with `reinforce_term`.

    Args:
      rewards: `[..., G]`; all axes together are the batch.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.
        B counts what it leaves.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., G]`; all 0 where no group has signal.

    Examples:
      >>> print(gpg_advantages(jnp.array([[1.0, 0.0], [1.0, 1.0]])))  # half of the rows have signal
      [[ 1. -1.]
       [ 0.  0.]]
    """
    counted = jnp.ones_like(rewards, bool) if where is None else where
    with_signal = counted & _has_spread(rewards, where)
    rows, signals = (over_devices(jnp.sum(x, dtype=jnp.float32), axis_name) for x in (counted, with_signal))
    centered = centered_advantages(rewards, where=where)
    return centered * (rows / jnp.maximum(signals, 1))


@_in_float32
def max_rl_advantages(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
    """Aᵢ = (rᵢ − μ) / μ, and 0 where μ ≤ 0. MaxRL (2602.02710).

    Args:
      rewards: `[..., G]`, 0 or 1 in the paper; not negative.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

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


@_in_float32
def best_of_group_advantages(rewards: jax.Array, *, where: jax.Array | None = None) -> jax.Array:
    """Only the best counts, by how much it beats the second: A₍₁₎ = r₍₁₎ − r₍₂₎, others 0.

    The group's maximum against that of a group without its best (2503.19595).

    Args:
      rewards: `[..., G]`.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

    Returns:
      `[..., G]`; all 0 where the best reward is shared, and in a group of one.

    Examples:
      >>> print(best_of_group_advantages(jnp.array([0.2, 0.9, 0.5])))
      [0.  0.4 0. ]
    """
    eligible = rewards if where is None else jnp.where(where, rewards, -jnp.inf)
    is_best = _positions(rewards) == jnp.argmax(eligible, axis=-1, keepdims=True)
    best = jnp.max(eligible, axis=-1, keepdims=True)
    second = jnp.max(jnp.where(is_best, -jnp.inf, eligible), axis=-1, keepdims=True)
    has_second = _count(rewards, where) > 1
    informative = has_second | jnp.isnan(best)  # a NaN must stay visible, even alone
    return jnp.where(is_best & informative, best - jnp.where(has_second, second, 0), 0)


@_in_float32
def pass_at_k_advantages(rewards: jax.Array, *, k: int, where: jax.Array | None = None) -> jax.Array:
    """A⁺ = (1 − R̄)/σ, A⁻ = (1 − R̄ − C(q−1, k−1)/C(n−1, k−1))/σ, R̄ = 1 − C(q, k)/C(n, k), σ = √(R̄ (1 − R̄)).

    2508.10751: what a completion adds to pass@k, averaged over all subsets of k that hold
    it; n completions, q of them wrong. With k = 1 this is `group_advantages` of population deviation.

    Args:
      rewards: `[..., G]`; right is what is above 0.
      k: of pass@k, static, at most G.
      where: bool `[..., G]`, which completions count; others are in no baseline and get 0. None: all.

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
    counted = jnp.ones_like(rewards, bool) if where is None else where
    right = counted & (rewards > 0)
    n, wrong = (jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.float32) for x in (counted, counted & ~right))
    all_wrong = _choose_ratio(wrong, n, k)
    others_wrong = _choose_ratio(wrong - 1, n - 1, k - 1)  # of the subsets around one wrong row
    variance = all_wrong * (1 - all_wrong)
    above = jnp.where(right, all_wrong, all_wrong - others_wrong)
    informative = (variance > 0) & counted & (n >= k)
    advantages = jnp.where(informative, above / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)
    return jnp.where(counted & jnp.isnan(rewards), jnp.nan, advantages)


def gdpo_advantages(
    rewards: jax.Array,
    *,
    weights: jax.Array | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    axis_name: Hashable | None = None,
) -> jax.Array:
    """A = whiten_batch(Σₖ wₖ standardise_group(rᵏ)), for several rewards. GDPO (2601.05242).

    Each reward has its group statistic of its own, so that none is drowned by another's scale.

    Args:
      rewards: `[K, ..., G]`; NaN where a reward does not apply to a completion.
      weights: `[K]`; None: 1 each.
      ddof: as in `group_advantages`, of group and batch.
      eps: as in `group_advantages`, of group and batch.
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
    # What rounding leaves where rewards cancel, whitening would blow up.
    total = jnp.where(jnp.abs(total) <= 1e-6 * size, 0, total)
    return whiten(total, jnp.any(applies, axis=0), ddof=ddof, eps=eps, axis_name=axis_name)


def whiten(
    values: jax.Array,
    mask: jax.Array | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-4,
    axis_name: Hashable | None = None,
) -> jax.Array:
    """(x − mean) / (s + ε), over the whole batch.

    Args:
      values: any shape; all axes together are the batch.
      mask: bool, of the same shape, what counts. None: all.
      ddof: as in `group_advantages`, of the batch. 1 as in published systems.
      eps: added to s. 1e-4: verl has √(s² + 1e-8), the same floor. Less would blow up rounding noise.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      The shape of `values`; 0 where masked, and everywhere if all values are equal.

    Examples:
      >>> print(whiten(jnp.array([[1.0, 2.0], [3.0, 99.0]]), jnp.array([[True, True], [True, False]]), eps=0.0))
      [[-1.  0.]
       [ 1.  0.]]
    """
    mask = jnp.ones_like(values, bool) if mask is None else mask
    kept = jnp.where(mask, exact(values), 0)
    mean, deviation = _batch_moments(values, mask, ddof, axis_name)
    # Of equal values the deviation is rounding noise; see group_advantages.
    constant = jax.lax.stop_gradient(kept)
    lowest = over_devices(jnp.min(jnp.where(mask, constant, jnp.inf)), axis_name, jax.lax.pmin)
    highest = over_devices(jnp.max(jnp.where(mask, constant, -jnp.inf)), axis_name, jax.lax.pmax)
    whitened = jnp.where(mask & (lowest != highest), (kept - mean) / (deviation + eps), 0)
    return whitened.astype(_float(values))


def reinforce_pp_advantages(
    rewards: jax.Array,
    mask: jax.Array,
    *,
    token_penalty: jax.Array | None = None,
    gamma: float = 1.0,
    eps: float = 1e-4,
    axis_name: Hashable | None = None,
) -> jax.Array:
    """A = whiten(R), Rₜ = r̂ₜ + γ Rₜ₊₁, r̂ₜ = 1[last] r − βk1ₜ. REINFORCE++ (2501.03262).

    Args:
      rewards: `[...]`, one a completion.
      mask: bool `[..., T]`.
      token_penalty: `[..., T]`, β · `kl_k1`. None: no KL in the reward.
      gamma: discount a token, 1 as in the paper.
      eps: as in `whiten`.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., T]`, 0 where masked.

    Examples:
      >>> print(reinforce_pp_advantages(jnp.array([1.0, 0.0]), jnp.array([[True, True], [True, True]])))
      [[ 0.866  0.866]
       [-0.866 -0.866]]
    """
    token_rewards = rewards_at_end(rewards, mask)
    if token_penalty is not None:
        token_rewards = token_rewards - jnp.where(mask, token_penalty, 0)
    # Without a critic and with λ = 1 an advantage is the discounted return.
    returns = generalized_advantages(token_rewards, jnp.zeros_like(token_rewards), mask, gamma=gamma, lam=1.0)
    return whiten(returns, mask, eps=eps, axis_name=axis_name)


def reinforce_pp_baseline_advantages(
    rewards: jax.Array, mask: jax.Array, *, eps: float = 1e-4, axis_name: Hashable | None = None
) -> jax.Array:
    """A = whiten(r − μ), μ of the group, whitened over all tokens of the batch. REINFORCE++ with baseline (2501.03262).

    Args:
      rewards: `[..., G]`.
      mask: bool `[..., G, T]`; a long completion counts more often in the batch's moments, as in verl.
      eps: as in `whiten`.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      `[..., G, T]`, 0 where masked.

    Examples:
      >>> print(reinforce_pp_baseline_advantages(jnp.array([[3.0, 1.0]]), jnp.array([[[True], [True]]])))
      [[[ 0.707]
        [-0.707]]]
    """
    centered = jnp.broadcast_to(centered_advantages(rewards)[..., None], mask.shape)
    return whiten(centered, mask, eps=eps, axis_name=axis_name)


def rewards_at_end(rewards: jax.Array, mask: jax.Array) -> jax.Array:
    """A completion's reward on its last token, 0 elsewhere.

    Args:
      rewards: `[...]`.
      mask: bool `[..., T]`.

    Returns:
      `[..., T]`; all 0 in a row without tokens.

    Examples:
      >>> print(rewards_at_end(jnp.array([5.0]), jnp.array([[True, True, False]])))
      [[0. 5. 0.]]
    """
    position = _positions(mask)
    last = jnp.max(jnp.where(mask, position, -1), axis=-1, keepdims=True)
    return jnp.where(position == last, rewards[..., None], 0)


def generalized_advantages(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: jax.Array | None = None,
    num_steps: int | None = None,
) -> jax.Array:
    """Aₜ = Σ (γλ)ˡ δₜ₊ₗ over l = 0 … K − 1, δₜ = rₜ + γVₜ₊₁ − Vₜ. GAE (1506.02438), equation 16.

    K is infinite by default: Aₜ = δₜ + γλ Aₜ₊₁. Masked tokens are stepped over, so that the token
    after a gap counts as the next one. Returns, the critic's target, are A + V.

    Args:
      rewards: `[..., T]`, a token's; see `rewards_at_end`.
      values: `[..., T]`, V before the token is sampled.
      mask: bool `[..., T]`.
      gamma: discount a token. 1: an answer is worth the same however long it took.
      lam: λ; 0.95 from PPO (1707.06347). 1 trusts rewards alone, 0 the critic alone.
      bootstrap: `[...]`, V after the last token of a row that was truncated. None: 0, right after an EOS.
      num_steps: K, static; None: to the end.

    Returns:
      `[..., T]`, at least float32; 0 where masked.

    Raises:
      ValueError: num_steps is below 1.

    Examples:
      >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.5])
      >>> print(generalized_advantages(rewards, values, jnp.ones(3, bool), lam=0.5))  # δ = -0.25, 0.25, 0.5
      [0.  0.5 0.5]
    """
    if num_steps is not None and num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}: it must be at least 1, or None for all")
    # In 16 bits a sum over a long completion would stop growing.
    dtype = jnp.promote_types(exact(rewards).dtype, exact(values).dtype)
    rewards, values = (jnp.where(mask, x.astype(dtype), 0) for x in (rewards, values))
    end = jnp.zeros_like(values[..., 0]) if bootstrap is None else bootstrap.astype(dtype)

    def backward(carry, token):
        next_value, following = carry  # following: A of the next token, or δ of the next K
        reward, value, is_token = token
        delta = reward + gamma * next_value - value
        if num_steps is None:
            current = advantage = delta + gamma * lam * following
        else:
            current = jnp.concatenate([delta[None], following[:-1]])
            decay = (gamma * lam) ** jnp.arange(num_steps, dtype=delta.dtype)
            advantage = jnp.tensordot(decay, current, axes=1)
        carry = jnp.where(is_token, value, next_value), jnp.where(is_token, current, following)
        return carry, jnp.where(is_token, advantage, 0)

    following = jnp.zeros_like(end) if num_steps is None else jnp.zeros_like(end, shape=(num_steps, *end.shape))
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (rewards, values, mask))
    advantages = jax.lax.scan(backward, (end, following), by_token, reverse=True)[1]
    return jnp.moveaxis(advantages, 0, -1)


def _positions(like: jax.Array) -> jax.Array:
    """0, 1, … along the last axis, with the rank of `like`."""
    return jnp.arange(like.shape[-1]).reshape(*[1] * (like.ndim - 1), -1)


def _mean_ranks(rewards: jax.Array, where: jax.Array | None) -> jax.Array:
    """Ranks with the mean on ties, floats `[..., G]`."""
    larger = _larger(rewards, where)
    better, worse = (jnp.sum(x, axis=-1, dtype=jnp.int32) for x in (larger, jnp.swapaxes(larger, -1, -2)))
    ranks = ((better - worse).astype(_float(rewards)) + _count(rewards, where) + 1) / 2
    return jnp.where(jnp.isnan(rewards), jnp.nan, ranks)  # NaN is larger than nothing; it must not pass for average


def _larger(rewards: jax.Array, where: jax.Array | None) -> jax.Array:
    """bool `[..., G, G]`: at [i, j], whether j has a larger reward than i, and both count."""
    larger = rewards[..., None, :] > rewards[..., :, None]
    return larger if where is None else larger & where[..., None, :] & where[..., :, None]


def _count(rewards: jax.Array, where: jax.Array | None):
    """How many of a group count: a number, or `[..., 1]`."""
    return rewards.shape[-1] if where is None else jnp.sum(where, axis=-1, keepdims=True, dtype=_float(rewards))


def _at_least_1(count):
    return max(count, 1) if isinstance(count, int) else jnp.maximum(count, 1)


def _fill(rewards: jax.Array, where: jax.Array | None) -> jax.Array:
    """In place of rewards that do not count, the group's largest that does, or 0: the spread is that of the rest."""
    if where is None:
        return rewards
    largest = jnp.max(jnp.where(where, rewards, -jnp.inf), axis=-1, keepdims=True)
    return jnp.where(where, rewards, jnp.where(jnp.any(where, axis=-1, keepdims=True), largest, 0))


def _mean(rewards: jax.Array, where: jax.Array | None) -> jax.Array:
    if where is None:
        return jnp.mean(rewards, axis=-1, keepdims=True)
    return jnp.sum(jnp.where(where, rewards, 0), axis=-1, keepdims=True) / _at_least_1(_count(rewards, where))


def _against(rewards: jax.Array, baseline: jax.Array, where: jax.Array | None) -> jax.Array:
    """Reward minus baseline; exactly 0 for what does not count, and where all rewards are equal."""
    return jnp.where(_differs(rewards, where), _fill(rewards, where) - baseline, 0)


def _differs(rewards: jax.Array, where: jax.Array | None) -> jax.Array:
    """What counts, in groups whose rewards are not all equal: everything else gets exactly 0."""
    return _has_spread(rewards, where) if where is None else _has_spread(rewards, where) & where


def _has_spread(rewards: jax.Array, where: jax.Array | None) -> jax.Array:
    rewards = _fill(rewards, where)
    # Not equal rather than greater: a NaN must stay visible, and not pass for "all equal".
    return jnp.max(rewards, axis=-1, keepdims=True) != jnp.min(rewards, axis=-1, keepdims=True)


def _batch_moments(values: jax.Array, mask: jax.Array | None, ddof: int, axis_name: Hashable | None):
    """Mean and standard deviation over all axes and `axis_name`, of what the mask keeps."""
    mask = jnp.ones_like(values, bool) if mask is None else mask
    kept = jnp.where(mask, exact(values), 0)
    count, total = (over_devices(jnp.sum(x, dtype=kept.dtype), axis_name) for x in (mask, kept))
    mean = total / jnp.maximum(count, 1)
    centered = jnp.where(mask, kept - mean, 0)
    # Squares between 0 and 1, as in group_advantages.
    largest = over_devices(jnp.max(jnp.abs(jax.lax.stop_gradient(centered)), initial=0), axis_name, jax.lax.pmax)
    scale = jnp.where(largest > 0, largest, 1)
    squares = over_devices(jnp.sum(jnp.square(centered / scale)), axis_name)
    # Of constant values the gradient of a square root at 0 would be infinite.
    variance = squares / jnp.maximum(count - ddof, 1)
    return mean, scale * jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), variance)


def _choose_ratio(q: jax.Array, n: jax.Array, k: int) -> jax.Array:
    """C(q, k) / C(n, k) = Π_{i<k} (q − i)/(n − i), 0 where q < k."""
    i = jnp.arange(k, dtype=q.dtype).reshape(-1, *[1] * q.ndim)
    return jnp.prod(jnp.maximum(q[None] - i, 0) / jnp.maximum(n[None] - i, 1), axis=0)


def _float(rewards: jax.Array):
    return rewards.dtype if jnp.issubdtype(rewards.dtype, jnp.floating) else jnp.float32
