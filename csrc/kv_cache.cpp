#include "kv_cache.h"

#include "device.h"
#include "error.h"

#include <atomic>

namespace slowar {

static uint64_t next_id() {
    static std::atomic<uint64_t> id{ 0 };
    return ++id;
}

kv_cache::kv_cache(const config & c, ggml_backend_dev_t device, ggml_type type, int32_t max_seq_len, existence how)
    : id_(next_id()), ctx_(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true })) {
    const std::string what = text("a KV cache of %d positions", max_seq_len);
    if (double(c.kv_size()) * max_seq_len * c.n_layer > 1e15) {  // sizes beyond this could overflow
        fail(SLOWAR_MEMORY, "%s is larger than any memory", what.c_str());
    }
    k_ = ggml_new_tensor_4d(ctx_.get(), type, c.head_dim, c.n_head_kv, max_seq_len, c.n_layer);
    v_ = ggml_dup_tensor(ctx_.get(), k_);
    ggml_set_name(k_, "cache_k");
    ggml_set_name(v_, "cache_v");

    if (how == imagined) {
        // A tensor with a buffer, even an empty one, is not the planner's to place.
        buffer_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), 0));
        k_->buffer = v_->buffer = buffer_.get();
        return;
    }
    check_memory(device, n_bytes(), what.c_str());
    const size_t mark = log_mark();
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), ggml_backend_dev_buffer_type(device)));
    if (!buffer_) {
        fail(SLOWAR_MEMORY, "no memory for %s (%.1f MiB) on %s: %s", what.c_str(), double(n_bytes()) / (1 << 20),
             ggml_backend_dev_name(device), log_since(mark).c_str());
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
}

// Slots [slot, slot + n) of a layer.
static ggml_tensor * slots(ggml_context * ctx, ggml_tensor * cache, int il, int slot, int64_t n) {
    return ggml_view_3d(ctx, cache, cache->ne[0], cache->ne[1], n, cache->nb[1], cache->nb[2],
                        size_t(il) * cache->nb[3] + size_t(slot) * cache->nb[2]);
}

template <typename function_t> void kv_cache::each_layer(int32_t first, int32_t n, function_t f) const {
    for (int64_t il = 0; il < k_->ne[3]; il++) {
        for (ggml_tensor * x : { k_, v_ }) {
            f(x, size_t(il) * x->nb[3] + size_t(first) * x->nb[2], size_t(n) * x->nb[2]);
        }
    }
}

void kv_cache::copy(const kv_cache & from, int32_t n) {
    const ggml_context_ptr ctx(
        ggml_init({ 4 * size_t(k_->ne[3]) * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true }));
    const auto positions = [&](ggml_tensor * cache, int il) {
        ggml_tensor * x = slots(ctx.get(), cache, il, 0, n);
        ggml_backend_view_init(x);
        return x;
    };
    for (int il = 0; il < int(k_->ne[3]); il++) {
        ggml_backend_tensor_copy(positions(from.k_, il), positions(k_, il));
        ggml_backend_tensor_copy(positions(from.v_, il), positions(v_, il));
    }
}

void kv_cache::read(int32_t first, int32_t n, void * out) const {
    char * to = static_cast<char *>(out);
    each_layer(first, n, [&](const ggml_tensor * cache, size_t offset, size_t n_bytes) {
        ggml_backend_tensor_get(cache, to, offset, n_bytes);
        to += n_bytes;
    });
}

void kv_cache::write(int32_t first, int32_t n, const void * from) {
    const char * at = static_cast<const char *>(from);
    each_layer(first, n, [&](ggml_tensor * cache, size_t offset, size_t n_bytes) {
        ggml_backend_tensor_set(cache, at, offset, n_bytes);
        at += n_bytes;
    });
}

void kv_cache::store(ggml_context * ctx, ggml_cgraph * graph, kv batch, int il, int slot) const {
    const int64_t n = batch.k->ne[2];
    ggml_build_forward_expand(graph, ggml_cpy(ctx, batch.k, slots(ctx, k_, il, slot, n)));
    ggml_build_forward_expand(graph, ggml_cpy(ctx, batch.v, slots(ctx, v_, il, slot, n)));
}

kv kv_cache::past(ggml_context * ctx, int il, int n) const {
    return { ggml_cast(ctx, slots(ctx, k_, il, 0, n), GGML_TYPE_F32),
             ggml_cast(ctx, slots(ctx, v_, il, 0, n), GGML_TYPE_F32) };
}

static ggml_tensor * write_rows(ggml_context * ctx, ggml_tensor * cache, ggml_tensor * batch, ggml_tensor * slots,
                                int il) {
    const int64_t row   = cache->ne[0] * cache->ne[1];
    ggml_tensor * layer = ggml_view_2d(ctx, cache, row, cache->ne[2], cache->nb[2], size_t(il) * cache->nb[3]);
    ggml_tensor * rows  = ggml_view_2d(ctx, batch, row, batch->ne[2], batch->nb[2], 0);
    return ggml_set_rows(ctx, layer, rows, slots);
}

kv kv_cache::stored(ggml_context * ctx, kv batch, ggml_tensor * slots, int il) const {
    return { write_rows(ctx, k_, batch.k, slots, il), write_rows(ctx, v_, batch.v, slots, il) };
}

}  // namespace slowar
