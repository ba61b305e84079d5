"""Trains with this library by a plan of the race."""

from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.peers import peer_common
from experiments.benchmarks.peers.recorder import Recorder, recorder_from_arguments

peer_common.set_up()  # before JAX: the threads and the device of the peers

import jax
import numpy as np

from experiments.benchmarks.race.races import RACES, race_config, race_task
from grpo_jax.config import ModelOptions
from grpo_jax.data.types import Completion, Example
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.files.weights import save_params
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.runs.folder import RunFolder
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch
from grpo_jax.training.phases import train
from grpo_jax.training.prepare import RunOptions, begin, load_models, prepare


def main(recorder: Recorder) -> None:
    """Trains, and compares the initial model."""
    plan = recorder.plan
    config = race_config(RACES[plan.race], steps=len(plan.prompts), seed=plan.seed, **plan.settings)
    options = RunOptions(config, ModelOptions(plan.model))
    models = load_models(options.model, config)
    pretrained = models["policy"]

    def reward(examples: Sequence[Example], completions: Sequence[Completion]) -> list[float]:
        return recorder.grade([example["prompt"] for example in examples], completions)

    def save(params: Params, step: int) -> dict[str, float]:
        if recorder.is_due(step):
            jax.block_until_ready(params)
            dtype, most = np.dtype("float32"), 2**32
            recorder.save(
                step,
                lambda folder: save_params(folder, params, pretrained.config, dtype=dtype, max_shard_bytes=most),
            )
        return {}

    task = race_task(plan.race, pretrained, plan.seed, plan.data)
    prepared = prepare(options, models, task)
    run = RunFolder(Path(plan.folder) / "run", {})
    begin(run, prepared)
    with recorder.pause():
        recorder.write_versions("jax", "flax", "optax")
        for step, texts in enumerate(plan.prompts):
            assert [example["prompt"] for example in task.prompts(step).examples] == texts
    recorded = task._replace(reward=reward)  # `prepare` tries rewards, which is no rollout
    train(prepared.params, recorded, prepared.programs.config, run, prepared.programs, phase="grpo", evaluate=save)

    ids, mask = (np.array(rows) for rows in plan.first_prompts())
    probe = np.array(plan.probe, np.int32)[:, None]
    prompt = PromptTokens(ids.astype(np.int32), mask)
    batch = Batch(prompt, probe, np.ones(probe.shape, bool), np.ones(probe.shape[:2], np.float32))
    policy = decoder_policy(pretrained.config)
    recorder.finish(score_completion_tokens(policy, pretrained.params, batch).logprobs[:, 0])


if __name__ == "__main__":
    main(recorder_from_arguments())
