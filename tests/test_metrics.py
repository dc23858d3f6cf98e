"""Figures for monitoring: read without a launch or a wait, and as a real Prometheus client sees them."""

from __future__ import annotations

import pytest

from cupaged import DoubleFreeError, KVAllocator, PagedTokenToKVPoolAllocator
from cupaged.metrics import PoolCollector, snapshot
from tests.allocators import make

EXPECTED = {
    "pages": 10,
    "free_pages": 7,
    "staged_pages": 0,
    "owned_pages": 3,
    "shared_pages": 1,
    "peak_pages": 5,
    "ops": 7,  # the clear() of the new pool, alloc, retain, three frees, retain
    "pages_allocated": 5,
    "pages_freed": 2,
    "refusals": 1,
    "errors": 0,
}


def used(pool):
    """Five pages of ten, one with two owners, two given back; one allocation too large."""
    pool.alloc(20)
    pool.retain([3])
    pool.free_page_ids([1])
    pool.free_page_ids([2])
    pool.free_page_ids([3])
    pool.retain([3])
    assert pool.alloc(44) is None
    return pool


def test_figures():
    assert snapshot(used(PagedTokenToKVPoolAllocator(40, 4, device="cpu"))) == EXPECTED


def test_errors_that_were_read():
    pool = PagedTokenToKVPoolAllocator(40, 4, device="cpu")
    pool.free_page_ids([1])
    assert snapshot(pool)["errors"] == 0
    with pytest.raises(DoubleFreeError):
        pool.check()
    assert snapshot(pool)["errors"] == 1


def test_a_device_that_lags_behind_is_not_waited_for():
    pool = make("cuda-delayed", 40, 4)
    pool.check()
    launched = len(pool.backend.launches)
    pool.alloc(20)
    assert snapshot(pool)["free_pages"] == 10, "the allocation is queued, and nobody waits for it"
    assert len(pool.backend.launches) == launched + 1
    pool.check()
    assert snapshot(pool)["free_pages"] == 5


def test_prometheus_sees_them():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    kv = KVAllocator(64, "cpu", 2, 32, 8)
    kv.alloc(0, 9, 0)
    registry.register(PoolCollector({"slots": used(PagedTokenToKVPoolAllocator(40, 4, device="cpu")), "kv": kv}))
    assert registry.get_sample_value("cupaged_free_pages", {"pool": "slots"}) == 7
    assert registry.get_sample_value("cupaged_shared_pages", {"pool": "slots"}) == 1
    assert registry.get_sample_value("cupaged_pages_allocated_total", {"pool": "slots"}) == 5
    assert registry.get_sample_value("cupaged_refusals_total", {"pool": "slots"}) == 1
    assert registry.get_sample_value("cupaged_owned_pages", {"pool": "kv"}) == 2
    text = client.generate_latest(registry).decode()
    assert "# TYPE cupaged_free_pages gauge" in text
    assert "# TYPE cupaged_ops_total counter" in text
