// The earliest-deadline-first queue: which piece of which ticket runs next. Owns order, limit and counters; owns no thread.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "ticket.hpp"

namespace treadle::dataplane {

using TicketRef = std::shared_ptr<Ticket>;

struct Claim {
    TicketRef ticket;
    int64_t first, last;  // units
};

struct Counters {
    uint64_t tickets_total = 0, pieces_total = 0;
    size_t queued = 0;    // tickets with pieces that nobody has claimed
    int64_t busy_ns = 0;  // spent in pieces, summed over the workers
};

class Queue {
public:
    Queue(size_t tickets_max, int workers) : tickets_max_(tickets_max) {
        finished_.reserve(tickets_max + static_cast<size_t>(workers) + 1);  // a worker must not meet a lack of memory
    }

    // Refused: the queue is full. After close() the ticket is taken and cancelled, as if it had come just before.
    // wake: false for a thread that goes on to `try_claim`, which wakes the others for what it leaves
    Verdict submit(const TicketRef& ticket, bool wake = true) {
        std::unique_lock lock(mutex_);
        const bool empty = ticket->job.units == 0;
        if (!closed_ && !empty && order_.size() >= tickets_max_) return {Fault::refused};
        ticket->submitted_ns = now_ns();
        ticket->sequence = counters_.tickets_total++;
        if (closed_ || empty) {
            if (empty) ticket->started_ns = ticket->submitted_ns.load();
            lock.unlock();
            ticket->end(empty ? State::complete : State::cancelled);
            return {};
        }
        order_.insert(ticket);
        wake = wake && sleeping_ > 0;
        lock.unlock();
        if (wake) work_.notify_one();
        return {};
    }

    // The next piece of the ticket with the earliest deadline; sleeps until there is one. Nothing once the queue is closed.
    std::optional<Claim> claim() {
        std::unique_lock lock(mutex_);
        ++sleeping_;
        work_.wait(lock, [this] { return closed_ || !order_.empty(); });
        --sleeping_;
        return claim_and_wake(lock);
    }

    // The next piece, for a thread that has something else to do where there is none.
    std::optional<Claim> try_claim() {
        std::unique_lock lock(mutex_);
        return claim_and_wake(lock);
    }

    // To be called after each claimed piece has run. A fault stops its ticket: no further piece of it starts.
    void finish(const Claim& claim, int64_t busy_ns, Fault fault = Fault::none) {
        Ticket& ticket = *claim.ticket;
        std::unique_lock lock(mutex_);
        ++counters_.pieces_total;
        counters_.busy_ns += busy_ns;
        --ticket.pieces_in_flight;
        if (fault != Fault::none) {
            if (ticket.fault == Fault::none) ticket.fault = fault;
            ticket.lost_from = std::min(ticket.lost_from, claim.first);
            if (order_.erase(claim.ticket) > 0) ticket.stopped = true;
        }
        const bool claimed_wholly = ticket.next_unit == ticket.job.units;
        if (ticket.pieces_in_flight > 0 || !(claimed_wholly || ticket.stopped)) return;
        remember(claim.ticket);
        lock.unlock();
        ticket.end(ticket.fault != Fault::none ? State::failed : claimed_wholly ? State::complete : State::cancelled);
    }

    // Starts no further piece of `ticket`; it ends when the pieces in flight have run. Without effect on one that has no more.
    void stop(const TicketRef& ticket) {
        std::unique_lock lock(mutex_);
        if (order_.erase(ticket) == 0) return;
        end_stopped(ticket, lock);
    }

    // Stops every ticket and wakes every worker to its end.
    void close() {
        std::unique_lock lock(mutex_);
        closed_ = true;
        while (!order_.empty()) {
            const TicketRef ticket = *order_.begin();
            order_.erase(order_.begin());
            end_stopped(ticket, lock);
            lock.lock();
        }
        lock.unlock();
        work_.notify_all();
    }

    // Tickets with arrays that have ended since the last call: those may go, on the caller's thread.
    std::vector<TicketRef> take_finished() {
        std::lock_guard lock(mutex_);
        std::vector<TicketRef> taken(std::make_move_iterator(finished_.begin()), std::make_move_iterator(finished_.end()));
        finished_.clear();
        return taken;
    }

    Counters counters() {
        std::lock_guard lock(mutex_);
        Counters now = counters_;
        now.queued = order_.size();
        return now;
    }

private:
    struct Earlier {
        bool operator()(const TicketRef& a, const TicketRef& b) const noexcept {
            return a->deadline_ns != b->deadline_ns ? a->deadline_ns < b->deadline_ns : a->sequence < b->sequence;
        }
    };

    std::optional<Claim> claim_and_wake(std::unique_lock<std::mutex>& lock) {
        if (order_.empty()) return std::nullopt;
        Claim claim = claim_earliest();
        // Each woken worker wakes the next, so that submit pays for one wake-up whatever the number of workers.
        const bool wake = !order_.empty() && sleeping_ > 0;
        lock.unlock();
        if (wake) work_.notify_one();
        return claim;
    }

    Claim claim_earliest() {
        const auto earliest = order_.begin();
        Ticket& ticket = **earliest;
        if (ticket.next_unit == 0) ticket.started_ns = now_ns();
        const int64_t first = ticket.next_unit;
        ticket.next_unit = std::min(first + ticket.job.units_per_piece, ticket.job.units);
        ++ticket.pieces_in_flight;
        Claim claim{*earliest, first, ticket.next_unit};
        if (ticket.next_unit == ticket.job.units) order_.erase(earliest);
        return claim;
    }

    void remember(const TicketRef& ticket) {
        if (ticket->arrays) finished_.push_back(ticket);
    }

    void end_stopped(const TicketRef& ticket, std::unique_lock<std::mutex>& lock) {
        ticket->stopped = true;
        const bool idle = ticket->pieces_in_flight == 0;
        if (idle) remember(ticket);
        lock.unlock();
        if (idle) ticket->end(State::cancelled);
    }

    const size_t tickets_max_;
    std::mutex mutex_;
    std::condition_variable work_;
    std::set<TicketRef, Earlier> order_;
    std::vector<TicketRef> finished_;
    Counters counters_;
    int sleeping_ = 0;  // workers in claim()
    bool closed_ = false;
};

}  // namespace treadle::dataplane
