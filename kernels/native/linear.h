// Rows times a packed weight. Each output is one sum over the inputs in their order, whatever the number of rows: a
// row's result depends neither on its neighbours nor on threads.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "vector.h"

namespace baton {

// `rounding`: as bfloat16, and the inputs are rounded to it too.
enum class Stored : int32_t { float32 = 0, bfloat16 = 1, rounding = 2, int8 = 3 };

// Outputs in panels of 32, zeros after the last: `[panel][in / n][32][n]`, n numbers (1, 2 or 4 by format) side by side.
struct Weight {
    const void* data;
    const float* scales;  // int8: of each output, padded like the panels
    const int32_t* sums;  // int8: of each output's integers, padded likewise
    const float* bias;    // [outputs], or null
    int64_t outputs, inputs;
    int32_t stored;
};

constexpr int PANEL = 32;
constexpr int STRIP = 2 * LANES;               // outputs that one tile computes
constexpr int MOST_ROWS = LANES == 16 ? 12 : 6;  // of one tile: its sums fill the registers
constexpr int64_t BLOCK_BYTES = 256 << 10;     // of inputs that are read again for every strip

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

// Sums of `rows` rows and `strips` strips; x: [steps][rows][n]; columns: where each strip begins in its panel.
template <class Format, int rows, int strips>
inline void multiply(const typename Format::Input* x, const typename Format::Number* const* columns, int64_t steps,
                     typename Format::Sum sums[rows][strips][2]) {
    constexpr int side = Format::SIDE_BY_SIDE;
    for (int r = 0; r < rows; ++r)
        for (int s = 0; s < strips; ++s) sums[r][s][0] = sums[r][s][1] = typename Format::Sum{};
    for (int64_t step = 0; step < steps; ++step) {
        for (int s = 0; s < strips; ++s) {
            const auto* column = columns[s] + step * PANEL * side;
            const typename Format::Part first(column), second(column + LANES * side);
            for (int r = 0; r < rows; ++r) {
                first.add(sums[r][s][0], x + (step * rows + r) * side);
                second.add(sums[r][s][1], x + (step * rows + r) * side);
            }
        }
    }
}

// Rows as tiles read them, `[tile][step][row][n]`, with zeros after the last input; where they are bytes, a scale each.
template <class Format>
struct Inputs {
    using Input = typename Format::Input;

    const int64_t steps, tile_rows;
    const Input* numbers;
    std::vector<Input> held;
    std::vector<float> scales;

    Inputs(const float* x, int64_t rows, int64_t inputs, int64_t tile_rows, int threads)
        : steps((inputs + Format::SIDE_BY_SIDE - 1) / Format::SIDE_BY_SIDE), tile_rows(tile_rows) {
        if constexpr (sizeof(Input) == sizeof(float)) {
            numbers = x;
            if (tile_rows == 1 && steps * Format::SIDE_BY_SIDE == inputs) return;
        }
        held.resize(rows * steps * Format::SIDE_BY_SIDE);
        numbers = held.data();
        if (Format::IS_INTEGER) scales.resize(rows);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > MOST_ROWS)
        for (int64_t row = 0; row < rows; ++row) arrange(x + row * inputs, row, rows, inputs);
    }

    const Input* tile(int64_t first_row) const { return numbers + first_row * steps * Format::SIDE_BY_SIDE; }

    void arrange(const float* x, int64_t row, int64_t rows, int64_t inputs) {
        const int64_t first = row / tile_rows * tile_rows, count = std::min(tile_rows, rows - first);
        Input* to = held.data() + (first * steps + row - first) * Format::SIDE_BY_SIDE;
        float inverse = 1;
        if constexpr (Format::IS_INTEGER) inverse = 1 / (scales[row] = scale_of(x, inputs));
        for (int64_t i = 0; i < inputs; ++i) {
            Input& place = to[i / Format::SIDE_BY_SIDE * count * Format::SIDE_BY_SIDE + i % Format::SIDE_BY_SIDE];
            if constexpr (Format::IS_INTEGER)
                place = to_byte(x[i] * inverse);
            else if constexpr (sizeof(Input) == 2)
                place = to_bfloat16(x[i]);
            else
                place = x[i];
        }
    }

    // Of a row that is not finite NaN, so that it stays so.
    static float scale_of(const float* x, int64_t inputs) {
        float largest = 0, spoilt = 0;
        for (int64_t i = 0; i < inputs; ++i) {
            largest = std::max(largest, std::fabs(x[i]));
            spoilt += x[i] * 0;
        }
        return std::max(largest / 127.0f, std::numeric_limits<float>::min()) + spoilt;
    }

    static uint8_t to_byte(float value) {
        const float rounded = (value + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to the nearest integer
        return static_cast<uint8_t>(static_cast<int32_t>(rounded > -127.0f ? std::min(rounded, 127.0f) : -127.0f) + 128);
    }
};

template <class Format>
class Product {
   public:
    Product(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads)
        : rows_(rows),
          weight_(weight),
          output_(output),
          accumulate_(accumulate),
          threads_(threads),
          inputs_(x, rows, weight.inputs, even_share(rows), threads),
          strips_((weight.outputs + STRIP - 1) / STRIP) {}

    // Of a tile: all tiles are about as high.
    static int64_t even_share(int64_t rows) {
        const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
        return (rows + tiles - 1) / tiles;
    }

    void run() {
        const int64_t tile_rows = inputs_.tile_rows, at_once = strips_at_once(static_cast<int>(tile_rows));
        const int64_t tile_bytes = tile_rows * inputs_.steps * Format::SIDE_BY_SIDE * static_cast<int64_t>(sizeof(Input));
        const int64_t block_rows = tile_rows * std::max<int64_t>(1, BLOCK_BYTES / tile_bytes);
        const int64_t groups = (strips_ + at_once - 1) / at_once, blocks = (rows_ + block_rows - 1) / block_rows;
#pragma omp parallel for schedule(static) num_threads(threads_) if (threads_ > 1)
        for (int64_t task = 0; task < groups * blocks; ++task) {
            const int64_t strip = task % groups * at_once, count = std::min<int64_t>(at_once, strips_ - strip);
            const int64_t first = task / groups * block_rows, end = std::min(rows_, first + block_rows);
            for (int64_t row = first; row < end; row += tile_rows)
                dispatch<MOST_ROWS>(row, static_cast<int>(std::min(tile_rows, end - row)), strip, count);
        }
    }

   private:
    using Number = typename Format::Number;
    using Input = typename Format::Input;

    // So that a tile has sums enough to keep the processor busy.
    static constexpr int strips_at_once(int rows) { return rows <= MOST_ROWS / 6 ? 4 : rows <= MOST_ROWS / 2 ? 2 : 1; }

    template <int rows>
    void dispatch(int64_t row, int count, int64_t strip, int64_t strips) {
        if constexpr (rows > 1) {
            if (count < rows) return dispatch<rows - 1>(row, count, strip, strips);
        }
        constexpr int most = strips_at_once(rows);
        for (; strips >= most; strips -= most, strip += most) tile<rows, most>(row, strip);
        for (; strips > 0; --strips, ++strip) tile<rows, 1>(row, strip);
    }

    template <int rows, int strips>
    void tile(int64_t row, int64_t strip) {
        const Number* columns[strips];
        for (int s = 0; s < strips; ++s) {
            const int64_t output = (strip + s) * STRIP;
            columns[s] = static_cast<const Number*>(weight_.data) +
                         (output / PANEL * inputs_.steps * PANEL + output % PANEL) * Format::SIDE_BY_SIDE;
        }
        typename Format::Sum sums[rows][strips][2];
        multiply<Format, rows, strips>(inputs_.tile(row), columns, inputs_.steps, sums);
        for (int r = 0; r < rows; ++r)
            for (int s = 0; s < strips; ++s)
                for (int half = 0; half < 2; ++half) finish(row + r, (strip + s) * STRIP + half * LANES, sums[r][s][half]);
    }

    // LANES outputs of one row, or as many as there are.
    void finish(int64_t row, int64_t output, typename Format::Sum sum) {
        const int64_t count = std::min<int64_t>(LANES, weight_.outputs - output);
        if (count <= 0) return;
        Floats value;
        if constexpr (Format::IS_INTEGER) {
            const Ints offsets = load_bits(weight_.sums + output);
            value = __builtin_convertvector(sum - 128 * offsets, Floats) * load(weight_.scales + output) *
                    inputs_.scales[row];
        } else {
            value = sum;
        }
        float* to = output_ + row * weight_.outputs + output;
        if (count == LANES) {
            if (weight_.bias) value += load(weight_.bias + output);
            store(to, accumulate_ ? load(to) + value : value);
        } else {
            for (int64_t i = 0; i < count; ++i) {
                const float one = weight_.bias ? value[i] + weight_.bias[output + i] : value[i];
                to[i] = accumulate_ ? to[i] + one : one;
            }
        }
    }

    const int64_t rows_;
    const Weight& weight_;
    float* const output_;
    const bool accumulate_;
    const int threads_;
    const Inputs<Format> inputs_;
    const int64_t strips_;
};

// output [rows][outputs] (= or +=) x [rows][inputs] times the weight, plus the bias.
inline void linear(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads) {
    switch (static_cast<Stored>(weight.stored)) {
        case Stored::float32: return Product<Float32Weight>(x, rows, weight, output, accumulate, threads).run();
        case Stored::bfloat16: return Product<Bfloat16Weight>(x, rows, weight, output, accumulate, threads).run();
        case Stored::rounding: return Product<RoundingWeight>(x, rows, weight, output, accumulate, threads).run();
        case Stored::int8: return Product<Int8Weight>(x, rows, weight, output, accumulate, threads).run();
    }
}

}  // namespace baton
