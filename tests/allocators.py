"""Allocators for tests, also on backends that exist only there."""

from __future__ import annotations

from unittest import mock

from cupaged import PagedTokenToKVPoolAllocator, backends
from tests.host_backend import variant

_CUDA = {
    "cuda-ascending": variant("ascending"),
    "cuda-random": variant("random"),
    "cuda-delayed": variant("random", delayed=True),
}
# Those whose results can be read as soon as a call returns.
HOSTED = ("reference", "numba", "cuda-ascending", "cuda-random")


def make(backend: str, size: int, page_size: int, **options) -> PagedTokenToKVPoolAllocator:
    """A slot allocator on a backend of the product, or on the CUDA C run by the host."""
    if backend in _CUDA:
        with mock.patch.object(backends, "pick", return_value=_CUDA[backend]):
            return PagedTokenToKVPoolAllocator(size, page_size, **options)
    return PagedTokenToKVPoolAllocator(size, page_size, backend=backend, **options)
