// Attention of a few query rows of one KV head, stretch by stretch. attention.h defines the order of sums.
#pragma once

#include "attention.h"

namespace baton {

// Keys, transposed, and values of at most STRETCH tokens, as unscaled floats, zero-padded.
struct Tile {
    alignas(64) float keys[MAX_HEAD_DIM * STRETCH];  // [head_dim][STRETCH]
    const float* values[STRETCH];                    // for each token: [value_dim]
    float key_scales[STRETCH], value_scales[STRETCH];
    int64_t first;  // position of the first token
    int tokens;
    alignas(64) float copied[STRETCH * MAX_HEAD_DIM];
};

template <Element element>
void fill(Tile& tile, const HeadRows<element>& keys, const HeadRows<element>& values, int64_t first, int tokens,
          int head_dim, int value_dim) {
    Row key_rows[STRETCH], value_rows[STRETCH];
    tile.first = first;
    tile.tokens = tokens;
    keys.find(first, tokens, key_rows, tile.key_scales);
    values.find(first, tokens, value_rows, tile.value_scales);
    for (int token = tokens; token < STRETCH; ++token) {
        key_rows[token] = value_rows[token] = ZEROS;
        tile.key_scales[token] = tile.value_scales[token] = 0;
    }
    const auto numbers = [](Row row, int d) { return load_numbers<element>(row + d * bytes_of(element)); };
    for (int d = 0; d < head_dim; d += LANES) {
        for (int first_row = 0; first_row < STRETCH; first_row += LANES) {
            Floats block[LANES];
            for (int token = 0; token < LANES; ++token) block[token] = numbers(key_rows[first_row + token], d);
            transpose(block);
            for (int lane = 0; lane < LANES; ++lane) store(tile.keys + (d + lane) * STRETCH + first_row, block[lane]);
        }
    }
    for (int token = 0; token < STRETCH; ++token) {
        tile.values[token] = reinterpret_cast<const float*>(value_rows[token]);
        if (element == Element::float32) continue;
        float* copied = tile.copied + token * value_dim;
        for (int d = 0; d < value_dim; d += LANES) store(copied + d, numbers(value_rows[token], d));
        tile.values[token] = copied;
    }
}

// Return the number of scores to compute for a stretch of `tokens` tokens: a multiple of the lanes of two vectors.
constexpr int columns_of(int tokens) { return (tokens + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

// Query rows of one KV head. Row r is at position `positions[r]`, and its state is `attended[r]`.
struct Rows {
    int count, head_dim, value_dim;
    const float* queries;      // [count][head_dim]
    const int64_t* positions;  // [count]
    Attended* attended;        // [count], with adjacent outputs

    int first_that_sees(int64_t position) const {
        return static_cast<int>(std::lower_bound(positions, positions + count, position) - positions);
    }
};

// Call `add(sums, lane)` for every lane, which adds products of `rows` rows and two vectors of tokens. Then sums of
// lanes are added to those of their neighbours, and pairs to pairs, in the order of sums_of(). Sums wait in memory.
template <int rows, class Add, int... lane>
ALWAYS_INLINE void sum_lanes(float scale, float* scores, const Add& add, std::integer_sequence<int, lane...>) {
    Floats waiting[LANES][rows][2], sums[rows][2];
    const auto sum_lane = [&](auto n) {
        for (auto& each : sums) each[0] = each[1] = Floats{};
        add(sums, n.value);
        for (int level = 1; n.value & level; level *= 2) {
            for (int r = 0; r < rows; ++r) {
                sums[r][0] = waiting[level][r][0] + sums[r][0];
                sums[r][1] = waiting[level][r][1] + sums[r][1];
            }
        }
        constexpr int kept = (n.value + 1) & ~n.value;  // number of lanes in the sum
        if (kept < LANES)
            for (int r = 0; r < rows; ++r) waiting[kept][r][0] = sums[r][0], waiting[kept][r][1] = sums[r][1];
    };
    (sum_lane(std::integral_constant<int, lane>()), ...);
    for (int r = 0; r < rows; ++r) {
        store(scores + r * STRETCH, sums[r][0] * scale);
        store(scores + r * STRETCH + LANES, sums[r][1] * scale);
    }
}

using AllLanes = std::make_integer_sequence<int, LANES>;

// Compute the scores of `rows` rows for a tile, [rows][STRETCH]. A template argument lets sums stay in registers.
template <int rows>
inline void score_rows(const float* queries, int head_dim, const Tile& tile, float scale, float* scores) {
    for (int column = 0; column < columns_of(tile.tokens); column += 2 * LANES) {
        const auto add = [&](Floats(&sums)[rows][2], int lane) {
            for (int d = lane; d < head_dim; d += LANES) {
                const float* keys = tile.keys + d * STRETCH + column;
                const Floats first = load(keys), second = load(keys + LANES);
                for (int r = 0; r < rows; ++r) {
                    const float query = queries[r * head_dim + d];
                    sums[r][0] += query * first;
                    sums[r][1] += query * second;
                }
            }
        };
        sum_lanes<rows>(scale, scores + column, add, AllLanes());
    }
}

// outputs = outputs * shrink + weights @ values, for `width` vectors of each of `rows` rows, from number `d` on.
// weights: [rows][STRETCH].
template <int rows, int width>
inline void add_columns(float* outputs, int value_dim, int d, const float* shrink, const float* weights, const Tile& tile) {
    Floats sums[rows][width];
    for (int r = 0; r < rows; ++r)
        for (int w = 0; w < width; ++w) sums[r][w] = load(outputs + r * value_dim + d + w * LANES) * shrink[r];
    for (int token = 0; token < tile.tokens; ++token) {
        for (int w = 0; w < width; ++w) {
            const Floats value = load(tile.values[token] + d + w * LANES);
            for (int r = 0; r < rows; ++r) sums[r][w] += weights[r * STRETCH + token] * value;
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int w = 0; w < width; ++w) store(outputs + r * value_dim + d + w * LANES, sums[r][w]);
}

template <int rows>
inline void add_values(float* outputs, int value_dim, const float* shrink, const float* weights, const Tile& tile) {
    constexpr int WIDE = LANES == 16 && rows <= 4 ? 4 : 2;  // vectors of a row whose sums fit in registers
    int d = 0;
    for (; d + WIDE * LANES <= value_dim; d += WIDE * LANES)
        add_columns<rows, WIDE>(outputs, value_dim, d, shrink, weights, tile);
    for (; d + 2 * LANES <= value_dim; d += 2 * LANES) add_columns<rows, 2>(outputs, value_dim, d, shrink, weights, tile);
    if (d < value_dim) add_columns<rows, 1>(outputs, value_dim, d, shrink, weights, tile);
}

// Apply the softcap to one row's scores of `columns` tokens from position `first` on, and mask invisible tokens.
inline void cap_and_hide(float* scores, int columns, int64_t first, int tokens, const Scoring& scoring, int64_t position) {
    if (scoring.softcap != 0) cap_scores(scores, columns, scoring.softcap);
    const int64_t window = scoring.window;
    if (tokens == STRETCH && first + STRETCH - 1 <= position && (!window || first > position - window)) return;
    const int64_t end = std::clamp<int64_t>(position - first + 1, 0, tokens);  // end of the visible tokens
    const int64_t begin = window ? std::clamp<int64_t>(position + 1 - window - first, 0, STRETCH) : 0;
    for (int token = 0; token < columns; token += LANES) {
        const Ints at = lane_numbers() + token;
        const Ints visible = (at >= static_cast<int32_t>(begin)) & (at < static_cast<int32_t>(end));
        store(scores + token, visible ? load(scores + token) : broadcast(NOTHING));
    }
}

// Turn `columns` scores of one row into weights, and pass each vector of them to `take(token, weights)`. Return the
// factor by which earlier outputs must be multiplied.
template <bool in_pairs, class Take>
inline float weigh(const float* scores, int columns, Attended& row, const Take& take) {
    Floats most = load(scores);
    for (int token = LANES; token < columns; token += LANES) most = larger(load(scores + token), most);
    const float now = larger(broadcast(largest_of(most)), broadcast(row.highest))[0];
    const Floats base = base_of(broadcast(now));
    const float shrink = exponential(row.highest - base)[0];
    Floats sum{};
    for (int token = 0; token < columns; token += LANES) {
        const Floats weights = weights_of<in_pairs>(load(scores + token), base);
        sum += weights;
        take(token, weights);
    }
    row.total = sum_of(sum) + shrink * row.total;
    row.highest = now;
    return shrink;
}

template <bool has_scales, int rows>
inline void attend_rows(const Rows& all, int begin, const Tile& tile, const Scoring& scoring) {
    alignas(64) float scores[rows * STRETCH];
    float shrink[rows];
    const int head_dim = all.head_dim, columns = columns_of(tile.tokens);
    score_rows<rows>(all.queries + begin * head_dim, head_dim, tile, scoring.scale, scores);
    for (int r = 0; r < rows; ++r) {
        float* own = scores + r * STRETCH;
        if constexpr (has_scales)
            for (int token = 0; token < columns; token += LANES)
                store(own + token, load(own + token) * load(tile.key_scales + token));
        cap_and_hide(own, columns, tile.first, tile.tokens, scoring, all.positions[begin + r]);
        shrink[r] = weigh<false>(own, columns, all.attended[begin + r], [&](int token, Floats weights) {
            if constexpr (has_scales) weights *= load(tile.value_scales + token);
            store(own + token, weights);
        });
    }
    add_values<rows>(all.attended[begin].outputs, all.value_dim, shrink, scores, tile);
}

template <bool has_scales>
void attend(const Rows& rows, const Tile& tile, const Scoring& scoring) {
    constexpr int AT_ONCE = LANES == 16 ? 8 : 4;  // rows together: two sums of each, in 32 or 16 registers
    int begin = rows.first_that_sees(tile.first);
    for (; begin + AT_ONCE <= rows.count; begin += AT_ONCE) attend_rows<has_scales, AT_ONCE>(rows, begin, tile, scoring);
    for (; begin + 4 <= rows.count; begin += 4) attend_rows<has_scales, 4>(rows, begin, tile, scoring);
    for (; begin < rows.count; ++begin) attend_rows<has_scales, 1>(rows, begin, tile, scoring);
}

}  // namespace baton
