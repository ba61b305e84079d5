"""Checks async functions that are called in this process: their tasks and connections work in the next call."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax.data.coroutines import run_to_end
from grpo_jax.data.episodes import Reply, environment
from grpo_jax.data.types import Completion, Turn


class Client:
    """Answers through a task of its own, as a connection pool does: it lives in the loop of its first call."""

    def __init__(self):
        self.questions = None

    async def serve(self):
        while True:
            number, answer = await self.questions.get()
            answer.set_result(number + 1)

    async def ask(self, number):
        if self.questions is None:
            self.questions = asyncio.Queue()
            self.server = asyncio.get_running_loop().create_task(self.serve())
        answer = asyncio.get_running_loop().create_future()
        await self.questions.put((number, answer))
        return await asyncio.wait_for(answer, 1)


def replies_of_two_calls():
    """Returns what an environment with a client replies to one call, and to the next."""
    client = Client()

    async def reply(example, transcript, key):
        return Reply(str(await client.ask(example["number"])))

    answers = environment(reply, list)
    transcripts = [[Turn(Completion("?"))]] * 2
    return [answers.ask([{"number": n}, {"number": n + 10}], transcripts, [(0,), (1,)]) for n in (1, 2)]


EXPECTED = [[Reply("2"), Reply("12")], [Reply("3"), Reply("13")]]


def test_async_clients_survive_between_calls():
    async def notebook():
        return replies_of_two_calls()

    assert replies_of_two_calls() == asyncio.run(notebook()) == EXPECTED


def test_pending_client_tasks_end_with_the_program():
    # The collector may find a client that nothing refers to before the program ends, and Python then says so.
    lines = "import asyncio, gc, tests.data.test_coroutines as t\ngc.disable()\n"
    lines += "t.test_async_clients_survive_between_calls()\n"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-X", "dev", "-c", lines]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=True)
    lines = [line for line in ended.stderr.splitlines() if " took " not in line]  # asyncio's word on a busy machine
    assert lines == []


@pytest.mark.parametrize("depth", [1, 3])
def test_nested_calls_do_not_deadlock(depth):
    async def nested(left):
        await asyncio.sleep(0)
        return 1 + run_to_end(nested(left - 1)) if left else 1

    assert run_to_end(nested(depth)) == 1 + depth


def test_a_raising_call_leaves_the_loop_usable():
    async def fails():
        raise ValueError("no")

    async def works():
        return 5

    with pytest.raises(ValueError, match="no"):
        run_to_end(fails())
    assert run_to_end(works()) == 5
