"""Runs whose servers sample alongside training. A completion is a hash of the parameters and of the request's seed."""

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
from server import Server, is_proof
from tiny import GOLDEN, digit_prompts, digit_task, says_three

from grpo_jax.config import EngineOptions, recipe, with_options
from grpo_jax.data.types import hash_values
from grpo_jax.devices import ONE_DEVICE
from grpo_jax.engines.sampler import make_score, sampler_of, seed_of
from grpo_jax.models import huggingface
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.files import peft
from grpo_jax.models.files.weights import load_params
from grpo_jax.models.params.lora import add_adapters
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.source import completion_numbers
from grpo_jax.rl.types import SAMPLING, noise_of
from grpo_jax.runs.checkpoint import params_sha256
from grpo_jax.runs.folder import RunFolder
from grpo_jax.training.phases import train

V, EOS, MAX_TOKENS = 8, 6, 4
SHAPE = ModelConfig(V, 8, 16, 1, 2, 1, 4, initializer_range=0.5)
POLICY = decoder_policy(SHAPE)
TASK = digit_task(says_three, partial(digit_prompts, count=4))
PRETRAINED = huggingface.Pretrained(SHAPE, {}, None, (EOS,), GOLDEN / "llama")
CONFIG = recipe(
    steps=6,
    num_prompts=4,
    group_size=4,
    max_tokens=MAX_TOKENS,
    learning_rate=5e-2,
    rollouts_every=1,
    checkpoint_every=4,
)
NUMBERS = completion_numbers(CONFIG.sampling).ravel()
COUNT = NUMBERS.size  # completions of a rollout
# The step and the number of the completion that a seed is made of.
PLACES = {
    seed_of(noise_of(CONFIG.seed, SAMPLING, step), n, turn): (step, int(n))
    for step in range(40)
    for n in NUMBERS
    for turn in (1, 2, 3)
}


@cache
def params_of(rank: int = 0):
    params = jax.jit(POLICY.init)(jax.random.key(0))
    return add_adapters(params, jax.random.key(1), rank=rank, alpha=4.0) if rank else params


@cache
def programs_of(staleness: int):
    return make_programs(POLICY, TASK, with_options(CONFIG, staleness=staleness))


class HashingServer(Server):
    """A server of these completions, which may keep its answers back.

    Attributes:
      delay: (step, number of the completion) -> seconds that the answer takes.
      failure: (step, number of the completion) -> the HTTP status of the answer, None to hang up, or 0 to answer.
      current: the version of each request that is being answered.
      versions_at_once: the largest number of versions among them so far.
    """

    def __init__(self) -> None:
        self.delay: Callable[[int, int], float] = lambda step, number: 0.0
        self.failure: Callable[[int, int], int | None] = lambda step, number: 0
        self.current: list[str] = []
        self.versions_at_once = 1
        self._sizes = threading.Lock()
        super().__init__(self.hash, TASK.decode, (EOS,), score=self.score_text)

    @cache  # noqa: B019
    def read(self, folder: str):
        params, path = params_of(), Path(folder)
        if (path / "adapter_config.json").exists():
            return peft.load_adapter(path, SHAPE, params)
        return load_params(path, SHAPE) if folder else params

    @cache  # noqa: B019
    def digest(self, folder: str) -> str:
        return hashlib.sha256(
            b"".join(file.read_bytes() for file in sorted(Path(folder).glob("*.safetensors")))
        ).hexdigest()

    def score_text(self, folder, ids, temperature):
        return score_program()(self.read(folder), ids, temperature)()

    def hash(self, folder, body):
        dice, most = np.random.default_rng([int(self.digest(folder)[:8], 16), body["seed"]]), body["max_tokens"]
        ids = dice.integers(0, EOS, dice.integers(1, min(most, MAX_TOKENS) + 1)).tolist()
        ids = ids if len(ids) == most else [*ids, EOS]
        return ids, (-dice.random(len(ids))).tolist()

    def reply(self, path, body):
        if path != "/v1/completions" or is_proof(body):
            return super().reply(path, body)
        with self._sizes:
            place, version = PLACES[body["seed"]], body["model"]
            self.current.append(version)
            self.versions_at_once = max(self.versions_at_once, len({*self.current}))
        time.sleep(self.delay(*place))
        failure = self.failure(*place)
        answer = super().reply(path, body) if failure == 0 else failure
        with self._sizes:
            self.current.remove(version)
        return answer

    def digests(self):
        """Returns the digest of each request for a completion that it answered, as journals have it."""
        bodies = [dict(body) for body in self.completions()]
        return [
            hash_values({name: x for name, x in body.items() if name not in ("model", "ignore_eos")}) for body in bodies
        ]


@cache
def score_program():
    return make_score(POLICY, ONE_DEVICE)


def sampler_at(servers, config, task=TASK, **options):
    options = EngineOptions(tuple(server if isinstance(server, str) else server.url for server in servers), **options)
    return sampler_of(options, PRETRAINED, task, config, note=print)


def run_of(
    folder,
    servers,
    staleness,
    *,
    rank=0,
    change=lambda programs: programs,
    reward=None,
    engine=None,
    task=TASK,
    **options,
):
    """Returns the end of a run, and its folder.

    Args:
      folder: The folder.
      servers: Servers, or their addresses.
      staleness: The staleness.
      rank: The rank of adapters. Default: all parameters are trained.
      change: Changes the programs.
      reward: Replaces the reward.
      engine: Options of the engine.
      task: The task.
      **options: Options of the run.
    """
    if task is TASK and not options:
        programs = programs_of(staleness)
    else:
        programs = make_programs(POLICY, task, with_options(CONFIG, staleness=staleness, **options))
    config = programs.config
    run = RunFolder(folder, dataclasses.asdict(config))
    programs = change(programs._replace(sampler=sampler_at(servers, config, task, **(engine or {}))))
    params = {"policy": params_of(rank)}
    return train(params, task, config, run, programs, phase="grpo", reward=reward), run


def blocking(programs):
    """Lets the trainer's thread sample, so that nothing happens at the same time."""
    return programs._replace(sampler=programs.sampler._replace(at_once=0))


def assert_same_runs(one, other):
    """Asserts that two pairs of (state, run) have bitwise equal parameters and lines."""
    assert params_sha256(one[0]) == params_sha256(other[0])
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (one[1].path / name).read_bytes() == (other[1].path / name).read_bytes(), name


def journal_of(folder):
    """Returns the digests of the requests whose completions are in the journal of a run."""
    files = folder.glob("journal/completions*.jsonl")
    lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line)["request"] for line in lines if line.endswith("\n")]


def run_in_process(folder, urls, staleness, rank):
    """Runs in this process, which may be killed. Its output goes to a file."""
    with folder.with_suffix(".log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
        run_of(folder, urls, staleness, rank=rank)
