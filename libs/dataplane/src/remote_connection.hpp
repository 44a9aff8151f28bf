// A connection to an owner: sends requests, and puts what comes back where each reply wants it. Runs inside the reactor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reactor.hpp"
#include "remote_owner.hpp"
#include "remote_work.hpp"

namespace treadle::dataplane {

struct RemoteCounters {
    std::atomic<uint64_t> requests_total{0}, hedges_total{0}, hedges_won_total{0}, hedges_unpaid_total{0}, failovers_total{0}, late_total{0},
        bytes_total{0}, connects_total{0}, losses_total{0};
};

// Where a reply goes, and who hears how it ended. The connection holds it until then.
class Reply {
public:
    virtual ~Reply() = default;
    // Where byte `at` of the reply and those behind it go, and how many of them; null: nobody wants them.
    virtual std::pair<std::byte*, uint64_t> place(uint64_t at) noexcept = 0;
    virtual void arrived(uint64_t bytes) = 0;  // so many in all; the last call says that the reply is whole
    virtual void failed(const Verdict& why, std::string_view said) = 0;  // `said`: the owner's text
};

struct Connection final : Watcher, std::enable_shared_from_this<Connection> {
    static constexpr size_t FLIGHTS_MAX = 64;              // requests that wait for their reply
    static constexpr int64_t CONNECT_NS = 1'000'000'000;   // a peer that does not take the connection by then is not there
    static constexpr unsigned DEAD_MS = 5'000;

    Connection(Reactor& reactor, RemoteCounters& counters, Owner& owner) : reactor_(reactor), counters_(counters), owner_(owner), timer_(reactor.none()) {}

    // False: it cannot be made. Not finished when this returns; requests wait for it.
    bool open() {
        SocketAddress address;
        if (address.parse(owner_.address)) fd_ = address.connect(DEAD_MS);
        if (!fd_ || !reactor_.add(fd_.get(), EPOLLIN | EPOLLOUT, this)) return false;
        ++counters_.connects_total;
        timer_ = reactor_.at(now_ns() + CONNECT_NS, [this] {
            timer_ = reactor_.none();
            lose();
        });
        return true;
    }

    bool full() const noexcept { return flights_.size() >= FLIGHTS_MAX; }
    size_t flights() const noexcept { return flights_.size(); }

    // `header` has all but kind, id and length. May lose the connection, and then tells `reply`.
    // `request`: what to abandon it by.
    void send(FrameHeader header, AskRef work, std::shared_ptr<Reply> reply, uint64_t& request) {
        request = header.request = ++last_request_;
        header.kind = static_cast<uint16_t>(work->kind);
        header.layer_count = work->layer_count;
        header.body_bytes = work->body.size();
        flights_[request] = Flight{std::move(reply), work, 0, now_ns()};
        out_.push_back({header, std::move(work), 0});
        if (connected_ && out_.size() == 1) flush();
    }

    // What is still to come for this request goes nowhere; nobody hears of its end.
    void abandon(uint64_t id) noexcept {
        const auto found = flights_.find(id);
        if (found != flights_.end()) found->second.reply.reset();
    }

    void ready(uint32_t events) override {
        if (!fd_) return;
        if (!connected_) return finish_connect(events);
        if (events & EPOLLOUT) flush();
        if (fd_ && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) receive();
    }

    void broken() noexcept override {
        try {
            lose();
        } catch (const std::exception&) {  // the replies' callers have deadlines
        }
    }

    // Over, whatever waits here fails as unavailable.
    void lose() {
        if (!fd_) return;
        ++counters_.losses_total;
        owner_.failed(now_ns());
        shut();
        auto flights = std::move(flights_);
        flights_.clear();
        for (auto& [id, flight] : flights)
            if (flight.reply) flight.reply->failed({Fault::unavailable}, "");
    }

    // Over without a word.
    void shut() {
        if (!fd_) return;
        reactor_.forget(timer_);
        auto& all = owner_.connections;
        reactor_.remove(fd_.get(), shared_from_this());
        fd_ = Descriptor();
        all.erase(std::remove_if(all.begin(), all.end(), [this](const auto& each) { return each.get() == this; }), all.end());
    }

private:
    static constexpr int FRAMES_MAX = 64;  // of one look at the socket; others have their turn then
    static constexpr int PARTS_MAX = 8;

    struct Flight {
        std::shared_ptr<Reply> reply;  // null: abandoned
        AskRef work;
        uint64_t received;
        int64_t sent_ns;
    };
    struct Outgoing {
        FrameHeader header;
        AskRef work;
        size_t sent;
    };

    void finish_connect(uint32_t events) {
        int error = 0;
        socklen_t length = sizeof error;
        ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
        if (error != 0 || (events & (EPOLLHUP | EPOLLERR))) return lose();
        connected_ = true;
        reactor_.forget(timer_);
        flush();
    }

    void flush() {
        while (!out_.empty()) {
            Outgoing& next = out_.front();
            const size_t total = sizeof next.header + next.work->body.size();
            iovec parts[2];
            int count = 0;
            if (next.sent < sizeof next.header) parts[count++] = {reinterpret_cast<std::byte*>(&next.header) + next.sent, sizeof next.header - next.sent};
            const size_t body_sent = next.sent > sizeof next.header ? next.sent - sizeof next.header : 0;
            if (body_sent < next.work->body.size())
                parts[count++] = {const_cast<std::byte*>(next.work->body.data()) + body_sent, next.work->body.size() - body_sent};
            msghdr message{};
            message.msg_iov = parts;
            message.msg_iovlen = static_cast<size_t>(count);
            const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0 && errno != EAGAIN) return lose();
            if (sent > 0) next.sent += static_cast<size_t>(sent);
            if (sent < 0 || next.sent < total) {
                if (sent < 0) break;
                continue;
            }
            out_.pop_front();
        }
        const uint32_t events = out_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
        if (events != watched_) reactor_.change(fd_.get(), watched_ = events, this);
    }

    void receive() {
        for (int frames = 0; fd_ && frames < FRAMES_MAX;) {
            const ssize_t got = body_left_ > 0 ? receive_body() : receive_header();
            if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return lose();
            if (got < 0 && errno == EAGAIN) return;
            if (got > 0 && header_got_ == sizeof header_ && body_left_ == 0) {
                ++frames;
                header_got_ = 0;
                if (!end_frame()) return lose();
            }
        }
    }

    ssize_t receive_header() {
        const ssize_t got = ::recv(fd_.get(), reinterpret_cast<std::byte*>(&header_) + header_got_, sizeof header_ - header_got_, 0);
        if (got <= 0) return got;
        header_got_ += static_cast<size_t>(got);
        if (header_got_ == sizeof header_ && !begin_frame()) {
            errno = EPROTO;
            return -1;
        }
        return got;
    }

    // Nothing of a frame that does not follow from what was asked is believed.
    bool begin_frame() {
        if (!is_frame(header_)) return false;
        body_left_ = header_.body_bytes;
        if (header_.kind == static_cast<uint16_t>(Kind::fault)) return header_.body_bytes <= FAULT_TEXT_MAX;
        const auto found = flights_.find(header_.request);
        if (header_.kind != static_cast<uint16_t>(Kind::rows) || found == flights_.end()) return false;
        const Flight& flight = found->second;
        return header_.total_bytes == flight.work->reply_bytes && header_.offset == flight.received &&
               header_.body_bytes <= flight.work->reply_bytes - flight.received && (header_.body_bytes > 0 || flight.work->reply_bytes == 0);
    }

    ssize_t receive_body() {
        if (header_.kind == static_cast<uint16_t>(Kind::fault)) {
            const ssize_t got = ::recv(fd_.get(), scratch() + (header_.body_bytes - body_left_), body_left_, 0);
            if (got > 0) body_left_ -= static_cast<uint64_t>(got);
            return got;
        }
        Flight& flight = flights_.find(header_.request)->second;
        iovec parts[PARTS_MAX];
        int count = 0;
        for (uint64_t at = flight.received, left = body_left_; left > 0 && count < PARTS_MAX; ++count) {
            auto [to, bytes] = flight.reply ? flight.reply->place(at) : std::pair<std::byte*, uint64_t>(nullptr, left);
            if (!to) {
                to = scratch();
                bytes = std::min<uint64_t>(bytes, SCRATCH_BYTES);
            }
            bytes = std::min(bytes, left);
            parts[count] = {to, bytes};
            at += bytes;
            left -= bytes;
        }
        const ssize_t got = ::readv(fd_.get(), parts, count);
        if (got <= 0) return got;
        body_left_ -= static_cast<uint64_t>(got);
        flight.received += static_cast<uint64_t>(got);
        counters_.bytes_total += static_cast<uint64_t>(got);
        if (flight.received < flight.work->reply_bytes && flight.reply) flight.reply->arrived(flight.received);
        return got;
    }

    bool end_frame() {
        const auto found = flights_.find(header_.request);
        if (header_.kind == static_cast<uint16_t>(Kind::fault)) {
            if (found == flights_.end()) return false;  // turned away, or not our request: nothing more will come
            const Flight flight = std::move(found->second);
            flights_.erase(found);
            owner_.answered();
            if (flight.reply) flight.reply->failed(told(), {reinterpret_cast<const char*>(scratch()), header_.body_bytes});
            return true;
        }
        if (found->second.received < found->second.work->reply_bytes) return true;
        const Flight flight = std::move(found->second);
        flights_.erase(found);
        owner_.answered();
        owner_.latency.took(flight.received, now_ns() - flight.sent_ns);
        if (flight.reply) flight.reply->arrived(flight.received);
        return true;
    }

    // What a fault frame says, in this process's time.
    Verdict told() const noexcept {
        Verdict verdict{Fault::internal};
        if (header_.fault > 0 && header_.fault <= static_cast<int32_t>(Fault::internal)) verdict.fault = static_cast<Fault>(header_.fault);
        if (header_.deadline_ns > 0) verdict.predicted_finish_ns = now_ns() + std::min(header_.deadline_ns, RELATIVE_NS_MAX);
        verdict.retry_after_ns = std::clamp<int64_t>(header_.retry_ns, 0, RELATIVE_NS_MAX);
        if (header_.layer_count <= static_cast<uint32_t>(Reason::late)) verdict.reason = static_cast<Reason>(header_.layer_count);
        return verdict;
    }

    static constexpr size_t SCRATCH_BYTES = 256u << 10;
    std::byte* scratch() {
        if (!scratch_) scratch_ = std::make_unique_for_overwrite<std::byte[]>(SCRATCH_BYTES);
        return scratch_.get();
    }

    Reactor& reactor_;
    RemoteCounters& counters_;
    Owner& owner_;  // has this among its connections
    Descriptor fd_;
    bool connected_ = false;
    uint32_t watched_ = EPOLLIN | EPOLLOUT;
    Reactor::TimerRef timer_;
    uint64_t last_request_ = 0;
    std::unordered_map<uint64_t, Flight> flights_;
    std::deque<Outgoing> out_;
    FrameHeader header_;
    size_t header_got_ = 0;
    uint64_t body_left_ = 0;
    std::unique_ptr<std::byte[]> scratch_;
};

// What the clients of one process share: the thread, the owners' connections, the counters.
class Hub {
public:
    // An owner's connections are shut on the reactor's thread when nobody knows the owner any more.
    OwnerRef owner(const std::string& address) {
        std::lock_guard lock(mutex_);
        std::erase_if(owners_, [](const auto& each) { return each.second.expired(); });
        std::weak_ptr<Owner>& known = owners_[address];
        OwnerRef owner = known.lock();
        if (!owner) known = owner = OwnerRef(new Owner(address), [reactor = reactor](Owner* gone) {
            const auto end = [gone] {
                for (const auto& each : std::vector<std::shared_ptr<Connection>>(gone->connections)) each->shut();
                delete gone;
            };
            if (!reactor->post(end)) delete gone;
        });
        return owner;
    }

    const ReactorRef reactor = std::make_shared<Reactor>();
    RemoteCounters counters;

private:
    std::mutex mutex_;
    std::map<std::string, std::weak_ptr<Owner>> owners_;
};
using HubRef = std::shared_ptr<Hub>;

}  // namespace treadle::dataplane
