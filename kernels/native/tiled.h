// Products of bfloat16 in the tile registers of AMX. For any number of rows, an output is one sum in the order of the
// inputs, 32 inputs at a time. Defined only at instruction-set levels with such registers (tiles.h).
#pragma once

#include "multiply.h"
#include "tiles.h"

namespace baton {

constexpr int64_t TILE_ROWS = 16, TILE_WORDS = 16;
constexpr int64_t MOST_TILED_ROWS = 2 * TILE_ROWS;  // most rows together: their sums fill four tiles

// Return whether the processor has tile registers and the system permits their use. Asks the system only once.
bool may_use_tiles();

// Add products of some rows and a panel to `sums`, [rows][PANEL]; if `begins`, overwrite the sums instead. x:
// [ceil(steps / TILE_WORDS)][rows][TILE_WORDS], zeros after the last step; panel: [steps][PANEL]. The thread's tiles
// stay configured until it calls release_tiles().
void multiply_tiled(const uint32_t* x, int64_t rows, const uint32_t* panel, int64_t steps, void* sums, bool begins,
                    Ahead ahead);

void release_tiles();

}  // namespace baton
