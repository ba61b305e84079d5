"""Which β for the KL from the reference?

Source 000: "GRPO still benefits from KL regularization, but with reduced sensitivity", "β = 0.01 works across tasks".
Source 001: "KL penalty: Lower than PPO (0.01 vs 0.1)". Here β from 0 to 0.1 for the posts' algorithm on additions, and
for GRPO on words, with the KL (k3) in the loss. The KL at the end says how far a policy went from its start, a
proxy for what it forgets. Expect no difference that matters up to 0.01, and slower learning at 0.1.

  python -m experiments.claims.questions.ablate_kl --preset cpu
"""

from experiments.claims.ablation import COIN, START, Bench, grpo, smaller_steps
from experiments.claims.columns import accuracy, compared, last, learning_curve, minus, on_the_way, table
from experiments.claims.findings import Also, Finding, main
from experiments.claims.testbeds import WORDS

BETAS = (0.0, 0.001, 0.01, 0.1)
SOURCE = "000, KL Regularization"


def measure(bench: Bench) -> Finding:
    base = grpo(WORDS, "grpo").changed(**smaller_steps(bench))
    runs = bench.runs({COIN: grpo(coin=1.0)} | {f"β {beta:g}": grpo(kl_coef=beta) for beta in BETAS})
    words = bench.runs({f"words, β {beta:g}": base.changed(kl_coef=beta) for beta in (0.0, 0.01)})
    columns = {"score": accuracy, "on the way": on_the_way, "KL": last("kl")}
    rows, of_words = table(runs, columns, start="β 0.01"), table(words, columns, start="words, β 0.01")
    rows |= {f"words, {START}": of_words.pop(START)} | of_words
    primary = {
        "kl_none": compared(runs, on_the_way, "β 0.01", "β 0"),
        "kl_high": compared(runs, on_the_way, "β 0.01", "β 0.1"),
    }

    def at_end(other: str) -> Also:
        ends = minus(rows, "score", "β 0.01", f"β {other}")
        return Also(SOURCE, "reduced sensitivity", f"accuracy at the end, β 0.01 − {other}", ends)

    also = [
        Also(
            SOURCE,
            "β = 0.01 works across tasks",
            "gold score of words, β 0.01 − 0",
            minus(rows, "score", "words, β 0.01", "words, β 0"),
        ),
        *map(at_end, ("0", "0.001", "0.1")),
        Also(
            "", "what is forgotten", "KL from the start, nats a token, β 0 − 0.01", minus(rows, "KL", "β 0", "β 0.01")
        ),
    ]
    return Finding(rows, primary, also, ["score", "KL"], {name: learning_curve(runs[name]) for name in runs})


if __name__ == "__main__":
    main(measure, __doc__)
