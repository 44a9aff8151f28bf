// Python's door to the socket data plane: open and watch a server; start, await and cancel lookups over owners.
#include <cstring>
#include <future>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine.hpp"
#include "remote_client.hpp"
#include "remote_rows.hpp"
#include "socket_server.hpp"

namespace treadle::dataplane {
namespace {

// -- server --

struct ServerDoor {
    EngineRef engine;
    std::unique_ptr<SocketServer> server;
    pid_t made_in = ::getpid();

    ~ServerDoor() {
        if (::getpid() != made_in) static_cast<void>(server.release());  // a forked child has none of its threads
    }
};

std::unique_ptr<ServerDoor> open_server(const EngineRef& engine, const std::shared_ptr<Versions>& versions, const std::vector<int>& listeners,
                                        int connections_max, uint64_t reply_bytes_max, double idle_seconds, double stall_seconds, double greet_seconds) {
    std::vector<Descriptor> owned;
    for (const int fd : listeners) owned.emplace_back(fd);
    const SocketLimits limits{connections_max, reply_bytes_max, static_cast<int64_t>(idle_seconds * 1e9), static_cast<int64_t>(stall_seconds * 1e9),
                              static_cast<int64_t>(greet_seconds * 1e9)};
    auto door = std::make_unique<ServerDoor>();
    door->engine = engine;
    door->server = std::make_unique<SocketServer>(engine->queue, engine->piece_rows, versions, limits, std::move(owned));
    return door;
}

py::dict server_stats(const ServerDoor& door) {
    const SocketCounters& now = door.server->counters();
    py::dict counters;
    counters["connections"] = now.connections.load();
    counters["connections_total"] = now.connections_total.load();
    counters["cut_total"] = now.cut_total.load();
    counters["requests_total"] = now.requests_total.load();
    counters["refused_total"] = now.refused_total.load();
    counters["rows_total"] = now.rows_total.load();
    counters["bytes_total"] = now.bytes_total.load();
    return counters;
}

// -- client --

struct HubDoor {
    HubRef hub = std::make_shared<Hub>();
    int waiters = 0;  // threads of Python inside a wait; guarded by the GIL
    pid_t made_in = ::getpid();

    ~HubDoor() {
        if (::getpid() != made_in) new HubRef(hub);  // a forked child has not its thread: never destroyed there
    }

    void close() {
        {
            const py::gil_scoped_release nogil;
            hub->reactor->close();
        }
        while (waiters > 0) {
            const py::gil_scoped_release nogil;
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }
};
using HubDoorRef = std::shared_ptr<HubDoor>;

struct ClientDoor {
    HubDoorRef hub;
    std::shared_ptr<RemoteClient> client;

    void let_go_of_finished() {
        for (const TicketRef& ticket : client->take_finished()) ticket->arrays.reset();
    }
    void close() {
        const auto done = std::make_shared<std::promise<void>>();
        client->close([done] { done->set_value(); });
        {
            const py::gil_scoped_release nogil;
            done->get_future().wait();
        }
        let_go_of_finished();
    }
};
using ClientDoorRef = std::shared_ptr<ClientDoor>;

struct RemoteTicketDoor {
    ClientDoorRef client;
    CallRef call;
    size_t layer;

    Ticket& ticket() const { return *call->layers[layer].ticket; }

    bool ended() {
        const bool ended = ticket().ended();
        if (ended) ticket().arrays.reset();
        return ended;
    }
    void wait_without_gil(int64_t until_ns) {
        ++client->hub->waiters;
        {
            const py::gil_scoped_release nogil;
            ticket().wait_until(until_ns);
        }
        --client->hub->waiters;
    }
    bool wait(double seconds) {
        const int64_t until = now_ns() + static_cast<int64_t>(seconds * 1e9);
        while (!ended()) {
            const int64_t now = now_ns();
            if (now >= until) return false;
            wait_without_gil(std::min(until, now + SIGNAL_CHECK_NS));
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
        return ticket().state() == State::complete;
    }
    // bool [rows]: True where the row is there. Nobody writes to `out` afterwards.
    py::array_t<bool> cancel() {
        if (!ended()) client->client->cancel(call, layer);
        while (!ended()) wait_without_gil(now_ns() + SIGNAL_CHECK_NS);
        const CallLayer& mine = call->layers[layer];
        py::array_t<bool> there(mine.row_count);
        bool* flags = there.mutable_data();
        std::fill(flags, flags + mine.row_count, ticket().state() == State::complete);
        for (const auto& [work, index] : mine.came) {
            const Segment& segment = work->segments[index];
            if (segment.positions.empty()) std::fill_n(flags + segment.first_row, static_cast<int64_t>(segment.bytes) / mine.row_bytes, true);
            for (const int64_t position : segment.positions) flags[position] = true;
        }
        return there;
    }
};

ClientDoorRef open_client(const HubDoorRef& hub, const py::bytes& digest, const py::bytes& fingerprint, const py::bytes& token,
                          const std::vector<std::tuple<int32_t, int64_t, int64_t, py::object>>& layers) {
    auto version = std::make_shared<RemoteVersion>();
    version->digest = digest_of(digest, "digest");
    version->fingerprint = digest_of(fingerprint, "fingerprint");
    version->token = digest_of(token, "token");
    for (const auto& [number, row_count, row_bytes, plan] : layers)
        version->layers.push_back({number, row_count, row_bytes, plan.is_none() ? nullptr : std::make_shared<Plan>(view_of_plan(plan))});
    version->change([&](RemoteVersion::Spread& spread) { spread.routes.resize(layers.size()); });
    return std::make_shared<ClientDoor>(ClientDoor{hub, std::make_shared<RemoteClient>(hub->hub, std::move(version))});
}

int add_owner(ClientDoor& door, const std::string& address) {
    if (SocketAddress parsed; !parsed.parse(address)) throw py::value_error("address: a number and a port, or unix:PATH, got " + address);
    int index = -1;
    const OwnerRef owner = door.hub->hub->owner(address);
    door.client->version()->change([&](RemoteVersion::Spread& spread) {
        auto place = spread.owners.end();
        if (spread.owners.size() >= static_cast<size_t>(OWNERS_MAX)) {  // the place of one that left
            place = std::find(spread.owners.begin(), spread.owners.end(), nullptr);
            if (place == spread.owners.end()) return;
        }
        index = static_cast<int>(place - spread.owners.begin());
        if (place == spread.owners.end()) spread.owners.push_back(owner);
        else *place = owner;
    });
    return index;
}

void remove_owner(ClientDoor& door, size_t index) {
    door.client->version()->change([&](RemoteVersion::Spread& spread) {
        if (index < spread.owners.size()) spread.owners[index] = nullptr;
    });
}

using RouteTuple = std::tuple<int32_t, py::object, py::object>;  // layer, bounds int64 [S + 1], owners int32 [S, R]; checked by the face

void set_routes(ClientDoor& door, const std::vector<RouteTuple>& routes) {
    const RemoteVersionRef& version = door.client->version();
    std::vector<std::pair<size_t, RoutesRef>> made;
    for (const auto& [number, bounds, owners] : routes) {
        const int place = version->position(number);
        if (place < 0) throw py::value_error("routes: no such layer");
        const py::array ends = borrow<int64_t>(bounds, "bounds"), held = borrow<int32_t>(owners, "owners");
        const auto* first = static_cast<const int64_t*>(ends.data());
        const auto* names = static_cast<const int32_t*>(held.data());
        made.emplace_back(static_cast<size_t>(place), std::make_shared<Routes>(Routes{{first, first + ends.size()}, {names, names + held.size()},
                                                                                       static_cast<int>(held.shape(1))}));
    }
    version->change([&](RemoteVersion::Spread& spread) {
        for (auto& [place, each] : made) spread.routes[place] = std::move(each);
    });
}

struct Wanted {
    int32_t number;
    const int64_t* ids;  // gather
    int64_t rows;
    std::byte* out;
    int64_t deadline_ns;
};

// A call with its tickets, not started. `arrays` lives until the last ticket has ended.
CallRef make_call(const RemoteVersion& version, const std::vector<Wanted>& wanted, int64_t patience_ns, int64_t give_up_ns,
                  const std::shared_ptr<void>& arrays) {
    auto call = std::make_shared<Call>();
    call->spread = version.spread();
    call->header.version = version.digest;
    call->header.fingerprint = version.fingerprint;
    call->header.token = version.token;
    call->deadline_ns = INT64_MAX;
    call->patience_ns = patience_ns;
    call->give_up_ns = give_up_ns;
    call->whole = true;
    for (const Wanted& each : wanted) {
        const int place = version.position(each.number);
        if (place < 0) throw py::value_error("layers: no such layer");
        const RemoteLayer& layer = version.layers[static_cast<size_t>(place)];
        call->whole &= call->spread->routes[static_cast<size_t>(place)] == nullptr;
        call->layers.push_back({std::make_shared<Ticket>(Job{{}, each.rows, 1}, each.deadline_ns, arrays), each.out, each.rows, layer.row_bytes, 0, {}});
        call->layers.back().ticket->submitted_ns = call->layers.back().ticket->started_ns = now_ns();
        call->numbers.push_back(each.number);
        call->row_bytes.push_back(layer.row_bytes);
        call->deadline_ns = std::min(call->deadline_ns, each.deadline_ns);
    }
    return call;
}

std::vector<Share> gather_shares(const RemoteVersion& version, const Call& call, std::vector<Segment> segments) {
    const Split split(call, 0, now_ns());
    if (call.whole) {
        std::vector<AskRef> works;
        for (std::vector<Segment>& each : cut(std::move(segments), call.row_bytes)) works.push_back(gather_work(std::move(each), call.numbers, call.row_bytes));
        return split.whole(works);
    }
    std::vector<int> places;
    for (const int32_t number : call.numbers) places.push_back(version.position(number));
    return split.rows(segments, places);
}

std::vector<Share> lookup_shares(const RemoteVersion& version, const Call& call, const kernels::WindowsView& windows, int64_t columns) {
    if (call.whole) {
        std::vector<AskedOf> asked;
        for (size_t i = 0; i < call.layers.size(); ++i)
            asked.push_back({&version.layers[static_cast<size_t>(version.position(call.numbers[i]))], static_cast<int>(i)});
        return Split(call, 0, now_ns()).whole(lookup_works(asked, windows, columns));
    }
    std::vector<Segment> segments;
    for (size_t i = 0; i < call.layers.size(); ++i) {
        segments.push_back({static_cast<int>(i), 0, 0, std::vector<int64_t>(static_cast<size_t>(call.layers[i].row_count)), {}});
        const RemoteLayer& layer = version.layers[static_cast<size_t>(version.position(call.numbers[i]))];
        kernels::hash_rows(layer.plan->view, windows, 0, windows.token_count, segments.back().ids.data());
    }
    return gather_shares(version, call, std::move(segments));
}

using Tickets = std::variant<std::vector<RemoteTicketDoor>, int>;  // or the fault that refused them

Tickets start(const ClientDoorRef& door, const CallRef& call, std::vector<Share> shares, bool empty) {
    door->let_go_of_finished();
    if (empty) {
        for (CallLayer& layer : call->layers) layer.ticket->end(State::complete);
    } else if (const Fault fault = door->client->start(call, std::move(shares)); fault != Fault::none) {
        return static_cast<int>(fault);
    }
    std::vector<RemoteTicketDoor> tickets;
    for (size_t i = 0; i < call->layers.size(); ++i) tickets.push_back({door, call, i});
    return tickets;
}

Tickets submit_lookup(const ClientDoorRef& door, const py::object& windows, const std::vector<std::tuple<int32_t, py::object, int64_t>>& layers,
                      int64_t patience_ns, int64_t give_up_ns) {
    const kernels::WindowsView view = view_of_windows(windows);
    const RemoteVersion& version = *door->client->version();
    std::vector<Wanted> wanted;
    py::list outs;
    int64_t columns = 0;
    for (const auto& [number, out, deadline_ns] : layers) {
        py::array filled = borrow<uint8_t>(out, "out");
        columns = filled.shape(1);
        wanted.push_back({number, nullptr, filled.shape(0) * columns, static_cast<std::byte*>(filled.mutable_data()), deadline_ns});
        outs.append(out);
    }
    const CallRef call = make_call(version, wanted, patience_ns, give_up_ns, hold(py::make_tuple(outs)));
    for (const int32_t number : call->numbers)
        if (!call->whole && !version.layers[static_cast<size_t>(version.position(number))].plan) throw py::value_error("plan: none, and the table is spread");
    std::vector<Share> shares;
    if (view.token_count > 0) {
        const py::gil_scoped_release nogil;
        shares = lookup_shares(version, *call, view, columns);
    }
    return start(door, call, std::move(shares), view.token_count == 0);
}

Tickets submit_gather(const ClientDoorRef& door, int32_t number, const py::object& rows, const py::object& out, int64_t deadline_ns, int64_t patience_ns,
                      int64_t give_up_ns) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    py::array filled = borrow<uint8_t>(out, "out");
    const auto* first = static_cast<const int64_t*>(ids.data());
    const RemoteVersion& version = *door->client->version();
    const std::vector<Wanted> wanted{{number, first, ids.size(), static_cast<std::byte*>(filled.mutable_data()), deadline_ns}};
    const CallRef call = make_call(version, wanted, patience_ns, give_up_ns, hold(py::make_tuple(out)));
    std::vector<Share> shares;
    if (ids.size() > 0) {
        const py::gil_scoped_release nogil;
        shares = gather_shares(version, *call, {{0, 0, 0, std::vector<int64_t>(first, first + wanted[0].rows), {}}});
    }
    return start(door, call, std::move(shares), ids.size() == 0);
}

// The client's own; it stays open as long as the store is used.
RowStoreRef store_of(const ClientDoorRef& door, int32_t number, int64_t give_up_ns, int64_t patience_ns) {
    const RemoteVersion& version = *door->client->version();
    const int place = version.position(number);
    if (place < 0) throw py::value_error("layers: no such layer");
    const RemoteLayer& layer = version.layers[static_cast<size_t>(place)];
    return std::make_shared<RemoteTable>(door->client, number, layer.row_count, layer.row_bytes, give_up_ns, patience_ns);
}

py::dict hub_stats(const HubDoor& door) {
    const RemoteCounters& now = door.hub->counters;
    py::dict counters;
    counters["requests_total"] = now.requests_total.load();
    counters["hedges_total"] = now.hedges_total.load();
    counters["hedges_won_total"] = now.hedges_won_total.load();
    counters["hedges_unpaid_total"] = now.hedges_unpaid_total.load();
    counters["failovers_total"] = now.failovers_total.load();
    counters["late_total"] = now.late_total.load();
    counters["bytes_total"] = now.bytes_total.load();
    counters["connects_total"] = now.connects_total.load();
    counters["losses_total"] = now.losses_total.load();
    return counters;
}

}  // namespace

void bind_socket(py::module_& module) {
    py::class_<ServerDoor>(module, "SocketServer")
        .def(py::init(&open_server))
        .def("stats", &server_stats)
        .def("drain", [](ServerDoor& door) { door.server->drain(); })
        .def("close", [](ServerDoor& door) {
            const py::gil_scoped_release nogil;
            door.server->close();
        });
    py::class_<RemoteTicketDoor>(module, "RemoteTicket")
        .def_property_readonly("submitted_ns", [](const RemoteTicketDoor& door) { return door.ticket().submitted_ns.load(); })
        .def_property_readonly("started_ns", [](const RemoteTicketDoor& door) { return door.ticket().started_ns.load(); })
        .def_property_readonly("finished_ns", [](const RemoteTicketDoor& door) { return door.ticket().finished_ns.load(); })
        .def_property_readonly("ended", &RemoteTicketDoor::ended)
        .def_property_readonly("complete", [](const RemoteTicketDoor& door) { return door.ticket().state() == State::complete; })
        .def_property_readonly("fault", [](const RemoteTicketDoor& door) { return static_cast<int>(door.ticket().ended() ? door.ticket().fault : Fault::none); })
        .def_property_readonly("predicted_finish_ns", [](const RemoteTicketDoor& door) { return door.ticket().ended() ? door.call->refusal.predicted_finish_ns : 0; })
        .def_property_readonly("retry_after_ns", [](const RemoteTicketDoor& door) { return door.ticket().ended() ? door.call->refusal.retry_after_ns : 0; })
        .def_property_readonly("said", [](const RemoteTicketDoor& door) { return py::bytes(door.ticket().ended() ? door.call->layers[door.layer].said : ""); })
        .def_property_readonly("reason", [](const RemoteTicketDoor& door) { return static_cast<int>(door.ticket().ended() ? door.call->refusal.reason : Reason::none); })
        .def("wait", &RemoteTicketDoor::wait)
        .def("cancel", &RemoteTicketDoor::cancel)
        .def("fileno", [](const RemoteTicketDoor& door) { return door.ticket().event_fd(); })
        .def("close", [](const RemoteTicketDoor& door) { door.ticket().close_event_fd(); });
    py::class_<HubDoor, HubDoorRef>(module, "RemoteHub").def(py::init<>()).def("stats", &hub_stats).def("close", &HubDoor::close);
    py::class_<ClientDoor, ClientDoorRef>(module, "RemoteClient")
        .def(py::init(&open_client))
        .def("add_owner", &add_owner)
        .def("remove_owner", &remove_owner)
        .def("set_routes", &set_routes)
        .def("submit_lookup", &submit_lookup)
        .def("submit_gather", &submit_gather)
        .def("store", &store_of)
        .def("close", &ClientDoor::close);
}

}  // namespace treadle::dataplane
