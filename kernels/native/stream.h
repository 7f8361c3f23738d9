// The innermost loop of a product of very few rows, which waits for memory: several strips at once, each a stream of
// addresses of its own, read further ahead together than one alone. Sums come about in the same order as in `multiply`.
#pragma once

#include "multiply.h"

namespace baton {

constexpr int MOST_STREAMS = 4;
constexpr int MOST_STREAMED_ROWS = 4, MOST_STREAMED_GROUPED_ROWS = LANES == 16 ? 4 : 3;
constexpr int64_t STREAM_AHEAD_BYTES = 1536;

// columns: [strips], each `[steps][stride]` numbers; x: [steps * PARTS][rows]; total: [strips][rows][2].
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

// So many that hardly a sum leaves the registers; with 16 of these for more than two rows one panel, end to end.
constexpr int64_t most_streams(int64_t rows) {
    return LANES < 16 && rows > 2 ? 2 : rows <= 3 ? MOST_STREAMS : MOST_STREAMS - 1;
}

template <class Format, int stride, int rows, int... less>
constexpr std::array<StreamStrips, sizeof...(less)> streams(std::integer_sequence<int, less...>) {
    return {stream<Format, rows, stride, less + 1>...};
}

template <class Format, int stride, int... less>
constexpr std::array<std::array<StreamStrips, MOST_STREAMS>, sizeof...(less)> all_streams(std::integer_sequence<int, less...>) {
    return {streams<Format, stride, less + 1>(std::make_integer_sequence<int, MOST_STREAMS>())...};
}

// By the number of rows, less one, and of strips, less one.
template <class Format, int stride>
constexpr auto STREAM = all_streams<Format, stride>(std::make_integer_sequence<int, MOST_STREAMED_ROWS>());

// How many strips to take at a time, of each of `blocks`: those among which the threads share evenly, the more the better.
inline int64_t evenly(int64_t strips, int64_t blocks, int64_t most, int64_t threads) {
    const auto longest = [&](int64_t width) {
        return ((strips + width - 1) / width * blocks + threads - 1) / threads * width;
    };
    const int64_t worth = std::max<int64_t>(1, strips * blocks / (3 * threads));  // a thread may be slower than the others
    int64_t best = 1;
    for (int64_t width = 2; width <= std::min(most, threads == 1 ? most : worth); ++width)
        if (longest(width) <= longest(best)) best = width;
    return best;
}

}  // namespace baton
