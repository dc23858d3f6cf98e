"""Layer 3: random sequences of calls through the public API, in lockstep on several backends and on a plain model.

The model knows nothing of rings, counters or kernels: it has a list of free pages, a count of owners a page, and the
slots of each request. The lagging backend runs its launches only now and then, so its host decides from bounds.
"""

from __future__ import annotations

import copy
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

PAGE_SIZES = (1, 2, 3, 16, 48)
FAR = (-(2**63), -(2**40), -1, 0, 2**31, 2**40, 2**63 - 1)


class Model:
    """Who owns which page, and in which order the free ones go."""

    def __init__(self, num_pages: int, page_size: int, need_sort: bool, strict: bool) -> None:
        self.size, self.need_sort, self.strict = page_size, need_sort, strict
        self.capacity = num_pages
        self.clear(num_pages)

    def clear(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.front, self.aside = list(range(1, num_pages + 1)), []
        self.owners: Counter[int] = Counter()
        self.requests: list[list[int]] = []
        self.error = None

    def state(self):
        return copy.deepcopy((self.num_pages, self.front, self.aside, self.owners, self.requests))

    def restore(self, state) -> None:
        self.num_pages, self.front, self.aside, self.owners, self.requests = copy.deepcopy(state)

    @property
    def free_count(self) -> int:
        return len(self.front) + len(self.aside)

    def record(self, error: str, index: int, value: int) -> None:
        self.error = self.error or (error, index, value)

    def up(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def is_page(self, page: int) -> bool:
        return 1 <= page <= self.num_pages

    def merge(self, bound: int) -> None:
        if self.aside and bound > len(self.front):
            self.front, self.aside = sorted(self.front + self.aside), []

    def take(self, pages: int) -> list[int] | None:
        if pages > len(self.front):
            return None
        taken, self.front = self.front[:pages], self.front[pages:]
        self.owners.update(taken)
        return taken

    def alloc(self, pages: int) -> list[int] | None:
        self.merge(pages)
        taken = self.take(pages)
        return None if taken is None else [page * self.size + j for page in taken for j in range(self.size)]

    def breach(self, prefix: int, seq: int, last: int) -> tuple[str, bool] | None:
        """The error of one request, and whether a lenient pool carries it out."""
        room = min(seq, self.up(prefix) * self.size) - prefix
        page, offset = divmod(last, self.size)
        if room == 0:
            return None
        if not self.is_page(page):
            return "OutOfRangeError", False
        if self.owners[page] == 0:
            return "FreePageError", False
        if self.owners[page] > 1:
            return "SharedPageError", False
        if (last + 1) % self.size != prefix % self.size or offset == self.size - 1:
            return "MisalignedError", not self.strict and offset + 1 + room <= self.size
        return None

    def extend(self, batch: list[tuple[int, int, int]], bound: int, refused_slot: int) -> list[int] | None:
        self.merge(bound)
        tokens = sum(seq - prefix for prefix, seq, _ in batch)
        needed = sum(self.up(seq) - self.up(prefix) for prefix, seq, _ in batch)
        if needed > len(self.front):
            return None  # whatever else is wrong with the batch: nothing is written
        carried_out = True
        for i, (prefix, seq, last) in enumerate(batch):
            found = self.breach(prefix, seq, last)
            if found:
                self.record(found[0], i, last)
                carried_out = carried_out and found[1]
        if not carried_out:
            return [refused_slot] * tokens
        new = self.take(needed)
        assert new is not None
        slots: list[int] = []
        for prefix, seq, last in batch:
            room = min(seq, self.up(prefix) * self.size) - prefix
            slots += range(last + 1, last + 1 + room)
            rest = seq - prefix - room
            mine, new = new[: self.up(rest)], new[self.up(rest) :]
            slots += [mine[k // self.size] * self.size + k % self.size for k in range(rest)]
        return slots

    def drop(self, page: int) -> bool:
        self.owners[page] -= 1
        return self.owners[page] == 0

    def free(self, calls: list[list[int]]) -> None:
        """Calls of `free` that go together."""
        gone: set[int] = set()
        base = 0
        for slots in calls:
            touched = set()
            for i, slot in enumerate(slots):
                page = slot // self.size
                if not self.is_page(page):
                    self.record("OutOfRangeError", base + i, slot)
                elif self.owners[page]:
                    touched.add(page)
                elif page not in gone:
                    self.record("DoubleFreeError", base + i, slot)
            gone |= {page for page in touched if self.drop(page)}
            base += len(slots)
        self.give(sorted(gone))

    def free_entries(self, entries: list[int], divisor: int) -> None:
        gone = []
        for i, entry in enumerate(entries):
            page = entry // divisor
            if not self.is_page(page):
                self.record("OutOfRangeError", i, entry)
            elif self.owners[page] == 0:
                self.record("DoubleFreeError", i, entry)
            elif self.drop(page):
                gone.append(page)
        self.give(sorted(gone, key=[entry // divisor for entry in entries].index))

    def give(self, pages: list[int]) -> None:
        if self.need_sort:
            self.aside += pages
        else:
            self.front = pages + self.front

    def retain(self, pages: list[int]) -> None:
        for i, page in enumerate(pages):
            if not self.is_page(page):
                self.record("OutOfRangeError", i, page)
            elif self.owners[page] == 0:
                self.record("FreePageError", i, page)
            else:
                self.owners[page] += 1


class Machine(RuleBasedStateMachine):
    """One allocator a backend; every rule is a call on all of them and on the model."""

    backends: tuple[str, ...] = ()

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES),
        pages=st.integers(1, 24),
        need_sort=st.booleans(),
        strict=st.booleans(),
        refused=st.sampled_from([0, -1]),
        dtype=st.sampled_from(["int32", "int64"]),
    )
    def begin(self, page_size, pages, need_sort, strict, refused, dtype):
        self.model = Model(pages, page_size, need_sort, strict)
        self.page_size, self.refused = page_size, refused
        options = {"need_sort": need_sort, "strict": strict, "refused_slot": refused, "index_dtype": dtype}
        spare = page_size - 1  # slots that fill no page
        self.pools = {
            name: make(name, pages * page_size + spare, page_size, errors="defer", max_batch=64, **options)
            for name in self.backends
        }
        self.states: dict = {}
        self.open_group = False
        self.awaited: list[tuple[object, list[int]]] = []
        self.kept: list = []
        self.calls = 0

    # ---- calls on all ------------------------------------------------------------------------------------------

    def given(self, name: str, values: list[int]):
        """The same values, in another form for each backend; on the lagging one where the host cannot read them."""
        self.calls += 1
        small = all(-(2**31) <= v < 2**31 for v in values)
        dtype = np.int32 if small and self.calls % 3 == 0 else np.int64
        if name == "reference":
            return list(values)
        if name == "numba" or self.calls % 4 == 0:
            return np.array(values, dtype)
        spaced = np.full(2 * len(values) + 1, -77, dtype)
        spaced[1::2] = values
        self.kept.append(spaced)
        return DeviceArray(spaced[1::2])

    def on_all(self, method: str, *arrays: list[int], expected=..., scalars: tuple = (), **kwargs) -> None:
        for name, pool in self.pools.items():
            found = getattr(pool, method)(*(self.given(name, a) for a in arrays), *scalars, **kwargs)
            if expected is ...:
                assert found is None, (name, method)
            elif expected is None:
                assert found is None, (name, method, arrays, scalars)
            else:
                assert found is not None, (name, method, arrays, scalars)
                assert found.shape == (len(expected),)
                if name == "cuda-delayed":
                    self.awaited.append((found, expected))
                else:
                    assert found.tolist() == expected, (name, method, arrays, scalars)
        if self.model.error:
            self.settle()

    def pick(self, data, values, **limits):
        return data.draw(st.lists(st.sampled_from(values), **limits)) if values else []

    # ---- allocation --------------------------------------------------------------------------------------------

    @rule(pages=st.integers(0, 26))
    def alloc(self, pages):
        expected = self.model.alloc(pages) if pages else []
        self.on_all("alloc", expected=expected, scalars=(pages * self.page_size,))
        if expected:
            self.model.requests.append(expected)

    def batch_of(self, data, decode: bool):
        """Living requests, each at most once, and new ones."""
        requests = self.model.requests
        old = self.pick(data, list(range(len(requests))), max_size=4, unique=True)
        fresh = data.draw(st.integers(0, 3))
        places = data.draw(st.permutations([*old, *[-1] * fresh]))
        most = 1 if decode else 2 * self.page_size + 1
        added = [1 if decode else data.draw(st.integers(0, most)) for _ in places]
        batch = []
        for place, new in zip(places, added, strict=True):
            prefix = len(requests[place]) if place >= 0 else 0
            last = requests[place][-1] if prefix else -1
            batch.append((prefix, prefix + new, last))
        return places, batch

    def run_batch(self, places, batch, decode: bool) -> None:
        model = self.model
        tokens = sum(seq - prefix for prefix, seq, _ in batch)
        bound = len(batch) if decode else tokens // self.page_size + len(batch) + 1
        expected = model.extend(batch, bound, self.refused)
        wrong = model.error is not None
        prefixes, seqs, lasts = ([request[k] for request in batch] for k in range(3))
        if decode:
            self.on_all("alloc_decode", seqs, lasts, expected=expected)
        else:
            self.on_all("alloc_extend", prefixes, seqs, lasts, expected=expected, scalars=(tokens,))
        if expected is None or (wrong and expected == [self.refused] * tokens):
            return
        for place, (prefix, seq, _) in zip(places, batch, strict=True):
            mine, expected = expected[: seq - prefix], expected[seq - prefix :]
            if place >= 0:
                model.requests[place] = model.requests[place] + mine
            elif mine:
                model.requests.append(mine)

    @rule(data=st.data())
    def extend(self, data):
        self.run_batch(*self.batch_of(data, decode=False), decode=False)

    @rule(data=st.data())
    def decode(self, data):
        self.run_batch(*self.batch_of(data, decode=True), decode=True)

    @rule(data=st.data(), decode=st.booleans())
    def wrong_last_loc(self, data, decode):
        places, batch = self.batch_of(data, decode)
        if not batch:
            return
        i = data.draw(st.integers(0, len(batch) - 1))
        prefix, seq, last = batch[i]
        anywhere = st.integers(0, (self.model.capacity + 2) * self.page_size)
        near = st.sampled_from([last - 1, last + 1, last - self.page_size, last + self.page_size])
        batch[i] = (prefix, seq, data.draw(st.one_of(st.sampled_from(FAR), anywhere, near)))
        if self.model.breach(*batch[i]) is None or not self.model.strict:
            # Where it is looked at and fits, the pool cannot tell; a lenient one would write another's page.
            return
        self.run_batch(places, batch, decode)

    # ---- frees -------------------------------------------------------------------------------------------------

    def pages_of(self, slots: list[int]) -> list[int]:
        return list(dict.fromkeys(slot // self.page_size for slot in slots))

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), how=st.sampled_from(["free", "count", "ids", "segment", "tail"]))
    def finish(self, data, how):
        """A request ends, or loses the tokens behind a page's end."""
        model = self.model
        slots = model.requests.pop(data.draw(st.integers(0, len(model.requests) - 1)))
        if how == "tail":
            kept = self.page_size * data.draw(st.integers(0, (len(slots) - 1) // self.page_size))
            if kept:
                model.requests.append(slots[:kept])
            model.free_entries(slots[kept :: self.page_size], self.page_size)
            self.on_all("free_segment", slots[kept:], start_pos=kept)
        elif how == "segment":
            model.free_entries(slots[:: self.page_size], self.page_size)
            self.on_all("free_segment", slots, start_pos=0)
        elif how == "ids":
            pages = data.draw(st.permutations(self.pages_of(slots)))
            model.free_entries(pages, 1)
            self.on_all("free_page_ids", pages)
        else:
            repeated = data.draw(st.permutations(slots + slots[:3]))
            model.free([repeated])
            count = {"num_pages": len(self.pages_of(slots))} if how == "count" else {}
            self.on_all("free", repeated, **count)

    @precondition(lambda self: any(len(r) >= self.page_size for r in self.model.requests))
    @rule(data=st.data())
    def share(self, data):
        """Another request begins with the whole pages of one that lives."""
        whole = [r for r in self.model.requests if len(r) >= self.page_size]
        first = data.draw(st.sampled_from(whole))
        pages = data.draw(st.integers(1, len(first) // self.page_size))
        prefix = first[: pages * self.page_size]
        self.model.retain(self.pages_of(prefix))
        self.model.requests.append(prefix)
        self.on_all("retain", self.pages_of(prefix))

    def wrong_pages(self, data) -> list[int]:
        """Page ids: free ones, some twice, some out of range; owned ones only of requests that end by it."""
        free = self.model.front + self.model.aside
        owned = sorted(page for page in self.model.owners if self.model.owners[page])
        outside = [self.model.num_pages + 1, self.model.capacity + 1, 2**31, 2**40, -1, -(2**40), 0]
        return self.pick(data, free + owned + outside, min_size=1, max_size=8)

    def forget(self) -> None:
        """Requests whose pages were freed under them are over."""
        held: Counter[int] = Counter()
        alive = []
        for slots in self.model.requests:
            pages = self.pages_of(slots)
            if all(held[page] < self.model.owners[page] for page in pages):
                held.update(pages)
                alive.append(slots)
        self.model.requests = alive

    @rule(data=st.data(), how=st.sampled_from(["free", "free_page_ids", "retain", "free_segment"]))
    def wrong_entries(self, data, how):
        pages = self.wrong_pages(data)
        if how == "free":
            slots = [page * self.page_size + self.calls % self.page_size for page in pages]
            self.model.free([slots])
            self.on_all("free", slots)
        elif how == "free_segment":
            slots = [page * self.page_size for page in pages for _ in range(self.page_size)]
            self.model.free_entries(slots[:: self.page_size], self.page_size)
            self.on_all("free_segment", slots, start_pos=0)
        elif how == "free_page_ids":
            self.model.free_entries(pages, 1)
            self.on_all("free_page_ids", pages)
        else:
            self.model.retain(pages)
            self.on_all("retain", pages)
        self.forget()

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), counted=st.booleans())
    def group(self, data, counted):
        """Frees that wait. A page of the queued ids is touched by no queued slot, and no queued array is kept."""
        model = self.model
        for pool in self.pools.values():
            pool.free_group_begin()
        ended = self.pick(data, list(range(len(model.requests))), min_size=1, max_size=4, unique=True)
        calls: list[list[int]] = []
        entries: list[int] = []
        by_slot: set[int] = set()
        by_id: set[int] = set()
        before = model.state()
        for place in ended:
            slots = model.requests[place]
            pages = self.pages_of(slots)
            if data.draw(st.booleans()) and not by_slot & set(pages):
                by_id |= set(pages)
                entries += pages
                if data.draw(st.booleans()):
                    self.queue_and_spoil("free_page_ids", pages)
                else:
                    self.queue_and_spoil("free_segment", slots, start_pos=0)
            elif not by_id & set(pages):
                count = {"num_pages": len(pages)} if counted and not by_slot & set(pages) else {}
                by_slot |= set(pages)
                calls.append(slots)
                self.queue_and_spoil("free", slots, **count)
        assert before == model.state()
        self.invariants_of_state()
        model.free(calls)
        if entries:
            model.free_entries(entries, 1)
        model.requests = [slots for i, slots in enumerate(model.requests) if i not in ended]
        for pool in self.pools.values():
            pool.free_group_end()
            pool.free_group_end()  # an end without a begin does nothing
        self.forget()

    def queue_and_spoil(self, method: str, values: list[int], **kwargs) -> None:
        for name, pool in self.pools.items():
            array = self.given(name, values)
            getattr(pool, method)(array, **kwargs)
            if isinstance(array, np.ndarray):
                array[:] = -99  # what was queued is owned

    # ---- the pool as a whole -----------------------------------------------------------------------------------

    @rule()
    def backup(self):
        self.states = {name: pool.backup_state() for name, pool in self.pools.items()}
        self.states["model"] = self.model.state()

    @precondition(lambda self: self.states)
    @rule(begun=st.booleans())
    def restore(self, begun):
        self.model.restore(self.states["model"])
        for name, pool in self.pools.items():
            if begun:
                pool.free_group_begin()
            pool.restore_state(self.states[name])
            pool.free_group_end()

    @rule()
    def clear(self):
        self.model.clear(self.model.num_pages)
        for pool in self.pools.values():
            pool.clear()

    @rule(data=st.data())
    def resize(self, data):
        pages = data.draw(st.integers(1, self.model.capacity))
        self.model.clear(pages)
        for pool in self.pools.values():
            pool.resize(pages * self.page_size)

    @rule()
    def merge(self):
        self.model.merge(2**31)
        for pool in self.pools.values():
            pool.merge_and_sort_free()

    @rule()
    def refresh(self):
        for pool in self.pools.values():
            pool.refresh()

    @rule()
    def settle(self):
        """Everybody's errors, state and results are what the model says."""
        expected, self.model.error = self.model.error, None
        asides: list[list[int]] = []
        for name, pool in self.pools.items():
            try:
                pool.check()
                found = None
            except cupaged.DeviceError as error:
                found = (type(error).__name__, error.index, error.value)
            assert found == expected, name
            pool.check_integrity()
            assert pool.free_pages.tolist() == self.model.front, name
            aside = pool.staged_pages.tolist()
            assert sorted(aside) == sorted(self.model.aside), name
            asides.append(aside)
            assert pool.available_size() == self.model.free_count * self.page_size, name
            refs = pool.pool.snapshot()[1][1 : self.model.num_pages + 1].tolist()
            assert refs == [self.model.owners[page] for page in range(1, self.model.num_pages + 1)], name
            assert pool.stats().shared_pages == sum(count > 1 for count in self.model.owners.values()), name
        assert all(aside == asides[0] for aside in asides)
        for found, slots in self.awaited:
            assert found.tolist() == slots
        self.awaited.clear()
        self.kept.clear()

    @invariant()
    def invariants_of_state(self):
        if not hasattr(self, "model"):
            return
        model, free = self.model, self.model.front + self.model.aside
        assert sorted(free + [p for p in model.owners if model.owners[p]]) == list(range(1, model.num_pages + 1))
        seen: Counter[int] = Counter()
        for slots in model.requests:
            assert len(set(slots)) == len(slots)
            seen.update(set(slots))
        assert all(count <= model.owners[slot // self.page_size] for slot, count in seen.items())
        for name, pool in self.pools.items():
            assert pool.num_pages == model.num_pages
            if name == "cuda-delayed":
                # Only what the host believes: nothing is waited for here.
                assert pool.available_at_least() <= model.free_count * self.page_size, name
                assert pool.pool.at_most >= model.free_count, name
            else:
                pool.check_integrity()
                assert pool.free_pages.tolist() == model.front, name
                assert pool.available_size() == model.free_count * self.page_size, name

    def teardown(self):
        if hasattr(self, "model"):
            self.settle()


SETTINGS = settings(
    deadline=None,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize(
    ("backends", "examples"),
    [
        (("reference", "numba", "cuda-random"), 100),
        pytest.param(("numba", "cuda-delayed"), 300, marks=pytest.mark.slow),
    ],
    ids=["in-step", "lagging"],
)
def test_random_calls(backends, examples, caplog):
    caplog.set_level(logging.CRITICAL, "cupaged")
    machine = type("Machine", (Machine,), {"backends": backends})
    machine.TestCase.settings = settings(SETTINGS, max_examples=examples)
    machine.TestCase().runTest()
