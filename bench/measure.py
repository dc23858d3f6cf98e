"""How things are timed: interleaved samples on the host, graphs and queues on a GPU, and what the machine is."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["Gpu", "host_timer", "interleave", "machine", "spread"]

Timer = Callable[[], float]


def spread(samples: list[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile of samples."""
    ordered = sorted(float(f"{sample:.5g}") for sample in samples)  # the rest is noise
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "low": ordered[round(0.1 * last)],
        "high": ordered[round(0.9 * last)],
        "n": len(ordered),
    }


def interleave(
    timers: dict[str, Timer], rounds: int, limit_s: float = 20.0
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Sample all timers in turn, so that whatever drifts hits each of them.

    Parameters
    ----------
    timers : dict of str to callable
        Each call gives one sample.
    rounds : int
        Samples of each.
    limit_s : float
        No new round is begun after that many seconds, but there are three.

    Returns
    -------
    figures : dict of str to dict
        `spread` of each timer's samples.
    errors : dict of str to str
        What stopped a timer; the others go on without it.
    """
    samples: dict[str, list[float]] = {name: [] for name in timers}
    errors: dict[str, str] = {}
    begin = time.monotonic()
    order = list(timers)
    with _no_collection():
        for turn in range(rounds):
            if turn >= 3 and time.monotonic() - begin > limit_s:
                break
            order = order[1:] + order[:1]  # nobody is always behind the same one
            for name in order:
                if name in errors:
                    continue
                try:
                    samples[name].append(timers[name]())
                except Exception as error:
                    errors[name] = in_words(error)
    return {name: spread(s) for name, s in samples.items() if name not in errors and s}, errors


def in_words(error: BaseException) -> str:
    """Describe an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@contextmanager
def _no_collection():
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def host_timer(
    call: Callable[[], Any], calls: int, before: Callable[[], Any], wait: Callable[[], Any], finish: bool = False
) -> Timer:
    """Samples of a call's time on the host, in us.

    Parameters
    ----------
    call, calls
        What is timed, and how often in a row.
    before : callable
        Brings back the state; not timed.
    wait : callable
        Waits for the device, before the clock starts and after it was read.
    finish : bool
        Read the clock only after the device has finished.
    """

    def sample() -> float:
        before()
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if finish:
            wait()
        end = time.perf_counter()
        wait()
        return (end - begin) * 1e6 / calls

    return sample


class Gpu:
    """One GPU's stream, graphs and clocks, through torch: the contestants need it anyway.

    All work runs on one stream that is not the default one, since that one cannot be captured.
    """

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.stream = torch.cuda.Stream()
        self._cycles_a_us = 0.0

    def wait(self) -> None:
        """Wait for the device."""
        self.torch.cuda.synchronize()

    @contextmanager
    def current(self):
        """Queue what torch and CuPy do on this stream."""
        with self.torch.cuda.stream(self.stream):
            try:
                import cupy
            except ImportError:
                yield
                return
            with cupy_stream(cupy, self.stream.cuda_stream):
                yield

    def sleep(self, us: float) -> None:
        """Queue a kernel that runs about so long."""
        if not self._cycles_a_us:
            self._cycles_a_us = self._measure_cycles()
        self.torch.cuda._sleep(int(us * self._cycles_a_us))

    def _measure_cycles(self) -> float:
        """Clock cycles a microsecond, once the clock is up."""
        cycles = 20_000_000
        for _ in range(2):
            begin, end = self._events()
            begin.record()
            self.torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        return cycles / (begin.elapsed_time(end) * 1e3)

    def _events(self) -> tuple[Any, Any]:
        event = self.torch.cuda.Event
        return event(enable_timing=True), event(enable_timing=True)

    def graph_timer(self, launch: Callable[[int], Any], launches: int, before: Callable[[], Any]) -> Timer:
        """Samples of one launch's time on the device, in us: a graph of many, replayed.

        Parameters
        ----------
        launch : callable
            Queues the launch of that number, without allocating or waiting.
        launches : int
            In the graph.
        before : callable
            Brings back the state; queued ahead of the clock's start.
        """
        graph = self.torch.cuda.CUDAGraph()
        self.wait()
        with _no_collection():
            graph.capture_begin()
            try:
                for number in range(launches):
                    launch(number)
            finally:
                graph.capture_end()
        self.wait()
        begin, end = self._events()
        alive = graph, launch  # the graph knows addresses only; what `launch` refers to must live as long

        def sample() -> float:
            before()
            self.sleep(80)  # while it runs, the host queues all that is timed
            begin.record()
            alive[0].replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e3 / launches

        return sample

    def queue_timer(self, call: Callable[[], Any], calls: int, before: Callable[[], Any]) -> Timer:
        """Samples of a call's time on the device, in us: several, queued behind a kernel that runs long enough.

        For what allocates, and so is not captured. A call that waits for the device shows its host time as well.
        """
        before()
        call()
        self.wait()
        before()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        queueing = (time.perf_counter() - start) * 1e6
        self.wait()
        begin, end = self._events()

        def sample() -> float:
            before()
            self.sleep(100 + 1.5 * queueing)
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e3 / calls

        return sample


def cupy_stream(cupy: Any, pointer: int) -> Any:
    """Another library's stream as CuPy's."""

    class Handle:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, pointer

    from_external = getattr(cupy.cuda.Stream, "from_external", None)  # CuPy 14
    return from_external(Handle()) if from_external else cupy.cuda.ExternalStream(pointer)


# ---- the machine ---------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """What results depend on: GPU, driver, CPU, versions, and the commit that ran.

    ``CUPAGED_COMMIT`` says the commit where the sources are no git checkout.
    """
    import cupaged

    packages = ("numpy", "numba", "torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "sglang")
    versions = {"cupaged": cupaged.__version__, "python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "device": device,
        "gpu": None,
        "driver": None,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": versions,
        "commit": os.environ.get("CUPAGED_COMMIT") or _commit(),
        "sources": _sources(),
    }
    if device == "cuda":
        import torch

        from cupaged import cli

        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = cli._driver()
        found["versions"]["cuda"] = torch.version.cuda
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    if not (root / "kernels_cu").is_dir():
        return None
    try:
        asked = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _sources() -> str:
    """Digest of the kernels and of the package, so that results without a commit can still be told apart."""
    import cupaged

    total = hashlib.sha256()
    folder = Path(cupaged.__file__).resolve().parent
    beside = folder.parent / "kernels_cu"  # in a checkout
    kernels = beside if beside.is_dir() else folder / "kernels_cu"
    for file in [*sorted(kernels.glob("*.cu*")), *sorted([*folder.glob("*.py"), *folder.glob("backends/*.py")])]:
        total.update(file.name.encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]
