#include "remote.h"

#include "error.h"
#include "ggml-rpc.h"
#include "lent_device.h"

#include <cstdlib>
#include <map>
#include <mutex>

namespace slowar {

static std::mutex                         notes_mutex;
static std::map<std::string, std::string> notes;  // of each endpoint, why its connection was lost

void note_connection(const std::string & endpoint, const std::string & why_lost) {
    const std::lock_guard<std::mutex> hold(notes_mutex);
    notes[endpoint] = why_lost;
}

std::string why_lost(const std::string & endpoint) {
    const std::lock_guard<std::mutex> hold(notes_mutex);
    const auto                        it = notes.find(endpoint);
    return it == notes.end() ? "" : it->second;
}

// "host:port" as ggml understands it, in the one spelling under which it keeps connections.
static std::string checked(const std::string & endpoint) {
    const size_t      colon = endpoint.find(':');
    const std::string host  = endpoint.substr(0, colon);
    const std::string port  = colon == std::string::npos ? "" : endpoint.substr(colon + 1);
    const bool is_number    = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == port.npos;
    const int  number       = is_number ? std::atoi(port.c_str()) : 0;
    if (host.empty() || number < 1 || number > 65535) {
        fail(SLOWAR_DEVICE, "server \"%s\", expected \"host:port\" with a port of 1 to 65535", endpoint.c_str());
    }
    return text("%s:%d", host.c_str(), number);
}

std::vector<ggml_backend_dev_t> connect_server(const std::string & endpoint) {
    static std::mutex                 one_at_a_time;
    const std::string                 at = checked(endpoint);
    const std::lock_guard<std::mutex> hold(one_at_a_time);

    ggml_backend_reg_t reg = ggml_backend_rpc_add_server(at.c_str());
    if (reg) {  // which may be an old acquaintance
        size_t free  = 0;
        size_t total = 0;
        ggml_backend_rpc_get_device_memory(at.c_str(), 0, &free, &total);
    }
    const std::string reason = why_lost(at);
    if (!reg || !reason.empty()) {
        fail(SLOWAR_DEVICE, "no device server answers at %s: %s", at.c_str(),
             reason.empty() ? "it has no device" : reason.c_str());
    }
    std::vector<ggml_backend_dev_t> devices;
    for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
        devices.push_back(ggml_backend_reg_dev_get(reg, i));
    }
    return devices;
}

//
// server
//

static std::unique_ptr<tcp_socket> listener;

static bool is_served = false;

std::unique_ptr<tcp_socket> take_listener() {
    return std::move(listener);
}

server::server(ggml_backend_dev_t device, const slowar_server_params & params)
    : device_(std::make_unique<lent_device>(device, params.n_threads, params.memory, params.max_buffer)),
      host_(params.host), n_threads_(params.n_threads) {
    if (params.port < 0 || params.port > 65535) {
        fail(SLOWAR_ARGUMENT, "port is %d, expected 0 to 65535", params.port);
    }
    if (is_served) {
        fail(SLOWAR_STATE, "this process has a device server already");
    }
    listener  = std::make_unique<tcp_socket>(tcp_socket::listen(host_, params.port));
    port_     = listener->port();
    is_served = true;
}

server::~server() {
    listener.reset();
    is_served = false;
}

void server::run() {
    ggml_backend_dev_t device = device_->get();
    // The listener is there already; an address that ggml understands is all it wants, which one of IPv6 is not.
    const std::string endpoint = text("127.0.0.1:%d", port_);
    ggml_backend_rpc_start_server(endpoint.c_str(), nullptr, size_t(n_threads_), 1, &device);
    fail(SLOWAR_COMPUTE, "the device server ended: %s:%d is not listened at any more", host_.c_str(), port_);
}

}  // namespace slowar
