"""What the experiments share: a run beside its control from the same start."""

from collections.abc import Callable
from typing import TypeVar

from grpo_jax.config import GRPOConfig
from grpo_jax.models.lora import join, split
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.tasks.task import Task, random_reward
from grpo_jax.training.checkpoint import params_sha256
from grpo_jax.training.evaluate import Evaluation, evaluate, heldout_rollouts
from grpo_jax.training.grpo import Programs, train
from grpo_jax.training.rollout import Rollout
from grpo_jax.training.run import RunFolder

PHASES = ("grpo", "control")
Result = TypeVar("Result")


def rollouts_of(programs: Programs, params: Params, task: Task, config: GRPOConfig) -> list[tuple[Rollout, int]]:
    """Held-out rollouts of a policy, at the shapes of training."""
    algorithm = config.algorithm
    return list(
        heldout_rollouts(
            programs.sampler,
            params,
            task,
            task.reward,
            num_prompts=config.num_prompts,
            group_size=algorithm.group_size,
            temperature=algorithm.temperature,
            seed=config.seed,
        )
    )


def against_control(
    policy: Policy,
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    examine: Callable[[Params, Evaluation, list[tuple[Rollout, int]]], Result],
) -> tuple[dict[str, Result], str]:
    """Trains on the task's reward, and again from the same start on a coin toss.

    Args:
      policy: the model's functions.
      params: the start of both.
      task: with the reward.
      config: of both.
      run: phases "grpo" and "control".
      programs: shared by both.
      examine: (params, evaluation, held-out rollouts) -> a row of the final table.

    Returns:
      Rows "before", "after" and "control", and the SHA-256 of the parameters after GRPO.
    """

    def row(params: Params) -> Result:
        rollouts = rollouts_of(programs, params, task, config)
        return examine(params, evaluate(rollouts), rollouts)

    def heldout(params: Params) -> dict[str, float]:
        evaluation = evaluate(rollouts_of(programs, params, task, config))
        return {f"heldout_{name}": value for name, value in evaluation._asdict().items()}

    rows, checksum = {"before": row(params)}, ""
    for phase, reward in zip(PHASES, (task.reward, random_reward(config.seed)), strict=True):
        state = train(
            policy, params, task, config, run, phase=phase, reward=reward, programs=programs, evaluate=heldout
        )
        rows["after" if phase == "grpo" else phase] = row(join(state.params, split(params)[1]))
        checksum = checksum or params_sha256(state.params)
    return rows, checksum
