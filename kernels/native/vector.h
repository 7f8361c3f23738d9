// Vectors of floats that fill one register, in the compiler's own types, so that one source serves all instruction
// sets.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace baton {

// Shuffles. LOW_n takes every other n lanes of a first vector, and fills the gaps with those of a second one. ACROSS_n
// exchanges lanes at distance n.
#if defined(__AVX512F__)
constexpr int LANES = 16;
typedef int32_t Ints __attribute__((vector_size(64), aligned(64)));
#define LOW_1 Ints{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}
#define LOW_2 Ints{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}
#define LOW_4 Ints{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}
#define LOW_8 Ints{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}
#define ACROSS_1 Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}
#define ACROSS_2 Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}
#define ACROSS_4 Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}
#define ACROSS_8 Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}
#elif defined(__AVX2__)
constexpr int LANES = 8;
typedef int32_t Ints __attribute__((vector_size(32), aligned(32)));
#define LOW_1 Ints{0, 8, 2, 10, 4, 12, 6, 14}
#define LOW_2 Ints{0, 1, 8, 9, 4, 5, 12, 13}
#define LOW_4 Ints{0, 1, 2, 3, 8, 9, 10, 11}
#define ACROSS_1 Ints{1, 0, 3, 2, 5, 4, 7, 6}
#define ACROSS_2 Ints{2, 3, 0, 1, 6, 7, 4, 5}
#define ACROSS_4 Ints{4, 5, 6, 7, 0, 1, 2, 3}
#else
constexpr int LANES = 4;
typedef int32_t Ints __attribute__((vector_size(16), aligned(16)));
#define LOW_1 Ints{0, 4, 2, 6}
#define LOW_2 Ints{0, 1, 4, 5}
#define ACROSS_1 Ints{1, 0, 3, 2}
#define ACROSS_2 Ints{2, 3, 0, 1}
#endif

constexpr int VECTOR_BYTES = LANES * 4;
typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(VECTOR_BYTES)));
typedef float UnalignedFloats __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef int32_t UnalignedInts __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1)));

inline Floats load(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<UnalignedFloats*>(to) = value; }
inline Ints load_bits(const void* from) { return *static_cast<const UnalignedInts*>(from); }

template <class Value>
inline Value read_as(const void* from) {
    Value value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float as_float(uint32_t bits) { return read_as<float>(&bits); }
inline Floats broadcast(float value) { return value - Floats{}; }
inline Floats as_floats(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline Ints as_ints(Floats value) { return reinterpret_cast<Ints>(value); }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Return e^x for x <= 88, within 2 units in the last place; 0 if it is below the smallest normal number, NaN for NaN.
// Cody-Waite reduction and the polynomial of Cephes' expf.
ALWAYS_INLINE Floats exponential(Floats x) {
    const Floats lowest = broadcast(-87.33654f);
    const Floats scaled = x * 1.44269504088896341f;
    const Floats rounded = (scaled + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    Floats rest = x - rounded * 0.693359375f;
    rest = rest - rounded * -2.12194440e-4f;
    Floats sum = broadcast(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const Floats clamped = rounded < -126.0f ? broadcast(-126.0f) : rounded;
    const Ints power = (__builtin_convertvector(clamped, Ints) + 127) << 23;
    const Floats value = sum * as_floats(power);
    return x < lowest ? Floats{} : value;
}

constexpr float LOG2_E = 1.44269504f;

// Return 2^x for x <= 0, within 5e-6, which suffices for bfloat16; 2^-126 for x < -126, NaN for NaN.
ALWAYS_INLINE Floats exponential_of_two(Floats x) {
    const Floats lowest = broadcast(-126.0f), bounded = x < lowest ? lowest : x;
    const Floats moved = bounded + 12582912.0f, rest = bounded - (moved - 12582912.0f);  // 1.5 * 2^23: rounds
    Floats sum = broadcast(9.6181291e-3f);
    sum = sum * rest + 5.5504109e-2f;
    sum = sum * rest + 2.4022651e-1f;
    sum = sum * rest + 6.9314718e-1f;
    sum = sum * rest + 1.0f;
    return sum * as_floats((as_ints(moved) << 23) + (127 << 23));  // the integer is in the low bits
}

// Return tanh(x) within 1e-7, also for non-finite numbers.
ALWAYS_INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats size = x < 0.0f ? -x : x, clamped = size > 20.0f ? broadcast(20.0f) : size;
    const Floats value = 1.0f - 2.0f / (exponential(2.0f * clamped) + 1.0f);
    return x < 0.0f ? -value : value;
}

// Combine the lanes of each group of `size` lanes, a power of two: each lane with its neighbour, then pairs with pairs.
// Every lane gets the result of its group.
template <int size, typename Combine>
ALWAYS_INLINE Floats combine_groups(Floats value, Combine combine) {
    if constexpr (size > 1) value = combine(value, __builtin_shuffle(value, ACROSS_1));
    if constexpr (size > 2) value = combine(value, __builtin_shuffle(value, ACROSS_2));
#if defined(ACROSS_4)
    if constexpr (size > 4) value = combine(value, __builtin_shuffle(value, ACROSS_4));
#endif
#if defined(ACROSS_8)
    if constexpr (size > 8) value = combine(value, __builtin_shuffle(value, ACROSS_8));
#endif
    return value;
}

template <typename Combine>
inline float reduce(Floats value, Combine combine) {
    return combine_groups<LANES>(value, combine)[0];
}

inline float sum_of(Floats value) {
    return reduce(value, [](Floats a, Floats b) { return a + b; });
}

inline float largest_of(Floats value) { return reduce(value, larger); }

// Return the vector of 0, 1, 2, ...
ALWAYS_INLINE Ints lane_numbers() {
    Ints numbers{};
    for (int lane = 0; lane < LANES; ++lane) numbers[lane] = lane;
    return numbers;
}

// Lane i of `repeated` is number i % size, lane i of `spread` number i / size.
template <int size>
ALWAYS_INLINE Floats repeated(const float* from) {
    Ints place{};
    for (int lane = 0; lane < LANES; ++lane) place[lane] = lane % size;
    return __builtin_shuffle(load(from), place);
}

template <int size>
ALWAYS_INLINE Floats spread(const float* from) {
    Ints place{};
    for (int lane = 0; lane < LANES; ++lane) place[lane] = lane / size;
    return __builtin_shuffle(load(from), place);
}

template <int count>
ALWAYS_INLINE void add_halves(Floats* values, int distance, Ints low) {
#pragma GCC unroll 8
    for (int pair = 0; 2 * pair < count; ++pair) {
        const Floats a = values[2 * pair], b = 2 * pair + 1 < count ? values[2 * pair + 1] : a;
        values[pair] = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + distance);
    }
}

// Return a vector whose lane i, for i < count, is the sum of all lanes of `values[i]`; later lanes are arbitrary.
// Overwrites `values`.
template <int count>
ALWAYS_INLINE Floats sums_of(Floats* values) {
    add_halves<count>(values, 1, LOW_1);
    add_halves<(count + 1) / 2>(values, 2, LOW_2);
#if defined(LOW_4)
    add_halves<(count + 3) / 4>(values, 4, LOW_4);
#endif
#if defined(LOW_8)
    add_halves<(count + 7) / 8>(values, 8, LOW_8);
#endif
    return values[0];
}

template <int distance>
ALWAYS_INLINE void exchange(Floats* rows, Ints low) {
#pragma GCC unroll 16
    for (int row = 0; row < LANES; ++row) {
        if (row & distance) continue;
        const Floats a = rows[row], b = rows[row + distance];
        rows[row] = __builtin_shuffle(a, b, low);
        rows[row + distance] = __builtin_shuffle(a, b, low + distance);
    }
}

// Transpose LANES rows of LANES numbers in place.
inline void transpose(Floats* rows) {
    exchange<1>(rows, LOW_1);
    exchange<2>(rows, LOW_2);
#if defined(LOW_4)
    exchange<4>(rows, LOW_4);
#endif
#if defined(LOW_8)
    exchange<8>(rows, LOW_8);
#endif
}

// Widen with intrinsics, since the compiler would convert lane by lane.
inline Ints load_shorts(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(*reinterpret_cast<const Shorts*>(from), Ints);
#endif
}

inline Ints load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
#endif
}

inline Floats load_bfloat16(const uint16_t* from) { return as_floats(load_shorts(from) << 16); }

#if defined(__AVX512BF16__) || defined(BATON_EMULATED_BF16)
#define BATON_BF16_PRODUCTS 1

#if defined(BATON_EMULATED_BF16)
// Replace subnormal numbers by zeros of the same sign.
inline Floats flushed(Floats x) {
    const Ints bits = as_ints(x);
    return as_floats((bits & 0x7f800000) == 0 ? bits & static_cast<int32_t>(0x80000000) : bits);
}
#endif

// Add two products of bfloat16 numbers to each lane of `sum`: that of the upper halves, then that of the lower halves.
// Each addition rounds to nearest in any mode of the processor; subnormal numbers count as zero, also as results.
inline Floats add_pairs(Floats sum, Ints a, Ints b) {
#if defined(BATON_EMULATED_BF16)
    const int32_t upper = static_cast<int32_t>(0xffff0000);
    const auto add = [](Floats to, Ints x, Ints y) {
        return flushed(reinterpret_cast<Floats>(_mm512_fmadd_ps(reinterpret_cast<__m512>(flushed(as_floats(x))),
                                                                reinterpret_cast<__m512>(flushed(as_floats(y))),
                                                                reinterpret_cast<__m512>(flushed(to)))));
    };
    return add(add(sum, a & upper, b & upper), a << 16, b << 16);
#else
    return reinterpret_cast<Floats>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
#endif
}
#endif

// Round to bfloat16, to nearest, ties to even; NaN remains NaN.
inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Round each lane to bfloat16, in the upper half of its bits.
inline Ints rounded_bits(Floats x) {
    const Ints bits = as_ints(x), rounded = (bits + (0x7fff + ((bits >> 16) & 1))) & static_cast<int32_t>(0xffff0000);
    return x != x ? bits | 0x400000 : rounded;
}

// Round each lane to bfloat16; subnormal numbers may become zero.
ALWAYS_INLINE Shorts lanes_to_bfloat16(Floats x) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<Shorts>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#else
    return __builtin_convertvector((rounded_bits(x) >> 16) & 0xffff, Shorts);
#endif
}

template <class Make, int... n>
constexpr auto table_of(const Make& make, std::integer_sequence<int, n...>) {
    return std::array<decltype(make(std::integral_constant<int, 0>())), sizeof...(n)>{
        make(std::integral_constant<int, n>())...};
}

// Return the array of make(0), make(1), ... with `count` entries. Arguments are compile-time constants: `n.value` may
// be a template argument.
template <int count, class Make>
constexpr auto table(const Make& make) {
    return table_of(make, std::make_integer_sequence<int, count>());
}

}  // namespace baton
