// What rows cost: nanoseconds a row, by tier, size of row and size of piece, learnt from the pieces that ran.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "rows.hpp"
#include "ticket.hpp"

namespace treadle::dataplane {

inline constexpr double COST_WEIGHT = 0.125;  // of a new piece in the mean: eight pieces forget a change of load
inline constexpr double COST_JUMP_MAX = 4.0;  // a piece during which the thread lost its core says nothing of rows

// Nanoseconds a cache line of a row until a piece of its tier has run. Memory is measured once a process; a positioned read
// of a warm disk and a round trip for a batch are guesses on the slow side, which the first piece corrects.
struct CostSeeds {
    std::array<double, TIERS> line_ns{15.0, 4000.0, 1000.0};
};

// Guarded by the queue's mutex. `ns` is what one piece takes its thread, from its claim to its finish.
class Costs {
public:
    explicit Costs(CostSeeds seeds = {}) : seeds_(seeds) {}

    double piece_ns(Tier tier, int64_t row_bytes, int64_t rows) const noexcept { return row_ns(tier, row_bytes, rows) * static_cast<double>(rows); }

    double row_ns(Tier tier, int64_t row_bytes, int64_t rows) const noexcept {
        const auto& known = slots_[static_cast<size_t>(tier)][line_class(row_bytes)];
        const int at = row_class(rows);
        for (int away = 0; away < ROW_CLASSES; ++away) {  // pieces of a like size cost alike
            if (at + away < ROW_CLASSES && known[at + away].samples > 0) return known[at + away].row_ns;
            if (at - away >= 0 && known[at - away].samples > 0) return known[at - away].row_ns;
        }
        return seed_ns(tier, row_bytes);
    }

    // Of a row, before anything was learnt.
    double seed_ns(Tier tier, int64_t row_bytes) const noexcept { return seeds_.line_ns[static_cast<size_t>(tier)] * static_cast<double>(lines(row_bytes)); }

    void learn(Tier tier, int64_t row_bytes, int64_t rows, int64_t ns) noexcept {
        if (rows <= 0) return;
        const double was = row_ns(tier, row_bytes, rows), now = static_cast<double>(std::max<int64_t>(1, ns)) / static_cast<double>(rows);
        Slot& slot = slots_[static_cast<size_t>(tier)][line_class(row_bytes)][row_class(rows)];
        const double sample = slot.samples > 0 ? std::min(now, was * COST_JUMP_MAX) : now;
        const double weight = std::max(COST_WEIGHT, 1.0 / (slot.samples + 1.0));
        slot.row_ns = slot.samples > 0 ? was + weight * (sample - was) : sample;
        slot.samples = std::min(slot.samples + 1, 1 << 20);
    }

    static int64_t lines(int64_t row_bytes) noexcept { return std::max<int64_t>(1, (row_bytes + 63) / 64); }

private:
    struct Slot {
        double row_ns = 0;
        int samples = 0;
    };

    static constexpr int ROW_CLASSES = 20, LINE_CLASSES = 12;  // by power of two: up to 2^19 rows, 2^11 lines (128 KiB)
    static int class_of(int64_t value, int classes) noexcept {
        return std::min(static_cast<int>(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(1, value)))) - 1, classes - 1);
    }
    static int row_class(int64_t rows) noexcept { return class_of(rows, ROW_CLASSES); }
    static int line_class(int64_t row_bytes) noexcept { return class_of(lines(row_bytes), LINE_CLASSES); }

    CostSeeds seeds_;
    std::array<std::array<std::array<Slot, ROW_CLASSES>, LINE_CLASSES>, TIERS> slots_{};
};

// Gathers random rows of a table beyond the nearer caches, so that the first request is not admitted blindly. Some 10 ms;
// throws std::bad_alloc.
inline double measure_line_ns() {
    constexpr int64_t ROW_BYTES = 320, ROWS = (int64_t{32} << 20) / ROW_BYTES, COUNT = 1024, ROUNDS = 8;
    const std::vector<std::byte> table(static_cast<size_t>(ROWS * ROW_BYTES), std::byte{1});
    std::vector<std::byte> out(static_cast<size_t>(COUNT * ROW_BYTES));
    std::vector<int64_t> rows(COUNT);
    uint64_t random = 88172645463325252ull;  // xorshift64: no two rounds meet the same rows
    int64_t best = INT64_MAX;
    for (int64_t round = 0; round < ROUNDS; ++round) {
        for (int64_t& row : rows) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            row = static_cast<int64_t>(random % static_cast<uint64_t>(ROWS));
        }
        const int64_t begun = now_ns();
        kernels::gather(table.data(), ROW_BYTES, rows.data(), COUNT, out.data());
        if (round > 0) best = std::min(best, now_ns() - begun);  // the first one enters the pages of `out`
    }
    return static_cast<double>(best) / static_cast<double>(COUNT * Costs::lines(ROW_BYTES));
}

// Measured once a process.
inline CostSeeds calibrated_seeds() {
    static const CostSeeds seeds{{measure_line_ns(), CostSeeds{}.line_ns[1], CostSeeds{}.line_ns[2]}};
    return seeds;
}

}  // namespace treadle::dataplane
