// Attention of single tokens over their sequences' keys, the state (a, log Z) included: a decoding step's share of one layer.
//
// The heads of a group stand where several queries of one search would: each key and value is read once for all of them.
// Source: arXiv 2605.18226, equation 2, with log Z in place of Z; exp as in Cephes' expf (relative error 2e-7 on x <= 0).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "products.hpp"
#include "target.hpp"

namespace treadle::kernels {

struct HeadsShape {
    int64_t heads;  // a multiple of kv_heads
    int64_t kv_heads;
    int64_t head_dim;
};

// One layer of one sequence: keys, then values, each [kv_heads, capacity, head_dim]; `length` tokens are there already.
struct SequenceView {
    float* keys_values;
    int64_t capacity;
    int64_t length;
};

// A few keys that every token of a request sees: keys and values [kv_heads, count, head_dim], biases [kv_heads, count]; -inf: no key.
struct KeysView {
    const float* keys;
    const float* values;
    const float* biases;
    int64_t count;
};

inline constexpr int64_t SCORES_STEP = 16;  // scores of a head take a multiple of this, so that no vector ends in those of another

// Numbers of the scores of one group of query heads, behind as many tokens as `length` and one.
inline int64_t decode_space(const HeadsShape& shape, int64_t length) {
    const int64_t groups = shape.heads / shape.kv_heads;
    return groups * (shape.head_dim + (length + SCORES_STEP) / SCORES_STEP * SCORES_STEP);
}

namespace detail {

// exp of numbers <= 0; below -87 a number so small that it counts for nothing beside the 1 of the largest score. NaN stays NaN.
template <int WIDTH>
TREADLE_INLINE void exp_not_positive(typename Lanes<WIDTH>::Vector& x) {
    using Vector = typename Lanes<WIDTH>::Vector;
    using Integers = typename Lanes<WIDTH>::Integers;
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
    const Vector lowest = Vector{} - 87.0f;
    x = x < lowest ? lowest : x;
    const Vector shifted = x * 1.44269504f + ROUND;
    const Vector whole = shifted - ROUND;
    const Vector rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vector power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    Integers exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent - 0x4B400000 + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &exponent, sizeof scale);
    x = power * scale;
}

// Scores [QUERIES] x `count` keys, the scores of a query `stride` numbers from those of the next.
template <int WIDTH, int QUERIES>
TREADLE_INLINE void score_keys(const float* const* queries, const float* keys, int64_t count, int64_t dim, float* scores, int64_t stride) {
    int64_t at = 0;
    for (; at + TILE_KEYS <= count; at += TILE_KEYS) {
        Four products[QUERIES];
        products_of_four<KeyType::f32, WIDTH, QUERIES>(queries, keys + at * dim, dim, products);
        for (int q = 0; q < QUERIES; ++q) std::memcpy(scores + q * stride + at, &products[q], sizeof(Four));
    }
    for (; at < count; ++at) {
        for (int q = 0; q < QUERIES; ++q) scores[q * stride + at] = product_of_one<KeyType::f32, WIDTH>(queries[q], keys + at * dim, dim);
    }
}

// Scores to weights exp(score - largest), in place; returns log Z, and the sum of the weights in `total`.
template <int WIDTH>
TREADLE_INLINE float weigh(float* scores, int64_t count, float& total) {
    using Vector = typename Lanes<WIDTH>::Vector;
    const int64_t padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
    Vector peaks, sums = {};
    read_lanes<WIDTH>(scores, peaks);
    for (int64_t at = WIDTH; at < padded; at += WIDTH) {
        Vector next;
        read_lanes<WIDTH>(scores + at, next);
        peaks = peaks < next ? next : peaks;
    }
    float peak = peaks[0];
    for (int lane = 1; lane < WIDTH; ++lane) peak = std::max(peak, peaks[lane]);
    if (peak == -std::numeric_limits<float>::infinity()) {  // no key at all: a of 0, not of NaN
        std::fill(scores, scores + padded, 0.0f);
        total = 1;
        return peak;
    }
    for (int64_t at = 0; at < padded; at += WIDTH) {
        Vector weights;
        read_lanes<WIDTH>(scores + at, weights);
        weights -= peak;
        exp_not_positive<WIDTH>(weights);
        std::memcpy(scores + at, &weights, sizeof weights);
        sums += weights;
    }
    const Four four = folded<WIDTH>(sums);
    total = (four[0] + four[2]) + (four[1] + four[3]);
    return peak + std::log(total);
}

// out[q] = sum of weights[q] . values in columns [at, at + VECTORS * WIDTH), over totals[q].
template <int WIDTH, int QUERIES, int VECTORS>
TREADLE_INLINE void weighted_columns(const float* weights, int64_t stride, const float* totals, const float* values, int64_t count, int64_t dim,
                                     int64_t at, float* out) {
    typename Lanes<WIDTH>::Vector sums[QUERIES][VECTORS] = {};
    for (int64_t s = 0; s < count; ++s) {
        typename Lanes<WIDTH>::Vector value[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) read_lanes<WIDTH>(values + s * dim + at + v * WIDTH, value[v]);
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; ++q) {
            const float weight = weights[q * stride + s];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[q][v] += weight * value[v];
        }
    }
    for (int q = 0; q < QUERIES; ++q) {
        for (int v = 0; v < VECTORS; ++v) {
            const typename Lanes<WIDTH>::Vector mean = sums[q][v] / totals[q];
            std::memcpy(out + q * dim + at + v * WIDTH, &mean, sizeof mean);
        }
    }
}

template <int WIDTH, int QUERIES>
TREADLE_INLINE void weighted_values(const float* weights, int64_t stride, const float* totals, const float* values, int64_t count, int64_t dim,
                                    float* out) {
    int64_t at = 0;
    for (; at + 4 * WIDTH <= dim; at += 4 * WIDTH) weighted_columns<WIDTH, QUERIES, 4>(weights, stride, totals, values, count, dim, at, out);
    for (; at + WIDTH <= dim; at += WIDTH) weighted_columns<WIDTH, QUERIES, 1>(weights, stride, totals, values, count, dim, at, out);
    for (; at < dim; ++at) {
        for (int q = 0; q < QUERIES; ++q) {
            float sum = 0;
            for (int64_t s = 0; s < count; ++s) sum += weights[q * stride + s] * values[s * dim + at];
            out[q * dim + at] = sum / totals[q];
        }
    }
}

// QUERIES heads of one group over `count` keys and values, biases added to the scores (nullptr: none). space: as many scaled queries, then
// their scores.
template <int WIDTH, int QUERIES>
TREADLE_INLINE void attend_heads(const float* queries, const float* keys, const float* values, const float* biases, int64_t count, int64_t dim,
                                 float* space, float* out, float* log_z) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const int64_t stride = (count + SCORES_STEP - 1) / SCORES_STEP * SCORES_STEP;
    float* const scores = space + QUERIES * dim;
    const float* scaled[QUERIES];
    float totals[QUERIES];
    for (int64_t at = 0; at < QUERIES * dim; ++at) space[at] = queries[at] * scale;
    for (int q = 0; q < QUERIES; ++q) scaled[q] = space + q * dim;
    score_keys<WIDTH, QUERIES>(scaled, keys, count, dim, scores, stride);
    for (int q = 0; q < QUERIES && biases != nullptr; ++q) {
        for (int64_t s = 0; s < count; ++s) scores[q * stride + s] += biases[s];
    }
    for (int q = 0; q < QUERIES; ++q) log_z[q] = weigh<WIDTH>(scores + q * stride, count, totals[q]);
    weighted_values<WIDTH, QUERIES>(scores, stride, totals, values, count, dim, out);
}

template <int WIDTH>
TREADLE_INLINE void attend_group(const float* queries, const float* keys, const float* values, const float* biases, int64_t count, int64_t dim,
                                 int64_t groups, float* space, float* out, float* log_z) {
    constexpr int TILE_QUERIES = WIDTH == 16 ? 4 : 2;  // more sums than registers would go through memory
    for (int64_t head = 0; head < groups;) {
        const int64_t heads = std::min<int64_t>(TILE_QUERIES, groups - head);
        const float* const query = queries + head * dim;
        float* const result = out + head * dim;
        switch (heads) {
            case 1: attend_heads<WIDTH, 1>(query, keys, values, biases, count, dim, space, result, log_z + head); break;
            case 2: attend_heads<WIDTH, 2>(query, keys, values, biases, count, dim, space, result, log_z + head); break;
            default:
                if constexpr (TILE_QUERIES == 4) {
                    if (heads == 3) {
                        attend_heads<WIDTH, 3>(query, keys, values, biases, count, dim, space, result, log_z + head);
                    } else {
                        attend_heads<WIDTH, 4>(query, keys, values, biases, count, dim, space, result, log_z + head);
                    }
                }
        }
        head += heads;
    }
}

template <int WIDTH>
TREADLE_INLINE void decode(const HeadsShape& shape, const SequenceView& sequence, const float* query, const float* key_value, float* space, float* out,
                           float* log_z) {
    const int64_t dim = shape.head_dim, groups = shape.heads / shape.kv_heads, of_head = sequence.capacity * dim;
    for (int64_t kv = 0; kv < shape.kv_heads; ++kv) {
        float* const keys = sequence.keys_values + kv * of_head;
        float* const values = sequence.keys_values + (shape.kv_heads + kv) * of_head;
        std::memcpy(keys + sequence.length * dim, key_value + kv * dim, static_cast<size_t>(dim) * sizeof(float));
        std::memcpy(values + sequence.length * dim, key_value + (shape.kv_heads + kv) * dim, static_cast<size_t>(dim) * sizeof(float));
        attend_group<WIDTH>(query + kv * groups * dim, keys, values, nullptr, sequence.length + 1, dim, groups, space, out + kv * groups * dim,
                            log_z + kv * groups);
    }
}

inline void decode_baseline(const HeadsShape& shape, const SequenceView& sequence, const float* query, const float* key_value, float* space,
                            float* out, float* log_z) {
    decode<4>(shape, sequence, query, key_value, space, out, log_z);
}

TREADLE_TARGET("avx2,fma")
inline void decode_avx2(const HeadsShape& shape, const SequenceView& sequence, const float* query, const float* key_value, float* space, float* out,
                        float* log_z) {
    decode<8>(shape, sequence, query, key_value, space, out, log_z);
}

TREADLE_TARGET("avx512f,avx512dq,avx512vl,fma")
inline void decode_avx512(const HeadsShape& shape, const SequenceView& sequence, const float* query, const float* key_value, float* space, float* out,
                          float* log_z) {
    decode<16>(shape, sequence, query, key_value, space, out, log_z);
}

template <int WIDTH>
TREADLE_INLINE void attend_keys(const HeadsShape& shape, const KeysView& seen, const float* query, float* space, float* out, float* log_z) {
    const int64_t dim = shape.head_dim, groups = shape.heads / shape.kv_heads;
    for (int64_t kv = 0; kv < shape.kv_heads; ++kv) {
        const int64_t first = kv * seen.count;
        attend_group<WIDTH>(query + kv * groups * dim, seen.keys + first * dim, seen.values + first * dim, seen.biases + first, seen.count, dim, groups,
                            space, out + kv * groups * dim, log_z + kv * groups);
    }
}

inline void attend_keys_baseline(const HeadsShape& shape, const KeysView& seen, const float* query, float* space, float* out, float* log_z) {
    attend_keys<4>(shape, seen, query, space, out, log_z);
}

TREADLE_TARGET("avx2,fma")
inline void attend_keys_avx2(const HeadsShape& shape, const KeysView& seen, const float* query, float* space, float* out, float* log_z) {
    attend_keys<8>(shape, seen, query, space, out, log_z);
}

TREADLE_TARGET("avx512f,avx512dq,avx512vl,fma")
inline void attend_keys_avx512(const HeadsShape& shape, const KeysView& seen, const float* query, float* space, float* out, float* log_z) {
    attend_keys<16>(shape, seen, query, space, out, log_z);
}

}  // namespace detail

// The state of one token's query [heads, head_dim] over `seen`. space: `decode_space` numbers for a length of seen.count.
inline void attend_keys(const HeadsShape& shape, const KeysView& seen, const float* query, float* space, float* out, float* log_z) {
    if (detail::cpu_has_avx512()) return detail::attend_keys_avx512(shape, seen, query, space, out, log_z);
    if (detail::cpu_has_avx2()) return detail::attend_keys_avx2(shape, seen, query, space, out, log_z);
    return detail::attend_keys_baseline(shape, seen, query, space, out, log_z);
}

// Appends a token's key_value [2, kv_heads, head_dim] behind `length` and lets its query [heads, head_dim] attend to all tokens there: the
// state, out [heads, head_dim] and log_z [heads]. space: `decode_space` numbers. Sizes were checked by the caller.
inline void decode(const HeadsShape& shape, const SequenceView& sequence, const float* query, const float* key_value, float* space, float* out,
                   float* log_z) {
    if (detail::cpu_has_avx512()) return detail::decode_avx512(shape, sequence, query, key_value, space, out, log_z);
    if (detail::cpu_has_avx2()) return detail::decode_avx2(shape, sequence, query, key_value, space, out, log_z);
    return detail::decode_baseline(shape, sequence, query, key_value, space, out, log_z);
}

}  // namespace treadle::kernels
