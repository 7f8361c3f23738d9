// Rows times a packed weight: what it is made of, and the two functions. Contract: kernels/linear.py.
#pragma once

#include <cstdint>

namespace baton {

// `rounding`: as bfloat16, and the inputs are rounded to it too.
enum class Stored : int32_t { float32 = 0, bfloat16 = 1, rounding = 2, int8 = 3, int4 = 4, fp4 = 5 };

// Outputs in panels of 32, zeros after the last: `[panel][in / n][32][n]`, n numbers (1, 2, 4 or 8 by format) side by
// side, together 32 bits. Of the eight codes of int4 the first four are the lower halves of the bytes. int4 has for each
// group of inputs and each output a scale (float16) and a zero point: `[panel][group][32]`. fp4 is likewise, and its codes
// stand for others of int4: formats.h.
struct Weight {
    const void* data;
    const void* scales;   // int8: float, of each output, padded like the panels; int4, fp4: float16
    const int32_t* sums;  // int8: of each output's integers, padded likewise
    const uint8_t* zeros;  // int4, fp4
    const float* bias;    // [outputs], or null
    int64_t outputs, inputs;
    int64_t group_inputs;  // int4, fp4: a multiple of 8, at most 256
    int32_t stored;
};

// output [rows][outputs] (= or +=) x [rows][inputs] times the weight, plus the bias.
void linear(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads);

// What a gate goes through before it multiplies. As `Gate` of kernels/types.py.
enum class Gate : int32_t { none = 0, silu = 1, gelu = 2, clamped = 3, sigmoid = 4 };

// output [rows][outputs / 2]: of the same product, gate(first half) * second half.
void gated_linear(const float* x, int64_t rows, const Weight& weight, Gate gate, float* output, int threads);

// The same of several heads with a weight each: x [heads][rows][inputs], output [heads][rows][outputs of a head]. `weight`
// is of all heads, one below the other: an equal number of whole panels, of plain numbers.
void head_linear(const float* x, int64_t rows, const Weight& weight, int64_t heads, float* output, int threads);

}  // namespace baton
