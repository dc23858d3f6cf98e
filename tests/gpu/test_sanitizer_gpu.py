"""Every kernel under compute-sanitizer's four tools."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
CHILD = Path(__file__).with_name("sanitized_ops.py")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer(tool):
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # CuPy's pool would hide a read past one array in its neighbour: without it each array is its own allocation.
    code = (
        "import sys, runpy, cupy; cupy.cuda.set_allocator(None); sys.path.insert(0, '.'); "
        f"runpy.run_path({str(CHILD)!r})"
    )
    command = [found, "--tool", tool, "--error-exitcode", "77", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=CHILD.parents[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-2000:]
