// Products of matrices that lie in the nearest caches, and transposition: what attention consists of. Owns no memory;
// each sum is one chain in the order of k.
#pragma once

#include <utility>

#include "vector_math.h"

namespace hf {

// Vectors of sums that stay in registers, beside two or three of factors.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif

// sums[r][v] += a[r, p] * b[p, v] over p < k. a has any strides, b rows of vectors.
template <class C, int R, int V>
inline __attribute__((always_inline)) void add_product(const C* a, long a_row, long a_col, const C* b, long b_row,
                                                       long k, Vector<C> (&sums)[R][V]) {
#pragma GCC unroll 4
    for (long p = 0; p < k; ++p) {
        Vector<C> factors[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) factors[v] = in_register(load<Vector<C>>(b + p * b_row + v * kLanes<C>));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += a[r * a_row + p * a_col] * factors[v];
    }
}

// Rows of a product that are computed together, and what its rows are padded to.
constexpr int kRowsTogether = kSums / 2;

// c = a b, or c += a b: kRowsTogether rows of whole vectors.
template <class C, bool add>
inline void product_rows(const C* a, long a_row, long a_col, const C* b, C* c, long row, long k) {
    auto tile = [&]<int V>(long column) {
        Vector<C> sums[kRowsTogether][V] = {};
        if constexpr (add)
#pragma GCC unroll 16
            for (int r = 0; r < kRowsTogether; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) sums[r][v] = load<Vector<C>>(c + r * row + column + v * kLanes<C>);
        add_product<C, kRowsTogether, V>(a, a_row, a_col, b + column, row, k, sums);
#pragma GCC unroll 16
        for (int r = 0; r < kRowsTogether; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(c + r * row + column + v * kLanes<C>, sums[r][v]);
    };
    long column = 0;
    for (; column + 2 * kLanes<C> <= row; column += 2 * kLanes<C>) tile.template operator()<2>(column);
    if (column < row) tile.template operator()<1>(column);
}

template <class C, int... from> inline Vector<C> pick(Vector<C> a, Vector<C> b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, from...);
#else
    return __builtin_shuffle(a, b, IntVector<C>{from...});
#endif
}

// Transposes a square of vectors: lanes swap places with rows, one bit of their numbers after the other.
template <class C, int bit, int... lane>
inline __attribute__((always_inline)) void swap_bits(Vector<C> (&rows)[kLanes<C>],
                                                     std::integer_sequence<int, lane...> all) {
    constexpr int lanes = kLanes<C>;
#pragma GCC unroll 16
    for (int row = 0; row < lanes; ++row)
        if ((row & bit) == 0) {
            Vector<C> a = rows[row], b = rows[row + bit];
            rows[row] = pick<C, (lane & bit ? lane - bit + lanes : lane)...>(a, b);
            rows[row + bit] = pick<C, (lane & bit ? lane + lanes : lane + bit)...>(a, b);
        }
    if constexpr (bit > 1) swap_bits<C, bit / 2>(rows, all);
}

// to[column, row] = from[row, column], of `rows` and `columns` rounded up to whole vectors.
template <class C> void transpose(const C* from, long from_row, long rows, long columns, C* to, long to_row) {
    constexpr int lanes = kLanes<C>;
    for (long row = 0; row < rows; row += lanes)
        for (long column = 0; column < columns; column += lanes) {
            Vector<C> square[lanes];
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) square[i] = load<Vector<C>>(from + (row + i) * from_row + column);
            swap_bits<C, lanes / 2>(square, std::make_integer_sequence<int, lanes>());
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) store(to + (column + i) * to_row + row, square[i]);
        }
}

}  // namespace hf
