// A process's side of the ring: buffers of the arena, requests in slots, and a thread that hears when the pool has gone.
#pragma once

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "ring.hpp"
#include "ticket.hpp"

namespace treadle::dataplane::ring {

// The server said no, or its answer is none of ours.
struct Refused {
    Fault fault;
    uint64_t arena_bytes_max;
};

class Client : public std::enable_shared_from_this<Client> {
public:
    // Bytes of the arena; given back when the last one who holds it lets go.
    struct Block {
        Block(std::shared_ptr<Client> client, uint64_t at, uint64_t bytes) : client(std::move(client)), at(at), bytes(bytes) {}
        Block(const Block&) = delete;
        Block& operator=(const Block&) = delete;
        ~Block() { client->arena_.give(at, bytes); }

        std::byte* data() const noexcept { return client->memory_.data() + at; }

        const std::shared_ptr<Client> client;
        const uint64_t at, bytes;
    };
    using BlockRef = std::shared_ptr<Block>;

    // Throws std::system_error when nobody answers there until `until_ns`, Refused when the pool says no.
    Client(const std::string& path, const Digest& token, uint64_t arena_bytes, int64_t until_ns) : Client(greet(path, token, arena_bytes, until_ns)) {}

    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    ~Client() { close(); }

    // Requests in flight are lost. Blocks stay readable for who holds them.
    void close() noexcept {
        ::shutdown(socket_.get(), SHUT_RDWR);
        {
            std::lock_guard lock(closing_);
            if (listener_.joinable()) listener_.join();
        }
        std::vector<Orphan> gone;
        std::lock_guard lock(orphans_mutex_);
        gone.swap(orphans_);
    }

    bool lost() const noexcept { return lost_.load(std::memory_order_acquire); }
    uint64_t arena_bytes() const noexcept { return memory_.size(); }
    uint64_t arena_taken_bytes() const noexcept { return arena_.taken_bytes(); }
    const std::vector<Descriptor>& hot_rows() const noexcept { return hot_rows_; }

    // Null: no room in the arena.
    BlockRef take(uint64_t bytes) {
        reclaim();
        const auto at = arena_.take(bytes);
        return at ? std::make_shared<Block>(shared_from_this(), *at, bytes) : nullptr;
    }

    // A block that its holder may name by address in `block_of`.
    BlockRef take_named(uint64_t bytes) {
        BlockRef block = take(bytes);
        if (block == nullptr) return nullptr;
        std::lock_guard lock(named_mutex_);
        std::erase_if(named_, [](const auto& entry) { return entry.second.expired(); });
        named_[block->at] = block;
        return block;
    }

    // The named block that holds these bytes, or null.
    BlockRef block_of(const std::byte* data, uint64_t bytes) {
        if (data < memory_.data() || data >= memory_.data() + memory_.size()) return nullptr;
        const uint64_t at = offset(data);
        std::lock_guard lock(named_mutex_);
        const auto after = named_.upper_bound(at);
        const BlockRef block = after == named_.begin() ? nullptr : std::prev(after)->second.lock();
        return block && at + bytes <= block->at + block->bytes ? block : nullptr;
    }

    uint64_t offset(const std::byte* data) const noexcept { return static_cast<uint64_t>(data - memory_.data()); }

    // A request that nobody waits for any more: its slot and blocks are free again once it has ended.
    void abandon(int slot, BlockRef in, BlockRef out) {
        stop(slot);
        std::lock_guard lock(orphans_mutex_);
        orphans_.push_back({slot, std::move(in), std::move(out)});
    }

    // A free slot, or -1: SLOTS requests are in flight.
    int take_slot() {
        reclaim();
        uint64_t free = free_.load(std::memory_order_relaxed);
        while (free != 0) {
            const int slot = std::countr_zero(free);
            if (free_.compare_exchange_weak(free, free & ~(uint64_t{1} << slot), std::memory_order_acquire)) return slot;
        }
        return -1;
    }

    // Only one whose request has ended, or was never rung for.
    void give_slot(int slot) noexcept {
        ring().slots[slot].state.store(FREE, std::memory_order_relaxed);
        free_.fetch_or(uint64_t{1} << slot, std::memory_order_release);
    }

    void put(int slot, const Request& request) noexcept {
        copy_out(request, ring().slots[slot].request);
        ring().slots[slot].state.store(SUBMITTED, std::memory_order_relaxed);
    }

    // Shows the server these slots, with one wake-up for all.
    void submit(uint64_t slots) noexcept {
        ring().submitted.fetch_or(slots);
        ring_doorbell();
        if (lost()) fail(slots);  // the listener may have come by before they were there
    }

    void stop(int slot) noexcept {
        if (wish(slot, STOPPED) != SUBMITTED) return;
        ring().stopped.fetch_or(uint64_t{1} << slot);
        ring_doorbell();
    }

    // ENDED, LOST, or something else at `until_ns`.
    uint32_t wait(int slot, int64_t until_ns) noexcept {
        std::atomic<uint32_t>& state = ring().slots[slot].state;
        while (true) {
            const uint32_t phase = wish(slot, AWAITED);
            if (phase != SUBMITTED || now_ns() >= until_ns) return phase;
            if (const uint32_t word = state.load(); (word & PHASES) == SUBMITTED) futex_wait(state, word, until_ns);
        }
    }

    uint32_t state(int slot) const noexcept { return ring().slots[slot].state.load(std::memory_order_acquire) & PHASES; }
    Answer answer(int slot) const noexcept { return copy_in(ring().slots[slot].answer); }

    // `event_fd` is written to when the slot has ended, now or later; until the slot is given back.
    void notify(int slot, int event_fd) noexcept {
        {
            std::lock_guard lock(event_fds_mutex_);
            event_fds_[slot] = event_fd;
        }
        if (wish(slot, NOTIFIED) != SUBMITTED) signal(slot);
    }

    // From now on nobody writes to the descriptor.
    void forget_notify(int slot) noexcept {
        std::lock_guard lock(event_fds_mutex_);
        event_fds_[slot] = -1;
    }

private:
    struct Orphan {
        int slot;
        BlockRef in, out;
    };

    struct Greeted {
        Descriptor socket;
        Welcome welcome;
        std::vector<Descriptor> descriptors;
    };

    explicit Client(Greeted greeted)
        : socket_(std::move(greeted.socket)),
          doorbell_(std::move(greeted.descriptors.at(2))),
          shared_(greeted.descriptors[0].get(), sizeof(Ring), PROT_READ | PROT_WRITE),
          memory_(greeted.descriptors[1].get(), greeted.welcome.arena_bytes, PROT_READ | PROT_WRITE),
          arena_(greeted.welcome.arena_bytes) {
        for (size_t i = 3; i < greeted.descriptors.size(); ++i) hot_rows_.push_back(std::move(greeted.descriptors[i]));
        if (!shared_ || !memory_) throw std::system_error(errno, std::generic_category(), "ring: mmap");
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that run Python
        try {
            listener_ = std::thread([this] { listen(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    static Greeted greet(const std::string& path, const Digest& token, uint64_t arena_bytes, int64_t until_ns) {
        Greeted greeted;
        greeted.socket = Descriptor(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        if (path.size() >= sizeof address.sun_path) throw std::system_error(ENAMETOOLONG, std::generic_category(), path);
        std::memcpy(address.sun_path, path.data(), path.size());
        const Hello hello{MAGIC, PROTOCOL, token, arena_bytes, now_ns()};
        if (greeted.socket.get() < 0 || ::connect(greeted.socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
            ::send(greeted.socket.get(), &hello, sizeof hello, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello))
            throw std::system_error(errno, std::generic_category(), path);
        await(greeted.socket.get(), until_ns, path);
        receive(greeted, path);
        if (greeted.welcome.fault != 0) throw Refused{static_cast<Fault>(greeted.welcome.fault), greeted.welcome.arena_bytes};
        if (greeted.descriptors.size() < 3) throw Refused{Fault::mismatch, 0};
        return greeted;
    }

    static void await(int socket, int64_t until_ns, const std::string& path) {
        pollfd poll{socket, POLLIN, 0};
        while (true) {
            const int64_t left_ms = (until_ns - now_ns()) / 1'000'000;
            const int ready = ::poll(&poll, 1, static_cast<int>(std::clamp<int64_t>(left_ms, 0, INT_MAX)));
            if (ready > 0) return;
            if (ready < 0 && errno == EINTR) continue;
            throw std::system_error(ready == 0 ? ETIMEDOUT : errno, std::generic_category(), path);
        }
    }

    static void receive(Greeted& greeted, const std::string& path) {
        iovec part{&greeted.welcome, sizeof greeted.welcome};
        alignas(cmsghdr) char control[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))] = {};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        const ssize_t got = ::recvmsg(greeted.socket.get(), &message, MSG_CMSG_CLOEXEC);
        if (got == 0) throw std::system_error(ECONNRESET, std::generic_category(), path);
        if (got < 0) throw std::system_error(errno, std::generic_category(), path);
        for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
            if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
            const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; ++i) {
                int fd;
                std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof fd);
                greeted.descriptors.emplace_back(fd);
            }
        }
        const Welcome& welcome = greeted.welcome;
        if (got != static_cast<ssize_t>(sizeof welcome) || welcome.magic != MAGIC || welcome.protocol != PROTOCOL)
            throw Refused{Fault::mismatch, 0};
    }

    // Sleeps on the socket: notices while the pool lives, the end of file when it does not.
    void listen() noexcept {
        pthread_setname_np(pthread_self(), "treadle-ring");
        Notice notice;
        while (true) {
            const ssize_t got = ::recv(socket_.get(), &notice, sizeof notice, 0);
            if (got < 0 && errno == EINTR) continue;
            if (got != static_cast<ssize_t>(sizeof notice)) break;
            if (notice.slot < SLOTS && state(static_cast<int>(notice.slot)) == ENDED) signal(static_cast<int>(notice.slot));
        }
        lost_.store(true);
        fail(~uint64_t{0});
    }

    // Tells it to the server with the word that the request ends by. Returns its phase: once it has ended it takes no more wishes.
    uint32_t wish(int slot, uint32_t what) noexcept {
        std::atomic<uint32_t>& state = ring().slots[slot].state;
        uint32_t now = state.load();
        while ((now & PHASES) == SUBMITTED && (now & what) == 0)
            if (state.compare_exchange_weak(now, now | what)) break;
        return now & PHASES;
    }

    // Whoever waits for these slots learns that no answer will come.
    void fail(uint64_t slots) noexcept {
        for (uint64_t bits = slots; bits != 0; bits &= bits - 1) {
            const int slot = std::countr_zero(bits);
            std::atomic<uint32_t>& state = ring().slots[slot].state;
            for (uint32_t now = state.load(); (now & PHASES) == SUBMITTED;)
                if (state.compare_exchange_weak(now, LOST)) break;
            futex_wake(state);
            signal(slot);
        }
    }

    void signal(int slot) noexcept {
        std::lock_guard lock(event_fds_mutex_);  // a descriptor is closed only after `forget_notify`
        const int fd = event_fds_[slot];
        const uint64_t one = 1;
        if (fd >= 0) [[maybe_unused]] const auto written = ::write(fd, &one, sizeof one);
    }

    void reclaim() {
        std::vector<Orphan> ended;  // their blocks go without the lock
        std::lock_guard lock(orphans_mutex_);
        for (size_t i = 0; i < orphans_.size();) {
            const uint32_t now = state(orphans_[i].slot);
            if (now != ENDED && now != LOST) {
                ++i;
                continue;
            }
            give_slot(orphans_[i].slot);
            ended.push_back(std::move(orphans_[i]));
            orphans_[i] = std::move(orphans_.back());
            orphans_.pop_back();
        }
    }

    void ring_doorbell() noexcept {
        const uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(doorbell_.get(), &one, sizeof one);  // a full counter has rung enough
    }

    static std::array<int, SLOTS> no_event_fds() noexcept {
        std::array<int, SLOTS> none;
        none.fill(-1);
        return none;
    }

    Ring& ring() const noexcept { return *reinterpret_cast<Ring*>(shared_.data()); }

    const Descriptor socket_, doorbell_;
    std::vector<Descriptor> hot_rows_;
    const Mapping shared_, memory_;
    Arena arena_;
    std::atomic<uint64_t> free_{~uint64_t{0}};
    std::atomic<bool> lost_{false};
    std::mutex closing_, event_fds_mutex_, orphans_mutex_, named_mutex_;
    std::array<int, SLOTS> event_fds_ = no_event_fds();
    std::vector<Orphan> orphans_;
    std::map<uint64_t, std::weak_ptr<Block>> named_;
    std::thread listener_;
};

}  // namespace treadle::dataplane::ring
