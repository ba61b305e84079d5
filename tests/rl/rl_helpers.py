"""Helpers for tests of the iteration: folders of runs, interruptions, comparisons of runs, batches, and one update."""

import dataclasses
import itertools
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from bigrams import POLICY, TASK
from tiny import recorder

from grpo_jax.config import recipe
from grpo_jax.data.preferences import EncodedPairs
from grpo_jax.devices import devices_of, place, to_devices, to_numpy
from grpo_jax.models.params.tree import split
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.offline import phase
from grpo_jax.offline.phase import FitObjective, SupervisedConfig, make_fit_programs
from grpo_jax.rl import update
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.rl.types import REWARD_AXES, RewardArrays
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch, TrainState

LINES = ("metrics.jsonl", "rollouts.jsonl")
# The configuration of a run on bigrams, whose programs many tests share.
RUN = recipe(
    steps=6, num_prompts=8, group_size=4, max_tokens=3, learning_rate=5e-2, checkpoint_every=2, rollouts_every=1
)


@cache
def run_programs() -> Programs:
    return make_programs(POLICY, TASK, RUN)


class Stop(Exception):
    """The exception that interrupts a run."""


def stopping(function, call: int):
    """Wraps a function so that it raises `Stop` at the call with this number, from 0."""
    calls = itertools.count()

    def called(*args, **options):
        if next(calls) == call:
            raise Stop
        return function(*args, **options)

    return called


def open_run(path, config) -> RunFolder:
    return RunFolder(path, dataclasses.asdict(config))


def assert_same_files(one, other, names=LINES) -> None:
    """Asserts that these files have the same bytes in two folders."""
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def assert_same_runs(one, other, names=LINES) -> None:
    """Asserts that two pairs of (state, run) have bitwise equal parameters and lines."""
    assert params_sha256(one[0]) == params_sha256(other[0])
    assert_same_files(one[1].path, other[1].path, names)


def assert_close(one, other, **tolerances) -> None:
    """Asserts that all leaves are close, with the tolerances of `numpy.testing.assert_allclose`."""
    jax.tree.map(partial(np.testing.assert_allclose, **tolerances), one, other)


def assert_same_gradient(one, other, tolerance=1e-6) -> None:
    """Asserts ‖Δ‖ ≤ tolerance · ‖g‖ for each leaf, and that no leaf is zero."""
    for x, y in zip(*map(jax.tree.leaves, jax.device_get((one, other))), strict=True):
        assert 0 < np.linalg.norm(x) < np.inf
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(x)


def assert_same_means(one, other) -> None:
    """Asserts that two logs have the same sums and weights by name."""
    assert one.keys() == other.keys()
    for name, pair in one.items():
        np.testing.assert_allclose(other[name], pair, rtol=2e-5, atol=2e-6, err_msg=name)


def recording(programs: Programs, seen: list) -> Programs:
    """Wraps the programs so that each step appends (batch, rewards, advantages) to a list, in NumPy."""

    def learn(state, frozen, batch, rewards, seed_and_step):
        before = to_numpy((batch, rewards))
        state, learned = programs.learn(state, frozen, batch, rewards, seed_and_step)
        seen.append((*before, to_numpy(learned.advantages)))
        return state, learned

    return programs._replace(learn=learn)


def rise_of(lines, name="reward", count=5) -> float:
    """Returns the mean over the last steps minus the mean over the first steps."""
    values = [line[name] for line in lines]
    return float(np.mean(values[-count:]) - np.mean(values[:count]))


def compilations_of(run) -> list[int]:
    """Returns the number of programs compiled or read from the cache, up to each line of a run."""
    return [line["compilations"] + line["cache_reads"] for line in run.lines("times.jsonl")]


# ---- batches, and one iteration on them


def loss_of(method):
    """Returns the loss of a method, a function of (models by role, batch with weights)."""
    return partial(update.loss_of, method, (None, {}))


def ragged_batch(shape, vocab_size, *, prompt_lengths=None, lengths=None, shortest=0) -> Batch:
    """Returns a batch in NumPy, with noise in every field that a loss reads.

    Args:
      shape: The sizes N, G, P, T.
      vocab_size: The vocabulary size; ids are uniform below it.
      prompt_lengths: The lengths of prompts, int `[N]`; None: random from 1 on.
      lengths: The lengths of completions, int `[N, G]`; None: random from `shortest` on.
      shortest: The least number of tokens in a completion.
    """
    noise, (n, g, p, t) = np.random.default_rng(0), shape
    prompt_lengths = noise.integers(1, p + 1, n) if prompt_lengths is None else np.asarray(prompt_lengths)
    lengths = noise.integers(shortest, t + 1, (n, g)) if lengths is None else np.asarray(lengths)

    def numbers(*axes, low=-3.0, high=-1.0):
        return noise.uniform(low, high, (n, g, *axes)).astype(np.float32)

    return Batch(
        PromptTokens(
            noise.integers(0, vocab_size, (n, p)).astype(np.int32), np.arange(p) >= p - prompt_lengths[:, None]
        ),
        noise.integers(0, vocab_size, (n, g, t)).astype(np.int32),
        np.arange(t) < lengths[..., None],
        numbers(low=0.8, high=1.2),
        sampler_logprobs=numbers(t),
        truncated=noise.random((n, g)) < 0.3,
        old_logprobs=numbers(t),
        ref_logprobs=numbers(t),
        old_entropy=numbers(t, low=0.5, high=2.0),
        old_values=numbers(t, low=-1.5, high=1.5),
        end_values=numbers(1, low=-1.5, high=1.5),
        advantages=numbers(low=-1.5, high=1.5),
    )


def ragged_rewards(num_prompts, group_size, components=0) -> RewardArrays:
    """Returns rewards in NumPy, with components if their number is above 0. A few rewards do not apply."""
    noise, shape = np.random.default_rng(1), (num_prompts, group_size)
    rewards = RewardArrays(noise.normal(size=shape).astype(np.float32), noise.random(shape) < 0.9)
    if not components:
        return rewards
    parts = noise.normal(size=(*shape, components)).astype(np.float32)
    parts[~rewards.applicable] = np.nan
    return rewards._replace(components=parts, weights=np.linspace(0.5, 1, components, dtype=np.float32))


def some_pairs(number, vocab_size) -> EncodedPairs:
    """Returns pairs, each a prompt of at most 3 tokens and two answers of at most 4 tokens."""
    noise = np.random.default_rng(0)

    def text(longest):
        return noise.integers(2, vocab_size, noise.integers(1, longest + 1)).tolist()

    texts = [(text(3), text(4), text(4)) for _ in range(number)]
    return EncodedPairs([a for a, _, _ in texts], [(b, c) for _, b, c in texts], [0.0] * number)


def near(policy, params, batch: Batch, scale=0.3) -> Batch:
    """Returns the batch with the entropies of a policy, and log-probabilities near those of the policy."""
    scores = jax.device_get(jax.jit(partial(score_completion_tokens, policy))(params, batch))
    noise = np.random.default_rng(1)
    names = "sampler_logprobs", "old_logprobs", "ref_logprobs"
    fields = {x: scores.logprobs + noise.normal(0, scale, scores.logprobs.shape).astype(np.float32) for x in names}
    return batch._replace(**fields, old_entropy=scores.entropy)


def phase_step(objective: FitObjective, start, batch, config: SupervisedConfig):
    """Returns the gradients of one step of a phase on its devices, `[1, ...]`, and its metrics, in NumPy."""
    devices = devices_of(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phase, "optimizer_of", lambda *_: recorder(1))
        initial_state, train_step = make_fit_programs(objective, config)
    trained, frozen = (place(part, devices) for part in split(start))
    state = place(initial_state(trained), devices)
    state, metrics = train_step(state, to_devices(batch, devices), frozen)
    return to_numpy((state.opt_state.gradients, metrics))


class Placed(NamedTuple):
    """The arguments of programs, on their devices."""

    state: TrainState
    frozen: Any
    batch: Batch
    rewards: RewardArrays
    seed_and_step: Any  # seed and step

    def scored(self, programs: Programs, reference=None) -> "Placed":
        frozen = self.frozen if reference is None else self.frozen | {"reference": reference}
        batch = programs.score(self.state.params, self.state.extras, frozen, self.batch)
        return self._replace(batch=batch)

    def learned(self, programs: Programs):
        """Returns the state after the update, and the update's other results, in NumPy."""
        return to_numpy(programs.learn(self.state, self.frozen, self.batch, self.rewards, self.seed_and_step))


def placed(programs: Programs, start, batch: Batch, rewards: RewardArrays, seed_and_step=(3, 5)) -> Placed:
    """Puts the initial parameters of a run and a batch onto the devices of its programs."""
    devices = programs.sampler.devices
    trained, frozen = split(place(start, devices))
    return Placed(
        place(programs.initial_state(trained), devices),
        frozen,
        to_devices(batch, devices),
        to_devices(rewards, devices, axes=REWARD_AXES),
        to_devices(np.array(seed_and_step, np.uint32), devices, axes=None),
    )
