// Devices of other machines through ggml's RPC: asking for them, and lending one of this machine's.
#pragma once

#include "device.h"
#include "tcp_socket.h"

#include <string>
#include <vector>

namespace slowar {

// The devices that the server at "host:port" lends, at least one. Throws SLOWAR_DEVICE.
std::vector<ggml_backend_dev_t> connect_server(const std::string & endpoint);

// Why the last connection to "host:port" is lost; empty: it is not. Since then it has given nothing but zeros.
std::string why_lost(const std::string & endpoint);

// The connection was made, or is lost.
void note_connection(const std::string & endpoint, const std::string & why_lost);

// A device with less memory than it has.
class lent_device;

class server {
  public:
    server(ggml_backend_dev_t device, const slowar_server_params & params);
    ~server();

    int port() const { return port_; }

    // Until something ends it, which is thrown.
    [[noreturn]] void run();

  private:
    std::unique_ptr<lent_device> device_;
    std::string                  host_;
    int                          n_threads_;
    int                          port_;
};

// What ggml's RPC server is to listen at, once.
std::unique_ptr<tcp_socket> take_listener();

}  // namespace slowar
