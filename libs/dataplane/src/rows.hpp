// Where the rows of one table lie, whatever the tier: memory here; disk, caches and other hosts in files of their own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "fault.hpp"
#include "tier.hpp"
#include "treadle/kernels/gather.hpp"
#include "treadle/kernels/guard.hpp"

namespace treadle::dataplane {

// Rows [first, last) of a table.
struct RowRange {
    int64_t first, last;
};

// A table. Immutable once shared; requests in flight keep it by shared_ptr. Called from many threads at once.
class RowStore {
public:
    // `held`: the rows that are here, rising and disjoint; empty: all of them.
    RowStore(Tier tier, int64_t row_count, int64_t row_bytes, std::vector<RowRange> held = {})
        : tier(tier), row_count(row_count), row_bytes(row_bytes), held_(std::move(held)) {}
    virtual ~RowStore() = default;
    RowStore(const RowStore&) = delete;
    RowStore& operator=(const RowStore&) = delete;

    // out[i] = table[rows[i]]. The ids were validated by `first_bad`; `out` is not complete after a fault.
    virtual Fault gather(const int64_t* rows, int64_t count, std::byte* out) noexcept = 0;

    // Index of the first id that is outside the table, or not held here; -1: none.
    int64_t first_bad(const int64_t* rows, int64_t count) const noexcept {
        const int64_t outside = kernels::first_out_of_range(rows, count, row_count);
        if (held_.empty() || outside >= 0) return outside;
        for (int64_t i = 0; i < count; ++i)
            if (!holds(rows[i])) return i;
        return -1;
    }

    const std::vector<RowRange>& held() const noexcept { return held_; }

    const Tier tier;
    const int64_t row_count, row_bytes;

private:
    bool holds(int64_t row) const noexcept {
        const auto after = std::upper_bound(held_.begin(), held_.end(), row, [](int64_t id, const RowRange& range) { return id < range.first; });
        return after != held_.begin() && row < std::prev(after)->last;
    }

    const std::vector<RowRange> held_;
};

using RowStoreRef = std::shared_ptr<RowStore>;

// Rows in this process's address space: private memory, or a mapping that the owner keeps alive.
class MemoryRows : public RowStore {
public:
    MemoryRows(const std::byte* table, int64_t row_count, int64_t row_bytes, std::vector<RowRange> held = {})
        : RowStore(Tier::memory, row_count, row_bytes, std::move(held)), table_(table) {}

    Fault gather(const int64_t* rows, int64_t count, std::byte* out) noexcept override {
        const auto bytes = static_cast<size_t>(row_count * row_bytes);
        const bool read = kernels::guarded(table_, bytes, [&] { kernels::gather(table_, row_bytes, rows, count, out); });
        return read ? Fault::none : Fault::data_loss;  // truncated under us, or its memory failed
    }

private:
    const std::byte* const table_;
};

}  // namespace treadle::dataplane
