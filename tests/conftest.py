"""Nothing is compiled for the first time inside a property test: its deadline would blame the wrong line."""

from __future__ import annotations

import os

os.environ.setdefault("NUMBA_NUM_THREADS", "1")
