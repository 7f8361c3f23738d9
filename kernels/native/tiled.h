// Products of bfloat16 in the tile registers of AMX: one sum per output in the order of the inputs, 32 of them at a time,
// however many rows there are. Defined at levels that have such registers (tiles.h) alone.
#pragma once

#include "multiply.h"
#include "tiles.h"

namespace baton {

constexpr int64_t TILE_ROWS = 16, TILE_WORDS = 16;
constexpr int64_t MOST_TILED_ROWS = 2 * TILE_ROWS;  // that are multiplied at once, with 32 outputs: four tiles of sums

// Whether the processor has them and the system lets this process use them, which it is asked once.
bool may_use_tiles();

// Adds to the sums of some rows, [rows][PANEL], or begins them. x: [ceil(steps / TILE_WORDS)][rows][TILE_WORDS], zeros
// after the last step; panel: [steps][PANEL]. The thread's tiles stay as they are until it calls release_tiles().
void multiply_tiled(const uint32_t* x, int64_t rows, const uint32_t* panel, int64_t steps, void* sums, bool begins,
                    Ahead ahead);

void release_tiles();

}  // namespace baton
