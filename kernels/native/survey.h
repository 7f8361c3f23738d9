// Statistics of a row: its largest number, the index of that, and the log of the sum of exponentials.
#pragma once

#include <algorithm>
#include <limits>

#include "vector.h"

namespace baton {

constexpr int64_t BLOCK = 1024;  // numbers processed together

struct Survey {
    float most;
    int64_t best;  // index of the largest number, the first of several
    double total;  // sum of e^(number - most)
    bool finite;   // whether all numbers are finite

    // Return the log of the sum of e^number.
    float log_total() const { return static_cast<float>(most + std::log(total)); }
};

struct BlockSurvey {
    float most;
    bool finite;
};

inline BlockSurvey survey_block(const float* x, int64_t size) {
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    Floats most[4], spoilt[4] = {};
    for (Floats& each : most) each = broadcast(nothing);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        for (int part = 0; part < 4; ++part) {
            const Floats value = load(x + i + part * LANES);
            most[part] = larger(value, most[part]);
            spoilt[part] += value * 0.0f;
        }
    }
    float largest = largest_of(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    float rest = sum_of(spoilt[0] + spoilt[1] + spoilt[2] + spoilt[3]);
    for (; i < size; ++i) {
        largest = x[i] > largest ? x[i] : largest;
        rest += x[i] * 0.0f;
    }
    return {largest, rest == 0};
}

// Compute e^((x - most) * inverse) vector by vector, and call `take` with the index and value of each. Lanes after the
// last number are 0.
template <typename Take>
inline void exponentials(const float* x, int64_t size, float most, float inverse, Take take) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) take(i, exponential((load(x + i) - most) * inverse));
    if (i == size) return;
    alignas(64) float part[LANES];
    std::fill_n(part, LANES, -std::numeric_limits<float>::infinity());
    std::copy(x + i, x + size, part);
    take(i, exponential((load(part) - most) * inverse));
}

inline Survey survey(const float* x, int64_t size) {
    Survey found = {-std::numeric_limits<float>::infinity(), 0, 0, true};
    int64_t block_of_best = 0;
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const BlockSurvey block = survey_block(x + begin, std::min(BLOCK, size - begin));
        found.finite &= block.finite;
        if (block.most > found.most) {
            found.most = block.most;
            block_of_best = begin;
        }
    }
    found.best = std::find(x + block_of_best, x + size, found.most) - x;
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        Floats sum{};
        exponentials(x + begin, std::min(BLOCK, size - begin), found.most, 1, [&](int64_t, Floats part) { sum += part; });
        found.total += sum_of(sum);
    }
    return found;
}

}  // namespace baton
