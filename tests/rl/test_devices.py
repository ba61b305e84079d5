"""A mesh of eight virtual devices against one device: the same numbers, and no device that holds a whole model."""

import dataclasses
import math
import re
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, V
from rl_helpers import assert_same_runs, compilations_of, open_run, recorder, says_three
from tiny import GOLDEN, load_golden, refused

from grpo_jax.config import GRPOConfig, PPOConfig, recipe, run_of, with_options
from grpo_jax.data.types import Prompts, pad_prompts, rng
from grpo_jax.devices import (
    Devices,
    Mesh,
    devices_of,
    load_shardings,
    parts,
    place,
    shardings,
    to_devices,
    to_numpy,
)
from grpo_jax.functional.presets import PRESETS
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.lora import add_adapters
from grpo_jax.models.params import join, split
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.quantised import quantise_params
from grpo_jax.models.weights import load_params
from grpo_jax.rl import pieces
from grpo_jax.rl.grpo import grpo_method, make_programs
from grpo_jax.rl.iteration import compile_programs
from grpo_jax.rl.ppo import add_critic, critic_policy, ppo_method
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import REWARD_AXES, Batch, Method, RewardArrays, noise_of
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.tasks.task import Task
from grpo_jax.train import train

N, G, P, T = 16, 5, 3, 5
EOS, PAD = 0, 1
# Eight key-value heads, so that eight devices can share them out.
MODEL = ModelConfig(64, 16, 32, 2, 8, 8, 4, qkv_bias=True, initializer_range=0.05)
DECODER = decoder_policy(MODEL)
# What other models have: fewer key-value heads, norms of heads, biases, a window in one layer, an unembedding.
OTHER = dataclasses.replace(
    MODEL,
    num_key_value_heads=4,
    qk_norm=True,
    o_bias=True,
    mlp_bias=True,
    sliding_window=3,
    sliding_layers=(0,),
    tie_word_embeddings=False,
    remat="layer",
    attention="xla",
)
# Of 5 experts, whose features the devices share out.
EXPERTS = dataclasses.replace(MODEL, qk_norm=True, experts=ExpertsConfig(5, 2, 16, norm_topk_prob=True))
TASK = Task(None, None, None, None, (EOS,), PAD, MODEL.vocab_size)

PLACES = PMAP, FSDP, TENSOR, ALL = 8, Mesh(fsdp=8), Mesh(tensor=8), Mesh(2, 2, 2)


def on(devices: Devices, config: Any) -> Any:
    """The configuration of a run there."""
    if isinstance(devices, int):
        return with_options(config, devices=devices)
    return with_options(config, devices=math.prod(devices), parallel="mesh", fsdp=devices.fsdp, tensor=devices.tensor)


# ---- updates


class Case(NamedTuple):
    """A run, and its models by role, where it starts."""

    config: GRPOConfig | PPOConfig
    method: Method
    start: Any
    policy: Policy = DECODER


def case_of(name: str) -> Case:
    options: dict[str, Any] = {"num_prompts": N, "group_size": G, "max_tokens": T}
    params = jax.jit(DECODER.init)(jax.random.key(0))
    if name in PRESETS:
        config = recipe(name, **options)
        return Case(config, grpo_method(POLICY, config), {"policy": PARAMS}, POLICY)
    if name in ("ppo", "shared"):
        critic = "shared" if name == "shared" else "own"
        config = with_options(PPOConfig(), **options, kl_coef=0.1, minibatches=2, critic=critic)
        return Case(config, ppo_method(DECODER, critic_policy(MODEL), config), add_critic(MODEL, params, critic))
    if name in ("moving", "other"):
        moving = {"ref_sync_steps": 1, "ref_mixup_alpha": 0.5, "divergence": "reverse", "top_entropy": 0.5}
        config = recipe("grpo", **options, minibatches=2, kl_coef=0.2, **(moving if name == "moving" else {}))
        policy = DECODER if name == "moving" else decoder_policy(OTHER)
        return Case(config, grpo_method(policy, config), {"policy": jax.jit(policy.init)(jax.random.key(0))}, policy)
    config = recipe("grpo", **options, epochs=2, microbatches=2, kl_coef=0.2)
    policy = DECODER
    if "experts" in name or name == "offload":
        policy = decoder_policy(dataclasses.replace(EXPERTS, remat="offload") if name == "offload" else EXPERTS)
        params = jax.jit(policy.init)(jax.random.key(0))
    if name in ("int8", "nf4", "nf4 experts"):
        params = quantise_params(params, name.split()[0])
    if name in ("lora", "adapted experts", "int8", "nf4", "nf4 experts"):
        params = add_adapters(params, jax.random.key(1), rank=2, alpha=4.0)
        noise = iter(jax.random.split(jax.random.key(2), 99))  # B begins at 0, and then A has no gradient
        moved = jax.tree.map(lambda x: x + 0.02 * jax.random.normal(next(noise), x.shape), params.adapters)
        params = params._replace(adapters=moved)
    return Case(config, grpo_method(policy, config), {"policy": params}, policy)


@cache
def a_batch(vocab_size: int) -> Batch:
    """Prompts and completions of different lengths."""
    noise = np.random.default_rng(0)
    return Batch(
        noise.integers(0, vocab_size, (N, P)).astype(np.int32),
        np.arange(P) >= noise.integers(0, P, (N, 1)),
        noise.integers(0, vocab_size, (N, G, T)).astype(np.int32),
        np.arange(T) < noise.integers(1, T + 1, (N, G, 1)),
        noise.uniform(0.8, 1.2, (N, G)).astype(np.float32),
        sampler_logprobs=noise.uniform(-4.2, -3.8, (N, G, T)).astype(np.float32),
        truncated=noise.random((N, G)) < 0.3,
    )


def rewards() -> RewardArrays:
    noise = np.random.default_rng(1)
    return RewardArrays(noise.normal(size=(N, G)).astype(np.float32), noise.random((N, G)) < 0.9)


class Prepared(NamedTuple):
    """The program that learns, and what it takes."""

    learn: Any
    args: tuple[Any, ...]
    score: Any
    score_args: tuple[Any, ...]


def prepared(case: Case, devices: Devices, *, recording: bool = True) -> Prepared:
    """With a batch that is scored, and with an optimizer that remembers gradients."""
    config = on(devices, run_of(case.config))
    assert devices_of(config) == devices
    method = case.method
    if recording:
        method = method._replace(optimizer=recorder(config.optimizer.epochs * config.optimizer.minibatches))
    programs = compile_programs(method, case.policy, TASK, config)
    trained, frozen = split(place(case.start, devices))
    state = place(programs.initial_state(trained), devices)
    batch = to_devices(a_batch(V if case.policy is POLICY else MODEL.vocab_size), devices)
    reference = join(trained, frozen)["policy"] if config.loss.objective.has_reference else None
    to_score = trained, state.extras, frozen, reference, batch
    batch = programs.score(*to_score)
    clock = to_devices(np.array([3, 5], np.uint32), devices, axes=None)
    graded = to_devices(rewards(), devices, axes=REWARD_AXES)
    return Prepared(programs.learn, (state, frozen, None, batch, graded, clock), programs.score, to_score)


@cache
def gradients(name: str, devices: Devices) -> Any:
    """Of each optimizer step, and the metrics."""
    program = prepared(case_of(name), devices)
    state, actual = program.learn(*program.args)
    return to_numpy((state.opt_state.gradients, actual.metrics, actual.advantages))


UPDATES = [
    *((name, devices) for name in ("decoder", "ppo", "lora", "experts", "int8", "nf4") for devices in PLACES),
    *((name, ALL) for name in ("shared", "moving", "other", "adapted experts", "nf4 experts")),
    ("offload", PMAP),  # inputs of layers that wait on the host
    ("offload", ALL),
    *((name, ALL) for name in PRESETS),  # with statistics over the whole batch, of a policy that is a table
]
QUICK = {("decoder", ALL), ("lite_ppo", ALL)}


@pytest.mark.parametrize(
    ("name", "devices"), [pytest.param(*x, marks=() if x in QUICK else pytest.mark.slow) for x in UPDATES]
)
def test_updates_have_the_gradients_of_one_device(name, devices):
    # Features of experts are added up in parts, once more than of an MLP: in the order of the rows sorted by expert.
    has_experts = "experts" in name or name == "offload"
    compare(gradients(name.replace("offload", "experts"), 1), gradients(name, devices), 2e-6 if has_experts else 1e-6)


def compare(one: Any, other: Any, most: float = 1e-6) -> None:
    (expected, metrics, advantages), (actual, other_metrics, other_advantages) = one, other
    norms = [np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected)]
    worst = max(
        np.linalg.norm(x - y) / (norm if norm > 1e-3 * max(norms) else max(norms))
        for x, y, norm in zip(*map(jax.tree.leaves, (expected, actual)), norms, strict=True)
    )
    assert worst <= most
    for name, value in metrics.items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-4, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(other_advantages, advantages, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_packed_completions_have_the_gradients_of_one_device(monkeypatch):
    monkeypatch.setattr(pieces, "_MAX_OVERHEAD", 2)  # rows of one completion each
    case, piece_tokens = case_of("decoder"), P + G * T  # a batch of up to two pieces would stay whole
    case = case._replace(config=with_options(case.config, microbatches=0, piece_tokens=piece_tokens))
    actual = []
    for devices in (1, ALL):
        program = prepared(case, devices)
        assert pieces.choose_rows(N // parts(devices), P, G, T, piece_tokens) is not None
        state, learned = program.learn(*program.args)
        actual.append(to_numpy((state.opt_state.gradients, learned.metrics, learned.advantages)))
    compare(*actual)


# ---- sampling


@cache
def sampled(devices: Devices, name: str = "decoder") -> Any:
    """Completions of all prompts."""
    config, batch = recipe(num_prompts=N, group_size=G, max_tokens=12).sampling, a_batch(MODEL.vocab_size)
    mask = np.array(batch.prompt_mask)
    mask[:, -1] = True
    sampler = make_sampler(case_of(name).policy, TASK, config, devices=devices)
    given = Prompts(batch.prompt_ids, mask, []), completion_numbers(config), group_temperatures(config)
    return sampler.complete(case_of(name).start["policy"], *given, noise_of(0, 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "name"),
    [(FSDP, "decoder"), (TENSOR, "decoder"), (ALL, "decoder"), (ALL, "nf4"), (ALL, "experts"), (ALL, "nf4 experts")],
)
def test_the_same_noise_gives_the_same_tokens(devices, name):
    one, other = sampled(1, name), sampled(devices, name)
    # Rounding may decide between two tokens, and all that follow then differ.
    same = (one.completion_ids == other.completion_ids).all(-1)
    assert (~same).sum() <= 1
    np.testing.assert_allclose(other.sampler_logprobs[same], one.sampler_logprobs[same], atol=1e-5)
    assert len({tuple(row) for row in one.completion_ids.reshape(-1, 12)}) > N  # it is noise


# ---- no device holds a whole model

# Embeddings are larger than a layer, and a layer is larger than what is computed of the tokens.
WIDE = ModelConfig(4096, 64, 256, 4, 8, 8, 8, tie_word_embeddings=False)
PASSES = {"sample": 1, "score": 2, "learn": 2}  # over all layers: prompts; policy and reference; there and back


def shapes_of(model: ModelConfig) -> Any:
    return jax.eval_shape(decoder_policy(model).init, jax.random.key(0))


@cache
def wide_program(name: str, devices: Mesh) -> Any:
    """One of the three programs, compiled for a wide model, and its state."""
    config = on(devices, recipe("grpo", num_prompts=N, group_size=G, max_tokens=T, epochs=2))
    policy = decoder_policy(WIDE)
    start = jax.tree.map(lambda x: jnp.full(x.shape, 0.01), shapes_of(WIDE))
    case = Case(config, grpo_method(policy, config), {"policy": start}, policy)
    program = prepared(case, devices, recording=False)
    sampler = make_sampler(policy, TASK, config.sampling, devices=devices)
    trained, batch = program.args[0].params["policy"], a_batch(MODEL.vocab_size)
    prompts = (batch.prompt_ids, batch.prompt_mask, completion_numbers(config.sampling), batch.temperature)
    given = trained, *to_devices(prompts, devices), to_devices(noise_of(0, 0, 0), devices, axes=None)
    fn, args, held = {
        "sample": (sampler.program, given, given[0]),
        "score": (jax.jit(program.score), program.score_args, program.score_args[:4]),
        "learn": (program.learn, program.args, program.args[0]),
    }[name]
    return fn.lower(*args).compile(), held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [(name, devices) for name in ("sample", "score", "learn") for devices in (FSDP, ALL)],
)
def test_a_program_takes_its_share_and_gathers_a_layer_at_a_time(name, devices, assume):
    assume(slice_elements=N * G * T * 128)  # several slices of the vocabulary
    check_program(*wide_program(name, devices), devices, PASSES[name])


def check_program(compiled: Any, held: Any, devices: Mesh, passes: int) -> None:
    """It is given its share of the parameters, or of the state that is held, and puts no more than a layer together."""
    whole = sum(x.nbytes for x in jax.tree.leaves(held))
    share = whole / (devices.fsdp * devices.tensor)
    assert share <= compiled.memory_analysis().argument_size_in_bytes < 1.2 * share
    layer = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(shapes_of(WIDE)["layers"]))
    text = compiled.as_text()
    lines = [line.split(" all-gather")[0] for line in text.splitlines() if re.search(r" all-gather(-start)?\(", line)]
    gathered = [math.prod(map(int, shape.split(","))) for line in lines for shape in re.findall(r"\[([0-9,]+)\]", line)]
    assert max(gathered) <= layer
    # A loop over layers is there once. What decodes has the layers in a row: a copy of them all would be 4 passes more.
    assert passes <= sum(gathered) / (layer / devices.tensor) < passes + 2
    for leaf in jax.tree.leaves(shapes_of(WIDE)):
        if leaf.size > 1000:  # no norm
            assert f"[{','.join(map(str, leaf.shape))}]" not in text


# ---- runs

RUN = recipe(
    steps=4, num_prompts=8, group_size=G, max_tokens=4, learning_rate=1e-2, checkpoint_every=2, rollouts_every=0
)


def prompts(step: int) -> Prompts:
    tokens = [rng(step, i).integers(2, 64, 1 + i % 3).tolist() for i in range(8)]
    return pad_prompts(tokens, [{"prompt": str(t)} for t in tokens], width=P, pad_id=PAD)


RUN_TASK = Task(prompts, says_three, prompts(99), str, (EOS,), PAD, MODEL.vocab_size)


def run_on(devices: Devices, path: Any, name: str = "decoder", **options: Any) -> tuple[Any, RunFolder]:
    config, case = with_options(on(devices, RUN), **options), case_of(name)
    run = open_run(path, config)
    programs = make_programs(case.policy, RUN_TASK, config)
    return train(case.start, RUN_TASK, config, run, programs, phase="grpo"), run


@pytest.fixture(scope="module")
def run_of_four(tmp_path_factory):
    """A run on a mesh, cut off after two steps and resumed: its state and folder."""
    path = tmp_path_factory.mktemp("runs") / "cut"
    run_on(ALL, path, steps=2)
    return run_on(ALL, path)


@pytest.mark.slow
def test_a_run_on_a_mesh_is_resumed_to_the_bit(tmp_path, run_of_four):
    whole = run_on(ALL, tmp_path)
    assert_same_runs(run_of_four, whole, ["metrics.jsonl"])
    assert any(line["grad_norm"] > 0 for line in whole[1].lines())
    counts = compilations_of(whole[1])
    assert counts == [counts[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, PMAP, FSDP, Mesh(data=1, fsdp=4, tensor=2)])
def test_a_run_of_a_mesh_goes_on_with_other_devices(tmp_path, run_of_four, devices):
    state, whole = run_of_four
    actual, _ = run_on(devices, whole.path)  # which has no steps left
    assert params_sha256(actual) == params_sha256(state)
    assert [x.sharding for x in jax.tree.leaves(actual)] == jax.tree.leaves(shardings(state, devices))
    if devices in (1, FSDP):
        run_on(ALL, tmp_path, steps=2)
        _, run = run_on(devices, tmp_path)
        for line, expected in zip(run.lines(), whole.lines(), strict=True):
            assert line["reward"] == expected["reward"]
            np.testing.assert_allclose(line["grad_norm"], expected["grad_norm"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(ALL, marks=pytest.mark.slow)])
def test_experts_are_those_of_the_sampler_and_logged(tmp_path, devices):
    """In float32, where routes of sampler and trainer do not differ."""
    _, run = run_on(devices, tmp_path, "experts", steps=2)
    for line in run.lines():
        assert abs(line["first_ratio_deviation"]) < 1e-5
        assert abs(line["first_sampler_mismatch"] - 1) < 1e-5
        assert 1 / 5 < line["busiest_expert"] <= 1 / 2  # of 5 experts, 2 a token
        assert 0 < line["router_entropy"] < math.log(5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fsdp": 3}, "does not divide the 8 devices"),
        ({"parallel": "pmap", "tensor": 2}, "set parallel to mesh"),
        ({"fsdp": 8, "num_prompts": 4}, "must be a multiple of"),
        ({"fsdp": 4, "tensor": 2, "num_prompts": 6}, "devices / tensor, 4"),
    ],
)
def test_devices_that_cannot_share_out_a_run_are_refused(options, words):
    config = with_options(RUN, devices=8, **options)
    with refused(words):
        make_programs(DECODER, RUN_TASK, config)


def test_key_value_heads_are_never_cut():
    model = dataclasses.replace(MODEL, num_key_value_heads=2)
    with refused("2 key-value heads"):
        place(shapes_of(model), Mesh(tensor=4))


def test_what_a_mesh_does_not_divide_stays_whole():
    params = {"layers": {"mlp": {"gate_proj": {"kernel": np.ones((2, 6, 10))}}}, "embedding": np.ones((3, 6))}
    placed = place(params, Mesh(fsdp=2, tensor=4))
    assert placed["layers"]["mlp"]["gate_proj"]["kernel"].addressable_shards[0].data.shape == (2, 3, 10)
    assert placed["embedding"].addressable_shards[0].data.shape == (3, 3)


def test_a_model_is_read_onto_the_mesh():
    (model, params), mesh = load_golden("llama"), Mesh(fsdp=2, tensor=2)
    actual = load_params(GOLDEN / "llama", model, sharding=load_shardings(mesh))
    expected = place(params, mesh)
    assert jax.tree.map(lambda x: x.sharding, actual) == jax.tree.map(lambda x: x.sharding, expected)
    assert params_sha256(actual) == params_sha256(expected)
