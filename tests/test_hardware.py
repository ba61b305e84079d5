"""The memory and the operations of devices."""

from types import SimpleNamespace

import jax
import pytest

from grpo_jax import devices
from grpo_jax.devices import memory_limit, peak_flops


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12)],
)
def test_the_peak_of_a_device_is_that_of_the_most_special_name(monkeypatch, kind, peak):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert peak_flops(2) == 2 * peak


def test_the_peak_of_other_devices_is_not_known():
    assert peak_flops(1) is None


def test_a_cpu_has_what_is_left_of_the_machine_and_no_more_than_its_group(monkeypatch):
    ours = sum(x.nbytes for x in jax.live_arrays())
    monkeypatch.setattr(devices, "_available", lambda: 10**9)
    monkeypatch.setattr(devices, "_cgroup_limit", lambda: 4 * 10**8)
    assert memory_limit() == 4 * 10**8
    assert memory_limit(4) == 10**8
    monkeypatch.setattr(devices, "_cgroup_limit", lambda: 2**60)
    assert memory_limit() == 10**9 + ours


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "max\n", 2**60),
        ("memory.max", "1024\n", 1024),
        ("other", "1", 2**60),
    ],
)
def test_the_limit_of_a_group_is_read_from_its_file(tmp_path, file, text, limit):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert devices._cgroup_limit(tmp_path) == limit
