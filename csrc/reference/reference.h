/* The Slow-AR forward pass in plain C++, in double precision and without ggml: what libslowar is compared with.
 *
 * Slow and simple on purpose. Weights are float32, every activation and every sum is a double, and the only rounding is the
 * one that `ref_cache` asks for. Used by the tests alone; never installed.
 *
 * Calls that can fail return 0 for success and put the reason of a failure into `err` (which may be NULL). A failed call
 * changes nothing. Nothing here is thread-safe: one thread per model and its sessions. */
#ifndef SLOWAR_REFERENCE_H
#define SLOWAR_REFERENCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cdef begin */
typedef struct ref_model   ref_model;
typedef struct ref_session ref_session;

typedef struct ref_error {
    char message[256];
} ref_error;

typedef struct ref_config {
    int32_t n_vocab;
    int32_t n_embd;
    int32_t n_ff;
    int32_t n_layer;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t n_codebook;
    int32_t codebook_size;
    int32_t semantic_begin; /* first and last id, both inclusive */
    int32_t semantic_end;
    double  rope_base;
    double  rms_eps;
    int32_t qk_norm; /* the rest are flags: 0 or 1 */
    int32_t scale_codebooks;
    int32_t tied_head;
    int32_t norm_hidden; /* `hidden` is taken after (1) or before (0) the final norm */
} ref_config;

/* How keys and values are rounded to half precision, ties to even. */
typedef enum ref_cache {
    REF_CACHE_EXACT,     /* never */
    REF_CACHE_PAST_F16,  /* when a later batch reads them; the batch that wrote them sees them unrounded */
    REF_CACHE_STORED_F16 /* before anyone reads them, the batch that wrote them included */
} ref_cache;

/* One wrong computation, planted to see whether a comparison notices it. */
typedef enum ref_fault {
    REF_FAULT_NONE,
    REF_FAULT_ROPE_NEOX,           /* rotates the pairs (i, i + d/2) in place of (2i, 2i + 1) */
    REF_FAULT_TILED_HEADS,         /* query head h reads KV head h % n_head_kv */
    REF_FAULT_MASK_WITHOUT_OFFSET, /* row i of a batch sees columns 0 .. i, whatever came before the batch */
    REF_FAULT_SCALE_WITHOUT_TEXT   /* the scale of a semantic position misses its text embedding */
} ref_fault;

/* A model starts without tensors. Returns NULL on a configuration that makes no sense. */
ref_model * ref_model_create(const ref_config * config, ref_error * err);
void        ref_model_free(ref_model * model);

/* Copies `n` values in row-major order. Names are those of the GGUF file; a name that the model does not need is kept and
 * ignored. Presence and sizes are checked when a session is created and again at every evaluation. */
int32_t ref_model_set_tensor(ref_model * model, const char * name, const float * values, int64_t n, ref_error * err);

/* The model must outlive its sessions. There is no limit on the number of positions but memory. */
ref_session * ref_session_create(const ref_model * model, ref_cache cache, ref_fault fault, ref_error * err);
void          ref_session_free(ref_session * session);
void          ref_session_reset(ref_session * session);
int64_t       ref_session_n_past(const ref_session * session);

/* Evaluates `n_tokens` positions of 1 + n_codebook integers each, position-major. `hidden` (n_embd) and `logits` (n_vocab)
 * are those of the last position; either may be NULL. */
int32_t ref_eval(ref_session * session, const int32_t * tokens, int64_t n_tokens, double * hidden, double * logits,
                 ref_error * err);

/* Settles rounding on the edge, for the next evaluation. A key or value that lies between two halves, nearer to the middle
 * than float32 can tell, may be stored as either. `keys` and `values` (n_tokens, kv_size each, n floats) are what another
 * program has in layer `il`, before rounding, for the positions that are about to be evaluated: where one is within
 * `tolerance` times the root mean square of this program's own, its half is the one stored. Where it is further off it is
 * not followed: the edge is settled, a difference is not hidden. Without rounding nothing is followed. */
int32_t ref_follow(ref_session * session, int64_t il, const float * keys, const float * values, int64_t n,
                   double tolerance, ref_error * err);

/* Intermediate values of the last evaluation, all its positions, position-major: embd, attn_norm-{il}, qkv-{il},
 * q_rope-{il}, k_rope-{il}, attn_out-{il}, ffn_inp-{il}, ffn_norm-{il}, ffn_out-{il}, l_out-{il}, result_norm; and hidden
 * and logits of the last position. The size counts all values, -1 if there is no such name. */
int64_t ref_trace_size(const ref_session * session, const char * name);
int32_t ref_trace(const ref_session * session, const char * name, double * out, int64_t n, ref_error * err);

/* The value that survives a trip through IEEE half precision. */
float ref_round_to_half(float x);
/* cdef end */

#ifdef __cplusplus
}
#endif

#endif
