"""Child process: random operations on the host-run CUDA kernels, under a sanitizer: MODE FIRST_SEED PLAYS."""

import sys

import numpy as np

from cupaged.layout import Kind
from tests.host_backend import variant
from tests.operations import Runner, options
from tests.test_backends import PAGE_SIZES, large, play


def refused_by_many_blocks(contestant) -> None:
    """An extend of more requests than a tile looks up, one of which is wrong: each block writes its own tile."""
    pool = contestant(**options(np.random.default_rng(0), 1, num_pages=2500, strict=True, refused_slot=-1))
    pool.native_library = pool.library
    runner = Runner(pool)
    n = 600
    prefix, seq, last = np.zeros(n, int), np.zeros(n, int), np.full(n, -1)
    prefix[300], seq[300], seq[-1] = -1, 2, 4096
    given = {"prefix": prefix, "seq": seq, "last": last, "num_tokens": 4098}
    assert (runner.run(Kind.EXTEND, given, 0, False, 1) == -1).all()


def extended_by_many_blocks(contestant) -> None:
    """Each of which plans all, while others already own new pages, or have changed the words."""
    pool = contestant(**options(np.random.default_rng(0), 16, num_pages=60, strict=True, refused_slot=-1))
    pool.native_library = pool.library
    runner = Runner(pool)
    prefix, seq, last = np.zeros(20, int), np.full(20, 13), np.full(20, -1)
    given = {"prefix": prefix, "seq": seq, "last": last, "num_tokens": 260}
    slots = runner.run(Kind.EXTEND, given, 0, False, 1)
    assert len(set(slots.tolist())) == 260
    # the last slots of those that begin a page lie in pages that others take
    prefix, last = prefix + 13, slots[12::13].copy()
    prefix[10:], last[10:] = 16, np.arange(10) + 16 * 25
    given = {"prefix": prefix, "seq": prefix + 20, "last": last, "num_tokens": 400}
    assert len({*slots.tolist(), *runner.run(Kind.EXTEND, given, 0, False, 1).tolist()}) == 660
    given["seq"], given["prefix"] = given["seq"] + 1, given["prefix"] + 1  # where no last slot fits
    assert (runner.run(Kind.EXTEND, given, 0, False, 1) == -1).all()


def main(mode: str, first_seed: int, plays: int) -> None:
    for seed in range(first_seed, first_seed + plays):
        rng = np.random.default_rng(seed)
        order = ("ascending", "descending", "random")[seed % 3]
        # ThreadSanitizer runs blocks side by side, and has room for few threads: small pages, small batches.
        largest = {"largest_batch": 5} if mode == "tsan" else {}
        page_size = int(rng.choice([1, 2, 3, 16] if mode == "tsan" else PAGE_SIZES))
        play(variant(order, mode, small=seed % 2 == 0), seed, page_size, steps=12, **largest)
    two_launches = variant("ascending", mode, cluster=0, tiles=False)
    refused_by_many_blocks(two_launches)
    for order in ("ascending", "descending", "random") * 3:
        extended_by_many_blocks(variant(order, mode, small=False))
    large(two_launches, requests=1100 if mode == "tsan" else 1500, small=mode == "tsan")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
