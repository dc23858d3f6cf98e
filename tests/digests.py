"""What the ledger of GPU runs is compared by."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "tests" / "gpu" / "ledger.json"


HOST_ONLY = {"host.py", "numba_cpu.py"}  # of the backends: a GPU run has nothing to say about them


def digest(folder: str, *patterns: str) -> str:
    """SHA-256 of the names and contents of a folder's sources, as far as a GPU runs them or is compared with them."""
    total = hashlib.sha256()
    files = sorted(file for pattern in patterns for file in (ROOT / folder).glob(pattern))
    for file in files:
        if file.name in HOST_ONLY:
            continue
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def current() -> dict[str, str]:
    return {
        "kernels_cu": digest("kernels_cu", "*.cu", "*.cuh"),
        "cupaged/backends": digest("cupaged/backends", "*.py"),
    }


def gpu_test_files() -> list[str]:
    return sorted(file.name for file in (ROOT / "tests" / "gpu").glob("test_*.py"))


def read_ledger() -> dict:
    return json.loads(LEDGER.read_text())
