// Products of bfloat16 in the tile registers of AMX: one sum per output in the order of the inputs, 32 inputs at a time,
// for any number of rows. Defined only at levels with such registers (tiles.h).
#pragma once

#include "multiply.h"
#include "tiles.h"

namespace baton {

constexpr int64_t TILE_ROWS = 16, TILE_WORDS = 16;
constexpr int64_t MOST_TILED_ROWS = 2 * TILE_ROWS;  // multiplied together, with 32 outputs: four tiles of sums

// Return whether the processor has tiles and the system permits their use; the system is asked once.
bool may_use_tiles();

// Add to the sums of some rows, [rows][PANEL], or overwrite them if this `begins` them. x: [ceil(steps / TILE_WORDS)]
// [rows][TILE_WORDS], zeros after the last step; panel: [steps][PANEL]. The thread's tiles stay configured until it calls
// release_tiles().
void multiply_tiled(const uint32_t* x, int64_t rows, const uint32_t* panel, int64_t steps, void* sums, bool begins,
                    Ahead ahead);

void release_tiles();

}  // namespace baton
