"""Checks that a run's plan is chosen once from memory and is then an option like others."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from grpo_jax import prepare
from grpo_jax.config import GRPOConfig, recipe
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.huggingface import Pretrained
from grpo_jax.models.policy import decoder_policy
from grpo_jax.options import from_json
from grpo_jax.prepare import Loaded, RunOptions, apply_memory_plan

MODEL = ModelConfig(64, 32, 128, 4, 4, 2, 8)


@dataclass(frozen=True)
class Options(RunOptions):
    """Of a run."""

    train: GRPOConfig = recipe(num_prompts=4, group_size=8, max_tokens=128)


def plan_with(monkeypatch, options: RunOptions, limit: int):
    monkeypatch.setattr(prepare, "memory_limit", lambda devices: limit)
    loaded = Loaded(decoder_policy(MODEL), None, Pretrained(MODEL, None, None, (), Path(), ()))
    task = SimpleNamespace(prompts=lambda step: SimpleNamespace(ids=np.zeros((4, 16))))
    options, models, plan = apply_memory_plan(options, {"policy": loaded}, task)
    return options, models["policy"], plan


def test_a_plan_is_kept_with_the_run_and_used_again_whatever_memory_there_is(monkeypatch):
    begun, loaded, plan = plan_with(monkeypatch, Options(), 10**9)
    assert (begun.train.optimizer.piece_tokens, begun.model.remat) == (768, "none")
    smaller, loaded, plan = plan_with(monkeypatch, Options(), int(0.7 * plan.estimate.peak))
    assert plan.fits
    assert plan.options != {"piece_tokens": 768, "remat": "none"}
    assert loaded.pretrained.config.remat == smaller.model.remat
    kept = from_json(Options(), json.loads(json.dumps(asdict(smaller))))
    for limit in (10**9, 2**10):
        resumed, _, again = plan_with(monkeypatch, kept, limit)
        assert resumed == smaller
        assert again.fits == (limit == 10**9)
