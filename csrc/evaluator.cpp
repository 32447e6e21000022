#include "evaluator.h"

#include "error.h"
#include "ggml-backend-impl.h"
#include "platform.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace slowar {

// The documented size, once for steps and once for batches; the largest model that config.cpp lets through needs half.
static const size_t context_bytes = 10 * 1024 * 1024;

// The documented size of the reference's graph: room for the nodes of any model that config.cpp lets through.
static const size_t max_graph_nodes = 32768;

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

// Room for the nodes and leaves of a graph. A lone reference has the documented one; else what a layer (fewer than 64), a
// codebook, an extra id and a segment in a layer can come to.
static size_t room_for(const config & c, const graph_shape & shape, size_t n_extra_ids) {
    const size_t n_segments = shape.segments.size();
    const size_t n_nodes    = size_t(64 * c.n_layer + 4 * c.n_codebook) + 5 * n_extra_ids + 128 +
                              (n_segments - 1) * size_t((shape.is_reference() ? 40 : 24) * c.n_layer + 8);
    return shape.is_reference() ? std::max(n_nodes, max_graph_nodes) : n_nodes;
}

// Nothing has changed where there is no memory for it. A scheduler with more room than it takes is kept.
void planned_graph::make_room(size_t n_nodes, size_t n_bytes) {
    if (!sched_ || n_nodes > max_nodes_) {
        check_scheduler_memory(n_nodes);
        sched_.reset(ggml_backend_sched_new(backends_.data(), nullptr, int(backends_.size()), n_nodes,
                                            /*parallel =*/false, /*op_offload =*/false));
        max_nodes_ = n_nodes;
    }
    if (n_bytes > context_bytes_) {
        buffer_.reset(new uint8_t[n_bytes]);
        context_bytes_ = n_bytes;
    }
}

const graph & planned_graph::build(const std::vector<int32_t> & extra_ids, int n_threads, const graph_shape & shape) {
    const size_t n_nodes  = room_for(w_.hyper, shape, extra_ids.size());
    const size_t n_bytes  = ggml_graph_overhead_custom(n_nodes, /*grads =*/false) + n_nodes * ggml_tensor_overhead();
    const bool   is_alone = shape.segments.size() == 1;
    drop();
    context_.reset();
    make_room(n_nodes, is_alone ? context_bytes : n_bytes);
    context_.reset(ggml_init({ context_bytes_, buffer_.get(), /*no_alloc =*/true }));
    graph_ = build_graph(context_.get(), { w_, extra_ids, n_threads, n_nodes }, shape);
    shape_ = shape;
    place();
    return graph_;
}

// The backend whose memory a node writes into, or reads weights or a cache from; -1: none's.
int planned_graph::home_of(const ggml_tensor * node) const {
    const ggml_tensor * near[GGML_MAX_SRC + 1] = { node };
    std::copy_n(node->src, GGML_MAX_SRC, near + 1);
    for (const ggml_tensor * t : near) {
        const ggml_tensor * root = t && t->view_src ? t->view_src : t;
        if (root && root->buffer) {
            const auto device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(root->buffer));
            const auto is_its = [device](ggml_backend_t b) {
                return ggml_backend_get_device(b) == device;
            };
            const auto it = std::find_if(backends_.begin(), backends_.end(), is_its);
            return int(std::min(it, backends_.end() - 1) - backends_.begin());  // a mapped file's buffer has no device
        }
    }
    return -1;
}

static bool is_view(const ggml_tensor * t) {
    return t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

static std::string reason_against(ggml_backend_dev_t device, const ggml_tensor * node) {
    std::string types;
    for (int i = 0; i < GGML_MAX_SRC && node->src[i]; i++) {
        types += text("%s%s", i > 0 ? ", " : "", ggml_type_name(node->src[i]->type));
    }
    return text("%s has no %s from %s to %s of [%lld, %lld, %lld, %lld]", ggml_backend_dev_name(device),
                ggml_op_desc(node), types.c_str(), ggml_type_name(node->type), (long long) node->ne[0],
                (long long) node->ne[1], (long long) node->ne[2], (long long) node->ne[3]);
}

// A node runs beside the weights or the cache that it works on; one with neither, where the one before it does, or with
// the layer that it begins. What a device does not have, the CPU does.
void planned_graph::place() {
    fallbacks_.clear();
    if (backends_.size() == 1) {
        return;
    }
    const int cpu   = int(backends_.size()) - 1;
    int       where = cpu;
    int32_t   layer = -1;
    for (int i = 0; i < ggml_graph_n_nodes(graph_.nodes); i++) {
        ggml_tensor * node = ggml_graph_node(graph_.nodes, i);
        while (layer + 1 < int32_t(graph_.begins.size()) && i >= graph_.begins[size_t(layer + 1)]) {
            layer++;
            const ggml_tensor * first = layer < w_.hyper.n_layer ? w_.layers[size_t(layer)].attention_norm : w_.norm;
            where                     = home_of(first);
        }
        if (is_view(node)) {
            continue;
        }
        const int home = node->op == GGML_OP_CUSTOM ? cpu : home_of(node);  // code of ours, which no device has
        where          = home < 0 ? where : home;
        int place      = where;
        if (!ggml_backend_supports_op(backends_[size_t(where)], node)) {
            const bool is_stuck = node->view_src && node->view_src->buffer;
            const auto device   = ggml_backend_get_device(backends_[size_t(where)]);
            fallbacks_.push_back({ ggml_op_desc(node), layer, device, reason_against(device, node), is_stuck });
            place = cpu;
        }
        ggml_backend_sched_set_tensor_backend(sched_.get(), node, backends_[size_t(place)]);
    }
}

ggml_backend_dev_t planned_graph::device_of(ggml_tensor * node) const {
    ggml_backend_t backend =
        backends_.size() == 1 ? backends_[0] : ggml_backend_sched_get_tensor_backend(sched_.get(), node);
    return is_view(node) || !backend ? nullptr : ggml_backend_get_device(backend);
}

void planned_graph::reserve() {
    check_plan_memory(graph_.nodes);
    const size_t mark = log_mark();
    if (!ggml_backend_sched_reserve(sched_.get(), graph_.nodes)) {
        no_memory(mark);
    }
}

// A buffer of so many bytes that has none.
static ggml_backend_buffer_t pretend(ggml_backend_buffer_type_t type, size_t n_bytes) {
    ggml_backend_buffer_i none = {};
    none.get_base              = [](ggml_backend_buffer_t) -> void * {
        return reinterpret_cast<void *>(uintptr_t(4096));  // only counted from
    };
    return ggml_backend_buffer_init(type, none, nullptr, n_bytes);
}

// ggml_backend_sched_reserve_size forgets first where nodes were put. So a scheduler plans whose devices only pretend to
// have memory; the graph is its then and must be built anew.
std::vector<size_t> planned_graph::measure() {
    check_plan_memory(graph_.nodes);
    check_scheduler_memory(max_nodes_);
    std::vector<ggml_backend_buffer_type>   types;
    std::vector<ggml_backend_buffer_type_t> pointers;
    types.reserve(backends_.size());
    for (ggml_backend_t backend : backends_) {
        types.push_back(*ggml_backend_get_default_buffer_type(backend));
        types.back().iface.alloc_buffer = pretend;
        pointers.push_back(&types.back());
    }
    ggml_backend_sched_ptr real(ggml_backend_sched_new(backends_.data(), pointers.data(), int(backends_.size()),
                                                       max_nodes_, /*parallel =*/false, /*op_offload =*/false));
    std::swap(real, sched_);
    place();
    std::vector<size_t> sizes(backends_.size());
    if (ggml_backend_sched_reserve(sched_.get(), graph_.nodes)) {
        std::transform(backends_.begin(), backends_.end(), sizes.begin(),
                       [this](ggml_backend_t backend) { return n_bytes(backend); });
    }
    std::swap(real, sched_);
    return sizes;
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
    fail(SLOWAR_MEMORY, "no compute memory for %d positions: %s", shape_.n_tokens(), log_since(mark).c_str());
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

void planned_graph::forget() {
    ready_ = false;
    sched_.reset();
}

uint64_t planned_graph::n_bytes(ggml_backend_t backend) const {
    return sched_ ? ggml_backend_sched_get_buffer_size(sched_.get(), backend) : 0;
}

int planned_graph::n_splits() const {
    return sched_ ? ggml_backend_sched_get_n_splits(sched_.get()) : 0;
}

//
// evaluator
//

// Of the devices that have a weight; the CPU comes last: the scheduler wants it so.
static std::vector<ggml_backend_ptr> open_backends(const weights & w) {
    std::vector<ggml_backend_ptr> out;
    for (int32_t i = 0; i < int32_t(w.devices.size()); i++) {
        const auto is_there = [i](const slowar_tensor & t) {
            return t.device == i;
        };
        if (std::any_of(w.table.begin(), w.table.end(), is_there)) {
            out.push_back(open_backend(w.devices[size_t(i)]));
        }
    }
    out.push_back(open_backend(cpu_device()));
    return out;
}

static std::vector<ggml_backend_t> each(const std::vector<ggml_backend_ptr> & backends) {
    std::vector<ggml_backend_t> out;
    for (const ggml_backend_ptr & backend : backends) {
        out.push_back(backend.get());
    }
    return out;
}

evaluator::evaluator(std::shared_ptr<const weights> w, int32_t n_threads, std::vector<int32_t> extra_ids)
    : w_(std::move(w)), n_threads_(n_threads), extra_ids_(std::move(extra_ids)), threads_(start_threads(n_threads)),
      backends_(open_backends(*w_)), step_(*w_, each(backends_)), batch_(*w_, each(backends_)) {
    use_threads(backends_.back().get(), threads_.get(), n_threads_);
}

slowar_bytes evaluator::by_device(const std::vector<size_t> & sizes) const {
    slowar_bytes out = {};
    out.host         = sizes.back();
    for (size_t i = 0; i + 1 < sizes.size(); i++) {
        const auto device = ggml_backend_get_device(backends_[i].get());
        const auto at     = std::find(w_->devices.begin(), w_->devices.end(), device) - w_->devices.begin();
        out.device[at]    = sizes[i];
    }
    return out;
}

slowar_bytes evaluator::memory() const {
    std::vector<size_t> sizes;
    for (const ggml_backend_ptr & backend : backends_) {
        sizes.push_back(step_.n_bytes(backend.get()) + batch_.n_bytes(backend.get()));
    }
    return by_device(sizes);
}

// Of all places together: asked for with every look at a session, so nothing is put together for it.
uint64_t evaluator::n_bytes() const {
    uint64_t n = 0;
    for (const ggml_backend_ptr & backend : backends_) {
        n += step_.n_bytes(backend.get()) + batch_.n_bytes(backend.get());
    }
    return n;
}

planned_graph & evaluator::plan_for(const graph_shape & shape) {
    return shape.all_single() ? step_ : batch_;
}

graph_shape evaluator::shape_of(const std::vector<task> & tasks, output out) const {
    graph_shape shape;
    shape.out        = out;
    shape.has_hidden = tasks[0].hidden != nullptr;
    for (const task & t : tasks) {
        segment s;
        s.cache     = t.cache;
        s.cache_id  = t.cache->id();
        s.attention = t.attention;
        s.n_tokens  = t.n_tokens;
        if (t.attention == attention_path::reference) {
            s.n_past = t.n_past;
        } else if (t.attention == attention_path::flash || w_->first_device() >= 0) {
            s.n_kv = std::min(GGML_PAD(t.n_past + t.n_tokens, kv_block), t.cache->n_slots());
        }
        shape.segments.push_back(s);
    }
    return shape;
}

// A lost device is asked nothing: ggml would keep what it does not say, sizes of tensors, for the next server there.
planned_graph & evaluator::built(const std::vector<task> & tasks, output out) {
    check_devices();
    const graph_shape shape = shape_of(tasks, out);
    planned_graph &   plan  = plan_for(shape);
    plan.build(extra_ids_, n_threads_, shape);
    return plan;
}

void evaluator::reserve(const std::vector<task> & tasks) {
    try {
        built(tasks, output::full).reserve();
    } catch (const failure & f) {
        explain(tasks, output::full);
        throw;
    }
}

// After there was no compute memory: says how much was needed of which device, where that is known.
void evaluator::explain(const std::vector<task> & tasks, output out) {
    check_devices();
    const std::vector<size_t> sizes = built(tasks, out).measure();
    for (size_t i = 0; i < sizes.size(); i++) {
        check_memory(ggml_backend_get_device(backends_[i].get()), sizes[i], "computing");
    }
}

slowar_bytes evaluator::measure(const std::vector<task> & tasks) {
    const slowar_bytes out = by_device(built(tasks, output::full).measure());
    check_devices();
    return out;
}

void evaluator::forget() {
    step_.forget();
    batch_.forget();
}

void evaluator::eval(const std::vector<task> & tasks, output out, int32_t n_threads, float * hidden, float * logits) {
    check_devices();
    const graph_shape shape = shape_of(tasks, out);
    planned_graph &   plan  = plan_for(shape);
    if (!trace_names.empty()) {
        mark_traces(plan.build(extra_ids_, n_threads_, shape));
        plan.reserve();  // a plan made without the marks would let other nodes write over what they keep
        mark_traces(plan.build(extra_ids_, n_threads_, shape));
        plan.allocate();
    } else if (!plan.is_ready(shape)) {
        plan.build(extra_ids_, n_threads_, shape);
        try {
            plan.allocate();
        } catch (const failure & f) {
            explain(tasks, out);
            throw;
        }
        n_planned_++;
    }
    const graph & g = plan.get();
    set_inputs(g, tasks);
    use_threads(backends_.back().get(), threads_.get(), n_threads);

    const size_t      mark   = log_mark();
    const ggml_status status = compute(plan);
    if (status == GGML_STATUS_SUCCESS) {
        if (hidden && g.hidden) {
            ggml_backend_tensor_get(g.hidden, hidden, 0, ggml_nbytes(g.hidden));
        }
        if (logits && g.logits) {
            ggml_backend_tensor_get(g.logits, logits, 0, ggml_nbytes(g.logits));
        }
        read_traces(g);
    }
    if (shape.is_reference() || !trace_names.empty() || status != GGML_STATUS_SUCCESS) {
        plan.drop();
    }
    check_devices();
    if (status != GGML_STATUS_SUCCESS) {
        fail(status == GGML_STATUS_ALLOC_FAILED ? SLOWAR_MEMORY : SLOWAR_COMPUTE,
             "evaluating %d positions failed (%s): %s", shape.n_tokens(), ggml_status_to_string(status),
             log_since(mark).c_str());
    }
}

// ggml's RPC tells a server to compute "the same again" after a look at what was last asked of it, by whomever: two
// callers must not do so at once.
ggml_status evaluator::compute(planned_graph & plan) const {
    static std::mutex remote;

    const auto is_lent = [](const ggml_backend_ptr & b) {
        return is_remote(ggml_backend_get_device(b.get()));
    };
    std::unique_lock<std::mutex> hold(remote, std::defer_lock);
    if (std::any_of(backends_.begin(), backends_.end(), is_lent)) {
        hold.lock();
    }
    return plan.compute();
}

void evaluator::check_devices() const {
    for (const ggml_backend_ptr & backend : backends_) {
        check_answers(ggml_backend_get_device(backend.get()));
    }
}

// n_kv slots for each position: 0 where it sees one, else -inf.
static void add_mask(std::vector<ggml_fp16_t> & mask, const task & t, size_t n_kv) {
    const size_t first = mask.size();
    mask.resize(first + size_t(t.n_tokens) * n_kv, ggml_fp32_to_fp16(-INFINITY));
    for (int32_t i = 0; i < t.n_tokens; i++) {
        std::fill_n(mask.begin() + ptrdiff_t(first + size_t(i) * n_kv), t.n_past + i + 1, ggml_fp32_to_fp16(0.0f));
    }
}

template <typename value_t> static void set(ggml_tensor * t, const std::vector<value_t> & values) {
    if (t && t->buffer) {  // an input that no node reads has no memory
        ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
    }
}

void evaluator::set_inputs(const graph & g, const std::vector<task> & tasks) const {
    std::vector<int32_t>     positions, last, last_positions;
    std::vector<ggml_fp16_t> mask;
    for (size_t i = 0; i < tasks.size(); i++) {
        for (int32_t t = 0; t < tasks[i].n_tokens; t++) {
            positions.push_back(tasks[i].n_past + t);
        }
        last.push_back(int32_t(positions.size()) - 1);
        last_positions.push_back(positions.back());
        if (g.in.masks[i]) {
            add_mask(mask, tasks[i], size_t(g.in.masks[i]->ne[0]));
        }
    }
    set(g.in.positions, positions);
    set(g.in.slots, std::vector<int64_t>(positions.begin(), positions.end()));
    set(g.in.last, last);
    set(g.in.last_positions, last_positions);
    set(g.in.mask, mask);
    if (w_->hyper.is_fast()) {
        set_codes(g, tasks);
    } else {
        set_tokens(g, tasks, positions.size());
    }
}

void evaluator::set_tokens(const graph & g, const std::vector<task> & tasks, size_t n) const {
    const config &       c = w_->hyper;
    std::vector<int32_t> ids(n), codes(n * size_t(c.n_codebook), 0);
    std::vector<float>   semantic(n), embd_scale(n, 1.0f);
    size_t               column = 0;
    for (const task & one : tasks) {
        for (int32_t t = 0; t < one.n_tokens; t++, column++) {
            const int32_t * at = one.tokens + size_t(t) * size_t(c.n_row());
            ids[column]        = at[0];
            semantic[column]   = c.is_semantic(at[0]) ? 1.0f : 0.0f;
            if (c.is_semantic(at[0])) {
                embd_scale[column] = 1.0f / std::sqrt(float(c.n_row()));
                for (int32_t cb = 0; cb < c.n_codebook; cb++) {
                    codes[size_t(cb) * n + column] = at[1 + cb] + cb * c.codebook_size;
                }
            }
        }
    }
    set(g.in.tokens, ids);
    set(g.in.codes, codes);
    set(g.in.semantic, semantic);
    set(g.in.embd_scale, embd_scale);
}

void evaluator::set_codes(const graph & g, const std::vector<task> & tasks) const {
    std::vector<int32_t> codes, order;
    std::vector<float>   hidden;
    for (const task & t : tasks) {
        const int32_t n_hidden = t.hidden ? 1 : 0;
        if (t.hidden) {
            order.push_back(int32_t(hidden.size()) / w_->hyper.n_hidden);
            hidden.insert(hidden.end(), t.hidden, t.hidden + w_->hyper.n_hidden);
        }
        for (int32_t i = 0; i < t.n_tokens - n_hidden; i++) {
            order.push_back(int32_t(tasks.size() + codes.size()));  // behind all hidden vectors
            codes.push_back(t.tokens[i]);
        }
    }
    set(g.in.tokens, codes);
    set(g.in.hidden, hidden);
    set(g.in.order, order);
}

// An output keeps its memory until the graph is done; so must what a view looks at.
void evaluator::mark_traces(const graph & g) const {
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

void evaluator::read_traces(const graph & g) {
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

}  // namespace slowar
