"""Random operations for backends, good and bad, and the comparison of what two backends made of them."""

from __future__ import annotations

import numpy as np

from cupaged.backends.reference import ReferenceBackend
from cupaged.layout import SAVED_WORDS, SKIPPED_PAGE, Kind, Where, Word

ERROR_WORDS = (Word.ERROR_CODE, Word.ERROR_OP, Word.ERROR_INDEX, Word.ERROR_VALUE)
COMPARED = (*SAVED_WORDS, Word.OP, Word.HOST_OP, Word.STATUS, Word.RET, Word.OK, Word.REFUSALS)
COMPARED_ALSO = (Word.ALLOCATED, Word.FREED, Word.PEAK)


def options(rng: np.random.Generator, page_size: int, **fixed) -> dict:
    choice = {
        "num_pages": int(rng.integers(1, 60)),
        "page_size": page_size,
        "index_dtype": np.dtype(rng.choice(["int32", "int64"])),
        "max_batch": 4,
        "need_sort": bool(rng.integers(2)),
        "strict": bool(rng.integers(4)),
        "refused_slot": int(rng.choice([0, -1])),
        "device_index": 0,
    }
    return choice | fixed


PAD_ROW = -1


class Script:
    """Draws operations that make sense for the state of the reference, and now and then some that do not."""

    def __init__(self, rng: np.random.Generator, reference: ReferenceBackend, largest_batch: int = 12) -> None:
        self.rng, self.reference, self.largest_batch = rng, reference, largest_batch
        self.requests: list[tuple[int, int]] = []  # (length, last slot) of requests that seem alive
        self.saved = None
        size = reference.page_size
        self.with_tables = size <= 64
        # A slot table and a page table, garbage where nobody has written, as (cells, length known of each row).
        self.tables = [
            (rng.integers(-1, 70, (6, 4 * size + 3)).astype(np.int32), np.zeros(6, np.int64)),
            (rng.integers(-1, 70, (6, 5)).astype(np.int32), np.zeros(6, np.int64)),
        ]

    def draw(self) -> tuple[Kind, dict]:
        names = ["extend", "decode", "alloc", "free", "free", "free_pages", "free_segment", "retain", "rare", "rare"]
        if self.with_tables:
            names += ["step", "step", "step", "rows_to_free", "rows_to_free", "queue"]
        return getattr(self, "_" + str(self.rng.choice(names)))()

    def _bad(self, chance: float = 0.06) -> bool:
        return bool(self.rng.random() < chance)

    def _lengths(self, decode: bool):
        rng, size = self.rng, self.reference.page_size
        n = int(rng.integers(0, self.largest_batch + 1))
        prefix, last = np.zeros(n, np.int64), np.full(n, -1, np.int64)
        for i in range(n):
            if self.requests and rng.random() < 0.7:
                prefix[i], last[i] = self.requests[int(rng.integers(len(self.requests)))]
        new = np.ones(n, np.int64) if decode else rng.integers(0, 3 * size + 2, n)
        seq = prefix + new
        total = int(new.sum())
        if n and self._bad(0.15):
            i = int(rng.integers(n))
            array = [prefix, seq, last][int(rng.integers(3))]
            old = int(array[i])
            near = [old - 1, old + 1, old - size, old + size, old + 7]
            far = [-(2**40), 2**40, 10**9, -(2**63), 2**63 - 1]
            array[i] = near[int(rng.integers(5))] if rng.integers(2) else far[int(rng.integers(5))]
        if self._bad():
            total += int(rng.integers(-2, 3))
        return prefix, seq, last, max(0, total)

    def _extend(self):
        prefix, seq, last, total = self._lengths(decode=False)
        return Kind.EXTEND, {"prefix": prefix, "seq": seq, "last": last, "num_tokens": total}

    def _decode(self):
        _, seq, last, _ = self._lengths(decode=True)
        return Kind.DECODE, {"seq": seq, "last": last}

    def _alloc(self):
        return Kind.ALLOC, {"pages": int(self.rng.integers(0, self.reference.capacity // 3 + 2))}

    def _owned_pages(self, n: int) -> np.ndarray:
        owned = np.flatnonzero(self.reference.ref_count[1:] > 0) + 1
        pages = self.rng.choice(owned, min(n, owned.size), replace=False) if owned.size else np.zeros(0, np.int64)
        if self._bad(0.15):
            strange = [0, -1, self.reference.capacity + 1, 2**33, -(2**40), int(self.rng.integers(1, 61))]
            pages = np.append(pages, self.rng.choice(strange))
        if pages.size and self._bad(0.3):
            pages = np.append(pages, self.rng.choice(pages, 2))
        return pages.astype(np.int64)

    def _free(self):
        groups = []
        for _ in range(int(self.rng.choice([1, 1, 1, 2, 3]))):
            pages = np.repeat(self._owned_pages(5), int(self.rng.integers(1, 4)))
            slots = pages * self.reference.page_size + self.rng.integers(0, self.reference.page_size, pages.size)
            groups.append(self.rng.permutation(slots) if self.rng.integers(2) else slots)
        return Kind.FREE, {"groups": groups, "where": self._where()}

    def _free_pages(self):
        return Kind.FREE_PAGES, {"entries": self._owned_pages(6), "divisor": 1, "where": self._where()}

    def _free_segment(self):
        size = self.reference.page_size
        return Kind.FREE_SEGMENT, {"entries": self._owned_pages(4) * size, "divisor": size, "where": self._where()}

    def _where(self) -> Where:
        return Where(int(self.rng.integers(3)))

    def _retain(self):
        return Kind.RETAIN, {"entries": self._owned_pages(3)}

    def _rare(self):
        kind = self.rng.choice(["sort", "clear", "backup", "restore", "restore", "refresh"])
        if kind == "clear":
            self.requests.clear()
            return Kind.CLEAR, {"num_pages": int(self.rng.integers(1, self.reference.capacity + 1))}
        if kind == "backup" or (self.saved is None and kind == "restore"):
            self.saved = list(self.requests)
            return Kind.BACKUP, {}
        if kind == "restore":
            self.requests = list(self.saved)
            return Kind.RESTORE, {}
        if kind == "refresh":
            return Kind.REFRESH, {}
        return Kind.REFRESH, {"sort": int(self.rng.integers(0, 80))}

    def _rows(self, lengths: np.ndarray) -> np.ndarray:
        rows = self.rng.permutation(lengths.size)[: int(self.rng.integers(0, lengths.size + 1))]
        rows = np.where(self.rng.random(rows.size) < 0.15, PAD_ROW, rows)
        if rows.size and self._bad():
            rows[int(self.rng.integers(rows.size))] = int(self.rng.choice([-2, lengths.size, 2**40, -(2**63)]))
        return rows

    def _disturb(self, array: np.ndarray) -> None:
        if array.size and self._bad():
            i = int(self.rng.integers(array.size))
            strange = [-1, 0, array[i] + 1, array[i] - 1, 10**6, 2**31 - 1, 2**31, -(2**63), 2**63 - 1]
            array[i] = strange[int(self.rng.integers(len(strange)))]

    def _step(self):
        which = int(self.rng.integers(2))
        _, lengths = self.tables[which]
        rows = self._rows(lengths)
        known = np.where((rows >= 0) & (rows < lengths.size), lengths[rows % lengths.size], 0)
        given = {"which": which, "rows": rows}
        if self.rng.integers(2):
            seq = known.copy()
            self._disturb(seq)
            return Kind.DECODE_STEP, given | {"prefix": None, "seq": seq, "num_tokens": rows.size}
        most = 2 * self.reference.page_size + 1
        prefix, seq = known.copy(), known + self.rng.integers(0, most, rows.size)
        total = int((seq - prefix).sum())
        self._disturb(prefix if self.rng.integers(2) else seq)
        return Kind.EXTEND_STEP, given | {"prefix": prefix, "seq": seq, "num_tokens": total}

    def _rows_to_free(self):
        which = int(self.rng.integers(2))
        lengths = self.tables[which][1]
        rows = self._rows(lengths)
        seq = np.where((rows >= 0) & (rows < lengths.size), lengths[rows % lengths.size], 0)
        keep = self.rng.integers(0, seq + 1) if self.rng.integers(2) else None
        given = {"which": which, "rows": rows, "where": self._where()}
        if keep is None or self.rng.integers(2):
            self._disturb(seq)
        else:
            self._disturb(keep)
        kind = Kind.RELEASE if keep is None else Kind.TRIM
        return kind, given | {"keep": keep, "seq": seq}

    def _queue(self):
        rows, begins, ends, entries = [], [], [], self._owned_pages(5)
        for row in self.rng.permutation(6)[:3]:
            pages = -(-int(self.tables[1][1][row]) // self.reference.page_size)
            begin = int(self.rng.integers(0, min(pages, 5) + 1))
            rows.append(int(row)), begins.append(begin), ends.append(min(pages, 5))
            self.tables[1][1][row] = begin * self.reference.page_size
        if self.rng.random() < 0.3:  # as free_with_diff queues a page that stays
            entries = np.insert(entries, int(self.rng.integers(0, entries.size + 1)), SKIPPED_PAGE)
        cut = int(self.rng.integers(0, entries.size + 1))
        rows += [-1, -1]
        begins += [0, cut]
        ends += [cut, entries.size]
        order = self.rng.permutation(len(rows))
        columns = (np.array(x, np.int64)[order] for x in (rows, begins, ends))
        refs = (self.rng.integers(0, 3, (self.reference.capacity + 1) * self.reference.page_size)).astype(np.int32)
        return Kind.FREE_QUEUE, {"items": tuple(columns), "entries": entries, "where": self._where(), "refs": refs}

    def _learn_rows(self, kind: Kind, given: dict) -> None:
        lengths = self.tables[given["which"]][1]
        if not self.reference.words[Word.OK]:
            return
        for i, row in enumerate(given["rows"]):
            if row == PAD_ROW:
                continue
            if kind is Kind.TRIM:
                lengths[row] = given["keep"][i]
            elif kind is Kind.RELEASE:
                lengths[row] = 0
            else:
                lengths[row] = given["seq"][i] + (kind is Kind.DECODE_STEP)

    def learn(self, kind: Kind, given: dict, out: np.ndarray | None) -> None:
        """Take up what the reference handed out."""
        if "rows" in given:
            self._learn_rows(kind, given)
        if kind not in (Kind.EXTEND, Kind.DECODE) or not self.reference.words[Word.OK]:
            return
        end = 0
        for i, seq in enumerate(given["seq"]):
            prefix = int(seq) - 1 if kind is Kind.DECODE else int(given["prefix"][i])
            end += int(seq) - prefix
            if seq > prefix:
                self.requests.append((int(seq), int(out[end - 1])))
        del self.requests[:-20]


class Runner:
    """Runs drawn operations on one backend."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.op = self.ack = 0
        self.saved = None
        backend.enter("")
        self._begin(Kind.CLEAR, 0)
        backend.clear(backend.capacity)
        self.tables: list = []
        self.refs = np.zeros(0, np.int32)

    def lend(self, array: np.ndarray):
        """The array on the backend's device, and as its kernels take it."""
        if self.backend.synchronous:
            return array, array
        if hasattr(self.backend, "lend"):
            return self.backend.lend(array)
        copy = self.backend._upload(array)
        return copy, copy.__cuda_array_interface__["data"][0]

    def take_tables(self, tables) -> None:
        self.tables = [self.lend(cells.copy())[0] for cells, _ in tables]

    def _table(self, which: int):
        return self.backend.table(self.tables[which], "table")

    def _begin(self, kind: Kind, quiet: int) -> None:
        self.op += 1
        b = self.backend
        b.kind, b.host_op, b.error_ack, b.quiet = kind, self.op, self.ack, quiet

    def run(self, kind: Kind, given: dict, quiet: int, narrow: bool, stride: int) -> np.ndarray | None:
        b = self.backend
        b.enter("")

        def vec(x):
            x = np.asarray(x)
            small = x.size == 0 or (abs(x) < 2**31).all()
            x = x.astype(np.int32 if narrow and small and x.min(initial=0) > -(2**31) else np.int64)
            spaced = np.full(x.size * stride, -77, x.dtype)
            spaced[::stride] = x
            return b.vector(spaced[::stride], "x")

        out = None
        if kind is Kind.ALLOC:
            self._begin(kind, quiet)
            out, raw = b.output(b.native_library, given["pages"] * b.page_size)
            b.alloc_pages(given["pages"], raw)
        elif kind is Kind.EXTEND:
            self._begin(kind, quiet)
            out, raw = b.output(b.native_library, given["num_tokens"])
            b.alloc_extend(vec(given["prefix"]), vec(given["seq"]), vec(given["last"]), given["num_tokens"], raw)
        elif kind is Kind.DECODE:
            self._begin(kind, quiet)
            out, raw = b.output(b.native_library, len(given["seq"]))
            b.alloc_decode(vec(given["seq"]), vec(given["last"]), raw)
        elif kind is Kind.FREE:
            base = 0
            for i, slots in enumerate(given["groups"]):
                self._begin(kind, 0)
                b.free_slots(vec(slots), i == len(given["groups"]) - 1, base, given["where"])
                base += len(slots)
        elif kind in (Kind.FREE_PAGES, Kind.FREE_SEGMENT):
            self._begin(kind, 0)
            b.free_pages(vec(given["entries"]), given["divisor"], given["where"])
        elif kind in (Kind.DECODE_STEP, Kind.EXTEND_STEP):
            self._begin(kind, quiet)
            out, raw = b.output(b.native_library, given["num_tokens"])
            prefix = None if given["prefix"] is None else vec(given["prefix"])
            which = given["which"]
            b.step(
                self._table(which),
                which == 1,
                PAD_ROW,
                vec(given["rows"]),
                prefix,
                vec(given["seq"]),
                given["num_tokens"],
                raw,
            )
        elif kind in (Kind.TRIM, Kind.RELEASE):
            self._begin(kind, 0)
            keep = None if given["keep"] is None else vec(given["keep"])
            which = given["which"]
            b.free_rows(
                self._table(which), which == 1, PAD_ROW, vec(given["rows"]), keep, vec(given["seq"]), given["where"]
            )
        elif kind is Kind.FREE_QUEUE:
            self._begin(kind, 0)
            refs = self.lend(given["refs"].copy())
            self.refs = refs[0]
            b.free_queue(self._table(1), *map(vec, given["items"]), vec(given["entries"]), given["where"], refs[1])
        elif kind is Kind.RETAIN:
            self._begin(kind, 0)
            b.retain_pages(vec(given["entries"]))
        elif kind is Kind.CLEAR:
            self._begin(kind, 0)
            b.clear(given["num_pages"])
        elif kind is Kind.BACKUP:
            self._begin(kind, 0)
            self.saved = b.backup()
        elif kind is Kind.RESTORE:
            self._begin(kind, 0)
            b.restore(self.saved)
        elif "sort" in given:
            b.sort_free(given["sort"])
        else:
            self._begin(kind, 0)
            b.refresh()
        b.leave()
        return out


def state(backend) -> dict[str, list[int]]:
    """What must be equal on all backends after the same operations."""
    ring, refs, words = backend.snapshot()
    listed = int(words[Word.FREE] + words[Word.STAGED])
    order = ring[(int(words[Word.HEAD]) + np.arange(listed)) % backend.capacity]
    code = int(words[Word.ERROR_CODE])
    found = {word.name: int(words[word]) for word in (*COMPARED, *COMPARED_ALSO)}
    found["order"] = order.tolist()
    found["refs"] = refs[1 : int(words[Word.NUM_PAGES]) + 1].tolist()
    found["error"] = [int(words[word]) for word in ERROR_WORDS] if code else []
    return found
