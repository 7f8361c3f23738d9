// What the layers of a decoder need beside what is in `arguments.h`. Borrowed memory throughout.
#pragma once

#include "arguments.h"

namespace baton {

struct DecoderLayer {
    Weight qkv, output, gate_up, down;
    // [hidden], or null: before attention and the feed-forward layer, and of what these add to the stream.
    const float *attention_norm, *feed_forward_norm, *attention_end_norm, *feed_forward_end_norm;
    const float *query_norm, *key_norm;  // [head_dim], or of all heads, or null
    Scoring scoring;
    const void* pages;    // of this layer
    const float* scales;  // of its pages, or null
    int32_t table;        // of `cos` and `sin`
    int32_t norms_are_whole;
    int32_t gate;  // of `Gate`
};

// Rows [first_row, first_row + tokens): a chunk of one sequence from position `start` on.
struct PrefillChunk {
    const int64_t* block_ids;
    int64_t first_row, tokens, start;
};

struct DecoderArguments {
    const DecoderLayer* layers;
    const PrefillChunk* chunks;
    Pages pages;  // but for `data` and `scales`, which each layer has of its own
    float* residual;  // [rows][hidden]: in, and out
    float* scratch;   // as many numbers as DecoderCall._reserve() in kernels/native/decoder.py computes
    const float *cos, *sin;  // [tables][rows][rotary_dim / 2]
    const int64_t* slots;    // [rows]
    const int64_t *block_ids, *block_starts, *context_tokens;  // of the first `decode_rows` rows
    int64_t layer_count, chunk_count, rows, decode_rows;
    int64_t hidden, inner, heads, kv_heads, head_dim, rotary_dim;
    float eps;
    int32_t threads;
};

}  // namespace baton
