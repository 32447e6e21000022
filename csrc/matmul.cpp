#include "matmul.h"

#include "ggml-backend.h"
#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

namespace slowar {

namespace {

// The least that a thread takes from the list of work.
constexpr size_t least_bytes = size_t(32) << 10;

// In front of rounded vectors: the first row of each product that nobody has taken yet.
struct work_list {
    std::atomic<int64_t> next;
    char                 apart[56];  // from the next list and from what is read all the time
};

// A line of the caches: a register of any width lies in one.
constexpr size_t tile_alignment = 64;

constexpr size_t lists_bytes = max_products * sizeof(work_list);

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
    const kernel & k  = *kernel_for(ggml_type(reinterpret_cast<intptr_t>(type)));
    const vectors  to = { reinterpret_cast<rounded_block *>(out + lists_bytes), x->ne[1] };
    const int64_t  n  = rounded_blocks(x->ne[0]) * to.n_all;
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; i++) {
        const int64_t at   = i / to.n_all * 256;
        const int64_t v    = i % to.n_all;
        const auto *  from = reinterpret_cast<const float *>(static_cast<const char *>(x->data) + size_t(v) * x->nb[1]);
        k.round(from + at, std::min<int64_t>(256, x->ne[0] - at), to.at[i]);
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

// What a packed tensor has as `extra`, which ggml leaves to those who keep the memory.
char packed_mark;

const layout & layout_of(const ggml_tensor * w, const kernel & k) {
    return is_packed(w) ? *k.packed : k.apart;
}

rows rows_of(const ggml_tensor * w) {
    return { static_cast<const char *>(w->data), w->nb[1], w->ne[1], w->ne[0] / ggml_blck_size(w->type) };
}

// What run_product works on.
struct job {
    const kernel & k;
    const layout & lying;
    rows           w;
    vectors        x;
    float *        out;
    char *         tile;

    // Blocks [i, i + n_blocks) of rows [r, r + n), those that there are.
    rows part(int64_t r, int64_t n, int64_t i, int64_t n_blocks) const {
        return { w.row(r) + size_t(i * lying.n_together) * k.block_bytes, w.stride, std::min(n, w.n - r),
                 std::min(n_blocks, w.n_blocks - i) };
    }

    // The same memory, as if rows that are mixed were one.
    rows mixed(const rows & part) const {
        const int64_t n = lying.n_together;
        return { part.at, part.stride * size_t(n), part.n / n, part.n_blocks * n };
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
            const rows    next_w =
                next_r < t.w.n ? t.mixed(t.part(next_r, tile_rows, is_end ? 0 : i + n_blocks, n_blocks)) : rows{};
            const int64_t n_times = (t.x.n_all + n_few - 1) / n_few * w.n_blocks * 8 / t.k.n_per_256;
            coming        next(next_w, size_t(next_w.n_blocks) * t.k.block_bytes, n_times);
            const rows    opened = t.lying.open(w, t.tile);
            for (int64_t v = 0; v < t.x.n_all; v += n_few) {
                const int64_t end = std::min<int64_t>(v + n_few, t.x.n_all);
                t.k.many[end - v - 1](opened, next, t.x.from(v, i / t.k.n_per_256), i > 0, t.out + v * t.w.n + r,
                                      t.w.n);
            }
        }
    }
}

// Rows [first, last) as they lie, few vectors at a time: so few rows for one after the other that they stay in the
// first-level cache, or all for the only ones.
void multiply_rows(const job & t, int64_t first, int64_t last) {
    const int64_t n = t.x.n_all > n_few ? tile_rows : last - first;
    for (int64_t r = first; r < last; r += n) {
        const rows w = t.part(r, std::min(n, last - r), 0, t.w.n_blocks);
        for (int64_t v = 0; v < t.x.n_all; v += n_few) {
            const int64_t end = std::min<int64_t>(v + n_few, t.x.n_all);
            t.lying.few[end - v - 1](w, t.x.from(v, 0), t.out + v * t.w.n + r, t.w.n);
        }
    }
}

// Of what each thread needs for products with n_x vectors.
size_t tile_bytes(const ggml_tensor * w, int64_t n_x) {
    const layout & lying    = layout_of(w, *kernel_for(w->type));
    const int64_t  n_blocks = std::min(tile_blocks, rounded_blocks(w->ne[0]));
    return n_x > lying.n_direct ? size_t(tile_rows / n_lanes * n_blocks) * lying.opened_bytes : 0;
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
    char *              tiles = reinterpret_cast<char *>(GGML_PAD(uintptr_t(out + w->ne[1] * n_x), tile_alignment));
    const job           t     = { k,          layout_of(w, k),
                                  rows_of(w), { reinterpret_cast<rounded_block *>(lists + lists_bytes), n_x },
                                  out,        tiles + size_t(ith) * tile_bytes(w, n_x) };
    const int64_t       least = std::max<int64_t>(1, int64_t(least_bytes / t.w.stride));
    int64_t             n     = 0;
    for (int64_t first; (first = take(list, t.w.n, least, nth, n)) < t.w.n;) {
        const int64_t last = std::min(first + n, t.w.n);
        if (n_x > t.lying.n_direct) {
            multiply_tiles(t, first, last);
        } else {
            multiply_rows(t, first, last);
        }
    }
}

}  // namespace

bool has_product(const ggml_tensor * w) {
    const ggml_tensor * whole = w->view_src ? w->view_src : w;
    const kernel *      k     = kernel_for(w->type);
    return k && whole->buffer && ggml_backend_buffer_is_host(whole->buffer);
}

bool can_pack(ggml_type type, const int64_t * ne) {
    const kernel * k = kernel_for(type);
    return k && ne[0] % ggml_blck_size(type) == 0 && ne[1] % k->packed->n_together == 0 && ne[2] * ne[3] == 1;
}

bool is_packed(const ggml_tensor * w) {
    return w->extra == &packed_mark;
}

void mark_packed(ggml_tensor * w) {
    w->extra = &packed_mark;
}

void pack(const void * from, ggml_tensor * w) {
    rows r = rows_of(w);
    r.at   = static_cast<const char *>(from);
    kernel_for(w->type)->packed->pack(r, static_cast<char *>(w->data));
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
    const size_t  n_room = size_t(n_threads) * tile_bytes(w, n_x);
    const int64_t n_all  = w->ne[1] * n_x + int64_t((n_room > 0 ? n_room + tile_alignment : 0) / sizeof(float));
    ggml_tensor * all    = ggml_custom_4d(ctx, GGML_TYPE_F32, n_all, 1, 1, 1, args, 2, run_product, GGML_N_TASKS_MAX,
                                          reinterpret_cast<void *>(intptr_t(i)));
    return ggml_view_2d(ctx, all, w->ne[1], n_x, size_t(w->ne[1]) * sizeof(float), 0);
}

}  // namespace slowar
