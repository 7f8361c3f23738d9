// One layer of the paged KV pool, as the kernels read it. Borrowed memory; nothing here owns any.
#pragma once

#include <algorithm>
#include <cstddef>

#include "vector.h"

namespace baton {

enum class Element : int32_t { float32 = 0, bfloat16 = 1, e4m3 = 2, e5m2 = 3, int8 = 4 };

constexpr int64_t bytes_of(Element element) {
    return element == Element::float32 ? 4 : element == Element::bfloat16 ? 2 : 1;
}

// Data `[block][k, v][kv_head][token][head_dim]`, head_dim contiguous; scales, where there are any, float32
// `[block][k, v][kv_head][token]`, tokens contiguous. Strides count elements.
struct Pages {
    const void* data;
    int64_t block_stride, kind_stride, head_stride, token_stride;
    const float* scales;  // null: unscaled
    int64_t scale_block_stride, scale_kind_stride, scale_head_stride;
    int64_t block_tokens;
    int32_t element;
};

// Keys (kind 0) or values (kind 1) of one KV head of one sequence, by position.
template <Element element>
class HeadRows {
   public:
    HeadRows(const Pages& pages, const int64_t* block_ids, int64_t kind, int64_t head)
        : pages_(pages),
          block_ids_(block_ids),
          offset_(kind * pages.kind_stride + head * pages.head_stride),
          scale_offset_(kind * pages.scale_kind_stride + head * pages.scale_head_stride) {}

    // Points `rows` at the floats of `tokens` tokens from position `first` on: where they are stored as floats, there,
    // else in `scratch`, `[tokens][head_dim]`.
    void read(int64_t first, int tokens, int head_dim, float* scratch, const float** rows) const {
        int64_t logical = first / pages_.block_tokens, token = first % pages_.block_tokens;
        for (int done = 0; done < tokens; ++logical, token = 0) {
            const int64_t count = std::min<int64_t>(tokens - done, pages_.block_tokens - token);
            for (const int64_t end = token + count; token < end; ++token, ++done)
                rows[done] = row(block_ids_[logical], token, head_dim, scratch + done * head_dim);
        }
    }

    // Asks for the rows of these tokens ahead of their use: the processor does not guess where the next block lies.
    void prefetch(int64_t first, int64_t tokens, int head_dim) const {
        const int64_t row_bytes = head_dim * bytes_of(element);
        for (int64_t position = first; position < first + tokens; ++position) {
            const int64_t block = block_ids_[position / pages_.block_tokens], token = position % pages_.block_tokens;
            const int64_t at = block * pages_.block_stride + offset_ + token * pages_.token_stride;
            const char* row = static_cast<const char*>(pages_.data) + at * bytes_of(element);
            for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte);
        }
    }

   private:
    const float* row(int64_t block, int64_t token, int head_dim, float* scratch) const {
        const int64_t at = block * pages_.block_stride + offset_ + token * pages_.token_stride;
        if constexpr (element == Element::float32) {
            return static_cast<const float*>(pages_.data) + at;
        } else if constexpr (element == Element::bfloat16) {
            const auto* from = static_cast<const uint16_t*>(pages_.data) + at;
            for (int d = 0; d < head_dim; d += LANES) store(scratch + d, load_bfloat16(from + d));
        } else {
            const auto* from = static_cast<const uint8_t*>(pages_.data) + at;
            const float scale = pages_.scales[block * pages_.scale_block_stride + scale_offset_ + token];
            for (int d = 0; d < head_dim; d += LANES) store(scratch + d, load_eight_bits(from + d) * scale);
        }
        return scratch;
    }

    static Floats load_eight_bits(const uint8_t* from) {
        if constexpr (element == Element::e4m3) return load_e4m3(from);
        if constexpr (element == Element::e5m2) return load_e5m2(from);
        return load_int8(from);
    }

    const Pages& pages_;
    const int64_t* block_ids_;
    int64_t offset_, scale_offset_;
};

}  // namespace baton
