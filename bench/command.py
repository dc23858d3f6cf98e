"""What ``cupaged bench`` does: a run, its tables on the terminal, its files, and the comparison with kept results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import ab, contestants, report, scale

__all__ = ["run"]


def run(
    device: str,
    quick: bool,
    scaling: bool,
    only: str,
    without: str,
    json_file: str | None,
    plot: str | None,
    kept: dict[str, Any] | None,
) -> bool:
    """Run the benchmark and show what it found.

    Parameters
    ----------
    device : {"auto", "cuda", "cpu"}
        ``"auto"`` takes a GPU if CuPy or torch finds one that a backend works on.
    quick, scaling, only, without, json_file, plot
        As the options of ``cupaged bench``.
    kept : dict or None
        Results to compare with.

    Returns
    -------
    bool
        Whether all contestants of cupaged ran and answered rightly, and none got worse. A missed bar is shown, and
        is no failure.
    """
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    bench = ab.Bench(_device(device), quick, without=tuple(word.strip() for word in without.split(",")))
    chosen = scale.cases(bench, only) if scaling else ab.cases(bench, only)
    file = None if json_file is None else Path(json_file)
    with _Progress(len(chosen)) as progress:
        results = ab.run(bench, chosen, progress, file)
    for table in report.tables(results):
        console.print(table)
    failed = [(row["key"], name, why) for row in results["rows"] for name, why in row["errors"].items()]
    for key, name, why in failed:
        console.print(f"{key}: {name} failed: {why}", markup=False, soft_wrap=True, style="red")
    if plot is not None:
        report.plot(results, Path(plot))
        console.print(f"plot: {plot}", markup=False, soft_wrap=True)
    worse = [] if kept is None else _compare(bench, chosen, kept, results, console)
    return not worse and not any(_is_ours(name) for _, name, _ in failed)


def _is_ours(name: str) -> bool:
    return name == "all" or name.partition(", ")[0] in contestants.OURS


def _device(asked: str) -> str:
    from cupaged import backends

    if asked not in ("auto", "cuda", "cpu"):
        raise ValueError(f"--device must be auto, cuda or cpu, not {asked!r}")
    works = any(backends.probe(name).works for name in ("cupy", "numba-cuda"))
    if asked == "cuda" and not works:
        raise ValueError("--device cuda needs a GPU that a backend works on: cupaged info says what is missing")
    if asked == "cpu" or not works:
        return "cpu"
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        if asked == "cuda":
            raise ValueError("--device cuda needs torch with CUDA: the other contestants run on it")
        return "cpu"
    return "cuda"


def _compare(
    bench: ab.Bench, chosen: list[ab.Case], kept: dict[str, Any], results: dict[str, Any], console: Any
) -> list[dict[str, Any]]:
    by_key = {case.key: case for case in chosen}
    worse = ab.compare(kept, results, lambda key: ab.again(bench, by_key[key]))
    if kept["machine"]["gpu"] != results["machine"]["gpu"]:
        console.print("note: the kept results are of another machine; ratios may differ with it", soft_wrap=True)
    for entry in worse:
        now = "failed" if entry["now"] is None else f"{entry['now']:.3f}"
        console.print(
            f"worse: {entry['key']}, {entry['ours']} over {entry['other']}: {entry['was']:.3f} before, {now} now",
            markup=False,
            soft_wrap=True,
            style="red",
        )
    if not worse:
        console.print(f"no ratio is {ab.WORSE} x worse than in the kept results", soft_wrap=True)
    return worse


class _Progress:
    """A bar on stderr while somebody watches, else a line for each row."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.watched = sys.stderr.isatty()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self.watched,
        )
        self.task = self.bar.add_task("bench", total=total)

    def __enter__(self) -> _Progress:
        self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()

    def __call__(self, row: dict[str, Any]) -> None:
        self.bar.update(self.task, advance=1, description=row["key"])
        if not self.watched:
            shown = ", ".join(f"{name} {figure['median']:.4g}" for name, figure in row["figures"].items())
            wrong = f"; failed: {', '.join(row['errors'])}" if row["errors"] else ""
            print(f"{row['key']} [{row['unit']}] {shown}{wrong}", file=sys.stderr, flush=True)
