"""The command line: what it prints, and that no mistake of a user's ends in a traceback."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time

import pytest

from cupaged import __version__, backends, cli, selfcheck
from cupaged.backends.numba_cpu import NumbaBackend


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUPAGED_BACKEND", "numba")


@pytest.fixture
def run(capsys):
    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "small.csv"
    path.write_text("prompt,output\n100,20\n5,40\n900,7\n")
    return str(path)


def mistake(result: tuple[int, str, str], pattern: str, code: int = 2) -> None:
    """Nothing on stdout, one line on stderr, and the exit code."""
    assert result[:2] == (code, "")
    assert len(result[2].splitlines()) == 1, result[2]
    assert re.match(f"cupaged: .*{pattern}", result[2]), result[2]


# ---- as a whole ----------------------------------------------------------------------------------------------------


def test_version(run):
    assert run("--version") == (0, f"cupaged {__version__}\n", "")


def test_help_lists_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("info", "demo", "check", "replay", "bench"))


def test_no_command_prints_help(run):
    code, out, err = run()
    assert code == 2
    assert "replay" in out + err


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("frobnicate",), "No such command 'frobnicate'"),
        (("demo", "--nonsense"), "No such option: --nonsense"),
        (("demo", "--backend"), "requires an argument"),
        (("check", "--seconds", "soon"), "Invalid value for '--seconds'"),
        (("demo", "--backend", "gpu"), "backend must be one of auto, cupy, numba-cuda, numba, reference, not 'gpu'"),
        (("check", "--backend", "numba,gpu"), "backend must be one of .*not 'gpu'"),
        (("check", "--backend", ","), "--backend names no backend"),
        (("check", "--seconds", "0"), "--seconds must be a positive number"),
        (("check", "--seconds", "nan"), "--seconds must be a positive number"),
        (("check", "--seed", "-1"), "--seed must not be negative"),
        (("replay", "--page-size", "0"), "--page-size must be whole numbers from 1 on"),
        (("replay", "--page-size", "16,x"), "--page-size .*'16,x'"),
        (("replay", "--page-size", ""), "--page-size"),
        (("replay", "--pool-tokens", "-5"), "--pool-tokens must be whole numbers"),
        (("replay", "--pool-tokens", "8", "--page-size", "16"), "pool_tokens must make at least one page of 16"),
        (("replay", "--pool-tokens", "9" * 20, "--page-size", "1"), "page ids are int32"),
        (("replay", "--step-ms", "0"), "step_ms must be positive"),
        (("replay", "--chunk", "0"), "chunk must be a whole number"),
        (("replay", "--max-running", "0"), "max_running must be a whole number"),
        (("replay", "--backend", "gpu"), "backend must be one of"),
        (("replay", "--engine", "steam"), "engine must be one of slots, kv"),
        (("replay", "--share-prefixes"), "share_prefixes needs hash_ids, which synthetic does not have"),
        (("replay", "no/such.csv"), "there is no file no/such.csv; name a log, or none for the built-in workload"),
        (("replay", "/"), "/: .*directory"),
        (("replay", "--plot", "no/such/plot.png"), "there is no folder no/such"),
        (("replay", "--plot", "plot"), "suffix"),
        (("replay", "--plot", "/"), "suffix"),
    ],
)
def test_mistakes(run, words, pattern):
    mistake(run(*words), pattern)


def test_a_backend_that_cannot_run_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(backends, "probe", lambda name: backends.Probe(False, "no CuPy", "pip install it"))
    for command in (("demo",), ("check",), ("replay",)):
        mistake(run(*command, "--backend", "cupy"), "'cupy' cannot run here: no CuPy; pip install it")


def test_unknown_backend_in_the_environment(run, monkeypatch):
    monkeypatch.setenv("CUPAGED_BACKEND", "gpu")
    mistake(run("demo"), "not 'gpu'")
    code, out, _ = run("info", "--json")
    assert code == 0
    assert json.loads(out)["auto"] is None


def test_a_bug_is_not_hidden(monkeypatch):
    def broken(backend):
        raise KeyError("bug")

    monkeypatch.setattr("cupaged.demo.run", broken)
    with pytest.raises(KeyError):
        cli.main(["demo"])


def test_out_of_memory_is_one_line(run, monkeypatch):
    def greedy(backend):
        raise MemoryError

    monkeypatch.setattr("cupaged.demo.run", greedy)
    mistake(run("demo"), "not enough memory")


def shell(line: str) -> tuple[int, str, str]:
    """The command line in a shell, with its redirections; the exit code is that of `cupaged`."""
    program = f'cupaged() {{ {shlex.quote(sys.executable)} -m cupaged "$@"; echo $? >&3; }}; {line}'
    read, write = os.pipe()
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&{write}; {program}"], capture_output=True, text=True, pass_fds=(write,), timeout=100
    )
    os.close(write)
    with open(read) as code:
        return int(code.read()), done.stdout, done.stderr


@pytest.mark.parametrize("words", ["demo --json", "--help", "--version"])
def test_reader_that_goes_away(words):
    """Silence, and what a shell says of a program that SIGPIPE has ended."""
    assert shell(f"cupaged {words} | true") == (141, "", "")


@pytest.mark.parametrize("words", ["demo", "demo --json", "--help", "--version"])
def test_output_that_cannot_be_written_is_one_line(words):
    expected = "cupaged: cannot write to standard output: No space left on device\n"
    assert shell(f"cupaged {words} > /dev/full") == (2, "", expected)


def test_closed_output_is_found_before_the_work():
    code, out, err = shell("cupaged check --seconds 60 >&-")
    assert (code, out) == (2, "")
    assert err == "cupaged: standard output is closed; send what nobody shall read to /dev/null\n"


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "2>/dev/full >/dev/full"])
def test_mistakes_keep_their_code_where_nobody_can_read_them(where):
    assert shell(f"cupaged demo --nonsense {where}") == (2, "", "")


def test_a_name_that_the_terminal_cannot_show(trace, monkeypatch):
    name = trace.replace("small", "sm\u00e4ll")
    os.rename(trace, name)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code, out, err = shell(f"cupaged replay {shlex.quote(name)} --page-size 16")
    assert (code, err) == (0, "")
    assert "sm\\xe4ll.csv" in out


def test_what_a_command_raises_is_no_interrupt(monkeypatch):
    """The parser takes an EOFError for an end of input."""

    def broken(backend):
        raise EOFError("Ran out of input")

    monkeypatch.setattr("cupaged.demo.run", broken)
    with pytest.raises(EOFError, match="Ran out of input"):
        cli.main(["demo"])


def test_interrupt_is_one_line():
    process = subprocess.Popen(
        [sys.executable, "-m", "cupaged", "check", "--backend", "numba", "--seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Started in the background, this process may ignore what it is to be sent.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "cupaged: interrupted\n")


# ---- info ----------------------------------------------------------------------------------------------------------


def test_info_names_every_backend(run):
    code, out, err = run("info", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["versions"]["cupaged"] == __version__
    assert set(found["backends"]) == set(backends.NAMES)
    assert found["backends"]["numba"]["works"]
    assert found["auto"] == "numba"
    for result in found["backends"].values():
        assert result["works"] or (result["reason"] and result["hint"])


def test_info_as_text(run, monkeypatch):
    gpu = {"index": 0, "name": "A GPU [of sorts]", "memory_mib": 81_920, "driver": "580.1"}
    monkeypatch.setattr(cli, "_gpus", lambda: [gpu])
    code, out, _ = run("info")
    assert code == 0
    assert "GPU 0: A GPU [of sorts], 81,920 MiB" in out
    assert "auto takes: numba" in out
    assert all(name in out for name in backends.NAMES)


def test_gpus_are_read_from_the_drivers_tool(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771, 580.95.05'\necho 'a warning'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    gpus = cli._gpus()
    assert gpus == [{"index": 0, "name": "NVIDIA H200", "memory_mib": 143771, "driver": "580.95.05"}]
    assert cli._driver() is not None


# ---- demo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_demo_is_the_worked_example(run, backend):
    code, out, err = run("demo", "--backend", backend, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [(p["request"], p["count"], p["pages"]) for p in found["parts"]] == [
        ("A", 58, [2]),
        ("A", 62, [5]),
        ("B", 128, [6, 7]),
        ("B", 4, [8]),
    ]
    assert len(found["slots"]) == 252
    assert found["new_pages"] == [5, 6, 7, 8]
    assert found["slots"][:58] == list(range(128 + 6, 192))
    assert found["cells"]["2"] == "a" * 6 + "A" * 58
    assert found["cells"]["5"] == "A" * 62 + ".."


def test_demo_is_drawn(run):
    code, out, err = run("demo")
    assert (code, err) == (0, "")
    assert "aaaAAAAAAAAAAAAAAAAAAAAAAAAAAAAA" in out
    assert "252 slots in 4 parts; new pages 5, 6, 7, 8" in out
    assert max(map(len, out.splitlines())) <= 80


def test_demo_is_quick_once_compiled():
    def seconds() -> float:
        """Of the processor's time: other tests may be running. CI looks at the clock, with nothing beside it."""
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "COVERAGE"))}
        subprocess.run([sys.executable, "-m", "cupaged", "demo"], check=True, capture_output=True, env=environment)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime

    seconds()
    assert min(seconds() for _ in range(3)) < 1.5


# ---- check ---------------------------------------------------------------------------------------------------------


def test_check_is_clean(run):
    code, out, err = run("check", "--backend", "numba", "--seconds", "1", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["ok"]
    assert found["difference"] is None
    assert found["batches"] > 50


def test_check_takes_lists_and_repeats(run):
    code, out, _ = run("check", "--backend", "numba,reference", "--backend", "numba", "--seconds", "0.3")
    assert code == 0
    assert "no difference: numba, reference against reference" in out


def test_check_of_all_that_work(run, monkeypatch):
    seen = []

    def fake(names, **settings):
        seen.append((names, settings["seed"]))
        return selfcheck.Report(settings["seed"], list(names), seconds=1.0)

    monkeypatch.setattr(selfcheck, "check", fake)
    assert run("check", "--seed", "7")[0] == 0
    names, seed = seen[0]
    assert "numba" in names
    assert "reference" not in names
    assert seed == 7


def test_check_shows_a_difference(run, monkeypatch):
    right = NumbaBackend.alloc_decode

    def off_by_one(self, seq, last, out):
        right(self, seq, last, out)
        if seq.shape[0]:
            out[-1] += 1

    monkeypatch.setattr(NumbaBackend, "alloc_decode", off_by_one)
    code, out, err = run("check", "--backend", "numba", "--seconds", "20", "--json")
    found = json.loads(out)
    assert (code, err, found["ok"]) == (1, "", False)
    assert found["difference"]["ops"][-1].startswith("pool.alloc_decode(")
    assert found["difference"]["page_size"] in selfcheck.PAGE_SIZES
    code, out, _ = run("check", "--backend", "numba", "--seconds", "20")
    assert code == 1
    assert "numba differs from reference" in out
    assert "pool.alloc_decode(" in out


# ---- replay --------------------------------------------------------------------------------------------------------


def test_replay_of_a_file(run, trace):
    code, out, err = run("replay", trace, "--page-size", "4,16,4", "--pool-tokens", "4000,2000", "--verify", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["trace"] == "small.csv"
    runs = [(r["page_size"], r["pool_tokens"]) for r in found["results"]]
    assert runs == [(4, 4000), (16, 4000), (4, 2000), (16, 2000)]
    assert all(r["served"] == 3 and r["verified"] and r["backend"] == "numba" for r in found["results"])


def test_replay_digest_is_the_same_on_each_backend(run, trace):
    digests = set()
    for backend in ("numba", "reference"):
        out = run("replay", trace, "--page-size", "16", "--backend", backend, "--json")[1]
        digests.add(json.loads(out)["results"][0]["digest"])
    assert len(digests) == 1


def test_replay_engines_agree_in_what_requests_own(run, trace):
    digests = set()
    for engine in ("slots", "kv"):
        code, out, _ = run("replay", trace, "--page-size", "16", "--engine", engine, "--verify", "--json")
        assert code == 0
        digests.add(json.loads(out)["results"][0]["owned_digest"])
    assert len(digests) == 1


@pytest.mark.parametrize("engine", ["slots", "kv"])
def test_replay_that_shares_prefixes(run, tmp_path, engine):
    path = tmp_path / "shared.jsonl"
    lines = [(0, [1, 2, 3]), (1000, [1, 2, 4])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": 1100, "output_length": 2, "hash_ids": ids}) + "\n"
            for at, ids in lines
        )
    )
    code, out, _ = run("replay", str(path), "--page-size", "64", "--engine", engine, "--share-prefixes", "--verify")
    assert code == 0
    assert "note: page size 64, pool 400,000: 16 pages saved, 46.5% of the prompt tokens" in out
    assert "no shared page was written" in out
    assert ("engine kv" in out) == (engine == "kv")


def test_replay_as_text(run, trace, tmp_path):
    plot = tmp_path / "plot.png"
    code, out, _ = run(
        "replay", trace, "--page-size", "4,16", "--pool-tokens", "500", "--verify", "--plot", str(plot)
    )
    assert code == 0
    assert "note: 1 skipped, longer than the pool of 500 tokens: line 4 (907 tokens)" in out
    assert "note: the log has no arrival times" in out
    assert "verified" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_replay_without_a_trace(run):
    code, out, _ = run("replay", "--page-size", "64")
    assert code == 0
    assert "synthetic on numba" in out


def test_replay_of_gzip(run, trace, tmp_path):
    zipped = tmp_path / "small.csv.gz"
    with open(trace, "rb") as file:
        zipped.write_bytes(gzip.compress(file.read()))
    assert run("replay", str(zipped), "--page-size", "16")[0] == 0


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "bad.csv, line 1, column 1: the file is empty"),
        (b"prompt,output\n1,x\n", "bad.csv, line 2, column"),
        (b"\x00\x01\x02\xff", "bad.csv, line 1, column"),
    ],
)
def test_replay_of_a_bad_file(run, tmp_path, content, pattern):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    mistake(run("replay", str(path), "--json"), pattern)


@pytest.fixture
def no_replay(monkeypatch):
    """What is wrong with the output must be told before the work."""

    def work(*arguments, **settings):
        raise AssertionError("replayed")

    monkeypatch.setattr("cupaged.replay.replay", work)


@pytest.mark.usefixtures("no_replay")
def test_replay_plot_format_that_nobody_writes(run, trace, tmp_path):
    mistake(run("replay", trace, "--plot", str(tmp_path / "plot.xyz")), "matplotlib writes no .xyz, but .*png")


@pytest.mark.usefixtures("no_replay")
def test_replay_plot_where_nobody_can_write(run, trace):
    mistake(run("replay", trace, "--plot", "/proc/plot.png"), "--plot /proc/plot.png cannot be written: ")


def test_checks_of_outputs_leave_files_alone(tmp_path):
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("rows")
    cli._check_file("--json", kept)
    cli._check_file("--json", new)
    assert kept.read_text() == "rows"
    assert not new.exists()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_plot_that_fails_takes_no_table_along(run, trace, tmp_path, monkeypatch, workers):
    def full(results, path):
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr("cupaged.replay.plot", full)
    words = ("replay", trace, "--page-size", "16", "--workers", workers, "--plot", str(tmp_path / "plot.png"))
    code, out, err = run(*words)
    assert code == 2
    assert "small.csv on numba: 3 requests" in out
    assert re.fullmatch(r"cupaged: \[Errno 28\] No space left on device: .*plot.png.*\n", err)
    assert len(json.loads(run(*words, "--json")[1])["results"]) == 1


def test_replay_plot_without_matplotlib(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    mistake(run("replay", "--plot", "plot.png"), 'pip install "cupaged\\[plot\\]"')


def test_replay_that_fails_its_proof(run, trace, monkeypatch):
    right = NumbaBackend.alloc_decode

    def twice(self, seq, last, out):
        right(self, seq, last, out)
        out[:] = last

    monkeypatch.setattr(NumbaBackend, "alloc_decode", twice)
    mistake(run("replay", trace, "--page-size", "16", "--verify"), "page size 16, .*step .*slot", code=1)
