// Attention of a few query rows of one KV head over tiles of tokens, with a running softmax. No division of labour.
#pragma once

#include <algorithm>
#include <limits>

#include "pages.h"

namespace baton {

constexpr int TILE = 64;  // tokens: the more, the fewer maxima and sums per token
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// What turns a product of query and key into a score. `softcap` and `slopes` may be absent (0, null).
struct Scoring {
    float scale;
    float softcap;
    const float* slopes;  // [heads], ALiBi
    int64_t window;       // tokens a query sees, itself included; 0: all
};

// Keys transposed, and values, of up to TILE tokens as floats. What lies past the last token is zero.
struct Tile {
    alignas(64) float keys[MAX_HEAD_DIM * TILE];  // [head_dim][TILE]
    const float* values[TILE];                    // of each token, [head_dim]
    int64_t first;  // position
    int tokens;
    alignas(64) float copied[TILE * MAX_HEAD_DIM];
};

template <Element element>
void fill(Tile& tile, const HeadRows<element>& keys, const HeadRows<element>& values, int64_t first, int tokens,
          int head_dim) {
    Row key_rows[TILE], value_rows[TILE];
    float key_scales[TILE], value_scales[TILE];
    tile.first = first;
    tile.tokens = tokens;
    keys.find(first, tokens, key_rows, key_scales);
    values.find(first, tokens, value_rows, value_scales);
    for (int token = tokens; token < TILE; ++token) {
        key_rows[token] = value_rows[token] = ZEROS;
        key_scales[token] = value_scales[token] = 0;
    }
    const auto numbers = [](Row row, float scale, int d) {
        const Floats stored = load_numbers<element>(row + d * bytes_of(element));
        return is_scaled(element) ? stored * scale : stored;
    };
    for (int d = 0; d < head_dim; d += LANES) {
        for (int first_row = 0; first_row < TILE; first_row += LANES) {
            Floats block[LANES];
            for (int token = 0; token < LANES; ++token)
                block[token] = numbers(key_rows[first_row + token], key_scales[first_row + token], d);
            transpose(block);
            for (int lane = 0; lane < LANES; ++lane) store(tile.keys + (d + lane) * TILE + first_row, block[lane]);
        }
    }
    for (int token = 0; token < TILE; ++token) {
        tile.values[token] = reinterpret_cast<const float*>(value_rows[token]);
        if (element == Element::float32) continue;
        float* copied = tile.copied + token * head_dim;
        for (int d = 0; d < head_dim; d += LANES) store(copied + d, numbers(value_rows[token], value_scales[token], d));
        tile.values[token] = copied;
    }
}

// Query rows of one KV head. Row r is head `heads[r]` at position `positions[r]`.
struct Rows {
    int count, head_dim;
    const float* queries;      // [count][head_dim], scaled
    const int64_t* positions;  // [count]
    const int32_t* heads;      // [count]
    float* outputs;            // [count][head_dim], not yet divided by `totals`
    float* highest;            // [count]
    float* totals;             // [count]
};

// Scores of `rows` rows (a template argument, so that the sums stay in registers) against a tile: [rows][TILE].
// Only the first `columns` of each, a multiple of 2 * LANES.
template <int rows>
inline void score_rows(const float* queries, int head_dim, const float* keys, int columns, float* scores) {
    for (int column = 0; column < columns; column += 2 * LANES) {
        Floats sums[rows][2] = {};
        for (int d = 0; d < head_dim; ++d) {
            const Floats first = load(keys + d * TILE + column), second = load(keys + d * TILE + column + LANES);
            for (int r = 0; r < rows; ++r) {
                const float query = queries[r * head_dim + d];
                sums[r][0] += query * first;
                sums[r][1] += query * second;
            }
        }
        for (int r = 0; r < rows; ++r) {
            store(scores + r * TILE + column, sums[r][0]);
            store(scores + r * TILE + column + LANES, sums[r][1]);
        }
    }
}

// outputs = outputs * shrink + weights @ values, for `rows` rows and `width` vectors of each from `d` on.
// weights: [rows][tile]; values: of each of `tokens` tokens, [head_dim].
template <int rows, int width, int tile>
inline void add_columns(float* outputs, int stride, int d, const float* shrink, const float* weights,
                        const float* const* values, int tokens) {
    Floats sums[rows][width];
    for (int r = 0; r < rows; ++r)
        for (int w = 0; w < width; ++w) sums[r][w] = load(outputs + r * stride + d + w * LANES) * shrink[r];
    for (int token = 0; token < tokens; ++token) {
        for (int w = 0; w < width; ++w) {
            const Floats value = load(values[token] + d + w * LANES);
            for (int r = 0; r < rows; ++r) sums[r][w] += weights[r * tile + token] * value;
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int w = 0; w < width; ++w) store(outputs + r * stride + d + w * LANES, sums[r][w]);
}

template <int rows, int tile>
inline void add_values(float* outputs, int stride, int head_dim, const float* shrink, const float* weights,
                       const float* const* values, int tokens) {
    constexpr int WIDE = LANES == 16 && rows <= 4 ? 4 : 2;  // as many sums as there are registers
    int d = 0;
    for (; d + WIDE * LANES <= head_dim; d += WIDE * LANES)
        add_columns<rows, WIDE, tile>(outputs, stride, d, shrink, weights, values, tokens);
    for (; d + 2 * LANES <= head_dim; d += 2 * LANES)
        add_columns<rows, 2, tile>(outputs, stride, d, shrink, weights, values, tokens);
    if (d < head_dim) add_columns<rows, 1, tile>(outputs, stride, d, shrink, weights, values, tokens);
}

inline void adjust(float* scores, int tokens, const Scoring& scoring, int32_t head, int64_t distance) {
    for (int token = 0; token < tokens; ++token) {
        float score = scores[token];
        if (scoring.softcap != 0) score = scoring.softcap * std::tanh(score / scoring.softcap);
        if (scoring.slopes) score -= scoring.slopes[head] * static_cast<float>(distance - token);
        scores[token] = score;
    }
}

// Whether a query at `position` sees every token of a whole tile.
inline bool sees_all(int64_t first, int tokens, const Scoring& scoring, int64_t position) {
    return tokens == TILE && first + TILE - 1 <= position && (!scoring.window || first > position - scoring.window);
}

inline void hide(float* scores, int columns, int64_t first, int tokens, const Scoring& scoring, int64_t position) {
    const int64_t end = std::clamp<int64_t>(position - first + 1, 0, tokens);  // of the visible tokens
    const int64_t begin = scoring.window ? std::clamp<int64_t>(position + 1 - scoring.window - first, 0, TILE) : 0;
    for (int token = 0; token < columns; token += LANES) {
        const Ints at = lane_numbers() + token;
        const Ints visible = (at >= static_cast<int32_t>(begin)) & (at < static_cast<int32_t>(end));
        store(scores + token, visible ? load(scores + token) : broadcast(NOTHING));
    }
}

// Turns products of a row at `position` with a tile's keys into scores.
inline void score(float* products, int columns, int64_t first, int tokens, const Scoring& scoring, int32_t head,
                  int64_t position) {
    if (scoring.softcap != 0 || scoring.slopes) adjust(products, columns, scoring, head, position - first);
    if (!sees_all(first, tokens, scoring, position)) hide(products, columns, first, tokens, scoring, position);
}

// What earlier outputs are multiplied by where the highest score rises.
inline float shrink_of(float highest, float now) {
    return highest == NOTHING ? 0 : highest == now ? 1 : std::exp(highest - now);
}

// Turns the scores of one row, so many of them, a multiple of LANES, into weights; returns what earlier outputs are to be multiplied by.
inline float weigh(float* scores, int tokens, float& highest, float& total) {
    Floats most = load(scores), sum = load(scores);
    for (int token = LANES; token < tokens; token += LANES) {
        most = larger(most, load(scores + token));
        sum += load(scores + token);
    }
    const float now = std::max(highest, largest_of(most));
    if (now == NOTHING && !std::isnan(sum_of(sum))) {  // nothing visible so far
        std::fill_n(scores, tokens, 0.0f);
        return 1;
    }
    sum = Floats{};
    for (int token = 0; token < tokens; token += LANES) {
        const Floats weight = exponential(load(scores + token) - now);
        store(scores + token, weight);
        sum += weight;
    }
    const float shrink = shrink_of(highest, now);
    total = total * shrink + sum_of(sum);
    highest = now;
    return shrink;
}

template <int rows>
inline void attend_rows(const Rows& all, int begin, const Tile& tile, const Scoring& scoring) {
    alignas(64) float scores[rows * TILE];
    float shrink[rows];
    const int head_dim = all.head_dim;
    const int columns = (tile.tokens + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    score_rows<rows>(all.queries + begin * head_dim, head_dim, tile.keys, columns, scores);
    for (int r = 0; r < rows; ++r) {
        score(scores + r * TILE, columns, tile.first, tile.tokens, scoring, all.heads[begin + r], all.positions[begin + r]);
        shrink[r] = weigh(scores + r * TILE, columns, all.highest[begin + r], all.totals[begin + r]);
    }
    add_values<rows, TILE>(all.outputs + begin * head_dim, head_dim, head_dim, shrink, scores, tile.values, tile.tokens);
}

inline void attend(const Rows& rows, const Tile& tile, const Scoring& scoring) {
    constexpr int AT_ONCE = LANES == 16 ? 8 : 4;  // two sums of each, in 32 registers or 16
    int begin = 0;
    for (; begin + AT_ONCE <= rows.count; begin += AT_ONCE) attend_rows<AT_ONCE>(rows, begin, tile, scoring);
    for (; begin + 4 <= rows.count; begin += 4) attend_rows<4>(rows, begin, tile, scoring);
    for (; begin < rows.count; ++begin) attend_rows<1>(rows, begin, tile, scoring);
}

}  // namespace baton
