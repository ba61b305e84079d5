"""Sampling alongside training: threads sample rollouts for later steps while the trainer grades and learns.

The version of a rollout follows from its number, never from which parameters happen to be the newest. So a run does not
depend on how long anything takes. A checkpoint waits for the rollouts of the queue. An error that ends the run does
not: the journal then keeps the completions that have ended, and the policies that must sample the others.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from grpo_jax.config import SamplingConfig
from grpo_jax.devices import to_devices, to_numpy
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.tree import join, split
from grpo_jax.rl.source import Sampler, Source, Start, empty_batch
from grpo_jax.rl.types import Rollout, Timed
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task

WAIT = "wait"  # the name of the time for which the trainer waits for a rollout
_END_SECONDS = 30.0  # the longest wait for threads that were cancelled


class Journal(NamedTuple):
    """Keeps what a run that is killed would have to sample again. It belongs to a phase of a run."""

    # (digest of the parameters, digest of the request) -> ids and log-probabilities; None: they are not there
    find: Callable[[str, str], tuple[list[int], list[float]] | None]
    # (lines, with these digests as "version" and "request") -> None. None: nothing is kept
    keep: Callable[[Sequence[dict[str, Any]]], None] | None
    keep_policy: Callable[[int, Params], None]  # (step, trained parameters before the step) -> None
    policy: Callable[[int, Params], Params]  # (step, parameters of the same shapes) -> trained parameters
    turn_page: Callable[[], None] = lambda: None  # drops what the last checkpoint covers, before the next is written
    clear: Callable[[], None] = lambda: None  # deletes the journal, once the last checkpoint has been written


NO_JOURNAL = Journal(lambda version, request: None, None, lambda step, params: None, lambda step, like: like)


@dataclass(eq=False)
class Pending:
    """A rollout that a thread samples."""

    index: int
    policy: Params  # as `Sampler.take` returns it
    batch: "Future[Batch]"

    @property
    def is_there(self) -> bool:
        """True if the rollout has been sampled."""
        return self.batch.done() and not self.batch.cancelled() and self.batch.exception() is None


Queue = tuple[Batch | Pending, ...]


def sampled_beside(
    start: Start, sampler: Sampler, task: Task, sampling: SamplingConfig, *, timed: Timed, journal: Journal
) -> Source:
    """Returns the source of `sampled_ahead` for a sampler that waits: threads sample the rollouts of its queue.

    Args:
      start: Begins a rollout, as returned by `make_start`.
      sampler: Samples completions.
      task: Supplies the prompts.
      sampling: The sampling options of the run.
      timed: Adds the seconds of a block to the time of the named part of the iteration.
      journal: Keeps the policies of rollouts that are missing when an error ends the run.
    """
    staleness, nothing = sampling.staleness, empty_batch(task, sampling)
    pool = ThreadPoolExecutor(sampler.at_once)
    begun: list[Pending] = []
    is_new = True  # this process has not sampled yet

    def begin(policy: Params, index: int) -> Pending:
        policy = sampler.take(policy)
        sample = start(policy, index)

        def work() -> Batch:
            jax.block_until_ready(policy)
            with timed("rollout"):
                batch: Batch = jax.block_until_ready(sample().batch)
            return batch

        pending = Pending(index, policy, pool.submit(work))
        begun[:] = [*(each for each in begun if not each.batch.done()), pending]
        return pending

    def version_of(index: int) -> int:
        return max(0, index - staleness)

    def begin_missing(queue: Queue, policy: Params, step: int) -> Queue:
        """Begins the rollouts of the queue that nobody has sampled: at the start all, and later after an error."""
        trained, frozen = split({"policy": policy})

        def begin_with_version(index: int) -> Pending:
            version = version_of(index)
            old = trained if version == step else journal.policy(version, trained)
            return begin(join(old, frozen)["policy"], index)

        places = enumerate(queue, start=step)
        return tuple(x if has_completions(x) else begin_with_version(index) for index, x in places)

    def sample(queue: Queue, policy: Params, step: int, on_dispatch: Callable[[], None]) -> tuple[Queue, Rollout]:
        nonlocal is_new
        if is_new:
            queue, is_new = begin_missing(queue, policy, step), False
        oldest, *others = (*queue, begin(policy, step + staleness))
        on_dispatch()
        with timed(WAIT):
            batch = settled(oldest)
        return tuple(others), Rollout(task.prompts(step), batch, is_fresh=False)

    def close() -> None:
        pool.shutdown(wait=False, cancel_futures=True)
        ends = time.monotonic() + _END_SECONDS
        while (left := [each.batch for each in begun if not each.batch.done()]) and time.monotonic() < ends:
            sampler.cancel()
            wait(left, timeout=0.1)

    def suspend(queue: Queue) -> tuple[Batch, ...]:
        close()
        for missing in (x for x in queue if isinstance(x, Pending) and not x.is_there):
            journal.keep_policy(version_of(missing.index), split({"policy": missing.policy})[0])
        empty = to_devices(nothing, sampler.devices)
        return tuple(empty if isinstance(x, Pending) and not x.is_there else settled(x) for x in queue)

    return Source(sample, lambda: (nothing,) * staleness, lambda queue: tuple(map(settled, queue)), suspend, close)


def with_one_thread(task: Task) -> Task:
    """Returns the task with an environment whose calls are all in one thread, whichever thread samples.

    A function of the user may not expect several threads, and async functions share clients that belong to the loop of
    their thread.
    """
    if task.environment is None:
        return task
    pool, ask = ThreadPoolExecutor(1), task.environment.ask
    return task._replace(environment=task.environment._replace(ask=lambda *args: pool.submit(ask, *args).result()))


def settled(rollout: Batch | Pending) -> Batch:
    """Waits for a rollout of the queue."""
    return rollout.batch.result() if isinstance(rollout, Pending) else rollout


def has_completions(rollout: Batch | Pending) -> bool:
    """Returns whether a rollout of the queue has been sampled, or is being sampled."""
    return isinstance(rollout, Pending) or bool(to_numpy(rollout.completion_mask).any())
