// Python's door to both sides of the ring: a server over an engine and its versions, and clients with their buffers and calls.
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "ring_call.hpp"
#include "ring_server.hpp"

namespace treadle::dataplane {
namespace {

using ring::Call;
using ring::Client;
using ClientRef = std::shared_ptr<Client>;
using LayerTuple = std::tuple<int64_t, int64_t, py::array>;  // number, deadline_ns, out

[[noreturn]] void fail(int code, const char* what) { throw std::system_error(code, std::generic_category(), what); }

// A forked child has no thread to join: it leaks its copy.
std::shared_ptr<ring::Server> make_server(const EngineRef& engine, std::shared_ptr<Versions> versions, const std::string& path, int clients_max,
                                          size_t arena_bytes_max, std::vector<uint32_t> users) {
    const pid_t made_in = ::getpid();
    ring::Limits limits{clients_max, arena_bytes_max, std::move(users)};
    return {new ring::Server(engine->queue, std::move(versions), engine->piece_rows, path, std::move(limits)), [made_in](ring::Server* server) {
                if (::getpid() == made_in) delete server;
            }};
}

py::dict stats_of(const ring::Server& server) {
    py::dict stats;
    stats["clients"] = server.clients();
    stats["requests_total"] = server.tally().requests.load();
    stats["rows_total"] = server.tally().rows.load();
    stats["refused_total"] = server.tally().refused.load();
    stats["failed_total"] = server.tally().failed.load();
    return stats;
}

// A forked child has no listener to join: it leaks its copy.
ClientRef make_client(const std::string& path, const py::bytes& token, uint64_t arena_bytes, double seconds) {
    const pid_t made_in = ::getpid();
    const Digest digest = digest_of(token, "token");
    const int64_t until = now_ns() + static_cast<int64_t>(seconds * 1e9);
    const py::gil_scoped_release nogil;
    return {new Client(path, digest, arena_bytes, until), [made_in](Client* client) {
                if (::getpid() == made_in) delete client;
            }};
}

Client::BlockRef take(Client& client, uint64_t bytes) {
    Client::BlockRef block = client.take(bytes);
    if (block == nullptr) fail(ENOSPC, "arena");
    return block;
}

py::array buffer_of(const ClientRef& client, uint64_t bytes) {
    Client::BlockRef block = client->take_named(bytes);
    if (block == nullptr) fail(ENOSPC, "arena");
    auto* data = reinterpret_cast<uint8_t*>(block->data());
    const py::capsule owner(new Client::BlockRef(std::move(block)), [](void* held) { delete static_cast<Client::BlockRef*>(held); });
    return py::array_t<uint8_t>({static_cast<py::ssize_t>(bytes)}, data, owner);
}

ring::Target target_of(Client& client, const py::array& out) {
    py::array checked = borrow<uint8_t>(out, "out");
    auto* data = static_cast<std::byte*>(checked.mutable_data());
    const auto bytes = static_cast<uint64_t>(checked.nbytes());
    if (Client::BlockRef block = client.block_of(data, bytes); block && client.offset(data) % 8 == 0) return {std::move(block), client.offset(data), nullptr};
    Client::BlockRef block = take(client, bytes);
    const uint64_t at = block->at;
    return {std::move(block), at, data};
}

uint64_t put(Client::Block& block, uint64_t& used, const void* data, uint64_t bytes) {
    const uint64_t at = used;
    if (bytes > 0) std::memcpy(block.data() + at, data, bytes);
    used += (bytes + 7) / 8 * 8;
    return block.at + at;
}

// The windows of a step, once in the arena for all of its layers.
Client::BlockRef put_windows(Client& client, const py::object& object, ring::Request& request) {
    const kernels::WindowsView view = view_of_windows(object);
    const uint64_t tokens = static_cast<uint64_t>(view.token_count), requests = static_cast<uint64_t>(view.request_count);
    const uint64_t lookback = requests * static_cast<uint64_t>(view.lookback_columns);
    Client::BlockRef block = take(client, 8 * tokens + 4 * (requests + 2) + 8 * lookback + tokens + lookback + 16);
    uint64_t used = 0;
    request.count = view.token_count;
    request.request_count = view.request_count;
    request.lookback_columns = view.lookback_columns;
    request.in_at = put(*block, used, view.tokens, 8 * tokens);
    request.starts_at = put(*block, used, view.starts, 4 * (requests + 1));
    request.lookback_at = put(*block, used, view.lookback, 8 * lookback);
    request.dead_at = view.dead == nullptr ? ring::NOWHERE : put(*block, used, view.dead, tokens);
    request.lookback_dead_at = view.lookback_dead == nullptr ? ring::NOWHERE : put(*block, used, view.lookback_dead, lookback);
    return block;
}

// A call, waited for with signals heard.
struct CallDoor {
    std::unique_ptr<Call> call;
    py::object out;  // the caller's array, kept until nothing is written to it

    bool ended() {
        const bool ended = call->ended();
        if (ended) out = py::object();
        return ended;
    }

    bool wait(double seconds) {
        const int64_t until = now_ns() + static_cast<int64_t>(seconds * 1e9);
        while (!ended()) {
            const int64_t now = now_ns();
            if (now >= until) return false;
            {
                const py::gil_scoped_release nogil;
                call->wait_until(std::min(until, now + SIGNAL_CHECK_NS));
            }
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
        return call->complete();
    }

    int64_t cancel() {
        call->stop();
        const int64_t until = now_ns() + (call->copies() ? ring::STOP_COPIED_NS_MAX : ring::STOP_NS_MAX);
        const py::gil_scoped_release nogil;
        if (!call->wait_until(until)) call->copies() ? call->leave() : call->give_up();
        return call->ended() ? call->answer().rows_done : 0;
    }
};

std::vector<CallDoor> submit(const ClientRef& client, const py::bytes& version, const std::vector<LayerTuple>& layers, ring::Request request,
                             const Client::BlockRef& in) {
    if (client->lost()) fail(ENOTCONN, "ring");
    const Digest digest = digest_of(version, "version");
    std::memcpy(request.version.data(), digest.data(), digest.size());
    std::vector<CallDoor> doors;
    uint64_t slots = 0;
    try {
        for (const auto& [number, deadline_ns, out] : layers) {
            ring::Target target = target_of(*client, out);
            const int slot = client->take_slot();
            if (slot < 0) fail(EBUSY, "ring");
            const int64_t row_bytes = out.shape(out.ndim() - 1), rows = out.size() / std::max<int64_t>(1, row_bytes);
            request.layer = number;
            request.deadline_ns = deadline_ns;
            request.out_at = target.at;
            client->put(slot, request);
            slots |= uint64_t{1} << slot;
            doors.push_back({std::make_unique<Call>(client, slot, in, std::move(target), rows, row_bytes), out});
        }
    } catch (...) {  // all or none: nothing was shown to the server yet
        for (CallDoor& door : doors) door.call->withdraw();
        throw;
    }
    client->submit(slots);
    return doors;
}

std::vector<CallDoor> submit_lookup(const ClientRef& client, const py::bytes& version, const std::vector<LayerTuple>& layers, const py::object& windows) {
    ring::Request request{};
    request.kind = static_cast<uint64_t>(ring::Kind::lookup);
    const Client::BlockRef in = put_windows(*client, windows, request);
    return submit(client, version, layers, request, in);
}

CallDoor submit_gather(const ClientRef& client, const py::bytes& version, int64_t layer, int64_t deadline_ns, const py::object& rows, const py::array& out) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    ring::Request request{};
    request.kind = static_cast<uint64_t>(ring::Kind::gather);
    request.count = ids.size();
    const Client::BlockRef in = take(*client, static_cast<uint64_t>(ids.nbytes()));
    uint64_t used = 0;
    request.in_at = put(*in, used, ids.data(), static_cast<uint64_t>(ids.nbytes()));
    return std::move(submit(client, version, {{layer, deadline_ns, out}}, request, in).front());
}

// A gather from check to last row. None: all rows are there; a number: the place of the first id outside the table, nothing was
// sent; a call: what ended it says why, or that the time was over.
py::object gather(const ClientRef& client, const py::bytes& version, int64_t layer, int64_t row_count, int64_t deadline_ns, const py::object& rows,
                  const py::array& out) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    const int64_t bad = kernels::first_out_of_range(static_cast<const int64_t*>(ids.data()), ids.size(), row_count);
    if (bad >= 0) return py::int_(bad);
    CallDoor door = submit_gather(client, version, layer, deadline_ns, rows, out);
    const double seconds = static_cast<double>(std::max<int64_t>(0, deadline_ns - now_ns())) / 1e9;
    if (door.wait(seconds)) return py::none();
    if (!door.ended()) door.cancel();
    return py::cast(std::move(door));
}

void bind_client(py::module_& module) {
    py::class_<CallDoor>(module, "RingCall")
        .def_property_readonly("submitted_ns", [](const CallDoor& door) { return door.call->submitted_ns; })
        .def_property_readonly("started_ns", [](CallDoor& door) { return door.ended() ? door.call->answer().started_ns : 0; })
        .def_property_readonly("finished_ns", [](CallDoor& door) { return door.ended() ? door.call->answer().finished_ns : 0; })
        .def("refusal",
             [](CallDoor& door) {  // predicted_finish_ns, retry_after_ns, reason
                 const ring::Answer& answer = door.call->answer();
                 return std::tuple<int64_t, int64_t, int64_t>{answer.predicted_finish_ns, answer.retry_after_ns, answer.reason};
             })
        .def_property_readonly("ended", &CallDoor::ended)
        .def_property_readonly("complete", [](CallDoor& door) { return door.ended() && door.call->complete(); })
        .def_property_readonly("fault", [](CallDoor& door) { return static_cast<int>(door.ended() ? door.call->fault() : Fault::none); })
        .def("wait", &CallDoor::wait)
        .def("cancel", &CallDoor::cancel)
        .def("fileno", [](CallDoor& door) { return door.call->event_fd(); })
        .def("close", [](CallDoor& door) { door.call->close_event_fd(); });
    py::class_<Client, ClientRef>(module, "RingClient")
        .def(py::init(&make_client))
        .def_property_readonly("lost", &Client::lost)
        .def_property_readonly("arena_bytes", &Client::arena_bytes)
        .def_property_readonly("arena_taken_bytes", &Client::arena_taken_bytes)
        .def_property_readonly("hot_rows",
                               [](const Client& client) {
                                   std::vector<int> caches;
                                   for (const auto& cache : client.hot_rows()) caches.push_back(cache.get());
                                   return caches;
                               })
        .def("buffer", &buffer_of)
        .def("submit_lookup", &submit_lookup)
        .def("submit_gather", &submit_gather)
        .def("gather", &gather)
        .def("close", &Client::close, py::call_guard<py::gil_scoped_release>());
}

void raise_refused(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const ring::Refused& refused) {
        const py::object error = py::module_::import("treadle.dataplane.ring").attr("RingRefused");
        PyErr_SetObject(error.ptr(), py::make_tuple(static_cast<int>(refused.fault), refused.arena_bytes_max).ptr());
    }
}

}  // namespace

void bind_ring(py::module_& module) {
    py::register_exception_translator(raise_refused);
    bind_client(module);
    py::class_<ring::Server, std::shared_ptr<ring::Server>>(module, "RingServer")
        .def(py::init(&make_server), py::keep_alive<1, 2>())
        .def("stats", &stats_of)
        .def("add_hot_rows", &ring::Server::add_hot_rows)
        .def("close", &ring::Server::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace treadle::dataplane
