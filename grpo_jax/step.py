"""One optimizer step, which `rl` and `offline` share: its data, gradients, the optimizer, and scores of tokens.

Weights are computed from the mask of a whole optimizer batch, before it is split. So the gradients of its pieces, and
of its shards on devices, add up to the gradient of the whole batch.

Letters: N prompts of P tokens, G completions of T tokens, K candidate tokens, V tokens that two models have, D features
of the policy, E features of the other model.
"""

from grpo_jax.errors import UsageError, need

need("optax", "flax")

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax import functional as F
from grpo_jax.config import AdamWConfig, Divergence, load_optimizer
from grpo_jax.devices import ONE_DEVICE, Devices, sum_rows
from grpo_jax.functional import Metrics
from grpo_jax.models.decoder.transformer import Params
from grpo_jax.models.params.rounding import changed_share
from grpo_jax.models.params.sharding import AXES, BATCH, laid_out, mesh_sizes, spread
from grpo_jax.models.params.tree import PROJECTIONS, Adapted, check_full_precision
from grpo_jax.models.policy import Policy
from grpo_jax.models.rows.geometry import PromptTokens, Rows, TokenStates, rows_of_groups
from grpo_jax.models.rows.pieces import Microbatches, Pieces, take
from grpo_jax.rewards.worker import one_line

Array = Any  # jax.Array on a device, np.ndarray on the host


class TrainState(NamedTuple):
    """Everything that a checkpoint holds.

    It has no iterator and no key: data and noise are functions of (seed, step), and the name of the checkpoint is the
    step.
    """

    params: Any  # the trained parameters, of one model or by role ("policy", "critic")
    opt_state: optax.OptState
    skipped: Array  # int32, optimizer steps skipped in a row because gradients were not finite
    extras: dict[str, Any]  # values that hooks update: "reference" and "kl_coef"
    source: Any = ()  # the state of the source of rollouts, arrays [N, ...]


class TargetOutputs(NamedTuple):
    """Outputs of a model that the policy should match. A field is None if the loss does not need it."""

    logprobs: Array = None  # [N, G, T], log-probabilities of the sampled tokens
    hidden: Array = None  # [N, G, T, E], hidden states
    ids: Array = None  # int32 [N, G, T, K], the likeliest tokens
    logits: Array = None  # [N, G, T, K + 1], logits of these tokens, and one for all other tokens together


class Batch(NamedTuple):
    """Completions to learn from, on the devices."""

    prompt: PromptTokens  # [N, P]
    completion_ids: Array  # int32 [N, G, T]
    completion_mask: Array  # bool [N, G, T], the tokens that the policy wrote
    temperature: Array  # [N, G], the sampling temperature
    # ---- from the sampler
    sampler_logprobs: Array = None  # [N, G, T], after temperature, normalised as scorers do
    processed_logprobs: Array = None  # [N, G, T], after top-k, top-p and min-p too; None without them
    truncated: Array = None  # bool [N, G], true if no token ended the completion
    support_ids: Array = None  # int32 [N, G, T, K], as in `Completions`
    is_border: Array = None  # bool [N, G, T], as in `Completions`
    # ---- for episodes, as in `Completions`; None: there is one turn
    turn: Array = None  # int32 [N, G, T]
    turn_rewards: Array = None  # float32 [N, G, K]
    ending: Array = None  # int8 [N, G]
    # ---- from scorers; None if the update does not need the field
    old_logprobs: Array = None  # [N, G, T]; None: those of the current policy, without gradient
    ref_logprobs: Array = None  # [N, G, T]
    old_entropy: Array = None  # [N, G, T], in nats
    old_values: Array = None  # [N, G, T], values of a critic before the updates
    end_values: Array = None  # [N, G, 1], its values after the last token
    target: TargetOutputs | None = None  # outputs of another model, with which terms compare the policy
    # ---- from the rewards
    advantages: Array = None  # [N, G], or [N, G, T]
    returns: Array = None  # [N, G, T], the targets of a critic
    # ---- from the masks of a whole optimizer batch
    weights: Array = None  # [N, G, T]
    # ---- from the cutting of a batch into pieces
    layout: Rows | None = None  # how the decoder computes the piece; None: each completion in full


class Logs(NamedTuple):
    """Metrics of a loss, which can be combined over the pieces of a batch."""

    means: Metrics  # name -> (weighted sum, weight)
    maxima: Mapping[str, jax.Array] = {}  # over pieces; `average_over_updates` must know each name


# ---- gradients and the step

# (inputs without gradient, trained parameters, batch with weights) -> (Σ weights · loss, logs)
LossFn = Callable[[Any, Params, Any], tuple[jax.Array, Logs]]


def train_step(
    state: TrainState,
    others: Any,
    batch: Any,
    *,
    loss_fn: LossFn,
    weights_of: Callable[[jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
    pieces: Callable[[Any], Pieces] = lambda rows: (),
    devices: Devices = ONE_DEVICE,
    rounded: Callable[[Params], Params] | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes one optimizer step. Gradients that are not finite change only the count of skipped steps.

    Args:
      state: The state before the step.
      others: Inputs of the loss without gradient, such as frozen parameters.
      batch: The batch of N rows, with fields `completion_mask` and `weights`.
      loss_fn: (others, trained parameters, batch with weights) -> (Σ weights · loss, logs).
      weights_of: Computes weights from the mask of the whole batch, such as `functional.token_mean_weights`.
      optimizer: An optax transformation.
      pieces: Returns the pieces in which one device computes its rows. Default: all rows at once.
      devices: The devices that share the rows.
      rounded: Rounds parameters as products in bfloat16 do. None: products are in float32.

    Returns:
      The next state, and scalar metrics: those that the loss logs, and `loss`, `grad_norm` and `skipped`. The mean of a
      metric with weight 0 is NaN. With `rounded`, `changed_share` is the share of the weights that the step changes
      after rounding.
    """
    batch = batch._replace(weights=weights_of(batch.completion_mask))
    summed = sum_rows(partial(accumulate_grads, loss_fn, pieces), devices)
    (grads, loss, means), maxima = summed((others, state.params), batch)
    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    updated = optax.apply_updates(state.params, updates), opt_state
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), updated, (state.params, state.opt_state)
    )
    skipped = jnp.where(finite, 0, state.skipped + 1)
    metrics = {name: jnp.where(weight > 0, total / weight, jnp.nan) for name, (total, weight) in means.items()}
    metrics |= {**maxima, "loss": loss, "grad_norm": grad_norm, "skipped": skipped}
    if rounded is not None and (share := changed_share(rounded(state.params), rounded(params))) is not None:
        metrics["changed_share"] = share
    return state._replace(params=params, opt_state=opt_state, skipped=skipped), metrics


Sums = tuple[Params, jax.Array, Metrics]  # gradients, loss and metrics, which add up over pieces and devices


def accumulate_grads(
    loss_fn: LossFn, pieces_of: Callable[[Any], Pieces], inputs: tuple[Any, Params], batch: Any
) -> tuple[Sums, Mapping[str, jax.Array]]:
    """Σ over pieces of ∇ loss_fn, with one piece in memory at a time.

    Args:
      loss_fn: See `train_step`.
      pieces_of: Returns the pieces of the batch; () for all rows at once.
      inputs: The first two arguments of `loss_fn`: inputs without gradient, and parameters.
      batch: Arrays with leading axis N. The weights are those of the whole batch.

    Returns:
      Sums over the batch (gradients, loss and metrics), and maxima.
    """
    pieces, grad_fn = pieces_of(batch), jax.value_and_grad(partial(loss_fn, inputs[0]), has_aux=True)

    if not pieces:
        return _sums_and_maxima(grad_fn(inputs[1], batch))

    def add(microbatches: Microbatches, number: jax.Array, total: Any) -> Any:
        sums, maxima = _sums_and_maxima(grad_fn(inputs[1], take(batch, microbatches, number)))
        return jax.tree.map(jnp.add, total[0], sums), jax.tree.map(jnp.maximum, total[1], maxima)

    sums, maxima = jax.eval_shape(lambda: _sums_and_maxima(grad_fn(inputs[1], take(batch, pieces[0], 0))))
    grads, loss, means = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    lowest: Mapping[str, jax.Array] = jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), maxima)
    total: tuple[Sums, Mapping[str, jax.Array]] = (laid_out(grads), loss, means), lowest
    for microbatches in pieces:
        num_used = microbatches.num_used
        if microbatches is pieces[-1]:
            # Without any completions, compute one empty piece: the maxima would otherwise stay −∞.
            num_used = jnp.maximum(num_used, 1 if len(pieces) == 1 else sum(x.num_used for x in pieces) == 0)
        total = jax.lax.fori_loop(0, num_used, partial(add, microbatches), total)
    return total


def _sums_and_maxima(result: Any) -> tuple[Sums, Mapping[str, jax.Array]]:
    """Sorts the result of `jax.value_and_grad` by how pieces are combined."""
    (loss, logs), grads = result
    return (laid_out(grads), loss, logs.means), logs.maxima


# ---- the optimizer and its state


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step.

    Raises:
      UsageError: The parameters have adapters, which `params.split` must separate first, or are quantised.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters: train the first of models.params.split(params)")
    check_full_precision(params, "they are frozen, so train adapters on them (lora.add_adapters)")
    return TrainState(params, optimizer.init(params), jnp.int32(0), {})


def learning_rate_schedule(options: AdamWConfig, total_steps: int) -> optax.Schedule:
    """Returns a schedule with linear warm-up to the peak, then a constant rate or a decay to 0.

    Args:
      options: The peak, the warm-up and the kind of decay.
      total_steps: The number of optimizer steps after which the decay ends.

    Returns:
      A function from the number of optimizer steps taken to the learning rate of the next step.
    """
    learning_rate, warmup_steps = options.learning_rate, options.warmup_steps
    falling = max(total_steps - warmup_steps, 1)
    after: optax.Schedule = {
        "none": optax.constant_schedule(learning_rate),
        "linear": optax.linear_schedule(learning_rate, 0.0, falling),
        "cosine": optax.cosine_decay_schedule(learning_rate, falling),
    }[options.decay]
    rising = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([rising, after], [warmup_steps]) if warmup_steps else after


def make_optimizer(
    learning_rate: float | optax.Schedule,
    *,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    adam_epsilon: float = 1e-8,
    optimizer: Any = "adamw",
) -> optax.GradientTransformation:
    """Makes AdamW (1711.05101) or Muon, with gradients clipped by their global norm, or your own optimizer.

    Muon (2502.16982) is `optax.contrib.muon` with updates as large as those of AdamW. It trains the matrices of
    `muon_matrices`. Everything else has AdamW with Nesterov momentum, and no weight decay.

    Args:
      learning_rate: A learning rate, or a schedule.
      weight_decay: Weight decay of matrices. Default: 0. It does not apply to norms and biases, as in transformers and
        TRL, nor to attention sinks, decay rates of delta nets, and routers of experts, which may be frozen.
      max_grad_norm: The norm above which a gradient is scaled down. Default: 1.
      adam_epsilon: The constant ε of a step m / (√v + ε). Default: 1e-8.
      optimizer: "adamw", "muon", or your own, which reads no other options: an optax transformation, a function from
        the schedule to one, or a text such as file.py:name. Default: "adamw".

    Raises:
      UsageError: There is no such optimizer.
    """
    own = load_optimizer(optimizer)
    if own == "adamw":
        adamw = optax.adamw(learning_rate, eps=adam_epsilon, weight_decay=weight_decay, mask=has_weight_decay)
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), adamw)
    if own == "muon":
        make = partial(optax.contrib.muon, consistent_rms=0.2, muon_weight_dimension_numbers=muon_matrices)
        muon = make(learning_rate, eps=adam_epsilon, weight_decay=weight_decay)
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), muon)
    if callable(own):
        try:
            own = own(learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate))
        except Exception as error:  # a user's function may raise any type of error
            raise UsageError(f"the optimizer {optimizer!r} must take a schedule, but: {one_line(error)}") from error
    if not isinstance(own, optax.GradientTransformation):
        raise UsageError(f"the optimizer {optimizer!r} must return an optax transformation: it is {own!r}")
    # It may count no steps, or several things. The factor 1 changes nothing, and its count comes first.
    return optax.chain(optax.scale_by_schedule(lambda count: 1.0), own)


def has_weight_decay(params: Params) -> Any:
    """Returns for each parameter if weight decay applies: only to matrices, and not to routers."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = {getattr(key, "key", None) for key in path[-2:]}
        return not names & {"scale", "offset", "bias", "sinks", "log_rate", "router"}

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def muon_matrices(params: Params) -> Any:
    """Returns for each parameter the axes of its matrix, for Muon, or None if AdamW trains it.

    Each projection of each layer and expert is a matrix from its inputs to its outputs, of all heads. So are its
    adapters A and B, each by itself. Embeddings, heads, routers, norms, biases and all others have None.

    Raises:
      UsageError: No parameter is such a matrix, as in a model of another library.
    """

    def axes(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers | None:
        module, leaf = [None, None, *(getattr(key, "key", None) for key in path)][-2:]
        if module not in PROJECTIONS or leaf not in ("kernel", "a", "b"):
            return None
        inputs, outputs, *_ = PROJECTIONS[module]
        num_inputs, num_outputs = 1 if leaf == "b" else len(inputs), 1 if leaf == "a" else len(outputs)
        places = tuple(range(-num_inputs - num_outputs, 0))
        return optax.contrib.MuonDimensionNumbers(places[:num_inputs], places[num_inputs:])

    matrices = jax.tree_util.tree_map_with_path(axes, params)
    if not jax.tree.leaves(matrices) and any(x.ndim > 1 for x in jax.tree.leaves(params)):
        raise UsageError("muon finds no projections of our decoders in this model: make one with optax.contrib.muon")
    return matrices


def logged_rate(options: AdamWConfig, schedule: optax.Schedule, state: TrainState) -> dict[str, jax.Array]:
    """Returns the learning rate of the next step, to log. An optimizer that is a transformation hides its own."""
    is_transformation = isinstance(load_optimizer(options.optimizer), tuple)
    return {} if is_transformation else {"learning_rate": jnp.asarray(schedule(steps_taken(state)))}


def steps_taken(state: TrainState) -> jax.Array:
    """Returns the number of optimizer steps that changed the parameters, without skipped steps."""
    count: jax.Array = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1]
    return count


# ---- scores of tokens: forward passes of models over completions


def score_completion_tokens(
    policy: Policy, params: Params, batch: Batch, states: TokenStates | None = None
) -> F.TokenLogprobs:
    """Computes log-probabilities and entropies of completion tokens, after the sampler's temperature, `[N, G, T]`.

    They are normalised over the tokens of `batch.support_ids`, or without these over the whole vocabulary.

    Args:
      policy: The functions of the model.
      params: The parameters of the model.
      batch: The batch of completions, or a piece of it. Tokens that are not in the piece get 0.
      states: The result of `states_of`. Default: it is computed.
    """
    states = states or states_of(policy, params, batch)
    arrays = batch.completion_ids, batch.temperature, batch.support_ids
    return states.map(partial(_token_logprobs, policy, params), *arrays)


def states_of(policy: Policy, params: Params, batch: Batch) -> TokenStates:
    """Computes the states of a model that predict the completion tokens of a batch, or of a piece of it."""
    rows = batch.layout or rows_of_groups(batch.prompt, batch.completion_ids)
    return policy.predict(params, rows)


def _token_logprobs(
    policy: Policy,
    params: Params,
    hidden: jax.Array,
    ids: jax.Array,
    temperature: jax.Array,
    support_ids: jax.Array | None,
) -> F.TokenLogprobs:
    """Computes `token_logprobs`, or `support_logprobs`. On a mesh tokens are sharded over all devices, including the
    tensor axis."""
    unembedding, softcap = policy.unembedding and policy.unembedding(params), policy.softcap

    def scored(
        hidden: jax.Array, ids: jax.Array, temperature: jax.Array, support_ids: jax.Array | None
    ) -> F.TokenLogprobs:
        if support_ids is None:
            return F.token_logprobs(hidden, unembedding, ids, temperature=temperature, softcap=softcap)
        return F.support_logprobs(hidden, unembedding, ids, support_ids, temperature=temperature, softcap=softcap)

    if mesh_sizes() is None:
        return scored(hidden, ids, temperature, support_ids)
    arrays = hidden, ids, jnp.broadcast_to(temperature, ids.shape), support_ids
    rows = spread(jax.tree.map(lambda x: x.reshape(ids.size, *x.shape[ids.ndim :]), arrays), AXES)
    scores = spread(scored(*rows), AXES)
    return spread(F.TokenLogprobs(*(x.reshape(ids.shape) for x in scores)), BATCH)


# ---- compared with another model

# The last layer, from hidden states to logits: the unembedding `[V, D]`, and the softcap of `Policy`.
Head = tuple[jax.Array, float | None]


def check_top_k(divergence: Divergence, vocab_size: int) -> None:
    """Checks that `distillation_top_k` is below the number of tokens.

    Raises:
      UsageError: It is too large.
    """
    if divergence.top_k >= vocab_size:
        raise UsageError(
            f"distillation_top_k is {divergence.top_k}, but the model has {vocab_size} tokens: set it below that, or "
            "to 0 for all"
        )


def outputs_of_states(
    divergence: Divergence, head: Head, hidden: jax.Array, temperature: jax.Array | float, *, vocab_size: int
) -> TargetOutputs:
    """Returns the outputs of the other model that `token_divergence` needs: hidden states, or the likeliest tokens.

    Args:
      divergence: The divergence.
      head: The last layer of the other model.
      hidden: Its hidden states, `[..., T, E]`.
      temperature: The sampling temperature, which broadcasts against `[..., T]`.
      vocab_size: The number of tokens of the policy. Further tokens of the other model are excluded from its top k.
    """
    if not divergence.top_k:
        return TargetOutputs(hidden=hidden)
    unembedding, softcap = head[0][:vocab_size], head[1]
    ids = F.top_tokens(hidden, unembedding, divergence.top_k)
    logits = F.bucket_logits(hidden, unembedding, ids, temperature=temperature, softcap=softcap)
    return TargetOutputs(ids=ids, logits=logits)


def token_divergence(
    divergence: Divergence,
    heads: tuple[Head, Head],
    hidden: jax.Array,
    outputs: TargetOutputs,
    temperature: jax.Array | float,
) -> jax.Array:
    """Returns the divergence of a policy from another model at each token.

    Tokens that only one model has, such as padding of embeddings, are excluded from both distributions. If the policy
    samples a padding token that the other model lacks, the other model embeds its own last token instead.

    Args:
      divergence: The divergence.
      heads: The last layers of the policy and of the other model.
      hidden: The hidden states of the policy, `[..., T, D]`.
      outputs: The outputs of the other model, as returned by `outputs_of_states`.
      temperature: The sampling temperature, applied to both models. It broadcasts against `[..., T]`.

    Returns:
      The divergence of each token, `[..., T]`, in nats.
    """
    (own, softcap), (other, ref_softcap) = heads
    (kind, top_k, beta), size = divergence, min(len(own), len(other))
    common: Any = {"temperature": temperature, "softcap": softcap}
    if top_k:
        logits = F.bucket_logits(hidden, own[:size], outputs.ids, **common)
        if kind == "jsd":
            return F.jsd_full(logits, outputs.logits, beta=beta)
        return F.kl_full(logits, outputs.logits, reverse=kind == "forward_kl")
    states = hidden, own[:size], outputs.hidden, other[:size]
    if kind == "jsd":
        return F.token_jsd(*states, beta=beta, ref_softcap=ref_softcap, **common)
    return F.token_kl(*states, reverse=kind == "forward_kl", ref_softcap=ref_softcap, **common)
