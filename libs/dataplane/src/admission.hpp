// What a queue reckons with: costs, pieces in flight, tenants and reserves. Owns no ticket and no order; see judge.hpp for the rule.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "bandwidth.hpp"
#include "costs.hpp"
#include "judge.hpp"
#include "tenants.hpp"

namespace treadle::dataplane {

inline constexpr int64_t PIECE_ROWS_MIN = 64;        // smaller pieces cost a slow tier its batches, and time to hand them out
inline constexpr int64_t WAKE_NS = 20'000;           // of a sleeping worker, until one was woken
inline constexpr int64_t OVERHEAD_NS_MAX = 500'000;  // of a wake or an end that counts: beyond it the thread had lost its core
inline constexpr int64_t STRETCH_NS = 100'000'000;   // what pieces took beyond their cost is forgotten with this time constant
inline constexpr double STRETCH_PRIOR_NS = 1e6;      // work at its cost that is always believed in: an idle worker is a whole one again
inline constexpr double STRETCH_MAX = 100.0;
inline constexpr int64_t PROBE_NS = 10'000'000;  // between two tickets that an idle queue takes although what it learnt says no
inline constexpr std::array<double, 7> ERROR_PARTS{0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0};

struct QueueOptions {
    bool fifo = false;           // first come, first served, to compare with
    bool admission = false;      // refuse what cannot be done in time, or would make an admitted ticket late
    size_t hints_max = 64;       // queued tickets without a deadline
    int64_t piece_ns = 100'000;  // a piece takes about so long at most: what an earlier deadline waits for
};

// Errors of predictions: counts for each bound of ERROR_PARTS (of the time from submission to finish), and one beyond the last.
struct PredictionErrors {
    std::array<uint64_t, ERROR_PARTS.size() + 1> counts{};
    double parts = 0;
};

// Guarded by the queue's mutex, but for `ended_in`.
class Admission {
public:
    Admission(int workers, const QueueOptions& options, TenantsRef tenants)
        : options(options),
          tenants(tenants ? std::move(tenants) : std::make_shared<Tenants>(std::vector<TenantLimits>(1))),
          costs(options.admission ? calibrated_seeds() : CostSeeds{}),
          workers_(workers) {}

    // Units of the next piece: bounded by rows, and by time as it was measured.
    int64_t piece_units(const Job& job) const noexcept {
        const int64_t most = job.units_per_piece, least = std::min(most, std::max<int64_t>(1, PIECE_ROWS_MIN / std::max<int64_t>(1, job.rows_per_unit)));
        const double unit_ns = costs.row_ns(job.tier, job.row_bytes, most * job.rows_per_unit) * static_cast<double>(job.rows_per_unit);
        const double fit = static_cast<double>(options.piece_ns) / std::max(1e-3, unit_ns);
        return fit >= static_cast<double>(most) ? most : std::max(least, static_cast<int64_t>(fit));
    }

    void reckon(Ticket& ticket, int64_t now_ns) noexcept {
        const Job& job = ticket.job;
        const int64_t units = piece_units(job), pieces = (job.units + units - 1) / units;
        const int64_t last = job.units - (pieces - 1) * units;
        const double whole_ns = piece_ns(job, units) * static_cast<double>(pieces - 1) + piece_ns(job, last);
        const int64_t own_ns = std::max(static_cast<int64_t>(whole_ns * stretch(now_ns)), workers_ * bandwidth.least_ns(job.bytes(), now_ns));
        const int64_t hands = std::min<int64_t>(workers_, pieces);
        ticket.work = {ticket.deadline_ns, own_ns + end_ns_.load(std::memory_order_relaxed), std::max<int64_t>(1, own_ns / hands)};
    }

    // Whether `ticket`, reckoned, may join those that are `admitted`, in their order. `idle`: a worker must be woken for it.
    template <typename Admitted>
    Verdict ask(Ticket& ticket, const Admitted& admitted, bool idle, int64_t now_ns) {
        Verdict verdict;
        if (options.admission) {
            verdict = judge({now_ns, running_ns(now_ns) + (idle ? workers_ * wake_ns_ : 0), workers_}, ticket.work, admitted);
            if (!verdict && !(idle && probes(ticket, now_ns))) {
                if (now_ns + ticket.work.span_ns <= ticket.deadline_ns) tenants->overloaded(now_ns);
                return verdict;
            }
            verdict.fault = Fault::none, verdict.reason = Reason::none;
            ticket.told_ns = ticket.predicted_ns = verdict.predicted_finish_ns;
        }
        const int64_t work_ns = options.admission ? ticket.work.work_ns : 0;
        const Verdict taken = tenants->take(ticket.tenant, ticket.job.rows(), ticket.job.bytes(), work_ns, workers_, now_ns);
        if (!taken) return {taken.fault, verdict.predicted_finish_ns, taken.retry_after_ns, taken.reason};
        if (idle) waking_since_ = now_ns;
        return verdict;
    }

    // Units [first, last) of `ticket` start; returns when they should be done.
    int64_t starts(Ticket& ticket, int64_t first, int64_t last, int64_t now_ns) noexcept {
        const Job& job = ticket.job;
        const bool wholly = last == job.units;
        const int64_t expected_ns = static_cast<int64_t>(piece_ns(job, last - first) * stretch(now_ns));
        const int64_t ends_ns = now_ns + expected_ns + (wholly ? end_ns_.load(std::memory_order_relaxed) : 0);
        const int64_t left_ns = std::max<int64_t>(0, ticket.work.work_ns - expected_ns);
        if (ticket.work.work_ns > 0) ticket.work.span_ns = static_cast<int64_t>(static_cast<double>(ticket.work.span_ns) * static_cast<double>(left_ns) / static_cast<double>(ticket.work.work_ns));
        ticket.work.work_ns = left_ns;
        bandwidth.starts((last - first) * job.rows_per_unit * job.row_bytes, now_ns);
        ++in_flight_;
        in_flight_ends_ns_ += ends_ns;
        if (waking_since_ > 0) wake_ns_ = mean(wake_ns_, std::clamp<int64_t>(now_ns - waking_since_, 0, OVERHEAD_NS_MAX));
        waking_since_ = 0;
        return ends_ns;
    }

    // That piece, which was to end at `ends_ns`, is done.
    void finishes(const Ticket& ticket, int64_t units, int64_t began_ns, int64_t ends_ns, int64_t now_ns) noexcept {
        --in_flight_;
        in_flight_ends_ns_ -= ends_ns;
        const Job& job = ticket.job;
        learn_stretch(piece_ns(job, units), now_ns - began_ns, now_ns);
        if (ticket.fault == Fault::none) costs.learn(job.tier, job.row_bytes, units * job.rows_per_unit, now_ns - began_ns);
    }

    // A ticket is over, wholly or not.
    void ends(const Ticket& ticket, bool wholly, int64_t now_ns) noexcept {
        const Job& job = ticket.job;
        const int64_t rows = ticket.done_units() * job.rows_per_unit;
        const int64_t slack_ns = !wholly || ticket.deadline_ns == NO_DEADLINE ? INT64_MAX : ticket.deadline_ns - now_ns;
        tenants->count_served(ticket.tenant, job.tier, rows, rows * job.row_bytes, slack_ns);
        if (!wholly || ticket.predicted_ns == 0 || ticket.deadline_ns == NO_DEADLINE) return;
        const double took_ns = static_cast<double>(std::max<int64_t>(1, now_ns - ticket.submitted_ns));
        const double part = std::abs(static_cast<double>(now_ns - ticket.predicted_ns)) / took_ns;
        errors.parts += part;
        ++errors.counts[static_cast<size_t>(std::lower_bound(ERROR_PARTS.begin(), ERROR_PARTS.end(), part) - ERROR_PARTS.begin())];
    }

    // Telling those who wait for a ticket took its worker so long. Any thread.
    void ended_in(int64_t ns) noexcept {
        const int64_t was = end_ns_.load(std::memory_order_relaxed);
        end_ns_.store(mean(was, std::min(ns, OVERHEAD_NS_MAX)), std::memory_order_relaxed);
    }

    // By how much work that runs before them delays those behind.
    int64_t delay_ns(const Work& work) const noexcept { return work.work_ns / workers_; }

    // When a place should be free in a queue that is full.
    int64_t retry_after_ns(const Work& earliest, int64_t now_ns) const noexcept {
        return std::max<int64_t>(1'000'000, (running_ns(now_ns) + earliest.work_ns) / workers_);
    }

    const QueueOptions options;
    const TenantsRef tenants;
    Costs costs;
    Bandwidth bandwidth;
    PredictionErrors errors;

private:
    static int64_t mean(int64_t was, int64_t now) noexcept { return was + static_cast<int64_t>(std::llround(static_cast<double>(now - was) * COST_WEIGHT)); }

    double piece_ns(const Job& job, int64_t units) const noexcept { return costs.piece_ns(job.tier, job.row_bytes, units * job.rows_per_unit); }

    // A bad moment must not be believed for ever: what it made look dear is refused, and never measured again. An idle queue harms
    // nobody by trying what it could do at the costs that it began with.
    bool probes(const Ticket& ticket, int64_t now_ns) noexcept {
        const Job& job = ticket.job;
        const auto seed_ns = static_cast<int64_t>(costs.seed_ns(job.tier, job.row_bytes) * static_cast<double>(job.rows()) / workers_);
        const int64_t least_ns = std::max(seed_ns, bandwidth.least_ns(job.bytes(), now_ns));
        if (now_ns - probed_ns_ < PROBE_NS || now_ns + WAKE_NS + least_ns > ticket.deadline_ns) return false;
        probed_ns_ = now_ns;
        return true;
    }

    // Costs leave out the time that a thread was kept from its core; where that happens all the time, it is less of a worker.
    double stretch(int64_t now_ns) const noexcept {
        const double kept = stretch_kept(now_ns);
        return std::clamp((took_ns_ * kept + STRETCH_PRIOR_NS) / (expected_ns_ * kept + STRETCH_PRIOR_NS), 1.0, STRETCH_MAX);
    }

    void learn_stretch(double expected_ns, int64_t took_ns, int64_t now_ns) noexcept {
        const double kept = stretch_kept(now_ns);
        stretched_ns_ = now_ns;
        expected_ns_ = expected_ns_ * kept + expected_ns;
        took_ns_ = took_ns_ * kept + static_cast<double>(took_ns);
    }

    double stretch_kept(int64_t now_ns) const noexcept {
        return std::exp(-static_cast<double>(std::max<int64_t>(0, now_ns - stretched_ns_)) / static_cast<double>(STRETCH_NS));
    }

    int64_t running_ns(int64_t now_ns) const noexcept {
        const int64_t waking_ns = waking_since_ > 0 ? std::max<int64_t>(0, waking_since_ + wake_ns_ - now_ns) : 0;
        return std::max<int64_t>(0, in_flight_ends_ns_ - in_flight_ * now_ns) + workers_ * waking_ns;
    }

    const int workers_;
    int64_t in_flight_ = 0, in_flight_ends_ns_ = 0;
    int64_t waking_since_ = 0, wake_ns_ = WAKE_NS;
    int64_t probed_ns_ = 0, stretched_ns_ = 0;
    double expected_ns_ = 0, took_ns_ = 0;
    std::atomic<int64_t> end_ns_{0};
};

}  // namespace treadle::dataplane
