"""What commands and experiments share: a run beside its control from the same start, and how a run ends."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grpo_jax.config import GRPOConfig
from grpo_jax.data.types import Reward, Rewards
from grpo_jax.models.trainable import join, split
from grpo_jax.models.transformer import Params
from grpo_jax.rl.evaluate import Evaluation, Samples, evaluate, prompt_means, sample_heldout, summary
from grpo_jax.rl.grade import grader_warnings
from grpo_jax.rl.iteration import Programs
from grpo_jax.rl.types import TrainState
from grpo_jax.runs import terminal
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.statistics import paired_difference
from grpo_jax.tasks.task import Task, random_reward
from grpo_jax.train import train

# What `grpo-jax train --method` takes; each is a module of this folder.
Method = Literal["grpo", "ppo", "sft", "reward-model", "dpo", "kto"]
RUN_DIR = "runs/train"  # of all methods, so that --resume alone continues the newest run
CONTROL = "control"
PHASES = ("grpo", CONTROL)


class HeldoutResult(NamedTuple):
    """What a policy does on the held-out prompts."""

    evaluation: Evaluation
    calls: list[Samples]  # that it is of


def evaluate_heldout(
    programs: Programs, params: Params, task: Task, config: GRPOConfig, run: RunFolder
) -> HeldoutResult:
    """Held-out completions of a policy, at the shapes of training, and what the task's reward says of them."""
    num_prompts, group_size = config.sampling.num_prompts, config.sampling.group_size
    samples = sample_heldout(
        programs.sampler,
        params,
        task,
        num_prompts=num_prompts,
        group_size=group_size,
        temperature=config.sampling.temperature,
        seed=config.seed,
        samples=config.logging.eval_samples,
    )
    calls = list(samples)
    evaluation = evaluate(calls, task, block=num_prompts * group_size)
    run.warn(grader_warnings(task.reward))
    return HeldoutResult(evaluation, calls)


def learn(
    params: Any,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    *,
    phase: str,
    reward: Reward | Rewards | None = None,
    start: HeldoutResult | None = None,
) -> tuple[TrainState, HeldoutResult]:
    """Trains, with held-out evaluations in the log. No parameters are evaluated twice.

    Args:
      params: where training starts, as `programs` take it.
      task: its reward judges held-out completions.
      config: of the phase.
      run: of the phase.
      programs: of the method.
      phase: names it.
      reward: to train on in place of the task's.
      start: of `params`, if it is known.

    Returns:
      The final state, and what its policy does on the held-out prompts.
    """
    latest = {0: start} if start else {}  # step -> evaluation

    def heldout(params: Params, step: int) -> dict[str, float]:
        if step not in latest:
            latest.clear()
            latest[step] = evaluate_heldout(programs, params, task, config, run)
        return {f"heldout_{name}": value for name, value in summary(latest[step].evaluation).items()}

    state = train(params, task, config, run, programs, phase=phase, reward=reward, evaluate=heldout)
    final = join(state.params, split(params)[1])["policy"]
    return state, latest.get(config.steps) or evaluate_heldout(programs, final, task, config, run)


def train_with_control(
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    examine: Callable[[Evaluation, list[Samples]], dict[str, float]] = lambda evaluation, calls: {},
    *,
    phases: Sequence[str] = PHASES,
) -> tuple[dict[str, dict[str, float]], str]:
    """Trains on the task's reward, and again from the same start on a coin toss.

    Args:
      params: the start of both.
      task: with the reward.
      config: of both.
      run: of the phases.
      programs: shared by both.
      examine: (evaluation, the calls that it is of) -> further numbers of a row.
      phases: the method, and "control" if there is to be one.

    Returns:
      Rows "before", "after" and perhaps "control": summaries of held-out evaluations, the last two with the change of
      avg over the same prompts; and the SHA-256 of what is trained of the policy, after the first phase.
    """

    def row(held: HeldoutResult) -> dict[str, float]:
        return summary(held.evaluation) | examine(*held)

    with run.waiting("evaluating the start (may take minutes: programs are compiled or read)"):
        start = evaluate_heldout(programs, params["policy"], task, config, run)
    rows, checksum = {"before": row(start)}, ""
    for phase in phases:
        reward = random_reward(config.seed) if phase == CONTROL else task.reward
        state, end = learn(params, task, config, run, programs, phase=phase, reward=reward, start=start)
        change = paired_difference(*(prompt_means(held.evaluation) for held in (end, start)))
        rows[phase if phase == CONTROL else "after"] = row(end) | change.named("change")
        checksum = checksum or params_sha256(state.params["policy"])
    return rows, checksum


def explain_control(run: RunFolder, names: Iterable[str], *, control: str = "control") -> None:
    """Says what the control's line of a table is, if it has one."""
    if control in names:
        run.console.print(
            f"{control}: the same start, prompts and steps with a coin toss for a reward; its drift is not learning.",
            soft_wrap=True,
        )


def finish(
    run: RunFolder,
    rows: Mapping[str, Mapping[str, float]],
    checksum: str,
    curves: Sequence[tuple[str, str]],
    started: float,
    *,
    phases: Sequence[str] = PHASES,
) -> None:
    """Leaves curves.png, results.json and report.html, and says what the run came to; of several hosts the first does.

    Args:
      run: of the experiment.
      rows: of `train_with_control`.
      checksum: of the parameters after training.
      curves: (metric, title) beside the three curves to watch, as for `terminal.curves_of`.
      started: by `time.perf_counter`.
      phases: that curves.png has lines of.
    """
    if not run.writes:
        return
    explain_control(run, rows)
    terminal.save_results(run, rows, checksum, terminal.curves_of(run, curves), phases)
    terminal.say_end(run, started)
