// A ticket: one job cut into bounded pieces, how far it has come, and how those who wait for it are told. Knows no Python.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "fault.hpp"
#include "tier.hpp"

namespace treadle::dataplane {

// CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns().
inline int64_t now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A job is checked wholly before it is queued: what `run` may still meet is a fault of the tier, and it never throws.
struct Job {
    std::function<Fault(int64_t first, int64_t last)> run;  // does units [first, last)
    int64_t units = 0;
    int64_t units_per_piece = 1;  // at most
    int64_t rows_per_unit = 1, row_bytes = 0;  // what it costs, and what it counts for quotas
    Tier tier = Tier::memory;

    int64_t rows() const noexcept { return units * rows_per_unit; }
    int64_t bytes() const noexcept { return rows() * row_bytes; }
};

// Why a ticket was refused.
enum class Reason : int32_t { none = 0, room = 1, hints = 2, quota = 3, share = 4, late = 5 };

inline constexpr int64_t NO_DEADLINE = INT64_MAX;  // a hint: whenever nothing else is to do

// The answer to a submission: queued, or refused with the reason and what the caller can do about it.
struct Verdict {
    Fault fault = Fault::none;
    int64_t predicted_finish_ns = 0;  // CLOCK_MONOTONIC; 0: not known
    int64_t retry_after_ns = 0;       // 0: not known
    Reason reason = Reason::none;

    explicit operator bool() const noexcept { return fault == Fault::none; }
};

// Work of a ticket that nobody has claimed yet. `span_ns`: how long it takes at least, with all the workers it can use.
struct Work {
    int64_t deadline_ns, work_ns, span_ns;
};

enum class State : int { open, complete, cancelled, failed };

class Ticket {
public:
    // `arrays` keeps alive what the job reads and writes. Whoever made it also lets go of it, on a thread that may.
    Ticket(Job job, int64_t deadline_ns, std::shared_ptr<void> arrays, int32_t tenant = 0)
        : job(std::move(job)), deadline_ns(deadline_ns), tenant(tenant), arrays(std::move(arrays)) {}
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    ~Ticket() {
        if (event_fd_ >= 0) ::close(event_fd_);
    }

    State state() const noexcept { return state_.load(std::memory_order_acquire); }
    bool ended() const noexcept { return state() != State::open; }

    // True once no more pieces will run, complete or cancelled; false when the clock reaches `at_ns` before.
    bool wait_until(int64_t at_ns) {
        if (ended()) return true;
        std::unique_lock lock(mutex_);
        const auto at = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at_ns));
        return ended_.wait_until(lock, at, [this] { return ended(); });
    }

    // Made on first use, readable from the end on; the ticket owns it. Throws std::system_error when no descriptor is left.
    int event_fd() {
        std::lock_guard lock(mutex_);
        if (event_fd_ < 0) {
            event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
            if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
            if (ended()) signal_event_fd();
        }
        return event_fd_;
    }

    void close_event_fd() {
        std::lock_guard lock(mutex_);
        if (event_fd_ >= 0) ::close(event_fd_);
        event_fd_ = -1;
    }

    // Called once, by the queue. The caller holds a reference: a waiter may drop its own before this returns.
    void end(State state, int64_t at_ns = now_ns()) {
        {
            std::lock_guard lock(mutex_);
            finished_ns.store(at_ns, std::memory_order_relaxed);
            state_.store(state, std::memory_order_release);
            if (event_fd_ >= 0) signal_event_fd();
        }
        ended_.notify_all();
        if (on_end) on_end(*this);
    }

    // Set before submission by those who do not wait: called once, last, on the thread that ended the ticket. Must not throw.
    std::function<void(const Ticket&)> on_end;

    const Job job;
    const int64_t deadline_ns;
    int32_t tenant = 0;  // index; 0: nobody in particular
    std::atomic<int64_t> submitted_ns{0}, started_ns{0}, finished_ns{0};  // 0: not yet
    std::atomic<int64_t> busy_ns{0};  // of all workers, in its pieces
    int64_t told_ns = 0;  // its finish as it was predicted when it was admitted; 0: it was not

    // Guarded by the queue's mutex while the ticket is open. Claimed pieces always run to their end, so that once it has
    // ended exactly the units [0, done_units()) are done.
    int64_t next_unit = 0;
    int64_t lost_from = INT64_MAX;  // first unit of the earliest piece that met a fault
    Fault fault = Fault::none;      // the first one met
    int pieces_in_flight = 0;
    bool stopped = false;
    std::atomic<bool> unwanted{false};  // whoever asked waits no more: a piece that waits for others may give up
    uint64_t sequence = 0;     // order of submission, among equal keys
    int64_t order_key = 0;     // the deadline, or the same for all in a queue that is first come, first served
    Work work{};               // what admission reckons with
    int64_t predicted_ns = 0;  // its finish, later tickets that were admitted before it included; 0: not predicted

    int64_t done_units() const noexcept { return std::min(next_unit, lost_from); }

    // Pieces of this ticket run on the calling thread only by this.
    Fault run(int64_t first, int64_t last) const {
        running_ = this;
        const Fault fault = job.run(first, last);
        running_ = nullptr;
        return fault;
    }

    // The ticket whose piece this thread runs, for tiers that wait; null: none.
    static const Ticket* running() noexcept { return running_; }

    std::shared_ptr<void> arrays;  // never touched by the queue or its threads

private:
    void signal_event_fd() noexcept {
        const uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(event_fd_, &one, sizeof one);  // a fresh counter cannot be full
    }

    static inline thread_local const Ticket* running_ = nullptr;
    std::mutex mutex_;
    std::condition_variable ended_;
    std::atomic<State> state_{State::open};
    int event_fd_ = -1;
};

}  // namespace treadle::dataplane
