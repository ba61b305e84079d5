"""Rehearses the benchmark of accelerators on a CPU with a tiny shape."""

import json

import pytest

from experiments.benchmarks import accelerator


@pytest.mark.slow
def test_a_tiny_shape_is_measured_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shape = accelerator.SHAPES["tiny"]._replace(num_prompts=2, prompt=4, completion=16, group_size=4)
    monkeypatch.setitem(accelerator.RUNS, "tiny", (shape, ()))
    accelerator.main(accelerator.Config("tiny", steps=4, dtype="float32", out=tmp_path))
    report = json.loads((tmp_path / "tiny.json").read_text())
    assert {"device", "jax", "jaxlib", "flax", "commit", "date"} <= report.keys()
    full, geometric = report["full"], report["geometric"]
    assert full["mean_length"] > 1.5 * geometric["mean_length"]
    for measured in (full, geometric):
        assert measured["tokens_per_s"] > 0
        assert measured["first_step_s"] > measured["iteration_s"] > 0
        assert measured["mismatch"] == pytest.approx(1, abs=1e-3)
    assert (full["cache_reads"], report["cached"]["compilations"]) == (0, 0)
    assert report["cached"]["cache_reads"] == full["compilations"] > 2
    assert report["programs"]["learn_s"] > 0
    assert "tokens_per_s" in capsys.readouterr().out


def test_benchmark_numbers_exclude_the_first_iterations():
    counts = {"peak_memory_mb": 1e3, "compilations": 9, "cache_reads": 2}
    times = [{"s": s, "mfu": mfu} | counts for s, mfu in ((60, 0.1), (80, 0.2), (82, 0.4), (84, 0.4))]
    metrics = [{"tokens": 100, "length_mean": 10.0, "first_sampler_mismatch": 1.0}] * 4
    measured = accelerator.summary(times, metrics, "plan: 1 microbatch, remat none: about 3.5 of 75 GiB")
    assert (measured.iteration_s, measured.tokens_per_s, measured.compilation_s) == (2, 50, 58)
    assert (measured.update_mfu, measured.planned_gib) == (0.4, 3.5)
    assert (measured.compilations, measured.cache_reads) == (9, 2)
