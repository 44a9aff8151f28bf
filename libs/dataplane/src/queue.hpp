// The earliest-deadline-first queue: which piece of which ticket runs next, and who may join. Owns order, limits and counters; owns
// no thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <ranges>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "admission.hpp"
#include "ticket.hpp"

namespace treadle::dataplane {

using TicketRef = std::shared_ptr<Ticket>;

struct Claim {
    TicketRef ticket;
    int64_t first, last;         // units
    int64_t began_ns, ends_ns;   // `ends_ns` as it is expected
};

struct Counters {
    uint64_t tickets_total = 0, pieces_total = 0;
    size_t queued = 0;    // tickets with pieces that nobody has claimed
    int64_t busy_ns = 0;  // spent in pieces, summed over the workers
    PredictionErrors errors;
};

class Queue {
public:
    Queue(size_t tickets_max, int workers, const QueueOptions& options = {}, TenantsRef tenants = nullptr)
        : tickets_max_(tickets_max), admission_(workers, options, std::move(tenants)) {
        finished_.reserve(tickets_max + static_cast<size_t>(workers) + 1);  // a worker must not meet a lack of memory
    }

    // Refused at once: no room, a quota, a share, or it could not be done in time. After close() the ticket is taken and
    // cancelled, as if it had come just before.
    // wake: false for a thread that goes on to `try_claim`, which wakes the others for what it leaves
    Verdict submit(const TicketRef& ticket, bool wake = true) {
        std::unique_lock lock(mutex_);
        const bool empty = ticket->job.units == 0;
        const int64_t now = now_ns();
        Verdict verdict;
        if (!closed_ && !empty) {
            verdict = join(*ticket, now);
            if (!verdict) {
                lock.unlock();
                admission_.tenants->count_refused(ticket->tenant, verdict.reason);
                return verdict;
            }
        }
        ticket->submitted_ns = now;
        ticket->sequence = counters_.tickets_total++;
        if (closed_ || empty) {
            if (empty) ticket->started_ns = now;
            lock.unlock();
            ticket->end(empty ? State::complete : State::cancelled);
            return verdict;
        }
        insert(ticket);
        wake = wake && sleeping_ > 0;
        lock.unlock();
        if (wake) work_.notify_one();
        return verdict;
    }

    // The next piece of the ticket with the earliest deadline; sleeps until there is one. Nothing once the queue is closed.
    std::optional<Claim> claim() {
        std::unique_lock lock(mutex_);
        ++sleeping_;
        wait_for_work(lock);
        --sleeping_;
        return claim_and_wake(lock);
    }

    // The next piece, for a thread that has something else to do where there is none. `slowest`: the tier that it may wait for.
    std::optional<Claim> try_claim(Tier slowest = Tier::remote) {
        std::unique_lock lock(mutex_);
        if (order_.empty()) return std::nullopt;
        const int64_t now = now_ns();
        if ((*order_.begin())->job.tier <= slowest && admission_.bandwidth.free_at_ns(now) <= now) return claim_and_wake(lock);
        work_.notify_one();  // somebody who may sleep
        return std::nullopt;
    }

    // To be called after each claimed piece has run. A fault stops its ticket: no further piece of it starts.
    void finish(const Claim& claim, int64_t busy_ns, Fault fault = Fault::none) {
        Ticket& ticket = *claim.ticket;
        std::unique_lock lock(mutex_);
        ++counters_.pieces_total;
        counters_.busy_ns += busy_ns;
        --ticket.pieces_in_flight;
        if (fault != Fault::none) {
            if (ticket.fault == Fault::none && !ticket.unwanted) ticket.fault = fault;
            ticket.lost_from = std::min(ticket.lost_from, claim.first);
            if (leave(claim.ticket)) ticket.stopped = true;
        }
        const int64_t now = now_ns();
        ticket.busy_ns += now - claim.began_ns;
        admission_.finishes(ticket, claim.last - claim.first, claim.began_ns, claim.ends_ns, now);
        const bool claimed_wholly = ticket.next_unit == ticket.job.units;
        if (ticket.pieces_in_flight > 0 || !(claimed_wholly || ticket.stopped)) return;
        const State state = ticket.fault != Fault::none ? State::failed : claimed_wholly && ticket.lost_from == INT64_MAX ? State::complete : State::cancelled;
        admission_.ends(ticket, state == State::complete, now);
        remember(claim.ticket);
        lock.unlock();
        ticket.end(state, now);
        admission_.ended_in(now_ns() - now);
    }

    // Starts no further piece of `ticket`; it ends when the pieces in flight have run, and those that wait for others give up.
    void stop(const TicketRef& ticket) {
        ticket->unwanted = true;
        std::unique_lock lock(mutex_);
        if (!leave(ticket)) return;
        end_stopped(ticket, lock);
    }

    // Stops every ticket and wakes every worker to its end.
    void close() {
        std::unique_lock lock(mutex_);
        closed_ = true;
        while (!order_.empty()) {
            const TicketRef ticket = *order_.begin();
            leave(ticket);
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
        now.errors = admission_.errors;
        return now;
    }

    // Keeps `bytes_per_second` of what this host's memory copies, `total` a second, free until `until_ns`; 0 gives it back. False: that
    // would leave rows too little, or too many names reserve.
    bool reserve(const std::string& name, int64_t total, int64_t bytes_per_second, int64_t until_ns) {
        std::unique_lock lock(mutex_);
        admission_.bandwidth.total = total;
        const bool reserved = admission_.bandwidth.reserve(name, bytes_per_second, until_ns, now_ns());
        lock.unlock();
        work_.notify_all();  // whoever paces to the reserve before
        return reserved;
    }

    // Nanoseconds that whoever gathers `bytes` beside this queue should wait first, so that a reserve is kept; they are taken off its pace.
    int64_t pace_ns(int64_t bytes) {
        std::lock_guard lock(mutex_);
        const int64_t now = now_ns(), free_at = admission_.bandwidth.free_at_ns(now);
        admission_.bandwidth.starts(bytes, now);
        return free_at - now;
    }

    int64_t reserved() {
        std::lock_guard lock(mutex_);
        return admission_.bandwidth.reserved(now_ns());
    }

    double row_ns(Tier tier, int64_t row_bytes, int64_t rows) {
        std::lock_guard lock(mutex_);
        return admission_.costs.row_ns(tier, row_bytes, rows);
    }

    Tenants& tenants() const noexcept { return *admission_.tenants; }

private:
    struct Earlier {
        bool operator()(const TicketRef& a, const TicketRef& b) const noexcept {
            return a->order_key != b->order_key ? a->order_key < b->order_key : a->sequence < b->sequence;
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

    Verdict join(Ticket& ticket, int64_t now) {
        const bool hint = ticket.deadline_ns == NO_DEADLINE;
        const QueueOptions& options = admission_.options;
        if (order_.size() >= tickets_max_ || (hint && hints_ >= options.hints_max)) {
            if (!hint) admission_.tenants->overloaded(now);
            const int64_t retry_ns = admission_.retry_after_ns((*order_.begin())->work, now);
            return {Fault::refused, 0, retry_ns, order_.size() >= tickets_max_ ? Reason::room : Reason::hints};
        }
        ticket.order_key = options.fifo && !hint ? 0 : ticket.deadline_ns;
        admission_.reckon(ticket, now);
        const auto work_of = [](const TicketRef& queued) -> const Work& { return queued->work; };
        return admission_.ask(ticket, order_ | std::views::transform(work_of), order_.empty() && sleeping_ > 0, now);
    }

    void insert(const TicketRef& ticket) {
        hints_ += ticket->deadline_ns == NO_DEADLINE;
        auto later = order_.insert(ticket).first;
        if (!admission_.options.admission) return;
        const int64_t delay_ns = admission_.delay_ns(ticket->work);
        while (++later != order_.end()) (*later)->predicted_ns += delay_ns;
    }

    bool leave(const TicketRef& ticket) {
        if (order_.erase(ticket) == 0) return false;
        hints_ -= ticket->deadline_ns == NO_DEADLINE;
        return true;
    }

    // Until there is a piece that may start, or the queue is closed.
    void wait_for_work(std::unique_lock<std::mutex>& lock) {
        while (!closed_) {
            if (order_.empty()) {
                work_.wait(lock);
                continue;
            }
            const int64_t now = now_ns(), free_at = admission_.bandwidth.free_at_ns(now);
            if (free_at <= now) return;
            work_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(free_at)));
        }
    }

    Claim claim_earliest() {
        const TicketRef earliest = *order_.begin();
        Ticket& ticket = *earliest;
        const int64_t now = now_ns(), first = ticket.next_unit;
        if (first == 0) ticket.started_ns = now;
        ticket.next_unit = std::min(first + admission_.piece_units(ticket.job), ticket.job.units);
        ++ticket.pieces_in_flight;
        const int64_t ends_ns = admission_.starts(ticket, first, ticket.next_unit, now);
        if (ticket.next_unit == ticket.job.units) leave(earliest);
        return {earliest, first, ticket.next_unit, now, ends_ns};
    }

    void remember(const TicketRef& ticket) {
        if (ticket->arrays) finished_.push_back(ticket);
    }

    void end_stopped(const TicketRef& ticket, std::unique_lock<std::mutex>& lock) {
        ticket->stopped = true;
        const bool idle = ticket->pieces_in_flight == 0;
        const int64_t now = now_ns();  // before the lock goes: what runs next ends later
        if (idle) remember(ticket);
        if (idle) admission_.ends(*ticket, false, now);
        lock.unlock();
        if (idle) ticket->end(State::cancelled, now);
    }

    const size_t tickets_max_;
    std::mutex mutex_;
    std::condition_variable work_;
    std::set<TicketRef, Earlier> order_;
    std::vector<TicketRef> finished_;
    Counters counters_;
    Admission admission_;
    size_t hints_ = 0;  // tickets without a deadline in `order_`
    int sleeping_ = 0;  // workers in claim()
    bool closed_ = false;
};

}  // namespace treadle::dataplane
