"""Does group sampling make the entropy bonus unnecessary?

Source 003 of GRPO: "The entropy bonus term is not used here, as the group-based sampling already encourages
exploration". Here GRPO and PPO with one completion of each prompt on additions, with bonuses c from 0 to 0.1 (PPO's
classic one is 0.01, and claims are of it). Unnecessary means that it adds less than 0.02; that groups do it means
that GRPO explores more than PPO without a bonus: the entropy of the policy when its accuracy first reaches 95% of the
lower final one of both, since it falls with learning. Expect no gain from a bonus for either method, and a loss at
0.1. Three minutes for the cpu preset on two cores.

  python -m experiments.claims.questions.entropy_bonus --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, Bench, Runs, grpo, ppo
from experiments.claims.columns import accuracy, last, minus, on_the_way, steps_to, table
from experiments.claims.findings import Claim, Finding, main

BONUSES = (0.0, 0.003, 0.01, 0.03, 0.1)
SOURCE = "003, GRPO objective"


def measure(bench: Bench) -> Finding:
    one = ppo(group_size=1, num_prompts=8 * bench.size.num_prompts)
    settings = {f"GRPO, c {c:g}": grpo(entropy_coef=c) for c in BONUSES}
    settings |= {f"PPO, c {c:g}": one.changed(entropy_coef=c) for c in BONUSES}
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    reached = steps_to(0.95 * np.minimum(runs["GRPO, c 0"].final, runs["PPO, c 0"].final))

    def entropy_there(runs: Runs) -> np.ndarray:
        steps = np.arange(runs.metrics["entropy"].shape[1])  # updates before each
        pairs = zip(reached(runs), runs.metrics["entropy"], strict=True)
        return np.array([np.interp(at, steps, entropy) if at == at else np.nan for at, entropy in pairs])

    columns = {"accuracy": accuracy, "on the way": on_the_way, "entropy": last("entropy")}
    rows = table(runs, columns | {"entropy at the target": entropy_there}, start="GRPO, c 0")
    gains = {method: minus(rows, "accuracy", f"{method}, c 0.01", f"{method}, c 0") for method in ("GRPO", "PPO")}
    explores = minus(rows, "entropy at the target", "GRPO, c 0", "PPO, c 0")
    needed = gains["PPO"] - gains["GRPO"]
    claims = [
        Claim(SOURCE, "no bonus is used", "accuracy of GRPO, c 0.01 − none", gains["GRPO"], low=-np.inf, high=0.02),
        Claim(SOURCE, "… because of groups", "the gain by c 0.01, PPO − GRPO", needed),
        Claim(SOURCE, "groups encourage exploration", "entropy at equal accuracy, GRPO − PPO", explores),
    ]
    return Finding(rows, claims, drawn=["accuracy", "entropy at the target"])


if __name__ == "__main__":
    main(measure, __doc__)
