#include "delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "layer.h"

namespace baton {
namespace {

constexpr int64_t TILE = 64;  // values of a head, or channels, for which one thread computes all rows
constexpr float LENGTH_EPS = 1e-6f;

// Write a run's initial state: `rows` rows of `width` numbers, `stride` apart.
void begin(StateInit how, const float* from, float* to, int64_t rows, int64_t width, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) {
        float* place = to + row * stride;
        if (how == StateInit::zero) {
            std::fill_n(place, width, 0.0f);
        } else if (how == StateInit::broken) {
            std::fill_n(place, width, std::numeric_limits<float>::quiet_NaN());
        } else if (from != to) {
            std::copy_n(from + row * stride, width, place);
        }
    }
}

// TILE numbers in registers. A partial tile has `width` numbers and then zeros.
struct Tile {
    Floats parts[TILE / LANES];
};

template <bool is_whole>
ALWAYS_INLINE Tile read_tile(const float* from, int64_t width) {
    alignas(64) float padded[is_whole ? 1 : TILE] = {};
    if constexpr (!is_whole) from = static_cast<const float*>(std::memcpy(padded, from, width * sizeof *from));
    Tile tile;
    for (int64_t n = 0; n < TILE / LANES; ++n) tile.parts[n] = load(from + n * LANES);
    return tile;
}

template <bool is_whole>
ALWAYS_INLINE void write_tile(float* to, const Tile& tile, int64_t width) {
    alignas(64) float padded[is_whole ? 1 : TILE];
    float* const all = is_whole ? to : padded;
    for (int64_t n = 0; n < TILE / LANES; ++n) store(all + n * LANES, tile.parts[n]);
    if constexpr (!is_whole) std::copy_n(padded, width, to);
}

ALWAYS_INLINE void add_times(Tile& sum, const Tile& tile, Floats factor) {
    for (int64_t n = 0; n < TILE / LANES; ++n) sum.parts[n] += tile.parts[n] * factor;
}

// Convolution of a tile of channels. The last `kernel` inputs are in a ring, with the oldest at index `oldest`.
template <bool is_whole>
void convolve_tile(const Convolution& asked, int64_t first, int64_t width) {
    const StateRuns& runs = asked.runs;
    const int64_t channels = asked.channels, kernel = asked.kernel;
    std::vector<Tile> taps(kernel), ring(kernel);  // weights of each tap, and its inputs
    for (int64_t tap = 0; tap < kernel; ++tap) {
        float weights[TILE] = {};
        for (int64_t i = 0; i < width; ++i) weights[i] = asked.weight[(first + i) * kernel + tap];
        taps[tap] = read_tile<true>(weights, TILE);
    }
    const Tile bias = asked.bias ? read_tile<is_whole>(asked.bias + first, width) : Tile{};
    for (int64_t run = 0; run < runs.runs; ++run) {
        const StateInit how = static_cast<StateInit>(runs.begins[run]);
        float* state = asked.states + runs.destinations[run] * asked.block_stride + first;
        begin(how, asked.states + runs.sources[run] * asked.block_stride + first, state, kernel, width, channels);
        for (int64_t tap = 0; tap < kernel; ++tap) ring[tap] = read_tile<is_whole>(state + tap * channels, width);
        int64_t oldest = 0;
        for (int64_t row = runs.starts[run]; row < runs.starts[run + 1]; ++row) {
            if (how != StateInit::again) {
                ring[oldest] = read_tile<is_whole>(asked.x + row * asked.row_stride + first, width);
                oldest = oldest + 1 == kernel ? 0 : oldest + 1;
            }
            Tile sums = bias;
            for (int64_t tap = 0, at = oldest; tap < kernel; ++tap, at = at + 1 == kernel ? 0 : at + 1)
                for (int64_t n = 0; n < TILE / LANES; ++n) sums.parts[n] += ring[at].parts[n] * taps[tap].parts[n];
            if (asked.activates)
                for (Floats& sum : sums.parts) sum = opened(sum, Gate::silu);
            write_tile<is_whole>(asked.output + row * channels + first, sums, width);
        }
        for (int64_t tap = 0; tap < kernel; ++tap)
            write_tile<is_whole>(state + tap * channels, ring[(oldest + tap) % kernel], width);
    }
}

void length_one(const float* x, int64_t size, float scale, float* to) {
    const float factor = scale / std::sqrt(sum_of_squares(x, size) + LENGTH_EPS);
    for (int64_t i = 0; i < size; ++i) to[i] = x[i] * factor;
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Delta rule of one head, for `width` numbers of the value from number `first` on.
template <bool is_whole>
void delta_tile(const DeltaRule& asked, int64_t head, int64_t first, int64_t width) {
    const StateRuns& runs = asked.runs;
    const int64_t size = asked.key_dim, stride = asked.value_dim;
    const int64_t key_head = head / (asked.value_heads / asked.key_heads);
    const int64_t place = head * size * stride + first;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    std::vector<float> query(size), key(size);
    for (int64_t run = 0; run < runs.runs; ++run) {
        const StateInit how = static_cast<StateInit>(runs.begins[run]);
        float* state = asked.states + runs.destinations[run] * asked.block_stride + place;
        begin(how, asked.states + runs.sources[run] * asked.block_stride + place, state, size, width, stride);
        for (int64_t row = runs.starts[run]; row < runs.starts[run + 1]; ++row) {
            length_one(asked.query + row * asked.query_stride + key_head * size, size, scale, query.data());
            Tile made{};
            if (how == StateInit::again) {
                for (int64_t k = 0; k < size; ++k)
                    add_times(made, read_tile<is_whole>(state + k * stride, width), broadcast(query[k]));
            } else {
                length_one(asked.key + row * asked.key_stride + key_head * size, size, 1.0f, key.data());
                const int64_t number = row * asked.value_heads + head;
                const float decay = std::exp(asked.rate[head] * softplus(asked.decay[number] + asked.bias[head]));
                const float beta = 1.0f / (1.0f + std::exp(-asked.beta[number]));
                Tile known{};  // value that the state has for the key, before the decay
                for (int64_t k = 0; k < size; ++k)
                    add_times(known, read_tile<is_whole>(state + k * stride, width), broadcast(key[k]));
                Tile change = read_tile<is_whole>(asked.value + row * asked.value_stride + head * stride + first, width);
                for (int64_t n = 0; n < TILE / LANES; ++n)
                    change.parts[n] = (change.parts[n] - known.parts[n] * decay) * beta;
                for (int64_t k = 0; k < size; ++k) {
                    Tile now = read_tile<is_whole>(state + k * stride, width);
                    for (int64_t n = 0; n < TILE / LANES; ++n)
                        now.parts[n] = now.parts[n] * decay + change.parts[n] * key[k];
                    write_tile<is_whole>(state + k * stride, now, width);
                    add_times(made, now, broadcast(query[k]));
                }
            }
            write_tile<is_whole>(asked.output + (row * asked.value_heads + head) * stride + first, made, width);
        }
    }
}

// Scan of one head, for `width` numbers of the value from number `first` on.
template <bool is_whole>
void scan_tile(const StateScan& asked, int64_t head, int64_t first, int64_t width) {
    const StateRuns& runs = asked.runs;
    const int64_t size = asked.state_dim, stride = asked.head_dim;
    const int64_t group = head / (asked.heads / asked.groups) * size, place = head * size * stride + first;
    for (int64_t run = 0; run < runs.runs; ++run) {
        const StateInit how = static_cast<StateInit>(runs.begins[run]);
        float* state = asked.states + runs.destinations[run] * asked.block_stride + place;
        begin(how, asked.states + runs.sources[run] * asked.block_stride + place, state, size, width, stride);
        for (int64_t row = runs.starts[run]; row < runs.starts[run + 1]; ++row) {
            const float* query = asked.query + row * asked.query_stride + group;
            const float* key = asked.key + row * asked.key_stride + group;
            const Tile value = read_tile<is_whole>(asked.value + row * asked.value_stride + head * stride + first, width);
            const float wanted = softplus(asked.steps[row * asked.step_stride + head] + asked.bias[head]);
            const float step = wanted < asked.least_step ? asked.least_step
                                                         : wanted > asked.most_step ? asked.most_step : wanted;
            const float decay = std::exp(asked.rate[head] * step);
            Tile change{}, made{};
            add_times(change, value, broadcast(step));
            for (int64_t k = 0; k < size; ++k) {
                Tile now = read_tile<is_whole>(state + k * stride, width);
                if (how != StateInit::again) {
                    for (int64_t n = 0; n < TILE / LANES; ++n)
                        now.parts[n] = now.parts[n] * decay + change.parts[n] * key[k];
                    write_tile<is_whole>(state + k * stride, now, width);
                }
                add_times(made, now, broadcast(query[k]));
            }
            add_times(made, value, broadcast(asked.skip[head]));
            write_tile<is_whole>(asked.output + (row * asked.heads + head) * stride + first, made, width);
        }
    }
}

}  // namespace
}  // namespace baton

extern "C" void baton_causal_convolution(const baton::Convolution* asked) {
    using namespace baton;
    const int64_t tiles = (asked->channels + TILE - 1) / TILE;
    share(tiles, asked->threads, [&](int64_t tile) {
        const int64_t width = std::min(TILE, asked->channels - tile * TILE);
        (width == TILE ? convolve_tile<true> : convolve_tile<false>)(*asked, tile * TILE, width);
    });
}

extern "C" void baton_gated_delta_rule(const baton::DeltaRule* asked) {
    using namespace baton;
    const int64_t tiles = (asked->value_dim + TILE - 1) / TILE;
    share(asked->value_heads * tiles, asked->threads, [&](int64_t index) {
        const int64_t head = index / tiles, first = index % tiles * TILE;
        const int64_t width = std::min(TILE, asked->value_dim - first);
        (width == TILE ? delta_tile<true> : delta_tile<false>)(*asked, head, first, width);
    });
}

extern "C" void baton_state_space_scan(const baton::StateScan* asked) {
    using namespace baton;
    const int64_t tiles = (asked->head_dim + TILE - 1) / TILE;
    share(asked->heads * tiles, asked->threads, [&](int64_t index) {
        const int64_t head = index / tiles, first = index % tiles * TILE;
        const int64_t width = std::min(TILE, asked->head_dim - first);
        (width == TILE ? scan_tile<true> : scan_tile<false>)(*asked, head, first, width);
    });
}
