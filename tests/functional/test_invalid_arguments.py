"""Arguments that are refused, in one sentence that names the function and the argument.

test_properties.py gives other shapes and lists to every function of `cases.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import functional as F


def ones(*shape):
    return np.ones(shape, np.float32)


X, MASK, A = ones(2, 3), np.ones((2, 3), bool), ones(2)
HIDDEN, WEIGHT, IDS = ones(2, 3, 4), ones(7, 4), np.zeros((2, 3), np.int32)
COLUMN_IDS = IDS[..., None]
COLUMN = A[:, None]  # of which broadcasting would make every completion's number with every other's
ARGUMENTS = X, X, A, MASK
KEY = jax.random.key(0)
GRPO, GMPO = F.PRESETS["grpo"], F.PRESETS["gmpo"]
OF_COMPLETIONS = F.Objective(F.ignore_lengths(F.group_advantages), per_completion=True)
UNCLIPPED = F.ratio_term(F.token_log_ratio, F.unclipped_surrogate)
MIXED_UP = GRPO._replace(term=lambda logprobs, old, advantages, mask: F.whiten(advantages, mask), constants={})

# A call, and words of the sentence.
SHAPES = [
    # The function, the argument, the shape that it must have and why, and the shape that it has.
    (
        lambda: F.grpo_loss(X, ones(2, 4), A, MASK),
        ["grpo_loss", "old_logprobs", "[2, 3]", "[..., T]", "logprobs has [2, 3]", "[2, 4]"],
    ),
    (lambda: F.grpo_loss(X, X, ones(3), MASK), ["advantages", "[2] or [2, 3]", "[...] or [..., T]", "has [3]"]),
    (lambda: F.grpo_loss(ones(), X, A, MASK), ["logprobs", "[..., T], but has []"]),
    (lambda: F.grpo_loss(X, X, COLUMN, MASK), ["grpo_loss", "advantages", "[2, 1]"]),
    (lambda: F.grpo_loss(X, X, 1.0, MASK), ["advantages", "[...] or [..., T]", "float"]),
    (lambda: F.grpo_loss(X, X, A), ["grpo_loss", "completion_mask"]),
    (lambda: F.grpo_loss(X, X, A, X), ["completion_mask must be bool"]),
    *(
        (lambda call=call, mask=mask: call(mask), ["must be bool", str(mask.dtype)])
        for mask in (X, IDS, MASK.astype(np.int8))
        for call in (
            *(F.sequence_mean_weights, F.token_mean_weights, lambda mask: F.gspo_log_ratio(X, X, mask)),
            *(lambda mask: F.whiten(X, mask), lambda mask: F.group_advantages(X, where=mask)),
            *(lambda mask: F.kto_loss(X, X, mask, kl=0.1), lambda mask: F.kto_kl(X, X, where=mask)),
        )
    ),
    (lambda: MIXED_UP.loss(*ARGUMENTS, ref_logprobs=X), ["whiten: mask", "[2]"]),  # when the term is called
    (lambda: F.gdpo_advantages(ones(4, 2, 3), weights=ones(1)), ["gdpo_advantages", "weights", "[4]"]),
    (lambda: F.per_token(COLUMN, X), ["per_token", "advantages", "[2] or [2, 3]"]),
    (lambda: F.clipped_surrogate(X, COLUMN), ["clipped_surrogate", "advantages", "log_ratio has [2, 3]", "[2, 1]"]),
    (lambda: F.clip_cov_term(X, X, COLUMN, MASK, key=KEY), ["clip_cov_term", "advantages"]),
    (lambda: F.token_logprobs(HIDDEN, ones(4, 7), IDS), ["unembedding", "[V, 4]", "[V, D]", "ids has [2, 3]"]),
    (lambda: F.token_logprobs(HIDDEN, WEIGHT, IDS.T), ["hidden", "[3, 2, D]"]),
    (lambda: F.token_logprobs(0.5, WEIGHT, IDS), ["hidden", "[..., D]", "float"]),
    (lambda: F.token_logprobs(HIDDEN, WEIGHT, [[0] * 3] * 2), ["ids", "[...]", "list", "jnp.array(ids)"]),
    (lambda: F.token_kl(HIDDEN, WEIGHT, HIDDEN, WEIGHT[1:]), ["ref_unembedding", "[7, 4]"]),
    (lambda: F.token_kl(HIDDEN, WEIGHT, HIDDEN[:, 1:], WEIGHT), ["ref_hidden", "[2, 3"]),
    (lambda: F.token_jsd(HIDDEN, WEIGHT, HIDDEN, WEIGHT[1:]), ["ref_unembedding", "[7, 4]"]),
    (lambda: F.bucket_logits(HIDDEN, WEIGHT, IDS[1:, :, None]), ["ids"]),
    (lambda: F.support_logprobs(HIDDEN, WEIGHT, IDS, IDS[1:, :, None]), ["support_ids", "[2, 3, K]"]),
    (lambda: F.overlong_penalty((3,), max_length=9, buffer=2), ["lengths", "tuple"]),
    *(
        (lambda short=short: F.grpo_objective(*([1.0] * (2 - (i == short)) for i in range(4))), ["lengths differ"])
        for short in range(4)
    ),
]
OPTIONS = [
    (lambda: F.pass_at_k_advantages(A, k=0), ["k is 0"]),
    (lambda: F.pass_at_k_advantages(A, k=3), ["k is 3"]),
    (lambda: F.top_tokens(HIDDEN, WEIGHT, 0), ["k is 0"]),
    (lambda: F.top_tokens(HIDDEN, WEIGHT, 8), ["k is 8"]),
    (lambda: F.generalized_advantages(X, X, MASK, num_steps=0), ["num_steps is 0"]),
    (lambda: F.overlong_penalty(A, max_length=9, buffer=0), ["buffer is 0", "max_length"]),
    (lambda: F.overlong_penalty(A, max_length=9, buffer=10), ["buffer is 10", "max_length"]),
    *((lambda beta=beta: F.jsd_full(X, X, beta=beta), ["beta"]) for beta in (0.0, 1.0, float("nan"))),
    (lambda: F.token_jsd(HIDDEN, WEIGHT, HIDDEN, WEIGHT, beta=1.0), ["beta"]),
    *((lambda delta=delta: F.clipped_surrogate(X, A, delta=delta), ["delta"]) for delta in (1.0, -3, float("nan"))),
    (lambda: F.cispo_surrogate(X, A, epsilon_high=-0.5), ["epsilon_high"]),
    *(
        (lambda share=share: F.robust_dpo_loss(A, A, A, A, label_smoothing=share), ["label_smoothing"])
        for share in (0.5, 0.6, -0.1, float("nan"))
    ),
    *((lambda tau=tau: F.ipo_loss(A, A, A, A, tau=tau), ["tau"]) for tau in (0, 0.0, -1.0)),
    (lambda: F.constant_length_weights(MASK, max_length=0), ["max_length is 0"]),
    (lambda: F.adaptive_kl_coef(0.1, 1.0, target=0.0, num_samples=1), ["target is 0.0"]),
    (lambda: F.adaptive_kl_coef(0.1, 1.0, target=1.0, num_samples=1, horizon=0), ["horizon is 0"]),
    *(
        (lambda call=call, option=option: call(**option), [f"{next(iter(option))} is 0"])
        for option in ({"temperature": 0.0}, {"softcap": 0})
        for call in (
            *(partial(F.token_logprobs, HIDDEN, WEIGHT, IDS), partial(F.token_kl, HIDDEN, WEIGHT, HIDDEN, WEIGHT)),
            *(
                partial(F.token_jsd, HIDDEN, WEIGHT, HIDDEN, WEIGHT),
                partial(F.bucket_logits, HIDDEN, WEIGHT, COLUMN_IDS),
            ),
        )
    ),
    (lambda: F.sapo_surrogate(X, A, tau_positive=0), ["tau_positive"]),
    (lambda: F.sapo_surrogate(X, A, tau_negative=-1.0), ["tau_negative"]),
    *(
        (lambda term=term: term(*ARGUMENTS, epsilon=0.2), ["epsilon_low and epsilon_high"])
        for term in (F.grpo_loss, UNCLIPPED)
    ),
    (lambda: UNCLIPPED(*ARGUMENTS, epsilon_low=0.1), ["epsilon_low"]),
    (lambda: F.grpo_loss(*ARGUMENTS, term=F.clipped_term, dual_clip=0.2), ["dual_clip"]),
    (lambda: F.grpo_loss(*ARGUMENTS, term=F.dppo_term, epsilon_low=0.2), ["epsilon_low"]),
    (lambda: F.hinge_loss(A, A, ref_chosen=A), ["ref_chosen", "ref_rejected"]),
    (lambda: F.ipo_loss(A, A, A, A, rejected_length=A), ["rejected_length", "chosen_length"]),
    (lambda: GRPO.loss(*ARGUMENTS), ["give ref_logprobs"]),
    (lambda: F.grpo_loss(*ARGUMENTS, entropy_coef=0.1), ["entropy_coef is 0.1", "give entropy"]),
    (lambda: F.PRESETS["drgrpo"], ["no preset drgrpo", "dr_grpo"]),
    (lambda: F.PRESETS["rloo"].loss(*ARGUMENTS, ref_logprobs=X), ["kl_penalized_rewards"]),
    (lambda: F.check(GRPO, group_size=1), ["group_size is 1", "at least 2"]),
]
OBJECTIVES = [
    (OF_COMPLETIONS._replace(aggregation=F.token_mean_weights), ["sequence_mean_weights"]),
    (OF_COMPLETIONS._replace(aggregation=F.constant_length_weights), ["sequence_mean_weights"]),
    (GRPO._replace(divergence=F.kl_k1), ["kl_k1", "kl_unbiased", "kl_in_reward"]),
    (GRPO._replace(divergence=F.kl_k2, kl_bias_correction=True), ["kl_bias_correction", "kl_k3"]),
    (GRPO._replace(divergence=F.kl_unbiased, kl_bias_correction=True), ["kl_bias_correction", "kl_k3"]),
    (GRPO._replace(kl_coef=-1.0), ["kl_coef is -1.0"]),
    (GRPO._replace(entropy_coef=float("inf")), ["entropy_coef is inf"]),
    (GRPO._replace(kl_in_reward=True, kl_bias_correction=True), ["kl_bias_correction", "kl_in_reward"]),
    (F.PRESETS["pass_at_k"]._replace(kl_in_reward=True, kl_coef=0.1), ["signs of rewards", "kl_in_reward"]),
    (GRPO.with_constants(epsilon_low=float("nan")), ["epsilon_low is nan"]),
    (F.PRESETS["cispo"].with_constants(epsilon_high=-0.5), ["epsilon_high is -0.5"]),
    (GRPO.with_constants(delta=1.0), ["delta is 1.0"]),
]
REFUSED = [
    *SHAPES,
    *OPTIONS,
    *((lambda objective=objective: F.check(objective), words) for objective, words in OBJECTIVES),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_is_refused_is_named_in_one_sentence(call, words):
    with pytest.raises((AssertionError, KeyError, TypeError, ValueError)) as error:
        jax.eval_shape(call)
    assert [word for word in words if word not in str(error.value)] == []
    assert "\n" not in str(error.value)


SENSIBLE_OBJECTIVES = [
    *F.PRESETS.values(),
    OF_COMPLETIONS._replace(aggregation=F.sequence_sum_weights),
    GRPO._replace(divergence=F.kl_k1, kl_bias_correction=True),
    GRPO._replace(divergence=F.kl_k1, kl_in_reward=True),
    GRPO._replace(divergence=F.kl_k1, kl_coef=0.0),
    F.PRESETS["cispo"].with_constants(epsilon_high=0.5),
    GRPO.with_constants(delta=1.3),
    GMPO.with_constants(epsilon_low=0.0),
]


@pytest.mark.parametrize("objective", SENSIBLE_OBJECTIVES)
def test_objectives_that_make_sense_are_accepted(objective):
    F.check(objective)


def test_numpy_arrays_and_plain_numbers_are_accepted():
    assert F.group_advantages(np.array([1.0, 1.0], np.float32)).shape == (2,)
    assert F.kl_k3(-1.0, -1.0) == 0
    assert F.clipped_surrogate(X, 1.0).shape == F.clipped_surrogate(X, jnp.array(1.0)).shape == (2, 3)
    assert F.clipped_surrogate(jnp.array(0.0), 1.0).shape == ()
    assert UNCLIPPED(X, X, 1.0, MASK).shape == (2, 3)
    assert F.per_token(jnp.ones((2, 3)), ones(2, 3, 4)).shape == (2, 3, 1)
    assert F.per_token(jnp.ones(()), ones(4)).shape == (1,)
