#include "session.h"

#include "error.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace slowar {

// The documented size; the largest model that config.cpp lets through needs about half.
static const size_t context_bytes = 10 * 1024 * 1024;

session::session(std::shared_ptr<const weights> w, int32_t n_threads)
    : w_(std::move(w)), n_threads_(n_threads), threads_(start_threads(n_threads)),
      gpu_(w_->info.n_gpu_layers > 0 ? open_backend(w_->device) : nullptr), cpu_(open_backend(cpu_device())),
      context_buffer_(context_bytes) {
    use_threads(cpu_.get(), threads_.get(), n_threads_);
}

session::~session() = default;

const kv_cache & session::need_cache() const {
    if (!cache_) {
        fail(SLOWAR_STATE, "no KV cache: call init_kv_cache first");
    }
    return *cache_;
}

void session::init_kv_cache(int32_t max_seq_len) {
    clear_kv_cache();
    try {
        // The whole cache goes to the GPU as soon as one layer is there.
        cache_.emplace(w_->hyper, gpu_ ? w_->device : cpu_device(), max_seq_len);

        std::vector<ggml_backend_t> backends;
        if (gpu_) {
            backends.push_back(gpu_.get());
        }
        backends.push_back(cpu_.get());
        sched_.reset(ggml_backend_sched_new(backends.data(), nullptr, int(backends.size()), max_graph_nodes,
                                            /*parallel =*/false, /*op_offload =*/false));

        const size_t mark = log_mark();
        const graph  last = build(max_seq_len - 1, 1);
        if (!ggml_backend_sched_reserve(sched_.get(), last.nodes)) {
            fail(SLOWAR_MEMORY, "no compute memory for a step at position %d: %s", max_seq_len - 1,
                 log_since(mark).c_str());
        }
    } catch (...) {
        clear_kv_cache();
        throw;
    }
}

void session::clear_kv_cache() {
    sched_.reset();
    context_.reset();
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

// Drops the previous graph and builds the next in the same memory.
graph session::build(int32_t n_past, int32_t n_tokens) {
    context_.reset();
    context_.reset(ggml_init({ context_buffer_.size(), context_buffer_.data(), /*no_alloc =*/true }));
    return build_graph(context_.get(), *w_, need_cache(), n_past, n_tokens);
}

void session::eval_cached(const int32_t * tokens, int32_t n_tokens, float * hidden, float * logits) {
    const kv_cache & cache = need_cache();
    if (n_tokens > cache.max_seq_len() - n_past_) {
        fail(SLOWAR_CONTEXT_FULL, "%d positions do not fit behind position %d in a cache of %d", n_tokens, n_past_,
             cache.max_seq_len());
    }
    const graph g = build(n_past_, n_tokens);
    mark_traces(g);

    const size_t mark = log_mark();
    ggml_backend_sched_reset(sched_.get());
    if (!ggml_backend_sched_alloc_graph(sched_.get(), g.nodes)) {
        ggml_backend_sched_reset(sched_.get());
        fail(SLOWAR_MEMORY, "no compute memory for %d positions behind %d: %s", n_tokens, n_past_,
             log_since(mark).c_str());
    }
    set_inputs(g, tokens, n_tokens);
    const ggml_status status = ggml_backend_sched_graph_compute(sched_.get(), g.nodes);
    if (status == GGML_STATUS_SUCCESS) {
        if (hidden) {
            ggml_backend_tensor_get(g.hidden, hidden, 0, ggml_nbytes(g.hidden));
        }
        if (logits) {
            ggml_backend_tensor_get(g.logits, logits, 0, ggml_nbytes(g.logits));
        }
        read_traces(g);
    }
    ggml_backend_sched_reset(sched_.get());
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
    std::vector<float>   semantic(n), embd_scale(n, 1.0f);
    for (size_t t = 0; t < n; t++) {
        const int32_t * at = tokens + t * size_t(c.n_row());
        ids[t]             = at[0];
        positions[t]       = n_past_ + int32_t(t);
        semantic[t]        = c.is_semantic(at[0]) ? 1.0f : 0.0f;
        if (c.is_semantic(at[0])) {
            embd_scale[t] = 1.0f / std::sqrt(float(c.n_row()));
            for (int32_t cb = 0; cb < c.n_codebook; cb++) {
                codes[size_t(cb) * n + t] = at[1 + cb] + cb * c.codebook_size;
            }
        }
    }
    const auto set = [](ggml_tensor * t, const auto & values) {
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    };
    set(g.in.tokens, ids);
    set(g.in.codes, codes);
    set(g.in.semantic, semantic);
    set(g.in.positions, positions);
    if (g.in.embd_scale) {
        set(g.in.embd_scale, embd_scale);
    }
}

// An output keeps its memory until the graph is done.
void session::mark_traces(const graph & g) const {
    for (const std::string & name : trace_names) {
        ggml_tensor * t = ggml_graph_get_tensor(g.nodes, name.c_str());
        if (!t || t->type != GGML_TYPE_F32 || !ggml_is_contiguous(t)) {
            fail(SLOWAR_ARGUMENT, "the graph has no contiguous f32 tensor named \"%s\"", name.c_str());
        }
        ggml_set_output(t);
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
        out.max_seq_len = cache_->max_seq_len();
        out.n_bytes_kv  = cache_->n_bytes();
        out.n_splits    = ggml_backend_sched_get_n_splits(sched_.get());
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched_.get()); i++) {
            out.n_bytes_compute +=
                ggml_backend_sched_get_buffer_size(sched_.get(), ggml_backend_sched_get_backend(sched_.get(), i));
        }
    }
    return out;
}

void session::graph_node(int32_t n_past, int32_t n_tokens, int32_t i, slowar_node * out, int32_t * n_nodes) {
    const kv_cache & cache = need_cache();
    if (n_past < 0 || n_tokens < 1 || n_tokens > cache.max_seq_len() - n_past) {
        fail(SLOWAR_ARGUMENT, "n_past %d and n_tokens %d, expected 0 or more, 1 or more, together at most %d", n_past,
             n_tokens, cache.max_seq_len());
    }
    const graph g = build(n_past, n_tokens);
    *n_nodes      = ggml_graph_n_nodes(g.nodes);
    if (i >= *n_nodes) {
        fail(SLOWAR_ARGUMENT, "node %d does not exist: there are %d", i, *n_nodes);
    }
    if (i >= 0 && out) {
        const ggml_tensor * t = ggml_graph_node(g.nodes, i);
        std::snprintf(out->name, sizeof(out->name), "%s", t->name);
        std::snprintf(out->op, sizeof(out->op), "%s", ggml_op_desc(t));
        std::snprintf(out->type, sizeof(out->type), "%s", ggml_type_name(t->type));
        std::copy_n(t->ne, GGML_MAX_DIMS, out->ne);
    }
}

}  // namespace slowar
