// A TCP socket whose every wait ends. What goes wrong throws SLOWAR_OS with the reason; that a peer is gone, silently or
// not, is noticed within ten seconds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace slowar {

class tcp_socket {
  public:
    static tcp_socket connect(const std::string & host, int port, int timeout_ms);

    // At an address of this machine; port 0: any that is free.
    static tcp_socket listen(const std::string & host, int port);

    tcp_socket(tcp_socket && other) noexcept;
    ~tcp_socket();

    // The next who connects.
    tcp_socket accept() const;

    int port() const;

    // All n bytes. So long a silence is a failure; -1: silence is fine.
    void send(const void * data, size_t n, int timeout_ms) const;
    void receive(void * data, size_t n, int timeout_ms) const;

  private:
    explicit tcp_socket(std::intptr_t fd) : fd_(fd) {}

    std::intptr_t fd_;  // Windows' SOCKET is as wide as a pointer
};

}  // namespace slowar
