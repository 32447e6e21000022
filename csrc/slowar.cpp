// The wall: every extern "C" function checks its arguments, calls one thing, and turns exceptions into a status.
#include "slowar.h"

#include "bandwidth.h"
#include "device.h"
#include "error.h"
#include "evaluator.h"
#include "platform.h"
#include "remote.h"
#include "sampler.h"
#include "session.h"
#include "weights.h"

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <tuple>

using namespace slowar;

// What a handle is: the thing itself and the process that made it.
struct slowar_model {
    std::shared_ptr<const weights> w;
    int64_t                        owner = process_id();
};

struct slowar_session {
    slowar_session(std::shared_ptr<const weights> w, const slowar_session_params & params) : s(std::move(w), params) {}

    session s;
    int64_t owner = process_id();
};

struct slowar_batch {
    slowar_batch(std::shared_ptr<const weights> w, int32_t n_threads, std::vector<int32_t> extra_ids)
        : e(std::move(w), n_threads, std::move(extra_ids)) {}

    evaluator e;
    int64_t   owner = process_id();
};

struct slowar_server {
    slowar_server(ggml_backend_dev_t device, const slowar_server_params & params) : s(device, params) {}

    server  s;
    int64_t owner = process_id();
};

namespace {

// The version of slowar.h.
constexpr int32_t abi = 6;

// ggml's own limit (GGML_MAX_N_THREADS).
constexpr int32_t max_threads = 512;

// Each costs three nodes of a graph.
constexpr int32_t max_extra_ids = 256;

// A graph of so many sessions of a model of 36 layers has 220 000 nodes.
constexpr int32_t max_items = 256;

// The scheduler takes 16 (GGML_SCHED_MAX_BACKENDS), the CPU among them.
constexpr int32_t max_devices = 15;

// int32 positions, and n_past + n_tokens must not overflow.
constexpr int32_t max_positions = INT32_MAX / 2;

void need(const void * pointer, const char * name) {
    if (!pointer) {
        fail(SLOWAR_ARGUMENT, "%s is NULL", name);
    }
}

template <typename handle_t> handle_t & owned(handle_t * handle) {
    need(handle, "the handle");
    if (handle->owner != process_id()) {
        fail(SLOWAR_STATE,
             "the handle belongs to process %" PRId64 ", this is process %" PRId64
             ": open a model after fork, not before",
             handle->owner, process_id());
    }
    return *handle;
}

// The weights of a model that can be evaluated.
const std::shared_ptr<const weights> & loaded(const slowar_model * model) {
    const auto & w = owned(model).w;
    if (!w->is_loaded) {
        fail(SLOWAR_STATE, "the model was opened to be looked at only: its weights are not loaded");
    }
    return w;
}

// A handle of the parent process is left alone: its threads and device contexts exist there only.
template <typename handle_t> void close(handle_t * handle) {
    if (handle && handle->owner == process_id()) {
        delete handle;
    }
}

template <typename list_t> auto & at(list_t & list, int32_t i, const char * what) {
    if (i < 0 || size_t(i) >= list.size()) {
        fail(SLOWAR_ARGUMENT, "%s %d does not exist: there are %zu", what, i, list.size());
    }
    return list[size_t(i)];
}

// `whose` opens the message.
void check_tokens(const config & c, const int32_t * tokens, int32_t n_tokens, const char * whose = "") {
    need(tokens, text("%stokens", whose).c_str());
    if (n_tokens <= 0) {
        fail(SLOWAR_ARGUMENT, "%sn_tokens is %d, expected 1 or more", whose, n_tokens);
    }
    for (int32_t t = 0; t < n_tokens; t++) {
        const int32_t * at = tokens + size_t(t) * size_t(c.n_row());
        if (at[0] < 0 || at[0] >= c.n_vocab) {
            fail(SLOWAR_ARGUMENT, "%stoken id at row 0, column %d is %d, expected 0 to %d", whose, t, at[0],
                 c.n_vocab - 1);
        }
        for (int32_t row = 1; c.is_semantic(at[0]) && row <= c.n_codebook; row++) {
            if (at[row] < 0 || at[row] >= c.codebook_size) {
                fail(SLOWAR_ARGUMENT, "%scode at row %d, column %d is %d, expected 0 to %d", whose, row, t, at[row],
                     c.codebook_size - 1);
            }
        }
    }
}

// What keys and values may be stored as.
constexpr const char * kv_types[] = { "f16", "bf16", "f32", "q8_0" };

void check_threads(int32_t n_threads, int32_t most = max_threads) {
    if (n_threads < 1 || n_threads > most) {
        fail(SLOWAR_ARGUMENT, "n_threads is %d, expected 1 to %d", n_threads, most);
    }
}

void check_extra_ids(const config & c, const int32_t * ids, int32_t n) {
    if (n < 0 || n > max_extra_ids) {
        fail(SLOWAR_ARGUMENT, "%d extra ids, expected 0 to %d", n, max_extra_ids);
    }
    for (int32_t i = 0; i < n; i++) {
        need(ids, "extra_ids");
        if (ids[i] < 0 || ids[i] >= c.n_vocab) {
            fail(SLOWAR_ARGUMENT, "extra id %d is %d, expected 0 to %d", i, ids[i], c.n_vocab - 1);
        }
    }
}

void check_length(int32_t max_seq_len) {
    if (max_seq_len < 1 || max_seq_len > max_positions) {
        fail(SLOWAR_ARGUMENT, "max_seq_len is %d, expected 1 to %d", max_seq_len, max_positions);
    }
}

void check_params(const config & c, const slowar_session_params & p) {
    check_threads(p.n_threads);
    if (p.kv_placement < SLOWAR_KV_AUTO || p.kv_placement > SLOWAR_KV_GPU) {
        fail(SLOWAR_ARGUMENT, "kv_placement is %d, expected %d to %d", int(p.kv_placement), int(SLOWAR_KV_AUTO),
             int(SLOWAR_KV_GPU));
    }
    if (p.attention < SLOWAR_ATTENTION_AUTO || p.attention > SLOWAR_ATTENTION_GGML) {
        fail(SLOWAR_ARGUMENT, "attention is %d, expected %d to %d", int(p.attention), int(SLOWAR_ATTENTION_AUTO),
             int(SLOWAR_ATTENTION_GGML));
    }
    need(p.kv_type, "kv_type");
    const bool known = std::any_of(std::begin(kv_types), std::end(kv_types),
                                   [&](const char * name) { return std::strcmp(name, p.kv_type) == 0; });
    if (!known) {
        fail(SLOWAR_ARGUMENT, "kv_type is \"%s\", expected f16, bf16, f32 or q8_0", p.kv_type);
    }
    const int64_t block = ggml_blck_size(type_named(p.kv_type));
    if (c.head_dim % block != 0) {
        fail(SLOWAR_ARGUMENT, "kv_type %s holds blocks of %" PRId64 ", the model's head size %d is no multiple of that",
             p.kv_type, block, c.head_dim);
    }
    if (p.n_batch < -1) {
        fail(SLOWAR_ARGUMENT, "n_batch is %d, expected -1 or more", p.n_batch);
    }
    check_extra_ids(c, p.extra_ids, p.n_extra_ids);
}

// What the sessions of a batch evaluate, once nothing speaks against it.
std::vector<task> tasks_of(const evaluator & e, const slowar_batch_item * items, int32_t n_items, bool needs_ids,
                           const float * hidden = nullptr) {
    std::vector<task> tasks;
    for (int32_t i = 0; i < n_items; i++) {
        const slowar_batch_item & item  = items[i];
        const std::string         whose = text("item %d: ", i);
        need(item.session, (whose + "its session").c_str());
        session & s = owned(item.session).s;
        if (s.model() != &e.model()) {
            fail(SLOWAR_ARGUMENT, "%sits session is on another model", whose.c_str());
        }
        if (needs_ids && s.extra_ids() != e.extra_ids()) {
            fail(SLOWAR_ARGUMENT, "%sits session has other extra ids than the batch", whose.c_str());
        }
        for (int32_t j = 0; j < i; j++) {
            if (items[j].session == item.session) {
                fail(SLOWAR_ARGUMENT, "%sits session is item %d's too", whose.c_str(), j);
            }
        }
        check_tokens(s.hyper(), item.tokens, item.n_tokens, whose.c_str());
        tasks.push_back(s.task_for(item.tokens, item.n_tokens + (hidden ? 1 : 0), whose.c_str()));
        tasks.back().hidden = hidden ? hidden + size_t(i) * size_t(e.model().hyper.n_hidden) : nullptr;
        if ((tasks[0].attention == attention_path::reference) !=
            (tasks.back().attention == attention_path::reference)) {
            fail(SLOWAR_ARGUMENT, "%sone of its and item 0's session uses the reference, the other does not",
                 whose.c_str());
        }
    }
    return tasks;
}

// The devices that a model is to be put on, once nothing speaks against where.
std::vector<ggml_backend_dev_t> devices_of(const slowar_model_params & p) {
    if (p.n_devices < 0 || p.n_devices > max_devices || p.n_places < 0) {
        fail(SLOWAR_ARGUMENT, "%d devices and %d places, expected 0 to %d and 0 or more", p.n_devices, p.n_places,
             max_devices);
    }
    std::vector<ggml_backend_dev_t> devices;
    for (int32_t i = 0; i < p.n_devices; i++) {
        need(p.devices, "devices");
        devices.push_back(gpu_device(p.devices[i]));
        if (std::find(devices.begin(), devices.end() - 1, devices.back()) != devices.end() - 1) {
            fail(SLOWAR_ARGUMENT, "device %d is named twice", p.devices[i]);
        }
    }
    for (int32_t i = 0; i < p.n_places; i++) {
        need(p.names, "names");
        need(p.places, "places");
        need(p.names[i], "a name");
        if (p.places[i] < -1 || p.places[i] >= p.n_devices) {
            fail(SLOWAR_ARGUMENT, "place %d is %d, expected -1 to %d", i, p.places[i], p.n_devices - 1);
        }
    }
    return devices;
}

void check_items(const slowar_batch & b, const slowar_batch_item * items, int32_t n_items, int32_t n_threads) {
    need(items, "items");
    if (n_items < 1 || n_items > max_items) {
        fail(SLOWAR_ARGUMENT, "%d items, expected 1 to %d", n_items, max_items);
    }
    check_threads(n_threads, b.e.n_threads());
}

// A Fast-AR has an evaluation of its own.
void check_part(const config & c) {
    if (c.is_fast()) {
        fail(SLOWAR_ARGUMENT, "the model is a Fast-AR, expected a Slow-AR");
    }
}

void check_choice(const slowar_choice_params & p) {
    if (p.top_k < 1) {
        fail(SLOWAR_ARGUMENT, "top_k is %d, expected 1 or more", p.top_k);
    }
    if (!(p.top_p > 0.0)) {
        fail(SLOWAR_ARGUMENT, "top_p is %g, expected above 0", p.top_p);
    }
    if (!(p.temperature >= 0.0 && std::isfinite(p.temperature))) {
        fail(SLOWAR_ARGUMENT, "temperature is %g, expected 0 or more, and finite", p.temperature);
    }
}

output output_for(slowar_logits which, const float * hidden, const float * logits) {
    if (which < SLOWAR_LOGITS_NONE || which > SLOWAR_LOGITS_FULL) {
        fail(SLOWAR_ARGUMENT, "which is %d, expected %d to %d", int(which), int(SLOWAR_LOGITS_NONE),
             int(SLOWAR_LOGITS_FULL));
    }
    switch (logits ? which : SLOWAR_LOGITS_NONE) {
        case SLOWAR_LOGITS_FULL:     return output::full;
        case SLOWAR_LOGITS_SEMANTIC: return output::semantic;
        default:                     return hidden ? output::hidden : output::nothing;
    }
}

}  // namespace

int32_t slowar_abi(void) {
    return abi;
}

const char * slowar_build_info(void) {
    // Whoever comes first: no lock, which a child that was forked meanwhile would find taken for ever.
    static std::atomic<const std::string *> info{ nullptr };
    guard(nullptr, [] {
        setup();
        if (!info) {
            auto words = std::make_unique<std::string>(
                text("ggml %s (%s), CPU code: " SLOWAR_CPU_CODE ", backends:", ggml_version(), ggml_commit()));
            for (size_t i = 0; i < ggml_backend_reg_count(); i++) {
                *words += text("%s %s", i > 0 ? "," : "", ggml_backend_reg_name(ggml_backend_reg_get(i)));
            }
            const std::string * none = nullptr;
            if (info.compare_exchange_strong(none, words.get())) {
                words.release();
            }
        }
    });
    const std::string * known = info;
    return known ? known->c_str() : "unknown";
}

int32_t slowar_log_take(char * out, int32_t size) {
    return out && size > 0 ? log_take(out, size) : int32_t(log_mark());
}

int32_t slowar_device_count(void) {
    int32_t n = 0;
    guard(nullptr, [&] {
        setup();
        n = int32_t(n_local_devices());
    });
    return n;
}

slowar_status slowar_device_get(int32_t i, slowar_device * out, slowar_error * err) {
    return guard(err, [&] {
        setup();
        need(out, "out");
        const auto devices = list_devices();
        *out               = describe(at(devices, i, "device"));
    });
}

slowar_status slowar_server_devices(const char * endpoint, int32_t * first, int32_t * n, slowar_error * err) {
    return guard(err, [&] {
        setup();
        need(endpoint, "endpoint");
        need(first, "first");
        need(n, "n");
        std::tie(*first, *n) = server_devices(endpoint);
    });
}

slowar_status slowar_model_open(slowar_model ** out, const char * path, const slowar_model_params * params,
                                slowar_error * err) {
    return guard(err, [&] {
        setup();
        need(out, "out");
        need(path, "path");
        need(params, "params");
        if (params->part != SLOWAR_PART_SLOW && params->part != SLOWAR_PART_FAST) {
            fail(SLOWAR_ARGUMENT, "part is %d, expected %d or %d", int(params->part), int(SLOWAR_PART_SLOW),
                 int(SLOWAR_PART_FAST));
        }
        auto model = std::make_unique<slowar_model>();
        model->w   = std::make_shared<const weights>(path, devices_of(*params), *params);
        *out       = model.release();
    });
}

void slowar_model_close(slowar_model * model) {
    close(model);
}

slowar_status slowar_model_config(const slowar_model * model, slowar_config * out, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        *out = owned(model).w->hyper;
    });
}

slowar_status slowar_model_get_info(const slowar_model * model, slowar_model_info * out, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        *out = owned(model).w->info;
    });
}

slowar_status slowar_model_get_tensor(const slowar_model * model, int32_t i, slowar_tensor * out, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        *out = at(owned(model).w->table, i, "tensor");
    });
}

slowar_status slowar_session_open(slowar_session ** out, const slowar_model * model,
                                  const slowar_session_params * params, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        need(params, "params");
        const auto & w = loaded(model);
        check_params(w->hyper, *params);
        *out = std::make_unique<slowar_session>(w, *params).release();
    });
}

void slowar_session_close(slowar_session * session) {
    close(session);
}

slowar_status slowar_session_get_state(const slowar_session * session, slowar_session_state * out, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        *out = owned(session).s.state();
    });
}

slowar_status slowar_init_kv_cache(slowar_session * session, int32_t max_seq_len, slowar_error * err) {
    return guard(err, [&] {
        auto & s = owned(session).s;
        check_length(max_seq_len);
        s.init_kv_cache(max_seq_len);
    });
}

slowar_status slowar_clear_kv_cache(slowar_session * session, slowar_error * err) {
    return guard(err, [&] { owned(session).s.clear_kv_cache(); });
}

slowar_status slowar_rewind(slowar_session * session, int32_t n_past, slowar_error * err) {
    return guard(err, [&] { owned(session).s.rewind(n_past); });
}

slowar_status slowar_reserve(slowar_session * session, int32_t max_seq_len, slowar_error * err) {
    return guard(err, [&] {
        auto & s = owned(session).s;
        check_length(max_seq_len);
        s.reserve(max_seq_len);
    });
}

slowar_status slowar_copy_prefix(slowar_session * session, const slowar_session * from, int32_t n, slowar_error * err) {
    return guard(err, [&] { owned(session).s.copy_prefix(owned(from).s, n); });
}

slowar_status slowar_read_kv(const slowar_session * session, int32_t first, int32_t n, void * out, uint64_t n_bytes,
                             slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        owned(session).s.read_kv(first, n, out, n_bytes);
    });
}

slowar_status slowar_write_kv(slowar_session * session, int32_t first, int32_t n, const void * from, uint64_t n_bytes,
                              slowar_error * err) {
    return guard(err, [&] {
        need(from, "from");
        owned(session).s.write_kv(first, n, from, n_bytes);
    });
}

slowar_status slowar_session_estimate(const slowar_model * model, const slowar_session_params * params,
                                      int32_t max_seq_len, slowar_session_memory * out, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        need(params, "params");
        const auto & w = owned(model).w;
        check_params(w->hyper, *params);
        check_length(max_seq_len);
        *out = session(w, *params).estimate(max_seq_len);
    });
}

slowar_status slowar_session_get_memory(const slowar_session * session, slowar_session_memory * out,
                                        slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        *out = owned(session).s.memory();
    });
}

slowar_status slowar_session_get_fallback(const slowar_session * session, int32_t i, slowar_fallback * out,
                                          slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        const fallback & f = at(owned(session).s.fallbacks(), i, "fallback");
        *out               = {};
        out->layer         = f.layer;
        std::snprintf(out->op, sizeof(out->op), "%s", f.op.c_str());
        std::snprintf(out->device, sizeof(out->device), "%s", ggml_backend_dev_name(f.device));
        std::snprintf(out->reason, sizeof(out->reason), "%s", f.reason.c_str());
    });
}

slowar_status slowar_check_tokens(const slowar_session * session, const int32_t * tokens, int32_t n_tokens,
                                  slowar_error * err) {
    return guard(err, [&] { check_tokens(owned(session).s.hyper(), tokens, n_tokens); });
}

slowar_status slowar_eval_cached(slowar_session * session, const int32_t * tokens, int32_t n_tokens,
                                 slowar_logits which, int32_t n_threads, float * hidden, float * logits,
                                 slowar_error * err) {
    return guard(err, [&] {
        auto & s = owned(session).s;
        check_part(s.hyper());
        check_tokens(s.hyper(), tokens, n_tokens);
        check_threads(n_threads, s.n_threads());
        s.eval_cached(s.task_for(tokens, n_tokens), output_for(which, hidden, logits), n_threads, hidden, logits);
    });
}

slowar_status slowar_batch_open(slowar_batch ** out, const slowar_model * model, int32_t n_threads,
                                const int32_t * extra_ids, int32_t n_extra_ids, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        const auto & w = loaded(model);
        check_threads(n_threads);
        check_extra_ids(w->hyper, extra_ids, n_extra_ids);
        const std::vector<int32_t> ids(extra_ids, extra_ids + n_extra_ids);
        *out = std::make_unique<slowar_batch>(w, n_threads, ids).release();
    });
}

void slowar_batch_close(slowar_batch * batch) {
    close(batch);
}

slowar_status slowar_batch_get_state(const slowar_batch * batch, slowar_batch_state * out, slowar_error * err) {
    return guard(err, [&] {
        need(out, "out");
        const evaluator & e = owned(batch).e;
        *out                = { e.n_threads(), e.n_planned(), e.n_bytes() };
    });
}

slowar_status slowar_eval_batch(slowar_batch * batch, const slowar_batch_item * items, int32_t n_items,
                                slowar_logits which, int32_t n_threads, float * hidden, float * logits,
                                slowar_error * err) {
    return guard(err, [&] {
        slowar_batch & b = owned(batch);
        check_items(b, items, n_items, n_threads);
        check_part(b.e.model().hyper);
        const bool              needs_ids = logits && which == SLOWAR_LOGITS_SEMANTIC;
        const std::vector<task> tasks     = tasks_of(b.e, items, n_items, needs_ids);
        b.e.eval(tasks, output_for(which, hidden, logits), n_threads, hidden, logits);
        for (int32_t i = 0; i < n_items; i++) {
            owned(items[i].session).s.advance(items[i].n_tokens);
        }
    });
}

slowar_status slowar_eval_fast(slowar_batch * batch, const slowar_batch_item * items, int32_t n_items,
                               const float * hidden, int32_t n_threads, float * logits, slowar_error * err) {
    return guard(err, [&] {
        slowar_batch & b = owned(batch);
        check_items(b, items, n_items, n_threads);
        need(logits, "logits");
        if (!b.e.model().hyper.is_fast()) {
            fail(SLOWAR_ARGUMENT, "the batch is of a Slow-AR, expected a Fast-AR");
        }
        for (int32_t i = 0; hidden && i < n_items; i++) {
            need(items[i].session, "a session");
            owned(items[i].session).s.rewind(0);
        }
        const std::vector<task> tasks = tasks_of(b.e, items, n_items, false, hidden);
        b.e.eval(tasks, output::full, n_threads, nullptr, logits);
        for (int32_t i = 0; i < n_items; i++) {
            owned(items[i].session).s.advance(tasks[size_t(i)].n_tokens);
        }
    });
}

slowar_status slowar_choose(const float * logits, int32_t n, const slowar_choice_params * params, int32_t * chosen,
                            int32_t * kept, double * probabilities, int32_t * n_kept, slowar_error * err) {
    return guard(err, [&] {
        need(logits, "logits");
        need(params, "params");
        need(chosen, "chosen");
        if (n < 1) {
            fail(SLOWAR_ARGUMENT, "n is %d, expected 1 or more", n);
        }
        check_choice(*params);
        const std::vector<candidate> all = candidates(logits, n, *params);
        *chosen                          = choose(all, *params);
        for (size_t i = 0; kept && i < all.size(); i++) {
            kept[i] = all[i].index;
        }
        for (size_t i = 0; probabilities && i < all.size(); i++) {
            probabilities[i] = all[i].p;
        }
        if (n_kept) {
            *n_kept = int32_t(all.size());
        }
    });
}

slowar_status slowar_graph_nodes(slowar_session * session, int32_t n_past, int32_t n_tokens, slowar_node * out,
                                 int32_t capacity, int32_t * n_nodes, slowar_error * err) {
    return guard(err, [&] {
        need(n_nodes, "n_nodes");
        const std::vector<slowar_node> nodes = owned(session).s.graph_nodes(n_past, n_tokens);
        *n_nodes                             = int32_t(nodes.size());
        if (out) {
            std::copy_n(nodes.begin(), std::clamp(capacity, 0, *n_nodes), out);
        }
    });
}

slowar_status slowar_trace_select(slowar_session * session, const char * const * names, int32_t n_names,
                                  slowar_error * err) {
    return guard(err, [&] {
        auto &                   s = owned(session).s;
        std::vector<std::string> selected;
        for (int32_t i = 0; i < n_names; i++) {
            need(names, "names");
            need(names[i], "a name");
            selected.emplace_back(names[i]);
        }
        s.select_traces(std::move(selected));
    });
}

slowar_status slowar_trace_get(const slowar_session * session, int32_t i, int64_t ne[4], float * data,
                               slowar_error * err) {
    return guard(err, [&] {
        need(ne, "ne");
        const trace & t = at(owned(session).s.traces(), i, "trace");
        std::copy_n(t.ne, GGML_MAX_DIMS, ne);
        if (data) {
            std::copy(t.values.begin(), t.values.end(), data);
        }
    });
}

slowar_status slowar_server_open(slowar_server ** out, const slowar_server_params * params, int32_t * port,
                                 slowar_error * err) {
    return guard(err, [&] {
        setup();
        need(out, "out");
        need(params, "params");
        need(params->host, "host");
        need(port, "port");
        check_threads(params->n_threads);
        const auto devices = list_devices();
        const auto device  = at(devices, params->device, "device");
        if (is_remote(device)) {
            fail(SLOWAR_DEVICE, "device %d is a server's: it is lent already", params->device);
        }
        auto server = std::make_unique<slowar_server>(device, *params);
        *port       = server->s.port();
        *out        = server.release();
    });
}

slowar_status slowar_server_run(slowar_server * server, slowar_error * err) {
    return guard(err, [&] { owned(server).s.run(); });
}

void slowar_server_close(slowar_server * server) {
    close(server);
}

slowar_status slowar_read_bandwidth(int32_t n_threads, double * bytes_per_second, slowar_error * err) {
    return guard(err, [&] {
        need(bytes_per_second, "bytes_per_second");
        check_threads(n_threads);
        *bytes_per_second = read_bandwidth(n_threads);
    });
}

slowar_status slowar_quantize(const char * type, const float * rows, int64_t n_rows, int64_t n_per_row, void * out,
                              int64_t n_bytes, slowar_error * err) {
    return guard(err, [&] {
        need(type, "type");
        need(rows, "rows");
        need(out, "out");
        const ggml_type t = type_named(type);
        if (!cpu_can_use(t) || ggml_quantize_requires_imatrix(t)) {
            fail(SLOWAR_ARGUMENT, "type %s cannot be written from floats alone", type);
        }
        const int64_t block = ggml_blck_size(t);
        if (n_rows < 1 || n_per_row < 1 || n_per_row % block != 0) {
            fail(SLOWAR_ARGUMENT, "%" PRId64 " rows of %" PRId64 ", expected 1 or more of a multiple of %" PRId64,
                 n_rows, n_per_row, block);
        }
        const int64_t expected = n_rows * int64_t(ggml_row_size(t, n_per_row));
        if (n_bytes != expected) {
            fail(SLOWAR_ARGUMENT, "n_bytes is %" PRId64 ", expected %" PRId64, n_bytes, expected);
        }
        ggml_quantize_chunk(t, rows, out, 0, n_rows, n_per_row, nullptr);
    });
}
