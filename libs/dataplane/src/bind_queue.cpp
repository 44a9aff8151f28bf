// Python's door to the queue and its tickets: holds checked arrays while a job may use them, drops the GIL to wait.
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

// A TicketDoor, or the Verdict that refuses it.
py::object submit(const EngineRef& engine, Job job, int64_t deadline_ns, int32_t tenant, py::tuple arrays) {
    engine->let_go_of_finished();
    const int64_t rows_per_unit = job.rows_per_unit;
    const auto ticket = std::make_shared<Ticket>(std::move(job), deadline_ns, hold(std::move(arrays)), tenant);
    const Verdict verdict = engine->queue.submit(ticket);
    return verdict ? py::cast(TicketDoor{engine, ticket, rows_per_unit}) : py::cast(verdict);
}

py::object submit_lookup(const EngineRef& engine, const py::object& plan, const py::object& table,
                         const py::object& windows, const py::object& out, int64_t deadline_ns, int32_t tenant) {
    auto* filled = static_cast<std::byte*>(borrow<uint8_t>(out, "out").mutable_data());
    const auto view = view_of_plan(plan);
    Job job = lookup_job(view, view_of_windows(windows), rows_of(table), filled, engine->piece_rows);
    return submit(engine, std::move(job), deadline_ns, tenant, py::make_tuple(plan, table, windows, out));
}

py::object submit_gather(const EngineRef& engine, const py::object& table, const py::object& rows, const py::object& out,
                         int64_t deadline_ns, int32_t tenant) {
    const py::array ids = borrow<int64_t>(rows, "rows");
    auto* filled = static_cast<std::byte*>(borrow<uint8_t>(out, "out").mutable_data());
    Job job = gather_job(rows_of(table), static_cast<const int64_t*>(ids.data()), ids.size(), filled, engine->piece_rows);
    return submit(engine, std::move(job), deadline_ns, tenant, py::make_tuple(table, rows, out));
}

}  // namespace

void bind_queue(py::module_& module) {
    py::class_<Verdict>(module, "Verdict")
        .def_property_readonly("fault", [](const Verdict& verdict) { return static_cast<int>(verdict.fault); })
        .def_property_readonly("reason", [](const Verdict& verdict) { return static_cast<int>(verdict.reason); })
        .def_readonly("predicted_finish_ns", &Verdict::predicted_finish_ns)
        .def_readonly("retry_after_ns", &Verdict::retry_after_ns);
    py::class_<TicketDoor>(module, "Ticket")
        .def_property_readonly("submitted_ns", [](const TicketDoor& door) { return door.ticket->submitted_ns.load(); })
        .def_property_readonly("started_ns", [](const TicketDoor& door) { return door.ticket->started_ns.load(); })
        .def_property_readonly("finished_ns", [](const TicketDoor& door) { return door.ticket->finished_ns.load(); })
        .def_property_readonly("busy_ns", [](const TicketDoor& door) { return door.ticket->busy_ns.load(); })
        .def_property_readonly("predicted_ns", [](const TicketDoor& door) { return door.ticket->told_ns; })
        .def_property_readonly("ended", &TicketDoor::ended)
        .def_property_readonly("cancelled", [](const TicketDoor& door) { return door.ticket->ended() && door.ticket->state() != State::complete; })
        .def_property_readonly("fault", [](const TicketDoor& door) { return static_cast<int>(door.ticket->ended() ? door.ticket->fault : Fault::none); })
        .def("wait", &TicketDoor::wait)
        .def("cancel", &TicketDoor::cancel)
        .def("fileno", [](const TicketDoor& door) { return door.ticket->event_fd(); })
        .def("close", [](const TicketDoor& door) { door.ticket->close_event_fd(); });
    py::class_<Engine, EngineRef>(module, "Engine")
        .def(py::init([](int workers, size_t tickets_max, int64_t piece_rows, int64_t piece_ns, bool fifo, bool admission, size_t hints_max,
                         TenantsRef tenants) {
            return make_engine(workers, tickets_max, piece_rows, {fifo, admission, hints_max, piece_ns}, std::move(tenants));
        }))
        .def("submit_lookup", &submit_lookup)
        .def("submit_gather", &submit_gather)
        .def("reserve", [](Engine& engine, const std::string& name, int64_t total, int64_t bytes_per_second, int64_t until_ns) {
            return engine.queue.reserve(name, total, bytes_per_second, until_ns);
        })
        .def("pace_ns", [](Engine& engine, int64_t bytes) { return engine.queue.pace_ns(bytes); })
        .def("row_ns", [](Engine& engine, int tier, int64_t row_bytes, int64_t rows) {
            return engine.queue.row_ns(static_cast<Tier>(tier), row_bytes, rows);
        })
        .def("stats", &Engine::stats)
        .def("close", &Engine::close);
}

}  // namespace treadle::dataplane
