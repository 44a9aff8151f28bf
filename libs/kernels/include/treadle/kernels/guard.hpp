// A page of a mapping that cannot be read (its file was truncated, its memory failed) becomes `false` instead of the end of the process.
//
// The last line of defence, around leaf loops alone: see docs/decisions/0010 for what it does not cover.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace treadle::kernels {
namespace detail {

// Memory that this thread reads under guard; lives on its stack, innermost first.
struct GuardedSpan {
    uintptr_t begin;
    size_t bytes;
    GuardedSpan* outer;
    sigjmp_buf back;
};

struct ThreadGuard {
    GuardedSpan* innermost;
    bool listening;  // SIGBUS was unblocked for this thread
};

// initial-exec: the handler may look at it on a thread that never used a guard, where the default model would allocate.
#if defined(__GLIBC__)
__attribute__((tls_model("initial-exec")))
#endif
inline constinit thread_local ThreadGuard thread_guard{nullptr, false};

inline struct sigaction bus_handler_before {};

// Not ours: what was there before decides. The default action ends the process at the instruction that faulted.
inline void pass_bus_on(int signal, siginfo_t* info, void* context) {
    const struct sigaction& before = bus_handler_before;
    if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, info, context);
    const bool sent = info->si_code <= 0;  // by kill(), not by a memory access that would only happen again
    if (before.sa_handler == SIG_IGN && sent) return;
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
    struct sigaction fatal {};
    fatal.sa_handler = SIG_DFL;
    sigaction(signal, &fatal, nullptr);
    if (sent) raise(signal);
}

inline void on_bus(int signal, siginfo_t* info, void* context) {
    if (info->si_code > 0) {
        const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
        for (GuardedSpan* span = thread_guard.innermost; span != nullptr; span = span->outer) {
            if (at - span->begin < span->bytes) siglongjmp(span->back, 1);
        }
    }
    pass_bus_on(signal, info, context);
}

// Once for each binary that uses the guard; one that comes later hands on to the earlier one.
inline bool install_bus_handler() noexcept {
    sigaction(SIGBUS, nullptr, &bus_handler_before);  // known before the handler can run
    struct sigaction ours {};
    ours.sa_sigaction = on_bus;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;  // NODEFER: leaving by siglongjmp then has no signal mask to restore
    return sigaction(SIGBUS, &ours, nullptr) == 0;
}

inline void listen_for_bus(ThreadGuard& guard) noexcept {
    static const bool installed = install_bus_handler();
    sigset_t bus;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &bus, nullptr);  // a fault while it is blocked ends the process whatever handler there is
    guard.listening = installed;
}

// Apart from the frame that calls sigsetjmp, where compilers keep few variables in registers.
template <class F>
__attribute__((noinline)) void run_apart(F& loop) {
    loop();
}

}  // namespace detail

// Runs `loop`, which reads [begin, begin + bytes). False if a page of that could not be read: then `loop` was left in its middle, and
// what it wrote is undefined. `loop` must be plain code: no destructor, no lock, no allocation is undone when it is left.
//
// Costs some nanoseconds: once for a piece, never for a row. May be nested; a fault goes to the innermost guard that holds the
// address. A SIGBUS elsewhere goes to the handler that was there before the first guard ran. The handler is installed once: a program
// that replaces it later without handing on loses the guard.
template <class F>
bool guarded(const void* begin, size_t bytes, F&& loop) noexcept {
    detail::ThreadGuard& guard = detail::thread_guard;
    if (!guard.listening) detail::listen_for_bus(guard);
    detail::GuardedSpan span;
    span.begin = reinterpret_cast<uintptr_t>(begin);
    span.bytes = bytes;
    span.outer = guard.innermost;
    if (sigsetjmp(span.back, 0) != 0) {
        detail::thread_guard.innermost = span.outer;
        return false;
    }
    guard.innermost = &span;
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the handler of this thread must find it from the first read on
    detail::run_apart(loop);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    guard.innermost = span.outer;
    return true;
}

// Memory that may be mapped from a file.
struct MappedBytes {
    const void* begin;
    size_t count;
};

// The same for `loop` that reads several spans, each of which may fail.
template <class F>
bool guarded_all(const MappedBytes* spans, size_t count, F&& loop) noexcept {
    if (count == 0) {
        loop();
        return true;
    }
    bool inner = false;
    const bool outer = guarded(spans->begin, spans->count, [&] { inner = guarded_all<F&>(spans + 1, count - 1, loop); });
    return outer && inner;
}

}  // namespace treadle::kernels
