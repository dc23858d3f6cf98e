"""The words that every backend keeps and posts, numbered as in ``kernels_cu/common.cuh``."""

from __future__ import annotations

from enum import IntEnum

INT32_LARGEST = 2**31 - 1
WHOLE_BATCH = -1  # index of an error that no single entry made
SKIPPED_PAGE = -(1 << 62)  # a queue's entry that stands for nothing


class Word(IntEnum):
    """Index of each int64 word of the pool; the mailbox has them one further on, behind its sequence."""

    HEAD = 0
    FREE = 1
    STAGED = 2
    SHARED = 3
    OP = 4
    HOST_OP = 5
    NUM_PAGES = 6
    STATUS = 7
    RET = 8
    OK = 9
    REFUSALS = 10
    ALLOCATED = 11
    FREED = 12
    PEAK = 13
    FIRST = 14
    TOKENS = 15
    ERROR_CODE = 16
    ERROR_OP = 17
    ERROR_INDEX = 18
    ERROR_VALUE = 19


NUM_WORDS = 20
STATE_WORDS = 21  # and the lowest breach of a free that is being marked
MAIL_WORDS = 1 + NUM_WORDS
SAVED_WORDS = (Word.HEAD, Word.FREE, Word.STAGED, Word.SHARED, Word.NUM_PAGES)


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
