"""Does group sampling make the entropy bonus unnecessary?

Source 003 of GRPO: "The entropy bonus term is not used here, as the group-based sampling already encourages
exploration". Here GRPO and PPO on additions with bonuses c of 0, 0.01 (PPO's classic one) and, for GRPO, 0.1.
Unnecessary means that it adds less than 0.02. "Carried" are held-out additions with a carry, which the start has right
three times in a hundred: they have to be explored. Expect no gain from 0.01 for either method, and a loss at 0.1.

  python -m experiments.claims.questions.entropy_bonus --preset cpu
"""

from experiments.claims.ablation import COIN, Bench, grpo, ppo
from experiments.claims.columns import accuracy, compared, last, of_prompts, on_the_way, table
from experiments.claims.findings import Also, Finding, main
from experiments.claims.testbeds import has_carry

SOURCE = "003, GRPO objective"


def measure(bench: Bench) -> Finding:
    settings = {f"GRPO, c {c:g}": grpo(preset="grpo", entropy_coef=c) for c in (0.0, 0.01, 0.1)}
    settings |= {f"PPO, c {c:g}": ppo(entropy_coef=c) for c in (0.0, 0.01)}
    runs = bench.runs({COIN: grpo(coin=1.0)} | settings)
    carried = of_prompts(has_carry(bench.task(grpo(), 0).task.heldout.examples))
    columns = {"accuracy": accuracy, "carried": carried, "on the way": on_the_way, "entropy": last("entropy")}
    rows = table(runs, columns, start="GRPO, c 0")
    primary = {"entropy_bonus": compared(runs, on_the_way, "GRPO, c 0.01", "GRPO, c 0")}
    of_carried = compared(runs, carried, "GRPO, c 0.01", "GRPO, c 0").values
    at_end = compared(runs, accuracy, "GRPO, c 0.01", "GRPO, c 0").values
    also = [
        Also(SOURCE, "no bonus is used", "accuracy, c 0.01 − none", at_end),
        Also(SOURCE, "no bonus is used", "accuracy of additions with a carry, c 0.01 − none", of_carried),
        Also(
            SOURCE,
            "no bonus is used",
            "accuracy, c 0.1 − none",
            compared(runs, accuracy, "GRPO, c 0.1", "GRPO, c 0").values,
        ),
        Also(
            SOURCE,
            "… because of groups",
            "accuracy of PPO, c 0.01 − none",
            compared(runs, accuracy, "PPO, c 0.01", "PPO, c 0").values,
        ),
    ]
    return Finding(rows, primary, also, ["accuracy", "entropy"])


if __name__ == "__main__":
    main(measure, __doc__)
