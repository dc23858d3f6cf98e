"""Nothing is compiled for the first time inside a property test: its deadline would blame the wrong line."""

from __future__ import annotations

import os

os.environ.setdefault("NUMBA_NUM_THREADS", "1")

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    from cupaged.backends import numba_cuda

    # The first warning in a module makes this name, and numba's simulator, whose threads may be walking through the
    # module's names, does not stand names that come.
    vars(numba_cuda).setdefault("__warningregistry__", {})
