"""A serving engine on a virtual clock: at each step, who prefills, decodes, is retracted and ends.

A request holds one slot for each token of its prompt, allocated by `alloc_extend` in chunks, and one for each
token that it generates, allocated by `alloc_decode` in the steps after. The order is that of arrival:

- A prompt is begun, or gone on with, when there is room for the rest of it, and for the next `AHEAD` tokens
  of this and of each running request. Counted in tokens, so that page sizes compare.
- Where the pool is short all the same, the newest request is retracted: it starts over with its prompt, at
  the head of those that wait. Older ones never wait for newer ones, so the oldest always ends.
- After a retraction no prompt is gone on with until a request has ended: they would fight for the same pages.
- What a request that ends holds is freed at the end of its last step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from cupaged.geometry import pages_for, pages_taken
from cupaged.interop import to_host
from cupaged.replay.traces import Trace
from cupaged.replay.verify import Ledger, VerificationError

AHEAD = 16
STEPS_A_REPORT = 64


class SlotsEngine:
    """The allocator's side of the engine: allocates for rows, and remembers which slots each row holds.

    Parameters
    ----------
    allocator : PagedTokenToKVPoolAllocator
        Where the slots come from; nobody else uses it.
    rows, longest : int
        Requests at a time, and tokens that any of them can reach.

    Attributes
    ----------
    seconds : float
        Time spent in calls of the allocator so far, as the host sees it.
    allocations : int
        Calls of `alloc_extend` and `alloc_decode` so far.
    """

    def __init__(self, allocator: Any, rows: int, longest: int):
        self.allocator = allocator
        self.seconds = 0.0
        self.allocations = 0
        # Token j of a row stands in column j + 1, so that column 0 is what `last_loc` is before any token.
        self._stride = longest + 1
        self._cells = np.empty(rows * self._stride, np.int64)
        self._cells[:: self._stride] = -1

    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self.allocator.available_size() // self.allocator.page_size

    def free_list(self) -> np.ndarray:
        """Ids of those pages."""
        return to_host(self.allocator.free_pages)

    def slots(self, row: int, length: int) -> np.ndarray:
        """Slots of a row's first `length` tokens."""
        start = row * self._stride + 1
        return self._cells[start : start + length]

    def decode(self, rows: np.ndarray, seq_lens: np.ndarray) -> np.ndarray | None:
        """Allocate one slot a row, which then has `seq_lens` tokens; None if the pool is short."""
        cells = rows * self._stride + seq_lens
        slots = self._allocate(len(rows), self.allocator.alloc_decode, seq_lens, self._cells[cells - 1])
        if slots is not None:
            self._cells[cells] = slots
        return slots

    def extend(self, rows: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray | None:
        """Allocate the tokens from `before` to `after` of each row; None if the pool is short."""
        total = int((after - before).sum())
        last = self._cells[rows * self._stride + before]
        slots = self._allocate(total, self.allocator.alloc_extend, before, after, last, total)
        if slots is not None:
            start = 0
            for row, first, end in zip(rows.tolist(), before.tolist(), after.tolist(), strict=True):
                self.slots(row, end)[first:] = slots[start : start + end - first]
                start += end - first
        return slots

    def release(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Free all that these rows hold."""
        page_size = self.allocator.page_size
        start = perf_counter()
        with self.allocator.free_group():
            for row, length in zip(rows, lengths, strict=True):
                if length:
                    self.allocator.free(self.slots(row, length), num_pages=pages_for(length, page_size))
        self.seconds += perf_counter() - start

    def _allocate(self, expected: int, call: Callable[..., Any], *arguments: Any) -> np.ndarray | None:
        start = perf_counter()
        slots = call(*arguments)
        self.seconds += perf_counter() - start
        self.allocations += 1
        if slots is None:
            return None
        slots = to_host(slots)
        if slots.shape != (expected,):
            raise VerificationError(f"{call.__name__} returned shape {slots.shape} for {expected} tokens")
        return slots


class Running:
    """The requests that decode, oldest first: views of one table, renewed when requests come or go."""

    def __init__(self, most: int):
        self._table = np.empty((4, most), np.int64)
        self._view(0)

    def _view(self, count: int) -> None:
        self.count = count
        self.request, self.row, self.length, self.left = self._table[:, :count]

    def add(self, request: int, row: int, length: int, left: int) -> None:
        """Add the newest request, which has `length` tokens and is to generate `left` more."""
        self._table[:, self.count] = request, row, length, left
        self._view(self.count + 1)

    def pop(self) -> tuple[int, int, int]:
        """Remove the newest request: its number, row and length."""
        request, row, length, _ = self._table[:, self.count - 1].tolist()
        self._view(self.count - 1)
        return request, row, length

    def keep(self, which: np.ndarray) -> None:
        """Remove the requests that a mask does not name."""
        kept = self._table[:, : self.count][:, which]
        self._table[:, : kept.shape[1]] = kept
        self._view(kept.shape[1])


class Replayer:
    """Runs a trace to its end, one step at a time.

    Parameters
    ----------
    trace : Trace
        What comes in.
    order : numpy.ndarray
        Which of its requests, in order; each must fit the pool when it is alone.
    engine : SlotsEngine
        Where the slots come from.
    page_size, chunk, max_running : int
        Slots in a page; prompt tokens that one step prefills; requests that may hold slots at a time.
    step_s : float
        Seconds of the virtual clock that a step takes.
    ledger : Ledger, optional
        Proves each step.

    Attributes
    ----------
    clocks, tokens, pages, seconds : array.array
        For each step that had work: its number on the clock, tokens held and pages owned before the requests
        that end free theirs, and time in the allocator.
    steps, served, retractions, slots : int
        Steps that had work, requests that ended, retractions, and slots handed out.
    """

    def __init__(
        self,
        trace: Trace,
        order: np.ndarray,
        engine: SlotsEngine,
        *,
        page_size: int,
        chunk: int,
        max_running: int,
        step_s: float,
        ledger: Ledger | None = None,
    ):
        self.engine, self.ledger = engine, ledger
        self.page_size, self.chunk, self.max_running = page_size, chunk, max_running
        self.steps = self.served = self.retractions = self.slots = 0
        self.clocks, self.tokens, self.pages, self.seconds = array("q"), array("q"), array("q"), array("d")
        self._num_pages = engine.free_pages()
        self._digest = hashlib.blake2b(digest_size=16)

        self._prompt, self._output = trace.prompt.tolist(), trace.output.tolist()
        self._coming = order.tolist()
        # Rounded, so that an arrival at k steps is not the k + 1st for the last bit of a float.
        self._arrives = np.ceil(np.round(trace.arrival[order] / step_s, 6)).astype(np.int64).tolist()
        self._came = 0
        self._clock = -1
        self._tokens = 0

        self._waiting: deque[int] = deque()
        self._begun: tuple[int, int, int] | None = None  # request, row, tokens: its prompt is not all there yet
        self._running = Running(max_running)
        self._rows = list(range(max_running))[::-1]
        self._full = False  # a request was retracted, and none has ended since

    @property
    def digest(self) -> str:
        """Hash of all slots handed out, as little-endian int64: each step's decodes, then its prefills."""
        return self._digest.hexdigest()

    def run(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Serve all requests; `progress` is told now and then how many have ended, and of how many."""
        while self._tick():
            spent = self.engine.seconds
            self._decode()
            self._prefill()
            self._record()
            self._finish()
            self.seconds.append(self.engine.seconds - spent)
            self._prove()
            if progress and self.steps % STEPS_A_REPORT == 0:
                progress(self.served, len(self._coming))
        if self.ledger:
            self.ledger.audit(self.engine.free_list())
        if progress:
            progress(self.served, len(self._coming))

    def _tick(self) -> bool:
        """Move the clock to the next step that has work, and let in who has arrived; False at the end."""
        self._clock += 1
        if not (self._running.count or self._begun or self._waiting):
            if self._came == len(self._coming):
                return False
            self._clock = max(self._clock, self._arrives[self._came])
        while self._came < len(self._coming) and self._arrives[self._came] <= self._clock:
            self._waiting.append(self._coming[self._came])
            self._came += 1
        if self.ledger:
            self.ledger.step = self._clock
        return True

    def _decode(self) -> None:
        running = self._running
        if not running.count:
            return
        while (slots := self.engine.decode(running.row, running.length + 1)) is None:
            self._retract_newest()
        running.length += 1
        running.left -= 1
        self._hand_out(running.request, running.length - 1, running.length, slots)

    def _retract_newest(self) -> None:
        if self._begun:
            request, row, length = self._begun
            self._begun = None
        elif self._running.count > 1:
            request, row, length = self._running.pop()
        else:
            raise VerificationError(
                f"step {self._clock}: request {self._running.request[0]} is alone and fits the pool, "
                f"but the allocator, with {self.engine.free_pages()} free pages, has no slot for it"
            )
        self._release([request], [row], [length])
        self._waiting.appendleft(request)
        self._full = True
        self.retractions += 1

    def _prefill(self) -> None:
        plan = self._plan_prefill()
        if not plan:
            return
        request, row, before, after = np.ascontiguousarray(np.array(plan, np.int64).T)
        if (after > before).any():
            slots = self.engine.extend(row, before, after)
            if slots is None:
                raise VerificationError(
                    f"step {self._clock}: the prompts from request {request[0]} on need fewer pages than the "
                    f"{self.engine.free_pages()} that are free, but the allocator has no slots for them"
                )
            self._hand_out(request, before, after, slots)
        for i, place, _, length in plan:
            if length == self._prompt[i]:
                self._running.add(i, place, length, self._output[i])

    def _plan_prefill(self) -> list[tuple[int, int, int, int]]:
        """Choose what this step prefills: request, row, tokens before and tokens after of each."""
        plan: list[tuple[int, int, int, int]] = []
        if self._full or not (self._begun or self._waiting):
            return plan
        budget, holders = self.chunk, self._running.count
        free = self.engine.free_pages() - self._pages_ahead()
        while budget and holders < self.max_running and (self._begun or self._waiting):
            request, row, before = self._begun or (self._waiting[0], self._rows[-1], 0)
            prompt = self._prompt[request]
            soon = prompt + min(AHEAD, self._output[request])
            need = pages_for(soon, self.page_size) - pages_for(before, self.page_size)
            if need > free:
                break
            if not self._begun:
                self._waiting.popleft()
                self._rows.pop()
            after = min(prompt, before + budget)
            self._begun = (request, row, after) if after < prompt else None
            plan.append((request, row, before, after))
            budget -= after - before
            free -= need
            holders += 1
        return plan

    def _pages_ahead(self) -> int:
        """Pages that the running requests take for their next tokens."""
        length, left = self._running.length, self._running.left
        return pages_taken(length, length + np.minimum(left, AHEAD), self.page_size)

    def _finish(self) -> None:
        running = self._running
        if running.left.all():
            return
        goes_on = running.left > 0
        ends = ~goes_on
        request, row, length = (a[ends].tolist() for a in (running.request, running.row, running.length))
        running.keep(goes_on)
        self._release(request, row, length)
        self.served += len(request)
        self._full = False

    def _hand_out(self, request: np.ndarray, before: np.ndarray, after: np.ndarray, slots: np.ndarray) -> None:
        if self.ledger:
            self.ledger.hand_out(request, before, after, slots)
        self._digest.update(np.ascontiguousarray(slots, "<i8").data)
        self._tokens += len(slots)
        self.slots += len(slots)

    def _release(self, requests: list[int], rows: list[int], lengths: list[int]) -> None:
        if self.ledger:
            for request, row, length in zip(requests, rows, lengths, strict=True):
                self.ledger.take_back(request, self.engine.slots(row, length))
        self.engine.release(rows, lengths)
        self._rows.extend(rows)
        self._tokens -= sum(lengths)

    def _record(self) -> None:
        self.steps += 1
        self.clocks.append(self._clock)
        self.tokens.append(self._tokens)
        self.pages.append(self._num_pages - self.engine.free_pages())

    def _prove(self) -> None:
        if not self.ledger:
            return
        self.ledger.settle(self.engine.free_pages())
        if self.ledger.changed >= self._num_pages:
            self.ledger.audit(self.engine.free_list())
