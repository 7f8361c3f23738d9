// Formats of packed weights: how numbers are read from a panel, multiplied and summed.
#pragma once

#include "vector.h"

namespace baton {

typedef int16_t Halves __attribute__((vector_size(VECTOR_BYTES), aligned(VECTOR_BYTES)));

constexpr int PANEL = 32;  // outputs of a panel
constexpr int ZERO_PARTS = 8;  // parts of a code in which zero points are stored
constexpr int MOST_ROWS = LANES == 16 ? 14 : LANES == 8 ? 6 : 4;  // most rows of a tile: their sums fill the registers

// In every format NUMBERS adjacent numbers of an output form a `Number`, which unfolds into PARTS vectors of outputs. A
// part is multiplied with one 32-bit word of inputs: a float, two bfloat16, two integers or four bytes. For up to MOST_FOLDED_ROWS
// rows it is unfolded during the multiplication.

struct FloatProducts {
    static constexpr int MOST_FOLDED_ROWS = MOST_ROWS;
    using Sum = Floats;
    using Given = Floats;
    static constexpr int WORD_INPUTS = 1;
    static Given given(const uint32_t* word) { return broadcast(as_float(*word)); }
    static void add(Sum& sum, Given x, Floats part) { sum += x * part; }
};

struct Float32Weight : FloatProducts {
    using Number = float;
    static constexpr int PARTS = 1;
    static constexpr bool IS_GROUPED = false;

    Floats value;
    explicit Float32Weight(const Number* from) : value(load(from)) {}
    template <int>
    Floats part() const {
        return value;
    }
};

struct Bfloat16Weight : FloatProducts {
    using Number = uint32_t;  // two numbers, the first one in the low half
    static constexpr int PARTS = 2;
    static constexpr bool IS_GROUPED = false;

    Ints bits;
    explicit Bfloat16Weight(const Number* from) : bits(load_bits(from)) {}
    template <int n>
    Floats part() const {
        return as_floats(n == 0 ? bits << 16 : bits & static_cast<int32_t>(0xffff0000));
    }
};

#if defined(BATON_BF16_PRODUCTS)
// Weight and inputs in bfloat16, which some processors multiply in pairs, twice as fast as floats.
struct PairWeight {
    using Number = uint32_t;
    using Sum = Floats;
    using Given = Ints;
    static constexpr int WORD_INPUTS = 2, PARTS = 1, MOST_FOLDED_ROWS = MOST_ROWS;
    static constexpr bool IS_GROUPED = false;

    Ints bits;
    explicit PairWeight(const Number* from) : bits(load_bits(from)) {}
    template <int>
    Ints part() const {
        return bits;
    }
    static Given given(const uint32_t* word) { return Ints{} + static_cast<int32_t>(*word); }
    static void add(Sum& sum, Given x, Ints part) { sum = add_pairs(sum, x, part); }
};
#endif

// Return, in each half of a lane, the sum of the products of its two signed bytes, which fits in the half.
inline Halves products_of_bytes(Ints a, Ints b) {
    const Halves first = reinterpret_cast<Halves>(a), second = reinterpret_cast<Halves>(b);
    return ((first << 8) >> 8) * ((second << 8) >> 8) + (first >> 8) * (second >> 8);
}

// Products of integers of 16 bits, two per word. Their sums are exact, and so equal at every instruction-set level.
struct IntegerProducts {
    static constexpr int MOST_FOLDED_ROWS = MOST_ROWS;
    using Number = uint32_t;
    using Sum = Ints;
    using Given = Ints;
    static constexpr int WORD_INPUTS = 2;
    static constexpr bool IS_GROUPED = false;
    static Given given(const uint32_t* word) { return Ints{} + static_cast<int32_t>(*word); }
    static void add(Sum& sum, Given x, Ints part) {
#if defined(__AVX512VNNI__)
        sum = reinterpret_cast<Ints>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(x),
                                                         reinterpret_cast<__m512i>(part)));
#elif defined(__AVX2__)
        // Assembly, since GCC would otherwise compute all products before the first addition, and run out of registers.
        Ints to = sum, products;
        asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(to), "=&x"(products) : "x"(x), "x"(part));
        sum = to;
#elif defined(__SSE2__)
        sum += reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(part)));
#else
        sum += ((x << 16) >> 16) * ((part << 16) >> 16) + (x >> 16) * (part >> 16);
#endif
    }
};

// Integers of 16 bits, unfolded from int8.
struct Int16Weight : IntegerProducts {
    static constexpr int PARTS = 1;

    Ints halves;
    explicit Int16Weight(const Number* from) : halves(load_bits(from)) {}
    template <int>
    Ints part() const {
        return halves;
    }
};

struct Int8Weight : IntegerProducts {  // a number is four integers; part 0 has the first and the third, part 1 the others
    static constexpr int PARTS = 2;

    Halves bytes;
    explicit Int8Weight(const Number* from) : bytes(reinterpret_cast<Halves>(load_bits(from))) {}
    template <int n>
    Ints part() const {
        return reinterpret_cast<Ints>((n == 0 ? bytes << 8 : bytes) >> 8);
    }
};

// Unsigned codes of 0 to 15, multiplied by signed bytes of inputs. groups.h sums over the groups, as floats.
struct Int4Weight {
    static constexpr int LARGEST = 15;
    using Number = uint32_t;  // eight codes: four in the low nibbles of the bytes, four in the high nibbles
    using Sum = Floats;
    static constexpr int WORD_INPUTS = 4, PARTS = 2, MOST_FOLDED_ROWS = MOST_ROWS;
    static constexpr bool IS_GROUPED = true;

    Ints codes;
    explicit Int4Weight(const Number* from) : codes(load_bits(from)) {}
    template <int n>
    Ints part() const {
        return (codes >> (4 * n)) & 0x0f0f0f0f;
    }
};

#if defined(__AVX512VNNI__)
// int8, multiplied by unsigned bytes of inputs. groups.h sums over groups of inputs, as floats.
struct ByteWeight {
    using Number = uint32_t;  // four codes
    using Sum = Floats;
    static constexpr int WORD_INPUTS = 4, PARTS = 1, MOST_FOLDED_ROWS = MOST_ROWS;
    static constexpr bool IS_GROUPED = true;

    Ints codes;
    explicit ByteWeight(const Number* from) : codes(load_bits(from)) {}
};
#endif

// Return, for each byte with an E2M1 code (kernels/types.py), twice its value plus 12, which is not negative.
inline Ints twice_and_twelve(Ints codes) {
    alignas(16) static constexpr uint8_t TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(TABLE)));
    return reinterpret_cast<Ints>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(TABLE)));
    return reinterpret_cast<Ints>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes)));
#else
    uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof codes);
    for (uint8_t& each : bytes) each = TABLE[each];
    return load_bits(bytes);
#endif
}

// E2M1 codes, converted to unsigned numbers of 0 to 24 with the zero point 12.
struct Fp4Weight : Int4Weight {
    static constexpr int LARGEST = 24;

    using Int4Weight::Int4Weight;
    template <int n>
    Ints part() const {
        return twice_and_twelve(Int4Weight::part<n>());
    }
};

// Codes of 0 to 15, unfolded to integers of 16 bits. groups.h sums over the groups, as floats.
struct Code4Weight : IntegerProducts {
    using Sum = Floats;
    // Eight codes: four in the low nibbles of the bytes, four in the high nibbles. Of each four, a part has the first and
    // the third, the next part the others.
    static constexpr int PARTS = 4, MOST_FOLDED_ROWS = 4;
    static constexpr bool IS_GROUPED = true;

    Ints codes;
    explicit Code4Weight(const Number* from) : codes(load_bits(from)) {}
    template <int n>
    Ints part() const {
        return (codes >> (8 * (n % 2) + 4 * (n / 2))) & 0x000f000f;
    }
};

// Codes of -128 to 127.
struct Code8Weight : Int8Weight {
    using Sum = Floats;
    static constexpr int MOST_FOLDED_ROWS = 4;
    static constexpr bool IS_GROUPED = true;

    using Int8Weight::Int8Weight;
};

}  // namespace baton
