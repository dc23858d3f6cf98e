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


def main(mode: str, first_seed: int, plays: int) -> None:
    for seed in range(first_seed, first_seed + plays):
        rng = np.random.default_rng(seed)
        order = ("ascending", "descending", "random")[seed % 3]
        # ThreadSanitizer runs blocks side by side, and has room for few threads: small pages, small batches.
        largest = {"largest_batch": 5} if mode == "tsan" else {}
        page_size = int(rng.choice([1, 2, 3, 16] if mode == "tsan" else PAGE_SIZES))
        play(variant(order, mode, small=seed % 2 == 0), seed, page_size, steps=12, **largest)
    refused_by_many_blocks(variant("ascending", mode, cluster=0))
    large(variant("ascending", mode, cluster=0), requests=1100 if mode == "tsan" else 1500, small=mode == "tsan")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
