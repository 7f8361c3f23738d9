// All layers of a decoder over one batch. Contract: kernels/native/decoder.py.
#include "decoder.h"

#include "mixing.h"

namespace baton {
namespace {

// Scratch memory of one thread for all layers of a call.
struct DecoderRooms {
    MixingRooms mixing;
    std::vector<float> normed, qkv, inner, made;
};

class Decoder {
   public:
    Decoder(const DecoderArguments& asked, DecoderRooms& rooms)
        : asked_(asked), rooms_(rooms), mixing_(asked, rooms.mixing), normed_(reserved(rooms.normed, asked.rows * asked.hidden)) {}

    void run(const DecoderLayer& layer) const {
        if (layer.qkv.data) mix(layer);
        if (layer.experts || layer.feed_forward.down.data) feed_forward(layer);
    }

   private:
    void mix(const DecoderLayer& layer) const {
        float* qkv = reserved(rooms_.qkv, asked_.rows * layer.qkv.outputs);
        linear(normed(layer.attention_norm), asked_.rows, layer.qkv, qkv, false, asked_.threads);
        add(mixing_.run(layer, qkv), layer.output, layer.attention_end_norm);
    }

    void feed_forward(const DecoderLayer& layer) const {
        const float* x = normed(layer.feed_forward_norm);
        if (layer.experts) {
            float* made = reserved(rooms_.made, asked_.rows * asked_.hidden);
            mix_experts(x, asked_.rows, *layer.experts, made, asked_.threads);
            return add(made, layer.feed_forward_end_norm);
        }
        const GatedWeights& weights = layer.feed_forward;
        float* inner = reserved(rooms_.inner, asked_.rows * weights.down.inputs);
        gated_linear(x, asked_.rows, weights.gate_up, static_cast<Gate>(weights.gate), inner, asked_.threads);
        add(inner, weights.down, layer.feed_forward_end_norm);
    }

    // Return the residual stream, normalised if the norm is not null.
    const float* normed(const float* norm) const {
        if (!norm) return asked_.residual;
        rms_norm(asked_.residual, norm, asked_.rows, asked_.hidden, asked_.eps, normed_, asked_.threads);
        return normed_;
    }

    // Add a product to the residual stream. If the norm is not null, the product is normalised before.
    void add(const float* x, const Weight& weight, const float* norm) const {
        if (!norm) return linear(x, asked_.rows, weight, asked_.residual, true, asked_.threads);
        linear(x, asked_.rows, weight, normed_, false, asked_.threads);
        add(normed_, norm);
    }

    // Add rows to the residual stream. If the norm is not null, the rows are normalised in place before.
    void add(float* made, const float* norm) const {
        if (norm) rms_norm(made, norm, asked_.rows, asked_.hidden, asked_.eps, made, asked_.threads);
        add_rows(made, asked_.rows, asked_.hidden, asked_.residual, asked_.threads);
    }

    const DecoderArguments& asked_;
    DecoderRooms& rooms_;
    const Mixing mixing_;
    float* const normed_;
};

}  // namespace
}  // namespace baton

extern "C" void baton_decoder_layers(const baton::DecoderArguments* asked) {
    static thread_local baton::DecoderRooms rooms;
    const baton::Decoder decoder(*asked, rooms);
    for (int64_t index = 0; index < asked->layer_count; ++index) decoder.run(asked->layers[index]);
}
