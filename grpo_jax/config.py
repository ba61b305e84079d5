"""Options of a training run: groups of fields, whose types declare their ranges, and checks that they work together."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from grpo_jax.data.text import Overlong
from grpo_jax.errors import UsageError
from grpo_jax.functional import PRESETS, Objective
from grpo_jax.functional.numerics import constants_of, is_zero
from grpo_jax.functional.presets import CORRECTIONS
from grpo_jax.models.config import AttentionKind, Dtype, Rounding, Router
from grpo_jax.models.params.tree import TARGETS, Quantize, Target
from grpo_jax.options import (
    FLOAT32,
    Bound,
    Config,
    Count,
    Fraction,
    Positive,
    Range,
    Seed,
    Share,
    Size,
    Weight,
    at_least,
    check_known,
    check_ranges,
    options_of,
    replace_options,
)
from grpo_jax.rewards.worker import digest_of_source, look_up_once

if TYPE_CHECKING:
    Preset = str
    Optimizer = Any
else:
    Preset = Literal[tuple(PRESETS)] | str  # a type checker cannot read this; the command line offers these names
    Optimizer = str  # in Python also an optax transformation, or a function from a schedule to one

# Options that a preset sets: fields of `Objective`, and constants that have options of their own.
FIELDS = ("kl_coef", "entropy_coef", "kl_in_reward", "kl_bias_correction")
SHORT = ("epsilon_low", "epsilon_high", "delta")

AdvantagesOf = Literal["sum", "components", "turns", "spans"]
BY_PART = ("turns", "spans")  # values that compare parts of completions
BY_TOKEN = ("token", "icepop", "glm5")  # corrections that weigh each token
Correction = Literal["none", "token", "sequence", "sequence_mask", "icepop", "glm5", "geometric"]
WHOLE = 2**31 - 1  # the `piece_tokens` of one piece for all tokens
BEST_CORRECTION: Correction = "token"  # as docs/results/corrections.md chooses it
Distillation = Literal["none", "reverse_kl", "forward_kl", "jsd", "k1"]
Critic = Literal["none", "own", "shared"]
PlannedRemat = Literal["auto", "none", "layer", "offload"]

# ---- groups of every method


@dataclass(frozen=True)
class ModelOptions:
    """The pretrained model, and how it is computed and trained."""

    model: str = ""
    """Folder of a Hugging Face model, or its id on the hub."""
    dtype: Literal[Dtype, "auto"] = "auto"
    """Dtype of activations and matrix products. bfloat16 rounds to 8 bits. auto: float32 on CPUs and NVIDIA GPUs before
    Ampere, else bfloat16, which is faster."""
    rounding: Rounding = "stochastic"
    """Rounding of trained parameters to bfloat16. stochastic: a share of the weights follows even small updates.
    nearest: small updates first have to add up."""
    param_dtype: Dtype = "float32"
    """Dtype of the parameters. bfloat16 halves the memory of LoRA's frozen parameters; trained parameters need
    float32."""
    quantize: Quantize = "none"
    """Storage of LoRA's frozen projections: int8 takes 8 bits a weight, nf4 (QLoRA) 4.25. Layers are dequantised when
    they are used. Needs lora_rank."""
    remat: PlannedRemat = "auto"
    """Recomputation in the backward pass, to save memory. none: little. layer: whole layers. offload: layers, with
    inputs stored on the host. auto: as memory requires."""
    attention: AttentionKind = "auto"
    """Attention's implementation. shared: plain JAX. xla, cudnn: those of jax.nn. tokamax: that package's kernels.
    auto: cudnn if possible, else shared."""
    router: Router = "trained"
    """Training of the routers in models with experts. LoRA never trains them."""
    lora_rank: Annotated[int, at_least(0)] = 0
    """Rank of LoRA adapters, which are then all that is trained; 0: all parameters are trained."""
    lora_alpha: Positive = 16.0
    """Scale of LoRA: the adapters' product is multiplied by alpha / rank."""
    lora_targets: tuple[Target, ...] = TARGETS
    """Projections that get adapters."""
    max_prompt_tokens: Size | None = None
    """Longest prompt, in tokens (P). None: the longest text that the model was trained on, less max_tokens."""
    overlong: Overlong = "drop"
    """Treatment of longer prompts: drop leaves them out, truncate cuts their text. The run reports how many."""
    chat_template_kwargs: str = ""
    """Variables of the chat template as a JSON object, such as '{"enable_thinking": false}'. Empty: its defaults."""


@dataclass(frozen=True)
class MeshConfig:
    """How devices share the work. A mesh has `devices` / (fsdp x tensor) copies of the parameters, each for other
    prompts."""

    parallel: Literal["auto", "pmap", "mesh"] = "auto"
    """pmap: every device holds all parameters. mesh: devices divide parameters, optimizer and reference. auto: mesh if
    fsdp or tensor is above 1."""
    fsdp: Size = 1
    """Number of devices that share each parameter. Prompts are spread over them too; a layer is gathered while it is
    computed."""
    tensor: Size = 1
    """Number of devices that share the heads and the MLP's features. It must divide the number of key-value heads."""


@dataclass(frozen=True)
class PhaseConfig:
    """Length of a phase, and the devices that it runs on."""

    steps: Size = 100
    """Training steps. In GRPO and PPO each step samples a rollout and updates the policy on it."""
    _: KW_ONLY
    devices: Count = 1
    """Number of devices that share a step; 0: all."""
    mesh: MeshConfig = MeshConfig()

    @property
    def num_sampler_devices(self) -> int:
        """Devices of each host that only sample."""
        return 0


@dataclass(frozen=True)
class AdamWConfig:
    """The optimizer, AdamW by default, and its schedule."""

    learning_rate: Positive = 1e-6
    """Peak learning rate, by size of the model: 4e-4 up to a million parameters, 1e-6 from 0.2 billion; for
    LoRA 3e-3 to 1e-5."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """Shape of the learning rate's fall to 0 between warm-up and end."""
    weight_decay: Weight = 0.0
    """Weight decay; applies to matrices only, with muon only to the matrices of layers."""
    max_grad_norm: Bound = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    optimizer: Optimizer = "adamw"
    """Optimizer: adamw, muon (for matrices of layers; AdamW trains the rest), or file.py:name, an optax transformation
    or a function of the schedule."""


@dataclass(frozen=True)
class CheckpointConfig:
    """How often a phase evaluates and saves."""

    eval_every: Count = 0
    """Steps between held-out evaluations; 0: only before and after training."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0: only at the end."""
    keep_best: bool = False
    """Also keep the checkpoint with the best held-out score, which `grpo-jax export --step best` writes."""
    patience: Count = 0
    """End the run after this many held-out evaluations in a row without a better score. 0: never."""


OPTIMIZERS = ("adamw", "muon")


def load_optimizer(optimizer: Any) -> Any:
    """Returns an optimizer: a name in `OPTIMIZERS`, an optax transformation, or a function from a schedule to one.

    Args:
      optimizer: The optimizer, or a text such as file.py:name, whose value is loaded.

    Raises:
      UsageError: There is no such optimizer, or it is something else.
    """
    if optimizer in OPTIMIZERS:
        return optimizer
    if isinstance(optimizer, str) and ":" not in optimizer:
        raise UsageError(
            f"there is no optimizer {optimizer!r}: take {' or '.join(OPTIMIZERS)}, or name your own as file.py:name"
        )
    loaded = look_up_once("optimizer", optimizer) if isinstance(optimizer, str) else optimizer
    if not (callable(loaded) or (isinstance(loaded, tuple) and hasattr(loaded, "update"))):
        raise UsageError(
            f"the optimizer {optimizer!r} is of type {type(loaded).__name__}: it must be an optax transformation, or a "
            "function from a schedule to one"
        )
    return loaded


def check_optimizer(options: AdamWConfig) -> None:
    """Raises if there is no such optimizer, or if options are set that your own optimizer does not read.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    if load_optimizer(options.optimizer) in OPTIMIZERS:
        return
    for name in ("weight_decay", "max_grad_norm", "adam_epsilon"):
        if (value := getattr(options, name, None)) != getattr(type(options), name, None):
            raise UsageError(f"{name} is {value}, but your own optimizer does not read it: leave it out")


def optimizer_source(options: AdamWConfig) -> dict[str, str]:
    """Returns the digest of the file of a loaded optimizer by its description, or nothing."""
    if not isinstance(options.optimizer, str) or options.optimizer in OPTIMIZERS:
        return {}
    return {"source of the optimizer": digest_of_source(options.optimizer)}


# ---- groups of GRPO and PPO


@dataclass(frozen=True)
class EngineOptions:
    """Servers that sample instead of this process."""

    engine: tuple[str, ...] = ()
    """Addresses of servers with OpenAI's /v1/completions, such as http://localhost:8000. None: this process samples."""
    engine_kind: Literal["vllm", "sglang"] = "vllm"
    """Kind of the servers, which decides the requests that make them load parameters."""
    engine_dtype: Literal[Dtype, "auto"] = "auto"
    """Dtype in which the servers compute, which decides how far their log-probabilities may differ. auto: the
    trainer's."""
    engine_timeout: Bound = 300.0
    """Seconds that one answer may take. If a server does not answer in time, the run is saved and ends."""
    engine_folder: str = ""
    """Folder that hands the parameters to the server, which must see it under the same path. Empty: a temporary
    folder."""


@dataclass(frozen=True)
class DecodingConfig:
    """How a completion is sampled."""

    max_tokens: Size = 64
    """Longest completion, in tokens, including its EOS (T). In an episode the policy's tokens of all turns."""
    max_turns: Size = 1
    """Largest number of turns of an episode, for tasks with an environment."""
    environment_tokens: Count = 0
    """Largest number of tokens that the environment adds to an episode."""
    temperature: Positive = 1.0
    """Sampling temperature. Log-probabilities are taken after it."""
    top_k: Count = 0
    """Number of likeliest tokens to sample from; 0: all."""
    top_p: Share = 1.0
    """Sample from the fewest likeliest tokens whose probabilities add up to this; 1: all."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this share of the largest probability; 0: all."""

    @property
    def limits_tokens(self) -> bool:
        """True if some tokens may not be sampled."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def completion_width(self) -> int:
        """Tokens that a completion has room for, those of an environment included."""
        return self.max_tokens + self.environment_tokens


@dataclass(frozen=True)
class SamplingConfig(DecodingConfig):
    """How a step samples completions."""

    num_prompts: Size = 32
    """Prompts of a rollout."""
    group_size: Size = 8
    """Completions of each prompt (G)."""
    temperature_spread: float = 0.0
    """Spread of temperatures in a group: completion i of G is sampled at temperature + spread * i / G."""
    max_rollouts: Size = 1
    """Dynamic sampling (DAPO, with 10): largest number of rollouts that a step samples until num_prompts groups have
    differing rewards. 1: off."""
    filter_metric: str = ""
    """The reward that dynamic sampling compares, or a curriculum's solve rate. Empty: the weighted sum."""
    curriculum: Count = 0
    """Steps of the window whose solve rates decide which prompts are drawn; levels of generators rise. 0: every prompt
    once an epoch."""
    curriculum_bound: Share = 0.75
    """Solve rate in the window at which the level of a generator rises."""
    staleness: Count = 0
    """Age in steps of the policy that samples, so that sampling overlaps with grading. `correction` can weigh the
    difference. 0: the current policy samples."""
    narrow_decoding: bool = True
    """Decode fewer rows as completions end, if that saves time. Each smaller batch compiles another loop. A mesh and
    episodes always decode all rows."""
    support: Literal["vocabulary", "sampler"] = "vocabulary"
    """Tokens over which training normalises probabilities: the whole vocabulary, or for each token those that top_k,
    top_p and min_p left."""
    support_size: Annotated[int, at_least(2)] = 64
    """Largest number of tokens that are kept of a support, the likeliest; top_k lowers it. A metric has the probability
    of the others."""

    @property
    def kept_tokens(self) -> int:
        """Tokens that are kept of each support (K); 0: training uses the whole vocabulary."""
        return min(self.support_size, self.top_k or self.support_size) if self.support == "sampler" else 0


@dataclass(frozen=True)
class SamplerConfig:
    """Devices that only sample. Their copy of the policy has a layout of its own."""

    sampler_devices: Count = 0
    """Number of the devices of each host that only sample. With staleness they sample while the others train. 0: all
    devices do both."""
    sampler_fsdp: Size = 1
    """Number of a host's sampler devices that share each parameter. Prompts are spread over them too."""
    sampler_tensor: Size = 1
    """Number of a host's sampler devices that share the heads and the MLP's features. It must divide the number of
    key-value heads."""


@dataclass(frozen=True)
class LossConfig:
    """The loss: a published method and its constants."""

    preset: Preset = "grpo"
    """Published method: advantage, ratio, surrogate, aggregation, KL and their numbers, which other options replace.
    file.py:NAME: an `Objective` of yours."""
    constant: tuple[str, ...] = ()
    """Other constants of the preset or the correction, such as tau_positive=2. `--preset NAME --help` lists them."""
    kl_coef: Weight = 0.04
    """Weight β of the KL divergence from the reference, which is the start unless ref_sync_steps moves it. 0: no
    KL."""
    epsilon_low: Weight | None = 0.2
    """How far below 1 the ratio may go. None: the preset has no such constant."""
    epsilon_high: Weight | None = 0.2
    """How far above 1 the ratio may go. None: the preset has no such constant."""
    delta: Positive | None = None
    """Largest ratio for a negative advantage, above 1 + epsilon_high (4 in INTELLECT-2, 2505.07291). None: no bound."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""
    kl_in_reward: bool = False
    """Subtract the KL from the reward (1909.08593, InstructGPT) instead of adding the preset's divergence to the
    loss."""
    kl_bias_correction: bool = False
    """Weight the KL in the loss by the ratio: its gradient is then unbiased after the first update too (DeepSeek-V3.2,
    2512.02556)."""
    divergence: Literal["preset", "full", "reverse"] = "preset"
    """KL in the loss: the preset's, of sampled tokens, or of the whole vocabulary, KL(π ‖ π_ref) (full) or KL(π_ref ‖
    π) (reverse)."""
    kl_target: Positive | None = None
    """KL of a completion, in nats, that kl_coef is adapted to reach (6 in 1909.08593). Needs kl_in_reward. None:
    kl_coef is constant."""
    ref_sync_steps: Count = 0
    """Steps after which the reference moves to the policy, as in the iterations of GRPO's paper. 0: it never moves."""
    ref_mixup_alpha: Share = 1.0
    """How far the reference moves: 1 sets it to the policy, less makes a moving average (0.6 in TR-DPO, 2404.09656)."""
    advantages_of: AdvantagesOf = "sum"
    """Comparison in a group: the sum of the rewards, each of its components (GDPO, 2601.05242), the rewards from each
    turn on, or spans of completions."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Denominator of the ratio. trainer: the update's own pass, before its first step. sampler: probabilities reported
    at sampling, by an older policy with `staleness`."""
    correction: Literal[Correction, "auto"] = "auto"
    """Weights of advantages by trainer's over sampler's probability. auto: token with staleness, or with an engine of
    another dtype. `--correction NAME --help` lists constants."""
    off_policy_threshold: Positive | None = None
    """Leave out completions with a negative advantage if mean log(sampler's / trainer's probability) exceeds this
    (DeepSeek-V3.2, 2512.02556). None: use all."""
    top_entropy: Share = 1.0
    """Share of the tokens that are trained on, those with the highest entropy (0.2 in 2506.01939); 1: all."""
    mask_truncated: bool = False
    """Leave truncated completions out of the loss. They still count in the advantages of their group."""

    @property
    def objective(self) -> Objective:
        """The preset with the numbers of these options."""
        published = preset_of(self.preset)._replace(**{name: getattr(self, name) for name in FIELDS})
        numbers = {name: getattr(self, name) for name in SHORT if getattr(self, name) is not None}
        numbers |= {name: value for name, value in self.constants.items() if name in published.numbers}
        return published.with_constants(**numbers)

    @property
    def constants(self) -> dict[str, float]:
        """The numbers of `constant`, by name."""
        pairs = [text.partition("=") for text in self.constant]
        if len({name for name, *_ in pairs}) < len(pairs):
            raise UsageError(f"constant is {' '.join(self.constant)}: give each name once")
        try:
            numbers = {name: float(number) for name, _, number in pairs}
        except ValueError:
            raise UsageError(f"constant is {' '.join(self.constant)}: write NAME=NUMBER, as tau_positive=2") from None
        return {name: int(number) if number.is_integer() else number for name, number in numbers.items()}


def preset_of(name: str) -> Objective:
    """Returns a preset by its name: a published one, or an `Objective` of the user's.

    Raises:
      UsageError: There is no such preset. The message lists the closest names, or says why it cannot be loaded.
    """
    if name in PRESETS:
        return PRESETS[name]
    from grpo_jax.presets import own_preset  # loaded only for presets that are not published

    return own_preset(name)


def name_preset(preset: Any) -> Any:
    """Returns the name of a preset. That of an `Objective` holds it, for `preset_of`."""
    if not isinstance(preset, Objective):
        return preset
    from grpo_jax.presets import OwnPreset

    return OwnPreset.of(preset)


def constant_names(preset: str) -> set[str]:
    """Returns the names of the constants of a preset, of corrections and of comparisons."""
    weights = (weights for _, weights in CORRECTIONS.values())
    return {"ddof", "eps", *preset_of(preset).numbers}.union(*map(constants_of, weights))


_INSIDE = Range(lambda beta: 0 < beta < 1, "between 0 and 1; at the ends take forward_kl or reverse_kl")


class Divergence(NamedTuple):
    """A divergence of one model's distribution π over tokens from another model's π_T."""

    kind: str  # "reverse_kl": KL(π ‖ π_T); "forward_kl": KL(π_T ‖ π); "jsd": generalised Jensen-Shannon (2306.13649)
    top_k: int = 0  # the number of likeliest tokens of π_T that count separately; 0: all tokens do
    beta: float = 0.5  # the weight of π_T in the mixture of "jsd"


@dataclass(frozen=True)
class TeacherConfig:
    """A teacher, and the divergence of the policy from it."""

    distillation: Distillation = "none"
    """Divergence from the teacher at each token: KL(π ‖ π_T), KL(π_T ‖ π) or Jensen-Shannon in the loss, or k1 in the
    advantage."""
    distillation_top_k: Count = 0
    """Number of the teacher's likeliest tokens in the divergence; all other tokens count as one. 0: the whole
    vocabulary. Not with k1."""
    distillation_beta: Annotated[float, _INSIDE] = 0.5
    """Weight β of the teacher in jsd's mixture. Near 0 it is like forward_kl, near 1 like reverse_kl."""
    teacher: str = ""
    """Folder or hub id of the model that the policy learns from. It must have the policy's tokenizer. Empty: none."""

    @property
    def divergence(self) -> Divergence:
        """The divergence without its weight."""
        return Divergence(self.distillation, self.distillation_top_k, self.distillation_beta)

    @property
    def frozen_models(self) -> dict[str, str]:
        """Frozen models by role that the loss needs, as folders or hub ids."""
        return {} if self.distillation == "none" else {"teacher": self.teacher}

    def conflicts(self) -> Iterator[str]:
        """Yields a sentence for each conflict between these options."""
        kind, beta, top_k = self.divergence.kind, self.distillation_beta, self.distillation_top_k
        for name, value in options_of(self).items() if kind == "none" else ():
            if value != getattr(type(self), name):
                yield f"{name} is {value}, but distillation is none: leave it out, or choose a distillation"
        if kind not in ("none", "jsd") and beta != TeacherConfig.distillation_beta:
            yield f"distillation_beta is {beta}, but {kind} has no mixture: leave it out, or set distillation to jsd"
        if kind == "k1" and top_k > 0:
            yield f"distillation_top_k is {top_k}, but k1 looks only at the sampled token: leave one of them out"


@dataclass(frozen=True)
class DistillationConfig(TeacherConfig):
    """How much is learned from a teacher, and how much from rewards."""

    distillation_coef: Positive = 1.0
    """Weight of the divergence in the loss, or of k1 in the advantage."""
    reward_coef: Weight = 1.0
    """Weight of the advantages from rewards, with a teacher. 0: completions of training are not graded."""


@dataclass(frozen=True)
class CriticConfig:
    """A critic, whose values rewards are compared with, and the advantages of tokens that it gives."""

    critic: Critic = "none"
    """none: groups are compared. own: a critic (PPO) as large as the policy. shared: a head on its decoder, which saves
    a forward pass."""
    gamma: Fraction = 1.0
    """Discount for each token. 1: the length of a completion does not change its value."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantages: 1 relies on rewards, 0 on the critic; 0.95 in PPO's paper."""
    gae_steps: Size | None = None
    """Number of tokens that an advantage looks ahead (K). None: all."""
    bootstrap_truncated: bool = False
    """Add the critic's value at the end of truncated completions. Use it only if their reward is always 0, or values
    grow without bound."""
    whiten: bool = True
    """Scale advantages to mean 0 and deviation 1 over the tokens of a rollout, as in 1909.08593."""
    value_coef: Positive = 0.5
    """Weight of the critic's loss; 0.5 in OpenAI's baselines. It hardly changes an own critic, whose gradient is
    clipped separately."""
    value_clip: Bound | None = 0.2
    """How far a value may move from its value at sampling, in units of the reward. 0.2 in PPO's code. None: no
    bound."""
    critic_learning_rate: Positive = 1e-5
    """Peak learning rate of the critic's AdamW; ten times the policy's, as in verl. It shares the policy's schedule and
    clipping."""


@dataclass(frozen=True)
class OptimizerConfig(AdamWConfig):
    """How the parameters are updated."""

    adam_epsilon: Positive = 1e-8
    """Term that AdamW adds to the root mean square of gradients. A larger value keeps small, noisy gradients from large
    steps."""
    epochs: Size = 1
    """Passes over each rollout (mu)."""
    minibatches: Size = 1
    """Optimizer steps of a pass; prompts are shuffled among them."""
    piece_tokens: Count = 0
    """Most tokens of a piece on each device, including padding; changes only rounding. 0: 768 on a CPU, 16,384
    elsewhere, or what memory allows."""
    max_skipped: Size = 5
    """Number of steps in a row without finite gradients that ends the run. Each is skipped, and its batch is saved."""


@dataclass(frozen=True)
class LoggingConfig(CheckpointConfig):
    """Files that a run writes, and how often it evaluates."""

    eval_samples: Size | None = None
    """Completions sampled of each held-out prompt, in addition to a greedy one. None: group_size - 1."""
    keep_checkpoints: Size = 2
    """Number of newest checkpoints of each phase that stay on disk."""
    rollouts_every: Count = 10
    """Steps between rollouts written to rollouts.jsonl; 0: none."""
    profile_steps: Count = 0
    """Steps recorded by JAX's profiler into the run's folder `profile`, from the third step on. 0: none."""


@dataclass(frozen=True)
class GRPOConfig(PhaseConfig):
    """The configuration of a run that learns from rewards or a teacher.

    `recipe` makes it, and `with_options` changes fields of any group.
    """

    seed: Seed = 0
    """Random seed of prompts, sampling and shuffling."""
    sampling: SamplingConfig = SamplingConfig()
    sampler: SamplerConfig = SamplerConfig()
    loss: LossConfig = LossConfig()
    distillation: DistillationConfig = DistillationConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def num_sampler_devices(self) -> int:
        """Devices of each host that only sample."""
        return self.sampler.sampler_devices

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the run."""
        return self.steps * self.optimizer.epochs * self.optimizer.minibatches

    @property
    def piece_tokens(self) -> int:
        """The largest number of tokens of a piece; 0: the backend decides."""
        return WHOLE if self.loss.objective.whole_batch else self.optimizer.piece_tokens

    @property
    def needs_rewards(self) -> bool:
        """True if completions of training are graded."""
        return not is_zero(self.distillation.reward_coef)

    @property
    def frozen_models(self) -> dict[str, str]:
        """Frozen models by role, besides the reference, that the loss needs, as folders or hub ids."""
        return self.distillation.frozen_models

    @property
    def sources(self) -> dict[str, str]:
        """Digests of the user's files that options name, by their descriptions."""
        preset, named = self.loss.preset, {}
        if ":" in preset and (digest := digest_of_source(preset)):
            named = {"source of the preset": digest}
        return named | optimizer_source(self.optimizer)

    @property
    def has_critic(self) -> bool:
        """True if a critic gives advantages of tokens, instead of comparing the completions of a group."""
        return self.critic.critic != "none"

    @property
    def has_advantages(self) -> bool:
        """True if the policy gradient has advantages: from rewards, or from a teacher with k1."""
        return self.needs_rewards or self.distillation.distillation == "k1"

    @property
    def correction(self) -> Correction:
        """The correction of the run. auto is `off_policy_correction` if an older policy samples, else none."""
        chosen = self.off_policy_correction if self.sampling.staleness > 0 else "none"
        return chosen if self.loss.correction == "auto" else self.loss.correction

    @property
    def off_policy_correction(self) -> Correction:
        """`BEST_CORRECTION`, or none if an option refuses it."""
        fits = self.has_advantages and not any(_correction(self, BEST_CORRECTION))
        return BEST_CORRECTION if fits else "none"

    @property
    def token_weights(self) -> list[str]:
        """Options, as words, that give each token a weight of its own."""
        loss, by_token = self.loss, self.distillation.distillation == "k1"
        words = {
            f'advantages_of "{loss.advantages_of}"': loss.advantages_of in BY_PART,
            f"top_entropy {loss.top_entropy}": loss.top_entropy < 1,
            "distillation k1": by_token,
        }
        return [name for name, is_set in words.items() if is_set]

    def conflicts(self) -> Iterator[str]:
        """Yields a sentence for each conflict of the options of a critic or a teacher, or with their absence."""
        loss, has_advantages = self.loss, self.has_advantages
        yield from _critic(self) if self.has_critic else ()
        yield from self.distillation.conflicts()
        without_effect = {
            "critic": self.has_critic,
            "max_rollouts": self.sampling.max_rollouts > 1,
            "curriculum": self.sampling.curriculum > 0,
            "advantages_of": loss.advantages_of != "sum",
            "kl_in_reward": loss.kl_in_reward and loss.kl_coef > 0,
            "top_entropy": loss.top_entropy < 1 and not has_advantages,
            "correction": self.correction != "none" and not has_advantages,
            "off_policy_threshold": loss.off_policy_threshold is not None and not has_advantages,
        }
        for name, is_set in without_effect.items():
            if is_set and not self.needs_rewards:
                yield f"reward_coef is 0, so {name} would change nothing: leave it out, or set reward_coef above 0"


# ---- presets


def with_options(config: Config, **options: Any) -> Config:
    """Returns a config with some of its options replaced, in whichever group they are.

    Args:
      config: A dataclass whose fields are options or dataclasses of options.
      options: New values by name, which may be traced. `preset` is a name, "file.py:NAME" or an `Objective`, and also
        sets the numbers of its recipe, unless another option sets them. Other constants than those that are options,
        such as tau_positive, become part of `constant`.

    Raises:
      UsageError: An option or the preset is unknown.

    Examples:
      >>> with_options(GRPOConfig(), preset="dapo", group_size=16).loss.epsilon_high
      0.28
    """
    known = options_of(config)
    if "preset" in known:
        preset = name_preset(options.get("preset", known["preset"]))
        if "preset" in options:
            options = _preset_numbers(preset) | options | {"preset": preset}
        if names := options.keys() & constant_names(preset) - known.keys():
            others = [text for text in options.get("constant", known["constant"]) if text.split("=")[0] not in names]
            options["constant"] = (*others, *(f"{name}={options.pop(name)}" for name in sorted(names)))
    check_known(options, known)
    return replace_options(config, options)


def recipe(preset: str | Objective = "grpo", **options: Any) -> GRPOConfig:
    """Returns the configuration of a published recipe: a preset, and the sampling options of its authors.

    Args:
      preset: The name of a preset of `functional.presets`, "file.py:NAME", or an `Objective`.
      options: Options to replace, as in `with_options`.

    Raises:
      UsageError: An option or the preset is unknown.

    Examples:
      >>> recipe("companion_post", steps=10).sampling.temperature
      0.7
    """
    return with_options(GRPOConfig(), preset=preset, **options)


# The sampling options of a preset's authors, if they are part of the method.
RECIPES: dict[str, dict[str, Any]] = {
    "companion_post": {"temperature": 0.7, "temperature_spread": 0.3},
    "introduction_post": {"group_size": 12},
    "introduction_post_rank": {"group_size": 12},
}


def _preset_numbers(preset: str) -> dict[str, Any]:
    """Returns the options that a preset sets, by name."""
    published = preset_of(preset)
    numbers = {name: getattr(published, name) for name in FIELDS}
    constants = {name: published.constants.get(name) for name in SHORT}
    return {"constant": (), **numbers, **constants, **RECIPES.get(preset, {})}


# PPO: one completion per prompt suffices with a critic. The objective of Lite PPO is PPO's: ratios of tokens clipped at
# 0.2 (1707.06347), and the mean over tokens. The KL is in the reward, with the coefficient of InstructGPT (2203.02155).
PPO = recipe("lite_ppo", group_size=1, kl_coef=0.02, kl_in_reward=True, critic="own")


# The most parameters of a model -> learning rates at which rewards trained such models: of all parameters, and of LoRA
# (None: not tried). docs/hyperparameters.md has their sources.
RATES: dict[float, tuple[float, float | None]] = {
    1e6: (4e-4, 3e-3),
    3e7: (1e-4, None),
    2e8: (4e-6, 1e-4),
    4e8: (1e-6, 1e-4),
    float("inf"): (1e-6, 1e-5),
}


# ---- checks that options work together: each yields a sentence for a conflict, and the first one is raised


def validate(config: GRPOConfig, *, num_devices: int = 1) -> None:
    """Raises if options do not work together, before anything is compiled.

    Args:
      config: The options, of which those of the mesh are left to `validate_mesh`.
      num_devices: The number of devices over which prompts are sharded.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    check_ranges(config)
    check_effects(config.critic)
    check_effects(config.sampler)
    check_optimizer(config.optimizer)
    check_warmup(config.optimizer, config.num_updates)
    sentences = chain(
        config.conflicts(),
        _constants(replace(config.loss, correction=config.correction), config),
        _steps(config, num_devices),
        _sampling(config, compares_groups=config.needs_rewards and not config.has_critic),
        _kl(config),
        _advantages(config),
        _correction(config, config.correction),
    )
    for sentence in sentences:
        raise UsageError(sentence)


def check_warmup(options: AdamWConfig, num_updates: int, *, default: int = 0) -> None:
    """Raises if the learning rate never reaches its peak.

    Args:
      options: The options of the optimizer.
      num_updates: The number of optimizer steps of the run.
      default: The default warm-up of the command, which may be longer than a short trial.

    Raises:
      UsageError: The warm-up lasts to the end of the run, or longer.
    """
    if options.warmup_steps >= num_updates and options.warmup_steps != default:
        raise UsageError(f"warmup_steps is {options.warmup_steps}: set it below the {num_updates} updates of the run")


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
    **dict.fromkeys(("engine_kind", "engine_dtype", "engine_timeout", "engine_folder"), ("engine", ())),
    **dict.fromkeys(("keep_best", "patience"), ("eval_every", 0)),
    **dict.fromkeys(("sampler_fsdp", "sampler_tensor"), ("sampler_devices", 0)),
    "tools": ("max_turns", 1),
    **dict.fromkeys(options_of(CriticConfig()).keys() - {"critic"}, ("critic", "none")),
    "curriculum_bound": ("curriculum", 0),
    "support_size": ("support", "vocabulary"),
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
        if {name, owner} <= values.keys() and values[name] != defaults[name] and values[owner] == off:
            raise UsageError(f"{name} has no effect while {owner} is {off!r}: set {owner}, or leave {name} out")
    has_own_rate = hasattr(load_optimizer(values.get("optimizer", "adamw")), "update")
    schedule = ("warmup_steps", "decay") if values.get("critic", "none") == "none" else ()  # a critic shares it
    for name in ("learning_rate", *schedule) if has_own_rate else ():
        if values[name] != defaults[name]:
            raise UsageError(f"{name} has no effect on an optax transformation, which has its own rate: leave it out")


def check_top_k(options: Any, vocab_size: int) -> None:
    """Raises if options take more of the likeliest tokens than the model has.

    Args:
      options: A dataclass whose fields are options or dataclasses of options.
      vocab_size: The number of tokens of the model.

    Raises:
      UsageError: There are fewer tokens. The message names the option.
    """
    values = options_of(options)
    for name, most in (("top_k", vocab_size), ("distillation_top_k", vocab_size - 1)):
        if values.get(name, 0) > most:
            raise UsageError(
                f"{name} is {values[name]}, but the model has {vocab_size} tokens: set it below that, or to 0 for all"
            )


def check_control(config: GRPOConfig) -> None:
    """Raises if a control would learn from anything other than its random rewards.

    Raises:
      UsageError: There is a teacher.
    """
    if config.frozen_models:
        raise UsageError("--control takes a coin toss for rewards, but a teacher would teach it too: leave one out")


def check_models(config: GRPOConfig, roles: Collection[str]) -> None:
    """Raises if options need a frozen model that is not loaded.

    Args:
      config: Names the frozen models that the loss needs (`frozen_models`).
      roles: The roles of the loaded models.

    Raises:
      UsageError: A model is missing. The message names its role.
    """
    for role in config.frozen_models.keys() - {*roles}:
        raise UsageError(f"the options need a {role}: name a model with the same tokenizer as {role}")


def _constants(loss: LossConfig, config: GRPOConfig) -> Iterator[str]:
    published = preset_of(loss.preset)
    ignored = constants_of(published.advantages) if config.has_critic or loss.advantages_of != "sum" else {}
    known = published.numbers.keys() - ignored.keys() - {*FIELDS}
    known |= {"ddof", "eps"} if loss.advantages_of != "sum" else set()
    known |= constants_of(CORRECTIONS[loss.correction][1]).keys() if loss.correction in CORRECTIONS else set()
    for name in SHORT:
        value, number = getattr(loss, name), published.constants.get(name)
        if value is not None and name not in known:
            yield f"{name} is {value}, but preset {loss.preset} has no such constant: leave it out"
        if value is None and number is not None:
            yield f"{name} is None, but preset {loss.preset} needs it: {number} is its own"
    for name, value in loss.constants.items():
        if name in SHORT:
            yield f"constant names {name}, which is an option of its own: set {name}"
        elif name not in known:
            yield f"{name} is no constant of this run: constant sets {', '.join(sorted(known - {*SHORT})) or 'none'}"
        if not FLOAT32.contains(value) or (value < 0 and loss.preset in PRESETS):
            yield f"{name} is {value}: it must be at least 0, and {FLOAT32.words}"
    if loss.preset not in PRESETS or loss.constants:
        from grpo_jax.presets import check_objective

        size = max(config.sampling.group_size, published.min_group_size if config.has_critic else 1)
        for reason in check_objective(loss.objective, size):
            yield f"preset {loss.preset} cannot be used: {reason}"
    if loss.epsilon_low is not None and loss.epsilon_low > 1 and not published.bounds_log_ratio:
        yield f"epsilon_low is {loss.epsilon_low}: a ratio is at least 0, so set it to at most 1, which is no bound"
    if loss.delta is not None and loss.epsilon_high is not None and loss.delta <= 1 + loss.epsilon_high:
        yield f"delta is {loss.delta}: it must be above 1 + epsilon_high ({loss.epsilon_high}), or it is the clip"


def _critic(config: GRPOConfig) -> Iterator[str]:
    loss, sampling = config.loss, config.sampling
    if loss.advantages_of != "sum":
        yield (
            f'advantages_of "{loss.advantages_of}" is for groups, but a critic judges the sum of the rewards: set it '
            'to "sum"'
        )
    if sampling.max_rollouts > 1 and sampling.group_size == 1:
        yield (
            f"max_rollouts is {sampling.max_rollouts}, but there is nothing to compare: set it to 1, or group_size "
            "above 1"
        )
    if loss.objective.per_completion:
        yield (
            f"preset {loss.preset} has one ratio a completion, but a critic's advantages are of tokens: take "
            "lite_ppo, dapo or another with ratios of tokens"
        )


def _steps(config: GRPOConfig, num_devices: int) -> Iterator[str]:
    steps, profiled, staleness = config.steps, config.logging.profile_steps, config.sampling.staleness
    if profiled and steps <= 2:
        yield f"profile_steps is {profiled}, but the first two of {steps} steps are not recorded: set steps above 2"
    if staleness and staleness >= steps:
        yield f"staleness is {staleness}, and steps is {steps}, so the start would sample all: set it below steps"
    options, num_prompts = config.optimizer, config.sampling.num_prompts
    parts = options.minibatches * num_devices
    if num_prompts % parts:
        yield f"num_prompts is {num_prompts}: it must be a multiple of minibatches x devices / tensor, {parts}"
    if config.loss.objective.whole_batch and (options.piece_tokens not in (0, WHOLE) or num_devices > 1):
        yield (
            f"preset {config.loss.preset} chooses among all tokens of an optimizer step: leave piece_tokens out, and "
            "set devices to 1"
        )
    if not config.loss.objective.has_ratio and options.epochs * options.minibatches > 1:
        yield f"preset {config.loss.preset} has no ratio, so it can use a rollout once: set epochs and minibatches to 1"


def _sampling(config: GRPOConfig, *, compares_groups: bool) -> Iterator[str]:
    options, objective, preset = config.sampling, config.loss.objective, config.loss.preset
    least = objective.min_group_size
    if compares_groups and options.group_size < least:
        yield f"group_size is {options.group_size}: preset {preset} compares completions, so set it to at least {least}"
    if compares_groups and objective.reads_outcomes and objective.kl_in_reward and objective.has_reference:
        yield f"preset {preset} depends on the signs of rewards, which a KL changes: set kl_in_reward to False"
    tokens = options.num_prompts * options.group_size * options.max_tokens
    if tokens >= 2**31:
        yield f"num_prompts x group_size x max_tokens is {tokens}: a rollout has less than 2^31 tokens, so lower one"
    hottest = options.temperature + options.temperature_spread
    if not (hottest > 0 and FLOAT32.contains(hottest)):
        yield f"temperature_spread is {options.temperature_spread}: temperature plus this must be above 0, and finite"
    if options.filter_metric and options.max_rollouts == 1 and not options.curriculum:
        yield f'filter_metric "{options.filter_metric}" needs dynamic sampling: leave it out, or raise max_rollouts'
    if options.support == "sampler" and not options.limits_tokens:
        yield "support is sampler, but the sampler draws from all tokens: leave it out, or set top_p, top_k or min_p"
    if options.kept_tokens == 1:
        yield "top_k is 1, and over a support of one token nothing can be learned: raise it, or leave support out"
    for name, value, off in (("staleness", options.staleness, 0), ("max_rollouts", options.max_rollouts, 1)):
        if options.curriculum and value != off:
            yield f"curriculum draws prompts by the rewards of all steps before: leave it out, or set {name} to {off}"


def _kl(config: GRPOConfig) -> Iterator[str]:
    loss = config.loss
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
    if loss.kl_target is not None and not in_reward:
        yield f"kl_target is {loss.kl_target}: it steers a KL in the reward: set kl_in_reward, and kl_coef above 0"
    if loss.kl_target is not None and completions > 10_000:
        yield f"kl_target adapts kl_coef over 10,000 completions, and a step has {completions}: lower num_prompts"
    if loss.ref_sync_steps > 0 and loss.kl_coef == 0:
        yield f"ref_sync_steps is {loss.ref_sync_steps}, but there is no reference: set kl_coef above 0"
    if loss.ref_sync_steps >= config.steps:
        yield f"ref_sync_steps is {loss.ref_sync_steps}: it must be below steps ({config.steps})"
    if loss.ref_mixup_alpha != 1 and loss.ref_sync_steps == 0:
        yield f"ref_mixup_alpha is {loss.ref_mixup_alpha}, but the reference never moves: set ref_sync_steps above 0"


def _advantages(config: GRPOConfig) -> Iterator[str]:
    loss, sampling = config.loss, config.sampling
    for name in config.token_weights:
        if loss.objective.per_completion:
            yield _needs_token_ratios(loss.preset, name)
    if loss.advantages_of == "components" and sampling.max_rollouts > 1:
        yield (
            f"max_rollouts is {sampling.max_rollouts}, but dynamic sampling looks at one reward, while advantages_of "
            '"components" learns from each: set max_rollouts to 1, or advantages_of to "sum"'
        )
    if loss.old_logprobs == "sampler" and loss.objective.ratio_to_sampler:
        yield f"preset {loss.preset} takes its ratio against the sampler already: leave old_logprobs out"
    # A KL in the reward, or one that is weighted by the ratio, reads them too.
    is_read = loss.objective.has_ratio or (loss.kl_coef > 0 and (loss.kl_in_reward or loss.kl_bias_correction))
    if loss.old_logprobs == "sampler" and not is_read:
        yield f"old_logprobs is sampler, but preset {loss.preset} has no ratio: leave it out, or take a correction"


def _correction(config: GRPOConfig, name: str) -> Iterator[str]:
    """Yields a sentence for each option that does not go with a correction."""
    loss, sampling, correction = config.loss, config.sampling, f"correction {name}"
    if name in BY_TOKEN and loss.objective.per_completion:
        yield _needs_token_ratios(loss.preset, correction)
    if name != "none" and loss.objective.ratio_to_sampler:
        yield f"preset {loss.preset} takes its ratio against the sampler already: leave {correction} out"
    if name != "none" and loss.old_logprobs == "sampler":
        yield f"{correction} weighs the sampler, but old_logprobs are its own: leave one of them out"
    if name == "geometric" and sampling.limits_tokens and sampling.support == "vocabulary":
        yield (
            "correction geometric drops all completions when top_k, top_p or min_p change their probabilities: leave "
            "these out, set support to sampler, or take another correction"
        )


def _needs_token_ratios(preset: str, name: str) -> str:
    # Every token's gradient passes through the one ratio, so that the weight of a token would not reach it.
    return (
        f"preset {preset} has one ratio a completion, but {name} gives each token a weight of its own: "
        "leave it out, or take grpo, dapo or another with ratios of tokens"
    )
