// What a hash works on: the plan of one Engram layer and the tokens of one step. Both only borrow their arrays.
#pragma once

#include <cstdint>

namespace treadle::kernels {

enum class Family : int { demo = 0, deepseek_v41 = 1, qwen_ple = 2 };

inline constexpr int ORDER_MAX = 16;     // largest n-gram order; the same limit as EngramModel's
inline constexpr int COLUMNS_MAX = 256;  // orders x heads; the same limit as EngramModel's

struct HashPlanView {
    Family family;
    int order_max;                // Nmax
    int order_count;
    const int32_t* orders;        // [order_count], rising, 1 .. order_max
    int heads;
    const uint64_t* multipliers;  // [order_max]; id * multiplier < 2^63 for every id that can occur
    const int64_t* primes;        // [C = order_count * heads], order-major, head-minor
    const int64_t* offsets;       // [C], exclusive prefix sums of primes
    int64_t pad;                  // stands for what is blocked; compressed already; the EOS id for qwen_ple
    int64_t eos;                  // qwen_ple: ends a segment; -1 otherwise
    const int32_t* token_map;     // [token_map_size] raw -> compressed ids, or null: ids stay as they are
    int64_t token_map_size;       // raw ids lie below it, with a map or without
};

struct WindowsView {
    const int64_t* tokens;        // [token_count], >= 0
    int64_t token_count;
    const int32_t* starts;        // [request_count + 1], rising from 0 to token_count
    int64_t request_count;
    const int64_t* lookback;      // [request_count, lookback_columns], column 0 nearest, -1 = before the sequence
    int64_t lookback_columns;     // >= order_max - 1
    const bool* dead;             // [token_count] or null
    const bool* lookback_dead;    // [request_count, lookback_columns] or null
};

}  // namespace treadle::kernels
