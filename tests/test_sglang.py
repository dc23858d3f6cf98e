"""SGLang's allocator on cupaged, operation by operation against the SGLang that is installed, by SGLang's own loader.

`test_sglang_contract.py` holds what needs no SGLang. ``CUPAGED_REQUIRE_SGLANG=0.5.23`` fails where that version is
not installed; without the variable, and without SGLang, nothing runs here.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

if not os.environ.get("CUPAGED_REQUIRE_SGLANG") and (find_spec("sglang") is None or find_spec("torch") is None):
    pytest.skip("needs sglang and torch", allow_module_level=True)

import torch

from cupaged import backends
from cupaged.integrations import sglang as adapter
from tests import sglang_composites, sglang_process
from tests.sglang_model import Scheduling, long
from tests.sglang_process import GROUP, REQUIRED, make

ROOT = Path(__file__).parent.parent
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not backends.probe("cupy").works or not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    """SGLang's own class, and what its loader has put in its place before anything imported the allocator."""
    sglang_process.prepare(tmp_path_factory.mktemp("metadata"))
    with mock.patch.dict(os.environ, {adapter.VARIABLE: "1"}):
        sglang_process.load_plugins()
    original, replacement = sglang_process.classes()
    assert original is not replacement
    assert replacement.__module__ == adapter.__name__
    assert original.alloc_extend is not replacement.alloc_extend
    return original, replacement


def test_the_required_version_is_installed():
    if REQUIRED:
        assert version("sglang") == REQUIRED
        points = [point for point in entry_points(group=GROUP) if point.name == "cupaged"]
        assert [point.value for point in points] == ["cupaged.integrations.sglang:register"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [2, 8, 32, 64, 256])
def test_equals_the_installed_sglang(classes, page_size, need_sort, device):
    """2,000 operations each, 20,000 in all on a device."""
    reference, ours = (make(cls, 24 * page_size + 1, page_size, need_sort, device) for cls in classes)
    assert type(reference) is not type(ours)
    counts = Scheduling(reference, ours, seed=page_size, device=device).run(2000)
    for kind in ("extend", "extend:None", "decode", "decode:None", "alloc", "alloc:None", "free", "group", "clear"):
        assert counts[kind] > 5, counts
    if hasattr(reference, "free_segment"):
        assert counts["finish"] > 50
        assert counts["finish:segments"] > 50


def test_the_debug_variable_makes_both_check(classes, monkeypatch):
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    for cls in classes:
        allocator = make(cls, 64, 4)
        slots = allocator.alloc(16)
        with pytest.raises(AssertionError):
            allocator.alloc(3)
        with pytest.raises(AssertionError):
            allocator.alloc_decode(long(4), long(4), long(9))
        allocator.free(slots[:8])
        with pytest.raises(AssertionError):
            allocator.free(slots[:8])


def test_copies_to_the_host_are_the_kv_caches(classes):
    for cls in classes:
        kvcache = mock.Mock()
        allocator = cls(64, 4, torch.float16, "cpu", kvcache, False)
        assert allocator.get_kvcache() is kvcache
        slots = allocator.alloc(4)
        assert allocator.get_cpu_copy(slots) is kvcache.get_cpu_copy.return_value
        assert kvcache.get_cpu_copy.call_args.args == (slots,)
        allocator.load_cpu_copy("copy", slots)
        assert kvcache.load_cpu_copy.call_args.args == ("copy", slots)


@torch.inference_mode()
def test_inference_mode_as_in_sglangs_scheduler(classes):
    reference, ours = (make(cls, 24 * 8, 8) for cls in classes)
    Scheduling(reference, ours, seed=0).run(100)


def in_a_process(mode: str, folder: Path, **variables: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != adapter.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang_process", mode, str(folder)],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_plug_in_may_come_after_the_allocator(tmp_path):
    found = in_a_process("imported_first", tmp_path, **{adapter.VARIABLE: "1"})
    assert found["replaced"]
    assert found["exported"]
    assert found["module"] == "cupaged.integrations.sglang"
    assert found["runs_on_cupaged"] == "cupaged.paged"
    assert found["slots"] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert found["held_by_cupaged"] == []
    assert found.get("interleaved_bases", [True]) == [True]


def test_the_plug_in_may_come_before_the_allocator(classes):
    found = sglang_process.found()
    assert found["exported"]
    assert found["runs_on_cupaged"] == "cupaged.paged"
    assert found["held_by_cupaged"] == []
    assert found.get("interleaved_bases", [True]) == [True]


def test_without_the_variable_sglang_is_as_it_was(tmp_path):
    found = in_a_process("off", tmp_path)
    assert not found["replaced"]
    assert found["module"] == adapter.HOME
    assert found["runs_on_cupaged"] == "builtins"
    assert found["slots"] == [4, 5, 6, 7, 8, 9, 10, 11]


def test_the_documentations_example_runs(tmp_path):
    pages = [path.read_text() for path in (ROOT / "docs").glob("integrating*.md")]
    blocks = [
        block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.S) if "sglang" in block
    ]
    assert len(blocks) == 1
    setup = f"from pathlib import Path; from tests.sglang_process import prepare; prepare(Path({str(tmp_path)!r}))\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + blocks[0]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.splitlines()[-1:] == ["cupaged.integrations.sglang"], done.stderr


def test_equals_sglangs_own_kernels(tmp_path):
    """In Triton's interpreter, since the CPU's path of SGLang is not its kernels."""
    found = in_a_process("interpreter", tmp_path, TRITON_INTERPRET="1", **{adapter.VARIABLE: "1"})
    assert found["interpreted"] == "InterpretedFunction"


def composites(classes: tuple[type, type], file: str, kind: str, *args):
    module = sglang_composites.load(file)
    reference, ours = (
        sglang_composites.build(module, kind, cls, *(x() if x is sglang_composites.KVCache else x for x in args))
        for cls in classes
    )
    play = sglang_composites.KINDS[kind]
    for part in play.parts:
        assert type(getattr(ours, part)) is classes[1]
        assert type(getattr(reference, part)) is classes[0]
    return play, reference, ours


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("need_sort", [False, True])
def test_the_sliding_window_allocator_runs_on_two_of_ours(classes, need_sort, device):
    kind, sizes = "SWATokenToKVPoolAllocator", (24 * 4, 16 * 4, 4)
    args = *sizes, torch.float16, device, sglang_composites.KVCache, need_sort
    play, reference, ours = composites(classes, "swa", kind, *args)
    counts = play(reference, ours, seed=need_sort, device=device).run(600)
    for kind in ("extend", "extend:None", "decode", "group"):
        assert counts[kind] > 5, counts
    assert counts.get("evict", 0) + counts.get("evict:segment", 0) > 5, counts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("need_sort", [False, True])
def test_the_hierarchical_sparse_allocator_runs_on_two_of_ours(classes, need_sort, device):
    if find_spec("sglang.srt.mem_cache.allocator.hisparse") is None:
        pytest.skip("this SGLang keeps it in a file that needs the whole of SGLang")
    args = 16 * 4, 4, torch.float16, torch.device(device), sglang_composites.KVCache, need_sort
    play, reference, ours = composites(classes, "hisparse", "HiSparseTokenToKVPoolAllocator", *args)
    counts = play(reference, ours, seed=need_sort, device=device).run(600)
    for kind in ("extend", "extend:None", "decode", "logical", "buffer", "buffer:freed", "finish"):
        assert counts[kind] > 5, counts


def test_the_page_interleaving_allocator_stays_sglangs(classes):
    """Two ranks of 8 pages: a chain's pages alternate between their queues, 2, 4, .. and 3, 5, .."""
    if find_spec(adapter.INTERLEAVED) is None:
        pytest.skip("this SGLang has none")
    cls = importlib.import_module(adapter.INTERLEAVED).PageInterleavePoolAllocator
    assert classes[0] in cls.__mro__
    assert classes[1] not in cls.__mro__
    allocator = cls(32, 4, 2, dtype=torch.float16, device="cpu", kvcache=None, need_sort=False)
    slots = allocator.alloc_extend(long(0), long(0), long(10), long(10), long(-1), 10, rotation_bases=[None])
    assert slots.tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
    assert allocator.class_free_page_counts() == [6, 7]
    allocator.free_segments([(slots, 0)])
    assert allocator.class_free_page_counts() == [8, 8]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_nothing_waits_behind_a_running_forward_pass(classes, device):
    """Page size 64: requests of 100 and 64 tokens take pages 1, 2 and 3, and one token more each takes page 4."""
    ours = make(classes[1], 64 * 256, 64, device=device)
    before, now, after = long(0, 0), long(100, 64), long(101, 65)
    on_device = [x.to(device) for x in (before, now, after, long(-1, -1))]

    def step() -> tuple[list[int], torch.Tensor, torch.Tensor]:
        slots = ours.alloc_extend(on_device[0], before, on_device[1], now, on_device[3], 164)
        sizes = [ours.available_size()]
        new = ours.alloc_decode(on_device[2], after, torch.stack([slots[99], slots[163]]))
        sizes.append(ours.available_size())
        ours.free_segments([(slots[:64], 0), (slots[64:100], 64)])
        sizes.append(ours.available_size())
        ours.free_group_begin()
        ours.free_page_ids(new[1:] // 64)
        ours.free_segment(slots[100:], start_pos=0)
        ours.free_group_end()
        sizes.append(ours.available_size())
        ours.free(ours.alloc(640))
        return sizes, slots, new

    step()  # loads what torch loads at its first call
    ours.clear()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    done = torch.cuda.Event()
    done.record()
    sizes, slots, new = step()
    assert not done.query(), "a call waited"
    assert sizes == [64 * 253, 64 * 252, 64 * 254, 64 * 256]
    assert ours.available_size() == 64 * 256  # known when the plain free has run
    assert done.query()
    assert slots.tolist() == [*range(64, 164), *range(192, 256)]
    assert new.tolist() == [164, 256]
