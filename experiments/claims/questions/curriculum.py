"""Do prompts that are never right still teach, and are easy ones learned first?

Source 000: "Hard prompts: Large variance, clear signal for improvement." Source 001, of a curriculum: "Hard prompts
where all responses score poorly still provide useful gradients." What a single group teaches is arithmetic: see
`facts`. Here whole runs on additions, of which those with a carry are right three times in a hundred at the start, so
that in three groups of four none is right; with a reward that is all or nothing and with the share of tokens that are
right ("graded"), where those groups have rewards that differ. Expect easy additions to be learned first by both, and
graded rewards to teach carries sooner.

  python -m experiments.claims.questions.curriculum --preset cpu
"""

from experiments.claims.ablation import COIN, Bench, grpo
from experiments.claims.columns import accuracy, compared, last, learning_curve, of_prompts, on_the_way, table
from experiments.claims.findings import Also, Finding, main
from experiments.claims.testbeds import has_carry

ALL, GRADED = "all or nothing", "graded"


def measure(bench: Bench) -> Finding:
    runs = bench.runs({COIN: grpo(coin=1.0), ALL: grpo(), GRADED: grpo(graded=1.0)})
    carries = has_carry(bench.task(grpo(), 0).task.heldout.examples)
    columns = {"accuracy": accuracy, "with a carry": of_prompts(carries), "without": of_prompts(~carries)}
    columns |= {"on the way": on_the_way, "groups of equal rewards": last("zero_spread_share", 1)}
    rows = table(runs, columns, start=ALL)
    poorly, source = "all score poorly: still useful gradients", "001, Natural Curriculum"
    names = {"accuracy of additions with a carry": of_prompts(carries), "accuracy on the way": on_the_way}
    also = [
        Also(source, poorly, f"{name}, graded − all or nothing", compared(runs, read, GRADED, ALL).values)
        for name, read in names.items()
    ]
    return Finding(rows, {}, also, ["with a carry", "without"], {name: learning_curve(runs[name]) for name in runs})


if __name__ == "__main__":
    main(measure, __doc__)
