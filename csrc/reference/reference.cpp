// Shapes in comments are row-major, slowest dimension first: (n_tokens, n_embd) has one row of n_embd values per position.

#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

// Bounds on single sizes keep every product of three of them inside an int64_t.
constexpr int64_t max_count     = 1 << 20;
constexpr int64_t max_head_size = 1 << 16;

// Activations of a batch.
struct rows {
    int64_t             n;
    int64_t             width;
    std::vector<double> values;

    rows(int64_t n_rows, int64_t n_columns) : n(n_rows), width(n_columns), values(size_t(n_rows * n_columns)) {}

    double *       operator[](int64_t i) { return values.data() + i * width; }
    const double * operator[](int64_t i) const { return values.data() + i * width; }
};

// Keys or values of one layer.
struct stored_rows {
    std::vector<double> values;  // (n_past, kv_size)

    // Another program's values for the next batch, before rounding: see ref_follow.
    std::vector<float> guide;
    double             tolerance = 0.0;
};

struct kv_cache_layer {
    stored_rows k;
    stored_rows v;
};

struct layer_weights {
    const float * attention_norm;  // (n_embd)
    const float * wqkv;            // (q_size + 2*kv_size, n_embd)
    const float * q_norm;          // (head_size), null without q/k norm
    const float * k_norm;          // (head_size), null without q/k norm
    const float * wo;              // (n_embd, q_size)
    const float * ffn_norm;        // (n_embd)
    const float * w1;              // (n_ff, n_embd)
    const float * w2;              // (n_embd, n_ff)
    const float * w3;              // (n_ff, n_embd)
};

struct network {
    ref_config    cfg;
    int64_t       head_size;
    int64_t       q_size;
    int64_t       kv_size;
    const float * embeddings;  // (n_vocab, n_embd)
    const float * codebooks;   // (n_codebook * codebook_size, n_embd)
    const float * norm;        // (n_embd)
    const float * output;      // (n_vocab, n_embd)

    std::vector<layer_weights> layers;
};

using trace_map = std::map<std::string, std::vector<double>>;

}  // namespace

struct ref_model {
    ref_config                                cfg;
    std::map<std::string, std::vector<float>> tensors;
};

struct ref_session {
    const ref_model *           model;
    ref_cache                   rounding;
    ref_fault                   fault;
    int64_t                     n_past = 0;
    std::vector<kv_cache_layer> cache;
    trace_map                   trace;
};

namespace {

// What one evaluation carries from function to function.
struct evaluation {
    network       net;
    ref_session & session;
    int64_t       n_tokens;
    trace_map     trace;

    bool has(ref_fault fault) const { return session.fault == fault; }

    const rows & keep(const std::string & name, const rows & x) {
        trace[name] = x.values;
        return x;
    }

    const rows & keep(const char * name, int64_t il, const rows & x) {
        return keep(std::string(name) + "-" + std::to_string(il), x);
    }
};

//
// errors
//

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
[[noreturn]] void fail(const char * format, ...) {
    char    text[sizeof(ref_error::message)];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    throw std::runtime_error(text);
}

template <typename F> int32_t guard(ref_error * err, F && body) {
    try {
        body();
        return 0;
    } catch (const std::exception & e) {
        if (err) {
            snprintf(err->message, sizeof(err->message), "%s", e.what());
        }
        return 1;
    }
}

//
// weights
//

void check_config(const ref_config & cfg) {
    const std::pair<const char *, int64_t> counts[] = {
        { "n_vocab", cfg.n_vocab },
        { "n_embd", cfg.n_embd },
        { "n_ff", cfg.n_ff },
        { "n_layer", cfg.n_layer },
        { "n_head", cfg.n_head },
        { "n_head_kv", cfg.n_head_kv },
        { "n_codebook", cfg.n_codebook },
        { "codebook_size", cfg.codebook_size },
    };
    for (const auto & [name, value] : counts) {
        if (value < 1 || value > max_count) {
            fail("%s is %lld, expected 1 to %lld", name, (long long) value, (long long) max_count);
        }
    }
    if (cfg.n_head % cfg.n_head_kv != 0) {
        fail("n_head %d is not a multiple of n_head_kv %d", cfg.n_head, cfg.n_head_kv);
    }
    if (!(cfg.rope_base > 0.0) || !(cfg.rms_eps >= 0.0)) {
        fail("rope_base %g or rms_eps %g is out of range", cfg.rope_base, cfg.rms_eps);
    }
}

const std::vector<float> & tensor(const ref_model & model, const std::string & name) {
    const auto found = model.tensors.find(name);
    if (found == model.tensors.end()) {
        fail("tensor %s is missing", name.c_str());
    }
    return found->second;
}

const float * tensor(const ref_model & model, const std::string & name, int64_t n_expected) {
    const auto & values = tensor(model, name);
    if (int64_t(values.size()) != n_expected) {
        fail("tensor %s has %lld values, expected %lld", name.c_str(), (long long) values.size(),
             (long long) n_expected);
    }
    return values.data();
}

// No metadata key holds it, and n_embd / n_head is wrong for the released weights.
int64_t find_head_size(const ref_model & model) {
    const ref_config & cfg  = model.cfg;
    const char *       name = cfg.qk_norm ? "layers.0.attention.q_norm.weight" : "layers.0.attention.wo.weight";
    const int64_t      n    = int64_t(tensor(model, name).size());
    const int64_t      size = cfg.qk_norm ? n : n / cfg.n_embd / cfg.n_head;
    if (size < 2 || size > max_head_size || size % 2 != 0) {
        fail("tensor %s gives a head size of %lld, expected an even number from 2 to %lld", name, (long long) size,
             (long long) max_head_size);
    }
    return size;
}

layer_weights find_layer(const ref_model & model, const network & net, int64_t il) {
    const int64_t n_embd = net.cfg.n_embd;
    const int64_t n_ff   = net.cfg.n_ff;

    const auto find = [&](const char * name, int64_t n_expected) {
        return tensor(model, "layers." + std::to_string(il) + "." + name + ".weight", n_expected);
    };

    layer_weights layer  = {};
    layer.attention_norm = find("attention_norm", n_embd);
    layer.wqkv           = find("attention.wqkv", (net.q_size + 2 * net.kv_size) * n_embd);
    layer.wo             = find("attention.wo", n_embd * net.q_size);
    layer.ffn_norm       = find("ffn_norm", n_embd);
    layer.w1             = find("feed_forward.w1", n_ff * n_embd);
    layer.w2             = find("feed_forward.w2", n_embd * n_ff);
    layer.w3             = find("feed_forward.w3", n_ff * n_embd);
    if (net.cfg.qk_norm) {
        layer.q_norm = find("attention.q_norm", net.head_size);
        layer.k_norm = find("attention.k_norm", net.head_size);
    }
    return layer;
}

network find_network(const ref_model & model) {
    const ref_config & cfg     = model.cfg;
    const int64_t      n_vocab = cfg.n_vocab;
    const int64_t      n_embd  = cfg.n_embd;
    const int64_t      n_codes = int64_t(cfg.n_codebook) * cfg.codebook_size;

    network net    = {};
    net.cfg        = cfg;
    net.head_size  = find_head_size(model);
    net.q_size     = cfg.n_head * net.head_size;
    net.kv_size    = cfg.n_head_kv * net.head_size;
    net.embeddings = tensor(model, "embeddings.weight", n_vocab * n_embd);
    net.codebooks  = tensor(model, "codebook_embeddings.weight", n_codes * n_embd);
    net.norm       = tensor(model, "norm.weight", n_embd);
    net.output     = cfg.tied_head ? net.embeddings : tensor(model, "output.weight", n_vocab * n_embd);
    for (int64_t il = 0; il < cfg.n_layer; ++il) {
        net.layers.push_back(find_layer(model, net, il));
    }
    return net;
}

//
// arithmetic
//

// x times the transpose of the (n_out, x.width) matrix `weight`.
rows linear(const rows & x, const float * weight, int64_t n_out) {
    rows y(x.n, n_out);  // (x.n, n_out)
    for (int64_t o = 0; o < n_out; ++o) {
        const float * w = weight + o * x.width;
        for (int64_t t = 0; t < x.n; ++t) {
            double sum = 0.0;
            for (int64_t i = 0; i < x.width; ++i) {
                sum += x[t][i] * w[i];
            }
            y[t][o] = sum;
        }
    }
    return y;
}

rows add(rows x, const rows & y) {
    for (size_t i = 0; i < x.values.size(); ++i) {
        x.values[i] += y.values[i];
    }
    return x;
}

rows rms_norm(rows x, const float * weight, double eps) {
    for (int64_t t = 0; t < x.n; ++t) {
        double sum = 0.0;
        for (int64_t i = 0; i < x.width; ++i) {
            sum += x[t][i] * x[t][i];
        }
        const double scale = 1.0 / std::sqrt(sum / double(x.width) + eps);
        for (int64_t i = 0; i < x.width; ++i) {
            x[t][i] *= scale * weight[i];
        }
    }
    return x;
}

double silu(double x) {
    return x / (1.0 + std::exp(-x));
}

// Scores become probabilities in place. There is always at least one.
void softmax(std::vector<double> & scores) {
    const double peak = *std::max_element(scores.begin(), scores.end());
    double       sum  = 0.0;
    for (double & s : scores) {
        s    = std::exp(s - peak);
        sum += s;
    }
    for (double & s : scores) {
        s /= sum;
    }
}

// A half has 11 significant bits, and none below 2^-24. A double holds the quotient and the product exactly.
double round_to_half(float x) {
    if (!std::isfinite(x)) {
        return x;
    }
    int exponent = 0;  // |x| < 2^exponent
    std::frexp(x, &exponent);
    const double step    = std::ldexp(1.0, std::max(exponent - 11, -24));
    const double rounded = std::nearbyint(x / step) * step;  // the default rounding mode: ties to even
    return std::fabs(rounded) > 65504.0 ? std::copysign(std::numeric_limits<double>::infinity(), rounded) : rounded;
}

//
// the model
//

bool is_semantic(const ref_config & cfg, int32_t id) {
    return cfg.semantic_begin <= id && id <= cfg.semantic_end;
}

void check_tokens(const ref_config & cfg, const int32_t * tokens, int64_t n_tokens) {
    for (int64_t t = 0; t < n_tokens; ++t) {
        const int32_t * token = tokens + t * (1 + cfg.n_codebook);
        if (token[0] < 0 || token[0] >= cfg.n_vocab) {
            fail("position %lld: id %d, expected 0 to %d", (long long) t, token[0], cfg.n_vocab - 1);
        }
        if (!is_semantic(cfg, token[0])) {
            continue;  // the codes of a text position mean nothing
        }
        for (int32_t cb = 0; cb < cfg.n_codebook; ++cb) {
            const int32_t code = token[1 + cb];
            if (code < 0 || code >= cfg.codebook_size) {
                fail("position %lld: code %d in codebook %d, expected 0 to %d", (long long) t, code, cb,
                     cfg.codebook_size - 1);
            }
        }
    }
}

rows embed(const evaluation & ev, const int32_t * tokens) {
    const network &    net       = ev.net;
    const ref_config & cfg       = net.cfg;
    const double       sem_scale = 1.0 / std::sqrt(1.0 + cfg.n_codebook);

    rows x(ev.n_tokens, cfg.n_embd);  // (n_tokens, n_embd)
    for (int64_t t = 0; t < ev.n_tokens; ++t) {
        const int32_t * token    = tokens + t * (1 + cfg.n_codebook);
        const bool      semantic = is_semantic(cfg, token[0]);
        const double    scale    = cfg.scale_codebooks && semantic ? sem_scale : 1.0;

        for (int64_t i = 0; i < cfg.n_embd; ++i) {
            const double text  = net.embeddings[int64_t(token[0]) * cfg.n_embd + i];
            double       codes = 0.0;
            for (int64_t cb = 0; semantic && cb < cfg.n_codebook; ++cb) {
                const int64_t row  = token[1 + cb] + cb * cfg.codebook_size;
                codes             += net.codebooks[row * cfg.n_embd + i];
            }
            x[t][i] = ev.has(REF_FAULT_SCALE_WITHOUT_TEXT) ? text + codes * scale : (text + codes) * scale;
        }
    }
    return x;
}

// `n_head` heads of the joint projection as rows of their own, from column `first` on.
rows split_heads(const evaluation & ev, const rows & qkv, int64_t first, int64_t n_head) {
    const int64_t width = n_head * ev.net.head_size;

    rows heads(qkv.n * n_head, ev.net.head_size);  // (n_tokens * n_head, head_size)
    for (int64_t t = 0; t < qkv.n; ++t) {
        std::copy_n(qkv[t] + first, width, heads.values.data() + t * width);
    }
    return heads;
}

// x: (n_tokens * n_head, head_size)
rows rope(const evaluation & ev, rows x, int64_t n_head) {
    const int64_t n_pairs = x.width / 2;
    for (int64_t h = 0; h < x.n; ++h) {
        const double position = double(ev.session.n_past + h / n_head);
        for (int64_t i = 0; i < n_pairs; ++i) {
            const double angle = position * std::pow(ev.net.cfg.rope_base, -2.0 * double(i) / double(x.width));
            const bool   neox  = ev.has(REF_FAULT_ROPE_NEOX);
            double &     a     = x[h][neox ? i : 2 * i];
            double &     b     = x[h][neox ? i + n_pairs : 2 * i + 1];

            const double rotated_a = a * std::cos(angle) - b * std::sin(angle);
            const double rotated_b = a * std::sin(angle) + b * std::cos(angle);
            a                      = rotated_a;
            b                      = rotated_b;
        }
    }
    return x;
}

double root_mean_square(const rows & x) {
    double sum = 0.0;
    for (double value : x.values) {
        sum += value * value;
    }
    return std::sqrt(sum / double(x.values.size()));
}

// What a cache of halves holds of a batch. Through float, because that is the precision from which the cache of the real
// graph is rounded.
std::vector<double> halves(const rows & batch, const stored_rows & cache) {
    const bool   guided = cache.guide.size() == batch.values.size();
    const double most   = cache.tolerance * root_mean_square(batch);

    std::vector<double> out;
    for (size_t i = 0; i < batch.values.size(); ++i) {
        const double mine   = batch.values[i];
        const bool   follow = guided && std::abs(double(cache.guide[i]) - mine) <= most;
        out.push_back(round_to_half(follow ? cache.guide[i] : float(mine)));
    }
    return out;
}

// Stores the keys (or values) of this batch and returns all those that its attention reads.
rows store_and_join(const evaluation & ev, stored_rows & cache, const rows & batch) {
    const ref_cache           rounding = ev.session.rounding;
    const int64_t             n_past   = ev.session.n_past;
    const int64_t             kv_size  = ev.net.kv_size;
    const std::vector<double> kept     = rounding == REF_CACHE_EXACT ? batch.values : halves(batch, cache);

    cache.guide.clear();
    cache.values.resize(size_t(n_past * kv_size));  // also drops what an evaluation that failed half-way left
    cache.values.insert(cache.values.end(), kept.begin(), kept.end());

    rows joined(n_past + ev.n_tokens, kv_size);  // (n_past + n_tokens, kv_size)
    joined.values = cache.values;
    if (rounding == REF_CACHE_PAST_F16) {
        std::copy(batch.values.begin(), batch.values.end(), joined[n_past]);
    }
    return joined;
}

// q: (n_tokens * n_head, head_size); k, v: (n_past + n_tokens, kv_size)
rows attend(const evaluation & ev, const rows & q, const rows & k, const rows & v) {
    const ref_config & cfg        = ev.net.cfg;
    const int64_t      head_size  = ev.net.head_size;
    const int64_t      n_repeat   = cfg.n_head / cfg.n_head_kv;
    const int64_t      offset     = ev.has(REF_FAULT_MASK_WITHOUT_OFFSET) ? 0 : ev.session.n_past;
    const double       attn_scale = 1.0 / std::sqrt(double(head_size));

    rows out(ev.n_tokens, ev.net.q_size);  // (n_tokens, q_size)
    for (int64_t t = 0; t < ev.n_tokens; ++t) {
        for (int64_t h = 0; h < cfg.n_head; ++h) {
            const int64_t  h_kv   = ev.has(REF_FAULT_TILED_HEADS) ? h % cfg.n_head_kv : h / n_repeat;
            const double * q_head = q[t * cfg.n_head + h];
            double *       result = out[t] + h * head_size;

            std::vector<double> p(size_t(offset + t + 1));  // columns after these are masked
            for (size_t c = 0; c < p.size(); ++c) {
                const double * k_head = k[int64_t(c)] + h_kv * head_size;
                for (int64_t i = 0; i < head_size; ++i) {
                    p[c] += q_head[i] * k_head[i];
                }
                p[c] *= attn_scale;
            }
            softmax(p);
            for (size_t c = 0; c < p.size(); ++c) {
                const double * v_head = v[int64_t(c)] + h_kv * head_size;
                for (int64_t i = 0; i < head_size; ++i) {
                    result[i] += p[c] * v_head[i];
                }
            }
        }
    }
    return out;
}

rows attention(evaluation & ev, int64_t il, const rows & x) {
    const network &       net   = ev.net;
    const ref_config &    cfg   = net.cfg;
    const layer_weights & layer = net.layers[size_t(il)];
    kv_cache_layer &      cache = ev.session.cache[size_t(il)];

    const rows a   = ev.keep("attn_norm", il, rms_norm(x, layer.attention_norm, cfg.rms_eps));
    const rows qkv = ev.keep("qkv", il, linear(a, layer.wqkv, net.q_size + 2 * net.kv_size));

    rows q = split_heads(ev, qkv, 0, cfg.n_head);
    rows k = split_heads(ev, qkv, net.q_size, cfg.n_head_kv);
    rows v = split_heads(ev, qkv, net.q_size + net.kv_size, cfg.n_head_kv);
    if (cfg.qk_norm) {
        q = rms_norm(q, layer.q_norm, cfg.rms_eps);
        k = rms_norm(k, layer.k_norm, cfg.rms_eps);
    }
    q = ev.keep("q_rope", il, rope(ev, q, cfg.n_head));
    k = ev.keep("k_rope", il, rope(ev, k, cfg.n_head_kv));

    const rows keys   = store_and_join(ev, cache.k, k);
    const rows values = store_and_join(ev, cache.v, v);
    const rows out    = ev.keep("attn_out", il, attend(ev, q, keys, values));
    return linear(out, layer.wo, cfg.n_embd);
}

rows feed_forward(evaluation & ev, int64_t il, const rows & h) {
    const ref_config &    cfg   = ev.net.cfg;
    const layer_weights & layer = ev.net.layers[size_t(il)];

    const rows f    = ev.keep("ffn_norm", il, rms_norm(h, layer.ffn_norm, cfg.rms_eps));
    rows       gate = linear(f, layer.w1, cfg.n_ff);  // (n_tokens, n_ff)
    const rows up   = linear(f, layer.w3, cfg.n_ff);  // (n_tokens, n_ff)
    for (size_t i = 0; i < gate.values.size(); ++i) {
        gate.values[i] = silu(gate.values[i]) * up.values[i];
    }
    return ev.keep("ffn_out", il, linear(gate, layer.w2, cfg.n_embd));
}

rows block(evaluation & ev, int64_t il, const rows & x) {
    const rows h = ev.keep("ffn_inp", il, add(x, attention(ev, il, x)));
    return ev.keep("l_out", il, add(h, feed_forward(ev, il, h)));
}

rows last(const rows & x) {
    rows row(1, x.width);
    std::copy_n(x[x.n - 1], x.width, row[0]);
    return row;
}

void head(evaluation & ev, const rows & x) {
    const ref_config & cfg = ev.net.cfg;

    const rows y = ev.keep("result_norm", rms_norm(x, ev.net.norm, cfg.rms_eps));
    ev.keep("hidden", last(cfg.norm_hidden ? y : x));
    ev.keep("logits", linear(last(y), ev.net.output, cfg.n_vocab));
}

void forward(evaluation & ev, const int32_t * tokens) {
    rows x = ev.keep("embd", embed(ev, tokens));
    for (int64_t il = 0; il < ev.net.cfg.n_layer; ++il) {
        x = block(ev, il, x);
    }
    head(ev, x);
}

}  // namespace

//
// the C surface
//

extern "C" {

ref_model * ref_model_create(const ref_config * config, ref_error * err) {
    ref_model * model = nullptr;
    guard(err, [&] {
        check_config(*config);
        model = new ref_model{ *config, {} };
    });
    return model;
}

void ref_model_free(ref_model * model) {
    delete model;
}

int32_t ref_model_set_tensor(ref_model * model, const char * name, const float * values, int64_t n, ref_error * err) {
    return guard(err, [&] {
        if (n < 1) {
            fail("tensor %s has %lld values, expected at least 1", name, (long long) n);
        }
        std::vector<float> copy(values, values + n);
        model->tensors[name].swap(copy);
    });
}

ref_session * ref_session_create(const ref_model * model, ref_cache cache, ref_fault fault, ref_error * err) {
    ref_session * session = nullptr;
    guard(err, [&] {
        find_network(*model);  // a missing tensor is reported here, not at the first evaluation
        auto created      = std::make_unique<ref_session>();
        created->model    = model;
        created->rounding = cache;
        created->fault    = fault;
        created->cache.resize(size_t(model->cfg.n_layer));
        session = created.release();
    });
    return session;
}

void ref_session_free(ref_session * session) {
    delete session;
}

void ref_session_reset(ref_session * session) {
    session->n_past = 0;
}

int64_t ref_session_n_past(const ref_session * session) {
    return session->n_past;
}

int32_t ref_eval(ref_session * session, const int32_t * tokens, int64_t n_tokens, double * hidden, double * logits,
                 ref_error * err) {
    return guard(err, [&] {
        if (n_tokens < 1) {
            fail("n_tokens is %lld, expected at least 1", (long long) n_tokens);
        }
        evaluation ev = { find_network(*session->model), *session, n_tokens, {} };
        check_tokens(ev.net.cfg, tokens, n_tokens);
        forward(ev, tokens);

        const auto copy_out = [&](const char * name, double * out) {
            if (out) {
                std::copy(ev.trace[name].begin(), ev.trace[name].end(), out);
            }
        };
        copy_out("hidden", hidden);
        copy_out("logits", logits);
        session->trace.swap(ev.trace);
        session->n_past += n_tokens;
    });
}

int64_t ref_trace_size(const ref_session * session, const char * name) {
    const auto found = session->trace.find(name);
    return found == session->trace.end() ? -1 : int64_t(found->second.size());
}

int32_t ref_trace(const ref_session * session, const char * name, double * out, int64_t n, ref_error * err) {
    return guard(err, [&] {
        const int64_t size = ref_trace_size(session, name);
        if (size != n) {
            fail("trace %s has %lld values, %lld asked for", name, (long long) size, (long long) n);
        }
        const auto & values = session->trace.at(name);
        std::copy(values.begin(), values.end(), out);
    });
}

int32_t ref_follow(ref_session * session, int64_t il, const float * keys, const float * values, int64_t n,
                   double tolerance, ref_error * err) {
    return guard(err, [&] {
        kv_cache_layer & layer = session->cache.at(size_t(il));
        layer.k.guide.assign(keys, keys + n);
        layer.v.guide.assign(values, values + n);
        layer.k.tolerance = layer.v.tolerance = tolerance;
    });
}

float ref_round_to_half(float x) {
    return float(round_to_half(x));
}

}  // extern "C"
