// Attention of a trainer, forward and backward, for rows that go on in branches: a branch sees the row that it goes on
// from (its root) and itself. Works on a fused projection, whose queries and keys it rotates on the way. Arithmetic in
// Compute<T>; scores exist for a block of queries at a time, queries along the lanes, so that a softmax is a loop over
// keys. One call computes one kv head of one family (a root and its branches), so that no two threads add to one
// gradient. Starts no thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "small_products.h"

namespace hf {

template <class C> inline long padded(long count) { return (count + kLanes<C> - 1) / kLanes<C> * kLanes<C>; }

// What all families share. Tokens are token_stride numbers apart, in a projection [q heads | k heads | v heads] and in
// its gradient alike; tables are [tokens, head_dim] as in hf_rotate. Of each softmax, [tokens, heads]: the peak of its
// scores, which are logarithms to the base 2, and 1 / (the sum of the exponentials below that peak).
template <class T> struct Projection {
    const T* qkv;
    long token_stride, heads, kv_heads, head_dim;
    const T *cos, *signed_sin;
    T* out;
    Compute<T>*peaks, *inverse_sums;
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
        long keys = root_ + longest + kSpare, size = keys * width_;
        together_ = keys * kBlock <= kScores ? kBlock : kPanel;
        auto& room = scratch();
        long numbers = (backward ? 4 : 2) * size + kBlock * (5 * width_ + (backward ? 2 : 1) * keys + 3);
        if (room.size() < size_t(numbers)) room.resize(numbers);
        C* next = room.data();
        auto take = [&](long numbers) { return std::exchange(next, next + numbers); };
        k_ = take(size), v_ = take(size);
        scores_ = take(kBlock * keys);
        if (backward) grad_k_ = take(size), grad_v_ = take(size), grad_scores_ = take(kBlock * keys);
        q_ = take(kBlock * width_), q_columns_ = take(kBlock * width_), o_ = take(kBlock * width_);
        grad_o_ = take(kBlock * width_), grad_o_columns_ = take(kBlock * width_);
        peaks_ = take(kBlock), inverse_sums_ = take(kBlock);
    }

    void run() {
        for (long i = 0; i < count_; ++i) {
            base_ = i ? root_ : 0, start_ = segments_[i].start;
            load_keys(segments_[i]);
            for (long query = 0; query < segments_[i].length * group_; query += together_) {
                first_ = query, queries_ = std::min(together_, segments_[i].length * group_ - query);
                backward_ ? backward_block() : block();
            }
            if (backward_ && i) store_key_gradients(segments_[i], root_);
        }
        if (backward_) store_key_gradients(segments_[0], 0);
    }

private:
    static constexpr int kPanel = 3 * kLanes<C>;  // queries whose scores are computed together
    static constexpr int kBlock = 48;  // queries that share a pass over keys, fewer where there are many keys
    static constexpr long kScores = 1 << 16;
    static constexpr int kSpare = 24;  // rows behind the last key that a tile may reach
    static_assert(kBlock % kPanel == 0 && kBlock % kRowsTogether == 0 && kSpare >= 2 * kRowsTogether);

    static std::vector<C>& scratch() {
        thread_local std::vector<C> room;
        return room;
    }

    // Of query `row` of the block: its token in the segment, and how many keys it sees.
    long token_of(long row) const { return (first_ + row) / group_; }
    long seen_by(long row) const { return base_ + token_of(row) + 1; }
    // The first query of the block that sees a key.
    long first_that_sees(long key) const { return std::max<long>(0, (key - base_) * group_ - first_); }

    // work(row, place) for each query of the block, `place` in [tokens, heads].
    template <class Work> void for_queries(Work&& work) const {
        long token = token_of(0), head = first_ - token * group_, place = (start_ + token) * all_.heads + kv_ * group_;
        for (long row = 0; row < queries_; ++row) {
            work(row, place + head);
            if (++head == group_) head = 0, place += all_.heads;
        }
    }

    // A head of a token in the compute type, rotated by the token's angles, times a factor.
    void load_rotated(long token, long head, C factor, C* to) const {
        const T *from = all_.qkv + token * all_.token_stride + head * dim_, *cos = all_.cos + token * dim_;
        const T* sin = all_.signed_sin + token * dim_ + dim_ / 2;
        long half = dim_ / 2;
        for (long i = 0; i < half; i += kLanes<C>) {
            long left = half - i;
            Vector<C> a = load_some(from + i, left), b = load_some(from + half + i, left);
            Vector<C> c = load_some(cos + i, left) * factor, s = load_some(sin + i, left) * factor;
            store_some(to + i, a * c - b * s, left);
            store_some(to + half + i, b * c + a * s, left);
        }
    }
    // The gradient of what load_rotated read.
    void store_turned_back(long token, long head, C factor, const C* from) const {
        T* to = all_.grad_qkv + token * all_.token_stride + head * dim_;
        const T *cos = all_.cos + token * dim_, *sin = all_.signed_sin + token * dim_ + dim_ / 2;
        long half = dim_ / 2;
        for (long i = 0; i < half; i += kLanes<C>) {
            long left = half - i;
            Vector<C> a = load_some(from + i, left), b = load_some(from + half + i, left);
            Vector<C> c = load_some(cos + i, left) * factor, s = load_some(sin + i, left) * factor;
            store_some(to + i, a * c + b * s, left);
            store_some(to + half + i, b * c - a * s, left);
        }
    }
    // As many numbers as a head has, in vectors: what is in the compute type has room for the last whole one.
    void load_head(const T* from, C factor, C* to) const {
        for (long i = 0; i < dim_; i += kLanes<C>) store(to + i, load_some(from + i, dim_ - i) * factor);
    }
    void store_head(const C* from, C factor, T* to) const {
        for (long i = 0; i < dim_; i += kLanes<C>) store_some(to + i, load<Vector<C>>(from + i) * factor, dim_ - i);
    }

    long k_head() const { return all_.heads + kv_; }
    long v_head() const { return all_.heads + all_.kv_heads + kv_; }

    void load_keys(const Segment& segment) {
        for (long i = 0; i < segment.length; ++i) {
            long row = (base_ + i) * width_, token = segment.start + i;
            load_rotated(token, k_head(), C(1), k_ + row);
            load_head(all_.qkv + token * all_.token_stride + v_head() * dim_, C(1), v_ + row);
        }
        if (backward_) {
            long begin = base_ * width_, end = (base_ + segment.length) * width_;
            std::fill(grad_k_ + begin, grad_k_ + end, C(0));
            std::fill(grad_v_ + begin, grad_v_ + end, C(0));
        }
    }

    void store_key_gradients(const Segment& segment, long base) {
        for (long i = 0; i < segment.length; ++i) {
            long row = (base + i) * width_, token = segment.start + i;
            store_turned_back(token, k_head(), C(kLn2), grad_k_ + row);  // as queries were times 1 / ln 2
            store_head(grad_v_ + row, C(1), all_.grad_qkv + token * all_.token_stride + v_head() * dim_);
        }
    }

    void load_queries() {
        C factor = C(1 / kLn2) / std::sqrt(C(dim_));
        for_queries([&](long row, long place) {
            load_rotated(place / all_.heads, place % all_.heads, factor, q_ + row * width_);
        });
        transpose(q_, width_, queries_, dim_, q_columns_, kBlock);
    }

    // One panel of scores of the block with `seen` keys: finish(key, v, sum, sees) for each vector v of each key, at
    // `sees` its lanes that see the key: null where all do.
    template <int V, class Finish>
    __attribute__((always_inline)) void scores(const C* rows, const C* columns, long panel, Finish&& finish) const {
        constexpr int R = std::min(kSums / V, 12);
        long all_see = seen_by(panel), seen = seen_by(std::min(panel + V * kLanes<C>, queries_) - 1), key = 0;
        for (; key + R <= all_see; key += R) {
            Vector<C> sums[R][V] = {};
            add_product<C, R, V>(rows + key * width_, width_, 1, columns + panel, kBlock, dim_, sums);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) finish(key + r, v, sums[r][v], std::false_type(), IntVector<C>{});
        }
        IntVector<C> last[V];
        for (int i = 0; i < V * kLanes<C>; ++i) last[i / kLanes<C>][i % kLanes<C>] = seen_by(panel + i) - 1;
        for (; key < seen; key += R) {
            Vector<C> sums[R][V] = {};
            add_product<C, R, V>(rows + key * width_, width_, 1, columns + panel, kBlock, dim_, sums);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v)
                    finish(key + r, v, sums[r][v], std::true_type(), last[v] >= Int<C>(key + r));
        }
    }

    // work<vectors>(panel) for each panel of the block, `panel` its first query.
    template <class Work> void for_panels(Work&& work) const {
        for (long panel = 0; panel < queries_; panel += kPanel) {
            long vectors = (queries_ - panel + kLanes<C> - 1) / kLanes<C>;
            if (vectors == 1) work.template operator()<1>(panel);
            else if (vectors == 2) work.template operator()<2>(panel);
            else work.template operator()<3>(panel);
        }
    }

    // Rows of a panel from key `seen` on, as far as a tile of the block's products may reach.
    template <int V> void clear_unseen(C* scores, long seen) const {
        long end = seen_by(queries_ - 1) + kRowsTogether - 1;
        for (long key = seen; key < end; ++key)
            for (int v = 0; v < V; ++v) store(scores + key * kBlock + v * kLanes<C>, Vector<C>{});
    }

    template <int V> void softmax(long panel) {
        C* to = scores_ + panel;
        Vector<C> top[V], sum[V] = {};
        for (int v = 0; v < V; ++v) top[v] = splat<C>(-INFINITY);
        scores<V>(k_, q_columns_, panel, [&](long key, int v, Vector<C> s, auto masked, IntVector<C> sees)
                  __attribute__((always_inline)) {
            if constexpr (masked.value) s = sees ? s : splat<C>(-INFINITY);
            store(to + key * kBlock + v * kLanes<C>, s);
            top[v] = s > top[v] ? s : top[v];
        });
        long seen = seen_by(std::min(panel + V * kLanes<C>, queries_) - 1);
        for (long key = 0; key < seen; ++key)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                C* place = to + key * kBlock + v * kLanes<C>;
                Vector<C> e = exp2_of<C>(load<Vector<C>>(place) - top[v]);
                sum[v] += e;
                store(place, e);
            }
        clear_unseen<V>(to, seen);
        for (int v = 0; v < V; ++v) {
            store(peaks_ + panel + v * kLanes<C>, top[v]);
            store(inverse_sums_ + panel + v * kLanes<C>, C(1) / sum[v]);
        }
    }

    // to [queries, width] = the sum over keys of weights [keys, queries] times rows [keys, width].
    void over_keys(const C* weights, const C* rows, C* to) const {
        for (long row = 0; row < queries_; row += kRowsTogether) {
            long seen = seen_by(std::min<long>(row + kRowsTogether, queries_) - 1);
            product_rows<C, false>(weights + row, 1, kBlock, rows, to + row * width_, width_, seen);
        }
    }
    // to [keys, width] += the sum over queries.
    void add_over_queries(const C* weights, const C* rows, C* to) const {
        for (long key = 0; key < seen_by(queries_ - 1); key += kRowsTogether) {
            long from = first_that_sees(key);
            product_rows<C, true>(weights + key * kBlock + from, kBlock, 1, rows + from * width_, to + key * width_,
                                  width_, queries_ - from);
        }
    }

    void block() {
        load_queries();
        for_panels([&]<int V>(long panel) { softmax<V>(panel); });
        over_keys(scores_, v_, o_);
        for_queries([&](long row, long place) {
            store_head(o_ + row * width_, inverse_sums_[row], all_.out + place * dim_);
            all_.peaks[place] = peaks_[row];
            all_.inverse_sums[place] = inverse_sums_[row];
        });
    }

    // Weights but for 1 / sum, which the gradients of outputs have as a factor, and the gradients of scores.
    template <int V> void score_gradients(long panel) {
        C *weights = scores_ + panel, *grads = grad_scores_ + panel;
        Vector<C> peaks[V], dots[V] = {};
        for (int v = 0; v < V; ++v) peaks[v] = load<Vector<C>>(peaks_ + panel + v * kLanes<C>);
        scores<V>(k_, q_columns_, panel, [&](long key, int v, Vector<C> s, auto masked, IntVector<C> sees)
                  __attribute__((always_inline)) {
            Vector<C> weight = exp2_of<C>(s - peaks[v]);
            if constexpr (masked.value) weight = sees ? weight : Vector<C>{};
            store(weights + key * kBlock + v * kLanes<C>, weight);
        });
        scores<V>(v_, grad_o_columns_, panel, [&](long key, int v, Vector<C> g, auto masked, IntVector<C> sees)
                  __attribute__((always_inline)) {
            if constexpr (masked.value) g = sees ? g : Vector<C>{};
            store(grads + key * kBlock + v * kLanes<C>, g);
            dots[v] += g * load<Vector<C>>(weights + key * kBlock + v * kLanes<C>);
        });
        for (int v = 0; v < V; ++v) dots[v] *= load<Vector<C>>(inverse_sums_ + panel + v * kLanes<C>);
        long seen = seen_by(std::min(panel + V * kLanes<C>, queries_) - 1);
        for (long key = 0; key < seen; ++key)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                long place = key * kBlock + v * kLanes<C>;
                store(grads + place, load<Vector<C>>(weights + place) * (load<Vector<C>>(grads + place) - dots[v]));
            }
        clear_unseen<V>(weights, seen);
        clear_unseen<V>(grads, seen);
    }

    void backward_block() {
        load_queries();
        for_queries([&](long row, long place) {
            peaks_[row] = all_.peaks[place];
            inverse_sums_[row] = all_.inverse_sums[place];
            load_head(all_.grad_out + place * dim_, inverse_sums_[row], grad_o_ + row * width_);
        });
        transpose(grad_o_, width_, queries_, dim_, grad_o_columns_, kBlock);
        for_panels([&]<int V>(long panel) { score_gradients<V>(panel); });
        add_over_queries(scores_, grad_o_, grad_v_);
        add_over_queries(grad_scores_, q_, grad_k_);
        over_keys(grad_scores_, k_, o_);
        C factor = C(1) / std::sqrt(C(dim_));
        for_queries([&](long row, long place) {
            store_turned_back(place / all_.heads, place % all_.heads, factor, o_ + row * width_);
        });
    }

    static constexpr double kLn2 = 0.69314718055994530942;

    const Projection<T>& all_;
    const Segment* segments_;
    long count_, kv_;
    bool backward_;
    long group_, dim_, width_, root_, together_;
    // Where run() is: a segment's first token and the keys before it; a block's first query in the segment and size.
    long start_, base_, first_, queries_;
    C *k_, *v_, *grad_k_, *grad_v_;                       // [keys, width]
    C *q_, *o_, *grad_o_, *q_columns_, *grad_o_columns_;  // [block, width], columns [width, block]
    C *scores_, *grad_scores_, *peaks_, *inverse_sums_;   // [keys, block], the last two [block]
};

}  // namespace hf
