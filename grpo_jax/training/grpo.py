"""The GRPO loop, read from top to bottom."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Algorithm, GRPOConfig, validate
from grpo_jax.functional import grpo_loss, kl_k1, masked_sum
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.tasks.task import Reward, Task
from grpo_jax.training import guards
from grpo_jax.training.parallel import data_parallel, num_devices
from grpo_jax.training.rollout import (
    Rollout,
    Sampler,
    group_temperatures,
    make_sampler,
    make_scorer,
    roll_out,
    rollout_metrics,
    score,
    shuffled_minibatches,
    step_key,
    to_batch,
)
from grpo_jax.training.run import RunFolder
from grpo_jax.training.state import Array, Batch, TrainState, init_state, make_optimizer
from grpo_jax.training.step import Logs, LossFn, train_step

_SAMPLING, _SHUFFLING = 0, 1  # streams of keys


def train(
    policy: Policy,
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    *,
    phase: str = "grpo",
    reward: Reward | None = None,
    programs: "Programs | None" = None,
    evaluate: Callable[[Params], dict[str, float]] | None = None,
) -> TrainState:
    """Trains a policy by GRPO, continuing from the newest checkpoint of this phase in the run.

    Args:
      policy: the model's functions.
      params: where training starts; also the reference, when there is one.
      task: prompts and text.
      config: the run.
      run: where lines and checkpoints go.
      phase: names them.
      reward: in place of the task's.
      programs: compiled functions, to share them between phases; made here if None.
      evaluate: (params) -> numbers to log, called every `config.eval_every` steps.

    Returns:
      The final state.

    Raises:
      ValueError: the configuration cannot work.
      FloatingPointError: gradients were not finite too many times in a row.
    """
    programs = programs or Programs(policy, task, config)
    algorithm, reward = config.algorithm, reward or task.reward
    temperature = group_temperatures(
        config.num_prompts, algorithm.group_size, algorithm.temperature, algorithm.temperature_spread
    )
    reference = params

    with run.checkpoints(phase, keep=config.keep_checkpoints) as checkpoints:
        state, done = checkpoints.restore(lambda: programs.init_state(params))
        run.rewind(phase, done)
        with run.progress(phase, config.steps, done) as show:
            for step in range(done, config.steps):
                # ---- rollout: a group of completions for each prompt, and their rewards
                with run.timed("rollout"):
                    key = step_key(config.seed, _SAMPLING, step)
                    rollout = roll_out(
                        programs.sampler, state.params, task.prompts(step), task, reward, temperature, key
                    )

                # ---- score: log-probabilities under the policy that sampled, and under the reference
                with run.timed("score"):
                    batch = to_batch(rollout, temperature)
                    old_logprobs: Array = rollout.completions.sampler_logprobs
                    if config.old_logprobs == "recompute":
                        old_logprobs = np.asarray(programs.scorer(state.params, batch).logprobs)
                    ref_logprobs: Array = None
                    if algorithm.kl_coef > 0:
                        ref_logprobs = np.asarray(programs.scorer(reference, batch).logprobs)

                # ---- advantages: rewards against those of the same group
                rewards = rollout.rewards
                if algorithm.kl_coef > 0 and algorithm.kl_in_reward:
                    penalty = np.where(batch.completion_mask, kl_k1(old_logprobs, ref_logprobs), 0).sum(-1)
                    rewards, ref_logprobs = rewards - algorithm.kl_coef * penalty, None
                batch = batch._replace(
                    advantages=np.asarray(programs.advantages(rewards)),
                    old_logprobs=old_logprobs,
                    ref_logprobs=ref_logprobs,
                    sampler_logprobs=rollout.completions.sampler_logprobs,
                )

                # ---- update: every prompt once an epoch, in shuffled minibatches
                with run.timed("update"):
                    all_metrics = []
                    for epoch in range(config.epochs):
                        key = step_key(config.seed, _SHUFFLING, step * config.epochs + epoch)
                        for minibatch in shuffled_minibatches(batch, key, config.minibatches):
                            state, metrics = programs.train_step(state, minibatch)
                            metrics = jax.tree.map(float, jax.device_get(metrics))
                            guards.check_gradients(run, step, metrics, minibatch, config.max_skipped)
                            all_metrics.append(metrics)
                    state = state._replace(step=jnp.int32(step + 1))

                # ---- log
                guards.check_rollout(run, rollout, task)
                guards.check_first_ratio(run, all_metrics[0]["ratio_deviation"])
                metrics = {name: float(np.mean([m[name] for m in all_metrics])) for name in all_metrics[0]}
                metrics["first_ratio_deviation"] = all_metrics[0]["ratio_deviation"]
                metrics["ratio_deviation"] = max(m["ratio_deviation"] for m in all_metrics)
                evaluated: dict[str, float] = {}
                if evaluate and config.eval_every and (step + 1) % config.eval_every == 0:
                    with run.timed("evaluate"):
                        evaluated = evaluate(state.params)
                run.log(phase, step + 1, **rollout_metrics(rollout), **metrics, **evaluated)
                if config.rollouts_every and step % config.rollouts_every == 0:
                    run.log_rollout(phase, step + 1, readable(rollout, batch))
                run.log_times(phase, step + 1, tokens=int(batch.completion_mask.sum()))
                show(step + 1, f"reward {rollout.rewards.mean():.3f}")
                if (step + 1) % max(config.checkpoint_every, 1) == 0 or step + 1 == config.steps:
                    checkpoints.save(state, step + 1)
    return state


class Programs:
    """The compiled functions of a run. Phases that differ in the reward alone share them."""

    def __init__(self, policy: Policy, task: Task, config: GRPOConfig) -> None:
        """Checks the configuration, and compiles nothing yet."""
        devices = num_devices(config.devices)
        validate(config, num_devices=devices)
        guards.check_task(task)
        algorithm = config.algorithm
        optimizer = make_optimizer(
            config.learning_rate,
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )
        loss_fn = grpo_loss_fn(policy, algorithm)

        def step(state: TrainState, batch: Batch, *, axis_name):
            return train_step(
                state,
                batch,
                loss_fn=loss_fn,
                aggregation=algorithm.aggregation,
                optimizer=optimizer,
                num_microbatches=config.microbatches,
                axis_name=axis_name,
            )

        self.sampler: Sampler = make_sampler(policy, task, config, devices=devices)
        self.scorer = make_scorer(policy, num_microbatches=config.microbatches * config.minibatches, devices=devices)
        self.advantages = jax.jit(algorithm.advantages)
        self.train_step = data_parallel(step, (None, 0), (None, None), devices=devices, donate_argnums=(0,))
        self.init_state = jax.jit(lambda params: init_state(params, optimizer))


def grpo_loss_fn(policy: Policy, algorithm: Algorithm) -> LossFn:
    """(params, batch with weights) -> the algorithm's loss and what to log of it."""

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Logs]:
        scores, mask = score(policy, params, batch), batch.completion_mask
        loss, metrics = grpo_loss(
            scores.logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            ref_logprobs=batch.ref_logprobs,
            kl_coef=algorithm.kl_coef,
            epsilon_low=algorithm.epsilon_low,
            epsilon_high=algorithm.epsilon_high,
            weights=batch.weights,
            log_ratio=algorithm.log_ratio,
            surrogate=algorithm.surrogate,
            divergence=algorithm.divergence,
        )
        deviation = jnp.abs(jnp.expm1(jnp.where(mask, scores.logprobs - batch.old_logprobs, 0)))
        mismatch = jnp.where(mask, scores.logprobs - batch.sampler_logprobs, 0)
        metrics["entropy"] = masked_sum(scores.entropy, mask)
        metrics["sampler_mismatch"] = masked_sum(jnp.exp(jnp.abs(mismatch)), mask)
        return loss, Logs(metrics, {"ratio_deviation": jax.lax.stop_gradient(jnp.max(deviation))})

    return loss_fn


def readable(rollout: Rollout, batch: Batch, num_groups: int = 2) -> list[dict[str, Any]]:
    """A few groups of a rollout as JSON can hold them."""
    return [
        {
            "prompt": rollout.prompts.examples[i]["prompt"],
            "completions": rollout.texts[i],
            "rewards": rollout.rewards[i].tolist(),
            "advantages": [round(float(a), 4) for a in batch.advantages[i]],
            "lengths": rollout.completions.completion_mask[i].sum(-1).tolist(),
        }
        for i in range(min(num_groups, len(rollout.texts)))
    ]
