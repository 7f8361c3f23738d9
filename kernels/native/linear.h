// Products of rows and a packed weight: the weight's layout, and the functions. Contract: kernels/linear.py.
#pragma once

#include <cstdint>

namespace baton {

// `rounding`: the weight is bfloat16, and inputs are rounded to bfloat16.
enum class Stored : int32_t { float32 = 0, bfloat16 = 1, rounding = 2, int8 = 3, int4 = 4, fp4 = 5, code4 = 6, code8 = 7 };

// Weight in panels of 32 outputs, zero-padded: `[panel][inputs / n][32][n]`. The n adjacent numbers of an output (1, 2,
// 4 or 8 by format) have 32 bits together. Of eight int4 codes the first four are in the low nibbles of the bytes. int4
// has a scale (float16) and a zero point, in eighths of a code, per output and group of inputs: `[panel][group][32]`.
// fp4 is like int4, but formats.h converts its codes. code4 and code8 have a scale and perhaps an offset (float16) per output and group: a number
// is its code, of 0 to 15 or -128 to 127, times the scale plus the offset.
struct Weight {
    const void* data;
    const void* scales;   // int8: float per output, padded to panels; int4, fp4, code4, code8: float16
    const uint8_t* zeros;  // int4, fp4: zero points in ZERO_PARTS of a code
    const uint16_t* offsets;  // code4, code8: offsets; null: none
    const float* bias;    // [outputs]; null: no bias
    int64_t outputs, inputs;
    // Formats in groups: inputs of a group, a multiple of 8, at most 256. int8: inputs that are rounded to bytes with a
    // common scale, a multiple of 4; 0: rows are rounded to 16 bits.
    int64_t group_inputs;
    int32_t stored;
};

// output, [rows][outputs], = or += product of x, [rows][inputs], and the weight, plus the bias.
void linear(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads);

// Activation of a gate, which then multiplies its factor. The same as `Gate` in kernels/types.py.
enum class Gate : int32_t { none = 0, silu = 1, gelu = 2, clamped = 3, sigmoid = 4, relu2 = 5 };

// output, [rows][outputs / 2], = gate(first half) * second half of the product of x and the weight, plus the bias.
// relu2: output, [rows][outputs], = squares of ReLU of the product, plus the bias.
void gated_linear(const float* x, int64_t rows, const Weight& weight, Gate gate, float* output, int threads);

// Product with one weight per head: x [heads][rows][inputs], output [heads][rows][outputs of a head]. `weight`: weights
// of all heads concatenated, each with equally many complete panels, in a float format.
void head_linear(const float* x, int64_t rows, const Weight& weight, int64_t heads, float* output, int threads);

}  // namespace baton
