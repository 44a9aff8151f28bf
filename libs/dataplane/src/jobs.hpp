// What tickets do: gather rows, or look them up (hash, then gather). Arrays are borrowed and were checked by the caller.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "rows.hpp"
#include "ticket.hpp"
#include "treadle/kernels/hash.hpp"
#include "treadle/kernels/lookup.hpp"
#include "treadle/kernels/windows.hpp"

namespace treadle::dataplane {

// Units are row ids: out[i] = table[rows[i]].
inline Job gather_job(RowStoreRef table, const int64_t* rows, int64_t count, std::byte* out, int64_t piece_rows) {
    const int64_t row_bytes = table->row_bytes;
    const Tier tier = table->tier;
    return {[table = std::move(table), rows, out](int64_t first, int64_t last) {
                return table->gather(rows + first, last - first, out + first * table->row_bytes);
            },
            count, piece_rows, 1, row_bytes, tier};
}

// Hashes tokens [first, last) block by block and gathers their rows; no row ids in memory but a stack buffer.
inline Fault lookup_rows(const kernels::HashPlanView& plan, const kernels::WindowsView& windows, int64_t first, int64_t last, RowStore& table,
                         std::byte* out) {
    int64_t rows[kernels::LOOKUP_IDS];
    const int64_t columns = static_cast<int64_t>(plan.order_count) * plan.heads;
    const int64_t tokens = kernels::LOOKUP_IDS / columns;
    for (int64_t begin = first; begin < last; begin += tokens) {
        const int64_t end = std::min(last, begin + tokens);
        const int64_t count = (end - begin) * columns;
        kernels::hash_rows(plan, windows, begin, end, rows);
        if (!table.held().empty() && table.first_bad(rows, count) >= 0) return Fault::out_of_range;
        if (const Fault fault = table.gather(rows, count, out); fault != Fault::none) return fault;
        out += count * table.row_bytes;
    }
    return Fault::none;
}

// Units are tokens, each with all its columns: out[t, c] = the row of column c of token t.
inline Job lookup_job(const kernels::HashPlanView& plan, const kernels::WindowsView& windows, RowStoreRef table, std::byte* out,
                      int64_t piece_rows) {
    const int64_t columns = static_cast<int64_t>(plan.order_count) * plan.heads, row_bytes = table->row_bytes;
    const Tier tier = table->tier;
    return {[plan, windows, table = std::move(table), out, columns](int64_t first, int64_t last) {
                return lookup_rows(plan, windows, first, last, *table, out + first * columns * table->row_bytes);
            },
            windows.token_count, std::max<int64_t>(1, piece_rows / columns), columns, row_bytes, tier};
}

}  // namespace treadle::dataplane
