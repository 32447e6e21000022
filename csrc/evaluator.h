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
    const int32_t *  tokens;  // [n_tokens][1 + n_codebook], already checked; not looked at by a plan
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

    uint64_t n_bytes() const;

    int n_splits() const;

  private:
    void              make_room(size_t n_nodes, size_t n_bytes);
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
    bool                        ready_ = false;
};

class evaluator {
  public:
    // Starts n_threads - 1 threads and opens the devices the weights are on.
    evaluator(std::shared_ptr<const weights> w, int32_t n_threads, std::vector<int32_t> extra_ids);

    // Sets compute memory aside for evaluations like this one. Throws SLOWAR_MEMORY.
    void reserve(const std::vector<task> & tasks);

    // Bytes that reserve() would take, on the device and beside the CPU.
    std::vector<size_t> measure(const std::vector<task> & tasks);

    // hidden [n tasks][n_embd] and logits [n tasks][ids asked for] are of each task's last position, or nullptr.
    // A failure leaves slots behind the positions written to, which nothing reads.
    void eval(const std::vector<task> & tasks, output out, int32_t n_threads, float * hidden, float * logits);

    // The graph of such an evaluation. Drops the one that was ready.
    const graph & graph_of(const std::vector<task> & tasks, output out);

    // Whether the device has every operation of this graph that only the flash path has.
    bool has_operations(const graph & g) const;

    // Gives compute memory back.
    void forget();

    const weights & model() const { return *w_; }

    bool on_gpu() const { return bool(gpu_); }

    int32_t n_threads() const { return n_threads_; }

    const std::vector<int32_t> & extra_ids() const { return extra_ids_; }

    uint64_t n_bytes() const { return step_.n_bytes() + batch_.n_bytes(); }

    int n_splits() const { return step_.n_splits(); }

    // Graphs that were built for evaluations; the others found theirs ready.
    int64_t n_planned() const { return n_planned_; }

    std::vector<std::string> trace_names;
    std::vector<trace>       traces;  // of the last evaluation, in the order of trace_names

  private:
    graph_shape     shape_of(const std::vector<task> & tasks, output out) const;
    planned_graph & plan_for(const graph_shape & shape);
    planned_graph & built(const std::vector<task> & tasks, output out);
    void            set_inputs(const graph & g, const std::vector<task> & tasks) const;
    void            mark_traces(const graph & g) const;
    void            read_traces(const graph & g);

    // Order is destruction order read backwards: what uses memory goes before what owns it.
    std::shared_ptr<const weights> w_;
    int32_t                        n_threads_;
    std::vector<int32_t>           extra_ids_;
    threadpool_ptr                 threads_;
    ggml_backend_ptr               gpu_;  // none when nothing is offloaded
    ggml_backend_ptr               cpu_;
    planned_graph                  step_;   // of one position each: kept from step to step
    planned_graph                  batch_;  // of any other number
    int64_t                        n_planned_ = 0;
};

}  // namespace slowar
