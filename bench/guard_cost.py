"""What `LockstepGuard` costs a decode step: JSON on stdout. ``python bench/guard_cost.py [--over nccl]``.

Two ranks. Over gloo the other one keeps its pool on the CPU, so one GPU is enough; over NCCL it runs the same on a
second GPU. Measured with and without the guard, in turns:

- `engine_step_us`: a whole step, `decode_step` of 256 requests in front of a CUDA graph with a model's matrix
  products (no attention, no sampling, so a real step takes longer), as the GPU finishes them;
- `decode_step_host_us`: the call of `decode_step` alone, as the host sees it, with nothing to wait for;
- `decode_step_gpu_us`: the same on the GPU, by replays of a graph of 50 of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import cupaged
from cupaged.integrations.distributed import LockstepGuard

BATCH, PAGE_SIZE, CONTEXT, PAGES, EVERY = 256, 64, 8192, 16_384, 64
BLOCKS, STEPS = 12, 96  # the first block of each kind is not counted
CALLS, IN_GRAPH, REPLAYS = 3000, 50, 100
# Layers, hidden size and feed-forward size of models as they are served.
MODELS = {"1b": (16, 2048, 8192), "8b": (32, 4096, 14_336)}
ON_CPU = {"tiny": (1, 256, 512)}


class Side:
    """One allocator, with or without a guard, and the requests that it serves."""

    def __init__(self, device: torch.device, lengths: list[int]) -> None:
        self.pool = cupaged.PagedTokenToKVPoolAllocator(PAGES * PAGE_SIZE, PAGE_SIZE, device=device)
        self.table = torch.zeros(BATCH, CONTEXT, dtype=torch.int32, device=device)
        self.rows = torch.arange(BATCH, device=device)
        self.seq = torch.tensor(lengths, device=device)
        self.pool.extend_step(self.table, self.rows, torch.zeros_like(self.seq), self.seq, sum(lengths))

    def step(self) -> None:
        if self.pool.decode_step(self.table, self.rows, self.seq) is None:
            raise SystemExit("the pool is short")
        self.seq.add_(1)


def model(device: torch.device, shape: tuple[int, int, int]):
    """Run the matrix products of a decode step: a graph's replay on a GPU."""
    layers, hidden, wide = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * wide), (wide, hidden)]
    weights = [[torch.randn(s, device=device, dtype=dtype) * 0.01 for s in sizes] for _ in range(layers)]
    x = torch.randn(BATCH, hidden, device=device, dtype=dtype)

    def forward():
        y = x
        for qkv, out, up, down in weights:
            y = (y @ qkv)[:, :hidden] @ out
            y = (y @ up)[:, :wide] @ down
        return y

    if device.type == "cpu":
        return forward
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    graph.reads = weights, x  # they must live as long
    return graph.replay


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def engine_steps(device: torch.device, sides: dict[str, Side], forward) -> dict[str, float]:
    """Median microseconds of a step, by blocks of steps in turns."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(BLOCKS):
        for name, side in sides.items():
            finish(device)
            begin = time.perf_counter()
            for _ in range(STEPS):
                side.step()
                forward()
            finish(device)
            took[name].append(1e6 * (time.perf_counter() - begin) / STEPS)
    found = {name: round(statistics.median(values[1:]), 2) for name, values in took.items()}
    return found | {"share": round(found["guarded"] / found["plain"] - 1, 5)}


def host_calls(device: torch.device, sides: dict[str, Side]) -> dict[str, float]:
    """Median microseconds of the call alone. Lengths stand still, so that nothing else is queued."""
    found = {}
    for name, side in sides.items():
        took = []
        for n in range(CALLS):
            if n % 100 == 0:
                finish(device)
            begin = time.perf_counter()
            side.pool.decode_step(side.table, side.rows, side.seq)
            took.append(time.perf_counter() - begin)
        found[name] = round(1e6 * statistics.median(took), 2)
    return found


def on_gpu(device: torch.device, sides: dict[str, Side]) -> dict[str, float]:
    """Microseconds of a step on the GPU: captured many times over, with lengths that need no page."""
    found = {}
    for name, side in sides.items():
        out = torch.empty(BATCH, dtype=torch.int64, device=device)
        finish(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(IN_GRAPH):
                side.pool.decode_step(side.table, side.rows, side.seq, out=out)
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / IN_GRAPH)
        found[name] = round(statistics.median(times), 3)
        side.pool.refresh()
    return found


def measure(rank: int, device: torch.device, over: str) -> dict:
    models = MODELS if device.type == "cuda" else ON_CPU
    if over == "gloo" and rank:
        models = dict.fromkeys(MODELS if os.environ["RANK_0"] == "cuda" else ON_CPU, (0, 1, 1))
    lengths = [CONTEXT // 8 + 7 * i % 1000 for i in range(BATCH)]
    lengths = [n + (n % PAGE_SIZE == 0) for n in lengths]  # a step that stands still needs no page
    found: dict = {"engine_step_us": {}}
    for name, shape in models.items():
        sides = {kind: Side(device, lengths) for kind in ("plain", "guarded")}
        with LockstepGuard(sides["guarded"].pool, every=EVERY) as guard:
            found["engine_step_us"][name] = engine_steps(device, sides, model(device, shape))
            guard.check()  # the peer's pool handed out the same
    sides = {kind: Side(device, lengths) for kind in ("plain", "guarded")}
    LockstepGuard(sides["guarded"].pool, every=10**9)
    if rank == 0:
        found["decode_step_host_us"] = host_calls(device, sides)
        if device.type == "cuda":
            found["decode_step_gpu_us"] = on_gpu(device, sides)
    return found


def run(rank: int, over: str, device: str, folder: str) -> dict:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    index = rank if over == "nccl" else 0
    where = torch.device("cuda", index) if device == "cuda" and (rank == 0 or over == "nccl") else torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group(over, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    found = measure(rank, where, over)
    gpu = torch.cuda.get_device_name() if where.type == "cuda" else "none"
    about = {"gpu": gpu, "torch": torch.__version__, "cupaged": cupaged.__version__, "over": over}
    return about | {"batch": BATCH, "page_size": PAGE_SIZE, "every": EVERY} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["RANK_0"] = options.device
    if options.peer:
        run(1, options.over, options.device, options.peer)
        sys.stdin.read()  # until the other rank has ended
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--over", options.over, "--device", options.device, "--peer", folder]
        peer = subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            print(json.dumps(run(0, options.over, options.device, folder), indent=2), flush=True)
        finally:
            peer.kill()
            peer.wait()
    os._exit(0)  # NCCL's threads must not be waited for


if __name__ == "__main__":
    main()
