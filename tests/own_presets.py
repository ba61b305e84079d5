"""Presets of a user, which tests name as file.py:NAME."""

import jax.numpy as jnp

from grpo_jax import functional as F


def spo_surrogate(log_ratio, advantages, *, width=0.2):
    """−(ρA − |A| (ρ − 1)² / 2ε). Simple policy optimization (2401.16025).

    Args:
      width: ε, above 0; 0.2 in the paper.
    """
    advantages, change = F.per_token(advantages, log_ratio), jnp.expm1(log_ratio)
    return jnp.abs(advantages) * change**2 / (2 * width) - (1 + change) * advantages


grpo = F.PRESETS["bnpo"]._replace(constants={})
spo = grpo._replace(term=F.ratio_term(F.token_log_ratio, spo_surrogate))
reinforce_pp = grpo._replace(advantages=F.ignore_lengths(F.reinforce_pp_advantages), kl_coef=0.01, kl_in_reward=True)
kl_cov = grpo._replace(term=F.kl_cov_term, whole_batch=True).with_constants(share=0.1)
soft = F.PRESETS["sapo"].with_constants(tau_positive=2.0)
no_preset = 3
fails = grpo._replace(term=lambda logprobs: logprobs)
takes_nothing = grpo._replace(term=lambda: 0, constants={"cap": 1.0})
