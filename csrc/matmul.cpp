#include "matmul.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    include <immintrin.h>
#    define SLOWAR_HAS_PRODUCTS
#endif

namespace slowar {

namespace {

// The least that a thread takes from the list of work.
constexpr size_t least_bytes = size_t(32) << 10;

// Vectors that rows are multiplied by at once: their sums have to stay in registers, beside what they are made of.
constexpr int n_few = 4;

// With more vectors rows are decoded once for all of them, a tile of so many rows and blocks of 256 at a time, which
// stays in the second-level cache.
constexpr int64_t n_lanes     = 8;  // numbers of 32 bits in a register, each of another row
constexpr int64_t tile_rows   = 2 * n_lanes;
constexpr int64_t tile_blocks = 16;

// In front of rounded vectors: the first row of each product that nobody has taken yet.
struct work_list {
    std::atomic<int64_t> next;
    char                 apart[56];  // from the next list and from what is read all the time
};

constexpr size_t lists_bytes = max_products * sizeof(work_list);

// 256 numbers of a vector, rounded to 8 bits.
struct alignas(32) rounded_block {
    int8_t q[256];
    union {
        int16_t sums_16[16];  // of each sixteen
        float   factors[8];   // of each 32, where a matrix is of Q8_0
    };
    int16_t sums_32[8];
    float   d;  // else the factor of all
};

// Block after block of all vectors, so that those of a few vectors lie together.
struct vectors {
    rounded_block * at;
    int64_t         n_all;

    rounded_block * block(int64_t i) const { return at + i * n_all; }  // and those of further vectors behind it

    vectors from(int64_t v, int64_t i) const { return { block(i) + v, n_all }; }
};

struct rows {
    const char * at;
    size_t       stride;
    int64_t      n;
    int64_t      n_blocks;

    const char * row(int64_t r) const { return at + size_t(r) * stride; }
};

// Rows times the first few vectors; the products of a vector are side by side, those of the next n_out behind them.
using few_t = void (*)(const rows & w, const vectors & x, float * out, int64_t n_out);

// Up to tile_rows rows, decoded, number by number side by side.
using open_t = void (*)(const rows & w, char * tile);

// The same times the first few vectors, added to what there is from blocks before these, if there are any. Meanwhile
// memory is asked for the rows `next`.
using many_t = void (*)(const rows & w, const char * tile, const rows & next, const vectors & x, bool adds, float * out,
                        int64_t n_out);

struct kernel {
    ggml_type type;
    size_t    block_bytes;
    int64_t   n_per_256;      // blocks
    size_t    rounded_bytes;  // of ggml's blocks of vectors
    size_t    opened_bytes;   // of n_lanes rows of 256
    few_t     few[n_few];
    open_t    open;
    many_t    many[n_few];
};

// ggml's formats of blocks, as its files have them and as it rounds vectors.

struct block_q8_K {
    float   d;
    int8_t  q[256];
    int16_t sums[16];
};

struct block_q8_0 {
    ggml_fp16_t d;
    int8_t      q[32];
};

static_assert(sizeof(block_q8_K) == 292 && sizeof(block_q8_0) == 34, "as ggml has them");

#ifdef SLOWAR_HAS_PRODUCTS

// How far ahead memory is asked for what comes next. From 1 to 4 KiB there is no difference to be seen.
constexpr size_t ahead_bytes = 2048;

// Rows at a time from as many places: memory delivers four streams faster than one.
constexpr int n_streams = 4;

// d * scale * q - dmin * min, each of eight groups of 32
struct block_q4_K {
    uint16_t d, dmin;
    uint8_t  scales[12];  // and minima, 6 bits each
    uint8_t  q[128];      // groups 2i and 2i + 1: the low and the high halves of 32 bytes
};

// d * scale * (q - 32), each of sixteen groups of 16
struct block_q6_K {
    uint8_t  low[128];  // 4 bits
    uint8_t  high[64];  // 2 bits
    int8_t   scales[16];
    uint16_t d;
};

static_assert(sizeof(block_q4_K) == 144 && sizeof(block_q6_K) == 210, "as in the files");

__m256i load(const void * p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

void store(void * p, __m256i v) {
    _mm256_storeu_si256(static_cast<__m256i *>(p), v);
}

// Four bytes in each lane.
__m256i four_bytes(const void * p) {
    int32_t v;
    std::memcpy(&v, p, sizeof(v));
    return _mm256_set1_epi32(v);
}

// Asks memory for what will be read. Not by the intrinsic: gcc drops calls of a function that does nothing else.
void ask_for(const char * p, size_t n_bytes) {
    for (size_t b = 0; b < n_bytes; b += 64) {
        asm volatile("prefetcht0 %0" : : "m"(p[b]));
    }
}

// Compilers like to form all products before they add them up, for which there are not enough registers.
__m256i now(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

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

// acc + factor * integers
__m128 add(__m128 acc, __m128 factor, __m128i integers) {
    return _mm_fmadd_ps(_mm_cvtepi32_ps(integers), factor, acc);
}

__m256 add(__m256 acc, __m256 factor, __m256i integers) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), factor, acc);
}

// The factors of four blocks.
template <typename block> __m128 factors(const block * const (&row)[4], int64_t i) {
    const auto d = [&row, i](int k) {
        return int16_t(row[k][i].d);
    };
    return _mm_cvtph_ps(_mm_set_epi16(0, 0, 0, 0, d(3), d(2), d(1), d(0)));
}

// Numbers 2j and 2j + 1 of sixteen 8-bit numbers, as 16-bit numbers, each in one half.
__m256i spread(__m128i v, int j) {
    const __m128i which = _mm_unpacklo_epi64(_mm_set1_epi8(char(2 * j)), _mm_set1_epi8(char(2 * j + 1)));
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(v, which));
}

// Whether so many products by four of numbers up to `most` have a sum that fits into 16 bits, which takes it by two.
constexpr bool fits(int n_quads, int most) {
    return n_quads * 2 * most * 127 <= INT16_MAX;
}

// What a format is made of: for each of eight groups of 32, numbers of 8 bits without a sign and the scales of their sums
// by two; the block's factor; and what is to be added to that, offsets by sums of the vector, with a factor of its own.

class q4_K {
  public:
    using block = block_q4_K;

    static constexpr int n_bytes   = 128;  // of numbers
    static constexpr int n_scales  = 8;
    static constexpr int n_offsets = 8;
    static constexpr int n_quads   = 8;  // products by four that are added up before their sum is scaled
    static_assert(fits(n_quads, 15));

    explicit q4_K(const block & w) {
        uint64_t low;
        uint32_t high;
        std::memcpy(&low, w.scales, sizeof(low));
        std::memcpy(&high, w.scales + sizeof(low), sizeof(high));
        const uint64_t four  = low & 0x3f3f3f3f3f3f3f3f;  // scales, four minima
        const uint64_t other = ((high | uint64_t(high) << 28) & 0x0f0f0f0f0f0f0f0f) | ((low >> 2) & 0x3030303030303030);
        both                 = _mm_unpacklo_epi32(_mm_cvtsi64_si128(int64_t(four)), _mm_cvtsi64_si128(int64_t(other)));
        twice                = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(both));
    }

    static const uint8_t * bytes(const block & w) { return w.q; }

    // Group j from 32 bytes of the block here and there: bytes(i) gives the i-th.
    template <typename bytes_t> static __m256i numbers(int j, bytes_t bytes) {
        const __m256i q = bytes(j / 2);
        return _mm256_and_si256(j % 2 == 0 ? q : _mm256_srli_epi16(q, 4), _mm256_set1_epi8(15));
    }

    __m256i scales(int j) const { return _mm256_shuffle_epi8(twice, _mm256_set1_epi16(int16_t(0x0100 + 0x0202 * j))); }

    __m128i all_scales() const { return both; }

    __m256i offsets() const {
        return _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_unpackhi_epi8(both, _mm_setzero_si128()), 0);
    }

    static const int16_t * sums_of(const rounded_block & y) { return y.sums_32; }

    // Offsets by sums, in four parts.
    __m128i offset(const rounded_block & y) const {
        return _mm_madd_epi16(_mm256_castsi256_si128(offsets()),
                              _mm_load_si128(reinterpret_cast<const __m128i *>(y.sums_32)));
    }

    // Of four blocks.
    static void factors_of(const block * const (&row)[4], int64_t i, __m128 & d, __m128 & d_offset) {
        const auto both_of = [&row, i](int k) {
            int32_t v;
            std::memcpy(&v, &row[k][i].d, sizeof(v));
            return v;
        };
        const __m256 all  = _mm256_cvtph_ps(_mm_set_epi32(both_of(3), both_of(2), both_of(1), both_of(0)));
        const __m128 low  = _mm256_castps256_ps128(all);
        const __m128 high = _mm256_extractf128_ps(all, 1);
        d                 = _mm_shuffle_ps(low, high, _MM_SHUFFLE(2, 0, 2, 0));
        d_offset          = -_mm_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 3, 1));
    }

  private:
    __m128i both;   // eight scales, eight minima
    __m256i twice;  // the scales, in each half
};

class q6_K {
  public:
    using block = block_q6_K;

    static constexpr int n_bytes   = 192;
    static constexpr int n_scales  = 16;
    static constexpr int n_offsets = 16;
    static constexpr int n_quads   = 2;
    static_assert(fits(n_quads, 63));

    explicit q6_K(const block & w) : all(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w.scales))) {}

    static const uint8_t * bytes(const block & w) { return w.low; }  // and the high ones behind them

    template <typename bytes_t> static __m256i numbers(int j, bytes_t bytes) {
        const __m256i low  = bytes(2 * (j / 4) + j % 2);
        const __m256i high = bytes(4 + j / 4);
        const __m256i two  = j % 4 == 0   ? _mm256_slli_epi16(high, 4)
                             : j % 4 == 1 ? _mm256_slli_epi16(high, 2)
                             : j % 4 == 2 ? high
                                          : _mm256_srli_epi16(high, 2);
        const __m256i four = j % 4 < 2 ? low : _mm256_srli_epi16(low, 4);
        return _mm256_or_si256(_mm256_and_si256(four, _mm256_set1_epi8(15)),
                               _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
    }

    __m256i scales(int j) const { return spread(all, j); }

    __m128i all_scales() const { return all; }

    __m256i offsets() const { return _mm256_cvtepi8_epi16(all); }

    static const int16_t * sums_of(const rounded_block & y) { return y.sums_16; }

    __m128i offset(const rounded_block & y) const {
        const __m256i v = _mm256_madd_epi16(offsets(), load(y.sums_16));
        return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    }

    static void factors_of(const block * const (&row)[4], int64_t i, __m128 & d, __m128 & d_offset) {
        d        = factors(row, i);
        d_offset = _mm_mul_ps(d, _mm_set1_ps(-32));
    }

  private:
    __m128i all;
};

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
                const __m256i q    = load(here.q);
                const __m256i size = _mm256_sign_epi8(q, q);
                for (int v = 0; v < n; v++) {
                    const __m256i products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(load(y[v].q + 32 * j), q));
                    totals[v][k]           = _mm256_madd_epi16(_mm256_set1_epi16(1), products);
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

// Eight rows of a block: four numbers of each side by side in the lanes of a register, of Q8_0 two with 16 bits.

template <typename format> struct alignas(32) opened_block {
    uint8_t q[64][n_lanes][4];
    int16_t scales[format::n_scales][n_lanes][2];  // each twice
    int16_t offsets[format::n_offsets / 2][n_lanes][2];
    float   d[n_lanes];
    float   d_offset[n_lanes];
};

struct alignas(32) opened_q8_0 {
    int16_t q[128][n_lanes][2];
    float   d[8][n_lanes];
};

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

int64_t n_groups(const rows & w) {
    return (w.n + n_lanes - 1) / n_lanes;
}

// Eight rows from the g-th eight on; the last again where there are fewer.
template <typename block> struct eight_rows {
    eight_rows(const rows & w, int64_t g) {
        for (int64_t r = 0; r < n_lanes; r++) {
            row[r] = reinterpret_cast<const block *>(w.row(std::min(g * n_lanes + r, w.n - 1)));
        }
    }

    const block * row[n_lanes];
};

template <typename format> void open(const rows & w, char * tile) {
    using block = typename format::block;
    auto * to   = reinterpret_cast<opened_block<format> *>(tile);
    for (int64_t i = 0; i < w.n_blocks; i++) {
        for (int64_t g = 0; g < n_groups(w); g++, to++) {
            const eight_rows<block> eight(w, g);
            __m256i                 bytes[format::n_bytes / 32][8], scales[format::n_scales / 8][8], offsets[8];
            for (int r = 0; r < n_lanes; r++) {
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
            for (int k = 0; k < n_lanes; k += 4) {
                const block * const(&four)[4] = reinterpret_cast<const block * const(&)[4]>(eight.row[k]);
                __m128 d, d_offset;
                format::factors_of(four, i, d, d_offset);
                _mm_store_ps(to->d + k, d);
                _mm_store_ps(to->d_offset + k, d_offset);
            }
            for (auto & bytes_of_32 : bytes) {
                transpose(bytes_of_32);
            }
#    pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                for (int q = 0; q < 8; q++) {
                    store(to->q[8 * j + q], format::numbers(j, [&bytes, q](int u) { return bytes[u][q]; }));
                }
            }
            const __m256i low = _mm256_set1_epi32(0xffff);
            for (int s = 0; s < format::n_scales; s++) {
                if (s % 8 == 0) {
                    transpose(scales[s / 8]);
                }
                const __m256i v = scales[s / 8][s % 8];
                store(to->scales[s], _mm256_or_si256(_mm256_and_si256(v, low), _mm256_slli_epi32(v, 16)));
            }
            transpose(offsets);
            for (int k = 0; k < format::n_offsets / 2; k++) {
                store(to->offsets[k], offsets[k]);
            }
        }
    }
}

void open_q8_0(const rows & w, char * tile) {
    auto * to = reinterpret_cast<opened_q8_0 *>(tile);
    for (int64_t i = 0; i < w.n_blocks; i += 8) {
        for (int64_t g = 0; g < n_groups(w); g++, to++) {
            const eight_rows<block_q8_0> eight(w, g);
            for (int64_t j = 0; j < std::min<int64_t>(8, w.n_blocks - i); j++) {
                __m256i halves[2][8];
                for (int r = 0; r < n_lanes; r++) {
                    const block_q8_0 & here = eight.row[r][i + j];
                    ask_for(reinterpret_cast<const char *>(&here + 3), 1);  // a line further: three of 34 bytes
                    const __m256i q = load(here.q);
                    halves[0][r]    = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(q));
                    halves[1][r]    = _mm256_cvtepi8_epi16(_mm256_extracti128_si256(q, 1));
                    to->d[j][r]     = _cvtsh_ss(here.d);
                }
                for (int h = 0; h < 2; h++) {
                    transpose(halves[h]);
                    for (int q = 0; q < 8; q++) {
                        store(to->q[16 * j + 8 * h + q], halves[h][q]);
                    }
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

// Eight products with a vector, those that there are.

__m256 begin(const rows & w, int64_t first, bool adds, const float * out) {
    float all[n_lanes] = {};
    if (adds) {
        std::copy_n(out + first, std::min(n_lanes, w.n - first), all);
    }
    return _mm256_loadu_ps(all);
}

void give(const rows & w, int64_t first, __m256 products, float * out) {
    float all[n_lanes];
    _mm256_storeu_ps(all, products);
    std::copy_n(all, std::min(n_lanes, w.n - first), out + first);
}

// Adds the products of a block of g times eight rows with n vectors.
template <typename format, int g, int n>
[[gnu::always_inline]] inline void add_block(const opened_block<format> * w, const rounded_block * y,
                                             __m256 (&acc)[g][n]) {
    constexpr int n_per_scale = 64 / format::n_scales;
    __m256i       total[g][n];
    std::fill_n(total[0], g * n, _mm256_setzero_si256());
    for (int first = 0; first < 64; first += format::n_quads) {
        __m256i products[g][n];
#    pragma GCC unroll 8
        for (int q = 0; q < format::n_quads; q++) {
            for (int v = 0; v < n; v++) {
                const __m256i four = four_bytes(y[v].q + 4 * (first + q));
                for (int a = 0; a < g; a++) {
                    const __m256i here = _mm256_maddubs_epi16(load(w[a].q[first + q]), four);
                    products[a][v]     = q == 0 ? here : now(_mm256_add_epi16(products[a][v], here));
                }
            }
        }
        for (int a = 0; a < g; a++) {
            const __m256i scales = load(w[a].scales[first / n_per_scale]);
            for (int v = 0; v < n; v++) {
                total[a][v] = _mm256_add_epi32(total[a][v], _mm256_madd_epi16(scales, products[a][v]));
            }
        }
    }
    for (int v = 0; v < n; v++) {
        const __m256 d_y = _mm256_set1_ps(y[v].d);
        for (int a = 0; a < g; a++) {
            __m256i offset = _mm256_setzero_si256();
            for (int k = 0; k < format::n_offsets / 2; k++) {
                const __m256i two = four_bytes(format::sums_of(y[v]) + 2 * k);
                offset            = _mm256_add_epi32(offset, _mm256_madd_epi16(load(w[a].offsets[k]), two));
            }
            acc[a][v] = add(acc[a][v], _mm256_mul_ps(_mm256_load_ps(w[a].d), d_y), total[a][v]);
            acc[a][v] = add(acc[a][v], _mm256_mul_ps(_mm256_load_ps(w[a].d_offset), d_y), offset);
        }
    }
}

// And of up to eight blocks of Q8_0.
template <int g, int n>
[[gnu::always_inline]] inline void add_blocks(const opened_q8_0 * w, const rounded_block * y, int64_t n_blocks,
                                              __m256 (&acc)[g][n]) {
    alignas(32) int16_t wide[n][256];
    for (int v = 0; v < n; v++) {
        for (int k = 0; k < 256; k += 16) {
            store(wide[v] + k, _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(y[v].q + k))));
        }
    }
    for (int64_t j = 0; j < n_blocks; j++) {
        __m256i total[g][n];
#    pragma GCC unroll 16
        for (int q = 0; q < 16; q++) {
            for (int v = 0; v < n; v++) {
                const __m256i two = four_bytes(wide[v] + 32 * j + 2 * q);
                for (int a = 0; a < g; a++) {
                    const __m256i here = _mm256_madd_epi16(load(w[a].q[16 * j + q]), two);
                    total[a][v]        = q == 0 ? here : now(_mm256_add_epi32(total[a][v], here));
                }
            }
        }
        for (int v = 0; v < n; v++) {
            for (int a = 0; a < g; a++) {
                const __m256 d = _mm256_mul_ps(_mm256_load_ps(w[a].d[j]), _mm256_set1_ps(y[v].factors[j]));
                acc[a][v]      = add(acc[a][v], d, total[a][v]);
            }
        }
    }
}

template <typename format, int g, int n>
void multiply_opened(const rows & w, const char * tile, const rows & next, const vectors & x, bool adds, float * out,
                     int64_t n_out) {
    __m256 acc[g][n];
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

template <typename format> constexpr kernel kernel_of(ggml_type type) {
    return { type,
             sizeof(typename format::block),
             1,
             sizeof(block_q8_K),
             sizeof(opened_block<format>),
             { multiply_few<format, 1>, multiply_few<format, 2>, multiply_few<format, 3>, multiply_few<format, 4> },
             open<format>,
             { multiply_many<format, 1>, multiply_many<format, 2>, multiply_many<format, 3>,
               multiply_many<format, 4> } };
}

constexpr kernel kernels[] = {
    kernel_of<q4_K>(GGML_TYPE_Q4_K),
    kernel_of<q6_K>(GGML_TYPE_Q6_K),
    { GGML_TYPE_Q8_0,
      sizeof(block_q8_0),
      8,
      sizeof(block_q8_0),
      sizeof(opened_q8_0),
      { multiply_few_q8_0<1>, multiply_few_q8_0<2>, multiply_few_q8_0<3>, multiply_few_q8_0<4> },
      open_q8_0,
      { multiply_many<block_q8_0, 1>, multiply_many<block_q8_0, 2>, multiply_many<block_q8_0, 3>,
        multiply_many<block_q8_0, 4> } },
};
#else
constexpr kernel kernels[] = { { GGML_TYPE_COUNT, 0, 0, 0, 0, {}, nullptr, {} } };
#endif

// What ggml rounds vectors to for products with this type.
ggml_type rounding_of(ggml_type type) {
    return ggml_get_type_traits_cpu(type)->vec_dot_type;
}

const kernel * kernel_for(ggml_type type) {
    const auto it = std::find_if(std::begin(kernels), std::end(kernels), [type](const kernel & k) {
        return k.type == type && k.block_bytes == ggml_type_size(type) &&
               k.rounded_bytes == ggml_type_size(rounding_of(type));
    });
    return it == std::end(kernels) ? nullptr : it;
}

// A vector's block of up to 256 numbers as ggml rounds them for products with this type.
void round(ggml_type type, const float * x, int64_t n, rounded_block & to) {
    const ggml_type rounded    = rounding_of(type);
    const auto      from_float = ggml_get_type_traits_cpu(rounded)->from_float;
    if (rounded == GGML_TYPE_Q8_0) {
        block_q8_0 b[8];
        from_float(x, b, n);
        for (int64_t j = 0; j < n / 32; j++) {
            std::memcpy(to.q + 32 * j, b[j].q, sizeof(b[j].q));
            to.factors[j] = ggml_fp16_to_fp32(b[j].d);
        }
    } else {
        block_q8_K b = {};  // ggml leaves the sums of a block of zeros as they were
        from_float(x, &b, n);
        std::memcpy(to.q, b.q, sizeof(b.q));
        std::memcpy(to.sums_16, b.sums, sizeof(b.sums));
        for (int j = 0; j < 8; j++) {
            to.sums_32[j] = int16_t(b.sums[2 * j] + b.sums[2 * j + 1]);
        }
        to.d = b.d;
    }
}

int64_t rounded_blocks(int64_t k) {
    return (k + 255) / 256;
}

// One thread's part of all blocks of all vectors.
void run_rounded(ggml_tensor * dst, int ith, int nth, void * type) {
    const ggml_tensor * x   = dst->src[0];
    char *              out = static_cast<char *>(dst->data);
    if (ith == 0) {
        for (int i = 0; i < max_products; i++) {
            new (out + size_t(i) * sizeof(work_list)) work_list{};
        }
    }
    const vectors to = { reinterpret_cast<rounded_block *>(out + lists_bytes), x->ne[1] };
    const int64_t n  = rounded_blocks(x->ne[0]) * to.n_all;
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        const int64_t at   = i / to.n_all * 256;
        const int64_t v    = i % to.n_all;
        const auto *  from = reinterpret_cast<const float *>(static_cast<const char *>(x->data) + size_t(v) * x->nb[1]);
        round(ggml_type(reinterpret_cast<intptr_t>(type)), from + at, std::min<int64_t>(256, x->ne[0] - at), to.at[i]);
    }
}

// Long runs of rows first, for the memory delivers them best, then shorter ones, so that all threads end together. Whole
// tiles but for the last one: a row's tile does not depend on who takes it.
int64_t take(work_list & list, int64_t n_rows, int64_t least, int n_threads, int64_t & n) {
    int64_t first = list.next.load(std::memory_order_relaxed);
    do {
        n = std::max((n_rows - first) / (2 * n_threads), least);
        n = (n + tile_rows - 1) / tile_rows * tile_rows;
    } while (first < n_rows && !list.next.compare_exchange_weak(first, first + n, std::memory_order_relaxed));
    return first;
}

// What run_product works on.
struct job {
    const kernel & k;
    rows           w;
    vectors        x;
    float *        out;
    char *         tile;

    // Blocks [i, i + n_blocks) of rows [r, r + n), those that there are.
    rows part(int64_t r, int64_t n, int64_t i, int64_t n_blocks) const {
        return { w.row(r) + size_t(i) * k.block_bytes, w.stride, std::min(n, w.n - r),
                 std::min(n_blocks, w.n_blocks - i) };
    }
};

// Rows [first, last), tile by tile.
void multiply_tiles(const job & t, int64_t first, int64_t last) {
    const int64_t n_blocks = tile_blocks * t.k.n_per_256;
    for (int64_t r = first; r < last; r += tile_rows) {
        for (int64_t i = 0; i < t.w.n_blocks; i += n_blocks) {
            const rows    w      = t.part(r, std::min(tile_rows, last - r), i, n_blocks);
            const bool    is_end = i + n_blocks >= t.w.n_blocks;
            const int64_t next_r = is_end ? r + tile_rows : r;
            const rows next = next_r < t.w.n ? t.part(next_r, tile_rows, is_end ? 0 : i + n_blocks, n_blocks) : rows{};
            t.k.open(w, t.tile);
            for (int64_t v = 0; v < t.x.n_all; v += n_few) {
                const int64_t end  = std::min<int64_t>(v + n_few, t.x.n_all);
                const int64_t a    = next.n * v / t.x.n_all;  // each few vectors ask for their share
                const rows    some = { next.row(a), next.stride, next.n * end / t.x.n_all - a, next.n_blocks };
                t.k.many[end - v - 1](w, t.tile, some, t.x.from(v, i / t.k.n_per_256), i > 0, t.out + v * t.w.n + r,
                                      t.w.n);
            }
        }
    }
}

// Of what each thread needs for products with n_x vectors.
size_t tile_bytes(const kernel & k, int64_t n_per_row, int64_t n_x) {
    const int64_t n_blocks = std::min(tile_blocks, rounded_blocks(n_per_row));
    return n_x > n_few ? size_t(tile_rows / n_lanes * n_blocks) * k.opened_bytes : 0;
}

// Of those that rounded() made.
int64_t n_vectors(const ggml_tensor * w, const ggml_tensor * x) {
    return (x->ne[0] - int64_t(lists_bytes)) / (rounded_blocks(w->ne[0]) * int64_t(sizeof(rounded_block)));
}

void run_product(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const ggml_tensor * w     = dst->src[0];
    char *              lists = static_cast<char *>(dst->src[1]->data);
    work_list &         list  = reinterpret_cast<work_list *>(lists)[reinterpret_cast<intptr_t>(userdata)];
    const kernel &      k     = *kernel_for(w->type);
    const int64_t       n_x   = n_vectors(w, dst->src[1]);
    float *             out   = static_cast<float *>(dst->data);
    char *              tiles = reinterpret_cast<char *>(out + GGML_PAD(w->ne[1] * n_x, 16));
    const job     t = { k,
                        { static_cast<const char *>(w->data), w->nb[1], w->ne[1], w->ne[0] / ggml_blck_size(w->type) },
                        { reinterpret_cast<rounded_block *>(lists + lists_bytes), n_x },
                        out,
                        tiles + size_t(ith) * tile_bytes(k, w->ne[0], n_x) };
    const int64_t least = std::max<int64_t>(1, int64_t(least_bytes / t.w.stride));
    int64_t       n     = 0;
    for (int64_t first; (first = take(list, t.w.n, least, nth, n)) < t.w.n;) {
        const int64_t last = std::min(first + n, t.w.n);
        if (n_x > n_few) {
            multiply_tiles(t, first, last);
        } else {
            k.few[n_x - 1](t.part(first, last - first, 0, t.w.n_blocks), t.x, out + first, t.w.n);
        }
    }
}

}  // namespace

bool has_product(const ggml_tensor * w) {
    const ggml_tensor * whole = w->view_src ? w->view_src : w;
    const kernel *      k     = kernel_for(w->type);
    return k && whole->buffer && ggml_backend_buffer_is_host(whole->buffer);
}

ggml_tensor * rounded(ggml_context * ctx, ggml_type type, ggml_tensor * x) {
    const size_t n_bytes = lists_bytes + size_t(rounded_blocks(x->ne[0]) * x->ne[1]) * sizeof(rounded_block);
    return ggml_custom_4d(ctx, GGML_TYPE_I8, int64_t(n_bytes), 1, 1, 1, &x, 1, run_rounded, GGML_N_TASKS_MAX,
                          reinterpret_cast<void *>(intptr_t(type)));
}

ggml_tensor * product(ggml_context * ctx, ggml_tensor * w, ggml_tensor * x, int i, int n_threads) {
    const int64_t n_x    = n_vectors(w, x);
    ggml_tensor * args[] = { w, x };

    // Each thread's room for a tile lies behind the result: memory that the graph's allocator plans like any other.
    const int64_t n_room = n_threads * int64_t(tile_bytes(*kernel_for(w->type), w->ne[0], n_x) / sizeof(float));
    const int64_t n_all  = w->ne[1] * n_x;
    ggml_tensor * all = ggml_custom_4d(ctx, GGML_TYPE_F32, GGML_PAD(n_all, 16) + n_room, 1, 1, 1, args, 2, run_product,
                                       GGML_N_TASKS_MAX, reinterpret_cast<void *>(intptr_t(i)));
    return ggml_view_2d(ctx, all, w->ne[1], n_x, size_t(w->ne[1]) * sizeof(float), 0);
}

}  // namespace slowar
