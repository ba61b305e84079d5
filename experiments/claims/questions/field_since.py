"""What the field has claimed of GRPO's parts since, one change each.

On additions: whether the division by a group's deviation is a bias that can be left out (Dr. GRPO), as RLOO does, at
one update a rollout, with the KL in the loss or in the reward (all with ratios of whole responses); whether ε above
0.28 in place of 0.2 keeps entropy up (DAPO), at eight updates a rollout. On words of 1 to 16 tokens, where a prompt has
many right ones: a mean over tokens or over completions, and the length of words whose gold score is not perfect, which
are nearly all (Dr. GRPO as a whole). β is 0.01 on additions, 0 on words. Expect no difference that matters of most.

  python -m experiments.claims.questions.field_since --preset cpu
"""

import numpy as np

from experiments.claims.ablation import COIN, REUSED, START, Bench, Runs, grpo, smaller_steps
from experiments.claims.columns import accuracy, compared, last, of_prompts, on_the_way, pass_at, table
from experiments.claims.findings import Also, Finding, main
from experiments.claims.testbeds import ALL_RIGHT, WORDS, has_carry

STANDARD, CENTRED, HIGHER, EQUAL = "standardised", "centred", "ε above 0.28", "ε above 0.2"
IN_REWARD = {name: f"{name}, KL in the reward" for name in (STANDARD, CENTRED)}
BY_TOKEN, GRPO, DR_GRPO = "words, mean of tokens", "words, GRPO: mean of completions", "words, Dr. GRPO"


def measure(bench: Bench) -> Finding:
    higher = grpo(preset="dapo", kl_coef=0.01, **REUSED)
    settings = {COIN: grpo(coin=1.0), STANDARD: grpo(), CENTRED: grpo(preset="rloo", kl_in_reward=False)}
    settings |= {IN_REWARD[name]: settings[name].changed(kl_in_reward=True) for name in (STANDARD, CENTRED)}
    settings |= {HIGHER: higher, EQUAL: higher.changed(epsilon_high=0.2)}
    words = {BY_TOKEN: grpo(WORDS, "bnpo"), GRPO: grpo(WORDS, "grpo", kl_coef=0.0), DR_GRPO: grpo(WORDS, "dr_grpo")}
    runs = bench.runs(settings)
    of_words = bench.runs({name: setting.changed(**smaller_steps(bench)) for name, setting in words.items()})
    columns = {"accuracy": accuracy, "on the way": on_the_way, "entropy": last("entropy")}
    rows, rows_of_words = table(runs, columns, start=STANDARD), table(of_words, columns, start=GRPO)
    rows |= {f"words, {START}": rows_of_words.pop(START)} | rows_of_words
    carried = of_prompts(has_carry(bench.task(grpo(), 0).task.heldout.examples))
    primary = {
        "std_weight": compared(runs, on_the_way, CENTRED, STANDARD),
        "clip_higher": compared(runs, last("entropy"), HIGHER, EQUAL, ratio=True),
        "aggregation": compared(of_words, on_the_way, BY_TOKEN, GRPO),
        "dr_grpo_length": compared(of_words, length_of_wrong, GRPO, DR_GRPO, ratio=True),
    }

    def more(source: str, words: str, measure: str, one: str, other: str, read=accuracy) -> Also:
        return Also(source, words, measure, compared(runs, read, one, other).values)

    of_carried = "accuracy of additions with a carry, centred − standardised"
    of_words_at_end = compared(of_words, accuracy, BY_TOKEN, GRPO).values
    also = [
        more("Dr. GRPO, 2503.20783", "a bias", "accuracy, centred − standardised", CENTRED, STANDARD),
        Also("DAPO, 2503.14476", "a mean over tokens", "score at the end, tokens − completions", of_words_at_end),
        more("Dr. GRPO, 2503.20783", "a bias to easy and hard prompts", of_carried, CENTRED, STANDARD, carried),
        *[more("RLOO, 2402.14740", "place of the KL", f"accuracy, {name}, loss − reward", name, IN_REWARD[name])
          for name in (STANDARD, CENTRED)],
        more("DAPO, 2503.14476", "clip-higher", "accuracy, ε above 0.28 − 0.2", HIGHER, EQUAL),
        more("DAPO, 2503.14476", "clip-higher", "pass@4, ε above 0.28 − 0.2", HIGHER, EQUAL, pass_at(4)),
    ]  # fmt: skip
    return Finding(rows, primary, also, ["accuracy", "entropy"])


def length_of_wrong(runs: Runs) -> np.ndarray:
    """Mean letters of held-out words at the end whose gold score is below 1."""
    gold, letters = runs.scores[:, -1, :, :-1, 0], runs.scores[:, -1, :, :-1, 1]
    return np.array([length[score < ALL_RIGHT].mean() for score, length in zip(gold, letters, strict=True)])


if __name__ == "__main__":
    main(measure, __doc__)
