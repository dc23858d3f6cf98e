"""The arithmetic of pages and slots, against counting by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupaged.geometry import check_lengths, extend_bounds, pages_begun, pages_for, pages_taken


@pytest.mark.parametrize("page_size", [1, 2, 3, 7])
def test_pages_for_is_how_often_a_page_begins(page_size):
    begun = 0
    for tokens in range(40):
        assert pages_for(tokens, page_size) == begun
        begun += tokens % page_size == 0


def test_pages_for_is_exact_far_out():
    assert pages_for(2**62 + 1, 2**31 - 1) == 2**31 + 2  # 2**62 + 1 = (2**31 + 1) * (2**31 - 1) + 2


def lengths(draw_pairs):
    prefix = np.array([p for p, _ in draw_pairs], np.int64)
    return prefix, prefix + np.array([n for _, n in draw_pairs], np.int64)


PAIRS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=6)


@given(PAIRS, st.integers(1, 20), st.booleans())
def test_pages_taken_counts_the_page_starts_of_the_new_tokens(pairs, page_size, narrow):
    prefix, seq = lengths(pairs)
    expected = sum(t % page_size == 0 for p, s in zip(prefix, seq, strict=True) for t in range(p, s))
    if narrow:
        prefix = prefix.astype(np.int32)
    assert pages_taken(prefix, seq, page_size) == expected


def test_pages_taken_does_not_overflow_int32():
    prefix, seq = np.zeros(3, np.int32), np.full(3, 2**31 - 1, np.int32)
    assert pages_taken(prefix, seq, 1) == 3 * (2**31 - 1)
    assert pages_taken(prefix, seq, 2**31 - 1) == 3
    assert pages_taken(prefix, seq, 2**31 - 2) == 6


@given(PAIRS, st.integers(1, 20))
def test_bounds_hold(pairs, page_size):
    prefix, seq = lengths(pairs)
    taken = pages_taken(prefix, seq, page_size)
    least, most = extend_bounds(int((seq - prefix).sum()), len(pairs), page_size)
    assert 0 <= least <= taken <= most


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_bounds_are_reached_and_never_exceeded(batch, page_size):
    for tokens in range(9):
        found = []
        for prefix in itertools.product(range(page_size), repeat=batch):
            for new in itertools.product(range(tokens + 1), repeat=batch):
                if sum(new) == tokens:
                    seq = np.array(prefix) + new
                    found.append(pages_taken(np.array(prefix), seq, page_size))
        least, most = extend_bounds(tokens, batch, page_size)
        assert least == min(found)
        # In whole pages and one more a request, the bound of DESIGN section 5: at most a page too many a request.
        assert max(found) <= most <= min(tokens, max(found) + batch)


def test_bounds_of_an_empty_batch():
    assert extend_bounds(0, 0, 16) == (0, 0)


def refusal(prefix, seq, num_tokens, dtype=np.int64) -> str:
    with pytest.raises(ValueError) as caught:
        check_lengths(np.array(prefix, dtype), np.array(seq, dtype), num_tokens)
    return str(caught.value)


def test_good_lengths_pass():
    check_lengths(np.array([0, 5, 7]), np.array([3, 5, 9]), 5)
    check_lengths(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    check_lengths(np.array([0], np.int32), np.array([2**31 - 1]), 2**31 - 1)
    check_lengths(np.array([0, 4]), np.array([1, 5]), None)


def test_what_no_allocation_can_mean_is_named():
    assert refusal([3, -1], [4, 4], 6) == "prefix_lens[1] is -1, but a length cannot be negative"
    assert refusal([3, 5], [4, 4], 0) == "seq_lens[1] is 4, less than prefix_lens[1], 5"
    assert refusal([0, 0], [1, 2**31], 2**31 + 1).startswith("seq_lens[1] is 2147483648, but a request has at most")
    assert refusal([0, 0], [1, 2], 4) == "extend_num_tokens is 4, but seq_lens - prefix_lens sums to 3"
    assert refusal([], [], 1) == "extend_num_tokens is 1, but seq_lens - prefix_lens sums to 0"
    assert refusal([3, -1], [4, 0], None) == "seq_lens[1] is 0, but a decode needs at least 1"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_difference_that_wraps_is_still_negative(dtype):
    smallest = np.iinfo(dtype).min
    message = refusal([1], [smallest], 5, dtype)
    assert message == f"seq_lens[0] is {smallest}, less than prefix_lens[0], 1"


EDGES = [-(2**63), -(2**63) + 1, -(2**62), -(2**31), -(2**31) + 1, -1, 0, 1, 2, 63, 64, 2**31 - 2, 2**31 - 1, 2**31]
EDGES += [2**31 + 1, 2**32, 2**62, 2**63 - 2, 2**63 - 1]


def edges(dtype) -> list[int]:
    return [n for n in EDGES if np.iinfo(dtype).min <= n <= np.iinfo(dtype).max]


@pytest.mark.parametrize("seq_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("prefix_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("others", [0, 1, 40])
def test_no_length_at_the_edge_of_its_type_slips_through(others, prefix_dtype, seq_dtype):
    good = [(5, 9)] * others
    for prefix, seq in itertools.product(edges(prefix_dtype), edges(seq_dtype)):
        prefixes, seqs = zip(*good, (prefix, seq), *good, strict=True)
        prefixes, seqs = np.array(prefixes, prefix_dtype), np.array(seqs, seq_dtype)
        with np.errstate(over="ignore"):
            total = int((seqs - prefixes).sum(dtype=np.int64))  # also where it wraps
        if 0 <= prefix <= seq <= 2**31 - 1:
            check_lengths(prefixes, seqs, total)
        else:
            with pytest.raises(ValueError, match=rf"\[{others}\] is"):
                check_lengths(prefixes, seqs, total)
        if 1 <= seq <= 2**31 - 1:
            check_lengths(None, seqs, None)
            assert pages_begun(seqs - 1, 64) == pages_taken(seqs - 1, seqs, 64)
        else:
            with pytest.raises(ValueError, match=rf"seq_lens\[{others}\] is"):
                check_lengths(None, seqs, None)


def test_the_sum_is_taken_in_64_bits():
    many, total = 3, 3 * (2**31 - 1)
    check_lengths(np.zeros(many, np.int32), np.full(many, 2**31 - 1, np.int32), total)


def test_lengths_that_wrap_are_not_taken_for_good():
    """Differences and sums of these come out right in 64 bits."""
    prefix = np.array([2**32, 2**32, 0, 0, 0])
    seq = np.array([-(2**63) + 2**31] * 2 + [2**31 - 1, 2**31 - 1, 2])
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=r"seq_lens\[0\]"):
        check_lengths(prefix, seq, 0)
