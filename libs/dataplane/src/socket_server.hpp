// The socket door: one thread accepts, and each connection has one of its own that helps to gather what it asked for.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>

#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "socket_connection.hpp"

namespace treadle::dataplane {

class SocketServer {
public:
    // `listeners`: bound, listening, non-blocking; owned from here on. `queue` outlives this. Throws std::system_error.
    SocketServer(Queue& queue, int64_t piece_rows, std::shared_ptr<Versions> versions, SocketLimits limits, std::vector<Descriptor> listeners)
        : shared_{queue, piece_rows, std::move(versions), limits, {}, {}, {}}, listeners_(std::move(listeners)) {
        const BlockedSignals blocked;
        acceptor_ = std::thread([this] { accept_all(); });
    }
    SocketServer(const SocketServer&) = delete;
    SocketServer& operator=(const SocketServer&) = delete;
    ~SocketServer() { close(); }

    // New requests are refused as unavailable; those in the works go on.
    void drain() noexcept { shared_.draining = true; }

    // Ends every connection and thread; returns when none is left.
    void close() {
        stopping_ = true;
        stop_.set();
        std::lock_guard closing(closing_);
        if (acceptor_.joinable()) acceptor_.join();
        for (Peer& peer : peers_) peer.connection.cut();
        for (Peer& peer : peers_)
            if (peer.thread.joinable()) peer.thread.join();
        peers_.clear();
        listeners_.clear();
    }

    const SocketCounters& counters() const noexcept { return shared_.counters; }

private:
    struct Peer {
        Peer(SocketShared& shared, Descriptor fd) : connection(shared, std::move(fd)) {}
        SocketConnection connection;
        std::thread thread;
        std::atomic<bool> over{false};
    };

    // Signals are for the threads that run Python.
    struct BlockedSignals {
        BlockedSignals() {
            sigset_t all;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
        }
        ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
        sigset_t before;
    };

    void accept_all() noexcept {
        pthread_setname_np(pthread_self(), "treadle-accept");
        std::vector<pollfd> polled{{stop_.fd(), POLLIN, 0}};
        for (const Descriptor& listener : listeners_) polled.push_back({listener.get(), POLLIN, 0});
        while (!stopping_) {
            if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
            for (size_t i = 1; i < polled.size(); ++i)
                if (polled[i].revents) accept_one(polled[i].fd);
        }
    }

    void accept_one(int listener) noexcept {
        Descriptor fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        peers_.remove_if([](Peer& peer) {
            if (peer.over) peer.thread.join();
            return peer.over.load();
        });
        if (!fd) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) poll_until(stop_.fd(), POLLIN, now_ns() + 50'000'000);  // until some leave
            return;
        }
        if (peers_.size() >= static_cast<size_t>(shared_.limits.connections_max)) return turn_away(fd);
        const int on = 1;
        ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // without effect on a Unix socket
        try {
            Peer& peer = peers_.emplace_back(shared_, std::move(fd));
            try {
                peer.thread = std::thread([this, &peer] { serve(peer); });
            } catch (...) {
                peers_.pop_back();
                throw;
            }
            ++shared_.counters.connections_total;
        } catch (const std::exception&) {  // no thread or memory left: the peer sees a closed connection and comes again
            ++shared_.counters.cut_total;
        }
    }

    void serve(Peer& peer) noexcept {
        pthread_setname_np(pthread_self(), "treadle-socket");
        ++shared_.counters.connections;
        peer.connection.run();
        peer.connection.cut();
        --shared_.counters.connections;
        peer.over = true;
    }

    void turn_away(const Descriptor& fd) noexcept {
        FrameHeader header = fault_frame(0, Fault::refused, 0);
        header.retry_ns = 100'000'000;
        [[maybe_unused]] const auto sent = ::send(fd.get(), &header, sizeof header, MSG_NOSIGNAL | MSG_DONTWAIT);
        ++shared_.counters.refused_total;
    }

    SocketShared shared_;
    std::vector<Descriptor> listeners_;
    Wakeup stop_;
    std::atomic<bool> stopping_{false};
    std::mutex closing_;
    std::list<Peer> peers_;  // the acceptor's, until it has ended
    std::thread acceptor_;
};

}  // namespace treadle::dataplane
