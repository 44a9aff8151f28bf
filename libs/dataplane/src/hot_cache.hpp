// The hot rows of a host: a set-associative cache in shared memory that one process writes and any number read.
//
// A set is one line of keys with a sequence number, and its rows behind it. The number is odd while the set is written. A
// reader copies a row word by word and looks at the number again: if it is another, the copy may be torn and counts as a miss.
// So nobody waits for anybody, and a writer that dies half way leaves one set that only misses. Which row goes is CLOCK's choice.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>

#include "treadle/kernels/gather.hpp"
#include "versions.hpp"

namespace treadle::dataplane::hot {

inline constexpr uint64_t MAGIC = 0x31776f72746f6874;  // "thotrow1"
inline constexpr int WAYS = 7;                          // with the sequence number one cache line of keys
inline constexpr int TABLES_MAX = 256;                  // tables with rows in a cache at once
inline constexpr int64_t ROW_BITS = 40;                 // of a key; the rest is the tag of its table
inline constexpr uint32_t TAG_MAX = (1u << 24) - 1;     // given out once each

struct Set {
    std::atomic<uint32_t> sequence;
    std::atomic<uint8_t> used, hand;  // the writer's: bits of ways read since the hand came by; where the hand is
    uint16_t unused;
    std::atomic<uint64_t> keys[WAYS];  // 0: empty
};
static_assert(sizeof(Set) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// Which tag the rows of a table have. Tags are never given out twice, so that a slot may be used again.
struct Entry {
    std::atomic<uint64_t> digest[4], layer, tag;  // tag 0: free
    uint64_t unused[2];
};

struct Header {
    uint64_t magic, row_bytes, sets, bytes;
    Entry tables[TABLES_MAX];
};

inline constexpr size_t HEADER_BYTES = 20480;
static_assert(sizeof(Header) <= HEADER_BYTES && HEADER_BYTES % 4096 == 0);

// A table in the cache: valid as long as its slot still has the tag. tag 0: none.
struct Table {
    int slot = 0;
    uint64_t tag = 0;
};

// What readers and the writer do alike.
class View {
public:
    View() = default;
    View(std::byte* memory, int64_t row_bytes, uint64_t sets)
        : memory_(memory), row_bytes_(row_bytes), words_(row_bytes / 8), set_bytes_(set_bytes(row_bytes)), sets_(sets) {}

    static uint64_t set_bytes(int64_t row_bytes) { return (sizeof(Set) + WAYS * static_cast<uint64_t>((row_bytes + 7) / 8 * 8) + 63) / 64 * 64; }

    int64_t row_bytes() const noexcept { return row_bytes_; }
    uint64_t sets() const noexcept { return sets_; }
    Header& header() const noexcept { return *reinterpret_cast<Header*>(memory_); }

    Table find(const Digest& version, int64_t layer) const noexcept {
        uint64_t words[4];
        std::memcpy(words, version.data(), sizeof words);
        for (int slot = 0; slot < TABLES_MAX; ++slot) {
            const Entry& entry = header().tables[slot];
            const uint64_t tag = entry.tag.load(std::memory_order_acquire);
            if (tag == 0 || entry.layer.load(std::memory_order_acquire) != static_cast<uint64_t>(layer)) continue;
            bool same = true;
            for (int i = 0; i < 4; ++i) same &= entry.digest[i].load(std::memory_order_acquire) == words[i];
            if (same && entry.tag.load(std::memory_order_relaxed) == tag) return {slot, tag};
        }
        return {};
    }

    bool serves(Table table) const noexcept {
        return table.tag != 0 && header().tables[table.slot].tag.load(std::memory_order_acquire) == table.tag;
    }

    // Copies the rows that are here into out[i]; misses[k]: the places i of the others, whose `out` is then anything.
    // `mark`: by the writer, for CLOCK. Returns how many missed.
    int64_t probe(Table table, const int64_t* rows, int64_t count, std::byte* out, int64_t* misses, bool mark) const noexcept {
        if (!serves(table)) {
            for (int64_t i = 0; i < count; ++i) misses[i] = i;
            return count;
        }
        int64_t missed = 0;
        Place places[HEADS_AHEAD];  // a ring: heads are on their way, then looked at and their rows on the way, then copied
        for (int64_t i = 0; i < std::min(count, HEADS_AHEAD); ++i) places[i] = place_of(table.tag, rows[i]);
        for (int64_t i = 0; i < std::min(count, ROWS_AHEAD); ++i) look(places[i]);
        for (int64_t i = 0; i < count; ++i) {
            if (const int64_t next = i + ROWS_AHEAD; next < count) look(places[next % HEADS_AHEAD]);
            Place& place = places[i % HEADS_AHEAD];
            if (!copy(place, out + i * row_bytes_)) {
                misses[missed++] = i;
            } else if (mark) {
                mark_used(place);
            }
            if (const int64_t next = i + HEADS_AHEAD; next < count) place = place_of(table.tag, rows[next]);
        }
        return missed;
    }

protected:
    static constexpr int64_t HEADS_AHEAD = 16, ROWS_AHEAD = 6;

    struct Place {
        Set* set;
        uint64_t key;
        uint32_t sequence;
        int way;  // -1: not there
    };

    Place place_of(uint64_t tag, int64_t row) const noexcept {
        const uint64_t key = tag << ROW_BITS | static_cast<uint64_t>(row);
        Set* set = set_of(key);
        __builtin_prefetch(set);
        return {set, key, 0, -1};
    }

    Set* set_of(uint64_t key) const noexcept {
        uint64_t mixed = key * 0x9E3779B97F4A7C15;
        mixed = (mixed ^ mixed >> 32) * 0xBF58476D1CE4E5B9;
        mixed ^= mixed >> 29;
        return set_at(static_cast<uint64_t>(static_cast<unsigned __int128>(mixed) * sets_ >> 64));
    }

    Set* set_at(uint64_t number) const noexcept { return reinterpret_cast<Set*>(memory_ + HEADER_BYTES + number * set_bytes_); }

    std::byte* row_at(Set* set, int way) const noexcept {
        return reinterpret_cast<std::byte*>(set) + sizeof(Set) + static_cast<uint64_t>(way) * static_cast<uint64_t>((row_bytes_ + 7) / 8 * 8);
    }

    // The number must be read before the keys: the keys are read with acquire, so neither passes the other.
    void look(Place& place) const noexcept {
        place.sequence = place.set->sequence.load(std::memory_order_acquire);
        place.way = -1;
        for (int way = 0; way < WAYS; ++way)
            if (place.set->keys[way].load(std::memory_order_acquire) == place.key) place.way = way;
        if (place.way >= 0) kernels::detail::prefetch_row(row_at(place.set, place.way), row_bytes_);
    }

    // Every word is read with acquire and was written with release, after the number had become odd: who has read a word of
    // a later row reads a later number below.
    bool copy(const Place& place, std::byte* out) const noexcept {
        if (place.way < 0 || place.sequence % 2 != 0) return false;
        const auto* from = reinterpret_cast<const std::atomic<uint64_t>*>(row_at(place.set, place.way));
        for (int64_t i = 0; i < words_; ++i) {
            const uint64_t word = from[i].load(std::memory_order_acquire);
            std::memcpy(out + 8 * i, &word, 8);
        }
        if (row_bytes_ % 8 != 0) {
            const uint64_t word = from[words_].load(std::memory_order_acquire);
            std::memcpy(out + 8 * words_, &word, static_cast<size_t>(row_bytes_ % 8));
        }
        return place.set->sequence.load(std::memory_order_relaxed) == place.sequence;
    }

    static void mark_used(const Place& place) noexcept {
        const auto bit = static_cast<uint8_t>(1u << place.way);
        if ((place.set->used.load(std::memory_order_relaxed) & bit) == 0) place.set->used.fetch_or(bit, std::memory_order_relaxed);
    }

    std::byte* memory_ = nullptr;
    int64_t row_bytes_ = 0, words_ = 0;
    uint64_t set_bytes_ = 0, sets_ = 0;
};

struct Totals {
    std::atomic<uint64_t> hits{0}, misses{0}, inserted{0}, evicted{0};
};

// The one writer. Called from many threads of its process.
class Cache : public View {
public:
    // At most `bytes` of shared memory, taken as it is touched. Throws std::system_error.
    Cache(int64_t row_bytes, uint64_t bytes) {
        const uint64_t sets = bytes > HEADER_BYTES ? (bytes - HEADER_BYTES) / set_bytes(row_bytes) : 0;
        if (sets == 0) throw std::system_error(EINVAL, std::generic_category(), "hot rows: less than one set");
        bytes_ = HEADER_BYTES + sets * set_bytes(row_bytes);
        fd_ = ::memfd_create("treadle-hot-rows", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        void* memory = MAP_FAILED;
        if (fd_ >= 0 && ::ftruncate(fd_, static_cast<off_t>(bytes_)) == 0) memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
        // Whoever is handed the descriptor can neither resize the memory nor map it for writing.
        if (memory == MAP_FAILED || ::fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
            const int failed = errno;
            if (memory != MAP_FAILED) ::munmap(memory, bytes_);
            if (fd_ >= 0) ::close(fd_);
            throw std::system_error(failed, std::generic_category(), "hot rows");
        }
        ::madvise(memory, bytes_, MADV_HUGEPAGE);  // where shmem_enabled is `advise`
        static_cast<View&>(*this) = View(static_cast<std::byte*>(memory), row_bytes, sets);
        header().row_bytes = static_cast<uint64_t>(row_bytes);
        header().sets = sets;
        header().bytes = bytes_;
        header().magic = MAGIC;
    }
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;
    ~Cache() {
        ::munmap(memory_, bytes_);
        ::close(fd_);
    }

    int fd() const noexcept { return fd_; }
    uint64_t bytes() const noexcept { return bytes_; }
    const Totals& totals() const noexcept { return totals_; }

    // From now on the rows of this table may be here. Tag 0: TABLES_MAX tables are here, or all tags were given out.
    Table enter(const Digest& version, int64_t layer) noexcept {
        std::lock_guard lock(tables_mutex_);
        if (const Table known = find(version, layer); known.tag != 0) return known;
        for (int slot = 0; slot < TABLES_MAX && next_tag_ <= TAG_MAX; ++slot) {
            Entry& entry = header().tables[slot];
            if (entry.tag.load(std::memory_order_relaxed) != 0) continue;
            uint64_t words[4];
            std::memcpy(words, version.data(), sizeof words);
            for (int i = 0; i < 4; ++i) entry.digest[i].store(words[i], std::memory_order_release);
            entry.layer.store(static_cast<uint64_t>(layer), std::memory_order_release);
            entry.tag.store(next_tag_, std::memory_order_release);
            return {slot, next_tag_++};
        }
        return {};
    }

    // No row of this table is found from now on; their places are free.
    void retire(Table table) noexcept {
        {
            std::lock_guard lock(tables_mutex_);
            if (!serves(table)) return;
            header().tables[table.slot].tag.store(0, std::memory_order_release);
        }
        for (uint64_t number = 0; number < sets_; ++number) {
            Set* set = set_at(number);
            for (int way = 0; way < WAYS; ++way) {
                if (set->keys[way].load(std::memory_order_relaxed) >> ROW_BITS != table.tag) continue;
                uint32_t sequence;
                while (!lock_set(set, sequence)) {
                }
                if (set->keys[way].load(std::memory_order_relaxed) >> ROW_BITS == table.tag) set->keys[way].store(0, std::memory_order_release);
                set->sequence.store(sequence + 2, std::memory_order_release);
            }
        }
    }

    int64_t probe_and_mark(Table table, const int64_t* rows, int64_t count, std::byte* out, int64_t* misses) noexcept {
        const int64_t missed = probe(table, rows, count, out, misses, true);
        totals_.hits.fetch_add(static_cast<uint64_t>(count - missed), std::memory_order_relaxed);
        totals_.misses.fetch_add(static_cast<uint64_t>(missed), std::memory_order_relaxed);
        return missed;
    }

    // Left out where another thread is at the set: the next miss brings the row again.
    void insert(Table table, int64_t row, const std::byte* bytes) noexcept {
        if (!serves(table)) return;
        const Place place = place_of(table.tag, row);
        uint32_t sequence;
        if (!lock_set(place.set, sequence)) return;
        if (const int way = way_for(*place.set, place.key); way >= 0) {
            place.set->keys[way].store(place.key, std::memory_order_release);
            auto* to = reinterpret_cast<std::atomic<uint64_t>*>(row_at(place.set, way));
            for (int64_t i = 0; 8 * i < row_bytes_; ++i) {
                uint64_t word = 0;
                std::memcpy(&word, bytes + 8 * i, static_cast<size_t>(std::min<int64_t>(8, row_bytes_ - 8 * i)));
                to[i].store(word, std::memory_order_release);
            }
            totals_.inserted.fetch_add(1, std::memory_order_relaxed);
        }
        place.set->sequence.store(sequence + 2, std::memory_order_release);
    }

private:
    // Makes the number odd; `sequence`: what it was. The writes that follow are releases, so none of them is seen before it.
    static bool lock_set(Set* set, uint32_t& sequence) noexcept {
        sequence = set->sequence.load(std::memory_order_relaxed);
        return sequence % 2 == 0 && set->sequence.compare_exchange_strong(sequence, sequence + 1, std::memory_order_acq_rel);
    }

    // Where a key goes: an empty place, or the first that was not read since the hand came by. -1: it is there already.
    int way_for(Set& set, uint64_t key) noexcept {
        int empty = -1;
        for (int way = 0; way < WAYS; ++way) {
            const uint64_t there = set.keys[way].load(std::memory_order_relaxed);
            if (there == key) return -1;
            if (there == 0) empty = way;
        }
        if (empty >= 0) return empty;
        int hand = set.hand.load(std::memory_order_relaxed);
        for (int step = 0; step < WAYS; ++step, hand = (hand + 1) % WAYS) {
            const auto bit = static_cast<uint8_t>(1u << hand);
            if ((set.used.fetch_and(static_cast<uint8_t>(~bit), std::memory_order_relaxed) & bit) == 0) break;
        }
        set.hand.store(static_cast<uint8_t>((hand + 1) % WAYS), std::memory_order_relaxed);
        totals_.evicted.fetch_add(1, std::memory_order_relaxed);
        return hand;
    }

    int fd_ = -1;
    uint64_t bytes_ = 0;
    std::mutex tables_mutex_;
    uint64_t next_tag_ = 1;
    Totals totals_;
};

// Another process's cache, mapped read-only.
class Reader : public View {
public:
    // Throws std::system_error; EBADMSG for memory that is no cache of such rows.
    explicit Reader(int fd) {
        const off_t size = ::lseek(fd, 0, SEEK_END);
        if (size < static_cast<off_t>(HEADER_BYTES)) throw std::system_error(EBADMSG, std::generic_category(), "hot rows");
        bytes_ = static_cast<size_t>(size);
        void* memory = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd, 0);
        if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "hot rows");
        const auto* header = static_cast<const Header*>(memory);
        const uint64_t row_bytes = header->row_bytes, sets = header->sets;
        const bool fits = header->magic == MAGIC && row_bytes > 0 && row_bytes <= (1u << 20) && sets > 0 &&
                          sets <= (bytes_ - HEADER_BYTES) / set_bytes(static_cast<int64_t>(row_bytes));
        if (!fits) {
            ::munmap(memory, bytes_);
            throw std::system_error(EBADMSG, std::generic_category(), "hot rows");
        }
        ::madvise(memory, bytes_, MADV_HUGEPAGE);
        static_cast<View&>(*this) = View(static_cast<std::byte*>(memory), static_cast<int64_t>(row_bytes), sets);
    }
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    ~Reader() { ::munmap(memory_, bytes_); }

private:
    size_t bytes_ = 0;
};

}  // namespace treadle::dataplane::hot
