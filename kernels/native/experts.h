// Feed-forward layer of experts, of which each row uses a few. Contract: kernels/experts.py.
#pragma once

#include "linear.h"

namespace baton {

// Twin of `Routing` in kernels/types.py.
struct Routing {
    int64_t per_token, groups, kept_groups, judged_by;
    float scale;
    int32_t is_sigmoid, is_normalised;
};

struct GatedWeights {
    Weight gate_up, down;
    int32_t gate;  // a `Gate`
};

struct Experts {
    Weight router;                // to one logit per expert
    const float* correction;      // [experts], or null
    const GatedWeights* experts;  // [experts]
    const GatedWeights* shared;   // added for every row, or null
    const Weight* shared_gate;    // to the logit of `shared`, or null
    Routing routing;
};

// to [rows][hidden] (not x) = weighted sums of the outputs of each row's experts; x: [rows][hidden].
void mix_experts(const float* x, int64_t rows, const Experts& experts, float* to, int threads);

}  // namespace baton
