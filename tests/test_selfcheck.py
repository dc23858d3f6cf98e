"""The engine of ``cupaged check``: it is quiet about backends that agree, and finds and shrinks what differs."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from cupaged import PagedTokenToKVPoolAllocator, backends, selfcheck
from cupaged.backends.numba_cpu import NumbaBackend
from cupaged.errors import BackendError
from cupaged.selfcheck import Case, Op, check, compare
from tests.host_backend import DeviceArray, HostCudaBackend


class ReadableArray(DeviceArray):
    """On the pretended GPU; to read it waits for what is queued there."""

    def __init__(self, backend: HostCudaBackend, array: np.ndarray) -> None:
        super().__init__(array)
        self.backend, self.shape, self.dtype = backend, array.shape, array.dtype

    def __getitem__(self, which: slice) -> ReadableArray:
        return ReadableArray(self.backend, self.array[which])

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.backend.run_launches()
        return self.array


class HostCuda(HostCudaBackend):
    order = "random"

    def from_host(self, library, array):
        if self.delayed:
            self.in_use.append(array)
        return ReadableArray(self, array)

    def output(self, library, n):
        array, address = super().output(library, n)
        return ReadableArray(self, array), address


class DelayedHostCuda(HostCuda):
    delayed = True

    def _zeros(self, n, dtype):
        array, address = super()._zeros(n, dtype)
        self.keep_alive = (*getattr(self, "keep_alive", ()), array)  # scratch that has grown since may be in use
        return array, address


def check_cuda(kind: type[HostCuda], **settings) -> selfcheck.Report:
    """Check the CUDA C, run by the host, in the place of the numba backend."""

    def make(name: str, options: dict) -> PagedTokenToKVPoolAllocator:
        if name == "reference":
            return PagedTokenToKVPoolAllocator(backend=name, **options)
        with mock.patch.object(backends, "pick", return_value=kind):
            return PagedTokenToKVPoolAllocator(**options)

    with mock.patch.object(selfcheck, "make_allocator", make):
        return check(["numba"], **settings)


def test_numba_agrees():
    report = check(["numba"], cases=60, seconds=60)
    assert report.difference is None, str(report.difference)
    assert report.cases == 60
    assert min(report.ops, report.short, report.refused, report.errors) > 20


@pytest.mark.parametrize("kind", [HostCuda, DelayedHostCuda])
def test_the_cuda_source_agrees(kind):
    report = check_cuda(kind, cases=40, seconds=40)
    assert report.difference is None, str(report.difference)
    assert report.ops > 300


def test_same_seed_same_batches():
    first, second = (check(["numba"], cases=5, seconds=60, seed=3) for _ in range(2))
    assert (first.ops, first.short, first.refused) == (second.ops, second.short, second.refused)


def test_progress_is_told():
    seen: list[int] = []
    check(["numba"], cases=3, seconds=60, progress=lambda report: seen.append(report.cases))
    assert seen == [1, 2, 3]


def test_a_backend_that_does_not_run_is_named():
    with (
        mock.patch.object(backends, "probe", return_value=backends.Probe(False, "no GPU", "buy one")),
        pytest.raises(BackendError, match=r"cupy.*no GPU; buy one"),
    ):
        check(["cupy"])


def test_wrong_order_of_frees_is_found_and_made_small(monkeypatch):
    right = NumbaBackend.free_slots

    def swapped(self, slots, push, index_base, where):
        right(self, slots, push, index_base, where)
        if len(slots) > 1 and self.words[1] > 2:
            head = int(self.words[0])
            places = [head % self.capacity, (head + 1) % self.capacity]
            self.free_ring[places] = self.free_ring[places[::-1]]

    monkeypatch.setattr(NumbaBackend, "free_slots", swapped)
    found = check(["numba"], seconds=30, seed=1).difference
    assert found is not None
    assert found.what == "free_pages"
    assert len(found.case.ops) <= 2
    assert compare(found.case, ["numba"]) is not None
    assert str(found).startswith("pool = PagedTokenToKVPoolAllocator(size=")


def test_wrong_slot_is_found_and_shown_with_its_neighbours(monkeypatch):
    right = NumbaBackend.alloc_extend

    def off_by_one(self, prefix, seq, last, num_tokens, out):
        right(self, prefix, seq, last, num_tokens, out)
        if num_tokens > 100:
            out[70] += 1

    monkeypatch.setattr(NumbaBackend, "alloc_extend", off_by_one)
    found = check(["numba"], seconds=30, seed=1).difference
    assert found is not None
    assert "result of op" in found.what
    assert "[68:80]" in found.expected
    assert len(str(found)) < 2000


def test_another_error_is_found(monkeypatch):
    right = NumbaBackend.retain_pages
    monkeypatch.setattr(NumbaBackend, "retain_pages", lambda self, entries: right(self, np.unique(entries)))
    found = check(["numba"], seconds=30, seed=1).difference
    assert found is not None
    assert found.expected != found.got


def test_an_exception_is_a_difference(monkeypatch):
    def broken(self, *arguments):
        raise RuntimeError("the kernel crashed")

    monkeypatch.setattr(NumbaBackend, "alloc_decode", broken)
    found = check(["numba"], seconds=30).difference
    assert found is not None
    assert "RuntimeError: the kernel crashed" in found.got


def test_a_lost_page_is_found(monkeypatch):
    right = NumbaBackend.free_pages

    def lossy(self, entries, divisor, where):
        right(self, entries, divisor, where)
        if self.words[1] > 1:
            self.ref_count[self.free_ring[self.words[0]]] = 1

    monkeypatch.setattr(NumbaBackend, "free_pages", lossy)
    assert check(["numba"], seconds=30).difference is not None


def test_ops_print_as_python():
    case = Case({"size": 8, "page_size": 4}, [Op("alloc_extend", ([0], [3], [-1], 3), {"out": True}), Op("backup")])
    assert str(case).splitlines() == [
        "pool = PagedTokenToKVPoolAllocator(size=8, page_size=4)",
        "pool.alloc_extend([0], [3], [-1], 3)",
        "pool.backup_state()",
    ]
    assert "... 99 in all]" in str(Op("free", (list(range(99)),), {}, ("int32",)))
    assert compare(case, ["numba"]) is None
