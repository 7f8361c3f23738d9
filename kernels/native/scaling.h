// From the sums of LANES outputs to the outputs: scales, where there are any, and the bias.
#pragma once

#include <algorithm>

#include "formats.h"
#include "linear.h"

namespace baton {

template <class Format, bool has_scales>
struct Scaling {
    Floats scale{}, bias{};
    Ints offset{};

    Scaling(const Weight& weight, int64_t output) {
        if (has_scales) {
            offset = Int8Weight::INPUT_OFFSET * load_bits(weight.sums + output);
            scale = load(static_cast<const float*>(weight.scales) + output);
        }
        for (int64_t i = 0; weight.bias && i < std::min<int64_t>(LANES, weight.outputs - output); ++i)
            bias[i] = weight.bias[output + i];
    }
    Floats operator()(typename Format::Sum sum, float row_scale) const {
        if constexpr (has_scales) {
            return __builtin_convertvector(sum - offset, Floats) * scale * row_scale + bias;
        } else {
            return sum + bias;
        }
    }
};

}  // namespace baton
