// Operations on the eight tile registers of processors with AMX, each of at most 16 rows of 64 bytes. For tests on
// other processors they are emulated according to Intel's Software Developer's Manual, volume 2.
#pragma once

#include "vector.h"

#if defined(__AMX_BF16__) || defined(BATON_EMULATED_AMX)
#define BATON_TILES 1

namespace baton {

constexpr int TILES = 8;

// Operand of LDTILECFG. A tile without rows has no bytes either, and must not be used.
struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "size of the operand of LDTILECFG");

#if defined(BATON_EMULATED_AMX)

struct EmulatedTiles {
    TileShapes shapes;
    Ints rows[TILES][16];
};
inline thread_local EmulatedTiles emulated{};

// End the process if a processor with AMX would raise an exception.
inline void check(bool is_allowed) {
    if (!is_allowed) __builtin_trap();
}

inline void shape_tiles(const TileShapes& shapes) {
    check(shapes.palette == 1 && shapes.start_row == 0);
    for (int tile = 0; tile < TILES; ++tile) {
        check(shapes.rows[tile] <= 16 && shapes.row_bytes[tile] <= 64);
        check((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0));
    }
    emulated = EmulatedTiles{shapes, {}};
}

inline void release_all_tiles() { emulated = EmulatedTiles{}; }

template <int tile>
inline void zero_tile() {
    check(emulated.shapes.rows[tile] > 0);
    for (Ints& row : emulated.rows[tile]) row = Ints{};
}

template <int tile>
inline void load_tile(const void* from, int64_t stride_bytes) {
    zero_tile<tile>();
    for (int row = 0; row < emulated.shapes.rows[tile]; ++row)
        std::memcpy(&emulated.rows[tile][row], static_cast<const char*>(from) + row * stride_bytes,
                    emulated.shapes.row_bytes[tile]);
}

template <int tile>
inline void store_tile(void* to, int64_t stride_bytes) {
    check(emulated.shapes.rows[tile] > 0);
    for (int row = 0; row < emulated.shapes.rows[tile]; ++row)
        std::memcpy(static_cast<char*>(to) + row * stride_bytes, &emulated.rows[tile][row],
                    emulated.shapes.row_bytes[tile]);
}

// Add the products of bfloat16 numbers in the upper half of each lane, rounding once.
inline Floats add_products(Floats sum, Ints x, Ints y) {
    Floats added;
    const Floats a = flushed(as_floats(x)), b = flushed(as_floats(y));
    for (int lane = 0; lane < LANES; ++lane) added[lane] = std::fma(a[lane], b[lane], sum[lane]);
    return flushed(added);
}

// sums [m][n] += x [m][k][2] times y [k][n][2]. Per output, the products of the first numbers of all pairs are summed
// from zero, those of the second numbers too, then both sums are added, and the result to the earlier sum.
template <int sums, int x, int y>
inline void add_tile_products() {
    const TileShapes& shapes = emulated.shapes;
    const int rows = shapes.rows[sums], pairs = shapes.rows[y];
    check(rows > 0 && pairs > 0 && shapes.rows[x] == rows);
    check(shapes.row_bytes[x] == 4 * pairs && shapes.row_bytes[y] == shapes.row_bytes[sums]);
    const int32_t upper = static_cast<int32_t>(0xffff0000);
    for (int row = 0; row < rows; ++row) {
        Floats first{}, second{};
        for (int pair = 0; pair < pairs; ++pair) {
            const Ints given = Ints{} + emulated.rows[x][row][pair], other = emulated.rows[y][pair];
            first = add_products(first, given << 16, other << 16);
            second = add_products(second, given & upper, other & upper);
        }
        const Floats held = flushed(as_floats(emulated.rows[sums][row]));
        emulated.rows[sums][row] = as_ints(flushed(held + flushed(first + second)));
    }
}

#else

// Assembly, since GCC 12's intrinsics do not declare that they read memory, which may then be written too late.
inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

inline void release_all_tiles() { asm volatile("tilerelease"); }

template <int tile>
ALWAYS_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
ALWAYS_INLINE void load_tile(const void* from, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(tile) : "memory");
}

template <int tile>
ALWAYS_INLINE void store_tile(void* to, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(tile) : "memory");
}

template <int sums, int x, int y>
ALWAYS_INLINE void add_tile_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(x), "i"(y));
}

#endif

}  // namespace baton
#endif
