// Rows times a packed weight: its layout, and the functions. Contract: kernels/linear.py.
#pragma once

#include <cstdint>

namespace baton {

// `rounding`: bfloat16, with inputs rounded to it too.
enum class Stored : int32_t { float32 = 0, bfloat16 = 1, rounding = 2, int8 = 3, int4 = 4, fp4 = 5 };

// Outputs in panels of 32, zero-padded: `[panel][in / n][32][n]`, n adjacent numbers (1, 2, 4 or 8 by format), 32 bits
// together. The first four of eight int4 codes are the low nibbles of the bytes. int4 has a scale (float16) and a zero
// point per group of inputs and output: `[panel][group][32]`. fp4 is the same with codes converted to int4's:
// formats.h.
struct Weight {
    const void* data;
    const void* scales;   // int8: float per output, padded to panels; int4, fp4: float16
    const int32_t* sums;  // int8: sum of each output's integers, padded to panels
    const uint8_t* zeros;  // int4, fp4
    const float* bias;    // [outputs], or null
    int64_t outputs, inputs;
    int64_t group_inputs;  // int4, fp4: a multiple of 8, at most 256
    int32_t stored;
};

// output [rows][outputs] (= or +=) x [rows][inputs] times the weight, plus the bias.
void linear(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads);

// Activation of a gate before it multiplies. Twin of `Gate` in kernels/types.py.
enum class Gate : int32_t { none = 0, silu = 1, gelu = 2, clamped = 3, sigmoid = 4 };

// output [rows][outputs / 2] = gate(first half) * second half of the same product.
void gated_linear(const float* x, int64_t rows, const Weight& weight, Gate gate, float* output, int threads);

// The same with one weight per head: x [heads][rows][inputs], output [heads][rows][outputs of a head]. `weight`: of all
// heads, concatenated, equally many complete panels of plain numbers.
void head_linear(const float* x, int64_t rows, const Weight& weight, int64_t heads, float* output, int threads);

}  // namespace baton
