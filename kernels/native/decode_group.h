// Running softmax of the queries of one token for one KV head, over stretches of its keys and values.
#pragma once

#include "attention.h"
#include "pairs.h"

namespace baton {

constexpr int MOST_QUERIES = LANES == 4 ? 4 : 8;

// Keys or values of at most STRETCH tokens, padded with ZEROS as rows and 0 as scales.
struct Stretch {
    Row rows[STRETCH];
    alignas(64) float scales[STRETCH + LANES];
    int tokens, hidden;  // `hidden`: number of leading tokens before the window
};

// State of the softmax of several queries.
struct Running {
    const float* queries;  // [queries][head_dim]
    float* outputs;        // [queries][value_dim], not yet divided by `totals`
    float* highest;        // [queries + LANES]
    float* totals;         // [queries + LANES]
    int head_dim, value_dim;
};

constexpr int power_of_two(int at_least) { return at_least <= 1 ? 1 : 2 * power_of_two((at_least + 1) / 2); }

// Scores of a stretch, and operations on them that all formats share. The order is that in which scores are summed:
// for every TOKENS tokens, LANES numbers, query by query.
template <int queries>
class DecodeScores {
   public:
    DecodeScores(const Running& running, const Scoring& scoring) : running_(running), scoring_(scoring) {}

   protected:
    static constexpr int TOKENS = LANES / power_of_two(queries);
    static constexpr int TURN = LANES / TOKENS;  // number of steps whose weights are added to separate sums

    // Apply the softcap, and mask tokens before the window and after the last one.
    void cap_and_hide(const Stretch& keys, int steps) {
        if (scoring_.softcap != 0) cap_scores(scores_, steps * LANES, scoring_.softcap);
        const auto hide_one = [&](int token) {
            for (int q = 0; q < queries; ++q) scores_[token / TOKENS * LANES + q * TOKENS + token % TOKENS] = NOTHING;
        };
        for (int token = 0; token < keys.hidden; ++token) hide_one(token);
        for (int token = keys.tokens; token < steps * TOKENS; ++token) hide_one(token);
    }

    // Turn scores into weights, and store the factors by which earlier outputs must be multiplied in `shrink_`.
    template <bool has_scales, bool in_pairs>
    void weigh(const Stretch& values, int steps) {
        Floats most = load(scores_);
        for (int step = 1; step < steps; ++step) most = larger(load(scores_ + step * LANES), most);
        const Floats before = spread<TOKENS>(running_.highest);
        const Floats now = larger(combine_groups<TOKENS>(most, larger), before);
        const Floats base = base_of(now), shrink = exponential(before - base);
        Floats sums[TURN] = {};
        const auto weigh_one = [&](int step, Floats& sum) {
            Floats weights = weights_of<in_pairs>(load(scores_ + step * LANES), base);
            sum += weights;
            if constexpr (has_scales) weights *= repeated<TOKENS>(values.scales + step * TOKENS);
            if constexpr (in_pairs) {  // bfloat16 weights replace the first half of the scores
                const Shorts rounded = lanes_to_bfloat16(weights);
                std::memcpy(scores_ + step * LANES, &rounded, sizeof rounded);
            } else {
                store(scores_ + step * LANES, weights);
            }
        };
        int step = 0;
        for (; step + TURN <= steps; step += TURN)
#pragma GCC unroll 8
            for (int n = 0; n < TURN; ++n) weigh_one(step + n, sums[n]);
        for (int n = 0; step + n < steps; ++n) weigh_one(step + n, sums[n]);
        const auto add = [](Floats a, Floats b) { return a + b; };
        for (Floats& each : sums) each = combine_groups<TOKENS>(each, add);
        for (int distance = 1; distance < TURN; distance *= 2)
            for (int n = 0; n < TURN; n += 2 * distance) sums[n] = sums[n] + sums[n + distance];
        const Floats sum = sums[0] + shrink * spread<TOKENS>(running_.totals);
        for (int q = 0; q < queries; ++q) {
            running_.highest[q] = now[q * TOKENS];
            running_.totals[q] = sum[q * TOKENS];
            shrink_[q] = shrink[q * TOKENS];
        }
    }

    const Running running_;
    const Scoring& scoring_;
    float shrink_[queries];
    alignas(64) float scores_[STRETCH / TOKENS * LANES];
};

template <Element element, int queries>
class DecodeGroup : DecodeScores<queries> {
   public:
    using DecodeScores<queries>::DecodeScores;

    // Add a stretch. `ahead`: rows that are needed next; prefetched, since the processor cannot predict their
    // addresses.
    void attend(const Stretch& keys, const Stretch& values, const Stretch& ahead) {
        const int steps = (keys.tokens + TOKENS - 1) / TOKENS;
#if defined(BATON_BF16_PRODUCTS)
        if constexpr (element == Element::bfloat16)
            if (running_.head_dim % (2 * LANES) == 0 && running_.value_dim % (2 * LANES) == 0)
                return attend_pairs(keys, values, ahead, steps);
#endif
        score(keys, steps, values);
        this->cap_and_hide(keys, steps);
        this->template weigh<is_scaled(element), false>(values, steps);
        const int value_dim = running_.value_dim;
        int d = 0;
        for (; d + WIDE * LANES <= value_dim; d += WIDE * LANES) add_columns<WIDE>(d, steps, values, ahead);
        for (; d + 2 * LANES <= value_dim; d += 2 * LANES) add_columns<2>(d, steps, values, ahead);
        if (d < value_dim) add_columns<1>(d, steps, values, ahead);
    }

   private:
    using Scores = DecodeScores<queries>;
    using Scores::TOKENS, Scores::running_, Scores::scores_, Scores::scoring_, Scores::shrink_;

    static constexpr int WIDE = LANES == 16 && queries <= 4 ? 4 : 2;  // vectors of a row whose sums fit in registers

    static void prefetch(Row row, int first_byte, int end_byte) {
        for (int byte = first_byte; byte < end_byte; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }

    void score(const Stretch& keys, int steps, const Stretch& ahead) {
        const int head_dim = running_.head_dim, row_bytes = head_dim * static_cast<int>(bytes_of(element));
        for (int step = 0; step < steps; ++step) {
            const Row* rows = keys.rows + step * TOKENS;
            Floats sums[queries * TOKENS] = {};
            for (int d = 0; d < head_dim; d += LANES) {
                Floats query[queries];
                for (int q = 0; q < queries; ++q) query[q] = load(running_.queries + q * head_dim + d);
#pragma GCC unroll 16
                for (int token = 0; token < TOKENS; ++token) {
                    const Floats key = load_numbers<element>(rows[token] + d * bytes_of(element));
#pragma GCC unroll 8
                    for (int q = 0; q < queries; ++q) sums[q * TOKENS + token] += query[q] * key;
                }
            }
            for (int token = 0; token < TOKENS; ++token) prefetch(ahead.rows[step * TOKENS + token], 0, row_bytes);
            Floats scores = sums_of<queries * TOKENS>(sums) * scoring_.scale;
            if constexpr (is_scaled(element)) scores *= repeated<TOKENS>(keys.scales + step * TOKENS);
            store(scores_ + step * LANES, scores);
        }
    }

    template <int width>
    void add_columns(int d, int steps, const Stretch& values, const Stretch& ahead) {
        constexpr int bytes = static_cast<int>(bytes_of(element));
        const int value_dim = running_.value_dim;
        Floats sums[queries][width];
        for (int q = 0; q < queries; ++q)
            for (int w = 0; w < width; ++w) sums[q][w] = load(running_.outputs + q * value_dim + d + w * LANES) * shrink_[q];
        const int64_t first_byte = d * bytes;
        for (int step = 0; step < steps; ++step) {  // after the last token weights are 0 and values ZEROS
            const float* weights = scores_ + step * LANES;
            const Row *rows = values.rows + step * TOKENS, *next = ahead.rows + step * TOKENS;
#pragma GCC unroll 4
            for (int token = 0; token < TOKENS; ++token) {
                const Row row = rows[token] + first_byte;
                Floats value[width];
                for (int w = 0; w < width; ++w) value[w] = load_numbers<element>(row + w * LANES * bytes);
#pragma GCC unroll 8
                for (int q = 0; q < queries; ++q)
                    for (int w = 0; w < width; ++w) sums[q][w] += weights[q * TOKENS + token] * value[w];
                for (int byte = 0; byte < width * LANES * bytes; byte += 64) __builtin_prefetch(next[token] + first_byte + byte, 0, 2);
            }
        }
        for (int q = 0; q < queries; ++q)
            for (int w = 0; w < width; ++w) store(running_.outputs + q * value_dim + d + w * LANES, sums[q][w]);
    }

#if defined(BATON_BF16_PRODUCTS)
    // Add a stretch by products of pairs of bfloat16 numbers, with queries and weights rounded to bfloat16.
    void attend_pairs(const Stretch& keys, const Stretch& values, const Stretch& ahead, int steps) {
        score_pairs(keys, steps, values);
        this->cap_and_hide(keys, steps);
        this->template weigh<false, true>(values, steps);
        constexpr int most = queries <= 4 ? 2 : 1;  // pairs of sums per query that stay in registers
        const int value_dim = running_.value_dim;
        int d = 0;
        for (; d + most * 2 * LANES <= value_dim; d += most * 2 * LANES) add_pair_columns<most>(d, steps, values, ahead);
        for (; d < value_dim; d += 2 * LANES) add_pair_columns<1>(d, steps, values, ahead);
    }

    void score_pairs(const Stretch& keys, int steps, const Stretch& ahead) {
        const int head_dim = running_.head_dim;
        for (int step = 0; step < steps; ++step) {
            const Row* rows = keys.rows + step * TOKENS;
            Floats sums[queries * TOKENS] = {};
            for (int d = 0; d < head_dim; d += 2 * LANES) {
                Ints query[queries];
                for (int q = 0; q < queries; ++q) {
                    const float* from = running_.queries + q * head_dim + d;
                    query[q] = to_words(load(from), load(from + LANES));
                }
#pragma GCC unroll 16
                for (int token = 0; token < TOKENS; ++token) {
                    const Ints key = load_bits(rows[token] + 2 * d);
#pragma GCC unroll 8
                    for (int q = 0; q < queries; ++q) sums[q * TOKENS + token] = add_pairs(sums[q * TOKENS + token], query[q], key);
                }
            }
            for (int token = 0; token < TOKENS; ++token) prefetch(ahead.rows[step * TOKENS + token], 0, 2 * head_dim);
            store(scores_ + step * LANES, sums_of<queries * TOKENS>(sums) * scoring_.scale);
        }
    }

    // Sums stay in the order of `Interleaved` until the end, when they are stored.
    template <int width>
    void add_pair_columns(int d, int steps, const Stretch& values, const Stretch& ahead) {
        const int value_dim = running_.value_dim;
        Floats sums[queries][width][2];
        for (int q = 0; q < queries; ++q) {
            for (int w = 0; w < width; ++w) {
                const float* from = running_.outputs + q * value_dim + d + w * 2 * LANES;
                const Floats first = load(from), second = load(from + LANES);
                sums[q][w][0] = __builtin_shuffle(first, second, LOWS) * shrink_[q];
                sums[q][w][1] = __builtin_shuffle(first, second, HIGHS) * shrink_[q];
            }
        }
        for (int step = 0; step < steps; ++step) {  // after the last token weights are 0 and values ZEROS
            const auto* weights = reinterpret_cast<const int32_t*>(scores_ + step * LANES);
            const Row *rows = values.rows + step * TOKENS, *next = ahead.rows + step * TOKENS;
#pragma GCC unroll 4
            for (int token = 0; token < TOKENS; token += 2) {
#pragma GCC unroll 2
                for (int w = 0; w < width; ++w) {
                    const int byte = 2 * (d + w * 2 * LANES);
                    const Interleaved both(load_bits(rows[token] + byte), load_bits(rows[token + 1] + byte));
#pragma GCC unroll 8
                    for (int q = 0; q < queries; ++q) {
                        const Ints weight = Ints{} + weights[(q * TOKENS + token) / 2];
                        sums[q][w][0] = add_pairs(sums[q][w][0], weight, both.low);
                        sums[q][w][1] = add_pairs(sums[q][w][1], weight, both.high);
                    }
                    __builtin_prefetch(next[token] + byte, 0, 2);
                    __builtin_prefetch(next[token + 1] + byte, 0, 2);
                }
            }
        }
        for (int q = 0; q < queries; ++q) {
            for (int w = 0; w < width; ++w) {
                float* to = running_.outputs + q * value_dim + d + w * 2 * LANES;
                store(to, __builtin_shuffle(sums[q][w][0], sums[q][w][1], FIRST_OF_BOTH));
                store(to + LANES, __builtin_shuffle(sums[q][w][0], sums[q][w][1], SECOND_OF_BOTH));
            }
        }
    }
#endif

};

}  // namespace baton
