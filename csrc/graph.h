// (weights, cache, n_past, n_tokens) -> the documented graph of one evaluation. Nothing is allocated, uploaded or
// computed here.
#pragma once

#include "kv_cache.h"
#include "weights.h"

namespace slowar {

// Created empty; their values are set once the scheduler has given them memory.
struct graph_inputs {
    ggml_tensor * tokens;      // I32 [n_tokens]
    ggml_tensor * codes;       // I32 [n_tokens, n_codebook]: rows of the codebook table
    ggml_tensor * semantic;    // F32 [1, n_tokens]: 1 where the token id is semantic, else 0
    ggml_tensor * embd_scale;  // F32 [1, n_tokens], with scaled codebook embeddings only
    ggml_tensor * positions;   // I32 [n_tokens]
};

struct graph {
    ggml_cgraph * nodes;
    graph_inputs  in;
    ggml_tensor * hidden;  // F32 [n_embd]
    ggml_tensor * logits;  // F32 [n_vocab]
};

// Room for the nodes of any model that config.cpp lets through.
constexpr size_t max_graph_nodes = 32768;

graph build_graph(ggml_context * ctx, const weights & w, const kv_cache & cache, int n_past, int n_tokens);

}  // namespace slowar
