// A feed-forward layer of several experts, of which each row takes a few. Contract: kernels/experts.py.
#pragma once

#include "linear.h"

namespace baton {

// As `Routing` of kernels/types.py.
struct Routing {
    int64_t per_token, groups, kept_groups, judged_by;
    float scale;
    int32_t is_sigmoid, is_normalised;
};

struct GatedWeights {
    Weight gate_up, down;
    int32_t gate;  // of `Gate`
};

struct Experts {
    Weight router;                // to a number of each expert
    const float* correction;      // [experts], or null
    const GatedWeights* experts;  // [experts]
    const GatedWeights* shared;   // that every row takes, or null
    const Weight* shared_gate;    // to the number whose sigmoid opens `shared`, or null
    Routing routing;
};

// to [rows][hidden] (other memory than x) = the weighted sum of what the experts of each row of x, [rows][hidden], make of it.
void mix_experts(const float* x, int64_t rows, const Experts& experts, float* to, int threads);

}  // namespace baton
