"""The machine under the figures: what it is, and the most it does."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ntkfl.tangent.products import times_transposed
from ntkfl.version import __version__
from ntkfl_experiments.bench.race import race
from ntkfl_experiments.bench.rows import Setting


@dataclass(frozen=True)
class Machine:
    """`gflops` of float32 matrix products; `bandwidth`, GB/s read plus written by a copy; `load` met at the start."""

    processor: str
    cores: int
    threads: int
    device: str
    load: float
    gflops: float
    bandwidth: float

    @property
    def lines(self) -> list[str]:
        """For people."""
        where = self.processor if self.device == "cpu" else f"{self.device} beside {self.processor}"
        lines = [
            f"{where}, {self.cores} cores, {self.threads} threads",
            f"float32 matrix product {self.gflops:,.0f} GFLOP/s, copy {self.bandwidth:,.0f} GB/s",
            ", ".join(f"{name} {version}" for name, version in versions().items()),
        ]
        if self.load > 0.75 * self.cores:
            lines.append(f"busy with other work (load {self.load:.1f}): compare within a table only")
        return lines

    def at_least(self, gflops: float) -> Machine:
        """The same machine once it was seen to do better."""
        return replace(self, gflops=max(self.gflops, gflops))


def look(setting: Setting) -> Machine:
    """Name and measure this machine."""
    return Machine(
        processor=processor_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        device=_device_name(setting.device),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        gflops=matrix_gflops(setting),
        bandwidth=_copy_bandwidth(setting),
    )


def versions() -> dict[str, str]:
    return {
        "ntkfl": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def matrix_gflops(setting: Setting) -> float:
    """The best of several square products, by the library that the package takes on this machine."""
    n = 256 if setting.quick else 2048 if setting.device.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=setting.device)
    seconds = race({"product": lambda: times_transposed(a, b)}, 5, setting)["product"].seconds
    return 2 * n**3 / seconds / 1e9


def _copy_bandwidth(setting: Setting) -> float:
    n = 2**20 if setting.quick else 2**27  # 512 MiB: larger than any cache
    a, b = torch.zeros(2, n, device=setting.device)
    seconds = race({"copy": lambda: b.copy_(a)}, 3, setting)["copy"].seconds
    return 2 * 4 * n / seconds / 1e9


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor_name() -> str:
    """As its maker calls it: `platform.processor()` says only the architecture on Linux."""
    info = Path("/proc/cpuinfo")
    if sys.platform == "linux" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
