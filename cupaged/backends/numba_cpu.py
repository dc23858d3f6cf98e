"""The default without a GPU: the same operations, compiled by numba for the host, page by page.

The kernels take the state as two arrays, since each one costs a call: `pages` (int32, five rows: ring, reference
counts, touched marks, freed pages, scratch), and `words` (int64: those of `layout`, what a pool is made with, mail).
"""

from __future__ import annotations

import gc
import threading
from functools import cache
from typing import Any

import numpy as np
from numba import config, njit, types

from cupaged.backends.host import HostBackend
from cupaged.layout import (
    INT32_LARGEST,
    MAIL_WORDS,
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
PAGE_SIZE, SHIFT, STRICT, REFUSED_SLOT, HOST_OP, ERROR_ACK, QUIET, KIND, NUM_FREED, MAIL = range(
    NUM_WORDS, NUM_WORDS + 10
)
EXACT = 1 << 52  # integers below are exact as float64, and their quotients within one
RUN = 8  # slots written at a time
GROUP = 32  # requests looked at together: a decode in which one begins a page is taken one by one

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
SAVED = list(map(int, SAVED_WORDS))
DECODE, DECODE_STEP, TRIM = int(Kind.DECODE), int(Kind.DECODE_STEP), int(Kind.TRIM)


def _compiled(function, **options):
    # Nobody divides by zero here, calls these from C, or makes an array: what numba does for that takes compile time,
    # and counting an array's references 40 ns a call, also of one of these by another.
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}
    try:
        return njit(function, cache=True, **options)
    except RuntimeError:  # numba finds no folder that it can write its cache to
        return njit(function, **options)


def _kernel(function):
    return _compiled(function)


def _part(function, **options):
    """Compile what only kernels call, once for all constants that it is called with."""
    dispatcher = _compiled(function, no_cpython_wrapper=True, **options)
    template = getattr(dispatcher, "get_call_template", None)  # none where nothing is compiled
    if template is not None:
        dispatcher.get_call_template = lambda args, kws: template([types.unliteral(a) for a in args], kws)
    return dispatcher


def _inlined(function):
    """Compile as a part of each caller, for a loop over requests."""
    return _part(function, forceinline=True)


@_part
def begin_op(words):
    words[OP] += 1
    words[W_HOST_OP] = words[HOST_OP]
    if words[ERROR_OP] <= words[ERROR_ACK]:
        words[ERROR_CODE] = 0


@_part
def record(words, breach, index, value):
    if words[ERROR_CODE] == 0:
        words[ERROR_CODE] = words[KIND] << 8 | breach
        words[ERROR_OP] = words[OP]
        words[ERROR_INDEX] = index
        words[ERROR_VALUE] = value


@_part
def end_op(words, status):
    words[STATUS] = status
    words[OK] = 1 if status == STATUS_OK else 0
    number = words[OP] << 32
    for i in range(NUM_WORDS):
        words[MAIL + i] = number | (words[i] & 0xFFFFFFFF)
        words[MAIL + NUM_WORDS + i] = number | (words[i] >> 32 & 0xFFFFFFFF)


@_part
def full_pages(tokens, size, shift):
    """Return tokens // size, whatever their sign."""
    return tokens >> shift if shift >= 0 else tokens // size


@_part
def begun_pages(tokens, size, shift):
    return full_pages(tokens + size - 1, size, shift)


@_part
def in_ring(pages, position):
    """Return a position that is past the ring's end, or before its beginning, by less than its length."""
    capacity = pages.shape[1] - 1
    if position < 0:
        return position + capacity
    return position - capacity if position >= capacity else position


@_part
def fill(out, begin, value):
    for i in range(begin, out.shape[0]):
        out[i] = value


@_inlined
def breach_of(pages, words, prefix, seq, last):
    """Return the breach of one request and whether the classic kernels' behaviour would harm nobody."""
    breach, harmless = NONE, False
    size, shift = words[PAGE_SIZE], words[SHIFT]
    offset = prefix - full_pages(prefix, size, shift) * size
    if prefix < 0 or seq < prefix or seq > INT32_LARGEST:
        breach = LENGTH
    elif offset != 0 and seq != prefix:
        page = full_pages(last, size, shift)
        owners = pages[REFS, page] if 1 <= page <= words[NUM_PAGES] else np.int32(-1)
        if owners == 1:
            next_offset = last - page * size + 1
            if next_offset != offset:
                breach = MISALIGNED
                fits = next_offset <= offset or next_offset + seq - prefix <= size
                harmless = words[STRICT] == 0 and fits
        else:
            breach = RANGE if owners < 0 else FREE_PAGE if owners == 0 else SHARED_PAGE
    return breach, harmless


@_part
def decide(pages, words, needed, tokens, num_tokens, breach, index, value, refused):
    """Decide all or nothing; `breach`, at `index`, is the first one found in the batch."""
    status = STATUS_OK
    if words[QUIET] != 0 and needed > words[FREE]:
        status = STATUS_SHORT  # told as None, whatever else is wrong
    elif breach != NONE:
        record(words, breach, index, value)
        if refused:
            status = STATUS_REFUSED
    if status == STATUS_OK and tokens != num_tokens:
        record(words, SUM, WHOLE_BATCH, tokens)
        if words[STRICT] != 0 or tokens > num_tokens:
            status = STATUS_REFUSED
    if status == STATUS_OK and needed > words[FREE]:
        record(words, SHORT, WHOLE_BATCH, needed)
        status = STATUS_SHORT
    if status == STATUS_OK:
        words[FIRST] = words[HEAD]
        words[HEAD] = in_ring(pages, words[HEAD] + needed)
        words[FREE] -= needed
        words[ALLOCATED] += needed
        used = words[NUM_PAGES] - words[FREE] - words[STAGED]
        if used > words[PEAK]:
            words[PEAK] = used
        words[TOKENS] = tokens
        words[RET] = needed << 32 | (tokens & 0xFFFFFFFF)
    else:
        words[REFUSALS] += 1
        if status == STATUS_REFUSED or words[QUIET] == 0:
            words[RET] = 0
    end_op(words, status)
    return status == STATUS_OK


@_inlined
def write_run(out, t, first, n):
    """Write first, first + 1, .. to out[t : t + n]; what is written past it, the next run overwrites."""
    if t + n + RUN <= out.shape[0]:
        for begin in range(0, n, RUN):
            for j in range(RUN):
                out[np.uint64(t + begin + j)] = first + begin + j
    else:
        for j in range(n):
            out[np.uint64(t + j)] = first + j


@_inlined
def write_request(pages, words, position, prefix, seq, last, t, out):
    """Write one request's slots from out[t] on; return the ring position after its pages."""
    size, shift, capacity = words[PAGE_SIZE], words[SHIFT], pages.shape[1] - 1
    room = begun_pages(prefix, size, shift) * size - prefix
    n = seq - prefix if seq - prefix < room else room
    if n > 0:
        write_run(out, t, last + 1, n)
        t += n
        prefix += n
    while prefix < seq:
        page = np.int64(pages[RING, position])
        position += 1
        if position == capacity:
            position = 0
        pages[REFS, page] = 1
        n = seq - prefix if seq - prefix < size else size
        write_run(out, t, page * size, n)
        t += n
        prefix += n
    return position


@_inlined
def quotient(x, size, shift, inverse):
    """Return x // size, for 0 <= x < EXACT, without a division."""
    if shift >= 0:
        return x >> shift
    near = np.int64(np.float64(x) * inverse)
    rest = x - near * size
    return near + np.int64(rest >= size) - np.int64(rest < 0)


@_inlined
def remainder(x, size, shift, inverse):
    """Return x % size, for 0 <= x < EXACT, without a division."""
    if shift >= 0:
        return x & (size - 1)
    return x - quotient(x, size, shift, inverse) * size


@_inlined
def follows(refs, slots, size, shift, inverse, last, offset):
    """Whether the slot behind `last` is at `offset` of a page with one owner."""
    slot = last if (last >= size) & (last < slots) else np.int64(0)
    page = quotient(slot, size, shift, inverse)
    return (page != 0) & (refs[np.uint64(page)] == 1) & (remainder(slot, size, shift, inverse) + 1 == offset)


@_part
def survey(pages, words, decode, prefixes, seqs, lasts):
    """Return pages and tokens that a batch takes, and whether nothing is wrong with it.

    The loops have no branch, so that the compiler vectorises them; what is wrong, and where, is for others to find.
    """
    size, shift, refs, batch = words[PAGE_SIZE], words[SHIFT], pages[REFS], seqs.shape[0]
    slots = (words[NUM_PAGES] + 1) * size
    needed, tokens, signs, good = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    inverse = 1.0 / size
    if shift < 0 and slots > EXACT:
        return needed, tokens, False
    if decode:
        for i in range(batch):
            prefix = seqs[i] - 1
            signs |= prefix | (INT32_LARGEST - seqs[i])
            offset = remainder(prefix & INT32_LARGEST, size, shift, inverse)
            needed += np.int64(offset == 0)
            good += np.int64((offset == 0) | follows(refs, slots, size, shift, inverse, lasts[i], offset))
        return needed, np.int64(batch), signs >= 0 and good == batch
    for i in range(batch):
        prefix, seq = prefixes[i], seqs[i]
        added = seq - prefix
        signs |= prefix | seq | added | (INT32_LARGEST - seq)
        tokens += added
        full = quotient(prefix & INT32_LARGEST, size, shift, inverse)
        offset = remainder(prefix & INT32_LARGEST, size, shift, inverse)
        begun = quotient((seq & INT32_LARGEST) + size - 1, size, shift, inverse)
        needed += begun - full - np.int64(offset != 0)
        unread = (offset == 0) | (added == 0)
        good += np.int64(unread | follows(refs, slots, size, shift, inverse, lasts[i], offset))
    return needed, tokens, signs >= 0 and good == batch


@_part
def plan(pages, words, decode, prefixes, seqs, lasts, num_tokens):
    """Decide all or nothing; where something is wrong, request by request."""
    needed, tokens, clean = survey(pages, words, decode, prefixes, seqs, lasts)
    size, shift = words[PAGE_SIZE], words[SHIFT]
    refused, first, at, wrong = False, np.int64(NONE), np.int64(0), np.int64(0)
    if not clean:
        needed, tokens = np.int64(0), np.int64(0)
        for i in range(seqs.shape[0]):
            seq = seqs[i]
            prefix = seq - 1 if decode else prefixes[i]
            breach, carry_on = breach_of(pages, words, prefix, seq, lasts[i])
            if breach != NONE:
                if first == NONE:
                    first, at, wrong = breach, np.int64(i), seq if breach == LENGTH else lasts[i]
                refused = refused or not carry_on
            if breach != LENGTH:
                needed += begun_pages(seq, size, shift) - begun_pages(prefix, size, shift)
                tokens += seq - prefix
    return decide(pages, words, needed, tokens, num_tokens, first, at, wrong, refused)


@_part
def write_decode(pages, words, seqs, lasts, out):
    """Write one slot a request; `out` may be `lasts`. Most groups of requests begin no page."""
    size, shift, capacity, position = words[PAGE_SIZE], words[SHIFT], pages.shape[1] - 1, words[FIRST]
    inverse = 1.0 / size
    for begin in range(0, seqs.shape[0], GROUP):
        end, begun = begin + GROUP, np.int64(0)
        if end <= seqs.shape[0]:
            for j in range(GROUP):
                at = np.uint64(begin + j)
                begins = remainder(seqs[at] - 1, size, shift, inverse) == 0
                out[at] = np.int64(0) if begins else lasts[at] + 1
                begun += np.int64(begins)
        else:
            end, begun = seqs.shape[0], np.int64(1)
            for i in range(begin, end):
                begins = remainder(seqs[i] - 1, size, shift, inverse) == 0
                out[i] = np.int64(0) if begins else lasts[i] + 1
        if begun == 0:
            continue
        for i in range(begin, end):
            if remainder(seqs[i] - 1, size, shift, inverse) == 0:
                page = np.int64(pages[RING, position])
                position += 1
                if position == capacity:
                    position = 0
                pages[REFS, page] = 1
                out[i] = page * size


@_kernel
def alloc(pages, words, prefixes, seqs, lasts, num_tokens, out):
    begin_op(words)
    decode = words[KIND] == DECODE
    if not plan(pages, words, decode, prefixes, seqs, lasts, num_tokens):
        fill(out, 0, words[REFUSED_SLOT])
        return
    if decode:
        write_decode(pages, words, seqs, lasts, out)
        return
    position, t = words[FIRST], 0
    for i in range(seqs.shape[0]):
        position = write_request(pages, words, position, prefixes[i], seqs[i], lasts[i], t, out)
        t += seqs[i] - prefixes[i]
    fill(out, t, words[REFUSED_SLOT])


@_kernel
def decode_holds(seqs):
    """Whether all lengths of a decode can be meant."""
    signs = np.int64(0)
    for seq in seqs:
        signs |= (seq - 1) | (INT32_LARGEST - seq)
    return signs >= 0


@_kernel
def extend_tokens(prefixes, seqs):
    """Return the tokens that a batch adds, or -1 if a length is wrong."""
    tokens, signs = np.int64(0), np.int64(0)
    for i in range(seqs.shape[0]):
        prefix, seq = prefixes[i], seqs[i]
        added = seq - prefix
        signs |= prefix | seq | added | (INT32_LARGEST - seq)
        tokens += added
    return tokens if signs >= 0 else np.int64(-1)


@_part
def lengths_hold(prefix, seq):
    return 0 <= prefix <= seq <= INT32_LARGEST


@_inlined
def load_step(words, table, paged, pad_row, rows, prefixes, seqs, i):
    """Return row, prefix, seq and last slot of a request in a table, and whether it only pads."""
    row, seq, size, shift = rows[i], seqs[i], words[PAGE_SIZE], words[SHIFT]
    prefix = seq
    if words[KIND] == DECODE_STEP:
        if seq <= INT32_LARGEST:
            seq += 1
    else:
        prefix = prefixes[i]
    last, padding = np.int64(-1), row == pad_row
    columns = table.shape[1] * (size if paged else 1)
    if padding:
        seq = seq - prefix if lengths_hold(prefix, seq) else np.int64(words[KIND] == DECODE_STEP)
        prefix = np.int64(0)
    elif 0 <= row < table.shape[0] and lengths_hold(prefix, seq) and seq <= columns and 0 < prefix < seq:
        if paged:
            nth = full_pages(prefix - 1, size, shift)
            page = np.int64(table[row, nth])
            last = page if page < 0 else page * size + prefix - 1 - nth * size
        else:
            last = np.int64(table[row, prefix - 1])
    return row, prefix, seq, last, padding


@_kernel
def step_in_table(pages, words, table, paged, pad_row, rows, prefixes, seqs, num_tokens, out):
    begin_op(words)
    size, shift = words[PAGE_SIZE], words[SHIFT]
    columns = table.shape[1] * (size if paged else 1)
    needed, tokens, refused = 0, 0, False
    first, at, wrong = NONE, 0, np.int64(0)
    for i in range(rows.shape[0]):
        row, prefix, seq, last, padding = load_step(words, table, paged, pad_row, rows, prefixes, seqs, i)
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
            breach, carry_on = breach_of(pages, words, prefix, seq, last)
        if breach != NONE:
            if first == NONE:
                first, at, wrong = breach, i, value
            refused = refused or not carry_on
        if holds:
            needed += begun_pages(seq, size, shift) - begun_pages(prefix, size, shift)
    if not decide(pages, words, needed, tokens, num_tokens, first, at, wrong, refused):
        fill(out, 0, words[REFUSED_SLOT])
        return
    position, t = words[FIRST], 0
    for i in range(rows.shape[0]):
        row, prefix, seq, last, padding = load_step(words, table, paged, pad_row, rows, prefixes, seqs, i)
        if padding:
            out[t : t + seq] = 0
        else:
            position = write_request(pages, words, position, prefix, seq, last, t, out)
            if paged:
                for nth in range(begun_pages(prefix, size, shift), begun_pages(seq, size, shift)):
                    table[row, nth] = full_pages(np.int64(out[t + nth * size - prefix]), size, shift)
            else:
                for token in range(prefix, seq):
                    table[row, token] = out[t + token - prefix]
        t += seq - prefix
    fill(out, t, words[REFUSED_SLOT])


@_kernel
def alloc_whole(pages, words, num_pages, out):
    begin_op(words)
    n = out.shape[0]
    if decide(pages, words, num_pages, n, n, NONE, 0, 0, False):
        write_request(pages, words, words[FIRST], 0, n, -1, 0, out)
    else:
        fill(out, 0, words[REFUSED_SLOT])


@_part
def give(pages, words, listed, n, where):
    """Put the first n listed pages back, in that order."""
    capacity = pages.shape[1] - 1
    words[PAGES_FREED] += n
    if where == FRONT:
        first = in_ring(pages, words[HEAD] - n)
        words[HEAD] = first
        words[FREE] += n
    else:
        first = in_ring(pages, words[HEAD] + words[FREE] + words[STAGED])
        words[FREE if where == BACK else STAGED] += n
    for i in range(n):
        pages[RING, first] = listed[i]
        first += 1
        if first == capacity:
            first = 0


@_part
def drop_owner(pages, words, page):
    owners = pages[REFS, page] - 1
    pages[REFS, page] = owners
    if owners == 1:
        words[SHARED] -= 1
    return owners == 0


@_part
def order_freed(pages, freed):
    """Put the freed pages, whose mark is 2, in ascending order, and take the marks off."""
    ascending, least, most = True, pages[FREED, 0], pages[FREED, 0]
    for i in range(freed):
        page = pages[FREED, i]
        ascending = ascending and page >= most
        least, most = page if page < least else least, page if page > most else most
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
def free_by_slot(pages, words, slots, push, where, index_base):
    begin_op(words)
    size, shift, touched, previous = words[PAGE_SIZE], words[SHIFT], 0, -1
    for i in range(slots.shape[0]):
        slot = slots[i]
        start = previous * size
        if previous >= 0 and start <= slot < start + size:
            continue
        page = full_pages(slot, size, shift)
        if page < 1 or page > words[NUM_PAGES]:
            record(words, RANGE, index_base + i, slot)
            continue
        previous = page
        if pages[REFS, page] == 0:
            # mark 2: lost its last owner earlier in the same group
            if pages[MARKS, page] != 2:
                record(words, DOUBLE_FREE, index_base + i, slot)
        elif pages[MARKS, page] == 0:
            pages[MARKS, page] = 1
            pages[TOUCHED, touched] = page
            touched += 1
    freed = words[NUM_FREED]
    for i in range(touched):
        page = np.int64(pages[TOUCHED, i])
        pages[MARKS, page] = 0
        if drop_owner(pages, words, page):
            pages[MARKS, page] = 2
            pages[FREED, freed] = page
            freed += 1
    if push:
        order_freed(pages, freed)
        give(pages, words, pages[FREED], freed, where)
        freed = 0
    words[NUM_FREED] = freed
    end_op(words, STATUS_OK)


@_inlined
def take_entry(pages, words, index, value, page, order):
    """Take one owner off a page; return how many pages this op has touched."""
    if page < 1 or page > words[NUM_PAGES]:
        record(words, RANGE, index, value)
    elif pages[REFS, page] == 0:
        record(words, DOUBLE_FREE, index, value)
    else:
        if pages[MARKS, page] == 0:
            pages[MARKS, page] = 1
            pages[TOUCHED, order] = page
            order += 1
        drop_owner(pages, words, page)
    return order


@_part
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
def free_by_page(pages, words, entries, divisor, where):
    begin_op(words)
    order = 0
    for i in range(entries.shape[0]):
        order = take_entry(pages, words, i, entries[i], entries[i] // divisor, order)
    give_touched(pages, words, order, where)
    end_op(words, STATUS_OK)


@_kernel
def free_by_row(pages, words, table, paged, pad_row, rows, keeps, seqs, where):
    begin_op(words)
    size, shift = words[PAGE_SIZE], words[SHIFT]
    columns = table.shape[1] * (size if paged else 1)
    trim, refused = words[KIND] == TRIM, False
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
            record(words, breach, i, value)
            refused = True
    if refused:
        words[REFUSALS] += 1
        end_op(words, STATUS_REFUSED)
        return
    order = 0
    for i in range(rows.shape[0]):
        if rows[i] == pad_row:
            continue
        keep = keeps[i] if trim else 0
        for nth in range(begun_pages(keep, size, shift), begun_pages(seqs[i], size, shift)):
            cell = np.int64(table[rows[i], nth if paged else nth * size])
            order = take_entry(pages, words, i, cell, cell if paged else full_pages(cell, size, shift), order)
    give_touched(pages, words, order, where)
    end_op(words, STATUS_OK)


@_kernel
def free_by_queue(pages, words, table, rows, begins, ends, entries, where, slot_refs):
    begin_op(words)
    order, size = 0, words[PAGE_SIZE]
    for i in range(rows.shape[0]):
        for nth in range(begins[i], ends[i]):
            page = entries[nth] if rows[i] < 0 else np.int64(table[rows[i], nth])
            if page == SKIPPED_PAGE:
                continue
            order = take_entry(pages, words, i, page, page, order)
    gone = give_touched(pages, words, order, where)
    if slot_refs.shape[0]:
        for i in range(gone):
            first = pages[FREED, i] * size
            for slot in range(first, first + size):
                if slot_refs[slot] > 0:
                    slot_refs[slot] -= 1
    end_op(words, STATUS_OK)


@_kernel
def retain(pages, words, entries):
    begin_op(words)
    for i in range(entries.shape[0]):
        page = entries[i]
        if page < 1 or page > words[NUM_PAGES]:
            record(words, RANGE, i, page)
        elif pages[REFS, page] == 0:
            record(words, FREE_PAGE, i, page)
        else:
            owners = pages[REFS, page] + 1
            pages[REFS, page] = owners
            if owners == 2:
                words[SHARED] += 1
    end_op(words, STATUS_OK)


@_kernel
def tick(words):
    begin_op(words)
    end_op(words, STATUS_OK)


@_part
def readable(words, table, paged, pad_row, row, seq):
    columns = table.shape[1] * (words[PAGE_SIZE] if paged else 1)
    return row != pad_row and 0 <= row < table.shape[0] and 0 <= seq <= min(columns, INT32_LARGEST)


@_part
def page_in_table(words, capacity, table, paged, row, nth):
    """Return the nth page of a row, or the padding page where the cell names none of this pool."""
    size, shift = words[PAGE_SIZE], words[SHIFT]
    page = np.int64(table[row, nth]) if paged else full_pages(np.int64(table[row, nth * size]), size, shift)
    return page if 0 <= page <= capacity else np.int64(0)


@_kernel
def list_pages(words, capacity, table, paged, pad_row, rows, seqs, indptr, indices, last):
    size, shift, at = words[PAGE_SIZE], words[SHIFT], 0
    indptr[0] = 0
    for i in range(rows.shape[0]):
        row, seq, pages = rows[i], seqs[i], 0
        if readable(words, table, paged, pad_row, row, seq):
            pages = begun_pages(seq, size, shift)
        given = min(pages, indices.shape[0] - at)
        for nth in range(given):
            indices[at + nth] = page_in_table(words, capacity, table, paged, row, nth)
        at += given
        indptr[i + 1] = at
        if given == 0:
            last[i] = 0
        else:
            last[i] = seq - (pages - 1) * size if given == pages else size
    indices[at:] = 0


@_kernel
def fill_block_table(words, capacity, table, paged, pad_row, rows, seqs, parts, out):
    part_size = words[PAGE_SIZE] // parts
    for i in range(rows.shape[0]):
        row, seq, filled = rows[i], seqs[i], 0
        if readable(words, table, paged, pad_row, row, seq):
            filled = min((seq + part_size - 1) // part_size, out.shape[1])
        for first in range(0, filled, parts):
            page = page_in_table(words, capacity, table, paged, row, first // parts)
            for part in range(min(parts, filled - first)):
                out[i, first + part] = page * parts + part
        out[i, filled:] = 0


@_kernel
def map_slots(words, capacity, table, paged, pad_row, rows, prefixes, seqs, out):
    size, at = words[PAGE_SIZE], 0
    slots = (capacity + 1) * size
    for i in range(rows.shape[0]):
        row, prefix, seq = rows[i], prefixes[i], seqs[i]
        if not lengths_hold(prefix, seq):
            continue
        given = min(seq - prefix, out.shape[0] - at)
        if not readable(words, table, paged, pad_row, row, seq):
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


@_part
def mixed(x):
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * np.int64(FIRST_FACTOR)
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * np.int64(SECOND_FACTOR)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


@_part
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
_STATE = (types.int32[:, ::1], _I8)
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
    (decode_holds, (_I8,)),
    (extend_tokens, (_I8, _I8)),
    (tick, (_I8,)),
]
# Hand-offs and digests: a quarter of the compile time, and no step needs them.
_SELDOM_NEEDED: list[tuple[Any, tuple]] = [
    (list_pages, (*_READS, _I8, _I8, _I4, _I4, _I4)),
    (fill_block_table, (*_READS, _I8, _I8, types.int64, types.int32[:, :])),
    (map_slots, (*_READS, _I8, _I8, _I8, _I8)),
    (fold_in, (*_STATE, types.int64, _I4, types.int64, _I8)),
    (fold_in, (*_STATE, types.int64, _I8, types.int64, _I8)),
]


def _compile(*signatures: tuple[Any, tuple]) -> None:
    if config.DISABLE_JIT:
        return
    with _COMPILING:
        collecting = gc.isenabled()
        gc.disable()  # to look through the compiler's many objects is a twentieth of its time, and few can go
        try:
            for kernel, signature in signatures:
                kernel.disable_compile(False)
                kernel.compile(signature)
                kernel.disable_compile()  # or a contiguous table would be compiled for at its first call
        finally:
            if collecting:
                gc.enable()


@cache
def _ready(kernel: Any) -> Any:
    """A kernel that is seldom needed, compiled."""
    _compile(*(x for x in _SELDOM_NEEDED if x[0] is kernel))
    return kernel


class NumbaBackend(HostBackend):
    """All operations, compiled for the host. Made ready when it is constructed: no later step compiles.

    Hand-offs and digests are compiled when the first one is asked for, or by `warmup`.
    """

    name = "numba"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # One row more than pages, as the counts have: the ring's last cell is unused.
        self.pages = np.zeros((5, self.capacity + 1), np.int32)
        self.free_ring, self.ref_count = self.pages[RING, : self.capacity], self.pages[REFS]
        self.state = np.zeros(MAIL + MAIL_WORDS, np.int64)
        self.words, self.mailbox = self.state[:NUM_WORDS], self.state[MAIL:]
        self.mail = self.mailbox.data.cast("B").cast("Q")
        size = self.page_size
        shift = size.bit_length() - 1 if size & (size - 1) == 0 else -1
        self.state[[PAGE_SIZE, SHIFT, STRICT, REFUSED_SLOT]] = size, shift, self.strict, self.refused_slot
        self._cells = self.state.data
        out = _I8 if self.index_dtype == np.int64 else _I4
        _compile(
            *_SIGNATURES,
            (alloc, (*_STATE, _I8, _I8, _I8, types.int64, out)),
            (alloc_whole, (*_STATE, types.int64, out)),
            (step_in_table, (*_STATE, _TABLE, types.boolean, types.int64, _I8, _I8, _I8, types.int64, out)),
        )

    def warmup(self) -> None:
        """Compile every kernel that is not, or load it from numba's cache."""
        _compile(*_SELDOM_NEEDED)

    def _state(self):
        cells = self._cells
        cells[HOST_OP], cells[ERROR_ACK], cells[QUIET], cells[KIND] = (
            self.host_op,
            self.error_ack,
            self.quiet,
            self.kind,
        )
        return self.pages, self.state

    def check_lengths(self, prefix, seq, num_tokens: int | None) -> None:
        if not (decode_holds(seq) if prefix is None else extend_tokens(prefix, seq) == num_tokens):
            super().check_lengths(prefix, seq, num_tokens)

    def alloc_pages(self, pages: int, out: np.ndarray) -> None:
        alloc_whole(*self._state(), pages, out)

    def alloc_extend(self, prefix, seq, last, num_tokens: int, out: np.ndarray) -> None:
        alloc(*self._state(), prefix, seq, last, num_tokens, out)

    def alloc_decode(self, seq, last, out: np.ndarray) -> None:
        alloc(*self._state(), seq, seq, last, seq.shape[0], out)

    def free_slots(self, slots, push: bool, index_base: int, where: Where) -> None:
        free_by_slot(*self._state(), slots, push, int(where), index_base)

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
        _ready(list_pages)(self.state, self.capacity, table, paged, pad_row, rows, seq, indptr, indices, last)

    def block_table(self, table, paged: bool, pad_row: int, rows, seq, parts: int, out) -> None:
        _ready(fill_block_table)(self.state, self.capacity, table, paged, pad_row, rows, seq, parts, out)

    def slot_mapping(self, table, paged: bool, pad_row: int, rows, prefix, seq, num_tokens: int, out) -> None:
        _ready(map_slots)(self.state, self.capacity, table, paged, pad_row, rows, prefix, seq, out)

    def fold(self, entries, where: Where, cells: np.ndarray) -> None:
        _ready(fold_in)(self.pages, self.state, self.capacity, entries, int(where), cells)

    def retain_pages(self, entries) -> None:
        retain(*self._state(), entries)

    # By NumPy: what is done seldom, over whole arrays, is not worth the time to compile it.

    def reference_counts(self, entries, out) -> None:
        known = (entries >= 1) & (entries <= self._cells[NUM_PAGES])
        out[:] = np.where(known, self.ref_count[np.where(known, entries, 0)], -1)

    def sort_free(self, bound: int) -> None:
        cells = self._cells
        if cells[STAGED] == 0 or bound <= cells[FREE]:
            return
        free = np.flatnonzero(self.ref_count[1 : cells[NUM_PAGES] + 1] == 0)
        self.free_ring[: free.size] = free
        self.free_ring[: free.size] += 1
        cells[HEAD], cells[FREE], cells[STAGED] = 0, free.size, 0

    def clear(self, num_pages: int) -> None:
        pages, words = self.pages, self.state
        pages[RING] = np.arange(1, pages.shape[1] + 1, dtype=np.int32)
        pages[REFS] = pages[MARKS] = 0
        pages[REFS, 0] = 1
        words[[NUM_FREED, HEAD, STAGED, SHARED, RET]] = 0
        words[[NUM_PAGES, FREE]] = num_pages
        self.refresh()

    def backup(self) -> np.ndarray:
        self.refresh()
        return np.concatenate((self.free_ring, self.ref_count, self.words[SAVED]), dtype=np.int32)

    def restore(self, saved: np.ndarray) -> None:
        self.free_ring[:], self.ref_count[:], self.words[SAVED] = np.split(
            saved, [self.capacity, 2 * self.capacity + 1]
        )
        self.refresh()

    def refresh(self) -> None:
        tick(self._state()[1])

    def memory(self) -> int:
        return self.pages.nbytes + self.state.nbytes
