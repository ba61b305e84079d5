"""What tests of the iteration share: folders of runs, a stop in their middle, equal runs, and recorded gradients."""

import dataclasses
import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder

LINES = ("metrics.jsonl", "rollouts.jsonl")


class Stop(Exception):
    """Ends a run."""


def stopping(function, call: int):
    """Returns the function, which raises `Stop` at its call of this number, from 0."""
    calls = itertools.count()

    def called(*args, **options):
        if next(calls) == call:
            raise Stop
        return function(*args, **options)

    return called


def open_run(path, config) -> RunFolder:
    return RunFolder(path, dataclasses.asdict(config))


def says_three(examples, completions):
    """Rewards the share of threes among three characters."""
    return [text.count("3") / 3 for text in completions]


def assert_same_files(one, other, names=LINES) -> None:
    """Asserts that two folders have the same bytes of lines."""
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_same_runs(one, other, names=LINES) -> None:
    """Asserts that two pairs of (state, run) have the same parameters and lines, to the bit."""
    assert params_sha256(one[0]) == params_sha256(other[0])
    assert_same_files(one[1].path, other[1].path, names)


def assert_close(one, other, **tolerances) -> None:
    """Asserts that all leaves are close, with the tolerances of `numpy.testing.assert_allclose`."""
    jax.tree.map(partial(np.testing.assert_allclose, **tolerances), one, other)


def rise_of(lines, name="reward", count=5) -> float:
    """Returns how much the mean of the last steps is above that of the first ones."""
    values = [line[name] for line in lines]
    return float(np.mean(values[-count:]) - np.mean(values[:count]))


def compilations_of(run) -> list[int]:
    """Returns how many programs were compiled, or read from the cache, by the end of each line of a run."""
    return [line["compilations"] + line["cache_reads"] for line in run.lines("times.jsonl")]


class Recorded(NamedTuple):
    """Gradients of the optimizer steps so far, each of which was taken."""

    count: jax.Array
    gradients: optax.Params  # [U, ...]


def recorder(updates: int, rate: float = 0.1, step=None) -> optax.GradientTransformation:
    """Returns plain descent that remembers every gradient.

    Args:
      updates: U, how many it has room for.
      rate: of the descent.
      step: (number of the update, gradients) -> the gradients that are stepped along instead.
    """

    def init(params):
        return Recorded(jnp.int32(0), jax.tree.map(lambda x: jnp.zeros((updates, *x.shape), x.dtype), params))

    def update(gradients, state, params=None):
        del params
        every = jax.tree.map(lambda all_, one: all_.at[state.count].set(one), state.gradients, gradients)
        along = gradients if step is None else step(state.count, gradients)
        return jax.tree.map(lambda x: -rate * x, along), Recorded(state.count + 1, every)

    return optax.GradientTransformation(init, update)
