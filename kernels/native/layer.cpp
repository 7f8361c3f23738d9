// The small operations of a layer, one at a time. Contracts: kernels/norms.py, pages.py.
#include "layer.h"

#include "arguments.h"

extern "C" void baton_rms_norm(const float* x, const float* weight, int64_t rows, int64_t size, float eps, float* to,
                               int32_t threads) {
    baton::rms_norm(x, weight, rows, size, eps, to, threads);
}

extern "C" void baton_silu_mul(const float* gate_up, int64_t rows, int64_t size, float* to, int32_t threads) {
    baton::silu_mul(gate_up, rows, size, to, threads);
}

extern "C" void baton_rotate_and_store(const baton::RotateStore* asked) { baton::rotate_and_store(*asked); }
