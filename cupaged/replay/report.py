"""What a replay measured: as a dataclass, a table to choose a page size from, and a plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table


@dataclass(frozen=True)
class ReplayResult:
    """Figures of one replay; ``dataclasses.asdict`` makes JSON of it.

    "Held" is what requests own before those that end free theirs, so its peak is what the pool must have. A page
    that several of them own counts once; what only the prefix cache holds does not, since it is given up when asked.
    Means weigh all steps with work alike; idle time is skipped.

    Attributes
    ----------
    trace, engine, backend, device : str
        What was replayed, what was driven, and what ran it.
    page_size, pool_tokens : int
        As asked for.
    requests, served, skipped : int
        Requests of the trace, those that ran to their end, and those longer than the pool.
    tokens, slots : int
        Prompt and output tokens of the served requests, and slots handed out: more where some started over.
    steps, retractions : int
        Steps that had work, and how often a request lost its pages to older ones.
    occupancy_mean, occupancy_peak : float
        Pages held, as a share of the pool.
    waste_mean, waste_peak, waste_share : float
        Slots of held pages without a token, and their mean as a share of the mean of held slots.
    allocations : int
        Calls that allocate.
    allocator_s, wall_s : float
        Time in the allocator's calls, as the host sees it, frees included, and of the whole replay.
    allocations_per_s, slots_per_s : float
        Both over `allocator_s`.
    step_p50_us, step_p99_us, step_max_us : float
        Time in the allocator per step.
    digest : str
        Hash of all slots handed out, in order. The same on each backend, but not for each engine: they take
        freed pages again in different orders.
    owned_digest : str
        Hash of what each request owned when it ended or was retracted: its tokens and pages, the layout of its
        slots whatever its pages are called, and for whom each page was allocated. The same on each backend and for
        each engine. `cupaged.replay.digests.OwnedDigest` says it to the bit.
    verified : bool
        Whether each step was proved.
    shared : bool
        Whether prompts shared prefixes. If not, the next five are 0.
    looked_up : int
        Prompt tokens of all requests that began or started over, which the prefix cache was asked for.
    pages_saved : int
        Pages that requests found in the prefix cache and so did not allocate, over all that began or started over.
    found_share : float
        Their tokens, as a share of `looked_up`.
    pages_evicted : int
        Pages that the cache gave up because the pool was short.
    pages_replaced : int
        Pages of prompts that several requests computed, freed at their end because the cache held others by then.
    notes : list of str
        What else to say: skipped requests, a log that had to be sorted.
    timeline : list of (float, float)
        Seconds on the virtual clock, and the share of the pool held: the peaks of up to 500 spans of time.
    """

    trace: str
    engine: str
    backend: str
    device: str
    page_size: int
    pool_tokens: int
    requests: int
    served: int
    skipped: int
    tokens: int
    slots: int
    steps: int
    retractions: int
    occupancy_mean: float
    occupancy_peak: float
    waste_mean: float
    waste_peak: float
    waste_share: float
    allocations: int
    allocator_s: float
    wall_s: float
    allocations_per_s: float
    slots_per_s: float
    step_p50_us: float
    step_p99_us: float
    step_max_us: float
    digest: str
    owned_digest: str
    verified: bool
    shared: bool
    looked_up: int
    pages_saved: int
    found_share: float
    pages_evicted: int
    pages_replaced: int
    notes: list[str]
    timeline: list[tuple[float, float]]


def table(results: Sequence[ReplayResult], replicas: Sequence[str] = ()) -> Table:
    """Make one row a result, to choose a page size and a pool from.

    Parameters
    ----------
    results : sequence of ReplayResult
        Replays of one trace on one backend. The table fits 80 columns; the whole digests are in the results.
    replicas : sequence of str, optional
        Which replica each result is of; the first is of all of them.
    """
    first = results[0]
    pools = {r.pool_tokens for r in results}
    driven = "" if first.engine == "slots" else f", engine {first.engine}"
    title = f"{first.trace} on {first.backend}{driven}: {first.requests:,} requests, {first.tokens:,} tokens"
    out = Table(
        title=title if len(pools) > 1 else f"{title}\nin a pool of {first.pool_tokens:,} slots",
        caption="waste: held slots without a token; us: in the allocator, per step",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    cells = [_cells(r) for r in results]
    if replicas:
        cells = [{"rep-\nlica": replica} | row for replica, row in zip(replicas, cells, strict=True)]
    for name in cells[0]:
        if name != "pool" or len(pools) > 1:
            out.add_column(name, justify="right", no_wrap=True)
    for row in cells:
        out.add_row(*(row[str(column.header)] for column in out.columns))
    return out


def _four_digits(x: float) -> str:
    return f"{x:.0f}" if x < 9999.5 else f"{x / 1000:.0f}k"


def _cells(r: ReplayResult) -> dict[str, str]:
    return {
        "pool": f"{r.pool_tokens:,}",
        "page\nsize": str(r.page_size),
        "\nsteps": str(r.steps),
        "retrac-\ntions": str(r.retractions),
        "held\nmean": f"{r.occupancy_mean:.1%}",
        "\npeak": f"{r.occupancy_peak:.0%}",
        "waste\nmean": f"{r.waste_mean:,.0f}",
        "\nshare": f"{r.waste_share:.1%}",
        "alloc\n/s": f"{r.allocations_per_s / 1000:,.1f}k",
        "us\np50": _four_digits(r.step_p50_us),
        "\np99": _four_digits(r.step_p99_us),
        "\nmax": _four_digits(r.step_max_us),
        "\ndigest": r.digest[:6],
    }


def plot(results: Sequence[ReplayResult], path: str | os.PathLike[str]) -> None:
    """Draw occupancy over time, and waste by page size.

    Parameters
    ----------
    results : sequence of ReplayResult
        Replays of one trace.
    path : str or os.PathLike
        The image to write; its suffix says the format.

    Raises
    ------
    ImportError
        Without matplotlib; the message says what to install.
    ValueError
        If matplotlib does not write that format.
    OSError
        If the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('plots need matplotlib: pip install "cupaged[plot]"') from None
    figure = Figure(figsize=(11, 7), layout="constrained")
    over_time, by_page = figure.subplots(2, 1, height_ratios=(2, 1))
    pools = sorted({r.pool_tokens for r in results})
    for r in results:
        pool = f", pool {r.pool_tokens:,}" if len(pools) > 1 else ""
        seconds, share = zip(*r.timeline, strict=True) if r.timeline else ((), ())
        over_time.plot(seconds, [100 * x for x in share], label=f"page size {r.page_size}{pool}", linewidth=1)
    over_time.set(title=results[0].trace, xlabel="seconds", ylabel="pool held, %", ylim=(0, 105))
    figure.legend(loc="outside right upper", fontsize="small")
    for pool_tokens in pools:
        rows = sorted((r.page_size, r.waste_mean) for r in results if r.pool_tokens == pool_tokens)
        by_page.plot(*zip(*rows, strict=True), marker="o")
    by_page.set(xlabel="page size", ylabel="slots wasted, mean", xscale="log")
    ticks = sorted({r.page_size for r in results})
    by_page.set_xticks(ticks, [str(t) for t in ticks], minor=False)
    by_page.minorticks_off()
    by_page.legend([f"pool {pool_tokens:,}" for pool_tokens in pools], fontsize="small")
    figure.savefig(path, dpi=120)
