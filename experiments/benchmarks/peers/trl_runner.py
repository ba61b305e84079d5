# mypy: ignore-errors
"""Trains with TRL's GRPOTrainer by a plan."""

import os

from experiments.benchmarks.peers import peer_common as common
from experiments.benchmarks.peers.recorder import recorder_from_arguments

common.set_up()  # before torch
ON_CPU = os.environ["JAX_PLATFORMS"] == "cpu"
RECORDER = recorder_from_arguments()
PLAN = RECORDER.plan

import torch

if ON_CPU:
    torch.set_num_threads(common.CORES)

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """A trainer that records the time of sampling."""

    def _generate_single_turn(self, *args, **kwargs):
        with RECORDER.sampling():
            return super()._generate_single_turn(*args, **kwargs)


class Snapshots(TrainerCallback):
    """Saves the policy after the steps of the plan."""

    def on_step_end(self, args, state, control, model=None, **_):
        if RECORDER.is_due(state.global_step):
            if not ON_CPU:
                torch.cuda.synchronize()
            RECORDER.save(state.global_step, model.save_pretrained)


def reward(prompts, completions, **_):
    return RECORDER.grade(prompts, completions)


def main() -> None:
    """Trains, and compares the initial model."""
    settings = dict(PLAN.settings)
    batch = settings.pop("per_device_train_batch_size", PLAN.completions)
    trainer = Timed(
        model=PLAN.model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=PLAN.folder + "/trl",
            use_cpu=ON_CPU,
            max_steps=len(PLAN.prompts),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=PLAN.completions // batch,
            num_generations=PLAN.group,
            max_completion_length=PLAN.max_tokens,
            generation_kwargs={"min_new_tokens": PLAN.max_tokens} if PLAN.full_length else {},
            learning_rate=PLAN.learning_rate,
            seed=PLAN.seed,
            **(common.TRL_SETTINGS | settings),
        ),
        train_dataset=Dataset.from_dict({"prompt": PLAN.texts}),
        processing_class=AutoTokenizer.from_pretrained(PLAN.model, padding_side="left"),
        callbacks=[Snapshots()],
    )
    with RECORDER.pause():
        RECORDER.write_versions("trl", "torch", "transformers")
        assert trainer.processing_class(PLAN.texts)["input_ids"] == [ids for step in PLAN.ids for ids in step]
        assert sorted(trainer.eos_token_ids) == PLAN.ends, trainer.eos_token_ids
    trainer.train()
    RECORDER.finish(initial_logprobs(trainer) if PLAN.probe else [])


def initial_logprobs(trainer: GRPOTrainer) -> list[list[float]]:
    """Returns the reference's log-probabilities of the plan's probe."""
    (ids, mask), probe = PLAN.first_prompts(), torch.tensor(PLAN.probe)
    ids, mask = torch.cat([torch.tensor(ids), probe], 1), torch.cat([torch.tensor(mask), torch.ones_like(probe)], 1)
    device = trainer.accelerator.device
    with torch.no_grad():
        logprobs, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.ref_model, ids.to(device), mask.long().to(device), probe.shape[1]
        )
    return logprobs.tolist()


if __name__ == "__main__":
    main()
