// The words of CUDA C, for a machine without a GPU: force-included ahead of the kernels, which are compiled as C++20.
// A block's threads are fibers, switched in runtime.cpp; this file has only what kernels name.
#pragma once
#include <cstdint>
#include <source_location>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

// Thread-local, so that blocks can run at the same time. ASan puts no red zones around thread-local storage, so its
// builds have a section of ordinary variables instead.
#ifdef CUDA_HOST_ASAN
#define __shared__ static __attribute__((section("cuda_shared")))
#else
#define __shared__ static thread_local
#endif

struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;

namespace cuda_host {

using Site = std::source_location;

struct Here {  // of the running thread
    uint3 thread, block, block_dim, grid_dim;
};

extern __thread Here* here;

enum class Op {
    CLUSTER_WAIT, SYNCTHREADS, SYNCTHREADS_OR, SYNCTHREADS_AND, SYNCTHREADS_COUNT, SYNCWARP, SHFL, SHFL_UP, SHFL_DOWN, SHFL_XOR,
    BALLOT, ANY, ALL, MATCH_ANY, MATCH_ALL, REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR, REDUCE_XOR,
};

int barrier(Op op, bool predicate, Site site);
uint64_t collective(Op op, unsigned mask, uint64_t value, unsigned lane, int width, Site site);
void fence(bool whole_device);
void cluster_arrive(bool release);
void* cluster_map(const void* p, unsigned rank, Site site);
[[noreturn]] void stop(const char* why, Site site);

template <typename T>
inline uint64_t to_bits(T x) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &x, sizeof x);
    return bits;
}

template <typename T>
inline T shuffle(Op op, unsigned mask, T x, unsigned lane, int width, Site site) {
    const uint64_t bits = collective(op, mask, to_bits(x), lane, width, site);
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint64_t vote(Op op, unsigned mask, uint64_t x, Site site) { return collective(op, mask, x, 0, 32, site); }

struct Kernel {
    const char* name;
    unsigned long args_size;
    unsigned max_threads;
    unsigned cluster;  // blocks of a cluster at most, 0: none
    void (*invoke)(const void* args);
};

template <auto F>
struct Entry;

template <typename A, void (*F)(A)>
struct Entry<F> {
    static constexpr unsigned long args_size = sizeof(A);
    static void invoke(const void* args) { F(*static_cast<const A*>(args)); }
};

template <auto F>
constexpr Kernel describe(const char* name, unsigned max_threads, unsigned cluster) {
    return {name, Entry<F>::args_size, max_threads, cluster, Entry<F>::invoke};
}

extern const Kernel kernels[];
extern const int kernel_count;

template <typename T, typename F>
inline T update(T* p, F f) {
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &old, f(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

}  // namespace cuda_host

#define threadIdx (cuda_host::here->thread)
#define blockIdx (cuda_host::here->block)
#define blockDim (cuda_host::here->block_dim)
#define gridDim (cuda_host::here->grid_dim)
constexpr int warpSize = 32;

// The call's place, and a name for it that is no longer than needed.
#define CUDA_HOST_SITE cuda_host::Site site = cuda_host::Site::current()
using CudaHostOp = cuda_host::Op;

// ---- the block -----------------------------------------------------------------------------------------------

inline void __syncthreads(CUDA_HOST_SITE) { cuda_host::barrier(CudaHostOp::SYNCTHREADS, false, site); }
inline int __syncthreads_or(int p, CUDA_HOST_SITE) {
    return cuda_host::barrier(CudaHostOp::SYNCTHREADS_OR, p, site);
}
inline int __syncthreads_and(int p, CUDA_HOST_SITE) {
    return cuda_host::barrier(CudaHostOp::SYNCTHREADS_AND, p, site);
}
inline int __syncthreads_count(int p, CUDA_HOST_SITE) {
    return cuda_host::barrier(CudaHostOp::SYNCTHREADS_COUNT, p, site);
}
inline void __threadfence_block() { cuda_host::fence(false); }
inline void __threadfence() { cuda_host::fence(true); }
inline void __threadfence_system() { cuda_host::fence(true); }
[[noreturn]] inline void __trap(CUDA_HOST_SITE) { cuda_host::stop("__trap", site); }

// ---- the cluster ---------------------------------------------------------------------------------------------

inline void __cluster_barrier_arrive() { cuda_host::cluster_arrive(true); }
inline void __cluster_barrier_arrive_relaxed() { cuda_host::cluster_arrive(false); }
inline void __cluster_barrier_wait(CUDA_HOST_SITE) { cuda_host::barrier(CudaHostOp::CLUSTER_WAIT, false, site); }
inline void* __cluster_map_shared_rank(const void* p, unsigned rank, CUDA_HOST_SITE) {
    return cuda_host::cluster_map(p, rank, site);
}

// An assumption is a promise to the compiler: here it is kept to account.
inline void cuda_host_assume(bool holds, CUDA_HOST_SITE) {
    if (!holds) cuda_host::stop("__builtin_assume of what is false", site);
}
#define __builtin_assume(x) cuda_host_assume(x)

// ---- the warp ------------------------------------------------------------------------------------------------

inline void __syncwarp(unsigned mask = ~0u, CUDA_HOST_SITE) { cuda_host::vote(CudaHostOp::SYNCWARP, mask, 0, site); }

template <typename T>
inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32, CUDA_HOST_SITE) {
    return cuda_host::shuffle(CudaHostOp::SHFL, mask, x, lane, width, site);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, CUDA_HOST_SITE) {
    return cuda_host::shuffle(CudaHostOp::SHFL_UP, mask, x, by, width, site);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32, CUDA_HOST_SITE) {
    return cuda_host::shuffle(CudaHostOp::SHFL_DOWN, mask, x, by, width, site);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32, CUDA_HOST_SITE) {
    return cuda_host::shuffle(CudaHostOp::SHFL_XOR, mask, x, lanes, width, site);
}

inline unsigned __ballot_sync(unsigned mask, int p, CUDA_HOST_SITE) {
    return cuda_host::vote(CudaHostOp::BALLOT, mask, p != 0, site);
}
inline int __any_sync(unsigned mask, int p, CUDA_HOST_SITE) {
    return cuda_host::vote(CudaHostOp::ANY, mask, p != 0, site);
}
inline int __all_sync(unsigned mask, int p, CUDA_HOST_SITE) {
    return cuda_host::vote(CudaHostOp::ALL, mask, p != 0, site);
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T x, CUDA_HOST_SITE) {
    return cuda_host::vote(CudaHostOp::MATCH_ANY, mask, cuda_host::to_bits(x), site);
}
template <typename T>
inline unsigned __match_all_sync(unsigned mask, T x, int* all, CUDA_HOST_SITE) {
    const unsigned same = cuda_host::vote(CudaHostOp::MATCH_ALL, mask, cuda_host::to_bits(x), site);
    *all = same != 0;
    return same;
}

// Both types widen to 64 bits by value, so one signed comparison serves them.
#define CUDA_HOST_REDUCE(name, op, T)                                              \
    inline T __reduce_##name##_sync(unsigned mask, T x, CUDA_HOST_SITE) {          \
        return static_cast<T>(cuda_host::vote(CudaHostOp::op, mask, static_cast<long long>(x), site)); \
    }
CUDA_HOST_REDUCE(add, REDUCE_ADD, int)
CUDA_HOST_REDUCE(add, REDUCE_ADD, unsigned)
CUDA_HOST_REDUCE(min, REDUCE_MIN, int)
CUDA_HOST_REDUCE(min, REDUCE_MIN, unsigned)
CUDA_HOST_REDUCE(max, REDUCE_MAX, int)
CUDA_HOST_REDUCE(max, REDUCE_MAX, unsigned)
CUDA_HOST_REDUCE(and, REDUCE_AND, unsigned)
CUDA_HOST_REDUCE(or, REDUCE_OR, unsigned)
CUDA_HOST_REDUCE(xor, REDUCE_XOR, unsigned)

// ---- atomics: relaxed, and only for the types that CUDA has ------------------------------------------------------

#define CUDA_HOST_FETCH(name, builtin, T) \
    inline T name(T* p, T x) { return builtin(p, x, __ATOMIC_RELAXED); }
#define CUDA_HOST_PICK(name, better, T) \
    inline T name(T* p, T x) { return cuda_host::update(p, [x](T old) { return x better old ? x : old; }); }
#define CUDA_HOST_FOR_TYPES(M, ...) M(__VA_ARGS__, int) M(__VA_ARGS__, unsigned) M(__VA_ARGS__, unsigned long long)

CUDA_HOST_FOR_TYPES(CUDA_HOST_FETCH, atomicAdd, __atomic_fetch_add)
CUDA_HOST_FETCH(atomicSub, __atomic_fetch_sub, int)
CUDA_HOST_FETCH(atomicSub, __atomic_fetch_sub, unsigned)
CUDA_HOST_FOR_TYPES(CUDA_HOST_FETCH, atomicExch, __atomic_exchange_n)
CUDA_HOST_FOR_TYPES(CUDA_HOST_FETCH, atomicAnd, __atomic_fetch_and)
CUDA_HOST_FOR_TYPES(CUDA_HOST_FETCH, atomicOr, __atomic_fetch_or)
CUDA_HOST_FOR_TYPES(CUDA_HOST_FETCH, atomicXor, __atomic_fetch_xor)
CUDA_HOST_FETCH(atomicAnd, __atomic_fetch_and, long long)
CUDA_HOST_FETCH(atomicOr, __atomic_fetch_or, long long)
CUDA_HOST_FETCH(atomicXor, __atomic_fetch_xor, long long)
CUDA_HOST_FOR_TYPES(CUDA_HOST_PICK, atomicMin, <)
CUDA_HOST_FOR_TYPES(CUDA_HOST_PICK, atomicMax, >)
CUDA_HOST_PICK(atomicMin, <, long long)
CUDA_HOST_PICK(atomicMax, >, long long)

#define CUDA_HOST_CAS(unused, T)                                                                       \
    inline T atomicCAS(T* p, T expected, T x) {                                                        \
        __atomic_compare_exchange_n(p, &expected, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);       \
        return expected;                                                                               \
    }
CUDA_HOST_FOR_TYPES(CUDA_HOST_CAS, )

// ---- arithmetic ----------------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= ((x >> i) & 1u) << (31 - i);
    return y;
}
inline int __mulhi(int x, int y) { return static_cast<int>((static_cast<long long>(x) * y) >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>((static_cast<unsigned long long>(x) * y) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(x) * y) >> 64);
}
template <typename T>
inline T __ldg(const T* p) {
    return *p;
}

#define CUDA_HOST_MIN_MAX(T, A, B)                                                                     \
    inline constexpr T min(A x, B y) { return static_cast<T>(x) < static_cast<T>(y) ? x : y; }         \
    inline constexpr T max(A x, B y) { return static_cast<T>(x) > static_cast<T>(y) ? x : y; }
CUDA_HOST_MIN_MAX(int, int, int)
CUDA_HOST_MIN_MAX(unsigned, unsigned, unsigned)
CUDA_HOST_MIN_MAX(unsigned, int, unsigned)
CUDA_HOST_MIN_MAX(unsigned, unsigned, int)
CUDA_HOST_MIN_MAX(long, long, long)
CUDA_HOST_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUDA_HOST_MIN_MAX(long long, long long, long long)
CUDA_HOST_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CUDA_HOST_MIN_MAX(unsigned long long, long long, unsigned long long)
CUDA_HOST_MIN_MAX(unsigned long long, unsigned long long, long long)
CUDA_HOST_MIN_MAX(float, float, float)
CUDA_HOST_MIN_MAX(double, double, double)

// Aligned as on the device, so that UBSan sees what would be a misaligned access there.
#define CUDA_HOST_VECTOR(name, T)                                                                      \
    struct alignas(2 * sizeof(T)) name##2 {                                                            \
        T x, y;                                                                                        \
    };                                                                                                 \
    struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 {                                      \
        T x, y, z, w;                                                                                  \
    };                                                                                                 \
    inline constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                               \
    inline constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_HOST_VECTOR(int, int)
CUDA_HOST_VECTOR(uint, unsigned)
CUDA_HOST_VECTOR(float, float)
CUDA_HOST_VECTOR(longlong, long long)
CUDA_HOST_VECTOR(ulonglong, unsigned long long)
