"""What a run needs of one device's memory, from shapes alone.

`python -m grpo_jax.planning.memory` prints README's table.

Peak = held + max(sampling, scoring, learning), in bytes; B bytes of an activation, A trained parameters:

- held = parameters + 8 A + start: parameters, two moments of AdamW in float32, and the trained parameters as they were;
  with a teacher its parameters too. What the teacher says of a rollout is kept until the update is done.
- sampling = layers laid out for decoding + keys and values + max(a pass over the prompts, 12 R V), R completions.
- scoring, with a teacher alone = what it says of a rollout + its pass over one piece.
- learning = the larger of two moments. In a piece: 4 A · (2 with several pieces, else 1) + kept + max(working, logits):
  gradients and their sum, what each layer keeps, and what the backward pass of one layer, or the log-probabilities,
  work on. In the step of the optimizer: 4 A + updating.

Parameters are counted from the trees that the model makes, cut over a mesh as `models.sharding` cuts them. What is
kept and worked on are formulas, held against `memory_analysis()` of compiled programs (tests/planning/test_memory.py).
Left out are fragmentation and what an accelerator's compiler does otherwise than XLA on CPU.

Letters as in `models.transformer`: N prompts of P tokens, G completions of T tokens each.
"""

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.functional.logprobs import keeps_logits, slices_of_vocabulary
from grpo_jax.functional.products import GPU, Traits
from grpo_jax.models import sharding
from grpo_jax.models.config import Dtype, ModelConfig
from grpo_jax.models.geometry import slots_of
from grpo_jax.models.heads import without_vocabulary
from grpo_jax.models.lora import TARGETS, Target, add_adapters
from grpo_jax.models.params import Quantize
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.quantised import quantise_params
from grpo_jax.models.transformer import Params
from grpo_jax.planning.models import MODELS
from grpo_jax.planning.pieces import Piece, choose_piece
from grpo_jax.sampling.sampler import rooms_of

FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}
# Updates of many parameters exist at a time, and XLA on CPU copies moments: 1.3 to 1.54 numbers for each parameter.
_UPDATING = 1.4
# Of a cache that grows on a CPU more than its last size exists while it is copied: .30 of it, by the compiler.
_GROWING = 0.3
_BLOCK = 128  # queries whose scores exist at a time, as in `models.attention.attend`
GIB = 2**30


class Shape(NamedTuple):
    """What the memory of a run depends on besides the model."""

    num_prompts: int = 8  # N, of one device
    group_size: int = 8  # G
    prompt_tokens: int = 256  # P
    max_tokens: int = 512  # T
    minibatches: int = 1
    microbatches: int = 0  # pieces of a minibatch; 0: by piece_tokens
    piece_tokens: int = GPU.piece_tokens
    packs: bool = True  # whether completions may be packed
    lora_rank: int = 0  # 0: all parameters are trained
    lora_targets: tuple[Target, ...] = TARGETS
    param_dtype: Dtype = "float32"  # of the decoder's parameters
    quantize: Quantize = "none"  # of its frozen projections
    critic: Literal["none", "own", "shared"] = "none"
    teacher: ModelConfig | None = None  # of distillation; its parameters have the dtype of its activations
    distillation_top_k: int | None = None  # 0: hidden states of the whole rollout are kept; None: one number a token
    copies: int = 1  # of what is trained: the start, and a reference that moves
    fsdp: int = 1
    tensor: int = 1
    traits: Traits = GPU  # of the backend

    @property
    def piece(self) -> Piece:
        """Of a minibatch."""
        return choose_piece(
            self.num_prompts // self.minibatches,
            self.prompt_tokens,
            self.group_size,
            self.max_tokens,
            microbatches=self.microbatches,
            piece_tokens=self.piece_tokens,
            packs=self.packs,
        )

    @property
    def num_pieces(self) -> int:
        """Of a minibatch whose completions are all T tokens long."""
        rows = self.num_prompts // self.minibatches
        if self.piece.is_packed:
            rows *= -(-self.group_size * self.max_tokens // self.piece.width)
        return -(-rows // self.piece.rows)

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the axes of the mesh that cut parameters."""
        return {sharding.DATA: 1, sharding.FSDP: self.fsdp, sharding.TENSOR: self.tensor}


class Estimate(NamedTuple):
    """Bytes of one device."""

    params: int  # of the decoder, of adapters, and of a critic
    optimizer: int  # the two moments of AdamW
    start: int  # the trained parameters as they were: the reference; and a reference that moves
    teacher: int  # parameters of a teacher
    teacher_outputs: int  # what it says of a rollout, until the update is done
    teacher_pass: int  # of one piece, by the teacher's pass
    decoding: int  # the layers again, laid out for decoding, and the unembedding where it is cast
    cache: int  # keys and values of prompts and completions
    choosing: int  # a pass over the prompts, or the logits of one token of each completion
    gradients: int
    kept: int  # of one piece, by each layer, for the backward pass
    working: int  # of one piece, by the backward pass of one layer
    logits: int  # of one piece: slices of them, and hidden states
    updating: int  # by the step of the optimizer, beside one gradient

    @property
    def held(self) -> int:
        """What stays on the device between programs."""
        return self.params + self.optimizer + self.start + self.teacher

    @property
    def sampling(self) -> int:
        """What `sample` adds."""
        return self.decoding + self.cache + self.choosing

    @property
    def learning(self) -> int:
        """What `learn` adds."""
        one_gradient = self.optimizer // 2
        in_a_piece = self.gradients + self.kept + max(self.working, self.logits)
        return self.teacher_outputs + max(in_a_piece, one_gradient + self.updating)

    @property
    def scoring(self) -> int:
        """What `score` adds by a teacher. Without one it needs less than `learn`."""
        return self.teacher_outputs + self.teacher_pass

    @property
    def peak(self) -> int:
        """The largest of sampling, scoring and learning, with what is held."""
        return self.held + max(self.sampling, self.scoring, self.learning)


def estimate(model: ModelConfig, shape: Shape) -> Estimate:
    """The memory of a run of GRPO or PPO on one device.

    Args:
      model: the decoder, with its dtype and remat.
      shape: of the run.

    Returns:
      Bytes by purpose.
    """
    of_device = size_on_device(weights(model, shape)[1], shape.mesh)
    own_critic = 2 if shape.critic == "own" else 1  # decoders that a piece is computed by
    return Estimate(
        params=FLOAT32 * of_device + (bytes_on_device(frozen(model, shape), shape.mesh) if shape.lora_rank else 0),
        optimizer=2 * FLOAT32 * of_device,
        start=FLOAT32 * of_device * shape.copies,
        teacher=_teacher(model, shape),
        teacher_outputs=_teacher_outputs(model, shape),
        teacher_pass=_teacher_pass(model, shape),
        decoding=_decoding(model, shape),
        cache=_cache(model, shape),
        choosing=max(_prefill(model, shape), 3 * FLOAT32 * _completions(shape) * model.vocab_size // shape.tensor),
        gradients=FLOAT32 * of_device * (2 if shape.num_pieces > 1 else 1),
        kept=own_critic * _kept(model, shape),
        working=_working(model, shape),
        logits=_logits(model, shape),
        updating=round(_UPDATING * FLOAT32 * of_device),
    )


# ---- parameters


@cache
def decoder_shapes(model: ModelConfig) -> Params:
    """Shapes of the parameters of a decoder."""
    return jax.eval_shape(decoder_policy(replace(model, attention="shared")).init, jax.random.key(0))


def weights(model: ModelConfig, shape: Shape) -> tuple[Params, Params]:
    """Shapes of the decoder's parameters, as they are computed with, and of all that are trained."""
    head = jax.ShapeDtypeStruct((model.hidden_size,), jnp.float32)
    critic = {} if shape.critic == "none" else {"head": head}
    if shape.critic == "own":
        critic |= {"decoder": _trained(without_vocabulary(model), shape)}
    return decoder_shapes(model), {"policy": _trained(model, shape), "critic": critic}


def frozen(model: ModelConfig, shape: Shape) -> Params:
    """Shapes and dtypes of the decoder's parameters, as they are held where adapters are trained."""
    held = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, shape.param_dtype), decoder_shapes(model))
    return jax.eval_shape(partial(quantise_params, format=shape.quantize), held)


def _trained(model: ModelConfig, shape: Shape) -> Params:
    """Shapes of what is trained of a decoder."""
    params = decoder_shapes(model)
    if not shape.lora_rank:
        return params
    adapters = partial(add_adapters, rank=shape.lora_rank, alpha=1.0, targets=shape.lora_targets)
    return jax.eval_shape(adapters, params, jax.random.key(0)).adapters


def num_params(model: ModelConfig) -> int:
    """Parameters of the decoder."""
    return size_on_device(decoder_shapes(model), dict.fromkeys(sharding.AXES, 1))


def size_on_device(tree: Any, mesh: Any) -> int:
    """Numbers that one device of a mesh has of a tree of parameters.

    Args:
      tree: of arrays or their shapes.
      mesh: sizes of its axes, by name.
    """
    return sum(size for _, size in _on_device(tree, mesh))


def bytes_on_device(tree: Any, mesh: Any) -> int:
    """As `size_on_device`, in bytes."""
    return sum(x.dtype.itemsize * size for x, size in _on_device(tree, mesh))


def _on_device(tree: Any, mesh: Any) -> list[tuple[Any, int]]:
    """The leaves of a tree, and how many numbers of each one device has."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(sharding.specs(tree, mesh)), strict=True)
    return [(x, x.size // parts_of(spec, mesh)) for x, spec in leaves]


def parts_of(spec: jax.sharding.PartitionSpec, mesh: Any) -> int:
    """Parts that an array is cut into by a `PartitionSpec`."""
    axes = [name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(mesh[name] for name in axes)


def _decoding(model: ModelConfig, shape: Shape) -> int:
    """Bytes: the layers, and the unembedding where it has to be cast. Of quantised layers the codes, and one layer."""
    layers = sum(x.size for x in jax.tree.leaves(decoder_shapes(model)["layers"]))
    cast = model.vocab_size * model.hidden_size if model.dtype != shape.param_dtype else 0
    codes = 0
    if shape.quantize != "none":
        codes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(frozen(model, shape)["layers"]))
        layers //= model.num_hidden_layers
    return (codes + BYTES[model.dtype] * (layers + cast)) // (shape.fsdp * shape.tensor)


def _bytes(model: ModelConfig, shape: Shape) -> int:
    """Of a number that layers keep, or devices exchange: XLA on CPU has these in float32, also of bfloat16."""
    return FLOAT32 if shape.traits.emulates_bfloat16 else BYTES[model.dtype]


# ---- of the batch


def _completions(shape: Shape) -> int:
    return shape.num_prompts * shape.group_size


def _keys(model: ModelConfig, shape: Shape) -> int:
    """Numbers of a token's keys, of one layer: K E."""
    return model.num_key_value_heads * model.head_dim // shape.tensor


def _projected(model: ModelConfig, shape: Shape) -> int:
    """Numbers that a token's projections in one layer are: queries, keys, values, attended, middle, gate and up.

    Where norms follow attention and MLP, what both put out as well.
    """
    heads, features = model.num_attention_heads * model.head_dim, model.intermediate_size
    if model.experts:
        features = model.experts.num_experts_per_tok * model.experts.moe_intermediate_size
    streams = 1 if model.norms == "before" else 3
    return 2 * _keys(model, shape) + (2 * heads + 2 * features) // shape.tensor + streams * model.hidden_size


def _cache(model: ModelConfig, shape: Shape) -> int:
    """Bytes: 2 L K E for each token of a prompt, once a group, and of a completion what each layer keeps of it."""
    of_prompts = model.num_hidden_layers * shape.num_prompts * shape.prompt_tokens
    slots = sum(slots_of(model, window, shape.max_tokens) for window in model.windows)
    numbers = 2 * _keys(model, shape) * (of_prompts + _completions(shape) * slots)
    grows = shape.traits.backend == "cpu" and len(rooms_of(shape.max_tokens)) > 1
    return round((1 + _GROWING * grows) * numbers * BYTES[model.dtype])


def _prefill(model: ModelConfig, shape: Shape) -> int:
    """Bytes of a pass over the prompts: keys and values of all layers before they are laid out, and one layer."""
    tokens = shape.num_prompts * shape.prompt_tokens
    numbers = 2 * model.num_hidden_layers * _keys(model, shape) + _projected(model, shape)
    return numbers * tokens * _bytes(model, shape)


def tokens_of_piece(shape: Shape) -> int:
    """Counts tokens of a piece, padding included. The last token of a completion predicts nothing."""
    piece = shape.piece
    return piece.rows * (shape.prompt_tokens + piece.texts * (piece.width - (not piece.is_packed)))


def _kept(model: ModelConfig, shape: Shape) -> int:
    """Bytes that all layers keep of a piece: what goes into each, and without remat its projections."""
    inputs = 0 if model.remat == "offload" and shape.traits.offloads else model.hidden_size
    kept = inputs + (_projected(model, shape) if model.remat == "none" else 0)
    return model.num_hidden_layers * kept * tokens_of_piece(shape) * _bytes(model, shape)


def _working(model: ModelConfig, shape: Shape) -> int:
    """Bytes that the backward pass of one layer works on."""
    piece, size = shape.piece, BYTES[model.dtype]
    # Projections and their gradients; with remat the projections are computed anew.
    projected = (2 if model.remat == "none" else 3) * _projected(model, shape) * tokens_of_piece(shape)
    # A prompt's keys and values are copied to each of its completions; with their gradients.
    in_a_row = piece.rows * piece.texts * (shape.prompt_tokens + piece.width)
    heads = model.num_attention_heads // shape.tensor
    scores = in_a_row * heads * min(_BLOCK, piece.width)
    attended = size * (projected + 4 * _keys(model, shape) * in_a_row) + 4 * FLOAT32 * scores
    return attended + max(_gathered(model, shape), _plain(model, shape)) + _routed(model, shape)


def _routed(model: ModelConfig, shape: Shape) -> int:
    """Bytes of a mixture of experts: tokens once for each of their experts, sorted, what comes back for them, and the
    gradients of both; and the gradient of a layer's kernels before it is put to those of all."""
    if model.experts is None:
        return 0
    rows = model.experts.num_experts_per_tok * model.hidden_size * tokens_of_piece(shape)
    kernels = 3 * model.experts.num_experts * model.hidden_size * model.experts.moe_intermediate_size // shape.tensor
    return 6 * rows * _bytes(model, shape) + kernels * _bytes(model, shape)


def _plain(model: ModelConfig, shape: Shape) -> int:
    """Bytes of the kernels of a layer that are dequantised."""
    if shape.quantize == "none":
        return 0
    whole = size_on_device(decoder_shapes(model)["layers"], {**shape.mesh, sharding.FSDP: 1})
    return whole // model.num_hidden_layers * _bytes(model, shape)


def _gathered(model: ModelConfig, shape: Shape) -> int:
    """Bytes of a layer's parameters that a mesh has put together."""
    if shape.fsdp == 1:
        return 0
    layers = decoder_shapes(model)["layers"]
    whole = size_on_device(layers, {**shape.mesh, sharding.FSDP: 1}) // model.num_hidden_layers
    return whole * _bytes(model, shape)


def _logits(model: ModelConfig, shape: Shape) -> int:
    """Bytes: three slices in float32, hidden states and their gradient, and the matrix in the dtype of activations.

    All slices where they are kept.
    """
    piece = shape.piece
    rows = piece.rows * piece.texts * piece.width // shape.tensor
    width = -(-model.vocab_size // slices_of_vocabulary(rows, model.vocab_size, shape.traits))
    cast = 0 if model.dtype == "float32" else model.vocab_size * model.hidden_size * _bytes(model, shape)
    keeps = keeps_logits(rows, model.vocab_size, shape.traits)
    slices = 2 * rows * width + rows * (model.vocab_size if keeps else width)
    return FLOAT32 * slices + 2 * rows * model.hidden_size * FLOAT32 + cast


# ---- of a teacher


def _teacher(model: ModelConfig, shape: Shape) -> int:
    """Bytes of its parameters."""
    if shape.teacher is None:
        return 0
    return BYTES[model.dtype] * size_on_device(decoder_shapes(shape.teacher), shape.mesh)


def _teacher_outputs(model: ModelConfig, shape: Shape) -> int:
    """Bytes of what it says of each token: hidden states, or ids and logits of a few tokens, or one number."""
    if shape.teacher is None:
        return 0
    tokens = _completions(shape) * shape.max_tokens
    if shape.distillation_top_k is None:
        return FLOAT32 * tokens
    if shape.distillation_top_k:
        return FLOAT32 * (2 * shape.distillation_top_k + 1) * tokens
    return BYTES[model.dtype] * shape.teacher.hidden_size * tokens


def _teacher_pass(model: ModelConfig, shape: Shape) -> int:
    """Bytes of its pass over a piece: one layer at a time, and no gradients."""
    if shape.teacher is None:
        return 0
    teacher = replace(shape.teacher, dtype=model.dtype, remat="none")
    return _working(teacher, shape) // 2 + (0 if shape.distillation_top_k == 0 else _logits(teacher, shape))


# ---- README's table


def table() -> str:
    """README's table: GiB of one device for each model, in markdown."""
    lines = [
        "| model | parameters | full training | full training, `--fsdp 8` | LoRA, rank 16 |",
        "|---|---|---|---|---|",
    ]
    ours = Shape(microbatches=2)
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"):
        model = replace(MODELS[name], dtype="bfloat16", remat="layer")
        shapes = ours, ours._replace(fsdp=8), ours._replace(lora_rank=16, param_dtype="bfloat16")
        cells = (f"{of.peak / GIB:.0f} ({of.held / GIB:.0f})" for of in (estimate(model, shape) for shape in shapes))
        lines.append(f"| {name} | {num_params(model) / 1e9:.2f} billion | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
