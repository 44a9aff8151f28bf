// Python's door to the queue and its tickets: holds checked arrays while a job may use them, drops the GIL to wait.
#include <optional>

#include "engine.hpp"
#include "jobs.hpp"

namespace treadle::dataplane {
namespace {

struct TicketDoor {
    EngineRef engine;
    TicketRef ticket;
    int64_t rows_per_unit;

    bool ended() {
        const bool ended = ticket->ended();
        if (ended) ticket->arrays.reset();
        return ended;
    }

    // True once all rows are there; false when it was cancelled, or `seconds` are over.
    bool wait(double seconds) {
        const int64_t until = now_ns() + static_cast<int64_t>(seconds * 1e9);
        while (!ended()) {
            const int64_t now = now_ns();
            if (now >= until) return false;
            engine->wait_without_gil(*ticket, std::min(until, now + SIGNAL_CHECK_NS));
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        }
        return ticket->state() == State::complete;
    }

    // Stops it, waits for the pieces in flight (bounded: piece_rows), returns how many rows, from the first on, are there.
    int64_t cancel() {
        if (!ended()) engine->queue.stop(ticket);
        while (!ended()) engine->wait_without_gil(*ticket, now_ns() + SIGNAL_CHECK_NS);
        return ticket->done_units() * rows_per_unit;
    }
};

std::optional<TicketDoor> submit(const EngineRef& engine, Job job, int64_t rows_per_unit, int64_t deadline_ns, py::tuple arrays) {
    engine->let_go_of_finished();
    const auto ticket = std::make_shared<Ticket>(std::move(job), deadline_ns, hold(std::move(arrays)));
    if (!engine->queue.submit(ticket)) return std::nullopt;
    return TicketDoor{engine, ticket, rows_per_unit};
}

std::optional<TicketDoor> submit_lookup(const EngineRef& engine, const py::object& plan, const py::object& table,
                                        const py::object& windows, const py::object& out, int64_t deadline_ns) {
    auto* filled = static_cast<std::byte*>(borrow<uint8_t>(out, "out").mutable_data());
    const auto view = view_of_plan(plan);
    Job job = lookup_job(view, view_of_windows(windows), rows_of(table), filled, engine->piece_rows);
    return submit(engine, std::move(job), int64_t{view.order_count} * view.heads, deadline_ns, py::make_tuple(plan, table, windows, out));
}

std::optional<TicketDoor> submit_gather(const EngineRef& engine, const py::object& table, const py::object& rows,
                                        const py::object& out, int64_t deadline_ns) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    auto* filled = static_cast<std::byte*>(borrow<uint8_t>(out, "out").mutable_data());
    Job job = gather_job(rows_of(table), static_cast<const int64_t*>(ids.data()), ids.size(), filled, engine->piece_rows);
    return submit(engine, std::move(job), 1, deadline_ns, py::make_tuple(table, rows, out));
}

}  // namespace

void bind_queue(py::module_& module) {
    py::class_<TicketDoor>(module, "Ticket")
        .def_property_readonly("submitted_ns", [](const TicketDoor& door) { return door.ticket->submitted_ns.load(); })
        .def_property_readonly("started_ns", [](const TicketDoor& door) { return door.ticket->started_ns.load(); })
        .def_property_readonly("finished_ns", [](const TicketDoor& door) { return door.ticket->finished_ns.load(); })
        .def_property_readonly("ended", &TicketDoor::ended)
        .def_property_readonly("cancelled", [](const TicketDoor& door) { return door.ticket->ended() && door.ticket->state() != State::complete; })
        .def_property_readonly("fault", [](const TicketDoor& door) { return static_cast<int>(door.ticket->ended() ? door.ticket->fault : Fault::none); })
        .def("wait", &TicketDoor::wait)
        .def("cancel", &TicketDoor::cancel)
        .def("fileno", [](const TicketDoor& door) { return door.ticket->event_fd(); })
        .def("close", [](const TicketDoor& door) { door.ticket->close_event_fd(); });
    py::class_<Engine, EngineRef>(module, "Engine")
        .def(py::init(&make_engine))
        .def("submit_lookup", &submit_lookup)
        .def("submit_gather", &submit_gather)
        .def("stats", &Engine::stats)
        .def("close", &Engine::close);
}

}  // namespace treadle::dataplane
