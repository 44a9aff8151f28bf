// N-gram hash: tokens of a step to row ids of one Engram layer. The same results as treadle/kernels/reference.py.
//
// `mix mod prime` is taken for eight heads at once: the quotient is estimated in double precision and the remainder
// corrected in integers, which is exact (see PRIME_MIN_VECTOR). Plans with smaller primes take the plain `%`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "target.hpp"
#include "windows.hpp"

namespace treadle::kernels {
namespace detail {

inline constexpr int LANES = 8;  // heads reduced at once: all families have 8, and 8 x 64 bits fill one AVX-512 register
inline constexpr int GROUPS_MAX = COLUMNS_MAX / LANES + ORDER_MAX;  // the last group of each order may be partly filled

// Exactness: mix < 2^63, so mix / prime < 2^50. Conversion, reciprocal and product each err by at most 2^-53 of it, together
// by less than 3 * 2^-3; rounding to an integer adds 1/2. The quotient is thus less than 1 off, the remainder within (-prime, prime).
inline constexpr int64_t PRIME_MIN_VECTOR = int64_t{1} << 13;
inline constexpr int64_t PRIME_MAX_VECTOR = int64_t{1} << 52;  // still exact as a double
inline constexpr double ROUND = 4503599627370496.0;            // 2^52: adding it leaves the rounded integer in the low bits
inline constexpr uint64_t ROUND_BITS = 0x4330000000000000;     // 2^52 as a double's bit pattern

typedef double Doubles __attribute__((vector_size(LANES * sizeof(double))));
typedef uint64_t Words __attribute__((vector_size(LANES * sizeof(uint64_t))));
typedef int64_t SignedWords __attribute__((vector_size(LANES * sizeof(int64_t))));

struct alignas(64) HeadGroup {  // up to LANES heads of one order; unused lanes hold prime 2^13 and are not stored
    Doubles reciprocals;
    Words primes;
    Words offsets;
};

// Tokens before the current one as compressed ids, nearest first; from the first blocked one on all are `pad`.
class History {
public:
    History(const HashPlanView& plan, const WindowsView& windows) : plan_(plan), windows_(windows), depth_(plan.order_max - 1) {}

    TREADLE_INLINE void start(int64_t request, int64_t token) {
        const int64_t offset = token - windows_.starts[request];
        const int64_t* lookback = windows_.lookback + request * windows_.lookback_columns;
        const bool* lookback_dead = windows_.lookback_dead ? windows_.lookback_dead + request * windows_.lookback_columns : nullptr;
        int back = 1;
        for (; back <= depth_; ++back) {
            const bool inside = offset >= back;
            const int64_t column = back - offset - 1;
            const int64_t raw = inside ? windows_.tokens[token - back] : lookback[column];
            const bool dead = inside ? windows_.dead && windows_.dead[token - back] : lookback_dead && lookback_dead[column];
            if (dead || raw < 0 || ends_segment(raw)) break;
            earlier_[back - 1] = compress(raw);
        }
        std::fill(earlier_ + back - 1, earlier_ + depth_, plan_.pad);
    }

    // The current token as a compressed id; a dead one blocks everything, itself included.
    TREADLE_INLINE int64_t enter(int64_t token) {
        if (windows_.dead && windows_.dead[token]) {
            block();
            return plan_.pad;
        }
        return compress(windows_.tokens[token]);
    }

    TREADLE_INLINE void leave(int64_t current) {
        if (ends_segment(current)) return block();
        for (int i = 0; i < depth_; ++i) std::swap(current, earlier_[i]);  // not a memmove: three words are not worth a call
    }

    TREADLE_INLINE uint64_t earlier(int back) const { return static_cast<uint64_t>(earlier_[back - 1]); }

private:
    TREADLE_INLINE int64_t compress(int64_t raw) const { return plan_.token_map ? plan_.token_map[raw] : raw; }
    TREADLE_INLINE bool ends_segment(int64_t raw) const { return plan_.family == Family::qwen_ple && raw == plan_.eos; }
    TREADLE_INLINE void block() { std::fill(earlier_, earlier_ + depth_, plan_.pad); }

    const HashPlanView& plan_;
    const WindowsView& windows_;
    const int depth_;
    int64_t earlier_[ORDER_MAX];
};

inline bool fits_vector(const HashPlanView& plan) {
    const int64_t* end = plan.primes + plan.order_count * plan.heads;
    return std::all_of(plan.primes, end, [](int64_t p) { return p >= PRIME_MIN_VECTOR && p <= PRIME_MAX_VECTOR; });
}

// Calls reduce(order index, mix, row ids of the token) for every order of every token.
template <typename Reduce>
TREADLE_INLINE void for_each_mix(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, int64_t* rows,
                                 Reduce&& reduce) {
    const int columns = plan.order_count * plan.heads;
    const int32_t* ends = windows.starts + 1;
    int64_t request = std::upper_bound(ends, ends + windows.request_count, first) - ends;
    History history(plan, windows);
    for (int64_t token = first; token < last; ++request) {
        const int64_t end = std::min<int64_t>(windows.starts[request + 1], last);
        if (token < end) history.start(request, token);
        for (; token < end; ++token, rows += columns) {
            const int64_t current = history.enter(token);
            uint64_t mix = static_cast<uint64_t>(current) * plan.multipliers[0];
            for (int index = 0, back = 1; index < plan.order_count; ++index) {
                for (; back < plan.orders[index]; ++back) mix ^= history.earlier(back) * plan.multipliers[back];
                reduce(index, mix, rows);
            }
            history.leave(current);
        }
    }
}

TREADLE_INLINE void fill_groups(const HashPlanView& plan, HeadGroup* groups) {
    const int per_order = (plan.heads + LANES - 1) / LANES;
    for (int index = 0; index < plan.order_count; ++index) {
        for (int g = 0; g < per_order; ++g, ++groups) {
            for (int lane = 0; lane < LANES; ++lane) {
                const int head = g * LANES + lane;
                const int column = index * plan.heads + head;
                const bool used = head < plan.heads;
                const int64_t prime = used ? plan.primes[column] : PRIME_MIN_VECTOR;
                groups->primes[lane] = static_cast<uint64_t>(prime);
                groups->reciprocals[lane] = 1.0 / static_cast<double>(prime);
                groups->offsets[lane] = used ? static_cast<uint64_t>(plan.offsets[column]) : 0;
            }
        }
    }
}

TREADLE_INLINE void hash_vector(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, int64_t* rows) {
    HeadGroup groups[GROUPS_MAX];
    fill_groups(plan, groups);
    const int per_order = (plan.heads + LANES - 1) / LANES;
    for_each_mix(plan, windows, first, last, rows, [&](int index, uint64_t mix, int64_t* row) TREADLE_LAMBDA_INLINE {
        const double value = static_cast<double>(static_cast<int64_t>(mix));
        const HeadGroup* group = groups + index * per_order;
        for (int head = 0; head < plan.heads; head += LANES, ++group) {
            const Doubles rounded = group->reciprocals * value + ROUND;
            const Words quotient = (Words)rounded - ROUND_BITS;  // casts between vectors keep the bits
            Words rest = mix - quotient * group->primes;
            const Words negative = (Words)((SignedWords)rest < 0);
            rest += (negative & group->primes) + group->offsets;
            int64_t* const out = row + index * plan.heads + head;
            if (plan.heads - head >= LANES) {
                std::memcpy(out, &rest, sizeof rest);  // constant size: one or a few stores, no call
            } else {
                std::memcpy(out, &rest, sizeof(int64_t) * static_cast<size_t>(plan.heads - head));
            }
        }
    });
}

inline void hash_plain(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, int64_t* rows) {
    for_each_mix(plan, windows, first, last, rows, [&](int index, uint64_t mix, int64_t* row) {
        for (int column = index * plan.heads; column < (index + 1) * plan.heads; ++column) {
            row[column] = static_cast<int64_t>(mix % static_cast<uint64_t>(plan.primes[column])) + plan.offsets[column];
        }
    });
}

inline void hash_baseline(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, int64_t* rows) {
    hash_vector(plan, windows, first, last, rows);
}

TREADLE_TARGET("avx2,fma")
inline void hash_avx2(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, int64_t* rows) {
    hash_vector(plan, windows, first, last, rows);
}

TREADLE_TARGET("avx512f,avx512dq,avx512vl,fma")
inline void hash_avx512(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, int64_t* rows) {
    hash_vector(plan, windows, first, last, rows);
}

}  // namespace detail

// Whether every id that is not dead lies below token_map_size: what hash_rows needs to be exact and within bounds.
inline bool tokens_in_range(const HashPlanView& plan, const WindowsView& windows) {
    const auto fits = [&](const int64_t* ids, int64_t count, const bool* dead) {
        bool bad = false;
        if (dead == nullptr) {
            for (int64_t i = 0; i < count; ++i) bad |= ids[i] >= plan.token_map_size;
        } else {
            for (int64_t i = 0; i < count; ++i) bad |= ids[i] >= plan.token_map_size && !dead[i];
        }
        return !bad;
    };
    return fits(windows.tokens, windows.token_count, windows.dead) &&
           fits(windows.lookback, windows.request_count * windows.lookback_columns, windows.lookback_dead);
}

// Row ids of tokens [first, last) of the windows: rows[(i - first) * C + c], head offsets added.
// The caller has validated the inputs: ids in range of the token map, starts rising, enough look-back columns.
inline void hash_rows(const HashPlanView& plan, const WindowsView& windows, int64_t first, int64_t last, int64_t* rows) {
    if (!detail::fits_vector(plan)) return detail::hash_plain(plan, windows, first, last, rows);
    if (detail::cpu_has_avx512()) return detail::hash_avx512(plan, windows, first, last, rows);
    if (detail::cpu_has_avx2()) return detail::hash_avx2(plan, windows, first, last, rows);
    return detail::hash_baseline(plan, windows, first, last, rows);
}

}  // namespace treadle::kernels
