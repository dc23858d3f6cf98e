"""Slots of a paged KV cache for every new token of a batch of LLM requests.

Importing this package needs neither CuPy nor torch nor a GPU; all but the errors is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cupaged import errors
from cupaged.errors import *  # noqa: F403

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cupaged.interop import to_torch
    from cupaged.kv import KVAllocator
    from cupaged.paged import PagedTokenToKVPoolAllocator
    from cupaged.pool import Stats

_HOME = {
    "KVAllocator": "cupaged.kv",
    "PagedTokenToKVPoolAllocator": "cupaged.paged",
    "Stats": "cupaged.pool",
    "to_torch": "cupaged.interop",
}

__all__ = ["KVAllocator", "PagedTokenToKVPoolAllocator", "Stats", "to_torch"]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'cupaged' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
