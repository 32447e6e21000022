// One sequence: its cache, its position, and eval_cached, the computation behind prefill, prefill_fast and step.
#pragma once

#include "device.h"
#include "graph.h"
#include "kv_cache.h"
#include "weights.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace slowar {

struct trace {
    int64_t            ne[GGML_MAX_DIMS];
    std::vector<float> values;
};

// A graph with memory: its metadata, its scheduler, and the shape it was built for.
class planned_graph {
  public:
    // `buffer` holds every graph's metadata, one at a time: context_bytes of it, kept by the session.
    planned_graph(std::vector<ggml_backend_t> backends, size_t max_nodes, uint8_t * buffer);

    // Forgets the graph there was and builds another in the same memory, without giving it compute memory.
    const graph & build(const graph_context & with, const graph_shape & shape);

    // Plans compute memory for a graph like the one just built and sets it aside; that one is used up by it.
    // Throws SLOWAR_MEMORY.
    void reserve();

    // Gives the graph just built compute memory. A plan there is for as many nodes of no smaller sizes is kept, whatever
    // their flags. Throws SLOWAR_MEMORY.
    void allocate();

    // Whether the graph there is has this shape and can be computed as it stands.
    bool is_ready(const graph_shape & shape) const { return ready_ && shape_ == shape; }

    const graph & get() const { return graph_; }

    ggml_status compute();

    // The graph may not be computed again.
    void drop();

    uint64_t n_bytes() const;

    int n_splits() const;

  private:
    [[noreturn]] void no_memory(size_t log_mark);

    uint8_t *                   buffer_;
    std::vector<ggml_backend_t> backends_;
    size_t                      max_nodes_;
    ggml_context_ptr            context_;
    ggml_backend_sched_ptr      sched_;  // made when first needed
    graph                       graph_ = {};
    graph_shape                 shape_;
    bool                        ready_ = false;
};

class session {
  public:
    session(std::shared_ptr<const weights> w, const slowar_session_params & params);

    void init_kv_cache(int32_t max_seq_len);
    void clear_kv_cache();
    void rewind(int32_t n_past);

    // tokens are position-major and already checked. hidden and logits may be nullptr.
    void eval_cached(const int32_t * tokens, int32_t n_tokens, output out, float * hidden, float * logits);

    slowar_session_state state() const;

    const config & hyper() const { return w_->hyper; }

    // What an evaluation of n_tokens at n_past computes, in order. Drops the graph that was ready.
    std::vector<slowar_node> graph_nodes(int32_t n_past, int32_t n_tokens);

    std::vector<std::string> trace_names;
    std::vector<trace>       traces;  // of the last evaluation, in the order of trace_names

  private:
    const kv_cache & need_cache() const;
    graph_context    context() const;
    graph_shape      shape_of(int32_t n_past, int32_t n_tokens, output out) const;
    size_t           max_nodes() const;
    void             choose_path();
    void             plan_graphs();
    bool             gpu_supports_flash();
    planned_graph &  plan_for(int32_t n_tokens);
    void             set_inputs(const graph & g, const int32_t * tokens, int32_t n_tokens) const;
    void             mark_traces(const graph & g) const;
    void             read_traces(const graph & g);

    // Order is destruction order read backwards: what uses memory goes before what owns it.
    std::shared_ptr<const weights> w_;
    int32_t                        n_threads_;
    int32_t                        n_batch_;
    slowar_attention               asked_;  // attention, as the caller put it
    attention_path                 path_ = attention_path::reference;
    ggml_type                      kv_type_;
    std::vector<int32_t>           extra_ids_;
    threadpool_ptr                 threads_;
    ggml_backend_ptr               gpu_;  // none when nothing is offloaded
    ggml_backend_ptr               cpu_;
    std::unique_ptr<uint8_t[]>     step_buffer_;
    std::unique_ptr<uint8_t[]>     batch_buffer_;
    std::optional<kv_cache>        cache_;
    std::optional<planned_graph>   step_;   // of one position: kept from step to step
    std::optional<planned_graph>   batch_;  // of any other number
    int32_t                        n_past_ = 0;
};

}  // namespace slowar
