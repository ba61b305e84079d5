"""One decoder for prompts, completions and single tokens.

A prompt is the same for the G completions of its group, so it is computed once. A group is one row of P + G·S tokens,
the prompt followed by its completions, and each completion attends to the prompt and to itself. Gradients flow back
into the prompt from all completions. The results equal those of repeating the prompt, but the work falls from G·(P + S)
tokens per group to P + G·S. Norms, projections and MLP act on single tokens and see one array. Only attention
distinguishes prompt and completions.

Letters: N prompts, G completions per prompt, S tokens of a completion, P tokens of a prompt, M = P + G·S tokens of a
group, C tokens of the cache, D features, F features of the MLP, H query heads, K key-value heads, Q = H/K query heads
that share one key-value head, E features of a head, L layers, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_jax.functional.numerics import in_float32
from grpo_jax.functional.products import inverse_rms, product, rms_norm, traits_of_backend
from grpo_jax.models.config import READ, FeedForward, Form, Mixer, ModelConfig
from grpo_jax.models.decoder.attention import Softmax, attend_past, attend_rows, fuses_decoding, rotate
from grpo_jax.models.decoder.cache import KeyValues, Memory, Prefix
from grpo_jax.models.decoder.modules import MLP, Linear, PerLayerInput, declared, linears, nn, norm
from grpo_jax.models.params import sharding
from grpo_jax.models.params.sharding import BATCH, DATA, FSDP, MODEL, TENSOR, spread
from grpo_jax.models.params.tree import PROJECTIONS, Params as Params, format_of, is_quantised, split_shape
from grpo_jax.models.rows.geometry import (
    Geometry,
    LayerKind,
    PromptTokens,
    geometry_of_rows,
    layer_kinds,
    rows_of_prompts,
)

Collections = Mapping[str, Params]  # the variables of linen: "params", and "lora" if there are adapters


# ---- stacks of layers
#
# The parameters of a module are stacked over the layers that have the module. Most decoders have the same modules in
# every layer. Others repeat a period of layers, such as three delta nets and one attention, or begin with a few layers
# that differ. Layers that repeat are computed by one loop, so that compile time does not depend on depth.

# The result of each layer of the prefix; the results of each layer of a period, with a leading axis of periods; and the
# number of periods
Results = tuple[list[Any], list[Any], int]
# What layers share with later layers
Shared = dict[str, Any]
# (form of a layer, x, what earlier layers share, its parameters by collection, its kind)
# -> (x after the layer, what layers share, any other result)
Step = Callable[[Form, jax.Array, Shared, dict[str, Params], LayerKind], tuple[jax.Array, Shared, Any]]


def layers_with(config: ModelConfig, module: str) -> list[int]:
    """Returns the numbers of the layers that have a module, such as "attention", or a norm, which all layers have."""
    module = "experts" if module.startswith("shared_expert") else module
    is_norm = module not in (*get_args(Mixer), *get_args(FeedForward))
    return [number for number, form in enumerate(config.forms) if is_norm or module in form]


def layer_params(config: ModelConfig, layers: Params, number: int, period: range | None = None) -> Params:
    """Returns the parameters of one layer, by module.

    Args:
      config: The configuration of the decoder.
      layers: The stacked parameters of all modules, or of some.
      number: The number of the layer, from 0.
      period: The layers whose parameters are stacked. A module of only one of them has no axis of layers. None: all
        layers, and every module has an axis.
    """
    params = {}
    for module, tree in layers.items():
        numbers = [i for i in layers_with(config, module) if period is None or i in period]
        if number in numbers:
            has_axis = period is None or len(numbers) > 1
            params[module] = jax.tree.map(itemgetter(numbers.index(number)), tree) if has_axis else tree
    return params


def find_repetition(forms: tuple[Form, ...]) -> tuple[int, int]:
    """Returns (prefix, period): behind the first `prefix` layers, forms repeat with this period."""

    def repeats(prefix: int, period: int) -> bool:
        return forms[prefix:-period] == forms[prefix + period :] and (len(forms) - prefix) % period == 0

    sizes = range(1, len(forms) + 1)
    return next((n - period, period) for n in sizes for period in range(1, n + 1) if repeats(n - period, period))


def scan_layers(
    config: ModelConfig, step: Step, x: jax.Array, collections: Mapping[str, Params], *, unroll: bool
) -> tuple[jax.Array, Results]:
    """Applies all layers, one after the other.

    A layer sees what earlier layers of its period share, and the layers before the loop.

    Args:
      config: The configuration of the decoder.
      step: Computes a layer.
      x: The input of the first layer.
      collections: The stacked parameters, and the adapters if there are any.
      unroll: True if the loop is compiled layer by layer.

    Returns:
      The output of the last layer, and the other result of each layer, for `by_layer`.
    """
    forms, kinds, results = config.forms, layer_kinds(config), []
    prefix, period = find_repetition(forms)
    shared: Shared = {}
    repeated = range(prefix, prefix + period)
    for number in range(prefix):
        params = {name: layer_params(config, layers, number) for name, layers in collections.items()}
        x, shared, result = step(forms[number], x, shared, params, kinds[number])
        results.append(result)

    def by_period(layers: Params) -> Params:
        """Splits stacks behind the prefix: [layers, ...] -> [periods, layers of a period, ...]."""
        stacks = {}
        for module, tree in layers.items():
            numbers = layers_with(config, module)
            first, count = (sum(i in part for i in numbers) for part in (range(prefix), repeated))
            if count:
                # Without an axis of size 1, for which XLA on CPU would copy the parameters.
                split = () if count == 1 else (count,)
                stacks[module] = jax.tree.map(lambda y, i=first, n=split: y[i:].reshape(-1, *n, *y.shape[1:]), tree)
        return stacks

    def step_period(x: jax.Array, scanned: Any) -> tuple[jax.Array, list[Any]]:
        stacks, period_results = scanned
        results, seen = [], shared
        for number, kind in zip(repeated, period_results, strict=True):
            params = {name: layer_params(config, layers, number, repeated) for name, layers in stacks.items()}
            x, seen, result = step(forms[number], x, seen, params, kind or kinds[number])
            results.append(result)
        return x, results

    stacks = {name: by_period(layers) for name, layers in collections.items()}
    # The indices of rotation and window are arrays only if they differ between periods.
    period_kinds = [
        jax.tree.map(lambda *i: jnp.array(i, jnp.int32), *set_of) if len(set(set_of)) > 1 else None
        for set_of in (kinds[number::period] for number in repeated)
    ]
    x, period_results = jax.lax.scan(step_period, x, (stacks, period_kinds), unroll=unroll)
    return x, (results, period_results, (len(forms) - prefix) // period)


def by_layer(results: Results) -> list[Any]:
    """Returns the result of each layer."""
    prefix_results, period_results, num_periods = results
    return prefix_results + [jax.tree.map(itemgetter(i), y) for i in range(num_periods) for y in period_results]


# ---- parameters


def initial_params(key: jax.Array, shapes: Params, initializer_range: float) -> Params:
    """Draws kernels and embeddings ~ N(0, initializer_range²). Biases are 0, scales of norms 1, and their offsets 0.

    All numbers come from one draw, since on CPU each further draw takes .2 s to compile.

    Args:
      key: The random key; consumed.
      shapes: A tree with the shapes and dtypes of the parameters.
      initializer_range: The standard deviation.

    Returns:
      The parameters of a new model.
    """
    constants = {"bias": jnp.zeros, "scale": jnp.ones, "expert_scale": jnp.ones, "offset": jnp.zeros}
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    sizes = [leaf.size for path, leaf in leaves if path[-1].key not in constants]
    drawn = initializer_range * jax.random.normal(key, (sum(sizes),))
    pieces = iter(jnp.split(drawn, list(itertools.accumulate(sizes))[:-1]))

    def initial(path: Any, leaf: Any) -> jax.Array:
        if constant := constants.get(path[-1].key):
            return constant(leaf.shape, leaf.dtype)
        return next(pieces).reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(initial, shapes)


@cache
def param_shapes(config: ModelConfig) -> Params:
    """Returns the shapes of the parameters: a tree of `jax.ShapeDtypeStruct`, which callers must not change."""
    config = replace(config, attention="shared")  # this machine may lack the kind of attention, which has no parameters
    return jax.eval_shape(partial(_zeros, config))  # traced as a whole: each array made outside would compile a program


def _zeros(config: ModelConfig) -> Params:
    """Returns parameters of zeros. They are only traced."""
    token, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    geometry = geometry_of_rows(config, rows_of_prompts(PromptTokens(token, token == 0)))
    x = jnp.zeros((1, 1, config.hidden_size), config.dtype)
    layers: Params = {}
    for form, kind in dict(zip(config.forms, layer_kinds(config), strict=True)).items():
        kv_heads, features, *_ = config.heads_of(form.mixer)
        read = KeyValues(*[jnp.zeros((1, 1, kv_heads, features), config.dtype)] * 2)
        layers |= Block(config, form).init(key, x, geometry, kind=kind, read=read)["params"]
    for module, tree in layers.items():
        count = len(layers_with(config, module))
        layers[module] = jax.tree.map(lambda x, n=count: jnp.zeros((n, *x.shape), x.dtype), tree)
    embedding = jnp.zeros((config.vocab_size, config.hidden_size))
    zeros = {"embedding": embedding, "final_norm": norm(config).init(key, x)["params"], "layers": layers}
    if size := config.hidden_size_per_layer_input:
        count = config.num_hidden_layers * size
        zeros["per_layer"] = {
            "embedding": jnp.zeros((config.vocab_size, count)),
            "projection": {"kernel": jnp.zeros((config.hidden_size, count))},
            "norm": norm(config).init(key, jnp.zeros(size))["params"],
        }
    return zeros if config.tie_word_embeddings else zeros | {"unembedding": embedding}


def decoding_layout(params: Params, config: ModelConfig) -> Params:
    """Converts parameters of the scanned decoder to those of the decoder with separate layers.

    Kernels become matrices [out, in], named "transposed", in the dtype of the computation. With the few rows of a
    decode step, XLA on CPU multiplies fastest by these. Matrices of linear maps with the same input become one matrix,
    named "joined". Quantised kernels are only renamed to "quantised", since as matrices they would take the memory that
    they save.

    Args:
      params: The collection "params" or "lora".
      config: The configuration of the decoder.

    Returns:
      The tree with `layer_0`, `layer_1`, … instead of `layers`.
    """

    can_join = sharding.mesh_sizes() is None  # a mesh shards each matrix separately

    def transposed(name: str, kernel: jax.Array) -> jax.Array:
        _, inputs, _ = split_shape(name, kernel.shape)
        return kernel.astype(config.dtype).reshape(math.prod(inputs), -1).T

    def block(tree: Params) -> Params:
        projections = {name: dict(tree[name]) for name in PROJECTIONS if name in tree}
        if "router" in tree:  # the kernels of experts are multiplied by group, and keep their layout
            cast = partial(jax.tree.map, lambda x: x if is_quantised(x) else x.astype(config.dtype))
            return tree | cast(projections, is_leaf=is_quantised)
        joined = []
        for name, leaves in projections.items():
            kernel = leaves.pop("kernel", None)  # adapters have none
            if is_quantised(kernel):
                leaves["quantised"] = kernel
            elif kernel is not None and PROJECTIONS[name].is_joined and can_join:
                joined.append(transposed(name, kernel))
            elif kernel is not None:
                leaves["transposed"] = transposed(name, kernel)
        return tree | projections | ({"joined": jnp.concatenate(joined)} if joined else {})

    layers = {
        f"layer_{i}": {name: block(tree) for name, tree in layer_params(config, params["layers"], i).items()}
        for i in range(config.num_hidden_layers)
    }
    return {name: value for name, value in params.items() if name != "layers"} | layers


# ---- passes


def embed(config: ModelConfig, params: Params, ids: jax.Array, rows: Any) -> jax.Array:
    """Looks up the embeddings of tokens, `[N, M]` -> `[N, M, D]`. `rows` are the mesh axes of N."""
    x = _look_up(params["embedding"], ids, rows).astype(config.dtype)
    if config.embedding_multiplier != 1:  # in the dtype of the activations, like transformers
        x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
    return x


def _look_up(embedding: jax.Array, ids: jax.Array, rows: Any) -> jax.Array:
    # On a mesh embeddings are sharded by features, so each device reads its features of all tokens.
    x = spread(embedding[spread(ids, DATA)], DATA, None, MODEL)
    return spread(spread(x, DATA, None, FSDP), rows)  # two steps, since XLA would do one step by copying everything


def layer_inputs(config: ModelConfig, params: Params, ids: jax.Array, x: jax.Array, rows: Any) -> Collections:
    """(norm(x P / √D) + √d · embedding) / √2, of d features for each layer: the per-layer embeddings of Gemma 4.

    Args:
      config: The configuration of the decoder, which has d.
      params: The parameters of the decoder.
      ids: The tokens, int `[N, M]`.
      x: The embeddings of these tokens, `[N, M, D]`.
      rows: The mesh axes of N.

    Returns:
      A collection with `features` `[L, N, M, d]`; without per-layer embeddings, no collection.
    """
    size = config.hidden_size_per_layer_input
    if not size:
        return {}
    embedded = _look_up(params["per_layer"]["embedding"], ids, rows).astype(x.dtype) * jnp.asarray(size**0.5, x.dtype)
    kernel = params["per_layer"]["projection"]["kernel"].astype(x.dtype)
    projected = in_float32(jnp.multiply, product(x, kernel), config.hidden_size**-0.5)
    embedded, projected = (y.reshape(*ids.shape, config.num_hidden_layers, size) for y in (embedded, projected))
    normed: Any = norm(config).apply({"params": params["per_layer"]["norm"]}, projected)
    features = in_float32(jnp.multiply, normed + embedded, 2**-0.5)
    return {"inputs": {"features": spread(jnp.moveaxis(features, 2, 0), None, rows)}}


def last_states(config: ModelConfig, params: Params, x: jax.Array, rows: Any) -> jax.Array:
    """Normalises the output of the last layer, `[N, M, D]`, so that its products with the unembedding are logits."""
    normed: Any = norm(config).apply({"params": params["final_norm"]}, x)
    x = spread(normed, rows)
    return x if config.logits_scaling == 1 else in_float32(jnp.divide, x, config.logits_scaling)


def compute_rows(
    config: ModelConfig, variables: Collections, ids: jax.Array, geometry: Geometry, *, has_gradient: bool = False
) -> tuple[jax.Array, Results]:
    """Computes hidden states of prompts, or of groups, for training and prefill.

    Args:
      config: The configuration of the decoder.
      variables: The parameters by collection: "params", and "lora" if there are adapters.
      ids: The tokens, int `[N, M]`: prompts `[N, P]`, or groups, each a prompt and its completions in a row.
      geometry: The positions and masks of the tokens.
      has_gradient: True if layers may be compiled one by one: see `unrolls`.

    Returns:
      Hidden states after the last norm `[N, M, D]`, and the results of each layer: the `cache.Memory` of the prompts,
      and the `experts.Routing` if the layer has experts, else None.
    """
    params = variables["params"]

    def step(form: Form, x: jax.Array, shared: Shared, layer: Collections, kind: LayerKind) -> tuple[Any, Shared, Any]:
        def block(x: jax.Array, read: Any, layer: Collections, geometry: Geometry) -> Any:
            # The kind is no argument, since that would make an array of it.
            return Block(config, form).apply(layer, x, geometry, kind, None, read)

        read = shared.get(READ.get(form.mixer, ""))
        x, memory, routing = rematerialised(block, config)(x, read, layer, geometry)
        if config.num_kv_shared_layers and memory is not None:
            shared = shared | {form.mixer: memory}
        return x, shared, (memory, routing)

    unroll = has_gradient and unrolls(config, params)
    x = embed(config, params, ids, BATCH)
    layers = {name: tree["layers"] for name, tree in variables.items()}
    layers |= layer_inputs(config, params, ids, x, BATCH)
    x, results = scan_layers(config, step, x, layers, unroll=unroll)
    return last_states(config, params, x, BATCH), results


def compute_next(
    config: ModelConfig,
    variables: Collections,
    ids: jax.Array,
    geometry: Geometry,
    prefix: Prefix,
    cache: tuple[Memory, ...],
) -> tuple[jax.Array, tuple[Memory, ...], list[Any]]:
    """Computes hidden states of the next tokens of completions, which are added to the cache, for decoding.

    Layers are separate: a scan inside the decode loop would copy every layer's parameters and cache once per token.

    Args:
      config: The configuration of the decoder.
      variables: The parameters by collection, in the `decoding_layout`.
      ids: W tokens of each completion, int `[N, G·W]`.
      geometry: The positions and masks of the tokens.
      prefix: The cache of the prompts.
      cache: The cache of the completions, by layer.

    Returns:
      Hidden states after the last norm `[N, G·W, D]`, the cache with the tokens, and the `experts.Routing` of each
      layer with experts.
    """
    params, routings = variables["params"], []
    caches: list[Memory] = []
    x = embed(config, params, ids, DATA)
    inputs = layer_inputs(config, params, ids, x, DATA)
    for number, (form, kind) in enumerate(zip(config.forms, layer_kinds(config), strict=True)):
        layer = {name: tree[f"layer_{number}"] for name, tree in variables.items() if f"layer_{number}" in tree}
        layer |= {name: layer_params(config, stacks, number) for name, stacks in inputs.items()}
        source = config.sources[number]
        past = prefix.layers[source], cache[number] if source == number else caches[source]
        x, layer_cache, routing = Block(config, form).apply(layer, x, geometry, kind, past)  # type: ignore[misc]
        caches.append(layer_cache)
        routings += [] if routing is None else [routing]
    return last_states(config, params, x, DATA), tuple(caches), routings


# The values of a layer saved for the backward pass. From them it computes the rest with no product but q·k.
_KEPT = ("projected", "attended", "middle", "gated", "output", "routed")


def unrolls(config: ModelConfig, params: Params) -> bool:
    """Returns whether layers are compiled one by one instead of as a loop.

    With remat "layer" little is saved, so a loop copies little. On a mesh a loop gathers one layer at a time.
    """
    traits = traits_of_backend()
    limit = traits.unrolled_layers if format_of(params) == "none" else traits.unrolled_quantised_layers
    return config.num_hidden_layers <= limit and config.remat == "none" and sharding.mesh_sizes() is None


def rematerialised(block: Callable[..., Any], config: ModelConfig) -> Callable[..., Any]:
    """Wraps the function of a layer so that it saves less for the backward pass: see `ModelConfig.remat`.

    Even with remat "none", norms, rotations and softmax are computed again, which takes less time than storing them.
    Gathered parameters of a layer on a mesh are not saved either.
    """
    saved = _KEPT if config.remat == "none" else ("routed",) if config.experts else ()
    policy = jax.checkpoint_policies.save_only_these_names(*saved) if saved else None
    if config.remat == "offload":
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=["input"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(block, prevent_cse=False, policy=policy)


class Block(nn.Module):
    """x + mixer(norm(x)), then + feed_forward(norm(x)); or norm(mixer(x)), or norm(mixer(norm(x))): see `Norms`."""

    config: ModelConfig
    form: Form

    @nn.compact
    def __call__(self, x, geometry: Geometry, kind: LayerKind, past=None, read=None):
        """Computes x `[N, M, D]` after this layer, its `cache.Memory`, and the `experts.Routing` or None.

        For decoding, `past` holds the cache of the prompts and that of the completions in this layer, or in the layer
        that it reads. In a pass over rows, `read` is the memory of that layer.
        """
        config, rows = self.config, BATCH if past is None else DATA

        def before(name: str, x: jax.Array) -> jax.Array:
            return x if config.norms == "after" else norm(config, name)(x)

        def after(name: str, x: jax.Array) -> jax.Array:
            x = x if config.norms == "before" else norm(config, name)(checkpoint_name(x, "output"))
            return x if config.residual_multiplier == 1 else in_float32(jnp.multiply, x, config.residual_multiplier)

        x = checkpoint_name(spread(x, rows), "input")
        normed = before("input_norm", x)
        mixer = _MIXERS[self.form.mixer](config, self.form.mixer, name=self.form.mixer)
        mixed, memory = mixer(normed, geometry, kind, past, read)
        x = checkpoint_name(spread(x + after("attention_output_norm", mixed), rows), "middle")
        normed = before("post_attention_norm", x)  # norm of the residual stream after attention
        feed_forward = _FEED_FORWARD[self.form.feed_forward]
        mixed, routing = feed_forward(config, x, normed, is_decoding=past is not None)
        x = x + after("mlp_output_norm", mixed)
        if size := config.hidden_size_per_layer_input:
            features = self.get_variable("inputs", "features", jnp.zeros((*x.shape[:2], size), x.dtype))
            x = x + norm(config, "per_layer_norm")(PerLayerInput(config, name="per_layer")(x, features))
        if config.layer_scales:
            scale = self.param("layer_scale", lambda _: {"scale": jnp.ones(1)})["scale"]
            x = x * jax.lax.stop_gradient(scale).astype(x.dtype)
        return spread(x, rows), memory, routing


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    config: ModelConfig
    mixer: Mixer = "attention"

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        geometry: Geometry,
        kind: LayerKind,
        past: tuple[KeyValues, KeyValues] | None = None,
        read: KeyValues | None = None,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Computes attention in the shape of x `[N, M, D]`, and the keys and values of its tokens, or the cache.

        With `past`, the `KeyValues` of prompt and cache, tokens attend to these and are written to the cache. A reader
        attends to `read`, or to what another layer has written to the cache, and has no memory.
        """
        config, is_reader = self.config, self.mixer in READ
        heads, (kv_heads, features, *_, keys_are_values) = config.num_attention_heads, config.heads_of(self.mixer)
        angles, masks, places = geometry.layer_geometry(kind)

        query_features = 2 * features if config.gated_attention else features
        others = [] if is_reader else ["k_proj"] if keys_are_values else ["k_proj", "v_proj"]
        shapes = {"q_proj": (heads, query_features)} | dict.fromkeys(others, (kv_heads, features))
        projected = [spread(y, BATCH, None, TENSOR) for y in linears(self, x, shapes, config.qkv_bias)]
        queries, *written = (checkpoint_name(y, "projected") for y in projected)  # [N, M, heads, E]

        inverses: list[Any] = [None, None]
        if past is not None and config.qk_norm and not is_reader and traits_of_backend().sums_at_once:
            # One kernel computes the norms of queries and keys, which have the same features.
            together = jnp.concatenate([projected[0][..., :features], projected[1]], axis=2)
            inverses = jnp.split(inverse_rms(together, config.rms_norm_eps), [heads], axis=2)

        def rotated(name: str, projected: jax.Array, inverse: jax.Array | None) -> jax.Array:
            if config.qk_norm_across_heads:
                together = projected.reshape(*projected.shape[:2], -1)
                projected = norm(config, f"{name}_norm")(together).reshape(projected.shape)
            elif config.qk_norm:
                projected = norm(config, f"{name}_norm")(projected, inverse)
            return rotate(projected, angles)

        queries, gate = jnp.split(queries, [features], axis=-1)
        queries = rotated("q", queries, inverses[0])
        if not is_reader:
            values = written[-1]
            if config.value_norm:
                values = rms_norm(values, jnp.ones_like(values, jnp.float32, (features,)), config.rms_norm_eps)
            read = KeyValues(rotated("k", written[0], inverses[1]), values)
        queries = queries.reshape(*x.shape[:2], kv_heads, heads // kv_heads, features)
        scale = config.attention_multiplier
        if config.query_pre_attn_scalar is not None:
            scale = config.query_pre_attn_scalar**-0.5
        sinks = self.param("sinks", declared, (heads,)) if config.attention_sinks else None
        softmax = Softmax(scale, config.attn_logit_softcapping, sinks)
        if past is None:
            assert read is not None
            attended, memory = attend_rows(queries, *read, masks, geometry.reaches, config.attention, softmax), read
        else:
            is_fused = fuses_decoding(config.attention) and geometry.layer_sees_all(kind)
            attended, memory = attend_past(
                queries, read, masks, *past, places, softmax, implementation=config.attention if is_fused else None
            )
        attended = spread(attended.reshape(*x.shape[:2], heads, features), BATCH, None, TENSOR)
        attended = attended * in_float32(jax.nn.sigmoid, gate) if config.gated_attention else attended
        out = Linear((config.hidden_size,), config.o_bias, in_axes=2, name="o_proj")
        return out(attended), None if is_reader else memory


def _mlp(
    config: ModelConfig, x: jax.Array, normed: jax.Array, *, is_decoding: bool, name: str = "mlp", factor: int = 1
) -> tuple[jax.Array, None]:
    return MLP(config, factor * config.intermediate_size, name=name)(normed), None


def _delta_net(*args: Any, **kwargs: Any) -> nn.Module:
    from grpo_jax.models.decoder.delta import DeltaNet  # like experts, not loaded for models without them

    return DeltaNet(*args, **kwargs)


def _experts(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
    from grpo_jax.models.decoder.experts import mix_experts

    return mix_experts(*args, **kwargs)


# Kind of mixer -> module (x, geometry, kind of the layer, past, read) -> (mixed x, memory): see `Attention`
_MIXERS: dict[Mixer, Any] = dict.fromkeys(get_args(Mixer), Attention) | {"delta": _delta_net}
# Kind of feed-forward part -> function (config, residual stream, its norm, is_decoding) -> (change, routing)
_FEED_FORWARD: dict[FeedForward, Callable[..., tuple[jax.Array, Any]]] = {
    "mlp": _mlp,
    "wide_mlp": partial(_mlp, name="wide_mlp", factor=2),
    "experts": _experts,
}
