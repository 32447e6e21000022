// Failing: a status and one sentence, thrown inside the library, turned into the caller's slowar_error at the wall.
#pragma once

#include "platform.h"
#include "slowar.h"

#include <shared_mutex>
#include <stdexcept>
#include <string>

namespace slowar {

struct failure : std::runtime_error {
    failure(slowar_status status, int os_errno, const std::string & message)
        : std::runtime_error(message), status(status), os_errno(os_errno) {}

    slowar_status status;
    int           os_errno;
};

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
[[noreturn]] void fail(slowar_status status, const char * format, ...);

// The operating system's refusal, with its errno; ENOMEM is SLOWAR_MEMORY.
[[noreturn]] void fail_os(int os_errno, const std::string & what);

// printf into a string.
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
std::string text(const char * format, ...);

// Catches what the current handler holds, writes it to err (if any) and returns its status.
slowar_status report(slowar_error * err) noexcept;

// Runs body and lets nothing out but a status.
template <typename body_t> slowar_status guard(slowar_error * err, body_t && body) noexcept {
    try {
        const std::shared_lock<std::shared_timed_mutex> hold(calls());
        body();
        return SLOWAR_OK;
    } catch (...) {
        return report(err);
    }
}

// Sends ggml's log to this thread's buffer from now on. Called once, before anything else of ggml.
void capture_log();

// This thread's log since the last take, at most size - 1 bytes of it.
int32_t log_take(char * out, int32_t size);

// Everything ggml complained about in this thread since `log_mark`, on one line, for the end of a message.
size_t      log_mark();
std::string log_since(size_t mark);

}  // namespace slowar
