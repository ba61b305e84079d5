"""Writes a run as a page that people can read: report.html, which opens from disk and asks nothing of the network.

It shows how the run ended, its curves, and groups of completions side by side with their rewards, advantages and
the probabilities of their tokens. `write_report` does the same from Python, also while the run goes on.

  python -m grpo_jax.report runs/stories
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich.console import Console

from grpo_jax.cli import refuse
from grpo_jax.errors import UsageError
from grpo_jax.training.run import write_text

MAX_BYTES = 5_000_000  # of the page; groups are left out to keep to it
_FOLD = 700  # characters of a completion that are shown unfolded
_BUCKETS = 120  # of a long curve, each drawn by its lowest and its highest point
# What to look at first, in this order, and the unit.
_FIRST = (
    ("reward", "mean of completions"),
    ("heldout_*", "mean of held-out prompts"),
    ("kl", "nats a token"),
    ("entropy", "nats a token"),
    ("zero_spread_share", "share of groups"),
    ("length_mean", "tokens"),
    ("truncated_share", "share of completions"),
    ("clip*", "share of tokens"),
    ("ratio", "mean of tokens"),
    ("ratio*", "ratio"),
    ("sampler_mismatch", "mean exp |difference|"),
    ("grad_norm", "norm before clipping"),
)
_MAIN = ("model", "preset", "steps", "num_prompts", "group_size", "max_tokens", "learning_rate", "kl_coef", "seed")
_LEFT, _RIGHT, _TOP, _BOTTOM = (
    54,
    332,
    8,
    160,
)  # of the axes in a chart of 340 by 200; the page's script knows the last two

Line = dict[str, Any]  # of a file of the run: "phase", "step", and more
Point = tuple[int, float | None]  # step and value; None is a gap
Curves = dict[str, dict[str, list[Point]]]  # metric -> phase -> points
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
    among them, and says so.

    Args:
      folder: of the run.
      phases: to show; none given: all of them.

    Returns:
      The file.

    Raises:
      UsageError: the folder holds no run, a file of it cannot be read, or it has no such phase.
    """
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} holds no config.json: name the folder of a run")
    metrics, times = ([line for _, line in _lines(folder / f"{name}.jsonl")] for name in ("metrics", "times"))
    index = _index(folder / "rollouts.jsonl")
    found = list(dict.fromkeys([*(line["phase"] for line in metrics), *index]))
    if unknown := [phase for phase in phases if phase not in found]:
        raise UsageError(f"{folder} has no lines of a phase {unknown[0]!r}: its phases are {found}")
    shown = [phase for phase in found if phase in phases or not phases]
    curves = _curves(metrics, shown)
    body = (
        _options_html(_parse((folder / "config.json").read_bytes(), folder / "config.json"))
        + _ending_html(curves, shown, folder / "results.json")
        + _curves_html(curves, _curves(times, shown), shown)
    )
    page = resources.files("grpo_jax").joinpath("report_page.html").read_text("utf-8")
    room = MAX_BYTES - len(page.encode()) - len(body.encode()) - 5_000  # for the title, and what is said of the groups
    body += _groups_html(folder / "rollouts.jsonl", {name: index[name] for name in shown if name in index}, room)
    # Nothing but what is written in the page itself may be fetched, run or applied.
    for tag in ("style", "script"):
        digest = hashlib.sha256(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0].encode()).digest()
        page = page.replace(f"<!--{tag} hash-->", f"sha256-{base64.b64encode(digest).decode()}")
    # Last, and escaped: text of the run meets no placeholder.
    page = page.replace("<!--title-->", _text(folder.resolve().name)).replace("<!--body-->", body)
    write_text(folder / "report.html", page)
    return folder / "report.html"


# ---- files


def _lines(file: Path) -> Iterator[tuple[Place, Line]]:
    """The lines of a file, which may be absent or end in a line that was cut off."""
    if not file.exists():
        return
    start = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            if raw.endswith(b"\n"):
                yield (start, len(raw)), _parse(raw, f"line {number} of {file}")
            start += len(raw)


def _parse(raw: bytes, name: object) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise UsageError(f"{name} is not JSON ({error}): mend or remove it") from None


def _index(file: Path) -> dict[str, dict[int, list[Place]]]:
    """Where the groups of each step are. Many long rollouts are more than memory should hold."""
    index: dict[str, dict[int, list[Place]]] = {}
    for place, line in _lines(file):
        index.setdefault(line["phase"], {}).setdefault(line["step"], []).append(place)
    return index


# ---- text


# One character for one character: what HTML cannot hold becomes visible.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def _text(value: Any) -> str:
    """Anything of a run as text of the page, also within an attribute."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(text.translate(_VISIBLE))


def _data(value: Any) -> str:
    """JSON within an attribute."""
    return escape(json.dumps(value, separators=(",", ":")))


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return format(value, f"{sign}d")
    return format(value, f"{sign}.4g" if abs(value) < 1e4 else f"{sign}.6g")


def _cell(value: Any) -> str:
    return _number(value) if value is None or type(value) in (int, float) else _text(value)


def _table(columns: Sequence[str], rows: Mapping[str, Sequence[Any]]) -> str:
    head = "".join(f"<th scope=col>{_text(column)}" for column in columns)
    body = "".join(
        f"<tr><th scope=row>{_text(name)}" + "".join(f"<td>{_cell(value)}" for value in values)
        for name, values in rows.items()
    )
    return f'<div class="scroll" tabindex="0"><table><tr><td>{head}{body}</table></div>'


def _pairs(values: Mapping[str, Any]) -> str:
    items = (f"<div><dt>{_text(name)}</dt><dd>{_cell(value)}</dd></div>" for name, value in values.items())
    return f"<dl>{''.join(items)}</dl>" if values else ""


# ---- options and results


def _options_html(config: Mapping[str, Any]) -> str:
    main = {name: config[name] for name in _MAIN if config.get(name) is not None}
    return f"{_pairs(main)}<details><summary>All options</summary>{_pairs(config)}</details>"


def _ending_html(curves: Curves, phases: Sequence[str], results: Path) -> str:
    """The last value of what matters, by phase, and the experiment's own table."""
    last = {
        name: [
            next((value for _, value in reversed(lines.get(phase, [])) if value is not None), None) for phase in phases
        ]
        for name, lines in curves.items()
        if _rank(name) < len(_FIRST)
    }
    steps = [
        max((points[-1][0] for lines in curves.values() if (points := lines.get(phase))), default=0) for phase in phases
    ]
    html = "<h2>How it ended</h2>"
    html += _table(phases, {"step": steps} | last) if curves else "<p>This run has no metrics yet.</p>"
    return html + (_results_html(_parse(results.read_bytes(), results)) if results.exists() else "")


def _results_html(results: Any) -> str:
    if not isinstance(results, dict) or any(
        isinstance(value, list | dict) and not _is_row(value) for value in results.values()
    ):
        return f"<details><summary>results.json</summary><div class=text>{_text(results)}</div></details>"
    rows = {name: row for name, row in results.items() if isinstance(row, dict)}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = (
        _table(columns, {name: [row.get(column) for column in columns] for name, row in rows.items()}) if rows else ""
    )
    return "<h3>Results</h3>" + table + _pairs({name: value for name, value in results.items() if name not in rows})


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and not any(isinstance(item, list | dict) for item in value.values())


# ---- curves


def _curves(lines: Sequence[Line], phases: Sequence[str]) -> Curves:
    """Numbers by metric and phase, what to look at first in front. Null, NaN and infinity are gaps."""
    curves: Curves = {}
    for line in lines:
        for name, value in line.items():
            if line["phase"] in phases and name not in ("phase", "step") and type(value) in (int, float, type(None)):
                finite = value if value is not None and abs(value) < 1e300 else None
                curves.setdefault(name, {}).setdefault(line["phase"], []).append((line["step"], finite))
    return {name: curves[name] for name in sorted(curves, key=_rank)}


def _rank(name: str) -> int:
    """Place in _FIRST, or behind. Standard errors are read beside their means, in the table of results."""
    ranks = (
        rank for rank, (pattern, _) in enumerate(_FIRST) if fnmatchcase(name, pattern) and not name.endswith("_se")
    )
    return next(ranks, len(_FIRST))


def _curves_html(metrics: Curves, times: Curves, phases: Sequence[str]) -> str:
    first = {name: lines for name, lines in metrics.items() if _rank(name) < len(_FIRST)}
    rest = {name: lines for name, lines in metrics.items() if name not in first}
    html = (
        "<h2>Curves</h2><p class=soft>Point at a curve, touch it, or use the arrow keys, to read the values of a step."
    )
    if any(len(points) > 2 * _BUCKETS for lines in metrics.values() for points in lines.values()):
        html += f" Long curves show the lowest and the highest value of each of {_BUCKETS} parts."
    html += f"</p><div class=charts>{_charts_html(first, phases)}</div>"
    for title, curves in (("All other metrics", rest), ("Seconds and tokens", times)):
        if charts := _charts_html(curves, phases):
            html += f"<details><summary>{title}</summary><div class=charts>{charts}</div></details>"
    return html


def _charts_html(curves: Curves, phases: Sequence[str]) -> str:
    """A chart for each metric that has a value."""
    drawn = {
        name: {phase: lines[phase] for phase in phases if any(value is not None for _, value in lines.get(phase, ()))}
        for name, lines in curves.items()
    }
    return "".join(_chart_html(name, lines, phases) for name, lines in drawn.items() if lines)


def _chart_html(name: str, lines: Mapping[str, Sequence[Point]], phases: Sequence[str]) -> str:
    thinned = {phase: _thin(points) for phase, points in lines.items()}
    steps = [step for points in thinned.values() for step, _ in points]
    first, last = (min(steps), max(steps)) if min(steps) < max(steps) else (steps[0] - 1, steps[0] + 1)
    low, high = _limits([value for points in thinned.values() for _, value in points if value is not None])

    def x(step: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (step - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value - low) / (high - low), 1)

    units = (*(unit for _, unit in _FIRST), "seconds" if name == "s" or name.endswith("_s") else "")
    unit = units[_rank(name)] or name
    axes = "".join(
        f'<path d="M{_LEFT} {y(tick)}H{_RIGHT}"/><text x="{_LEFT - 5}" y="{y(tick) + 4}" text-anchor="end">{label}</text>'
        for tick, label in _ticks(low, high)
    ) + "".join(
        f'<path d="M{x(tick)} {_BOTTOM}v4"/><text x="{x(tick)}" y="{_BOTTOM + 16}" text-anchor="middle">{label}</text>'
        for tick, label in _ticks(first, last)
        if tick == int(tick)
    )
    paths = "".join(
        f'<path class="line l{phases.index(phase) % 4}" d="{_path([(x(s), None if v is None else y(v)) for s, v in points])}"/>'
        for phase, points in thinned.items()
    )
    ending = "".join(
        f'<li><svg class=key viewBox="0 0 32 10" aria-hidden=true><path class="line l{phases.index(phase) % 4}" d="M2 5H30"/>'
        f"</svg>{_text(phase)} <b>{_number(next(value for _, value in reversed(points) if value is not None))}</b></li>"
        for phase, points in thinned.items()
    )
    return (
        f'<figure data-lines="{_data([[(s, _rounded(v)) for s, v in points] for points in thinned.values()])}"'
        f' data-axis="{_data((first, last, _LEFT, _RIGHT - _LEFT))}"><figcaption><strong>{_text(name)}</strong>'
        f" <span class=step-at>at the end</span></figcaption>"
        f'<svg class=chart viewBox="0 0 340 200" role=img tabindex=0 aria-label="{_text(name)} by step">{axes}'
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/><path class=cursor d=""/>{paths}'
        f'<text x="{(_LEFT + _RIGHT) / 2}" y=195 text-anchor=middle>step</text>'
        f'<text transform="translate(11 {(_TOP + _BOTTOM) / 2}) rotate(-90)" text-anchor=middle>{_text(unit)}</text></svg>'
        f"<ul aria-live=polite>{ending}</ul></figure>"
    )


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    """Of a long curve the ends, the extremes of each part, and a gap where the part has one."""
    if len(points) <= 2 * _BUCKETS:
        return points
    size, kept = math.ceil(len(points) / _BUCKETS), {0, len(points) - 1}
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        kept.update([i for i in part if points[i][1] is None][:1])
        if values := sorted((value, i) for i in part if (value := points[i][1]) is not None):
            kept |= {values[0][1], values[-1][1]}
    return [points[i] for i in sorted(kept)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Of the vertical axis: wider than rounding, so that what is constant looks so."""
    low, high = min(values), max(values)
    spread = max(high - low, 1e-3 * max(abs(low), abs(high))) or 1.0
    middle, half = (low + high) / 2, 0.55 * spread
    return (middle - half if low < 0 else max(middle - half, 0.0)), middle + half


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Three to six round numbers within the limits, with their labels."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4)
    digits = max(0, -math.floor(math.log10(step)))
    form = f".{digits}f" if digits <= 4 and max(abs(low), abs(high)) < 1e6 else ".3g"
    return [(i * step, format(i * step + 0.0, form)) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    """Lines between neighbours that both have a value; a lone one is a dot."""
    path, drawing = "", False
    for x, y in points:
        if y is not None:
            path += f"L{x} {y}" if drawing else f"M{x} {y}h0"
        drawing = y is not None
    return path


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- groups


class _Plan(NamedTuple):
    """How much of the rollouts is shown."""

    steps: int  # of a phase, evenly spaced
    groups: int  # of a step
    characters: int | None = None  # of a completion; None: all


def _plans(index: Index) -> Iterator[_Plan]:
    """From everything to little. A page that shows the course of a run is worth more than one of many groups."""
    plan = _Plan(
        max(map(len, index.values())), max(len(groups) for steps in index.values() for groups in steps.values())
    )
    yield plan
    for name, least in (("steps", 12), ("groups", 2), ("steps", 2), ("groups", 1)):
        while (count := getattr(plan, name)) > least:
            plan = plan._replace(**{name: max(least, int(0.95 * count))})
            yield plan
    for characters in (8000, 4000, 2000, 1000, 500):
        yield plan._replace(characters=characters)


def _spaced(steps: Sequence[int], count: int) -> list[int]:
    """Up to `count` evenly spaced ones, the first and the last among them."""
    count = min(count, len(steps))
    return [steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)]


def _groups_html(file: Path, index: Index, room: int) -> str:
    """As many groups as fit into `room` bytes."""
    title = "<h2>Groups</h2>"
    if not index:
        return f"{title}<p>This run has no rollouts.</p>"
    density = 0.2  # bytes of the page to those of the file: less than it is, and then as measured
    for plan in _plans(index):  # noqa: B007
        chosen = {
            phase: {step: steps[step][: plan.groups] for step in _spaced(list(steps), plan.steps)}
            for phase, steps in index.items()
        }
        size = sum(size for steps in chosen.values() for places in steps.values() for _, size in places)
        if plan.characters is None and density * size > room:
            continue
        html = _steps_html(file, chosen, plan.characters)
        if len(html.encode()) <= room:
            break
        density = len(html.encode()) / size
    return f"{title}<p class=soft>{_left_out(index, chosen, plan)}</p>{_TOOLS}{html}"


def _left_out(index: Index, chosen: Index, plan: _Plan) -> str:
    parts = [
        f"{len(chosen[phase])} of {len(steps)} steps of {_text(phase)}"
        for phase, steps in index.items()
        if len(chosen[phase]) < len(steps)
    ]
    most = max(len(groups) for steps in index.values() for groups in steps.values())
    parts += [f"{plan.groups} of up to {most} groups of a step"] if plan.groups < most else []
    parts += [f"the first {plan.characters} characters of a completion"] if plan.characters else []
    if not parts:
        return "All groups of rollouts.jsonl."
    return f"To stay below {MAX_BYTES // 10**6} MB the page holds {', '.join(parts)}. The rest is in rollouts.jsonl."


_TOOLS = (
    "<form class=tools hidden><label>phase <select name=phase></select></label>"
    "<label>step <input type=range name=step min=0> <output></output></label>"
    "<label>order <select name=sort><option value=number>as sampled<option value=reward>by reward</select></label>"
    "<label><input type=checkbox name=tokens> probabilities of tokens</label></form>"
    "<p class=soft>With probabilities shown, tokens are shaded more below 0.8, 0.4, 0.15 and 0.05, and underlined "
    "below 0.15 and (solid) 0.05. Point at one, tap it, or use the arrow keys within a text, to read its own.</p>"
)


def _steps_html(file: Path, chosen: Index, characters: int | None) -> str:
    """A section for each step; the last one of GRPO, or of what there is, is open."""
    shown = "grpo" if "grpo" in chosen else next(iter(chosen))
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
    rewards = [reward for reward in group["rewards"] if reward is not None]
    summary = f"{len(group['completions'])} completions"
    if rewards:
        mean, low, high = sum(rewards) / len(rewards), min(rewards), max(rewards)
        same = f"; all rewards are {_number(low)}: nothing to learn from"
        summary += same if low == high else f"; rewards {_number(low)} to {_number(high)}, mean {_number(mean)}"
    cards = "".join(_card_html(group, i, characters) for i in range(len(group["completions"])))
    return (
        f"<h3>Prompt {number}</h3><div class=prompt tabindex=0>{_text(group['prompt'])}</div>"
        f"{_pairs(group.get('columns') or {})}<p class=soft>{summary}.</p><ul class=cards>{cards}</ul>"
    )


def _card_html(group: Line, i: int, characters: int | None) -> str:
    def of(name: str) -> Any:
        values = group.get(name) or []
        return values[i] if i < len(values) else None

    whole, reward, advantage = group["completions"][i], of("rewards"), of("advantages")
    text = whole[:characters]
    left = len(whole) - len(text)
    side = "" if not advantage else " up" if advantage > 0 else " down"
    components = {name: values[i] for name, values in (group.get("components") or {}).items()}
    numbers = "".join(
        f"<div><dt>{name}</dt><dd class={name}>{value}</dd></div>"
        for name, value in (
            ("reward", "does not apply" if reward is None else _number(reward)),
            ("advantage", _number(advantage, sign="+")),
            ("tokens", _number(of("lengths"))),
        )
    )
    cut = " <strong class=cut>cut off</strong>" if of("truncated") else ""
    more = ""
    if len(text) > _FOLD or text.count("\n") > 12:
        more = "<label class=more><input type=checkbox> show all of it</label>"
    tokens = _tokens(text, of("tokens"), of("logprobs"), characters)
    return (
        f'<li class="card{side}" data-number={i} data-reward="{"" if reward is None else reward}">'
        f"<h4>Completion {i + 1}{cut}</h4><dl>{numbers}</dl>{_pairs(components)}"
        f"<div class=text{tokens}{' data-cut' if cut or left else ''}>{_text(text)}</div>"
        f"{f'<p class=soft>… and {left} characters more</p>' if left else ''}{more}</li>"
    )


def _tokens(
    text: str, tokens: Sequence[str] | None, logprobs: Sequence[float | None] | None, characters: int | None
) -> str:
    """An attribute for the page's script, short because there are many tokens.

    Their lengths, -100 ln of their probabilities, and their text where it is not that of the completion.
    """
    if not tokens:
        return ""
    value: Line = {"lengths": [], "cents": []}
    left = sum(map(len, tokens)) if characters is None else characters
    for token, logprob in zip(tokens, [*(logprobs or []), *[None] * len(tokens)], strict=False):
        if characters is not None and left <= 0:
            break
        value["lengths"].append(min(len(token), left))
        value["cents"].append(None if logprob is None or not math.isfinite(logprob) else round(-100 * logprob))
        left -= len(token)
    joined = "".join(tokens)[:characters]
    if joined != text:
        value["text"] = joined.translate(_VISIBLE)
    return f' data-tokens="{_data(value)}"'


if __name__ == "__main__":
    given = tyro.cli(Options, prog="python -m grpo_jax.report", description=__doc__)
    try:
        page = write_report(given.run, given.phase)
    except UsageError as error:
        refuse(str(error))
    Console().print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
