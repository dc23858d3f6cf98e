"""The default without a GPU: the same operations, compiled by numba for the host, page by page.

The kernels take the state as three arrays: `pages` (int32, five rows: ring, reference counts, touched marks, freed
pages, scratch), `words` (int64, as in `layout`), `mailbox`; and `setup`, one int64 array of what a pool is made with.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import config, njit, types

from cupaged.backends.host import HostBackend
from cupaged.layout import (
    INT32_LARGEST,
    NUM_WORDS,
    SAVED_WORDS,
    SKIPPED_PAGE,
    WHOLE_BATCH,
    Breach,
    Kind,
    Status,
    Where,
    Word,
)

__all__ = ["NumbaBackend"]

RING, REFS, MARKS, FREED, TOUCHED = range(5)
PAGE_SIZE, STRICT, REFUSED_SLOT, HOST_OP, ERROR_ACK, QUIET, KIND, NUM_FREED = range(8)

# Plain integers: numba takes an enum's members as objects of their own.
HEAD, FREE, STAGED, SHARED, OP = map(int, (Word.HEAD, Word.FREE, Word.STAGED, Word.SHARED, Word.OP))
W_HOST_OP, NUM_PAGES, STATUS, RET, OK = map(int, (Word.HOST_OP, Word.NUM_PAGES, Word.STATUS, Word.RET, Word.OK))
REFUSALS, ALLOCATED, PAGES_FREED, PEAK = map(int, (Word.REFUSALS, Word.ALLOCATED, Word.FREED, Word.PEAK))
FIRST, TOKENS, ERROR_CODE, ERROR_OP = map(int, (Word.FIRST, Word.TOKENS, Word.ERROR_CODE, Word.ERROR_OP))
ERROR_INDEX, ERROR_VALUE = int(Word.ERROR_INDEX), int(Word.ERROR_VALUE)
STATUS_OK, STATUS_SHORT, STATUS_REFUSED = map(int, (Status.OK, Status.SHORT, Status.REFUSED))
NONE, SHORT, LENGTH, SUM, MISALIGNED = map(
    int, (Breach.NONE, Breach.SHORT, Breach.LENGTH, Breach.SUM, Breach.MISALIGNED)
)
RANGE, FREE_PAGE, SHARED_PAGE, DOUBLE_FREE = map(
    int, (Breach.RANGE, Breach.FREE_PAGE, Breach.SHARED_PAGE, Breach.DOUBLE_FREE)
)
FRONT, BACK, STAGE = map(int, (Where.FRONT, Where.BACK, Where.STAGE))
ROW, COLUMN = int(Breach.ROW), int(Breach.COLUMN)
SAVED = tuple(map(int, SAVED_WORDS))
DECODE, DECODE_STEP, TRIM = int(Kind.DECODE), int(Kind.DECODE_STEP), int(Kind.TRIM)


def _kernel(function):
    try:
        return njit(function, cache=True, nogil=True)
    except RuntimeError:  # numba finds no folder that it can write its cache to
        return njit(function, nogil=True)


@_kernel
def begin_op(words, setup):
    words[OP] += 1
    words[W_HOST_OP] = setup[HOST_OP]
    if words[ERROR_OP] <= setup[ERROR_ACK]:
        words[ERROR_CODE] = 0


@_kernel
def record(words, setup, breach, index, value):
    if words[ERROR_CODE] == 0:
        words[ERROR_CODE] = setup[KIND] << 8 | breach
        words[ERROR_OP] = words[OP]
        words[ERROR_INDEX] = index
        words[ERROR_VALUE] = value


@_kernel
def end_op(words, mailbox, status):
    words[STATUS] = status
    words[OK] = 1 if status == STATUS_OK else 0
    number = words[OP] << 32
    for i in range(NUM_WORDS):
        mailbox[i] = number | (words[i] & 0xFFFFFFFF)
        mailbox[NUM_WORDS + i] = number | (words[i] >> 32 & 0xFFFFFFFF)


@_kernel
def breach_of(pages, words, setup, prefix, seq, last):
    """Return the breach of one request and whether the classic kernels' behaviour would harm nobody."""
    if prefix < 0 or seq < prefix or seq > INT32_LARGEST:
        return LENGTH, False
    size = setup[PAGE_SIZE]
    offset = prefix % size
    if offset == 0 or seq == prefix:
        return NONE, False
    tokens = min(seq - prefix, size - offset)
    page = last // size
    if page < 1 or page > words[NUM_PAGES]:
        return RANGE, False
    owners = pages[REFS, page]
    if owners == 0:
        return FREE_PAGE, False
    if owners > 1:
        return SHARED_PAGE, False
    next_offset = last - page * size + 1
    if next_offset != offset:
        return MISALIGNED, setup[STRICT] == 0 and next_offset + tokens <= size
    return NONE, False


@_kernel
def decide(pages, words, mailbox, setup, needed, tokens, num_tokens, breach, index, value, refused):
    """Decide all or nothing; `breach`, at `index`, is the first one found in the batch."""
    status = STATUS_OK
    if setup[QUIET] != 0 and needed > words[FREE]:
        status = STATUS_SHORT  # told as None, whatever else is wrong
    elif breach != NONE:
        record(words, setup, breach, index, value)
        if refused:
            status = STATUS_REFUSED
    if status == STATUS_OK and tokens != num_tokens:
        record(words, setup, SUM, WHOLE_BATCH, tokens)
        if setup[STRICT] != 0 or tokens > num_tokens:
            status = STATUS_REFUSED
    if status == STATUS_OK and needed > words[FREE]:
        record(words, setup, SHORT, WHOLE_BATCH, needed)
        status = STATUS_SHORT
    if status == STATUS_OK:
        capacity = pages.shape[1] - 1
        words[FIRST] = words[HEAD]
        words[HEAD] = (words[HEAD] + needed) % capacity
        words[FREE] -= needed
        words[ALLOCATED] += needed
        words[PEAK] = max(words[PEAK], words[NUM_PAGES] - words[FREE] - words[STAGED])
        words[TOKENS] = tokens
        words[RET] = needed << 32 | (tokens & 0xFFFFFFFF)
    else:
        words[REFUSALS] += 1
        if status == STATUS_REFUSED or setup[QUIET] == 0:
            words[RET] = 0
    end_op(words, mailbox, status)
    return status == STATUS_OK


@_kernel
def write_request(pages, setup, position, prefix, seq, last, t, out):
    """Write one request's slots from out[t] on; return the ring position after its pages."""
    size, capacity = setup[PAGE_SIZE], pages.shape[1] - 1
    if prefix % size:
        run = min(seq - prefix, size - prefix % size)
        for j in range(run):
            out[t + j] = last + 1 + j
        t += run
        prefix += run
    while prefix < seq:
        page = pages[RING, position]
        position += 1
        if position == capacity:
            position = 0
        pages[REFS, page] = 1
        run = min(seq - prefix, size)
        first = np.int64(page) * size
        for j in range(run):
            out[t + j] = first + j
        t += run
        prefix += run
    return position


@_kernel
def alloc(pages, words, mailbox, setup, prefixes, seqs, lasts, num_tokens, out):
    begin_op(words, setup)
    decode, size = setup[KIND] == DECODE, setup[PAGE_SIZE]
    needed, tokens, refused = 0, 0, False
    first, at, wrong = NONE, 0, np.int64(0)
    for i in range(seqs.shape[0]):
        seq = seqs[i]
        prefix = seq - 1 if decode and seq > 0 else -1 if decode else prefixes[i]
        breach, carry_on = breach_of(pages, words, setup, prefix, seq, lasts[i])
        if breach != NONE:
            if first == NONE:
                first, at, wrong = breach, i, seq if breach == LENGTH else lasts[i]
            refused = refused or not carry_on
        if breach != LENGTH:
            needed += (seq + size - 1) // size - (prefix + size - 1) // size
            tokens += seq - prefix
    if not decide(pages, words, mailbox, setup, needed, tokens, num_tokens, first, at, wrong, refused):
        out[:] = setup[REFUSED_SLOT]
        return
    position, t = words[FIRST], 0
    for i in range(seqs.shape[0]):
        seq = seqs[i]
        prefix = seq - 1 if decode else prefixes[i]
        position = write_request(pages, setup, position, prefix, seq, lasts[i], t, out)
        t += seq - prefix
    out[t:] = setup[REFUSED_SLOT]


@_kernel
def lengths_hold(prefix, seq):
    return 0 <= prefix <= seq <= INT32_LARGEST


@_kernel
def load_step(setup, table, paged, pad_row, rows, prefixes, seqs, i):
    """Return row, prefix, seq and last slot of a request in a table, and whether it only pads."""
    row, seq, size = rows[i], seqs[i], setup[PAGE_SIZE]
    prefix = seq
    if setup[KIND] == DECODE_STEP:
        if seq <= INT32_LARGEST:
            seq += 1
    else:
        prefix = prefixes[i]
    if row == pad_row:
        tokens = seq - prefix if lengths_hold(prefix, seq) else np.int64(setup[KIND] == DECODE_STEP)
        return row, np.int64(0), tokens, np.int64(-1), True
    last = np.int64(-1)
    columns = table.shape[1] * (size if paged else 1)
    if 0 <= row < table.shape[0] and lengths_hold(prefix, seq) and seq <= columns and 0 < prefix < seq:
        if paged:
            page = np.int64(table[row, (prefix - 1) // size])
            last = page if page < 0 else page * size + (prefix - 1) % size
        else:
            last = np.int64(table[row, prefix - 1])
    return row, prefix, seq, last, False


@_kernel
def step_in_table(pages, words, mailbox, setup, table, paged, pad_row, rows, prefixes, seqs, num_tokens, out):
    begin_op(words, setup)
    size = setup[PAGE_SIZE]
    columns = table.shape[1] * (size if paged else 1)
    needed, tokens, refused = 0, 0, False
    first, at, wrong = NONE, 0, np.int64(0)
    for i in range(rows.shape[0]):
        row, prefix, seq, last, padding = load_step(setup, table, paged, pad_row, rows, prefixes, seqs, i)
        holds = lengths_hold(prefix, seq)
        if holds:
            tokens += seq - prefix
        if padding:
            continue
        breach, carry_on, value = NONE, False, last
        if row < 0 or row >= table.shape[0]:
            breach, value = ROW, row
        elif not holds:
            breach, value = LENGTH, seq
        elif seq > columns:
            breach, value = COLUMN, seq
        else:
            breach, carry_on = breach_of(pages, words, setup, prefix, seq, last)
        if breach != NONE:
            if first == NONE:
                first, at, wrong = breach, i, value
            refused = refused or not carry_on
        if holds:
            needed += (seq + size - 1) // size - (prefix + size - 1) // size
    if not decide(pages, words, mailbox, setup, needed, tokens, num_tokens, first, at, wrong, refused):
        out[:] = setup[REFUSED_SLOT]
        return
    position, t = words[FIRST], 0
    for i in range(rows.shape[0]):
        row, prefix, seq, last, padding = load_step(setup, table, paged, pad_row, rows, prefixes, seqs, i)
        if padding:
            out[t : t + seq] = 0
        else:
            position = write_request(pages, setup, position, prefix, seq, last, t, out)
            if paged:
                for token in range((prefix + size - 1) // size * size, seq, size):
                    table[row, token // size] = out[t + token - prefix] // size
            else:
                for token in range(prefix, seq):
                    table[row, token] = out[t + token - prefix]
        t += seq - prefix
    out[t:] = setup[REFUSED_SLOT]


@_kernel
def alloc_whole(pages, words, mailbox, setup, num_pages, out):
    begin_op(words, setup)
    n = out.shape[0]
    if decide(pages, words, mailbox, setup, num_pages, n, n, NONE, 0, 0, False):
        write_request(pages, setup, words[FIRST], 0, n, -1, 0, out)
    else:
        out[:] = setup[REFUSED_SLOT]


@_kernel
def give(pages, words, listed, n, where):
    """Put the first n listed pages back, in that order."""
    capacity = pages.shape[1] - 1
    words[PAGES_FREED] += n
    if where == FRONT:
        first = (words[HEAD] - n) % capacity
        words[HEAD] = first
        words[FREE] += n
    else:
        first = (words[HEAD] + words[FREE] + words[STAGED]) % capacity
        words[FREE if where == BACK else STAGED] += n
    for i in range(n):
        pages[RING, first] = listed[i]
        first += 1
        if first == capacity:
            first = 0


@_kernel
def drop_owner(pages, words, page):
    pages[REFS, page] -= 1
    if pages[REFS, page] == 1:
        words[SHARED] -= 1
    return pages[REFS, page] == 0


@_kernel
def order_freed(pages, freed):
    """Put the freed pages, whose mark is 2, in ascending order, and take the marks off."""
    ascending, least, most = True, pages[FREED, 0], pages[FREED, 0]
    for i in range(freed):
        page = pages[FREED, i]
        ascending = ascending and page >= most
        least, most = min(least, page), max(most, page)
    if ascending:
        for i in range(freed):
            pages[MARKS, pages[FREED, i]] = 0
        return
    n = 0
    for page in range(least, most + 1):
        if pages[MARKS, page] == 2:
            pages[MARKS, page] = 0
            pages[FREED, n] = page
            n += 1


@_kernel
def free_by_slot(pages, words, mailbox, setup, slots, push, where, index_base):
    begin_op(words, setup)
    size, touched, previous = setup[PAGE_SIZE], 0, -1
    for i in range(slots.shape[0]):
        slot = slots[i]
        start = previous * size
        if previous >= 0 and start <= slot < start + size:
            continue
        page = slot // size
        if page < 1 or page > words[NUM_PAGES]:
            record(words, setup, RANGE, index_base + i, slot)
            continue
        previous = page
        if pages[REFS, page] == 0:
            # mark 2: lost its last owner earlier in the same group
            if pages[MARKS, page] != 2:
                record(words, setup, DOUBLE_FREE, index_base + i, slot)
        elif pages[MARKS, page] == 0:
            pages[MARKS, page] = 1
            pages[TOUCHED, touched] = page
            touched += 1
    freed = setup[NUM_FREED]
    for i in range(touched):
        page = pages[TOUCHED, i]
        pages[MARKS, page] = 0
        if drop_owner(pages, words, page):
            pages[MARKS, page] = 2
            pages[FREED, freed] = page
            freed += 1
    if push:
        order_freed(pages, freed)
        give(pages, words, pages[FREED], freed, where)
        freed = 0
    setup[NUM_FREED] = freed
    end_op(words, mailbox, STATUS_OK)


@_kernel
def take_entry(pages, words, setup, index, value, page, order):
    """Take one owner off a page; return how many pages this op has touched."""
    if page < 1 or page > words[NUM_PAGES]:
        record(words, setup, RANGE, index, value)
    elif pages[REFS, page] == 0:
        record(words, setup, DOUBLE_FREE, index, value)
    else:
        if pages[MARKS, page] == 0:
            pages[MARKS, page] = 1
            pages[TOUCHED, order] = page
            order += 1
        drop_owner(pages, words, page)
    return order


@_kernel
def give_touched(pages, words, order, where):
    """Put those of the touched pages back that have no owner left; return their number."""
    listed, gone = pages[FREED], 0
    for i in range(order):
        page = pages[TOUCHED, i]
        pages[MARKS, page] = 0
        if pages[REFS, page] == 0:
            listed[gone] = page
            gone += 1
    give(pages, words, listed, gone, where)
    return gone


@_kernel
def free_by_page(pages, words, mailbox, setup, entries, divisor, where):
    begin_op(words, setup)
    order = 0
    for i in range(entries.shape[0]):
        order = take_entry(pages, words, setup, i, entries[i], entries[i] // divisor, order)
    give_touched(pages, words, order, where)
    end_op(words, mailbox, STATUS_OK)


@_kernel
def free_by_row(pages, words, mailbox, setup, table, paged, pad_row, rows, keeps, seqs, where):
    begin_op(words, setup)
    size = setup[PAGE_SIZE]
    columns = table.shape[1] * (size if paged else 1)
    trim, refused = setup[KIND] == TRIM, False
    for i in range(rows.shape[0]):
        row, seq, keep = rows[i], seqs[i], keeps[i] if trim else 0
        if row == pad_row:
            continue
        breach, value = NONE, row
        if row < 0 or row >= table.shape[0]:
            breach = ROW
        elif not lengths_hold(keep, seq):
            breach, value = LENGTH, keep if keep < 0 or keep > seq else seq
        elif seq > columns:
            breach, value = COLUMN, seq
        if breach != NONE:
            record(words, setup, breach, i, value)
            refused = True
    if refused:
        words[REFUSALS] += 1
        end_op(words, mailbox, STATUS_REFUSED)
        return
    order = 0
    for i in range(rows.shape[0]):
        if rows[i] == pad_row:
            continue
        keep = keeps[i] if trim else 0
        for nth in range((keep + size - 1) // size, (seqs[i] + size - 1) // size):
            cell = np.int64(table[rows[i], nth if paged else nth * size])
            order = take_entry(pages, words, setup, i, cell, cell if paged else cell // size, order)
    give_touched(pages, words, order, where)
    end_op(words, mailbox, STATUS_OK)


@_kernel
def free_by_queue(pages, words, mailbox, setup, table, rows, begins, ends, entries, where, slot_refs):
    begin_op(words, setup)
    order, size = 0, setup[PAGE_SIZE]
    for i in range(rows.shape[0]):
        for nth in range(begins[i], ends[i]):
            page = entries[nth] if rows[i] < 0 else np.int64(table[rows[i], nth])
            if page == SKIPPED_PAGE:
                continue
            order = take_entry(pages, words, setup, i, page, page, order)
    gone = give_touched(pages, words, order, where)
    if slot_refs.shape[0]:
        for i in range(gone):
            first = pages[FREED, i] * size
            for slot in range(first, first + size):
                if slot_refs[slot] > 0:
                    slot_refs[slot] -= 1
    end_op(words, mailbox, STATUS_OK)


@_kernel
def retain(pages, words, mailbox, setup, entries):
    begin_op(words, setup)
    for i in range(entries.shape[0]):
        page = entries[i]
        if page < 1 or page > words[NUM_PAGES]:
            record(words, setup, RANGE, i, page)
        elif pages[REFS, page] == 0:
            record(words, setup, FREE_PAGE, i, page)
        else:
            pages[REFS, page] += 1
            if pages[REFS, page] == 2:
                words[SHARED] += 1
    end_op(words, mailbox, STATUS_OK)


@_kernel
def merge_sorted(pages, words, bound):
    if words[STAGED] == 0 or bound <= words[FREE]:
        return
    n = 0
    for page in range(1, words[NUM_PAGES] + 1):
        if pages[REFS, page] == 0:
            pages[RING, n] = page
            n += 1
    words[HEAD] = 0
    words[FREE] = n
    words[STAGED] = 0


@_kernel
def clear_all(pages, words, mailbox, setup, num_pages):
    begin_op(words, setup)
    for i in range(pages.shape[1]):
        pages[RING, i] = i + 1
        pages[REFS, i] = 0
        pages[MARKS, i] = 0
    pages[REFS, 0] = 1
    setup[NUM_FREED] = 0
    words[HEAD] = words[STAGED] = words[SHARED] = words[RET] = 0
    words[NUM_PAGES] = words[FREE] = num_pages
    end_op(words, mailbox, STATUS_OK)


@_kernel
def save(pages, words, mailbox, setup, saved):
    begin_op(words, setup)
    n = pages.shape[1]
    for i in range(n):
        saved[n - 1 + i] = pages[REFS, i]
    for i in range(n - 1):
        saved[i] = pages[RING, i]
    for i in range(5):
        saved[2 * n - 1 + i] = words[SAVED[i]]
    end_op(words, mailbox, STATUS_OK)


@_kernel
def load(pages, words, mailbox, setup, saved):
    begin_op(words, setup)
    n = pages.shape[1]
    for i in range(n):
        pages[REFS, i] = saved[n - 1 + i]
    for i in range(n - 1):
        pages[RING, i] = saved[i]
    for i in range(5):
        words[SAVED[i]] = saved[2 * n - 1 + i]
    end_op(words, mailbox, STATUS_OK)


@_kernel
def tick(words, mailbox, setup):
    begin_op(words, setup)
    end_op(words, mailbox, STATUS_OK)


@_kernel
def readable(setup, table, paged, pad_row, row, seq):
    columns = table.shape[1] * (setup[PAGE_SIZE] if paged else 1)
    return row != pad_row and 0 <= row < table.shape[0] and 0 <= seq <= min(columns, INT32_LARGEST)


@_kernel
def page_in_table(setup, capacity, table, paged, row, nth):
    """Return the nth page of a row, or the padding page where the cell names none of this pool."""
    size = setup[PAGE_SIZE]
    page = np.int64(table[row, nth]) if paged else np.int64(table[row, nth * size]) // size
    return page if 0 <= page <= capacity else np.int64(0)


@_kernel
def list_pages(setup, capacity, table, paged, pad_row, rows, seqs, indptr, indices, last):
    size, at = setup[PAGE_SIZE], 0
    indptr[0] = 0
    for i in range(rows.shape[0]):
        row, seq, pages = rows[i], seqs[i], 0
        if readable(setup, table, paged, pad_row, row, seq):
            pages = (seq + size - 1) // size
        given = min(pages, indices.shape[0] - at)
        for nth in range(given):
            indices[at + nth] = page_in_table(setup, capacity, table, paged, row, nth)
        at += given
        indptr[i + 1] = at
        if given == 0:
            last[i] = 0
        else:
            last[i] = seq - (pages - 1) * size if given == pages else size
    indices[at:] = 0


@_kernel
def fill_block_table(setup, capacity, table, paged, pad_row, rows, seqs, parts, out):
    part_size = setup[PAGE_SIZE] // parts
    for i in range(rows.shape[0]):
        row, seq, filled = rows[i], seqs[i], 0
        if readable(setup, table, paged, pad_row, row, seq):
            filled = min((seq + part_size - 1) // part_size, out.shape[1])
        for first in range(0, filled, parts):
            page = page_in_table(setup, capacity, table, paged, row, first // parts)
            for part in range(min(parts, filled - first)):
                out[i, first + part] = page * parts + part
        out[i, filled:] = 0


@_kernel
def map_slots(setup, capacity, table, paged, pad_row, rows, prefixes, seqs, out):
    size, at = setup[PAGE_SIZE], 0
    slots = (capacity + 1) * size
    for i in range(rows.shape[0]):
        row, prefix, seq = rows[i], prefixes[i], seqs[i]
        if not lengths_hold(prefix, seq):
            continue
        given = min(seq - prefix, out.shape[0] - at)
        if not readable(setup, table, paged, pad_row, row, seq):
            out[at : at + given] = -1
        else:
            for j in range(given):
                token = prefix + j
                if paged:
                    slot = np.int64(table[row, token // size]) * size + token % size
                else:
                    slot = np.int64(table[row, token])
                out[at + j] = slot if 0 <= slot < slots else -1
        at += given
    out[at:] = -1


# Signed 64-bit products and sums that wrap round: the same bits as unsigned ones.
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@_kernel
def mixed(x):
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * np.int64(FIRST_FACTOR)
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * np.int64(SECOND_FACTOR)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


@_kernel
def term(place, value):
    return mixed(np.int64(value) + np.int64(place + 1) * np.int64(GOLDEN))


@_kernel
def fold_in(pages, words, capacity, entries, where, cells):
    listed = words[FREE] + words[STAGED]
    pushed = min(max(0, words[PAGES_FREED] - cells[1]), listed)
    at = words[HEAD] + (0 if where == FRONT else listed - pushed)
    total, place = cells[0], 0
    for entry in entries:
        total += term(place, entry)
        place += 1
    for i in range(pushed):
        total += term(place, pages[RING, (at + i) % capacity])
        place += 1
    total += term(place, words[FREE]) + term(place + 1, words[STAGED]) + term(place + 2, words[SHARED])
    cells[0], cells[1] = mixed(total), words[PAGES_FREED]


_I4, _I8 = types.int32[::1], types.int64[::1]
_STATE = (types.int32[:, ::1], _I8, _I8, _I8)
_TABLE = types.int32[:, :]
_READS = (_I8, types.int64, _TABLE, types.boolean, types.int64)
_NO_REFS = np.zeros(0, np.int32)
_COMPILING = threading.Lock()
_SIGNATURES: list[tuple[Any, tuple]] = [
    (free_by_slot, (*_STATE, _I8, types.boolean, types.int64, types.int64)),
    (free_by_page, (*_STATE, _I8, types.int64, types.int64)),
    (free_by_row, (*_STATE, _TABLE, types.boolean, types.int64, _I8, _I8, _I8, types.int64)),
    (free_by_queue, (*_STATE, _TABLE, _I8, _I8, _I8, _I8, types.int64, _I4)),
    (retain, (*_STATE, _I8)),
    (merge_sorted, (*_STATE[:2], types.int64)),
    (clear_all, (*_STATE, types.int64)),
    (save, (*_STATE, _I4)),
    (load, (*_STATE, _I4)),
    (tick, (_I8, _I8, _I8)),
    (list_pages, (*_READS, _I8, _I8, _I4, _I4, _I4)),
    (fill_block_table, (*_READS, _I8, _I8, types.int64, types.int32[:, :])),
    (map_slots, (*_READS, _I8, _I8, _I8, _I8)),
    (fold_in, (*_STATE[:2], types.int64, _I4, types.int64, _I8)),
    (fold_in, (*_STATE[:2], types.int64, _I8, types.int64, _I8)),
]


class NumbaBackend(HostBackend):
    """All operations, compiled for the host. Made ready when it is constructed: no later call compiles."""

    name = "numba"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # One row more than pages, as the counts have: the ring's last cell is unused.
        self.pages = np.zeros((5, self.capacity + 1), np.int32)
        self.free_ring, self.ref_count = self.pages[RING, : self.capacity], self.pages[REFS]
        self.setup = np.array([self.page_size, self.strict, self.refused_slot, 0, 0, 0, 0, 0], np.int64)
        self.warmup()

    def warmup(self) -> None:
        """Compile every kernel, or load it from numba's cache."""
        if config.DISABLE_JIT:
            return
        out = _I8 if self.index_dtype == np.int64 else _I4
        for kernel, signature in (
            *_SIGNATURES,
            (alloc, (*_STATE, _I8, _I8, _I8, types.int64, out)),
            (alloc_whole, (*_STATE, types.int64, out)),
            (step_in_table, (*_STATE, _TABLE, types.boolean, types.int64, _I8, _I8, _I8, types.int64, out)),
        ):
            with _COMPILING:
                kernel.disable_compile(False)
                kernel.compile(signature)
                kernel.disable_compile()  # or a contiguous table would be compiled for at its first call

    def _state(self):
        setup = self.setup
        setup[HOST_OP], setup[ERROR_ACK], setup[QUIET], setup[KIND] = (
            self.host_op,
            self.error_ack,
            self.quiet,
            self.kind,
        )
        return self.pages, self.words, self.mailbox, setup

    def alloc_pages(self, pages: int, out: np.ndarray) -> None:
        alloc_whole(*self._state(), pages, out)

    def alloc_extend(self, prefix, seq, last, num_tokens: int, out: np.ndarray) -> None:
        alloc(*self._state(), prefix, seq, last, num_tokens, out)

    def alloc_decode(self, seq, last, out: np.ndarray) -> None:
        alloc(*self._state(), seq, seq, last, seq.shape[0], out)

    def free_slots(self, slots, push: bool, index_base: int) -> None:
        where = STAGE if self.need_sort else FRONT
        free_by_slot(*self._state(), slots, push, where, index_base)

    def free_pages(self, entries, divisor: int, where: Where) -> None:
        free_by_page(*self._state(), entries, divisor, int(where))

    def step(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out: np.ndarray) -> None:
        prefix = seq if prefix is None else prefix
        step_in_table(*self._state(), table, paged, pad_row, rows, prefix, seq, num_tokens, out)

    def free_rows(self, table, paged: bool, pad_row: int, rows, keep, seq, where: Where) -> None:
        keep = seq if keep is None else keep
        free_by_row(*self._state(), table, paged, pad_row, rows, keep, seq, int(where))

    def free_queue(self, table, rows, begins, ends, entries, where: Where, slot_refs) -> None:
        entries = rows if entries is None else entries
        slot_refs = _NO_REFS if slot_refs is None else slot_refs
        free_by_queue(*self._state(), table, rows, begins, ends, entries, int(where), slot_refs)

    def flashinfer_tables(
        self, table, paged: bool, pad_row: int, rows, seq, indptr, indices, length: int, last
    ) -> None:
        list_pages(self.setup, self.capacity, table, paged, pad_row, rows, seq, indptr, indices, last)

    def block_table(self, table, paged: bool, pad_row: int, rows, seq, parts: int, out) -> None:
        fill_block_table(self.setup, self.capacity, table, paged, pad_row, rows, seq, parts, out)

    def slot_mapping(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out) -> None:
        map_slots(self.setup, self.capacity, table, paged, pad_row, rows, prefix, seq, out)

    def fold(self, entries, where: Where, cells: np.ndarray) -> None:
        fold_in(self.pages, self.words, self.capacity, entries, int(where), cells)

    def retain_pages(self, entries) -> None:
        retain(*self._state(), entries)

    def sort_free(self, bound: int) -> None:
        merge_sorted(self.pages, self.words, bound)

    def clear(self, num_pages: int) -> None:
        clear_all(*self._state(), num_pages)

    def backup(self) -> np.ndarray:
        saved = np.empty(2 * self.capacity + 6, np.int32)
        save(*self._state(), saved)
        return saved

    def restore(self, saved: np.ndarray) -> None:
        load(*self._state(), saved)

    def refresh(self) -> None:
        tick(*self._state()[1:])

    def memory(self) -> int:
        return sum(a.nbytes for a in (self.pages, self.words, self.mailbox, self.setup))
