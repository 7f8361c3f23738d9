// Numbers of bfloat16 two to a word, as processors multiply them: made of floats, and of rows side by side.
#pragma once

#include "vector.h"

#if defined(BATON_BF16_PRODUCTS)
namespace baton {

// 2 * LANES numbers from `x` on.
ALWAYS_INLINE Ints to_words(Floats first, Floats second) {
#if defined(BATON_EMULATED_BF16)
    alignas(VECTOR_BYTES) Shorts both[2] = {lanes_to_bfloat16(first), lanes_to_bfloat16(second)};
    return load_bits(both);
#else
    return reinterpret_cast<Ints>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first)));
#endif
}

// 2 * LANES numbers of two rows: words of a number of the one below and of the other's above, four in turn of the first
// half of each eight and of the second.
struct Interleaved {
    Ints low, high;

    ALWAYS_INLINE Interleaved(Ints first, Ints second)
        : low(reinterpret_cast<Ints>(
              _mm512_unpacklo_epi16(reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second)))),
          high(reinterpret_cast<Ints>(
              _mm512_unpackhi_epi16(reinterpret_cast<__m512i>(first), reinterpret_cast<__m512i>(second)))) {}
};

// Sums over words as Interleaved has them, in the order of the rows, and the other way round.
constexpr Ints FIRST_OF_BOTH = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
constexpr Ints SECOND_OF_BOTH = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
constexpr Ints LOWS = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
constexpr Ints HIGHS = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};

}  // namespace baton
#endif
