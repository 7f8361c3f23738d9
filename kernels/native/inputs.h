// Inputs of a product as its tiles read them: a few rows of nearly equal number each, transposed, in words of 32 bits.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "formats.h"
#include "pairs.h"
#include "threads.h"

namespace baton {

// The first `taller` tiles have a row more than the others, of which each has `height`.
struct Tiles {
    const int64_t count, height, taller;

    explicit Tiles(int64_t rows)
        : count((rows + MOST_ROWS - 1) / MOST_ROWS), height(rows / count), taller(rows % count) {}
    int64_t first_row(int64_t tile) const { return tile * height + std::min(tile, taller); }
    int64_t rows(int64_t tile) const { return height + (tile < taller); }
};

// What becomes of each number: a float as it is or rounded to bfloat16, two of bfloat16 in a word, or four bytes with
// Int8Weight's offset added, which stand for -127 to 127 times a scale per row.
enum class Words { floats, rounded, pairs, bytes };

inline Ints to_bytes(const float* x, float inverse) {
    alignas(VECTOR_BYTES) uint8_t bytes[LANES * 4];
    for (int part = 0; part < 4; ++part) {
        // Near 1.5 * 2^23 floats are integers, and the low bits are what was added.
        const Ints bits = as_ints(load(x + part * LANES) * inverse + (12582912.0f + Int8Weight::INPUT_OFFSET));
        const Bytes low = __builtin_convertvector(bits & 0xff, Bytes);
        std::memcpy(bytes + part * LANES, &low, sizeof low);
    }
    return load_bits(bytes);
}

// Of a row that is not finite NaN, so that it stays so.
inline float scale_of(const float* x, int64_t inputs) {
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

// `[tile][word][row]`, zeros after the last input. Its memory is the thread's: one at a time in each.
class Inputs {
   public:
    const Tiles tiles;
    const int64_t words;  // of a row

    Inputs(const float* x, int64_t rows, int64_t inputs, Words kind, int64_t padded_inputs, int64_t group_inputs,
           int threads)
        : tiles(rows), words(padded_inputs / inputs_of(kind)), x_(x), inputs_(inputs),
          groups_(group_inputs ? inputs / group_inputs : 0), kind_(kind) {
        if (kind == Words::bytes) scales_.resize(rows);
        if (groups_) group_sums_.resize(rows * groups_);
        if (rows == 1 && kind == Words::floats && words == inputs) {
            packed_ = reinterpret_cast<const uint32_t*>(x);
        } else {
            // Kept from call to call, since the system hands out fresh memory page by page, which takes long.
            static thread_local std::vector<uint32_t> kept;
            if (static_cast<int64_t>(kept.size()) < rows * words + LANES) kept.resize(rows * words + LANES);
            packed_ = kept.data();
            share(tiles.count, rows * inputs < WORTH_SHARING ? 1 : threads,
                  [&, to = kept.data()](int64_t tile) { pack(tile, to); });
        }
        for (int64_t row = 0; groups_ && row < rows; ++row) add_up(row, group_inputs);
    }

    const uint32_t* tile(int64_t index) const { return packed_ + tiles.first_row(index) * words; }
    float scale(int64_t row) const { return scales_[row]; }
    float group_sum(int64_t row, int64_t group) const { return group_sums_[row * groups_ + group]; }

   private:
    static constexpr int64_t WORTH_SHARING = 1 << 15;

    static int64_t inputs_of(Words kind) { return kind == Words::pairs ? 2 : kind == Words::bytes ? 4 : 1; }

    void pack(int64_t tile, uint32_t* packed) {
        const int64_t first = tiles.first_row(tile), rows = tiles.rows(tile);
        uint32_t* to = packed + first * words;
        float inverse[MOST_ROWS] = {};
        for (int64_t row = 0; row < rows && kind_ == Words::bytes; ++row)
            inverse[row] = 1 / (scales_[first + row] = scale_of(x_ + (first + row) * inputs_, inputs_));
        for (int64_t word = 0; word < words; word += LANES) {
            Floats lanes[LANES] = {};
            for (int64_t row = 0; row < rows; ++row) lanes[row] = as_floats(converted(first + row, word, inverse[row]));
            const int64_t count = std::min<int64_t>(LANES, words - word);
            if (rows == 1) {
                std::memcpy(to + word, lanes, count * sizeof *to);
                continue;
            }
            transpose(lanes);
            // Each write goes past its rows, over what the next one puts there; only the tile's last ones must not.
            const int64_t roomy = word + LANES < words ? count : 0;
            for (int64_t n = 0; n < roomy; ++n) store(reinterpret_cast<float*>(to + (word + n) * rows), lanes[n]);
            for (int64_t n = roomy; n < count; ++n) std::memcpy(to + (word + n) * rows, &lanes[n], rows * sizeof *to);
        }
    }

    // Words [word, word + LANES) of a row.
    Ints converted(int64_t row, int64_t word, float inverse) const {
        const int64_t width = inputs_of(kind_), first = word * width;
        const float* from = x_ + row * inputs_ + first;
        float padded[LANES * 4] = {};
        if (first + LANES * width > inputs_) {
            std::copy_n(from, std::max<int64_t>(inputs_ - first, 0), padded);
            from = padded;
        }
        switch (kind_) {
            case Words::floats: return load_bits(from);
            case Words::rounded: return rounded_bits(load(from));
#if defined(BATON_BF16_PRODUCTS)
            case Words::pairs: return to_words(load(from), load(from + LANES));
#endif
            default: return to_bytes(from, inverse);
        }
    }

    void add_up(int64_t row, int64_t group_inputs) {
        const float* from = x_ + row * inputs_;
        float* to = group_sums_.data() + row * groups_;
        for (int64_t group = 0; group < groups_; ++group) {
            float sum = 0;
            for (int64_t i = 0; i < group_inputs; ++i) sum += *from++;
            to[group] = sum;
        }
    }

    const float* const x_;
    const int64_t inputs_, groups_;
    const Words kind_;
    const uint32_t* packed_;
    std::vector<float> scales_, group_sums_;
};

}  // namespace baton
