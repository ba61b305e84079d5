"""What the experiments share: a pretrained model, and a run beside its control from the same start."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from grpo_jax.config import GRPOConfig, ModelOptions
from grpo_jax.errors import UsageError
from grpo_jax.export import LORA_FILE, LoraDescription
from grpo_jax.models.huggingface import Pretrained, load_pretrained, save_description
from grpo_jax.models.lora import add_adapters, fingerprint, join, split
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.transformer import Params
from grpo_jax.tasks.task import Task, random_reward
from grpo_jax.training.checkpoint import params_sha256
from grpo_jax.training.evaluate import Evaluation, Samples, evaluate, sample_heldout, summary
from grpo_jax.training.grpo import Programs, train
from grpo_jax.training.run import RunFolder, write_json
from grpo_jax.training.statistics import paired_difference

PHASES = ("grpo", "control")


class Loaded(NamedTuple):
    """A pretrained model, ready to be trained."""

    policy: Policy
    params: Params  # with adapters, if the options ask for them
    pretrained: Pretrained


def load_model(options: ModelOptions, *, seed: int) -> Loaded:
    """The model that the options name.

    Args:
      options: of the run.
      seed: of new adapters.

    Returns:
      The model.

    Raises:
      UsageError: there is none, or it cannot be trained as asked.
    """
    if not options.model:  # no required option: --resume takes it from the run
        raise UsageError("--model is needed: name a folder of a Hugging Face model, or its id on the hub")
    if options.lora_rank < 0:
        raise UsageError(f"lora_rank is {options.lora_rank}: it must be at least 0")
    if options.param_dtype != "float32" and not options.lora_rank:
        raise UsageError(
            "param_dtype bfloat16 would lose small updates of parameters that are trained: set it to float32, or "
            "lora_rank above 0"
        )
    pretrained = load_pretrained(
        options.model,
        param_dtype=options.param_dtype,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
    )
    params = pretrained.params
    if options.lora_rank:
        key = jax.random.key(seed)
        targets = options.lora_targets
        params = add_adapters(params, key, rank=options.lora_rank, alpha=options.lora_alpha, targets=targets)
    return Loaded(decoder_policy(pretrained.config), params, pretrained)


def keep_description(run: RunFolder, loaded: Loaded, options: ModelOptions) -> None:
    """Puts into the run what `grpo_jax.export` needs besides a checkpoint: the model's folder without the weights.

    Raises:
      UsageError: the run is resumed, and its frozen base is no longer the one that it started from.
    """
    pretrained, lora = loaded.pretrained, None
    if options.lora_rank:
        # A hub id stays one, so that the adapter can be used elsewhere.
        base = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
        lora = LoraDescription(
            base=base,
            fingerprint=fingerprint(pretrained.params),
            param_dtype=options.param_dtype,
            rank=options.lora_rank,
            alpha=options.lora_alpha,
            targets=options.lora_targets,
        )
        lora.check(run.path / "model")
    save_description(run.path / "model", pretrained.config, source=pretrained.folder)
    if lora:
        write_json(run.path / "model" / LORA_FILE, lora._asdict())


def heldout_samples(programs: Programs, params: Params, task: Task, config: GRPOConfig) -> Iterator[Samples]:
    """Held-out completions of a policy, at the shapes of training."""
    algorithm = config.algorithm
    return sample_heldout(
        programs.sampler,
        params,
        task,
        num_prompts=config.num_prompts,
        group_size=algorithm.group_size,
        temperature=algorithm.temperature,
        seed=config.seed,
        samples=config.eval_samples,
    )


def against_control(
    policy: Policy,
    params: Params,
    task: Task,
    config: GRPOConfig,
    run: RunFolder,
    programs: Programs,
    examine: Callable[[Evaluation, list[Samples]], dict[str, float]] = lambda evaluation, calls: {},
) -> tuple[dict[str, dict[str, float]], str]:
    """Trains on the task's reward, and again from the same start on a coin toss.

    Args:
      policy: the model's functions.
      params: the start of both.
      task: with the reward.
      config: of both.
      run: phases "grpo" and "control".
      programs: shared by both.
      examine: (evaluation, the calls that it is of) -> further numbers of a row.

    Returns:
      Rows "before", "after" and "control": summaries of held-out evaluations, the last two with the change of avg
      over the same prompts; and the SHA-256 of the parameters after GRPO.
    """

    def row(params: Params, before: Evaluation | None) -> tuple[dict[str, float], Evaluation]:
        calls = list(heldout_samples(programs, params, task, config))
        evaluation = evaluate(calls, task)
        numbers = summary(evaluation)
        if before:
            numbers |= paired_difference(evaluation.scores.mean(-1), before.scores.mean(-1)).named("change")
        return numbers | examine(evaluation, calls), evaluation

    def heldout(params: Params) -> dict[str, float]:
        numbers = summary(evaluate(heldout_samples(programs, params, task, config), task))
        return {f"heldout_{name}": value for name, value in numbers.items()}

    first, before = row(params, None)
    rows, checksum = {"before": first}, ""
    for phase, reward in zip(PHASES, (task.reward, random_reward(config.seed)), strict=True):
        state = train(
            policy, params, task, config, run, phase=phase, reward=reward, programs=programs, evaluate=heldout
        )
        rows["after" if phase == "grpo" else phase], _ = row(join(state.params, split(params)[1]), before)
        checksum = checksum or params_sha256(state.params)
    return rows, checksum


def cell(row: Mapping[str, float], name: str) -> str:
    """A number of a row with its interval, as a table shows it: "0.970 [0.960, 0.980]"."""
    low, high = row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan)
    return f"{row[name]:.3f}" + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]")
