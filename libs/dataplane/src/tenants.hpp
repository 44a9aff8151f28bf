// Who asks, what each may have, and what each has had: quotas, shares of an overloaded queue, counters.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "costs.hpp"
#include "versions.hpp"

namespace treadle::dataplane {

inline constexpr double BURST_SECONDS = 0.25;          // of a quota that may come at once
inline constexpr int64_t SHARE_NS = 100'000'000;       // work granted is forgotten with this time constant
inline constexpr int64_t OVERLOAD_NS = 1'000'000'000;  // how long after a refusal for want of time the load counts as too much
inline constexpr double ACTIVE_PART = 0.001;           // of a worker's time: who has had less is not among those who share
inline constexpr std::array<double, 9> SLACK_SECONDS{-0.1, -0.01, -0.001, 0.0, 0.0001, 0.001, 0.01, 0.1, 1.0};

// What a tenant may have. 0 rows or bytes a second: no quota. Of those over their share the lowest priority is refused first.
struct TenantLimits {
    std::string name;
    double share = 1.0;
    int priority = 0;
    int64_t rows_per_second_max = 0, bytes_per_second_max = 0;
};

// Since the start. Histograms: one count for each bound, not cumulative, and one beyond the last.
struct TenantCounters {
    uint64_t admitted = 0, late = 0;
    std::array<uint64_t, 6> refused{};  // by Reason
    std::array<uint64_t, TIERS> rows{}, bytes{};
    std::array<uint64_t, SLACK_SECONDS.size() + 1> slack{};
    double slack_seconds = 0;
};

// Called from every door at once. Tenant 0 is whoever shows a token that belongs to no tenant, or none where none is asked for.
class Tenants {
public:
    // `tokens`: sha256 of each token, with the index of its tenant. None: callers need not show any.
    explicit Tenants(std::vector<TenantLimits> limits, std::vector<std::pair<Digest, int32_t>> tokens = {})
        : limits_(std::move(limits)), tokens_(std::move(tokens)), states_(limits_.size()) {}

    size_t size() const noexcept { return limits_.size(); }
    const TenantLimits& limits(size_t index) const noexcept { return limits_[index]; }

    // Index of the tenant whose token this is the digest of; -1: nobody's. Takes the same time for every digest.
    int32_t find(const Digest& token) const noexcept {
        if (tokens_.empty()) return 0;
        int32_t found = -1;
        for (const auto& [digest, tenant] : tokens_) {
            unsigned differs = 0;
            for (size_t i = 0; i < digest.size(); ++i) differs |= std::to_integer<unsigned>(digest[i] ^ token[i]);
            const int32_t same = static_cast<int32_t>(differs - 1u) >> 31;  // all ones where nothing differs
            found = (found & ~same) | (tenant & same);
        }
        return found;
    }

    // Takes a request off its tenant's quotas and grants it `work_ns` of `workers` workers' time (0: quotas only), or neither.
    //
    // A request beyond what is left of a quota passes once, and later ones wait until that is made good. While the load is too
    // much, a tenant over its share yields, unless one of a lower priority is over its own: that one yields first.
    Verdict take(int32_t tenant, int64_t rows, int64_t bytes, int64_t work_ns, int workers, int64_t now_ns) {
        std::lock_guard lock(mutex_);
        const TenantLimits& limits = limits_[static_cast<size_t>(tenant)];
        State& state = states_[static_cast<size_t>(tenant)];
        const int64_t wait_ns = std::max(state.rows.wait_ns(limits.rows_per_second_max, now_ns), state.bytes.wait_ns(limits.bytes_per_second_max, now_ns));
        if (wait_ns > 0) return {Fault::refused, 0, wait_ns, Reason::quota};
        if (limits_.size() > 1 && work_ns > 0) {
            decay(now_ns);
            const int64_t yields_ns = now_ns < overloaded_until_ns_ ? yields_for_ns(tenant, static_cast<double>(work_ns), workers) : 0;
            if (yields_ns > 0) return {Fault::refused, 0, yields_ns, Reason::share};
            state.granted_ns += static_cast<double>(work_ns);
        }
        state.rows.take(limits.rows_per_second_max, rows);
        state.bytes.take(limits.bytes_per_second_max, bytes);
        ++state.counters.admitted;
        return {};
    }

    // A ticket was refused for want of time that an idle queue would have had.
    void overloaded(int64_t now_ns) {
        std::lock_guard lock(mutex_);
        overloaded_until_ns_ = now_ns + OVERLOAD_NS;
    }

    void count_refused(int32_t tenant, Reason reason) {
        std::lock_guard lock(mutex_);
        ++states_[static_cast<size_t>(tenant)].counters.refused[static_cast<size_t>(reason)];
    }

    // `slack_ns` INT64_MAX: it had no deadline.
    void count_served(int32_t tenant, Tier tier, int64_t rows, int64_t bytes, int64_t slack_ns) {
        std::lock_guard lock(mutex_);
        TenantCounters& counters = states_[static_cast<size_t>(tenant)].counters;
        counters.rows[static_cast<size_t>(tier)] += static_cast<uint64_t>(rows);
        counters.bytes[static_cast<size_t>(tier)] += static_cast<uint64_t>(bytes);
        if (slack_ns == INT64_MAX) return;
        const double seconds = static_cast<double>(slack_ns) / 1e9;
        counters.late += slack_ns < 0;
        counters.slack_seconds += seconds;
        ++counters.slack[static_cast<size_t>(std::lower_bound(SLACK_SECONDS.begin(), SLACK_SECONDS.end(), seconds) - SLACK_SECONDS.begin())];
    }

    TenantCounters counters(size_t index) const {
        std::lock_guard lock(mutex_);
        return states_[index].counters;
    }

private:
    // Level 0: all of the burst is there; it may fall below -burst by one request.
    struct Bucket {
        double owed = 0;
        int64_t at_ns = 0;

        int64_t wait_ns(int64_t rate, int64_t now_ns) noexcept {
            if (rate == 0) return 0;
            const double a_ns = static_cast<double>(rate) / 1e9;
            owed = std::max(0.0, owed - a_ns * static_cast<double>(std::max<int64_t>(0, now_ns - at_ns)));
            at_ns = now_ns;
            return static_cast<int64_t>(std::max(0.0, std::ceil((owed - static_cast<double>(rate) * BURST_SECONDS) / a_ns)));
        }
        void take(int64_t rate, int64_t count) noexcept { owed += rate == 0 ? 0.0 : static_cast<double>(count); }
    };

    struct State {
        Bucket rows, bytes;
        double granted_ns = 0;
        TenantCounters counters;
    };

    void decay(int64_t now_ns) noexcept {
        const double kept = std::exp(-static_cast<double>(std::max<int64_t>(0, now_ns - decayed_ns_)) / static_cast<double>(SHARE_NS));
        for (State& state : states_) state.granted_ns *= kept;
        decayed_ns_ = now_ns;
    }

    // 0: it need not yield.
    int64_t yields_for_ns(int32_t tenant, double work_ns, int workers) const noexcept {
        const double capacity = static_cast<double>(SHARE_NS) * workers, granted_ns = states_[static_cast<size_t>(tenant)].granted_ns;
        const double over_ns = granted_ns + work_ns - entitled_ns(tenant, tenant, capacity);
        if (over_ns <= 0 || !shared(tenant, capacity) || lower_is_over(tenant, capacity)) return 0;
        return std::max<int64_t>(1'000'000, static_cast<int64_t>(static_cast<double>(SHARE_NS) * std::log1p(over_ns / std::max(1.0, granted_ns))));
    }

    bool active(size_t tenant, double capacity) const noexcept { return states_[tenant].granted_ns > capacity * ACTIVE_PART; }

    // Of `tenant`, among those who are active and `asking`.
    double entitled_ns(int32_t tenant, int32_t asking, double capacity) const noexcept {
        double shares = 0;
        for (size_t i = 0; i < limits_.size(); ++i)
            if (static_cast<int32_t>(i) == asking || active(i, capacity)) shares += limits_[i].share;
        return capacity * limits_[static_cast<size_t>(tenant)].share / shares;
    }

    bool shared(int32_t tenant, double capacity) const noexcept {
        for (size_t i = 0; i < limits_.size(); ++i)
            if (static_cast<int32_t>(i) != tenant && active(i, capacity)) return true;
        return false;
    }

    bool lower_is_over(int32_t tenant, double capacity) const noexcept {
        for (size_t i = 0; i < limits_.size(); ++i)
            if (limits_[i].priority < limits_[static_cast<size_t>(tenant)].priority && active(i, capacity) &&
                states_[i].granted_ns > entitled_ns(static_cast<int32_t>(i), tenant, capacity))
                return true;
        return false;
    }

    const std::vector<TenantLimits> limits_;
    const std::vector<std::pair<Digest, int32_t>> tokens_;
    mutable std::mutex mutex_;
    std::vector<State> states_;
    int64_t decayed_ns_ = 0, overloaded_until_ns_ = 0;
};

using TenantsRef = std::shared_ptr<Tenants>;

}  // namespace treadle::dataplane
