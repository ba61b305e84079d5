"""Which estimator of the advantage, and which surrogate, on one task?

Source 001 ranks a group, and then standardises its rewards; of either it says: "similar to PPO, but the relative
advantages provide better signal". Beside them, with one learning rate and their published constants (β of GRPO and
ranks is 0.01, and all have groups of 8): Dr. GRPO, DAPO's loss, GSPO, CISPO, RLOO and pass@4. Each rollout is used
for eight optimizer steps (two passes of four minibatches), so that clips differ, and rewards are graded (the share of
right tokens), for of 0 and 1 ranks are the rewards; pass@4 takes any reward above 0 for right, so its are 0 and 1.
Expect all to learn, within a few hundredths of one another, and pass@k to give up some accuracy of single samples.
Five minutes for the cpu preset on two cores, half of it compilation.

  python -m experiments.claims.questions.estimators --preset cpu
"""

from experiments.claims.ablation import COIN, REUSED, Bench, grpo, ppo
from experiments.claims.columns import accuracy, last, minus, on_the_way, table
from experiments.claims.findings import Claim, Finding, main

PRESETS = ("grpo", "rank", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "pass_at_k", "seed_001")
SOURCE, WORDS = "001, Policy Update", "similar to PPO, but better signal"


def measure(bench: Bench) -> Finding:
    settings = {name: grpo(preset=name, group_size=8, graded=1.0, **REUSED) for name in PRESETS}
    settings["pass_at_k"] = settings["pass_at_k"].changed(graded=0.0)
    settings["ppo"] = ppo(graded=1.0, **REUSED)
    runs = bench.runs({COIN: grpo(coin=1.0, **REUSED)} | settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "entropy": last("entropy")}
    rows = table(runs, columns, start="grpo", reused=True)
    better = {name: minus(rows, "on the way", name, "ppo") for name in ("seed_001", "rank")}
    same = minus(rows, "accuracy", "rank", "grpo")
    claims = [
        Claim(SOURCE, WORDS, "accuracy on the way, seed_001 − ppo", better["seed_001"]),
        Claim(SOURCE, WORDS, "accuracy on the way, rank − ppo", better["rank"]),
        Claim("001, Ranking", "ranks or rewards: it has both", "accuracy, rank − grpo", same, low=-0.02, high=0.02),
    ]
    return Finding(rows, claims, drawn=["accuracy", "on the way"])


if __name__ == "__main__":
    main(measure, __doc__)
