// Windows to rows in one pass: hashes a block of tokens, gathers its rows, goes on; no row ids in memory but a stack buffer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gather.hpp"
#include "hash.hpp"

namespace treadle::kernels {

inline constexpr int64_t LOOKUP_IDS = 2048;  // ids of one block, 16 KiB of stack: stays in the first-level cache

// out[(i - first), c] = table row of column c of token i, for tokens [first, last). The caller has validated the inputs, and
// the table has at least as many rows as the plan's primes add up to.
inline void lookup(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, const std::byte* table,
                   int64_t row_bytes, std::byte* out) {
    int64_t rows[LOOKUP_IDS];
    const int64_t columns = static_cast<int64_t>(plan.order_count) * plan.heads;
    const int64_t tokens = LOOKUP_IDS / columns;
    for (int64_t begin = first; begin < last; begin += tokens) {
        const int64_t end = std::min(last, begin + tokens);
        const int64_t count = (end - begin) * columns;
        hash_rows(plan, windows, begin, end, rows);
        gather(table, row_bytes, rows, count, out);
        out += count * row_bytes;
    }
}

}  // namespace treadle::kernels
