#include "weights.h"

#include "device.h"
#include "error.h"

#include <algorithm>
#include <cstdio>

namespace slowar {

static const size_t upload_bytes = size_t(16) << 20;  // staging for a device that cannot read the file itself

static ggml_context_ptr metadata_context(size_t n_tensors) {
    return ggml_context_ptr(ggml_init({ (n_tensors + 1) * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true }));
}

static std::string shape(const int64_t * ne, size_t n_dims) {
    std::string out = "(";  // slowest first, as numpy and the converters write it
    for (size_t i = n_dims; i-- > 0;) {
        out += text("%lld%s", (long long) ne[i], i > 0 ? ", " : "");
    }
    return out + ")";
}

static size_t n_dims_of(const file_tensor & t) {
    size_t n = GGML_MAX_DIMS;
    while (n > 1 && t.ne[n - 1] == 1) {
        n--;
    }
    return n;
}

weights::weights(const std::string & path, ggml_backend_dev_t device, const slowar_model_params & params)
    : device(device), file(std::make_unique<gguf_file>(path)) {
    hyper                = read_config(*file);
    int32_t n_gpu_layers = params.n_gpu_layers;
    if (!device) {
        n_gpu_layers = 0;
    } else if (n_gpu_layers < 0 || n_gpu_layers > hyper.n_layer) {
        n_gpu_layers = hyper.n_layer;
    }
    info.n_gpu_layers = n_gpu_layers;
    want_all(n_gpu_layers);
    load(params);
}

void weights::want(ggml_tensor *& slot, const std::string & name, use how, std::vector<int64_t> ne, bool on_device) {
    const file_tensor & t      = file->tensor(name);
    const int32_t       n_dims = int32_t(ne.size());
    ne.resize(std::max(ne.size(), n_dims_of(t)), 1);
    if (!std::equal(ne.begin(), ne.end(), t.ne)) {
        fail(SLOWAR_FORMAT, "tensor %s has shape %s, expected %s", name.c_str(), shape(t.ne, n_dims_of(t)).c_str(),
             shape(ne.data(), ne.size()).c_str());
    }
    if (how == use::scale ? t.type != GGML_TYPE_F32 : !cpu_can_use(t.type)) {
        fail(SLOWAR_FORMAT, "tensor %s has type %s, expected %s", name.c_str(), ggml_type_name(t.type),
             how == use::scale ? "f32" : "a type of matrix that ggml can multiply by");
    }
    const bool there  = on_device && device_supports(how, t);
    const bool repack = how == use::multiply && &slot != &output;
    list.push_back({ &t, &slot, n_dims, there ? SLOWAR_PLACE_DEVICE : SLOWAR_PLACE_HOST, repack });
}

bool weights::device_supports(use how, const file_tensor & t) const {
    if (n_dims_of(t) > 2) {
        return false;  // no matrix of ours; ggml would end the process over it before its shape is refused
    }
    const ggml_context_ptr ctx = metadata_context(4);
    ggml_tensor *          w   = ggml_new_tensor(ctx.get(), t.type, GGML_MAX_DIMS, t.ne);
    ggml_tensor *          op  = nullptr;
    switch (how) {
        case use::look_up: op = ggml_get_rows(ctx.get(), w, ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 1)); break;
        case use::multiply:
            op = ggml_mul_mat(ctx.get(), w, ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, t.ne[0]));
            break;
        case use::scale: op = ggml_mul(ctx.get(), ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, t.ne[0]), w); break;
    }
    return ggml_backend_dev_supports_op(device, op);
}

void weights::want_all(int32_t n_gpu_layers) {
    const config & c      = hyper;
    const int64_t  q_size = c.q_size();
    const int64_t  n_qkv  = q_size + 2 * c.kv_size();

    // The tables, the last norm and the head go together: beside the CPU unless every layer is on the device and the
    // device can look rows up in both.
    info.embeddings_on_device = device && n_gpu_layers == c.n_layer &&
                                device_supports(use::look_up, file->tensor("embeddings.weight")) &&
                                device_supports(use::look_up, file->tensor("codebook_embeddings.weight"));
    const bool ends           = info.embeddings_on_device;

    want(embeddings, "embeddings.weight", use::look_up, { c.n_embd, c.n_vocab }, ends);
    want(codebook_embeddings, "codebook_embeddings.weight", use::look_up,
         { c.n_embd, int64_t(c.n_codebook) * c.codebook_size }, ends);

    const std::string beyond = "layers." + std::to_string(c.n_layer) + ".attention_norm.weight";
    if (file->find(beyond)) {
        fail(SLOWAR_FORMAT, "key fish-speech.block_count is %d, yet the file has tensor %s", c.n_layer, beyond.c_str());
    }
    layers.resize(size_t(c.n_layer));
    for (int32_t il = 0; il < c.n_layer; il++) {
        layer_weights &   l    = layers[size_t(il)];
        const std::string at   = "layers." + std::to_string(il) + ".";
        const bool        here = il < n_gpu_layers;

        want(l.attention_norm, at + "attention_norm.weight", use::scale, { c.n_embd }, here);
        want(l.wqkv, at + "attention.wqkv.weight", use::multiply, { c.n_embd, n_qkv }, here);
        for (const char * name : { "attention.q_norm.weight", "attention.k_norm.weight" }) {
            if (c.attention_qk_norm) {
                want(name[10] == 'q' ? l.q_norm : l.k_norm, at + name, use::scale, { c.head_dim }, here);
            } else if (file->find(at + name)) {
                fail(SLOWAR_FORMAT, "key fish_speech.attention_qk_norm is false, yet the file has tensor %s%s",
                     at.c_str(), name);
            }
        }
        want(l.wo, at + "attention.wo.weight", use::multiply, { q_size, c.n_embd }, here);
        want(l.ffn_norm, at + "ffn_norm.weight", use::scale, { c.n_embd }, here);
        want(l.w1, at + "feed_forward.w1.weight", use::multiply, { c.n_embd, c.n_ff }, here);
        want(l.w3, at + "feed_forward.w3.weight", use::multiply, { c.n_embd, c.n_ff }, here);
        want(l.w2, at + "feed_forward.w2.weight", use::multiply, { c.n_ff, c.n_embd }, here);
    }

    want(norm, "norm.weight", use::scale, { c.n_embd }, ends);
    if (!c.tie_word_embeddings) {
        want(output, "output.weight", use::multiply, { c.n_embd, c.n_vocab }, ends);
    }
}

// One buffer type, as many buffers as the device's limit on one needs; nullptr when there is nothing to put there.
static ggml_backend_buffer_ptr allocate(ggml_context * ctx, ggml_backend_buffer_type_t buft,
                                        ggml_backend_dev_t device) {
    if (!ggml_get_first_tensor(ctx)) {
        return nullptr;
    }
    uint64_t n_bytes = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        n_bytes += ggml_nbytes(t);
    }
    check_memory(device, n_bytes, "loading the weights");
    const size_t            mark = log_mark();
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!buffer) {
        fail(SLOWAR_MEMORY, "no memory for %.1f MiB of weights on %s: %s", double(n_bytes) / (1 << 20),
             ggml_backend_dev_name(device), log_since(mark).c_str());
    }
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return buffer;
}

static void upload(const mapped_file & file, const file_tensor & source, ggml_tensor * t) {
    if (ggml_backend_buffer_is_host(t->buffer)) {
        file.read(source.offset, t->data, source.n_bytes);
        return;
    }
    std::vector<uint8_t> staging(std::min(upload_bytes, source.n_bytes));
    for (size_t at = 0; at < source.n_bytes; at += staging.size()) {
        const size_t n = std::min(staging.size(), source.n_bytes - at);
        file.read(source.offset + at, staging.data(), n);
        ggml_backend_tensor_set(t, staging.data(), at, n);
    }
}

void weights::load(const slowar_model_params & params) {
    const mapped_file & f         = file->file();
    const auto          cpu_buft  = ggml_backend_dev_buffer_type(cpu_device());
    const size_t        alignment = ggml_backend_buft_get_alignment(cpu_buft);

    ggml_backend_buffer_type_t repack_buft = nullptr;
    for (ggml_context_ptr & ctx : contexts) {
        ctx = metadata_context(list.size());
    }
    for (wanted & w : list) {
        const file_tensor & t = *w.source;
        if (w.where == SLOWAR_PLACE_HOST && w.repack && params.repack) {
            const auto buft = repack_type(t.type, t.ne);
            if (buft && (!repack_buft || buft == repack_buft)) {
                repack_buft = buft;
                w.where     = SLOWAR_PLACE_REPACKED;
            }
        }
        if (w.where == SLOWAR_PLACE_HOST && params.use_mmap && t.offset % alignment == 0) {
            w.where = SLOWAR_PLACE_MAPPED;
        }
        *w.slot = ggml_new_tensor(contexts[w.where].get(), t.type, GGML_MAX_DIMS, t.ne);
        ggml_set_name(*w.slot, t.name.c_str());
    }

    auto * const            base = const_cast<uint8_t *>(f.data());  // mapped read-only: nothing writes to weights
    ggml_backend_buffer_ptr mapping(ggml_backend_cpu_buffer_from_ptr(base, f.size()));
    ggml_backend_buffer_set_usage(mapping.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    buffers.push_back(allocate(contexts[SLOWAR_PLACE_HOST].get(), cpu_buft, cpu_device()));
    buffers.push_back(allocate(contexts[SLOWAR_PLACE_REPACKED].get(), repack_buft, cpu_device()));
    if (device) {
        buffers.push_back(allocate(contexts[SLOWAR_PLACE_DEVICE].get(), ggml_backend_dev_buffer_type(device), device));
    }

    for (const wanted & w : list) {
        switch (w.where) {
            case SLOWAR_PLACE_MAPPED: ggml_backend_tensor_alloc(mapping.get(), *w.slot, base + w.source->offset); break;
            case SLOWAR_PLACE_REPACKED:
                ggml_backend_tensor_set(*w.slot, base + w.source->offset, 0, w.source->n_bytes);
                f.forget(w.source->offset, w.source->n_bytes);
                break;
            default: upload(f, *w.source, *w.slot); break;
        }
        describe(w);
    }
    if (info.n_bytes_mapped > 0) {
        buffers.push_back(std::move(mapping));
    } else {
        file.reset();
    }
    if (!output) {
        output = embeddings;
    }
    list.clear();
}

void weights::describe(const wanted & w) {
    const ggml_tensor * t = *w.slot;

    slowar_tensor out = {};
    std::snprintf(out.name, sizeof(out.name), "%s", t->name);
    std::snprintf(out.type, sizeof(out.type), "%s", ggml_type_name(t->type));
    std::copy_n(t->ne, GGML_MAX_DIMS, out.ne);
    out.n_bytes = ggml_nbytes(t);
    out.n_dims  = w.n_dims;
    out.offset  = w.source->offset;
    out.place   = w.where;
    table.push_back(out);

    uint64_t * const bytes[]  = { &info.n_bytes_mapped, &info.n_bytes_host, &info.n_bytes_repacked,
                                  &info.n_bytes_device };
    *bytes[w.where]          += out.n_bytes;
    info.n_params            += uint64_t(ggml_nelements(t));
    info.n_tensors++;
}

}  // namespace slowar
