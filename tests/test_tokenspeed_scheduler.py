"""`KVAllocator` as a scheduler of TokenSpeed's kind drives it, against a model in plain Python.

Requests speculate: each step has slots for a verified token and `DRAFTS` more, whatever of them is accepted, so a
request's `alloced_len` runs ahead of its `real_seq_len`. Requests that end leave their full pages to a prefix cache,
if there is one, and free the rest. A cache of tokens stands for K and V: whoever reads another one's slots finds it
out.
"""

from __future__ import annotations

from collections import Counter, deque
from unittest import mock

import numpy as np
import pytest
import torch

import cupaged
from cupaged import backends
from cupaged.interop import to_host
from tests.host_backend import variant

ROWS, CONTEXT, DRAFTS = 6, 96, 3
BACKENDS = ("numba", "reference", "cuda-random")


class Model:
    """What the allocator promises, one token and one page after the other."""

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self.free = deque(range(1, pages + 1))
        self.owners: Counter[int] = Counter()
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.refs = [0] * ((pages + 1) * size)
        self.queue: list[int] = []  # pages, in the order in which they were told
        self.queued_rows: set[int] = set()

    def alloc(self, row: int, need: int, alloced: int) -> list[int] | None:
        return self.alloc_batch([(row, need, alloced)])

    def alloc_batch(self, wanted: list[tuple[int, int, int]]) -> list[int] | None:
        if self.queued_rows & {row for row, _, _ in wanted}:
            self.end_group()
        new = sum(self.pages_of(alloced + need) - self.pages_of(alloced) for _, need, alloced in wanted)
        if new > len(self.free):
            return None
        slots = []
        for row, need, alloced in wanted:
            pages = self.rows[row]
            del pages[self.pages_of(alloced) :]
            for token in range(alloced, alloced + need):
                if token // self.size == len(pages):
                    pages.append(self.free.popleft())
                    self.owners[pages[-1]] = 1
                slots.append(pages[token // self.size] * self.size + token % self.size)
        return slots

    def pages_of(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def free_row(self, row: int, first: int, end: int) -> None:
        self.queue += self.rows[row][first:end]
        self.queued_rows.add(row)

    def end_group(self) -> None:
        gone = []
        for page in self.queue:
            self.owners[page] -= 1
            assert self.owners[page] >= 0, "the scheduler frees a page twice"
            if self.owners[page] == 0:
                gone.append(page)
        for page in sorted(gone, key=self.queue.index):
            self.free.append(page)
            for slot in range(page * self.size, (page + 1) * self.size):
                self.refs[slot] = max(0, self.refs[slot] - 1)
        self.queue, self.queued_rows = [], set()

    def trim(self, row: int, length: int, keep: int) -> None:
        """At once, and the counts a slot stay."""
        gone = self.rows[row][self.pages_of(keep) : self.pages_of(length)]
        assert all(self.owners[page] == 1 for page in gone)
        for page in gone:
            self.owners[page] = 0
        self.free += gone
        del self.rows[row][self.pages_of(keep) :]


class Request:
    def __init__(self, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt  # all that it will ever have, and how many it begins with
        self.row = -1
        self.real = self.alloced = 0
        self.shared: list[int] = []  # pages at its start that it took from the cache


class Scheduler:
    """Makes every call twice: of the allocator, and of the model."""

    def __init__(self, backend: str, seed: int, size: int, cached: bool, batched: bool, device="cpu") -> None:
        self.rng = np.random.default_rng(seed)
        self.size, self.batched = size, batched
        pages = int(self.rng.integers(2 * CONTEXT, 3 * CONTEXT)) // size
        self.kv = make(backend, (pages + 1) * size, device, size)
        self.model = Model(pages, size)
        self.cells = [-1] * ((pages + 1) * size)  # the token that each slot holds
        self.cache: dict[tuple[int, ...], int] | None = {} if cached else None
        self.waiting = deque(self.request() for _ in range(25))
        self.running: list[Request] = []
        self.seen: Counter[str] = Counter()

    def request(self) -> Request:
        """Some begin alike: with one of three long prefixes."""
        head = [[k] * 40 for k in (1, 2, 3)][int(self.rng.integers(3))][: int(self.rng.integers(0, 41))]
        prompt = len(head) + int(self.rng.integers(1, 20))
        tokens = head + self.rng.integers(10, 10**6, prompt + int(self.rng.integers(1, 30)) - len(head)).tolist()
        return Request(tokens, prompt)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.kv.free_group_begin()
        self.allocate_ahead()
        self.verify()
        for request in [r for r in self.running if r.real == len(r.tokens)]:
            self.end(request)
        self.admit()  # into rows that have just been freed, too
        if self.rng.random() < 0.1:
            self.trim()
        self.end_group()
        self.compare()

    def allocate_ahead(self) -> None:
        while True:
            wanted = []
            for r in self.running:
                ahead = min(r.real + 1 + DRAFTS, CONTEXT)
                if ahead > r.alloced:
                    wanted.append((r, ahead - r.alloced))
            if self.allocate(wanted):
                return
            if not self.evict():
                self.retract()

    def allocate(self, wanted: list[tuple[Request, int]]) -> bool:
        if self.batched and wanted:
            calls = [(r.row, need, r.alloced) for r, need in wanted]
            got = self.kv.alloc_batch(*map(list, zip(*calls, strict=True)))
            expected = self.model.alloc_batch(calls)
            if got is None or expected is None:
                assert got is expected is None
                return False
            assert to_host(got[0]).tolist() == expected
            assert to_host(got[1]).tolist() == np.cumsum([0] + [need for _, need in wanted]).tolist()
            self.hand_out(expected, wanted)
            return True
        for request, need in wanted:
            got = self.kv.alloc(request.row, need, request.alloced)
            expected = self.model.alloc(request.row, need, request.alloced)
            if got is None or expected is None:
                assert got is expected is None
                return False
            assert to_host(got).tolist() == expected
            self.hand_out(expected, [(request, need)])
        return True

    def hand_out(self, slots: list[int], to: list[tuple[Request, int]]) -> None:
        for request, need in to:
            request.alloced += need
        for slot in slots:
            self.model.refs[slot] += 1
        if slots:
            self.kv.token_slot_refs[np.array(slots)] += 1

    def verify(self) -> None:
        """Drafts are written to all slots ahead; as many as are accepted stay."""
        for r in self.running:
            accepted = int(self.rng.integers(1, 2 + DRAFTS))
            for token in range(r.real, r.alloced):
                right = token < min(r.real + accepted, len(r.tokens))
                self.cells[self.slot(r, token)] = r.tokens[token] if right else -2
            r.real = min(r.real + accepted, len(r.tokens))
            self.seen["allocated ahead"] += self.model.pages_of(r.alloced) > self.model.pages_of(r.real)

    def slot(self, request: Request, token: int) -> int:
        return self.model.rows[request.row][token // self.size] * self.size + token % self.size

    # ---- beginning and ending --------------------------------------------------------------------------------------

    def admit(self) -> None:
        rows = [row for row in range(ROWS) if row not in {r.row for r in self.running}][::-1]
        while self.waiting and rows:  # None must leave nothing of a request behind
            request, row = self.waiting[0], rows[-1]
            shared = self.match(request)
            if shared and row in self.model.queued_rows:
                self.end_group()  # before the engine writes cells of a row whose pages are queued
            request.row, request.shared = row, shared
            request.real = request.alloced = len(shared) * self.size
            if shared:
                self.kv.retain(shared)
                self.write_row(row, shared)
                self.model.owners.update(shared)
                self.model.rows[row] = list(shared)
                self.seen["shared"] += 1
            if not self.allocate([(request, request.prompt - request.real)]):
                self.kv.append_to_later_free(shared)
                self.model.queue += shared
                self.seen["not admitted"] += 1
                if not self.running:  # nobody else will make room
                    self.evict()
                return
            for token in range(request.real, request.prompt):
                self.cells[self.slot(request, token)] = request.tokens[token]
            request.real = request.prompt
            self.running.append(request)
            self.waiting.popleft()
            rows.pop()

    def write_row(self, row: int, pages: list[int]) -> None:
        """As the engine does, into the allocator's own table."""
        table = self.kv.req_to_page
        table[row, : len(pages)] = torch.tensor(pages).to(table) if isinstance(table, torch.Tensor) else pages

    def match(self, request: Request) -> list[int]:
        """Pages of the longest cached prefix, which leaves a token to compute."""
        found: list[int] = []
        while self.cache and (len(found) + 1) * self.size < request.prompt:
            page = self.cache.get(tuple(request.tokens[: (len(found) + 1) * self.size]))
            if page is None:
                break
            found.append(page)
        return found

    def end(self, request: Request) -> None:
        row, real, alloced = request.row, request.real, request.alloced
        self.running.remove(request)
        if self.cache is None:
            self.kv.free_req_cache(row, alloced)
            self.model.free_row(row, 0, self.model.pages_of(alloced))
            return
        full, shared = real // self.size, len(request.shared)
        own = self.model.rows[row][shared:full]
        held = []
        for i, page in enumerate(own, shared):
            held.append(self.cache.setdefault(tuple(request.tokens[: (i + 1) * self.size]), page))
        self.kv.append_to_later_free(request.shared)
        mask = self.kv.free_with_diff(np.array(held, np.int64), np.array(own, np.int64))
        assert mask.tolist() == [a != b for a, b in zip(held, own, strict=True)]
        self.kv.free_extra_pages_not_cached(row, real, alloced)
        self.model.queue += request.shared
        self.model.queue += [b for a, b in zip(held, own, strict=True) if a != b]
        self.model.free_row(row, full, self.model.pages_of(alloced))
        self.seen["computed twice"] += any(mask.tolist())
        self.seen["extra pages"] += self.model.pages_of(alloced) > full

    def evict(self) -> bool:
        """Give up cached pages that nobody else owns, the longest prefixes first."""
        idle = [key for key, page in (self.cache or {}).items() if self.model.owners[page] == 1]
        gone = [self.cache.pop(key) for key in sorted(idle, key=len)[-4:]]
        if not gone:
            return False
        self.kv.append_to_later_free(gone)
        self.model.queue += gone
        self.end_group()
        self.seen["evicted"] += 1
        return True

    def retract(self) -> None:
        """The newest starts over: all of its pages go, those of the cache by one owner each."""
        request = self.running.pop()
        self.kv.free_req_cache(request.row, request.alloced)
        self.model.free_row(request.row, 0, self.model.pages_of(request.alloced))
        self.waiting.appendleft(request)
        self.end_group()
        self.seen["retracted"] += 1

    def trim(self) -> None:
        """Give back the pages that are only ahead, in one call for all that run."""
        if not self.running:
            return
        rows, have, real = ([getattr(r, name) for r in self.running] for name in ("row", "alloced", "real"))
        self.kv.trim(self.kv.req_to_page, rows, have, real)
        for r in self.running:
            self.model.trim(r.row, r.alloced, r.real)
            r.alloced = r.real
        self.seen["trimmed"] += 1

    def end_group(self) -> None:
        self.kv.free_group_end()
        self.model.end_group()
        self.kv.free_group_begin()

    # ---- what must be so -------------------------------------------------------------------------------------------

    def compare(self) -> None:
        kv, model = self.kv, self.model
        assert kv.available_size() == len(model.free)
        assert to_host(kv.free_slots).tolist() == list(model.free)
        owners = kv.pool.snapshot()[1]
        assert owners[1:].tolist() == [model.owners[page] for page in range(1, len(owners))]
        assert to_host(kv.token_slot_refs).tolist() == model.refs
        table = to_host(kv.req_to_page)
        for r in self.running:
            pages = model.rows[r.row]
            assert table[r.row, : len(pages)].tolist() == pages
            assert (int(kv.num_pages[r.row]), int(kv.last_slot[r.row])) == (len(pages), (r.alloced - 1) % self.size)
            assert [self.cells[self.slot(r, token)] for token in range(r.real)] == r.tokens[: r.real]
        for row in set(range(ROWS)) - {r.row for r in self.running}:
            assert (int(kv.num_pages[row]), int(kv.last_slot[row])) == (0, self.size - 1)
        kv.check()
        kv.check_integrity()


def make(backend: str, slots: int, device, size: int) -> cupaged.KVAllocator:
    if backend == "cuda-random":
        with mock.patch.object(backends, "pick", return_value=variant("random")):
            return cupaged.KVAllocator(slots, "cuda", ROWS, CONTEXT, size)
    return cupaged.KVAllocator(slots, device, ROWS, CONTEXT, size, backend=backend)


def play(backend: str, seed: int, size: int, cached: bool, batched: bool, device="cpu") -> Scheduler:
    scheduler = Scheduler(backend, seed, size, cached, batched, device)
    for _ in range(1000):
        if not (scheduler.waiting or scheduler.running):
            break
        scheduler.step()
    assert not scheduler.waiting
    assert not scheduler.running
    while scheduler.evict():
        pass
    assert scheduler.kv.available_size() == len(scheduler.model.free) == scheduler.kv.pool.num_pages
    return scheduler


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("size", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 16))])
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_the_model_says(backend, size, cached, batched):
    seen: Counter[str] = Counter()
    for seed in range(2 if backend == "cuda-random" else 4):
        seen += play(backend, seed, size, cached, batched).seen
    # Otherwise the test would not show what it is for.
    assert seen["retracted"] or seen["evicted"]
    assert seen["allocated ahead"]
    assert seen["trimmed"]
    if cached:
        assert seen["shared"]
        assert seen["computed twice"]
        assert seen["evicted"]
        assert seen["extra pages"]


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_as_the_model_says_on_a_gpu(cached):
    if not backends.probe("cupy").works:
        pytest.skip("needs a GPU and CuPy")
    for seed, size in enumerate((1, 3, 16)):
        play("cupy", seed, size, cached, bool(seed % 2), device=torch.device("cuda"))
