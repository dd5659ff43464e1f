"""What services hold: no torch, and no memory that they have freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FREED = """
from ntkfl.services.heap import trim_heap, limit_heaps

def resident():
    with open("/proc/self/statm") as lines:
        return int(lines.read().split()[1]) * 4096

limit_heaps()
base = resident()
kept = [bytes(12_000) for _ in range(8_000)]
full = resident() - base
kept = kept[::100]  # rows that others still hold: what lies between them cannot go back as the end of a heap
trim_heap()
print(full, resident() - base)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has it")
def test_freed_memory_goes_back_though_something_beside_it_is_kept() -> None:
    said = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True).stdout
    full, left = map(int, said.split())
    assert full > 90_000_000
    assert left < full / 5


def test_key_server_and_shuffler_do_without_torch() -> None:
    """They know nothing of models, and a machine for them need not be large."""
    program = (
        "import sys, ntkfl.services.key_server.app, ntkfl.services.shuffler.app, ntkfl.cli.serve; "
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
