"""Functions against their equations as plain loops over Python numbers, on random inputs with random masks.

What is computed for each number by itself, weights and returns of a critic are in test_golden.py and test_by_hand.py.
Terms and losses are in test_presets.py, which takes its loops from this file.
"""

from functools import cache, partial
from itertools import combinations

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpo_jax import functional as F

SHAPE = 4, 6  # completions, tokens


def quarters(rng, *shape):
    """Numbers of few levels, so that groups have ties; their sums are exact in float32."""
    return (rng.integers(-2, 7, shape) / 4).astype(np.float32)


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def random_mask(rng, *shape):
    return rng.random(shape) < rng.random()


def over_rows(loop):
    """Makes a loop over the tokens of one completion, which gets lists of those that count, one over completions.

    The last array is the mask; arrays without tokens are repeated on all of them.
    """

    def of_batch(*arrays):
        *arrays, mask = arrays
        result = np.zeros(mask.shape)
        for i in np.flatnonzero(mask.any(-1)):
            rows = [np.broadcast_to(x[i], mask[i].shape)[mask[i]].astype(float).tolist() for x in arrays]
            result[i, mask[i]] = loop(*rows)
        return result

    return of_batch


# --- advantages of groups: a loop gets a list of groups without what is left out ---


def mean_of(group):
    return sum(group) / max(len(group), 1)


def centered(group):
    return [r - mean_of(group) for r in group]


def deviation(values, ddof=1):
    return (sum(r**2 for r in centered(values)) / max(len(values) - ddof, 1)) ** 0.5


def standardised(group):
    return [r / (deviation(group) + 1e-6) if max(group) > min(group) else 0.0 for r in centered(group)]


def leave_one_out(group):
    return [r - (sum(group) - r) / (len(group) - 1) if len(group) > 1 else 0.0 for r in group]


def by_rank(group):
    """Equal rewards share the mean of their ranks."""
    return standardised([-sum(r > x for r in group) - sum(r == x for r in group) / 2 for x in group])


def max_rl(group):
    return [r / mean_of(group) if mean_of(group) > 0 else 0.0 for r in centered(group)]


def best_of_group(group):
    others = [group[:i] + group[i + 1 :] for i in range(len(group))]
    return [max(r - max(rest), 0.0) if rest else 0.0 for r, rest in zip(group, others, strict=True)]


def pass_at(k, group):
    """A subset of k is worth 1 if one of it is right. A completion gets the mean of its subsets, all standardised."""
    subsets = list(combinations(range(len(group)), k))
    worth = np.array([float(any(group[i] > 0 for i in subset)) for subset in subsets])
    if not subsets or worth.std() == 0:
        return [0.0] * len(group)
    scores = list(zip((worth - worth.mean()) / worth.std(), subsets, strict=True))
    return [np.mean([score for score, subset in scores if i in subset]) for i in range(len(group))]


def lengths_of(rewards):
    """Lengths from 1 to 7 tokens, made of the rewards: a completion that is left out takes its own along."""
    return 1 + abs(4 * rewards).astype(int) % 7


def opo(group):
    lengths = lengths_of(np.array(group)).tolist()
    baseline = sum(n * r for n, r in zip(lengths, group, strict=True)) / sum(lengths)
    return [r - baseline for r in group]


def batch_std(batch):
    of_batch = deviation([r for group in batch for r in group]) + 1e-6
    return [[r / of_batch for r in centered(group)] for group in batch]


def gpg(batch):
    rows, signals = (sum(len(g) for g in batch if g and max(g) - min(g) >= least) for least in (0, 1e-3))
    return [[r * rows / max(signals, 1) for r in centered(group)] for group in batch]


def each(loop):
    return lambda batch: [loop(group) if group else [] for group in batch]


def of_groups(function, loop):
    """The loop gets what counts, and what is left out gets 0, whatever it is."""

    def expected(rewards, where):
        batch = [rewards[i, where[i]].astype(float).tolist() for i in range(len(rewards))]
        result = np.zeros(rewards.shape)
        result[where] = [a for group in loop(batch) for a in group]
        return result

    def draw(rng):
        return quarters(rng, 3, 5), random_mask(rng, 3, 5)

    def of_both(rewards, where):
        return function(rewards, where=where)

    return of_both, expected, draw


# --- advantages of several rewards, of turns and of spans ---

GDPO_WEIGHTS = np.float32([1, 0.5])  # no two standardised rewards of up to four cancel


def gdpo(rewards):
    total, applies = np.zeros(rewards.shape[1:]), ~np.isnan(rewards).all(0)
    for reward, weight in zip(rewards, GDPO_WEIGHTS.tolist(), strict=True):
        for n, group in enumerate(reward):
            places = np.flatnonzero(~np.isnan(group))
            total[n, places] += [weight * a for a in (standardised(group[places].tolist()) if len(places) else [])]
    if applies.sum() < 2 or np.ptp(total[applies]) < 1e-9:
        return np.zeros(total.shape)
    return np.where(applies, (total - total[applies].mean()) / (total[applies].std(ddof=1) + 1e-6), 0)


def turns(rewards, where):
    result = np.zeros(rewards.shape)
    for n, (group, present) in enumerate(zip(rewards, where, strict=True)):
        to_come = {
            (i, k): float(sum(group[i, j] for j in range(k, len(group[i])) if present[i, j]))
            for i, k in zip(*np.nonzero(present), strict=True)
        }
        for k in {turn for _, turn in to_come}:
            same = [place for place in to_come if place[1] == k]
            among = same if len(same) > 1 else list(to_come)
            scores = standardised([to_come[place] for place in among])
            for place, advantage in zip(among, scores, strict=True):
                if place in same:
                    result[n, *place] = advantage
    return result


def spans(rewards, ends):
    """By turns: the number of the span of each token, then their advantages."""
    result = np.zeros(rewards.shape)
    for n in range(len(rewards)):
        earned = [rewards[n, i, ends[n, i]].tolist() for i in range(len(rewards[n]))]
        most = max([1, *map(len, earned)])
        by_span = np.array([row + [0.0] * (most - len(row)) for row in earned])
        by_turn = turns(by_span[None], np.array([[k < len(row) for k in range(most)] for row in earned])[None])[0]
        for i, t in np.ndindex(rewards.shape[1:]):
            if earned[i]:
                result[n, i, t] = by_turn[i, min(int(ends[n, i, :t].sum()), len(earned[i]) - 1)]
    return result


def draw_several(rng):
    return (np.where(rng.random((2, 3, 4)) < 0.8, quarters(rng, 2, 3, 4), np.float32(np.nan)),)


def draw_turns(rng):
    return quarters(rng, 2, 3, 4), np.arange(4) < rng.integers(0, 5, (2, 3, 1))


def draw_spans(rng):
    return quarters(rng, 2, 3, 5), random_mask(rng, 2, 3, 5)


# --- returns ---


def whitened(values, mask, eps=1e-4):
    counted = values[mask].astype(float).tolist()
    if not counted or max(counted) - min(counted) < 1e-9:
        return np.zeros(values.shape)
    return np.where(mask, (values - mean_of(counted)) / (deviation(counted) + eps), 0)


def at_end(rewards):
    return [0.0] * (len(rewards) - 1) + rewards[-1:]


def discounted(rewards, penalty, gamma=0.5):
    """γ is a power of two, so that returns that are equal in the loop are equal in float32."""
    token_rewards = [r - p for r, p in zip(at_end(rewards), penalty, strict=True)]
    return [sum(gamma**k * x for k, x in enumerate(token_rewards[n:])) for n in range(len(token_rewards))]


def reinforce_pp(rewards, penalty, mask, gamma=0.5):
    return whitened(over_rows(partial(discounted, gamma=gamma))(rewards[:, None], penalty, mask), mask)


def reinforce_pp_baseline(rewards, mask):
    against_group = np.array([centered(group) for group in rewards.astype(float).tolist()])
    return whitened(np.broadcast_to(against_group[..., None], mask.shape), mask)


# --- log-ratios, surrogates and terms, for test_presets.py ---


def clip(x, low, high):
    return min(max(x, low), high)


def differences(new, old):
    return [a - b for a, b in zip(new, old, strict=True)]


def sequence_sum(new, old):
    return [clip(sum(differences(new, old)), -40, 40)] * len(new)


def sequence_mean(new, old):
    return [mean_of(differences(new, old))] * len(new)


def clipped(ratio, a, epsilon_low=0.2, epsilon_high=0.2):
    return -min(ratio * a, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * a)


def cispo(ratio, a, epsilon_low=1.0, epsilon_high=4.0):
    return -clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * a * np.log(ratio)


def sapo(ratio, a, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if a > 0 else tau_negative
    return -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))


def reinforce(new, old, advantages):
    return [-a * x for a, x in zip(advantages, new, strict=True)]


def gmpo(new, old, advantages):
    exponents = [min(d, 0.4) if a > 0 else max(d, -0.4) for a, d in zip(advantages, differences(new, old), strict=True)]
    return [-a * np.exp(mean_of(exponents)) for a in advantages]


def dppo(new, old, advantages):
    loss = []
    for a, x, y in zip(advantages, new, old, strict=True):
        moved = np.exp(x) - np.exp(y)
        dropped = moved > 0.2 if a > 0 else moved < -0.2
        loss.append((0 if dropped else -np.exp(x - y) * a) + 1e-3 * (x - y) ** 2)
    return loss


def vespo(new, old, advantages):
    log_w = clip(sum(clip(d, -20, 20) for d in differences(new, old)), np.log(1e-8), 20)
    constants = [(2, 3) if a >= 0 else (3, 2) for a in advantages]
    phi = [np.exp(lam + k * log_w - lam * np.exp(log_w)) for k, lam in constants]
    return [-f * a * x for f, a, x in zip(phi, advantages, new, strict=True)]


def of_surrogate(log_ratio, surrogate):
    def of_completion(new, old, advantages):
        return [surrogate(np.exp(d), a) for d, a in zip(log_ratio(new, old), advantages, strict=True)]

    return of_completion


# name -> function, loop, inputs of a random generator
LOOPS = {
    "group": of_groups(F.group_advantages, each(standardised)),
    "centered": of_groups(F.centered_advantages, each(centered)),
    "leave_one_out": of_groups(F.leave_one_out_advantages, each(leave_one_out)),
    "rank": of_groups(F.rank_advantages, each(by_rank)),
    "batch_std": of_groups(F.batch_std_advantages, batch_std),
    "opo": of_groups(lambda rewards, where: F.opo_advantages(rewards, lengths_of(rewards), where=where), each(opo)),
    "gpg": of_groups(F.gpg_advantages, gpg),
    "max_rl": of_groups(F.max_rl_advantages, each(max_rl)),
    "best_of_group": of_groups(F.best_of_group_advantages, each(best_of_group)),
    **{
        f"pass_at_{k}": of_groups(partial(F.pass_at_k_advantages, k=k), each(partial(pass_at, k))) for k in (1, 2, 3, 5)
    },
    "gdpo": (partial(F.gdpo_advantages, weights=GDPO_WEIGHTS), gdpo, draw_several),
    "turn": (lambda rewards, where: F.turn_advantages(rewards, where=where), turns, draw_turns),
    "span": (F.span_advantages, spans, draw_spans),
    "whiten": (F.whiten, whitened, lambda rng: (quarters(rng, *SHAPE), random_mask(rng, *SHAPE))),
    "reinforce_pp": (
        lambda rewards, penalty, mask: F.reinforce_pp_advantages(rewards, mask, token_penalty=penalty, gamma=0.5),
        reinforce_pp,
        lambda rng: (quarters(rng, SHAPE[0]), quarters(rng, *SHAPE), random_mask(rng, *SHAPE)),
    ),
    "reinforce_pp_baseline": (
        F.reinforce_pp_baseline_advantages,
        reinforce_pp_baseline,
        lambda rng: (quarters(rng, 2, 2), random_mask(rng, 2, 2, 6)),
    ),
}


SEEDS = range(12)


@cache
def results():
    """Returns what all functions compute for all seeds: one program."""
    drawn = {name: [draw(np.random.default_rng(seed)) for seed in SEEDS] for name, (_, _, draw) in LOOPS.items()}
    stacked = {name: [np.stack(x) for x in zip(*arrays, strict=True)] for name, arrays in drawn.items()}

    @jax.jit
    def of_all(stacked):
        return {name: jax.vmap(function)(*stacked[name]) for name, (function, _, _) in LOOPS.items()}

    return drawn, jax.device_get(of_all(stacked))


@pytest.mark.parametrize("name", LOOPS)
def test_equals_a_plain_loop(name):
    loop, (drawn, computed) = LOOPS[name][1], results()
    for seed, arrays, result in zip(SEEDS, drawn[name], computed[name], strict=True):
        assert_allclose(result, loop(*arrays), rtol=2e-4, atol=1e-5, err_msg=f"seed {seed}")
