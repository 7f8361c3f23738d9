// Attention of a few query rows of one KV head over tiles of tokens kept in bfloat16, by products of pairs: twice the
// arithmetic of floats. Queries and the weights of tokens are rounded to bfloat16; scores, sums and totals are floats.
#pragma once

#include <array>
#include <utility>

#include "attention.h"
#include "pairs.h"

#if defined(BATON_BF16_PRODUCTS)
namespace baton {

// Keys and values of up to TILE tokens. What lies past the last token is zero.
struct PairTile {
    alignas(64) uint32_t keys[MAX_HEAD_DIM / 2 * TILE];    // [head_dim / 2][TILE]: two numbers of a key
    alignas(64) uint32_t values[TILE / 2 * MAX_HEAD_DIM];  // [TILE / 2][head_dim]: a number of two tokens
    int64_t first;  // position
    int tokens;
};

template <Element element>
void fill(PairTile& tile, const HeadRows<element>& keys, const HeadRows<element>& values, int64_t first, int tokens,
          int head_dim) {
    static_assert(element == Element::bfloat16);
    Row key_rows[TILE], value_rows[TILE];
    tile.first = first;
    tile.tokens = tokens;
    keys.find(first, tokens, key_rows, nullptr);
    values.find(first, tokens, value_rows, nullptr);
    for (int token = tokens; token < TILE; ++token) key_rows[token] = value_rows[token] = ZEROS;
    for (int d = 0; d < head_dim; d += 2 * LANES) {
        for (int from = 0; from < TILE; from += LANES) {
            Floats block[LANES];
            for (int token = 0; token < LANES; ++token) block[token] = as_floats(load_bits(key_rows[from + token] + 2 * d));
            transpose(block);
            for (int lane = 0; lane < LANES; ++lane)
                store(reinterpret_cast<float*>(tile.keys) + (d / 2 + lane) * TILE + from, block[lane]);
        }
        for (int token = 0; token < TILE; token += 2) {
            const Interleaved both(load_bits(value_rows[token] + 2 * d), load_bits(value_rows[token + 1] + 2 * d));
            auto* to = reinterpret_cast<Ints*>(tile.values + token / 2 * head_dim + d);
            to[0] = __builtin_shuffle(both.low, both.high, FIRST_OF_BOTH);
            to[1] = __builtin_shuffle(both.low, both.high, SECOND_OF_BOTH);
        }
    }
}

// queries: [rows][words]; scores: [rows][TILE], the first `columns` of each, a multiple of 2 * LANES.
template <int rows>
inline void score_rows(const uint32_t* queries, int words, const uint32_t* keys, int columns, float* scores) {
    for (int column = 0; column < columns; column += 2 * LANES) {
        Floats sums[rows][2] = {};
        for (int d = 0; d < words; ++d) {
            const Ints first = load_bits(keys + d * TILE + column), second = load_bits(keys + d * TILE + column + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const Ints query = Ints{} + static_cast<int32_t>(queries[r * words + d]);
                sums[r][0] = add_pairs(sums[r][0], query, first);
                sums[r][1] = add_pairs(sums[r][1], query, second);
            }
        }
        for (int r = 0; r < rows; ++r) {
            store(scores + r * TILE + column, sums[r][0]);
            store(scores + r * TILE + column + LANES, sums[r][1]);
        }
    }
}

// As weigh() of floats; the weights are rounded and go to `weights`.
inline float weigh(const float* scores, int columns, float& highest, float& total, uint16_t* weights) {
    Floats most = load(scores);
    for (int token = LANES; token < columns; token += LANES) most = larger(load(scores + token), most);
    const float now = std::max(highest, largest_of(most)), base = now == NOTHING ? 0 : now * LOG2_E;
    Floats sum{};
    for (int token = 0; token < columns; token += LANES) {
        const Floats weight = exponential_of_two(load(scores + token) * LOG2_E - base);
        const Shorts rounded = lanes_to_bfloat16(weight);
        std::memcpy(weights + token, &rounded, sizeof rounded);
        sum += weight;
    }
    const float shrink = shrink_of(highest, now);
    total = total * shrink + sum_of(sum);
    highest = now;
    return shrink;
}

// outputs = outputs * shrink + weights @ values. weights: [rows][TILE / 2]; values: [pairs][head_dim].
template <int rows>
inline void add_values(float* outputs, int head_dim, const float* shrink, const uint32_t* weights,
                       const uint32_t* values, int pairs) {
    for (int d = 0; d < head_dim; d += 2 * LANES) {
        Floats sums[rows][2];
        for (int r = 0; r < rows; ++r)
            for (int w = 0; w < 2; ++w) sums[r][w] = load(outputs + r * head_dim + d + w * LANES) * shrink[r];
        for (int pair = 0; pair < pairs; ++pair) {
            const Ints first = load_bits(values + pair * head_dim + d), second = load_bits(values + pair * head_dim + d + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const Ints weight = Ints{} + static_cast<int32_t>(weights[r * TILE / 2 + pair]);
                sums[r][0] = add_pairs(sums[r][0], weight, first);
                sums[r][1] = add_pairs(sums[r][1], weight, second);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int w = 0; w < 2; ++w) store(outputs + r * head_dim + d + w * LANES, sums[r][w]);
    }
}

// queries: those of `all`, as words.
template <int rows>
inline void attend_rows(const Rows& all, const uint32_t* queries, int begin, const PairTile& tile, const Scoring& scoring) {
    alignas(64) float scores[rows * TILE];
    alignas(64) uint32_t weights[rows * TILE / 2];
    float shrink[rows];
    const int head_dim = all.head_dim, words = head_dim / 2;
    const int columns = (tile.tokens + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    score_rows<rows>(queries + begin * words, words, tile.keys, columns, scores);
    for (int r = 0; r < rows; ++r) {
        score(scores + r * TILE, columns, tile.first, tile.tokens, scoring, all.heads[begin + r], all.positions[begin + r]);
        auto* own = reinterpret_cast<uint16_t*>(weights + r * TILE / 2);
        shrink[r] = weigh(scores + r * TILE, columns, all.highest[begin + r], all.totals[begin + r], own);
    }
    add_values<rows>(all.outputs + begin * head_dim, head_dim, shrink, weights, tile.values, (tile.tokens + 1) / 2);
}

constexpr int PAIR_ROWS = 8;  // at once: two sums of each stay in registers

using AttendRows = void (*)(const Rows&, const uint32_t*, int, const PairTile&, const Scoring&);

template <int... less>
constexpr std::array<AttendRows, sizeof...(less)> attends(std::integer_sequence<int, less...>) {
    return {attend_rows<less + 1>...};
}

inline void attend(const Rows& rows, const uint32_t* queries, const PairTile& tile, const Scoring& scoring) {
    constexpr auto BY_COUNT = attends(std::make_integer_sequence<int, PAIR_ROWS>());
    for (int begin = 0; begin < rows.count; begin += PAIR_ROWS)
        BY_COUNT[std::min(PAIR_ROWS, rows.count - begin) - 1](rows, queries, begin, tile, scoring);
}

}  // namespace baton
#endif
