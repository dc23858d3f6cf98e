"""Writes the ledger after a whole GPU run that passed."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import os
from pathlib import Path

import pytest

from cupaged.backends import probe
from tests.digests import LEDGER, current, gpu_test_files

passed: collections.Counter[str] = collections.Counter()
counts: collections.Counter[str] = collections.Counter()
sanitizers: list[str] = []


def pytest_collection_modifyitems(items):
    if not probe("cupy").works:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU and CuPy"))


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome == "failed":
        counts[report.outcome] += 1
    if report.when == "call" and report.passed and "tests/gpu/" in report.nodeid:
        passed[report.nodeid.split("::")[0].rpartition("/")[2]] += 1
        if "compute_sanitizer[" in report.nodeid:
            sanitizers.append(report.nodeid.partition("[")[2].rstrip("]"))


def pytest_sessionfinish(session, exitstatus):
    whole = all(passed[file] for file in gpu_test_files())
    if exitstatus != 0 or counts["failed"] or not whole:
        return
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    ledger = {
        "digests": current(),
        "gpu": properties["name"].decode(),
        "gpus": cupy.cuda.runtime.getDeviceCount(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "versions": {name: _version(name) for name in ("numpy", "numba", "torch", "cupy-cuda12x", "cupy-cuda13x")},
        "date": datetime.date.today().isoformat(),
        "passed": dict(sorted(passed.items())),
        "skipped": counts["skipped"],
        "failed": counts["failed"],
        "sanitizers": sorted(sanitizers),
    }
    where = Path(os.environ.get("CUPAGED_LEDGER", LEDGER))
    where.write_text(json.dumps(ledger, indent=2) + "\n")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
