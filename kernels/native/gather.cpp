// Lookup of rows of a packed weight as floats. Contract: kernels/linear.py.
#include <cstdint>

#include "arguments.h"
#include "threads.h"
#include "formats.h"

namespace baton {
namespace {

constexpr int64_t AHEAD = 48;  // distance of prefetching in words; each word of a row is in another cache line

void gather_row(const GatherArguments& asked, int64_t place) {
    const Weight& weight = asked.weight;
    const bool is_wide = weight.stored == static_cast<int32_t>(Stored::float32);
    const int64_t id = asked.token_ids[place], inputs = weight.inputs, words = is_wide ? inputs : (inputs + 1) / 2;
    const uint32_t* from = static_cast<const uint32_t*>(weight.data) + id / PANEL * PANEL * words + id % PANEL;
    float* to = asked.rows + place * inputs;
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
