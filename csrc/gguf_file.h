// A GGUF file opened for reading: its metadata with types checked, and where each tensor's bytes lie.
#pragma once

#include "platform.h"

#include "ggml-cpp.h"

#include <string>
#include <vector>

namespace slowar {

struct file_tensor {
    std::string name;
    ggml_type   type;
    int64_t     ne[GGML_MAX_DIMS];
    size_t      offset;  // from the start of the file
    size_t      n_bytes;
};

class gguf_file {
  public:
    // Throws SLOWAR_OS or SLOWAR_FORMAT. Every tensor's bytes lie inside the file when this returns.
    explicit gguf_file(const std::string & path);

    const mapped_file & file() const { return file_; }

    // Throw SLOWAR_FORMAT, naming the key, when it is missing or has another type. No conversion between types.
    uint32_t    get_u32(const std::string & key) const;
    float       get_f32(const std::string & key) const;
    bool        get_bool(const std::string & key) const;
    std::string get_str(const std::string & key) const;
    bool        has(const std::string & key) const;

    const file_tensor * find(const std::string & name) const;    // nullptr: not there
    const file_tensor & tensor(const std::string & name) const;  // throws, naming it

    const std::vector<file_tensor> & tensors() const { return tensors_; }

  private:
    int64_t key_id(const std::string & key, gguf_type type) const;

    mapped_file              file_;
    gguf_context_ptr         gguf_;
    std::vector<file_tensor> tensors_;  // sorted by name
};

}  // namespace slowar
