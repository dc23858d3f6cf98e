"""Which pages are free: the one state that the allocators stand on, and what the host may believe about it.

The device holds the truth. The host keeps bounds, and mail from the device corrects them::

        mail of op 7: exact       ops 8, 9 and 10 are queued, their mail is not here yet
      |----------------------|  -3 .. -5 |  +2 .. +9 |  -1 |
                                                            ^ free_at_least .. free_at_most

An allocation that fits `free_at_least` is launched at once. Only one that does not waits for the exact figure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupaged.errors import (
    CaptureError,
    ConcurrentCallError,
    DeviceError,
    DeviceTimeoutError,
    IntegrityError,
    device_error,
)
from cupaged.layout import NUM_WORDS, SAVED_WORDS, Kind, Status, Word, unpack_mail

__all__ = ["PagePool", "PoolState", "Stats"]

log = logging.getLogger("cupaged")

WAIT_LIMIT_S = 60.0
MOST_PENDING = 64
FEW_PENDING = 32  # with so many, the mail is read though nobody needs it yet

_LOW = 0xFFFFFFFF
_ERROR_CODE = int(Word.ERROR_CODE)  # every call looks there, and an enum's member takes longer to find


@dataclass(frozen=True)
class Stats:
    """Counters of one pool since it was made.

    Attributes
    ----------
    ops : int
        Operations run on the device, graph replays included.
    free_pages, staged_pages, owned_pages, shared_pages : int
        Pages at the front, waiting for a merge, with an owner, and with more than one.
    peak_pages : int
        Most pages that had an owner at one time.
    pages_allocated, pages_freed : int
        Pages handed out, and come back, ever.
    refusals : int
        Allocations that gave no page.
    errors : int
        Recorded errors that the host has read.
    """

    ops: int
    free_pages: int
    staged_pages: int
    owned_pages: int
    shared_pages: int
    peak_pages: int
    pages_allocated: int
    pages_freed: int
    refusals: int
    errors: int


@dataclass(frozen=True)
class PoolState:
    """What `PagePool.backup` returns: a copy of the state, and the bounds that held when it was taken."""

    saved: Any
    capacity: int
    at_least: int
    at_most: int
    may_share: bool


class Watcher(Protocol):
    """What follows every call that changes a pool, such as `cupaged.integrations.distributed.LockstepGuard`."""

    def launched(self, args: tuple) -> None:
        """Hear that the op of kind ``backend.kind`` was launched with these arguments."""

    def refused(self) -> None:
        """Hear that an allocation was told None without a launch."""

    def call_ends(self) -> None:
        """Act behind a call's ops, on its stream, while no other call can begin. May raise."""


class PagePool:
    """Pages 1 .. num_pages of one backend, with the host's bounds and the mail.

    Parameters
    ----------
    backend : backend instance
        Where the state lives and the kernels run.
    errors : {"raise", "defer"}
        What a recorded error does at the next mutating call.
    """

    def __init__(self, backend: Any, errors: str) -> None:
        if errors not in ("raise", "defer"):
            raise ValueError(f"errors must be 'raise' or 'defer', not {errors!r}")
        self.backend = backend
        self.capacity = self.num_pages = int(backend.capacity)
        self.errors = errors
        self.captured = False
        self.capturing = False
        self._replays_noted = False
        self._refreshed_op = 0
        self.host_refusals = 0
        self._mail = backend.mail
        self._sequence = 0  # number of the last mail read
        self._last_op = 0  # the host's number in it
        self._last_words = [0] * NUM_WORDS
        self._lock = threading.Lock()
        self._holder = 0  # the thread that holds it
        self._being_read = False
        self._owner = threading.get_ident()
        self._op = self._mail_op = self._ack = 0
        self._issued = 0  # number of the last launch, which may have failed, or have run all the same
        self._last_retain = 0
        self.errors_read = 0
        self._deferred: DeviceError | None = None
        # (op, change of at_least, change of at_most, change of the front's lower bound)
        self._pending: deque[tuple[int, int, int, int]] = deque()
        self._merged_until = 0
        self._known = (0, 0, 0, 0)  # free + staged: least and most; least at the front; shared
        self.watcher: Watcher | None = None
        self.in_graphs: list[Any] = []  # memory that captured launches write to, though its owner has gone
        self._low = self._high = self._front = 0  # `_known` and all that is pending, summed up
        if backend.enter(""):
            backend.leave()
            raise CaptureError("an allocator cannot be made while a graph is captured")
        try:
            self.clear(self.num_pages)
        finally:
            backend.leave()

    # ---- mutating calls ----------------------------------------------------------------------------------------

    def enter(self, library: str, raising: bool = True, changing: bool = True) -> None:
        """Begin a mutating call: one at a time, ordered on the caller's stream, recorded errors first.

        A call that only reads (`changing` is False) needs the order too, but its replays change nothing.
        """
        me = threading.get_ident()
        # a reader in another thread, unlike a change, is waited for
        if not self._lock.acquire(self._being_read and self._holder != me):
            raise ConcurrentCallError("another call is changing this allocator; serialise the calls of your threads")
        try:
            self._owner = self._holder = me
            self.capturing = self.backend.enter(library)
            if self.capturing:
                if changing:
                    self.captured = True
                    self._refreshed_op = -1  # whatever was known, replays may change
            elif (
                self._mail[_ERROR_CODE] & _LOW
                or len(self._pending) >= FEW_PENDING
                or self._last_retain > self._mail_op
            ):
                self._news()  # else it is read when an allocation needs what it says
            if raising and self._deferred is not None:
                self.raise_recorded()
        except BaseException:
            self.leave()
            raise

    def raise_recorded(self) -> None:
        """Raise what the mail that was read so far tells of, unless errors are deferred."""
        if self._deferred is not None and self.errors == "raise" and not self.capturing:
            self._raise_deferred()

    def leave(self) -> None:
        """End a mutating call."""
        try:
            if self.watcher is not None:
                self.watcher.call_ends()
        finally:
            self.backend.leave()
            self._holder = 0
            self._lock.release()

    def _launch(self, kind: Kind, quiet: bool, launch: Callable[..., Any], *args: Any) -> Any:
        """Launch an op and count it, unless a capture records it or it failed: nobody may wait for these."""
        backend = self.backend
        op = 0
        if not self.capturing:
            op = self._issued = self._issued + 1
        backend.kind, backend.quiet = kind, 1 if quiet else 0  # no bool: kernels are compiled for an int
        backend.host_op, backend.error_ack = op, self._ack
        result = launch(*args)
        if op:
            self._op = op
        if self.watcher is not None:
            self.watcher.launched(args)
        return result

    def refuse(self, sort_bound: int) -> None:
        """Say None where the whole pool would be too small."""
        if self.backend.need_sort:
            self.backend.sort_free(min(sort_bound, self.num_pages + 1))
        self._count_refusal()

    def _count_refusal(self) -> None:
        self.host_refusals += 1
        if self.watcher is not None:
            self.watcher.refused()

    def allocate(
        self, kind: Kind, least: int, most: int, sort_bound: int, launch: Callable[..., None], *args: Any
    ) -> bool:
        """Run an allocation that takes `least` to `most` pages; False if the pool is short.

        `sort_bound` is what decides about a merge of staged pages.
        """
        backend = self.backend
        if backend.need_sort and (
            self.capturing
            or (sort_bound > self._front_known() and not (self._news() and sort_bound <= self._front_known()))
        ):
            backend.sort_free(sort_bound)
        if self.capturing:
            self._launch(kind, False, launch, *args)
            return True
        fits = (
            (not self.captured and most <= self._low and most <= self.num_pages)  # `_fits`, without its calls
            or self._fits(most)
            or (self._news() and self._fits(most))
        )
        if not fits:
            exact = self._exact_free()
            if exact < least:
                self._count_refusal()
                return False
            fits = most <= exact
        try:
            self._launch(kind, not fits, launch, *args)
        except BaseException:
            self._expect(self._issued, -most, 0, -most)  # it may have run all the same
            raise
        self._expect(self._op, -most, -least, -most)
        return fits or self._wait(self._op) != Status.SHORT

    def run(self, kind: Kind, at_least: int, at_most: int, launch: Callable[..., None], *args: Any) -> None:
        """Run an op that gives back `at_least` to `at_most` pages, or changes nothing."""
        self._launch(kind, False, launch, *args)
        if kind is Kind.RETAIN:
            self._last_retain = self._op
        if not self.capturing:
            front = 0 if self.backend.need_sort else at_least
            self._expect(self._op, at_least, at_most, front)

    def clear(self, num_pages: int) -> None:
        """Make pages 1 .. num_pages free, in order, and forget all owners."""
        self.num_pages = num_pages
        self._launch(Kind.CLEAR, False, self.backend.clear, num_pages)
        self._reset_bounds(num_pages, num_pages)

    def backup(self) -> PoolState:
        """Copy the state."""
        self.backend.kind = Kind.BACKUP
        self._news()
        at_least, at_most = self.at_least, self.at_most
        if not self._bounds_hold():
            at_least, at_most = 0, self.num_pages
        may_share = self.may_share()
        saved = self._launch(Kind.BACKUP, False, self.backend.backup)
        self._expect(self._op, 0, 0, 0)
        return PoolState(saved, self.capacity, at_least, at_most, may_share)

    def restore(self, state: PoolState, num_pages: int) -> None:
        """Put a copied state back; op numbers go on."""
        self._launch(Kind.RESTORE, False, self.backend.restore, state.saved)
        self.num_pages = num_pages
        self._reset_bounds(state.at_least, state.at_most, state.may_share)

    def state_with(self, free: np.ndarray, staged: np.ndarray) -> PoolState:
        """Make up a state for `restore`: these pages are free, in this order, and all others have one owner.

        Parameters
        ----------
        free, staged : numpy.ndarray
            Page ids, integers, shape ``(n,)``: at the front, and waiting for a merge (`need_sort`).

        Raises
        ------
        ValueError
            If a page is not one of the pool's, or is named twice.
        """
        pages = np.concatenate([free, staged]).astype(np.int64)
        if pages.size and not (
            pages.min() >= 1 and pages.max() <= self.num_pages and np.unique(pages).size == pages.size
        ):
            raise ValueError(f"free pages must be some of 1 .. {self.num_pages}, each named once")
        ring, refs = np.zeros(self.capacity, np.int32), np.zeros(self.capacity + 1, np.int32)
        ring[: pages.size] = pages
        refs[: self.num_pages + 1] = 1
        refs[pages] = 0
        words = {Word.HEAD: 0, Word.FREE: len(free), Word.STAGED: len(staged), Word.SHARED: 0}
        words[Word.NUM_PAGES] = self.num_pages
        saved = np.concatenate([ring, refs, np.array([words[word] for word in SAVED_WORDS], np.int32)])
        return PoolState(saved, self.capacity, pages.size, pages.size, False)

    def refresh(self) -> None:
        """Wait for the device and make the bounds exact."""
        self.refuse_capture("refresh()")
        self._op_refresh()
        self._refreshed_op = self._issued

    def _op_refresh(self) -> None:
        self._launch(Kind.REFRESH, False, self.backend.refresh)
        self._wait(self._op)

    def sort(self) -> None:
        """Merge the staged pages with the front, ascending."""
        self.backend.sort_free(self.num_pages + 1)

    def note_replay(self, pages_at_most: int) -> None:
        """Tell that a captured graph was replayed and took at most so many pages."""
        self._replays_noted = True
        self._expect(self._issued + 1, -pages_at_most, self.num_pages, -pages_at_most)

    # ---- what the host believes --------------------------------------------------------------------------------

    @property
    def at_least(self) -> int:
        """Free pages, staged ones included, at least."""
        return 0 if self._low < 0 else min(self._low, self.num_pages)

    @property
    def at_most(self) -> int:
        """Free pages, staged ones included, at most."""
        return max(0, min(self._high, self.num_pages))

    @property
    def front_at_least(self) -> int:
        """Free pages at the front, at least."""
        return self._front if self.backend.need_sort else self.at_least

    def may_share(self) -> bool:
        """Whether a page may have more than one owner, as far as the host knows."""
        return self.captured or self._known[3] > 0 or self._last_retain > self._mail_op

    def _fits(self, pages: int) -> bool:
        return pages <= self.at_least and self._bounds_hold()

    def _news(self) -> bool:
        """Read the mail, if there is any that was not read."""
        if self.capturing or self._mail[0] >> 32 == self._sequence:
            return False
        self._read_mail()
        return True

    def _bounds_hold(self) -> bool:
        return not self.captured or self._replays_noted or self._issued == self._refreshed_op

    def _front_known(self) -> int:
        return self.front_at_least if self._bounds_hold() else 0

    def _reset_bounds(self, at_least: int, at_most: int, may_share: bool = False) -> None:
        self._pending.clear()
        self._merged_until = 0
        # Older mail must not correct what starts here.
        self._mail_op = self._op
        self._known = (at_least, at_most, 0, int(may_share))
        self._last_retain = 0
        self._sum()

    def _expect(self, op: int, at_least: int, at_most: int, front: int) -> None:
        """Note how op changes the bounds until its mail comes."""
        if self._mail_op >= op:
            return
        pending = self._pending
        pending.append((op, at_least, at_most, front))
        self._low += at_least
        self._high += at_most
        self._front += front
        if len(pending) > MOST_PENDING:
            first, second = pending.popleft(), pending.popleft()
            merged = second[0]
            pending.appendleft((merged, first[1] + second[1], first[2] + second[2], first[3] + second[3]))
            self._merged_until = merged

    def _sum(self) -> None:
        low, high, front, _ = self._known
        for _, d_low, d_high, d_front in self._pending:
            low += d_low
            high += d_high
            front += d_front
        self._low, self._high, self._front = low, high, front

    def _read_mail(self) -> int | None:
        """Take the newest mail, if it is of one op: exact counters for all ops up to its own. Returns the status."""
        op, free, staged, shared, status, code, error_op = self._mail[:7]
        number = op >> 32
        parts = (op ^ free) | (op ^ staged) | (op ^ shared) | (op ^ status) | (op ^ code) | (op ^ error_op)
        if parts >> 32:
            return None
        self._sequence = number
        # The host's own counter tells the upper half of the op's number, which no op issued is above.
        op = self._last_op = self._issued - (self._issued - op & _LOW)
        if op >= self._mail_op and op >= self._merged_until:
            self._mail_op = op
            pending = self._pending
            while pending and pending[0][0] <= op:
                pending.popleft()
            free, staged = free & _LOW, staged & _LOW
            self._known = (free + staged, free + staged, free, shared & _LOW)
            self._sum()
        if code & _LOW and error_op & _LOW != self._ack & _LOW:
            self._take_error()
        return status & _LOW

    def _take_error(self) -> None:
        words = unpack_mail(self._mail.tolist())
        if words is None or not words[Word.ERROR_CODE] or words[Word.ERROR_OP] <= self._ack:
            return
        self._ack = words[Word.ERROR_OP]
        error = device_error(*words[Word.ERROR_CODE : Word.ERROR_VALUE + 1])
        self.errors_read += 1
        if self.errors == "defer":
            log.error("recorded on the device: %s", error)
        if self._deferred is None:
            self._deferred = error

    def _raise_deferred(self) -> None:
        error, self._deferred = self._deferred, None
        if error is not None:
            raise error

    def _wait(self, op: int) -> int:
        """Poll until the mail of `op` is here; the last op's status."""
        if self.capturing:
            raise CaptureError("this call would have to wait, which a stream capture forbids")
        begin = time.monotonic()
        turn = 0
        while True:
            status = self._read_mail()
            if status is not None and self._last_op >= op:
                return status
            turn += 1
            if turn > 100:
                self.backend.poll()
                waited = time.monotonic() - begin
                if waited > WAIT_LIMIT_S:
                    raise DeviceTimeoutError(
                        f"the device has not finished op {op} of this allocator within {waited:.0f} s; "
                        "its stream is stuck, or waits for something that never comes"
                    )
                time.sleep(20e-6 if turn < 1000 else 1e-3)

    def _exact_free(self) -> int:
        """Free pages, staged ones included; waits only if the figure is not known."""
        if self.at_least != self.at_most or not self._bounds_hold():
            self._settle(self._replays_noted)
        return self.at_least

    def _settle(self, unseen: bool) -> None:
        """Wait for all queued ops; `unseen`: and for what no mail of theirs may tell of, as after a capture."""
        if unseen or self.captured or self._issued != self._op:
            self._op_refresh()
        else:
            self._wait(self._op)

    # ---- read-only ---------------------------------------------------------------------------------------------

    def elsewhere(self) -> bool:
        """Whether the caller's thread is another than the last that changed the pool: it must not wait here."""
        return threading.get_ident() != self._owner

    def refuse_capture(self, what: str) -> None:
        """Raise inside a call that has entered, if its stream is being captured."""
        if self.capturing:
            raise CaptureError(f"{what} is not possible while a graph is captured: it would wait or allocate")

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Around a call that may wait but was not entered, or, in debug mode, is part of one that was."""
        me = threading.get_ident()
        nested = self._holder == me
        if not nested:
            if not self._lock.acquire(blocking=self._being_read):
                raise ConcurrentCallError(f"another thread is changing this allocator; {what} needs it at rest")
            self._holder, self._being_read = me, True
        try:
            self.capturing = self.backend.enter("")
            try:
                self.refuse_capture(what)
                yield
            finally:
                self.backend.leave()
        finally:
            if not nested:
                self._holder, self._being_read = 0, False
                self._lock.release()

    def free_pages_count(self) -> int:
        """Free pages. Exact in the thread that changes the pool; elsewhere the last known figure, without a wait."""
        if self.elsewhere():
            return self._last_known()
        self._news()
        if self.at_least == self.at_most and self._bounds_hold():
            return self.at_least
        with self._reading("available_size()"):
            return self._exact_free()

    def last_known_words(self) -> list[int]:
        """The newest mail that is of one op, read without touching the host's bounds; from any thread, no wait."""
        for _ in range(1000):
            words = unpack_mail(self._mail.tolist())
            if words is not None:
                self._last_words = words
                break
        return self._last_words

    def _last_known(self) -> int:
        words = self.last_known_words()
        return words[Word.FREE] + words[Word.STAGED]

    def free_at_least(self) -> int:
        """Lower bound of the free pages; never waits."""
        if self.elsewhere():
            return min(self.at_least, self._last_known()) if self._bounds_hold() else 0
        self._news()
        return self.at_least if self._bounds_hold() else 0

    def check(self) -> None:
        """Raise the recorded error, if there is one; waits for the ops queued so far."""
        if not self.elsewhere():
            with self._reading("check()"):
                self._settle(False)
        self._raise_deferred()

    def settled_words(self) -> list[int]:
        """The words after all queued ops; from another thread the last known ones."""
        if not self.elsewhere():
            with self._reading("this call"):
                self._settle(self.backend.need_sort)  # a merge sends no mail
        return self.last_known_words()

    def stats(self) -> Stats:
        """Counters, after all queued ops; from another thread the last known ones."""
        w = self.settled_words()
        return Stats(
            ops=w[Word.OP],
            free_pages=w[Word.FREE],
            staged_pages=w[Word.STAGED],
            owned_pages=w[Word.NUM_PAGES] - w[Word.FREE] - w[Word.STAGED],
            shared_pages=w[Word.SHARED],
            peak_pages=w[Word.PEAK],
            pages_allocated=w[Word.ALLOCATED],
            pages_freed=w[Word.FREED],
            refusals=w[Word.REFUSALS] + self.host_refusals,
            errors=self.errors_read,
        )

    def free_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Page ids at the front in the order of allocation, and the staged ones behind; waits."""
        ring, _, w = self.snapshot()
        position = (int(w[Word.HEAD]) + np.arange(int(w[Word.FREE] + w[Word.STAGED]))) % self.capacity
        pages = ring[position]
        return pages[: int(w[Word.FREE])], pages[int(w[Word.FREE]) :]

    def snapshot(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ring, reference counts and words on the host; waits."""
        with self._reading("this call"):
            return self.backend.snapshot()

    def check_integrity(self) -> None:
        """Prove that no page is lost, in the free list twice, or both free and owned; waits.

        Raises
        ------
        IntegrityError
            Naming the first page, or the counter, that is wrong.
        """
        ring, refs, w = self.snapshot()
        n, head = int(w[Word.NUM_PAGES]), int(w[Word.HEAD])
        listed = int(w[Word.FREE] + w[Word.STAGED])
        free, staged = int(w[Word.FREE]), int(w[Word.STAGED])
        if not (0 <= head < self.capacity and free >= 0 and staged >= 0 and listed <= n):
            raise IntegrityError(f"counters out of range: head {head}, free {free}, staged {staged}")
        pages = ring[(head + np.arange(listed)) % self.capacity].astype(np.int64)
        bad = (pages < 1) | (pages > n)
        if bad.any():
            raise IntegrityError(f"page {pages[bad][0]} in the free list is not in 1 .. {n}")
        times = np.bincount(pages, minlength=n + 1)[1:]
        refs = refs[1 : n + 1]
        for mask, what in (
            (times > 1, "is in the free list more than once"),
            ((times > 0) & (refs != 0), "is both free and owned"),
            ((times == 0) & (refs == 0), "is lost: neither free nor owned"),
            (refs < 0, "has a negative count of owners"),
        ):
            if mask.any():
                raise IntegrityError(f"page {int(mask.argmax()) + 1} {what}")
        shared = int((refs > 1).sum())
        if shared != w[Word.SHARED]:
            raise IntegrityError(f"{shared} pages have more than one owner, but the counter says {w[Word.SHARED]}")
