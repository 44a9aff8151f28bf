// The ring between a process and the pool of its host: the memory that both sides see, and the messages that pass once.
//
// A client connects to a Unix socket and gets two sealed memfds and a doorbell. Requests and answers lie in slots of the
// first; ids, tokens and rows in the second, the arena. The server believes nothing of either: it copies every field once,
// checks the copy, and works on that.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <utility>

#include "descriptors.hpp"
#include "versions.hpp"

namespace treadle::dataplane::ring {

inline constexpr uint32_t MAGIC = 0x676e7274;       // "trng"
inline constexpr uint32_t PROTOCOL = 2;
inline constexpr int SLOTS = 64;                    // requests in flight of one client: one word of bits names them all
inline constexpr int64_t ROWS_MAX = int64_t{1} << 22;    // of one request
inline constexpr int64_t TOKENS_MAX = int64_t{1} << 16;  // of one request; the server copies them: half a MiB
inline constexpr int64_t LOOKBACK_MAX = 64;         // columns
inline constexpr uint64_t NOWHERE = ~uint64_t{0};   // an offset of something that is not given
inline constexpr int64_t CLOCKS_APART_NS = 10'000'000'000;  // more: the client lives in a time namespace of its own

enum class Kind : uint64_t { gather = 1, lookup = 2 };

// Words of 64 bits, so that either side copies them one by one. Offsets are into the arena.
struct Request {
    uint64_t kind;
    std::array<uint64_t, 4> version;  // its digest
    int64_t layer, deadline_ns;       // CLOCK_MONOTONIC
    int64_t count;                    // ids, or tokens
    uint64_t in_at, out_at;           // i64 [count]; u8 [count * columns, row_bytes]
    int64_t request_count, lookback_columns;
    uint64_t starts_at, lookback_at, dead_at, lookback_dead_at;  // of a lookup, as in WindowsView; NOWHERE: not given
};

struct Answer {
    int64_t fault, rows_done;  // rows [0, rows_done) of `out` are there
    int64_t predicted_finish_ns, retry_after_ns, reason;  // of a refusal
    int64_t started_ns, finished_ns;
};

// A slot is the client's until it says SUBMITTED, the server's until it says ENDED. What the client wants of a request is told by
// flags in the same word: they end with the request, so none is ever taken for the next one of the slot.
enum Phase : uint32_t { FREE = 0, SUBMITTED = 1, ENDED = 3, LOST = 4, PHASES = 7 };
enum Wish : uint32_t {
    AWAITED = 8,    // somebody sleeps on the word
    NOTIFIED = 16,  // say on the socket that it has ended
    STOPPED = 32,   // start no further piece of it
};

struct alignas(64) Slot {
    std::atomic<uint32_t> state;  // a futex: a Phase and, while SUBMITTED, wishes
    Request request;
    Answer answer;
};

struct Ring {
    alignas(64) std::atomic<uint64_t> submitted;  // bit of a slot: there is a request; taken by the server
    alignas(64) std::atomic<uint64_t> stopped;    // bit of a slot: look whether it says STOPPED
    Slot slots[SLOTS];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

struct Hello {
    uint32_t magic, protocol;
    Digest token;          // sha256 of the caller's; zeros: none
    uint64_t arena_bytes;  // wanted; 0: as the server likes
    int64_t now_ns;        // CLOCK_MONOTONIC
};

// With descriptors, in this order, unless there is a fault: ring, arena, doorbell, and the caches of hot rows where there are some.
struct Welcome {
    uint32_t magic, protocol;
    int32_t fault;
    uint32_t descriptors;
    uint64_t arena_bytes;
};
inline constexpr size_t HOT_ROWS_MAX = 8, DESCRIPTORS_MAX = 3 + HOT_ROWS_MAX;

// Afterwards only this, from server to client: a slot that asked for it has ended.
struct Notice {
    uint32_t slot;
};

// One copy of something in shared memory, word by word: the other side may write at any time.
template <typename T>
T copy_in(const T& shared) noexcept {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0 && alignof(T) == 8);
    uint64_t words[sizeof(T) / 8];
    auto* from = reinterpret_cast<uint64_t*>(const_cast<T*>(&shared));
    for (size_t i = 0; i < sizeof(T) / 8; ++i) words[i] = std::atomic_ref<uint64_t>(from[i]).load(std::memory_order_relaxed);
    T copy;
    std::memcpy(&copy, words, sizeof copy);
    return copy;
}

template <typename T>
void copy_out(const T& from, T& shared) noexcept {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0 && alignof(T) == 8);
    uint64_t words[sizeof(T) / 8];
    std::memcpy(words, &from, sizeof from);
    auto* to = reinterpret_cast<uint64_t*>(&shared);
    for (size_t i = 0; i < sizeof(T) / 8; ++i) std::atomic_ref<uint64_t>(to[i]).store(words[i], std::memory_order_relaxed);
}

// Between processes, so never the private kind.
inline void futex_wake(std::atomic<uint32_t>& word) noexcept {
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Returns when woken, when `word` is not `expected`, or at `until_ns` (CLOCK_MONOTONIC), or for no reason at all.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t until_ns) noexcept {
    const timespec until{static_cast<time_t>(until_ns / 1'000'000'000), static_cast<long>(until_ns % 1'000'000'000)};
    ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_BITSET, expected, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

// A shared mapping that unmaps itself.
class Mapping {
public:
    Mapping() = default;
    Mapping(int fd, size_t bytes, int protection) : bytes_(bytes), at_(::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0)) {}
    Mapping(Mapping&& from) noexcept : bytes_(std::exchange(from.bytes_, 0)), at_(std::exchange(from.at_, MAP_FAILED)) {}
    Mapping& operator=(Mapping&& from) noexcept {
        std::swap(bytes_, from.bytes_);
        std::swap(at_, from.at_);
        return *this;
    }
    ~Mapping() {
        if (at_ != MAP_FAILED) ::munmap(at_, bytes_);
    }
    explicit operator bool() const noexcept { return at_ != MAP_FAILED; }
    std::byte* data() const noexcept { return static_cast<std::byte*>(at_); }
    size_t size() const noexcept { return bytes_; }

private:
    size_t bytes_ = 0;
    void* at_ = MAP_FAILED;
};

}  // namespace treadle::dataplane::ring
