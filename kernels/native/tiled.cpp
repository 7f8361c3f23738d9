// Products in tile registers. Tiles 0 to 3 contain the sums of at most 32 rows and 32 outputs, tiles 4 and 5 inputs,
// and tiles 6 and 7 weights.
#include "tiled.h"

#if defined(BATON_TILES)

#include <algorithm>

#if !defined(BATON_EMULATED_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace baton {
namespace {

constexpr int64_t ROW_BYTES = TILE_WORDS * 4, PANEL_BYTES = PANEL * 4;
static_assert(PANEL == 2 * TILE_WORDS && STRIP == PANEL, "two tiles of a panel");

thread_local int64_t shaped_rows = 0;  // number of rows for which this thread's tiles are configured; 0: none

// Configure the tiles for this number of rows, unless they are: it takes some hundred cycles and clears all tiles.
void shape_for(int64_t rows) {
    if (rows == shaped_rows) return;
    TileShapes shapes;
    const auto upper = static_cast<uint8_t>(std::min(rows, TILE_ROWS)), lower = static_cast<uint8_t>(rows - upper);
    for (int tile : {0, 1, 4}) shapes.rows[tile] = upper;
    for (int tile : {2, 3, 5}) shapes.rows[tile] = lower;
    for (int tile : {6, 7}) shapes.rows[tile] = TILE_WORDS;
    for (int tile = 0; tile < TILES; ++tile) shapes.row_bytes[tile] = shapes.rows[tile] ? ROW_BYTES : 0;
    shape_tiles(shapes);
    shaped_rows = rows;
}

// Call use(tile, offset) for each tile of sums, with the offset of its sums in memory.
template <bool has_lower, class Use>
ALWAYS_INLINE void for_sums(const Use& use) {
    use(std::integral_constant<int, 0>(), 0);
    use(std::integral_constant<int, 1>(), TILE_WORDS);
    if constexpr (has_lower) {
        use(std::integral_constant<int, 2>(), TILE_ROWS * PANEL);
        use(std::integral_constant<int, 3>(), TILE_ROWS * PANEL + TILE_WORDS);
    }
}

// Add the products of TILE_WORDS steps to the tiles of sums.
template <bool has_lower>
ALWAYS_INLINE void add_steps(const uint32_t* x, const uint32_t* panel) {
    load_tile<6>(panel, PANEL_BYTES);
    load_tile<4>(x, ROW_BYTES);
    add_tile_products<0, 4, 6>();
    load_tile<7>(panel + TILE_WORDS, PANEL_BYTES);
    add_tile_products<1, 4, 7>();
    if constexpr (has_lower) {
        load_tile<5>(x + TILE_ROWS * TILE_WORDS, ROW_BYTES);
        add_tile_products<2, 5, 6>();
        add_tile_products<3, 5, 7>();
    }
}

template <bool has_lower>
void multiply_some(const uint32_t* x, int64_t rows, const uint32_t* panel, int64_t steps, float* sums, bool begins,
                   Ahead ahead) {
    for_sums<has_lower>([&](auto tile, int64_t at) {
        begins ? zero_tile<tile.value>() : load_tile<tile.value>(sums + at, PANEL_BYTES);
    });
    for (; steps >= TILE_WORDS; steps -= TILE_WORDS, panel += TILE_WORDS * PANEL, x += TILE_WORDS * rows) {
        for (int64_t at = 0; at < TILE_WORDS * ahead.stride; at += LINE_BYTES) __builtin_prefetch(ahead.from + at, 0, 2);
        ahead.from += TILE_WORDS * ahead.stride;
        add_steps<has_lower>(x, panel);
    }
    if (steps > 0) {  // copy and pad: memory after the last step belongs to another panel, or is not mapped
        alignas(LINE_BYTES) uint32_t padded[TILE_WORDS * PANEL] = {};
        std::copy_n(panel, steps * PANEL, padded);
        add_steps<has_lower>(x, padded);
    }
    for_sums<has_lower>([&](auto tile, int64_t at) { store_tile<tile.value>(sums + at, PANEL_BYTES); });
}

#if !defined(BATON_EMULATED_AMX)
// Request permission to use tile registers. Linux (5.16 and later) saves them only for processes that have it.
bool has_permission() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool has_bfloat16 = d >> 22 & 1, has_tiles = d >> 24 & 1;
    return has_bfloat16 && has_tiles && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

}  // namespace

#if defined(BATON_EMULATED_AMX)
static bool is_allowed = true;

bool may_use_tiles() { return is_allowed; }
#else
bool may_use_tiles() {
    static const bool is_allowed = has_permission();
    return is_allowed;
}
#endif

void multiply_tiled(const uint32_t* x, int64_t rows, const uint32_t* panel, int64_t steps, void* sums, bool begins,
                    Ahead ahead) {
    shape_for(rows);
    (rows > TILE_ROWS ? multiply_some<true> : multiply_some<false>)(x, rows, panel, steps, static_cast<float*>(sums),
                                                                    begins, ahead);
}

void release_tiles() {
    release_all_tiles();
    shaped_rows = 0;
}

}  // namespace baton

#if defined(BATON_EMULATED_AMX)
// For tests: imitate a system that denies or permits the use of tile registers.
extern "C" void baton_allow_tiles(int32_t allowed) { baton::is_allowed = allowed != 0; }
#endif
#endif
