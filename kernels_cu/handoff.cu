// Hand-offs: what attention kernels read, made of a request table in one launch each. They change no state of the pool,
// so they are no ops: no number, no error, no mail. What cannot be read gives nothing: padding, and rows or lengths out
// of the table.
#include "common.cuh"

__device__ __forceinline__ bool readable(const Args& a, i64 row, i64 seq) {
    return row != a.pad_row && row_in_table(a, row) && lengths_hold(0, seq) && columns_in_table(a, seq);
}

// The nth page of a row, or the padding page where the cell names none of this pool.
__device__ __forceinline__ i64 page_in_table(const Args& a, i64 row, i64 nth) {
    const i64 cell = a.table[row * a.table_stride + (a.table_pages ? nth : nth * a.page_size)];
    const i64 page = a.table_pages ? cell : div_page(a, cell);
    return page >= 0 && page <= a.capacity ? page : 0;
}

__device__ __forceinline__ i64 slot_in_table(const Args& a, i64 row, i64 token) {
    i64 slot = a.table[row * a.table_stride + cell_of(a, token)];
    if (a.table_pages) slot = slot * a.page_size + offset_of(a, token);
    return slot >= 0 && slot < (a.capacity + 1LL) * a.page_size ? slot : -1;
}

// Entries of FlashInfer's kv_indices. What does not fit is cut off, as if the requests ended there.
struct Pages {
    static __device__ __forceinline__ i64 count(const Args& a, i64 i) {
        const i64 seq = a.seq.at(i);
        return readable(a, a.rows.at(i), seq) ? up_pages(a, seq) : 0;
    }

    static __device__ __forceinline__ void list(const Args& a, i64 i, i64 begin, i64 pages) {
        const i64 room = begin < a.num_tokens ? a.num_tokens - begin : 0;
        const i64 given = pages < room ? pages : room;
        i64 last = a.page_size;
        if (given == 0)
            last = 0;
        else if (given == pages)
            last = a.seq.at(i) - (pages - 1) * a.page_size;
        a.last_page_lens[i] = static_cast<int>(last);
        a.indptr[i + 1] = static_cast<int>(room > 0 ? begin + given : a.num_tokens);
    }

    static __device__ __forceinline__ void put(const Args& a, i64 at, i64 i, i64 nth) {
        reinterpret_cast<int*>(a.out)[at] = static_cast<int>(page_in_table(a, a.rows.at(i), nth));
    }

    static __device__ __forceinline__ void pad(const Args& a, i64 at) { reinterpret_cast<int*>(a.out)[at] = 0; }
};

// Entries of a slot mapping. A request that pads or cannot be read has as many as its lengths say.
struct Slots {
    static __device__ __forceinline__ i64 count(const Args& a, i64 i) {
        const i64 prefix = a.prefix.at(i), seq = a.seq.at(i);
        return lengths_hold(prefix, seq) ? seq - prefix : 0;
    }

    static __device__ __forceinline__ void list(const Args&, i64, i64, i64) {}

    static __device__ __forceinline__ void put(const Args& a, i64 at, i64 i, i64 nth) {
        const i64 row = a.rows.at(i);
        reinterpret_cast<i64*>(a.out)[at] =
            readable(a, row, a.seq.at(i)) ? slot_in_table(a, row, a.prefix.at(i) + nth) : -1;
    }

    static __device__ __forceinline__ void pad(const Args& a, i64 at) { reinterpret_cast<i64*>(a.out)[at] = -1; }
};

// Writes all entries, request after request. Each block writes an equal share of the output, whoever's it is, so that
// one long request is no slower than many short ones; to find its share it counts all requests up to there itself.
// Block 0 goes through all of them and lists where each begins.
template <class Entries>
__device__ __forceinline__ void write_ragged(const Args& a) {
    __shared__ int begins[PLAN_THREADS];
    __shared__ i64 carry[32];
    const i64 share = (a.num_tokens + gridDim.x - 1) / gridDim.x;
    const i64 low = blockIdx.x * share;
    const i64 high = low + share < a.num_tokens ? low + share : a.num_tokens;
    i64 done = 0;
    for (i64 base = 0; base < a.n && (done < high || blockIdx.x == 0); base += blockDim.x) {
        const i64 i = base + threadIdx.x;
        const i64 mine = i < a.n ? Entries::count(a, i) : 0;
        i64 tile;
        const i64 begin = done + block_exclusive(mine, carry, tile);
        begins[threadIdx.x] = static_cast<int>(begin < a.num_tokens ? begin : a.num_tokens);
        if (blockIdx.x == 0 && i < a.n) Entries::list(a, i, begin, mine);
        __syncthreads();
        const i64 last = (a.n - base < blockDim.x ? a.n - base : blockDim.x) - 1;
        const i64 first = done > low ? done : low;
        done += tile;
        const i64 end = done < high ? done : high;
        for (i64 at = first + threadIdx.x; at < end; at += blockDim.x) {
            const i64 r = request_of<i64>(begins, at, 0, last);
            Entries::put(a, at, base + r, at - begins[r]);
        }
    }
    for (i64 at = (done > low ? done : low) + threadIdx.x; at < high; at += blockDim.x) Entries::pad(a, at);
}

extern "C" __global__ void __launch_bounds__(1024) handoff_pages(const __grid_constant__ Args a) {
    if (blockIdx.x == 0 && threadIdx.x == 0) a.indptr[0] = 0;
    write_ragged<Pages>(a);
}

extern "C" __global__ void __launch_bounds__(1024) handoff_slots(const __grid_constant__ Args a) { write_ragged<Slots>(a); }

// A dense table, num_tokens wide, of pages cut into page_parts kernel pages each; 0 past a request's length.
extern "C" __global__ void __launch_bounds__(256) handoff_block_table(const __grid_constant__ Args a) {
    const i64 width = a.num_tokens, entry = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (entry >= a.n * width) return;
    const i64 i = entry >> 32 ? entry / width : static_cast<u32>(entry) / static_cast<u32>(width);
    const u32 nth = static_cast<u32>(entry - i * width), parts = a.page_parts;
    const i64 row = a.rows.at(i), seq = a.seq.at(i);
    i64 value = 0;
    if (readable(a, row, seq) && static_cast<i64>(nth) * (a.page_size / a.page_parts) < seq) {
        const u32 page = nth / parts;
        value = page_in_table(a, row, page) * parts + (nth - page * parts);
    }
    reinterpret_cast<int*>(a.out)[i * a.out_stride + nth] = static_cast<int>(value);
}

// Owners of each page that `seq` names, 0 for one that is free, -1 for what is no page of the pool.
extern "C" __global__ void __launch_bounds__(256) reference_counts(const __grid_constant__ Args a) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    const i64 page = a.seq.at(i);
    reinterpret_cast<int*>(a.out)[i] = is_page(page, a.words[NUM_PAGES]) ? a.ref_count[page] : -1;
}
