"""A replay by data-parallel replicas: who gets which request, and what all of them did together."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cupaged.geometry import whole
from cupaged.replay.report import ReplayResult
from cupaged.replay.run import POINTS, check_arguments, check_choices
from cupaged.replay.traces import Trace

ROUTERS = ("round-robin", "least-loaded")


@dataclass(frozen=True)
class ReplicasResult:
    """Figures of a replay by several replicas.

    Attributes
    ----------
    total : ReplayResult
        All replicas as one. Counts and times in the allocator are sums; `wall_s` and the percentiles are those of
        the replica that has the largest; means weigh all steps of all replicas alike; the timeline is the mean of
        theirs. Its digests are hashes of theirs, in order.
    replicas : list of ReplayResult
        Each of them; `pool_tokens` is the size of each one's own pool.
    router, cluster : str
        How requests were routed, and where replicas ran. Only the former tells on the digests.
    """

    total: ReplayResult
    replicas: list[ReplayResult]
    router: str
    cluster: str


class Cluster(Protocol):
    """Where replicas run, each in a process of its own."""

    name: str
    workers: int

    def run(
        self, tasks: Sequence[tuple[Trace, dict[str, Any]]], progress: Callable[[int, int], object] | None
    ) -> list[ReplayResult]:
        """Replay each trace with its arguments, all at a time; results in order."""


def route(trace: Trace, replicas: int, router: str, *, step_ms: float = 25.0, chunk: int = 8192) -> np.ndarray:
    """Choose a replica for each request, from the trace alone, so that it is the same choice on every machine.

    Parameters
    ----------
    trace : Trace
        In order of arrival.
    replicas : int
        How many.
    router : {"round-robin", "least-loaded"}
        Each in turn; or the one whose requests have the fewest tokens, prompts and outputs together, the first of
        several. For the router a request has ended when it would have if it had been alone: after one step for each
        `chunk` of its prompt, and one for each token of its output.
    step_ms, chunk
        As for `replay`.

    Returns
    -------
    numpy.ndarray
        int64 ``[n]``, from 0 on.

    Raises
    ------
    ValueError
        For no replica, or an unknown router.
    """
    whole("replicas", replicas, 1)
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {router!r}")
    if router == "round-robin":
        return np.arange(len(trace)) % replicas
    tokens = (trace.prompt + trace.output).tolist()
    ends = (trace.arrival + (-(-trace.prompt // chunk) + trace.output) * (step_ms / 1000)).tolist()
    load = [0] * replicas
    alive: list[tuple[float, int, int]] = []  # when it ends, its replica and its tokens
    chosen = []
    for i, now in enumerate(trace.arrival.tolist()):
        while alive and alive[0][0] <= now:
            _, replica, gone = heapq.heappop(alive)
            load[replica] -= gone
        replica = load.index(min(load))
        load[replica] += tokens[i]
        heapq.heappush(alive, (ends[i], replica, tokens[i]))
        chosen.append(replica)
    return np.array(chosen, np.int64)


def part(trace: Trace, which: np.ndarray) -> Trace:
    """Some requests of a trace, by a mask; they arrive when they did."""
    ids = trace.hash_ids
    return replace(
        trace,
        arrival=trace.arrival[which],
        prompt=trace.prompt[which],
        output=trace.output[which],
        lines=trace.lines[which],
        hash_ids=None if ids is None else [ids[i] for i in np.flatnonzero(which)],
    )


def replay_replicas(
    trace: Trace,
    page_size: int,
    pool_tokens: int,
    cluster: Cluster,
    *,
    router: str = "round-robin",
    step_ms: float = 25.0,
    chunk: int = 8192,
    max_running: int = 256,
    engine: str = "slots",
    share_prefixes: bool = False,
    progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> ReplicasResult:
    """Serve the requests of a trace by as many replicas as a cluster has workers, each with its own pool.

    Parameters
    ----------
    trace, page_size, pool_tokens, step_ms, chunk, max_running, engine, share_prefixes
        As for `replay`, the last six for each replica.
    cluster : LocalCluster or RayCluster
        Where they run.
    router : {"round-robin", "least-loaded"}
        As for `route`.
    progress : callable, optional
        As for `replay`.
    **options
        `backend`, `device` and `verify` of `replay`. On one machine ``device="auto"`` deals its GPUs out in turns.

    Returns
    -------
    ReplicasResult
        The digests depend on the trace, the arguments and the number of workers, not on the cluster.

    Raises
    ------
    ValueError, VerificationError
        As `replay`.
    WorkerError
        If a worker has died, or failed for no fault of its arguments. Nothing is left running.
    """
    check_arguments(trace, page_size, pool_tokens, step_ms, chunk, max_running)
    check_choices(trace, engine, share_prefixes)
    chosen = route(trace, cluster.workers, router, step_ms=step_ms, chunk=chunk)
    options |= {"step_ms": step_ms, "chunk": chunk, "max_running": max_running}
    options |= {
        "engine": engine,
        "share_prefixes": share_prefixes,
        "page_size": page_size,
        "pool_tokens": pool_tokens,
    }
    tasks = [(part(trace, chosen == i), options) for i in range(cluster.workers)]
    results = cluster.run(tasks, progress)
    return ReplicasResult(total(results), results, router, cluster.name)


def total(results: Sequence[ReplayResult]) -> ReplayResult:
    """All replicas as one, as `ReplicasResult` says."""
    steps = np.array([r.steps for r in results])
    weight = steps / max(1, steps.sum())

    def add(name: str) -> Any:
        return sum(getattr(r, name) for r in results)

    def largest(name: str) -> Any:
        return max(getattr(r, name) for r in results)

    def mean(name: str) -> float:
        return float(sum(w * getattr(r, name) for w, r in zip(weight, results, strict=True)))

    first = results[0]
    summed = (
        *("requests", "served", "skipped", "tokens", "slots", "steps", "retractions", "allocations", "allocator_s"),
        *("looked_up", "pages_saved", "pages_evicted", "pages_replaced"),
    )
    sums = {name: add(name) for name in summed}
    peaks = ("occupancy_peak", "waste_peak", "wall_s", "step_p50_us", "step_p99_us", "step_max_us")
    seconds = sums["allocator_s"]
    held = mean("occupancy_mean") * (first.pool_tokens // first.page_size) * first.page_size
    return replace(
        first,
        backend=_each(r.backend for r in results),
        device=_each(r.device for r in results),
        **sums,
        **{name: largest(name) for name in peaks},
        occupancy_mean=mean("occupancy_mean"),
        waste_mean=mean("waste_mean"),
        waste_share=mean("waste_mean") / held if held else 0.0,
        allocations_per_s=sums["allocations"] / seconds if seconds else 0.0,
        slots_per_s=sums["slots"] / seconds if seconds else 0.0,
        digest=_digest(r.digest for r in results),
        owned_digest=_digest(r.owned_digest for r in results),
        verified=all(r.verified for r in results),
        found_share=sums["pages_saved"] * first.page_size / sums["looked_up"] if sums["looked_up"] else 0.0,
        notes=list(dict.fromkeys(note for r in results for note in r.notes)),
        timeline=_mean_of_timelines([r.timeline for r in results]),
    )


def _each(names: Any) -> str:
    return ", ".join(dict.fromkeys(names))


def _digest(digests: Any) -> str:
    return hashlib.blake2b(b"".join(map(bytes.fromhex, digests)), digest_size=16).hexdigest()


def _mean_of_timelines(timelines: Sequence[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Mean of step functions, each 0 before it begins and behind its last point."""
    moments = np.unique([moment for line in timelines for moment, _ in line])
    moments = moments[:: -(-len(moments) // POINTS)] if len(moments) else moments
    shares = np.zeros(len(moments))
    for line in timelines:
        if line:
            own, share = (np.array(x) for x in zip(*line, strict=True))
            at = np.searchsorted(own, moments, side="right") - 1
            shares += np.where((at >= 0) & (moments <= own[-1]), share[at], 0)
    return list(zip(moments.tolist(), (shares / len(timelines)).tolist(), strict=True))
