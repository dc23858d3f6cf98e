"""Folds into a digest, on every backend, against a rendering that knows nothing of the backends' code."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import config

from cupaged.backends.gpu import GpuBackend
from cupaged.backends.numba_cpu import NumbaBackend
from cupaged.backends.reference import ReferenceBackend
from cupaged.interop import to_host
from cupaged.layout import NEVER_FOLDED, DigestCell, Where, Word
from tests.host_backend import DeviceArray, variant
from tests.host_cuda import exact_empty, run_python
from tests.operations import Runner, Script, options

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # the simulator's products wrap round

PAGE_SIZES = (1, 3, 16, 64)
CONTESTANTS = {
    "reference": ReferenceBackend,
    "numba": NumbaBackend,
    "cuda-ascending": variant("ascending"),
    "cuda-descending": variant("descending"),
    "cuda-random": variant("random"),
}
SIMULATED = bool(config.ENABLE_CUDASIM)  # tests/test_numba_cuda.py starts this file in such a process
if SIMULATED:
    from cupaged.backends.numba_cuda import NumbaCudaBackend
    from tests.test_numba_cuda import honest_simulator  # noqa: F401, a fixture that every test uses

    CONTESTANTS["numba-cuda"] = NumbaCudaBackend


def render(digest: int, values: list[int]) -> int:
    """The rule, in NumPy's unsigned integers, whose products wrap round."""
    with np.errstate(over="ignore"):
        place = np.arange(1, len(values) + 1, dtype=np.uint64)
        x = np.array(values, np.int64).astype(np.uint64) + place * np.uint64(0x9E3779B97F4A7C15)
        total = mix(x).sum(dtype=np.uint64)
        return int(mix(np.array([digest], np.int64).astype(np.uint64) + total).astype(np.int64)[0])


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def test_rule_by_numbers():
    """The second step of splitmix64 as published: its first output for seed 0 is that of place 0, value 0."""
    assert int(mix(np.array([0x9E3779B97F4A7C15], np.uint64))[0]) == 0xE220A8397B1DCDAF
    assert ReferenceBackend._mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


class Folded:
    """One backend on a script of random ops, with a fold after each."""

    def __init__(self, contestant, chosen):
        self.backend = contestant(**chosen)
        self.backend.native_library = "numpy" if contestant is ReferenceBackend else self.backend.library
        self.runner = Runner(self.backend)
        self.on_gpu = issubclass(contestant, GpuBackend)
        self.cells, self.raw = self.lend(np.array([0, NEVER_FOLDED], np.int64))

    def lend(self, array):
        """A copy where the backend's kernels find it, and as they take it for a result."""
        if hasattr(self.backend, "_upload") and not hasattr(self.backend, "lend"):
            copy = self.backend._upload(array)
            return copy, copy.__cuda_array_interface__["data"][0]
        copy = exact_empty(array.size, array.dtype)
        copy[:] = array
        return copy, copy.ctypes.data if self.on_gpu else copy

    def vector(self, values, dtype, step):
        spread = exact_empty(max(0, values.size - 1) * step + min(1, values.size), dtype)[::step]
        spread[:] = values
        lent = DeviceArray(spread) if self.on_gpu and hasattr(self.backend, "lend") else spread
        return self.backend.vector(lent, "entries")

    def fold(self, values, where, dtype=np.int64, step=1) -> list[int]:
        self.backend.fold(self.vector(values, dtype, step), where, self.raw)
        return to_host(self.cells).tolist()


def expected_of(snapshot, capacity, cells, entries, where):
    """Cells after a fold, by the pool's state."""
    ring, _, words = snapshot
    order = np.roll(ring, -int(words[Word.HEAD]))[: int(words[Word.FREE] + words[Word.STAGED])]
    pushed = min(int(words[Word.FREED]) - cells[DigestCell.FREED_SEEN], len(order))
    pages = order[:pushed] if where is Where.FRONT else order[len(order) - pushed :]
    words = [int(words[word]) for word in (Word.FREE, Word.STAGED, Word.SHARED)]
    return [render(cells[DigestCell.DIGEST], [*entries.tolist(), *pages.tolist(), *words]), words_freed(snapshot)]


def words_freed(snapshot) -> int:
    return int(snapshot[2][Word.FREED])


def play(contestant, seed, page_size, steps):
    rng = np.random.default_rng(seed)
    chosen = options(rng, page_size)
    folded, oracle = Folded(contestant, chosen), Folded(ReferenceBackend, chosen)
    script = Script(rng, oracle.backend)
    for side in (folded, oracle):
        side.runner.take_tables(script.tables)
    cells = [0, NEVER_FOLDED]
    for _ in range(steps):
        kind, arguments = script.draw()
        narrow = bool(rng.integers(2))
        out = oracle.runner.run(kind, arguments, 0, narrow, 1)
        folded.runner.run(kind, arguments, 0, narrow, 1)
        script.learn(kind, arguments, out)
        entries = np.zeros(0, np.int64) if out is None else out.astype(np.int64)
        if rng.random() < 0.2:
            entries = rng.integers(-(2**63), 2**63 - 1, int(rng.integers(0, 70)))
        where = Where(int(rng.integers(3)))
        fits = entries.size == 0 or abs(entries).max() < 2**31
        dtype = np.int32 if fits and rng.integers(2) else np.int64
        cells = expected_of(oracle.backend.snapshot(), chosen["num_pages"], cells, entries, where)
        before = to_host(folded.backend.words).copy()
        assert folded.fold(entries, where, dtype, int(rng.choice([1, 3]))) == cells, (seed, kind, arguments)
        np.testing.assert_array_equal(to_host(folded.backend.words), before)  # no op, no error, no mail


@pytest.mark.parametrize("name", CONTESTANTS)
@settings(max_examples=6 if SIMULATED else 25, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from(PAGE_SIZES))
def test_same_as_rendering(name, seed, page_size):
    play(CONTESTANTS[name], seed, page_size, steps=10)


def large(contestant, n):
    """More entries, and more freed pages, than a block has threads."""
    rng = np.random.default_rng(n)
    pages = 3 * n
    chosen = options(rng, 1, num_pages=pages, need_sort=False, index_dtype=np.dtype(np.int64))
    folded = Folded(contestant, chosen)
    order = folded.backend.snapshot()[0]
    assert order.tolist() == list(range(1, pages + 1))
    values = rng.integers(0, 2**31, n)
    first = folded.fold(values, Where.BACK)
    assert first == [render(0, [*values.tolist(), *order.tolist(), pages, 0, 0]), 0]
    again = folded.fold(values[:0], Where.BACK)  # nothing has come back since
    assert again == [render(first[0], [pages, 0, 0]), 0]


@pytest.mark.parametrize("name", CONTESTANTS)
def test_large(name):
    large(CONTESTANTS[name], 60 if SIMULATED else 2500)


@pytest.mark.parametrize("name", CONTESTANTS)
def test_sees_one_slot_and_the_order(name):
    chosen = options(np.random.default_rng(0), 4, num_pages=9)
    slots = np.array([4, 5, 6, 9, 33])
    seen = set()
    for values in (slots, slots[[1, 0, 2, 3, 4]], slots + (slots == 33), slots[:4], np.append(slots, 0)):
        folded = Folded(CONTESTANTS[name], chosen)
        folded.fold(values, Where.FRONT)
        seen.add(folded.fold(slots, Where.FRONT)[0])  # what agrees later does not hide it
    assert len(seen) == 5


def test_is_one_launch():
    folded = Folded(CONTESTANTS["cuda-ascending"], options(np.random.default_rng(0), 4))
    folded.backend.launches.clear()
    folded.fold(np.arange(5000), Where.STAGE)
    assert folded.backend.launches == ["fold_digest"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asan", "tsan"])
def test_kernel_is_clean(mode):
    done = run_python(mode, Path(__file__), mode)
    assert done.returncode == 0, done.stderr[-4000:]


def main(mode):
    """Child process: the kernel under a sanitizer."""
    for seed in range(3 if mode == "tsan" else 20):
        order = ("ascending", "descending", "random")[seed % 3]
        play(variant(order, mode), seed, int(np.random.default_rng(seed).choice(PAGE_SIZES[:2])), steps=6)
    large(variant("random", mode), 300 if mode == "tsan" else 1500)


if __name__ == "__main__":
    main(sys.argv[1])
