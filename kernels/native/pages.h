// One layer of the paged KV pool. The structs only borrow memory.
#pragma once

#include "limits.h"
#include "numbers.h"

namespace baton {

// Data: `[block][k, v][kv_head][token][head_dim]`, head_dim contiguous. Scales, if any: float32 `[block][k,
// v][kv_head][token]`, tokens contiguous. Strides count elements; the stride from keys to values is 0 if values are
// prefixes of keys.
struct Pages {
    const void* data;
    int64_t block_stride, kind_stride, head_stride, token_stride;
    const float* scales;  // null: the numbers have no scales
    int64_t scale_block_stride, scale_kind_stride, scale_head_stride;
    int64_t block_tokens;
    int32_t element;
};

using Row = const char*;  // pointer to the key or value of one token

alignas(64) const char ZEROS[MAX_HEAD_DIM * sizeof(float)] = {};  // row of zeros in any format

// Finds keys (kind 0) or values (kind 1) of one KV head of one sequence by their position.
template <Element element>
class HeadRows {
   public:
    HeadRows(const Pages& pages, const int64_t* block_ids, int64_t kind, int64_t head)
        : pages_(pages),
          block_ids_(block_ids),
          offset_(kind * pages.kind_stride + head * pages.head_stride),
          scale_offset_(kind * pages.scale_kind_stride + head * pages.scale_head_stride) {}

    // Set `rows` to pointers to `tokens` tokens from position `first` on, and copy their scales if there are any.
    void find(int64_t first, int tokens, Row* rows, float* scales) const {
        int64_t logical = first / pages_.block_tokens, token = first % pages_.block_tokens;
        for (int done = 0; done < tokens; ++logical, token = 0) {
            const int count = static_cast<int>(std::min<int64_t>(tokens - done, pages_.block_tokens - token));
            const int64_t block = block_ids_[logical];
            const int64_t at = block * pages_.block_stride + offset_ + token * pages_.token_stride;
            Row row = static_cast<Row>(pages_.data) + at * bytes_of(element);
            for (int i = 0; i < count; ++i) rows[done + i] = row + i * pages_.token_stride * bytes_of(element);
            if constexpr (is_scaled(element))
                std::copy_n(pages_.scales + block * pages_.scale_block_stride + scale_offset_ + token, count, scales + done);
            done += count;
        }
    }

   private:
    const Pages& pages_;
    const int64_t* block_ids_;
    int64_t offset_, scale_offset_;
};

}  // namespace baton
