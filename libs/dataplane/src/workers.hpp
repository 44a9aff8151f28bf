// The threads that run pieces. They know no Python, take no lock of its, and never wait for each other.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "queue.hpp"

namespace treadle::dataplane {

class Workers {
public:
    // Throws std::system_error when the system grants no more threads. `queue` outlives them.
    Workers(Queue& queue, int count) : queue_(queue) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that run Python
        try {
            for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            join();
            throw;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;
    ~Workers() { join(); }

    // Closes the queue; returns when the pieces in flight have run.
    void join() {
        queue_.close();
        std::lock_guard lock(joining_);
        for (auto& thread : threads_)
            if (thread.joinable()) thread.join();
    }

private:
    void run() {
        pthread_setname_np(pthread_self(), "treadle-edf");
        while (const auto claim = queue_.claim()) {
            const int64_t start = now_ns();
            const Fault fault = claim->ticket->run(claim->first, claim->last);
            queue_.finish(*claim, now_ns() - start, fault);
        }
    }

    Queue& queue_;
    std::mutex joining_;  // two callers may close at once
    std::vector<std::thread> threads_;
};

}  // namespace treadle::dataplane
