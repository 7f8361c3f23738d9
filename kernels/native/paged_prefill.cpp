// Attention of a chunk of one sequence over its paged KV. Contract: kernels/attention.py.
#include "attention_pairs.h"
#include "arguments.h"

namespace baton {
namespace {

// Consecutive tokens of a chunk whose contexts have pieces of equal size, for one KV head.
template <Element element>
class PrefillTask {
   public:
    PrefillTask(const PrefillArguments& asked, int64_t kv_head, int64_t first_token, int64_t tokens)
        : asked_(asked),
          kv_head_(kv_head),
          first_token_(first_token),
          head_dim_(static_cast<int>(asked.head_dim)),
          value_dim_(static_cast<int>(asked.value_dim)),
          group_(static_cast<int>(asked.heads / asked.kv_heads)),
          rows_{static_cast<int>(tokens) * group_, head_dim_, value_dim_, queries_, positions_, of_piece_} {
        for (int r = 0; r < rows_.count; ++r) {
            const int64_t token = first_token + r / group_, head = kv_head * group_ + r % group_;
            std::copy_n(asked.query + (token * asked.heads + head) * head_dim_, head_dim_, queries_ + r * head_dim_);
            positions_[r] = asked.start + token;
            heads_[r] = static_cast<int32_t>(head);
        }
        std::fill_n(outputs_, rows_.count * value_dim_, 0.0f);
        for (int r = 0; r < rows_.count; ++r) all_[r] = begun(outputs_ + r * value_dim_, asked.scoring, heads_[r]);
    }

    void run() {
        const Seen seen(positions_[0], asked_.scoring);
        const int64_t end = positions_[rows_.count - 1] + 1;
        for (int64_t piece = seen.first_piece(); piece * seen.piece_tokens < end; ++piece) {
            const int64_t first = piece * seen.piece_tokens;
            clear_piece();
            attend_piece(std::max(first, seen.first / STRETCH * STRETCH), std::min(end, first + seen.piece_tokens));
            for (int r = 0; r < rows_.count; ++r) merge(all_[r], of_piece_[r], value_dim_);
        }
        for (int r = 0; r < rows_.count; ++r) {
            float* output = asked_.output + ((first_token_ + r / group_) * asked_.heads + heads_[r]) * value_dim_;
            for (int d = 0; d < value_dim_; ++d) output[d] = all_[r].outputs[d] / all_[r].total;
        }
    }

   private:
    void clear_piece() {
        std::fill_n(piece_outputs_, rows_.count * value_dim_, 0.0f);
        for (int r = 0; r < rows_.count; ++r) of_piece_[r] = {piece_outputs_ + r * value_dim_, NOTHING, 0};
    }

    void attend_piece(int64_t begin, int64_t end) {
        const HeadRows<element> keys(asked_.pages, asked_.block_ids, 0, kv_head_);
        const HeadRows<element> values(asked_.pages, asked_.block_ids, 1, kv_head_);
        const auto attend_tiles = [&](auto& tile, const auto& attend_tile) {
            for (int64_t first = begin; first < end; first += STRETCH) {
                const int tokens = static_cast<int>(std::min<int64_t>(STRETCH, end - first));
                fill(tile, keys, values, first, tokens, head_dim_, value_dim_);
                attend_tile();
            }
        };
#if defined(BATON_BF16_PRODUCTS)
        if constexpr (element == Element::bfloat16) {
            if (head_dim_ % (2 * LANES) == 0 && value_dim_ % (2 * LANES) == 0) {
                PairTile tile;
                alignas(64) uint32_t queries[MAX_GROUP * MAX_HEAD_DIM / 2];
                for (int at = 0; at < rows_.count * head_dim_; at += 2 * LANES)
                    reinterpret_cast<Ints&>(queries[at / 2]) = to_words(load(queries_ + at), load(queries_ + at + LANES));
                return attend_tiles(tile, [&] { attend(rows_, queries, tile, asked_.scoring); });
            }
        }
#endif
        Tile tile;
        attend_tiles(tile, [&] { attend<is_scaled(element)>(rows_, tile, asked_.scoring); });
    }

    const PrefillArguments& asked_;
    const int64_t kv_head_, first_token_;
    const int head_dim_, value_dim_, group_;
    alignas(64) float queries_[MAX_GROUP * MAX_HEAD_DIM];
    alignas(64) float outputs_[MAX_GROUP * MAX_HEAD_DIM];
    alignas(64) float piece_outputs_[MAX_GROUP * MAX_HEAD_DIM];
    int64_t positions_[MAX_GROUP];
    int32_t heads_[MAX_GROUP];
    Attended all_[MAX_GROUP], of_piece_[MAX_GROUP];
    const Rows rows_;
};

template <Element element>
void prefill(const PrefillArguments& asked) {
    const int64_t group = asked.heads / asked.kv_heads;
    const int64_t stride = std::max<int64_t>(1, MAX_GROUP / group);
    const int64_t tiles = (asked.tokens + stride - 1) / stride;
    const auto piece_tokens = [&](int64_t token) { return Seen(asked.start + token, asked.scoring).piece_tokens; };
    share(tiles * asked.kv_heads, asked.threads, [&](int64_t task) {
        const int64_t first = task / asked.kv_heads * stride, end = std::min(first + stride, asked.tokens);
        for (int64_t begin = first, next = first; begin < end; begin = next) {
            while (next < end && piece_tokens(next) == piece_tokens(begin)) ++next;
            PrefillTask<element>(asked, task % asked.kv_heads, begin, next - begin).run();
        }
    });
}

}  // namespace
}  // namespace baton

extern "C" void baton_paged_prefill(const baton::PrefillArguments* asked) {
    baton::with_element(asked->pages.element, [&](auto element) { baton::prefill<element.value>(*asked); });
}
