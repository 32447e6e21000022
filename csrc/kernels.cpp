#include "kernels.h"

#include "ggml-cpu.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

namespace slowar {

namespace {

#ifdef SLOWAR_HAS_PRODUCTS

// As ggml rounds to its Q8_K, but for what is all but halfway between two numbers: the largest of 256, or the first of
// several, becomes -127.
void round_k(const float * x, int64_t, rounded_block & to) {
    const auto size = [x](int i) {
        return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x + i));
    };
    float  sizes[8];
    __m256 largest = _mm256_setzero_ps();
    for (int i = 0; i < 256; i += 8) {
        largest = _mm256_max_ps(size(i), largest);
    }
    _mm256_storeu_ps(sizes, largest);
    const float most = *std::max_element(sizes, sizes + 8);
    to               = {};
    if (most == 0.0f) {
        return;
    }
    const float * first  = std::find_if(x, x + 256, [most](float v) { return std::fabs(v) == most; });
    const __m256  factor = _mm256_set1_ps(-127.0f / *first);
    for (int j = 0; j < 8; j++) {
        const auto four = [x, j, factor](int i) {
            return _mm256_cvtps_epi32(_mm256_mul_ps(factor, _mm256_loadu_ps(x + 32 * j + 8 * i)));
        };
        const __m256i sixteens =
            _mm256_packs_epi16(_mm256_packs_epi32(four(0), four(1)), _mm256_packs_epi32(four(2), four(3)));
        const __m256i q = _mm256_permutevar8x32_epi32(sixteens, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        store(to.q + 32 * j, q);
        int64_t eights[4];
        store(eights, _mm256_sad_epu8(q ^ every_byte(char(0x80), q), _mm256_setzero_si256()));
        for (int h = 0; h < 2; h++) {
            to.sums_16[2 * j + h] = int16_t(eights[2 * h] + eights[2 * h + 1] - 16 * 128);
        }
        to.sums_32[j] = int16_t(to.sums_16[2 * j] + to.sums_16[2 * j + 1]);
    }
    to.d = 1.0f / (-127.0f / *first);
}

void round_q8_0(const float * x, int64_t n, rounded_block & to) {
    block_q8_0 b[8];
    ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float(x, b, n);
    for (int64_t j = 0; j < n / 32; j++) {
        std::memcpy(to.q + 32 * j, b[j].q, sizeof(b[j].q));
        to.factors[j] = ggml_fp16_to_fp32(b[j].d);
        to.sums_32[j] = int16_t(std::accumulate(b[j].q, std::end(b[j].q), 0));
    }
}

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

template <typename packed>
constexpr many_t multiply[n_few] = { multiply_many<packed, 1>, multiply_many<packed, 2>, multiply_many<packed, 3>,
                                     multiply_many<packed, 4> };

template <typename packed> constexpr int n_direct = lies_opened<packed> ? n_few / 2 : n_few;

template <typename packed, int n> constexpr few_t few() {
    if constexpr (n <= n_direct<packed>) {
        return multiply_few<typename packed::format, n>;
    } else {
        return nullptr;
    }
}

template <typename packed> constexpr kernel kernel_of(ggml_type type, const layout * packed_rows) {
    return { type,
             sizeof(typename packed::file_block),
             1,
             round_k,
             { 1,
               n_direct<packed>,
               { few<packed, 1>(), few<packed, 2>(), few<packed, 3>(), few<packed, 4>() },
               open_file<packed>,
               opened_bytes<packed>,
               nullptr },
             packed_rows,
             multiply<packed> };
}

constexpr kernel kernels[] = {
    kernel_of<packed_q4_K>(GGML_TYPE_Q4_K, &packed_rows_q4_K),
    kernel_of<packed_q6_K>(GGML_TYPE_Q6_K, &packed_rows_q6_K),
    { GGML_TYPE_Q8_0,
      sizeof(block_q8_0),
      8,
      round_q8_0,
      { 1,
        n_few,
        { multiply_few_q8_0<1>, multiply_few_q8_0<2>, multiply_few_q8_0<3>, multiply_few_q8_0<4> },
        open_file<packed_q8_0>,
        opened_bytes<packed_q8_0>,
        nullptr },
      &packed_rows_q8_0,
      multiply<packed_q8_0> },
};
#else
constexpr kernel kernels[] = { { GGML_TYPE_COUNT, 0, 0, nullptr, {}, nullptr, nullptr } };
#endif

}  // namespace

const kernel * kernel_for(ggml_type type) {
    const auto it = std::find_if(std::begin(kernels), std::end(kernels), [type](const kernel & k) {
        return k.type == type && k.block_bytes == ggml_type_size(type);
    });
    return it == std::end(kernels) ? nullptr : it;
}

}  // namespace slowar
