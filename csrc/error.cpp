#include "error.h"

#include "ggml.h"

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>

namespace slowar {

static std::string vtext(const char * format, va_list args) {
    va_list again;
    va_copy(again, args);
    const int   n = std::vsnprintf(nullptr, 0, format, args);
    std::string out(n > 0 ? size_t(n) : 0, '\0');
    std::vsnprintf(out.data(), out.size() + 1, format, again);
    va_end(again);
    return out;
}

std::string text(const char * format, ...) {
    va_list args;
    va_start(args, format);
    std::string out = vtext(format, args);
    va_end(args);
    return out;
}

void fail(slowar_status status, const char * format, ...) {
    va_list args;
    va_start(args, format);
    const std::string message = vtext(format, args);
    va_end(args);
    throw failure(status, 0, message);
}

void fail_os(int os_errno, const std::string & what) {
    throw failure(os_errno == ENOMEM ? SLOWAR_MEMORY : SLOWAR_OS, os_errno, what);
}

static slowar_status write(slowar_error * err, slowar_status status, int os_errno, const char * message) noexcept {
    if (err) {
        err->os_errno = os_errno;
        std::snprintf(err->message, sizeof(err->message), "%s", message);
        for (char * c = err->message; *c; c++) {
            if (static_cast<unsigned char>(*c) < ' ' || *c == 0x7f) {
                *c = '?';  // names come from files, and a message is one line of text
            }
        }
    }
    return status;
}

slowar_status report(slowar_error * err) noexcept {
    try {
        throw;
    } catch (const failure & f) {
        return write(err, f.status, f.os_errno, f.what());
    } catch (const std::bad_alloc &) {
        return write(err, SLOWAR_MEMORY, 0, "out of host memory");
    } catch (const std::exception & e) {
        return write(err, SLOWAR_INTERNAL, 0, e.what());
    } catch (...) {
        return write(err, SLOWAR_INTERNAL, 0, "an exception of an unknown type");
    }
}

// One buffer a thread: no lock that a fork could find taken, and words never end up in another caller's message.
static thread_local std::string log_buffer;

static const size_t log_limit = 8192;

static void log_append(ggml_log_level level, const char * words, void *) {
    static thread_local ggml_log_level last = GGML_LOG_LEVEL_NONE;
    if (level != GGML_LOG_LEVEL_CONT) {
        last = level;
    }
    if (last == GGML_LOG_LEVEL_DEBUG) {
        return;
    }
    try {
        log_buffer += words;
        if (log_buffer.size() > log_limit) {
            log_buffer.erase(0, log_buffer.size() - log_limit);
        }
    } catch (...) {
        // no memory for a log line: the line is what we can spare
    }
}

void capture_log() {
    ggml_log_set(log_append, nullptr);
}

int32_t log_take(char * out, int32_t size) {
    const size_t n = std::min(log_buffer.size(), size_t(size - 1));
    std::memcpy(out, log_buffer.data(), n);
    out[n] = '\0';
    log_buffer.erase(0, n);
    return int32_t(n);
}

size_t log_mark() {
    return log_buffer.size();
}

std::string log_since(size_t mark) {
    std::string words = log_buffer.substr(std::min(mark, log_buffer.size()));
    log_buffer.resize(std::min(mark, log_buffer.size()));
    while (!words.empty() && words.back() == '\n') {
        words.pop_back();
    }
    for (size_t at = 0; (at = words.find('\n', at)) != std::string::npos;) {
        words.replace(at, 1, "; ");
    }
    return words;
}

}  // namespace slowar
