"""Options of a training run, and their checks."""

import dataclasses
import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jax.numpy as jnp

from grpo_jax.data.text import Overlong
from grpo_jax.errors import UsageError, shown
from grpo_jax.functional.numerics import is_zero
from grpo_jax.functional.policy_gradient import gmpo_term, reinforce_term
from grpo_jax.functional.presets import PRESETS, Objective, check
from grpo_jax.models.config import AttentionKind, Dtype, Router
from grpo_jax.models.lora import TARGETS, Target
from grpo_jax.models.params import Quantize

Preset = Literal[
    "grpo",
    "rank",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "companion_post",
    "introduction_post",
    "introduction_post_rank",
    "gmpo",
    "sapo",
    "dppo",
    "luspo",
    "vespo",
    "opo",
    "gpg",
    "max_rl",
    "lite_ppo",
    "pass_at_k",
    "bnpo",
]

Divergence = Literal["preset", "full", "reverse"]
AdvantagesOf = Literal["sum", "components", "turns", "spans"]
Correction = Literal["none", "token", "sequence", "icepop", "geometric"]
OldLogprobs = Literal["trainer", "sampler"]
Distillation = Literal["none", "reverse_kl", "forward_kl", "jsd", "k1"]
Decay = Literal["none", "linear", "cosine"]
Parallel = Literal["auto", "pmap", "mesh"]
PlannedRemat = Literal["auto", "none", "layer", "offload"]

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


@dataclass(frozen=True)
class ModelOptions:
    """Which pretrained model, and how it is computed and trained."""

    model: str = ""
    """Folder of a Hugging Face model, or its id on the hub."""
    dtype: Dtype = "float32"
    """Dtype of activations and matrix products. bfloat16 is faster on accelerators and rounds to 8 bits."""
    param_dtype: Dtype = "float32"
    """Dtype of the parameters. bfloat16 halves the memory of LoRA's frozen ones; trained parameters need float32."""
    quantize: Quantize = "none"
    """How LoRA's frozen projections are stored. int8: in 8 bits a weight, with one scale for each output. nf4: in 4.25
    bits, with one scale for 64 weights (QLoRA, 2305.14314). A layer is dequantised where it is used. none: as the other
    parameters. Needs lora_rank."""
    remat: PlannedRemat = "auto"
    """What the backward pass computes again to save memory. none: norms, rotations and attention's scores. layer: whole
    layers, from what goes into each. offload: the same, and what goes in waits in the host's memory. That gains nothing
    on a CPU. Results differ by rounding alone. auto: layer where the memory of the device asks for it, in runs of GRPO
    and PPO; else none."""
    attention: AttentionKind = "auto"
    """shared: plain JAX, for any device. xla, cudnn: jax.nn.dot_product_attention; cudnn is flash attention, for
    bfloat16 on NVIDIA GPUs. They differ by rounding. auto: cudnn where it can be used, else shared."""
    router: Router = "trained"
    """For models with experts (Mixtral, Qwen3-MoE). trained: routers learn with all other parameters. frozen: they do
    not. Under LoRA they never do."""
    lora_rank: int = 0
    """Rank of LoRA adapters, which are then all that is trained; 0: all parameters are trained."""
    lora_alpha: float = 16.0
    """The adapters' product is scaled by alpha / rank."""
    lora_targets: tuple[Target, ...] = TARGETS
    """Projections that get adapters."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens (P); None: what max_tokens leaves of the length that the model was trained on."""
    overlong: Overlong = "drop"
    """drop: longer prompts are left out. truncate: they lose their beginning. The run says how many."""


@dataclass(frozen=True)
class EngineOptions:
    """A server that samples in place of this process."""

    engine: str = ""
    """Address of a server with OpenAI's /v1/completions, such as http://localhost:8000. Empty: this process samples."""
    engine_kind: Literal["vllm", "sglang"] = "vllm"
    """Which server it is: each is told to load parameters by requests of its own."""
    engine_timeout: float = 300.0
    """Seconds that one answer may take. A server that has not answered for as long ends the run, which is saved."""
    engine_folder: str = ""
    """Folder through which the server gets the parameters. It has to see this folder under the same path. Empty: a
    temporary one of this machine."""


@dataclass(frozen=True)
class SamplingConfig:
    """How a step samples completions."""

    num_prompts: int = 32
    """Prompts of a rollout."""
    group_size: int = 8
    """Completions of each prompt (G)."""
    max_tokens: int = 64
    """Longest completion, in tokens, its ending token included (T)."""
    max_turns: int = 1
    """Turns of an episode at most, where the task has an environment; max_tokens are then those of all turns."""
    environment_tokens: int = 0
    """Tokens of the environment at most, in all its replies of an episode."""
    temperature: float = 1.0
    """Sampling temperature. Log-probabilities are taken after it."""
    temperature_spread: float = 0.0
    """Completion i of G is sampled at temperature + spread * i / G."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities add up to this; 1 for all."""
    min_p: float = 0.0
    """Sample among tokens with at least this share of the largest probability; 0 for all."""
    max_rollouts: int = 1
    """Dynamic sampling (DAPO, with 10): a step samples up to this many rollouts, until num_prompts groups have rewards
    that differ. If they are too few, groups with equal rewards fill up the batch. 1: every group is used."""
    filter_metric: str = ""
    """The reward that dynamic sampling compares; empty: the weighted sum."""
    staleness: int = 0
    """Completions are sampled by the policy of this many steps before, so the next step is sampled while graders work
    on this one. 0: by the current policy. That many rollouts wait for their step. `correction` weighs the difference;
    without one the loss takes the completions for the policy's own."""

    @property
    def row_tokens(self) -> int:
        """Tokens that a completion has room for, those of an environment included."""
        return self.max_tokens + self.environment_tokens


@dataclass(frozen=True)
class LossConfig:
    """The loss: a published method, and its numbers."""

    preset: Preset = "grpo"
    """Published method: advantage, ratio, surrogate, aggregation and KL. It also sets the method's numbers; other
    options then replace them."""
    kl_coef: float = 0.04
    """Weight β of the KL divergence from the reference: the start, unless ref_sync_steps moves it. 0: there is none."""
    epsilon_low: float | None = 0.2
    """How far below 1 the ratio may go; None: the preset has no such constant."""
    epsilon_high: float | None = 0.2
    """How far above 1 the ratio may go; None: the preset has no such constant."""
    delta: float | None = None
    """Largest ratio for a negative advantage, above 1 + epsilon_high (4 in INTELLECT-2, 2505.07291). None: no
    bound."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_in_reward: bool = False
    """True: the KL is subtracted from the reward (1909.08593, InstructGPT). False: the preset's divergence, k3 in all
    presets, is added to the loss."""
    kl_bias_correction: bool = False
    """Weight the KL in the loss by the ratio, so that its gradient is also unbiased after the first update of a rollout
    (DeepSeek-V3.2, 2512.02556)."""
    divergence: Divergence = "preset"
    """KL divergence in the loss. preset: the preset's, of sampled tokens. full: KL(π ‖ π_ref) of the whole vocabulary.
    reverse: KL(π_ref ‖ π), elsewhere called forward. Both of these run the reference again in every update."""
    advantages_of: AdvantagesOf = "sum"
    """sum: the preset's advantage of the weighted sum of the rewards. components: each reward is standardised in its
    group; the results are added with the weights and whitened over the rollout (GDPO, 2601.05242). Then the scale of
    one reward does not hide another, and the preset's own advantage is not used. turns: for each turn of an
    episode, the reward from this turn on, standardised among the episodes of its group that have that turn. spans: the
    same for the parts of a completion, where a reward returns (start, end, reward) for each."""
    old_logprobs: OldLogprobs = "trainer"
    """The denominator of the ratio. trainer: the update's own pass, before the first step. sampler: the probabilities
    reported when the completions were sampled, by an earlier policy with `staleness`."""
    correction: Correction = "none"
    """Importance weights that multiply advantages. w is the trainer's probability over the sampler's. token: min(w, 2)
    of tokens. sequence: min(w, 3) of completions. icepop: w of tokens where it is in [0.5, 5], else 0. geometric: 1 for
    completions whose mean log w is within 0.001 of 0, else 0. With top-k, top-p or min-p, the sampler's probability is
    the one after truncation."""
    off_policy_threshold: float | None = None
    """Leave out completions with a negative advantage that the policy has moved away from: the mean over their tokens
    of log(sampler's / trainer's probability) is above this (DeepSeek-V3.2, 2512.02556). None: leave out none."""
    top_entropy: float = 1.0
    """Share of the tokens that are trained on, those with the highest entropy (0.2 in 2506.01939); 1: all."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss. They still count in the advantages of their group."""

    @property
    def objective(self) -> Objective:
        """The preset, with these numbers in place of its own."""
        return PRESETS[self.preset]._replace(
            constants=self.constants,
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
            kl_in_reward=self.kl_in_reward,
            kl_bias_correction=self.kl_bias_correction,
        )

    @property
    def constants(self) -> Mapping[str, float]:
        """Those of the preset's term, by name, with these numbers in place of its own."""
        own = {name: getattr(self, name) for name in ("epsilon_low", "epsilon_high", "delta")}
        return {**PRESETS[self.preset].constants} | {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class DistillationConfig:
    """How much is learned from a teacher, and how much from rewards. For GRPO alone."""

    distillation: Distillation = "none"
    """What the policy π learns from a teacher π_T at each token that it sampled. reverse_kl: KL(π ‖ π_T) over the whole
    vocabulary is added to the loss. forward_kl: KL(π_T ‖ π). jsd: the generalised Jensen-Shannon divergence (GKD,
    2306.13649). k1: log π_T - log π of the sampled token is added to its advantage (Thinking Machines 2025). none:
    there is no teacher."""
    distillation_coef: float = 1.0
    """Weight of this divergence in the loss, or of k1 in the advantage."""
    distillation_top_k: int = 0
    """Compute the divergence over the teacher's k likeliest tokens, with all others counted as one; 0: over the whole
    vocabulary. Not with k1."""
    distillation_beta: float = 0.5
    """For jsd alone: weight β of the teacher in its mixture. Near 0 it is like forward_kl, near 1 like reverse_kl."""
    reward_coef: float = 1.0
    """With a teacher: weight of the advantages that rewards give. 0: completions of training are not graded."""


@dataclass(frozen=True)
class ReferenceConfig:
    """How the KL's reference moves, and how the weight of the KL is controlled."""

    ref_sync_steps: int = 0
    """The reference moves to the policy every so many steps, as in the iterations of GRPO's paper. 0: it stays the
    start."""
    ref_mixup_alpha: float = 1.0
    """How far it moves: 1 sets it to the policy; less makes a moving average (0.6 in TR-DPO, 2404.09656)."""
    kl_target: float | None = None
    """KL divergence of a completion, in nats, that kl_coef is adapted to reach (6 in 1909.08593). It needs a KL in the
    reward. None: kl_coef is constant."""
    kl_horizon: int = 10_000
    """Completions over which an adapted kl_coef changes by a fifth at most; as in TRL and verl."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How the parameters are updated."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay: Decay = "none"
    """How the learning rate falls to 0 between warm-up and end."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this one."""
    adam_epsilon: float = 1e-8
    """Added to the root of AdamW's mean square of each parameter's gradients, which its step is divided by. A larger
    one keeps parameters whose gradients are small from steps that are mostly noise."""
    epochs: int = 1
    """Passes over each rollout (mu)."""
    minibatches: int = 1
    """Optimizer steps of a pass; prompts are shuffled among them."""
    microbatches: int = 0
    """Pieces that a minibatch is computed in, to save memory. Results differ by rounding alone. 0: pieces of
    `piece_tokens`, in which the padding of completions is left out where that saves work."""
    piece_tokens: int = 0
    """Tokens of a piece at most on each device, prompts and padding included, or one prompt with its completions if
    that is more. A minibatch with up to twice as many is one piece. 0: 768 on a CPU and 16,384 elsewhere, or as many as
    memory allows."""
    max_skipped: int = 5
    """The run stops after this many steps in a row with gradients that are not finite. Such a step is skipped, and its
    batch is written to the run's folder."""


@dataclass(frozen=True)
class LoggingConfig:
    """What a run writes, and how often it evaluates."""

    eval_every: int = 0
    """Steps between held-out evaluations; 0 for only before and after."""
    eval_samples: int | None = None
    """Completions sampled of each held-out prompt, besides a greedy one; None: group_size - 1, one group."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 for only at the end."""
    save_every_minutes: float = 0.0
    """A checkpoint also after a step that ends so many minutes after the last one; 0: none."""
    keep_checkpoints: int = 2
    """Checkpoints kept of each phase."""
    rollouts_every: int = 10
    """Steps between rollouts written to rollouts.jsonl; 0 for none."""
    profile_steps: int = 0
    """Steps recorded by JAX's profiler, from the third step of a call on: what devices and host do at each moment. The
    profile is in the folder `profile` of the run, for ui.perfetto.dev or XProf. 0: none."""


@dataclass(frozen=True)
class MeshConfig:
    """How devices share the work. A mesh has `devices` / (fsdp x tensor) copies of the parameters, each for prompts of
    its own."""

    parallel: Parallel = "auto"
    """pmap: every device holds all parameters. mesh: parameters, optimizer and reference are divided among devices, for
    models larger than one device. auto: mesh if fsdp or tensor is above 1."""
    fsdp: int = 1
    """Number of devices that each parameter is divided among. Prompts are spread over them too. A layer's parameters
    are gathered while the layer is computed."""
    tensor: int = 1
    """Number of devices that heads and features of the MLP are divided among; each computes its own. The number of
    key-value heads has to be a multiple of it."""


@dataclass(frozen=True)
class GRPOConfig:
    """A GRPO run. In Python `recipe` makes one, and `with_options` changes fields of any group."""

    steps: int = 100
    """Rollouts, each followed by its updates."""
    seed: int = 0
    """Random seed of prompts, sampling and shuffling."""
    devices: int = 1
    """Devices to spread prompts over; 0 for all."""
    mesh: MeshConfig = MeshConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    distillation: DistillationConfig = DistillationConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    logging: LoggingConfig = LoggingConfig()


# ---- options by their flat names


def with_options(config: Config, **options: Any) -> Config:
    """A config with some of its fields replaced, in whichever group they are.

    Args:
      config: a dataclass whose fields are options or dataclasses of options.
      options: name -> value, which may be traced. `preset` brings the numbers of its recipe, which the others then
        replace.

    Raises:
      UsageError: there is no such option or preset.

    Examples:
      >>> with_options(GRPOConfig(), preset="dapo", group_size=16).loss.epsilon_high
      0.28
    """
    _check_known(options, options_of(config))
    if "preset" in options:
        options = _preset_numbers(options["preset"]) | options
    return _replaced(config, options)


def options_of(config: Any) -> dict[str, Any]:
    """The options of a config, of all its groups, by name.

    Examples:
      >>> options_of(CriticConfig())["gamma"]
      1.0
    """
    options: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        options |= options_of(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return options


def option_types(config_class: type) -> dict[str, Any]:
    """The types of a config's options, by name."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(config_class).items():
        types |= option_types(hint) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else {name: hint}
    return types


def from_json(default: Config, saved: Mapping[str, Any]) -> Config:
    """The config that was written as JSON by `dataclasses.asdict`.

    Args:
      default: a config of the same class. Options that were not written are taken from it.
      saved: what was read from the JSON.

    Raises:
      UsageError: it holds an option that the class does not have, or a value of another type.
    """
    options, types = flattened(saved), option_types(type(default))
    _check_known(options, types)
    for name, value in options.items():
        if not fits(value, types[name]):
            raise UsageError(f"{name} is {shown(value)} in the file: that is not of its type")
        options[name] = Path(value) if types[name] is Path else tuple(value) if isinstance(value, list) else value
    return _replaced(default, options)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of a JSON file is of a type, as type hints write it."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(fits(value, arg) for arg in args)
    if origin in (tuple, list) or hint is tuple:
        return isinstance(value, list) and all(fits(x, args[0]) for x in value if args)
    if origin is dict:
        return isinstance(value, dict) and all(fits(x, args[1]) for x in value.values())
    if hint is Path:
        return isinstance(value, str)
    if hint is float:
        return isinstance(value, float) or (fits(value, int) and abs(value) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of all groups of a config.json, by name.

    Raises:
      UsageError: an option is in two groups.
    """
    flat: dict[str, Any] = {}
    for name, value in options.items():
        part = flattened(value) if isinstance(value, Mapping) else {name: value}
        for twice in flat.keys() & part.keys():
            raise UsageError(f"{twice} is given twice: leave one of them out")
        flat |= part
    return flat


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint for somebody who wrote an unknown name: the closest known ones, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 3)
    return f"is it {' or '.join(close)}?" if close else f"they are {', '.join(known)}"


def recipe(preset: str = "grpo", **options: Any) -> GRPOConfig:
    """A published recipe: the numbers of a preset and of how its authors sampled, with some replaced.

    Args:
      preset: of `functional.presets`.
      options: as for `with_options`.

    Raises:
      UsageError: there is no such option or preset.

    Examples:
      >>> recipe("companion_post", steps=10).sampling.temperature
      0.7
    """
    return with_options(GRPOConfig(), preset=preset, **options)


# How a preset's authors sampled, where that is part of the method.
RECIPES: dict[str, dict[str, Any]] = {
    "companion_post": {"temperature": 0.7, "temperature_spread": 0.3},
    "introduction_post": {"group_size": 12},
    "introduction_post_rank": {"group_size": 12},
}


def _preset_numbers(preset: str) -> dict[str, Any]:
    """The options that naming a preset sets, by name."""
    if preset not in PRESETS:
        raise UsageError(f"there is no preset {preset}: {suggestion(preset, PRESETS)}")
    published = PRESETS[preset]
    numbers = {
        "kl_coef": published.kl_coef,
        **{name: published.constants.get(name) for name in ("epsilon_low", "epsilon_high", "delta")},
        "entropy_coef": published.entropy_coef,
        "kl_in_reward": published.kl_in_reward,
        "kl_bias_correction": published.kl_bias_correction,
    }
    return numbers | RECIPES.get(preset, {})


def _check_known(options: Iterable[str], known: Iterable[str]) -> None:
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option {name}: {suggestion(name, known)}")


def _replaced(config: Config, options: Mapping[str, Any]) -> Config:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _replaced(value, options)  # type: ignore[type-var]
        elif field.name in options:
            changes[field.name] = options[field.name]
    return dataclasses.replace(config, **changes)


# ---- PPO


@dataclass(frozen=True)
class CriticConfig:
    """Options of PPO that a GRPO run does not have: the critic, and advantages of tokens."""

    critic: Literal["own", "shared"] = "own"
    """own: a critic as large as the policy. shared: a head on the policy's decoder. One forward pass then serves both,
    and value_coef weights the critic's part of the decoder's gradient."""
    gamma: float = 1.0
    """Discount for each token. 1: the length of a completion does not change its value."""
    gae_lambda: float = 0.95
    """λ of generalized advantages: 1 relies on rewards, 0 on the critic; 0.95 in PPO's paper."""
    gae_steps: int | None = None
    """Tokens that an advantage looks ahead (K); None: all."""
    bootstrap_truncated: bool = False
    """Add the critic's value after the last token of a truncated completion, as if it went on. Only where the reward of
    every truncated completion is 0: otherwise values grow without bound."""
    whiten: bool = True
    """Scale advantages to mean 0 and deviation 1 over the tokens of a rollout, as in 1909.08593."""
    value_coef: float = 0.5
    """Weight of the critic's loss; 0.5 in OpenAI's baselines. It matters for a shared critic; an own critic, whose
    gradient is clipped separately, hardly depends on it."""
    value_clip: float | None = 0.2
    """How far a value may move from its value at sampling, in units of the reward, as in PPO's own code. None: no
    bound."""
    critic_learning_rate: float = 1e-5
    """Peak learning rate of the critic's AdamW; ten times the policy's, as in verl. Warm-up, decay, weight decay and
    max_grad_norm are the policy's."""


@dataclass(frozen=True)
class PPOConfig:
    """A PPO run: the loss of a preset, with a critic's advantages of tokens in place of those of groups.

    Lite PPO's loss is that of PPO: ratios of tokens clipped at 0.2 (1707.06347), and the mean over tokens. A critic
    needs no second completion of a prompt. The KL is in the reward, at the 0.02 of InstructGPT (2203.02155). Another
    preset brings its own KL, or none.
    """

    run: GRPOConfig = recipe("lite_ppo", group_size=1, kl_coef=0.02, kl_in_reward=True)
    critic: CriticConfig = CriticConfig()


def run_of(config: GRPOConfig | PPOConfig) -> GRPOConfig:
    """The options that runs of both methods have, as a `GRPOConfig`."""
    return config.run if isinstance(config, PPOConfig) else config


# ---- refusals


def validate(config: GRPOConfig, *, num_devices: int = 1, compares_groups: bool = True) -> None:
    """Refuses what cannot work, before anything is compiled.

    Args:
      config: the run.
      num_devices: devices that prompts are spread over.
      compares_groups: whether advantages compare the completions of a group, so that a group of one is refused.

    Raises:
      UsageError: one sentence that says what to change.
    """
    validate_sizes(config)
    _require_at_least(config, 1, "steps")
    validate_seed(config.seed)
    validate_mesh(config.mesh)
    validate_logging(config.logging)
    _require(
        not config.logging.profile_steps or config.steps > 2,
        f"profile_steps is {config.logging.profile_steps}, but steps is {config.steps} and the first two are not "
        "recorded: set steps to 3 or more",
    )
    validate_distillation(config)
    compares_groups = compares_groups and not is_zero(config.distillation.reward_coef)
    validate_sampling(config.sampling, compares_groups=compares_groups)
    _require(
        config.sampling.staleness < config.steps or not config.sampling.staleness,
        f"staleness is {config.sampling.staleness}, and steps is {config.steps}, so the start would sample all "
        "completions: set staleness below steps",
    )
    validate_loss(config, compares_groups=compares_groups)
    validate_reference(config)
    validate_optimizer(config, num_devices=num_devices)


def validate_ppo(config: PPOConfig, *, num_devices: int = 1) -> None:
    """`validate` for PPO.

    Args:
      config: the run.
      num_devices: devices that prompts are spread over.

    Raises:
      UsageError: one sentence that says what to change.
    """
    run = config.run
    validate_sizes(config)
    _require(
        run.loss.advantages_of == "sum",
        f'advantages_of "{run.loss.advantages_of}" is for groups, but PPO has a critic for the sum of the rewards: set '
        'it to "sum"',
    )
    _require(
        run.distillation.distillation == "none",
        f"distillation {run.distillation.distillation} is of GRPO alone: leave it out, or take --method grpo",
    )
    validate(run, num_devices=num_devices, compares_groups=False)
    validate_critic(config.critic)
    _require(
        run.sampling.max_rollouts == 1 or run.sampling.group_size >= 2,
        f"max_rollouts is {run.sampling.max_rollouts}, but dynamic sampling compares completions of one prompt: set it "
        "to 1, or group_size to at least 2",
    )
    _require(
        not run.loss.objective.per_completion,
        f"preset {run.loss.preset} has one ratio a completion, but a critic's advantages are of tokens: take lite_ppo, "
        "dapo or another with ratios of tokens",
    )


def validate_sizes(config: Any) -> None:
    """Refuses whole numbers that counters and array sizes cannot hold, as `validate` does."""
    for name, value in options_of(config).items():
        if isinstance(value, int) and name != "seed":
            _require(value < 2**31, f"{name} is {value}: it must be below 2^31")


def validate_seed(seed: int) -> None:
    """Refuses a seed that keys of random numbers cannot hold, as `validate` does."""
    _require(0 <= seed < 2**32, f"seed is {seed}: it must be between 0 and 2^32 - 1")


def validate_mesh(config: MeshConfig) -> None:
    """What devices have nothing to do with."""
    _require_at_least(config, 1, "fsdp", "tensor")
    _require(
        config.parallel != "pmap" or config.fsdp * config.tensor == 1,
        f"fsdp is {config.fsdp} and tensor is {config.tensor}, but parallel is pmap, where every device has all "
        "parameters: set parallel to mesh",
    )


def validate_logging(config: LoggingConfig) -> None:
    """Refuses options of logging that cannot work, as `validate` does."""
    _require_at_least(config, 0, "eval_every", "checkpoint_every", "rollouts_every", "profile_steps")
    _require_at_least(config, 1, "keep_checkpoints")
    validate_minutes(config.save_every_minutes)
    _require(
        config.eval_samples is None or config.eval_samples >= 1,
        f"eval_samples is {config.eval_samples}: it must be at least 1",
    )


def validate_minutes(minutes: float) -> None:
    """Refuses a `save_every_minutes` that cannot work, as `validate` does."""
    _require(0 <= minutes < float("inf"), f"save_every_minutes is {minutes}: it must be at least 0, and finite")


def validate_sampling(config: SamplingConfig, *, compares_groups: bool = True) -> None:
    """Refuses options of sampling that cannot work, as `validate` does."""
    _require_at_least(config, 1, "num_prompts", "max_tokens", "max_rollouts", "max_turns")
    _require_at_least(config, 0, "staleness", "top_k", "environment_tokens")
    _require(
        config.group_size >= 2 or not compares_groups,
        f"group_size is {config.group_size}: advantages compare completions of one prompt, so set it to at least 2",
    )
    _require_at_least(config, 1, "group_size")
    tokens = config.num_prompts * config.group_size * config.max_tokens
    _require(
        tokens < 2**31,
        f"num_prompts x group_size x max_tokens is {tokens}: a rollout has less than 2^31 tokens, so lower one of them",
    )
    _require(
        0 < config.temperature < float("inf") and 0 < config.temperature + config.temperature_spread < float("inf"),
        f"temperature is {config.temperature}, spread {config.temperature_spread}: sampling for training needs "
        "temperatures above 0, and finite",
    )
    _require(0 < config.top_p <= 1, f"top_p is {config.top_p}: it must be above 0 and at most 1")
    _require(0 <= config.min_p <= 1, f"min_p is {config.min_p}: it must be between 0 and 1")
    _require(
        not config.filter_metric or config.max_rollouts > 1,
        f'filter_metric "{config.filter_metric}" needs dynamic sampling: set max_rollouts above 1, or leave it out',
    )


def validate_loss(config: GRPOConfig, *, compares_groups: bool = True) -> None:
    """Refuses options of the loss that cannot work, as `validate` does."""
    loss = config.loss
    _require(loss.preset in PRESETS, f"there is no preset {loss.preset}: {suggestion(loss.preset, PRESETS)}")
    _validate_constants(loss)
    _validate_kl(loss)
    _validate_advantages(config)
    _require(
        loss.off_policy_threshold is None or 0 < loss.off_policy_threshold < float("inf"),
        f"off_policy_threshold is {loss.off_policy_threshold}: it must be above 0, or left out",
    )
    _require(
        0 < loss.top_entropy <= 1, f"top_entropy is {loss.top_entropy}: it must be above 0 and at most 1, which is all"
    )
    try:
        # A critic's advantages take the place of those of groups.
        check(loss.objective, **({"group_size": config.sampling.group_size} if compares_groups else {}))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _validate_constants(loss: LossConfig) -> None:
    """Of the preset's term."""
    published = _preset_numbers(loss.preset)
    for name in ("epsilon_low", "epsilon_high"):
        value, own = getattr(loss, name), published[name]
        _require(
            value is None or own is not None,
            f"{name} is {value}, but preset {loss.preset} has no such constant: leave it out",
        )
        _require(
            value is not None or own is None, f"{name} is None, but preset {loss.preset} needs it: {own} is its own"
        )
    _require(
        # GMPO clips the logarithm of a ratio, which has no least value.
        loss.epsilon_low is None or loss.epsilon_low <= 1 or PRESETS[loss.preset].term is gmpo_term,
        f"epsilon_low is {loss.epsilon_low}: a ratio is at least 0, so set it to at most 1, which is no clip below",
    )
    _require(
        loss.delta is None or _takes_delta(loss.preset),
        f"delta is {loss.delta}, but preset {loss.preset} has no such constant: leave it out",
    )
    _require(
        loss.delta is None or loss.epsilon_high is None or 1 + loss.epsilon_high < loss.delta < float("inf"),
        f"delta is {loss.delta}: it must be above 1 + epsilon_high ({loss.epsilon_high}), or it is the clip",
    )


def _takes_delta(preset: str) -> bool:
    """Whether the term of a preset bounds the ratio of negative advantages, if it is told how far."""
    published, row = PRESETS[preset], jnp.ones((1, 1))
    try:
        published.term(row, row, row[0], row > 0, **{**published.constants, "delta": 1e6})
    except TypeError:
        return False
    return True


def _validate_kl(loss: LossConfig) -> None:
    """Of the loss or of the reward."""
    in_loss = loss.kl_coef > 0 and not loss.kl_in_reward
    _require(
        loss.divergence == "preset" or in_loss,
        f"divergence {loss.divergence} is a term of the loss: set kl_coef above 0 and kl_in_reward to False",
    )
    _require(
        not loss.kl_bias_correction or (in_loss and loss.divergence == "preset"),
        "kl_bias_correction weighs a KL in the loss that is of sampled tokens: set kl_coef above 0, kl_in_reward to "
        'False and divergence to "preset"',
    )
    _require(
        loss.advantages_of == "sum" or not (loss.kl_in_reward and loss.kl_coef > 0),
        f"preset {loss.preset} takes its KL off the sum of the rewards, but advantages_of is {loss.advantages_of}: set "
        "kl_coef to 0, or kl_in_reward to False",
    )


def _validate_advantages(config: GRPOConfig) -> None:
    """What they are of, and what they are corrected for."""
    loss, sampling = config.loss, config.sampling
    weighs_tokens = {
        f'advantages_of "{loss.advantages_of}"': loss.advantages_of in ("turns", "spans"),
        f"top_entropy {loss.top_entropy}": loss.top_entropy < 1,
        f"correction {loss.correction}": loss.correction in ("token", "icepop"),
    }
    for name, is_set in weighs_tokens.items():
        _require(
            # Every token's gradient passes through the one ratio, so that the weight of a token would not reach it.
            not is_set or not loss.objective.per_completion,
            f"preset {loss.preset} has one ratio a completion, but {name} gives each token a weight of its own: leave "
            "it out, or take grpo, dapo or another with ratios of tokens",
        )
    _require(
        loss.advantages_of != "components" or sampling.max_rollouts == 1,
        f"max_rollouts is {sampling.max_rollouts}, but dynamic sampling looks at one reward, while advantages_of "
        '"components" learns from each: set max_rollouts to 1, or advantages_of to "sum"',
    )
    _require(
        loss.correction == "none" or not loss.objective.ratio_to_sampler,
        f"correction {loss.correction} compares the sampler with the trainer, but preset {loss.preset} takes its ratio "
        "against the sampler already: leave it out",
    )
    _require(
        loss.old_logprobs == "trainer" or not loss.objective.ratio_to_sampler,
        f"preset {loss.preset} takes its ratio against the sampler already: leave old_logprobs out",
    )
    _require(
        loss.old_logprobs == "trainer" or loss.correction == "none",
        f"correction {loss.correction} weighs the sampler against old_logprobs, which are the sampler's own: leave one "
        "of them out",
    )
    _require(
        loss.correction != "geometric" or (sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0),
        "correction geometric drops all completions when top_k, top_p or min_p change their probabilities: leave these "
        "out, or take another correction",
    )


def validate_distillation(config: GRPOConfig) -> None:
    """Refuses options of distillation that cannot work, as `validate` does."""
    own, kind = config.distillation, config.distillation.distillation
    if kind == "none":
        for name, value in options_of(DistillationConfig()).items():
            _require(
                getattr(own, name) == value,
                f"{name} is {getattr(own, name)}, but distillation is none: leave it out, or choose reverse_kl, "
                "forward_kl, jsd or k1",
            )
        return
    validate_divergence(own)
    _require(
        0 < own.distillation_coef < float("inf"),
        f"distillation_coef is {own.distillation_coef}: it must be above 0, and finite",
    )
    _require(
        0 <= own.reward_coef < float("inf"), f"reward_coef is {own.reward_coef}: it must be at least 0, and finite"
    )
    _require(
        kind != "k1" or own.distillation_top_k == 0,
        f"distillation_top_k is {own.distillation_top_k}, but k1 looks at the sampled token alone: leave it out, or "
        "set distillation to reverse_kl, forward_kl or jsd",
    )
    _require(
        kind != "k1" or not config.loss.objective.per_completion,
        f"preset {config.loss.preset} has one ratio a completion, but the advantages of distillation k1 are of tokens: "
        "take grpo, dapo or another with ratios of tokens, or set distillation to reverse_kl",
    )
    if is_zero(own.reward_coef):
        _validate_without_rewards(config)


def validate_divergence(config: DistillationConfig) -> None:
    """Refuses constants that the divergence from a teacher cannot have, as `validate` does."""
    kind = config.distillation
    _require_at_least(config, 0, "distillation_top_k")
    _require(
        0 < config.distillation_beta < 1,
        f"distillation_beta is {config.distillation_beta}: it must be between 0 and 1; at the ends take forward_kl or "
        "reverse_kl",
    )
    _require(
        kind == "jsd" or config.distillation_beta == DistillationConfig().distillation_beta,
        f"distillation_beta is {config.distillation_beta}, but {kind} has no mixture: leave it out, or set "
        "distillation to jsd",
    )


def _validate_without_rewards(config: GRPOConfig) -> None:
    """What only changes advantages, or compares rewards."""
    loss, sampling = config.loss, config.sampling
    has_advantages = config.distillation.distillation == "k1"
    unused = {
        "max_rollouts": sampling.max_rollouts > 1,
        "advantages_of": loss.advantages_of != "sum",
        "kl_in_reward": loss.kl_in_reward and loss.kl_coef > 0,
        "top_entropy": loss.top_entropy < 1,
        "correction": loss.correction != "none" and not has_advantages,
        "off_policy_threshold": loss.off_policy_threshold is not None and not has_advantages,
    }
    for name, is_set in unused.items():
        _require(
            not is_set,
            f"reward_coef is 0, so {name} would change nothing: leave it out, or set reward_coef above 0",
        )


def validate_reference(config: GRPOConfig) -> None:
    """Refuses options of the reference that cannot work, as `validate` does."""
    reference, loss = config.reference, config.loss
    _require_at_least(reference, 0, "ref_sync_steps")
    _require(
        reference.kl_target is None
        or (0 < reference.kl_target < float("inf") and loss.kl_in_reward and loss.kl_coef > 0),
        f"kl_target is {reference.kl_target}: it must be above 0 and finite, and steers the kl_coef of a KL in the "
        "reward: set kl_in_reward, as preset rloo does, and a kl_coef above 0 to begin with",
    )
    completions = config.sampling.num_prompts * config.sampling.group_size
    _require(
        reference.kl_horizon >= (1 if reference.kl_target is None else completions),
        f"kl_horizon is {reference.kl_horizon}: it must be at least the completions of a step ({completions}), or 1 "
        "where kl_coef is constant",
    )
    _require(
        reference.ref_sync_steps == 0 or (loss.kl_coef > 0 and reference.ref_sync_steps < config.steps),
        f"ref_sync_steps is {reference.ref_sync_steps}: it must be below steps ({config.steps}), and there is a "
        "reference only with a kl_coef above 0",
    )
    alpha = reference.ref_mixup_alpha
    _require(
        0 < alpha <= 1 and (alpha == 1 or reference.ref_sync_steps > 0),
        f"ref_mixup_alpha is {alpha}: it must be above 0 and at most 1, and needs ref_sync_steps",
    )


def validate_optimizer(config: GRPOConfig, *, num_devices: int = 1) -> None:
    """Refuses options of the optimizer that cannot work, as `validate` does."""
    optimizer, loss = config.optimizer, config.loss
    _require_at_least(optimizer, 1, "epochs", "minibatches", "max_skipped")
    _require_at_least(optimizer, 0, "microbatches", "piece_tokens", "warmup_steps")
    pieces = optimizer.minibatches * (optimizer.microbatches or 1) * num_devices
    _require(
        config.sampling.num_prompts % pieces == 0,
        f"num_prompts ({config.sampling.num_prompts}) must be a multiple of minibatches x microbatches x "
        f"devices / tensor ({pieces})",
    )
    _require(
        0 <= optimizer.weight_decay < float("inf"),
        f"weight_decay is {optimizer.weight_decay}: it must be at least 0, and finite",
    )
    for name in ("learning_rate", "max_grad_norm", "adam_epsilon"):
        value = getattr(optimizer, name)
        _require(
            value > 0 and (value < float("inf") or name == "max_grad_norm"), f"{name} is {value}: it must be above 0"
        )
    _require(
        loss.objective.term is not reinforce_term or optimizer.epochs * optimizer.minibatches == 1,
        f"preset {loss.preset} has no ratio, so it can use a rollout once: set epochs and minibatches to 1",
    )


def validate_critic(config: CriticConfig) -> None:
    """Refuses options of the critic that cannot work, as `validate` does."""
    for name in ("gamma", "gae_lambda"):
        value = getattr(config, name)
        _require(0 <= value <= 1, f"{name} is {value}: it must be between 0 and 1")
    _require(
        config.gae_steps is None or config.gae_steps >= 1, f"gae_steps is {config.gae_steps}: it must be at least 1"
    )
    _require(
        0 < config.value_coef < float("inf"),
        f"value_coef is {config.value_coef}: it must be above 0, or the critic learns nothing",
    )
    _require(
        config.value_clip is None or config.value_clip > 0,
        f"value_clip is {config.value_clip}: it must be above 0, or left out",
    )
    _require(
        0 < config.critic_learning_rate < float("inf"),
        f"critic_learning_rate is {config.critic_learning_rate}: it must be above 0",
    )


def _require_at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        _require(getattr(config, name) >= least, f"{name} is {getattr(config, name)}: it must be at least {least}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
