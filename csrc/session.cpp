#include "session.h"

#include "error.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <iterator>

namespace slowar {

session::session(std::shared_ptr<const weights> w, const slowar_session_params & params)
    : w_(std::move(w)), n_batch_(params.n_batch), asked_(params.attention), kv_placement_(params.kv_placement),
      kv_type_(type_named(params.kv_type)),
      evaluator_(w_, params.n_threads, { params.extra_ids, params.extra_ids + params.n_extra_ids }) {}

const kv_cache & session::need_cache(const char * whose) const {
    if (!cache_) {
        fail(SLOWAR_STATE, "%sno KV cache: call init_kv_cache first", whose);
    }
    return *cache_;
}

kv_cache session::make_cache(attention_path path, int32_t max_seq_len, kv_cache::existence how) const {
    const bool is_together =
        kv_placement_ == SLOWAR_KV_GPU || (kv_placement_ == SLOWAR_KV_AUTO && path == attention_path::reference);
    std::vector<ggml_backend_dev_t> devices;
    for (int32_t il = 0; il < w_->hyper.n_layer; il++) {
        const int32_t i = is_together ? w_->first_device() : w_->device_of(il);
        devices.push_back(i < 0 ? cpu_device() : w_->devices[size_t(i)]);
    }
    return { w_->hyper, std::move(devices), kv_type_, max_seq_len, how };
}

std::vector<std::vector<task>> session::dearest(const kv_cache & cache) const {
    std::vector<int32_t> lengths;
    if (n_batch_ >= 0) {
        lengths.push_back(1);
    }
    if (std::min(n_batch_, cache.max_seq_len()) > 1) {
        lengths.push_back(std::min(n_batch_, cache.max_seq_len()));
    }
    std::vector<std::vector<task>> out;
    for (const int32_t n : lengths) {
        out.push_back({ { &cache, path_, cache.max_seq_len() - n, n, nullptr } });
    }
    return out;
}

void session::init_kv_cache(int32_t max_seq_len) {
    clear_kv_cache();
    try {
        path_ = choose_path(max_seq_len);
        cache_.emplace(make_cache(path_, max_seq_len, kv_cache::real));
        for (const std::vector<task> & tasks : dearest(*cache_)) {
            evaluator_.reserve(tasks);
        }
    } catch (...) {
        clear_kv_cache();
        throw;
    }
}

// An operation that the reference lacks on a device stops it only where nothing else can do it; the flash path is not
// worth having without ggml's flash attention beside the cache.
attention_path session::choose_path(int32_t max_seq_len) {
    std::vector<attention_path> paths;
    if (asked_ != SLOWAR_ATTENTION_REFERENCE) {
        paths.push_back(asked_ == SLOWAR_ATTENTION_GGML ? attention_path::flash : attention_path::cpu);
    }
    if (asked_ == SLOWAR_ATTENTION_AUTO || asked_ == SLOWAR_ATTENTION_REFERENCE) {
        paths.push_back(attention_path::reference);
    }
    if (w_->first_device() < 0) {
        return paths[0];
    }
    const auto stops = [](const fallback & f) {
        return f.is_stuck || f.op == "FLASH_ATTN_EXT";
    };
    for (const attention_path path : paths) {
        const kv_cache cache = make_cache(path, max_seq_len, kv_cache::imagined);
        const auto &   all   = evaluator_.built({ { &cache, path, 0, 1, nullptr } }, output::full).fallbacks();
        const auto     it    = std::find_if(all.begin(), all.end(), stops);
        if (it == all.end()) {
            return path;
        }
        if (path == paths.back()) {
            fail(SLOWAR_DEVICE, "%s lacks %s for a cache of type %s%s", ggml_backend_dev_name(it->device),
                 it->op.c_str(), ggml_type_name(kv_type_),
                 path == attention_path::reference ? "" : "; attention \"reference\" may run there");
        }
    }
    return paths.back();
}

void session::clear_kv_cache() {
    evaluator_.forget();
    evaluator_.traces.clear();
    cache_.reset();
    n_past_ = 0;
}

void session::reserve(int32_t max_seq_len) {
    if (max_seq_len <= need_cache().max_seq_len()) {
        return;
    }
    kv_cache larger = make_cache(path_, max_seq_len, kv_cache::real);
    for (const std::vector<task> & tasks : dearest(larger)) {
        evaluator_.reserve(tasks);
    }
    if (n_past_ > 0) {
        larger.copy(*cache_, n_past_);
    }
    cache_ = std::move(larger);
}

slowar_bytes session::memory_of(const kv_cache & cache) const {
    slowar_bytes out = {};
    out.host         = cache.n_bytes(cpu_device());
    for (size_t i = 0; i < w_->devices.size(); i++) {
        out.device[i] = cache.n_bytes(w_->devices[i]);
    }
    return out;
}

slowar_session_memory session::memory() const {
    return { cache_ ? memory_of(*cache_) : slowar_bytes{}, evaluator_.memory() };
}

static void add(slowar_bytes & sum, const slowar_bytes & more) {
    sum.host += more.host;
    for (size_t i = 0; i < std::size(sum.device); i++) {
        sum.device[i] += more.device[i];
    }
}

slowar_session_memory session::estimate(int32_t max_seq_len) {
    path_ = choose_path(max_seq_len);
    cache_.emplace(make_cache(path_, max_seq_len, kv_cache::imagined));
    slowar_session_memory out = { memory_of(*cache_), {} };
    for (const std::vector<task> & tasks : dearest(*cache_)) {
        const double n_scores = double(tasks[0].n_tokens) * max_seq_len * w_->hyper.n_head;
        if (n_scores > 1e15) {  // sizes beyond this could overflow
            fail(SLOWAR_MEMORY, "evaluating %d positions at once takes more than any memory", tasks[0].n_tokens);
        }
        add(out.compute, evaluator_.measure(tasks));
    }
    clear_kv_cache();
    return out;
}

void session::rewind(int32_t n_past) {
    need_cache();
    if (n_past < 0 || n_past > n_past_) {
        fail(SLOWAR_ARGUMENT, "n_past is %d, expected 0 to %d, the position", n_past, n_past_);
    }
    n_past_ = n_past;
}

void session::copy_prefix(const session & from, int32_t n) {
    const kv_cache & source = from.need_cache();
    if (n < 0 || n > from.n_past_ || n > need_cache().max_seq_len()) {
        fail(SLOWAR_ARGUMENT, "n is %d, expected 0 to %d, what the one has and the other has room for", n,
             std::min(from.n_past_, cache_->max_seq_len()));
    }
    if (source.type() != cache_->type() || from.w_ != w_) {
        fail(SLOWAR_ARGUMENT, "a prefix is copied between sessions of one model and KV type only, these have %s and %s",
             ggml_type_name(source.type()), ggml_type_name(cache_->type()));
    }
    if (n > 0 && &from != this) {
        cache_->copy(source, n);
    }
    n_past_ = n;
}

void session::check_range(int32_t first, int32_t n, int32_t most, uint64_t n_bytes) const {
    const uint64_t expected = need_cache().n_bytes_each() * uint64_t(std::max(n, 0));
    if (first < 0 || first > n_past_ || n < 1 || n > most - first) {
        fail(SLOWAR_ARGUMENT, "%d positions from %d on, expected 1 or more within 0 to %d, beginning at most at %d", n,
             first, most, n_past_);
    }
    if (n_bytes != expected) {
        fail(SLOWAR_ARGUMENT, "n_bytes is %" PRIu64 ", expected %" PRIu64, n_bytes, expected);
    }
}

void session::read_kv(int32_t first, int32_t n, void * out, uint64_t n_bytes) const {
    check_range(first, n, n_past_, n_bytes);
    cache_->read(first, n, out);
}

void session::write_kv(int32_t first, int32_t n, const void * from, uint64_t n_bytes) {
    check_range(first, n, need_cache().max_seq_len(), n_bytes);
    cache_->write(first, n, from);
    n_past_ = first + n;
}

task session::task_for(const int32_t * tokens, int32_t n_tokens, const char * whose) const {
    const kv_cache & cache = need_cache(whose);
    if (n_tokens > cache.max_seq_len() - n_past_) {
        fail(SLOWAR_CONTEXT_FULL, "%s%d positions do not fit behind position %d in a cache of %d", whose, n_tokens,
             n_past_, cache.max_seq_len());
    }
    return { &cache, path_, n_past_, n_tokens, tokens };
}

void session::eval_cached(const task & t, output out, int32_t n_threads, float * hidden, float * logits) {
    evaluator_.eval({ t }, out, n_threads, hidden, logits);
    advance(t.n_tokens);
}

void session::select_traces(std::vector<std::string> names) {
    evaluator_.trace_names = std::move(names);
    evaluator_.traces.clear();
}

slowar_session_state session::state() const {
    slowar_session_state out = {};
    out.n_past               = n_past_;
    out.n_threads            = evaluator_.n_threads();
    out.n_planned            = evaluator_.n_planned();
    if (cache_) {
        out.max_seq_len      = cache_->max_seq_len();
        out.attention        = path_ == attention_path::reference ? SLOWAR_ATTENTION_REFERENCE : SLOWAR_ATTENTION_FLASH;
        out.n_bytes_kv       = cache_->n_bytes();
        out.n_bytes_position = cache_->n_bytes_each();
        out.n_splits         = evaluator_.n_splits();
        out.n_fallbacks      = int32_t(evaluator_.fallbacks().size());
        out.n_bytes_compute  = evaluator_.n_bytes();
    }
    return out;
}

std::vector<slowar_node> session::graph_nodes(int32_t n_past, int32_t n_tokens) {
    const kv_cache & cache = need_cache();
    if (n_past < 0 || n_tokens < 1 || n_tokens > cache.max_seq_len() - n_past) {
        fail(SLOWAR_ARGUMENT, "n_past %d and n_tokens %d, expected 0 or more, 1 or more, together at most %d", n_past,
             n_tokens, cache.max_seq_len());
    }
    const planned_graph & plan = evaluator_.built({ { &cache, path_, n_past, n_tokens, nullptr } }, output::full);
    const graph &         g    = plan.get();

    std::vector<slowar_node> nodes;
    for (int i = 0; i < ggml_graph_n_nodes(g.nodes); i++) {
        ggml_tensor *            t      = ggml_graph_node(g.nodes, i);
        const ggml_backend_dev_t device = plan.device_of(t);
        slowar_node              out    = {};
        std::snprintf(out.device, sizeof(out.device), "%s", device ? ggml_backend_dev_name(device) : "");
        std::snprintf(out.name, sizeof(out.name), "%s", t->name);
        std::snprintf(out.op, sizeof(out.op), "%s", ggml_op_desc(t));
        std::snprintf(out.type, sizeof(out.type), "%s", ggml_type_name(t->type));
        std::copy_n(t->ne, GGML_MAX_DIMS, out.ne);
        nodes.push_back(out);
    }
    return nodes;
}

}  // namespace slowar
