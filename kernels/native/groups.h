// Innermost loops of products with codes in groups. Within a group of inputs, products of codes and integers (bytes for
// int4 and fp4, 16 bits for code4 and code8) are summed exactly; sums of groups, times both scales, are added as floats in
// order.
#pragma once

#include "inputs.h"
#include "stream.h"

namespace baton {

constexpr int CODE_WORDS = 4;  // words of the smallest group of code4 and code8
constexpr int64_t GROUPS_AHEAD_BYTES = 2048;  // distance of prefetching: into L1, which is 25 % faster here than L2

// Pointers to the data of a strip, from some group on.
struct GroupedStrip {
    const uint32_t* codes;   // steps are PANEL numbers apart
    const uint16_t* scales;   // [group][PANEL]
    const uint8_t* zeros;     // [group][PANEL]; int4, fp4
    const uint16_t* offsets;  // [group][PANEL]; code4, code8; null: no offsets
    const int32_t* sums = nullptr;  // [group][STRIP]; int8: negated sums of codes; null: they are computed
};

// Convert finite float16 scales or offsets of groups to floats.
inline Floats load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__AVX2__)
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    const Ints bits = load_shorts(from);
    const Floats magnitude = as_floats((bits & 0x7fff) << 13) * 0x1p112f;
    return as_floats(as_ints(magnitude) | (bits & 0x8000) << 16);
#endif
}

// Multiply numbers below 2^15.
inline Ints times(Ints a, int32_t b) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), _mm512_set1_epi32(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), _mm256_set1_epi32(b)));
#else
    return a * b;
#endif
}

#if defined(__AVX512VNNI__)
using CodeSum = Ints;
template <class Format>
constexpr int64_t MOST_CODE_STEPS = 32;  // the largest group
inline Ints in_zero_parts(CodeSum sum) { return sum * ZERO_PARTS; }
inline void add_codes(CodeSum& sum, Ints codes, Ints x) {
    sum = reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(codes),
                                                     reinterpret_cast<__m512i>(x)));
}
#else
using CodeSum = Halves;
template <class Format>  // most steps whose sums of products fit in 16 bits
constexpr int64_t MOST_CODE_STEPS = (1 << 15) / (2 * 2 * Format::LARGEST * 128);
// Return the sum of the two signed halves of each lane, times ZERO_PARTS.
inline Ints in_zero_parts(CodeSum sum) {
#if defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), _mm256_set1_epi16(ZERO_PARTS)));
#else
    const Ints lanes = reinterpret_cast<Ints>(sum);
    return (((lanes << 16) >> 16) + (lanes >> 16)) * ZERO_PARTS;
#endif
}
inline void add_codes(CodeSum& sum, Ints codes, Ints x) {
#if defined(__AVX2__)
    // Assembly, since GCC would otherwise compute all products before the first addition, and run out of registers.
    CodeSum to = sum, products;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(to), "=&x"(products) : "x"(codes), "x"(x));
    sum = to;
#else
    sum += products_of_bytes(codes, x);
#endif
}
#endif

// Sums of some rows of some strips.
template <int rows, int strips>
struct CodeSums {
    CodeSum of[strips][rows][2];
};
template <int rows, int strips>
struct GroupSums {
    Ints of[strips][rows][2];  // times ZERO_PARTS
};

// Multiply `steps` steps of a group, from number `at` of each strip on. x: [steps * 2][rows]. Prefetches codes: `next`
// numbers ahead of each of several strips, or at `ahead` for a single one.
template <class Format, int rows, int strips>
ALWAYS_INLINE void add_steps(const uint32_t* x, const GroupedStrip* strip, int64_t at, int64_t steps, int64_t next,
                             CodeSums<rows, strips>& sums, Ahead& ahead) {
    const auto use = [&](Ints first, Ints second, const uint32_t* words, int s) {
#pragma GCC unroll 14
        for (int r = 0; r < rows; ++r) {
            const Ints given = Ints{} + static_cast<int32_t>(words[r]);
            add_codes(sums.of[s][r][0], first, given);
            add_codes(sums.of[s][r][1], second, given);
        }
    };
    for (int64_t end = at + steps * PANEL; at < end; at += PANEL, x += 2 * rows, ahead.from += ahead.stride) {
#pragma GCC unroll 4
        for (int s = 0; s < strips; ++s) {
            const uint32_t* codes = strip[s].codes + at;
            const char* from = strips == 1 ? ahead.from : reinterpret_cast<const char*>(codes + next);
            __builtin_prefetch(from);
            __builtin_prefetch(from + LINE_BYTES);
            const Format first(codes), second(codes + LANES);
            use(first.template part<0>(), second.template part<0>(), x, s);
            use(first.template part<1>(), second.template part<1>(), x + rows, s);
        }
    }
}

// Multiply a group of `steps` steps. x: [2 * steps][rows]; sums: begin with zero points times negated sums of bytes, in
// ZERO_PARTS.
template <class Format, int rows, int strips>
ALWAYS_INLINE void add_group(const uint32_t* x, const GroupedStrip* strip, int64_t group, int64_t steps, int64_t next,
                             GroupSums<rows, strips>& sums, Ahead& ahead) {
    for (int64_t step = 0; step < steps; step += MOST_CODE_STEPS<Format>) {
        CodeSums<rows, strips> some{};
        add_steps<Format, rows, strips>(x + 2 * step * rows, strip, (group * steps + step) * PANEL,
                                std::min(steps - step, MOST_CODE_STEPS<Format>), next, some, ahead);
#pragma GCC unroll 4
        for (int s = 0; s < strips; ++s)
#pragma GCC unroll 14
            for (int r = 0; r < rows; ++r)
                for (int half = 0; half < 2; ++half) sums.of[s][r][half] += in_zero_parts(some.of[s][r][half]);
    }
}

// Some groups of some strips, to be multiplied.
struct Groups {
    const GroupedStrip* strips;
    int64_t count, steps;  // number of groups, and steps of each group
    bool begins;           // whether totals are overwritten instead of added to
    Ahead ahead;           // codes to prefetch for a single strip; code4 and code8: for unfolded codes
};

// Add, for each group, scale * input scale * (sum of codes times bytes - zero point * sum of bytes) to `totals`,
// [strips][rows][2]. x: [groups][GROUP_HEAD_WORDS + 2 * steps][rows].
template <class Format, int rows, int strips>
void multiply_groups(const uint32_t* x, Groups groups, void* totals) {
    if (groups.begins) std::fill_n(static_cast<Floats*>(totals), strips * rows * 2, Floats{});
    const int64_t steps = groups.steps, early = (GROUPS_AHEAD_BYTES / 4 / PANEL + steps - 1) / steps;
    for (int64_t group = 0; group < groups.count; ++group, x += (GROUP_HEAD_WORDS + 2 * steps) * rows) {
        const int64_t at = group * PANEL;
        GroupSums<rows, strips> sums;
#pragma GCC unroll 4
        for (int s = 0; s < strips; ++s) {
            const uint8_t* zeros = groups.strips[s].zeros + at;
            __builtin_prefetch(zeros + early * PANEL);
#pragma GCC unroll 14
            for (int r = 0; r < rows; ++r)
                for (int half = 0; half < 2; ++half)
                    sums.of[s][r][half] = times(load_bytes(zeros + half * LANES), static_cast<int32_t>(x[rows + r]));
        }
        add_group<Format, rows, strips>(x + GROUP_HEAD_WORDS * rows, groups.strips, group, steps, early * steps * PANEL, sums,
                                groups.ahead);
        auto* held = static_cast<Floats*>(totals);
#pragma GCC unroll 4
        for (int s = 0; s < strips; ++s, held += 2 * rows) {
            const uint16_t* scales = groups.strips[s].scales + at;
            __builtin_prefetch(scales + early * PANEL);
            const Floats scale[2] = {load_half(scales), load_half(scales + LANES)};
#pragma GCC unroll 14
            for (int r = 0; r < rows; ++r)
                for (int half = 0; half < 2; ++half) {
                    const Floats sum = __builtin_convertvector(sums.of[s][r][half], Floats);
                    held[2 * r + half] += sum * as_float(x[r]) * scale[half];
                }
        }
    }
}

// Add a group's sums, times both scales, and its offsets to `held`, [rows][2]. x: [GROUP_HEAD_WORDS][rows]; at: index of
// the group's scales.
template <int rows, bool has_offsets>
ALWAYS_INLINE void add_sums(const Ints (&sums)[rows][2], const uint32_t* x, const GroupedStrip& strip, int64_t at, Floats* held) {
    const Floats scale[2] = {load_half(strip.scales + at), load_half(strip.scales + at + LANES)};
    Floats offset[2] = {};
    for (int half = 0; has_offsets && half < 2; ++half) offset[half] = load_half(strip.offsets + at + half * LANES);
#pragma GCC unroll 14
    for (int r = 0; r < rows; ++r)
        for (int half = 0; half < 2; ++half) {
            Floats total = held[2 * r + half];
            total += __builtin_convertvector(sums[r][half], Floats) * as_float(x[r]) * scale[half];
            if (has_offsets) total += as_float(x[rows + r]) * offset[half];
            held[2 * r + half] = total;
        }
}

// Add, for each group, input scale * (scale * sum of codes times integers + offset * sum of integers) to `totals`,
// [strips][rows][2]. x: [groups][GROUP_HEAD_WORDS + steps * PARTS][rows]. Unfolded codes are STRIP words apart, and
// `ahead` is prefetched at the same time, a line per CODE_WORDS.
template <class Format, int rows, int strips>
void multiply_codes(const uint32_t* x, Groups groups, void* totals) {
    constexpr bool is_folded = Format::PARTS > 1;
    constexpr int64_t stride = is_folded ? PANEL : STRIP, step_bytes = (strips == 1 ? PANEL : STRIP) * 4;
    if (groups.begins) std::fill_n(static_cast<Floats*>(totals), strips * rows * 2, Floats{});
    const int64_t steps = groups.steps, next = (GROUPS_AHEAD_BYTES / 4 / PANEL + steps - 1) / steps * steps * PANEL;
    for (int64_t group = 0; group < groups.count; ++group, x += (GROUP_HEAD_WORDS + steps * Format::PARTS) * rows) {
        auto* held = static_cast<Floats*>(totals);
        for (int s = 0; s < strips; ++s, held += 2 * rows) {
            const GroupedStrip& strip = groups.strips[s];
            Ints sums[rows][2] = {};  // in registers
            const uint32_t *words = x + GROUP_HEAD_WORDS * rows, *codes = strip.codes + group * steps * stride;
            const auto use = [&](const Format& low, const Format& high, auto n) {
#pragma GCC unroll 14
                for (int r = 0; r < rows; ++r) {
                    const Ints given = Format::given(words + r);
                    Format::add(sums[r][0], given, low.template part<n.value>());
                    Format::add(sums[r][1], given, high.template part<n.value>());
                }
                words += rows;
            };
#pragma GCC unroll 1
            for (const uint32_t* const end = codes + steps * stride; codes < end;) {
                if (!is_folded) {
                    __builtin_prefetch(groups.ahead.from, 0, 2);
                    groups.ahead.from += groups.ahead.stride;
                }
#pragma GCC unroll 4
                for (int step = 0; step < CODE_WORDS / Format::PARTS; ++step, codes += stride) {
                    for (int64_t byte = 0; is_folded && byte < step_bytes; byte += LINE_BYTES)
                        __builtin_prefetch(codes + next + byte / 4);
                    const Format low(codes), high(codes + LANES);
                    for_parts<Format>([&](auto... n) { (use(low, high, n), ...); });
                }
            }
            if (strip.offsets) add_sums<rows, true>(sums, x, strip, group * PANEL, held);
            else add_sums<rows, false>(sums, x, strip, group * PANEL, held);
        }
    }
}

#if defined(__AVX512VNNI__)
inline void add_code_sums(Ints (&sums)[2], const ByteWeight& low, const ByteWeight& high) {
    add_codes(sums[0], Ints{} + 0x01010101, low.codes);
    add_codes(sums[1], Ints{} + 0x01010101, high.codes);
}

// Write the negated sums of the codes of each group, [groups][STRIP].
inline void sum_codes(const uint32_t* codes, int64_t groups, int64_t steps, int32_t* to) {
    for (int64_t group = 0; group < groups; ++group, to += STRIP) {
        Ints sums[2] = {};
        for (int64_t step = 0; step < steps; ++step, codes += PANEL)
            add_code_sums(sums, ByteWeight(codes), ByteWeight(codes + LANES));
        for (int half = 0; half < 2; ++half) store(reinterpret_cast<float*>(to + half * LANES), as_floats(-sums[half]));
    }
}

// Add, for each group, input scale * (sum of codes times bytes - zero point * sum of codes) to `totals`,
// [strips][rows][2]. x: [groups][GROUP_HEAD_WORDS + steps][rows].
template <int rows, int strips>
void multiply_bytes(const uint32_t* x, Groups groups, void* totals) {
    if (groups.begins) std::fill_n(static_cast<Floats*>(totals), strips * rows * 2, Floats{});
    const bool sums_codes = !groups.strips[0].sums;
    int64_t at = 0;
    for (int64_t group = 0; group < groups.count; ++group) {
        const uint32_t* const head = x;
        Ints sums[strips][rows][2] = {}, code_sums[strips][2] = {};  // in registers
        x += GROUP_HEAD_WORDS * rows;
#pragma GCC unroll 1
        for (const int64_t end = at + groups.steps * PANEL; at < end; at += PANEL, x += rows) {
#pragma GCC unroll 4
            for (int s = 0; s < strips; ++s) {
                const uint32_t* codes = groups.strips[s].codes + at;
                const char* from = strips == 1 ? groups.ahead.from : reinterpret_cast<const char*>(codes) + GROUPS_AHEAD_BYTES;
                __builtin_prefetch(from);
                __builtin_prefetch(from + LINE_BYTES);
                const ByteWeight low(codes), high(codes + LANES);
                if (sums_codes) add_code_sums(code_sums[s], low, high);
#pragma GCC unroll 14
                for (int r = 0; r < rows; ++r) {
                    const Ints given = Ints{} + static_cast<int32_t>(x[r]);
                    add_codes(sums[s][r][0], given, low.codes);
                    add_codes(sums[s][r][1], given, high.codes);
                }
            }
            groups.ahead.from += groups.ahead.stride;
        }
        auto* held = static_cast<Floats*>(totals);
#pragma GCC unroll 4
        for (int s = 0; s < strips; ++s, held += 2 * rows) {
            const int32_t* known = groups.strips[s].sums + group * STRIP;
            for (int half = 0; half < 2; ++half)
                code_sums[s][half] = sums_codes ? -code_sums[s][half] : load_bits(known + half * LANES);
#pragma GCC unroll 14
            for (int r = 0; r < rows; ++r)
                for (int half = 0; half < 2; ++half) {
                    Ints& sum = sums[s][r][half];
                    IntegerProducts::add(sum, Ints{} + static_cast<int32_t>(head[rows + r]), code_sums[s][half]);
                    held[2 * r + half] += __builtin_convertvector(sum, Floats) * as_float(head[r]);
                }
        }
    }
}
#endif

using MultiplyGroups = void (*)(const uint32_t*, Groups, void*);

template <class Format, int rows, int strips>
constexpr MultiplyGroups grouped() {
#if defined(__AVX512VNNI__)
    if constexpr (std::is_same_v<ByteWeight, Format>) return multiply_bytes<rows, strips>;
    else
#endif
    if constexpr (std::is_base_of_v<IntegerProducts, Format>) return multiply_codes<Format, rows, strips>;
    else return multiply_groups<Format, rows, strips>;
}

// Indexed by rows - 1.
template <class Format>
constexpr auto MULTIPLY_GROUPS = table<Format::MOST_FOLDED_ROWS>(
    [](auto less) -> MultiplyGroups { return grouped<Format, less.value + 1, 1>(); });

// Indexed by rows - 1 and strips - 1.
template <class Format>
constexpr auto STREAM_GROUPS = table<MOST_STREAMED_ROWS>([](auto rows) {
    return table<MOST_STREAMS>([](auto strips) -> MultiplyGroups {
        return grouped<Format, decltype(rows)::value + 1, strips.value + 1>();
    });
});

}  // namespace baton
