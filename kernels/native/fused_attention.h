// Attention of a trainer, forward and backward, for rows that go on in branches: a branch sees the row that it goes on
// from (its root) and itself. Works on a fused projection, whose queries and keys it rotates on the way. Arithmetic in
// Compute<T>; scores exist for a few queries at a time. One call computes one kv head of one family (a root and its
// branches), so that no two threads add to one gradient. Starts no thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "vector_math.h"

namespace hf {

template <class C> inline long padded(long count) { return (count + kLanes<C> - 1) / kLanes<C> * kLanes<C>; }

// c = a b, or c += a b: [m, n] of [m, k] and [k, n]; b and c have rows of whole vectors, a has any strides.
template <class C, int R, int V>
inline void product_tile(const C* a, long a_row, long a_col, const C* b, long b_row, C* c, long c_row, long k, bool add) {
    constexpr int lanes = kLanes<C>;
    Vector<C> sums[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = add ? load<Vector<C>>(c + r * c_row + v * lanes) : Vector<C>{};
    for (long p = 0; p < k; ++p) {
        Vector<C> factors[V];
        for (int v = 0; v < V; ++v) factors[v] = load<Vector<C>>(b + p * b_row + v * lanes);
        for (int r = 0; r < R; ++r) {
            C each = a[r * a_row + p * a_col];
            for (int v = 0; v < V; ++v) sums[r][v] += factors[v] * each;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(c + r * c_row + v * lanes, sums[r][v]);
}

// Rows [i, m) of a product, `V` vectors of columns: six at a time, and the rest together.
template <class C, int V>
inline void product_columns(const C* a, long a_row, long a_col, const C* b, long b_row, C* c, long c_row, long m, long k,
                            bool add) {
    long i = 0;
    for (; i + 6 <= m; i += 6)
        product_tile<C, 6, V>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, k, add);
    a += i * a_row, c += i * c_row;
    switch (m - i) {
        case 1: return product_tile<C, 1, V>(a, a_row, a_col, b, b_row, c, c_row, k, add);
        case 2: return product_tile<C, 2, V>(a, a_row, a_col, b, b_row, c, c_row, k, add);
        case 3: return product_tile<C, 3, V>(a, a_row, a_col, b, b_row, c, c_row, k, add);
        case 4: return product_tile<C, 4, V>(a, a_row, a_col, b, b_row, c, c_row, k, add);
        case 5: return product_tile<C, 5, V>(a, a_row, a_col, b, b_row, c, c_row, k, add);
    }
}

template <class C>
void product(const C* a, long a_row, long a_col, const C* b, long b_row, C* c, long c_row, long m, long n, long k,
             bool add = false) {
    constexpr int lanes = kLanes<C>;
    long j = 0;
    for (; j + 2 * lanes <= n; j += 2 * lanes)
        product_columns<C, 2>(a, a_row, a_col, b + j, b_row, c + j, c_row, m, k, add);
    if (j < n) product_columns<C, 1>(a, a_row, a_col, b + j, b_row, c + j, c_row, m, k, add);
}

// What all families share. Tokens are token_stride numbers apart, in a projection [q heads | k heads | v heads] and in
// its gradient alike; tables are [tokens, head_dim] as in hf_rotate. log_sums: [tokens, heads].
template <class T> struct Projection {
    const T* qkv;
    long token_stride, heads, kv_heads, head_dim;
    const T *cos, *signed_sin;
    T* out;
    Compute<T>* log_sums;
    const T* grad_out;
    T* grad_qkv;
};

// Tokens of a root (first of `segments`) and of its branches.
struct Segment {
    long start, length;
};

template <class T> class FamilyHead {
    using C = Compute<T>;

public:
    FamilyHead(const Projection<T>& all, const Segment* segments, long count, long kv, bool backward)
        : all_(all), segments_(segments), count_(count), kv_(kv), backward_(backward), group_(all.heads / all.kv_heads),
          dim_(all.head_dim), width_(padded<C>(all.head_dim)), root_(segments[0].length) {
        long longest = 0;
        for (long i = 1; i < count; ++i) longest = std::max(longest, segments[i].length);
        keys_ = root_ + longest;
        row_ = padded<C>(keys_);
        tokens_ = std::max<long>(1, std::min<long>(kTokens, kScores / (row_ * group_)));
        long rows = tokens_ * group_, size = keys_ * width_;
        auto& room = scratch();
        long matrices = 2 * size + 2 * dim_ * row_ + (backward ? 2 * size : 0);
        long blocks = rows * (4 * width_ + 2 * row_ + 2);
        if (room.size() < size_t(matrices + blocks)) room.resize(matrices + blocks);
        C* next = room.data();
        auto take = [&](long numbers) { return std::exchange(next, next + numbers); };
        k_ = take(size), v_ = take(size), k_columns_ = take(dim_ * row_), v_columns_ = take(dim_ * row_);
        if (backward) grad_k_ = take(size), grad_v_ = take(size);
        q_ = take(rows * width_), o_ = take(rows * width_), grad_o_ = take(rows * width_), grad_q_ = take(rows * width_);
        scores_ = take(rows * row_), grad_scores_ = take(rows * row_), dots_ = take(rows), sums_ = take(rows);
    }

    void run() {
        for (long i = 0; i < count_; ++i) {
            long base = i ? root_ : 0;
            load_keys(segments_[i], base);
            for (long token = 0; token < segments_[i].length; token += tokens_) {
                long tokens = std::min(tokens_, segments_[i].length - token);
                backward_ ? backward_block(segments_[i], base, token, tokens) : block(segments_[i], base, token, tokens);
            }
            if (backward_ && i) store_key_gradients(segments_[i], base);
        }
        if (backward_) store_key_gradients(segments_[0], 0);
    }

private:
    static constexpr long kTokens = 24, kScores = 1 << 16;

    static std::vector<C>& scratch() {
        thread_local std::vector<C> room;
        return room;
    }

    const T* head_of(long token, long head) const { return all_.qkv + token * all_.token_stride + head * dim_; }
    T* grad_of(long token, long head) const { return all_.grad_qkv + token * all_.token_stride + head * dim_; }

    // One head in the compute type, rotated by its token's angles.
    void load_rotated(long token, long head, C* to) const {
        const T *from = head_of(token, head), *cos = all_.cos + token * dim_;
        const T* sin = all_.signed_sin + token * dim_ + dim_ / 2;
        long half = dim_ / 2;
        for (long i = 0; i < half; i += kLanes<C>) {
            long left = half - i;
            Vector<C> a = load_some(from + i, left), b = load_some(from + half + i, left);
            Vector<C> c = load_some(cos + i, left), s = load_some(sin + i, left);
            store_some(to + i, a * c - b * s, left);
            store_some(to + half + i, b * c + a * s, left);
        }
    }
    // The gradient of what load_rotated read.
    void store_turned_back(long token, long head, const C* from) const {
        T* to = grad_of(token, head);
        const T *cos = all_.cos + token * dim_, *sin = all_.signed_sin + token * dim_ + dim_ / 2;
        long half = dim_ / 2;
        for (long i = 0; i < half; i += kLanes<C>) {
            long left = half - i;
            Vector<C> a = load_some(from + i, left), b = load_some(from + half + i, left);
            Vector<C> c = load_some(cos + i, left), s = load_some(sin + i, left);
            store_some(to + i, a * c + b * s, left);
            store_some(to + half + i, b * c - a * s, left);
        }
    }
    // As many numbers as a head has, in vectors: to may have room for the last whole one.
    template <class From> void load_head(const From* from, C* to) const {
        for (long i = 0; i < dim_; i += kLanes<C>) store(to + i, load_some(from + i, dim_ - i));
    }
    void store_head(const C* from, C factor, T* to) const {
        for (long i = 0; i < dim_; i += kLanes<C>) store_some(to + i, load<Vector<C>>(from + i) * factor, dim_ - i);
    }
    // A head's row among the columns of a transposed matrix.
    void transpose(const C* from, C* columns) const {
        for (long d = 0; d < dim_; ++d) columns[d * row_] = from[d];
    }

    // Keys and values of a segment behind the first `base` ones, in rows and in columns.
    void load_keys(const Segment& segment, long base) {
        for (long i = 0; i < segment.length; ++i) {
            C *k = k_ + (base + i) * width_, *v = v_ + (base + i) * width_;
            load_rotated(segment.start + i, all_.heads + kv_, k);
            load_head(head_of(segment.start + i, all_.heads + all_.kv_heads + kv_), v);
            transpose(k, k_columns_ + base + i);
            if (backward_) transpose(v, v_columns_ + base + i);
        }
        if (backward_) {
            std::fill(grad_k_ + base * width_, grad_k_ + (base + segment.length) * width_, C(0));
            std::fill(grad_v_ + base * width_, grad_v_ + (base + segment.length) * width_, C(0));
        }
    }

    void store_key_gradients(const Segment& segment, long base) {
        for (long i = 0; i < segment.length; ++i) {
            store_turned_back(segment.start + i, all_.heads + kv_, grad_k_ + (base + i) * width_);
            store_head(grad_v_ + (base + i) * width_, C(1),
                       grad_of(segment.start + i, all_.heads + all_.kv_heads + kv_));
        }
    }

    // work(row, token, head) of each query of some tokens of a segment.
    template <class Work> void for_queries(const Segment& segment, long token, long tokens, Work&& work) const {
        long row = 0;
        for (long at = segment.start + token; at < segment.start + token + tokens; ++at)
            for (long head = kv_ * group_; head < (kv_ + 1) * group_; ++head) work(row++, at, head);
    }

    // The queries of some tokens, and their scores.
    void score(const Segment& segment, long token, long tokens, long seen) {
        for_queries(segment, token, tokens,
                    [&](long row, long at, long head) { load_rotated(at, head, q_ + row * width_); });
        product(q_, width_, 1, k_columns_, row_, scores_, row_, tokens * group_, padded<C>(seen), dim_);
    }

    void block(const Segment& segment, long base, long token, long tokens) {
        long rows = tokens * group_, seen = base + token + tokens;
        C factor = C(1) / std::sqrt(C(dim_));
        score(segment, token, tokens, seen);
        for_queries(segment, token, tokens, [&](long row, long at, long head) {
            C* s = scores_ + row * row_;
            long limit = base + at - segment.start + 1;
            std::fill(s + limit, s + padded<C>(seen), C(-INFINITY));
            Vector<C> top = splat<C>(-INFINITY), sum{};
            for (long i = 0; i < padded<C>(limit); i += kLanes<C>) {
                Vector<C> each = load<Vector<C>>(s + i);
                top = each > top ? each : top;
            }
            C peak = max_lanes<C>(top) * factor;
            for (long i = 0; i < padded<C>(seen); i += kLanes<C>) {
                Vector<C> e = exp_of<C>(load<Vector<C>>(s + i) * factor - peak);
                sum += e;
                store(s + i, e);
            }
            sums_[row] = sum_lanes<C>(sum);
            all_.log_sums[at * all_.heads + head] = peak + std::log(sums_[row]);
        });
        product(scores_, row_, 1, v_, width_, o_, width_, rows, width_, seen);
        for_queries(segment, token, tokens, [&](long row, long at, long head) {
            store_head(o_ + row * width_, C(1) / sums_[row], all_.out + (at * all_.heads + head) * dim_);
        });
    }

    void backward_block(const Segment& segment, long base, long token, long tokens) {
        long rows = tokens * group_, seen = base + token + tokens;
        C factor = C(1) / std::sqrt(C(dim_));
        score(segment, token, tokens, seen);
        for_queries(segment, token, tokens, [&](long row, long at, long head) {
            long place = at * all_.heads + head;
            load_head(all_.grad_out + place * dim_, grad_o_ + row * width_);
            Vector<C> dot{};
            for (long i = 0; i < dim_; i += kLanes<C>)
                dot += load<Vector<C>>(grad_o_ + row * width_ + i) * load_some(all_.out + place * dim_ + i, dim_ - i);
            dots_[row] = sum_lanes<C>(dot);
            sums_[row] = all_.log_sums[place];
        });
        product(grad_o_, width_, 1, v_columns_, row_, grad_scores_, row_, rows, padded<C>(seen), dim_);
        for_queries(segment, token, tokens, [&](long row, long at, long) {
            C *s = scores_ + row * row_, *g = grad_scores_ + row * row_;
            long limit = base + at - segment.start + 1;
            std::fill(s + limit, s + padded<C>(seen), C(-INFINITY));
            for (long i = 0; i < padded<C>(seen); i += kLanes<C>) {
                Vector<C> p = exp_of<C>(load<Vector<C>>(s + i) * factor - sums_[row]);
                store(s + i, p);
                store(g + i, p * (load<Vector<C>>(g + i) - dots_[row]) * factor);
            }
        });
        product(scores_, 1, row_, grad_o_, width_, grad_v_, width_, seen, width_, rows, true);
        product(grad_scores_, 1, row_, q_, width_, grad_k_, width_, seen, width_, rows, true);
        product(grad_scores_, row_, 1, k_, width_, grad_q_, width_, rows, width_, seen);
        for_queries(segment, token, tokens,
                    [&](long row, long at, long head) { store_turned_back(at, head, grad_q_ + row * width_); });
    }

    const Projection<T>& all_;
    const Segment* segments_;
    long count_, kv_;
    bool backward_;
    long group_, dim_, width_, root_, keys_, row_, tokens_;
    C *k_, *v_, *k_columns_, *v_columns_, *grad_k_, *grad_v_, *q_, *o_, *grad_o_, *grad_q_, *scores_, *grad_scores_;
    C *dots_, *sums_;
};

}  // namespace hf
