"""The line of an iteration in the log: metrics, warnings, times, and groups for people to read."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from grpo_jax.config import GRPOConfig
from grpo_jax.data.types import Skipped, StepLog
from grpo_jax.devices import Devices, local_rows, peak_flops, pop_bytes_moved, size, to_numpy
from grpo_jax.models.geometry import PromptTokens
from grpo_jax.rl.grade import read_completions, readable
from grpo_jax.rl.guards import ratio_warning, support_warning
from grpo_jax.rl.types import Learned, Rollout, Timed
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task


def read_line(
    phase: str,
    config: GRPOConfig,
    task: Task,
    devices: Devices,
    flops: float,
    damage: Callable[[Mapping[str, Any]], dict[str, str]],
    timed: Timed,
    pop_times: Callable[[], dict[str, float]],
    step: int,
    rollout: Rollout,
    batch: Batch,
    learned: Learned,
) -> StepLog:
    """Waits for the metrics of an iteration, and returns its line of the log.

    Args:
      phase: The name of the phase, which names the files of skipped updates.
      config: The configuration of the run.
      task: Decodes completions.
      devices: The devices that share the rows.
      flops: Floating-point operations of an update per token.
      damage: Warns about updates that destroy the policy; see `make_damage_check`.
      timed: Adds the seconds of a block to the time of the named part of the iteration.
      pop_times: Returns further numbers for the times.
      step: The number of the iteration, from 0.
      rollout: The graded rollout, with its metrics.
      batch: The scored batch.
      learned: The metrics and advantages of the update.
    """
    graded = rollout.graded
    assert graded is not None
    with timed("update"):
        metrics = {name: value.item() for name, value in to_numpy(learned.metrics).items()}
    first_skipped = metrics.pop("skipped_update")
    every, groups = config.logging.rollouts_every, []
    if every and (step % every == 0 or step + 1 == config.steps):
        logprobs, advantages = local_rows((batch.sampler_logprobs, learned.advantages))
        groups = readable(rollout, read_completions(rollout), logprobs, advantages, task, devices)
    tokens = int(rollout.prompts.tokens.mask.sum() + graded.num_tokens.sum())
    times = {
        "tokens": {"rollout": rollout.metrics["tokens"], "update": config.optimizer.epochs * tokens},
        "update_flops": flops * config.optimizer.epochs * tokens,
        "peak_flops": peak_flops(size(devices)),
        "numbers": {f"{way}_bytes": count for way, count in pop_bytes_moved().items()} | pop_times(),
    }

    def skipped_arrays() -> dict[str, Any]:
        # Leave out the outputs of a teacher: they may be large, and can be computed again.
        arrays = {name: x for name, x in batch._asdict().items() if isinstance(x, jax.Array | PromptTokens)}
        return to_numpy(arrays | {"advantages": learned.advantages, "prompts": learned.order[first_skipped]})

    name, most = f"{phase}_{step:06d}_{first_skipped + 1}", min(config.optimizer.max_skipped, config.num_updates)
    reward, warnings = rollout.metrics["reward"], dict(rollout.warnings)
    if damaged := damage(rollout.metrics | metrics):
        warnings.pop("spread", None)  # equal rewards are then not the fault of the prompts
    words = ["no reward" if reward is None else f"reward {reward:.3f}"]
    words += [f"KL {metrics['kl']:.3g}"] if "kl" in metrics else []
    words += [f"length {rollout.metrics['length_mean']:.1f}"]
    return StepLog(
        metrics=rollout.metrics | metrics,
        words=", ".join(words),
        warnings=warnings | damaged | support_warning(metrics) | (ratio_warning(metrics) if rollout.is_fresh else {}),
        groups=groups,
        times=times,
        skipped=Skipped(name, metrics["skipped"], most, skipped_arrays) if metrics["skipped"] else None,
    )
