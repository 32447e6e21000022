// A device of this machine as a server lends it: with less memory than it has, or with smaller buffers.
#pragma once

#include "device.h"

#include "ggml-backend-impl.h"

#include <map>
#include <mutex>

namespace slowar {

class lent_device {
  public:
    // memory, max_buffer: bytes; 0: as the device has it.
    lent_device(ggml_backend_dev_t device, int n_threads, uint64_t memory, uint64_t max_buffer);

    ggml_backend_dev_t get() { return &device_; }

  private:
    struct lent_type : ggml_backend_buffer_type {
        lent_device * lent;
    };

    struct lent : ggml_backend_device {
        lent_device * lent;
    };

    static lent_device & of(ggml_backend_dev_t device) { return *static_cast<lent *>(device)->lent; }

    static lent_device & of(ggml_backend_buffer_type_t type) { return *static_cast<lent_type *>(type)->lent; }

    uint64_t              free() const;
    ggml_backend_t        open();
    ggml_backend_buffer_t allocate(size_t n_bytes);

    ggml_backend_dev_t inner_;
    int                n_threads_;
    uint64_t           memory_;
    uint64_t           max_buffer_;
    uint64_t           taken_ = 0;
    threadpool_ptr     threads_;
    lent               device_;
    lent_type          type_;
};

}  // namespace slowar
