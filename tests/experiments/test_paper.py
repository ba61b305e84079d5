"""Checks the tables of a run on paper, and the numbers in them."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from tiny import STORIES, needs_data, refused

from experiments import plan
from experiments.new_models import config_to_huggingface
from experiments.plan import Config
from grpo_jax.config import WHOLE
from grpo_jax.functional.products import Traits
from grpo_jax.models.config import ModelConfig
from grpo_jax.planning.memory import Plan, Shape, estimate


def test_tables_name_parts_exchanges_seconds_and_parameters(capsys):
    plan.main(Config(devices=8, tensor=2))
    out = capsys.readouterr().out
    assert "Qwen2.5-7B: 7.62 billion parameters on data 1 x fsdp 4 x tensor 2 h100" in out
    assert "plan: 2 pieces" in out
    for row in ("optimizer", "gradients of layers", "heads and features", "iteration", "layers/mlp/up_proj"):
        assert row in out
    assert "- fsdp tensor" in out  # how up_proj is cut
    assert "teacher" not in out  # parts that are not there have no line


def test_a_plan_that_does_not_fit_is_refused():
    with refused("needs about 210 GiB of 95 .* fsdp 32"):
        plan.main(Config(model="Llama-3-70B", device="v5p"))


def test_seconds_by_hand():
    """One layer of one head: 4·2² + 3·2·4 = 40 weights, and an unembedding of 8·2."""
    model, shape = ModelConfig(8, 2, 4, 1, 1, 1, 2), Shape(1, 1, 1, 2)
    of = Plan(model, shape, estimate(model, shape), 0)
    # Products of 3 tokens with 40 weights and of 2 with 16, 2 operations each; 6 pairs of 8 operations: 1 of the prompt
    # with itself, 2 and 3 of the completion.
    flops = 2 * 40 * 3 + 2 * 16 * 2 + 8 * 6
    assert plan.costs(of)["score"][0] == flops
    assert plan.costs(of)["learn"][0] == 3 * flops
    assert plan.costs(of._replace(model=replace(model, remat="layer")))["learn"][0] == 4 * flops
    assert plan.costs(of._replace(shape=shape._replace(lora_rank=1)))["learn"][0] == 2 * flops  # only of activations
    # Of each token all weights, and keys and values: 4 numbers of the prompt twice, and of 1 and 2 completion tokens.
    assert plan.costs(of)["sample"][1] == 4 * (2 * (40 + 16) + 4 * (2 + 3))
    assert plan.costs(of._replace(shape=shape._replace(fsdp=2)))["learn"][0] == 3 * flops  # twice the prompts, halved


def test_decoding_on_gpus_waits_for_launches():
    """By hand: two layers, three steps, kernels of 2.5 µs; a layer has 16 with cuDNN's attention, and 24 without it."""
    model = ModelConfig(8, 16, 4, 2, 1, 1, 8, dtype="bfloat16")
    of = Plan(model, Shape(1, 1, 1, 4), estimate(model, Shape(1, 1, 1, 4)), 0)
    assert plan.num_kernels(of) == 3 * 2 * 16
    assert plan.num_kernels(of._replace(model=replace(model, attn_logit_softcapping=5.0))) == 3 * 2 * 24
    assert plan.num_kernels(of._replace(shape=of.shape._replace(traits=Traits("tpu")))) == 0
    assert plan.num_kernels(of._replace(shape=of.shape._replace(lora_rank=1))) == 3 * 2 * (16 + 30)
    row = plan.time_table(of, {name: [] for name in plan.costs(of)}, plan.DEVICES["h100"]).columns[3]
    assert next(iter(row.cells)) == f"{3 * 2 * 16 * 2.5e-6:.3f}"


def test_stated_rates_replace_data_sheet_rates():
    assert plan.device_of(Config(tflops=1, link_gb_s=2)) == (1e12, 80e9, 3.35e12, 2e9)


def compiled(programs, options):
    """Rows of programs in the table of a process that compiles for so many devices, by program and name."""
    command = [sys.executable, "-m", "experiments.plan", "--programs", *programs.split(), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    rows = [row for row in map(str.split, done.stdout.splitlines()) if row and row[0] in programs.split()]
    return {(row[0], row[1]): row for row in rows}


@pytest.mark.slow
@needs_data
def test_compiler_agrees_with_the_plan_on_four_devices():
    rows = compiled("score", f"--model {STORIES} --devices 4 --dtype float32 --compile --max-tokens 32")
    assert {("score", name) for name in ("given", "put", "summed")} <= rows.keys()
    assert float(rows["score", "given"][4]) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("libtpu"), reason="needs libtpu")
def test_tpu_compiler_agrees_with_planned_parameter_bytes(tmp_path):
    model = ModelConfig(512, 256, 1024, 2, 2, 2, 128)  # whole tiles of 8 x 128
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(model)))
    rows = compiled("learn", f"--model {tmp_path} --topology v5p:2x2x1 --tensor 2 --max-tokens 16")
    assert float(rows["learn", "given"][4]) == pytest.approx(1, abs=0.05)


GPU_PLUGINS = "jax_cuda13_plugin", "jax_cuda12_plugin"


@pytest.mark.slow
@pytest.mark.skipif(not any(map(find_spec, GPU_PLUGINS)), reason="needs JAX's plugin for CUDA, such as jax[cuda13]")
def test_the_compiler_for_gpus_takes_what_is_planned(tmp_path):
    """Compiles for an H100 that is not there. A small model adds at least 32 MB for each library call in flight."""
    model = ModelConfig(32_000, 512, 2048, 4, 8, 4, 64, qk_norm=True)
    (tmp_path / "config.json").write_text(json.dumps(config_to_huggingface(model)))
    sizes = f"--piece-tokens {WHOLE} --max-tokens 128"
    rows = compiled("learn score sample", f"--model {tmp_path} --topology h100:1 {sizes}")
    assert float(rows["learn", "given"][4]) == pytest.approx(1, abs=0.01)
    assert 0.8 < float(rows["learn", "added"][4]) < 1.03
    assert 0.8 < float(rows["sample", "added"][4]) < 1.03
    assert 1 <= float(rows["sample", "step"][4]) < 2
    assert float(rows["score", "added"][2]) < float(rows["learn", "added"][3])  # there is no estimate


def test_the_devices_are_those_of_the_topology(monkeypatch):
    monkeypatch.setattr(plan, "devices_of_topology", lambda name: [SimpleNamespace(process_index=0)] * 4)
    config, _ = plan.resolved(Config(topology="v6e:2x2"))
    assert (config.devices, config.device) == (4, "v6e")
    with refused("devices is 8, but v6e:2x2 has 4"):
        plan.resolved(Config(topology="v6e:2x2", devices=8))


BAD_PLANS = [
    ({"topology": "v5p"}, "v5p: install libtpu"),
    ({"topology": "v5p:3x2x1"}, "v5p:3x2x1: install libtpu"),
    ({"topology": "v5p:1000x1000x1000"}, "65,536 devices"),
    ({"topology": "h100:2x2"}, "h100:2x2: write the number of GPUs"),
    ({"topology": "h100"}, "h100: write the number of GPUs"),
    ({"topology": "k80:1"}, "k80:1: begin it with one of h100, a100"),
    ({"fsdp": 8, "tensor": 3}, "fsdp x tensor is 24"),
    ({"tensor": 0}, "tensor is 0"),
    ({"prompts_per_device": 10**9}, "prompts, group_size or tokens"),
    ({"link_gb_s": float("nan")}, "link_gb_s is nan"),
    ({"tensor": 8}, "4 key-value heads"),
]


@pytest.mark.parametrize(("options", "words"), BAD_PLANS)
def test_plans_for_impossible_runs_are_refused(options, words):
    with refused(words):
        plan.check(plan.resolved(plan.Config(**options))[0])
