// Products of rows of quantized matrices with a few rounded vectors: what a processor has instructions for.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#    define SLOWAR_HAS_VNNI
#endif

namespace slowar {

// Vectors that rows are multiplied by at once: their sums have to stay in registers, beside what they are made of.
constexpr int n_few = 4;

// With more than a layout's n_direct, each few of them are multiplied by a tile of so many rows and blocks of 256, which
// stays in the second-level cache.
#if defined(SLOWAR_HAS_VNNI)
constexpr int64_t n_lanes = 16;  // numbers of 32 bits in a register, each of another row
#else
constexpr int64_t n_lanes = 8;
#endif
constexpr int64_t tile_rows   = 2 * n_lanes;
constexpr int64_t tile_blocks = 16;

// 256 numbers of a vector, rounded to 8 bits.
struct alignas(32) rounded_block {
    int8_t q[256];
    union {
        int16_t sums_16[16];  // of each sixteen
        float   factors[8];   // of each 32, where a matrix is of Q8_0
    };
    int16_t sums_32[8];  // of each 32
    float   d;           // else the factor of all
};

// Block after block of all vectors, so that those of a few vectors lie together.
struct vectors {
    rounded_block * at;
    int64_t         n_all;

    rounded_block * block(int64_t i) const { return at + i * n_all; }  // and those of further vectors behind it

    vectors from(int64_t v, int64_t i) const { return { block(i) + v, n_all }; }
};

// Up to 256 numbers of a vector.
using round_t = void (*)(const float * x, int64_t n, rounded_block & to);

struct rows {
    const char * at;
    size_t       stride;
    int64_t      n;
    int64_t      n_blocks;

    const char * row(int64_t r) const { return at + size_t(r) * stride; }
};

// Rows times the first few vectors; the products of a vector are side by side, those of the next n_out behind them.
using few_t = void (*)(const rows & w, const vectors & x, float * out, int64_t n_out);

// Rows that are asked of memory while others are multiplied, a few lines at a time, n times in all: so they are in the
// second-level cache when their turn comes, and what is read meanwhile need not wait behind them.
class coming {
  public:
    coming(const rows & w, size_t row_bytes, int64_t n_times)
        : w_(w), row_bytes_(row_bytes), n_lines_((int64_t((row_bytes + 63) / 64) * w.n + n_times - 1) / n_times) {}

    inline void ask();

  private:
    rows    w_;
    size_t  row_bytes_;
    int64_t n_lines_;
    int64_t r_  = 0;
    size_t  at_ = 0;
};

// Rows in the form in which a tile has them, in the memory `tile` or where they lie already.
using open_t = rows (*)(const rows & w, char * tile);

// Opened rows, up to tile_rows, times the first few vectors, added to what there is from blocks before these, if there are
// any. Meanwhile memory is asked for what comes next.
using many_t = void (*)(const rows & w, coming & next, const vectors & x, bool adds, float * out, int64_t n_out);

// Whole groups of rows from the file's layout.
using pack_t = void (*)(const rows & w, char * to);

// How rows lie.
struct layout {
    int64_t n_together;  // rows whose numbers are mixed, in as many bytes
    int64_t n_direct;    // vectors for which rows are read as they lie; with more they are opened
    few_t   few[n_few];
    open_t  open;
    size_t  opened_bytes;  // of n_lanes rows of 256 in a tile; 0: they lie so
    pack_t  pack;          // nullptr: as in the file
};

struct kernel {
    ggml_type      type;
    size_t         block_bytes;
    int64_t        n_per_256;  // blocks
    round_t        round;
    layout         apart;   // one row behind the other, as in the file
    const layout * packed;  // n_lanes at a time, side by side
    const many_t * many;    // n_few of them
};

// nullptr: this type has none here.
const kernel * kernel_for(ggml_type type);

}  // namespace slowar
