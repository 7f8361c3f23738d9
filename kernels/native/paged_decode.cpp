// Attention of one new token of each of many sequences over their paged KV. Contract: kernels/paged_decode.py.
//
// Keys are read once, as they lie: one token's key against every query of its group, sixteen tokens' sums at a time.
// A long context is split, so that all threads have work, and the parts are combined by their highest scores.
#include "attention.h"
#include "arguments.h"

namespace baton {
namespace {

constexpr int AT_ONCE = 4;   // queries of a group
constexpr int STRETCH = 32;  // tokens: keys and values of so many stay in the nearest cache

template <Element element>
class DecodePart {
   public:
    DecodePart(const DecodeArguments& asked, int64_t sequence, int64_t kv_head, int64_t split)
        : asked_(asked),
          head_dim_(static_cast<int>(asked.head_dim)),
          group_(static_cast<int>(asked.heads / asked.kv_heads)),
          position_(asked.context_tokens[sequence] - 1),
          first_head_(kv_head * group_),
          block_ids_(asked.block_ids + asked.block_starts[sequence]),
          keys_(asked.pages, block_ids_, 0, kv_head),
          values_(asked.pages, block_ids_, 1, kv_head),
          query_(asked.query + (sequence * asked.heads + first_head_) * head_dim_),
          part_(asked.parts + ((sequence * asked.kv_heads + kv_head) * asked.splits + split) * group_ * (head_dim_ + 2)) {
        const int64_t window = asked.scoring.window;
        const int64_t from = window ? std::max<int64_t>(0, position_ + 1 - window) : 0;
        const int64_t tiles = (position_ + 1 - from + STRETCH - 1) / STRETCH;
        begin_ = from + tiles * split / asked.splits * STRETCH;
        end_ = std::min(position_ + 1, from + tiles * (split + 1) / asked.splits * STRETCH);
    }

    void run() {
        for (int g = 0; g < group_; ++g) {
            std::fill_n(outputs(g), head_dim_, 0.0f);
            highest(g) = NOTHING;
            total(g) = 0;
        }
        for (int64_t first = begin_; first < end_; first += STRETCH) {
            const int tokens = static_cast<int>(std::min<int64_t>(STRETCH, end_ - first));
            const int64_t following = std::min<int64_t>(STRETCH, end_ - first - tokens);
            keys_.prefetch(first + STRETCH, following, head_dim_);
            values_.prefetch(first + STRETCH, following, head_dim_);
            keys_.read(first, tokens, head_dim_, scratch_, rows_);
            for (int token = tokens; token < STRETCH; ++token) rows_[token] = ZEROS;
            for (int g = 0; g < group_; ++g) shrink_[g] = score(g, first, tokens);
            values_.read(first, tokens, head_dim_, scratch_, rows_);
            int g = 0;
            for (; g + AT_ONCE <= group_; g += AT_ONCE) add<AT_ONCE>(g, tokens);
            switch (group_ - g) {
                case 3: add<3>(g, tokens); break;
                case 2: add<2>(g, tokens); break;
                case 1: add<1>(g, tokens); break;
            }
        }
    }

   private:
    float* outputs(int g) { return part_ + g * (head_dim_ + 2); }
    float& highest(int g) { return outputs(g)[head_dim_]; }
    float& total(int g) { return outputs(g)[head_dim_ + 1]; }

    // Weights of one query over a tile; returns what its earlier outputs are to be multiplied by.
    float score(int g, int64_t first, int tokens) {
        float* scores = weights_ + g * STRETCH;
        const float* query = query_ + g * head_dim_;
        for (int half = 0; half < STRETCH; half += LANES) {
            Floats sums[LANES] = {};
            for (int d = 0; d < head_dim_; d += LANES) {
                const Floats part = load(query + d);
                for (int token = 0; token < LANES; ++token) sums[token] += part * load(rows_[half + token] + d);
            }
            store(scores + half, sums_of(sums) * asked_.scoring.scale);
        }
        if (asked_.scoring.softcap != 0 || asked_.scoring.slopes)
            adjust(scores, STRETCH, asked_.scoring, static_cast<int32_t>(first_head_ + g), position_ - first);
        for (int token = tokens; token < STRETCH; ++token) scores[token] = NOTHING;
        return weigh(scores, STRETCH, highest(g), total(g));
    }

    template <int queries>
    void add(int first, int tokens) {
        add_values<queries, STRETCH>(outputs(first), head_dim_ + 2, head_dim_, shrink_ + first, weights_ + first * STRETCH, rows_,
                            tokens);
    }

    static constexpr int MAX_GROUP = 64;

    const DecodeArguments& asked_;
    const int head_dim_, group_;
    const int64_t position_, first_head_;
    const int64_t* block_ids_;
    const HeadRows<element> keys_, values_;
    const float* query_;
    float* part_;
    int64_t begin_, end_;
    const float* rows_[STRETCH];
    float shrink_[MAX_GROUP];
    alignas(64) float weights_[MAX_GROUP * STRETCH];
    alignas(64) float scratch_[STRETCH * MAX_HEAD_DIM];
};

// Adds up the parts of one query: [splits][group][head_dim + 2], `part` the first one of this query.
void combine(const float* part, int64_t splits, int64_t stride, int head_dim, float* output) {
    float highest = NOTHING, total = 0;
    for (int64_t split = 0; split < splits; ++split) highest = std::max(highest, part[split * stride + head_dim]);
    std::fill_n(output, head_dim, 0.0f);
    for (int64_t split = 0; split < splits; ++split) {
        const float* from = part + split * stride;
        if (from[head_dim] == NOTHING && !std::isnan(from[head_dim + 1])) continue;  // nothing visible in it
        const float share = std::exp(from[head_dim] - highest);
        total += from[head_dim + 1] * share;
        for (int d = 0; d < head_dim; ++d) output[d] += from[d] * share;
    }
    for (int d = 0; d < head_dim; ++d) output[d] /= total;
}

template <Element element>
void decode(const DecodeArguments& asked) {
    const int64_t tasks = asked.sequences * asked.kv_heads * asked.splits;
#pragma omp parallel for schedule(dynamic) num_threads(asked.threads) if (asked.threads > 1)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t split = task % asked.splits, pair = task / asked.splits;
        DecodePart<element>(asked, pair / asked.kv_heads, pair % asked.kv_heads, split).run();
    }
    const int64_t group = asked.heads / asked.kv_heads, width = asked.head_dim + 2;
    for (int64_t row = 0; row < asked.sequences * asked.heads; ++row) {
        const float* part = asked.parts + (row / group * asked.splits * group + row % group) * width;
        combine(part, asked.splits, group * width, static_cast<int>(asked.head_dim), asked.output + row * asked.head_dim);
    }
}

}  // namespace
}  // namespace baton

extern "C" void baton_paged_decode(const baton::DecodeArguments* asked) {
    using baton::Element;
    switch (static_cast<Element>(asked->pages.element)) {
        case Element::float32: return baton::decode<Element::float32>(*asked);
        case Element::bfloat16: return baton::decode<Element::bfloat16>(*asked);
        case Element::e4m3: return baton::decode<Element::e4m3>(*asked);
        case Element::e5m2: return baton::decode<Element::e5m2>(*asked);
        case Element::int8: return baton::decode<Element::int8>(*asked);
    }
}
