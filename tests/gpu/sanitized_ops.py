"""Child process for compute-sanitizer: every kernel, on small and on multi-block sizes."""

from typing import ClassVar

import numpy as np

from cupaged.backends.cupy_raw import CLUSTER_KERNELS, KERNELS, CupyBackend
from tests import test_digest
from tests.operations import options
from tests.test_backends import ELSEWHERE, large, play


class Recorded(CupyBackend):
    seen: ClassVar[set] = set()

    def _launch(self, kernel, blocks, threads):
        self.seen.add(kernel)
        super()._launch(kernel, blocks, threads)


rng = np.random.default_rng(5)
for page_size in (1, 3, 16, 64):
    for _ in range(4):
        play(Recorded, int(rng.integers(2**40)), page_size, steps=25)
large(Recorded)
clusters = Recorded(**options(rng, 16)).cluster


class InTwoLaunches(Recorded):
    """What older GPUs do with large batches, and all with the largest."""

    tiles_extend = 0

    def __init__(self, **chosen):
        super().__init__(**chosen)
        self.cluster = 0


class ManyBlocks(Recorded):
    small_decode = small_step = small_extend = 0
    tile_threads = 64, 64


large(InTwoLaunches)
for page_size in (3, 16):
    play(ManyBlocks, int(rng.integers(2**40)), page_size, steps=25)
for seed in range(4):
    test_digest.play(Recorded, seed, (1, 3, 16, 64)[seed], steps=10)
test_digest.large(Recorded, 2500)
backend = Recorded(**options(rng, 16))
backend.enter("")
_, address = backend.output("cupy", 500)
backend.reference_counts(backend.vector(np.arange(-2, 298), "page_ids"), address)
backend.leave()
missing = (
    set(KERNELS + CLUSTER_KERNELS if clusters else KERNELS)
    - Recorded.seen
    - ({"queue_entries", *ELSEWHERE} - {"fold_digest"})
)
assert not missing, missing
