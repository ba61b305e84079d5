"""Plans of the processes of a race, and the model of the race that needs no download."""

from pathlib import Path

from experiments.arithmetic import MODEL, WarmStart, warm_start
from experiments.benchmarks.peers.recorder import Plan
from experiments.benchmarks.race.races import RACES, Entrant, race_task
from grpo_jax.commands.export import Options, export
from grpo_jax.data.types import rng
from grpo_jax.models.huggingface import load_pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.runs.folder import RunFolder


def make_plan(name: str, entrant: Entrant, model: Path, folder: Path, *, steps: int, seed: int, data: str = "") -> Plan:
    """Returns the plan of a process.

    Args:
      name: The name of the race.
      entrant: The library with its settings. A fraction as a size means this share of a step's prompts or completions.
      model: The folder of the initial model.
      folder: The folder of the process.
      steps: The number of steps. The policy is saved every `save_every` steps, and after the first and the last.
      seed: The random seed of prompts and sampling.
      data: The folder of the race's rows.
    """
    race, pretrained = RACES[name], load_pretrained(model)
    task = race_task(name, pretrained, seed, data)
    prompts = [task.prompts(step) for step in range(steps)]
    examples = [example for step in prompts for example in step.examples]
    wholes = {
        "per_device_train_batch_size": race.num_prompts * race.group_size,
        "train_micro_batch_size": race.num_prompts,
    }
    settings = {
        key: int(value * wholes[key]) if isinstance(value, float) else value for key, value in entrant.settings.items()
    }
    probe = rng(0).integers(3, pretrained.config.vocab_size - 2, (race.num_prompts, race.max_tokens))
    return Plan(
        folder=str(folder),
        race=name,
        data=data,
        model=str(model),
        seed=seed,
        prompts=[[example["prompt"] for example in step.examples] for step in prompts],
        ids=[
            [ids[mask].tolist() for ids, mask in zip(step.tokens.ids, step.tokens.mask, strict=True)]
            for step in prompts
        ],
        answers={example["prompt"]: example["answer"] for example in examples if "answer" in example},
        reward=race.reward,
        group=race.group_size,
        max_tokens=race.max_tokens,
        ends=sorted(task.eos_ids),
        pad_id=task.pad_id,
        learning_rate=race.learning_rate,
        snapshots=sorted({1, *range(race.save_every, steps, race.save_every), steps}),
        probe=probe.tolist(),
        settings=settings,
    )


def export_warm_start(folder: Path) -> Path:
    """Returns the folder of a model that adds numbers, after the warm start of `experiments.arithmetic`."""
    out = folder / "model"
    if not out.exists():
        warm_start(decoder_policy(MODEL), WarmStart(), 0, RunFolder(folder / "warm", {}))
        export(Options(folder / "warm", out, phase="warm"))
    return out
