// Writes cache lines back to memory, for memory that others read without looking into our caches: DAX devices, CXL pools.
//
// clwb keeps the line, clflushopt and clflush drop it; which of them the CPU has is asked at run time. The fence comes last: what
// is written after `flush` returns is not seen before what was flushed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "target.hpp"

#if TREADLE_X86_64
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace treadle::kernels {

enum class Flush : int { none = 0, clflush = 1, clflushopt = 2, clwb = 3 };

namespace detail {

constexpr size_t CACHE_LINE_BYTES = 64;

#if TREADLE_X86_64

inline Flush flush_kind() {
    static const Flush kind = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
            if (b & (1u << 24)) return Flush::clwb;
            if (b & (1u << 23)) return Flush::clflushopt;
        }
        return Flush::clflush;  // every x86-64 has it
    }();
    return kind;
}

TREADLE_TARGET("clwb") inline void flush_clwb(const std::byte* line, const std::byte* end) {
    for (; line < end; line += CACHE_LINE_BYTES) _mm_clwb(const_cast<std::byte*>(line));
}

TREADLE_TARGET("clflushopt") inline void flush_clflushopt(const std::byte* line, const std::byte* end) {
    for (; line < end; line += CACHE_LINE_BYTES) _mm_clflushopt(const_cast<std::byte*>(line));
}

inline void flush_clflush(const std::byte* line, const std::byte* end) {
    for (; line < end; line += CACHE_LINE_BYTES) _mm_clflush(line);
}

#endif

}  // namespace detail

// Writes back every line that [begin, begin + size) touches, then fences. `none`, and nothing done, where we know no instruction.
inline Flush flush(const std::byte* begin, size_t size) {
#if TREADLE_X86_64
    const auto* const line =
        reinterpret_cast<const std::byte*>(reinterpret_cast<uintptr_t>(begin) / detail::CACHE_LINE_BYTES * detail::CACHE_LINE_BYTES);
    const std::byte* const end = begin + size;
    const Flush kind = detail::flush_kind();
    switch (kind) {
        case Flush::clwb: detail::flush_clwb(line, end); break;
        case Flush::clflushopt: detail::flush_clflushopt(line, end); break;
        default: detail::flush_clflush(line, end); break;
    }
    _mm_sfence();
    return kind;
#else
    (void)begin, (void)size;
    return Flush::none;
#endif
}

}  // namespace treadle::kernels
