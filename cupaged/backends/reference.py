"""The oracle: lists and loops that anyone can verify by eye. Slow on purpose; the tests compare all else with it."""

from __future__ import annotations

import numpy as np

from cupaged.backends.host import HostBackend
from cupaged.backends.layout import INT32_LARGEST, SAVED_WORDS, WHOLE_BATCH, Breach, Status, Where, Word

__all__ = ["ReferenceBackend"]


class ReferenceBackend(HostBackend):
    """All operations, one entry after the other."""

    name = "reference"

    def alloc_pages(self, pages: int, out: np.ndarray) -> None:
        self._begin()
        self._decide([pages], out.size, out.size, None, False)
        self._write(out, [(0, out.size, -1)] if out.size else [])

    def alloc_extend(self, prefix, seq, last, num_tokens: int, out: np.ndarray) -> None:
        requests = [(int(p), int(s), int(x)) for p, s, x in zip(prefix, seq, last, strict=True)]
        self._allocate(requests, num_tokens, out)

    def alloc_decode(self, seq, last, out: np.ndarray) -> None:
        requests = [(int(s) - 1, int(s), int(x)) for s, x in zip(seq, last, strict=True)]
        self._allocate(requests, len(requests), out)

    def _allocate(self, requests, num_tokens: int, out: np.ndarray) -> None:
        self._begin()
        first_error, refused, pages, tokens = None, False, [], 0
        for i, (prefix, seq, last) in enumerate(requests):
            breach, carry_on = self._breach(prefix, seq, last)
            if breach:
                first_error = first_error or (breach, i, seq if breach == Breach.LENGTH else last)
                refused = refused or not carry_on
            if breach != Breach.LENGTH:
                pages.append(self._up(seq) - self._up(prefix))
                tokens += seq - prefix
        self._decide(pages, tokens, num_tokens, first_error, refused)
        self._write(out, requests)

    def _up(self, n: int) -> int:
        return -(-n // self.page_size)

    def _breach(self, prefix: int, seq: int, last: int) -> tuple[Breach, bool]:
        """What is wrong with a request, and whether the classic kernels' behaviour would harm nobody."""
        if prefix < 0 or seq < prefix or seq > INT32_LARGEST:
            return Breach.LENGTH, False
        tokens = min(seq, self._up(prefix) * self.page_size) - prefix
        if tokens == 0:
            return Breach.NONE, False
        page = last // self.page_size
        if not self._is_page(page):
            return Breach.RANGE, False
        if self.ref_count[page] == 0:
            return Breach.FREE_PAGE, False
        if self.ref_count[page] > 1:
            return Breach.SHARED_PAGE, False
        offset = last + 1 - page * self.page_size
        if offset != prefix % self.page_size:
            return Breach.MISALIGNED, not self.strict and offset + tokens <= self.page_size
        return Breach.NONE, False

    def _decide(self, pages, tokens: int, num_tokens: int, first_error, refused: bool) -> None:
        w, status, needed = self.words, Status.OK, sum(pages)
        if first_error:
            self._record(*first_error)
            if refused:
                status = Status.REFUSED
        if status == Status.OK and tokens != num_tokens:
            self._record(Breach.SUM, WHOLE_BATCH, tokens)
            if self.strict or tokens > num_tokens:
                status = Status.REFUSED
        if status == Status.OK and needed > w[Word.FREE]:
            if not self.quiet:
                self._record(Breach.SHORT, WHOLE_BATCH, needed)
            status = Status.SHORT
        if status == Status.OK:
            w[Word.FIRST] = w[Word.HEAD]
            w[Word.HEAD] = (w[Word.HEAD] + needed) % self.capacity
            w[Word.FREE] -= needed
            w[Word.ALLOCATED] += needed
            owned = w[Word.NUM_PAGES] - w[Word.FREE] - w[Word.STAGED]
            w[Word.PEAK] = max(w[Word.PEAK], owned)
            w[Word.TOKENS] = tokens
            w[Word.RET] = needed << 32 | tokens
        else:
            w[Word.REFUSALS] += 1
            if status == Status.REFUSED or not self.quiet:
                w[Word.RET] = 0
        self._end(status)

    def _write(self, out: np.ndarray, requests) -> None:
        out[:] = self.refused_slot
        if not self.words[Word.OK]:
            return
        position, t = int(self.words[Word.FIRST]), 0
        for prefix, seq, last in requests:
            slot = last
            for token in range(prefix, seq):
                if token % self.page_size == 0:
                    page = int(self.free_ring[position])
                    self.ref_count[page] = 1
                    position = (position + 1) % self.capacity
                    slot = page * self.page_size
                else:
                    slot += 1
                out[t] = slot
                t += 1

    def free_slots(self, slots, push: bool, index_base: int) -> None:
        self._begin()
        touched: set[int] = set()
        for i, slot in enumerate(slots):
            page = int(slot) // self.page_size
            if not self._is_page(page):
                self._record(Breach.RANGE, index_base + i, int(slot))
            elif self.ref_count[page] > 0:
                touched.add(page)
            elif page not in self.freed:
                self._record(Breach.DOUBLE_FREE, index_base + i, int(slot))
        for page in touched:
            if self._drop_owner(page):
                self.freed.add(page)
        if push:
            self._give(sorted(self.freed), Where.STAGE if self.need_sort else Where.FRONT)
            self.freed.clear()
        self._end(Status.OK)

    def free_pages(self, entries, divisor: int, where: Where) -> None:
        self._begin()
        entries = [int(e) for e in entries]
        pages = [e // divisor for e in entries]
        gone = set()
        for i, page in enumerate(pages):
            if not self._is_page(page):
                self._record(Breach.RANGE, i, entries[i])
            elif self.ref_count[page] == 0:
                self._record(Breach.DOUBLE_FREE, i, entries[i])
            elif self._drop_owner(page):
                gone.add(page)
        self._give([page for page in dict.fromkeys(pages) if page in gone], where)
        self._end(Status.OK)

    def _drop_owner(self, page: int) -> bool:
        self.ref_count[page] -= 1
        self.words[Word.SHARED] -= self.ref_count[page] == 1
        return bool(self.ref_count[page] == 0)

    def _give(self, pages: list[int], where: Where) -> None:
        w = self.words
        w[Word.FREED] += len(pages)
        if where == Where.FRONT:
            first = w[Word.HEAD] = (w[Word.HEAD] - len(pages)) % self.capacity
            w[Word.FREE] += len(pages)
        else:
            first = w[Word.HEAD] + w[Word.FREE] + w[Word.STAGED]
            w[Word.FREE if where == Where.BACK else Word.STAGED] += len(pages)
        for i, page in enumerate(pages):
            self.free_ring[(first + i) % self.capacity] = page

    def retain_pages(self, entries) -> None:
        self._begin()
        for i, page in enumerate(int(e) for e in entries):
            if not self._is_page(page):
                self._record(Breach.RANGE, i, page)
            elif self.ref_count[page] == 0:
                self._record(Breach.FREE_PAGE, i, page)
            else:
                self.ref_count[page] += 1
                self.words[Word.SHARED] += self.ref_count[page] == 2
        self._end(Status.OK)

    def sort_free(self, bound: int) -> None:
        w = self.words
        if w[Word.STAGED] == 0 or bound <= w[Word.FREE]:
            return
        free = [p for p in range(1, int(w[Word.NUM_PAGES]) + 1) if self.ref_count[p] == 0]
        self.free_ring[: len(free)] = free
        w[Word.HEAD], w[Word.FREE], w[Word.STAGED] = 0, len(free), 0

    def clear(self, num_pages: int) -> None:
        self._begin()
        self.free_ring[:] = range(1, self.capacity + 1)
        self.ref_count[:] = 0
        self.ref_count[0] = 1
        self.freed.clear()
        for word in (Word.HEAD, Word.STAGED, Word.SHARED, Word.RET):
            self.words[word] = 0
        self.words[Word.NUM_PAGES] = self.words[Word.FREE] = num_pages
        self._end(Status.OK)

    def _is_page(self, page: int) -> bool:
        return 1 <= page <= self.words[Word.NUM_PAGES]

    def _begin(self) -> None:
        w = self.words
        w[Word.OP] += 1
        w[Word.HOST_OP] = self.host_op
        if w[Word.ERROR_OP] <= self.error_ack:
            w[Word.ERROR_CODE] = 0

    def _record(self, breach: Breach, index: int, value: int) -> None:
        w = self.words
        if not w[Word.ERROR_CODE]:
            w[Word.ERROR_CODE] = self.kind << 8 | breach
            w[Word.ERROR_OP], w[Word.ERROR_INDEX], w[Word.ERROR_VALUE] = w[Word.OP], index, value

    def _end(self, status: Status) -> None:
        self.words[Word.STATUS] = status
        self.words[Word.OK] = status == Status.OK
        self.mailbox[1:] = self.words
        self.mailbox[0] = 2 * self.words[Word.OP]

    def backup(self) -> np.ndarray:
        self._begin()
        saved = [int(self.words[word]) for word in SAVED_WORDS]
        self._end(Status.OK)
        return np.concatenate([self.free_ring, self.ref_count, np.array(saved, np.int32)])

    def restore(self, saved: np.ndarray) -> None:
        self._begin()
        self.free_ring[:] = saved[: self.capacity]
        self.ref_count[:] = saved[self.capacity : 2 * self.capacity + 1]
        for word, value in zip(SAVED_WORDS, saved[2 * self.capacity + 1 :], strict=True):
            self.words[word] = value
        self._end(Status.OK)

    def refresh(self) -> None:
        self._begin()
        self._end(Status.OK)
