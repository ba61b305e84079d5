"""Checks that options work together. Ranges of single options are declared by their types.

A check yields a sentence for each conflict. The first sentence is raised as a `UsageError`.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from grpo_jax.config import CONSTANTS, GRPOConfig, LossConfig, MeshConfig, PPOConfig, preset_of, run_of
from grpo_jax.errors import UsageError
from grpo_jax.options import FLOAT32, check_ranges, options_of

Sentences = Iterator[str]


def validate(config: GRPOConfig | PPOConfig, *, num_devices: int = 1) -> None:
    """Raises if options do not work together, before anything is compiled.

    Args:
      config: The configuration of the run.
      num_devices: The number of devices over which prompts are sharded.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    check_ranges(config)
    run = run_of(config)
    sentences = chain(
        config.conflicts(),
        _constants(run.loss),
        _steps(run, num_devices),
        _sampling(run, compares_groups=isinstance(config, GRPOConfig) and run.needs_rewards),
        _kl(run),
        _advantages(run),
    )
    for sentence in sentences:
        raise UsageError(sentence)


def validate_mesh(config: MeshConfig) -> None:
    """Raises if the options of a mesh do not work together.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    check_ranges(config)
    if config.parallel == "pmap" and config.fsdp * config.tensor > 1:
        raise UsageError(
            f"fsdp is {config.fsdp} and tensor is {config.tensor}, but pmap divides nothing: set parallel to mesh"
        )


# Options that do something only if another option does not have the value that turns it off.
NEEDS: Mapping[str, tuple[str, Any]] = {
    **dict.fromkeys(("lora_alpha", "lora_targets"), ("lora_rank", 0)),
    **dict.fromkeys(("engine_kind", "engine_timeout", "engine_folder"), ("engine", "")),
    **dict.fromkeys(("keep_best", "patience"), ("eval_every", 0)),
    "tools": ("max_turns", 1),
    "curriculum_bound": ("curriculum", 0),
}


def check_effects(options: Any) -> None:
    """Raises if an option is set that has no effect without another.

    Args:
      options: A dataclass whose fields are options or dataclasses of options, all with defaults.

    Raises:
      UsageError: An option has no effect. The message names the option that it needs.
    """
    values, defaults = options_of(options), options_of(type(options)())
    for name, (owner, off) in NEEDS.items():
        if name in values and values[name] != defaults[name] and values[owner] == off:
            raise UsageError(f"{name} has no effect while {owner} is {off!r}: set {owner}, or leave {name} out")


def check_models(config: GRPOConfig, roles: Collection[str]) -> None:
    """Raises if options need a frozen model that is not loaded.

    Args:
      config: The configuration of the run.
      roles: The roles of the loaded models.

    Raises:
      UsageError: A model is missing. The message names its role.
    """
    for role in config.frozen_models.keys() - {*roles}:
        raise UsageError(f"the options need a {role}: name a model with the same tokenizer as {role}")


def _constants(loss: LossConfig) -> Sentences:
    published = preset_of(loss.preset)
    for name in CONSTANTS:
        value, number = getattr(loss, name), published.constants.get(name)
        if value is not None and number is None and not (name == "delta" and published.takes_delta):
            yield f"{name} is {value}, but preset {loss.preset} has no such constant: leave it out"
        if value is None and number is not None:
            yield f"{name} is None, but preset {loss.preset} needs it: {number} is its own"
    if loss.epsilon_low is not None and loss.epsilon_low > 1 and not published.bounds_log_ratio:
        yield f"epsilon_low is {loss.epsilon_low}: a ratio is at least 0, so set it to at most 1, which is no bound"
    if loss.delta is not None and loss.epsilon_high is not None and loss.delta <= 1 + loss.epsilon_high:
        yield f"delta is {loss.delta}: it must be above 1 + epsilon_high ({loss.epsilon_high}), or it is the clip"


def _steps(config: GRPOConfig, num_devices: int) -> Sentences:
    steps, profiled, staleness = config.steps, config.logging.profile_steps, config.sampling.staleness
    if profiled and steps <= 2:
        yield f"profile_steps is {profiled}, but the first two of {steps} steps are not recorded: set steps above 2"
    if staleness and staleness >= steps:
        yield f"staleness is {staleness}, and steps is {steps}, so the start would sample all: set it below steps"
    options, num_prompts = config.optimizer, config.sampling.num_prompts
    pieces = options.minibatches * (options.microbatches or 1) * num_devices
    if num_prompts % pieces:
        product = f"minibatches x microbatches x devices / tensor, {pieces}"
        yield f"num_prompts is {num_prompts}: it must be a multiple of {product}"
    if not config.loss.objective.has_ratio and options.epochs * options.minibatches > 1:
        yield f"preset {config.loss.preset} has no ratio, so it can use a rollout once: set epochs and minibatches to 1"


def _sampling(config: GRPOConfig, *, compares_groups: bool) -> Sentences:
    options, least = config.sampling, config.loss.objective.min_group_size
    if compares_groups and options.group_size < least:
        preset = config.loss.preset
        yield f"group_size is {options.group_size}: preset {preset} compares completions, so set it to at least {least}"
    tokens = options.num_prompts * options.group_size * options.max_tokens
    if tokens >= 2**31:
        yield f"num_prompts x group_size x max_tokens is {tokens}: a rollout has less than 2^31 tokens, so lower one"
    hottest = options.temperature + options.temperature_spread
    if not (hottest > 0 and FLOAT32.contains(hottest)):
        yield f"temperature_spread is {options.temperature_spread}: temperature plus this must be above 0, and finite"
    if options.filter_metric and options.max_rollouts == 1 and not options.curriculum:
        yield f'filter_metric "{options.filter_metric}" needs dynamic sampling: leave it out, or raise max_rollouts'
    for name, value, off in (("staleness", options.staleness, 0), ("max_rollouts", options.max_rollouts, 1)):
        if options.curriculum and value != off:
            yield f"curriculum draws prompts by the rewards of all steps before: leave it out, or set {name} to {off}"


def _kl(config: GRPOConfig) -> Sentences:
    loss, options = config.loss, config.reference
    in_loss = loss.kl_coef > 0 and not loss.kl_in_reward
    in_reward = loss.kl_coef > 0 and loss.kl_in_reward
    if loss.divergence != "preset" and not in_loss:
        yield f"divergence {loss.divergence} is a term of the loss: set kl_coef above 0 and kl_in_reward to False"
    if loss.kl_bias_correction and not (in_loss and loss.divergence == "preset"):
        yield (
            "kl_bias_correction weighs a KL in the loss that is of sampled tokens: set kl_coef above 0, kl_in_reward "
            'to False and divergence to "preset"'
        )
    if loss.advantages_of != "sum" and in_reward:
        yield (
            f"preset {loss.preset} takes its KL off the sum of the rewards, but advantages_of is {loss.advantages_of}: "
            "set kl_coef to 0, or kl_in_reward to False"
        )
    completions = config.sampling.num_prompts * config.sampling.group_size
    if options.kl_target is not None and not in_reward:
        yield f"kl_target is {options.kl_target}: it steers a KL in the reward: set kl_in_reward, and kl_coef above 0"
    if options.kl_target is not None and options.kl_horizon < completions:
        yield f"kl_horizon is {options.kl_horizon}: it must be at least the completions of a step ({completions})"
    if options.ref_sync_steps > 0 and loss.kl_coef == 0:
        yield f"ref_sync_steps is {options.ref_sync_steps}, but there is no reference: set kl_coef above 0"
    if options.ref_sync_steps >= config.steps:
        yield f"ref_sync_steps is {options.ref_sync_steps}: it must be below steps ({config.steps})"
    if options.ref_mixup_alpha != 1 and options.ref_sync_steps == 0:
        yield f"ref_mixup_alpha is {options.ref_mixup_alpha}, but the reference never moves: set ref_sync_steps above 0"


def _advantages(config: GRPOConfig) -> Sentences:
    loss, sampling = config.loss, config.sampling
    for name in config.token_weights:
        # Every token's gradient passes through the one ratio, so that the weight of a token would not reach it.
        if loss.objective.per_completion:
            yield (
                f"preset {loss.preset} has one ratio a completion, but {name} gives each token a weight of its own: "
                "leave it out, or take grpo, dapo or another with ratios of tokens"
            )
    if loss.advantages_of == "components" and sampling.max_rollouts > 1:
        yield (
            f"max_rollouts is {sampling.max_rollouts}, but dynamic sampling looks at one reward, while advantages_of "
            '"components" learns from each: set max_rollouts to 1, or advantages_of to "sum"'
        )
    already = f"preset {loss.preset} takes its ratio against the sampler already"
    if loss.correction != "none" and loss.objective.ratio_to_sampler:
        yield f"correction {loss.correction} compares the sampler with the trainer, but {already}: leave it out"
    if loss.old_logprobs == "sampler" and loss.objective.ratio_to_sampler:
        yield f"{already}: leave old_logprobs out"
    if loss.old_logprobs == "sampler" and loss.correction != "none":
        yield f"correction {loss.correction} weighs the sampler, but old_logprobs are its own: leave one of them out"
    if loss.correction == "geometric" and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
        yield (
            "correction geometric drops all completions when top_k, top_p or min_p change their probabilities: leave "
            "these out, or take another correction"
        )
