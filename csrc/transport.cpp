// The connections of ggml's RPC, in place of its own: there, a server that is lost ends the process of the client. Here
// its requests are answered with zeros from then on, which end in an error as soon as the library looks (check_answers).
#include "transport.h"

#include "error.h"
#include "ggml-rpc.h"
#include "remote.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <vector>

using namespace slowar;

namespace {

// Requests of the protocol below, as far as they matter here. A request is its number (1 byte), the size of what comes
// with it (8 bytes), and that; a reply, where there is one, is a size (8 bytes) and that.
static_assert(RPC_PROTO_MAJOR_VERSION == 7 && RPC_PROTO_MINOR_VERSION == 0, "look at the requests anew");

enum request : uint8_t {
    ALLOC_BUFFER      = 0,
    GET_ALIGNMENT     = 1,
    GET_MAX_SIZE      = 2,
    BUFFER_GET_BASE   = 3,
    FREE_BUFFER       = 4,
    SET_TENSOR_HASH   = 7,
    GET_TENSOR        = 8,
    COPY_TENSOR       = 9,
    GRAPH_COMPUTE     = 10,
    GET_DEVICE_MEMORY = 11,
    GET_ALLOC_SIZE    = 13,
    HELLO             = 14,
    DEVICE_COUNT      = 15,
    GRAPH_RECOMPUTE   = 16,
};

// A server that computes or is busy with another client is silent; one that is gone is noticed by the socket.
constexpr int hello_ms = 5000;
constexpr int reply_ms = 300000;
constexpr int idle     = -1;

template <typename value_t> value_t value_at(const void * data) {
    value_t out;
    std::memcpy(&out, data, sizeof(out));
    return out;
}

size_t reply_size(request what, const std::vector<uint8_t> & with) {
    switch (what) {
        case ALLOC_BUFFER:
        case GET_DEVICE_MEMORY: return 16;
        case GET_ALIGNMENT:
        case GET_MAX_SIZE:
        case BUFFER_GET_BASE:
        case GET_ALLOC_SIZE:    return 8;
        case SET_TENSOR_HASH:
        case COPY_TENSOR:       return 1;
        case GET_TENSOR:        return size_t(value_at<uint64_t>(with.data() + with.size() - 8));  // its last field
        case HELLO:             return 4 + RPC_CONN_CAPS_SIZE;
        case DEVICE_COUNT:      return 4;
        default:                return 0;
    }
}

// A reply that ggml takes for a good one: no memory, no device, nothing to be sent.
void make_up(request what, void * out, size_t n) {
    std::memset(out, 0, n);
    uint64_t value = 0;
    switch (what) {
        case GET_ALIGNMENT:   value = 128; break;
        case GET_MAX_SIZE:    value = UINT64_MAX; break;
        case BUFFER_GET_BASE: value = 4096; break;  // never looked at, only counted from
        case SET_TENSOR_HASH:
        case COPY_TENSOR:     value = 1; break;
        case HELLO:           value = RPC_PROTO_MAJOR_VERSION | RPC_PROTO_MINOR_VERSION << 8; break;
        default:              return;
    }
    std::memcpy(out, &value, std::min(n, sizeof(value)));
}

// The asking side of a connection.
class client {
  public:
    client(const std::string & host, int port) : endpoint_(text("%s:%d", host.c_str(), port)) {
        note_connection(endpoint_, "");
        try_to([&] { socket_.emplace(tcp_socket::connect(host, port, hello_ms)); });
    }

    // Piece by piece: the number, the size, what comes with it.
    void send(const void * data, size_t n) {
        switch (piece_++) {
            case 0: what_ = value_at<request>(data); break;
            case 1: break;
            case 2:
                piece_ = 0;
                ask(static_cast<const uint8_t *>(data), n);
                break;
        }
    }

    // The size, then the reply.
    void receive(void * out, size_t n) {
        if (!size_is_known_) {
            uint64_t size = reply_size(what_, asked_);
            try_to([&] {
                const uint64_t expected = size;
                socket_->receive(&size, sizeof(size), timeout());
                if (size != expected) {
                    size = expected;
                    fail(SLOWAR_OS, "it does not speak the protocol: a reply of another size");
                }
            });
            std::memcpy(out, &size, n);
            size_is_known_ = true;
            return;
        }
        size_is_known_ = false;
        try_to([&] {
            socket_->receive(out, n, timeout());
            const auto * version = static_cast<const uint8_t *>(out);
            if (what_ == HELLO && (version[0] != RPC_PROTO_MAJOR_VERSION || version[1] > RPC_PROTO_MINOR_VERSION)) {
                fail(SLOWAR_OS, "it speaks version %d.%d of the protocol, expected %d.%d", version[0], version[1],
                     RPC_PROTO_MAJOR_VERSION, RPC_PROTO_MINOR_VERSION);
            }
        });
        if (!socket_) {
            make_up(what_, out, n);
        }
    }

  private:
    int timeout() const { return what_ == HELLO ? hello_ms : reply_ms; }

    // Nothing comes out of a connection once something went wrong with it.
    template <typename body_t> void try_to(body_t && body) {
        if (is_lost_) {
            return;
        }
        try {
            body();
        } catch (const std::exception & e) {
            is_lost_ = true;
            socket_.reset();
            note_connection(endpoint_, e.what());
        }
    }

    // A server forgets what it computed last whenever memory is given back, and drops a client that asks for the same
    // again; ggml's client knows nothing of that. So the last graphs are kept here.
    void ask(const uint8_t * data, size_t n) {
        request what = what_;
        asked_.assign(data, data + (n <= small ? n : 0));
        const uint32_t device = n >= sizeof(uint32_t) ? value_at<uint32_t>(data) : 0;
        if (what == FREE_BUFFER) {
            for (auto & kept : graphs_) {
                kept.second.is_forgotten = true;
            }
        } else if (what == GRAPH_COMPUTE) {
            graphs_[device] = { { data, data + n }, false };
        } else if (what == GRAPH_RECOMPUTE && graphs_[device].is_forgotten) {
            graph & again      = graphs_[device];
            again.is_forgotten = false;
            what               = GRAPH_COMPUTE;
            data               = again.bytes.data();
            n                  = again.bytes.size();
        }
        try_to([&] {
            std::array<uint8_t, 1 + sizeof(uint64_t)> head;
            const uint64_t                            size = n;
            head[0]                                        = what;
            std::memcpy(&head[1], &size, sizeof(size));
            socket_->send(head.data(), head.size(), reply_ms);
            socket_->send(data, n, reply_ms);
        });
    }

    struct graph {
        std::vector<uint8_t> bytes;
        bool                 is_forgotten;
    };

    static constexpr size_t small = 4096;  // requests that have replies are shorter

    std::string               endpoint_;
    std::optional<tcp_socket> socket_;
    bool                      is_lost_       = false;
    int                       piece_         = 0;
    request                   what_          = HELLO;
    bool                      size_is_known_ = false;
    std::vector<uint8_t>      asked_;
    std::map<uint32_t, graph> graphs_;  // of each device
};

}  // namespace

struct socket_t::impl {
    std::unique_ptr<client>     asking;
    std::unique_ptr<tcp_socket> serving;             // or listening
    bool                        is_greeted = false;  // who connects and says nothing must not keep the others waiting
};

socket_t::socket_t(std::unique_ptr<impl> p) : pimpl(std::move(p)) {}

socket_t::~socket_t() = default;

// ggml aborts where this fails, so it never does.
socket_ptr socket_t::connect(const char * host, int port) {
    auto out    = std::make_unique<impl>();
    out->asking = std::make_unique<client>(host, port);
    return socket_ptr(new socket_t(std::move(out)));
}

socket_ptr socket_t::create_server(const char *, int) {
    auto out     = std::make_unique<impl>();
    out->serving = take_listener();
    return socket_ptr(new socket_t(std::move(out)));
}

socket_ptr socket_t::accept() {
    try {
        auto out     = std::make_unique<impl>();
        out->serving = std::make_unique<tcp_socket>(pimpl->serving->accept());
        return socket_ptr(new socket_t(std::move(out)));
    } catch (const std::exception & e) {
        return nullptr;
    }
}

bool socket_t::send_data(const void * data, size_t size) {
    if (pimpl->asking) {
        pimpl->asking->send(data, size);
        return true;
    }
    try {
        pimpl->serving->send(data, size, reply_ms);
        return true;
    } catch (const std::exception & e) {
        return false;
    }
}

bool socket_t::recv_data(void * data, size_t size) {
    if (pimpl->asking) {
        pimpl->asking->receive(data, size);
        return true;
    }
    try {
        pimpl->serving->receive(data, size, pimpl->is_greeted ? idle : hello_ms);
        pimpl->is_greeted = true;
        return true;
    } catch (const std::exception & e) {
        return false;
    }
}

bool socket_t::flush() {
    return true;
}

void socket_t::get_caps(uint8_t * local_caps) {
    std::memset(local_caps, 0, RPC_CONN_CAPS_SIZE);  // TCP alone
}

void socket_t::update_caps(const uint8_t *) {}

bool rpc_transport_init() {
    return true;
}

void rpc_transport_shutdown() {}
