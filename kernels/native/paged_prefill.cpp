// Attention of a chunk of one sequence over its paged KV. Contract: kernels/attention.py.
#include "attention_pairs.h"
#include "arguments.h"

namespace baton {
namespace {

// Queries that share one conversion of a tile of keys and values: a multiple of those that are computed at once.
constexpr int MOST_ROWS = 72;

template <Element element>
struct PrefillTask {
    const PrefillArguments& asked;
    int64_t kv_head, first_token;
    int tokens;

    void run() const {
        const int head_dim = static_cast<int>(asked.head_dim), group = static_cast<int>(asked.heads / asked.kv_heads);
        alignas(64) float queries[MOST_ROWS * MAX_HEAD_DIM], outputs[MOST_ROWS * MAX_HEAD_DIM];
        float highest[MOST_ROWS], totals[MOST_ROWS];
        int64_t positions[MOST_ROWS];
        int32_t heads[MOST_ROWS];
        const Rows rows = {tokens * group, head_dim, queries, positions, heads, outputs, highest, totals};
        for (int r = 0; r < rows.count; ++r) {
            const int64_t token = first_token + r / group, head = kv_head * group + r % group;
            const float* query = asked.query + (token * asked.heads + head) * head_dim;
            for (int d = 0; d < head_dim; ++d) queries[r * head_dim + d] = query[d] * asked.scoring.scale;
            std::fill_n(outputs + r * head_dim, head_dim, 0.0f);
            positions[r] = asked.start + token;
            heads[r] = static_cast<int32_t>(head);
            highest[r] = NOTHING;
            totals[r] = 0;
        }
        attend_context(rows);
        for (int r = 0; r < rows.count; ++r) {
            float* output = asked.output + ((first_token + r / group) * asked.heads + heads[r]) * head_dim;
            for (int d = 0; d < head_dim; ++d) output[d] = outputs[r * head_dim + d] / totals[r];
        }
    }

    void attend_context(const Rows& rows) const {
        const HeadRows<element> keys(asked.pages, asked.block_ids, 0, kv_head);
        const HeadRows<element> values(asked.pages, asked.block_ids, 1, kv_head);
        const int64_t window = asked.scoring.window, end = rows.positions[rows.count - 1] + 1;
        const int64_t begin = window ? std::max<int64_t>(0, rows.positions[0] + 1 - window) : 0;
        const auto attend_tiles = [&](auto& tile, const auto&... queries) {
            for (int64_t first = begin; first < end; first += TILE) {
                fill(tile, keys, values, first, static_cast<int>(std::min<int64_t>(TILE, end - first)), rows.head_dim);
                attend(rows, queries..., tile, asked.scoring);
            }
        };
#if defined(BATON_BF16_PRODUCTS)
        if constexpr (element == Element::bfloat16) {
            if (rows.head_dim % (2 * LANES) == 0) {
                PairTile tile;
                alignas(64) uint32_t queries[MOST_ROWS * MAX_HEAD_DIM / 2];
                for (int at = 0; at < rows.count * rows.head_dim; at += 2 * LANES)
                    reinterpret_cast<Ints&>(queries[at / 2]) = to_words(load(rows.queries + at), load(rows.queries + at + LANES));
                const uint32_t* words = queries;
                return attend_tiles(tile, words);
            }
        }
#endif
        Tile tile;
        attend_tiles(tile);
    }
};

template <Element element>
void prefill(const PrefillArguments& asked) {
    const int64_t group = asked.heads / asked.kv_heads;
    const int64_t stride = std::max<int64_t>(1, MOST_ROWS / group);
    const int64_t tiles = (asked.tokens + stride - 1) / stride;
    share(tiles * asked.kv_heads, asked.threads, [&](int64_t task) {
        const int64_t first = task / asked.kv_heads * stride;
        const int tokens = static_cast<int>(std::min(stride, asked.tokens - first));
        PrefillTask<element>{asked, task % asked.kv_heads, first, tokens}.run();
    });
}

}  // namespace
}  // namespace baton

extern "C" void baton_paged_prefill(const baton::PrefillArguments* asked) {
    using baton::Element;
    switch (static_cast<Element>(asked->pages.element)) {
        case Element::float32: return baton::prefill<Element::float32>(*asked);
        case Element::bfloat16: return baton::prefill<Element::bfloat16>(*asked);
        case Element::e4m3: return baton::prefill<Element::e4m3>(*asked);
        case Element::e5m2: return baton::prefill<Element::e5m2>(*asked);
        case Element::int8: return baton::prefill<Element::int8>(*asked);
    }
}
