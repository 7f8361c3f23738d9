// Rows times a packed weight. Each output is one sum over the inputs in their order, whatever the number of rows: a
// row's result depends neither on its neighbours nor on threads.
#include "linear.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "arguments.h"
#include "formats.h"

namespace baton {
namespace {

constexpr int STRIP = 2 * LANES;               // outputs that one tile computes
constexpr int MOST_ROWS = LANES == 16 ? 12 : 6;  // of one tile, even: its sums fill the registers
constexpr int64_t BLOCK_BYTES = 256 << 10;  // of inputs that are read again for every strip: the second-level cache
constexpr int64_t BLOCK_TILES = 16;          // at most
constexpr int64_t BLOCK_STEPS = 144;         // of a strip that all tiles of a block read: the first-level cache

// Adds to the sums of `rows` rows and `strips` strips; x: [steps][rows][n]; columns: where each strip begins.
template <class Format, int rows, int strips>
inline void multiply(const typename Format::Input* x, const typename Format::Number* const* columns, int64_t begin,
                     int64_t end, typename Format::Sum (*total)[strips][2]) {
    constexpr int side = Format::SIDE_BY_SIDE;
    typename Format::Sum sums[rows][strips][2];  // in registers
    for (int r = 0; r < rows; ++r)
        for (int s = 0; s < strips; ++s)
            for (int half = 0; half < 2; ++half) sums[r][s][half] = total[r][s][half];
    for (int64_t step = begin; step < end; ++step) {
        for (int s = 0; s < strips; ++s) {
            const auto* column = columns[s] + step * PANEL * side;
            const typename Format::Part first(column), second(column + LANES * side);
            for (int r = 0; r < rows; ++r) {
                first.add(sums[r][s][0], x + (step * rows + r) * side);
                second.add(sums[r][s][1], x + (step * rows + r) * side);
            }
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int s = 0; s < strips; ++s)
            for (int half = 0; half < 2; ++half) total[r][s][half] = sums[r][s][half];
}

// Rows as tiles read them, `[tile][step][row][n]`, with zeros after the last input and anything after the last row;
// where they are bytes, a scale each. One of a kind at a time per thread.
template <class Format>
struct Inputs {
    using Input = typename Format::Input;

    const int64_t steps, tile_rows;
    const Input* numbers;
    std::vector<float> scales;

    Inputs(const float* x, int64_t rows, int64_t inputs, int64_t tile_rows, int threads)
        : steps((inputs + Format::SIDE_BY_SIDE - 1) / Format::SIDE_BY_SIDE), tile_rows(tile_rows) {
        if constexpr (sizeof(Input) == sizeof(float)) {
            numbers = x;
            if (tile_rows == 1 && steps * Format::SIDE_BY_SIDE == inputs) return;
        }
        // Kept from call to call, since the system hands out fresh memory page by page, which takes long.
        static thread_local std::vector<Input> kept;
        const int64_t wanted = (rows + tile_rows - 1) / tile_rows * tile_rows * steps * Format::SIDE_BY_SIDE;
        if (static_cast<int64_t>(kept.size()) < wanted) kept.resize(wanted);
        Input* held = kept.data();
        numbers = held;
        if (Format::IS_INTEGER) scales.resize(rows);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > MOST_ROWS)
        for (int64_t row = 0; row < rows; ++row) arrange(x + row * inputs, row, inputs, held);
    }

    const Input* tile(int64_t first_row) const { return numbers + first_row * steps * Format::SIDE_BY_SIDE; }

    void arrange(const float* x, int64_t row, int64_t inputs, Input* held) {
        constexpr int side = Format::SIDE_BY_SIDE;
        const int64_t first = row / tile_rows * tile_rows, whole = inputs / side;
        Input* to = held + (first * steps + row - first) * side;
        float inverse = 1;
        if constexpr (Format::IS_INTEGER) inverse = 1 / (scales[row] = scale_of(x, inputs));
        for (int64_t step = 0; step < whole; ++step, x += side, to += tile_rows * side)
            for (int n = 0; n < side; ++n) to[n] = converted(x[n], inverse);
        if (whole == steps) return;
        for (int n = 0; n < side; ++n) to[n] = n < inputs - whole * side ? converted(x[n], inverse) : Input{};
    }

    static Input converted(float value, float inverse) {
        if constexpr (Format::IS_INTEGER) return to_byte(value * inverse);
        if constexpr (sizeof(Input) == 2) return static_cast<Input>(to_bfloat16(value));
        return static_cast<Input>(value);
    }

    // Of a row that is not finite NaN, so that it stays so.
    static float scale_of(const float* x, int64_t inputs) {
        Floats most{}, spoilt{};
        int64_t i = 0;
        for (; i + LANES <= inputs; i += LANES) {
            const Floats value = load(x + i);
            most = larger(most, larger(value, -value));
            spoilt += value * 0.0f;
        }
        float largest = largest_of(most), rest = sum_of(spoilt);
        for (; i < inputs; ++i) {
            largest = std::max(largest, std::fabs(x[i]));
            rest += x[i] * 0.0f;
        }
        return std::max(largest / 127.0f, std::numeric_limits<float>::min()) + rest;
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

    // Rows of a tile: all tiles are about as high, and of few different heights, each of which is compiled by itself.
    static constexpr int64_t even_share(int64_t rows) {
        const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, share = (rows + tiles - 1) / tiles;
        return share == 1 ? 1 : (share + 1) / 2 * 2;
    }

    void run() {
        const int64_t tile_rows = inputs_.tile_rows, at_once = strips_at_once(static_cast<int>(tile_rows));
        const int64_t tile_bytes = tile_rows * inputs_.steps * Format::SIDE_BY_SIDE * static_cast<int64_t>(sizeof(Input));
        const int64_t block_rows = tile_rows * std::clamp<int64_t>(BLOCK_BYTES / tile_bytes, 1, BLOCK_TILES);
        const int64_t groups = (strips_ + at_once - 1) / at_once, blocks = (rows_ + block_rows - 1) / block_rows;
#pragma omp parallel for schedule(static) num_threads(threads_) if (threads_ > 1)
        for (int64_t task = 0; task < groups * blocks; ++task) {
            const int64_t strip = task % groups * at_once, first = task / groups * block_rows;
            dispatch<MOST_ROWS>(first, std::min(rows_, first + block_rows), strip);
        }
    }

   private:
    using Number = typename Format::Number;
    using Input = typename Format::Input;

    // So that a tile has sums enough to keep the processor busy.
    static constexpr int strips_at_once(int rows) { return rows <= MOST_ROWS / 6 ? 4 : rows <= MOST_ROWS / 2 ? 2 : 1; }

    template <int rows>
    void dispatch(int64_t first, int64_t end, int64_t strip) {
        if constexpr (rows > 1) {
            if (inputs_.tile_rows < rows) return dispatch<rows == 2 ? 1 : rows - 2>(first, end, strip);
        }
        block<rows, strips_at_once(rows)>(first, end, strip);
    }

    // Rows [first, end) of some strips, a stretch of inputs at a time. Past the last strip the last one is computed
    // once more.
    template <int rows, int strips>
    void block(int64_t first, int64_t end, int64_t strip) {
        const Number* columns[strips];
        for (int s = 0; s < strips; ++s) {
            const int64_t output = std::min(strip + s, strips_ - 1) * STRIP;
            columns[s] = static_cast<const Number*>(weight_.data) +
                         (output / PANEL * inputs_.steps * PANEL + output % PANEL) * Format::SIDE_BY_SIDE;
        }
        const int64_t tiles = (end - first + rows - 1) / rows, stretch = tiles == 1 ? inputs_.steps : BLOCK_STEPS;
        typename Format::Sum sums[BLOCK_TILES][rows][strips][2];
        std::fill_n(&sums[0][0][0][0], tiles * rows * strips * 2, typename Format::Sum{});
        for (int64_t begin = 0; begin < inputs_.steps; begin += stretch) {
            const int64_t stop = std::min(inputs_.steps, begin + stretch);
            for (int64_t tile = 0; tile < tiles; ++tile)
                multiply<Format, rows, strips>(inputs_.tile(first + tile * rows), columns, begin, stop, sums[tile]);
        }
        for (int64_t row = first; row < end; ++row)
            for (int s = 0; s < strips; ++s)
                for (int half = 0; half < 2; ++half)
                    finish(row, (strip + s) * STRIP + half * LANES, sums[(row - first) / rows][(row - first) % rows][s][half]);
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

}  // namespace

void linear(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads) {
    switch (static_cast<Stored>(weight.stored)) {
        case Stored::float32: return Product<Float32Weight>(x, rows, weight, output, accumulate, threads).run();
        case Stored::bfloat16: return Product<Bfloat16Weight>(x, rows, weight, output, accumulate, threads).run();
        case Stored::rounding: return Product<RoundingWeight>(x, rows, weight, output, accumulate, threads).run();
        case Stored::int8: return Product<Int8Weight>(x, rows, weight, output, accumulate, threads).run();
    }
}

}  // namespace baton

extern "C" void baton_linear(const baton::LinearArguments* asked) {
    baton::linear(asked->x, asked->rows, asked->weight, asked->output, false, asked->threads);
}
