#include "tcp_socket.h"

#include "error.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#if defined(_WIN32)
#    include <winsock2.h>
#    include <ws2tcpip.h>
#else
#    include <fcntl.h>
#    include <netdb.h>
#    include <netinet/in.h>
#    include <netinet/tcp.h>
#    include <poll.h>
#    include <sys/socket.h>
#    include <unistd.h>
#endif

namespace slowar {

#if defined(_WIN32)

using handle  = SOCKET;
using n_bytes = int;

static const int send_flags  = 0;
static const int again       = WSAEWOULDBLOCK;
static const int in_progress = WSAEWOULDBLOCK;
static const int interrupted = WSAEINTR;
static const int refused     = WSAECONNREFUSED;
static const int aborted     = WSAECONNABORTED;

static int last_error() {
    return ::WSAGetLastError();
}

static void close(handle fd) {
    ::closesocket(fd);
}

static int poll(pollfd * what, int timeout_ms) {
    return ::WSAPoll(what, 1, timeout_ms);
}

static void prepare(handle fd) {
    u_long yes = 1;
    ::ioctlsocket(fd, FIONBIO, &yes);
}

static handle open(int family) {
    static const bool is_started = [] {
        WSADATA data;
        return ::WSAStartup(MAKEWORD(2, 2), &data) == 0;
    }();
    return is_started ? ::socket(family, SOCK_STREAM, 0) : INVALID_SOCKET;
}

#else

using handle  = int;
using n_bytes = size_t;

#    if defined(MSG_NOSIGNAL)
static const int send_flags = MSG_NOSIGNAL;  // else a peer that left ends this process
#    else
static const int send_flags = 0;  // SO_NOSIGPIPE says so on the socket
#    endif
static const int again       = EAGAIN;
static const int in_progress = EINPROGRESS;
static const int interrupted = EINTR;
static const int refused     = ECONNREFUSED;
static const int aborted     = ECONNABORTED;

static int last_error() {
    return errno;
}

static void close(handle fd) {
    ::close(fd);
}

static int poll(pollfd * what, int timeout_ms) {
    return ::poll(what, 1, timeout_ms);
}

static void prepare(handle fd) {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static handle open(int family) {
    const handle fd = ::socket(family, SOCK_STREAM, 0);
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return fd;
}

#endif

// The kernel never takes more than this at once, nor gives it.
static const size_t most_bytes = size_t(1) << 30;

[[noreturn]] static void fail_socket(const char * what, int error) {
    fail_os(error, text("%s: %s", what, std::system_category().message(error).c_str()));
}

static void set(handle fd, int level, int option, int value) {
    ::setsockopt(fd, level, option, reinterpret_cast<const char *>(&value), sizeof(value));
}

// Small messages go at once, and a machine that was switched off is noticed: asked for a sign of life after 3 s of
// silence, three times, a second apart; what was sent must be confirmed within 8 s.
static void set_up(handle fd) {
    prepare(fd);
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

static void wait_for(handle fd, short events, int timeout_ms) {
    pollfd    what = { fd, events, 0 };
    const int n    = poll(&what, timeout_ms);
    if (n == 0) {
        fail(SLOWAR_OS, "silent for %.0f s", timeout_ms / 1e3);
    }
    if (n < 0 && last_error() != interrupted) {
        fail_socket("waiting", last_error());
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
        fail_os(EADDRNOTAVAIL, text("host %s: %s", host.c_str(), ::gai_strerror(status)));
    }
    return { found, ::freeaddrinfo };
}

tcp_socket tcp_socket::connect(const std::string & host, int port, int timeout_ms) {
    const addresses found = resolve(host, port, 0);
    int             why   = refused;
    for (const addrinfo * at = found.get(); at; at = at->ai_next) {
        tcp_socket   out(open(at->ai_family));
        const handle fd = handle(out.fd_);
        if (out.fd_ < 0) {
            fail_socket("socket", last_error());
        }
        set_up(fd);
        if (::connect(fd, at->ai_addr, socklen_t(at->ai_addrlen)) == 0) {
            return out;
        }
        why = last_error();
        if (why == in_progress) {
            wait_for(fd, POLLOUT, timeout_ms);
            socklen_t size = sizeof(why);
            ::getsockopt(fd, SOL_SOCKET, SO_ERROR, reinterpret_cast<char *>(&why), &size);
            if (why == 0) {
                return out;
            }
        }
    }
    fail_socket("connecting", why);
}

tcp_socket tcp_socket::listen(const std::string & host, int port) {
    const addresses found = resolve(host, port, AI_PASSIVE);
    tcp_socket      out(open(found->ai_family));
    const handle    fd = handle(out.fd_);
    if (out.fd_ < 0) {
        fail_socket("socket", last_error());
    }
    set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (::bind(fd, found->ai_addr, socklen_t(found->ai_addrlen)) != 0 || ::listen(fd, 16) != 0) {
        fail_socket(text("listening at %s:%d", host.c_str(), port).c_str(), last_error());
    }
    return out;
}

tcp_socket::tcp_socket(tcp_socket && other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

tcp_socket::~tcp_socket() {
    if (fd_ >= 0) {
        close(handle(fd_));
    }
}

tcp_socket tcp_socket::accept() const {
    for (;;) {
        tcp_socket out(std::intptr_t(::accept(handle(fd_), nullptr, nullptr)));
        if (out.fd_ >= 0) {
            set_up(handle(out.fd_));
            return out;
        }
        if (last_error() != interrupted && last_error() != aborted) {
            fail_socket("accepting", last_error());
        }
    }
}

int tcp_socket::port() const {
    sockaddr_storage at   = {};
    socklen_t        size = sizeof(at);
    ::getsockname(handle(fd_), reinterpret_cast<sockaddr *>(&at), &size);
    return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 *>(&at)->sin6_port
                                          : reinterpret_cast<sockaddr_in *>(&at)->sin_port);
}

void tcp_socket::send(const void * data, size_t n, int timeout_ms) const {
    const auto * at = static_cast<const char *>(data);
    while (n > 0) {
        const auto done = ::send(handle(fd_), at, n_bytes(std::min(n, most_bytes)), send_flags);
        if (done >= 0) {
            at += done;
            n  -= size_t(done);
        } else if (last_error() == again) {
            wait_for(handle(fd_), POLLOUT, timeout_ms);
        } else if (last_error() != interrupted) {
            fail_socket("sending", last_error());
        }
    }
}

void tcp_socket::receive(void * data, size_t n, int timeout_ms) const {
    auto * at = static_cast<char *>(data);
    while (n > 0) {
        const auto done = ::recv(handle(fd_), at, n_bytes(std::min(n, most_bytes)), 0);
        if (done > 0) {
            at += done;
            n  -= size_t(done);
        } else if (done == 0) {
            fail(SLOWAR_OS, "the connection was closed");
        } else if (last_error() == again) {
            wait_for(handle(fd_), POLLIN, timeout_ms);
        } else if (last_error() != interrupted) {
            fail_socket("receiving", last_error());
        }
    }
}

}  // namespace slowar
