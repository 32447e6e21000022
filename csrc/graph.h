// (weights, cache, shape) -> the graph of one evaluation. Nothing is allocated, uploaded or computed here.
#pragma once

#include "kv_cache.h"
#include "weights.h"

#include <vector>

namespace slowar {

// How queries meet the cache. All else is shared.
enum class attention_path {
    reference,  // the documented one: cast and concatenate the past, repeat the heads, mask, softmax
    flash,      // store first, then ggml's flash attention over the cache in place
    cpu,        // store first, then our own node (attention.h), or ggml's with a mask where that is the better one
};

// What leaves the graph, each with all before it.
enum class output { nothing, hidden, semantic, full };

// All that a graph's nodes depend on: equal shapes, equal graphs.
struct graph_shape {
    attention_path attention = attention_path::reference;
    output         out       = output::full;
    int            n_tokens  = 0;
    int            n_past    = 0;  // reference: where the batch goes; else 0, the slots are an input
    int            n_kv      = 0;  // slots that ggml's flash attention looks at; 0: it is not used

    bool operator==(const graph_shape & o) const {
        return attention == o.attention && out == o.out && n_tokens == o.n_tokens && n_past == o.n_past &&
               n_kv == o.n_kv;
    }
};

// Created empty; their values are set once the scheduler has given them memory. Those that a shape has no use for are
// nullptr.
struct graph_inputs {
    ggml_tensor * tokens;      // I32 [n_tokens]
    ggml_tensor * codes;       // I32 [n_tokens, n_codebook]: rows of the codebook table
    ggml_tensor * semantic;    // F32 [1, n_tokens]: 1 where the token id is semantic, else 0
    ggml_tensor * embd_scale;  // F32 [1, n_tokens], with scaled codebook embeddings only
    ggml_tensor * positions;   // I32 [n_tokens]
    ggml_tensor * slots;       // I64 [n_tokens], not for the reference
    ggml_tensor * mask;        // F16 [n_kv, n_tokens], with n_kv > 0: 0 where a position sees a slot, else -inf
};

struct graph {
    ggml_cgraph * nodes;
    graph_inputs  in;
    ggml_tensor * hidden;  // F32 [n_embd], or nullptr
    ggml_tensor * logits;  // F32 [n_vocab], or [semantic ids + extra ids], or nullptr
};

// What stays the same for all graphs of a session.
struct graph_context {
    const weights &              w;
    const kv_cache &             cache;
    const std::vector<int32_t> & extra_ids;  // logits columns behind the semantic ones
    int                          n_threads;
    size_t                       max_nodes;  // room for nodes and leaves
};

// The documented size of the reference's graph: room for the nodes of any model that config.cpp lets through.
constexpr size_t max_graph_nodes = 32768;

graph build_graph(ggml_context * ctx, const graph_context & with, const graph_shape & shape);

}  // namespace slowar
