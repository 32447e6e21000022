// The model's tensors: name, shape, placement, loading. The only file that knows the tensor names.
#pragma once

#include "config.h"

#include "ggml-cpp.h"

#include <memory>
#include <string>
#include <vector>

namespace slowar {

struct layer_weights {
    ggml_tensor * attention_norm = nullptr;  // [n_embd]
    ggml_tensor * wqkv           = nullptr;  // [n_embd, q_size + 2*kv_size]
    ggml_tensor * q_norm         = nullptr;  // [head_dim], with q/k norm only
    ggml_tensor * k_norm         = nullptr;  // [head_dim], with q/k norm only
    ggml_tensor * wo             = nullptr;  // [q_size, n_embd]
    ggml_tensor * ffn_norm       = nullptr;  // [n_embd]
    ggml_tensor * w1             = nullptr;  // [n_embd, n_ff]
    ggml_tensor * w2             = nullptr;  // [n_ff, n_embd]
    ggml_tensor * w3             = nullptr;  // [n_embd, n_ff]
};

struct weights {
    // Checks every tensor the model needs against the file, then loads them. device: nullptr for the CPU alone.
    weights(const std::string & path, ggml_backend_dev_t device, const slowar_model_params & params);

    config                     hyper;
    ggml_tensor *              embeddings          = nullptr;  // [n_embd, n_vocab]
    ggml_tensor *              codebook_embeddings = nullptr;  // [n_embd, n_codebook*codebook_size]
    ggml_tensor *              norm                = nullptr;  // [n_embd]
    ggml_tensor *              output              = nullptr;  // [n_embd, n_vocab]: embeddings itself when tied
    std::vector<layer_weights> layers;

    ggml_backend_dev_t         device = nullptr;
    slowar_model_info          info   = {};
    std::vector<slowar_tensor> table;  // in the order of the forward pass

  private:
    // What a tensor is for decides what a device must be able to do with it, and its types.
    enum class use { look_up, multiply, scale };

    struct wanted {
        const file_tensor * source;
        ggml_tensor **      slot;
        int32_t             n_dims;
        slowar_place        where;
        bool                repack;
    };

    void want(ggml_tensor *& slot, const std::string & name, use how, std::vector<int64_t> ne, bool on_device);
    bool device_supports(use how, const file_tensor & t) const;
    void want_all(int32_t n_gpu_layers);
    void load(const slowar_model_params & params);
    void describe(const wanted & w);

    std::unique_ptr<gguf_file>           file;  // kept while tensors live in its mapping
    std::vector<wanted>                  list;
    ggml_context_ptr                     contexts[4];  // of each place
    std::vector<ggml_backend_buffer_ptr> buffers;
};

}  // namespace slowar
