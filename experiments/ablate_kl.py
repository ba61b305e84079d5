"""Does a KL coefficient of 0.01 work everywhere, and is GRPO less sensitive to it than PPO?

Seed 000: "β = 0.01 works across tasks, compared to PPO's typical β ∈ [0.001, 0.1] sensitivity". Here β goes from 0 to
1 for both methods on additions, each at its own tuned learning rate: GRPO has the KL (k3) in the loss, PPO (k1) in
the reward. Sensitivity is the best minus the worst accuracy between 0.001 and 0.1. Expect little difference up to 0.1
for either method, and a policy that hardly leaves its start at 1. About two minutes for the cpu preset on two cores.

  python -m experiments.ablate_kl --preset cpu
"""

import numpy as np

from experiments.ablation import COIN, Bench, Claim, Finding, accuracy, grpo, last, main, minus, on_the_way, ppo, table

BETAS = (0.0, 0.001, 0.01, 0.1, 1.0)


def measure(bench: Bench) -> Finding:
    settings = {f"GRPO, β {beta:g}": grpo(kl_coef=beta) for beta in BETAS}
    settings |= {f"PPO, β {beta:g}": ppo(kl_coef=beta) for beta in BETAS}
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    rows = table(runs, {"accuracy": accuracy, "on the way": on_the_way, "KL": last("kl")})

    def spread(method: str) -> np.ndarray:
        return np.ptp([rows[f"{method}, β {beta:g}"]["accuracy"] for beta in BETAS[1:4]], axis=0)

    claims = [
        Claim(
            "000, KL Regularization",
            "β = 0.01 works",
            "accuracy of GRPO with β 0.01 − that without KL",
            minus(rows, "accuracy", "GRPO, β 0.01", "GRPO, β 0"),
            low=-0.02,
        ),
        Claim(
            "000, KL Regularization",
            "less sensitive to β than PPO",
            "best minus worst accuracy for β 0.001 to 0.1: PPO's minus GRPO's",
            spread("PPO") - spread("GRPO"),
        ),
    ]
    return Finding(rows, claims, drawn=["accuracy"])


if __name__ == "__main__":
    main(measure, __doc__)
