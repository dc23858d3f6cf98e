"""Child process: random operations on the host-run CUDA kernels, under a sanitizer: MODE FIRST_SEED PLAYS."""

import sys

import numpy as np

from tests.host_backend import variant
from tests.test_backends import PAGE_SIZES, large, play


def main(mode: str, first_seed: int, plays: int) -> None:
    for seed in range(first_seed, first_seed + plays):
        rng = np.random.default_rng(seed)
        order = ("ascending", "descending", "random")[seed % 3]
        # ThreadSanitizer runs blocks side by side, and has room for few threads: small pages, small batches.
        largest = {"largest_batch": 5} if mode == "tsan" else {}
        page_size = int(rng.choice([1, 2, 3, 16] if mode == "tsan" else PAGE_SIZES))
        play(variant(order, mode, small=seed % 2 == 0), seed, page_size, steps=12, **largest)
    large(variant("ascending", mode, cluster=0), requests=1100 if mode == "tsan" else 1500, small=mode == "tsan")


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
