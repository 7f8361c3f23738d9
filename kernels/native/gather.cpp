// Lookup of rows of a packed weight as floats. Contract: kernels/linear.py.
#include <cstdint>

#include "arguments.h"
#include "threads.h"
#include "formats.h"

namespace baton {
namespace {

constexpr int64_t AHEAD = 48;  // distance of prefetching in words; each word of a row is in another cache line

float half_at(const uint16_t* from) {
    const float magnitude = as_float((*from & 0x7fffu) << 13) * 0x1p112f;
    return as_float(read_as<uint32_t>(&magnitude) | (*from & 0x8000u) << 16);
}

// Dequantise a row of a weight with codes in groups.
void gather_codes(const Weight& weight, int64_t id, float* to) {
    const bool is_short = weight.stored == static_cast<int32_t>(Stored::code4);
    const int64_t words = weight.inputs / (is_short ? 8 : 4), groups = weight.inputs / weight.group_inputs;
    const auto* from = static_cast<const uint32_t*>(weight.data) + id / PANEL * PANEL * words + id % PANEL;
    const int64_t first = id / PANEL * PANEL * groups + id % PANEL;
    const auto* scales = static_cast<const uint16_t*>(weight.scales);
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t at = first + group * PANEL;
        const float scale = half_at(scales + at), offset = weight.offsets ? half_at(weight.offsets + at) : 0;
        for (float* end = to + weight.group_inputs; to < end; from += PANEL) {
            __builtin_prefetch(from + AHEAD * PANEL);
            for (int shift = 0; is_short && shift < 8; shift += 4)
                for (int n = 0; n < 4; ++n) *to++ = static_cast<float>(*from >> (8 * n + shift) & 15) * scale + offset;
            for (int n = 0; !is_short && n < 4; ++n)
                *to++ = static_cast<float>(static_cast<int8_t>(*from >> 8 * n)) * scale + offset;
        }
    }
}

void gather_row(const GatherArguments& asked, int64_t place) {
    const Weight& weight = asked.weight;
    const bool is_wide = weight.stored == static_cast<int32_t>(Stored::float32);
    const int64_t id = asked.token_ids[place], inputs = weight.inputs, words = is_wide ? inputs : (inputs + 1) / 2;
    const uint32_t* from = static_cast<const uint32_t*>(weight.data) + id / PANEL * PANEL * words + id % PANEL;
    float* to = asked.rows + place * inputs;
    if (weight.stored >= static_cast<int32_t>(Stored::code4)) return gather_codes(weight, id, to);
    for (int64_t word = 0; word < words; ++word) {
        if (word + AHEAD < words) __builtin_prefetch(from + (word + AHEAD) * PANEL);
        const uint32_t bits = from[word * PANEL];
        if (is_wide) {
            to[word] = as_float(bits);
            continue;
        }
        to[2 * word] = as_float(bits << 16);
        if (2 * word + 1 < inputs) to[2 * word + 1] = as_float(bits & 0xffff0000);
    }
}

}  // namespace
}  // namespace baton

// Look up rows; return 1, or 0 without reading the weight if an id is out of range.
extern "C" int32_t baton_gather_rows(const baton::GatherArguments* asked) {
    for (int64_t place = 0; place < asked->count; ++place)
        if (asked->token_ids[place] < 0 || asked->token_ids[place] >= asked->weight.outputs) return 0;
    baton::share_rows(asked->count, asked->threads, [&](int64_t place) { baton::gather_row(*asked, place); });
    return 1;
}
