"""Checks what memory decides: the size of pieces, then remat, or a refusal; and that a run keeps its plan."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from tiny import refused

from experiments.benchmarks.shapes import MID
from grpo_jax.config import PPO, EngineOptions, GRPOConfig, ModelOptions, recipe
from grpo_jax.functional.products import CPU
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.options import from_json
from grpo_jax.planning.memory import Shape, choose, estimate, shape_of
from grpo_jax.training import prepare
from grpo_jax.training.prepare import RunOptions, apply_memory_plan

# Four prompts of 1,040 tokens; on an accelerator pieces of 16,384 tokens, so that all are one.
SHAPE = Shape(4, 8, 16, 128, piece_tokens=0)


def peak(piece_tokens, remat):
    return estimate(replace(MID, remat=remat), SHAPE._replace(piece_tokens=piece_tokens)).peak


def limit_for(piece_tokens, remat):
    """Bytes of a device that this just fits into."""
    return int(peak(piece_tokens, remat) / 0.85) + 1


def test_less_memory_shrinks_pieces_before_enabling_remat():
    fastest = 16_384
    assert choose(MID, SHAPE, limit_for(fastest, "none")).options == {"piece_tokens": fastest, "remat": "none"}
    # Less by a byte, and again: each time the next smaller one that fits.
    sizes = []
    limit = limit_for(fastest, "none")
    while (plan := choose(MID, SHAPE, limit)).model.remat == "none":
        sizes.append(plan.shape.num_pieces)
        limit = limit_for(plan.shape.piece_tokens, "none") - 1000
    assert sizes == sorted(sizes)
    assert (sizes[0], len(set(sizes))) == (1, len(sizes))
    # With remat too, the largest pieces that fit.
    assert plan.model.remat == "layer"
    assert plan.fits
    assert peak(2 * plan.shape.piece_tokens, "layer") > 0.85 * plan.limit


def test_what_is_given_is_not_planned():
    small = limit_for(16_384, "layer") // 4
    fixed = choose(MID, SHAPE._replace(piece_tokens=2048), small, remat="none")
    assert (fixed.options, fixed.shape.num_pieces, fixed.fits) == ({"piece_tokens": 2048, "remat": "none"}, 2, False)
    smaller = choose(MID, SHAPE._replace(piece_tokens=512), small, remat="layer")
    assert smaller.options == {"piece_tokens": 512, "remat": "layer"}


def test_where_nothing_fits_the_sentence_names_what_would():
    held = estimate(MID, SHAPE).held
    with refused("needs about 1.1 GiB of 0.78 .*lora_rank 16, p.*fsdp 2 on 2 times .*piece_tokens and remat"):
        choose(MID, SHAPE, int(1.1 * held))
    for minibatches in (1, 4):  # no way out has fewer prompts than minibatches
        with refused("a smaller model, or fewer"):
            choose(MID, SHAPE._replace(minibatches=minibatches), 2**20)


def test_fewer_tokens_are_the_first_way_out():
    long = SHAPE._replace(max_tokens=20_000, group_size=64)
    limit = choose(MID, long, 2**40).estimate.peak * 2
    with refused(r"with remat layer: set max_tokens 10000 \(about .* GiB\), or dtype"):
        while True:
            choose(MID, long, limit)
            limit = int(0.98 * limit)


def test_run_shape_follows_the_options():
    run = recipe("grpo", num_prompts=8, minibatches=2, divergence="full", ref_sync_steps=5, fsdp=2)
    shape = shape_of(run, ModelOptions(lora_rank=4, param_dtype="bfloat16"), 7, shards=4)
    assert (shape.num_prompts, shape.minibatches, shape.prompt_tokens, shape.fsdp) == (2, 2, 7, 2)
    assert (shape.copies, shape.lora_rank, shape.critic) == (2, 4, "none")
    alone = shape_of(recipe(), ModelOptions(), 7, shards=1)
    assert alone.process_bytes == 4 * shape.process_bytes > 0  # devices of a CPU share the process
    ppo = shape_of(PPO, ModelOptions(), 7, shards=1)
    assert (ppo.critic, ppo.group_size) == ("own", 1)


def test_a_plan_is_one_line():
    assert str(choose(MID, SHAPE._replace(traits=CPU), 23 * 10**9)) == (
        "plan: 8 pieces, remat none: about 1.3 of 21 GiB"
    )


# ---- the plan of a run

SMALL = ModelConfig(64, 32, 128, 4, 4, 2, 8)


@dataclass(frozen=True)
class Options(RunOptions):
    """Options of a run."""

    train: GRPOConfig = recipe(num_prompts=4, group_size=8, max_tokens=128)


def plan_with(monkeypatch, options: RunOptions, limit: int, engine: EngineOptions = EngineOptions()):
    monkeypatch.setattr(prepare, "memory_limit", lambda devices: limit)
    loaded = Pretrained(SMALL, None, None, (), Path(), ())
    task = SimpleNamespace(prompts=lambda step: SimpleNamespace(tokens=SimpleNamespace(width=16)))
    options, models, plan = apply_memory_plan(options, {"policy": loaded}, task, engine)
    return options, models["policy"], plan


def test_resumed_runs_reuse_their_saved_plan(monkeypatch):
    begun, loaded, plan = plan_with(monkeypatch, Options(), 10**10)
    assert (begun.train.optimizer.piece_tokens, begun.model.remat) == (768, "none")
    process = plan.estimate.process
    small = int(0.7 * (plan.estimate.peak - process) + process / 0.85)
    smaller, loaded, plan = plan_with(monkeypatch, Options(), small)
    assert plan.fits
    assert plan.options != {"piece_tokens": 768, "remat": "none"}
    assert loaded.config.remat == smaller.model.remat
    kept = from_json(Options(), json.loads(json.dumps(asdict(smaller))))
    for limit in (10**10, 2**10):
        resumed, _, again = plan_with(monkeypatch, kept, limit)
        assert resumed == smaller
        assert again.fits == (limit == 10**10)


def test_servers_sample_with_copies_of_the_parameters(monkeypatch):
    server, stale = EngineOptions(engine=("http://127.0.0.1:1",)), Options(train=recipe(staleness=2))
    none, turns, alongside = (
        plan_with(monkeypatch, options, 10**10, engine)[2].estimate
        for options, engine in ((stale, EngineOptions()), (Options(), server), (stale, server))
    )
    assert none.start == turns.start == alongside.start / 4


def test_devices_that_only_sample_must_have_the_memory_too():
    sampler = SHAPE._replace(learns=False, versions=2)
    training, sampling = SHAPE._replace(samples=False), estimate(MID, sampler)
    assert sampling.peak == sampling.params + sampling.sampling
    assert sampling.params == 2 * estimate(MID, training).params
    plan = choose(MID, training, 23 * 10**9, sampler=sampler)
    assert plan.fits
    assert str(plan).endswith(f"; devices that only sample: about {sampling.peak / 2**30:.2g} GiB")
    with refused("a device that only samples needs about .* set sampler_fsdp"):
        choose(MID, training, int(sampling.peak / 0.85) - 10**6, sampler=sampler)
