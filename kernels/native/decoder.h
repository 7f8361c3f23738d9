// Structs of decoder layers, in addition to those of `arguments.h`. They only borrow memory.
#pragma once

#include "arguments.h"
#include "delta.h"
#include "experts.h"

namespace baton {

// Multi-head latent attention (engine/models/latent.py): one row per token is stored for all heads.
struct Latent {
    const Weight* query_up;   // weight that computes all queries; null: `qkv` computes them
    const float* query_norm;  // [inputs of `query_up`]; null without `query_up`
    const float* norm;        // [rank]
    Weight to_keys, to_values;  // weights of all heads, nope_dim to rank and rank to value_dim, in complete panels
    int64_t rank, nope_dim, rope_dim, value_dim;
    int64_t groups;  // number of groups of heads that share one read of a stored row
    float eps;
    int32_t is_interleaved;  // whether the two numbers of a rotated pair are adjacent
};

// Gated delta net (engine/models/delta_net.py).
struct DeltaNet {
    const float* convolution;  // [channels][kernel]
    const float *rate, *bias;  // [value_heads]
    const float* norm;         // [value_dim]
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    int64_t first_number;  // offset of the layer's state in a block, in numbers
    float eps;
    int32_t is_interleaved;  // whether the outputs of `qkv` are grouped by key head
};

// Gated short convolution (engine/models/short_convolution.py).
struct ShortConvolution {
    const float* weight;  // [channels][kernel]
    const float* bias;    // [channels]; null: no bias
    int64_t channels, kernel;
    int64_t first_number;  // offset of the layer's state in a block, in numbers
};

// Mamba2 layer (engine/models/mamba.py).
struct Mamba {
    const float* convolution;       // [channels][kernel]
    const float* convolution_bias;  // [channels]; null: no bias
    const float *rate, *bias, *skip;  // [heads]
    const float* norm;                // [heads * head_dim]
    int64_t groups, heads, state_dim, head_dim, kernel;
    int64_t first_number;  // offset of the layer's state in a block, in numbers
    float least_step, most_step, eps;
};

struct DecoderLayer {
    Weight qkv, output;         // without data: the layer only feeds forward
    GatedWeights feed_forward;  // only without experts; without data: the layer only mixes tokens
    const Experts* experts;     // null: the layer has no experts
    // Norm weights [hidden], null: no norm. For the inputs and the outputs (end) of attention and feed-forward layer.
    const float *attention_norm, *feed_forward_norm, *attention_end_norm, *feed_forward_end_norm;
    const float *query_norm, *key_norm;  // [head_dim], or [heads * head_dim]; null: no norm
    const Latent* latent;  // null: attention is not latent
    // Replacements of attention, at most one; null: the layer has none.
    const DeltaNet* delta;
    const ShortConvolution* convolution;
    const Mamba* mamba;
    Scoring scoring;
    const void* pages;    // data of this layer's pages
    const float* scales;  // scales of this layer's pages; null: not quantised
    int32_t table;        // index of the table in `cos` and `sin`
    int32_t norms_are_whole;
    int32_t is_gated;  // whether each query is followed by a gate for its attention output
    int32_t group;     // index of the layer group whose blocks the layer uses
};

// Rows [first_row, first_row + tokens): a chunk of one sequence that begins at position `start`.
struct PrefillChunk {
    const int64_t* block_ids;
    int64_t first_row, tokens, start;
};

// KV locations of a step's tokens in the blocks of one layer group.
struct GroupRows {
    const int64_t* slots;  // [rows]
    const int64_t *block_ids, *block_starts;  // blocks of the first `decode_rows` rows
    const PrefillChunk* chunks;
};

struct DecoderArguments {
    const DecoderLayer* layers;
    const GroupRows* groups;
    Pages pages;  // `data` and `scales` are unused: each layer has its own
    float* residual;  // [rows][hidden], input and output
    const float *cos, *sin;  // [tables][rows][rotary_dim / 2]
    const int64_t* context_tokens;  // [decode_rows]
    StateRuns runs;  // runs of rows, for recurrent layers
    float* states;   // [blocks][state_stride]; null: no layer is recurrent
    int64_t state_stride;
    int64_t layer_count, chunk_count, rows, decode_rows;
    int64_t hidden, heads, kv_heads, head_dim, rotary_dim;
    float eps;
    int32_t threads;
};

}  // namespace baton
