// Arguments of sampling, one struct per function; structs.py has their twins.
#pragma once

#include <cstdint>

namespace baton {

struct AllowedTokens {
    const uint8_t* bits;  // [bytes], one bit per token, the least significant first; null: all tokens are allowed
    int64_t bytes;        // tokens after the last bit are not allowed
};

// Statistics of rows of logits, [rows][size], `stride` apart.
struct SurveyArguments {
    const float* logits;
    const AllowedTokens* allowed;  // [rows]; null: all tokens are allowed
    int64_t* best;                 // [rows], most likely allowed token, the first of several
    float* log_totals;             // [rows], log of the sum of e^logit
    uint8_t* finite;               // [rows], whether all logits are finite; otherwise `best` and `log_totals` are void
    int64_t rows, size, stride;
    int32_t threads;
};

struct SampleArguments {
    const float* logits;  // -inf: banned
    const float* temperatures;
    const int64_t* top_k;
    const float* top_p;
    const double* numbers;
    int64_t* token_ids;  // [rows], like all of these
    float* logprobs;     // NaN if the row has NaN or +inf, or no finite logit
    int64_t rows, size, stride;
    int32_t threads;
};

struct TakenRow {
    int64_t place;  // row of logits
    AllowedTokens allowed;
};

struct TakeArguments {
    const float* logits;
    float* taken;  // [count][size], -inf for tokens that are not allowed
    const TakenRow* rows;
    int64_t count, size, stride;
};

}  // namespace baton
