// What sampling asks for, one struct per function; the twins are in kernels/native/sampling.py.
#pragma once

#include <cstdint>

namespace baton {

struct AllowedTokens {
    const uint8_t* bits;  // [bytes], one bit per token, the least significant first; none: all are
    int64_t bytes;        // tokens beyond are not allowed
};

// Rows of logits, [rows][size], `stride` apart.
struct SurveyArguments {
    const float* logits;
    const AllowedTokens* allowed;  // [rows]; none: all tokens are
    int64_t* best;                 // [rows], the first of several, of those that are allowed
    float* log_totals;  // [rows], log of the sum of e^logit
    uint8_t* finite;    // [rows], whether all of it is; the two others mean nothing where it is not
    int64_t rows, size, stride;
    int32_t threads;
};

struct SampleArguments {
    const float* logits;  // -inf: banned
    const float* temperatures;
    const int64_t* top_k;
    const float* top_p;
    const double* numbers;
    int64_t* token_ids;  // [rows], as all of these
    float* logprobs;     // NaN where the row has NaN or +inf, or nothing that is finite
    int64_t rows, size, stride;
    int32_t threads;
};

struct TakenRow {
    int64_t place;  // among those of logits
    AllowedTokens allowed;
};

struct TakeArguments {
    const float* logits;
    float* taken;  // [count][size], -inf where a token is not allowed
    const TakenRow* rows;
    int64_t count, size, stride;
};

}  // namespace baton
