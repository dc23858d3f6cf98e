// Allocation: plan (validate, scan, decide all or nothing, commit), then write slots. Decodes and small extends do both
// in one launch; for the others a second kernel writes, so that no block commits what another still reads.
#include "common.cuh"

constexpr int WRITE_THREADS = 256;
constexpr int SCAN_REQUESTS = 4096;  // that `extend_at_once` can plan

struct Request {
    i64 prefix, seq, last, row;
    bool padding;
};

// Slot of a request's last cached token as its table tells it; the caller has checked row and columns.
__device__ __forceinline__ i64 last_in_table(const Args& a, i64 row, i64 prefix) {
    const i64 cell = a.table[row * a.table_stride + cell_of(a, prefix - 1)];
    if (!a.table_pages || cell < 0) return cell;
    return cell * a.page_size + offset_of(a, prefix - 1);
}

__device__ __forceinline__ bool one_token_each(const Args& a) {
    return a.kind == KIND_DECODE || a.kind == KIND_DECODE_STEP;
}

// A request from its entries, `entry` being its row where there is a table, else its last slot.
__device__ __forceinline__ Request make_request(const Args& a, i64 prefix, i64 seq, i64 entry) {
    Request r = {prefix, seq, entry, 0, false};
    if (a.kind == KIND_DECODE)
        r.prefix = seq - (seq > -INT32_LARGEST);
    else if (a.kind == KIND_DECODE_STEP)
        r.prefix = seq, r.seq += seq < INT32_LARGEST + 1LL;
    if (!a.table) return r;
    r.last = -1;
    r.row = entry;
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

// A request's lengths and row; its last slot is not looked up.
__device__ __forceinline__ Request load_lengths(const Args& a, i64 i) {
    const i64 prefix = one_token_each(a) ? 0 : a.prefix.at(i), seq = a.seq.at(i);
    return make_request(a, prefix, seq, a.table ? a.rows.at(i) : -1);
}

// All entries are asked for before any is looked at.
__device__ __forceinline__ Request load_request(const Args& a, i64 i) {
    const i64 prefix = one_token_each(a) ? 0 : a.prefix.at(i), seq = a.seq.at(i);
    Request r = make_request(a, prefix, seq, a.table ? a.rows.at(i) : a.last.at(i));
    if (a.table && !r.padding && row_in_table(a, r.row) && lengths_hold(r.prefix, r.seq) &&
        columns_in_table(a, r.seq) && r.prefix > 0 && r.seq > r.prefix)
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

// The breach of one request, or BREACH_NONE; `carry_on` where the classic kernels' behaviour harms nobody. The owners
// of its last page are asked for at once, before it is clear that they matter.
__device__ __forceinline__ int breach_of(const Args& a, i64 num_pages, const Request& r, bool& carry_on) {
    carry_on = false;
    const i64 page = r.last < 0 ? 0 : div_page(a, r.last);
    const bool owned_page = is_page(page, num_pages);
    const int owners = owned_page ? a.ref_count[page] : 0;
    if (r.padding) return BREACH_NONE;
    if (a.table && !row_in_table(a, r.row)) return BREACH_ROW;
    if (!lengths_hold(r.prefix, r.seq)) return BREACH_LENGTH;
    if (a.table && !columns_in_table(a, r.seq)) return BREACH_COLUMN;
    const i64 tokens = old_page_tokens(a, r);
    if (tokens == 0) return BREACH_NONE;
    if (!owned_page) return BREACH_RANGE;
    const i64 next = r.last + 1 - page * a.page_size;
    if (owners == 1 && next == offset_of(a, r.prefix)) return BREACH_NONE;
    if (owners == 0) return BREACH_FREE_PAGE;
    if (owners > 1) return BREACH_SHARED_PAGE;
    carry_on = !a.strict && next + tokens <= a.page_size;
    return BREACH_MISALIGNED;
}

// Whether a request has no breach, without a word about which: what every request pays. Finds its last slot in its
// table row, if it has one, and asks for that page's owners before it is clear that they matter.
template <bool TABLE>
__device__ __forceinline__ bool is_fine(const Args& a, i64 num_pages, Request& r) {
    const bool holds = lengths_hold(r.prefix, r.seq);
    bool reachable = true;
    if (TABLE) {
        reachable = holds && row_in_table(a, r.row) && columns_in_table(a, r.seq);
        if (!r.padding && reachable && r.prefix > 0 && r.seq > r.prefix) r.last = last_in_table(a, r.row, r.prefix);
    }
    const i64 page = r.last < 0 ? 0 : div_page(a, r.last);
    int owners = 0;
    if (is_page(page, num_pages)) owners = a.ref_count[page];
    if (r.padding) return true;
    if (!holds || !reachable) return false;
    const u32 offset = offset_of(a, r.prefix);
    return offset == 0 || r.seq == r.prefix || (owners == 1 && r.last + 1 - page * a.page_size == offset);
}

__device__ __forceinline__ i64 breach_value(const Request& r, int breach) {
    if (breach == BREACH_ROW) return r.row;
    return breach == BREACH_LENGTH || breach == BREACH_COLUMN ? r.seq : r.last;
}

// What a plan comes to. `breach` is recorded, whatever the status.
struct Outcome {
    int status, breach;
    i64 index, value;
};

// Of a plan that did not simply go well. Not inlined: what is seldom needed must not be fetched.
__device__ __noinline__ Outcome outcome_in_trouble(
    const Args& a, i64 free, i64 pages, i64 tokens, i64 first_breach, bool refused
) {
    Outcome o = {STATUS_OK, BREACH_NONE, WHOLE_BATCH, 0};
    if (a.quiet && pages > free) {
        o.status = STATUS_SHORT;  // told as None, whatever else is wrong
        return o;
    }
    if (first_breach != NO_BREACH) {
        o.index = first_breach >> 8;
        o.breach = static_cast<int>(first_breach & 255);
        o.value = breach_value(load_request(a, o.index), o.breach);
        if (refused) o.status = STATUS_REFUSED;
    }
    if (o.status == STATUS_OK && tokens != a.num_tokens) {
        if (o.breach == BREACH_NONE) o.breach = BREACH_SUM, o.value = tokens;
        if (a.strict || tokens > a.num_tokens) o.status = STATUS_REFUSED;
    }
    if (o.status == STATUS_OK && pages > free) {
        if (o.breach == BREACH_NONE) o.breach = BREACH_SHORT, o.value = pages;
        o.status = STATUS_SHORT;
    }
    return o;
}

// All or nothing: from the whole plan's sums, before any state has changed.
__device__ __forceinline__ Outcome outcome_of(
    const Args& a, i64 free, i64 pages, i64 tokens, i64 first_breach, bool refused
) {
    if (first_breach != NO_BREACH || tokens != a.num_tokens || pages > free)
        return outcome_in_trouble(a, free, pages, tokens, first_breach, refused);
    return {STATUS_OK, BREACH_NONE, WHOLE_BATCH, 0};
}

// What every thread knows of the pool before an allocation. Lane L of the last warp also holds word L.
struct Before {
    i64 head, free, num_pages, word;
};

__device__ __forceinline__ Before load_before(const Args& a) {
    Before b = {a.words[HEAD], a.words[FREE], a.words[NUM_PAGES], 0};
    const int lane = word_lane();
    if (lane >= 0 && lane < NUM_WORDS) b.word = a.words[lane];
    return b;
}

// Changes the words and posts them: the last warp, each lane its own word, since one thread would take them in turn.
__device__ __forceinline__ void commit(const Args& a, const Before& b, const Outcome& o, i64 pages, i64 tokens) {
    const int lane = word_lane();
    if (lane < 0) return;
    i64 word = b.word;
    const i64 staged = __shfl_sync(FULL_WARP, word, STAGED);
    const i64 op = __shfl_sync(FULL_WARP, word, OP) + 1;
    const bool told = __shfl_sync(FULL_WARP, word, ERROR_OP) <= a.error_ack;
    const bool free_to_record = told || __shfl_sync(FULL_WARP, word, ERROR_CODE) == 0;
    const bool ok = o.status == STATUS_OK;
    if (lane == OP) word = op;
    if (lane == HOST_OP && a.host_op) word = a.host_op;
    if (lane == STATUS) word = o.status;
    if (lane == OK) word = ok;
    if (lane == ERROR_CODE && told) word = 0;
    if (o.breach != BREACH_NONE && free_to_record) {
        if (lane == ERROR_CODE) word = (a.kind << 8) | o.breach;
        if (lane == ERROR_OP) word = op;
        if (lane == ERROR_INDEX) word = o.index;
        if (lane == ERROR_VALUE) word = o.value;
    }
    if (ok) {
        const i64 free = b.free - pages, owned = b.num_pages - free - staged;
        if (lane == FREE) word = free;
        if (lane == HEAD) word = ring_position(a, b.head + pages);
        if (lane == ALLOCATED) word += pages;
        if (lane == PEAK && owned > word) word = owned;
        if (lane == FIRST) word = b.head;
        if (lane == TOKENS) word = tokens;
        if (lane == RET) word = (pages << 32) | (tokens & 0xffffffffLL);
    } else {
        if (lane == REFUSALS) word += 1;
        if (lane == RET && (o.status == STATUS_REFUSED || !a.quiet)) word = 0;
    }
    if (lane >= NUM_WORDS) word = lane == BREACH ? NO_BREACH : 0;
    __syncwarp();  // every lane has read the words
    post_word(a, lane, word, op);
}

// The breaches of a block's requests, in shared memory.
struct Breaches {
    i64 first;  // lowest `index << 8 | breach`
    int refused;
};

__device__ __forceinline__ void begin_breaches(Breaches& breaches) {
    if (threadIdx.x == 0) breaches = {NO_BREACH, 0};
}

__device__ __forceinline__ void add_breach(Breaches& breaches, i64 i, int breach, bool carry_on) {
    atomicMin(&breaches.first, (i << 8) | breach);
    if (!carry_on) atomicExch(&breaches.refused, 1);
}

__device__ __noinline__ void find_breach(const Args& a, i64 num_pages, i64 i, Breaches& breaches) {
    bool carry_on;
    const int breach = breach_of(a, num_pages, load_request(a, i), carry_on);
    if (breach != BREACH_NONE) add_breach(breaches, i, breach, carry_on);
}

// The pages at the front that an allocation gets: in the ring from `first` on, the first `fetched` in shared memory too.
struct Front {
    i64 first;
    const int* pages;
    int fetched;
    bool take;  // count the owner of a page where its first token is written

    __device__ __forceinline__ int at(const Args& a, i64 rank) const {
        return rank < fetched ? pages[rank] : a.free_ring[ring_position(a, first + rank)];
    }
};

// Of a batch without a table: where tokens of the request that begins at `begin` go. Its token `t - begin` lies in its
// page `nth`; those below `owned` it had before.
struct Run {
    i64 begin, end, pages_before, i;
    u32 prefix, owned;

    __device__ __forceinline__ Run(const Args& a, i64 i, u32 prefix, i64 begin, i64 end, i64 pages_before)
        : begin(begin), end(end), pages_before(pages_before), i(i), prefix(prefix) {
        owned = static_cast<u32>(up_pages(a, prefix));
    }

    // The slot of token t, and how many from there on lie in one page.
    __device__ __forceinline__ i64 slot(const Args& a, const Front& front, i64 t, u32& room) const {
        const u32 position = prefix + static_cast<u32>(t - begin), nth = full_pages(a, position);
        const u32 offset = position - nth * static_cast<u32>(a.page_size);
        room = static_cast<u32>(a.page_size) - offset;
        if (nth < owned) return a.last.at(i) + 1 + (t - begin);
        return page_begin(a, front, nth, offset == 0) + offset;
    }

    __device__ __forceinline__ i64 page_begin(const Args& a, const Front& front, u32 nth, bool first_token) const {
        const int page = front.at(a, pages_before + (nth - owned));
        if (front.take && first_token) a.ref_count[page] = 1;
        return static_cast<i64>(page) * a.page_size;
    }
};

struct alignas(16) TwoSlots {
    i64 x, y;
};

struct alignas(16) FourSlots {
    int x, y, z, w;
};

// Slots of tokens t to t + 3 of one run, t a multiple of 4; false if they do not lie in it and in at most two pages.
__device__ __forceinline__ bool write_four(const Args& a, const Front& front, const Run& run, i64 t) {
    if (t + 4 > run.end || a.page_size < 4 || (reinterpret_cast<u64>(a.out) & 15)) return false;
    u32 room;
    i64 s[4];
    s[0] = run.slot(a, front, t, room);
    i64 next = 0;
    if (room < 4) {
        const u32 nth = full_pages(a, run.prefix + (t - run.begin) + room);
        next = run.page_begin(a, front, nth, true) - room;
    }
#pragma unroll
    for (u32 k = 1; k < 4; ++k) s[k] = (k < room ? s[0] : next) + k;
    if (a.wide_out) {
        TwoSlots* out = reinterpret_cast<TwoSlots*>(reinterpret_cast<i64*>(a.out) + t);
        out[0] = {s[0], s[1]};
        out[1] = {s[2], s[3]};
    } else {
        *reinterpret_cast<FourSlots*>(reinterpret_cast<int*>(a.out) + t) = {
            static_cast<int>(s[0]), static_cast<int>(s[1]), static_cast<int>(s[2]), static_cast<int>(s[3])
        };
    }
    return true;
}

// The slot of token j of a request.
__device__ __forceinline__ i64 slot_of(const Args& a, const Request& r, const Front& front, i64 pages_before, i64 j) {
    const i64 old_tokens = old_page_tokens(a, r);
    if (j < old_tokens) return r.last + 1 + j;
    const i64 k = j - old_tokens, offset = offset_of(a, k);
    const int page = front.at(a, pages_before + full_pages(a, k));
    if (front.take && offset == 0) a.ref_count[page] = 1;
    return static_cast<i64>(page) * a.page_size + offset;
}

// Writes a token's slot, or the page that it begins, to the request's table row.
__device__ __forceinline__ void write_cell(const Args& a, const Request& r, i64 token, i64 slot) {
    int* cell = a.table + r.row * a.table_stride + cell_of(a, token);
    if (!a.table_pages)
        *cell = static_cast<int>(slot);
    else if (offset_of(a, token) == 0)
        *cell = static_cast<int>(div_page(a, slot));
}

// Writes token j of a request to the output, and to its table row where it has one.
__device__ __forceinline__ void write_token(const Args& a, i64 at, const Request& r, i64 j, i64 slot) {
    if (r.padding) {
        put_slot(a, at, 0);
        return;
    }
    put_slot(a, at, slot);
    if (a.table) write_cell(a, r, r.prefix + j, slot);
}

__device__ __forceinline__ void add_word(const Args& a, int word, i64 value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&a.words[word]), static_cast<unsigned long long>(value));
}

__device__ __forceinline__ i64 word_now(const Args& a, int word) { return static_cast<volatile i64*>(a.words)[word]; }

// Adds to a counter of the whole device: what this thread knows of is before it for all who add later.
__device__ __forceinline__ u64 take_ticket(u64* ticket, u64 value) {
#ifdef __CUDA_ARCH__
    u64 before;
    asm volatile("atom.add.acq_rel.gpu.u64 %0, [%1], %2;" : "=l"(before) : "l"(ticket), "l"(value) : "memory");
    return before;
#else
    __threadfence();
    const u64 before = atomicAdd(ticket, value);
    __threadfence();
    return before;
#endif
}

// What the last block to come finds: its own breaches and the other blocks'. False in all blocks before; what they
// wrote and read is then behind the last.
__device__ __forceinline__ bool last_block(const Args& a, Breaches& breaches) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        u64 mine = 1;
        if (breaches.first != NO_BREACH) {
            mine += 1ULL << 32;
            atomicMin(&a.words[BREACH], breaches.first);
            if (breaches.refused) add_word(a, PLAN_REFUSED, 1);
        }
        const u64 before = take_ticket(reinterpret_cast<u64*>(&a.words[TICKET]), mine);
        last = static_cast<u32>(before) + 1 == gridDim.x;
        if (last && (before + mine) >> 32) breaches = {word_now(a, BREACH), word_now(a, PLAN_REFUSED) != 0};
    }
    __syncthreads();
    return last;
}

// Ends an op whose blocks have written their slots as if no other block would find a breach. State that the others
// validate against, reference counts too, changes only here.
__device__ __forceinline__ void conclude(const Args& a, const Before& b, Breaches& breaches, i64 pages, i64 tokens) {
    int page = 0;
    if (threadIdx.x < pages && pages <= b.free) page = a.free_ring[ring_position(a, b.head + threadIdx.x)];
    if (!last_block(a, breaches)) return;
    const Outcome o = outcome_of(a, b.free, pages, tokens, breaches.first, breaches.refused);
    commit(a, b, o, pages, tokens);
    if (o.status == STATUS_OK) {
        if (threadIdx.x < pages) a.ref_count[page] = 1;
        for (i64 k = threadIdx.x + blockDim.x; k < pages; k += blockDim.x)
            a.ref_count[a.free_ring[ring_position(a, b.head + k)]] = 1;
    } else if (breaches.first != NO_BREACH) {  // of which not every block knew
        for (i64 t = threadIdx.x; t < a.num_tokens; t += blockDim.x) put_slot(a, t, a.refused_slot);
    }
}

// Decode, a request a thread, in one launch. One block knows all before it writes. Several (WIDE) read all lengths,
// each for itself, and write as if the others found no breach: `conclude` takes it back. No table then, whose cells
// could not be taken back, and `out` must not be an argument.
template <bool TABLE, bool WIDE>
__device__ __forceinline__ void decode(const Args& a) {
    __shared__ int pages[PLAN_THREADS], takers[32], takers_before[32], takers_elsewhere[32];
    __shared__ Breaches breaches;
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, warps = blockDim.x >> 5;
    const i64 base = WIDE ? static_cast<i64>(blockIdx.x) * PLAN_THREADS : 0, i = base + thread;
    const bool mine = i < a.n;

    // All that needs no answer is asked for first, without a branch: the batch is not empty.
    const i64 at = mine ? i : 0;
    const i64 seq = a.seq.given(at), entry = TABLE ? a.rows.given(at) : a.last.given(at);
    const Before b = load_before(a);
    begin_breaches(breaches);
    const int fetched = WIDE ? 0 : blockDim.x < a.capacity ? blockDim.x : a.capacity;
    int front = 0;
    if (thread < fetched) front = a.free_ring[ring_position(a, b.head + thread)];

    Request r = {seq - (seq > -INT32_LARGEST), seq, entry, entry, false};
    if (TABLE) {
        r.padding = entry == a.pad_row;
        r.prefix = r.padding ? 0 : seq;
        r.seq = r.padding ? 1 : seq < INT32_LARGEST + 1LL ? seq + 1 : seq;
        r.last = -1;
    }
    const bool fine = is_fine<TABLE>(a, b.num_pages, r) || !mine;
    // whatever else is wrong with it: a quiet launch tells of a short pool first
    const bool takes = mine && !r.padding && lengths_hold(r.prefix, r.seq) && offset_of(a, r.prefix) == 0;
    const u32 taking = __ballot_sync(FULL_WARP, takes);

    if (WIDE) {
        int earlier = 0, elsewhere = 0;
#pragma unroll 4
        for (i64 j = thread; j < a.n; j += PLAN_THREADS) {
            const i64 other = a.seq.given(j);
            const int taken = other > 0 && other <= INT32_LARGEST && offset_of(a, other - 1) == 0;
            if (j < base)
                earlier += taken;
            else if (j >= base + PLAN_THREADS)
                elsewhere += taken;
        }
        earlier = warp_sum(earlier);
        elsewhere = warp_sum(elsewhere);
        if (lane == 0) {
            takers_before[warp] = earlier;
            takers_elsewhere[warp] = earlier + elsewhere;
        }
    }
    if (lane == 0) takers[warp] = __popc(taking);
    if (thread < fetched) pages[thread] = front;
    const bool odd = __syncthreads_or(!fine);

    int before = __popc(taking & ((1u << lane) - 1));
    const int here = lane < warps ? takers[lane] : 0;
    i64 total = warp_sum(here);
    before += warp_sum(lane < warp ? here : 0);
    if (WIDE) {
        before += warp_sum(takers_before[lane]);
        total += warp_sum(takers_elsewhere[lane]);
    }
    if (odd) {
        if (!fine) find_breach(a, b.num_pages, i, breaches);
        __syncthreads();
    }
    const Outcome o = outcome_of(a, b.free, total, a.n, breaches.first, breaches.refused);
    if (odd) __syncthreads();  // all have read the offending value, before `out`, which may be last_loc, is written
    if (!WIDE) commit(a, b, o, total, a.n);
    if (mine) {
        i64 slot = r.last + 1;
        if (o.status != STATUS_OK) {
            slot = a.refused_slot;
        } else if (TABLE && r.padding) {
            slot = 0;
        } else {
            if (takes) {
                const int page = WIDE ? a.free_ring[ring_position(a, b.head + before)] : pages[before];
                if (!WIDE) a.ref_count[page] = 1;
                slot = static_cast<i64>(page) * a.page_size;
            }
            if (TABLE) write_cell(a, r, r.prefix, slot);
        }
        put_slot(a, i, slot);
    }
    if (WIDE) conclude(a, b, breaches, total, a.n);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_small(const __grid_constant__ Args a) {
    decode<false, false>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_step_small(const __grid_constant__ Args a) {
    decode<true, false>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) decode_wide(const __grid_constant__ Args a) {
    decode<false, true>(a);
}

// Tokens of an extend are cut to one too many, and pages with them: sums of what is cut stay below 2**32, and a batch
// with too many is found out by its sum.
__device__ __forceinline__ i64 pages_and_tokens(const Args& a, const Request& r) {
    const i64 too_many = a.num_tokens + 1, pages = new_pages(a, r), tokens = new_tokens(r);
    return (pages < too_many ? pages : too_many) << 32 | (tokens < too_many ? tokens : too_many);
}

// The exact sums over the batch.
__device__ __noinline__ void sum_lengths(const Args& a, i64& pages, i64& tokens) {
    __shared__ i64 carry[2][32];
    i64 my_pages = 0, my_tokens = 0;
    for (i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
        const Request r = load_lengths(a, i);
        my_pages += new_pages(a, r);
        my_tokens += new_tokens(r);
    }
    block_exclusive(my_pages, my_tokens, carry, pages, tokens);
}

// Slots of tokens t to t + 3, and `refused_slot` for those that are not granted, of a batch without a table, whose
// requests begin at `begins`.
__device__ __forceinline__ void write_tokens(
    const Args& a, const Front& front, const int* begins, const int* pages_before, i64 granted, i64 t
) {
    i64 i = t < granted ? request_of(begins, t, 0, a.n - 1) : 0;
    for (i64 k = t; k < t + 4 && k < a.num_tokens; ++k) {
        if (k >= granted) {
            put_slot(a, k, a.refused_slot);
            continue;
        }
        while (i + 1 < a.n && begins[i + 1] <= k) ++i;
        const u32 prefix = static_cast<u32>(a.prefix.given(i));
        const Run run(a, i, prefix, begins[i], i + 1 < a.n ? begins[i + 1] : granted, pages_before[i]);
        if (k == t && write_four(a, front, run, t)) return;
        u32 room;
        put_slot(a, k, run.slot(a, front, k, room));
    }
}

// Extend by one block, a request a thread: the whole of it (WRITE), or only the plan, for `write_slots`.
template <bool TABLE, bool WRITE>
__device__ __forceinline__ void extend(const Args& a) {
    __shared__ int begins[PLAN_THREADS], pages_before[PLAN_THREADS], pages[PLAN_THREADS];
    __shared__ i64 carry[32];
    __shared__ Breaches breaches;
    const int i = threadIdx.x;
    const bool mine = i < a.n;

    const i64 at = mine ? i : 0;
    const i64 prefix = TABLE ? a.prefix.at(at) : a.prefix.given(at), seq = TABLE ? a.seq.at(at) : a.seq.given(at);
    const i64 entry = TABLE ? a.rows.at(at) : a.last.given(at);
    const Before b = load_before(a);
    begin_breaches(breaches);
    const int fetched = !WRITE ? 0 : blockDim.x < a.capacity ? blockDim.x : a.capacity;
    if (i < fetched) pages[i] = a.free_ring[ring_position(a, b.head + i)];

    Request r = {prefix, seq, entry, 0, false};
    if (TABLE) r = make_request(a, prefix, seq, entry);
    const bool fine = is_fine<TABLE>(a, b.num_pages, r) || !mine;
    i64 all;
    const i64 before = block_exclusive(mine ? pages_and_tokens(a, r) : 0, carry, all);
    begins[i] = static_cast<int>(before & 0xffffffffLL);
    pages_before[i] = static_cast<int>(before >> 32);
    const bool odd = __syncthreads_or(!fine);
    if (odd) {
        if (!fine) find_breach(a, b.num_pages, i, breaches);
        __syncthreads();
    }
    i64 total = all >> 32, tokens = all & 0xffffffffLL;
    if (tokens > a.num_tokens) sum_lengths(a, total, tokens);
    const Outcome o = outcome_of(a, b.free, total, tokens, breaches.first, breaches.refused);
    if (odd) __syncthreads();  // all have read the offending value, before the table is written
    commit(a, b, o, total, tokens);
    const i64 granted = o.status == STATUS_OK ? tokens : 0;
    const Front front = {b.head, pages, fetched, true};
    if constexpr (!WRITE) {
        if (mine) {
            a.plan_tokens[i] = begins[i];
            a.plan_pages[i] = pages_before[i];
        }
    } else if constexpr (!TABLE) {
        for (i64 t = 4 * i; t < a.num_tokens; t += 4 * blockDim.x)
            write_tokens(a, front, begins, pages_before, granted, t);
    } else {
        for (i64 t = i; t < a.num_tokens; t += blockDim.x) {
            if (t >= granted) {
                put_slot(a, t, a.refused_slot);
                continue;
            }
            const i64 k = request_of(begins, t, 0, a.n - 1), j = t - begins[k];
            const Request q = load_request(a, k);
            write_token(a, t, q, j, q.padding ? 0 : slot_of(a, q, front, pages_before[k], j));
        }
    }
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) extend_small(const __grid_constant__ Args a) {
    extend<false, true>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) extend_step_small(const __grid_constant__ Args a) {
    extend<true, true>(a);
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_small(const __grid_constant__ Args a) {
    extend<false, false>(a);
}

// Extend without a table in one launch, up to SCAN_REQUESTS requests, a tile of the output a block. As in `decode`,
// each block plans the whole batch, validates a share of it and writes as if all went well.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) extend_wide(const __grid_constant__ Args a) {
    __shared__ int begins[SCAN_REQUESTS], pages_before[SCAN_REQUESTS];
    __shared__ i64 carry[32];
    __shared__ Breaches breaches;
    const i64 share = (a.n + gridDim.x - 1) / gridDim.x, from = share * blockIdx.x;
    const i64 to = from + share < a.n ? from + share : a.n;
    const Before b = load_before(a);
    begin_breaches(breaches);
#pragma unroll 2
    for (i64 i = threadIdx.x; i < a.n; i += blockDim.x) {
        const i64 sums = pages_and_tokens(a, {a.prefix.given(i), a.seq.given(i), -1, 0, false});
        begins[i] = static_cast<int>(sums & 0xffffffffLL);
        pages_before[i] = static_cast<int>(sums >> 32);
    }
    bool fine = true;
    for (i64 i = from + threadIdx.x; i < to; i += blockDim.x) {
        Request r = {a.prefix.given(i), a.seq.given(i), a.last.given(i), 0, false};
        fine = is_fine<false>(a, b.num_pages, r) && fine;
    }
    __syncthreads();
    const int each = static_cast<int>((a.n + blockDim.x - 1) / blockDim.x), first = threadIdx.x * each;
    i64 sums = 0;
    for (int i = first; i < first + each && i < a.n; ++i)
        sums += static_cast<i64>(pages_before[i]) << 32 | static_cast<u32>(begins[i]);
    i64 all, before = block_exclusive(sums, carry, all);
    for (int i = first; i < first + each && i < a.n; ++i) {
        const i64 mine = static_cast<i64>(pages_before[i]) << 32 | static_cast<u32>(begins[i]);
        begins[i] = static_cast<int>(before & 0xffffffffLL);
        pages_before[i] = static_cast<int>(before >> 32);
        before += mine;
    }
    if (__syncthreads_or(!fine)) {
        if (!fine)
            for (i64 i = from + threadIdx.x; i < to; i += blockDim.x) find_breach(a, b.num_pages, i, breaches);
        __syncthreads();
    }
    i64 total = all >> 32, tokens = all & 0xffffffffLL;
    if (tokens > a.num_tokens) sum_lengths(a, total, tokens);
    const Outcome o = outcome_of(a, b.free, total, tokens, breaches.first, breaches.refused);
    const Front front = {b.head, nullptr, 0, false};
    const i64 t = 4 * (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x);
    write_tokens(a, front, begins, pages_before, o.status == STATUS_OK ? tokens : 0, t);
    conclude(a, b, breaches, total, tokens);
}

// What a block finds out about its share of the batch, one request a thread.
struct Share {
    i64 pages_before, tokens_before;  // of the whole batch's requests before this thread's
    i64 pages, tokens;                // sums of the block's share
};

// The share that begins at request `base`. Lengths of all requests before it are read again: up to tens of thousands
// that costs less than waiting for other blocks.
__device__ __forceinline__ Share plan_share(const Args& a, i64 num_pages, i64 base, Breaches& breaches) {
    __shared__ i64 carry[2][32], carry_earlier[2][32];
    begin_breaches(breaches);
    const i64 i = base + threadIdx.x;
    Request r = {0, 0, -1, 0, true};
    if (i < a.n) r = load_request(a, i);
    i64 earlier_pages = 0, earlier_tokens = 0;
#pragma unroll 2
    for (i64 j = threadIdx.x; j < base; j += PLAN_THREADS) {
        const Request q = load_lengths(a, j);
        earlier_pages += new_pages(a, q);
        earlier_tokens += new_tokens(q);
    }
    // a table's last slots are found already
    const bool fine = is_fine<false>(a, num_pages, r) &&
                      (!a.table || r.padding || (row_in_table(a, r.row) && columns_in_table(a, r.seq)));
    Share share;
    share.pages_before = new_pages(a, r);
    share.tokens_before = new_tokens(r);
    block_exclusive(share.pages_before, share.tokens_before, carry, share.pages, share.tokens);
    if (base > 0) {
        i64 pages, tokens;
        block_exclusive(earlier_pages, earlier_tokens, carry_earlier, pages, tokens);
        share.pages_before += pages;
        share.tokens_before += tokens;
    }
    if (!fine) find_breach(a, num_pages, i, breaches);
    if (i < a.n) {
        a.plan_pages[i] = static_cast<int>(share.pages_before);
        a.plan_tokens[i] = static_cast<int>(share.tokens_before);
    }
    return share;
}

// A block for each 1,024 requests; the last one to add its sums decides for all.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_requests(const __grid_constant__ Args a) {
    __shared__ Breaches breaches;
    const Before b = load_before(a);
    Share share = plan_share(a, b.num_pages, static_cast<i64>(blockIdx.x) * PLAN_THREADS, breaches);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) {
            add_word(a, PLAN_PAGES, share.pages);
            add_word(a, PLAN_TOKENS, share.tokens);
        }
        if (!last_block(a, breaches)) return;
    } else {
        __syncthreads();
    }
    if (word_lane() < 0) return;
    if (gridDim.x > 1) {
        share.pages = word_now(a, PLAN_PAGES);
        share.tokens = word_now(a, PLAN_TOKENS);
    }
    const Outcome o = outcome_of(a, b.free, share.pages, share.tokens, breaches.first, breaches.refused);
    commit(a, b, o, share.pages, share.tokens);
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

// A tile of the output a block, so that one long request is spread over the whole GPU. Its tokens belong to request
// `low` and later ones, of which the next TILE_REQUESTS are looked up in shared memory.
constexpr int TILE_REQUESTS = 2 * WRITE_THREADS;

struct Tile {
    i64 begin, granted, low, high;

    __device__ __forceinline__ Tile(const Args& a, i64 tokens) : begin(blockIdx.x * tokens), low(0), high(a.n - 1) {
        granted = a.words[OK] ? a.words[TOKENS] : 0;
        if (a.n <= TILE_REQUESTS) return;
        if (begin < granted) low = request_of_block(a, begin);
        if (low + TILE_REQUESTS <= high) high = low + TILE_REQUESTS - 1;
    }

    __device__ __forceinline__ i64 request(const Args& a, const int* begins, i64 token) const {
        const i64 i = low + request_of(begins, token, 0, high - low);
        return i == high && high < a.n - 1 ? request_of(a.plan_tokens, token, high, a.n - 1) : i;
    }
};

extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_slots(const __grid_constant__ Args a) {
    __shared__ int begins[TILE_REQUESTS], pages_before[TILE_REQUESTS];
    __shared__ u32 prefixes[TILE_REQUESTS];
    const Front front = {a.words[FIRST], nullptr, 0, true};
    const Tile tile(a, 4 * WRITE_THREADS);
    for (i64 i = tile.low + threadIdx.x; i <= tile.high; i += WRITE_THREADS) {
        begins[i - tile.low] = a.plan_tokens[i];
        pages_before[i - tile.low] = a.plan_pages[i];
        prefixes[i - tile.low] = static_cast<u32>(a.prefix.given(i));
    }
    __syncthreads();
    const i64 t = tile.begin + 4 * threadIdx.x;
    for (i64 k = t; k < t + 4 && k < a.num_tokens; ++k) {
        if (k >= tile.granted) {
            put_slot(a, k, a.refused_slot);
            continue;
        }
        const i64 i = tile.request(a, begins, k), at = i - tile.low, next = i + 1;
        i64 end = tile.granted;
        if (next < a.n) end = next <= tile.high ? begins[at + 1] : a.plan_tokens[next];
        const bool near = i <= tile.high;
        const Run run(
            a, i, near ? prefixes[at] : static_cast<u32>(a.prefix.given(i)), near ? begins[at] : a.plan_tokens[i], end,
            near ? pages_before[at] : a.plan_pages[i]
        );
        if (k == t && write_four(a, front, run, t)) break;
        u32 room;
        put_slot(a, k, run.slot(a, front, k, room));
    }
}

// The same for steps, which write a table, and for decodes.
extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_step(const __grid_constant__ Args a) {
    __shared__ int begins[TILE_REQUESTS];
    const Front front = {a.words[FIRST], nullptr, 0, true};
    const bool one_each = one_token_each(a);
    const Tile tile(a, WRITE_THREADS);
    for (i64 i = tile.low + threadIdx.x; i <= tile.high && !one_each; i += WRITE_THREADS)
        begins[i - tile.low] = a.plan_tokens[i];
    __syncthreads();
    const i64 token = tile.begin + threadIdx.x;
    if (token >= a.num_tokens) return;
    if (token >= tile.granted) {
        put_slot(a, token, a.refused_slot);
        return;
    }
    const i64 i = one_each ? token : tile.request(a, begins, token);
    const Request r = load_request(a, i);
    const i64 j = one_each ? 0 : token - a.plan_tokens[i];
    write_token(a, token, r, j, r.padding ? 0 : slot_of(a, r, front, a.plan_pages[i], j));
}

// Whole pages for `alloc`: n pages, num_tokens = n * page_size slots.
extern "C" __global__ void __launch_bounds__(32) plan_pages(const __grid_constant__ Args a) {
    const Before b = load_before(a);
    commit(a, b, outcome_of(a, b.free, a.n, a.num_tokens, NO_BREACH, false), a.n, a.num_tokens);
}

// Slot t of whole pages that begin at ring position `first`; more than 2**31 of them are fine.
__device__ __forceinline__ void write_page_slot(const Args& a, i64 first, i64 t) {
    const i64 nth = div_page(a, t), offset = t - nth * a.page_size;
    const int page = a.free_ring[ring_position(a, first + nth)];
    if (offset == 0) a.ref_count[page] = 1;
    put_slot(a, t, static_cast<i64>(page) * a.page_size + offset);
}

extern "C" __global__ void __launch_bounds__(WRITE_THREADS) write_pages(const __grid_constant__ Args a) {
    const i64 t = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (t >= a.num_tokens) return;
    if (a.words[OK])
        write_page_slot(a, a.words[FIRST], t);
    else
        put_slot(a, t, a.refused_slot);
}

// Few pages: one block, one launch.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS) alloc_pages_small(const __grid_constant__ Args a) {
    const Before b = load_before(a);
    const Outcome o = outcome_of(a, b.free, a.n, a.num_tokens, NO_BREACH, false);
    __syncthreads();  // all have read the words
    commit(a, b, o, a.n, a.num_tokens);
#pragma unroll 4
    for (i64 t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
        if (o.status == STATUS_OK)
            write_page_slot(a, b.head, t);
        else
            put_slot(a, t, a.refused_slot);
    }
}
