"""What an earlier page said of today's claims, by a rule without a correction on 5 seeds with a sample a prompt."""

from typing import NamedTuple


class Earlier(NamedTuple):
    """A number of the earlier page."""

    number: str  # mean ± half a 95% interval
    verdict: str  # its word
    differs: str  # what is measured otherwise today


# id of a claim in `primary` -> what stood on the page
EARLIER: dict[str, Earlier] = {
    "posts_ppo": Earlier("0.010 ± 0.012", "undecided", "the end of a run in place of its way, one update a rollout"),
    "grpo_ppo": Earlier("0.012 ± 0.019", "undecided", ""),
    "samples_to_target": Earlier("1.031 ± 0.070", "disagree", "a logarithm of the ratio"),
    "group_size_2": Earlier("0.054 ± 0.028", "agree", "the posts' algorithm"),
    "group_size_16": Earlier("0.009 ± 0.010", "undecided", "the posts' algorithm; marginal is within ±0.02"),
    "group_size_samples": Earlier("0.008 ± 0.015", "undecided", "the posts' algorithm"),
    "kl_none": Earlier("0.005 ± 0.009", "undecided", "the posts' algorithm"),
    "kl_high": Earlier("0.029 ± 0.012", "agree", "the posts' algorithm"),
    "clip_none": Earlier("0.026 ± 0.024", "agree", "the posts' algorithm; a diverged run counts, with a score of 0"),
    "ranks_distorted": Earlier("0.000 ± 0.010", "undecided", ""),
    "shifted_prompts": Earlier("0.384 ± 0.145", "agree", "shifts differ by seed, and PPO's values have no clip"),
    "hacking": Earlier("-0.685 ± 0.017", "disagree", "both have their KL in the loss, and the bonus is weak"),
    "temperature": Earlier("0.000 ± 0.007", "undecided", ""),
    "entropy_bonus": Earlier("-0.006 ± 0.009", "agree", ""),
}
