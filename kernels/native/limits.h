// Constants that kernels/native/structs.py also defines. It compares them with those that `baton_limits` exports.
#pragma once

#include <cstdint>

namespace baton {

constexpr int MAX_HEAD_DIM = 576;
constexpr int64_t MAX_HEADS = 256;
constexpr int MAX_GROUP = 144;         // most query heads of one KV head, which share one conversion of keys and values
constexpr int64_t PIECE_TOKENS = 256;  // tokens of the smallest piece of a context
constexpr int64_t MOST_PIECES = 16;    // most pieces of one context
constexpr float SWIGLU_LIMIT = 7.0f, SWIGLU_ALPHA = 1.702f;
constexpr float MIN_WEIGHT_SUM = 1e-20f;

}  // namespace baton
