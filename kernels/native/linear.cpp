// Products of rows and a packed weight. For any number of rows, each output is one sum over the inputs in order, so
// that a row's result depends neither on other rows nor on the number of threads.
//
// For a single tile of rows, a panel is read and prefetched from beginning to end. Many tiles share a stretch of a
// panel, which is unfolded once if it is stored in fewer bits. Meanwhile the next stretch is loaded into the
// L2 cache, which also has the tiles' inputs and sums (the loops of Goto and van de Geijn, "Anatomy of high-performance
// matrix multiplication", with the roles of the operands exchanged).
#include "linear.h"

#include "arguments.h"
#include "groups.h"
#include "inputs.h"
#include "layer.h"
#include "stream.h"
#include "tiled.h"

namespace baton {
namespace {

constexpr int64_t BLOCK_TILES = 20;         // most tiles whose inputs of a stretch stay in the L2 cache
constexpr int64_t TALL_BLOCK_TILES = 9;     // most tiles of MOST_TILED_ROWS rows whose inputs stay there
constexpr int64_t BLOCK_STRIPS = 6;         // most strips whose sums stay in the L2 cache
constexpr int64_t STRETCH_WORDS = 320;      // longest stretch; no group of inputs is longer
constexpr int64_t STREAM_BYTES = 96 << 10;  // most bytes of a weight per task, if there is only one tile
constexpr int64_t AHEAD_BYTES = 4096;       // distance of prefetching in bytes

// Conversion of sums to outputs, for LANES outputs: applies scales, if there are any, and the bias.
template <class Format, bool has_scales>
struct Scaling {
    Floats scale{}, bias{};

    Scaling(const Weight& weight, int64_t output) {
        if (has_scales) scale = load(static_cast<const float*>(weight.scales) + output);
        for (int64_t i = 0; weight.bias && i < std::min<int64_t>(LANES, weight.outputs - output); ++i)
            bias[i] = weight.bias[output + i];
    }
    Floats operator()(typename Format::Sum sum, float row_scale) const {
        if constexpr (has_scales) {
            return __builtin_convertvector(sum, Floats) * scale * row_scale + bias;
        } else {
            return sum + bias;
        }
    }
};

template <class Format, Words kind>
class Product {
   public:
    Product(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, Gate gate, int threads)
        : rows_(rows),
          weight_(weight),
          output_(output),
          accumulate_(accumulate),
          gate_(gate),
          is_gated_(gate != Gate::none),
          threads_(threads),
          steps_((weight.inputs + STEP_INPUTS - 1) / STEP_INPUTS),
          inputs_(x, rows, weight.inputs, steps_ * STEP_INPUTS, weight.group_inputs, threads),
          tiles_(inputs_.tiles),
          strips_((weight.outputs + STRIP - 1) / STRIP / (is_gated_ ? 2 : 1)) {}

    void run() {
        if constexpr (!IS_TILED)
            if (rows_ <= (Format::IS_GROUPED ? MOST_STREAMED_GROUPED_ROWS : MOST_STREAMED_ROWS)) return stream_all();
        const int64_t most_tiles = IS_TILED ? TALL_BLOCK_TILES : BLOCK_TILES;
        const int64_t blocks = (tiles_.count + most_tiles - 1) / most_tiles, strip_bytes = steps_ * STRIP * 4;
        const int64_t most = tiles_.count > 1 ? BLOCK_STRIPS : STREAM_BYTES / strip_bytes;
        const int64_t width = evenly(strips_, blocks, std::max<int64_t>(1, most / (is_gated_ ? 2 : 1)), threads_);
        const int64_t groups = (strips_ + width - 1) / width;
        share(groups * blocks, threads_, [&](int64_t task) {
            const int64_t block = task / groups, strip = task % groups * width;
            compute(tiles_.count * block / blocks, tiles_.count * (block + 1) / blocks, strip,
                    std::min(strips_, strip + width));
        });
    }

   private:
    using Number = typename Format::Number;
    using Sum = typename Format::Sum;
    struct Pair {  // sums of a row and a strip
        Sum halves[2];
    };
    static constexpr int STEP_INPUTS = Format::PARTS * Format::WORD_INPUTS;
    static constexpr bool IS_TILED = kind == Words::tiled;
    static constexpr bool PACES = !IS_TILED && !Format::IS_GROUPED;
    static constexpr bool UNFOLDS = Format::PARTS > 1 && kind != Words::groups;
    static constexpr bool HAS_SCALES = kind == Words::integers || kind == Words::bytes;  // scales per output
    static constexpr bool HAS_CODES = kind == Words::code_groups;
    using Unfolded = std::conditional_t<kind == Words::integers || HAS_CODES, Int16Weight, Float32Weight>;

    // Multiply a single tile by all strips, several strips together. In grouped formats the strips of only one panel
    // are multiplied together, since scales and zero points are address streams too, and a task takes several panels in
    // a row.
    void stream_all() {
        const int64_t kinds = is_gated_ ? 2 : 1, in_panel = std::min<int64_t>({strips_, PANEL / STRIP, MOST_STREAMS / kinds});
        const int64_t width = Format::IS_GROUPED ? in_panel : evenly(strips_, 1, most_streams(rows_) / kinds, threads_);
        const int64_t turns = (strips_ + width - 1) / width, turn_bytes = steps_ * STRIP * 4 * width;
        const int64_t in_row = Format::IS_GROUPED ? evenly(turns, 1, STREAM_BYTES / turn_bytes, threads_) : 1;
        share((turns + in_row - 1) / in_row, threads_, [&](int64_t task) {
            for (int64_t turn = task * in_row; turn < std::min(turns, (task + 1) * in_row); ++turn)
                stream_some(turn * width, std::min(strips_, (turn + 1) * width));
        });
    }

    // Multiply a single tile by some strips; with gates, by the strips of their gates too.
    void stream_some(int64_t first, int64_t end) const {
        Pair sums[MOST_STREAMS * MOST_STREAMED_ROWS];
        int64_t strips[MOST_STREAMS], streams = 0;
        for (int64_t strip = first; strip < end; ++strip) strips[streams++] = strip;
        for (int64_t strip = first; is_gated_ && strip < end; ++strip) strips[streams++] = strips_ + strip;
        if constexpr (Format::IS_GROUPED) {
            GroupedStrip grouped[MOST_STREAMS];
            for (int64_t n = 0; n < streams; ++n) grouped[n] = grouped_strip(strips[n], 0);
            const Groups groups = groups_of(grouped, steps_, true, ahead_of(grouped[0].codes, GROUPS_AHEAD_BYTES));
            STREAM_GROUPS<Format>[rows_ - 1][streams - 1](inputs_.tile(0), groups, sums);
        } else {
            const void* columns[MOST_STREAMS];
            for (int64_t n = 0; n < streams; ++n) columns[n] = numbers(strips[n], 0);
            STREAM<Format, PANEL>[rows_ - 1][streams - 1](inputs_.tile(0), columns, steps_, sums);
        }
        const Pair* made = is_gated_ ? sums + (end - first) * rows_ : sums;
        for (int64_t n = 0; n < end - first; ++n)
            finish(0, is_gated_ ? strips_ + first + n : first + n, made + n * rows_, sums + n * rows_);
    }

    // Multiply some tiles by some strips; with gates, by the strips of their gates before.
    void compute(int64_t first_tile, int64_t end_tile, int64_t first_strip, int64_t end_strip) const {
        const int64_t width = end_strip - first_strip, kinds = is_gated_ ? 2 : 1, strips = width * kinds;
        const int64_t first = tiles_.first_row(first_tile), rows = tiles_.first_row(end_tile) - first;
        // Sums by strip and row, which the thread keeps from one stretch to the next.
        static thread_local std::vector<Pair> room;
        Pair* const kept = reserved(room, strips * rows);
        const auto strip = [&](int64_t n) { return n < width ? first_strip + n : strips_ + first_strip + n - width; };
        const int64_t stretch = unfolds(first_tile, end_tile) || end_tile - first_tile > 1 ? stretch_steps() : steps_;
        for (int64_t begin = 0; begin < steps_; begin += stretch) {
            const int64_t steps = std::min(stretch, steps_ - begin);
            for (int64_t n = 0; n < strips; ++n) {
                const bool is_last = n + 1 == strips;
                const Number* next = numbers(strip(is_last ? 0 : n + 1), is_last ? begin + stretch : begin);
                add({first_tile, end_tile, strip(n), begin, steps, n < strips - width}, next, kept + n * rows,
                    width * rows);
            }
        }
        if constexpr (IS_TILED) release_tiles();  // tile registers in use make context switches slower
    }

    struct Part {
        int64_t first_tile, end_tile, strip, begin, steps;
        bool is_gate;
    };

    // Return whether a stretch is unfolded once for all rows, which pays from three tiles on.
    bool unfolds(int64_t first_tile, int64_t end_tile) const {
        return UNFOLDS && (end_tile - first_tile > 2 || tiles_.rows(first_tile) > Format::MOST_FOLDED_ROWS);
    }

    // Return the number of steps of a stretch. All stretches have about equal length.
    int64_t stretch_steps() const {
        const int64_t unit = unit_steps(), units = (steps_ + unit - 1) / unit;
        const int64_t most = std::max<int64_t>(1, STRETCH_WORDS / Format::PARTS / unit), count = (units + most - 1) / most;
        return (units + count - 1) / count * unit;
    }

    // Return the number of steps that must be in the same stretch.
    int64_t unit_steps() const {
        return IS_TILED ? TILE_WORDS : Format::IS_GROUPED ? weight_.group_inputs / STEP_INPUTS : 1;
    }

    int64_t unit_words() const { return unit_steps() * Format::PARTS + (has_groups(kind) ? GROUP_HEAD_WORDS : 0); }

    GroupedStrip grouped_strip(int64_t strip, int64_t step) const {
        const int64_t output = strip * STRIP, group = step / unit_steps(), groups = steps_ / unit_steps();
        const int64_t at = (output / PANEL * groups + group) * PANEL + output % PANEL;
        return {numbers(strip, step), static_cast<const uint16_t*>(weight_.scales) + at,
                weight_.zeros + (weight_.zeros ? at : 0), weight_.offsets + (weight_.offsets ? at : 0)};
    }

    Groups groups_of(const GroupedStrip* strips, int64_t steps, bool begins, Ahead ahead) const {
        return {strips, steps / unit_steps(), unit_steps(), begins, ahead};
    }

    static Ahead ahead_of(const Number* column, int64_t bytes) {
        return {reinterpret_cast<const char*>(column) + bytes, PANEL * 4};
    }

    const Number* numbers(int64_t strip, int64_t step) const {
        const int64_t output = strip * STRIP;
        return static_cast<const Number*>(weight_.data) + (output / PANEL * steps_ + step) * PANEL + output % PANEL;
    }

    // Add the products of a stretch of a strip to the sums of all rows; after the last stretch write the outputs. sums:
    // [rows]; next: the next stretch; further: distance from the sums of gates to those of their factors.
    void add(const Part& part, const Number* next, Pair* sums, int64_t further) const {
        const Number* column = numbers(part.strip, part.begin);
        const int64_t tiles = part.end_tile - part.first_tile, stretch_bytes = part.steps * PANEL * 4;
        const bool is_first = part.begin == 0, is_last = part.begin + part.steps == steps_;
        alignas(64) static thread_local float room[UNFOLDS ? STRETCH_WORDS * STRIP : 1];
        const bool is_unfolded = unfolds(part.first_tile, part.end_tile);
        if (is_unfolded) unfold(part, column, room);
        const int32_t* const code_sums = tiles > 1 ? sums_of_codes(part, column) : nullptr;
        const int64_t own_steps = is_unfolded ? part.steps * Format::PARTS : part.steps;
        const int64_t requests = HAS_CODES && is_unfolded ? own_steps / CODE_WORDS : own_steps;
        const int64_t asks_bytes = std::min(LINE_BYTES, stretch_bytes / requests);
        for (int64_t tile = part.first_tile; tile < part.end_tile; ++tile) {
            const int64_t rows = tiles_.rows(tile), asked = (tile - part.first_tile) * requests * asks_bytes;
            const uint32_t* x = inputs_.tile(tile) + part.begin / unit_steps() * unit_words() * rows;
            // A single tile prefetches the rest of its panel. Several tiles prefetch the next stretch: in equal parts
            // and at an even pace, so that memory is never waited for, or the first tiles a line per step.
            const char* const upcoming = reinterpret_cast<const char*>(next);
            Ahead ahead = ahead_of(column, Format::IS_GROUPED ? GROUPS_AHEAD_BYTES : AHEAD_BYTES);
            if (tiles > 1 && PACES) {
                const int64_t done_steps = (tile - part.first_tile) * part.steps / tiles;
                ahead = {upcoming + done_steps * PANEL * 4, PANEL * 4, own_steps / part.steps * tiles};
            } else if (tiles > 1 || (HAS_CODES && is_unfolded)) {
                ahead = asked < stretch_bytes ? Ahead{upcoming + asked, asks_bytes} : Ahead{reinterpret_cast<const char*>(x), 0};
            }
            if constexpr (IS_TILED) {
                multiply_tiled(x, rows, column, own_steps, sums, is_first, ahead);
            } else if (is_unfolded) {
                multiply_unfolded(part, x, rows, room, sums, ahead);
            } else if constexpr (Format::IS_GROUPED) {
                GroupedStrip strip = grouped_strip(part.strip, part.begin);
                if (kind == Words::bytes) strip.sums = code_sums;
                MULTIPLY_GROUPS<Format>[rows - 1](x, groups_of(&strip, part.steps, is_first, ahead), sums);
            } else {
                MULTIPLY<Format, PANEL>[rows - 1](x, column, own_steps, sums, is_first, ahead);
            }
            if (is_last && !part.is_gate) finish(tile, part.strip, sums, is_gated_ ? sums - further : sums);
            sums += rows;
        }
    }

    void multiply_unfolded(const Part& part, const uint32_t* x, int64_t rows, const float* unfolded, Pair* sums,
                           Ahead ahead) const {
        if constexpr (HAS_CODES) {
            GroupedStrip strip = grouped_strip(part.strip, part.begin);
            strip.codes = reinterpret_cast<const uint32_t*>(unfolded);
            const int64_t words = unit_steps() * Format::PARTS, count = part.steps / unit_steps();
            MULTIPLY_GROUPS<Unfolded>[rows - 1](x, {&strip, count, words, part.begin == 0, ahead}, sums);
        } else {
            MULTIPLY<Unfolded, STRIP>[rows - 1](x, unfolded, part.steps * Format::PARTS, sums, part.begin == 0, ahead);
        }
    }

    // Unfold a stretch of a strip to floats or pairs of integers, [part.steps * PARTS][STRIP].
    void unfold(const Part& part, const Number* column, float* to) const {
        if constexpr (UNFOLDS) {
            const auto unfold_one = [&](const Format& first, const Format& second, auto n) {
                store(to, reinterpret_cast<Floats>(first.template part<n.value>()));
                store(to + LANES, reinterpret_cast<Floats>(second.template part<n.value>()));
                to += STRIP;
            };
            for (int64_t step = 0; step < part.steps; ++step, column += PANEL)
                for_parts<Format>([&](auto... n) { (unfold_one(Format(column), Format(column + LANES), n), ...); });
        }
    }

    // Return the negated sums of the codes of each group of a stretch of a strip, for int8 with inputs in bytes.
    const int32_t* sums_of_codes(const Part& part, const Number* column) const {
        if constexpr (kind == Words::bytes) {
            static thread_local std::vector<int32_t> room;
            const int64_t groups = part.steps / unit_steps();
            int32_t* const sums = reserved(room, groups * STRIP);
            sum_codes(column, groups, unit_steps(), sums);
            return sums;
        }
        return nullptr;
    }

    // Write a strip's outputs for the rows of a tile; with gates, multiplied by the activations of `gates`.
    void finish(int64_t tile, int64_t strip, const Pair* sums, const Pair* gates) const {
        const int64_t outputs = weight_.outputs / (is_gated_ ? 2 : 1), rows = tiles_.rows(tile), row = tiles_.first_row(tile);
        for (int half = 0; half < 2; ++half) {
            const int64_t output = strip * STRIP + half * LANES, at = is_gated_ ? output - outputs : output;
            const int64_t count = std::min<int64_t>(LANES, outputs - at);
            if (count <= 0) return;
            const Scaling<Format, HAS_SCALES> scaling(weight_, output), gate_scaling(weight_, at);
            float* to = output_ + row * outputs + at;
            for (int64_t r = 0; r < rows; ++r, to += outputs) {
                Floats value = scaling(sums[r].halves[half], scale(row + r));
                if (is_gated_) value = gated(gate_scaling(gates[r].halves[half], scale(row + r)), value, gate_);
                if (count < LANES) {
                    for (int64_t i = 0; i < count; ++i) to[i] = accumulate_ ? to[i] + value[i] : value[i];
                } else {
                    store(to, accumulate_ ? load(to) + value : value);
                }
            }
        }
    }

    float scale(int64_t row) const { return kind == Words::integers ? inputs_.scale(row) : 1; }

    const int64_t rows_;
    const Weight& weight_;
    float* const output_;
    const bool accumulate_;
    const Gate gate_;
    const bool is_gated_;
    const int threads_;
    const int64_t steps_;
    const Inputs<kind> inputs_;
    const Tiles& tiles_;
    const int64_t strips_;  // number of strips of outputs; with gates the weight has twice as many
};

void multiply_all(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, Gate gate,
                  int threads) {
#if defined(BATON_BF16_PRODUCTS)
    using Rounding = Product<PairWeight, Words::pairs>;
#else
    using Rounding = Product<Bfloat16Weight, Words::rounded>;
#endif
    const auto run = [&](auto* kind) {
        std::remove_pointer_t<decltype(kind)>(x, rows, weight, output, accumulate, gate, threads).run();
    };
    if (rows == 0) return;
#if defined(BATON_TILES)
    if (static_cast<Stored>(weight.stored) == Stored::rounding && may_use_tiles())
        return run(static_cast<Product<PairWeight, Words::tiled>*>(nullptr));
#endif
    switch (static_cast<Stored>(weight.stored)) {
        case Stored::float32: return run(static_cast<Product<Float32Weight, Words::floats>*>(nullptr));
        case Stored::bfloat16: return run(static_cast<Product<Bfloat16Weight, Words::floats>*>(nullptr));
        case Stored::rounding: return run(static_cast<Rounding*>(nullptr));
        case Stored::int8:
#if defined(__AVX512VNNI__)
            if (weight.group_inputs) return run(static_cast<Product<ByteWeight, Words::bytes>*>(nullptr));
#endif
            return run(static_cast<Product<Int8Weight, Words::integers>*>(nullptr));
        case Stored::int4: return run(static_cast<Product<Int4Weight, Words::groups>*>(nullptr));
        case Stored::fp4: return run(static_cast<Product<Fp4Weight, Words::groups>*>(nullptr));
        case Stored::code4: return run(static_cast<Product<Code4Weight, Words::code_groups>*>(nullptr));
        case Stored::code8: return run(static_cast<Product<Code8Weight, Words::code_groups>*>(nullptr));
    }
}

}  // namespace

void linear(const float* x, int64_t rows, const Weight& weight, float* output, bool accumulate, int threads) {
    multiply_all(x, rows, weight, output, accumulate, Gate::none, threads);
}

void gated_linear(const float* x, int64_t rows, const Weight& weight, Gate gate, float* output, int threads) {
    if (gate == Gate::relu2) {
        linear(x, rows, weight, output, false, threads);
        share_rows(rows, threads_for(rows * weight.outputs, threads), [&](int64_t row) {
            float* own = output + row * weight.outputs;
            for (int64_t i = 0; i < weight.outputs; ++i) own[i] = own[i] < 0.0f ? 0.0f : own[i] * own[i];
        });
        return;
    }
    if (weight.outputs % (2 * STRIP) == 0) return multiply_all(x, rows, weight, output, false, gate, threads);
    static thread_local std::vector<float> gate_up;
    gate_up.resize(rows * weight.outputs);
    linear(x, rows, weight, gate_up.data(), false, threads);
    gate_mul(gate_up.data(), rows, weight.outputs / 2, gate, output, threads);
}

void head_linear(const float* x, int64_t rows, const Weight& weight, int64_t heads, float* output, int threads) {
    const int64_t outputs = weight.outputs / heads, word_inputs = weight.stored == 0 ? 1 : 2;
    const int64_t head_bytes = outputs * ((weight.inputs + word_inputs - 1) / word_inputs) * 4;
    share(heads, threads, [&](int64_t head) {
        Weight own = weight;
        own.data = static_cast<const char*>(weight.data) + head * head_bytes;
        own.outputs = outputs;
        linear(x + head * rows * weight.inputs, rows, own, output + head * rows * outputs, false, 1);
    });
}

}  // namespace baton

// Return whether int8 weights may have `group_inputs`.
extern "C" int32_t baton_multiplies_bytes() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

extern "C" void baton_linear(const baton::LinearArguments* asked) {
    const auto gate = static_cast<baton::Gate>(asked->gate);
    if (gate != baton::Gate::none) {
        baton::gated_linear(asked->x, asked->rows, asked->weight, gate, asked->output, asked->threads);
    } else {
        baton::linear(asked->x, asked->rows, asked->weight, asked->output, false, asked->threads);
    }
}

extern "C" void baton_head_linear(const baton::HeadLinearArguments* asked) {
    baton::head_linear(asked->x, asked->rows, asked->weight, asked->heads, asked->output, asked->threads);
}
