// Structs of decoder layers, in addition to `arguments.h`. All memory is borrowed.
#pragma once

#include "arguments.h"
#include "delta.h"
#include "experts.h"

namespace baton {

// Multi-head latent attention (engine/models/latent.py): one row per token is stored for all heads.
struct Latent {
    const Weight* query_up;   // to all queries; null: `qkv` computes them
    const float* query_norm;  // [numbers], with `query_up`
    const float* norm;        // [rank]
    Weight to_keys, to_values;  // of all heads, each padded to complete panels: nope_dim to rank, rank to value_dim
    int64_t rank, nope_dim, rope_dim, value_dim;
    int64_t groups;  // groups of heads that share one read of a row
    float eps;
    int32_t is_interleaved;  // rotated pairs are adjacent
};

// Gated delta net (engine/models/delta_net.py).
struct DeltaNet {
    const float* convolution;  // [channels][kernel]
    const float *rate, *bias;  // [value_heads]
    const float* norm;         // [value_dim]
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    int64_t first_number;  // offset of its state in a block
    float eps;
    int32_t is_interleaved;  // a projection groups everything by key head
};

struct DecoderLayer {
    Weight qkv, output;
    GatedWeights feed_forward;  // without experts
    const Experts* experts;     // or null
    // Norm weights [hidden], or null: before attention and the feed-forward layer, and of their outputs.
    const float *attention_norm, *feed_forward_norm, *attention_end_norm, *feed_forward_end_norm;
    const float *query_norm, *key_norm;  // [head_dim], or of all heads, or null
    const Latent* latent;  // or null
    const DeltaNet* delta;  // replaces attention, or null
    Scoring scoring;
    const void* pages;    // of this layer
    const float* scales;  // of its pages, or null
    int32_t table;        // of `cos` and `sin`
    int32_t norms_are_whole;
    int32_t is_gated;  // each query is followed by a gate of its attention output
    int32_t group;     // layer group of its blocks
};

// Rows [first_row, first_row + tokens): a chunk of one sequence from position `start`.
struct PrefillChunk {
    const int64_t* block_ids;
    int64_t first_row, tokens, start;
};

// KV locations of a step's tokens in the blocks of one layer group.
struct GroupRows {
    const int64_t* slots;  // [rows]
    const int64_t *block_ids, *block_starts;  // of the first `decode_rows` rows
    const PrefillChunk* chunks;
};

struct DecoderArguments {
    const DecoderLayer* layers;
    const GroupRows* groups;
    Pages pages;  // without `data` and `scales`, which are per layer
    float* residual;  // [rows][hidden], input and output
    const float *cos, *sin;  // [tables][rows][rotary_dim / 2]
    const int64_t* context_tokens;  // of the first `decode_rows` rows
    StateRuns runs;  // of layers with a delta net
    float* states;   // [blocks][state_stride], or null
    int64_t state_stride;
    int64_t layer_count, chunk_count, rows, decode_rows;
    int64_t hidden, heads, kv_heads, head_dim, rotary_dim;
    float eps;
    int32_t threads;
};

}  // namespace baton
