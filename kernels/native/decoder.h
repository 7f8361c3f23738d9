// What the layers of a decoder need beside what is in `arguments.h`. Borrowed memory throughout.
#pragma once

#include "arguments.h"
#include "delta.h"
#include "experts.h"

namespace baton {

// Multi-head latent attention (engine/models/latent.py): of a token one row is kept for all heads.
struct Latent {
    const Weight* query_up;   // to all queries, of normalised numbers; null: they are made of the stream at once
    const float* query_norm;  // [numbers], with `query_up`
    const float* norm;        // [rank]
    Weight to_keys, to_values;  // of all heads, each padded to whole panels: nope_dim to rank, rank to value_dim
    int64_t rank, nope_dim, rope_dim, value_dim;
    int64_t groups;  // in which heads read the row that they share
    float eps;
    int32_t is_interleaved;  // numbers that rotate together are side by side
};

// A gated delta net (engine/models/delta_net.py).
struct DeltaNet {
    const float* convolution;  // [channels][kernel]
    const float *rate, *bias;  // [value_heads]
    const float* norm;         // [value_dim]
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    int64_t first_number;  // of its states in those of a block
    float eps;
    int32_t is_interleaved;  // a projection has one key head after another, with all that belongs to it
};

struct DecoderLayer {
    Weight qkv, output;
    GatedWeights feed_forward;  // where there are no experts
    const Experts* experts;     // or null
    // [hidden], or null: before attention and the feed-forward layer, and of what these add to the stream.
    const float *attention_norm, *feed_forward_norm, *attention_end_norm, *feed_forward_end_norm;
    const float *query_norm, *key_norm;  // [head_dim], or of all heads, or null
    const Latent* latent;  // or null
    const DeltaNet* delta;  // in place of attention, or null
    Scoring scoring;
    const void* pages;    // of this layer
    const float* scales;  // of its pages, or null
    int32_t table;        // of `cos` and `sin`
    int32_t norms_are_whole;
    int32_t is_gated;  // behind each query is a gate of what that attends to
    int32_t group;     // of layers, whose blocks have its keys and values
};

// Rows [first_row, first_row + tokens): a chunk of one sequence from position `start` on.
struct PrefillChunk {
    const int64_t* block_ids;
    int64_t first_row, tokens, start;
};

// Where the KV of a step's tokens lies in the blocks of a group of layers.
struct GroupRows {
    const int64_t* slots;  // [rows]
    const int64_t *block_ids, *block_starts;  // of the first `decode_rows` rows
    const PrefillChunk* chunks;
};

struct DecoderArguments {
    const DecoderLayer* layers;
    const GroupRows* groups;
    Pages pages;  // but for `data` and `scales`, which each layer has of its own
    float* residual;  // [rows][hidden]: in, and out
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
