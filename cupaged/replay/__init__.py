"""Replay of a log of LLM requests through the allocator, as a serving engine would drive it.

>>> from cupaged.replay import replay, synthetic
>>> result = replay(synthetic(50), page_size=16, pool_tokens=32_000, backend="reference", verify=True)
>>> result.served, result.skipped
(50, 0)

`read_trace` reads a log, `replay` runs it on either allocator (`engine`), and lets prompts that begin alike share
pages (`share_prefixes`); `table` and `plot` show several results side by side. `replay_replicas` does so by
data-parallel replicas on a `LocalCluster` or a `RayCluster`. A bad file raises `TraceError`, an allocator that breaks
its contract `VerificationError`, a worker that died `WorkerError`; all say it in one line.
"""

from cupaged.replay.clusters import CLUSTERS, LocalCluster, RayCluster, WorkerError
from cupaged.replay.replicas import ROUTERS, ReplicasResult, replay_replicas, route
from cupaged.replay.report import ReplayResult, plot, table
from cupaged.replay.run import replay
from cupaged.replay.traces import Trace, TraceError, read_trace, synthetic
from cupaged.replay.verify import VerificationError

__all__ = [
    "CLUSTERS",
    "ROUTERS",
    "LocalCluster",
    "RayCluster",
    "ReplayResult",
    "ReplicasResult",
    "Trace",
    "TraceError",
    "VerificationError",
    "WorkerError",
    "plot",
    "read_trace",
    "replay",
    "replay_replicas",
    "route",
    "synthetic",
    "table",
]
