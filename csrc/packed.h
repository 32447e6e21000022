// Blocks of n_lanes rows side by side: as many bytes as in the file, in the order in which they are read. Memory delivers
// at half the rate where a place is read in another order.
#pragma once

#include "lanes.h"

#ifdef SLOWAR_HAS_PRODUCTS

#    include <cstddef>

namespace slowar {

struct packed_block_q4_K {
    uint8_t  scales[3][n_lanes][4];  // of groups 0 to 3, of 4 to 7, minima of 0 to 3; above them those of 4 to 7
    uint16_t d[n_lanes];
    uint16_t dmin[n_lanes];
    uint8_t  q[32][n_lanes][4];
};

struct packed_block_q6_K {
    int8_t   scales[4][n_lanes][4];
    uint16_t d[n_lanes];
    uint8_t  q[48][n_lanes][4];
};

static_assert(sizeof(packed_block_q4_K) == n_lanes * sizeof(block_q4_K) &&
                  sizeof(packed_block_q6_K) == n_lanes * sizeof(block_q6_K),
              "they lie in place of the rows");

// What a kernel reads of a block, in a register for n_lanes rows: scales(s) of the s-th sum, offsets(k) the 2k-th and the
// one behind it, numbers 4q to 4q + 3 of group j.

class packed_q4_K {
  public:
    using format     = q4_K;
    using file_block = block_q4_K;
    using block      = packed_block_q4_K;

    static constexpr int n_groups = 2;  // that share bytes

    packed_q4_K() = default;

    explicit packed_q4_K(const block & w) : w_(&w) {
        const ints a    = load_ints(w.scales[0]);
        const ints b    = load_ints(w.scales[1]);
        const ints c    = load_ints(w.scales[2]);
        const ints low  = right(a, 6) & every_byte(0x03, a);
        const ints mid  = right(b, 4) & every_byte(0x0c, b);
        const ints high = right(c, 2) & every_byte(0x30, c);
        least_[0]       = c & every_byte(0x3f, c);
        least_[1]       = low | mid | high;
    }

    ints scales(int s) const {
        const ints four = load_ints(w_->scales[s / 4]);
        return scale(four & every_byte(0x3f, four), s % 4);
    }

    ints offsets(int k) const { return pair(least_[k / 2], k % 2 * 2, k % 2 * 2 + 1); }

    static ints numbers(const block & w, int j, int q) {
        return format::numbers(j, [&w, q](int u) { return load_ints(w.q[place(u, q)]); });
    }

    static void factors_of(const block & w, floats & d, floats & d_offset) {
        d        = load_halves(w.d);
        d_offset = -load_halves(w.dmin);
    }

    // Where numbers 4q to 4q + 3 of each row's u-th 32 bytes lie.
    static constexpr int place(int u, int q) { return 8 * u + q; }

    // Of blocks of the file that lie so far behind these places.
    static void pack_scales(const char * const (&row)[n_lanes], size_t behind, block & to) {
        ints four[4];
        transpose(row, behind + offsetof(block_q4_K, d), four);
        store_halves(to.d, four[0]);
        store_halves(to.dmin, upper_halves(four[0]));
        // Six bits of the first four scales and minima; four of the others, whose upper two lie above those.
        const ints a = four[1], b = four[2], c = four[3];
        const ints six = every_byte(0x3f, a), low = every_byte(0x0f, a), high = every_byte(0x30, a);
        const ints least = (right(c, 4) & low) | (right(b, 2) & high);
        store(to.scales[0], (a & six) | left(least & every_byte(0x03, a), 6));
        store(to.scales[1], (c & low) | (right(a, 2) & high) | left(least & every_byte(0x0c, a), 4));
        store(to.scales[2], (b & six) | left(least & high, 2));
    }

    static constexpr size_t at_numbers = offsetof(block_q4_K, q);

  private:
    const block * w_;
    ints          least_[2];
};

class packed_q6_K {
  public:
    using format     = q6_K;
    using file_block = block_q6_K;
    using block      = packed_block_q6_K;

    static constexpr int n_groups = 4;

    packed_q6_K() = default;

    explicit packed_q6_K(const block & w) : w_(&w) {}

    ints scales(int s) const { return signed_scale(load_ints(w_->scales[s / 4]), s % 4); }

    ints offsets(int k) const { return signed_pair(load_ints(w_->scales[k / 2]), k % 2 * 2, k % 2 * 2 + 1); }

    static ints numbers(const block & w, int j, int q) {
        return format::numbers(j, [&w, q](int u) { return load_ints(w.q[place(u, q)]); });
    }

    static void factors_of(const block & w, floats & d, floats & d_offset) {
        d        = load_halves(w.d);
        d_offset = d * every(-32.0f);
    }

    // Two times 32 low bytes are read with the high ones of the same groups.
    static constexpr int place(int u, int q) {
        const int half = u < 4 ? u / 2 : u - 4;
        return 3 * (8 * half + q) + (u < 4 ? u % 2 : 2);
    }

    static void pack_scales(const char * const (&row)[n_lanes], size_t behind, block & to) {
        ints four[4];
        transpose(row, behind + offsetof(block_q6_K, scales), four);
        for (int k = 0; k < 4; k++) {
            store(to.scales[k], four[k]);
        }
        for (int r = 0; r < n_lanes; r++) {
            std::memcpy(to.d + r, row[r] + behind + offsetof(block_q6_K, d), sizeof(to.d[r]));
        }
    }

    static constexpr size_t at_numbers = offsetof(block_q6_K, low);

  private:
    const block * w_;
};

// Where things lie in up to eight blocks, as many numbers as the others have in one: the factors of all, then the numbers.
// So a register of 64 bytes is a line of the caches, where rows have an even number of blocks.
struct packed_q8_0 {
    using file_block = block_q8_0;

    static constexpr int n_groups = 2;  // one, counted twice for the registers that signs take

    static constexpr size_t d(int64_t j) { return size_t(j * n_lanes) * sizeof(uint16_t); }

    // Numbers 4q to 4q + 3 of block j of n.
    static constexpr size_t q(int64_t n, int64_t j, int64_t q) { return d(n) + size_t((8 * j + q) * n_lanes) * 4; }
};

inline int64_t n_groups(const rows & w) {
    return (w.n + n_lanes - 1) / n_lanes;
}

// The i-th block of a group of n_lanes rows.
template <typename packed> const char * block_of(const char * group, int64_t i) {
    return group + size_t(i * n_lanes) * sizeof(typename packed::file_block);
}

// Block i of each of n_lanes rows of the file.
template <typename packed> void pack_block(const char * const (&row)[n_lanes], int64_t i, typename packed::block & to) {
    const size_t behind = size_t(i) * sizeof(typename packed::file_block);
    for (const char * one : row) {
        ask_for(one + behind + sizeof(typename packed::file_block), sizeof(typename packed::file_block));
    }
    packed::pack_scales(row, behind, to);
    for (int p = 0; p < packed::format::n_bytes / 16; p++) {
        ints four[4];
        transpose(row, behind + packed::at_numbers + size_t(16 * p), four);
        for (int k = 0; k < 4; k++) {
            store(to.q[packed::place(p / 2, p % 2 * 4 + k)], four[k]);
        }
    }
}

// And n blocks from the i-th on.
inline void pack_q8_0(const char * const (&row)[n_lanes], int64_t i, int64_t n, char * to) {
    for (int64_t j = 0; j < n; j++) {
        const size_t behind = size_t(i + j) * sizeof(block_q8_0);
        for (int r = 0; r < n_lanes; r++) {
            ask_for(row[r] + behind + 3 * sizeof(block_q8_0), 1);  // a line further
            std::memcpy(to + packed_q8_0::d(j) + size_t(r) * sizeof(block_q8_0::d), row[r] + behind,
                        sizeof(block_q8_0::d));
        }
        for (int p = 0; p < 2; p++) {
            ints four[4];
            transpose(row, behind + offsetof(block_q8_0, q) + size_t(16 * p), four);
            for (int k = 0; k < 4; k++) {
                store(to + packed_q8_0::q(n, j, 4 * p + k), four[k]);
            }
        }
    }
}

// Calls fn(rows of the file, index of the group) for each group of n_lanes rows; the last row again where there are fewer.
template <typename fn_t> void for_groups(const rows & w, fn_t fn) {
    for (int64_t g = 0; g < n_groups(w); g++) {
        const char * row[n_lanes];
        for (int64_t r = 0; r < n_lanes; r++) {
            row[r] = w.row(std::min(g * n_lanes + r, w.n - 1));
        }
        fn(row, g);
    }
}

template <typename packed> void pack(const rows & w, char * to) {
    for_groups(w, [&w, to](const char * const(&row)[n_lanes], int64_t g) {
        for (int64_t i = 0; i < w.n_blocks; i++) {
            char * here = to + size_t((g * w.n_blocks + i) * n_lanes) * sizeof(typename packed::file_block);
            pack_block<packed>(row, i, *reinterpret_cast<typename packed::block *>(here));
        }
    });
}

template <> inline void pack<packed_q8_0>(const rows & w, char * to) {
    for_groups(w, [&w, to](const char * const(&row)[n_lanes], int64_t g) {
        for (int64_t i = 0; i < w.n_blocks; i += 8) {
            char * here = to + size_t((g * w.n_blocks + i) * n_lanes) * sizeof(block_q8_0);
            pack_q8_0(row, i, std::min<int64_t>(8, w.n_blocks - i), here);
        }
    });
}

// In packed.cpp.
extern const layout packed_rows_q4_K, packed_rows_q6_K, packed_rows_q8_0;

}  // namespace slowar
#endif
