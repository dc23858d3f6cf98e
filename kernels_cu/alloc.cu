// Allocation: plan (validate, scan, decide all or nothing, commit), then write slots. Small batches do both in one
// block; for larger ones a second kernel writes, so that no block commits what another still reads.
#include "common.cuh"

constexpr int WRITE_THREADS = 256;

struct Request {
    i64 prefix, seq, last, row;
    bool padding;
};

// Slot of a request's last cached token as its table tells it; the caller has checked row and columns.
__device__ __forceinline__ i64 last_in_table(const Args& a, i64 row, i64 prefix) {
    const i64 cell = a.table[row * a.table_stride + cell_of(a, prefix - 1)];
    if (!a.table_pages || cell < 0) return cell;
    return cell * a.page_size + (prefix - 1) - div_page(a, prefix - 1) * a.page_size;
}

// A request's lengths and row; its last slot is not looked up.
__device__ __forceinline__ Request load_lengths(const Args& a, i64 i) {
    Request r;
    r.seq = a.seq.at(i);
    r.padding = false;
    r.row = 0;
    if (a.kind == KIND_DECODE)
        r.prefix = r.seq - (r.seq > -INT32_LARGEST);
    else if (a.kind == KIND_DECODE_STEP)
        r.prefix = r.seq, r.seq += r.seq < INT32_LARGEST + 1LL;
    else
        r.prefix = a.prefix.at(i);
    r.last = -1;
    if (!a.table) return r;
    r.row = a.rows.at(i);
    r.padding = r.row == a.pad_row;
    if (r.padding) {
        // whatever its lengths say: no pages, and as many tokens as they leave room for in the output
        i64 tokens = r.seq - r.prefix;
        if (!lengths_hold(r.prefix, r.seq)) tokens = a.kind == KIND_DECODE_STEP;
        r.prefix = 0;
        r.seq = tokens;
    }
    return r;
}

__device__ __forceinline__ Request load_request(const Args& a, i64 i) {
    Request r = load_lengths(a, i);
    if (!a.table)
        r.last = a.last.at(i);
    else if (!r.padding && row_in_table(a, r.row) && lengths_hold(r.prefix, r.seq) && columns_in_table(a, r.seq) &&
             r.prefix > 0 && r.seq > r.prefix)
        r.last = last_in_table(a, r.row, r.prefix);
    return r;
}

__device__ __forceinline__ i64 new_pages(const Args& a, const Request& r) {
    return r.padding || !lengths_hold(r.prefix, r.seq) ? 0 : up_pages(a, r.seq) - up_pages(a, r.prefix);
}

__device__ __forceinline__ i64 new_tokens(const Request& r) {
    return lengths_hold(r.prefix, r.seq) ? r.seq - r.prefix : 0;
}

// Room left in the request's last page that this op writes.
__device__ __forceinline__ i64 old_page_tokens(const Args& a, const Request& r) {
    const i64 room_ends = up_pages(a, r.prefix) * a.page_size;
    return (r.seq < room_ends ? r.seq : room_ends) - r.prefix;
}

// The breach of one request, or BREACH_NONE; `carry_on` where the classic kernels' behaviour harms nobody.
__device__ __forceinline__ int breach_of(const Args& a, i64 num_pages, const Request& r, bool& carry_on) {
    carry_on = false;
    if (r.padding) return BREACH_NONE;
    if (a.table && !row_in_table(a, r.row)) return BREACH_ROW;
    if (!lengths_hold(r.prefix, r.seq)) return BREACH_LENGTH;
    if (a.table && !columns_in_table(a, r.seq)) return BREACH_COLUMN;
    const i64 tokens = old_page_tokens(a, r);
    if (tokens == 0) return BREACH_NONE;
    if (r.last < 0) return BREACH_RANGE;
    const i64 page = div_page(a, r.last);
    if (!is_page(page, num_pages)) return BREACH_RANGE;
    const i64 next = r.last + 1 - page * a.page_size;
    const int owners = a.ref_count[page];
    if (owners == 0) return BREACH_FREE_PAGE;
    if (owners > 1) return BREACH_SHARED_PAGE;
    const i64 offset = r.prefix - div_page(a, r.prefix) * a.page_size;
    if (next != offset) {
        carry_on = !a.strict && next + tokens <= a.page_size;
        return BREACH_MISALIGNED;
    }
    return BREACH_NONE;
}

__device__ __forceinline__ i64 breach_value(const Request& r, int breach) {
    if (breach == BREACH_ROW) return r.row;
    return breach == BREACH_LENGTH || breach == BREACH_COLUMN ? r.seq : r.last;
}

// Thread 0 decides: all or nothing. The whole plan's sums come in; nothing has been written yet but scratch.
__device__ __forceinline__ void decide(const Args& a, i64* w, i64 pages, i64 tokens, i64 first_breach, bool refused) {
    begin_op(a, w);
    int status = STATUS_OK;
    if (a.quiet && pages > w[FREE]) {
        status = STATUS_SHORT;  // told as None, whatever else is wrong
    } else if (first_breach != NO_BREACH) {
        const i64 index = first_breach >> 8;
        const int breach = static_cast<int>(first_breach & 255);
        record(a, w, breach, index, breach_value(load_request(a, index), breach));
        if (refused) status = STATUS_REFUSED;
    }
    if (status == STATUS_OK && tokens != a.num_tokens) {
        record(a, w, BREACH_SUM, WHOLE_BATCH, tokens);
        if (a.strict || tokens > a.num_tokens) status = STATUS_REFUSED;
    }
    if (status == STATUS_OK && pages > w[FREE]) {
        record(a, w, BREACH_SHORT, WHOLE_BATCH, pages);
        status = STATUS_SHORT;
    }
    if (status == STATUS_OK) {
        take_pages(a, w, pages);
        w[TOKENS] = tokens;
        w[RET] = (pages << 32) | (tokens & 0xffffffffLL);
    } else {
        w[REFUSALS] += 1;
        if (status == STATUS_REFUSED || !a.quiet) w[RET] = 0;
    }
    end_op(w, status);
}

// What a block finds out about its share of the batch, one request a thread.
struct Share {
    i64 pages_before, tokens_before;  // of the whole batch's requests before this thread's
    i64 pages, tokens;                // sums of the block's share
    i64 breach;                       // lowest `index << 8 | breach` in it
    bool refused;
};

// The share that begins at request `base`. Lengths of all requests before it are read again: up to tens of thousands
// that costs less than waiting for other blocks.
__device__ __forceinline__ Share plan_share(const Args& a, i64 num_pages, i64 base) {
    __shared__ i64 carry[4][32], first_breach;
    __shared__ int refused;
    if (threadIdx.x == 0) {
        first_breach = NO_BREACH;
        refused = 0;
    }
    const i64 i = base + threadIdx.x;
    Request r = {0, 0, -1, 0, true};
    if (i < a.n) r = load_request(a, i);
    i64 earlier_pages = 0, earlier_tokens = 0;
#pragma unroll 4
    for (i64 j = threadIdx.x; j < base; j += PLAN_THREADS) {
        const Request q = load_lengths(a, j);
        earlier_pages += new_pages(a, q);
        earlier_tokens += new_tokens(q);
    }
    __syncthreads();
    bool carry_on;
    const int breach = breach_of(a, num_pages, r, carry_on);
    if (breach != BREACH_NONE) {
        atomicMin(&first_breach, (i << 8) | breach);
        if (!carry_on) atomicExch(&refused, 1);
    }
    Share share;
    share.pages_before = block_exclusive(new_pages(a, r), carry[0], share.pages);
    share.tokens_before = block_exclusive(new_tokens(r), carry[1], share.tokens);
    if (base > 0) {
        i64 pages, tokens;
        block_exclusive(earlier_pages, carry[2], pages);
        block_exclusive(earlier_tokens, carry[3], tokens);
        share.pages_before += pages;
        share.tokens_before += tokens;
    }
    if (i < a.n) {
        a.plan_pages[i] = static_cast<int>(share.pages_before);
        a.plan_tokens[i] = static_cast<int>(share.tokens_before);
    }
    share.breach = first_breach;  // the scans' barriers lie between
    share.refused = refused;
    return share;
}

// The slot of token j of a request whose new pages start `pages_before` behind ring position `first`. The first
// `fetched` pages there are in `pages` already.
__device__ __forceinline__ i64 slot_of(
    const Args& a, const Request& r, i64 first, i64 pages_before, i64 j, const int* pages, int fetched
) {
    const i64 old_tokens = old_page_tokens(a, r);
    if (j < old_tokens) return r.last + 1 + j;
    const i64 k = j - old_tokens;
    const i64 nth = div_page(a, k);
    const i64 offset = k - nth * a.page_size, at = pages_before + nth;
    const int page = at < fetched ? pages[at] : a.free_ring[ring_position(a, first + at)];
    if (offset == 0) a.ref_count[page] = 1;
    return static_cast<i64>(page) * a.page_size + offset;
}

// Writes token j of a request to the output, and to its table row where it has one.
__device__ __forceinline__ void write_token(const Args& a, i64 at, const Request& r, i64 j, i64 slot) {
    if (r.padding) {
        put_slot(a, at, 0);
        return;
    }
    put_slot(a, at, slot);
    if (!a.table) return;
    const i64 token = r.prefix + j;
    int* cell = a.table + r.row * a.table_stride + cell_of(a, token);
    if (!a.table_pages)
        *cell = static_cast<int>(slot);
    else if (token - div_page(a, token) * a.page_size == 0)
        *cell = static_cast<int>(div_page(a, slot));
}

// Small batches: plan and write in the same block. The pages that they may get are fetched while they are planned.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) alloc_small(const Args a) {
    __shared__ i64 w[STATE_WORDS];
    __shared__ int pages[PLAN_THREADS];
    load_words(a, w);
    const i64 num_pages = a.words[NUM_PAGES];
    const i64 head = a.words[HEAD];
    const int fetched = blockDim.x < a.capacity ? blockDim.x : a.capacity;
    if (threadIdx.x < fetched) pages[threadIdx.x] = a.free_ring[ring_position(a, head + threadIdx.x)];
    const Share share = plan_share(a, num_pages, 0);
    if (threadIdx.x == 0) decide(a, w, share.pages, share.tokens, share.breach, share.refused);
    __syncthreads();
    post(a, w);
    const i64 granted = w[OK] ? w[TOKENS] : 0;
    const bool one_each = a.kind == KIND_DECODE || a.kind == KIND_DECODE_STEP;
    for (i64 t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
        if (t >= granted) {
            put_slot(a, t, a.refused_slot);
            continue;
        }
        const i64 i = one_each ? t : request_of(a.plan_tokens, t, 0, a.n - 1);
        const i64 before = one_each ? share.pages_before : a.plan_pages[i];
        const i64 j = one_each ? 0 : t - a.plan_tokens[i];
        const Request r = load_request(a, i);
        write_token(a, t, r, j, r.padding ? 0 : slot_of(a, r, head, before, j, pages, fetched));
    }
}

__device__ __forceinline__ void add_word(const Args& a, int word, i64 value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.words[word]), static_cast<unsigned long long>(value));
}

// A block for each 1,024 requests; the last one to add its sums decides for all.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_requests(const Args a) {
    __shared__ i64 w[STATE_WORDS];
    __shared__ int last;
    const Share share = plan_share(a, a.words[NUM_PAGES], static_cast<i64>(blockIdx.x) * PLAN_THREADS);
    if (threadIdx.x == 0) {
        if (gridDim.x > 1) {
            add_word(a, PLAN_PAGES, share.pages);
            add_word(a, PLAN_TOKENS, share.tokens);
            if (share.breach != NO_BREACH) atomicMin(&a.words[BREACH], share.breach);
            if (share.refused) add_word(a, PLAN_REFUSED, 1);
            __threadfence();
            const u32 before = atomicAdd(reinterpret_cast<u32*>(&a.words[TICKET]), 1u);
            last = before + 1 == gridDim.x;
            __threadfence();
        } else {
            last = 1;
        }
    }
    __syncthreads();
    if (!last) return;
    load_words(a, w);
    __syncthreads();
    if (threadIdx.x == 0) {
        if (gridDim.x > 1)
            decide(a, w, w[PLAN_PAGES], w[PLAN_TOKENS], w[BREACH], w[PLAN_REFUSED]);
        else
            decide(a, w, share.pages, share.tokens, share.breach, share.refused);
        w[BREACH] = NO_BREACH;
        w[PLAN_PAGES] = w[PLAN_TOKENS] = w[PLAN_REFUSED] = w[TICKET] = 0;
    }
    post(a, w);
}

// Last request that begins at or before `token`: all threads of the block look at once, each at the end of its share
// of what is left, since a binary search would be a chain of loads.
__device__ __forceinline__ i64 request_of_block(const Args& a, i64 token) {
    i64 low = 0, count = a.n;
    while (count > 1) {
        const i64 share = (count + blockDim.x - 1) / blockDim.x;
        const i64 at = low + share * threadIdx.x;
        const int begun = __syncthreads_count(share * threadIdx.x < count && a.plan_tokens[at] <= token);
        const i64 skipped = share * (begun - 1);  // request `low` has always begun
        low += skipped;
        count = count - skipped < share ? count - skipped : share;
    }
    return low;
}

// A tile of the output a block, so that one long request is spread over the whole GPU.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_slots(const Args a) {
    __shared__ int begins[2 * WRITE_THREADS];
    const i64 begin = static_cast<i64>(blockIdx.x) * blockDim.x;
    const i64 granted = a.words[OK] ? a.words[TOKENS] : 0;
    const i64 end = begin + blockDim.x < granted ? begin + blockDim.x : granted;
    const bool one_each = a.kind == KIND_DECODE || a.kind == KIND_DECODE_STEP;
    i64 low = 0, high = 0;
    if (begin < end && !one_each) {
        low = request_of_block(a, begin);
        high = low + 2 * WRITE_THREADS <= a.n ? low + 2 * WRITE_THREADS - 1 : a.n - 1;
        // a tile's requests follow `low`, with only those in between that have no tokens
        for (i64 i = low + threadIdx.x; i <= high; i += blockDim.x) begins[i - low] = a.plan_tokens[i];
        __syncthreads();
    }
    const i64 token = begin + threadIdx.x;
    if (token >= a.num_tokens) return;
    if (token >= granted) {
        put_slot(a, token, a.refused_slot);
        return;
    }
    i64 i = token;
    if (!one_each) {
        i = low + request_of(begins, token, 0, high - low);
        if (i == high && high < a.n - 1) i = request_of(a.plan_tokens, token, high, a.n - 1);
    }
    const Request r = load_request(a, i);
    const i64 j = one_each ? 0 : token - a.plan_tokens[i];
    write_token(a, token, r, j, r.padding ? 0 : slot_of(a, r, a.words[FIRST], a.plan_pages[i], j, nullptr, 0));
}

// Whole pages for `alloc`: n pages, num_tokens = n * page_size slots.
extern "C" __global__ void __launch_bounds__(32) plan_pages(const Args a) {
    __shared__ i64 w[STATE_WORDS];
    load_words(a, w);
    __syncwarp();
    if (threadIdx.x == 0) decide(a, w, a.n, a.num_tokens, NO_BREACH, false);
    post(a, w);
}

extern "C" __global__ void __launch_bounds__(256) write_pages(const Args a) {
    const i64 token = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (token >= a.num_tokens) return;
    const Request whole = {0, a.num_tokens, -1, 0, false};
    put_slot(a, token, a.words[OK] ? slot_of(a, whole, a.words[FIRST], 0, token, nullptr, 0) : a.refused_slot);
}
