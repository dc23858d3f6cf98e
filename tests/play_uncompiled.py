"""Child process, with NUMBA_DISABLE_JIT=1: the host's kernels as Python, where an index out of range raises."""

import numpy as np

from cupaged.backends.numba_cpu import NumbaBackend
from tests import test_digest, test_handoff
from tests.test_backends import PAGE_SIZES, play

for seed in range(60):
    rng = np.random.default_rng(seed)
    play(NumbaBackend, seed, int(rng.choice(PAGE_SIZES)), steps=25)
for seed in range(20):
    test_handoff.play(NumbaBackend, seed, int(np.random.default_rng(seed).choice(PAGE_SIZES)))
    test_digest.play(NumbaBackend, seed, int(np.random.default_rng(seed).choice(PAGE_SIZES)), steps=10)
