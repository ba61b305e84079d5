"""Metrics of a rollout, as pure functions of what it earned."""

from typing import Any

import numpy as np

from grpo_jax.rl.types import Graded


@np.errstate(invalid="ignore", over="ignore")  # the run warns about an infinite reward
def rollout_metrics(graded: Graded) -> dict[str, Any]:
    """Returns metrics of a rollout, as plain numbers.

    `distinct_share` is the share of completions of a group that differ. Lengths are in tokens, the ending one included.
    `length_above` is the mean length of completions with more reward than the mean of their group (the solved ones if
    rewards are 0 and 1), `length_below` of those with less.
    """
    lengths, components = graded.lengths, graded.components
    if graded.episodes:
        from grpo_jax.rl.episodes import episode_metrics
    counts = np.maximum(graded.applicable.sum(-1, keepdims=True), 1)
    group_mean = np.where(graded.applicable, graded.rewards, 0).sum(-1, keepdims=True) / counts
    # The mean of equal rewards may be off by rounding.
    counted = graded.applicable & has_spread(graded)[:, None]
    above = np.where(counted, graded.rewards - group_mean, 0)
    moments = {"reward": graded.rewards[graded.applicable]}
    if len(components) > 1:
        moments |= {f"reward_{name}": values[~np.isnan(values)] for name, values in components.items()}
    num_parts = [len(parts) for parts in graded.parts.ravel()]
    return {
        **{name: _mean(values) for name, values in moments.items()},
        **{f"{name}_std": float(values.std()) if values.size else None for name, values in moments.items()},
        "not_applicable_share": float(1 - graded.applicable.mean()),
        "zero_spread_share": float((~has_spread(graded)).mean()),
        "distinct_share": float(graded.distinct.mean()),
        "length_mean": float(lengths.mean()),
        "length_min": int(lengths.min()),
        "length_max": int(lengths.max()),
        "length_above": _mean(lengths[above > 0]),
        "length_below": _mean(lengths[above < 0]),
        "truncated_share": float(graded.truncated.mean()),
        "tokens": int(lengths.sum()),
        **({"spans_mean": float(np.mean(num_parts))} if any(num_parts) and not graded.episodes else {}),
        **(episode_metrics(graded.episodes) if graded.episodes else {}),
    }


def has_spread(graded: Graded | None, metric: str = "") -> np.ndarray:
    """Returns whether the rewards of a group that apply differ, bool `[N]`: a group without spread teaches nothing.

    Args:
      graded: N groups.
      metric: the component to look at; "": the weighted sum.
    """
    assert graded is not None
    values = graded.components[metric] if metric else graded.rewards
    applicable = ~np.isnan(values) if metric else graded.applicable
    highest = np.where(applicable, values, -np.inf).max(-1)
    lowest = np.where(applicable, values, np.inf).min(-1)
    # A group without any reward teaches nothing either, and no step can use one with NaN or infinity.
    return (highest > lowest) & np.isfinite(highest) & np.isfinite(lowest)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
