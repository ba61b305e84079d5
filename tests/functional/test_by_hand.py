"""Numbers derived by hand: constants, defaults and ends that the random inputs of test_loops.py do not reach."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from grpo_jax import functional as F

NAN = float("nan")


def array(x):
    x = np.asarray(x)
    return x.astype({np.dtype(float): np.float32, np.dtype(int): np.int32}.get(x.dtype, x.dtype))


def loss_of(*arrays, **options):
    return F.grpo_loss(*arrays, **options)[0]


def first_advantage(*arrays, **options):
    return F.generalized_advantages(*arrays, **options)[0]


# r = (1, 2, 4, 1): μ = 2, r − μ = (−1, 0, 2, −1), Σ (r − μ)² = 6, s = √(6/3) = √2.
# Mean ranks: 4 is first, 2 second, the two 1s share places 3 and 4: rank̄ = (3.5, 2, 1, 3.5).
# −rank̄ about its mean −2.5: (−1, 0.5, 1.5, −1); squares sum to 4.5, s = √(4.5/3) = √1.5.
GROUP = [1.0, 2, 4, 1]
SIGNS = np.array([1, -1, 1, -1, -1, 1, -1, 1])
# Accuracy (1, 1, 0): μ = 2/3, s = √(6/9/2) = 0.5774, standardised (0.5774, 0.5774, −1.1547).
# Brevity (−10, −30, −20): (1, −1, 0). Sum (1.5774, −0.4226, −1.1547): mean 0, squares sum to 4, s = √2.
# Population deviations: (0.7071, 0.7071, −1.4142) + (1.2247, −1.2247, 0), squares sum to 6, s = √2.
SEVERAL = [[1.0, 1, 0], [-10, -30, -20]]
# Returns to go of three episodes, the last of one turn: (1, 1), (0, 0), (2).
# Turn 1: μ = 1, s = 1: 0, −1, 1. Turn 2: μ = ½, s = √½: 0.7071, −0.7071.
TURNS, PRESENT = [[[0.0, 1], [0, 0], [2, 9]]], [[[True, True], [True, True], [True, False]]]
# Spans end at tokens 1 and 3, and at tokens 0 and 1. Returns to go: (3, 1) and (0, −1); both times ±0.7071.
SPANS = [[[7.0, 2, 7, 1, 7], [1, -1, 7, 7, 7]]]
ENDS = [[[False, True, False, True, False], [True, True, False, False, False]]]
ADVANTAGES = [
    (F.group_advantages, [GROUP], np.array([-1, 0, 2, -1]) / 2**0.5, {}),
    (F.group_advantages, [1.0 * (SIGNS > 0)], 0.9354 * SIGNS, {}),  # s = √(8 · ¼ / 7) = 0.5345
    (F.group_advantages, [[0.0, 1]], [-1, 1], {"ddof": 0}),
    (F.group_advantages, [[0.0, 1]], [-0.5, 0.5], {"ddof": 0, "eps": 0.5}),
    (F.rank_advantages, [[0.0, 1]], [-0.5, 0.5], {"ddof": 0, "eps": 0.5}),
    (F.rank_advantages, [GROUP], np.array([-1, 0.5, 1.5, -1]) / 1.5**0.5, {}),
    (F.centered_advantages, [GROUP], [-1, 0, 2, -1], {}),
    (F.leave_one_out_advantages, [GROUP], [-4 / 3, 0, 8 / 3, -4 / 3], {}),  # first: 1 − (2 + 4 + 1)/3
    (F.group_ranks, [GROUP], [3, 2, 1, 3], {}),
    (F.group_ranks, [[NAN, 1, 0]], [3, 1, 2], {}),
    (F.best_of_group_advantages, [GROUP], [0, 0, 2, 0], {}),
    (F.max_rl_advantages, [GROUP], [-0.5, 0, 1, -0.5], {}),
    # Population: s = √2. With ε = 2 − √2 the divisor is 2.
    (F.batch_std_advantages, [[[4.0, 0], [2, 2]]], [[1, -1], [0, 0]], {"ddof": 0, "eps": 2 - 2**0.5}),
    # Two of six completions are in a group whose rewards differ: α = 6/2 = 3, r − μ = ±½.
    (F.gpg_advantages, [[[1.0, 0], [1, 1], [0, 0]]], [[1.5, -1.5], [0, 0], [0, 0]], {}),
    (F.opo_advantages, [[4.0, 1, 0], [0, 0, 0]], [4, 1, 0], {}),  # without tokens there is no baseline
    (F.remax_advantages, [[[1.0, 0], [2, 2]], [0.5, 2.5]], [[0.5, -0.5], [-0.5, -0.5]], {}),
    # n = 4, q = 2, k = 2: R̄ = 1 − C(2,2)/C(4,2) = 5/6, σ = √(5/36), A⁺ = (1/6)/σ = 1/√5, A⁻ = −1/√5.
    (F.pass_at_k_advantages, [[0.1, -5, 7, 0]], np.array([1, -1, 1, -1]) / 5**0.5, {"k": 2}),
    (F.gdpo_advantages, [SEVERAL], [1.1154, -0.2989, -0.8165], {}),
    (F.gdpo_advantages, [SEVERAL], [1.3660, -0.3660, -1.0], {"ddof": 0, "eps": 0.0}),
    (F.turn_advantages, [TURNS], [[[0, 0.7071], [-1, -0.7071], [1, 0]]], {"where": np.array(PRESENT)}),
    (F.span_advantages, [SPANS, ENDS], [[[0.7071] * 5, [-0.7071] * 5]], {}),
    # The teacher thinks the first token e^½ times less likely than the policy does, and the second more likely.
    (F.teacher_advantages, [[-1.0, -2], [-1.5, -0.5]], [-0.5, 1.5], {}),
]

# Of 5 tokens a share of ½ keeps 1 + ⌊½ · 4⌋ = 3: 9, 7 and 5. The 99 is masked.
ENTROPY = [[[9.0, 1, 7], [99, 3, 5]], [[True, True, True], [False, True, True]]]
# Drifts of −d: mean(2, 1) = 1.5, and −1.5.
DRIFT, TWO_EACH = [[-2.0, -1], [2, 1]], [[True, True], [True, True]]
WEIGHTS = [
    *((weights, [[NAN]], [NAN], {}) for weights in (F.truncated_weights, F.masked_weights, F.rejection_weights)),
    # Bounds belong to what is kept.
    *(
        (weights, [[0.0]], [1], {"low": low, "high": high})
        for weights in (F.masked_weights, F.rejection_weights)
        for low, high in [(1.0, 2.0), (0.5, 1.0)]
    ),
    (F.rejection_weights, [[-0.002, -0.0005, 0.0005, 0.002]], [0, 1, 1, 0], {}),
    (F.on_policy_completions, [DRIFT, [-1.0, -1.0], TWO_EACH], [[0, 0], [1, 1]], {"threshold": 1.0}),
    (F.on_policy_completions, [DRIFT, [-1.0, -1.0], TWO_EACH], TWO_EACH, {"threshold": 1.5}),
    (F.on_policy_completions, [DRIFT, [0.0, 0.0], TWO_EACH], TWO_EACH, {"threshold": 1.0}),
    (F.keep_completions, [TWO_EACH, [True, False]], [[1, 1], [0, 0]], {}),
    (F.top_entropy_tokens, ENTROPY, [[1, 0, 1], [0, 0, 1]], {"share": 0.5}),
    (F.top_entropy_tokens, ENTROPY, ENTROPY[1], {"share": 1.0}),
    (F.top_entropy_tokens, ENTROPY, [[1, 0, 0], [0, 0, 0]], {"share": 1e-3}),
    (F.top_entropy_tokens, ENTROPY, [[1, 0, 0], [0, 0, 0]], {}),  # 1 + ⌊0.8⌋
    (F.top_entropy_tokens, ENTROPY, [[1, 0, 1], [0, 0, 0]], {"share": 0.25}),  # 1 + ⌊1⌋
    (F.top_entropy_tokens, [ENTROPY[0], [[False] * 3] * 2], np.zeros((2, 3)), {"share": 1.0}),
]

# A is sunny, rainy, cloudy with 0.7, 0.2, 0.1 and B with 0.6, 0.3, 0.1.
# KL(B ‖ A) = 0.6 log(6/7) + 0.3 log(3/2) = 0.02915; KL(A ‖ B) = 0.7 log(7/6) + 0.2 log(2/3) = 0.02681.
WEATHER = list(np.log([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]))
# π_T = (1/2, 1/2), π = (1/4, 3/4): M = (3/8, 5/8), KL(π_T ‖ M) = 0.0323, KL(π ‖ M) = 0.0354, their mean is 0.0338.
# β = 1/4: M = (5/16, 11/16). ¼ (½ log 8/5 + ½ log 8/11) + ¾ (¼ log 4/5 + ¾ log 12/11) = 0.0260.
COINS = list(np.log([[0.25, 0.75], [0.5, 0.5]]))
TARGET = {"target": 6.0, "num_samples": 1000}
DIVERGENCES = [
    (F.kl_full, WEATHER, 0.02681, {}),
    (F.kl_full, WEATHER, 0.02915, {"reverse": True}),
    (F.jsd_full, COINS, 0.0338, {}),
    (F.jsd_full, COINS, 0.0260, {"beta": 0.25}),
    (F.entropy, [np.log([0.99, 0.01])], 0.0560, {}),  # 0.00995 + 0.04605
    # Uniform over two of three against uniform over three: log(3/2). The other way round is infinite.
    (F.kl_full, [[0.0, 0, -np.inf], [0.0, 0, 0]], np.log(1.5), {}),
    (F.kl_full, [[0.0, 0, 0], [0.0, 0, -np.inf]], np.inf, {}),
    (F.adaptive_kl_coef, [0.1, 6.6], 0.101, TARGET),  # 10 % above, n/horizon = 0.1: β · 1.01
    (F.adaptive_kl_coef, [0.1, 5.4], 0.099, TARGET),
    (F.adaptive_kl_coef, [10.0, 9.0], 10.2, TARGET),  # 50 % above counts as 20 %
    (F.adaptive_kl_coef, [10.0, 0.0], 9.8, TARGET),
    (F.adaptive_kl_coef, [10.0, 6.6], 11.0, TARGET | {"horizon": 1000.0}),
    (F.adaptive_entropy_coef, [0.01, 0.1], 0.015, {}),
    (F.adaptive_entropy_coef, [0.01, 0.3], 0.005, {}),
    (F.adaptive_entropy_coef, [0.01, 0.2], 0.015, {}),  # on target counts as below
    (F.adaptive_entropy_coef, [0.002, 0.3], 0.0, {}),
    (F.adaptive_entropy_coef, [1.0, 0.1], 1.0, {}),
    (F.adaptive_entropy_coef, [0.5, 0.1], 0.6, {"step": 0.25, "largest": 0.6}),
]

# r = (0, 0, 1), V = (½, ¼, ½), γ = λ = ½: δ = (0 + ½·¼ − ½, 0 + ½·½ − ¼, 1 − ½) = (−3/8, 0, ½).
# A = (−3/8 + ¼·1/8, 0 + ¼·½, ½); with K = 2: A₀ = δ₀ + ¼ δ₁ = −3/8.
STEPS, THREE, HALVES = [[0.0, 0, 1], [0.5, 0.25, 0.5]], [True] * 3, {"gamma": 0.5, "lam": 0.5}
# Values of "The weather today is", … sunny, … and, … warm, … today; the reward is what the last token comes to, so that
# the errors are δ = 1.2, 0.3, 0.8, −0.2, 0.5, without a discount. Of the first token, by steps and λ:
WEATHER_TODAY = np.array([6.0, 7.2, 7.5, 8.3, 8.1]), [True] * 5
FIRST = {
    (1, 0.9): 1.2,
    (3, 0.9): 2.118,  # 1.2 + 0.27 + 0.648
    (5, 0.9): 2.30025,  # … − 0.1458 + 0.32805
    (4, 0.0): 1.2,
    (4, 0.5): 1.525,  # 1.2 + 0.15 + 0.2 − 0.025
    (4, 0.9): 1.9722,  # 1.2 + 0.27 + 0.648 − 0.1458, which the post rounds to 1.972
    (4, 1.0): 2.1,
    (None, 1.0): 2.6,  # the reward less the first value
}
# r = 1, penalties (1, 0, 0): R = (0, 1, 1) without discount, mean 2/3, s = √(6/9/2) = 0.57735.
PENALTY = {"token_penalty": np.float32([[1, 0, 0]]), "eps": 0.0}
CORNER = [[[1.0, 2], [3, 99]], [[True, True], [True, False]]]
RETURNS = [
    (F.rewards_at_end, [[2.0, NAN], [[True, False, True, False], [False] * 4]], [[0, 0, 2, 0], [0] * 4], {}),
    (F.generalized_advantages, [*STEPS, THREE], [-11 / 32, 1 / 8, 1 / 2], HALVES),
    (F.generalized_advantages, [*STEPS, THREE], [-3 / 8, 1 / 8, 1 / 2], HALVES | {"num_steps": 2}),
    (F.generalized_advantages, [*STEPS, THREE], [-3 / 8, 0, 1 / 2], HALVES | {"num_steps": 1}),
    (F.generalized_advantages, [*STEPS, THREE], [-11 / 32, 1 / 8, 1 / 2], HALVES | {"num_steps": 20}),
    (F.generalized_advantages, [STEPS[0], [0.0] * 3, THREE], [0.95**2, 0.95, 1], {}),  # γ = 1 and λ = 0.95
    *(
        (first_advantage, [rewards, *WEATHER_TODAY], first, {"num_steps": steps, "lam": lam, "bootstrap": after})
        for (steps, lam), first in FIRST.items()
        # The reward, or nothing yet where the text goes on to a value of 8.6.
        for rewards, after in (([0, 0, 0, 0, 8.6], np.float32(0)), ([0.0] * 5, np.float32(8.6)))
    ),
    # 1 − 0.1 (0.5 − 1), of which the masked token is no part; and a completion without tokens.
    (
        F.kl_penalized_rewards,
        [[1.0, 2], [[-1.0, -2, 5]] * 2, [[-1.5, -1, 0]] * 2, [[True, True, False], [False] * 3]],
        [1.05, 2],
        {"kl_coef": 0.1},
    ),
    (F.whiten, CORNER, [[-1, 0], [1, 0]], {"eps": 0.0}),
    (F.whiten, CORNER, [[-0.5, 0], [0.5, 0]], {"eps": 1.0}),
    (F.whiten, CORNER, [[-(1.5**0.5), 0], [1.5**0.5, 0]], {"ddof": 0, "eps": 0.0}),
    # Without a mask the 99 counts: mean 26.25, deviations (−25.25, −24.25, −23.25, 72.75), s = 48.507.
    (F.whiten, CORNER[:1], np.array([[-25.25, -24.25], [-23.25, 72.75]]) / 48.507, {}),
    (F.reinforce_pp_advantages, [[1.0], [THREE]], [[-1.1547, 0.57735, 0.57735]], PENALTY),
    # Without a penalty every token has its completion's reward: (1, 1, −1), mean 1/3, s = √(24/9/2) = 1.1547.
    (F.reinforce_pp_advantages, [[1.0, -1], CORNER[1]], [[0.57735, 0.57735], [-1.1547, 0]], {"eps": 0.0}),
    # Nothing up to 80, then −1/20 a token, −1 from 100 on.
    (F.overlong_penalty, [[80, 81, 99, 100, 5000]], [0, -0.05, -0.95, -1, -1], {"max_length": 100, "buffer": 20}),
]

# log π(c) = −3 over 2 tokens, log π(r) = −8 over 4; log π_ref(c) = −5, log π_ref(r) = −6: h = 2 − (−2) = 4; per token
# 1 − (−½) = 1.5. The loss at 1 is log(1 + e⁻¹) = 0.3133, at −1 1.3133, at 0 log 2 = 0.6931.
POLICY, REFERENCE, LENGTHS = [-3.0, -8.0], [-5.0, -6.0], [2, 4]
# Mean of 3, −1 and 4 is 2; of the second alone it would be below 0.
MISMATCHED = [[-3.0, -8, -1], [-6.0, -7, -5]]
# β (x − z₀) = 0.1 (12 − 2) = 1 and 0.1 (−8 − 2) = −1: σ(−1) = 0.2689, so each is as it should be.
RATED, GOOD = [[-4.0, -9], [-16.0, -1]], [True, False]
PREFERENCES = [
    (F.bradley_terry_loss, [2.0, 1.0], 0.3133, {}),
    (F.bradley_terry_loss, [2.0, 1.0], 0.6931, {"margin": 1.0}),
    (F.bradley_terry_loss, [2.0, 1.0], 0.3133 + 4.5, {"center_coef": 0.5}),  # ½ · 3²
    (F.dpo_loss, [*POLICY, *REFERENCE], 0.4133, {"beta": 0.25, "label_smoothing": 0.1}),  # 0.9 · 0.3133 + 0.1 · 1.3133
    (F.robust_dpo_loss, [*POLICY, *REFERENCE], 0.1883, {"beta": 0.25}),  # (0.9 · 0.3133 − 0.1 · 1.3133) / 0.8
    (F.length_normalized_dpo_loss, [*POLICY, *REFERENCE, *LENGTHS], 0.4133, {"beta": 2 / 3, "label_smoothing": 0.1}),
    (F.ipo_loss, [*POLICY, *REFERENCE, *LENGTHS], 0.25, {"tau": 0.25}),  # of means: (1.5 − 2)²
    (F.ipo_loss, [*POLICY, *REFERENCE], 4.0, {"tau": 0.25}),  # of sums: (4 − 2)²
    (F.hinge_loss, [*POLICY, *REFERENCE], 0.0, {"beta": 0.25}),
    (F.hinge_loss, POLICY, 0.5, {}),  # 1 − 0.1 · 5
    (F.simpo_loss, [*POLICY, *LENGTHS], 0.3133, {"gamma": 0.0}),  # 2 (−1.5 + 2) = 1
    # log odds −1.5 − log(1 − 0.2231) = −1.2475 and −2 − log(1 − 0.1353) = −1.8546; log(1 + e^−0.6071) = 0.4352.
    (F.orpo_loss, [*POLICY, *LENGTHS], 1.5435, {}),  # 1.5 + 0.04352
    (F.cpo_loss, [*POLICY, 2], 1.8133, {"beta": 0.2}),  # 0.3133 + 3 / 2
    (F.cpo_loss, POLICY, 3.3133, {"beta": 0.2}),
    (F.cpo_loss, [*POLICY, 2], 0.3133, {"beta": 0.2, "nll_coef": 0.0}),
    (F.kto_loss, [*RATED, GOOD], [0.5379, 0.1345], {"kl": 2.0, "desirable_weight": 2.0, "undesirable_weight": 0.5}),
    (F.kto_kl, MISMATCHED, 2.0, {}),
    (F.kto_kl, MISMATCHED, 0.0, {"where": np.array([False, True, False])}),
    (F.kto_kl, MISMATCHED, 0.0, {"where": np.zeros(3, bool)}),
    # R = 3, V = 1, V_old = 0.5: clipped to 0.7, ½ (2.3)² = 2.645 is larger than ½ · 4.
    (F.critic_loss, [1.0, 3.0], 2.645, {"old_values": np.float32(0.5)}),
    (F.critic_loss, [4.0, 3.0], 0.5, {}),
    (F.critic_loss, [4.0, 3.0], 0.5, {"old_values": np.float32(3)}),  # clipped to 3.2 it is smaller: no clip
]

# One completion, A = 2, ρ = (1.5, 1), then a masked slot; weights ½ and ½: −min(3, 1.2 · 2) = −2.4 and −2.
# KL: log π − log π_ref = log 2 on the first, k3 = ½ − 1 + log 2 = 0.1931; 0 on the second.
NEW, OLD = np.log([[0.6, 0.5, 0.9]]), np.log([[0.4, 0.5, 0.1]])
REF = {"ref_logprobs": np.log(np.float32([[0.3, 0.5, 0.2]]))}
COMPLETION = [NEW, OLD, [2.0], [[True, True, False]]]
BONUS = {"entropy": np.float32([[1, 2, NAN]]), "weights": np.float32([[0.25, 0.25, 0]])}
# No ratio leaves [0.8, 1.2]: the mean of ρA is 3.1/3. π_θ ∝ (1.08, 0.88, 1.1), π_ref ∝ (1, 0.5, 1.5):
# KL = 0.35294 log 1.05882 + 0.28758 log 1.72549 + 0.35948 log 0.71895 = 0.05842, J = 1.03333 − 0.01 · 0.05842.
EXAMPLE = [[1.2, 0.8, 1.1], [1.0, 1, 1], [0.9, 1.1, 1], [1.0, 0.5, 1.5]]
RAGGED = [[True] * 4, [True, False, False, False]]
LOSSES = [
    (loss_of, COMPLETION, -2.2, {}),
    (loss_of, COMPLETION, -2.2 + 0.5 * 0.04 * (np.log(2) - 0.5), REF),
    # Completions of 4 tokens and 1, of A = 1 and −3: by default each has its own mean.
    (loss_of, [np.zeros((2, 4)), np.zeros((2, 4)), [1.0, -3], RAGGED], 1, {}),
    (loss_of, [NEW, NEW, [2.0], COMPLETION[3]], -1 - 0.075, BONUS | {"entropy_coef": 0.1}),  # 0.1 (¼ · 1 + ¼ · 2)
    (loss_of, [NEW, NEW, [2.0], COMPLETION[3]], -1, BONUS),  # GRPO has no bonus
    (F.weighted_sum, [[[4.0, NAN], [np.inf, 3]], [[0.5, 1], [7, -2]], [[True, False], [False, True]]], -4, {}),
    (F.masked_sum, [[True, False, True, True], [True, True, True, False]], (2, 3), {}),
    (F.grpo_objective, EXAMPLE, 1.032749, {}),
    (F.grpo_objective, [[5.0], [1.0], [1.0], [1.0]], 1.2, {}),
    (F.grpo_objective, [[5.0], [-1.0], [1.0], [1.0]], -5.0, {}),
    (F.grpo_objective, [[0.5], [-1.0], [1.0], [1.0]], -0.7, {"epsilon": 0.3}),
    # 0 · log(0 + 1e-10) = 0: only the other response is left, with KL = 1 · log(1/0.5) = 0.6931.
    (F.grpo_objective, [[0.0, 1], [1.0, 1], [0.5, 0.5], [0.5, 0.5]], 0.5 - 0.6931, {"beta": 1.0}),
]

# log π = (−1, −2, −3), log π_old = (−1.5, −1, −3), the last token masked: d = (0.5, −1, ·).
LOG_RATIO = [[-1.0, -2, -3], [-1.5, -1, -3], [True, True, False]]
# d = (1, −1, 0.1), then a masked slot. Against A > 0 the clip holds 1 to 0.08, against A < 0 −1 to −0.05.
MOVED, STAYED, FIRST_THREE = [[-1.0, -3, -1.9, 7]], [[-2.0] * 4], [[True, True, True, False]]
NARROW = {"epsilon_low": 0.05, "epsilon_high": 0.08}
# π = (0.9, 0.02, 0.1, 0.5), π_s = (0.5, 0.01, 0.5, 0.5): moved by 0.4, 0.01, −0.4 and 0; ρ = 1.8, 2, 0.2, 1.
FAR = [np.log([[0.9, 0.02, 0.1, 0.5]] * 2), np.log([[0.5, 0.01, 0.5, 0.5]] * 2), [1.0, -1], [[True] * 4] * 2]
SQUARED = np.array([[0, -2, -0.2, -1], [1.8, 2, 0, 1]]) + 0.5 * np.log([1.8, 2, 0.2, 1]) ** 2
# W = 2. A = 1: φ = exp(3 + 2 log 2 − 3 · 2) = 4 e⁻³; A = −1: exp(2 + 3 log 2 − 2 · 2) = 8 e⁻².
TWICE = [[-1.0, -2, 5], [-1 - np.log(4), -2 + np.log(2), 0]]
TERMS = [
    (F.token_log_ratio, LOG_RATIO, [0.5, -1, 0], {}),
    (F.sequence_log_ratio, LOG_RATIO, [-0.5, -0.5, 0], {}),
    *((ratio, LOG_RATIO, [-0.25, -0.25, 0], {}) for ratio in (F.sequence_mean_log_ratio, F.gspo_log_ratio)),
    # The old policy is not read.
    (F.reinforce_term, [[[-1.0, -2]], [[NAN, NAN]], [-0.5], [[True, True]]], [[-0.5, -1.0]], {}),
    (F.gmpo_term, [MOVED, STAYED, [2.0], FIRST_THREE], [[-2 * np.exp((0.08 - 1 + 0.08) / 3)] * 3 + [0]], NARROW),
    (F.gmpo_term, [MOVED, STAYED, [-2.0], FIRST_THREE], [[2 * np.exp((1 - 0.05 + 0.1) / 3)] * 3 + [0]], NARROW),
    # d = (1, 0.3) clipped to (0.4, 0.3): a token without weight is clipped like the others.
    (F.gmpo_term, [[1.0, 0.3], [0.0, 0], [0.0, 1], [True, True]], [0, -np.exp(0.35)], {}),
    # A = 1 loses the first, A = −1 the third, however far the ratio of the second is; the square stays on every token.
    (F.dppo_term, FAR, SQUARED, {"penalty": 0.5}),
    (F.dppo_term, FAR, [[0, 0, -0.2, -1], [1.8, 2, 0, 1]], {"penalty": 0.0, "threshold": 0.005}),
    (F.vespo_term, [*TWICE, [1.0, -1, 1], [True, True, False]], [4 * np.exp(-3), -2 * 8 * np.exp(-2), 0], {}),
    (
        F.vespo_term,
        [*TWICE, [1.0, -1, 1], [True, True, False]],
        [2 * np.exp(-0.5), -2 * np.exp(-1.0), 0],
        {"k_positive": 1.0, "lambda_positive": 0.5, "k_negative": 0.0, "lambda_negative": 1.0},
    ),
    # Tokens within ±20, so that (25, −5) is 15; completions from log 1e-8 to 20. φ = W.
    (
        F.vespo_term,
        [np.full((4, 2), -1.0), np.array([[-26.0, 4], [29, -6], [-16, -16], [14, 14]]), [1.0] * 4, [[True] * 2] * 4],
        np.exp([[15.0] * 2, [-15] * 2, [20] * 2, [np.log(1e-8)] * 2]),
        {"k_positive": 1.0, "lambda_positive": 0.0},
    ),
    # Tokens of log π −1, −2 and −6, mean −3, and A = 2, 2, −1, mean 1: (1 · 2, 1 · 1, −2 · −3).
    (
        F.token_covariance,
        [[[-1.0, -2], [-6, -50]], [[2.0, 2], [-1, NAN]], [[True, True], [True, False]]],
        [[2, 1], [6, 0]],
        {},
    ),
]

# Logits (0, log 3): π = (1/4, 3/4), H = ¼ · 1.3863 + ¾ · 0.2877 = 0.5623. τ = ½ squares the odds: π = (1/10, 9/10).
ONE, ODDS, BOTH = [[1.0], [1.0]], np.log([[1.0], [3.0]]), [0, 1]
RAIN, SUN = (np.log(x)[:, None] for x in ([0.7, 0.2, 0.1], [0.6, 0.3, 0.1]))
EVEN = np.log([[0.5], [0.5]])
# Of the weights 5, 2, 3, 6 the second and the fourth are chosen: 2, 6, and 5 + 3. τ = ½ squares them.
FOUR = np.log([[5.0], [2], [3], [6]])
DESCENDING = [[2.0], [1.0], [0.0], [-1.0]]
HIDDEN = [
    (F.token_logprobs, [ONE, ODDS, BOTH], ([-1.3863, -0.2877], [0.5623, 0.5623]), {}),
    (F.token_logprobs, [ONE, ODDS, BOTH], ([-2.3026, -0.1054], [0.3251, 0.3251]), {"temperature": 0.5}),
    # c·tanh(z/c) of z = (0, 2) with c = 1: (0, .9640); p = e^.964 / (1 + e^.964) = .7239.
    (
        F.token_logprobs,
        [ONE, [[0.0], [2.0]], BOTH],
        (np.log([0.2761, 0.7239]), [0.5893, 0.5893]),
        {"softcap": 1.0},
    ),
    (F.token_logprobs, [ONE[:1], [[1.0]], [0]], ([0], [0]), {}),  # a vocabulary of one token is certain
    (F.token_kl, [ONE[:1], RAIN, ONE[:1], SUN], [0.02681], {}),
    (F.token_kl, [ONE[:1], RAIN, ONE[:1], SUN], [0.02915], {"reverse": True}),
    (F.token_kl, [ONE[:1], EVEN, ONE[:1], ODDS], [0.5108], {"temperature": 0.5}),  # ½ log 5 + ½ log 5/9
    (F.token_jsd, [ONE[:1], ODDS, ONE[:1], EVEN], [0.0338], {}),
    (F.token_jsd, [ONE[:1], ODDS, ONE[:1], EVEN], [0.0260], {"beta": 0.25}),
    (F.bucket_logits, [ONE[:1], FOUR, [[1, 3]]], np.log([[2, 6, 8]]), {}),
    (F.bucket_logits, [ONE[:1], FOUR, [[1, 3]]], np.log([[4, 36, 34]]), {"temperature": 0.5}),
    (F.top_tokens, [ONE[:1], FOUR], [[3, 0, 2]], {"k": 3}),
    # 1 − log(e² + e). Over all tokens it is −1.440190, and S has the probability .880797. H is that of (.7311, .2689).
    (F.support_logprobs, [ONE[:1], DESCENDING, [1], [[0, 1, -1]]], ([-1.313262], [0.582203]), {}),
    (F.support_logprobs, [ONE[:1], DESCENDING, [1], [[0, 1, -1]]], ([-2.126928], [0.365335]), {"temperature": 0.5}),
    (F.support_logprobs, [ONE[:1], DESCENDING, [1], [[4, 1, -1]]], ([0], [0]), {}),  # one token is certain
]
TABLES = ADVANTAGES, WEIGHTS, DIVERGENCES, RETURNS, PREFERENCES, LOSSES, TERMS, HIDDEN
BY_HAND = {
    f"{function.__name__}-{number}": (partial(function, **options), arrays, expected)
    for number, (function, arrays, expected, options) in enumerate(entry for table in TABLES for entry in table)
}


@cache
def results():
    """One program for all of them."""

    def evaluate(arrays):
        return {name: function(*arrays[name]) for name, (function, _, _) in BY_HAND.items()}

    return jax.jit(evaluate)({name: [array(x) for x in arrays] for name, (_, arrays, _) in BY_HAND.items()})


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    expected = BY_HAND[name][2]
    leaves = jax.tree.leaves(results()[name])
    for result, numbers in zip(leaves, expected if isinstance(expected, tuple) else [expected], strict=True):
        assert_allclose(result, np.asarray(numbers), rtol=1e-4, atol=5e-5)


# (ratio, advantage, loss, gradient). dρ/dd = ρ: where a loss is −ρA, so is its gradient.
CLIPPED = [
    (1.8, 1.0, -1.2, 0.0),  # a good response may gain no more than up to ρ = 1.2: −min(1.8, 1.2)
    (0.4, -1.0, 0.8, 0.0),  # a bad one may lose no more than down to 0.8: −min(−0.4, −0.8)
    # The clip never acts against the advantage, so that a step too far is taken back.
    (1.8, -1.0, 1.8, 1.8),
    (0.4, 1.0, -0.4, -0.4),
]
SURROGATES = {
    F.clipped_surrogate: [*CLIPPED, (100.0, -2.0, 200.0, 200.0)],
    # No more than −4A where A < 0, on the side that the clip leaves open.
    partial(F.clipped_surrogate, delta=4.0): [*CLIPPED, (3.5, -2.0, 7.0, 7.0), (100.0, -2.0, 8.0, 0.0)],
    F.cispo_surrogate: [
        (2.0, 1.5, -2 * 1.5 * np.log(2), -3.0),  # −ρ A d; the gradient is −ρ A
        (8.0, -1.0, 5 * np.log(8), 5.0),  # weight capped at 5, gradient kept
        (0.01, -1.0, 0.01 * np.log(0.01), 0.01),  # no lower bound
    ],
    # σ(log 3) = ¾, of slope 3/16: −A (4/τ) σ, and −A · 4 · 3/16 · ρ.
    F.sapo_surrogate: [
        (1.0, -1.0, 2 / 1.05, 1.0),
        (1 + np.log(3), 2.0, -6.0, -1.5 * (1 + np.log(3))),
        (1 + np.log(3) / 1.05, -2.0, 6 / 1.05, 1.5 * (1 + np.log(3) / 1.05)),
        (100.0, 1.0, -4.0, 0.0),  # a far ratio has no pull
    ],
}


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_surrogates_and_their_gradients_by_hand(surrogate):
    ratio, advantages, loss, gradient = np.array(SURROGATES[surrogate], np.float32).T
    result, pull = jax.vjp(lambda d: surrogate(d, advantages), np.log(ratio)[:, None])
    assert_allclose(result, loss[:, None], rtol=1e-5)
    assert_allclose(pull(jnp.ones_like(result))[0], gradient[:, None], rtol=1e-5, atol=1e-6)
