"""Episodes in training: what is learned from, what ends them, and that a run is the same when it is cut."""

import asyncio
from functools import cache, partial

import jax
import numpy as np
import pytest
from bigrams import PARAMS, POLICY, V, train_grpo
from rl_helpers import assert_close, assert_same_runs, compilations_of, loss_of, open_run
from tiny import digit_prompts, digit_task, random_params, refused, tiny_config

from grpo_jax.config import recipe, with_options
from grpo_jax.data.episodes import Reply, environment, episode_return
from grpo_jax.data.types import Component, rng
from grpo_jax.devices import Mesh
from grpo_jax.functional import turn_advantages
from grpo_jax.models.policy import decoder_policy
from grpo_jax.rl.grade import decode_groups
from grpo_jax.rl.grpo import grpo_method, make_programs
from grpo_jax.rl.pieces import lengths_of, packed
from grpo_jax.rl.scorers import score_completion_tokens
from grpo_jax.rl.source import completion_numbers, group_temperatures, make_sampler
from grpo_jax.rl.types import SAMPLING, Forward, noise_of
from grpo_jax.rl.update import accumulate_grads
from grpo_jax.runs.checkpoint import params_sha256
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
DECODER_PARAMS = jax.jit(DECODER.init)(jax.random.key(0))
prompts = partial(digit_prompts, count=4)
INPUTS = completion_numbers(CONFIG.sampling), group_temperatures(CONFIG.sampling), noise_of(0, SAMPLING, 0)


def says_three(examples, completions):
    return [sum(turn.action.count("3") for turn in completion.turns) / 3 for completion in completions]


def encode(text):
    return [int(character) for character in text]


TASK = digit_task(says_three, prompts)


def echo(example, transcript, key):
    """As many tokens as the policy said, up to three, and of three what the key says."""
    said = transcript[-1].action
    count = min(len(said), 3)
    return Reply("".join(str(int(x)) for x in rng(*key).integers(0, V, count)), reward=float(count))


def with_environment(reply, **changes):
    return TASK._replace(environment=environment(reply, encode), **changes)


ECHO = with_environment(echo)


@cache
def sampled():
    """A batch of episodes with what a loss needs, and the same episodes on the host."""
    batch, completions = make_sampler(DECODER, ECHO, CONFIG.sampling).sample(DECODER_PARAMS, prompts(0), *INPUTS)
    mask = completions.completion_mask
    batch = batch._replace(
        advantages=np.linspace(-1, 1, mask[..., 0].size, dtype=np.float32).reshape(mask.shape[:2]),
        ref_logprobs=batch.sampler_logprobs - 0.1,
        weights=jax.jit(CONFIG.loss.objective.aggregation)(mask),
    )
    return batch, jax.device_get(completions)


def sample(task):
    return make_sampler(POLICY, task, CONFIG.sampling).complete(PARAMS, prompts(0), *INPUTS)


@cache
def programs_of_echo():
    return make_programs(POLICY, ECHO, CONFIG)


def train_bigrams(task, run, config=CONFIG):
    """What learns is compiled once: it knows no environment."""
    programs = programs_of_echo()._replace(sampler=make_sampler(POLICY, task, config.sampling))
    return train_grpo(task, config, run, programs)


# ---- what is learned from


def test_first_ratio_is_one_over_three_turns_of_any_lengths(tmp_path):
    config = with_options(CONFIG, steps=2, preset="dapo", minibatches=2, temperature=1.2)
    run = open_run(tmp_path, config)
    train_grpo(ECHO, config, run, params=DECODER_PARAMS, policy=DECODER)
    for line in run.lines():
        assert line["turns_mean"] > 1.5
        assert line["length_min"] < line["length_max"]
        assert line["first_ratio_deviation"] < 1e-5
        assert line["first_sampler_mismatch"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_an_episode_of_one_turn_gives_the_numbers_of_a_completion(tmp_path):
    done = with_environment(lambda example, transcript, key: Reply(done=True))
    alone = with_options(CONFIG, max_turns=1, environment_tokens=0)
    actual = []
    for name, task in {"alone": TASK, "done": done}.items():
        run = open_run(tmp_path / name, alone)
        state = train_grpo(task, alone, run)
        actual.append((params_sha256(state.params), run.lines()))
    (sha, lines), (other_sha, others) = actual
    assert sha == other_sha
    for line, other in zip(lines, others, strict=True):
        assert other["turns_mean"] == 1
        assert other["ended_done"] == 16
        assert {name: other[name] for name in line} == line


def test_tokens_of_the_environment_have_no_gradient():
    (batch, completions), (objective,) = sampled(), grpo_method(DECODER, CONFIG).terms
    heard = ~completions.completion_mask
    assert (completions.turn > 0)[heard].any()
    hidden = jax.jit(DECODER.hidden)(DECODER_PARAMS, batch.prompt_ids, batch.prompt_mask, batch.completion_ids)

    def loss(hidden):
        scores = score_completion_tokens(DECODER, DECODER_PARAMS, batch, hidden=hidden)
        return objective({"policy": DECODER_PARAMS}, Forward(hidden, scores.logprobs, scores.entropy), batch)

    gradient = np.asarray(jax.jit(jax.grad(lambda x: loss(x)[0]))(hidden))
    assert (gradient[heard] == 0).all()
    assert (np.abs(gradient[~heard]).max(-1) > 0).all()
    # Nor is any of their numbers read: other ones change no bit of the loss or of its metrics.
    other = np.where(heard[..., None], np.asarray(hidden) + 3.0, hidden)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.jit(loss), (hidden, other)))


@pytest.mark.slow
def test_packed_episodes_have_the_gradient_of_padded_ones():
    (batch, _), loss = sampled(), loss_of(grpo_method(DECODER, CONFIG))

    @partial(jax.jit, static_argnums=1)
    def gradients(params, packs):
        pieces = packed(lengths_of(batch.completion_mask), batch.completion_mask.shape[-1], 4) if packs else ()
        return accumulate_grads(lambda params, piece: loss({"policy": params}, piece), params, batch, pieces)[:2]

    assert_close(*(gradients(DECODER_PARAMS, packs) for packs in (True, False)), atol=1e-6)


def learned_by_turns(task, folder, **options):
    """Takes a step with an advantage for each turn; returns the run, the batch, the rewards and the advantages."""
    config, seen = with_options(CONFIG, advantages_of="turns", steps=1), []
    programs = make_programs(POLICY, task, config)
    advantage = jax.jit(lambda rewards, batch: programs.method.advantage(rewards, batch, 0.0))

    def recorded(state, frozen, start, batch, rewards, clock):
        seen.append(jax.device_get((batch, rewards, advantage(rewards, batch))))
        return programs.learn(state, frozen, start, batch, rewards, clock)

    run = open_run(folder, config)
    train_grpo(task, config, run, programs._replace(learn=recorded), **options)
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


def test_advantages_by_turn_are_those_of_what_is_still_to_come(tmp_path):
    task = ECHO._replace(reward={"threes": Component(says_three), "environment": Component(episode_return, 0.5)})
    run, batch, rewards, (learned, logged, _) = learned_by_turns(task, tmp_path)
    last = np.asarray(batch.turn).max(-1)
    assert len({*last.ravel().tolist()}) > 1
    by_turn = turn_rewards(batch, rewards)
    np.testing.assert_allclose(by_turn.sum(-1), rewards.rewards, rtol=1e-5)
    taken = np.arange(1, 4) <= last[..., None]
    expected = np.asarray(jax.jit(turn_advantages)(by_turn, where=taken))
    for place in np.ndindex(batch.turn.shape):
        if batch.completion_mask[place]:
            of_turn = expected[place[:2]][batch.turn[place] - 1]
            assert learned.advantages[place] == logged[place] == pytest.approx(of_turn, abs=1e-6)
    by_group = run.lines("rollouts.jsonl")[0]
    np.testing.assert_allclose(by_group["advantages"], expected[0, :, 0], atol=1e-4)


def test_a_reward_in_place_of_the_tasks_is_in_place_of_the_environments(tmp_path):
    _, batch, rewards, _ = learned_by_turns(ECHO, tmp_path / "coin", reward=random_reward(0))
    is_last = np.arange(1, 4) == np.asarray(batch.turn).max(-1)[..., None]
    assert {*np.unique(rewards.rewards)} == {0, 1}
    np.testing.assert_array_equal(turn_rewards(batch, rewards), np.where(is_last, rewards.rewards[..., None], 0))
    # Alongside the task's own reward, the environment's count.
    both = {"own": Component(says_three), "coin": Component(random_reward(0))}
    _, batch, rewards, _ = learned_by_turns(ECHO, tmp_path / "both", reward=both)
    assert np.any(turn_rewards(batch, rewards)[np.arange(1, 4) < np.asarray(batch.turn).max(-1)[..., None]])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, Mesh(data=2), Mesh(tensor=2)], ids=["pmap", "data", "tensor"])
def test_devices_sample_the_same_episodes(devices):
    shape = tiny_config(V, num_key_value_heads=2)
    one, many = (
        make_sampler(decoder_policy(shape), ECHO, CONFIG.sampling, devices=where).complete(
            random_params(shape), prompts(0), *INPUTS
        )
        for where in (1, devices)
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

    task = with_environment(reply, reward=episode_return)
    completions = sample(task)
    texts = decode_groups(completions, task)
    assert {key[:3] for key in seen} == {(0, SAMPLING, 0)}
    assert {key[3] for key in seen} == set(range(16))
    for i, j in np.ndindex(4, 4):
        turns = texts[i][j].turns
        for number in range(len(turns)):
            prompt, told = seen[(0, SAMPLING, 0, 4 * i + j, number)]
            assert prompt == prompts(0).examples[i]["prompt"]
            assert told == [(turn.action.ids, (1, 2)) for turn in turns[:number]] + [(turns[number].action.ids, None)]
        assert [turn.reward for turn in turns] == [0.25] * len(turns)
        own = completions.completion_ids[i, j][completions.completion_mask[i, j]]
        assert [x for turn in turns for x in turn.action.ids] == [x for x in own.tolist() if x != EOS]
        assert "12".join(turn.action for turn in turns) == texts[i][j]
        assert episode_return([{}], [texts[i][j]]) == [0.25 * len(turns)]


def test_ids_are_taken_as_they_are():
    completions = sample(with_environment(lambda example, transcript, key: Reply(ids=[EOS, PAD, 1])))
    heard = (completions.turn == 1) & ~completions.completion_mask
    went_on = completions.turn.max(-1) > 1
    assert went_on.any()
    for place in map(tuple, np.argwhere(went_on)):
        assert completions.completion_ids[place][heard[place]].tolist() == [EOS, PAD, 1]


def test_async_replies_of_all_episodes_run_together():
    async def reply(example, transcript, key):
        await asyncio.sleep(rng(*key).random() / 100)
        return echo(example, transcript, key)

    for one, two in zip(sample(with_environment(reply)), sample(ECHO), strict=True):
        np.testing.assert_array_equal(one, two)


# ---- what ends an episode


def fails(example, transcript, key):
    raise RuntimeError(f"no answer in turn {len(transcript)}")


REPLIES = [echo]
ANY = with_environment(lambda *given: REPLIES[-1](*given), reward=episode_return)  # of the function that is there last
TWO_TURNS = with_options(CONFIG, max_turns=2).sampling
PLAYER = make_sampler(POLICY, ANY, TWO_TURNS)


@pytest.mark.parametrize(
    ("reply", "ending"),
    [
        (lambda *_: Reply(done=True), "done"),
        (lambda *_: Reply("1"), "turns"),
        (lambda *_: Reply("1234567"), "environment_tokens"),
        (lambda *_: Reply("1" * 2**21), "environment_tokens"),
        (lambda *_: Reply(ids=[0] * 10**6), "environment_tokens"),
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
    ],
)
def test_what_ended_an_episode_is_counted(reply, ending):
    REPLIES[:] = [reply]
    given = completion_numbers(TWO_TURNS), group_temperatures(TWO_TURNS), noise_of(0, SAMPLING, 0)
    texts = decode_groups(PLAYER.complete(PARAMS, prompts(0), *given), ANY)
    counts = {}
    for text in (text for group in texts for text in group):
        counts[text.ending.replace(" ", "_")] = counts.get(text.ending.replace(" ", "_"), 0) + 1
        assert text.truncated or text.ending == "done"
    assert counts.keys() <= {ending, "policy_tokens"}
    assert counts[ending] > 1
    if ending == "raised":
        assert "no answer in turn 1" in ANY.environment.messages["raised"]


@pytest.mark.parametrize(
    ("task", "policy", "changes", "words"),
    [
        (ECHO, POLICY, {"environment_tokens": 0}, "environment_tokens is 0"),
        (TASK, POLICY, {}, "max_turns and environment_tokens"),
        (ECHO, POLICY._replace(decoder=None), {}, "no decoder"),
    ],
)
def test_what_cannot_work_is_refused(task, policy, changes, words):
    with refused(words):
        make_programs(policy, task, with_options(CONFIG, **changes))


def test_an_environment_that_only_raises_ends_the_run(tmp_path):
    with refused(r"no answer in turn 1 \(.*test_episodes.py, line \d+, in fails\)"):
        train_bigrams(with_environment(fails), open_run(tmp_path, CONFIG))


@pytest.mark.parametrize(
    ("failing", "ending", "words"),
    [
        (fails, "raised", "no answer in turn"),
        (lambda *_: Reply(ids=[1, V]), "not_a_reply", f"a reply has the token {V}"),
    ],
)
def test_failures_are_counted_and_told_once(tmp_path, failing, ending, words):
    def sometimes(example, transcript, key):
        return (echo if key[3] % 4 else failing)(example, transcript, key)

    run = open_run(tmp_path, CONFIG)
    train_bigrams(with_environment(sometimes), run, with_options(CONFIG, steps=2))
    assert all(line[f"ended_{ending}"] > 0 for line in run.lines())
    assert run.lines()[0]["ended_turns"] > 0
    (line,) = (line for line in run.lines("warnings.jsonl") if "environment" in line["message"])
    assert words in line["message"]


# ---- the same run, however it is cut


def test_a_run_that_is_cut_within_a_turn_ends_with_the_same_bytes(tmp_path):
    def resume(name, task):
        run = open_run(tmp_path / name, CONFIG)
        return train_bigrams(task, run), run

    def stops(example, transcript, key):
        if key[2] == 3 and key[4] == 1:  # in the second turn of the last step
            raise KeyboardInterrupt
        return echo(example, transcript, key)

    whole = resume("whole", ECHO)
    with pytest.raises(KeyboardInterrupt):
        resume("cut", with_environment(stops))
    assert_same_runs(resume("cut", ECHO), whole)
    counts = compilations_of(whole[1])
    assert counts == [counts[0]] * 4


@pytest.mark.parametrize("advantages_of", [pytest.param("sum", marks=pytest.mark.slow), "turns"])
def test_episodes_that_wait_in_the_queue_keep_their_turns_and_endings(tmp_path, advantages_of):
    config = with_options(CONFIG, staleness=2, checkpoint_every=1, advantages_of=advantages_of)
    task = ECHO._replace(reward={"threes": Component(says_three), "environment": Component(episode_return, 0.5)})
    programs = make_programs(POLICY, task, config)

    def resume(name, until=None):
        run = open_run(tmp_path / name, config)
        return train_grpo(task, config, run, programs, until=until), run

    (state, whole), _ = resume("whole"), resume("cut", until=1)
    assert_same_runs(resume("cut"), (state, whole))
    for group in whole.lines("rollouts.jsonl"):
        for turns, rewards in zip(group["turns"], group["turn_rewards"], strict=True):
            assert len(rewards) == max(turns)
            assert None not in rewards[:-1]  # the environment has answered, and gave a number each time
    # The first two steps are sampled by the start, as the first of a run without a queue is.
    fresh = open_run(tmp_path / "fresh", with_options(config, staleness=0, steps=1))
    train_grpo(task, with_options(config, staleness=0, steps=1), fresh)
    first, others = fresh.lines("rollouts.jsonl"), whole.lines("rollouts.jsonl")
    assert [others[i] for i in range(len(first))] == first
