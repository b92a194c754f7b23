// What rows need beyond loads and stores: partial vectors, sums and maxima over lanes in a fixed order, exponentials.
// Owns no memory. Every result depends on the values of its arguments alone.
#pragma once

#include "types.h"

namespace hf {

template <class C> struct LaneOf;
template <> struct LaneOf<float> { using type = int32_t; };
template <> struct LaneOf<double> { using type = int64_t; };
// Integers beside the lanes of Vector<C>.
template <class C> using Int = typename LaneOf<C>::type;
template <class C> struct IntVectorOf { typedef Int<C> type __attribute__((vector_size(kVectorBytes))); };
template <class C> using IntVector = typename IntVectorOf<C>::type;

template <class C> inline Vector<C> splat(C value) { return Vector<C>{} + value; }

// 0, 1, 2, ...
template <class C> inline IntVector<C> iota() {
    IntVector<C> out;
    for (int lane = 0; lane < kLanes<C>; ++lane) out[lane] = lane;
    return out;
}

// The first `count` numbers of a vector, the others 0; whole vectors take the short way.
template <class T> inline Vector<Compute<T>> load_some(const T* from, long count) {
    constexpr int lanes = kLanes<Compute<T>>;
    if (count >= lanes) return load_wide(from);
    T part[lanes] = {};
    std::memcpy((void*)part, (const void*)from, count * sizeof(T));
    return load_wide(part);
}
template <class T> inline void store_some(T* to, Vector<Compute<T>> value, long count) {
    constexpr int lanes = kLanes<Compute<T>>;
    if (count >= lanes) return store_narrow(to, value);
    T part[lanes];
    store_narrow(part, value);
    std::memcpy((void*)to, (const void*)part, count * sizeof(T));
}

// The value as T holds it, still in the compute type: what storing and loading it again would give.
inline Vector<float> rounded_to(Vector<float> value, float) { return value; }
inline Vector<double> rounded_to(Vector<double> value, double) { return value; }
inline Vector<float> rounded_to(Vector<float> value, bf16) {
    Vector<uint32_t> bits = (Vector<uint32_t>)value;
    Vector<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    Vector<uint32_t> is_nan = (Vector<uint32_t>)(value != value);
    return (Vector<float>)((rounded & ~is_nan) | (is_nan & 0x7fc00000u));
}
template <class T> inline Vector<Compute<T>> rounded(Vector<Compute<T>> value) { return rounded_to(value, T()); }

template <class C, int lanes> struct PartOf { typedef C type __attribute__((vector_size(lanes * sizeof(C)))); };

// Over lanes: halves onto halves, so the order is fixed.
template <class C, int lanes, class Join> inline C fold(typename PartOf<C, lanes>::type v, Join join) {
    if constexpr (lanes == 1) {
        return v[0];
    } else {
        typename PartOf<C, lanes / 2>::type low, high;
        std::memcpy(&low, &v, sizeof(low));
        std::memcpy(&high, (const char*)&v + sizeof(low), sizeof(high));
        return fold<C, lanes / 2>(join(low, high), join);
    }
}
template <class C> inline C sum_lanes(Vector<C> v) {
    return fold<C, kLanes<C>>(v, [](auto a, auto b) { return a + b; });
}
template <class C> inline C max_lanes(Vector<C> v) {
    return fold<C, kLanes<C>>(v, [](auto a, auto b) { return a > b ? a : b; });
}

template <class C> struct ExpNumbers;
// The polynomials interpolate (e^r - 1 - r) / r^2 at Chebyshev nodes of |r| <= ln(2) / 2: 2.2e-10 and 1.7e-17 of e^r.
template <> struct ExpNumbers<float> {
    static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded number in the low bits
    static constexpr int32_t kMagicBits = 0x4B400000;
    static constexpr int kBias = 127, kMantissa = 23;
    static constexpr float kLowest = -87.33654f, kHighest = 88.37626f;
    static constexpr float kLn2High = 0.69140625f, kLn2Low = 0.00174093055995f;
    static constexpr float kTerms[] = {0.50000000134638854955f, 0.1666666668162109499f,    0.041666464944505699265f,
                                       0.0083333109276153112f,  0.0013933647862928862799f, 0.00019890988455544566f};
};
template <> struct ExpNumbers<double> {
    static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr int64_t kMagicBits = 0x4338000000000000;
    static constexpr int kBias = 1023, kMantissa = 52;
    static constexpr double kLowest = -708.39, kHighest = 709.43;
    static constexpr double kLn2High = 0.6931467056274414, kLn2Low = 4.749325039031672321e-7;
    static constexpr double kTerms[] = {0.50000000000000010219, 0.16666666666666667453, 0.041666666666624135973,
                                        0.0083333333333300624555, 0.0013888888917209671046, 0.00019841269863050505549,
                                        0.000024801521302241083138, 2.7557268464831626452e-6, 2.7620085455018415689e-7,
                                        2.5100383195867021335e-8};
};

// e^x within 2 ulp: 0 below the least normal number, finite above the largest, NaN of NaN, exactly 1 of 0.
template <class C> inline Vector<C> exp_of(Vector<C> x) {
    using N = ExpNumbers<C>;
    auto vanishes = x < N::kLowest;
    x = vanishes ? splat<C>(N::kLowest) : x;
    x = x > N::kHighest ? splat<C>(N::kHighest) : x;
    Vector<C> shifted = x * C(1.44269504088896340736) + N::kMagic;
    Vector<C> n = shifted - N::kMagic;
    Vector<C> r = x - n * N::kLn2High;
    r = r - n * N::kLn2Low;
    constexpr int last = int(sizeof(N::kTerms) / sizeof(C)) - 1;
    Vector<C> sum = splat<C>(N::kTerms[last]);
#pragma GCC unroll 16
    for (int term = last - 1; term >= 0; --term) sum = sum * r + N::kTerms[term];
    sum = sum * (r * r) + r;
    sum = sum + C(1);
    IntVector<C> power = ((IntVector<C>)shifted - N::kMagicBits + N::kBias) << N::kMantissa;
    Vector<C> out = sum * (Vector<C>)power;
    return vanishes ? Vector<C>{} : out;
}

template <class C> struct Exp2Numbers;
// The polynomials interpolate (2^r - 1) / r at Chebyshev nodes of |r| <= 1 / 2: 5.1e-9 and 8.5e-18 of 2^r.
template <> struct Exp2Numbers<float> {
    static constexpr float kMagic = 12582912.0f + 127;  // adding it leaves the exponent's bits of 2^n lowest
    static constexpr float kLowest = -127;              // where those bits are 0
    static constexpr int kMantissa = 23;
    static constexpr float kTerms[] = {0.69314718802622878106f,  0.24022650760568126945f,   0.055503571142190778186f,
                                       0.009618082557277851491f, 0.0013390863364671234381f, 0.00015453162945120690177f};
};
template <> struct Exp2Numbers<double> {
    static constexpr double kMagic = 6755399441055744.0 + 1023;
    static constexpr double kLowest = -1023;
    static constexpr int kMantissa = 52;
    static constexpr double kTerms[] = {0.69314718055994530942,  0.2402265069591009822,    0.055504108664821594339,
                                        0.0096181291076068885273, 0.001333355814641693531,  0.00015403530441736050155,
                                        0.000015252733829836118394, 1.3215442587921689653e-6, 1.0178062445845773521e-7,
                                        7.0725859492692236999e-9, 4.4549605981865183938e-10};
};

// 2^x of x <= 0, within 2 ulp: 0 below the least normal number, NaN of NaN, exactly 1 of 0. Half the work of exp_of.
template <class C> inline Vector<C> exp2_of(Vector<C> x) {
    using N = Exp2Numbers<C>;
    x = x < N::kLowest ? splat<C>(N::kLowest) : x;
    Vector<C> shifted = x + N::kMagic;
    Vector<C> r = x - (shifted - N::kMagic);
    constexpr int last = int(sizeof(N::kTerms) / sizeof(C)) - 1;
    Vector<C> sum = splat<C>(N::kTerms[last]);
#pragma GCC unroll 16
    for (int term = last - 1; term >= 0; --term) sum = sum * r + N::kTerms[term];
    sum = sum * r + C(1);
    return sum * (Vector<C>)((IntVector<C>)shifted << N::kMantissa);
}

}  // namespace hf
