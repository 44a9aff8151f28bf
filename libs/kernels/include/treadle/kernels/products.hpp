// Dot products of queries with rows of fp32, bf16 or int8 numbers that lie one after the other: a tile of sums in registers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "target.hpp"

namespace treadle::kernels {

enum class KeyType : int { f32 = 0, bf16 = 1, int8 = 2 };

namespace detail {

inline constexpr int64_t TILE_KEYS = 4;

template <KeyType TYPE>
struct KeyWord;
template <>
struct KeyWord<KeyType::f32> {
    using Word = float;
};
template <>
struct KeyWord<KeyType::bf16> {
    using Word = uint16_t;
};
template <>
struct KeyWord<KeyType::int8> {
    using Word = int8_t;
};

typedef float Four __attribute__((vector_size(16)));

// Passed by reference only: how a call passes wide vectors depends on what it is compiled for.
template <int WIDTH>
struct Lanes {
    typedef float Vector __attribute__((vector_size(WIDTH * 4)));
    typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
    typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));
    typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
};

// WIDTH numbers of a key or query, at any address.
template <int WIDTH>
TREADLE_INLINE void read_lanes(const float* numbers, typename Lanes<WIDTH>::Vector& read) {
    std::memcpy(&read, numbers, sizeof read);
}

template <int WIDTH>
TREADLE_INLINE void read_lanes(const uint16_t* numbers, typename Lanes<WIDTH>::Vector& read) {
    typename Lanes<WIDTH>::Halves halves;
    std::memcpy(&halves, numbers, sizeof halves);
    const auto words = __builtin_convertvector(halves, typename Lanes<WIDTH>::Words) << 16;
    std::memcpy(&read, &words, sizeof read);
}

template <int WIDTH>
TREADLE_INLINE void read_lanes(const int8_t* numbers, typename Lanes<WIDTH>::Vector& read) {
    typename Lanes<WIDTH>::Integers integers;
    if constexpr (TREADLE_X86_64 && WIDTH > 4) {
        // By hand: g++ 12 takes eight instructions for this one, and int8 keys were four times as slow as fp32 ones.
        const auto& bytes = *reinterpret_cast<const int8_t(*)[WIDTH]>(numbers);
        asm("vpmovsxbd %1, %0" : "=v"(integers) : "m"(bytes));
    } else {
        typename Lanes<WIDTH>::Bytes bytes;
        std::memcpy(&bytes, numbers, sizeof bytes);
        integers = __builtin_convertvector(bytes, typename Lanes<WIDTH>::Integers);
    }
    read = __builtin_convertvector(integers, typename Lanes<WIDTH>::Vector);
}

TREADLE_INLINE float key_number(float number) { return number; }
TREADLE_INLINE float key_number(uint16_t number) { return std::bit_cast<float>(static_cast<uint32_t>(number) << 16); }
TREADLE_INLINE float key_number(int8_t number) { return static_cast<float>(number); }

template <int WIDTH>
TREADLE_INLINE Four folded(const typename Lanes<WIDTH>::Vector& sums) {
    if constexpr (WIDTH == 4) {
        return sums;
    } else {
        typename Lanes<WIDTH / 2>::Vector halves[2];
        std::memcpy(halves, &sums, sizeof halves);
        return folded<WIDTH / 2>(halves[0] + halves[1]);
    }
}

// The four totals of four vectors of sums.
TREADLE_INLINE Four totals(Four a, Four b, Four c, Four d) {
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// products[q] = queries[q] . each of four keys that lie one after the other, without their scales.
template <KeyType TYPE, int WIDTH, int QUERIES>
TREADLE_INLINE void products_of_four(const float* const* queries, const typename KeyWord<TYPE>::Word* keys, int64_t dim, Four* products) {
    typename Lanes<WIDTH>::Vector sums[QUERIES][TILE_KEYS] = {};
    int64_t at = 0;
    for (; at + WIDTH <= dim; at += WIDTH) {
        typename Lanes<WIDTH>::Vector key[TILE_KEYS];
#pragma GCC unroll 4
        for (int k = 0; k < TILE_KEYS; ++k) {
            read_lanes<WIDTH>(keys + k * dim + at, key[k]);
            __builtin_prefetch(keys + (k + TILE_KEYS) * dim + at);  // of the next tile; behind the last key it does nothing
        }
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; ++q) {
            typename Lanes<WIDTH>::Vector query;
            read_lanes<WIDTH>(queries[q] + at, query);
#pragma GCC unroll 4
            for (int k = 0; k < TILE_KEYS; ++k) sums[q][k] += query * key[k];
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < QUERIES; ++q) {
        products[q] = totals(folded<WIDTH>(sums[q][0]), folded<WIDTH>(sums[q][1]), folded<WIDTH>(sums[q][2]), folded<WIDTH>(sums[q][3]));
        for (int64_t rest = at; rest < dim; ++rest) {
            for (int k = 0; k < TILE_KEYS; ++k) products[q][k] += queries[q][rest] * key_number(keys[k * dim + rest]);
        }
    }
}

// One key, for the last of a list.
template <KeyType TYPE, int WIDTH>
TREADLE_INLINE float product_of_one(const float* query, const typename KeyWord<TYPE>::Word* key, int64_t dim) {
    typename Lanes<WIDTH>::Vector sums = {};
    int64_t at = 0;
    for (; at + WIDTH <= dim; at += WIDTH) {
        typename Lanes<WIDTH>::Vector left, right;
        read_lanes<WIDTH>(query + at, left);
        read_lanes<WIDTH>(key + at, right);
        sums += left * right;
    }
    const Four four = folded<WIDTH>(sums);
    float product = (four[0] + four[2]) + (four[1] + four[3]);  // as `totals` adds, so that a key is worth the same in any place
    for (; at < dim; ++at) product += query[at] * key_number(key[at]);
    return product;
}

}  // namespace detail

}  // namespace treadle::kernels
