// Words of two bfloat16 numbers, which some processors multiply in pairs. They are converted from floats, or
// interleaved from two rows.
#pragma once

#include "vector.h"

#if defined(BATON_BF16_PRODUCTS)
namespace baton {

// Convert 2 * LANES floats to words.
ALWAYS_INLINE Ints to_words(Floats first, Floats second) {
#if defined(BATON_EMULATED_BF16)
    alignas(VECTOR_BYTES) Shorts both[2] = {lanes_to_bfloat16(first), lanes_to_bfloat16(second)};
    return load_bits(both);
#else
    return reinterpret_cast<Ints>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first)));
#endif
}

// 2 * LANES numbers of two rows. Each word has a number of the first row in its lower half, and the same number of the
// second row in its upper half. Of every eight words, `low` has the first four and `high` the last four.
struct Interleaved {
    Ints low, high;

    ALWAYS_INLINE Interleaved(Ints first, Ints second)
        : low(reinterpret_cast<Ints>(
              _mm512_unpacklo_epi16(reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second)))),
          high(reinterpret_cast<Ints>(
              _mm512_unpackhi_epi16(reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second)))) {}
};

// Shuffles from the order of `Interleaved` to that of the rows (FIRST_OF_BOTH, SECOND_OF_BOTH), and back (LOWS, HIGHS).
constexpr Ints FIRST_OF_BOTH = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
constexpr Ints SECOND_OF_BOTH = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
constexpr Ints LOWS = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
constexpr Ints HIGHS = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};

}  // namespace baton
#endif
