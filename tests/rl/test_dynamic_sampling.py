"""Dynamic sampling: which groups a step learns from, at what cost, at fixed shapes, and again after a crash."""

import jax
import numpy as np
import pytest
from bigrams import TASK as THREES, train_grpo
from rl_helpers import RUN, Stop, assert_same_runs, open_run, run_programs, stopping
from tiny import digit_prompts as prompts

from grpo_jax.config import recipe, with_options
from grpo_jax.data.prompts import Prompts
from grpo_jax.data.types import Span
from grpo_jax.devices import ONE_DEVICE, first_devices, to_devices
from grpo_jax.models.rows.geometry import PromptTokens
from grpo_jax.rl.grade import token_texts
from grpo_jax.rl.source import make_source, select_groups, to_batch, with_spread
from grpo_jax.rl.types import Graded, Rollout
from grpo_jax.sampling.sampler import Completions

CONFIG = with_options(RUN, max_rollouts=5)


def begins_with_three(examples, completions):
    return [float(text.startswith("3")) for text in completions]


TASK = THREES._replace(reward=begins_with_three)


# ---- which groups


def made_up(number: int, rewards, parts=None) -> Rollout:
    """Returns a graded rollout whose every array says which group of which rollout it is of."""
    rewards = np.asarray(rewards, np.float32)
    names = 10 * number + np.arange(len(rewards))
    tokens = np.broadcast_to(names[:, None, None], (*rewards.shape, 2))
    completions = Completions(tokens, tokens >= 0, None, None, rewards > 9)
    examples = [{"prompt": str(name)} for name in names]
    first = Prompts(PromptTokens(tokens[:, 0], tokens[:, 0] >= 0), examples)
    components = {"raw": rewards if parts is None else np.asarray(parts, np.float32)}
    spans = np.empty(rewards.shape, object)
    for i, j in np.ndindex(spans.shape):
        spans[i, j] = (Span(0, 1, float(names[i]), "tokens"),)
    graded = Graded(
        rewards,
        ~np.isnan(rewards),
        components,
        tokens[..., 0],
        completions.truncated,
        names / 100,
        spans,
        {},
        tokens[..., 0],
    )
    return Rollout(first, to_batch(first.tokens, tokens[..., 0] * 1.0, completions), graded=graded)


def sample_until_spread(draw, *, max_rollouts, num_prompts, metric="", **options):
    """Runs the source of dynamic sampling for the first step; returns its rollout and all groups together.

    `draw` takes the number of a draw of the step.
    """
    config, seen = recipe(steps=1, num_prompts=num_prompts, max_rollouts=max_rollouts, **options), []

    def report(everything, step):
        seen.append(everything)
        return everything._replace(metrics={"all": len(everything.prompts.examples)})

    def numbered(policy, index):
        assert policy == "policy"
        return draw(index)  # the first draw has the number of the step, 0, and the others follow behind the last step

    source = with_spread(
        make_source(numbered, None, config),
        numbered,
        lambda rollout: rollout,
        report,
        config,
        ONE_DEVICE,
        metric=metric,
    )
    begun = []
    state, rollout = source.sample((), "policy", 0, lambda: begun.append(True))
    assert (state, len(begun), len(seen)) == ((), 1, 1)
    return rollout, seen[0]


FLAT, SPREAD, NOTHING = [1, 1], [0, 1], [np.nan, np.nan]


DRAWS = [
    ([[SPREAD, SPREAD, SPREAD]], 3, [0, 1, 2], 1),  # nothing to replace: nothing more is sampled
    ([[FLAT, SPREAD, FLAT]], 1, [0, 1, 2], 1),  # no dynamic sampling
    ([[FLAT, SPREAD, FLAT], [SPREAD, SPREAD, SPREAD]], 3, [1, 10, 11], 2),  # the first with spread; 12 is left over
    ([[FLAT, SPREAD, FLAT], [FLAT, FLAT, SPREAD]], 2, [0, 1, 12], 2),  # the cap: the first of the others fills up
    ([[FLAT, NOTHING, FLAT], [SPREAD, FLAT, [np.nan, 1]], [SPREAD, FLAT, SPREAD]], 9, [10, 20, 22], 3),
]


@pytest.mark.parametrize(("rollouts", "limit", "expected", "drawn"), DRAWS)
def test_the_first_groups_with_spread_are_taken(rollouts, limit, expected, drawn):
    calls = []

    def draw(number):
        calls.append(number)
        return made_up(number, rollouts[number])

    rollout, everything = sample_until_spread(draw, max_rollouts=limit, num_prompts=3)
    assert calls == list(range(drawn))
    assert rollout.metrics["rollouts"] == drawn
    assert rollout.metrics["all"] == len(everything.prompts.examples) == len(everything.graded.rewards) == 3 * drawn
    graded = rollout.graded
    for names in (
        rollout.batch.prompt.ids[:, 0],
        rollout.batch.completion_ids[:, 0, 0],
        rollout.batch.temperature[:, 0],
        rollout.prompts.tokens.ids[:, 0],
        [int(example["prompt"]) for example in rollout.prompts.examples],
        graded.lengths[:, 0],
        100 * graded.distinct,
        [of_row[0].reward for of_row in graded.parts[:, 0]],
    ):
        np.testing.assert_array_equal(names, expected)
    wanted = [rollouts[name // 10][name % 10] for name in expected]
    np.testing.assert_array_equal(graded.rewards, np.asarray(wanted, np.float32))
    np.testing.assert_array_equal(graded.components["raw"], graded.rewards)


def test_spread_of_a_component_is_what_counts():
    # A length penalty gives every group spread in the sum; the answers of the first are all the same.
    both = made_up(0, [[0.9, 1.0], [0.1, 1.0]], [FLAT, SPREAD]), made_up(1, [[1, 0], [0, 0]], [SPREAD, FLAT])
    by_sum, _ = sample_until_spread(lambda number: both[number], max_rollouts=2, num_prompts=2)
    assert by_sum.metrics["rollouts"] == 1
    by_raw, _ = sample_until_spread(lambda number: both[number], max_rollouts=2, num_prompts=2, metric="raw")
    assert by_raw.metrics["rollouts"] == 2
    np.testing.assert_array_equal(by_raw.prompts.tokens.ids[:, 0], [1, 10])


def test_differing_spans_count_although_their_sums_are_equal():
    def draw(number):
        rollout = made_up(number, [FLAT, FLAT])  # the spans of a group differ in nothing
        if number == 0:
            halves = Span(0, 1, 0.5, "tokens"), Span(1, 2, 0.5, "tokens")
            rollout.graded.parts[1, 0] = halves
            rollout.graded.parts[1, 1] = halves[0]._replace(reward=1.0), halves[1]._replace(reward=0.0)
        return rollout

    by_sum, _ = sample_until_spread(draw, max_rollouts=2, num_prompts=2)
    assert by_sum.metrics["update_zero_spread_share"] == 1
    by_span, _ = sample_until_spread(draw, max_rollouts=2, num_prompts=2, advantages_of="spans")
    assert by_span.metrics["update_zero_spread_share"] == 0.5
    np.testing.assert_array_equal(by_span.prompts.tokens.ids[:, 0], [0, 1])


@pytest.mark.parametrize(("count", "draws"), [(1, 2), (2, 3)])
def test_groups_on_the_devices_are_those_of_numpy(count, draws):
    devices = first_devices(count)
    batches = [made_up(number, [SPREAD] * 4).batch for number in range(draws)]
    on_devices = [to_devices(batch, devices) for batch in batches]
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    noise = np.random.default_rng(0)
    for _ in range(4):
        groups = np.sort(noise.choice(4 * draws, 4, replace=False))
        chosen = select_groups(on_devices, groups, devices)
        jax.tree.map(lambda x, y, groups=groups: np.testing.assert_array_equal(x, y[groups]), chosen, whole)
        # The next program is compiled for where they are.
        places = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), chosen, on_devices[0])
        assert all(jax.tree.leaves(places))


# ---- in a run


def test_runs_use_groups_with_spread_and_resume_exactly(tmp_path):
    programs, scored = run_programs(), []

    def score(trained, extras, frozen, batch):
        if not isinstance(batch.prompt.ids, jax.core.Tracer):  # the program is traced in advance
            scored.append(batch.prompt.ids.shape)
        return programs.score(trained, extras, frozen, batch)

    whole, cut = (open_run(tmp_path / name, CONFIG) for name in ("whole", "cut"))
    expected = train_grpo(TASK, CONFIG, whole, programs._replace(score=score))
    lines = whole.lines()
    assert max(line["rollouts"] for line in lines) > 1
    assert scored == [(8, 3)] * 6  # the groups that are kept, once a step
    for line in lines:
        assert line["update_zero_spread_share"] == 0 or line["rollouts"] == CONFIG.sampling.max_rollouts
        assert line["tokens"] >= line["rollouts"] * 32  # the cost: all that was sampled counts
    assert any(line["zero_spread_share"] > 0 and line["update_zero_spread_share"] == 0 for line in lines)
    times = whole.lines("times.jsonl")
    assert [line["rollout_tokens"] for line in times] == [line["tokens"] for line in lines]
    assert len({line["compilations"] for line in times}) == 1

    drawn = sum(line["rollouts"] for line in lines)
    with pytest.raises(Stop):
        train_grpo(TASK._replace(prompts=stopping(prompts, drawn - 2)), CONFIG, cut, programs)
    cut = open_run(tmp_path / "cut", CONFIG)
    assert_same_runs((train_grpo(TASK, CONFIG, cut, programs), cut), (expected, whole))


def test_a_cap_that_was_hit_is_said(tmp_path, capsys):
    config = with_options(CONFIG, steps=1, max_rollouts=2)
    run = open_run(tmp_path, config)
    train_grpo(TASK, config, run, run_programs(), reward=lambda examples, texts: [1.0] * len(texts))
    line = run.lines()[0]
    assert (line["rollouts"], line["zero_spread_share"], line["update_zero_spread_share"]) == (2, 1, 1)
    assert "raise max_rollouts" in " ".join(capsys.readouterr().out.split())


# ---- tokens for people


def test_texts_of_tokens_add_up_to_the_completion():
    data = ["▁Tom".encode(), " né".encode()[:-1], "é".encode()[1:], "😀".encode()[:2], "😀".encode()[2:], b"\xff", b"!"]

    def decode(ids):  # drops the first space, as tokenizers of Llama's kind do
        return b"".join(data[i] for i in ids).decode(errors="replace").replace("▁", " ").removeprefix(" ")

    task = TASK._replace(decode=decode, eos_ids=(9,))

    def texts(ids):
        return token_texts(ids, decode([i for i in ids if i != 9]), task)

    assert texts([0, 1, 2, 0, 3, 4, 9]) == ["Tom", "", " né", " Tom", "", "😀", ""]
    assert texts([0, 3, 9]) == ["Tom", "\ufffd", ""]  # cut off within a character
    assert texts([3, 4, 5]) == ["", "😀", "\ufffd"]
    assert texts([]) == []
    assert texts([9]) == [""]
    for ids in np.random.default_rng(0).integers(0, 7, (50, 8)).tolist():
        assert "".join(texts(ids)) == decode(ids)
