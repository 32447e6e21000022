#include "tiles.h"

#ifdef SLOWAR_HAS_PRODUCTS

#    include <algorithm>

namespace slowar {

namespace {

// How far ahead memory is asked for what comes next. With lines of sixteen rows 512 bytes are too late on Intel: 2 KiB are
// 1.2 times as fast there and alike on Zen 4; with AVX2 2 KiB were 5 % slower.
constexpr size_t ahead_bytes = n_per_line == 1 ? 2048 : 512;

// Sums at once, where there are not more of one place: about as many as stay in registers.
constexpr int n_sums = 8;

// Places at once. Where a register is a line of the caches, two are 2 to 8 % faster than four.
constexpr int most_streams = n_per_line == 1 ? 2 : 4;

// n_lanes rows each, the g-th and as many others that lie so far apart.
template <int n> struct groups {
    groups(const rows & w, int64_t g, int64_t apart) {
        for (int p = 0; p < n; p++) {
            at[p] = w.row((g + p * apart) * n_lanes);
        }
    }

    const char * at[n];
};

// Adds the products of a block of n_lanes rows here and there with n vectors. Every few numbers the next place has its
// turn: memory delivers several streams faster than one.
template <typename packed, int n, int n_streams>
[[gnu::always_inline]] inline void add_packed(const groups<n_streams> & from, int64_t i, const rounded_block * y,
                                              floats (&acc)[n_streams][n]) {
    using format = typename packed::format;
    using block  = typename packed::block;

    constexpr int n_groups    = packed::n_groups;
    constexpr int n_steps     = 8 / n_groups;
    constexpr int n_registers = format::n_bytes / 32 / n_steps;
    constexpr int n_per_scale = 64 / format::n_scales;
    constexpr int n_at_once   = n_quads<format>();

    packed      one[n_streams];
    ints        total[n_streams][n], offset[n_streams][n];
#    pragma GCC unroll 1
    for (int p = 0; p < n_streams; p++) {
        const auto & w = *reinterpret_cast<const block *>(block_of<packed>(from.at[p], i));
        ask_for(reinterpret_cast<const char *>(&w) + ahead_bytes, sizeof(block) - sizeof(w.q));
        one[p] = packed(w);
        for (int v = 0; v < n; v++) {
            total[p][v]  = every(0);
            offset[p][v] = every(0);
        }
        for (int k = 0; k < format::n_offsets / 2; k++) {
            const ints least = one[p].offsets(k);
            for (int v = 0; v < n; v++) {
                const ints two = four_bytes(format::sums_of(y[v]) + 2 * k);
                offset[p][v]   = add_two(offset[p][v], least, two);
            }
        }
    }
#    pragma GCC unroll 4
    for (int step = 0; step < n_steps; step++) {
        for (int first = 0; first < 8; first += n_at_once) {
            ints products[n_streams][n_groups][n];
#    pragma GCC unroll 8
            for (int q = first; q < first + n_at_once; q++) {
#    pragma GCC unroll 4
                for (int p = 0; p < n_streams; p++) {
                    const auto & w = *reinterpret_cast<const block *>(block_of<packed>(from.at[p], i));
                    if (q % n_per_line == 0) {
                        const auto * here = w.q[n_registers * (8 * step + q)];
                        ask_for(reinterpret_cast<const char *>(here) + ahead_bytes, 64 * n_registers);
                    }
                    for (int g = 0; g < n_groups; g++) {
                        const int  j       = n_groups * step + g;
                        const ints numbers = packed::numbers(w, j, q);
                        for (int v = 0; v < n; v++) {
                            ints & sum = products[p][g][v];
                            sum        = add_four(q == first, sum, numbers, four_bytes(y[v].q + 32 * j + 4 * q));
                        }
                    }
                }
            }
            for (int p = 0; p < n_streams; p++) {
                for (int g = 0; g < n_groups; g++) {
                    const int  j      = n_groups * step + g;
                    const ints scales = one[p].scales((8 * j + first) / n_per_scale);
                    for (int v = 0; v < n; v++) {
                        total[p][v] = plus(total[p][v], scaled(scales, products[p][g][v]));
                    }
                }
            }
        }
    }
    for (int p = 0; p < n_streams; p++) {
        floats d, d_offset;
        packed::factors_of(*reinterpret_cast<const block *>(block_of<packed>(from.at[p], i)), d, d_offset);
        for (int v = 0; v < n; v++) {
            const floats d_y = every(y[v].d);
            acc[p][v]        = add(acc[p][v], d * d_y, total[p][v]);
            acc[p][v]        = add(acc[p][v], d_offset * d_y, offset[p][v]);
        }
    }
}

// And of up to eight blocks of Q8_0.
template <int n, int n_streams>
[[gnu::always_inline]] inline void add_packed_q8_0(const groups<n_streams> & from, int64_t i, int64_t n_blocks,
                                                   const rounded_block * y, floats (&acc)[n_streams][n]) {
    for (int64_t j = 0; j < n_blocks; j++) {
        ints total[n_streams][n];
#    pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
#    pragma GCC unroll 4
            for (int p = 0; p < n_streams; p++) {
                const char * w    = block_of<packed_q8_0>(from.at[p], i);
                const char * here = w + packed_q8_0::q(n_blocks, j, q);
                if (q % n_per_line == 0) {
                    ask_for(here + ahead_bytes, 64);
                }
                const ints numbers = load_ints(here);
                for (int v = 0; v < n; v++) {
                    const ints four = four_bytes(y[v].q + 32 * j + 4 * q);
                    total[p][v]     = add_four_signed(q == 0, total[p][v], numbers, four, y[v].sums_32[j]);
                }
            }
        }
        for (int p = 0; p < n_streams; p++) {
            const char * w = block_of<packed_q8_0>(from.at[p], i);
            ask_for(w + packed_q8_0::d(j) + ahead_bytes, 1);
            const floats d = load_halves(w + packed_q8_0::d(j));
            for (int v = 0; v < n; v++) {
                acc[p][v] = add(acc[p][v], d * every(y[v].factors[j]), total[p][v]);
            }
        }
    }
}

// The g-th n_lanes rows, and as many others that lie so far apart.
template <typename packed, int n, int n_streams>
void multiply_groups(const rows & w, const vectors & x, int64_t g, int64_t apart, float * out, int64_t n_out) {
    const groups<n_streams> from(w, g, apart);

    floats acc[n_streams][n];
    std::fill_n(acc[0], n_streams * n, every(0.0f));
    if constexpr (std::is_same_v<packed, packed_q8_0>) {
        for (int64_t i = 0; i < w.n_blocks; i += 8) {
            add_packed_q8_0(from, i, std::min<int64_t>(8, w.n_blocks - i), x.block(i / 8), acc);
        }
    } else {
        for (int64_t i = 0; i < w.n_blocks; i++) {
            add_packed<packed>(from, i, x.block(i), acc);
        }
    }
    for (int p = 0; p < n_streams; p++) {
        for (int v = 0; v < n; v++) {
            store(out + v * n_out + (g + p * apart) * n_lanes, acc[p][v]);
        }
    }
}

template <typename packed, int n> void multiply_few(const rows & w, const vectors & x, float * out, int64_t n_out) {
    constexpr int n_streams = std::clamp(n_sums / (packed::n_groups * n), 1, most_streams);
    const int64_t n_groups  = w.n / n_lanes;
    const int64_t apart     = n_groups / n_streams;
    for (int64_t g = 0; g < apart; g++) {
        multiply_groups<packed, n, n_streams>(w, x, g, apart, out, n_out);
    }
    for (int64_t g = apart * n_streams; g < n_groups; g++) {
        multiply_groups<packed, n, 1>(w, x, g, 0, out, n_out);
    }
}

template <typename packed> constexpr int n_direct = lies_opened<packed> ? n_few / 2 : 2 * n_few;

template <typename packed, int n> constexpr few_t few() {
    if constexpr (n <= n_direct<packed>) {
        return multiply_few<packed, n>;
    } else {
        return nullptr;
    }
}

template <typename packed> constexpr layout layout_of() {
    return { n_lanes,
             n_direct<packed>,
             { few<packed, 1>(), few<packed, 2>(), few<packed, 3>(), few<packed, 4>() },
             open_packed<packed>,
             lies_opened<packed> ? 0 : opened_bytes<packed>,
             pack<packed> };
}

}  // namespace

const layout packed_rows_q4_K = layout_of<packed_q4_K>();
const layout packed_rows_q6_K = layout_of<packed_q6_K>();
const layout packed_rows_q8_0 = layout_of<packed_q8_0>();

}  // namespace slowar
#endif
