// Feed-forward layer of experts, of which each row uses a few. Contract: kernels/experts.py.
#pragma once

#include "linear.h"

namespace baton {

// The same as `Routing` in kernels/types.py.
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
    Weight router;                // weight that computes one logit per expert
    const float* correction;      // [experts]; null: no correction
    const GatedWeights* experts;  // [experts]
    const GatedWeights* shared;   // expert whose output is added to that of every row; null: none
    const Weight* shared_gate;    // weight that computes the gate's logit of `shared`; null: no gate
    Routing routing;
};

// Write the weighted sum of each row's experts' outputs to `to`, [rows][hidden]. x: [rows][hidden], not the same
// memory.
void mix_experts(const float* x, int64_t rows, const Experts& experts, float* to, int threads);

}  // namespace baton
