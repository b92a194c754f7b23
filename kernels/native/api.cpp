// C entry points of the team and of products. Each takes a dtype code (types.h) and calls the template; no arithmetic
// here.
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <mutex>

#include "dispatch.h"
#include "gemm.h"
#include "rows.h"
#include "team.h"

namespace hf {
namespace {

// A fork copies only the calling thread: the child forgets the parent's team (its threads do not exist there).
struct TheTeam {
    std::mutex mutex;
    std::atomic<Team*> team{nullptr};
    int threads = 1;
};
TheTeam& the_team() {
    static TheTeam* one = [] {
        pthread_atfork(nullptr, nullptr, [] { new (&the_team().mutex) std::mutex; the_team().team = nullptr; });
        return new TheTeam;  // never destroyed: worker threads may outlive static destructors
    }();
    return *one;
}

}  // namespace

Team& team() {
    TheTeam& one = the_team();
    if (Team* team = one.team.load(std::memory_order_acquire)) return *team;
    std::lock_guard<std::mutex> lock(one.mutex);
    if (one.team.load() == nullptr) one.team = new Team(one.threads);
    return *one.team.load();
}

}  // namespace hf

using namespace hf;

#pragma GCC visibility push(default)
extern "C" {

// The team has `threads` threads from now on. Not while another thread of the program is inside the library.
void hf_threads(int threads) {
    TheTeam& one = the_team();
    std::lock_guard<std::mutex> lock(one.mutex);
    Team* old = one.team.load();
    if (old != nullptr && old->size() == threads) return;
    delete old;
    one.team = nullptr;
    one.threads = threads;
}

size_t hf_packed_bytes(int dtype, long n, long k) {
    size_t bytes = 0;
    with_dtype(dtype, [&]<class T>(T) { bytes = packed_bytes<T>(n, k); });
    return bytes;
}

// Asks the system for huge pages (where it knows them) under fresh memory that weights will be read from: with pages of
// 4 KiB a product from DRAM is 5 to 25 % slower, and first touches take most of the time of packing.
void hf_huge_pages(void* memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t kPage = 2 << 20;
    const uintptr_t first = ((uintptr_t)memory + kPage - 1) / kPage * kPage;
    const uintptr_t last = ((uintptr_t)memory + bytes) / kPage * kPage;
    if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

void hf_pack(int dtype, const void* w, long n, long k, long row_stride, long col_stride, void* out) {
    team().run([&](int thread) {
        with_dtype(dtype, [&]<class T>(T) {
            pack_part(thread, team().size(), (const T*)w, n, k, row_stride, col_stride, out);
        });
    });
}

// Two weights [n, k] of the same strides, panels in turn, into twice hf_packed_bytes.
void hf_pack_pair(int dtype, const void* first, const void* second, long n, long k, long row_stride, long col_stride,
                  void* out) {
    team().run([&](int thread) {
        with_dtype(dtype, [&]<class T>(T) {
            pack_part(thread, team().size(), (const T*)first, n, k, row_stride, col_stride, out, 2, 0);
            pack_part(thread, team().size(), (const T*)second, n, k, row_stride, col_stride, out, 2, 1);
        });
    });
}

// y [m, n] = x W^T + bias (or null), of the dtype, or of its compute type where `wide_out`.
void hf_linear(int dtype, const void* x, long m, long x_stride, const void* packed, const void* bias, long n, long k,
               int segments, int wide_out, void* y, long y_stride) {
    team().run([&](int thread) {
        auto part = [&]<class T, class Out>(T, Out) {
            gemm_part(thread, team().size(), (const T*)x, m, x_stride, packed, (const T*)bias, n, k, segments, (Out*)y,
                      y_stride);
        };
        switch (Dtype(dtype)) {
            case Dtype::Float32: return part(float(), float());
            case Dtype::Float64: return part(double(), double());
            case Dtype::BFloat16: return wide_out ? part(bf16(), float()) : part(bf16(), bf16());
        }
    });
}

// y [m, n] = silu(x G^T + gate_bias) * (x U^T + up_bias), `packed` made by hf_pack_pair(G, U); biases may be null.
void hf_gated_linear(int dtype, const void* x, long m, long x_stride, const void* packed, const void* gate_bias,
                     const void* up_bias, long n, long k, void* y, long y_stride) {
    team().run([&](int thread) {
        with_dtype(dtype, [&]<class T>(T) {
            gemm_pair_part(thread, team().size(), (const T*)x, m, x_stride, packed, (const T*)gate_bias,
                           (const T*)up_bias, n, k, [&](long row, long column, long count, const T* gate, const T* up) {
                swiglu_row(gate, up, count, (T*)y + row * y_stride + column);
            });
        });
    });
}

}  // extern "C"
#pragma GCC visibility pop
