"""What devices hold and how fast they are: by name, or measured on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GIB = 1 << 30
BEST_OF = 40
"""Runs of which the fastest counts: others share the machine, but nothing makes it faster than it is."""


@dataclass(frozen=True)
class Device:
    """What a device holds and how fast it is."""

    name: str
    gib: float
    """Memory that torch can see."""
    bfloat16: float
    """Floating-point operations a second of dense matrix products."""
    float32: float
    """The same in float32, without TF32."""
    copy: float
    """Bytes a second that a copy reads and writes."""
    source: str
    """Where the rates come from."""
    is_gpu: bool = True

    def matrix_rate(self, dtype: torch.dtype) -> float:
        return self.bfloat16 if dtype == torch.bfloat16 else self.float32


DEVICES = {
    "h200": Device("H200", 139.7, 790e12, 67e12, 4.3e12, "measured, but for float32"),
    "h100": Device("H100 SXM", 79.1, 989e12, 67e12, 3.35e12, "of the datasheet"),
    "a100-80": Device("A100 SXM 80 GB", 79.1, 312e12, 19.5e12, 2.039e12, "of the datasheet"),
    "a100-40": Device("A100 SXM 40 GB", 39.4, 312e12, 19.5e12, 1.555e12, "of the datasheet"),
    "l40s": Device("L40S", 44.3, 362e12, 91.6e12, 0.864e12, "of the datasheet"),
    "rtx-4090": Device("RTX 4090", 23.5, 165e12, 82.6e12, 1.008e12, "of the datasheet"),
}


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """This machine's GPU or CPU: its memory, and its rates for `dtype`, measured now on torch's present threads."""
    is_gpu = device.type == "cuda"
    size, length = (8192, GIB) if is_gpu else (512, GIB // 32)
    # Random numbers: a GPU is faster on zeros and ones, which toggle fewer of its bits, than on what it will be given.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.randint(256, (length,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix_rate = 2 * size**3 / _fastest(lambda: left @ right, is_gpu)
    copy_rate = 2 * length / _fastest(lambda: target.copy_(source), is_gpu)
    if is_gpu:
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = f"CPU on {_threads()}", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(name, memory / GIB, matrix_rate, matrix_rate, copy_rate, "measured now", is_gpu)


def _threads() -> str:
    threads = torch.get_num_threads()
    return f"{threads} thread" + ("s" if threads > 1 else "")


def _fastest(action: Callable[[], object], is_gpu: bool) -> float:
    """Seconds of the fastest of some runs, after one that warms up."""
    seconds = []
    for _ in range(BEST_OF + 1):
        if is_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        if is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
