"""Are relative comparisons harder to game than a critic's absolute values?

Source 000: "GRPO is naturally resistant to reward hacking": hacked responses must beat others, and "exploits that
boost all responses equally provide no gradient. We observe significantly less length gaming and repetition compared
to PPO". Source 001: "Optimizing relative rankings is harder to game than optimizing absolute scores".

PPO, GRPO and GRPO on ranks write words for a gold score in [0, 1] (`testbeds.word_scores`): alone, and with a bonus
of up to 1 for length, repeated letters, or any word at all. Learning rates are the best for gold on seeds 10 and 11.
Gaming is the length or the share of repeated letters of held-out words at the end, and the loss of gold score by the
bonus. The KL does not limit all methods alike: PPO's, in the reward, is a sum over tokens, and GRPO's, in the loss, a
mean. So all run without a KL, too. "no training" is the start, and the coin is GRPO's. Expect all to game length, and
only those without a KL in the reward to game repetition. Expect a constant to change GRPO by rounding alone, and to
make PPO's words shorter, since its critic has to learn it. About three minutes for the cpu preset on two cores.

  python -m experiments.claims.questions.reward_hacking --preset cpu
"""

from itertools import product

import numpy as np

from experiments.claims.ablation import COIN, Bench, fewer_steps, grpo, ppo
from experiments.claims.columns import Column, last, minus, table
from experiments.claims.findings import Claim, Finding, main
from experiments.claims.testbeds import WORDS

NOTE = "Without a KL both take the repetition bonus whole: as much as 16 letters have room for."
BONUSES: dict[str, dict[str, float]] = {
    "gold alone": {},
    "length bonus": {"length": 1.0},
    "repetition bonus": {"repetition": 1.0},
    "constant bonus": {"constant": 1.0},
}


def measure(bench: Bench) -> Finding:
    methods = {"PPO": ppo(WORDS), "GRPO": grpo(WORDS), "ranks": grpo(WORDS, "rank")}
    settings = {COIN: grpo(WORDS, coin=1.0)}
    for name, bonus in product(methods, BONUSES):
        settings[f"{name}, {bonus}"] = methods[name].changed(**BONUSES[bonus])
    del settings["ranks, constant bonus"]  # an order has none
    for name, bonus in product(methods, ("length bonus", "repetition bonus")):
        settings[f"{name} without KL, {bonus}"] = methods[name].changed(kl_coef=0.0, **BONUSES[bonus])
    runs = bench.runs({name: setting.changed(**fewer_steps(bench)) for name, setting in settings.items()})
    columns: dict[str, Column] = {name: score(k) for k, name in enumerate(("gold", "letters", "repeated"))}
    rows = table(runs, columns | {"reward": last("reward"), "KL": last("kl")}, start="GRPO, gold alone")

    def lost(name: str) -> np.ndarray:
        """What the gold score loses by the two bonuses that can be gamed."""
        gamed = np.mean([rows[f"{name}, {bonus} bonus"]["gold"] for bonus in ("length", "repetition")], axis=0)
        return np.subtract(rows[f"{name}, gold alone"]["gold"], gamed)

    def less(column: str, bonus: str, without: str = "") -> np.ndarray:
        return minus(rows, column, f"PPO{without}, {bonus}", f"GRPO{without}, {bonus}")

    post, no_gradient = "000, Reward Hacking", "exploits that boost all responses equally provide no gradient"
    longer, longer_free = (less("letters", "length bonus", kl) for kl in ("", " without KL"))
    repeats, repeats_free = (less("repeated", "repetition bonus", kl) for kl in ("", " without KL"))
    moved = minus(rows, "gold", "GRPO, constant bonus", "GRPO, gold alone")
    first = {name: runs[f"GRPO, {name}"].metrics["grad_norm"][:, 0] for name in ("constant bonus", "gold alone")}
    gradient, costs = first["constant bonus"] / first["gold alone"] - 1, lost("PPO") - lost("ranks")
    claims = [
        Claim(post, "less length gaming compared to PPO", "letters, length bonus, PPO − GRPO", longer),
        Claim(post, "less length gaming compared to PPO", "letters, length bonus, both without KL", longer_free),
        Claim(post, "less repetition compared to PPO", "repeated, repetition bonus, PPO − GRPO", repeats),
        Claim(post, "less repetition compared to PPO", "repeated, repetition bonus, both without KL", repeats_free),
        Claim(post, no_gradient, "first gradient of GRPO, constant bonus / none − 1", gradient, low=-1e-3, high=1e-3),
        Claim(post, no_gradient, "gold of GRPO, constant bonus − none", moved, low=-0.02, high=0.02),
        Claim("001, Reduced Reward Hacking", "rankings are harder to game", "gold lost, PPO − ranks", costs),
    ]
    return Finding(rows, claims, ["gold", "letters", "repeated"], "" if repeats_free.any() else NOTE)


def score(k: int) -> Column:
    """One of the numbers of `word_scores`, at the end."""
    return lambda runs: runs.final[..., k]


if __name__ == "__main__":
    main(measure, __doc__)
