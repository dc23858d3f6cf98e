"""Child process for compute-sanitizer: every kernel, on small and on multi-block sizes."""

from typing import ClassVar

import numpy as np

from cupaged.backends.cupy_raw import KERNELS, CupyBackend
from tests.test_backends import HANDOFFS, large, play


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
missing = set(KERNELS) - Recorded.seen - {"queue_entries", *HANDOFFS}
assert not missing, missing
