"""Steps captured once in a CUDA graph and replayed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import cupaged

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

BATCH, STEPS, SIZE = 256, 2000, 64


def prompts() -> np.ndarray:
    """Prompt lengths of a real trace, where CUPAGED_TRACES has one; of the built-in workload otherwise."""
    from cupaged.replay import read_trace, synthetic

    folder = os.environ.get("CUPAGED_TRACES")
    trace = read_trace(Path(folder) / "AzureLLMInferenceTrace_conv.csv") if folder else synthetic()
    return np.asarray(trace.prompt[:BATCH], np.int64)


def filled(pool_tokens: int, **options):
    """A pool and a slot table in which 256 requests have their prompts."""
    pool = cupaged.PagedTokenToKVPoolAllocator(pool_tokens, SIZE, device=torch.device("cuda"), **options)
    lengths = torch.from_numpy(prompts()).cuda()
    table = torch.zeros(BATCH, int(lengths.max()) + STEPS + 1, dtype=torch.int32, device="cuda")
    rows = torch.arange(BATCH, device="cuda")
    pool.extend_step(table, rows, lengths * 0, lengths, int(lengths.sum()))
    pool.check()
    return pool, table, rows, lengths


def capture(work) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin()
        work()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def test_two_thousand_steps_from_one_capture():
    pool, table, rows, lengths = filled(SIZE * 30_000)
    state, first_table = pool.backup_state(), table.clone()
    eager = []
    seq = lengths.clone()
    for _ in range(STEPS):
        eager.append(pool.decode_step(table, rows, seq))
        seq += 1
    eager = torch.stack(eager).cpu()
    pool.check()
    eager_table = table.clone()

    pool.restore_state(state)
    table.copy_(first_table)
    seq = lengths.clone()
    out = torch.empty(BATCH, dtype=torch.int64, device="cuda")
    history = torch.zeros(STEPS, BATCH, dtype=torch.int64, device="cuda")
    step = torch.zeros(1, dtype=torch.int64, device="cuda")

    def one_step():
        pool.decode_step(table, rows, seq, out=out)
        history.index_copy_(0, step, out[None])
        seq.add_(1)
        step.add_(1)

    graph = capture(one_step)
    # a larger eager batch between capture and replay must leave no trace in what the graph uses
    other = torch.zeros(8000, dtype=torch.int64, device="cuda")
    slots = pool.alloc_extend(other, other + 1, other - 1, 8000)
    pool.free(slots)
    pool.refresh()
    pool.restore_state(state)
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(history.cpu(), eager)
    assert torch.equal(table, eager_table)
    pool.check()
    pool.check_integrity()
    assert pool.available_size() == pool.stats().free_pages * SIZE


def test_a_pool_that_runs_dry_in_mid_replay_refuses_and_recovers():
    pool = cupaged.PagedTokenToKVPoolAllocator(SIZE * 12, SIZE, device=torch.device("cuda"), refused_slot=-1)
    table = torch.zeros(8, 512, dtype=torch.int32, device="cuda")
    rows, seq = torch.arange(8, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    out = torch.empty(8, dtype=torch.int64, device="cuda")
    graph = capture(lambda: pool.decode_step(table, rows, seq, out=out))
    for step in range(SIZE):  # the first page of each: 8 of 12
        graph.replay()
        assert -1 not in out.tolist(), step
        seq += 1
    before = table.clone()
    graph.replay()  # 8 more needed, 4 there
    assert out.tolist() == [-1] * 8
    assert torch.equal(table, before)
    assert int(pool.ok) == 0
    with pytest.raises(cupaged.PoolShortError) as info:
        pool.check()
    assert info.value.kind == "decode_step"
    pool.check_integrity()
    pool.release(table, rows[4:], seq[4:])
    rows[4:] = -1  # those are gone: 4 pages needed, 8 there
    graph.replay()
    assert [slot // SIZE * SIZE == slot and slot > 0 for slot in out.tolist()] == [True] * 4 + [False] * 4
    pool.check()
    pool.check_integrity()
    assert pool.stats().owned_pages == 8


def test_padded_rows_take_nothing():
    pool = cupaged.PagedTokenToKVPoolAllocator(SIZE * 100, SIZE, device=torch.device("cuda"))
    table = torch.full((16, 256), -7, dtype=torch.int32, device="cuda")
    rows = torch.full((16,), -1, device="cuda")
    seq = torch.zeros(16, dtype=torch.int64, device="cuda")
    out = torch.empty(16, dtype=torch.int64, device="cuda")
    graph = capture(lambda: pool.decode_step(table, rows, seq, out=out))
    rows[:3] = torch.tensor([5, 9, 2], device="cuda")
    seq[3:] = 10**6  # whatever the padding says
    graph.replay()
    assert out.tolist() == [SIZE, 2 * SIZE, 3 * SIZE] + [0] * 13
    pool.check()
    assert pool.stats().owned_pages == 3
    assert table[5, 0] == SIZE
    assert (table[0] == -7).all()


def test_speculation_trim_and_release_in_one_graph():
    k = 4
    pool = cupaged.KVAllocator(16 * 1000, torch.device("cuda"), 8, 1024, 16)
    table = pool.req_to_page
    rows, seq = torch.arange(8, device="cuda"), torch.full((8,), 14, dtype=torch.int64, device="cuda")
    pool.extend_step(table, rows, seq * 0, seq, 8 * 14)
    kept = torch.zeros(8, dtype=torch.int64, device="cuda")
    out = torch.empty(8 * k, dtype=torch.int32, device="cuda")

    def step():
        pool.extend_step(table, rows, seq, seq + k, 8 * k, out=out)
        pool.trim(table, rows, seq + k, seq + kept)
        seq.add_(kept)

    graph = capture(step)
    rng = np.random.default_rng(0)
    model = np.full(8, 14)
    for _ in range(300):
        accepted = rng.integers(0, k + 1, 8)
        kept.copy_(torch.from_numpy(accepted))
        graph.replay()
        model += accepted
        if model.max() > 1000:
            break
    torch.cuda.synchronize()
    assert seq.tolist() == model.tolist()
    pool.check()
    pool.check_integrity()
    assert pool.stats().owned_pages == int((-(-model // 16)).sum())
    done = capture(lambda: pool.release(table, rows, seq))
    done.replay()
    pool.check()
    assert pool.available_size() == 999


def test_cupy_stream_capture():
    pool = cupaged.PagedTokenToKVPoolAllocator(SIZE * 100, SIZE, device="cuda")
    seq, last = cupy.ones(4, "i8"), cupy.full(4, -1)
    out = cupy.empty(4, "i8")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        pool.alloc_decode(seq, last, out=out)
        graph = stream.end_capture()
        for i in range(3):
            graph.launch(stream)
            stream.synchronize()
            assert out.tolist() == [(4 * i + j) * SIZE for j in range(1, 5)]
    pool.note_replay(12)
    assert pool.available_at_least() <= 88 * SIZE
    assert pool.available_size() == 88 * SIZE


def test_bounds_after_a_capture():
    pool = cupaged.PagedTokenToKVPoolAllocator(SIZE * 100, SIZE, device=torch.device("cuda"))
    seq = torch.ones(4, dtype=torch.int64, device="cuda")
    out = torch.empty(4, dtype=torch.int64, device="cuda")
    with pytest.raises(cupaged.CaptureError):
        capture_without_out(pool, seq)
    torch.cuda.synchronize()
    graph = capture(lambda: pool.alloc_decode(seq, seq, out=out))
    assert pool.available_at_least() == 0
    for _ in range(24):
        graph.replay()
    assert pool.alloc(SIZE * 5) is None
    assert pool.alloc(SIZE * 4) is not None
    pool.check()


def capture_without_out(pool, seq):
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin()
        try:
            pool.alloc_decode(seq, seq)
        finally:
            graph.capture_end()
