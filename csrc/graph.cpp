#include "graph.h"

#include <cmath>

namespace slowar {

namespace {

// What every part of the forward pass needs; the parts are its members so that they take only what differs.
class builder {
  public:
    builder(ggml_context * ctx, const weights & w, const kv_cache & cache, int n_past, int n_tokens)
        : ctx(ctx), w(w), c(w.hyper), cache(cache), n_past(n_past), n_tokens(n_tokens) {
        out.nodes = ggml_new_graph_custom(ctx, max_graph_nodes, /*grads =*/false);
    }

    graph forward() {
        inputs();
        ggml_tensor * x = embed();
        for (int il = 0; il < c.n_layer; il++) {
            x = block(x, il);
        }
        head(x);
        return out;
    }

  private:
    void inputs() {
        out.in.tokens     = input(GGML_TYPE_I32, n_tokens, 1, "inp_tokens");
        out.in.codes      = input(GGML_TYPE_I32, n_tokens, c.n_codebook, "inp_codes");
        out.in.semantic   = input(GGML_TYPE_F32, 1, n_tokens, "inp_semantic");
        out.in.positions  = input(GGML_TYPE_I32, n_tokens, 1, "inp_positions");
        out.in.embd_scale = c.scale_codebook_embeddings ? input(GGML_TYPE_F32, 1, n_tokens, "inp_embd_scale") : nullptr;
    }

    // x = (embeddings[id] + sum over codebooks of codebook_embeddings[row] * semantic) * scale
    ggml_tensor * embed() {
        ggml_tensor * x   = ggml_get_rows(ctx, w.embeddings, out.in.tokens);  // [n_embd, n_tokens]
        ggml_tensor * sum = codebook(0);
        for (int cb = 1; cb < c.n_codebook; cb++) {
            sum = ggml_add(ctx, sum, codebook(cb));
        }
        x = ggml_add(ctx, x, ggml_mul(ctx, sum, out.in.semantic));
        if (out.in.embd_scale) {
            x = ggml_mul(ctx, x, out.in.embd_scale);
        }
        return named(x, "embd");
    }

    ggml_tensor * codebook(int cb) {
        ggml_tensor * rows = ggml_view_1d(ctx, out.in.codes, n_tokens, size_t(cb) * out.in.codes->nb[1]);
        return ggml_get_rows(ctx, w.codebook_embeddings, rows);  // [n_embd, n_tokens]
    }

    ggml_tensor * block(ggml_tensor * x, int il) {
        const layer_weights & l = w.layers[size_t(il)];

        ggml_tensor * a = named(norm(x, l.attention_norm), "attn_norm", il);
        ggml_tensor * h = named(ggml_add(ctx, x, attention(a, l, il)), "ffn_inp", il);
        ggml_tensor * f = named(norm(h, l.ffn_norm), "ffn_norm", il);
        return named(ggml_add(ctx, h, feed_forward(f, l, il)), "l_out", il);
    }

    ggml_tensor * attention(ggml_tensor * x, const layer_weights & l, int il) {
        ggml_tensor * qkv = named(ggml_mul_mat(ctx, l.wqkv, x), "qkv", il);  // [q_size + 2*kv_size, n_tokens]
        ggml_tensor * q   = heads(qkv, 0, c.n_head);                         // [head_dim, n_head, n_tokens]
        ggml_tensor * k   = heads(qkv, c.n_head, c.n_head_kv);               // [head_dim, n_head_kv, n_tokens]
        ggml_tensor * v   = heads(qkv, c.n_head + c.n_head_kv, c.n_head_kv);

        if (c.attention_qk_norm) {
            q = norm(q, l.q_norm);
            k = norm(k, l.k_norm);
        }
        q = named(rope(q), "q_rope", il);
        k = named(rope(k), "k_rope", il);
        v = named(ggml_cont(ctx, v), "v", il);

        cache.store(ctx, out.nodes, { k, v }, il, n_past);
        if (n_past > 0) {
            const kv past = cache.past(ctx, il, n_past);
            k             = ggml_concat(ctx, past.k, k, 2);  // [head_dim, n_head_kv, n_kv]
            v             = ggml_concat(ctx, past.v, v, 2);
        }
        k = repeat_heads(k);  // [head_dim, n_head, n_kv]
        v = repeat_heads(v);

        q = ggml_permute(ctx, q, 0, 2, 1, 3);                  // [head_dim, n_tokens, n_head]
        k = ggml_permute(ctx, k, 0, 2, 1, 3);                  // [head_dim, n_kv, n_head]
        v = ggml_cont(ctx, ggml_permute(ctx, v, 1, 2, 0, 3));  // [n_kv, head_dim, n_head]

        ggml_tensor * p = ggml_mul_mat(ctx, k, q);  // [n_kv, n_tokens, n_head]
        p               = ggml_scale(ctx, p, 1.0f / std::sqrt(float(c.head_dim)));
        p               = ggml_diag_mask_inf(ctx, p, n_past);
        p               = named(ggml_soft_max(ctx, p), "attn_probs", il);

        ggml_tensor * o = ggml_mul_mat(ctx, v, p);           // [head_dim, n_tokens, n_head]
        o               = ggml_permute(ctx, o, 0, 2, 1, 3);  // [head_dim, n_head, n_tokens]
        o               = named(ggml_cont_2d(ctx, o, c.q_size(), n_tokens), "attn_out", il);
        return ggml_mul_mat(ctx, l.wo, o);  // [n_embd, n_tokens]
    }

    // n heads of the joined projection, from head `first` on: a view, not a copy.
    ggml_tensor * heads(ggml_tensor * qkv, int first, int n) {
        const size_t head = ggml_row_size(qkv->type, c.head_dim);
        return ggml_view_3d(ctx, qkv, c.head_dim, n, n_tokens, head, qkv->nb[1], size_t(first) * head);
    }

    // Adjacent pairs (x[2i], x[2i+1]) turn by position * freq_base^(-2i / head_dim).
    ggml_tensor * rope(ggml_tensor * x) {
        return ggml_rope_ext(ctx, x, out.in.positions, nullptr, c.head_dim, GGML_ROPE_TYPE_NORMAL, c.n_ctx,
                             c.rope_freq_base, /*freq_scale =*/1.0f, /*ext_factor =*/0.0f, /*attn_factor =*/1.0f,
                             /*beta_fast =*/1.0f, /*beta_slow =*/1.0f);
    }

    // Every KV head n_head / n_head_kv times in a row, so that query head h finds the one it shares.
    ggml_tensor * repeat_heads(ggml_tensor * x) {
        const int64_t n_kv = x->ne[2];
        const int64_t n    = c.n_head / c.n_head_kv;
        if (n == 1) {
            return x;
        }
        x = ggml_reshape_4d(ctx, x, c.head_dim, 1, c.n_head_kv, n_kv);
        x = ggml_repeat_4d(ctx, x, c.head_dim, n, c.n_head_kv, n_kv);
        return ggml_reshape_3d(ctx, x, c.head_dim, c.n_head, n_kv);
    }

    ggml_tensor * feed_forward(ggml_tensor * x, const layer_weights & l, int il) {
        ggml_tensor * gate = ggml_mul_mat(ctx, l.w1, x);          // [n_ff, n_tokens]
        ggml_tensor * up   = ggml_mul_mat(ctx, l.w3, x);          // [n_ff, n_tokens]
        ggml_tensor * y    = ggml_swiglu_split(ctx, gate, up);    // silu(gate) * up
        return named(ggml_mul_mat(ctx, l.w2, y), "ffn_out", il);  // [n_embd, n_tokens]
    }

    void head(ggml_tensor * x) {
        ggml_tensor * y    = named(norm(x, w.norm), "result_norm");
        ggml_tensor * last = this->last(y);
        out.hidden         = named(c.norm_fastlayer_input ? last : this->last(x), "hidden");
        out.logits         = named(ggml_mul_mat(ctx, w.output, last), "logits");
        for (ggml_tensor * t : { out.hidden, out.logits }) {
            ggml_set_output(t);
            ggml_build_forward_expand(out.nodes, t);
        }
    }

    // The last position of [n_embd, n_tokens], copied: its source need not outlive the graph's reuse of memory.
    ggml_tensor * last(ggml_tensor * x) {
        return ggml_cont(ctx, ggml_view_1d(ctx, x, c.n_embd, size_t(n_tokens - 1) * x->nb[1]));
    }

    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * scale) {
        return ggml_mul(ctx, ggml_rms_norm(ctx, x, c.norm_rms_eps), scale);
    }

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1, const char * name) {
        ggml_tensor * t = ne1 == 1 ? ggml_new_tensor_1d(ctx, type, ne0) : ggml_new_tensor_2d(ctx, type, ne0, ne1);
        ggml_set_input(t);
        return named(t, name);
    }

    ggml_tensor * named(ggml_tensor * t, const char * name) { return ggml_set_name(t, name); }

    ggml_tensor * named(ggml_tensor * t, const char * name, int il) { return ggml_format_name(t, "%s-%d", name, il); }

    ggml_context *   ctx;
    const weights &  w;
    const config &   c;
    const kv_cache & cache;
    const int        n_past;
    const int        n_tokens;
    graph            out = {};
};

}  // namespace

graph build_graph(ggml_context * ctx, const weights & w, const kv_cache & cache, int n_past, int n_tokens) {
    return builder(ctx, w, cache, n_past, n_tokens).forward();
}

}  // namespace slowar
