// Innermost loop of a product: a few rows are multiplied by a strip of outputs, with all sums in registers.
#pragma once

#include <algorithm>

#include "formats.h"

namespace baton {

constexpr int STRIP = 2 * LANES;  // outputs of a strip
constexpr int64_t LINE_BYTES = 64;

template <class Use, int... n>
ALWAYS_INLINE void call(const Use& use, std::integer_sequence<int, n...>) {
    use(std::integral_constant<int, n>()...);
}

// Call use(0, 1, ...) with one argument, a compile-time constant, per part of the format.
template <class Format, class Use>
ALWAYS_INLINE void for_parts(const Use& use) {
    call(use, std::make_integer_sequence<int, Format::PARTS>());
}

// Memory to prefetch: a product requests the lines at `from` and advances by `stride` bytes, once per `every` steps.
// Products of groups and in tile registers do so in each step.
struct Ahead {
    const char* from;
    int64_t stride;
    int64_t every = 1;
};

// Multiply `rows` rows by a strip; add to totals or overwrite them. x: [steps * PARTS][rows]; weight: steps are
// `stride` numbers apart; total: [rows][2].
template <class Format, int rows, int stride>
void multiply(const uint32_t* x, const void* weight, int64_t steps, void* total, bool begins, Ahead ahead) {
    using Sum = typename Format::Sum;
    const auto* column = static_cast<const typename Format::Number*>(weight);
    Sum sums[rows][2];  // in registers
    auto* const held = static_cast<Sum*>(total);
#pragma GCC unroll 14
    for (int r = 0; r < rows; ++r) {
        sums[r][0] = begins ? Sum{} : held[2 * r];
        sums[r][1] = begins ? Sum{} : held[2 * r + 1];
    }
    const auto use = [&](const Format& first, const Format& second, auto n) {
#pragma GCC unroll 14
        for (int r = 0; r < rows; ++r) {
            const auto given = Format::given(x + r);
            Format::add(sums[r][0], given, first.template part<n.value>());
            Format::add(sums[r][1], given, second.template part<n.value>());
        }
        x += rows;
    };
    const auto use_all = [&](const Format& first, const Format& second, auto... n) { (use(first, second, n), ...); };
    for (int64_t step = 0; step < steps; ahead.from += ahead.stride) {
        for (int64_t byte = 0; byte < STRIP * 4; byte += LINE_BYTES) __builtin_prefetch(ahead.from + byte, 0, 2);
        for (const int64_t end = std::min(steps, step + ahead.every); step < end; ++step, column += stride)
            for_parts<Format>([&](auto... n) { use_all(Format(column), Format(column + LANES), n...); });
    }
#pragma GCC unroll 14
    for (int r = 0; r < rows; ++r) held[2 * r] = sums[r][0], held[2 * r + 1] = sums[r][1];
}

using Multiply = void (*)(const uint32_t*, const void*, int64_t, void*, bool, Ahead);

// Functions for each number of rows, indexed by rows - 1.
template <class Format, int stride>
constexpr auto MULTIPLY =
    table<Format::MOST_FOLDED_ROWS>([](auto less) -> Multiply { return multiply<Format, less.value + 1, stride>; });

}  // namespace baton
