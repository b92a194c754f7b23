// Statistics of logits over the vocabulary, log-probs of given tokens, and one drawn token a row. Starts no thread.
//
// The vocabulary is cut into fixed blocks of kVocabBlock. A block's peak and its sum of exp((z - peak) / temperature)
// are one read of memory; rows and blocks are shared out over threads in any way, and what follows reads blocks in
// order: the bits depend neither on threads nor on other rows. Weights are in C, their sums in double.
#pragma once

#include <cmath>

#include "threads.h"
#include "vector_math.h"

namespace hf {

constexpr long kVocabBlock = 1024;

template <class C> struct BlockStatistics {
    C peak;      // -inf where the block has no finite logit
    double sum;  // relative to the peak
};

inline long vocab_blocks(long vocab) { return (vocab + kVocabBlock - 1) / kVocabBlock; }

inline void add_wide(Vector<double>* sums, Vector<float> v) {
    typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
    Half halves[2];
    std::memcpy(halves, &v, sizeof(v));
    sums[0] += __builtin_convertvector(halves[0], Vector<double>);
    sums[1] += __builtin_convertvector(halves[1], Vector<double>);
}
inline void add_wide(Vector<double>* sums, Vector<double> v) { sums[0] += v; }

// A vector of logits with -inf behind the last one.
template <class C> inline Vector<C> logits_at(const C* z, long i, long size) {
    if (i + kLanes<C> <= size) return load<Vector<C>>(z + i);
    return iota<C>() < Int<C>(size - i) ? load_some(z + i, size - i) : splat<C>(-INFINITY);
}

template <class C> inline Vector<C> weights_of(Vector<C> z, C peak, C temperature) {
    Vector<C> below = z - (peak == C(-INFINITY) ? C(0) : peak);
    return exp_of<C>(temperature == C(1) ? below : below / temperature);
}

template <class C> BlockStatistics<C> block_statistics(const C* z, long size, C temperature) {
    constexpr int lanes = kLanes<C>;
    Vector<C> tops[2] = {splat<C>(-INFINITY), splat<C>(-INFINITY)};
    for (long i = 0; i < size; i += 2 * lanes)
        for (int part = 0; part < 2; ++part) {
            if (i + part * lanes >= size) break;
            Vector<C> v = logits_at(z, i + part * lanes, size);
            tops[part] = v > tops[part] ? v : tops[part];
        }
    C peak = max_lanes<C>(tops[0] > tops[1] ? tops[0] : tops[1]);
    Vector<double> sums[2] = {};
    for (long i = 0; i < size; i += lanes) add_wide(sums, weights_of(logits_at(z, i, size), peak, temperature));
    return {peak, sum_lanes<double>(sums[0] + sums[1])};
}

// Of one row from its blocks. A row with a NaN, or without a finite logit, has a NaN total or peak.
template <class C> struct RowStatistics {
    C peak;
    double total;  // relative to the peak
};

template <class C> inline double block_weight(const BlockStatistics<C>& block, C peak, double temperature) {
    if (block.sum == 0 || block.peak == C(-INFINITY)) return block.sum;  // 0, or NaN
    return block.sum * std::exp((double(block.peak) - double(peak)) / temperature);
}

template <class C>
RowStatistics<C> row_statistics(const BlockStatistics<C>* blocks, long count, double temperature) {
    C peak = -INFINITY;
    for (long i = 0; i < count; ++i) peak = blocks[i].peak > peak ? blocks[i].peak : peak;
    double total = 0;
    for (long i = 0; i < count; ++i) total += block_weight(blocks[i], peak, temperature);
    return {peak, total};
}

template <class C> inline C log_prob_of(C z, const RowStatistics<C>& row, double temperature) {
    return C((double(z) - double(row.peak)) / temperature - std::log(row.total));
}

// The first token whose cumulative weight exceeds uniform * total; its weight is never 0. Any token of a row of NaN.
template <class C>
long draw(const C* z, long vocab, const BlockStatistics<C>* blocks, const RowStatistics<C>& row, double uniform,
          double temperature) {
    constexpr int lanes = kLanes<C>;
    double target = uniform * row.total, before = 0;
    long chosen = 0, count = vocab_blocks(vocab);
    double rest = 0;
    for (long i = 0; i < count; ++i) {
        double weight = block_weight(blocks[i], row.peak, temperature);
        if (!(weight > 0)) continue;
        chosen = i;  // stays the last one of a weight, however the sums were rounded
        rest = (target - before) / weight * blocks[i].sum;
        if (before + weight > target) break;
        before += weight;
    }
    const C* from = z + chosen * kVocabBlock;
    long size = vocab - chosen * kVocabBlock < kVocabBlock ? vocab - chosen * kVocabBlock : kVocabBlock;
    C weights[kVocabBlock];
    for (long i = 0; i < size; i += lanes)
        store(weights + i, weights_of(logits_at(from, i, size), blocks[chosen].peak, C(temperature)));
    long token = 0;
    double running = 0;
    for (long i = 0; i < size; ++i) {
        if (!(weights[i] > 0)) continue;
        token = i;
        running += double(weights[i]);
        if (running > rest) break;
    }
    return chosen * kVocabBlock + token;
}

// The lowest token of the highest logit; any token of a row of NaN.
template <class C> long highest(const C* z, long vocab, const BlockStatistics<C>* blocks, C peak) {
    for (long i = 0; i < vocab_blocks(vocab); ++i) {
        if (blocks[i].peak != peak) continue;
        for (long token = i * kVocabBlock; token < vocab; ++token)
            if (z[token] == peak) return token;
    }
    return 0;
}

// This thread's share of the statistics of all blocks, blocks[row * vocab_blocks + i]. The caller has a barrier after
// it.
template <class C>
void statistics_part(int thread, int threads, const C* logits, long rows, long vocab, long stride, double temperature,
                     BlockStatistics<C>* blocks) {
    long count = vocab_blocks(vocab);
    Share share = share_of(rows * count, thread, threads);
    for (long task = share.first; task < share.last; ++task) {
        long first = task % count * kVocabBlock, size = vocab - first < kVocabBlock ? vocab - first : kVocabBlock;
        blocks[task] = block_statistics(logits + task / count * stride + first, size, C(temperature));
    }
}

// This thread's rows of what `statistics_part` made: tokens drawn with `uniforms`, or the highest at temperature 0
// (whose statistics are those of temperature 1), and their log-probs.
template <class C>
void draw_part(int thread, int threads, const C* logits, long rows, long vocab, long stride, const double* uniforms,
               double temperature, const BlockStatistics<C>* blocks, int64_t* tokens, C* log_probs) {
    long count = vocab_blocks(vocab);
    double heat = temperature == 0 ? 1 : temperature;
    Share share = share_of(rows, thread, threads);
    for (long row = share.first; row < share.last; ++row) {
        const C* z = logits + row * stride;
        const BlockStatistics<C>* mine = blocks + row * count;
        RowStatistics<C> statistics = row_statistics(mine, count, heat);
        tokens[row] = temperature == 0 ? highest(z, vocab, mine, statistics.peak)
                                       : draw(z, vocab, mine, statistics, uniforms[row], heat);
        log_probs[row] = log_prob_of(z[tokens[row]], statistics, heat);
    }
}

// This thread's rows: the log-prob of each row's target.
template <class C>
void targets_part(int thread, int threads, const C* logits, long rows, long vocab, long stride, const int64_t* targets,
                  double temperature, const BlockStatistics<C>* blocks, C* log_probs) {
    long count = vocab_blocks(vocab);
    Share share = share_of(rows, thread, threads);
    for (long row = share.first; row < share.last; ++row)
        log_probs[row] = log_prob_of(logits[row * stride + targets[row]],
                                     row_statistics(blocks + row * count, count, temperature), temperature);
}

}  // namespace hf
