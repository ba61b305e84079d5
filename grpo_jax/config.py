"""What a training run is told."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from grpo_jax.data.text import Overlong
from grpo_jax.errors import UsageError
from grpo_jax.functional.policy_gradient import reinforce_term
from grpo_jax.functional.presets import PRESETS, Objective, check, is_sequence_level
from grpo_jax.models.config import AttentionKind, Dtype, Remat
from grpo_jax.models.lora import TARGETS, Target

Preset = Literal[
    "grpo",
    "rank",
    "dr_grpo",
    "bnpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "seed_000",
    "seed_001",
    "seed_001_rank",
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
]

Divergence = Literal["preset", "full", "reverse"]


@dataclass(frozen=True)
class ModelOptions:
    """Which pretrained model, and how it is computed and trained."""

    model: str = ""
    """Folder of a Hugging Face model, or its id on the hub."""
    dtype: Dtype = "float32"
    """Of activations and matrix products. bfloat16 is faster on accelerators and rounds to 8 bits."""
    param_dtype: Dtype = "float32"
    """Of the parameters. bfloat16 halves the frozen ones of LoRA; parameters that are trained need float32."""
    remat: Remat = "none"
    """What the backward pass computes again to save memory: nothing, whole layers, or all but matrix products.
    Changes no number."""
    attention: AttentionKind = "shared"
    """shared: a prompt's keys once a group. xla, cudnn: jax.nn.dot_product_attention; cudnn is flash attention, for
    long sequences in bfloat16 on NVIDIA GPUs. They differ by rounding."""
    lora_rank: int = 0
    """Train adapters of this rank and nothing else; 0 to train all parameters."""
    lora_alpha: float = 16.0
    """Adapters count alpha / rank times."""
    lora_targets: tuple[Target, ...] = TARGETS
    """Projections that get adapters."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens (P); None: as long as they come."""
    overlong: Overlong = "drop"
    """What happens to longer prompts: dropped, or their beginning is cut off. Either is counted."""


# Constants of a preset that a run may replace: its own, and those of its term.
_COEFFICIENTS = ("kl_coef", "entropy_coef")
_EPSILONS = ("epsilon_low", "epsilon_high")


class Sampling(NamedTuple):
    """How a run samples."""

    group_size: int = 8
    temperature: float = 1.0
    temperature_spread: float = 0.0


_SAMPLING = {
    "seed_000": Sampling(8, 0.7, 0.3),
    "seed_001": Sampling(12),
    "seed_001_rank": Sampling(12),
}


@dataclass(frozen=True)
class GRPOConfig:
    """A GRPO run. A field that is None takes the preset's constant."""

    preset: Preset = "grpo"
    """Published variant: advantage, ratio, surrogate, aggregation, KL and their constants."""
    steps: int = 100
    """Rollouts, each followed by its updates."""
    num_prompts: int = 32
    """Prompts of a rollout."""
    group_size: int | None = None
    """Completions of each prompt (G); None: the preset's."""
    max_tokens: int = 64
    """Longest completion, in tokens, its ending token included (T)."""
    temperature: float | None = None
    """Sampling temperature; log-probabilities are those after it. None: the preset's."""
    temperature_spread: float | None = None
    """Completion i of G is sampled at temperature + spread * i / G; None: the preset's."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens of this mass; 1 for all."""
    min_p: float = 0.0
    """Sample among tokens of at least this share of the largest probability; 0 for all."""
    kl_coef: float | None = None
    """Weight of the KL divergence from the start; 0 does without a reference model. None: the preset's."""
    divergence: Divergence = "preset"
    """KL divergence in the loss: the preset's, of sampled tokens; or of the whole vocabulary, KL(π ‖ π_ref) (full) or
    KL(π_ref ‖ π) (reverse, elsewhere called forward), for which the reference runs again in every update."""
    kl_target: float | None = None
    """KL divergence of a completion, in nats, that kl_coef is steered to (1909.08593, which had 6); for a KL in the
    reward. None: kl_coef stays what it is."""
    kl_horizon: int = 10_000
    """Completions over which kl_coef changes by a fifth at most, if it is steered; as in TRL and verl."""
    ref_sync_steps: int = 0
    """Steps after which the reference moves to the policy, again and again, as in the iterations of GRPO's paper; 0: it
    stays the start."""
    ref_mixup_alpha: float = 1.0
    """How far it moves: 1 makes it the policy, less a moving average (TR-DPO, 2404.09656, has 0.6)."""
    advantages_of: Literal["sum", "components"] = "sum"
    """What is compared within a group: the weighted sum of the rewards, by the preset's advantage; or each reward by
    itself, whose standardised values are then added with the weights and whitened over the rollout (GDPO,
    2601.05242), so that none is drowned by another's scale. The preset's own advantage is then not used."""
    epsilon_low: float | None = None
    """How far below 1 the ratio may go; None: the preset's."""
    epsilon_high: float | None = None
    """How far above 1 the ratio may go; None: the preset's."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus; None: the preset's, 0 in all of them."""
    correction: Literal["none", "token", "sequence", "icepop", "geometric"] = "none"
    """Weights of advantages, by w, recomputed over sampled probability: min(w, 2) of tokens, min(w, 3) of completions,
    w within [0.5, 5] of tokens, or completions kept whose mean log w is within 0.001. With top-k, top-p or min-p, w is
    against what was sampled from."""
    max_rollouts: int = 1
    """Rollouts that a step may take until num_prompts groups have rewards that differ (DAPO's dynamic sampling, which
    allows 10); groups without a difference then fill up. 1: takes the groups as they come."""
    filter_metric: str = ""
    """Component of the rewards whose differences count there; none: the weighted sum."""
    mask_truncated: bool = False
    """Leave completions without an end out of the loss; they count in their group's advantages all the same."""
    epochs: int = 1
    """Passes over each rollout (mu)."""
    minibatches: int = 1
    """Optimizer steps of a pass; prompts are shuffled among them."""
    microbatches: int = 1
    """Pieces that a minibatch is computed in, to save memory. The result does not depend on it."""
    old_logprobs: Literal["recompute", "sampler"] = "recompute"
    """Denominator of the ratio: computed again by the trainer, or as the sampler reported them
    (cheaper; only when a rollout is used for one optimizer step)."""
    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls to 0 between warm-up and end."""
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this norm."""
    max_skipped: int = 5
    """Stop after this many steps in a row with gradients that are not finite; each is skipped and dumped."""
    eval_every: int = 0
    """Steps between held-out evaluations; 0 for only before and after."""
    eval_samples: int | None = None
    """Completions sampled of each held-out prompt, besides a greedy one; None: group_size - 1, one group."""
    checkpoint_every: int = 50
    """Steps between checkpoints; 0 for only at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept of each phase."""
    rollouts_every: int = 10
    """Steps between rollouts written to rollouts.jsonl; 0 for none."""
    devices: int = 1
    """Devices to spread prompts over, with jax.pmap; 0 for all."""
    seed: int = 0
    """Of prompts, sampling and shuffling."""

    @property
    def algorithm(self) -> Objective:
        """The preset, with the fields given here in place of its own."""
        objective = PRESETS[self.preset]._replace(**self._given(_COEFFICIENTS))
        return objective.with_constants(**self._given(_EPSILONS))

    @property
    def sampling(self) -> Sampling:
        """How the preset samples, with the fields given here in place of its own."""
        return _SAMPLING.get(self.preset, Sampling())._replace(**self._given(Sampling._fields))

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class PPOConfig(GRPOConfig):
    """A PPO run: the loss of a preset, with a critic's advantages of tokens in place of those of groups."""

    preset: Preset = "lite_ppo"
    """Whose surrogate, aggregation and constants are taken; its advantages are not. Lite PPO's are those of PPO:
    ratios of tokens clipped at 0.2 (1707.06347), and the mean over tokens."""
    group_size: int | None = 1
    """Completions of each prompt (G). A critic needs no second one."""
    kl_coef: float | None = 0.02
    """Weight of the KL divergence from the start, 0.02 as in InstructGPT (2203.02155); 0 does without a reference
    model."""
    kl_in_reward: bool = True
    """Take the KL off the reward of each token (1909.08593, InstructGPT), or add the preset's divergence, k3 in all of
    them, to the loss."""
    critic: Literal["own", "shared"] = "own"
    """A critic of its own, as large as the policy; or a head on the policy's decoder: one forward pass then serves
    both, and value_coef weighs what the decoder learns of values."""
    gamma: float = 1.0
    """Discount a token. 1: an answer is worth the same however long it took."""
    gae_lambda: float = 0.95
    """How far an advantage trusts rewards (1) over the critic (0); 0.95 from PPO."""
    gae_steps: int | None = None
    """Tokens that an advantage looks ahead (K); None: all."""
    bootstrap_truncated: bool = False
    """Add the critic's value after the last token of a completion that was cut off, as if it went on; else it ends
    there. For rewards that are 0 without an end alone: where what was cut off earns something, values grow without
    bound."""
    whiten: bool = True
    """Bring advantages to mean 0 and deviation 1 over the tokens of a rollout; 1909.08593 and most systems since."""
    value_coef: float = 0.5
    """Weight of the critic's loss, 0.5 in OpenAI's baselines. A critic of its own, with a clipping of its own, hardly
    feels it; a shared decoder does."""
    value_clip: float | None = 0.2
    """How far a value may move from that at sampling, in units of the reward; as the ratio's in PPO's own code. None:
    without bound."""
    critic_learning_rate: float = 1e-5
    """Peak learning rate of the critic's AdamW, ten times the policy's as in verl; warm-up, decay, weight decay and the
    gradient's longest norm are the policy's."""

    @property
    def algorithm(self) -> Objective:
        """The preset, with the fields given here in place of its own."""
        return super().algorithm._replace(kl_in_reward=self.kl_in_reward)


def validate_ppo(config: PPOConfig, *, num_devices: int = 1) -> None:
    """`validate` for PPO.

    Args:
      config: the run.
      num_devices: devices that prompts are spread over.

    Raises:
      UsageError: one sentence that says what to change.
    """
    _require(
        config.advantages_of == "sum",
        'advantages_of "components" compares completions of a group, but PPO has a critic of the sum: take "sum"',
    )
    validate(config, num_devices=num_devices, compares_groups=False)
    group_size = config.sampling.group_size
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
    _require(
        config.max_rollouts == 1 or group_size >= 2,
        f"max_rollouts is {config.max_rollouts}, but dynamic sampling compares completions of one prompt: set it to 1, "
        "or group_size to at least 2",
    )
    _require(
        not is_sequence_level(config.algorithm),
        f"preset {config.preset} has one ratio a completion, but a critic's advantages are of tokens: take lite_ppo, "
        "dapo or another with ratios of tokens",
    )


def validate(config: GRPOConfig, *, num_devices: int = 1, compares_groups: bool = True) -> None:
    """Refuses what cannot work, before anything is compiled.

    Args:
      config: the run.
      num_devices: devices that prompts are spread over.
      compares_groups: whether a group of one teaches nothing.

    Raises:
      UsageError: one sentence that says what to change.
    """
    algorithm, sampling = config.algorithm, config.sampling
    group_size = sampling.group_size
    for name in (
        "steps",
        "num_prompts",
        "max_tokens",
        "epochs",
        "minibatches",
        "microbatches",
        "keep_checkpoints",
        "max_skipped",
        "max_rollouts",
    ):
        _require(getattr(config, name) >= 1, f"{name} is {getattr(config, name)}: it must be at least 1")
    for name in ("eval_every", "checkpoint_every", "rollouts_every", "warmup_steps", "top_k", "ref_sync_steps"):
        _require(getattr(config, name) >= 0, f"{name} is {getattr(config, name)}: it must be at least 0")
    _require(
        group_size >= 2 or not compares_groups,
        f"group_size is {group_size}: advantages compare completions of one prompt, so set it to at least 2",
    )
    _require(group_size >= 1, f"group_size is {group_size}: it must be at least 1")
    _require(
        config.eval_samples is None or config.eval_samples >= 1,
        f"eval_samples is {config.eval_samples}: it must be at least 1",
    )
    pieces = config.minibatches * config.microbatches * num_devices
    _require(
        config.num_prompts % pieces == 0,
        f"num_prompts ({config.num_prompts}) must be a multiple of minibatches x microbatches x devices ({pieces})",
    )
    _require(
        sampling.temperature > 0 and sampling.temperature + sampling.temperature_spread > 0,
        f"temperature is {sampling.temperature}, spread {sampling.temperature_spread}: sampling for training "
        "needs temperatures above 0",
    )
    _require(
        not config.filter_metric or config.max_rollouts > 1,
        f'filter_metric "{config.filter_metric}" needs dynamic sampling: set max_rollouts above 1, or leave it out',
    )
    _require(
        config.divergence == "preset" or (algorithm.kl_coef > 0 and not algorithm.kl_in_reward),
        f"divergence {config.divergence} is a term of the loss: set kl_coef above 0, and take a preset whose KL is not "
        "in the reward, or for PPO kl_in_reward False",
    )
    _require(
        config.advantages_of == "sum" or config.max_rollouts == 1,
        f"max_rollouts is {config.max_rollouts}, but dynamic sampling drops groups by one number, which with "
        'advantages_of "components" may teach by another: set it to 1, or advantages_of to "sum"',
    )
    _require(
        config.advantages_of == "sum" or not (algorithm.kl_in_reward and algorithm.kl_coef > 0),
        f"preset {config.preset} takes its KL off the sum of the rewards, but advantages_of is components: set kl_coef "
        "to 0, or take a preset with the KL in its loss",
    )
    _require(
        config.kl_target is None or (config.kl_target > 0 and algorithm.kl_in_reward and algorithm.kl_coef > 0),
        f"kl_target is {config.kl_target}: it must be above 0, and steers the kl_coef of a KL in the reward: take a "
        "preset such as rloo, or PPO with kl_in_reward, and a kl_coef above 0 to begin with",
    )
    completions = config.num_prompts * group_size
    _require(
        config.kl_target is None or config.kl_horizon >= completions,
        f"kl_horizon is {config.kl_horizon}: it must be at least the completions of a step ({completions})",
    )
    _require(
        config.ref_sync_steps == 0 or (algorithm.kl_coef > 0 and config.ref_sync_steps < config.steps),
        f"ref_sync_steps is {config.ref_sync_steps}: it must be below steps ({config.steps}), and there is a reference "
        "only with a kl_coef above 0",
    )
    _require(
        0 < config.ref_mixup_alpha <= 1 and (config.ref_mixup_alpha == 1 or config.ref_sync_steps > 0),
        f"ref_mixup_alpha is {config.ref_mixup_alpha}: it must be above 0 and at most 1, and needs ref_sync_steps",
    )
    _require(0 < config.top_p <= 1, f"top_p is {config.top_p}: it must be above 0 and at most 1")
    _require(0 <= config.min_p <= 1, f"min_p is {config.min_p}: it must be between 0 and 1")
    for name in _EPSILONS:
        value = getattr(config, name)
        _require(
            value is None or name in PRESETS[config.preset].constants,
            f"{name} is {value}, but preset {config.preset} has no such constant: leave it out",
        )
    _require(0 <= config.seed < 2**32, f"seed is {config.seed}: it must be between 0 and 2^32 - 1")
    _require(config.weight_decay >= 0, f"weight_decay is {config.weight_decay}: it must be at least 0")
    _require(0 < config.learning_rate < float("inf"), f"learning_rate is {config.learning_rate}: it must be above 0")
    _require(config.max_grad_norm > 0, f"max_grad_norm is {config.max_grad_norm}: it must be above 0")
    _require(
        config.correction == "none" or config.old_logprobs == "recompute",
        f'correction {config.correction} compares the sampler with the trainer: set old_logprobs to "recompute"',
    )
    _require(
        config.correction != "geometric" or (config.top_k == 0 and config.top_p == 1 and config.min_p == 0),
        "correction geometric drops all completions under top_k, top_p or min_p, which change every probability: "
        "leave them out, or take another correction",
    )
    _require(
        algorithm.term is not reinforce_term or config.epochs * config.minibatches == 1,
        f"preset {config.preset} has no ratio, so it can use a rollout once: set epochs and minibatches to 1",
    )
    _require(
        config.old_logprobs == "sampler" or not algorithm.ratio_to_sampler,
        f'preset {config.preset} takes its ratio against the sampler: set old_logprobs to "sampler"',
    )
    _require(
        config.old_logprobs == "recompute" or config.epochs * config.minibatches == 1 or algorithm.ratio_to_sampler,
        'old_logprobs "sampler" needs epochs and minibatches of 1: set it to "recompute"',
    )
    try:
        check(algorithm, group_size=group_size)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
