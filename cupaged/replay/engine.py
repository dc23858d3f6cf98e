"""A serving engine on a virtual clock: at each step, who prefills, decodes, is retracted and ends.

A request holds one slot for each token of its prompt, allocated by `alloc_extend` in chunks, and one for each
token that it generates, allocated by `alloc_decode` in the steps after. The order is that of arrival:

- A prompt is begun, or gone on with, when there is room for the rest of it, and for the next `AHEAD` tokens
  of this and of each running request. Counted in tokens, so that page sizes compare.
- Where the pool is short all the same, the newest request is retracted: it starts over with its prompt, at
  the head of those that wait. Older ones never wait for newer ones, so the oldest always ends.
- After a retraction no prompt is gone on with until a request has ended: they would fight for the same pages.
- What a request that ends holds is freed at the end of its last step.

With a prefix cache, a prompt begins behind the longest prefix that the cache holds when it is its turn, and the
cache keeps the full blocks of the prompts of requests that end. What no running request uses counts as room: it is
given up, the least recently used first, before anybody is retracted.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

import numpy as np

from cupaged.geometry import pages_for, pages_taken
from cupaged.replay.digests import OwnedDigest, SlotDigest
from cupaged.replay.drivers import Ending, Engine
from cupaged.replay.sharing import Block, PrefixCache
from cupaged.replay.traces import Trace
from cupaged.replay.verify import Ledger, VerificationError

AHEAD = 16
STEPS_A_REPORT = 64


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
    engine : Engine
        Where the slots come from.
    page_size, chunk, max_running : int
        Slots in a page; prompt tokens that one step prefills; requests that may hold slots at a time.
    step_s : float
        Seconds of the virtual clock that a step takes.
    cache : PrefixCache, optional
        Shares prefixes by the trace's `hash_ids`.
    ledger : Ledger, optional
        Proves each step.

    Attributes
    ----------
    clocks, tokens, pages, seconds : array.array
        For each step that had work: its number on the clock, tokens held and pages owned before the requests
        that end free theirs, and time in the allocator. A shared token or page counts once; what only the cache
        holds does not count.
    steps, served, retractions, slots : int
        Steps that had work, requests that ended, retractions, and slots handed out.
    looked_up, found_pages : int
        Prompt tokens looked up in the cache, and pages found there: not allocated again.
    evicted_pages, replaced_pages : int
        Pages that the cache gave up, and pages of prompts that were computed twice at the same time, freed for
        those that the cache held by then.
    digest, owned : SlotDigest, OwnedDigest
        Of the slots handed out, each step's prefills behind its decodes, and of what requests own.
    """

    def __init__(
        self,
        trace: Trace,
        order: np.ndarray,
        engine: Engine,
        *,
        page_size: int,
        chunk: int,
        max_running: int,
        step_s: float,
        cache: PrefixCache | None = None,
        ledger: Ledger | None = None,
    ):
        self.engine, self.cache, self.ledger = engine, cache, ledger
        self.page_size, self.chunk, self.max_running = page_size, chunk, max_running
        self.steps = self.served = self.retractions = self.slots = 0
        self.looked_up = self.found_pages = self.evicted_pages = self.replaced_pages = 0
        self.clocks, self.tokens, self.pages, self.seconds = array("q"), array("q"), array("q"), array("d")
        self._num_pages = engine.free_pages()
        self.digest, self.owned = SlotDigest(), OwnedDigest(self._num_pages, page_size)

        self._prompt, self._output = trace.prompt.tolist(), trace.output.tolist()
        self._ids = [ids.tolist() for ids in trace.hash_ids or ()]
        self._coming = order.tolist()
        # Rounded, so that an arrival at k steps is not the k + 1st for the last bit of a float.
        self._arrives = np.ceil(np.round(trace.arrival[order] / step_s, 6)).astype(np.int64).tolist()
        self._came = 0
        self._clock = -1
        self._tokens = 0  # in pages that anybody owns, the cache included

        self._waiting: deque[int] = deque()
        self._begun: tuple[int, int, int] | None = None  # request, row, tokens: its prompt is not all there yet
        self._running = Running(max_running)
        self._rows = list(range(max_running))[::-1]
        self._shared: dict[int, list[Block]] = {}  # what each row uses of the cache
        self._full = False  # a request was retracted, and none has ended since

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
        self._close()
        if progress:
            progress(self.served, len(self._coming))

    def _close(self) -> None:
        """Prove the last state, and that nothing is left of it when the cache is emptied."""
        if not self.ledger:
            return
        self.ledger.audit(self.engine.free_list(), self.engine.owners())
        if self.cache:
            self._give_up(self.cache.evict(self._num_pages))
            self.ledger.settle(self.engine.free_pages())
            self.ledger.audit(self.engine.free_list(), self.engine.owners())

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
            if not self._evict_for(pages_taken(running.length, running.length + 1, self.page_size)):
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
        self._release([request], [row], [length], ended=False)
        self._waiting.appendleft(request)
        self._full = True
        self.retractions += 1

    def _prefill(self) -> None:
        plan = self._plan_prefill()
        if not plan:
            return
        request, row, before, after = np.ascontiguousarray(np.array(plan, np.int64).T)
        if (after > before).any():
            self._evict_for(pages_taken(before, after, self.page_size))
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
        free = self.engine.free_pages() + self._idle_pages() - self._pages_ahead()
        shared: list[tuple[int, int, list[Block]]] = []
        while budget and holders < self.max_running and (self._begun or self._waiting):
            request, row, before = self._begun or (self._waiting[0], self._rows[-1], 0)
            path = [] if self._begun or not self.cache else self.cache.find(self._ids[request], self._prompt[request])
            before += sum(len(block.pages) for block in path) * self.page_size
            prompt = self._prompt[request]
            soon = prompt + min(AHEAD, self._output[request])
            # Pages that were idle are room no more, once they are used.
            need = pages_for(soon, self.page_size) - pages_for(before, self.page_size)
            need += sum(len(block.pages) for block in path if not block.users)
            if need > free:
                break
            if not self._begun:
                self._waiting.popleft()
                self._rows.pop()
                shared.append((request, row, path))
                if self.cache:
                    self.cache.acquire(path)
            after = min(prompt, before + budget)
            self._begun = (request, row, after) if after < prompt else None
            plan.append((request, row, before, after))
            budget -= after - before
            free -= need
            holders += 1
        self._adopt(shared)
        return plan

    def _adopt(self, shared: list[tuple[int, int, list[Block]]]) -> None:
        """Let requests, in their rows, begin with what was found in the cache."""
        if not self.cache:
            return
        self.looked_up += sum(self._prompt[request] for request, _, _ in shared)
        rows, found = [], []
        for request, row, path in shared:
            pages = self.cache.pages(path)
            if not len(pages):
                self.cache.give_up(path)
                continue
            self._shared[row] = path
            self.found_pages += len(pages)
            rows.append(row)
            found.append(pages)
            if self.ledger:
                self.ledger.share(request, pages)
        if rows:
            self.engine.adopt(rows, found)

    def _idle_pages(self) -> int:
        return self.cache.idle_pages if self.cache else 0

    def _evict_for(self, need: int) -> bool:
        """Free idle pages of the cache until `need` are free; False if that freed none."""
        if not (self.cache and self.cache.idle_pages):
            return False
        pages = self.cache.evict(need - self.engine.free_pages())
        self._give_up(pages)
        self.evicted_pages += len(pages)
        return bool(len(pages))

    def _give_up(self, pages: np.ndarray) -> None:
        if not len(pages):
            return
        if self.ledger:
            self.ledger.evict(pages)
        self.engine.evict(pages)
        self._tokens -= len(pages) * self.page_size

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
        self._release(request, row, length, ended=True)
        self.served += len(request)
        self._full = False

    def _hand_out(self, request: np.ndarray, before: np.ndarray, after: np.ndarray, slots: np.ndarray) -> None:
        if self.ledger:
            self.ledger.hand_out(request, before, after, slots)
        self.digest.add(slots)
        self.owned.hand_out(request, before, after, slots)
        self._tokens += len(slots)
        self.slots += len(slots)

    def _release(self, requests: list[int], rows: list[int], lengths: list[int], *, ended: bool) -> None:
        endings = []
        for request, row, length in zip(requests, rows, lengths, strict=True):
            ending = self._ending(request, row, length, ended)
            slots = self.engine.slots(row, length)
            self.owned.end(request, slots, ending.shared)
            if self.ledger:
                if wrong := self.engine.wrong_table(row, length):
                    raise VerificationError(f"step {self._clock}: request {request}, {wrong}")
                self.ledger.take_back(request, slots)
            endings.append(ending)
        self.engine.release(endings)
        self._rows.extend(rows)

    def _ending(self, request: int, row: int, length: int, ended: bool) -> Ending:
        """What a request leaves to the cache: nothing, if it was retracted."""
        path = self._shared.pop(row, [])
        shared = sum(len(block.pages) for block in path)
        self._tokens -= length - shared * self.page_size
        if not self.cache:
            return Ending(row, length)
        if not ended:
            self.cache.give_up(path)
            return Ending(row, length, shared)
        cached, new = self.cache.insert(self._ids[request], self._prompt[request], self.engine.pages(row, length))
        self.cache.give_up(path)
        if self.ledger:
            self.ledger.keep(request, new)
        self._tokens += len(new) * self.page_size
        self.replaced_pages += len(cached) - shared - len(new)
        return Ending(row, length, shared, cached)

    def _record(self) -> None:
        self.steps += 1
        idle = self._idle_pages()
        self.clocks.append(self._clock)
        self.tokens.append(self._tokens - idle * self.page_size)
        self.pages.append(self._num_pages - self.engine.free_pages() - idle)

    def _prove(self) -> None:
        if not self.ledger:
            return
        self.ledger.settle(self.engine.free_pages())
        if self.ledger.changed >= self._num_pages:
            self.ledger.audit(self.engine.free_list(), self.engine.owners())
