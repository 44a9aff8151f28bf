// A table behind the hot-row cache of its host: what is hot comes from there, the rest from where the table lies.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "hot_cache.hpp"
#include "rows.hpp"

namespace treadle::dataplane {

class CachedRows : public RowStore {
public:
    // Rows of `inner` have the cache's size.
    CachedRows(RowStoreRef inner, std::shared_ptr<hot::Cache> cache, hot::Table table)
        : RowStore(inner->tier, inner->row_count, inner->row_bytes, inner->held()), inner_(std::move(inner)), cache_(std::move(cache)), table_(table) {}

    Fault gather(const int64_t* rows, int64_t count, std::byte* out) noexcept override {
        for (int64_t begin = 0; begin < count; begin += BLOCK_ROWS) {
            const int64_t end = std::min(count, begin + BLOCK_ROWS);
            if (const Fault fault = gather_block(rows + begin, end - begin, out + begin * row_bytes); fault != Fault::none) return fault;
        }
        return Fault::none;
    }

private:
    static constexpr int64_t BLOCK_ROWS = 4096;  // looked for at a time: what bounds the memory of a gather

    // Misses are asked for as they are: where repeats cost, `inner` is one that removes them.
    Fault gather_block(const int64_t* rows, int64_t count, std::byte* out) noexcept {
        int64_t misses[BLOCK_ROWS], wanted[BLOCK_ROWS];
        const int64_t missed = cache_->probe_and_mark(table_, rows, count, out, misses);
        if (missed == 0) return Fault::none;
        for (int64_t i = 0; i < missed; ++i) wanted[i] = rows[misses[i]];
        const std::unique_ptr<std::byte[]> found(new (std::nothrow) std::byte[static_cast<size_t>(missed * row_bytes)]);
        if (found == nullptr) return Fault::refused;
        if (const Fault fault = inner_->gather(wanted, missed, found.get()); fault != Fault::none) return fault;
        for (int64_t i = 0; i < missed; ++i) {
            cache_->insert(table_, wanted[i], found.get() + i * row_bytes);
            std::memcpy(out + misses[i] * row_bytes, found.get() + i * row_bytes, static_cast<size_t>(row_bytes));
        }
        return Fault::none;
    }

    const RowStoreRef inner_;
    const std::shared_ptr<hot::Cache> cache_;
    const hot::Table table_;
};

}  // namespace treadle::dataplane
