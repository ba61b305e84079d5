"""Does group sampling make the entropy bonus unnecessary?

Seed 003 of GRPO: "The entropy bonus term is not used here, as the group-based sampling already encourages
exploration". Here GRPO and PPO on additions with bonuses c from 0 to 0.1 (PPO's classic one is 0.01). Unnecessary
means that none is better by more than 0.02; that groups do it means that GRPO explores more than PPO without a bonus:
entropy of the policy over the whole of training. Expect no gain from a bonus for either method, and a loss at 0.1. A
minute for the cpu preset on two cores.

  python -m experiments.entropy_bonus --preset cpu
"""

import numpy as np

from experiments.ablation import COIN, Bench, accuracy, grpo, last, minus, on_the_way, ppo, table
from experiments.findings import Claim, Finding, main

BONUSES = (0.0, 0.003, 0.01, 0.03, 0.1)
SOURCE = "003, GRPO objective"


def measure(bench: Bench) -> Finding:
    settings = {f"GRPO, c {c:g}": grpo(entropy_coef=c) for c in BONUSES}
    settings |= {f"PPO, c {c:g}": ppo(entropy_coef=c) for c in BONUSES}
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    rows = table(runs, {"accuracy": accuracy, "on the way": on_the_way, "entropy": last("entropy", 1)})

    def gain(method: str) -> np.ndarray:
        """Of the bonus that is best on average."""
        gains = [minus(rows, "accuracy", f"{method}, c {c:g}", f"{method}, c 0") for c in BONUSES[1:]]
        return max(gains, key=np.mean)

    claims = [
        Claim(
            SOURCE,
            "no entropy bonus is needed",
            "accuracy of GRPO with the best bonus − that without",
            gain("GRPO"),
            low=-np.inf,
            high=0.02,
        ),
        Claim(
            SOURCE,
            "… because of the group: PPO needs one",
            "the same gain of PPO minus GRPO's",
            gain("PPO") - gain("GRPO"),
        ),
        Claim(
            SOURCE,
            "group-based sampling encourages exploration",
            "entropy of GRPO − PPO over training, both without a bonus",
            minus(rows, "entropy", "GRPO, c 0", "PPO, c 0"),
        ),
    ]
    return Finding(rows, claims, drawn=["accuracy", "entropy"])


if __name__ == "__main__":
    main(measure, __doc__)
