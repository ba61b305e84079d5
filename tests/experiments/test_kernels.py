"""Checks the counts of kernels of a compiled program, by hand, and those of two models with the compiler for GPUs."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from test_paper import GPU_PLUGINS

from experiments.paper.bytes_moved import moved_bytes
from experiments.paper.kernels import by_group, decoding_steps, num_launches

# A decoding loop and a loop of four turns, as XLA writes them for a GPU. Of the decoding loop's four kernels the first
# two are independent; the third reads both, and the fourth is the conditional's smaller branch.
TEXT = """
HloModule sample

%fused_double (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %double = f32[8]{0} add(%param_0, %param_0)
}

%likeliest (of_some: f32[8]) -> f32[8] {
  %of_some = f32[8]{0} parameter(0)
  %twice = f32[8]{0} fusion(%of_some), kind=kLoop, calls=%fused_double
  ROOT %again = f32[8]{0} fusion(%twice), kind=kLoop, calls=%fused_double
}

%drawn (of_other: f32[8]) -> f32[8] {
  %of_other = f32[8]{0} parameter(0)
  ROOT %once = f32[8]{0} fusion(%of_other), kind=kLoop, calls=%fused_double
}

%step (state: (pred[], f32[8], f32[8])) -> (pred[], f32[8], f32[8]) {
  %state = (pred[], f32[8]{0}, f32[8]{0}) parameter(0)
  %greedy = pred[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %y = f32[8]{0} get-tuple-element(%state), index=2
  %normed = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_double, metadata={op_name="f/while/body/input_norm/mul"}
  %scores = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused_double, metadata={op_name="f/while/body/attention/add"}
  %sum = f32[8]{0} add(%normed, %scores), metadata={op_name="f/while/body/mlp/add"}
  %ids = f32[8]{0} conditional(%greedy, %sum, %sum), branch_computations={%likeliest, %drawn}
  ROOT %next = (pred[], f32[8]{0}, f32[8]{0}) tuple(%greedy, %ids, %y)
}

%more (state.1: (pred[], f32[8], f32[8])) -> pred[] {
  %state.1 = (pred[], f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %some = pred[] get-tuple-element(%state.1), index=0
}

%turn (pair: (s32[], f32[8])) -> (s32[], f32[8]) {
  %pair = (s32[], f32[8]{0}) parameter(0)
  %number = s32[] get-tuple-element(%pair), index=0
  %z = f32[8]{0} get-tuple-element(%pair), index=1
  %slice = f32[8]{0} fusion(%z), kind=kLoop, calls=%fused_double, metadata={op_name="jit(learn)/reduce_slice/exp"}
  ROOT %result = (s32[], f32[8]{0}) tuple(%number, %slice)
}

%below (pair.1: (s32[], f32[8])) -> pred[] {
  %pair.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (start: (pred[], f32[8], f32[8]), pieces: (s32[], f32[8])) -> f32[8] {
  %start = (pred[], f32[8]{0}, f32[8]{0}) parameter(0)
  %pieces = (s32[], f32[8]{0}) parameter(1)
  %decoded = (pred[], f32[8]{0}, f32[8]{0}) while(%start), condition=%more, body=%step
  %mapped = (s32[], f32[8]) while(%pieces), condition=%below, body=%turn, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %out = f32[8]{0} get-tuple-element(%mapped), index=1
}
"""
DOUBLE = 2 * 8 * 4  # an array is read, and one is written


def test_kernels_and_the_longest_chain_are_counted():
    assert decoding_steps(TEXT) == [(4, 3, 4 * DOUBLE + 8 * 4)]  # the sum reads two arrays


def test_loops_count_as_often_as_they_turn():
    assert num_launches(TEXT) == 4 + 4


def test_kernels_belong_to_parts_of_the_model():
    assert by_group(moved_bytes(TEXT)) == {
        "norms": (1, DOUBLE),
        "attention": (1, DOUBLE),
        "MLP": (1, DOUBLE + 8 * 4),
        "other": (1, DOUBLE),  # it has no name
        "logits and sampling": (4, 4 * DOUBLE),
    }


# The kernels of a decoding step, and the longest chain of them, for 16 x 8 completions of 64 + 256 tokens on one H100
# by jax 0.10.2. They may fall.
RECORDED = {"Gemma-3-270M": (310, 245), "Qwen3-0.6B": (454, 358)}


@pytest.mark.slow
@pytest.mark.skipif(not any(map(find_spec, GPU_PLUGINS)), reason="needs JAX's plugin for CUDA, such as jax[cuda13]")
@pytest.mark.parametrize("model", RECORDED)
def test_decoding_launches_no_more_kernels_than_recorded(model):
    options = f"--model {model} --topology h100:1 --prompts-per-device 16 --prompt-tokens 64 --max-tokens 256"
    command = [sys.executable, "-m", "experiments.plan", *options.split(), "--programs", "sample"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    rows = [row.split() for row in done.stdout.splitlines() if "one token" in row]  # sample, one, token, kernels, chain
    assert rows
    for row in rows:
        assert tuple(map(int, row[3:5])) <= RECORDED[model], row
        assert int(row[4]) <= RECORDED[model][1]
