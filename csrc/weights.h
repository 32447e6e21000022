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
    // Checks every tensor the model needs against the file, then loads them where params.names says, of these devices.
    weights(const std::string & path, std::vector<ggml_backend_dev_t> devices, const slowar_model_params & params);

    // Which of `devices` a layer's attention is on; -1: the CPU.
    int32_t device_of(int il) const { return device_of_[size_t(il)]; }

    // The first device that has a layer, or -1.
    int32_t first_device() const;

    config                     hyper;
    ggml_tensor *              embeddings          = nullptr;  // [n_embd, n_vocab]
    ggml_tensor *              codebook_embeddings = nullptr;  // [n_embd, n_codebook*codebook_size], not the Fast-AR
    ggml_tensor *              project_in          = nullptr;  // [n_hidden, n_embd], of the Fast-AR, if it has one
    ggml_tensor *              project_in_bias     = nullptr;  // [n_embd], if it has one
    ggml_tensor *              norm                = nullptr;  // [n_embd]
    ggml_tensor *              output = nullptr;  // [n_embd, n_vocab]: embeddings itself when tied and in one place
    std::vector<layer_weights> layers;

    std::vector<ggml_backend_dev_t> devices;           // beside the CPU
    bool                            is_loaded = true;  // else there are no values, only places for them
    slowar_model_info               info      = {};
    std::vector<slowar_tensor>      table;  // in the order of the forward pass

  private:
    // What a tensor is for decides what a device must be able to do with it, and its types.
    enum class use { look_up, multiply, scale };

    struct wanted {
        std::string         name;
        const file_tensor * source;
        ggml_tensor **      slot;
        int32_t             n_dims;
        int32_t             layer;
        int32_t             device;  // of `devices`, or -1
        slowar_place        where;
        bool                repack;
        bool                is_packed;
        std::string         reason;  // why it is not where it was asked for
    };

    int32_t asked_for(const std::string & name) const;
    void    want(ggml_tensor *& slot, const std::string & name, use how, std::vector<int64_t> ne, int32_t layer = -1);
    void    want(ggml_tensor *& slot, const std::string & name, const file_tensor & t, use how, std::vector<int64_t> ne,
                 int32_t layer);
    std::string refusal(ggml_backend_dev_t device, use how, const file_tensor & t) const;
    void        want_all();
    void        want_projection();
    void        place(const slowar_model_params & params);
    void        load();
    void        describe(const wanted & w);
    size_t      index_of(const wanted & w) const;

    std::unique_ptr<gguf_file>               file;    // kept while tensors live in its mapping
    std::vector<std::pair<std::string, int>> places;  // asked for, sorted by name
    std::vector<wanted>                      list;
    std::vector<int32_t>                     device_of_;
    std::vector<ggml_context_ptr>           contexts;  // of each place beside the CPU, each device, then what is packed
    std::vector<ggml_backend_buffer_type_t> types;     // of their buffers
    std::vector<ggml_backend_buffer_ptr>    buffers;
};

}  // namespace slowar
