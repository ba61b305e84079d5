"""Compares runs through a server, which runs our own sampler, with the same runs without it."""

import dataclasses
import json
import time
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from server import Server
from tiny import (
    GOLDEN,
    STORIES,
    digit_prompts,
    digit_stop,
    digit_task,
    needs_data,
    read_lines,
    refused,
    says_three,
    write_rows,
)

from grpo_jax.commands import evaluate, flags, grpo, ppo
from grpo_jax.config import EngineOptions, recipe, with_options
from grpo_jax.data.episodes import Reply, environment
from grpo_jax.data.prompts import pad_prompts
from grpo_jax.devices import ONE_DEVICE
from grpo_jax.engines.sampler import make_score, sampler_of, seed_of
from grpo_jax.errors import Interruption
from grpo_jax.models import huggingface
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.files import peft, weights
from grpo_jax.models.files.weights import load_params
from grpo_jax.models.params.lora import add_adapters
from grpo_jax.models.params.quantised import quantise_params
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import EVALUATION, SAMPLING, noise_of
from grpo_jax.runs.folder import RunFolder
from grpo_jax.training.phases import train

V, EOS, PAD, P = 8, 6, 7, 3
SHAPE = ModelConfig(V, 8, 16, 1, 2, 1, 4, initializer_range=0.5)
POLICY = decoder_policy(SHAPE)
CONFIG = recipe(steps=4, num_prompts=4, group_size=4, max_tokens=3, learning_rate=5e-2, rollouts_every=1)


def reader(load, load_adapter):
    """Returns the function that reads the parameters of a folder."""

    @cache
    def read(folder):
        is_adapter = (Path(folder) / "adapter_config.json").exists()
        return (load_adapter if is_adapter else load)(Path(folder))

    return read


def scores(policy, load, load_adapter):
    """Returns the function that scores a text as a server does."""
    read, score = reader(load, load_adapter), make_score(policy, ONE_DEVICE)
    return lambda folder, ids, temperature: score(read(folder), ids, temperature)()


def samples(sampler, load, load_adapter, draw, width):
    """Returns a sampler as a server calls it.

    Args:
      sampler: Our sampler.
      load: folder -> the parameters in it, if it holds no adapters.
      load_adapter: folder -> the parameters with the adapters in it.
      draw: the seed of a request -> the noise and the number of its completion.
      width: The width of prompts.
    """

    read = reader(load, load_adapter)

    def sample(folder, body):
        prompt = pad_prompts([body["prompt"]], [{}], width=width, pad_id=PAD)
        noise, number = draw(body["seed"])
        number, temperature = np.full((1, 1), number, np.int32), np.full((1, 1), body["temperature"], np.float32)
        out = sampler.complete(read(folder), prompt, number, temperature, noise)
        mask = out.completion_mask[0, 0]
        return out.completion_ids[0, 0][mask].tolist(), out.sampler_logprobs[0, 0][mask].tolist()

    return sample


TASK = digit_task(says_three, partial(digit_prompts, count=4))
PRETRAINED = huggingface.Pretrained(SHAPE, {}, None, (EOS,), GOLDEN / "llama")
OWN = make_sampler(POLICY, TASK, CONFIG.sampling)


@pytest.fixture(scope="module")
def params():
    return jax.jit(POLICY.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def numbered():
    """The noise and number that each seed of a request is made of."""
    draws = [noise_of(0, SAMPLING, step) for step in range(CONFIG.steps + 1)] + [noise_of(0, EVALUATION, 0)]
    return {seed_of(noise, n): (noise, n) for noise in draws for n in completion_numbers(CONFIG.sampling).ravel()}


@pytest.fixture
def server(params, numbered):
    def load(folder):
        return load_params(folder, SHAPE) if (folder / "config.json").exists() else params

    load_adapter = partial(peft.load_adapter, config=SHAPE, params=params)
    sample, score = samples(OWN, load, load_adapter, numbered.__getitem__, P), scores(POLICY, load, load_adapter)
    server = Server(sample, TASK.decode, (EOS,), score=score)
    yield server
    server.stop()


def sampler_at(server, shape=SHAPE, staleness=0, **options):
    options, config = EngineOptions((server.url,), **options), with_options(CONFIG, staleness=staleness)
    return sampler_of(options, PRETRAINED._replace(config=shape), TASK, config, note=print)


NOWHERE = EngineOptions(("http://127.0.0.1:9",))  # where no server is
PROGRAMS = {staleness: make_programs(POLICY, TASK, with_options(CONFIG, staleness=staleness)) for staleness in (0, 1)}


def run_of(folder, params, sampler=None, staleness=0):
    """The end of a run, and its folder; compiled programs are shared."""
    programs = PROGRAMS[staleness]
    run = RunFolder(folder, dataclasses.asdict(programs.config))
    programs = programs._replace(sampler=sampler) if sampler else programs
    return train({"policy": params}, TASK, programs.config, run, programs, phase="grpo"), run


def tokens_of(run):
    return [group["tokens"] for group in run.lines("rollouts.jsonl")]


@pytest.fixture(scope="module")
def whole(params, tmp_path_factory):
    """A run without a server, by the rank of its adapters: the start, and what `run_of` returns."""

    @cache
    def of_rank(rank):
        start = add_adapters(params, jax.random.key(1), rank=rank, alpha=4.0) if rank else params
        return start, *run_of(tmp_path_factory.mktemp("own"), start)

    return of_rank


SERVERS = [
    ("vllm", 0),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in [("sglang", 0), ("vllm", 2), ("sglang", 2)]),
]


@pytest.mark.parametrize(("kind", "rank"), SERVERS)
def test_server_runs_equal_local_runs(server, whole, tmp_path, kind, rank):
    start, alone, alone_run = whole(rank)
    through, run = run_of(tmp_path / "through", start, sampler_at(server, engine_kind=kind))
    assert tokens_of(run) == tokens_of(alone_run)
    assert [line["truncated_share"] for line in run.lines()] == [line["truncated_share"] for line in alone_run.lines()]
    assert max(line["first_ratio_deviation"] for line in run.lines()) < 1e-5
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), through.params, alone.params)
    trained = through.params["policy"]
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), trained, start.adapters if rank else start)
    assert max(jax.tree.leaves(moved)) > 1e-2  # so each step needed other parameters
    assert len(server.adapters) == (1 if rank else 0)


def test_each_step_has_its_rollouts_seconds(server, params, tmp_path):
    def wait(number, answer):
        time.sleep(0.02)
        return answer

    server.tamper = wait  # which answers one request at a time
    _, run = run_of(tmp_path / "through", params, sampler_at(server))
    times = run.lines("times.jsonl")
    assert min(line["rollout_s"] for line in times) > 16 * 0.02
    assert max(line["rollout_tokens_per_s"] for line in times) < 16 * 3 / (16 * 0.02)


def test_servers_get_adapters_in_export_layout(params, tmp_path):
    names = []

    def one_token(folder, body):
        names.append(sorted(weights.find_tensors(Path(folder), ["adapter_model.safetensors"])))
        return [EOS], [-0.5]

    adapted = add_adapters(params, jax.random.key(1), rank=2, alpha=4.0)  # which do nothing yet
    score = scores(POLICY, lambda folder: params, lambda folder: params)
    server = Server(one_token, TASK.decode, (EOS,), score=score)
    inputs = (
        TASK.prompts(0),
        completion_numbers(CONFIG.sampling),
        np.ones((4, 4), np.float32),
        noise_of(0, EVALUATION, 0),
    )
    try:
        sampler_at(server).complete(adapted, *inputs)
    finally:
        server.stop()
    peft.save_adapter(tmp_path / "exported", SHAPE, adapted, base="")
    exported = sorted(weights.find_tensors(tmp_path / "exported", ["adapter_model.safetensors"]))
    assert names[0] == exported


@pytest.mark.slow
def test_stale_server_runs_equal_stale_local_runs(server, params, tmp_path):
    _, alone = run_of(tmp_path / "own", params, staleness=1)
    _, run = run_of(tmp_path / "through", params, sampler_at(server, staleness=1), staleness=1)
    assert tokens_of(run) == tokens_of(alone)


@pytest.mark.parametrize("spoiled", [pytest.param(None, marks=pytest.mark.slow), {"choices": []}])
def test_runs_resume_identically_after_a_server_fails(server, params, tmp_path, spoiled):
    end, whole_run = run_of(tmp_path / "whole", params, sampler_at(server))
    third, server._count = 2 * 16 + 5, 0
    server.tamper = lambda number, answer: spoiled if number >= third else answer
    with pytest.raises(Interruption, match="the engine at"):
        run_of(tmp_path / "stopped", params, sampler_at(server, engine_timeout=3.0))
    stopped = read_lines(tmp_path / "stopped/metrics.jsonl")
    assert [line["step"] for line in stopped] == [1, 2]  # although checkpoints are far apart
    server.tamper = lambda number, answer: answer
    server.asked.clear()
    resumed, run = run_of(tmp_path / "stopped", params, sampler_at(server))
    assert len(server.completions()) == 2 * 16 - 5  # the missing ones of the last two steps
    assert run.lines() == whole_run.lines()
    assert tokens_of(run) == tokens_of(whole_run)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, end.params)


# ---- episodes


REPLY_IDS = (5, EOS, PAD)  # a reply may hold any tokens


def echo(example, transcript, key):
    return Reply(ids=REPLY_IDS[: key[3] % 4], reward=float(len(transcript[-1].action)), done=key[3] == 5)


@pytest.mark.parametrize("stops", [(), ("33", "21")], ids=["eos", "stop"])
def test_episodes_of_servers_equal_local_episodes(params, stops):
    """The server gives what our sampler drew, if the request's prompt is the ids of all turns and replies before."""
    played = TASK._replace(environment=environment(echo, None), stop=digit_stop(*stops))
    config = with_options(CONFIG, max_tokens=8, max_turns=3, environment_tokens=5)
    noise, numbers = noise_of(0, SAMPLING, 0), completion_numbers(config.sampling)
    inputs = played.prompts(0), numbers, group_temperatures(config.sampling), noise
    own = make_sampler(POLICY, played, config.sampling).complete(params, *inputs)
    turns = {}
    for i, j in np.ndindex(numbers.shape):
        prompt = inputs[0].tokens.ids[i][inputs[0].tokens.mask[i]].tolist()
        for turn in range(1, own.turn[i, j].max() + 1):
            before, of_turn = own.turn[i, j] < turn, (own.turn[i, j] == turn) & own.completion_mask[i, j]
            text = prompt + own.completion_ids[i, j][before & (own.turn[i, j] > 0)].tolist()
            answer = own.completion_ids[i, j][of_turn].tolist(), own.sampler_logprobs[i, j][of_turn].tolist()
            left = 8 - int((before & own.completion_mask[i, j]).sum())
            turns[seed_of(noise, numbers[i, j], turn), tuple(text), left] = answer
    assert {*own.turn.max(-1).ravel()} == {1, 2, 3}

    def sample(folder, body):
        return turns.pop((body["seed"], tuple(body["prompt"]), body["max_tokens"]))

    server = Server(sample, TASK.decode, (EOS,), score=scores(POLICY, partial(load_params, config=SHAPE), None))
    try:
        engine = EngineOptions((server.url,))
        through = sampler_of(engine, PRETRAINED, played, config, note=print).complete(params, *inputs)
    finally:
        server.stop()
    assert not turns
    for name, x in own._asdict().items():
        np.testing.assert_array_equal(getattr(through, name), x, err_msg=name)


def test_quantised_models_are_refused_before_contacting_the_engine(params):
    pretrained = PRETRAINED._replace(params=quantise_params(params, "int8"))
    with refused("leave out quantize"):
        sampler_of(NOWHERE, pretrained, TASK, CONFIG, note=print)


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("method", [["--lora-rank", "2"], ["--method", "ppo"]])
def test_train_command_works_through_a_server(tmp_path, method):
    rows = [{"prompt": f"Once there was a {word}", "word": word} for word in ["cat", "dog", "bear", "frog"] * 4]
    write_rows(tmp_path / "rows.jsonl", rows)
    model = huggingface.load_pretrained(STORIES)
    task = TASK._replace(eos_ids=model.eos_ids, vocab_size=model.config.vocab_size)
    sampler = make_sampler(decoder_policy(model.config), task, with_options(CONFIG, max_tokens=8).sampling)

    def load(folder):
        return huggingface.load_pretrained(folder).params if folder.name else model.params

    load_adapter = partial(peft.load_adapter, config=model.config, params=model.params)
    sample = samples(sampler, load, load_adapter, lambda seed: (noise_of(0, 0, 0), seed), width=16)
    score = scores(decoder_policy(model.config), load, load_adapter)
    decode = partial(model.tokenizer.decode, skip_special_tokens=True)
    server = Server(sample, decode, model.eos_ids, score=score)
    command = ppo if "ppo" in method else grpo
    args = (
        f"--model {STORIES} --task {tmp_path}/rows.jsonl --reward length(maximum=20) --run-dir {tmp_path}/run --steps 2"
    )
    args += f" --num-prompts 2 --group-size 2 --max-tokens 8 --num-heldout 2 --eval-every 0 --engine {server.url}"
    args += " --eval-samples 1 --learning-rate 1e-3 --engine-dtype bfloat16"
    command.main(flags.parse(command.Config, None, [*args.split(), *method]))
    sent = len(server.loads()) + len(server.asked_paths("/v1/load_lora_adapter"))
    evaluate.main(evaluate.parse([f"{tmp_path}/run", "--samples", "1", "--engine", server.url]))
    server.stop()
    assert (
        len(server.loads()) + len(server.asked_paths("/v1/load_lora_adapter")) > sent
    )  # it sampled with the run's end
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    deviations = [line["first_ratio_deviation"] for line in lines if line["step"]]
    assert len(deviations) == 2
    assert max(deviations) < 1e-4
    assert [line["correction"] for line in lines if line["step"]] == pytest.approx([1, 1], abs=1e-4)
    assert json.loads((tmp_path / "run/config.json").read_text())["train"]["loss"]["correction"] == "token"
