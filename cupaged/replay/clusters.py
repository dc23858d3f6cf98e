"""Where the replicas of a replay run: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from typing import Any

from cupaged.errors import BackendError
from cupaged.geometry import whole
from cupaged.replay.report import ReplayResult
from cupaged.replay.run import replay
from cupaged.replay.traces import Trace
from cupaged.replay.verify import VerificationError

CLUSTERS = ("local", "ray")
END_S = 5.0  # for a worker to end by itself

Task = tuple[Trace, dict[str, Any]]
Progress = Callable[[int, int], object]
# What a replay raises for its arguments, or for an allocator that fails its proof: the same by a worker.
TOLD: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, ImportError, BackendError, MemoryError, VerificationError)
}


class WorkerError(RuntimeError):
    """A worker has died, or failed in a way that no argument explains."""


class LocalCluster:
    """Processes of this machine, one a replica. Use it in a ``with`` block: none outlives it, nor this process.

    They start as those of `multiprocessing` do by "spawn", so a script needs ``if __name__ == "__main__":`` around
    what makes one.

    Parameters
    ----------
    workers : int
        How many.
    """

    name = "local"

    def __init__(self, workers: int) -> None:
        self.workers = whole("workers", workers, 1)
        context = get_context("spawn")
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        try:
            for i in range(self.workers):
                mine, yours = context.Pipe()
                self._pipes.append(mine)
                process = context.Process(target=_serve, args=(yours, i), daemon=True, name=f"cupaged-replica-{i}")
                with _no_interrupts():
                    process.start()
                self._processes.append(process)
                yours.close()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, tasks: Sequence[Task], progress: Progress | None = None) -> list[ReplayResult]:
        """Replay each trace with its arguments, all at a time.

        Parameters
        ----------
        tasks : sequence of (Trace, dict)
            One a worker: a trace, and the other arguments of `replay`.
        progress : callable, optional
            As for `replay`, for all of them together.

        Returns
        -------
        list of ReplayResult
            In the order of the tasks.

        Raises
        ------
        WorkerError
            If a worker has died, or raised what is no fault of its arguments. All workers are ended then.
        ValueError, VerificationError, ...
            What a replay raised, with the replica's number ahead.
        """
        try:
            return self._run(tasks, progress)
        except BaseException:
            self._end(at_once=True)
            raise

    def _run(self, tasks: Sequence[Task], progress: Progress | None) -> list[ReplayResult]:
        for i, task in enumerate(tasks):
            try:
                self._pipes[i].send(task)
            except OSError:
                raise self._died(i) from None
        ended, of = [0] * len(tasks), [len(trace) for trace, _ in tasks]
        results: dict[int, ReplayResult] = {}
        while len(results) < len(tasks):
            ready = connection.wait(
                [pipe for i, pipe in enumerate(self._pipes) if i < len(tasks) and i not in results]
            )
            for i in [i for i, pipe in enumerate(self._pipes) if pipe in ready]:
                value: Any
                try:
                    what, value = self._pipes[i].recv()
                except (EOFError, OSError):
                    raise self._died(i) from None
                if what == "result":
                    results[i] = value
                elif what == "progress":
                    ended[i], of[i] = value
                    if progress:
                        progress(sum(ended), sum(of))
                else:
                    raise _raised(i, *value)
        return [results[i] for i in range(len(tasks))]

    def _died(self, i: int) -> WorkerError:
        process = self._processes[i]
        process.join(END_S)
        code = process.exitcode
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by signal {-code}"
        else:
            how = f"ended with exit code {code}"
        return WorkerError(f"replica {i}: its worker {how} before it had a result; the other workers were ended")

    def close(self) -> None:
        """End the workers."""
        self._end(at_once=False)

    def _end(self, at_once: bool) -> None:
        if at_once:  # before they find their pipes closed, and complain
            for process in self._processes:
                process.kill()
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for a task ends
        for process in self._processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join(END_S)
        self._pipes.clear()
        self._processes.clear()


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """What starts here goes on ignoring them: a terminal's Ctrl-C is for the owner of workers, who ends them."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():  # cannot be changed here
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: connection.Connection, index: int) -> None:
    """Replay what comes through a pipe, until its other end is closed or its owner is gone."""
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    while True:
        try:
            trace, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if arguments.get("device", "auto") == "auto":
                arguments["device"] = _device(index, arguments.get("backend", "auto"))
            value = replay(trace, **arguments, progress=lambda *ended: pipe.send(("progress", ended)))
            pipe.send(("result", value))
        except Exception as error:
            pipe.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _device(index: int, backend: str) -> str:
    """One GPU after the other, where the backend runs on GPUs."""
    from cupaged import backends

    name = backends.pick(backend, "auto").name
    if name not in ("cupy", "numba-cuda"):
        return "auto"
    if name == "cupy":
        import cupy

        return f"cuda:{index % cupy.cuda.runtime.getDeviceCount()}"
    from cupaged.backends.numba_cuda import _driver

    return f"cuda:{index % _driver.count()}"


def _raised(i: int, kind: str, message: str, where: str) -> Exception:
    told = TOLD.get(kind)
    if told:
        return told(f"replica {i}: {message}")
    return WorkerError(f"replica {i}: {kind}: {message}\n{where}")


class RayCluster:
    """A Ray cluster: one that this process has joined or that ``RAY_ADDRESS`` names, or else one made here.

    Each replica is a task of one CPU, and of one GPU where the backend runs on GPUs; it is not tried twice. cupaged
    must be installed on every node.

    Parameters
    ----------
    workers : int
        Replicas, which run at a time as far as there is room.

    Raises
    ------
    ImportError
        Without Ray.
    """

    name = "ray"

    def __init__(self, workers: int) -> None:
        self.workers = whole("workers", workers, 1)
        try:
            import ray
        except ImportError:
            raise ImportError('a Ray cluster needs ray: pip install "cupaged[ray]"') from None
        self._ray = ray
        self._own = not ray.is_initialized()
        if self._own:
            # A cluster that is made here has room for each replica, however few CPUs this machine has.
            made = {"address": "local", "num_cpus": workers, "include_dashboard": False}
            ray.init(log_to_driver=False, logging_level="ERROR", **({} if os.environ.get("RAY_ADDRESS") else made))

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, tasks: Sequence[Task], progress: Progress | None = None) -> list[ReplayResult]:
        """Replay each trace with its arguments, as `LocalCluster.run` does; progress is told as replicas end."""
        ray = self._ray
        needed = self._needed(tasks)
        remote = ray.remote(max_retries=0, **needed)(_replay_on_ray)
        references = [remote.remote(*task) for task in tasks]
        number = {reference: i for i, reference in enumerate(references)}
        results: dict[int, ReplayResult] = {}
        try:
            while len(results) < len(tasks):
                waiting = [reference for reference in references if number[reference] not in results]
                for reference in ray.wait(waiting, num_returns=1)[0]:
                    i = number[reference]
                    try:
                        what, value = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        first = str(error).strip().partition("\n")[0]
                        raise WorkerError(f"replica {i}: its worker died before it had a result: {first}") from None
                    if what == "raised":
                        raise _raised(i, *value)
                    results[i] = value
                    if progress:
                        progress(sum(len(tasks[k][0]) for k in results), sum(len(trace) for trace, _ in tasks))
        except BaseException:
            for reference in references:
                ray.cancel(reference, force=True)
            raise
        return [results[i] for i in range(len(tasks))]

    def _needed(self, tasks: Sequence[Task]) -> dict[str, int]:
        """What a replica takes of a node; a cluster that has none of it would never run one."""
        from cupaged import backends

        needed = {"num_cpus": 1}
        options = tasks[0][1]
        named = backends.pick(options.get("backend", "auto"), "auto").name
        if named in ("cupy", "numba-cuda") and options.get("device", "auto") != "cpu":
            needed["num_gpus"] = 1
        has = self._ray.cluster_resources()
        for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            if needed.get(name, 0) > has.get(resource, 0):
                raise WorkerError(f"the Ray cluster has no {resource}, but each replica needs one")
        return needed

    def close(self) -> None:
        """Leave the cluster, and end it if it was made here."""
        if self._own and self._ray.is_initialized():
            self._ray.shutdown()


def _replay_on_ray(trace: Trace, arguments: dict[str, Any]) -> tuple[str, Any]:
    try:
        return "result", replay(trace, **arguments)
    except Exception as error:
        return "raised", (type(error).__name__, str(error), traceback.format_exc())
