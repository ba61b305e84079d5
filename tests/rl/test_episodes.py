"""Episodes in training: what is learned from, what ends them, and that a run is the same when it is cut."""

import asyncio
from collections import Counter
from functools import cache, partial

import jax
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, D, V, train_grpo
from rl_helpers import assert_same_runs, compilations_of, open_run, recording
from tiny import digit_prompts, digit_task, random_params, refused, tiny_config

from grpo_jax.config import recipe, with_options
from grpo_jax.data.episodes import ENDINGS as REASONS, Reply, environment, episode_return
from grpo_jax.data.types import Component, rng
from grpo_jax.devices import Mesh, first_devices
from grpo_jax.functional import turn_advantages
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rewards.reward import to_rewards
from grpo_jax.rl.grade import decode_groups, grade_completions, reward_arrays
from grpo_jax.rl.grpo import grpo_method
from grpo_jax.rl.programs import make_programs
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, Forward, noise_of
from grpo_jax.sampling.sampler import Completions
from grpo_jax.scoring import score_completion_tokens, states_of
from grpo_jax.tasks.task import random_reward

CONFIG = recipe(
    steps=4,
    num_prompts=4,
    group_size=4,
    max_tokens=8,
    max_turns=3,
    environment_tokens=6,
    learning_rate=5e-2,
    checkpoint_every=2,
    rollouts_every=1,
)


EOS, PAD = 6, 7
DECODER = decoder_policy(tiny_config(V, intermediate_size=24, initializer_range=0.5))
prompts = partial(digit_prompts, count=4)
TWO_TURNS = with_options(CONFIG, max_turns=2).sampling
INPUTS = completion_numbers(CONFIG.sampling), group_temperatures(CONFIG.sampling), noise_of(0, SAMPLING, 0)


def says_three(examples, completions):
    return [sum(turn.action.count("3") for turn in completion.turns) / 3 for completion in completions]


def encode(text):
    return [int(character) for character in text]


def echo(example, transcript, key):
    """As many tokens as the policy said, up to three, and of three what the key says."""
    said = transcript[-1].action
    count = min(len(said), 3)
    return Reply("".join(str(int(x)) for x in rng(*key).integers(0, V, count)), reward=float(count))


# One environment, so that programs are compiled once: it is the function that is there last.
REPLIES = [echo]
TASK = digit_task(says_three, prompts)
PLAYED = TASK._replace(environment=environment(lambda *arguments: REPLIES[-1](*arguments), encode))
BOTH = {"threes": Component(says_three), "environment": Component(episode_return, 0.5)}


@pytest.fixture(autouse=True)
def echoes():
    REPLIES[:] = [echo]
    PLAYED.environment.messages.clear()


@cache
def programs_of(advantages_of="sum"):
    return make_programs(
        POLICY, PLAYED, with_options(CONFIG, advantages_of=advantages_of), sampler=sampler_of(CONFIG.sampling)
    )


@cache
def sampler_of(sampling):
    return make_sampler(POLICY, PLAYED, sampling)


def sample(reply=echo, sampling=CONFIG.sampling):
    """Completions of the first prompts, in NumPy."""
    REPLIES[:] = [reply]
    return sampler_of(sampling).complete(PARAMS, prompts(0), *INPUTS)


def train_bigrams(path, config=CONFIG, *, reply=echo, **options):
    """Returns the state and the run. The programs know neither the number of steps nor staleness."""
    REPLIES[:] = [reply]
    programs = programs_of(config.loss.advantages_of)._replace(config=config)
    run = open_run(path, config)
    return train_grpo(PLAYED, config, run, programs, **options), run


# ---- what is learned from


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8, "support": "sampler"}])
def test_first_ratio_is_one_over_several_turns(tmp_path, options):
    config = with_options(CONFIG, steps=1, preset="dapo", temperature=1.2, **options)
    run = open_run(tmp_path, config)
    train_grpo(PLAYED, config, run, params=jax.jit(DECODER.init)(jax.random.key(0)), policy=DECODER)
    (line,) = run.lines()
    assert line["turns_mean"] > 1.5
    assert line["length_min"] < line["length_max"]
    assert line["first_ratio_deviation"] < 1e-5
    assert line["first_sampler_mismatch"] == pytest.approx(1, abs=1e-5)


def test_tokens_of_the_environment_have_no_gradient():
    (objective,) = grpo_method(POLICY, CONFIG).terms
    batch, _ = sampler_of(CONFIG.sampling).sample(PARAMS, prompts(0), *INPUTS)
    mask = batch.completion_mask
    batch = batch._replace(
        advantages=np.linspace(-1, 1, mask[..., 0].size, dtype=np.float32).reshape(mask.shape[:2]),
        ref_logprobs=batch.sampler_logprobs - 0.1,
        weights=jax.jit(CONFIG.loss.objective.aggregation)(mask),
    )
    observed = ~np.asarray(batch.completion_mask)
    assert (batch.turn > 0)[observed].any()
    hidden = np.random.default_rng(0).normal(size=(*observed.shape, D)).astype(np.float32)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(hidden):
        states = states_of(POLICY, PARAMS, batch)._replace(hidden=hidden)
        scores = score_completion_tokens(POLICY, PARAMS, batch, states)
        return objective({"policy": PARAMS}, Forward(states, *scores), batch)

    value, gradient = loss(hidden)
    assert (np.asarray(gradient)[observed] == 0).all()
    assert (np.abs(gradient)[~observed].max(-1) > 0).all()
    # Nor is any of their numbers read: other ones change no bit of the loss or of its metrics.
    other, _ = loss(np.where(observed[..., None], hidden + 3, hidden))
    jax.tree.map(np.testing.assert_array_equal, other, value)


def learned_by_turns(path, reward):
    """Takes a step with an advantage for each turn; returns the run, the batch, the rewards and the advantages."""
    config, seen = with_options(CONFIG, advantages_of="turns", steps=1), []
    programs, run = recording(programs_of("turns")._replace(config=config), seen), open_run(path, config)
    train_grpo(PLAYED, config, run, programs, reward=reward)
    return run, *seen[0]


def turn_rewards(batch, rewards):
    """Returns what each turn earned, `[N, G, K]`, after asserting that it is at the turn's last token."""
    of_policy = np.where(batch.completion_mask, batch.turn, 0)
    earned = np.zeros((*of_policy.shape[:2], 3), np.float32)
    at_ends = np.zeros(of_policy.shape, bool)
    for i, j in np.ndindex(of_policy.shape[:2]):
        for number in range(1, of_policy[i, j].max() + 1):
            last = np.flatnonzero(of_policy[i, j] == number)[-1]
            at_ends[i, j, last], earned[i, j, number - 1] = True, rewards.parts[i, j, last]
    np.testing.assert_array_equal(at_ends, ~np.isnan(rewards.parts))
    return earned


def test_turn_advantages_use_rewards_to_come(tmp_path):
    run, batch, rewards, advantages = learned_by_turns(tmp_path, BOTH)
    last = np.asarray(batch.turn).max(-1)
    assert len({*last.ravel().tolist()}) > 1
    by_turn = turn_rewards(batch, rewards)
    np.testing.assert_allclose(by_turn.sum(-1), rewards.rewards, rtol=1e-5)
    expected = np.asarray(jax.jit(turn_advantages)(by_turn, where=np.arange(1, 4) <= last[..., None]))
    for place in np.argwhere(batch.completion_mask):
        of_turn = expected[tuple(place[:2])][batch.turn[tuple(place)] - 1]
        assert advantages[tuple(place)] == pytest.approx(of_turn, abs=1e-6)
    np.testing.assert_allclose(run.lines("rollouts.jsonl")[0]["advantages"], expected[0, :, 0], atol=1e-4)


def test_replacing_the_task_reward_drops_environment_rewards(tmp_path):
    _, batch, rewards, _ = learned_by_turns(tmp_path / "coin", random_reward(0))
    is_last = np.arange(1, 4) == np.asarray(batch.turn).max(-1)[..., None]
    assert {*np.unique(rewards.rewards)} == {0, 1}
    np.testing.assert_array_equal(turn_rewards(batch, rewards), np.where(is_last, rewards.rewards[..., None], 0))
    # Alongside the task's own reward, the environment's count.
    _, batch, rewards, _ = learned_by_turns(tmp_path / "both", BOTH | {"coin": Component(random_reward(0))})
    assert np.any(turn_rewards(batch, rewards)[np.arange(1, 4) < np.asarray(batch.turn).max(-1)[..., None]])


@pytest.mark.parametrize(("weight", "ending"), [(1.0, "done"), (0.5, "turns"), (0.0, "done"), (0.5, "raised")])
def test_turn_rewards_have_the_weight_of_their_sum(weight, ending):
    ids, turn = [3, EOS, 1, 3, EOS, PAD], [1, 1, 1, 2, 2, 0]  # two turns, with a reply of one token between them
    mask = [True, True, False, True, True, False]
    arrays = (np.array(x)[None, None] for x in (False, turn, [2.0, 4.0, np.nan], REASONS.index(ending)))
    completions = Completions(*(np.array(x)[None, None] for x in (ids, mask)), None, None, *arrays)
    reward = BOTH | {"environment": Component(episode_return, weight)}
    graded = grade_completions(prompts(0).take(np.arange(1)), completions, PLAYED, to_rewards(reward))
    threes, of_turns = graded.components["threes"].item(), weight * (ending != "raised") * np.array([2, 4])
    at_ends = reward_arrays(graded, "turns", len(ids), {}).parts[0, 0, [1, 4]]
    np.testing.assert_allclose(at_ends, np.add(of_turns, [0, threes]), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [2, Mesh(data=2), Mesh(tensor=2)], ids=["pmap", "data", "tensor"])
def test_devices_sample_the_same_episodes(shape):
    model = tiny_config(V, num_key_value_heads=2)
    one, many = (
        make_sampler(decoder_policy(model), PLAYED, CONFIG.sampling, devices=where).complete(
            random_params(model), prompts(0), *INPUTS
        )
        for where in map(first_devices, (1, shape))
    )
    assert one.turn.max() == 3
    for name in ("completion_ids", "completion_mask", "turn", "ending", "truncated"):
        np.testing.assert_array_equal(getattr(many, name), getattr(one, name))
    np.testing.assert_allclose(many.sampler_logprobs, one.sampler_logprobs, atol=1e-5)


# ---- what an environment is told, and what it gives


def test_an_environment_reads_what_was_said_and_heard():
    seen = {}

    def reply(example, transcript, key):
        seen[key] = (
            example["prompt"],
            [(turn.action.ids, turn.observation and turn.observation.ids) for turn in transcript],
        )
        return Reply("12", reward=0.25)

    completions = sample(reply)
    played = PLAYED.environment._replace(read=lambda ids: {"role": "tool", "content": f"it says {ids}"})
    texts = decode_groups(completions, PLAYED._replace(environment=played))
    assert {key[:3] for key in seen} == {(0, SAMPLING, 0)}
    assert {key[3] for key in seen} == set(range(16))
    for i, j in np.ndindex(4, 4):
        turns = texts[i][j].turns
        for number in range(len(turns)):
            prompt, told = seen[(0, SAMPLING, 0, 4 * i + j, number)]
            assert prompt == prompts(0).examples[i]["prompt"]
            assert told == [(turn.action.ids, (1, 2)) for turn in turns[:number]] + [(turns[number].action.ids, None)]
        assert [turn.reward for turn in turns] == [0.25] * len(turns)
        heard = {"role": "tool", "content": "it says [1, 2]"}
        said = [{"role": "assistant", "content": turn.action} for turn in turns]
        assert texts[i][j].messages == [x for message in said for x in (message, heard)][:-1]
        own = completions.completion_ids[i, j][completions.completion_mask[i, j]]
        assert [x for turn in turns for x in turn.action.ids] == [x for x in own.tolist() if x != EOS]
        assert "12".join(turn.action for turn in turns) == texts[i][j]
        assert episode_return([{}], [texts[i][j]]) == [0.25 * len(turns)]


def test_ids_are_taken_as_they_are():
    completions = sample(lambda *_: Reply(ids=[EOS, PAD, 1]))
    heard = (completions.turn == 1) & ~completions.completion_mask
    went_on = completions.turn.max(-1) > 1
    assert went_on.any()
    for place in map(tuple, np.argwhere(went_on)):
        assert completions.completion_ids[place][heard[place]].tolist() == [EOS, PAD, 1]


def test_async_replies_of_all_episodes_run_together():
    async def reply(example, transcript, key):
        await asyncio.sleep(rng(*key).random() / 100)
        return echo(example, transcript, key)

    for one, two in zip(sample(reply), sample(), strict=True):
        np.testing.assert_array_equal(one, two)


# ---- what ends an episode


def fails(example, transcript, key):
    raise RuntimeError(f"no answer in turn {len(transcript)}")


ENDINGS = [
    (lambda *_: Reply(done=True), "done"),
    (lambda *_: Reply("1"), "turns"),
    (lambda *_: Reply("1234567"), "environment_tokens"),
    (lambda *_: Reply("1" * 2**21), "environment_tokens"),
    (lambda *_: Reply(ids=[0] * 7), "environment_tokens"),
    (fails, "raised"),
    (lambda *_: "1", "not_a_reply"),
    (lambda *_: Reply(1), "not_a_reply"),
    (lambda *_: Reply("1", reward=float("nan")), "not_a_reply"),
    (lambda *_: Reply("1", reward="2"), "not_a_reply"),
    (lambda *_: Reply("\ud800"), "not_a_reply"),
    (lambda *_: Reply(ids=[V]), "not_a_reply"),
    (lambda *_: Reply(ids=[-1]), "not_a_reply"),
    (lambda *_: Reply(ids=["1"]), "not_a_reply"),
    (lambda *_: Reply(failure="tired"), "not_a_reply"),
]


@pytest.mark.parametrize(("reply", "ending"), ENDINGS)
def test_what_ended_an_episode_is_counted(reply, ending):
    texts = [text for group in decode_groups(sample(reply, TWO_TURNS), PLAYED) for text in group]
    counts = Counter(text.ending.replace(" ", "_") for text in texts)
    assert all(text.truncated or text.ending == "done" for text in texts)
    assert counts.keys() <= {ending, "policy_tokens"}
    assert counts[ending] > 1
    if ending == "raised":
        assert "no answer in turn 1" in PLAYED.environment.messages["raised"]


def test_an_environment_that_only_raises_ends_the_run(tmp_path):
    with refused(r"no answer in turn 1 \(.*test_episodes.py, line \d+, in fails\)"):
        train_bigrams(tmp_path, reply=fails)


FAILING_REPLIES = [
    (fails, "raised", "no answer in turn"),
    (lambda *_: Reply(ids=[1, V]), "not_a_reply", f"a reply has the token {V}"),
]


@pytest.mark.parametrize(("failing", "ending", "words"), FAILING_REPLIES)
def test_failures_are_counted_and_told_once(tmp_path, failing, ending, words):
    def sometimes(example, transcript, key):
        return (echo if key[3] % 4 else failing)(example, transcript, key)

    _, run = train_bigrams(tmp_path, with_options(CONFIG, steps=2), reply=sometimes)
    assert all(line[f"ended_{ending}"] > 0 for line in run.lines())
    assert run.lines()[0]["ended_turns"] > 0
    (line,) = (line for line in run.lines("warnings.jsonl") if "environment" in line["message"])
    assert words in line["message"]


# ---- the same run, however it is cut


def test_runs_cut_within_a_turn_resume_exactly(tmp_path):
    def stops(example, transcript, key):
        if key[2] == 3 and key[4] == 1:  # in the second turn of the last step
            raise KeyboardInterrupt
        return echo(example, transcript, key)

    whole = train_bigrams(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train_bigrams(tmp_path / "cut", reply=stops)
    assert_same_runs(train_bigrams(tmp_path / "cut"), whole)
    counts = compilations_of(whole[1])
    assert counts == [counts[0]] * 4


def test_queued_episodes_keep_turns_and_endings(tmp_path):
    config = with_options(CONFIG, staleness=2, checkpoint_every=1, advantages_of="turns")
    whole = train_bigrams(tmp_path / "whole", config, reward=BOTH)
    train_bigrams(tmp_path / "cut", config, reward=BOTH, until=1)
    assert_same_runs(train_bigrams(tmp_path / "cut", config, reward=BOTH), whole)
    groups = whole[1].lines("rollouts.jsonl")
    for group in groups:
        for turns, rewards in zip(group["turns"], group["turn_rewards"], strict=True):
            assert len(rewards) == max(turns)
            assert None not in rewards[:-1]  # the environment has answered, and gave a number each time
    # The first two steps are sampled by the start, as the first of a run without a queue is.
    _, fresh = train_bigrams(tmp_path / "fresh", with_options(config, staleness=0, steps=1), reward=BOTH)
    first = fresh.lines("rollouts.jsonl")
    assert groups[: len(first)] == first


def test_hosts_that_sample_together_refuse_environments(monkeypatch):
    monkeypatch.setattr("grpo_jax.rl.episodes.num_hosts", lambda devices: 2)
    with refused("set sampler_devices, so that each samples its own groups"):
        make_programs(POLICY, PLAYED, CONFIG)
