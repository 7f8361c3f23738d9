// Token mixing of a layer, between its projections: attention with keys and values per head, latent attention, or a
// recurrent layer. Contract: kernels/native/decoder.py.
#pragma once

#include "decoder.h"
#include "room.h"

namespace baton {

// Scratch memory of one thread for all layers of a call.
struct MixingRooms {
    std::vector<float> query, attended, parts, by_head, projected, numbers;
};

class Mixing {
   public:
    Mixing(const DecoderArguments& asked, MixingRooms& rooms) : asked_(asked), rooms_(rooms) {}

    // Compute the input of a layer's output projection. qkv: the output of its `qkv` projection, which is overwritten.
    const float* run(const DecoderLayer& layer, float* qkv) const {
        if (layer.delta) return delta(layer, qkv);
        if (layer.convolution) return convolution(layer, qkv);
        if (layer.mamba) return mamba(layer, qkv);
        return layer.latent ? latent(layer, qkv) : heads(layer, qkv);
    }

   private:
    const float* heads(const DecoderLayer& layer, float* qkv) const;
    const float* latent(const DecoderLayer& layer, float* qkv) const;
    const float* delta(const DecoderLayer& layer, const float* projected) const;
    const float* convolution(const DecoderLayer& layer, const float* projected) const;
    const float* mamba(const DecoderLayer& layer, const float* projected) const;

    // Inputs of a delta net. Rows are `stride` apart; `beta` and `decay` have one number per row and value head.
    struct DeltaInputs {
        const float *mixed, *gates;
        const float *beta, *decay;
        int64_t stride;
    };
    DeltaInputs delta_inputs(const DecoderLayer& layer, const float* projected) const;

    // Attention of queries [rows][heads][head_dim] over the layer's pages; returns [rows][heads][value_dim].
    float* attend(const DecoderLayer& layer, const float* query, int64_t kv_heads, int64_t value_dim) const;
    const float* latent_queries(const DecoderLayer& layer, const float* made, int64_t& stride) const;

    Pages pages_of(const DecoderLayer& layer) const {
        Pages pages = asked_.pages;
        pages.data = layer.pages;
        pages.scales = layer.scales;
        return pages;
    }

    const GroupRows& rows_of(const DecoderLayer& layer) const { return asked_.groups[layer.group]; }

    int64_t angles_of(const DecoderLayer& layer) const { return layer.table * asked_.rows * (asked_.rotary_dim / 2); }

    // Allocate memory for all rows, each of the given number of numbers.
    template <class Work>
    void for_rows(int64_t numbers, const Work& work) const {
        share_rows(asked_.rows, threads_for(asked_.rows * numbers, asked_.threads), work);
    }

    const DecoderArguments& asked_;
    MixingRooms& rooms_;
};

}  // namespace baton
