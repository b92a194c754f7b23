// C entry points of what a trainer computes row by row: gradients of norm, rotation and activation, and the head's
// statistics and gradients of logits. No arithmetic here.
#include <atomic>
#include <vector>

#include "backward.h"
#include "dispatch.h"
#include "fused_attention.h"
#include "rows.h"
#include "team.h"

using namespace hf;

namespace {

// work(row, thread) for all rows, shared out over the team.
template <class Work> void for_rows(long rows, Work&& work) {
    Team& all = team();
    all.run([&](int thread) {
        Share share = share_of(rows, thread, all.size());
        for (long row = share.first; row < share.last; ++row) work(row, thread);
    });
}

template <class Run> void with_compute(int code, Run&& run) {
    if (Dtype(code) == Dtype::Float64) run(double());
    else run(float());
}

// Families are shared out, and where they are few beside the threads, the kv heads of each in some parts.
template <class T>
void for_families(const Projection<T>& all, const int64_t* segments, const int64_t* ends, long families,
                  bool backward) {
    static_assert(sizeof(Segment) == 2 * sizeof(int64_t));
    const long threads = team().size(), wanted = threads == 1 ? 1 : (4 * threads + families - 1) / families;
    const long parts = std::min(all.kv_heads, wanted);
    std::atomic<long> next{0};
    team().run([&](int) {
        for (long task; (task = next.fetch_add(1)) < families * parts;) {
            const long family = task / parts, first = family ? ends[family - 1] : 0;
            const Share heads = share_of(all.kv_heads, int(task % parts), int(parts));
            FamilyHeads<T>(all, (const Segment*)segments + first, ends[family] - first, heads.first, heads.last,
                           backward).run();
        }
    });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// gate_up and its gradient are rows of [gate | up].
void hf_swiglu_backward(int dtype, const void* grad, const void* gate_up, long rows, long size, void* to) {
    with_dtype(dtype, [&]<class T>(T) {
        for_rows(rows, [&](long row, int) {
            const T* gate = (const T*)gate_up + row * 2 * size;
            T* out = (T*)to + row * 2 * size;
            swiglu_backward_row((const T*)grad + row * size, gate, gate + size, size, out, out + size);
        });
    });
}

// scales: one a row, in the compute type.
void hf_rms_norm_scaled(int dtype, const void* x, long rows, long size, const void* weight, double eps, void* to,
                        void* scales) {
    with_dtype(dtype, [&]<class T>(T) {
        for_rows(rows, [&](long row, int) {
            ((Compute<T>*)scales)[row] = rms_norm_scale_row((const T*)x + row * size, (const T*)weight, size, eps,
                                                            (T*)to + row * size);
        });
    });
}

// grad_weight: `size` numbers of the compute type, the sum over all rows: rows of a thread in order, then the threads.
void hf_rms_norm_backward(int dtype, const void* grad, const void* x, const void* weight, const void* scales, long rows,
                          long size, void* grad_x, void* grad_weight) {
    with_dtype(dtype, [&]<class T>(T) {
        using C = Compute<T>;
        long room = (size + kLanes<C> - 1) / kLanes<C> * kLanes<C>;
        std::vector<C> sums(room * team().size());
        for_rows(rows, [&](long row, int thread) {
            rms_norm_backward_row((const T*)grad + row * size, (const T*)x + row * size, (const T*)weight,
                                  ((const C*)scales)[row], size, (T*)grad_x + row * size, &sums[thread * room]);
        });
        for (long i = 0; i < size; ++i) {
            C total = 0;
            for (int thread = 0; thread < team().size(); ++thread) total += sums[thread * room + i];
            ((C*)grad_weight)[i] = total;
        }
    });
}

// Heads rotated by their token's angles, or back. `cos` and `signed_sin` have both halves of a head, the first half of
// signed_sin negated. x_stride and to_stride are of tokens, in numbers; heads lie together.
void hf_rotate(int dtype, const void* x, long x_stride, long tokens, long heads, long size, const void* cos,
               const void* signed_sin, int back, void* to, long to_stride) {
    with_dtype(dtype, [&]<class T>(T) {
        long half = size / 2;
        for_rows(tokens, [&](long token, int) {
            // Its first half is negated: with it in the place of the second one the turn is the opposite one.
            const T* sin = (const T*)signed_sin + token * size + (back ? 0 : half);
            for (long head = 0; head < heads; ++head)
                rope_row((const T*)x + token * x_stride + head * size, (const T*)cos + token * size, sin, size,
                         (T*)to + token * to_stride + head * size);
        });
    });
}

// Of each row of logits [rows, size], times factor: its peak into peaks [rows], and into sums [3, rows] the sums of
// e^(z - peak) and e^(z - peak) (z - peak), and z - peak of its target, 0 where that is not `mine`.
void hf_logit_statistics(int dtype, const void* logits, long rows, long size, double factor, const int64_t* targets,
                         const uint8_t* mine, void* peaks, void* sums) {
    with_compute(dtype, [&]<class C>(C) {
        for_rows(rows, [&](long row, int) {
            const C* z = (const C*)logits + row * size;
            LogitStatistics<C> found = logit_statistics_row(z, size, C(factor));
            C* to = (C*)sums + row;
            ((C*)peaks)[row] = found.peak;
            to[0] = found.sum;
            to[rows] = found.weighted;
            to[2 * rows] = mine[row] ? z[targets[row]] * C(factor) - found.peak : C(0);
        });
    });
}

// The gradient of logits [rows, size] in their place, from what hf_logit_statistics gave over all ranks. Gradients of
// log-probs and entropies may be null, which is zero.
void hf_logit_gradients(int dtype, void* logits, long rows, long size, double factor, const int64_t* targets,
                        const uint8_t* mine, const void* log_normalisers, const void* entropies,
                        const void* grad_log_probs, const void* grad_entropies) {
    with_compute(dtype, [&]<class C>(C) {
        for_rows(rows, [&](long row, int) {
            C of_log_prob = grad_log_probs ? ((const C*)grad_log_probs)[row] : C(0);
            C of_entropy = grad_entropies ? ((const C*)grad_entropies)[row] : C(0);
            C* z = (C*)logits + row * size;
            logit_gradient_row(z, size, C(factor), ((const C*)log_normalisers)[row], ((const C*)entropies)[row],
                               of_log_prob, of_entropy);
            if (mine[row]) z[targets[row]] += of_log_prob * C(factor);
        });
    });
}

// Attention of rows and their branches. qkv: [tokens, (heads + 2 kv_heads) head_dim]; segments: (start, length) of each
// root and the branches that follow it, `ends` of each family in that list; softmax [2, tokens, heads]
// in the compute type: peaks and inverse sums (Projection).
void hf_fused_attention(int dtype, const void* qkv, long token_stride, long heads, long kv_heads, long head_dim,
                        const void* cos, const void* signed_sin, const int64_t* segments, const int64_t* ends,
                        long families, long tokens, void* out, void* softmax) {
    with_dtype(dtype, [&]<class T>(T) {
        Projection<T> all{(const T*)qkv, token_stride, heads, kv_heads, head_dim, (const T*)cos, (const T*)signed_sin,
                          (T*)out, (Compute<T>*)softmax, (Compute<T>*)softmax + tokens * heads, nullptr, nullptr};
        for_families(all, segments, ends, families, false);
    });
}

// The gradient of qkv, of the same strides, from that of `out`.
void hf_fused_attention_backward(int dtype, const void* qkv, long token_stride, long heads, long kv_heads,
                                 long head_dim, const void* cos, const void* signed_sin, const int64_t* segments,
                                 const int64_t* ends, long families, long tokens, const void* softmax,
                                 const void* grad_out, void* grad_qkv) {
    with_dtype(dtype, [&]<class T>(T) {
        Projection<T> all{(const T*)qkv, token_stride, heads, kv_heads, head_dim, (const T*)cos, (const T*)signed_sin,
                          nullptr, (Compute<T>*)softmax, (Compute<T>*)softmax + tokens * heads,
                          (const T*)grad_out, (T*)grad_qkv};
        for_families(all, segments, ends, families, true);
    });
}

}  // extern "C"
#pragma GCC visibility pop
