// Attention of queries to keys and values that lie in pages of 16 positions. Owns the pages' layout and the arithmetic;
// never decides who attends to what, and starts no thread.
//
// A page of keys is [head_dim][16], so that one load serves 16 scores of a query; a page of values is [16][head_dim].
// Query heads that share a key-value head, and neighbouring queries of a prompt, share every load.
//
// A step reads every page once, and mostly from memory that no cache holds: while scores are computed, the values and
// the next keys are fetched (a quarter of attention's time at 64 rows of 100 tokens, where memory is then what it waits
// for).
//
// A query's bits depend on its keys and values alone, in the order of their positions: a score is one chain over
// head_dim; maximum and sum of the softmax run over all keys of the query in vectors of fixed places; an output is two
// chains over the even and the odd positions, added at the end. Rows that share loads do not mix.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vector_math.h"

namespace hf {

constexpr int kPage = 16;      // positions of a page
constexpr int kRowsAtOnce = 4;  // queries that share a load

// Where one key-value head of one sequence lies: page i at base + table[i] * stride.
template <class T> struct Pages {
    const T* keys;
    const T* values;
    const int32_t* table;
    long stride;  // numbers from a block to the next
    const T* key_page(long index) const { return keys + table[index] * stride; }
    const T* value_page(long index) const { return values + table[index] * stride; }
};

// A key and a value at a position of their pages.
template <class T>
void write_position(T* key_page, T* value_page, long offset, const T* key, const T* value, long head_dim) {
    for (long i = 0; i < head_dim; ++i) key_page[i * kPage + offset] = key[i];
    std::memcpy((void*)(value_page + offset * head_dim), (const void*)value, head_dim * sizeof(T));
}

// Room of one thread; grows, never shrinks.
template <class C> struct AttentionScratch {
    std::vector<C> queries, scores;
    C* query_room(long size) { return room(queries, size); }
    C* score_room(long size) { return room(scores, size); }
    static C* room(std::vector<C>& from, long size) {
        if (long(from.size()) < size) from.resize(size + size / 2);
        return from.data();
    }
};

// Scores of ROWS queries [ROWS][head_dim] with the keys of BLOCKS pages, to scores[row * width + key]. `soon` are twice
// as many pages that will be read.
template <class T, int ROWS, int BLOCKS>
void score_pages(const Compute<T>* queries, const T* const* pages, const T* const* soon, long head_dim,
                 Compute<T>* scores, long width) {
    using C = Compute<T>;
    constexpr int parts = kPage / kLanes<C>;
    Vector<C> sums[ROWS][BLOCKS][parts] = {};
    for (long i = 0; i < head_dim; ++i) {
        if (i * kPage * sizeof(T) % 64 == 0)
#pragma GCC unroll 8
            for (int block = 0; block < 2 * BLOCKS; ++block) __builtin_prefetch(soon[block] + i * kPage, 0, 3);
        Vector<C> keys[BLOCKS][parts];
#pragma GCC unroll 8
        for (int block = 0; block < BLOCKS; ++block)
#pragma GCC unroll 8
            for (int part = 0; part < parts; ++part)
                keys[block][part] = load_wide(pages[block] + i * kPage + part * kLanes<C>);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            Vector<C> query = splat<C>(queries[row * head_dim + i]);
#pragma GCC unroll 8
            for (int block = 0; block < BLOCKS; ++block)
#pragma GCC unroll 8
                for (int part = 0; part < parts; ++part) sums[row][block][part] += query * keys[block][part];
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int block = 0; block < BLOCKS; ++block)
#pragma GCC unroll 8
            for (int part = 0; part < parts; ++part)
                store(scores + row * width + block * kPage + part * kLanes<C>, sums[row][block][part]);
}

// Scores of `count` keys become weights exp((score - max) * scale), 0 from `count` to `end` (whole pages); their sum.
template <class C> C softmax_row(C* scores, long count, long end, C scale) {
    constexpr int lanes = kLanes<C>;
    const IntVector<C> places = iota<C>();
    const Vector<C> least = splat<C>(-INFINITY);
    Vector<C> top = least;
    long whole = count / lanes * lanes;
    for (long i = 0; i < whole; i += lanes) {
        Vector<C> s = load<Vector<C>>(scores + i);
        top = s > top ? s : top;
    }
    if (whole < count) {
        Vector<C> s = places < Int<C>(count - whole) ? load<Vector<C>>(scores + whole) : least;
        store(scores + whole, s);
        top = s > top ? s : top;
    }
    C peak = max_lanes<C>(top);
    Vector<C> sum{};
    long filled = (count + lanes - 1) / lanes * lanes;
    for (long i = 0; i < filled; i += lanes) {
        Vector<C> weight = exp_of<C>((load<Vector<C>>(scores + i) - peak) * scale);
        sum += weight;
        store(scores + i, weight);
    }
    for (long i = filled; i < end; i += lanes) store(scores + i, Vector<C>{});
    return sum_lanes<C>(sum);
}

// out[row][first .. first + VECTORS * lanes) = sum over keys of weight * value, divided by total; VECTORS * lanes
// numbers are loaded from every value, `left` are stored.
template <class T, int ROWS, int VECTORS>
void weigh_values(const Pages<T>& pages, const Compute<T>* weights, long width, long count, long head_dim, long first,
                  const Compute<T>* totals, T* const* outs, long left) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    Vector<C> sums[2][ROWS][VECTORS] = {};
    for (long page = 0; page * kPage < count; ++page) {
        const T* values = pages.value_page(page) + first;
        const C* weight = weights + page * kPage;
        long keys = count - page * kPage < kPage ? count - page * kPage : kPage;
        auto add = [&](int parity, long key) {
            Vector<C> value[VECTORS];
#pragma GCC unroll 8
            for (int part = 0; part < VECTORS; ++part) value[part] = load_wide(values + key * head_dim + part * lanes);
#pragma GCC unroll 8
            for (int row = 0; row < ROWS; ++row) {
                Vector<C> w = splat<C>(weight[row * width + key]);
#pragma GCC unroll 8
                for (int part = 0; part < VECTORS; ++part) sums[parity][row][part] += w * value[part];
            }
        };
        for (long key = 0; key + 2 <= keys; key += 2) {
            add(0, key);
            add(1, key + 1);
        }
        if (keys % 2) add(0, keys - 1);
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; ++part)
            if (part * lanes < left)
                store_some(outs[row] + first + part * lanes,
                           (sums[0][row][part] + sums[1][row][part]) / splat<C>(totals[row]), left - part * lanes);
}

// ROWS queries [ROWS][head_dim] of one key-value head, query `row` sees its first counts[row] positions. outs[row]
// [head_dim] may be anywhere. Values are read up to kVectorBytes behind the last page.
template <class T, int ROWS>
void attend_rows(const Pages<T>& pages, const Compute<T>* queries, const long* counts, long head_dim, T* const* outs,
                 AttentionScratch<Compute<T>>& scratch) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    constexpr int most = ROWS == 4 ? 2 : 4;  // vectors of sums that stay in registers
    long count = 0;
    for (int row = 0; row < ROWS; ++row) count = counts[row] > count ? counts[row] : count;
    long blocks = (count + kPage - 1) / kPage, width = blocks * kPage;
    C* scores = scratch.score_room(ROWS * width);
    long block = 0;
    for (; block + 4 <= blocks; block += 4) {
        const T *keys[4], *soon[8];
        for (int i = 0; i < 4; ++i) {
            keys[i] = pages.key_page(block + i);
            soon[i] = pages.value_page(block + i);
            soon[4 + i] = pages.key_page(std::min(block + 4 + i, blocks - 1));
        }
        score_pages<T, ROWS, 4>(queries, keys, soon, head_dim, scores + block * kPage, width);
    }
    for (; block < blocks; ++block) {
        const T* keys = pages.key_page(block);
        const T* soon[2] = {pages.value_page(block), pages.key_page(std::min(block + 1, blocks - 1))};
        score_pages<T, ROWS, 1>(queries, &keys, soon, head_dim, scores + block * kPage, width);
    }
    C totals[ROWS], scale = C(1) / std::sqrt(C(head_dim));
    for (int row = 0; row < ROWS; ++row) totals[row] = softmax_row(scores + row * width, counts[row], width, scale);
    for (long first = 0; first < head_dim; first += most * lanes) {
        long left = head_dim - first;
        auto weigh = [&]<int VECTORS>() {
            weigh_values<T, ROWS, VECTORS>(pages, scores, width, count, head_dim, first, totals, outs, left);
        };
        if (left > 3 * lanes && most == 4) weigh.template operator()<most>();
        else if (left > 2 * lanes && most == 4) weigh.template operator()<most == 4 ? 3 : 2>();
        else if (left > lanes) weigh.template operator()<2>();
        else weigh.template operator()<1>();
    }
}

// The same for any number of rows.
template <class T>
void attend(const Pages<T>& pages, long rows, const Compute<T>* queries, const long* counts, long head_dim,
            T* const* outs, AttentionScratch<Compute<T>>& scratch) {
    for (long row = 0; row < rows;) {
        long some = rows - row < kRowsAtOnce ? rows - row : kRowsAtOnce;
        auto go = [&]<int ROWS>() {
            attend_rows<T, ROWS>(pages, queries + row * head_dim, counts + row, head_dim, outs + row, scratch);
        };
        switch (some) {
            case 1: go.template operator()<1>(); break;
            case 2: go.template operator()<2>(); break;
            case 3: go.template operator()<3>(); break;
            default: go.template operator()<4>(); break;
        }
        row += some;
    }
}

}  // namespace hf
