"""Rates of devices, from their vendors' data sheets; what a program reaches of them is less."""

from typing import NamedTuple


class Device(NamedTuple):
    """Limits of one device."""

    flops: float  # dense products in bfloat16, a second
    memory: float  # bytes
    bandwidth: float  # bytes of memory, a second
    link: float  # bytes to other devices in one direction, a second


# NVIDIA's data sheet of the H100 SXM: 900 GB/s of NVLink in both directions, within a host of eight. Google's pages of
# each TPU (cloud.google.com/tpu/docs/v5e, v5p, v6e, read in November 2026): the interconnect in both directions is 400,
# 1,200 and 800 GB/s.
DEVICES = {
    "h100": Device(989e12, 80e9, 3.35e12, 450e9),
    "v5e": Device(197e12, 16e9, 819e9, 200e9),
    "v5p": Device(459e12, 95 * 2**30, 2765e9, 600e9),
    "v6e": Device(918e12, 32e9, 1600e9, 400e9),
}
