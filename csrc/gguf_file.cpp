#include "gguf_file.h"

#include "error.h"

#include <algorithm>
#include <cstring>

namespace slowar {

// ggml's reader stops at the first fault and logs it; its words become the message.
static gguf_context_ptr parse(const mapped_file & file) {
    if (file.size() < 4 || std::memcmp(file.data(), GGUF_MAGIC, 4) != 0) {
        fail(SLOWAR_FORMAT, "not a GGUF file: it does not begin with \"GGUF\"");
    }
    const size_t     mark = log_mark();
    gguf_context_ptr gguf(gguf_init_from_buffer(file.data(), file.size(), { /*no_alloc =*/true, /*ctx =*/nullptr }));
    if (!gguf) {
        const std::string words = log_since(mark);
        fail(SLOWAR_FORMAT, "the GGUF header is damaged or cut short: %s",
             words.empty() ? "it ends too early" : words.c_str());
    }
    return gguf;
}

gguf_file::gguf_file(const std::string & path) : file_(path), gguf_(parse(file_)) {
    const size_t data = gguf_get_data_offset(gguf_.get());
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf_.get()); i++) {
        file_tensor t;
        t.name = gguf_get_tensor_name(gguf_.get(), i);
        t.type = gguf_get_tensor_type(gguf_.get(), i);
        std::copy_n(gguf_get_tensor_ne(gguf_.get(), i), GGML_MAX_DIMS, t.ne);
        t.n_bytes = gguf_get_tensor_size(gguf_.get(), i);

        const size_t offset = gguf_get_tensor_offset(gguf_.get(), i);
        if (data > file_.size() || offset > file_.size() - data || t.n_bytes > file_.size() - data - offset) {
            fail(SLOWAR_FORMAT, "the file is cut short: tensor %s ends %zu bytes into the data, the file has %zu",
                 t.name.c_str(), offset + t.n_bytes, file_.size() > data ? file_.size() - data : 0);
        }
        t.offset = data + offset;
        tensors_.push_back(std::move(t));
    }
    std::sort(tensors_.begin(), tensors_.end(),
              [](const file_tensor & a, const file_tensor & b) { return a.name < b.name; });
    const auto twice =
        std::adjacent_find(tensors_.begin(), tensors_.end(), [](const file_tensor & a, const file_tensor & b) {
            return a.name == b.name;  // ggml compares behind a NUL too
        });
    if (twice != tensors_.end()) {
        fail(SLOWAR_FORMAT, "tensor %s is there twice", twice->name.c_str());
    }
}

int64_t gguf_file::key_id(const std::string & key, gguf_type type) const {
    const int64_t id = gguf_find_key(gguf_.get(), key.c_str());
    if (id < 0) {
        fail(SLOWAR_FORMAT, "key %s is missing", key.c_str());
    }
    const gguf_type found = gguf_get_kv_type(gguf_.get(), id);
    if (found != type) {
        fail(SLOWAR_FORMAT, "key %s has type %s, expected %s", key.c_str(), gguf_type_name(found),
             gguf_type_name(type));
    }
    return id;
}

uint32_t gguf_file::get_u32(const std::string & key) const {
    return gguf_get_val_u32(gguf_.get(), key_id(key, GGUF_TYPE_UINT32));
}

float gguf_file::get_f32(const std::string & key) const {
    return gguf_get_val_f32(gguf_.get(), key_id(key, GGUF_TYPE_FLOAT32));
}

bool gguf_file::get_bool(const std::string & key) const {
    return gguf_get_val_bool(gguf_.get(), key_id(key, GGUF_TYPE_BOOL));
}

std::string gguf_file::get_str(const std::string & key) const {
    return gguf_get_val_str(gguf_.get(), key_id(key, GGUF_TYPE_STRING));
}

bool gguf_file::has(const std::string & key) const {
    return gguf_find_key(gguf_.get(), key.c_str()) >= 0;
}

const file_tensor * gguf_file::find(const std::string & name) const {
    const auto at = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                     [](const file_tensor & t, const std::string & key) { return t.name < key; });
    return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

const file_tensor & gguf_file::tensor(const std::string & name) const {
    const file_tensor * t = find(name);
    if (!t) {
        fail(SLOWAR_FORMAT, "tensor %s is missing", name.c_str());
    }
    return *t;
}

}  // namespace slowar
