#include "graph.h"

#include "attention.h"
#include "matmul.h"

#include <algorithm>
#include <cmath>

namespace slowar {

namespace {

// What every part of the forward pass needs; the parts are its members so that they take only what differs.
class builder {
  public:
    builder(ggml_context * ctx, const graph_context & with, const graph_shape & shape)
        : ctx(ctx), w(with.w), c(with.w.hyper), with(with), shape(shape), n_tokens(shape.n_tokens()) {
        out.nodes = ggml_new_graph_custom(ctx, with.max_nodes, /*grads =*/false);
    }

    graph forward() {
        inputs();
        ggml_tensor * x = c.is_fast() ? embed_fast() : embed();
        for (int il = 0; il < c.n_layer; il++) {
            begin_after(x);
            x = block(x, il);
        }
        if (x) {
            begin_after(x);
            head(x);
        }
        return out;
    }

  private:
    bool is_reference() const { return shape.is_reference(); }

    // Nobody asked for ggml's own kernels or the documented graph, and nothing is on a device.
    bool is_ours() const {
        const auto is_cpu = [](const segment & s) {
            return s.attention == attention_path::cpu;
        };
        return with.w.first_device() < 0 && std::all_of(shape.segments.begin(), shape.segments.end(), is_cpu);
    }

    bool is_alone() const { return shape.segments.size() == 1; }

    // Behind the last layer's keys and values only the last positions are asked for. The documented graph computes all.
    bool only_last(int il) const { return il == c.n_layer - 1 && !is_reference(); }

    void inputs() {
        if (c.is_fast()) {
            const int64_t n_hidden = shape.has_hidden ? int64_t(shape.segments.size()) : 0;
            out.in.tokens          = input(GGML_TYPE_I32, n_tokens - n_hidden, 1, "inp_tokens");
            out.in.hidden          = n_hidden > 0 ? input(GGML_TYPE_F32, c.n_hidden, n_hidden, "inp_hidden") : nullptr;
            out.in.order           = n_hidden > 1 ? input(GGML_TYPE_I32, n_tokens, 1, "inp_order") : nullptr;
        } else {
            out.in.tokens   = input(GGML_TYPE_I32, n_tokens, 1, "inp_tokens");
            out.in.codes    = input(GGML_TYPE_I32, n_tokens, c.n_codebook, "inp_codes");
            out.in.semantic = input(GGML_TYPE_F32, 1, n_tokens, "inp_semantic");
        }
        out.in.positions  = input(GGML_TYPE_I32, n_tokens, 1, "inp_positions");
        out.in.embd_scale = c.scale_codebook_embeddings ? input(GGML_TYPE_F32, 1, n_tokens, "inp_embd_scale") : nullptr;
        out.in.slots      = is_reference() ? nullptr : input(GGML_TYPE_I64, n_tokens, 1, "inp_slots");
        if (!is_alone() && !shape.all_single()) {
            out.in.last           = input(GGML_TYPE_I32, int64_t(shape.segments.size()), 1, "inp_last");
            out.in.last_positions = input(GGML_TYPE_I32, int64_t(shape.segments.size()), 1, "inp_last_positions");
        }
        int64_t n_mask = 0;
        for (const segment & s : shape.segments) {
            n_mask += int64_t(s.n_kv) * s.n_tokens;
        }
        out.in.mask = n_mask > 0 ? input(GGML_TYPE_F16, n_mask, 1, "inp_mask") : nullptr;
        n_mask      = 0;
        for (const segment & s : shape.segments) {
            const size_t row = size_t(s.n_kv) * sizeof(ggml_fp16_t);
            out.in.masks.push_back(s.n_kv > 0 ? ggml_view_2d(ctx, out.in.mask, s.n_kv, s.n_tokens, row, size_t(n_mask))
                                              : nullptr);
            n_mask += int64_t(row) * s.n_tokens;
        }
    }

    // All that x depends on comes before what follows.
    void begin_after(ggml_tensor * x) {
        ggml_build_forward_expand(out.nodes, x);
        out.begins.push_back(ggml_graph_n_nodes(out.nodes));
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

    // x = project_in * hidden + bias at a frame's first position, then embeddings[code]
    ggml_tensor * embed_fast() {
        ggml_tensor * x = ggml_get_rows(ctx, w.embeddings, out.in.tokens);  // [n_embd, n codes]
        if (shape.has_hidden) {
            ggml_tensor * h = w.project_in ? multiplied(w.project_in, out.in.hidden) : out.in.hidden;
            h               = w.project_in_bias ? ggml_add(ctx, h, w.project_in_bias) : h;
            x               = ggml_concat(ctx, h, x, 1);  // [n_embd, n_tokens], the hidden vectors first
            x               = out.in.order ? ggml_get_rows(ctx, x, out.in.order) : x;
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
        ggml_tensor * h = named(ggml_add(ctx, x, multiplied(l.wo, o)), "ffn_inp", il);
        ggml_tensor * f = named(norm(h, l.ffn_norm), "ffn_norm", il);
        return named(ggml_add(ctx, h, feed_forward(f, l, il)), "l_out", il);
    }

    struct projections {
        ggml_tensor * q;  // [head_dim, n_head, n_tokens]
        ggml_tensor * k;  // [head_dim, n_head_kv, n_tokens]
        ggml_tensor * v;  // [head_dim, n_head_kv, n_tokens]
    };

    projections project(ggml_tensor * x, const layer_weights & l, int il) {
        ggml_tensor * qkv = named(multiplied(l.wqkv, x), "qkv", il);  // [q_size + 2*kv_size, n_tokens]
        return { heads(qkv, 0, c.n_head), heads(qkv, c.n_head, c.n_head_kv),
                 heads(qkv, c.n_head + c.n_head_kv, c.n_head_kv) };
    }

    // Everything that meets the cache: q/k norm, then RoPE.
    ggml_tensor * turned(ggml_tensor * x, ggml_tensor * scale, ggml_tensor * positions, const char * name, int il) {
        return named(rope(c.attention_qk_norm ? norm(x, scale) : x, positions), name, il);
    }

    // The documented attention: past and batch joined in float32, every KV head repeated for the heads that share it.
    ggml_tensor * attention_reference(ggml_tensor * x, const layer_weights & l, int il) {
        projections p = project(x, l, il);
        p.q           = turned(p.q, l.q_norm, out.in.positions, "q_rope", il);
        p.k           = turned(p.k, l.k_norm, out.in.positions, "k_rope", il);
        p.v           = named(ggml_cont(ctx, p.v), "v", il);

        std::vector<ggml_tensor *> o;
        int                        first = 0;
        for (const segment & s : shape.segments) {
            o.push_back(attend_reference(part(p, first, s.n_tokens), s, il));
            first += s.n_tokens;
        }
        return named(joined(o.data(), o.size()), "attn_out", il);  // [q_size, n_tokens]
    }

    ggml_tensor * attend_reference(projections p, const segment & s, int il) {
        s.cache->store(ctx, out.nodes, { p.k, p.v }, il, s.n_past);
        if (s.n_past > 0) {
            const kv past = s.cache->past(ctx, il, s.n_past);
            p.k           = ggml_concat(ctx, past.k, p.k, 2);  // [head_dim, n_head_kv, n_kv]
            p.v           = ggml_concat(ctx, past.v, p.v, 2);
        }
        ggml_tensor * k = repeat_heads(p.k);  // [head_dim, n_head, n_kv]
        ggml_tensor * v = repeat_heads(p.v);

        ggml_tensor * q = ggml_permute(ctx, p.q, 0, 2, 1, 3);                // [head_dim, n_tokens, n_head]
        k               = ggml_permute(ctx, k, 0, 2, 1, 3);                  // [head_dim, n_kv, n_head]
        v               = ggml_cont(ctx, ggml_permute(ctx, v, 1, 2, 0, 3));  // [n_kv, head_dim, n_head]

        ggml_tensor * w = ggml_mul_mat(ctx, k, q);  // [n_kv, n_tokens, n_head]
        w               = ggml_scale(ctx, w, attn_scale());
        w               = ggml_diag_mask_inf(ctx, w, s.n_past);
        w               = named(ggml_soft_max(ctx, w), "attn_probs", il);

        ggml_tensor * o = ggml_mul_mat(ctx, v, w);           // [head_dim, n_tokens, n_head]
        o               = ggml_permute(ctx, o, 0, 2, 1, 3);  // [head_dim, n_head, n_tokens]
        return ggml_cont_2d(ctx, o, c.q_size(), s.n_tokens);
    }

    // Keys and values are stored first and read as they are stored, so that results do not depend on how a prompt is cut.
    ggml_tensor * attention_flash(ggml_tensor * x, const layer_weights & l, int il) {
        const projections p = project(x, l, il);
        ggml_tensor *     k = turned(p.k, l.k_norm, out.in.positions, "k_rope", il);

        std::vector<kv> stored;
        int             first = 0;
        for (const segment & s : shape.segments) {
            const kv batch = { part(k, 2, first, s.n_tokens), part(p.v, 2, first, s.n_tokens) };
            stored.push_back(s.cache->stored(ctx, batch, part(out.in.slots, 0, first, s.n_tokens), il));
            ggml_build_forward_expand(out.nodes, stored.back().k);
            ggml_build_forward_expand(out.nodes, stored.back().v);
            first += s.n_tokens;
        }
        if (only_last(il) && shape.out == output::nothing) {
            return nullptr;
        }
        queries all = only_last(il) ? last_queries(p.q) : queries{ p.q, out.in.positions };
        all.q       = turned(all.q, l.q_norm, all.positions, "q_rope", il);

        std::vector<ggml_tensor *> o;
        first = 0;
        for (size_t i = 0; i < stored.size();) {
            const int     n_each = only_last(il) ? 1 : shape.segments[i].n_tokens;
            const size_t  n      = n_alike(i, il);
            const int64_t n_all  = int64_t(n) * n_each;
            const queries those  = { part(all.q, 2, first, n_all), part(all.positions, 0, first, n_all) };
            o.push_back(attend_flash(those, { &stored[i], &stored[i] + n }, i, il));
            first += int(n_all);
            i     += n;
        }
        return named(joined(o.data(), o.size()), "attn_out", il);  // [q_size, n_tokens or n segments]
    }

    struct queries {
        ggml_tensor * q;          // [head_dim, n_head, n]
        ggml_tensor * positions;  // [n]
    };

    bool has_our_attention(const segment & s, int il) const {
        return s.attention == attention_path::cpu && s.cache->is_on_cpu(il);
    }

    // How many segments from the i-th on one node can attend to: on the CPU, with as many positions each.
    size_t n_alike(size_t i, int il) const {
        const auto & s   = shape.segments;
        size_t       end = i + 1;
        while (end < s.size() && end - i < max_caches && has_our_attention(s[i], il) && has_our_attention(s[end], il) &&
               (only_last(il) || s[end].n_tokens == s[i].n_tokens)) {
            end++;
        }
        return end - i;
    }

    // The last positions of segments from the i-th on, those that `from` has, over their caches.
    ggml_tensor * attend_flash(const queries & from, const std::vector<kv> & stored, size_t i, int il) {
        const segment & s = shape.segments[i];
        const int64_t   n = from.q->ne[2];
        if (has_our_attention(s, il)) {
            return cpu_attention(ctx, from.q, stored, from.positions, with.n_threads);
        }
        ggml_tensor * mask = part(out.in.masks[i], 1, int(s.n_tokens - n), n);
        ggml_tensor * o    = ggml_flash_attn_ext(ctx, ggml_permute(ctx, from.q, 0, 2, 1, 3), seen(stored[0].k, s),
                                                 seen(stored[0].v, s), mask, attn_scale(), /*max_bias =*/0.0f,
                                                 /*logit_softcap =*/0.0f);
        ggml_prec_set_acc(o, GGML_PREC_F32);
        return ggml_reshape_2d(ctx, o, c.q_size(), o->ne[2]);
    }

    // The query of each segment's last position.
    queries last_queries(ggml_tensor * q) {
        if (is_alone()) {
            return { part(q, 2, n_tokens - 1, 1), part(out.in.positions, 0, n_tokens - 1, 1) };
        }
        if (shape.all_single()) {
            return { q, out.in.positions };
        }
        ggml_tensor * rows = ggml_view_2d(ctx, q, c.q_size(), n_tokens, q->nb[2], 0);
        rows               = ggml_get_rows(ctx, rows, out.in.last);
        return { ggml_reshape_3d(ctx, rows, c.head_dim, c.n_head, rows->ne[1]), out.in.last_positions };
    }

    // The first n_kv slots of a layer: [head_dim, n_kv, n_head_kv].
    ggml_tensor * seen(ggml_tensor * cache, const segment & s) {
        const size_t  head = ggml_row_size(cache->type, c.head_dim);
        ggml_tensor * x    = ggml_view_3d(ctx, cache, c.head_dim, c.n_head_kv, s.n_kv, head, cache->nb[1], 0);
        return ggml_permute(ctx, x, 0, 2, 1, 3);
    }

    // n positions of x from `first` on, which run along dimension `dim`: a view, or x itself when that is all.
    ggml_tensor * part(ggml_tensor * x, int dim, int first, int64_t n) {
        if (n == x->ne[dim]) {
            return x;
        }
        int64_t ne[GGML_MAX_DIMS];
        std::copy_n(x->ne, GGML_MAX_DIMS, ne);
        ne[dim] = n;
        return ggml_view_4d(ctx, x, ne[0], ne[1], ne[2], ne[3], x->nb[1], x->nb[2], x->nb[3],
                            size_t(first) * x->nb[dim]);
    }

    projections part(const projections & p, int first, int n) {
        return { part(p.q, 2, first, n), part(p.k, 2, first, n), part(p.v, 2, first, n) };
    }

    // Segments side by side again: [q_size, sum of their positions]. Halves, so that each is copied few times.
    ggml_tensor * joined(ggml_tensor ** o, size_t n) {
        return n == 1 ? o[0] : ggml_concat(ctx, joined(o, n / 2), joined(o + n / 2, n - n / 2), 1);
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
        ggml_tensor * gate = multiplied(l.w1, x);               // [n_ff, n_tokens]
        ggml_tensor * up   = multiplied(l.w3, x);               // [n_ff, n_tokens]
        ggml_tensor * y    = ggml_swiglu_split(ctx, gate, up);  // silu(gate) * up
        return named(multiplied(l.w2, y), "ffn_out", il);       // [n_embd, n_tokens]
    }

    void head(ggml_tensor * x) {
        ggml_tensor * y = named(norm(x, w.norm), "result_norm");
        ggml_tensor * h = last(y);
        out.hidden      = keep(c.norm_fastlayer_input ? h : last(x), "hidden");
        if (shape.out == output::full) {
            out.logits = keep(multiplied(w.output, h), "logits");
        } else if (shape.out == output::semantic) {
            out.logits = keep(semantic_logits(h), "logits");
        }
    }

    // The semantic rows of the head in place, then one row for each extra id.
    ggml_tensor * semantic_logits(ggml_tensor * h) {
        ggml_tensor * y = multiplied(head_rows(c.semantic_begin_id, c.n_semantic()), h);
        for (int32_t id : with.extra_ids) {
            y = ggml_concat(ctx, y, multiplied(head_rows(id, 1), h), 0);
        }
        return y;
    }

    ggml_tensor * head_rows(int32_t first, int64_t n) {
        return ggml_view_2d(ctx, w.output, c.n_embd, n, w.output->nb[1], size_t(first) * w.output->nb[1]);
    }

    // Each segment's last position of [n_embd, n], copied: its source need not outlive the graph's reuse of memory.
    ggml_tensor * last(ggml_tensor * x) {
        if (is_alone()) {
            return ggml_cont(ctx, ggml_view_1d(ctx, x, c.n_embd, size_t(x->ne[1] - 1) * x->nb[1]));
        }
        const bool is_done = x->ne[1] == int64_t(shape.segments.size());
        return is_done ? ggml_cont(ctx, x) : ggml_get_rows(ctx, x, out.in.last);
    }

    // w * x, by our own nodes where they are better or nothing else can; gate and up share the rounding of their x.
    ggml_tensor * multiplied(ggml_tensor * w, ggml_tensor * x) {
        if (!is_packed(w) && (!is_ours() || !has_product(w))) {
            return ggml_mul_mat(ctx, w, x);
        }
        if (x != rounding.of || w->type != rounding.type || rounding.n_products == max_products) {
            rounding = { x, w->type, rounded(ctx, w->type, x), 0 };
        }
        return product(ctx, w, rounding.x, rounding.n_products++, with.n_threads);
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

    // The last one made.
    struct {
        ggml_tensor * of         = nullptr;
        ggml_type     type       = GGML_TYPE_COUNT;
        ggml_tensor * x          = nullptr;
        int           n_products = 0;
    } rounding;

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
