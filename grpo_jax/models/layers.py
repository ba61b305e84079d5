"""Stacks of layers. The parameters of a module are stacked over the layers that have the module.

Most decoders have the same modules in every layer. Others repeat a period of layers, such as three delta nets and one
attention, or begin with a few layers that differ. Layers that repeat are computed by one loop, so that compile time
does not depend on depth.
"""

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, get_args

import jax
import jax.numpy as jnp

from grpo_jax.models.config import FeedForward, Form, Mixer, ModelConfig
from grpo_jax.models.geometry import LayerKind, layer_kinds
from grpo_jax.models.params import Params

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


def layer_params(config: ModelConfig, layers: Params, number: int) -> Params:
    """Returns the parameters of one layer, by module.

    Args:
      config: The configuration of the decoder.
      layers: The stacked parameters of all modules, or of some.
      number: The number of the layer, from 0.
    """
    numbers = {module: layers_with(config, module) for module in layers}
    return {
        module: jax.tree.map(itemgetter(numbers[module].index(number)), tree)
        for module, tree in layers.items()
        if number in numbers[module]
    }


def repetition(forms: tuple[Form, ...]) -> tuple[int, int]:
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
    prefix, period = repetition(forms)
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

    def take_layer(stacks: Params, number: int) -> Params:
        """Returns the parameters of one layer of a period."""
        numbers = {module: [i for i in layers_with(config, module) if i in repeated] for module in stacks}
        return {
            module: tree if len(numbers[module]) == 1 else jax.tree.map(itemgetter(numbers[module].index(number)), tree)
            for module, tree in stacks.items()
            if number in numbers[module]
        }

    def step_period(x: jax.Array, scanned: Any) -> tuple[jax.Array, list[Any]]:
        stacks, period_results = scanned
        results, seen = [], shared
        for number, kind in zip(repeated, period_results, strict=True):
            params = {name: take_layer(layers, number) for name, layers in stacks.items()}
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
