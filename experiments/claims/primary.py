"""What is asked before any run: one measure a claim, the range that its words allow, and what is corrected together.

A claim's number is paired by seed: one setting minus another, or the logarithm of their ratio. `verdicts` decides.
Nothing is added, dropped or reworded once a claim has been looked at; the history of this file shows it. Labels and
headlines are words of the page alone.

"Accuracy" and "score" are means over sampled held-out completions at the end of a run; "on the way" is the mean score
of all completions that a run learns from, over its steps: the area under the curve of learning. Between seeds the end
varies twice as much as the way to it, so claims ask for the way. Those of `ppo_vs_grpo` and `ablate_group_size` keep
what they asked for, since ten seeds of them were looked at before that was known. Staleness asks for the end, since
what is old starts late.
"Equal samples" is as many completions a step.
"""

import math
from typing import Literal, NamedTuple

Scale = Literal["difference", "ratio"]
Family = Literal["announcements", "since"]


class Primary(NamedTuple):
    """A claim with the one number that decides it."""

    id: str
    question: str  # the script of `experiments.claims.questions` that measures it
    family: Family  # claims that are corrected for being many together: of the announcements, or of the field since
    source: str  # which text, and where
    words: str  # its words and figures
    label: str  # of ours, in a few words
    measure: str  # the number of ours: what minus what, or what over what
    scale: Scale = "difference"  # "ratio": values are natural logarithms of ratios, so are `low`, `high` and `claimed`
    low: float = 0.0  # the words hold between low and high
    high: float = math.inf
    claimed: float = math.nan  # the source's own figure, where it has one
    why: str = ""  # why this number stands for these words


_PPO, _DETAILS = "001, Experimental Results", "001, Implementation Details"

PRIMARY: tuple[Primary, ...] = (
    Primary(
        "posts_ppo",
        "ppo_vs_grpo",
        "announcements",
        _PPO,
        "81.7 against PPO's 78.2",
        "the posts' algorithm − PPO",
        "accuracy at equal samples, the posts' algorithm (introduction_post) − PPO on the same groups",
        claimed=0.035,
        why="the algorithm of the posts, whose ratios are of whole responses, against PPO as tuned",
    ),
    Primary(
        "grpo_ppo",
        "ppo_vs_grpo",
        "announcements",
        _PPO,
        "81.7 against PPO's 78.2",
        "GRPO − PPO",
        "accuracy at equal samples, GRPO − PPO on the same groups",
        claimed=0.035,
        why="GRPO as it is used today, with ratios of tokens",
    ),
    Primary(
        "samples_to_target",
        "ppo_vs_grpo",
        "announcements",
        _PPO,
        "35K samples against 100K, 2x faster",
        "GRPO / PPO: samples to a target",
        "samples until 95% of the final accuracy of the worse of the two, GRPO / PPO on the same groups",
        scale="ratio",
        low=-math.inf,
        high=math.log(0.5),
        claimed=math.log(0.35),
        why="half as many would already be a claim that holds",
    ),
    Primary(
        "critic",
        "ppo_vs_grpo",
        "announcements",
        "001, Policy Update",
        "similar to PPO, but the relative advantages provide better signal",
        "group baseline − critic, all else equal",
        "accuracy on the way, the group's mean − a critic as the baseline; all else equal, the KL in the loss",
        why="GRPO and PPO differ in more than a critic: here in nothing else",
    ),
    Primary(
        "group_size_2",
        "ablate_group_size",
        "announcements",
        "000, Group Size Selection",
        "71.2% at K = 2, 77.3% at 8",
        "K 8 − 2, equal prompts",
        "accuracy at equal prompts, K 8 − K 2",
        claimed=0.061,
    ),
    Primary(
        "group_size_16",
        "ablate_group_size",
        "announcements",
        "000, Group Size Selection",
        "marginal gain beyond 8: 77.3%, 77.9% at 16",
        "K 16 − 8, equal prompts",
        "accuracy at equal prompts, K 16 − K 8",
        low=-0.02,
        high=0.02,
        claimed=0.006,
        why="marginal is what does not matter, either way",
    ),
    Primary(
        "group_size_samples",
        "ablate_group_size",
        "announcements",
        _DETAILS,
        "the larger group size is essential",
        "K 8 − 2, equal samples",
        "accuracy at equal samples, K 8 − K 2",
        why="at equal prompts a larger group costs more; this is what is left at equal cost",
    ),
    Primary(
        "kl_none",
        "ablate_kl",
        "announcements",
        "000, KL Regularization",
        "GRPO still benefits from KL regularization",
        "β 0.01 − none",
        "accuracy on the way, β 0.01 − β 0",
    ),
    Primary(
        "kl_high",
        "ablate_kl",
        "announcements",
        _DETAILS,
        "KL penalty: 0.01, not PPO's 0.1",
        "β 0.01 − 0.1",
        "accuracy on the way, β 0.01 − β 0.1",
    ),
    Primary(
        "clip_none",
        "ablate_clip",
        "announcements",
        "001, Policy Update",
        "the clipping stabilizes training",
        "ε 0.15 − no clip",
        "accuracy on the way, eight updates a rollout, ε 0.15 − no clip",
        why="a clip acts only where a rollout is used more than once",
    ),
    Primary(
        "ranks_distorted",
        "reward_noise",
        "announcements",
        "000, Noise Robustness",
        "relative ordering is more reliable",
        "ranks − rewards, distorted rewards",
        "accuracy on the way, ranks − standardised rewards, where a distortion keeps the rewards' order",
        why="the distortion that ranks cannot see: where ranks should win if anywhere",
    ),
    Primary(
        "shifted_prompts",
        "reward_noise",
        "announcements",
        "001, Robust to Reward Scale",
        "normalization within groups removes this sensitivity",
        "GRPO − PPO, shifted prompts",
        "accuracy on the way with rewards shifted by prompt, GRPO − PPO without a clip of its values",
        why="PPO's clip of values would forbid its critic to follow shifts of 2",
    ),
    Primary(
        "hacking",
        "reward_hacking",
        "announcements",
        "000, Reward Hacking",
        "significantly less repetition compared to PPO",
        "PPO − GRPO: repeated letters",
        "share of repeated letters under a weak bonus for them, PPO − GRPO, both with their KL in the loss",
        why="in the reward a KL weighs more than in the loss, which has nothing to do with groups",
    ),
    Primary(
        "temperature",
        "ablate_temperature",
        "announcements",
        "000, Temperature Schedule",
        "higher temperature increases group diversity",
        "schedule − its mean: diversity",
        "share of different completions of a group in the first 5 steps, 0.7 + 0.3 i/8 − its mean temperature",
        why="a schedule is claimed: one temperature at its mean is the alternative",
    ),
    Primary(
        "entropy_bonus",
        "entropy_bonus",
        "announcements",
        "003, GRPO objective",
        "no entropy bonus is used",
        "entropy bonus 0.01 − none",
        "accuracy of GRPO on the way, bonus 0.01 − none",
        low=-math.inf,
        high=0.02,
        why="a bonus that gained would contradict it",
    ),
    Primary(
        "dr_grpo_length",
        "field_since",
        "since",
        "Dr. GRPO, 2503.20783",
        "GRPO makes wrong responses longer",
        "GRPO / Dr. GRPO: length of wrong answers",
        "length of wrong completions at the end, GRPO / Dr. GRPO",
        scale="ratio",
    ),
    Primary(
        "std_weight",
        "field_since",
        "since",
        "Dr. GRPO, 2503.20783",
        "the division by the deviation is a bias that can be removed",
        "centred − standardised rewards",
        "accuracy on the way, centred rewards − standardised rewards, nothing else changed",
        low=-0.02,
        why="removed without loss",
    ),
    Primary(
        "clip_higher",
        "field_since",
        "since",
        "DAPO, 2503.14476",
        "clip-higher prevents the collapse of entropy",
        "ε above 0.28 / 0.2: entropy",
        "entropy at the end, ε above 0.28 / 0.2; eight updates a rollout",
        scale="ratio",
    ),
    Primary(
        "aggregation",
        "field_since",
        "since",
        "DAPO, 2503.14476",
        "a mean over tokens serves responses of uneven length",
        "mean of tokens − of completions",
        "score on the way, mean over tokens − mean over completions, lengths from 1 to 16",
    ),
    Primary(
        "gspo_noise",
        "sampler_mismatch",
        "since",
        "GSPO, 2507.18071",
        "ratios of sequences stand noise of the sampler that ratios of tokens do not",
        "GSPO − GRPO, noisy sampler",
        "accuracy on the way under noise on the sampler's probabilities, GSPO − GRPO",
    ),
    Primary(
        "mismatch",
        "sampler_mismatch",
        "since",
        "truncated importance sampling, Yao et al. 2025",
        "a correction repairs what the sampler's mismatch costs",
        "corrected − not: mismatched sampler",
        "accuracy on the way under a mismatched sampler, corrected − not corrected",
    ),
    Primary(
        "stale",
        "staleness",
        "since",
        "NeMo-RL, issue 1098",
        "8 to 16 steps cost nothing with a correction",
        "8 steps old and corrected − fresh",
        "accuracy at the end, 8 steps old and corrected − fresh",
        low=-0.02,
    ),
    Primary(
        "pass_at_k",
        "pass_at_k",
        "since",
        "2504.13837",
        "the start passes trained policies at large k",
        "pass@64, trained − start",
        "pass@64 of held-out prompts, trained − start",
        low=-math.inf,
        high=0.0,
    ),
)
BY_ID = {claim.id: claim for claim in PRIMARY}


# ---- what a reader wants to know


class Headline(NamedTuple):
    """A question of a reader, with the claim that answers it and what to say by its verdict."""

    question: str
    id: str
    sides: tuple[str, str]  # who is ahead in the seeds where nothing is settled: the number is above 0, or below
    supported: str
    contradicted: str
    no_difference: str = "No difference that matters."
    beside: tuple[str, str] = ("", "")  # a name and the measure of a `findings.Also`: said with it, without a verdict


HEADLINES: tuple[Headline, ...] = (
    Headline(
        "GRPO or PPO, at equal samples?",
        "grpo_ppo",
        ("GRPO is ahead", "PPO is ahead"),
        "GRPO.",
        "PPO.",
    ),
    Headline(
        "All else equal, a group's mean or a critic?",
        "critic",
        ("the group's mean is ahead", "the critic is ahead"),
        "The group's mean.",
        "The critic.",
    ),
    Headline(
        "GRPO or PPO, where prompts shift rewards?",
        "shifted_prompts",
        ("GRPO is ahead", "PPO is ahead"),
        "GRPO.",
        "PPO.",
    ),
    Headline(
        "Which group size at equal samples: 8 or 2?",
        "group_size_samples",
        ("8 is ahead", "2 is ahead"),
        "8.",
        "2.",
    ),
    Headline(
        "Which group size at equal prompts: 8 or 2?",
        "group_size_2",
        ("8 is ahead", "2 is ahead"),
        "8, for four times the samples.",
        "2, for a quarter of the samples.",
    ),
    Headline(
        "Which β for the KL: 0.01 or none?",
        "kl_none",
        ("0.01 is ahead", "none is ahead"),
        "0.01.",
        "None.",
    ),
    Headline(
        "Which β for the KL: 0.01 or 0.1?",
        "kl_high",
        ("0.01 is ahead", "0.1 is ahead"),
        "0.01.",
        "0.1.",
    ),
    Headline(
        "Is a clip needed, at eight updates a rollout?",
        "clip_none",
        ("learning with one is ahead", "learning without one is ahead"),
        "Yes.",
        "No: learning is better without one.",
    ),
    Headline(
        "Does dividing by the deviation matter?",
        "std_weight",
        ("without it learning is ahead", "with it learning is ahead"),
        "No: without it learning is no worse.",
        "Yes: without it learning is worse.",
        "No: no difference that matters.",
    ),
    Headline(
        "Does an entropy bonus help?",
        "entropy_bonus",
        ("a bonus of 0.01 is ahead", "none is ahead"),
        "No.",
        "Yes, one of 0.01.",
        "No: no difference that matters.",
    ),
    Headline(
        "A mean over tokens or over completions?",
        "aggregation",
        ("tokens are ahead", "completions are ahead"),
        "Over tokens.",
        "Over completions.",
    ),
    Headline(
        "How stale may rollouts be: 8 steps, corrected?",
        "stale",
        ("stale ones are ahead", "fresh ones are ahead"),
        "Yes, 8 steps: they are as good as fresh ones.",
        "Not 8 steps: fresh ones are better.",
        beside=("2 steps old and corrected", "accuracy, k = 2 and corrected − fresh"),
    ),
    Headline(
        "Does RL add to the start's pass@64?",
        "pass_at_k",
        ("the trained policy is ahead", "the start is ahead"),
        "No: the start is better.",
        "Yes.",
    ),
    Headline(
        "Do ranks help where rewards are distorted?",
        "ranks_distorted",
        ("ranks are ahead", "rewards are ahead"),
        "Yes.",
        "No: they are worse.",
        "No: no difference that matters.",
        beside=("against noise with heavy tails, at the end", "accuracy, ranks − rewards, heavy tails"),
    ),
)
