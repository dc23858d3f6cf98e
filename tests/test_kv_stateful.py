"""Random calls of KVAllocator and of whole steps, in lockstep on several backends and on a plain model.

The model has a list of free pages, a count of owners a page, and for each row its pages and tokens. Its queue holds
the pages themselves, as they were when it was told; it knows nothing of rows that are read later.
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import cupaged
from tests.allocators import make
from tests.host_backend import DeviceArray
from tests.test_kv import make_kv

ROWS, COLUMNS = 5, 4
BACKENDS = ("reference", "numba", "cuda-random")
PAD = -1


class Model:
    def __init__(self, pages: int, page_size: int, need_sort: bool, at_back: bool) -> None:
        self.size, self.pages, self.need_sort, self.at_back = page_size, pages, need_sort, at_back
        self.clear()

    def clear(self) -> None:
        self.front, self.aside = list(range(1, self.pages + 1)), []
        self.owners: Counter[int] = Counter()
        self.rows: list[list[int]] = [[] for _ in range(ROWS)]
        self.lens = [0] * ROWS
        self.cached: list[int] = []
        self.queue: list[tuple[int, int]] = []  # (call, page)
        self.calls = 0
        self.error = None

    def up(self, n: int) -> int:
        return (n + self.size - 1) // self.size

    def slot(self, row: int, token: int) -> int:
        return self.rows[row][token // self.size] * self.size + token % self.size

    def grow(self, batch: list[tuple[int, int]], bound: int) -> list[list[int]] | None:
        """New slots of each (row, tokens to add); all or nothing."""
        if self.aside and bound > len(self.front):
            self.front, self.aside = sorted(self.front + self.aside), []
        needed = [self.up(self.lens[row] + new) - self.up(self.lens[row]) for row, new in batch]
        if sum(needed) > len(self.front):
            return None
        slots = []
        for (row, new), pages in zip(batch, needed, strict=True):
            taken, self.front = self.front[:pages], self.front[pages:]
            self.owners.update(taken)
            del self.rows[row][self.up(self.lens[row]) :]
            self.rows[row] += taken
            slots.append([self.slot(row, self.lens[row] + j) for j in range(new)])
            self.lens[row] += new
        return slots

    def refuses(self, batch: list[tuple[int, int]]) -> bool:
        """Whether a request would write into a page that has another owner too."""
        written = (self.rows[row][-1] for row, new in batch if new and self.lens[row] % self.size)
        return any(self.owners[page] > 1 for page in written)

    def drop(self, entries: list[tuple[int, int]]) -> list[int]:
        """Take one owner off each; those that have none left, as they go to the free list."""
        gone = []
        for call, page in entries:
            if not 1 <= page <= self.pages:
                self.error = self.error or ("OutOfRangeError", call, page)
            elif self.owners[page] == 0:
                self.error = self.error or ("DoubleFreeError", call, page)
            else:
                self.owners[page] -= 1
                if self.owners[page] == 0:
                    gone.append(page)
        places = [page for _, page in entries]
        gone.sort(key=places.index)
        if self.need_sort:
            self.aside += gone
        else:
            self.front = self.front + gone if self.at_back else gone + self.front
        return gone

    def cut(self, row: int, keep: int) -> list[int]:
        pages, self.rows[row] = self.rows[row][self.up(keep) :], self.rows[row][: self.up(keep)]
        self.lens[row] = keep
        return pages


class Base(RuleBasedStateMachine):
    device_lengths = False  # whether some lengths are given where only a device reads them

    def pick_rows(self, data, values, **limits):
        return data.draw(st.lists(st.sampled_from(values), unique=True, **limits)) if values else []

    def padded(self, data, rows: list[int]) -> list[int]:
        return data.draw(st.permutations([*rows, *[PAD] * data.draw(st.integers(0, 2))]))

    def given(self, name: str, values, wide: bool):
        array = np.array(values, np.int64 if wide else np.int32)
        if name == "reference":
            return list(values)
        return DeviceArray(array) if name.startswith("cuda") and self.only_device else array

    def step(self, data, tables) -> None:
        """A decode, an extend, or k tokens each."""
        model, size = self.model, self.model.size
        how = data.draw(st.sampled_from(["decode", "extend", "k"]))
        k = {"decode": 1, "k": 3}.get(how)
        rows = self.padded(data, self.pick_rows(data, self.living_rows(), max_size=4))
        added = [data.draw(st.integers(0, 2 * size)) if k is None else k for _ in rows]
        before = [0 if row == PAD else model.lens[row] for row in rows]
        after = [a + b for a, b in zip(before, added, strict=True)]
        if max(after, default=0) > COLUMNS * size:
            return
        self.only_device = self.device_lengths and data.draw(st.booleans())
        if model.refuses([each for each in zip(rows, added, strict=True) if each[0] != PAD]):
            return
        self.before_step(rows)
        total = sum(added)
        bound = len(rows) if how == "decode" else total // size + len(rows) + 1
        batch = [(row, new) for row, new in zip(rows, added, strict=True) if row != PAD]
        slots = model.grow(batch, bound)
        for name, pool in self.pools.items():
            args = [self.given(name, rows, True), self.given(name, before, False)]
            if how == "decode":
                found = pool.decode_step(tables[name], *args)
            else:
                found = pool.extend_step(tables[name], *args, self.given(name, after, True), total)
            assert (found is None) == (slots is None), name
            if slots is not None:
                mine = dict(zip([row for row, _ in batch], slots, strict=True))
                expected = [s for row, new in zip(rows, added, strict=True) for s in mine.get(row, [0] * new)]
                assert found.tolist() == expected, name
        if slots is not None and not self.only_device:
            self.learn(batch)

    def give_back(self, data, tables, release: bool) -> None:
        model = self.model
        rows = self.padded(data, self.pick_rows(data, self.living_rows(), max_size=3))
        before = [0 if row == PAD else model.lens[row] for row in rows]
        keep = [0 if release else data.draw(st.integers(0, n)) for n in before]
        self.only_device = self.device_lengths and data.draw(st.booleans())
        entries = []
        for i, (row, n) in enumerate(zip(rows, keep, strict=True)):
            if row != PAD:
                entries += [(i, page) for page in model.cut(row, n)]
        model.drop(entries)
        for name, pool in self.pools.items():
            args = [self.given(name, rows, False), self.given(name, before, True)]
            if release:
                pool.release(tables[name], *args)
            else:
                pool.trim(tables[name], *args, self.given(name, keep, False))
        if not self.only_device:
            self.learn([(row, 0) for row in rows if row != PAD], cut=True)

    def living_rows(self) -> list[int]:
        return list(range(ROWS))

    def before_step(self, rows) -> None:
        pass

    def learn(self, batch, cut: bool = False) -> None:
        pass

    def compare(self) -> None:
        model = self.model
        expected, model.error = model.error, None
        for name, pool in self.pools.items():
            try:
                pool.check()
                found = None
            except cupaged.DeviceError as error:
                found = (type(error).__name__, error.index, error.value)
            assert found == expected, name
            pool.check_integrity()
            front, aside = pool.pool.free_order()
            assert front.tolist() == model.front, name
            assert aside.tolist() == model.aside, name
            assert pool.pool.free_pages_count() == len(model.front) + len(model.aside), name
            refs = pool.pool.snapshot()[1][1:].tolist()
            assert refs == [model.owners[page] for page in range(1, model.pages + 1)], name


class Slots(Base):
    """Whole steps over slot tables."""

    device_lengths = True

    @initialize(size=st.sampled_from([1, 2, 3, 8]), pages=st.integers(1, 14), need_sort=st.booleans())
    def begin(self, size, pages, need_sort):
        self.model = Model(pages, size, need_sort, at_back=False)
        self.pools = {
            name: make(name, pages * size, size, errors="defer", need_sort=need_sort, index_dtype="int32")
            for name in BACKENDS
        }
        self.tables = {name: np.full((ROWS, COLUMNS * size), -3, np.int32) for name in BACKENDS}

    @rule(data=st.data())
    def any_step(self, data):
        self.step(data, self.tables)

    @rule(data=st.data(), release=st.booleans())
    def end(self, data, release):
        self.give_back(data, self.tables, release)

    @rule()
    def clear(self):
        self.model.clear()
        for pool in self.pools.values():
            pool.clear()

    @rule(data=st.data())
    def share(self, data):
        """A row that has nothing begins with the whole pages of another."""
        model = self.model
        empty = [row for row in range(ROWS) if not model.lens[row]]
        full = [row for row in range(ROWS) if model.lens[row] >= model.size]
        if not empty or not full:
            return
        to, source = data.draw(st.sampled_from(empty)), data.draw(st.sampled_from(full))
        pages = model.rows[source][: model.lens[source] // model.size]
        model.rows[to], model.lens[to] = list(pages), len(pages) * model.size
        model.owners.update(pages)
        for name, pool in self.pools.items():
            pool.retain(pages)
            self.tables[name][to, : model.lens[to]] = self.tables[name][source, : model.lens[to]]

    @invariant()
    def state(self):
        if not hasattr(self, "model"):
            return
        self.compare()
        for row, n in enumerate(self.model.lens):
            for table in self.tables.values():
                assert table[row, :n].tolist() == [self.model.slot(row, token) for token in range(n)]


class Kv(Base):
    """KVAllocator: rows that live, a prefix cache that takes over pages, and the queue."""

    @initialize(size=st.sampled_from([1, 2, 3, 8]), pages=st.integers(1, 14), need_sort=st.booleans())
    def begin(self, size, pages, need_sort):
        self.model = Model(pages, size, need_sort, at_back=True)
        self.pools = {
            name: make_kv(name, pages, size, ROWS, COLUMNS, errors="defer", need_sort=need_sort) for name in BACKENDS
        }
        self.slot_refs = np.zeros((pages + 1) * size, np.int64)
        self.counts = [0] * ROWS
        self.queued: set[int] = set()
        self.in_group = False

    @property
    def tables(self):
        return {name: kv.req_to_page for name, kv in self.pools.items()}

    def on_all(self, method: str, *args):
        return {name: getattr(kv, method)(*args) for name, kv in self.pools.items()}

    # ---- the model's part ------------------------------------------------------------------------------------------

    def lower(self, pages: list[int]) -> None:
        for page in pages:
            part = self.slot_refs[page * self.model.size : (page + 1) * self.model.size]
            part[part > 0] -= 1

    def flush(self) -> None:
        entries, self.model.queue, self.model.calls = self.model.queue, [], 0
        self.queued = set()
        self.lower(self.model.drop(entries))

    def before_step(self, rows) -> None:
        if self.queued & set(rows):
            self.flush()

    def learn(self, batch, cut=False) -> None:
        for row, _ in batch:
            if self.model.lens[row] or cut:
                self.counts[row] = self.model.up(self.model.lens[row])

    def enqueue(self, pages: list[int], row: int | None = None) -> None:
        if pages:
            self.model.queue += [(self.model.calls, page) for page in pages]
            self.model.calls += 1
            if row is not None:
                self.queued.add(row)

    def forget_row(self, row: int) -> None:
        self.model.rows[row], self.model.lens[row], self.counts[row] = [], 0, 0

    def living_rows(self) -> list[int]:
        return list(range(ROWS))

    # ---- calls -----------------------------------------------------------------------------------------------------

    @rule(row=st.integers(0, ROWS - 1), data=st.data())
    def alloc(self, row, data):
        model = self.model
        need = data.draw(st.integers(0, 2 * model.size + 1))
        before = model.lens[row]
        if model.refuses([(row, need)]):
            return
        if before + need > COLUMNS * model.size:
            slots = None
        else:
            if row in self.queued:
                self.flush()
            pages = model.up(before + need) - model.up(before)
            found = model.grow([(row, need)], pages if need else 0)
            slots = None if found is None else found[0]
            if slots:
                self.learn([(row, need)])
        for name, result in self.on_all("alloc", row, need, before).items():
            assert (None if result is None else result.tolist()) == slots, name

    @rule(data=st.data())
    def alloc_batch(self, data):
        model = self.model
        rows = self.pick_rows(data, list(range(ROWS)), max_size=4)
        needs = [data.draw(st.integers(0, 2 * model.size + 1)) for _ in rows]
        before = [model.lens[row] for row in rows]
        if model.refuses(list(zip(rows, needs, strict=True))):
            return
        slots = None
        if all(a + b <= COLUMNS * model.size for a, b in zip(before, needs, strict=True)):
            if self.queued & set(rows):
                self.flush()
            pages = sum(model.up(a + b) - model.up(a) for a, b in zip(before, needs, strict=True))
            batch = list(zip(rows, needs, strict=True))
            slots = model.grow(batch, pages if sum(needs) else 0)
            if slots is not None:
                self.learn([each for each in batch if each[1]])
        for name, result in self.on_all("alloc_batch", rows, needs, before).items():
            assert (result is None) == (slots is None), name
            if slots is not None:
                parts = np.split(result[0], result[1][1:-1]) if rows else []
                assert [part.tolist() for part in parts] == slots, name

    @rule(data=st.data())
    def any_step(self, data):
        self.step(data, self.tables)

    @rule(data=st.data(), release=st.booleans())
    def end(self, data, release):
        self.give_back(data, self.tables, release)

    @rule(row=st.integers(0, ROWS - 1), data=st.data())
    def finish(self, row, data):
        """The cache takes the full pages of what is real, and knows some of them already."""
        model = self.model
        real = data.draw(st.integers(0, model.lens[row]))
        alloced, full = model.lens[row], real // model.size
        kept, extra = model.rows[row][:full], model.rows[row][full : model.up(alloced)]
        self.on_all("free_extra_pages_not_cached", row, real, alloced)
        self.enqueue(extra, row)
        known = [data.draw(st.booleans()) for _ in kept]
        new = [(page % model.pages) + 1 if k else page for page, k in zip(kept, known, strict=True)]
        gone = [page for page, other in zip(kept, new, strict=True) if page != other]
        differ = [page != other for page, other in zip(kept, new, strict=True)]
        for name, kv in self.pools.items():
            old = self.tables[name][row, :full]  # the table's own memory
            assert kv.free_with_diff(np.array(new, np.int64), old).tolist() == differ, name
        if kept:  # entries that do not differ are skipped, but the call is one of the queue
            model.queue += [(model.calls, page) for page in gone]
            model.calls += 1
        model.cached += [page for page in kept if page not in gone]
        self.forget_row(row)

    @rule(row=st.integers(0, ROWS - 1))
    def free_req_cache(self, row):
        self.on_all("free_req_cache", row, self.model.lens[row])
        self.enqueue(self.model.rows[row][: self.model.up(self.model.lens[row])], row)
        self.forget_row(row)

    @rule(row=st.integers(0, ROWS - 1))
    def free(self, row):
        model = self.model
        pages = model.rows[row][: self.counts[row]]
        if len(pages) < model.up(model.lens[row]):
            return  # the host does not know all its pages
        self.on_all("free", row)
        if self.in_group:
            self.enqueue(pages, row)
        elif pages:
            self.lower(model.drop([(0, page) for page in pages]))
        self.forget_row(row)

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data(), twice=st.booleans())
    def evict(self, data, twice):
        model = self.model
        gone = data.draw(st.lists(st.sampled_from(model.cached), min_size=1, max_size=4, unique=True))
        for page in gone:
            model.cached.remove(page)
        # A page too many: of what nobody else owns, or the cache or a row would lose it.
        extra = [page for page in gone if model.owners[page] == 1] if twice else []
        for name, kv in self.pools.items():
            array = self.queue_form(name, gone + extra)
            kv.append_to_later_free(array)
            if isinstance(array, np.ndarray):
                array[:] = 1
        self.enqueue(gone + extra)

    def queue_form(self, name: str, pages: list[int]):
        self.only_device = False
        return self.given(name, pages, len(pages) % 2 == 0)

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data())
    def share(self, data):
        """A new request begins with cached pages, which the engine writes into its row."""
        model = self.model
        empty = [row for row in range(ROWS) if not model.lens[row] and row not in self.queued]
        alive = list(dict.fromkeys(page for page in model.cached if model.owners[page]))
        if not empty or not alive:
            return
        row = data.draw(st.sampled_from(empty))
        pages = data.draw(st.lists(st.sampled_from(alive), min_size=1, max_size=COLUMNS, unique=True))
        model.rows[row], model.lens[row] = list(pages), len(pages) * model.size
        model.owners.update(pages)
        self.on_all("retain", pages)
        for table in self.tables.values():
            table[row, : len(pages)] = pages

    @rule()
    def group_begin(self):
        self.in_group = True
        self.on_all("free_group_begin")

    @rule()
    def group_end(self):
        self.in_group = False
        self.on_all("free_group_end")
        self.flush()

    @rule(data=st.data())
    def engine_counts(self, data):
        seed = data.draw(st.integers(0, 99))
        self.slot_refs[:] = np.random.default_rng(seed).integers(0, 3, self.slot_refs.size)
        for kv in self.pools.values():
            kv.token_slot_refs[:] = self.slot_refs

    @rule()
    def read_on_host(self):
        for name, kv in self.pools.items():
            host = kv.req_to_page_cpu
            for row, pages in enumerate(self.model.rows):
                if self.counts[row]:
                    assert host[row, : len(pages)].tolist()[-1:] == pages[-1:], name

    @rule()
    def clear(self):
        self.model.clear()
        self.slot_refs[:] = 0
        self.counts, self.queued, self.in_group = [0] * ROWS, set(), False
        self.on_all("clear")

    @invariant()
    def state(self):
        if not hasattr(self, "model"):
            return
        self.compare()
        model = self.model
        for name, kv in self.pools.items():
            assert kv.available_size() == len(model.front) + len(model.aside)
            assert kv.token_slot_refs.tolist() == self.slot_refs.tolist(), name
            assert kv.num_pages.tolist() == self.counts, name
            for row, n in enumerate(model.lens):
                assert kv.req_to_page[row, : model.up(n)].tolist() == model.rows[row], name

    def teardown(self):
        if hasattr(self, "model"):
            self.group_end()
            self.state()


@pytest.mark.parametrize("kind", [Slots, Kv])
def test_random_calls(kind, caplog):
    caplog.set_level(logging.CRITICAL, "cupaged")
    kind.TestCase.settings = settings(
        deadline=None,
        max_examples=100,
        stateful_step_count=30,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    kind.TestCase().runTest()
