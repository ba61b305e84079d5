"""Agreement with what TRL, verl, rlax and torch computed: golden/*/make.py says how, and where they differ."""

import inspect
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpo_jax import functional as F
from grpo_jax.functional import PRESETS

with np.load(Path(__file__).parents[1] / "golden" / "losses" / "golden.npz") as file:
    GOLDEN = dict(file)
D = {name.removeprefix("input."): GOLDEN.pop(name) for name in list(GOLDEN) if name.startswith("input.")}
MASK, ADVANTAGES, REWARDS = D["mask"], D["advantages"], D["rewards"]
LENGTHS = MASK.sum(axis=-1)


def assert_close(result, name):
    """Within 1e-6, absolute on numbers of order 1 and relative on larger; arrays of small numbers by their largest."""
    expected = GOLDEN[name]
    assert np.any(expected != 0)
    scale = np.max(np.abs(expected)) if expected.ndim else 1
    assert_allclose(result, expected, rtol=1e-6, atol=1e-6 * min(scale, 1))


# --- losses, and their gradients in one input ---


def grpo(logprobs, *, old="old", mask=MASK, advantages=ADVANTAGES, weights=F.token_mean_weights, **options):
    return F.grpo_loss(logprobs, D[old], advantages, mask, weights=weights(mask), **options)[0]


def preset(name, logprobs, *, old="old", **options):
    return PRESETS[name].loss(logprobs, D[old], ADVANTAGES, MASK, **options)[0]


def dr_grpo(logprobs):
    return preset("dr_grpo", logprobs, weights=F.constant_length_weights(MASK, max_length=20))


def of_chosen(chosen, logprobs):
    return grpo(logprobs, advantages=jnp.where(chosen, ADVANTAGES[..., None], 0))


def top_entropy(logprobs):
    return of_chosen(F.top_entropy_tokens(D["entropies"], MASK, share=0.3), logprobs)


def off_policy_mask(logprobs):
    drift = F.token_log_ratio(logprobs, D["sampler"], MASK)
    chosen = F.on_policy_completions(drift, ADVANTAGES, MASK, threshold=0.2)
    return of_chosen(chosen, logprobs)


def corrected(logprobs):
    correction = F.truncated_weights(F.token_log_ratio(D["old"], D["sampler"], MASK), cap=1.5)
    return grpo(logprobs, advantages=ADVANTAGES[..., None] * correction)


def gspo_of_tokens(logprobs):
    term = F.ratio_term(F.gspo_log_ratio, F.clipped_surrogate)
    advantages = D["token_rewards"]
    return grpo(logprobs, term=term, advantages=advantages, weights=F.sequence_mean_weights, epsilon_high=0.28)


# A band of which all are chosen, so that the key does not matter.
def clip_cov(logprobs):
    term = partial(F.clip_cov_term, key=jax.random.key(0))
    return grpo(logprobs, term=term, share=1.0, covariance_low=0.5, covariance_high=2.0, epsilon_high=0.28)


def vespo_wide(logprobs):
    constants = {"k_positive": 0.05, "lambda_positive": 0.5, "k_negative": 0.1, "lambda_negative": 0.4}
    return grpo(logprobs, term=F.vespo_term, old="wide", **constants)


def with_entropy_bonus(entropies):
    return grpo(D["logprobs"], entropy=entropies, entropy_coef=0.25)


def bradley_terry(chosen, **options):
    return jnp.mean(F.bradley_terry_loss(chosen, D["nonzero"], **options))


def weighted(weights, values, mask):
    return F.weighted_sum(values, weights(mask), mask)


def critic(values):
    losses = F.critic_loss(values, D["token_rewards"], old_values=D["old_values"])
    return weighted(F.token_mean_weights, losses, MASK)


SEQUENCE_MEAN = F.ratio_term(F.sequence_mean_log_ratio, F.clipped_surrogate)
CISPO = F.ratio_term(F.token_log_ratio, F.cispo_surrogate)
SAPO = F.ratio_term(F.token_log_ratio, F.sapo_surrogate)

LOSSES = {  # name -> function of log-probabilities
    "trl_grpo": partial(preset, "grpo", ref_logprobs=D["ref"]),
    "trl_dr_grpo": dr_grpo,
    "trl_bnpo": partial(preset, "bnpo"),
    "trl_dapo": partial(preset, "dapo"),
    "trl_two_sided": partial(grpo, delta=3.0),
    "trl_kl_off_policy": partial(grpo, ref_logprobs=D["ref"], kl_coef=0.5, kl_bias_correction=True),
    "trl_top_entropy": top_entropy,
    "trl_off_policy_mask": off_policy_mask,
    "trl_corrected": corrected,
    "trl_sequence": partial(grpo, term=SEQUENCE_MEAN, weights=F.sequence_mean_weights),
    "trl_luspo": partial(grpo, term=SEQUENCE_MEAN, weights=F.sequence_sum_weights),
    "trl_sapo": partial(preset, "sapo"),
    "trl_vespo": partial(preset, "vespo", old="near"),
    "trl_vespo_wide": vespo_wide,
    "trl_rloo": partial(preset, "rloo", old="near"),
    "verl_dual_clip": partial(grpo, delta=3.0, epsilon_high=0.28),
    "verl_gaps": partial(grpo, mask=D["gaps"], weights=F.sequence_mean_weights, epsilon_high=0.28),
    "verl_gspo": gspo_of_tokens,
    "verl_sapo": partial(grpo, term=SAPO, weights=F.sequence_mean_weights),
    "verl_gpg_loss": partial(preset, "gpg"),
    "verl_clip_cov": clip_cov,
    "verl_kl_cov": partial(grpo, term=F.kl_cov_term, share=0.2),
    "verl_gmpo": partial(preset, "gmpo"),
}
# Theirs have log π in place of log ρ (CISPO) or of ρ (DPPO): the gradient is the same.
GRADIENTS = {
    "trl_cispo": partial(preset, "cispo"),
    "verl_cispo": partial(grpo, term=CISPO, epsilon_low=0.5, epsilon_high=2.0),
    "verl_dppo": partial(grpo, term=F.dppo_term, penalty=0.0),
}
LOSSES_OF_OTHERS = {  # name -> (input, function of it)
    "trl_entropy_bonus": ("entropies", with_entropy_bonus),
    "trl_reward": ("rewards", bradley_terry),
    "trl_reward_margin": ("rewards", partial(bradley_terry, margin=D["margins"], center_coef=0.01)),
    "verl_critic": ("values", critic),
    "verl_token-mean": ("values", lambda x: weighted(F.token_mean_weights, x, D["gaps"])),
    "verl_seq-mean-token-mean": ("values", lambda x: weighted(F.sequence_mean_weights, x, D["gaps"])),
    "verl_seq-mean-token-sum": ("values", lambda x: weighted(F.sequence_sum_weights, x, D["gaps"])),
    "verl_seq-mean-token-sum-norm": (
        "values",
        lambda x: weighted(partial(F.constant_length_weights, max_length=20), x, D["gaps"]),
    ),
    "verl_entropy": ("logits", lambda x: weighted(F.token_mean_weights, F.entropy(x), MASK)),
    "verl_kl_kl": ("logprobs", lambda x: F.kl_k1(x, D["ref"])),
    "verl_kl_abs": ("logprobs", lambda x: F.kl_abs(x, D["ref"])),
    "verl_kl_mse": ("logprobs", lambda x: F.kl_k2(x, D["ref"])),
    "verl_kl_low_var_kl": ("logprobs", lambda x: F.kl_k3(x, D["ref"])),
    "verl_kl_low_var_kl+": ("logprobs", lambda x: F.kl_unbiased(x, D["ref"])),
    "torch_kl_full": ("logits", lambda x: F.kl_full(x, D["ref_logits"])),
    "torch_kl_full_reverse": ("logits", lambda x: F.kl_full(x, D["ref_logits"], reverse=True)),
}
ALL = {name: ("logprobs", function) for name, function in (LOSSES | GRADIENTS).items()} | LOSSES_OF_OTHERS


def loss_and_gradient(function, x):
    def total(x):
        loss = function(x)
        return jnp.sum(loss), loss

    (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(x)
    return loss, gradient


@cache
def losses_and_gradients():
    """One program for all of them."""
    inputs = {variable: D[variable] for variable, _ in ALL.values()}
    of_all = {name: partial(loss_and_gradient, function) for name, (_, function) in ALL.items()}
    return jax.jit(lambda inputs: {name: of(inputs[ALL[name][0]]) for name, of in of_all.items()})(inputs)


@pytest.mark.parametrize("name", ALL)
def test_loss_and_gradient(name):
    loss, gradient = losses_and_gradients()[name]
    if name not in GRADIENTS:
        assert_close(loss, f"{name}.loss")
    assert_close(gradient, f"{name}.gradient")


# --- arrays ---


def mismatch(log_ratio, weights, **options):
    return weights(log_ratio(D["old"], D["sampler"], MASK), **options)


def on_tokens(values):
    """Numbers of completions or tokens, 0 where masked."""
    return jnp.where(MASK, F.per_token(values, MASK), 0)


def of_missing(advantages, **options):
    rewards = jnp.nansum(D["missing"] * D["reward_weights"][:, None, None], axis=0)
    return advantages(rewards, where=~jnp.all(jnp.isnan(D["missing"]), axis=0), **options)


def rloo_with_kl():
    penalty = 0.05 * jnp.sum(jnp.where(MASK, F.kl_k1(D["old"], D["ref"]), 0), axis=-1)
    return F.leave_one_out_advantages(REWARDS - penalty)


def reinforce_pp(gamma):
    penalty = 0.1 * F.kl_k1(D["old"], D["ref"])
    return F.reinforce_pp_advantages(REWARDS, MASK, token_penalty=penalty, gamma=gamma, eps=1e-8)


def gdpo_over_tokens():
    by_reward = F.group_advantages(D["several"]) * D["reward_weights"][:, None, None]
    return F.whiten(jnp.broadcast_to(jnp.sum(by_reward, axis=0)[..., None], MASK.shape), MASK, eps=1e-8)


def gae(mask, lam=0.9, **options):
    return F.generalized_advantages(D["token_rewards"], D["values"], mask, gamma=0.99, lam=lam, **options)


def metrics():
    result = F.grpo_loss(D["logprobs"], D["old"], ADVANTAGES, MASK, ref_logprobs=D["ref"])[1]
    return jnp.stack([result[name][0] / result[name][1] for name in ("clip_low", "clip_high", "kl")])


def next_entropy_coefs():
    entropy = jnp.mean(D["entropies"], where=MASK)
    coefs = jnp.array([0.1, 0.998, 0.002])
    return jnp.stack([F.adaptive_entropy_coef(coefs, entropy, target=target) for target in (0.1, 10.0)], axis=-1)


def next_kl_coefs():
    return F.adaptive_kl_coef(jnp.array(0.1), jnp.array([3.0, 5.7, 6.3, 60.0]), target=6.0, num_samples=1000)


TOKEN, SEQUENCE, MEAN = F.token_log_ratio, F.sequence_log_ratio, F.sequence_mean_log_ratio
INVERSE = {"low": 1 / 1.1, "high": 1 / 0.8}  # verl's bounds are of 1/w

ARRAYS = {
    "trl_advantages_group": lambda: F.group_advantages(REWARDS, eps=1e-4),
    "trl_advantages_batch": lambda: F.batch_std_advantages(REWARDS, eps=1e-4),
    "trl_advantages_none": lambda: F.centered_advantages(REWARDS),
    "trl_advantages_missing_group": lambda: of_missing(F.group_advantages, eps=1e-4),
    "trl_advantages_missing_batch": lambda: of_missing(F.batch_std_advantages, eps=1e-4),
    "trl_advantages_missing_none": lambda: of_missing(F.centered_advantages),
    "trl_gdpo": lambda: F.gdpo_advantages(D["missing"], weights=D["reward_weights"], eps=1e-4),
    "trl_advantages_rloo": lambda: F.leave_one_out_advantages(REWARDS),
    "trl_advantages_rloo_missing": lambda: of_missing(F.leave_one_out_advantages),
    "trl_advantages_rloo_kl": rloo_with_kl,
    "trl_correction_token_truncate": lambda: mismatch(TOKEN, F.truncated_weights, cap=1.5),
    "trl_correction_token_mask": lambda: mismatch(TOKEN, F.masked_weights, low=0.5, high=1.5),
    "trl_correction_sequence_truncate": lambda: mismatch(SEQUENCE, F.truncated_weights, cap=1.5)[..., :1],
    "trl_correction_sequence_mask": lambda: mismatch(SEQUENCE, F.masked_weights, low=0.0, high=1.5)[..., :1],
    "trl_kept_rows": lambda: F.keep_completions(MASK, ~D["truncated"]),
    "trl_overlong": lambda: F.overlong_penalty(D["completion_lengths"], max_length=20, buffer=6),
    "trl_metrics": metrics,
    "trl_adaptive_entropy": next_entropy_coefs,
    "verl_grpo": lambda: on_tokens(F.group_advantages(REWARDS)),
    "verl_grpo_centered": lambda: on_tokens(F.centered_advantages(REWARDS)),
    "verl_passk": lambda: on_tokens(F.best_of_group_advantages(REWARDS)),
    "verl_rloo": lambda: on_tokens(F.leave_one_out_advantages(REWARDS)),
    "verl_rloo_vectorized": lambda: on_tokens(F.leave_one_out_advantages(REWARDS)),
    "verl_opo": lambda: on_tokens(F.opo_advantages(REWARDS, LENGTHS)),
    "verl_gpg": lambda: on_tokens(F.gpg_advantages(D["nonzero"])),
    "verl_remax": lambda: on_tokens(F.remax_advantages(REWARDS, D["greedy"])),
    "verl_reinforce_pp_baseline": lambda: F.reinforce_pp_baseline_advantages(REWARDS, MASK, eps=1e-8),
    "verl_reinforce_pp_1.0": lambda: reinforce_pp(1.0),
    "verl_reinforce_pp_0.9": lambda: reinforce_pp(0.9),
    "verl_gdpo": gdpo_over_tokens,
    "verl_gae": lambda: F.whiten(gae(D["gaps"]), D["gaps"], eps=1e-8),
    "verl_gae_returns": lambda: jnp.where(D["gaps"], gae(D["gaps"]) + D["values"], 0),
    "verl_whiten": lambda: F.whiten(D["values"], D["gaps"], eps=1e-8),
    "verl_adaptive_kl": next_kl_coefs,
    "verl_correction_token": lambda: on_tokens(mismatch(TOKEN, F.truncated_weights, cap=1.3)),
    "verl_correction_sequence": lambda: on_tokens(mismatch(SEQUENCE, F.truncated_weights)),
    "verl_correction_ice_pop": lambda: on_tokens(mismatch(TOKEN, F.masked_weights, low=0.7, high=1.4)),
    "verl_correction_sequence_mask": lambda: on_tokens(mismatch(SEQUENCE, F.masked_weights, low=0.1, high=2.0)),
    "verl_rejection_token": lambda: on_tokens(mismatch(TOKEN, F.rejection_weights, **INVERSE)) > 0,
    "verl_rejection_mean": lambda: on_tokens(mismatch(MEAN, F.rejection_weights, **INVERSE)) > 0,
    "verl_rejection_sum": lambda: on_tokens(mismatch(SEQUENCE, F.rejection_weights, **INVERSE)) > 0,
    "rlax_gae": lambda: gae(MASK, bootstrap=D["bootstrap"]),
    "rlax_gae_3_steps": lambda: gae(MASK, bootstrap=D["bootstrap"], num_steps=3),
    "rlax_lambda_returns": lambda: jnp.where(MASK, gae(MASK, bootstrap=D["bootstrap"]) + D["values"], 0),
}


@cache
def arrays():
    return jax.jit(lambda: {name: function() for name, function in ARRAYS.items()})()


@pytest.mark.parametrize("name", ARRAYS)
def test_array(name):
    assert_close(arrays()[name], name)


# --- losses of pairs and divergences of a teacher, in float64 ---


def load(folder):
    """Reads what TRL computed; see make.py of the folder. Returns the inputs, and the results."""
    with np.load(Path(__file__).parents[1] / "golden" / folder / "golden.npz") as file:
        golden = {name: x if x.dtype == bool else x.astype(np.float64) for name, x in file.items()}
    inputs = {name.removeprefix("input."): golden.pop(name) for name in list(golden) if name.startswith("input.")}
    return inputs, golden


P, OF_PAIRS = load("preferences")
S, OF_TEACHER = load("distillation")


def total_of(name, mask="mask"):
    return jnp.sum(jnp.where(P[mask], P[name] if isinstance(name, str) else name, 0), axis=-1)


def pairs(loss, logprobs, *, reference=True, **constants):
    """The mean of a loss over TRL's pairs, from log-probabilities of tokens [N, 2, T]."""
    arrays = {}
    for i, side in enumerate(("chosen", "rejected")):
        of_reference = total_of("ref")[:, i]
        arrays[side], arrays[f"{side}_length"] = total_of(logprobs)[:, i], P["mask"].sum(-1)[:, i]
        arrays[f"ref_{side}"] = of_reference if reference else jnp.zeros_like(of_reference)
    taken = inspect.signature(loss).parameters
    return jnp.mean(loss(**{name: x for name, x in arrays.items() if name in taken}, **constants))


def kto(logprobs, **constants):
    kl = F.kto_kl(total_of("mismatched", "mismatched_mask"), total_of("mismatched_ref", "mismatched_mask"))
    return jnp.mean(F.kto_loss(total_of(logprobs), total_of("ref"), P["desirable"], kl=kl, **constants))


def rated(logprobs, estimates_kl=True, **constants):
    """Completions in the first row, mismatched ones in the second."""
    policy, ref = total_of(logprobs, "rated_mask").T, total_of("rated_ref", "rated_mask").T
    kl = F.kto_kl(policy[1], ref[1]) if estimates_kl else 0.0
    return jnp.mean(F.kto_loss(policy[0], ref[0], P["rated_desirable"], kl=kl, **constants))


PAIR_LOSSES = {
    "dpo": partial(pairs, F.dpo_loss),
    "robust_dpo": partial(pairs, F.robust_dpo_loss),
    "length_normalized_dpo": partial(pairs, F.length_normalized_dpo_loss),
    "ipo": partial(pairs, F.ipo_loss),
    "hinge": partial(pairs, F.hinge_loss, beta=0.4),
    "cpo": partial(pairs, F.cpo_loss),
    "conservative_without_reference": partial(pairs, F.dpo_loss, reference=False, label_smoothing=0.1),
    "hinge_without_reference": partial(pairs, F.hinge_loss, reference=False),
    "ipo_without_reference": partial(pairs, F.ipo_loss, reference=False, tau=0.5),
    "simpo": partial(pairs, F.simpo_loss),
    "orpo": partial(pairs, F.orpo_loss),
    "kto": kto,
    "kto_weighted": partial(kto, beta=0.5, desirable_weight=1.5, undesirable_weight=0.5),
    "kto_rated": partial(rated, beta=0.5, desirable_weight=1.25, undesirable_weight=0.75),
    "apo_zero": partial(rated, beta=0.5, estimates_kl=False),
}


@cache
def losses_of_pairs():
    """Returns the loss and its gradient of every one."""
    inputs = {name: P["rated" if name in ("kto_rated", "apo_zero") else "logprobs"] for name in PAIR_LOSSES}
    with jax.enable_x64(True):
        return jax.jit(lambda x: {name: jax.value_and_grad(loss)(x[name]) for name, loss in PAIR_LOSSES.items()})(
            inputs
        )


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_losses_of_pairs(name):
    loss, gradient = losses_of_pairs()[name]
    assert_allclose(loss, OF_PAIRS[f"{name}.loss"], rtol=1e-9)
    assert np.any(OF_PAIRS[f"{name}.gradient"])
    assert_allclose(gradient, OF_PAIRS[f"{name}.gradient"], rtol=1e-8, atol=1e-12)


DIVERGENCES = {
    "forward_kl": partial(F.kl_full, reverse=True),
    "jsd_0.1": partial(F.jsd_full, beta=0.1),
    "jsd_0.5": F.jsd_full,
    "jsd_0.9": partial(F.jsd_full, beta=0.9),
    "reverse_kl": F.kl_full,
}


def with_bucket(logits, ids):
    """Returns the logits of the five likeliest tokens of the teacher, and those of all others in one bucket."""
    is_chosen = jax.nn.one_hot(ids, 17, dtype=bool).any(-2)
    others = jax.nn.logsumexp(jnp.where(is_chosen, -jnp.inf, logits), axis=-1, keepdims=True)
    return jnp.concatenate([jnp.take_along_axis(logits, ids, axis=-1), others], axis=-1)


@cache
def divergences():
    """Returns the values and the gradient of each of them, over the whole vocabulary and over a few tokens."""

    def loss(student, name, kind):
        logits = student / 0.7, S["teacher"] / 0.7
        if kind == "top":
            logits = [with_bucket(x, jax.lax.top_k(S["teacher"], 5)[1]) for x in logits]
        values = DIVERGENCES[name](*logits)
        return jnp.sum(values), values

    def of_all(student):
        gradients = jax.grad(loss, has_aux=True)
        return {f"{kind}.{name}": gradients(student, name, kind) for name in DIVERGENCES for kind in ("full", "top")}

    with jax.enable_x64(True):
        return jax.jit(of_all)(S["student"])


@pytest.mark.parametrize("kind", ["full", "top"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_of_a_teacher(kind, name):
    gradient, values = divergences()[f"{kind}.{name}"]
    assert_allclose(values, OF_TEACHER[f"{kind}.{name}.values"], rtol=1e-9)
    assert_allclose(gradient, OF_TEACHER[f"{kind}.{name}.gradient"], rtol=1e-8, atol=1e-10)


def test_every_golden_array_is_compared():
    assert {f"{name}.{part}" for name in ALL for part in ("loss", "gradient")} | set(ARRAYS) == set(GOLDEN)
    assert {f"{name}.{part}" for name in PAIR_LOSSES for part in ("loss", "gradient")} == set(OF_PAIRS)
    of_teacher = {f"{kind}.{name}" for kind in ("full", "top") for name in DIVERGENCES}
    assert {f"{name}.{part}" for name in of_teacher for part in ("values", "gradient")} == set(OF_TEACHER)
    of_mismatched = np.sum((P["mismatched"] - P["mismatched_ref"]) * P["mismatched_mask"], axis=-1)
    assert of_mismatched.mean() > 0.5  # a KL that is not cut off at 0
