// Attention of one new token of many sequences over paged KV. Contract: kernels/attention.py.
//
// The pieces of a context depend only on its length, so that no result depends on other sequences or on the number of
// threads. Threads share the pieces, and the KV heads if there are few pieces. Within a piece all heads are computed
// together, stretch by stretch, since they are adjacent in a block.
#include "arguments.h"
#include "decode_group.h"

namespace baton {
namespace {

template <Element element>
class DecodePiece {
   public:
    // Compute a piece for KV heads [first_head, end_head).
    DecodePiece(const DecodeArguments& asked, int64_t sequence, int64_t piece, int64_t first_head, int64_t end_head)
        : asked_(asked),
          head_dim_(static_cast<int>(asked.head_dim)),
          value_dim_(static_cast<int>(asked.value_dim)),
          group_(static_cast<int>(asked.heads / asked.kv_heads)),
          position_(asked.context_tokens[sequence] - 1),
          block_ids_(asked.block_ids + asked.block_starts[sequence]),
          query_(asked.query + sequence * asked.heads * head_dim_),
          part_(asked.parts + (sequence * MOST_PIECES + piece) * asked.heads * (value_dim_ + 2)),
          first_head_(first_head),
          end_head_(end_head) {
        const Seen seen(position_, asked.scoring);
        const int64_t first = (seen.first_piece() + piece) * seen.piece_tokens;
        seen_from_ = seen.first;
        begin_ = std::max(first, seen.first / STRETCH * STRETCH);
        end_ = std::min(position_ + 1, first + seen.piece_tokens);
    }

    static int64_t pieces_of(const DecodeArguments& asked, int64_t sequence) {
        const int64_t context = asked.context_tokens[sequence];
        if (context == 0) return 0;  // the row is padding
        const Seen seen(context - 1, asked.scoring);
        return (context - 1) / seen.piece_tokens - seen.first_piece() + 1;
    }

    void run() {
        for (int64_t head = first_head_ * group_; head < end_head_ * group_; ++head) {
            std::fill_n(part_ + head * value_dim_, value_dim_, 0.0f);
            highest_[head] = NOTHING;
            totals_[head] = 0;
        }
        Stretch *keys = &stretches_[0], *ahead = &stretches_[1];
        find(*keys, 0, first_head_, begin_);
        for (int64_t first = begin_; first < end_; first += STRETCH) {
            for (int64_t head = first_head_; head < end_head_; ++head) {
                find(values_, 1, head, first);
                const bool last = head + 1 == end_head_;
                find(*ahead, 0, last ? first_head_ : head + 1, last ? first + STRETCH : first);
                attend(head, *keys, *ahead);
                std::swap(keys, ahead);
            }
        }
        float* sums = part_ + asked_.heads * value_dim_;
        for (int64_t head = first_head_ * group_; head < end_head_ * group_; ++head) {
            sums[head] = highest_[head];
            sums[asked_.heads + head] = totals_[head];
        }
    }

   private:
    void find(Stretch& stretch, int64_t kind, int64_t head, int64_t first) const {
        stretch.tokens = static_cast<int>(std::clamp<int64_t>(end_ - first, 0, STRETCH));
        stretch.hidden = static_cast<int>(std::max<int64_t>(seen_from_ - first, 0));
        HeadRows<element>(asked_.pages, block_ids_, kind, head).find(first, stretch.tokens, stretch.rows, stretch.scales);
        for (int token = stretch.tokens; token < STRETCH; ++token) {
            stretch.rows[token] = ZEROS;
            stretch.scales[token] = 0;
        }
    }

    void attend(int64_t head, const Stretch& keys, const Stretch& ahead) {
        int done = 0;
        while (group_ - done >= MOST_QUERIES) done += attend_queries<MOST_QUERIES>(head, done, keys, ahead);
        while (done < group_) {
            switch (std::min(group_ - done, MOST_QUERIES - 1)) {
                case 7: done += attend_queries<std::min(7, MOST_QUERIES)>(head, done, keys, ahead); break;
                case 3: done += attend_queries<3>(head, done, keys, ahead); break;
                case 2: done += attend_queries<2>(head, done, keys, ahead); break;
                case 1: done += attend_queries<1>(head, done, keys, ahead); break;
                default: done += attend_queries<4>(head, done, keys, ahead);
            }
        }
    }

    template <int queries>
    int attend_queries(int64_t head, int done, const Stretch& keys, const Stretch& ahead) {
        const int64_t first = head * group_ + done;
        const Running running = {query_ + first * head_dim_, part_ + first * value_dim_, highest_ + first,
                                 totals_ + first,            head_dim_,                  value_dim_};
        DecodeGroup<element, queries>(running, asked_.scoring).attend(keys, values_, ahead);
        return queries;
    }

    const DecodeArguments& asked_;
    const int head_dim_, value_dim_, group_;
    const int64_t position_;
    const int64_t* block_ids_;
    const float* query_;
    float* part_;  // result of a piece: outputs [heads][value_dim], highest [heads], totals [heads]
    const int64_t first_head_, end_head_;
    int64_t seen_from_, begin_, end_;
    Stretch stretches_[2], values_;
    float highest_[MAX_HEADS + LANES], totals_[MAX_HEADS + LANES];
};

// Merge the pieces of one query. The first piece is at `part`.
void combine(const DecodeArguments& asked, float* part, int64_t pieces, int64_t head, float* output) {
    const int64_t value_dim = asked.value_dim, stride = asked.heads * (value_dim + 2);
    const float *highest = part + asked.heads * value_dim + head, *totals = highest + asked.heads;
    std::fill_n(output, value_dim, 0.0f);
    Attended all = begun(output, asked.scoring, head);
    for (int64_t piece = 0; piece < pieces; ++piece) {
        float* outputs = part + piece * stride + head * value_dim;
        merge(all, {outputs, highest[piece * stride], totals[piece * stride]}, value_dim);
    }
    if (pieces == 0) return;  // the row is padding
    for (int64_t d = 0; d < value_dim; ++d) output[d] /= all.total;
}

template <Element element>
void decode(const DecodeArguments& asked) {
    const auto pieces_of = [&](int64_t sequence) { return DecodePiece<element>::pieces_of(asked, sequence); };
    int64_t pieces = 0;
    for (int64_t sequence = 0; sequence < asked.sequences; ++sequence) pieces += pieces_of(sequence);
    const int64_t tasks = asked.sequences * MOST_PIECES, wanted = asked.threads == 1 ? 1 : 2 * asked.threads;
    const int64_t each = (wanted + pieces - 1) / std::max<int64_t>(1, pieces);  // 0 pieces: all rows are padding
    const int64_t shares = std::min(asked.kv_heads, std::max<int64_t>(1, each));
    share(tasks * shares, asked.threads, [&](int64_t task) {
        const int64_t part = task % shares, piece = task / shares % MOST_PIECES, sequence = task / shares / MOST_PIECES;
        if (piece >= pieces_of(sequence)) return;
        DecodePiece<element>(asked, sequence, piece, asked.kv_heads * part / shares, asked.kv_heads * (part + 1) / shares)
            .run();
    });
    share_rows(asked.sequences * asked.heads, asked.threads, [&](int64_t row) {
        const int64_t sequence = row / asked.heads;
        float* part = asked.parts + sequence * MOST_PIECES * asked.heads * (asked.value_dim + 2);
        combine(asked, part, pieces_of(sequence), row % asked.heads, asked.output + row * asked.value_dim);
    });
}

}  // namespace
}  // namespace baton

extern "C" void baton_paged_decode(const baton::DecodeArguments* asked) {
    baton::with_element(asked->pages.element, [&](auto element) { baton::decode<element.value>(*asked); });
}
