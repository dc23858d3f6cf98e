"""The replay's engine: small traces worked by hand, its policies, and its reports."""

import hashlib
import json
import sys
import time
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from cupaged import backends
from cupaged.replay import ReplayResult, Trace, plot, replay, synthetic, table


def make_trace(*requests: tuple[float, int, int]) -> Trace:
    arrival, prompt, output = zip(*requests, strict=True)
    return Trace(
        "by hand",
        np.array(arrival, np.float64),
        np.array(prompt, np.int64),
        np.array(output, np.int64),
        np.arange(1, len(requests) + 1),
    )


def run(trace: Trace, page_size: int, pool_tokens: int, **options) -> ReplayResult:
    return replay(trace, page_size, pool_tokens, **{"backend": "numba", "verify": True, **options})


def digest_of(*slots: int) -> str:
    return hashlib.blake2b(np.array(slots, "<i8").tobytes(), digest_size=16).hexdigest()


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_two_requests_by_hand(backend):
    """A: 5 + 3 tokens, B: 2 + 1, pages of 4 slots, 4 pages.

    step  slots                     A's pages  B's  tokens  wasted
    0     A 4 5 6 7 8, B 12 13      1 2        3    7       5
    1     A 9, B 14, B ends         1 2        3    9       3
    2     A 10                      1 2             7       1
    3     A 11, A ends              1 2             8       0
    """
    result = run(make_trace((0, 5, 3), (0, 2, 1)), 4, 16, backend=backend)
    assert result.digest == digest_of(4, 5, 6, 7, 8, 12, 13, 9, 14, 10, 11)
    assert (result.steps, result.served, result.skipped, result.retractions) == (4, 2, 0, 0)
    assert (result.requests, result.tokens, result.slots, result.allocations) == (2, 11, 11, 4)
    assert (result.occupancy_mean, result.occupancy_peak) == (2.5 / 4, 3 / 4)
    assert (result.waste_mean, result.waste_peak, result.waste_share) == (2.25, 5, 2.25 / 10)
    assert np.allclose(result.timeline, [(0, 0.75), (0.025, 0.75), (0.05, 0.5), (0.075, 0.5)])
    assert (result.backend, result.device, result.page_size, result.pool_tokens) == (backend, "cpu", 4, 16)


def test_chunks_are_shared_in_order_by_hand():
    """Chunks of 4: A's 6 prompt tokens take one and a half, B's 3 the other half and the next.

    step  slots
    0     A 4 5 6 7
    1     A 8 9, B 12 13
    2     A decodes 10 and ends: pages 1 and 2 go to the front; B 14
    3     B decodes 15 and ends
    """
    result = run(make_trace((0, 6, 1), (0, 3, 1)), 4, 40, chunk=4)
    assert result.digest == digest_of(4, 5, 6, 7, 8, 9, 12, 13, 10, 14, 15)
    assert result.steps == 4


def test_freed_pages_are_reused_by_hand():
    """One page of 2 slots: the second request waits for it."""
    result = run(make_trace((0, 1, 1), (0, 1, 1)), 2, 2)
    assert result.digest == digest_of(2, 3, 2, 3)
    assert (result.steps, result.retractions) == (4, 0)


def test_retraction_by_hand():
    """A and B: 1 + 20 tokens each, 36 slots. At step 17 each has 18, so the pool is full.

    At step 18 B loses its 18 and waits; A ends at step 20. B begins at step 21 and ends at step 41.
    """
    result = run(make_trace((0, 1, 20), (0, 1, 20)), 1, 36)
    assert (result.retractions, result.served, result.steps) == (1, 2, 42)
    assert (result.tokens, result.slots) == (42, 21 + 18 + 21)
    assert result.occupancy_peak == 1


def test_a_prompt_that_is_not_all_there_is_retracted_first():
    """A and B: 1 + 40 tokens, C: 20 + 1, 95 slots, chunks of 15.

    At step 20 A and B have 21 each, C gets 15, and no room is left for all three to go on. At step 40 A and B need 82
    slots: C loses its 15, A and B end. C takes 15 at step 41, 5 at 42, and ends at 43.
    """
    result = run(make_trace((0, 1, 40), (0, 1, 40), (0.5, 20, 1)), 1, 95, chunk=15)
    assert (result.retractions, result.served, result.steps) == (1, 3, 44)
    assert result.slots == 82 + 15 + 21


def test_two_requests_that_only_fit_alone_do_not_fight():
    result = run(make_trace((0, 1, 99), (0, 1, 99)), 1, 100)
    assert (result.served, result.retractions) == (2, 1)


def test_max_running():
    trace = make_trace((0, 3, 2), (0, 3, 2), (0, 3, 2))
    assert run(trace, 4, 100).steps == 3
    assert run(trace, 4, 100, max_running=1).steps == 9


def test_idle_time_is_skipped():
    result = run(make_trace((0, 1, 1), (3600, 1, 1)), 4, 100)
    assert result.steps == 4
    assert result.timeline[-1][0] == pytest.approx(3600, abs=15)


@pytest.mark.parametrize(("arrival", "first"), [(0.35, 14), (0.7, 28), (1.1, 44), (1.1001, 45)])
def test_a_request_comes_in_at_the_first_step_not_before_it_arrives(arrival, first):
    result = run(make_trace((arrival, 1, 1)), 4, 100)
    assert result.timeline[0][0] == pytest.approx(first * 0.025)


def test_step_ms():
    assert run(make_trace((0, 1, 5), (0.1, 1, 1)), 4, 100, step_ms=50).steps == 6
    assert run(make_trace((0, 1, 5), (0.1, 1, 1)), 4, 100, step_ms=10).steps == 8


def test_requests_without_prompt_or_output():
    result = run(make_trace((0, 0, 3), (0, 5, 0), (0, 0, 0)), 4, 100)
    assert (result.served, result.tokens, result.slots, result.steps) == (3, 8, 8, 4)
    assert run(make_trace((0, 0, 0)), 4, 100).slots == 0


def test_a_request_longer_than_the_pool_is_named_and_skipped():
    trace = make_trace((0, 3, 2), (0, 90, 11), (0, 96, 4), *[(0.0, 5000, 1)] * 4)
    result = run(trace, 4, 100)
    assert (result.served, result.skipped) == (2, 5)
    assert result.notes == [
        "5 skipped, longer than the pool of 100 tokens: "
        "line 2 (101 tokens), line 4 (5,001 tokens), line 5 (5,001 tokens) and 2 more"
    ]


def test_nothing_fits():
    result = run(make_trace((0, 100, 1)), 4, 100)
    assert (result.served, result.skipped, result.steps, result.timeline) == (0, 1, 0, [])
    assert json.dumps(asdict(result))


def test_the_trace_speaks_in_the_notes():
    trace = make_trace((0, 1, 1))
    noted = Trace("x", trace.arrival, trace.prompt, trace.output, trace.lines, None, ("sorted",))
    assert run(noted, 4, 100).notes == ["sorted"]


small_requests = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=25
).map(sorted)


@settings(max_examples=100, deadline=None)
@given(
    requests=small_requests,
    page_size=st.integers(1, 9),
    pages=st.integers(1, 40),
    chunk=st.integers(1, 40),
    max_running=st.integers(1, 30),
)
def test_all_that_fit_are_served_and_nothing_leaks(requests, page_size, pages, chunk, max_running):
    trace = make_trace(*requests)
    result = run(trace, page_size, pages * page_size, chunk=chunk, max_running=max_running)
    fit = [prompt + output for _, prompt, output in requests if -(-(prompt + output) // page_size) <= pages]
    assert (result.served, result.skipped) == (len(fit), len(requests) - len(fit))
    assert result.tokens == sum(fit)
    assert result.slots >= sum(fit)
    assert (result.slots == sum(fit)) >= (result.retractions == 0)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_same_digest_on_host_backends(page_size):
    trace = synthetic(150, per_second=40)
    numba, reference = (run(trace, page_size, 12_000, backend=name) for name in ("numba", "reference"))
    assert numba.retractions > 0
    assert numba.digest == reference.digest
    assert numba.slots == reference.slots


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cupy", "numba-cuda"])
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_same_digest_on_a_gpu(backend, page_size):
    if not backends.probe(backend).works:
        pytest.skip(backends.probe(backend).reason)
    trace = synthetic(150, per_second=40)
    assert run(trace, page_size, 12_000, backend=backend).digest == run(trace, page_size, 12_000).digest


def test_verification_changes_nothing():
    trace = synthetic(200, per_second=40)
    proved, plain = (run(trace, 16, 12_000, verify=verify) for verify in (True, False))
    assert (proved.verified, plain.verified) == (True, False)
    assert proved.digest == plain.digest


def test_page_sizes_compare():
    """Larger pages waste more, and retractions do not come from the page size as such."""
    results = [run(synthetic(400, per_second=40), p, 50_000) for p in (1, 16, 64, 256)]
    assert results[0].waste_mean == results[0].waste_peak == results[0].waste_share == 0
    assert all(a.waste_mean < b.waste_mean for a, b in pairwise(results))
    assert max(r.retractions for r in results) < 60


def test_progress_reaches_the_end():
    told = []
    run(synthetic(50), 16, 50_000, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (50, 50)
    assert len(told) > 5


def test_the_built_in_workload_takes_seconds():
    replay(synthetic(10), 64, 50_000, backend="numba")
    start = time.process_time()
    result = replay(synthetic(), 64, 100_000, backend="numba")
    assert time.process_time() - start < 10
    assert result.served == len(synthetic())


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 0},
        {"page_size": 1.5},
        {"pool_tokens": 0},
        {"pool_tokens": 15},
        {"chunk": 0},
        {"max_running": 0},
        {"step_ms": 0},
        {"step_ms": -1},
        {"step_ms": float("nan")},
        {"step_ms": float("inf")},
        {"step_ms": 1e-300},
        {"backend": "abacus"},
    ],
)
def test_arguments_are_refused_by_name(wrong):
    arguments = {"page_size": 16, "pool_tokens": 1000, "backend": "numba", **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replay(make_trace((0, 1, 1), (1, 1, 1)), **arguments)


def results_of_two_pools() -> list[ReplayResult]:
    trace = synthetic(60)
    return [run(trace, page, pool) for pool in (30_000, 600_000) for page in (1, 64)]


def test_result_is_json():
    result = results_of_two_pools()[0]
    assert json.loads(json.dumps(asdict(result)))["digest"] == result.digest


@pytest.mark.parametrize("count", [2, 4])
def test_table_fits_80_columns(count):
    console = Console(width=80, record=True)
    console.print(table(results_of_two_pools()[:count]))
    text = console.export_text()
    assert "…" not in text
    assert "synthetic on numba: 60 requests" in text
    assert text.count("30,000") == (1 if count == 2 else 2)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot(results_of_two_pools(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'^plots need matplotlib: pip install "cupaged\[plot\]"$'):
        plot([], tmp_path / "plot.png")
