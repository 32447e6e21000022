/*
 * slowar.h - the Slow-AR transformer of Fish Audio's S2 Pro on ggml: the C contract of libslowar.
 *
 * One file, three readers: C99, C++17 and cffi. cffi reads what stands between the two `cdef` marks, so no
 * preprocessor line may stand there. No ggml type appears in it.
 *
 * Two nouns. A model is weights on devices and never changes once open; a session is the KV cache and the position of
 * one sequence. Many sessions may share one model; a batch is what evaluates several of them at once.
 *
 * Rules that hold for every function:
 *   - What can fail returns a slowar_status and writes the reason to `err` (which may be NULL). A failing call leaves
 *     model, session and position as they were, unless its own comment says otherwise.
 *   - Nothing aborts, prints or throws. What ggml itself had to say is kept for slowar_log_take.
 *   - A handle belongs to the process that made it. After fork() the child gets SLOWAR_STATE from every call on it, and
 *     closing it there does nothing (its threads and device contexts were not inherited).
 *   - Calls on different handles may run in different threads at once. Calls on one session must not overlap: the
 *     caller serialises them, slowar_session_close included. slowar_eval_batch is a call on the batch and on the session
 *     of each item.
 *   - All integers are host order; all floats are IEEE float32; text is UTF-8 and NUL-terminated.
 */
#ifndef SLOWAR_H
#define SLOWAR_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#    pragma GCC visibility push(default)
#endif

/* cdef begin */

/* ---- outcomes --------------------------------------------------------------------------------------------------- */

typedef enum slowar_status {
    SLOWAR_OK           = 0,
    SLOWAR_ARGUMENT     = 1, /* an argument is outside its range */
    SLOWAR_OS           = 2, /* the operating system refused; os_errno says why */
    SLOWAR_FORMAT       = 3, /* the file is not a model this library can run */
    SLOWAR_DEVICE       = 4, /* no such device, or it cannot be opened */
    SLOWAR_MEMORY       = 5, /* no memory for weights, cache or compute */
    SLOWAR_CONTEXT_FULL = 6, /* n_past + n_tokens > max_seq_len */
    SLOWAR_STATE        = 7, /* no cache yet, or a handle of another process */
    SLOWAR_COMPUTE      = 8, /* the device failed while evaluating */
    SLOWAR_INTERNAL     = 9  /* a defect of this library */
} slowar_status;

/* Written by a failing call alone. `message` is one sentence: what was expected, what came, where. */
typedef struct slowar_error {
    int32_t os_errno; /* with SLOWAR_OS: the errno value; otherwise 0 */
    char    message[1020];
} slowar_error;

/* Increases whenever a signature or a struct of this file changes; the Python side refuses another number. */
int32_t slowar_abi(void);

/* "ggml 0.25.3 (commit), CPU code: x86-64-v3, backends: CPU" - static storage. The code is for an x86-64 level, for the
 * processor of the build ("native") or for its family ("generic"). */
const char * slowar_build_info(void);

/* Moves what ggml logged in this thread's calls (at most the last 8 KiB) to `out` and returns its length; 0: nothing.
 * With out = NULL: only tells the length. */
int32_t slowar_log_take(char * out, int32_t size);

/* ---- devices ---------------------------------------------------------------------------------------------------- */

typedef enum slowar_device_type {
    SLOWAR_DEVICE_CPU   = 0,
    SLOWAR_DEVICE_GPU   = 1, /* own memory */
    SLOWAR_DEVICE_IGPU  = 2, /* a GPU on host memory */
    SLOWAR_DEVICE_OTHER = 3  /* accelerators that work beside the CPU (BLAS, AMX); cannot be chosen for a model */
} slowar_device_type;

typedef struct slowar_device {
    char               backend[32]; /* ggml's registry name: "CPU", "CUDA", "Vulkan", "MTL", ... */
    char               name[64];
    char               description[128];
    slowar_device_type type;
    int32_t            index;        /* counted within its backend */
    uint64_t           memory_free;  /* bytes; on the CPU what the system and its cgroup still grant */
    uint64_t           memory_total; /* bytes */
} slowar_device;

/* The devices of this machine. The first call initialises the compiled-in backends; nothing touches a device before. */
int32_t       slowar_device_count(void);
slowar_status slowar_device_get(int32_t i, slowar_device * out, slowar_error * err);

/* Connects to "host:port", where slowar_server_run serves devices: they are slowar_device_get's `first` to first + n - 1,
 * behind those of this machine. SLOWAR_DEVICE when nobody answers within five seconds. */
slowar_status slowar_server_devices(const char * endpoint, int32_t * first, int32_t * n, slowar_error * err);

/* ---- models ----------------------------------------------------------------------------------------------------- */

typedef struct slowar_model   slowar_model;
typedef struct slowar_session slowar_session;

/* A file holds two transformers. The Fast-AR turns a hidden vector of the Slow-AR into the codes of a frame, one after the
 * other; here each is a model of its own. */
typedef enum slowar_part { SLOWAR_PART_SLOW = 0, SLOWAR_PART_FAST = 1 } slowar_part;

/* Hyper-parameters, all from the file; head_dim of the Slow-AR from the weights (q_norm's length, else columns of wo /
 * heads). Of the Fast-AR, n_vocab is codebook_size, n_codebook 0, and what it has no use for 0. */
typedef struct slowar_config {
    slowar_part part;
    int32_t     n_ctx; /* context the model was trained for, positions */
    int32_t     n_vocab;
    int32_t     n_embd;
    int32_t     n_ff;
    int32_t     n_layer;
    int32_t     n_head;
    int32_t     n_head_kv;
    int32_t     head_dim;
    int32_t     n_codebook; /* a position is 1 + n_codebook integers: token id, then codes */
    int32_t     codebook_size;
    int32_t     semantic_begin_id;
    int32_t     semantic_end_id; /* inclusive */
    float       rope_freq_base;
    float       norm_rms_eps;
    bool        attention_qk_norm;
    bool        scale_codebook_embeddings;
    bool        tie_word_embeddings;
    bool        norm_fastlayer_input;
    int32_t     n_hidden;   /* Fast-AR: length of the vector at position 0, the Slow-AR's n_embd */
    bool        project_in; /* Fast-AR: it has a projection of that vector */
} slowar_config;

typedef struct slowar_model_params {
    slowar_part     part;
    const int32_t * devices; /* slowar_device_get's indices of at most 15 GPUs, each once */
    int32_t         n_devices;
    /* Where tensors go: names[i] to devices[places[i]], or beside the CPU, where all others are, with -1. "output.weight" is
     * the head, also where the file has none: a tied head in another place than the table is a copy. A tensor that a
     * device cannot use stays beside the CPU. */
    const char * const * names;
    const int32_t *      places;
    int32_t              n_places;
    bool                 use_mmap; /* weights beside the CPU stay in the mapped file where their alignment allows */
    bool                 repack;   /* layer matrices beside the CPU are rearranged for kernels that want it: a copy */
    bool                 load;     /* false: everything but the weights, to look at and to plan with */
} slowar_model_params;

typedef struct slowar_model_info {
    int32_t  n_tensors;
    uint64_t n_params;
    uint64_t n_bytes_mapped;   /* weights used in place in the file */
    uint64_t n_bytes_repacked; /* weights rearranged in host memory */
    uint64_t n_bytes_host;     /* weights copied to host memory */
    uint64_t n_bytes_device;   /* weights in device memory */
} slowar_model_info;

/* Where a tensor's values are used from. */
typedef enum slowar_place {
    SLOWAR_PLACE_MAPPED   = 0, /* in place in the file */
    SLOWAR_PLACE_HOST     = 1, /* copied to host memory */
    SLOWAR_PLACE_REPACKED = 2, /* rearranged in host memory */
    SLOWAR_PLACE_DEVICE   = 3
} slowar_place;

typedef struct slowar_tensor {
    char         name[64];
    char         type[16]; /* ggml's name: "f32", "q4_K", ... */
    int64_t      ne[4];    /* ggml order, fastest first */
    int32_t      n_dims;
    uint64_t     n_bytes;
    uint64_t     offset; /* in the file */
    slowar_place place;
    int32_t      device;      /* SLOWAR_PLACE_DEVICE: which of the model's, else -1 */
    int32_t      layer;       /* -1: of none */
    char         reason[160]; /* why it is not on the device that was asked for; empty: it is */
} slowar_tensor;

/* Reads and checks a GGUF file before anything is allocated: every key, every tensor's presence, type, shape and place
 * in the file. Tensors that the Slow-AR does not use are never read. The file must not shrink while the model is open
 * with use_mmap. */
slowar_status slowar_model_open(slowar_model ** out, const char * path, const slowar_model_params * params,
                                slowar_error * err);

/* Gives the handle back; the weights live as long as the last session or batch on them. NULL is fine. */
void slowar_model_close(slowar_model * model);

slowar_status slowar_model_config(const slowar_model * model, slowar_config * out, slowar_error * err);
slowar_status slowar_model_get_info(const slowar_model * model, slowar_model_info * out, slowar_error * err);
slowar_status slowar_model_get_tensor(const slowar_model * model, int32_t i, slowar_tensor * out, slowar_error * err);

/* ---- sessions --------------------------------------------------------------------------------------------------- */

typedef enum slowar_attention {
    SLOWAR_ATTENTION_AUTO      = 0, /* flash where the device has every operation it needs, else reference */
    SLOWAR_ATTENTION_REFERENCE = 1, /* the documented graph, built anew for every evaluation */
    SLOWAR_ATTENTION_FLASH     = 2, /* store first, read in place; on the CPU by a kernel of ours */
    SLOWAR_ATTENTION_GGML      = 3  /* as flash, by ggml's own kernel everywhere */
} slowar_attention;

/* Which logits an evaluation gives. */
typedef enum slowar_logits {
    SLOWAR_LOGITS_NONE     = 0,
    SLOWAR_LOGITS_SEMANTIC = 1, /* semantic_begin_id .. semantic_end_id, then the session's extra ids */
    SLOWAR_LOGITS_FULL     = 2
} slowar_logits;

/* Where a layer's keys and values are. */
typedef enum slowar_kv_placement {
    SLOWAR_KV_AUTO   = 0, /* GPU for the reference, else LAYERS */
    SLOWAR_KV_LAYERS = 1, /* beside the layer's weights */
    SLOWAR_KV_GPU    = 2  /* all on the first device that has a layer */
} slowar_kv_placement;

typedef struct slowar_session_params {
    int32_t             n_threads; /* 1 .. 512 CPU threads, the caller's included */
    slowar_attention    attention;
    slowar_kv_placement kv_placement;
    const char *        kv_type; /* of the cache: "f16", "bf16", "f32" or "q8_0" */
    int32_t n_batch; /* compute memory of this many positions is set aside with the cache; 0: of one, -1: none */
    const int32_t * extra_ids; /* n_extra_ids token ids, at most 256, whose logits follow the semantic ones */
    int32_t         n_extra_ids;
} slowar_session_params;

typedef struct slowar_session_state {
    int32_t          n_past;      /* positions in the cache */
    int32_t          max_seq_len; /* 0: no cache */
    int32_t          n_threads;
    int32_t          n_splits;    /* parts in which the scheduler cut the last step's graph */
    slowar_attention attention;   /* REFERENCE or FLASH, once there is a cache */
    int32_t          n_fallbacks; /* of slowar_session_get_fallback */
    int64_t          n_planned;   /* graphs built for evaluations so far; the others found theirs ready */
    uint64_t         n_bytes_kv;
    uint64_t         n_bytes_position; /* of slowar_read_kv */
    uint64_t         n_bytes_compute;
} slowar_session_state;

slowar_status slowar_session_open(slowar_session ** out, const slowar_model * model,
                                  const slowar_session_params * params, slowar_error * err);
void          slowar_session_close(slowar_session * session); /* NULL is fine */

slowar_status slowar_session_get_state(const slowar_session * session, slowar_session_state * out, slowar_error * err);

/* Allocates and zeroes a cache of max_seq_len positions, sets aside the compute memory of a step and of n_batch positions
 * at its far end, and sets the position to 0. A cache that was there is given back first: after a failure the session has none. */
slowar_status slowar_init_kv_cache(slowar_session * session, int32_t max_seq_len, slowar_error * err);

/* Gives cache and compute memory back. Without a cache: does nothing. */
slowar_status slowar_clear_kv_cache(slowar_session * session, slowar_error * err);

/* Forgets the positions from n_past on; memory is kept. reset is rewind to 0. */
slowar_status slowar_rewind(slowar_session * session, int32_t n_past, slowar_error * err);

/* A cache of at least max_seq_len positions with the same past: both exist while it is copied. Needs a cache. */
slowar_status slowar_reserve(slowar_session * session, int32_t max_seq_len, slowar_error * err);

/* The first n positions of `from` become all that `session` has. Both have a cache, of one model and KV type. `from` must
 * not be evaluated meanwhile. Only used slots are copied, from device to device where that is possible. */
slowar_status slowar_copy_prefix(slowar_session * session, const slowar_session * from, int32_t n, slowar_error * err);

/* n positions from `first` on as bytes, layer after layer, each its n keys, then its n values, in the cache's type. n_bytes
 * is n times n_bytes_position. What is written, at most from the position on, is the end of what there is then. */
slowar_status slowar_read_kv(const slowar_session * session, int32_t first, int32_t n, void * out, uint64_t n_bytes,
                             slowar_error * err);
slowar_status slowar_write_kv(slowar_session * session, int32_t first, int32_t n, const void * from, uint64_t n_bytes,
                              slowar_error * err);

/* Bytes beside the CPU and on each of the model's devices. */
typedef struct slowar_bytes {
    uint64_t host;
    uint64_t device[15];
} slowar_bytes;

typedef struct slowar_session_memory {
    slowar_bytes kv;
    slowar_bytes compute;
} slowar_session_memory;

slowar_status slowar_session_get_memory(const slowar_session * session, slowar_session_memory * out,
                                        slowar_error * err);

/* Memory that a session with these parameters would take for a cache of max_seq_len positions. Nothing is taken. */
slowar_status slowar_session_estimate(const slowar_model * model, const slowar_session_params * params,
                                      int32_t max_seq_len, slowar_session_memory * out, slowar_error * err);

/* An operation of the last step's graph that runs on the CPU, although what it works on is on a device. */
typedef struct slowar_fallback {
    char    op[32];
    int32_t layer; /* -1: before the first; n_layer: behind the last */
    char    device[64];
    char    reason[160];
} slowar_fallback;

slowar_status slowar_session_get_fallback(const slowar_session * session, int32_t i, slowar_fallback * out,
                                          slowar_error * err);

/* What slowar_eval_cached checks first, for a prompt that will be evaluated in several parts: every id in 0 .. n_vocab-1
 * and, on semantic positions, every code in 0 .. codebook_size-1. The message counts as the
 * array of the Python side does: row 0 is the id, rows 1 .. n_codebook are codes, columns are positions. It reads only
 * what never changes and may overlap any other call on the session but slowar_session_close. */
slowar_status slowar_check_tokens(const slowar_session * session, const int32_t * tokens, int32_t n_tokens,
                                  slowar_error * err);

/* The one computation. Evaluates n_tokens positions behind the n_past there are, then moves n_past.
 *   tokens     [n_tokens][1 + n_codebook], position-major
 *   which      the logits wanted; none, and the head is not computed
 *   n_threads  1 .. those that the session was opened with
 *   hidden     [n_embd], of the last position, or NULL
 *   logits     [n_vocab] or [n_semantic + n_extra_ids], of the last position, or NULL
 * With neither hidden nor logits wanted nothing is computed behind the last layer's keys and values (flash). */
slowar_status slowar_eval_cached(slowar_session * session, const int32_t * tokens, int32_t n_tokens,
                                 slowar_logits which, int32_t n_threads, float * hidden, float * logits,
                                 slowar_error * err);

/* ---- batches ---------------------------------------------------------------------------------------------------- */

/* Threads and compute memory for evaluations of several sessions at once. */
typedef struct slowar_batch slowar_batch;

/* extra_ids as a session has them. */
slowar_status slowar_batch_open(slowar_batch ** out, const slowar_model * model, int32_t n_threads,
                                const int32_t * extra_ids, int32_t n_extra_ids, slowar_error * err);
void          slowar_batch_close(slowar_batch * batch); /* NULL is fine */

typedef struct slowar_batch_state {
    int32_t  n_threads;
    int64_t  n_planned; /* as a session has it */
    uint64_t n_bytes_compute;
} slowar_batch_state;

slowar_status slowar_batch_get_state(const slowar_batch * batch, slowar_batch_state * out, slowar_error * err);

/* What one session evaluates. */
typedef struct slowar_batch_item {
    slowar_session * session;
    const int32_t *  tokens; /* [n_tokens][1 + n_codebook] */
    int32_t          n_tokens;
} slowar_batch_item;

/* slowar_eval_cached for 1 .. 256 sessions of the batch's model, each at its own position, in one graph: every weight is
 * read once for all. A session appears once; all use the reference or none does. hidden and logits have a row for each
 * item. All or nothing: a failure moves no session and names the item that it was about. */
slowar_status slowar_eval_batch(slowar_batch * batch, const slowar_batch_item * items, int32_t n_items,
                                slowar_logits which, int32_t n_threads, float * hidden, float * logits,
                                slowar_error * err);

/* The same for a Fast-AR, whose tokens are single codes. With `hidden` [n_items][n_hidden] every session begins anew,
 * whatever comes of the call: position 0 is its row, the codes come behind. logits [n_items][codebook_size] are of each last position. */
slowar_status slowar_eval_fast(slowar_batch * batch, const slowar_batch_item * items, int32_t n_items,
                               const float * hidden, int32_t n_threads, float * logits, slowar_error * err);

/* ---- choosing --------------------------------------------------------------------------------------------------- */

typedef struct slowar_choice_params {
    int32_t  top_k;       /* 1 or more; more than there are candidates means all */
    double   top_p;       /* above 0; 1 or more removes nothing */
    double   temperature; /* 0 or more; 0: the largest logit, of equal ones the first, without a random number */
    uint64_t seed;        /* these three are all that the random numbers depend on */
    uint64_t frame;
    uint64_t draw;
} slowar_choice_params;

/* Chooses one of n candidates as the upstream sampler does; docs/generation.md has the rules and the random numbers.
 * SLOWAR_ARGUMENT when a logit is NaN or +inf, or all are -inf. What was chosen from, best first, and its float64
 * probabilities go to kept and probabilities, which have room for min(top_k, n); these and n_kept may be NULL. */
slowar_status slowar_choose(const float * logits, int32_t n, const slowar_choice_params * params, int32_t * chosen,
                            int32_t * kept, double * probabilities, int32_t * n_kept, slowar_error * err);

/* ---- looking inside --------------------------------------------------------------------------------------------- */

/* A node of a graph, as slowar_graph_nodes lists them. */
typedef struct slowar_node {
    char    name[64]; /* "attn_norm-3", "hidden"; tensors without a name of ours have ggml's */
    char    op[32];   /* ggml's name: "MUL_MAT" */
    char    type[16];
    char    device[64]; /* that runs it; empty for a view, which nothing runs */
    int64_t ne[4];      /* ggml order */
} slowar_node;

/* Builds the graph of an evaluation of n_tokens at n_past, without computing it. *n_nodes becomes the number of its nodes,
 * the first `capacity` of which are copied to `out`. */
slowar_status slowar_graph_nodes(slowar_session * session, int32_t n_past, int32_t n_tokens, slowar_node * out,
                                 int32_t capacity, int32_t * n_nodes, slowar_error * err);

/* From now on every evaluation of the session alone keeps a float32 copy of these named tensors ("l_out-0", ...), until it is called with
 * n_names = 0. A name the graph does not have makes the evaluation fail with SLOWAR_ARGUMENT. */
slowar_status slowar_trace_select(slowar_session * session, const char * const * names, int32_t n_names,
                                  slowar_error * err);

/* Trace i of the last evaluation: its shape, and its values when `data` is not NULL (ne[0]*ne[1]*ne[2]*ne[3] floats). */
slowar_status slowar_trace_get(const slowar_session * session, int32_t i, int64_t ne[4], float * data,
                               slowar_error * err);

/* ---- serving a device ------------------------------------------------------------------------------------------- */

/* Lends a device of this machine to models of others. Whoever can connect can use the device, and bring the process down:
 * nothing is encrypted, nobody is asked who he is. */
typedef struct slowar_server slowar_server;

typedef struct slowar_server_params {
    int32_t      device; /* slowar_device_get's index */
    const char * host;   /* address of this machine to listen at */
    int32_t      port;   /* 0: any that is free */
    int32_t      n_threads;
    uint64_t     memory;     /* bytes that clients may take together; 0: what there is */
    uint64_t     max_buffer; /* bytes of one allocation; 0: as the device has it */
} slowar_server_params;

/* Listens. *port becomes the port. One server a process. */
slowar_status slowar_server_open(slowar_server ** out, const slowar_server_params * params, int32_t * port,
                                 slowar_error * err);

/* Serves one client after the other, until the process ends. */
slowar_status slowar_server_run(slowar_server * server, slowar_error * err);
void          slowar_server_close(slowar_server * server); /* NULL is fine; not while it runs */

/* ---- measuring -------------------------------------------------------------------------------------------------- */

/* Bytes a second that n_threads threads read from memory together: the best of three ways to read 512 MiB, each
 * by the mean of three passes. */
slowar_status slowar_read_bandwidth(int32_t n_threads, double * bytes_per_second, slowar_error * err);

/* ---- writing models --------------------------------------------------------------------------------------------- */

/* Quantises n_rows rows of n_per_row floats to ggml type `type` ("q8_0", "q4_K", "f16", ...). `n_bytes` is the size of
 * `out` and must be exactly what the type needs. Types that need an importance matrix are refused. */
slowar_status slowar_quantize(const char * type, const float * rows, int64_t n_rows, int64_t n_per_row, void * out,
                              int64_t n_bytes, slowar_error * err);

/* cdef end */

#if defined(__GNUC__)
#    pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif /* SLOWAR_H */
