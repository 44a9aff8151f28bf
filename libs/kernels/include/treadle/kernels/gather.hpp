// Row ids to rows: copies scattered fixed-size rows of one table, prefetching what comes next.
//
// TLB and cache misses are the wall, not bandwidth: what counts is how many rows a core has on the way at once. Every cache line of
// a row is asked for some rows ahead, into the second-level cache, and rows are copied by wide loads: each load of a row that is not
// there yet holds a place in the core's queues, so fewer loads mean more rows.
//
// Tried on one AMD EPYC (Zen 4, under KVM; no other processor yet), 256 tokens x 16 x 320 B of 2.56 GB, microseconds on 4 KiB / 2 MiB
// pages; a plain loop takes 610 / 418:
//   16-byte copies, prefetch into the first level    326 / 209
//   the same into the second level: 24 first-level misses at once are soon in use    314 / 174
//   32-byte copies, first level    234 / 179
//   32-byte copies, second level (kept)    200 / 118;  64-byte copies 202 / 118 (264 B rows: 3 to 5 % less)
//   only the first line far ahead, for the page walk, the rest nearer    202 / 127;  first and last line only 221 / 155
//   second level 32 rows ahead and again first level 8 ahead    200 / 110, but 264 B rows 315 instead of 295 on 4 KiB
//   stores past the caches 428 / 255;  `rep movs` 261 / 142;  rows in order of address, so that page walks share, 213 / 133
// Reading the same rows and writing none takes 181 / 118.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "target.hpp"

namespace treadle::kernels {

inline constexpr int64_t PREFETCH_ROWS = 16;  // 12 to 64 measure alike, 8 and fewer cost up to a tenth
inline constexpr int64_t PREFETCH_ROWS_MAX = 64;
inline constexpr int64_t CACHE_LINE_BYTES = 64;
inline constexpr int64_t ROW_BYTES_MIN = 16, ROW_BYTES_MAX = 4096;  // of a table's rows

// Rows asked for ahead of the copy, 1 to PREFETCH_ROWS_MAX; read once for each call. One for the process with g++, whose linker gives
// this symbol one address in all extension modules; with other compilers one for each module.
__attribute__((visibility("default"))) inline std::atomic<int64_t> prefetch_rows{PREFETCH_ROWS};

namespace detail {

TREADLE_INLINE void prefetch_row(const std::byte* row, int64_t row_bytes) {
    constexpr int SECOND_LEVEL = 2;
    for (int64_t at = 0; at < row_bytes; at += CACHE_LINE_BYTES) __builtin_prefetch(row + at, 0, SECOND_LEVEL);
    __builtin_prefetch(row + row_bytes - 1, 0, SECOND_LEVEL);  // a row that starts inside a line ends in one line more
}

template <int64_t WIDTH>
TREADLE_INLINE void copy_block(std::byte* out, const std::byte* row) {
    typedef uint8_t Block __attribute__((vector_size(WIDTH), aligned(1), may_alias));
    *reinterpret_cast<Block*>(out) = *reinterpret_cast<const Block*>(row);
}

// A copy of constant size, spelt out: compilers turn memcpy of some hundred bytes into `rep movs`, which starts slowly.
template <int64_t ROW_BYTES, int64_t WIDTH>
TREADLE_INLINE void copy_row(std::byte* out, const std::byte* row) {
#pragma GCC unroll 32
    for (int64_t at = 0; at + WIDTH <= ROW_BYTES; at += WIDTH) copy_block<WIDTH>(out + at, row + at);
    if constexpr (ROW_BYTES % WIDTH != 0) std::memcpy(out + ROW_BYTES / WIDTH * WIDTH, row + ROW_BYTES / WIDTH * WIDTH, ROW_BYTES % WIDTH);
}

// Any size: the last block ends with the row and overlaps the one before it.
template <int64_t WIDTH>
TREADLE_INLINE void copy_row(std::byte* out, const std::byte* row, int64_t row_bytes) {
    if (row_bytes < WIDTH) {
        std::memcpy(out, row, static_cast<size_t>(row_bytes));
        return;
    }
    for (int64_t at = 0; at + WIDTH < row_bytes; at += WIDTH) copy_block<WIDTH>(out + at, row + at);
    copy_block<WIDTH>(out + row_bytes - WIDTH, row + row_bytes - WIDTH);
}

// ROW_BYTES 0: any size, given at run time.
template <int64_t ROW_BYTES, int64_t WIDTH>
TREADLE_INLINE void gather_rows(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out, int64_t ahead) {
    if constexpr (ROW_BYTES != 0) row_bytes = ROW_BYTES;
    for (int64_t i = 0; i < count && i < ahead; ++i) prefetch_row(table + rows[i] * row_bytes, row_bytes);
    for (int64_t i = 0; i < count; ++i, out += row_bytes) {
        if (i + ahead < count) prefetch_row(table + rows[i + ahead] * row_bytes, row_bytes);
        const std::byte* row = table + rows[i] * row_bytes;
        if constexpr (ROW_BYTES != 0) {
            copy_row<ROW_BYTES, WIDTH>(out, row);
        } else {
            copy_row<WIDTH>(out, row, row_bytes);
        }
    }
}

template <int64_t WIDTH>
TREADLE_INLINE void gather_sized(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out, int64_t ahead) {
    switch (row_bytes) {
        case 18: return gather_rows<18, WIDTH>(table, row_bytes, rows, count, out, ahead);
        case 34: return gather_rows<34, WIDTH>(table, row_bytes, rows, count, out, ahead);
        case 64: return gather_rows<64, WIDTH>(table, row_bytes, rows, count, out, ahead);
        case 128: return gather_rows<128, WIDTH>(table, row_bytes, rows, count, out, ahead);
        case 160: return gather_rows<160, WIDTH>(table, row_bytes, rows, count, out, ahead);
        case 256: return gather_rows<256, WIDTH>(table, row_bytes, rows, count, out, ahead);
        case 264: return gather_rows<264, WIDTH>(table, row_bytes, rows, count, out, ahead);
        case 320: return gather_rows<320, WIDTH>(table, row_bytes, rows, count, out, ahead);
        default: return gather_rows<0, WIDTH>(table, row_bytes, rows, count, out, ahead);
    }
}

inline void gather_baseline(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out, int64_t ahead) {
    gather_sized<16>(table, row_bytes, rows, count, out, ahead);
}

TREADLE_TARGET("avx2")
inline void gather_avx2(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out, int64_t ahead) {
    gather_sized<32>(table, row_bytes, rows, count, out, ahead);
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

// out[i] = table[rows[i]], each `row_bytes` long, asking for rows `ahead` rows early. The ids were validated by the caller; `out` does
// not overlap the table.
inline void gather(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out, int64_t ahead) {
    if (detail::cpu_has_avx2()) return detail::gather_avx2(table, row_bytes, rows, count, out, ahead);
    return detail::gather_baseline(table, row_bytes, rows, count, out, ahead);
}

// The same, as far ahead as was found best for this process.
inline void gather(const std::byte* table, int64_t row_bytes, const int64_t* rows, int64_t count, std::byte* out) {
    gather(table, row_bytes, rows, count, out, prefetch_rows.load(std::memory_order_relaxed));
}

}  // namespace treadle::kernels
