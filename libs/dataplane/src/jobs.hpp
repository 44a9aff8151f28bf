// What tickets do: gather rows, or look them up (hash, then gather). Arrays are borrowed and were checked by the caller.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ticket.hpp"
#include "treadle/kernels/gather.hpp"
#include "treadle/kernels/lookup.hpp"
#include "treadle/kernels/windows.hpp"

namespace treadle::dataplane {

// Units are row ids: out[i] = table[rows[i]].
inline Job gather_job(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out, int64_t piece_rows) {
    return {[=](int64_t first, int64_t last) {
                kernels::gather(table, row_bytes, rows + first, last - first, out + first * row_bytes);
            },
            count, piece_rows};
}

// Units are tokens, each with all its columns: out[t, c] = the row of column c of token t.
inline Job lookup_job(const kernels::HashPlanView& plan, const kernels::WindowsView& windows, const std::byte* table, int64_t row_bytes,
                      std::byte* out, int64_t piece_rows) {
    const int64_t columns = static_cast<int64_t>(plan.order_count) * plan.heads;
    return {[=](int64_t first, int64_t last) {
                kernels::lookup(plan, windows, first, last, table, row_bytes, out + first * columns * row_bytes);
            },
            windows.token_count, std::max<int64_t>(1, piece_rows / columns)};
}

}  // namespace treadle::dataplane
