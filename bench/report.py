"""What is shown of results: tables on a terminal, plots, and the generated blocks of the documents.

``python bench/report.py``, or ``cupaged bench --report``, writes these blocks and the plots anew from the files in
``bench/results/``. A block stands between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``; nobody types there.
"""

from __future__ import annotations

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from cupaged.cli import main

    main(["bench", "--report", *sys.argv[1:]])

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["blocks", "kept", "plot", "results_files", "stale", "tables", "write"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PLOTS = Path("docs") / "plots"
DOCUMENTS = (Path("README.md"), Path("docs") / "performance.md")

SECTIONS = {
    "kernel": "Time on the GPU",
    "call": "Time on the host of whole calls",
    "kv": "Request by request: time on the host",
    "sync": "Calls behind a long kernel",
    "compile": "Compilations",
    "first": "First result",
    "cpu": "On the CPU: time of whole calls",
    "scale": "How time and memory grow",
}
NAMES = {
    "engine": "engine's chain",
    "triton": "per-request Triton kernel",
    "write": "pure write",
    "empty": "empty kernel",
}


def _sections(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["key"].partition("/")[0], []).append(row)
    return found


def _groups(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of a section by what is done in them and their unit; neighbours whose contestants fit stay together."""
    by_what: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_what.setdefault((row["key"].split("/")[1], row["unit"]), []).append(row)
    groups: list[list[dict[str, Any]]] = []
    for group in by_what.values():
        mine = set(_columns(group))
        last = set(_columns(groups[-1])) if groups else set()
        if groups and groups[-1][0]["unit"] == group[0]["unit"] and (mine <= last or last <= mine):
            groups[-1] += group
        else:
            groups.append(group)
    return groups


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """Contestants of some rows: the limits last."""
    names = list(dict.fromkeys(name for row in rows for name in [*row["figures"], *row["errors"]]))
    return sorted((n for n in names if n != "all"), key=lambda name: name in ("write", "empty"))


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _cell(row: dict[str, Any], name: str, spread: bool) -> str:
    figure = row["figures"].get(name)
    if figure is None:
        return "failed" if name in row["errors"] or "all" in row["errors"] else ""
    text = _number(figure["median"])
    if spread and figure["n"] > 1:
        far = max(figure["high"] - figure["median"], figure["median"] - figure["low"])
        text += f" ±{100 * far / figure['median']:.0f}%" if figure["median"] else ""
    return text


def _machine(results: dict[str, Any]) -> str:
    m = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    gpu = f"{m['gpu']}, driver {m['driver']}; " if m["gpu"] else ""
    return f"{gpu}{m['cpu']}, {m['cores']} cores; {versions}; commit {m['commit'] or 'unknown'}, {results['date']}"


# ---- on a terminal -------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> Iterator[Any]:
    """Tables of results for a terminal.

    Parameters
    ----------
    results : dict
        As a run gives them.

    Yields
    ------
    rich.text.Text or rich.table.Table
        A title and a table for each group of cases, and for the bars.
    """
    from rich.table import Table
    from rich.text import Text

    grouped = [(section, g) for section, rows in _sections(results["rows"]).items() for g in _groups(rows)]
    for section, rows in grouped:
        title = f"{SECTIONS.get(section, section)}, {rows[0]['unit']}: medians, ± what the middle 80 % keep to"
        yield Text(f"\n{title}", style="bold")
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        table.add_column("case", no_wrap=True)
        columns = _columns(rows)
        for name in columns:
            table.add_column(NAMES.get(name, name), justify="right", vertical="bottom")
        for row in rows:
            table.add_row(row["key"].partition("/")[2], *(Text(_cell(row, name, True)) for name in columns))
        yield table
    measured = [bar for bar in results["bars"] if bar["passed"] is not None]
    if measured:
        yield Text("\nBars", style="bold")
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        for title in ("", "", "asked", "measured", "holds", "where"):
            table.add_column(title)
        for bar in measured:
            holds = "[green]yes[/green]" if bar["passed"] else "[red]no[/red]"
            table.add_row(str(bar["bar"]), bar["text"], bar["asked"], bar["measured"], holds, bar["where"])
        yield table


# ---- plots ---------------------------------------------------------------------------------------------------------

COLOURS = {
    "cupy": "#1b7f3b",
    "numba": "#1b7f3b",
    "numba-cuda": "#7fbf7b",
    "triton": "#c0392b",
    "engine": "#c0392b",
    "torch ops": "#e08e45",
    "numpy ops": "#7b5ea7",
    "cupy ops": "#4a90d9",
    "sglang": "#8c564b",
    "reference": "#bbbbbb",
    "write": "#222222",
    "empty": "#888888",
}


def plot(results: dict[str, Any], file: Path) -> None:
    """Draw time against size, both logarithmic, with the limit of a pure write.

    Parameters
    ----------
    results : dict
        As a run gives them.
    file : Path
        Where to; its suffix says the format.

    Raises
    ------
    ValueError
        If there is nothing to draw, or matplotlib does not know the format.
    """
    panels = [panel for panel in _panels(results["rows"]) if panel[1]]
    if not panels:
        raise ValueError("--plot: no case was measured that has sizes to draw")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(lines, 2 if len(panels) > 1 else 1, figsize=(12, 4.4 * lines), squeeze=False)
    for unused in axes.flat[len(panels) :]:
        unused.axis("off")
    for axis, (title, rows, label) in zip(axes.flat, panels, strict=False):
        for name in _columns(rows):
            points = [(row["size"], row["figures"][name]) for row in rows if name in row["figures"]]
            sizes = [size for size, _ in points]
            limit = name in ("write", "empty")
            style = {"linestyle": "--" if limit else "-", "marker": "" if limit else "o", "markersize": 3}
            colour = COLOURS.get(name.partition(", ")[0], "#555555")
            axis.plot(sizes, [f["median"] for _, f in points], label=NAMES.get(name, name), color=colour, **style)
            if not limit:
                low, high = [f["low"] for _, f in points], [f["high"] for _, f in points]
                axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel(label)
        axis.set_ylabel(rows[0]["unit"])
        axis.grid(alpha=0.3, which="both", linewidth=0.5)
        axis.legend(fontsize=8)
    machine = results["machine"]
    figure.suptitle(f"{machine['gpu'] or machine['cpu']}, {results['date']}", fontsize=9)
    figure.tight_layout()
    written = {"Source": digest(results)} if file.suffix == ".png" else None
    figure.savefig(file, dpi=110, metadata=written)
    pyplot.close(figure)


def _panels(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]], str]]:
    """Title, rows in the order of their size, and what the axis counts."""

    def of(*patterns: str) -> list[dict[str, Any]]:
        found = [row for row in rows if any(re.fullmatch(pattern, row["key"]) for pattern in patterns)]
        return sorted((row for row in found if row["figures"]), key=lambda row: row["size"])

    decode, extend = r"kernel/decode/\d+", r"kernel/extend/(1|10)x\d+"
    return [
        ("decode, time on the GPU", of(decode), "requests"),
        ("extend of one request (the last: of ten), time on the GPU", of(extend), "tokens"),
        ("decode on the CPU", of(r"cpu/decode/\d+"), "requests"),
        ("extend of one request on the CPU", of(r"cpu/extend/1x\d+"), "tokens"),
        ("decode of 256", of(r"scale/pool/.*, time"), "pages in the pool"),
        ("free of 16 pages by slot", of(r"scale/pool/.*free"), "pages in the pool"),
        ("making the pool", of(r"scale/pool/.*made"), "pages in the pool"),
        ("decode", of(r"scale/batch/.*"), "requests"),
    ]


def digest(results: dict[str, Any]) -> str:
    """Of the results that something was made from."""
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()[:16]


# ---- documents -----------------------------------------------------------------------------------------------------


def results_files() -> dict[str, dict[str, Any]]:
    """Kept results by name, those of GPUs first."""
    found = {file.stem: kept(str(file)) for file in sorted(RESULTS.glob("*.json"), key=lambda file: file.stem)}
    return dict(sorted(found.items(), key=lambda item: item[1]["machine"]["gpu"] is None))


def kept(name: str) -> dict[str, Any]:
    """Results in a file, or kept ones by their name, which an installed package has too.

    Raises
    ------
    ValueError
        If there are none.
    """
    file = Path(name)
    if not file.is_file():
        file = RESULTS / f"{name}.json"
    if not file.is_file():
        names = ", ".join(found.stem for found in sorted(RESULTS.glob("*.json"))) or "none"
        raise ValueError(f"there is no file {name}, and of kept results there are {names}")
    return json.loads(file.read_text())


def _markdown(titles: list[str], rows: list[list[str]], right: int = 1) -> list[str]:
    """Lines of a table whose columns from the given one on are numbers."""
    marks = ["---" if i < right else "---:" for i in range(len(titles))]
    return ["| " + " | ".join(cells) + " |" for cells in (titles, marks, *rows)]


def _section_lines(rows: list[dict[str, Any]]) -> list[str]:
    columns = _columns(rows)
    body = [[row["key"].partition("/")[2], *(_cell(row, name, False) for name in columns)] for row in rows]
    return _markdown([f"case, {rows[0]['unit']}", *(NAMES.get(name, name) for name in columns)], body)


def _bar_lines(bars: list[dict[str, Any]]) -> list[str]:
    body = [
        [str(b["bar"]), b["text"], b["asked"], b["measured"], "yes" if b["passed"] else "**no**", f"`{b['where']}`"]
        for b in bars
        if b["passed"] is not None
    ]
    return _markdown(["", "figure", "asked", "measured", "holds", "decided by"], body, right=9)


def blocks() -> dict[str, str]:
    """Text of each generated block, by its name."""
    everything: list[str] = []
    short: list[str] = []
    for name, results in results_files().items():
        everything += [f"## {results['machine']['gpu'] or results['machine']['cpu']}: `{name}`", ""]
        everything += [f"{_machine(results)}. Medians; `bench/results/{name}.json` has the spread.", ""]
        if results["bars"] and any(bar["passed"] is not None for bar in results["bars"]):
            everything += ["### Bars", "", *_bar_lines(results["bars"]), ""]
        if _has_plot(results):
            everything += [f"![{name}]({_plot_of(name).relative_to('docs')})", ""]
        for section, rows in _sections(results["rows"]).items():
            everything += [f"### {SECTIONS.get(section, section)}", ""]
            for group in _groups(rows):
                everything += [*_section_lines(group), ""]
        short += _short(name, results)
    missing = "No results are kept yet."
    return {
        "results": "\n".join(everything).strip() or missing,
        "summary": "\n".join(short).strip() or missing,
    }


HIGHLIGHTS = {
    "kernel/decode/256": "GPU time, decode of 256 requests",
    "kernel/decode/4096": "GPU time, decode of 4,096",
    "kernel/extend/1x1048576": "GPU time, extend of 1M tokens",
    "call/decode/256": "host time, `alloc_decode` of 256",
    "call/extend/64x128": "host time, `alloc_extend` of 64 x 128",
    "call/step/256": "host time, a whole decode step of 256",
    "call/free+alloc/256": "host time, `free` and `alloc` of 256 pages",
    "kv/alloc/100": "host time, `KVAllocator.alloc` of 100 tokens",
    "kv/step/256": "host time, 256 requests that each begin a page",
    "kv/group_free/256x2": "host time, 256 requests end",
    "cpu/decode/256": "decode of 256 requests",
    "cpu/extend/1x1048576": "extend of 1M tokens",
    "cpu/free+alloc/256": "`free` and `alloc` of 256 pages",
}


def _short(name: str, results: dict[str, Any]) -> list[str]:
    """A few rows for the README: ours, and the best of the others."""
    on_gpu = results["machine"]["gpu"] is not None
    rows = {row["key"]: row for row in results["rows"]}
    body = []
    for key, text in HIGHLIGHTS.items():
        row = rows.get(key)
        if row is None or key.startswith("cpu/") == on_gpu:
            continue
        ours = next((n for n in ("cupy", "numba") if n in row["figures"]), None)
        wanted = ("engine", "triton") if on_gpu else ("numpy ops", "torch ops")
        others = [n for n in wanted if n in row["figures"]]
        if ours is None or not others:
            continue
        best = min(others, key=lambda n: row["figures"][n]["median"])
        mine, theirs = row["figures"][ours]["median"], row["figures"][best]["median"]
        body.append([text, _number(mine), _number(theirs), NAMES.get(best, best), f"{theirs / mine:.1f} x"])
    if not body:
        return []
    title = results["machine"]["gpu"] or f"{results['machine']['cpu']}, {results['machine']['cores']} cores"
    held = [bar for bar in results["bars"] if bar["passed"] is not None]
    kept = f"; {sum(bar['passed'] for bar in held)} of {len(held)} bars hold" if held else ""
    lines = [f"On {title}, in us{kept}:", "", *_markdown(["", "cupaged", "other", "which", "ratio"], body), ""]
    if _has_plot(results):
        lines += [f"![time against size on {title}]({_plot_of(name)})", ""]
    return lines


def _has_plot(results: dict[str, Any]) -> bool:
    return any(rows for _, rows, _ in _panels(results["rows"]))


def _plot_of(name: str) -> Path:
    return PLOTS / f"{name}.png"


def _filled(text: str, made: dict[str, str]) -> str:
    """A document with its blocks as they should be."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in made:
            raise ValueError(f"there is no generated block {name!r}, only {', '.join(made)}")
        return f"<!-- bench:{name} -->\n\n{made[name]}\n\n<!-- /bench:{name} -->"

    return re.sub(r"<!-- bench:(\w+) -->.*?<!-- /bench:\1 -->", block, text, flags=re.DOTALL)


def stale() -> list[Path]:
    """Documents and plots that are not what the kept results make of them."""
    made = blocks()
    found = [file for file in DOCUMENTS if _filled((ROOT / file).read_text(), made) != (ROOT / file).read_text()]
    for name, results in results_files().items():
        drawn = ROOT / _plot_of(name)
        if _has_plot(results) and not (drawn.is_file() and digest(results).encode() in drawn.read_bytes()):
            found.append(_plot_of(name))
    return found


def write() -> list[Path]:
    """Write the generated blocks and the plots of a checkout.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    ValueError
        If this is no checkout.
    """
    if not all((ROOT / file).is_file() for file in DOCUMENTS):
        raise ValueError("--report writes the documents of a checkout, and there are none here")
    made, written = blocks(), []
    for file in DOCUMENTS:
        text = _filled((ROOT / file).read_text(), made)
        (ROOT / file).write_text(text)
        written.append(file)
    (ROOT / PLOTS).mkdir(exist_ok=True)
    for name, results in results_files().items():
        if _has_plot(results):
            plot(results, ROOT / _plot_of(name))
            written.append(_plot_of(name))
    return written
