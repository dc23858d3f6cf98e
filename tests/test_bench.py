"""The benchmark: its contestants answer rightly, its comparison and its bars can fail, its documents are current."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cupaged import cli

ab, bars, command, contestants, first, measure, report, scale = (
    cli._bench(name) for name in ("ab", "bars", "command", "contestants", "first", "measure", "report", "scale")
)
Batch, Setup = contestants.Batch, contestants.Setup
ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(capsys, monkeypatch):
    """The command line in this process, with sizes that a test can wait for."""
    monkeypatch.setattr(ab.Bench, "tiny", True)
    whole = ab.Bench.__init__

    def tiny(self, *arguments, **named):
        whole(self, *arguments, **{**named, "tiny": True})

    monkeypatch.setattr(ab.Bench, "__init__", tiny)

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", "--device", "cpu", *words])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


# ---- contestants ---------------------------------------------------------------------------------------------------

# Pages 1 and 2 are the last ones of A, with 6 tokens of 8, and of B, with 8; C is new. Free pages are 9, 5, 7, 4.
PREFIX, SEQ = np.array([6, 8, 0]), np.array([9, 11, 4])
FREE = np.array([9, 5, 7, 4])
BY_HAND = [14, 15, 72, 40, 41, 42, 56, 57, 58, 59]


def by_hand(**options) -> tuple[Setup, Batch]:
    setup, batch = Setup(2, 4, page_size=8, **options), Batch(PREFIX, SEQ, page_size=8)
    setup.__dict__["order"] = FREE
    return setup, batch


def everybody() -> list[str]:
    return ["numba", "reference", "numpy ops", *(["torch ops"] if find_spec("torch") else [])]


def test_the_rule_by_hand():
    _, batch = by_hand()
    assert batch.last.tolist() == [13, 23, -1]
    assert (batch.tokens, batch.new_pages, batch.owned) == (10, 3, 2)
    assert contestants.slots_by_rule(FREE, batch.prefix, batch.seq, batch.last, 8).tolist() == BY_HAND


@pytest.mark.parametrize("name", everybody())
def test_contestants_by_hand(name, monkeypatch):
    setup, batch = by_hand()
    if name in contestants.OURS:
        # Their pool has pages 1 .. 6: 9 and 7 of the example are 6 and 3 there.
        setup.__dict__["order"] = np.array([6, 5, 3, 4])
        want = [14, 15, 48, 40, 41, 42, 24, 25, 26, 27]
    else:
        want = BY_HAND
    c = contestants.make(name, setup, "cpu")
    host = getattr(c, "on_host", lambda array: array)
    for _ in range(2):
        got = c.extend(c.load(batch.prefix), c.load(batch.seq), c.load(batch.last), 10, host(PREFIX), host(SEQ))
        assert c.fetch(got).tolist() == want
        # one more token for A (in its new page), B, and C; then a page is freed and comes back
        last = np.array([want[2], want[5], want[9]])
        got = c.decode(c.load(SEQ + 1), c.load(last), host(SEQ + 1))
        assert c.fetch(got).tolist() == (last + 1).tolist()
        c.free(c.load(np.array([want[2], want[2] + 1])), 1)
        got = c.decode(c.load(np.array([1])), c.load(np.array([-1])), host(np.array([1])))
        assert c.fetch(got).tolist() == [want[2]]
        c.reset()


def both_ways(rng) -> tuple[Batch, Batch]:
    n = int(rng.integers(1, 60))
    prefix = rng.integers(0, 300, n)
    return Batch(prefix, prefix + rng.integers(0, 400, n)), Batch(prefix, prefix + 1)


@pytest.mark.parametrize("name", everybody())
def test_contestants_follow_the_rule(name):
    rng = np.random.default_rng(1)
    for _ in range(10):
        longer, decode = both_ways(rng)
        for batch, kind in ((longer, "extend"), (decode, "decode")):
            setup = Setup(batch.owned, batch.new_pages + 3)
            c = contestants.make(name, setup, "cpu")
            got = getattr(c, kind)(*ab._inputs(c, batch, kind == "decode"))
            ab._check(name, c.fetch(got), ab._want(setup, batch))


@pytest.mark.parametrize("name", [name for name in everybody() if name != "reference"])
def test_steps_and_frees(name):
    batch = ab.decode_batch(20)
    setup = Setup(batch.owned, 100)
    c = contestants.make(name, setup, "cpu")
    host = getattr(c, "on_host", lambda array: array)
    table = c.load(batch.table())
    got = c.step(table, c.load(np.arange(20)), c.load(batch.prefix), host(batch.prefix))
    want = ab._want(setup, batch)
    assert c.fetch(got).tolist() == want.tolist()
    assert np.asarray(table)[np.arange(20), batch.prefix].tolist() == want.tolist()
    c.reset()
    slots = c.alloc(5 * 64)
    assert c.fetch(slots).tolist() == (setup.order[:5, None] * 64 + np.arange(64)).reshape(-1).tolist()
    c.free(slots, 5)
    assert c.fetch(c.alloc(3 * 64))[::64].tolist() == (np.sort(setup.order[:5])[:3] * 64).tolist()


@pytest.mark.parametrize("name", ["numba", "engine"])
def test_request_by_request(name):
    pytest.importorskip("torch")
    c = contestants.kv(name, 10, 4, 3, "cpu")
    assert c.fetch(c.alloc(1, 70, 0)).tolist() == list(range(64, 134))
    assert c.fetch(c.alloc(1, 60, 70)).tolist() == [*range(134, 192), 192, 193]
    assert c.fetch(c.alloc(2, 1, 0)).tolist() == [256]
    c.free_rows([1], 64, 130)
    assert c.free_order().tolist() == [5, 6, 7, 8, 9, 10, 2, 3]
    c.reset()
    assert c.free_order().tolist() == list(range(1, 11))


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
def test_triton_kernels_in_its_interpreter():
    code = """
import numpy as np
from cupaged import cli
ab, contestants = cli._bench("ab"), cli._bench("contestants")
rng = np.random.default_rng(3)
for n in (1, 2, 7, 30):
    prefix = rng.integers(0, 300, n)
    for batch, kind in ((contestants.Batch(prefix, prefix + rng.integers(0, 1500, n)), "extend"),
                        (contestants.Batch(prefix, prefix + 1), "decode")):
        setup = contestants.Setup(batch.owned, batch.new_pages + 3)
        c = contestants.make("engine", setup, "cpu")
        got = getattr(c, kind)(*ab._inputs(c, batch, kind == "decode"))
        ab._check(kind, c.fetch(got), ab._want(setup, batch))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_wrong_answer_is_no_figure(monkeypatch):
    right = contestants._ArrayOps.decode

    def off_by_one(self, *arguments):
        slots = right(self, *arguments)
        slots[-1] += 1
        return slots

    monkeypatch.setattr(contestants._ArrayOps, "decode", off_by_one)
    bench = ab.Bench("cpu", tiny=True)
    row = next(case for case in ab.cases(bench) if case.key == "cpu/decode/64").run(bench)
    assert re.fullmatch(
        r"WrongAnswerError: numpy ops gave \d+ at 63, not \d+; 1 differ in all", row["errors"]["numpy ops"]
    )
    assert "numpy ops" not in row["figures"]
    assert "numba" in row["figures"]


# ---- timing --------------------------------------------------------------------------------------------------------


def test_spread():
    assert measure.spread([5.0, 1.0, 3.0]) == {"median": 3.0, "low": 1.0, "high": 5.0, "n": 3}
    assert measure.spread([float(i) for i in range(101)]) == {"median": 50.0, "low": 10.0, "high": 90.0, "n": 101}


def test_who_fails_is_named_and_the_others_go_on():
    seen = []

    def broken() -> float:
        raise RuntimeError("no\nsuch kernel")

    def works() -> float:
        seen.append(1)
        return 2.0

    figures, errors = measure.interleave({"a": broken, "b": works}, 5)
    assert errors == {"a": "RuntimeError: no such kernel"}
    assert figures == {"b": {"median": 2.0, "low": 2.0, "high": 2.0, "n": 5}}
    assert len(seen) == 5


def test_host_time_is_of_the_call_alone():
    timer = measure.host_timer(lambda: time.sleep(0.002), 3, lambda: time.sleep(0.05), lambda: None)
    assert 2_000 <= timer() < 20_000


# ---- a whole run ---------------------------------------------------------------------------------------------------


def test_quick_run_on_the_cpu(run, tmp_path):
    kept, drawn = tmp_path / "results.json", tmp_path / "plot.png"
    code, out, _ = run("--quick", "--json", str(kept), "--plot", str(drawn))
    assert code == 0, out
    results = json.loads(kept.read_text())
    keys = [row["key"] for row in results["rows"]]
    assert keys[0] == "cpu/decode/1"
    assert {key.split("/")[1] for key in keys} >= {"decode", "extend", "step", "free+alloc", "kv_alloc", "kv_step"}
    assert all(not row["errors"] for row in results["rows"])
    decode = results["rows"][1]["figures"]
    assert set(decode) >= {"numba", "numpy ops", "reference", "write"}
    assert all(0 < f["low"] <= f["median"] <= f["high"] and f["n"] == 3 for f in decode.values())
    assert results["machine"]["cpu"]
    assert results["machine"]["versions"]["numba"]
    assert re.fullmatch("[0-9a-f]{16}", results["machine"]["sources"])
    assert [bar["passed"] is not None for bar in results["bars"] if bar["bar"] == 6]
    assert "On the CPU: time of whole calls, us" in out
    assert "Bars" in out
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert report.digest(results).encode() in drawn.read_bytes()


def test_only_some_cases(run, tmp_path):
    kept = tmp_path / "results.json"
    assert run("--only", "cpu/extend, cpu/*/64", "--without", "reference", "--json", str(kept))[0] == 0
    results = json.loads(kept.read_text())
    assert [row["key"] for row in results["rows"]] == ["cpu/decode/64", "cpu/extend/1x256", "cpu/extend/16x20"]
    assert "reference" not in results["rows"][0]["figures"]


def test_a_run_that_is_cut_short_leaves_what_it_had(tmp_path):
    bench = ab.Bench("cpu", tiny=True)
    chosen = ab.cases(bench, "cpu/decode")

    def stop(row):
        if row["key"] == "cpu/decode/64":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ab.run(bench, [*chosen, *chosen], stop, tmp_path / "part.json")
    assert len(json.loads((tmp_path / "part.json").read_text())["rows"]) == 1


def test_a_backend_that_fails_fails_the_run(run, monkeypatch):
    def broken(self, *arguments, **named):
        raise RuntimeError("out of order")

    monkeypatch.setattr(contestants._Ours, "decode", broken)
    code, out, _ = run("--only", "cpu/decode/64")
    assert code == 1
    assert "cpu/decode/64: numba failed: RuntimeError: out of order" in out
    assert "numpy ops" in out


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("--only", "nothing"), "--only nothing names no case here; there are cpu"),
        (("--device", "tpu"), "--device must be auto, cuda or cpu, not 'tpu'"),
        (("--json", "no/such/file.json"), "there is no folder no/such"),
        (("--plot", "plot"), "suffix"),
        (("--compare", "no/such.json"), "there is no file no/such.json, and of kept results there are "),
    ],
)
def test_mistakes(run, words, pattern):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert re.search(pattern, err)
    assert len(err.splitlines()) == 1


def test_no_gpu_says_what_is_missing(run, monkeypatch):
    monkeypatch.setattr("cupaged.backends.probe", lambda name: SimpleNamespace(works=False))
    code, _, err = run("--device", "cuda")
    assert code == 2
    assert "--device cuda needs a GPU" in err


def test_starts_as_a_file_too(tmp_path):
    words = [sys.executable, str(ROOT / "bench" / "ab.py"), "--only", "nothing"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert "names no case here" in done.stderr


@pytest.mark.slow
def test_children_count_compilations_and_start():
    found = first.compilations(["numba"])["numba"]
    assert found["compiled"] == 0
    assert found["slowest_ms"] > 0
    assert "error" in first.compilations(["nonsense"])["nonsense"]
    assert first.first_results(["nonsense"], 0)["nonsense"]["error"].startswith("ValueError")


@pytest.mark.slow
def test_scale(run, tmp_path):
    kept = tmp_path / "scale.json"
    code, out, _ = run("--scale", "--json", str(kept))
    assert code == 0, out
    results = json.loads(kept.read_text())
    rows = {row["key"]: row for row in results["rows"]}
    assert rows["scale/slots/past 2^31"]["figures"]["numba"]["median"] == 1024 * 2**22 > 2**31
    assert rows["scale/2000 calls/end"]["figures"]["numba"]["ops"] == 2000
    assert rows["scale/pool/1000, memory"]["figures"]["numba"]["median"] < 40
    asked = {bar["asked"] for bar in results["bars"] if bar["bar"] == 7}
    assert asked == {"at most 1.1 x", "at most 4 MiB"}


# ---- comparison ----------------------------------------------------------------------------------------------------


def row(key: str, size: int = 1, unit: str = "us", errors: dict | None = None, **times: float) -> dict:
    figures = {name.replace("_", " "): {"median": t, "low": t, "high": t, "n": 9} for name, t in times.items()}
    return {"key": key, "size": size, "what": "", "unit": unit, "figures": figures, "errors": errors or {}}


KEPT = {"rows": [row("kernel/decode/1", cupy=2.0, triton=2.0, write=1.0), row("first/cold", unit="s", cupy=1.0)]}


def test_a_result_is_no_worse_than_itself():
    assert ab.compare(KEPT, copy.deepcopy(KEPT), lambda key: pytest.fail("measured again")) == []


def test_a_slower_kernel_is_found():
    new = {"rows": [row("kernel/decode/1", cupy=2.7, triton=2.0, write=1.0)]}
    again = []
    worse = ab.compare(KEPT, new, lambda key: again.append(key) or new["rows"][0])
    assert [(w["ours"], w["other"], w["was"], w["now"]) for w in worse] == [
        ("cupy", "triton", 1.0, 1.35),
        ("cupy", "write", 2.0, 2.7),
    ]
    assert again == ["kernel/decode/1"] * 3


def test_a_slower_machine_is_no_regression():
    new = {"rows": [row("kernel/decode/1", cupy=5.0, triton=4.9, write=2.4)]}
    assert ab.compare(KEPT, new, lambda key: pytest.fail("measured again")) == []


def test_noise_does_not_come_back():
    new = {"rows": [row("kernel/decode/1", cupy=3.0, triton=2.0, write=1.0)]}
    assert ab.compare(KEPT, new, lambda key: row(key, cupy=2.1, triton=2.0, write=1.0)) == []


def test_a_backend_that_no_longer_runs_is_found():
    new = {"rows": [row("kernel/decode/1", errors={"cupy": "RuntimeError"}, triton=2.0, write=1.0)]}
    assert [w["now"] for w in ab.compare(KEPT, new, lambda key: new["rows"][0])] == [None, None]


def test_nothing_in_common():
    with pytest.raises(ValueError, match="nothing to compare"):
        ab.compare(KEPT, {"rows": [row("first/cold", unit="s", cupy=1.0)]}, lambda key: None)


def test_compare_on_the_command_line(run, tmp_path):
    kept = tmp_path / "kept.json"
    assert run("--only", "cpu/extend/1x256", "--json", str(kept))[0] == 0
    generous = json.loads(kept.read_text())
    generous["rows"][0]["figures"]["numba"]["low"] *= 3  # as if it had been slower, so that noise cannot fail it
    kept.write_text(json.dumps(generous))
    code, out, _ = run("--only", "cpu/extend/1x256", "--compare", str(kept))
    assert code == 0
    assert "no ratio is 1.3 x worse" in out
    generous["rows"][0]["figures"]["numba"]["low"] /= 30
    kept.write_text(json.dumps(generous))
    code, out, _ = run("--only", "cpu/extend/1x256", "--compare", str(kept))
    assert code == 1
    assert "worse: cpu/extend/1x256, numba over numpy ops" in out


# ---- bars ----------------------------------------------------------------------------------------------------------


def good() -> list[dict]:
    """A run in which each bar holds, just."""
    return [
        row("kernel/decode/1", 1, cupy=1.9, triton=1.2, write=0.9),
        row("kernel/decode/4096", 4096, cupy=4.0, triton=20.0, write=0.9),
        row("kernel/decode/16384", 16384, cupy=10.0, triton=300.0, write=0.9),
        row("kernel/extend/1x4096", 4096, cupy=3.4, triton=2.2, write=0.9),
        row("kernel/extend/1x1048576", 1 << 20, cupy=8.0, triton=240.0, write=3.0),
        row("kernel/extend/1x1M+255x16", (1 << 20) + 4080, cupy=9.0, triton=180.0, write=3.0),
        row("kernel/extend/4096x4", 16384, cupy=12.0, triton=24.0, write=0.9),
        row("kernel/step/1", 1, cupy=2.0, engine=6.0),
        row("call/decode/1", 1, cupy=14.0, engine=56.0),
        row("call/extend/64x128", 8192, cupy=16.0, engine=80.0),
        row("call/free+alloc/256", 256, cupy=20.0, engine=200.0),
        row("call/step/64", 64, cupy=18.0, engine=144.0),
        row("kv/alloc/100", 100, cupy=20.0, engine=100.0),
        row("kv/step/256", 256, cupy=80.0, engine=40_000.0),
        row("kv/group_free/256x2", 512, cupy=130.0, engine=2600.0),
        row("compile/24 batch shapes", 24, "kernels", cupy=0.0, engine=10.0),
        row("first/cold", 0, "s", cupy=2.0),
        row("first/disk", 0, "s", cupy=0.1),
        row("sync/free", 0, "ms", cupy=0.1, engine=20.0),
        row("sync/alloc", 0, "ms", cupy=10.0, engine=0.1),
        row("cpu/decode/1", 1, numba=10.0, numpy_ops=50.0, torch_ops=60.0),
        row("cpu/extend/1x256", 256, numba=10.0, numpy_ops=50.0, torch_ops=50.0),
        row("scale/pool/1000000, memory", 10**6, "bytes a page", cupy=24.0),
        row("scale/9 calls/start", 9, cupy=10.0),
        row("scale/9 calls/end", 9, cupy=11.0),
        row("scale/9 calls/host", 9, "MiB", cupy=4.0),
        row("scale/9 calls/device", 9, "MiB", cupy=0.0),
    ]


def test_every_bar_can_hold():
    found = bars.bars(good())
    assert [bar["text"] for bar in found if not bar["passed"]] == []
    assert [bar["bar"] for bar in found] == [1] * 3 + [2] * 6 + [3] * 8 + [4] * 3 + [5] + [6] * 4 + [7] * 4


WORSE = [
    ("kernel/decode/1", "cupy", 1.95, 1),
    ("kernel/decode/4096", "cupy", 4.1, 2),
    ("kernel/decode/16384", "cupy", 10.1, 2),
    ("kernel/extend/1x4096", "cupy", 3.5, 1),
    ("kernel/extend/1x1048576", "cupy", 8.1, 2),
    ("kernel/extend/1x1M+255x16", "cupy", 9.1, 2),
    ("kernel/extend/1x1M+255x16", "write", 2.9, 2),
    ("kernel/extend/4096x4", "triton", 23.0, 2),
    ("kernel/step/1", "cupy", 2.1, 3),
    ("call/decode/1", "cupy", 14.1, 3),
    ("call/extend/64x128", "cupy", 16.1, 3),
    ("call/free+alloc/256", "cupy", 20.1, 3),
    ("call/step/64", "cupy", 18.1, 3),
    ("kv/alloc/100", "cupy", 20.1, 3),
    ("kv/step/256", "cupy", 80.1, 3),
    ("kv/group_free/256x2", "cupy", 131.0, 3),
    ("compile/24 batch shapes", "cupy", 1.0, 4),
    ("first/cold", "cupy", 2.1, 4),
    ("first/disk", "cupy", 0.11, 4),
    ("sync/free", "cupy", 10.1, 5),
    ("cpu/decode/1", "numba", 10.1, 6),
    ("cpu/extend/1x256", "torch ops", 49.0, 6),
    ("scale/pool/1000000, memory", "cupy", 24.1, 7),
    ("scale/9 calls/end", "cupy", 11.1, 7),
    ("scale/9 calls/host", "cupy", 4.1, 7),
]


@pytest.mark.parametrize(("key", "name", "time", "number"), WORSE)
def test_every_bar_can_be_missed(key, name, time, number):
    rows = good()
    next(r for r in rows if r["key"] == key)["figures"][name]["median"] = time
    missed = [bar for bar in bars.bars(rows) if not bar["passed"]]
    assert missed
    assert {bar["bar"] for bar in missed} == {number}
    assert key in {bar["where"] for bar in missed}


@pytest.mark.parametrize("key", sorted({key for key, name, _, number in WORSE if name == "cupy" and number < 6}))
def test_a_backend_that_failed_misses_its_bar(key):
    rows = good()
    failed = next(r for r in rows if r["key"] == key)
    del failed["figures"]["cupy"]
    failed["errors"]["cupy"] = "RuntimeError"
    assert key in {bar["where"] for bar in bars.bars(rows) if bar["passed"] is False}


def test_what_was_not_measured_neither_holds_nor_fails():
    assert {(bar["measured"], bar["passed"]) for bar in bars.bars([])} == {(None, None)}


def test_a_slow_per_request_kernel_allows_nothing():
    rows = [row("kernel/decode/1024", 1024, cupy=4.2, triton=4.1)]
    assert [bar["passed"] for bar in bars.bars(rows)[:3]] == [True, None, False]


# ---- documents -----------------------------------------------------------------------------------------------------


def test_documents_and_plots_are_current():
    assert report.stale() == [], "run `cupaged bench --report` and commit what it writes"


def test_stale_documents_are_found(monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "README.md").write_text("# A\n\n<!-- bench:summary -->\nold\n<!-- /bench:summary -->\n\nB\n")
    (tmp_path / "docs" / "performance.md").write_text(
        "<!-- bench:results --><!-- /bench:results -->\n\n## What was tried\n\nBy hand.\n"
    )
    machine = {"gpu": "A GPU", "driver": "1", "cpu": "A CPU", "cores": 2, "versions": {}, "commit": None}
    rows = good()
    results = {"machine": machine, "date": "2026-01-01", "rows": rows, "bars": bars.bars(rows), "settings": {}}
    ab.save(results, tmp_path / "one.json")
    assert [str(file) for file in report.stale()] == ["README.md", "docs/performance.md", "docs/plots/one.png"]
    assert [str(file) for file in report.write()] == ["README.md", "docs/performance.md", "docs/plots/one.png"]
    assert report.stale() == []
    text = (tmp_path / "docs" / "performance.md").read_text()
    assert text.endswith("\n\n## What was tried\n\nBy hand.\n")
    assert "| decode/4096 | 4 | 20 | 0.9 |" in text
    assert "![one](plots/one.png)" in text
    readme = (tmp_path / "README.md").read_text()
    assert "| GPU time, decode of 4,096 | 4 | 20 | per-request Triton kernel | 5.0 x |" in readme
    assert "29 of 29 bars hold" in readme
    assert readme.startswith("# A\n")
    assert readme.endswith("\nB\n")
    results["rows"][1]["figures"]["cupy"]["median"] = 2.0
    ab.save(results, tmp_path / "one.json")
    assert len(report.stale()) == 3


def test_an_unknown_block_is_a_mistake():
    with pytest.raises(ValueError, match="no generated block 'nonsense'"):
        report._filled("<!-- bench:nonsense --><!-- /bench:nonsense -->", report.blocks())


def test_what_the_text_says_is_there():
    text = (ROOT / "docs" / "performance.md").read_text()
    assert "## What was tried" in text.partition("<!-- /bench:results -->")[2]
    for file, _, heading in (link.partition("#") for link in re.findall(r"\]\((\S+?)\)", text)):
        linked = ROOT / "docs" / (file or "performance.md")
        assert linked.exists()
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings}


# ---- the cases of a GPU, on a stand-in -----------------------------------------------------------------------------


class StandIn:
    """Runs at once, on the CPU, what a GPU would queue: the cases' own code is what is tested."""

    def __init__(self) -> None:
        import torch

        self.torch = torch

    def current(self):
        return nullcontext()

    def wait(self) -> None:
        pass

    def sleep(self, us: float) -> None:
        assert us > 0

    def graph_timer(self, launch, launches, before):
        return self.queue_timer(lambda: [launch(i) for i in range(launches)], 1, before)

    def queue_timer(self, call, calls, before):
        return measure.host_timer(call, calls, before, self.wait)


@pytest.fixture
def stand_in(monkeypatch):
    """A bench whose `cupy` is numba, and whose engine has its kernels in torch."""
    pytest.importorskip("torch")
    make, kv = contestants.make, contestants.kv

    class Engine(contestants._Engine):
        def __init__(self, setup, device) -> None:
            contestants._TorchOps.__init__(self, setup, device)

        def launch_decode(self, seq, last, free, out) -> None:
            self.launch_extend(seq - 1, seq, last, free, out)

        def launch_extend(self, prefix, seq, last, free, out) -> None:
            arrays = (x.numpy() for x in (free, prefix, seq, last))
            out.copy_(self.torch.from_numpy(contestants.slots_by_rule(*arrays, self.page_size)))

    def made(name, setup, device):
        if name == "engine":
            return Engine(setup, "cpu")
        return make(name.replace("cupy ops", "numpy ops").replace("cupy", "numba"), setup, "cpu")

    for module in (ab, contestants):
        monkeypatch.setattr(module, "make", made)
        monkeypatch.setattr(module, "kv", lambda name, *sizes: kv(name.replace("cupy", "numba"), *sizes[:-1], "cpu"))
    monkeypatch.setattr(measure, "Gpu", StandIn)
    monkeypatch.setattr(contestants, "names", lambda device, works: ["cupy", "engine", "torch ops", "cupy ops"])
    limit = lambda bench, name, tokens, launches: ab._written(tokens, launches)  # noqa: E731
    monkeypatch.setattr(ab, "_captured_extra", limit)
    return ab.Bench("cuda", tiny=True)


def small(case) -> bool:
    return case.size <= 20_000 and not case.key.startswith(("cpu/", "compile/", "first/"))


def test_cases_of_a_gpu_run_and_check_their_answers(stand_in):
    rows = [case.run(stand_in) for case in ab.cases(stand_in) if small(case)]
    assert [(row["key"], row["errors"]) for row in rows if row["errors"]] == []
    by_key = {row["key"]: row for row in rows}
    assert set(by_key["kernel/decode/256"]["figures"]) == {
        *("cupy", "triton", "torch ops", "cupy ops", "write", "empty")
    }
    assert set(by_key["kv/step/256"]["figures"]) == {"cupy", "cupy, one by one", "engine"}
    assert set(by_key["sync/free_group"]["figures"]) == {"cupy"}
    measured = {bar["bar"] for bar in bars.bars(rows) if bar["passed"] is not None}
    assert measured == {1, 2, 3, 5}


def test_keys_of_a_quick_run_are_among_those_of_a_full_one(stand_in, monkeypatch):
    quick = ab.Bench("cuda", quick=True)
    assert {case.key for case in ab.cases(quick)} <= {case.key for case in ab.cases(ab.Bench("cuda"))}
    cpu, quick_cpu = ab.Bench("cpu"), ab.Bench("cpu", quick=True)
    assert {case.key for case in ab.cases(quick_cpu)} <= {case.key for case in ab.cases(cpu)}
