// What every kernel of cupaged stands on: the argument struct, the pool's counters, the mailbox, block-wide scans.
// No headers are included: they are what makes NVRTC slow.
#pragma once

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int INT32_LARGEST = 2147483647;
constexpr i64 NO_BREACH = 9223372036854775807LL;
constexpr u32 FULL_WARP = 0xffffffffu;
constexpr i64 WHOLE_BATCH = -1;  // index of an error that no single entry made
constexpr i64 SKIPPED_PAGE = -(1LL << 62);  // a queue's entry that stands for nothing
constexpr int PLAN_THREADS = 1024;

// The pool's words, on the device and, posted by every op, in the mailbox. cupaged/layout.py has the same list. What
// the host looks at in every step comes first.
enum Word {
    HOST_OP,      // the host's number of the last eager op
    FREE,         // pages that an allocation may take
    STAGED,       // freed pages that wait behind them until a merge (need_sort)
    SHARED,       // pages with more than one owner
    STATUS,       // of the last op: STATUS_OK, STATUS_SHORT or STATUS_REFUSED
    ERROR_CODE,   // the recorded error: op kind << 8 | breach; 0 = none
    ERROR_OP,     // its op, as numbered by OP
    ERROR_INDEX,  // its index in that op's batch
    ERROR_VALUE,  // the offending value
    HEAD,         // position of the first free page in the ring, in [0, capacity)
    OP,           // ops that the device has run, graph replays included
    NUM_PAGES,    // pages in use since the last resize; at most `capacity`
    RET,          // of the last allocation: new pages << 32 | tokens
    OK,           // 1 if the last op was carried out: later kernels of a graph may read it
    REFUSALS,     // allocations that gave no page
    ALLOCATED,    // pages handed out, ever
    FREED,        // pages that came back, ever
    PEAK,         // most pages owned at one time
    FIRST,        // plan of the current allocation: ring position of its first page
    TOKENS,       // plan of the current allocation: tokens that get a slot
    NUM_WORDS,    // what the mailbox carries ends here
    BREACH = NUM_WORDS,  // lowest `index << 8 | breach` that the blocks of this op have seen
    PLAN_PAGES,   // sums over the blocks of a plan
    PLAN_TOKENS,
    PLAN_REFUSED,
    TICKET,       // blocks of a plan that have added theirs
    STATE_WORDS,
};

enum Status { STATUS_OK, STATUS_SHORT, STATUS_REFUSED };

enum Kind {
    KIND_ALLOC = 1,
    KIND_EXTEND,
    KIND_DECODE,
    KIND_FREE,
    KIND_FREE_PAGES,
    KIND_FREE_SEGMENT,
    KIND_RETAIN,
    KIND_CLEAR,
    KIND_BACKUP,
    KIND_RESTORE,
    KIND_REFRESH,
    KIND_DECODE_STEP,
    KIND_EXTEND_STEP,
    KIND_TRIM,
    KIND_RELEASE,
    KIND_FREE_QUEUE,
    KIND_KV_ALLOC,
    KIND_KV_BATCH,
};

enum Breach {
    BREACH_NONE,
    BREACH_SHORT,
    BREACH_LENGTH,
    BREACH_SUM,
    BREACH_MISALIGNED,
    BREACH_RANGE,
    BREACH_FREE_PAGE,
    BREACH_SHARED_PAGE,
    BREACH_DOUBLE_FREE,
    BREACH_ROW,
    BREACH_COLUMN,
};

enum Where { FRONT, BACK, STAGE };

// One-dimensional int32 or int64 argument with any stride; without data, `stride` is the value of every entry.
struct Vec {
    const char* data;
    i64 stride;  // bytes
    int wide;    // 1: int64
    int unused;

    __device__ __forceinline__ i64 at(i64 i) const { return data ? given(i) : stride; }

    __device__ __forceinline__ i64 given(i64 i) const {
        const char* p = data + i * stride;
        return wide ? *reinterpret_cast<const i64*>(p) : *reinterpret_cast<const int*>(p);
    }
};

struct Args {
    // the pool: the same in every launch
    int* free_ring;
    int* ref_count;
    int* first_index;   // lowest index among the entries of the free that runs; INT32_LARGEST between ops
    u32* touched;       // a bit a page, all 0 between ops
    u32* touched_groups;  // a bit for each 32 words of `touched`
    u32* freed;         // a bit a page: pages that lost their last owner and are not in the ring yet
    u32* freed_groups;
    i64* words;
    i64* mailbox;
    int* plan_tokens;   // first token of each request in the output, and where the last one's end
    int* plan_pages;    // new pages of the requests before
    i64 refused_slot;
    u64 slot_magic;     // divide a slot by page_size, see div_page
    int capacity;
    int page_size;
    int page_shift;     // log2(page_size), or -1
    u32 length_magic;   // divide a length by page_size
    int magic_shift;
    int unused;
    int wide_out;       // 1: slots are int64
    int strict;
    int need_sort;
    // this op
    i64 host_op;        // 0 while a graph is captured
    i64 error_ack;      // recorded errors up to this op are known to the host
    Vec prefix;
    Vec seq;
    Vec last;
    char* out;
    i64 num_tokens;
    i64 n;
    int kind;
    int quiet;          // 1: a short pool is an answer, not an error
    int where;
    int push;
    // its request table, if it has one
    int* table;
    i64 table_stride;   // elements between rows
    i64 table_rows;
    i64 table_cols;
    i64 pad_row;
    Vec rows;           // the table row of each request
    int* slot_refs;     // counts a slot that go down with its page, or null
    int table_pages;    // 1: cells are pages, 0: cells are slots
    int page_parts;     // kernel pages that a hand-off makes of a page
    // what a hand-off writes besides `out`
    i64 out_stride;     // elements between rows of `out`
    int* indptr;
    int* last_page_lens;
};

// ---- pages ---------------------------------------------------------------------------------------------------

// Division by multiplication (T. Granlund and P. L. Montgomery, "Division by Invariant Integers using Multiplication",
// PLDI 1994): a page size that is no power of two, with 2**l above it, has slot_magic = 2**(63 + l) / page_size + 1,
// length_magic = 2**(31 + l) / page_size + 1 and magic_shift = l - 1. A real division is a long piece of code, and a
// kernel this short pays for every line that it has to fetch.

// Page of a slot, which is not negative.
__device__ __forceinline__ i64 div_page(const Args& a, i64 slot) {
    if (a.page_shift >= 0) return slot >> a.page_shift;
    return static_cast<i64>(__umul64hi(static_cast<u64>(slot), a.slot_magic) >> a.magic_shift);
}

// Pages that n tokens fill, n in [0, 2**31).
__device__ __forceinline__ u32 full_pages(const Args& a, i64 n) {
    const u32 length = static_cast<u32>(n);
    return a.page_shift >= 0 ? length >> a.page_shift : __umulhi(length, a.length_magic) >> a.magic_shift;
}

// Place in its page of a request's token, or the tokens in its last page that are not all of it.
__device__ __forceinline__ u32 offset_of(const Args& a, i64 n) {
    return static_cast<u32>(n) - full_pages(a, n) * static_cast<u32>(a.page_size);
}

// Pages that n tokens touch.
__device__ __forceinline__ i64 up_pages(const Args& a, i64 n) { return full_pages(a, n) + (offset_of(a, n) != 0); }

// Position of a token's cell in its table row.
__device__ __forceinline__ i64 cell_of(const Args& a, i64 token) { return a.table_pages ? full_pages(a, token) : token; }

__device__ __forceinline__ bool row_in_table(const Args& a, i64 row) { return row >= 0 && row < a.table_rows; }

__device__ __forceinline__ bool columns_in_table(const Args& a, i64 seq) {
    return seq == 0 || cell_of(a, seq - 1) < a.table_cols;
}

__device__ __forceinline__ bool lengths_hold(i64 prefix, i64 seq) {
    return prefix >= 0 && seq >= prefix && seq <= INT32_LARGEST;
}

// Last request in [low, high] that begins at or before `at` in the plan; requests with nothing lie before it.
template <typename I>
__device__ __forceinline__ I request_of(const int* begins, I at, I low, I high) {
    while (low < high) {
        const I middle = (low + high + 1) >> 1;
        if (static_cast<I>(begins[middle]) <= at)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

template <typename I>
__device__ __forceinline__ I ring_position(const Args& a, I i) {
    const I capacity = static_cast<I>(a.capacity);
    return i >= capacity ? i - capacity : i;
}

__device__ __forceinline__ void put_slot(const Args& a, i64 i, i64 slot) {
    if (a.wide_out)
        reinterpret_cast<i64*>(a.out)[i] = slot;
    else
        reinterpret_cast<int*>(a.out)[i] = static_cast<int>(slot);
}

// ---- block-wide sums -----------------------------------------------------------------------------------------

__device__ __forceinline__ i64 warp_inclusive(i64 x) {
    const int lane = threadIdx.x & 31;
    for (int d = 1; d < 32; d <<= 1) {
        i64 y = __shfl_up_sync(FULL_WARP, x, d);
        if (lane >= d) x += y;
    }
    return x;
}

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL_WARP, x);
#else
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(FULL_WARP, x, d);
    return x;
#endif
}

// Exclusive prefix sum over the block, whose size is a multiple of 32; `total` gets the sum. `carry` is scratch of
// one value a warp, free to be written again once every thread has returned and met another barrier.
__device__ __forceinline__ i64 block_exclusive(i64 x, i64* carry, i64& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const i64 inclusive = warp_inclusive(x);
    if (lane == 31) carry[warp] = inclusive;
    __syncthreads();
    const i64 mine = lane < warps ? carry[lane] : 0;
    const i64 sums = warp_inclusive(mine);
    total = __shfl_sync(FULL_WARP, sums, 31);
    const i64 before = __shfl_sync(FULL_WARP, sums - mine, warp);
    return before + inclusive - x;
}

// The same for two values, in place, with one barrier.
__device__ __forceinline__ void block_exclusive(i64& x, i64& y, i64 (*carry)[32], i64& total_x, i64& total_y) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const i64 inclusive_x = warp_inclusive(x), inclusive_y = warp_inclusive(y);
    if (lane == 31) {
        carry[0][warp] = inclusive_x;
        carry[1][warp] = inclusive_y;
    }
    __syncthreads();
    const i64 mine_x = lane < warps ? carry[0][lane] : 0, mine_y = lane < warps ? carry[1][lane] : 0;
    const i64 sums_x = warp_inclusive(mine_x), sums_y = warp_inclusive(mine_y);
    total_x = __shfl_sync(FULL_WARP, sums_x, 31);
    total_y = __shfl_sync(FULL_WARP, sums_y, 31);
    x = __shfl_sync(FULL_WARP, sums_x - mine_x, warp) + inclusive_x - x;
    y = __shfl_sync(FULL_WARP, sums_y - mine_y, warp) + inclusive_y - y;
}

// ---- clusters ------------------------------------------------------------------------------------------------

// Blocks of a cluster run at the same time and reach each other's shared memory. Compute capability 9.0.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTERS
constexpr int MOST_BLOCKS = 8;  // that a cluster can have on every GPU that has clusters

__device__ __forceinline__ void cluster_sync() {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}

// A number that each block tells all blocks of its cluster, which is the whole grid. A barrier of the cluster would
// do, but one that orders memory waits for the whole GPU and empties the cache; a message orders just itself. What a
// thread has read before, and made the number of, is read.
struct Exchange {
    u64 messages;
    int told[MOST_BLOCKS];

    __device__ __forceinline__ void begin() {
#ifdef __CUDA_ARCH__
        if (threadIdx.x == 0)
            asm volatile(
                "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
                "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n\t"
                "fence.mbarrier_init.release.cluster;" ::"r"(address(&messages)), "r"(4 * gridDim.x)
                : "memory"
            );
#endif
        __cluster_barrier_arrive_relaxed();
    }

    // Until all have begun. Every thread, before the first one tells.
    __device__ __forceinline__ void open() { __cluster_barrier_wait(); }

    // One warp.
    __device__ __forceinline__ void tell(int number) {
        const u32 there = threadIdx.x & 31;
        if (there >= gridDim.x) return;
#ifdef __CUDA_ARCH__
        u32 cell, barrier;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(cell) : "r"(address(&told[blockIdx.x])), "r"(there));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(address(&messages)), "r"(there));
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(cell),
                     "r"(number), "r"(barrier)
                     : "memory");
#else
        *static_cast<int*>(__cluster_map_shared_rank(&told[blockIdx.x], there)) = number;
#endif
    }

    // Until all have told. Every thread.
    __device__ __forceinline__ void hear() {
#ifdef __CUDA_ARCH__
        u32 heard;
        do asm volatile("{\n\t"
                        ".reg .pred p;\n\t"
                        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\t"
                        "selp.u32 %0, 1, 0, p;\n\t"
                        "}"
                        : "=r"(heard)
                        : "r"(address(&messages))
                        : "memory");
        while (!heard);
#else
        cluster_sync();
#endif
    }

#ifdef __CUDA_ARCH__
    static __device__ __forceinline__ u32 address(const void* p) {
        return static_cast<u32>(__cvta_generic_to_shared(p));
    }
#endif
};
#endif

// ---- ops, errors, mail ---------------------------------------------------------------------------------------
// The one block that commits an op works on a copy `w` of the words in shared memory.

// Past L1, where an earlier load may have left what other blocks have changed since.
__device__ __forceinline__ void load_words(const Args& a, i64* w) {
    if (threadIdx.x < STATE_WORDS) w[threadIdx.x] = static_cast<volatile i64*>(a.words)[threadIdx.x];
}

// The warp that keeps the words, lane L word L: the last one, which in small batches has no request.
__device__ __forceinline__ int word_lane() { return static_cast<int>(threadIdx.x) - static_cast<int>(blockDim.x) + 32; }

// Keeps a word and posts it to the host, in lane L word L. Half a word goes in the low half of each cell,
// the op's number in the high half: cells are written whole, and a host that finds one number in all that it reads has
// read one op's mail, with no fence on this side.
__device__ __forceinline__ void post_word(const Args& a, int lane, i64 word, i64 op, bool changed = true) {
    if (changed && lane < STATE_WORDS) a.words[lane] = word;
    if (lane < NUM_WORDS) {
        const i64 number = op << 32;
        volatile i64* mail = a.mailbox;
        mail[lane] = number | (word & 0xffffffffLL);
        mail[NUM_WORDS + lane] = number | (word >> 32 & 0xffffffffLL);
    }
}

// The same for words in shared memory: the first warp, once thread 0 has ended the op.
__device__ __forceinline__ void post(const Args& a, const i64* w) {
    if (threadIdx.x >= 32) return;
    __syncwarp();
    post_word(a, threadIdx.x, threadIdx.x < STATE_WORDS ? w[threadIdx.x] : 0, w[OP]);
}

// Starts an op: thread 0.
__device__ __forceinline__ void begin_op(const Args& a, i64* w) {
    w[OP] += 1;
    if (a.host_op) w[HOST_OP] = a.host_op;
    if (w[ERROR_CODE] && w[ERROR_OP] <= a.error_ack) w[ERROR_CODE] = 0;
}

// Ops come in order, so the first error that stands is the one with the lowest op.
__device__ __forceinline__ void record(const Args& a, i64* w, int breach, i64 index, i64 value) {
    if (w[ERROR_CODE]) return;
    w[ERROR_CODE] = (a.kind << 8) | breach;
    w[ERROR_OP] = w[OP];
    w[ERROR_INDEX] = index;
    w[ERROR_VALUE] = value;
}

__device__ __forceinline__ void end_op(i64* w, int status) {
    w[STATUS] = status;
    w[OK] = status == STATUS_OK;
}

__device__ __forceinline__ bool is_page(i64 page, i64 num_pages) { return page >= 1 && page <= num_pages; }

// Position in the ring of the first of `pages` that come back, and their count: thread 0. Staged pages and pages at
// the back lie behind the free ones, where no allocation moves anything.
__device__ __forceinline__ i64 give_pages(const Args& a, i64* w, i64 pages) {
    w[FREED] += pages;
    if (a.where == FRONT) {
        w[HEAD] = w[HEAD] >= pages ? w[HEAD] - pages : w[HEAD] - pages + a.capacity;
        w[FREE] += pages;
        return w[HEAD];
    }
    const i64 first = ring_position(a, w[HEAD] + w[FREE] + w[STAGED]);
    w[a.where == BACK ? FREE : STAGED] += pages;
    return first;
}
