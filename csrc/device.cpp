#include "device.h"

#include "error.h"
#include "platform.h"
#include "remote.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace slowar {

// ggml's threads spin this long for the next graph before they sleep, in units of 131072 pauses: 1 is about 3 ms, which
// bridges the gap between two steps of a loop and costs an idle process nothing; ggml's default of 50 burns 0.15 s.
static const uint32_t poll_level = 1;

// ggml sets itself up in function statics and under one mutex, which a child would find taken for ever if it were forked
// while another thread is inside. So a fork waits for both. (ggml declares these two in a header of its own.)
extern "C" void ggml_critical_section_start(void);
extern "C" void ggml_critical_section_end(void);

static std::mutex setup_mutex;

static void before_fork() {
    setup_mutex.lock();
    ggml_critical_section_start();
}

static void after_fork() {
    ggml_critical_section_end();
    setup_mutex.unlock();
}

static const bool forks_wait = (at_fork(before_fork, after_fork), true);

// Kinds of buffer that the CPU has beside its own, for rearranged weights; ends with nullptr.
static ggml_backend_buffer_type_t * extra_buffer_types() {
    const ggml_backend_dev_t cpu = cpu_device();
    const auto               ask = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    return ask ? ask(cpu) : nullptr;
}

void setup() {
    static bool done = false;

    const std::lock_guard<std::mutex> hold(setup_mutex);
    if (!done && forks_wait) {
        capture_log();
        ggml_backend_dev_count();
        ggml_cpu_init();
        extra_buffer_types();
        end_calls_at_exit();  // behind all that ggml makes when it is first asked for
        done = true;
    }
}

// What servers lend. Like ggml's own devices they are never given back; those of one server lie side by side.
static std::mutex                      remote_mutex;
static std::vector<ggml_backend_dev_t> remote_devices;

size_t n_local_devices() {
    return ggml_backend_dev_count();
}

std::vector<ggml_backend_dev_t> list_devices() {
    std::vector<ggml_backend_dev_t> devices;
    for (size_t i = 0; i < n_local_devices(); i++) {
        devices.push_back(ggml_backend_dev_get(i));
    }
    const std::lock_guard<std::mutex> hold(remote_mutex);
    devices.insert(devices.end(), remote_devices.begin(), remote_devices.end());
    return devices;
}

std::pair<int32_t, int32_t> server_devices(const std::string & endpoint) {
    const std::vector<ggml_backend_dev_t> lent = connect_server(endpoint);

    const std::lock_guard<std::mutex> hold(remote_mutex);
    auto                              at = std::find(remote_devices.begin(), remote_devices.end(), lent[0]);
    if (at == remote_devices.end()) {
        at = remote_devices.insert(at, lent.begin(), lent.end());
    }
    return { int32_t(n_local_devices()) + int32_t(at - remote_devices.begin()), int32_t(lent.size()) };
}

bool is_remote(ggml_backend_dev_t device) {
    return std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "RPC") == 0;
}

void check_answers(ggml_backend_dev_t device) {
    if (is_remote(device)) {
        const std::string reason = why_lost(ggml_backend_dev_description(device));
        if (!reason.empty()) {
            fail(SLOWAR_COMPUTE, "the device server %s was lost: %s", ggml_backend_dev_description(device),
                 reason.c_str());
        }
    }
}

static slowar_device_type type_of(ggml_backend_dev_t device) {
    switch (ggml_backend_dev_type(device)) {
        case GGML_BACKEND_DEVICE_TYPE_CPU:  return SLOWAR_DEVICE_CPU;
        case GGML_BACKEND_DEVICE_TYPE_GPU:  return SLOWAR_DEVICE_GPU;
        case GGML_BACKEND_DEVICE_TYPE_IGPU: return SLOWAR_DEVICE_IGPU;
        default:                            return SLOWAR_DEVICE_OTHER;
    }
}

template <size_t n> static void copy(char (&out)[n], const char * words) {
    std::snprintf(out, n, "%s", words);
}

slowar_device describe(ggml_backend_dev_t device) {
    slowar_device out = {};
    copy(out.backend, ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)));
    copy(out.name, ggml_backend_dev_name(device));
    copy(out.description, ggml_backend_dev_description(device));
    out.type = type_of(device);
    for (ggml_backend_dev_t other : list_devices()) {
        if (other == device) {
            break;
        }
        out.index += ggml_backend_dev_backend_reg(other) == ggml_backend_dev_backend_reg(device);
    }
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    out.memory_free  = memory_free(device);
    out.memory_total = total;
    return out;
}

ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

ggml_backend_dev_t gpu_device(int32_t i) {
    const auto devices = list_devices();
    if (i < 0 || size_t(i) >= devices.size()) {
        fail(SLOWAR_DEVICE, "device %d does not exist: there are %zu", i, devices.size());
    }
    const slowar_device_type type = type_of(devices[size_t(i)]);
    if (type != SLOWAR_DEVICE_GPU && type != SLOWAR_DEVICE_IGPU) {
        fail(SLOWAR_DEVICE, "device %d (%s) is not a GPU", i, ggml_backend_dev_name(devices[size_t(i)]));
    }
    return devices[size_t(i)];
}

ggml_backend_ptr open_backend(ggml_backend_dev_t device) {
    const size_t     mark = log_mark();
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        fail(SLOWAR_DEVICE, "device %s cannot be opened: %s", ggml_backend_dev_name(device), log_since(mark).c_str());
    }
    return backend;
}

uint64_t memory_free(ggml_backend_dev_t device) {
    if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return available_memory();  // ggml calls all of it free
    }
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    return free;
}

void check_memory(ggml_backend_dev_t device, uint64_t n_bytes, const char * what) {
    const uint64_t free = memory_free(device);
    if (free > 0 && n_bytes > free) {
        fail(SLOWAR_MEMORY, "%s needs %.1f MiB, %s has %.1f MiB free", what, double(n_bytes) / (1 << 20),
             ggml_backend_dev_name(device), double(free) / (1 << 20));
    }
}

ggml_backend_buffer_ptr imagine(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(buft, 0));
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        t->buffer = buffer.get();
    }
    return buffer;
}

void threadpool_deleter::operator()(ggml_threadpool * pool) const {
    ggml_threadpool_free(pool);
}

threadpool_ptr start_threads(int n_threads) {
    run_threads(n_threads - 1, [](int) {});  // ggml would abort where the system refuses one
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll                   = poll_level;
    return threadpool_ptr(ggml_threadpool_new(&params));
}

void use_threads(ggml_backend_t cpu, ggml_threadpool * pool, int n_threads) {
    ggml_backend_cpu_set_threadpool(cpu, pool);
    ggml_backend_cpu_set_n_threads(cpu, n_threads);
}

ggml_type type_named(const char * name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * known = ggml_type_name(ggml_type(i));
        if (known && std::string(known) == name) {
            return ggml_type(i);
        }
    }
    fail(SLOWAR_ARGUMENT, "ggml has no type named \"%s\"", name);
}

ggml_backend_buffer_type_t repack_type(ggml_type type, const int64_t * ne) {
    const ggml_backend_dev_t cpu = cpu_device();
    const ggml_context_ptr   ctx(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, /*no_alloc =*/true }));
    ggml_tensor *            w  = ggml_new_tensor(ctx.get(), type, GGML_MAX_DIMS, ne);
    ggml_tensor *            op = ggml_mul_mat(ctx.get(), w, ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, ne[0]));
    for (ggml_backend_buffer_type_t * buft = extra_buffer_types(); buft && *buft; buft++) {
        // The CPU answers for the buffer that a matrix lies in, so the question needs one.
        const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(*buft, 0));
        w->buffer        = empty.get();
        const bool found = ggml_backend_dev_supports_op(cpu, op);
        w->buffer        = nullptr;
        if (found) {
            return *buft;
        }
    }
    return nullptr;
}

bool cpu_can_use(ggml_type type) {
    const bool look_up  = type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    const bool multiply = ggml_get_type_traits_cpu(type)->vec_dot != nullptr;
    return look_up && multiply;
}

}  // namespace slowar
