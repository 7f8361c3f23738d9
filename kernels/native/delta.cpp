#include "delta.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "layer.h"

namespace baton {
namespace {

constexpr int64_t TILE = 64;  // values of a head, or channels, that one thread takes through all rows
constexpr float LENGTH_EPS = 1e-6f;

// What a run begins from, `rows` of `width` numbers at a distance of `stride`.
void begin(Begins how, const float* from, float* to, int64_t rows, int64_t width, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) {
        float* place = to + row * stride;
        if (how == Begins::zero) {
            std::fill_n(place, width, 0.0f);
        } else if (how == Begins::broken) {
            std::fill_n(place, width, std::numeric_limits<float>::quiet_NaN());
        } else if (from != to) {
            std::copy_n(from + row * stride, width, place);
        }
    }
}

void open_tile(float* x, int64_t width) {
    alignas(64) float padded[TILE] = {};
    std::copy_n(x, width, padded);
    for (int64_t i = 0; i < width; i += LANES) store(padded + i, opened(load(padded + i), Gate::silu));
    std::copy_n(padded, width, x);
}

void convolve_tile(const Convolution& asked, int64_t first, int64_t width) {
    const StateRuns& runs = asked.runs;
    const int64_t channels = asked.channels, kernel = asked.kernel;
    for (int64_t run = 0; run < runs.runs; ++run) {
        const Begins how = static_cast<Begins>(runs.begins[run]);
        float* state = asked.states + runs.destinations[run] * asked.block_stride + first;
        begin(how, asked.states + runs.sources[run] * asked.block_stride + first, state, kernel, width, channels);
        for (int64_t row = runs.starts[run]; row < runs.starts[run + 1]; ++row) {
            const float* x = asked.x + row * asked.row_stride + first;
            if (how != Begins::again) {
                for (int64_t tap = 0; tap + 1 < kernel; ++tap) {
                    std::copy_n(state + (tap + 1) * channels, width, state + tap * channels);
                }
                std::copy_n(x, width, state + (kernel - 1) * channels);
            }
            float sums[TILE] = {};
            for (int64_t tap = 0; tap < kernel; ++tap) {
                const float* inputs = state + tap * channels;
                const float* weights = asked.weight + first * kernel + tap;
                for (int64_t i = 0; i < width; ++i) sums[i] += inputs[i] * weights[i * kernel];
            }
            open_tile(sums, width);
            std::copy_n(sums, width, asked.output + row * channels + first);
        }
    }
}

void length_one(const float* x, int64_t size, float scale, float* to) {
    float sum = 0.0f;
    for (int64_t i = 0; i < size; ++i) sum += x[i] * x[i];
    const float factor = scale / std::sqrt(sum + LENGTH_EPS);
    for (int64_t i = 0; i < size; ++i) to[i] = x[i] * factor;
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void delta_tile(const DeltaRule& asked, int64_t head, int64_t first, int64_t width) {
    const StateRuns& runs = asked.runs;
    const int64_t size = asked.key_dim, stride = asked.value_dim;
    const int64_t key_head = head / (asked.value_heads / asked.key_heads);
    const int64_t place = head * size * stride + first;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    std::vector<float> query(size), key(size);
    for (int64_t run = 0; run < runs.runs; ++run) {
        const Begins how = static_cast<Begins>(runs.begins[run]);
        float* __restrict state = asked.states + runs.destinations[run] * asked.block_stride + place;
        begin(how, asked.states + runs.sources[run] * asked.block_stride + place, state, size, width, stride);
        for (int64_t row = runs.starts[run]; row < runs.starts[run + 1]; ++row) {
            length_one(asked.query + row * asked.query_stride + key_head * size, size, scale, query.data());
            float made[TILE] = {};
            if (how == Begins::again) {
                for (int64_t k = 0; k < size; ++k) {
                    for (int64_t i = 0; i < width; ++i) made[i] += state[k * stride + i] * query[k];
                }
            } else {
                length_one(asked.key + row * asked.key_stride + key_head * size, size, 1.0f, key.data());
                const float* value = asked.value + row * asked.value_stride + head * stride + first;
                const int64_t number = row * asked.value_heads + head;
                const float decay = std::exp(asked.rate[head] * softplus(asked.decay[number] + asked.bias[head]));
                const float beta = 1.0f / (1.0f + std::exp(-asked.beta[number]));
                float change[TILE] = {};
                for (int64_t k = 0; k < size; ++k) {
                    for (int64_t i = 0; i < width; ++i) {
                        const float kept = state[k * stride + i] * decay;
                        state[k * stride + i] = kept;
                        change[i] += kept * key[k];
                    }
                }
                for (int64_t i = 0; i < width; ++i) change[i] = (value[i] - change[i]) * beta;
                for (int64_t k = 0; k < size; ++k) {
                    for (int64_t i = 0; i < width; ++i) {
                        const float now = state[k * stride + i] + key[k] * change[i];
                        state[k * stride + i] = now;
                        made[i] += now * query[k];
                    }
                }
            }
            std::copy_n(made, width, asked.output + (row * asked.value_heads + head) * stride + first);
        }
    }
}

}  // namespace
}  // namespace baton

extern "C" void baton_causal_convolution(const baton::Convolution* asked) {
    using namespace baton;
    const int64_t tiles = (asked->channels + TILE - 1) / TILE;
    share(tiles, asked->threads, [&](int64_t tile) {
        convolve_tile(*asked, tile * TILE, std::min(TILE, asked->channels - tile * TILE));
    });
}

extern "C" void baton_gated_delta_rule(const baton::DeltaRule* asked) {
    using namespace baton;
    const int64_t tiles = (asked->value_dim + TILE - 1) / TILE;
    share(asked->value_heads * tiles, asked->threads, [&](int64_t index) {
        const int64_t head = index / tiles, first = index % tiles * TILE;
        delta_tile(*asked, head, first, std::min(TILE, asked->value_dim - first));
    });
}
