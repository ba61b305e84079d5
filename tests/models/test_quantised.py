"""Kernels in 8 and 4 bits: numbers by hand, what a model computes with them, adapters on them, and their folder."""

from functools import cache, partial
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny import GOLDEN, load_golden, random_params, randomly_adapted, refused, two_groups

from experiments.new_models import save_new_model
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.files.peft import load_adapter, save_adapter
from grpo_jax.models.files.weights import load_params
from grpo_jax.models.params import quantised
from grpo_jax.models.params.lora import add_adapters, merge, sites
from grpo_jax.models.params.quantised import quantise, quantise_params
from grpo_jax.models.params.tree import is_quantised, join, split
from grpo_jax.models.policy import decoder_policy
from grpo_jax.step import init_state

CONFIG, BASE = load_golden("llama")
POLICY = decoder_policy(CONFIG)
# One program in place of one for each operation.
dequantised = jax.jit(quantised.dequantised, static_argnums=1)
dequantise_params = jax.jit(quantised.dequantise_params)
FORMATS = pytest.mark.parametrize("kind", ["int8", "nf4"])
# Of whole models, which see formats through `dequantised` alone.
QUICK_FORMATS = pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])


def there_and_back(matrix, kind):
    """A matrix [I, O] through the codes."""
    matrix = np.asarray(matrix, np.float32)
    return quantise(matrix, matrix.shape[:1], matrix.shape[1:], kind)


# ---- the two formats


def test_int8_by_hand():
    # First output: the largest is 254, so a step is 254 / 127 = 2. 3 is halfway between 1 and 2 steps: to the even one.
    # Second: the largest is 63.5, a step is 0.5. Third: zeros.
    of = there_and_back([[254, 63.5, 0], [-3, -0.2, 0], [101, 0.6, 0]], "int8")
    np.testing.assert_array_equal(of.codes, [[127, 127, 0], [-2, 0, 0], [50, 1, 0]])
    np.testing.assert_array_equal(of.scales, [[2, 0.5, 0]])
    np.testing.assert_array_equal(dequantised(of, jnp.float32), [[254, 63.5, 0], [-4, 0, 0], [100, 0.5, 0]])


def test_nf4_by_hand():
    # Shares of the largest, 4: -1 is code 0, 0 is 7, 1 is 15. 0.04 is above the middle of 0 and 0.0796, 0.0398: code 8.
    # 0.6 is nearer to 0.5626 (13) than to 0.7230; -0.14 is just below the middle of -0.1848 and -0.0911, -0.1379: 5.
    of = there_and_back(np.array([[-4], [0], [0.16], [2.4], [-0.56]]), "nf4")
    # Two inputs in a byte, the first in the high half; behind the last is 0, code 7.
    np.testing.assert_array_equal(of.codes, [[0 * 16 + 7], [8 * 16 + 13], [5 * 16 + 7]])
    np.testing.assert_array_equal(of.scales.astype(jnp.float32), [[4]])
    expected = 4 * np.array([[-1], [0], [0.07958029955625534], [0.5626170039176941], [-0.18477343022823334]])
    np.testing.assert_allclose(dequantised(of, jnp.float32), expected, rtol=1e-7)


def test_64_inputs_of_an_output_share_their_largest():
    matrix = np.ones((130, 2), np.float32)
    matrix[64:128, 1] = 3  # of the second output, the second block
    matrix[128:] = 5
    of = there_and_back(matrix, "nf4")
    assert of.codes.shape == (65, 2)
    np.testing.assert_array_equal(of.scales.astype(jnp.float32), [[1, 1], [1, 3], [5, 5]])
    np.testing.assert_array_equal(dequantised(of, jnp.float32), matrix)


def test_a_table_has_the_quantiles_of_the_paper():
    """2305.14314, section 3: eight quantiles of each side of a normal distribution, one of which both share, as 0."""
    share = (1 - 1 / 30 + 1 - 1 / 32) / 2  # offset of the outermost quantile, as in bitsandbytes: 0.9677083
    above = [NormalDist().inv_cdf(p) for p in np.linspace(share, 0.5, 9)[:-1]]
    below = [-NormalDist().inv_cdf(p) for p in np.linspace(share, 0.5, 8)[:-1]]
    table = np.sort([*above, 0, *below]) / max(above)
    # A largest weight of 1, and each number of the table as a weight.
    matrix = np.concatenate([table, np.ones(48)])[:, None]
    np.testing.assert_allclose(dequantised(there_and_back(matrix, "nf4"), jnp.float32), matrix, atol=2e-6)


@FORMATS
@pytest.mark.parametrize("inputs", [64, 7])
def test_every_weight_is_within_half_a_step(kind, inputs):
    matrix = np.random.default_rng(0).normal(size=(inputs, 33)).astype(np.float32)
    error = np.abs(dequantised(there_and_back(matrix, kind), jnp.float32) - matrix)
    largest = np.abs(matrix).max(axis=0)
    # nf4: the widest gap is from -1 to -0.696, and the largest is rounded to 8 bits.
    bound = largest / 254 if kind == "int8" else largest * ((1 - 0.6961928) / 2 + 2**-8)
    assert np.all(error <= bound * (1 + 1e-5))


@FORMATS
def test_what_is_quantised_already_stays(kind):
    matrix = np.random.default_rng(0).normal(size=(70, 3)).astype(np.float32)
    once = dequantised(there_and_back(matrix, kind), jnp.float32)
    twice = there_and_back(once, kind)
    np.testing.assert_allclose(dequantised(twice, jnp.float32), once, rtol=1e-6)


# ---- in a model


@cache
def adapted(kind):
    return randomly_adapted(quantise_params(BASE, kind), rank=3, alpha=6.0)


def on_plain_numbers(params):
    """The same, with plain arrays."""
    return params._replace(base=dequantise_params(params.base))


@QUICK_FORMATS
def test_models_compute_with_the_dequantised_numbers(kind):
    """Compares hidden states, and the gradients of adapters, with those on plain arrays."""
    weights = np.random.default_rng(1).normal(size=(2, 2, 4, 16)).astype(np.float32)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(trained, frozen):
        hidden = POLICY.hidden(join(trained, frozen), *two_groups())
        return jnp.sum(weights * hidden), hidden

    params, exact = adapted(kind), adapted(kind)._replace(base=BASE)
    ((_, hidden), gradient), ((_, expected), plain) = (loss(*split(x)) for x in (params, on_plain_numbers(params)))
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradient, plain)
    assert np.abs(hidden - loss(*split(exact))[0][1]).max() > 1e-3


def test_new_adapters_are_those_of_the_plain_base():
    of_both = [add_adapters(of, jax.random.key(0), rank=3, alpha=6.0).adapters for of in (BASE, adapted("nf4").base)]
    jax.tree.map(np.testing.assert_array_equal, *of_both)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [None, ExpertsConfig(8, 2, 64, norm_topk_prob=True)], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_programs_dequantise_one_layer_at_a_time(kind, experts):
    config = ModelConfig(64, 128, 512, 4, 4, 4, 32, experts=experts)
    policy = decoder_policy(config)
    of_a_layer = 4 * (4 * 128 * 128 + 3 * 128 * 512)  # bytes in float32, of the experts together too
    base = jax.eval_shape(lambda key: quantise_params(policy.init(key), kind), jax.random.key(0))
    params = jax.eval_shape(partial(add_adapters, rank=2, alpha=1.0), base, jax.random.key(0))

    def loss(trained, frozen):
        return jnp.sum(policy.hidden(join(trained, frozen), *two_groups()) ** 2)

    def sample(params):
        first, decode, cache = policy.prefill(params, two_groups()[0], 2, 8)

        def step(i, carry):
            return decode(carry[1], jnp.argmax(carry[0], -1), i)

        return jax.lax.fori_loop(0, 7, step, (jnp.repeat(first[:, None], 2, axis=1), cache))[0]

    learned, sampled = (
        program.compile().memory_analysis().temp_size_in_bytes
        for program in (jax.jit(jax.grad(loss)).lower(*split(params)), jax.jit(sample).lower(params))
    )
    codes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(base["layers"]))  # copied, by layer
    print(kind, learned / of_a_layer, (sampled - codes) / of_a_layer)
    assert learned < 2.5 * of_a_layer  # 1.1 of them are activations
    assert sampled - codes < 2 * of_a_layer


# ---- experts

MIXTURE = ModelConfig(24, 16, 20, 2, 2, 1, 8, experts=ExpertsConfig(4, 2, 10, norm_topk_prob=True))


def test_experts_are_quantised_separately_and_routers_never():
    params = random_params(MIXTURE)
    of = quantise_params(params, "nf4")["layers"]["experts"]
    plain = params["layers"]["experts"]
    np.testing.assert_array_equal(of["router"]["kernel"], plain["router"]["kernel"])
    assert of["down_proj"]["kernel"].codes.shape == (2, 4, 5, 16)  # two of 10 inputs in a byte
    for layer, expert in np.ndindex(2, 4):
        expected = there_and_back(plain["down_proj"]["kernel"][layer, expert], "nf4")
        of_expert = jax.tree.map(lambda x: x[layer, expert], of["down_proj"]["kernel"])  # noqa: B023, called here
        jax.tree.map(np.testing.assert_array_equal, of_expert, expected)


# ---- what is refused


def test_what_frozen_bits_cannot_be(tmp_path):
    params = adapted("int8")
    with refused("quantised: they are frozen, so train adapters"):
        init_state(params.base, None)
    with refused("quantised already"):
        quantise_params(params.base, "nf4")
    with refused(r"merge adapters into the original ones, as params._replace"):
        merge(params)
    with refused("quantised: save the original ones"):
        save_new_model(tmp_path / "out", params.base, CONFIG)


# ---- folders


@FORMATS
def test_a_folder_is_quantised_as_its_parameters_are(kind):
    loaded = load_params(GOLDEN / "llama", CONFIG, dtype="bfloat16", quantize=kind)
    in_memory = quantise_params(load_params(GOLDEN / "llama", CONFIG, dtype="bfloat16"), kind)
    assert jax.tree.structure(loaded) == jax.tree.structure(in_memory)
    jax.tree.map(np.testing.assert_array_equal, loaded, in_memory)


@FORMATS
def test_a_folder_is_quantised_onto_a_mesh(kind):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("layer", "output"))

    def cut(shapes):
        spec = NamedSharding(mesh, PartitionSpec())
        of_codes = NamedSharding(mesh, PartitionSpec("layer", None, "output"))
        return jax.tree.map(
            lambda x: jax.tree.map(lambda _: of_codes, x) if is_quantised(x) else spec, shapes, is_leaf=is_quantised
        )

    loaded = load_params(GOLDEN / "llama", CONFIG, quantize=kind, sharding=cut)
    jax.tree.map(np.testing.assert_array_equal, loaded, load_params(GOLDEN / "llama", CONFIG, quantize=kind))
    kernel = loaded["layers"]["mlp"]["gate_proj"]["kernel"]  # [2, 16, 20]
    assert {x.data.shape for x in kernel.codes.addressable_shards} == {(1, 8 if kind == "nf4" else 16, 5)}


@FORMATS
def test_adapters_go_onto_the_original_base(kind, tmp_path):
    """And merged into it, they are as far from what was trained as the base is from its codes."""
    params = adapted(kind)
    folder = save_adapter(tmp_path / "adapter", CONFIG, params, base="original")
    back = load_adapter(folder, CONFIG, BASE)
    jax.tree.map(np.testing.assert_array_equal, back.adapters, params.adapters)
    as_trained, merged = merge(on_plain_numbers(params)), merge(back)
    for block, name in sites(BASE["layers"]):
        one, other, plain, codes = (
            np.asarray(tree["layers"][block][name]["kernel"])
            for tree in (as_trained, merged, BASE, dequantise_params(params.base))
        )
        np.testing.assert_allclose(other - one, plain - codes, atol=1e-6)
        error = np.linalg.norm(plain - codes) / np.linalg.norm(plain)
        assert error < (0.01 if kind == "int8" else 0.1)
