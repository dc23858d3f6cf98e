"""The bars: what was asked, what was measured, and whether it holds, each from ratios within one run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["bars"]

STATE_US = {"decode": 0.7, "extend": 1.2}  # what owners, counters and mail may cost
SLOW_US = 4.0  # from here on nothing is allowed for them
SYNC_MS = 10.0  # half of the kernel that a call is made behind


def _time(row: dict[str, Any], name: str) -> float | None:
    figure = row["figures"].get(name)
    return None if figure is None else float(figure["median"])


class _Rows:
    """Rows by key, and pairs of times in them."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = list(rows)

    def pairs(self, ours: str, other: str, *beginnings: str) -> list[tuple[str, float, float]]:
        """Key and both times of each row whose key begins so, and that has both."""
        found = []
        for row in self.rows:
            if not row["key"].startswith(beginnings):
                continue
            mine, theirs = _time(row, ours), _time(row, other)
            if mine is not None and theirs is not None:
                found.append((row["key"], mine, theirs))
        return found

    def failed(self, name: str, *beginnings: str) -> list[str]:
        """Keys of rows in which a contestant failed."""
        return [row["key"] for row in self.rows if row["key"].startswith(beginnings) and name in row["errors"]]


def _bar(number: int, text: str, asked: str, measured: str | None, passed: bool | None, where: str = "") -> dict:
    return {"bar": number, "text": text, "asked": asked, "measured": measured, "passed": passed, "where": where}


def _at_least(
    rows: _Rows, number: int, text: str, ask: float, ours: str, other: str, *keys: str, aim: bool = False
) -> dict:
    """The lowest of all ratios other / ours, which must be at least `ask`."""
    failed = rows.failed(ours, *keys)
    pairs = rows.pairs(ours, other, *keys)
    asked = f"at least {ask:g} x"
    if failed:
        return _bar(number, text, asked, "failed", False, failed[0])
    if not pairs:
        return _bar(number, text, asked, None, None)
    key, mine, theirs = min(pairs, key=lambda pair: pair[2] / pair[1])
    return _bar(number, text, asked, f"{theirs / mine:.1f} x", theirs / mine >= ask, key)


def _at_most(rows: _Rows, number: int, text: str, ask: float, pairs: list, aim: bool = False) -> dict:
    """The highest of all ratios ours / other, which must be at most `ask`."""
    asked = f"at most {ask:g} x"
    if not pairs:
        return _bar(number, text, asked, None, None)
    key, mine, theirs = max(pairs, key=lambda pair: pair[1] / pair[2])
    return _bar(number, text, asked, f"{mine / theirs:.2f} x", mine / theirs <= ask, key)


def bars(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Hold rows to the bars.

    Parameters
    ----------
    rows : iterable of dict
        As a run gives them.

    Returns
    -------
    list of dict
        ``bar`` (its number), ``text``, ``asked``, ``measured``, ``passed`` and ``where`` (the row that decided).
        What no row tells of has None for `measured` and `passed`.
    """
    given = _Rows(rows)
    return [
        *_against_the_per_request_kernel(given),
        *_at_scale(given),
        *_on_the_host(given),
        *_starting(given),
        _waiting(given),
        *_on_the_cpu(given),
        *_growing(given),
    ]


def _against_the_per_request_kernel(rows: _Rows) -> list[dict]:
    found = []
    for kind, allowed in STATE_US.items():
        begin = f"kernel/{kind}/"
        pairs, failed = rows.pairs("cupy", "triton", begin), rows.failed("cupy", begin)
        text, asked = f"GPU time of each {kind} over the per-request kernel's", f"at most {allowed:g} us more"
        if failed:
            found.append(_bar(1, text, asked, "failed", False, failed[0]))
        elif not pairs:
            found.append(_bar(1, text, asked, None, None))
        else:
            key, mine, theirs = max(pairs, key=lambda pair: pair[1] - pair[2])
            more = mine - theirs
            found.append(_bar(1, text, asked, f"{more:.2f} us more", more <= allowed, key))
    slow = [pair for pair in rows.pairs("cupy", "triton", "kernel/decode/", "kernel/extend/") if pair[2] >= SLOW_US]
    found.append(_at_most(rows, 1, f"GPU time where the per-request kernel takes {SLOW_US:g} us or more", 1.0, slow))
    return found


def _at_scale(rows: _Rows) -> list[dict]:
    found = [
        _at_least(rows, 2, text, ask, "cupy", "triton", f"kernel/{key}")
        for text, ask, key in (
            ("GPU time, decode of 4,096", 5, "decode/4096"),
            ("GPU time, decode of 16,384", 30, "decode/16384"),
            ("GPU time, one extend of 1M tokens", 30, "extend/1x1048576"),
            ("GPU time, 1M tokens and 255 x 16", 20, "extend/1x1M+255x16"),
            ("GPU time, 4,096 requests of 4 tokens", 2, "extend/4096x4"),
        )
    ]
    large = [row["key"] for row in rows.rows if row["key"].startswith("kernel/extend/") and row["size"] >= 1 << 20]
    pairs = [pair for key in large for pair in rows.pairs("cupy", "write", key)]
    found.append(_at_most(rows, 2, "GPU time from 1M tokens up over a pure write of the slots", 3.0, pairs))
    return found


def _on_the_host(rows: _Rows) -> list[dict]:
    return [
        _at_least(rows, 3, text, ask, "cupy", "engine", *keys)
        for text, ask, keys in (
            ("host time of alloc_decode", 4, ("call/decode/",)),
            ("host time of alloc_extend", 5, ("call/extend/",)),
            ("host time of free and alloc of 256 pages", 10, ("call/free+alloc/",)),
            ("host time of KVAllocator.alloc", 5, ("kv/alloc/",)),
            ("host time of a whole decode step", 8, ("call/step/",)),
            ("GPU time of a whole decode step", 3, ("kernel/step/",)),
            ("host time of alloc_batch of 256 over 256 single calls of engines", 500, ("kv/step/256",)),
            ("host time of the group free of 256 requests", 20, ("kv/group_free/256",)),
        )
    ]


def _starting(rows: _Rows) -> list[dict]:
    by_key = {
        row["key"].partition("/")[0] + "/" + row["key"].partition("/")[2].split(" ")[0]: row for row in rows.rows
    }

    def bar(key: str, text: str, ask: float, unit: str) -> dict:
        asked = f"at most {ask:g} {unit}" if ask else "none"
        row = by_key.get(key)
        if row is None or not ({"cupy"} & {*row["figures"], *row["errors"]}):
            return _bar(4, text, asked, None, None)
        value = _time(row, "cupy")
        if value is None:
            return _bar(4, text, asked, "failed", False, row["key"])
        shown = f"{value:.0f}" if not ask else f"{value:.3f} {unit}"
        return _bar(4, text, asked, shown, value <= ask, row["key"])

    return [
        bar("compile/24", "kernels compiled after warmup(), whatever the batch's shape", 0, "kernels"),
        bar("first/cold", "first result, every kernel compiled", 2.0, "s"),
        bar("first/disk", "first result, kernels from the cache on disk", 0.1, "s"),
    ]


def _waiting(rows: _Rows) -> dict:
    text, asked = "calls that wait for the GPU while the pool is not nearly full", "none"
    of_sync = [row for row in rows.rows if row["key"].startswith("sync/")]
    failed = rows.failed("cupy", "sync/")
    times = [(row["key"], time) for row in of_sync if (time := _time(row, "cupy")) is not None]
    if failed:
        return _bar(5, text, asked, "failed", False, failed[0])
    if not times:
        return _bar(5, text, asked, None, None)
    waiting = [key for key, time in times if time > SYNC_MS]
    key, longest = max(times, key=lambda pair: pair[1])
    measured = f"{len(waiting)} of {len(times)}; the longest took {longest:.2f} ms"
    return _bar(5, text, asked, measured, not waiting, key)


def _on_the_cpu(rows: _Rows) -> list[dict]:
    found = []
    for kind in ("decode", "extend"):
        for other in ("numpy ops", "torch ops"):
            text = f"CPU time of each {kind} over vectorised {other.partition(' ')[0]}"
            found.append(_at_least(rows, 6, text, 5, "numba", other, f"cpu/{kind}/"))
    return found


def _growing(rows: _Rows) -> list[dict]:
    """What the scale run is held to; it has one contestant, whichever backend it ran on."""
    found = []

    def figure(row: dict[str, Any]) -> tuple[str, float]:
        name = next(iter(row["figures"]))
        return name, float(row["figures"][name]["median"])

    of_scale = [row for row in rows.rows if row["key"].startswith("scale/") and row["figures"]]
    memory = [
        (row["key"], figure(row)[1]) for row in of_scale if row["unit"] == "bytes a page" and row["size"] >= 10**6
    ]
    if memory:
        key, most = max(memory, key=lambda pair: pair[1])
        text = "state on the device, pools of 1M pages and more"
        found.append(_bar(7, text, "at most 24 bytes a page", f"{most:.1f}", most <= 24, key))
    by_end = {row["key"].rpartition("/")[2]: row for row in of_scale if " calls/" in row["key"]}
    if "start" in by_end and "end" in by_end:
        start, end = figure(by_end["start"])[1], figure(by_end["end"])[1]
        text = f"a call's time after {by_end['end']['size']:,} calls over that at the start"
        found.append(_bar(7, text, "at most 1.1 x", f"{end / start:.2f} x", end <= 1.1 * start, by_end["end"]["key"]))
    for key, text in (("host", "growth of the process meanwhile"), ("device", "growth on the device meanwhile")):
        if key in by_end:
            grown = figure(by_end[key])[1]
            found.append(_bar(7, text, "at most 4 MiB", f"{grown:.1f} MiB", grown <= 4, by_end[key]["key"]))
    return found
