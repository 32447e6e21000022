#include "attention.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__F16C__)
#    include <immintrin.h>
#endif

namespace slowar {

namespace {

// Eight floats, in whatever registers the target has.
typedef float floats __attribute__((vector_size(32)));
typedef int   ints __attribute__((vector_size(32)));

constexpr int64_t lanes = 8;

// Vectors of a row worked on together.
constexpr int64_t n_vectors = 2;

// Cached rows converted at a time: a tile of 32 x 128 floats stays in the first-level cache.
constexpr int64_t tile = 32;

// Query rows that share a tile, at least the heads of one KV head.
constexpr int64_t block_rows = 16;

floats load(const float * x) {
    floats v;
    std::memcpy(&v, x, sizeof(v));
    return v;
}

#if defined(__F16C__)
// Halves of a cache, converted on the way.
floats load(const ggml_fp16_t * x) {
    return floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x))));
}
#endif

void store(float * x, floats v) {
    std::memcpy(x, &v, sizeof(v));
}

// Lanes 8 .. 15 are b's.
template <int... lane> floats mix(floats a, floats b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, lane...);
#else
    return __builtin_shuffle(a, b, ints{ lane... });
#endif
}

// The sums of eight vectors, one in each lane: three rounds that halve what is left to add.
floats sums(const floats (&v)[lanes]) {
    floats pairs[4];
    for (int i = 0; i < 4; i++) {
        const floats a = v[2 * i];
        const floats b = v[2 * i + 1];
        pairs[i]       = mix<0, 8, 2, 10, 4, 12, 6, 14>(a, b) + mix<1, 9, 3, 11, 5, 13, 7, 15>(a, b);
    }
    floats fours[2];
    for (int i = 0; i < 2; i++) {
        const floats a = pairs[2 * i];
        const floats b = pairs[2 * i + 1];
        fours[i]       = mix<0, 1, 8, 9, 4, 5, 12, 13>(a, b) + mix<2, 3, 10, 11, 6, 7, 14, 15>(a, b);
    }
    return mix<0, 1, 2, 3, 8, 9, 10, 11>(fours[0], fours[1]) + mix<4, 5, 6, 7, 12, 13, 14, 15>(fours[0], fours[1]);
}

float sum(floats v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

// e^x for x <= 0 by range reduction to [-ln2/2, ln2/2] and a polynomial of degree 6; relative error below 2e-7.
floats exp_negative(floats x) {
    x = x < -87.0f ? floats{} - 87.0f : x;

    const floats n = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
    const floats k = n - 12582912.0f;
    const floats r = (x - k * 0.693145752f) - k * 1.42860677e-6f;  // ln 2 in two parts

    floats p = r * (1.0f / 720.0f) + (1.0f / 120.0f);
    p        = p * r + (1.0f / 24.0f);
    p        = p * r + (1.0f / 6.0f);
    p        = p * r + 0.5f;
    p        = p * r + 1.0f;
    p        = p * r + 1.0f;

    const ints two_to_k = ((ints) n - 0x4b400000 + 127) << 23;
    return p * (floats) two_to_k;
}

struct shape {
    int64_t head_dim;
    int64_t width;  // head_dim in whole pairs of vectors
    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_tokens;
    int64_t n_repeat;      // query heads of a KV head
    int64_t block_tokens;  // positions whose heads share a tile

    int64_t rows() const { return block_tokens * n_repeat; }

    int64_t per_head() const { return rows() * (2 * width + tile + 2); }

    int64_t scratch() const { return n_head_kv * per_head() + tile * width; }
};

shape shape_of(const ggml_tensor * q, const ggml_tensor * k) {
    shape s;
    s.head_dim     = q->ne[0];
    s.width        = GGML_PAD(s.head_dim, n_vectors * lanes);
    s.n_head       = q->ne[1];
    s.n_head_kv    = k->ne[0] / s.head_dim;
    s.n_tokens     = q->ne[2];
    s.n_repeat     = s.n_head / s.n_head_kv;
    s.block_tokens = std::min(std::max<int64_t>(block_rows / s.n_repeat, 1), s.n_tokens);
    return s;
}

// What the queries of one KV head carry along the cache: a running softmax.
struct head_state {
    float * q;       // [rows][width], scaled
    float * out;     // [rows][width]
    float * scores;  // [rows][tile]
    float * most;    // [rows]
    float * total;   // [rows]
};

head_state state_at(const shape & s, float * scratch, int64_t head) {
    float *       at = scratch + head * s.per_head();
    const int64_t n  = s.rows();
    return { at, at + n * s.width, at + 2 * n * s.width, at + n * (2 * s.width + tile),
             at + n * (2 * s.width + tile + 1) };
}

// Rows of one KV head as they lie in a layer's cache.
struct cached_rows {
    ggml_type    type;
    const char * at;
    size_t       stride;
    int64_t      n;
};

cached_rows rows_of(const shape & s, const ggml_tensor * cache, int64_t head, int64_t slot, int64_t n) {
    const char * layer = static_cast<const char *>(cache->data);
    return { cache->type, layer + size_t(slot) * cache->nb[1] + ggml_row_size(cache->type, head * s.head_dim),
             cache->nb[1], n };
}

// The cache is read in pieces of a few hundred bytes, too short for the processor to see what comes next: while a row is
// worked on, one of those that follow is asked for.
void ask_for(const cached_rows & next, int64_t i, size_t n_bytes) {
    for (size_t b = 0; i < next.n && b < n_bytes; b += 64) {
        __builtin_prefetch(next.at + size_t(i) * next.stride + b);
    }
}

void convert(const shape & s, const cached_rows & from, const cached_rows & next, float * to) {
    const ggml_to_float_t to_float = ggml_get_type_traits(from.type)->to_float;
    const size_t          n_bytes  = ggml_row_size(from.type, s.head_dim);
    for (int64_t i = 0; i < from.n; i++, to += s.width) {
        const char * row = from.at + size_t(i) * from.stride;
        ask_for(next, i, n_bytes);
        if (from.type == GGML_TYPE_F16) {
            ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t *>(row), to, s.head_dim);
        } else if (to_float) {
            to_float(row, to, s.head_dim);
        } else {
            std::memcpy(to, row, n_bytes);
        }
    }
}

// Keys as they lie in the cache, or converted.
template <typename number> struct key_rows {
    const number * at;
    int64_t        stride;
    int64_t        n;

    const number * row(int64_t i) const { return at + std::min(i, n - 1) * stride; }
};

// scores[r][i] = q[r] . keys[i], eight products at a time: n_rows query rows share each key, and eight sums in flight
// keep the multipliers busy.
template <int n_rows, typename number>
void score(const shape & s, const float * q, const key_rows<number> & keys, const cached_rows & next, float * scores) {
    constexpr int n_keys  = lanes / n_rows;
    const size_t  n_bytes = ggml_row_size(next.type, s.head_dim);
    for (int64_t i = 0; i < keys.n; i += n_keys) {
        const number * row[n_keys];
        for (int k = 0; k < n_keys; k++) {
            ask_for(next, i + k, n_bytes);
            row[k] = keys.row(i + k);
        }
        floats acc[lanes] = {};
        for (int64_t d = 0; d < s.width; d += lanes) {
            for (int k = 0; k < n_keys; k++) {
                const floats key = load(row[k] + d);
                for (int r = 0; r < n_rows; r++) {
                    acc[r * n_keys + k] += load(q + r * s.width + d) * key;
                }
            }
        }
        const floats products = sums(acc);
        for (int r = 0; r < n_rows; r++) {
            std::memcpy(scores + r * tile + i, reinterpret_cast<const float *>(&products) + r * n_keys,
                        n_keys * sizeof(float));
        }
    }
}

template <typename number>
void score_rows(const shape & s, const head_state & h, int64_t n_rows, const key_rows<number> & keys,
                const cached_rows & next) {
    int64_t r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        score<4>(s, h.q + r * s.width, keys, next, h.scores + r * tile);
    }
    for (; r + 2 <= n_rows; r += 2) {
        score<2>(s, h.q + r * s.width, keys, next, h.scores + r * tile);
    }
    for (; r < n_rows; r++) {
        score<1>(s, h.q + r * s.width, keys, next, h.scores + r * tile);
    }
}

// Halves that are read once are converted there, where the processor can.
void score_all(const shape & s, const head_state & h, int64_t n_rows, const cached_rows & keys,
               const cached_rows & next, float * rows) {
#if defined(__F16C__)
    if (keys.type == GGML_TYPE_F16 && s.width == s.head_dim && n_rows <= 4 && n_rows != 3) {
        const int64_t stride = int64_t(keys.stride / sizeof(ggml_fp16_t));
        score_rows<ggml_fp16_t>(s, h, n_rows, { reinterpret_cast<const ggml_fp16_t *>(keys.at), stride, keys.n }, next);
        return;
    }
#endif
    convert(s, keys, next, rows);
    score_rows<float>(s, h, n_rows, { rows, s.width, keys.n }, { next.type, nullptr, 0, 0 });
}

// Turns a tile's scores into weights and rescales what was summed before, when a larger score turned up.
void soften(const shape & s, const head_state & h, int64_t r, int64_t n_seen) {
    float * scores = h.scores + r * tile;
    std::fill(scores + n_seen, scores + tile, -INFINITY);

    float most = h.most[r];
    for (int64_t i = 0; i < n_seen; i++) {
        most = std::max(most, scores[i]);
    }
    if (most > h.most[r]) {
        const float shrink  = std::exp(h.most[r] - most);
        h.total[r]         *= shrink;
        for (int64_t d = 0; d < s.width; d += lanes) {
            store(h.out + r * s.width + d, load(h.out + r * s.width + d) * shrink);
        }
        h.most[r] = most;
    }
    floats total = {};
    for (int64_t i = 0; i < tile; i += lanes) {
        const floats x = load(scores + i);
        const floats w = x == -INFINITY ? floats{} : exp_negative(x - most);
        store(scores + i, w);
        total += w;
    }
    h.total[r] += sum(total);
}

// out[r] += sum over i of scores[r][i] * values[i]; n_rows query rows share each value.
template <int n_rows> void gather(const shape & s, const float * scores, const float * values, int64_t n, float * out) {
    for (int64_t d = 0; d < s.width; d += n_vectors * lanes) {
        floats acc[n_rows][n_vectors];
        for (int r = 0; r < n_rows; r++) {
            for (int64_t j = 0; j < n_vectors; j++) {
                acc[r][j] = load(out + r * s.width + d + j * lanes);
            }
        }
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n_vectors; j++) {
                const floats value = load(values + i * s.width + d + j * lanes);
                for (int r = 0; r < n_rows; r++) {
                    acc[r][j] += scores[r * tile + i] * value;
                }
            }
        }
        for (int r = 0; r < n_rows; r++) {
            for (int64_t j = 0; j < n_vectors; j++) {
                store(out + r * s.width + d + j * lanes, acc[r][j]);
            }
        }
    }
}

void gather_all(const shape & s, const head_state & h, int64_t n_rows, const float * values, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        gather<4>(s, h.scores + r * tile, values, n, h.out + r * s.width);
    }
    for (; r + 2 <= n_rows; r += 2) {
        gather<2>(s, h.scores + r * tile, values, n, h.out + r * s.width);
    }
    for (; r < n_rows; r++) {
        gather<1>(s, h.scores + r * tile, values, n, h.out + r * s.width);
    }
}

// One walk along the cache, in the order in which it lies: n_tokens positions from t0 on of KV heads [head0, head1).
struct walk {
    int64_t t0;
    int64_t n_tokens;
    int64_t head0;
    int64_t head1;
};

void attend(const shape & s, ggml_tensor * dst, const walk & w, float * scratch) {
    const ggml_tensor * q         = dst->src[0];
    const ggml_tensor * k         = dst->src[1];
    const ggml_tensor * v         = dst->src[2];
    const int32_t *     positions = static_cast<const int32_t *>(dst->src[3]->data) + w.t0;
    const int64_t       n_rows    = w.n_tokens * s.n_repeat;
    const float         scale     = 1.0f / std::sqrt(float(s.head_dim));
    float *             rows      = scratch + s.n_head_kv * s.per_head();

    if (s.width != s.head_dim) {
        std::fill_n(rows, tile * s.width, 0.0f);
    }
    for (int64_t head = w.head0; head < w.head1; head++) {
        const head_state h = state_at(s, scratch, head);
        std::fill_n(h.q, 2 * s.rows() * s.width, 0.0f);
        std::fill_n(h.most, s.rows(), -INFINITY);
        std::fill_n(h.total, s.rows(), 0.0f);
        for (int64_t r = 0; r < n_rows; r++) {
            const int64_t t  = w.t0 + r / s.n_repeat;
            const int64_t qh = head * s.n_repeat + r % s.n_repeat;
            const float * from =
                reinterpret_cast<const float *>(static_cast<const char *>(q->data) + t * q->nb[2] + qh * q->nb[1]);
            for (int64_t d = 0; d < s.head_dim; d++) {
                h.q[r * s.width + d] = from[d] * scale;
            }
        }
    }

    const int64_t n_kv = positions[w.n_tokens - 1] + 1;
    for (int64_t slot = 0; slot < n_kv; slot += tile) {
        const int64_t n = std::min(tile, n_kv - slot);
        for (int64_t head = w.head0; head < w.head1; head++) {
            const head_state  h      = state_at(s, scratch, head);
            const cached_rows keys   = rows_of(s, k, head, slot, n);
            const cached_rows values = rows_of(s, v, head, slot, n);
            const cached_rows next   = head + 1 < w.head1 ? rows_of(s, k, head + 1, slot, n)
                                                          : rows_of(s, k, w.head0, slot + tile, n_kv - slot - tile);
            score_all(s, h, n_rows, keys, values, rows);
            for (int64_t r = 0; r < n_rows; r++) {
                const int64_t n_seen = positions[r / s.n_repeat] + 1 - slot;
                soften(s, h, r, std::clamp<int64_t>(n_seen, 0, n));
            }
            convert(s, values, next, rows);
            gather_all(s, h, n_rows, rows, n);
        }
    }

    float * out = static_cast<float *>(dst->data) + w.t0 * s.n_head * s.head_dim;
    for (int64_t head = w.head0; head < w.head1; head++) {
        const head_state h = state_at(s, scratch, head);
        for (int64_t r = 0; r < n_rows; r++) {
            const int64_t qh = head * s.n_repeat + r % s.n_repeat;
            float *       to = out + ((r / s.n_repeat) * s.n_head + qh) * s.head_dim;
            for (int64_t d = 0; d < s.head_dim; d++) {
                to[d] = h.out[r * s.width + d] / h.total[r];
            }
        }
    }
}

// One thread's part: a run of (block of positions, KV head) pairs.
void run(ggml_tensor * dst, int ith, int nth, void *) {
    const shape   s        = shape_of(dst->src[0], dst->src[1]);
    const int64_t n_blocks = (s.n_tokens + s.block_tokens - 1) / s.block_tokens;
    const int64_t n_units  = n_blocks * s.n_head_kv;
    const int64_t begin    = n_units * ith / nth;
    const int64_t end      = n_units * (ith + 1) / nth;
    float *       scratch  = static_cast<float *>(dst->data) + s.n_head * s.head_dim * s.n_tokens + ith * s.scratch();

    for (int64_t unit = begin; unit < end;) {
        const int64_t block = unit / s.n_head_kv;
        const int64_t next  = std::min(end, (block + 1) * s.n_head_kv);
        const int64_t t0    = block * s.block_tokens;
        const int64_t n     = std::min(s.block_tokens, s.n_tokens - t0);
        attend(s, dst, { t0, n, unit % s.n_head_kv, next - block * s.n_head_kv }, scratch);
        unit = next;
    }
}

}  // namespace

ggml_tensor * cpu_attention(ggml_context * ctx, ggml_tensor * q, const kv & stored, ggml_tensor * positions,
                            int n_threads) {
    const shape   s      = shape_of(q, stored.k);
    const int64_t n_out  = s.n_head * s.head_dim * s.n_tokens;
    ggml_tensor * args[] = { q, stored.k, stored.v, positions };

    // Each thread's scratch lies behind the result: memory that the graph's allocator plans like any other.
    ggml_tensor * all =
        ggml_custom_4d(ctx, GGML_TYPE_F32, n_out + n_threads * s.scratch(), 1, 1, 1, args, 4, run, n_threads, nullptr);
    return ggml_view_2d(ctx, all, s.n_head * s.head_dim, s.n_tokens, size_t(s.n_head * s.head_dim) * sizeof(float), 0);
}

}  // namespace slowar
