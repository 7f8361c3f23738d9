// Sum of the products of words and factors, modulo 2^64, from which kvtransfer/checksum.py computes checksums of
// blocks.
#include <cstdint>

extern "C" uint64_t baton_weighted_sum(const uint32_t* words, const uint64_t* factors, int64_t count) {
    uint64_t sum = 0;  // the compiler splits it into one sum per lane of a register
    for (int64_t place = 0; place < count; ++place) sum += words[place] * factors[place];
    return sum;
}
