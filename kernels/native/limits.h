// Constants that Python repeats. `baton_limits` exports them, and kernels/native/structs.py compares them when it loads.
#pragma once

#include <cstdint>

namespace baton {

constexpr int MAX_HEAD_DIM = 576;
constexpr int64_t MAX_HEADS = 256;
constexpr int MAX_GROUP = 144;         // query heads of one KV head: rows that share one conversion of keys and values
constexpr int64_t PIECE_TOKENS = 256;  // smallest piece of a context
constexpr int64_t MOST_PIECES = 16;    // of one context
constexpr float SWIGLU_LIMIT = 7.0f, SWIGLU_ALPHA = 1.702f;
constexpr float MIN_WEIGHT_SUM = 1e-20f;

}  // namespace baton
