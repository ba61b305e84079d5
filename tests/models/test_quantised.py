"""Kernels in 8 and 4 bits: numbers by hand, what a model computes with them, adapters on them, and their folder."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from grpo_jax.errors import UsageError
from grpo_jax.models import quantised
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.families import config_to_huggingface
from grpo_jax.models.huggingface import save_pretrained
from grpo_jax.models.lora import add_adapters, merge, sites
from grpo_jax.models.params import is_quantised
from grpo_jax.models.peft import load_adapter, save_adapter
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.quantised import quantise, quantise_params
from grpo_jax.models.trainable import join, split
from grpo_jax.models.weights import Tensor, load_params, tensor_layout
from grpo_jax.rl.optimizer import init_state

GOLDEN = Path(__file__).parents[1] / "golden/llama"
CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    head_dim=4,
    rope_theta=100.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
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


@FORMATS
def test_errors_of_normal_weights(kind):
    """A step of int8 has an error of step / √12. That of nf4 has no formula: qwix 0.1.8 has 0.092."""
    matrix = np.random.default_rng(0).normal(size=(1024, 256)).astype(np.float32)
    of = there_and_back(matrix, kind)
    error = np.sqrt(np.mean(np.square(dequantised(of, jnp.float32) - matrix)))
    expected = np.sqrt(np.mean(np.square(of.scales)) / 12) if kind == "int8" else 0.092
    assert error == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@FORMATS
def test_compiled_or_not(kind):
    matrix = np.random.default_rng(0).normal(size=(70, 5)).astype(np.float32)
    with jax.disable_jit():
        one_by_one = there_and_back(matrix, kind)
    jax.tree.map(np.testing.assert_array_equal, one_by_one, there_and_back(matrix, kind))
    compiled = jax.jit(partial(quantised.dequantised, dtype=jnp.float32))(one_by_one)
    np.testing.assert_array_equal(quantised.dequantised(one_by_one, jnp.float32), compiled)


# ---- in a model


@cache
def base():
    return load_params(GOLDEN, CONFIG)


@cache
def adapted(kind):
    """All seven projections adapted, by random matrices."""
    new = add_adapters(quantise_params(base(), kind), jax.random.key(0), rank=3, alpha=6.0)
    rng = np.random.default_rng(0)
    return new._replace(
        adapters=jax.tree.map(lambda x: rng.normal(scale=0.3, size=x.shape).astype(np.float32), new.adapters)
    )


def on_plain_numbers(params):
    """The same, with plain arrays."""
    return params._replace(base=dequantise_params(params.base))


def ragged_batch():
    """Prompts of 2 and 5 tokens, and two completions of 4 for each."""
    rng = np.random.default_rng(0)
    mask = np.arange(5) >= np.array([[3], [0]])
    return rng.integers(0, 24, (2, 5), np.int32) * mask, mask, rng.integers(0, 24, (2, 2, 4), np.int32)


def hidden_states(params):
    return POLICY.hidden(params, *ragged_batch())


hidden = jax.jit(hidden_states)


@jax.jit
def decoded(params):
    """The same token by token."""
    ids, mask, completions = ragged_batch()
    first, decode, cache = POLICY.prefill(params, ids, mask, 2, 4)

    def step(cache, token):
        state, cache = decode(cache, *token)
        return cache, state

    _, states = jax.lax.scan(step, cache, (completions.transpose(2, 0, 1)[:3], jnp.arange(3)))
    return jnp.concatenate([jnp.broadcast_to(first[:, None], (1, *states.shape[1:])), states]).transpose(1, 2, 0, 3)


@pytest.mark.slow
@QUICK_FORMATS
def test_a_model_computes_with_the_numbers_that_codes_stand_for(kind):
    quantised = hidden(adapted(kind))
    np.testing.assert_allclose(quantised, hidden(on_plain_numbers(adapted(kind))), atol=1e-5)
    assert np.abs(quantised - hidden(adapted(kind)._replace(base=base()))).max() > 1e-3


@pytest.mark.slow
@QUICK_FORMATS
def test_decoding_computes_with_the_same_numbers(kind):
    np.testing.assert_allclose(decoded(adapted(kind)), hidden(adapted(kind)), atol=1e-5)


@QUICK_FORMATS
def test_gradients_of_adapters_against_finite_differences(kind):
    trained, frozen = split(adapted(kind))
    ids, mask, completions = ragged_batch()
    weights = np.random.default_rng(1).normal(size=(2, 1, 1, 16)).astype(np.float32)

    @jax.jit
    def loss(trained):
        return jnp.sum(weights * POLICY.hidden(join(trained, frozen), ids, mask, completions[..., :1]))

    gradient = jax.jit(jax.grad(loss))(trained)
    rng = np.random.default_rng(2)
    for _ in range(3):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), trained)
        there, back = (jax.tree.map(lambda x, d, s=s: x + s * 1e-3 * d, trained, direction) for s in (1, -1))
        along = sum(float(jnp.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
        assert (loss(there) - loss(back)) / 2e-3 == pytest.approx(along, rel=0.01)
    plain = jax.jit(jax.grad(lambda trained: loss_of(on_plain_numbers(join(trained, frozen)), weights)))(trained)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), gradient, plain)


def loss_of(params, weights):
    ids, mask, completions = ragged_batch()
    return jnp.sum(weights * POLICY.hidden(params, ids, mask, completions[..., :1]))


def test_new_adapters_are_those_of_the_plain_base():
    of_both = [add_adapters(of, jax.random.key(0), rank=3, alpha=6.0).adapters for of in (base(), adapted("nf4").base)]
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
        return jnp.sum(policy.hidden(join(trained, frozen), *ragged_batch()) ** 2)

    def sample(params):
        first, decode, cache = policy.prefill(params, *ragged_batch()[:2], 2, 8)

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
TOKENS = np.random.default_rng(3).integers(0, 24, (1, 6), np.int32)


def test_experts_are_quantised_one_by_one_and_routers_are_not():
    policy = decoder_policy(replace(MIXTURE, initializer_range=0.3))
    params = policy.init(jax.random.key(0))
    of = quantise_params(params, "nf4")["layers"]["mlp"]
    plain = params["layers"]["mlp"]
    np.testing.assert_array_equal(of["router"]["kernel"], plain["router"]["kernel"])
    assert of["down_proj"]["kernel"].codes.shape == (2, 4, 5, 16)  # two of 10 inputs in a byte
    for layer, expert in np.ndindex(2, 4):
        own = there_and_back(plain["down_proj"]["kernel"][layer, expert], "nf4")
        found = jax.tree.map(lambda x: x[layer, expert], of["down_proj"]["kernel"])  # noqa: B023, called here
        jax.tree.map(np.testing.assert_array_equal, found, own)


@pytest.mark.slow
def test_a_mixture_computes_with_the_numbers_that_codes_stand_for():
    policy = decoder_policy(replace(MIXTURE, initializer_range=0.3))
    codes = quantise_params(policy.init(jax.random.key(0)), "nf4")
    numbers = dequantise_params(codes)

    @jax.jit
    def by_pass(params):
        return policy.hidden(params, TOKENS[:, :2], np.ones((1, 2), bool), TOKENS[:, None, 2:])[0, 0]

    @jax.jit
    def by_token(params):
        first, decode, cache = policy.prefill(params, TOKENS[:, :2], np.ones((1, 2), bool), 1, 4)

        def step(cache, token):
            state, cache = decode(cache, *token)
            return cache, state[:, 0]

        return jnp.concatenate([first, jax.lax.scan(step, cache, (TOKENS[:, 2:5].T[:, None], jnp.arange(3)))[1][:, 0]])

    np.testing.assert_array_equal(by_pass(codes), by_pass(numbers))
    np.testing.assert_allclose(by_token(codes), by_pass(numbers), atol=1e-5)


# ---- what is refused


def test_what_frozen_bits_cannot_be(tmp_path):
    params = adapted("int8")
    with pytest.raises(UsageError, match="quantised parameters are frozen: train adapters"):
        init_state(params.base, None)
    with pytest.raises(UsageError, match="quantised already"):
        quantise_params(params.base, "nf4")
    with pytest.raises(UsageError, match=r"merge them into the original one, as params._replace"):
        merge(params)
    with pytest.raises(UsageError, match="quantised: save the original ones"):
        save_pretrained(tmp_path / "out", params.base, CONFIG)


# ---- folders


@FORMATS
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_folder_is_quantised_as_its_parameters_are(kind, dtype):
    loaded = load_params(GOLDEN, CONFIG, dtype=dtype, quantize=kind)
    in_memory = quantise_params(load_params(GOLDEN, CONFIG, dtype=dtype), kind)
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

    loaded = load_params(GOLDEN, CONFIG, quantize=kind, sharding=cut)
    jax.tree.map(np.testing.assert_array_equal, loaded, load_params(GOLDEN, CONFIG, quantize=kind))
    kernel = loaded["layers"]["mlp"]["gate_proj"]["kernel"]  # [2, 16, 20]
    assert {x.data.shape for x in kernel.codes.addressable_shards} == {(1, 8 if kind == "nf4" else 16, 5)}


@FORMATS
def test_adapters_go_onto_the_original_base(kind, tmp_path):
    """And merged into it, they are as far from what was trained as the base is from its codes."""
    params = adapted(kind)
    folder = save_adapter(tmp_path / "adapter", params, base="original")
    back = load_adapter(folder, base())
    jax.tree.map(np.testing.assert_array_equal, back.adapters, params.adapters)
    as_trained, merged = merge(on_plain_numbers(params)), merge(back)
    for block, name in sites():
        one, other, plain, codes = (
            np.asarray(tree["layers"][block][name]["kernel"])
            for tree in (as_trained, merged, base(), dequantise_params(params.base))
        )
        np.testing.assert_allclose(other - one, plain - codes, atol=1e-6)
        error = np.linalg.norm(plain - codes) / np.linalg.norm(plain)
        assert error < (0.01 if kind == "int8" else 0.1)


MEASURE = """
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from grpo_jax.models.families import config_from_huggingface
from grpo_jax.models.weights import load_params, read_json

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))

folder, kind = Path(sys.argv[1]), sys.argv[2]
jnp.zeros(3).block_until_ready()
before = memory("VmRSS")
params = load_params(folder, config_from_huggingface(read_json(folder / "config.json")), quantize=kind)
print(memory("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("experts", [None, ExpertsConfig(8, 2, 352, norm_topk_prob=True)], ids=["dense", "experts"])
def test_loading_peaks_near_the_quantised_size(experts, tmp_path):
    sizes = 8000, 1024, 2816, 48, 16, 16, 64
    config = ModelConfig(*sizes, tie_word_embeddings=False, qk_norm=experts is not None, experts=experts)
    rng, weights = np.random.default_rng(0), 0
    weight_map: dict[str, str] = {}
    layout = tensor_layout(config)
    tensors = jax.tree.leaves(layout, is_leaf=lambda x: isinstance(x, Tensor))
    for layer in range(config.num_hidden_layers):
        of_layer = {
            x.name.format(layer, expert): x.shape
            for x in tensors
            if x.stacked or layer == 0
            for expert in range(experts.num_experts if experts and x.stacked == 2 else 1)
        }
        drawn = {name: (0.02 * rng.standard_normal(x, np.float32)).astype(jnp.bfloat16) for name, x in of_layer.items()}
        save_file(drawn, tmp_path / f"{layer}.safetensors")
        weight_map |= dict.fromkeys(drawn, f"{layer}.safetensors")
        weights += sum(x.nbytes for x in drawn.values())
    assert weights > 1e9
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for kind in ("int8", "nf4"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), kind]
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        peak, size = map(int, output.split())
        print(kind, peak / size)
        assert peak < 1.3 * size
