// How packed weights are multiplied, by format: what a step of a panel holds, and the sums it is added to.
#pragma once

#include "vector.h"

namespace baton {

constexpr int PANEL = 32;  // outputs
constexpr int MOST_ROWS = LANES == 16 ? 14 : LANES == 8 ? 6 : 4;  // that are multiplied at once: sums fill the registers

// Of every format: NUMBERS of an output side by side make a `Number`, which unfold into PARTS vectors of outputs. A part
// is multiplied with one word of the inputs, 32 bits: a float, two of bfloat16 or four bytes. Up to MOST_FOLDED_ROWS rows it is unfolded while it is multiplied.

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
    using Number = uint32_t;  // two, the first one below
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
// Both in bfloat16, which such processors multiply twice as fast.
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

// Inputs are bytes with 128 added, since that is what processors multiply with signed bytes.
struct Int8Weight {
    using Number = uint32_t;  // four
    using Sum = Ints;
    using Given = Ints;
    static constexpr int WORD_INPUTS = 4, PARTS = 1, MOST_FOLDED_ROWS = MOST_ROWS;
    static constexpr bool IS_GROUPED = false;

    Ints bytes;
    explicit Int8Weight(const Number* from) : bytes(load_bits(from)) {}
    template <int>
    Ints part() const {
        return bytes;
    }
    static Given given(const uint32_t* word) { return Ints{} + static_cast<int32_t>(*word); }
    static void add(Sum& sum, Given x, Ints part) {
#if defined(__AVX512VNNI__)
        sum = reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(x),
                                                         reinterpret_cast<__m512i>(part)));
#else
        for (int n = 0; n < 4; ++n) sum += ((part << (24 - 8 * n)) >> 24) * ((x >> (8 * n)) & 0xff);
#endif
    }
};

// Codes of 0 to 15; what a group of inputs adds up to is scaled and shifted afterwards.
struct Int4Weight : FloatProducts {
    using Number = uint32_t;  // eight, the first one lowest
    static constexpr int PARTS = 8, MOST_FOLDED_ROWS = 4;
    static constexpr bool IS_GROUPED = true;

    Ints codes;
    explicit Int4Weight(const Number* from) : codes(load_bits(from)) {}
    template <int n>
    Floats part() const {
#if defined(__AVX512F__)
        const Floats values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return reinterpret_cast<Floats>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(codes >> (4 * n)),
                                                              reinterpret_cast<__m512>(values)));
#else
        return __builtin_convertvector((codes >> (4 * n)) & 15, Floats);
#endif
    }
};

}  // namespace baton
