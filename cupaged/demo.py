"""The worked example of docs/design.md, computed by the allocator, and a drawing of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from cupaged.interop import to_host
from cupaged.paged import PagedTokenToKVPoolAllocator

__all__ = ["Demo", "Part", "draw", "run"]

PAGE_SIZE, PAGES = 64, 9
LENGTHS = {"A": (70, 190), "B": (128, 260)}  # tokens before and after the batch
CELLS = 32  # of a drawn page
STYLES = {"A": "white on blue", "B": "white on dark_green", "a": "bright_blue", "b": "green"}


@dataclass(frozen=True)
class Part:
    """A run of output slots that one request gets in one go.

    Attributes
    ----------
    request : str
        Whose.
    what : str
        ``rest of its old page``, ``whole new pages`` or ``start of a new page``.
    pages : list of int
        Where they lie.
    first, last, count : int
        The slots.
    """

    request: str
    what: str
    pages: list[int]
    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Demo:
    """The example's batch, and what came of it.

    Attributes
    ----------
    backend, device : str
        What computed it.
    page_size : int
        Slots in a page.
    lengths : dict
        Tokens before and after, by request.
    cells : dict
        By page, one letter a slot: the request's small where the token was there before, large where it is new,
        a dot where nobody has written.
    slots : list of int
        Output of the batch.
    parts : list of Part
        The same, cut where pages begin.
    new_pages : list of int
        Pages that it took, in order.
    """

    backend: str
    device: str
    page_size: int
    lengths: dict[str, tuple[int, int]]
    cells: dict[int, str]
    slots: list[int]
    parts: list[Part]
    new_pages: list[int]


def run(backend: str = "auto") -> Demo:
    """Allocate the example's batch.

    Parameters
    ----------
    backend : str
        As for `PagedTokenToKVPoolAllocator`.
    """
    pool = PagedTokenToKVPoolAllocator(PAGES * PAGE_SIZE, PAGE_SIZE, backend=backend)
    prefix, seq = (list(column) for column in zip(*LENGTHS.values(), strict=True))
    old = _split(pool.alloc_extend([0, 0], prefix, [-1, -1], sum(prefix)), prefix)
    new_counts = [s - p for p, s in LENGTHS.values()]
    slots = to_host(pool.alloc_extend(prefix, seq, [o[-1] for o in old], sum(new_counts))).tolist()
    pool.check()
    new = _split(slots, new_counts)
    taken = {slot // PAGE_SIZE for slots in old for slot in slots}
    return Demo(
        backend=pool.backend.name,
        device=pool.device,
        page_size=PAGE_SIZE,
        lengths=dict(LENGTHS),
        cells=_cells(old, new),
        slots=slots,
        parts=[part for name, mine in zip(LENGTHS, new, strict=True) for part in _parts(name, mine, taken)],
        new_pages=[page for page in dict.fromkeys(slot // PAGE_SIZE for slot in slots) if page not in taken],
    )


def _split(slots: Any, counts: list[int]) -> list[list[int]]:
    values, ends = to_host(slots) if hasattr(slots, "shape") else slots, [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return [[int(s) for s in values[a:b]] for a, b in pairwise(ends)]


def _cells(old: list[list[int]], new: list[list[int]]) -> dict[int, str]:
    letters = ["."] * ((PAGES + 1) * PAGE_SIZE)
    for name, before, after in zip(LENGTHS, old, new, strict=True):
        for slot in before:
            letters[slot] = name.lower()
        for slot in after:
            letters[slot] = name
    return {page: "".join(letters[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]) for page in range(PAGES + 1)}


def _parts(name: str, slots: list[int], taken: set[int]) -> list[Part]:
    by_page = {page: list(run) for page, run in groupby(slots, lambda slot: slot // PAGE_SIZE)}

    def what(page: int) -> str:
        if page in taken:
            return "rest of its old page"
        return "whole new pages" if len(by_page[page]) == PAGE_SIZE else "start of a new page"

    parts = []
    for kind, group in groupby(by_page, what):
        pages = list(group)
        mine = [slot for page in pages for slot in by_page[page]]
        parts.append(Part(name, kind, pages, mine[0], mine[-1], len(mine)))
    return parts


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw(demo: Demo) -> Any:
    """Make a picture of it, for `rich` to print."""
    from rich.console import Group
    from rich.text import Text

    header = Text(f"One batch, page size {demo.page_size}, computed by {demo.backend} on {demo.device}\n", "bold")
    for name, (before, after) in demo.lengths.items():
        header.append(f"  {name} has {before} tokens in the cache and shall have {after}\n", "default not bold")
    legend = Text(
        f"a letter is {demo.page_size // CELLS} slots; small: written before, large: new, dot: nobody's\n", "dim"
    )
    new_pages = ", ".join(map(str, demo.new_pages))
    output = Text(f"out_indices: {len(demo.slots)} slots in {len(demo.parts)} parts; new pages {new_pages}", "bold")
    return Group(header, _page_table(demo), legend, output, _part_table(demo))


def _page_table(demo: Demo) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for title, justify in (("page", "right"), ("", "left"), ("slots", "right"), ("who", "left")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    size = demo.page_size
    for page, letters in demo.cells.items():
        who = "padding, never handed out" if page == 0 else _who(letters)
        table.add_row(str(page), _bar(letters), f"{page * size}-{(page + 1) * size - 1}", who)
    return table


def _bar(letters: str) -> Any:
    from rich.text import Text

    bar = Text()
    for letter, run in groupby(letters[:: len(letters) // CELLS]):
        bar.append("".join(run), STYLES.get(letter, "dim"))
    return bar


def _who(letters: str) -> str:
    if set(letters) == {"."}:
        return "free"
    owner = next(c for c in letters if c != ".").upper()
    counts = (letters.count(owner.lower()), letters.count(owner), letters.count("."))
    words = (f"{counts[0]} before", f"{counts[1]} new", f"room for {counts[2]}")
    return f"{owner}: " + ", ".join(word for count, word in zip(counts, words, strict=True) if count)


def _part_table(demo: Demo) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name, justify in (("", "left"), ("slots", "right"), ("from - to", "right"), ("what", "left")):
        table.add_column(name, justify=justify, header_style="dim", no_wrap=True)  # type: ignore[arg-type]
    for part in demo.parts:
        pages = ", ".join(map(str, part.pages))
        table.add_row(
            Text(f" {part.request} ", STYLES[part.request]),
            str(part.count),
            f"{part.first} - {part.last}",
            f"{part.what}: {pages}",
        )
    return table
