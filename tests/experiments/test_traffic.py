"""Compares formulas of traffic between devices with collectives of compiled programs, which are read by hand first."""

from dataclasses import replace

import pytest

from experiments.paper.collectives import Collective, collectives, sizes
from experiments.paper.lowered import lowered
from experiments.planning.traffic import Exchange, learn_traffic, moved, score_traffic
from grpo_jax.config import WHOLE, recipe
from grpo_jax.models.config import ModelConfig
from grpo_jax.planning.memory import Shape, num_params

# Little but parameters: what is small beside them, such as metrics and norms, is not in the formulas.
MODEL = ModelConfig(64, 64, 256, 2, 4, 4, 16, remat="layer")
P, G, T = 8, 2, 9

TEXT = """HloModule jit_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%layer (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %gathered = f32[128,4]{1,0} all-gather(%w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %summed = (f32[3]{0}, bf16[5]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %next = (s32[], f32[8]) tuple(%i, %y)
}

%decode (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %cut = f32[2]{0} reduce-scatter(%z), replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}, to_apply=%add
  %alone = f32[7]{0} all-gather(%z), replica_groups=mesh['a'=8,'b'=1] {'b'}, dimensions={0}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[],
    f32[8]{0}) while(%start), condition=%more, body=%layer, backend_config={"known_trip_count":{"n":"6"},
    "known_init_step":{"init":"0"}}
  %other = (s32[], f32[8]{0}) while(%loop), condition=%more, body=%decode
  %cross = f32[8]{0} all-gather(%p), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}
  %begun = (f32[4]{0}, f32[32]{0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}
}
"""


def test_collectives_of_a_text_by_hand():
    assert collectives(TEXT, unknown_trips=10) == [
        Collective("all-gather", 4 * 128 * 4, 4, 6),
        Collective("all-reduce", 4 * 3 + 2 * 5, 2, 6),
        Collective("reduce-scatter", 4 * 2 * 4, 4, 10),
        Collective("all-gather", 4 * 8, 4, 1),
        Collective("all-gather", 4 * 32, 8, 1),
    ]
    assert sizes(collectives(TEXT))["all-gather"] == 6 * 2048 + 32 + 128
    with pytest.raises(ValueError, match="unknown way: %gathered"):
        collectives(TEXT.replace("[2,4]<=[8]", "any"))


def test_loop_trip_counts_come_from_the_loop_condition():
    condition = """%more (carry: (s32[], f32[8])) -> pred[] {
  %count = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %limit.1 = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%count, %limit.1), direction=LT
}

ENTRY"""
    counted = TEXT.replace("ENTRY", condition)
    assert Collective("reduce-scatter", 32, 4, 7) in collectives(counted, unknown_trips=10)
    assert Collective("all-gather", 2048, 4, 6) in collectives(counted)  # what XLA says goes before
    also = counted.replace("ROOT %lt", "%lt").replace("LT\n", "LT\n  ROOT %both = pred[] and(%lt, %alive)\n")
    assert Collective("reduce-scatter", 32, 4, 10) in collectives(also, unknown_trips=10)


def test_bytes_sent_in_a_ring_by_hand():
    """Of 8 devices each sends 7 of 8 parts, and for a sum that all have twice as many."""
    assert moved("all-gather", 800, 8) == moved("reduce-scatter", 800, 8) == 700
    assert moved("all-reduce", 800, 8) == 1400
    assert Exchange("", "all-reduce", 800, 1).moved == 0


def shape_and_run(devices: int, tensor: int = 1):
    """Two prompts a device, in one piece; whole parameters on one device."""
    parts = devices // tensor
    run = recipe(num_prompts=2 * parts, group_size=G, max_tokens=T, piece_tokens=WHOLE, devices=devices)
    if devices > 1:
        run = replace(run, mesh=replace(run.mesh, parallel="mesh", fsdp=parts, tensor=tensor))
    return Shape(2, G, P, T, piece_tokens=WHOLE, fsdp=parts, tensor=tensor), run


def by_purpose(sent: dict[str, int]) -> tuple[int, int, int]:
    """Bytes put together, summed, and moved. XLA on CPU sums whole gradients, where others scatter them."""
    summed = sent.get("all-reduce", 0) + sent.get("reduce-scatter", 0)
    return sent.get("all-gather", 0), summed, sent.get("all-to-all", 0)


def sent_by(program) -> tuple[int, int, int]:
    return by_purpose(sizes(collectives(str(program.compile().as_text()))))


def planned(exchanges: list[Exchange]) -> tuple[int, int, int]:
    sent: dict[str, int] = {}
    for one in exchanges:
        sent[one.kind] = sent.get(one.kind, 0) + one.size
    return by_purpose(sent)


MESHES = [(8, 1), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((1, 1), (2, 1), (8, 2)))]


@pytest.mark.parametrize(("devices", "tensor"), MESHES)
def test_a_mesh_exchanges_what_is_planned(devices, tensor):
    """Weak scaling: with as many prompts on each device, the bytes of a device stay the same."""
    shape, run = shape_and_run(devices, tensor)
    made = lowered(MODEL, run, P, programs=("learn", "score"))
    formulas = {"learn": learn_traffic(MODEL, shape), "score": score_traffic(MODEL, shape)}
    for name, formula in formulas.items():
        assert sent_by(made[name]) == pytest.approx(planned(formula), rel=0.05), name


@pytest.mark.slow
def test_copies_add_up_their_gradients():
    """XLA on CPU sums over both axes of a mesh at once, where the plan scatters over fsdp and then sums over data."""

    def exchanged(**options):
        run = recipe(num_prompts=16, group_size=G, max_tokens=T, piece_tokens=WHOLE, devices=8, **options)
        return sent_by(lowered(MODEL, run, P, programs=("learn",))["learn"])

    whole, cut = shape_and_run(1)[0], shape_and_run(4)[0]
    assert planned(learn_traffic(MODEL, whole, data=8)) == (0, 4 * num_params(MODEL), 0)
    assert exchanged()[1] == pytest.approx(4 * num_params(MODEL), rel=0.05)
    gathered, summed, sent = planned(learn_traffic(MODEL, cut))
    assert exchanged(fsdp=4) == pytest.approx((gathered, summed, sent), rel=0.05)
    assert planned(learn_traffic(MODEL, cut, data=2)) == (gathered, summed * 5 // 4, sent)


def test_lora_exchanges_base_weights_but_only_adapter_gradients():
    shape = shape_and_run(8)[0]
    adapted = learn_traffic(MODEL, shape._replace(lora_rank=1, lora_targets=("q_proj",)))
    everything = {(one.what, one.kind): one.size for one in learn_traffic(MODEL, shape)}
    exchanged = {(one.what, one.kind): one.size for one in adapted}
    assert exchanged["layers", "all-gather"] == everything["layers", "all-gather"]
    assert exchanged["gradients of layers", "reduce-scatter"] == 4 * 2 * (64 + 64)  # A and B of two layers
    assert ("its gradient", "reduce-scatter") not in exchanged
