// One client of the ring, as the server keeps it: its memory, what it has in flight, and how a slot becomes a ticket and an answer.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

#include "jobs.hpp"
#include "queue.hpp"
#include "ring.hpp"
#include "windows_copy.hpp"

namespace treadle::dataplane::ring {

// A memfd of fixed size that nobody can resize or seal further: a truncated mapping would end the other side with SIGBUS.
inline Descriptor sealed_memory(const char* name, size_t bytes) {
    Descriptor memory(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (memory.get() < 0 || ::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0 ||
        ::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        throw std::system_error(errno, std::generic_category(), name);
    return memory;
}

struct Tally {
    std::atomic<uint64_t> requests{0}, rows{0}, refused{0}, failed{0};
};

class Session : public std::enable_shared_from_this<Session> {
public:
    // Throws std::system_error when the system grants no memory.
    Session(Descriptor socket, int32_t tenant, size_t arena_bytes, Tally& tally)
        : tenant(tenant),
          ring_memory(sealed_memory("treadle-ring", sizeof(Ring))),
          arena_memory(sealed_memory("treadle-arena", arena_bytes)),
          doorbell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
          socket_(std::move(socket)),
          shared_(ring_memory.get(), sizeof(Ring), PROT_READ | PROT_WRITE),
          arena_(arena_memory.get(), arena_bytes, PROT_READ | PROT_WRITE),
          tally_(tally) {
        if (doorbell.get() < 0 || !shared_ || !arena_) throw std::system_error(errno, std::generic_category(), "ring");
    }

    int socket() const noexcept { return socket_.get(); }

    // Takes what was submitted and stopped since the last call. False: the client does not keep to the rules.
    bool take(Queue& queue, const Versions& versions, int64_t piece_rows) {
        for (uint64_t bits = ring().submitted.exchange(0); bits != 0; bits &= bits - 1) {
            const int slot = std::countr_zero(bits);
            if (busy_.fetch_or(uint64_t{1} << slot) >> slot & 1) return false;  // its first request has not ended
            submit(queue, versions, piece_rows, slot);
            stop_if_wished(queue, slot);
        }
        for (uint64_t bits = ring().stopped.exchange(0); bits != 0; bits &= bits - 1) stop_if_wished(queue, std::countr_zero(bits));
        return true;
    }

    // Nobody will look at the answers any more.
    void stop_all(Queue& queue) {
        for (int slot = 0; slot < SLOTS; ++slot)
            if (const TicketRef ticket = ticket_of(slot)) queue.stop(ticket);
    }

    bool idle() const noexcept { return busy_.load() == 0; }

    const int32_t tenant;
    const Descriptor ring_memory, arena_memory, doorbell;

private:
    // What a request in flight holds. The version goes at the end of the ticket, which others may keep for longer.
    struct Work {
        VersionRef version;
        const Layer* layer = nullptr;
        WindowsCopy windows;
        const std::byte* ids = nullptr;
        std::byte* out = nullptr;
        int64_t rows_per_unit = 1;
    };
    using WorkRef = std::shared_ptr<Work>;

    Ring& ring() const noexcept { return *reinterpret_cast<Ring*>(shared_.data()); }

    TicketRef ticket_of(int slot) {
        std::lock_guard lock(mutex_);
        return tickets_[slot];
    }

    // The bit alone may speak of a request that has ended.
    void stop_if_wished(Queue& queue, int slot) {
        if ((ring().slots[slot].state.load() & ring::STOPPED) == 0) return;
        if (const TicketRef ticket = ticket_of(slot)) queue.stop(ticket);
    }

    void submit(Queue& queue, const Versions& versions, int64_t piece_rows, int slot) {
        tally_.requests.fetch_add(1, std::memory_order_relaxed);
        const Request request = copy_in(ring().slots[slot].request);
        const auto work = std::make_shared<Work>();
        Job job;
        Fault fault = prepare(request, versions, piece_rows, work, job);
        Verdict verdict{fault};
        if (fault == Fault::none) {
            const auto ticket = std::make_shared<Ticket>(std::move(job), request.deadline_ns, nullptr, tenant);
            ticket->on_end = [session = shared_from_this(), work, slot](const Ticket& ended) { session->ended(ended, *work, slot); };
            {
                std::lock_guard lock(mutex_);
                tickets_[slot] = ticket;
            }
            verdict = queue.submit(ticket, false);
            if (verdict) return;
            forget(slot);
        }
        tally_.refused.fetch_add(1, std::memory_order_relaxed);
        answer(slot, {static_cast<int64_t>(verdict.fault), 0, verdict.predicted_finish_ns, verdict.retry_after_ns,
                      static_cast<int64_t>(verdict.reason), 0, now_ns()});
    }

    Fault prepare(const Request& request, const Versions& versions, int64_t piece_rows, const WorkRef& work, Job& job) const {
        Digest digest;
        static_assert(sizeof digest == sizeof request.version);
        std::memcpy(digest.data(), request.version.data(), sizeof digest);
        work->version = versions.find(digest);
        if (!work->version || request.layer != static_cast<int32_t>(request.layer)) return Fault::not_found;
        work->layer = work->version->layer(static_cast<int32_t>(request.layer));
        if (work->layer == nullptr) return Fault::not_found;
        const bool hashed = request.kind == static_cast<uint64_t>(Kind::lookup);
        if (!hashed && request.kind != static_cast<uint64_t>(Kind::gather)) return Fault::invalid;
        const int64_t columns = hashed ? work->layer->plan->columns() : 1;
        if (request.deadline_ns < 0 || request.count < 0 || request.count > (hashed ? TOKENS_MAX : ROWS_MAX)) return Fault::invalid;
        const uint64_t out_bytes = static_cast<uint64_t>(request.count) * static_cast<uint64_t>(columns * work->layer->rows->row_bytes);
        work->out = at(request.out_at, out_bytes);
        work->ids = at(request.in_at, static_cast<uint64_t>(request.count) * sizeof(int64_t));
        work->rows_per_unit = columns;
        const RowStore& table = *work->layer->rows;
        if (work->out == nullptr || work->ids == nullptr) return Fault::invalid;
        if (hashed) {
            if (const Fault fault = copy_windows(request, *work); fault != Fault::none) return fault;
            job = {[work](int64_t first, int64_t last) { return look_up(*work, first, last); }, request.count,
                   std::max<int64_t>(1, piece_rows / columns), columns, table.row_bytes, table.tier};
        } else {
            job = {[work](int64_t first, int64_t last) { return gather(*work, first, last); }, request.count, piece_rows, 1,
                   table.row_bytes, table.tier};
        }
        return Fault::none;
    }

    Fault copy_windows(const Request& request, Work& work) const {
        const int64_t requests = request.request_count, columns = request.lookback_columns;
        if (requests < 0 || requests > TOKENS_MAX || columns < 0 || columns > LOOKBACK_MAX) return Fault::invalid;
        WindowsCopy& copy = work.windows;
        copy.lookback_columns = columns;
        copy.tokens.resize(static_cast<size_t>(request.count));
        copy.starts.resize(static_cast<size_t>(requests) + 1);
        copy.lookback.resize(static_cast<size_t>(requests * columns));
        if (!copy_array(request.in_at, copy.tokens) || !copy_array(request.starts_at, copy.starts) ||
            !copy_array(request.lookback_at, copy.lookback) || !copy_flags(request.dead_at, copy.tokens.size(), copy.dead) ||
            !copy_flags(request.lookback_dead_at, copy.lookback.size(), copy.lookback_dead))
            return Fault::invalid;
        return check_windows(work.layer->plan->view, copy);
    }

    template <typename T>
    bool copy_array(uint64_t from, std::vector<T>& to) const {
        const std::byte* bytes = at(from, to.size() * sizeof(T));
        if (bytes == nullptr) return false;
        std::memcpy(to.data(), bytes, to.size() * sizeof(T));
        return true;
    }

    bool copy_flags(uint64_t from, size_t count, std::unique_ptr<bool[]>& to) const {
        if (from == NOWHERE) return true;
        const std::byte* bytes = at(from, count);
        if (bytes == nullptr) return false;
        to = std::make_unique<bool[]>(count);
        for (size_t i = 0; i < count; ++i) to[i] = bytes[i] != std::byte{0};
        return true;
    }

    // Where that lies in the arena, on a boundary of 8 bytes; null: outside.
    std::byte* at(uint64_t offset, uint64_t bytes) const noexcept {
        if (offset % 8 != 0 || offset > arena_.size() || bytes > arena_.size() - offset) return nullptr;
        return arena_.data() + offset;
    }

    // Ids are copied block by block and checked as copies: what the client writes meanwhile changes nothing that was checked.
    static Fault gather(const Work& work, int64_t first, int64_t last) noexcept {
        int64_t rows[kernels::LOOKUP_IDS];
        RowStore& table = *work.layer->rows;
        for (int64_t begin = first; begin < last; begin += kernels::LOOKUP_IDS) {
            const int64_t count = std::min(last - begin, kernels::LOOKUP_IDS);
            std::memcpy(rows, work.ids + begin * 8, static_cast<size_t>(count) * 8);
            asm volatile("" : : "r"(rows) : "memory");  // the copy, not the arena, is what is read from here on
            if (table.first_bad(rows, count) >= 0) return Fault::out_of_range;
            if (const Fault fault = table.gather(rows, count, work.out + begin * table.row_bytes); fault != Fault::none) return fault;
        }
        return Fault::none;
    }

    static Fault look_up(const Work& work, int64_t first, int64_t last) noexcept {
        const Layer& layer = *work.layer;
        std::byte* out = work.out + first * work.rows_per_unit * layer.rows->row_bytes;
        return lookup_rows(layer.plan->view, work.windows.view(), first, last, *layer.rows, out);
    }

    void forget(int slot) {
        TicketRef ticket;  // dropped without the lock
        std::lock_guard lock(mutex_);
        ticket.swap(tickets_[slot]);
    }

    void ended(const Ticket& ticket, Work& work, int slot) noexcept {
        const Fault fault = ticket.state() == State::complete ? Fault::none : ticket.state() == State::failed ? ticket.fault : Fault::unavailable;
        const int64_t rows = ticket.done_units() * work.rows_per_unit;
        if (fault != Fault::none) tally_.failed.fetch_add(1, std::memory_order_relaxed);
        tally_.rows.fetch_add(static_cast<uint64_t>(rows), std::memory_order_relaxed);
        work.version.reset();
        forget(slot);
        answer(slot, {static_cast<int64_t>(fault), rows, 0, 0, 0, ticket.started_ns, ticket.finished_ns});
    }

    void answer(int slot, const Answer& answer) noexcept {
        Slot& shared = ring().slots[slot];
        copy_out(answer, shared.answer);
        busy_.fetch_and(~(uint64_t{1} << slot));  // before the client can know that the slot is free
        const uint32_t before = shared.state.exchange(ring::ENDED);  // from here on the slot may hold another request
        if (before & ring::AWAITED) futex_wake(shared.state);
        if ((before & ring::NOTIFIED) == 0) return;
        const Notice notice{static_cast<uint32_t>(slot)};
        // A client that lets its notices pile up loses its connection rather than a notice.
        if (::send(socket_.get(), &notice, sizeof notice, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) ::shutdown(socket_.get(), SHUT_RDWR);
    }

    const Descriptor socket_;
    const Mapping shared_, arena_;
    Tally& tally_;
    std::atomic<uint64_t> busy_{0};
    std::mutex mutex_;
    TicketRef tickets_[SLOTS];
};

}  // namespace treadle::dataplane::ring
