"""SGLang's allocator on cupaged where there is no SGLang: against a model of its contract, and when it stays out."""

from __future__ import annotations

import logging
import sys
import threading
import types
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from cupaged import backends  # noqa: E402
from cupaged.errors import BackendError, IntegrityError  # noqa: E402
from cupaged.integrations import sglang as adapter  # noqa: E402
from tests.host_backend import variant  # noqa: E402
from tests.sglang_model import NewModel, OldModel, Scheduling, long  # noqa: E402
from tests.sglang_process import make  # noqa: E402

MODELS = [NewModel, OldModel]


def extend(allocator, prefix, seq, last):
    p, s = long(*prefix), long(*seq)
    return allocator.alloc_extend(p, p, s, s, long(*last), int((s - p).sum()))


def decode(allocator, seq, last):
    return allocator.alloc_decode(long(*seq), long(*seq), long(*last))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_equals_the_model(model, page_size, need_sort):
    reference, ours = (
        make(cls, 24 * page_size + 1, page_size, need_sort) for cls in (model, adapter._replacement(model))
    )
    counts = Scheduling(reference, ours, seed=page_size).run(300)
    assert counts["extend"] > 20
    assert counts["decode"] + counts["decode:None"] > 40


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("need_sort", [False, True])
def test_equals_the_model_on_the_cuda_kernels(model, need_sort, monkeypatch):
    """The CUDA C, run by the host, where torch's tensors are on the CPU."""

    class HostCuda(variant("random")):
        def output(self, library, n):
            tensor = torch.empty(n, dtype=torch.int64)
            return tensor, tensor.data_ptr()

    monkeypatch.setattr(backends, "pick", lambda name, device: HostCuda)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: None)
    reference, ours = (make(cls, 24 * 8 + 1, 8, need_sort) for cls in (model, adapter._replacement(model)))
    assert isinstance(ours._core.backend, HostCuda)
    Scheduling(reference, ours, seed=8).run(300)


@pytest.mark.parametrize("model", MODELS)
def test_worked_example(model):
    """Page size 4: A grows from nothing to 6 tokens, B to 3; then both by one; then A is freed."""
    ours = make(adapter._replacement(model), 32, 4)
    assert extend(ours, [0, 0], [6, 3], [-1, -1]).tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert decode(ours, [7, 4], [9, 14]).tolist() == [10, 15]
    assert decode(ours, [8, 5], [10, 15]).tolist() == [11, 16]
    assert ours.available_size() == 16
    assert ours.free_pages.tolist() == [5, 6, 7, 8]
    ours.free(long(8, 4, 5, 11, 6))
    assert ours.free_pages.tolist() == [1, 2, 5, 6, 7, 8]
    assert ours.alloc(4 * 7) is None
    assert ours.alloc(7).tolist() == [4, 5, 6, 7]  # floored to one page
    assert ours.alloc(3).tolist() == []


def test_segments_and_pages_go_to_the_front_in_their_order():
    ours = make(adapter._replacement(NewModel), 40, 4)
    slots = ours.alloc(24)
    ours.free_segment(slots[8:15], start_pos=8)
    assert ours.free_pages.tolist() == [3, 4, 7, 8, 9, 10]
    ours.free_page_ids(long(6, 2))
    assert ours.free_pages.tolist() == [6, 2, 3, 4, 7, 8, 9, 10]
    ours._release_page_ids(long(5), long(1))
    assert ours.free_pages.tolist() == [5, 1, 6, 2, 3, 4, 7, 8, 9, 10]
    with pytest.raises(AssertionError):
        ours.free_segment(slots, start_pos=2)


def test_the_queue_of_a_group_is_a_list_that_subclasses_may_use():
    ours = make(adapter._replacement(NewModel), 40, 4)
    slots = ours.alloc(40)
    ours.free_group_begin()
    assert ours.free_group == []
    row = slots[:4].clone()
    ours.free(row)
    row[:] = 36  # SGLang writes its tables while a group is open
    pages = long(4)
    ours.free_page_ids(pages)
    pages[:] = 9
    ours.free_group.append(slots[8:12])
    assert ours.available_size() == 0
    ours.free_group_end()
    assert ours.free_group is None
    assert ours.free_pages.tolist() == [4, 1, 3]
    ours.free_group_begin()
    ours.free(slots[-4:])
    ours.free_group = None  # drops what is queued
    assert ours.free_pages.tolist() == [4, 1, 3]


def test_slots_may_be_freed_in_any_shape():
    ours = make(adapter._replacement(NewModel), 40, 4)
    ours.free(ours.alloc(16).reshape(2, 8))
    assert ours.available_size() == 40


def test_the_lengths_on_the_host_reach_cupaged():
    ours = make(adapter._replacement(NewModel), 40, 4)
    before, after, last = long(3), long(5), long(-1)
    with mock.patch.object(ours, "_core") as core:
        ours.alloc_extend("p", before, "s", after, last, 2, num_new_pages=1)
        ours.alloc_decode("s", after, last)
    assert core.alloc_extend.call_args == mock.call("p", "s", last, 2, prefix_lens_cpu=before, seq_lens_cpu=after)
    assert core.alloc_decode.call_args == mock.call("s", last, seq_lens_cpu=after)


# ---- attributes that SGLang assigns ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_size_and_num_pages_count_from_the_next_clear(model):
    ours = make(adapter._replacement(model), 40, 4)
    for pages in (3, 10, 15, 1, 0, 2):
        ours.size, ours.num_pages = 4 * pages + 3, pages
        ours.clear()
        assert ours.available_size() == 4 * pages
        assert ours.free_pages.tolist() == [*range(1, pages + 1)]
        slots = ours.alloc(4 * pages)
        assert slots.tolist() == [*range(4, 4 * pages + 4)]
        assert ours.alloc(4) is None
        assert decode(ours, [1], [-1]) is None


def test_a_pool_that_grows_waits_for_what_is_queued():
    ours = make(adapter._replacement(NewModel), 40, 4)
    with mock.patch.object(ours._core, "refresh") as refresh:
        ours.num_pages = 11
        ours.clear()
    assert refresh.called
    assert ours.available_size() == 44


def test_free_pages_and_staged_pages_can_be_assigned():
    ours = make(adapter._replacement(NewModel), 24, 4, need_sort=True)
    taken = ours.alloc(24)
    ours.free(taken[4:8])
    ours.free(taken[:4])
    assert [pages.tolist() for pages in ours.staged_pages] == [[2, 1]]
    assert ours.num_staged_pages == 2
    ours.free_pages = long(5, 2)
    assert ours.free_pages.tolist() == [5, 2]
    assert [pages.tolist() for pages in ours.staged_pages] == [[1]]
    ours.staged_pages = [long(4), long(3, 1)]
    ours.num_staged_pages = 3
    assert ours.get_all_free_pages().tolist() == [5, 2, 4, 3, 1]
    assert ours.available_size() == 20
    assert ours.alloc(8).tolist() == [20, 21, 22, 23, 8, 9, 10, 11]
    assert ours.alloc(4).tolist() == [4, 5, 6, 7]
    ours.staged_pages, ours.num_staged_pages = [], 0
    assert ours.get_all_free_pages().tolist() == [3, 4]
    ours.free(taken[20:])  # page 6, which nobody listed, has an owner
    ours._core.check()
    assert ours.get_all_free_pages().tolist() == [3, 4, 6]
    ours.free_pages = None
    assert ours.free_pages.tolist() == [3, 4]


def test_release_pages_can_be_assigned():
    ours = make(adapter._replacement(OldModel), 24, 4, need_sort=True)
    ours.free(ours.alloc(24)[:8])
    assert ours.release_pages.tolist() == [1, 2]
    ours.release_pages = long(6)
    assert ours.release_pages.tolist() == [6]
    assert ours.available_size() == 4


@pytest.mark.parametrize("pages", [[1, 1], [0], [7], [-1], [1 << 40]])
def test_lists_that_no_pool_can_have_are_refused(pages):
    ours = make(adapter._replacement(NewModel), 24, 4)
    with pytest.raises(ValueError, match=r"some of 1 \.\. 6, each named once"):
        ours.free_pages = long(*pages)
    assert ours.free_pages.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_subclass_may_slice_the_free_list():
    class Slicing(adapter._replacement(NewModel)):
        def alloc(self, need_size):
            pages = self.free_pages[: need_size // self.page_size]
            self.free_pages = self.free_pages[len(pages) :]
            return pages * self.page_size

    ours = make(Slicing, 24, 4)
    assert ours.alloc(8).tolist() == [4, 8]
    ours.free(long(4))
    assert ours.free_pages.tolist() == [1, 3, 4, 5, 6]


# ---- no wait, no raise -------------------------------------------------------------------------------------------


def test_the_flows_of_a_scheduler_never_wait():
    """With a device that never reports: lengths that the host knows, segments and page ids keep the figure exact."""
    ours = make(adapter._replacement(NewModel), 64 * 4, 4)
    pool = ours._core.pool
    with (
        mock.patch.object(pool, "_read_mail", return_value=None),
        mock.patch.object(pool, "_wait", side_effect=AssertionError("waited")),
    ):
        slots = extend(ours, [0, 0], [9, 4], [-1, -1])
        assert ours.available_size() == 4 * 60
        decode(ours, [10, 5], [slots[8], slots[12]])
        assert ours.available_size() == 4 * 59
        ours.free_segment(slots[:9], start_pos=0)
        assert ours.available_size() == 4 * 62
        ours.free_group_begin()
        ours.free_page_ids(long(5))
        ours.free_segment(slots[9:], start_pos=0)
        ours.free_group_end()
        assert ours.available_size() == 4 * 64
        assert ours.alloc(4 * 65) is None
        taken = ours.alloc(4 * 64)
        assert ours.available_size() == 0
        assert extend(ours, [0], [1], [-1]) is None
        ours.free(taken)  # plain, so that only the device knows how many pages
        with pytest.raises(AssertionError, match="waited"):
            ours.available_size()
    assert ours.available_size() == 4 * 64


@pytest.mark.parametrize("model", MODELS)
def test_a_watchdog_thread_reads_without_disturbing(model):
    ours = make(adapter._replacement(model), 4096, 4)
    found: list = []

    def watch():
        while len(found) < 300:
            found.append((ours.available_size(), ours.free_pages))

    thread = threading.Thread(target=watch)
    thread.start()
    while thread.is_alive():
        ours.free(ours.alloc(400))
    thread.join(30)
    assert len(found) == 300
    assert {size for size, _ in found} <= {4096, 3696}
    assert all(pages is None for _, pages in found)
    assert ours.available_size() == 4096
    assert ours.free_pages.tolist() == [*range(1, 1025)]


def test_what_the_device_finds_wrong_is_logged_and_never_raised(caplog):
    ours = make(adapter._replacement(NewModel), 64, 4)
    slots = ours.alloc(16)
    ours.free(slots[:4])
    ours.free(slots[:4])
    with caplog.at_level(logging.ERROR, "cupaged"):
        ours.free(slots[4:8])
    assert "freed more often than it was owned" in caplog.text
    assert ours.free_pages.tolist() == [2, 1, *range(5, 17)]
    # A last slot that does not fit its prefix stays in its page, as with SGLang's kernel.
    assert decode(ours, [4], [12]).tolist() == [13]
    assert ours.available_size() == 4 * 14


def test_debug_mode_raises_as_sglang_does(monkeypatch):
    ours = make(adapter._replacement(NewModel), 64, 4)
    ours.debug_mode = True
    slots = ours.alloc(16)
    ours.free_segment(slots[:4], start_pos=0)
    with pytest.raises(AssertionError, match="no whole pages of 4"):
        ours.alloc(3)
    with pytest.raises(AssertionError, match="freed more often"):
        ours.free(slots[:4])
    with pytest.raises(AssertionError, match="does not fit its prefix"):
        decode(ours, [4], [12])
    with pytest.raises(AssertionError, match="freed more often"):
        ours.free_page_ids(long(1))
    ours._debug_check_no_duplicate_pages()
    with (
        mock.patch.object(ours._core, "check_integrity", side_effect=IntegrityError("page 3 is lost")),
        pytest.raises(AssertionError, match="page 3 is lost"),
    ):
        ours._debug_check_no_duplicate_pages()


def test_host_lengths_that_no_allocation_can_mean_raise_before_anything_is_taken():
    ours = make(adapter._replacement(NewModel), 64, 4)
    with pytest.raises(ValueError, match="extend_num_tokens is 9"):
        ours.alloc_extend(long(0), long(0), long(8), long(8), long(-1), 9)
    assert ours.available_size() == 64


# ---- when cupaged stays out --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["npu", "xpu:0", "mps"])
def test_another_device_gets_sglangs_class_and_a_line(device, caplog):
    replacement = adapter._replacement(NewModel)
    made = make(replacement, 24, 4, device=device)
    assert type(made) is NewModel
    assert made.device == device
    assert len(caplog.records) == 1
    assert f"24 slots on {device}: device must be" in caplog.text

    class Sub(replacement):
        pass

    with pytest.raises(BackendError, match="Sub is built on cupaged, but device must be"):
        make(Sub, 24, 4, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_no_backend_gets_sglangs_class_and_a_line(caplog):
    assert type(make(adapter._replacement(NewModel), 24, 4, device="cuda")) is NewModel
    assert "no backend can run on a GPU here" in caplog.text


@pytest.fixture
def fake(monkeypatch):
    """Modules that `register` looks at, with a model as SGLang's class."""
    hooks = types.SimpleNamespace(HookRegistry=mock.Mock(), HookType=types.SimpleNamespace(REPLACE="replace"))
    names = adapter.HOME.split(".")
    for i in range(1, len(names)):
        package = types.ModuleType(".".join(names[:i]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    home = types.SimpleNamespace(PagedTokenToKVPoolAllocator=NewModel)
    monkeypatch.setitem(sys.modules, adapter.HOME, home)
    utils = types.SimpleNamespace(is_npu=lambda: False)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", utils)
    monkeypatch.delitem(sys.modules, adapter.INTERLEAVED, raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setenv(adapter.VARIABLE, "1")
    return types.SimpleNamespace(home=home, utils=utils, register=hooks.HookRegistry.register)


def test_register_replaces_once(fake, caplog):
    adapter.register()
    ((target, cls, kind), _) = fake.register.call_args
    assert target == "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
    assert kind == "replace"
    assert issubclass(cls, NewModel)
    assert cls is not NewModel
    fake.home.PagedTokenToKVPoolAllocator = cls
    adapter.register()
    assert fake.register.call_count == 1
    assert not caplog.records


@pytest.mark.parametrize("wish", [None, "", "0"])
def test_without_the_variable_nothing_happens(fake, monkeypatch, caplog, wish):
    monkeypatch.delenv(adapter.VARIABLE)
    if wish is not None:
        monkeypatch.setenv(adapter.VARIABLE, wish)
    adapter.register()
    assert not fake.register.called
    assert not caplog.records


def test_another_value_is_told(fake, monkeypatch, caplog):
    monkeypatch.setenv(adapter.VARIABLE, "yes")
    adapter.register()
    assert not fake.register.called
    assert [r.getMessage() for r in caplog.records] == [
        "SGLang keeps its own allocator: CUPAGED_SGLANG must be 1 or 0, not 'yes'"
    ]


def test_npus_keep_sglangs_classes(fake, caplog):
    fake.utils.is_npu = lambda: True
    adapter.register()
    assert not fake.register.called
    assert "on an NPU" in caplog.text


class MoreState(NewModel):
    def free(self, free_index):
        self.quarantine = free_index


class OtherOrder(NewModel):
    def alloc_decode(self, last_loc, seq_lens, seq_lens_cpu):
        return None


class OneMore(NewModel):
    def free_segment(self, free_index, *, start_pos, owner):
        return None


class NoGroups(OldModel):
    free_group_begin = None


class OneMoreWithDefault(NewModel):
    def free_segment(self, free_index, *, start_pos, owner=None):
        return None


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (MoreState, "keeps what is unknown here: quarantine"),
        (OtherOrder, "has alloc_decode(self, last_loc, seq_lens, seq_lens_cpu), not alloc_decode(self, seq_lens, "),
        (OneMore, "has free_segment(self, free_index, start_pos, owner), not free_segment("),
        (NoGroups, "has no free_group_begin()"),
        (None, "cannot be replaced: AttributeError"),
    ],
)
def test_another_contract_leaves_sglang_alone_and_says_so_in_one_line(fake, caplog, cls, why):
    if cls is None:
        del fake.home.PagedTokenToKVPoolAllocator
    else:
        fake.home.PagedTokenToKVPoolAllocator = cls
    adapter.register()
    assert not fake.register.called
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert message.startswith("SGLang keeps its own allocator: ")
    assert why in message
    assert "\n" not in message


def test_a_loader_that_refuses_is_told_in_one_line(fake, caplog):
    fake.register.side_effect = TypeError("no\nclasses")
    adapter.register()
    assert len(caplog.records) == 1
    assert "cannot be replaced: TypeError: no classes" in caplog.records[0].getMessage()


def test_a_parameter_with_a_default_may_follow(fake):
    fake.home.PagedTokenToKVPoolAllocator = OneMoreWithDefault
    adapter.register()
    assert fake.register.called


def test_too_old_or_missing_sglang_is_told(fake, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, adapter.HOME)
    adapter.register()
    assert not fake.register.called
    assert "cannot be replaced: ModuleNotFoundError" in caplog.records[0].getMessage()
