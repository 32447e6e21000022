#include "lent_device.h"

#include <algorithm>

namespace slowar {

// What was allocated, by whom, and what frees it. ggml's server works in one thread.
struct lent_buffer {
    uint64_t * taken;
    uint64_t   n_bytes;
    void (*free)(ggml_backend_buffer_t);
};

static std::map<ggml_backend_buffer_t, lent_buffer> lent_buffers;

static void give_back(ggml_backend_buffer_t buffer) {
    const lent_buffer lent = lent_buffers.at(buffer);
    lent_buffers.erase(buffer);
    *lent.taken -= lent.n_bytes;
    if (lent.free) {
        lent.free(buffer);
    }
}

// All but a few functions are the device's own: they know it by its context.
lent_device::lent_device(ggml_backend_dev_t device, int n_threads, uint64_t memory, uint64_t max_buffer)
    : inner_(device), n_threads_(n_threads), memory_(memory), max_buffer_(max_buffer),
      threads_(device == cpu_device() ? start_threads(n_threads) : nullptr) {
    static_cast<ggml_backend_device &>(device_) = *device;
    device_.lent                                = this;
    device_.iface.get_memory                    = [](ggml_backend_dev_t dev, size_t * free, size_t * total) {
        const lent_device & lent = of(dev);
        ggml_backend_dev_memory(lent.inner_, free, total);
        *total = lent.memory_ > 0 ? std::min<size_t>(*total, lent.memory_) : *total;
        *free  = lent.free();
    };
    device_.iface.init_backend = [](ggml_backend_dev_t dev, const char *) {
        return of(dev).open();
    };
    device_.iface.get_buffer_type = [](ggml_backend_dev_t dev) -> ggml_backend_buffer_type_t {
        return &of(dev).type_;
    };

    static_cast<ggml_backend_buffer_type &>(type_) = *ggml_backend_dev_buffer_type(device);
    type_.lent                                     = this;
    type_.device                                   = &device_;
    type_.iface.alloc_buffer                       = [](ggml_backend_buffer_type_t type, size_t n_bytes) {
        return of(type).allocate(n_bytes);
    };
    type_.iface.get_max_size = [](ggml_backend_buffer_type_t type) -> size_t {
        const lent_device & lent = of(type);
        const size_t        most = ggml_backend_buft_get_max_size(ggml_backend_dev_buffer_type(lent.inner_));
        return lent.max_buffer_ > 0 ? std::min<size_t>(most, lent.max_buffer_) : most;
    };
}

uint64_t lent_device::free() const {
    const uint64_t there = memory_free(inner_);
    return memory_ > 0 ? std::min(there, memory_ - std::min(memory_, taken_)) : there;
}

ggml_backend_t lent_device::open() {
    ggml_backend_t backend = ggml_backend_dev_init(inner_, nullptr);
    if (backend) {
        backend->device = &device_;  // whoever asks it for buffers asks us
        if (threads_) {
            use_threads(backend, threads_.get(), n_threads_);
        }
    }
    return backend;
}

ggml_backend_buffer_t lent_device::allocate(size_t n_bytes) {
    if (n_bytes > free() || n_bytes > ggml_backend_buft_get_max_size(&type_)) {
        return nullptr;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(inner_), n_bytes);
    if (buffer) {
        lent_buffers[buffer]       = { &taken_, n_bytes, buffer->iface.free_buffer };
        buffer->iface.free_buffer  = give_back;
        taken_                    += n_bytes;
    }
    return buffer;
}

}  // namespace slowar
