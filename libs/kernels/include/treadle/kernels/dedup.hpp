// Row ids without repeats: for tiers where fetching a row costs more than finding out that it is asked for twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "gather.hpp"

namespace treadle::kernels {

inline constexpr int64_t DEDUP_ROWS_MAX = int64_t{1} << 30;  // ids of one batch: positions fit int32
inline constexpr int64_t DEDUP_STACK_SLOTS = 4096;           // 16 KiB: batches of up to 2048 ids allocate nothing

namespace detail {

// Slots of the hash table: a power of two, at most half of them used.
inline int64_t dedup_slots(int64_t count) {
    int64_t slots = 16;
    while (slots < 2 * count) slots *= 2;
    return slots;
}

// Every bit of an id reaches the low bits: ids of one head lie close together, and whoever writes the prompt chooses them.
TREADLE_INLINE uint64_t mixed(uint64_t id) {
    id = (id ^ (id >> 32)) * 0x9E3779B97F4A7C15u;
    return id ^ (id >> 29);
}

inline int64_t first_positions(const int64_t* rows, int64_t count, int64_t* unique, int32_t* inverse, int32_t* slots, int64_t slot_count) {
    constexpr int32_t FREE = -1;
    std::memset(slots, 0xFF, static_cast<size_t>(slot_count) * sizeof *slots);
    const auto last_slot = static_cast<uint64_t>(slot_count) - 1;
    int32_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        uint64_t slot = mixed(static_cast<uint64_t>(rows[i])) & last_slot;
        while (slots[slot] != FREE && unique[slots[slot]] != rows[i]) slot = (slot + 1) & last_slot;
        if (slots[slot] == FREE) {
            unique[found] = rows[i];
            slots[slot] = found++;
        }
        inverse[i] = slots[slot];
    }
    return found;
}

}  // namespace detail

// Writes the U different ids of `rows` to unique[0, U), in the order of their first appearance, and where each id went:
// rows[i] == unique[inverse[i]]. Both have room for `count` ids, at most DEDUP_ROWS_MAX. Returns U, or -1 without memory for its table.
inline int64_t unique_rows(const int64_t* rows, int64_t count, int64_t* unique, int32_t* inverse) noexcept {
    const int64_t slot_count = detail::dedup_slots(count);
    if (slot_count <= DEDUP_STACK_SLOTS) {
        int32_t slots[DEDUP_STACK_SLOTS];
        return detail::first_positions(rows, count, unique, inverse, slots, slot_count);
    }
    const std::unique_ptr<int32_t[]> slots(new (std::nothrow) int32_t[static_cast<size_t>(slot_count)]);
    return slots ? detail::first_positions(rows, count, unique, inverse, slots.get(), slot_count) : -1;
}

// out[i] = fetched[inverse[i]], each `row_bytes` long: the rows of a batch from the rows of its different ids.
inline void spread(const std::byte* fetched, int64_t row_bytes, const int32_t* inverse, int64_t count, std::byte* out) noexcept {
    constexpr int64_t BLOCK = 512;  // ids widened at a time
    int64_t rows[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t some = count - begin < BLOCK ? count - begin : BLOCK;
        for (int64_t i = 0; i < some; ++i) rows[i] = inverse[begin + i];
        gather(fetched, row_bytes, rows, some, out + begin * row_bytes);
    }
}

}  // namespace treadle::kernels
