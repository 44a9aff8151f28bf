// File descriptors that close themselves, and reading and writing whole messages with a bound on the time.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <utility>

#include "ticket.hpp"

namespace treadle::dataplane {

class Descriptor {
public:
    explicit Descriptor(int fd = -1) noexcept : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Descriptor() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const noexcept { return fd_; }
    explicit operator bool() const noexcept { return fd_ >= 0; }

private:
    int fd_;
};

// Wakes a thread that polls. Throws std::system_error when no descriptor is left.
class Wakeup {
public:
    Wakeup() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (!fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    void set() noexcept {
        const uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);  // a counter that is full wakes as well
    }
    void clear() noexcept {
        uint64_t count;
        [[maybe_unused]] const auto got = ::read(fd_.get(), &count, sizeof count);
    }
    int fd() const noexcept { return fd_.get(); }

private:
    Descriptor fd_;
};

// False when the clock reaches `until_ns`.
inline bool poll_until(int fd, short events, int64_t until_ns) noexcept {
    for (;;) {
        const int64_t left = until_ns - now_ns();
        if (left <= 0) return false;
        const timespec time{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
        pollfd polled{fd, events, 0};
        const int ready = ::ppoll(&polled, 1, &time, nullptr);
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return false;
    }
}

// All of it, or false: the peer has gone or the time is over. `fd` is non-blocking.
inline bool read_all(int fd, std::byte* into, uint64_t bytes, int64_t until_ns) noexcept {
    while (bytes > 0) {
        const ssize_t got = ::recv(fd, into, bytes, 0);
        if (got > 0) {
            into += got;
            bytes -= static_cast<uint64_t>(got);
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
            return false;
        } else if (errno == EAGAIN && !poll_until(fd, POLLIN, until_ns)) {
            return false;
        }
    }
    return true;
}

inline bool write_all(int fd, iovec* parts, int count, int64_t until_ns) noexcept {
    while (count > 0) {
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = static_cast<size_t>(count);
        ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN || !poll_until(fd, POLLOUT, until_ns)) return false;
            continue;
        }
        for (; count > 0 && static_cast<size_t>(sent) >= parts->iov_len; ++parts, --count) sent -= static_cast<ssize_t>(parts->iov_len);
        if (count > 0) {
            parts->iov_base = static_cast<std::byte*>(parts->iov_base) + sent;
            parts->iov_len -= static_cast<size_t>(sent);
        }
    }
    return true;
}

}  // namespace treadle::dataplane
