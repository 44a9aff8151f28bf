// The pool's side of the ring: one thread that greets clients, hears their doorbells, and works on pieces while it is awake.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "ring_session.hpp"

namespace treadle::dataplane::ring {

struct Limits {
    int clients_max = 64;
    size_t arena_bytes_max = 64u << 20;   // of one client; pages are taken as they are touched
    std::vector<uint32_t> users;          // who may come beside our own user and root, where no tokens are asked for
};

inline constexpr int GREETED_MAX = 16;  // connections beside the clients, while they are greeted or told that there is no place
inline constexpr int64_t HELLO_NS_MAX = 2'000'000'000;  // how long a client may be connected without a word
inline constexpr int EVENTS_MAX = 64;

class Server {
public:
    // `path` is bound, the thread runs. `queue` outlives it; where its tenants have tokens, one is asked for, whoever comes.
    // Throws std::system_error.
    Server(Queue& queue, std::shared_ptr<const Versions> versions, int64_t piece_rows, const std::string& path, Limits limits)
        : queue_(queue),
          versions_(std::move(versions)),
          piece_rows_(piece_rows),
          path_(path),
          limits_(std::move(limits)),
          listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
          stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
          events_(::epoll_create1(EPOLL_CLOEXEC)) {
        check(listener_.get() >= 0 && stop_.get() >= 0 && events_.get() >= 0, "ring");
        bind_and_listen();
        check(watch(listener_.get(), LISTENER, EPOLLIN) && watch(stop_.get(), STOP, EPOLLIN), "epoll_ctl");
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that run Python
        try {
            thread_ = std::thread([this] { run(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;
    ~Server() { close(); }

    // Stops what clients have in flight, waits for its pieces, then hangs up. Before the queue is closed, or after: both end.
    void close() {
        if (!thread_.joinable()) return;
        const uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
        thread_.join();
        ::unlink(path_.c_str());
    }

    // Clients that come from now on may map this cache, read-only. False: HOT_ROWS_MAX are known, or there is no descriptor left.
    bool add_hot_rows(int fd) {
        std::lock_guard lock(hot_rows_mutex_);
        if (hot_rows_.size() >= HOT_ROWS_MAX) return false;
        hot_rows_.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
        if (hot_rows_.back().get() >= 0) return true;
        hot_rows_.pop_back();
        return false;
    }

    const Tally& tally() const noexcept { return tally_; }
    int clients() const noexcept { return clients_.load(std::memory_order_relaxed); }

private:
    enum : uint64_t { LISTENER = 0, STOP = 1, FIRST = 2 };  // keys of epoll; a client has two: its socket and, plus one, its doorbell

    // Connected; a session once it has said hello.
    struct Guest {
        Descriptor socket;
        int64_t since_ns;
        std::shared_ptr<Session> session;
    };

    static void check(bool good, const char* what) {
        if (!good) throw std::system_error(errno, std::generic_category(), what);
    }

    bool watch(int fd, uint64_t key, uint32_t what) const noexcept {
        epoll_event event{};
        event.events = what;
        event.data.u64 = key;
        return ::epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
    }

    void bind_and_listen() {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        if (path_.size() >= sizeof address.sun_path) errno = ENAMETOOLONG;
        check(path_.size() < sizeof address.sun_path, "ring path");
        std::memcpy(address.sun_path, path_.data(), path_.size());
        const auto* name = reinterpret_cast<const sockaddr*>(&address);
        if (::bind(listener_.get(), name, sizeof address) != 0) {
            check(errno == EADDRINUSE, "bind");
            const Descriptor caller(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
            const bool dead = ::connect(caller.get(), name, sizeof address) != 0 && errno == ECONNREFUSED;
            if (!dead) errno = EADDRINUSE;
            check(dead, "another server listens there");
            ::unlink(path_.c_str());  // left behind by a process that was killed
            check(::bind(listener_.get(), name, sizeof address) == 0, "bind");
        }
        // The path lets everybody in who may come at all: who that is, the kernel's credentials and the token say.
        const bool others = !limits_.users.empty() || asks_for_tokens();
        check(::chmod(path_.c_str(), others ? 0666 : 0600) == 0 && ::listen(listener_.get(), SOMAXCONN) == 0, "listen");
    }

    void run() noexcept {
        pthread_setname_np(pthread_self(), "treadle-ring");
        epoll_event events[EVENTS_MAX];
        bool stopping = false, worked = false;
        while (!stopping) {
            const int count = ::epoll_wait(events_.get(), events, EVENTS_MAX, worked ? 0 : greeting_timeout_ms());
            for (int i = 0; i < count; ++i) {
                const uint64_t key = events[i].data.u64;
                if (key == STOP) {
                    stopping = true;
                } else if (key == LISTENER) {
                    welcome_all();
                } else {
                    hear(key, events[i].events);
                }
            }
            drop_the_silent();
            worked = work();
        }
        leave();
    }

    // One piece, if there is one in memory: a wake-up of another thread would take as long as a small request itself.
    bool work() noexcept {
        const auto claim = queue_.try_claim(Tier::memory);
        if (!claim) return false;
        const int64_t start = now_ns();
        const Fault fault = claim->ticket->run(claim->first, claim->last);
        queue_.finish(*claim, now_ns() - start, fault);
        return true;
    }

    int greeting_timeout_ms() const noexcept {
        return silent_ > 0 ? static_cast<int>(HELLO_NS_MAX / 1'000'000) : -1;
    }

    void welcome_all() noexcept {
        while (true) {
            Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
            if (socket.get() < 0) return;
            if (silent_ >= GREETED_MAX) continue;
            const uint64_t key = next_key_;
            next_key_ += 2;
            if (!watch(socket.get(), key, EPOLLIN | EPOLLRDHUP)) continue;
            try {
                guests_.emplace(key, Guest{std::move(socket), now_ns(), nullptr});
                ++silent_;
            } catch (const std::bad_alloc&) {
            }
        }
    }

    void hear(uint64_t key, uint32_t what) noexcept {
        const bool bell = key % 2 == 1;
        const auto found = guests_.find(key - (bell ? 1 : 0));
        if (found == guests_.end()) return;
        bool stays = false;
        try {
            Guest& guest = found->second;
            if (bell) {
                stays = guest.session->take(queue_, *versions_, piece_rows_);
            } else if ((what & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0 && guest.session == nullptr) {
                stays = greet(found->first, guest);  // a session has nothing more to say: whatever comes ends it
            }
        } catch (...) {  // no memory for this request: its client loses its connection, nobody else anything
        }
        if (!stays) drop(found);
    }

    bool greet(uint64_t key, Guest& guest) {
        Hello hello;
        if (::recv(guest.socket.get(), &hello, sizeof hello, MSG_DONTWAIT) != sizeof hello || hello.magic != MAGIC) return false;
        int32_t tenant = 0;
        Fault fault = hello.protocol == PROTOCOL ? admit(guest.socket.get(), hello, tenant) : Fault::mismatch;
        const size_t bytes = hello.arena_bytes == 0 ? limits_.arena_bytes_max : hello.arena_bytes;
        if (fault == Fault::none && clients() >= limits_.clients_max) {
            send_welcome(guest.socket.get(), Fault::refused, 0, {});
            return false;
        }
        if (fault == Fault::none && (bytes > limits_.arena_bytes_max || bytes % 4096 != 0)) fault = Fault::refused;
        if (fault != Fault::none) {
            send_welcome(guest.socket.get(), fault, limits_.arena_bytes_max, {});
            return false;
        }
        const int socket = guest.socket.get();
        guest.session = std::make_shared<Session>(Descriptor(::fcntl(socket, F_DUPFD_CLOEXEC, 0)), tenant, bytes, tally_);
        if (!watch(guest.session->doorbell.get(), key + 1, EPOLLIN | EPOLLET)) return false;
        --silent_;
        clients_.fetch_add(1, std::memory_order_relaxed);
        std::vector<int> handed{guest.session->ring_memory.get(), guest.session->arena_memory.get(), guest.session->doorbell.get()};
        std::lock_guard lock(hot_rows_mutex_);
        for (const Descriptor& cache : hot_rows_) handed.push_back(cache.get());
        return send_welcome(socket, Fault::none, bytes, handed);
    }

    Fault admit(int socket, const Hello& hello, int32_t& tenant) const noexcept {
        ucred caller{};
        socklen_t size = sizeof caller;
        if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &caller, &size) != 0) return Fault::forbidden;
        if (std::abs(hello.now_ns - now_ns()) > CLOCKS_APART_NS) return Fault::invalid;
        tenant = queue_.tenants().find(hello.token);
        if (tenant < 0) return Fault::forbidden;
        if (asks_for_tokens()) return Fault::none;
        const bool known = caller.uid == ::geteuid() || caller.uid == 0 ||
                           std::find(limits_.users.begin(), limits_.users.end(), caller.uid) != limits_.users.end();
        return known ? Fault::none : Fault::forbidden;
    }

    // No token hashes to zeros.
    bool asks_for_tokens() const noexcept { return queue_.tenants().find(Digest{}) < 0; }

    static bool send_welcome(int socket, Fault fault, size_t arena_bytes, const std::vector<int>& descriptors) noexcept {
        Welcome welcome{MAGIC, PROTOCOL, static_cast<int32_t>(fault), static_cast<uint32_t>(descriptors.size()), arena_bytes};
        iovec part{&welcome, sizeof welcome};
        alignas(cmsghdr) char control[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))] = {};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        if (!descriptors.empty()) {
            message.msg_control = control;
            message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
            cmsghdr* header = CMSG_FIRSTHDR(&message);
            header->cmsg_level = SOL_SOCKET;
            header->cmsg_type = SCM_RIGHTS;
            header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
            std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
        }
        return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof welcome);
    }

    void drop_the_silent() noexcept {
        if (silent_ == 0) return;
        const int64_t since = now_ns() - HELLO_NS_MAX;
        for (auto guest = guests_.begin(); guest != guests_.end();) {
            const auto next = std::next(guest);
            if (guest->second.session == nullptr && guest->second.since_ns < since) drop(guest);
            guest = next;
        }
    }

    using Guests = std::map<uint64_t, Guest>;

    // Its memory goes with the last ticket that writes to it.
    void drop(Guests::iterator guest) noexcept {
        if (const auto session = guest->second.session) {
            clients_.fetch_sub(1, std::memory_order_relaxed);
            ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, session->doorbell.get(), nullptr);  // the client has copies: closing ours is not enough
            session->stop_all(queue_);
            ::shutdown(session->socket(), SHUT_RDWR);
        } else {
            --silent_;
        }
        ::epoll_ctl(events_.get(), EPOLL_CTL_DEL, guest->second.socket.get(), nullptr);
        guests_.erase(guest);
    }

    // Hangs up only when nothing is written to a client's arena any more.
    void leave() noexcept {
        for (auto& [key, guest] : guests_)
            if (guest.session) guest.session->stop_all(queue_);
        for (auto& [key, guest] : guests_)
            while (guest.session && !guest.session->idle())
                if (!work()) std::this_thread::sleep_for(std::chrono::microseconds(50));
        while (!guests_.empty()) drop(guests_.begin());
    }

    Queue& queue_;
    const std::shared_ptr<const Versions> versions_;
    const int64_t piece_rows_;
    const std::string path_;
    const Limits limits_;
    const Descriptor listener_, stop_, events_;
    std::mutex hot_rows_mutex_;
    std::vector<Descriptor> hot_rows_;
    Tally tally_;
    std::atomic<int> clients_{0};
    // Of the thread alone.
    Guests guests_;
    int silent_ = 0;
    uint64_t next_key_ = FIRST;
    std::thread thread_;
};

}  // namespace treadle::dataplane::ring
