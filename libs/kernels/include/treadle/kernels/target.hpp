// Which instruction sets a function is compiled for, and whether this CPU has them.
//
// One binary runs everywhere: the plain build is the platform's baseline, wider copies are chosen at run time.
#pragma once

#if defined(__GNUC__) && defined(__x86_64__)
#define TREADLE_X86_64 1
#define TREADLE_TARGET(features) __attribute__((target(features)))
#else
#define TREADLE_X86_64 0
#define TREADLE_TARGET(features)
#endif

// Inlined into its caller, so that it is compiled once more for each instruction set that the caller is compiled for.
#define TREADLE_INLINE inline __attribute__((always_inline))
#define TREADLE_LAMBDA_INLINE __attribute__((always_inline))

namespace treadle::kernels::detail {

inline bool cpu_has_avx512() {
#if TREADLE_X86_64
    static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has;
#else
    return false;
#endif
}

inline bool cpu_has_avx2() {
#if TREADLE_X86_64
    static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has;
#else
    return false;
#endif
}

inline bool cpu_has_crc32c() {
#if TREADLE_X86_64
    static const bool has = __builtin_cpu_supports("sse4.2");
    return has;
#else
    return false;
#endif
}

}  // namespace treadle::kernels::detail
