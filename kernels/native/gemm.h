// Products of activations with packed weights, y = x W^T + b. Owns the packed layout and who computes what of a
// product; never starts a thread: a caller gives each thread its share and has the barrier after it.
//
// Batch invariance by construction: y[i, j] is one chain of fused multiply-adds over k in ascending order from zero,
// whichever rows stand beside row i, however many threads there are. With `segments` S > 1, k is cut into S equal
// parts, each has its own chain, and the S sums are added in adjacent pairs, the results again in pairs, and so on (a
// balanced binary tree): k cut over tp ranks (tp | S, S / tp a power of two) and summed by the same tree gives the same
// bits.
// The bias is added last, then the sum is rounded once if Out is bf16.
//
// Packed layout of a weight [n, k]: panels of NR columns of the output, one after another, a panel is [k][NR] numbers,
// missing columns zero. bf16 pairs two k: [ceil(k / 2)][NR][2], so that one load serves two k (a shift and a mask).
#pragma once

#include <cstdlib>
#include <memory>

#include "gemm_tile.h"
#include "threads.h"

namespace hf {

template <class T> inline long num_panels(long n) { return (n + kPanel<T> - 1) / kPanel<T>; }
template <class T> inline size_t packed_bytes(long n, long k) {
    return size_t(num_panels<T>(n)) * panel_numbers<T>(k) * sizeof(T);
}

// One panel from `columns` contiguous rows of w. `Unit` is a number, or the pair of bf16 that stays together; two units
// in a row of w lie NR units apart in the panel. Blocks of kBlockK units keep what is written in the first-level cache.
template <class Unit, int NR>
inline void transpose_panel(const Unit* from, long columns, long units, long row_stride, Unit* to) {
    long block = 0;
    if (columns == NR)
        for (; block + kBlockK <= units; block += kBlockK)
            for (int j = 0; j < NR; ++j)
#pragma GCC unroll 16
                for (int i = 0; i < kBlockK; ++i) {
                    Unit unit;
                    std::memcpy(&unit, (const char*)from + (j * row_stride + block + i) * sizeof(Unit), sizeof(Unit));
                    to[(block + i) * NR + j] = unit;
                }
    for (; block < units; ++block)
        for (long j = 0; j < columns; ++j)
            std::memcpy(to + block * NR + j, (const char*)from + (j * row_stride + block) * sizeof(Unit), sizeof(Unit));
}

// This thread's share of packing w[j * row_stride + i * col_stride], j < n, i < k, into `out` (packed_bytes, on a
// cache line).
// Panel p becomes panel p * step + offset of `out`: two weights of equal shape interleave with step 2, offsets 0 and 1
// (then `out` has twice the bytes), as `gemm_pair_part` wants them.
template <class T>
void pack_part(int thread, int threads, const T* w, long n, long k, long row_stride, long col_stride, void* out,
               long step = 1, long offset = 0) {
    constexpr int NR = kPanel<T>;
    constexpr bool paired = sizeof(T) == 2;
    Share share = share_of(num_panels<T>(n), thread, threads);
    for (long panel = share.first; panel < share.last; ++panel) {
        T* to = (T*)out + (panel * step + offset) * panel_numbers<T>(k);
        const T* from = w + panel * NR * row_stride;
        const long columns = std::min<long>(n - panel * NR, NR);
        if (columns < NR || (paired && k % 2)) std::memset((void*)to, 0, panel_numbers<T>(k) * sizeof(T));
        if (col_stride == 1 && !paired) {
            transpose_panel<T, NR>(from, columns, k, row_stride, to);
        } else if (col_stride == 1 && k % 2 == 0 && row_stride % 2 == 0) {
            transpose_panel<uint32_t, NR>((const uint32_t*)from, columns, k / 2, row_stride / 2, (uint32_t*)to);
        } else {
            for (long i = 0; i < k; ++i)
                for (long j = 0; j < columns; ++j)
                    to[paired ? (i / 2 * NR + j) * 2 + i % 2 : i * NR + j] = from[j * row_stride + i * col_stride];
        }
    }
}
template <class T> void pack(const T* w, long n, long k, long row_stride, long col_stride, void* out) {
    pack_part(0, 1, w, n, k, row_stride, col_stride, out);
}

// Memory of one thread, kept from call to call: a step has some hundred products.
inline void* scratch(size_t bytes) {
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    thread_local std::unique_ptr<void, Free> memory;
    thread_local size_t size = 0;
    if (size < bytes) {
        memory.reset();
        size = (bytes + 4095) / 4096 * 4096;
        memory.reset(std::aligned_alloc(64, size));
        if (memory == nullptr) std::abort();
    }
    return memory.get();
}

// The rectangle of a product, rows by panels, that is a thread's: threads are a grid of row groups by panel groups, the
// one whose largest share is smallest, and of equals the one with the fewest row groups (weights are read once).
struct Rectangle {
    Share rows, panels;
};
inline Rectangle rectangle_of(int thread, int threads, long m, long panels, long unit) {
    int best = 1;
    long least = -1;
    const long groups = (panels + unit - 1) / unit;
    for (int row_groups = 1; row_groups <= threads; ++row_groups) {
        if (threads % row_groups) continue;
        const int panel_groups = threads / row_groups;
        long work = ((m + row_groups - 1) / row_groups) * ((groups + panel_groups - 1) / panel_groups);
        if (least < 0 || work < least) least = work, best = row_groups;
    }
    Share share = share_of(groups, thread / best, threads / best);
    return {share_of(m, thread % best, best), {share.first * unit, std::min(panels, share.last * unit)}};
}

// How many panels a product of so many rows passes over side by side: a multiple of `unit`.
inline int panels_together(long rows, long unit) {
    const long blocks = std::max<long>(1, (rows + kTileRows - 1) / kTileRows);
    return int(std::max<long>(unit, panels_at_once(int((rows + blocks - 1) / blocks))));
}

// The weight of a product as `gemm_sums` reads it: `unit` is 2 for a pair.
struct PackedMatrix {
    const void* packed;
    long panels, k, unit;
};

// What a thread reads first of the weight of its next product. It comes into the second-level cache while the thread
// waits for others, in the order in which it will be read: memory has nothing else to do then.
template <class T> class NextWeights {
public:
    NextWeights(int thread, int threads, long rows) : thread_(thread), threads_(threads), rows_(rows) {}

    // The same weight as before: fetching goes on where it was.
    void are(const PackedMatrix& weight) {
        if (weight.packed == packed_) return;
        packed_ = weight.packed;
        const Rectangle mine = rectangle_of(thread_, threads_, rows_, weight.panels, weight.unit);
        stride_ = panel_numbers<T>(weight.k) * long(sizeof(T));
        panels_ = std::min<long>(panels_together(mine.rows.last - mine.rows.first, weight.unit),
                                 mine.panels.last - mine.panels.first);
        at_ = (const char*)packed_ + mine.panels.first * stride_;
        lines_ = panels_ == 0 ? 0 : std::min(stride_, kMost / panels_) / 64;
    }

    void fetch_some() {
        if (lines_ == 0) return pause();
        for (long panel = 0; panel < panels_; ++panel) __builtin_prefetch(at_ + panel * stride_, 0, 2);
        at_ += 64;
        --lines_;
    }

private:
    static constexpr long kMost = 384 << 10;  // bytes: what else is in the cache shall stay
    const int thread_, threads_;
    const long rows_;
    const void* packed_ = nullptr;
    const char* at_ = nullptr;
    long stride_ = 0, panels_ = 0, lines_ = 0;  // left in each panel
};

// Sums of a tile with segments: sums of aligned runs of 2^j segments wait on a stack until their neighbour is there.
template <class T>
void segmented_tile(Tile<T> compute, const Compute<T>* x, const T* w, long panel_stride, long k, int segments,
                    Ahead ahead, Compute<T>* out, int rows, int columns, long out_stride) {
    using C = Compute<T>;
    constexpr int kDepth = 16;
    struct Level { alignas(64) C sums[kTileRows * kPanel<T>]; };
    Level stack[kDepth];
    int depth = 0;
    const long part = k / segments;
    auto merge = [&] {
        --depth;
        for (int i = 0; i < rows * columns; ++i) stack[depth - 1].sums[i] += stack[depth].sums[i];
    };
    for (int segment = 0; segment < segments; ++segment) {
        compute(x, w, panel_stride, part * segment, part * (segment + 1), ahead, stack[depth++].sums, columns);
        if (ahead.next != nullptr) ahead.next += part / kStep * ahead.lines * 64;
        for (int ended = segment; ended & 1; ended >>= 1) merge();
    }
    while (depth > 1) merge();
    for (int row = 0; row < rows; ++row) std::copy_n(stack[0].sums + row * columns, columns, out + row * out_stride);
}

// Rows of x, of so many bytes, that pass over the panels together: they stay in the second-level cache (512 KiB of a
// Zen 3) beside two panels. Of long rows more, since all weights are read once for every so many rows.
inline long rows_at_once(long row_bytes) {
    constexpr long kBytes = 256 << 10, kMostBytes = 768 << 10, kFewest = 96;
    const long rows = std::max(kBytes / row_bytes, std::min(kFewest, kMostBytes / row_bytes));
    return std::max<long>(kTileRows, rows / kTileRows * kTileRows);
}

// The general product. This thread's share of the sums x W^T (m rows, num_panels panels of `packed`); they come to
// `epilogue(row, panel, sums)` as soon as they are made: `sums` are the Unit * NR sums of that row in the Unit panels
// from `panel` (a multiple of Unit), columns past n zero. What a step does next to single rows of an answer (a residual
// sum, say) can be an epilogue. `coming(row, panel)` announces it some thousand cycles before: time to fetch what it will
// write.
template <class T, int Unit, class Epilogue, class Coming>
void gemm_sums(int thread, int threads, const T* x, long m, long x_stride, const void* packed, long num_panels, long k,
               int segments, Epilogue&& epilogue, Coming&& coming) {
    using C = Compute<T>;
    constexpr int NR = kPanel<T>;
    const Rectangle mine = rectangle_of(thread, threads, m, num_panels, Unit);
    const long stride = panel_numbers<T>(k);
    const long chunk = rows_at_once(long(sizeof(C)) * (k + kBlockK));
    for (long first = mine.rows.first; first < mine.rows.last; first += chunk) {
        const long rows = std::min(chunk, mine.rows.last - first);
        const int blocks = int((rows + kTileRows - 1) / kTileRows);
        C* arranged = (C*)scratch(blocked_numbers(rows, k) * sizeof(C));
        for (int block = 0; block < blocks; ++block) {
            Share share = share_of(rows, block, blocks);
            arrange_rows(x + (first + share.first) * x_stride, x_stride, int(share.last - share.first), k,
                         arranged + blocked_numbers(share.first, k));
        }
        const int group = panels_together(rows, Unit);
        // While the blocks of rows pass over a panel, each fetches its part of the one that follows, if a part is left.
        const int lines = (kStepLines<T> + blocks - 1) / blocks;
        for (long panel = mine.panels.first; panel < mine.panels.last; panel += group) {
            const int here = int(std::min<long>(group, mine.panels.last - panel));
            for (int block = 0; block < blocks; ++block) {
                const Share share = share_of(rows, block, blocks);
                const int count = int(share.last - share.first);
                const C* block_rows = arranged + blocked_numbers(share.first, k);
                alignas(64) C sums[kTileRows * NR * std::max(2, Unit)];
                for (int row = 0; row < count; ++row)
                    for (int done = 0; done < here; done += Unit) coming(first + share.first + row, panel + done);
                for (int done = 0, width; done < here; done += width) {
                    const int most = std::min(here - done, panels_at_once(count));
                    width = most >= 4 ? 4 : most >= 2 ? 2 : 1;
                    const Tile<T> compute = tile_of<T>(count, width);
                    const T* w = (const T*)packed + (panel + done) * stride;
                    const char* next = (const char*)(w + group * stride) + block * (k / kStep) * lines * 64;
                    const Ahead ahead{blocks == 1 ? nullptr : next, block * lines < kStepLines<T> ? lines : 0};
                    C* out = sums + done * NR;
                    if (segments == 1) compute(block_rows, w, stride, 0, k, ahead, out, here * NR);
                    else segmented_tile<T>(compute, block_rows, w, stride, k, segments, ahead, out, count, width * NR,
                                           here * NR);
                }
                for (int row = 0; row < count; ++row)
                    for (int done = 0; done < here; done += Unit)
                        epilogue(first + share.first + row, panel + done, sums + (row * here + done) * NR);
            }
        }
    }
}

// `count` sums of a row as they leave a product: bias (of the same columns, or null) added, then rounded.
template <class T, class Out> void finish_sums(const Compute<T>* sums, const T* bias, long count, Out* to) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    long j = 0;
    for (; j + lanes <= count; j += lanes) {
        Vector<C> sum = load<Vector<C>>(sums + j);
        if (bias != nullptr) sum += load_wide(bias + j);
        store_narrow(to + j, sum);
    }
    for (; j < count; ++j) narrow(bias != nullptr ? sums[j] + widen(bias[j]) : sums[j], to[j]);
}

// This thread's share of y = x W^T + b for m rows of x (x_stride numbers apart). Out is T or Compute<T>; k is a
// multiple of segments.
template <class T, class Out>
void gemm_part(int thread, int threads, const T* x, long m, long x_stride, const void* packed, const T* bias, long n,
               long k, int segments, Out* y, long y_stride) {
    constexpr long NR = kPanel<T>;
    gemm_sums<T, 1>(thread, threads, x, m, x_stride, packed, num_panels<T>(n), k, segments,
                    [=](long row, long panel, const Compute<T>* sums) {
        const long column = panel * NR;
        finish_sums<T>(sums, bias == nullptr ? nullptr : bias + column, std::min(NR, n - column),
                       y + row * y_stride + column);
    }, [=](long row, long panel) {
        // A line that is first missed by its write holds up the tile: 74 instead of 84 GF/s with k = 256.
        const char* to = (const char*)(y + row * y_stride + panel * NR);
#pragma GCC unroll 4
        for (size_t line = 0; line < NR * sizeof(Out); line += 64) __builtin_prefetch(to + line, 1);
    });
}

// This thread's share of two products of the same x whose answers are wanted side by side (gate and up of a gated
// feed-forward): `packed` has both weights [n, k], panels in turn (`pack_part` with step 2, offsets 0 and 1). Calls
// combine(row, column, count, const T* first, const T* second) with both answers for `count` columns from `column`,
// rounded to T, the same bits as of `gemm_part`; they are never written anywhere else. Biases may be null.
template <class T, class Combine>
void gemm_pair_part(int thread, int threads, const T* x, long m, long x_stride, const void* packed, const T* first_bias,
                    const T* second_bias, long n, long k, Combine&& combine) {
    constexpr long NR = kPanel<T>;
    gemm_sums<T, 2>(thread, threads, x, m, x_stride, packed, 2 * num_panels<T>(n), k, 1,
                    [&](long row, long panel, const Compute<T>* sums) {
        const long column = panel / 2 * NR, count = std::min(NR, n - column);
        alignas(64) T first[NR], second[NR];
        finish_sums<T>(sums, first_bias == nullptr ? nullptr : first_bias + column, count, first);
        finish_sums<T>(sums + NR, second_bias == nullptr ? nullptr : second_bias + column, count, second);
        combine(row, column, count, (const T*)first, (const T*)second);
    }, [](long, long) {});
}

}  // namespace hf
