// Frees: mark, then compact in order, then push. And `retain`, their opposite.
#include "common.cuh"

// ---- free by slot: every page that the call touches loses one owner ---------------------------------------------

__device__ __forceinline__ bool bit_of(const u32* bits, i64 page) { return (bits[page >> 5] >> (page & 31)) & 1; }

__device__ __forceinline__ void breach_at(i64* lowest, i64 index, int breach) {
    atomicMin(lowest, (index << 8) | breach);
}

// Marks the page of entry i. A page that lost its last owner earlier in the same group is no error.
__device__ __forceinline__ void mark_slot(const Args& a, i64 i) {
    const i64 slot = a.seq.at(i);
    const i64 page = slot < 0 ? -1 : div_page(a, slot);
    if (!is_page(page, a.words[NUM_PAGES])) {
        breach_at(&a.words[BREACH], i, BREACH_RANGE);
        return;
    }
    if (i > 0 && div_page(a, a.seq.at(i - 1)) == page) return;  // runs of one page are the common case
    if (a.ref_count[page] == 0) {
        if (!bit_of(a.freed, page)) breach_at(&a.words[BREACH], i, BREACH_DOUBLE_FREE);
        return;
    }
    const u32 before = atomicOr(&a.touched[page >> 5], 1u << (page & 31));
    if (before == 0) atomicOr(&a.touched_groups[page >> 15], 1u << ((page >> 10) & 31));
}

extern "C" __global__ void __launch_bounds__(256) mark_slots(const __grid_constant__ Args a) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < a.n) mark_slot(a, i);
}

// Calls f(group) for every set bit, ascending, in every warp alike. A group is 32 words, 1,024 pages.
template <typename F>
__device__ __forceinline__ void for_each_group(const Args& a, const u32* groups, F f) {
    const i64 count = (static_cast<i64>(a.capacity) >> 15) + 1;
    const int lane = threadIdx.x & 31;
    for (i64 base = 0; base < count; base += 32) {
        const u32 mine = base + lane < count ? groups[base + lane] : 0;
        u32 some = __ballot_sync(FULL_WARP, mine != 0);
        while (some) {
            const int from = __ffs(some) - 1;
            some &= some - 1;
            u32 bits = __shfl_sync(FULL_WARP, mine, from);
            while (bits) {
                f((base + from) * 32 + __ffs(bits) - 1);
                bits &= bits - 1;
            }
        }
    }
}

// Takes one owner off every touched page and notes those that lost their last. Warp k has word k of each group.
__device__ __forceinline__ void settle_touched(const Args& a, i64* w) {
    __shared__ int unshared;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (threadIdx.x == 0) unshared = 0;
    __syncthreads();
    for_each_group(a, a.touched_groups, [&](i64 group) {
        const i64 word = group * 32 + warp;
        const u32 bits = a.touched[word];
        if (!bits) return;
        int owners = -1;
        if ((bits >> lane) & 1) {
            owners = a.ref_count[word * 32 + lane] - 1;
            a.ref_count[word * 32 + lane] = owners;
        }
        const u32 gone = __ballot_sync(FULL_WARP, owners == 0);
        const u32 single = __ballot_sync(FULL_WARP, owners == 1);
        __syncwarp();  // votes order no memory: every lane has read its word
        if (lane == 0) {
            a.touched[word] = 0;
            a.freed[word] |= gone;
            if (gone) atomicOr(&a.freed_groups[group >> 5], 1u << (group & 31));
            if (single) atomicAdd(&unshared, __popc(single));
        }
    });
    __syncthreads();
    const i64 count = (static_cast<i64>(a.capacity) >> 15) + 1;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) a.touched_groups[i] = 0;
    if (threadIdx.x == 0) w[SHARED] -= unshared;
}

// Puts the noted pages back into the ring, ascending.
__device__ __forceinline__ void push_freed(const Args& a, i64* w) {
    __shared__ i64 first;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 total = 0;
    for_each_group(a, a.freed_groups, [&](i64 group) {
        total += __shfl_sync(FULL_WARP, warp_inclusive(__popc(a.freed[group * 32 + lane])), 31);
    });
    if (threadIdx.x == 0) first = give_pages(a, w, total);
    __syncthreads();
    i64 done = first;
    for_each_group(a, a.freed_groups, [&](i64 group) {
        const u32 word = a.freed[group * 32 + lane];
        const i64 inclusive = warp_inclusive(__popc(word));
        const i64 before = __shfl_sync(FULL_WARP, inclusive - __popc(word), warp);
        const u32 mine = __shfl_sync(FULL_WARP, word, warp);
        if ((mine >> lane) & 1) {
            const int rank = __popc(mine & ((1u << lane) - 1));
            a.free_ring[ring_position(a, done + before + rank)] = static_cast<int>((group * 32 + warp) * 32 + lane);
        }
        done = ring_position(a, done + __shfl_sync(FULL_WARP, inclusive, 31));
    });
    __syncthreads();
    for_each_group(a, a.freed_groups, [&](i64 group) {
        if (lane == 0) a.freed[group * 32 + warp] = 0;
    });
    __syncthreads();
    const i64 count = (static_cast<i64>(a.capacity) >> 15) + 1;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) a.freed_groups[i] = 0;
}

// Ends one call of `free`: 1,024 threads, since each warp has a word of a group. `error_base` of a group's later
// calls is in num_tokens.
__device__ __forceinline__ void settle(const Args& a) {
    __shared__ i64 w[STATE_WORDS];
    load_words(a, w);
    settle_touched(a, w);
    if (threadIdx.x == 0) {
        begin_op(a, w);
        const i64 lowest = w[BREACH];
        if (lowest != NO_BREACH) {
            record(a, w, static_cast<int>(lowest & 255), a.num_tokens + (lowest >> 8), a.seq.at(lowest >> 8));
            w[BREACH] = NO_BREACH;
        }
        end_op(w, STATUS_OK);
    }
    if (a.push) push_freed(a, w);
    post(a, w);
}

extern "C" __global__ void __launch_bounds__(1024) settle_slots(const __grid_constant__ Args a) { settle(a); }

// Few slots: one launch.
extern "C" __global__ void __launch_bounds__(1024) free_slots_small(const __grid_constant__ Args a) {
    for (i64 i = threadIdx.x; i < a.n; i += blockDim.x) mark_slot(a, i);
    __syncthreads();
    settle(a);
}

// One reference less in every slot of the pages that an op has pushed, never below zero.
__device__ __forceinline__ void lower_slot_refs(const Args& a, i64 first, i64 pages) {
    __syncthreads();
    for (i64 k = threadIdx.x; k < pages * a.page_size; k += blockDim.x) {
        const i64 page = a.free_ring[ring_position(a, first + div_page(a, k))];
        int* refs = a.slot_refs + page * a.page_size + k - div_page(a, k) * a.page_size;
        if (*refs > 0) *refs -= 1;
    }
}

// ---- free by page: one owner an entry, pages in the order of the entries ---------------------------------------

// Entries given as an array. For a segment they are slots of page-aligned tokens; num_tokens is what divides them.
struct GivenEntries {
    const Args& a;

    __device__ __forceinline__ i64 count() const { return a.n; }
    __device__ __forceinline__ i64 value(i64 e) const { return a.seq.at(e); }
    __device__ __forceinline__ i64 index(i64 e) const { return e; }
    __device__ __forceinline__ i64 page(i64 e) const {
        const i64 entry = a.seq.at(e);
        return a.num_tokens == 1 || entry < 0 ? entry : div_page(a, entry);
    }
};

// Entries in table rows: pages [begin, end) of each request, laid out one after the other by the plan.
struct RowEntries {
    const Args& a;
    i64 total;

    __device__ __forceinline__ i64 count() const { return total; }
    __device__ __forceinline__ i64 index(i64 e) const { return request_of<i64>(a.plan_tokens, e, 0, a.n - 1); }
    __device__ __forceinline__ i64 value(i64 e) const {
        const i64 i = index(e);
        const i64 nth = a.plan_pages[i] + e - a.plan_tokens[i];
        const i64 row = a.rows.at(i);
        if (row == a.pad_row) return a.seq.at(nth);  // of a queue: entries that were given as an array
        return a.table[row * a.table_stride + (a.table_pages ? nth : nth * a.page_size)];
    }
    __device__ __forceinline__ i64 page(i64 e) const {
        const i64 entry = value(e);
        return a.table_pages || entry < 0 ? entry : div_page(a, entry);
    }
};

// Gives back what was taken too often: the last entries of each page that has gone below zero. One thread, since
// only a broken contract leads here. Returns the lowest such entry.
template <typename Entries>
__device__ __forceinline__ i64 undo_excess(const Args& a, i64 num_pages, const Entries& entries) {
    i64 lowest = entries.count();
    for (i64 e = entries.count() - 1; e >= 0; --e) {
        const i64 page = entries.page(e);
        if (!is_page(page, num_pages) || a.ref_count[page] >= 0) continue;
        a.ref_count[page] += 1;
        lowest = e;
    }
    return lowest;
}

// A page is pushed at its lowest entry, if no owner is left.
template <typename Entries>
__device__ __forceinline__ bool pushes(const Args& a, i64 num_pages, const Entries& entries, i64 e) {
    if (e >= entries.count()) return false;
    const i64 page = entries.page(e);
    return is_page(page, num_pages) && a.first_index[page] == e && a.ref_count[page] == 0;
}

// The whole op, by one block, up to its mail. `w` has been loaded.
template <typename Entries>
__device__ __forceinline__ void free_entries(const Args& a, i64* w, const Entries& entries) {
    __shared__ i64 carry[2][32], breach, first;
    __shared__ int unshared;
    const i64 n = entries.count(), num_pages = w[NUM_PAGES];
    if (threadIdx.x == 0) {
        breach = NO_BREACH;
        unshared = 0;
    }
    __syncthreads();
    for (i64 e = threadIdx.x; e < n; e += blockDim.x) {
        const i64 page = entries.page(e);
        if (a.kind == KIND_FREE_QUEUE && page == SKIPPED_PAGE) continue;
        if (!is_page(page, num_pages))
            breach_at(&breach, e, BREACH_RANGE);
        else if (a.ref_count[page] == 0)
            breach_at(&breach, e, BREACH_DOUBLE_FREE);
        else
            atomicMin(&a.first_index[page], static_cast<int>(e));
    }
    __syncthreads();
    int excess = 0;
    for (i64 e = threadIdx.x; e < n; e += blockDim.x) {
        const i64 page = entries.page(e);
        if (!is_page(page, num_pages) || a.first_index[page] == INT32_LARGEST) continue;
        const int owners = atomicSub(&a.ref_count[page], 1);
        if (owners == 2) atomicAdd(&unshared, 1);
        excess |= owners <= 0;
    }
    if (__syncthreads_or(excess)) {
        if (threadIdx.x == 0) breach_at(&breach, undo_excess(a, num_pages, entries), BREACH_DOUBLE_FREE);
        __syncthreads();
    }
    i64 mine = 0;
    for (i64 e = threadIdx.x; e < n; e += blockDim.x) mine += pushes(a, num_pages, entries, e);
    i64 total;
    block_exclusive(mine, carry[0], total);
    if (threadIdx.x == 0) {
        begin_op(a, w);
        if (breach != NO_BREACH) {
            const i64 e = breach >> 8;
            record(a, w, static_cast<int>(breach & 255), entries.index(e), entries.value(e));
        }
        w[SHARED] -= unshared;
        first = give_pages(a, w, total);
        end_op(w, STATUS_OK);
    }
    __syncthreads();
    i64 done = first;
    int turn = 1;
    for (i64 base = 0; base < n; base += blockDim.x, turn ^= 1) {
        const i64 e = base + threadIdx.x;
        const bool push = pushes(a, num_pages, entries, e);
        i64 tile;
        const i64 rank = block_exclusive(push, carry[turn], tile);
        if (push) a.free_ring[ring_position(a, done + rank)] = static_cast<int>(entries.page(e));
        done = ring_position(a, done + tile);
    }
    __syncthreads();
    for (i64 e = threadIdx.x; e < n; e += blockDim.x) {
        const i64 page = entries.page(e);
        if (is_page(page, num_pages)) atomicExch(&a.first_index[page], INT32_LARGEST);
    }
    if (a.slot_refs) lower_slot_refs(a, first, total);
}

extern "C" __global__ void __launch_bounds__(1024) free_page_ids(const __grid_constant__ Args a) {
    __shared__ i64 w[STATE_WORDS];
    load_words(a, w);
    __syncthreads();
    free_entries(a, w, GivenEntries{a});
    post(a, w);
}

// ---- free by table row ------------------------------------------------------------------------------------------

// Pages [begin, end) of request i in its row, and what is wrong with it. A queue says them itself; a trim frees what
// lies past the new length, the boundary page only if none of its tokens stays.
__device__ __forceinline__ int row_range(const Args& a, i64 i, i64& begin, i64& end, i64& value) {
    const i64 row = a.rows.at(i);
    begin = end = 0;
    if (a.kind == KIND_FREE_QUEUE) {
        begin = a.prefix.at(i);
        end = a.last.at(i);
        return BREACH_NONE;
    }
    if (row == a.pad_row) return BREACH_NONE;
    value = row;
    if (!row_in_table(a, row)) return BREACH_ROW;
    const i64 seq = a.seq.at(i), keep = a.kind == KIND_TRIM ? a.prefix.at(i) : 0;
    value = keep < 0 || keep > seq ? keep : seq;
    if (!lengths_hold(keep, seq)) return BREACH_LENGTH;
    if (!columns_in_table(a, seq)) return BREACH_COLUMN;
    begin = up_pages(a, keep);
    end = up_pages(a, seq);
    return BREACH_NONE;
}

// All or nothing: a row or column out of the table refuses the whole op.
extern "C" __global__ void __launch_bounds__(1024) free_rows(const __grid_constant__ Args a) {
    __shared__ i64 w[STATE_WORDS], carry[2][32], breach;
    load_words(a, w);
    if (threadIdx.x == 0) breach = NO_BREACH;
    __syncthreads();
    i64 total = 0;
    int turn = 0;
    for (i64 base = 0; base < a.n; base += blockDim.x, turn ^= 1) {
        const i64 i = base + threadIdx.x;
        i64 begin = 0, end = 0, value;
        if (i < a.n) {
            const int found = row_range(a, i, begin, end, value);
            if (found != BREACH_NONE) breach_at(&breach, i, found);
        }
        i64 tile;
        const i64 at = total + block_exclusive(end - begin, carry[turn], tile);
        if (i < a.n) {
            a.plan_tokens[i] = static_cast<int>(at);
            a.plan_pages[i] = static_cast<int>(begin);
        }
        total += tile;
    }
    __syncthreads();
    if (breach == NO_BREACH && total <= INT32_LARGEST) {
        free_entries(a, w, RowEntries{a, total});
    } else if (threadIdx.x == 0) {
        begin_op(a, w);
        if (breach != NO_BREACH) {
            i64 begin, end, value;
            row_range(a, breach >> 8, begin, end, value);
            record(a, w, static_cast<int>(breach & 255), breach >> 8, value);
        } else {
            record(a, w, BREACH_SUM, WHOLE_BATCH, total);
        }
        w[REFUSALS] += 1;
        end_op(w, STATUS_REFUSED);
    }
    post(a, w);
}

// One owner more for the page of each entry.
extern "C" __global__ void __launch_bounds__(1024) retain_page_ids(const __grid_constant__ Args a) {
    __shared__ i64 w[STATE_WORDS], breach;
    __shared__ int shared;
    load_words(a, w);
    if (threadIdx.x == 0) {
        breach = NO_BREACH;
        shared = 0;
    }
    __syncthreads();
    for (i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
        const i64 page = a.seq.at(i);
        if (!is_page(page, w[NUM_PAGES]))
            breach_at(&breach, i, BREACH_RANGE);
        else if (static_cast<volatile int*>(a.ref_count)[page] == 0)  // owners only grow here
            breach_at(&breach, i, BREACH_FREE_PAGE);
        else if (atomicAdd(&a.ref_count[page], 1) == 1)
            atomicAdd(&shared, 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        begin_op(a, w);
        if (breach != NO_BREACH) record(a, w, static_cast<int>(breach & 255), breach >> 8, a.seq.at(breach >> 8));
        w[SHARED] += shared;
        end_op(w, STATUS_OK);
    }
    post(a, w);
}
