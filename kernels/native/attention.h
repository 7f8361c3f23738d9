// Attention of one query over its context. The order of sums is the same whether a row is computed alone
// (paged_decode.cpp) or with others of its prompt (paged_prefill.cpp), so that results depend only on position and
// context, bitwise.
//
// A context is split into stretches of STRETCH tokens, and into pieces of several stretches; both start at multiples of
// their size. A product of query and key is LANES sums, each of every LANES-th number, which are then added in pairs.
// Within a piece a running softmax proceeds stretch by stretch: the sum of weights is also LANES sums, and values are
// added token by token. Then pieces are merged in order, after the sink.
#pragma once

#include <algorithm>
#include <limits>

#include "pages.h"

namespace baton {

constexpr int STRETCH = 64;  // number of tokens whose keys and values stay in the L1 cache
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// How products of query and key are turned into scores. `softcap` 0: no softcap; `sinks` null: no sinks.
struct Scoring {
    float scale;
    float softcap;
    int64_t window;      // number of tokens that a query sees, including its own; 0: all
    const float* sinks;  // [heads], score of a virtual token without a value that every query sees
};

// Tokens that the query at a position sees, and the size of the pieces into which they are split.
struct Seen {
    int64_t first;  // position of the first visible token
    int64_t piece_tokens;

    Seen(int64_t position, const Scoring& scoring)
        : first(scoring.window ? std::max<int64_t>(0, position + 1 - scoring.window) : 0), piece_tokens(PIECE_TOKENS) {
        // One piece less with a window, since the first visible token may be anywhere in the first piece.
        const int64_t tokens = position + 1 - first, pieces = scoring.window ? MOST_PIECES - 1 : MOST_PIECES;
        while (tokens > pieces * piece_tokens) piece_tokens *= 2;
    }

    int64_t first_piece() const { return first / piece_tokens; }
};

// Apply the softcap to `count` scores, a multiple of LANES.
ALWAYS_INLINE void cap_scores(float* scores, int count, float softcap) {
    for (int at = 0; at < count; at += LANES)
        store(scores + at, softcap * hyperbolic_tangent(load(scores + at) / softcap));
}

// Return the number that is subtracted from scores before the exponential: their maximum, or 0 if that is -inf.
ALWAYS_INLINE Floats base_of(Floats highest) { return highest == NOTHING ? Floats{} : highest; }

template <bool in_pairs>
ALWAYS_INLINE Floats weights_of(Floats scores, Floats base) {
    return in_pairs ? exponential_of_two((scores - base) * LOG2_E) : exponential(scores - base);
}

// State of a query's softmax: outputs [value_dim], not yet divided by `total`, which is the sum of weights.
struct Attended {
    float* outputs;
    float highest, total;
};

// Return the initial state of a query's softmax, which includes the sink if there is one.
inline Attended begun(float* outputs, const Scoring& scoring, int64_t head) {
    return scoring.sinks ? Attended{outputs, scoring.sinks[head], 1} : Attended{outputs, NOTHING, 0};
}

// Merge a piece into the earlier pieces. Not inlined, since a compiler might round each inlined copy differently.
__attribute__((noinline)) inline void merge(Attended& into, const Attended& piece, int64_t value_dim) {
    if (piece.highest == NOTHING && !std::isnan(piece.total)) return;  // the query sees no token of the piece
    const float now = std::max(into.highest, piece.highest);
    const Floats base = base_of(broadcast(now));
    const Floats kept = exponential(into.highest - base), added = exponential(piece.highest - base);
    into.total = into.total * kept[0] + piece.total * added[0];
    into.highest = now;
    for (int64_t d = 0; d < value_dim; d += LANES)
        store(into.outputs + d, load(into.outputs + d) * kept + load(piece.outputs + d) * added);
}

}  // namespace baton
