// GGUF metadata -> hyper-parameters, every type and range checked. The only file that knows the keys.
#pragma once

#include "gguf_file.h"
#include "slowar.h"

namespace slowar {

struct config : slowar_config {
    int n_row() const { return 1 + n_codebook; }  // integers of one position

    int64_t q_size() const { return int64_t(n_head) * head_dim; }

    int64_t kv_size() const { return int64_t(n_head_kv) * head_dim; }

    int32_t n_semantic() const { return semantic_end_id - semantic_begin_id + 1; }

    bool is_fast() const { return part == SLOWAR_PART_FAST; }

    bool is_semantic(int32_t id) const { return semantic_begin_id <= id && id <= semantic_end_id; }
};

config read_config(const gguf_file & file, slowar_part part);

}  // namespace slowar
