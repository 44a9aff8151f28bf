// An owner as a client knows it: where it is, how fast it answers, whether it is worth asking now. Touched inside the reactor only.
#pragma once

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "descriptors.hpp"

namespace treadle::dataplane {

// The slow end of what replies of about one size took lately.
class Latency {
public:
    static constexpr int64_t UNKNOWN_NS = 5'000'000;  // what is assumed of an owner that has never answered

    void took(uint64_t reply_bytes, int64_t ns) noexcept {
        Sizes& sizes = of(reply_bytes);
        sizes.samples[sizes.count++ % SAMPLES] = ns;
    }

    // The 95th percentile for replies of this size; of the next smaller size that is known, else of any.
    int64_t slow_ns(uint64_t reply_bytes) const noexcept {
        const size_t wanted = bucket(reply_bytes);
        for (size_t i = wanted + 1; i-- > 0;)
            if (sizes_[i].count > 0) return quantile(sizes_[i]);
        for (size_t i = wanted + 1; i < SIZES; ++i)
            if (sizes_[i].count > 0) return quantile(sizes_[i]);
        return UNKNOWN_NS;
    }

private:
    static constexpr size_t SAMPLES = 64, SIZES = 40;
    struct Sizes {
        std::array<int64_t, SAMPLES> samples;
        uint64_t count = 0;
    };

    static size_t bucket(uint64_t bytes) noexcept { return std::min<size_t>(SIZES - 1, static_cast<size_t>(std::bit_width(bytes))); }
    Sizes& of(uint64_t bytes) noexcept { return sizes_[bucket(bytes)]; }

    static int64_t quantile(const Sizes& sizes) noexcept {
        std::array<int64_t, SAMPLES> sorted = sizes.samples;
        const size_t count = static_cast<size_t>(std::min<uint64_t>(sizes.count, SAMPLES));
        const size_t place = std::min(count - 1, count * 95 / 100);
        std::nth_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(place), sorted.begin() + static_cast<ptrdiff_t>(count));
        return sorted[place];
    }

    std::array<Sizes, SIZES> sizes_{};
};

struct Connection;

struct Owner {
    static constexpr int64_t BACKOFF_MIN_NS = 5'000'000, BACKOFF_MAX_NS = 250'000'000;  // a restarted owner is found again at once
    static constexpr int STRIKES_MAX = 3;                    // replies overtaken by a replica's, in a row
    static constexpr int64_t SUSPECT_NS = 1'000'000'000;     // then others are asked first for so long

    explicit Owner(std::string address) : address(std::move(address)) {}

    bool usable(int64_t now) const noexcept { return now >= backoff_until_ns && now >= suspect_until_ns; }

    void failed(int64_t now) noexcept {
        backoff_ns = std::clamp(backoff_ns * 2, BACKOFF_MIN_NS, BACKOFF_MAX_NS);
        backoff_until_ns = now + backoff_ns;
    }
    void overtaken(int64_t now) noexcept {
        if (++strikes >= STRIKES_MAX) suspect_until_ns = now + SUSPECT_NS;
    }
    void answered() noexcept {
        strikes = 0;
        backoff_ns = 0;
        suspect_until_ns = 0;
    }

    const std::string address;  // host:port by number, or unix:PATH
    std::vector<std::shared_ptr<Connection>> connections;
    Latency latency;
    std::atomic<int64_t> backoff_until_ns{0}, suspect_until_ns{0};  // also read by threads that split a call
    int64_t backoff_ns = 0;
    int strikes = 0;
};

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    // False for what is no address; names are resolved by the caller, so that no native thread waits for a name server.
    bool parse(const std::string& text) {
        if (text.rfind("unix:", 0) == 0) {
            auto* place = reinterpret_cast<sockaddr_un*>(&storage);
            const std::string path = text.substr(5);
            if (path.empty() || path.size() >= sizeof place->sun_path) return false;
            place->sun_family = AF_UNIX;
            std::memcpy(place->sun_path, path.c_str(), path.size() + 1);
            length = sizeof(sockaddr_un);
            return true;
        }
        const size_t colon = text.rfind(':');
        if (colon == std::string::npos) return false;
        std::string host = text.substr(0, colon);
        if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
        addrinfo hints{}, *found = nullptr;
        hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
        hints.ai_socktype = SOCK_STREAM;
        if (::getaddrinfo(host.c_str(), text.c_str() + colon + 1, &hints, &found) != 0) return false;
        std::memcpy(&storage, found->ai_addr, found->ai_addrlen);
        length = found->ai_addrlen;
        ::freeaddrinfo(found);
        return true;
    }

    // A connection on its way; nothing where it fails at once. What a peer has not acknowledged for `dead_ms` ends it.
    Descriptor connect(unsigned dead_ms) const noexcept {
        Descriptor fd(::socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (!fd) return fd;
        const int on = 1;
        if (storage.ss_family != AF_UNIX) {
            ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            ::setsockopt(fd.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &dead_ms, sizeof dead_ms);
        }
        if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&storage), length) != 0 && errno != EINPROGRESS) return Descriptor();
        return fd;
    }
};

}  // namespace treadle::dataplane
