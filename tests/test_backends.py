"""Layer 2: every backend against the reference, operation by operation, state and all."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from cupaged import PagedTokenToKVPoolAllocator
from cupaged.backends import numba_cpu
from cupaged.backends.cupy_raw import CLUSTER_KERNELS, KERNELS
from cupaged.backends.numba_cpu import NumbaBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.interop import to_host
from cupaged.layout import Breach, Kind, Where
from tests.host_backend import HostCudaBackend, variant
from tests.operations import Runner, Script, options, state

PAGE_SIZES = (1, 2, 3, 16, 48, 64, 256)
# What is no op of the pool has tests of its own.
ELSEWHERE = {"fold_digest", "reference_counts", *(name for name in KERNELS if name.startswith("handoff_"))}
CONTESTANTS = {
    "numba": NumbaBackend,
    "cuda-ascending": variant("ascending", cluster=0, tiles=False),
    "cuda-descending": variant("descending"),
    "cuda-random": variant("random"),
    "cuda-clusters": variant("random", small=False),
    "cuda-one-block": variant("ascending", cluster=1, small=False),
}


def play(contestant, seed: int, page_size: int, steps: int, **fixed) -> None:
    """The same random operations on the reference and on another backend."""
    rng = np.random.default_rng(seed)
    largest_batch = fixed.pop("largest_batch", 12)
    chosen = options(rng, page_size, **fixed)
    reference, other = ReferenceBackend(**chosen), contestant(**chosen)
    reference.native_library, other.native_library = "numpy", other.library
    left, right = Runner(reference), Runner(other)
    script = Script(rng, reference, largest_batch)
    left.take_tables(script.tables)
    right.take_tables(script.tables)
    for step in range(steps):
        kind, arguments = script.draw()
        quiet, narrow, stride = int(rng.integers(2)), bool(rng.integers(2)), int(rng.choice([1, 1, 3]))
        expected = left.run(kind, arguments, quiet, narrow, stride)
        found = right.run(kind, arguments, quiet, narrow, stride)
        script.learn(kind, arguments, expected)
        where = f"seed {seed}, step {step}, {kind.name} {arguments}, {chosen}"
        settled = state(other)
        assert state(reference) == settled, where
        for mine, yours in zip((*left.tables, left.refs), (*right.tables, right.refs), strict=True):
            np.testing.assert_array_equal(to_host(yours), mine, err_msg=where)
        if expected is not None:
            np.testing.assert_array_equal(to_host(found), expected, err_msg=where)
        if settled["error"] and rng.random() < 0.5:
            left.ack = right.ack = settled["error"][1]


@pytest.mark.parametrize("name", CONTESTANTS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from(PAGE_SIZES))
def test_same_as_reference(name, seed, page_size):
    play(CONTESTANTS[name], seed, page_size, steps=25)


def large(contestant, requests: int = 1500, small: bool = False) -> None:
    """More requests than a block has threads, more pages than a group of bits, more slots than one block frees.

    `small`: only the first, for a sanitizer that has room for few threads.
    """
    if not small:
        for seed, batch in ((1, 1500), (2, 5000)):
            play(contestant, seed, 3, steps=14, num_pages=40_000, largest_batch=batch, strict=True)
    rng = np.random.default_rng(3)
    pages = 2500 if small else 40_000
    chosen = options(rng, 3, num_pages=pages, strict=True, need_sort=False, index_dtype=np.dtype(np.int64))
    reference, other = ReferenceBackend(**chosen), contestant(**chosen)
    reference.native_library, other.native_library = "numpy", other.library
    left, right = Runner(reference), Runner(other)
    tables = [(np.zeros((requests, width), np.int32), None) for width in (80, 27)]
    left.take_tables(tables)
    right.take_tables(tables)
    zeros, none, seq = np.zeros(requests, np.int64), np.full(requests, -1), rng.integers(0, 12, requests)
    wrong = none.copy()
    wrong[-1], ones = 7, zeros + 1
    ones[-1] = 2  # in page 2, which is free
    script = [
        (Kind.DECODE, {"seq": zeros + 1, "last": none}),
        (Kind.DECODE, {"seq": ones, "last": np.where(ones == 2, 3 * 39_000, wrong)}),
        (Kind.DECODE, {"seq": zeros + 1, "last": none}),
    ]
    if not small:
        few = {"prefix": zeros[:50], "seq": rng.integers(200, 400, 50), "last": none[:50]}
        long = few | {"seq": few["seq"] + 1, "prefix": few["prefix"] + 1, "last": few["last"] + 1}  # in no page
        script[1:1] = [
            (Kind.ALLOC, {"pages": 6000}),  # in two launches
            *((Kind.EXTEND, x | {"num_tokens": int((x["seq"] - x["prefix"]).sum())}) for x in (few, long)),
            (Kind.EXTEND, {"prefix": zeros, "seq": seq, "last": none, "num_tokens": int(seq.sum())}),
            (Kind.FREE, {"groups": [rng.permutation(np.arange(3, 3 * 5800 + 2))], "where": Where.FRONT}),
        ]
        rows = np.where(rng.random(requests) < 0.1, -1, rng.permutation(requests))
        longer = seq + rng.integers(0, 60, requests)
        misplaced = seq.copy()
        misplaced[-2:] = 80
        for which in (0, 1):
            step = {"which": which, "rows": rows}
            for prefix, after in ((zeros, seq), (seq, longer), (seq, misplaced), (None, longer), (None, misplaced)):
                total = requests if prefix is None else int((after - prefix).sum())
                kind = Kind.DECODE_STEP if prefix is None else Kind.EXTEND_STEP
                script.append((kind, step | {"prefix": prefix, "seq": after, "num_tokens": total}))
    for kind, arguments in script:
        expected = left.run(kind, arguments, 0, False, 1)
        found = right.run(kind, arguments, 0, False, 1)
        assert state(reference) == state(other)
        for mine, yours in zip(left.tables, right.tables, strict=True):
            np.testing.assert_array_equal(to_host(yours), mine)
        if expected is not None:
            np.testing.assert_array_equal(to_host(found), expected)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from(PAGE_SIZES))
def test_vectorised_batches_on_the_host(seed, page_size):
    play(NumbaBackend, seed, page_size, steps=15, num_pages=3000, largest_batch=150)


@njit(error_model="numpy")
def divided(xs, size, quotients, remainders):
    for i in range(xs.shape[0]):
        quotients[i] = numba_cpu.quotient(xs[i], size, -1, 1.0 / size)
        remainders[i] = numba_cpu.remainder(xs[i], size, -1, 1.0 / size)


@settings(deadline=None)
@given(st.integers(1, 2**31 - 1), st.integers(0, 2**32))
def test_a_reciprocal_divides_exactly(size, seed):
    multiples = np.random.default_rng(seed).integers(0, numba_cpu.EXACT // size, 50) * size
    xs = np.concatenate([multiples, multiples + 1, multiples + size - 1, np.maximum(0, multiples - 1)])
    found = np.empty_like(xs), np.empty_like(xs)
    divided(xs, size, *found)
    np.testing.assert_array_equal(found, (xs // size, xs % size))


def test_slots_too_far_out_for_a_reciprocal():
    size = 2**31 - 1
    chosen = options(np.random.default_rng(0), size, num_pages=2**21 + 1, strict=True, refused_slot=-1)
    pool = NumbaBackend(**chosen | {"index_dtype": np.dtype(np.int64)})
    pool.clear(2**21 + 1)
    out = np.zeros(5, np.int64)
    pool.kind = Kind.EXTEND
    pool.alloc_extend(np.zeros(2, np.int64), np.array([3, 2]), np.full(2, -1), 5, out)
    assert out.tolist() == [size, size + 1, size + 2, 2 * size, 2 * size + 1]
    pool.kind = Kind.DECODE
    pool.alloc_decode(np.array([4, 3]), out[[2, 4]], out[:2])
    assert out[:2].tolist() == [size + 3, 2 * size + 2]
    pool.alloc_decode(np.array([4, 3]), np.array([size + 2, 2 * size]), out[:2])
    assert out[:2].tolist() == [-1, -1]


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_a_decode_in_place(page_size):
    n = 100
    pool = PagedTokenToKVPoolAllocator(2 * n * page_size, page_size, device="cpu", backend="numba")
    prefix = np.arange(n) % page_size + 1
    slots = pool.alloc_extend(np.zeros(n, int), prefix, np.full(n, -1), int(prefix.sum()))
    last = slots[np.cumsum(prefix) - 1]
    expected = np.where(prefix % page_size, last + 1, 0)
    expected[prefix % page_size == 0] = pool.free_pages[: (prefix % page_size == 0).sum()] * page_size
    assert pool.alloc_decode(prefix + 1, last, out=last) is last
    np.testing.assert_array_equal(last, expected)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_larger_batches_and_pools(name):
    large(CONTESTANTS[name])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_page_that_the_batch_takes_is_nobodys_last_page(name, strict):
    """Though other blocks may count its owner before it is looked at: B's last slot lies in A's first new page."""
    chosen = options(np.random.default_rng(0), 16, num_pages=100, strict=strict, refused_slot=-1)
    pool = CONTESTANTS[name](**chosen)
    pool.native_library = pool.library
    runner = Runner(pool)
    given = {"prefix": [0, 5], "seq": [64, 6], "last": [-1, 16 + 4], "num_tokens": 65}
    given = {key: np.array(x) if isinstance(x, list) else x for key, x in given.items()}
    assert to_host(runner.run(Kind.EXTEND, given, 0, False, 1)).tolist() == [-1] * 65
    found = state(pool)
    assert found["error"][0] == (Kind.EXTEND << 8 | Breach.FREE_PAGE)
    assert found["error"][2:] == [1, 20]
    assert not any(found["refs"][1:])
    # the same last slot of a request that begins a page, or adds nothing, says nothing
    given = {"prefix": [0, 16, 5], "seq": [64, 17, 5], "last": [-1, 16 + 4, 16 + 4], "num_tokens": 65}
    given = {key: np.array(x) if isinstance(x, list) else x for key, x in given.items()}
    pages = pool.snapshot()[0][:5].tolist()
    expected = [16 * page + i for page in pages[:4] for i in range(16)] + [16 * pages[4]]
    assert to_host(runner.run(Kind.EXTEND, given, 0, False, 1)).tolist() == expected
    assert sorted(np.flatnonzero(pool.snapshot()[1][1:]) + 1) == sorted(pages)


def test_every_kernel_is_reached():
    """By these tests, that is: a kernel that none of them runs would be proven by none."""

    class Recorded(HostCudaBackend):
        reached: ClassVar[set] = set()

        def _launch(self, kernel, blocks, threads):
            self.reached.add(kernel)
            super()._launch(kernel, blocks, threads)

    class InTwoLaunches(Recorded):
        cluster = tiles_extend = 0

    for seed in range(20):
        play(Recorded, seed, 16, steps=25)
    large(Recorded)
    large(InTwoLaunches)
    # queue_entries is the allocator's free group
    assert set(KERNELS + CLUSTER_KERNELS) - Recorded.reached == {"queue_entries", *ELSEWHERE}
