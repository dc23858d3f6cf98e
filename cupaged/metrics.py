"""What a monitoring system scrapes of a pool: plain numbers, or a collector for Prometheus. No launch, no wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cupaged.layout import Word

__all__ = ["PoolCollector", "snapshot"]


class _Metric(NamedTuple):
    help: str
    counts: bool = False  # a counter, which only grows; else a gauge


_METRICS = {
    "pages": _Metric("Pages in use since the pool was made or resized."),
    "free_pages": _Metric("Pages that an allocation may take at once."),
    "staged_pages": _Metric("Free pages that wait for a merge (need_sort)."),
    "owned_pages": _Metric("Pages with at least one owner."),
    "shared_pages": _Metric("Pages with more than one owner."),
    "peak_pages": _Metric("Most pages that had an owner at one time."),
    "ops": _Metric("Operations that ran, replays of graphs included.", counts=True),
    "pages_allocated": _Metric("Pages handed out.", counts=True),
    "pages_freed": _Metric("Pages that came back.", counts=True),
    "refusals": _Metric("Allocations that gave no page.", counts=True),
    "errors": _Metric("Recorded errors that the host has read.", counts=True),
}


def snapshot(allocator: Any) -> dict[str, int]:
    """Figures of one allocator's pool as its device last reported them.

    Parameters
    ----------
    allocator : PagedTokenToKVPoolAllocator or KVAllocator

    Returns
    -------
    dict of str to int
        ``pages``, ``free_pages``, ``staged_pages``, ``owned_pages``, ``shared_pages``, ``peak_pages``, and, counted
        since the pool was made, ``ops``, ``pages_allocated``, ``pages_freed``, ``refusals`` and ``errors``. All are
        of one op, which on a GPU may be some ops behind the last one queued: nothing is launched or waited for, so
        any thread may call this at any time.
    """
    pool = allocator.pool
    words = pool.last_known_words()
    free, staged = words[Word.FREE], words[Word.STAGED]
    return {
        "pages": words[Word.NUM_PAGES],
        "free_pages": free,
        "staged_pages": staged,
        "owned_pages": words[Word.NUM_PAGES] - free - staged,
        "shared_pages": words[Word.SHARED],
        "peak_pages": words[Word.PEAK],
        "ops": words[Word.OP],
        "pages_allocated": words[Word.ALLOCATED],
        "pages_freed": words[Word.FREED],
        "refusals": words[Word.REFUSALS] + pool.host_refusals,
        "errors": pool.errors_read,
    }


class PoolCollector:
    r"""Collector for `prometheus_client`: the figures of `snapshot`, for any number of allocators.

    Parameters
    ----------
    allocators : mapping of str to PagedTokenToKVPoolAllocator or KVAllocator
        By the name that goes into the label ``pool``.
    prefix : str
        What every metric's name begins with.

    Raises
    ------
    ImportError
        From `collect`, if prometheus_client is not installed.

    Examples
    --------
    >>> import cupaged
    >>> from cupaged.metrics import PoolCollector
    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> registry = CollectorRegistry()
    >>> pool = cupaged.PagedTokenToKVPoolAllocator(1024, 64, device="cpu")
    >>> registry.register(PoolCollector({"main": pool}))
    >>> "cupaged_free_pages{pool=\"main\"} 16.0" in generate_latest(registry).decode()
    True
    """

    def __init__(self, allocators: Mapping[str, Any], prefix: str = "cupaged") -> None:
        self.allocators, self.prefix = dict(allocators), prefix

    def collect(self) -> Iterator[Any]:
        """Yield one metric family a figure; `prometheus_client` calls it at each scrape."""
        try:
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ImportError:
            raise ImportError('a collector needs prometheus_client: pip install "cupaged[metrics]"') from None
        found = {label: snapshot(allocator) for label, allocator in self.allocators.items()}
        for name, metric in _METRICS.items():
            family = CounterMetricFamily if metric.counts else GaugeMetricFamily
            samples = family(f"{self.prefix}_{name}", metric.help, labels=["pool"])
            for label, figures in found.items():
                samples.add_metric([label], figures[name])
            yield samples

    def describe(self) -> list[Any]:
        """Nothing: metrics are known at the first scrape, so that registering one reads no pool."""
        return []
