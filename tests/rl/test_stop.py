"""Stop texts in training: what rewards read, turns of episodes, devices, resumed runs and the trainer."""

import functools
from pathlib import Path

import numpy as np
import pytest
from bigrams import PARAMS, POLICY, train_grpo
from rl_helpers import assert_same_runs, open_run
from tiny import digit_prompts, digit_stop, digit_task, digits, refused, save_tiny_model, says_three

from experiments.tasks import arithmetic
from grpo_jax import GRPOTrainer
from grpo_jax.config import recipe, with_options
from grpo_jax.data.episodes import Reply, environment
from grpo_jax.devices import ONE_DEVICE, Mesh, first_devices
from grpo_jax.rl.grade import decode_groups, token_texts
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, noise_of

STOP, EOS, END = ("12", "3"), 6, 5  # END closes a turn that a stop text ended
CONFIG = recipe(
    steps=4,
    num_prompts=4,
    group_size=4,
    max_tokens=8,
    learning_rate=5e-2,
    staleness=1,
    checkpoint_every=2,
    rollouts_every=1,
)
prompts = functools.partial(digit_prompts, count=4)
TASK = digit_task(says_three, prompts)._replace(stop=digit_stop(*STOP))
INPUTS = completion_numbers(CONFIG.sampling), group_temperatures(CONFIG.sampling), noise_of(0, SAMPLING, 0)


def sampled(task, config=CONFIG, devices=ONE_DEVICE):
    return make_sampler(POLICY, task, config.sampling, devices=devices).complete(PARAMS, prompts(0), *INPUTS)


def end_of(ids):
    """The number of tokens until a text of digits contains a stop text, or None."""
    return next((n for n in range(1, len(ids) + 1) if any(text in digits(ids[:n]) for text in STOP)), None)


def test_rewards_read_the_text_before_a_stop_text():
    out, whole = sampled(TASK), sampled(TASK._replace(stop=None))
    texts, kinds = decode_groups(out, TASK), set()
    for (i, j), ended in np.ndenumerate(~out.truncated):
        ids = whole.completion_ids[i, j][whole.completion_mask[i, j]].tolist()
        length, text = end_of(ids) or len(ids), texts[i][j]
        assert out.completion_ids[i, j][out.completion_mask[i, j]].tolist() == ids[:length]
        assert ended == (end_of(ids) is not None or ids[-1] == EOS)
        assert text.ids == tuple(x for x in ids[:length] if x != EOS)
        assert (text.stopped, text.truncated) == (end_of(ids) is not None, not ended)
        assert text == digits(text.ids).split("3")[0].split("12")[0]
        assert "".join(token_texts(ids[:length], text, TASK)) == text
        kinds.add((text.stopped, text.truncated))
    assert len(kinds) == 3  # stopped, ended by EOS, cut


def test_stop_texts_end_each_turn_of_an_episode():
    config = with_options(CONFIG, max_turns=3, environment_tokens=6, max_tokens=12)

    def encode(text, is_open=False):
        return [*([END] if is_open else []), *map(int, text)]

    task = TASK._replace(environment=environment(lambda *_: Reply("1"), encode))
    out = sampled(task, config)
    turns = 0
    for text in (text for group in decode_groups(out, task) for text in group):
        for turn in text.turns:
            end = end_of(turn.action.ids)
            assert turn.action == digits(turn.action.ids).split("3")[0].split("12")[0]
            assert turn.action.stopped == (end is not None)
            assert end in (None, len(turn.action.ids))
            assert not (turn.action.stopped and turn.action.truncated)
            if turn.observation is not None:  # the reply closes a turn that has no end of its own
                assert turn.observation.ids == ((END, 1) if turn.action.stopped else (1,))
        parts = [digits(turn.action.ids) + (turn.observation or "") for turn in text.turns[:-1]]
        assert text == "".join(parts) + text.turns[-1].action  # only the last stop text is cut off
        turns += sum(turn.action.stopped for turn in text.turns[1:])
    assert turns > 4  # a text does not end the next turn too, and states begin anew


@pytest.mark.parametrize("shape", [2, Mesh(data=2), Mesh(tensor=2)], ids=["pmap", "data", "tensor"])
def test_devices_stop_at_the_same_tokens(shape):
    one, many = sampled(TASK), sampled(TASK, devices=first_devices(shape))
    np.testing.assert_array_equal(one.completion_ids, many.completion_ids)
    np.testing.assert_array_equal(one.truncated, many.truncated)
    assert not one.truncated.all()


def test_resumed_runs_with_stop_texts_are_identical(tmp_path):
    programs = make_programs(POLICY, TASK, CONFIG)
    whole = open_run(tmp_path / "whole", CONFIG)
    parts = open_run(tmp_path / "parts", CONFIG)
    state = train_grpo(TASK, CONFIG, whole, programs)
    half = with_options(CONFIG, steps=2)
    train_grpo(TASK, half, parts, programs._replace(config=half))
    assert_same_runs((state, whole), (train_grpo(TASK, CONFIG, parts, programs), parts))
    groups = whole.lines("rollouts.jsonl")
    assert all("3" not in text and "12" not in text for group in groups for text in group["completions"])


def test_the_trainer_stops_at_texts_of_its_tokenizer(tmp_path):
    folder, seen = save_tiny_model(tmp_path / "model", arithmetic.TEXT), []

    def reward(rows, completions):
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    options = {"steps": 1, "group_size": 8, "max_tokens": 8, "run_dir": tmp_path / "run"}
    GRPOTrainer(folder, reward, stop=["1", "22"], **options).train(["1+1=", "2+2="])
    assert any(text.stopped for text in seen)
    assert all("1" not in text and "22" not in text for text in seen)
    assert Path(tmp_path / "run/config.json").read_text().count('"22"') == 1
    with refused("stop is '1'"):
        GRPOTrainer(folder, reward, stop="1", **options)
