// Kernels' common ground on processors with AVX2, FMA and F16C: registers and formats of weights.
#pragma once

#include "kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define SLOWAR_HAS_PRODUCTS

// GCC 12 takes what its own AVX-512 intrinsics leave undefined for a mistake (its bug 105593).
#    pragma GCC diagnostic push
#    pragma GCC diagnostic ignored "-Wuninitialized"
#    pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#    include <immintrin.h>
#    pragma GCC diagnostic pop

#    include <algorithm>
#    include <cstring>

namespace slowar {

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

struct block_q8_0 {
    uint16_t d;
    int8_t   q[32];
};

static_assert(sizeof(block_q8_0) == 34 && sizeof(block_q4_K) == 144 && sizeof(block_q6_K) == 210, "as in the files");

inline __m256i load(const void * p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

inline void store(void * p, __m256i v) {
    _mm256_storeu_si256(static_cast<__m256i *>(p), v);
}

// Numbers of 16 bits, shifted; a byte everywhere, in a register like the other.

inline __m256i left(__m256i v, int n) {
    return _mm256_slli_epi16(v, n);
}

inline __m256i right(__m256i v, int n) {
    return _mm256_srli_epi16(v, n);
}

inline __m256i every_byte(char b, __m256i) {
    return _mm256_set1_epi8(b);
}

#    if defined(SLOWAR_HAS_VNNI)
inline __m512i left(__m512i v, int n) {
    return _mm512_slli_epi16(v, unsigned(n));
}

inline __m512i right(__m512i v, int n) {
    return _mm512_srli_epi16(v, unsigned(n));
}

inline __m512i every_byte(char b, __m512i) {
    return _mm512_set1_epi8(b);
}
#    endif

// Asks memory for what will be read. Not by the intrinsic: gcc drops calls of a function that does nothing else.
inline void ask_for(const char * p, size_t n_bytes) {
    for (size_t b = 0; b < n_bytes; b += 64) {
        asm volatile("prefetcht0 %0" : : "m"(p[b]));
    }
}

// Compilers like to form all products before they add them up, for which there are not enough registers.
inline __m256i now(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

// The products by four of numbers with a sign.
inline __m256i by_four(__m256i w, __m256i x) {
    const __m256i size = _mm256_sign_epi8(w, w);
#    if defined(SLOWAR_HAS_VNNI)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), size, _mm256_sign_epi8(x, w));
#    else
    return _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w)));
#    endif
}

// acc + factor * integers
inline __m128 add(__m128 acc, __m128 factor, __m128i integers) {
    return _mm_fmadd_ps(_mm_cvtepi32_ps(integers), factor, acc);
}

inline __m256 add(__m256 acc, __m256 factor, __m256i integers) {
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
inline __m256i spread(__m128i v, int j) {
    const __m128i which = _mm_unpacklo_epi64(_mm_set1_epi8(char(2 * j)), _mm_set1_epi8(char(2 * j + 1)));
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(v, which));
}

// What a format is made of: for each of eight groups of 32, numbers of 8 bits without a sign and the scales of their sums
// by two; the block's factor; and what is to be added to that, offsets by sums of the vector, with a factor of its own.

class q4_K {
  public:
    using block = block_q4_K;

    static constexpr int n_bytes   = 128;  // of numbers
    static constexpr int n_scales  = 8;
    static constexpr int n_offsets = 8;
    static constexpr int most      = 15;  // of a number

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
    template <typename bytes_t> static auto numbers(int j, bytes_t bytes) {
        const auto q = bytes(j / 2);
        return (j % 2 == 0 ? q : right(q, 4)) & every_byte(15, q);
    }

    __m256i scales(int j) const { return _mm256_shuffle_epi8(twice, _mm256_set1_epi16(int16_t(0x0100 + 0x0202 * j))); }

    static const int16_t * sums_of(const rounded_block & y) { return y.sums_32; }

    // Offsets by sums, in four parts.
    __m128i offset(const rounded_block & y) const {
        return _mm_madd_epi16(_mm_unpackhi_epi8(both, _mm_setzero_si128()),
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
    static constexpr int most      = 63;

    explicit q6_K(const block & w) : all(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w.scales))) {}

    static const uint8_t * bytes(const block & w) { return w.low; }  // and the high ones behind them

    template <typename bytes_t> static auto numbers(int j, bytes_t bytes) {
        const auto low  = bytes(2 * (j / 4) + j % 2);
        const auto high = bytes(4 + j / 4);
        const auto two  = j % 4 == 0 ? left(high, 4) : j % 4 == 1 ? left(high, 2) : j % 4 == 2 ? high : right(high, 2);
        const auto four = j % 4 < 2 ? low : right(low, 4);
        return (four & every_byte(15, low)) | (two & every_byte(0x30, low));
    }

    __m256i scales(int j) const { return spread(all, j); }

    static const int16_t * sums_of(const rounded_block & y) { return y.sums_16; }

    __m128i offset(const rounded_block & y) const {
        const __m256i v = _mm256_madd_epi16(_mm256_cvtepi8_epi16(all), load(y.sums_16));
        return _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    }

    static void factors_of(const block * const (&row)[4], int64_t i, __m128 & d, __m128 & d_offset) {
        d        = factors(row, i);
        d_offset = _mm_mul_ps(d, _mm_set1_ps(-32));
    }

  private:
    __m128i all;
};

}  // namespace slowar
#endif
