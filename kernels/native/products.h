// Products of the many rows of a training step with weights as they are: y = x W^T, or the sum of that and y. Owns the
// order in which memory is read; never starts a thread, and knows nothing of bf16.
//
// Where a library's product copies both factors before it multiplies, this one reads x in place: W alone is packed, in
// the panels of gemm.h. What the next rows and the next tile need comes into the caches meanwhile. y[i, j] is a chain
// of fused multiply-adds over each block of k in ascending order, whatever other rows there are.
#pragma once

#include "gemm.h"

namespace hf {

// Rows that pass over all panels together, and the most k at once: in fp32 such a block of x fills a third of a
// second-level cache of 512 KiB, one of a panel two thirds of a first-level cache of 32 KiB. Panels side by side: a
// tile finds the lines of x that the one before it read in the first-level cache.
constexpr long kRowsTogether = 120, kDepth = 352, kPanelsTogether = 2;

// Cache lines of the rows that come next, a few of them with each tile.
template <class C> class ComingRows {
public:
    ComingRows(const C* x, long stride, long rows, long depth, long tiles)
        : row_((const char*)x), stride_(stride * long(sizeof(C))), lines_((depth * long(sizeof(C)) + 63) / 64),
          left_(rows * lines_), each_((left_ + tiles - 1) / tiles) {}

    struct Lines {
        const char* first;
        long count;
    };
    // Of one row, at most `each_`.
    Lines take() {
        const long count = std::min({each_, lines_ - at_, left_});
        const Lines lines{row_ + at_ * 64, count};
        left_ -= count;
        at_ += count;
        if (at_ == lines_) at_ = 0, row_ += stride_;
        return lines;
    }

private:
    const char* row_;
    const long stride_, lines_;
    long left_, at_ = 0;
    const long each_;
};

// to[r, c] (+)= sum over i < depth of x[r, i] * w[i, c] for R rows and the columns of a panel; `next` is what the tile
// after this one will write.
template <class C, int R>
__attribute__((noinline)) void rows_tile(const C* x, long x_stride, const C* w, long depth, C* to, long to_stride,
                                         bool add, const C* next, typename ComingRows<C>::Lines coming) {
    constexpr int NR = kPanel<C>, lanes = kLanes<C>, kUnroll = 8, kBases = (R + 2) / 3;
    // Three rows from each pointer: an address takes a stride or twice a stride, but not thrice.
    const C* base[kBases];
#pragma GCC unroll 4
    for (int b = 0; b < kBases; ++b) base[b] = x + 3 * b * x_stride;
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row) __builtin_prefetch(next + row * to_stride, 1);
    Vector<C> sums[R][kPanelVectors] = {};
    auto one = [&](long j) __attribute__((always_inline)) {
        Vector<C> columns[kPanelVectors];
#pragma GCC unroll 4
        for (int c = 0; c < kPanelVectors; ++c) columns[c] = in_register(load<Vector<C>>(w + j * NR + c * lanes));
#pragma GCC unroll 16
        for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
            for (int c = 0; c < kPanelVectors; ++c)
                sums[row][c] = in_register(sums[row][c] + base[row / 3][row % 3 * x_stride + j] * columns[c]);
    };
    auto step_rows = [&](int count) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int b = 0; b < kBases; ++b) base[b] += count;
        w += count * NR;
    };
    long i = 0;
    for (; i + kUnroll <= depth; i += kUnroll) {
        if (coming.count > 0) {
            __builtin_prefetch(coming.first, 0, 2);
            coming.first += 64;
            --coming.count;
        }
#pragma GCC unroll 8
        for (int j = 0; j < kUnroll; ++j) one(j);
        step_rows(kUnroll);
    }
    for (; i < depth; ++i) one(0), step_rows(1);
#pragma GCC unroll 16
    for (int row = 0; row < R; ++row)
#pragma GCC unroll 4
        for (int c = 0; c < kPanelVectors; ++c) {
            C* here = to + row * to_stride + c * lanes;
            store(here, add ? sums[row][c] + load<Vector<C>>(here) : sums[row][c]);
        }
}

template <class C>
using RowsTile = void (*)(const C*, long, const C*, long, C*, long, bool, const C*, typename ComingRows<C>::Lines);
template <class C, int... Rows> constexpr auto rows_tiles(std::integer_sequence<int, Rows...>) {
    return std::array<RowsTile<C>, sizeof...(Rows)>{rows_tile<C, Rows + 1>...};
}
template <class C> inline constexpr auto kRowsTiles = rows_tiles<C>(std::make_integer_sequence<int, kTileRows>());

// y [rows, n] (+)= x W^T for rows that pass over all panels together and a block of k; `w` is where it begins in the
// first panel, panels lie `panel_stride` apart.
template <class C>
void product_of_rows(const C* x, long rows, long x_stride, const C* w, long panel_stride, long n, long depth, bool add,
                     C* y, long y_stride, ComingRows<C> coming) {
    constexpr long NR = kPanel<C>;
    const long panels = num_panels<C>(n), blocks = (rows + kTileRows - 1) / kTileRows;
    for (long group = 0; group < panels; group += kPanelsTogether) {
        const long end = std::min(panels, group + kPanelsTogether);
        for (long block = 0; block < blocks; ++block) {
            const Share share = share_of(rows, int(block), int(blocks));
            const int count = int(share.last - share.first);
            for (long panel = group; panel < end; ++panel) {
                C* to = y + share.first * y_stride + panel * NR;
                const C* next = panel + 1 < end      ? to + NR
                                : block + 1 < blocks ? y + share.last * y_stride + group * NR
                                                     : y + end * NR;
                const long columns = std::min(NR, n - panel * NR);
                alignas(64) C sums[kTileRows * NR];
                const bool whole = columns == NR;
                kRowsTiles<C>[count - 1](x + share.first * x_stride, x_stride, w + panel * panel_stride, depth,
                                         whole ? to : sums, whole ? y_stride : NR, add && whole, next, coming.take());
                for (int row = 0; row < count && !whole; ++row)
                    for (long c = 0; c < columns; ++c)
                        to[row * y_stride + c] = sums[row * NR + c] + (add ? to[row * y_stride + c] : C(0));
            }
        }
    }
}

// This thread's rows of y [m, n] = x [m, k] W^T (+ y where `add`); `packed` is W by `pack_part`.
template <class C>
void product_part(int thread, int threads, const C* x, long m, long x_stride, const C* packed, long n, long k, bool add,
                  C* y, long y_stride) {
    const Share mine = share_of(m, thread, threads);
    const long parts = std::max<long>(1, (k + kDepth - 1) / kDepth), most = ((k + parts - 1) / parts + 7) / 8 * 8;
    for (long start = 0; start < k; start += most) {
        const long depth = std::min(most, k - start);
        for (long first = mine.first; first < mine.last; first += kRowsTogether) {
            const long rows = std::min(kRowsTogether, mine.last - first), after = first + rows;
            const long tiles = num_panels<C>(n) * ((rows + kTileRows - 1) / kTileRows);
            const ComingRows<C> coming(x + after * x_stride + start, x_stride,
                                       std::min(kRowsTogether, mine.last - after), depth, tiles);
            product_of_rows(x + first * x_stride + start, rows, x_stride, packed + start * kPanel<C>,
                            panel_numbers<C>(k), n, depth, add || start > 0, y + first * y_stride, y_stride, coming);
        }
    }
}

}  // namespace hf
