// Operations on the rows of a step: norm, residual sum, rotation, gated activation. Arithmetic in Compute<T>, rounded
// to T where the trainer's operations round. Each works on one row and starts no thread; a row's bits depend on that
// row alone.
#pragma once

#include <cmath>

#include "vector_math.h"

namespace hf {

// to = x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, eq. 4), rounded once.
template <class T> void rms_norm_row(const T* x, const T* weight, long size, double eps, T* to) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    Vector<C> even{}, odd{};
    long i = 0;
    for (; i + 2 * lanes <= size; i += 2 * lanes) {
        Vector<C> a = load_wide(x + i), b = load_wide(x + i + lanes);
        even += a * a;
        odd += b * b;
    }
    for (; i < size; i += lanes) {
        Vector<C> a = load_some(x + i, size - i);
        even += a * a;
    }
    C scale = C(1) / std::sqrt(sum_lanes<C>(even + odd) / C(size) + C(eps));
    for (i = 0; i < size; i += lanes)
        store_some(to + i, load_some(x + i, size - i) * scale * load_some(weight + i, size - i), size - i);
}

// to = x + (partial + bias), each sum rounded to T as separate operations would. `partial` is in Compute<T>: a product
// not rounded yet. bias may be null; to may be x.
template <class T>
void residual_row(const T* x, const Compute<T>* partial, const T* bias, long size, T* to) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    for (long i = 0; i < size; i += lanes) {
        long left = size - i;
        Vector<C> sum = rounded<T>(load_some(partial + i, left));
        if (bias != nullptr) sum = rounded<T>(sum + load_some(bias + i, left));
        store_some(to + i, sum + load_some(x + i, left), left);
    }
}

// One head rotated by its token's angles (Su et al. 2021, eq. 34); pairs are (i, i + size / 2), tables hold size / 2
// each. The first product is rounded, then the sum: as x * cos and addcmul do. `to` may not overlap x.
template <class T> void rope_row(const T* x, const T* cos, const T* sin, long size, T* to) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    long half = size / 2;
    for (long i = 0; i < half; i += lanes) {
        long left = half - i;
        Vector<C> a = load_some(x + i, left), b = load_some(x + half + i, left);
        Vector<C> c = load_some(cos + i, left), s = load_some(sin + i, left);
        store_some(to + i, rounded<T>(a * c) - b * s, left);
        store_some(to + half + i, rounded<T>(b * c) + a * s, left);
    }
}

// to = silu(gate) * up (Shazeer 2020, eq. 6); silu is rounded before the product.
template <class T> void swiglu_row(const T* gate, const T* up, long size, T* to) {
    using C = Compute<T>;
    constexpr int lanes = kLanes<C>;
    for (long i = 0; i < size; i += lanes) {
        long left = size - i;
        Vector<C> g = load_some(gate + i, left);
        Vector<C> active = rounded<T>(g / (exp_of<C>(-g) + C(1)));
        store_some(to + i, active * load_some(up + i, left), left);
    }
}

}  // namespace hf
