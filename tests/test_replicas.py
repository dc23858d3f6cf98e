"""Data-parallel replicas of a replay: who gets what, by hand; the same figures on any cluster; workers that die."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cupaged import cli
from cupaged.replay import LocalCluster, RayCluster, Trace, WorkerError, clusters, replay, replay_replicas, route
from cupaged.replay import synthetic as make_synthetic
from cupaged.replay import table as make_table
from cupaged.replay.replicas import part, total
from cupaged.replay.verify import VerificationError

ROOT = Path(__file__).parents[1]
SETTINGS = {"backend": "numba", "device": "cpu"}


def make_trace(*requests: tuple[float, int, int], ids: bool = False) -> Trace:
    arrival, prompt, output = (np.array(x) for x in zip(*requests, strict=True))
    hash_ids = [np.arange(-(-p // 512)) for p in prompt.tolist()] if ids else None
    lines = np.arange(1, len(requests) + 1)
    return Trace("small", arrival.astype(float), prompt, output, lines, hash_ids, ("noted",))


class InProcess:
    """A cluster whose replicas run here, one after the other."""

    name = "here"

    def __init__(self, workers):
        self.workers = workers

    def run(self, tasks, progress):
        return [replay(trace, **options) for trace, options in tasks]


# ---- routing ----------------------------------------------------------------------------------------------------


def test_round_robin():
    trace = make_trace(*[(0, 1, 1)] * 7)
    assert route(trace, 3, "round-robin").tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_by_hand():
    """Steps of a second, chunks of 10 tokens."""
    trace = make_trace(
        (0, 10, 2),  # 12 tokens until 3        loads  0  0 -> replica 0
        (0, 5, 1),  # 6 tokens until 2                12  0 -> 1
        (1, 20, 0),  # 20 tokens until 3              12  6 -> 1
        (1, 1, 1),  # 2 tokens until 3                12 26 -> 0
        (2, 100, 0),  # the second has ended          14 20 -> 0, until 12
        (3, 7, 0),  # all but the fifth have         100  0 -> 1, until 4
        (3.9, 1, 0),  #                              100  7 -> 1
        (12, 1, 0),  # all have: the first of them     0  0 -> 0
    )
    assert route(trace, 2, "least-loaded", step_ms=1000, chunk=10).tolist() == [0, 1, 1, 0, 0, 1, 1, 0]


def test_least_loaded_without_arrivals():
    trace = make_trace((0, 9, 1), (0, 4, 0), (0, 5, 0), (0, 2, 0), (0, 1, 0))
    assert route(trace, 3, "least-loaded").tolist() == [0, 1, 2, 1, 2]


def test_routes_are_refused():
    trace = make_trace((0, 1, 1))
    with pytest.raises(ValueError, match="router must be one of round-robin, least-loaded, got 'random'"):
        route(trace, 2, "random")
    with pytest.raises(ValueError, match="replicas must be at least 1"):
        route(trace, 0, "round-robin")


def test_part_keeps_when_and_where_from():
    trace = make_trace((0, 600, 2), (1, 5, 3), (4, 700, 1), ids=True)
    some = part(trace, np.array([True, False, True]))
    assert some.arrival.tolist() == [0, 4]
    assert some.prompt.tolist() == [600, 700]
    assert some.output.tolist() == [2, 1]
    assert some.lines.tolist() == [1, 3]
    assert [ids.tolist() for ids in some.hash_ids] == [[0, 1], [0, 1]]
    assert some.notes == ("noted",)
    assert part(replace(trace, hash_ids=None), np.zeros(3, bool)).hash_ids is None


# ---- what all of them did ---------------------------------------------------------------------------------------


def test_total_by_hand():
    trace = make_trace((0, 4, 2), (0, 8, 1), (0, 4, 0))
    found = replay_replicas(trace, 4, 40, InProcess(2), verify=True, **SETTINGS)
    one, other = found.replicas
    # 0: requests 0 and 2: prefill of both, then two decodes of the first. 1: one prefill and one decode.
    assert (one.requests, other.requests, found.total.requests) == (2, 1, 3)
    assert (one.steps, other.steps, found.total.steps) == (3, 2, 5)
    assert (one.tokens, other.tokens, found.total.tokens) == (10, 9, 19)
    assert (one.allocations, other.allocations, found.total.allocations) == (3, 2, 5)
    # pages held before those that end free theirs: 2, 2, 2 of 10; and 2, 3
    assert found.total.occupancy_mean == pytest.approx((2 + 2 + 2 + 2 + 3) / 5 / 10)
    assert found.total.occupancy_peak == pytest.approx(0.3)
    # slots without a token: 0, 3, 2; and 0, 3
    assert found.total.waste_mean == pytest.approx((0 + 3 + 2 + 0 + 3) / 5)
    assert found.total.waste_peak == 3
    assert found.total.waste_share == pytest.approx(8 / (11 * 4))
    for name in ("digest", "owned_digest"):
        joined = bytes.fromhex(getattr(one, name) + getattr(other, name))
        assert getattr(found.total, name) == hashlib.blake2b(joined, digest_size=16).hexdigest()
    assert found.total.verified
    assert found.total.notes == ["noted"]
    assert found.total.pool_tokens == 40
    # steps of 25 ms: both hold a share at 0 and 25 ms, only the first at 50 ms
    assert found.total.timeline == [
        (0.0, pytest.approx((0.2 + 0.2) / 2)),
        (0.025, pytest.approx((0.2 + 0.3) / 2)),
        (0.05, pytest.approx((0.2 + 0) / 2)),
    ]


def test_total_of_shared_prefixes():
    trace = make_trace(*[(t, 1025, 1) for t in range(4)], ids=True)
    found = replay_replicas(trace, 512, 8192, InProcess(2), share_prefixes=True, **SETTINGS)
    # Each replica computes the two blocks of the prefix once and finds them once.
    assert [r.pages_saved for r in (*found.replicas, found.total)] == [2, 2, 4]
    assert found.total.looked_up == 4 * 1025
    assert found.total.found_share == pytest.approx(4 * 512 / (4 * 1025))


def test_more_replicas_than_requests():
    found = replay_replicas(make_trace((0, 4, 2)), 4, 40, InProcess(3), verify=True, **SETTINGS)
    assert [r.requests for r in found.replicas] == [1, 0, 0]
    alone = replay(make_trace((0, 4, 2)), 4, 40, **SETTINGS)
    assert found.total.occupancy_mean == alone.occupancy_mean
    assert found.total.steps == alone.steps
    nobody = total(found.replicas[1:])
    assert (nobody.steps, nobody.occupancy_mean, nobody.waste_share, nobody.timeline) == (0, 0, 0, [])


def test_table_fits_80_columns():
    found = replay_replicas(make_synthetic(60), 16, 600_000, InProcess(2), **SETTINGS)
    rows = [found.total, *found.replicas]
    rows += [replace(r, pool_tokens=30_000, step_p99_us=9999.6, step_max_us=123_456.7) for r in rows]
    console = Console(width=80, record=True)
    console.print(make_table(rows, ["all", "0", "1"] * 2))
    text = console.export_text()
    assert "…" not in text
    assert " 10k 123k " in text
    assert "60 requests" in text
    assert text.count("all") >= 2


# ---- processes of this machine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local():
    with LocalCluster(2) as cluster:
        yield cluster


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_same_by_processes(local, router):
    trace, told = make_synthetic(150, per_second=40), []
    settings = SETTINGS | {"router": router, "verify": True, "max_running": 64}
    expected = replay_replicas(trace, 16, 12_000, InProcess(2), **settings)
    found = replay_replicas(trace, 16, 12_000, local, progress=lambda *ended: told.append(ended), **settings)
    assert (found.cluster, found.router) == ("local", router)
    for one, other in zip((found.total, *found.replicas), (expected.total, *expected.replicas), strict=True):
        for name in ("digest", "owned_digest", "requests", "slots", "steps", "retractions", "timeline", "verified"):
            assert getattr(one, name) == getattr(other, name), name
    assert found.total.retractions > 0
    assert told[-1] == (150, 150)
    assert told == sorted(told)


def test_a_mistake_is_told_as_such():
    trace = make_trace((0, 1, 1), (0, 1, 1))
    with LocalCluster(2) as cluster:
        with pytest.raises(ValueError, match=r"replica [01]: size makes .* page ids are int32"):
            replay_replicas(trace, 1, 2**40, cluster, **SETTINGS)
        assert cluster._processes == []  # all were ended


def test_what_workers_raise():
    assert isinstance(clusters._raised(1, "VerificationError", "step 3", ""), VerificationError)
    assert str(clusters._raised(1, "VerificationError", "step 3", "")) == "replica 1: step 3"
    error = clusters._raised(0, "ZeroDivisionError", "by zero", "Traceback")
    assert isinstance(error, WorkerError)
    assert str(error) == "replica 0: ZeroDivisionError: by zero\nTraceback"


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_a_worker_that_dies_in_mid_replay():
    with LocalCluster(3) as cluster:
        pids = [process.pid for process in cluster._processes]

        def kill(ended, of):
            os.kill(pids[1], signal.SIGKILL)

        begin = time.monotonic()
        with pytest.raises(WorkerError, match="replica 1: its worker was killed by signal 9 before it had a result"):
            replay_replicas(make_synthetic(3000), 16, 400_000, cluster, progress=kill, **SETTINGS)
        assert time.monotonic() - begin < 30
        assert not any(map(alive, pids))


def test_a_worker_that_is_dead_already():
    with LocalCluster(1) as cluster:
        cluster._processes[0].kill()
        cluster._processes[0].join()
        trace = make_synthetic(20_000)  # more than a pipe holds
        with pytest.raises(WorkerError, match="replica 0: its worker was killed by signal 9"):
            replay_replicas(trace, 16, 400_000, cluster, **SETTINGS)


ORPHANS = """
import time
from cupaged.replay import LocalCluster
if __name__ == "__main__":
    cluster = LocalCluster(2)
    print(*[process.pid for process in cluster._processes], flush=True)
    time.sleep(60)
"""


def test_workers_end_with_whoever_started_them(tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(ORPHANS)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
    finally:
        owner.kill()
        owner.wait()
    assert all_gone(pids)


def test_closed_workers_are_gone():
    with LocalCluster(1) as cluster:
        pid = cluster._processes[0].pid
    assert not alive(pid)
    cluster.close()


# ---- a Ray cluster ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_ray():
    pytest.importorskip("ray")
    with RayCluster(2) as cluster:
        yield cluster


def test_same_on_ray(on_ray):
    trace, told = make_synthetic(150, per_second=40), []
    settings = SETTINGS | {"router": "least-loaded", "verify": True}
    expected = replay_replicas(trace, 16, 12_000, InProcess(2), **settings)
    found = replay_replicas(trace, 16, 12_000, on_ray, progress=lambda *ended: told.append(ended), **settings)
    assert found.cluster == "ray"
    assert found.total.digest == expected.total.digest
    assert [r.owned_digest for r in found.replicas] == [r.owned_digest for r in expected.replicas]
    assert told[-1] == (150, 150)


def test_mistakes_and_deaths_on_ray(on_ray, monkeypatch):
    trace = make_trace((0, 1, 1), (0, 1, 1))
    with pytest.raises(ValueError, match=r"replica [01]: size makes .* page ids are int32"):
        replay_replicas(trace, 1, 2**40, on_ray, **SETTINGS)
    monkeypatch.setattr(clusters, "_replay_on_ray", lambda trace, arguments: os._exit(3))
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"replica [01]: its worker died before it had a result"):
        replay_replicas(trace, 1, 100, on_ray, **SETTINGS)
    assert time.monotonic() - begin < 60


def test_a_ray_cluster_without_room(on_ray, monkeypatch):
    monkeypatch.setattr(on_ray._ray, "cluster_resources", lambda: {"memory": 1.0})
    with pytest.raises(WorkerError, match="the Ray cluster has no CPU, but each replica needs one"):
        replay_replicas(make_trace((0, 1, 1)), 1, 100, on_ray, **SETTINGS)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'needs ray: pip install "cupaged\[ray\]"'):
        RayCluster(2)


# ---- the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("CUPAGED_BACKEND", "numba")

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(("replay", *words))
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text("prompt,output\n100,20\n5,40\n900,7\n90000,1\n")
    return str(path)


def test_command_line(run, log):
    words = (log, "--workers", "2", "--page-size", "4,16", "--pool-tokens", "4000", "--verify", "--json")
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    found = json.loads(out)["results"]
    assert [r["page_size"] for r in found] == [4, 16]
    for r in found:
        assert (r["workers"], r["router"], r["cluster"]) == (2, "round-robin", "local")
        assert [one["requests"] for one in r["replicas"]] == [2, 2]
        # line 5 is longer than the pool, and went to the second
        assert [one["skipped"] for one in r["replicas"]] == [0, 1]
        assert (r["served"], r["skipped"], r["slots"]) == (3, 1, 120 + 45 + 907)
        assert r["verified"]
        assert r["notes"][-1] == "1 skipped, longer than the pool of 4,000 tokens: line 5 (90,001 tokens)"
        assert len(r["notes"]) == 2  # and, once, that the log has no arrival times
    alone = [replay(part(_read(log), np.arange(4) % 2 == i), 4, 4000, **SETTINGS).digest for i in range(2)]
    assert [one["digest"] for one in found[0]["replicas"]] == alone


def _read(path: str) -> Trace:
    from cupaged.replay import read_trace

    return read_trace(path)


def test_command_line_as_text(run, log, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    words = ("--workers", "2", "--router", "least-loaded", "--page-size", "16", "--verify", "--plot", str(plot))
    code, out, _ = run(log, *words)
    assert code == 0
    assert re.findall(r"^ *(all|\d) +16 ", out, re.M) == ["all", "0", "1"]
    assert "verified" in out
    assert plot.exists()


def test_command_line_when_a_replica_fails(run, log, monkeypatch):
    def fail(self, tasks, progress):
        raise WorkerError("replica 1: its worker was killed by signal 9")

    monkeypatch.setattr(LocalCluster, "run", fail)
    code, out, err = run(log, "--workers", "2", "--page-size", "16")
    assert (code, out) == (1, "")
    assert err == "cupaged: page size 16, pool 400000: replica 1: its worker was killed by signal 9\n"


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("--workers", "0"), "--workers must be between 1 and 1024, not 0"),
        (("--workers", "2000"), "--workers must be between 1 and 1024"),
        (("--router", "random"), "--router must be one of round-robin, least-loaded, not 'random'"),
        (("--cluster", "slurm"), "--cluster must be one of local, ray, not 'slurm'"),
        (("--workers", "2", "--share-prefixes"), "share_prefixes needs hash_ids"),
    ],
)
def test_command_line_mistakes(run, words, pattern):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert pattern in err


def test_command_line_without_ray(run, log, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, out, err = run(log, "--workers", "2", "--cluster", "ray")
    assert (code, out) == (2, "")
    assert err == 'cupaged: a Ray cluster needs ray: pip install "cupaged[ray]"\n'


def test_results_are_json():
    found = replay_replicas(make_trace((0, 4, 2)), 4, 40, InProcess(2), **SETTINGS)
    assert json.loads(json.dumps(asdict(found)))["total"]["digest"] == found.total.digest


@pytest.mark.slow
def test_interrupt_ends_all_at_once():
    """As a terminal's: to the command and its workers alike."""
    words = [sys.executable, "-m", "cupaged", "replay", "--workers", "2", "--page-size", "1,2,3,4,16,64"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUPAGED_BACKEND": "numba"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = subprocess.Popen(words, env=environment, start_new_session=True, **pipes)
    try:
        children: list[int] = []
        end = time.monotonic() + 30
        while len(children) < 3 and time.monotonic() < end:  # multiprocessing's own helper is one
            tasks = f"/proc/{command.pid}/task/{command.pid}/children"
            children = [int(word) for word in Path(tasks).read_text().split()]
            time.sleep(0.05)
        time.sleep(2)
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=30)
        assert (command.returncode, out, err) == (130, "", "cupaged: interrupted\n")
        assert len(children) >= 2
        assert all_gone(children)
    finally:
        command.kill()
        command.wait()
