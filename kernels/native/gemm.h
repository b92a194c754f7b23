// Products of activations with packed weights, y = x W^T + b. Owns the packed layout and the arithmetic of a product;
// never starts a thread: a caller gives each thread its share and has the barrier after it.
//
// Batch invariance by construction: y[i, j] is one chain of fused multiply-adds over k in ascending order from zero,
// whichever rows stand beside row i, however many threads there are. With `segments` S > 1, k is cut into S equal parts,
// each has its own chain, and the S sums are added in adjacent pairs, the results again in pairs, and so on (a balanced
// binary tree): k cut over tp ranks (tp | S, S / tp a power of two) and summed by the same tree gives the same bits.
// The bias is added last, then the sum is rounded once if Out is bf16.
//
// Packed layout of a weight [n, k]: panels of NR columns of the output, one after another, a panel is [k][NR] numbers,
// missing columns zero. bf16 pairs two k: [ceil(k / 2)][NR][2], so that one load serves two k (shift and mask, or vdpbf16ps).
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "threads.h"
#include "types.h"

namespace hf {

constexpr int kPanelVectors = 2;
template <class T> constexpr int kPanel = kPanelVectors * kLanes<Compute<T>>;  // NR, columns of a panel

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6;  // 12 of 16
#endif

template <class T> inline long panel_numbers(long k) { return (sizeof(T) == 2 ? (k + 1) / 2 * 2 : k) * kPanel<T>; }
template <class T> inline long num_panels(long n) { return (n + kPanel<T> - 1) / kPanel<T>; }
template <class T> inline size_t packed_bytes(long n, long k) {
    return size_t(num_panels<T>(n)) * panel_numbers<T>(k) * sizeof(T);
}

// This thread's share of packing w[j * row_stride + i * col_stride], j < n, i < k, into `out` (packed_bytes, 64-aligned).
template <class T>
void pack_part(int thread, int threads, const T* w, long n, long k, long row_stride, long col_stride, void* out) {
    constexpr int NR = kPanel<T>;
    Share share = share_of(num_panels<T>(n), thread, threads);
    for (long panel = share.first; panel < share.last; ++panel) {
        T* to = (T*)out + panel * panel_numbers<T>(k);
        std::memset((void*)to, 0, panel_numbers<T>(k) * sizeof(T));
        long columns = n - panel * NR < NR ? n - panel * NR : NR;
        for (long i = 0; i < k; ++i)
            for (long j = 0; j < columns; ++j)
                to[sizeof(T) == 2 ? (i / 2 * NR + j) * 2 + i % 2 : i * NR + j] =
                    w[(panel * NR + j) * row_stride + i * col_stride];
    }
}
template <class T> void pack(const T* w, long n, long k, long row_stride, long col_stride, void* out) {
    pack_part(0, 1, w, n, k, row_stride, col_stride, out);
}

// This thread's share of y = x W^T + b for m rows of x (x_stride numbers apart); Out is T or Compute<T>. k % segments == 0.
template <class T, class Out>
void gemm_part(int thread, int threads, const T* x, long m, long x_stride, const void* packed, const T* bias, long n,
               long k, int segments, Out* y, long y_stride) {
    using C = Compute<T>;
    constexpr int NR = kPanel<T>;
    Share share = share_of(num_panels<T>(n), thread, threads);
    for (long row = 0; row < m; ++row)
        for (long panel = share.first; panel < share.last; ++panel) {
            const T* w = (const T*)packed + panel * panel_numbers<T>(k);
            for (long j = 0; j < NR && panel * NR + j < n; ++j) {
                C stack[64];
                int depth = 0;
                for (int segment = 0; segment < segments; ++segment) {
                    C sum = 0;
                    for (long i = segment * (k / segments); i < (segment + 1) * (k / segments); ++i)
                        sum += widen(x[row * x_stride + i]) *
                               widen(w[sizeof(T) == 2 ? (i / 2 * NR + j) * 2 + i % 2 : i * NR + j]);
                    stack[depth++] = sum;
                    for (int merge = segment; merge & 1; merge >>= 1, --depth) stack[depth - 2] += stack[depth - 1];
                }
                for (; depth > 1; --depth) stack[depth - 2] += stack[depth - 1];
                C sum = stack[0];
                if (bias != nullptr) sum += widen(bias[panel * NR + j]);
                narrow(sum, y[row * y_stride + panel * NR + j]);
            }
        }
}

}  // namespace hf
