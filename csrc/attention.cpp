#include "attention.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#if defined(__F16C__)
#    include <immintrin.h>
#endif

namespace slowar {

namespace {

// Eight floats, in whatever registers the target has.
typedef float floats __attribute__((vector_size(32)));
typedef int   ints __attribute__((vector_size(32)));

constexpr int64_t lanes = 8;

// Halves in a line of the processor's cache: so many are worked on between two requests to memory.
constexpr int64_t line_numbers = 32;

// Query rows that share a row of the cache once it is converted: 64 of each KV head for S2 Pro. With more of them what
// they sum would leave the second-level cache.
constexpr int64_t block_columns = 512;

// Cached rows whose keys and then whose values are read in one go.
constexpr int64_t tile = 32;

// A cache is cut into so many pieces at most, for threads to share.
constexpr int64_t most_pieces = 8;

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
    int64_t width;  // head_dim in whole lines
    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_tokens;      // of each cache
    int64_t n_repeat;      // query heads of a KV head
    int64_t block_tokens;  // positions that read the cache together
    int64_t n_columns;     // query rows of a block, in whole vectors

    int64_t n_blocks() const { return (n_tokens + block_tokens - 1) / block_tokens; }

    // Of the cache: the fewer blocks there are, the more pieces do threads need to have something to do.
    int64_t max_pieces() const { return (most_pieces + n_blocks() - 1) / n_blocks(); }

    // Of a cache's partials: as many as there can be at most for so many blocks or fewer.
    int64_t partials_size() const { return (n_blocks() + most_pieces - 1) * partial_size(); }

    int64_t partial_size() const { return n_columns * (width + 2); }

    int64_t scratch() const { return n_columns * (width + tile) + tile * width; }
};

shape shape_of(const ggml_tensor * q, const ggml_tensor * k, int64_t n_caches) {
    shape s;
    s.head_dim     = q->ne[0];
    s.width        = GGML_PAD(s.head_dim, line_numbers);
    s.n_head       = q->ne[1];
    s.n_head_kv    = k->ne[0] / s.head_dim;
    s.n_tokens     = q->ne[2] / n_caches;
    s.n_repeat     = s.n_head / s.n_head_kv;
    s.block_tokens = std::clamp<int64_t>(block_columns / s.n_head, 1, s.n_tokens);
    s.n_columns    = GGML_PAD(s.block_tokens * s.n_head, lanes);
    return s;
}

// Pieces that a cache of n_kv positions is cut into: never by how many threads there are, so that no result depends on
// them.
int64_t pieces_of(const shape & s, int64_t n_kv) {
    int64_t n = n_kv < 2 * lanes ? 1 : 2;
    while (n * 64 <= n_kv) {
        n *= 2;
    }
    return std::min(n, s.max_pieces());
}

// A running softmax along a piece of the cache, for the queries of a block: those of KV head 0 first.
struct partial {
    float * out;    // [n_columns][width]
    float * most;   // [n_columns]
    float * total;  // [n_columns]
};

// What the node of pieces is made of.
constexpr int src_q = 0, src_positions = 1, src_kv = 2;

int64_t n_caches(const ggml_tensor * pieces) {
    int64_t n = 0;
    while (src_kv + 2 * n < GGML_MAX_SRC && pieces->src[src_kv + 2 * n]) {
        n++;
    }
    return n;
}

shape shape_of(const ggml_tensor * pieces) {
    return shape_of(pieces->src[src_q], pieces->src[src_kv], n_caches(pieces));
}

// The i-th cache, with the positions that attend to it.
struct attended {
    attended(const shape & s, const ggml_tensor * pieces, const ggml_tensor * all_positions, int64_t i)
        : k(pieces->src[src_kv + 2 * i]), v(pieces->src[src_kv + 2 * i + 1]), first(i * s.n_tokens),
          positions(static_cast<const int32_t *>(all_positions->data) + first), n_pieces(pieces_of(s, n_cached(s))),
          partials(static_cast<float *>(pieces->data) + i * s.partials_size()) {}

    partial partial_at(const shape & s, int64_t block, int64_t piece) const {
        float * at = partials + (piece * s.n_blocks() + block) * s.partial_size();
        return { at, at + s.n_columns * s.width, at + s.n_columns * (s.width + 1) };
    }

    int64_t n_cached(const shape & s) const { return positions[s.n_tokens - 1] + 1; }

    const ggml_tensor * k;
    const ggml_tensor * v;
    int64_t             first;  // of all positions
    const int32_t *     positions;
    int64_t             n_pieces;
    float *             partials;
};

// A thread's own memory.
struct room {
    float * q;       // [n_columns][width], scaled
    float * scores;  // [tile][n_columns]
    float * rows;    // [tile][width], converted
};

room room_at(const shape & s, float * at) {
    return { at, at + s.n_columns * s.width, at + s.n_columns * (s.width + tile) };
}

// Some positions of a layer's cache, keys or values.
struct cached_rows {
    ggml_type    type;
    const char * at;
    size_t       stride;
    int64_t      n;

    // The numbers of one KV head.
    cached_rows of(const shape & s, int64_t head) const {
        return { type, at + ggml_row_size(type, head * s.head_dim), stride, n };
    }
};

struct slots {
    int64_t first;
    int64_t n;
};

cached_rows rows_of(const ggml_tensor * cache, const slots & of) {
    const char * first = static_cast<const char *>(cache->data) + size_t(of.first) * cache->nb[1];
    return { cache->type, first, cache->nb[1], of.n };
}

// The address only: nothing there is read.
void ask_for(const void * row, ptrdiff_t offset) {
    __builtin_prefetch(static_cast<const char *>(row) + offset);
}

// Meanwhile memory is asked for what lies so far behind each row.
void convert(const shape & s, const cached_rows & from, ptrdiff_t ahead, float * to) {
    const ggml_to_float_t to_float = ggml_get_type_traits(from.type)->to_float;
    const size_t          n_bytes  = ggml_row_size(from.type, s.head_dim);
    for (int64_t i = 0; i < from.n; i++, to += s.width) {
        const char * row = from.at + size_t(i) * from.stride;
        for (size_t b = 0; b < n_bytes; b += 64) {
            ask_for(row, ahead + ptrdiff_t(b));
        }
        if (from.type == GGML_TYPE_F16) {
            ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t *>(row), to, s.head_dim);
        } else if (to_float) {
            to_float(row, to, s.head_dim);
        } else {
            std::memcpy(to, row, n_bytes);
        }
    }
}

// Rows as they lie in the cache, or converted.
template <typename number> struct number_rows {
    const number * at;
    int64_t        stride;
    int64_t        n;

    number_rows from(int64_t i) const { return { at + i * stride, stride, n - i }; }
};

// As many rows of the cache as make eight products with n_rows query rows: eight sums keep the multipliers busy.
template <int n_rows, typename number> struct group {
    static constexpr int64_t n = lanes / n_rows;

    explicit group(const number_rows<number> & from) : stride(from.stride * ptrdiff_t(sizeof(number))) {
        for (int64_t i = 0; i < n; i++) {
            row[i] = from.at + std::min(i, from.n - 1) * from.stride;
        }
    }

    // work(d, numbers d to d + 7 of each row). A line at a time memory is asked for those of the next group, where they lie
    // in the cache: the processor does not see by itself what comes next, for rows of keys and of values take turns.
    template <typename work_t> [[gnu::always_inline]] void each(int64_t width, work_t work) const {
        for (int64_t line = 0; line < width; line += line_numbers) {
            for (int64_t i = 0; i < n && sizeof(number) == sizeof(ggml_fp16_t); i++) {
                ask_for(row[i], n * stride + line * ptrdiff_t(sizeof(number)));
            }
#pragma GCC unroll 4
            for (int64_t d = line; d < line + line_numbers; d += lanes) {
                floats numbers[n];
                for (int64_t i = 0; i < n; i++) {
                    numbers[i] = load(row[i] + d);
                }
                work(d, numbers);
            }
        }
    }

    const number * row[n];
    ptrdiff_t      stride;  // in bytes
};

// scores[i][r] = q[r] . keys[i]
template <int n_rows, typename number>
void score(const shape & s, const float * q, const number_rows<number> & keys, float * scores) {
    using rows          = group<n_rows, number>;
    const int64_t width = s.width;
    for (int64_t i = 0; i < keys.n; i += rows::n) {
        const rows some(keys.from(i));
        floats     acc[lanes] = {};
        some.each(width, [&](int64_t d, const floats(&key)[rows::n]) {
            for (int r = 0; r < n_rows; r++) {
                const floats query = load(q + r * width + d);
                for (int64_t k = 0; k < rows::n; k++) {
                    acc[k * n_rows + r] += query * key[k];
                }
            }
        });
        const floats products = sums(acc);
        for (int64_t k = 0; k < rows::n; k++) {
            std::memcpy(scores + (i + k) * s.n_columns, reinterpret_cast<const float *>(&products) + k * n_rows,
                        n_rows * sizeof(float));
        }
    }
}

// out[r] += sum over i of scores[i][r] * values[i]
template <int n_rows, typename number>
void gather(const shape & s, float * out, const number_rows<number> & values, const float * scores) {
    using rows          = group<n_rows, number>;
    const int64_t width = s.width;
    for (int64_t i = 0; i < values.n; i += rows::n) {
        const rows some(values.from(i));
        floats     weight[n_rows][rows::n];
        for (int64_t k = 0; k < rows::n; k++) {
            for (int r = 0; r < n_rows; r++) {
                weight[r][k] = floats{} + (i + k < values.n ? scores[(i + k) * s.n_columns + r] : 0.0f);
            }
        }
        some.each(width, [&](int64_t d, const floats(&value)[rows::n]) {
            for (int r = 0; r < n_rows; r++) {
                floats sum = load(out + r * width + d);
                for (int64_t k = 0; k < rows::n; k++) {
                    sum += weight[r][k] * value[k];
                }
                store(out + r * width + d, sum);
            }
        });
    }
}

enum class cached { keys, values };

// Keys: query_rows are multiplied by them, and scores are what comes out. Values: query_rows are what they are added to, by
// what has become of the scores.
template <cached what, int n_rows, typename number>
void multiply(const shape & s, float * query_rows, const number_rows<number> & rows, float * scores) {
    if constexpr (what == cached::keys) {
        score<n_rows>(s, query_rows, rows, scores);
    } else {
        gather<n_rows>(s, query_rows, rows, scores);
    }
}

// For the n_rows query rows of one KV head.
template <cached what, typename number>
void multiply_head(const shape & s, float * query_rows, int64_t n_rows, const number_rows<number> & rows,
                   float * scores) {
    int64_t r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        multiply<what, 4>(s, query_rows + r * s.width, rows, scores + r);
    }
    for (; r + 2 <= n_rows; r += 2) {
        multiply<what, 2>(s, query_rows + r * s.width, rows, scores + r);
    }
    for (; r < n_rows; r++) {
        multiply<what, 1>(s, query_rows + r * s.width, rows, scores + r);
    }
}

// For those of all heads.
template <cached what>
void multiply_all(const shape & s, float * query_rows, int64_t n_rows, const cached_rows & from, const room & own) {
#if defined(__F16C__)
    // So few query rows that a row of the cache need not be converted before, of a number that makes whole groups.
    if (from.type == GGML_TYPE_F16 && s.width == s.head_dim && (n_rows == 1 || n_rows == 2 || n_rows == 4)) {
        const int64_t stride = int64_t(from.stride / sizeof(ggml_fp16_t));
        const int64_t n      = lanes / n_rows;  // as a group has
        for (int64_t i = 0; i < from.n; i += n) {
            for (int64_t head = 0; head < s.n_head_kv; head++) {
                const auto * at = reinterpret_cast<const ggml_fp16_t *>(from.of(s, head).at) + i * stride;
                multiply_head<what, ggml_fp16_t>(s, query_rows + head * n_rows * s.width, n_rows,
                                                 { at, stride, std::min(n, from.n - i) },
                                                 own.scores + i * s.n_columns + head * n_rows);
            }
        }
        return;
    }
#endif
    for (int64_t head = 0; head < s.n_head_kv; head++) {
        const bool is_last = head + 1 == s.n_head_kv;
        const auto n_bytes = ptrdiff_t(ggml_row_size(from.type, s.head_dim));
        convert(s, from.of(s, head), is_last ? tile * ptrdiff_t(from.stride) - head * n_bytes : n_bytes, own.rows);
        multiply_head<what, float>(s, query_rows + head * n_rows * s.width, n_rows, { own.rows, s.width, from.n },
                                   own.scores + head * n_rows);
    }
}

// Turns a tile's scores into weights, and shrinks what was summed before where a larger score turned up.
void soften(const shape & s, const partial & p, int64_t n, float * scores) {
    for (int64_t c = 0; c < s.n_columns; c += lanes) {
        const floats before = load(p.most + c);
        floats       most   = before;
        for (int64_t i = 0; i < n; i++) {
            const floats x = load(scores + i * s.n_columns + c);
            most           = x > most ? x : most;
        }
        floats       total  = load(p.total + c);
        const floats shrink = exp_negative(before - most);
        for (int64_t l = 0; l < lanes; l++) {
            if (most[l] > before[l]) {
                float * out  = p.out + (c + l) * s.width;
                total[l]    *= shrink[l];
                for (int64_t d = 0; d < s.width; d += lanes) {
                    store(out + d, load(out + d) * shrink[l]);
                }
            }
        }
        for (int64_t i = 0; i < n; i++) {
            float * const at = scores + i * s.n_columns + c;
            const floats  x  = load(at);
            const floats  w  = x == -INFINITY ? floats{} : exp_negative(x - most);
            store(at, w);
            total += w;
        }
        store(p.most + c, most);
        store(p.total + c, total);
    }
}

// The i-th positions that read the cache together, [t0, t0 + n_tokens).
struct block {
    int64_t i;
    int64_t t0;
    int64_t n_tokens;
    int64_t n_rows;  // query rows of a KV head

    block(const shape & s, int64_t i)
        : i(i), t0(i * s.block_tokens), n_tokens(std::min(s.block_tokens, s.n_tokens - t0)),
          n_rows(n_tokens * s.n_repeat) {}

    int64_t column(const shape & s, int64_t t, int64_t head) const {
        return head / s.n_repeat * n_rows + (t - t0) * s.n_repeat + head % s.n_repeat;
    }
};

void scale(const shape & s, const ggml_tensor * q, int64_t first, const block & b, float * to) {
    const float factor = 1.0f / std::sqrt(float(s.head_dim));
    for (int64_t t = b.t0; t < b.t0 + b.n_tokens; t++) {
        for (int64_t head = 0; head < s.n_head; head++) {
            const char * at =
                static_cast<const char *>(q->data) + size_t(first + t) * q->nb[2] + size_t(head) * q->nb[1];
            const float * from = reinterpret_cast<const float *>(at);
            float *       row  = to + b.column(s, t, head) * s.width;
            for (int64_t d = 0; d < s.width; d++) {
                row[d] = d < s.head_dim ? from[d] * factor : 0.0f;
            }
        }
    }
}

// A position does not see those behind it.
void hide(const shape & s, const block & b, const int32_t * positions, const slots & seen, float * scores) {
    for (int64_t t = b.t0; t < b.t0 + b.n_tokens; t++) {
        for (int64_t i = std::max<int64_t>(0, positions[t] + 1 - seen.first); i < seen.n; i++) {
            for (int64_t head = 0; head < s.n_head; head++) {
                scores[i * s.n_columns + b.column(s, t, head)] = -INFINITY;
            }
        }
    }
}

// One walk along a piece of the cache, in the order in which it lies.
void attend(const shape & s, const ggml_tensor * q, const attended & of, const block & b, int64_t piece,
            const room & own) {
    const partial to = of.partial_at(s, b.i, piece);

    std::fill_n(to.out, s.n_columns * s.width, 0.0f);
    std::fill_n(to.most, s.n_columns, -INFINITY);
    std::fill_n(to.total, s.n_columns, 0.0f);
    scale(s, q, of.first, b, own.q);

    const int64_t n_eight = (of.n_cached(s) + lanes - 1) / lanes;
    const int64_t n_seen  = of.positions[b.t0 + b.n_tokens - 1] + 1;
    const int64_t begin   = n_eight * piece / of.n_pieces * lanes;
    const int64_t end     = std::min<int64_t>(n_eight * (piece + 1) / of.n_pieces * lanes, n_seen);
    for (int64_t first = begin; first < end; first += tile) {
        const slots here = { first, std::min(tile, end - first) };
        multiply_all<cached::keys>(s, own.q, b.n_rows, rows_of(of.k, here), own);
        hide(s, b, of.positions, here, own.scores);
        soften(s, to, here.n, own.scores);
        multiply_all<cached::values>(s, to.out, b.n_rows, rows_of(of.v, here), own);
    }
}

// A thread's part of all pieces of all blocks of all caches.
void run_pieces(ggml_tensor * dst, int ith, int nth, void *) {
    const int64_t n_all = n_caches(dst);
    const shape   s     = shape_of(dst);
    const room    own   = room_at(s, static_cast<float *>(dst->data) + n_all * s.partials_size() + ith * s.scratch());
    // What lies between columns and between rows is read, though nothing comes of it.
    std::fill_n(own.scores, tile * s.n_columns, 0.0f);
    std::fill_n(own.rows, tile * s.width, 0.0f);
    int64_t turn = 0;
    for (int64_t c = 0; c < n_all; c++) {
        const attended of(s, dst, dst->src[src_positions], c);
        for (int64_t i = 0; i < s.n_blocks() * of.n_pieces; i++, turn++) {
            if (turn % nth == ith) {
                attend(s, dst->src[src_q], of, block(s, i % s.n_blocks()), i / s.n_blocks(), own);
            }
        }
    }
}

// A row of a block's sums, from all pieces.
void join(const shape & s, const attended & of, int64_t block, int64_t column, float * to) {
    float most = -INFINITY;
    for (int64_t p = 0; p < of.n_pieces; p++) {
        most = std::max(most, of.partial_at(s, block, p).most[column]);
    }
    float share[most_pieces];
    float total = 0.0f;
    for (int64_t p = 0; p < of.n_pieces; p++) {
        const partial from  = of.partial_at(s, block, p);
        share[p]            = std::exp(from.most[column] - most);
        total              += share[p] * from.total[column];
    }
    std::fill_n(to, s.head_dim, 0.0f);
    for (int64_t p = 0; p < of.n_pieces; p++) {
        const float * from = of.partial_at(s, block, p).out + column * s.width;
        for (int64_t d = 0; d < s.head_dim; d++) {
            to[d] += share[p] / total * from[d];
        }
    }
}

// A thread's part of the sums of pieces, those of all heads of all positions.
void run_joined(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * pieces = dst->src[0];
    const shape         s      = shape_of(pieces);
    const int64_t       n_rows = s.n_tokens * s.n_head;
    for (int64_t c = 0; c < n_caches(pieces); c++) {
        const attended of(s, pieces, dst->src[1], c);
        for (int64_t i = n_rows * ith / nth; i < n_rows * (ith + 1) / nth; i++) {
            const int64_t t = i / s.n_head;
            const int64_t b = t / s.block_tokens;
            join(s, of, b, block(s, b).column(s, t, i % s.n_head),
                 static_cast<float *>(dst->data) + (c * n_rows + i) * s.head_dim);
        }
    }
}

}  // namespace

ggml_tensor * cpu_attention(ggml_context * ctx, ggml_tensor * q, const std::vector<kv> & stored,
                            ggml_tensor * positions, int n_threads) {
    const shape                s     = shape_of(q, stored[0].k, int64_t(stored.size()));
    const int64_t              n_all = int64_t(stored.size()) * s.partials_size() + n_threads * s.scratch();
    std::vector<ggml_tensor *> from  = { q, positions };
    for (const kv & one : stored) {
        from.insert(from.end(), { one.k, one.v });
    }
    ggml_tensor * pieces = ggml_custom_4d(ctx, GGML_TYPE_F32, n_all, 1, 1, 1, from.data(), int(from.size()), run_pieces,
                                          n_threads, nullptr);
    ggml_tensor * parts[] = { pieces, positions };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, s.n_head * s.head_dim, q->ne[2], 1, 1, parts, 2, run_joined, n_threads,
                          nullptr);
}

}  // namespace slowar
