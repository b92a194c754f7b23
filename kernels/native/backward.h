// Gradients of the operations in rows.h, and what a head needs of logits. Arithmetic in Compute<T>, rounded to T once.
// Each works on one row and starts no thread.
#pragma once

#include <cmath>

#include "vector_math.h"

namespace hf {

// Of silu(gate) * up, from the gradient of that: silu' = s (1 + g (1 - s)) with s = 1 / (1 + e^-g).
template <class T>
void swiglu_backward_row(const T* grad, const T* gate, const T* up, long size, T* grad_gate, T* grad_up) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    for (long i = 0; i < size; i += lanes) {
        long left = size - i;
        Vector<C> g = load_some(gate + i, left), d = load_some(grad + i, left);
        Vector<C> s = C(1) / (exp_of<C>(-g) + C(1));
        store_some(grad_up + i, d * (g * s), left);
        store_some(grad_gate + i, d * load_some(up + i, left) * s * (g * (C(1) - s) + C(1)), left);
    }
}

// to = x * scale * weight, where scale = 1 / sqrt(mean(x^2) + eps) is returned.
template <class T> Compute<T> rms_norm_scale_row(const T* x, const T* weight, long size, double eps, T* to) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    Vector<C> sum{};
    for (long i = 0; i < size; i += lanes) {
        Vector<C> a = load_some(x + i, size - i);
        sum += a * a;
    }
    C scale = C(1) / std::sqrt(sum_lanes<C>(sum) / C(size) + C(eps));
    for (long i = 0; i < size; i += lanes)
        store_some(to + i, load_some(x + i, size - i) * scale * load_some(weight + i, size - i), size - i);
    return scale;
}

// Of x, and added to weight_sums in whole vectors that of the weight, from the gradient of the norm:
// scale (g w - x scale^2 / size * sum(g w x)).
template <class T>
void rms_norm_backward_row(const T* grad, const T* x, const T* weight, Compute<T> scale, long size, T* grad_x,
                           Compute<T>* weight_sums) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    Vector<C> along{};
    for (long i = 0; i < size; i += lanes) {
        long left = size - i;
        Vector<C> both = load_some(grad + i, left) * load_some(x + i, left);
        along += both * load_some(weight + i, left);
        store(weight_sums + i, load<Vector<C>>(weight_sums + i) + both * scale);
    }
    C slope = sum_lanes<C>(along) * scale * scale / C(size);
    for (long i = 0; i < size; i += lanes) {
        long left = size - i;
        Vector<C> gw = load_some(grad + i, left) * load_some(weight + i, left);
        store_some(grad_x + i, (gw - load_some(x + i, left) * slope) * scale, left);
    }
}

// Of one row z of logits times `factor` (the inverse temperature).
template <class C> struct LogitStatistics {
    C peak, sum, weighted;  // max z; the sums of e^(z - peak) and e^(z - peak) (z - peak)
};

template <class C> LogitStatistics<C> logit_statistics_row(const C* logits, long size, C factor) {
    constexpr int lanes = kLanes<C>;
    long whole = size / lanes * lanes;
    Vector<C> top = splat<C>(-INFINITY), poisoned{};
    for (long i = 0; i < whole; i += lanes) {
        Vector<C> z = load<Vector<C>>(logits + i);
        top = z > top ? z : top;
        poisoned += z * C(0);  // NaN where a logit is NaN or infinite, for which the sums below are right or NaN as well
    }
    C peak = max_lanes<C>(top);
    for (long i = whole; i < size; ++i) peak = logits[i] > peak || logits[i] != logits[i] ? logits[i] : peak;
    C bad = sum_lanes<C>(poisoned);
    if (bad != bad)
        for (long i = 0; i < whole; ++i)
            if (logits[i] != logits[i]) peak = logits[i];
    peak *= factor;
    Vector<C> sum{}, weighted{};
    for (long i = 0; i < whole; i += lanes) {
        Vector<C> z = load<Vector<C>>(logits + i) * factor - peak, e = exp_of<C>(z);
        sum += e;
        weighted += e * z;
    }
    C s = sum_lanes<C>(sum), w = sum_lanes<C>(weighted);
    for (long i = whole; i < size; ++i) {
        C z = logits[i] * factor - peak, e = exp_of<C>(splat<C>(z))[0];
        s += e;
        w += e * z;
    }
    return {peak, s, w};
}

// Over one row of logits their gradient before the target's own part: with log p = z * factor - log_normaliser it is
// -p (grad_log_prob + grad_entropy (log p + entropy)) * factor.
template <class C>
void logit_gradient_row(C* logits, long size, C factor, C log_normaliser, C entropy, C grad_log_prob, C grad_entropy) {
    constexpr int lanes = kLanes<C>;
    C constant = -factor * (grad_log_prob + grad_entropy * entropy), slope = -factor * grad_entropy;
    for (long i = 0; i < size; i += lanes) {
        Vector<C> log_p = load_some(logits + i, size - i) * factor - log_normaliser;
        store_some(logits + i, exp_of<C>(log_p) * (log_p * slope + constant), size - i);
    }
}

}  // namespace hf
