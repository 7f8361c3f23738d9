// Inputs of a product, converted and split into tiles of a few rows. A tile is transposed, in 32-bit words; for AMX
// tile registers it is in row order. All tiles have nearly equally many rows.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "formats.h"
#include "pairs.h"
#include "room.h"
#include "threads.h"
#include "tiled.h"

namespace baton {

// Conversion of inputs. `floats`: unchanged; `rounded`: floats rounded to bfloat16; `pairs`, `tiled`: two bfloat16 per
// word; `integers`: two integers of 16 bits per word, in the order of Int8Weight, times a scale per row; `code_groups`: the
// same with a scale per row and group; `groups`: four bytes of -127 to 127 per word, times a scale per row and group; `bytes`:
// four bytes of 0 to 255 per word, less a zero point and times a scale per row and group.
enum class Words { floats, rounded, pairs, tiled, integers, code_groups, groups, bytes };

constexpr bool has_groups(Words kind) { return kind == Words::groups || kind == Words::bytes || kind == Words::code_groups; }

// Split of rows into tiles. The first `taller` tiles have one row more than the others, which have `height` rows. For
// tile registers all tiles have `height` rows except the last one.
struct Tiles {
    const int64_t total, most, count, height, taller;

    Tiles(int64_t rows, Words kind)
        : total(rows),
          most(kind == Words::tiled ? MOST_TILED_ROWS : MOST_ROWS),
          count((rows + most - 1) / most),
          height(kind == Words::tiled ? most : rows / count),
          taller(kind == Words::tiled ? 0 : rows % count) {}
    int64_t first_row(int64_t tile) const { return std::min(total, tile * height + std::min(tile, taller)); }
    int64_t rows(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
};

// Words before the integers of each row and group. groups: the scale of sums in ZERO_PARTS, and the negated sum of the
// bytes. bytes: the scale, and the zero point. code_groups: the scale, and the sum of the integers times the scale.
constexpr int64_t GROUP_HEAD_WORDS = 2;

// 1.5 * 2^23: adding it to a small float rounds that to an integer, which is in the low bits of the sum.
constexpr float TO_INTEGER = 12582912.0f;

inline Ints to_integers(const float* x, float inverse) {
    return as_ints(load(x) * inverse + TO_INTEGER) - as_ints(broadcast(TO_INTEGER));
}

// Return the words of 2 * LANES inputs: of every four, the first and the third share a word, and the other two.
inline Ints to_pairs(const float* x, float inverse) {
    Ints first{};
    for (int lane = 0; lane < LANES; ++lane) first[lane] = lane / 2 * 4 + lane % 2;
    const Ints a = to_integers(x, inverse), b = to_integers(x + LANES, inverse);
    return (__builtin_shuffle(a, b, first) & 0xffff) | __builtin_shuffle(a, b, first + 2) << 16;
}

inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }

template <typename Combine>
inline int32_t reduce_integers(Ints value, Combine combine) {
    const auto as_integers = [&](Floats a, Floats b) { return as_floats(combine(as_ints(a), as_ints(b))); };
    const float bits = reduce(as_floats(value), as_integers);
    return read_as<int32_t>(&bits);
}

// Return the largest magnitude of a row over `most_integer`; NaN if a number is not finite, so that results are NaN.
inline float scale_of(const float* x, int64_t inputs, float most_integer) {
    // Magnitudes are compared as integers, which have the same order, with non-finite numbers last.
    Ints most{};
    int64_t i = 0;
    for (; i + LANES <= inputs; i += LANES) most = larger(most, load_bits(x + i) & 0x7fffffff);
    int32_t largest = reduce_integers(most, [](Ints a, Ints b) { return larger(a, b); });
    for (; i < inputs; ++i) largest = std::max(largest, read_as<int32_t>(x + i) & 0x7fffffff);
    if (largest >= 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
    return std::max(as_float(largest) / most_integer, std::numeric_limits<float>::min());
}

// Largest integer of a row, and largest sum of magnitudes: 2^24 less room for rounding. Sums of products with integers
// of at most 128 then fit in 32 bits.
constexpr int64_t MOST_INTEGER = 32767, MOST_MAGNITUDES = (1 << 24) - (1 << 17);

// Return the scale of a row's integers. It is larger than that of the largest input if their magnitudes sum to too much.
inline float row_scale(const float* x, int64_t inputs) {
    const float scale = scale_of(x, inputs, MOST_INTEGER), inverse = 1 / scale;
    if (inputs * MOST_INTEGER <= MOST_MAGNITUDES || scale != scale) return scale;
    Ints sums{};
    for (int64_t i = 0; i < inputs; i += LANES) {
        float padded[LANES] = {};
        if (inputs - i < LANES) std::copy_n(x + i, inputs - i, padded);
        const Ints integers = to_integers(inputs - i < LANES ? padded : x + i, inverse);
        sums += larger(integers, -integers);
    }
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    return sum <= MOST_MAGNITUDES ? scale : scale * (static_cast<float>(sum) / MOST_MAGNITUDES);
}

// Quantise one group of a row; write its GROUP_HEAD_WORDS and then its bytes.
inline void quantise_group(const float* x, int64_t inputs, uint32_t* to) {
    const float scale = scale_of(x, inputs, 127), inverse = 1 / scale;
    auto* bytes = reinterpret_cast<uint8_t*>(to + GROUP_HEAD_WORDS);
    Ints sums{};
    for (int64_t i = 0; i < inputs; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, inputs - i);
        float padded[LANES] = {};
        if (count < LANES) std::copy_n(x + i, count, padded);
        const Ints bits = as_ints(load(count < LANES ? padded : x + i) * inverse + TO_INTEGER) & 0xff;
        const Bytes low = __builtin_convertvector(bits, Bytes);
        sums += (bits ^ 0x80) - 0x80;  // a non-finite number is some byte too, so no sum overflows
        if (count < LANES) std::memcpy(bytes + i, &low, count);
        else std::memcpy(bytes + i, &low, sizeof low);
    }
    const int32_t minus = -reduce_integers(sums, [](Ints a, Ints b) { return a + b; });
    const float scale_of_parts = scale / ZERO_PARTS;
    std::memcpy(to, &scale_of_parts, sizeof scale_of_parts);
    std::memcpy(to + 1, &minus, sizeof minus);
}

// Quantise one group of BYTE_INPUTS of a row to unsigned bytes, between its least and its largest number; write its
// GROUP_HEAD_WORDS and then its bytes. One large number leaves the others one bit more than it would with signed bytes.
inline void quantise_bytes(const float* x, int64_t, uint32_t* to) {
#if defined(__AVX512VNNI__)
    constexpr int NAN_OR_INFINITE = 0x99;
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + LANES);
    const bool is_spoilt = _mm512_fpclass_ps_mask(a, NAN_OR_INFINITE) | _mm512_fpclass_ps_mask(b, NAN_OR_INFINITE);
    const float least = std::min(0.0f, _mm512_reduce_min_ps(_mm512_min_ps(a, b)));
    const float most = std::max(0.0f, _mm512_reduce_max_ps(_mm512_max_ps(a, b)));
    // Not 255, since the zero point is rounded too. Halves cannot overflow.
    const float range = (most / 2 - least / 2) / 127, scale = std::max(range, std::numeric_limits<float>::min());
    const __m512 inverse = _mm512_set1_ps(1 / scale);
    const __m512i zero = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_set1_ps(-least), inverse));
    const auto store_bytes = [&](__m512 numbers, uint32_t* words) {
        const __m512i integers = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(numbers, inverse)), zero);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm512_cvtusepi32_epi8(integers));
    };
    const float kept = is_spoilt ? std::numeric_limits<float>::quiet_NaN() : scale;
    std::memcpy(to, &kept, sizeof kept);
    to[1] = static_cast<uint32_t>(_mm512_cvtsi512_si32(zero));
    store_bytes(a, to + GROUP_HEAD_WORDS);
    store_bytes(b, to + GROUP_HEAD_WORDS + LANES / 4);
#endif
}

// Quantise one group of a row to integers of 16 bits; write its GROUP_HEAD_WORDS and then its words.
inline void quantise_code_group(const float* x, int64_t inputs, uint32_t* to) {
    const float scale = scale_of(x, inputs, MOST_INTEGER), inverse = 1 / scale;
    Ints sums{};
    for (int64_t i = 0; i < inputs; i += 2 * LANES) {
        const int64_t count = std::min<int64_t>(2 * LANES, inputs - i);
        float padded[2 * LANES] = {};
        if (count < 2 * LANES) std::copy_n(x + i, count, padded);
        const Ints pairs = to_pairs(count < 2 * LANES ? padded : x + i, inverse);
        sums += ((pairs << 16) >> 16) + (pairs >> 16);
        std::memcpy(to + GROUP_HEAD_WORDS + i / 2, &pairs, count * 2);
    }
    const float sum = scale * static_cast<float>(reduce_integers(sums, [](Ints a, Ints b) { return a + b; }));
    std::memcpy(to, &scale, sizeof scale);
    std::memcpy(to + 1, &sum, sizeof sum);
}

// Converted inputs: `[tile][word][row]`, or for tile registers `[tile][word / TILE_WORDS][row][TILE_WORDS]`;
// zero-padded. They are in memory of the thread, so a thread may have only one `Inputs` at a time.
template <Words kind>
class Inputs {
   public:
    const Tiles tiles;
    const int64_t words;  // number of words of a row

    Inputs(const float* x, int64_t rows, int64_t inputs, int64_t padded_inputs, int64_t group_inputs, int threads)
        : tiles(rows, kind),
          words(has_groups(kind)       ? inputs / group_inputs * (GROUP_HEAD_WORDS + group_inputs / WORD_INPUTS)
                : kind == Words::tiled ? (padded_inputs / 2 + TILE_WORDS - 1) / TILE_WORDS * TILE_WORDS
                                       : padded_inputs / WORD_INPUTS),
          x_(x),
          inputs_(inputs),
          group_inputs_(group_inputs) {
        if (kind == Words::integers) scales_.resize(rows);
        if (rows == 1 && kind == Words::floats && words == inputs) {
            packed_ = reinterpret_cast<const uint32_t*>(x);
        } else {
            static thread_local std::vector<Line> room;
            uint32_t* const to = reserved(room, (rows * words + LANES) / LINE_WORDS + 1)->words;
            packed_ = to;
            share(tiles.count, rows * inputs < WORTH_SHARING ? 1 : threads, [&](int64_t tile) {
                kind == Words::tiled ? pack_tiled(tile, to) : pack(tile, to);
            });
        }
    }

    const uint32_t* tile(int64_t index) const { return packed_ + tiles.first_row(index) * words; }
    float scale(int64_t row) const { return scales_[row]; }

   private:
    static constexpr int64_t WORTH_SHARING = 1 << 15, LINE_WORDS = LINE_BYTES / 4;
    struct alignas(LINE_BYTES) Line {  // rows of tile registers that span two cache lines are read at half speed
        uint32_t words[LINE_WORDS];
    };

    static constexpr int64_t WORD_INPUTS =
        kind == Words::groups || kind == Words::bytes ? 4 : kind == Words::floats || kind == Words::rounded ? 1 : 2;

    void pack_tiled(int64_t tile, uint32_t* packed) const {
        const int64_t first = tiles.first_row(tile), rows = tiles.rows(tile);
        uint32_t* to = packed + first * words;
        for (int64_t word = 0; word < words; word += LANES)
            for (int64_t row = first; row < first + rows; ++row, to += LANES)
                store(reinterpret_cast<float*>(to), as_floats(converted(row, word, 0)));
    }

    void pack(int64_t tile, uint32_t* packed) {
        const int64_t first = tiles.first_row(tile), rows = tiles.rows(tile);
        uint32_t* to = packed + first * words;
        const uint32_t* grouped = has_groups(kind) ? quantise_groups(first, rows, to) : nullptr;
        if (grouped == to) return;
        float inverse[MOST_ROWS] = {};
        for (int64_t row = 0; row < rows && kind == Words::integers; ++row)
            inverse[row] = 1 / (scales_[first + row] = row_scale(x_ + (first + row) * inputs_, inputs_));
        Floats lanes[LANES] = {};
        for (int64_t word = 0; word < words; word += LANES) {
            for (int64_t row = 0; row < rows; ++row)
                lanes[row] = as_floats(grouped ? load_bits(grouped + row * words + word) : converted(first + row, word, inverse[row]));
            const int64_t count = std::min<int64_t>(LANES, words - word);
            if (rows == 1) {
                std::memcpy(to + word, lanes, count * sizeof *to);
                continue;
            }
            transpose(lanes);
            // A write is longer than the rows: the next one overwrites the excess. The tile's last writes must be exact.
            const int64_t roomy = word + LANES < words ? count : 0;
            for (int64_t n = 0; n < roomy; ++n) store(reinterpret_cast<float*>(to + (word + n) * rows), lanes[n]);
            for (int64_t n = roomy; n < count; ++n) std::memcpy(to + (word + n) * rows, &lanes[n], rows * sizeof *to);
        }
    }

    // Quantise rows by groups, and return their words in row order: in `tile` itself if it has a single row.
    const uint32_t* quantise_groups(int64_t first, int64_t rows, uint32_t* tile) const {
        static thread_local std::vector<uint32_t> room;
        uint32_t* const made = rows == 1 ? tile : reserved(room, rows * words + LANES);
        uint32_t* to = made;
        const auto quantise = kind == Words::code_groups ? quantise_code_group : kind == Words::bytes ? quantise_bytes : quantise_group;
        for (int64_t group = 0; group < rows * (inputs_ / group_inputs_); ++group) {
            quantise(x_ + first * inputs_ + group * group_inputs_, group_inputs_, to);
            to += GROUP_HEAD_WORDS + group_inputs_ / WORD_INPUTS;
        }
        return made;
    }

    // Return the converted words [word, word + LANES) of a row.
    Ints converted(int64_t row, int64_t word, float inverse) const {
        const int64_t first = word * WORD_INPUTS, count = inputs_ - first;
        const float* from = x_ + row * inputs_ + first;
        if (count >= LANES * WORD_INPUTS) return words_of(from, inverse);
        float padded[LANES * WORD_INPUTS] = {};
        std::copy_n(from, std::max<int64_t>(count, 0), padded);
        return words_of(padded, inverse);
    }

    // Convert LANES * WORD_INPUTS inputs.
    static Ints words_of(const float* from, float inverse) {
        if constexpr (kind == Words::rounded) return rounded_bits(load(from));
        if constexpr (kind == Words::integers) return to_pairs(from, inverse);
#if defined(BATON_BF16_PRODUCTS)
        if constexpr (kind == Words::pairs || kind == Words::tiled) return to_words(load(from), load(from + LANES));
#endif
        return load_bits(from);
    }

    const float* const x_;
    const int64_t inputs_, group_inputs_;
    const uint32_t* packed_;
    std::vector<float> scales_;
};

}  // namespace baton
