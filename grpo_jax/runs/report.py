"""Writes a run as a page that people can read: report.html, which opens from disk and asks nothing of the network.

It shows what the run warned of, how it ended, its curves, and groups of completions side by side, with rewards,
advantages and the probabilities of tokens. `write_report` does the same from Python, also while the run goes on.

  grpo-jax report runs/stories
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich.console import Console

from grpo_jax.errors import UsageError, reason_of, user_path
from grpo_jax.options import fits, flattened
from grpo_jax.runs.flags import program, read_flags, refusing
from grpo_jax.runs.folder import SIDE_PHASES, check_fields, is_coin, read_object, write_text
from grpo_jax.runs.turns import Part, of_turn, parts_of

_STEPS = 2**53  # below which steps are whole numbers in any browser
MAX_BYTES = 5_000_000  # of the page; groups are left out to keep to it
_FOLD = 700  # characters of a completion that are shown unfolded
_PARTS = 120  # of a long curve, each drawn by its lowest and its highest point
_MAIN = (
    "method",
    "model",
    "preset",
    "steps",
    "num_prompts",
    "group_size",
    "max_tokens",
    "learning_rate",
    "kl_coef",
    "seed",
)
# Curves to look at first, in this order: those that tell whether the run learns, then those that tell why it does not.
_HEALTH = ("reward", "heldout_avg", "kl", "entropy", "zero_spread_share")
_CAUSES = ("heldout_*", "length_mean", "truncated_share", "ungraded_*", "clip*", "ratio*", "sampler_mismatch")
_FIRST = (*_HEALTH, *_CAUSES, "grad_norm")
# Whose last values are shown unfolded, and with them the sums of ungraded_*.
_ENDING = (*_HEALTH, "truncated_share", "length_mean")
# Units; the first pattern that fits counts. What has none is labelled by its name.
_UNITS = {
    "*_std": "standard deviation",
    "reward*": "mean of completions",
    "heldout_length": "tokens",
    "heldout_nll": "nats",
    "heldout_reward_*": "mean of held-out prompts",
    "*zero_spread_share": "share of groups",
    "truncated_share": "share of completions",
    "*_share": "share",
    "heldout_*": "mean of held-out prompts",
    "ungraded_*": "completions",
    "kl": "nats a token",
    "entropy": "nats a token",
    "length*": "tokens",
    "clip*": "share of tokens",
    "ratio": "mean of tokens",
    "*ratio_deviation": "largest |ratio − 1|",
    "sampler_mismatch": "mean exp |difference|",
    "grad_norm": "norm before clipping",
    "*_tokens_per_s": "tokens a second",
    "*_per_s": "a second",
    "*tokens": "tokens",
    "s": "seconds",
    "*_s": "seconds",
    "*_tflops": "TFLOP a second",
    "*_mb": "MiB",
}
# Axes in a chart of 340 by 200. The page's script draws its cursor between the last two.
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 326, 8, 160

Line = Mapping[str, Any]  # of a file of the run: "phase", "step", and more
Points = Sequence[tuple[int, float | None]]  # step and value; None is a gap
Curves = Mapping[str, Mapping[str, Points]]  # metric -> phase -> points
Place = tuple[int, int]  # of a line in its file: where it begins, and how many bytes it has
Index = Mapping[str, Mapping[int, Sequence[Place]]]  # phase -> step -> groups


@dataclass(frozen=True)
class Options:
    """What to show."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run."""
    phase: tuple[str, ...] = ()
    """Phases to show; none given: all of them."""


def write_report(folder: Path, phases: Sequence[str] = ()) -> Path:
    """Writes report.html into the folder of a run, finished or not.

    The page has at most 5 MB. Of rollouts that are too many it shows evenly spaced steps, the first and the last
    among them, and of texts that are too long their beginning, and says so.

    Args:
      folder: of the run.
      phases: to show; none given: all of them.

    Returns:
      The file.

    Raises:
      UsageError: the folder holds no run, a file of it cannot be read, or it has no such phase.
    """
    folder = user_path(folder)
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} holds no config.json: name the folder of a run")
    metrics, times = ([line for _, line in _lines(folder / f"{name}.jsonl", _LINE)] for name in ("metrics", "times"))
    index = _index(folder / "rollouts.jsonl")
    found = list(dict.fromkeys([*(line["phase"] for line in metrics), *index]))
    if unknown := [phase for phase in phases if phase not in found]:
        raise UsageError(f"{folder} has no lines of a phase {unknown[0]!r}: its phases are {found}")
    shown = [phase for phase in found if phase in phases or not phases]
    curves = _curves(_with_zeros(metrics), shown)
    ends = {line["phase"]: line["step"] for line in metrics if line["phase"] in shown}
    parts = {
        "title": _text(folder.resolve().name),
        "options": _options_html(folder / "config.json"),
        "warnings": _warnings_html(folder / "warnings.jsonl"),
        "ending": _how_it_ended_html(folder / "results.json", curves, ends),
        "curves": _curves_html(curves, _curves(times, shown), ends),
    }
    page = Path(__file__).with_name("report_page.html").read_text("utf-8")
    room = MAX_BYTES - len("".join([page, *parts.values()]).encode()) - 5_000  # for what is said of the groups
    kept = {phase: index[phase] for phase in shown if phase in index}
    parts["about groups"], parts["groups"] = _groups_html(folder / "rollouts.jsonl", kept, room)
    for tag in ("style", "script"):  # the browser applies and runs what is written in the page itself, nothing else
        digest = hashlib.sha256(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0].encode()).digest()
        parts[f"{tag} hash"] = f"sha256-{base64.b64encode(digest).decode()}"
    for name, part in parts.items():  # which are escaped, and hold no placeholder
        page = page.replace(f"<!--{name}-->", part)
    write_text(folder / "report.html", page)
    return folder / "report.html"


# ---- files


# Types of what lines have; what lacks one is skipped, as in files of earlier versions.
_LINE: Mapping[str, Any] = {"phase": str, "step": int}
_GROUP: Mapping[str, Any] = {**_LINE, "prompt": Any, "completions": list[str], "rewards": list[float | None]}
_OF_GROUP: Mapping[str, Any] = {  # which a group may have
    "advantages": list[float | None],
    "lengths": list[int],
    "truncated": list[bool],
    "tokens": list[list[str]],
    "logprobs": list[list[float | None]],
    "components": dict[str, list[float | None]],
    "columns": dict[str, Any],
    # of spans
    "spans": list[list[list[int]]],
    "span_rewards": list[list[float]],
    "span_advantages": list[list[float | None]],
    # of episodes
    "turns": list[list[int]],
    "turn_rewards": list[list[float | None]],
    "turn_advantages": list[list[float | None]],
    "endings": list[str],
}


def _lines(
    file: Path, needed: Mapping[str, Any], further: Mapping[str, Any] | None = None
) -> Iterator[tuple[Place, Line]]:
    """The lines that have what is needed, of a file which may be absent or end in a line that was cut off.

    Raises:
      UsageError: a line is not JSON, or what it has is of another type.
    """
    start = 0
    if file.exists():
        with file.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                where = f"line {number} of {file}"
                line = _parse(raw, where) if raw.endswith(b"\n") else None
                if isinstance(line, dict) and all(line.get(name) is not None for name in needed):
                    hints = {**needed, **(further or {})}
                    check_fields(
                        line, where, {name: hint for name, hint in hints.items() if line.get(name) is not None}
                    )
                    if not -_STEPS < line.get("step", 0) < _STEPS:
                        raise UsageError(f"{where} has the step {line['step']:.0e}: mend or remove it")
                    yield (start, len(raw)), line
                start += len(raw)


def _parse(raw: bytes, name: object) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON ({reason_of(error)}): mend or remove it") from None


def _index(file: Path) -> Index:
    """Where the groups of each step are: many long rollouts are more than memory should hold."""
    index: dict[str, dict[int, list[Place]]] = {}
    for number, (place, line) in enumerate(_lines(file, _GROUP, _OF_GROUP), 1):
        size, parts = len(line["completions"]), line.get("components") or {}
        if len(line["rewards"]) != size or any(len(values) != size for values in parts.values()):
            raise UsageError(f"group {number} of {file} has other numbers of rewards than of completions: mend it")
        index.setdefault(line["phase"], {}).setdefault(line["step"], []).append(place)
    return index


# ---- text


# One character for one character: what HTML cannot hold becomes visible.
_VISIBLE: dict[int, int] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def _text(value: Any) -> str:
    """Anything of a run as text of the page, also within an attribute."""
    return escape((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).translate(_VISIBLE))


def _cut(value: Any, characters: int | None) -> Any:
    """The value, or the beginning of its text where that is too long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    left_out = len(text[characters:]) if characters else 0
    return f"{text[:characters]} … ({left_out} characters more)" if left_out else value


def _data(value: Any) -> str:
    """JSON within an attribute."""
    return escape(json.dumps(value, separators=(",", ":")))


def _number(value: float, sign: str = "") -> str:
    digits = "d" if isinstance(value, int) else ".4g" if abs(value) < 1e4 else ".6g"
    return format(value, sign + digits)


def _cell(value: Any) -> str:
    return "–" if value is None else _number(value) if type(value) in (int, float) else _text(value)


def _table(columns: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> str:
    head = "".join(f"<th scope=col>{_text(column)}" for column in columns)
    body = "".join(
        f"<tr><th scope=row>{_text(name)}" + "".join(f"<td>{_cell(row.get(column))}" for column in columns)
        for name, row in rows.items()
    )
    return f"<div class=scroll tabindex=0><table><tr><td>{head}{body}</table></div>"


def _pairs(values: Mapping[str, Any]) -> str:
    items = (f"<div><dt>{_text(name)}</dt><dd>{_cell(value)}</dd></div>" for name, value in values.items())
    return f"<dl>{''.join(items)}</dl>" if values else ""


def _folded(title: str, html: str) -> str:
    return f"<details><summary>{title}</summary>{html}</details>" if html else ""


# ---- options, warnings and results


def _options_html(file: Path) -> str:
    config = flattened(read_object(file))
    main = {name: config[name] for name in _MAIN if config.get(name) is not None}
    return _pairs(main) + _folded("All options", _pairs(config))


def _warnings_html(file: Path) -> str:
    items = "".join(f"<li>{_text(line['message'])}</li>" for _, line in _lines(file, {"message": str}))
    return f"<section class=warnings><h2>Warnings</h2><ul>{items}</ul></section>" if items else ""


def _how_it_ended_html(file: Path, curves: Curves, ends: Mapping[str, int]) -> str:
    """Results and last metrics. A comparison of before and after is what the run was for: it comes first."""
    results = _parse(file.read_bytes(), file) if file.exists() else None
    compared = isinstance(results, dict) and bool(results.keys() & {"before", "after"})
    html = [_results_html(results), _ending_html(curves, ends)]
    return "".join(html if compared else reversed(html))


def _ending_html(curves: Curves, ends: Mapping[str, int]) -> str:
    """The last values of a few metrics by phase, and folded those of the others."""
    if not curves:
        return "<p>This run has no metrics yet.</p>"
    means = _without_bounds(curves)
    last = {  # of bounds those beside the last mean, which may have none
        name: {phase: _last(points) if name in means else points[-1][1] for phase, points in lines.items()}
        for name, lines in curves.items()
    }
    cells = {
        name: {phase: _dated(value, curves[name][phase], ends[phase]) for phase, value in row.items()}
        for name, row in _with_bounds(last).items()
    }
    ungraded = {name: _sums(lines) for name, lines in curves.items() if name.startswith("ungraded_")}
    counted = {name: sums for name, sums in ungraded.items() if any(sums.values())}
    few = {name: cells[name] for name in _ENDING if name in cells}
    few |= {f"{name} (all steps)": sums for name, sums in counted.items()}
    rest = {name: row for name, row in cells.items() if name not in _ENDING and name not in counted}
    folded = _folded("Others", _table(list(ends), rest)) if rest else ""
    return f"<div><h3>Last metrics</h3>{_table(list(ends), {'step': ends} | few)}{folded}</div>"


def _sums(lines: Mapping[str, Points]) -> dict[str, float]:
    return {phase: sum(value for _, value in points if value is not None) for phase, points in lines.items()}


def _dated(value: Any, points: Points, end: int) -> Any:
    """The last value of a curve, with its step where that is not the end of the phase."""
    step = next((step for step, value in reversed(points) if value is not None), end)
    return value if step == end else f"{value if isinstance(value, str) else _number(value)} (step {step})"


def _bounds_of(name: str, names: Container[str]) -> tuple[str, str] | None:
    """Names of the bounds of a metric's interval, if it has one."""
    bounds = f"{name}_low", f"{name}_high"
    return bounds if bounds[0] in names and bounds[1] in names else None


def _without_bounds(names: Collection[str]) -> list[str]:
    bounds = {bound for name in names for bound in _bounds_of(name, names) or ()}
    return [name for name in names if name not in bounds]


def _with_bounds(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of a table, with the bounds of an interval in the cell of its mean."""

    def cell(name: str, column: str) -> Any:
        value, bounds = rows[name].get(column), _bounds_of(name, rows)
        low, high = (rows[bound].get(column) for bound in bounds) if bounds else (None, None)
        return f"{value:.3f} [{low:.3f}, {high:.3f}]" if all(fits(x, float) for x in (value, low, high)) else value

    return {name: {column: cell(name, column) for column in rows[name]} for name in _without_bounds(rows)}


def _last(points: Points) -> float | None:
    return next((value for _, value in reversed(points) if value is not None), None)


def _results_html(results: Any) -> str:
    """The experiment's own table: objects are columns, other values are listed; what is no table is shown as it is."""
    if not results:
        return ""
    values = results.values() if isinstance(results, dict) else [[results]]
    if any(isinstance(x, list | dict) for v in values for x in (v.values() if isinstance(v, dict) else [v])):
        return _folded("results.json", f"<div class=text>{_text(_cut(results, 100_000))}</div>")
    columns = {name: column for name, column in results.items() if isinstance(column, dict)}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = {name: {title: column.get(name) for title, column in columns.items()} for name in names}
    others = {name: value for name, value in results.items() if name not in columns}
    table = _table(list(columns), _with_bounds(rows)) if rows else ""
    return f"<div><h3>Results</h3>{table}{_pairs(others)}</div>"


# ---- curves


def _curves(lines: Sequence[Line], phases: Sequence[str]) -> Curves:
    """Numbers by metric and phase, what to look at first in front. Null, NaN and infinity are gaps."""
    curves: dict[str, dict[str, list[tuple[int, float | None]]]] = {}
    for line in lines:
        for name, value in line.items():
            if line["phase"] in phases and name not in ("phase", "step") and type(value) in (int, float, type(None)):
                finite = value if value is not None and abs(value) < 1e300 else None
                curves.setdefault(name, {}).setdefault(line["phase"], []).append((line["step"], finite))
    return {name: curves[name] for name in sorted(curves, key=_rank)}


def _with_zeros(metrics: Sequence[Line]) -> list[Line]:
    """Ungraded completions are logged where there are some: of the other rollouts their number is 0."""
    none = {name: 0 for line in metrics for name in line if name.startswith("ungraded_")}
    return [none | dict(line) if "reward" in line else line for line in metrics]


def _rank(name: str) -> int:
    """Place in _FIRST, or behind."""
    return next((rank for rank, pattern in enumerate(_FIRST) if fnmatchcase(name, pattern)), len(_FIRST))


def _unit(name: str) -> str:
    return next((unit for pattern, unit in _UNITS.items() if fnmatchcase(name, pattern)), name)


def _curves_html(metrics: Curves, times: Curves, ends: Mapping[str, int]) -> str:
    first = {name: lines for name, lines in metrics.items() if _rank(name) < len(_FIRST)}
    rest = {name: lines for name, lines in metrics.items() if name not in first}
    about = "Point at a curve, touch it, or use the arrow keys, to read the values of a step."
    if any(len(points) > 2 * _PARTS for lines in metrics.values() for points in lines.values()):
        about += f" Long curves show the lowest and the highest value of each of {_PARTS} parts."
    html = f"<p class=soft>{about}</p>{_charts_html(first, ends)}"
    return html + _folded("Others", _charts_html(rest, ends)) + _folded("Times", _charts_html(times, ends))


def _charts_html(curves: Curves, ends: Mapping[str, int]) -> str:
    """A chart for each metric that has a value."""
    html = ""
    for name in _without_bounds(curves):
        drawn = {phase: _thin(curves[name].get(phase, ())) for phase in ends}
        drawn = {phase: points for phase, points in drawn.items() if any(value is not None for _, value in points)}
        bounds = [curves[bound] for bound in _bounds_of(name, curves) or ()]
        bands = {phase: _band(*(bound.get(phase, ()) for bound in bounds)) for phase in drawn}
        html += _chart_html(name, drawn, bands, ends) if drawn else ""
    return f"<div class=charts>{html}</div>" if html else ""


def _limits_of(lines: Sequence[Points], bands: Sequence[Sequence[tuple[int, float, float]]]) -> tuple[float, float]:
    """Of the vertical axis of lines and bands; of none any."""
    values = [value for points in lines for _, value in points if value is not None]
    values += [bound for band in bands for _, *pair in band for bound in pair]
    return _limits(values or [0.0, 1.0])


def _band(lows: Points = (), highs: Points = ()) -> Sequence[tuple[int, float, float]]:
    """Step and bounds of an interval, where there are both."""
    tops = dict(highs)
    return [(s, low, top) for s, low in lows if low is not None and (top := tops.get(s)) is not None]


def _chart_html(
    name: str,
    lines: Mapping[str, Points],
    bands: Mapping[str, Sequence[tuple[int, float, float]]],
    ends: Mapping[str, int],
) -> str:
    """One metric. Phases differ in colour and in dashes; an interval is a band around its mean.

    The reward of a coin toss has an axis of its own at the right: it is not that of the other phases.
    """
    steps = [step for points in lines.values() for step, _ in points]
    first, last = (min(steps), max(steps)) if min(steps) < max(steps) else (steps[0] - 1, steps[0] + 1)
    apart = [phase for phase in lines if name == "reward" and is_coin(phase)]  # on an axis of their own
    apart = apart if len(apart) < len(lines) else []
    others = [phase for phase in lines if phase not in apart]
    left, own = (_limits_of([lines[p] for p in of], [bands[p] for p in of]) for of in (others, apart))
    phases = list(ends)  # which may not all have this metric
    right = _RIGHT - 34 if apart else _RIGHT

    def x(step: float) -> float:
        return round(_LEFT + (right - _LEFT) * (step - first) / (last - first), 1)

    def y(value: float, limits: tuple[float, float] = left) -> float:
        low, high = limits
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low), 1)

    axes, paths, ending = f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{right}"/>', "", ""
    for tick, label in _ticks(*left):
        axes += f'<path d="M{_LEFT} {y(tick)}H{right}"/><text x={_LEFT - 5} y={y(tick) + 4} class=y>{label}</text>'
    for tick, label in _ticks(*own) if apart else ():
        axes += f'<path d="M{right} {y(tick, own)}h4"/><text x={right + 20} y={y(tick, own) + 4}>{label}</text>'
    for tick, _ in _ticks(first, last):
        if tick.is_integer() and (tick == steps[0] or len(set(steps)) > 1):
            axes += f'<path d="M{x(tick)} {_BOTTOM}v4"/><text x={x(tick)} y={_BOTTOM + 16}>{tick:.0f}</text>'
    for phase, points in lines.items():
        style, limits = f"line l{phases.index(phase) % 4}", own if phase in apart else left
        edge = [(x(s), y(top, limits)) for s, _, top in bands[phase]]
        edge += [(x(s), y(b, limits)) for s, b, _ in reversed(bands[phase])]
        if edge:
            corners = "L".join(f"{at} {height}" for at, height in edge)
            paths += f'<path class="band l{phases.index(phase) % 4}" d="M{corners}Z"/>'
        paths += (
            f'<path class="{style}" d="{_path([(x(s), None if v is None else y(v, limits)) for s, v in points])}"/>'
        )
        key = f'<svg class=key viewBox="0 0 32 10" aria-hidden=true><path class="{style}" d="M2 5H30"/></svg>'
        cell = _cell(_dated(_last(points), points, ends[phase]))
        about = " <small>of a coin, axis at the right</small>" if phase in apart else ""
        ending += f"<li>{key}<bdi>{_text(phase)}</bdi> <b>{cell}</b>{about}</li>"
    data = [[(step, v if v is None else float(f"{v:.5g}")) for step, v in points] for points in lines.values()]
    return (
        f'<figure data-lines="{_data(data)}" data-axis="{_data((first, last, _LEFT, right - _LEFT))}">'
        f"<figcaption><strong>{_text(name)}</strong> <span class=step-at>at the end</span></figcaption>"
        f'<svg class=chart viewBox="0 0 340 200" role=img tabindex=0 aria-label="{_text(name)} by step">'
        f'{axes}<text x={(_LEFT + right) / 2} y=195>step</text><path class=cursor d=""/>{paths}'
        f'<text transform="translate(11 {(_TOP + _BOTTOM) / 2}) rotate(-90)">{_text(_unit(name))}</text></svg>'
        f"<ul aria-live=polite>{ending}</ul></figure>"
    )


def _thin(points: Points) -> Points:
    """Of a long curve the ends, the last value, the extremes of each part, and a gap where the part has one."""
    if len(points) <= 2 * _PARTS:
        return points
    size, kept = math.ceil(len(points) / _PARTS), {0, len(points) - 1}
    kept.update([i for i, (_, value) in enumerate(points) if value is not None][-1:])
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        values = sorted((value, i) for i in part if (value := points[i][1]) is not None)
        kept.update([i for _, i in (*values[:1], *values[-1:])], [i for i in part if points[i][1] is None][:1])
    return [points[i] for i in sorted(kept)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Of the vertical axis: around what is constant but for rounding so wide that it looks so."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if size < 1e-30 or low == high == 1:
        return 0.0, 1.0
    spread = high - low if high - low > 1e-3 * size else 0.2 * size
    middle, half = (low + high) / 2, 0.55 * spread
    return (middle - half if low < 0 else max(middle - half, 0.0)), middle + half


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Up to five round numbers within the limits, with their labels."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4)
    digits = max(0, -math.floor(math.log10(step)))
    form = f".{digits}f" if digits <= 4 and max(abs(low), abs(high)) < 1e6 else ".3g"
    return [(i * step, format(i * step + 0.0, form)) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    """Lines between neighbours that both have a value; a lone one is a short dash."""
    path, before = "", False
    for i, (x, y) in enumerate(points):
        if y is not None:
            alone = not before and (i + 1 == len(points) or points[i + 1][1] is None)
            path += f"M{x - 2.5:.1f} {y}h5" if alone else f"{'L' if before else 'M'}{x} {y}"
        before = y is not None
    return path


# ---- groups


class _Plan(NamedTuple):
    """How much of the rollouts is shown."""

    steps: int  # of a phase, evenly spaced
    groups: int  # of a step
    characters: int | None = None  # of a completion, a prompt and another column; None: all


def _plans(steps: int, groups: int) -> Iterator[_Plan]:
    """From everything to little: groups go before the course of the run, which a dozen steps show."""
    yield (plan := _Plan(steps, groups))
    for name, least in (("steps", 12), ("groups", 1), ("steps", 2)):
        while (count := getattr(plan, name)) > least:
            yield (plan := plan._replace(**{name: max(least, int(0.95 * count))}))
    for characters in (8000, 4000, 2000, 1000, 500):
        yield plan._replace(characters=characters)


def _spaced(steps: Sequence[int], count: int) -> list[int]:
    """Up to `count` evenly spaced ones, the first and the last among them."""
    count = min(count, len(steps))
    return [steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)]


def _groups_html(file: Path, index: Index, room: int) -> tuple[str, str]:
    """What is said of the groups, and as many as fit into `room` bytes."""
    if not index:
        return "This run has no rollouts.", ""
    most = max(len(groups) for steps in index.values() for groups in steps.values())
    density = 0.2  # bytes of the page to those of the file: less than it is, and then as measured
    for plan in _plans(max(map(len, index.values())), most):
        chosen = {
            phase: {step: steps[step][: plan.groups] for step in _spaced(list(steps), plan.steps)}
            for phase, steps in index.items()
        }
        size = sum(size for steps in chosen.values() for groups in steps.values() for _, size in groups)
        if density * size > room and not plan.characters:
            continue
        html = _steps_html(file, chosen, plan.characters)
        if (written := len(html.encode())) <= room:
            break
        density = written / size
    else:
        return f"The groups are too large for a page of {MAX_BYTES / 1e6:g} MB: read rollouts.jsonl.", ""
    shown = [
        f"{len(chosen[p])} of {len(index[p])} steps of {_text(p)}" for p in index if len(chosen[p]) < len(index[p])
    ]
    shown += [f"{plan.groups} of {most} groups of a step"] if plan.groups < most else []
    shown += [f"the first {plan.characters} characters of a prompt, completion or column"] if plan.characters else []
    about = f"To stay below {MAX_BYTES / 1e6:g} MB this page shows {', '.join(shown)}. The rest is in rollouts.jsonl."
    return (about if shown else "All that is in rollouts.jsonl."), html


def _steps_html(file: Path, chosen: Index, characters: int | None) -> str:
    """A section for each step; the last one of the phase that the run is for is open."""
    shown = next((phase for phase in chosen if phase not in SIDE_PHASES), next(iter(chosen)))
    html = []
    with file.open("rb") as lines:
        for phase, steps in chosen.items():
            for step, places in steps.items():
                opened = " open" if phase == shown and step == list(steps)[-1] else ""
                html.append(f'<details class=step data-phase="{_text(phase)}" data-step="{_text(step)}"{opened}>')
                html.append(f"<summary>{_text(phase)}, step {_text(step)}</summary>")
                for number, (start, size) in enumerate(places, 1):
                    lines.seek(start)
                    html.append(_group_html(json.loads(lines.read(size)), number, characters))
                html.append("</details>")
    return "".join(html)


def _group_html(group: Line, number: int, characters: int | None) -> str:
    about, rewards = f"{len(group['completions'])} completions", [r for r in group["rewards"] if r is not None]
    if rewards and min(rewards) == max(rewards):
        about += f"; all rewards are {_number(rewards[0])}: nothing to learn from"
    elif rewards:
        about += f"; rewards {_number(min(rewards))} to {_number(max(rewards))}"
    columns = {name: _cut(value, characters) for name, value in (group.get("columns") or {}).items()}
    cards = "".join(_card_html(group, i, characters) for i in range(len(group["completions"])))
    return (
        f"<h3>Prompt {number}</h3><div class=prompt tabindex=0>{_text(_cut(group['prompt'], characters))}</div>"
        f"{_pairs(columns)}<p class=soft>{about}.</p><ul class=cards>{cards}</ul>"
    )


def _card_html(group: Line, i: int, characters: int | None) -> str:
    """One completion."""
    own = {name: values[i] for name, values in group.items() if isinstance(values, list) and i < len(values)}
    whole, advantage = own["completions"], own.get("advantages")
    text = whole[:characters]
    signed = None if advantage is None else _number(advantage, sign="+")
    numbers = {"reward": own.get("rewards"), "advantage": signed, "tokens": own.get("lengths")}
    numbers |= {"ended by": own["endings"]} if own.get("endings") else {}
    components = {name: values[i] for name, values in (group.get("components") or {}).items()}
    side = "up" if (advantage or 0) > 0 else "down" if (advantage or 0) < 0 else "even"
    cut = "<strong class=cut>cut off</strong>" if own.get("truncated") else ""
    more = f"<p class=soft>… {len(whole) - len(text)} characters more</p>" if len(text) < len(whole) else ""
    is_cut = bool(cut or more)
    more += _spans_html(own, characters)
    parts = parts_of(group, i)
    if len(text) > _FOLD or text.count("\n") > 12:
        more += "<label class=more><input type=checkbox> show all of it</label>"
    return (
        f'<li class="card {side}" data-number={i} data-reward="{_text(own.get("rewards"))}">'
        f"<h4>Completion {i + 1} {cut}</h4>{_pairs(numbers)}{_pairs(components)}"
        f"{_turns_html(group, i, parts, characters, is_cut) if parts else _text_html(text, own, characters, is_cut)}"
        f"{more}</li>"
    )


def _text_html(text: str, own: Mapping[str, Any], characters: int | None, is_cut: bool) -> str:
    """A text whose tokens may be shaded. `own` may have "tokens" and "logprobs"."""
    tokens = _tokens(text, own.get("tokens"), own.get("logprobs"), characters) + (" data-cut" if is_cut else "")
    return f"<div class=text{tokens}>{_text(text)}</div>"


def _turns_html(group: Line, i: int, parts: Sequence[Part], characters: int | None, is_cut: bool) -> str:
    """An episode: what the policy said in each turn, with what the turn earned, and set apart what was answered."""
    html, left = "", characters
    for part in parts:
        text = part.text[:left]
        if part.is_own:
            advantage = of_turn(group, "turn_advantages", i, part.number)
            numbers = {
                "turn": part.number,
                "reward": of_turn(group, "turn_rewards", i, part.number),
                "advantage": None if advantage is None else _number(advantage, sign="+"),
                "mean probability": part.mean_probability,
            }
            html += _pairs({name: value for name, value in numbers.items() if value is not None})
            html += _text_html(text, part._asdict(), left, is_cut and part is parts[-1])
        else:
            html += f'<div class="text heard" aria-label="the environment">{_text(text)}</div>'
        left = None if left is None else left - len(text)
        if left == 0:
            break
    return html


_OF_SPAN = ("reward", "advantage", "text")


def _spans_html(own: Mapping[str, Any], characters: int | None) -> str:
    """What each span of a completion earned, its advantage, and its text."""
    tokens, places = own.get("tokens") or [], own.get("spans") or []
    texts = [_cut("".join(tokens[slice(*place[:2])]), characters) if place else "" for place in places]
    rows = zip_longest(own.get("span_rewards") or [], own.get("span_advantages") or [], texts)
    table = {str(number): dict(zip(_OF_SPAN, row, strict=True)) for number, row in enumerate(rows, 1)}
    return _folded(f"{len(places)} spans", _table(_OF_SPAN, table)) if places else ""


def _tokens(
    text: str, tokens: Sequence[str] | None, logprobs: Sequence[float | None] | None, characters: int | None
) -> str:
    """An attribute for the page's script, short because there are many tokens.

    Their lengths, -100 ln of their probabilities, and their text where it is not that of the completion.
    """
    if not tokens:
        return ""
    joined = "".join(tokens)[:characters]
    lengths, cents, left = [], [], len(joined)
    for token, logprob in zip(tokens, [*(logprobs or []), *[None] * len(tokens)], strict=False):
        if left <= 0 and characters:
            break
        lengths.append(min(len(token), left))
        cents.append(None if logprob is None or not abs(logprob) < 1e300 else round(-100 * logprob))
        left -= len(token)
    value = {"lengths": lengths, "cents": cents} | ({"text": joined.translate(_VISIBLE)} if joined != text else {})
    return f' data-tokens="{_data(value)}"'


def command() -> None:
    """The command line."""
    given = read_flags(Options, prog=program(), description=__doc__)
    with refusing():
        written = write_report(given.run, given.phase)
    Console().print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    command()
