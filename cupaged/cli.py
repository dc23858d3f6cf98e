"""The command line: ``cupaged info``, ``demo``, ``check``, ``replay`` and ``bench``.

Heavy modules are imported inside the commands, so that help and mistakes come at once. What a user did wrong is one
line on stderr and exit code 2, and so is output that cannot be written; a check or a proof that failed is exit code
1. A reader that goes away is no mistake: silence, and the exit code that SIGPIPE would give.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cupaged import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from cupaged.replay import ReplayResult, ReplicasResult, Trace
    from cupaged.selfcheck import Report

__all__ = ["main"]

USAGE, FAILED, INTERRUPTED, NO_READER = 2, 1, 130, 141
MOST_WORKERS = 1024

app = typer.Typer(
    help="Slots of a paged KV cache for every new token of a batch of LLM requests.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]
OneBackend = Annotated[
    str, typer.Option("--backend", metavar="NAME", help="auto, cupy, numba-cuda, numba or reference.")
]


class UserError(Exception):
    """A mistake of the user's; its message is one line that says what to do."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Parameters
    ----------
    args : sequence of str, optional
        Words after the program's name; those that it was started with if not given.
    """
    if sys.stdin is None:  # closed, as by <&-: a file opened next would take its place
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit(_complain("standard output is closed; send what nobody shall read to /dev/null", USAGE))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A file's name may hold what the terminal has no letter for.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(_run(args))


def _run(args: Sequence[str] | None) -> int:
    try:
        code = app(args=args, prog_name="cupaged", standalone_mode=False)
        sys.stdout.flush()
        # an interrupt is a code, or raised, as the version of typer has it
        return _complain("interrupted", INTERRUPTED) if code == INTERRUPTED else int(code or 0)
    except UserError as error:
        return _complain(str(error), USAGE)
    except (KeyboardInterrupt, typer.Abort) as error:
        if isinstance(error.__cause__, EOFError):  # which the parser takes for the end of what a user types
            raise error.__cause__ from None
        return _complain("interrupted", INTERRUPTED)
    except OSError as error:
        return _not_written(error)
    except SystemExit as end:
        if isinstance(end.__context__, OSError):  # rich and the parser end the program themselves
            return _not_written(end.__context__)
        raise
    except Exception as error:
        # What the parser raises differs between versions of typer, but this much is common.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # none where the help was printed instead
        return _complain(f"{message} (cupaged --help lists what there is)", USAGE) if message else USAGE


def _not_written(error: OSError) -> int:
    """End what cannot be printed."""
    _discard(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return NO_READER
    return _complain(f"cannot write to standard output: {error.strerror or error}", USAGE)


def _complain(message: str, code: int) -> int:
    try:
        print(f"cupaged: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)
    return code


def _discard(stream: Any) -> None:
    """Send what a stream still holds nowhere: Python's own flush at exit must not complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _mistakes() -> Iterator[None]:
    """Turn what a library raises for bad arguments into one line."""
    from cupaged.backends import BackendError

    try:
        yield
    except (ValueError, TypeError, BackendError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UserError(str(error)) from None
    except MemoryError as error:
        raise UserError(f"not enough memory: {error or 'take a smaller pool'}") from None


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"cupaged {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Slots of a paged KV cache for every new token of a batch of LLM requests."""


# ---- info ----------------------------------------------------------------------------------------------------------


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, GPUs, and which backends work here."""
    found = _gather()
    if as_json:
        _print_json(found)
        return
    from rich.table import Table

    console = _console()
    versions = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
    for name, version in found["versions"].items():
        versions.add_row(name, version or "[dim]not installed[/dim]")
    versions.add_row("driver", found["driver"] or "[dim]none found[/dim]")
    console.print(versions)
    console.print()
    for gpu in found["gpus"]:
        console.print(f"GPU {gpu['index']}: {gpu['name']}, {gpu['memory_mib']:,} MiB", markup=False)
    if not found["gpus"]:
        console.print("no GPU found")
    console.print()
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for title in ("backend", "works", "why not, and what to do"):
        table.add_column(title)
    for name, result in found["backends"].items():
        why = "" if result["works"] else f"{result['reason']}; {result['hint']}"
        table.add_row(name, "[green]yes[/green]" if result["works"] else "[red]no[/red]", _plain(why))
    console.print(table)
    console.print()
    console.print(f"auto takes: {found['auto'] or 'nothing: ' + found['auto_error']}", markup=False, soft_wrap=True)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _gather() -> dict[str, Any]:
    import platform
    import warnings

    from cupaged import backends

    auto, auto_error = None, ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probes = {name: backends.probe(name)._asdict() for name in backends.NAMES}
        try:
            auto = backends.pick("auto", "auto").name
        except (ValueError, backends.BackendError) as error:
            auto_error = str(error)
    return {
        "versions": {"cupaged": __version__, "python": platform.python_version(), **_packages()},
        "driver": _driver(),
        "gpus": _gpus(),
        "backends": probes,
        "auto": auto,
        "auto_error": auto_error,
        "CUPAGED_BACKEND": os.environ.get("CUPAGED_BACKEND", ""),
    }


def _packages() -> dict[str, str | None]:
    from importlib import metadata

    cupy = [f"cupy{suffix}" for suffix in ("-cuda12x", "-cuda13x", "-cuda11x", "")]
    found: dict[str, str | None] = {}
    for shown, names in {
        "numpy": ["numpy"],
        "numba": ["numba"],
        "cupy": cupy,
        "torch": ["torch"],
        "numba-cuda": ["numba-cuda"],
        "numba-cuda-mlir": ["numba-cuda-mlir"],
    }.items():
        found[shown] = None
        for name in names:
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
            found[shown] = version if name == shown else f"{version} ({name})"
            break
    return found


def _driver() -> str | None:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        words = []
    from_proc = next((w for w in words if w[0].isdigit() and "." in w), None)
    return from_proc or next((gpu["driver"] for gpu in _gpus()), None)


def _gpus() -> list[dict[str, Any]]:
    """What the driver's own tool lists: it needs no library."""
    import subprocess

    fields = "index,name,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [
        {"index": int(index), "name": name, "memory_mib": int(memory) if memory.isdigit() else 0, "driver": driver}
        for index, name, memory, driver in (row for row in rows if len(row) == 4 and row[0].isdigit())
    ]


# ---- demo ----------------------------------------------------------------------------------------------------------


@app.command()
def demo(backend: OneBackend = "auto", as_json: Json = False) -> None:
    """The worked example, drawn: pages, slots, and who owns what."""
    with _mistakes():
        from cupaged.demo import draw, run

        result = run(backend)
    if as_json:
        _print_json(asdict(result))
    else:
        _console().print(draw(result))


# ---- check ---------------------------------------------------------------------------------------------------------


@app.command()
def check(
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME,...", help="Backends to check; all that work here if not given."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long.")] = 10.0,
    seed: Annotated[int, typer.Option(help="The same seed makes the same batches.")] = 0,
    as_json: Json = False,
) -> None:
    """Random batches on every backend against the reference."""
    from cupaged.selfcheck import check as run_check

    if not (seconds > 0 and math.isfinite(seconds)):
        raise UserError(f"--seconds must be a positive number, not {seconds}")
    if seed < 0:
        raise UserError(f"--seed must not be negative, not {seed}")
    with _mistakes():
        names = _backends_to_check(backend)
        with _progress("{task.fields[rate]:,.0f} batches/s") as bar:
            task = bar.add_task(f"{', '.join(names)} against reference", total=seconds, rate=0.0)
            report = run_check(
                names,
                seconds=seconds,
                seed=seed,
                progress=lambda r: bar.update(task, completed=r.seconds, rate=r.ops / max(r.seconds, 1e-9)),
            )
            bar.update(task, completed=min(report.seconds, seconds))
    if as_json:
        _print_json(_report_json(report))
    else:
        _print_report(report)
    if report.difference is not None:
        raise typer.Exit(FAILED)


def _backends_to_check(asked: Sequence[str] | None) -> list[str]:
    from cupaged import backends

    if not asked:
        return [name for name in backends.NAMES if name != "reference" and backends.probe(name).works]
    names = [name.strip() for words in asked for name in words.split(",") if name.strip()]
    if not names:
        raise UserError("--backend names no backend; leave it out to check all that work here")
    for name in names:
        result = backends.probe(name)
        if not result.works:
            raise UserError(f"backend {name!r} cannot run here: {result.reason}; {result.hint}")
    return list(dict.fromkeys(names))


def _report_json(report: Report) -> dict[str, Any]:
    found = report.difference
    return {
        "ok": found is None,
        "backends": report.backends,
        "seed": report.seed,
        "seconds": report.seconds,
        "pools": report.cases,
        "batches": report.ops,
        "batches_per_s": report.ops / max(report.seconds, 1e-9),
        "recorded_errors": report.refused,
        "raised": report.errors,
        "short": report.short,
        "difference": None
        if found is None
        else {
            "backend": found.backend,
            "case": report.failed_case,
            "page_size": found.case.options["page_size"],
            "pool": found.case.options,
            "ops": [str(op) for op in found.case.ops],
            "what": found.what,
            "expected": found.expected,
            "got": found.got,
        },
    }


def _print_report(report: Report) -> None:
    console = _console()
    found, rate = report.difference, report.ops / max(report.seconds, 1e-9)
    if found is not None:
        console.print(
            f"[red]{found.backend} differs from reference[/red] (seed {report.seed}, pool {report.failed_case}); "
            f"the shortest way there that was found, page size {found.case.options['page_size']}:\n",
            soft_wrap=True,
        )
        console.print(str(found), markup=False, soft_wrap=True)
        return
    console.print(
        f"[green]no difference[/green]: {', '.join(report.backends)} against reference, {report.ops:,} batches on "
        f"{report.cases:,} pools in {report.seconds:.1f} s, {rate:,.0f} batches/s",
        soft_wrap=True,
    )
    console.print(
        f"among them {report.short:,} on a pool that was short, {report.refused:,} with an error recorded, "
        f"{report.errors:,} refused at once",
        soft_wrap=True,
    )


# ---- replay --------------------------------------------------------------------------------------------------------


@app.command()
def replay(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="[TRACE]",
            help="A log of requests: Azure's CSV, Mooncake's JSONL, or a CSV of prompt,output; gzip too. "
            "Without one, a built-in workload.",
        ),
    ] = None,
    page_size: Annotated[str, typer.Option(metavar="N,...", help="Slots in a page.")] = "1,16,64,256",
    pool_tokens: Annotated[str, typer.Option(metavar="N,...", help="Slots in the pool.")] = "400000",
    step_ms: Annotated[float, typer.Option(help="Milliseconds of the virtual clock that a step takes.")] = 25.0,
    chunk: Annotated[int, typer.Option(help="Prompt tokens that a step prefills at most.")] = 8192,
    max_running: Annotated[int, typer.Option(help="Requests that hold slots at a time, at most.")] = 256,
    engine: Annotated[
        str, typer.Option(metavar="slots|kv", help="Drive the slot allocator, or KVAllocator by whole steps.")
    ] = "slots",
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Share the pages of prompts that begin alike, by hash_ids.")
    ] = False,
    workers: Annotated[
        int, typer.Option(metavar="N", help="Data-parallel replicas, each in a process and with a pool of its own.")
    ] = 1,
    router: Annotated[
        str,
        typer.Option(metavar="round-robin|least-loaded", help="Which replica a request goes to."),
    ] = "round-robin",
    cluster: Annotated[
        str, typer.Option(metavar="local|ray", help="Replicas on this machine, or on a Ray cluster.")
    ] = "local",
    backend: OneBackend = "auto",
    verify: Annotated[
        bool, typer.Option("--verify", help="Prove at every step that no slot has two owners, no page is lost.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw occupancy over time, and waste by page size.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a log of LLM requests through the allocator, as a serving engine would."""
    page_sizes = _whole_numbers("--page-size", page_size)
    pools = _whole_numbers("--pool-tokens", pool_tokens)
    if plot is not None:
        _check_plot(plot)
    with _mistakes():
        from cupaged import backends
        from cupaged.replay import read_trace, synthetic

        _check_replicas(workers, router, cluster)
        backends.pick(backend, "auto")
        if trace is not None and not Path(trace).exists():
            raise UserError(f"there is no file {trace}; name a log, or none for the built-in workload")
        log = synthetic() if trace is None else read_trace(trace)
    settings = {"step_ms": step_ms, "chunk": chunk, "max_running": max_running, "backend": backend, "verify": verify}
    settings |= {"engine": engine, "share_prefixes": share_prefixes}
    runs = [(p, t) for t in pools for p in page_sizes]
    if workers > 1 or cluster != "local":
        _replay_by_replicas(log, runs, settings | {"router": router}, workers, cluster, plot, as_json)
        return
    results = _replay_all(log, runs, settings)
    if as_json:
        _print_json({"trace": log.name, "results": [asdict(r) for r in results]})
    else:
        _print_results(results)
    _plot(results, plot, as_json)


def _check_replicas(workers: int, router: str, cluster: str) -> None:
    from cupaged.replay import CLUSTERS, ROUTERS

    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers must be between 1 and {MOST_WORKERS}, not {workers}")
    for option, value, choices in (("--router", router, ROUTERS), ("--cluster", cluster, CLUSTERS)):
        if value not in choices:
            raise UserError(f"{option} must be one of {', '.join(choices)}, not {value!r}")


def _replay_by_replicas(
    log: Trace,
    runs: list[tuple[int, int]],
    settings: dict[str, Any],
    workers: int,
    cluster: str,
    plot: str | None,
    as_json: bool,
) -> None:
    from cupaged import replay as replaying

    with _mistakes(), (replaying.LocalCluster if cluster == "local" else replaying.RayCluster)(workers) as where:

        def by_replicas(log: Trace, page_size: int, pool_tokens: int, **options: Any) -> ReplicasResult:
            return replaying.replay_replicas(log, page_size, pool_tokens, where, **options)

        found = _replay_all(log, runs, settings, by_replicas)
    if as_json:
        _print_json({"trace": log.name, "results": [_replicas_json(r) for r in found]})
    else:
        rows = [(name, r) for one in found for name, r in (("all", one.total), *enumerate(one.replicas))]
        _print_results([r for _, r in rows], [str(name) for name, _ in rows])
    _plot([r.total for r in found], plot, as_json)


def _replicas_json(result: ReplicasResult) -> dict[str, Any]:
    about = {"workers": len(result.replicas), "router": result.router, "cluster": result.cluster}
    return asdict(result.total) | about | {"replicas": [asdict(r) for r in result.replicas]}


def _replay_all(
    log: Trace, runs: list[tuple[int, int]], settings: dict[str, Any], run_replay: Callable[..., Any] | None = None
) -> list[Any]:
    from cupaged import replay as replaying

    results = []
    run_replay = run_replay or replaying.replay
    with _mistakes(), _progress("{task.completed:,.0f}/{task.total:,.0f} requests") as bar:
        for page_size, pool_tokens in runs:
            task = bar.add_task(f"page size {page_size}, pool {pool_tokens:,}", total=len(log))

            def advance(ended: int, of: int, task: Any = task) -> None:
                bar.update(task, completed=ended, total=of)

            try:
                results.append(run_replay(log, page_size, pool_tokens, progress=advance, **settings))
            except (replaying.VerificationError, replaying.WorkerError) as error:
                bar.stop()
                _complain(f"page size {page_size}, pool {pool_tokens}: {error}", FAILED)
                raise typer.Exit(FAILED) from None
    return results


def _print_results(results: list[ReplayResult], replicas: Sequence[str] = ()) -> None:
    from cupaged.replay import table

    console = _console()
    console.print(table(results, replicas))
    for note in dict.fromkeys(note for r in results for note in r.notes):
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if all(r.verified for r in results):
        what = "no shared page was written" if results[0].shared else "no slot had two owners"
        console.print(f"[green]verified[/green]: at every step {what}, and no page was lost", soft_wrap=True)


def _plot(results: list[ReplayResult], path: str | None, as_json: bool) -> None:
    """Draw the results, behind all that is printed: what fails here takes nothing along."""
    if path is None:
        return
    from cupaged import replay as replaying

    sys.stdout.flush()
    with _mistakes():
        replaying.plot(results, path)
    if not as_json:
        _console().print(f"plot: {path}", markup=False, soft_wrap=True)


def _check_plot(path: str) -> None:
    """Say before the work, not after it, that the plot cannot be written."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UserError('--plot needs matplotlib: pip install "cupaged[plot]"')
    file = Path(path)
    if file.is_dir() or not file.suffix:
        raise UserError(f"--plot needs a file with a suffix that says the format, such as plot.png, not {path}")
    _check_file("--plot", file)
    with _mistakes():
        from matplotlib.backend_bases import FigureCanvasBase

        formats = FigureCanvasBase.get_supported_filetypes()
    if file.suffix[1:].lower() not in formats:
        raise UserError(f"--plot {path}: matplotlib writes no {file.suffix}, but {', '.join(sorted(formats))}")


def _check_file(option: str, file: Path) -> None:
    """Say before the work that a file cannot be written."""
    if not file.absolute().parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.parent}")
    is_new = not file.exists()
    try:
        with open(file, "ab"):
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise UserError(f"{option} {file} cannot be written: {error.strerror}") from None


def _whole_numbers(option: str, text: str) -> list[int]:
    """A comma-separated list of positive integers, each once."""
    numbers = []
    for word in text.split(","):
        try:
            number = int(word)
        except ValueError:
            number = 0
        if number < 1:
            raise UserError(f"{option} must be whole numbers from 1 on, separated by commas, not {text!r}")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


# ---- bench ---------------------------------------------------------------------------------------------------------


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and samples.")] = False,
    only: Annotated[
        str, typer.Option(metavar="PATTERN,...", help="Cases whose keys begin or match so: kernel/decode, cpu/*/256.")
    ] = "",
    without: Annotated[str, typer.Option(metavar="NAME,...", help="Contestants to leave out.")] = "",
    scale: Annotated[
        bool, typer.Option("--scale", help="How time and memory grow, and millions of calls, instead of A against B.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE.json", help="Keep the results there, row by row.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw time against size, with the limit of a pure write.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="OLD.json|NAME",
            help="Fail if a ratio to another contestant is 1.3 x worse than in these results.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cuda|cpu", help="Where the contestants run.")] = "auto",
    report: Annotated[
        bool,
        typer.Option("--report", help="Measure nothing: write the documents' tables and plots from kept results."),
    ] = False,
) -> None:
    """Time cupaged against other ways to do the same, on the same inputs, in one run."""
    if plot is not None:
        _check_plot(plot)
    if json_file is not None:
        _check_file("--json", Path(json_file))
    with _mistakes():
        if report:
            for file in _bench("report").write():
                _console().print(f"wrote {file}", markup=False, soft_wrap=True)
            return
        kept = None if compare is None else _bench("report").kept(compare)
        passed = _bench("command").run(device, quick, scale, only, without, json_file, plot, kept)
    if not passed:
        raise typer.Exit(FAILED)


def _bench(module: str) -> Any:
    """A module of the benchmark: of the package, or beside it in a checkout."""
    import importlib

    root = Path(__file__).resolve().parents[1]
    if not (root / "bench" / "ab.py").is_file():
        return importlib.import_module(f"cupaged.bench.{module}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"bench.{module}")


@contextmanager
def _progress(rate: str) -> Iterator[Any]:
    """A bar on stderr while somebody watches."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(rate),
        TimeElapsedColumn(),
        console=_console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        yield bar
