// Rows times a packed weight: what it is made of, and the one function. Contract: kernels/packed_linear.py.
#pragma once

#include <cstdint>

namespace baton {

// `rounding`: as bfloat16, and the inputs are rounded to it too.
enum class Stored : int32_t { float32 = 0, bfloat16 = 1, rounding = 2, int8 = 3 };

// Outputs in panels of 32, zeros after the last: `[panel][in / n][32][n]`, n numbers (1, 2 or 4 by format) side by side.
struct Weight {
    const void* data;
    const float* scales;  // int8: of each output, padded like the panels
    const int32_t* sums;  // int8: of each output's integers, padded likewise
    const float* bias;    // [outputs], or null
    int64_t outputs, inputs;
    int32_t stored;
};

// output [rows][outputs] (= or +=) x [rows][inputs] times the weight, plus the bias.
void linear(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads);

}  // namespace baton
