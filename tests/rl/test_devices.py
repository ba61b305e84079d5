"""Eight virtual devices and a mesh of them against one device: the same numbers, and no device holds a whole model.

The updates of GRPO and PPO come first, then those of phases on data.
"""

import dataclasses
import itertools
import math
import re
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_helpers
from tiny import GOLDEN, digit_task, load_golden, recorder, says_three, slow_unless

from grpo_jax.config import PPO, Divergence, GRPOConfig, recipe, with_options
from grpo_jax.data.packing import Packed
from grpo_jax.data.prompts import Prompts
from grpo_jax.devices import (
    Devices,
    Mesh,
    devices_of,
    first_devices,
    jit_on_devices,
    load_shardings,
    map_rows,
    num_shards,
    place,
    shardings,
    size,
    to_devices,
)
from grpo_jax.functional import dpo_loss
from grpo_jax.models.config import ExpertsConfig, ModelConfig
from grpo_jax.models.decoder.heads import Headed, add_head
from grpo_jax.models.files.weights import load_params
from grpo_jax.models.params.lora import add_adapters
from grpo_jax.models.params.quantised import quantise_params
from grpo_jax.models.params.tree import join
from grpo_jax.models.policy import Policy, decoder_policy
from grpo_jax.models.rows import pieces
from grpo_jax.offline import pairs as offline_pairs
from grpo_jax.offline.distillation import divergence_objective, mean_divergence
from grpo_jax.offline.phase import FitObjective, SupervisedConfig
from grpo_jax.offline.sft import sft_objective, text_nll
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.ppo import add_critic, critic_policy
from grpo_jax.rl.programs import Programs, make_method, make_method_programs, make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import Method, noise_of
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.step import Batch
from grpo_jax.tasks.task import Task
from grpo_jax.training.phases import train

N, G, P, T = 16, 5, 3, 5
EOS, PAD = 0, 1
# Eight key-value heads, so that eight devices can share them out.
MODEL = ModelConfig(64, 16, 32, 1, 8, 8, 4, qkv_bias=True, initializer_range=0.05)
DECODER = decoder_policy(MODEL)
# What other models have: two layers, a window in one, fewer key-value heads, norms of heads, biases, an unembedding.
OTHER = dataclasses.replace(
    MODEL,
    num_hidden_layers=2,
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
TEACHER = decoder_policy(dataclasses.replace(OTHER, num_key_value_heads=8))
# Of 5 experts, whose features the devices share out.
EXPERTS = dataclasses.replace(MODEL, qk_norm=True, experts=ExpertsConfig(5, 2, 16, norm_topk_prob=True))
TASK = Task(None, None, None, None, (EOS,), PAD, MODEL.vocab_size)

PLACES = PMAP, FSDP, TENSOR, ALL = tuple(map(first_devices, (8, Mesh(fsdp=8), Mesh(tensor=8), Mesh(2, 2, 2))))
ONE = first_devices(1)


def on(devices: Devices, config: Any) -> Any:
    """The configuration of a run there."""
    if devices.mesh is None:
        return with_options(config, devices=size(devices))
    _, fsdp, tensor = devices.mesh
    return with_options(config, devices=size(devices), parallel="mesh", fsdp=fsdp, tensor=tensor)


# ---- updates


class Case(NamedTuple):
    """A run, and its models by role, where it starts."""

    config: GRPOConfig
    method: Method
    start: Any
    policy: Policy = DECODER


def case_of(name: str) -> Case:
    options: dict[str, Any] = {"num_prompts": N, "group_size": G, "max_tokens": T}
    params = jax.jit(DECODER.init)(jax.random.key(0))
    if name == "taught":
        config = recipe("grpo", **options, kl_coef=0.0, distillation="jsd", distillation_top_k=3, reward_coef=0.5)
        models = {"policy": params, "teacher": jax.jit(TEACHER.init)(jax.random.key(5))}
        return Case(config, make_method({"policy": DECODER, "teacher": TEACHER}, config), models)
    if name in ("ppo", "shared"):
        critic = "shared" if name == "shared" else "own"
        config = with_options(PPO, **options, kl_coef=0.1, minibatches=2, critic=critic)
        return Case(
            config,
            make_method({"policy": DECODER, "critic": critic_policy(MODEL)}, config),
            add_critic(MODEL, params, critic),
        )
    if name in ("moving", "other"):
        moving = {"ref_sync_steps": 1, "ref_mixup_alpha": 0.5, "divergence": "reverse", "top_entropy": 0.5}
        config = recipe("grpo", **options, minibatches=2, kl_coef=0.2, **(moving if name == "moving" else {}))
        policy = DECODER if name == "moving" else decoder_policy(OTHER)
        return Case(config, grpo_method(policy, config), {"policy": jax.jit(policy.init)(jax.random.key(0))}, policy)
    config = recipe("grpo", **options, piece_tokens=P + G * T - 1, kl_coef=0.2)  # one prompt each
    policy = DECODER
    if name == "packed":  # completions so long that rows of one completion each cost little more
        config = with_options(config, max_tokens=20, piece_tokens=60)
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
def a_batch(tokens: int = T) -> Batch:
    """Prompts and completions of different lengths, which nothing has scored."""
    batch = rl_helpers.ragged_batch((N, G, P, tokens), MODEL.vocab_size, shortest=1)
    sampled = batch.sampler_logprobs - 2  # about as likely as a token of a start is
    return batch._replace(
        sampler_logprobs=sampled, old_logprobs=None, ref_logprobs=None, old_entropy=None, old_values=None
    )


def prepared(case: Case, devices: Devices, *, recording: bool = True) -> tuple[Programs, rl_helpers.Placed, Any]:
    """The programs, what they take with a batch that is scored, and the reference."""
    config = on(devices, case.config)
    assert devices_of(config) == devices
    method = case.method
    if recording:
        method = method._replace(optimizer=recorder(config.optimizer.epochs * config.optimizer.minibatches))
    programs = make_method_programs(method, case.policy, TASK, config)
    batch = a_batch(config.sampling.max_tokens)
    start = rl_helpers.placed(programs, case.start, batch, rl_helpers.ragged_rewards(N, G))
    reference = join(start.state.params, start.frozen)["policy"] if config.loss.objective.has_reference else None
    return programs, start.scored(programs, reference), reference


@cache
def gradients(name: str, devices: Devices) -> Any:
    """Of each optimizer step, and the metrics."""
    case = case_of(name)
    if name == "packed":
        local, tokens = N // num_shards(devices), case.config.sampling.max_tokens
        piece_tokens = case.config.optimizer.piece_tokens
        assert pieces.choose_piece(local, P, G, tokens, piece_tokens=piece_tokens).is_packed
    programs, start, _ = prepared(case, devices)
    state, actual = start.learned(programs)
    return state.opt_state.gradients, actual.metrics, actual.advantages


UPDATES = [
    *((name, devices) for name in ("decoder", "ppo", "lora", "experts", "int8", "nf4") for devices in PLACES),
    *((name, ALL) for name in ("shared", "moving", "other", "adapted experts", "nf4 experts", "packed", "taught")),
    ("offload", ALL),  # inputs of layers that wait on the host
]


@pytest.mark.parametrize(("name", "devices"), slow_unless([("decoder", ALL)], UPDATES))
def test_updates_have_the_gradients_of_one_device(name, devices):
    # Features of experts are added up in parts, once more than of an MLP: in the order of the rows sorted by expert.
    has_experts = "experts" in name or name == "offload"
    compare(gradients(name.replace("offload", "experts"), ONE), gradients(name, devices), 2e-6 if has_experts else 1e-6)


def compare(one: Any, other: Any, most: float = 1e-6) -> None:
    (expected, metrics, advantages), (actual, other_metrics, other_advantages) = one, other
    norms = [np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected)]
    worst = max(
        np.linalg.norm(x - y) / (norm if norm > 1e-3 * max(norms) else max(norms))
        for x, y, norm in zip(*map(jax.tree.leaves, (expected, actual)), norms, strict=True)
    )
    assert worst <= most
    assert metrics.keys() == other_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(other_metrics[name], value, rtol=1e-4, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(other_advantages, advantages, rtol=1e-4, atol=1e-5)


# ---- sampling


@cache
def sampled(devices: Devices, name: str = "decoder") -> Any:
    """Completions of all prompts."""
    config, batch = recipe(num_prompts=N, group_size=G, max_tokens=12).sampling, a_batch()
    mask = np.array(batch.prompt.mask)
    mask[:, -1] = True
    sampler = make_sampler(case_of(name).policy, TASK, config, devices=devices)
    inputs = (
        Prompts(dataclasses.replace(batch.prompt, mask=mask), []),
        completion_numbers(config),
        group_temperatures(config),
    )
    return sampler.complete(case_of(name).start["policy"], *inputs, noise_of(0, 0, 0))


SAMPLERS = [
    (FSDP, "decoder"),
    (TENSOR, "decoder"),
    (ALL, "decoder"),
    (ALL, "nf4"),
    (ALL, "experts"),
    (ALL, "nf4 experts"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "name"), SAMPLERS)
def test_the_same_noise_gives_the_same_tokens(devices, name):
    one, other = sampled(ONE, name), sampled(devices, name)
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
    programs, start, reference = prepared(case, devices, recording=False)
    sampler, state = make_sampler(policy, TASK, config.sampling, devices=devices), start.state
    batch, numbers, policy_params = start.batch, completion_numbers(config.sampling), state.params["policy"]
    numbers, noise = to_devices(numbers, devices), to_devices(noise_of(0, 0, 0), devices, axes=None)
    to_sample = policy_params, batch.prompt, numbers, batch.temperature, noise
    to_score = state.params, state.extras, start.frozen | {"reference": reference}, batch
    fn, args, held = {
        "sample": (sampler.program, to_sample, policy_params),
        "score": (jax.jit(programs.score), to_score, to_score[:3]),
        "learn": (programs.learn, (state, start.frozen, batch, start.rewards, start.seed_and_step), state),
    }[name]
    return fn.lower(*args).compile(), held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices"),
    [(name, devices) for name in ("sample", "score", "learn") for devices in (FSDP, ALL)],
)
def test_programs_gather_parameters_layer_by_layer(name, devices, assume):
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


RUN_TASK = digit_task(says_three, vocab_size=MODEL.vocab_size)


def run_on(devices: Devices, path: Any, name: str = "decoder", **options: Any) -> tuple[Any, RunFolder]:
    config, case = with_options(on(devices, RUN), **options), case_of(name)
    run = rl_helpers.open_run(path, config)
    programs = make_programs(case.policy, RUN_TASK, config)
    return train(case.start, RUN_TASK, config, run, programs, phase="grpo"), run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on a mesh that nobody stopped: its state and folder."""
    return run_on(ALL, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [ALL, ONE, PMAP, FSDP, first_devices(Mesh(data=1, fsdp=4, tensor=2))])
def test_mesh_runs_resume_on_same_or_other_devices(tmp_path, whole, devices):
    run_on(ALL, tmp_path, steps=2)
    state, run = run_on(devices, tmp_path)
    for x, where in zip(*map(jax.tree.leaves, (state, shardings(state, devices))), strict=True):
        assert x.sharding.is_equivalent_to(where, x.ndim)
    if devices == ALL:
        rl_helpers.assert_same_runs((state, run), whole, ["metrics.jsonl"])
        counts = rl_helpers.compilations_of(whole[1])
        assert (counts[1], counts[3]) == (counts[0], counts[2])  # in between a checkpoint is saved
    for line, expected in zip(run.lines(), whole[1].lines(), strict=True):
        assert line["reward"] == expected["reward"]
        assert expected["grad_norm"] > 0
        np.testing.assert_allclose(line["grad_norm"], expected["grad_norm"], rtol=1e-4)


def test_what_a_mesh_does_not_divide_stays_whole():
    params = {"layers": {"mlp": {"gate_proj": {"kernel": np.ones((2, 6, 10))}}}, "embedding": np.ones((3, 6))}
    placed = place(params, first_devices(Mesh(fsdp=2, tensor=4)))
    assert placed["layers"]["mlp"]["gate_proj"]["kernel"].addressable_shards[0].data.shape == (2, 3, 10)
    assert placed["embedding"].addressable_shards[0].data.shape == (3, 3)


@pytest.mark.parametrize("mesh", [None, Mesh(data=2)], ids=["pmap", "mesh"])
def test_programs_run_on_any_list_of_devices(mesh):
    devices = Devices((jax.devices()[5], jax.devices()[2]), mesh)
    twice = jit_on_devices(map_rows(lambda shared, rows: shared * rows, devices), 0, devices=devices)
    result = twice(place(np.float32(2), devices), to_devices(np.arange(4.0), devices))
    assert [shard.device for shard in sorted(result.addressable_shards, key=lambda x: x.index[0].start)] == [
        *devices.listed
    ]
    np.testing.assert_array_equal(result, [0, 2, 4, 6])
    last = Devices(jax.devices()[7:])
    assert jit_on_devices(lambda x: x, devices=last)(to_devices(np.ones(2), last)).devices() == {jax.devices()[7]}


def test_a_model_is_read_onto_the_mesh():
    (model, params), mesh = load_golden("llama"), first_devices(Mesh(fsdp=2, tensor=2))
    actual = load_params(GOLDEN / "llama", model, sharding=load_shardings(mesh))
    expected = place(params, mesh)
    assert jax.tree.map(lambda x: x.sharding, actual) == jax.tree.map(lambda x: x.sharding, expected)
    assert params_sha256(actual) == params_sha256(expected)


# ---- phases on data

WIDTH = 8


def start_of(name: str) -> Any:
    """Parameters of the policy in a case of reinforcement learning."""
    return case_of(name).start["policy"]


PHASE = SupervisedConfig(4, 1e-2, microbatches=2)
SCORER, HEADLESS = add_head(MODEL, start_of("decoder"))
NOISE = np.random.default_rng(3)
HEADED = Headed(HEADLESS.decoder, NOISE.normal(size=MODEL.hidden_size).astype(np.float32))


def packed_rows() -> Packed:
    """Rows of two texts and padding, of which the last tokens are learned."""
    lengths = NOISE.integers(2, 5, (N, 2))
    places = np.arange(WIDTH)
    texts = (places < lengths.sum(1, keepdims=True)) * (1 + (places >= lengths[:, :1]))
    last = np.stack([places == lengths[:, :1] - 1, places == lengths.sum(1, keepdims=True) - 1]).any(0)
    return Packed(NOISE.integers(0, 64, (N, WIDTH)).astype(np.int32), texts.astype(np.int32), last)


PAIRS, ROWS = rl_helpers.some_pairs(N, 64)._replace(margins=[0.1 * i for i in range(N)]), packed_rows()
REFERENCE = NOISE.normal(-8, 1, (N, 2)).astype(np.float32)
TAUGHT = {"policy": start_of("decoder"), "teacher": jax.jit(TEACHER.init)(jax.random.key(5))}
LESSON = TEACHER, Divergence("forward_kl"), 0.3


class Phase(NamedTuple):
    """What a phase minimises, and where it starts."""

    objective: FitObjective
    start: Any
    batch: Any


def phase_named(name: str) -> Phase:
    pairs = offline_pairs.pad_pairs(PAIRS, np.arange(N), (WIDTH, WIDTH))
    if name == "reward model":
        return Phase(offline_pairs.reward_model_objective(SCORER, center_coef=0.01), HEADED, pairs)
    if name == "dpo":
        objective = offline_pairs.preference_objective(DECODER, partial(dpo_loss, beta=0.5))
        return Phase(objective, start_of("lora"), pairs._replace(ref_logprobs=REFERENCE))
    if name == "kto":  # z₀ is above 0, and pieces and devices have different parts of it
        reference = REFERENCE - np.array([0, 8], np.float32)
        rated = pairs._replace(desirable=np.arange(N) % 3 > 0, ref_logprobs=reference)
        return Phase(offline_pairs.kto_objective(DECODER), start_of("lora"), rated)
    if name == "teacher":
        return Phase(divergence_objective(DECODER, *LESSON), TAUGHT, ROWS)
    batch = ROWS if name == "packed" else a_batch()
    return Phase(sft_objective(DECODER), start_of("decoder"), batch)


@cache
def gradients_of_phase(name: str, devices: Devices) -> Any:
    """Of a step in two pieces, and its metrics."""
    return rl_helpers.phase_step(*phase_named(name), on(devices, PHASE))


PHASES = ("prompts", "packed", "teacher", "dpo", "kto", "reward model")


@pytest.mark.parametrize(("name", "devices"), slow_unless([("packed", ALL)], itertools.product(PHASES, PLACES)))
def test_a_step_has_the_gradients_of_one_device(name, devices):
    (expected, metrics), (actual, others) = gradients_of_phase(name, ONE), gradients_of_phase(name, devices)
    assert min(np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected)) > 0
    compare((expected, metrics, 0), (actual, others, 0))
    assert name != "kto" or metrics["kl"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [PMAP, ALL])
def test_evaluations_have_the_numbers_of_one_device(devices):
    start = start_of("decoder")
    for score in (
        lambda devices: text_nll(DECODER, place(start, devices), [ROWS], devices=devices),
        lambda devices: mean_divergence(DECODER, *LESSON[:2], place(TAUGHT, devices), [ROWS], devices=devices),
        lambda devices: offline_pairs.score_pairs(
            offline_pairs.pair_logprobs, DECODER, place(start, devices), PAIRS, num_pairs=N, devices=devices
        ),
        lambda devices: offline_pairs.score_pairs(
            offline_pairs.pair_rewards, SCORER, place(HEADED, devices), PAIRS, num_pairs=N, devices=devices
        ),
    ):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), score(devices), score(ONE))
