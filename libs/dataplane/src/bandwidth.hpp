// A reserve for other traffic of this host's memory (KV blocks): while it stands, rows keep to what is left.
//
// The unit is bytes copied a second: a gather copies row_bytes for each row, and so is the bandwidth measured.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ticket.hpp"

namespace treadle::dataplane {

inline constexpr size_t RESERVES_MAX = 64;           // names at once
inline constexpr double RESERVED_PART_MAX = 0.9;     // rows never stop wholly: a missing row costs more than a late KV block
inline constexpr int64_t PACE_BURST_NS = 1'000'000;  // idle time that may be made good for

// Guarded by the queue's mutex.
class Bandwidth {
public:
    int64_t total = 0;  // bytes a second; 0: not measured, and nothing can be reserved

    // A second reserve of the same name replaces the first; 0 gives it back. False: no room for it.
    bool reserve(const std::string& name, int64_t bytes_per_second, int64_t until_ns, int64_t now_ns) {
        drop_ended(now_ns);
        const auto same = [&name](const Reserve& reserve) { return reserve.name == name; };
        const auto found = std::find_if(reserves_.begin(), reserves_.end(), same);
        const int64_t others = sum() - (found == reserves_.end() ? 0 : found->bytes_per_second);
        if (bytes_per_second > 0) {
            if (static_cast<double>(others) + static_cast<double>(bytes_per_second) > static_cast<double>(total) * RESERVED_PART_MAX) return false;
            if (found == reserves_.end() && reserves_.size() >= RESERVES_MAX) return false;
        }
        if (found != reserves_.end()) reserves_.erase(found);
        if (bytes_per_second > 0) reserves_.push_back({name, bytes_per_second, until_ns});
        return true;
    }

    int64_t reserved(int64_t now_ns) noexcept {
        drop_ended(now_ns);
        return sum();
    }

    // Nanoseconds that `bytes` take at least, all workers together; 0 without a reserve.
    int64_t least_ns(int64_t bytes, int64_t now_ns) noexcept {
        const int64_t taken = reserves_.empty() ? 0 : reserved(now_ns);
        return taken == 0 ? 0 : static_cast<int64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(total - taken));
    }

    // When the next piece may start.
    int64_t free_at_ns(int64_t now_ns) noexcept { return reserves_.empty() || reserved(now_ns) == 0 ? now_ns : std::max(now_ns, free_at_); }

    void starts(int64_t bytes, int64_t now_ns) noexcept {
        if (!reserves_.empty()) free_at_ = std::max(free_at_, now_ns - PACE_BURST_NS) + least_ns(bytes, now_ns);
    }

private:
    struct Reserve {
        std::string name;
        int64_t bytes_per_second, until_ns;
    };

    void drop_ended(int64_t now_ns) noexcept {
        std::erase_if(reserves_, [now_ns](const Reserve& reserve) { return reserve.until_ns <= now_ns; });
    }
    int64_t sum() const noexcept {
        int64_t bytes = 0;
        for (const Reserve& reserve : reserves_) bytes += reserve.bytes_per_second;
        return bytes;
    }

    std::vector<Reserve> reserves_;
    int64_t free_at_ = 0;
};

// Bytes a second that `threads` threads copy together, best of some rounds beyond the caches. Some 30 ms; throws
// std::bad_alloc, std::system_error.
inline int64_t measure_copy_bandwidth(int threads) {
    constexpr size_t BYTES = size_t{32} << 20;
    constexpr int ROUNDS = 4;
    std::vector<std::vector<std::byte>> from, to;
    for (int i = 0; i < threads; ++i) {
        from.emplace_back(BYTES / static_cast<size_t>(threads), std::byte{1});
        to.emplace_back(from.back().size(), std::byte{2});
    }
    double best = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        const int64_t begun = now_ns();
        std::vector<std::jthread> copying;
        for (size_t i = 1; i < from.size(); ++i) copying.emplace_back([&, i] { std::memcpy(to[i].data(), from[i].data(), from[i].size()); });
        std::memcpy(to[0].data(), from[0].data(), from[0].size());
        copying.clear();  // joins
        best = std::max(best, static_cast<double>(BYTES) * 1e9 / static_cast<double>(std::max<int64_t>(1, now_ns() - begun)));
    }
    return static_cast<int64_t>(best);
}

}  // namespace treadle::dataplane
