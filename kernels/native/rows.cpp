// C entry points of what works on rows: norm, rotation, activation, attention of packed rows, log-probs, sampling. The
// same templates as a stage's step, so the same bits. No arithmetic here.
#include <atomic>

#include "attention.h"
#include "dispatch.h"
#include "rows.h"
#include "sample.h"
#include "team.h"

using namespace hf;

namespace {

// work(row) for all rows, shared out over the team.
template <class Work> void for_rows(long rows, Work&& work) {
    Team& all = team();
    all.run([&](int thread) {
        Share share = share_of(rows, thread, all.size());
        for (long row = share.first; row < share.last; ++row) work(row);
    });
}

// A kv head of one packed row: its keys and values are put into pages, then its queries attend, neighbours together.
template <class T> struct PackedRow {
    const T *q, *k, *v;
    long q_stride, k_stride, v_stride, first, length, heads, kv_heads, head_dim;
    T* out;

    void attend_head(long kv) const {
        using C = Compute<T>;
        thread_local AttentionScratch<C> scratch;
        thread_local std::vector<T> keys, values;
        thread_local std::vector<int32_t> table;
        long blocks = (length + kPage - 1) / kPage, page = kPage * head_dim, group = heads / kv_heads;
        keys.resize(std::max<size_t>(keys.size(), blocks * page));
        values.resize(std::max<size_t>(values.size(), blocks * page + kVectorBytes));
        for (long i = long(table.size()); i < blocks; ++i) table.push_back(int32_t(i));
        for (long i = 0; i < length; ++i)
            write_position(&keys[i / kPage * page], &values[i / kPage * page], i % kPage,
                           k + (first + i) * k_stride + kv * head_dim, v + (first + i) * v_stride + kv * head_dim,
                           head_dim);
        Pages<T> pages{keys.data(), values.data(), table.data(), page};
        long together = std::max<long>(1, kRowsAtOnce / group);
        C* queries = scratch.query_room(together * group * head_dim);
        std::vector<long> counts(together * group);
        std::vector<T*> outs(together * group);
        for (long token = 0; token < length; token += together) {
            long rows = std::min(together, length - token) * group;
            for (long row = 0; row < rows; ++row) {
                long at = token + row / group, head = kv * group + row % group;
                const T* query = q + (first + at) * q_stride + head * head_dim;
                for (long i = 0; i < head_dim; ++i) queries[row * head_dim + i] = widen(query[i]);
                counts[row] = at + 1;
                outs[row] = out + ((first + at) * heads + head) * head_dim;
            }
            attend(pages, rows, queries, counts.data(), head_dim, outs.data(), scratch);
        }
    }
};

// Statistics of all rows, then finish(thread, threads, blocks) on every thread.
template <class C, class Finish>
void with_statistics(const C* logits, long rows, long vocab, long stride, double temperature, Finish&& finish) {
    std::vector<BlockStatistics<C>> blocks(rows * vocab_blocks(vocab));
    Team& all = team();
    all.run([&](int thread) {
        statistics_part(thread, all.size(), logits, rows, vocab, stride, temperature, blocks.data());
        all.barrier();
        finish(thread, all.size(), blocks.data());
    });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void hf_rms_norm(int dtype, const void* x, long rows, long size, const void* weight, double eps, void* to) {
    with_dtype(dtype, [&]<class T>(T) {
        for_rows(rows, [&](long row) {
            rms_norm_row((const T*)x + row * size, (const T*)weight, size, eps, (T*)to + row * size);
        });
    });
}

// x, to [tokens, heads, size]; cos, sin [tokens, size / 2].
void hf_rope(int dtype, const void* x, long tokens, long heads, long size, const void* cos, const void* sin,
                    void* to) {
    with_dtype(dtype, [&]<class T>(T) {
        for_rows(tokens, [&](long token) {
            for (long head = token * heads; head < (token + 1) * heads; ++head)
                rope_row((const T*)x + head * size, (const T*)cos + token * (size / 2),
                         (const T*)sin + token * (size / 2), size, (T*)to + head * size);
        });
    });
}

// gate_up [rows, 2 size], to [rows, size].
void hf_swiglu(int dtype, const void* gate_up, long rows, long size, void* to) {
    with_dtype(dtype, [&]<class T>(T) {
        for_rows(rows, [&](long row) {
            const T* gate = (const T*)gate_up + row * 2 * size;
            swiglu_row(gate, gate + size, size, (T*)to + row * size);
        });
    });
}

// Causal attention within each of `rows` packed rows of lengths[row] tokens. Strides are of tokens, in numbers.
void hf_attention(int dtype, const void* q, long q_stride, const void* k, long k_stride, const void* v,
                         long v_stride, const int64_t* lengths, long rows, long heads, long kv_heads, long head_dim,
                         void* to) {
    with_dtype(dtype, [&]<class T>(T) {
        std::vector<PackedRow<T>> all_rows;
        long first = 0;
        for (long row = 0; row < rows; first += lengths[row++])
            all_rows.push_back({(const T*)q, (const T*)k, (const T*)v, q_stride, k_stride, v_stride, first,
                                lengths[row], heads, kv_heads, head_dim, (T*)to});
        std::atomic<long> next{0};
        team().run([&](int) {
            for (long task; (task = next.fetch_add(1)) < rows * kv_heads;)
                all_rows[task / kv_heads].attend_head(task % kv_heads);
        });
    });
}

// One token a row: the inverse of the cumulative distribution at uniforms[row], or the highest logit at temperature 0;
// and its log-prob over the whole vocabulary under the temperature (1 when greedy). Logits fp32 or fp64, log_probs
// alike.
void hf_sample(int dtype, const void* logits, long rows, long vocab, long stride, const double* uniforms,
                      double temperature, int64_t* tokens, void* log_probs) {
    auto sample = [&]<class C>(C) {
        with_statistics((const C*)logits, rows, vocab, stride, temperature == 0 ? 1 : temperature,
                        [&](int thread, int threads, const BlockStatistics<C>* blocks) {
                            draw_part(thread, threads, (const C*)logits, rows, vocab, stride, uniforms, temperature,
                                      blocks, tokens, (C*)log_probs);
                        });
    };
    if (Dtype(dtype) == Dtype::Float64) sample(double());
    else sample(float());
}

// Log-probs of targets[row], as hf_sample gives them.
void hf_log_probs(int dtype, const void* logits, long rows, long vocab, long stride, const int64_t* targets,
                         double temperature, void* log_probs) {
    auto score = [&]<class C>(C) {
        with_statistics((const C*)logits, rows, vocab, stride, temperature,
                        [&](int thread, int threads, const BlockStatistics<C>* blocks) {
                            targets_part(thread, threads, (const C*)logits, rows, vocab, stride, targets, temperature,
                                         blocks, (C*)log_probs);
                        });
    };
    if (Dtype(dtype) == Dtype::Float64) score(double());
    else score(float());
}

}  // extern "C"
#pragma GCC visibility pop
