"""The oracle: lists and loops that anyone can verify by eye. Slow on purpose; the tests compare all else with it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupaged.backends.host import HostBackend
from cupaged.layout import (
    INT32_LARGEST,
    NUM_WORDS,
    SAVED_WORDS,
    SKIPPED_PAGE,
    WHOLE_BATCH,
    Breach,
    DigestCell,
    Status,
    Where,
    Word,
)

__all__ = ["ReferenceBackend"]


class Request(NamedTuple):
    """One request of a batch: its lengths before and after, its last slot, its table row."""

    prefix: int
    seq: int
    last: int
    row: int = -1
    padding: bool = False


class ReferenceBackend(HostBackend):
    """All operations, one entry after the other."""

    name = "reference"

    def alloc_pages(self, pages: int, out: np.ndarray) -> None:
        self._begin()
        self._decide([pages], out.size, out.size, None, False)
        self._write(out, [Request(0, out.size, -1)])

    def alloc_extend(self, prefix, seq, last, num_tokens: int, out: np.ndarray) -> None:
        requests = [Request(int(p), int(s), int(x)) for p, s, x in zip(prefix, seq, last, strict=True)]
        self._allocate(requests, num_tokens, out)

    def alloc_decode(self, seq, last, out: np.ndarray) -> None:
        requests = [Request(int(s) - 1, int(s), int(x)) for s, x in zip(seq, last, strict=True)]
        self._allocate(requests, len(requests), out)

    def step(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out: np.ndarray) -> None:
        requests = []
        for i, row in enumerate(map(int, rows)):
            after = int(seq[i])
            before = after if prefix is None else int(prefix[i])
            if prefix is None and after <= INT32_LARGEST:
                after += 1
            requests.append(self._in_table(table, paged, pad_row, row, before, after, prefix is None))
        self._allocate(requests, num_tokens, out, table, paged)

    def _in_table(self, table, paged, pad_row, row, prefix, seq, decode) -> Request:
        """The request with its last slot as the table tells it."""
        size = self.page_size
        if row == pad_row:
            tokens = seq - prefix if self._lengths_hold(prefix, seq) else int(decode)
            return Request(0, tokens, -1, row, padding=True)
        columns = table.shape[1] * (size if paged else 1)
        last = -1
        if 0 <= row < table.shape[0] and self._lengths_hold(prefix, seq) and seq <= columns and 0 < prefix < seq:
            if paged:
                page = int(table[row, (prefix - 1) // size])
                last = page if page < 0 else page * size + (prefix - 1) % size
            else:
                last = int(table[row, prefix - 1])
        return Request(prefix, seq, last, row)

    @staticmethod
    def _lengths_hold(prefix: int, seq: int) -> bool:
        return 0 <= prefix <= seq <= INT32_LARGEST

    def _allocate(self, requests: list[Request], num_tokens: int, out, table=None, paged: bool = False) -> None:
        self._begin()
        first_error, refused, pages, tokens = None, False, [], 0
        for i, r in enumerate(requests):
            breach, carry_on = self._breach(r, table, paged)
            if breach:
                value = {Breach.ROW: r.row, Breach.LENGTH: r.seq, Breach.COLUMN: r.seq}.get(breach, r.last)
                first_error = first_error or (breach, i, value)
                refused = refused or not carry_on
            if self._lengths_hold(r.prefix, r.seq):
                pages.append(0 if r.padding else self._up(r.seq) - self._up(r.prefix))
                tokens += r.seq - r.prefix
        self._decide(pages, tokens, num_tokens, first_error, refused)
        self._write(out, requests, table, paged)

    def _up(self, n: int) -> int:
        return -(-n // self.page_size)

    def _breach(self, r: Request, table, paged: bool) -> tuple[Breach, bool]:
        """What is wrong with a request, and whether the classic kernels' behaviour would harm nobody."""
        if r.padding:
            return Breach.NONE, False
        if table is not None and not 0 <= r.row < table.shape[0]:
            return Breach.ROW, False
        if not self._lengths_hold(r.prefix, r.seq):
            return Breach.LENGTH, False
        if table is not None and r.seq > table.shape[1] * (self.page_size if paged else 1):
            return Breach.COLUMN, False
        tokens = min(r.seq, self._up(r.prefix) * self.page_size) - r.prefix
        if tokens == 0:
            return Breach.NONE, False
        page = r.last // self.page_size
        if not self._is_page(page):
            return Breach.RANGE, False
        if self.ref_count[page] == 0:
            return Breach.FREE_PAGE, False
        if self.ref_count[page] > 1:
            return Breach.SHARED_PAGE, False
        offset = r.last + 1 - page * self.page_size
        if offset != r.prefix % self.page_size:
            return Breach.MISALIGNED, not self.strict and offset + tokens <= self.page_size
        return Breach.NONE, False

    def _decide(self, pages, tokens: int, num_tokens: int, first_error, refused: bool) -> None:
        w, status, needed = self.words, Status.OK, sum(pages)
        if self.quiet and needed > w[Word.FREE]:
            status = Status.SHORT  # told as None, whatever else is wrong
        elif first_error:
            self._record(*first_error)
            if refused:
                status = Status.REFUSED
        if status == Status.OK and tokens != num_tokens:
            self._record(Breach.SUM, WHOLE_BATCH, tokens)
            if self.strict or tokens > num_tokens:
                status = Status.REFUSED
        if status == Status.OK and needed > w[Word.FREE]:
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
            w[Word.RET] = needed << 32 | (tokens & 0xFFFFFFFF)
        else:
            w[Word.REFUSALS] += 1
            if status == Status.REFUSED or not self.quiet:
                w[Word.RET] = 0
        self._end(status)

    def _write(self, out: np.ndarray, requests: list[Request], table=None, paged: bool = False) -> None:
        out[:] = self.refused_slot
        if not self.words[Word.OK]:
            return
        position, t = int(self.words[Word.FIRST]), 0
        for r in requests:
            slot = r.last
            for token in range(r.prefix, r.seq):
                if r.padding:
                    slot = 0
                elif token % self.page_size == 0:
                    page = int(self.free_ring[position])
                    self.ref_count[page] = 1
                    position = (position + 1) % self.capacity
                    slot = page * self.page_size
                    if paged:
                        table[r.row, token // self.page_size] = page
                else:
                    slot += 1
                if table is not None and not paged and not r.padding:
                    table[r.row, token] = slot
                out[t] = slot
                t += 1

    def free_slots(self, slots, push: bool, index_base: int, where: Where) -> None:
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
            self._give(sorted(self.freed), where)
            self.freed.clear()
        self._end(Status.OK)

    def free_pages(self, entries, divisor: int, where: Where) -> None:
        self._begin()
        entries = [(i, int(e), int(e) // divisor) for i, e in enumerate(entries)]
        self._free_entries(entries, where)
        self._end(Status.OK)

    def free_rows(self, table, paged: bool, pad_row: int, rows, keep, seq, where: Where) -> None:
        self._begin()
        entries, size, error = [], self.page_size, None
        for i, row in enumerate(map(int, rows)):
            if row == pad_row:
                continue
            kept, length = 0 if keep is None else int(keep[i]), int(seq[i])
            if not 0 <= row < table.shape[0]:
                error = error or (Breach.ROW, i, row)
            elif not self._lengths_hold(kept, length):
                error = error or (Breach.LENGTH, i, kept if kept < 0 or kept > length else length)
            elif length > table.shape[1] * (size if paged else 1):
                error = error or (Breach.COLUMN, i, length)
            else:
                for nth in range(self._up(kept), self._up(length)):
                    cell = int(table[row, nth if paged else nth * size])
                    entries.append((i, cell, cell if paged else cell // size))
        if error:
            self._record(*error)
            self.words[Word.REFUSALS] += 1
        else:
            self._free_entries(entries, where)
        self._end(Status.REFUSED if error else Status.OK)

    def free_queue(self, table, rows, begins, ends, entries, where: Where, slot_refs) -> None:
        self._begin()
        queued = []
        for i, (row, begin, end) in enumerate(zip(rows, begins, ends, strict=True)):
            source = entries if row < 0 else table[row]
            queued += [(i, int(page), int(page)) for page in source[begin:end] if page != SKIPPED_PAGE]
        for page in self._free_entries(queued, where):
            if slot_refs is not None:
                refs = slot_refs[page * self.page_size : (page + 1) * self.page_size]
                refs[refs > 0] -= 1
        self._end(Status.OK)

    def _free_entries(self, entries: list[tuple[int, int, int]], where: Where) -> list[int]:
        """Take one owner off the page of each (index, value, page); the pages that have none left, as pushed."""
        gone = set()
        for i, value, page in entries:
            if not self._is_page(page):
                self._record(Breach.RANGE, i, value)
            elif self.ref_count[page] == 0:
                self._record(Breach.DOUBLE_FREE, i, value)
            elif self._drop_owner(page):
                gone.add(page)
        pushed = [page for page in dict.fromkeys(page for _, _, page in entries) if page in gone]
        self._give(pushed, where)
        return pushed

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

    def flashinfer_tables(
        self, table, paged: bool, pad_row: int, rows, seq, indptr, indices, length: int, last
    ) -> None:
        indices[:] = indptr[0] = at = 0
        for i, (row, tokens) in enumerate(zip(map(int, rows), map(int, seq), strict=True)):
            pages = self._pages_of(table, paged, pad_row, row, tokens)
            given = pages[: length - at]
            indices[at : at + len(given)] = given
            at += len(given)
            indptr[i + 1] = at
            full = self.page_size if given else 0
            last[i] = tokens - (len(pages) - 1) * self.page_size if pages and given == pages else full

    def block_table(self, table, paged: bool, pad_row: int, rows, seq, parts: int, out) -> None:
        out[:] = 0
        for i, (row, tokens) in enumerate(zip(map(int, rows), map(int, seq), strict=True)):
            pages = self._pages_of(table, paged, pad_row, row, tokens)
            kernel_pages = [page * parts + part for page in pages for part in range(parts)]
            given = kernel_pages[: -(-tokens // (self.page_size // parts))] if pages else []
            given = given[: out.shape[1]]
            out[i, : len(given)] = given

    def slot_mapping(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out) -> None:
        out[:] = -1
        at = 0
        for row, before, after in zip(map(int, rows), map(int, prefix), map(int, seq), strict=True):
            if not self._lengths_hold(before, after):
                continue
            if self._readable(table, paged, pad_row, row, after):
                for token in range(before, min(after, before + num_tokens - at)):
                    out[at + token - before] = self._slot_of(table, paged, row, token)
            at = min(num_tokens, at + after - before)

    def _readable(self, table, paged: bool, pad_row: int, row: int, tokens: int) -> bool:
        columns = table.shape[1] * (self.page_size if paged else 1)
        return row != pad_row and 0 <= row < table.shape[0] and 0 <= tokens <= min(columns, INT32_LARGEST)

    def _pages_of(self, table, paged: bool, pad_row: int, row: int, tokens: int) -> list[int]:
        """The pages of a request; the padding page for what the pool has no page of."""
        if not self._readable(table, paged, pad_row, row, tokens):
            return []
        cells = [int(table[row, nth if paged else nth * self.page_size]) for nth in range(self._up(tokens))]
        pages = cells if paged else [cell // self.page_size for cell in cells]
        return [page if 0 <= page <= self.capacity else 0 for page in pages]

    def _slot_of(self, table, paged: bool, row: int, token: int) -> int:
        if paged:
            slot = int(table[row, token // self.page_size]) * self.page_size + token % self.page_size
        else:
            slot = int(table[row, token])
        return slot if 0 <= slot < (self.capacity + 1) * self.page_size else -1

    def reference_counts(self, entries, out) -> None:
        for i, page in enumerate(map(int, entries)):
            out[i] = self.ref_count[page] if self._is_page(page) else -1

    def fold(self, entries, where: Where, cells: np.ndarray) -> None:
        w, values = self.words, [int(e) for e in entries]
        listed = int(w[Word.FREE] + w[Word.STAGED])
        pushed = min(max(0, int(w[Word.FREED]) - int(cells[DigestCell.FREED_SEEN])), listed)
        first = int(w[Word.HEAD]) + (0 if where == Where.FRONT else listed - pushed)
        values += [int(self.free_ring[(first + i) % self.capacity]) for i in range(pushed)]
        values += [int(w[word]) for word in (Word.FREE, Word.STAGED, Word.SHARED)]
        total = int(cells[DigestCell.DIGEST])
        total += sum(self._mixed(value + (place + 1) * 0x9E3779B97F4A7C15) for place, value in enumerate(values))
        digest = self._mixed(total)
        cells[DigestCell.DIGEST] = digest - (digest >> 63 << 64)
        cells[DigestCell.FREED_SEEN] = w[Word.FREED]

    @staticmethod
    def _mixed(x: int) -> int:
        """64 bits for 64 bits, one to one: the end of splitmix64."""
        x &= 0xFFFFFFFFFFFFFFFF
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        return x ^ x >> 31

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
        number = int(self.words[Word.OP]) << 32
        self.mailbox[:NUM_WORDS] = [number | int(word) & 0xFFFFFFFF for word in self.words]
        self.mailbox[NUM_WORDS:] = [number | int(word) >> 32 & 0xFFFFFFFF for word in self.words]

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
