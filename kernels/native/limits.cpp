// Constants of limits.h and sizes of the structs that Python fills, by name. Python checks them when it loads the
// library.
#include "limits.h"

#include "arguments.h"
#include "decoder.h"
#include "sampling.h"

namespace {

struct Limit {
    const char* name;  // null: end of the list
    double value;
};

#define CONSTANT(name) {#name, static_cast<double>(baton::name)}
#define SIZE(name) {"sizeof " #name, static_cast<double>(sizeof(baton::name))}

const Limit LIMITS[] = {
    CONSTANT(MAX_HEAD_DIM),
    CONSTANT(MAX_HEADS),
    CONSTANT(MAX_GROUP),
    CONSTANT(PIECE_TOKENS),
    CONSTANT(MOST_PIECES),
    CONSTANT(SWIGLU_LIMIT),
    CONSTANT(SWIGLU_ALPHA),
    CONSTANT(MIN_WEIGHT_SUM),
    SIZE(Pages),
    SIZE(Scoring),
    SIZE(Weight),
    SIZE(Routing),
    SIZE(GatedWeights),
    SIZE(Experts),
    SIZE(PrefillArguments),
    SIZE(DecodeArguments),
    SIZE(LinearArguments),
    SIZE(HeadLinearArguments),
    SIZE(GatherArguments),
    SIZE(RotateStore),
    SIZE(StateRuns),
    SIZE(Convolution),
    SIZE(DeltaRule),
    SIZE(StateScan),
    SIZE(SurveyArguments),
    SIZE(SampleArguments),
    SIZE(TakeArguments),
    SIZE(Latent),
    SIZE(DeltaNet),
    SIZE(ShortConvolution),
    SIZE(Mamba),
    SIZE(DecoderLayer),
    SIZE(PrefillChunk),
    SIZE(GroupRows),
    SIZE(DecoderArguments),
    {nullptr, 0.0},
};

}  // namespace

extern "C" const Limit* baton_limits() { return LIMITS; }
