"""Supervised distillation: on given completions, the policy moves towards the distributions of a teacher.

A teacher is a frozen second policy of any size with the same tokens. At each token of a completion the policy moves
towards the teacher's distribution over the vocabulary, and with a coefficient towards the token itself. Teacher and
policy are computed in the same piece of a batch, so that no state of the teacher outlives the piece. For on-policy
distillation, in which the policy samples the completions, see `rl.distillation`; the divergences are the same.
"""

from collections.abc import Iterable
from functools import partial

import jax

from grpo_jax.config import Divergence, TeacherConfig
from grpo_jax.data.packing import Packed
from grpo_jax.devices import ONE_DEVICE, Devices
from grpo_jax.errors import UsageError
from grpo_jax.functional import masked_sum, token_mean_weights, weighted_sum
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import TokenStates
from grpo_jax.offline.phase import FitObjective, row_scorer
from grpo_jax.offline.sft import as_completions, sum_texts
from grpo_jax.options import check_ranges
from grpo_jax.step import Batch, Logs, outputs_of_states, score_completion_tokens, states_of, token_divergence


def check_teacher_options(options: TeacherConfig, nll_coef: float) -> None:
    """Raises if the options of a phase with a teacher do not work together.

    Args:
      options: The options of the teacher.
      nll_coef: The weight λ.

    Raises:
      UsageError: Options do not work. The message says what to change.
    """
    check_ranges(options)
    for sentence in options.conflicts():
        raise UsageError(sentence)
    kind = options.distillation
    if kind == "k1":
        raise UsageError("distillation k1 is an advantage, and this method has none: take another, or --method grpo")
    if kind != "none" and not options.teacher:
        raise UsageError(f"distillation {kind} needs a teacher: name a model with the same tokenizer as teacher")
    if nll_coef and kind == "none":
        raise UsageError(f"nll_coef is {nll_coef}, but distillation is none: leave it out, or name a teacher")


def divergence_objective(
    policy: Policy, teacher: Policy, divergence: Divergence, nll_coef: float = 0.0
) -> FitObjective:
    """Returns the objective that minimises the divergence from a teacher plus λ times the NLL of completions.

    Its parameters are {"policy": ..., "teacher": ...}, and only the policy's are trained. Batches are those of
    `sft_objective`.

    Args:
      policy: The model's functions.
      teacher: The teacher's functions.
      divergence: The divergence from the teacher.
      nll_coef: λ, the weight of the tokens' NLL. Default: 0.
    """
    return FitObjective(partial(distillation_loss, policy, teacher, divergence, nll_coef), token_mean_weights)


def distillation_loss(
    policy: Policy, teacher: Policy, divergence: Divergence, nll_coef: float, params: Params, batch: Batch | Packed
) -> tuple[jax.Array, Logs]:
    """L = Σ w [D_T − λ log π(oₜ)]; logs the means of divergence, NLL and entropy over tokens."""
    batch = as_completions(batch)
    states = states_of(policy, params["policy"], batch)
    scores = score_completion_tokens(policy, params["policy"], batch, states)
    values = divergence_of_states(policy, teacher, divergence, params, batch, states)
    loss = weighted_sum(values - nll_coef * scores.logprobs, batch.weights, batch.completion_mask)
    means = {"distillation": values, "nll": -scores.logprobs, "entropy": scores.entropy}
    return loss, Logs({name: masked_sum(x, batch.completion_mask) for name, x in means.items()})


def teacher_divergence(
    policy: Policy, teacher: Policy, divergence: Divergence, params: Params, batch: Batch | Packed
) -> jax.Array:
    """Returns the divergence of the policy from its teacher at each token, in nats, `[N, G, T]` or `[B, S]`.

    Args:
      policy, teacher, divergence: See `divergence_objective`.
      params: The parameters of policy and teacher, by role.
      batch: The completions.
    """
    completions = as_completions(batch)
    states = states_of(policy, params["policy"], completions)
    values = divergence_of_states(policy, teacher, divergence, params, completions, states)
    return values.reshape(batch.completion_mask.shape)


def divergence_of_states(
    policy: Policy, teacher: Policy, divergence: Divergence, params: Params, batch: Batch, states: TokenStates
) -> jax.Array:
    """Returns `teacher_divergence`, `[N, G, T]`, from the states of the policy."""
    heads = policy.head(params["policy"]), teacher.head(params["teacher"])

    def compare(hidden: jax.Array, taught: jax.Array, temperature: jax.Array) -> jax.Array:
        outputs = outputs_of_states(divergence, heads[1], taught, temperature, vocab_size=len(heads[0][0]))
        return token_divergence(divergence, heads, hidden, outputs, temperature)

    taught = jax.lax.stop_gradient(states_of(teacher, params["teacher"], batch))
    return states.map(compare, taught, batch.temperature)


def mean_divergence(
    policy: Policy,
    teacher: Policy,
    divergence: Divergence,
    params: Params,
    batches: Iterable[Packed],
    *,
    devices: Devices = ONE_DEVICE,
) -> float:
    """Returns the mean divergence from the teacher over all completion tokens of the batches, in nats.

    Args:
      policy, teacher, divergence: See `divergence_objective`.
      params: The parameters of policy and teacher, by role.
      batches, devices: See `text_nll`.
    """
    score = row_scorer(teacher_divergence, policy, teacher, divergence, devices=devices)
    totals, tokens = sum_texts(score, params, batches)
    return float(totals.sum() / max(tokens.sum(), 1))
