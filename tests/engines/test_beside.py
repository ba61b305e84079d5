"""Servers that sample while the trainer grades and learns: the same bits as in turns, and nothing lost."""

import itertools
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beside_runs import (
    CONFIG,
    COUNT,
    TASK,
    HashingServer,
    assert_same_runs,
    blocking,
    journal_of,
    run_in_process,
    run_of,
)
from tiny import read_lines, refused, says_three

from grpo_jax.data.episodes import Reply, environment
from grpo_jax.errors import Interruption
from grpo_jax.runs.checkpoint import saved_steps
from grpo_jax.runs.folder import WAIT_SHARES
from grpo_jax.runs.journal import open_journal

WORKER = Path(__file__).with_name("one_of_hosts.py")


class Stop(Exception):
    """The exception that ends a run."""


def says_three_until(step):
    """Returns a reward that raises `Stop` at a step, from 1."""
    calls = itertools.count(1)

    def reward(examples, completions):
        if next(calls) == step:
            raise Stop
        return says_three(examples, completions)

    return reward


@pytest.fixture
def servers():
    servers = [HashingServer() for _ in range(2)]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture
def server(servers):
    return servers[0]


def pop_requests(servers):
    """Returns the digests of the requests for completions so far, and forgets them."""
    digests = [digest for server in servers for digest in server.digests()]
    for server in servers:
        server.asked.clear()
    return digests


@pytest.mark.parametrize(("staleness", "rank"), [(1, 0), (2, 2)])
def test_runs_equal_those_in_which_trainer_and_servers_take_turns(servers, tmp_path, staleness, rank):
    turns = run_of(tmp_path / "turns", servers, staleness, rank=rank, change=blocking)
    asked = pop_requests(servers)
    beside, run = run_of(tmp_path / "beside", servers, staleness, rank=rank)
    assert_same_runs((beside, run), turns)
    with run.checkpoints("grpo", keep=2) as checkpoints:
        restored, _ = checkpoints.restore(lambda: jax.tree.map(np.zeros_like, beside))
    jax.tree.map(np.testing.assert_array_equal, restored, turns[0])
    assert sorted(pop_requests(servers)) == sorted(asked)
    assert len({*asked}) == len(asked) == COUNT * (CONFIG.steps + staleness)


def slowed_learning(delay, programs):
    def learn(*args):
        time.sleep(delay())
        return programs.learn(*args)

    return programs._replace(learn=learn)


def slowed_reward(delay):
    def reward(examples, completions):
        time.sleep(delay())
        return says_three(examples, completions)

    return reward


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("runs", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_bits_do_not_depend_on_how_long_anything_takes(servers, tmp_path, rank, runs):
    whole = run_of(tmp_path / "whole", servers, 2, rank=rank)
    for number in range(runs):
        dice = random.Random(number)

        def delay(*_, dice=dice):
            return dice.random() * 0.2

        for server in servers:
            server.delay = delay
        slow = {"change": partial(slowed_learning, delay), "reward": slowed_reward(delay)}
        assert_same_runs(run_of(tmp_path / f"run{number}", servers, 2, rank=rank, **slow), whole)


def test_dynamic_sampling_redraws_with_the_current_policy(servers, tmp_path):
    def reward(examples, completions):
        return [float(text.startswith("3")) for text in completions]

    options = {"max_rollouts": 3, "steps": 4, "reward": reward}
    turns = run_of(tmp_path / "turns", servers, 1, change=blocking, **options)
    assert_same_runs(run_of(tmp_path / "beside", servers, 1, **options), turns)
    assert max(line["rollouts"] for line in turns[1].lines()) > 1


@pytest.mark.parametrize("rank", [0, 2])
def test_episodes_call_their_environment_in_one_thread(servers, tmp_path, rank):
    threads = set()

    def reply(example, transcript, key):
        threads.add(threading.get_ident())
        time.sleep(0.001)
        return Reply(ids=[0, 5, 6][: key[3] % 4], reward=float(len(transcript[-1].action)), done=key[3] == 5)

    task = TASK._replace(environment=environment(reply, None))
    options = {"task": task, "max_tokens": 8, "max_turns": 3, "environment_tokens": 5, "steps": 4, "rank": rank}
    turns = run_of(tmp_path / "turns", servers, 1, change=blocking, **options)
    threads.clear()
    assert_same_runs(run_of(tmp_path / "beside", servers, 1, **options), turns)
    assert len(threads) == 1
    assert max(line["turns_mean"] for line in turns[1].lines()) > 1


@pytest.mark.parametrize("parallel", ["pmap", pytest.param("mesh", marks=pytest.mark.slow)])
def test_trainers_on_several_devices_sample_alongside_training(server, tmp_path, parallel):
    options = {"devices": 2, "parallel": parallel, "fsdp": 2 if parallel == "mesh" else 1, "steps": 4}
    turns = run_of(tmp_path / "turns", [server], 1, rank=2, change=blocking, **options)
    assert_same_runs(run_of(tmp_path / "beside", [server], 1, rank=2, **options), turns)


def test_journals_keep_what_the_last_two_checkpoints_may_need(tmp_path):
    def line(number):
        return {"version": "v", "request": str(number), "ids": [number], "logprobs": [-0.1]}

    journal = open_journal(tmp_path / "journal")
    journal.keep([line(1)])
    journal.turn_page()  # a checkpoint covers the first line
    journal.keep([line(2), line(3)])
    params = {"a": jnp.full((2, 3), 1.5, jnp.bfloat16), "b": jnp.float32(0.25)}
    journal.keep_policy(7, params)
    journal.turn_page()
    journal.keep([line(4)])
    later = open_journal(tmp_path / "journal")
    assert [later.find("v", str(number)) for number in range(1, 5)] == [None, *(([n], [-0.1]) for n in (2, 3, 4))]
    assert later.find("w", "2") is None
    jax.tree.map(np.testing.assert_array_equal, later.policy(7, jax.tree.map(jnp.zeros_like, params)), params)
    with refused("a rollout of the checkpoint needs it"):
        later.policy(8, params)


# ---- whose parameters a server holds


def test_weights_are_loaded_when_the_requests_of_the_version_before_have_ended(server, tmp_path):
    waiting, reply = [], server.reply

    def noted(path, body):
        if path == "/pause?mode=abort":
            waiting.append(len(server.current))
        return reply(path, body)

    server.reply, server.delay = noted, lambda step, number: 0.1
    _, run = run_of(tmp_path, [server], 1)
    assert waiting == [0] * CONFIG.steps
    assert max(line["version_wait_s"] for line in run.lines("times.jsonl")) > 0.05


def test_adapters_of_two_versions_are_side_by_side(server, tmp_path):
    server.delay = lambda step, number: 0.3 if number == 0 else 0.0  # one completion of a rollout takes long
    held, reply = [], server.reply

    def noted(path, body):
        answer = reply(path, body)
        held.append(len(server.adapters))
        return answer

    server.reply = noted
    run_of(tmp_path, [server], 2, rank=2)
    assert server.versions_at_once == 2
    assert max(held) <= 3  # the third is unloaded once its successor has been proven
    assert len(server.adapters) == 1


# ---- what survives


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_run_that_broke_off_asks_only_for_missing_completions(servers, tmp_path, staleness, step):
    whole = run_of(tmp_path / "whole", servers, staleness)
    asked = pop_requests(servers)
    with pytest.raises(Stop):
        run_of(tmp_path / "cut", servers, staleness, reward=says_three_until(step))
    before, kept = pop_requests(servers), journal_of(tmp_path / "cut")
    run = run_of(tmp_path / "cut", servers, staleness)
    assert_same_runs(run, whole)
    again = pop_requests(servers)
    assert not {*again} & {*kept}
    assert {*before, *again} == {*asked}
    assert len(again) == len({*again})
    assert not (tmp_path / "cut/journal").exists()


def test_incomplete_lines_and_other_versions_are_sampled_again(servers, tmp_path):
    whole = run_of(tmp_path / "whole", servers, 1)
    with pytest.raises(Stop):
        run_of(tmp_path / "cut", servers, 1, reward=says_three_until(3))
    file = tmp_path / "cut/journal/completions.jsonl"
    first, second, *others = file.read_text().splitlines()
    other = json.loads(second) | {"version": "other", "ids": [0], "logprobs": [-1.0]}
    file.write_text("\n".join([json.dumps(other), *others, first[:-9]]))
    pop_requests(servers)
    assert_same_runs(run_of(tmp_path / "cut", servers, 1), whole)
    missing = {json.loads(line)["request"] for line in (first, second)}
    assert missing <= {*pop_requests(servers)}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("failure", [None, 400])
def test_a_run_whose_server_failed_is_saved_without_the_missing_rollouts(server, tmp_path, rank, failure):
    whole = run_of(tmp_path / "whole", [server], 2, rank=rank)
    pop_requests([server])
    server.failure = lambda step, number: failure if (step, number) >= (5, 5) else 0  # sampled before step 3
    with pytest.raises(Interruption, match="the engine at"):
        run_of(tmp_path / "cut", [server], 2, rank=rank, engine={"engine_timeout": 3.0})
    # Steps 1 to 5 need rollouts 0 to 4. The checkpoint after step 4 would wait for rollout 5.
    assert saved_steps(tmp_path / "cut/checkpoints/grpo") == [4]
    kept = journal_of(tmp_path / "cut")
    server.failure = lambda step, number: 0
    before = pop_requests([server])
    assert_same_runs(run_of(tmp_path / "cut", [server], 2, rank=rank), whole)
    again = pop_requests([server])
    assert not {*again} & {*kept}
    assert len(before) + len(again) == COUNT * (CONFIG.steps + 2)  # none is asked for twice


def test_long_completions_are_never_dropped(servers, tmp_path):
    whole = run_of(tmp_path / "whole", servers, 1)
    for server in servers:
        server.delay = lambda step, number: 0.5 if number % 5 == 0 else 0.05
    assert_same_runs(run_of(tmp_path / "run", servers, 1), whole)


def test_a_completion_that_takes_longer_than_the_timeout_ends_the_run(server, tmp_path):
    server.delay = lambda step, number: 9.0 if step > 2 else 0.0
    with pytest.raises(Interruption, match=r"has not answered for 2 s"):
        run_of(tmp_path, [server], 1, engine={"engine_timeout": 2.0})


@pytest.mark.parametrize("place", ["reward", "learn"])
def test_an_exception_in_the_trainer_ends_the_threads(server, tmp_path, place):
    server.delay = lambda step, number: 60.0 if step > 2 else 0.0
    calls = itertools.count(1)

    def learn(programs):
        def call(*args):
            if next(calls) == 2:
                raise Stop
            return programs.learn(*args)

        return programs._replace(learn=call)

    fault = {"reward": says_three_until(2)} if place == "reward" else {"change": learn}
    started = time.monotonic()
    with pytest.raises(Stop):
        run_of(tmp_path, [server], 1, **fault)
    assert time.monotonic() - started < 30  # less than the server takes to answer


# ---- what it saves


class Device:
    """A device on which an update takes some seconds, after which its parameters are ready."""

    def __init__(self, seconds):
        self.seconds, self.ends = seconds, 0.0

    def change(self, programs):
        """Returns programs that learn on this device. Their sampler waits for its parameters."""
        sampler = programs.sampler

        def learn(*args):
            self.ends = max(self.ends, time.monotonic()) + self.seconds
            return programs.learn(*args)

        def pop_times():  # the trainer reads the metrics of the update
            self.wait(self.ends)
            return sampler.pop_times()

        def draw(params, *args):
            return sampler.draw(params["policy"], *args)

        slow = sampler._replace(
            draw=draw,
            take=lambda params: {"policy": sampler.take(params), "ready": Ready(self)},
            pop_times=pop_times,
            with_journal=None,
        )
        return programs._replace(sampler=slow, learn=learn)

    def wait(self, ends):
        time.sleep(max(0.0, ends - time.monotonic()))


class Ready:
    """The leaf of parameters that are ready when the updates so far have ended."""

    def __init__(self, device):
        self._device, self._ends = device, device.ends

    def block_until_ready(self):
        self._device.wait(self._ends)


# The shares of a step for which trainer and sampler wait, if each part takes as long as the others.
@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "shares"), [(1, (1 / 3, 1 / 3)), (2, (0, 0))])
def test_a_step_takes_little_longer_than_its_parts_allow(server, tmp_path, staleness, shares):
    """Sampling, grading and learning each wait for .3 seconds."""
    seconds = 0.3
    server.delay = lambda step, number: seconds
    device, reward = Device(seconds), slowed_reward(lambda: seconds)
    options = {"steps": 24, "rollouts_every": 0, "checkpoint_every": 0}
    _, run = run_of(tmp_path, [server], staleness, rank=2, change=device.change, reward=reward, **options)
    lines = run.lines("times.jsonl")[4:-2]
    ideal = max(seconds, 3 * seconds / (staleness + 1))
    assert np.mean([line["step_s"] for line in lines]) <= ideal / 0.8
    waited = [np.mean([line[name] for line in lines]) for name in WAIT_SHARES]
    np.testing.assert_allclose(waited, shares, atol=0.15)


# ---- kills


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("staleness", [1, 2])
def test_killed_runs_resume_bit_for_bit_and_ask_for_no_kept_completion(servers, tmp_path, staleness, rank):
    dice = random.Random(10 * staleness + rank)
    whole = run_of(tmp_path / "whole", servers, staleness, rank=rank)
    for server in servers:
        server.delay = lambda step, number: dice.random() * 0.3
    context, cut = multiprocessing.get_context("forkserver"), tmp_path / "cut"
    context.set_forkserver_preload(["beside_runs"])
    urls = [server.url for server in servers]
    for kill in range(6):
        pop_requests(servers)
        kept, most = {*journal_of(cut)}, dice.randint(1, 3 * COUNT)
        process = context.Process(target=run_in_process, args=(cut, urls, staleness, rank))
        process.start()
        while process.is_alive() and (kill == 5 or sum(len(server.completions()) for server in servers) < most):
            time.sleep(0.002)
        assert process.is_alive() == (kill < 5)
        process.kill()
        process.join()
        while any(server.current for server in servers):  # they still work on what nobody reads
            time.sleep(0.01)
        asked = pop_requests(servers)
        assert not {*asked} & kept
        assert len({*asked}) == len(asked)
    assert process.exitcode == 0
    assert_same_runs(run_of(cut, servers, staleness, rank=rank), whole)  # nothing is left to do


# ---- several hosts


def launch(run, servers, rank):
    """Starts two hosts with one device each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = re.sub(r"(device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"])
    flags += " --xla_cpu_multi_thread_eigen=false --xla_cpu_enable_concurrency_optimized_scheduler=false"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    urls = [server.url for server in servers]

    def begin(index):
        command = [sys.executable, WORKER, address, "2", str(index), str(run), str(rank), *urls]
        log = run.with_name(f"{run.name}-{index}.log").open("a")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    return [begin(index) for index in range(2)]


def logs(run):
    return "".join(file.read_text() for file in run.parent.glob(f"{run.name}-*.log"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_each_host_asks_for_its_groups_and_a_killed_host_ends_the_other(servers, tmp_path, rank):
    for process in launch(tmp_path / "whole", servers, rank):
        assert process.wait(240) == 0, logs(tmp_path / "whole")
    asked = pop_requests(servers)
    assert len({*asked}) == len(asked) == COUNT * (CONFIG.steps + 1)
    run_of(tmp_path / "one", servers, 1, rank=rank)
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "one")]
    # The start samples the first two rollouts. The sums of later updates have another order, and so other hashes.
    assert [line["reward"] for line in lines[0][:2]] == [line["reward"] for line in lines[1][:2]]
    pop_requests(servers)
    cut = tmp_path / "cut"
    for victim in (1, 0):
        kept = {*journal_of(cut)}
        processes = launch(cut, servers, rank)
        while len(requests := [x for server in servers for x in server.digests()]) < 3 * COUNT:
            assert all(process.poll() is None for process in processes), logs(cut)
            time.sleep(0.01)
        processes[victim].kill()
        killed = time.monotonic()
        assert processes[1 - victim].wait(60) != 0
        assert time.monotonic() - killed < 60
        while any(server.current for server in servers):
            time.sleep(0.01)
        assert not {*requests} & kept
        pop_requests(servers)
    kept = {*journal_of(cut)}
    resumed = servers[:1] if rank else servers  # adapters of both hosts fit on one server
    for process in launch(cut, resumed, rank):
        assert process.wait(240) == 0, logs(cut)
    assert not {*pop_requests(servers)} & kept
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
