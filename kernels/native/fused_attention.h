// Attention of a trainer, forward and backward, for rows that go on in branches: a branch sees the row that it goes on
// from (its root) and itself. Works on a fused projection, whose queries and keys it rotates on the way. Arithmetic in
// Compute<T>; scores exist for a block of queries at a time, queries along the lanes, so that a softmax is a loop over
// keys. One call computes some kv heads of one family (a root and its branches), so that no two threads add to one
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

// A token's heads lie together, tokens far apart: heads of some tokens are read and written together, and wait in the
// second-level cache for their turn. As many kv heads at once as that cache has room for.
template <class T> class FamilyHeads {
    using C = Compute<T>;

public:
    FamilyHeads(const Projection<T>& all, const Segment* segments, long count, long kv_first, long kv_last,
                bool backward)
        : all_(all), segments_(segments), count_(count), kv_(kv_first), kv_last_(kv_last), backward_(backward),
          group_(all.heads / all.kv_heads), dim_(all.head_dim), width_(padded<C>(all.head_dim)),
          root_(segments[0].length), tokens_together_(std::max<long>(1, 2 * kBlock / group_)) {
        long longest = 0;
        for (long i = 1; i < count; ++i) longest = std::max(longest, segments[i].length);
        long keys = root_ + longest + kSpare, rows = (tokens_together_ * group_ + kBlock - 1) / kBlock * kBlock;
        tokens_of_queries_.resize(rows);
        for (long row = 0, left = group_, token = 0; row < rows; ++row, --left) {
            if (left == 0) left = group_, ++token;
            tokens_of_queries_[row] = Int<C>(token);
        }
        queries_together_ = keys * kBlock <= kScores ? kBlock : kFewer;
        long used = 0;
        auto take = [&](long numbers) { return std::exchange(used, used + in_lines(numbers)); };
        head_.k = take(keys * width_), head_.v = take(keys * width_), head_.q = take(rows * width_);
        head_.peaks = take(rows), head_.inverse_sums = take(rows);
        if (backward) {
            head_.grad_k = take(keys * width_), head_.grad_v = take(keys * width_);
            head_.grad_o = take(rows * width_);
        }
        head_.size = used;
        heads_together_ = std::clamp<long>(kNear / long(head_.size * sizeof(C)), 1, kv_last - kv_first);
        long scores = in_lines(kBlock * keys), columns = in_lines(kBlock * width_);
        C* next = scratch(heads_together_ * head_.size + (backward ? 2 : 1) * (scores + columns));
        room_ = std::exchange(next, next + heads_together_ * head_.size);
        scores_ = std::exchange(next, next + scores), q_columns_ = std::exchange(next, next + columns);
        if (backward) grad_scores_ = std::exchange(next, next + scores), grad_o_columns_ = next;
    }

    void run() {
        for (; kv_ < kv_last_; kv_ += heads_) {
            heads_ = std::min(heads_together_, kv_last_ - kv_);
            for (long i = 0; i < count_; ++i) {
                base_ = i ? root_ : 0, start_ = segments_[i].start;
                if (backward_) clear_key_gradients(segments_[i].length);
                for (long token = 0; token < segments_[i].length; token += tokens_together_)
                    tokens(token, std::min(tokens_together_, segments_[i].length - token));
                if (backward_ && i) store_key_gradients(segments_[i], root_);
            }
            if (backward_) store_key_gradients(segments_[0], 0);
        }
    }

private:
    static constexpr int kPanel = 3 * kLanes<C>;  // queries whose scores are computed together
    static constexpr int kBlock = 48;  // queries that share a pass over keys, fewer where there are many keys
    static constexpr int kFewer = std::max(kPanel, kRowsTogether);
    static constexpr long kScores = 1 << 16;
    static constexpr int kSpare = 24;  // rows behind the last key that a tile may reach
    static constexpr long kNear = 384 << 10;  // bytes of heads that are worked on in turn
    static_assert(kBlock % kFewer == 0 && kFewer % kPanel == 0 && kFewer % kRowsTogether == 0 &&
                  kSpare >= 2 * kRowsTogether);

    // What a head has of the scratch, in numbers from where that begins.
    struct HeadRoom {
        long k, v, grad_k, grad_v;            // [keys, width]
        long q, grad_o, peaks, inverse_sums;  // [queries, width], the last two [queries]; answers come in q's place
        long size;
    };

    static long in_lines(long numbers) {
        constexpr long line = 64 / sizeof(C);
        return (numbers + line - 1) / line * line;
    }
    // On a cache line: every other vector would lie on two.
    static C* scratch(long numbers) {
        thread_local std::vector<C> room;
        if (room.size() < size_t(numbers) + 64 / sizeof(C)) room.resize(numbers + 64 / sizeof(C));
        return (C*)((uintptr_t(room.data()) + 63) / 64 * 64);
    }

    // The last key that query `row` of the block sees: divided beforehand, a hundredth of attention.
    long last_seen_by(long row) const { return all_before_ + own_[row]; }
    // The first query of the block that sees a key.
    long first_that_sees(long key) const { return std::max<long>(0, (key - all_before_) * group_ - first_); }

    // Some tokens of the segment from `first` on: their queries, and keys for all that follow.
    void tokens(long first, long count) {
        all_before_ = base_ + first;
        for (long i = 0; i < count; ++i) load_token(first + i, i * group_);
        for (long head = 0; head < heads_; ++head)
            for (long row = 0; row < count * group_; row += queries_together_) {
                first_ = row, queries_ = std::min(queries_together_, count * group_ - row);
                own_ = tokens_of_queries_.data() + row;
                point_to(room_ + head * head_.size, row);
                backward_ ? backward_block() : block();
            }
        for (long i = 0; i < count; ++i) store_token(first + i, i * group_);
    }

    void point_to(C* head, long row) {
        k_ = head + head_.k, v_ = head + head_.v, q_ = head + head_.q + row * width_;
        peaks_ = head + head_.peaks + row, inverse_sums_ = head + head_.inverse_sums + row;
        if (!backward_) return;
        grad_k_ = head + head_.grad_k, grad_v_ = head + head_.grad_v, grad_o_ = head + head_.grad_o + row * width_;
    }

    // work(head, place) for `each` heads of every kv head: the head counted from the first, and the row of that kv
    // head's `rows` that follows `row` by one for each.
    template <class Work> void for_heads(long rows, long row, long each, Work&& work) const {
        for (long kv = 0, head = 0; kv < heads_; ++kv) {
            C* place = room_ + kv * head_.size + rows + row * width_;
            for (long i = 0; i < each; ++i) work(head++, place + i * width_);
        }
    }

    // Heads of a token in the compute type, rotated by the token's angles, times a factor: to `row` of `rows`.
    void load_rotated(long token, long first_head, C factor, long rows, long row, long each) const {
        const T *from = all_.qkv + token * all_.token_stride + first_head * dim_, *cos = all_.cos + token * dim_;
        const T* sin = all_.signed_sin + token * dim_ + dim_ / 2;
        long half = dim_ / 2;
        for (long i = 0; i < half; i += kLanes<C>) {
            long left = half - i;
            Vector<C> c = load_some(cos + i, left) * factor, s = load_some(sin + i, left) * factor;
            for_heads(rows, row, each, [&](long head, C* to) {
                const T* x = from + head * dim_ + i;
                Vector<C> a = load_some(x, left), b = load_some(x + half, left);
                store_some(to + i, a * c - b * s, left);
                store_some(to + half + i, b * c + a * s, left);
            });
        }
    }
    // The gradient of what load_rotated read.
    void store_turned_back(long token, long first_head, C factor, long rows, long row, long each) const {
        T* to = all_.grad_qkv + token * all_.token_stride + first_head * dim_;
        const T *cos = all_.cos + token * dim_, *sin = all_.signed_sin + token * dim_ + dim_ / 2;
        long half = dim_ / 2;
        for (long i = 0; i < half; i += kLanes<C>) {
            long left = half - i;
            Vector<C> c = load_some(cos + i, left) * factor, s = load_some(sin + i, left) * factor;
            for_heads(rows, row, each, [&](long head, const C* from) {
                T* x = to + head * dim_ + i;
                Vector<C> a = load_some(from + i, left), b = load_some(from + half + i, left);
                store_some(x, a * c + b * s, left);
                store_some(x + half, b * c - a * s, left);
            });
        }
    }
    // As many numbers as a head has, in vectors: what is in the compute type has room for the last whole one.
    void load_head(const T* from, C factor, C* to) const {
        for (long i = 0; i < dim_; i += kLanes<C>) store(to + i, load_some(from + i, dim_ - i) * factor);
    }
    void store_head(const C* from, C factor, T* to) const {
        for (long i = 0; i < dim_; i += kLanes<C>) store_some(to + i, load<Vector<C>>(from + i) * factor, dim_ - i);
    }

    long q_head() const { return kv_ * group_; }
    long k_head() const { return all_.heads + kv_; }
    long v_head() const { return all_.heads + all_.kv_heads + kv_; }

    // work(place in [tokens, heads], peak, inverse sum) for the queries of a token.
    template <class Work> void for_softmax(long token, long row, Work&& work) const {
        for (long kv = 0, place = token * all_.heads + q_head(); kv < heads_; ++kv) {
            C *head = room_ + kv * head_.size, *peaks = head + head_.peaks, *inverse_sums = head + head_.inverse_sums;
            for (long i = 0; i < group_; ++i) work(place++, peaks[row + i], inverse_sums[row + i]);
        }
    }

    // A token of the segment, whose queries are from `row` on.
    void load_token(long i, long row) {
        long token = start_ + i;
        load_rotated(token, q_head(), C(1 / kLn2) / std::sqrt(C(dim_)), head_.q, row, group_);
        load_rotated(token, k_head(), C(1), head_.k, base_ + i, 1);
        const T* values = all_.qkv + token * all_.token_stride + v_head() * dim_;
        for_heads(head_.v, base_ + i, 1, [&](long head, C* to) { load_head(values + head * dim_, C(1), to); });
        if (!backward_) return;
        for_softmax(token, row, [&](long place, C& peak, C& inverse_sum) {
            peak = all_.peaks[place], inverse_sum = all_.inverse_sums[place];
        });
        long place = token * all_.heads + q_head();
        for_heads(head_.grad_o, row, group_, [&](long head, C* to) {
            load_head(all_.grad_out + (place + head) * dim_, all_.inverse_sums[place + head], to);
        });
    }
    void store_token(long i, long row) const {
        long token = start_ + i, place = token * all_.heads + q_head();
        if (backward_) return store_turned_back(token, q_head(), C(1) / std::sqrt(C(dim_)), head_.q, row, group_);
        for_softmax(token, row, [&](long place, C peak, C inverse_sum) {
            all_.peaks[place] = peak, all_.inverse_sums[place] = inverse_sum;
        });
        for_heads(head_.q, row, group_, [&](long head, const C* from) {
            store_head(from, all_.inverse_sums[place + head], all_.out + (place + head) * dim_);
        });
    }

    void clear_key_gradients(long tokens) const {
        for (long kv = 0; kv < heads_; ++kv)
            for (long rows : {head_.grad_k, head_.grad_v})
                std::fill_n(room_ + kv * head_.size + rows + base_ * width_, tokens * width_, C(0));
    }
    void store_key_gradients(const Segment& segment, long base) const {
        for (long i = 0; i < segment.length; ++i) {
            long token = segment.start + i;
            store_turned_back(token, k_head(), C(kLn2), head_.grad_k, base + i, 1);  // as queries were times 1 / ln 2
            T* to = all_.grad_qkv + token * all_.token_stride + v_head() * dim_;
            for_heads(head_.grad_v, base + i, 1, [&](long head, const C* from) {
                store_head(from, C(1), to + head * dim_);
            });
        }
    }

    // How many keys a panel's last query sees.
    template <int V> long seen_by_panel(long panel) const {
        return last_seen_by(std::min(panel + V * kLanes<C>, queries_) - 1) + 1;
    }

    // One panel of scores of the block with `seen` keys: finish(key, v, sum, sees) for each vector v of each key, at
    // `sees` its lanes that see the key: null where all do.
    template <int V, class Finish>
    __attribute__((always_inline)) void scores(const C* rows, const C* columns, long panel, Finish&& finish) const {
        constexpr int R = std::min(kSums / V, 12);
        long all_see = last_seen_by(panel) + 1, seen = seen_by_panel<V>(panel), key = 0;
        for (; key + R <= all_see; key += R) {
            Vector<C> sums[R][V] = {};
            add_product<C, R, V>(rows + key * width_, width_, 1, columns + panel, kBlock, dim_, sums);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) finish(key + r, v, sums[r][v], std::false_type(), IntVector<C>{});
        }
        IntVector<C> last[V];
        for (int v = 0; v < V; ++v)
            last[v] = load<IntVector<C>>(own_ + panel + v * kLanes<C>) + Int<C>(all_before_);
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
        long end = last_seen_by(queries_ - 1) + kRowsTogether;
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
        long seen = seen_by_panel<V>(panel);
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
            long seen = last_seen_by(std::min<long>(row + kRowsTogether, queries_) - 1) + 1;
            product_rows<C, false>(weights + row, 1, kBlock, rows, to + row * width_, width_, seen);
        }
    }
    // to [keys, width] += the sum over queries.
    void add_over_queries(const C* weights, const C* rows, C* to) const {
        for (long key = 0; key <= last_seen_by(queries_ - 1); key += kRowsTogether) {
            long from = first_that_sees(key);
            product_rows<C, true>(weights + key * kBlock + from, kBlock, 1, rows + from * width_, to + key * width_,
                                  width_, queries_ - from);
        }
    }

    void block() {
        transpose(q_, width_, queries_, dim_, q_columns_, kBlock);
        for_panels([&]<int V>(long panel) { softmax<V>(panel); });
        over_keys(scores_, v_, q_);
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
        long seen = seen_by_panel<V>(panel);
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
        transpose(q_, width_, queries_, dim_, q_columns_, kBlock);
        transpose(grad_o_, width_, queries_, dim_, grad_o_columns_, kBlock);
        for_panels([&]<int V>(long panel) { score_gradients<V>(panel); });
        add_over_queries(scores_, grad_o_, grad_v_);
        add_over_queries(grad_scores_, q_, grad_k_);
        over_keys(grad_scores_, k_, q_);
    }

    static constexpr double kLn2 = 0.69314718055994530942;

    const Projection<T>& all_;
    const Segment* segments_;
    long count_, kv_, kv_last_;
    bool backward_;
    long group_, dim_, width_, root_, tokens_together_, queries_together_, heads_together_;
    HeadRoom head_{};
    std::vector<Int<C>> tokens_of_queries_;  // of tokens that are together
    // Where run() is: kv heads in the scratch; a segment's first token and the keys before it; all keys before the
    // tokens that are together; a block's first query among theirs and size, and what it has of its head's room.
    long heads_, start_, base_, all_before_, first_, queries_;
    const Int<C>* own_;
    C *k_, *v_, *grad_k_, *grad_v_, *q_, *grad_o_, *peaks_, *inverse_sums_;
    C *room_, *scores_, *grad_scores_, *q_columns_, *grad_o_columns_;  // scores [keys, block], columns [width, block]
};

}  // namespace hf
