"""Checks which data the page of a run holds and leaves out, and that text of the run stays text."""

import json
import math
import re
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from pages import EPISODE, HOSTILE, data_of, everywhere, group, make_run, metrics, write_page
from rich.console import Console

import grpo_jax.report
from experiments.common import print_groups
from grpo_jax.errors import UsageError
from grpo_jax.report import write_report
from grpo_jax.runs.folder import RunFolder

TEMPLATE = Path(grpo_jax.report.__file__).with_name("report_page.html").read_text("utf-8")


def steps_of(data, phase="grpo"):
    return [step for step, _ in data["rollouts"].get(phase, [])]


def curve(data, metric, phase="grpo"):
    """Points of a curve."""
    steps, values = data["curves"][metric][phase]
    return [[*point] for point in zip(steps, values, strict=True)]


def test_groups_have_tokens_and_probabilities_once(tmp_path):
    data = write_page(tmp_path / "run", metrics(1, 2), [group(1), group(2, text="Tom sat.")])
    assert steps_of(data) == [1, 2]
    ((_, [shown]),) = data["rollouts"]["grpo"][1:]
    assert shown["completions"] == [None, None]  # the text is that of the tokens
    assert shown["tokens"] == [["Tom", " sat.", ""]] * 2
    assert shown["cents"] == [[0, 10, 20]] * 2
    assert (shown["rewards"], shown["advantages"], shown["lengths"]) == ([1.0, None], [0.5, -0.5], [3, 3])
    assert (shown["prompt"], shown["columns"]) == ("Once", {"answer": "72", "level": 3})
    assert "logprobs" not in shown
    assert data["about"] == ""


def test_groups_may_lack_tokens_components_and_columns(tmp_path):
    names = ("phase", "step", "prompt", "completions", "rewards", "advantages", "lengths")
    data = write_page(tmp_path / "run", metrics(1), [{name: group(1)[name] for name in names}])
    shown = data["rollouts"]["grpo"][0][1][0]
    assert (shown["completions"], shown["tokens"], shown["cents"]) == (["Tom had a cat."] * 2, [[], []], [])


def test_token_texts_may_differ_from_the_completion(tmp_path):
    odd = group(1, completions=["é", "é"], tokens=[["\ud83d", "\ufffd", ""]] * 2, logprobs=[[-1, None, 0]] * 2)
    shown = write_page(tmp_path / "run", metrics(1), [odd])["rollouts"]["grpo"][0][1][0]
    assert shown["completions"] == ["é", "é"]
    assert shown["tokens"][0] == ["\ufffd", "\ufffd", ""]
    assert shown["cents"] == [[100, None, 0]] * 2


def test_the_terminal_prints_an_episode_turn_by_turn(tmp_path):
    run = RunFolder(tmp_path / "run", {}, console=Console(record=True, width=100))
    print_groups(run, [group(1, **EPISODE), group(2)])
    printed = run.console.export_text()
    starts = ["1 '7'  (+0.70)", "> '>'", "2 'a'  (-0.20)", "1 '<b>'  (-0.70)", "'Tom had a cat.'"]
    places = [printed.index(start) for start in starts]
    assert places == sorted(places)
    damaged = {"turns": [[1]], "turn_advantages": [[]], "completions": ["79", "8"]}
    print_groups(run, [group(1, **EPISODE | damaged)])
    assert re.search(r"1 '7' .*'8' ", run.console.export_text(), re.DOTALL)


def test_text_of_a_run_cannot_leave_its_element(tmp_path):
    hostile = write_page(tmp_path / "h", **everywhere(HOSTILE))
    page = (tmp_path / "h/report.html").read_text("utf-8")
    assert page.count("<") == TEMPLATE.count("<") - 3  # the placeholders
    assert hostile["ends"] == {HOSTILE.replace("\ud800", "\ufffd"): 2}
    assert hostile["rollouts"].keys() == hostile["ends"].keys()


def test_the_page_asks_nothing_of_the_network(tmp_path):
    write_page(tmp_path / "run", metrics(1), [group(1)], results={"after": {"reward": 1}})
    page = (tmp_path / "run/report.html").read_text("utf-8")
    assert not re.findall(r"<[^>]*\s(src|href|srcset|action|style|onclick)=", page)
    style = re.findall("<style>(.*?)</style>", page, re.DOTALL)[0]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "script-src 'sha256-" in policy
    assert '<html lang="en">' in page
    assert 'name="viewport"' in page


def test_curves_have_gaps_and_metrics_of_some_steps(tmp_path):
    lines = metrics(1, 2, 3, 4, kl=0.5)
    lines[1] |= {"kl": None, "heldout_sampled": 0.25}
    lines[2]["kl"] = math.nan
    lines[3] |= {"heldout_sampled": 0.5, "ungraded_answer_timeout": 2, "ended_turns": 3}
    data = write_page(tmp_path / "run", lines + metrics(1, 2, phase="control", never=None))
    assert curve(data, "kl") == [[1, 0.5], [2, None], [3, None], [4, 0.5]]
    assert data["curves"]["heldout_sampled"] == {"grpo": [[2, 4], [0.25, 0.5]]}
    assert data["curves"]["reward"]["grpo"] == [[1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]]
    assert curve(data, "reward", "control") == [[s, s / 10] for s in (1, 2)]
    assert "never" not in data["curves"]
    for name, last in (("ungraded_answer_timeout", 2), ("ended_turns", 3)):
        assert curve(data, name) == [[1, 0], [2, 0], [3, 0], [4, last]]  # 0 where none is logged
    assert (data["coins"], data["side"], data["parts"]) == (["control"], ["control"], 0)


SHORT_NUMBERS = [(1 / 3, 0.33333), (2.0, 2), (123456, 123456), (1.5e-40, 1.5e-40), (math.inf, None), (-0.0, 0)]


@pytest.mark.parametrize(("value", "number"), SHORT_NUMBERS)
def test_numbers_are_short(tmp_path, value, number):
    data = write_page(tmp_path / "run", [*metrics(1, 2), {"phase": "grpo", "step": 3, "reward": value}])
    assert curve(data, "reward")[-1] == [3, number]


def test_long_curves_keep_their_extremes(tmp_path):
    lines = [line for step in range(2_000) for line in metrics(step, grad_norm=float(step == 1_777))]
    lines[1_000] |= {"grad_norm": None, "ungraded_answer": 2}
    lines[1_900] |= {"ungraded_answer": 3}
    data = write_page(tmp_path / "run", lines)
    points = curve(data, "grad_norm")
    assert len(points) <= 600
    assert {(1_777, 1), (1_000, None)} <= {tuple(point) for point in points}
    assert (points[0][0], points[-1][0]) == (0, 1_999)
    assert data["parts"] == 250
    assert sum(value for _, value in curve(data, "ungraded_answer")) == 5  # these are added up on the page
    many = [{f"metric{i}": step / 7 for i in range(700)} | {"phase": "grpo", "step": step} for step in range(150)]
    data = write_page(tmp_path / "wide", many)
    assert data["parts"] < 100
    assert (tmp_path / "wide/report.html").stat().st_size < 3_000_000


def test_reports_work_for_short_empty_and_cut_runs(tmp_path):
    assert curve(write_page(tmp_path / "one", metrics(0), [group(0)]), "reward") == [[0, 0]]
    empty = write_page(tmp_path / "empty", config={})
    assert (empty["ends"], empty["rollouts"], empty["results"]) == ({}, {}, None)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_text("{}")
    write_report(tmp_path / "bare")
    with (tmp_path / "one/rollouts.jsonl").open("a") as file:
        file.write('{"phase": "grpo", "ste')
    assert steps_of(data_of(write_report(tmp_path / "one"))) == [0]


def test_results_are_passed_on(tmp_path):
    results = {"before": {"a": 1, "b": math.nan}, "sha": "f0"}
    assert write_page(tmp_path / "run", metrics(1), results=results)["results"] == results | {
        "before": {"a": 1, "b": None}
    }


def test_phases_may_lack_metrics_and_times_are_curves(tmp_path):
    make_run(tmp_path / "run", metrics(1, 2), [group(1, phase="warm")])
    (tmp_path / "run/times.jsonl").write_text('{"phase": "grpo", "step": 1, "rollout_s": 0.5}\n')
    data = data_of(write_report(tmp_path / "run"))
    assert (list(data["ends"]), list(data["rollouts"]), data["side"]) == (["grpo"], ["warm"], ["warm"])
    assert data["times"][-1] == "rollout_s"
    assert curve(data, "rollout_s") == [[1, 0.5]]


def test_warnings_are_recorded_once_and_appear_in_reports(tmp_path, capsys):
    folder = tmp_path / "run"
    for _ in range(2):  # the second process resumes the run
        run = RunFolder(folder, {"steps": 3})
        for message in ("too long", "too short"):  # of one name only the first is said
            run.warn_once("length", message)
        run.warn_once("other", HOSTILE)
        assert "too long" in capsys.readouterr().out
    hostile = HOSTILE.replace("\ud800", "?")  # as a terminal can say it
    assert run.lines("warnings.jsonl") == [{"message": "too long"}, {"message": hostile}]
    assert data_of(write_report(folder))["warnings"] == ["too long", hostile]
    assert write_page(tmp_path / "calm", metrics(1))["warnings"] == []


DAMAGED_LINES = [
    ("metrics.jsonl", '"rubbish', r"line 2 of .*metrics\.jsonl is not JSON"),
    ("metrics.jsonl", {"phase": "grpo", "reward": 1}, r'line 2 of .*metrics\.jsonl has no "step" as a run writes it'),
    ("metrics.jsonl", [], r"line 2 of .*metrics\.jsonl holds no object"),
    ("rollouts.jsonl", {"phase": "grpo", "step": 1}, r'line 2 of .*rollouts\.jsonl has no "prompt"'),
    ("rollouts.jsonl", group(1, tokens=[[1]]), r'line 2 of .*rollouts\.jsonl has no "tokens"'),
    *(
        ("rollouts.jsonl", group(1, **{name: value}), rf'line 2 of .*rollouts\.jsonl has "{name}" of another length')
        for name, value in {
            "rewards": [1.0],
            "advantages": [1.0] * 3,
            "lengths": [],
            "tokens": [["Tom", " sat."]] * 2,
            "logprobs": [[0, 0, 0]],
            "endings": ["stop"],
        }.items()
    ),
    ("rollouts.jsonl", '{"phase": "grpo", "step": 1, "step": 2}', r"step is given twice, as 1 and as 2"),
    ("results.json", "rubbish", r"results\.json cannot be read"),
    ("config.json", None, "name the folder of a run"),
]


@pytest.mark.parametrize(("file", "line", "message"), DAMAGED_LINES)
def test_a_damaged_line_is_named(tmp_path, file, line, message):
    make_run(tmp_path, metrics(1), [group(1)])
    with (tmp_path / file).open("a") as lines:
        lines.write(f"{line if isinstance(line, str) else json.dumps(line)}\n")
    if line is None:
        (tmp_path / file).unlink()
    with pytest.raises(UsageError, match=message):
        write_report(tmp_path)


def test_large_runs_are_thinned_evenly_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_jax.report, "MAX_BYTES", 100_000)
    groups = [group(step, text="a b " * 20) for step in range(1, 101) for _ in range(2)]
    data = write_page(tmp_path / "run", metrics(*range(1, 101)), groups)
    assert (tmp_path / "run/report.html").stat().st_size > 85_000  # the room is used
    steps = steps_of(data)
    gaps = {after - before for before, after in pairwise(steps)}
    assert (steps[0], steps[-1]) == (1, 100)
    assert max(gaps) <= min(gaps) + 1
    assert all(len(groups) == 2 for _, groups in data["rollouts"]["grpo"])
    assert f"shows {len(steps)} of 100 steps of grpo." in data["about"]


def test_overlong_completions_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_jax.report, "MAX_BYTES", 70_000)
    groups = [group(step, text="ab " * 3000, size=4) for step in (1, 2)]
    data = write_page(tmp_path / "run", metrics(1, 2), groups)
    shown = data["rollouts"]["grpo"][-1][1][0]
    text = "".join(shown["tokens"][0])
    limit = next(limit for limit in (250, 1000, 4000) if limit <= len(text) < limit + 10)
    assert text == ("ab " * 3000)[: len(text)]
    assert len(shown["cents"][0]) == len(shown["tokens"][0])
    assert shown["left_out"][0] == 9_000 - len(text)
    assert f"the first {limit} characters" in data["about"]


@pytest.mark.parametrize("long", ["prompt", "columns"])
def test_overlong_prompts_and_columns_are_cut(tmp_path, monkeypatch, long):
    monkeypatch.setattr(grpo_jax.report, "MAX_BYTES", 200_000)
    text = "é<" * 50_000
    changed = {"prompt": text} if long == "prompt" else {"columns": {"context": [text], "answer": 72}}
    data = write_page(tmp_path / "run", metrics(1, 2), [group(step, **changed) for step in (1, 2)])
    group_shown = data["rollouts"]["grpo"][0][1][0]
    shown = group_shown["prompt"] if long == "prompt" else group_shown["columns"]["context"]
    beginning, left_out = re.fullmatch(r"(.*) … \((\d+) characters more\)", shown).groups()
    assert beginning == (text if long == "prompt" else f'["{text}')[: len(beginning)]
    assert len(beginning) + int(left_out) == len(text) + (0 if long == "prompt" else len('[""]'))
    assert f"the first {len(beginning)} characters of a prompt, completion or column" in data["about"]
    assert "".join(group_shown["tokens"][0]) == "Tom had a cat."  # which is short enough


def test_groups_too_large_after_cutting_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_jax.report, "MAX_BYTES", 45_000)
    data = write_page(tmp_path / "run", metrics(1), [group(1, size=400)])
    assert data["rollouts"] == {}
    assert "too large" in data["about"]


def test_long_options_and_curves_keep_pages_small(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo_jax.report, "MAX_BYTES", 100_000)
    template = "é" * 100_000
    make_run(tmp_path, [{**line, **{f"m{i}": i + 0.12345 for i in range(2000)}} for line in metrics(1, 2)], [group(1)])
    for name in ("config.json", "results.json"):
        (tmp_path / name).write_text(json.dumps({"template": template, "steps": 2}))
    (tmp_path / "warnings.jsonl").write_text(json.dumps({"message": template}) + "\n")
    page = write_report(tmp_path)
    assert page.stat().st_size < 100_000
    data = data_of(page)
    shortened = f"{template[:4000]} … (96000 characters more)"
    assert data["options"] == data["results"] == {"template": shortened, "steps": 2}
    assert data["warnings"] == [shortened]
    assert data["rollouts"]["grpo"]
    known = len(metrics(1)[0].keys() - {"phase", "step"})
    assert len(data["curves"]) + data["left_out"] == 2000 + known
    assert min(len(data["curves"]), data["left_out"]) > 100
    assert "reward" in data["curves"]


def test_long_curves_shrink_before_any_is_left_out(tmp_path):
    names = {f"metric_{i}": 1.5 for i in range(11_000)}
    make_run(tmp_path, [{"phase": "grpo", "step": step, **names} for step in range(1, 21)])
    data = data_of(write_report(tmp_path))
    assert (len(data["curves"]), data["left_out"], data["parts"]) == (11_000, 0, 4)


# ---- memory


def test_long_rollouts_are_read_one_at_a_time(tmp_path):
    """Neither resuming nor the page holds all rollouts, which grow with the steps of a run."""
    line = group(0, text="Tom had a cat. " * 200)
    make_run(tmp_path, metrics(1, 2))
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        file.writelines(json.dumps({**line, "step": step}) + "\n" for step in range(800))
    size = (tmp_path / "rollouts.jsonl").stat().st_size
    run = RunFolder(tmp_path, {"steps": 3, "model": "tiny"})
    peaks = {}
    for name, call in {
        "rewind": lambda: run.rewind("grpo", 600),
        "report": lambda: write_report(tmp_path),
    }.items():
        tracemalloc.start()
        call()
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(run.lines("rollouts.jsonl")) == 601
    assert peaks["rewind"] < 0.1 * size
    assert peaks["report"] < 12 * grpo_jax.report.MAX_BYTES
