"""Layer 6: the backends of layer 2 on a real GPU."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.backends import probe
from tests import test_digest
from tests.test_backends import PAGE_SIZES, large, play

pytestmark = pytest.mark.gpu


def _class(name):
    if name == "cupy":
        from cupaged.backends.cupy_raw import CupyBackend

        return CupyBackend
    from cupaged.backends.numba_cuda import NumbaCudaBackend

    return NumbaCudaBackend


@pytest.mark.parametrize("name", ["cupy", "numba-cuda"])
def test_same_as_reference(name):
    found = probe(name)
    assert found.works, found
    rng = np.random.default_rng(11)
    for _ in range(150 if name == "cupy" else 15):
        play(_class(name), int(rng.integers(2**40)), int(rng.choice(PAGE_SIZES)), steps=30)


@pytest.mark.parametrize("name", ["cupy", "numba-cuda"])
def test_larger_batches_and_pools(name):
    large(_class(name))


@pytest.mark.parametrize("name", ["cupy", "numba-cuda"])
def test_folds_into_a_digest(name):
    rng = np.random.default_rng(12)
    for _ in range(40 if name == "cupy" else 5):
        test_digest.play(_class(name), int(rng.integers(2**40)), int(rng.choice(PAGE_SIZES)), steps=10)
    test_digest.large(_class(name), 2500)
