// Operations between the matrix products of a decoder layer: norms, rotary embedding, storage of KV, gates.
#pragma once

#include "limits.h"
#include "linear.h"
#include "pages.h"
#include "threads.h"

namespace baton {

// Smallest count of numbers for which it pays to share rows between threads.
constexpr int64_t WORTH_SHARING = 1 << 15;

inline int threads_for(int64_t numbers, int threads) { return numbers >= WORTH_SHARING ? threads : 1; }

inline float sum_of_squares(const float* x, int64_t size) {
    Floats sums{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += load(x + i) * load(x + i);
    float sum = sum_of(sums);
    for (; i < size; ++i) sum += x[i] * x[i];
    return sum;
}

// `to` may be `x`.
inline void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* to) {
    const float inverse = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) to[i] = x[i] * inverse * weight[i];
}

inline void rms_norm(const float* x, const float* weight, int64_t rows, int64_t size, float eps, float* to, int threads) {
    share_rows(rows, threads_for(rows * size, threads),
               [&](int64_t row) { rms_norm_row(x + row * size, weight, size, eps, to + row * size); });
}

// SiLU, or the tanh approximation of GELU, which is the same function with another argument. For arguments below -88
// e^-x overflows, and the quotient is about 0.
inline Floats opened(Floats x, Gate gate) {
    Floats minus = -x;
    if (gate == Gate::gelu) minus = -1.5957691216f * (x + 0.044715f * x * x * x);
    if (gate == Gate::clamped) minus = -SWIGLU_ALPHA * x;
    return x / (1.0f + exponential(minus > 88.0f ? broadcast(88.0f) : minus));
}

// Sigmoid, computed as the softmax of x and 0.
inline Floats sigmoid(Floats x) {
    const Floats largest = larger(x, Floats{}), own = exponential(x - largest);
    return own / (own + exponential(-largest));
}

// Apply the activation to the gate, and multiply by `up`.
inline Floats gated(Floats gate, Floats up, Gate kind) {
    if (kind == Gate::sigmoid) return sigmoid(gate) * up;
    if (kind == Gate::clamped) {
        const Floats limit = broadcast(SWIGLU_LIMIT);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up;
        up = (up < -limit ? -limit : up) + 1.0f;
    }
    return opened(gate, kind) * up;
}

// `to` may be `up`.
inline void gate_row(const float* gate, const float* up, int64_t size, Gate kind, float* to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, gated(load(gate + i), load(up + i), kind));
    for (; i < size; ++i) to[i] = gated(broadcast(gate[i]), broadcast(up[i]), kind)[0];
}

// gate_up: [rows][2 * size], gates in the first half; to: [rows][size].
inline void gate_mul(const float* gate_up, int64_t rows, int64_t size, Gate kind, float* to, int threads) {
    share_rows(rows, threads_for(rows * size, threads), [&](int64_t row) {
        const float* gate = gate_up + row * 2 * size;
        gate_row(gate, gate + size, size, kind, to + row * size);
    });
}

inline void add_rows(const float* x, int64_t rows, int64_t size, float* to, int threads) {
    share_rows(rows, threads_for(rows * size, threads), [&](int64_t row) {
        for (int64_t i = row * size; i < (row + 1) * size; ++i) to[i] += x[i];
    });
}

// Rotate the pairs (i, i + half) of one head by their angles. Numbers from 2 * half on are unchanged. `to` may be
// `head`.
inline void rotate_head(const float* head, const float* cos, const float* sin, int64_t half, int64_t size, float* to) {
    if (to != head) std::copy(head + 2 * half, head + size, to + 2 * half);
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Floats first = load(head + i), second = load(head + i + half), c = load(cos + i), s = load(sin + i);
        store(to + i, first * c - second * s);
        store(to + i + half, second * c + first * s);
    }
    for (; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        to[i] = first * cos[i] - second * sin[i];
        to[i + half] = second * cos[i] + first * sin[i];
    }
}

// Arguments for rows of `qkv`, [rows][heads + 2 * kv_heads][head_dim]. Queries and keys are rotated, and before that
// normalised if there are norms, per head or over all heads of a token. Keys and values are stored in their slots,
// queries in `query`, [rows][heads][head_dim], `query_stride` apart; numbers between them are unchanged.
struct RotateStore {
    Pages pages;
    float* qkv;  // overwritten
    float* query;
    const float *cos, *sin;  // [rows][rotary_dim / 2]
    const int64_t* slots;    // [rows]; negative: keys and values of the row are not stored
    const float *query_norm, *key_norm;  // [head_dim], or [heads * head_dim]; null: no norm
    int64_t rows, heads, kv_heads, head_dim, query_stride, rotary_dim;
    float eps;
    int32_t norms_are_whole;  // whether norms are over all heads of a token
    int32_t threads;
};

inline void store_bfloat16(const float* from, int64_t size, uint16_t* to) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Shorts lanes = lanes_to_bfloat16(load(from + i));
        std::memcpy(to + i, &lanes, sizeof lanes);
    }
    for (; i < size; ++i) to[i] = to_bfloat16(from[i]);
}

// Write one head of one token to the pool, with its scale if the pool has scales. Kind 0: key; kind 1: value.
inline void write_numbers(const Pages& pages, int64_t kind, int64_t head, int64_t slot, const float* from, int64_t size) {
    const int64_t block = slot / pages.block_tokens, token = slot % pages.block_tokens;
    const int64_t at =
        block * pages.block_stride + kind * pages.kind_stride + head * pages.head_stride + token * pages.token_stride;
    const int64_t scale_at =
        block * pages.scale_block_stride + kind * pages.scale_kind_stride + head * pages.scale_head_stride + token;
    auto* data = const_cast<void*>(pages.data);
    with_element(pages.element, [&](auto element) {
        if constexpr (element.value == Element::float32) {
            std::copy_n(from, size, static_cast<float*>(data) + at);
        } else if constexpr (element.value == Element::bfloat16) {
            store_bfloat16(from, size, static_cast<uint16_t*>(data) + at);
        } else {
            auto* bytes = static_cast<uint8_t*>(data) + at;
            const_cast<float*>(pages.scales)[scale_at] = quantise_row<element.value>(from, size, bytes);
        }
    });
}

inline void rotate_and_store_row(const RotateStore& asked, int64_t row) {
    const int64_t head_dim = asked.head_dim, half = asked.rotary_dim / 2, slot = asked.slots[row];
    const int64_t queries_width = asked.heads * asked.query_stride;
    float* queries = asked.qkv + row * (queries_width + 2 * asked.kv_heads * head_dim);
    float* keys = queries + queries_width;  // followed by values
    const bool by_head = asked.query_norm && !asked.norms_are_whole;
    if (asked.query_norm && !by_head) {
        rms_norm_row(queries, asked.query_norm, asked.heads * head_dim, asked.eps, queries);
        rms_norm_row(keys, asked.key_norm, asked.kv_heads * head_dim, asked.eps, keys);
    }
    const auto rotate = [&](float* head, const float* norm, float* to) {
        if (by_head) rms_norm_row(head, norm, head_dim, asked.eps, head);
        rotate_head(head, asked.cos + row * half, asked.sin + row * half, half, head_dim, to);
    };
    for (int64_t head = 0; head < asked.heads; ++head)
        rotate(queries + head * asked.query_stride, asked.query_norm, asked.query + (row * asked.heads + head) * head_dim);
    for (int64_t head = 0; head < asked.kv_heads; ++head)
        rotate(keys + head * head_dim, asked.key_norm, keys + head * head_dim);
    if (slot < 0) return;  // padding
    for (int64_t kind = 0; kind < 2; ++kind) {
        for (int64_t head = 0; head < asked.kv_heads; ++head) {
            const float* from = keys + (kind * asked.kv_heads + head) * head_dim;
            write_numbers(asked.pages, kind, head, slot, from, head_dim);
        }
    }
}

inline void rotate_and_store(const RotateStore& asked) {
    const int64_t numbers = asked.rows * (asked.heads + 2 * asked.kv_heads) * asked.head_dim;
    share_rows(asked.rows, threads_for(numbers, asked.threads), [&](int64_t row) { rotate_and_store_row(asked, row); });
}

}  // namespace baton
