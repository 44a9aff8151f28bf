// Opaque rows to numbers: values of a row, times the scale of their block, as fp32.
//
// Every product is one fp32 multiplication, so all copies of the loop give the same bits (NaN: which NaN is not defined).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "target.hpp"

namespace treadle::kernels {

enum class ValueType : int { bf16 = 0, fp16 = 1, fp32 = 2, fp8_e4m3 = 3, u8 = 4, int4 = 5, nf4 = 6 };
enum class ScaleType : int { none = 0, ue8m0 = 1, fp16 = 2, fp32 = 3, all_rows = 4 };

// A row: `dim` values, then one scale for each `block` of them; all_rows: no scale in the row, `scale` for all of them.
// Two values a byte, dim even: int4, the low nibble first; nf4, the high nibble first.
struct RowFormat {
    ValueType values;
    ScaleType scales;
    int64_t row_bytes;
    int64_t dim;
    int64_t block;
    float scale = 1.0f;
};

constexpr int64_t inline_scale_bytes(ScaleType type) {
    return type == ScaleType::ue8m0 ? 1 : type == ScaleType::fp16 ? 2 : type == ScaleType::fp32 ? 4 : 0;
}

// NormalFloat4: quantiles of the normal distribution, as bitsandbytes writes them (QLoRA, arXiv 2305.14314, appendix E).
inline constexpr std::array<float, 16> NF4_LEVELS = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

namespace detail {

// `yes` or `no`, both computed: with a branch between floating-point operations compilers do not vectorise the loop.
TREADLE_INLINE uint32_t chosen(bool which, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - static_cast<uint32_t>(which);
    return (yes & mask) | (no & ~mask);
}

// Bits that stand for the value of a float with `mantissa` bits and `bias`, sign removed. No denormal enters an operation,
// so a process that flushes them (torch.set_flush_denormal) reads the same numbers.
template <int MANTISSA, int BIAS>
TREADLE_INLINE uint32_t widened(uint32_t magnitude) {
    const uint32_t normal = (magnitude << (23 - MANTISSA)) + (static_cast<uint32_t>(127 - BIAS) << 23);
    constexpr float SMALLEST = std::bit_cast<float>(static_cast<uint32_t>(128 - BIAS - MANTISSA) << 23);
    const uint32_t denormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * SMALLEST);
    return chosen(magnitude < (1u << MANTISSA), denormal, normal);
}

TREADLE_INLINE float from_fp16(uint16_t bits) {
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t finite = widened<10, 15>(magnitude);
    const uint32_t read = chosen(magnitude >= 0x7c00u, (magnitude << 13) | 0x7f800000u, finite);
    return std::bit_cast<float>(read | (static_cast<uint32_t>(bits & 0x8000u) << 16));
}

struct Pair {
    float first, second;
};

// Both values of a byte in one load: 2 KiB, which stay in the first-level cache.
inline constexpr std::array<Pair, 256> NF4_PAIRS = [] {
    std::array<Pair, 256> pairs{};
    for (size_t bits = 0; bits < 256; ++bits) pairs[bits] = {NF4_LEVELS[bits >> 4], NF4_LEVELS[bits & 15]};
    return pairs;
}();

template <typename Word>
TREADLE_INLINE Word word_at(const std::byte* bytes, int64_t index) {
    Word word;
    std::memcpy(&word, bytes + index * static_cast<int64_t>(sizeof(Word)), sizeof word);  // rows lie anywhere
    return word;
}

template <ValueType TYPE>
TREADLE_INLINE float value_at(const std::byte* values, int64_t index) {
    if constexpr (TYPE == ValueType::bf16) {
        return std::bit_cast<float>(static_cast<uint32_t>(word_at<uint16_t>(values, index)) << 16);
    } else if constexpr (TYPE == ValueType::fp16) {
        return from_fp16(word_at<uint16_t>(values, index));
    } else if constexpr (TYPE == ValueType::fp32) {
        return word_at<float>(values, index);
    } else if constexpr (TYPE == ValueType::fp8_e4m3) {
        const uint32_t bits = word_at<uint8_t>(values, index);
        const uint32_t magnitude = bits & 0x7fu;
        const uint32_t finite = widened<3, 7>(magnitude);
        return std::bit_cast<float>(chosen(magnitude == 0x7fu, 0x7fc00000u, finite) | ((bits & 0x80u) << 24));  // no infinities
    } else if constexpr (TYPE == ValueType::u8) {
        return static_cast<float>(word_at<uint8_t>(values, index));
    } else if constexpr (TYPE == ValueType::nf4) {
        return NF4_LEVELS[word_at<uint8_t>(values, index >> 1) >> (index & 1 ? 0 : 4) & 15];
    } else {
        const int bits = word_at<uint8_t>(values, index >> 1) >> (index & 1) * 4;
        return static_cast<float>(((bits & 15) ^ 8) - 8);
    }
}

template <ScaleType TYPE>
TREADLE_INLINE float scale_at(const std::byte* scales, int64_t index) {
    if constexpr (TYPE == ScaleType::ue8m0) {
        const uint32_t bits = word_at<uint8_t>(scales, index);
        return std::bit_cast<float>(bits == 0 ? 0x00400000u : bits == 255 ? 0x7fc00000u : bits << 23);  // 2^(bits - 127)
    } else if constexpr (TYPE == ScaleType::fp32) {
        return word_at<float>(scales, index);
    } else {
        return from_fp16(word_at<uint16_t>(scales, index));
    }
}

// out[i] = value first + i, times `scale` where SCALED.
template <ValueType TYPE, bool SCALED>
TREADLE_INLINE void read_values(const std::byte* values, int64_t first, int64_t count, float scale, float* __restrict out) {
    if constexpr (TYPE == ValueType::int4) {
        if (first % 2 == 0 && count % 2 == 0) {  // by bytes: two steady streams, which vectors can write
            const std::byte* const pairs = values + first / 2;
            for (int64_t i = 0; i < count / 2; ++i) {
                const int bits = word_at<uint8_t>(pairs, i);
                const auto low = static_cast<float>(((bits & 15) ^ 8) - 8);
                const auto high = static_cast<float>(((bits >> 4) ^ 8) - 8);
                out[2 * i] = SCALED ? low * scale : low;
                out[2 * i + 1] = SCALED ? high * scale : high;
            }
            return;
        }
    }
    if constexpr (TYPE == ValueType::nf4) {
        if (first % 2 == 0 && count % 2 == 0) {
            const std::byte* const pairs = values + first / 2;
            for (int64_t i = 0; i < count / 2; ++i) {
                const Pair pair = NF4_PAIRS[word_at<uint8_t>(pairs, i)];
                out[2 * i] = SCALED ? pair.first * scale : pair.first;
                out[2 * i + 1] = SCALED ? pair.second * scale : pair.second;
            }
            return;
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        const float value = value_at<TYPE>(values, first + i);
        out[i] = SCALED ? value * scale : value;
    }
}

template <ValueType VALUES, ScaleType SCALES>
TREADLE_INLINE void read_rows(const RowFormat& format, const std::byte* rows, int64_t count, float* out) {
    if constexpr (SCALES == ScaleType::none) {
        read_values<VALUES, false>(rows, 0, count * format.dim, 1.0f, out);  // nothing between rows: one run
    } else if constexpr (SCALES == ScaleType::all_rows) {
        read_values<VALUES, true>(rows, 0, count * format.dim, format.scale, out);
    } else {
        const int64_t blocks = format.dim / format.block;
        const int64_t value_bytes = format.row_bytes - blocks * inline_scale_bytes(SCALES);
        for (int64_t row = 0; row < count; ++row, rows += format.row_bytes, out += format.dim) {
            for (int64_t b = 0; b < blocks; ++b) {
                const float scale = scale_at<SCALES>(rows + value_bytes, b);
                read_values<VALUES, true>(rows, b * format.block, format.block, scale, out + b * format.block);
            }
        }
    }
}

template <ValueType VALUES>
TREADLE_INLINE void read_by_scale(const RowFormat& format, const std::byte* rows, int64_t count, float* out) {
    switch (format.scales) {
        case ScaleType::none: return read_rows<VALUES, ScaleType::none>(format, rows, count, out);
        case ScaleType::ue8m0: return read_rows<VALUES, ScaleType::ue8m0>(format, rows, count, out);
        case ScaleType::fp16: return read_rows<VALUES, ScaleType::fp16>(format, rows, count, out);
        case ScaleType::fp32: return read_rows<VALUES, ScaleType::fp32>(format, rows, count, out);
        case ScaleType::all_rows: return read_rows<VALUES, ScaleType::all_rows>(format, rows, count, out);
    }
}

TREADLE_INLINE void dequantise_any(const RowFormat& format, const std::byte* rows, int64_t count, float* out) {
    switch (format.values) {
        case ValueType::bf16: return read_by_scale<ValueType::bf16>(format, rows, count, out);
        case ValueType::fp16: return read_by_scale<ValueType::fp16>(format, rows, count, out);
        case ValueType::fp32: return read_by_scale<ValueType::fp32>(format, rows, count, out);
        case ValueType::fp8_e4m3: return read_by_scale<ValueType::fp8_e4m3>(format, rows, count, out);
        case ValueType::u8: return read_by_scale<ValueType::u8>(format, rows, count, out);
        case ValueType::int4: return read_by_scale<ValueType::int4>(format, rows, count, out);
        case ValueType::nf4: return read_by_scale<ValueType::nf4>(format, rows, count, out);
    }
}

inline void dequantise_baseline(const RowFormat& format, const std::byte* rows, int64_t count, float* out) {
    dequantise_any(format, rows, count, out);
}

TREADLE_TARGET("avx2,fma")
inline void dequantise_avx2(const RowFormat& format, const std::byte* rows, int64_t count, float* out) {
    dequantise_any(format, rows, count, out);
}

TREADLE_TARGET("avx512f,avx512dq,avx512vl,fma")
inline void dequantise_avx512(const RowFormat& format, const std::byte* rows, int64_t count, float* out) {
    dequantise_any(format, rows, count, out);
}

}  // namespace detail

// `count` rows of format.row_bytes, anywhere in memory, to count x dim fp32; `out` does not overlap them. The format fits together:
// the caller has checked it.
inline void dequantise(const RowFormat& format, const std::byte* rows, int64_t count, float* out) {
    if (detail::cpu_has_avx512()) return detail::dequantise_avx512(format, rows, count, out);
    if (detail::cpu_has_avx2()) return detail::dequantise_avx2(format, rows, count, out);
    return detail::dequantise_baseline(format, rows, count, out);
}

}  // namespace treadle::kernels
