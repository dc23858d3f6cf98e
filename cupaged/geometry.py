"""The arithmetic of pages and slots (docs/design.md, section "The arithmetic"), in plain Python and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged.layout import INT32_LARGEST

__all__ = [
    "check_lengths",
    "extend_bounds",
    "largest",
    "pages_begun",
    "pages_for",
    "pages_taken",
    "smallest",
    "whole",
]


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
    # rounded up by the sign; a shift costs a tenth of a division
    if page_size & (page_size - 1) == 0:
        shift = page_size.bit_length() - 1
        taken = (-prefix_lens >> shift) - (-seq_lens >> shift)
    else:
        taken = -prefix_lens // page_size - -seq_lens // page_size
    return int(np.add.reduce(taken, dtype=np.int64))


def pages_begun(prefix_lens: np.ndarray, page_size: int) -> int:
    """New pages that one more token for each request takes: one where the last page is full.

    Parameters
    ----------
    prefix_lens : numpy.ndarray
        Integer array of shape ``(batch,)``, tokens before.
    page_size : int
        Slots in a page.
    """
    power_of_two = page_size & (page_size - 1) == 0
    used = prefix_lens & (page_size - 1) if power_of_two else prefix_lens % page_size
    return prefix_lens.size - int(np.count_nonzero(used))


def extend_bounds(num_tokens: int, batch: int, page_size: int) -> tuple[int, int]:
    """Fewest and most pages that `num_tokens` new tokens of `batch` requests can take, lengths unknown.

    Each request finds at most ``page_size - 1`` slots in its old page, and starts at most one page that it does not
    fill: ``num_tokens // page_size + batch`` is never exceeded.
    """
    least = max(0, pages_for(num_tokens - batch * (page_size - 1), page_size))
    return least, min(num_tokens, num_tokens // page_size + batch)


def check_lengths(prefix_lens: np.ndarray | None, seq_lens: np.ndarray, num_tokens: int | None) -> None:
    """Raise ``ValueError`` for host-known lengths that no allocation can mean.

    Parameters
    ----------
    prefix_lens, seq_lens : numpy.ndarray
        Integer arrays of shape ``(batch,)``; a decode needs no `prefix_lens`.
    num_tokens : int or None
        What their differences must sum to; None for a decode, whose `seq_lens` must be at least 1.
    """
    if prefix_lens is None or num_tokens is None:
        if seq_lens.size and not (smallest(seq_lens) >= 1 and largest(seq_lens) <= INT32_LARGEST):
            _name_wrong_length(None, seq_lens)
        return
    added = seq_lens - prefix_lens
    # where the first two are not negative, the last has not wrapped
    if seq_lens.size and not (
        smallest(prefix_lens) >= 0
        and smallest(seq_lens) >= 0
        and largest(seq_lens) <= INT32_LARGEST
        and smallest(added) >= 0
    ):
        _name_wrong_length(prefix_lens, seq_lens)
    total = int(np.add.reduce(added, dtype=np.int64))
    if total != num_tokens:
        raise ValueError(f"extend_num_tokens is {num_tokens}, but seq_lens - prefix_lens sums to {total}")


def smallest(array: np.ndarray) -> int:
    """The smallest entry, of at least one, by its index: for a batch, min() takes several times as long."""
    return array.item(array.argmin())


def largest(array: np.ndarray) -> int:
    """The largest entry, as `smallest` finds it."""
    return array.item(array.argmax())


def _name_wrong_length(prefix_lens: np.ndarray | None, seq_lens: np.ndarray) -> None:
    if prefix_lens is None:
        i = int(seq_lens.argmin())
        if seq_lens[i] < 1:
            raise ValueError(f"seq_lens[{i}] is {seq_lens[i]}, but a decode needs at least 1")
    else:
        i = int(prefix_lens.argmin())
        if prefix_lens[i] < 0:
            raise ValueError(f"prefix_lens[{i}] is {prefix_lens[i]}, but a length cannot be negative")
        shrinks = seq_lens < prefix_lens
        if shrinks.any():
            i = int(shrinks.argmax())
            raise ValueError(f"seq_lens[{i}] is {seq_lens[i]}, less than prefix_lens[{i}], {prefix_lens[i]}")
    i = int(seq_lens.argmax())
    raise ValueError(f"seq_lens[{i}] is {seq_lens[i]}, but a request has at most 2**31 - 1 tokens")


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
