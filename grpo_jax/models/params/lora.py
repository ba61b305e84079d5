"""LoRA (2106.09685): W + (α/r)·A B, with W frozen and A, B trained.

The parameters of an adapted policy are an `Adapted`. Every function of a `Policy` accepts it instead of plain
parameters. Training splits it into trained and frozen parameters. The frozen base is also the reference, since B starts
at zero. Adapters are never merged into W during training, so that sampler and trainer compute the same sums.

The tree of adapters follows the tree of the base: `a` `[L, *in, R]` and `b` `[L, R, *out]` for a kernel
`[L, *in, *out]`. In a mixture each expert has an adapter, and all three arrays have one more axis after L.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax.errors import UsageError
from grpo_jax.models.params.rounding import round_leaf
from grpo_jax.models.params.tree import (
    TARGETS,
    Adapted,
    Params,
    Target,
    check_decoder,
    check_full_precision,
    split_shape,
)


def add_adapters(
    params: Params, key: jax.Array, *, rank: int, alpha: float, targets: Sequence[Target] = TARGETS
) -> Adapted:
    """Adds new adapters that change nothing yet: A ~ U(−1/√in, 1/√in) as in PEFT, and B = 0.

    Args:
      params: The parameters of the decoder, with layers stacked.
      key: The random key; consumed.
      rank: The rank of the adapters, R.
      alpha: α in ΔW = (α/R)·A B.
      targets: The projections that get adapters, if the model has them. Default all, which 2305.14314 needed.

    Returns:
      The adapted parameters. The base shares its arrays with `params`.

    Raises:
      UsageError: The parameters have adapters already or belong to another model, or rank, alpha or targets are
        invalid.
    """
    if isinstance(params, Adapted):
        raise UsageError("these parameters have adapters already: merge them first")
    check_decoder(params)
    if rank < 1:
        raise UsageError(f"the rank of LoRA is {rank}: it must be at least 1")
    if not targets or set(targets) - set(TARGETS):
        raise UsageError(f"the targets of LoRA are {targets}: choose among {TARGETS}")
    if not 0 < alpha < math.inf:
        raise UsageError(f"the alpha of LoRA is {alpha}: it must be above 0")
    adapters: dict[str, Any] = {"layers": {}}
    for number, (block, name) in enumerate(sites(params["layers"], targets)):
        kernel = params["layers"][block][name]["kernel"]
        stacked, inputs, outputs = split_shape(name, kernel.shape)
        bound = math.prod(inputs) ** -0.5
        shape = (*stacked, *inputs, rank)
        a = jax.random.uniform(jax.random.fold_in(key, number), shape, minval=-bound, maxval=bound)
        adapters["layers"].setdefault(block, {})[name] = {"a": a, "b": jnp.zeros((*stacked, rank, *outputs))}
    return Adapted(params, adapters, jnp.float32(alpha / rank))


def merge(params: Adapted, dtype: Any = None) -> Params:
    """Merges adapters into plain parameters, W + (α/r)·A B. The base is not changed.

    Args:
      params: The adapted parameters.
      dtype: The dtype of the sums; None: that of W. To bfloat16 they are rounded stochastically: a change is often
        smaller than half the distance between two numbers, and rounding to the nearest would lose it. See `rounding`.

    Raises:
      UsageError: W is quantised, and cannot hold the sum in its few bits.
    """
    check_full_precision(
        params.base,
        "merge adapters into the original ones, as params._replace(base=load_pretrained(folder).params), or into "
        "quantised.dequantise_params(params.base)",
    )
    layers = {block: dict(modules) for block, modules in params.base["layers"].items()}
    for block, adapted in params.adapters["layers"].items():
        for name, adapter in adapted.items():
            kernel = layers[block][name]["kernel"]
            stacked, rank = split_shape(name, kernel.shape)[0], adapter["a"].shape[-1]
            a, b = adapter["a"].reshape(*stacked, -1, rank), adapter["b"].reshape(*stacked, rank, -1)
            change = params.scale * jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            merged = kernel.astype(jnp.float32) + change.reshape(kernel.shape)
            target = jnp.dtype(dtype or kernel.dtype)
            if target == jnp.bfloat16:
                path = tuple(map(jax.tree_util.DictKey, ("layers", block, name, "kernel")))
                merged = jax.jit(round_leaf, static_argnums=(0, 2))(path, merged, target)
            layers[block][name] = layers[block][name] | {"kernel": merged.astype(target)}
    return params.base | {"layers": layers}


def fingerprint(params: Params) -> str:
    """Computes a checksum of a few numbers of each leaf. This is fast, and further training changes the checksum."""
    digest = hashlib.sha256()

    def row(x: jax.Array) -> jax.Array:
        return x[(0,) * (x.ndim - 1)].astype(jnp.float32)

    def on_all(x: jax.Array) -> Any:
        """Returns the sharding of a row: replicated over the mesh, which several hosts may share."""
        sharding = getattr(x, "sharding", None)
        return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None

    shardings = jax.tree.map(on_all, params)
    few = jax.jit(partial(jax.tree.map, row), out_shardings=shardings)(params)
    for (path, leaf), row in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(few), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape}".encode() + np.asarray(row).tobytes())
    return digest.hexdigest()


def sites(layers: Params, targets: Sequence[Target] = TARGETS) -> list[tuple[str, Target]]:
    """Returns (block, projection) of each target: the place of its kernel and its adapter in the tree of layers."""
    return [(block, name) for name in TARGETS if name in targets for block, tree in layers.items() if name in tree]
