"""SGLang's paged allocator as a model that can be checked by eye, and random scheduling that compares two of them.

The model hands out one token at a time. `NewModel` has the attributes of SGLang 0.5.20 and later, `OldModel` those
before. They stand for SGLang's class where SGLang is not installed, and their arithmetic for its Triton kernels where
there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch


def long(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def slots_of(prefix_lens, seq_lens, last_loc, pages, page_size: int) -> list[int]:
    """Slots of the new tokens: each follows the one before it, or begins the next of `pages`."""
    taken = iter(pages)
    slots = []
    for prefix, seq, slot in zip(prefix_lens, seq_lens, last_loc, strict=True):
        for position in range(prefix, seq):
            slot = next(taken, 0) * page_size if position % page_size == 0 else slot + 1
            slots.append(slot)
    return slots


def pages_begun(prefix_lens, seq_lens, page_size: int) -> int:
    starts = (
        position % page_size == 0 for p, s in zip(prefix_lens, seq_lens, strict=True) for position in range(p, s)
    )
    return sum(starts)


class Kernel:
    """Takes the place of one of SGLang's Triton kernels, ``kernel[grid](...)``, on the CPU."""

    def __init__(self, decode: bool) -> None:
        self.decode = decode

    def __getitem__(self, grid):
        return self.run

    def run(self, *args) -> None:
        *prefix, seq, last, pages, out, _, page_size = args
        after = seq.tolist()
        before = [n - 1 for n in after] if self.decode else prefix[0].tolist()
        out[:] = torch.tensor(slots_of(before, after, last.tolist(), pages.tolist(), page_size), dtype=out.dtype)


class Model:
    def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
        self.size, self.page_size, self.num_pages = size, page_size, size // page_size
        self.dtype, self.device, self._kvcache, self.need_sort = dtype, device, kvcache, need_sort
        self.debug_mode = False
        self.free_pages = self.release_pages = self.free_group = None
        self.clear()

    def clear(self):
        self.free_pages = long(*range(1, self.num_pages + 1))
        self._set_aside([])

    def resize(self, config):
        self.size = config.max_total_num_tokens
        self.num_pages = self.size // self.page_size
        self.clear()

    def available_size(self):
        return (len(self.free_pages) + len(self._aside())) * self.page_size

    def merge_and_sort_free(self):
        if len(self._aside()):
            pages = self.free_pages.tolist() + self._aside()
            self._set_aside([])
            self.free_pages = long(*sorted(pages))

    def _take(self, bound, number):
        if bound > len(self.free_pages):
            self.merge_and_sort_free()
        if number > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:number].tolist(), self.free_pages[number:]
        return taken

    def _allocate(self, bound, before, after, last):
        pages = self._take(bound, pages_begun(before, after, self.page_size))
        return None if pages is None else long(*slots_of(before, after, last, pages, self.page_size))

    def alloc(self, need_size):
        number = need_size // self.page_size
        return self._allocate(number, [0], [number * self.page_size], [-1])

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages=None
    ):
        bound = extend_num_tokens // self.page_size + len(seq_lens) + 1
        return self._allocate(bound, prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist())

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc):
        return self._allocate(len(seq_lens), (seq_lens - 1).tolist(), seq_lens.tolist(), last_loc.tolist())

    def free(self, free_index):
        if self._is_group_open():
            self.free_group.append(free_index)
        elif free_index.numel():
            self._give_back(sorted({slot // self.page_size for slot in free_index.flatten().tolist()}))

    def _give_back(self, pages):
        if self.need_sort:
            self._set_aside(self._aside() + pages)
        else:
            self.free_pages = long(*pages, *self.free_pages)


class NewModel(Model):
    def clear(self):
        super().clear()
        self.free_group, self.free_page_ids_group = None, []

    def _is_group_open(self):
        return self.free_group is not None

    def _aside(self):
        return [page for pages in self.staged_pages for page in pages.tolist()]

    def _set_aside(self, pages):
        self.staged_pages = [long(*pages)] if pages else []
        self.num_staged_pages = len(pages)

    def get_all_free_pages(self):
        return torch.cat([self.free_pages, *self.staged_pages])

    def free_segment(self, free_index, *, start_pos):
        assert start_pos % self.page_size == 0
        self.free_page_ids(free_index[:: self.page_size] // self.page_size)

    def free_page_ids(self, page_ids):
        if self._is_group_open():
            self.free_page_ids_group.append(page_ids)
        else:
            self._give_back(page_ids.tolist())

    def _release_page_ids(self, *page_ids):
        self._give_back(torch.cat(page_ids).tolist())

    def free_group_begin(self):
        self.free_group, self.free_page_ids_group = [], []

    def free_group_end(self):
        slots, self.free_group = self.free_group, None
        pages, self.free_page_ids_group = self.free_page_ids_group, []
        if slots:
            self.free(torch.cat(slots))
        if pages:
            self._release_page_ids(*pages)


class OldModel(Model):
    def clear(self):
        super().clear()
        self.free_group, self.is_not_in_free_group = [], True

    def _is_group_open(self):
        return not self.is_not_in_free_group

    def _aside(self):
        return [] if self.release_pages is None else self.release_pages.tolist()

    def _set_aside(self, pages):
        self.release_pages = long(*pages)

    def backup_state(self):
        return self.free_pages, self.release_pages

    def restore_state(self, state):
        self.free_pages, self.release_pages = state

    def free_group_begin(self):
        self.free_group, self.is_not_in_free_group = [], False

    def free_group_end(self):
        self.is_not_in_free_group = True
        if self.free_group:
            self.free(torch.cat(self.free_group))


class Scheduling:
    """Random operations on SGLang's allocator and on ours, with the same arguments; all results must be equal."""

    usual: Sequence[str] = (
        *("extend",) * 4,
        *("decode",) * 6,
        *("alloc", "free", "finish", "finish", "group", "pages", "rare"),
    )
    rare: Sequence[str] = ("merge", "backup", "assign", "fill", "clear", "resize")
    frees: Sequence[str] = ("_free", "_finish", "_pages")
    with_counts = True

    def __init__(self, reference, ours, seed: int, device: str = "cpu") -> None:
        self.pair, self.rng, self.device = (reference, ours), np.random.default_rng(seed), device
        self.page_size = reference.page_size
        self.largest = reference.size // self.page_size
        self.requests: list[torch.Tensor] = []  # the slots of each request, on the host
        self.counts: dict[str, int] = {}

    def run(self, operations: int) -> dict[str, int]:
        while sum(self.counts.values()) < operations:
            name = str(self.rng.choice(self.usual))
            if name == "rare":
                name = str(self.rng.choice(self.rare))
            outcome = getattr(self, "_" + name)()
            if outcome is not None:
                key = f"{name}:{outcome}" if outcome else name
                self.counts[key] = self.counts.get(key, 0) + 1
                self.compare(key)
        self.check()
        return self.counts

    def check(self) -> None:
        """Nothing that the device recorded as wrong: what was compared was not two ways to be wrong."""
        self.pair[1]._core.check()

    def compare(self, what: str) -> None:
        reference, ours = self.pair
        assert torch.equal(reference.free_pages, ours.free_pages), what
        assert reference.available_size() == ours.available_size(), what
        if hasattr(reference, "get_all_free_pages"):
            assert torch.equal(reference.get_all_free_pages(), ours.get_all_free_pages()), what
        else:
            assert torch.equal(reference.release_pages.sort()[0], ours.release_pages.sort()[0]), what
        assert ours.free_pages.dtype == torch.int64
        assert ours.free_pages.device == reference.free_pages.device

    # ---- operations: '' or more to be counted, None if there was nothing to do -----------------------------------

    def both(self, method: str, *args, **kwargs):
        expected, got = (getattr(allocator, method)(*args, **kwargs) for allocator in self.pair)
        assert (expected is None) == (got is None), (method, expected, got)
        if expected is not None:
            assert got.dtype == expected.dtype == torch.int64
            assert got.device == expected.device
            assert torch.equal(expected, got), (method, expected, got)
        return None if got is None else got.cpu()

    def tensor(self, values) -> torch.Tensor:
        kind = torch.int32 if self.rng.integers(4) == 0 else torch.int64
        return torch.tensor(values, dtype=kind, device=self.device)

    def lengths(self, values) -> tuple[torch.Tensor, torch.Tensor]:
        on_host = torch.tensor(values, dtype=torch.int64)
        return on_host.to(self.device), on_host

    def last(self, requests) -> torch.Tensor:
        return self.tensor([int(slots[-1]) if len(slots) else -1 for slots in requests])

    def some(self, most: int) -> list[int]:
        number = int(self.rng.integers(1, 1 + min(most, len(self.requests))))
        return self.rng.choice(len(self.requests), number, replace=False).tolist()

    def _extend(self, tokens: int | None = None):
        self.requests += [torch.zeros(0, dtype=torch.int64)] * int(self.rng.integers(0, 4))
        if not self.requests:
            return None
        chosen = self.some(6)
        most = int(self.rng.choice([2, self.page_size, 3 * self.page_size + 1])) if tokens is None else tokens
        prefix = [len(self.requests[i]) for i in chosen]
        new = self.rng.integers(0, most + 1, len(chosen)).tolist()
        after = [p + n for p, n in zip(prefix, new, strict=True)]
        (p, p_cpu), (s, s_cpu) = self.lengths(prefix), self.lengths(after)
        counted = {}
        if self.with_counts and self.rng.integers(2):
            counted["num_new_pages"] = pages_begun(prefix, after, self.page_size)
        last = self.last([self.requests[i] for i in chosen])
        slots = self.both("alloc_extend", p, p_cpu, s, s_cpu, last, sum(new), **counted)
        if slots is None:
            return "None"
        for i, part in zip(chosen, slots.split(new), strict=True):
            self.requests[i] = torch.cat([self.requests[i], part])
        return ""

    def _decode(self):
        running = [i for i in range(len(self.requests)) if len(self.requests[i])]
        if not running:
            return None
        s, s_cpu = self.lengths([len(self.requests[i]) + 1 for i in running])
        slots = self.both("alloc_decode", s, s_cpu, self.last([self.requests[i] for i in running]))
        if slots is None:
            return "None"
        for i, slot in zip(running, slots.split(1), strict=True):
            self.requests[i] = torch.cat([self.requests[i], slot])
        return ""

    def _alloc(self):
        slots = self.both("alloc", int(self.rng.integers(0, 4 * self.page_size)))
        if slots is None:
            return "None"
        if len(slots):
            self.requests.append(slots)
        return ""

    def _fill(self):
        return self._extend(tokens=self.largest * self.page_size // 2)

    def _cut(self) -> tuple[torch.Tensor, int] | None:
        """Take a request's tokens from a page-aligned position on."""
        if not self.requests:
            return None
        i = int(self.rng.integers(len(self.requests)))
        slots = self.requests.pop(i)
        start = int(self.rng.integers(0, 1 + len(slots) // self.page_size)) * self.page_size
        start = 0 if self.rng.integers(2) else start
        if start:
            self.requests.append(slots[:start])
        return slots[start:].to(self.device), start

    def _free(self):
        cut = self._cut()
        if cut is None:
            return None
        slots = cut[0][torch.randperm(len(cut[0]), generator=self.generator(), device="cpu").to(self.device)]
        self.both("free", slots.to(torch.int32) if self.rng.integers(4) == 0 else slots)
        return ""

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(int(self.rng.integers(1 << 30)))

    def _finish(self):
        cut = self._cut()
        if cut is None:
            return None
        slots, start = cut
        if not hasattr(self.pair[0], "free_segment"):
            self.both("free", slots)
            return "free"
        if hasattr(self.pair[0], "free_segments") and self.rng.integers(2):
            middle = start + (len(slots) // self.page_size + 1) // 2 * self.page_size
            self.both("free_segments", [(slots[: middle - start], start), (slots[middle - start :], middle)])
            return "segments"
        self.both("free_segment", slots, start_pos=start)
        return ""

    def _pages(self):
        if not hasattr(self.pair[0], "free_page_ids"):
            return None
        cut = self._cut()
        if cut is None:
            return None
        pages = torch.unique(cut[0] // self.page_size)
        self.both("free_page_ids", pages[torch.randperm(len(pages), generator=self.generator()).to(self.device)])
        return ""

    def _group(self):
        self.both("free_group_begin")
        for _ in range(int(self.rng.integers(0, 5))):
            getattr(self, str(self.rng.choice(self.frees)))()
            self.compare("in a group")
        if self.rng.integers(4) == 0:
            self._decode()
        self.both("free_group_end")
        return ""

    def _merge(self):
        self.both("merge_and_sort_free")
        return ""

    def _backup(self):
        if not hasattr(self.pair[0], "backup_state"):
            return None
        states = [allocator.backup_state() for allocator in self.pair]
        before = list(self.requests)
        for _ in range(int(self.rng.integers(0, 4))):
            getattr(self, str(self.rng.choice(["_extend", "_decode"])))()
        for allocator, state in zip(self.pair, states, strict=True):
            allocator.restore_state(state)
        self.requests = before
        return ""

    def _assign(self):
        """What SGLang's `restore_state` and out-of-tree allocators do: keep the lists, and assign them later."""
        aside = "staged_pages" if hasattr(self.pair[0], "staged_pages") else "release_pages"
        states = [(a.free_pages, getattr(a, aside), getattr(a, "num_staged_pages", 0)) for a in self.pair]
        if aside == "staged_pages":
            states = [(free, [*staged], number) for free, staged, number in states]
        before = list(self.requests)
        for _ in range(int(self.rng.integers(0, 4))):
            getattr(self, str(self.rng.choice(["_extend", "_decode", "_alloc", "_finish"])))()
        for allocator, (free, staged, number) in zip(self.pair, states, strict=True):
            allocator.free_pages = free
            setattr(allocator, aside, staged)
            if hasattr(allocator, "num_staged_pages"):
                allocator.num_staged_pages = number
        self.requests = before
        return ""

    def _clear(self):
        self.both("clear")
        self.requests = []
        return ""

    def _resize(self):
        if not hasattr(self.pair[0], "resize"):
            return None
        pages = int(self.rng.integers(1, self.largest + 5))
        self.both("resize", SimpleNamespace(max_total_num_tokens=pages * self.page_size + 1))
        self.requests = []
        return ""
