"""No kernel change lands unproven: the last GPU run was of the sources as they are."""

from __future__ import annotations

from tests.digests import current, gpu_test_files, read_ledger


def test_gpu_run_is_of_these_sources():
    assert read_ledger()["digests"] == current(), (
        "kernels_cu/ or cupaged/backends/ have changed since the GPU layer last ran: "
        "run `pytest -m gpu` on a machine with a GPU and commit tests/gpu/ledger.json"
    )


def test_gpu_run_was_whole():
    ledger = read_ledger()
    passed = ledger["passed"]
    for file in gpu_test_files():
        assert passed.get(file, 0) > 0, f"{file} did not run"
    assert ledger["failed"] == 0
    assert sorted(ledger["sanitizers"]) == ["initcheck", "memcheck", "racecheck", "synccheck"]
    assert ledger["gpu"]
