// Layer of experts. Experts are computed in order: each multiplies all rows that chose it together, and adds its
// outputs. So a row's sum depends neither on other rows nor on the number of threads.
#include "experts.h"

#include <algorithm>
#include <limits>

#include "layer.h"
#include "limits.h"
#include "room.h"

namespace baton {
namespace {

// Find the indices of the `most` largest values, in descending order of values; of equal values the first ones.
template <class Value>
void keep_best(int64_t count, int64_t most, const Value& value, int64_t* best) {
    int64_t kept = 0;
    for (int64_t index = 0; index < count; ++index) {
        if (kept == most && !(value(index) > value(best[most - 1]))) continue;
        int64_t at = kept < most ? kept++ : most - 1;
        for (; at > 0 && value(index) > value(best[at - 1]); --at) best[at] = best[at - 1];
        best[at] = index;
    }
}

// Compute the softmax in place. `numbers` is padded to complete vectors.
void soften(float* numbers, int64_t count) {
    float largest = numbers[0], sum = 0;
    for (int64_t i = 1; i < count; ++i) largest = std::max(largest, numbers[i]);
    for (int64_t i = 0; i < count; i += LANES) store(numbers + i, exponential(load(numbers + i) - largest));
    for (int64_t i = 0; i < count; ++i) sum += numbers[i];
    for (int64_t i = 0; i < count; ++i) numbers[i] /= sum;
}

// Chooses one row's experts, the best first, and their weights. numbers: [experts], the router's logits.
class Choice {
   public:
    Choice(const Experts& asked, const float* numbers) : asked_(asked), count_(asked.router.outputs) {
        odds_ = reserved(room_.odds, (count_ + LANES - 1) / LANES * LANES);
        std::copy_n(numbers, count_, odds_);
        if (asked.routing.is_sigmoid) {
            for (int64_t i = 0; i < count_; i += LANES) store(odds_ + i, sigmoid(load(odds_ + i)));
        } else {
            soften(odds_, count_);
        }
        room_.judged.assign(odds_, odds_ + count_);
        for (int64_t i = 0; asked.correction && i < count_; ++i) room_.judged[i] += asked.correction[i];
        judged_ = room_.judged.data();
    }

    void make(int64_t* chosen, float* weights) const {
        const Routing& routing = asked_.routing;
        const int64_t per_token = routing.per_token;
        if (routing.groups > routing.kept_groups) close_other_groups();
        keep_best(count_, per_token, [&](int64_t index) { return judged_[index]; }, chosen);
        float sum = MIN_WEIGHT_SUM;
        for (int64_t rank = 0; rank < per_token; ++rank) sum += weights[rank] = odds_[chosen[rank]];
        for (int64_t rank = 0; rank < per_token; ++rank)
            weights[rank] *= routing.is_normalised ? routing.scale / sum : routing.scale;
    }

   private:
    struct Room {  // scratch memory of a thread, kept from row to row
        std::vector<float> odds, judged, merits;
        std::vector<int64_t> best;
    };

    void close_other_groups() const {
        const Routing& routing = asked_.routing;
        const int64_t size = count_ / routing.groups, judged_by = routing.judged_by;
        room_.best.resize(std::max(judged_by, routing.kept_groups));
        room_.merits.assign(routing.groups, 0);
        int64_t* best = room_.best.data();
        for (int64_t group = 0; group < routing.groups; ++group) {
            const float* own = judged_ + group * size;
            keep_best(size, judged_by, [&](int64_t index) { return own[index]; }, best);
            for (int64_t rank = 0; rank < judged_by; ++rank) room_.merits[group] += own[best[rank]];
        }
        keep_best(routing.groups, routing.kept_groups, [&](int64_t group) { return room_.merits[group]; }, best);
        for (int64_t group = 0; group < routing.groups; ++group)
            if (std::find(best, best + routing.kept_groups, group) == best + routing.kept_groups)
                std::fill_n(judged_ + group * size, size, -std::numeric_limits<float>::infinity());
    }

    static thread_local Room room_;
    const Experts& asked_;
    const int64_t count_;
    float *odds_, *judged_;
};

thread_local Choice::Room Choice::room_;

struct Scratch {
    std::vector<float> numbers, weights, gathered, inner, made;
    std::vector<int64_t> chosen, starts, pairs;
};

class Mixture {
   public:
    Mixture(const float* x, int64_t rows, const Experts& asked, float* to, int threads, Scratch& scratch)
        : x_(x),
          rows_(rows),
          hidden_(asked.router.inputs),
          per_token_(asked.routing.per_token),
          asked_(asked),
          to_(to),
          threads_(threads),
          scratch_(scratch) {}

    void run() const {
        std::fill_n(to_, rows_ * hidden_, 0.0f);
        choose();
        sort_pairs();
        for (int64_t expert = 0; expert < asked_.router.outputs; ++expert) add_expert(expert);
        if (asked_.shared) add_shared();
    }

   private:
    // Choose the experts and weights of every row.
    void choose() const {
        const int64_t experts = asked_.router.outputs;
        float* numbers = reserved(scratch_.numbers, rows_ * experts);
        int64_t* chosen = reserved(scratch_.chosen, rows_ * per_token_);
        float* weights = reserved(scratch_.weights, rows_ * per_token_);
        linear(x_, rows_, asked_.router, numbers, false, threads_);
        share_rows(rows_, threads_for(rows_ * experts, threads_), [&](int64_t row) {
            Choice(asked_, numbers + row * experts).make(chosen + row * per_token_, weights + row * per_token_);
        });
    }

    // Sort the pairs of a row and one of its experts by expert. Pair p is of row p / per_token.
    void sort_pairs() const {
        const int64_t count = rows_ * per_token_, experts = asked_.router.outputs;
        std::vector<int64_t>& starts = scratch_.starts;
        int64_t* pairs = reserved(scratch_.pairs, count);
        starts.assign(experts + 2, 0);  // shifted by one expert, until all pairs are placed
        for (int64_t pair = 0; pair < count; ++pair) ++starts[scratch_.chosen[pair] + 2];
        for (int64_t expert = 2; expert < experts + 2; ++expert) starts[expert] += starts[expert - 1];
        for (int64_t pair = 0; pair < count; ++pair) pairs[starts[scratch_.chosen[pair] + 1]++] = pair;
    }

    void add_expert(int64_t expert) const {
        const int64_t* pairs = scratch_.pairs.data() + scratch_.starts[expert];
        const int64_t count = scratch_.starts[expert + 1] - scratch_.starts[expert];
        if (count == 0) return;
        const float* own = x_;
        if (count < rows_) {
            float* gathered = reserved(scratch_.gathered, count * hidden_);
            for (int64_t i = 0; i < count; ++i)
                std::copy_n(x_ + pairs[i] / per_token_ * hidden_, hidden_, gathered + i * hidden_);
            own = gathered;
        }
        add(asked_.experts[expert], own, count, [&](int64_t i) {
            return Part{pairs[i] / per_token_, scratch_.weights[pairs[i]]};
        });
    }

    void add_shared() const {
        float* numbers = reserved(scratch_.numbers, rows_);
        if (asked_.shared_gate) linear(x_, rows_, *asked_.shared_gate, numbers, false, threads_);
        add(*asked_.shared, x_, rows_, [&](int64_t row) {
            return Part{row, asked_.shared_gate ? sigmoid(broadcast(numbers[row]))[0] : 1.0f};
        });
    }

    struct Part {
        int64_t row;
        float weight;
    };

    // Compute one expert for `count` rows of x. part(i): the row to which the i-th result is added, and its weight.
    template <class ToPart>
    void add(const GatedWeights& weights, const float* x, int64_t count, const ToPart& part) const {
        float* inner = reserved(scratch_.inner, count * weights.down.inputs);
        float* made = reserved(scratch_.made, count * hidden_);
        gated_linear(x, count, weights.gate_up, static_cast<Gate>(weights.gate), inner, threads_);
        linear(inner, count, weights.down, made, false, threads_);
        share_rows(count, threads_for(count * hidden_, threads_), [&](int64_t i) {
            const Part own = part(i);
            const float* from = made + i * hidden_;
            float* to = to_ + own.row * hidden_;
            for (int64_t n = 0; n < hidden_; ++n) to[n] += own.weight * from[n];
        });
    }

    const float* const x_;
    const int64_t rows_, hidden_, per_token_;
    const Experts& asked_;
    float* const to_;
    const int threads_;
    Scratch& scratch_;
};

}  // namespace

void mix_experts(const float* x, int64_t rows, const Experts& experts, float* to, int threads) {
    static thread_local Scratch scratch;
    Mixture(x, rows, experts, to, threads, scratch).run();
}

}  // namespace baton

extern "C" void baton_packed_experts(const float* x, int64_t rows, const baton::Experts* experts, float* to,
                                     int32_t threads) {
    baton::mix_experts(x, rows, *experts, to, threads);
}
