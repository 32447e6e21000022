#include "kv_cache.h"

#include "device.h"
#include "error.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <atomic>

namespace slowar {

static uint64_t next_id() {
    static std::atomic<uint64_t> id{ 0 };
    return ++id;
}

kv_cache::kv_cache(const config & c, std::vector<ggml_backend_dev_t> devices, ggml_type type, int32_t max_seq_len,
                   existence how)
    : id_(next_id()), max_seq_len_(max_seq_len), devices_(std::move(devices)), layers_(devices_.size()) {
    if (double(c.kv_size()) * max_seq_len * c.n_layer > 1e15) {  // sizes beyond this could overflow
        fail(SLOWAR_MEMORY, "a KV cache of %d positions is larger than any memory", max_seq_len);
    }
    const auto is_cpu = [](ggml_backend_dev_t device) {
        return device == cpu_device();
    };
    const bool    is_host = std::all_of(devices_.begin(), devices_.end(), is_cpu);
    const int64_t n_slots = is_host ? max_seq_len : GGML_PAD(int64_t(max_seq_len), kv_block);
    for (size_t il = 0; il < layers_.size(); il++) {
        ggml_context_ptr & ctx = contexts_[devices_[il]];
        if (!ctx) {
            ctx.reset(ggml_init({ 2 * layers_.size() * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true }));
        }
        ggml_tensor * k = ggml_new_tensor_3d(ctx.get(), type, c.head_dim, c.n_head_kv, n_slots);
        ggml_tensor * v = ggml_dup_tensor(ctx.get(), k);
        layers_[il]     = { ggml_format_name(k, "cache_k-%d", int(il)), ggml_format_name(v, "cache_v-%d", int(il)) };
    }
    for (const auto & [device, ctx] : contexts_) {
        allocate(ctx.get(), device, how);
    }
}

void kv_cache::allocate(ggml_context * ctx, ggml_backend_dev_t device, existence how) {
    ggml_backend_buffer_type_t buft  = ggml_backend_dev_buffer_type(device);
    const ggml_tensor *        layer = ggml_get_first_tensor(ctx);
    // A device says so of a tensor that is too large for it; ggml would end the process over one that lies there.
    if (ggml_nbytes(layer) > ggml_backend_buft_get_max_size(buft) || !ggml_backend_dev_supports_op(device, layer)) {
        fail(SLOWAR_MEMORY,
             "a KV cache of %d positions needs %.1f MiB for the keys of a layer, more than one buffer of %s",
             max_seq_len(), double(ggml_nbytes(layer)) / (1 << 20), ggml_backend_dev_name(device));
    }
    if (how == imagined) {
        // A tensor with a buffer, even an empty one, is not the planner's to place.
        buffers_.push_back(imagine(ctx, buft));
        return;
    }
    const std::string what = text("a KV cache of %d positions", max_seq_len());
    check_memory(device, n_bytes(device), what.c_str());
    const size_t mark = log_mark();
    buffers_.push_back(device == cpu_device()
                           ? take(ctx, buft)
                           : ggml_backend_buffer_ptr(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft)));
    check_answers(device);
    if (!buffers_.back()) {
        const std::string why = device == cpu_device() ? "the system refuses so much" : log_since(mark);
        fail(SLOWAR_MEMORY, "no memory for %s (%.1f MiB) on %s: %s", what.c_str(), double(n_bytes(device)) / (1 << 20),
             ggml_backend_dev_name(device), why.c_str());
    }
    ggml_backend_buffer_clear(buffers_.back().get(), 0);
}

// The tensors of a context, in host memory of our own.
ggml_backend_buffer_ptr kv_cache::take(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const size_t n_bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, buft);
    memory_              = take_memory(n_bytes);
    if (!memory_) {
        return nullptr;
    }
    ggml_backend_buffer_ptr buffer(ggml_backend_cpu_buffer_from_ptr(memory_.get(), n_bytes));
    ggml_tallocr            places = ggml_tallocr_new(buffer.get());
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        ggml_tallocr_alloc(&places, t);
    }
    return buffer;
}

bool kv_cache::is_on_cpu(int il) const {
    return device(il) == cpu_device();
}

size_t kv_cache::n_bytes(ggml_backend_dev_t device) const {
    size_t n = 0;
    for (size_t il = 0; il < layers_.size(); il++) {
        n += devices_[il] == device ? ggml_nbytes(layers_[il].k) + ggml_nbytes(layers_[il].v) : 0;
    }
    return n;
}

size_t kv_cache::n_bytes_each() const {
    return 2 * layers_.size() * layers_[0].k->nb[2];
}

void kv_cache::check_devices() const {
    for (ggml_backend_dev_t device : devices_) {
        check_answers(device);
    }
}

// Slots [slot, slot + n) of a layer's keys or values.
static ggml_tensor * slots(ggml_context * ctx, ggml_tensor * cache, int slot, int64_t n) {
    return ggml_view_3d(ctx, cache, cache->ne[0], cache->ne[1], n, cache->nb[1], cache->nb[2],
                        size_t(slot) * cache->nb[2]);
}

template <typename function_t> void kv_cache::each_layer(int32_t first, int32_t n, function_t f) const {
    for (const kv & layer : layers_) {
        for (ggml_tensor * x : { layer.k, layer.v }) {
            f(x, size_t(first) * x->nb[2], size_t(n) * x->nb[2]);
        }
    }
    check_devices();
}

void kv_cache::copy(const kv_cache & from, int32_t n) {
    const ggml_context_ptr ctx(ggml_init({ 4 * layers_.size() * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true }));
    const auto             positions = [&](ggml_tensor * cache) {
        ggml_tensor * x = slots(ctx.get(), cache, 0, n);
        ggml_backend_view_init(x);
        return x;
    };
    for (size_t il = 0; il < layers_.size(); il++) {
        ggml_backend_tensor_copy(positions(from.layers_[il].k), positions(layers_[il].k));
        ggml_backend_tensor_copy(positions(from.layers_[il].v), positions(layers_[il].v));
    }
    from.check_devices();
    check_devices();
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
    const kv &    to = layers_[size_t(il)];
    const int64_t n  = batch.k->ne[2];
    ggml_build_forward_expand(graph, ggml_cpy(ctx, batch.k, slots(ctx, to.k, slot, n)));
    ggml_build_forward_expand(graph, ggml_cpy(ctx, batch.v, slots(ctx, to.v, slot, n)));
}

kv kv_cache::past(ggml_context * ctx, int il, int n) const {
    const kv & from = layers_[size_t(il)];
    return { ggml_cast(ctx, slots(ctx, from.k, 0, n), GGML_TYPE_F32),
             ggml_cast(ctx, slots(ctx, from.v, 0, n), GGML_TYPE_F32) };
}

static ggml_tensor * write_rows(ggml_context * ctx, ggml_tensor * cache, ggml_tensor * batch, ggml_tensor * slots) {
    const int64_t row  = cache->ne[0] * cache->ne[1];
    ggml_tensor * all  = ggml_view_2d(ctx, cache, row, cache->ne[2], cache->nb[2], 0);
    ggml_tensor * rows = ggml_view_2d(ctx, batch, row, batch->ne[2], batch->nb[2], 0);
    return ggml_set_rows(ctx, all, rows, slots);
}

kv kv_cache::stored(ggml_context * ctx, kv batch, ggml_tensor * slots, int il) const {
    const kv & to = layers_[size_t(il)];
    return { write_rows(ctx, to.k, batch.k, slots), write_rows(ctx, to.v, batch.v, slots) };
}

}  // namespace slowar
