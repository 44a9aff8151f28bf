// CRC32C (Castagnoli, RFC 3720): the checksum of segment chunks.
//
// Where the CPU has the instruction, three streams run side by side (it takes 3 cycles but starts one each cycle) and are
// joined by a multiplication modulo the polynomial; elsewhere eight table look-ups take eight bytes at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "target.hpp"

#if TREADLE_X86_64
#include <nmmintrin.h>
#endif

namespace treadle::kernels {
namespace detail {

inline constexpr uint32_t CRC_POLYNOMIAL = 0x82F63B78;  // bit-reflected
inline constexpr size_t CRC_STREAM_BYTES = 4096;        // of each of the three streams: joining them is then cheap, and they fit the first-level cache

// a * b modulo the polynomial, all bit-reflected (the top bit is x^0).
constexpr uint32_t crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; --bit) {
        product ^= b & (0u - ((a >> bit) & 1u));
        b = (b >> 1) ^ (CRC_POLYNOMIAL & (0u - (b & 1u)));
    }
    return product;
}

// x^(8 * bytes): multiplying a CRC by it appends that many zero bytes.
constexpr uint32_t crc_shift(size_t bytes) {
    uint32_t result = 0x80000000;  // x^0
    uint32_t power = 0x00800000;   // x^8
    for (; bytes != 0; bytes >>= 1) {
        if (bytes & 1) result = crc_multiply(result, power);
        power = crc_multiply(power, power);
    }
    return result;
}

constexpr std::array<std::array<uint32_t, 256>, 8> crc_tables() {
    std::array<std::array<uint32_t, 256>, 8> tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (CRC_POLYNOMIAL & (0u - (crc & 1u)));
        tables[0][byte] = crc;
    }
    for (size_t slice = 1; slice < 8; ++slice) {
        for (size_t byte = 0; byte < 256; ++byte) {
            const uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}

inline constexpr auto CRC_TABLES = crc_tables();

inline uint32_t crc_by_table(uint32_t crc, const std::byte* data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint32_t next = 0;
        for (size_t i = 0; i < 8; ++i) {
            const uint32_t carried = i < 4 ? crc >> (8 * i) : 0;
            next ^= CRC_TABLES[7 - i][(std::to_integer<uint32_t>(data[i]) ^ carried) & 0xFF];
        }
        crc = next;
    }
    for (; size != 0; ++data, --size) crc = (crc >> 8) ^ CRC_TABLES[0][(crc ^ std::to_integer<uint32_t>(*data)) & 0xFF];
    return crc;
}

#if TREADLE_X86_64
TREADLE_TARGET("sse4.2") TREADLE_INLINE uint64_t crc_word(uint64_t crc, const std::byte* data) {
    uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return _mm_crc32_u64(crc, word);
}

TREADLE_TARGET("sse4.2") inline uint32_t crc_by_instruction(uint32_t start, const std::byte* data, size_t size) {
    constexpr uint32_t shift = crc_shift(CRC_STREAM_BYTES);
    uint64_t crc = start;
    for (; size >= 3 * CRC_STREAM_BYTES; data += 3 * CRC_STREAM_BYTES, size -= 3 * CRC_STREAM_BYTES) {
        uint64_t second = 0;
        uint64_t third = 0;
        for (size_t at = 0; at < CRC_STREAM_BYTES; at += 8) {
            crc = crc_word(crc, data + at);
            second = crc_word(second, data + CRC_STREAM_BYTES + at);
            third = crc_word(third, data + 2 * CRC_STREAM_BYTES + at);
        }
        const uint32_t two = crc_multiply(shift, static_cast<uint32_t>(crc)) ^ static_cast<uint32_t>(second);
        crc = crc_multiply(shift, two) ^ static_cast<uint32_t>(third);
    }
    for (; size >= 8; data += 8, size -= 8) crc = crc_word(crc, data);
    auto narrow = static_cast<uint32_t>(crc);
    for (; size != 0; ++data, --size) narrow = _mm_crc32_u8(narrow, std::to_integer<uint8_t>(*data));
    return narrow;
}
#endif

}  // namespace detail

// CRC32C of `size` bytes, continuing from the CRC of what came before (0 at the start).
inline uint32_t crc32c(uint32_t crc, const std::byte* data, size_t size) {
#if TREADLE_X86_64
    if (detail::cpu_has_crc32c()) return ~detail::crc_by_instruction(~crc, data, size);
#endif
    return ~detail::crc_by_table(~crc, data, size);
}

}  // namespace treadle::kernels
