#include "config.h"

#include "error.h"

#include <cmath>

namespace slowar {

// A layer is some 50 tensors; 256 layers stay well inside the 10 MiB context and the 32768-node graph of a session.
static const int64_t max_layers = 256;

// Ten in the model; each costs three nodes.
static const int64_t max_codebooks = 256;

static const int64_t max_int32 = INT32_MAX;

static int32_t number(const gguf_file & file, const std::string & key, int64_t least, int64_t most) {
    const int64_t value = file.get_u32(key);
    if (value < least || value > most) {
        fail(SLOWAR_FORMAT, "key %s is %lld, expected %lld to %lld", key.c_str(), (long long) value, (long long) least,
             (long long) most);
    }
    return int32_t(value);
}

static float real(const gguf_file & file, const std::string & key) {
    const float value = file.get_f32(key);
    if (!std::isfinite(value) || value <= 0.0f) {
        fail(SLOWAR_FORMAT, "key %s is %g, expected a finite number above 0", key.c_str(), double(value));
    }
    return value;
}

// The released weights have 128 where n_embd / n_head is 80: only the tensors know.
static int32_t head_dim(const gguf_file & file, const slowar_config & c) {
    const file_tensor & wo     = file.tensor("layers.0.attention.wo.weight");
    const int64_t       shared = wo.ne[0] / c.n_head;
    const int64_t       length = c.attention_qk_norm ? file.tensor("layers.0.attention.q_norm.weight").ne[0] : shared;
    if (length < 2 || length > max_int32 || length % 2 != 0 || length != shared || wo.ne[0] % c.n_head != 0) {
        fail(SLOWAR_FORMAT, "head size %lld is not an even number with %d heads in the %lld columns of %s",
             (long long) length, c.n_head, (long long) wo.ne[0], wo.name.c_str());
    }
    return int32_t(length);
}

static config read_slow_config(const gguf_file & file) {
    const std::string architecture = file.get_str("general.architecture");
    if (architecture != "fish-speech") {
        fail(SLOWAR_FORMAT, "key general.architecture is \"%s\", expected \"fish-speech\"", architecture.c_str());
    }

    config c = {};

    c.n_ctx          = number(file, "fish-speech.context_length", 1, max_int32);
    c.n_vocab        = number(file, "fish-speech.vocab_size", 1, max_int32);
    c.n_embd         = number(file, "fish-speech.embedding_length", 1, max_int32);
    c.n_ff           = number(file, "fish-speech.feed_forward_length", 1, max_int32);
    c.n_layer        = number(file, "fish-speech.block_count", 1, max_layers);
    c.n_head         = number(file, "fish-speech.attention.head_count", 1, 65536);
    c.n_head_kv      = number(file, "fish-speech.attention.head_count_kv", 1, c.n_head);
    c.rope_freq_base = real(file, "fish-speech.rope.freq_base");
    c.norm_rms_eps   = real(file, "fish-speech.attention.layer_norm_rms_epsilon");

    c.n_codebook        = number(file, "fish_speech.num_codebooks", 1, max_codebooks);
    c.codebook_size     = number(file, "fish_speech.codebook_size", 1, max_int32 / c.n_codebook);
    c.semantic_begin_id = number(file, "fish_speech.semantic_begin_id", 0, c.n_vocab - 1);
    c.semantic_end_id   = number(file, "fish_speech.semantic_end_id", c.semantic_begin_id, c.n_vocab - 1);

    c.attention_qk_norm         = file.get_bool("fish_speech.attention_qk_norm");
    c.scale_codebook_embeddings = file.get_bool("fish_speech.scale_codebook_embeddings");
    c.tie_word_embeddings       = file.get_bool("fish_speech.tie_word_embeddings");

    // Some published files were written before this key existed; S2 Pro hands over the normalised vector.
    const std::string norm_fastlayer_input = "fish_speech.norm_fastlayer_input";
    c.norm_fastlayer_input                 = !file.has(norm_fastlayer_input) || file.get_bool(norm_fastlayer_input);

    if (c.n_head % c.n_head_kv != 0) {
        fail(SLOWAR_FORMAT, "key fish-speech.attention.head_count is %d, expected a multiple of head_count_kv, %d",
             c.n_head, c.n_head_kv);
    }
    c.head_dim = head_dim(file, c);
    return c;
}

static config read_fast_config(const gguf_file & file) {
    const config slow = read_slow_config(file);
    config       c    = {};

    c.part              = SLOWAR_PART_FAST;
    c.n_ctx             = number(file, "fish_speech.fast_context_length", 2, max_int32);
    c.n_embd            = number(file, "fish_speech.fast_embedding_length", 1, max_int32);
    c.n_ff              = number(file, "fish_speech.fast_feed_forward_length", 1, max_int32);
    c.n_layer           = number(file, "fish_speech.fast_block_count", 1, max_layers);
    c.n_head            = number(file, "fish_speech.fast_head_count", 1, 65536);
    c.n_head_kv         = number(file, "fish_speech.fast_head_count_kv", 1, c.n_head);
    c.head_dim          = number(file, "fish_speech.fast_head_dim", 2, 65536);
    c.rope_freq_base    = real(file, "fish_speech.fast_rope_freq_base");
    c.norm_rms_eps      = real(file, "fish_speech.fast_layer_norm_rms_eps");
    c.attention_qk_norm = file.get_bool("fish_speech.fast_attention_qk_norm");
    c.project_in        = file.get_bool("fish_speech.fast_project_in");
    c.n_hidden          = slow.n_embd;
    c.n_vocab           = slow.codebook_size;
    c.codebook_size     = slow.codebook_size;
    c.semantic_end_id   = -1;  // no id is

    if (c.n_head % c.n_head_kv != 0 || c.head_dim % 2 != 0) {
        fail(SLOWAR_FORMAT,
             "keys fish_speech.fast_head_count %d, fast_head_count_kv %d and fast_head_dim %d, expected a multiple of "
             "the second, and an even head size",
             c.n_head, c.n_head_kv, c.head_dim);
    }
    if (!c.project_in && c.n_hidden != c.n_embd) {
        fail(SLOWAR_FORMAT, "key fish_speech.fast_project_in is false, yet the widths are %d and %d", c.n_hidden,
             c.n_embd);
    }
    return c;
}

config read_config(const gguf_file & file, slowar_part part) {
    return part == SLOWAR_PART_FAST ? read_fast_config(file) : read_slow_config(file);
}

}  // namespace slowar
