"""SGLang on cupaged: a plug-in that SGLang finds by itself, and that does nothing unless ``CUPAGED_SGLANG=1``.

SGLang loads the entry points of the group ``sglang.srt.plugins`` in each of its processes. `register` asks its
`HookRegistry` to put a subclass in the place of the `PagedTokenToKVPoolAllocator` of
``sglang/srt/mem_cache/allocator/paged.py``. The contract is that file's, in SGLang 0.5.13 to 0.5.23: what touches
free pages is overridden, and what is inherited finds the attributes that it expects.

SGLang's loader rewrites every global of every module that holds the original class. Here none does.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import numpy as np

from cupaged.errors import BackendError, DeviceError, IntegrityError

__all__ = ["TARGET", "register"]

log = logging.getLogger("cupaged")

VARIABLE = "CUPAGED_SGLANG"
HOME = "sglang.srt.mem_cache.allocator.paged"
TARGET = f"{HOME}.PagedTokenToKVPoolAllocator"
INTERLEAVED = "sglang.srt.mem_cache.allocator.page_interleave"

# What SGLang passes, in its order. Parameters that follow must have defaults.
_SIGNATURES = {
    "__init__": "self size page_size dtype device kvcache need_sort",
    "available_size": "self",
    "merge_and_sort_free": "self",
    "clear": "self",
    "alloc": "self need_size",
    "alloc_extend": "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
    "alloc_decode": "self seq_lens seq_lens_cpu last_loc",
    "free": "self free_index",
    "free_group_begin": "self",
    "free_group_end": "self",
}
_SIGNATURES_IF_THERE = {
    "free_segment": "self free_index start_pos",
    "free_page_ids": "self page_ids",
    "_release_page_ids": "self page_ids",
    "get_all_free_pages": "self",
    "backup_state": "self",
    "restore_state": "self state",
}
# All that SGLang's classes keep. One that keeps more has rules that are not known here.
_ATTRIBUTES = {
    *("size", "page_size", "num_pages", "dtype", "device", "_kvcache", "need_sort"),
    *("debug_mode", "use_triton_kernels"),
    *("free_pages", "release_pages", "staged_pages", "num_staged_pages"),
    *("free_group", "is_not_in_free_group", "free_page_ids_group", "free_page_reps_group"),
}


def register() -> None:
    """Entry point: replace SGLang's paged allocator if ``CUPAGED_SGLANG=1``, else do nothing.

    Never raises. Where SGLang's class is not the one that is served here, one line of the log says so, and SGLang
    keeps it.
    """
    wish = os.environ.get(VARIABLE, "")
    if wish != "1":
        if wish not in ("", "0"):
            log.warning("SGLang keeps its own allocator: %s must be 1 or 0, not %r", VARIABLE, wish)
        return
    try:
        original = importlib.import_module(HOME).PagedTokenToKVPoolAllocator
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        if importlib.import_module("sglang.srt.utils").is_npu():
            log.warning("SGLang keeps its own allocator: on an NPU it uses classes that are built on it")
            return
        if find_spec(INTERLEAVED) is not None:
            # A subclass with queues of its own. Imported before the original is replaced, it stays what it is.
            importlib.import_module(INTERLEAVED)
        if issubclass(original, _OnCupaged):
            return
        problem = _difference(original)
        if not problem:
            hooks.HookRegistry.register(TARGET, _replacement(original), hooks.HookType.REPLACE)
    except Exception as error:
        problem = f"cannot be replaced: {type(error).__name__}: {' '.join(str(error).split())}"
    if problem:
        log.warning(
            "SGLang keeps its own allocator: %s of SGLang %s %s; cupaged serves 0.5.13 to 0.5.23",
            TARGET,
            _sglang_version(),
            problem,
        )


def _sglang_version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"


def _difference(original: type) -> str:
    """What of SGLang's class would not be served, in words; empty if all of it is."""
    for name, expected in (_SIGNATURES | _SIGNATURES_IF_THERE).items():
        method = getattr(original, name, None)
        if method is None:
            if name in _SIGNATURES:
                return f"has no {name}()"
            continue
        names = expected.split()
        parameters = list(inspect.signature(method).parameters.values())
        found = [p.name for p in parameters]
        if found[: len(names)] != names or any(p.default is p.empty for p in parameters[len(names) :]):
            return f"has {name}({', '.join(found)}), not {name}({', '.join(names)})"
    unknown = sorted(_attributes_assigned(original) - _ATTRIBUTES)
    return f"keeps what is unknown here: {', '.join(unknown)}" if unknown else ""


def _attributes_assigned(cls: type) -> set[str]:
    """Names that the methods of a class, and of its bases in the same package, assign to."""
    package = cls.__module__.partition(".")[0] + "."
    return {
        instruction.argval
        for base in cls.__mro__
        if base.__module__.startswith(package)
        for function in vars(base).values()
        if isinstance(function, FunctionType)
        for instruction in dis.get_instructions(function)
        if instruction.opname == "STORE_ATTR"
    }


def _replacement(original: Any) -> type:
    staged = _Staged if hasattr(original, "free_page_ids") else _Released
    body = {"__module__": __name__, "__doc__": _OnCupaged.__doc__, "_original": original}
    return type(original)(original.__name__, (staged, _OnCupaged, original), body)


def _cannot_run(device: Any) -> str:
    """Why cupaged has no backend for SGLang's device; empty if it has one."""
    from cupaged import backends
    from cupaged.interop import parse_device

    try:
        backends.pick("auto", parse_device(device)[0])
    except (BackendError, ValueError) as error:
        return str(error)
    return ""


_SGLangs: Any = object  # stands for SGLang's class, which is the base that follows


class _OnCupaged(_SGLangs):
    """SGLang's `PagedTokenToKVPoolAllocator` on cupaged: which slot each new token's K and V go to.

    The contract, order of arguments included, is SGLang's. Free pages live in a
    `cupaged.PagedTokenToKVPoolAllocator` with ``strict=False, errors="defer"``: ranks that run the same step must not
    leave it at different calls, so what only the device can see is logged and never raised, unless
    ``SGLANG_DEBUG_MEMORY_POOL`` asks for checks, which raise `AssertionError` as SGLang's do.

    Parameters
    ----------
    size : int
        Slots, without those of page 0.
    page_size : int
        Slots in a page.
    dtype : torch.dtype
        Of the KV cache; kept.
    device : str or torch.device
        The CPU or a CUDA device. For another, and where no backend of cupaged works, SGLang's own class is made
        instead, and the log says why.
    kvcache : KVCache
        Kept, for `get_cpu_copy` and `load_cpu_copy`.
    need_sort : bool
        Freed pages wait aside until an allocation finds too few in front, and are merged ascending then.
    """

    _core: Any = None
    _original: Any = None
    page_size: int
    num_pages: int
    need_sort: bool
    debug_mode: bool
    device: Any
    free_group: Any

    def __new__(cls, size: int, page_size: int, dtype: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        why = _cannot_run(device)
        if not why:
            return super().__new__(cls)
        if "_original" not in vars(cls):
            raise BackendError(f"{cls.__qualname__} is built on cupaged, but {why}")
        log.warning("SGLang keeps its own allocator for %s slots on %s: %s", size, device, why)
        return cls._original(size, page_size, dtype, device, *args, **kwargs)

    def clear(self) -> None:
        """Free every page of `num_pages`, which may have changed since, and drop what a group has queued."""
        core, self._core = self._core, None  # what SGLang assigns here says nothing new about free pages
        super().clear()
        pages = max(1, self.num_pages)
        if core is None or pages > core.pool.capacity:
            if core is not None:
                core.refresh()  # what is still queued writes to memory that goes with it
            core = self._make_core(pages)
        else:
            core.resize(pages * self.page_size)
        if self.num_pages == 0:
            core.alloc(self.page_size)  # cupaged has no pool without a page; this one is nobody's
        self._core = core

    def _make_core(self, pages: int) -> Any:
        import torch

        from cupaged import PagedTokenToKVPoolAllocator, __version__

        device = torch.device(self.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        core = PagedTokenToKVPoolAllocator(
            pages * self.page_size,
            self.page_size,
            device=device,
            need_sort=self.need_sort,
            errors="defer",
            strict=False,
        )
        log.info(
            "cupaged %s hands out SGLang's KV slots: %d pages of %d on %s, backend %s",
            __version__,
            self.num_pages,
            self.page_size,
            device,
            core.backend.name,
        )
        return core

    # ---- allocation ------------------------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> Any:
        """Whole pages: int64 slots of shape ``(need_size // page_size * page_size,)``, or None."""
        if self.debug_mode:
            assert need_size % self.page_size == 0, f"need_size is {need_size}, no whole pages of {self.page_size}"
        return self._checked(self._core.alloc(need_size // self.page_size * self.page_size))

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Any:
        """Slots for the new tokens of a batch, request after request.

        Parameters
        ----------
        prefix_lens, seq_lens : torch.Tensor of int32 or int64, shape (batch,), on the device
            Tokens of each request before this batch and after it. They decide.
        prefix_lens_cpu, seq_lens_cpu : torch.Tensor of int32 or int64, shape (batch,), on the host
            The same, so that the host knows what is left without a wait.
        last_loc : torch.Tensor of int32 or int64, shape (batch,), on the device
            Slot of each request's last cached token; -1 if it has none.
        extend_num_tokens : int
            Sum of ``seq_lens - prefix_lens``.
        num_new_pages : int, optional
            SGLang's count of the new pages. The lengths say the same.

        Returns
        -------
        torch.Tensor or None
            int64 of shape ``(extend_num_tokens,)``, on the device; None if the pool is short, with no page taken.
        """
        return self._checked(
            self._core.alloc_extend(
                prefix_lens,
                seq_lens,
                last_loc,
                extend_num_tokens,
                prefix_lens_cpu=prefix_lens_cpu,
                seq_lens_cpu=seq_lens_cpu,
            )
        )

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        """A slot for the last of the `seq_lens` tokens of each request, ``(batch,)``; else as `alloc_extend`."""
        return self._checked(self._core.alloc_decode(seq_lens, last_loc, seq_lens_cpu=seq_lens_cpu))

    # ---- free ------------------------------------------------------------------------------------------------------

    def free(self, free_index: Any) -> None:
        """Give back every page that these slots touch; nothing is waited for."""
        if free_index.numel() == 0:
            return
        if self._is_group_open():
            self.free_group.append(free_index.clone())
        else:
            self._core.free(free_index if free_index.dim() == 1 else free_index.reshape(-1))
        self._checked(None)

    def free_segment(self, free_index: Any, *, start_pos: int) -> None:
        """Give back the slots of one request's tokens from position `start_pos` on."""
        if start_pos % self.page_size or self.debug_mode or self._is_group_open():
            super().free_segment(free_index, start_pos=start_pos)
        else:
            self._core.free_segment(free_index, start_pos=start_pos)

    def _is_group_open(self) -> bool:
        # Until 0.5.18 a flag said it, and the list was always there.
        return not getattr(self, "is_not_in_free_group", self.free_group is None)

    def _release_page_ids(self, *page_ids: Any) -> None:
        import torch

        self._core.free_page_ids(page_ids[0] if len(page_ids) == 1 else torch.cat(page_ids))
        self._checked(None)

    # ---- what is free ----------------------------------------------------------------------------------------------

    def available_size(self) -> int:
        """Free slots, exactly; in another thread than the scheduler's the last known figure, without a wait."""
        return self._core.available_size()

    def merge_and_sort_free(self) -> None:
        """Merge the pages that wait aside with those in front, ascending, if any wait."""
        self._core.merge_and_sort_free()

    @property
    def free_pages(self) -> Any:
        """Page ids in the order of allocation, int64; waits. None in another thread, which could not wait safely."""
        order = self._order()
        return None if order is None else self._tensor(order[0])

    @free_pages.setter
    def free_pages(self, pages: Any) -> None:
        self._assign(0, pages)

    def get_all_free_pages(self) -> Any:
        """Free page ids, and behind them those that wait aside; else as `free_pages`."""
        order = self._order()
        return None if order is None else self._tensor(np.concatenate(order))

    def _order(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self._core is None or self._core.pool.elsewhere():
            return None
        return self._core.pool.free_order()

    def _tensor(self, pages: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(pages.astype(np.int64)).to(self.device)

    def _assign(self, which: int, pages: Any) -> None:
        """Make `pages` the free ones (0) or those that wait aside (1). They leave the other list; waits."""
        from cupaged.interop import to_host

        if self._core is None or pages is None:
            return
        pool = self._core.pool
        lists = list(pool.free_order())
        lists[which] = to_host(pages)
        lists[1 - which] = lists[1 - which][~np.isin(lists[1 - which], lists[which])]
        pool.enter("")
        try:
            pool.restore(pool.state_with(*lists), pool.num_pages)
        finally:
            pool.leave()

    # ---- SGLANG_DEBUG_MEMORY_POOL ----------------------------------------------------------------------------------

    def _checked(self, result: Any) -> Any:
        if self.debug_mode:
            try:
                self._core.check()
                self._core.check_integrity()
            except (DeviceError, IntegrityError) as error:
                raise AssertionError(str(error)) from error
        return result

    def _debug_check_no_duplicate_pages(self) -> None:
        self._checked(None)


class _Staged(_SGLangs):
    """Attributes and methods of SGLang 0.5.20 and later: a list of what waits aside, frees by page id."""

    def free_page_ids(self, page_ids: Any) -> None:
        """Give back pages, none of them twice."""
        if page_ids.numel() == 0:
            return
        if self._is_group_open():
            self.free_page_ids_group.append(page_ids.clone())
        else:
            self._release_page_ids(page_ids)

    @property
    def staged_pages(self) -> Any:
        """Page ids that wait aside, in the order in which they came, as a list of at most one tensor."""
        order = self._order()
        return None if order is None else [self._tensor(order[1])] if order[1].size else []

    @staged_pages.setter
    def staged_pages(self, pages: Any) -> None:
        self._assign(1, np.concatenate([np.zeros(0, np.int64), *(p.cpu().numpy() for p in pages)]))

    @property
    def num_staged_pages(self) -> int:
        """How many pages wait aside."""
        order = self._order()
        return 0 if order is None else order[1].size

    @num_staged_pages.setter
    def num_staged_pages(self, number: int) -> None:
        """Nothing to do: `staged_pages` says it."""


class _Released(_SGLangs):
    """Attributes and methods of SGLang before 0.5.20: a tensor of what waits aside, copies of the state."""

    @property
    def release_pages(self) -> Any:
        """Page ids that wait aside, int64."""
        order = self._order()
        return None if order is None else self._tensor(order[1])

    @release_pages.setter
    def release_pages(self, pages: Any) -> None:
        self._assign(1, pages)

    def backup_state(self) -> Any:
        """Copy of the free pages, for `restore_state`."""
        return self._core.backup_state()

    def restore_state(self, state: Any) -> None:
        """Put back what `backup_state` gave."""
        self._core.restore_state(state)
