// One request of a client in flight: from its slot to its rows, which are in a block of the arena or are copied out of one.
#pragma once

#include <cstring>
#include <utility>

#include "ring_client.hpp"

namespace treadle::dataplane::ring {

inline constexpr int64_t STOP_NS_MAX = 5'000'000'000;  // how long a pool may take to stop writing to memory that stays with the caller
inline constexpr int64_t STOP_COPIED_NS_MAX = 1'000'000;  // the same where rows are copied: late ones are given up

// Where the rows of a request go. `copy_to` null: they stay in the block.
struct Target {
    Client::BlockRef block;
    uint64_t at = 0;               // offset in the arena
    std::byte* copy_to = nullptr;  // the caller's own memory, alive as long as the call
};

// Of one thread at a time.
class Call {
public:
    Call(std::shared_ptr<Client> client, int slot, Client::BlockRef in, Target target, int64_t row_count, int64_t row_bytes)
        : submitted_ns(now_ns()), client_(std::move(client)), in_(std::move(in)), target_(std::move(target)), row_count_(row_count),
          row_bytes_(row_bytes), slot_(slot) {}
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
        close_event_fd();
        if (slot_ >= 0) client_->abandon(slot_, std::move(in_), std::move(target_.block));
    }

    // Before it was rung for: as if it had never been.
    void withdraw() {
        client_->give_slot(std::exchange(slot_, -1));
        answer_.fault = static_cast<int64_t>(Fault::unavailable);
    }

    // Nothing more is written to the rows; what the answer says holds from here on.
    bool ended() {
        if (slot_ < 0) return true;
        const uint32_t now = client_->state(slot_);
        if (now != ENDED && now != LOST) return false;
        settle(now == ENDED);
        return true;
    }

    bool wait_until(int64_t until_ns) {
        if (slot_ < 0) return true;
        client_->wait(slot_, until_ns);
        return ended();
    }

    // Ask for the end; what is in flight runs to it.
    void stop() {
        if (slot_ < 0 || stopping_) return;
        stopping_ = true;
        client_->stop(slot_);
    }

    bool copies() const noexcept { return target_.copy_to != nullptr; }

    // Of one that copies, and was stopped: its rows are none, what the pool writes still goes to blocks that nobody takes before it ends.
    void leave() {
        if (ended()) return;
        answer_ = {static_cast<int64_t>(Fault::unavailable), 0, 0, 0, 0, 0, now_ns()};
        if (event_fd_ >= 0) {
            client_->forget_notify(slot_);
            signal();
        }
        client_->abandon(std::exchange(slot_, -1), std::move(in_), std::move(target_.block));
    }

    // The pool does not answer any more: this connection is given up, and nothing of what it holds is used again.
    void give_up() {
        client_->close();
        ended();
    }

    // Once it has ended. A stopped request has no fault: its rows are those that were there.
    Fault fault() const noexcept { return stopping_ && answer_.fault == static_cast<int64_t>(Fault::unavailable) ? Fault::none : static_cast<Fault>(answer_.fault); }
    const Answer& answer() const noexcept { return answer_; }
    int64_t row_count() const noexcept { return row_count_; }
    bool complete() const noexcept { return slot_ < 0 && answer_.fault == 0 && answer_.rows_done == row_count_; }

    int event_fd() {
        if (event_fd_ < 0) {
            event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
            if (event_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
            if (!ended()) {
                client_->notify(slot_, event_fd_);
            } else {
                signal();
            }
        }
        return event_fd_;
    }

    void close_event_fd() noexcept {
        if (event_fd_ < 0) return;
        if (slot_ >= 0) client_->forget_notify(slot_);
        ::close(std::exchange(event_fd_, -1));
    }

    const int64_t submitted_ns;

private:
    void settle(bool answered) {
        answer_ = answered ? client_->answer(slot_) : Answer{static_cast<int64_t>(Fault::unavailable), 0, 0, 0, 0, 0, now_ns()};
        answer_.rows_done = std::clamp<int64_t>(answer_.rows_done, 0, row_count_);
        if (target_.copy_to != nullptr)
            std::memcpy(target_.copy_to, target_.block->data(), static_cast<size_t>(answer_.rows_done * row_bytes_));
        if (event_fd_ >= 0) {  // the notice may be on its way still: whoever watches must not depend on it
            client_->forget_notify(slot_);
            signal();
        }
        client_->give_slot(std::exchange(slot_, -1));
        in_.reset();
        target_.block.reset();
    }

    void signal() noexcept {
        const uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(event_fd_, &one, sizeof one);
    }

    const std::shared_ptr<Client> client_;
    Client::BlockRef in_;
    Target target_;
    const int64_t row_count_, row_bytes_;
    int slot_;
    bool stopping_ = false;
    int event_fd_ = -1;
    Answer answer_{};
};

}  // namespace treadle::dataplane::ring
