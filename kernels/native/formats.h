// How packed weights are multiplied, by format: numbers of an output side by side, and the sums they are added to.
#pragma once

#include "vector.h"

namespace baton {

constexpr int PANEL = 32;  // outputs

struct Float32Weight {
    using Number = float;
    using Input = float;
    using Sum = Floats;
    static constexpr int SIDE_BY_SIDE = 1;
    static constexpr bool IS_INTEGER = false;

    struct Part {
        Floats value;
        explicit Part(const float* from) : value(load(from)) {}
        void add(Floats& sum, const float* x) const { sum += x[0] * value; }
    };
};

struct Bfloat16Weight {
    using Number = uint16_t;
    using Input = float;
    using Sum = Floats;
    static constexpr int SIDE_BY_SIDE = 2;
    static constexpr bool IS_INTEGER = false;

    struct Part {
        Floats even, odd;
        explicit Part(const uint16_t* from) {
            const Ints bits = load_bits(from);
            even = as_floats(bits << 16);
            odd = as_floats(bits & static_cast<int32_t>(0xffff0000));
        }
        void add(Floats& sum, const float* x) const {
            sum += x[0] * even;
            sum += x[1] * odd;
        }
    };
};

// Both in bfloat16: what processors with AVX512-BF16 multiply twice as fast. Others compute the same products.
struct RoundingWeight {
    using Number = uint16_t;
    using Input = uint16_t;
    using Sum = Floats;
    static constexpr int SIDE_BY_SIDE = 2;
    static constexpr bool IS_INTEGER = false;

    struct Part {
#if defined(__AVX512BF16__)
        __m512bh numbers;
        explicit Part(const uint16_t* from) : numbers(reinterpret_cast<__m512bh>(load_bits(from))) {}
        void add(Floats& sum, const uint16_t* x) const {
            const auto two = reinterpret_cast<__m512bh>(_mm512_set1_epi32(read_as<int32_t>(x)));
            sum = reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), two, numbers));
        }
#else
        Bfloat16Weight::Part numbers;
        explicit Part(const uint16_t* from) : numbers(from) {}
        void add(Floats& sum, const uint16_t* x) const {
            const uint32_t two = read_as<uint32_t>(x);
            const float wide[2] = {as_float(two << 16), as_float(two & 0xffff0000)};
            numbers.add(sum, wide);
        }
#endif
    };
};

// Inputs are bytes with 128 added, since that is what processors multiply with signed bytes.
struct Int8Weight {
    using Number = int8_t;
    using Input = uint8_t;
    using Sum = Ints;
    static constexpr int SIDE_BY_SIDE = 4;
    static constexpr bool IS_INTEGER = true;

    struct Part {
        Ints bytes;
        explicit Part(const int8_t* from) : bytes(load_bits(from)) {}
        void add(Ints& sum, const uint8_t* x) const {
            const auto four = read_as<int32_t>(x);
#if defined(__AVX512VNNI__)
            sum = reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), _mm512_set1_epi32(four),
                                                             reinterpret_cast<__m512i>(bytes)));
#else
            for (int n = 0; n < 4; ++n) sum += ((bytes << (24 - 8 * n)) >> 24) * ((four >> (8 * n)) & 0xff);
#endif
        }
    };
};

}  // namespace baton
