// Arguments of the kernels, one struct per kernel, which structs.py defines in Python too. Kernels do not use torch.
#pragma once

#include "attention.h"
#include "layer.h"
#include "linear.h"

namespace baton {

struct PrefillArguments {
    Pages pages;
    Scoring scoring;
    const float* query;  // [tokens][heads][head_dim]
    float* output;       // [tokens][heads][value_dim]
    const int64_t* block_ids;
    int64_t tokens, heads, kv_heads, head_dim, value_dim, start;
    int32_t threads;
};

struct DecodeArguments {
    Pages pages;
    Scoring scoring;
    const float* query;  // [sequences][heads][head_dim]
    float* output;       // [sequences][heads][value_dim]
    float* parts;        // [sequences][MOST_PIECES][heads][value_dim + 2]
    const int64_t* block_ids;
    const int64_t* block_starts;    // [sequences + 1]
    const int64_t* context_tokens;  // [sequences]
    int64_t sequences, heads, kv_heads, head_dim, value_dim;
    int32_t threads;
};

struct LinearArguments {
    Weight weight;
    const float* x;  // [rows][inputs]
    float* output;   // [rows][outputs]
    int64_t rows;
    int32_t threads;
    int32_t gate;  // a `Gate`; Gate::none: only a product
};

struct HeadLinearArguments {
    Weight weight;
    const float* x;
    float* output;
    int64_t rows, heads;
    int32_t threads;
};

struct GatherArguments {
    Weight weight;             // in float32, bfloat16, code4 or code8
    const int64_t* token_ids;  // [count], row indices of the weight
    float* rows;               // [count][inputs]
    int64_t count;
    int32_t threads;
};

}  // namespace baton
