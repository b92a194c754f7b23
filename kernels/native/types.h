// Storage and compute types, vectors of the host's width, and exact conversions. Owns no memory and no threads.
//
// T is how numbers are stored (float, bf16, double); Compute<T> is what arithmetic is done in: float for float and
// bf16, double for double. Vectors are GCC / Clang vector extensions, so that one source compiles for AVX-512, AVX2 and
// NEON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hf {

enum class Dtype : int { Float32 = 0, BFloat16 = 1, Float64 = 2 };

struct bf16 {
    uint16_t bits;
};

template <class T> struct ComputeOf { using type = T; };
template <> struct ComputeOf<bf16> { using type = float; };
template <class T> using Compute = typename ComputeOf<T>::type;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class E> struct VectorOf;
template <> struct VectorOf<float> { typedef float type __attribute__((vector_size(kVectorBytes))); };
template <> struct VectorOf<double> { typedef double type __attribute__((vector_size(kVectorBytes))); };
template <> struct VectorOf<uint32_t> { typedef uint32_t type __attribute__((vector_size(kVectorBytes))); };
template <> struct VectorOf<uint16_t> { typedef uint16_t type __attribute__((vector_size(kVectorBytes / 2))); };
template <class E> using Vector = typename VectorOf<E>::type;
template <class E> constexpr int kLanes = kVectorBytes / int(sizeof(E));

// Loads and stores of any alignment.
template <class V> inline V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}
template <class V> inline void store(void* to, V value) { std::memcpy(to, &value, sizeof(V)); }

// `value`, which the compiler has to have in a register by now: it would rather read a vector from memory again for
// every product in which it stands, and loads, not arithmetic, would limit the loop.
template <class V> inline V in_register(V value) {
#if defined(__x86_64__)
    asm("" : "+v"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
    return value;
}

inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof(out));
    return out;
}
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

// Round to nearest even, as torch does; a NaN stays a (quiet) NaN.
inline void narrow(float value, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = uint16_t(value != value ? 0x7fc0u : rounded);
}
inline void narrow(float value, float& out) { out = value; }
inline void narrow(double value, double& out) { out = value; }

// One vector of Compute<T> from kLanes<C> stored numbers, and back.
inline Vector<float> load_wide(const float* from) { return load<Vector<float>>(from); }
inline Vector<double> load_wide(const double* from) { return load<Vector<double>>(from); }
inline Vector<float> load_wide(const bf16* from) {
    Vector<uint32_t> wide = __builtin_convertvector(load<Vector<uint16_t>>(from), Vector<uint32_t>) << 16;
    return (Vector<float>)wide;
}
inline void store_narrow(float* to, Vector<float> value) { store(to, value); }
inline void store_narrow(double* to, Vector<double> value) { store(to, value); }
inline void store_narrow(bf16* to, Vector<float> value) {
    Vector<uint32_t> bits = (Vector<uint32_t>)value;
    Vector<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Vector<uint32_t> is_nan = (Vector<uint32_t>)(value != value);
    rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0u);
    store(to, __builtin_convertvector(rounded, Vector<uint16_t>));
}

}  // namespace hf
