"""Reads from the text of a compiled program what its operations read from memory and write to it.

A fusion reads its operands and writes its results. Of an operand that it only slices, it reads the slice. A result that
is an operand with a new slice is written in place, so only the slice counts. Library calls read their operands and
write their results; their workspaces do not count. Of a condition's branches the smallest counts. Caches are ignored:
an array that two operations read counts twice.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from experiments.paper.collectives import ITEM_BYTES, calls, computations, trips_of

_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:, |$)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_SOURCE = re.compile(r'op_name="([^"]*)"')
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call", "iota")
_SLICES = ("slice", "dynamic-slice", "gather")
_WORKSPACE = "s8"
# Operations whose element reads at most one element of each operand.
_WHOLE = ("reduce", "sort", "scatter", "reduce-window", "dot", "convolution", "custom-call")


class Operation(NamedTuple):
    """One operation of a computation."""

    name: str
    kind: str
    arrays: tuple[tuple[int, int], ...]  # (elements, bytes of an element) of the result, or of its parts
    operands: tuple[str, ...]
    is_root: bool
    line: str

    @property
    def size(self) -> int:
        """The bytes of the result."""
        return sum(count * item for count, item in self.arrays)


class Moved(NamedTuple):
    """The bytes that one operation moves each time it runs."""

    size: int
    kind: str
    source: str  # the function that JAX traced, such as Block/attention/q_proj/dot_general
    times: int  # how often it runs


def moved_bytes(text: str, *, unknown_trips: int = 1) -> list[Moved]:
    """Returns what each operation of a compiled program moves.

    Args:
      text: of `compiled.as_text()`.
      unknown_trips: turns of loops whose number XLA does not know.
    """
    program = Program(text, unknown_trips)
    return list(program.operations_of(program.entry, 1))


def moved_in_loops(text: str) -> list[list[Moved]]:
    """Returns what one turn of each loop moves whose number of turns XLA does not know, such as a decoding loop."""
    program = Program(text, 1)
    lines = [line for lines in program.bodies.values() for line in lines if " while(" in line]
    loops = [next(calls(line, 1))[0] for line in lines if not trips_of(line, program.bodies)]
    return [list(program.operations_of(name, 1)) for name in loops]


def total(operations: Iterable[Moved]) -> int:
    """Returns the bytes that operations move together."""
    return sum(one.size * one.times for one in operations)


class Program:
    """The computations of a program."""

    def __init__(self, text: str, unknown_trips: int) -> None:
        self.bodies, self.entry = computations(text)
        self.parsed = {name: _parsed(lines) for name, lines in self.bodies.items()}
        self.unknown_trips = unknown_trips

    def operations_of(self, name: str, times: int) -> Iterator[Moved]:
        """Yields what the operations of a computation move, and those of the computations that it runs."""
        operations = self.parsed.get(name, {})
        for one in operations.values():
            if one.kind in ("while", "call"):
                for called, turns in calls(one.line, trips_of(one.line, self.bodies) or self.unknown_trips):
                    yield from self.operations_of(called, times * turns)
            elif one.kind == "conditional":
                yield from min((list(self.operations_of(called, times)) for called, _ in calls(one.line, 1)), key=total)
            elif one.kind not in FREE:
                source = _SOURCE.search(one.line)
                yield Moved(self._moved(one, operations), one.kind, source[1] if source else "", times)

    def _moved(self, one: Operation, operations: dict[str, Operation]) -> int:
        """Returns the bytes that an operation reads and writes."""
        if one.kind == "fusion":
            return _moved_by_fusion(self.parsed[next(calls(one.line, 1))[0]])
        if one.kind in _SLICES:
            return 2 * one.size
        sizes = [operations[name].size for name in one.operands if name in operations]
        return 2 * sizes[1] if one.kind == "dynamic-update-slice" else one.size + sum(sizes)


def _parsed(lines: list[str]) -> dict[str, Operation]:
    operations = {}
    for line in lines:
        if match := _LINE.match(line):
            root, name, result, kind, operands = match.groups()
            arrays = [
                (math.prod(int(size) for size in dims.split(",") if size), ITEM_BYTES.get(dtype, 0))
                for dtype, dims in _ARRAY.findall(result)
                if kind != "custom-call" or dtype != _WORKSPACE
            ]
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            operations[name] = Operation(name, kind, tuple(arrays), names, bool(root), line)
    return operations


def _moved_by_fusion(operations: dict[str, Operation]) -> int:
    """Counts elements that each operation inside is asked for, from the results back to the parameters."""
    needed: Counter[str] = Counter()
    root = next(x for x in operations.values() if x.is_root)
    outputs = [operations[name] for name in root.operands] if root.kind == "tuple" else [root]
    written = 0
    for output in outputs:
        target = _through_bitcasts(output, operations)
        if target.kind == "dynamic-update-slice":
            base, update = (_through_bitcasts(operations[name], operations) for name in target.operands[:2])
            if base.kind == "parameter":  # in place
                written += update.size
                needed += Counter({update.name: update.arrays[0][0]} | dict.fromkeys(target.operands[2:], 1))
                continue
        written += output.size
        needed[output.name] += output.arrays[0][0]
    read = 0
    for operation in reversed(operations.values()):
        if not operation.arrays:
            continue
        count, item = operation.arrays[0]
        need = min(needed[operation.name], count)
        if not need:
            continue
        if operation.kind == "parameter":
            read += need * item
        for place, name in enumerate(operation.operands):
            size = operations[name].arrays[0][0] if operations[name].arrays else 0
            if operation.kind in _WHOLE:
                needed[name] += size
            elif operation.kind in _SLICES or operation.kind == "dynamic-update-slice":
                needed[name] += need if place == 0 else size
            else:
                needed[name] += min(need, size)
    return read + written


def _through_bitcasts(operation: Operation, operations: dict[str, Operation]) -> Operation:
    while operation.kind == "bitcast":
        operation = operations[operation.operands[0]]
    return operation
