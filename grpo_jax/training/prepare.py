"""Prepares training: loads models, plans memory, and makes the programs of a method that learns from rewards.

The command line and `GRPOTrainer` take the same steps: `load_models`, a task, `prepare`, and `begin` when the run has
its folder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from grpo_jax.config import (
    OPTIMIZERS,
    RATES,
    DecodingConfig,
    EngineOptions,
    GRPOConfig,
    ModelOptions,
    check_models,
    with_options,
)
from grpo_jax.data.text import prompt_limit
from grpo_jax.data.types import Completion, Example
from grpo_jax.devices import devices_of, load_shardings, memory_limit, num_shards, place, sampling_devices, size
from grpo_jax.errors import UsageError
from grpo_jax.hosts import gather
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.huggingface import Pretrained, for_texts, load_pretrained, with_tokenizer
from grpo_jax.models.params.lora import add_adapters
from grpo_jax.models.policy import decoder_policy, resolve_dtype
from grpo_jax.options import Escaped, check_ranges, options_of
from grpo_jax.planning.memory import Plan, choose, divide_shape, num_params, shape_of
from grpo_jax.rl.guards import length_warning
from grpo_jax.rl.interaction import interaction_of
from grpo_jax.rl.programs import Programs, make_programs
from grpo_jax.rl.source import Sampler
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.pretrained import keep_description
from grpo_jax.tasks.task import Task

Models = Mapping[str, Pretrained]  # by role: "policy" first, and optionally "teacher"


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that learns from rewards, in groups."""

    train: GRPOConfig = GRPOConfig()
    model: ModelOptions = ModelOptions()
    stop: tuple[Escaped, ...] = ()
    """Texts that end a completion or turn. Rewards read the text before. On the command line `\\n` is a line break,
    `\\\\` a backslash."""


Options = TypeVar("Options", bound=RunOptions)


# ---- models


def load_models(
    options: ModelOptions,
    config: GRPOConfig,
    *,
    pretrained: Pretrained | None = None,
    weights: bool = True,
    tokenizer: Any = None,
) -> Models:
    """Loads the policy, and its teacher if there is one, sharded over the devices of the run.

    Args:
      options: The options of the model.
      config: Names the teacher, and supplies the devices and the seed of adapters.
      pretrained: A model that is already loaded, as in `load_model`.
      weights: False to load no weights, only what a plan needs.
      tokenizer: A tokenizer for the policy, as in `load_pretrained`.

    Raises:
      UsageError: A model is missing, or models and options do not match.
    """
    names = {role: name for role, name in config.frozen_models.items() if name}
    check_models(config, names)
    loading: Any = {"sharding": load_shardings(devices_of(config)), "weights": weights}
    policy = load_model(options, seed=config.seed, pretrained=pretrained, tokenizer=tokenizer, **loading)
    return {"policy": policy} | {
        role: load_frozen(role, name, options, policy, **loading) for role, name in names.items()
    }


def load_model(
    options: ModelOptions,
    *,
    seed: int,
    pretrained: Pretrained | None = None,
    sharding: Any = None,
    weights: bool = True,
    tokenizer: Any = None,
) -> Pretrained:
    """Loads the model that the options name. Its parameters have adapters if the options ask for them.

    Args:
      options: The options of the model.
      seed: The random seed of new adapters.
      pretrained: A model that is already loaded. Only the LoRA options then apply.
      sharding, weights, tokenizer: As in `load_pretrained`. Without weights there are no adapters.

    Raises:
      UsageError: There is no such model, or it cannot be trained with these options.
    """
    check_ranges(options)
    rank = options.lora_rank
    if not rank and (options.param_dtype, options.quantize) != ("float32", "none"):
        raise UsageError(
            f"param_dtype {options.param_dtype} or quantize {options.quantize} would lose small updates of parameters "
            "that are trained: set lora_rank above 0, which freezes them, or leave both out"
        )
    if pretrained is None:
        named = {
            name: getattr(options, name) for name in ("param_dtype", "quantize", "rounding", "attention", "router")
        }
        named["remat"] = "none" if options.remat == "auto" else options.remat  # auto is planned later
        loading = {"sharding": sharding, "weights": weights, "tokenizer": tokenizer}
        pretrained = load_pretrained(options.model, dtype=resolve_dtype(options.dtype), **named, **loading)
    elif tokenizer is not None:
        pretrained = with_tokenizer(pretrained, tokenizer)
    decoder_policy(pretrained.config)  # raises if this machine does not support the kind of attention
    width = pretrained.config.hidden_size
    if rank > width:
        raise UsageError(f"lora_rank is {rank}: it must be at most {width}, the width of the model")
    if not rank:
        return pretrained
    from grpo_jax.models.files.peft import targets_of  # loaded only for runs with adapters

    targets = targets_of(pretrained.config, options.lora_targets)
    if not weights:
        return pretrained
    adapted = add_adapters(
        pretrained.params, jax.random.key(seed), rank=rank, alpha=options.lora_alpha, targets=targets
    )
    return pretrained._replace(params=adapted)


def load_frozen(role: str, name: str | Path, options: ModelOptions, student: Pretrained, **loading: Any) -> Pretrained:
    """Loads a model that judges the policy's tokens, with its dtype and attention.

    The parameters have the dtype of activations.

    Args:
      role: The role of the model, for messages, such as "teacher".
      name: The folder of a Hugging Face model, or its id on the hub.
      options: The options of the policy.
      student: The policy.
      **loading: Further arguments of `load_pretrained`: sharding, weights.

    Raises:
      UsageError: There is no such model, or its tokens differ from the policy's.
    """
    dtype = resolve_dtype(options.dtype)
    model = load_pretrained(name, param_dtype=dtype, dtype=dtype, attention=options.attention, **loading)
    tokens = student.tokenizer.get_vocab()
    check_vocabulary(model.tokenizer.get_vocab(), tokens, f"{role} {name}")
    needed = min(student.config.vocab_size, 1 + max(tokens.values()))
    if model.config.vocab_size < needed:
        raise UsageError(f"the {role} {name} lacks tokens from {model.config.vocab_size} on: name one with {needed}")
    return model


def check_vocabulary(tokens: Mapping[str, int], policy_tokens: Mapping[str, int], name: str) -> None:
    """Raises if a frozen model and the policy have different tokens.

    Args:
      tokens: The vocabulary of the frozen model: token -> id.
      policy_tokens: The vocabulary of the policy: token -> id.
      name: The role and name of the frozen model.

    Raises:
      UsageError: The vocabularies differ. The message names a token.
    """
    for token, _ in sorted(tokens.items() ^ policy_tokens.items()):
        ids = [vocabulary.get(token, "no token") for vocabulary in (tokens, policy_tokens)]
        raise UsageError(
            f"the {name} has another tokenizer than the model: {token!r} is {ids[0]} there and {ids[1]} here; name a "
            "model with the same tokenizer"
        )


def prompt_options(options: Any, sampling: DecodingConfig, pretrained: Pretrained) -> dict[str, Any]:
    """Returns the arguments of `text_task` that say how prompts are encoded and completions end.

    Args:
      options: Options with max_prompt_tokens, overlong, stop and chat_template_kwargs, in whichever group they are.
      sampling: How completions are sampled.
      pretrained: The model that samples.

    Raises:
      UsageError: Completions leave no room for a prompt.
    """
    named, longest = options_of(options), pretrained.config.max_position_embeddings
    limit = prompt_limit(named["max_prompt_tokens"], longest, sampling.completion_width)
    return {"max_prompt_tokens": limit} | {name: named[name] for name in ("overlong", "stop", "chat_template_kwargs")}


# ---- methods that learn from rewards


def programs_of(
    models: Models, task: Task, config: GRPOConfig, sampler: Sampler | None = None
) -> tuple[Programs, Params]:
    """Makes the programs of a run, and its initial parameters by role.

    Args:
      models: The models, with a teacher if the options need one.
      task: Supplies the prompts and the reward.
      config: All options, which may add a critic.
      sampler: Samples completions instead of the policy; None: the policy samples.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    policies = {role: decoder_policy(model.config) for role, model in models.items()}
    params, shape = {role: model.params for role, model in models.items()}, models["policy"].config
    if config.has_critic:
        from grpo_jax.rl.ppo import add_critic, critic_policy  # loaded only with a critic

        policies["critic"] = critic_policy(shape)
        params |= add_critic(shape, params["policy"], config.critic.critic)
    return make_programs(policies, task, config, sampler=sampler), params


class Prepared(NamedTuple, Generic[Options]):
    """Everything that a run needs to train, except its folder."""

    options: Options  # with the choices of the memory plan
    models: Models
    task: Task
    programs: Programs
    params: Params  # by role, on the run's devices
    plan: Plan


def prepare(
    options: Options,
    models: Models,
    task: Task,
    *,
    engine: EngineOptions = EngineOptions(),
    note: Callable[[str], None] = print,
) -> Prepared[Options]:
    """Plans the memory of a run and makes its programs, which are compiled at their first call.

    Args:
      options: The options of the run.
      models: The models, as returned by `load_models`.
      task: Supplies the prompts and the reward.
      engine: A server that samples instead of this process. Default: no server.
      note: Prints a message about a slow step.

    Raises:
      UsageError: Options do not work, or a reward fails. The message says what to change.
    """
    if engine.engine and options.train.num_sampler_devices:
        raise UsageError(
            f"sampler_devices is {options.train.num_sampler_devices}, but an engine samples: leave one of them out"
        )
    if options.train.needs_rewards:
        row, group_size = task.prompts(0).examples[0], options.train.sampling.group_size
        try_rewards(task, row, models["policy"], group_size)
    options, models, plan = apply_memory_plan(options, models, task, engine)
    config = options.train
    if config.loss.correction == "auto" and engine.engine_dtype not in ("auto", plan.model.dtype):
        options = with_options(options, correction=config.off_policy_correction)
        config = options.train
    sampling = config.sampling
    learns = sampling.support == "sampler" and not sampling.staleness and engine.engine_kind == "vllm"
    if engine.engine and sampling.limits_tokens and not learns:
        raise UsageError(
            "with top_k, top_p or min_p an engine reports probabilities after truncation, and not those of the policy: "
            "leave them out, or leave out engine, or set support to sampler, for vLLM and without staleness"
        )
    sampler = make_engine_sampler(engine, models["policy"], task, config, note=note)
    programs, params = programs_of(models, task, options.train, sampler)
    return Prepared(options, models, task, programs, place(params, devices_of(config)), plan)


def make_engine_sampler(
    options: EngineOptions, pretrained: Pretrained, task: Task, config: GRPOConfig, *, note: Callable[[str], None]
) -> Sampler | None:
    """Returns the sampler of servers, or None without any. For arguments see `engines.sampler.sampler_of`."""
    if not options.engine:
        return None
    from grpo_jax.engines.sampler import sampler_of  # loaded only with an engine

    return sampler_of(options, pretrained, task, config, note=note)


def try_rewards(
    task: Task, row: Example, pretrained: Pretrained, group_size: int
) -> dict[str, dict[str, float | str | None]]:
    """Calls each reward on one prompt, so that rewards that always fail are noticed before anything is compiled.

    A call gets a group of equal completions: empty ones and, if the row has a column "solution" or "answer", those of
    the row. These calls do not count as failures of the run. Rewards of several turns are not called.

    Args:
      task: Supplies the reward.
      row: The columns of the prompt.
      pretrained: The model with the tokenizer.
      group_size: The number of completions of a group, G.

    Returns:
      "the empty completion" and "the row's own answer" -> name -> the reward of such a completion, None without one,
      or the reason why the call failed.

    Raises:
      UsageError: Every call of the rewards that count failed, or a reward refuses its arguments or the row.
    """
    if interaction_of(task).parts == "turns":
        return {}
    answer = answer_of(row)
    texts = {"the empty completion": ""} | ({} if answer is None else {"the row's own answer": answer})
    tries: dict[str, dict[str, tuple[float | None, str]]] = {}
    for what, text in texts.items():
        completion = Completion(text, pretrained.tokenizer(text, add_special_tokens=False)["input_ids"])
        tries[what] = task.rewards.try_each(row, [completion] * group_size)
    counted = [name for name, weight in task.rewards.weights.items() if weight]
    failures = [(name, tried[name][1]) for name in counted for tried in tries.values()]
    if failures and all(failure for _, failure in failures):
        name, failure = failures[len(texts) - 1]
        raise UsageError(f"the reward {name} fails on the first prompt, so nothing is sampled: {failure}")
    return {what: {name: failure or value for name, (value, failure) in tried.items()} for what, tried in tries.items()}


def answer_of(row: Example) -> str | None:
    """Returns a row's own answer as a completion: its columns "solution" and "answer". None: it has neither."""
    parts = [str(row[column]) for column in ("solution", "answer") if row.get(column) is not None]
    return "\n#### ".join(parts) if parts else None


def apply_memory_plan(
    options: Options, models: Models, task: Task, engine: EngineOptions = EngineOptions()
) -> tuple[Options, Models, Plan]:
    """Chooses pieces and remat by the memory of a device, and rotations by the longest text.

    The choice, with the dtype, becomes part of the options in the run's config.json. So a resumed run uses it too, even
    on a machine with different memory.

    Args:
      options: The options of the run.
      models: The policy, and a teacher if there is one.
      task: Supplies the prompts.
      engine: A server that samples instead of this process. Default: no server.

    Returns:
      The options and the models with the choice applied, and the plan.

    Raises:
      UsageError: Nothing fits. The message names options that would.
    """
    config, width = options.train, task.prompts(0).tokens.width
    longest = width + config.sampling.completion_width
    models = {role: for_texts(model, longest) for role, model in models.items()}
    policy, devices = models["policy"], devices_of(config)
    shape = shape_of(options.train, options.model, width, shards=num_shards(devices))
    if engine.engine and config.sampling.staleness:  # servers sample with copies of the parameters
        shape = shape._replace(copies=shape.copies + 1 + config.sampling.staleness)
    for scorer in (model.config for role, model in models.items() if role != "policy"):
        from grpo_jax.rl.distillation import output_bytes  # loaded only with a teacher

        shape = shape._replace(scorer=scorer, token_bytes=shape.token_bytes + output_bytes(config, scorer))
    shape, sampler = divide_shape(policy.config, shape, config, devices, sampling_devices(config))
    count = min(size(devices) + config.num_sampler_devices, jax.local_device_count())
    limits = gather("the memory of a device", memory_limit(count))
    plan = choose(policy.config, shape, min(limits), remat=options.model.remat, sampler=sampler)
    options = with_options(options, dtype=plan.model.dtype, **plan.options)
    return options, {**models, "policy": policy._replace(config=plan.model)}, plan


def rate_warning(options: RunOptions, pretrained: Pretrained) -> dict[str, str]:
    """Returns a warning if the learning rate is ten times off the rate that trained models of this size.

    Args:
      options: The options of the run.
      pretrained: The policy.
    """
    optimizer, count = options.train.optimizer, num_params(pretrained.config)
    full, lora = next(rates for most, rates in RATES.items() if count <= most)
    usual, kind = (lora, "LoRA") if options.model.lora_rank else (full, "full training")
    rate = optimizer.learning_rate
    if usual is None or optimizer.optimizer not in OPTIMIZERS or max(rate / usual, usual / rate) < 9.99:
        return {}
    return {
        "rate": f"learning_rate is {rate:.2g}, but {usual:.0e} trained models of about {count / 1e6:.2g} million "
        f"parameters by {kind}: set it nearer to that, or see docs/hyperparameters.md"
    }


def begin(run: RunFolder, prepared: Prepared[Any], *, chat: bool | None = None) -> None:
    """Writes the description of the models into a run's folder, and prints the memory plan.

    Args:
      run: The folder of a new or resumed run.
      prepared: The result of `prepare`.
      chat: True if prompts are chat messages, as in `keep_description`.

    Raises:
      UsageError: The run is resumed, and files of its models have changed.
    """
    plan, policy = prepared.plan, prepared.models["policy"]
    run.say(str(plan))
    if not plan.fits:
        run.warn_once("plan", f"{plan}: that is an estimate, but the run may run out of memory")
    group_tokens = prepared.programs.sampler.group_tokens
    if group_tokens and len(widths := prepared.task.heldout.tokens.batch_widths(group_tokens)) > 1:
        words = ", ".join(map(str, widths))
        run.say(f"prompts are sampled at widths of {words} tokens; the first step of each width compiles a program")
    keep_description(run, prepared.models, prepared.options.model, chat)
    width = prepared.task.heldout.tokens.width + prepared.programs.config.sampling.completion_width
    run.warn(length_warning(width, policy.config.max_position_embeddings) | rate_warning(prepared.options, policy))
