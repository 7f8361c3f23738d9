// Sampling of one token per row of logits. Contract: kernels/sampling.py.
//
// The vocabulary is never sorted. The k-th largest logit is found among the few tokens above a rising bound. For top-p,
// weights are summed in bins by the distance of their logit from the largest; only the bin at the boundary is sorted.
#include "sampling.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "survey.h"
#include "threads.h"

namespace baton {
namespace {

constexpr int BINS = 4096;
constexpr float BINS_PER_UNIT = 64;  // bins per 1 of the exponent, logit / temperature

// Scratch memory of one thread.
struct DrawRoom {
    std::vector<float> weights;  // [size + LANES]
    std::vector<int32_t> bins;   // [size + LANES]
    std::vector<float> largest;
    std::vector<std::pair<float, int64_t>> inside;  // logit and id of the tokens in the bin at the boundary
};

// Return the `count`-th largest number of a row; -inf if fewer than `count` are above -inf.
float kth_largest(const float* x, int64_t size, size_t count, std::vector<float>& largest) {
    constexpr int64_t AT_ONCE = 4 * LANES;
    float bound = -std::numeric_limits<float>::infinity();
    const auto raise = [&] {
        std::nth_element(largest.begin(), largest.begin() + (count - 1), largest.end(), std::greater<float>());
        largest.resize(count);
        bound = largest.back();
    };
    largest.clear();
    for (int64_t begin = 0; begin < size; begin += AT_ONCE) {
        const int64_t end = std::min(size, begin + AT_ONCE);
        if (end - begin == AT_ONCE) {
            const Floats most = larger(larger(load(x + begin), load(x + begin + LANES)),
                                       larger(load(x + begin + 2 * LANES), load(x + begin + 3 * LANES)));
            if (!(largest_of(most) > bound)) continue;
        }
        for (int64_t id = begin; id < end; ++id)
            if (x[id] > bound) largest.push_back(x[id]);
        if (largest.size() >= 2 * count + AT_ONCE) raise();
    }
    if (largest.size() >= count) raise();
    return bound;
}

// Sampling of a token from one row. Weights of tokens that are filtered out become 0.
class Draw {
   public:
    Draw(const float* logits, int64_t size, const Survey& surveyed, float temperature, DrawRoom& scratch)
        : logits_(logits), size_(size), most_(surveyed.most), inverse_(std::min(1 / temperature, 3e38f)), scratch_(scratch) {
        weights_ = reserved(scratch.weights, size + LANES);
        exponentials(logits, size, most_, inverse_, [&](int64_t at, Floats part) { store(weights_ + at, part); });
    }

    // Keep the `count` most likely tokens, and ties with the last one.
    void keep_likeliest(int64_t count) {
        if (count < 1 || count >= size_) return;
        const float threshold = kth_largest(logits_, size_, static_cast<size_t>(count), scratch_.largest);
        for (int64_t id = 0; id < size_; ++id) weights_[id] = logits_[id] < threshold ? 0 : weights_[id];
    }

    // Keep the most likely tokens whose weights sum to `share` of all remaining weights, and at least one token.
    void keep_nucleus(float share) {
        if (share >= 1) return;
        fill_bins();
        double total = 0;
        for (const double mass : masses_) total += mass;
        const double limit = (1 - static_cast<double>(share)) * total;
        int bin = BINS - 1;
        double below = 0;
        for (; bin > 0 && below + masses_[bin] <= limit; --bin) below += masses_[bin];
        auto& inside = scratch_.inside;
        inside.clear();
        const int32_t* bins = scratch_.bins.data();
        for (int64_t id = 0; id < size_; ++id) weights_[id] = bins[id] > bin ? 0 : weights_[id];
        for (int64_t id = 0; id < size_; ++id)
            if (bins[id] == bin && weights_[id] > 0) inside.emplace_back(logits_[id], id);
        std::sort(inside.begin(), inside.end());
        const size_t most = bin == 0 ? inside.size() - 1 : inside.size();
        for (size_t place = 0; place < most; ++place) {
            const int64_t id = inside[place].second;
            below += weights_[id];
            if (below > limit) return;
            weights_[id] = 0;
        }
    }

    // Return the token whose interval of the cumulative weights, in order of token ids, contains `number` of the total.
    int64_t pick(double number) const {
        double total = 0;
        for (int64_t begin = 0; begin < size_; begin += BLOCK) total += block_total(begin);
        const double target = number * total;
        double below = 0;
        int64_t begin = 0;
        for (; begin + BLOCK < size_; begin += BLOCK) {
            const double with_block = below + block_total(begin);
            if (with_block > target) break;
            below = with_block;
        }
        int64_t last = begin;
        for (int64_t id = begin; id < size_; ++id) {
            if (weights_[id] == 0) continue;
            last = id;
            below += weights_[id];
            if (below > target) break;
        }
        return last;
    }

   private:
    void fill_bins() {
        int32_t* bins = reserved(scratch_.bins, size_ + LANES);
        constexpr float last = BINS - 1;
        const float scale = std::min(inverse_ * BINS_PER_UNIT, 3e38f);
        for (int64_t id = 0; id < size_; ++id) {
            const float distance = (most_ - logits_[id]) * scale;
            bins[id] = static_cast<int32_t>(distance < last ? distance : last);
        }
        std::fill_n(masses_, BINS, 0.0);
        for (int64_t id = 0; id < size_; ++id)
            if (weights_[id] > 0) masses_[bins[id]] += weights_[id];
    }

    double block_total(int64_t begin) const {
        const int64_t end = std::min(size_, begin + BLOCK);
        double total = 0;
        int64_t id = begin;
        for (; id + LANES <= end; id += LANES) total += sum_of(load(weights_ + id));
        for (; id < end; ++id) total += weights_[id];
        return total;
    }

    const float* logits_;
    const int64_t size_;
    const float most_, inverse_;
    DrawRoom& scratch_;
    float* weights_;
    double masses_[BINS];
};

void sample_row(const SampleArguments& asked, int64_t row) {
    static thread_local DrawRoom scratch;
    const float* logits = asked.logits + row * asked.stride;
    const Survey surveyed = survey(logits, asked.size);
    asked.token_ids[row] = 0;
    asked.logprobs[row] = std::numeric_limits<float>::quiet_NaN();
    if (!std::isfinite(surveyed.most) || std::isnan(surveyed.total)) return;
    int64_t token_id = surveyed.best;
    if (asked.temperatures[row] != 0) {
        Draw draw(logits, asked.size, surveyed, asked.temperatures[row], scratch);
        draw.keep_likeliest(asked.top_k[row]);
        draw.keep_nucleus(asked.top_p[row]);
        token_id = draw.pick(asked.numbers[row]);
    }
    asked.token_ids[row] = token_id;
    asked.logprobs[row] = logits[token_id] - surveyed.log_total();
}

constexpr float banned = -std::numeric_limits<float>::infinity();
constexpr int64_t WORD = 64;

// Set tokens that are not allowed to -inf. Handles complete words of the mask, most of which are all zeros or all ones.
void keep_allowed(float* logits, int64_t size, const AllowedTokens& allowed) {
    const int64_t tokens = std::min(8 * allowed.bytes, size);
    int64_t id = 0;
    for (; id + WORD <= tokens; id += WORD) {
        uint64_t word;
        std::memcpy(&word, allowed.bits + id / 8, sizeof(word));
        if (word == 0) {
            std::fill_n(logits + id, WORD, banned);
        } else if (~word != 0) {
            for (int64_t bit = 0; bit < WORD; ++bit) logits[id + bit] = (word >> bit) & 1 ? logits[id + bit] : banned;
        }
    }
    for (; id < tokens; ++id)
        if (!((allowed.bits[id / 8] >> (id % 8)) & 1)) logits[id] = banned;
    std::fill(logits + tokens, logits + size, banned);
}

// Return the most likely allowed token, the first of equally likely ones; 0 if none is allowed.
int64_t best_allowed(const float* logits, int64_t size, const AllowedTokens& allowed) {
    const int64_t tokens = std::min(8 * allowed.bytes, size);
    float most = banned, part[WORD];
    int64_t best = 0;
    for (int64_t begin = 0; begin < tokens; begin += WORD) {
        const int64_t count = std::min(WORD, tokens - begin);
        uint64_t word = 0;
        std::memcpy(&word, allowed.bits + begin / 8, (count + 7) / 8);
        if (word == 0) continue;
        for (int64_t bit = 0; bit < count; ++bit) part[bit] = (word >> bit) & 1 ? logits[begin + bit] : banned;
        const float largest = survey_block(part, count).most;
        if (!(largest > most)) continue;
        most = largest;
        best = begin + (std::find(part, part + count, largest) - part);
    }
    return best;
}

}  // namespace
}  // namespace baton

extern "C" void baton_survey_rows(const baton::SurveyArguments* asked) {
    baton::share(asked->rows, asked->threads, [&](int64_t row) {
        const float* logits = asked->logits + row * asked->stride;
        const baton::Survey found = baton::survey(logits, asked->size);
        const bool is_any = asked->allowed == nullptr || asked->allowed[row].bits == nullptr;
        asked->best[row] = is_any ? found.best : baton::best_allowed(logits, asked->size, asked->allowed[row]);
        asked->log_totals[row] = found.log_total();
        asked->finite[row] = found.finite;
    });
}

extern "C" void baton_sample_tokens(const baton::SampleArguments* asked) {
    baton::share(asked->rows, asked->threads, [&](int64_t row) { baton::sample_row(*asked, row); });
}

extern "C" void baton_take_rows(const baton::TakeArguments* asked) {
    for (int64_t index = 0; index < asked->count; ++index) {  // on one thread: too little work to share
        const baton::TakenRow& row = asked->rows[index];
        float* taken = asked->taken + index * asked->size;
        std::copy_n(asked->logits + row.place * asked->stride, asked->size, taken);
        if (row.allowed.bits != nullptr) baton::keep_allowed(taken, asked->size, row.allowed);
    }
}
