#include "lanes.h"

#ifdef SLOWAR_HAS_PRODUCTS

#    include <algorithm>
#    include <cstring>
#    include <type_traits>

namespace slowar {

namespace {

// How far ahead memory is asked for what comes next.
constexpr size_t ahead_bytes = 512;

// Sums at once, where there are not more of one place: about as many as stay in registers.
constexpr int n_sums = 8;

// n_lanes rows of a block side by side: as many bytes as in the file, in the order in which they are read. Memory delivers
// at half the rate where a place is read in another order.

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

struct packed_block_q8_0 {
    uint16_t d[n_lanes];
    int8_t   q[8][n_lanes][4];
};

static_assert(sizeof(packed_block_q4_K) == n_lanes * sizeof(block_q4_K) &&
                  sizeof(packed_block_q6_K) == n_lanes * sizeof(block_q6_K) &&
                  sizeof(packed_block_q8_0) == n_lanes * sizeof(block_q8_0),
              "they lie in place of the rows");

// What is read of a block before its numbers, in a register for n_lanes rows: scales(s) of the s-th sum,
// offsets(k) the 2k-th and the one behind it.

class packed_q4_K {
  public:
    using format     = q4_K;
    using file_block = block_q4_K;
    using block      = packed_block_q4_K;

    static constexpr int n_groups = 2;  // that share bytes
    static constexpr int n_direct = 8;
    static constexpr int n_bytes  = format::n_bytes;

    packed_q4_K() = default;

    explicit packed_q4_K(const block & w) {
        const ints a    = load_ints(w.scales[0]);
        const ints b    = load_ints(w.scales[1]);
        const ints c    = load_ints(w.scales[2]);
        const ints six  = every_byte(0x3f, a);
        const ints low  = right(a, 6) & every_byte(0x03, a);
        const ints mid  = right(b, 4) & every_byte(0x0c, b);
        const ints high = right(c, 2) & every_byte(0x30, c);
        scale_[0]       = a & six;
        scale_[1]       = b & six;
        least_[0]       = c & six;
        least_[1]       = low | mid | high;
    }

    ints scales(int s) const { return scale(scale_[s / 4], s % 4); }

    ints offsets(int k) const { return pair(least_[k / 2], k % 2 * 2, k % 2 * 2 + 1); }

    static void factors_of(const block & w, floats & d, floats & d_offset) {
        d        = load_halves(w.d);
        d_offset = -load_halves(w.dmin);
    }

    // Where numbers 4q to 4q + 3 of each row's u-th 32 bytes lie.
    static constexpr int place(int u, int q) { return 8 * u + q; }

    static const uint8_t * bytes(const block_q4_K & w) { return format::bytes(w); }

    static void pack_scales(const block_q4_K & from, int r, block & to) {
        uint8_t scale[16];
        _mm_storeu_si128(reinterpret_cast<__m128i *>(scale), q4_K(from).all_scales());
        const uint8_t * least = scale + 8;
        for (int j = 0; j < 4; j++) {
            to.scales[0][r][j] = uint8_t(scale[j] | (least[4 + j] & 0x03) << 6);
            to.scales[1][r][j] = uint8_t(scale[4 + j] | (least[4 + j] & 0x0c) << 4);
            to.scales[2][r][j] = uint8_t(least[j] | (least[4 + j] & 0x30) << 2);
        }
        to.d[r]    = from.d;
        to.dmin[r] = from.dmin;
    }

  private:
    ints scale_[2];
    ints least_[2];
};

class packed_q6_K {
  public:
    using format     = q6_K;
    using file_block = block_q6_K;
    using block      = packed_block_q6_K;

    static constexpr int n_groups = 4;
    static constexpr int n_direct = 8;
    static constexpr int n_bytes  = format::n_bytes;

    packed_q6_K() = default;

    explicit packed_q6_K(const block & w) : w_(&w) {}

    ints scales(int s) const { return signed_scale(load_ints(w_->scales[s / 4]), s % 4); }

    ints offsets(int k) const { return signed_pair(load_ints(w_->scales[k / 2]), k % 2 * 2, k % 2 * 2 + 1); }

    static void factors_of(const block & w, floats & d, floats & d_offset) {
        d        = load_halves(w.d);
        d_offset = d * every(-32.0f);
    }

    // Two times 32 low bytes are read with the high ones of the same groups.
    static constexpr int place(int u, int q) {
        const int half = u < 4 ? u / 2 : u - 4;
        return 3 * (8 * half + q) + (u < 4 ? u % 2 : 2);
    }

    static const uint8_t * bytes(const block_q6_K & w) { return format::bytes(w); }

    static void pack_scales(const block_q6_K & from, int r, block & to) {
        for (int s = 0; s < 16; s++) {
            to.scales[s / 4][r][s % 4] = from.scales[s];
        }
        to.d[r] = from.d;
    }

  private:
    const block * w_;
};

class packed_q8_0 {
  public:
    using file_block = block_q8_0;
    using block      = packed_block_q8_0;

    static constexpr int n_groups = 2;  // one, counted twice for the registers that signs take
    static constexpr int n_direct = 32;
    static constexpr int n_bytes  = 32;

    static const int8_t * bytes(const block_q8_0 & w) { return w.q; }

    static constexpr int place(int, int q) { return q; }

    static void pack_scales(const block_q8_0 & from, int r, block & to) { to.d[r] = from.d; }
};

// The file may have rows at any address.
template <typename packed> void pack(const rows & w, char * to) {
    auto * out = reinterpret_cast<typename packed::block *>(to);
    for (int64_t g = 0; g < w.n; g += n_lanes) {
        for (int64_t i = 0; i < w.n_blocks; i++, out++) {
            for (int r = 0; r < n_lanes; r++) {
                typename packed::file_block from;
                std::memcpy(&from, w.row(g + r) + size_t(i) * sizeof(from), sizeof(from));
                packed::pack_scales(from, r, *out);
                for (int k = 0; k < packed::n_bytes / 4; k++) {
                    std::memcpy(out->q[packed::place(k / 8, k % 8)][r], packed::bytes(from) + 4 * k, 4);
                }
            }
        }
    }
}

// The first block of each n_lanes rows, those of the g-th and of as many others.
template <typename block, int n> struct groups {
    groups(const rows & w, int64_t g, int64_t apart) {
        for (int p = 0; p < n; p++) {
            at[p] = reinterpret_cast<const block *>(w.row((g + p * apart) * n_lanes));
        }
    }

    const block * at[n];
};

// Adds the products of a block of n_lanes rows here and there with n vectors. Every few numbers the next place has its
// turn: memory delivers several streams faster than one.
template <typename packed, int n, int n_streams>
[[gnu::always_inline]] inline void add_packed(const groups<typename packed::block, n_streams> & from, int64_t i,
                                              const rounded_block * y, floats (&acc)[n_streams][n]) {
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
        const block & w = from.at[p][i];
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
                offset[p][v]   = plus(offset[p][v], by_two(least, two));
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
                    const block & w = from.at[p][i];
                    if (q % n_per_line == 0) {
                        const auto * here = w.q[n_registers * (8 * step + q)];
                        ask_for(reinterpret_cast<const char *>(here) + ahead_bytes, 64 * n_registers);
                    }
                    for (int g = 0; g < n_groups; g++) {
                        const int  j = n_groups * step + g;
                        const ints numbers =
                            format::numbers(j, [&w, q](int u) { return load_ints(w.q[packed::place(u, q)]); });
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
        packed::factors_of(from.at[p][i], d, d_offset);
        for (int v = 0; v < n; v++) {
            const floats d_y = every(y[v].d);
            acc[p][v]        = add(acc[p][v], d * d_y, total[p][v]);
            acc[p][v]        = add(acc[p][v], d_offset * d_y, offset[p][v]);
        }
    }
}

// And of up to eight blocks of Q8_0.
template <int n, int n_streams>
[[gnu::always_inline]] inline void add_packed_q8_0(const groups<packed_block_q8_0, n_streams> & from, int64_t i,
                                                   int64_t n_blocks, const rounded_block * y,
                                                   floats (&acc)[n_streams][n]) {
    for (int64_t j = 0; j < n_blocks; j++) {
        ints total[n_streams][n];
#    pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
#    pragma GCC unroll 4
            for (int p = 0; p < n_streams; p++) {
                const packed_block_q8_0 & w = from.at[p][i + j];
                if (q == 0) {
                    ask_for(reinterpret_cast<const char *>(&w) + ahead_bytes, sizeof(w.d) + 64);
                } else if (q % n_per_line == 0) {
                    ask_for(reinterpret_cast<const char *>(w.q[q]) + ahead_bytes, 64);
                }
                const ints numbers = load_ints(w.q[q]);
                for (int v = 0; v < n; v++) {
                    const ints four = four_bytes(y[v].q + 32 * j + 4 * q);
                    total[p][v]     = add_four_signed(q == 0, total[p][v], numbers, four, y[v].sums_32[j]);
                }
            }
        }
        for (int p = 0; p < n_streams; p++) {
            const floats d = load_halves(from.at[p][i + j].d);
            for (int v = 0; v < n; v++) {
                acc[p][v] = add(acc[p][v], d * every(y[v].factors[j]), total[p][v]);
            }
        }
    }
}

// The g-th n_lanes rows, and as many others that lie so far apart.
template <typename packed, int n, int n_streams>
void multiply_groups(const rows & w, const vectors & x, int64_t g, int64_t apart, float * out, int64_t n_out) {
    const groups<typename packed::block, n_streams> from(w, g, apart);

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
    constexpr int n_streams = std::clamp(n_sums / (packed::n_groups * n), 1, 4);
    const int64_t n_groups  = w.n / n_lanes;
    const int64_t apart     = n_groups / n_streams;
    for (int64_t g = 0; g < apart; g++) {
        multiply_groups<packed, n, n_streams>(w, x, g, apart, out, n_out);
    }
    for (int64_t g = apart * n_streams; g < n_groups; g++) {
        multiply_groups<packed, n, 1>(w, x, g, 0, out, n_out);
    }
}

template <typename packed> void open(const rows & w, char * tile) {
    using format = typename packed::format;
    auto * to    = reinterpret_cast<opened_block<format> *>(tile);
    for (int64_t i = 0; i < w.n_blocks; i++) {
        for (int64_t g = 0; g < w.n / n_lanes; g++, to++) {
            const auto & from = reinterpret_cast<const typename packed::block *>(w.row(g * n_lanes))[i];
            const packed one(from);
            for (int s = 0; s < format::n_scales; s++) {
                store(to->scales[s], one.scales(s));
            }
            for (int k = 0; k < format::n_offsets / 2; k++) {
                store(to->offsets[k], one.offsets(k));
            }
            floats d, d_offset;
            packed::factors_of(from, d, d_offset);
            store(to->d, d);
            store(to->d_offset, d_offset);
#    pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                for (int q = 0; q < 8; q++) {
                    const auto bytes = [&from, q](int u) {
                        return load_ints(from.q[packed::place(u, q)]);
                    };
                    store(to->q[8 * j + q], format::numbers(j, bytes));
                }
            }
        }
    }
}

template <> void open<packed_q8_0>(const rows & w, char * tile) {
    auto * to = reinterpret_cast<opened_q8_0 *>(tile);
    for (int64_t i = 0; i < w.n_blocks; i += 8) {
        for (int64_t g = 0; g < w.n / n_lanes; g++, to++) {
            const auto * from = reinterpret_cast<const packed_block_q8_0 *>(w.row(g * n_lanes)) + i;
            for (int64_t j = 0; j < std::min<int64_t>(8, w.n_blocks - i); j++) {
#    if defined(SLOWAR_HAS_VNNI)
                for (int q = 0; q < 8; q++) {
                    store(to->q[8 * j + q], lifted(load_ints(from[j].q[q])));
                }
#    else
                for (int q = 0; q < 16; q++) {
                    const int first = 2 * (q % 2);
                    store(to->q[16 * j + q], signed_pair(load_ints(from[j].q[q / 2]), first, first + 1));
                }
#    endif
                store(to->d[j], load_halves(from[j].d));
            }
        }
    }
}

template <typename packed> constexpr layout layout_of() {
    return { n_lanes,
             packed::n_direct,
             { multiply_few<packed, 1>, multiply_few<packed, 2>, multiply_few<packed, 3>, multiply_few<packed, 4> },
             open<packed>,
             pack<packed> };
}

}  // namespace

const layout packed_rows_q4_K = layout_of<packed_q4_K>();
const layout packed_rows_q6_K = layout_of<packed_q6_K>();
const layout packed_rows_q8_0 = layout_of<packed_q8_0>();

}  // namespace slowar
#endif
