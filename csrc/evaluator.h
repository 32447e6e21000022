// Evaluates positions of one sequence or of many in one graph: backends, threads, plans. Knows caches and positions as
// they are given to it and moves none.
#pragma once

#include "device.h"
#include "graph.h"
#include "kv_cache.h"
#include "weights.h"

#include <memory>
#include <string>
#include <vector>

namespace slowar {

struct trace {
    int64_t            ne[GGML_MAX_DIMS];
    std::vector<float> values;
};

// What one sequence has evaluated: n_tokens positions behind n_past.
struct task {
    const kv_cache * cache;
    attention_path   attention;
    int32_t          n_past;
    int32_t          n_tokens;
    const int32_t *  tokens;            // [n_tokens][1 + n_codebook], already checked; not looked at by a plan
    const float *    hidden = nullptr;  // Fast-AR: [n_hidden], in place of the first token, which is not in `tokens`
};

// An operation that a device does not have and the CPU does instead.
struct fallback {
    std::string        op;
    int32_t            layer;  // -1: before the first; n_layer: behind the last
    ggml_backend_dev_t device;
    std::string        reason;
    bool               is_stuck;  // it writes into memory of the device: nothing can do it instead
};

// A graph with memory: its metadata, its scheduler, and the shape it was built for.
class planned_graph {
  public:
    planned_graph(const weights & w, std::vector<ggml_backend_t> backends) : w_(w), backends_(std::move(backends)) {}

    // Forgets the graph there was and builds another in the same memory, without giving it compute memory.
    const graph & build(const std::vector<int32_t> & extra_ids, int n_threads, const graph_shape & shape);

    // Plans compute memory for a graph like the one just built and sets it aside; that one is used up by it.
    // Throws SLOWAR_MEMORY.
    void reserve();

    // What reserve() would set aside, on each backend. Nothing is.
    std::vector<size_t> measure();

    // Of the graph just built.
    const std::vector<fallback> & fallbacks() const { return fallbacks_; }

    // The device that runs a node of the graph just built.
    ggml_backend_dev_t device_of(ggml_tensor * node) const;

    // Gives the graph just built compute memory. A plan there is for as many nodes of no smaller sizes is kept, whatever
    // their flags. Throws SLOWAR_MEMORY.
    void allocate();

    // Whether the graph there is has this shape and can be computed as it stands.
    bool is_ready(const graph_shape & shape) const { return ready_ && shape_ == shape; }

    const graph & get() const { return graph_; }

    ggml_status compute();

    // The graph may not be computed again.
    void drop();

    // Gives compute memory back as well.
    void forget();

    uint64_t n_bytes(ggml_backend_t backend) const;

    int n_splits() const;

  private:
    void              make_room(size_t n_nodes, size_t n_bytes);
    void              place();
    int               home_of(const ggml_tensor * node) const;
    [[noreturn]] void no_memory(size_t log_mark);

    const weights &             w_;
    std::vector<ggml_backend_t> backends_;
    size_t                      max_nodes_     = 0;  // what the scheduler has room for
    size_t                      context_bytes_ = 0;
    std::unique_ptr<uint8_t[]>  buffer_;  // every graph's metadata, one at a time
    ggml_context_ptr            context_;
    ggml_backend_sched_ptr      sched_;  // made when first needed
    graph                       graph_;
    graph_shape                 shape_;
    std::vector<fallback>       fallbacks_;
    bool                        ready_ = false;
};

class evaluator {
  public:
    // Starts n_threads - 1 threads and opens the devices the weights are on.
    evaluator(std::shared_ptr<const weights> w, int32_t n_threads, std::vector<int32_t> extra_ids);

    // Sets compute memory aside for evaluations like this one. Throws SLOWAR_MEMORY.
    void reserve(const std::vector<task> & tasks);

    // Bytes that reserve() would take, and that are taken.
    slowar_bytes measure(const std::vector<task> & tasks);
    slowar_bytes memory() const;
    uint64_t     n_bytes() const;

    // hidden [n tasks][n_embd] and logits [n tasks][ids asked for] are of each task's last position, or nullptr.
    // A failure leaves slots behind the positions written to, which nothing reads.
    void eval(const std::vector<task> & tasks, output out, int32_t n_threads, float * hidden, float * logits);

    // The graph of such an evaluation, placed. Drops the one that was ready.
    planned_graph & built(const std::vector<task> & tasks, output out);

    // Gives compute memory back.
    void forget();

    const weights & model() const { return *w_; }

    int32_t n_threads() const { return n_threads_; }

    const std::vector<int32_t> & extra_ids() const { return extra_ids_; }

    int n_splits() const { return step_.n_splits(); }

    // Of the last graph of a step.
    const std::vector<fallback> & fallbacks() const { return step_.fallbacks(); }

    // Graphs that were built for evaluations; the others found theirs ready.
    int64_t n_planned() const { return n_planned_; }

    std::vector<std::string> trace_names;
    std::vector<trace>       traces;  // of the last evaluation, in the order of trace_names

  private:
    slowar_bytes    by_device(const std::vector<size_t> & sizes) const;
    void            explain(const std::vector<task> & tasks, output out);
    graph_shape     shape_of(const std::vector<task> & tasks, output out) const;
    planned_graph & plan_for(const graph_shape & shape);
    void            set_inputs(const graph & g, const std::vector<task> & tasks) const;
    void            set_tokens(const graph & g, const std::vector<task> & tasks, size_t n) const;
    void            set_codes(const graph & g, const std::vector<task> & tasks) const;
    ggml_status     compute(planned_graph & plan) const;
    void            check_devices() const;
    void            mark_traces(const graph & g) const;
    void            read_traces(const graph & g);

    // Order is destruction order read backwards: what uses memory goes before what owns it.
    std::shared_ptr<const weights> w_;
    int32_t                        n_threads_;
    std::vector<int32_t>           extra_ids_;
    threadpool_ptr                 threads_;
    std::vector<ggml_backend_ptr>  backends_;  // of each device, then of the CPU
    planned_graph                  step_;      // of one position each: kept from step to step
    planned_graph                  batch_;     // of any other number
    int64_t                        n_planned_ = 0;
};

}  // namespace slowar
