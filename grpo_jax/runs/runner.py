"""The training loop of all methods: it restores, rewinds, shows progress, logs, evaluates, saves and stops.

The loop does not depend on what a step does. It reads the metrics of a step while the devices work on the next step.

A signal asks a run to stop. The run then ends its step, saves, and says how to continue. A scheduler sends SIGTERM
before it takes the machine away; Ctrl-C sends SIGINT. Outside of training there is nothing to save, and both signals
end the process at once, as does a second Ctrl-C. A thread receives the signals. Python's own handlers wait until the
main thread returns from C code, such as a compilation of minutes, and an exception from a handler is lost inside a
callback of C code, such as JAX's callback of the garbage collector.
"""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from grpo_jax import hosts
from grpo_jax.config import LoggingConfig
from grpo_jax.data.types import Skipped, StepLog
from grpo_jax.devices import Devices, place, shardings
from grpo_jax.errors import Interruption, UsageError
from grpo_jax.runs.checkpoint import best_step
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import cell

# ---- signals

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_asked: list[int] = []  # the signals received during training
_training: list[None] = []  # one entry for each block of `between_steps` that is open


class Stopped(Exception):
    """The exception of a run that a signal stopped, after it saved what it needs to resume."""

    def __init__(self, number: int) -> None:
        """Sets the number of the signal."""
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def between_steps() -> Iterator[Callable[[], bool]]:
    """Opens a block of training, which a signal stops between two steps.

    Yields:
      A function that returns True if the loop must save and leave the block. Each host calls it after every step, and
      the result is the same on all hosts.

    Raises:
      Stopped: At the end of the block, if a signal arrived.
    """
    _training.append(None)

    def asked() -> bool:
        heard = [number for number in hosts.gather("whether to stop", _asked[0] if _asked else 0) if number]
        if heard and not _asked:
            _asked.append(heard[0])
        return bool(heard)

    try:
        yield asked
    finally:
        _training.pop()
    if _asked:
        raise Stopped(_asked[0])


@contextmanager
def listening(say: Callable[[str], None], leave: Callable[[int], None]) -> Iterator[None]:
    """Opens a block that signals end: at once outside training, and after a save during training.

    Args:
      say: Tells the user that the run will stop.
      leave: (number of the signal) Ends the process.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    before = {number: signal.signal(number, _ignore) for number in _SIGNALS}
    known = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    thread = threading.Thread(target=_hear, args=(heard, say, leave), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(known)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        thread.join()
        os.close(heard)
        _asked.clear()


def _hear(heard: int, say: Callable[[str], None], leave: Callable[[int], None]) -> None:
    while number := int.from_bytes(os.read(heard, 1)):
        if number not in _SIGNALS:
            continue
        if not _training or (_asked and number == signal.SIGINT):
            leave(number)
        elif not _asked:
            _asked.append(number)
            say(f"{signal.Signals(number).name}: the run stops when this step is done and saved; Ctrl-C ends it now")


def _ignore(number: int, frame: object) -> None:
    """Does nothing, so that Python only writes the signal to the thread's pipe."""


def _forget() -> None:
    """Restores the usual effects of signals in a fork, which the run's handling does not concern."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.set_wakeup_fd(-1)
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)


os.register_at_fork(after_in_child=_forget)


# ---- the loop

S = TypeVar("S", bound=Any)  # a NamedTuple with a field `params`, such as `rl.types.TrainState`
Pending = Callable[[], StepLog]  # waits for the metrics of a step
OnLine = Callable[[int, dict[str, Any]], None]  # (step, its line of metrics.jsonl)


def run_steps(
    run: RunFolder,
    phase: str,
    steps: int,
    logging: LoggingConfig,
    *,
    initial_state: Callable[[], S],
    step: Callable[[S, int, Callable[[], None]], tuple[S, Pending]],
    devices: Devices,
    axes: Any = None,
    settle: Callable[[S], S] = lambda state: state,
    suspend: Callable[[S], S] = lambda state: state,
    start: Mapping[str, float] | None = None,
    evaluate: Callable[[S, int], dict[str, float]] | None = None,
    evaluates_end: bool = True,
    score: Callable[[Mapping[str, float]], float] = lambda numbers: next(iter(numbers.values()), math.nan),
    until: int | None = None,
    on_line: OnLine = lambda step, line: None,
) -> S:
    """Takes the steps of a phase, continuing from its newest checkpoint.

    Args:
      run: The folder of the run, which receives lines and checkpoints.
      phase: The name of the phase.
      steps: The number of steps of the phase in all.
      logging: The configuration of evaluations and checkpoints.
      initial_state: Makes the state before the first step. It may be traced only for its shapes.
      step: (state, number from 0, on_dispatch) -> the next state, and a function that waits for the line of the step.
        It calls `on_dispatch` once, after it has given work to the devices.
      devices: The devices of the state.
      axes: Says which arrays of the state are spread over devices, as in `devices.place`.
      settle: Waits until a state consists of arrays, before it is saved.
      suspend: Does the same after an Interruption, without waiting for what may never come.
      start: The numbers of step 0, if they are known. They are logged even if nothing else is evaluated.
      evaluate: (state, steps taken) -> numbers to log at step 0, every `eval_every` steps, and at the end.
      evaluates_end: Also evaluate the end if the last step is not a multiple of `eval_every`.
      score: (numbers of an evaluation) -> the score for `keep_best` and `patience`, of which more is better. Default:
        the first number.
      until: The step to stop at, from which a later call continues. None: the last step.
      on_line: Called on every host with each line of metrics.jsonl that this call writes.

    Returns:
      The final state.

    Raises:
      UsageError: The newest checkpoint is of a step after the last one.
      FloatingPointError: Gradients were not finite too many times in a row.
    """
    end = steps if until is None else until
    evaluate = evaluate if logging.eval_every else None
    every = logging.checkpoint_every or end  # the end is always saved
    with (
        between_steps() as asked_to_stop,
        run.present(),
        run.checkpoints(phase, keep=logging.keep_checkpoints, keep_best=logging.keep_best) as checkpoints,
    ):
        state, done = checkpoints.restore(initial_state, partial(shardings, devices=devices, axes=axes))
        if done > steps:
            raise UsageError(f"{phase} has taken {done} steps, and steps is {steps}: set steps to {done} or more")
        if done:
            run.say(f"{phase}: continues after step {done} of {steps}")
        state = place(state, devices, axes)

        def is_due(step: int) -> bool:
            return step % logging.eval_every == 0 or (step == end and evaluates_end)

        run.rewind(phase, done, checkpoints.lines)
        if evaluate and done and is_due(done) and done not in checkpoints.scores:
            missing = evaluate(state, done)
            run.amend(phase, done, missing)
            checkpoints.note_score(done, score(missing))
            run.rewind(phase, done)  # trackers and checksums need the amended line
        first = {} if done else dict(start or (evaluate(state, 0) if evaluate else {}))
        if first:
            on_line(0, run.log(phase, 0, first))
            name = next(iter(first))
            run.say(f"{phase}: step 0 of {steps}, {name} {cell(first, name)}")
            if evaluate:
                checkpoints.note_score(0, score(first))
        if is_stale(checkpoints.scores, logging.patience):  # it ended before its last step
            return state
        pending: Pending | None = None
        reached = saved = done  # steps taken by the state, and the step of the newest checkpoint
        profile = profiling(run.path / "profile", done, logging.profile_steps)
        with run.progress(phase, steps, done) as show, profile as profile_step:

            def read(evaluated: dict[str, float]) -> None:
                nonlocal pending
                if pending is not None:
                    line = pending()
                    if words := write_line(run, phase, reached, line, evaluated, on_line):
                        show(reached, words)
                pending = None

            try:
                for number in range(done, end):
                    profile_step(number)
                    state, pending = step(state, number, lambda: read({}))
                    reached, is_last = number + 1, number + 1 == end
                    evaluated: dict[str, float] = {}
                    if evaluate and is_due(reached):
                        with run.timed("evaluate"):
                            evaluated = evaluate(state, reached)
                    is_best = bool(evaluated) and checkpoints.note_score(reached, score(evaluated))
                    stop = asked_to_stop()
                    ends = is_stale(checkpoints.scores, logging.patience)
                    save = stop or is_last or ends or is_best or reached % every == 0
                    if evaluated or save:
                        read(evaluated)
                    if save:  # only after the lines that the checkpoint covers
                        state = settle(state)
                        checkpoints.save(state, reached)
                        saved = reached
                    if ends:
                        run.say(f"{phase}: ends at step {reached}, {logging.patience} evaluations after its best score")
                    if stop or ends:
                        break
            except Interruption:  # raised while a step or an evaluation samples, so the state is unchanged
                read({})
                if reached > saved and hosts.count() == 1:  # the others do not know of it
                    checkpoints.save(suspend(state), reached)
                raise
    return state


def is_stale(scores: Mapping[int, float], patience: int) -> bool:
    """Returns whether as many evaluations followed the best score as a run has patience; 0: never."""
    return patience > 0 and len(scores) > 0 and sum(step > best_step(scores) for step in scores) >= patience


def write_line(
    run: RunFolder,
    phase: str,
    step: int,
    line: StepLog,
    evaluated: dict[str, float],
    on_line: OnLine = lambda step, line: None,
) -> str:
    """Writes the metrics, rollouts, times and warnings of a step.

    Args:
      run: The folder of the run.
      phase: The name of the phase.
      step: The number of the step, from 1.
      line: The metrics, rollouts, times and warnings.
      evaluated: The numbers of an evaluation after the step.
      on_line: Called with the metrics as written.

    Returns:
      The words that describe the step in the progress, with the sampled tokens per second; "" for none.

    Raises:
      FloatingPointError: Gradients were not finite too many times in a row.
    """
    run.warn(line.warnings)
    if line.metrics or evaluated:
        on_line(step, run.log(phase, step, {**line.metrics, **evaluated}))  # `_keep_skipped` may stop the run
    if line.skipped is not None:
        _keep_skipped(run, line.skipped)
    run.log_rollout(phase, step, list(line.groups))
    times = {} if line.times is None else run.log_times(phase, step, **line.times)
    # Sampling overlaps with other work of the step, but not with its evaluation.
    tokens, seconds = times.get("rollout_tokens"), (times.get("step_s") or 0) - (times.get("evaluate_s") or 0)
    return line.words + (f", {tokens / seconds:,.0f} tokens/s" if line.words and tokens and seconds else "")


def _keep_skipped(run: RunFolder, skipped: Skipped) -> None:
    """Writes the batch of a skipped step to a file, and stops the run after too many in a row."""
    file = run.path / f"skipped_{skipped.name}.npz"
    leaves = jax.tree_util.tree_leaves_with_path(dict(skipped.arrays()))
    arrays: Any = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}
    if run.writes:
        np.savez_compressed(file, **arrays)
    run.warn_once("skipped", f"gradients of {skipped.name} are not finite: the step is skipped, its batch is in {file}")
    if skipped.in_a_row >= skipped.most:
        raise FloatingPointError(
            f"gradients were not finite {skipped.most} times in a row: lower the learning rate, or look at {file}"
        )


# ---- profiles: traces of devices and host during some steps

# The first iteration compiles programs, and the second may read the pending metrics of the first.
_UNPROFILED = 2


@contextmanager
def profiling(folder: Path, begin: int, steps: int) -> Iterator[Callable[[int], None]]:
    """Records some steps of a loop with JAX's profiler.

    `plugins/profile/…/perfetto_trace.json.gz` in the folder opens in ui.perfetto.dev, the other files in XProf.

    Args:
      folder: The folder for the profile. Earlier profiles in it are kept.
      begin: The first step of the loop, counted from 0. Recording begins two steps later.
      steps: The number of steps to record; 0: none.

    Yields:
      A function of the step, to be called when each step begins.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would dominate the profile
    with ExitStack() as recording:

        def at_step(step: int) -> None:
            if steps and step == begin + _UNPROFILED:
                recording.enter_context(
                    jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options)
                )
            elif step == begin + _UNPROFILED + steps:
                recording.close()

        yield at_step
