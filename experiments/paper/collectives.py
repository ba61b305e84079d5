"""Reads from the text of a compiled program what its devices exchange.

A collective in a loop counts as often as the loop turns. XLA writes that down where it knows it, or it is what the
condition of the loop compares with; where it is neither, as in decoding, the caller says it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_CONTINUED = re.compile(r"\n(?!  %|  ROOT|%|ENTRY|\}|HloModule|\n) *")  # long operations take several lines
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:body|to_apply|calls|branch_computations|(?:true|false)_computation)=\{?%?([\w.\-, %]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BELOW = re.compile(r"ROOT .* compare\(.*?%([\w.\-]+)\), direction=LT")  # what a counter stays below
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One operation of a program."""

    kind: str
    size: int  # bytes of the array before it is cut or after it is put together, on one device
    devices: int  # that take part in it together
    times: int  # how often it happens


def collectives(text: str, *, unknown_trips: int = 1) -> list[Collective]:
    """All collectives of a compiled program.

    Args:
      text: of `compiled.as_text()`.
      unknown_trips: turns of loops whose number XLA does not know.
    """
    bodies, entry = computations(text)
    times: Counter[str] = Counter()

    def walk(name: str, turns: int) -> None:
        times[name] += turns
        for line in bodies.get(name, []):
            for called, trips in calls(line, trips_of(line, bodies) or unknown_trips):
                walk(called, turns * trips)

    walk(entry, 1)
    return [
        results._replace(times=times[name])
        for name, lines in bodies.items()
        if times[name]
        for results in filter(None, map(_collective, lines))
    ]


def sizes(results: list[Collective]) -> dict[str, int]:
    """Bytes of all arrays that are exchanged, by kind of collective."""
    total: Counter[str] = Counter()
    for one in results:
        total[one.kind] += one.size * one.times
    return dict(total)


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the first one that runs."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in _CONTINUED.sub(" ", text).splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            bodies[name] = []
            entry = name if match[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def trips_of(line: str, bodies: dict[str, list[str]]) -> int | None:
    """How often a loop turns, where that is known; of another operation 1. Counters begin at 0."""
    if " while(" not in line:
        return 1
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = _CONDITION.search(line)
    lines = "\n".join(bodies.get(condition[1], [])) if condition else ""
    if below := _BELOW.search(lines):
        limit = re.search(rf"%{re.escape(below[1])} = s32\[\]\S* constant\((\d+)\)", lines)
        return int(limit[1]) if limit else None
    return None


def calls(line: str, trips: int) -> Iterator[tuple[str, int]]:
    """Computations that an operation runs, and how often."""
    if any(f" {kind}" in line for kind in _KINDS):
        return  # what it reduces by
    for match in _CALLED.finditer(line):
        for name in match[1].split(","):
            yield name.strip().lstrip("%"), trips


def _collective(line: str) -> Collective | None:
    match = _COLLECTIVE.search(line)
    if match is None:
        return None
    result, kind = match[1], match[2]
    arrays = [_bytes(*results) for results in _ARRAY.findall(result)]
    if match[3] and kind != "all-reduce":  # of an asynchronous one: operands, then results
        arrays = arrays[len(arrays) // 2 :]
    devices = _group_size(line)
    size = sum(arrays) * (devices if kind == "reduce-scatter" else 1)
    return Collective(kind, size, devices, 1) if devices > 1 else None


def _bytes(dtype: str, dimensions: str) -> int:
    return ITEM_BYTES.get(dtype, 0) * math.prod(int(size) for size in dimensions.split(",") if size)


def _group_size(line: str) -> int:
    """Devices of each group: of {{0,1},{2,3}} 2, of [4,2]<=[8] 2, and of mesh['a'=4,'b'=2] {'b'} 2."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line):
        axes = dict(re.findall(r"('\w+')=(\d+)", mesh[1]))
        named = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or axes[name]) for name, part in named)
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if "source_target_pairs" in line:
        return 2
    raise ValueError(f"the devices of a collective are written in an unknown way: {line.strip()[:200]}")
