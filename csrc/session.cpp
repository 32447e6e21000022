#include "session.h"

#include "attention.h"
#include "error.h"
#include "platform.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace slowar {

// The documented size, once for steps and once for batches; the largest model that config.cpp lets through needs half.
static const size_t context_bytes = 10 * 1024 * 1024;

// A cache is looked at in blocks of this many slots where a graph depends on it, so that it serves as many steps.
static const int32_t kv_block = 256;

//
// planned_graph
//

// A scheduler takes memory for every node to be a part of its own with inputs to copy (GGML_SCHED_MAX_SPLIT_INPUTS is 30),
// all but a little of which is never touched, and does not look whether it got it.
static void check_scheduler_memory(size_t max_nodes) {
    const size_t n_bytes = max_nodes * (2 * 30 + 4) * sizeof(ggml_tensor);
    if (!can_allocate(n_bytes)) {
        fail(SLOWAR_MEMORY, "no address space for a scheduler of %zu nodes (%.1f MiB)", max_nodes,
             double(n_bytes) / (1 << 20));
    }
}

// The allocator's notes on a graph: well under 1 KiB a node, and again nobody looks whether they were had.
static void check_plan_memory(ggml_cgraph * nodes) {
    const size_t n_bytes = (size_t(2) << 20) + size_t(ggml_graph_n_nodes(nodes)) * 1024;
    if (!can_allocate(n_bytes)) {
        fail(SLOWAR_MEMORY, "no memory to plan a graph of %d nodes", ggml_graph_n_nodes(nodes));
    }
}

planned_graph::planned_graph(std::vector<ggml_backend_t> backends, size_t max_nodes, uint8_t * buffer)
    : buffer_(buffer), backends_(std::move(backends)), max_nodes_(max_nodes) {}

const graph & planned_graph::build(const graph_context & with, const graph_shape & shape) {
    if (!sched_) {
        check_scheduler_memory(max_nodes_);
        sched_.reset(ggml_backend_sched_new(backends_.data(), nullptr, int(backends_.size()), max_nodes_,
                                            /*parallel =*/false, /*op_offload =*/false));
    }
    drop();
    context_.reset();
    context_.reset(ggml_init({ context_bytes, buffer_, /*no_alloc =*/true }));
    graph_ = build_graph(context_.get(), with, shape);
    shape_ = shape;
    return graph_;
}

void planned_graph::reserve() {
    check_plan_memory(graph_.nodes);
    const size_t mark = log_mark();
    if (!ggml_backend_sched_reserve(sched_.get(), graph_.nodes)) {
        no_memory(mark);
    }
}

void planned_graph::allocate() {
    check_plan_memory(graph_.nodes);
    const size_t mark = log_mark();
    if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_.nodes)) {
        no_memory(mark);
    }
    ready_ = true;
}

// A scheduler that found no memory takes its plan for a good one the next time: it must not see a next time.
void planned_graph::no_memory(size_t mark) {
    ready_ = false;
    sched_.reset();
    fail(SLOWAR_MEMORY, "no compute memory for %d positions: %s", shape_.n_tokens, log_since(mark).c_str());
}

ggml_status planned_graph::compute() {
    return ggml_backend_sched_graph_compute(sched_.get(), graph_.nodes);
}

void planned_graph::drop() {
    ready_ = false;
    if (sched_) {
        ggml_backend_sched_reset(sched_.get());
    }
}

uint64_t planned_graph::n_bytes() const {
    uint64_t n = 0;
    for (ggml_backend_t backend : backends_) {
        n += sched_ ? ggml_backend_sched_get_buffer_size(sched_.get(), backend) : 0;
    }
    return n;
}

int planned_graph::n_splits() const {
    return sched_ ? ggml_backend_sched_get_n_splits(sched_.get()) : 0;
}

//
// session
//

session::session(std::shared_ptr<const weights> w, const slowar_session_params & params)
    : w_(std::move(w)), n_threads_(params.n_threads), n_batch_(params.n_batch), asked_(params.attention),
      kv_type_(type_named(params.kv_type)), extra_ids_(params.extra_ids, params.extra_ids + params.n_extra_ids),
      threads_(start_threads(n_threads_)), gpu_(w_->info.n_gpu_layers > 0 ? open_backend(w_->device) : nullptr),
      cpu_(open_backend(cpu_device())), step_buffer_(new uint8_t[context_bytes]),
      batch_buffer_(new uint8_t[context_bytes]) {
    use_threads(cpu_.get(), threads_.get(), n_threads_);
}

const kv_cache & session::need_cache() const {
    if (!cache_) {
        fail(SLOWAR_STATE, "no KV cache: call init_kv_cache first");
    }
    return *cache_;
}

graph_context session::context() const {
    return { *w_, need_cache(), extra_ids_, n_threads_, max_nodes() };
}

planned_graph & session::plan_for(int32_t n_tokens) {
    return n_tokens == 1 ? *step_ : *batch_;
}

graph_shape session::shape_of(int32_t n_past, int32_t n_tokens, output out) const {
    graph_shape s;
    s.attention = path_;
    s.out       = out;
    s.n_tokens  = n_tokens;
    if (path_ == attention_path::reference) {
        s.n_past = n_past;
    }
    const int32_t n_kv = n_past + n_tokens;
    if (path_ == attention_path::flash) {
        s.n_kv = std::min(GGML_PAD(n_kv, kv_block), cache_->max_seq_len());
    }
    // ggml's tiled kernel takes these two types only; with others it would sum in another order, and round.
    const bool tiled = kv_type_ == GGML_TYPE_F16 || kv_type_ == GGML_TYPE_F32;
    if (path_ == attention_path::cpu && tiled && n_tokens >= cpu_attention_limit) {
        s.n_kv = n_kv;
    }
    return s;
}

// The reference has the documented room; else what a layer (fewer than 64 nodes and weights), a codebook and an extra id
// can come to.
size_t session::max_nodes() const {
    const config & c = w_->hyper;
    return path_ == attention_path::reference ? max_graph_nodes
                                              : size_t(64 * c.n_layer + 4 * c.n_codebook) + 4 * extra_ids_.size() + 128;
}

void session::init_kv_cache(int32_t max_seq_len) {
    clear_kv_cache();
    try {
        // The whole cache goes to the GPU as soon as one layer is there.
        cache_.emplace(w_->hyper, gpu_ ? w_->device : cpu_device(), kv_type_, max_seq_len);
        choose_path();
        for (const int32_t n : { 1, std::min(n_batch_, max_seq_len) }) {
            if (n > 0) {
                plan_for(n).build(context(), shape_of(max_seq_len - n, n, output::full));
                plan_for(n).reserve();
            }
        }
    } catch (...) {
        clear_kv_cache();
        throw;
    }
}

void session::choose_path() {
    path_ = asked_ == SLOWAR_ATTENTION_REFERENCE      ? attention_path::reference
            : asked_ == SLOWAR_ATTENTION_GGML || gpu_ ? attention_path::flash
                                                      : attention_path::cpu;
    plan_graphs();
    if (path_ == attention_path::flash && gpu_ && !gpu_supports_flash()) {
        if (asked_ != SLOWAR_ATTENTION_AUTO) {
            fail(SLOWAR_DEVICE, "%s lacks an operation of the flash path; attention \"reference\" runs there",
                 ggml_backend_dev_name(w_->device));
        }
        path_ = attention_path::reference;
        plan_graphs();
    }
}

void session::plan_graphs() {
    std::vector<ggml_backend_t> backends;
    if (gpu_) {
        backends.push_back(gpu_.get());
    }
    backends.push_back(cpu_.get());
    step_.emplace(backends, max_nodes(), step_buffer_.get());
    batch_.emplace(backends, max_nodes(), batch_buffer_.get());
}

// Asks the device about every node that it would be given.
bool session::gpu_supports_flash() {
    const graph & g = step_->build(context(), shape_of(0, 1, output::full));
    for (int i = 0; i < ggml_graph_n_nodes(g.nodes); i++) {
        const ggml_tensor * t = ggml_graph_node(g.nodes, i);
        if ((t->op == GGML_OP_FLASH_ATTN_EXT || t->op == GGML_OP_SET_ROWS) &&
            !ggml_backend_dev_supports_op(w_->device, t)) {
            return false;
        }
    }
    return true;
}

void session::clear_kv_cache() {
    step_.reset();
    batch_.reset();
    cache_.reset();
    traces.clear();
    n_past_ = 0;
}

void session::rewind(int32_t n_past) {
    need_cache();
    if (n_past < 0 || n_past > n_past_) {
        fail(SLOWAR_ARGUMENT, "n_past is %d, expected 0 to %d, the position", n_past, n_past_);
    }
    n_past_ = n_past;
}

void session::eval_cached(const int32_t * tokens, int32_t n_tokens, output out, float * hidden, float * logits) {
    const kv_cache & cache = need_cache();
    if (n_tokens > cache.max_seq_len() - n_past_) {
        fail(SLOWAR_CONTEXT_FULL, "%d positions do not fit behind position %d in a cache of %d", n_tokens, n_past_,
             cache.max_seq_len());
    }
    const graph_shape shape = shape_of(n_past_, n_tokens, out);
    planned_graph &   plan  = plan_for(n_tokens);
    if (!trace_names.empty()) {
        mark_traces(plan.build(context(), shape));
        plan.reserve();  // a plan made without the marks would let other nodes write over what they keep
        mark_traces(plan.build(context(), shape));
        plan.allocate();
    } else if (!plan.is_ready(shape)) {
        plan.build(context(), shape);
        plan.allocate();
    }
    const graph & g = plan.get();
    set_inputs(g, tokens, n_tokens);

    const size_t      mark   = log_mark();
    const ggml_status status = plan.compute();
    if (status == GGML_STATUS_SUCCESS) {
        if (hidden && g.hidden) {
            ggml_backend_tensor_get(g.hidden, hidden, 0, ggml_nbytes(g.hidden));
        }
        if (logits && g.logits) {
            ggml_backend_tensor_get(g.logits, logits, 0, ggml_nbytes(g.logits));
        }
        read_traces(g);
    }
    if (path_ == attention_path::reference || !trace_names.empty() || status != GGML_STATUS_SUCCESS) {
        plan.drop();
    }
    if (status != GGML_STATUS_SUCCESS) {
        fail(status == GGML_STATUS_ALLOC_FAILED ? SLOWAR_MEMORY : SLOWAR_COMPUTE,
             "evaluating %d positions failed (%s): %s", n_tokens, ggml_status_to_string(status),
             log_since(mark).c_str());
    }
    n_past_ += n_tokens;
}

void session::set_inputs(const graph & g, const int32_t * tokens, int32_t n_tokens) const {
    const config & c = w_->hyper;
    const size_t   n = size_t(n_tokens);

    std::vector<int32_t> ids(n), positions(n), codes(n * size_t(c.n_codebook), 0);
    std::vector<int64_t> slots(n);
    std::vector<float>   semantic(n), embd_scale(n, 1.0f);
    for (size_t t = 0; t < n; t++) {
        const int32_t * at = tokens + t * size_t(c.n_row());
        ids[t]             = at[0];
        positions[t]       = n_past_ + int32_t(t);
        slots[t]           = positions[t];
        semantic[t]        = c.is_semantic(at[0]) ? 1.0f : 0.0f;
        if (c.is_semantic(at[0])) {
            embd_scale[t] = 1.0f / std::sqrt(float(c.n_row()));
            for (int32_t cb = 0; cb < c.n_codebook; cb++) {
                codes[size_t(cb) * n + t] = at[1 + cb] + cb * c.codebook_size;
            }
        }
    }
    const auto set = [](ggml_tensor * t, const auto & values) {
        if (t && t->buffer) {  // an input that no node reads has no memory
            ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
        }
    };
    set(g.in.tokens, ids);
    set(g.in.codes, codes);
    set(g.in.semantic, semantic);
    set(g.in.positions, positions);
    set(g.in.slots, slots);
    set(g.in.embd_scale, embd_scale);
    if (g.in.mask && g.in.mask->buffer) {
        const size_t             n_kv = size_t(g.in.mask->ne[0]);
        std::vector<ggml_fp16_t> mask(n * n_kv, ggml_fp32_to_fp16(-INFINITY));
        for (size_t t = 0; t < n; t++) {
            std::fill_n(mask.begin() + ptrdiff_t(t * n_kv), positions[t] + 1, ggml_fp32_to_fp16(0.0f));
        }
        set(g.in.mask, mask);
    }
}

// An output keeps its memory until the graph is done; so must what a view looks at.
void session::mark_traces(const graph & g) const {
    for (const std::string & name : trace_names) {
        ggml_tensor * t = ggml_graph_get_tensor(g.nodes, name.c_str());
        if (!t || t->op == GGML_OP_NONE || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t)) {
            fail(SLOWAR_ARGUMENT, "the graph has no contiguous f32 tensor named \"%s\"", name.c_str());
        }
        for (; t; t = t->view_src) {
            ggml_set_output(t);
        }
    }
}

void session::read_traces(const graph & g) {
    traces.clear();
    for (const std::string & name : trace_names) {
        const ggml_tensor * t = ggml_graph_get_tensor(g.nodes, name.c_str());
        trace               kept;
        std::copy_n(t->ne, GGML_MAX_DIMS, kept.ne);
        kept.values.resize(size_t(ggml_nelements(t)));
        ggml_backend_tensor_get(t, kept.values.data(), 0, ggml_nbytes(t));
        traces.push_back(std::move(kept));
    }
}

slowar_session_state session::state() const {
    slowar_session_state out = {};
    out.n_past               = n_past_;
    out.n_threads            = n_threads_;
    if (cache_) {
        out.max_seq_len     = cache_->max_seq_len();
        out.attention       = path_ == attention_path::reference ? SLOWAR_ATTENTION_REFERENCE : SLOWAR_ATTENTION_FLASH;
        out.n_bytes_kv      = cache_->n_bytes();
        out.n_splits        = step_->n_splits();
        out.n_bytes_compute = step_->n_bytes() + batch_->n_bytes();
    }
    return out;
}

std::vector<slowar_node> session::graph_nodes(int32_t n_past, int32_t n_tokens) {
    const kv_cache & cache = need_cache();
    if (n_past < 0 || n_tokens < 1 || n_tokens > cache.max_seq_len() - n_past) {
        fail(SLOWAR_ARGUMENT, "n_past %d and n_tokens %d, expected 0 or more, 1 or more, together at most %d", n_past,
             n_tokens, cache.max_seq_len());
    }
    const graph & g = plan_for(n_tokens).build(context(), shape_of(n_past, n_tokens, output::full));

    std::vector<slowar_node> nodes;
    for (int i = 0; i < ggml_graph_n_nodes(g.nodes); i++) {
        const ggml_tensor * t   = ggml_graph_node(g.nodes, i);
        slowar_node         out = {};
        std::snprintf(out.name, sizeof(out.name), "%s", t->name);
        std::snprintf(out.op, sizeof(out.op), "%s", ggml_op_desc(t));
        std::snprintf(out.type, sizeof(out.type), "%s", ggml_type_name(t->type));
        std::copy_n(t->ne, GGML_MAX_DIMS, out.ne);
        nodes.push_back(out);
    }
    return nodes;
}

}  // namespace slowar
