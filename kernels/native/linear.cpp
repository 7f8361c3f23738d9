// Rows times a packed weight. Contract: kernels/packed_linear.py.
#include "linear.h"

#include "arguments.h"

extern "C" void baton_linear(const baton::LinearArguments* asked) {
    baton::linear(asked->x, asked->rows, asked->weight, asked->output, false, asked->threads);
}
