// Who has which bytes of an arena: first fit, freed stretches grow together again. Owns no memory but its own books.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>

namespace treadle::dataplane {

class Arena {
public:
    static constexpr uint64_t ALIGN_BYTES = 64;

    explicit Arena(uint64_t bytes) : bytes_(bytes) { free_[0] = bytes; }

    // Offset of so many bytes, at the lowest place where they fit, so that few pages are ever touched; nothing: no room.
    std::optional<uint64_t> take(uint64_t bytes) {
        if (bytes > bytes_) return std::nullopt;
        bytes = rounded(bytes);
        std::lock_guard lock(mutex_);
        for (auto stretch = free_.begin(); stretch != free_.end(); ++stretch) {
            const auto [at, size] = *stretch;
            if (size < bytes) continue;
            free_.erase(stretch);
            if (size > bytes) free_[at + bytes] = size - bytes;
            taken_ += bytes;
            return at;
        }
        return std::nullopt;
    }

    void give(uint64_t at, uint64_t bytes) {
        bytes = rounded(bytes);
        std::lock_guard lock(mutex_);
        taken_ -= bytes;
        auto next = free_.upper_bound(at);
        if (next != free_.end() && at + bytes == next->first) {
            bytes += next->second;
            next = free_.erase(next);
        }
        if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == at) {
            std::prev(next)->second += bytes;
        } else {
            free_[at] = bytes;
        }
    }

    uint64_t taken_bytes() const {
        std::lock_guard lock(mutex_);
        return taken_;
    }

private:
    static uint64_t rounded(uint64_t bytes) { return bytes == 0 ? ALIGN_BYTES : (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

    const uint64_t bytes_;
    mutable std::mutex mutex_;
    std::map<uint64_t, uint64_t> free_;  // offset -> bytes
    uint64_t taken_ = 0;
};

}  // namespace treadle::dataplane
