"""Checks the page of a run in a browser: its drawings, its controls, and that the console stays empty."""

import json
import math
import re

import pytest
from browser import CHROMIUM, DRIVER, open_browser
from pages import EPISODE, HOSTILE, everywhere, group, make_run, metrics

from grpo_jax.report import write_report

pytestmark = pytest.mark.skipif(not (DRIVER and CHROMIUM), reason="needs chromium and chromedriver")
VISIBLE = HOSTILE.translate({0xD800: 0xFFFD, 0: 0x2400, 13: 0x240D})  # as a page can show it


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture
def show(browser, tmp_path):
    """Writes a run and opens its page; afterwards there is no error in the console."""

    def open_run(lines=(), groups=(), *, dark=False, width=1280, warnings=(), times=(), **files):
        folder = tmp_path / "run"
        make_run(folder, lines, groups, **files)
        for name, rows in {"warnings": [{"message": text} for text in warnings], "times": times}.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        browser.open(write_report(folder), dark=dark, width=width)
        return browser

    yield open_run
    assert browser.errors() == []


def attributes(browser, selector, name):
    return browser.run(
        "return [...document.querySelectorAll(arguments[0])].map(x => x.getAttribute(arguments[1]))", selector, name
    )


def drawn(browser, metric):
    """Points of the lines of a chart, by phase, in pixels; it must be unfolded."""
    paths = attributes(browser, f'figure[data-metric="{metric}"] path.line:not(.key *)', "d")
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)] for path in paths]


def choose(browser, name, value):
    """Moves a control of the completions."""
    script = "const c = document.querySelector(`[name=${arguments[0]}]`); c.value = arguments[1];"
    browser.run(script + "c.dispatchEvent(new Event('input', { bubbles: true }))", name, value)


def unfold(browser, title):
    """Opens or closes what has this title, by a click."""
    script = "[...document.querySelectorAll('summary')].find(s => s.textContent.startsWith(arguments[0])).click()"
    browser.run(script, title)


def press(browser, selector, key):
    script = "document.querySelector(arguments[0]).focus(); document.activeElement.dispatchEvent(new KeyboardEvent("
    browser.run(script + "'keydown', { key: arguments[1], bubbles: true, cancelable: true }))", selector, key)


def titles(browser, shown_only=True):
    visible = ".filter(x => x.checkVisibility())" if shown_only else ""
    return browser.run(
        f"return [...document.querySelectorAll('figure')]{visible}.map(x => x.querySelector('strong').textContent)"
    )


def rl_run():
    """A run of GRPO with a warm start and a control."""
    shared = {"loss": 0.0, "clip_high": 0.0}
    lines = [{"phase": "warm", "step": step, "entropy": 1 / step, "nll": 2 / step} for step in range(1, 40)]
    for phase in ("grpo", "control"):
        for step in range(1, 31):
            numbers = {"reward": step / 40 if phase == "grpo" else 5.0 + step % 2, "kl": step / 100}
            numbers |= {"entropy": 1 / step, "length_mean": 7 + step % 3, "zero_spread_share": step / 60}
            lines.append({"phase": phase, "step": step, **numbers, **shared, "grad_norm": float(step % 5)})
            if step % 10 == 0:
                lines[-1] |= {"heldout_avg": step / 50, "heldout_avg_low": step / 60, "heldout_avg_high": step / 45}
    groups = [group(step, phase=phase, text=f"{phase} {step}") for phase in ("grpo", "control") for step in (1, 11, 21)]
    results = {"before": {"avg": 0.1}, "after": {"avg": 0.5}, "control": {"avg": 0.1}, "params_sha256": "f0"}
    return {"lines": lines, "groups": groups, "results": results}


@pytest.mark.parametrize("dark", [False, True])
def test_first_screen_shows_main_curves_and_fits_phones(show, dark):
    page = show(**rl_run(), dark=dark)
    assert titles(page) == [
        *("Reward", "Held-out score", "KL to the reference", "Entropy", "Length", "Groups with spread")
    ]
    assert page.texts(".results th[scope=col]") == ["before", "after", "control"]
    bottom = page.run("return document.querySelector('#curves > .charts').getBoundingClientRect().bottom")
    assert bottom < 900
    (reward,) = drawn(page, "reward")  # without the coin toss
    assert len(reward) == 30
    assert reward[0][1] > reward[-1][1]  # it rises
    assert [len(points) for points in drawn(page, "entropy")] == [30, 30]  # the warm start is not on this axis
    assert drawn(page, "1 \u2212 zero_spread_share")[0][0][1] < drawn(page, "1 \u2212 zero_spread_share")[0][-1][1]
    colours = page.run(
        "return [document.body, document.querySelector('figcaption span')].map(x => getComputedStyle(x).color)"
    )
    assert (min(int(n) for n in re.findall(r"\d+", colours[0])) > 128) == dark
    page = show(**rl_run(), dark=dark, width=390, warnings=["x" * 300])  # of a phone
    assert page.run("return document.documentElement.scrollWidth") == 390
    sizes = page.run(
        "return [...document.querySelectorAll('body *')].filter(x => x.checkVisibility() && x.textContent.trim())"
        ".map(x => parseFloat(getComputedStyle(x).fontSize))"
    )
    assert min(sizes) >= 11


def test_the_first_screen_has_a_curve_per_reward(show):
    run = rl_run()
    for line in run["lines"]:
        if line["phase"] == "grpo":
            parts = {"reward_form": line["reward"] / 2, "reward_correct_std": line["reward"] / 4}
            line |= {**parts, "reward_std": 0.1, "reward_form_std": 0.2, "reward_correct_std_std": 0.3}
    page = show(**run)
    assert titles(page)[:4] == ["Reward", "Reward form", "Reward correct_std", "Held-out score"]
    assert page.run("return document.querySelector('#curves > .charts').getBoundingClientRect().bottom") < 1100


def test_other_metrics_are_folded_and_flat_ones_apart(show):
    page = show(**rl_run(), times=[{"phase": "grpo", "step": 1, "rollout_s": 0.5}])
    shown = titles(page)
    names = dict(zip(page.texts("#curves summary b"), page.texts("#curves summary span"), strict=True))
    assert names["Optimizer"] == "grad_norm"
    assert names["Times and memory"] == "rollout_s"
    assert names["Flat curves"] == "loss 0; clip_high 0"
    assert names["Rewards and groups"] == "zero_spread_share, reward of a coin toss"
    assert sorted(titles(page, False)) == sorted(
        [*shown, "grad_norm", "rollout_s", "loss", "clip_high", "zero_spread_share", "reward of a coin toss", "nll"]
    )
    assert drawn(page, "grad_norm") == []
    unfold(page, "Optimizer")
    assert titles(page) == [*shown, "grad_norm"]
    assert len(drawn(page, "grad_norm")[0]) == 30
    unfold(page, "Optimizer")
    assert titles(page) == shown
    unfold(page, "Rewards and groups")
    (coin,) = drawn(page, "reward of a coin toss")
    assert len(coin) == 30
    unfold(page, "Flat curves")
    assert len({y for _, y in drawn(page, "loss")[0]}) == 1
    page = show(metrics(1, 2, kl=0.5, length_mean=3.0))  # what decides is named first
    assert titles(page) == ["Reward"]
    assert page.texts("#curves summary")[0] == "Flat curvesKL to the reference 0.5; Length 3"


def test_phases_can_be_shown_and_hidden(show):
    page = show(**rl_run())
    assert page.texts(".phases label") == ["grpo, step 30", "control, step 30", "warm, step 39"]
    assert page.run("return [...document.querySelectorAll('.phases input')].map(x => x.checked)") == [True, True, False]
    page.run("document.querySelectorAll('.phases input')[2].click()")
    assert [len(points) for points in drawn(page, "entropy")] == [39, 30, 30]
    for i in range(3):
        page.run("document.querySelectorAll('.phases input')[arguments[0]].click()", i)
    assert drawn(page, "entropy") == []


def test_selecting_a_step_updates_charts_and_completions(show):
    page = show(**rl_run())
    assert page.texts("figure[data-metric=reward] b") == ["0.75"]
    press(page, "figure[data-metric=kl] svg", "ArrowLeft")
    assert page.texts("figure[data-metric=reward] b") == ["0.725"]
    press(page, "figure[data-metric=kl] svg", "Home")
    assert page.texts("figure[data-metric=heldout_avg] b") == ["\u2013", "\u2013"]  # not yet evaluated
    assert attributes(page, "figure[data-metric=kl] svg.chart", "aria-valuetext") == ["step 1: 0.01, 0.01"]
    press(page, "figure[data-metric=kl] svg", "Enter")
    assert page.texts(".tools output") == ["1 (1 of 3)"]
    assert page.texts(".card .text") == ["grpo 1"] * 2
    x, y = page.run(
        "const r = document.querySelector('figure[data-metric=kl] svg').getBoundingClientRect();"
        "return [Math.round(r.right - 13), Math.round(r.top + 60)]"
    )
    pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
    moves = [{"type": "pointerMove", "x": place, "y": y, "duration": 0} for place in (x - 100, x)]
    clicks = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
    page.ask("/actions", actions=[{**pointer, "actions": moves + clicks}])
    assert page.texts("figure[data-metric=heldout_avg] b") == ["0.6", "0.6"]
    assert page.texts(".tools output") == ["21 (3 of 3)"]


def test_slider_moves_through_a_phases_steps(show):
    page = show(**rl_run())
    assert page.texts(".tools output") == ["21 (3 of 3)"]  # the last one of the phase that the run is for
    choose(page, "step", "0")
    assert page.texts(".tools output") == ["1 (1 of 3)"]
    assert page.texts(".card .text") == ["grpo 1"] * 2
    choose(page, "phase", "control")
    assert page.texts(".card .text") == ["control 21"] * 2
    unfold(page, "Prompt 1")
    choose(page, "step", "1")
    assert page.texts(".card .text") == ["control 11"] * 2
    assert not page.run("return document.querySelector('.group').open")  # it stays folded


def test_cards_say_what_a_completion_earned(show):
    page = show(metrics(1), [group(1, text="Tom sat.")])
    assert page.texts(".group > dl dd") == ["72", "3"]
    assert page.texts(".card dd") == ["1", "+0.5", "3", "\u2013", "-0.5", "3"]  # the component is the reward
    assert attributes(page, ".card", "class") == ["card up", "card down"]
    assert page.texts(".card .cut") == ["cut off"]
    assert page.texts(".group summary")[0].endswith("all rewards are 1")  # a critic gave advantages
    choose(page, "order", "by reward")
    assert page.texts(".card h4") == ["Completion 1 ", "Completion 2 cut off"]
    page = show(metrics(1), [group(1, advantages=[0.0, 0.0])])
    assert "all rewards are 1: nothing to learn from" in page.texts(".group summary")[0]
    graded = group(1, rewards=[None, 0.5, 2.0], size=3, components={"a": [1.0, 2.0, 3.0], "b": [0.0, 0.0, 1.0]})
    page = show(metrics(1), [graded])
    choose(page, "order", "by reward")
    assert page.texts(".card h4") == ["Completion 3 ", "Completion 2 cut off", "Completion 1 "]
    assert page.texts(".card dl:nth-of-type(2)")[0] == "a3b1"
    assert "rewards 0.5 to 2" in page.texts(".group summary")[0]


def test_tokens_are_shaded_by_probability_or_advantage(show):
    probabilities = [[-0.1, -0.5, -1.0, -2.0, -4.0, None], [-1]]
    page = show(metrics(1), [group(1, text="Tom had\na cat sat.", logprobs=probabilities)])
    assert page.texts(".text i") == []
    choose(page, "colour", "probability")
    assert page.texts(".card:first-child i") == ["Tom", " had", "\u21b5\na", " cat", " sat.", "\u27e8end\u27e9"]
    assert attributes(page, ".card:first-child i", "class") == ["p0", "p1", "p2", "p3", "p4", "p0"]
    assert page.texts(".card:last-child i")[-1] == "\u25e6"  # it was cut off
    assert attributes(page, ".card i", "title")[0] == "probability 0.9, advantage +0.5"
    press(page, ".text", "ArrowRight")
    press(page, ".text", "ArrowRight")
    assert page.texts("#token") == ['" had"  probability 0.61, advantage +0.5']
    page.run("document.querySelector('h1').click()")
    assert page.texts("#token") == [""]
    choose(page, "colour", "advantage")
    assert {*attributes(page, ".card:first-child i", "class")} == {"g1"}
    assert {*attributes(page, ".card:last-child i", "class")} == {"m1"}


PARTS = [
    ({}, {}, "Blue"),
    ({"explained_variance": 0.5}, {}, "Tokens have the mean"),
    ({}, {"distillation": "k1"}, "The t"),
]


@pytest.mark.parametrize(("more", "config", "words"), PARTS)
def test_note_says_what_advantages_leave_out(show, more, config, words):
    page = show(metrics(1, **more), [group(1)], config=config)
    choose(page, "colour", "advantage")
    assert page.texts(".tools p")[0].startswith(words)


def test_spans_stand_below_their_completion(show):
    spans = {"spans": [[[0, 2], [2, 3]], []], "span_rewards": [[0.5, -1.0], []]}
    line = group(1, text="Tom <b> sat.", **spans, span_advantages=[[0.25, -1.75], []])
    page = show(metrics(1), [line])
    assert page.texts(".card td")[1:] == ["0.5", "0.25", "Tom <b>", "-1", "-1.75", " sat."]
    assert page.texts(".card summary b") == ["2 spans"]
    choose(page, "colour", "advantage")
    assert attributes(page, ".card:first-child i", "class") == ["g1", "g1", "m2", "m2"]  # EOS belongs to the last span
    del line["span_advantages"]  # where sums were compared
    assert show(metrics(1), [line]).texts(".card td")[-3:] == ["-1", "\u2013", " sat."]


def test_turns_and_environment_replies_are_displayed_separately(show):
    page = show(metrics(1), [group(1, **EPISODE)])
    assert page.texts(".card .text") == ["7", ">", "a", "<b>"]
    assert attributes(page, ".card .text", "class") == ["text", "text heard", "text", "text"]
    names = dict(zip(page.texts(".card dt"), page.texts(".card dd"), strict=True))  # the last of each name
    assert (names["turn"], names["advantage"], names["ended by"]) == ("1", "-0.7", "policy tokens")
    assert page.texts(".card dd").count("0.8187") == 1  # exp(-(0.1 + 0.3) / 2)
    assert {"+0.7", "-0.2"} <= {*page.texts(".card dd")}
    choose(page, "colour", "advantage")
    assert attributes(page, ".card i", "class") == ["g1", "g1", "m1", "m1", "m1", "m1"]
    assert page.texts(".card i") == ["7", "\u25e6", "a", "\u27e8end\u27e9", "<b", ">"]


def test_long_completions_fold_and_cut_ones_are_marked(show, monkeypatch):
    page = show(metrics(1), [group(1, text="word " * 400)])
    height = "return document.querySelector('.card .text').clientHeight"
    folded = page.run(height)
    page.run("document.querySelector('.more input').click()")
    assert page.run(height) > folded
    assert show(metrics(1), [group(1)]).texts(".more") == []
    monkeypatch.setattr("grpo_jax.report.MAX_BYTES", 70_000)
    page = show(metrics(1, 2), [group(step, text="ab " * 3000, size=4) for step in (1, 2)])
    (about,) = {*page.texts(".card > p.soft")}
    assert int(re.findall(r"\d+", about)[0]) + len(page.texts(".card .text")[0]) == 9_000
    assert "The rest is in rollouts.jsonl." in page.texts("#rollouts > p.soft")[0]
    choose(page, "colour", "probability")
    assert "\u27e8end\u27e9" not in page.texts(".card i")


def test_nothing_of_a_run_becomes_an_element(show):
    shape = (
        "return [...document.querySelectorAll('*')].map(x => [x.tagName, ...[...x.attributes].map(a => a.name)].join())"
    )
    harmless = show(**everywhere("x" * len(HOSTILE)), warnings=["x" * len(HOSTILE)]).run(shape)
    page = show(**everywhere(HOSTILE), warnings=[HOSTILE])
    assert page.run(shape) == harmless
    for selector in (".card .text", ".prompt", ".warnings li", ".phases bdi", ".results th[scope=col]"):
        assert {text.removesuffix(", step 2") for text in page.texts(selector)} == {VISIBLE}
    assert page.texts("dt").count(VISIBLE) == 2  # option, column
    assert VISIBLE in page.texts(".results dd")
    assert VISIBLE in titles(page, False)
    choose(page, "colour", "probability")
    assert "".join(page.texts(".card:first-child i")) == VISIBLE + "\u27e8end\u27e9"


def test_curves_have_gaps_bands_and_lone_points(show):
    lines = metrics(1, 2, 3, 4, 5, kl=0.5)
    lines[1]["kl"] = None
    lines[2]["kl"], lines[3]["kl"] = 0.75, math.nan
    lines[0] |= {"heldout_avg": 0.25, "heldout_avg_low": 0.125, "heldout_avg_high": 0.5}
    lines[3] |= {"heldout_avg": 0.75, "heldout_avg_low": 0.5, "heldout_avg_high": 1.0}
    page = show(lines, results={"after": {"avg": 0.5, "avg_low": 0.25, "avg_high": 0.75}})
    (path,) = attributes(page, "figure[data-metric=kl] path.line:not(.key *)", "d")
    assert (path.count("M"), path.count("h5"), "L" in path) == (3, 3, False)
    (band,) = [path for path in attributes(page, "path.band", "d") if path]
    assert len(re.findall(r"[\d.]+,[\d.]+", band)) == 4
    assert page.texts(".results td")[1:] == ["0.500[0.250, 0.750]"]
    assert page.texts("figure[data-metric=heldout_avg] b") == ["0.75 (step 4)"]
    assert "0.750[0.500, 1.000] (step 4)" in page.texts("#curves td")
    assert titles(page, False) == ["Reward", "Held-out score", "KL to the reference"]


def test_ticks_are_round_numbers(show):
    ticks = {
        "reward": ([2, 2.0001], ["1.8", "2.0", "2.2"]),
        "kl": ([0.85, 0.87], ["0.85", "0.86", "0.87"]),  # which is not constant
        "entropy": ([0, 2e-7], ["0", "1e-7", "2e-7"]),
        "length_mean": ([63.8, 64], ["62", "64", "66"]),  # no part of a token
        "tokens": ([1e6, 3e6], ["1000000", "2000000", "3000000"]),
    }
    page = show(
        [{"phase": "grpo", "step": i} | {name: values[i] for name, (values, _) in ticks.items()} for i in (0, 1)]
    )
    labels = {name: page.texts(f"figure[data-metric={name}] text.y") for name in ticks}
    assert labels == {name: expected for name, (_, expected) in ticks.items()}


def test_axes_have_units(show):
    units = {
        "rollout_tokens_per_s": "tokens a second",
        "rollout_s": "seconds",
        "heldout_length": "tokens",
        "heldout_ended_share": "share",
        "zero_spread_share": "share of groups",
        "heldout_reward_share": "mean of prompts",
        "ungraded_answer_no_number": "completions",
        "loss": "",
    }
    page = show([{"phase": "grpo", "step": step} | dict.fromkeys(units, 0.5 * step) for step in (1, 2)])
    assert {name: page.texts(f"figure[data-metric={name}] .unit") for name in units} == {
        name: [unit] for name, unit in units.items()
    }


METHODS = [
    ("grpo", {"length_mean": 4}, ["nats a token", "mean of prompts"]),
    ("kto", {}, ["nats a completion", "mean"]),
]


@pytest.mark.parametrize(("method", "more", "units"), METHODS)
def test_units_are_those_of_the_method(show, method, more, units):
    lines = [{"phase": method, "step": s, "kl": 0.5 * s, "heldout_accuracy": 0.2 * s} | more for s in (1, 2)]
    page = show(lines, config={"method": method})
    names = ("kl", "heldout_accuracy")
    assert [page.texts(f"figure[data-metric={name}] .unit") for name in names] == [[unit] for unit in units]


def test_supervised_runs_show_their_loss_first(show):
    lines = [{"phase": "dpo", "step": s, "loss": 1 / s, "accuracy": s / 9, "margin": float(s)} for s in range(1, 9)]
    lines[-1] |= {"heldout_loss": 0.5, "heldout_accuracy": 0.5}
    page = show(lines)
    assert titles(page) == ["Held-out loss", "Loss", "Held-out accuracy", "Accuracy", "Margin"]
    assert page.texts("#rollouts p") == ["This run has no rollouts."]


def test_unusual_results_and_empty_runs_are_displayed(show):
    page = show(metrics(1), results={"before": {"a": 1, "b": None}, "after": {"c": 2.5}, "sha": "f0"})
    assert page.texts(".results th[scope=row]") == ["a", "b", "c"]
    assert page.texts(".results td")[1:] == ["1", "\u2013", "\u2013", "\u2013", "\u2013", "2.5"]
    assert "f0" in page.texts(".results dd")
    nested = show(metrics(1), results={"runs": [{"reward": 1}]})
    assert json.loads(nested.texts(".results .text")[0]) == {"runs": [{"reward": 1}]}
    assert len(attributes(nested, "figure[data-metric=reward] path.line:not(.key *)", "d")) == 1
    for results in (None, {}):
        empty = show(config={}, results=results)
        assert empty.texts("#curves p") == ["This run has no metrics yet."]
        assert empty.texts("#rollouts p") == ["This run has no rollouts."]
