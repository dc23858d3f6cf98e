"""Time to the first result, and compilations after the warm-up: each in a process, with caches, of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["compilations", "first_results"]

_CACHES = ("CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
LIMIT_S = 240

# Imports and the driver's context are everybody's; what is timed begins behind them.
_OURS = """
import json, sys, time
start = time.perf_counter()
backend = sys.argv[1]
import numpy as np
if backend == "cupy":
    import cupy
    cupy.zeros(1)
    cupy.cuda.runtime.deviceSynchronize()
import cupaged, cupaged.backends, cupaged.paged
cupaged.backends.pick(backend, "auto")
ready = time.perf_counter()
pool = cupaged.PagedTokenToKVPoolAllocator(65536, 64, backend=backend, device="auto")
slots = pool.alloc_decode(np.ones(4, np.int64), np.full(4, -1))
assert list(map(int, slots)) == [64, 128, 192, 256]
print(json.dumps({"imports": ready - start, "first": time.perf_counter() - ready}))
"""

_ENGINE = """
import importlib, json, sys, time
start = time.perf_counter()
import numpy as np, torch
contestants = importlib.import_module(sys.argv[1] + ".contestants")
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
batch = contestants.Batch(np.zeros(4, np.int64), np.ones(4, np.int64))
engine = contestants.make("engine", contestants.Setup(0, 8), "cuda")
seq, last = engine.load(batch.seq), engine.load(batch.last)
ready = time.perf_counter()
engine.fetch(engine.decode(seq, last, torch.ones(4, dtype=torch.int64)))
print(json.dumps({"imports": ready - start, "first": time.perf_counter() - ready}))
"""

# Batches that a server sees in its first minutes: no two alike.
_SHAPES = """
SIZES = [1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 100, 127, 128, 200, 256, 300, 500, 512, 700, 1000, 1024, 1500]
"""

_COMPILE_OURS = (
    _SHAPES
    + """
import json, os, sys, time
from pathlib import Path
import numpy as np
import cupaged
backend = sys.argv[1]
on_gpu = backend == "cupy"
if on_gpu:
    import cupy
    give = cupy.asarray
    wait = cupy.cuda.runtime.deviceSynchronize
    compiled = lambda: sum(p.is_file() for p in Path(os.environ["CUPY_CACHE_DIR"]).rglob("*"))
else:
    from numba.core import event
    seen = event.RecordingListener()
    event.register("numba:compile", seen)
    give, wait = np.asarray, lambda: None
    compiled = lambda: sum(e.is_start for _, e in seen.buffer)
device = "cuda" if on_gpu else "cpu"
pool = cupaged.PagedTokenToKVPoolAllocator(64 * 40000, 64, backend=backend, device=device)
kv = cupaged.KVAllocator(64 * 40000, device, 2048, 4096, 64, backend=backend)
pool.warmup()
kv.warmup()
wait()
before, slowest = compiled(), ("", 0.0)

def timed(what, call, *arguments, **named):
    global slowest
    start = time.perf_counter()
    result = call(*arguments, **named)
    wait()
    seconds = time.perf_counter() - start
    if seconds > slowest[1]:
        slowest = (what, seconds)
    return result

for dtype in (np.int64, np.int32):
    for n in SIZES:
        rows, zeros, ones = np.arange(n, dtype=dtype), np.zeros(n, dtype), np.ones(n, dtype)
        none, new = give(zeros - 1), give(zeros + 1 + n % 7)
        tokens = n * (1 + n % 7)
        slots = timed(f"extend {n}", pool.alloc_extend, give(zeros), new, none, tokens)
        timed(f"free {n}", pool.free, slots)
        slots = timed(f"decode {n}", pool.alloc_decode, give(ones), none)
        timed(f"free {n}", pool.free, slots, num_pages=n)
        slots = timed(f"alloc {n}", pool.alloc, 64 * (1 + n % 7))
        timed(f"free_segment {n}", pool.free_segment, slots, start_pos=0)
        table = kv.req_to_page
        timed(f"decode_step {n}", kv.decode_step, table, give(rows), give(zeros))
        timed(f"extend_step {n}", kv.extend_step, table, give(rows), give(ones), give(ones + 3), 3 * n)
        timed(f"block_table {n}", kv.block_table, table, give(rows), give(ones + 3), max_pages=2)
        timed(f"flashinfer_tables {n}", kv.flashinfer_tables, table, give(rows), give(ones + 3))
        timed(f"trim {n}", kv.trim, table, give(rows), give(ones + 3), give(ones))
        timed(f"release {n}", kv.release, table, give(rows), give(ones))
        timed(f"alloc_batch {n}", kv.alloc_batch, rows, ones, zeros)
        timed(f"copy of the table {n}", lambda: kv.req_to_page_cpu)
        for row in range(n):
            kv.free_req_cache(row, 1)
        timed(f"free_group_end {n}", kv.free_group_end)
pool.check()
kv.check()
print(json.dumps({"compiled": compiled() - before, "slowest": slowest[0], "slowest_ms": slowest[1] * 1e3}))
"""
)

_COMPILE_ENGINE = (
    _SHAPES
    + """
import importlib, json, os, sys, time
from pathlib import Path
import numpy as np, torch
contestants = importlib.import_module(sys.argv[1] + ".contestants")
compiled = lambda: len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))
engine = contestants.make("engine", contestants.Setup(0, 20000), "cuda")
before, slowest = None, ("", 0.0)
for n in [SIZES[0], *SIZES]:
    batch = contestants.Batch(np.zeros(n, np.int64), np.ones(n, np.int64))
    seq, last, cpu = engine.load(batch.seq), engine.load(batch.last), torch.ones(n, dtype=torch.int64)
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.decode(seq, last, cpu)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if before is None:
        before = compiled()
    elif seconds > slowest[1]:
        slowest = (f"decode {n}", seconds)
print(json.dumps({"compiled": compiled() - before, "slowest": slowest[0], "slowest_ms": slowest[1] * 1e3}))
"""
)


def first_results(names: list[str], disk_runs: int = 3) -> dict[str, dict[str, Any]]:
    """Seconds from a ready process to the first slots, with empty caches and with filled ones.

    Parameters
    ----------
    names : list of str
        Backends, or ``"engine"``.
    disk_runs : int
        Processes that find the caches filled.

    Returns
    -------
    dict
        For each name ``{"cold": s, "disk": [s, ..]}`` or ``{"error": why}``.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        code, argument = (_ENGINE, __package__) if name == "engine" else (_OURS, name)
        with tempfile.TemporaryDirectory() as caches:
            runs = [_child(code, argument, caches) for _ in range(1 + disk_runs)]
        errors = [run["error"] for run in runs if "error" in run]
        if errors:
            found[name] = {"error": errors[0]}
        else:
            found[name] = {"cold": runs[0]["first"], "disk": [run["first"] for run in runs[1:]]}
    return found


def compilations(names: list[str]) -> dict[str, dict[str, Any]]:
    """Count what each compiles after its warm-up, over many batch shapes.

    Parameters
    ----------
    names : list of str
        ``"cupy"``, ``"numba"`` or ``"engine"``, whose warm-up is one batch.

    Returns
    -------
    dict
        For each name ``{"compiled": n, "slowest": call, "slowest_ms": ms}`` or ``{"error": why}``.
    """
    found = {}
    for name in names:
        code, argument = (_COMPILE_ENGINE, __package__) if name == "engine" else (_COMPILE_OURS, name)
        with tempfile.TemporaryDirectory() as caches:
            found[name] = _child(code, argument, caches)
    return found


def _child(code: str, argument: str, caches: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for name in _CACHES:
        folder = Path(caches) / name
        folder.mkdir(exist_ok=True)
        environment[name] = str(folder)
    environment.pop("CUPAGED_BACKEND", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, argument],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
            cwd=caches,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return {"error": said[-1][:300] if said else f"ended with code {done.returncode}"}
    return json.loads(lines[-1])
