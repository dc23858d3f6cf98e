"""Ranks in step, with pools on GPUs: in a group of gloo's, on one GPU or more, and of NCCL's where there are two."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.test_distributed import ROOT, run_ranks, told

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

SCENARIOS = (
    "in_step",
    "in_step_sorted",
    "kv_in_step",
    "marks_do_not_wait",
    "one_slot",
    "freed_page",
    "replays",
    "dies",
)


def transport(name):
    few = torch.cuda.device_count() < 2
    return pytest.param(name, marks=pytest.mark.skipif(few and name == "nccl", reason="needs two GPUs"))


@pytest.fixture(scope="module", params=[transport("gloo"), transport("nccl")])
def outcome(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"ranks_{request.param}")
    return request.param, run_ranks(folder, 2, *SCENARIOS, device="cuda", over=request.param, limit=200)


def test_in_step(outcome):
    for name in ("in_step", "in_step_sorted"):
        assert told(outcome[1][name], "error", "ops", "after check", "closed") == [None, 63, 63, 63]
    assert told(outcome[1]["kv_in_step"], "error", "ops") == [None, 37]


def test_a_step_does_not_wait_at_a_mark(outcome):
    assert outcome[1]["marks_do_not_wait"][0]["seconds"] < 1.0


@pytest.mark.parametrize("name", ["one_slot", "freed_page"])
def test_drift(outcome, name):
    """At op 20 or 21, between the marks at 16 and 24; the loop's first call is op 2."""
    expected = [17, 24, 39]  # the answer comes two marks later
    assert told(outcome[1][name], "error", "first", "last", "at") == ["LockstepError", *expected]


def test_replays_fold(outcome):
    """One eager op, then replays of which the 6th drifts, at op 7; marks are 4, 8, 12, ..."""
    found = outcome[1]
    expected = [5, 8, 15]
    assert told(found["replays"], "error", "first", "last", "at") == ["LockstepError", *expected]
    assert told(found["replays"], "ops", "kept") == [1, 1]


def test_a_rank_that_dies(outcome):
    mine, dead = outcome[1]["dies"]
    assert dead is None
    assert mine["error"] == "LockstepError"
    assert "could not compare" in mine["message"]
    assert mine["took"] < 12  # timeout 6 s


def test_what_a_guard_costs():
    """The bar: at most 5 % of a decode step."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "bench/guard_cost.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found["engine_step_us"]) == {"1b", "8b"}
    for name, step in found["engine_step_us"].items():
        assert step["share"] <= 0.05, (name, found)
