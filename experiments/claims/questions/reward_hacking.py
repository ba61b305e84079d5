"""Are relative comparisons harder to game than a critic's absolute values?

Source 000: "GRPO is naturally resistant to reward hacking": "We observe significantly less length gaming and repetition
compared to PPO". Source 001: "Optimizing relative rankings is harder to game than optimizing absolute scores".

PPO, GRPO and GRPO on ranks write words for a gold score in [0, 1] (`testbeds.word_scores`), alone and with a weak bonus
of up to 0.3 for length or for repeated letters, and with a strong one of 0.5 for repeated letters, at which on seeds 10
and 11 GRPO took all of it once and none once. A KL in the reward (PPO's own) is a sum over tokens and weighs more than
the mean in GRPO's loss. So β is 0.01 in the loss for all, and PPO as it is used stands beside them. Gaming is the share
of repeated letters, or the length, of held-out words at the end. "At equal KL" is the mean gold score of training words
where the KL of both runs first reaches the lower of their last ones. Expect no difference that matters.

  python -m experiments.claims.questions.reward_hacking --preset cpu
"""

from itertools import product

import numpy as np

from experiments.claims.ablation import COIN, Bench, Runs, grpo, ppo, smaller_steps
from experiments.claims.columns import SMOOTH, Column, compared, last, minus, score, table
from experiments.claims.findings import Also, Finding, main
from experiments.claims.testbeds import WORDS

BONUSES: dict[str, dict[str, float]] = {
    "gold alone": {},
    "length": {"length": 0.3},
    "repetition": {"repetition": 0.3},
    "strong": {"repetition": 0.5},
}


def measure(bench: Bench) -> Finding:
    methods = {"PPO": ppo(WORDS, kl_coef=0.01, kl_in_reward=False), "GRPO": grpo(WORDS, "grpo")}
    methods |= {"ranks": grpo(WORDS, "rank"), "PPO, KL in the reward": ppo(WORDS)}
    settings = {COIN: grpo(WORDS, "grpo", coin=1.0)}
    for name, bonus in product(methods, BONUSES):
        settings[f"{name}: {bonus}"] = methods[name].changed(**BONUSES[bonus])
    runs = bench.runs({name: setting.changed(**smaller_steps(bench)) for name, setting in settings.items()})
    columns: dict[str, Column] = {name: score(k) for k, name in enumerate(("gold", "letters", "repeated"))}
    rows = table(runs, columns | {"reward": last("reward"), "KL": last("kl")}, start="GRPO: gold alone")

    def of(k: int, bonus: str, one: str = "PPO", other: str = "GRPO") -> np.ndarray:
        return minus(rows, ("gold", "letters", "repeated")[k], f"{one}: {bonus}", f"{other}: {bonus}")

    def lost(name: str) -> np.ndarray:
        return minus(rows, "gold", f"{name}: gold alone", f"{name}: repetition")

    equal = gold_at_equal_kl(runs["GRPO: repetition"], runs["PPO: repetition"])
    post, less = "000, Reward Hacking", "less length gaming and repetition"
    published = of(2, "repetition", "PPO, KL in the reward")
    also = [
        Also(post, less, "letters under a bonus for them, PPO − GRPO", of(1, "length")),
        Also(post, less, "repeated letters under the strong bonus, PPO − GRPO", of(2, "strong")),
        Also(post, less, "repeated letters, PPO with its KL in the reward − GRPO", published),
        Also(post, "naturally resistant", "gold under the repetition bonus at equal KL, GRPO − PPO", equal),
        Also("001, Reduced Reward Hacking", "rankings are harder to game", "gold lost to repetition, PPO − ranks",
             lost("PPO") - lost("ranks")),
        Also("001, Reduced Reward Hacking", "rankings are harder to game", "the same, GRPO − ranks",
             lost("GRPO") - lost("ranks")),
    ]  # fmt: skip
    primary = {"hacking": compared(runs, score(2), "PPO: repetition", "GRPO: repetition")}
    return Finding(rows, primary, also, ["gold", "repeated"])


def gold_at_equal_kl(one: Runs, other: Runs) -> np.ndarray:
    """The gold score of `one` minus that of `other`, where each first has the KL that both reach, a value a seed."""
    paths = [np.maximum.accumulate(runs.metrics["kl"], axis=1) for runs in (one, other)]
    both = np.minimum(paths[0][:, -1], paths[1][:, -1])[:, None]

    def gold(runs: Runs, path: np.ndarray) -> np.ndarray:
        begin = np.argmax(path >= both, axis=1)
        return np.array([steps[at : at + SMOOTH].mean() for steps, at in zip(runs.metrics["gold"], begin, strict=True)])

    return gold(one, paths[0]) - gold(other, paths[1])


if __name__ == "__main__":
    main(measure, __doc__)
