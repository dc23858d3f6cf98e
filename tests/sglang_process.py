"""SGLang in a process of its own: ``python -m tests.sglang_process MODE FOLDER`` prints what it found, as JSON.

Its loader works once a process, and Triton decides at import whether to interpret.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import torch

from cupaged.integrations import sglang as adapter
from tests.sglang_model import Kernel, Scheduling

GROUP = "sglang.srt.plugins"
# A version of SGLang that must be installed, beside a cupaged with its entry point: nothing is skipped then.
REQUIRED = os.environ.get("CUPAGED_REQUIRE_SGLANG", "")


def prepare(folder: Path) -> None:
    """Give SGLang what its loader needs, our entry point above all, and nothing that it would only stumble over."""
    # Not called here: its import fails beside another build of torch, and SGLang patches one version of the other.
    sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("torchvision.io")
    except (ImportError, RuntimeError):
        sys.modules["torchvision"] = types.ModuleType("torchvision")
        sys.modules["torchvision.io"] = types.SimpleNamespace(decode_jpeg=None)
    if not any(point.name == "cupaged" for point in entry_points(group=GROUP)):
        assert not REQUIRED, "the installed cupaged has no entry point for SGLang"
        info = folder / "cupaged-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupaged\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\ncupaged = cupaged.integrations.sglang:register\n")
        sys.path.insert(0, str(folder))  # ahead of a cupaged installed without it


def load_plugins() -> None:
    """What SGLang does at the start of each of its processes."""
    importlib.import_module("sglang.srt.plugins").load_plugins()


def classes(kernels: bool = False) -> tuple[type, type]:
    """SGLang's own class and what stands in its place, with SGLang's kernels or, if need be, the model's."""
    home = importlib.import_module(adapter.HOME)
    replacement = home.PagedTokenToKVPoolAllocator
    original = next(cls for cls in replacement.__mro__ if cls.__module__ == adapter.HOME)
    if not kernels and not hasattr(home, "alloc_decode_naive"):
        # Before 0.5.22 there are only Triton kernels, which read past the free list of a short pool.
        home.alloc_extend_kernel, home.alloc_decode_kernel = Kernel(decode=False), Kernel(decode=True)
    return original, replacement


def make(cls: type, size: int, page_size: int, need_sort: bool = False, device: str = "cpu"):
    allocator = cls(size, page_size, dtype=torch.float16, device=device, kvcache=None, need_sort=need_sort)
    return without_triton(allocator) if device == "cpu" else allocator


def without_triton(allocator):
    """Where SGLang sees a GPU, it would run its kernels on tensors of the CPU, too."""
    allocator.use_triton_kernels = False
    return allocator


def imported_first() -> dict:
    """Load the plug-ins after everything was imported, as far as it exists in this version."""
    importlib.import_module("sglang.srt.mem_cache.allocator")
    interleaved = find_spec(adapter.INTERLEAVED) and importlib.import_module(adapter.INTERLEAVED)
    load_plugins()
    return found() | {"interleaved": bool(interleaved)}


def found() -> dict:
    original, replacement = classes()
    package = importlib.import_module("sglang.srt.mem_cache.allocator")
    allocator = make(replacement, 64, 4)
    ours = [m for name, m in sys.modules.items() if name.startswith("cupaged")]
    either = {id(original), id(replacement)}
    result = {
        "replaced": replacement is not original,
        "module": replacement.__module__,
        "exported": package.PagedTokenToKVPoolAllocator is replacement,
        "slots": allocator.alloc(8).tolist(),
        "runs_on_cupaged": type(getattr(allocator, "_core", None)).__module__,
        "held_by_cupaged": [m.__name__ for m in ours if either & {*map(id, vars(m).values())}],
    }
    if find_spec(adapter.INTERLEAVED):
        cls = importlib.import_module(adapter.INTERLEAVED).PageInterleavePoolAllocator
        result["interleaved_bases"] = [base is original for base in cls.__bases__]
    return result


def off() -> dict:
    load_plugins()
    return found()


def interpreter() -> dict:
    """SGLang's own Triton kernels on the CPU, with pools that never run short."""
    load_plugins()
    for page_size in (2, 16):
        reference, ours = (make(cls, 4096 * page_size, page_size, True) for cls in classes(kernels=True))
        reference.use_triton_kernels = True
        play = Scheduling(reference, ours, seed=page_size)
        play.rare = ["merge", "clear", "backup"]
        counts = play.run(60)
        assert counts["extend"] + counts["decode"] > 20, counts
        assert not any(key.endswith(":None") for key in counts), counts
    return {"interpreted": type(sys.modules[adapter.HOME].alloc_extend_kernel).__name__}


if __name__ == "__main__":
    prepare(Path(sys.argv[2]))
    print(json.dumps(globals()[sys.argv[1]]()))
