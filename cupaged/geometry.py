"""The arithmetic of pages and slots (docs/design.md, section "The arithmetic"), in plain Python and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.layout import INT32_LARGEST

__all__ = ["check_lengths", "extend_bounds", "pages_for", "pages_taken", "whole"]


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens: ``ceil(tokens / page_size)``."""
    return -(-tokens // page_size)


def pages_taken(prefix_lens: np.ndarray, seq_lens: np.ndarray, page_size: int) -> int:
    """New pages that a batch takes.

    Parameters
    ----------
    prefix_lens, seq_lens : numpy.ndarray
        Integer arrays of shape ``(batch,)``, tokens before and after.
    page_size : int
        Slots in a page.
    """
    before = -(-prefix_lens.astype(np.int64) // page_size)
    after = -(-seq_lens.astype(np.int64) // page_size)
    return int((after - before).sum())


def extend_bounds(num_tokens: int, batch: int, page_size: int) -> tuple[int, int]:
    """Fewest and most pages that `num_tokens` new tokens of `batch` requests can take, lengths unknown.

    Each request finds at most ``page_size - 1`` slots in its old page, and starts at most one page that it does not
    fill: ``num_tokens // page_size + batch`` is never exceeded.
    """
    least = max(0, pages_for(num_tokens - batch * (page_size - 1), page_size))
    return least, min(num_tokens, num_tokens // page_size + batch)


def check_lengths(prefix_lens: np.ndarray, seq_lens: np.ndarray, num_tokens: int | None) -> None:
    """Raise ``ValueError`` for host-known lengths that no allocation can mean.

    Parameters
    ----------
    prefix_lens, seq_lens : numpy.ndarray
        Integer arrays of shape ``(batch,)``.
    num_tokens : int or None
        What their differences must sum to; None for a decode, whose `seq_lens` must be at least 1.
    """
    if num_tokens is None and seq_lens.size and int(seq_lens.min()) < 1:
        i = int(seq_lens.argmin())
        raise ValueError(f"seq_lens[{i}] is {seq_lens[i]}, but a decode needs at least 1")
    if seq_lens.size == 0:
        total = 0
    else:
        least, most = int(prefix_lens.min()), int(seq_lens.max())
        if least < 0:
            i = int(prefix_lens.argmin())
            raise ValueError(f"prefix_lens[{i}] is {least}, but a length cannot be negative")
        shrinks = seq_lens < prefix_lens
        if shrinks.any():
            i = int(shrinks.argmax())
            raise ValueError(f"seq_lens[{i}] is {seq_lens[i]}, less than prefix_lens[{i}], {prefix_lens[i]}")
        if most > INT32_LARGEST:
            i = int(seq_lens.argmax())
            raise ValueError(f"seq_lens[{i}] is {most}, but a request has at most 2**31 - 1 tokens")
        total = int((seq_lens - prefix_lens).sum(dtype=np.int64))
    if num_tokens is not None and total != num_tokens:
        raise ValueError(f"extend_num_tokens is {num_tokens}, but seq_lens - prefix_lens sums to {total}")


def whole(name: str, value: Any, least: int) -> int:
    """`value` as an integer of at least `least`.

    Raises
    ------
    TypeError
        If it is no integer; bools are none.
    ValueError
        If it is less.
    """
    if type(value) is int and value >= least:  # the common case, in every call of a step
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
    try:
        number = value.__index__()
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__} {value}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number
