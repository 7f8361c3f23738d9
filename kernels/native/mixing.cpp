#include "mixing.h"

extern "C" void baton_paged_prefill(const baton::PrefillArguments* asked);
extern "C" void baton_paged_decode(const baton::DecodeArguments* asked);
extern "C" void baton_causal_convolution(const baton::Convolution* asked);
extern "C" void baton_gated_delta_rule(const baton::DeltaRule* asked);
extern "C" void baton_state_space_scan(const baton::StateScan* asked);

namespace baton {

float* Mixing::attend(const DecoderLayer& layer, const float* query, int64_t kv_heads, int64_t value_dim) const {
    const Pages pages = pages_of(layer);
    const GroupRows& own = rows_of(layer);
    const int64_t heads = asked_.heads, head_dim = asked_.head_dim;
    float* attended = reserved(rooms_.attended, asked_.rows * heads * value_dim);
    if (asked_.decode_rows) {
        float* parts = reserved(rooms_.parts, asked_.decode_rows * MOST_PIECES * heads * (value_dim + 2));
        const DecodeArguments decode = {pages,
                                        layer.scoring,
                                        query,
                                        attended,
                                        parts,
                                        own.block_ids,
                                        own.block_starts,
                                        asked_.context_tokens,
                                        asked_.decode_rows,
                                        heads,
                                        kv_heads,
                                        head_dim,
                                        value_dim,
                                        asked_.threads};
        baton_paged_decode(&decode);
    }
    for (int64_t c = 0; c < asked_.chunk_count; ++c) {
        const PrefillChunk& chunk = own.chunks[c];
        const PrefillArguments prefill = {pages,
                                          layer.scoring,
                                          query + chunk.first_row * heads * head_dim,
                                          attended + chunk.first_row * heads * value_dim,
                                          chunk.block_ids,
                                          chunk.tokens,
                                          heads,
                                          kv_heads,
                                          head_dim,
                                          value_dim,
                                          chunk.start,
                                          asked_.threads};
        baton_paged_prefill(&prefill);
    }
    return attended;
}

const float* Mixing::heads(const DecoderLayer& layer, float* qkv) const {
    const int64_t heads = asked_.heads, kv_heads = asked_.kv_heads, head_dim = asked_.head_dim;
    const int64_t query_stride = layer.is_gated ? 2 * head_dim : head_dim, angles = angles_of(layer);
    float* query = reserved(rooms_.query, asked_.rows * heads * head_dim);
    rotate_and_store({pages_of(layer), qkv, query, asked_.cos + angles, asked_.sin + angles, rows_of(layer).slots, layer.query_norm,
                      layer.key_norm, asked_.rows, heads, kv_heads, head_dim, query_stride, asked_.rotary_dim, asked_.eps,
                      layer.norms_are_whole, asked_.threads});
    float* attended = attend(layer, query, kv_heads, head_dim);
    if (!layer.is_gated) return attended;
    for_rows(heads * head_dim, [&](int64_t row) {
        const float* gates = qkv + row * layer.qkv.outputs + head_dim;
        float* of_row = attended + row * heads * head_dim;
        for (int64_t head = 0; head < heads; ++head) {
            float* own = of_row + head * head_dim;
            gate_row(gates + head * query_stride, own, head_dim, Gate::sigmoid, own);
        }
    });
    return attended;
}

// Queries of all heads, [rows][heads][nope_dim + rope_dim], whose rows are `stride` apart.
const float* Mixing::latent_queries(const DecoderLayer& layer, const float* made, int64_t& stride) const {
    const Latent& latent = *layer.latent;
    stride = layer.qkv.outputs;
    if (!latent.query_up) return made;
    const int64_t numbers = latent.query_up->inputs;
    float* normal = reserved(rooms_.numbers, asked_.rows * numbers);
    for_rows(numbers, [&](int64_t row) {
        rms_norm_row(made + row * stride, latent.query_norm, numbers, latent.eps, normal + row * numbers);
    });
    stride = latent.query_up->outputs;
    float* queries = reserved(rooms_.projected, asked_.rows * stride);
    linear(normal, asked_.rows, *latent.query_up, queries, false, asked_.threads);
    return queries;
}

// Return a product that is rounded separately, as in PyTorch. Not inlined, so that no addition is fused with it.
__attribute__((noinline)) static Floats product(Floats a, Floats b) { return a * b; }

// Rotate like `rotary` of kernels/norms.py, with bitwise equal numbers. The two numbers of a pair end up half of the
// rotated numbers apart. That does not matter, since queries and keys have the same order.
static void turn(const Latent& latent, const float* x, const float* cos, const float* sin, float* to) {
    const int64_t half = latent.rope_dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, half - i);
        float first[LANES] = {}, second[LANES] = {}, c[LANES] = {}, s[LANES] = {};
        for (int64_t n = 0; n < count; ++n) {
            first[n] = x[latent.is_interleaved ? 2 * (i + n) : i + n];
            second[n] = x[latent.is_interleaved ? 2 * (i + n) + 1 : i + n + half];
            c[n] = cos[i + n], s[n] = sin[i + n];
        }
        const Floats turned = product(load(first), load(c)) - product(load(second), load(s));
        const Floats other = product(load(second), load(c)) + product(load(first), load(s));
        for (int64_t n = 0; n < count; ++n) to[i + n] = turned[n], to[i + n + half] = other[n];
    }
}

const float* Mixing::latent(const DecoderLayer& layer, float* qkv) const {
    const Latent& latent = *layer.latent;
    const int64_t rows = asked_.rows, heads = asked_.heads, width = layer.qkv.outputs;
    const int64_t rank = latent.rank, nope = latent.nope_dim, rope = latent.rope_dim, size = rank + rope;
    const int64_t half = asked_.rotary_dim / 2, angles = angles_of(layer);
    const Pages pages = pages_of(layer);
    const int64_t* slots = rows_of(layer).slots;
    int64_t stride;
    const float* of_heads = latent_queries(layer, qkv, stride);
    float* query = reserved(rooms_.query, rows * heads * size);
    const int64_t padded_rank = latent.to_keys.outputs / heads, padded_value = latent.to_values.outputs / heads;
    float* by_head = reserved(rooms_.by_head, rows * heads * std::max(nope, rank));
    for_rows(heads * size, [&](int64_t row) {
        const float *cos = asked_.cos + angles + row * half, *sin = asked_.sin + angles + row * half;
        for (int64_t head = 0; head < heads; ++head) {
            const float* from = of_heads + row * stride + head * (nope + rope);
            std::copy_n(from, nope, by_head + (head * rows + row) * nope);
            turn(latent, from + nope, cos, sin, query + (row * heads + head) * size + rank);
        }
        if (slots[row] < 0) return;  // the row is padding
        float key[MAX_HEAD_DIM];
        const float* kept = qkv + (row + 1) * width - size;
        rms_norm_row(kept, latent.norm, rank, latent.eps, key);
        turn(latent, kept + rank, cos, sin, key + rank);
        write_numbers(pages, 0, 0, slots[row], key, size);
    });
    float* made = reserved(rooms_.numbers, rows * heads * std::max(padded_rank, padded_value));
    head_linear(by_head, rows, latent.to_keys, heads, made, asked_.threads);
    for_rows(heads * rank, [&](int64_t row) {
        for (int64_t head = 0; head < heads; ++head)
            std::copy_n(made + (head * rows + row) * padded_rank, rank, query + (row * heads + head) * size);
    });
    const float* attended = attend(layer, query, latent.groups, rank);
    for_rows(heads * rank, [&](int64_t row) {
        for (int64_t head = 0; head < heads; ++head)
            std::copy_n(attended + (row * heads + head) * rank, rank, by_head + (head * rows + row) * rank);
    });
    head_linear(by_head, rows, latent.to_values, heads, made, asked_.threads);
    float* values = reserved(rooms_.query, rows * heads * latent.value_dim);
    for_rows(heads * latent.value_dim, [&](int64_t row) {
        for (int64_t head = 0; head < heads; ++head)
            std::copy_n(made + (head * rows + row) * padded_value, latent.value_dim,
                        values + (row * heads + head) * latent.value_dim);
    });
    return values;
}

// Split the row of a projection whose outputs are grouped by key head: write convolution inputs and then gates to
// `mixed`, and one number per value head to `beta` and to `decay`.
static void part_heads(const DeltaNet& net, const float* from, float* mixed, float* beta, float* decay) {
    const int64_t together = net.value_heads / net.key_heads, group = together * net.value_dim;
    const int64_t keys = net.key_heads * net.key_dim, channels = 2 * keys + net.value_heads * net.value_dim;
    for (int64_t head = 0; head < net.key_heads; ++head, from += 2 * net.key_dim + 2 * group) {
        std::copy_n(from, net.key_dim, mixed + head * net.key_dim);
        std::copy_n(from + net.key_dim, net.key_dim, mixed + keys + head * net.key_dim);
        std::copy_n(from + 2 * net.key_dim, group, mixed + 2 * keys + head * group);
        std::copy_n(from + 2 * net.key_dim + group, group, mixed + channels + head * group);
    }
    for (int64_t head = 0; head < net.key_heads; ++head, from += 2 * together) {
        std::copy_n(from, together, beta + head * together);
        std::copy_n(from + together, together, decay + head * together);
    }
}

Mixing::DeltaInputs Mixing::delta_inputs(const DecoderLayer& layer, const float* projected) const {
    const DeltaNet& net = *layer.delta;
    const int64_t rows = asked_.rows, width = layer.qkv.outputs, values = net.value_heads * net.value_dim;
    const int64_t channels = 2 * net.key_heads * net.key_dim + values, apart = channels + values;
    float* beta = reserved(rooms_.numbers, 2 * rows * net.value_heads);
    float* decay = beta + rows * net.value_heads;
    float* parted = reserved(rooms_.projected, net.is_interleaved ? rows * apart : 0);
    for_rows(width, [&](int64_t row) {
        const float* from = projected + row * width;
        float *own_beta = beta + row * net.value_heads, *own_decay = decay + row * net.value_heads;
        if (net.is_interleaved) return part_heads(net, from, parted + row * apart, own_beta, own_decay);
        std::copy_n(from + apart, net.value_heads, own_beta);
        std::copy_n(from + apart + net.value_heads, net.value_heads, own_decay);
    });
    if (net.is_interleaved) return {parted, parted + channels, beta, decay, apart};
    return {projected, projected + channels, beta, decay, width};
}

const float* Mixing::delta(const DecoderLayer& layer, const float* projected) const {
    const DeltaNet& net = *layer.delta;
    const int64_t rows = asked_.rows, keys = net.key_heads * net.key_dim, values = net.value_heads * net.value_dim;
    const int64_t channels = 2 * keys + values;
    const DeltaInputs inputs = delta_inputs(layer, projected);
    float* states = asked_.states + net.first_number;
    float* convolved = reserved(rooms_.query, rows * channels);
    const Convolution convolution = {inputs.mixed,
                                     net.convolution,
                                     nullptr,
                                     convolved,
                                     states + net.value_heads * net.key_dim * net.value_dim,
                                     asked_.runs,
                                     inputs.stride,
                                     asked_.state_stride,
                                     channels,
                                     net.kernel,
                                     true,
                                     asked_.threads};
    baton_causal_convolution(&convolution);
    float* made = reserved(rooms_.attended, rows * values);
    const DeltaRule rule = {convolved,
                            convolved + keys,
                            convolved + 2 * keys,
                            inputs.decay,
                            inputs.beta,
                            net.rate,
                            net.bias,
                            made,
                            states,
                            asked_.runs,
                            channels,
                            channels,
                            channels,
                            asked_.state_stride,
                            net.key_heads,
                            net.value_heads,
                            net.key_dim,
                            net.value_dim,
                            asked_.threads};
    baton_gated_delta_rule(&rule);
    for_rows(values, [&](int64_t row) {
        float* own = made + row * values;
        for (int64_t head = 0; head < net.value_heads; ++head)
            rms_norm_row(own + head * net.value_dim, net.norm, net.value_dim, net.eps, own + head * net.value_dim);
        gate_row(inputs.gates + row * inputs.stride, own, values, Gate::silu, own);
    });
    return made;
}

// Rows of `projected`: gates of inputs, gates of outputs, inputs.
const float* Mixing::convolution(const DecoderLayer& layer, const float* projected) const {
    const ShortConvolution& net = *layer.convolution;
    const int64_t channels = net.channels, width = layer.qkv.outputs;
    float* inputs = reserved(rooms_.query, asked_.rows * channels);
    for_rows(channels, [&](int64_t row) {
        const float* from = projected + row * width;
        for (int64_t i = 0; i < channels; ++i) inputs[row * channels + i] = from[i] * from[2 * channels + i];
    });
    float* made = reserved(rooms_.attended, asked_.rows * channels);
    const Convolution convolution = {inputs,
                                     net.weight,
                                     net.bias,
                                     made,
                                     asked_.states + net.first_number,
                                     asked_.runs,
                                     channels,
                                     asked_.state_stride,
                                     channels,
                                     net.kernel,
                                     false,
                                     asked_.threads};
    baton_causal_convolution(&convolution);
    for_rows(channels, [&](int64_t row) {
        const float* gates = projected + row * width + channels;
        for (int64_t i = 0; i < channels; ++i) made[row * channels + i] *= gates[i];
    });
    return made;
}

// Rows of `projected`: gates, convolution inputs, time steps.
const float* Mixing::mamba(const DecoderLayer& layer, const float* projected) const {
    const Mamba& net = *layer.mamba;
    const int64_t inner = net.heads * net.head_dim, keys = net.groups * net.state_dim, channels = inner + 2 * keys;
    const int64_t rows = asked_.rows, width = layer.qkv.outputs;
    float* states = asked_.states + net.first_number;
    float* convolved = reserved(rooms_.query, rows * channels);
    const Convolution convolution = {projected + inner,
                                     net.convolution,
                                     net.convolution_bias,
                                     convolved,
                                     states + net.heads * net.state_dim * net.head_dim,
                                     asked_.runs,
                                     width,
                                     asked_.state_stride,
                                     channels,
                                     net.kernel,
                                     true,
                                     asked_.threads};
    baton_causal_convolution(&convolution);
    float* made = reserved(rooms_.attended, rows * inner);
    const StateScan scan = {convolved + inner + keys,
                            convolved + inner,
                            convolved,
                            projected + inner + channels,
                            net.rate,
                            net.bias,
                            net.skip,
                            made,
                            states,
                            asked_.runs,
                            channels,
                            channels,
                            channels,
                            width,
                            asked_.state_stride,
                            net.groups,
                            net.heads,
                            net.state_dim,
                            net.head_dim,
                            net.least_step,
                            net.most_step,
                            asked_.threads};
    baton_state_space_scan(&scan);
    const int64_t size = inner / net.groups;
    for_rows(inner, [&](int64_t row) {
        float* own = made + row * inner;
        gate_row(projected + row * width, own, inner, Gate::silu, own);
        for (int64_t at = 0; at < inner; at += size) rms_norm_row(own + at, net.norm + at, size, net.eps, own + at);
    });
    return made;
}

}  // namespace baton
