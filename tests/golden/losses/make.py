"""Makes golden.npz beside this file: random ragged batches, and what published implementations compute of them.

Every number comes from a peer's own function: TRL's trainers (an instance without __init__, that is given our
log-probabilities in place of a model's), verl's core_algos and rollout_corr_helper, rlax, torch. Losses come with their
gradient in the log-probabilities, by torch's autograd. Inputs are float32, peers compute in float64 where they can
(verl's GDPO, rank of a quantile in TRL: float32). Log-probabilities are multiples of 2⁻¹², so that float32 holds their
differences and sums exactly: what the tests compare is formulas, not cancellation.

Made with torch 2.13.0 (CPU), trl 1.16.0, verl 0.9.1, rlax 0.1.9, numpy 2.4.6. Without a GPU, verl needs only what its
import of core_algos asks for: pip install --no-deps verl, then ray, tensordict, orjson, hydra-core, codetiming.

  PYTHONPATH=tests/golden python tests/golden/losses/make.py

Peers that differ from this library, and what is compared then:
- verl adds 1e-8 to lengths and takes 1/√(s² + 1e-8) where others divide by s + ε: below 1e-7.
- TRL and verl write −sg(ρ) A log π for CISPO and DPPO, here log ρ and ρ stand in its place: gradients only.
- verl's DPPO truncates ρ at c and has no square: compared at a c that no ratio reaches, and no penalty.
- verl's GDPO whitens over tokens, TRL's and ours over completions.
- verl's GPG counts completions whose reward is not 0, ours those of groups whose rewards differ: here the two agree.
- verl's rejection bounds hold for 1/w, ours for w: compared with 1/high and 1/low.
- TRL counts completions without tokens in B, verl does not, nor do we without `num_completions`: compared with verl.
- TRL multiplies the policy term by its masks of entropy and of off-policy completions, we the advantages.
"""

from collections import defaultdict
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import rlax
import torch
from peers import Options, grid, loss_and_gradient, make_trainer, near
from torch.distributions import Categorical, kl_divergence
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from verl.trainer.ppo import core_algos as verl, rollout_corr_helper
from verl.utils.torch_functional import masked_whiten
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

FILE = Path(__file__).with_name("golden.npz")
N, G, T, V = 6, 4, 12, 7
ROWS = (N * G, T)
INDEX = np.repeat(np.arange(N), G)


def make_inputs() -> dict[str, np.ndarray]:
    """Random batches of N groups of G completions, at most T tokens long."""
    rng = np.random.default_rng(0)
    policy_near = partial(near, rng)
    lengths = rng.integers(2, T, (N, G))
    lengths[0, 0], lengths[1, 1], lengths[2, 2] = 1, T, T
    mask = np.arange(T) < lengths[..., None]
    gaps = mask & (rng.random(mask.shape) < 0.8)  # tool tokens are masked in the middle
    gaps[3, 1] = False
    logprobs = -grid(rng.exponential(1.5, (N, G, T)) + 1 / 4096)
    old = policy_near(logprobs, 1.0)
    advantages = grid(rng.normal(size=(N, G)))
    advantages[4, 3] = 0
    # Probabilities that move by a little more and a little less than DPPO's threshold, 0.2.
    start, ends = grid(np.log(0.2)), grid(np.log([0.41, 0.39]))
    logprobs[1, 1, :2], old[1, 1, :2], advantages[1, 1] = ends, start, 0.75
    logprobs[2, 2, :2], old[2, 2, :2], advantages[2, 2] = start, ends, -0.75
    rewards = np.round(rng.normal(size=(N, G)), 1).astype(np.float32)
    rewards[0] = 0.7  # no spread
    rewards[1] = [1, 0, 0, 1]
    rewards[2, :2] = rewards[2].max()
    nonzero = np.abs(rewards) + np.float32(0.1)
    nonzero[0] = 0
    several = np.round(rng.normal(size=(3, N, G)) * np.array([1, 10, 0.1])[:, None, None], 2).astype(np.float32)
    several[0, 1] = 0.5
    missing = several.copy()
    missing[rng.random(several.shape) < 0.3] = np.nan
    missing[:, 2, 1] = np.nan
    missing[1, 3, 1:] = np.nan  # a group of one
    wide = np.maximum(grid(logprobs - 9 * rng.normal(size=mask.shape)), -60)
    return {
        "mask": mask,
        "gaps": gaps,
        "truncated": rng.random((N, G)) < 0.3,
        "logprobs": logprobs,
        "old": old,
        "near": policy_near(logprobs, 0.1),
        "wide": wide,
        "ref": policy_near(logprobs, 0.5),
        "sampler": policy_near(old, 0.4),
        "entropies": grid(rng.exponential(size=mask.shape)),
        "advantages": advantages,
        "rewards": rewards,
        "nonzero": nonzero,
        "several": several,
        "missing": missing,
        "reward_weights": np.array([1.0, 0.5, 2.0], np.float32),
        "greedy": np.round(rng.normal(size=N), 1).astype(np.float32),
        "token_rewards": grid(rng.normal(size=mask.shape)),
        "values": grid(rng.normal(size=mask.shape)),
        "old_values": grid(rng.normal(size=mask.shape)),
        "bootstrap": grid(rng.normal(size=(N, G))),
        "margins": grid(rng.exponential(size=(N, G))),
        "logits": grid(2 * rng.normal(size=(N, G, T, V))),
        "ref_logits": grid(2 * rng.normal(size=(N, G, T, V))),
        "completion_lengths": np.arange(0, 26),
    }


INPUTS = make_inputs()
GOLDEN: dict[str, np.ndarray] = {}


def tensor(name: str) -> torch.Tensor:
    """An input of rows [N · G, ...] in float64."""
    x = INPUTS[name]
    return torch.from_numpy(x.reshape(-1, *x.shape[2:]).astype(np.float64))


def save(name: str, value) -> None:
    """One golden array; rows are put into their groups again."""
    value = np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)
    GOLDEN[name] = value.reshape(N, G, *value.shape[1:]) if value.shape[:1] == (N * G,) else value


def save_loss(name: str, loss_of, variable: str = "logprobs") -> None:
    """A loss and its gradient in one input."""
    for part, value in loss_and_gradient(loss_of, tensor(variable)).items():
        save(f"{name}.{part}", value)


# --- TRL ---

EOS, PAD = 2, 0


def completion_ids() -> list[list[int]]:
    """Token ids: those of truncated completions do not end in EOS."""
    rows = zip(INPUTS["mask"].reshape(ROWS).sum(1), INPUTS["truncated"].ravel(), strict=True)
    return [[5] * (length - 1) + [5 if truncated else EOS] for length, truncated in rows]


def trainer(cls, *, args=None, logprobs=None, old="old", **attributes):
    """A TRL trainer without its __init__: what its losses read, and our arrays in place of a model's."""
    model, ref_model = torch.nn.Identity(), torch.nn.Identity()
    model.is_gradient_checkpointing = False
    entropies = attributes.pop("entropies", tensor("entropies"))

    def per_token_logps(model, *_, **__):
        scored = tensor("ref") if model is ref_model else tensor(old) if logprobs is None else logprobs
        return scored, entropies, None

    def generate(prompts):
        sampled = [row[row_mask].tolist() for row, row_mask in zip(tensor("sampler"), tensor("mask") > 0, strict=True)]
        prompt_ids, texts = [[5]] * len(prompts), [""] * len(prompts)
        if cls is RLOOTrainer:
            return prompt_ids, completion_ids(), texts
        return prompt_ids, completion_ids(), None, texts, sampled, {}, None, None

    logs = {key: defaultdict(list) for key in ("rewards", "extra")}
    state = {
        "model": model,
        "ref_model": ref_model,
        "_get_per_token_logps_and_entropies": per_token_logps,
        "_generate": generate,
        "_metrics": {"train": defaultdict(list)},
        "_logs": logs | {key: [] for key in ("prompt", "completion", "advantages")},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=PAD),
        "eos_token_ids": [EOS],
        "num_generations": G,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 20,
        "pad_to_multiple_of": None,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "loss_type": "grpo",
    }
    arguments = {field.name: field.default for field in fields(GRPOConfig)}
    arguments |= {"steps_per_generation": 1, "per_device_train_batch_size": N * G, "use_bias_correction_kl": False}
    options = Options(**arguments | (args or {}))
    return make_trainer(cls, **arguments | state | attributes, args=options)


def batch_of(old: str = "old", **more) -> dict[str, torch.Tensor]:
    """Returns the arguments of TRL's losses."""
    mask = tensor("mask")
    ids = torch.zeros(ROWS, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": tensor("advantages"),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": tensor(old),
        "ref_per_token_logps": tensor("ref"),
        "sampling_per_token_logps": tensor("sampler"),
    } | more


def trl_loss(name: str, *, old: str = "old", batch: dict | None = None, **options) -> None:
    """GRPOTrainer's loss under these options."""
    batch = batch_of(old, **batch or {})
    save_loss(name, lambda x: trainer(GRPOTrainer, logprobs=x, **options)._compute_loss(None, batch))


def trl_losses() -> None:
    """Every loss_type and modifier of GRPOTrainer, the loss of RLOOTrainer, that of RewardTrainer."""
    trl_loss("trl_grpo", beta=0.04)
    trl_loss("trl_dr_grpo", loss_type="dr_grpo")
    trl_loss("trl_bnpo", loss_type="bnpo")
    trl_loss("trl_dapo", loss_type="dapo", epsilon_high=0.28)
    trl_loss("trl_two_sided", loss_type="dapo", args={"delta": 3.0})
    trl_loss("trl_kl_off_policy", loss_type="dapo", beta=0.5, args={"use_bias_correction_kl": True})
    trl_loss("trl_top_entropy", loss_type="dapo", top_entropy_quantile=0.3)
    trl_loss("trl_off_policy_mask", loss_type="dapo", off_policy_mask_threshold=0.2)
    trl_loss("trl_sequence", importance_sampling_level="sequence")
    trl_loss("trl_luspo", loss_type="luspo", importance_sampling_level="sequence")
    trl_loss("trl_cispo", loss_type="cispo", epsilon_high=5.0)
    trl_loss("trl_sapo", loss_type="sapo")
    trl_loss("trl_vespo", loss_type="vespo", old="near")
    constants = {"vespo_k_pos": 0.05, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.1, "vespo_lambda_neg": 0.4}
    trl_loss("trl_vespo_wide", loss_type="vespo", old="wide", args=constants)

    # The metrics of the first of these.
    grpo = trainer(GRPOTrainer, logprobs=tensor("logprobs"), beta=0.04)
    grpo._compute_loss(None, batch_of())
    metrics = grpo._metrics["train"]
    save("trl_metrics", [metrics[key][0] for key in ("clip_ratio/low_mean", "clip_ratio/high_mean", "kl")])

    # A bonus on the entropy, with its gradient in the entropy.
    bonus = {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.25}

    def with_bonus(entropies):
        return trainer(GRPOTrainer, logprobs=tensor("logprobs"), entropies=entropies, **bonus)._compute_loss(
            None, batch_of()
        )

    save_loss("trl_entropy_bonus", with_bonus, "entropies")
    coefs = []
    for coef in (0.1, 0.998, 0.002):
        for target in (0.1, 10.0):
            args = {"entropy_target": target, "entropy_coef_delta": 0.005, "entropy_coef_max": 1.0}
            adaptive = trainer(
                GRPOTrainer,
                logprobs=tensor("logprobs"),
                args=args | {"entropy_coef_min": 0.0},
                **bonus | {"entropy_coef": coef, "use_adaptive_entropy": True},
                _last_world_entropy=0.0,
                _entropy_window_stats=None,
            )
            adaptive._compute_loss(None, batch_of())
            coefs.append(adaptive.entropy_coef)
    save("trl_adaptive_entropy", np.reshape(coefs, (3, 2)))

    old_logps = (tensor("near") * tensor("mask")).sum(1)
    batch = batch_of() | {"old_logps": old_logps}
    save_loss("trl_rloo", lambda x: trainer(RLOOTrainer, logprobs=x)._compute_loss(None, batch))

    for name, margin, center in (("trl_reward", None, None), ("trl_reward_margin", "margins", 0.01)):

        def of_rewards(chosen, margin=margin, center=center):
            logits = torch.cat([chosen, tensor("nonzero")])[:, None]
            inputs = {"attention_mask": torch.ones(2 * N * G, 1)} | ({"margin": tensor(margin)} if margin else {})
            self = trainer(
                RewardTrainer, args={"center_rewards_coefficient": center}, _total_train_tokens=0, _tp_size=1
            )
            return self.compute_loss(lambda **_: SimpleNamespace(logits=logits), inputs)

        save_loss(name, of_rewards, "rewards")


def trl_batch(cls, rewards: np.ndarray, **options) -> dict[str, torch.Tensor]:
    """Returns a trainer's batch of generated completions: rewards [K, N, G], NaN where one does not apply."""
    by_row = torch.from_numpy(rewards.reshape(len(rewards), -1).T.astype(np.float64))
    weights = torch.from_numpy(INPUTS["reward_weights"].astype(np.float64)) if len(rewards) > 1 else torch.ones(1)
    defaults = {
        "_calculate_rewards": lambda *_: by_row,
        "reward_weights": weights,
        "reward_funcs": [None] * len(rewards),
        "reward_func_names": [str(k) for k in range(len(rewards))],
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.5,
    }
    self = trainer(cls, **defaults | options)
    return self._generate_and_score_completions([{"prompt": "x"}] * (N * G))


def trl_advantages() -> None:
    """Advantages, weights of the sampler's mismatch, and the mask of truncated rows, from the trainers' own batches."""
    one, missing = INPUTS["rewards"][None], INPUTS["missing"]
    for scale in ("group", "batch", "none"):
        save(f"trl_advantages_{scale}", trl_batch(GRPOTrainer, one, scale_rewards=scale)["advantages"])
        combined = trl_batch(GRPOTrainer, missing, scale_rewards=scale)["advantages"]
        save(f"trl_advantages_missing_{scale}", combined)
    gdpo = trl_batch(GRPOTrainer, missing, multi_objective_aggregation="normalize_then_sum")
    save("trl_gdpo", gdpo["advantages"])
    save("trl_advantages_rloo", trl_batch(RLOOTrainer, one)["advantages"])
    save("trl_advantages_rloo_missing", trl_batch(RLOOTrainer, missing)["advantages"])
    save("trl_advantages_rloo_kl", trl_batch(RLOOTrainer, one, beta=0.05)["advantages"])

    vllm = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        low = 0.5 if mode == "token_mask" else None
        options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low}
        ratio = trl_batch(GRPOTrainer, one, **vllm, **options)["importance_sampling_ratio"]
        save(f"trl_correction_{mode}", ratio)
    ratio = trl_batch(GRPOTrainer, one, **vllm)["importance_sampling_ratio"]
    trl_loss("trl_corrected", loss_type="dapo", batch={"importance_sampling_ratio": ratio}, **vllm)

    kept = trl_batch(GRPOTrainer, one, mask_truncated_completions=True)["completion_mask"]
    save("trl_kept_rows", kept > 0)
    punish = get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=6)
    save("trl_overlong", punish(completion_ids=[[0] * n for n in INPUTS["completion_lengths"]]))


# --- verl ---


def at_end(rewards: str) -> torch.Tensor:
    """Rewards of rows on their last token."""
    position = torch.arange(T) == tensor("mask").sum(1, keepdim=True) - 1
    return position * tensor(rewards)[:, None]


def verl_advantages() -> None:
    """Estimators of core_algos; those of rewards give [N · G, T]."""
    mask, gaps = tensor("mask"), tensor("gaps")

    def of_group(name, estimator, rewards="rewards", **options):
        save(name, estimator(at_end(rewards), response_mask=mask, index=INDEX, **options)[0])

    grpo = verl.compute_grpo_outcome_advantage
    of_group("verl_grpo", grpo)
    of_group("verl_grpo_centered", grpo, norm_adv_by_std_in_grpo=False)
    no_std = {"norm_adv_by_std_in_grpo": False}
    of_group("verl_passk", verl.compute_grpo_passk_outcome_advantage, config=no_std)
    of_group("verl_rloo", verl.compute_rloo_outcome_advantage)
    of_group("verl_rloo_vectorized", verl.compute_rloo_vectorized_outcome_advantage)
    of_group("verl_opo", verl.compute_opo_outcome_advantage)
    of_group("verl_gpg", verl.compute_gpg_outcome_advantage, "nonzero")
    of_group("verl_reinforce_pp_baseline", verl.compute_reinforce_plus_plus_baseline_outcome_advantage)
    greedy = torch.from_numpy(np.repeat(INPUTS["greedy"].astype(np.float64), G))
    save("verl_remax", verl.compute_remax_outcome_advantage(at_end("rewards"), greedy, mask)[0])
    penalised = verl.compute_rewards(at_end("rewards"), tensor("old"), tensor("ref"), 0.1)
    for gamma in (1.0, 0.9):
        config = SimpleNamespace(gamma=gamma)
        result = verl.compute_reinforce_plus_plus_outcome_advantage(penalised, mask, config=config)[0]
        save(f"verl_reinforce_pp_{gamma}", result)
    several = {str(k): rewards.ravel() for k, rewards in enumerate(INPUTS["several"])}
    result = verl.compute_gdpo_outcome_advantage(
        at_end("rewards"),
        mask,
        INDEX,
        config={"gdpo_reward_keys": list(several), "gdpo_reward_weights": INPUTS["reward_weights"].tolist()},
        non_tensor_batch=several,
        batch={"prompts": torch.zeros(N * G, 1), "attention_mask": torch.cat([mask[:, :1], mask], 1).long()},
    )[0]
    save("verl_gdpo", result)
    whitened, returns = verl.compute_gae_advantage_return(tensor("token_rewards"), tensor("values"), gaps, 0.99, 0.9)
    save("verl_gae", whitened * gaps)
    save("verl_gae_returns", returns * gaps)
    save("verl_whiten", masked_whiten(tensor("values"), gaps) * gaps)


def verl_loss(
    name: str,
    mode: str,
    *,
    mask: str = "mask",
    advantages: str = "advantages",
    aggregation: str = "token-mean",
    **options,
) -> None:
    """A registered policy loss; advantages of rows or of tokens."""
    policy = {key: options.pop(key) for key in list(options) if key in PolicyLossConfig.__dataclass_fields__}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**policy),
        **{"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | options,
    )
    by_token = tensor(advantages).reshape(N * G, -1).expand(ROWS)

    def loss(logprobs):
        function = verl.get_policy_loss_fn(mode)
        return function(tensor("old"), logprobs, by_token, tensor(mask), aggregation, config)[0]

    save_loss(name, loss)


def verl_losses() -> None:
    """Policy losses, aggregation, divergences, the critic's loss, corrections."""
    verl_loss("verl_dual_clip", "vanilla", clip_ratio_c=3.0)
    verl_loss("verl_gaps", "vanilla", mask="gaps", aggregation="seq-mean-token-mean", clip_ratio_c=1e9)
    # With one advantage a row, GSPO's ratio of tokens has the gradient of its ratio of rows.
    verl_loss("verl_gspo", "gspo", advantages="token_rewards", aggregation="seq-mean-token-mean")
    verl_loss("verl_sapo", "sapo")
    verl_loss("verl_gpg_loss", "gpg")
    verl_loss("verl_clip_cov", "clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=2.0)
    verl_loss("verl_kl_cov", "kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=1.0)
    verl_loss("verl_gmpo", "geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)
    verl_loss("verl_cispo", "cispo", clip_ratio_low=0.5, clip_ratio_high=2.0)
    verl_loss("verl_dppo", "dppo_tv", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=1e9)

    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    for mode in modes:
        options = {"loss_scale_factor": 20} if mode.endswith("norm") else {}
        save_loss(f"verl_{mode}", lambda x, mode=mode, o=options: verl.agg_loss(x, tensor("gaps"), mode, **o), "values")

    for kind in ("kl", "abs", "mse", "low_var_kl", "low_var_kl+"):
        save_loss(f"verl_kl_{kind}", lambda x, kind=kind: verl.kl_penalty(x, tensor("ref"), kind))
    save_loss("verl_entropy", lambda x: verl.compute_entropy_loss(x, tensor("mask")), "logits")
    save_loss(
        "verl_critic",
        lambda x: verl.compute_value_loss(x, tensor("token_rewards"), tensor("old_values"), tensor("mask"), 0.2)[0],
        "values",
    )
    coefs = []
    for kl in (3.0, 5.7, 6.3, 60.0):
        controller = verl.AdaptiveKLController(0.1, 6.0, 10_000)
        controller.update(kl, 1000)
        coefs.append(controller.value)
    save("verl_adaptive_kl", coefs)

    log_ratio, mask = tensor("old") - tensor("sampler"), tensor("mask")
    for name, kind, threshold in (
        ("token", "token", 1.3),
        ("sequence", "sequence", 2.0),
        ("ice_pop", "token", "0.7_1.4"),
        ("sequence_mask", "sequence", "0.1_2.0"),
    ):
        weights = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask, kind, threshold)[0]
        save(f"verl_correction_{name}", weights)
    for name, kind in (("token", "token_k1"), ("mean", "seq_mean_k1"), ("sum", "seq_sum_k1")):
        kept = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask, kind, "0.8_1.1")[0]
        save(f"verl_rejection_{name}", kept > 0)


# --- rlax and torch ---


def others() -> None:
    """GAE and λ-returns of rlax, row by row; the divergence over a vocabulary of torch; REINFORCE's of the latter."""
    jax.config.update("jax_enable_x64", True)
    rewards, values, end = (np.asarray(tensor(name)) for name in ("token_rewards", "values", "bootstrap"))
    gae, k_step, returns = (np.zeros(ROWS) for _ in range(3))
    for row, length in enumerate(INPUTS["mask"].reshape(ROWS).sum(1)):
        r, v = rewards[row, :length], np.append(values[row, :length], end[row])
        discount = np.full(length, 0.99)
        gae[row, :length] = rlax.truncated_generalized_advantage_estimation(r, discount, 0.9, v)
        returns[row, :length] = rlax.lambda_returns(r, discount, v[1:], 0.9)
        for t in range(length):
            window = r[t : t + 3], discount[t : t + 3], 0.9, v[t : t + 4]
            k_step[row, t] = rlax.truncated_generalized_advantage_estimation(*window)[0]
    save("rlax_gae", gae)
    save("rlax_lambda_returns", returns)
    save("rlax_gae_3_steps", k_step)

    def kl(x, reverse):
        pair = Categorical(logits=x), Categorical(logits=tensor("ref_logits"))
        return kl_divergence(*(pair[::-1] if reverse else pair))

    save_loss("torch_kl_full", lambda x: kl(x, False), "logits")
    save_loss("torch_kl_full_reverse", lambda x: kl(x, True), "logits")


def main() -> None:
    """Writes the file anew."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    trl_losses()
    trl_advantages()
    verl_advantages()
    verl_losses()
    others()
    inputs = {f"input.{name}": value for name, value in INPUTS.items()}
    np.savez_compressed(FILE, **inputs, **GOLDEN)


if __name__ == "__main__":
    main()
