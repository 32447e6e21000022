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

class session {
  public:
    session(std::shared_ptr<const weights> w, int32_t n_threads);
    ~session();

    void init_kv_cache(int32_t max_seq_len);
    void clear_kv_cache();
    void rewind(int32_t n_past);

    // tokens are position-major and already checked. hidden and logits may be nullptr.
    void eval_cached(const int32_t * tokens, int32_t n_tokens, float * hidden, float * logits);

    slowar_session_state state() const;

    // The nodes of an evaluation's graph: *n_nodes is their number, node i is copied to out when there is one.
    void graph_node(int32_t n_past, int32_t n_tokens, int32_t i, slowar_node * out, int32_t * n_nodes);

    std::vector<std::string> trace_names;
    std::vector<trace>       traces;  // of the last evaluation, in the order of trace_names

  private:
    const kv_cache & need_cache() const;
    graph            build(int32_t n_past, int32_t n_tokens);
    void             set_inputs(const graph & g, const int32_t * tokens, int32_t n_tokens) const;
    void             mark_traces(const graph & g) const;
    void             read_traces(const graph & g);

    // Order is destruction order read backwards: what uses memory goes before what owns it.
    std::shared_ptr<const weights> w_;
    int32_t                        n_threads_;
    threadpool_ptr                 threads_;
    ggml_backend_ptr               gpu_;  // none when nothing is offloaded
    ggml_backend_ptr               cpu_;
    std::vector<uint8_t>           context_buffer_;  // every graph's metadata, one at a time
    ggml_context_ptr               context_;
    std::optional<kv_cache>        cache_;
    ggml_backend_sched_ptr         sched_;
    int32_t                        n_past_ = 0;
};

}  // namespace slowar
