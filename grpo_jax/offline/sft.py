"""Supervised fine-tuning on given completions, and supervised distillation.

The policy maximises the likelihood of the completions. With a teacher, a frozen second policy of any size with the same
tokens, it moves at each token of a completion towards the teacher's distribution over the vocabulary, and with a
coefficient towards the token itself. Teacher and policy are computed in the same piece of a batch, so that no state of
the teacher outlives the piece. For on-policy distillation, in which the policy samples the completions, see
`rl.distillation`; the divergences are the same.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Divergence, TeacherConfig
from grpo_jax.data.packing import Packed
from grpo_jax.devices import ONE_DEVICE, Devices
from grpo_jax.errors import UsageError
from grpo_jax.functional import masked_sum, token_mean_weights, weighted_sum
from grpo_jax.models.geometry import TokenStates, rows_of_texts
from grpo_jax.models.policy import Policy
from grpo_jax.models.transformer import Params
from grpo_jax.offline.phase import FitObjective, row_scorer
from grpo_jax.options import check_ranges
from grpo_jax.step.scores import outputs_of_states, score_completion_tokens, states_of, token_divergence
from grpo_jax.step.types import Batch, Logs


def sft_objective(policy: Policy) -> FitObjective:
    """Returns the objective that minimises the NLL of completions.

    Its parameters are the policy's. With `lora.Adapted`, only the adapters are trained. A batch holds prompts with one
    completion each (G is 1), or packed rows.

    Args:
      policy: The model's functions.
    """
    return FitObjective(partial(text_loss, policy), token_mean_weights)


def text_loss(policy: Policy, params: Params, batch: Batch | Packed) -> tuple[jax.Array, Logs]:
    """L = −Σ w log π(oₜ): next-token loss on the completion, none on the prompt."""
    batch = as_completions(batch)
    scores = score_completion_tokens(policy, params, batch)
    loss = weighted_sum(-scores.logprobs, batch.weights, batch.completion_mask)
    return loss, Logs({"entropy": masked_sum(scores.entropy, batch.completion_mask)})


def as_completions(batch: Batch | Packed) -> Batch:
    """Returns packed rows as completions of empty prompts, one a row. The temperature is 1.

    The first token of a text is scored after the end of another text; the mask excludes it.
    """
    if not isinstance(batch, Packed):
        return batch
    ids, mask = (jnp.asarray(x)[:, None] for x in (batch.ids, batch.completion_mask))
    weights = None if batch.weights is None else batch.weights[:, None]
    layout, temperature = rows_of_texts(batch.ids, batch.texts), jnp.ones((len(ids), 1), jnp.float32)
    return Batch(layout.prompt, ids, mask, temperature, weights=weights, layout=layout)


def token_nll(policy: Policy, params: Params, batch: Batch | Packed) -> jax.Array:
    """−log π(oₜ), `[N, G, T]` or `[B, S]`."""
    logprobs = score_completion_tokens(policy, params, as_completions(batch)).logprobs
    return -logprobs.reshape(batch.completion_mask.shape)


# ---- with a teacher


class Target(NamedTuple):
    """A teacher, and the loss of the policy with respect to it."""

    teacher: Policy
    divergence: Divergence
    nll_coef: float = 0.0  # λ, the weight of the tokens' NLL, which is added to the divergence


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


def divergence_objective(policy: Policy, target: Target) -> FitObjective:
    """Returns the objective that minimises the divergence from a teacher plus λ times the NLL of completions.

    Its parameters are {"policy": ..., "teacher": ...}, and only the policy's are trained. Batches are those of
    `sft_objective`.

    Args:
      policy: The model's functions.
      target: The teacher and the loss.
    """
    return FitObjective(partial(distillation_loss, policy, target=target), token_mean_weights)


def distillation_loss(
    policy: Policy, params: Params, batch: Batch | Packed, *, target: Target
) -> tuple[jax.Array, Logs]:
    """L = Σ w [D_T − λ log π(oₜ)]; logs the means of divergence, NLL and entropy over tokens."""
    batch = as_completions(batch)
    states = states_of(policy, params["policy"], batch)
    scores = score_completion_tokens(policy, params["policy"], batch, states)
    divergence = divergence_of_states(policy, target, params, batch, states)
    loss = weighted_sum(divergence - target.nll_coef * scores.logprobs, batch.weights, batch.completion_mask)
    means = {"distillation": divergence, "nll": -scores.logprobs, "entropy": scores.entropy}
    return loss, Logs({name: masked_sum(x, batch.completion_mask) for name, x in means.items()})


def teacher_divergence(policy: Policy, target: Target, params: Params, batch: Batch | Packed) -> jax.Array:
    """Returns the divergence of the policy from its teacher at each token, in nats, `[N, G, T]` or `[B, S]`.

    Args:
      policy: The model's functions.
      target: The teacher and the loss.
      params: The parameters of policy and teacher, by role.
      batch: The completions.
    """
    completions = as_completions(batch)
    states = states_of(policy, params["policy"], completions)
    return divergence_of_states(policy, target, params, completions, states).reshape(batch.completion_mask.shape)


def divergence_of_states(
    policy: Policy, target: Target, params: Params, batch: Batch, states: TokenStates
) -> jax.Array:
    """Returns `teacher_divergence`, `[N, G, T]`, from the states of the policy."""
    heads = policy.head(params["policy"]), target.teacher.head(params["teacher"])

    def divergence(hidden: jax.Array, taught: jax.Array, temperature: jax.Array) -> jax.Array:
        outputs = outputs_of_states(target.divergence, heads[1], taught, temperature, vocab_size=len(heads[0][0]))
        return token_divergence(target.divergence, heads, hidden, outputs, temperature)

    taught = jax.lax.stop_gradient(states_of(target.teacher, params["teacher"], batch))
    return states.map(divergence, taught, batch.temperature)


# ---- evaluation


def text_nll(
    policy: Policy, params: Params, batches: Iterable[Packed], *, devices: Devices = ONE_DEVICE
) -> tuple[np.ndarray, np.ndarray]:
    """Returns −Σ log π over the completion tokens of each text, in nats, and the number of these tokens.

    Args:
      policy: The model's functions.
      params: The parameters of the policy.
      batches: Batches of one shape, so that one program is compiled.
      devices: The devices that hold the parameters. On a mesh, the rows of a batch must be a multiple of its `parts`.

    Returns:
      Two arrays `[M]`, float64 and int, row by row and in the order of the texts in a row.
    """
    return sum_texts(row_scorer(token_nll, policy, devices=devices), params, batches)


def mean_divergence(
    policy: Policy,
    params: Params,
    batches: Iterable[Packed],
    *,
    target: Target,
    devices: Devices = ONE_DEVICE,
) -> float:
    """Returns the mean divergence from the teacher over all completion tokens of the batches, in nats.

    Args:
      policy: The model's functions.
      params: The parameters of policy and teacher, by role.
      target: The teacher and the loss.
      batches, devices: See `text_nll`.
    """
    score = row_scorer(teacher_divergence, policy, target, devices=devices)
    totals, tokens = sum_texts(score, params, batches)
    return float(totals.sum() / max(tokens.sum(), 1))


def sum_texts(
    score: Callable[[Params, Packed], np.ndarray], params: Params, batches: Iterable[Packed]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns sums over the completion tokens of each text, float64 `[M]`, and the numbers of tokens, int `[M]`."""
    totals, tokens = [], []
    for batch in batches:
        values = np.where(batch.completion_mask, score(params, batch), 0).astype(np.float64)
        shape = len(batch.texts), int(np.max(batch.texts)) + 1
        place = np.ravel_multi_index((np.arange(shape[0])[:, None], batch.texts), shape).ravel()
        count = np.bincount(place, np.ravel(batch.completion_mask), minlength=shape[0] * shape[1])
        totals.append(np.bincount(place, values.ravel(), minlength=count.size)[count > 0])
        tokens.append(count[count > 0].astype(int))
    return np.concatenate(totals), np.concatenate(tokens)
