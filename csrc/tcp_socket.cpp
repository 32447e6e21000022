#include "tcp_socket.h"

#include "error.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace slowar {

#ifdef MSG_NOSIGNAL
static const int send_flags = MSG_NOSIGNAL;  // else a peer that left ends this process
#else
static const int send_flags = 0;  // SO_NOSIGPIPE says so on the socket
#endif

// The kernel never takes more than this at once, nor gives it.
static const size_t most_bytes = size_t(1) << 30;

[[noreturn]] static void fail_socket(const char * what, int os_errno) {
    fail_os(os_errno, text("%s: %s", what, std::strerror(os_errno)));
}

static void set(int fd, int level, int option, int value) {
    ::setsockopt(fd, level, option, &value, sizeof(value));
}

// Small messages go at once, and a machine that was switched off is noticed: asked for a sign of life after 3 s of
// silence, three times, a second apart; what was sent must be confirmed within 8 s.
static void set_up(int fd) {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
    set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef SO_NOSIGPIPE
    set(fd, SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
#ifdef TCP_KEEPIDLE
    set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 3);
#elif defined(TCP_KEEPALIVE)
    set(fd, IPPROTO_TCP, TCP_KEEPALIVE, 3);
#endif
#ifdef TCP_KEEPINTVL
    set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
    set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
#endif
#ifdef TCP_USER_TIMEOUT
    set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 8000);
#endif
}

static void wait_for(int fd, short events, int timeout_ms) {
    pollfd    what = { fd, events, 0 };
    const int n    = ::poll(&what, 1, timeout_ms);
    if (n == 0) {
        fail(SLOWAR_OS, "silent for %.0f s", timeout_ms / 1e3);
    }
    if (n < 0 && errno != EINTR) {
        fail_socket("waiting", errno);
    }
}

using addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

static addresses resolve(const std::string & host, int port, int flags) {
    addrinfo hints    = {};
    hints.ai_family   = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags    = flags;
    addrinfo * found  = nullptr;
    const int  status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (status != 0) {
        fail(SLOWAR_OS, "host %s: %s", host.c_str(), ::gai_strerror(status));
    }
    return { found, ::freeaddrinfo };
}

tcp_socket tcp_socket::connect(const std::string & host, int port, int timeout_ms) {
    const addresses found = resolve(host, port, 0);
    int             why   = ECONNREFUSED;
    for (const addrinfo * at = found.get(); at; at = at->ai_next) {
        tcp_socket out(::socket(at->ai_family, SOCK_STREAM, 0));
        if (out.fd_ < 0) {
            fail_socket("socket", errno);
        }
        set_up(out.fd_);
        if (::connect(out.fd_, at->ai_addr, at->ai_addrlen) == 0) {
            return out;
        }
        why = errno;
        if (why == EINPROGRESS) {
            wait_for(out.fd_, POLLOUT, timeout_ms);
            socklen_t size = sizeof(why);
            ::getsockopt(out.fd_, SOL_SOCKET, SO_ERROR, &why, &size);
            if (why == 0) {
                return out;
            }
        }
    }
    fail_socket("connecting", why);
}

tcp_socket tcp_socket::listen(const std::string & host, int port) {
    const addresses found = resolve(host, port, AI_PASSIVE);
    tcp_socket      out(::socket(found->ai_family, SOCK_STREAM, 0));
    if (out.fd_ < 0) {
        fail_socket("socket", errno);
    }
    ::fcntl(out.fd_, F_SETFD, FD_CLOEXEC);
    set(out.fd_, SOL_SOCKET, SO_REUSEADDR, 1);
    if (::bind(out.fd_, found->ai_addr, found->ai_addrlen) != 0 || ::listen(out.fd_, 16) != 0) {
        fail_socket(text("listening at %s:%d", host.c_str(), port).c_str(), errno);
    }
    return out;
}

tcp_socket::tcp_socket(tcp_socket && other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

tcp_socket::~tcp_socket() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

tcp_socket tcp_socket::accept() const {
    for (;;) {
        tcp_socket out(::accept(fd_, nullptr, nullptr));
        if (out.fd_ >= 0) {
            set_up(out.fd_);
            return out;
        }
        if (errno != EINTR && errno != ECONNABORTED) {
            fail_socket("accepting", errno);
        }
    }
}

int tcp_socket::port() const {
    sockaddr_storage at   = {};
    socklen_t        size = sizeof(at);
    ::getsockname(fd_, reinterpret_cast<sockaddr *>(&at), &size);
    return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 *>(&at)->sin6_port
                                          : reinterpret_cast<sockaddr_in *>(&at)->sin_port);
}

void tcp_socket::send(const void * data, size_t n, int timeout_ms) const {
    const auto * at = static_cast<const uint8_t *>(data);
    while (n > 0) {
        const ssize_t done = ::send(fd_, at, std::min(n, most_bytes), send_flags);
        if (done >= 0) {
            at += done;
            n  -= size_t(done);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            wait_for(fd_, POLLOUT, timeout_ms);
        } else if (errno != EINTR) {
            fail_socket("sending", errno);
        }
    }
}

void tcp_socket::receive(void * data, size_t n, int timeout_ms) const {
    auto * at = static_cast<uint8_t *>(data);
    while (n > 0) {
        const ssize_t done = ::recv(fd_, at, std::min(n, most_bytes), 0);
        if (done > 0) {
            at += done;
            n  -= size_t(done);
        } else if (done == 0) {
            fail(SLOWAR_OS, "the connection was closed");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            wait_for(fd_, POLLIN, timeout_ms);
        } else if (errno != EINTR) {
            fail_socket("receiving", errno);
        }
    }
}

}  // namespace slowar
