"""The loop of methods that learn from rollouts, read from top to bottom.

An iteration is three programs: `sample`, `score`, `learn`. The host is needed between the first and the last, for
prompts, text and rewards. It hands work to the devices as early as it can, and it reads an iteration's numbers while
the devices sample the next one.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import hosts
from grpo_jax.config import GRPOConfig, LoggingConfig, MeshConfig, options_of
from grpo_jax.data.types import Prompts, Reward, Rewards
from grpo_jax.devices import (
    compiled,
    data_parallel,
    devices_of,
    own_rows,
    place,
    rows_of_hosts,
    shardings,
    size,
    take_bytes_moved,
    to_devices,
    to_host,
)
from grpo_jax.errors import Interruption, UsageError
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.rewards.reward import graders, new_counts, no_reward, ungraded_counts
from grpo_jax.rl import guards, learn
from grpo_jax.rl.dynamic_sampling import Sampled, sample_with_spread
from grpo_jax.rl.episodes import measured
from grpo_jax.rl.learn import LEARNED_AXES, SAMPLING, Learned, Method, Scored
from grpo_jax.rl.readable import readable
from grpo_jax.rl.rollout import (
    Outcomes,
    Sampler,
    completion_numbers,
    decode_groups,
    grade,
    group_temperatures,
    make_sampler,
    noise_of,
    outcomes_of_hosts,
    own_groups,
    read_completions,
    reward_arrays,
    rollout_metrics,
    shares_a_function,
    take_prompts,
    zero_spread,
)
from grpo_jax.rl.scoring import score_completion_tokens
from grpo_jax.rl.state import REWARD_AXES, Array, Batch, RewardArrays, TrainState
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.profiling import profiling
from grpo_jax.runs.stopping import between_steps
from grpo_jax.runs.throughput import peak_flops, update_flops
from grpo_jax.sampling.sampler import Completions
from grpo_jax.tasks.task import Task, inputs_of

# Options that the host alone reads, so that programs do not depend on them. Devices are those of the sampler.
_OF_HOST = {"seed", "max_rollouts", "filter_metric", "max_skipped"} | options_of(LoggingConfig()).keys()
_OF_HOST |= {"devices"} | options_of(MeshConfig()).keys()


class Programs(NamedTuple):
    """The functions of a method and a run, compiled at their first call. Phases that differ in the reward alone share
    them."""

    method: Method
    sampler: Sampler
    # (trained parameters, frozen ones, the reference's or None, batch) -> scores; None: the update needs none
    score: Callable[[Params, Any, Params | None, Batch], Scored] | None
    # (state, frozen parameters, the reference's if the loss runs it or None, scored batch, rewards, uint32 [2] of seed
    # and step) -> state, what to log. The state is donated
    learn: Callable[[TrainState, Any, Params | None, Batch, RewardArrays, Array], tuple[TrainState, Learned]]
    # trained parameters -> the first state, a copy
    init_state: Callable[[Params], TrainState]
    config: GRPOConfig  # that they compute


def compile_programs(
    method: Method, policy: Policy, task: Task, config: GRPOConfig, *, sampler: Sampler | None = None
) -> Programs:
    """The functions of a method, compiled at their first call.

    Args:
      method: of the run.
      policy: the model's functions.
      task: its tokens.
      config: the run, checked.
      sampler: another engine, on the run's devices; None: the policy's own.
    """
    sampler = sampler or make_sampler(
        policy, task, config.sampling, devices=devices_of(config), replays=learn.needs_replay(config)
    )

    def reference_logprobs(params: Params, batch: Batch) -> jax.Array:
        return score_completion_tokens(policy, params, batch).logprobs

    def score(trained, frozen, reference, batch, *, axis_name):
        del axis_name  # completions do not depend on each other
        return learn.score(method, reference_logprobs, config, trained, frozen, reference, batch)

    def update(state, frozen, reference, batch, rewards, clock, *, axis_name):
        return learn.learn(
            method, config, state, frozen, reference, batch, rewards, (clock[0], clock[1]), axis_name=axis_name
        )

    over_devices = partial(data_parallel, devices=sampler.devices)
    return Programs(
        method,
        sampler,
        over_devices(score, (None, None, None, 0), 0) if any(learn.needed(method, config)) else None,
        over_devices(update, (None, None, None, 0, REWARD_AXES, None), (None, LEARNED_AXES), donate_argnums=(0,)),
        compiled(lambda trained: learn.begin(method, jax.tree.map(jnp.copy, trained), config), devices=sampler.devices),
        config,
    )


class Phase(NamedTuple):
    """What the iterations of a phase have in common."""

    name: str
    programs: Programs
    task: Task
    reward: Reward | Rewards
    config: GRPOConfig
    run: RunFolder
    begin: int  # the first step of this call
    end: int  # the step after its last one
    start: Params  # trained parameters at the start
    frozen: Any  # parameters that are not trained
    first: Params  # those of the policy at the start
    numbers: Array  # int32 [N, G], of completions, on the devices
    temperature: Array  # float32 [N, G], on the devices
    update_flops: float  # of an update, a token


Draw = tuple[Prompts, Batch, Completions]  # of a step, on the devices


class Iteration(NamedTuple):
    """An iteration that was handed to the devices, and whose numbers are still to be read."""

    step: int  # from 0
    rollout: Outcomes  # of what was learned from
    batch: Batch
    learned: Learned
    sampled: dict[str, Any]  # metrics of the rollout


def train(
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    *,
    phase: str,
    reward: Reward | Rewards | None = None,
    evaluate: Callable[[Params, int], dict[str, float]] | None = None,
    until: int | None = None,
) -> TrainState:
    """Trains by the programs of a method, continuing from the newest checkpoint of this phase in the run.

    Args:
      params: where training starts, as `programs.method` splits them; also the reference, when there is one.
      task: prompts and text.
      config: the run.
      run: where lines and checkpoints go.
      programs: of the method; phases that differ in the reward alone may share them.
      phase: names lines and checkpoints.
      reward: in place of the task's, and of what its environment gives, unless it has one of the task's as a part.
      evaluate: (params of the policy, step) -> numbers to log, called at step 0, every `eval_every` steps, and at the
        end.
      until: the step to stop at. A later call goes on from there, perhaps with another reward. None: the last step.

    Returns:
      The final state.

    Raises:
      UsageError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    check_programs(programs, config)
    method, end, logging = programs.method, config.steps if until is None else until, config.logging
    common = start_phase(phase, params, task, reward or task.reward, run, programs, config)
    devices, start = programs.sampler.devices, common.start
    every, minutes = logging.checkpoint_every, logging.save_every_minutes
    kept = run.checkpoints(phase, keep=logging.keep_checkpoints, every=every, minutes=minutes)
    with between_steps() as asked_to_stop, kept as checkpoints:
        state, done = checkpoints.restore(lambda: programs.init_state(start), partial(shardings, devices=devices))
        state = place(state, devices)
        common = common._replace(begin=done, end=end)
        run.rewind(phase, done, checkpoints.lines)
        if evaluate and logging.eval_every and done == 0:
            run.log(phase, 0, evaluate(common.first, 0))
        unread: Iteration | None = None
        drawn: Draw | None = None
        reached = saved = done  # steps that the state has taken, and that of the newest checkpoint
        profile = profiling(run.path / "profile", done, logging.profile_steps)
        with run.progress(phase, config.steps, done) as show, profile as profile_step:
            try:
                for step in range(done, end):
                    profile_step(step)
                    first, drawn = start_draws(common, state, step, drawn)
                    read(common, unread, show)
                    unread = None
                    state, unread = iterate(common, state, step, first)
                    reached, is_last = step + 1, step + 1 == end
                    evaluated: dict[str, float] = {}
                    if evaluate and logging.eval_every and (reached % logging.eval_every == 0 or is_last):
                        with run.timed("evaluate"):
                            evaluated = evaluate(method.actor(state.params, common.frozen), reached)
                    stop = asked_to_stop()
                    save = stop or is_last or checkpoints.is_due(reached)
                    if evaluated or save:
                        read(common, unread, show, evaluated)
                        unread = None
                    if save:  # after the lines that it covers
                        checkpoints.save(state, reached)
                        saved = reached
                    if stop:
                        break
            except Interruption:  # raised by draws, which leave the state as it was
                read(common, unread, show)
                if reached > saved:
                    checkpoints.save(state, reached)
                raise
    return state


def start_phase(
    name: str,
    params: Params,
    task: Task,
    reward: Reward | Rewards,
    run: RunFolder,
    programs: Programs,
    config: GRPOConfig,
) -> Phase:
    """What the iterations of a phase have in common, on the devices. `train` says what the arguments are."""
    take_bytes_moved()  # what others moved counts in no line
    for note in task.notes:
        run.warn_once(note, note)
    run.keep_inputs(name, inputs_of(task))
    devices = programs.sampler.devices
    start, frozen = programs.method.split(place(params, devices))
    return Phase(
        name=name,
        programs=programs,
        task=task,
        reward=reward if config.distillation.reward_coef else no_reward,
        config=config,
        run=run,
        begin=0,
        end=config.steps,
        start=start,
        frozen=frozen,
        first=programs.method.actor(start, frozen),
        numbers=to_devices(completion_numbers(config.sampling), devices),
        temperature=to_devices(group_temperatures(config.sampling), devices),
        update_flops=update_flops(start, programs.method.updated(frozen), 1),
    )


def start_draws(phase: Phase, state: TrainState, step: int, drawn: Draw | None) -> tuple[Draw, Draw | None]:
    """Samples a group of completions for each prompt of an iteration.

    Args:
      phase: of the iteration.
      state: before it.
      step: its number, from 0.
      drawn: what was returned for it before; None: nothing was.

    Returns:
      The first draw of the iteration; and that of the next one, if its policy is known already.
    """
    method, frozen = phase.programs.method, phase.frozen
    with phase.run.timed("rollout"):
        first = start_draw(phase, learn.sampling_policy(method, state, frozen), step, 0) if drawn is None else drawn
        following = None
        # The devices sample it while graders work on this one.
        if phase.config.sampling.staleness and step + 1 < phase.end:
            following = start_draw(phase, learn.sampling_policy(method, state, frozen, ahead=1), step + 1, 0)
    return first, following


def iterate(phase: Phase, state: TrainState, step: int, first: Draw) -> tuple[TrainState, Iteration]:
    """Hands one iteration to the devices. Its numbers are read later.

    Args:
      phase: of the iteration.
      state: before it; donated.
      step: its number, from 0.
      first: its first draw.

    Returns:
      The state after it, and what is to be read of it.
    """
    programs, config, run = phase.programs, phase.config, phase.run
    method, objective = programs.method, config.loss.objective
    policy = learn.sampling_policy(method, state, phase.frozen)
    reference = phase.first if state.reference is None else method.actor(state.reference, phase.frozen)

    # ---- score: while graders work, where no groups are dropped for their rewards
    def scored(batch: Batch) -> Batch:
        found = Scored()
        if programs.score is not None:
            found = programs.score(state.params, phase.frozen, reference if objective.has_reference else None, batch)
        if learn.needs_replay(config):
            assert programs.sampler.replay
            replayed = programs.sampler.replay(method.actor(state.params, phase.frozen), batch)
            found = found._replace(old_logprobs=replayed)
        return learn.with_scores(batch, found, config)

    # ---- rewards: completions to text to numbers
    one_draw = config.sampling.max_rollouts == 1

    devices = programs.sampler.devices
    own = rows_of_hosts(devices, config.sampling.num_prompts)[hosts.index()]

    def draw(number: int) -> tuple[Outcomes, Batch]:
        prompts, batch, completions = first if number == 0 else start_draw(phase, policy, step, number)
        with run.timed("rollout"):
            sampled = read_completions(completions)
        batch = scored(batch) if one_draw else batch
        with run.timed("reward"):
            graded = grade(take_prompts(prompts, own), sampled, phase.task, phase.reward)
            return outcomes_of_hosts(graded, prompts, devices), batch

    found, metrics = sample_groups_of_step(phase, draw, step)
    batch = found.batch if one_draw else scored(found.batch)

    # ---- learn: advantages, then every prompt once an epoch, in shuffled minibatches
    with run.timed("update"):
        rewards = reward_arrays(
            found.rollout,
            config.loss.advantages_of,
            batch.completion_ids.shape[-1],
            environment_counts=shares_a_function(phase.reward, phase.task.reward),
        )
        loss_reference = phase.first if config.loss.divergence != "preset" and state.reference is None else None
        clock = to_devices(np.array([config.seed, step], np.uint32), devices, axes=None)
        state, learned = programs.learn(
            state, phase.frozen, loss_reference, batch, to_devices(rewards, devices, axes=REWARD_AXES), clock
        )
    return state, Iteration(step, found.rollout, batch, learned, metrics)


def start_draw(phase: Phase, policy: Params, step: int, number: int) -> Draw:
    """Starts to sample the groups of a draw of a step, and does not wait."""
    config = phase.config
    # The first draw of each step is that of a run without further ones, so that every epoch has all its prompts. The
    # others are further on in the same order.
    index = step if number == 0 else config.steps + step * (config.sampling.max_rollouts - 1) + number - 1
    prompts = phase.task.prompts(index)
    if len(prompts.examples) != config.sampling.num_prompts:
        raise UsageError(
            f"the task gave {len(prompts.examples)} prompts for {config.sampling.num_prompts}: set its num_prompts"
        )
    noise = noise_of(config.seed, SAMPLING, index)
    batch, completions = phase.programs.sampler.sample(policy, prompts, phase.numbers, phase.temperature, noise)
    return prompts, batch, completions


def sample_groups_of_step(
    phase: Phase, draw: Callable[[int], tuple[Outcomes, Batch]], step: int
) -> tuple[Sampled, dict[str, Any]]:
    """The groups that a step learns from, and metrics of all that it sampled for them."""
    run, sampling, reward = phase.run, phase.config.sampling, phase.reward
    # In place of the task's rewards there may be one that is a single number.
    metric = sampling.filter_metric if isinstance(reward, Mapping) else ""
    ungraded = ungraded_counts(reward)
    sampled = sample_with_spread(
        draw, max_rollouts=sampling.max_rollouts, metric=metric, devices=phase.programs.sampler.devices
    )
    counts = counts_of_hosts(reward, new_counts(ungraded, ungraded_counts(reward)))
    metrics = rollout_metrics(sampled.everything) | counts
    if sampled.everything.episodes is not None:
        metrics |= measured(decode_groups(sampled.everything.episodes, phase.task), phase.task)
    graded = phase.config.distillation.reward_coef > 0
    guards.check_rollout(run, sampled.everything, phase.task, step + 1, graded=graded)
    guards.check_episodes(run, sampled.everything, phase.task, is_first=step == phase.begin)
    guards.check_graders(run, reward)
    if step == 0:  # a resumed run goes on as the whole one did
        guards.check_not_all_failed(sampled.everything, reward)
    if sampling.max_rollouts > 1:
        share = float(zero_spread(sampled.rollout).mean())
        guards.check_filled(run, sampled.draws, share)
        metrics |= {"rollouts": sampled.draws, "update_zero_spread_share": share}
    return sampled, metrics


def counts_of_hosts(reward: Reward | Rewards, own: dict[str, int]) -> dict[str, int]:
    """The sums over hosts of what their graders counted, by name."""
    if not graders(reward):
        return own
    counts: Counter[str] = Counter()
    for of_host in hosts.gather("what was not graded", own):
        counts.update(of_host)
    return dict(counts)


def read(
    phase: Phase,
    iteration: Iteration | None,
    show: Callable[..., None],
    evaluated: dict[str, float] | None = None,
) -> None:
    """Waits for the numbers of an iteration, checks them, and writes its lines.

    Args:
      phase: of the iteration.
      iteration: to read; None: there is none.
      show: of the progress bar.
      evaluated: numbers of an evaluation after it.

    Raises:
      FloatingPointError: gradients were not finite too many times in a row.
    """
    if iteration is None:
        return
    run, config, step = phase.run, phase.config, iteration.step
    with run.timed("update"):
        metrics = {name: value.item() for name, value in to_host(iteration.learned.metrics).items()}
    if not config.sampling.staleness:
        guards.check_first_ratio(run, metrics)
    update = metrics.pop("skipped_update")
    run.log(phase.name, step + 1, iteration.sampled | metrics | (evaluated or {}))  # also of what stops the run
    guards.check_gradients(
        run,
        f"{phase.name}_{step:06d}_{update + 1}",
        metrics["skipped"],
        config.optimizer.max_skipped,
        lambda: to_host(
            iteration.batch._replace(teacher=None)._asdict()  # which can be computed again
            | {"advantages": iteration.learned.advantages, "prompts": iteration.learned.order[update]}
        ),
    )
    every = config.logging.rollouts_every
    if every and (step % every == 0 or step + 1 == config.steps):
        groups = own_groups(iteration.rollout, iteration.batch, phase.task, phase.programs.sampler.devices)
        logprobs, advantages = own_rows((iteration.batch.sampler_logprobs, iteration.learned.advantages))
        run.log_rollout(phase.name, step + 1, readable(groups, logprobs, advantages, phase.task))
    log_times(phase, iteration)
    reward = iteration.sampled["reward"]
    show(step + 1, "no reward" if reward is None else f"reward {reward:.3f}")


def log_times(phase: Phase, iteration: Iteration) -> None:
    """Seconds, tokens and bytes of an iteration."""
    rollout, devices = iteration.rollout, phase.programs.sampler.devices
    tokens = int(rollout.prompts.mask.sum() + rollout.lengths.sum())
    if rollout.episodes is not None:  # what the environment said is computed too
        tokens += int((rollout.episodes.attention_mask & ~rollout.episodes.completion_mask).sum())
    trained = phase.config.optimizer.epochs * tokens
    moved = {f"{way}_bytes": count for way, count in take_bytes_moved().items()}
    phase.run.log_times(
        phase.name,
        iteration.step + 1,
        tokens={"rollout": iteration.sampled["tokens"], "update": trained},
        update_flops=phase.update_flops * trained,
        peak_flops=peak_flops(size(devices)),
        numbers=moved,
    )


def check_programs(programs: Programs, config: GRPOConfig) -> None:
    """Refuses programs that compute another run than the one that is asked for.

    Raises:
      UsageError: one sentence that names the options.
    """
    free = _OF_HOST if config.optimizer.decay != "none" else _OF_HOST | {"steps"}
    theirs = options_of(programs.config)
    differing = [name for name, value in options_of(config).items() if name not in free and theirs[name] != value]
    if differing:
        raise UsageError(
            f"the programs were made for another {', '.join(differing)}: make them of the configuration of this run"
        )


def check_task(task: Task, config: GRPOConfig) -> None:
    """Refuses a task that cannot be trained on with these options.

    Raises:
      UsageError: one sentence that says what to change.
    """
    guards.check_task(task)
    loss, sampling = config.loss, config.sampling
    if sampling.top_k > task.vocab_size:
        raise UsageError(
            f"top_k is {sampling.top_k}, but the model has {task.vocab_size} tokens: set it below that, or to 0 for all"
        )
    if task.environment is not None and hosts.count() > 1:
        raise UsageError(f"an environment runs on one host, and there are {hosts.count()}: leave out --distributed")
    guards.check_turns(task, sampling.max_turns, sampling.environment_tokens)
    if loss.mask_truncated and task.open_ended:
        raise UsageError(
            "completions of this task are meant to be cut off: mask_truncated would leave nothing to learn"
        )
    if learn.needs_replay(config) and task.environment is not None:
        raise UsageError(
            "old_logprobs sampler with staleness runs the sampler again on its completions, and not on episodes: leave "
            "out old_logprobs, staleness or the environment"
        )
    if loss.advantages_of == "spans" and task.environment is not None:
        raise UsageError(
            'advantages_of "spans" is for completions of one turn, and this task has an environment: set it to "turns"'
        )
    if loss.advantages_of == "turns" and task.environment is None:
        raise UsageError(
            'advantages_of "turns" is for tasks with an environment, and this one has none: set it to "sum"'
        )
    rewards = task.reward if isinstance(task.reward, Mapping) else {}
    counting = [name for name, component in rewards.items() if component.weight]
    if loss.advantages_of == "components" and len(counting) < 2:
        raise UsageError(
            'advantages_of "components" compares several rewards, but fewer than two of this task have a weight: give '
            'more of them, or take "sum"'
        )
    if sampling.filter_metric and sampling.filter_metric not in counting:
        raise UsageError(
            f'filter_metric "{sampling.filter_metric}" is no reward with a weight; such are: '
            f"{', '.join(counting) or 'none, for the reward has no parts'}"
        )
