// Arguments of sampling, one struct per function, which structs.py defines in Python too.
#pragma once

#include <cstdint>

namespace baton {

struct AllowedTokens {
    const uint8_t* bits;  // [bytes], one bit per token, the least significant first; null: all tokens are allowed
    int64_t bytes;        // size of `bits`; tokens after the last bit are not allowed
};

// Arguments for statistics of rows of logits, [rows][size], `stride` apart.
struct SurveyArguments {
    const float* logits;
    const AllowedTokens* allowed;  // [rows]; null: all tokens are allowed
    int64_t* best;                 // [rows], most likely allowed token, the first one of equally likely ones
    float* log_totals;             // [rows], log of the sum of e^logit over all tokens
    uint8_t* finite;               // [rows], whether all logits are finite; otherwise `best` and `log_totals` are void
    int64_t rows, size, stride;
    int32_t threads;
};

struct SampleArguments {
    const float* logits;  // [rows][size]; tokens with -inf are banned
    const float* temperatures;
    const int64_t* top_k;
    const float* top_p;
    const double* numbers;
    int64_t* token_ids;  // [rows], like all other arguments
    float* logprobs;     // NaN if the row has NaN, +inf, or no finite logit
    int64_t rows, size, stride;
    int32_t threads;
};

struct TakenRow {
    int64_t place;  // row index in `logits`
    AllowedTokens allowed;
};

struct TakeArguments {
    const float* logits;
    float* taken;  // [count][size], -inf for tokens that are not allowed
    const TakenRow* rows;
    int64_t count, size, stride;
};

}  // namespace baton
