#include "matmul.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <new>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    include <immintrin.h>
#    define SLOWAR_HAS_PRODUCTS
#endif

namespace slowar {

namespace {

// The least that a thread takes from the list of work.
constexpr size_t least_bytes = size_t(32) << 10;

// How far ahead memory is asked for what comes next. From 2 to 8 KiB there is no difference to be seen.
constexpr size_t ahead_bytes = 4096;

// Vectors that a row is multiplied by at once: their sums have to stay in registers, beside what decodes the row.
constexpr int n_few  = 4;
constexpr int n_many = 8;

// Rows that are multiplied by more than a few vectors before the next are.
constexpr int64_t n_again = 8;

// With more vectors than this a row is decoded once for all of them, into memory: a tile of so many rows and blocks at a
// time, which stays in the second-level cache, while as many blocks of n_many vectors stay in the first.
constexpr int     n_decoding  = 16;
constexpr int64_t tile_rows   = 16;
constexpr int64_t tile_blocks = 8;

// Of Q8_0: with more vectors ggml's tiles are faster.
constexpr int n_most_q8_0 = 4;

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
        int16_t sums[16];    // of each sixteen
        float   factors[8];  // of each 32, where a matrix is of Q8_0
    };
    float d;  // else the factor of all
};

// Block after block of all vectors, so that those of a few vectors lie together.
struct vectors {
    rounded_block * at;
    int64_t         n_all;

    rounded_block * block(int64_t i) const { return at + i * n_all; }  // and those of further vectors behind it

    vectors from(int64_t v) const { return { at + v, n_all }; }
};

// Blocks [first, last) of each of n rows.
struct rows {
    const char * at;
    size_t       stride;
    int64_t      n;
    int64_t      first;
    int64_t      last;
    size_t       ahead;  // how far behind each block memory is asked for what will be read later; 0: for nothing
};

// Parts of rows times the first few vectors; the products of a vector are side by side, those of the next n_out behind
// them. With the first blocks they begin, with others they are added to.
using multiply_t = void (*)(const rows & w, const vectors & x, float * out, int64_t n_out);

struct opened_block;  // a decoded one

struct kernel {
    ggml_type  type;
    size_t     block_bytes;
    size_t     rounded_bytes;  // of ggml's blocks of vectors
    multiply_t few[n_few];
    void (*open)(const rows & w, opened_block * to);  // nullptr: rows are decoded each time
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

void ask_for(const void * p, size_t n_bytes) {
    for (size_t b = 0; b < n_bytes; b += 64) {
        _mm_prefetch(static_cast<const char *>(p) + b, _MM_HINT_T0);
    }
}

// Compilers like to form all products before they add them up, for which there are not enough registers.
__m256i now(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

float sum(__m256 v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x        = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// acc + scale * integers
__m256 add(__m256 acc, float scale, __m256i integers) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), _mm256_set1_ps(scale), acc);
}

// Numbers 2j and 2j + 1 of sixteen 8-bit numbers, as 16-bit numbers, each in one half.
__m256i spread(__m128i v, int j) {
    const __m128i which = _mm_unpacklo_epi64(_mm_set1_epi8(char(2 * j)), _mm_set1_epi8(char(2 * j + 1)));
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(v, which));
}

// A decoded block of 256 is, for each of its groups of 32, numbers of 8 bits without a sign and the scales of their sums
// by two; and what is to be subtracted: factors of the vector's sums of sixteen.

class q4_K {
  public:
    using block = block_q4_K;

    explicit q4_K(const block & w) : w(w) {
        uint32_t s[3];
        std::memcpy(s, w.scales, sizeof(s));
        const uint32_t scales_high = (s[2] & 0x0f0f0f0f) | ((s[0] >> 2) & 0x30303030);
        const uint32_t mins_high   = ((s[2] >> 4) & 0x0f0f0f0f) | ((s[1] >> 2) & 0x30303030);
        both       = _mm_set_epi32(int(mins_high), int(s[1] & 0x3f3f3f3f), int(scales_high), int(s[0] & 0x3f3f3f3f));
        all_scales = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(both));
    }

    __m256i numbers(int j) const {
        const __m256i q = load(w.q + 32 * (j / 2));
        return _mm256_and_si256(j % 2 == 0 ? q : _mm256_srli_epi16(q, 4), _mm256_set1_epi8(15));
    }

    __m256i scales(int j) const {
        return _mm256_shuffle_epi8(all_scales, _mm256_set1_epi16(int16_t(0x0100 + 0x0202 * j)));
    }

    __m128i bytes() const { return _mm_unpacklo_epi8(both, both); }

    __m256i offsets() const {
        const __m128i mins = _mm_cvtepu8_epi16(_mm_srli_si128(both, 8));
        return _mm256_set_m128i(_mm_unpackhi_epi16(mins, mins), _mm_unpacklo_epi16(mins, mins));
    }

    float d() const { return _cvtsh_ss(w.d); }

    float d_offset() const { return _cvtsh_ss(w.dmin); }

  private:
    const block & w;
    __m128i       both;  // eight scales, eight minima
    __m256i       all_scales;
};

class q6_K {
  public:
    using block = block_q6_K;

    explicit q6_K(const block & w) : w(w), all_scales(_mm_loadu_si128(reinterpret_cast<const __m128i *>(w.scales))) {}

    __m256i numbers(int j) const {
        const __m256i low  = load(w.low + 64 * (j / 4) + 32 * (j % 2));
        const __m256i high = load(w.high + 32 * (j / 4));
        const __m256i two  = j % 4 == 0   ? _mm256_slli_epi16(high, 4)
                             : j % 4 == 1 ? _mm256_slli_epi16(high, 2)
                             : j % 4 == 2 ? high
                                          : _mm256_srli_epi16(high, 2);
        const __m256i four = j % 4 < 2 ? low : _mm256_srli_epi16(low, 4);
        return _mm256_or_si256(_mm256_and_si256(four, _mm256_set1_epi8(15)),
                               _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
    }

    __m256i scales(int j) const { return spread(all_scales, j); }

    __m128i bytes() const { return all_scales; }

    __m256i offsets() const { return _mm256_cvtepi8_epi16(all_scales); }

    float d() const { return _cvtsh_ss(w.d); }

    float d_offset() const { return 32.0f * d(); }

  private:
    const block & w;
    __m128i       all_scales;
};

struct alignas(32) opened_block {
    uint8_t q[256];
    int8_t  scales[16];
    int16_t offsets[16];
    float   d, d_offset;
};

class opened {
  public:
    using block = opened_block;

    explicit opened(const block & w) : w(w) {}

    __m256i numbers(int j) const { return load(w.q + 32 * j); }

    __m256i scales(int j) const { return spread(_mm_load_si128(reinterpret_cast<const __m128i *>(w.scales)), j); }

    __m256i offsets() const { return load(w.offsets); }

    float d() const { return w.d; }

    float d_offset() const { return w.d_offset; }

  private:
    const block & w;
};

// The blocks of row r; those before the first are not there.
template <typename block_t> const block_t * blocks_of(const rows & w, int64_t r) {
    return reinterpret_cast<const block_t *>(w.at + size_t(r) * w.stride) - w.first;
}

template <typename block_t> void ask_behind(const rows & w, const block_t * block) {
    if (w.ahead > 0) {
        ask_for(reinterpret_cast<const char *>(block) + w.ahead, sizeof(*block));
    }
}

template <int n> void give(const rows & w, const __m256 (&acc)[n], float * out, int64_t n_out) {
    for (int v = 0; v < n; v++) {
        out[v * n_out] = sum(acc[v]) + (w.first > 0 ? out[v * n_out] : 0.0f);
    }
}

template <typename format, int n> void multiply(const rows & w, const vectors & x, float * out, int64_t n_out) {
    for (int64_t r = 0; r < w.n; r++) {
        const auto * row = blocks_of<typename format::block>(w, r);
        __m256       acc[n];
        std::fill_n(acc, n, _mm256_setzero_ps());
        for (int64_t i = w.first; i < w.last; i++) {
            ask_behind(w, row + i);
            const format          block(row[i]);
            const rounded_block * y = x.block(i);
            __m256i               total[n];
            std::fill_n(total, n, _mm256_setzero_si256());
#    pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                const __m256i q = block.numbers(j);
                const __m256i s = block.scales(j);
                for (int v = 0; v < n; v++) {
                    const __m256i products = _mm256_maddubs_epi16(q, load(y[v].q + 32 * j));
                    total[v]               = now(_mm256_add_epi32(total[v], _mm256_madd_epi16(s, products)));
                }
            }
            const __m256i offsets = block.offsets();
            for (int v = 0; v < n; v++) {
                acc[v] = add(acc[v], block.d() * y[v].d, total[v]);
                acc[v] = add(acc[v], -block.d_offset() * y[v].d, _mm256_madd_epi16(offsets, load(y[v].sums)));
            }
        }
        give(w, acc, out + r, n_out);
    }
}

template <typename format> void open(const rows & w, opened_block * to) {
    for (int64_t r = 0; r < w.n; r++) {
        const auto * row = blocks_of<typename format::block>(w, r);
        for (int64_t i = w.first; i < w.last; i++, to++) {
            ask_behind(w, row + i);
            const format block(row[i]);
#    pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                store(to->q + 32 * j, block.numbers(j));
            }
            _mm_store_si128(reinterpret_cast<__m128i *>(to->scales), block.bytes());
            store(to->offsets, block.offsets());
            to->d        = block.d();
            to->d_offset = block.d_offset();
        }
    }
}

// d * q: with a sign, and a factor for each 32.
template <int n> void multiply_q8_0(const rows & w, const vectors & x, float * out, int64_t n_out) {
    for (int64_t r = 0; r < w.n; r++) {
        const auto * row = blocks_of<block_q8_0>(w, r);
        __m256       acc[n];
        std::fill_n(acc, n, _mm256_setzero_ps());
        for (int64_t i = 0; i < w.last; i += 8) {
            const rounded_block * y      = x.block(i / 8);
            const int64_t         n_here = std::min<int64_t>(8, w.last - i);
            for (int64_t j = 0; j < n_here; j++) {
                ask_behind(w, row + i + j);
                const __m256i q    = load(row[i + j].q);
                const __m256i size = _mm256_sign_epi8(q, q);
                const float   d    = _cvtsh_ss(row[i + j].d);
                for (int v = 0; v < n; v++) {
                    const __m256i products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(load(y[v].q + 32 * j), q));
                    const __m256i sums     = _mm256_madd_epi16(_mm256_set1_epi16(1), products);
                    acc[v]                 = add(acc[v], d * y[v].factors[j], sums);
                }
            }
        }
        give(w, acc, out + r, n_out);
    }
}

template <typename format> constexpr kernel kernel_of(ggml_type type) {
    return { type,
             sizeof(typename format::block),
             sizeof(block_q8_K),
             { multiply<format, 1>, multiply<format, 2>, multiply<format, 3>, multiply<format, 4> },
             open<format> };
}

constexpr kernel kernels[] = {
    kernel_of<q4_K>(GGML_TYPE_Q4_K),
    kernel_of<q6_K>(GGML_TYPE_Q6_K),
    { GGML_TYPE_Q8_0,
      sizeof(block_q8_0),
      sizeof(block_q8_0),
      { multiply_q8_0<1>, multiply_q8_0<2>, multiply_q8_0<3>, multiply_q8_0<4> },
      nullptr },
};

constexpr multiply_t many[n_many] = {
    multiply<opened, 1>, multiply<opened, 2>, multiply<opened, 3>, multiply<opened, 4>,
    multiply<opened, 5>, multiply<opened, 6>, multiply<opened, 7>, multiply<opened, 8>,
};
#else
struct opened_block {};

constexpr kernel     kernels[]    = { { GGML_TYPE_COUNT, 0, 0, {}, nullptr } };
constexpr multiply_t many[n_many] = {};
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
        std::memcpy(to.sums, b.sums, sizeof(b.sums));
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

// Long runs of rows first, for the memory delivers them best, then shorter ones, so that all threads end together.
int64_t take(work_list & list, int64_t n_rows, int64_t least, int n_threads, int64_t & n) {
    int64_t first = list.next.load(std::memory_order_relaxed);
    do {
        n = std::max((n_rows - first) / (2 * n_threads), least);
    } while (first < n_rows && !list.next.compare_exchange_weak(first, first + n, std::memory_order_relaxed));
    return first;
}

// What run_product works on.
struct job {
    const kernel & k;
    const char *   w;
    size_t         stride;  // of w's rows
    int64_t        n_rows;
    int64_t        n_blocks;  // of a row
    vectors        x;
    float *        out;
    opened_block * room;
};

// Rows [first, last), decoded anew for every few vectors. With several times so many, few rows at a time, which stay in
// the first-level cache.
void multiply_few(const job & t, int64_t first, int64_t last) {
    const int64_t n_rows = t.x.n_all > n_few ? n_again : last - first;
    for (int64_t r = first; r < last; r += n_rows) {
        rows w = { t.w + size_t(r) * t.stride, t.stride, std::min(n_rows, last - r), 0, t.n_blocks, ahead_bytes };
        for (int64_t v = 0; v < t.x.n_all; v += n_few) {
            t.k.few[std::min<int64_t>(n_few, t.x.n_all - v) - 1](w, t.x.from(v), t.out + v * t.n_rows + r, t.n_rows);
            w.ahead = 0;
        }
    }
}

// Rows [first, last), tile by tile.
void multiply_many(const job & t, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r += tile_rows) {
        const int64_t n = std::min(tile_rows, last - r);
        for (int64_t i = 0; i < t.n_blocks; i += tile_blocks) {
            const int64_t end = std::min(i + tile_blocks, t.n_blocks);
            const char *  at  = t.w + size_t(r) * t.stride + size_t(i) * t.k.block_bytes;
            t.k.open({ at, t.stride, n, i, end, t.stride }, t.room);

            const rows w = {
                reinterpret_cast<const char *>(t.room), size_t(end - i) * sizeof(opened_block), n, i, end, 0
            };
            for (int64_t v = 0; v < t.x.n_all; v += n_many) {
                many[std::min<int64_t>(n_many, t.x.n_all - v) - 1](w, t.x.from(v), t.out + v * t.n_rows + r, t.n_rows);
            }
        }
    }
}

bool is_opened(const kernel & k, int64_t n_x) {
    return k.open && n_x > n_decoding;
}

constexpr size_t room_bytes = GGML_PAD(size_t(tile_rows * tile_blocks) * sizeof(opened_block), 64);

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
    char *              rooms = reinterpret_cast<char *>(out + GGML_PAD(w->ne[1] * n_x, 16));
    const job           t     = { k,
                                  static_cast<const char *>(w->data),
                                  w->nb[1],
                                  w->ne[1],
                                  w->ne[0] / ggml_blck_size(w->type),
                                  { reinterpret_cast<rounded_block *>(lists + lists_bytes), n_x },
                                  out,
                                  reinterpret_cast<opened_block *>(rooms + size_t(ith) * room_bytes) };
    const int64_t       least = std::max<int64_t>(1, int64_t(least_bytes / t.stride));
    int64_t             n     = 0;
    for (int64_t first; (first = take(list, t.n_rows, least, nth, n)) < t.n_rows;) {
        const int64_t last = std::min(first + n, t.n_rows);
        is_opened(k, n_x) ? multiply_many(t, first, last) : multiply_few(t, first, last);
    }
}

}  // namespace

bool has_product(const ggml_tensor * w, int64_t n_x) {
    const ggml_tensor * whole = w->view_src ? w->view_src : w;
    const kernel *      k     = kernel_for(w->type);
    return k && (k->open || n_x <= n_most_q8_0) && whole->buffer && ggml_backend_buffer_is_host(whole->buffer);
}

ggml_tensor * rounded(ggml_context * ctx, ggml_type type, ggml_tensor * x) {
    const size_t n_bytes = lists_bytes + size_t(rounded_blocks(x->ne[0]) * x->ne[1]) * sizeof(rounded_block);
    return ggml_custom_4d(ctx, GGML_TYPE_I8, int64_t(n_bytes), 1, 1, 1, &x, 1, run_rounded, GGML_N_TASKS_MAX,
                          reinterpret_cast<void *>(intptr_t(type)));
}

ggml_tensor * product(ggml_context * ctx, ggml_tensor * w, ggml_tensor * x, int i, int n_threads) {
    const int64_t n_x    = n_vectors(w, x);
    const bool    opened = is_opened(*kernel_for(w->type), n_x);
    ggml_tensor * args[] = { w, x };

    // Each thread's room for a tile lies behind the result: memory that the graph's allocator plans like any other.
    const int64_t n_room = opened ? int64_t(n_threads * (room_bytes / sizeof(float))) : 0;
    const int64_t n_all  = w->ne[1] * n_x;
    ggml_tensor * all = ggml_custom_4d(ctx, GGML_TYPE_F32, GGML_PAD(n_all, 16) + n_room, 1, 1, 1, args, 2, run_product,
                                       GGML_N_TASKS_MAX, reinterpret_cast<void *>(intptr_t(i)));
    return ggml_view_2d(ctx, all, w->ne[1], n_x, size_t(w->ne[1]) * sizeof(float), 0);
}

}  // namespace slowar
