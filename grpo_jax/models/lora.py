"""LoRA (2106.09685): W + (α/r)·A B, with W frozen and A, B trained.

The parameters of an adapted policy are an `Adapted`, which every function of a `Policy` takes where it takes plain
parameters. Training splits it into what is trained and what is not; the frozen base is also the reference, as the
adapters start at zero. Adapters are never multiplied into W while training: sampler and trainer compute the same sums.

Leaves have the base's tree: `a` `[L, *in, R]` and `b` `[L, R, *out]` for a kernel `[L, *in, *out]`. Each expert of a
mixture has its own: all three then have an axis more behind L.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.errors import UsageError
from grpo_jax.models.params import Adapted, Params, holds_quantised
from grpo_jax.models.quantised import split_shape

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: tuple[Target, ...] = get_args(Target)


def add_adapters(
    params: Params, key: jax.Array, *, rank: int, alpha: float, targets: Sequence[Target] = TARGETS
) -> Adapted:
    """New adapters that change nothing yet: A ~ U(−1/√in, 1/√in), as PEFT draws it, and B = 0.

    Args:
      params: of the decoder, layers stacked.
      key: consumed.
      rank: R.
      alpha: α; ΔW = (α/R)·A B.
      targets: which projections have them, all seven by default (2305.14314 needed all).

    Returns:
      The adapted parameters; the base is the same arrays.

    Raises:
      UsageError: an impossible rank, alpha or target.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters already: merge them first")
    if rank < 1:
        raise UsageError(f"the rank of LoRA is {rank}: it must be at least 1")
    if not targets or set(targets) - set(TARGETS):
        raise UsageError(f"the targets of LoRA are {targets}: choose among {TARGETS}")
    if not 0 < alpha < math.inf:
        raise UsageError(f"the alpha of LoRA is {alpha}: it must be above 0")
    adapters: dict[str, Any] = {"layers": {}}
    for number, (block, name) in enumerate(sites(targets)):
        kernel = params["layers"][block][name]["kernel"]
        stacked, inputs, outputs = split_shape(name, kernel.shape)
        bound = math.prod(inputs) ** -0.5
        shape = (*stacked, *inputs, rank)
        a = jax.random.uniform(jax.random.fold_in(key, number), shape, minval=-bound, maxval=bound)
        adapters["layers"].setdefault(block, {})[name] = {"a": a, "b": jnp.zeros((*stacked, rank, *outputs))}
    return Adapted(params, adapters, jnp.float32(alpha / rank))


def merge(params: Adapted) -> Params:
    """Plain parameters W + (α/r)·A B, in the dtype of W; the base stays.

    Raises:
      UsageError: W is quantised: its few bits do not hold the sum.
    """
    if holds_quantised(params.base):
        raise UsageError(
            "the base of these adapters is quantised: merge them into the original one, as "
            "params._replace(base=load_pretrained(folder).params), or into quantised.dequantise_params(params.base)"
        )
    layers = {block: dict(modules) for block, modules in params.base["layers"].items()}
    for block, adapted in params.adapters["layers"].items():
        for name, adapter in adapted.items():
            kernel = layers[block][name]["kernel"]
            stacked, rank = split_shape(name, kernel.shape)[0], adapter["a"].shape[-1]
            a, b = adapter["a"].reshape(*stacked, -1, rank), adapter["b"].reshape(*stacked, rank, -1)
            change = params.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            merged = kernel.astype(jnp.float32) + change.reshape(kernel.shape)
            layers[block][name] = layers[block][name] | {"kernel": merged.astype(kernel.dtype)}
    return params.base | {"layers": layers}


def fingerprint(params: Params) -> str:
    """A checksum of a few numbers of each leaf: another one for weights that were trained further, in a moment."""
    digest = hashlib.sha256()

    def row(x: jax.Array) -> jax.Array:
        return x[(0,) * (x.ndim - 1)].astype(jnp.float32)

    def on_all(x: jax.Array) -> Any:
        """Returns the sharding of a row: whole on every device of a mesh, which several hosts may share."""
        sharding = getattr(x, "sharding", None)
        return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None

    shardings = jax.tree.map(on_all, params)
    few = jax.jit(partial(jax.tree.map, row), out_shardings=shardings)(params)
    for (path, leaf), row in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(few), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode() + np.asarray(row).tobytes())
    return digest.hexdigest()


def sites(targets: Sequence[Target] = TARGETS) -> list[tuple[str, Target]]:
    """(block, projection) of each target: where its kernel and its adapter stand in the tree of a layer."""
    return [("attention" if name in TARGETS[:4] else "mlp", name) for name in TARGETS if name in targets]
