// Queue and workers as Python holds them: pieces of every door of a process run here. GIL held unless a comment says otherwise.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "bindings.hpp"
#include "workers.hpp"

namespace treadle::dataplane {

struct Engine {
    Engine(int worker_count, size_t tickets_max, int64_t piece_rows, const QueueOptions& options = {}, TenantsRef tenants = nullptr)
        : piece_rows(piece_rows), queue(tickets_max, worker_count, options, std::move(tenants)), workers(queue, worker_count) {}

    void let_go_of_finished() {
        for (const TicketRef& ticket : queue.take_finished()) ticket->arrays.reset();
    }

    py::dict stats() {
        let_go_of_finished();
        const Counters now = queue.counters();
        py::dict counters;
        counters["tickets_total"] = now.tickets_total;
        counters["pieces_total"] = now.pieces_total;
        counters["queued"] = now.queued;
        counters["busy_seconds"] = static_cast<double>(now.busy_ns) / 1e9;
        counters["reserved_bytes_per_second"] = queue.reserved();
        counters["prediction_error_sum"] = now.errors.parts;
        counters["prediction_errors"] = now.errors.counts;
        return counters;
    }

    // Returns when no thread of Python is on its way out of a wait any more: one that asked for the GIL while the
    // interpreter ends would abort the process.
    void close() {
        {
            const py::gil_scoped_release nogil;
            workers.join();
        }
        while (waiters > 0) {
            const py::gil_scoped_release nogil;
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        let_go_of_finished();
    }

    void wait_without_gil(Ticket& ticket, int64_t until_ns) {
        ++waiters;
        {
            const py::gil_scoped_release nogil;
            ticket.wait_until(until_ns);
        }
        --waiters;
    }

    const int64_t piece_rows;
    Queue queue;
    Workers workers;
    int waiters = 0;  // threads of Python inside a wait; guarded by the GIL
};

using EngineRef = std::shared_ptr<Engine>;

// A forked child has the memory of the threads but not the threads: joining them would never end, so it leaks them.
inline EngineRef make_engine(int workers, size_t tickets_max, int64_t piece_rows, const QueueOptions& options, TenantsRef tenants) {
    const pid_t made_in = ::getpid();
    return {new Engine(workers, tickets_max, piece_rows, options, std::move(tenants)), [made_in](Engine* engine) {
                if (::getpid() == made_in) delete engine;
            }};
}

}  // namespace treadle::dataplane
