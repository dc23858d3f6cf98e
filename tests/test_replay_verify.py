"""The replay's proof: an allocator that breaks its contract is caught, and named."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged.replay.run as run_module
from cupaged.errors import DeviceError
from cupaged.paged import PagedTokenToKVPoolAllocator
from cupaged.replay import VerificationError, replay, synthetic
from cupaged.replay.verify import Ledger

TRACE = synthetic(60, per_second=40)
PAGE, POOL = 4, 40_000


class Faulty(PagedTokenToKVPoolAllocator):
    """Does one thing wrong, in the call whose number is `at`."""

    at = 30
    calls = 0

    def damage(self, slots):
        return slots

    def alloc_decode(self, seq_lens, last_loc, **options):
        return self._maybe(super().alloc_decode(seq_lens, last_loc, **options))

    def alloc_extend(self, *arguments, **options):
        return self._maybe(super().alloc_extend(*arguments, **options))

    def _maybe(self, slots):
        self.calls += 1
        return self.damage(slots.copy()) if self.calls == self.at and slots is not None else slots


class HandsOutTwice(Faulty):
    def damage(self, slots):
        slots[-1] = slots[0]
        return slots


class HandsOutAnothersSlot(Faulty):
    at = 5

    def damage(self, slots):
        slots[0] = PAGE
        return slots


class HandsOutPadding(Faulty):
    def damage(self, slots):
        slots[1] = 3
        return slots


class HandsOutOfThePool(Faulty):
    def damage(self, slots):
        slots[2] = POOL + PAGE
        return slots


class SkipsASlot(Faulty):
    at = 1

    def damage(self, slots):
        slots[5] += PAGE * 5000
        return slots


class HandsOutTooFew(Faulty):
    def damage(self, slots):
        return slots[:-1]


class NeverHasRoom(Faulty):
    def alloc_decode(self, *arguments, **options):
        return None


class HasNoRoomForPrompts(Faulty):
    def alloc_extend(self, *arguments, **options):
        return None


class LosesAPage(PagedTokenToKVPoolAllocator):
    def free(self, free_index, *, num_pages=None):
        super().free(free_index[:-PAGE])


class CountsAPageTooMany(PagedTokenToKVPoolAllocator):
    def available_size(self):
        size = super().available_size()
        return size if size == POOL else size + PAGE


class ListsAPageTwice(PagedTokenToKVPoolAllocator):
    @property
    def free_pages(self):
        pages = super().free_pages.copy()
        pages[-1] = pages[0]
        return pages


class ListsAnOwnedPage(PagedTokenToKVPoolAllocator):
    @property
    def free_pages(self):
        pages = super().free_pages
        return (
            pages
            if len(pages) == POOL // PAGE
            else np.append(pages, np.setdiff1d(np.arange(1, POOL // PAGE), pages)[0])
        )


def prove(monkeypatch, kind) -> None:
    monkeypatch.setattr(run_module, "PagedTokenToKVPoolAllocator", kind)
    replay(TRACE, PAGE, POOL, backend="numba", verify=True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (HandsOutTwice, r"^step \d+: request \d+, slot \d+: is handed out twice$"),
        (HandsOutAnothersSlot, r"^step \d+: request \d+, slot \d+: has an owner already: request \d+$"),
        (HandsOutPadding, r"^step \d+: request \d+, slot 3: is not in the pool$"),
        (HandsOutOfThePool, rf"^step \d+: request \d+, slot {POOL + PAGE}: is not in the pool$"),
        (SkipsASlot, r"^step 0: request 0, slot \d+: does not follow from the token before it$"),
        (HandsOutTooFew, r"^alloc_\w+ returned shape \(\d+,\) for \d+ tokens$"),
        (NeverHasRoom, r"^step \d+: request \d+ is alone and fits the pool, but the allocator, with \d+ free pages"),
        (
            HasNoRoomForPrompts,
            r"^step 0: the prompts from request 0 on need fewer pages than the 10000 that are free",
        ),
        (LosesAPage, r"^step \d+: \d+ pages owned and \d+ free do not make 10000: 1 pages are lost$"),
        (CountsAPageTooMany, r"^step \d+: \d+ pages owned and \d+ free do not make 10000: -1 pages are lost$"),
        (ListsAPageTwice, r"^step \d+: page \d+, slot \d+, is lost: neither owned nor free$"),
        (ListsAnOwnedPage, r"^step \d+: request \d+, slot \d+: page \d+ is listed as free$"),
    ],
)
def test_a_broken_allocator_is_caught(monkeypatch, kind, message):
    with pytest.raises(VerificationError, match=message):
        prove(monkeypatch, kind)


@settings(max_examples=60, deadline=None)
@given(call=st.integers(1, 300), where=st.integers(0, 10_000), slot=st.integers(-5, POOL + 100))
def test_any_one_wrong_slot_is_caught(call, where, slot):
    """Another free page in place of the right one is legal at first, but the allocator itself trips over it later."""

    class Random(Faulty):
        at = call

        def damage(self, slots):
            i = where % len(slots)
            slots[i] = slot if slots[i] != slot else slot + 1
            return slots

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises((VerificationError, DeviceError)):
        prove(monkeypatch, Random)


def test_an_honest_allocator_passes(monkeypatch):
    prove(monkeypatch, Faulty)


def entered() -> Ledger:
    """Requests 0 and 1 in pages 1 and 2 of 4 slots, and page 3 free."""
    ledger = Ledger(3, 4, 2)
    ledger.hand_out(np.array([0, 1]), np.array([0, 0]), np.array([3, 2]), np.array([4, 5, 6, 8, 9]))
    ledger.step = 7
    return ledger


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([4, 5, 8], "step 7: request 0, slot 8: is freed for a request that does not own it"),
        ([4, 5, 5], "step 7: request 0, slot 5: is freed twice"),
        ([4, 5], "step 7: request 0 owns 3 slots but frees 2"),
    ],
)
def test_wrong_frees_are_caught(slots, message):
    with pytest.raises(VerificationError) as caught:
        entered().take_back(0, np.array(slots))
    assert str(caught.value) == message


def test_ledger_follows_a_request_from_page_to_page():
    ledger = entered()
    ledger.hand_out(np.array([0, 1]), np.array([3, 2]), np.array([5, 2]), np.array([7, 12]))
    ledger.settle(0)
    ledger.take_back(0, np.array([4, 5, 6, 7, 12]))
    ledger.settle(2)
    owners = np.array([0, 0, 1, 0])
    ledger.audit(np.array([3, 1]), owners)
    with pytest.raises(VerificationError, match="page 3, slot 12, is in the free list twice"):
        ledger.audit(np.array([3, 1, 3]), owners)
    with pytest.raises(VerificationError, match="request -1, slot 16: page 4 is listed as free"):
        ledger.audit(np.array([3, 1, 4]), owners)
    with pytest.raises(VerificationError, match="page 2, slot 8, has 1 owners, but the allocator counts 2"):
        ledger.audit(np.array([3, 1]), owners * 2)
