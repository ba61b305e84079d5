"""Checks the examples of agents against scripted policies."""

from pathlib import Path

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_jax.config import SamplingConfig
from grpo_jax.data.types import Completion, Prompt, Turn
from grpo_jax.models.chat import Chat
from grpo_jax.rewards.worker import load_function
from grpo_jax.tasks.agents import open_agent
from grpo_jax.tasks.chat_api import request_values

FOLDER = Path(__file__).parents[2] / "examples/agents"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"


def chat():
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    of_bytes = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(bytes_)}, []))
    of_bytes.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = tokenizers.decoders.ByteLevel()
    of_bytes.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return Chat(tokenizer, (256,))


def play(name, row, actions):
    """Returns the messages of the prompt, the texts that the policy read then, and the last reply."""
    writer, read = chat(), []
    values = request_values(SamplingConfig(), ())
    with open_agent(load_function("agent", f"{FOLDER / name}.py:run"), writer, values) as opened:
        (begun,) = opened.begin([row])
        kwargs = {"tools": begun["tools"]} if begun["tools"] else {}
        example = begun | {"prompt": Prompt("", begun["prompt"], kwargs)}
        for turn in range(len(actions)):
            transcript = [Turn(Completion(action)) for action in actions[: turn + 1]]
            (reply,) = opened.ask([example], [transcript], [(0, 0, 0, 0, turn)])
            if reply.ids:
                read.append(writer.tokenizer.decode(reply.ids))
    return begun["prompt"], read, reply


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_examples_are_short_and_do_not_import_this_package(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 40
    assert "import grpo_jax" not in text
    assert "from grpo_jax" not in text


def test_plain_http_plays_a_game():
    prompt, read, reply = play("plain_http", {"most": 120, "number": 37}, ["I say 80", "what?", "5", "37"])
    assert "0 to 120" in prompt[0]["content"]
    assert read == [f"<user>{words}<end><assistant>" for words in ("Lower.", "Write a number.", "Higher.")]
    assert (reply.done, reply.reward) == (True, 1.4)


def test_the_openai_client_calls_a_tool():
    pytest.importorskip("openai")
    call = '<tool_call>{"name": "multiply", "arguments": {"a": %d, "b": 23}}</tool_call>'
    row = {"prompt": "How much is 17 * 23?", "answer": "391"}
    prompt, read, reply = play("with_openai", row, [f"Let me see {call % 17}{call % 2}", "It is 391."])
    assert prompt == [{"role": "user", "content": row["prompt"]}]
    assert read == ["<tool>391<end><tool>46<end><assistant>"]
    assert (reply.done, reply.reward) == (True, 1.0)
