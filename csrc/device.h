// Devices and backends: the only file that knows how ggml names them.
#pragma once

#include "slowar.h"

#include "ggml-cpp.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace slowar {

// Before anything else of this file or of ggml: sets ggml up, once, where no fork can come in between.
void setup();

// Those of this machine, then those of the servers that were asked for.
std::vector<ggml_backend_dev_t> list_devices();

size_t n_local_devices();

// The devices that a server lends, as indices of list_devices: the first, and how many. Throws SLOWAR_DEVICE.
std::pair<int32_t, int32_t> server_devices(const std::string & endpoint);

// Whether it is a server's.
bool is_remote(ggml_backend_dev_t device);

// Throws SLOWAR_COMPUTE when it is a server's and the server was lost: what was read from it since is worth nothing.
void check_answers(ggml_backend_dev_t device);

slowar_device describe(ggml_backend_dev_t device);

ggml_backend_dev_t cpu_device();

// The device of slowar_device_get's index i, which must be a GPU a model can be put on.
ggml_backend_dev_t gpu_device(int32_t i);

ggml_backend_ptr open_backend(ggml_backend_dev_t device);

// Bytes that can still be allocated there; 0: the device does not say.
uint64_t memory_free(ggml_backend_dev_t device);

// Refuses with both numbers when the device says that it has less than n_bytes free. `what` opens the sentence.
void check_memory(ggml_backend_dev_t device, uint64_t n_bytes, const char * what);

// An empty buffer of that type in which a context's tensors only seem to lie: enough to plan with.
ggml_backend_buffer_ptr imagine(ggml_context * ctx, ggml_backend_buffer_type_t buft);

// Threads that wait between evaluations instead of being started for each.
struct threadpool_deleter {
    void operator()(ggml_threadpool * pool) const;
};

using threadpool_ptr = std::unique_ptr<ggml_threadpool, threadpool_deleter>;

threadpool_ptr start_threads(int n_threads);

void use_threads(ggml_backend_t cpu, ggml_threadpool * pool, int n_threads);

// The type that ggml calls so ("q4_K"). Throws SLOWAR_ARGUMENT.
ggml_type type_named(const char * name);

// The buffer type in which the CPU keeps a matrix rearranged for its own kernels; nullptr if it has none for this one.
ggml_backend_buffer_type_t repack_type(ggml_type type, const int64_t * ne);

// Whether the CPU can multiply by and look up rows of a matrix of this type.
bool cpu_can_use(ggml_type type);

}  // namespace slowar
