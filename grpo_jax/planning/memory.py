"""A coarse estimate of the memory that a run needs on one device, from shapes only, and a plan based on it.

The plan is chosen before anything is compiled. The estimate is fast and rarely too low, but not exact. For the exact
number, compile a program and call its `memory_analysis()`, as `python -m experiments.plan --compile` does.

peak = process + held + max(sampling, scoring, learning), in bytes:

- process = what a process takes in addition to arrays, on a CPU, whose memory the arrays share
- held = parameters + the optimizer's state + a copy of trained parameters (the reference) + a model that scores
  rollouts + supports of sampled tokens
- sampling = layers laid out for decoding + keys and values + the largest of the prompts' pass, one token's logits, and
  a part of the previous keys and values while their arrays grow + the workspace of a matrix product on a GPU
- scoring = the scoring model's pass over one piece
- learning = max(gradients + activations of one piece, the step of the optimizer)

If some devices only sample (`divide_shape`), sampling on the others is only their part of a copy's way. A device that
only samples holds the frozen parameters, and each version of the trained ones that a rollout still needs.

Parameters are counted from the model's trees, sharded as in `models.params.sharding`. The other terms are rough
formulas. tests/planning/test_memory.py compares them with XLA's plans for `sample` and `learn`. On a CPU they are at
most 10% too low, and mostly within 6%; rows of 256 tokens and more are up to 41% too high. On one GPU they are at most
3% too low and 25% too high. Fragmentation is not included.

A plan is the fastest way to compute a run that fits into the memory of a device. Pieces of `Traits.piece_tokens` with
remat "none" are fastest. If these do not fit, pieces are halved, down to one prompt with its completions, and only then
remat is turned on. The choice depends only on the model, the shape and the limit. It is stored in the run's options, so
that a resumed run computes as before.

Letters as in `models.decoder.transformer`: N prompts of P tokens, G completions of T tokens each.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.config import GRPOConfig, ModelOptions, PlannedRemat, load_optimizer
from grpo_jax.devices import Devices, num_hosts, num_shards
from grpo_jax.errors import UsageError
from grpo_jax.functional.logprobs import keeps_logits, slices_of_vocabulary
from grpo_jax.functional.products import GPU, Traits, traits_of_backend
from grpo_jax.models.config import DELTA_CHUNK, READ, Dtype, Form, ModelConfig, Remat
from grpo_jax.models.decoder.attention import num_blocks
from grpo_jax.models.decoder.heads import without_vocabulary
from grpo_jax.models.decoder.transformer import Params, find_repetition, param_shapes
from grpo_jax.models.params import sharding
from grpo_jax.models.params.lora import add_adapters
from grpo_jax.models.params.quantised import quantise_params
from grpo_jax.models.params.tree import TARGETS, Quantize, Target
from grpo_jax.models.policy import suits_cudnn
from grpo_jax.models.rows.geometry import slots_of
from grpo_jax.models.rows.pieces import PieceShape, choose_piece
from grpo_jax.optimizer import make_optimizer

FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
# Bytes that AdamW's step holds for each byte of parameters: a gradient, updates, and copies of moments. We measured 2.3
# to 2.55, and assume the same for other optimizers.
_STEP = 2.4
# While a cache grows, or is copied to fewer rows, another cache is in memory: this share of the whole cache.
_PREVIOUS = 0.3
_WORKSPACE = 32 * 2**20  # bytes that a matrix product of a library takes on an NVIDIA GPU
# Python, its modules and XLA's programs: the peak of the process on a CPU was 460 to 760 MiB above the rest of the
# estimate with all programs from the cache, and 920 to 1,140 with compilations (stories260K and SmolLM2-135M).
_PROCESS = 900 * 2**20
_QUERIES = 128  # queries in a block, as in `models.decoder.attention.attend`


class Shape(NamedTuple):
    """The sizes, except for those of the model, that the memory of a run depends on."""

    num_prompts: int = 8  # N, on one device
    group_size: int = 8  # G
    prompt_tokens: int = 256  # P
    max_tokens: int = 512  # T
    minibatches: int = 1
    piece_tokens: int = GPU.piece_tokens
    lora_rank: int = 0  # 0: all parameters are trained
    lora_targets: tuple[Target, ...] = TARGETS
    param_dtype: Dtype = "float32"  # dtype of the decoder's parameters
    quantize: Quantize = "none"  # format of the decoder's frozen projections
    critic: Literal["none", "own", "shared"] = "none"
    scorer: ModelConfig | None = None  # a frozen model that scores rollouts, with parameters of the activations' dtype
    process_bytes: int = 0  # the device's part of what the process takes in addition to arrays, if they share memory
    token_bytes: int = 0  # bytes kept for a token: supports, in all rollouts that are kept, and the scorer's outputs
    optimizer: Any = "adamw"  # as `load_optimizer` returns it
    copies: int = 1  # copies of trained parameters: the start, a moving reference, and those that servers sample with
    fsdp: int = 1
    tensor: int = 1
    traits: Traits = GPU  # traits of the backend
    samples: bool = True  # false for devices that train while others sample
    learns: bool = True  # false for devices that only sample
    versions: int = 1  # versions of the trained parameters on a device that only samples
    moving: int = 0  # bytes of a copy on its way to devices that only sample

    @property
    def piece(self) -> PieceShape:
        """The pieces of a minibatch."""
        return choose_piece(
            self.num_prompts // self.minibatches,
            self.prompt_tokens,
            self.group_size,
            self.max_tokens,
            piece_tokens=self.piece_tokens,
        )

    @property
    def num_pieces(self) -> int:
        """The number of pieces of a minibatch whose completions are all T tokens long."""
        rows = self.num_prompts // self.minibatches
        if self.piece.is_packed:
            rows *= -(-self.group_size * self.max_tokens // self.piece.width)
        return -(-rows // self.piece.rows)

    @property
    def is_on_one_gpu(self) -> bool:
        """True if no mesh shards the model, and the backend is a GPU."""
        return self.traits.backend == "gpu" and self.fsdp * self.tensor == 1

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh's axes that shard parameters."""
        return {sharding.DATA: 1, sharding.FSDP: self.fsdp, sharding.TENSOR: self.tensor}


class Estimate(NamedTuple):
    """The memory of a run on one device, in bytes by purpose."""

    params: int  # parameters of the decoder, adapters and a critic
    optimizer: int  # the optimizer's state, such as the two moments of AdamW
    start: int  # the initial trained parameters, for the reference; and a reference that moves
    scorer: int  # the parameters of a model that scores rollouts
    rollout: int  # the tokens that each token was sampled from, for training on supports; and outputs of the scorer
    decoding: int  # a copy of the layers, laid out for decoding, and the unembedding if it is cast
    cache: int  # keys and values of prompts and completions, or the states and convolution inputs of delta nets
    choosing: int  # prompts' pass, logits of one token of each completion, or part of a previous cache; and a workspace
    scoring: int  # a pass of the scoring model over one piece; other scores need less than learning
    gradients: int  # gradients of one piece, and their sum if there are several pieces
    updates: int  # gradients, updates and copies of moments while the optimizer steps
    activations: int  # activations of one piece, with its logits
    process: int  # the process without arrays, on a CPU
    moving: int = 0  # a copy on its way to devices that only sample

    @property
    def held(self) -> int:
        """The bytes that stay on the device between programs."""
        return self.params + self.optimizer + self.start + self.scorer + self.rollout

    @property
    def sampling(self) -> int:
        """The bytes that `sample` adds, and the copy for it."""
        return self.decoding + self.cache + self.choosing + self.moving

    @property
    def learning(self) -> int:
        """The bytes that `learn` adds."""
        return max(self.gradients + self.activations, self.updates)

    @property
    def peak(self) -> int:
        """The bytes of the largest of sampling, scoring and learning, plus `process` and `held`."""
        return self.process + self.held + max(self.sampling, self.scoring, self.learning)


def estimate(model: ModelConfig, shape: Shape) -> Estimate:
    """Estimates the memory of a run of GRPO or PPO on one device.

    Args:
      model: The configuration of the decoder, with its dtype and remat.
      shape: The shape of the run.

    Returns:
      The bytes by purpose.
    """
    trained, scorer = bytes_on_device(trained_shapes(model, shape), shape.mesh), shape.scorer
    prompts, rows = shape.num_prompts * shape.prompt_tokens, shape.num_prompts * shape.group_size
    layers, forms = _attention_layers(model), set(model.forms)
    prefill = 2 * layers * _keys(model, shape) + max(_projected(model, shape, form) for form in forms)
    prefill = prompts * prefill * _bytes(model, shape)
    if model.experts:  # the loop over layers copies the experts of a layer
        prefill += _whole_layer(model, shape)
    keys_and_values = _keys_and_values(model, shape)
    # See `models.decoder.attention.fuses_decoding`: attention that reads only filled slots needs no cache that grows.
    grows = not (shape.is_on_one_gpu and _is_fused(model, shape))
    copied_from = shape.traits.grows_from if grows else shape.traits.narrows_from
    previous = round(_PREVIOUS * keys_and_values) if shape.max_tokens >= copied_from else 0
    logits = FLOAT32 * rows * model.vocab_size // shape.tensor * (2 if shape.traits.sums_at_once else 3)
    workspace = _WORKSPACE if shape.traits.backend == "gpu" else 0
    # The gradients of a piece and their sum. On one TPU, XLA writes a new sum before it frees the last one.
    gradients = 3 if shape.traits.backend == "tpu" and shape.fsdp * shape.tensor == 1 else 2
    whole = Estimate(
        params=trained + (bytes_on_device(frozen_shapes(model, shape), shape.mesh) if shape.lora_rank else 0),
        optimizer=_optimizer_state(replace(model, remat="none"), shape._replace(piece_tokens=0)),
        start=shape.copies * trained,
        scorer=_scorer(model, shape),
        rollout=shape.token_bytes * rows * shape.max_tokens,
        decoding=_decoding(model, shape),
        cache=keys_and_values + rows * len(model.delta_layers) * FLOAT32 * _state(model),
        choosing=max(prefill, logits, previous) + workspace,
        scoring=_activations(replace(scorer, dtype=model.dtype, remat="layer"), shape) if scorer else 0,
        gradients=trained * min(shape.num_pieces, gradients),
        updates=round(_STEP * trained),
        activations=_activations(model, shape),
        process=shape.process_bytes,
    )
    if shape.samples and shape.learns:
        return whole
    return _split_estimate(model, shape, whole)


_LEARNING = ("optimizer", "start", "scorer", "rollout", "scoring", "gradients", "updates", "activations")
_SAMPLING = ("decoding", "cache", "choosing")


def _split_estimate(model: ModelConfig, shape: Shape, whole: Estimate) -> Estimate:
    """Returns the memory of a device that only samples, or that trains while others sample."""
    whole = whole._replace(moving=shape.moving)
    if shape.learns:
        return whole._replace(**dict.fromkeys(_SAMPLING, 0))
    trained, frozen = (bytes_on_device(part, shape.mesh) for part in _policy_parts(model, shape))
    return whole._replace(**dict.fromkeys(_LEARNING, 0), params=shape.versions * trained + frozen)


# ---- parameters


def trained_shapes(model: ModelConfig, shape: Shape) -> Params:
    """Returns the shapes of all parameters that a run trains, float32, by role."""
    critic = {} if shape.critic == "none" else {"head": jax.ShapeDtypeStruct((model.hidden_size,), jnp.float32)}
    if shape.critic == "own":
        critic |= {"decoder": _trained_part(without_vocabulary(model), shape)}
    return {"policy": _trained_part(model, shape), "critic": critic}


def frozen_shapes(model: ModelConfig, shape: Shape) -> Params:
    """Returns the shapes and dtypes of the decoder's frozen parameters, for runs that train only adapters."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, shape.param_dtype), param_shapes(model))
    return jax.eval_shape(partial(quantise_params, format=shape.quantize), params)


def _policy_parts(model: ModelConfig, shape: Shape) -> tuple[Params, Params]:
    """Returns the shapes of the policy's trained parameters and of its frozen ones."""
    return _trained_part(model, shape), frozen_shapes(model, shape) if shape.lora_rank else {}


def _trained_part(model: ModelConfig, shape: Shape) -> Params:
    """Returns the shapes of a decoder's trained parameters: all of them, or its adapters."""
    params = param_shapes(model)
    if not shape.lora_rank:
        return params
    adapters = partial(add_adapters, rank=shape.lora_rank, alpha=1.0, targets=shape.lora_targets)
    return jax.eval_shape(adapters, params, jax.random.key(0)).adapters


@lru_cache
def _optimizer_state(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of the optimizer's state. The plans of a run differ only in what it does not depend on."""
    optimizer = make_optimizer(1.0, optimizer=shape.optimizer)
    return bytes_on_device(jax.eval_shape(optimizer.init, trained_shapes(model, shape)), shape.mesh)


def num_params(model: ModelConfig) -> int:
    """Counts the parameters of the decoder."""
    return sum(x.size for x in jax.tree.leaves(param_shapes(model)))


def size_on_device(tree: Any, mesh: Any) -> int:
    """Counts the elements of a sharded tree of parameters on one device of a mesh.

    Args:
      tree: A tree of arrays or their shapes.
      mesh: The sizes of the mesh's axes, by name.
    """
    return sum(size for _, size in _on_device(tree, mesh))


def bytes_on_device(tree: Any, mesh: Any) -> int:
    """Counts the bytes of a sharded tree of parameters on one device. Arguments are those of `size_on_device`."""
    return sum(x.dtype.itemsize * size for x, size in _on_device(tree, mesh))


def _on_device(tree: Any, mesh: Any) -> list[tuple[Any, int]]:
    """Returns the leaves of a tree, each with the number of its elements on one device."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(sharding.specs(tree, mesh)), strict=True)
    return [(x, x.size // count_shards(spec, mesh)) for x, spec in leaves]


def count_shards(spec: jax.sharding.PartitionSpec, mesh: Any) -> int:
    """Counts the shards that a `PartitionSpec` cuts an array into."""
    axes = [name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(mesh[name] for name in axes)


# ---- programs


def tokens_of_piece(shape: Shape) -> int:
    """Counts the tokens of a piece, padding included. The last token of a completion predicts nothing."""
    piece = shape.piece
    return piece.rows * (shape.prompt_tokens + piece.texts * (piece.width - (not piece.is_packed)))


def _bytes(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of an element of an activation. XLA on CPU keeps bfloat16 in float32."""
    return FLOAT32 if shape.traits.emulates_bfloat16 else BYTES[model.dtype]


def _keys(model: ModelConfig, shape: Shape) -> int:
    """Counts the elements of a token's keys in the layer with the largest."""
    heads = [model.heads_of(form.mixer) for form in model.forms]
    return max(x.num_key_value_heads * x.head_dim for x in heads) // shape.tensor


def _attention_layers(model: ModelConfig) -> int:
    """Counts the layers that compute keys and values."""
    return sum(form.mixer in READ.values() for form in model.forms)


def _projected(model: ModelConfig, shape: Shape, form: Form) -> int:
    """Counts the elements of a token's projections in a layer with these modules.

    They are queries, keys, values, the output of attention, gate, up, and the residual input of the MLP. If norms
    follow attention and MLP, their inputs count too. A delta net also projects a gate, a decay and a rate, and a mesh
    does not cut its projections.
    """
    heads = model.num_attention_heads * model.heads_of(form.mixer).head_dim
    features = model.intermediate_size * (2 if form.feed_forward == "wide_mlp" else 1)
    if model.experts and form.feed_forward == "experts":
        features = model.experts.num_experts_per_tok * model.experts.moe_intermediate_size
        features += model.experts.shared_expert_intermediate_size or 0
    streams = 1 if model.norms == "before" else 3
    mixed = 2 * _keys(model, shape) + (2 + model.gated_attention) * heads // shape.tensor
    if model.delta and form.mixer == "delta":
        value_features = model.delta.num_value_heads * model.delta.value_head_dim
        mixed = model.delta.convolved + 2 * value_features + 2 * model.delta.num_value_heads
    return mixed + 2 * features // shape.tensor + streams * model.hidden_size


def _is_fused(model: ModelConfig, shape: Shape) -> bool:
    """Returns whether cuDNN computes attention, which then keeps no products."""
    return model.attention == "cudnn" or (model.attention == "auto" and suits_cudnn(model, shape.traits))


def _unrolled(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes that unrolled layers keep for the backward pass in addition; 0 if they are not unrolled.

    XLA on a GPU computes once what forward and backward pass both compute, and keeps it: normed inputs, rotated
    queries, the product of gate and up, and attended values and the keys and values that queries see, in the layout of
    attention. Without cuDNN's attention, each block of queries has its own.
    """
    limit = shape.traits.unrolled_layers if shape.quantize == "none" else shape.traits.unrolled_quantised_layers
    if not shape.is_on_one_gpu or model.num_hidden_layers > limit or model.remat != "none":
        return 0
    piece, is_fused = shape.piece, _is_fused(model, shape)
    blocks = 1 if is_fused else num_blocks(piece.width)
    streams = 1 if model.norms == "before" else 3
    normed = 4 if model.norms == "around" else 2
    elements = 0
    for form in model.forms:
        heads = model.num_attention_heads * model.heads_of(form.mixer).head_dim
        projected = _projected(model, shape, form) - streams * model.hidden_size
        elements += projected // 2 + (1 if is_fused else 2) * heads + normed * model.hidden_size
    seen = piece.rows * piece.texts * (blocks * shape.prompt_tokens + (blocks + 1) * piece.width // 2)
    elements = elements * tokens_of_piece(shape) + 2 * _keys(model, shape) * _attention_layers(model) * seen
    return elements * BYTES[model.dtype]


def _whole_layer(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of a layer's parameters after a mesh has gathered them, or after they are dequantised."""
    size = size_on_device(param_shapes(model)["layers"], {**shape.mesh, sharding.FSDP: 1})
    return size // model.num_hidden_layers * _bytes(model, shape)


def _decoding(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of the layers, or their codes and one plain layer, and of the unembedding if it is cast."""
    cast = model.vocab_size * model.hidden_size if model.dtype != shape.param_dtype else 0
    cast = BYTES[model.dtype] * cast // (shape.fsdp * shape.tensor)
    if shape.quantize != "none":
        return bytes_on_device(frozen_shapes(model, shape)["layers"], shape.mesh) + _whole_layer(model, shape) + cast
    return BYTES[model.dtype] * size_on_device(param_shapes(model)["layers"], shape.mesh) + cast


def _keys_and_values(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of keys and values: of each prompt once, and of the slots that layers keep of completions."""
    prompt_slots = _attention_layers(model) * shape.num_prompts * shape.prompt_tokens
    layers, completions = zip(model.windows, model.forms, strict=True), shape.num_prompts * shape.group_size
    slots = sum(slots_of(window, shape.max_tokens) for window, form in layers if form.mixer in READ.values())
    return 2 * _keys(model, shape) * (prompt_slots + completions * slots) * BYTES[model.dtype]


def _delta_elements(model: ModelConfig) -> int:
    """Counts the elements of a token that the backward pass of a delta net holds: measured with XLA on a CPU.

    About 9 are of each convolved feature, 8 of each key and value, and 8 are rows of the chunks' matrices. Each chunk
    also holds about 20 states.
    """
    if not model.delta:
        return 0
    keys, values = model.delta.key_head_dim, model.delta.value_head_dim
    sizes = 8 * (keys + values + DELTA_CHUNK) + 20 * keys * values // DELTA_CHUNK
    return 9 * model.delta.convolved + model.delta.num_value_heads * sizes


def _state(model: ModelConfig) -> int:
    """Counts the elements of the state of a delta net, with the inputs of its convolution."""
    if not model.delta:
        return 0
    heads, keys, values = model.delta.num_value_heads, model.delta.key_head_dim, model.delta.value_head_dim
    return heads * keys * values + (model.delta.conv_kernel_dim - 1) * model.delta.convolved


def _activations(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of a piece: stored activations, and the larger of a layer's backward pass and the logits."""
    piece, tokens, forms = shape.piece, tokens_of_piece(shape), model.forms
    layer_projections = [_projected(model, shape, form) for form in forms]
    inputs = 0 if model.remat == "offload" and shape.traits.offloads else model.hidden_size
    decoders = 2 if shape.critic == "own" else 1
    stored = model.num_hidden_layers * inputs + (sum(layer_projections) if model.remat == "none" else 0)
    stored = decoders * stored * tokens
    # Projections and their gradients; with remat the projections are computed again, on one GPU in the same memory.
    working = (2 if model.remat == "none" or shape.is_on_one_gpu else 3) * max(layer_projections) * tokens
    if model.experts:  # a token is copied to each of its experts
        working += 6 * model.experts.num_experts_per_tok * model.hidden_size * tokens
    # A prompt's keys and values are copied to each of its completions. Products are in float32.
    pairs = piece.rows * piece.texts * (shape.prompt_tokens + piece.width)
    working += 4 * _keys(model, shape) * pairs
    products = 4 * FLOAT32 * piece.rows * piece.texts * (model.num_attention_heads // shape.tensor) * _products(shape)
    products = 0 if _is_fused(model, shape) else products
    whole_layers = (shape.fsdp > 1 or shape.quantize != "none") + (model.experts is not None)  # gradients of experts
    # XLA on a CPU computes delta nets ahead of the loop over layers again all at once, also with remat.
    ahead = sum(form.mixer == "delta" for form in forms[: find_repetition(forms)[0]])
    nets = max(ahead, min(len(model.delta_layers), 1))
    products = max(products, FLOAT32 * nets * tokens * _delta_elements(model))
    layer = working * BYTES[model.dtype] + whole_layers * _whole_layer(model, shape)
    if model.experts:  # all layers of a period are in memory at once
        layer *= find_repetition(forms)[1]
    return stored * _bytes(model, shape) + _unrolled(model, shape) + max(layer + products, _logits(model, shape))


def _products(shape: Shape) -> int:
    """Counts the products q·k of a head and a text in memory: of one block of queries, or on CPU of many blocks."""
    prompt, width = shape.prompt_tokens, shape.piece.width
    if shape.traits.backend == "cpu":
        return min(width, 16 * _QUERIES) * (prompt + min(width, (width + _QUERIES) // 2))
    return min(width, _QUERIES) * (prompt + width)


def _logits(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of slices of the logits, or of all if they are kept; hidden states; and a cast unembedding."""
    piece = shape.piece
    rows = piece.rows * piece.texts * piece.width // shape.tensor
    width = -(-model.vocab_size // slices_of_vocabulary(rows, model.vocab_size, shape.traits))
    stored = model.vocab_size if keeps_logits(rows, model.vocab_size, shape.traits) else width
    cast = 0 if model.dtype == "float32" else model.vocab_size * model.hidden_size * _bytes(model, shape)
    return FLOAT32 * rows * (2 * width + stored + 2 * model.hidden_size) + cast


def _scorer(model: ModelConfig, shape: Shape) -> int:
    """Returns the bytes of the parameters of a model that scores rollouts."""
    return BYTES[model.dtype] * size_on_device(param_shapes(shape.scorer), shape.mesh) if shape.scorer else 0


# ---- the plan

# The largest share of a device that a plan may use. The estimate was up to 10% too low in our measurements on a CPU.
_SHARE = 0.85
GB, GIB = 1e9, 2**30


class Plan(NamedTuple):
    """The way in which a run is computed, and the memory that it needs."""

    model: ModelConfig  # with its remat
    shape: Shape  # with its piece_tokens
    estimate: Estimate
    limit: int  # bytes of a device
    sampler: "Plan | None" = None  # that of a device that only samples

    @property
    def fits(self) -> bool:
        """True if the devices have the memory, with a margin for the error of the estimate."""
        return self.estimate.peak <= _SHARE * self.limit and (self.sampler is None or self.sampler.fits)

    @property
    def options(self) -> dict[str, int | Remat]:
        """The choice, as options of a run."""
        return {"piece_tokens": self.shape.piece_tokens, "remat": self.model.remat}

    def __str__(self) -> str:
        pieces = f"{self.shape.num_pieces} piece{'s' if self.shape.num_pieces > 1 else ''}"
        sizes = f"about {_in_gib(self.estimate.peak)} of {_in_gib(self.limit)} GiB"
        others = f"; devices that only sample: about {_in_gib(self.sampler.estimate.peak)} GiB" if self.sampler else ""
        return f"plan: {pieces}, remat {self.model.remat}: {sizes}{others}"


def _in_gib(size: int) -> str:
    """Formats bytes in GiB, with two significant digits below 10 GiB."""
    return f"{size / GIB:.0f}" if size >= 10 * GIB else f"{size / GIB:.2g}"


def shape_of(
    run: GRPOConfig,
    options: ModelOptions,
    prompt_tokens: int,
    *,
    shards: int,
) -> Shape:
    """Returns the shape of a run.

    Args:
      run: Supplies the sampling options, the sizes of pieces, the mesh, the optimizer, the critic and the reference.
      options: The options of the model.
      prompt_tokens: The most tokens of a prompt, P.
      shards: The number of shards of a batch's prompts.
    """
    named = vars(run.sampling) | vars(run.optimizer) | vars(run.mesh) | vars(options)
    shape = Shape(**{name: named[name] for name in Shape._fields if name in named})  # options of the same names
    traits = traits_of_backend()
    devices = min(shards * shape.tensor + run.num_sampler_devices, jax.local_device_count())
    return shape._replace(
        num_prompts=run.sampling.num_prompts // shards,
        prompt_tokens=prompt_tokens,
        max_tokens=run.sampling.completion_width,
        piece_tokens=run.piece_tokens,
        critic=run.critic.critic,
        token_bytes=FLOAT32 * run.sampling.kept_tokens * (1 + run.sampling.staleness),
        optimizer=load_optimizer(run.optimizer.optimizer),
        copies=1 + (run.loss.ref_sync_steps > 0),
        process_bytes=_PROCESS // devices if traits.backend == "cpu" else 0,
        traits=traits,
    )


def divide_shape(
    model: ModelConfig, shape: Shape, run: GRPOConfig, training: Devices, sampling: Devices
) -> tuple[Shape, Shape | None]:
    """Returns the shape of a run on the devices that train, and on those that only sample, if there are any.

    Args:
      model: The configuration of the decoder.
      shape: The shape of the run on the devices that train.
      run: The configuration of the run.
      training: The devices that train.
      sampling: The devices of one host that sample.

    Raises:
      UsageError: The devices that only sample would split key-value heads.
    """
    if not run.num_sampler_devices:
        return shape, None
    from grpo_jax.rl.own_devices import moving_bytes  # loaded only for such devices

    tensor = run.sampler.sampler_tensor
    for heads in sorted({model.heads_of(form.mixer).num_key_value_heads for form in model.forms}):
        if heads % tensor:
            raise UsageError(
                f"sampler_tensor is {tensor}, but the model has {heads} key-value heads, which are never cut: set "
                "sampler_tensor to a divisor of them, and sampler_fsdp to the rest"
            )
    leaving, arriving = moving_bytes(_policy_parts(model, shape), training, sampling)
    sampler = shape._replace(
        num_prompts=run.sampling.num_prompts // num_hosts(training) // num_shards(sampling),
        critic="none",
        fsdp=run.sampler.sampler_fsdp,
        tensor=tensor,
        learns=False,
        versions=1 + run.sampling.staleness,
        moving=arriving,
    )
    return shape._replace(samples=False, moving=leaving), sampler


def choose(
    model: ModelConfig, shape: Shape, limit: int, *, remat: PlannedRemat = "auto", sampler: Shape | None = None
) -> Plan:
    """Chooses the fastest plan that fits.

    Args:
      model: The configuration of the decoder.
      shape: The shape of the run. Its pieces are fixed if piece_tokens is above 0.
      limit: The memory of a device in bytes.
      remat: "auto" to choose remat, or a fixed choice.
      sampler: The shape of the run on the devices that only sample, if there are any.

    Returns:
      The plan. If pieces and remat are both fixed, it may not fit.

    Raises:
      UsageError: No plan fits. The message names options that would fit.
    """
    others = Plan(model, sampler, estimate(model, sampler), limit) if sampler else None
    plans = [plan._replace(sampler=others) for plan in _plans(model, shape, limit, remat)]
    if len(plans) == 1:
        return plans[0]
    if others and not others.fits:
        needs = _in_gib(others.estimate.peak)
        raise UsageError(
            f"a device that only samples needs about {needs} GiB of {_in_gib(limit)}: set sampler_fsdp "
            "or sampler_tensor higher, or max_tokens lower; or set piece_tokens and remat, and nothing is planned"
        )
    chosen = next((plan for plan in plans if plan.fits), None)
    if chosen is None:
        raise UsageError(_describe_what_fits(model, shape, limit, plans[-1]))
    return chosen


def _plans(model: ModelConfig, shape: Shape, limit: int, remat: PlannedRemat) -> Iterator[Plan]:
    """Yields the plans to choose from, from the fastest to the smallest."""
    remats: tuple[Remat, ...] = ("none", "layer") if remat == "auto" else (remat,)
    for decoder in (replace(model, remat=choice) for choice in remats):
        for sized in (shape._replace(piece_tokens=tokens) for tokens in _piece_sizes(shape)):
            yield Plan(decoder, sized, estimate(decoder, sized), limit)


def _piece_sizes(shape: Shape) -> list[int]:
    """Returns the sizes of pieces to try, in tokens: the fastest, then halves of it down to pieces of one row."""
    sizes = [shape.piece_tokens or shape.traits.piece_tokens]
    if shape.piece_tokens:
        return sizes
    while shape._replace(piece_tokens=sizes[-1]).piece.rows > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _describe_what_fits(model: ModelConfig, shape: Shape, limit: int, smallest: Plan) -> str:
    """Returns a sentence with the memory that is needed, and options that would fit."""

    def in_fewest_bytes(model: ModelConfig, shape: Shape) -> Plan:
        return list(_plans(model, shape, limit, "layer"))[-1]

    half, lora = replace(model, dtype="bfloat16"), shape._replace(lora_rank=16, param_dtype="bfloat16")
    tokens = max(shape.max_tokens // 2, 1)
    ways = [(f"max_tokens {tokens}", model, shape._replace(max_tokens=tokens))]
    ways += [("num_prompts 1", model, shape._replace(num_prompts=1, minibatches=1)), ("dtype bfloat16", half, shape)]
    if shape.lora_rank:
        ways.append(("quantize nf4", model, shape._replace(quantize="nf4")))
    else:
        ways.append(("lora_rank 16, param_dtype bfloat16", model, lora))
        ways.append(("lora_rank 16, param_dtype bfloat16, dtype bfloat16", half, lora))
    for devices in (2, 4, 8, 16, 32, 64):
        prompts, fsdp = max(shape.num_prompts // devices, shape.minibatches), shape.fsdp * devices
        cut = shape._replace(num_prompts=prompts, fsdp=fsdp)
        if in_fewest_bytes(model, cut).fits:
            ways.append((f"fsdp {fsdp} on {devices} times as many devices", model, cut))
            break
    plans = [(words, in_fewest_bytes(decoder, changed)) for words, decoder, changed in ways]
    what_fits = [f"{words} (about {_in_gib(plan.estimate.peak)} GiB)" for words, plan in plans if plan.fits]
    instead = ", or ".join(what_fits) or "a smaller model, or fewer and shorter completions"
    return (
        f"the run needs about {_in_gib(smallest.estimate.peak)} GiB of {_in_gib(limit)} on each device, even in the "
        f"smallest pieces with remat layer: set {instead}; or set piece_tokens and remat, which are then not planned"
    )
