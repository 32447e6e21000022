// Keys and values of the positions seen so far. Knows storage, not attention.
#pragma once

#include "config.h"

#include "ggml-cpp.h"
#include "platform.h"

#include <map>
#include <vector>

namespace slowar {

struct kv {
    ggml_tensor * k;
    ggml_tensor * v;
};

// A cache is looked at in blocks of this many slots where a graph depends on it, so that it serves as many steps.
constexpr int32_t kv_block = 256;

class kv_cache {
  public:
    // Whether there is memory, or graphs are only to be planned.
    enum existence { real, imagined };

    // max_seq_len zeroed slots for every layer, each on its device. On devices there are more, up to a multiple of
    // kv_block: their kernels want to look at so many. Throws SLOWAR_MEMORY.
    kv_cache(const config & c, std::vector<ggml_backend_dev_t> devices, ggml_type type, int32_t max_seq_len,
             existence how = real);

    // No two caches of a process have the same.
    uint64_t id() const { return id_; }

    ggml_type type() const { return layers_[0].k->type; }

    int32_t max_seq_len() const { return max_seq_len_; }

    int32_t n_slots() const { return int32_t(layers_[0].k->ne[2]); }

    ggml_backend_dev_t device(int il) const { return devices_[size_t(il)]; }

    bool is_on_cpu(int il) const;

    size_t n_bytes() const { return n_bytes_each() * size_t(n_slots()); }

    // Of the layers on one device.
    size_t n_bytes(ggml_backend_dev_t device) const;

    // Bytes of one position, all layers.
    size_t n_bytes_each() const;

    // Nodes that copy a batch [head_dim, n_head_kv, n_tokens] into a layer's slots from `slot` on.
    void store(ggml_context * ctx, ggml_cgraph * graph, kv batch, int il, int slot) const;

    // A layer's first n slots as float32: [head_dim, n_head_kv, n] each.
    kv past(ggml_context * ctx, int il, int n) const;

    // A layer's slots, all of them, after a batch was written to those that `slots` (I64 [n_tokens]) names:
    // [head_dim*n_head_kv, n_slots] each. Whoever reads them reads the batch as it is stored.
    kv stored(ggml_context * ctx, kv batch, ggml_tensor * slots, int il) const;

    // The first n positions of another cache of the same model and type.
    void copy(const kv_cache & from, int32_t n);

    // n positions from `first` on as bytes: layer after layer, each its n keys, then its n values.
    void read(int32_t first, int32_t n, void * out) const;
    void write(int32_t first, int32_t n, const void * from);

  private:
    void                    allocate(ggml_context * ctx, ggml_backend_dev_t device, existence how);
    ggml_backend_buffer_ptr take(ggml_context * ctx, ggml_backend_buffer_type_t buft);
    void                    check_devices() const;
    // Runs f(keys or values, offset and size of those positions of a layer) in the order of `read`.
    template <typename function_t> void each_layer(int32_t first, int32_t n, function_t f) const;

    uint64_t                                       id_;
    int32_t                                        max_seq_len_;
    std::vector<ggml_backend_dev_t>                devices_;  // of each layer
    std::vector<kv>                                layers_;   // [head_dim, n_head_kv, n_slots] each
    std::map<ggml_backend_dev_t, ggml_context_ptr> contexts_;
    memory_ptr                                     memory_;  // of the layers on the CPU
    std::vector<ggml_backend_buffer_ptr>           buffers_;
};

}  // namespace slowar
