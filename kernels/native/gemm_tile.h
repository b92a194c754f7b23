// The inner loop of a product: a tile of R rows by P panels of a packed weight over a range of k, all sums in
// registers. Owns the order of the additions; knows nothing of threads, memory or what becomes of the sums.
//
// Rows come re-ordered (`arrange_rows`): [ceil(k / kBlockK)][R][kBlockK] numbers of the compute type, so that a tile
// reads one stream whatever the stride of x was (12 rows 4 KiB apart would fight for one set of the first-level cache).
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "types.h"

namespace hf {

constexpr int kPanelVectors = 2;
template <class T> constexpr int kPanel = kPanelVectors * kLanes<Compute<T>>;  // NR, columns of a panel
constexpr int kBlockK = 16;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;  // 24 of 32 registers hold sums
#else
constexpr int kTileRows = 6;  // 12 of 16
#endif
// With few rows, several panels at once: more independent sums (a fused multiply-add takes 4 cycles, two start in each)
// and more streams from memory.
constexpr int panels_at_once(int rows) {
    return kTileRows < 12 ? (rows == 1 ? 4 : rows == 2 ? 2 : 1) : rows <= 2 ? 4 : rows <= 4 ? 2 : 1;
}
constexpr int kStep = 4;
constexpr int kFewRows = 4;
constexpr int kNear = 4096, kFar = 12288;  // bytes
// Whether sums take so many of 16 registers that g++ 12 keeps one in memory between products unless told not to: 80
// instead of 101 GF/s with 5 rows, 95 with 6 (fp32, AVX2).
template <int R, int P> constexpr bool kCrowded = kTileRows < 12 && R * P * kPanelVectors >= 10;
// Cache lines of a panel in kStep k.
template <class T> constexpr int kStepLines = kStep * kPanel<T> * int(sizeof(T)) / 64;

template <class T> inline long panel_numbers(long k) { return (sizeof(T) == 2 ? (k + 1) / 2 * 2 : k) * kPanel<T>; }

// Rows [0, rows) of x into blocks; `out` has blocked_numbers(rows, k) numbers. Past k: zeros, which nobody reads.
inline long blocked_numbers(long rows, long k) { return (k + kBlockK - 1) / kBlockK * kBlockK * rows; }
template <class T> void arrange_rows(const T* x, long x_stride, int rows, long k, Compute<T>* out) {
    constexpr int lanes = kLanes<Compute<T>>;
    for (int row = 0; row < rows; ++row) {
        const T* from = x + row * x_stride;
        long i = 0;
        for (; i + kBlockK <= k; i += kBlockK)
            for (int part = 0; part < kBlockK; part += lanes)
                store(out + i * rows + row * kBlockK + part, load_wide(from + i + part));
        for (long rest = i; rest < k; ++rest) out[i * rows + row * kBlockK + rest - i] = widen(from[rest]);
    }
}

// Columns of all P panels for one k (or for an even and an odd k of a bf16 pair).
template <class T, int P> using Columns = Vector<Compute<T>>[P * kPanelVectors];

template <class T, int P>
inline __attribute__((always_inline)) void columns_at(const T* w, long panel_stride, Columns<T, P>& out) {
#pragma GCC unroll 8
    for (int c = 0; c < P * kPanelVectors; ++c)
        out[c] = load_wide(w + c / kPanelVectors * panel_stride + c % kPanelVectors * kLanes<Compute<T>>);
}
template <int P>
inline __attribute__((always_inline)) void pair_at(const bf16* w, long panel_stride, Columns<bf16, P>& even,
                                                   Columns<bf16, P>& odd) {
#pragma GCC unroll 8
    for (int c = 0; c < P * kPanelVectors; ++c) {
        const bf16* from = w + c / kPanelVectors * panel_stride + c % kPanelVectors * 2 * kLanes<float>;
        auto both = load<Vector<uint32_t>>(from);
        even[c] = (Vector<float>)(both << 16);
        odd[c] = (Vector<float>)(both & 0xffff0000u);
    }
}
template <class C, int R, int P>
inline __attribute__((always_inline)) void add_products(const C* x, const Vector<C> (&columns)[P * kPanelVectors],
                                                        Vector<C> (&sums)[R][P * kPanelVectors]) {
    Vector<C> held[P * kPanelVectors];
#pragma GCC unroll 8
    for (int c = 0; c < P * kPanelVectors; ++c) held[c] = in_register(columns[c]);
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
        for (int c = 0; c < P * kPanelVectors; ++c) {
            const Vector<C> sum = sums[row][c] + x[row * kBlockK] * held[c];
            sums[row][c] = kCrowded<R, P> ? in_register(sum) : sum;
        }
}

// What a tile fetches meanwhile: `lines` cache lines from `next` on at every kStep of k. A null `next`: the only pass
// over this panel, which leaves no time for the next one; the tile looks kNear bytes ahead in its own, and kFar bytes for
// the second-level cache, which has more requests to memory open at once. Past the end of a panel lies one that has been
// read or is another thread's, so in short panels, few of whose bytes are kFar from the end, only kNear.
struct Ahead {
    const char* next;
    int lines;
};

// out[row * out_stride + column] = sum over first <= i < last, in that order, of x[row, i] * w[i, column].
template <class T, int R, int P>
__attribute__((noinline)) void tile(const Compute<T>* x, const T* w, long panel_stride, long first, long last,
                                    Ahead ahead, Compute<T>* out, long out_stride) {
    using C = Compute<T>;
    constexpr int NR = kPanel<T>;
    Vector<C> sums[R][P * kPanelVectors] = {};
    auto one = [&](long i) __attribute__((always_inline)) {
        Columns<T, P> columns;
        if constexpr (sizeof(T) == 2) {
            Columns<T, P> other;
            if (i % 2 == 0) pair_at<P>(w + i * NR, panel_stride, columns, other);
            else pair_at<P>(w + (i - 1) * NR, panel_stride, other, columns);
        } else {
            columns_at<T, P>(w + i * NR, panel_stride, columns);
        }
        add_products<C, R, P>(x + i / kBlockK * R * kBlockK + i % kBlockK, columns, sums);
    };
    const bool in_own = R <= kFewRows || ahead.next == nullptr;  // where this tile looks ahead
    const bool far = panel_stride * long(sizeof(T)) >= 4 * kFar;
    long i = first;
    const long whole = std::min(last, (first + kBlockK - 1) / kBlockK * kBlockK);
#pragma GCC unroll 1
    for (; i < whole; ++i) one(i);
    const C* xs = x + i * R;
    const T* ws = w + i * NR;
    for (; i + kBlockK <= last; i += kBlockK, xs += (R - 1) * kBlockK)
#pragma GCC unroll 1
        for (int part = 0; part < kBlockK; part += kStep, xs += kStep, ws += kStep * NR) {
            if (!in_own)
#pragma GCC unroll 1
                for (int line = 0; line < ahead.lines; ++line, ahead.next += 64) __builtin_prefetch(ahead.next, 0, 2);
#pragma GCC unroll 4
            for (int j = 0; j < kStep; j += 2) {
                if (in_own)
#pragma GCC unroll 16
                    for (int line = 0; line < P * kStepLines<T> / 2; ++line) {
                        const char* here = (const char*)(ws + j * NR + line % P * panel_stride) + line / P * 64;
                        __builtin_prefetch(here + kNear);
                        if (far) __builtin_prefetch(here + kFar, 0, 2);
                    }
                Columns<T, P> columns, other;
                if constexpr (sizeof(T) == 2) {
                    pair_at<P>(ws + j * NR, panel_stride, columns, other);
                } else {
                    columns_at<T, P>(ws + j * NR, panel_stride, columns);
                    columns_at<T, P>(ws + (j + 1) * NR, panel_stride, other);
                }
                add_products<C, R, P>(xs + j, columns, sums);
                add_products<C, R, P>(xs + j + 1, other, sums);
            }
        }
#pragma GCC unroll 1
    for (; i < last; ++i) one(i);
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 8
        for (int c = 0; c < P * kPanelVectors; ++c) store(out + row * out_stride + c * kLanes<C>, sums[row][c]);
}

template <class T>
using Tile = void (*)(const Compute<T>*, const T*, long, long, long, Ahead, Compute<T>*, long);

template <class T, int P, int... Rows>
constexpr std::array<Tile<T>, sizeof...(Rows)> tiles(std::integer_sequence<int, Rows...>) {
    return {tile<T, Rows + 1, P <= panels_at_once(Rows + 1) ? P : panels_at_once(Rows + 1)>...};
}
template <class T, int P> inline constexpr auto kTiles = tiles<T, P>(std::make_integer_sequence<int, kTileRows>());
// The tile of that many rows and panels (4, 2 or 1), panels <= panels_at_once(rows).
template <class T> inline Tile<T> tile_of(int rows, int panels) {
    return (panels == 4 ? kTiles<T, 4> : panels == 2 ? kTiles<T, 2> : kTiles<T, 1>)[rows - 1];
}

}  // namespace hf
