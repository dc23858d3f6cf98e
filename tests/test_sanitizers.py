"""Layer 4: the CUDA kernels under AddressSanitizer and UBSan, and, blocks side by side, under ThreadSanitizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.host_cuda import run_python

CHILD = Path(__file__).with_name("play_sanitized.py")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "plays"), [("asan", 120), ("tsan", 12)])
def test_kernels_are_clean(mode, plays):
    done = run_python(mode, CHILD, mode, 100, plays)
    assert done.returncode == 0, done.stderr[-4000:]
