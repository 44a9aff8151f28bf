// Row ids to rows: copies scattered fixed-size rows of one table, prefetching what comes next.
//
// TLB and cache misses are the wall, not bandwidth: every cache line of a row is asked for PREFETCH_ROWS rows ahead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "target.hpp"

namespace treadle::kernels {

inline constexpr int64_t PREFETCH_ROWS = 16;     // rows asked for ahead of the copy; 8 to 32 measure alike
inline constexpr int64_t CACHE_LINE_BYTES = 64;

namespace detail {

TREADLE_INLINE void prefetch_row(const std::byte* row, int64_t row_bytes) {
    for (int64_t at = 0; at < row_bytes; at += CACHE_LINE_BYTES) __builtin_prefetch(row + at, 0, 3);
    __builtin_prefetch(row + row_bytes - 1, 0, 3);  // a row that starts inside a line ends in one line more
}

typedef uint8_t Bytes16 __attribute__((vector_size(16), aligned(1), may_alias));

// A copy of constant size, spelt out: compilers turn memcpy of some hundred bytes into `rep movs`, which starts slowly.
template <int64_t ROW_BYTES>
TREADLE_INLINE void copy_row(std::byte* out, const std::byte* row) {
#pragma GCC unroll 32
    for (int64_t at = 0; at + 16 <= ROW_BYTES; at += 16) {
        *reinterpret_cast<Bytes16*>(out + at) = *reinterpret_cast<const Bytes16*>(row + at);
    }
    if constexpr (ROW_BYTES % 16 != 0) std::memcpy(out + ROW_BYTES / 16 * 16, row + ROW_BYTES / 16 * 16, ROW_BYTES % 16);
}

// ROW_BYTES 0: any size, given at run time.
template <int64_t ROW_BYTES>
inline void gather_rows(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out) {
    if constexpr (ROW_BYTES != 0) row_bytes = ROW_BYTES;
    const int64_t ahead = count < PREFETCH_ROWS ? count : PREFETCH_ROWS;
    for (int64_t i = 0; i < ahead; ++i) prefetch_row(table + rows[i] * row_bytes, row_bytes);
    for (int64_t i = 0; i < count; ++i, out += row_bytes) {
        if (i + PREFETCH_ROWS < count) prefetch_row(table + rows[i + PREFETCH_ROWS] * row_bytes, row_bytes);
        const std::byte* row = table + rows[i] * row_bytes;
        if constexpr (ROW_BYTES != 0) {
            copy_row<ROW_BYTES>(out, row);
        } else {
            std::memcpy(out, row, static_cast<size_t>(row_bytes));
        }
    }
}

}  // namespace detail

// Index of the first id outside [0, row_count), or -1. Reads ids only.
inline int64_t first_out_of_range(const int64_t* rows, int64_t count, int64_t row_count) {
    const uint64_t last = static_cast<uint64_t>(row_count) - 1;
    for (int64_t begin = 0; begin < count;) {
        const int64_t end = count - begin < 4096 ? count : begin + 4096;
        uint64_t signs = 0;  // the top bit: an id is negative, or larger than the last one
        for (int64_t i = begin; i < end; ++i) signs |= static_cast<uint64_t>(rows[i]) | (last - static_cast<uint64_t>(rows[i]));
        if (signs >> 63) {
            for (int64_t i = begin; i < end; ++i) {
                if (rows[i] < 0 || rows[i] >= row_count) return i;
            }
        }
        begin = end;
    }
    return -1;
}

// out[i] = table[rows[i]], each `row_bytes` long. The ids were validated by the caller; `out` does not overlap the table.
inline void gather(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out) {
    switch (row_bytes) {
        case 18: return detail::gather_rows<18>(table, row_bytes, rows, count, out);
        case 34: return detail::gather_rows<34>(table, row_bytes, rows, count, out);
        case 64: return detail::gather_rows<64>(table, row_bytes, rows, count, out);
        case 128: return detail::gather_rows<128>(table, row_bytes, rows, count, out);
        case 160: return detail::gather_rows<160>(table, row_bytes, rows, count, out);
        case 256: return detail::gather_rows<256>(table, row_bytes, rows, count, out);
        case 264: return detail::gather_rows<264>(table, row_bytes, rows, count, out);
        case 320: return detail::gather_rows<320>(table, row_bytes, rows, count, out);
        default: return detail::gather_rows<0>(table, row_bytes, rows, count, out);
    }
}

}  // namespace treadle::kernels
