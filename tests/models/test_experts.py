"""Mixtures of experts against plain loops in NumPy."""

import dataclasses
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tiny import random_params, states_of_texts

from experiments.benchmarks import routes
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.decoder.experts import Routing, busiest, gated, grouped_product, load_metrics, mixture, route
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import PromptTokens, rows_of_groups, rows_of_packed_groups
from grpo_jax.optimizer import make_optimizer

TOKENS, EXPERTS, CHOSEN, WIDTH, INNER = 37, 6, 3, 8, 5
# An expert without tokens among them, and one with more rows than a block.
SIZES = {"ragged": [3, 0, 70, 1, 17, 20], "one for all": [0, 0, 0, 111, 0, 0], "empty at ends": [0, 50, 0, 61, 0, 0]}


def randoms(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_grouped_product_uses_each_groups_kernel(sizes):
    rows, kernels = randoms((sum(sizes), WIDTH), (EXPERTS, WIDTH, INNER))
    made = jax.jit(grouped_product)(rows, kernels, jnp.array(sizes))
    np.testing.assert_allclose(made, jax.lax.ragged_dot(rows, kernels, jnp.array(sizes)), rtol=1e-5, atol=1e-6)


def test_gradients_of_the_product_of_groups():
    """Against those that JAX has of `ragged_dot`, and finite differences."""
    sizes = SIZES["empty at ends"]
    rows, kernels, weights = randoms((sum(sizes), WIDTH), (EXPERTS, WIDTH, INNER), (sum(sizes), INNER))

    def value(product, rows, kernels):
        return jnp.sum(weights * jnp.sin(product(rows, kernels, jnp.array(sizes))))

    gradients, expected = (
        jax.jit(jax.grad(partial(value, product), (0, 1)))(rows, kernels)
        for product in (grouped_product, jax.lax.ragged_dot)
    )
    for x, y in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    check_grads(jax.jit(partial(value, grouped_product)), (rows, kernels), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


def mixture_in_a_loop(x, router, kernels, *, normalise):
    """Token by token, expert by expert, in float64."""
    x, router, gate, up, down = (np.asarray(y, np.float64) for y in (x, router, *kernels))
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        scores = row @ router
        probabilities = np.exp(scores) / np.exp(scores).sum()
        chosen = np.argsort(-probabilities)[:CHOSEN]
        total = probabilities[chosen].sum() if normalise else 1.0
        for expert in chosen:
            gated = row @ gate[expert]
            inner = gated / (1 + np.exp(-gated)) * (row @ up[expert])
            out[token] += probabilities[expert] / total * (inner @ down[expert])
    return out


def mixed(x, router, gate, up, down, *, normalise=True):
    routing, weights = route(x, router, num_chosen=CHOSEN, normalise=normalise)
    kernels = {"gate_proj": {"kernel": gate}, "up_proj": {"kernel": up}, "down_proj": {"kernel": down}}
    return mixture(x, routing.experts, weights, kernels)


KERNEL = EXPERTS, WIDTH, INNER
ARRAYS = (TOKENS, WIDTH), (WIDTH, EXPERTS), KERNEL, KERNEL, (EXPERTS, INNER, WIDTH)


@pytest.mark.parametrize("normalise", [True, False])
def test_mixture_equals_a_loop_over_tokens(normalise):
    x, router, *kernels = randoms(*ARRAYS)
    made = jax.jit(partial(mixed, normalise=normalise))(x, router, *kernels)
    np.testing.assert_allclose(made, mixture_in_a_loop(x, router, kernels, normalise=normalise), rtol=1e-5, atol=1e-5)


def test_gradients_of_a_mixture_equal_finite_differences():
    """The router has a gradient too, through the weights."""
    arrays = randoms(*ARRAYS)
    check_grads(jax.jit(mixed), arrays, order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-3)


def test_what_accelerators_compute_is_the_same(monkeypatch):
    """Values and gradients, and programs for TPU and CUDA."""
    arrays = randoms(*ARRAYS)

    def gradients(*arrays):
        return jax.value_and_grad(lambda *arrays: jnp.sum(jnp.sin(mixed(*arrays))), range(5))(*arrays)

    expected = jax.jit(gradients)(*arrays)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    made = jax.jit(lambda *arrays: gradients(*arrays))(*arrays)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), made, expected)
    for platform in ("tpu", "cuda"):
        program = jax.export.export(jax.jit(lambda *arrays: gradients(*arrays)), platforms=[platform])(*arrays)
        assert "ragged_dot" in program.mlir_module()


def test_choosing_is_of_float32_for_bfloat16_tokens():
    x, router = randoms((TOKENS, WIDTH), (WIDTH, EXPERTS), dtype=jnp.bfloat16)
    _, exact = route(x.astype(jnp.float32), router.astype(jnp.float32), num_chosen=CHOSEN, normalise=True)
    np.testing.assert_array_equal(route(x, router, num_chosen=CHOSEN, normalise=True)[1], exact)


def test_bfloat16_mixture_is_close_to_exact():
    x, router, *kernels = randoms(*ARRAYS, dtype=jnp.bfloat16)
    made, expected = jax.jit(mixed)(x, router, *kernels), mixture_in_a_loop(x, router, kernels, normalise=True)
    assert made.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(made, np.float64) - expected) / np.linalg.norm(expected) < 0.01


def test_gates_of_gpt_oss_round_as_in_torch():
    gate = jnp.linspace(-7, 7, 999).astype(jnp.bfloat16)
    inner = (1.702 * gate.astype(jnp.float32)).astype(jnp.bfloat16)
    factor = jax.nn.sigmoid(inner.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gated(gate, jnp.zeros_like(gate), limit=7.0), gate * factor)


# ---- where tokens go


def test_the_load_of_experts_equals_counting():
    rng, layers = np.random.default_rng(0), 3
    experts = np.stack([rng.permuted(np.arange(EXPERTS))[:CHOSEN] for _ in range(2 * 4 * layers)])
    experts = experts.reshape(2, 4, layers, CHOSEN).astype(np.int32)
    entropy, mask = rng.random((2, 4, layers)).astype(np.float32), rng.random((2, 4)) < 0.6
    counts = np.zeros((layers, EXPERTS))
    for place in zip(*np.nonzero(mask), strict=True):
        for layer in range(layers):
            counts[layer, experts[place][layer]] += 1
    made = jax.jit(load_metrics, static_argnums=2)(Routing(experts, entropy), mask, EXPERTS)
    total, weight = made["expert_share"]
    assert weight == mask.sum() == made["router_entropy"][1]
    np.testing.assert_allclose(total, counts / CHOSEN, rtol=1e-6)
    np.testing.assert_allclose(made["router_entropy"][0], entropy[mask].mean(-1).sum(), rtol=1e-6)
    share = counts / counts.sum(-1, keepdims=True)
    np.testing.assert_allclose(busiest(total / weight), share.max(-1).mean(), rtol=1e-6)


MODEL = ModelConfig(
    29, 16, 20, 2, 4, 2, 4, qk_norm=True, initializer_range=0.3, experts=ExpertsConfig(5, 2, 12, norm_topk_prob=True)
)


@pytest.mark.slow
def test_packed_completions_have_the_same_routing():
    """Three completions of a prompt in one row, against the same beside each other; and in their order."""
    policy = decoder_policy(MODEL)
    params, rng = jax.jit(policy.init)(jax.random.key(0)), np.random.default_rng(0)
    prompt = PromptTokens(rng.integers(0, 29, (2, 4)), np.array([[False, True, True, True], [True] * 4]))
    completions, lengths = rng.integers(0, 29, (2, 3, 5)), (2, 5, 3)
    assert policy.num_experts == 5
    states = jax.jit(policy.states)
    hidden, routing = states(params, rows_of_groups(prompt, completions))
    assert routing.experts.shape == (2, 3, 5, 2, 2)
    assert routing.entropy.shape == (2, 3, 5, 2)
    np.testing.assert_allclose(hidden, jax.jit(policy.hidden)(params, prompt, completions), atol=1e-5)
    places = np.concatenate([5 * i + np.arange(length) for i, length in enumerate(lengths)])
    rows = rows_of_packed_groups(prompt, completions, np.broadcast_to(places, (2, 10)))
    of_row = jax.tree.map(lambda x: x[:, 0], states(params, rows)[1])
    expected = [np.concatenate([x[:, i, :length] for i, length in enumerate(lengths)], axis=1) for x in routing]
    np.testing.assert_array_equal(np.sort(of_row.experts), np.sort(expected[0]))
    np.testing.assert_allclose(of_row.entropy, expected[1], atol=1e-5)
    assert len(np.unique(routing.experts)) > 2


def test_a_frozen_router_stays_as_it_is():
    """It stays under weight decay too, and the experts learn."""
    config = dataclasses.replace(MODEL, router="frozen", num_hidden_layers=1)
    policy, params, optimizer = decoder_policy(config), random_params(config), make_optimizer(1e-2, weight_decay=0.1)
    ids, others = np.random.default_rng(0).integers(0, 29, (2, 4)), params["layers"]

    @jax.jit
    def update(mlp):
        def loss(mlp):
            states = states_of_texts(policy, params | {"layers": others | {"experts": mlp}}, ids, np.ones_like(ids))
            return jnp.sum(jnp.sin(states))

        updates, _ = optimizer.update(jax.grad(loss)(mlp), optimizer.init(mlp), mlp)
        return jax.tree.map(jnp.add, mlp, updates)

    before, after = others["experts"], update(others["experts"])
    moved = {name: bool((before[name]["kernel"] != after[name]["kernel"]).any()) for name in before}
    assert moved == {"gate_proj": True, "up_proj": True, "down_proj": True, "router": False}


def test_a_dense_model_has_no_routing():
    assert decoder_policy(ModelConfig(29)).num_experts is None


@pytest.mark.slow
def test_sampler_and_trainer_choose_the_same_experts():
    """In float32, and then ratios to the sampler are 1 within 1e-5: 1,024 tokens of a random model of 4 layers."""
    options = routes.Options(prompts=4, group_size=8, prompt_tokens=8, tokens=32)
    places, tokens, mean, _, largest = routes.compare(routes.MODEL, options)
    assert places == tokens == 0
    assert mean < 1 + 2e-6
    assert largest < 1e-5
