"""Checks the bytes that a compiled program moves, by hand."""

from experiments.paper.bytes_moved import moved_bytes, moved_in_loops, total

# One step of a loop over a cache `[8, 16]` in bfloat16, with a product, as XLA writes it for a GPU.
TEXT = """
HloModule step

%fused_write (param_0: bf16[8,16], param_1: f32[1,16], param_2: s32[]) -> bf16[8,16] {
  %param_0 = bf16[8,16]{1,0} parameter(0)
  %param_1 = f32[1,16]{1,0} parameter(1)
  %row = bf16[1,16]{1,0} convert(%param_1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %write = bf16[8,16]{1,0} dynamic-update-slice(%param_0, %row, %param_2, %zero)
}

%fused_read (param_0.1: bf16[8,16], param_1.1: s32[]) -> f32[2,16] {
  %param_0.1 = bf16[8,16]{1,0} parameter(0)
  %wide = f32[8,16]{1,0} convert(%param_0.1)
  %param_1.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  ROOT %rows = f32[2,16]{1,0} dynamic-slice(%wide, %param_1.1, %zero.1), dynamic_slice_sizes={2,16}
}

%fused_sum (param_0.2: f32[2,16]) -> f32[2] {
  %param_0.2 = f32[2,16]{1,0} parameter(0)
  %nothing = f32[] constant(0)
  ROOT %sum = f32[2]{0} reduce(%param_0.2, %nothing), dimensions={1}, to_apply=%add
}

%likeliest (of_rows: f32[2,16]) -> f32[2] {
  %of_rows = f32[2,16]{1,0} parameter(0)
  ROOT %maximum = f32[2]{0} fusion(%of_rows), kind=kInput, calls=%fused_sum
}

%neither (of_none: f32[2]) -> f32[2] {
  ROOT %of_none = f32[2]{0} parameter(0)
}

%body (state: (s32[], bf16[8,16], f32[1,16])) -> (s32[], bf16[8,16], f32[1,16]) {
  %state = (s32[], bf16[8,16]{1,0}, f32[1,16]{1,0}) parameter(0)
  %step = s32[] get-tuple-element(%state), index=0
  %cache = bf16[8,16]{1,0} get-tuple-element(%state), index=1
  %new = f32[1,16]{1,0} get-tuple-element(%state), index=2
  %written = bf16[8,16]{1,0} fusion(%cache, %new, %step), kind=kLoop, calls=%fused_write, metadata={op_name="f/write"}
  %read = f32[2,16]{1,0} fusion(%written, %step), kind=kLoop, calls=%fused_read
  %sums = f32[2]{0} fusion(%read), kind=kInput, calls=%fused_sum
  %greedy = f32[2]{0} conditional(%step, %read, %sums), branch_computations={%likeliest, %neither}
  %product = (f32[1,2]{1,0}, s8[4096]{0}) custom-call(%new, %read), custom_call_target="__cublas$gemm"
  ROOT %next = (s32[], bf16[8,16]{1,0}, f32[1,16]{1,0}) tuple(%step, %written, %new)
}

%condition (state.1: (s32[], bf16[8,16], f32[1,16])) -> pred[] {
  %state.1 = (s32[], bf16[8,16]{1,0}, f32[1,16]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (start: (s32[], bf16[8,16], f32[1,16])) -> (s32[], bf16[8,16], f32[1,16]) {
  %start = (s32[], bf16[8,16]{1,0}, f32[1,16]{1,0}) parameter(0)
  ROOT %loop = (s32[], bf16[8,16]{1,0}, f32[1,16]{1,0}) while(%start), condition=%condition, body=%body
}
"""
WRITE = 16 * 4 + 4 + 16 * 2  # a new row and its place are read; a row of the cache is written
READ = 2 * 16 * 2 + 4 + 2 * 16 * 4  # two rows of the cache and their place; two rows in float32
SUMS = 2 * 16 * 4 + 2 * 4
PRODUCT = 16 * 4 + 2 * 16 * 4 + 2 * 4  # without its workspace


def test_a_step_moves_slices_and_no_whole_cache():
    (step,) = moved_in_loops(TEXT)
    assert [one.size for one in step] == [WRITE, READ, SUMS, PRODUCT]
    assert (step[0].kind, step[0].source) == ("fusion", "f/write")


def test_a_loop_counts_as_often_as_it_turns():
    assert total(moved_bytes(TEXT, unknown_trips=7)) == 7 * (WRITE + READ + SUMS + PRODUCT)
