// Small operations of a layer, each as a separate kernel. Contracts: kernels/norms.py, pages.py.
#include "layer.h"

#include "arguments.h"

extern "C" void baton_rms_norm(const float* x, const float* weight, int64_t rows, int64_t size, float eps, float* to,
                               int32_t threads) {
    baton::rms_norm(x, weight, rows, size, eps, to, threads);
}

extern "C" void baton_gate_mul(const float* gate_up, int64_t rows, int64_t size, int32_t gate, float* to,
                               int32_t threads) {
    baton::gate_mul(gate_up, rows, size, static_cast<baton::Gate>(gate), to, threads);
}

extern "C" void baton_rotate_and_store(const baton::RotateStore* asked) { baton::rotate_and_store(*asked); }
