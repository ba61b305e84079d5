"""Counts the kernels that a compiled program launches on a GPU, from its text.

Each operation that is left after XLA's fusion is about one launch. A library's function may launch several kernels, and
XLA may split a large sum into two. Launches matter where kernels are small: a decoding step of a small model takes
about as many times 2.5 to 3 µs, whatever it computes.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from experiments.paper.bytes_moved import FREE, Moved, Program, moved_bytes, total
from experiments.paper.collectives import calls, trips_of

# Seconds of one small kernel of a CUDA graph: fitted to decoding steps of Qwen3-0.6B on an H100, and of Gemma 3 270M on
# an H200.
SECONDS_OF_KERNEL = 2.5e-6
# Kernels of a layer in a decoding step, counted for Gemma 3 270M, Qwen3-0.6B and Qwen2.5-1.5B on an H100: with cuDNN's
# attention 15 to 17, with plain products 24.
KERNELS_OF_LAYER = {True: 16, False: 24}
KERNELS_OF_ADAPTERS = 30  # in addition, of the seven projections of a layer of Gemma 3 270M
# The part of a model in whose function an operation was traced, by a pattern for its name.
_GROUPS = {
    "attention": "attention|dot_product",
    "MLP": "mlp|experts",
    "norms": "norm",
    "logits and sampling": "reduce_slice|accumulate|logprobs|sample|dot_general|while/body",
}


class DecodingStep(NamedTuple):
    """The kernels and bytes of one turn of a decoding loop."""

    kernels: int
    chain: int  # the most kernels that wait for each other
    size: int  # bytes


def decoding_steps(text: str) -> list[DecodingStep]:
    """Returns the steps of each decoding loop, whose number of turns XLA does not know."""
    program = Program(text, 1)
    lines = [line for lines in program.bodies.values() for line in lines if " while(" in line]
    loops = [next(calls(line, 1))[0] for line in lines if not trips_of(line, program.bodies)]
    moved = {name: list(program.operations_of(name, 1)) for name in loops}
    return [
        DecodingStep(sum(one.times for one in operations), _chain(program, name), total(operations))
        for name, operations in moved.items()
    ]


def _chain(program: Program, name: str) -> int:
    """Returns the most kernels of a computation that wait for each other."""
    lengths: dict[str, int] = {}
    for one in program.parsed[name].values():
        before = max((lengths.get(operand, 0) for operand in one.operands), default=0)
        lengths[one.name] = before + (one.kind not in FREE or one.kind == "conditional")
    return max(lengths.values(), default=0)


def num_launches(text: str) -> int:
    """Counts the launches of a program whose loops all have known numbers of turns, such as `learn`."""
    return sum(one.times for one in moved_bytes(text))


def by_group(operations: Iterable[Moved]) -> dict[str, tuple[int, int]]:
    """Returns (launches, bytes) of operations by the part of the model that they belong to."""
    launches, sizes = Counter[str](), Counter[str]()
    for one in operations:
        group = next((name for name, words in _GROUPS.items() if re.search(words, one.source)), "other")
        launches[group] += one.times
        sizes[group] += one.times * one.size
    return {group: (launches[group], sizes[group]) for group in launches}
