// Allocation: one block plans (validates, scans, decides all or nothing, commits), a second kernel writes slots.
#include "common.cuh"

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

__device__ __forceinline__ Request load_request(const Args& a, i64 i) {
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
    if (!a.table) {
        r.last = a.last.at(i);
        return r;
    }
    r.row = a.rows.at(i);
    r.last = -1;
    r.padding = r.row == a.pad_row;
    if (r.padding) {
        // whatever its lengths say: no pages, and as many tokens as they leave room for in the output
        i64 tokens = r.seq - r.prefix;
        if (!lengths_hold(r.prefix, r.seq)) tokens = a.kind == KIND_DECODE_STEP;
        r.prefix = 0;
        r.seq = tokens;
    } else if (row_in_table(a, r.row) && lengths_hold(r.prefix, r.seq) && columns_in_table(a, r.seq) && r.prefix > 0 &&
               r.seq > r.prefix) {
        r.last = last_in_table(a, r.row, r.prefix);
    }
    return r;
}

__device__ __forceinline__ i64 new_pages(const Args& a, const Request& r) {
    return r.padding ? 0 : up_pages(a, r.seq) - up_pages(a, r.prefix);
}

// Room left in the request's last page that this op writes.
__device__ __forceinline__ i64 old_page_tokens(const Args& a, const Request& r) {
    const i64 room_ends = up_pages(a, r.prefix) * a.page_size;
    return (r.seq < room_ends ? r.seq : room_ends) - r.prefix;
}

// The breach of one request, or BREACH_NONE; `carry_on` where the classic kernels' behaviour harms nobody.
__device__ __forceinline__ int breach_of(const Args& a, const Request& r, bool& carry_on) {
    carry_on = false;
    if (r.padding) return BREACH_NONE;
    if (a.table && !row_in_table(a, r.row)) return BREACH_ROW;
    if (!lengths_hold(r.prefix, r.seq)) return BREACH_LENGTH;
    if (a.table && !columns_in_table(a, r.seq)) return BREACH_COLUMN;
    const i64 tokens = old_page_tokens(a, r);
    if (tokens == 0) return BREACH_NONE;
    if (r.last < 0) return BREACH_RANGE;
    const i64 page = div_page(a, r.last);
    if (!is_page(a, page)) return BREACH_RANGE;
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
__device__ __forceinline__ bool decide(const Args& a, i64 pages, i64 tokens, i64 first_breach, bool refused) {
    i64* w = a.words;
    begin_op(a);
    int status = STATUS_OK;
    if (a.quiet && pages > w[FREE]) {
        status = STATUS_SHORT;  // told as None, whatever else is wrong
    } else if (first_breach != NO_BREACH) {
        const i64 index = first_breach >> 8;
        const int breach = static_cast<int>(first_breach & 255);
        record(a, breach, index, breach_value(load_request(a, index), breach));
        if (refused) status = STATUS_REFUSED;
    }
    if (status == STATUS_OK && tokens != a.num_tokens) {
        record(a, BREACH_SUM, WHOLE_BATCH, tokens);
        if (a.strict || tokens > a.num_tokens) status = STATUS_REFUSED;
    }
    if (status == STATUS_OK && pages > w[FREE]) {
        record(a, BREACH_SHORT, WHOLE_BATCH, pages);
        status = STATUS_SHORT;
    }
    if (status == STATUS_OK) {
        take_pages(a, pages);
        w[TOKENS] = tokens;
        w[RET] = (pages << 32) | (tokens & 0xffffffffLL);
    } else {
        w[REFUSALS] += 1;
        if (status == STATUS_REFUSED || !a.quiet) w[RET] = 0;
    }
    end_op(a, status);
    return status == STATUS_OK;
}

// Plans the batch in one block; returns whether it was granted. With at most ITEMS requests a thread, `pages_before`
// holds the new pages of the requests before each of this thread's.
template <int ITEMS>
__device__ __forceinline__ bool plan(const Args& a, i64 (&pages_before)[ITEMS]) {
    __shared__ i64 page_carry[2][32], token_carry[2][32], first_breach;
    __shared__ int refused, granted;
    if (threadIdx.x == 0) {
        first_breach = NO_BREACH;
        refused = 0;
    }
    __syncthreads();
    i64 pages_done = 0, tokens_done = 0;
    int turn = 0;
    for (i64 base = 0; base < a.n; base += static_cast<i64>(blockDim.x) * ITEMS, turn ^= 1) {
        const i64 first = base + static_cast<i64>(threadIdx.x) * ITEMS;
        Request r[ITEMS];
#pragma unroll
        for (int j = 0; j < ITEMS; ++j)
            if (first + j < a.n) r[j] = load_request(a, first + j);
        i64 pages[ITEMS], tokens[ITEMS], my_pages = 0, my_tokens = 0;
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            pages[j] = tokens[j] = 0;
            if (first + j >= a.n) continue;
            bool carry_on;
            const int breach = breach_of(a, r[j], carry_on);
            if (breach != BREACH_NONE) {
                atomicMin(&first_breach, ((first + j) << 8) | breach);
                if (!carry_on) atomicExch(&refused, 1);
            }
            if (lengths_hold(r[j].prefix, r[j].seq)) {
                pages[j] = new_pages(a, r[j]);
                tokens[j] = r[j].seq - r[j].prefix;
            }
            my_pages += pages[j];
            my_tokens += tokens[j];
        }
        i64 pages_sum, tokens_sum;
        i64 page_at = pages_done + block_exclusive(my_pages, page_carry[turn], pages_sum);
        i64 token_at = tokens_done + block_exclusive(my_tokens, token_carry[turn], tokens_sum);
#pragma unroll
        for (int j = 0; j < ITEMS; ++j) {
            pages_before[j] = page_at;
            if (first + j < a.n) {
                a.plan_pages[first + j] = static_cast<int>(page_at);
                a.plan_tokens[first + j] = static_cast<int>(token_at);
            }
            page_at += pages[j];
            token_at += tokens[j];
        }
        pages_done += pages_sum;
        tokens_done += tokens_sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) granted = decide(a, pages_done, tokens_done, first_breach, refused);
    __syncthreads();
    return granted;
}

// The slot of token j of a request whose new pages start at `pages_before` in this op's share of the ring.
__device__ __forceinline__ i64 slot_of(const Args& a, const Request& r, i64 pages_before, i64 j) {
    const i64 old_tokens = old_page_tokens(a, r);
    if (j < old_tokens) return r.last + 1 + j;
    const i64 k = j - old_tokens;
    const i64 nth = div_page(a, k);
    const i64 offset = k - nth * a.page_size;
    const int page = a.free_ring[ring_position(a, a.words[FIRST] + pages_before + nth)];
    if (offset == 0) a.ref_count[page] = 1;
    return static_cast<i64>(page) * a.page_size + offset;
}

// Writes token j of a request to the output, and to its table row where it has one.
__device__ __forceinline__ void write_token(const Args& a, i64 at, const Request& r, i64 pages_before, i64 j) {
    if (r.padding) {
        put_slot(a, at, 0);
        return;
    }
    const i64 slot = slot_of(a, r, pages_before, j);
    put_slot(a, at, slot);
    if (!a.table) return;
    const i64 token = r.prefix + j;
    int* cell = a.table + r.row * a.table_stride + cell_of(a, token);
    if (!a.table_pages)
        *cell = static_cast<int>(slot);
    else if (token - div_page(a, token) * a.page_size == 0)
        *cell = static_cast<int>(div_page(a, slot));
}

// Small batches: plan and write in the same block. A decode's thread has its request's one token.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) alloc_small(const Args a) {
    i64 pages_before[1];
    const bool granted = plan<1>(a, pages_before);
    if (a.kind == KIND_DECODE || a.kind == KIND_DECODE_STEP) {
        const i64 i = threadIdx.x;
        if (i < a.n && granted) write_token(a, i, load_request(a, i), pages_before[0], 0);
        if (i < a.n && !granted) put_slot(a, i, a.refused_slot);
    } else {
        const i64 tokens = granted ? a.words[TOKENS] : 0;
        for (i64 t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
            if (t < tokens) {
                const i64 i = request_of(a.plan_tokens, t, 0, a.n - 1);
                write_token(a, t, load_request(a, i), a.plan_pages[i], t - a.plan_tokens[i]);
            } else {
                put_slot(a, t, a.refused_slot);
            }
        }
    }
    if (threadIdx.x < 32) post(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_requests(const Args a) {
    if (a.n <= PLAN_THREADS) {
        i64 pages_before[1];
        plan<1>(a, pages_before);
    } else {
        i64 pages_before[4];
        plan<4>(a, pages_before);
    }
    if (threadIdx.x < 32) post(a);
}

// A tile of the output a block, so that one long request is spread over the whole GPU.
extern "C" __global__ void __launch_bounds__(256) write_slots(const Args a) {
    __shared__ i64 low, high;
    const i64 begin = static_cast<i64>(blockIdx.x) * blockDim.x;
    const i64 granted = a.words[OK] ? a.words[TOKENS] : 0;
    const i64 end = begin + blockDim.x < granted ? begin + blockDim.x : granted;
    if (begin < end) {
        if (threadIdx.x == 0) low = request_of(a.plan_tokens, begin, 0, a.n - 1);
        if (threadIdx.x == 32) high = request_of(a.plan_tokens, end - 1, 0, a.n - 1);
    }
    __syncthreads();
    const i64 token = begin + threadIdx.x;
    if (token >= a.num_tokens) return;
    if (token >= granted) {
        put_slot(a, token, a.refused_slot);
        return;
    }
    const i64 i = request_of(a.plan_tokens, token, low, high);
    write_token(a, token, load_request(a, i), a.plan_pages[i], token - a.plan_tokens[i]);
}

// Whole pages for `alloc`: n pages, num_tokens = n * page_size slots.
extern "C" __global__ void __launch_bounds__(32) plan_pages(const Args a) {
    if (threadIdx.x == 0) decide(a, a.n, a.num_tokens, NO_BREACH, false);
    post(a);
}

extern "C" __global__ void __launch_bounds__(256) write_pages(const Args a) {
    const i64 token = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (token >= a.num_tokens) return;
    const Request whole = {0, a.num_tokens, -1, 0, false};
    put_slot(a, token, a.words[OK] ? slot_of(a, whole, 0, token) : a.refused_slot);
}
