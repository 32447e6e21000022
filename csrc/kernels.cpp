#include "kernels.h"

#include "ggml-cpu.h"
#include "lanes.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

namespace slowar {

namespace {

#ifdef SLOWAR_HAS_PRODUCTS

// How far ahead memory is asked for what comes next: 3 % better than twice as far.
constexpr size_t ahead_bytes = 1024;

// Rows at a time from as many places: memory delivers four streams faster than one.
constexpr int n_streams = 4;

// The sums of four registers, lane by lane.
__m128i sums(const __m128i (&v)[4]) {
    const __m128i ab = _mm_add_epi32(_mm_unpacklo_epi32(v[0], v[1]), _mm_unpackhi_epi32(v[0], v[1]));
    const __m128i cd = _mm_add_epi32(_mm_unpacklo_epi32(v[2], v[3]), _mm_unpackhi_epi32(v[2], v[3]));
    return _mm_add_epi32(_mm_unpacklo_epi64(ab, cd), _mm_unpackhi_epi64(ab, cd));
}

__m128i sums(const __m256i (&v)[4]) {
    const __m256i ab  = _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const __m256i cd  = _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

// Row r of each quarter of the rows; the last of all where a quarter has none.
template <typename block> struct four_rows {
    four_rows(const rows & w, int64_t r) {
        for (int k = 0; k < n_streams; k++) {
            n[k]   = r + k * quarter(w);
            row[k] = reinterpret_cast<const block *>(w.row(std::min(n[k], w.n - 1)));
        }
    }

    static int64_t quarter(const rows & w) { return (w.n + n_streams - 1) / n_streams; }

    void give(const rows & w, __m128 products, float * out) const {
        float all[n_streams];
        _mm_storeu_ps(all, products);
        for (int k = 0; k < n_streams; k++) {
            if (n[k] < w.n) {
                out[n[k]] = all[k];
            }
        }
    }

    const block * row[n_streams];
    int64_t       n[n_streams];
};

// The sums over a block are exact, and a row's blocks are added up one after the other, here and where rows lie side by
// side: a product has the same bits, however many there are at once.

template <typename format, int n> void multiply_few(const rows & w, const vectors & x, float * out, int64_t n_out) {
    using block = typename format::block;
    for (int64_t r = 0; r < four_rows<block>::quarter(w); r++) {
        const four_rows<block> four(w, r);
        __m128                 acc[n];
        std::fill_n(acc, n, _mm_setzero_ps());
        for (int64_t i = 0; i < w.n_blocks; i++) {
            const rounded_block * y = x.block(i);
            __m256i               totals[n][4];
            __m128i               offsets[n][4];
#    pragma GCC unroll 1
            for (int k = 0; k < n_streams; k++) {
                const block & here = four.row[k][i];
                ask_for(reinterpret_cast<const char *>(&here) + ahead_bytes, sizeof(here));
                const format one(here);
                __m256i      total[n];
                std::fill_n(total, n, _mm256_setzero_si256());
#    pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    const __m256i q = format::numbers(j, [&here](int u) { return load(format::bytes(here) + 32 * u); });
                    const __m256i s = one.scales(j);
                    for (int v = 0; v < n; v++) {
                        const __m256i products = _mm256_maddubs_epi16(q, load(y[v].q + 32 * j));
                        total[v]               = now(_mm256_add_epi32(total[v], _mm256_madd_epi16(s, products)));
                    }
                }
                for (int v = 0; v < n; v++) {
                    totals[v][k]  = total[v];
                    offsets[v][k] = one.offset(y[v]);
                }
            }
            __m128 d, d_offset;
            format::factors_of(four.row, i, d, d_offset);
            for (int v = 0; v < n; v++) {
                const __m128 d_y = _mm_set1_ps(y[v].d);
                acc[v]           = add(acc[v], _mm_mul_ps(d, d_y), sums(totals[v]));
                acc[v]           = add(acc[v], _mm_mul_ps(d_offset, d_y), sums(offsets[v]));
            }
        }
        for (int v = 0; v < n; v++) {
            four.give(w, acc[v], out + v * n_out);
        }
    }
}

// d * q: with a sign, and a factor for each 32.
template <int n> void multiply_few_q8_0(const rows & w, const vectors & x, float * out, int64_t n_out) {
    for (int64_t r = 0; r < four_rows<block_q8_0>::quarter(w); r++) {
        const four_rows<block_q8_0> four(w, r);
        __m128                      acc[n];
        std::fill_n(acc, n, _mm_setzero_ps());
        for (int64_t i = 0; i < w.n_blocks; i++) {
            const rounded_block * y = x.block(i / 8);
            const int64_t         j = i % 8;
            __m256i               totals[n][4];
#    pragma GCC unroll 4
            for (int k = 0; k < n_streams; k++) {
                const block_q8_0 & here = four.row[k][i];
                ask_for(reinterpret_cast<const char *>(&here) + ahead_bytes, sizeof(here));
                const __m256i q = load(here.q);
                for (int v = 0; v < n; v++) {
                    totals[v][k] = by_four(q, load(y[v].q + 32 * j));
                }
            }
            const __m128 d = factors(four.row, i);
            for (int v = 0; v < n; v++) {
                acc[v] = add(acc[v], _mm_mul_ps(d, _mm_set1_ps(y[v].factors[j])), sums(totals[v]));
            }
        }
        for (int v = 0; v < n; v++) {
            four.give(w, acc[v], out + v * n_out);
        }
    }
}

int64_t n_groups(const rows & w) {
    return (w.n + n_lanes - 1) / n_lanes;
}

// Lane j of register i becomes lane i of register j.
[[gnu::always_inline]] inline void transpose(__m256i (&v)[8]) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i]     = _mm256_unpacklo_epi32(v[i], v[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i]     = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        v[i]     = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

// Eight rows from the r-th on; the last again where there are fewer.
template <typename block> struct eight_rows {
    eight_rows(const rows & w, int64_t r) {
        for (int64_t k = 0; k < 8; k++) {
            row[k] = reinterpret_cast<const block *>(w.row(std::min(r + k, w.n - 1)));
        }
    }

    const block * row[8];
};

// Block i of eight rows into lanes from `lane` on.
template <typename format>
void open_eight(const eight_rows<typename format::block> & eight, int64_t i, int64_t lane, opened_block<format> & to) {
    using block = typename format::block;
    __m256i bytes[format::n_bytes / 32][8], scales[format::n_scales / 8][8], offsets[8];
    for (int r = 0; r < 8; r++) {
        const block & here = eight.row[r][i];
        ask_for(reinterpret_cast<const char *>(&here + 1), sizeof(here));  // for the first-level cache
        const format  one(here);
        const __m128i all = one.all_scales();
        for (int s = 0; s < format::n_scales / 8; s++) {
            scales[s][r] = _mm256_cvtepi8_epi32(s == 0 ? all : _mm_unpackhi_epi64(all, all));
        }
        offsets[r] = one.offsets();
        for (int u = 0; u < format::n_bytes / 32; u++) {
            bytes[u][r] = load(format::bytes(here) + 32 * u);
        }
    }
    for (int k = 0; k < 8; k += 4) {
        const block * const(&four)[4] = reinterpret_cast<const block * const(&)[4]>(eight.row[k]);
        __m128 d, d_offset;
        format::factors_of(four, i, d, d_offset);
        _mm_store_ps(to.d + lane + k, d);
        _mm_store_ps(to.d_offset + lane + k, d_offset);
    }
    for (auto & bytes_of_32 : bytes) {
        transpose(bytes_of_32);
    }
#    pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        for (int q = 0; q < 8; q++) {
            store(to.q[8 * j + q][lane], format::numbers(j, [&bytes, q](int u) { return bytes[u][q]; }));
        }
    }
    for (int s = 0; s < format::n_scales; s++) {
        if (s % 8 == 0) {
            transpose(scales[s / 8]);
        }
        store(to.scales[s] + lane, as_scales(scales[s / 8][s % 8]));
    }
    transpose(offsets);
    for (int k = 0; k < format::n_offsets / 2; k++) {
        store(to.offsets[k][lane], offsets[k]);
    }
}

template <typename format> void open(const rows & w, char * tile) {
    auto * to = reinterpret_cast<opened_block<format> *>(tile);
    for (int64_t i = 0; i < w.n_blocks; i++) {
        for (int64_t g = 0; g < n_groups(w); g++, to++) {
            for (int64_t lane = 0; lane < n_lanes; lane += 8) {
                open_eight<format>({ w, g * n_lanes + lane }, i, lane, *to);
            }
        }
    }
}

// Numbers of 32 of each of eight rows.
void open_eight(__m256i (&q)[8], int64_t lane, int64_t j, opened_q8_0 & to) {
#    if defined(SLOWAR_HAS_VNNI)
    transpose(q);
    for (int k = 0; k < 8; k++) {
        store(to.q[8 * j + k][lane], lifted(q[k]));
    }
#    else
    for (int h = 0; h < 2; h++) {
        __m256i half[8];
        for (int r = 0; r < 8; r++) {
            half[r] = _mm256_cvtepi8_epi16(h == 0 ? _mm256_castsi256_si128(q[r]) : _mm256_extracti128_si256(q[r], 1));
        }
        transpose(half);
        for (int k = 0; k < 8; k++) {
            store(to.q[16 * j + 8 * h + k][lane], half[k]);
        }
    }
#    endif
}

void open_q8_0(const rows & w, char * tile) {
    auto * to = reinterpret_cast<opened_q8_0 *>(tile);
    for (int64_t i = 0; i < w.n_blocks; i += 8) {
        for (int64_t g = 0; g < n_groups(w); g++, to++) {
            for (int64_t lane = 0; lane < n_lanes; lane += 8) {
                const eight_rows<block_q8_0> eight(w, g * n_lanes + lane);
                for (int64_t j = 0; j < std::min<int64_t>(8, w.n_blocks - i); j++) {
                    __m256i q[8];
                    for (int r = 0; r < 8; r++) {
                        const block_q8_0 & here = eight.row[r][i + j];
                        ask_for(reinterpret_cast<const char *>(&here + 3), 1);  // a line further: three of 34 bytes
                        q[r]               = load(here.q);
                        to->d[j][lane + r] = _cvtsh_ss(here.d);
                    }
                    open_eight(q, lane, j, *to);
                }
            }
        }
    }
}

// The share of rows that is to be on its way into the second-level cache when block i of n has been multiplied.
template <typename block> void ask_for_share(const rows & w, int64_t i, int64_t n) {
    const int64_t first = w.n_blocks * i / n;
    const size_t  bytes = size_t(w.n_blocks * (i + 1) / n - first) * sizeof(block);
    for (int64_t r = 0; r < w.n; r++) {
        const char * at = w.row(r) + size_t(first) * sizeof(block);
        for (size_t b = 0; b < bytes; b += 64) {
            asm volatile("prefetcht1 %0" : : "m"(at[b]));
        }
    }
}

// The lanes' products with a vector, those that there are.

floats begin(const rows & w, int64_t first, bool adds, const float * out) {
    float all[n_lanes] = {};
    if (adds && w.n - first >= n_lanes) {
        return load_floats(out + first);
    }
    if (adds) {
        std::copy_n(out + first, std::min(n_lanes, w.n - first), all);
    }
    return load_floats(all);
}

void give(const rows & w, int64_t first, floats products, float * out) {
    if (w.n - first >= n_lanes) {
        store(out + first, products);
        return;
    }
    float all[n_lanes];
    store(all, products);
    std::copy_n(all, std::min(n_lanes, w.n - first), out + first);
}

// Adds the products of a block of g times n_lanes rows with n vectors.
template <typename format, int g, int n>
[[gnu::always_inline]] inline void add_block(const opened_block<format> * w, const rounded_block * y,
                                             floats (&acc)[g][n]) {
    constexpr int n_per_scale = 64 / format::n_scales;
    constexpr int n_at_once   = n_quads<format>();
    ints          total[g][n];
    std::fill_n(total[0], g * n, every(0));
    for (int first = 0; first < 64; first += n_at_once) {
        ints products[g][n];
#    pragma GCC unroll 8
        for (int q = 0; q < n_at_once; q++) {
            for (int v = 0; v < n; v++) {
                const ints four = four_bytes(y[v].q + 4 * (first + q));
                for (int a = 0; a < g; a++) {
                    products[a][v] = add_four(q == 0, products[a][v], load_ints(w[a].q[first + q]), four);
                }
            }
        }
        for (int a = 0; a < g; a++) {
            const ints scales = load_ints(w[a].scales[first / n_per_scale]);
            for (int v = 0; v < n; v++) {
                total[a][v] = plus(total[a][v], scaled(scales, products[a][v]));
            }
        }
    }
    for (int v = 0; v < n; v++) {
        const floats d_y = every(y[v].d);
        for (int a = 0; a < g; a++) {
            ints offset = every(0);
            for (int k = 0; k < format::n_offsets / 2; k++) {
                offset = plus(offset, by_two(load_ints(w[a].offsets[k]), four_bytes(format::sums_of(y[v]) + 2 * k)));
            }
            acc[a][v] = add(acc[a][v], load_floats(w[a].d) * d_y, total[a][v]);
            acc[a][v] = add(acc[a][v], load_floats(w[a].d_offset) * d_y, offset);
        }
    }
}

// And of up to eight blocks of Q8_0.
template <int g, int n>
[[gnu::always_inline]] inline void add_blocks(const opened_q8_0 * w, const rounded_block * y, int64_t n_blocks,
                                              floats (&acc)[g][n]) {
#    if !defined(SLOWAR_HAS_VNNI)
    alignas(32) int16_t numbers[n][256];
    for (int v = 0; v < n; v++) {
        for (int k = 0; k < 256; k += 16) {
            store(numbers[v] + k, _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(y[v].q + k))));
        }
    }
#    endif
    for (int64_t j = 0; j < n_blocks; j++) {
        ints total[g][n];
#    if defined(SLOWAR_HAS_VNNI)
        for (int v = 0; v < n; v++) {
            for (int a = 0; a < g; a++) {
                total[a][v] = lifted_start(y[v].sums_32[j]);
            }
        }
#        pragma GCC unroll 8
        for (int q = 0; q < 8; q++) {
            for (int v = 0; v < n; v++) {
                const ints four = four_bytes(y[v].q + 32 * j + 4 * q);
                for (int a = 0; a < g; a++) {
                    total[a][v] = add_four(false, total[a][v], load_ints(w[a].q[8 * j + q]), four);
                }
            }
        }
#    else
#        pragma GCC unroll 16
        for (int q = 0; q < 16; q++) {
            for (int v = 0; v < n; v++) {
                const ints two = four_bytes(numbers[v] + 32 * j + 2 * q);
                for (int a = 0; a < g; a++) {
                    const ints here = by_two(load_ints(w[a].q[16 * j + q]), two);
                    total[a][v]     = q == 0 ? here : now(plus(total[a][v], here));
                }
            }
        }
#    endif
        for (int v = 0; v < n; v++) {
            for (int a = 0; a < g; a++) {
                const floats d = load_floats(w[a].d[j]) * every(y[v].factors[j]);
                acc[a][v]      = add(acc[a][v], d, total[a][v]);
            }
        }
    }
}

template <typename format, int g, int n>
void multiply_opened(const rows & w, const char * tile, const rows & next, const vectors & x, bool adds, float * out,
                     int64_t n_out) {
    floats acc[g][n];
    for (int v = 0; v < n; v++) {
        for (int a = 0; a < g; a++) {
            acc[a][v] = begin(w, a * n_lanes, adds, out + v * n_out);
        }
    }
    if constexpr (std::is_same_v<format, block_q8_0>) {
        const auto * blocks = reinterpret_cast<const opened_q8_0 *>(tile);
        for (int64_t i = 0; i < w.n_blocks; i += 8, blocks += g) {
            ask_for_share<block_q8_0>(next, i / 8, (w.n_blocks + 7) / 8);
            add_blocks<g, n>(blocks, x.block(i / 8), std::min<int64_t>(8, w.n_blocks - i), acc);
        }
    } else {
        const auto * blocks = reinterpret_cast<const opened_block<format> *>(tile);
        for (int64_t i = 0; i < w.n_blocks; i++, blocks += g) {
            ask_for_share<typename format::block>(next, i, w.n_blocks);
            add_block<format, g, n>(blocks, x.block(i), acc);
        }
    }
    for (int v = 0; v < n; v++) {
        for (int a = 0; a < g; a++) {
            give(w, a * n_lanes, acc[a][v], out + v * n_out);
        }
    }
}

template <typename format, int n>
void multiply_many(const rows & w, const char * tile, const rows & next, const vectors & x, bool adds, float * out,
                   int64_t n_out) {
    if (n_groups(w) == 1) {
        multiply_opened<format, 1, n>(w, tile, next, x, adds, out, n_out);
    } else {
        multiply_opened<format, 2, n>(w, tile, next, x, adds, out, n_out);
    }
}

template <typename format> constexpr kernel kernel_of(ggml_type type, const layout * packed) {
    return { type,
             sizeof(typename format::block),
             1,
             sizeof(block_q8_K),
             sizeof(opened_block<format>),
             { 1,
               n_few,
               { multiply_few<format, 1>, multiply_few<format, 2>, multiply_few<format, 3>, multiply_few<format, 4> },
               open<format>,
               nullptr },
             packed,
             { multiply_many<format, 1>, multiply_many<format, 2>, multiply_many<format, 3>,
               multiply_many<format, 4> } };
}

constexpr kernel kernels[] = {
    kernel_of<q4_K>(GGML_TYPE_Q4_K, &packed_rows_q4_K),
    kernel_of<q6_K>(GGML_TYPE_Q6_K, &packed_rows_q6_K),
    { GGML_TYPE_Q8_0,
      sizeof(block_q8_0),
      8,
      sizeof(block_q8_0),
      sizeof(opened_q8_0),
      { 1,
        opened_q8_0::n_direct,
        { multiply_few_q8_0<1>, multiply_few_q8_0<2>, multiply_few_q8_0<3>, multiply_few_q8_0<4> },
        open_q8_0,
        nullptr },
      &packed_rows_q8_0,
      { multiply_many<block_q8_0, 1>, multiply_many<block_q8_0, 2>, multiply_many<block_q8_0, 3>,
        multiply_many<block_q8_0, 4> } },
};
#else
constexpr kernel kernels[] = { { GGML_TYPE_COUNT, 0, 0, 0, 0, {}, nullptr, {} } };
#endif

}  // namespace

const kernel * kernel_for(ggml_type type) {
    const auto it = std::find_if(std::begin(kernels), std::end(kernels), [type](const kernel & k) {
        return k.type == type && k.block_bytes == ggml_type_size(type) &&
               k.rounded_bytes == ggml_type_size(ggml_get_type_traits_cpu(type)->vec_dot_type);
    });
    return it == std::end(kernels) ? nullptr : it;
}

}  // namespace slowar
