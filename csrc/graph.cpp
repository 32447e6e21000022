#include "graph.h"

#include "attention.h"

#include <cmath>

namespace slowar {

namespace {

// What every part of the forward pass needs; the parts are its members so that they take only what differs.
class builder {
  public:
    builder(ggml_context * ctx, const graph_context & with, const graph_shape & shape)
        : ctx(ctx), w(with.w), c(with.w.hyper), with(with), shape(shape), n_tokens(shape.n_tokens) {
        out.nodes = ggml_new_graph_custom(ctx, with.max_nodes, /*grads =*/false);
    }

    graph forward() {
        inputs();
        ggml_tensor * x = embed();
        for (int il = 0; il < c.n_layer && x; il++) {
            x = block(x, il);
        }
        if (x) {
            head(x);
        }
        return out;
    }

  private:
    bool is_reference() const { return shape.attention == attention_path::reference; }

    // Behind the last layer's keys and values only the last position is asked for. The documented graph computes all.
    bool only_last(int il) const { return il == c.n_layer - 1 && !is_reference(); }

    void inputs() {
        out.in.tokens     = input(GGML_TYPE_I32, n_tokens, 1, "inp_tokens");
        out.in.codes      = input(GGML_TYPE_I32, n_tokens, c.n_codebook, "inp_codes");
        out.in.semantic   = input(GGML_TYPE_F32, 1, n_tokens, "inp_semantic");
        out.in.positions  = input(GGML_TYPE_I32, n_tokens, 1, "inp_positions");
        out.in.embd_scale = c.scale_codebook_embeddings ? input(GGML_TYPE_F32, 1, n_tokens, "inp_embd_scale") : nullptr;
        out.in.slots      = is_reference() ? nullptr : input(GGML_TYPE_I64, n_tokens, 1, "inp_slots");
        out.in.mask       = shape.n_kv > 0 ? input(GGML_TYPE_F16, shape.n_kv, n_tokens, "inp_mask") : nullptr;
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

    // nullptr: nothing behind the last layer's keys and values is asked for.
    ggml_tensor * block(ggml_tensor * x, int il) {
        const layer_weights & l = w.layers[size_t(il)];

        ggml_tensor * a = named(norm(x, l.attention_norm), "attn_norm", il);
        ggml_tensor * o = is_reference() ? attention_reference(a, l, il) : attention_flash(a, l, il);
        if (!o) {
            return nullptr;
        }
        if (only_last(il)) {
            x = last(x);
        }
        ggml_tensor * h = named(ggml_add(ctx, x, ggml_mul_mat(ctx, l.wo, o)), "ffn_inp", il);
        ggml_tensor * f = named(norm(h, l.ffn_norm), "ffn_norm", il);
        return named(ggml_add(ctx, h, feed_forward(f, l, il)), "l_out", il);
    }

    struct projections {
        ggml_tensor * q;  // [head_dim, n_head, n_tokens]
        ggml_tensor * k;  // [head_dim, n_head_kv, n_tokens]
        ggml_tensor * v;  // [head_dim, n_head_kv, n_tokens]
    };

    projections project(ggml_tensor * x, const layer_weights & l, int il) {
        ggml_tensor * qkv = named(ggml_mul_mat(ctx, l.wqkv, x), "qkv", il);  // [q_size + 2*kv_size, n_tokens]
        return { heads(qkv, 0, c.n_head), heads(qkv, c.n_head, c.n_head_kv),
                 heads(qkv, c.n_head + c.n_head_kv, c.n_head_kv) };
    }

    // Everything that meets the cache: q/k norm, then RoPE.
    ggml_tensor * turned(ggml_tensor * x, ggml_tensor * scale, ggml_tensor * positions, const char * name, int il) {
        return named(rope(c.attention_qk_norm ? norm(x, scale) : x, positions), name, il);
    }

    // The documented attention: past and batch joined in float32, every KV head repeated for the heads that share it.
    ggml_tensor * attention_reference(ggml_tensor * x, const layer_weights & l, int il) {
        const projections p = project(x, l, il);
        ggml_tensor *     q = turned(p.q, l.q_norm, out.in.positions, "q_rope", il);
        ggml_tensor *     k = turned(p.k, l.k_norm, out.in.positions, "k_rope", il);
        ggml_tensor *     v = named(ggml_cont(ctx, p.v), "v", il);

        with.cache.store(ctx, out.nodes, { k, v }, il, shape.n_past);
        if (shape.n_past > 0) {
            const kv past = with.cache.past(ctx, il, shape.n_past);
            k             = ggml_concat(ctx, past.k, k, 2);  // [head_dim, n_head_kv, n_kv]
            v             = ggml_concat(ctx, past.v, v, 2);
        }
        k = repeat_heads(k);  // [head_dim, n_head, n_kv]
        v = repeat_heads(v);

        q = ggml_permute(ctx, q, 0, 2, 1, 3);                  // [head_dim, n_tokens, n_head]
        k = ggml_permute(ctx, k, 0, 2, 1, 3);                  // [head_dim, n_kv, n_head]
        v = ggml_cont(ctx, ggml_permute(ctx, v, 1, 2, 0, 3));  // [n_kv, head_dim, n_head]

        ggml_tensor * s = ggml_mul_mat(ctx, k, q);  // [n_kv, n_tokens, n_head]
        s               = ggml_scale(ctx, s, attn_scale());
        s               = ggml_diag_mask_inf(ctx, s, shape.n_past);
        s               = named(ggml_soft_max(ctx, s), "attn_probs", il);

        ggml_tensor * o = ggml_mul_mat(ctx, v, s);           // [head_dim, n_tokens, n_head]
        o               = ggml_permute(ctx, o, 0, 2, 1, 3);  // [head_dim, n_head, n_tokens]
        return named(ggml_cont_2d(ctx, o, c.q_size(), n_tokens), "attn_out", il);
    }

    // Keys and values are stored first and read as they are stored, so that results do not depend on how a prompt is cut.
    ggml_tensor * attention_flash(ggml_tensor * x, const layer_weights & l, int il) {
        const projections p      = project(x, l, il);
        ggml_tensor *     k      = turned(p.k, l.k_norm, out.in.positions, "k_rope", il);
        const kv          stored = with.cache.stored(ctx, { k, p.v }, out.in.slots, il);
        ggml_tensor *     q      = p.q;
        ggml_tensor *     at     = out.in.positions;
        ggml_tensor *     mask   = out.in.mask;
        if (only_last(il)) {
            if (shape.out == output::nothing) {
                ggml_build_forward_expand(out.nodes, stored.k);
                ggml_build_forward_expand(out.nodes, stored.v);
                return nullptr;
            }
            q    = ggml_view_3d(ctx, q, c.head_dim, c.n_head, 1, q->nb[1], q->nb[2], size_t(n_tokens - 1) * q->nb[2]);
            at   = ggml_view_1d(ctx, at, 1, size_t(n_tokens - 1) * at->nb[0]);
            mask = mask ? ggml_view_2d(ctx, mask, shape.n_kv, 1, mask->nb[1], size_t(n_tokens - 1) * mask->nb[1])
                        : nullptr;
        }
        q = turned(q, l.q_norm, at, "q_rope", il);

        ggml_tensor * o = nullptr;
        if (shape.attention == attention_path::cpu && (!mask || q->ne[2] < cpu_attention_limit)) {
            o = cpu_attention(ctx, q, stored.k, stored.v, at, with.n_threads);
        } else {
            o = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), seen(stored.k), seen(stored.v), mask,
                                    attn_scale(), /*max_bias =*/0.0f, /*logit_softcap =*/0.0f);
            ggml_prec_set_acc(o, GGML_PREC_F32);
            o = ggml_reshape_2d(ctx, o, c.q_size(), o->ne[2]);
        }
        return named(o, "attn_out", il);  // [q_size, n_tokens]
    }

    // The first n_kv slots of a layer: [head_dim, n_kv, n_head_kv].
    ggml_tensor * seen(ggml_tensor * cache) {
        const size_t  head = ggml_row_size(cache->type, c.head_dim);
        ggml_tensor * x    = ggml_view_3d(ctx, cache, c.head_dim, c.n_head_kv, shape.n_kv, head, cache->nb[1], 0);
        return ggml_permute(ctx, x, 0, 2, 1, 3);
    }

    float attn_scale() const { return 1.0f / std::sqrt(float(c.head_dim)); }

    // n heads of the joined projection, from head `first` on: a view, not a copy.
    ggml_tensor * heads(ggml_tensor * qkv, int first, int n) {
        const size_t head = ggml_row_size(qkv->type, c.head_dim);
        return ggml_view_3d(ctx, qkv, c.head_dim, n, n_tokens, head, qkv->nb[1], size_t(first) * head);
    }

    // Adjacent pairs (x[2i], x[2i+1]) turn by position * freq_base^(-2i / head_dim).
    ggml_tensor * rope(ggml_tensor * x, ggml_tensor * positions) {
        return ggml_rope_ext(ctx, x, positions, nullptr, c.head_dim, GGML_ROPE_TYPE_NORMAL, c.n_ctx, c.rope_freq_base,
                             /*freq_scale =*/1.0f, /*ext_factor =*/0.0f, /*attn_factor =*/1.0f,
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
        ggml_tensor * y = named(norm(x, w.norm), "result_norm");
        ggml_tensor * h = last(y);
        out.hidden      = keep(c.norm_fastlayer_input ? h : last(x), "hidden");
        if (shape.out == output::full) {
            out.logits = keep(ggml_mul_mat(ctx, w.output, h), "logits");
        } else if (shape.out == output::semantic) {
            out.logits = keep(semantic_logits(h), "logits");
        }
    }

    // The semantic rows of the head in place, then one row for each extra id.
    ggml_tensor * semantic_logits(ggml_tensor * h) {
        ggml_tensor * y = ggml_mul_mat(ctx, head_rows(c.semantic_begin_id, c.n_semantic()), h);
        for (int32_t id : with.extra_ids) {
            y = ggml_concat(ctx, y, ggml_mul_mat(ctx, head_rows(id, 1), h), 0);
        }
        return y;
    }

    ggml_tensor * head_rows(int32_t first, int64_t n) {
        return ggml_view_2d(ctx, w.output, c.n_embd, n, w.output->nb[1], size_t(first) * w.output->nb[1]);
    }

    // The last position of [n_embd, n], copied: its source need not outlive the graph's reuse of memory.
    ggml_tensor * last(ggml_tensor * x) {
        return ggml_cont(ctx, ggml_view_1d(ctx, x, c.n_embd, size_t(x->ne[1] - 1) * x->nb[1]));
    }

    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * scale) {
        return ggml_mul(ctx, ggml_rms_norm(ctx, x, c.norm_rms_eps), scale);
    }

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1, const char * name) {
        ggml_tensor * t = ne1 == 1 ? ggml_new_tensor_1d(ctx, type, ne0) : ggml_new_tensor_2d(ctx, type, ne0, ne1);
        ggml_set_input(t);
        return named(t, name);
    }

    ggml_tensor * keep(ggml_tensor * t, const char * name) {
        ggml_set_output(t);
        ggml_build_forward_expand(out.nodes, t);
        return named(t, name);
    }

    ggml_tensor * named(ggml_tensor * t, const char * name) { return ggml_set_name(t, name); }

    ggml_tensor * named(ggml_tensor * t, const char * name, int il) { return ggml_format_name(t, "%s-%d", name, il); }

    ggml_context *        ctx;
    const weights &       w;
    const config &        c;
    const graph_context & with;
    const graph_shape &   shape;
    const int             n_tokens;
    graph                 out = {};
};

}  // namespace

graph build_graph(ggml_context * ctx, const graph_context & with, const graph_shape & shape) {
    return builder(ctx, with, shape).forward();
}

}  // namespace slowar
