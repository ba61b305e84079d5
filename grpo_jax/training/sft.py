"""Supervised training on given completions, with the step of everything else."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional import masked_sum, token_mean_weights
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.training.rollout import score
from grpo_jax.training.run import RunFolder
from grpo_jax.training.state import Batch, TrainState, init_state, make_optimizer
from grpo_jax.training.step import Logs, LossFn, train_step


class SFTConfig(NamedTuple):
    """A supervised phase."""

    steps: int
    learning_rate: float
    checkpoint_every: int = 250
    log_every: int = 50


def train_sft(
    policy: Policy, params: Params, batches: Callable[[int], Batch], config: SFTConfig, run: RunFolder, *, phase: str
) -> TrainState:
    """Maximises the likelihood of completions, continuing from the newest checkpoint of this phase.

    Args:
      policy: the model's functions.
      params: where training starts.
      batches: step -> batch, a pure function; G is 1.
      config: the phase.
      run: where lines and checkpoints go.
      phase: names them.

    Returns:
      The final state.
    """
    optimizer = make_optimizer(config.learning_rate)
    loss_fn = sft_loss_fn(policy)

    @partial(jax.jit, donate_argnums=0)
    def step_fn(state: TrainState, batch: Batch):
        return train_step(state, batch, loss_fn=loss_fn, aggregation=token_mean_weights, optimizer=optimizer)

    with run.checkpoints(phase, keep=1) as checkpoints:
        state, done = checkpoints.restore(lambda: jax.jit(init_state, static_argnums=1)(params, optimizer))
        run.rewind(phase, done)
        with run.progress(phase, config.steps, done) as show:
            for step in range(done, config.steps):
                state, metrics = step_fn(state, batches(step))
                if (step + 1) % config.log_every == 0:
                    metrics = jax.tree.map(float, jax.device_get(metrics))
                    run.log(phase, step + 1, metrics)
                    run.log_times(phase, step + 1)
                    show(step + 1, f"loss {metrics['loss']:.3f}")
                if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                    checkpoints.save(state, step + 1)
    return state


def sft_loss_fn(policy: Policy) -> LossFn:
    """L = −Σ w log π(oₜ): next-token loss on the completion, none on the prompt."""

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Logs]:
        scores = score(policy, params, batch)
        loss = -jnp.sum(batch.weights * scores.logprobs)
        return loss, Logs({"entropy": masked_sum(scores.entropy, batch.completion_mask)}, {})

    return loss_fn
