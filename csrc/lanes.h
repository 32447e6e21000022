// Registers with a number of 32 bits of each of several rows, or four small ones of each: eight rows with AVX2, sixteen
// with AVX-512 and VNNI, which adds up the products of four small numbers at once.
#pragma once

#include "avx2.h"

#ifdef SLOWAR_HAS_PRODUCTS

namespace slowar {

// For a shuffle: each lane's four bytes in the order of the bytes of `which`; 0 for 0x80.
inline __m128i four_lanes(uint32_t which) {
    return _mm_or_si128(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0), _mm_set1_epi32(int(which)));
}

inline __m128i load_piece(const void * p) {
    return _mm_loadu_si128(static_cast<const __m128i *>(p));
}

#    if defined(SLOWAR_HAS_VNNI)

using ints   = __m512i;
using floats = __m512;

inline ints every(int32_t v) {
    return _mm512_set1_epi32(v);
}

inline ints load_ints(const void * p) {
    return _mm512_loadu_si512(p);
}

inline void store(void * p, ints v) {
    _mm512_storeu_si512(p, v);
}

inline ints plus(ints a, ints b) {
    return _mm512_add_epi32(a, b);
}

// sum + each lane's products of two numbers of 16 bits
inline ints add_two(ints sum, ints a, ints b) {
    return _mm512_dpwssd_epi32(sum, a, b);
}

// sum + each lane's products of four bytes without a sign and four with one; the first such sum begins anew.
inline ints add_four(bool is_first, ints sum, ints w, ints x) {
    return _mm512_dpbusd_epi32(is_first ? _mm512_setzero_si512() : sum, w, x);
}

// Such a sum times the scales of scale() and signed_scale().
inline ints scaled(ints scales, ints sum) {
    return _mm512_mullo_epi32(scales, sum);
}

// How many may be added up before the sum is scaled, where `most` is the largest number without a sign.
constexpr int quads_at_once(int n_per_scale, int /*most*/) {
    return n_per_scale;
}

inline ints shuffle(ints v, uint32_t which) {
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(four_lanes(which)));
}

// Two numbers of 16 bits from their high bytes.
inline ints from_high_bytes(ints v) {
    return _mm512_srai_epi16(v, 8);
}

inline ints scale(ints v, int i) {
    return shuffle(v, 0x80808000u | uint32_t(i));
}

inline ints signed_scale(ints v, int i) {
    return _mm512_srai_epi32(shuffle(v, 0x00808080u | uint32_t(i) << 24), 24);
}

// With a sign, w is lifted above 0 by 128, which 128 times the sum of x makes up for.
inline ints add_four_signed(bool is_first, ints sum, ints w, ints x, int sum_x) {
    return _mm512_dpbusd_epi32(is_first ? every(-128 * sum_x) : sum, w ^ every_byte(char(0x80), w), x);
}

// Sixteen bytes of every fourth row.
inline ints every_fourth(const char * const * row, size_t offset) {
    const auto piece = [row, offset](int r) {
        return load_piece(row[r] + offset);
    };
    ints v = _mm512_castsi128_si512(piece(0));
    v      = _mm512_inserti32x4(v, piece(4), 1);
    v      = _mm512_inserti32x4(v, piece(8), 2);
    return _mm512_inserti32x4(v, piece(12), 3);
}

inline ints unpack_low(ints a, ints b) {
    return _mm512_unpacklo_epi32(a, b);
}

inline ints unpack_high(ints a, ints b) {
    return _mm512_unpackhi_epi32(a, b);
}

inline ints unpack_low_pairs(ints a, ints b) {
    return _mm512_unpacklo_epi64(a, b);
}

inline ints unpack_high_pairs(ints a, ints b) {
    return _mm512_unpackhi_epi64(a, b);
}

inline ints upper_halves(ints v) {
    return _mm512_srli_epi32(v, 16);
}

// The lower halves of all lanes.
inline void store_halves(uint16_t * p, ints v) {
    store(p, _mm512_cvtepi32_epi16(v));
}

inline floats every(float v) {
    return _mm512_set1_ps(v);
}

inline floats load_floats(const float * p) {
    return _mm512_loadu_ps(p);
}

inline floats load_halves(const void * p) {
    return _mm512_cvtph_ps(load(p));
}

inline void store(float * p, floats v) {
    _mm512_storeu_ps(p, v);
}

// acc + factor * integers
inline floats add(floats acc, floats factor, ints integers) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(integers), factor, acc);
}

#    else

using ints   = __m256i;
using floats = __m256;

inline ints every(int32_t v) {
    return _mm256_set1_epi32(v);
}

inline ints load_ints(const void * p) {
    return load(p);
}

inline ints plus(ints a, ints b) {
    return _mm256_add_epi32(a, b);
}

inline ints add_two(ints sum, ints a, ints b) {
    return plus(sum, _mm256_madd_epi16(a, b));
}

// In two sums of 16 bits.
inline ints add_four(bool is_first, ints sum, ints w, ints x) {
    const ints products = _mm256_maddubs_epi16(w, x);
    return is_first ? products : now(_mm256_add_epi16(sum, products));
}

inline ints scaled(ints scales, ints sum) {
    return _mm256_madd_epi16(scales, sum);
}

constexpr int quads_at_once(int n_per_scale, int most) {
    return n_per_scale * 2 * most * 127 <= INT16_MAX ? n_per_scale : quads_at_once(n_per_scale / 2, most);
}

inline ints shuffle(ints v, uint32_t which) {
    return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(four_lanes(which)));
}

inline ints from_high_bytes(ints v) {
    return _mm256_srai_epi16(v, 8);
}

// Twice, for two sums.
inline ints scale(ints v, int i) {
    return shuffle(v, 0x80008000u | uint32_t(i) * 0x00010001u);
}

inline ints signed_scale(ints v, int i) {
    return from_high_bytes(shuffle(v, 0x00800080u | uint32_t(i) * 0x01000100u));
}

inline ints add_four_signed(bool is_first, ints sum, ints w, ints x, int) {
    const ints products = by_four(w, x);
    return is_first ? products : now(plus(sum, products));
}

inline ints every_fourth(const char * const * row, size_t offset) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_piece(row[0] + offset)), load_piece(row[4] + offset), 1);
}

inline ints unpack_low(ints a, ints b) {
    return _mm256_unpacklo_epi32(a, b);
}

inline ints unpack_high(ints a, ints b) {
    return _mm256_unpackhi_epi32(a, b);
}

inline ints unpack_low_pairs(ints a, ints b) {
    return _mm256_unpacklo_epi64(a, b);
}

inline ints unpack_high_pairs(ints a, ints b) {
    return _mm256_unpackhi_epi64(a, b);
}

inline ints upper_halves(ints v) {
    return _mm256_srli_epi32(v, 16);
}

inline void store_halves(uint16_t * p, ints v) {
    const __m128i low    = _mm_set_epi32(0, 0, 0x0d0c0908, 0x05040100);
    const ints    halves = _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(low));
    const ints    all    = _mm256_permute4x64_epi64(halves, _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(all));
}

inline floats every(float v) {
    return _mm256_set1_ps(v);
}

inline floats load_floats(const float * p) {
    return _mm256_loadu_ps(p);
}

inline floats load_halves(const void * p) {
    return _mm256_cvtph_ps(load_piece(p));
}

inline void store(float * p, floats v) {
    _mm256_storeu_ps(p, v);
}

#    endif

// Bytes i and j of each four as two numbers of 16 bits.
inline ints pair(ints v, int i, int j) {
    return shuffle(v, 0x80008000u | uint32_t(j) << 16 | uint32_t(i));
}

inline ints signed_pair(ints v, int i, int j) {
    return from_high_bytes(shuffle(v, 0x00800080u | uint32_t(j) << 24 | uint32_t(i) << 8));
}

// How many lie in what memory is asked for at once.
constexpr int n_per_line = 64 / int(sizeof(ints));

// Four bytes, or two numbers of 16 bits, in each lane.
inline ints four_bytes(const void * p) {
    int32_t v;
    std::memcpy(&v, p, sizeof(v));
    return every(v);
}

// Lane r of to[k] becomes the k-th number of 32 bits of sixteen bytes of row r.
inline void transpose(const char * const (&row)[n_lanes], size_t offset, ints (&to)[4]) {
    const ints a     = every_fourth(row, offset);
    const ints b     = every_fourth(row + 1, offset);
    const ints c     = every_fourth(row + 2, offset);
    const ints d     = every_fourth(row + 3, offset);
    const ints ab[2] = { unpack_low(a, b), unpack_high(a, b) };
    const ints cd[2] = { unpack_low(c, d), unpack_high(c, d) };
    for (int k = 0; k < 4; k++) {
        to[k] = k % 2 == 0 ? unpack_low_pairs(ab[k / 2], cd[k / 2]) : unpack_high_pairs(ab[k / 2], cd[k / 2]);
    }
}

template <typename format> constexpr int n_quads() {
    return quads_at_once(64 / format::n_scales, format::most);
}

}  // namespace slowar
#endif
