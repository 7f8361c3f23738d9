// Attention of a few query rows of one KV head over tiles of bfloat16 keys and values, by instructions that multiply
// pairs of bfloat16 numbers, twice as fast as floats. Queries and weights of tokens are rounded to bfloat16; scores,
// sums and totals are floats.
#pragma once

#include "attention_rows.h"
#include "pairs.h"

#if defined(BATON_BF16_PRODUCTS)
namespace baton {

// Keys and values of at most STRETCH tokens, zero-padded.
struct PairTile {
    alignas(64) uint32_t keys[MAX_HEAD_DIM / 2 * STRETCH];    // [head_dim / 2][STRETCH], two numbers of a key
    alignas(64) uint32_t values[STRETCH / 2 * MAX_HEAD_DIM];  // [STRETCH / 2][value_dim], a number of two tokens
    int64_t first;  // position of the first token
    int tokens;
};

template <Element element>
void fill(PairTile& tile, const HeadRows<element>& keys, const HeadRows<element>& values, int64_t first, int tokens,
          int head_dim, int value_dim) {
    static_assert(element == Element::bfloat16);
    Row key_rows[STRETCH], value_rows[STRETCH];
    tile.first = first;
    tile.tokens = tokens;
    keys.find(first, tokens, key_rows, nullptr);
    values.find(first, tokens, value_rows, nullptr);
    for (int token = tokens; token < STRETCH; ++token) key_rows[token] = value_rows[token] = ZEROS;
    for (int d = 0; d < head_dim; d += 2 * LANES) {
        for (int from = 0; from < STRETCH; from += LANES) {
            Floats block[LANES];
            for (int token = 0; token < LANES; ++token) block[token] = as_floats(load_bits(key_rows[from + token] + 2 * d));
            transpose(block);
            for (int lane = 0; lane < LANES; ++lane)
                store(reinterpret_cast<float*>(tile.keys) + (d / 2 + lane) * STRETCH + from, block[lane]);
        }
    }
    for (int d = 0; d < value_dim; d += 2 * LANES) {
        for (int token = 0; token < STRETCH; token += 2) {
            const Interleaved both(load_bits(value_rows[token] + 2 * d), load_bits(value_rows[token + 1] + 2 * d));
            auto* to = reinterpret_cast<Ints*>(tile.values + token / 2 * value_dim + d);
            to[0] = __builtin_shuffle(both.low, both.high, FIRST_OF_BOTH);
            to[1] = __builtin_shuffle(both.low, both.high, SECOND_OF_BOTH);
        }
    }
}

// queries: [rows][words]; scores: [rows][STRETCH].
template <int rows>
inline void score_rows(const uint32_t* queries, int words, const PairTile& tile, float scale, float* scores) {
    for (int column = 0; column < columns_of(tile.tokens); column += 2 * LANES) {
        const auto add = [&](Floats(&sums)[rows][2], int lane) {
            for (int d = lane; d < words; d += LANES) {
                const uint32_t* keys = tile.keys + d * STRETCH + column;
                const Ints first = load_bits(keys), second = load_bits(keys + LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) {
                    const Ints query = Ints{} + static_cast<int32_t>(queries[r * words + d]);
                    sums[r][0] = add_pairs(sums[r][0], query, first);
                    sums[r][1] = add_pairs(sums[r][1], query, second);
                }
            }
        };
        sum_lanes<rows>(scale, scores + column, add, AllLanes());
    }
}

// outputs = outputs * shrink + weights @ values. weights: [rows][STRETCH / 2]; values: [pairs][value_dim].
template <int rows>
inline void add_values(float* outputs, int value_dim, const float* shrink, const uint32_t* weights,
                       const uint32_t* values, int pairs) {
    for (int d = 0; d < value_dim; d += 2 * LANES) {
        Floats sums[rows][2];
        for (int r = 0; r < rows; ++r)
            for (int w = 0; w < 2; ++w) sums[r][w] = load(outputs + r * value_dim + d + w * LANES) * shrink[r];
        for (int pair = 0; pair < pairs; ++pair) {
            const Ints first = load_bits(values + pair * value_dim + d), second = load_bits(values + pair * value_dim + d + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const Ints weight = Ints{} + static_cast<int32_t>(weights[r * STRETCH / 2 + pair]);
                sums[r][0] = add_pairs(sums[r][0], weight, first);
                sums[r][1] = add_pairs(sums[r][1], weight, second);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int w = 0; w < 2; ++w) store(outputs + r * value_dim + d + w * LANES, sums[r][w]);
    }
}

// queries: the queries of `all`, as words of two bfloat16 numbers.
template <int rows>
inline void attend_rows(const Rows& all, const uint32_t* queries, int begin, const PairTile& tile, const Scoring& scoring) {
    alignas(64) float scores[rows * STRETCH];
    alignas(64) uint32_t weights[rows * STRETCH / 2];
    float shrink[rows];
    const int head_dim = all.head_dim, words = head_dim / 2, columns = columns_of(tile.tokens);
    score_rows<rows>(queries + begin * words, words, tile, scoring.scale, scores);
    for (int r = 0; r < rows; ++r) {
        float* own = scores + r * STRETCH;
        cap_and_hide(own, columns, tile.first, tile.tokens, scoring, all.positions[begin + r]);
        auto* words_of_row = reinterpret_cast<uint16_t*>(weights + r * STRETCH / 2);
        shrink[r] = weigh<true>(own, columns, all.attended[begin + r], [&](int token, Floats weight) {
            const Shorts rounded = lanes_to_bfloat16(weight);
            std::memcpy(words_of_row + token, &rounded, sizeof rounded);
        });
    }
    add_values<rows>(all.attended[begin].outputs, all.value_dim, shrink, weights, tile.values, (tile.tokens + 1) / 2);
}

constexpr int PAIR_ROWS = 8;  // rows that are computed together: two sums of each stay in registers

using AttendRows = void (*)(const Rows&, const uint32_t*, int, const PairTile&, const Scoring&);

inline void attend(const Rows& rows, const uint32_t* queries, const PairTile& tile, const Scoring& scoring) {
    constexpr auto BY_COUNT = table<PAIR_ROWS>([](auto less) -> AttendRows { return attend_rows<less.value + 1>; });
    for (int begin = rows.first_that_sees(tile.first); begin < rows.count; begin += PAIR_ROWS)
        BY_COUNT[std::min(PAIR_ROWS, rows.count - begin) - 1](rows, queries, begin, tile, scoring);
}

}  // namespace baton
#endif
