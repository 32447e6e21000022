// One sequence: its cache, its position, and eval_cached, the computation behind prefill, prefill_fast and step.
#pragma once

#include "evaluator.h"

#include <optional>

namespace slowar {

class session {
  public:
    session(std::shared_ptr<const weights> w, const slowar_session_params & params);

    void init_kv_cache(int32_t max_seq_len);
    void clear_kv_cache();

    // A larger cache with the same past.
    void reserve(int32_t max_seq_len);

    void rewind(int32_t n_past);

    // The first n positions become another session's, and there are no more.
    void copy_prefix(const session & from, int32_t n);

    // n positions from `first` on as kv_cache::read gives them. Written, they are the last there are.
    void read_kv(int32_t first, int32_t n, void * out, uint64_t n_bytes) const;
    void write_kv(int32_t first, int32_t n, const void * from, uint64_t n_bytes);

    // What an evaluation needs to know of this session. `whose` opens the message. Throws SLOWAR_STATE, SLOWAR_CONTEXT_FULL.
    task task_for(const int32_t * tokens, int32_t n_tokens, const char * whose = "") const;

    // Evaluates it and moves on. hidden and logits may be nullptr.
    void eval_cached(const task & t, output out, int32_t n_threads, float * hidden, float * logits);

    // After it was evaluated in a batch.
    void advance(int32_t n_tokens) { n_past_ += n_tokens; }

    slowar_session_state state() const;

    const config & hyper() const { return w_->hyper; }

    const weights * model() const { return w_.get(); }

    int32_t n_threads() const { return evaluator_.n_threads(); }

    const std::vector<int32_t> & extra_ids() const { return evaluator_.extra_ids(); }

    // What an evaluation of n_tokens at n_past computes, in order. Drops the graph that was ready.
    std::vector<slowar_node> graph_nodes(int32_t n_past, int32_t n_tokens);

    // Cache and compute memory that init_kv_cache would take, of a session without a cache, and that are taken.
    slowar_session_memory estimate(int32_t max_seq_len);
    slowar_session_memory memory() const;

    const std::vector<fallback> & fallbacks() const { return evaluator_.fallbacks(); }

    void                       select_traces(std::vector<std::string> names);
    const std::vector<trace> & traces() const { return evaluator_.traces; }

  private:
    const kv_cache & need_cache(const char * whose = "") const;
    kv_cache         make_cache(attention_path path, int32_t max_seq_len, kv_cache::existence how) const;
    slowar_bytes     memory_of(const kv_cache & cache) const;
    void             check_range(int32_t first, int32_t n, int32_t most, uint64_t n_bytes) const;
    // The longest evaluations for which compute memory comes with this cache, at its far end, where they are dearest.
    std::vector<std::vector<task>> dearest(const kv_cache & cache) const;

    attention_path choose_path(int32_t max_seq_len);

    std::shared_ptr<const weights> w_;
    int32_t                        n_batch_;
    slowar_attention               asked_;  // attention, as the caller put it
    slowar_kv_placement            kv_placement_;
    attention_path                 path_ = attention_path::reference;
    ggml_type                      kv_type_;
    evaluator                      evaluator_;
    std::optional<kv_cache>        cache_;
    int32_t                        n_past_ = 0;
};

}  // namespace slowar
