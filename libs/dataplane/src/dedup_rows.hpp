// A table of which each row of a batch is fetched once, whatever the batch repeats: for tiers where that was measured to pay.
#pragma once

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "rows.hpp"
#include "treadle/kernels/dedup.hpp"

namespace treadle::dataplane {

class DedupRows : public RowStore {
public:
    explicit DedupRows(RowStoreRef inner) : RowStore(inner->tier, inner->row_count, inner->row_bytes, inner->held()), inner_(std::move(inner)) {}

    Fault gather(const int64_t* rows, int64_t count, std::byte* out) noexcept override {
        for (int64_t begin = 0; begin < count; begin += BLOCK_ROWS) {
            const int64_t some = std::min(count - begin, BLOCK_ROWS);
            if (const Fault fault = gather_block(rows + begin, some, out + begin * row_bytes); fault != Fault::none) return fault;
        }
        return Fault::none;
    }

private:
    static constexpr int64_t BLOCK_ROWS = 4096;  // without repeats at a time: what bounds the memory of a gather

    Fault gather_block(const int64_t* rows, int64_t count, std::byte* out) noexcept {
        int64_t unique[BLOCK_ROWS];
        int32_t inverse[BLOCK_ROWS];
        const int64_t distinct = kernels::unique_rows(rows, count, unique, inverse);
        if (distinct < 0) return Fault::refused;  // no memory
        if (distinct == count) return inner_->gather(rows, count, out);
        const std::unique_ptr<std::byte[]> fetched(new (std::nothrow) std::byte[static_cast<size_t>(distinct * row_bytes)]);
        if (fetched == nullptr) return Fault::refused;
        if (const Fault fault = inner_->gather(unique, distinct, fetched.get()); fault != Fault::none) return fault;
        kernels::spread(fetched.get(), row_bytes, inverse, count, out);
        return Fault::none;
    }

    const RowStoreRef inner_;
};

}  // namespace treadle::dataplane
