"""The words that every backend keeps and posts, numbered as in ``kernels_cu/common.cuh``."""

from __future__ import annotations

from enum import IntEnum

INT32_LARGEST = 2**31 - 1
WHOLE_BATCH = -1  # index of an error that no single entry made
SKIPPED_PAGE = -(1 << 62)  # a queue's entry that stands for nothing


class Word(IntEnum):
    """Index of each int64 word of the pool. What the host looks at in every step comes first."""

    HOST_OP = 0
    FREE = 1
    STAGED = 2
    SHARED = 3
    STATUS = 4
    ERROR_CODE = 5
    ERROR_OP = 6
    ERROR_INDEX = 7
    ERROR_VALUE = 8
    HEAD = 9
    OP = 10
    NUM_PAGES = 11
    RET = 12
    OK = 13
    REFUSALS = 14
    ALLOCATED = 15
    FREED = 16
    PEAK = 17
    FIRST = 18
    TOKENS = 19


NUM_WORDS = 20
STATE_WORDS = 25  # and what the blocks of one op share
MAIL_WORDS = 2 * NUM_WORDS
SAVED_WORDS = (Word.HEAD, Word.FREE, Word.STAGED, Word.SHARED, Word.NUM_PAGES)


def unpack_mail(cells: list[int]) -> list[int] | None:
    """Words from the mailbox, or None if it holds parts of two ops' mail.

    Parameters
    ----------
    cells : list of int
        `MAIL_WORDS` unsigned 64-bit cells: the low halves of all words, then the high halves, each behind the number
        of the op that posted it.
    """
    number = cells[0] >> 32
    if any(cell >> 32 != number for cell in cells):
        return None
    words = []
    for low, high in zip(cells[:NUM_WORDS], cells[NUM_WORDS:], strict=True):
        word = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
        words.append(word - (1 << 64) if word >> 63 else word)
    return words


class Status(IntEnum):
    """How the last op ended."""

    OK = 0
    SHORT = 1
    REFUSED = 2


class Kind(IntEnum):
    """What an op is; recorded with an error."""

    ALLOC = 1
    EXTEND = 2
    DECODE = 3
    FREE = 4
    FREE_PAGES = 5
    FREE_SEGMENT = 6
    RETAIN = 7
    CLEAR = 8
    BACKUP = 9
    RESTORE = 10
    REFRESH = 11
    DECODE_STEP = 12
    EXTEND_STEP = 13
    TRIM = 14
    RELEASE = 15
    FREE_QUEUE = 16
    KV_ALLOC = 17
    KV_BATCH = 18

    @property
    def method(self) -> str:
        """The public method that queues this op."""
        return _METHODS[self]


_METHODS = {
    Kind.ALLOC: "alloc",
    Kind.EXTEND: "alloc_extend",
    Kind.DECODE: "alloc_decode",
    Kind.FREE: "free",
    Kind.FREE_PAGES: "free_page_ids",
    Kind.FREE_SEGMENT: "free_segment",
    Kind.RETAIN: "retain",
    Kind.CLEAR: "clear",
    Kind.BACKUP: "backup_state",
    Kind.RESTORE: "restore_state",
    Kind.REFRESH: "refresh",
    Kind.DECODE_STEP: "decode_step",
    Kind.EXTEND_STEP: "extend_step",
    Kind.TRIM: "trim",
    Kind.RELEASE: "release",
    Kind.FREE_QUEUE: "free_group_end",
    Kind.KV_ALLOC: "alloc",
    Kind.KV_BATCH: "alloc_batch",
}


class Breach(IntEnum):
    """What was wrong with an entry or a batch."""

    NONE = 0
    SHORT = 1
    LENGTH = 2
    SUM = 3
    MISALIGNED = 4
    RANGE = 5
    FREE_PAGE = 6
    SHARED_PAGE = 7
    DOUBLE_FREE = 8
    ROW = 9
    COLUMN = 10


class Where(IntEnum):
    """Where freed pages go."""

    FRONT = 0
    BACK = 1
    STAGE = 2


class DigestCell(IntEnum):
    """Index of each int64 cell of a digest, which a fold reads and writes."""

    DIGEST = 0
    FREED_SEEN = 1


DIGEST_CELLS = len(DigestCell)
NEVER_FOLDED = -(1 << 62)  # in FREED_SEEN: the next fold takes in the whole free list
