#include "weights.h"

#include "device.h"
#include "error.h"
#include "matmul.h"
#include "platform.h"

#include <algorithm>
#include <cstdio>

namespace slowar {

// Staging for a device that cannot read the file itself. Larger pieces ggml's RPC would first ask the server for by hash.
static const size_t upload_bytes = size_t(8) << 20;

static const char * const head_name = "output.weight";

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

weights::weights(const std::string & path, std::vector<ggml_backend_dev_t> devices, const slowar_model_params & params)
    : devices(std::move(devices)), is_loaded(params.load), file(std::make_unique<gguf_file>(path)) {
    for (int32_t i = 0; i < params.n_places; i++) {
        places.emplace_back(params.names[i], params.places[i]);
    }
    std::sort(places.begin(), places.end());
    hyper = read_config(*file, params.part);
    want_all();
    for (const auto & [name, device] : places) {
        const auto is_it = [&name = name](const wanted & w) {
            return w.name == name;
        };
        if (name != head_name && std::none_of(list.begin(), list.end(), is_it)) {
            fail(SLOWAR_ARGUMENT, "there is no tensor %s to place", name.c_str());
        }
    }
    place(params);
    load();
}

int32_t weights::first_device() const {
    const auto it = std::find_if(device_of_.begin(), device_of_.end(), [](int32_t i) { return i >= 0; });
    return it == device_of_.end() ? -1 : *it;
}

int32_t weights::asked_for(const std::string & name) const {
    const auto it = std::lower_bound(places.begin(), places.end(), std::make_pair(name, -1));
    return it != places.end() && it->first == name ? it->second : -1;
}

void weights::want(ggml_tensor *& slot, const std::string & name, use how, std::vector<int64_t> ne, int32_t layer) {
    want(slot, name, file->tensor(name), how, std::move(ne), layer);
}

void weights::want(ggml_tensor *& slot, const std::string & name, const file_tensor & t, use how,
                   std::vector<int64_t> ne, int32_t layer) {
    const int32_t n_dims = int32_t(ne.size());
    ne.resize(std::max(ne.size(), n_dims_of(t)), 1);
    if (!std::equal(ne.begin(), ne.end(), t.ne)) {
        fail(SLOWAR_FORMAT, "tensor %s has shape %s, expected %s", name.c_str(), shape(t.ne, n_dims_of(t)).c_str(),
             shape(ne.data(), ne.size()).c_str());
    }
    if (how == use::scale ? t.type != GGML_TYPE_F32 : !cpu_can_use(t.type)) {
        fail(SLOWAR_FORMAT, "tensor %s has type %s, expected %s", name.c_str(), ggml_type_name(t.type),
             how == use::scale ? "f32" : "a type of matrix that ggml can multiply by");
    }
    const int32_t asked  = asked_for(name);
    std::string   reason = asked < 0 ? "" : refusal(devices[size_t(asked)], how, t);
    const int32_t device = reason.empty() ? asked : -1;
    const bool    repack = how == use::multiply && layer >= 0;
    list.push_back({ name, &t, &slot, n_dims, layer, device, device < 0 ? SLOWAR_PLACE_HOST : SLOWAR_PLACE_DEVICE,
                     repack, /*is_packed =*/false, std::move(reason) });
}

// Why a device cannot have a tensor; empty: it can.
std::string weights::refusal(ggml_backend_dev_t device, use how, const file_tensor & t) const {
    const size_t most = ggml_backend_buft_get_max_size(ggml_backend_dev_buffer_type(device));
    if (t.n_bytes > most) {
        return text("%s takes at most %.1f MiB in one buffer", ggml_backend_dev_name(device), double(most) / (1 << 20));
    }
    const ggml_context_ptr ctx = metadata_context(4);
    ggml_tensor *          w   = ggml_new_tensor(ctx.get(), t.type, GGML_MAX_DIMS, t.ne);
    ggml_tensor *          x   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, t.ne[0]);
    ggml_tensor *          op  = nullptr;
    switch (how) {
        case use::look_up:  op = ggml_get_rows(ctx.get(), w, ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 1)); break;
        case use::multiply: op = ggml_mul_mat(ctx.get(), w, x); break;
        case use::scale:    op = ggml_mul(ctx.get(), x, w); break;
    }
    if (ggml_backend_dev_supports_op(device, op)) {
        return "";
    }
    return text("%s cannot %s %s", ggml_backend_dev_name(device),
                how == use::look_up    ? "look up rows of"
                : how == use::multiply ? "multiply by"
                                       : "scale by",
                ggml_type_name(t.type));
}

void weights::want_all() {
    const config & c      = hyper;
    const int64_t  q_size = c.q_size();
    const int64_t  n_qkv  = q_size + 2 * c.kv_size();

    const std::string part = c.is_fast() ? "fast_" : "";

    want(embeddings, part + "embeddings.weight", use::look_up, { c.n_embd, c.n_vocab });
    const int32_t table_device = list.back().device;
    if (c.is_fast()) {
        want_projection();
    } else {
        want(codebook_embeddings, "codebook_embeddings.weight", use::look_up,
             { c.n_embd, int64_t(c.n_codebook) * c.codebook_size });
    }
    const std::string beyond = part + "layers." + std::to_string(c.n_layer) + ".attention_norm.weight";
    if (file->find(beyond)) {
        fail(SLOWAR_FORMAT, "key %s is %d, yet the file has tensor %s",
             c.is_fast() ? "fish_speech.fast_block_count" : "fish-speech.block_count", c.n_layer, beyond.c_str());
    }
    layers.resize(size_t(c.n_layer));
    for (int32_t il = 0; il < c.n_layer; il++) {
        layer_weights &   l  = layers[size_t(il)];
        const std::string at = part + "layers." + std::to_string(il) + ".";

        want(l.attention_norm, at + "attention_norm.weight", use::scale, { c.n_embd }, il);
        want(l.wqkv, at + "attention.wqkv.weight", use::multiply, { c.n_embd, n_qkv }, il);
        device_of_.push_back(list.back().device);
        for (const char * name : { "attention.q_norm.weight", "attention.k_norm.weight" }) {
            if (c.attention_qk_norm) {
                want(name[10] == 'q' ? l.q_norm : l.k_norm, at + name, use::scale, { c.head_dim }, il);
            } else if (file->find(at + name)) {
                fail(SLOWAR_FORMAT, "key fish_speech.%sattention_qk_norm is false, yet the file has tensor %s%s",
                     part.c_str(), at.c_str(), name);
            }
        }
        want(l.wo, at + "attention.wo.weight", use::multiply, { q_size, c.n_embd }, il);
        want(l.ffn_norm, at + "ffn_norm.weight", use::scale, { c.n_embd }, il);
        want(l.w1, at + "feed_forward.w1.weight", use::multiply, { c.n_embd, c.n_ff }, il);
        want(l.w3, at + "feed_forward.w3.weight", use::multiply, { c.n_embd, c.n_ff }, il);
        want(l.w2, at + "feed_forward.w2.weight", use::multiply, { c.n_ff, c.n_embd }, il);
    }

    want(norm, part + "norm.weight", use::scale, { c.n_embd });
    // A tied head is the table itself, or a copy of it in another place.
    const std::string head = part + head_name;
    if (!c.tie_word_embeddings || asked_for(head) != table_device) {
        want(output, head, file->tensor(c.tie_word_embeddings ? "embeddings.weight" : head), use::multiply,
             { c.n_embd, c.n_vocab }, -1);
    }
}

void weights::want_projection() {
    const config &    c    = hyper;
    const std::string name = "fast_project_in.";
    if (c.project_in) {
        want(project_in, name + "weight", use::multiply, { c.n_hidden, c.n_embd });
        if (file->find(name + "bias")) {
            want(project_in_bias, name + "bias", use::scale, { c.n_embd });
        }
    } else if (file->find(name + "weight")) {
        fail(SLOWAR_FORMAT, "key fish_speech.fast_project_in is false, yet the file has tensor %sweight", name.c_str());
    }
}

// One buffer type, as many buffers as the device's limit on one needs.
static ggml_backend_buffer_ptr allocate(ggml_context * ctx, ggml_backend_buffer_type_t buft,
                                        ggml_backend_dev_t device) {
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
    if (ggml_backend_buffer_is_host(buffer.get())) {
        ask_for_large_pages(ggml_backend_buffer_get_base(buffer.get()), ggml_backend_buffer_get_size(buffer.get()));
    }
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

// Of contexts and types: the places beside the CPU, each device, what is packed.
size_t weights::index_of(const wanted & w) const {
    const size_t first = size_t(SLOWAR_PLACE_DEVICE);
    return w.is_packed ? first + devices.size() : w.device < 0 ? size_t(w.where) : first + size_t(w.device);
}

// Decides what of the CPU's is used from the file, and makes the tensors.
void weights::place(const slowar_model_params & params) {
    types.assign(SLOWAR_PLACE_DEVICE, ggml_backend_dev_buffer_type(cpu_device()));
    types[SLOWAR_PLACE_REPACKED] = nullptr;
    for (ggml_backend_dev_t device : devices) {
        types.push_back(ggml_backend_dev_buffer_type(device));
    }
    types.push_back(types[SLOWAR_PLACE_HOST]);
    for (size_t i = 0; i < types.size(); i++) {
        contexts.push_back(metadata_context(list.size()));
    }
    const size_t alignment = ggml_backend_buft_get_alignment(types[SLOWAR_PLACE_HOST]);
    for (wanted & w : list) {
        const file_tensor & t = *w.source;
        if (w.where == SLOWAR_PLACE_HOST && w.repack && params.repack) {
            ggml_backend_buffer_type_t & known = types[SLOWAR_PLACE_REPACKED];
            w.is_packed                        = can_pack(t.type, t.ne);
            const auto buft                    = w.is_packed ? nullptr : repack_type(t.type, t.ne);
            if (w.is_packed) {
                w.where = SLOWAR_PLACE_REPACKED;
            } else if (buft && (!known || buft == known)) {
                known   = buft;
                w.where = SLOWAR_PLACE_REPACKED;
            }
        }
        if (w.where == SLOWAR_PLACE_HOST && params.use_mmap && t.offset % alignment == 0) {
            w.where = SLOWAR_PLACE_MAPPED;
        }
        *w.slot = ggml_new_tensor(contexts[index_of(w)].get(), t.type, GGML_MAX_DIMS, t.ne);
        ggml_set_name(*w.slot, w.name.c_str());
        if (w.is_packed) {
            mark_packed(*w.slot);
        }
    }
}

void weights::load() {
    const mapped_file & f    = file->file();
    auto * const        base = const_cast<uint8_t *>(f.data());  // mapped read-only: nothing writes to weights

    ggml_backend_buffer_ptr mapping(ggml_backend_cpu_buffer_from_ptr(base, f.size()));
    ggml_backend_buffer_set_usage(mapping.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    for (size_t i = is_loaded ? size_t(SLOWAR_PLACE_HOST) : 0; i < contexts.size(); i++) {
        if (!ggml_get_first_tensor(contexts[i].get())) {
            continue;
        }
        const size_t             first  = size_t(SLOWAR_PLACE_DEVICE);
        const bool               is_cpu = i < first || i == first + devices.size();
        const ggml_backend_dev_t device = is_cpu ? cpu_device() : devices[i - first];
        buffers.push_back(is_loaded ? allocate(contexts[i].get(), types[i], device)
                                    : imagine(contexts[i].get(), types[i]));
        ggml_backend_buffer_set_usage(buffers.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
    for (const wanted & w : list) {
        if (is_loaded) {
            switch (w.where) {
                case SLOWAR_PLACE_MAPPED:
                    ggml_backend_tensor_alloc(mapping.get(), *w.slot, base + w.source->offset);
                    break;
                case SLOWAR_PLACE_REPACKED:
                    if (w.is_packed) {
                        pack(base + w.source->offset, *w.slot);
                    } else {
                        ggml_backend_tensor_set(*w.slot, base + w.source->offset, 0, w.source->n_bytes);
                    }
                    f.forget(w.source->offset, w.source->n_bytes);
                    break;
                default: upload(f, *w.source, *w.slot); break;
            }
        }
        describe(w);
    }
    for (ggml_backend_dev_t device : devices) {
        check_answers(device);
    }
    if (is_loaded && info.n_bytes_mapped > 0) {
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
    std::snprintf(out.reason, sizeof(out.reason), "%s", w.reason.c_str());
    std::copy_n(t->ne, GGML_MAX_DIMS, out.ne);
    out.n_bytes = ggml_nbytes(t);
    out.n_dims  = w.n_dims;
    out.offset  = w.source->offset;
    out.place   = w.where;
    out.device  = w.device;
    out.layer   = w.layer;
    table.push_back(out);

    uint64_t * const bytes[]  = { &info.n_bytes_mapped, &info.n_bytes_host, &info.n_bytes_repacked,
                                  &info.n_bytes_device };
    *bytes[w.where]          += out.n_bytes;
    info.n_params            += w.name == w.source->name ? uint64_t(ggml_nelements(t)) : 0;  // a copy is not one more
    info.n_tensors++;
}

}  // namespace slowar
