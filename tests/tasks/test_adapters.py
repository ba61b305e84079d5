"""Checks environments that were written for Gymnasium and TRL."""

import asyncio
import inspect
import random

import numpy as np
import pytest
from tiny import refused

from grpo_jax.data.episodes import Reply, asked
from grpo_jax.data.types import Completion, Prompt, Turn
from grpo_jax.errors import UsageError
from grpo_jax.rewards.processes import Grader, ProcessOptions
from grpo_jax.tasks import adapters
from grpo_jax.tasks.environments import environment_in_processes, rows_of_factory
from grpo_jax.tasks.tools import schemas_of


def turns(*said, heard="x"):
    """A transcript; nothing is heard yet in its last turn."""
    return [*(Turn(Completion(text), Completion(heard)) for text in said[:-1]), Turn(Completion(said[-1]))]


# ---- Gymnasium


class Countdown:
    """Counts down from a number drawn at the reset. The methods are those of gymnasium.Env."""

    closed = 0

    def reset(self, *, seed=None, options=None):
        self.left = int(np.random.default_rng(seed).integers(3, 9))
        return f"{self.left} left", {}

    def step(self, action):
        self.left -= int(action)
        return f"{self.left} left", float(action == "1"), self.left <= 0, False, {}

    def close(self):
        Countdown.closed += 1


def test_gymnasium_environments_reply_with_their_texts():
    before = Countdown.closed
    rows = adapters.gymnasium_rows(Countdown, range(4))
    assert rows == adapters.gymnasium_rows(Countdown, range(4))
    assert len({row["prompt"] for row in rows}) > 1
    for row in rows:
        left = int(row["prompt"].split()[0])
        reply = adapters.gymnasium_environment(Countdown)
        assert reply(row, turns("1"), (0,)) == Reply(f"{left - 1} left", reward=1.0)
        assert reply(row, turns("1", "2"), (0,)) == Reply(f"{left - 3} left", done=left == 3, reward=0.0)
        assert reply(row, turns(*"1" * left), (0,)).done
    assert Countdown.closed == before + 2 + 3 * 4  # each that was made
    (failed,) = asked(adapters.gymnasium_environment(Countdown), [({"seed": 0}, turns("one"), (0,))])
    assert failed.failure == "raised"


def test_an_environment_without_texts_is_refused():
    other = type("Other", (Countdown,), {"reset": lambda self, *, seed=None, options=None: (np.zeros(2), {})})
    with pytest.raises(UsageError, match="shows ndarray, not text"):
        adapters.gymnasium_rows(other, [0])


# ---- TRL


class Counter:
    """After the example in TRL's documentation: it draws its own task, and scores itself."""

    def reset(self, **kwargs):
        self.count = 0
        self.target = kwargs.get("target") or random.randint(1, 60)
        return f"Count to {self.target}."

    def get_reward(self):
        return float(self.count == self.target)

    def count_on(self, steps: int) -> int:
        """Counts on.

        Args:
            steps: how many.
        """
        if steps < 0:
            raise ValueError("only upwards")
        self.count += steps
        return self.count

    def _hidden(self):
        """No tool."""


def call(steps):
    return f'<tool_call>{{"name": "count_on", "arguments": {{"steps": {steps}}}}}</tool_call>'


def reply_to(*said, example=None):
    return asked(adapters.trl_environment(Counter), [(example or {"target": 7}, turns(*said), (0,))])[0]


def test_methods_are_tools_that_remember():
    (schema,) = schemas_of(adapters.trl_tools(Counter))
    assert schema["function"]["name"] == "count_on"
    assert reply_to(call(3)).text == "3"
    assert reply_to(call(3), call(4)).text == "7"
    assert reply_to(call(3), call(4) + call(2)).text == "7\n9"
    assert reply_to(call(-1)).text == "Error: ValueError: only upwards"
    assert reply_to(call(3), "done") == Reply(done=True)


def test_classes_from_files_play_and_score_in_processes(tmp_path):
    file = tmp_path / "counting.py"
    file.write_text("import random\n" + inspect.getsource(Counter))
    named, module = {"factory": f"{file}:Counter"}, "grpo_jax.tasks.adapters"
    rows = adapters.trl_rows(Counter, [{"target": 7}])
    said = turns(call(3), call(4), heard="3")
    with environment_in_processes(f"{module}:environment_of_factory", list, arguments=named, workers=1) as environment:
        (reply,) = environment.ask(rows, [said], [(0,)])
    assert reply.text == "7"
    with Grader(f"{module}:reward_of_factory", arguments=named, workers=1) as reward:
        assert reward(rows * 2, [Completion("", turns=said), Completion("", turns=said[:1])]) == [1.0, 0.0]
    first = [{"target": number, "prompt": [{"role": "user", "content": "Go. "}]} for number in range(20)]
    assert rows_of_factory(f"{file}:Counter", first) == adapters.trl_rows(Counter, first)
    for name in ("Nobody", "random"):
        with pytest.raises(UsageError, match="environment factory"):
            adapters.load_factory(f"{file}:{name}")
    file.write_text(file.read_text().replace("def get_reward", "def scored"))
    with pytest.raises(UsageError, match="has no get_reward: give --reward"):
        Grader(f"{module}:reward_of_factory", arguments=named, workers=1).__enter__()


RESETS = [
    ("import os; os._exit(4)", "gives no answer: the process ended with exit status 4"),
    ("while True: pass", "gives no answer: no answer within its deadline .*resets.py, line 4"),
    ("raise ValueError('no')", "reset of the environment, called with row 1, raised ValueError: no"),
    ("return 3", "row 1: reset returned int"),
]


@pytest.mark.parametrize(("body", "sentence"), RESETS)
def test_a_reset_that_ends_its_process_is_refused(tmp_path, monkeypatch, body, sentence):
    monkeypatch.setattr(ProcessOptions, "start_deadline", 2.0 if "while" in body else 20.0)
    (tmp_path / "resets.py").write_text(
        f"class Game:\n    def reset(self, a):\n        if a == 1:\n            {body}\n"
    )
    with refused(sentence):
        rows_of_factory(f"{tmp_path}/resets.py:Game", [{"a": 0}, {"a": 1}])


def test_rewards_get_columns_that_the_first_row_lacks():
    def reward(environments, prompts, completions, **columns):
        assert columns == {"target": [None, 7], "number": [1, None]}
        return [0.0, 1.0]

    rows = adapters.trl_rows(Counter, [{"prompt": "", "number": 1}, {"prompt": "", "target": 7}])
    episodes = [Completion("", turns=turns("done"))] * 2
    assert asyncio.run(adapters.trl_reward(Counter, reward)(rows, episodes)) == [0.0, 1.0]


def test_environment_draws_depend_on_rows_not_global_state():
    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    rows = adapters.trl_rows(Counter, [{"prompt": "", "number": number} for number in range(8)])
    assert rows == adapters.trl_rows(Counter, [row["row"] for row in rows])
    targets = [int(row["prompt"].split()[-1].rstrip(".")) for row in rows]
    assert len({*targets}) > 4
    episodes = [Completion("", turns=turns(call(target), "done")) for target in targets]
    assert asyncio.run(adapters.trl_reward(Counter)(rows, episodes)) == [1.0] * 8
    assert asyncio.run(adapters.trl_reward(Counter)(rows, episodes[1:] + episodes[:1])).count(1.0) < 4
    assert random.getstate() == state
    assert (np.random.get_state()[1] == numpy_state).all()


def test_rewards_of_trl_see_environments_messages_and_columns():
    seen = {}

    async def reward(environments, completions, target, **others):
        seen.update(completions=completions, target=target, **others)
        return [environment.count for environment in environments]

    rows = adapters.trl_rows(Counter, [{"prompt": [{"role": "user", "content": "Please. "}], "target": 5}])
    assert rows[0]["prompt"] == [{"role": "user", "content": "Please. Count to 5."}]
    episode = Completion("", turns=turns(call(2), call(1), "done", heard="2"))
    in_template = {**rows[0], "prompt": Prompt("<user>Please. Count to 5.", rows[0]["prompt"])}  # as tasks give it
    assert asyncio.run(adapters.trl_reward(Counter, reward)([in_template], [episode])) == [3]
    assert seen["target"] == [5]
    assert [message["role"] for message in seen["completions"][0]] == ["assistant", "tool"] * 2 + ["assistant"]
    assert seen["prompts"] == [rows[0]["prompt"]]


@pytest.mark.parametrize("factory", [Counter(), dict, lambda: None, type("Bare", (), {"reset": lambda self: None})])
def test_what_is_no_environment_of_trl_is_refused(factory):
    with pytest.raises(UsageError, match="must be a class"):
        adapters.trl_tools(factory)


def raising(error):
    def method(self, **row):
        raise error

    return method


BAD_CLASSES = [
    ({"__init__": raising(ValueError("no\nserver"))}, "a", r"environment_factory cannot be called: .*: no server$"),
    ({"__init__": raising(SystemExit("no server"))}, "a", r"environment_factory cannot be called: .*: no server$"),
    ({"reset": raising(ValueError("no\nserver"))}, "a", r"row 0, raised \w+: no server$"),
    ({"reset": raising(SystemExit("no server"))}, "a", r"row 0, raised \w+: no server$"),
    ({"reset": lambda self: None}, "a", "row 0, raised TypeError: .*prompt"),
    *(({"reset": lambda self, **row: "x"}, prompt, "row 0: reset") for prompt in (None, 3, [], [{"role": "user"}])),
    *(({"reset": lambda self, value=value, **row: value}, "a", "row 0: reset") for value in (3, ["x"])),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("methods", "prompt", "words"), BAD_CLASSES)
def test_unusable_environment_classes_are_refused(methods, prompt, words):
    factory = type("Odd", (Counter,), methods)
    with pytest.raises(UsageError, match=words):
        adapters.trl_rows(adapters.trl_tools(factory) and factory, [{"prompt": prompt}])


def test_async_methods_are_awaited():
    class Slow(Counter):
        async def count_on(self, steps: int) -> int:
            """Counts on.

            Args:
                steps: how many.
            """
            await asyncio.sleep(0.001)
            return super().count_on(steps)

        async def get_reward(self):
            return 0.5

    episodes = [({"target": 7}, turns(*map(call, range(1, k + 1))), (0,)) for k in (1, 2, 3)]
    assert [reply.text for reply in asked(adapters.trl_environment(Slow), episodes)] == ["1", "3", "6"]
    assert asyncio.run(adapters.trl_reward(Slow)([{"target": 7}], [Completion("", turns=turns("done"))])) == [0.5]


class Slow:
    """Draws, waits as long as its row says, and draws again."""

    def reset(self, *, wait, **row):
        self.wait, self.drawn = wait, [random.random()]

    async def draw(self) -> str:
        """Draws."""
        await asyncio.sleep(self.wait)
        self.drawn.append(random.random() + np.random.random())
        return " ".join(map(str, self.drawn))


DRAW = '<tool_call>{"name": "draw", "arguments": {}}</tool_call>'


def test_concurrent_and_cancelled_episodes_do_not_share_randomness():
    environment = adapters.trl_environment(Slow)

    async def cancelled():
        async with asyncio.timeout(0.01):
            await environment({"row": {"wait": 100}}, turns(DRAW), (0,))

    # The second begins within the first and ends after it, and the third ends before both.
    episodes = [({"row": {"wait": wait}}, turns(DRAW), (0,)) for wait in (0.02, 0.04, 0.0)]
    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    together = [reply.text for reply in asked(environment, episodes)]
    assert together == [asked(environment, [episode])[0].text for episode in episodes]
    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())
    assert random.getstate() == state
    assert (np.random.get_state()[1] == numpy_state).all()
