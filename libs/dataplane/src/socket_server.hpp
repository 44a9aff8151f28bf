// The socket door: one thread accepts, and each connection has one of its own that helps to gather what it asked for.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
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
        std::vector<pollfd> polled{{stop_.fd(), POLLIN, 0}, {shared_.news.fd(), POLLIN, 0}};
        for (const Descriptor& listener : listeners_) polled.push_back({listener.get(), POLLIN, 0});
        while (!stopping_) {
            for (pollfd& each : polled) each.revents = 0;
            const int64_t full_ns = full_for_ns();
            const int wait_ms = full_ns > 0 ? static_cast<int>(full_ns / 1'000'000) + 1 : -1;
            if (::poll(polled.data(), full_ns > 0 ? 2 : polled.size(), wait_ms) < 0 && errno != EINTR) return;
            if (polled[1].revents) shared_.news.clear();
            forget_ended();
            for (size_t i = 2; i < polled.size(); ++i)
                if (polled[i].revents && full_for_ns() <= 0) accept_one(polled[i].fd);
        }
    }

    void forget_ended() noexcept {
        peers_.remove_if([](Peer& peer) {
            if (peer.over) peer.thread.join();
            return peer.over.load();
        });
    }

    // Until the stranger who came first has been silent for long enough to lose his place; not above 0: there is one.
    int64_t full_for_ns() const noexcept {
        const Peer* first = nullptr;
        int strangers = 0;
        for (const Peer& peer : peers_)
            if (peer.connection.takes_strangers_place() && !peer.over) {
                if (!first) first = &peer;
                ++strangers;
            }
        return strangers < STRANGERS_MAX ? 0 : first->connection.since_ns() + STRANGER_NS - now_ns();
    }

    // He who keeps silent longest yields.
    void make_room() noexcept {
        const auto stranger = [](const Peer& peer) { return peer.connection.takes_strangers_place() && !peer.over; };
        if (std::count_if(peers_.begin(), peers_.end(), stranger) < STRANGERS_MAX) return;
        if (const auto first = std::find_if(peers_.begin(), peers_.end(), stranger); first != peers_.end()) first->connection.yield();
    }

    void accept_one(int listener) noexcept {
        Descriptor fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!fd) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) poll_until(stop_.fd(), POLLIN, now_ns() + 50'000'000);  // until some leave
            return;
        }
        make_room();
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
        --shared_.counters.connections;
        peer.over = true;
        shared_.news.set();
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
