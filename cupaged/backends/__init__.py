"""One file per way to run the kernels, and here the choice between them.

Every backend has the same members, gives the same results to the bit, and never imports an allocator. `cupy` and
`numba-cuda` run on a GPU, `numba` and `reference` on the host.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import Any, NamedTuple

from cupaged.errors import BackendError

__all__ = ["NAMES", "Probe", "pick", "probe"]

NAMES = ("cupy", "numba-cuda", "numba", "reference")

_WHERE = {
    "cupy": ("cupaged.backends.cupy_raw", "CupyBackend"),
    "numba-cuda": ("cupaged.backends.numba_cuda", "NumbaCudaBackend"),
    "numba": ("cupaged.backends.numba_cpu", "NumbaBackend"),
    "reference": ("cupaged.backends.reference", "ReferenceBackend"),
}


class Probe(NamedTuple):
    """Whether a backend can run here; if not, why, and what to install."""

    works: bool
    reason: str = ""
    hint: str = ""


@functools.cache
def probe(name: str) -> Probe:
    """Find out whether the backend `name` can run on this machine.

    Raises
    ------
    ValueError
        If there is no backend of that name.
    """
    if name not in _WHERE:
        raise ValueError(f"backend must be one of {', '.join(('auto', *NAMES))}, not {name!r}")
    if name in ("numba", "reference"):
        return Probe(True)
    return Probe(*importlib.import_module(_WHERE[name][0]).probe())


def _load(name: str) -> Any:
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)


def pick(name: str, device: str) -> Any:
    """Choose a backend's class.

    Parameters
    ----------
    name : str
        One of `NAMES`, or ``"auto"``: the environment variable ``CUPAGED_BACKEND``, or else the first that works.
    device : {"auto", "cpu", "cuda"}
        What the pool shall live on.

    Raises
    ------
    BackendError
        If the one that was named, or every one for that device, cannot run.
    ValueError
        If there is no such backend, or it does not run on that device.
    """
    if not isinstance(name, str):
        raise ValueError(f"backend must be one of {', '.join(('auto', *NAMES))}, not {name!r}")
    if name == "auto":
        name = os.environ.get("CUPAGED_BACKEND", "auto") or "auto"
    if name != "auto":
        return _named(name, device)
    if device == "cpu":
        return _load("numba")
    cupy = probe("cupy")
    if cupy.works:
        return _load("cupy")
    fallback = probe("numba-cuda")
    if fallback.works:
        _say_fallback(cupy)
        return _load("numba-cuda")
    if device == "cuda":
        raise BackendError(
            f"no backend can run on a GPU here. cupy: {cupy.reason}; {cupy.hint}. "
            f"numba-cuda: {fallback.reason}; {fallback.hint}"
        )
    return _load("numba")


def _named(name: str, device: str) -> Any:
    result = probe(name)
    if not result.works:
        raise BackendError(f"backend {name!r} cannot run here: {result.reason}; {result.hint}")
    on_gpu = name in ("cupy", "numba-cuda")
    if device != "auto" and on_gpu != (device == "cuda"):
        raise ValueError(f"backend {name!r} does not run on device {device!r}")
    return _load(name)


@functools.cache
def _say_fallback(cupy: Probe) -> None:
    warnings.warn(
        f"cupaged runs on numba.cuda, which is slower: CuPy cannot be used ({cupy.reason}; {cupy.hint})",
        RuntimeWarning,
        stacklevel=4,
    )
