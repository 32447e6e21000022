// Attention over KV caches, on the CPU, as two nodes of a graph: pieces of the caches, which threads share, and their sums.
//
// ggml's flash attention converts every cached row once for each query head that reads it, and for few positions it sums
// the values of an F16 cache in F16. Here a row is converted once for all the heads that share it, and for several
// positions, and everything is summed in float32. How far the cache is filled is read from the positions when the nodes
// run, so one graph serves every position and a step costs what is used.
#pragma once

#include "kv_cache.h"

#include <vector>

namespace slowar {

// A custom node of ggml takes fewer than GGML_MAX_SRC tensors; two are queries and positions.
constexpr size_t max_caches = (GGML_MAX_SRC - 1 - 2) / 2;

// q          F32 [head_dim, n_head, n_tokens], equally many for each cache
// stored     a layer's caches, any type with rows ggml can convert: [head_dim*n_head_kv, n_slots]
// positions  I32 [n_tokens], ascending by one for each cache; position p sees slots 0 .. p
// result     F32 [head_dim*n_head, n_tokens]
ggml_tensor * cpu_attention(ggml_context * ctx, ggml_tensor * q, const std::vector<kv> & stored,
                            ggml_tensor * positions, int n_threads);

}  // namespace slowar
