// Recurrent layers: a convolution, the delta rule and the state space's scan over states in the pool's blocks.
// Contracts: kernels/delta.py.
// Tokens are always computed one by one, so that states do not depend bitwise on how a prompt was split into steps.
#pragma once

#include <cstdint>

namespace baton {

enum class StateInit : int64_t { zero = 0, stored = 1, again = 2, broken = 3 };

// Run r has rows [starts[r], starts[r + 1]). It may start from the state that the previous run has written.
struct StateRuns {
    const int64_t* starts;  // [runs + 1]
    const int64_t* sources;
    const int64_t* destinations;
    const int64_t* begins;  // [runs], values of StateInit
    int64_t runs;
};

struct Convolution {
    const float* x;  // [rows][channels]
    const float* weight;  // [channels][kernel]
    const float* bias;  // [channels]; null: no bias
    float* output;  // like x
    float* states;  // [blocks][kernel][channels]
    StateRuns runs;
    int64_t row_stride, block_stride, channels, kernel;
    int32_t activates;  // whether SiLU is applied to the sum
    int32_t threads;
};

struct DeltaRule {
    const float* query;  // [rows][key_heads][key_dim]
    const float* key;
    const float* value;  // [rows][value_heads][value_dim]
    const float* decay;  // [rows][value_heads], before activation and scaling
    const float* beta;   // [rows][value_heads], before activation
    const float* rate;   // [value_heads]
    const float* bias;   // [value_heads]
    float* output;  // [rows][value_heads][value_dim]
    float* states;  // [blocks][value_heads][key_dim][value_dim]
    StateRuns runs;
    int64_t query_stride, key_stride, value_stride, block_stride;  // distances of rows, and of blocks
    int64_t key_heads, value_heads, key_dim, value_dim;
    int32_t threads;
};

struct StateScan {
    const float* query;  // [rows][groups][state_dim]
    const float* key;
    const float* value;  // [rows][heads][head_dim]
    const float* steps;  // [rows][heads], before activation
    const float *rate, *bias, *skip;  // [heads]
    float* output;  // [rows][heads][head_dim]
    float* states;  // [blocks][heads][state_dim][head_dim]
    StateRuns runs;
    int64_t query_stride, key_stride, value_stride, step_stride, block_stride;  // distances of rows, and of blocks
    int64_t groups, heads, state_dim, head_dim;
    float least_step, most_step;
    int32_t threads;
};

}  // namespace baton
