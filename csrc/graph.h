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
    cpu,  // so too, but in layers whose cache is beside the CPU by nodes of our own (attention.h) and, where nothing
          // is on a device, with our own products (matmul.h); packed matrices always have them
};

// What leaves the graph, each with all before it.
enum class output { nothing, hidden, semantic, full };

// The positions of one sequence in an evaluation, and how they meet its cache.
struct segment {
    const kv_cache * cache     = nullptr;
    uint64_t         cache_id  = 0;  // a cache that is gone may have left its address to another
    attention_path   attention = attention_path::reference;
    int              n_tokens  = 0;
    int              n_past    = 0;  // reference: where the batch goes; else 0, the slots are an input
    int              n_kv      = 0;  // slots that ggml's flash attention looks at; 0: it is not used

    bool operator==(const segment & o) const {
        return cache_id == o.cache_id && attention == o.attention && n_tokens == o.n_tokens && n_past == o.n_past &&
               n_kv == o.n_kv;
    }
};

// All that a graph's nodes depend on: equal shapes, equal graphs. Segments lie side by side, one behind the other; they
// are all of the reference's kind or none is.
struct graph_shape {
    output               out        = output::full;
    bool                 has_hidden = false;  // Fast-AR: every segment begins with a hidden vector in place of a code
    std::vector<segment> segments;

    int n_tokens() const {
        int n = 0;
        for (const segment & s : segments) {
            n += s.n_tokens;
        }
        return n;
    }

    bool is_reference() const { return segments[0].attention == attention_path::reference; }

    bool all_single() const { return n_tokens() == int(segments.size()); }

    bool operator==(const graph_shape & o) const {
        return out == o.out && has_hidden == o.has_hidden && segments == o.segments;
    }
};

// Created empty; their values are set once the scheduler has given them memory. Those that a shape has no use for are
// nullptr.
struct graph_inputs {
    ggml_tensor * tokens;  // I32 [n_tokens], without those that are hidden vectors
    ggml_tensor * hidden;  // F32 [n_hidden, n segments], with hidden vectors only
    ggml_tensor * order;   // I32 [n_tokens], with those of several segments: all of them, then the tokens, put in order
    ggml_tensor * codes;   // I32 [n_tokens, n_codebook]: rows of the codebook table
    ggml_tensor * semantic;    // F32 [1, n_tokens]: 1 where the token id is semantic, else 0
    ggml_tensor * embd_scale;  // F32 [1, n_tokens], with scaled codebook embeddings only
    ggml_tensor * positions;   // I32 [n_tokens]
    ggml_tensor * slots;       // I64 [n_tokens], not for the reference
    ggml_tensor * last;        // I32 [n segments]: where each ends; with several of them, one longer than a position
    ggml_tensor * last_positions;  // I32 [n segments], with `last`

    // F16, all masks one behind the other, and of each segment with n_kv > 0 its part [n_kv, n_tokens], else nullptr: 0
    // where a position sees a slot, else -inf. One input: each costs a device a copy of its own.
    ggml_tensor *              mask;
    std::vector<ggml_tensor *> masks;
};

struct graph {
    ggml_cgraph * nodes  = nullptr;
    graph_inputs  in     = {};
    ggml_tensor * hidden = nullptr;  // F32 [n_embd, n segments], or nullptr
    ggml_tensor * logits = nullptr;  // F32 [n_vocab, n segments], or [semantic ids + extra ids, ...], or nullptr

    std::vector<int> begins;  // the first node of each layer, then of what is behind the last
};

// What stays the same for all graphs of an evaluator.
struct graph_context {
    const weights &              w;
    const std::vector<int32_t> & extra_ids;  // logits columns behind the semantic ones
    int                          n_threads;
    size_t                       max_nodes;  // room for nodes and leaves
};

graph build_graph(ggml_context * ctx, const graph_context & with, const graph_shape & shape);

}  // namespace slowar
