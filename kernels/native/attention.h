// Attention of one query over its context, with one order of sums whether a row is computed alone (paged_decode.cpp) or
// with others of its prompt (paged_prefill.cpp): results depend bitwise on position and context alone.
//
// Stretches of STRETCH tokens start at multiples of that, and pieces of several stretches at multiples of theirs. A
// product of query and key is LANES sums, of every LANES-th number, which are added by pairs. Within a piece a running
// softmax proceeds stretch by stretch: the sum of weights is also LANES sums, and values are added token by token.
// Pieces are merged in order, after the sink.
#pragma once

#include <algorithm>
#include <limits>

#include "pages.h"

namespace baton {

constexpr int STRETCH = 64;  // tokens: their keys and values stay in the L1 cache
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Conversion of products of query and key into scores. `softcap` and `sinks` may be missing (0, null).
struct Scoring {
    float scale;
    float softcap;
    int64_t window;      // tokens a query sees, including its own; 0: all
    const float* sinks;  // [heads], scores of a virtual token without a value that every query sees
};

// Visible tokens of the query at a position, and their pieces.
struct Seen {
    int64_t first;  // position
    int64_t piece_tokens;

    Seen(int64_t position, const Scoring& scoring)
        : first(scoring.window ? std::max<int64_t>(0, position + 1 - scoring.window) : 0), piece_tokens(PIECE_TOKENS) {
        // With a window, tokens may begin anywhere in the first piece.
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

// Base of the exponentials of scores, whose maximum is `highest`.
ALWAYS_INLINE Floats base_of(Floats highest) { return highest == NOTHING ? Floats{} : highest; }

template <bool in_pairs>
ALWAYS_INLINE Floats weights_of(Floats scores, Floats base) {
    return in_pairs ? exponential_of_two((scores - base) * LOG2_E) : exponential(scores - base);
}

// State of a query: outputs [value_dim], not yet divided by `total`, the sum of weights.
struct Attended {
    float* outputs;
    float highest, total;
};

// Initial state: the sink, if there is one.
inline Attended begun(float* outputs, const Scoring& scoring, int64_t head) {
    return scoring.sinks ? Attended{outputs, scoring.sinks[head], 1} : Attended{outputs, NOTHING, 0};
}

// Merge a piece into the earlier ones. Not inlined, since a compiler might round copies differently.
__attribute__((noinline)) inline void merge(Attended& into, const Attended& piece, int64_t value_dim) {
    if (piece.highest == NOTHING && !std::isnan(piece.total)) return;  // nothing visible
    const float now = std::max(into.highest, piece.highest);
    const Floats base = base_of(broadcast(now));
    const Floats kept = exponential(into.highest - base), added = exponential(piece.highest - base);
    into.total = into.total * kept[0] + piece.total * added[0];
    into.highest = now;
    for (int64_t d = 0; d < value_dim; d += LANES)
        store(into.outputs + d, load(into.outputs + d) * kept + load(piece.outputs + d) * added);
}

}  // namespace baton
