// Rows times many vectors: a tile of rows is brought into the form for that, unless it lies so already, and stays in the
// second-level cache for all of them.
#pragma once

#include "packed.h"

#ifdef SLOWAR_HAS_PRODUCTS

#    include <type_traits>

namespace slowar {

#    if defined(SLOWAR_HAS_VNNI)

// Packed rows have the form.
template <typename packed> using opened = packed;

#    else

// With sixteen registers, numbers that share bytes are parted once for all vectors.
template <typename packed> class opened {
  public:
    using format = typename packed::format;

    struct alignas(64) block {
        uint8_t q[64][n_lanes][4];
        int32_t scales[format::n_scales][n_lanes];
        int16_t offsets[format::n_offsets / 2][n_lanes][2];
        float   d[n_lanes];
        float   d_offset[n_lanes];
    };

    explicit opened(const block & w) : w_(&w) {}

    ints scales(int s) const { return load_ints(w_->scales[s]); }

    ints offsets(int k) const { return load_ints(w_->offsets[k]); }

    static ints numbers(const block & w, int j, int q) { return load_ints(w.q[8 * j + q]); }

    static void factors_of(const block & w, floats & d, floats & d_offset) {
        d        = load_floats(w.d);
        d_offset = load_floats(w.d_offset);
    }

    static void open(const typename packed::block & from, block & to) {
        const packed one(from);
        for (int s = 0; s < format::n_scales; s++) {
            store(to.scales[s], one.scales(s));
        }
        for (int k = 0; k < format::n_offsets / 2; k++) {
            store(to.offsets[k], one.offsets(k));
        }
        floats d, d_offset;
        packed::factors_of(from, d, d_offset);
        store(to.d, d);
        store(to.d_offset, d_offset);
#        pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            for (int q = 0; q < 8; q++) {
                store(to.q[8 * j + q], packed::numbers(from, j, q));
            }
        }
    }

  private:
    const block * w_;
};

#    endif

template <typename packed> constexpr bool lies_opened = std::is_same_v<opened<packed>, packed>;

// Of n_lanes rows of 256.
template <typename packed> constexpr size_t opened_bytes = sizeof(typename opened<packed>::block);

template <> inline constexpr bool lies_opened<packed_q8_0> = true;

template <> inline constexpr size_t opened_bytes<packed_q8_0> = 8 * n_lanes * sizeof(block_q8_0);

// Rows of the file; a group's blocks lie behind each other in a tile.
template <typename packed> rows open_file(const rows & w, char * tile) {
    if constexpr (lies_opened<packed>) {
        pack<packed>(w, tile);
        return { tile, size_t(w.n_blocks) * sizeof(typename packed::file_block), w.n, w.n_blocks };
    } else {
        auto * to = reinterpret_cast<typename opened<packed>::block *>(tile);
        for_groups(w, [&w, &to](const char * const(&row)[n_lanes], int64_t) {
            for (int64_t i = 0; i < w.n_blocks; i++, to++) {
                typename packed::block one;
                pack_block<packed>(row, i, one);
                opened<packed>::open(one, *to);
            }
        });
        return { tile, size_t(w.n_blocks) * opened_bytes<packed> / n_lanes, w.n, w.n_blocks };
    }
}

template <typename packed> rows open_packed(const rows & w, char * tile) {
    if constexpr (lies_opened<packed>) {
        return w;
    } else {
        auto * to = reinterpret_cast<typename opened<packed>::block *>(tile);
        for (int64_t g = 0; g < n_groups(w); g++) {
            const auto * from = reinterpret_cast<const typename packed::block *>(w.row(g * n_lanes));
            for (int64_t i = 0; i < w.n_blocks; i++, to++) {
                opened<packed>::open(from[i], *to);
            }
        }
        return { tile, size_t(w.n_blocks) * opened_bytes<packed> / n_lanes, w.n, w.n_blocks };
    }
}

inline void coming::ask() {
    for (int64_t n = n_lines_; n > 0 && r_ < w_.n; n--) {
        asm volatile("prefetcht1 %0" : : "m"(w_.row(r_)[at_]));
        at_ += 64;
        if (at_ >= row_bytes_) {
            at_ = 0;
            r_++;
        }
    }
}

// The lanes' products with a vector, those that there are.

inline floats begin(const rows & w, int64_t first, bool adds, const float * out) {
    float all[n_lanes] = {};
    if (adds && w.n - first >= n_lanes) {
        return load_floats(out + first);
    }
    if (adds) {
        std::copy_n(out + first, std::min(n_lanes, w.n - first), all);
    }
    return load_floats(all);
}

inline void give(const rows & w, int64_t first, floats products, float * out) {
    if (w.n - first >= n_lanes) {
        store(out + first, products);
        return;
    }
    float all[n_lanes];
    store(all, products);
    std::copy_n(all, std::min(n_lanes, w.n - first), out + first);
}

// Adds the products of the i-th block of g groups of rows with n vectors.
template <typename packed, int g, int n>
[[gnu::always_inline]] inline void add_block(const char * const (&group)[g], int64_t i, const rounded_block * y,
                                             coming & next, floats (&acc)[g][n]) {
    using tile   = opened<packed>;
    using format = typename packed::format;
    using block  = typename tile::block;

    constexpr int n_per_scale = 64 / format::n_scales;
    constexpr int n_at_once   = n_quads<format>();

    const block * w[g];
    ints          total[g][n];
    std::fill_n(total[0], g * n, every(0));
    for (int a = 0; a < g; a++) {
        w[a] = reinterpret_cast<const block *>(group[a]) + i;
    }
    const auto add_group = [&](int j) {
        next.ask();
        for (int first = 0; first < 8; first += n_at_once) {
            ints products[g][n];
#    pragma GCC unroll 8
            for (int q = first; q < first + n_at_once; q++) {
                ints numbers[g];
                for (int a = 0; a < g; a++) {
                    numbers[a] = tile::numbers(*w[a], j, q);
                }
                for (int v = 0; v < n; v++) {
                    const ints four = four_bytes(y[v].q + 32 * j + 4 * q);
                    for (int a = 0; a < g; a++) {
                        products[a][v] = add_four(q == first, products[a][v], numbers[a], four);
                    }
                }
            }
            for (int a = 0; a < g; a++) {
                const ints scales = tile(*w[a]).scales((8 * j + first) / n_per_scale);
                for (int v = 0; v < n; v++) {
                    total[a][v] = plus(total[a][v], scaled(scales, products[a][v]));
                }
            }
        }
    };
    for (int j = 0; j < 8; j += packed::n_groups) {
#    pragma GCC unroll 4
        for (int k = 0; k < packed::n_groups; k++) {
            add_group(j + k);
        }
    }
    for (int a = 0; a < g; a++) {
        floats d, d_offset;
        tile::factors_of(*w[a], d, d_offset);
        for (int v = 0; v < n; v++) {
            ints offset = every(0);
            for (int k = 0; k < format::n_offsets / 2; k++) {
                offset = add_two(offset, tile(*w[a]).offsets(k), four_bytes(format::sums_of(y[v]) + 2 * k));
            }
            const floats d_y = every(y[v].d);
            acc[a][v]        = add(acc[a][v], d * d_y, total[a][v]);
            acc[a][v]        = add(acc[a][v], d_offset * d_y, offset);
        }
    }
}

// And of up to eight blocks of Q8_0.
template <int g, int n>
[[gnu::always_inline]] inline void add_blocks(const char * const (&group)[g], int64_t i, int64_t n_blocks,
                                              const rounded_block * y, coming & next, floats (&acc)[g][n]) {
    const char * w[g];
    for (int a = 0; a < g; a++) {
        w[a] = block_of<packed_q8_0>(group[a], i);
    }
    for (int64_t j = 0; j < n_blocks; j++) {
        next.ask();
        ints total[g][n];
#    pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
            for (int v = 0; v < n; v++) {
                const ints four = four_bytes(y[v].q + 32 * j + 4 * q);
                for (int a = 0; a < g; a++) {
                    const ints numbers = load_ints(w[a] + packed_q8_0::q(n_blocks, j, q));
                    total[a][v]        = add_four_signed(q == 0, total[a][v], numbers, four, y[v].sums_32[j]);
                }
            }
        }
        for (int a = 0; a < g; a++) {
            const floats d = load_halves(w[a] + packed_q8_0::d(j));
            for (int v = 0; v < n; v++) {
                acc[a][v] = add(acc[a][v], d * every(y[v].factors[j]), total[a][v]);
            }
        }
    }
}

template <typename packed, int g, int n>
void multiply_tile(const rows & w, coming & next, const vectors & x, bool adds, float * out, int64_t n_out) {
    const char * group[g];
    floats       acc[g][n];
    for (int a = 0; a < g; a++) {
        group[a] = w.row(a * n_lanes);
        for (int v = 0; v < n; v++) {
            acc[a][v] = begin(w, a * n_lanes, adds, out + v * n_out);
        }
    }
    if constexpr (std::is_same_v<packed, packed_q8_0>) {
        for (int64_t i = 0; i < w.n_blocks; i += 8) {
            add_blocks(group, i, std::min<int64_t>(8, w.n_blocks - i), x.block(i / 8), next, acc);
        }
    } else {
        for (int64_t i = 0; i < w.n_blocks; i++) {
            add_block<packed>(group, i, x.block(i), next, acc);
        }
    }
    for (int a = 0; a < g; a++) {
        for (int v = 0; v < n; v++) {
            give(w, a * n_lanes, acc[a][v], out + v * n_out);
        }
    }
}

template <typename packed, int n>
void multiply_many(const rows & w, coming & next, const vectors & x, bool adds, float * out, int64_t n_out) {
    if (n_groups(w) == 1) {
        multiply_tile<packed, 1, n>(w, next, x, adds, out, n_out);
    } else {
        multiply_tile<packed, 2, n>(w, next, x, adds, out, n_out);
    }
}

}  // namespace slowar
#endif
