"""Models from elsewhere sample, score and learn what our decoder does with the same weights."""

import dataclasses
from functools import cache, partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal
from own_decoder import Decoder
from tiny import (
    digit_task,
    ragged_prompts,
    random_params,
    refused,
    row_numbers,
    sampler_of,
    says_three,
    slow_unless,
    tiny_config,
)

from experiments.new_models import save_new_model
from grpo_jax.config import recipe, with_options
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.external import function_policy, nnx_policy
from grpo_jax.models.params.lora import add_adapters
from grpo_jax.models.params.quantised import quantise_params
from grpo_jax.models.policy import decoder_policy
from grpo_jax.models.rows.geometry import rows_of_packed_groups
from grpo_jax.models.rows.pieces import choose_piece
from grpo_jax.rl.programs import make_programs
from grpo_jax.runs.folder import RunFolder
from grpo_jax.scoring import score_completion_tokens
from grpo_jax.step import Batch
from grpo_jax.training.phases import train

V = 8
CONFIG = tiny_config(V)
OURS = decoder_policy(CONFIG)
PROMPTS = ragged_prompts([2, 5, 1], 6)
IDS = np.random.default_rng(0).integers(0, V, (3, 2, 4), np.int32)


def init_cache(model, rows, slots):
    return model.init_cache(rows, slots, jnp.float32)


def without_cache(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(tokens, positions, None, jnp.tril(jnp.ones((1, *tokens.shape[1:] * 2), bool)))[0]


def renamed(params):
    """Returns the parameters of our decoder, or their gradients, by the names of `Decoder`."""
    mixer, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    named = {name[0]: mixer[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    named |= {name: mlp[f"{name}_proj"] for name in ("gate", "up", "down")}
    named |= {"before": params["layers"]["input_norm"], "between": params["layers"]["post_attention_norm"]}
    layers = {number: jax.tree.map(lambda x, i=number: x[i], named) for number in range(CONFIG.num_hidden_layers)}
    return {"embed": {"embedding": params["embedding"]}, "norm": params["final_norm"], "layers": layers}


@cache
def model():
    """Returns a `Decoder` with the weights of `random_params`."""
    sizes = CONFIG.hidden_size, CONFIG.intermediate_size, CONFIG.num_hidden_layers
    heads = CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.head_dim
    decoder = Decoder(V, *sizes, *heads, rngs=nnx.Rngs(0))
    nnx.update(decoder, renamed(random_params(CONFIG)))
    return decoder


KINDS = {
    "logits": partial(nnx_policy, cache=init_cache),
    "states": partial(
        nnx_policy, call=Decoder.hidden, cache=init_cache, unembedding=lambda model: model.embed.embedding[...]
    ),
    "no_cache": partial(nnx_policy, call=without_cache),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def mean_of(policy, rows, params):
    """Returns a function of log-probabilities and entropies with a gradient, and the log-probabilities."""
    batch = Batch(PROMPTS, IDS, None, np.full((3, 2), 0.7, np.float32), layout=rows)
    scores = score_completion_tokens(policy, params, batch)
    return jnp.mean(jnp.sin(scores.logprobs) + scores.entropy), scores


@cache
def expected():
    (_, scores), gradient = jax.jit(jax.value_and_grad(partial(mean_of, OURS, None), has_aux=True))(
        random_params(CONFIG)
    )
    return scores, renamed(gradient)


@kinds
def test_scores_and_gradients_are_those_of_our_decoder(kind):
    policy, params = KINDS[kind](model())
    (_, scores), gradient = jax.jit(jax.value_and_grad(partial(mean_of, policy, None), has_aux=True))(params)
    jax.tree.map(partial(assert_allclose, atol=1e-5), (scores, gradient), expected())


@pytest.mark.parametrize("kind", ["logits", "states"])
def test_packed_completions_do_not_see_each_other(kind):
    places = np.array([[0, 1, 4, 5, 6], [4, 5, 6, 7, 8], [0, 1, 2, 3, 4]], np.int32)  # 8: padding
    rows = rows_of_packed_groups(jax.tree.map(jnp.asarray, PROMPTS), jnp.asarray(IDS), jnp.asarray(places))
    policy, params = KINDS[kind](model())
    value_and_grad = jax.value_and_grad(lambda policy, params: mean_of(policy, rows, params), argnums=1, has_aux=True)
    compute = jax.jit(value_and_grad, static_argnums=0)
    (_, scores), gradient = compute(policy, params)
    (_, ours), our_gradient = compute(OURS, random_params(CONFIG))
    jax.tree.map(partial(assert_allclose, atol=1e-5), (scores, gradient), (ours, renamed(our_gradient)))


@kinds
@pytest.mark.parametrize("leave", [False, True], ids=["all", "ended ones leave"])
def test_sampled_tokens_are_those_of_our_decoder(kind, leave, assume):
    """With the same noise. The second kind continues with only the completions that have not ended."""
    options = {"max_tokens": 24, "eos_ids": (7,)}
    if leave:
        assume(narrows_from=1, is_bound_by_memory=False)
    policy, params = KINDS[kind](model())
    inputs = PROMPTS, row_numbers(3, 16), jax.random.key(1), 1.2
    samples = [
        sampler_of(policy if leave else policy._replace(select=None), **options)(params, *inputs)
        for policy, params in [(policy, params), (OURS, random_params(CONFIG))]
    ]
    assert 0 < np.mean(samples[0].truncated) < 0.3
    assert_array_equal(samples[0].completion_ids, samples[1].completion_ids)
    assert_allclose(samples[0].sampler_logprobs, samples[1].sampler_logprobs, atol=1e-5)


# ---- training

RUN = recipe("grpo", steps=4, num_prompts=8, group_size=4, max_tokens=6, kl_coef=0.1, learning_rate=1e-2)
RUN = with_options(RUN, minibatches=2, piece_tokens=20, checkpoint_every=2)
TASK = digit_task(says_three)


def trained(folder, policy, params, config=RUN, **options):
    """Trains, or continues to, and returns the parameters and the run."""
    run = RunFolder(folder, dataclasses.asdict(config))
    programs = make_programs(policy, TASK, config)
    return train({"policy": params}, TASK, config, run, programs, phase="grpo", **options).params["policy"], run


@pytest.fixture(scope="module")
def our_run(tmp_path_factory):
    """Trains our decoder, and returns the parameters and the rewards of the steps."""
    assert choose_piece(4, 3, 4, 6, piece_tokens=20).is_packed
    params, run = trained(tmp_path_factory.mktemp("ours"), OURS, random_params(CONFIG))
    return renamed(params), [line["reward"] for line in run.lines()]


MESH = {"devices": 4, "parallel": "mesh", "fsdp": 2}
RUNS = slow_unless([("logits", ()), ("no_cache", ())], [(k, d) for k in KINDS for d in [(), {"devices": 2}, MESH]])


@pytest.mark.parametrize(("kind", "devices"), RUNS)
def test_training_is_that_of_our_decoder_and_resumes(kind, devices, tmp_path, our_run):
    """Our decoder packs completions, and a model without a cache cannot."""
    (policy, params), config = KINDS[kind](model()), with_options(RUN, **dict(devices))
    trained(tmp_path, policy, params, config, until=2)
    end, run = trained(tmp_path, policy, params, config)
    assert [line["reward"] for line in run.lines()] == our_run[1]
    jax.tree.map(partial(assert_allclose, atol=1e-4), end, our_run[0])
    warnings = tmp_path / "warnings.jsonl"
    assert (warnings.exists() and "without a cache" in warnings.read_text()) == (kind == "no_cache")


def test_the_program_of_the_page_changes_the_module(tmp_path):
    decoder, page = nnx.clone(model()), (Path(__file__).parents[2] / "docs/own_model.md").read_text()
    names = {"jnp": jnp, "nnx": nnx, "nnx_policy": nnx_policy, "make_programs": make_programs, "train": train}
    names |= {"model": decoder, "task": TASK, "config": RUN, "run": RunFolder(tmp_path, dataclasses.asdict(RUN))}
    exec(page.split("```python\n")[1].split("```")[0], names)
    end = names["state"].params["policy"]["embed"]["embedding"]
    assert_array_equal(decoder.embed.embedding[...], end)
    assert np.abs(end - model().embed.embedding[...]).max() > 1e-3


def test_later_steps_call_no_module(tmp_path, caplog):
    calls = []

    def counted(module, *inputs):
        calls.append(len(run.lines()))
        return module(*inputs)

    policy, params = nnx_policy(model(), counted, cache=init_cache)
    run = RunFolder(tmp_path, dataclasses.asdict(RUN))
    programs = make_programs(policy, TASK, RUN)
    train({"policy": params}, TASK, RUN, run, programs, phase="grpo")
    assert set(calls) == {0}
    compiled = programs.sampler.program, programs.score_program, programs.learn
    assert [program._cache_size() for program in compiled] == [1, 1, 1]


def test_linen_modules_and_functions(tmp_path):
    class Average(nn.Module):
        """Predicts a token from the mean of all tokens before it."""

        @nn.compact
        def __call__(self, tokens):
            count = jnp.arange(1, tokens.shape[1] + 1)[:, None]
            return nn.Dense(V)(nn.tanh(jnp.cumsum(nn.Embed(V, 8)(tokens), axis=1) / count))

    linen = Average()
    params = linen.init(jax.random.key(0), IDS[0])
    policy = function_policy(linen.apply)
    out = sampler_of(policy, max_tokens=4, eos_ids=(7,))(params, PROMPTS, row_numbers(3, 2), jax.random.key(0))
    for number, row in np.ndindex(3, 2):
        prompt, ids = PROMPTS.ids[number][PROMPTS.mask[number]], out.completion_ids[number, row]
        logits = linen.apply(params, np.concatenate([prompt, ids])[None])[0, len(prompt) - 1 : -1]
        expected = np.where(out.completion_mask[number, row], jax.nn.log_softmax(logits)[np.arange(4), ids], 0)
        assert_allclose(out.sampler_logprobs[number, row], expected, atol=1e-5)
    trained(tmp_path, policy, params, until=1)


# ---- what these models lack


def test_what_these_models_lack_is_refused():
    policy, params = nnx_policy(model(), cache=init_cache)
    with refused("decoder of this package"):
        add_adapters(params, jax.random.key(0), rank=1, alpha=1.0)
    with refused("decoder of this package"):
        quantise_params(params, "int8")
    with refused("decoder of this package"):
        save_new_model("nowhere", params, CONFIG)
    with refused("pass unembedding"):
        make_programs(policy, TASK, with_options(RUN, divergence="reverse"))
    with refused("leave out the environment"):
        make_programs(policy, TASK._replace(environment=object()), with_options(RUN, max_turns=2, environment_tokens=4))
    rows = rows_of_packed_groups(PROMPTS, IDS, np.zeros((3, 4), np.int32))
    with refused("pass cache"):
        nnx_policy(model(), without_cache)[0].states(params, rows)


# ---- Tunix


def test_qwen3_of_tunix_is_our_decoder():
    """With both calls of docs/own_model.md."""
    tunix = pytest.importorskip("tunix.models.qwen3.model", reason="needs google-tunix")
    sizes = {"vocab_size": V, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "norm_eps": 1e-6}
    sizes |= {"embed_dim": 16, "hidden_dim": 32, "rope_theta": 1_000_000, "use_tied_embedding": True}
    config = ModelConfig(V, 16, 32, 2, 4, 2, 8, rope_theta=1e6, qk_norm=True)
    ours, our_params = decoder_policy(config), random_params(config)

    def tunix_names(params):
        mixer, mlp = params["layers"]["attention"], params["layers"]["mlp"]
        layers = {"attn": {name: {"w": leaf} for name, x in mixer.items() for leaf in x.values()}, "mlp": mlp}
        for name in ("input", "post_attention"):
            layers[f"{name}_layernorm"] = {"w": params["layers"][f"{name}_norm"]["scale"]}
        layers = {number: jax.tree.map(lambda x, i=number: x[i], layers) for number in range(2)}
        ends = {
            "embedder": {"input_embedding": params["embedding"]},
            "final_norm": {"w": params["final_norm"]["scale"]},
        }
        return ends | {"layers": layers}

    qwen = tunix.Qwen3(tunix.ModelConfig(**sizes), rngs=nnx.Rngs(0))
    nnx.update(qwen, tunix_names(our_params))
    page = (Path(__file__).parents[2] / "docs/own_model.md").read_text()
    names = {"jnp": jnp, "nnx": nnx, "nnx_policy": nnx_policy, "model": qwen}
    exec(page.split("```python\n")[2].split("```")[0], names)
    inputs = PROMPTS, row_numbers(3, 8), jax.random.key(0)
    expected = sampler_of(ours, max_tokens=12, eos_ids=(7,))(our_params, *inputs)
    value_and_grad = jax.value_and_grad(lambda policy, params: mean_of(policy, None, params), argnums=1, has_aux=True)
    compute = jax.jit(value_and_grad, static_argnums=0)
    (_, scores), gradient = compute(ours, our_params)
    for policy, params in [nnx_policy(qwen, cache=init_cache), (names["policy"], names["params"])]:
        samples = sampler_of(policy, max_tokens=12, eos_ids=(7,))(params, *inputs)
        assert_array_equal(samples.completion_ids, expected.completion_ids)
        (_, tunix_scores), tunix_gradient = compute(policy, params)
        pair = (tunix_scores, tunix_gradient), (scores, tunix_names(gradient))
        jax.tree.map(partial(assert_allclose, atol=1e-5), *pair)
