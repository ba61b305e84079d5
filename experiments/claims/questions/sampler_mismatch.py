"""What does a sampler cost whose probabilities are not the trainer's, and what repairs it?

Inference engines compute with other kernels and fewer bits than trainers. Yao et al. (2025) weigh tokens by the
trainer's probability over the sampler's, at most 2; GSPO (2507.18071) says of its ratios of sequences that they stand
such noise where ratios of tokens do not. Here additions whose sampler has hidden states of two bits of mantissa, as
FP8's E5M2, while what is scored and learned from is exact; policies are evaluated as they sample. GRPO at one update a
rollout, with and without the correction; GRPO and GSPO, each with its published ε, at eight, where ratios are to the
trainer's own old probabilities. Expect a mismatch that GRPO hardly notices.

  python -m experiments.claims.questions.sampler_mismatch --preset cpu
"""

from experiments.claims.ablation import COIN, REUSED, Bench, grpo
from experiments.claims.columns import accuracy, compared, last, learning_curve, on_the_way, table
from experiments.claims.findings import Also, Finding, main
from experiments.claims.testbeds import COARSE

EXACT, COARSELY, CORRECTED = "exact", "coarse", "coarse, corrected"
GRPO, GSPO = "GRPO, 8 updates", "GSPO, 8 updates"


def measure(bench: Bench) -> Finding:
    coarse = grpo(COARSE, "grpo")
    settings = {COIN: coarse.changed(coin=1.0), COARSELY: coarse, CORRECTED: coarse.changed(correction="token")}
    settings |= {EXACT: grpo(preset="grpo"), GRPO: coarse.changed(**REUSED)}
    settings[GSPO] = grpo(COARSE, "gspo", kl_coef=0.01, **REUSED)
    runs = bench.runs(settings)
    columns = {"accuracy": accuracy, "on the way": on_the_way, "mismatch": last("first_sampler_mismatch")}
    rows = table(runs, columns, start=COARSELY)
    primary = {
        "gspo_noise": compared(runs, on_the_way, GSPO, GRPO),
        "mismatch": compared(runs, on_the_way, CORRECTED, COARSELY),
    }

    def at_end(source: str, words: str, one: str, other: str) -> Also:
        return Also(source, words, f"accuracy, {one} − {other}", compared(runs, accuracy, one, other).values)

    also = [
        at_end("Yao et al. 2025", "a mismatch costs", COARSELY, EXACT),
        at_end("Yao et al. 2025", "a correction repairs it", CORRECTED, COARSELY),
        at_end("GSPO, 2507.18071", "ratios of sequences stand noise", GSPO, GRPO),
    ]
    curves = {name: learning_curve(runs[name]) for name in settings}
    return Finding(rows, primary, also, ["accuracy", "mismatch"], curves)


if __name__ == "__main__":
    main(measure, __doc__)
