// Innermost loop of a product of very few rows, which waits for memory. Several strips are read together, since a
// processor reads several streams of addresses further ahead than one. Sums have the same order as in `multiply`.
#pragma once

#include "multiply.h"

namespace baton {

constexpr int MOST_STREAMS = 4;
constexpr int MOST_STREAMED_ROWS = 4, MOST_STREAMED_GROUPED_ROWS = LANES == 16 ? 4 : 3;
constexpr int64_t STREAM_AHEAD_BYTES = 1536;

// Multiply `rows` rows by `strips` strips. columns: [strips], pointers to numbers `[steps][stride]`; x:
// [steps * PARTS][rows]; total: [strips][rows][2].
template <class Format, int rows, int stride, int strips>
void stream(const uint32_t* x, const void* const* columns, int64_t steps, void* total) {
    using Sum = typename Format::Sum;
    const typename Format::Number* column[strips];
    Sum sums[strips][rows][2] = {};  // in registers
    for (int s = 0; s < strips; ++s) column[s] = static_cast<const typename Format::Number*>(columns[s]);
    const auto use = [&](const Format& first, const Format& second, int s, const uint32_t* words, auto n) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const auto given = Format::given(words + n.value * rows + r);
            Format::add(sums[s][r][0], given, first.template part<n.value>());
            Format::add(sums[s][r][1], given, second.template part<n.value>());
        }
    };
    const auto use_all = [&](const Format& first, const Format& second, int s, auto... n) {
        (use(first, second, s, x, n), ...);
    };
    for (int64_t step = 0; step < steps; ++step, x += Format::PARTS * rows) {
#pragma GCC unroll 4
        for (int s = 0; s < strips; ++s, column[s - 1] += stride) {
            const char* ahead = reinterpret_cast<const char*>(column[s]) + STREAM_AHEAD_BYTES;
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + LINE_BYTES, 0, 2);
            for_parts<Format>([&](auto... n) { use_all(Format(column[s]), Format(column[s] + LANES), s, n...); });
        }
    }
    auto* to = static_cast<Sum*>(total);
    for (int s = 0; s < strips; ++s)
        for (int r = 0; r < rows; ++r, to += 2) to[0] = sums[s][r][0], to[1] = sums[s][r][1];
}

using StreamStrips = void (*)(const uint32_t*, const void* const*, int64_t, void*);

// Return the number of strips whose sums mostly stay in registers; with 16 registers and more than two rows, one panel.
constexpr int64_t most_streams(int64_t rows) {
    return LANES < 16 && rows > 2 ? 2 : rows <= 3 ? MOST_STREAMS : MOST_STREAMS - 1;
}

// Functions for each number of rows and strips, indexed by rows - 1 and strips - 1.
template <class Format, int stride>
constexpr auto STREAM = table<MOST_STREAMED_ROWS>([](auto rows) {
    return table<MOST_STREAMS>([](auto strips) -> StreamStrips {
        return stream<Format, decltype(rows)::value + 1, stride, strips.value + 1>;
    });
});

// Return the number of strips per task, at most `most`, with which the strips of all `blocks` are most evenly divided
// among the threads; of equally good numbers the largest.
inline int64_t evenly(int64_t strips, int64_t blocks, int64_t most, int64_t threads) {
    const auto longest = [&](int64_t width) {
        return ((strips + width - 1) / width * blocks + threads - 1) / threads * width;
    };
    // At least three tasks per thread, since a thread may be slow.
    const int64_t worth = std::max<int64_t>(1, strips * blocks / (3 * threads));
    int64_t best = 1;
    for (int64_t width = 2; width <= std::min(most, threads == 1 ? most : worth); ++width)
        if (longest(width) <= longest(best)) best = width;
    return best;
}

}  // namespace baton
