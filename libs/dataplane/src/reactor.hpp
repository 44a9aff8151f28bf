// One thread that waits for all sockets and timers of a client process. What runs here never blocks, and never beside another: who
// posts an action while nothing runs is let in and runs it at once, which saves a request the way through a second thread.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "descriptors.hpp"

namespace treadle::dataplane {

// Something with a descriptor. Called on the reactor's thread.
class Watcher {
public:
    virtual ~Watcher() = default;
    virtual void ready(uint32_t events) = 0;
    virtual void broken() noexcept = 0;  // `ready` threw: memory is over
};

class Reactor {
public:
    using Action = std::function<void()>;
    using Timers = std::multimap<int64_t, Action>;
    using TimerRef = Timers::iterator;

    // Throws std::system_error when the system grants no descriptor or thread.
    Reactor() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
        if (!epoll_ || !timer_) throw std::system_error(errno, std::generic_category(), "epoll");
        add(wakeup_.fd(), EPOLLIN, &posted_something_);
        add(timer_.get(), EPOLLIN, &timer_due_);
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
    Reactor(const Reactor&) = delete;
    Reactor& operator=(const Reactor&) = delete;
    ~Reactor() { close(); }

    // From any thread: `action` runs, now or soon, in order. False, and it will not, once the reactor is closed.
    bool post(Action action) {
        std::unique_lock lock(mutex_);
        if (closed_) return false;
        if (posted_.empty() && inside_ != this && running_.try_lock()) {
            lock.unlock();
            const std::lock_guard running(running_, std::adopt_lock);
            inside_ = this;
            act(action);
            inside_ = nullptr;
            return true;
        }
        posted_.push_back(std::move(action));
        const bool wake = posted_.size() == 1;
        lock.unlock();
        if (wake) wakeup_.set();
        return true;
    }

    // Runs what was posted, then ends the thread. Whoever has sockets here closes them before.
    void close() {
        {
            std::lock_guard lock(mutex_);
            closed_ = true;
        }
        wakeup_.set();
        std::lock_guard closing(closing_);
        if (thread_.joinable()) thread_.join();
    }

    // -- from inside only: what runs here --

    TimerRef none() noexcept { return timers_.end(); }

    TimerRef at(int64_t ns, Action action) {
        const TimerRef timer = timers_.emplace(ns, std::move(action));
        arm();
        return timer;
    }

    void forget(TimerRef& timer) noexcept {
        if (timer != timers_.end()) timers_.erase(timer);
        timer = timers_.end();
    }

    bool add(int fd, uint32_t events, Watcher* watcher) noexcept { return control(EPOLL_CTL_ADD, fd, events, watcher); }
    void change(int fd, uint32_t events, Watcher* watcher) noexcept { control(EPOLL_CTL_MOD, fd, events, watcher); }

    // No event of `fd` is told any more; `watcher` lives until those of this round are done.
    void remove(int fd, std::shared_ptr<Watcher> watcher) {
        control(EPOLL_CTL_DEL, fd, 0, nullptr);
        removed_.push_back(std::move(watcher));
    }

private:
    static constexpr int EVENTS_MAX = 64;

    struct Flag final : Watcher {
        void ready(uint32_t) override { set = true; }
        void broken() noexcept override {}
        bool set = false;
    };

    void run() noexcept {
        pthread_setname_np(pthread_self(), "treadle-reactor");
        epoll_event events[EVENTS_MAX];
        for (;;) {
            const int count = ::epoll_wait(epoll_.get(), events, EVENTS_MAX, -1);
            const std::lock_guard running(running_);
            inside_ = this;
            for (int i = 0; i < count; ++i) tell(*static_cast<Watcher*>(events[i].data.ptr), events[i].events);
            removed_.clear();
            run_timers();
            const bool goes_on = run_posted();
            inside_ = nullptr;
            if (!goes_on) return;
        }
    }

    // A watcher that was removed earlier in this round is told nothing that matters: it knows that it is closed.
    void tell(Watcher& watcher, uint32_t events) noexcept {
        try {
            watcher.ready(events);
        } catch (const std::exception&) {
            watcher.broken();
        }
    }

    bool run_posted() noexcept {
        if (std::exchange(posted_something_.set, false)) wakeup_.clear();
        std::vector<Action> actions;
        bool closed;
        {
            std::lock_guard lock(mutex_);
            actions.swap(posted_);
            closed = closed_;
        }
        for (Action& action : actions) act(action);
        return !closed;
    }

    void run_timers() noexcept {
        if (std::exchange(timer_due_.set, false)) {
            uint64_t expirations;
            [[maybe_unused]] const auto got = ::read(timer_.get(), &expirations, sizeof expirations);
            armed_ns_ = INT64_MAX;
        }
        while (!timers_.empty() && timers_.begin()->first <= now_ns()) {
            Action action = std::move(timers_.begin()->second);
            timers_.erase(timers_.begin());
            act(action);
        }
        arm();
    }

    void act(Action& action) noexcept {
        try {
            action();
        } catch (const std::exception&) {  // memory is over: whoever waits for it has a deadline of its own
        }
    }

    void arm() noexcept {
        if (timers_.empty() || timers_.begin()->first >= armed_ns_) return;
        armed_ns_ = timers_.begin()->first;
        const int64_t at = std::max<int64_t>(1, armed_ns_);
        itimerspec time{};
        time.it_value = {static_cast<time_t>(at / 1'000'000'000), static_cast<long>(at % 1'000'000'000)};
        ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &time, nullptr);
    }

    bool control(int what, int fd, uint32_t events, Watcher* watcher) noexcept {
        epoll_event event{};
        event.events = events;
        event.data.ptr = watcher;
        return ::epoll_ctl(epoll_.get(), what, fd, &event) == 0;
    }

    static inline thread_local const Reactor* inside_ = nullptr;  // the one in which this thread runs something
    Descriptor epoll_, timer_;
    Wakeup wakeup_;
    Flag posted_something_, timer_due_;
    Timers timers_;
    int64_t armed_ns_ = INT64_MAX;
    std::vector<std::shared_ptr<Watcher>> removed_;
    std::mutex running_, mutex_, closing_;
    std::vector<Action> posted_;
    bool closed_ = false;
    std::thread thread_;
};

using ReactorRef = std::shared_ptr<Reactor>;

}  // namespace treadle::dataplane
