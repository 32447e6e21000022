// Failing: a status and one sentence, thrown inside the library, turned into the caller's slowar_error at the wall.
#pragma once

#include "platform.h"
#include "slowar.h"

#include <cstdio>
#include <shared_mutex>
#include <stdexcept>
#include <string>

// MinGW brings a printf of its own for C++, which knows %zu as Windows' does not.
#if defined(__MINGW_PRINTF_FORMAT)
#    define SLOWAR_PRINTF __MINGW_PRINTF_FORMAT
#else
#    define SLOWAR_PRINTF printf
#endif

namespace slowar {

struct failure : std::runtime_error {
    failure(slowar_status status, int os_errno, const std::string & message)
        : std::runtime_error(message), status(status), os_errno(os_errno) {}

    slowar_status status;
    int           os_errno;
};

[[noreturn, gnu::format(SLOWAR_PRINTF, 2, 3)]] void fail(slowar_status status, const char * format, ...);

// The operating system's refusal, with its errno; ENOMEM is SLOWAR_MEMORY.
[[noreturn]] void fail_os(int os_errno, const std::string & what);

// printf into a string.
[[gnu::format(SLOWAR_PRINTF, 1, 2)]] std::string text(const char * format, ...);

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
