// Conversion of vectors of the KV pool's numbers: to floats, and from floats to one-byte formats.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "vector.h"

namespace baton {

enum class Element : int32_t { float32 = 0, bfloat16 = 1, e4m3 = 2, e5m2 = 3, int8 = 4 };

// Call `work` with the element type as a compile-time constant, so that `element.value` may be a template argument.
template <class Work>
inline void with_element(int32_t element, const Work& work) {
    switch (static_cast<Element>(element)) {
        case Element::float32: return work(std::integral_constant<Element, Element::float32>());
        case Element::bfloat16: return work(std::integral_constant<Element, Element::bfloat16>());
        case Element::e4m3: return work(std::integral_constant<Element, Element::e4m3>());
        case Element::e5m2: return work(std::integral_constant<Element, Element::e5m2>());
        case Element::int8: return work(std::integral_constant<Element, Element::int8>());
    }
}

constexpr int64_t bytes_of(Element element) {
    return element == Element::float32 ? 4 : element == Element::bfloat16 ? 2 : 1;
}

constexpr bool is_scaled(Element element) { return bytes_of(element) == 1; }

constexpr float largest_number(Element element) {
    return element == Element::e4m3 ? 448.0f : element == Element::e5m2 ? 57344.0f : 127.0f;
}

// The upper byte of an IEEE 754 binary16 number is an E5M2 number, including infinity and NaN (OCP FP8).
ALWAYS_INLINE Floats load_e5m2(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8)));
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_slli_epi16(wide, 8)));
#else
    const Ints bits = load_bytes(from), size = bits & 0x7f;
    const Ints finite = as_ints(as_floats(size << 21) * 0x1p112f);
    const Ints special = size == 0x7c ? Ints{} + 0x7f800000 : Ints{} + 0x7fc00000;
    return as_floats((size < 0x7c ? finite : special) | ((bits & 0x80) << 24));
#endif
}

// An E4M3 number has a sign, 4 exponent bits and 3 fraction bits. Its one NaN is read as 480, which does not matter:
// rows with a NaN have the scale NaN. It is converted by way of binary16, since multiplying subnormal floats takes a
// hundred times as long.
ALWAYS_INLINE Floats load_e4m3(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(half)) * 256.0f;
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbfff)));
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(half)) * 256.0f;
#else
    const Ints bits = load_bytes(from);
    return as_floats(as_ints(as_floats((bits & 0x7f) << 20) * 0x1p120f) | ((bits & 0x80) << 24));
#endif
}

ALWAYS_INLINE Floats load_int8(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(wide));
#else
    const Ints bits = load_bytes(from);
    return __builtin_convertvector((bits << 24) >> 24, Floats);
#endif
}

// Load LANES numbers as floats, without their scales.
template <Element element>
ALWAYS_INLINE Floats load_numbers(const char* from) {
    if constexpr (element == Element::float32) return load(reinterpret_cast<const float*>(from));
    if constexpr (element == Element::bfloat16) return load_bfloat16(reinterpret_cast<const uint16_t*>(from));
    const auto* bytes = reinterpret_cast<const uint8_t*>(from);
    if constexpr (element == Element::e4m3) return load_e4m3(bytes);
    if constexpr (element == Element::e5m2) return load_e5m2(bytes);
    return load_int8(bytes);
}

// Return the bytes of finite numbers within the format's range, one per lane, rounded to nearest, ties to even.
template <Element element>
ALWAYS_INLINE Ints to_bytes(Floats value) {
    if constexpr (element == Element::int8) {
        return __builtin_convertvector((value + 12582912.0f) - 12582912.0f, Ints) & 0xff;  // 1.5 * 2^23
    } else {
        constexpr int fraction = element == Element::e4m3 ? 3 : 2, bias = element == Element::e4m3 ? 7 : 15;
        constexpr int dropped = 23 - fraction;
        const Ints bits = as_ints(value), size = bits & 0x7fffffff;
        const Ints normal = (size + ((bias - 127) * (1 << 23) + (1 << (dropped - 1)) - 1) + ((size >> dropped) & 1)) >> dropped;
        const Floats step = as_floats(Ints{} + ((127 - bias + dropped + 1) << 23));  // last bit: smallest number
        const Ints small = as_ints(as_floats(size) + step) - as_ints(step);
        const Ints lowest = Ints{} + ((128 - bias) << 23);  // smallest normal number
        return (size < lowest ? small : normal) | ((bits >> 24) & 0x80);
    }
}

// Quantise `size` numbers as `quantise` of kernels/types.py does; return their scale, NaN if a number is not finite.
template <Element element>
inline float quantise_row(const float* from, int64_t size, uint8_t* to) {
    float largest = 0, spoilt = 0;
    for (int64_t i = 0; i < size; ++i) {
        largest = std::max(largest, std::fabs(from[i]));
        spoilt += from[i] * 0.0f;
    }
    const float limit = largest_number(element), scale = std::max(largest / limit, std::numeric_limits<float>::min());
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, size - i);
        alignas(64) float part[LANES] = {};
        std::copy_n(from + i, count, part);
        const Floats ratio = load(part) / scale;
        const Floats clamped = ratio > limit ? broadcast(limit) : ratio < -limit ? broadcast(-limit) : ratio;
        const Ints bytes = to_bytes<element>(spoilt == 0 ? clamped : Floats{});
        for (int64_t lane = 0; lane < count; ++lane) to[i + lane] = static_cast<uint8_t>(bytes[lane]);
    }
    return spoilt == 0 ? scale : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace baton
