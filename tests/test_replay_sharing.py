"""The replay's two engines and its prefix cache: worked by hand, against each other, and with one thing broken."""

import hashlib
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged.replay.run as run_module
from cupaged import backends
from cupaged.errors import DeviceError
from cupaged.kv import KVAllocator
from cupaged.paged import PagedTokenToKVPoolAllocator
from cupaged.replay import ReplayResult, Trace, VerificationError, replay, synthetic
from cupaged.replay.sharing import BLOCK, PrefixCache
from cupaged.replay.verify import Ledger
from tests.host_backend import variant

ENGINES = ("slots", "kv")


def make_trace(*requests: tuple[float, int, int, list[int]]) -> Trace:
    """Requests as (arrival, prompt, output, hash ids)."""
    arrival, prompt, output, ids = zip(*requests, strict=True)
    return Trace(
        "by hand",
        np.array(arrival, np.float64),
        np.array(prompt, np.int64),
        np.array(output, np.int64),
        np.arange(1, len(requests) + 1),
        [np.array(i, np.int64) for i in ids],
    )


def run(trace: Trace, page_size: int, pages: int, engine: str = "slots", **options) -> ReplayResult:
    options = {"backend": "numba", "verify": True, "share_prefixes": True, **options}
    return replay(trace, page_size, pages * page_size, engine=engine, **options)


def digest_of(*parts) -> str:
    return hashlib.blake2b(np.concatenate(parts).astype("<i8").tobytes(), digest_size=16).hexdigest()


# ---- without sharing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [3, 64])
def test_what_requests_own_is_the_same_for_both_engines_and_backends(page_size):
    trace = synthetic(60, per_second=40)
    runs = {
        (engine, backend): replay(trace, page_size, 6_000, engine=engine, backend=backend, verify=True)
        for engine in ENGINES
        for backend in ("numba", "reference")
    }
    assert all(r.retractions > 0 for r in runs.values())
    assert len({r.owned_digest for r in runs.values()}) == 1
    for engine in ENGINES:
        assert runs[engine, "numba"].digest == runs[engine, "reference"].digest
        assert runs[engine, "numba"].engine == engine
    assert runs["slots", "numba"].digest != runs["kv", "numba"].digest


def test_built_in_workload_on_both_engines():
    slots, kv = (replay(synthetic(), 64, 100_000, engine=engine, backend="numba") for engine in ENGINES)
    assert slots.owned_digest == kv.owned_digest
    assert (slots.retractions, slots.steps, slots.slots) == (kv.retractions, kv.steps, kv.slots)


@pytest.mark.parametrize(("engine", "reused"), [("slots", [2, 3]), ("kv", [8, 9])])
def test_owned_digest_by_hand(engine, reused):
    """A: 2 + 1 tokens in pages 1 and 3 of 2 slots; B: 1 + 1 in page 2. C comes later, to page 1, or 4."""
    trace = make_trace((0, 2, 1, []), (0, 1, 1, []), (1, 1, 1, []))
    result = run(trace, 2, 4, engine, share_prefixes=False)
    assert result.digest == digest_of([2, 3, 4], [6, 5], reused)
    ends = ([0, 3, 2, 0, 0, 1, 2, 0, 0], [1, 2, 1, 0, 0, 1, 1], [2, 2, 1, 0, 0, 1, 2])
    assert result.owned_digest == digest_of(*ends)


def test_requests_without_prompt_or_output_on_tables():
    result = run(make_trace((0, 0, 3, []), (0, 5, 0, []), (0, 0, 0, [])), 4, 25, "kv")
    assert (result.served, result.tokens, result.slots, result.steps) == (3, 8, 8, 4)


# ---- sharing, by hand ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize(("engine", "first"), [("slots", 5), ("kv", 6)])
def test_two_requests_with_the_same_first_blocks(engine, first, backend):
    """Pages of 256, two a block. A: blocks 1, 2 and a part of 3; B: 1, 2, 4 and a part of 5.

    A's 1,100 tokens are in pages 1 to 5, and so is its 1,101st. Its end leaves pages 1 to 4 to the cache, and page 5
    to the free list: at the front, or at the back. B takes pages 1 to 4, and computes 576 tokens of 1,600.
    """
    result = run(make_trace((0, 1100, 1, [1, 2, 3]), (1, 1600, 1, [1, 2, 4, 5])), 256, 16, engine, backend=backend)
    begin = first * 256
    assert result.digest == digest_of(np.arange(256, 1357), np.arange(begin, begin + 577))
    assert result.owned_digest == digest_of(
        [0, 1101, 5, 0], np.arange(1101), [0] * 5, [1, 1601, 7, 4], np.arange(1601), [0, 0, 0, 0, 1, 1, 1]
    )
    assert (result.pages_saved, result.found_share, result.shared) == (4, 1024 / 2700, True)
    assert (result.pages_evicted, result.pages_replaced) == (0, 0)
    assert (result.tokens, result.slots) == (1101 + 1601, 1101 + 577)
    assert result.notes == [
        "page size 256, pool 4,096: 4 pages saved, 37.9% of the prompt tokens were in the prefix cache; "
        "0 pages evicted, 0 computed twice and replaced"
    ]
    # What only the cache holds is not held: 5 pages, and then 7.
    assert (result.occupancy_mean, result.occupancy_peak) == (6 / 16, 7 / 16)
    assert result.waste_mean == (1280 - 1100 + 1280 - 1101 + 1792 - 1600 + 1792 - 1601) / 4


@pytest.mark.parametrize(("engine", "first"), [("slots", 3), ("kv", 7)])
def test_a_prefix_that_two_requests_computed_at_a_time(engine, first):
    """A in pages 1 2 3, B in 4 5 6: pages 1 and 2 are cached, 4 and 5 replaced by them. C computes 88 tokens."""
    alike = (600, 0, [1, 2])
    result = run(make_trace((0, *alike), (0, *alike), (1, *alike)), 256, 16, engine)
    assert result.digest == digest_of(
        np.arange(256, 856), np.arange(1024, 1624), np.arange(first * 256, first * 256 + 88)
    )
    assert (result.pages_saved, result.pages_replaced) == (2, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prompt_of_whole_blocks_is_never_found_whole(engine):
    """Its last token must be computed: B finds one block of two, computes the other, and it is replaced."""
    result = run(make_trace((0, 1024, 1, [1, 2]), (1, 1024, 1, [1, 2])), 64, 64, engine)
    assert (result.pages_saved, result.pages_replaced) == (8, 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_least_recently_used_blocks_go_first(engine):
    """Three pages of 512. A leaves block 1. B needs all: 1 goes, 3 and 4 stay. C needs two: 4 goes. D finds 3."""
    trace = make_trace((0, 513, 0, [1, 2]), (1, 1025, 0, [3, 4, 5]), (2, 513, 0, [1, 2]), (3, 513, 0, [3, 9]))
    result = run(trace, 512, 3, engine)
    assert (result.pages_evicted, result.pages_saved, result.pages_replaced) == (2, 1, 0)
    assert result.occupancy_peak == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_decodes_evict_before_they_retract(engine):
    """A leaves a page of 512; B, 512 + 520 tokens in a pool of 3 pages, gets it when it decodes its 1,025th."""
    result = run(make_trace((0, 513, 0, [1, 2]), (1, 512, 520, [7])), 512, 3, engine)
    assert (result.retractions, result.pages_evicted) == (0, 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("page_size", "saved"), [(200, 5), (1024, 1), (2048, 0), (1, 1024), (512, 2)])
def test_only_whole_pages_inside_whole_blocks_are_shared(engine, page_size, saved):
    result = run(
        make_trace((0, 1100, 3, [1, 2, 3]), (1, 1100, 3, [1, 2, 3])), page_size, 4400 // page_size + 2, engine
    )
    assert (result.pages_saved, result.pages_replaced) == (saved, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_retracted_request_finds_its_prefix_again(engine):
    """B and C share A's page, and have room for one of them alone."""
    trace = make_trace((0, 513, 0, [1, 2]), (1, 514, 1500, [1, 3]), (1, 514, 1500, [1, 4]))
    result = run(trace, 512, 6, engine)
    assert (result.retractions, result.served) == (1, 3)
    assert result.pages_saved == 3


def test_ids_shorter_than_the_prompt_share_what_they_say():
    result = run(make_trace((0, 2000, 1, [1]), (1, 2000, 1, [1])), 512, 16)
    assert result.pages_saved == 1


def test_a_trace_without_hash_ids_is_refused():
    with pytest.raises(ValueError, match=r"^share_prefixes needs hash_ids, which synthetic does not have: "):
        run(synthetic(5), 16, 1000)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match=r"^engine must be one of slots, kv, got 'steam'$"):
        run(synthetic(5), 16, 1000, "steam")


def test_an_id_that_repeats_is_another_block_there():
    cache = PrefixCache(BLOCK)
    held, new = cache.insert([5, 5], 1024, np.array([8, 9]))
    assert held.tolist() == new.tolist() == [8, 9]
    assert cache.pages(cache.find([5, 5, 5], 2000)).tolist() == [8, 9]
    assert cache.pages(cache.find([5], 2000)).tolist() == [8]
    assert cache.evict(1).tolist() == [9]
    assert cache.idle_pages == 1


# ---- sharing, at random --------------------------------------------------------------------------------------------


@st.composite
def sharing_traces(draw) -> Trace:
    """Up to 12 requests whose prompts are paths in a small tree."""
    requests = []
    for arrival in accumulate(draw(st.lists(st.sampled_from([0.0, 0.02, 0.5]), min_size=1, max_size=12))):
        ids = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4))
        prompt = BLOCK * len(ids) - draw(st.sampled_from([0, 0, 1, 100, 511]))
        requests.append((arrival, prompt, draw(st.sampled_from([0, 1, 5, 300])), ids))
    return make_trace(*requests)


@settings(max_examples=40, deadline=None)
@given(
    trace=sharing_traces(),
    page_size=st.sampled_from([64, 200, 256, 512, 1000]),
    tokens=st.integers(2000, 8000),
    chunk=st.sampled_from([100, 700, 8192]),
)
def test_both_engines_agree_and_nothing_is_lost(trace, page_size, tokens, chunk):
    pages = tokens // page_size + 1
    slots, kv = (run(trace, page_size, pages, engine, chunk=chunk) for engine in ENGINES)
    assert slots.owned_digest == kv.owned_digest
    for name in ("served", "slots", "steps", "pages_saved", "pages_evicted", "pages_replaced", "timeline"):
        assert getattr(slots, name) == getattr(kv, name)
    assert slots.served + slots.skipped == len(trace)
    assert slots.waste_mean >= 0


@pytest.mark.parametrize("engine", ENGINES)
def test_sharing_is_the_same_on_host_backends(engine):
    runs = [run(conversations(), 64, 160, engine, backend=backend) for backend in ("numba", "reference")]
    assert runs[0].pages_saved > 100
    assert runs[0].pages_replaced > 0
    assert runs[0].pages_evicted > 0
    assert runs[0].digest == runs[1].digest
    assert runs[0].owned_digest == runs[1].owned_digest


@pytest.mark.parametrize("engine", ENGINES)
def test_sharing_is_the_same_on_the_cuda_sources(engine, monkeypatch):
    host = run(conversations(), 64, 160, engine)
    monkeypatch.setattr(backends, "pick", lambda *_: variant("random"))
    cuda = run(conversations(), 64, 160, engine)
    assert (cuda.backend, cuda.device) == ("cupy", "cuda:0")
    assert (host.digest, host.owned_digest) == (cuda.digest, cuda.owned_digest)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cupy", "numba-cuda"])
@pytest.mark.parametrize("engine", ENGINES)
def test_sharing_is_the_same_on_a_gpu(engine, backend):
    if not backends.probe(backend).works:
        pytest.skip(backends.probe(backend).reason)
    host, gpu = (run(conversations(), 64, 160, engine, backend=b) for b in ("numba", backend))
    assert (host.digest, host.owned_digest) == (gpu.digest, gpu.owned_digest)


def conversations() -> Trace:
    """Three rounds of eight chats: each asks again with all that came before; the odd ones ask twice at a time."""
    requests = []
    for turn in range(3):
        for chat in range(8):
            ids = [0, *(10 * chat + i + 1 for i in range(turn + 1))]
            requests += [(turn + chat / 50, BLOCK * len(ids) + 40, 30, [*ids, 99])] * (1 + chat % 2)
    return make_trace(*requests)


# ---- sharing that is broken ----------------------------------------------------------------------------------------


class ForgetsToRetain(PagedTokenToKVPoolAllocator):
    def retain(self, page_ids):
        pass


class RetainsTwice(PagedTokenToKVPoolAllocator):
    def retain(self, page_ids):
        super().retain(np.repeat(page_ids, 2))


class WritesToASharedPage(PagedTokenToKVPoolAllocator):
    def alloc_extend(self, prefix_lens, *arguments, **options):
        slots = super().alloc_extend(prefix_lens, *arguments, **options)
        if prefix_lens[0]:
            slots[0] = self.page_size
        return slots


class FreesTheCachesPages(PagedTokenToKVPoolAllocator):
    def free_page_ids(self, page_ids):
        super().free_page_ids(np.append(page_ids, 1))


class KvForgetsToRetain(KVAllocator):
    def retain(self, page_ids):
        pass


class FreesWhatIsAlike(KVAllocator):
    def free_with_diff(self, new_prefix_page_ids, old_page_ids):
        alike = new_prefix_page_ids == old_page_ids
        self.append_to_later_free(old_page_ids[alike])
        return ~alike


class FreesNoExtraPages(KVAllocator):
    def free_extra_pages_not_cached(self, req_pool_index, real_seq_len, alloced_len):
        pass


class WritesAWrongTable(KVAllocator):
    def decode_step(self, table, rows, seq_lens, **options):
        slots = super().decode_step(table, rows, seq_lens, **options)
        table[rows[0], 1] = table[rows[0], 0]
        return slots


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ForgetsToRetain, r"^step 40: page 1, slot 256, has 2 owners, but the allocator counts 1$"),
        (RetainsTwice, r"^step 40: page 1, slot 256, has 2 owners, but the allocator counts 3$"),
        (WritesToASharedPage, r"^step 40: request 1, slot 256: has an owner already: request 0$"),
        (FreesTheCachesPages, r"^step 1: 4 pages owned and 13 free do not make 16: -1 pages are lost$"),
        (KvForgetsToRetain, r"^step 40: page 1, slot 256, has 2 owners, but the allocator counts 1$"),
        (FreesWhatIsAlike, r"^step 1: 4 pages owned and 16 free do not make 16: -4 pages are lost$"),
        (FreesNoExtraPages, r"^step 1: 4 pages owned and 11 free do not make 16: 1 pages are lost$"),
        (WritesAWrongTable, r"^step 1: request 0, row 0, column 1 of req_to_page is 1, but the slots are in page 2$"),
    ],
)
def test_broken_sharing_is_caught(monkeypatch, kind, message):
    engine, name = (
        ("kv", "KVAllocator") if issubclass(kind, KVAllocator) else ("slots", "PagedTokenToKVPoolAllocator")
    )
    monkeypatch.setattr(run_module, name, kind)
    with pytest.raises(VerificationError, match=message):
        run(make_trace((0, 1100, 1, [1, 2, 3]), (1, 1600, 1, [1, 2, 4, 5])), 256, 16, engine)


class NeverGivesUp(PrefixCache):
    """Keeps what it says that it gave up."""

    def evict(self, count):
        pages = super().evict(count)
        self.insert([77], BLOCK, pages)
        return pages


def test_a_cache_that_keeps_evicted_pages_is_caught(monkeypatch):
    monkeypatch.setattr(run_module, "PrefixCache", NeverGivesUp)
    trace = make_trace((0, 513, 0, [1, 2]), (1, 1025, 0, [3, 4, 5]), (2, 513, 0, [77, 2]))
    with pytest.raises((VerificationError, DeviceError)):
        run(trace, 512, 3)


def shared_ledger() -> Ledger:
    """Pages of 2 slots. Request 0 has 3 tokens in pages 1 and 2; the cache holds page 1; request 1 begins with it."""
    ledger = Ledger(4, 2, 3)
    ledger.hand_out(np.array([0]), np.array([0]), np.array([3]), np.array([2, 3, 4]))
    ledger.keep(0, np.array([1]))
    ledger.share(1, np.array([1]))
    ledger.step = 7
    return ledger


def test_ledger_counts_the_owners_of_a_page():
    ledger = shared_ledger()
    ledger.audit(np.array([3, 4]), np.array([0, 3, 1, 0, 0]))
    ledger.take_back(0, np.array([2, 3, 4]))
    ledger.audit(np.array([2, 3, 4]), np.array([0, 2, 0, 0, 0]))
    ledger.evict(np.array([1]))
    ledger.hand_out(np.array([1]), np.array([2]), np.array([3]), np.array([6]))
    ledger.settle(2)
    ledger.take_back(1, np.array([2, 3, 6]))
    ledger.audit(np.array([1, 2, 3, 4]), np.zeros(5))
    ledger.hand_out(np.array([2]), np.array([0]), np.array([2]), np.array([2, 3]))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lambda x: x.keep(0, np.array([2])), "request 0, slot 5: is cached for a request that did not write it"),
        (lambda x: x.keep(0, np.array([1])), "request 0, slot 2: is cached twice"),
        (lambda x: x.share(2, np.array([1, 2])), "request 2 takes page 2 from the cache, which does not hold it"),
        (lambda x: x.evict(np.array([2])), "page 2 is evicted, but the cache does not hold it"),
        (
            lambda x: x.take_back(1, np.array([6, 7])),
            "request 1 frees other pages than those that it took from the cache",
        ),
        (
            lambda x: x.hand_out(np.array([1]), np.array([1]), np.array([2]), np.array([3])),
            "request 1 owns 2 slots, but goes on from 1",
        ),
        (
            lambda x: x.hand_out(np.array([1]), np.array([2]), np.array([3]), np.array([2])),
            "request 1, slot 2: has an owner already: request 0",
        ),
    ],
)
def test_ledger_names_what_is_wrong_with_sharing(entry, message):
    with pytest.raises(VerificationError) as caught:
        entry(shared_ledger())
    assert str(caught.value) == f"step 7: {message}"
