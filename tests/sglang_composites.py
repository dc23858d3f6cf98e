"""SGLang's allocators that hold two of the paged one, and the little that they need of a KV cache."""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace

import torch

from tests.sglang_model import Scheduling
from tests.sglang_process import without_triton

MEM_CACHE = "sglang.srt.mem_cache"


class KVCache:
    """What both allocators ask of their KV cache: to keep a mapping from one kind of slot to the other."""

    swa_req_ring_size = None
    mapping = None

    def register_mapping(self, mapping):
        self.mapping = mapping

    @property
    def full_to_swa_index_mapping(self):
        return self.mapping

    def translate(self, slots):
        return self.mapping[slots.long()]

    translate_loc_from_full_to_swa = _translate_loc_to_hisparse_device = translate


def load(name: str):
    """SGLang's module of an allocator, without the KV caches that it imports: they need the whole of SGLang."""
    for module, classes in {
        "base_swa_memory_pool": ["BaseSWAKVPool"],
        "deepseek_v4_memory_pool": ["DeepSeekV4TokenToKVPool", "HiSparseC4DevicePool"],
        "hisparse_memory_pool": ["HiSparseDSATokenToKVPool"],
    }.items():
        stub = types.ModuleType(f"{MEM_CACHE}.{module}")
        vars(stub).update(dict.fromkeys(classes, KVCache))
        sys.modules.setdefault(stub.__name__, stub)
    return importlib.import_module(f"{MEM_CACHE}.allocator.{name}")


def build(module, kind: str, paged: type, *args):
    """An allocator of one of these kinds, on the paged class given."""
    module.PagedTokenToKVPoolAllocator = paged
    allocator = getattr(module, kind)(*args)
    if str(allocator.device) == "cpu":
        for part in KINDS[kind].parts:
            without_triton(getattr(allocator, part))
    return allocator


class Composite(Scheduling):
    """Random operations on an allocator that holds two."""

    parts: tuple[str, str]
    mapping: str
    with_counts = False
    frees = ("_finish",)

    def compare(self, what: str) -> None:
        reference, ours = self.pair
        assert reference.available_size() == ours.available_size(), what
        assert torch.equal(getattr(reference, self.mapping), getattr(ours, self.mapping)), what
        for part in self.parts:
            one, other = getattr(reference, part), getattr(ours, part)
            assert torch.equal(one.free_pages, other.free_pages), (what, part)
            assert one.available_size() == other.available_size(), (what, part)

    def check(self) -> None:
        for part in self.parts:
            getattr(self.pair[1], part)._core.check()

    def mapped(self, slots: torch.Tensor) -> torch.Tensor:
        return getattr(self.pair[0], self.mapping)[slots.to(self.device)] > 0


class SlidingWindow(Composite):
    parts = ("full_attn_allocator", "swa_attn_allocator")
    mapping = "full_to_swa_index_mapping"
    usual = ("extend",) * 3 + ("decode",) * 4 + ("evict", "evict", "finish", "group", "rare")
    rare = ("clear", "resize", "merge")

    def _evict(self):
        """Give back the sliding window's slots of the pages that a request has left behind."""
        if not self.requests:
            return None
        slots = self.requests[self.some(1)[0]]
        slots = slots[: max(0, len(slots) - 1) // self.page_size * self.page_size].to(self.device)
        if not len(slots) or not self.mapped(slots).all():
            return None
        if hasattr(self.pair[0], "free_swa_segment") and self.rng.integers(2):
            self.both("free_swa_segment", slots, start_pos=0)
            return "segment"
        self.both("free_swa", slots)
        return ""

    def _finish(self):
        if not self.requests:
            return None
        slots = self.requests.pop(self.some(1)[0]).to(self.device)
        if hasattr(self.pair[0], "free_segment") and len(slots) and self.mapped(slots).all():
            self.both("free_segment", slots, start_pos=0)
            return "segment"
        self.both("free", slots)
        return ""

    def _resize(self):
        if not hasattr(self.pair[0], "resize"):
            return None
        full, swa = self.rng.integers(4, 25, 2).tolist()
        sizes = {"full_max_total_num_tokens": full * self.page_size, "swa_max_total_num_tokens": swa * self.page_size}
        self.both("resize", SimpleNamespace(**sizes))
        self.requests = []
        return ""

    def _merge(self):
        for part in self.parts:
            for allocator in self.pair:
                getattr(allocator, part).merge_and_sort_free()
        return ""


class HierarchicalSparse(Composite):
    parts = ("logical_attn_allocator", "hisparse_attn_allocator")
    mapping = "full_to_hisparse_device_index_mapping"
    usual = (*("extend", "decode", "buffer") * 6, *("logical", "finish", "finish") * 2, "rare")
    rare = ("clear",)
    buffers: tuple[torch.Tensor, ...] = ()

    def _extend(self, tokens: int | None = None):
        # A request whose device slots are in a buffer, or that decodes, is not extended again.
        kept, self.requests = self.requests, [r for r in self.requests if not len(r) or self.mapped(r[-1:]).all()]
        others = [r for r in kept if not any(r is mine for mine in self.requests)]
        outcome = super()._extend(tokens)
        self.requests += others
        return outcome

    def _logical(self):
        new = int(self.rng.integers(1, 2 * self.page_size))
        (p, p_cpu), (s, s_cpu) = self.lengths([0]), self.lengths([new])
        slots = self.both("alloc_logical_only", p, p_cpu, s, s_cpu, self.tensor([-1]), new)
        if slots is None:
            return "None"
        self.requests.append(slots)
        return ""

    def _buffer(self):
        need = 2 * self.page_size
        if not self.requests or self.pair[0].hisparse_attn_allocator.available_size() < need:
            return None
        if self.buffers and self.rng.integers(2):
            *rest, buffer = self.buffers
            self.buffers = tuple(rest)
            self.both("free_hisparse_indices", buffer.to(self.device))
            return "freed"
        slots = self.requests[self.some(1)[0]].to(self.device)
        # Pages are given back whole, so what the buffer keeps of a request must be whole pages.
        if len(slots) > need or len(slots) == 0:
            return None
        self.buffers += (self.both("alloc_device_buffer", slots, need),)
        return ""

    def _finish(self):
        if not self.requests:
            return None
        self.both("free", self.requests.pop(self.some(1)[0]).to(self.device))
        return ""

    def _clear(self):
        self.buffers = ()
        return super()._clear()


KINDS = {"SWATokenToKVPoolAllocator": SlidingWindow, "HiSparseTokenToKVPoolAllocator": HierarchicalSparse}
