// What the native doors of a pool serve: versions by digest, each with its layers. Python publishes and retires; requests find.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "rows.hpp"
#include "treadle/kernels/windows.hpp"

namespace treadle::dataplane {

using Digest = std::array<std::byte, 32>;  // sha256

// A hash plan that owns its arrays.
struct Plan {
    explicit Plan(const kernels::HashPlanView& from)
        : orders(from.orders, from.orders + from.order_count),
          multipliers(from.multipliers, from.multipliers + from.order_max),
          primes(from.primes, from.primes + int64_t{from.order_count} * from.heads),
          offsets(from.offsets, from.offsets + int64_t{from.order_count} * from.heads),
          token_map(from.token_map, from.token_map ? from.token_map + from.token_map_size : from.token_map),
          view(from) {
        view.orders = orders.data();
        view.multipliers = multipliers.data();
        view.primes = primes.data();
        view.offsets = offsets.data();
        view.token_map = token_map.empty() ? nullptr : token_map.data();
    }
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    int64_t columns() const noexcept { return static_cast<int64_t>(primes.size()); }

private:
    const std::vector<int32_t> orders;
    const std::vector<uint64_t> multipliers;
    const std::vector<int64_t> primes, offsets;
    const std::vector<int32_t> token_map;

public:
    kernels::HashPlanView view;
};

struct Layer {
    int32_t number;  // 0-based decoder layer
    std::shared_ptr<const Plan> plan;
    RowStoreRef rows;
};

struct Version {
    Digest digest{}, fingerprint{};
    std::vector<Layer> layers;  // as in the manifest

    const Layer* layer(int32_t number) const noexcept {
        for (const Layer& layer : layers)
            if (layer.number == number) return &layer;
        return nullptr;
    }
};

using VersionRef = std::shared_ptr<const Version>;

// A request takes a VersionRef and keeps it to its end; `retire` waits for those. Doors hold the Versions themselves.
class Versions {
public:
    void publish(VersionRef version) {
        std::lock_guard lock(mutex_);
        served_[version->digest] = std::move(version);
    }

    // Null: not served here.
    VersionRef find(const Digest& digest) const {
        std::lock_guard lock(mutex_);
        const auto found = served_.find(digest);
        return found == served_.end() ? nullptr : found->second;
    }

    // Out of sight at once; what is returned is dropped by the caller when `use_count()` says that no request has it.
    VersionRef retire(const Digest& digest) {
        std::lock_guard lock(mutex_);
        const auto found = served_.find(digest);
        if (found == served_.end()) return nullptr;
        VersionRef version = std::move(found->second);
        served_.erase(found);
        return version;
    }

private:
    mutable std::mutex mutex_;
    std::map<Digest, VersionRef> served_;
};

}  // namespace treadle::dataplane
