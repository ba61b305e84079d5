"""Claims that arithmetic settles: true or false without any run. `tests/claims/test_facts.py` checks each."""

from typing import NamedTuple


class Fact(NamedTuple):
    """A claim that is true or false by algebra, or a count."""

    id: str  # of its test
    source: str
    words: str
    holds: bool
    says: str  # what is so instead, or why


FACTS: tuple[Fact, ...] = (
    Fact(
        "pairs",
        "000, Sample Efficiency",
        "K = 8 gives C(8, 2) = 28 learning signals a prompt",
        False,
        "28 pairs of 8 rewards are functions of 7 independent differences",
    ),
    Fact(
        "all_right",
        "000, Natural Normalization",
        "easy prompts: advantages near zero",
        True,
        "exactly 0 where all 8 are right",
    ),
    Fact(
        "one_wrong",
        "000, Natural Normalization",
        "easy prompts: advantages near zero",
        False,
        "with 7 of 8 right the mean |A| is 0.62, as with 1 of 8: the division by the deviation makes it so",
    ),
    Fact(
        "all_wrong",
        "001, Natural Curriculum",
        "where all responses score poorly, the best still has a positive advantage",
        False,
        "with rewards of 0 and 1, all advantages are 0 where none is right; it holds for graded rewards that differ",
    ),
    Fact(
        "constant",
        "000, Reward Hacking",
        "exploits that boost all responses equally provide no gradient",
        True,
        "a constant on all rewards of a group leaves its advantages as they are; so does a drift over steps",
    ),
    Fact(
        "scale",
        "001, Robust to Reward Scale",
        "normalization within groups removes this sensitivity",
        True,
        "a shift and a positive factor on a prompt's rewards leave its advantages as they are; what noise does, they do"
        " not say",
    ),
    Fact(
        "ranks",
        "001, Ranking",
        "ranks of responses, and advantages of rewards: it has both",
        True,
        "of rewards of 0 and 1 both are the same; of others they differ",
    ),
    Fact(
        "clip",
        "003, Clipped surrogate",
        "the model can only increase probability by a factor of 1 + ε per update",
        False,
        "a clip removes the gradient beyond 1 + ε; a step that leads there is not undone, and where A < 0 a ratio above"
        " 1 + ε is not clipped",
    ),
    Fact(
        "leave_one_out",
        "RLOO, 2402.14740",
        "the mean of the others as the baseline",
        True,
        "it is the group's mean with advantages K / (K − 1) as large, which a learning rate takes up",
    ),
    Fact(
        "compute",
        "003, overview",
        "half the compute of PPO",
        True,
        "56% of the operations of PPO with a critic as large as the policy, on the same groups; attention left out",
    ),
    Fact(
        "compute_of_groups",
        "000, table",
        "8x compute against PPO's 10x",
        False,
        "cheaper than that: 26% of PPO with one response a prompt, at equal samples, since a group's prompt is computed"
        " once; attention left out",
    ),
    Fact(
        "memory",
        "003, overview",
        "half the memory of PPO",
        True,
        "57% of the bytes of parameters, optimizer and reference; activations left out",
    ),
)
