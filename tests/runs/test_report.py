"""The page of a run: what it holds, what it leaves out, and that text of the run stays text."""

import html.parser
import json
import math
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

import grpo_jax.runs.report
from grpo_jax.runs import terminal
from grpo_jax.runs.folder import RunFolder
from grpo_jax.runs.report import MAX_BYTES, write_report

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 \ud800 \0 \r &lt; \" ' <!--groups--> ]]> \u202e \U0001f600"
VISIBLE = HOSTILE.translate({0xD800: 0xFFFD, 0: 0x2400, 13: 0x240D})  # as it can stand on a page


class Page(html.parser.HTMLParser):
    """The elements of a page, each with its attributes and the text directly in it."""

    VOID = frozenset({"meta", "input", "br", "img", "link"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.comments = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if tag not in self.VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self.open:
            self.open[-1][2].append(data)

    def handle_comment(self, data):
        self.comments.append(data)

    def find(self, tag=None, kind=None, **attributes):
        return [
            (found, "".join(text))
            for name, found, text in self.elements
            if tag in (None, name)
            and (kind is None or kind in (found.get("class") or "").split())
            and all(found.get(key) == value for key, value in attributes.items())
        ]

    def texts(self, *args, **kwargs):
        return [text for _, text in self.find(*args, **kwargs)]

    def lines(self, metric):
        """Points of a chart, by phase."""
        names = [index for index, element in enumerate(self.elements) if element[0] == "figure"]
        for start in names:
            if "".join(self.elements[start + 2][2]) == metric:
                return json.loads(self.elements[start][1]["data-lines"])
        raise AssertionError(f"no chart of {metric}")


def group(step, *, phase="grpo", text="Tom had a cat.", size=2, **more):
    """A line of rollouts.jsonl, complete."""
    tokens = [[*re.findall(r"\s?\S+|\s", text), ""] for _ in range(size)]
    return {
        "phase": phase,
        "step": step,
        "prompt": "Once",
        "columns": {"answer": "72", "level": 3},
        "completions": ["".join(row) for row in tokens],
        "rewards": [1.0, *[None] * (size - 1)],
        "components": {"answer": [1.0, *[None] * (size - 1)]},
        "advantages": [0.5 - i for i in range(size)],
        "lengths": [len(row) for row in tokens],
        "truncated": [i % 2 == 1 for i in range(size)],
        "tokens": tokens,
        "logprobs": [[-0.1 * i for i in range(len(row))] for row in tokens],
        **more,
    }


def metrics(*steps, phase="grpo", **values):
    return [{"phase": phase, "step": step, "reward": step / 10, **values} for step in steps]


def page_of(folder, lines=(), groups=(), *, config=None, results=None, phases=()):
    """Writes a run and its report, and parses that."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"steps": 3, "model": "tiny"} if config is None else config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if groups:
        (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in groups))
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))
    path = write_report(folder, phases)
    assert path == folder / "report.html"
    assert path.stat().st_size <= MAX_BYTES
    return Page(path.read_text("utf-8"))


def test_cards_say_what_a_completion_earned_and_hold_its_tokens(tmp_path):
    page = page_of(tmp_path / "run", metrics(1, 2), [group(1), group(2, text="Tom sat.")])
    opened = [attributes for attributes, _ in page.find("details", "step") if "open" in attributes]
    assert [(step["data-phase"], step["data-step"]) for step in opened] == [("grpo", "2")]  # the last, without scripts
    first, second = page.find("li", "card")[:2]
    assert (first[0]["data-reward"], second[0]["data-reward"]) == ("1.0", "null")
    assert ("up" in first[0]["class"], "down" in second[0]["class"]) == (True, True)
    assert page.texts("dd")[-10:] == ["72", "3", "1", "+0.5", "3", "1", "–", "-0.5", "3", "–"]
    assert page.texts("strong", "cut") == ["cut off"] * 2
    (attributes, text) = page.find("div", "text")[-1]
    assert text == "Tom sat."
    assert json.loads(attributes["data-tokens"]) == {"lengths": [3, 5, 0], "cents": [0, 10, 20]}
    assert "nothing to learn from" in page.texts("p", "soft")[-1]  # of the rewards that apply all are equal


def test_spans_stand_below_their_completion(tmp_path):
    spans = {"spans": [[[0, 2], [2, 3]], []], "span_rewards": [[0.5, -1.0], []]}
    line = group(1, text="Tom <b> sat.", **spans, span_advantages=[[0.25, -0.75], []])
    page = page_of(tmp_path / "run", metrics(1), [line])
    assert page.texts("td")[-6:] == ["0.5", "0.25", "Tom <b>", "-1", "-0.75", " sat."]
    assert "2 spans" in page.texts("summary")
    del line["span_advantages"]  # where sums were compared
    assert page_of(tmp_path / "summed", metrics(1), [line]).texts("td")[-3:] == ["-1", "–", " sat."]


def test_older_files_have_no_tokens_components_or_columns(tmp_path):
    names = ("phase", "step", "prompt", "completions", "rewards", "advantages", "lengths")
    page = page_of(tmp_path / "run", metrics(1), [{name: group(1)[name] for name in names}])
    assert page.texts("div", "text") == ["Tom had a cat."] * 2
    assert not any("data-tokens" in attributes for attributes, _ in page.find("div", "text"))


def test_tokens_whose_texts_are_not_the_completion_keep_their_own(tmp_path):
    odd = group(1, completions=["é", "é"], tokens=[["\ud83d", "\ufffd", ""]] * 2, logprobs=[[-1, None], []])
    (first, text), (second, _) = page_of(tmp_path / "run", metrics(1), [odd]).find("div", "text")
    assert text == "é"
    assert json.loads(first["data-tokens"]) == {
        "lengths": [1, 1, 0],
        "cents": [100, None, None],
        "text": "\ufffd\ufffd",
    }
    assert json.loads(second["data-tokens"])["cents"] == [None] * 3


EPISODE = {
    "completions": ["7>a", "<b>"],
    "tokens": [["7", "", ">", "a", ""], ["<b", ">"]],
    "logprobs": [[-0.1, -0.3, 0.0, -0.5, 0.0], [-1.0, -1.0]],
    "turns": [[1, 1, -1, 2, 2], [1, 1]],
    "turn_rewards": [[0.0, 0.5], [None]],
    "turn_advantages": [[0.7, -0.2], [-0.7]],
    "endings": ["done", "policy tokens"],
    "rewards": [0.5, 0.0],
}


def test_turns_are_shown_one_by_one_and_the_environment_apart(tmp_path):
    page = page_of(tmp_path / "run", metrics(1), [group(1, **EPISODE)])
    texts = page.find("div", "text")
    assert [text for _, text in texts] == ["7", ">", "a", "<b>"]
    assert ["heard" in attributes["class"] for attributes, _ in texts] == [False, True, False, False]
    assert "data-tokens" not in texts[1][0]
    assert [json.loads(texts[i][0]["data-tokens"])["cents"] for i in (0, 2, 3)] == [[10, 30], [50, 0], [100, 100]]
    assert ["data-cut" in attributes for attributes, _ in texts] == [False, False, False, True]
    told = dict(zip(page.texts("dt"), page.texts("dd"), strict=True))  # the last of each name
    assert (told["turn"], told["advantage"], told["ended by"]) == ("1", "-0.7", "policy tokens")
    assert page.texts("dd").count("0.8187") == 1  # exp(-(0.1 + 0.3) / 2)
    assert {"+0.7", "-0.2"} <= {*page.texts("dd")}


def test_long_episodes_are_cut_as_completions_are():
    line = group(1, **EPISODE)
    html = grpo_jax.runs.report._group_html(line, 1, 2)
    assert '">7</div>' in html
    assert "&gt;</div>" in html
    assert ">a</div>" not in html
    assert "1 characters more" in html


def test_the_terminal_prints_an_episode_turn_by_turn(tmp_path):
    run = RunFolder(tmp_path / "run", {}, console=Console(record=True, width=100))
    terminal.print_groups(run, [group(1, **EPISODE), group(2)])
    printed = run.console.export_text()
    starts = ["1 '7'  (+0.70)", "> '>'", "2 'a'  (-0.20)", "1 '<b>'  (-0.70)", "'Tom had a cat.'"]
    places = [printed.index(start) for start in starts]
    assert places == sorted(places)


def everywhere(text):
    """A run that says `text` wherever it can."""
    lines = metrics(1, 2, phase=text, **{text: 1.0, "other": "ignored " + text})
    hostile = group(1, phase=text, text=text, prompt=text, columns={text: text}, components={text: [1.0, None]})
    results = {text: {text: 1, "word": text}, "text": text}
    return {"lines": lines, "groups": [hostile], "results": results, "config": {"model": text, text: [text]}}


def test_nothing_of_a_run_becomes_an_element(tmp_path):
    hostile, harmless = (
        page_of(tmp_path / name, **everywhere(text)) for name, text in (("h", HOSTILE), ("x", "x" * len(HOSTILE)))
    )

    def shape(page):
        return [(tag, sorted(attributes)) for tag, attributes, _ in page.elements]

    assert shape(hostile) == shape(harmless)
    assert hostile.comments == harmless.comments == []
    assert hostile.texts("script") == harmless.texts("script")
    for text in ("div", "text"), ("div", "prompt"):
        assert set(hostile.texts(*text)) == {VISIBLE}
    assert hostile.texts("dt").count(VISIBLE) == 4  # option, column, and a component in two cards
    assert hostile.find("details", "step")[0][0]["data-phase"] == VISIBLE
    tokens = json.loads(hostile.find("div", "text")[0][0]["data-tokens"])
    assert sum(tokens["lengths"]) == len(VISIBLE)
    assert [round(cent / 10) for cent in tokens["cents"]] == list(range(len(tokens["lengths"])))
    assert hostile.lines(VISIBLE) == [[[1, 1.0], [2, 1.0]]]


def test_the_page_asks_nothing_of_the_network_and_can_be_read_aloud(tmp_path):
    page = page_of(tmp_path / "run", metrics(1), [group(1)], results={"after": {"reward": 1}})
    assert not [a for _, a, _ in page.elements if a.keys() & {"src", "href", "srcset", "action", "style", "onclick"}]
    assert "url(" not in page.texts("style")[0]
    assert "@import" not in page.texts("style")[0]
    (policy,) = [a["content"] for a, _ in page.find("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "script-src 'sha256-" in policy
    assert [a["lang"] for a, _ in page.find("html")] == ["en"]
    assert any(a.get("name") == "viewport" for a, _ in page.find("meta"))
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all("aria-label" in a for a, _ in page.find("svg", "chart"))


def test_curves_have_gaps_and_metrics_of_some_steps(tmp_path):
    lines = metrics(1, 2, 3, 4, kl=0.5)
    lines[1] |= {"kl": None, "heldout_sampled": 0.25}
    lines[2]["kl"] = math.nan
    lines[3]["heldout_sampled"] = 0.5
    page = page_of(tmp_path / "run", lines + metrics(1, 2, phase="control", never=None), phases=())
    assert page.lines("kl") == [[[1, 0.5], [2, None], [3, None], [4, 0.5]]]
    assert page.lines("heldout_sampled") == [[[2, 0.25], [4, 0.5]]]
    assert page.lines("reward") == [[[s, s / 10] for s in (1, 2, 3, 4)], [[s, s / 10] for s in (1, 2)]]
    names = page.texts("strong")
    assert names == ["reward", "kl", "heldout_sampled"]  # what to look at first, first; none without a value
    (style_of_grpo, style_of_control) = [a["class"] for a, _ in page.find("path", "line")][:2]
    assert style_of_grpo != style_of_control
    drawn = [a["d"] for a, _ in page.find("path", "line")][4]
    assert drawn.count("M") == 2  # two lone points
    assert "L" not in drawn


def test_an_interval_stands_beside_its_mean_and_is_a_band(tmp_path):
    lines = metrics(1, 2, 3, clip_low=0.5)
    lines[0] |= {"heldout_avg": 0.25, "heldout_avg_low": 0.125, "heldout_avg_high": 0.5}
    lines[2] |= {"heldout_avg": 0.75, "heldout_avg_low": 0.5, "heldout_avg_high": 1.0}
    results = {"after": {"avg": 0.5, "avg_low": 0.25, "avg_high": 0.75}}
    page = page_of(tmp_path / "run", lines, results=results)
    assert page.texts("strong") == ["reward", "heldout_avg", "clip_low"]
    (band,) = page.find("path", "band")
    assert len(re.findall(r"[\d.]+ [\d.]+", band[0]["d"])) == 4
    assert {"0.750 [0.500, 1.000]", "0.500 [0.250, 0.750]"} <= set(page.texts("td"))
    lines[2]["heldout_avg_low"] = lines[2]["heldout_avg_high"] = None  # as where there is no interval
    assert "0.75" in page_of(tmp_path / "run", lines).texts("td")


def test_the_reward_of_a_coin_has_an_axis_of_its_own(tmp_path):
    lines = [{"phase": "grpo", "step": s, "reward": 10.0 * s, "kl": 10.0 * s} for s in (1, 2)]
    lines += [{"phase": "control", "step": s, "reward": 0.4 + s / 10, "kl": 0.1 * s} for s in (1, 2)]
    page = page_of(tmp_path / "run", lines)
    heights = [[float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", a["d"])] for a, _ in page.find("path", "line")]
    drawn = [heights[i] for i in (0, 1, 4, 5)]  # between them the keys
    assert drawn[1][0] - drawn[1][1] > 100  # as high as the panel
    assert drawn[3][0] - drawn[3][1] < 10  # kl: one axis for both
    assert page.texts("small") == ["of a coin, axis at the right"]


def test_long_curves_keep_their_extremes(tmp_path):
    lines = [line for step in range(10_000) for line in metrics(step, grad_norm=float(step == 7_777))]
    page = page_of(tmp_path / "run", lines)
    (points,) = page.lines("grad_norm")
    assert len(points) < 300
    assert [7_777, 1] in points
    assert (points[0][0], points[-1][0]) == (0, 9_999)
    assert "Long curves" in page.texts("p", "soft")[0]


@pytest.mark.parametrize("value", [0.0, 1e-9, -3.5, 1.0000001, 1e20, -1e-40, 123456.0])
def test_a_constant_curve_is_level_and_within_the_axes(tmp_path, value):
    page = page_of(tmp_path / "run", metrics(1, 2, kl=value))
    ys = {float(y) for a, _ in page.find("path", "line")[2:3] for y in re.findall(r" ([\d.]+)", a["d"])}
    assert len(ys) == 1
    assert 8 <= ys.pop() <= 160


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, 1], ["0.0", "0.5", "1.0"]),
        ([0, 0], ["0.0", "0.5", "1.0"]),
        ([2, 2.0001], ["1.8", "2.0", "2.2"]),
        ([-3, -3], ["-3.2", "-3.0", "-2.8"]),
        ([0.85, 0.87], ["0.85", "0.86", "0.87"]),  # which is not constant
    ],
)
def test_the_axis_of_what_is_constant_is_wide(tmp_path, values, labels):
    lines = [{"phase": "grpo", "step": step, "kl": value} for step, value in enumerate(values)]
    assert page_of(tmp_path / "run", lines).texts("text", "y") == labels


def test_a_run_of_one_step_an_empty_one_and_one_cut_off(tmp_path):
    assert page_of(tmp_path / "one", metrics(0), [group(0)]).lines("reward") == [[[0, 0.0]]]
    empty = page_of(tmp_path / "empty", config={})
    assert "This run has no metrics yet." in empty.texts("p")
    assert "This run has no rollouts." in empty.texts("p", "soft")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text("{}")
    write_report(tmp_path / "bare")
    with (tmp_path / "one/rollouts.jsonl").open("a") as file:
        file.write('{"phase": "grpo", "ste')
    assert write_report(tmp_path / "one")


def test_results_are_a_table_if_they_are_one(tmp_path):
    page = page_of(
        tmp_path / "run", metrics(1), results={"before": {"a": 1, "b": None}, "after": {"c": 2.5}, "sha": "f0"}
    )
    assert page.texts("th", scope="col") == ["before", "after", "grpo"]  # what the run was for, first
    assert page.texts("th", scope="row")[:3] == ["a", "b", "c"]
    assert page.texts("td")[1:7] == ["1", "–", "–", "–", "–", "2.5"]
    assert page.texts("dd")[-1] == "f0"
    other = page_of(tmp_path / "run", metrics(1), results={"timing": {"a": 1}})
    assert other.texts("th", scope="col") == ["grpo", "timing"]
    nested = page_of(tmp_path / "run", metrics(1), results={"runs": [{"reward": 1}]})
    assert json.loads(nested.texts("div", "text")[0]) == {"runs": [{"reward": 1}]}


def test_what_is_nothing_is_skipped(tmp_path):
    lines = [{"phase": "grpo", "reward": 1}, {"step": 1}, None, 3, *metrics(2)]
    page = page_of(tmp_path / "run", lines, [{"phase": "grpo", "step": 1}, [], group(2)])
    (tmp_path / "run/results.json").write_text("null\n")
    assert write_report(tmp_path / "run")
    assert page.lines("reward") == [[[2, 0.2]]]
    assert [a["data-step"] for a, _ in page.find("details", "step")] == ["2"]
    alone = page_of(tmp_path / "other", metrics(1), [group(1, phase="warm")])  # a phase of rollouts alone
    assert alone.texts("th", scope="col") == ["grpo"]


def test_how_it_ended_shows_a_few_numbers_and_when_they_were_logged(tmp_path):
    lines = metrics(*range(1, 26), kl=0.5, grad_norm=2.0)
    lines[19] |= {"heldout_avg": 0.5, "heldout_avg_low": 0.25, "heldout_avg_high": 0.75, "heldout_length": 7}
    lines[3]["ungraded_answer_timeout"], lines[7]["ungraded_answer_timeout"] = 2, 3
    page = page_of(tmp_path / "run", lines)
    names = page.texts("th", scope="row")
    assert names[:5] == ["step", "reward", "heldout_avg", "kl", "ungraded_answer_timeout (all steps)"]
    assert names[5:] == ["heldout_length", "grad_norm"]  # folded
    cells = ["25", "2.5", "0.500 [0.250, 0.750] (step 20)", "0.5", "5", "7 (step 20)", "2"]
    assert page.texts("td")[1:6] + page.texts("td")[7:] == cells
    assert page.lines("ungraded_answer_timeout")[0][2:8] == [[3, 0], [4, 2], [5, 0], [6, 0], [7, 0], [8, 3]]
    ends = dict(zip(page.texts("strong"), page.texts("b"), strict=True))  # beside the curves
    assert (ends["kl"], ends["heldout_avg"], ends["heldout_length"]) == ("0.5", "0.5 (step 20)", "7 (step 20)")


def test_curves_come_in_the_order_in_which_to_look_at_them(tmp_path):
    ordered = ["reward", "heldout_avg", "kl", "entropy", "zero_spread_share", "heldout_greedy", "length_mean"]
    ordered += ["truncated_share", "ungraded_answer_timeout", "clip_low", "ratio", "sampler_mismatch", "grad_norm"]
    lines = [{"phase": "grpo", "step": 1, "loss": 0.0} | dict.fromkeys(reversed(ordered), 0.5)]
    assert page_of(tmp_path / "run", lines).texts("strong") == [*ordered, "loss"]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("rollout_tokens_per_s", "tokens a second"),
        ("rollout_s", "seconds"),
        ("heldout_length", "tokens"),
        ("heldout_ended_share", "share"),
        ("zero_spread_share", "share of groups"),
        ("heldout_reward_share", "mean of held-out prompts"),
        ("ungraded_answer_no_number", "completions"),
        ("loss", "loss"),
    ],
)
def test_axes_have_units(tmp_path, name, unit):
    page = page_of(tmp_path / "run", [{"phase": "grpo", "step": 1, name: 0.5}])
    assert page.texts("text")[-1] == unit


def test_warnings_are_kept_once_and_stand_on_the_page(tmp_path, capsys):
    folder = tmp_path / "run"
    for _ in range(2):  # the second process resumes the run
        run = RunFolder(folder, {"steps": 3})
        for message in ("too long", "too short"):  # of one name only the first is said
            run.warn_once("length", message)
        run.warn_once("other", HOSTILE)
        assert "too long" in capsys.readouterr().out
    hostile = HOSTILE.replace("\ud800", "?")  # as a terminal can say it
    assert run.lines("warnings.jsonl") == [{"message": "too long"}, {"message": hostile}]
    page = Page(write_report(folder).read_text("utf-8"))
    assert page.texts("h2")[0] == "Warnings"
    assert page.texts("li") == ["too long", VISIBLE.replace("\ufffd", "?")]
    assert "Warnings" not in page_of(tmp_path / "calm", metrics(1)).texts("h2")


def test_phases_may_be_chosen(tmp_path):
    run = {"lines": metrics(1) + metrics(1, phase="control"), "groups": [group(1), group(1, phase="control")]}
    page = page_of(tmp_path / "run", **run, phases=("control",))
    assert {a["data-phase"] for a, _ in page.find("details", "step")} == {"control"}
    assert len(page.lines("reward")) == 1
    with pytest.raises(ValueError, match=r"no lines of a phase 'dpo': its phases are \['grpo', 'control'\]"):
        write_report(tmp_path / "run", ["dpo"])


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="name the folder of a run"):
        write_report(tmp_path)
    page_of(tmp_path / "run", metrics(1))
    (tmp_path / "run/metrics.jsonl").write_text("rubbish\n")
    with pytest.raises(ValueError, match=r"line 1 of .*metrics\.jsonl is not JSON"):
        write_report(tmp_path / "run")


def test_a_large_run_is_thinned_evenly_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_jax.runs.report, "MAX_BYTES", 300_000)
    groups = [group(step, text="a b " * 40, size=4) for step in range(1, 201) for _ in range(2)]
    page = page_of(tmp_path / "run", metrics(*range(1, 201)), groups)
    assert (tmp_path / "run/report.html").stat().st_size <= 300_000
    steps = [int(a["data-step"]) for a, _ in page.find("details", "step")]
    gaps = {after - before for before, after in pairwise(steps)}
    assert (steps[0], steps[-1]) == (1, 200)
    assert (tmp_path / "run/report.html").stat().st_size > 250_000  # the room is used
    assert max(gaps) <= min(gaps) + 1
    assert f"shows {len(steps)} of 200 steps of grpo." in page.texts("p", "soft")[1]


def test_completions_that_are_too_long_even_alone_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_jax.runs.report, "MAX_BYTES", 200_000)
    page = page_of(tmp_path / "run", metrics(1, 2), [group(step, text="ab " * 9000, size=8) for step in (1, 2)])
    assert (tmp_path / "run/report.html").stat().st_size <= 200_000
    (attributes, text) = page.find("div", "text")[-1]
    assert len(text) in (500, 1000, 2000, 4000)
    assert sum(json.loads(attributes["data-tokens"])["lengths"]) == len(text)
    assert f"the first {len(text)} characters" in page.texts("p", "soft")[1]


@pytest.mark.parametrize("long", ["prompt", "columns"])
def test_prompts_and_columns_that_are_too_long_are_cut(tmp_path, monkeypatch, long):
    monkeypatch.setattr(grpo_jax.runs.report, "MAX_BYTES", 200_000)
    text = "é<" * 500_000
    changed = {"prompt": text} if long == "prompt" else {"columns": {"context": [text], "answer": 72}}
    page = page_of(tmp_path / "run", metrics(1, 2), [group(step, **changed) for step in (1, 2)])
    assert (tmp_path / "run/report.html").stat().st_size <= 200_000
    shown = page.texts("div", "prompt")[0] if long == "prompt" else max(page.texts("dd"), key=len)
    beginning, left_out = re.fullmatch(r"(.*) … \((\d+) characters more\)", shown).groups()
    assert beginning == (text if long == "prompt" else f'["{text}')[: len(beginning)]
    assert len(beginning) + int(left_out) == len(text) + (0 if long == "prompt" else len('[""]'))
    assert f"the first {len(beginning)} characters of a prompt, completion or column" in page.texts("p", "soft")[1]
    assert page.texts("div", "text")[0] == "Tom had a cat."  # which is short enough


def test_groups_that_cannot_be_cut_enough_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_jax.runs.report, "MAX_BYTES", 60_000)
    page = page_of(tmp_path / "run", metrics(1), [group(1, size=200)])
    assert (tmp_path / "run/report.html").stat().st_size <= 60_000
    assert not page.find("li", "card")
    assert "too large" in page.texts("p", "soft")[1]


def test_the_page_is_packaged():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "*.html" in project["tool"]["setuptools"]["package-data"]["grpo_jax.runs"]
