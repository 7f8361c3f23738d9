// All layers of a decoder over one batch. Contract: kernels/decoder.py.
#include "decoder.h"

extern "C" void baton_paged_prefill(const baton::PrefillArguments* asked);
extern "C" void baton_paged_decode(const baton::DecodeArguments* asked);

namespace baton {
namespace {

class Decoder {
   public:
    explicit Decoder(const DecoderArguments& asked) : asked_(asked) {
        float* next = asked.scratch;
        const auto take = [&](int64_t width) {
            float* taken = next;
            next += asked.rows * width;
            return taken;
        };
        normed_ = take(asked.hidden);
        query_ = take(asked.heads * asked.head_dim);
        attended_ = take(asked.heads * asked.head_dim);
        qkv_ = take((asked.heads + 2 * asked.kv_heads) * asked.head_dim);
        gated_ = take(asked.inner);
        parts_ = next;
    }

    void run(const DecoderLayer& layer) const {
        const int64_t rows = asked_.rows;
        linear(normed(layer.attention_norm), rows, layer.qkv, qkv_, false, asked_.threads);
        Pages pages = asked_.pages;
        pages.data = layer.pages;
        pages.scales = layer.scales;
        const int64_t table = layer.table * rows * (asked_.rotary_dim / 2);
        rotate_and_store({pages, qkv_, query_, asked_.cos + table, asked_.sin + table, asked_.slots, layer.query_norm,
                          layer.key_norm, rows, asked_.heads, asked_.kv_heads, asked_.head_dim, asked_.rotary_dim,
                          asked_.eps, layer.norms_are_whole, asked_.threads});
        attend(pages, layer.scoring);
        add(attended_, layer.output, layer.attention_end_norm);
        gated_linear(normed(layer.feed_forward_norm), rows, layer.gate_up, static_cast<Gate>(layer.gate), gated_,
                     asked_.threads);
        add(gated_, layer.down, layer.feed_forward_end_norm);
    }

   private:
    // The stream, normalised if there is a norm.
    const float* normed(const float* norm) const {
        if (!norm) return asked_.residual;
        rms_norm(asked_.residual, norm, asked_.rows, asked_.hidden, asked_.eps, normed_, asked_.threads);
        return normed_;
    }

    // Adds a product to the stream, normalised before if there is a norm.
    void add(const float* x, const Weight& weight, const float* norm) const {
        const int64_t rows = asked_.rows, hidden = asked_.hidden;
        if (!norm) return linear(x, rows, weight, asked_.residual, true, asked_.threads);
        linear(x, rows, weight, normed_, false, asked_.threads);
        rms_norm(normed_, norm, rows, hidden, asked_.eps, normed_, asked_.threads);
        add_rows(normed_, rows, hidden, asked_.residual, asked_.threads);
    }

    void attend(const Pages& pages, const Scoring& scoring) const {
        if (asked_.decode_rows) {
            const DecodeArguments decode = {
                pages,           scoring,        query_,           attended_,       parts_,
                asked_.block_ids, asked_.block_starts, asked_.context_tokens, asked_.decode_rows, asked_.heads,
                asked_.kv_heads, asked_.head_dim, asked_.head_dim, asked_.threads};
            baton_paged_decode(&decode);
        }
        const int64_t width = asked_.heads * asked_.head_dim;
        for (int64_t c = 0; c < asked_.chunk_count; ++c) {
            const PrefillChunk& chunk = asked_.chunks[c];
            const PrefillArguments prefill = {
                pages,           scoring,      query_ + chunk.first_row * width, attended_ + chunk.first_row * width,
                chunk.block_ids, chunk.tokens, asked_.heads, asked_.kv_heads, asked_.head_dim, asked_.head_dim, chunk.start,
                asked_.threads};
            baton_paged_prefill(&prefill);
        }
    }

    const DecoderArguments& asked_;
    float *normed_, *query_, *attended_, *qkv_, *gated_, *parts_;
};

}  // namespace
}  // namespace baton

extern "C" void baton_decoder_layers(const baton::DecoderArguments* asked) {
    const baton::Decoder decoder(*asked);
    for (int64_t index = 0; index < asked->layer_count; ++index) decoder.run(asked->layers[index]);
}
