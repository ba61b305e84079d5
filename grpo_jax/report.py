"""Reports a run to people: as the page report.html, and in tables and sentences at its end.

`write_report` collects the run's numbers and texts as one JSON object, which the script in `report_page.html` draws.
"""

import base64
import hashlib
import json
import math
import re
import shlex
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, repeat
from pathlib import Path
from typing import Any

from grpo_jax.errors import UsageError, need, user_path

need("rich")

from rich import box
from rich.table import Table

from grpo_jax.options import flattened
from grpo_jax.runs.files import each_line, finite, read_lines, read_object, write_json, write_text
from grpo_jax.runs.folder import LINE, SIDE_PHASES, RunFolder, is_coin
from grpo_jax.runs.progress import programs_so_far
from grpo_jax.statistics import cell

MAX_BYTES = 5_000_000  # the page leaves out rollouts and curves to stay below this size
_CURVE_POINTS = 500  # the largest number of points in a curve
_PAGE_POINTS = 100_000  # the largest number of points in all curves together, about 1.2 MB
_COUNTS = ("ungraded_", "ended_", "spans_")  # metrics that a step leaves out if they are 0
_FEWEST_POINTS = 8  # of a curve, however many curves there are
_OPTION_CHARACTERS = 4000  # of an option, such as a template, a warning or a result
_TEXT_LIMITS = (None, 4000, 1000, 250)  # characters of a prompt, completion or column; None: no limit

_Numbers = list[float | None]
_PART_NUMBERS = ("span_rewards", "span_advantages", "turn_rewards", "turn_advantages")
# The fields of a group in rollouts.jsonl that the page shows. Fields of spans, turns and tokens may be absent.
_GROUP: Mapping[str, Any] = {
    **LINE,
    "prompt": str | list,
    "columns": dict | None,
    "completions": list[str],
    "rewards": _Numbers,
    "components": dict[str, _Numbers] | None,
    "advantages": _Numbers,
    "lengths": list[int],
    "truncated": list[bool] | None,
    "tokens": list[list[str]] | None,
    "spans": list[list[list[int]]] | None,
    "turns": list[list[int]] | None,
    "endings": list[str] | None,
    **dict.fromkeys(("logprobs", *_PART_NUMBERS), list[_Numbers] | None),
}

Line = Mapping[str, Any]


def write_report(folder: Path) -> Path:
    """Writes report.html into the folder of a run, finished or not.

    The page has at most 5 MB. If there are too many rollouts, it shows evenly spaced steps, with the first and the
    last step. If texts are too long, it shows their beginning. If curves have too many points, it shows the lowest
    and the highest value of each part, and if there are too many curves, the first ones. The page says what it leaves
    out.

    Args:
      folder: The folder of the run.

    Returns:
      The path of report.html.

    Raises:
      UsageError: The folder holds no run, or one of its files cannot be read.
    """
    folder = user_path(folder)
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} holds no config.json: name the folder of a run")
    options = read_object(folder / "config.json")
    if "model_type" in options:
        raise UsageError(f"{folder} is the folder of a model: name that of a run")
    metrics, times = (read_lines(folder / f"{name}.jsonl", LINE) for name in ("metrics", "times"))
    rollouts_file = folder / "rollouts.jsonl"
    groups = _find_groups(rollouts_file)
    names = list(dict.fromkeys([*(line["phase"] for line in metrics), *groups]))
    counts = {name: 0 for line in metrics for name in line if name.startswith(_COUNTS)}
    metrics = [line | counts | line if "reward" in line else line for line in metrics]
    results = read_object(file) if (file := folder / "results.json").exists() else None
    short = partial(_cut, characters=_OPTION_CHARACTERS)
    run = {
        "title": folder.resolve().name,
        "options": {name: short(value) for name, value in flattened(options).items()},
        "warnings": [short(line["message"]) for line in read_lines(folder / "warnings.jsonl", {"message": str})],
        "results": results and {name: short(value) for name, value in results.items()},
        "ends": {line["phase"]: line["step"] for line in metrics},
        "coins": [phase for phase in names if is_coin(phase)],
        "side": [phase for phase in names if phase in SIDE_PHASES],
        "times": list(dict.fromkeys(chain.from_iterable(times))),
    }
    page = Path(__file__).with_name("report_page.html").read_text("utf-8")
    for tag in ("style", "script"):  # the browser accepts only the page's own style and script
        digest = hashlib.sha256(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0].encode()).digest()
        page = page.replace(f"<!--{tag} hash-->", f"sha256-{base64.b64encode(digest).decode()}")
    room = MAX_BYTES - len(page.encode()) - len(_json(run).encode()) - 2_000  # for the sentence about the rollouts
    run |= _curves([*metrics, *times], room // 2)
    rollouts = _rollouts(rollouts_file, groups, room - len(_json(run["curves"]).encode()))
    write_text(folder / "report.html", page.replace("<!--run-->", _json(run | rollouts)))
    return folder / "report.html"


def _json(value: Any) -> str:
    """Returns compact JSON, which cannot end its HTML element, with null for NaN and infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"))
    return re.sub("[\ud800-\udfff]", "\ufffd", text.replace("<", "\\u003c"))


def _cut(value: Any, characters: int | None) -> Any:
    """Returns the value, or the beginning of its text if the text is too long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if characters else ""
    left_out = len(text[characters:]) if characters else 0
    return f"{text[:characters]} … ({left_out} characters more)" if left_out else value


# ---- curves

Points = Sequence[tuple[int, float | None]]  # step and value; None is a gap


def _curves(lines: Sequence[Line], room: int) -> dict[str, Any]:
    """Returns "curves" by metric and phase that fit into `room` bytes, the number of curves that are "left_out", and
    the number of "parts" in thinned curves, or 0 if none was thinned.

    Null, NaN and infinity are gaps. A curve without any number is absent.
    """
    curves: dict[tuple[str, str], list[tuple[int, float | None]]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in LINE and type(value) in (int, float, type(None)):
                number = None if value is None or not abs(value) < 1e300 else value
                curves.setdefault((name, line["phase"]), []).append((line["step"], number))
    curves = {key: points for key, points in curves.items() if any(value is not None for _, value in points)}
    parts = min(_CURVE_POINTS, max(_FEWEST_POINTS, _PAGE_POINTS // max(len(curves), 1))) // 2
    by_name: dict[str, dict[str, list[Any]]] = {}
    left_out = 0
    for (name, phase), points in curves.items():
        is_counted = name.startswith("ungraded_")  # the page adds all steps up
        curve = _compact_curve(points if is_counted else _thin(points, parts))
        room -= len(_json([name, phase, curve]).encode())
        if room < 0:
            left_out += 1
        else:
            by_name.setdefault(name, {})[phase] = curve
    is_thinned = any(len(points) > 2 * parts for points in curves.values())
    return {"curves": by_name, "left_out": left_out, "parts": parts if is_thinned else 0}


def _thin(points: Points, parts: int) -> Points:
    """Thins a long curve to its ends, its last number, and the extremes and one gap of each part."""
    if len(points) <= 2 * parts:
        return points
    size, chosen = math.ceil(len(points) / parts), {0, len(points) - 1}
    chosen.update([i for i, (_, value) in enumerate(points) if value is not None][-1:])
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        values = sorted((value, i) for i in part if (value := points[i][1]) is not None)
        chosen.update([i for _, i in (*values[:1], *values[-1:])], [i for i in part if points[i][1] is None][:1])
    return [points[i] for i in sorted(chosen)]


def _compact_curve(points: Points) -> list[Any]:
    """Returns the steps and the values with five digits."""
    values = [float(f"{y:.5g}") if type(y) is float and y % 1 else y if y is None else int(y) for _, y in points]
    return [[step for step, _ in points], values]


# ---- rollouts


_Places = dict[str, dict[int, list[int]]]  # phase -> step -> places of its groups in rollouts.jsonl, in bytes


def _find_groups(file: Path) -> _Places:
    """Checks the groups of rollouts.jsonl, which may be too many to hold, and returns their places."""
    places: _Places = {}
    for number, (place, line) in enumerate(each_line(file, _GROUP), 1):
        lists = line.get("components") or {}
        lists = lists | {name: line[name] for name in _GROUP if name != "prompt" and isinstance(line.get(name), list)}
        wrong = [name for name, values in lists.items() if len(values) != len(line["completions"])]
        tokens, logprobs = ([*map(len, line.get(name) or ())] for name in ("tokens", "logprobs"))
        if tokens and logprobs and tokens != logprobs:
            wrong.append("tokens")
        if wrong:
            raise UsageError(f'line {number} of {file} has "{wrong[0]}" of another length than other lists: mend it')
        places.setdefault(line["phase"], {}).setdefault(line["step"], []).append(place)
    return places


def _compact_step(file: Path, places: Iterable[int], characters: int | None) -> list[Any]:
    """Reads the groups of a step in the format that the page reads."""
    groups = []
    with file.open("rb") as lines:
        for place in places:
            lines.seek(place)
            groups.append(_compact_group(json.loads(lines.readline()), characters))
    return groups


def _rollouts(file: Path, groups: _Places, room: int) -> dict[str, Any]:
    """Returns as many groups as fit into `room` bytes, and a sentence about omitted groups."""
    limit, most = f"{MAX_BYTES / 1e6:g} MB", max(map(len, groups.values()), default=0)
    for characters in _TEXT_LIMITS if groups else ():
        sizes = {
            (phase, step): len(_json([step, _compact_step(file, places, characters)]).encode()) + 10
            for phase, steps in groups.items()
            for step, places in steps.items()
        }
        for count in (*range(most, 2, -max(1, most // 50)), 2):
            chosen = {phase: _spaced([*steps], count) for phase, steps in groups.items()}
            if sum(sizes[phase, step] for phase, steps in chosen.items() for step in steps) > room:
                continue
            rollouts = {
                phase: [[step, _compact_step(file, groups[phase][step], characters)] for step in steps]
                for phase, steps in chosen.items()
            }
            fewer = [phase for phase in groups if len(rollouts[phase]) < len(groups[phase])]
            cuts = [f"{len(rollouts[phase])} of {len(groups[phase])} steps of {phase}" for phase in fewer]
            cuts += [f"the first {characters} characters of a prompt, completion or column"] if characters else []
            about = f"To stay below {limit} this page shows {', '.join(cuts)}. The rest is in rollouts.jsonl."
            return {"rollouts": rollouts, "about": about if cuts else ""}
    about = f"The groups are too large for a page of {limit}: read rollouts.jsonl." if groups else ""
    return {"rollouts": {}, "about": about}


def _spaced(steps: Sequence[Any], count: int) -> list[Any]:
    """Returns up to `count` evenly spaced steps, with the first and the last step."""
    count = min(count, len(steps))
    return [steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)]


def _compact_group(line: Line, characters: int | None) -> dict[str, Any]:
    """Returns a group in the format that the page reads.

    Probabilities become -100 ln p. A completion is null if its tokens have the same text. Long texts are cut;
    completions are cut between two tokens, and "left_out" counts the missing characters.
    """
    group = {name: line[name] for name in _GROUP if name not in (*LINE, "logprobs") and line.get(name)}
    group["prompt"] = _cut(line["prompt"], characters)
    group["columns"] = {name: _cut(value, characters) for name, value in (line.get("columns") or {}).items()}
    completions, tokens, left_out = [], [], []
    for text, row in zip(line["completions"], chain(line.get("tokens") or [], repeat([])), strict=False):
        is_repeated = bool(row) and "".join(row) == text
        if characters:
            row = row[: bisect_left([*accumulate(map(len, row), initial=0)], characters)]
        completions.append(None if is_repeated else text[:characters])
        left_out.append(len(text) - len("".join(row) if is_repeated else text[:characters]))
        tokens.append(row)
    logprobs = zip(line.get("logprobs") or [], map(len, tokens), strict=False)
    cents = [[round(-100 * p) if p is not None and abs(p) < 1e300 else None for p in ps[:n]] for ps, n in logprobs]
    return group | {"completions": completions, "tokens": tokens, "cents": cents, "left_out": left_out}


# ---- the end of a run


def print_table(run: RunFolder, title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> None:
    """Prints a table with a name at the left of each row; floats get three digits."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in rows.items():
        table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    run.console.print(table)


def print_results(run: RunFolder, title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Prints a table of results with their intervals: a column for each row of results.json.

    Args:
      run: The folder of the run, whose console prints the table.
      title: The title of the table.
      rows: Name of a row -> numbers by name. The names of interval bounds end in "_low" and "_high".
    """
    names = dict.fromkeys(name for row in rows.values() for name in row if not name.endswith(("_low", "_high")))
    print_table(run, title, tuple(rows), {name: [cell(row, name) for row in rows.values()] for name in names})


def say_end(run: RunFolder, started: float) -> None:
    """Writes report.html, and prints its path, the numbers of programs and the time since `started`."""
    page = write_report(run.path)
    compiled, read = programs_so_far()
    run.say(f"{compiled} programs compiled, {read} loaded from the cache, {time.perf_counter() - started:.0f} s")
    run.say(f"report: {page}")


def explain_control(run: RunFolder, names: Iterable[str], *, control: str = "control") -> None:
    """Prints an explanation of the control, if it is among the names."""
    if control in names:
        run.say(
            f"{control}: same start, prompts and steps, but the reward is a coin toss. Its changes are not learning."
        )


def finish(run: RunFolder, rows: Mapping[str, Mapping[str, float]], checksum: str, started: float) -> None:
    """Writes results.json and report.html, and prints the time and the next command. Only the first host does this.

    Args:
      run: The folder of the run.
      rows: The rows of the final table, which may be empty.
      checksum: The SHA-256 of the trained parameters.
      started: The start of the run, from `time.perf_counter`.
    """
    if not run.writes:
        return
    explain_control(run, rows)
    write_json(run.path / "results.json", {**rows, "params_sha256": checksum})
    say_end(run, started)
    if (run.path / "model").is_dir() and not (run.path / "reward-model").exists():  # which is exported already
        name, options = shlex.quote(str(run.path)), flattened(read_object(run.path / "config.json"))
        # Other runs do not say which task and reward the command should take.
        evaluate = f"grpo-jax evaluate {name}; " if options.get("task") and "reward" in options else ""
        run.say(f"next: {evaluate}grpo-jax export {name} NEW_FOLDER")
